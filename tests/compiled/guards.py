"""What a graph notices of a loss: the smallest step that can be compiled, with the library's settings and guards.

A whole step takes longer to trace, and the loss is a small part of it. Here the step is the value and the gradient of
the lower loss. What Dynamo does not see, and a key of the library does (hooks of parameters or of all modules, options
and groups), needs a whole step.
"""

import random

import torch

from bilevel_optim.compiled.entry import Entry, Settings
from bilevel_optim.compiled.program import Given
from bilevel_optim.compiled.pure import Results
from bilevel_optim.compiled.reasons import reason_of
from bilevel_optim.hypergradient import Estimate
from bilevel_optim.oracle.substitution import Substitution
from bilevel_optim.problem.vector import Vector


class Gradient:
    """Value and gradient of the lower loss, in place of a `PureStep`."""

    differentiates_twice = False
    buffers = ()

    def __init__(self, x, y):
        self.live_x, self.live_y = x, y

    def __call__(self, losses, tasks, drawn, random, state):
        values = [t.detach().requires_grad_() for t in (*state["x"], *state["y"])]
        with torch.enable_grad(), Substitution([*self.live_x, *self.live_y], values, stacked=False):
            value = losses["lower"]()
        gradients = torch.autograd.grad(value, values[1:], allow_unused=True)
        estimate = Estimate(value.detach(), Vector(), {"gradients": [*gradients]})
        return Results(estimate, None, [], {}, [], None)


# Entries of a state that this step has not.
NOTHING = {
    "buffers": [], "rates": [], "memory": {}, "upper_memory": {}, "tables": {}, "solver": None, "upper_solver": None,
    "numbers": {},
}  # fmt: skip


def noticed(make):
    """``"new graph"`` if a change is noticed, ``"value"`` if it is an argument, ``"stale"`` if neither; or a reason.

    ``make`` as in `test_losses.Twin`.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    random.seed(3)
    x, y = (torch.tensor(values, requires_grad=True) for values in ([0.5, -1.0, 0.2], [0.3, 0.1, -0.2]))
    made = make(x, y)
    loss, change, net = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    step = Gradient([x], [y, *([] if net is None else net.parameters())])
    entry = Entry(None, Settings(backend="eager"))
    entry.settle(step, None)
    state = {**NOTHING, "x": Vector([x]).detach().clone(), "y": Vector(step.live_y).detach().clone()}
    given = Given({"lower": loss}, None, {}, {}, state)

    def right():
        value = loss()
        return value.detach(), torch.autograd.grad(value, step.live_y, allow_unused=True)

    def known():
        found = entry.known(given)
        return None if found is None else (found.estimate.loss, found.estimate.diagnostics["gradients"])

    try:
        right()  # as the first step, which is eager
        entry.results(given, 0)
        assert same(known(), right())
        if change is None:
            return "value"
        change()
        found = known()
        return "new graph" if found is None else "value" if same(found, right()) else "stale"
    except AssertionError:
        raise
    except Exception as error:
        return reason_of(error)
    finally:
        getattr(loss, "undo", lambda: None)()
        torch.set_default_dtype(torch.float64)


def same(found, right):
    pairs = zip((found[0], *found[1]), (right[0], *right[1]), strict=True)
    return all((a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-12)) for a, b in pairs)

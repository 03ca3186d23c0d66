"""Checks of the ``.grad`` by which a step without losses moves x."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import warn
from ..problem.objective import version_of
from .transaction import RunState

__all__ = ["check_gradients", "warn_of_spent"]

NO_GRADIENT = """step() without losses moves x by its .grad, but no upper parameter has one. A step is one of

    optimizer.step(upper_loss, lower_loss)                          # all of it
    optimizer.backward(upper_loss, lower_loss); optimizer.step()    # in two parts, to clip .grad in between
    optimizer.step(lambda: optimizer.backward(upper_loss, lower_loss))

and the losses are functions: the optimizer calls and differentiates them, so loss.backward() is not called."""
UNSET_GRADIENT = (
    "step() without losses moves x by a .grad that no call of optimizer.backward(upper_loss, lower_loss) has set, so "
    "this step ignores the lower problem and does not change y. If the .grad comes from loss.backward(), replace that "
    "call and this one by optimizer.step(upper_loss, lower_loss)"
)
MOVED = (
    "x has changed between backward() and step(): if another optimizer has made its step along .grad, leave out "
    "optimizer.step(), which moves x along it once more"
)
AGAIN = (
    "step() without losses moves x once more along the hypergradient of the last step, which has moved it already. "
    "Leave out one of the two. If a trainer calls step(), use optimizer.backward(upper_loss, lower_loss) before it"
)
CHANGED = (
    "step() without losses moves x once more along the .grad of the last step, which has been changed in place since. "
    "If it still is the hypergradient (clipped, for example), it has moved x already: leave out one of the two steps. "
    "If it is a gradient of your own, assign it (x.grad = ...) instead of writing into that of the last step"
)


def check_gradients(moved: Sequence[Tensor], run: RunState) -> None:
    """Raise if no tensor of x has a ``.grad``; warn if `backward` has not set it, or if x has changed since.

    Args:
        moved: tensors of x that have one.
        run: state of the run.
    """
    if not moved:
        raise RuntimeError(NO_GRADIENT)
    if not run.steps and "unset gradient" not in run.warned:
        run.warned.add("unset gradient")
        warn(UNSET_GRADIENT)
    changed_since = any(version_of(t) != run.written.get(id(t), version_of(t)) for t in moved)
    if changed_since and "moved twice" not in run.warned:
        run.warned.add("moved twice")
        warn(MOVED)


def warn_of_spent(moved: Sequence[Tensor], run: RunState) -> None:
    """Warn if x has moved by a ``.grad`` that had moved it in a step with losses."""
    if run.spent is None:
        return
    gradients = [t.grad for t in moved]  # first, because a weak reference does not bring back an object of Python's
    reference, version = run.spent
    spent = reference()
    if spent is not None and any(gradient is spent for gradient in gradients):
        warn(AGAIN if version_of(spent) == version else CHANGED)

"""An exact method has the hypergradient of a dense reference, and its lower steps are torch's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilevel_optim.optimizer.declaration import FAMILIES

from ..problems import assign, flat
from ..registry import ROWS
from .runs import OPTIMIZERS, Case, Run, called
from .strategies import CHOICES, kinds

EXACT = [row for row in ROWS if row.tolerance is not None and row.declared.tasks != "required"]
SOLVING = [row for row in ROWS if row.declared.lower_steps and row.declared.solves and not row.declared.initial]


@st.composite
def settings_of(draw, family):
    """A method of the family that is exact in the limit, on a problem without noise."""
    row = draw(st.sampled_from([row for row in EXACT if row.declared.family == family]))
    kind, declared = draw(kinds(row, exact=True)), row.declared
    if kind.data == "tasks" and not declared.lower_steps:  # the state of a single loop restarts with new tasks
        kind = replace(kind, data="one")
    choices = ("sgd", "momentum") if declared.lower_optimizer != "none" else ("sgd",)
    options = {"vectorize": draw(st.sampled_from((True, False, 2)))}
    if declared.second_order and "hvp" not in row.options and row.cls.__name__ != "iMCN":
        options["hvp"] = draw(st.sampled_from(("exact", "exact", "finite-difference")))
    return Case(row.name, kind, draw(st.sampled_from(choices)), True, tuple(sorted(options.items())))


@pytest.mark.parametrize("family", [f for f in FAMILIES if any(row.declared.family == f for row in EXACT)])
def test_hypergradient(family, budget):
    @budget(3)
    @given(settings_of(family))
    def check(case):
        row, problem = case.registered, case.problem()
        truth, solution = problem.reference()
        lr, factor = problem.rate()
        left = max(1e-13, row.tolerance * 1e-4)
        steps = math.ceil(math.log(left) / math.log(max(factor, 0.75 if case.optimizer == "momentum" else 0.3)))
        more = {"lower_lr": lr, "lower_steps": steps, "warm_start": True, "lr": 0.1}
        if "linear_steps" in row.options:
            more["linear_steps"] = max(steps, row.options["linear_steps"])
        if row.options.get("direction") == "orthogonal":
            more["directions"] = sum(t.numel() for t in problem.upper_tensors)
        optimizer = case.made(problem, short=False, **more)
        if not row.declared.lower_steps:  # what else is tracked has to settle then
            assign(problem.lower_tensors, solution)
        for _ in range(2 if row.declared.lower_steps or "linear_steps" in row.options else steps):
            problem.apply(optimizer.backward)
        error = (flat(t.grad for t in problem.upper_tensors) - truth).norm() / (0.1 + truth.norm())
        differences = dict(case.options).get("hvp") == "finite-difference"
        allowed = 10 * max(row.tolerance, row.rounding, 1e-6 if differences else 0.0)
        assert error < allowed, f"{float(error):.2g}, allowed {allowed:.1g}"
        if row.declared.solves and problem.tasks is None and not row.declared.initial:
            torch.testing.assert_close(flat(problem.lower_tensors), flat(solution), rtol=1e-4, atol=1e-4)

    check()


@st.composite
def solves_of(draw, family):
    """A method of the family whose lower steps an optimizer makes, and how many steps where."""
    row = draw(st.sampled_from([row for row in SOLVING if row.declared.family == family]))
    kind = draw(kinds(row, exact=True).filter(lambda kind: kind.data != "tasks"))  # then y is a mean over the tasks
    choices = [o for o in CHOICES[row.declared.lower_optimizer] if o != "lbfgs" or not kind.groups]
    options = {"lower_steps": draw(st.integers(1, 3)), "lr": 0.0, "lower_lr": 0.1, "warm_start": True}
    options |= {"growth": 0.0} if row.cls.__name__ in ("BA", "BSA") else {}
    paths = family == "zeroth-order"  # which begin with an optimizer of their own in each step
    ways = st.lists(st.sampled_from(("step", "load", "deepcopy", "pickle")), min_size=1, max_size=1 if paths else 3)
    return Case(row.name, kind, draw(st.sampled_from(choices)), True, tuple(sorted(options.items()))), draw(ways)


@pytest.mark.parametrize("family", [f for f in FAMILIES if any(row.declared.family == f for row in SOLVING)])
def test_lower_steps(family, budget):
    """At a held x, steps in several calls, resumed or not, are those of the optimizer itself in one go."""

    @budget(4)
    @given(solves_of(family))
    def check(drawn):
        case, ways = drawn
        run, problem = Run(case), case.problem()
        rates = []
        for group in run.optimizer.param_groups:
            if group["level"] == "upper":
                group["lr"] = 0.0
            else:
                rates += [group["lr"]] * len(group["params"])
        groups = [{"params": problem.y, "lr": rates[0]}]
        if case.kind.groups:
            groups = [{"params": [y], "lr": rate} for y, rate in zip(problem.y, rates, strict=True)]
        own = (OPTIMIZERS[case.optimizer] or torch.optim.SGD)(groups)

        def closure():
            loss = -problem.upper() if problem.single else problem.lower()
            loss.backward(inputs=problem.y)
            return loss

        for how in ways:
            if how != "step":
                run = run.again(how)
            called(run.step)
            for _ in range(dict(case.options)["lower_steps"]):
                own.zero_grad()
                own.step(closure)
        # The live y of F2SA is extrapolated from copies, with an error of order nu^2 = 1e-8.
        torch.testing.assert_close(
            flat(run.problem.y), flat(problem.y), rtol=0, atol=1e-6 if family == "penalty" else 1e-12
        )

    check()

"""The hypergradient is that of a dense reference, wherever the method is exact, on problems of many kinds."""

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
from .runs import Case
from .strategies import kinds

EXACT = [row for row in ROWS if row.tolerance is not None and row.declared.tasks != "required"]


@st.composite
def settings_of(draw, family):
    """A method of the family that is exact in the limit, on a problem without noise."""
    row = draw(st.sampled_from([row for row in EXACT if row.declared.family == family]))
    kind, declared = draw(kinds(row, exact=True)), row.declared
    if kind.data == "tasks" and not declared.lower_steps:  # what a single loop remembers starts anew with the tasks
        kind = replace(kind, data="one")
    choices = ("sgd", "momentum") if declared.lower_optimizer != "none" else ("sgd",)
    options = {"vectorize": draw(st.sampled_from((True, False, 2)))}
    if declared.second_order and "hvp" not in row.options and row.cls.__name__ != "iMCN":
        options["hvp"] = draw(st.sampled_from(("exact", "exact", "finite-difference")))
    return Case(row.name, kind, draw(st.sampled_from(choices)), True, tuple(sorted(options.items())))


@pytest.mark.parametrize("family", [f for f in FAMILIES if any(row.declared.family == f for row in EXACT)])
def test_hypergradient(family, budget):
    @budget(4)
    @given(settings_of(family))
    def check(case):
        row, problem = case.registered, case.problem()
        truth, solution = problem.reference()
        lr, factor = problem.rate()
        steps = math.ceil(math.log(1e-13) / math.log(max(factor, 0.75 if case.optimizer == "momentum" else 0.3)))
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

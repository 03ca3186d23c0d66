"""Fifty captured steps are fifty eager ones, to rounding: all methods, types, data, lower optimizers (``--slow``)."""

import warnings

import pytest
import torch

import bilevel_optim as bo

from ..registry import ROWS
from ..selection import MAIN
from .test_compile import Regression

SINGLE, AT_ONCE = 30, 20
SHOWN = ("SOBA",)  # without --slow; with another backend one of each kind
CASES = {
    "stochastic": {},
    "dropout": {"dropout": 0.3},
    "tasks": {"tasks": True},
    "Adam and a scheduler": {},
}
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5}
NU = 1e-2
# Rounding of a gradient over the length of a difference, or with Adam the sign of a gradient that is rounding. In
# float32 `F2SA` has nu = 1e-2: with the nu of its rows (1e-6, 1e-4) rounding alone would be 0.1 or 1e-3.
ADAM = "Adam and a scheduler"
AMPLIFIED = {
    ("AID-differences", torch.float64, "stochastic"): 10,
    ("AID-differences", torch.float64, ADAM): 10,
    ("AID-differences", torch.float32, ADAM): 10,
    ("F2SA-1", torch.float64, "stochastic"): 10,
    ("F2SA-1", torch.float64, "tasks"): 10,
    ("F2SA-1", torch.float64, ADAM): 100,
    ("ESMAML", torch.float32, ADAM): 10,
    ("PRAHGD", torch.float32, ADAM): 10,
    ("VRBO", torch.float32, ADAM): 10,
    **{(name, torch.float32, ADAM): 1000 for name in ("MAML", "MAML-checkpoint", "ANIL")},
}


def fifty(row, dtype, case, backend):
    """Losses and end of fifty steps, the last ones at once; captured if there is a backend."""
    problem = Regression(row, dtype=dtype, **CASES[case])
    scheduled = case == ADAM
    options = {"nu": NU} if "nu" in row.options and dtype == torch.float32 else {}
    optimizer = problem.optimizer(row, **options, **({"lower_optimizer": torch.optim.Adam} if scheduled else {}))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98) if scheduled else None
    if backend is not None:
        optimizer.compile(backend=backend)
    torch.manual_seed(0)
    losses = []
    for _ in range(SINGLE):
        losses.append(problem.step(optimizer))
        if scheduler is not None:
            scheduler.step()
    losses += problem.run(optimizer, AT_ONCE)
    return [torch.stack(losses), *(t.detach() for t in (*problem.x, *problem.y))]


def pytest_generate_tests(metafunc):
    """All of them with ``--slow``; one method in float64 without, and eight steps of each kind elsewhere."""
    slow, backend = (metafunc.config.getoption(name) for name in ("--slow", "--backend"))
    shown = SHOWN if backend == "eager" else MAIN
    chosen = [
        pytest.param(row, dtype, case, id=f"{row.name}-{dtype}-{case}")
        for row in ROWS
        for dtype in ROUNDING
        for case in CASES
        if (slow or (row.name in shown and case == "stochastic" and dtype == torch.float64))
        and (case != "tasks" or (row.takes_tasks and row.declared.losses == 2))
    ]
    metafunc.parametrize(("row", "dtype", "case"), chosen)


def test_fifty_steps(row, dtype, case, request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        eager, captured = (fifty(row, dtype, case, b) for b in (None, request.config.getoption("--backend")))
    rounding = ROUNDING[dtype] * AMPLIFIED.get((row.name, dtype, case), 1)
    for mine, theirs in zip(captured, eager, strict=True):
        assert theirs.isfinite().all()
        assert (mine - theirs).abs().max() <= rounding * theirs.abs().max()

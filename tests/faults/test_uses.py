"""What crashed, or said nothing that helps, in ordinary use."""

from contextlib import nullcontext

import pytest
import torch

import bilevel_optim as bo

from ..problems import Tasks, close, same, seeded, values
from ..registry import each


@pytest.fixture
def elsewhere():
    """A default device on which nothing can be computed; parameters and data stay on theirs."""

    def on(make):
        def run(*arguments, **options):
            torch.set_default_device("meta")
            try:
                return make(*arguments, **options)
            finally:
                torch.set_default_device(None)

        return run

    return on


@each(("AID", "AID-minres", "F2SA", "ESMAML", "PZOBO", "PRAHGD", "RTMLMC", "SVRB", "RSVRB", "GDA"))
def test_the_default_device_need_not_be_that_of_the_parameters(row, elsewhere):
    def run(problem, optimizer):
        for _ in range(2):
            problem.run(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        problem.run(optimizer)
        return values(problem.x, problem.y)

    ends = []
    for device in (lambda make: make, elsewhere):
        torch.manual_seed(0)
        problem = row.quadratic(tasks=row.takes_tasks)
        ends.append(device(run)(problem, row(problem.x, problem.y, short=True)))
    assert same(*ends)


def test_checking_does_not_mind_the_default_device(elsewhere):
    x, y = (torch.full((2,), v, requires_grad=True) for v in (2.0, 0.0))
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.5, lower_steps=3)
    losses = [lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2]
    report = elsewhere(bo.check_hypergradient)(optimizer, *losses, rtol=1e3)
    assert report.bias >= 0


@pytest.mark.parametrize("big", [1e200, float("inf")])
def test_a_ceiling_of_derivatives_out_of_range(big):
    """Their squares were not finite: nothing but NaN was left of them, or the decomposition failed."""
    x, y = torch.tensor([1.0, 0.5], requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.1, ceilings={"V": 1.0})
    losses = [lambda: (y - 1).square().sum() / 2, lambda: y.square().sum() / 2 + big * (x * y).sum()]
    if big == float("inf"):
        with pytest.raises(bo.NonFiniteError):
            optimizer.step(*losses)
    else:
        optimizer.step(*losses)
        close(x.grad, torch.ones(2), 1e-12)  # -V H^-1 v with V in the ball, which is the identity there
        assert optimizer.diagnostics["projected_V"] == 1


def test_rows_that_are_forgotten_do_not_spoil_the_mean():
    """With a weight of 1 their Hessian went to zero, and the mean was NaN, for which the rates were blamed."""
    ends = []
    for dtype in (torch.float64, torch.float32):
        problem = Tasks(m=30, rows=True, dtype=dtype)
        options = {"variant": "exact_mean", "beta": 1.0, "beta_unit": "absolute", "generator": seeded(1)}
        optimizer = bo.RSVRB(problem.x, problem.y, lr=0.02, lower_lr=0.02, task_batch=2, **options)
        for _ in range(40):
            problem.run(optimizer)
        ends.append(problem.x[0].detach().double())
    close(*ends, 1e-3)


@each(("SVRB", "RSVRB", "BSVRB", "STABLE"))
@pytest.mark.parametrize("over", [True, False])
def test_a_floor_above_the_curvature_is_warned_about(row, over):
    problem = row.quadratic(tasks=True)
    optimizer = row(problem.x, problem.y, short=True, floor=1e3 if over else 1e-3)
    with pytest.warns(bo.BilevelWarning, match="floor=1000 is above") if over else nullcontext():
        problem.run(optimizer)
    assert bool(optimizer.diagnostics["projected_H"]) == over

"""BA and PAID: AID with growing cold solves, and with perturbations."""

import itertools
import math

import pytest
import torch

import bilevel_optim as bo

from .problems import Quadratic

ARGUMENTS = {"lr": 0.02, "lower_lr": 0.1, "linear_steps": 5}


@pytest.mark.parametrize(("scale", "growth"), [(0.5, 0.25), (2, 0.25), (4, 0.25), (3, 1.0)])
def test_ba_makes_more_and_more_steps(scale, growth):
    problem = Quadratic(n=5, m=3, kappa=4.0)
    optimizer = bo.BA(problem.x, problem.y, **ARGUMENTS, lower_steps=scale, growth=growth)
    total = 0
    for k in range(20):
        optimizer.step(problem.upper, problem.lower)
        total += math.ceil(scale * (k + 1) ** growth) + 1
        assert optimizer.oracle_counts["lower_grad"] == total


def test_ba_solves_from_its_first_value():
    """Each step is AID from a fixed y and from zero; the number of steps so far survives a checkpoint."""
    problem = Quadratic(n=5, m=3, kappa=4.0)
    start = torch.randn(5)
    with torch.no_grad():
        problem.y[0].copy_(start)
    optimizer = bo.BA(problem.x, problem.y, **ARGUMENTS, lower_steps=2)
    for k in range(6):
        x, y = problem.x[0].detach().clone(), start.clone()
        for _ in range(math.ceil(2 * (k + 1) ** 0.25)):
            y = y - 0.1 * (problem.A @ y - problem.D @ x - problem.e)
        if k == 3:
            state = optimizer.state_dict()
            optimizer = bo.BA(problem.x, problem.y, **ARGUMENTS, lower_steps=2)
            optimizer.load_state_dict(state)
        optimizer.step(problem.upper, problem.lower)
        torch.testing.assert_close(problem.y[0].detach(), y)
        slope = problem.Q @ x + problem.c + problem.R @ y
        v = torch.linalg.solve(problem.A, problem.P @ y + problem.q + problem.R.T @ x)  # exact in 5 steps
        torch.testing.assert_close(problem.x[0].detach(), x - 0.02 * (slope + problem.D.T @ v))
    assert "linear_solution" not in optimizer.state[problem.y[0]]


def test_paid_perturbs_after_small_gradients_only():
    """A saddle point of f(x, y*(x)) = x1^4/4 - x1^2/2 + x2^2/2: kicks are at least the period apart, and rare."""
    x, y = torch.tensor([0.0, 1.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.PAID(
        [x], [y], lr=0.1, lower_lr=1.0, lower_steps=1, gradient_threshold=1e-2, perturbation=1e-3,
        perturbation_period=30, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    kicks = []
    for k in range(220):
        before, slope = x.detach().clone(), torch.stack([x[0] ** 3 - x[0], x[1]]).detach()
        optimizer.step(lambda: y[0] ** 4 / 4 - y[0] ** 2 / 2 + y[1] ** 2 / 2, lambda: (y - x).square().sum() / 2)
        moved = x.detach() - before + 0.1 * slope
        if moved.norm() > 1e-12:
            kicks.append(k)
            assert moved.norm() <= 1e-3
            assert slope.norm() <= 1e-2
    assert kicks[0] == 44  # 0.9^44 <= 1e-2 is the first small gradient
    assert min(b - a for a, b in itertools.pairwise(kicks)) >= 31
    assert abs(abs(x[0].item()) - 1) < 1e-2


def test_paid_without_perturbation_is_aid():
    paths = []
    for cls, options in ((bo.AID, {}), (bo.PAID, {"perturbation": 0.0, "gradient_threshold": 1e9})):
        problem = Quadratic()
        optimizer = cls(problem.x, problem.y, **ARGUMENTS, lower_steps=3, **options)
        for _ in range(10):
            optimizer.step(problem.upper, problem.lower)
        paths.append(problem.x[0].detach())
    assert torch.equal(*paths)

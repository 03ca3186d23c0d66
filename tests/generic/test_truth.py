"""Every method on the problems whose solution is known."""

import pytest
import torch

from ..problems import close, flat
from ..registry import MOMENTUM, ROWS, SINGLE, each
from ..selection import MAIN


def settled(row, problem, **options):
    """Backward passes until nothing moves any more; returns the optimizer and the last loss."""
    options = {"lr": 0.1, "lower_lr": problem.lr, "lower_steps": 25, **options}
    optimizer = row(problem.x, problem.y, warm_start=True, **options)
    for _ in range(row.settling):
        loss = problem.apply(optimizer.backward)
    return optimizer, loss


def relative_error(problem):
    """Return the gradient's relative error; it must be zero in an initial point without effect on the solution."""
    truth = flat(problem.hypergradient())
    gradient = flat(t.grad for t in problem.x)
    return float((gradient - torch.cat([truth, truth.new_zeros(len(gradient) - len(truth))])).norm() / truth.norm())


@pytest.mark.every_row
@each(lambda row: row.declared.solves and row.declared.tasks != "required" and row.name != "iMAML")
def test_quadratic(row):
    """The hypergradient, where the method estimates it; the live y is the solution and the loss that at it."""
    problem = row.quadratic()
    _, loss = settled(row, problem)
    if row.tolerance is not None:
        assert relative_error(problem) < row.tolerance
    (solution,) = problem.solution()
    assert (problem.y[0] - solution).norm() < 1e-4 * solution.norm()
    assert loss.shape == ()
    assert not loss.requires_grad
    close(loss, problem.upper().detach(), 1e-5, 1e-4)


# The state of a single loop restarts with stacked tasks, so that it has not settled after one step.
@pytest.mark.usually(*MAIN, *(row.name for row in ROWS if row.declared.tasks == "required"))
@each(lambda row: row.tolerance and (row.declared.tasks == "rows" or (row.takes_tasks and row.declared.lower_steps)))
def test_quadratic_tasks(row):
    problem = row.quadratic(tasks=True)
    optimizer, loss = settled(row, problem, lower_steps=40)
    assert relative_error(problem) < 10 * row.tolerance
    if row.name != "ESMAML":  # whose y stays, as without warm starts
        close(problem.y[0].detach(), problem.solution()[0], 1e-4, 1e-4)
    values = ((problem.solutions().unsqueeze(1) - problem.t) ** 2).sum(-1).mean(1) / 2
    close(loss, values.mean() + problem.x[0].detach().square().sum() / 2, 1e-4, 1e-4)
    assert "vectorize_fallback" not in optimizer.diagnostics


@pytest.mark.usually(*MAIN)
@each(lambda row: row.tolerance is not None and not row.variant)
def test_float32(row):
    options, tolerance = SINGLE.get(row.name, ({}, 5e-6))
    problem = row.quadratic(dtype=torch.float32)
    _, loss = settled(row, problem, **options)
    assert problem.x[0].grad.dtype == loss.dtype == problem.y[0].dtype == torch.float32
    assert relative_error(problem) < tolerance


# The stochastic ones are compared with literal loops.
@pytest.mark.usually(*MAIN)
@each(lambda row: row.tolerance and row.declared.family not in ("stochastic", "tracked") and not row.declared.initial)
def test_converges_as_gradient_descent_does(row):
    problem = row.quadratic(n=4, m=2)
    start, target, hessian = problem.x[0].detach().clone(), problem.minimiser(), problem.hessian()
    eigenvalues = torch.linalg.eigvalsh(hessian)
    # A step that gradient descent just about stands is too large for momentum.
    momentum = row.name in MOMENTUM
    lr = 1 / float(eigenvalues[-1]) if momentum else 2 / float(eigenvalues[0] + eigenvalues[-1])
    problem.run(row(problem.x, problem.y, lr=lr, lower_lr=problem.lr, lower_steps=15), 10)
    if momentum:
        assert (problem.x[0] - target).norm() < 0.5 * (start - target).norm()
    else:
        exact = target + torch.linalg.matrix_power(torch.eye(2) - lr * hessian, 10) @ (start - target)
        close(problem.x[0].detach(), exact, 1e-4, 1e-4)

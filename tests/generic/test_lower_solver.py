"""`lower_solver=`: the user's own function solves the lower problem."""

import warnings

import pytest
import torch

import bilevel_optim as bo

from ..problems import Quadratic, same, values


def solved(problem, factor=1.0):
    """A function that writes the solution of the quadratic's lower problem, or a part of it."""

    def solve():
        problem.y[0].copy_(factor * torch.linalg.solve(problem.A, problem.D @ problem.x[0] + problem.e))

    return solve


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", ["auto", 0.05])
def test_the_hypergradient_is_the_one_at_the_solution(rate):
    """It is exact from the first step on, with as many products as there are variables."""
    problem = Quadratic(6, 3, 5.0)
    optimizer = bo.AID(
        problem.x, problem.y, lr=0.05, lower_lr=rate, lower_steps=0, linear_steps=6, lower_solver=solved(problem)
    )
    for _ in range(5):
        truth = problem.hypergradient()[0]
        optimizer.step(problem.upper, problem.lower)
        torch.testing.assert_close(problem.x[0].grad, truth, rtol=1e-4, atol=1e-6)
        assert float(optimizer.diagnostics["lower_residual"]) < 1e-10


def test_backward_with_an_upper_optimizer_is_the_same():
    problem, other = Quadratic(6, 3, 5.0), Quadratic(6, 3, 5.0)
    optimizer = bo.AID(problem.x, problem.y, lr=0.05, lower_steps=0, lower_solver=solved(problem))
    by_hand = bo.AID(other.x, other.y, lr=0.05, lower_steps=0)
    for _ in range(4):
        optimizer.backward(problem.upper, problem.lower)
        optimizer.step()
        with torch.no_grad():
            solved(other)()
        by_hand.step(other.upper, other.lower)
    assert same(values(problem.x), values(other.x))


@pytest.mark.parametrize("rate", [1.0, "auto"])
def test_an_unsolved_y_is_reported_once(rate):
    problem = Quadratic(6, 3, 5.0)
    options = {"lower_lr": rate, "lower_steps": 0, "lower_solver": solved(problem, 0.5)}
    optimizer = bo.AID(problem.x, problem.y, lr=0.01, **options)
    with pytest.warns(bo.BilevelWarning, match="y after lower_solver is not a solution"):
        optimizer.step(problem.upper, problem.lower)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(problem.upper, problem.lower)


def test_a_solver_or_a_step_that_fails_changes_nothing():
    problem = Quadratic(6, 3, 5.0)
    before = values(problem.x, problem.y)

    def fails():
        problem.y[0].fill_(7.0)
        raise RuntimeError("no solution")

    optimizer = bo.AID(problem.x, problem.y, lr=0.01, lower_steps=0, lower_solver=fails)
    with pytest.raises(RuntimeError, match="no solution"):
        optimizer.step(problem.upper, problem.lower)
    assert same(before, values(problem.x, problem.y))
    optimizer = bo.AID(problem.x, problem.y, lr=0.01, lower_steps=0, lower_solver=solved(problem))
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(lambda: problem.upper() * float("nan"), problem.lower)
    assert same(before, values(problem.x, problem.y))


def test_incompatible_options_are_refused():
    problem = Quadratic(6, 3, 5.0)
    with pytest.raises(TypeError, match="lower_solver"):
        bo.ITD(problem.x, problem.y, lr=0.1, lower_steps=1, lower_solver=solved(problem))
    with pytest.raises(ValueError, match="Invalid lower_solver value: 3"):
        bo.AID(problem.x, problem.y, lr=0.1, lower_steps=0, lower_solver=3)
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_steps=0, lower_solver=solved(problem))
    with pytest.raises(ValueError, match="with tasks has many"):
        optimizer.step(problem.upper, problem.lower, tasks=bo.TensorTasks(torch.zeros(2, 1)))


def test_compiled_steps_are_eager_with_that_reason():
    problem = Quadratic(6, 3, 5.0)
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_steps=0, lower_solver=solved(problem))
    with pytest.raises(RuntimeError, match="lower_solver is a function of yours"):
        optimizer.compile(fullgraph=True)


def test_what_a_gradient_step_does_not_show_is_judged_by_the_curvature():
    """y misses its solution in a direction of curvature 1e-3 of the largest, along which f changes."""
    curvature = torch.tensor([1.0, 1e-3])
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)

    def told(error, linear_solver):
        def solve():
            y.copy_(x / curvature + torch.tensor([0.0, error]))

        optimizer = bo.AID([x], [y], lr=1.0, lower_steps=0, lower_solver=solve, linear_solver=linear_solver)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.backward(lambda: y.square().sum() / 2, lambda: (curvature * y * y / 2 - x * y).sum())
        return any("y after lower_solver is not a solution" in str(w.message) for w in said)

    for linear_solver in ("cg", "minres", "direct"):
        assert told(20.0, linear_solver)  # 2 % of y; a gradient step moves it by 0.002 %
        assert not told(5.0, linear_solver)

"""Divergence is reported: in ``diagnostics`` always, and in one warning that says what to change."""

import warnings

import pytest
import torch

import bilevel_optim as bo

from ..problems import Quadratic
from ..registry import each

# Rows whose lower steps an optimizer makes, several of them from one gradient to the next.
SOLVES = (
    "AID",
    "ITD",
    "ITD-checkpoint",
    "FirstOrder",
    "F2SA",
    "StocBiO",
    "AmIGO",
    "BA",
    "RAHGD-descent",
    "PZOBO",
    "GDA",
)


def quadratic(H):
    return lambda v: bo.Vector([H @ v[0]])


def run(row, lower_lr, steps=1, **options):
    problem = row.quadratic(n=6)
    with torch.no_grad():
        problem.y[0] += 1.0
    optimizer = row(problem.x, problem.y, lower_lr=lower_lr, lower_steps=12, lr=0.0, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            problem.apply(optimizer.backward)
    return optimizer, [str(w.message) for w in caught if issubclass(w.category, bo.BilevelWarning)]


@each(SOLVES)
def test_lower_steps_that_diverge_are_seen(row):
    """L = 2, so steps of 1.5 multiply the fastest direction by -2 at each."""
    optimizer, found = run(row, 1.5, steps=2)
    growing = [text for text in found if "the gradient of the lower loss grows" in text]
    assert len(growing) == 1  # once in an optimizer's life
    assert "lower_lr" in growing[0]
    if row.name != "PZOBO":
        assert float(optimizer.diagnostics["lower_growth"]) > 16


@each(SOLVES)
def test_lower_steps_that_converge_are_not_taken_for_diverging(row):
    optimizer, found = run(row, 0.4, steps=4)
    assert not [text for text in found if "grows" in text]
    if row.name != "PZOBO":
        assert float(optimizer.diagnostics["lower_growth"]) < 4


def test_steps_at_the_solution_and_a_rough_start_are_not_taken_for_diverging():
    """Rounding errors, and Adam's first steps, may multiply a tiny gradient."""
    for kind in (torch.optim.SGD, torch.optim.Adam):
        problem = Quadratic(n=6, kappa=2.0)
        problem.solve()
        optimizer = bo.AID(
            problem.x, problem.y, lr=0.0, lower_lr=1e-3, lower_steps=20, linear_steps=20, lower_optimizer=kind
        )
        problem.run(optimizer, 3)  # a warning would be an error


@pytest.mark.parametrize("solve", [bo.linear.neumann, bo.linear.fixed_point])
@pytest.mark.parametrize(("eigenvalues", "lr", "diverged"), [((1.0, 2.0), 0.5, False), ((1.0, 5.0), 0.5, True)])
def test_a_series_that_diverges_says_so(solve, eigenvalues, lr, diverged):
    H, b = torch.diag(torch.tensor(eigenvalues)), bo.Vector([torch.ones(2)])
    result = solve(quadratic(H), b, steps=10, lr=lr)
    assert bool(result.diverged) == diverged
    assert float(result.relative) == pytest.approx(float(result.residual) / 2**0.5)
    assert bool(bo.linear.neumann_term(quadratic(H), b, steps=9, terms=10, lr=lr).diverged) == diverged
    lanes = solve(lambda v: v * torch.tensor([1.0, max(eigenvalues)]), [torch.ones(2, 3)], steps=9, lr=lr, lanes=True)
    assert lanes.diverged.tolist() == [False, diverged]


def test_negative_curvature_makes_a_series_grow_and_minres_does_not():
    H, b = torch.diag(torch.tensor([1.0, -0.5])), bo.Vector([torch.ones(2)])
    assert bo.linear.neumann(quadratic(H), b, steps=20, lr=0.5).diverged
    assert not bo.linear.minres(quadratic(H), b, steps=20).diverged


def test_a_slowly_growing_residual_is_reported_once_it_adds_up():
    """Solves of two steps, each from the last solution, at a direction of small negative curvature."""
    apply, b, v = quadratic(torch.diag(torch.tensor([1.0, -0.1]))), bo.Vector([torch.ones(2)]), None
    told = []
    for _ in range(200):
        result = bo.linear.fixed_point(apply, b, v, steps=2, lr=0.1)
        v = result.solution
        told.append(bool(result.diverged))
    assert not any(told[:100])
    assert told[-1]
    assert float(result.relative) == pytest.approx(1.02**200 / 2**0.5, rel=3e-2)


def test_solvers_at_a_vanishing_right_hand_side_do_not_diverge():
    H = torch.diag(torch.tensor([1.0, 2.0]))
    for solve in (bo.linear.cg, bo.linear.minres):
        assert not solve(quadratic(H), [torch.zeros(2)], [torch.full((2,), 1e-9)], steps=1).diverged
    assert not bo.linear.fixed_point(quadratic(H), [torch.zeros(2)], [torch.full((2,), 1e-9)], steps=3, lr=0.5).diverged


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (bo.AID, {"linear_solver": "neumann", "linear_lr": 1.0, "lower_steps": 5}),
        (bo.AID, {"linear_solver": "fixed_point", "linear_lr": 1.0, "lower_steps": 5}),
        (bo.StocBiO, {"linear_lr": 1.0, "lower_steps": 5}),
    ],
)
def test_a_method_warns_once_of_a_diverging_series(cls, options):
    problem = Quadratic(n=6, kappa=10.0)
    optimizer = cls(problem.x, problem.y, lr=0.0, lower_lr=0.1, linear_steps=10, **options)
    with pytest.warns(bo.BilevelWarning, match="is not solved but diverges") as caught:
        problem.apply(optimizer.backward)
    assert len(caught) == 1
    assert float(optimizer.diagnostics["linear_relative_residual"]) > 1
    problem.apply(optimizer.backward)  # no second warning


def test_uneven_copies_of_a_forward_stencil_are_seen():
    """The copy of the weight 3 nu is pushed past a kink, where the others are not."""
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = bo.F2SA([x], [y], lr=0.0, lower_lr=0.1, lower_steps=200, order=3, nu=0.1, stencil="forward")

    def lower():
        return (y - x).square().sum() / 2 - 50 * (y - 0.25).clamp(min=0).square().sum().clamp(max=100.0)

    with pytest.warns(bo.BilevelWarning, match="not similarly far"):
        optimizer.backward(lambda: -y.sum() + x.sum(), lower)
    assert optimizer.diagnostics["spread"][-1] > 10 * optimizer.diagnostics["spread"][1]


@pytest.mark.filterwarnings("default::bilevel_optim.BilevelWarning")  # AID has another one
@pytest.mark.parametrize("start", [-3.0, -6.0])
@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.ITD, bo.PZOBO])
def test_steps_that_leap_over_the_solution_are_seen(cls, start):
    """Where they end, the gradient of exp(y - x) - (y - x) is as small as at the start: F2SA was silent."""
    x, y = torch.zeros(2, requires_grad=True), torch.full((2,), start, requires_grad=True)
    optimizer = cls([x], [y], lr=1.0, lower_steps=10)
    with pytest.warns(bo.BilevelWarning, match="a thousand times further"):
        optimizer.backward(lambda: (y - 1).square().sum() / 2, lambda: ((y - x).exp() - (y - x)).sum())


@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.ITD, bo.PZOBO])
def test_steps_that_leave_a_saddle_for_a_minimum_do_not_leap(cls):
    x, y = torch.zeros(2, requires_grad=True), torch.full((2,), 1e-5, requires_grad=True)
    optimizer = cls([x], [y], lr=1.0, lower_lr=0.2, lower_steps=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error", bo.BilevelWarning)
        optimizer.backward(
            lambda: (y - 1).square().sum() / 2, lambda: ((y.square() - 1).square() / 4 + x * y * y).sum()
        )
    assert (y - 1).abs().max() < 1e-4


@pytest.mark.parametrize(("curvature", "diverges"), [(1.0, False), (60.0, True)], ids=["converges", "diverges"])
def test_batches_whose_right_hand_sides_differ_do_not_make_amigo_diverge(curvature, diverges):
    """The residual is measured on another batch at each product: only a v that grows shows that linear_lr is too large.

    The upper gradient of the second batch is small, so v of the first one leaves a residual many times as large.
    """
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    signs = torch.tensor([[1.0, 0.2], [0.2, 1.0], [0.6, 0.6]]) * curvature
    lower = bo.Objective(lambda scale: (scale * (y - x).square()).sum() / 2, list(signs))
    upper = bo.Objective(lambda size: ((y - 3) * size).sum(), [torch.tensor(1.0), torch.tensor(0.01)])
    optimizer = bo.AmIGO([x], [y], lr=1e-4, lower_lr=0.01, linear_lr=0.1, lower_steps=1, linear_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            optimizer.step(upper, lower)
    assert any("is not solved but diverges" in str(own.message) for own in caught) == diverges

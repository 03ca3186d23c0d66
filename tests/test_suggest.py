"""`suggest`: what it measures against what is true, and the hypergradient that its settings give."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import bilevel_optim as bo
from bilevel_optim.checking.spectrum import Spectrum, lanczos

from .problems import Quadratic, same, seeded, values

suggest = partial(bo.suggest, max_seconds=600)  # of a busy machine


def spread(n, kappa):
    """A symmetric matrix with eigenvalues from 1 to kappa, and these."""
    basis = torch.linalg.qr(torch.randn(n, n, generator=seeded(0), dtype=torch.float64))[0]
    values = torch.logspace(0, math.log10(kappa), n, dtype=torch.float64)
    return basis @ torch.diag(values) @ basis.T, values


def scaled(kappa, scale, n=24):
    problem = Quadratic(n, 5, kappa)
    problem.A, problem.D, problem.e = (t * scale for t in (problem.A, problem.D, problem.e))
    return problem


def error(problem, optimizer, steps=1):
    for _ in range(steps):
        optimizer.backward(problem.upper, problem.lower)
    truth = problem.hypergradient()[0]
    return float((problem.x[0].grad - truth).norm() / truth.norm())


# ---------------------------------------------------------------------------------------------------- the spectrum


@pytest.mark.parametrize("kappa", [10.0, 1e4])
def test_lanczos_finds_the_ends_of_a_spectrum(kappa):
    H, true = spread(300, kappa)
    start = torch.randn(300, generator=seeded(1), dtype=torch.float64)
    found, vectors, residuals = lanczos(lambda v: H @ v, start, 120, lambda: True)
    assert float(found[-1]) == pytest.approx(kappa, rel=1e-8)
    assert true[0] - 1e-9 <= float(found[0]) <= 1.3
    close = (H @ vectors - vectors * found).norm(dim=0)
    torch.testing.assert_close(close, residuals, rtol=1e-4, atol=1e-8 * kappa)


def test_lanczos_ends_where_the_krylov_space_does():
    H = torch.diag(torch.tensor([1.0, 1.0, 4.0, 4.0, 4.0], dtype=torch.float64))
    found, *_ = lanczos(lambda v: H @ v, torch.ones(5, dtype=torch.float64), 5, lambda: True)
    assert found.tolist() == pytest.approx([1.0, 4.0])


@pytest.mark.parametrize("n", [40, 600])
def test_functions_of_an_operator(n):
    """For few entries by its matrix, for many in a Krylov space."""
    H, _ = spread(n, 50.0)
    b = torch.randn(n, generator=seeded(2), dtype=torch.float64)
    spectrum = Spectrum(lambda v: H @ v, b, lambda: True)
    assert spectrum.exact == (n == 40)
    assert (spectrum.smallest, spectrum.largest) == pytest.approx((1.0, 50.0), rel=1e-2)
    torch.testing.assert_close(spectrum.applied(lambda c: 1 / c, b), torch.linalg.solve(H, b), rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kappa", [3.0, 100.0])
def test_its_settings_keep_what_it_says(kappa, scale):
    """The error of the first hypergradient is the one that was expected, at any size of g."""
    problem = scaled(kappa, scale)
    suggestion = suggest(problem.x, problem.y, problem.upper, problem.lower)
    assert suggestion.smallest == pytest.approx(scale, rel=1e-6)
    assert suggestion.largest == pytest.approx(kappa * scale, rel=1e-6)
    assert suggestion.lower_noise == suggestion.upper_noise == 0.0
    for name, row in suggestion.rows.items():
        start = values(problem.y)
        found = error(problem, suggestion.make(name), row.settled)
        assert found <= 0.02, name
        assert row.bias == pytest.approx(found, rel=0.01, abs=1e-4), name
        problem.y[0].data.copy_(start[0])


def test_nothing_is_changed():
    torch.manual_seed(0)
    problem = scaled(10.0, 1.0)
    data = torch.randn(6, 24, generator=seeded(0), dtype=torch.float64)
    lower = bo.Objective(lambda batch: problem.lower() + problem.y[0] @ batch, data)
    lower.draw()
    before, random, place = values(problem.x, problem.y), torch.get_rng_state(), lower.state_dict()
    suggest(problem.x, problem.y, problem.upper, lower, methods=["AID"])
    assert same(before, values(problem.x, problem.y))
    assert torch.equal(random, torch.get_rng_state())
    assert lower.state_dict()["position"] == place["position"] if "position" in place else True
    assert problem.x[0].grad is None


def test_noise_is_that_of_the_batches():
    x, y = torch.ones(1, requires_grad=True), torch.zeros(50, dtype=torch.float64, requires_grad=True)
    shifts = torch.randn(8, 50, generator=seeded(0), dtype=torch.float64)
    lower = bo.Objective(lambda batch: (y - x - 0.1 * batch).square().sum() / 2, shifts)
    suggestion = suggest([x], [y], lambda: (y - 3).square().sum(), lower, methods=["AID", "SOBA"])
    true = float(0.1 * shifts.var(0).sum().sqrt() / (1 + 0.1 * shifts.mean(0)).norm())
    assert suggestion.lower_noise == pytest.approx(true, rel=1e-6)
    assert suggestion.upper_noise == 0.0
    assert "accumulate" not in str(suggestion)


def test_a_lower_problem_that_is_not_convex_is_told():
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    signs = torch.tensor([1.0, -0.5])
    suggestion = suggest([x], [y], lambda: (y - 1).square().sum(), lambda: (signs * (y - x).square()).sum() / 2)
    assert suggestion.smallest == pytest.approx(-0.5)
    assert suggestion.rows["AID"].bias is None
    assert suggestion.rows["AID"].settings["damping"] == pytest.approx(1.0)
    assert "not convex in y at this point (smallest curvature -0.5)" in str(suggestion)
    assert suggestion.make("F2SA").order == 1


def test_a_curvature_that_changes_on_the_way_is_told():
    x, y = torch.ones(2, dtype=torch.float64, requires_grad=True), torch.zeros(2, dtype=torch.float64)
    y.requires_grad_()
    losses = lambda: (y - 3).square().sum(), lambda: ((y - x).square() / 2 + (y - x) ** 4 / 60).sum()
    far = suggest([x], [y], *losses, methods=["AID"])
    y.data.fill_(1.0)
    near = suggest([x], [y], *losses, methods=["AID"])
    assert "the curvature of g changes between y and the solution" in str(far)
    assert "the curvature of g changes" not in str(near)


def test_losses_without_second_derivatives_and_without_vmap():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return y.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, slope):
            (y,) = ctx.saved_tensors
            return 2 * y * slope

    x, y = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    losses = lambda: (y - 3).square().sum(), lambda: Square.apply(y - x).sum() / 2
    suggestion = suggest([x], [y], *losses)
    assert "products with the Hessian differ from differences" in suggestion.second_derivatives
    assert suggestion.rows["AID"].settings["hvp"] == "finite-difference"
    assert suggestion.largest == pytest.approx(1.0, rel=1e-4)
    assert suggestion.vectorized
    suggestion.make("AID").step(*losses)


def test_tasks_modules_and_what_may_be_overridden():
    torch.manual_seed(0)
    module, x = nn.Linear(3, 1), torch.zeros(1, requires_grad=True)
    tasks = bo.TensorTasks((torch.randn(4, 12, 3), torch.randn(4, 12, 1)))

    def mean(batch):
        return (module(batch[0]) - batch[1]).square().mean()

    def ridge(batch):
        return mean(batch) + x.exp().sum() * sum(p.square().sum() for p in module.parameters()) / 10

    suggestion = suggest([x], module.parameters(), mean, ridge, tasks=tasks, methods=("AID", "ITD"))
    assert set(suggestion.rows) == {"AID", "ITD"}
    optimizer = suggestion.make("AID", upper_optimizer=partial(torch.optim.Adam, lr=0.1), lower_steps=3)
    assert (optimizer.lower_steps, optimizer.param_groups[0]["lr"]) == (3, 0.1)
    optimizer.step(mean, ridge, tasks=tasks)
    for wrong, text in (("MAML", "methods"), ("aid", "methods")):
        with pytest.raises(ValueError, match=f"Invalid {text} value: {wrong} "):
            bo.suggest([x], module.parameters(), mean, ridge, methods=[wrong])
    with pytest.raises(ValueError, match=r"Invalid name value: SOBA \(choose one of 'AID', 'ITD'\)"):
        suggestion.make("SOBA")


def test_there_is_an_end():
    """Without any time left the curvature is less certain, and everything else is there."""
    H, _ = spread(600, 1e3)
    x, y = torch.ones(1, requires_grad=True), torch.zeros(600, dtype=torch.float64, requires_grad=True)
    losses = lambda: (y - 1).square().sum(), lambda: y @ H @ y / 2 - x.sum() * y.sum()
    suggestion = bo.suggest([x], [y], *losses, methods=["AID"], max_seconds=1e-6)
    assert suggestion.uncertainty > 0
    assert "max_seconds ended some measurements early" in str(suggestion)
    suggestion.make("AID").step(*losses)

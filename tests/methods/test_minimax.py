"""GDA, RAGDA, PRAGDA and iMCN: the W-shaped problem of the RAHGD specification, error laws, closed forms."""

import itertools
import math
from functools import partial

import pytest
import torch

import bilevel_optim as bo
from recipes.papers.theory import Constants

from ..problems import Saddle, close, seeded, values


@pytest.mark.parametrize("simultaneous", [True, False])
@pytest.mark.parametrize("ascents", [1, 3])
def test_gda_by_hand(simultaneous, ascents):
    """Simultaneous: x takes its gradient before the last ascent step, from the same evaluation."""
    problem = Saddle()
    optimizer = bo.GDA(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=ascents, simultaneous=simultaneous)
    for _ in range(3):
        x, y = values(problem.x, problem.y)
        path = [y]
        for _ in range(ascents):
            path.append(path[-1] + 0.2 * (problem.D @ x + problem.e - problem.A @ path[-1]))
        problem.run(optimizer)
        torch.testing.assert_close(problem.y[0].detach(), path[-1])
        slope = problem.Q @ x + problem.c + problem.R @ path[-2 if simultaneous else -1]
        torch.testing.assert_close(problem.x[0].detach(), x - 0.1 * slope)
    assert tuple(optimizer.oracle_counts.values()) == (3, 3 * (ascents - simultaneous), 0, 0, 0)


# ---------------------------------------------------------------------------------------------------- error laws


@pytest.mark.parametrize(("newton", "power"), [(False, 1), (True, 2)])
def test_error_law_in_the_lower_error(newton, power):
    """O(|y - y*|) with the plain gradient, O(|y - y*|^2) with the Newton correction (section 6.4)."""
    random = partial(torch.randn, generator=seeded())
    C, offset, x, y = random(3, 4), random(4), random(3).requires_grad_(), torch.zeros(4, requires_grad=True)

    def loss():
        return (C.T @ x).tanh() @ y + (x.sin().sum() * y.tanh()).sum() / 4 - 2 * y.square().sum()

    bo.RAGDA([x], [y], lr=0.0, lower_lr=0.2, lower_steps=100).backward(loss)
    solution, exact, errors = y.detach().clone(), x.grad.clone(), []
    for size in (1e-1, 1e-2, 1e-3):
        y.data.copy_(solution + size * offset)
        optimizer = bo.RAGDA([x], [y], lr=0.0, lower_lr=0.2, lower_steps=0, newton_correction=newton, linear_steps=4)
        optimizer.backward(loss)
        errors.append(float((x.grad - exact).norm()))
        assert optimizer.oracle_counts["hvp"] == (5 if newton else 0)  # the last one checks the solution
    assert [math.log10(a / b) for a, b in itertools.pairwise(errors)] == pytest.approx([power] * 2, abs=0.1)


def test_newton_correction_is_exact_on_a_quadratic():
    problem = Saddle(kappa=100.0)
    optimizer = bo.RAGDA(problem.x, problem.y, lr=0.1, lower_lr=0.0, lower_steps=0, newton_correction=True)
    optimizer.backward(problem.upper)
    torch.testing.assert_close(problem.x[0].grad, problem.hypergradient()[0])


def test_the_correction_shares_the_sample():
    """The same batch and the same random numbers in both gradients and in the products."""
    problem, drawn, noise = Saddle(), [], []

    def loss(batch):
        drawn.append(batch)
        noise.append(float(torch.rand(())))
        return problem.upper()

    options = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 3, "newton_correction": True}
    bo.RAGDA(problem.x, problem.y, **options).backward(bo.Objective(loss, list(range(100))))
    assert drawn == [0, 1, 2, 3, 3]
    assert noise[3] == noise[4]
    assert len(set(noise)) == 4


@pytest.mark.usually("RAGDA")
@pytest.mark.parametrize("cls", [bo.GDA, bo.RAGDA, bo.PRAGDA])
def test_the_check_takes_one_loss(cls):
    problem = Saddle()
    options = {"lr": 0.1, "lower_lr": problem.lr, **({} if cls is bo.GDA else {"linear_steps": 5})}
    before, good = values(problem.x, problem.y), cls(problem.x, problem.y, lower_steps=90, **options)
    report = bo.check_hypergradient(good, problem.upper)
    assert report.relative_error < 1e-8
    assert report.norm == pytest.approx(float(problem.hypergradient()[0].norm()))
    noisy = bo.Objective(lambda c: c * problem.upper(), [0.5, 1.5])
    assert bo.check_hypergradient(good, noisy, repeats=3).cosine > 0.99
    with pytest.raises(bo.GradcheckError):
        bo.check_hypergradient(cls(problem.x, problem.y, lower_steps=1, **options), problem.upper)
    assert all(torch.equal(a, b) for a, b in zip(before, values(problem.x, problem.y), strict=True))


# ---------------------------------------------------------------------------------------------------- W-shaped problem


def valley(z):
    """w(z) of the W-shaped problem (arXiv:2307.00126, appendix E): minima at +-0.6, a maximum at 0."""
    s, end, a = 0.1, 0.5, z.abs()
    outer = a - end - s
    far = s * outer**2 + outer**3 / 3 - 16 * s**3 / 3
    return torch.where(a > end, far, torch.where(a > s, s**3 / 3 - s**2 * a, a**3 / 3 - s * z**2))


def test_values_of_the_w_shaped_function():
    z = torch.tensor([-1, -0.6, -0.5, -0.1, -0.05, 0, 0.05, 0.3, 0.6, 1.0], requires_grad=True)
    w = valley(z)
    (slope,) = torch.autograd.grad(w.sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    table = [0.032, -0.00533333, -0.00466667, -0.00066667, -0.00020833, 0, -0.00020833, -0.00266667, -0.00533333, 0.032]
    slopes = [-0.24, 0, 0.01, 0.01, 0.0075, 0, -0.0075, -0.01, 0, 0.24]
    close(w.detach(), torch.tensor(table), 1e-8)
    close(slope.detach(), torch.tensor(slopes), 1e-12)
    close(curvature, torch.tensor([1, 0.2, 0, 0, -0.1, -0.2, -0.1, 0, 0.2, 1]), 1e-12)


STARTS = {"beside the saddle": (1e-3, 1e-3, 1e-16), "on a slope": (0.0, 0.0, 1.0)}
PRINTED = {  # f is 20-smooth, with condition number 2 in y
    "lower_lr": 1 / 20, "lower_steps": 10, "lower_momentum": (2**0.5 - 1) / (2**0.5 + 1), "lr": 0.5,
    "restart_radius": 0.2, "restart_period": 400, "lower_restart": "zero",
}  # fmt: skip
PERTURBED = {**PRINTED, "perturbation": 1e-3}


def run(cls, start, steps, seed=0, **options):
    """Until a method ends, or has come to the minimum: the first step within 1e-8 of it, steps, restarts, gap, HVPs."""
    x, y = torch.tensor(STARTS[start], requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer, hit = cls([x], [y], generator=seeded(seed), **options), None

    def loss():
        return valley(x[2]) - 10 * y[0] ** 2 + x[0] * y[0] - 5 * y[1] ** 2 + x[1] * y[1]

    for done in range(1, steps + 1):
        optimizer.step(loss)
        with torch.no_grad():
            gap = float(valley(x[2]) + x[0] ** 2 / 40 + x[1] ** 2 / 20 + 0.016 / 3)
        hit = done if hit is None and gap < 1e-8 else hit
        if getattr(optimizer, "converged", hit is not None):
            break
    return hit, done, getattr(optimizer, "restarts", 0), gap, optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "options", "start", "hit", "steps", "restarts"),
    [
        (cls, options, *row)
        for cls, options in ((bo.RAGDA, PRINTED), (bo.PRAGDA, {**PERTURBED, "perturb_initial": False}))
        for row in (("beside the saddle", 172, 547, 4), ("on a slope", 35, 457, 3))
    ],
)
def test_table_of_the_w_shaped_problem(cls, options, start, hit, steps, restarts):
    first, done, found, _, optimizer = run(cls, start, 700, **options)
    assert (first, found) == (hit, restarts)
    assert done == pytest.approx(steps, abs=3)
    assert abs(abs(float(optimizer.averaged_parameters()[0][2])) - 0.6) < 5e-5
    assert optimizer.oracle_counts["hvp"] == 0


@pytest.mark.parametrize(
    ("start", "lr", "steps"),
    [("beside the saddle", 1.0, 263), ("on a slope", 1.0, 26), ("on a slope", 0.5, 57), ("on a slope", 0.1, 299)],
)
def test_gda_on_the_w_shaped_problem(start, lr, steps):
    assert run(bo.GDA, start, 300, lr=lr, lower_lr=0.05)[0] == steps


@pytest.mark.few(1)
@pytest.mark.parametrize(("start", "hit", "restarts"), [("beside the saddle", 172, 4), ("on a slope", 35, 3)])
def test_the_minimum_of_the_w_shaped_problem_is_found_in_time(start, hit, restarts):
    """The first steps of that table, up to the minimum and the last restart."""
    found = run(bo.RAGDA, start, hit + 25, **PRINTED)
    assert (found[0], found[2]) == (hit, restarts)
    assert found[-1].oracle_counts["hvp"] == 0


@pytest.mark.parametrize("seeds", [(2,), pytest.param(range(3), marks=pytest.mark.slow)])
def test_perturbing_the_initial_point_saves_steps(seeds):
    hits = [run(bo.PRAGDA, "beside the saddle", 90, seed, **PERTURBED)[0] for seed in seeds]
    assert sorted(hits)[len(hits) // 2] == pytest.approx(69, abs=4)


def test_theory_of_the_minimax_theorem_stops_at_the_saddle():
    """With the true constants L = 1, rho = 2 the printed algorithm ends near the saddle, after K steps."""
    for eps, period in ((1e-2, 2), (1e-5, 8)):
        theta = min(4 * (2 * eps / 16) ** 0.25, 1.0)
        _, steps, restarts, gap, _ = run(
            bo.PRAGDA, "beside the saddle", 100, lr=0.25, lower_lr=0.05, lower_steps=10, momentum=1 - theta,
            restart_period=period, restart_radius=math.sqrt(eps / 2), perturbation=1e-6, perturb_initial=False,
        )  # fmt: skip
        assert (steps, restarts) == (period, 0)
        assert gap == pytest.approx(5.33e-3, rel=1e-2)
    x, y, constants = torch.zeros(3), torch.zeros(2), {"ell": 20.0499, "mu": 10.0, "rho": 2.0}
    x, y, constants = [x.requires_grad_()], [y.requires_grad_()], Constants.minimax(**constants)
    optimizer = bo.RAGDA(x, y, **constants.first_order(eps=1e-2))
    perturbed = bo.PRAGDA(x, y, **constants.second_order(3, eps=1e-2))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / (4 * 60.25), rel=1e-3)
    assert optimizer.restart_radius == pytest.approx(math.sqrt(1e-2 / 91.2), rel=1e-3)
    assert 0 < perturbed.perturbation < 1e-4 * perturbed.restart_radius < 1e-4 * optimizer.restart_radius


# ---------------------------------------------------------------------------------------------------- iMCN


def test_imcn_takes_newton_steps():
    """A small cubic term and an exact subproblem: one Newton step from anywhere to the minimiser of the quadratic."""
    problem = Saddle()
    optimizer = bo.iMCN(problem.x, problem.y, lr=0.2, lower_lr=problem.lr, lower_steps=60, cubic=1e-9,
                        cubic_steps=200, linear_steps=5, perturbation=0.0)  # fmt: skip
    problem.run(optimizer)
    close(problem.x[0].detach(), problem.minimiser(), 1e-6)


def test_imcn_minimises_its_cubic_model():
    """On a quadratic the step is the minimiser of the model whose Hessian is known: (H + M|s|/2) s = -g."""
    problem = Saddle()
    optimizer = bo.iMCN(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=60, cubic=3.0,
                        cubic_steps=200, linear_steps=5, perturbation=1e-2)  # fmt: skip
    optimizer.backward(problem.upper)
    s, (g,), H = -0.1 * problem.x[0].grad, problem.hypergradient(), problem.hessian()
    close(H @ s + 1.5 * s.norm() * s, -g, 1e-8)
    model = g @ s + s @ H @ s / 2 + s.norm() ** 3 / 2
    torch.testing.assert_close(optimizer.diagnostics["model_decrease"], -model)
    counts = optimizer.oracle_counts
    assert (counts["upper_grad"], counts["lower_grad"]) == (1, 60)
    assert counts["hvp"] <= 202 * 7


def test_imcn_leaves_an_exact_saddle_and_ends():
    x, y, steps = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True), 0

    def loss():
        return x[0] ** 4 / 4 - x[0] ** 2 + x[1] ** 2 + x @ y - y @ y / 2  # max_y: x1^4/4 - x1^2/2 + 3/2 x2^2

    optimizer = bo.iMCN([x], [y], lr=0.2, lower_lr=1.0, lower_steps=1, cubic=6.0, tol=1e-10)
    while not optimizer.converged:
        optimizer.step(loss)
        steps += 1
        assert steps < 30
    close(x.detach().abs(), torch.tensor([1.0, 0.0]), 1e-4)
    counts, last = optimizer.oracle_counts, x.detach().clone()
    optimizer.step(loss)
    assert torch.equal(last, x)
    assert counts == optimizer.oracle_counts

"""PZOBO, HOZOG and ESMAML: the properties T1 to T24 and T26 of the PZOBO specification (T25 is in test_recipes)."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel_optim as bo
from bilevel_optim.hypergradient.directions import KINDS, Directions, draw_seed
from bilevel_optim.problem.vector import Vector

from .problems import Problem, Scalar

matrix_power = torch.linalg.matrix_power


class QB(Problem):
    """g = y'Ay/2 - y'Bx, f = |y - c|^2/2 + lam |x|^2/2, whose N-step response is linear: y_N = y_0 + J_N x."""

    def __init__(self, d=5, p=4, lam=0.3, seed=0, x=None):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        A = random(d, d)
        self.A, self.B, self.c, self.lam = A @ A.T / d + 0.5 * torch.eye(d), random(d, p), random(d), lam
        x = random(p) if x is None else x
        x, y = x.requires_grad_(), torch.zeros(d, requires_grad=True)
        super().__init__([x], [y], self._upper, self._lower, lr=1 / float(torch.linalg.eigvalsh(self.A)[-1]))

    def _upper(self):
        return (self.y[0] - self.c).square().sum() / 2 + self.lam * self.x[0].square().sum() / 2

    def _lower(self):
        y = self.y[0]
        return y @ self.A @ y / 2 - y @ self.B @ self.x[0]

    def jacobian(self, steps):
        E = torch.eye(len(self.A)) - self.lr * self.A
        return (torch.eye(len(self.A)) - matrix_power(E, steps)) @ torch.linalg.solve(self.A, self.B)

    def indirect(self, steps):
        """J_N' (y_N - c) for the start y_0 = 0."""
        J = self.jacobian(steps)
        return J.T @ (J @ self.x[0].detach() - self.c)

    def solution(self):
        return [torch.linalg.solve(self.A, self.B @ self.x[0].detach())]

    def hypergradient(self):
        J = torch.linalg.solve(self.A, self.B)
        return [self.lam * self.x[0].detach() + J.T @ (self.solution()[0] - self.c)]


def estimate(cls, problem, count, seed=0, steps=6, **options):
    """One estimate; returns the optimizer, the gradient, its coefficients c_j, and the directions as a matrix."""
    options.setdefault("lower_lr", getattr(problem, "lr", 0.1))
    generator = torch.Generator().manual_seed(seed)
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_steps=steps, directions=count, generator=generator, **options)
    kind, mu = options.get("direction", "gaussian"), options.get("smoothing", 1e-2)
    directions = Directions(
        Vector(problem.x), kind, count, seed=draw_seed(torch.Generator().manual_seed(seed)), smoothing=mu
    )
    optimizer.backward(problem.upper, problem.lower)
    U = torch.stack([torch.cat([t.flatten() for t in directions.direction(j)]) for j in range(count)])
    gradient = torch.cat([t.grad.flatten() for t in problem.x])
    return optimizer, gradient, optimizer.diagnostics["coefficients"], U


many = pytest.mark.filterwarnings("ignore:the estimate of the hypergradient is mostly noise")


# ------------------------------------------------------------------------------------------ exact identities


def test_hand_numbers():
    """T1: A=2, B=1, alpha=1/4, N=2, x=1, c=1, lambda=0.1."""
    problem, mu = Scalar(), 1e-3
    _, h, _, U = estimate(bo.PZOBO, problem, 1, steps=2, smoothing=mu)
    u = U[0, 0]
    assert problem.y[0].item() == pytest.approx(0.375, abs=1e-12)
    assert h.item() == pytest.approx(float(0.1 - 0.234375 * u**2), abs=1e-9)
    problem = Scalar()
    _, h, _, U = estimate(bo.HOZOG, problem, 1, steps=2, smoothing=mu)
    u = U[0, 0]
    assert h.item() == pytest.approx(float(-0.134375 * u**2 + mu / 2 * 0.240625 * u**3), abs=1e-9)
    for cls, options, expected in [
        (bo.ITD, {}, -0.134375),
        (bo.AID, {"linear_solver": "fixed_point", "linear_steps": 2}, -0.134375),
        (bo.AID, {"linear_steps": 1}, -0.2125),
        (bo.FirstOrder, {}, 0.1),
    ]:
        problem = Scalar()
        cls(problem.x, problem.y, lr=0.1, lower_lr=0.25, lower_steps=2, **options).backward(
            problem.upper, problem.lower
        )
        assert problem.x[0].grad.item() == pytest.approx(expected, abs=1e-12)


@many
@pytest.mark.parametrize(("mu", "tolerance"), [(1.0, 1e-13), (0.1, 1e-12), (1e-3, 1e-10), (1e-6, 1e-7)])
def test_linear_response_is_exact_at_every_smoothing(mu, tolerance):
    """T2 and T23: delta = J_N u whatever mu, with rounding that grows as 1/mu; forward equals central."""
    problem = QB()
    _, h, c, U = estimate(bo.PZOBO, problem, 3, smoothing=mu)
    w = problem.indirect(6)
    torch.testing.assert_close(c, U @ w, rtol=tolerance, atol=tolerance * w.norm())
    torch.testing.assert_close(
        h, problem.lam * problem.x[0].detach() + (U @ w) @ U / 3, rtol=tolerance, atol=10 * tolerance * w.norm()
    )
    _, central, _, _ = estimate(bo.PZOBO, QB(), 3, smoothing=mu, difference="central")
    torch.testing.assert_close(h, central, rtol=tolerance, atol=10 * tolerance * w.norm())


def test_aid_with_as_many_fixed_point_steps_is_itd():
    """T8, T9: constant Hessian."""
    grads = {}
    for name, cls, options in [
        ("itd", bo.ITD, {}),
        ("fp", bo.AID, {"linear_solver": "fixed_point", "linear_steps": 7}),
        ("cg", bo.AID, {"linear_steps": 5}),
    ]:
        problem = QB()
        cls(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=7, warm_start=False, **options).backward(
            problem.upper, problem.lower
        )
        grads[name] = problem.x[0].grad
    torch.testing.assert_close(grads["fp"], grads["itd"], rtol=1e-12, atol=1e-12)
    y = problem.jacobian(7) @ problem.x[0].detach()
    exact = problem.lam * problem.x[0].detach() + problem.B.T @ torch.linalg.solve(problem.A, y - problem.c)
    torch.testing.assert_close(grads["cg"], exact, rtol=1e-11, atol=1e-11)


def test_lower_solve_contracts_and_the_error_follows():
    """T10, T26: the error against the exact hypergradient falls like (1 - alpha mu_g)^N down to rounding."""
    errors = []
    for steps in (0, 10, 20, 40, 80):
        problem = QB()
        estimate(bo.PZOBO, problem, 4, steps=steps, direction="orthogonal")
        slowest = (1 - problem.lr * float(torch.linalg.eigvalsh(problem.A)[0])) ** steps
        y = problem.solution()[0]
        assert (problem.y[0] - y).norm() <= slowest * y.norm() + 1e-12
        J = torch.linalg.solve(problem.A, problem.B)
        assert torch.linalg.matrix_norm(problem.jacobian(steps) - J, 2) <= slowest * torch.linalg.matrix_norm(J, 2)
        errors.append(problem.error())
        assert errors[-1] <= 3 * slowest + 1e-10
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


def test_hozog_minus_pzobo_is_the_curvature_term():
    """T14: with the same u and f = |y - c|^2/2 the difference is (mu/2) |delta|^2 u."""
    mu = 0.3
    _, pzobo, _, _ = estimate(bo.PZOBO, QB(lam=0.0), 1, smoothing=mu)
    problem = QB(lam=0.0)
    _, hozog, _, U = estimate(bo.HOZOG, problem, 1, smoothing=mu)
    delta = problem.jacobian(6) @ U[0]
    torch.testing.assert_close(hozog - pzobo, mu / 2 * delta.dot(delta) * U[0], rtol=1e-10, atol=1e-12)


def test_identities_that_cost_nothing():
    """T22."""
    problem = QB()
    _, h, _, _ = estimate(bo.PZOBO, problem, 4, steps=0)
    assert torch.equal(h, problem.lam * problem.x[0].detach())
    problem = QB()
    problem.upper = lambda: problem.x[0].square().sum()
    _, h, _, _ = estimate(bo.PZOBO, problem, 4)
    assert torch.equal(h, 2 * problem.x[0].detach())
    _, h, _, U = estimate(bo.PZOBO, QB(d=5, p=8, lam=0.0), 3)
    residual = torch.linalg.lstsq(U.T, h).solution @ U - h
    assert residual.norm() < 1e-12 * h.norm()


def test_upper_parameters_are_restored_exactly():
    """T18."""
    problem = QB()
    before, storage = problem.x[0].detach().clone(), problem.x[0].data_ptr()
    for vectorize in (True, 2, False):
        estimate(bo.PZOBO, problem, 5, smoothing=0.123, vectorize=vectorize)
        assert torch.equal(problem.x[0], before)
        assert problem.x[0].data_ptr() == storage


# ------------------------------------------------------------------------------------------ directions


@pytest.mark.parametrize("kind", KINDS)
def test_directions_do_not_depend_on_how_many_are_made(kind):
    """T19."""
    x = Vector([torch.randn(3, 2), torch.randn(()), torch.randn(5)])
    directions = Directions(x, kind, 9, seed=11, smoothing=0.1)
    again = Directions(x, kind, 9, seed=11, smoothing=0.1)
    whole = directions.points([(j, 1.0) for j in range(9)])
    for j in reversed(range(9)):
        for a, b in zip(again.point(j, 1.0), whole.lane(j), strict=True):
            assert torch.equal(a, b)
    other = Directions(x, kind, 9, seed=12, smoothing=0.1).direction(0)
    assert any(not torch.equal(a, b) for a, b in zip(directions.direction(0), other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(directions.point(4, 0.0), x, strict=True))


def matrix(x, kind, count, seed=0, **options):
    directions = Directions(x, kind, count, seed=seed, smoothing=0.1, **options)
    return torch.stack([torch.cat([t.flatten() for t in directions.direction(j)]) for j in range(count)])


def test_lengths_and_orthogonality():
    x = Vector([torch.randn(3, 2), torch.randn(()), torch.randn(5)])
    p = 12
    assert torch.allclose(matrix(x, "sphere", 4).norm(dim=1), torch.tensor(p**0.5))
    assert matrix(x, "rademacher", 4).abs().unique().tolist() == [1.0]
    block = matrix(x, "block_sphere", 4)
    for part in block.split([6, 1, 5], 1):
        torch.testing.assert_close(part.norm(dim=1), torch.ones(4))
    for seed in range(5):  # two bases, and a part of a third
        U = matrix(x, "orthogonal", 30, seed=seed)
        for part in U.split(p):
            torch.testing.assert_close(part @ part.T, p * torch.eye(len(part)), rtol=0, atol=1e-11)


@pytest.mark.parametrize("batches", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_mean_and_covariance(kind, batches):
    """T3, T4: on a linear response the estimate has mean w, and the predicted variance."""
    p, count = 10, 4
    w = torch.linspace(-1, 2, p)
    x = Vector([torch.zeros(p)])
    estimates = []
    for seed in range(batches):
        directions = Directions(x, kind, count, seed=seed, smoothing=0.1)
        U = torch.stack([directions.direction(j)[0] for j in range(count)])
        estimates.append(directions.combine((U @ w) / count)[0])
        assert kind == "block_sphere" or U.shape == (count, p)
    estimates = torch.stack(estimates)
    spread = (directions.variance**0.5) * w.norm()
    assert (estimates.mean(0) - w).norm() < 4 * spread / batches**0.5
    predicted = {
        "gaussian": (p + 1) / count,
        "sphere": (p - 1) / count,
        "rademacher": (p - 1) / count,
        "orthogonal": (p - count) / count,
        "block_sphere": (p - 1) / count,
    }[kind]
    assert directions.variance == pytest.approx(predicted)
    squares = (estimates - w).square().sum(1) / w.dot(w)
    assert abs(squares.mean() - predicted) < 4.5 * squares.std() / batches**0.5 + 1e-12
    if batches == 100_000:
        assert float(squares.mean()) == pytest.approx(predicted, rel=0.02)
    if kind == "gaussian":
        products = (estimates - w).unsqueeze(2) * (estimates - w).unsqueeze(1)
        exact = (w.dot(w) * torch.eye(p) + torch.outer(w, w)) / count
        assert ((products.mean(0) - exact).abs() < 5 * products.std(0) / batches**0.5).all()


@many
def test_reference_code_mode_damps_every_tensor_by_its_size():
    """T16: unit directions per tensor without a factor have mean w_l / p_l; with the factor they are unbiased."""
    generator = torch.Generator().manual_seed(0)
    M, N = torch.randn(5, 2, generator=generator), torch.randn(5, 8, generator=generator)
    problem = QB()
    problem.x = [torch.ones(2, requires_grad=True), torch.ones(8, requires_grad=True)]
    problem.upper = lambda: (problem.y[0] - problem.c).square().sum() / 2
    problem.lower = lambda: (problem.y[0] - M @ problem.x[0] - N @ problem.x[1]).square().sum() / 2
    problem.lr = 1.0
    y = (M.sum(1) + N.sum(1)) - problem.c
    w = torch.cat([M.T @ y, N.T @ y])
    sizes = torch.tensor([2.0] * 2 + [8.0] * 8)
    count = 4000
    for scale, factor in (("none", 1.0), ("unbiased", sizes), (0.5, 0.5 * sizes)):
        _, h, c, U = estimate(bo.PZOBO, problem, count, steps=1, direction="block_sphere", scale=scale)
        samples = c[:, None] * U * factor
        error = samples.std(0) / count**0.5
        assert ((h - factor * w / sizes).abs() < 4.5 * error).all()


# ------------------------------------------------------------------------------------------ error laws


class Sine(Problem):
    """g = (y - phi(x))^2 / 2, f = y: Phi_N = (1 - (1 - alpha)^N) phi."""

    def __init__(self, x, phi=torch.sin, lr=0.3):
        x, y = torch.as_tensor(x, dtype=torch.float64).requires_grad_(), torch.zeros((), requires_grad=True)
        super().__init__([x], [y], lambda: y, lambda: (y - phi(x)).square() / 2, lr=lr)


@many
@pytest.mark.parametrize(("mu", "predicted"), [(1.0, 0.4257), (0.5, 0.6194), (0.1, 0.6984)])
@pytest.mark.parametrize("count", [4000, pytest.param(400_000, marks=pytest.mark.slow)])
def test_bias_is_quadratic_in_the_smoothing(mu, predicted, count):
    """T5: Gaussian smoothing of the sine: mean (1 - (1 - alpha)^N) exp(-mu^2/2) cos x."""
    _, h, c, U = estimate(bo.PZOBO, Sine(0.7), count, steps=7, smoothing=mu)
    samples = c * U[:, 0]
    assert abs(h.item() - predicted) < 4.5 * float(samples.std()) / count**0.5 + 1e-4


@many
@pytest.mark.parametrize("count", [6000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_quadratic_response(count):
    """T6: phi = x'Gx has no bias, and variance (p + 1)|2Gx|^2 + mu^2 (p + 4)(tr(G)^2 + 2 tr(G^2))."""
    p, mu = 4, 0.5
    G = torch.randn(p, p)
    G = G + G.T
    x = torch.randn(p)
    _, h, c, U = estimate(bo.PZOBO, Sine(x, lambda x: x @ G @ x, lr=1.0), count, steps=1, smoothing=mu)
    w = 2 * G @ x.detach()
    variance = (p + 1) * w.dot(w) + mu**2 * (p + 4) * (G.trace() ** 2 + 2 * (G @ G).trace())
    samples = c[:, None] * U
    measured = (samples - w).square().sum(1)
    assert (h - w).norm() < 4 * (variance / count) ** 0.5
    assert abs(measured.mean() - variance) < 4.5 * measured.std() / count**0.5


@many
def test_noise_does_not_vanish_at_a_stationary_point():
    """T15: E|h|^2 = (p + 1)|J'v|^2 where the hypergradient is zero; HOZOG keeps only its curvature term."""
    steps, mu, count = 8, 1e-2, 6000
    problem = QB(lam=0.5)
    J = problem.jacobian(steps)
    hessian = 0.5 * torch.eye(4) + J.T @ J
    problem.x[0].data = torch.linalg.solve(hessian, J.T @ problem.c)
    w = problem.indirect(steps)
    _, _, c, U = estimate(bo.PZOBO, problem, count, steps=steps, smoothing=mu)
    norms = (problem.lam * problem.x[0].detach() + c[:, None] * U).square().sum(1)
    assert abs(norms.mean() - 5 * w.dot(w)) < 4.5 * norms.std() / count**0.5
    problem.y[0].data.zero_()
    _, _, c, U = estimate(bo.HOZOG, problem, count, steps=steps, smoothing=mu)
    norms = (c[:, None] * U).square().sum(1)
    expected = mu**2 / 4 * 8 * (hessian.trace() ** 2 + 2 * (hessian @ hessian).trace())
    assert abs(norms.mean() - expected) < 5 * norms.std() / count**0.5


class Features:
    """Softmax regression on learned features: x are the features' weights, y a regularised head."""

    def __init__(self, activation, n=24, p=(4, 5), dtype=torch.float64):
        generator = torch.Generator().manual_seed(1)
        self.X, self.t = torch.randn(n, p[0], generator=generator), torch.randint(0, 3, (n,), generator=generator)
        self.net = nn.Sequential(nn.Linear(*p), activation(), nn.Linear(p[1], 3)).to(dtype)
        self.X = self.X.to(dtype)
        for q in self.net.parameters():
            q.data = torch.randn(q.shape, generator=generator).to(dtype) * 0.5
        self.x, self.y = [*self.net[0].parameters()], [*self.net[2].parameters()]
        self.lr = 0.2

    def upper(self):
        return F.cross_entropy(self.net(self.X[::2]), self.t[::2])

    def lower(self):
        penalty = sum(q.square().sum() for q in self.y)
        return F.cross_entropy(self.net(self.X[1::2]), self.t[1::2]) + 0.05 * penalty


def unrolled(problem, steps, **options):
    """The exact derivative of the lower solve, and its indirect part."""
    bo.ITD(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=steps, **options).backward(
        problem.upper, problem.lower
    )
    total = torch.cat([t.grad.flatten() for t in problem.x])
    direct = torch.cat([t.flatten() for t in torch.autograd.grad(problem.upper(), problem.x)])
    return total, total - direct


@many
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_agrees_with_unrolling_in_the_mean(count):
    """T11: a smooth problem that is not quadratic."""
    total, w = unrolled(Features(nn.Tanh), 10)
    problem = Features(nn.Tanh)
    _, h, _, U = estimate(bo.PZOBO, problem, count, steps=10, smoothing=1e-3)
    assert (h - total).norm() < 3 * ((U.shape[1] + 1) / count) ** 0.5 * w.norm() + 1e-5


def test_difference_converges_to_the_directional_derivative():
    """T11, T12: first order in mu for a smooth network; small at a tiny mu for one with kinks."""
    _, w = unrolled(Features(nn.Tanh), 10)
    errors = []
    for mu in (1e-1, 1e-2, 1e-3):
        _, _, c, U = estimate(bo.PZOBO, Features(nn.Tanh), 1, steps=10, smoothing=mu)
        errors.append(float((c[0] - U[0] @ w).abs()))
    slopes = [torch.log10(torch.tensor(a / b)).item() for a, b in itertools.pairwise(errors)]
    assert slopes == pytest.approx([1.0, 1.0], abs=0.15)
    errors = []
    for mu in (1e-1, 1e-2):
        _, _, c, U = estimate(bo.PZOBO, Features(nn.Tanh), 1, steps=10, smoothing=mu, difference="central")
        errors.append(float((c[0] - U[0] @ w).abs()))
    assert torch.log10(torch.tensor(errors[0] / errors[1])).item() == pytest.approx(2.0, abs=0.15)
    _, w = unrolled(Features(nn.ReLU), 10)
    for seed in range(3):
        _, _, c, U = estimate(bo.PZOBO, Features(nn.ReLU), 1, seed=seed, steps=10, smoothing=1e-5)
        assert (c[0] - U[0] @ w).abs() < 1e-3 * (U[0] @ w).abs() + 1e-5


@many
def test_float32_noise_is_predicted():
    """T13: the relative error of a difference grows as 1/mu, and is what the diagnostic says within a factor of 4."""
    generator = torch.Generator().manual_seed(0)
    d, p = 50, 200
    A, B = torch.randn(d, d, generator=generator), torch.randn(d, p, generator=generator) / p**0.5
    A = (A @ A.T / d + torch.eye(d)).float()
    products = []
    for mu in (1e-1, 1e-2, 1e-3, 1e-4):
        x, y = torch.ones(p).float().requires_grad_(), torch.zeros(d).float().requires_grad_()

        def upper(y=y):
            return y.sum()

        def lower(x=x, y=y):
            return y @ A @ y / 2 - y @ B.float() @ x

        errors, predicted = [], []
        for seed in range(4):
            problem = Problem([x], [y], upper, lower, lr=0.2)
            J = torch.linalg.solve(A.double(), B)
            E = torch.eye(d) - 0.2 * A.double()
            J = (torch.eye(d) - matrix_power(E, 20)) @ J
            y.data.zero_()
            optimizer, _, c, U = estimate(bo.PZOBO, problem, 1, seed=seed, steps=20, smoothing=mu, vectorize=False)
            exact = J @ U[0].double()
            # The adjoint is a vector of ones: the error of the coefficient is about the norm of that of the difference.
            errors.append(float((c[0] - exact.sum()).abs() / exact.norm()))
            predicted.append(float(optimizer.diagnostics["difference_error"]))
        error = sum(errors) / 4
        assert 0.1 < error / (sum(predicted) / 4) < 4
        products.append(error * mu)
    assert max(products) < 8 * min(products)
    y.data.zero_()
    with pytest.warns(bo.BilevelWarning, match="mostly rounding"):
        estimate(bo.PZOBO, problem, 1, steps=20, smoothing=1e-6)


def test_warns_of_noise_once():
    x, y = torch.zeros(2000, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = bo.PZOBO([x], [y], lr=0.1, lower_lr=0.5, lower_steps=3, directions=1)
    upper, lower = (lambda: (y - 1).square().sum()), (lambda: (y - x.mean()).square().sum())
    with pytest.warns(bo.BilevelWarning, match=r"mostly noise.*2,000 dimensions.*44.7 times"):
        optimizer.step(upper, lower)
    assert float(optimizer.diagnostics["noise_to_signal"]) == pytest.approx(2001**0.5)
    optimizer.step(upper, lower)
    # Where the direct term dominates, the noise of the indirect one is no reason to warn.
    optimizer = bo.PZOBO([x], [y], lr=0.1, lower_lr=0.5, lower_steps=3, directions=1)
    optimizer.step(lambda: (x - 1).square().sum() * 10 + upper(), lower)


# ------------------------------------------------------------------------------------------ paths


class Noisy:
    """Noise vectors, the same sequence at every pass."""

    def __init__(self, d, count):
        self.noise = torch.randn(count, d, generator=torch.Generator().manual_seed(5))

    def __iter__(self):
        return iter(self.noise)


def test_shared_batches_cancel():
    """T7, first half: with one noise for all paths of a step the difference is exact."""
    problem, sigma = QB(), 3.0
    problem.y[0].data = torch.randn(5)

    def lower(noise):
        return problem.lower() + sigma * noise @ problem.y[0]

    for vectorize in (True, 2, False):
        optimizer = bo.PZOBO(
            problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=6, directions=4,
            direction="orthogonal", vectorize=vectorize,
        )  # fmt: skip
        optimizer.backward(problem.upper, bo.Objective(lower, Noisy(5, 100)))
        J = problem.jacobian(6)
        exact = problem.lam * problem.x[0].detach() + J.T @ (problem.y[0].detach() - problem.c)
        torch.testing.assert_close(problem.x[0].grad, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cls", [bo.PZOBO, bo.HOZOG])
def test_every_path_sees_one_batch_per_step_in_order(cls):
    """2.2: batches S_0 to S_{N-1} for the base path and each perturbed one; then one outer batch."""
    x, y, seen = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True), []

    def loss(level):
        def at(batch):
            seen.append((level, batch))
            return (y - x - batch).square().sum()

        return at

    optimizer = cls([x], [y], lr=0.0, lower_lr=0.1, lower_steps=3, directions=2, vectorize=False)
    upper, lower = bo.Objective(loss("f"), [10.0, 20.0]), bo.Objective(loss("g"), [0.0, 1.0, 2.0, 3.0, 4.0])
    optimizer.step(upper, lower)
    path = [("g", 0.0), ("g", 1.0), ("g", 2.0)]
    between = [("f", 10.0)]
    perturbed = between if cls is bo.HOZOG else []
    assert seen == [*path, *between, *path, *perturbed, *path, *perturbed]
    seen.clear()
    optimizer.step(upper, lower)
    path = [("g", 3.0), ("g", 4.0), ("g", 0.0)]
    between = [("f", 20.0)]
    perturbed = between if cls is bo.HOZOG else []
    assert seen == [*path, *between, *path, *perturbed, *path, *perturbed]


def test_independent_noise_is_amplified():
    """T7, second half: noise of its own for every evaluation adds (2/mu^2) v' S v to the variance of a coefficient."""
    problem, sigma, steps, count = QB(), 0.05, 3, 1000
    own = torch.Generator().manual_seed(1)

    def lower():
        return problem.lower() + sigma * torch.randn(5, generator=own) @ problem.y[0]

    variances = []
    for mu in (1e-1, 1e-2):
        x, y = problem.x, [torch.zeros(5, requires_grad=True)]
        problem.y = y
        noisy = Problem(x, y, problem.upper, lower, lr=problem.lr)
        _, _, c, U = estimate(bo.PZOBO, noisy, count, steps=steps, smoothing=mu, vectorize=False)
        v = y[0].detach() - problem.c
        E = torch.eye(5) - problem.lr * problem.A
        S = sum(matrix_power(E, m) @ matrix_power(E, m).T for m in range(steps)) * (problem.lr * sigma) ** 2
        # The base path is one draw for all directions: half of the variance is common to them, so it is left out here.
        errors = c - U @ (problem.jacobian(steps).T @ v)
        variances.append(float(errors.var()))
        assert variances[-1] == pytest.approx(float(v @ S @ v) / mu**2, rel=0.15)
    assert variances[1] == pytest.approx(100 * variances[0], rel=0.25)


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("cls", [bo.PZOBO, bo.HOZOG])
@pytest.mark.parametrize("count", [1, 6])
def test_stacked_chunked_and_looped_paths_agree(cls, difference, count):
    """T17: with dropout, batch statistics, momentum, and data; chunks that do and do not divide the number of paths."""

    def run(vectorize):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3))
        X, t = torch.randn(24, 4), torch.randint(0, 3, (24,))
        batches = list(torch.arange(24).split(6))
        x, y = [*net[:2].parameters()], [*net[4].parameters()]

        def loss(index):
            return F.cross_entropy(net(X[index]), t[index])

        optimizer = cls(
            x, y, lr=0.1, lower_lr=0.3, lower_steps=3, directions=count, difference=difference, vectorize=vectorize,
            lower_optimizer=partial(torch.optim.SGD, momentum=0.9),
        )  # fmt: skip
        upper, lower = bo.Objective(loss, batches), bo.Objective(loss, batches)
        for _ in range(2):
            optimizer.step(upper, lower)
        assert "vectorize_fallback" not in optimizer.diagnostics
        assert int(net[1].num_batches_tracked) == 2
        return [*(q.detach() for q in net.parameters()), *net.buffers(), optimizer.diagnostics["coefficients"]]

    reference = run(False)
    for vectorize in (True, 1, 3, 4):
        for a, b in zip(reference, run(vectorize), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "factory",
    [
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.SGD, momentum=0.9, nesterov=True),
        torch.optim.Adam,
        torch.optim.Adagrad,
    ],
    ids=["momentum", "nesterov", "adam", "adagrad"],
)
@pytest.mark.parametrize("vectorize", [True, False])
def test_every_path_has_its_own_optimizer_state(factory, vectorize):
    """T20: the difference is the derivative of the whole optimizer map, in the first step and in later ones."""
    truth, _ = unrolled(Features(nn.Tanh), 6, lower_optimizer=factory, warm_start=False)
    problem = Features(nn.Tanh)
    optimizer = bo.PZOBO(
        problem.x, problem.y, lr=0.0, lower_lr=problem.lr, lower_steps=6, directions=25, direction="orthogonal",
        smoothing=1e-4, difference="central", lower_optimizer=factory, vectorize=vectorize,
    )  # fmt: skip
    for _ in range(2):
        optimizer.step(problem.upper, problem.lower)
        h = torch.cat([t.grad.flatten() for t in problem.x])
        assert (h - truth).norm() < 1e-6 * truth.norm()


def test_outer_batches_average_to_the_full_batch():
    """T21: linear in the outer batch, for fixed inner batches and directions."""
    results = []
    subsets = [list(s) for s in itertools.combinations(range(6), 2)]
    for index in [list(range(6)), *subsets]:
        problem = Features(nn.Tanh)
        generator = torch.Generator().manual_seed(3)
        optimizer = bo.PZOBO(
            problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=4, directions=3, generator=generator
        )
        upper = bo.Objective(lambda i, p=problem: F.cross_entropy(p.net(p.X[i]), p.t[i]), [torch.tensor(index)])
        optimizer.backward(upper, problem.lower)
        results.append(torch.cat([t.grad.flatten() for t in problem.x]))
    torch.testing.assert_close(torch.stack(results[1:]).mean(0), results[0], rtol=1e-12, atol=1e-12)


def test_a_diverging_path_is_left_out():
    """A direction whose path is not finite is dropped, the others count fully, and a warning says so."""
    problem = QB()
    lower = problem.lower
    limit = float(problem.x[0].detach()[0]) + 1e-6

    def picky():
        return lower() + torch.where(problem.x[0][0] > limit, torch.nan, 0.0) * problem.y[0].sum()

    problem.lower = picky
    with pytest.warns(bo.BilevelWarning, match="left out"):
        optimizer, h, c, U = estimate(bo.PZOBO, problem, 8)
    kept = U[:, 0] < 0
    assert 0 < kept.sum() < 8
    assert torch.equal(c.isfinite(), kept)
    assert int(optimizer.diagnostics["dropped_directions"]) == int((~kept).sum())
    w = problem.indirect(6)
    expected = problem.lam * problem.x[0].detach() + (U[kept] @ w) @ U[kept] / kept.sum()
    torch.testing.assert_close(h, expected, rtol=1e-11, atol=1e-11)
    problem.lower = lambda: lower() + torch.where((problem.x[0] == before).all(), 0.0, torch.nan) * problem.y[0].sum()
    before = problem.x[0].detach().clone()
    with pytest.raises(bo.NonFiniteError, match="smaller smoothing"):
        estimate(bo.PZOBO, problem, 4)


def test_what_vmap_cannot_do_is_looped():
    problem = QB()
    dense = problem.lower
    sparse = problem.B.to_sparse()
    problem.lower = lambda: dense() + 0.0 * torch.sparse.mm(sparse, problem.x[0][:, None]).sum() * problem.y[0].sum()
    optimizer, h, _, _ = estimate(bo.PZOBO, problem, 4, direction="orthogonal")
    assert optimizer.diagnostics["vectorize_fallback"]
    exact = problem.lam * problem.x[0].detach() + problem.indirect(6)
    torch.testing.assert_close(h, exact, rtol=1e-11, atol=1e-11)


def test_relative_smoothing_scales_with_each_tensor():
    """7.1: D_l is the root mean square of the tensor; unbiased for any D, and 1 for a tensor of zeros."""
    x = Vector([torch.full((4,), 3.0), torch.zeros(2)])
    plain = Directions(x, "rademacher", 1, seed=0, smoothing=0.5)
    relative = Directions(x, "rademacher", 1, seed=0, smoothing=0.5, relative=True)
    for j, factor in enumerate((3.0, 1.0)):
        torch.testing.assert_close(relative.point(0, 1.0)[j] - x[j], factor * (plain.point(0, 1.0)[j] - x[j]))
        torch.testing.assert_close(relative.combine(torch.ones(1))[j], plain.combine(torch.ones(1))[j] / factor)


# ------------------------------------------------------------------------------------------ the golden problem


class Golden(QB):
    """T24: the data of the specification."""

    def __init__(self):
        super().__init__(d=4, p=6, x=torch.ones(6))
        i, j = torch.arange(4)[:, None], torch.arange(6)[None]
        self.A = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])) + 0.1
        self.B = (((i + 1) * (j + 2)) % 5 - 2) / 2
        self.c, self.lam = torch.tensor([1.0, -1.0, 0.5, 2.0]), 0.1
        self.lr = 1 / float(torch.linalg.eigvalsh(self.A)[-1])

    def objective(self):
        y = self.jacobian(20) @ self.x[0].detach()
        return float((y - self.c).square().sum() / 2 + self.lam * self.x[0].detach().square().sum() / 2)


def test_golden_values():
    problem = Golden()
    eigenvalues = torch.linalg.eigvalsh(problem.A)
    assert eigenvalues[[0, -1]].tolist() == pytest.approx([1.0836401, 4.1202613], abs=5e-8)
    bo.ITD(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=20).backward(problem.upper, problem.lower)
    expected = torch.tensor([-0.03776012, 0.48101855, -0.17931777, 0.11551235])
    torch.testing.assert_close(problem.y[0].detach(), expected, rtol=0, atol=6e-9)
    gradient = torch.tensor([0.75571548, -0.96643274, -0.23717176, 0.92143453, 0.0264545, 0.75571548])
    torch.testing.assert_close(problem.x[0].grad, gradient, rtol=0, atol=6e-9)
    problem.y[0].data.zero_()
    _, h, _, _ = estimate(bo.PZOBO, problem, 6, steps=20, direction="orthogonal", smoothing=0.1)
    torch.testing.assert_close(h, gradient, rtol=0, atol=6e-9)
    assert problem.objective() == pytest.approx(3.94156416, abs=6e-9)
    J = problem.jacobian(20)
    assert float(torch.linalg.eigvalsh(0.1 * torch.eye(6) + J.T @ J)[-1]) == pytest.approx(2.18027592, abs=6e-9)


def gap(count, steps, seeds, factor=0.5):
    """Mean gap to the minimum of Phi_N at the end of SGD with the step size of the specification."""
    gaps = []
    for seed in range(seeds):
        problem = Golden()
        lr = factor / (2.18027592 * (1 + 7 / count))
        optimizer = bo.PZOBO(
            problem.x, problem.y, lr=lr, lower_lr=problem.lr, lower_steps=20, directions=count, smoothing=0.1,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        for _ in range(steps):
            optimizer.step(problem.upper, problem.lower)
        gaps.append(problem.objective() - 1.84242032)
    return sum(gaps) / seeds


def test_sgd_descends_on_the_golden_problem():
    assert gap(16, 60, 1) < 0.25 < gap(1, 60, 1) < 2.0991


@pytest.mark.slow
def test_plateaus_of_the_golden_problem():
    """T24: mean gaps after 4000 steps over 8 seeds, ordered in Q; a smaller step size lowers the plateau."""
    gaps = [gap(count, 4000, 8) for count in (1, 4, 16)]
    assert gaps == sorted(gaps, reverse=True)
    assert all(g < limit for g, limit in zip(gaps, (6e-3, 3.5e-3, 2e-3), strict=True))
    assert gap(16, 8000, 8, factor=0.25) < gaps[2]


# ------------------------------------------------------------------------------------------ full zeroth order


def test_hozog_needs_values_only():
    """An error count, which has no derivative, is smoothed by the directions."""
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    targets = torch.linspace(-2, 2, 400)
    optimizer = bo.HOZOG(
        [x], [y], lr=0.5, lower_lr=1.0, lower_steps=1, directions=32, smoothing=0.5, difference="central"
    )

    def errors():
        return (targets > y).float().mean()

    for _ in range(30):
        optimizer.step(errors, lambda: (y - x).square().sum() / 2)
    assert y.item() > 1.8
    assert optimizer.oracle_counts == {
        "upper_grad": 0, "lower_grad": 30 * 65, "hvp": 0, "jvp": 0, "loss": 30 * 65
    }  # fmt: skip


@pytest.mark.parametrize("vectorize", [True, 3, False])
def test_esmaml_differentiates_the_adaptation(vectorize):
    """f(U_N(x)) for quadratics: gradient E^N' (U_N(x) - b) with E = I - alpha A."""
    A = torch.randn(4, 4)
    A, a, b = A @ A.T / 4 + torch.eye(4), torch.randn(4), torch.randn(4)
    x, y = torch.randn(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimizer = bo.ESMAML(
        [x], [y], lr=0.1, lower_lr=0.1, lower_steps=3, directions=4, direction="orthogonal", vectorize=vectorize
    )
    optimizer.backward(lambda: (y - b).square().sum() / 2, lambda: (y - a) @ A @ (y - a) / 2)
    E = matrix_power(torch.eye(4) - 0.1 * A, 3)
    end = a + E @ (x.detach() - a)
    torch.testing.assert_close(y.detach(), end, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, E.T @ (end - b), rtol=1e-10, atol=1e-10)
    assert optimizer.oracle_counts["lower_grad"] == 3 * 9


def test_esmaml_with_a_body_and_tasks_agrees_with_maml():
    """All directions at a small smoothing: the exact derivative, in the initial point and in the body before it."""
    generator = torch.Generator().manual_seed(0)
    X, t = torch.randn(3, 8, 2, generator=generator), torch.randint(0, 2, (3, 8), generator=generator)
    tasks, grads = bo.TensorTasks((X, t)), []
    for cls, options in (
        (bo.MAML, {}),
        (bo.ESMAML, {"directions": 12, "direction": "orthogonal", "smoothing": 1e-3}),
    ):
        torch.manual_seed(0)
        body, head = nn.Linear(2, 2), nn.Linear(2, 2)
        start = [q.detach().clone().requires_grad_() for q in head.parameters()]

        def loss(batch, body=body, head=head):
            return F.cross_entropy(head(body(batch[0]).tanh()), batch[1])

        x = [*body.parameters(), *start]
        optimizer = cls(x, head.parameters(), lr=0.1, lower_lr=0.5, lower_steps=2, **options)
        optimizer.backward(loss, loss, tasks=tasks)
        grads.append(torch.cat([q.grad.flatten() for q in x]))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-7)


def test_esmaml_resumes_and_refuses():
    def make(generator):
        x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        optimizer = bo.ESMAML([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2, directions=2, generator=generator)
        return x, optimizer, (lambda: (y - 2).square().sum()), (lambda: y.square().sum())

    x, optimizer, upper, lower = make(torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.step(upper, lower)
    saved, at = optimizer.state_dict(), x.detach().clone()
    optimizer.step(upper, lower)
    again, other, upper, lower = make(torch.Generator().manual_seed(9))
    other.load_state_dict(saved)
    again.data.copy_(at)
    other.step(upper, lower)
    assert torch.equal(x, again)
    y = torch.zeros(2, requires_grad=True)
    wrong = bo.ESMAML([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    with pytest.raises(ValueError, match=r"ESMAML starts the lower parameters.*\[\(2,\)\].*\[\(3,\)\]"):
        wrong.step(lambda: y.sum(), lambda: y.square().sum())
    with pytest.raises(ValueError, match="Invalid directions value: 0"):
        bo.ESMAML([x], [x.detach().clone().requires_grad_()], lr=0.1, lower_lr=0.1, lower_steps=1, directions=0)


# ------------------------------------------------------------------------------------------ features


class Split(Features):
    """The same losses with the features as a part of their own."""

    def __init__(self, dropout=0.0):
        super().__init__(nn.Tanh)
        self.calls, self.dropout = 0, dropout

    def features(self, part=None):
        self.calls += 1
        part = slice(1, None, 2) if part is None else part
        return F.dropout(self.net[:2](self.X[part]), self.dropout), self.t[part]

    def head(self, parts):
        features, labels = parts
        return F.cross_entropy(self.net[2](features), labels) + 0.05 * sum(q.square().sum() for q in self.y)

    def objectives(self, split):
        upper = bo.Objective(lambda: self.whole(slice(0, None, 2)))
        if split:
            return upper, bo.Objective(self.head, features=self.features)
        return upper, bo.Objective(lambda: self.head(self.features()))

    def whole(self, part):
        return F.cross_entropy(self.net(self.X[part]), self.t[part])


@pytest.mark.parametrize("vectorize", [True, 2, False])
@pytest.mark.parametrize(
    ("cls", "options", "calls"),
    [
        (bo.AID, {}, 2),  # once for the lower steps, once with a graph for the system
        (bo.ITD, {"checkpoint": True}, None),
        (bo.F2SA, {"normalize": False}, None),
        (bo.FirstOrder, {}, 1),
        (bo.PZOBO, {"directions": 3}, None),
        (bo.HOZOG, {"directions": 3}, None),
    ],
)
def test_features_change_nothing_but_the_cost(cls, options, calls, vectorize):
    grads = []
    for split in (False, True):
        problem = Split()
        optimizer = cls(
            problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=5, vectorize=vectorize,
            generator=torch.Generator().manual_seed(0), **options,
        )  # fmt: skip
        upper, lower = problem.objectives(split)
        for _ in range(2):
            problem.calls = 0
            optimizer.step(upper, lower)
        assert "vectorize_fallback" not in optimizer.diagnostics
        grads.append([*(q.detach().clone() for q in problem.net.parameters()), *(q.grad for q in problem.x)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    if calls is not None:
        assert problem.calls == calls
    if cls is bo.PZOBO:
        assert problem.calls == {True: 1, 2: 2, False: 4}[vectorize]  # once per chunk of paths


def test_features_share_their_dropout_masks():
    results = []
    for vectorize in (True, 2, False):
        torch.manual_seed(0)
        problem = Split(dropout=0.5)
        optimizer = bo.PZOBO(
            problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=3, directions=4, vectorize=vectorize
        )
        for _ in range(2):
            optimizer.step(*problem.objectives(True))
        results.append(torch.cat([q.detach().flatten() for q in problem.x]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(results[0], results[2], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cls", [bo.PZOBO, bo.AID, bo.F2SA])
def test_features_that_depend_on_y_are_an_error(cls):
    problem = Split()
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=3)
    wrong = bo.Objective(lambda logits: F.cross_entropy(logits, problem.t), features=lambda: problem.net(problem.X))
    with pytest.raises(ValueError, match="features of the lower objective depend on lower parameter 0"):
        optimizer.step(problem.upper, wrong)
    with pytest.raises(TypeError, match="features must be callable"):
        bo.Objective(problem.upper, features=3)

"""PZOBO, HOZOG and ESMAML: the properties T1 to T24 and T26 of the PZOBO specification (T25 is in test_recipes)."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel_optim as bo
from bilevel_optim.oracle.smoothed import Smoothed
from bilevel_optim.oracle.substitution import Substitution
from bilevel_optim.solvers import paths

from ..problems import Given, Problem, Scalar, Tasks, close, flat, seeded

matrix_power = torch.linalg.matrix_power
many = pytest.mark.filterwarnings("ignore:the estimate of the hypergradient is mostly noise")


class QB(Problem):
    """g = y'Ay/2 - y'Bx, f = |y - c|^2/2 + lam |x|^2/2, whose N-step response is linear: y_N = y_0 + J_N x."""

    def __init__(self, d=5, p=4, lam=0.3, x=None):
        random = partial(torch.randn, generator=seeded())
        A = random(d, d)
        self.A, self.B, self.c, self.lam = A @ A.T / d + 0.5 * torch.eye(d), random(d, p), random(d), lam
        self.x, self.y = [(random(p) if x is None else x).requires_grad_()], [torch.zeros(d, requires_grad=True)]
        self.lr = 1 / float(torch.linalg.eigvalsh(self.A)[-1])

    def upper(self):
        return (self.y[0] - self.c).square().sum() / 2 + self.lam * self.x[0].square().sum() / 2

    def lower(self):
        return self.y[0] @ self.A @ self.y[0] / 2 - self.y[0] @ self.B @ self.x[0]

    def jacobian(self, steps):
        E = torch.eye(len(self.A)) - self.lr * self.A
        return (torch.eye(len(self.A)) - matrix_power(E, steps)) @ torch.linalg.solve(self.A, self.B)

    def direct(self):
        return self.lam * self.x[0].detach()

    def indirect(self, steps):
        """J_N' (y_N - c) for the start y_0 = 0."""
        J = self.jacobian(steps)
        return J.T @ (J @ self.x[0].detach() - self.c)

    def solution(self):
        return [torch.linalg.solve(self.A, self.B @ self.x[0].detach())]

    def hypergradient(self):
        return [self.direct() + torch.linalg.solve(self.A, self.B).T @ (self.solution()[0] - self.c)]


def estimate(cls, problem, count, seed=0, steps=6, vectorize=False, **options):
    """One estimate; returns the optimizer, the gradient, its coefficients c_j, and the directions as a matrix.

    The directions are seen by the lower loss: after those of the base path come the evaluations at each other x.
    """
    seen, x, mu = [], flat(problem.x), options.get("smoothing", 1e-2)

    def lower():
        seen.append(flat(problem.x) if vectorize is False else x)
        return problem.lower()

    options = {"lower_lr": problem.lr, "generator": seeded(seed), "vectorize": vectorize, **options}
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_steps=steps, directions=count, **options)
    optimizer.backward(problem.upper, lower)
    paths = seen[steps :: steps * (2 if options.get("difference") == "central" else 1)] if steps else []
    U = torch.stack([(at - x) / mu for at in paths]) if paths else None
    return optimizer, flat(t.grad for t in problem.x), optimizer.diagnostics["coefficients"], U


# ------------------------------------------------------------------------------------------ exact identities


def test_hand_numbers():
    """T1: A=2, B=1, alpha=1/4, N=2, x=1, c=1, lambda=0.1."""
    problem, mu = Scalar(), 1e-3
    _, h, _, U = estimate(bo.PZOBO, problem, 1, steps=2, smoothing=mu)
    assert problem.y[0].item() == pytest.approx(0.375, abs=1e-12)
    assert h.item() == pytest.approx(float(0.1 - 0.234375 * U[0, 0] ** 2), abs=1e-9)
    _, h, _, U = estimate(bo.HOZOG, Scalar(), 1, steps=2, smoothing=mu)
    assert h.item() == pytest.approx(float(-0.134375 * U[0, 0] ** 2 + mu / 2 * 0.240625 * U[0, 0] ** 3), abs=1e-9)


@many
@pytest.mark.parametrize(("mu", "tolerance"), [(1.0, 1e-13), (0.1, 1e-12), (1e-3, 1e-10), (1e-6, 1e-7)])
def test_linear_response_is_exact_at_every_smoothing(mu, tolerance):
    """T2 and T23: delta = J_N u whatever mu, with rounding that grows as 1/mu; forward equals central."""
    problem = QB()
    _, h, c, U = estimate(bo.PZOBO, problem, 3, smoothing=mu)
    w = problem.indirect(6)
    close(c, U @ w, tolerance * w.norm(), tolerance)
    expected = problem.direct() + (U @ w) @ U / 3
    close(h, expected, 10 * tolerance * w.norm(), tolerance)
    _, central, _, _ = estimate(bo.PZOBO, QB(), 3, smoothing=mu, difference="central")
    close(h, central, 10 * tolerance * w.norm(), tolerance)


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
    problem, mu = QB(lam=0.0), 0.3
    _, pzobo, _, _ = estimate(bo.PZOBO, QB(lam=0.0), 1, smoothing=mu)
    _, hozog, _, U = estimate(bo.HOZOG, problem, 1, smoothing=mu)
    delta = problem.jacobian(6) @ U[0]
    close(hozog - pzobo, mu / 2 * delta.dot(delta) * U[0], 1e-12, 1e-10)


@pytest.mark.filterwarnings("ignore:the upper loss depends on no")
def test_identities_that_cost_nothing():
    """T22, and T18: x is restored exactly."""
    problem = QB()
    before, storage = problem.x[0].detach().clone(), problem.x[0].data_ptr()
    _, h, _, _ = estimate(bo.PZOBO, problem, 4, steps=0)
    assert torch.equal(h, problem.direct())
    for vectorize in (True, 2, False):
        estimate(bo.PZOBO, problem, 5, smoothing=0.123, vectorize=vectorize)
        assert torch.equal(problem.x[0], before)
        assert problem.x[0].data_ptr() == storage
    problem.upper = lambda: problem.x[0].square().sum()
    _, h, _, _ = estimate(bo.PZOBO, problem, 4)
    assert torch.equal(h, 2 * problem.x[0].detach())
    _, h, _, U = estimate(bo.PZOBO, QB(d=5, p=8, lam=0.0), 3)
    residual = torch.linalg.lstsq(U.T, h).solution @ U - h
    assert residual.norm() < 1e-12 * h.norm()


@pytest.mark.parametrize(("entries", "largest"), [(1 << 22, 6), (3 * 9, 3), (1, 1)])
def test_paths_that_run_together_are_bounded(entries, largest, monkeypatch):
    """However many directions there are; the estimate does not depend on it."""
    sizes, run = [], paths.Paths.run
    monkeypatch.setattr(paths.Paths, "run", lambda self, upper: sizes.append(len(upper[0])) or run(self, upper))
    expected = estimate(bo.PZOBO, QB(), 5, vectorize=True)[1]
    sizes.clear()
    monkeypatch.setattr(paths, "STACK", entries)  # x and y have 9
    close(estimate(bo.PZOBO, QB(), 5, vectorize=True)[1], expected, 1e-10)
    assert max(sizes) == largest
    assert sum(sizes) == 6


# ------------------------------------------------------------------------------------------ error laws


@many
@pytest.mark.parametrize("count", [300, pytest.param(800, marks=pytest.mark.slow)])
def test_reference_code_mode_damps_every_tensor_by_its_size(count):
    """T16: unit directions per tensor without a factor have mean w_l / p_l; with the factor they are unbiased."""
    random = partial(torch.randn, generator=seeded())
    M, N, problem = random(5, 2), random(5, 8), QB()
    problem.x = [torch.ones(2, requires_grad=True), torch.ones(8, requires_grad=True)]
    problem.upper = lambda: (problem.y[0] - problem.c).square().sum() / 2
    problem.lower = lambda: (problem.y[0] - M @ problem.x[0] - N @ problem.x[1]).square().sum() / 2
    problem.lr = 1.0
    w = torch.cat([M, N], 1).T @ (M.sum(1) + N.sum(1) - problem.c)
    sizes = torch.tensor([2.0] * 2 + [8.0] * 8)
    for scale, factor in (("none", 1.0), ("unbiased", sizes), (0.5, 0.5 * sizes)):
        _, h, c, U = estimate(bo.PZOBO, problem, count, steps=1, direction="block_sphere", scale=scale)
        samples = c[:, None] * U * factor
        assert ((h - factor * w / sizes).abs() < 4.5 * samples.std(0) / count**0.5).all()


def sine(x, phi=torch.sin, lr=0.3):
    """g = (y - phi(x))^2 / 2, f = y: Phi_N = (1 - (1 - alpha)^N) phi."""
    x, y = torch.as_tensor(x, dtype=torch.float64).requires_grad_(), torch.zeros((), requires_grad=True)
    return Given([x], [y], lambda: y * 1, lambda: (y - phi(x)).square() / 2, lr)


@many
@pytest.mark.parametrize(("mu", "predicted"), [(1.0, 0.4257), (0.5, 0.6194), (0.1, 0.6984)])
@pytest.mark.parametrize("count", [4000, pytest.param(400_000, marks=pytest.mark.slow)])
def test_bias_is_quadratic_in_the_smoothing(mu, predicted, count):
    """T5: Gaussian smoothing of the sine: mean (1 - (1 - alpha)^N) exp(-mu^2/2) cos x, here for N = 7."""
    _, h, _, _ = estimate(bo.PZOBO, sine(0.7), count, steps=7, smoothing=mu, vectorize=True)
    assert abs(h.item() - predicted) < 4.5 * (3 / count) ** 0.5  # |c u| <= u^2, whose second moment is 3


@many
@pytest.mark.parametrize("count", [600, pytest.param(200_000, marks=pytest.mark.slow)])
def test_quadratic_response(count):
    """T6: phi = x'Gx has no bias, and variance (p + 1)|2Gx|^2 + mu^2 (p + 4)(tr(G)^2 + 2 tr(G^2))."""
    p, mu, G, x = 4, 0.5, torch.randn(4, 4), torch.randn(4)
    G = G + G.T
    _, h, c, U = estimate(bo.PZOBO, sine(x, lambda x: x @ G @ x, lr=1.0), count, steps=1, smoothing=mu)
    w = 2 * G @ x.detach()
    variance = (p + 1) * w.dot(w) + mu**2 * (p + 4) * (G.trace() ** 2 + 2 * (G @ G).trace())
    measured = (c[:, None] * U - w).square().sum(1)
    assert (h - w).norm() < 4 * (variance / count) ** 0.5
    assert abs(measured.mean() - variance) < 4.5 * measured.std() / count**0.5


@pytest.mark.slow
@many
@pytest.mark.parametrize("count", [250, pytest.param(800, marks=pytest.mark.slow)])
def test_noise_does_not_vanish_at_a_stationary_point(count):
    """T15: E|h|^2 = (p + 1)|J'v|^2 where the hypergradient is zero; HOZOG keeps only its curvature term."""
    steps, mu, problem = 2, 1e-2, QB(lam=0.5)
    J = problem.jacobian(steps)
    hessian = 0.5 * torch.eye(4) + J.T @ J
    problem.x[0].data = torch.linalg.solve(hessian, J.T @ problem.c)
    w = problem.indirect(steps)
    _, _, c, U = estimate(bo.PZOBO, problem, count, steps=steps, smoothing=mu)
    norms = (problem.direct() + c[:, None] * U).square().sum(1)
    assert abs(norms.mean() - 5 * w.dot(w)) < 4.5 * norms.std() / count**0.5
    problem.y[0].data.zero_()
    _, _, c, U = estimate(bo.HOZOG, problem, count, steps=steps, smoothing=mu)
    norms = (c[:, None] * U).square().sum(1)
    expected = mu**2 / 4 * 8 * (hessian.trace() ** 2 + 2 * (hessian @ hessian).trace())
    assert abs(norms.mean() - expected) < 5 * norms.std() / count**0.5


class Features(Problem):
    """Softmax regression on learned features: x are the features' weights, y a regularised head."""

    lr = 0.2

    def __init__(self, activation=nn.Tanh, dropout=0.0):
        generator = seeded(1)
        self.X, self.t = torch.randn(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator)
        self.net, self.dropout, self.calls = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)), dropout, 0
        for q in self.net.parameters():
            q.data = torch.randn(q.shape, generator=generator) * 0.5
        self.x, self.y = [*self.net[0].parameters()], [*self.net[2].parameters()]

    def upper(self, part=slice(0, None, 2)):
        return F.cross_entropy(self.net(self.X[part]), self.t[part])

    def features(self):
        self.calls += 1
        return F.dropout(self.net[:2](self.X[1::2]), self.dropout)

    def head(self, features):
        return F.cross_entropy(self.net[2](features), self.t[1::2]) + 0.05 * sum(q.square().sum() for q in self.y)

    def lower(self):
        return self.head(self.features())


def unrolled(problem, steps, **options):
    """The exact derivative of the lower solve, and its indirect part."""
    itd = bo.ITD(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=steps, **options)
    itd.backward(problem.upper, problem.lower)
    total = flat(t.grad for t in problem.x)
    return total, total - flat(torch.autograd.grad(problem.upper(), problem.x))


@many
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_agrees_with_unrolling_in_the_mean(count):
    """T11: a smooth problem that is not quadratic."""
    total, w = unrolled(Features(), 10)
    _, h, _, _ = estimate(bo.PZOBO, Features(), count, steps=10, smoothing=1e-3, vectorize=True)
    assert (h - total).norm() < 3 * ((len(h) + 1) / count) ** 0.5 * w.norm() + 1e-5


def test_difference_converges_to_the_directional_derivative():
    """T11, T12: first order in mu for a smooth network, second if central; small at a tiny mu for one with kinks."""
    for difference, mus, order in (("forward", (1e-2, 1e-3, 1e-4), 1.0), ("central", (1e-2, 1e-3), 2.0)):
        errors, (_, w) = [], unrolled(Features(), 10)
        for mu in mus:
            _, _, c, U = estimate(bo.PZOBO, Features(), 1, steps=10, smoothing=mu, difference=difference)
            errors.append((c[0] - U[0] @ w).abs())
        slopes = [float(torch.log10(a / b)) for a, b in itertools.pairwise(errors)]
        assert slopes == pytest.approx([order] * len(slopes), abs=0.15)
    _, w = unrolled(Features(nn.ReLU), 10)
    for seed in range(3):
        _, _, c, U = estimate(bo.PZOBO, Features(nn.ReLU), 1, seed=seed, steps=10, smoothing=1e-5)
        assert (c[0] - U[0] @ w).abs() < 1e-3 * (U[0] @ w).abs() + 1e-5


@many
def test_float32_noise_is_predicted():
    """T13: the relative error of a difference grows as 1/mu, and is what the diagnostic says within a factor of 4."""
    d, p, random = 50, 200, partial(torch.randn, generator=seeded())
    A, B = random(d, d), (random(d, p) / p**0.5).float()
    A = (A @ A.T / d + torch.eye(d)).float()
    J = torch.linalg.solve(A.double(), B.double())
    J = J - matrix_power(torch.eye(d) - 0.2 * A.double(), 20) @ J
    products = []
    for mu in (1e-1, 1e-2, 1e-3, 1e-4, 1e-6):
        x, y = torch.ones(p).float().requires_grad_(), torch.zeros(d).float().requires_grad_()
        problem = Given([x], [y], lambda y=y: y.sum(), lambda x=x, y=y: y @ A @ y / 2 - y @ B @ x, lr=0.2)
        if mu == 1e-6:
            with pytest.warns(bo.BilevelWarning, match="mostly rounding"):
                estimate(bo.PZOBO, problem, 1, steps=20, smoothing=mu)
            continue
        errors, predicted = [], []
        for seed in range(4):
            y.data.zero_()
            optimizer, h, c, _ = estimate(bo.PZOBO, problem, 1, seed=seed, steps=20, smoothing=mu)
            exact = J @ (h / c).double()  # h is c times the direction, as f does not depend on x
            # The adjoint is a vector of ones: the error of the coefficient is about the norm of that of the difference.
            errors.append(float((c[0] - exact.sum()).abs() / exact.norm()))
            predicted.append(float(optimizer.diagnostics["difference_error"]))
        assert 0.1 < sum(errors) / sum(predicted) < 4
        products.append(sum(errors) * mu)
    assert max(products) < 8 * min(products)


def test_warns_of_noise_once():
    x, y = torch.zeros(2000, requires_grad=True), torch.zeros(1, requires_grad=True)
    upper, lower = (lambda: (y - 1).square().sum()), (lambda: (y - x.mean()).square().sum())
    optimizer, other = (bo.PZOBO([x], [y], lr=0.1, lower_lr=0.5, lower_steps=3, directions=1) for _ in range(2))
    with pytest.warns(bo.BilevelWarning, match=r"mostly noise.*2,000 dimensions.*44.7 times"):
        optimizer.step(upper, lower)
    assert float(optimizer.diagnostics["noise_to_signal"]) == pytest.approx(2001**0.5)
    optimizer.step(upper, lower)
    # If the direct term dominates, the noise of the indirect one is no reason to warn.
    other.step(lambda: (x - 1).square().sum() * 10 + upper(), lower)


# ------------------------------------------------------------------------------------------ paths


@pytest.mark.parametrize("vectorize", [True, 2, False])
def test_shared_batches_cancel(vectorize):
    """T7, first half: with one noise for all paths of a step the difference is exact."""
    problem, noise = QB(), 3.0 * torch.randn(100, 5)
    problem.y[0].data = torch.randn(5)
    optimizer = bo.PZOBO(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=6, directions=4,
                         direction="orthogonal", vectorize=vectorize)  # fmt: skip
    optimizer.backward(problem.upper, bo.Objective(lambda n: problem.lower() + n @ problem.y[0], noise))
    exact = problem.direct() + problem.jacobian(6).T @ (problem.y[0].detach() - problem.c)
    close(problem.x[0].grad, exact, 1e-11, 1e-11)


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
    upper, lower = bo.Objective(loss("f"), [10, 20]), bo.Objective(loss("g"), range(5))
    for path, between in (([0, 1, 2], 10), ([3, 4, 0], 20)):
        seen.clear()
        optimizer.step(upper, lower)
        path, between = [("g", k) for k in path], [("f", between)]
        perturbed = [*path, *(between if cls is bo.HOZOG else [])]
        assert seen == [*path, *between, *perturbed, *perturbed]


@pytest.mark.slow
@pytest.mark.parametrize("count", [300, pytest.param(600, marks=pytest.mark.slow)])
def test_independent_noise_is_amplified(count):
    """T7, second half: noise of its own for every evaluation adds (2/mu^2) v' S v to the variance of a coefficient."""
    problem, sigma, steps, own = QB(), 0.05, 2, seeded(1)
    plain, variances = problem.lower, []
    problem.lower = lambda: plain() + sigma * torch.randn(5, generator=own) @ problem.y[0]
    for mu in (1e-1, 1e-2):
        problem.y[0].data.zero_()
        _, _, c, U = estimate(bo.PZOBO, problem, count, steps=steps, smoothing=mu)
        v, E = problem.y[0].detach() - problem.c, torch.eye(5) - problem.lr * problem.A
        S = sum(matrix_power(E, m) @ matrix_power(E, m).T for m in range(steps)) * (problem.lr * sigma) ** 2
        # The base path is one draw for all directions: half of the variance is common to them, so it is left out here.
        errors = c - U @ (problem.jacobian(steps).T @ v)
        variances.append(float(errors.var()))
        assert variances[-1] == pytest.approx(float(v @ S @ v) / mu**2, rel=0.15)
    assert variances[1] == pytest.approx(100 * variances[0], rel=0.25)


@pytest.mark.usually("6-PZOBO-forward", "6-HOZOG-central")
@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("cls", [bo.PZOBO, bo.HOZOG])
@pytest.mark.parametrize("count", [1, 6])
def test_stacked_chunked_and_looped_paths_agree(cls, difference, count):
    """T17: with dropout, batch statistics, momentum, and data; chunks that do and do not divide the number of paths."""

    def run(vectorize):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3))
        X, t, batches = torch.randn(24, 4), torch.randint(0, 3, (24,)), torch.arange(24).split(6)
        upper, lower = (bo.Objective(lambda i: F.cross_entropy(net(X[i]), t[i]), batches) for _ in range(2))
        optimizer = cls(
            net[:2].parameters(), net[4].parameters(), lr=0.1, lower_lr=0.3, lower_steps=3, directions=count,
            difference=difference, vectorize=vectorize, lower_optimizer=partial(torch.optim.SGD, momentum=0.9),
        )  # fmt: skip
        for _ in range(2):
            optimizer.step(upper, lower)
        assert "vectorize_fallback" not in optimizer.diagnostics
        assert int(net[1].num_batches_tracked) == 2
        return flat([*net.parameters(), *net.buffers(), optimizer.diagnostics["coefficients"]])

    reference = run(False)
    for vectorize in (True, 1, 3, 4):
        close(reference, run(vectorize), 1e-11, 1e-10)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "factory",
    [
        *(partial(torch.optim.SGD, momentum=0.9, nesterov=n) for n in (False, True)),
        *(torch.optim.Adam, torch.optim.Adagrad),
    ],
    ids=["momentum", "nesterov", "Adam", "Adagrad"],
)
@pytest.mark.parametrize("vectorize", [True, False])
def test_every_path_has_its_own_optimizer_state(factory, vectorize):
    """T20: the difference is the derivative of the whole optimizer map, in the first step and in later ones."""
    truth, _ = unrolled(Features(), 4, lower_optimizer=factory, warm_start=False)
    problem = Features()
    optimizer = bo.PZOBO(
        problem.x, problem.y, lr=0.0, lower_lr=problem.lr, lower_steps=4, directions=25, direction="orthogonal",
        smoothing=1e-4, difference="central", lower_optimizer=factory, vectorize=vectorize,
    )  # fmt: skip
    for _ in range(2):
        problem.run(optimizer)
        assert (flat(t.grad for t in problem.x) - truth).norm() < 1e-6 * truth.norm()


def test_outer_batches_average_to_the_full_batch():
    """T21: linear in the outer batch, for fixed inner batches and directions."""
    results = []
    for index in [range(6), *itertools.combinations(range(6), 2)]:
        problem = Features()
        optimizer = bo.PZOBO(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=4, directions=3,
                             generator=seeded(3))  # fmt: skip
        optimizer.backward(bo.Objective(problem.upper, [list(index)]), problem.lower)
        results.append(flat(t.grad for t in problem.x))
    close(torch.stack(results[1:]).mean(0), results[0], 1e-12, 1e-12)


def test_a_diverging_path_is_left_out():
    """A direction whose path is not finite is dropped, the others count fully, and a warning says so."""
    problem = QB()
    lower, start = problem.lower, problem.x[0].detach().clone()
    limit = float(start[0]) + 1e-6

    def unless(good):
        return lambda: lower() + torch.where(good(), 0.0, torch.nan) * problem.y[0].sum()

    problem.lower = unless(lambda: problem.x[0][0] <= limit)
    with pytest.warns(bo.BilevelWarning, match="left out"):
        optimizer, h, c, U = estimate(bo.PZOBO, problem, 8)
    kept = U[:, 0] < 0
    assert 0 < kept.sum() < 8
    assert torch.equal(c.isfinite(), kept)
    assert int(optimizer.diagnostics["dropped_directions"]) == int((~kept).sum())
    expected = problem.direct() + (U[kept] @ problem.indirect(6)) @ U[kept] / kept.sum()
    close(h, expected, 1e-11, 1e-11)
    problem.lower = unless(lambda: (problem.x[0] == start).all())
    with pytest.raises(bo.NonFiniteError, match="smaller smoothing"):
        estimate(bo.PZOBO, problem, 4)


def test_losses_that_vmap_cannot_run_are_looped():
    problem = QB()
    dense, sparse = problem.lower, problem.B.to_sparse()
    problem.lower = lambda: dense() + 0.0 * torch.sparse.mm(sparse, problem.x[0][:, None]).sum() * problem.y[0].sum()
    optimizer, h, _, _ = estimate(bo.PZOBO, problem, 4, direction="orthogonal", vectorize=True)
    assert optimizer.diagnostics["vectorize_fallback"]
    close(h, problem.direct() + problem.indirect(6), 1e-11, 1e-11)


@pytest.mark.usually("True")
@pytest.mark.parametrize("shared", [True, False])
def test_directions_of_their_own_have_less_variance(shared):
    """Shared: variance (p + 1) |mean w_i|^2; one set per task: (p + 1) mean |w_i|^2 / m. Both have the same mean."""
    problem = Tasks(m=4)
    arguments = {"lr": 0.1, "lower_lr": problem.lr, "lower_steps": 2, "warm_start": False}
    optimizer = bo.PZOBO(
        problem.x, problem.y, **arguments, directions=1, share_directions_across_tasks=shared, generator=seeded()
    )
    draws, singles = [], []
    for i in range(4):
        one = Tasks(m=4, tasks=slice(i, i + 1))
        one.apply(bo.ITD(one.x, one.y, **arguments).backward)
        singles.append(one.x[0].grad)
    for _ in range(100):
        problem.apply(optimizer.backward)
        draws.append(problem.x[0].grad.clone())
    draws, w, p = torch.stack(draws), torch.stack(singles) - problem.x[0].detach(), 4  # f depends on x via |x|^2/2
    exact = torch.stack(singles).mean(0)
    predicted = (p + 1) * (w.mean(0).square().sum() if shared else w.square().sum() / 4**2)
    squares = (draws - exact).square().sum(1)
    assert abs(squares.mean() - predicted) < 4.5 * squares.std() / 100**0.5
    assert (draws.mean(0) - exact).norm() < 4.5 * (predicted / 100) ** 0.5


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
    assert torch.linalg.eigvalsh(problem.A)[[0, -1]].tolist() == pytest.approx([1.0836401, 4.1202613], abs=5e-8)
    total, _ = unrolled(problem, 20)
    expected = torch.tensor([-0.03776012, 0.48101855, -0.17931777, 0.11551235])
    close(problem.y[0].detach(), expected, 6e-9)
    gradient = torch.tensor([0.75571548, -0.96643274, -0.23717176, 0.92143453, 0.0264545, 0.75571548])
    close(total, gradient, 6e-9)
    problem.y[0].data.zero_()
    _, h, _, _ = estimate(bo.PZOBO, problem, 6, steps=20, direction="orthogonal", smoothing=0.1)
    close(h, gradient, 6e-9)
    assert problem.objective() == pytest.approx(3.94156416, abs=6e-9)
    J = problem.jacobian(20)
    assert float(torch.linalg.eigvalsh(0.1 * torch.eye(6) + J.T @ J)[-1]) == pytest.approx(2.18027592, abs=6e-9)


def gap(count, steps, seeds=1, factor=0.5):
    """Mean gap to the minimum of Phi_N at the end of SGD with the step size of the specification."""
    gaps = []
    for seed in range(seeds):
        problem = Golden()
        lr = factor / (2.18027592 * (1 + 7 / count))
        optimizer = bo.PZOBO(problem.x, problem.y, lr=lr, lower_lr=problem.lr, lower_steps=20, directions=count,
                             smoothing=0.1, generator=seeded(seed))  # fmt: skip
        if steps > 1000:  # a tenth of the time
            optimizer.compile()
        optimizer.run(problem.upper, problem.lower, steps=steps)
        gaps.append(problem.objective() - 1.84242032)
    return sum(gaps) / seeds


@pytest.mark.slow
def test_sgd_descends_on_the_golden_problem():
    assert gap(16, 40) < 0.3 < gap(1, 40) < 2.0991


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
    optimizer = bo.HOZOG([x], [y], lr=0.5, lower_lr=1.0, lower_steps=1, directions=32, smoothing=0.5,
                         difference="central")  # fmt: skip
    for _ in range(30):
        optimizer.step(lambda: (targets > y).float().mean(), lambda: (y - x).square().sum() / 2)
    assert y.item() > 1.8
    assert tuple(optimizer.oracle_counts.values()) == (0, 30 * 65, 0, 0, 30 * 65)


@pytest.mark.parametrize("vectorize", [True, 3, False])
def test_esmaml_differentiates_the_adaptation(vectorize):
    """f(U_N(x)) for quadratics: gradient E^N' (U_N(x) - b) with E = I - alpha A."""
    A, a, b = torch.randn(4, 4), torch.randn(4), torch.randn(4)
    A = A @ A.T / 4 + torch.eye(4)
    x, y = torch.randn(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    optimizer = bo.ESMAML([x], [y], lr=0.1, lower_lr=0.1, lower_steps=3, directions=4, direction="orthogonal",
                          vectorize=vectorize)  # fmt: skip
    optimizer.backward(lambda: (y - b).square().sum() / 2, lambda: (y - a) @ A @ (y - a) / 2)
    E = matrix_power(torch.eye(4) - 0.1 * A, 3)
    end = a + E @ (x.detach() - a)
    close(y.detach(), end, 1e-12, 1e-12)
    close(x.grad, E.T @ (end - b), 1e-10, 1e-10)
    assert optimizer.oracle_counts["lower_grad"] == 3 * 9


def test_esmaml_with_a_body_and_tasks_agrees_with_maml():
    """All directions at a small smoothing: the exact derivative, in the initial point and in the body before it."""
    generator = seeded()
    tasks = bo.TensorTasks(
        (torch.randn(3, 8, 2, generator=generator), torch.randint(0, 2, (3, 8), generator=generator))
    )
    grads = []
    for cls, options in ((bo.MAML, {}), (bo.ESMAML, {"directions": 12, "direction": "orthogonal", "smoothing": 3e-4})):
        torch.manual_seed(0)
        body, head = nn.Linear(2, 2), nn.Linear(2, 2)
        x = [*body.parameters(), *(q.detach().clone().requires_grad_() for q in head.parameters())]

        def loss(batch, body=body, head=head):
            return F.cross_entropy(head(body(batch[0]).tanh()), batch[1])

        cls(x, head.parameters(), lr=0.1, lower_lr=0.5, lower_steps=2, **options).backward(loss, loss, tasks=tasks)
        grads.append(flat(q.grad for q in x))
    close(grads[1], grads[0], 1e-7, 1e-5)
    wrong = bo.ESMAML(x[:1], head.parameters(), lr=0.1, lower_lr=0.1, lower_steps=1)
    with pytest.raises(ValueError, match=r"ESMAML starts the lower parameters.*"):
        wrong.step(lambda: loss((torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))), lambda: loss(None))


# ------------------------------------------------------------------------------------------ adaptation by values


def smoothed(loss, points, **options):
    """Values and estimated gradients of a loss at many points, each with directions of its own."""
    live, points = torch.zeros_like(points[0]).requires_grad_(), points.clone().requires_grad_()
    estimate = Smoothed(lambda: loss(live), [live], **options)

    def at(point):
        with Substitution([live], [point]):
            return estimate()

    torch.manual_seed(0)
    values = torch.func.vmap(at, randomness="different")(points)
    return values.detach(), torch.autograd.grad(values.sum(), points)[0]


def test_smoothed_gradient_is_the_written_formula():
    """At a quadratic a difference is exactly v'Ay, and the estimate is the mean of v v' A y over torch's normals."""
    A, y = torch.diag(torch.tensor([1.0, 4.0])), torch.tensor([1.0, -2.0], requires_grad=True)
    loss = Smoothed(lambda scale: scale * (y @ A @ y) / 2, [y], directions=3, smoothing=0.5)
    torch.manual_seed(3)
    value = loss(2.0)
    torch.manual_seed(3)
    v = torch.stack([torch.randn(2) for _ in range(3)])
    close(torch.autograd.grad(value, y)[0], v.T @ (v @ A @ y.detach()) / 3 * 2, 1e-12, 1e-12)
    close(value.detach(), (y @ A @ y + 0.25 * ((v @ A) * v).sum(1).mean()).detach(), 1e-12, 1e-12)


def test_smoothed_gradient_is_on_average_that_of_the_smoothed_loss():
    """cos smoothed by a normal of deviation tau is exp(-tau^2/2) cos: 0.61 of it here, 14 standard errors from 1."""
    values, gradients = smoothed(torch.cos, torch.full((4000,), 1.0), directions=2, smoothing=1.0)
    factor = math.exp(-0.5)
    for found, expected in ((gradients, -factor * math.sin(1.0)), (values, factor * math.cos(1.0))):
        assert abs(found.mean() - expected) < 4 * found.std() / 4000**0.5
    assert gradients.std() / 4000**0.5 < 0.4 * math.sin(1.0) / 14


@pytest.mark.parametrize("directions", [1, 9])
def test_smoothed_gradient_has_relative_variance_p_plus_1_over_r(directions):
    slope = torch.tensor([1.0, -2.0, 0.5, 3.0])
    _, gradients = smoothed(lambda y: slope @ y, torch.zeros(6000, 4), directions=directions, smoothing=0.1)
    variance = (gradients - slope).square().sum(1) / slope.square().sum()
    assert abs(variance.mean() - 5 / directions) < 4 * variance.std() / 6000**0.5
    assert variance.std() / 6000**0.5 < 0.04 * 5 / directions


def test_smoothed_pairs_share_the_random_numbers_of_the_loss():
    """Otherwise noise of the loss would be divided by tau."""
    y = torch.ones(1, requires_grad=True)
    loss = Smoothed(lambda: y.sum() + torch.randn(()), [y], directions=1, smoothing=1e-6)
    torch.manual_seed(0)
    slope = torch.autograd.grad(loss(), y)[0]
    torch.manual_seed(0)
    close(slope, torch.randn(1).square(), 1e-8, 1e-8)


def test_esmaml_adapts_by_values_and_differentiates_that():
    """On average over tasks' own directions f(U_N(x)) = b'U_N(x) has the gradient E^N' b of plain steps."""
    A, a, b = torch.diag(torch.tensor([1.0, 3.0])), torch.tensor([1.0, -1.0]), torch.tensor([1.0, 2.0])
    x, y, n = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True), 1500
    optimizer = bo.ESMAML(
        [x], [y], lr=0.1, lower_lr=0.2, lower_steps=2, directions=2, direction="orthogonal", lower_directions=4,
        lower_smoothing=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    tasks = bo.TensorTasks(torch.zeros(n, 1))
    loss = optimizer.backward(lambda _: y @ b, lambda _: (y - a) @ A @ (y - a) / 2, tasks=tasks)
    E = matrix_power(torch.eye(2) - 0.2 * A, 2)
    close(x.grad, E @ b, 0.04, 0.0)
    close(loss, b @ (a - E @ a), 0.04, 0.0)
    assert optimizer.oracle_counts == {**dict.fromkeys(optimizer.oracle_counts, 0), "loss": n * 5 * (1 + 2 * 2 * 4)}


def test_esmaml_paths_share_the_directions_of_their_steps():
    """However many run together: otherwise noise of the steps would be divided by sigma."""
    found = []
    for vectorize in (True, 3, False):
        x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        optimizer = bo.ESMAML(
            [x], [y], lr=0.1, lower_lr=0.1, lower_steps=2, directions=3, direction="orthogonal", smoothing=1e-5,
            lower_directions=2, vectorize=vectorize, generator=seeded(),
        )  # fmt: skip
        torch.manual_seed(1)
        optimizer.backward(lambda y=y: y.sum(), lambda y=y: (y * torch.arange(1, 4)).square().sum() / 2)
        found.append(x.grad)
    close(found[1], found[0], 1e-8, 0.0)
    close(found[2], found[0], 1e-8, 0.0)
    torch.manual_seed(1)
    J, B = torch.eye(3), torch.diag(torch.tensor([1.0, 4.0, 9.0]))
    for _ in range(2):
        v = torch.stack([torch.randn(3) for _ in range(2)])
        J = J - 0.1 * v.T @ v @ B @ J / 2
    close(found[0], J.sum(0), 1e-7, 0.0)


def test_esmaml_adapts_where_nothing_has_a_derivative():
    """Parts of targets above y: y goes up in training and in ``adapt``."""
    x, y, targets = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True), torch.linspace(-2, 2, 400)
    optimizer = bo.ESMAML(
        [x], [y], lr=1.0, lower_lr=1.0, lower_steps=2, directions=4, smoothing=0.5, lower_directions=8,
        lower_smoothing=0.5, generator=seeded(),
    )  # fmt: skip
    torch.manual_seed(0)

    def share():
        return (targets > y).float().mean()

    optimizer.step(share, share)
    assert y.item() > 0.2
    assert x.item() > 0.05
    assert optimizer.adapt(share)[0].item() > x.item() + 0.2


# ------------------------------------------------------------------------------------------ features


@pytest.mark.parametrize("vectorize", [True, 2, False])
@pytest.mark.parametrize(
    ("cls", "options", "calls"),
    [
        (bo.AID, {}, 2),  # once for the lower steps, once with a graph for the system
        (bo.FirstOrder, {}, 1),
        (bo.PZOBO, {"directions": 3}, {True: 1, 2: 2, False: 4}),  # once per chunk of paths
    ],
)
def test_features_are_evaluated_once_for_each_x(cls, options, calls, vectorize):
    problem = Features(dropout=0.5)
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=5, vectorize=vectorize, **options)
    for _ in range(2):
        problem.calls = 0
        optimizer.step(problem.upper, bo.Objective(problem.head, features=problem.features))
    assert problem.calls == (calls[vectorize] if isinstance(calls, dict) else calls)
    assert "vectorize_fallback" not in optimizer.diagnostics


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("cls", [bo.PZOBO, bo.AID, bo.F2SA])
def test_features_that_depend_on_y_are_an_error(cls, vectorize):
    """In the first evaluation, before any of x is known to be reached."""
    problem = Features()
    labels = problem.t
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=1, vectorize=vectorize)
    wrong = bo.Objective(lambda logits: F.cross_entropy(logits, labels), features=lambda: problem.net(problem.X))
    with pytest.raises(ValueError, match="features of the lower objective depend on lower parameter 0"):
        optimizer.step(problem.upper, wrong)
    wrong = bo.Objective(lambda part: part.square().mean(), features=lambda batch: problem.net(batch[0]))
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=3)
    with pytest.raises(ValueError, match="features of the lower objective depend on lower parameter 0"):
        optimizer.step(lambda batch: problem.upper(), wrong, tasks=bo.TensorTasks((torch.randn(2, 3, 4),)))


@pytest.mark.parametrize("direct", [0.0, 1e-9])
@pytest.mark.parametrize("cls", [bo.PZOBO, bo.HOZOG])
@pytest.mark.filterwarnings("error")
def test_a_response_that_autograd_does_not_see_counts(cls, direct):
    """The lower solution comes from a solver outside torch, and f does not depend on x, or hardly."""
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    options = {"directions": 3, "direction": "orthogonal", "difference": "central", "generator": seeded()}
    optimizer = cls([x], [y], lr=0.1, lower_lr=1.0, lower_steps=1, **options)

    def upper():
        return (y - 1).square().sum() / 2 + direct * x.square().sum()

    def lower():
        return (y - torch.from_numpy(2 * x.detach().numpy())).square().sum() / 2

    optimizer.backward(upper, lower)
    close(x.grad, torch.full((3,), 2.0), 1e-3)


@pytest.mark.parametrize("vectorize", [True, False])
def test_an_upper_loss_of_other_parameters_is_an_error_where_only_its_values_count(vectorize):
    x, y, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    optimizer = bo.HOZOG([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1, directions=2, vectorize=vectorize)
    with pytest.raises(ValueError, match="the upper loss depends on no parameter, upper or lower"):
        optimizer.step(lambda: other.sum(), lambda: (y - x).square().sum())

"""The acceptance checklist of the F2SA-p specification (section 9, items 1 to 9 and 12), with its reference numbers."""

import warnings
from fractions import Fraction
from functools import partial
from math import comb, factorial, log2, sqrt

import pytest
import torch
import torch.nn.functional as F

import bilevel_optim as bo
from recipes.papers.theory import f2sa

from ..problems import Cosh, PenaltyQuadratic, Problem, Quadratic, close, seeded

stencil = bo.finite_difference.stencil
STENCILS = [
    (p, kind)
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 10)
    for kind in ("central", "forward", "centred")
    if kind == "forward" or (kind == "central") == (p % 2 == 0)
]
every_stencil = pytest.mark.parametrize(("p", "kind"), STENCILS)


def phi(problem, copies, formula, nu):
    """The estimate from given copies, one for each node."""
    oracle = bo.Oracle(problem.x, problem.y, problem.upper, problem.lower)
    return bo.hypergradient.penalty(oracle, bo.Vector([torch.stack(list(copies))]), formula, nu).gradient[0]


def exact_phi(problem, formula, nu):
    return phi(problem, [problem.perturbed_solution(j * nu) for j in formula.nodes], formula, nu)


def halving(errors):
    """Order of the error, from its values for a step and half of it (and so on)."""
    return log2(errors[0] / errors[-1]) / (len(errors) - 1)


# ------------------------------------------------------------------------------- 1. stencils, exactly

# Weights; e, A1, A2, B1, B2, reach.
TABLE = {
    (1, "forward"): ("0:-1 1:1", "1/2", 2, 1.414, 1, 1.000, 1),
    (2, "central"): ("-1:-1/2 1:1/2", "1/6", 1, 0.707, 1, 0.707, 1),
    (3, "forward"): ("0:-11/6 1:3 2:-3/2 3:1/3", "1/4", 6.667, 3.837, 7, 4.359, 3),
    (3, "centred"): ("-1:-1/3 0:-1/2 1:1 2:-1/6", "-1/12", 2, 1.179, 1.667, 1.106, 2),
    (4, "central"): ("-2:1/12 -1:-2/3 1:2/3 2:-1/12", "-1/30", 1.5, 0.950, 1.667, 0.972, 2),
    (5, "forward"): ("0:-137/60 1:5 2:-5 3:10/3 4:-5/4 5:1/5", "1/6", 17.07, 8.242, 31, 15.84, 5),
    (5, "centred"): ("-2:1/20 -1:-1/2 0:-1/3 1:1 2:-1/4 3:1/30", "1/60", 2.167, 1.195, 2.2, 1.233, 3),
    (6, "central"): ("-3:-1/60 -2:3/20 -1:-3/4 1:3/4 2:-3/20 3:1/60", "1/140", 1.833, 1.082, 2.2, 1.145, 3),
    (7, "centred"): (
        *("-3:-1/105 -2:1/10 -1:-3/5 0:-1/4 1:1 2:-3/10 3:1/15 4:-1/140", "-1/280", 2.333, 1.236, 2.657, 1.342, 4),
    ),
    (8, "central"): (
        *("-4:1/280 -3:-4/105 -2:1/5 -1:-4/5 1:4/5 2:-1/5 3:4/105 4:-1/280", "-1/630", 2.083, 1.167, 2.657, 1.275, 4),
    ),
    (10, "central"): (
        "-5:-1/1260 -4:5/504 -3:-5/84 -2:5/21 -1:-5/6 1:5/6 2:-5/21 3:5/84 4:-5/504 5:1/1260",
        *("1/2772", 2.283, 1.229, 3.063, 1.382, 5),
    ),
    (2, "forward"): ("0:-3/2 1:2 2:-1/2", "-1/3", 4, 2.550, 3, 2.236, 2),
    (4, "forward"): ("0:-25/12 1:4 2:-3 3:4/3 4:-1/4", "-1/5", 10.67, 5.584, 15, 8.307, 4),
    (6, "forward"): ("0:-49/20 1:6 2:-15/2 3:20/3 4:-15/4 5:6/5 6:-1/6", "-1/7", 27.73, 12.58, 63, 30.38, 6),
    (8, "forward"): (
        "0:-761/280 1:8 2:-14 3:56/3 4:-35/2 5:56/5 6:-14/3 7:8/7 8:-1/8",
        *("-1/9", 78.02, 32.72, 255, 113.4, 8),
    ),
}


def error_constant(formula, p):
    """e in (1/nu) sum c_j psi(j nu) - psi'(0) = e psi^(p+1)(0) nu^p, by Taylor's formula."""
    return sum(c * j ** (p + 1) for j, c in zip(formula.nodes, formula.weights, strict=True)) / factorial(p + 1)


@pytest.mark.parametrize("key", TABLE, ids=str)
def test_weights_and_constants_of_the_tables(key):
    formula, (weights, e, a1, a2, b1, b2, reach) = stencil(*key), TABLE[key]
    expected = {int(j): Fraction(c) for j, c in (entry.split(":") for entry in weights.split())}
    assert dict(zip(formula.nodes, formula.weights, strict=True)) == expected
    c = [float(w) for w in formula.weights]
    jc = [j * w for j, w in zip(formula.nodes, c, strict=True)]
    assert error_constant(formula, key[0]) == Fraction(e)
    assert [sum(map(abs, c)), sum(map(abs, jc))] == pytest.approx([a1, b1], rel=5e-4)
    assert [sqrt(sum(w * w for w in v)) for v in (c, jc)] == pytest.approx([a2, b2], rel=1e-3)
    assert max(map(abs, formula.nodes)) == reach


@every_stencil
def test_moment_conditions_and_symmetry(p, kind):
    formula = stencil(p, kind)
    weight = dict(zip(formula.nodes, formula.weights, strict=True))
    assert [sum(c * j**k for j, c in weight.items()) for k in range(p + 1)] == [0, 1, *[0] * (p - 1)]
    n = len(formula.nodes)
    at_zero = dict(zip(formula.nodes, formula.interpolation, strict=True))
    assert [sum(w * j**k for j, w in at_zero.items()) for k in range(n)] == [1, *[0] * (n - 1)]
    reach = sum(abs(c * j) for j, c in weight.items())
    if kind == "central":
        assert all(weight[-j] == -weight[j] for j in weight)
        assert reach == Fraction(4 ** (p // 2), comb(p, p // 2)) - 1
    if kind == "forward":
        assert reach == 2**p - 1


def test_automatic_stencils():
    assert [stencil(p).kind for p in (1, 2, 3, 4)] == ["forward", "central", "forward", "central"]


# ------------------------------------------------------------------------------- 2. T1, exact relative error


@every_stencil
def test_error_on_a_quadratic_pair_is_the_predicted_one(p, kind):
    problem, formula = PenaltyQuadratic(), stencil(p, kind)
    for reach in (0.1, 0.4):
        nu = reach / (problem.r * max(map(abs, formula.nodes)))
        # Rounding in the copies counts A1 / nu times (section 6.5), so forward weights of high order lose digits.
        a1 = sum(abs(float(c)) for c in formula.weights)
        tolerance = max(1e-12, 20 * a1 / nu * torch.finfo(torch.float64).eps)
        expected = problem.predicted(formula.nodes, nu)
        close(exact_phi(problem, formula, nu), expected, tolerance, tolerance)


@pytest.mark.parametrize("rho", [0.1, 0.4, 0.6, 0.9])
def test_scalar_factors(rho):
    """p=1: 1/(1 + r nu), p=2: 1/(1 - r^2 nu^2); the second is better exactly when r nu < 1/2."""
    problem = PenaltyQuadratic(n=1, m=1)
    nu, truth = rho * float(problem.H / problem.Q), problem.hypergradient()[0]
    one, two = (float(exact_phi(problem, stencil(p), nu) / truth) for p in (1, 2))
    assert (one, two) == pytest.approx((1 / (1 + rho), 1 / (1 - rho**2)), rel=1e-12)
    assert (abs(two - 1) < abs(one - 1)) == (rho < 0.5)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_fixed_point_of_the_iteration_is_off_by_nu_to_the_p(p):
    """x <- x - lr Phi to its fixed point: the true gradient there falls as nu^p."""
    norms = []
    for nu in (0.02, 0.01):
        problem, values = PenaltyQuadratic(), []
        # Phi is affine in x on this problem: solve for its zero instead of iterating.
        for x in (torch.zeros(4), *torch.eye(4)):
            problem.x[0].data.copy_(x)
            values.append(exact_phi(problem, stencil(p), nu))
        columns = torch.stack(values[1:], 1) - values[0].unsqueeze(1)
        problem.x[0].data.copy_(torch.linalg.lstsq(columns, -values[0]).solution)
        norms.append(float(problem.hypergradient()[0].norm()))
    assert halving(norms) == pytest.approx(p, abs=0.5 if p == 3 else 0.1)


# ------------------------------------------------------------------------------- 3. T2, exact cases


def test_linear_upper_loss():
    """psi is quadratic in nu: p = 1 is off by (nu/2) e^(-x) a^2 exactly, every p >= 2 is exact."""
    x, y = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.zeros(3, requires_grad=True)
    a, b, nu = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.3, 1.0, -1.0]), 0.3
    problem, scale = Problem(), x.detach().exp()
    problem.x, problem.y, problem.upper = [x], [y], lambda: a @ y
    problem.lower = lambda: (x.exp() * y**2).sum() / 2 - b @ y
    for p, kind in STENCILS:
        formula = stencil(p, kind)
        error = phi(problem, [(b - j * nu * a) / scale for j in formula.nodes], formula, nu) + b * a / scale
        expected = nu / 2 * a**2 / scale if p == 1 else torch.zeros(3)
        close(error, expected, 1e-12, 1e-12)


@pytest.mark.parametrize(("p", "kind"), [s for s in STENCILS if s[0] <= 8])
def test_polynomial_ladder(p, kind):
    """psi has degree k + 1 in nu: exact iff p >= k + 1, and off by e (p+1)! (-b)^p nu^p for p = k."""
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    s, b, A = torch.tensor([0.7, -0.4]), torch.tensor([0.5, 0.8]), torch.tensor([[0.2, -0.3], [0.4, 0.1]]).double()
    problem, nu, formula = Problem(), 0.25, stencil(p, kind)
    problem.x, problem.y, problem.lower = [x], [y], lambda: (y - s - A @ x).square().sum() / 2
    for k in range(8):
        problem.upper = lambda k=k: b @ y + (x * y**k).sum()
        error = phi(problem, [s - j * nu * b for j in formula.nodes], formula, nu) - (s**k + A.T @ b)
        if p >= k + 1:
            assert error.abs().max() < 1e-10
        elif p == k:
            expected = float(error_constant(formula, p)) * factorial(p + 1) * (-b) ** p * nu**p
            close(error, expected, 1e-11, 1e-9)
        else:
            assert error.abs().max() > 1e-6


# ------------------------------------------------------------------------------- 4. T3, highly smooth

COSH = {  # nu = 0.1, 0.05, 0.025, 0.0125, 0.00625
    (1, "forward"): (1.7338e-02, 8.8159e-03, 4.4412e-03, 2.2285e-03, 1.1162e-03),
    (2, "central"): (-4.7930e-04, -1.1940e-04, -2.9823e-05, -7.4541e-06, -1.8634e-06),
    (3, "forward"): (-4.7465e-04, -5.7844e-05, -7.0027e-06, -8.5784e-07, -1.0605e-07),
    (3, "centred"): (1.5014e-04, 1.8402e-05, 2.2701e-06, 2.8169e-07, 3.5077e-08),
    (4, "central"): (8.7366e-06, 5.6575e-07, 3.5672e-08, 2.2344e-09, 1.3973e-10),
    (5, "forward"): (5.1512e-05, 1.2491e-06, 2.9468e-08, 7.6585e-10, 2.1549e-11),
    (5, "centred"): (2.8209e-06, 7.5545e-08, 2.1611e-09, 6.4479e-11, 1.9680e-12),
    (6, "central"): (7.3105e-07, 1.1909e-08, 1.8797e-10, 2.9444e-12, 4.6034e-14),
    (8, "central"): (4.7607e-08, 1.8474e-10, 7.1730e-13, 2.7969e-15, 1.0920e-17),
}
NUS = [0.1 / 2**i for i in range(5)]


@pytest.mark.parametrize("key", COSH, ids=str)
def test_table_of_the_cosh_problem(key):
    problem = Cosh()
    for nu, expected in zip(NUS, COSH[key], strict=True):
        if abs(expected) > 1e-10:
            error = float(exact_phi(problem, stencil(*key), nu) - problem.hypergradient()[0])
            assert error == pytest.approx(expected, rel=1e-3, abs=2e-13 / nu)


def slope(problem, formula, nus):
    truth = problem.hypergradient()[0]
    return halving([float((exact_phi(problem, formula, nu) - truth).norm()) for nu in nus])


@pytest.mark.parametrize(
    ("p", "kind", "nus"),
    [
        *[(2, "central", NUS[2:]), (4, "central", NUS[:4]), (6, "central", NUS[:3])],
        *[(1, "forward", NUS), (3, "forward", NUS), (5, "forward", NUS[:4])],
    ],
)
def test_error_falls_with_the_order(p, kind, nus):
    assert slope(Cosh(), stencil(p, kind), nus) == pytest.approx(p, abs=0.5 if p in (3, 5) else 0.1)


@pytest.mark.parametrize("p", [2, 4, 6])
def test_error_falls_with_the_order_in_a_whole_run(p):
    """The optimizer itself, lower problems solved by its own steps."""
    errors = []
    for nu in (0.1, 0.05):
        problem = Cosh(x=[0.5, -0.2, 0.8], b=[1.0, 0.5, -0.7])
        optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=0.6, lower_steps=60, order=p, nu=nu)
        optimizer.backward(problem.upper, problem.lower)
        errors.append(problem.error())
    assert halving(errors) == pytest.approx(p, abs=0.2)


class Miniature(Problem):
    """T4: softmax regression with one l2 weight per feature, lower problems solved by Newton's method."""

    def __init__(self, d=12, c=3, n=40):
        generator = seeded()
        teacher, self.X, self.Xv = (torch.randn(*shape, generator=generator) for shape in ((d, c), (n, d), (n, d)))
        self.t, self.tv = (self.X @ teacher).argmax(1), (self.Xv @ teacher).argmax(1)
        self.x, self.y = [(torch.rand(d, generator=generator) - 1.5).requires_grad_()], [torch.zeros(d, c)]
        self.y[0].requires_grad_()

    def losses_of(self, s, x, y):
        y = y.view(12, 3)
        lower = F.cross_entropy(self.X @ y, self.t) + ((2 * x).exp()[:, None] * y**2).sum()
        return lower + s * F.cross_entropy(self.Xv @ y, self.tv)

    def upper(self):
        return self.losses_of(1.0, self.x[0], self.y[0]) - self.lower()

    def lower(self):
        return self.losses_of(0.0, self.x[0], self.y[0])

    def perturbed_solution(self, s):
        x, y, gradient = self.x[0].detach(), torch.zeros(36), torch.func.grad(partial(self.losses_of, s), 1)
        for _ in range(8):
            y = y - torch.linalg.solve(torch.func.jacrev(gradient, 1)(x, y), gradient(x, y))
        return y.view(12, 3)

    def hypergradient(self):
        x, y = self.x[0].detach(), self.perturbed_solution(0.0).reshape(-1)
        gradient = torch.func.grad(partial(self.losses_of, 0.0), 1)
        upper = torch.func.grad(lambda y: F.cross_entropy(self.Xv @ y.view(12, 3), self.tv))(y)
        v = torch.linalg.solve(torch.func.jacrev(gradient, 1)(x, y), upper)
        return [-torch.func.jacrev(gradient, 0)(x, y).T @ v]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "key", [(1, "forward"), (2, "central"), (3, "forward"), (3, "centred"), (4, "central"), (6, "central")]
)
def test_slopes_on_the_papers_task_in_miniature(key):
    nus = [0.08, 0.04, 0.02] if key[0] < 6 else [0.08, 0.04]
    assert slope(Miniature(), stencil(*key), nus) == pytest.approx(key[0], abs=0.5 if key[0] == 3 else 0.15)


# ------------------------------------------------------------------------------- 5. T5, float32 sweet spots


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("p", "kind", "nu", "error"),
    [
        *[(1, "forward", 3.2e-4, 1.3e-4), (2, "central", 5.6e-3, 4.7e-6), (3, "forward", 1.6e-2, 8e-6)],
        *[(4, "central", 3.6e-2, 1.1e-6), (6, "central", 7e-2, 6e-7), (8, "central", 8e-2, 5e-7)],
    ],
)
def test_float32_sweet_spots(p, kind, nu, error):
    """Best nu within a factor 3 of the table, best error within a factor 5."""
    generator, formula = seeded(), stencil(p, kind)
    x = torch.rand(256, generator=generator) * 2 - 1
    exact = Cosh(x, torch.rand(256, generator=generator) + 0.5)
    single = Cosh(x, exact.b, dtype=torch.float32)
    truth, grid, errors = exact.hypergradient()[0], [10 ** (-4.5 + 0.05 * i) for i in range(75)], []
    for step in grid:
        copies = [exact.perturbed_solution(j * step).float() for j in formula.nodes]
        errors.append(float((phi(single, copies, formula, step).double() - truth).norm() / truth.norm()))
    best = min(range(len(grid)), key=errors.__getitem__)
    assert nu / 3 <= grid[best] <= nu * 3
    assert error / 5 <= errors[best] <= error * 5
    assert errors[0] > 3 * errors[best]  # a smaller nu is worse


# ------------------------------------------------------------------------------- 6. and 7. noise and common starts


class Regression(Problem):
    """Mini-batch least squares, d = 8, batch 8: the noisy problem of T6."""

    def __init__(self, seed=0, d=8, n=200):
        random = partial(torch.randn, generator=seeded(seed), dtype=torch.float64)
        self.X, self.Xv, w, noise = random(n, d), random(n, d), random(d), random(2, n)
        self.t, self.tv = self.X @ w + noise[0], self.Xv @ w + noise[1]
        self.x, self.y = [torch.zeros(d, requires_grad=True)], [torch.zeros(d, requires_grad=True)]

    def upper(self, index):
        return (self.Xv[index] @ self.y[0] - self.tv[index]).square().mean() / 2

    def lower(self, index):
        fit = (self.X[index] @ self.y[0] - self.t[index]).square().mean() / 2
        return fit + (self.x[0].exp() * self.y[0] ** 2).sum() / 20

    def gradient(self, loss, at, wrt, batch):
        self.y[0].data.copy_(at)
        return torch.autograd.grad(loss(batch), wrt[0], allow_unused=True)[0]


def spread(samples, nu, p=2, repeats=16):
    """Standard deviation of the estimate over independent runs, relative and absolute."""
    estimates = []
    for seed in range(repeats):
        problem, data = Regression(), [torch.randint(0, 200, (41, 8), generator=seeded(s + seed)) for s in (0, 1000)]
        optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=0.05, lower_steps=40, order=p, nu=nu,
                            samples=samples, check_finite=False, vectorize=False)  # fmt: skip
        optimizer.backward(*(bo.Objective(loss, d) for loss, d in zip(problem.losses, data, strict=True)))
        estimates.append(problem.x[0].grad)
    stacked = torch.stack(estimates)
    deviation = float(stacked.var(0).sum().sqrt())
    return deviation / float(stacked.mean(0).norm()), deviation


def test_shared_samples_are_free_of_one_over_nu():
    relative = [spread("shared", nu, repeats=6)[0] for nu in (0.03, 0.003)]
    assert relative[1] == pytest.approx(relative[0], rel=0.02)
    assert relative[0] < 1


@pytest.mark.slow
def test_independent_samples_pay_one_over_nu():
    deviations = [spread("independent", nu)[1] for nu in (0.03, 0.01, 0.003)]
    assert deviations[1] / deviations[0] == pytest.approx(3, rel=0.15)
    assert deviations[2] / deviations[1] == pytest.approx(10 / 3, rel=0.15)
    assert deviations[2] / spread("independent", 0.003, p=1)[1] == pytest.approx(0.5, rel=0.25)  # ratio of their A2


def test_additive_noise_in_the_difference():
    """Shared outer samples: the noise of g cancels because sum c_j = 0, that of f has weight sum j c_j = 1."""
    formula, nu, problem = stencil(4), 1e-3, PenaltyQuadratic()
    plain, (noise_f, noise_g) = exact_phi(problem, formula, nu), torch.randn(2, 4)
    upper, lower = problem.losses
    problem.upper, problem.lower = lambda: upper() + noise_f @ problem.x[0], lambda: lower() + noise_g @ problem.x[0]
    close(exact_phi(problem, formula, nu) - plain, noise_f, 1e-10, 1e-8)


def test_a_common_start_has_no_one_over_nu():
    """T7: the error after K gradient steps from a common offset is the same at any nu; from separate ones it is not."""
    base, formula, generator = PenaltyQuadratic(r=1.0), stencil(2), seeded(1)
    common, *separate = 0.1 * torch.randn(3, 6, generator=generator)

    def error(nu, offsets):
        copies = []
        for j, offset in zip(formula.nodes, offsets, strict=True):
            y = base.perturbed_solution(j * nu) + offset
            for _ in range(10):
                y = y - base.lr * ((base.H + j * nu * base.Q) @ (y - base.perturbed_solution(j * nu)))
            copies.append(y)
        return float((phi(base, copies, formula, nu) - base.hypergradient()[0]).norm())

    shared, apart = ([error(nu, offsets) for nu in (1e-3, 1e-4)] for offsets in ([common] * 2, separate))
    assert shared[1] == pytest.approx(shared[0], rel=0.05)
    assert apart[1] / apart[0] == pytest.approx(10, rel=0.1)


def test_copies_start_from_a_common_point():
    y, x = [torch.randn(3, 2).requires_grad_(), torch.randn(2).requires_grad_()], torch.zeros(3, requires_grad=True)
    start = [t.detach().clone() for t in y]
    optimizer = bo.F2SA([x], y, lr=0.1, lower_lr=0.1, lower_steps=0, order=3)
    optimizer.step(lambda: y[0].sum() + y[1].sum(), lambda: ((y[0] - x[:, None]) ** 2).sum() + (y[1] ** 2).sum())
    for t, at in zip(y, start, strict=True):
        assert torch.equal(optimizer.state[t]["copies"], at.expand(4, *at.shape))


# ------------------------------------------------------------------------------- 8. equivalences


@pytest.mark.parametrize("vectorize", [8, False])
@pytest.mark.parametrize("p", [1, 2])
def test_orders_one_and_two_are_the_papers_algorithms(p, vectorize):
    """Hand-written loops of F2SA (raw steps) and Algorithm 3 (normalised), 12 stochastic outer steps."""
    batches = [torch.randint(0, 200, (8,)) for _ in range(60)]
    problem, hand, nu, alpha, lr = Regression(), Regression(), 0.05, 0.05, 0.2
    optimizer = bo.F2SA(problem.x, problem.y, lr=lr, lower_lr=alpha, lower_steps=3, order=p, nu=nu,
                        normalize=p == 2, vectorize=vectorize)  # fmt: skip
    f, g = bo.Objective(problem.upper, batches), bo.Objective(problem.lower, batches[::-1])
    for _ in range(12):
        optimizer.step(f, g)
    xs, zs, weights = iter(batches), iter(batches[::-1]), {0: -1.0, 1: 1.0} if p == 1 else {-1: -0.5, 1: 0.5}
    copies = dict.fromkeys(weights, torch.zeros(8))
    for _ in range(12):
        for _ in range(3):
            xi, zeta = next(xs), next(zs)
            for j, y in copies.items():
                f_y, g_y = hand.gradient(hand.upper, y, hand.y, xi), hand.gradient(hand.lower, y, hand.y, zeta)
                copies[j] = y - alpha * (g_y + j * nu * f_y)
        next(xs)
        zeta = next(zs)
        total = sum(c * hand.gradient(hand.lower, copies[j], hand.x, zeta) for j, c in weights.items()) / nu
        hand.x[0].data.sub_(lr * total / (total.norm() if p == 2 else 1))
    close(problem.x[0].detach(), hand.x[0].detach(), 1e-12, 1e-10)
    live = copies[0] if p == 1 else (copies[1] + copies[-1]) / 2
    close(problem.y[0].detach(), live, 1e-12, 1e-10)


def test_scaling_the_lower_loss():
    """g and nu scaled by s, lower_lr divided by s: the same iterates of x."""
    results = []
    for s in (1.0, 8.0):
        problem = PenaltyQuadratic()
        optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=problem.lr / s, lower_steps=5, order=2, nu=0.02 * s)
        for _ in range(10):
            optimizer.step(problem.upper, lambda problem=problem, s=s: s * problem.lower())
        results.append(problem.x[0].detach())
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_richardson_identity():
    """Phi_4(nu) = (4 Phi_2(nu) - Phi_2(2 nu)) / 3 on the same copies."""
    problem, nu = Cosh(x=[0.5, -0.3], b=[1.0, 2.0]), 0.05
    two, wide = (exact_phi(problem, stencil(2), step) for step in (nu, 2 * nu))
    close(exact_phi(problem, stencil(4), nu), (4 * two - wide) / 3, 1e-12, 1e-12)


def test_symmetric_weights_would_blow_up():
    """The wrong sign that the paper prints: with c_-j = +c_j the estimate grows like 1/nu."""
    wrong = stencil(2)._replace(weights=(Fraction(1, 2), Fraction(1, 2)))
    sizes = [float(exact_phi(PenaltyQuadratic(), wrong, nu).norm()) for nu in (1e-2, 1e-3)]
    assert sizes[1] / sizes[0] == pytest.approx(10, rel=0.1)


@pytest.mark.usually("2")
@pytest.mark.parametrize("p", [1, 2, 4])
def test_normalised_steps_satisfy_their_bound(p):
    """avg |grad phi| <= 3 Delta/(eta T) + 3 L eta/2 + 8 avg |Phi - grad phi| (T8)."""
    problem, eta, T = PenaltyQuadratic(), 0.08, 30
    optimizer = bo.F2SA(problem.x, problem.y, lr=eta, lower_lr=problem.lr, lower_steps=20, order=p, nu=0.1 / problem.r)
    M = torch.linalg.solve(problem.H, problem.B)
    L = float(torch.linalg.eigvalsh(M.T @ problem.Q @ M)[-1])
    problem.solve()
    start, norms, errors = problem.upper().item(), [], []
    problem.y[0].data.zero_()
    for _ in range(T):
        truth = problem.hypergradient()[0]
        problem.run(optimizer)
        norms.append(float(truth.norm()))
        errors.append(float((problem.x[0].grad - truth).norm()))
    assert sum(norms) / T <= 3 * start / (eta * T) + 1.5 * L * eta + 8 * sum(errors) / T
    assert norms[-1] < 0.5 * norms[0]


# ------------------------------------------------------------------------------- 9. divergence, 12. first order only


@pytest.mark.filterwarnings("ignore:the gradient of the lower loss has grown")
def test_diverging_negative_copies_are_reported():
    problem, worse = PenaltyQuadratic(r=2.88), PenaltyQuadratic(r=20.0)
    options = {"lr": 0.01, "nu": 0.2, "stencil": "central"}
    optimizer = bo.F2SA(problem.x, problem.y, lower_lr=problem.lr, lower_steps=20, order=4, **options)
    with pytest.warns(bo.BilevelWarning, match="copies of y are not similarly far"):
        problem.run(optimizer, 6)
    assert optimizer.diagnostics["spread"].argmax() == 0  # node -2
    optimizer = bo.F2SA(worse.x, worse.y, lower_lr=worse.lr, lower_steps=200, order=2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        with pytest.raises(bo.NonFiniteError, match="negative nodes"):
            worse.run(optimizer, 20)
    assert worse.x[0].isfinite().all()
    assert worse.y[0].isfinite().all()


def test_automatic_stencil_changes_to_forward():
    problem = PenaltyQuadratic(r=2.88)
    arguments = {"lr": 0.0, "lower_lr": problem.lr, "lower_steps": 20, "order": 4, "nu": 0.2}
    optimizer = bo.F2SA(problem.x, problem.y, **arguments)
    assert optimizer.stencil == "central"
    with pytest.warns(bo.BilevelWarning, match="Changing to stencil='forward'"):
        problem.run(optimizer, 30)
    assert optimizer.stencil == "forward"
    predicted = problem.predicted(stencil(4, "forward").nodes, 0.2)
    close(problem.x[0].grad, predicted, 1e-6, 1e-6)
    assert problem.error() < 0.2
    resumed = bo.F2SA(problem.x, problem.y, **arguments)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.stencil == "forward"
    problem.run(resumed)


DESCENTS = {"sgd": None, "momentum": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam}


@pytest.mark.filterwarnings("ignore:the gradient of the lower loss has grown")  # which is so, and said too
@pytest.mark.parametrize("nu_r", [1.04, 1.44])
@pytest.mark.parametrize("descent", DESCENTS)
def test_a_negative_copy_that_goes_away_is_seen_at_order_two(descent, nu_r):
    """Both copies are equally far from their mean, but only one of them moves, uphill."""
    problem = PenaltyQuadratic(r=2.88)
    options = {"lower_lr": problem.lr, "lower_steps": 5, "nu": nu_r / 2.88, "lower_optimizer": DESCENTS[descent]}
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.01, stencil="central", **options)
    with pytest.warns(bo.BilevelWarning, match="or go away from it"):
        problem.run(optimizer, 10)
    away, solved = optimizer.diagnostics["lower_residual"].tolist()
    assert away > 5 * solved
    assert optimizer.diagnostics["spread"].tolist() == pytest.approx([optimizer.diagnostics["spread"][0].item()] * 2)


@pytest.mark.slow
def test_automatic_stencil_changes_to_forward_at_order_two():
    problem = PenaltyQuadratic(r=2.88)
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.0, lower_lr=problem.lr, lower_steps=20, nu=0.5)
    with pytest.warns(bo.BilevelWarning, match="Changing to stencil='forward'"):
        problem.run(optimizer, 30)
    close(problem.x[0].grad, problem.predicted(stencil(2, "forward").nodes, 0.5), 1e-6, 1e-6)


@pytest.mark.usually("0.1-shared", "0.9-independent")
@pytest.mark.filterwarnings("ignore:nu = 0.3.* is large")  # 0.9 of the pole, not 0.1 of it
@pytest.mark.parametrize("samples", ["shared", "independent"])
@pytest.mark.parametrize("nu_r", [0.1, 0.9])
def test_noise_and_slow_copies_raise_no_alarm(samples, nu_r):
    """Below the pole every copy goes downhill, the negative one slowly; noise is the same for both."""
    problem = PenaltyQuadratic(r=2.88)
    rows = torch.randn(64, len(problem.y[0]), generator=seeded(1))

    def lower(row):
        return problem.lower() + (row * problem.y[0]).sum(1).mean()

    objective = bo.Objective(lower, list(rows.split(4)))
    options = {"lower_lr": problem.lr, "lower_steps": 4, "nu": nu_r / 2.88, "samples": samples}
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.01, **options)
    for _ in range(60):
        optimizer.step(problem.upper, objective)  # warnings are errors here


@pytest.mark.parametrize("p", [2, 4, 6])
def test_good_nu_raises_no_alarm(p):
    problem = PenaltyQuadratic(r=2.88)
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.01, lower_lr=problem.lr, lower_steps=5, order=p, nu=0.05)
    problem.run(optimizer, 30)  # warnings are errors here
    assert optimizer.diagnostics["spread"].shape == (p,)


@pytest.mark.parametrize("vectorize", [8, False])
def test_no_second_derivatives(monkeypatch, vectorize):
    """No graph of a gradient is ever made: create_graph is False in every call."""
    calls, grad, problem = [], torch.autograd.grad, Quadratic(n=5, m=3)
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(k) or grad(*a, **k))
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=4, order=4, vectorize=vectorize)
    problem.run(optimizer, 2)
    assert calls
    assert not any(call.get("create_graph") for call in calls)
    assert optimizer.oracle_counts["hvp"] == optimizer.oracle_counts["jvp"] == 0


# ------------------------------------------------------------------------------- the class


@pytest.mark.parametrize(
    "factory", [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam], ids=["momentum", "adam"]
)
def test_lower_optimizers_act_on_each_copy_alone(factory):
    """Stacked copies under one optimizer, against one optimizer per copy."""
    problem, nu = PenaltyQuadratic(), 0.02
    optimizer = bo.F2SA(
        problem.x, problem.y, lr=0.0, lower_lr=0.05, lower_steps=6, order=2, nu=nu, lower_optimizer=factory
    )
    for _ in range(2):
        optimizer.backward(problem.upper, problem.lower)
    for lane, j in enumerate((-1, 1)):
        hand = PenaltyQuadratic()
        inner = factory(hand.y, lr=0.05)
        for _ in range(12):
            inner.zero_grad()
            (hand.lower() + j * nu * hand.upper()).backward(inputs=hand.y)
            inner.step()
        copy = optimizer.state[problem.y[0]]["copies"][lane]
        close(copy, hand.y[0].detach(), 1e-12, 1e-12)


def test_normalised_step_has_length_lr_and_survives_a_zero_gradient():
    problem = PenaltyQuadratic()
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.7, lower_lr=problem.lr, lower_steps=5, nu=0.01)
    before = problem.x[0].detach().clone()
    problem.run(optimizer)
    assert float((problem.x[0].detach() - before).norm()) == pytest.approx(0.7, rel=1e-12)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = bo.F2SA([x], [y], lr=0.7, lower_lr=0.1, lower_steps=1)
    optimizer.step(lambda: 0 * x.sum() + y.sum() * 0, lambda: ((y - 1) ** 2).sum() + 0 * x.sum())
    assert torch.equal(x.detach(), torch.ones(2))


@pytest.mark.parametrize(
    ("p", "kind"), [(2, "central"), (3, "centred"), (4, "central"), (1, "forward"), (3, "forward")]
)
def test_loss_and_live_value_are_extrapolated_to_no_perturbation(p, kind):
    problem, errors = Cosh(x=[0.5, -0.3], b=[1.0, 2.0]), []
    for nu in (0.1, 0.05):
        problem.y[0].data.zero_()
        optimizer = bo.F2SA(problem.x, problem.y, lr=0.0, lower_lr=0.6, lower_steps=80, order=p, stencil=kind, nu=nu)
        loss, live = optimizer.backward(problem.upper, problem.lower), problem.y[0].detach().clone()
        problem.solve()
        errors.append((float((live - problem.y[0]).norm().detach()), abs(float(loss - problem.upper().detach()))))
    if 0 in stencil(p, kind).nodes:
        assert max(errors[0]) < 1e-10
    else:
        assert [a / b for a, b in zip(*errors, strict=True)] == pytest.approx([2**p] * 2, rel=0.2)


def test_nu_can_be_changed_and_is_saved():
    problem = PenaltyQuadratic()
    optimizer, other = (
        bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=5, nu=0.05) for _ in range(2)
    )
    problem.run(optimizer)
    optimizer.nu = 0.01
    other.load_state_dict(optimizer.state_dict())
    assert other.nu == 0.01


# nu, batch, lower steps, outer steps where all other constants are 1: the arithmetic of the specification, 3.2.
THEORY = {
    (10, 1): (1.0e-4, 1e10, 1.4e13, 3.6e6),
    (10, 2): (1.0e-3, 1e8, 1.2e11, 3.6e6),
    (10, 4): (3.2e-3, 1e7, 1.0e10, 3.6e6),
    (2, 1): (1.25e-2, 6.4e5, 1.9e7, 2.9e4),
    (2, 2): (5.6e-2, 3.2e4, 7.5e5, 2.9e4),
    (2, 8): (6.3e-2, 2.6e4, 5.9e5, 2.9e4),
}


@pytest.mark.parametrize(("kappa", "p"), THEORY)
def test_constants_of_the_theorem(kappa, p):
    x, y = (torch.zeros(1, requires_grad=True) for _ in range(2))
    arguments, needed = f2sa(eps=0.1, ell=1.0, mu=1 / kappa, sigma=1.0, order=p)
    optimizer = bo.F2SA([x], [y], **arguments)
    found = optimizer.nu, needed["batch"], optimizer.lower_steps, needed["steps"]
    assert found == pytest.approx(THEORY[kappa, p], rel=0.05)
    assert (optimizer.order, optimizer.samples, optimizer.normalize) == (p, "independent", True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / (6 * kappa**3))


def test_the_theorem_keeps_its_promise_without_noise():
    """The mean norm of the hypergradient over the steps of the theorem is at most eps."""
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    arguments, needed = f2sa(eps=0.5, ell=1.0, mu=1.0, gap=0.5, radius=0.1)
    optimizer, total = bo.F2SA([x], [y], **arguments), 0.0
    for _ in range(needed["steps"]):
        total += abs(float(x.detach()))  # y*(x) = x, f = y^2/2
        optimizer.step(lambda: y.square().sum() / 2, lambda: (y - x).square().sum() / 2)
    assert needed == {"batch": 1, "steps": 72}
    assert total / 72 <= 0.5
    with pytest.raises(ValueError, match="Invalid mu value: 2"):
        f2sa(eps=0.1, ell=1.0, mu=2.0)


@pytest.mark.parametrize(("order", "vectorize", "together"), [(2, True, False), (2, 8, True), (4, True, True)])
def test_two_copies_are_evaluated_one_after_the_other_on_a_cpu(order, vectorize, together):
    """For so few, a loop is faster there than vmap. The hypergradient is the same."""
    found, batched = [], []
    for how in (vectorize, False):
        problem = Cosh()
        optimizer = bo.F2SA(
            problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=4, order=order, nu=0.1, vectorize=how,
            check_derivatives=False,
        )  # fmt: skip
        inside = []

        def lower(problem=problem, inside=inside):
            inside.append(torch._C._functorch.maybe_current_level() is not None)
            return problem.lower()

        for _ in range(3):
            inside.clear()  # the first evaluations look at the loss too
            optimizer.backward(problem.upper, lower)
        batched.append(any(inside))
        found.append([t.grad.clone() for t in problem.x])
    assert batched == [together, False]
    close(*found, 1e-12)


@pytest.mark.parametrize("vectorize", [8, False])
def test_products_of_low_precision_are_reported_only_where_the_lower_loss_has_some(vectorize):
    x, y = (torch.full((3,), v, dtype=torch.float32, requires_grad=True) for v in (1.0, 0.0))
    A = torch.eye(3, dtype=torch.float32)
    options, before = torch.backends.mkldnn.matmul, torch.backends.mkldnn.matmul.fp32_precision
    for lower, low in ((lambda: (A @ y - x).square().sum(), True), (lambda: (y - x).square().sum(), False)):
        optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2, nu=0.01, vectorize=vectorize)
        options.fp32_precision = "bf16"
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                optimizer.step(lambda: (A @ y - 1).square().sum(), lower)
        finally:
            options.fp32_precision = before
        assert any("the losses are computed with a precision of 0.008" in str(one.message) for one in told) == low


@pytest.mark.parametrize("nu", [1e-2, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_a_copy_that_leaves_a_saddle_is_told(nu):
    """At weights of zero of a two-layer linear model the copy falls into a minimum, and y stays."""
    target = torch.tensor([1.0, 0.5])

    def estimate(start):
        x, y = torch.ones(1, requires_grad=True), torch.tensor(start, requires_grad=True)
        optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.1, lower_steps=500, nu=nu, order=1)
        optimizer.backward(lambda: (y - target).square().sum(), lambda: 0.5 * (y.prod() - x).square().sum())

    with pytest.warns(bo.BilevelWarning, match="lower loss is smaller at the perturbed copy"):
        estimate([0.0, 0.0])
    estimate([1.1, 1.0])  # goes to a minimum, without a warning

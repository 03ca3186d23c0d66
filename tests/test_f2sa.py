"""The acceptance checklist of the F2SA-p specification (section 9, items 1 to 9 and 12), with its reference numbers."""

import warnings
from fractions import Fraction
from functools import partial
from math import comb, sqrt

import pytest
import torch
import torch.nn.functional as F

import bilevel_optim as bo
from bilevel_optim.hypergradient.finite_difference import stencil
from bilevel_optim.problem.vector import stack

from .problems import Cosh, PenaltyQuadratic, Quadratic

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
    return bo.hypergradient.penalty(oracle, stack([[y] for y in copies]), formula, nu).gradient[0]


def exact_phi(problem, formula, nu):
    return phi(problem, [problem.perturbed_solution(j * nu) for j in formula.nodes], formula, nu)


# ------------------------------------------------------------------------------- 1. stencils, exactly

TABLE_A = {
    (1, "forward"): "0:-1 1:1",
    (2, "central"): "-1:-1/2 1:1/2",
    (3, "forward"): "0:-11/6 1:3 2:-3/2 3:1/3",
    (3, "centred"): "-1:-1/3 0:-1/2 1:1 2:-1/6",
    (4, "central"): "-2:1/12 -1:-2/3 1:2/3 2:-1/12",
    (5, "forward"): "0:-137/60 1:5 2:-5 3:10/3 4:-5/4 5:1/5",
    (5, "centred"): "-2:1/20 -1:-1/2 0:-1/3 1:1 2:-1/4 3:1/30",
    (6, "central"): "-3:-1/60 -2:3/20 -1:-3/4 1:3/4 2:-3/20 3:1/60",
    (7, "centred"): "-3:-1/105 -2:1/10 -1:-3/5 0:-1/4 1:1 2:-3/10 3:1/15 4:-1/140",
    (8, "central"): "-4:1/280 -3:-4/105 -2:1/5 -1:-4/5 1:4/5 2:-1/5 3:4/105 4:-1/280",
    (10, "central"): ("-5:-1/1260 -4:5/504 -3:-5/84 -2:5/21 -1:-5/6 1:5/6 2:-5/21 3:5/84 4:-5/504 5:1/1260"),
    (2, "forward"): "0:-3/2 1:2 2:-1/2",
    (4, "forward"): "0:-25/12 1:4 2:-3 3:4/3 4:-1/4",
    (6, "forward"): "0:-49/20 1:6 2:-15/2 3:20/3 4:-15/4 5:6/5 6:-1/6",
    (8, "forward"): "0:-761/280 1:8 2:-14 3:56/3 4:-35/2 5:56/5 6:-14/3 7:8/7 8:-1/8",
}

TABLE_B = {  # e, A1, A2, B1, B2, reach
    (1, "forward"): ("1/2", 2, 1.414, 1, 1.000, 1),
    (2, "central"): ("1/6", 1, 0.707, 1, 0.707, 1),
    (3, "forward"): ("1/4", 6.667, 3.837, 7, 4.359, 3),
    (3, "centred"): ("-1/12", 2, 1.179, 1.667, 1.106, 2),
    (4, "central"): ("-1/30", 1.5, 0.950, 1.667, 0.972, 2),
    (5, "forward"): ("1/6", 17.07, 8.242, 31, 15.84, 5),
    (5, "centred"): ("1/60", 2.167, 1.195, 2.2, 1.233, 3),
    (6, "central"): ("1/140", 1.833, 1.082, 2.2, 1.145, 3),
    (7, "centred"): ("-1/280", 2.333, 1.236, 2.657, 1.342, 4),
    (8, "central"): ("-1/630", 2.083, 1.167, 2.657, 1.275, 4),
    (10, "central"): ("1/2772", 2.283, 1.229, 3.063, 1.382, 5),
    (2, "forward"): ("-1/3", 4, 2.550, 3, 2.236, 2),
    (4, "forward"): ("-1/5", 10.67, 5.584, 15, 8.307, 4),
    (6, "forward"): ("-1/7", 27.73, 12.58, 63, 30.38, 6),
    (8, "forward"): ("-1/9", 78.02, 32.72, 255, 113.4, 8),
}


@pytest.mark.parametrize("key", TABLE_A, ids=str)
def test_weights_of_the_table(key):
    formula = stencil(*key)
    expected = {int(j): Fraction(c) for j, c in (entry.split(":") for entry in TABLE_A[key].split())}
    assert dict(zip(formula.nodes, formula.weights, strict=True)) == expected


def error_constant(formula, p):
    """e in (1/nu) sum c_j psi(j nu) - psi'(0) = e psi^(p+1)(0) nu^p, by Taylor's formula."""
    factorial = 1
    for i in range(2, p + 2):
        factorial *= i
    return sum(c * j ** (p + 1) for j, c in zip(formula.nodes, formula.weights, strict=True)) / factorial


@pytest.mark.parametrize("key", TABLE_B, ids=str)
def test_constants_of_the_table(key):
    formula = stencil(*key)
    e, a1, a2, b1, b2, reach = TABLE_B[key]
    c = [float(w) for w in formula.weights]
    jc = [j * w for j, w in zip(formula.nodes, c, strict=True)]
    assert error_constant(formula, key[0]) == Fraction(e)
    assert sum(map(abs, c)) == pytest.approx(a1, rel=5e-4)
    assert sqrt(sum(w * w for w in c)) == pytest.approx(a2, rel=1e-3)
    assert sum(map(abs, jc)) == pytest.approx(b1, rel=5e-4)
    assert sqrt(sum(w * w for w in jc)) == pytest.approx(b2, rel=1e-3)
    assert max(map(abs, formula.nodes)) == reach


@every_stencil
def test_moment_conditions_and_symmetry(p, kind):
    formula = stencil(p, kind)
    moments = [sum(c * j**k for j, c in zip(formula.nodes, formula.weights, strict=True)) for k in range(p + 1)]
    assert moments == [0, 1, *[0] * (p - 1)]
    assert sum(w * 1 for w in formula.interpolation) == 1
    order = len(formula.nodes)
    extrapolated = [
        sum(w * j**k for j, w in zip(formula.nodes, formula.interpolation, strict=True)) for k in range(order)
    ]
    assert extrapolated == [1, *[0] * (order - 1)]
    if kind == "central":
        weight = dict(zip(formula.nodes, formula.weights, strict=True))
        assert all(weight[-j] == -weight[j] for j in weight)
        m = p // 2
        assert sum(abs(c * j) for j, c in weight.items()) == Fraction(4**m, comb(2 * m, m)) - 1
    if kind == "forward":
        assert sum(abs(c * j) for j, c in zip(formula.nodes, formula.weights, strict=True)) == 2**p - 1


def test_automatic_stencils():
    assert [stencil(p).kind for p in (1, 2, 3, 4)] == ["forward", "central", "forward", "central"]


# ------------------------------------------------------------------------------- 2. T1, exact relative error


@every_stencil
@pytest.mark.parametrize("reach", [0.1, 0.4])
def test_error_on_a_quadratic_pair_is_the_predicted_one(p, kind, reach):
    problem = PenaltyQuadratic()
    formula = stencil(p, kind)
    nu = reach / (problem.r * max(map(abs, formula.nodes)))
    # Rounding in the copies counts A1 / nu times (section 6.5), so forward weights of high order lose digits.
    a1 = sum(abs(float(c)) for c in formula.weights)
    tolerance = max(1e-12, 20 * a1 / nu * torch.finfo(torch.float64).eps)
    torch.testing.assert_close(
        exact_phi(problem, formula, nu), problem.predicted(formula.nodes, nu), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("rho", [0.1, 0.4, 0.6, 0.9])
def test_scalar_factors(rho):
    """p=1: 1/(1 + r nu), p=2: 1/(1 - r^2 nu^2); the second is better exactly when r nu < 1/2."""
    problem = PenaltyQuadratic(n=1, m=1)
    r = float(problem.Q / problem.H)
    nu, truth = rho / r, problem.hypergradient()[0]
    one, two = (float(exact_phi(problem, stencil(p), nu) / truth) for p in (1, 2))
    assert one == pytest.approx(1 / (1 + rho), rel=1e-12)
    assert two == pytest.approx(1 / (1 - rho**2), rel=1e-12)
    assert (abs(two - 1) < abs(one - 1)) == (rho < 0.5)


@pytest.mark.parametrize(("p", "slope"), [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (6, 6.0)])
def test_fixed_point_of_the_iteration_is_off_by_nu_to_the_p(p, slope):
    """x <- x - lr Phi to its fixed point: the true gradient there falls as nu^p."""
    norms = []
    for nu in (0.02, 0.01):
        problem = PenaltyQuadratic()
        formula = stencil(p)
        # Phi is affine in x on this problem: solve for its zero instead of iterating.
        zero = torch.zeros(4)
        problem.x[0].data.copy_(zero)
        constant = exact_phi(problem, formula, nu)
        columns = []
        for i in range(4):
            problem.x[0].data.copy_(torch.eye(4)[i])
            columns.append(exact_phi(problem, formula, nu) - constant)
        problem.x[0].data.copy_(torch.linalg.lstsq(torch.stack(columns, 1), -constant).solution)
        norms.append(float(problem.hypergradient()[0].norm()))
    assert torch.tensor(norms[0] / norms[1]).log2().item() == pytest.approx(slope, abs=0.5 if slope == 3 else 0.1)


# ------------------------------------------------------------------------------- 3. T2, exact cases


def test_linear_upper_loss():
    """psi is quadratic in nu: p = 1 is off by (nu/2) e^(-x) a^2 exactly, every p >= 2 is exact."""
    x, y = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.zeros(3, requires_grad=True)
    a, b = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.3, 1.0, -1.0])
    oracle = bo.Oracle([x], [y], lambda: a @ y, lambda: (x.exp() * y**2).sum() / 2 - b @ y)
    scale = x.detach().exp()
    truth = -b * a / scale
    nu = 0.3
    for p, kind in STENCILS:
        formula = stencil(p, kind)
        copies = stack([[(b - j * nu * a) / scale] for j in formula.nodes])
        error = bo.hypergradient.penalty(oracle, copies, formula, nu).gradient[0] - truth
        expected = nu / 2 * a**2 / scale if p == 1 else torch.zeros(3)
        torch.testing.assert_close(error, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("p", "kind"), [s for s in STENCILS if s[0] <= 8])
@pytest.mark.parametrize("k", range(8))
def test_polynomial_ladder(p, kind, k):
    """psi has degree k + 1 in nu: exact iff p >= k + 1, and off by e (p+1)! (-b)^p nu^p for p = k."""
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    s, b, A = torch.tensor([0.7, -0.4]), torch.tensor([0.5, 0.8]), torch.tensor([[0.2, -0.3], [0.4, 0.1]]).double()
    oracle = bo.Oracle([x], [y], lambda: b @ y + (x * y**k).sum(), lambda: (y - s - A @ x).square().sum() / 2)
    nu, formula = 0.25, stencil(p, kind)
    copies = stack([[s - j * nu * b] for j in formula.nodes])
    estimate = bo.hypergradient.penalty(oracle, copies, formula, nu).gradient[0]
    error = estimate - (s**k + A.T @ b)
    if p >= k + 1:
        assert error.abs().max() < 1e-10
    elif p == k:
        factorial = torch.arange(1, p + 2).prod()
        expected = float(error_constant(formula, p)) * factorial * (-b) ** p * nu**p
        torch.testing.assert_close(error, expected, rtol=1e-9, atol=1e-11)
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


def slope(problem, formula, nus, solution=None):
    errors = []
    truth = problem.hypergradient()[0]
    for nu in nus:
        errors.append(float((exact_phi(problem, formula, nu) - truth).norm()))
    return torch.tensor(errors[0] / errors[-1]).log2().item() / (len(nus) - 1)


@pytest.mark.parametrize(
    ("p", "kind", "nus", "tolerance"),
    [
        (2, "central", NUS[2:], 0.1),
        (4, "central", NUS[:4], 0.1),
        (6, "central", NUS[:3], 0.1),
        (1, "forward", NUS, 0.1),
        (3, "forward", NUS, 0.5),
        (5, "forward", NUS[:4], 0.5),
    ],
)
def test_error_falls_with_the_order(p, kind, nus, tolerance):
    assert slope(Cosh(), stencil(p, kind), nus) == pytest.approx(p, abs=tolerance)


@pytest.mark.parametrize("p", [2, 4, 6])
def test_error_falls_with_the_order_in_a_whole_run(p):
    """The optimizer itself, lower problems solved by its own steps."""
    errors = []
    for nu in (0.1, 0.05):
        problem = Cosh(x=[0.5, -0.2, 0.8], b=[1.0, 0.5, -0.7])
        optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=0.6, lower_steps=60, order=p, nu=nu)
        optimizer.backward(problem.upper, problem.lower)
        errors.append(float((problem.x[0].grad - problem.hypergradient()[0]).norm()))
    assert torch.tensor(errors[0] / errors[1]).log2().item() == pytest.approx(p, abs=0.2)


class Miniature:
    """T4: softmax regression with one l2 weight per feature, lower problems solved by Newton's method."""

    def __init__(self, seed=0, d=12, c=3, n=40):
        generator = torch.Generator().manual_seed(seed)
        teacher = torch.randn(d, c, generator=generator, dtype=torch.float64)
        self.X, self.Xv = (torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in range(2))
        self.t, self.tv = (self.X @ teacher).argmax(1), (self.Xv @ teacher).argmax(1)
        self.x = [(torch.rand(d, generator=generator, dtype=torch.float64) - 1.5).requires_grad_()]
        self.y = [torch.zeros(d, c, requires_grad=True)]

    def upper(self):
        return F.cross_entropy(self.Xv @ self.y[0], self.tv)

    def lower(self):
        return F.cross_entropy(self.X @ self.y[0], self.t) + ((2 * self.x[0]).exp()[:, None] * self.y[0] ** 2).sum()

    def _derivatives(self, s):
        total = self.lower() + s * self.upper()
        gradient = torch.autograd.grad(total, self.y[0], create_graph=True)[0].reshape(-1)
        rows = [torch.autograd.grad(g, self.y[0], retain_graph=True)[0].reshape(-1) for g in gradient]
        return gradient.detach(), torch.stack(rows), gradient

    def perturbed_solution(self, s):
        before = self.y[0].detach().clone()
        for _ in range(8):
            gradient, H, _ = self._derivatives(s)
            self.y[0].data.sub_(torch.linalg.solve(H, gradient).view_as(self.y[0]))
        solution = self.y[0].detach().clone()
        self.y[0].data.copy_(before)
        return solution

    def hypergradient(self):
        self.y[0].data.copy_(self.perturbed_solution(0.0))
        _, H, graph = self._derivatives(0.0)
        v = torch.linalg.solve(H, torch.autograd.grad(self.upper(), self.y[0])[0].reshape(-1))
        result = -torch.autograd.grad(graph @ v, self.x[0])[0]
        self.y[0].data.zero_()
        return [result]


@pytest.mark.parametrize(
    "key", [(1, "forward"), (2, "central"), (3, "forward"), (3, "centred"), (4, "central"), (6, "central")]
)
def test_slopes_on_the_papers_task_in_miniature(key):
    p = key[0]
    nus = [0.08, 0.04, 0.02] if p < 6 else [0.08, 0.04]
    assert slope(Miniature(), stencil(*key), nus) == pytest.approx(p, abs=0.5 if p == 3 else 0.15)


# ------------------------------------------------------------------------------- 5. T5, float32 sweet spots


@pytest.mark.parametrize(
    ("p", "kind", "nu", "error"),
    [
        (1, "forward", 3.2e-4, 1.3e-4),
        (2, "central", 5.6e-3, 4.7e-6),
        (3, "forward", 1.6e-2, 8e-6),
        (4, "central", 3.6e-2, 1.1e-6),
        (6, "central", 7e-2, 6e-7),
        (8, "central", 8e-2, 5e-7),
    ],
)
def test_float32_sweet_spots(p, kind, nu, error):
    """Best nu within a factor 3 of the table, best error within a factor 5."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(256, generator=generator, dtype=torch.float64) * 2 - 1
    b = torch.rand(256, generator=generator, dtype=torch.float64) + 0.5
    exact, single = Cosh(x, b), Cosh(x, b, dtype=torch.float32)
    single.x[0].data.copy_(x)
    truth = exact.hypergradient()[0]
    grid = [10 ** (-4.5 + 0.05 * i) for i in range(75)]
    errors = []
    for step in grid:
        formula = stencil(p, kind)
        copies = [exact.perturbed_solution(j * step).float() for j in formula.nodes]
        errors.append(float((phi(single, copies, formula, step).double() - truth).norm() / truth.norm()))
    best = min(range(len(grid)), key=errors.__getitem__)
    assert nu / 3 <= grid[best] <= nu * 3
    assert error / 5 <= errors[best] <= error * 5
    assert errors[0] > 3 * errors[best]  # a smaller nu is worse


# ------------------------------------------------------------------------------- 6. and 7. noise and common starts


class Regression:
    """Mini-batch least squares, d = 8, batch 8: the noisy problem of T6."""

    def __init__(self, seed=0, d=8, n=200):
        generator = torch.Generator().manual_seed(seed)
        self.X, self.Xv = (torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in range(2))
        w = torch.randn(d, generator=generator, dtype=torch.float64)
        noise = torch.randn(2, n, generator=generator, dtype=torch.float64)
        self.t, self.tv = self.X @ w + noise[0], self.Xv @ w + noise[1]
        self.x, self.y = torch.zeros(d, requires_grad=True), torch.zeros(d, requires_grad=True)

    def upper(self, index):
        return (self.Xv[index] @ self.y - self.tv[index]).square().mean() / 2

    def lower(self, index):
        fit = (self.X[index] @ self.y - self.t[index]).square().mean() / 2
        return fit + (self.x.exp() * self.y**2).sum() / 20


class Batches:
    def __init__(self, n, size, seed):
        self.n, self.size, self.generator = n, size, torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            yield torch.randint(0, self.n, (self.size,), generator=self.generator)


def spread(samples, nu, p=2, repeats=24):
    """Relative standard deviation of the estimate over independent runs."""
    estimates = []
    for seed in range(repeats):
        problem = Regression()
        f, g = (
            bo.Objective(problem.upper, Batches(200, 8, seed)),
            bo.Objective(problem.lower, Batches(200, 8, 1000 + seed)),
        )
        optimizer = bo.F2SA(
            [problem.x], [problem.y], lr=0.1, lower_lr=0.05, lower_steps=40, order=p, nu=nu, samples=samples,
            check_finite=False, vectorize=False,
        )  # fmt: skip
        optimizer.backward(f, g)
        estimates.append(problem.x.grad)
    stacked = torch.stack(estimates)
    return float(stacked.var(0).sum().sqrt() / stacked.mean(0).norm()), float(stacked.var(0).sum().sqrt())


def test_shared_samples_are_free_of_one_over_nu():
    relative = [spread("shared", nu)[0] for nu in (0.03, 0.003)]
    assert relative[1] == pytest.approx(relative[0], rel=0.02)
    assert relative[0] < 1


def test_independent_samples_pay_one_over_nu():
    deviations = [spread("independent", nu)[1] for nu in (0.03, 0.01, 0.003)]
    assert deviations[1] / deviations[0] == pytest.approx(3, rel=0.15)
    assert deviations[2] / deviations[1] == pytest.approx(10 / 3, rel=0.15)
    one = spread("independent", 0.003, p=1)[1]
    assert deviations[2] / one == pytest.approx(0.5, rel=0.25)  # the ratio of their A2


def test_additive_noise_in_the_difference():
    """Shared outer samples: the noise of g cancels because sum c_j = 0, that of f has weight sum j c_j = 1."""
    formula, nu = stencil(4), 1e-3
    problem = PenaltyQuadratic()
    copies = stack([[problem.perturbed_solution(j * nu)] for j in formula.nodes])
    plain = exact_phi(problem, formula, nu)
    noise_f, noise_g = torch.randn(4), torch.randn(4)
    oracle = bo.Oracle(
        problem.x,
        problem.y,
        lambda: problem.upper() + noise_f @ problem.x[0],
        lambda: problem.lower() + noise_g @ problem.x[0],
    )
    noisy = bo.hypergradient.penalty(oracle, copies, formula, nu).gradient[0]
    torch.testing.assert_close(noisy - plain, noise_f, rtol=1e-8, atol=1e-10)


def test_a_common_start_has_no_one_over_nu():
    """T7: the error after K gradient steps from a common offset is the same at any nu; from separate ones it is not."""
    base = PenaltyQuadratic(r=1.0)
    truth, formula = base.hypergradient()[0], stencil(2)
    generator = torch.Generator().manual_seed(1)
    common = 0.1 * torch.randn(6, generator=generator)
    separate = [0.1 * torch.randn(6, generator=generator) for _ in formula.nodes]

    def error(nu, offsets, steps=10):
        copies = []
        for j, offset in zip(formula.nodes, offsets, strict=True):
            y = base.perturbed_solution(j * nu) + offset
            for _ in range(steps):
                y = y - base.lr * ((base.H + j * nu * base.Q) @ (y - base.perturbed_solution(j * nu)))
            copies.append(y)
        return float((phi(base, copies, formula, nu) - truth).norm() / truth.norm())

    shared = [error(nu, [common] * 2) for nu in (1e-3, 1e-4)]
    apart = [error(nu, separate) for nu in (1e-3, 1e-4)]
    assert shared[1] == pytest.approx(shared[0], rel=0.05)
    assert apart[1] / apart[0] == pytest.approx(10, rel=0.1)


def test_copies_start_from_a_common_point():
    problem = PenaltyQuadratic()
    problem.y[0].data.normal_()
    start = problem.y[0].detach().clone()
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=0, order=4, nu=0.01)
    optimizer.backward(problem.upper, problem.lower)
    copies = optimizer.state[problem.y[0]]["copies"]
    assert copies.shape == (4, 6)
    assert all(torch.equal(copy, start) for copy in copies)


# ------------------------------------------------------------------------------- 8. equivalences


def test_order_one_is_f2sa():
    """Against a hand-written loop of F2SA: raw steps, the same samples for both copies."""
    batches = [torch.randint(0, 200, (8,)) for _ in range(100)]
    problem, nu, alpha, lr = Regression(), 0.05, 0.05, 0.3
    optimizer = bo.F2SA([problem.x], [problem.y], lr=lr, lower_lr=alpha, lower_steps=3, order=1, nu=nu, normalize=False)
    f, g = bo.Objective(problem.upper, batches), bo.Objective(problem.lower, batches[::-1])
    for _ in range(20):
        optimizer.step(f, g)
    hand, xs, zs = Regression(), iter(batches), iter(batches[::-1])
    z, y = torch.zeros(8), torch.zeros(8)

    def gradient(loss, at, wrt, batch):
        hand.y.data.copy_(at)
        return torch.autograd.grad(loss(batch), wrt, allow_unused=True)[0]

    for _ in range(20):
        for _ in range(3):
            xi, zeta = next(xs), next(zs)
            z, y = (
                z - alpha * gradient(hand.lower, z, hand.y, zeta),
                y - alpha * (gradient(hand.lower, y, hand.y, zeta) + nu * gradient(hand.upper, y, hand.y, xi)),
            )
        next(xs)
        zeta = next(zs)
        difference = (gradient(hand.lower, y, hand.x, zeta) - gradient(hand.lower, z, hand.x, zeta)) / nu
        hand.x.data.sub_(lr * difference)
    torch.testing.assert_close(problem.x.detach(), hand.x.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(problem.y.detach(), z, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("vectorize", [True, False])
def test_order_two_is_the_papers_algorithm(vectorize):
    """Against a hand-written loop of Algorithm 3 with normalised steps, after 20 stochastic outer steps."""
    batches = [torch.randint(0, 200, (8,)) for _ in range(100)]
    problem, nu, alpha, lr = Regression(), 0.05, 0.05, 0.1
    optimizer = bo.F2SA(
        [problem.x], [problem.y], lr=lr, lower_lr=alpha, lower_steps=3, order=2, nu=nu, vectorize=vectorize
    )
    f, g = bo.Objective(problem.upper, batches), bo.Objective(problem.lower, batches[::-1])
    for _ in range(20):
        optimizer.step(f, g)
    hand, xs, zs = Regression(), iter(batches), iter(batches[::-1])
    copies = {1: torch.zeros(8), -1: torch.zeros(8)}

    def gradient(loss, at, wrt, batch):
        hand.y.data.copy_(at)
        return torch.autograd.grad(loss(batch), wrt, allow_unused=True)[0]

    for _ in range(20):
        for _ in range(3):
            xi, zeta = next(xs), next(zs)
            for j, y in copies.items():
                step = gradient(hand.lower, y, hand.y, zeta) + j * nu * gradient(hand.upper, y, hand.y, xi)
                copies[j] = y - alpha * step
        next(xs)
        zeta = next(zs)
        phi = sum(j * gradient(hand.lower, y, hand.x, zeta) for j, y in copies.items()) / (2 * nu)
        hand.x.data.sub_(lr * phi / phi.norm())
    torch.testing.assert_close(problem.x.detach(), hand.x.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(problem.y.detach(), (copies[1] + copies[-1]) / 2, rtol=1e-11, atol=1e-12)


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
    y = {j: problem.perturbed_solution(j * nu) for j in (-2, -1, 1, 2)}
    four = phi(problem, [y[j] for j in stencil(4).nodes], stencil(4), nu)
    two = phi(problem, [y[-1], y[1]], stencil(2), nu)
    wide = phi(problem, [y[-2], y[2]], stencil(2), 2 * nu)
    torch.testing.assert_close(four, (4 * two - wide) / 3, rtol=1e-12, atol=1e-12)


def test_symmetric_weights_would_blow_up():
    """The wrong sign that the paper prints: with c_-j = +c_j the estimate grows like 1/nu."""
    problem, right = PenaltyQuadratic(), stencil(2)
    wrong = right._replace(weights=(Fraction(1, 2), Fraction(1, 2)))
    sizes = [float(exact_phi(problem, wrong, nu).norm()) for nu in (1e-2, 1e-3)]
    assert sizes[1] / sizes[0] == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_normalised_steps_satisfy_their_bound(p):
    """avg |grad phi| <= 3 Delta/(eta T) + 3 L eta/2 + 8 avg |Phi - grad phi| (T8)."""
    problem, eta, T = PenaltyQuadratic(), 0.04, 60
    optimizer = bo.F2SA(problem.x, problem.y, lr=eta, lower_lr=problem.lr, lower_steps=40, order=p, nu=0.1 / problem.r)

    def value():
        problem.solve()
        return problem.upper().item()

    M = torch.linalg.solve(problem.H, problem.B)
    hessian = M.T @ problem.Q @ M
    start, norms, errors = value(), [], []
    problem.y[0].data.zero_()
    for _ in range(T):
        truth = problem.hypergradient()[0]
        optimizer.step(problem.upper, problem.lower)
        norms.append(float(truth.norm()))
        errors.append(float((problem.x[0].grad - truth).norm()))
    y0, best = problem.y[0].detach().clone(), 0.0
    bound = 3 * (start - best) / (eta * T) + 1.5 * float(torch.linalg.eigvalsh(hessian)[-1]) * eta
    assert sum(norms) / T <= bound + 8 * sum(errors) / T
    assert norms[-1] < 0.5 * norms[0] or norms[-1] < 0.1
    assert y0.isfinite().all()


# ------------------------------------------------------------------------------- 9. divergence, 12. first order only


def steps(optimizer, problem, n):
    for _ in range(n):
        optimizer.step(problem.upper, problem.lower)


def test_diverging_negative_copies_are_reported():
    problem = PenaltyQuadratic(r=2.88)
    optimizer = bo.F2SA(
        problem.x, problem.y, lr=0.01, lower_lr=problem.lr, lower_steps=20, order=4, nu=0.2, stencil="central"
    )
    with pytest.warns(bo.BilevelWarning, match="copies of y are not similarly far"):
        steps(optimizer, problem, 60)
    assert optimizer.diagnostics["spread"].argmax() == 0  # node -2
    worse = PenaltyQuadratic(r=20.0)
    optimizer = bo.F2SA(
        worse.x, worse.y, lr=0.01, lower_lr=worse.lr, lower_steps=500, order=2, nu=0.2, stencil="central"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        with pytest.raises(bo.NonFiniteError, match="negative nodes"):
            steps(optimizer, worse, 20)
    assert worse.x[0].isfinite().all()
    assert worse.y[0].isfinite().all()


def test_automatic_stencil_changes_to_forward():
    problem = PenaltyQuadratic(r=2.88)
    arguments = {"lr": 0.0, "lower_lr": problem.lr, "lower_steps": 20, "order": 4, "nu": 0.2}
    optimizer = bo.F2SA(problem.x, problem.y, **arguments)
    assert optimizer.stencil == "central"
    with pytest.warns(bo.BilevelWarning, match="Changing to stencil='forward'"):
        steps(optimizer, problem, 60)
    assert optimizer.stencil == "forward"
    torch.testing.assert_close(
        problem.x[0].grad, problem.predicted(stencil(4, "forward").nodes, 0.2), rtol=1e-6, atol=1e-6
    )
    assert problem.error() < 0.2
    resumed = bo.F2SA(problem.x, problem.y, **arguments)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.stencil == "forward"
    resumed.step(problem.upper, problem.lower)


def test_good_nu_raises_no_alarm():
    for p in (2, 4, 6):
        problem = PenaltyQuadratic(r=2.88)
        optimizer = bo.F2SA(problem.x, problem.y, lr=0.01, lower_lr=problem.lr, lower_steps=5, order=p, nu=0.05)
        for _ in range(30):
            optimizer.step(problem.upper, problem.lower)  # warnings are errors here
        assert optimizer.diagnostics["spread"].shape == (p,)


@pytest.mark.parametrize("vectorize", [True, False])
def test_no_second_derivatives(monkeypatch, vectorize):
    """No graph of a gradient is ever made: create_graph is False in every call, and a first-order-only loss runs."""
    calls = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(k) or grad(*a, **k))
    problem = Quadratic(n=5, m=3)
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=4, order=4, vectorize=vectorize)
    for _ in range(2):
        optimizer.step(problem.upper, problem.lower)
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
    copies = optimizer.state[problem.y[0]]["copies"]
    for lane, j in enumerate((-1, 1)):
        hand = PenaltyQuadratic()
        inner = factory(hand.y, lr=0.05)
        for _ in range(12):
            inner.zero_grad()
            (hand.lower() + j * nu * hand.upper()).backward(inputs=hand.y)
            inner.step()
        torch.testing.assert_close(copies[lane], hand.y[0].detach(), rtol=1e-12, atol=1e-12)


def test_normalised_step_has_length_lr_and_survives_a_zero_gradient():
    problem = PenaltyQuadratic()
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.7, lower_lr=problem.lr, lower_steps=5, nu=0.01)
    before = problem.x[0].detach().clone()
    optimizer.step(problem.upper, problem.lower)
    assert float((problem.x[0].detach() - before).norm()) == pytest.approx(0.7, rel=1e-12)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = bo.F2SA([x], [y], lr=0.7, lower_lr=0.1, lower_steps=1)
    optimizer.step(lambda: 0 * x.sum() + y.sum() * 0, lambda: ((y - 1) ** 2).sum() + 0 * x.sum())
    assert torch.equal(x.detach(), torch.ones(2))


def test_loss_and_live_value_are_extrapolated_to_no_perturbation():
    for p, kind in ((2, "central"), (3, "centred"), (4, "central"), (1, "forward"), (3, "forward")):
        problem, errors = Cosh(x=[0.5, -0.3], b=[1.0, 2.0]), []
        for nu in (0.1, 0.05):
            problem.y[0].data.zero_()
            optimizer = bo.F2SA(
                problem.x, problem.y, lr=0.0, lower_lr=0.6, lower_steps=80, order=p, stencil=kind, nu=nu
            )
            loss = optimizer.backward(problem.upper, problem.lower)
            live = problem.y[0].detach().clone()
            problem.solve()
            errors.append((float((live - problem.y[0]).norm().detach()), abs(float(loss - problem.upper().detach()))))
        if 0 in stencil(p, kind).nodes:
            assert max(errors[0]) < 1e-10
        else:
            assert errors[0][0] / errors[1][0] == pytest.approx(2**p, rel=0.2)
            assert errors[0][1] / errors[1][1] == pytest.approx(2**p, rel=0.2)


def test_nu_can_be_changed_and_is_saved():
    problem = PenaltyQuadratic()
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=5, nu=0.05)
    optimizer.step(problem.upper, problem.lower)
    optimizer.nu = 0.01
    other = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=5, nu=0.05)
    other.load_state_dict(optimizer.state_dict())
    assert other.nu == 0.01


def test_state_is_documented_shapes():
    y = [torch.zeros(3, 2, requires_grad=True), torch.zeros(2, requires_grad=True)]
    x = torch.zeros(3, requires_grad=True)
    optimizer = bo.F2SA([x], y, lr=0.1, lower_lr=0.1, lower_steps=1, order=3)
    optimizer.step(lambda: y[0].sum() + y[1].sum(), lambda: ((y[0] - x[:, None]) ** 2).sum() + (y[1] ** 2).sum())
    assert [optimizer.state[t]["copies"].shape for t in y] == [(4, 3, 2), (4, 2)]

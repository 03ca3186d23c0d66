"""RAHGD and PRAHGD against their specification: reference runs, equivalences, counts, saddle points."""

import copy
import io
import math

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.methods.restarted.theory import Constants

from .problems import Cleaning, Quadratic

MOMENTUM_10 = (math.sqrt(10) - 1) / (math.sqrt(10) + 1)  # of the lower solver at condition number 10


class Quartic:
    """g = (y - x)'A(y - x)/2, f = y1^4/4 - y1^2/2 + |y_2..n|^2/2: a strict saddle at 0, minima at (+-1, 0, ...)."""

    def __init__(self, start, basis=None):
        n = len(start)
        basis = torch.eye(n) if basis is None else basis
        self.A = basis @ torch.diag(torch.logspace(-1, 0, n)) @ basis.T
        self.x = torch.tensor(start, dtype=torch.float64).requires_grad_()
        self.y = torch.zeros(n, requires_grad=True)

    def upper(self):
        return self.y[0] ** 4 / 4 - self.y[0] ** 2 / 2 + (self.y[1:] ** 2).sum() / 2

    def lower(self):
        return (self.y - self.x) @ self.A @ (self.y - self.x) / 2

    @staticmethod
    def gradient(x):
        return torch.cat([x[:1] ** 3 - x[:1], x[1:]])

    def run(self, cls=bo.RAHGD, most=2000, **options):
        """Until it has converged; returns the optimizer and the number of steps."""
        settings = {"lr": 1 / 24, "lower_lr": 1.0, "lower_momentum": MOMENTUM_10, "linear_steps": 6}
        optimizer = cls([self.x], [self.y], **{**settings, **options})
        steps = 0
        while not optimizer.converged and steps < most:
            optimizer.step(self.upper, self.lower)
            steps += 1
        return optimizer, steps


# ---------------------------------------------------------------------------------------------------- reference runs


@pytest.mark.parametrize(
    ("period", "steps", "restarts", "selected", "norm", "solved_twice"),
    [
        (12, 150, 109, 11, 5.0e-5, 15_600),
        pytest.param(40, 235, 166, 30, 1.4e-8, 24_120, marks=pytest.mark.slow),
        pytest.param(100, 338, 209, 91, 1.7e-9, 32_880, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("lower_restart", ["zero", "keep"])
def test_table_of_the_quartic_problem(lower_restart, period, steps, restarts, selected, norm, solved_twice):
    """Outer steps, restarts, K0, final gradient and lower gradients of section 6.6."""
    problem = Quartic([0.3, 1.0, -1.0, 0.5])
    smooth, curvature = 6.0, 9.0
    optimizer, done = problem.run(
        lower_steps=60,
        momentum=1 - 1 / period,
        restart_radius=smooth / (4 * period**2 * curvature),
        restart_period=period,
        lower_restart=lower_restart,
    )
    assert (done, optimizer.restarts, optimizer._run.selected) == (steps, restarts, selected)
    final = float(problem.gradient(optimizer.averaged_parameters()[0]).norm())
    assert final == pytest.approx(norm, rel=0.03)
    counts = optimizer.oracle_counts
    assert counts["upper_grad"] == counts["jvp"] == steps
    # The specification does not count the lower gradient that carries the graph of the products.
    assert counts["lower_grad"] - steps == (solved_twice if lower_restart == "zero" else 60 * steps)
    assert counts["hvp"] <= 7 * steps - 1


@pytest.mark.parametrize(("radius", "steps", "norm"), [(0.1, 83, 6.6e-4), (1.0, 68, 5.1e-3), (10.0, 40, 0.24)])
def test_practical_radii_on_the_quartic_problem(radius, steps, norm):
    problem = Quartic([0.3, 1.0, -1.0, 0.5])
    optimizer, done = problem.run(lower_steps=30, restart_radius=radius, restart_period=40)
    assert done == steps
    final = float(problem.gradient(optimizer.averaged_parameters()[0]).norm())
    assert final == pytest.approx(norm, rel=0.02)


def saddle(seed, period, radius=None, most=2000, **options):
    """A run from the exact saddle point with the constants of eps = 1e-5, as in section 6.6."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(4, 4, generator=generator))[0]
    problem = Quartic([0.0] * 4, basis)
    theta = 4 * (9 * 1e-5 / 24**2) ** 0.25
    B = math.sqrt(1e-5 / 9)
    settings = {"lower_steps": 60, "momentum": 1 - theta, "restart_radius": B, "restart_period": period}
    if radius is not None:
        settings |= {"perturbation": theta * B / (20 * 13), "generator": generator}
    optimizer, steps = problem.run(bo.RAHGD if radius is None else bo.PRAHGD, most, **{**settings, **options})
    return optimizer, steps, problem


def test_an_exact_saddle_holds_the_method_without_initial_perturbation():
    for options in ({}, {"radius": "theory", "perturb_initial": False}):
        optimizer, steps, problem = saddle(0, 13, **options)
        assert (steps, optimizer.restarts) == (13, 0)
        assert not problem.x.any()
        assert not optimizer.averaged_parameters()[0].any()


def test_the_initial_perturbation_leaves_an_exact_saddle():
    seed = 1
    _, steps, problem = saddle(seed, 13, "theory", lower_steps=30)
    assert steps == 13  # shorter than the escape takes
    assert problem.x.norm() < 1e-2
    optimizer, steps, problem = saddle(seed, 100, "theory", lower_steps=20, lower_tol=1e-9)
    assert 250 < steps < 800
    assert float(optimizer.averaged_parameters()[0][0].abs()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("period", "median"), [(13, 13), (100, 420), (200, 524)])
def test_escapes_in_fifty_seeds(period, median):
    counts, escaped = [], 0
    for seed in range(50):
        _, steps, problem = saddle(seed, period, "theory", lower_steps=30, lower_tol=1e-10)
        counts.append(steps)
        escaped += float(problem.x[0].detach().abs()) > 0.9
    assert escaped == (0 if period == 13 else 50)
    assert sorted(counts)[25] == pytest.approx(median, rel=0.15)


# ---------------------------------------------------------------------------------------------------- equivalences


def pair(make_a, make_b, problem, steps=25):
    """Iterates and multipliers of two methods on two copies of a problem."""
    paths = []
    for make in (make_a, make_b):
        p = problem()
        optimizer, path = make(p), []
        for _ in range(steps):
            loss = optimizer.step(p.upper, p.lower)
            path.append((loss, p.x[0].detach().clone(), p.y[0].detach().clone()))
        paths.append((path, optimizer))
    return paths


def test_without_momentum_it_is_aid():
    arguments = {"lr": 0.02, "lower_lr": 0.1, "lower_steps": 5, "linear_steps": 4}
    (a, first), (b, second) = pair(
        lambda p: bo.RAHGD(p.x, p.y, momentum=0.0, restart_radius=math.inf, **arguments),
        lambda p: bo.AID(p.x, p.y, **arguments),
        Quadratic,
    )
    for s, t in zip(a, b, strict=True):
        assert all(torch.equal(u, v) for u, v in zip(s, t, strict=True))
    assert first.oracle_counts == second.oracle_counts


def test_perturbation_zero_is_the_unperturbed_method():
    arguments = {"lr": 0.05, "lower_lr": 0.1, "lower_steps": 5, "restart_radius": 0.2, "lower_momentum": 0.5}
    (a, first), (b, _) = pair(
        lambda p: bo.PRAHGD(p.x, p.y, perturbation=0.0, **arguments),
        lambda p: bo.RAHGD(p.x, p.y, **arguments),
        Quadratic,
        40,
    )
    assert first.restarts > 2
    assert all(torch.equal(u, v) for s, t in zip(a, b, strict=True) for u, v in zip(s, t, strict=True))


def test_trivial_lower_problem_is_restarted_agd():
    """g = |y - x|^2/2 is solved by one step, so that x follows the single-level method."""
    start, arguments = [0.3, 1.0, -1.0], {"lr": 0.05, "restart_radius": 0.1, "restart_period": 30}

    def phi(z):
        return z[0] ** 4 / 4 - z[0] ** 2 / 2 + (z[1:] ** 2).sum() / 2

    x, y = torch.tensor(start, requires_grad=True), torch.zeros(3, requires_grad=True)
    bilevel = bo.RAHGD([x], [y], lower_lr=1.0, lower_steps=1, **arguments)
    z = torch.tensor(start, requires_grad=True)
    single = bo.RestartedAGD([z], **arguments)

    def closure():
        single.zero_grad()
        loss = phi(z)
        loss.backward()
        return loss

    while not single.converged:
        bilevel.step(lambda: phi(y), lambda: ((y - x) ** 2).sum() / 2)
        single.step(closure)
        torch.testing.assert_close(x.detach(), z.detach(), rtol=0, atol=1e-13)
        assert bilevel.restarts == single.restarts
    assert single.restarts > 3
    assert bilevel.converged
    torch.testing.assert_close(bilevel.averaged_parameters(), single.averaged_parameters(), rtol=0, atol=1e-13)


def test_the_lower_solver_is_nesterovs_from_the_last_solution():
    """One step by hand: a fresh AGD from the present y at w, momentum forgotten."""
    problem = Quadratic(n=8, m=3, kappa=10.0)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.05, lower_lr=0.1, lower_steps=4, lower_momentum=0.5,
                         restart_radius=math.inf)  # fmt: skip
    previous = problem.x[0].detach().clone()
    for _ in range(3):
        before = problem.x[0].detach().clone()
        w = before + 0.9 * (before - previous)
        z = zt = problem.y[0].detach().clone()
        for _ in range(4):
            new = zt - 0.1 * (problem.A @ zt - problem.D @ w - problem.e)
            z, zt = new, new + 0.5 * (new - z)
        optimizer.step(problem.upper, problem.lower)
        torch.testing.assert_close(problem.y[0].detach(), z, rtol=0, atol=1e-14)
        previous = before


def test_error_of_the_estimate_is_that_of_the_closed_form():
    """u - grad Phi = (R + D'A^-1 P)(y - y*) + D'(v - v*(y)), at the look-ahead point (section 6.3)."""
    problem = Quadratic(n=12, m=4, kappa=20.0)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.02, lower_lr=0.05, lower_steps=3, linear_steps=3,
                         restart_radius=math.inf)  # fmt: skip
    for _ in range(3):
        optimizer.step(problem.upper, problem.lower)
    x = problem.x[0].detach().clone()
    w = x + 0.9 * (x - optimizer.state[problem.x[0]]["previous"])
    optimizer.backward(problem.upper, problem.lower)
    assert torch.equal(x, problem.x[0])  # bit for bit
    assert not torch.equal(w, x)
    with torch.no_grad():
        problem.x[0].copy_(w)
    y, v = problem.y[0].detach(), optimizer.state[problem.y[0]]["linear_solution"]
    error = problem.x[0].grad - problem.hypergradient()[0]
    slope = problem.R + problem.D.T @ torch.linalg.solve(problem.A, problem.P)
    exact = slope @ (y - problem.solution()[0]) + problem.D.T @ (v - problem.adjoint(y))
    torch.testing.assert_close(error, exact, rtol=0, atol=1e-13)
    assert exact.norm() > 1e-3


# ---------------------------------------------------------------------------------------------------- details


def test_oracle_counts():
    """(1, T + 1, T' + 1, 1) per step, T' in the first one, and the additional solve where an epoch begins."""
    problem = Quadratic(n=24, m=5, kappa=100.0)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.01, lower_lr=0.01, lower_steps=7, linear_steps=3, restart_steps=11,
                         restart_radius=0.05)  # fmt: skip
    epochs = 0
    for k in range(1, 21):
        epochs += optimizer.epoch_step == 0
        optimizer.step(problem.upper, problem.lower)
        expected = {"upper_grad": k, "lower_grad": 8 * k + 11 * epochs, "hvp": 4 * k - 1, "jvp": k, "loss": 0}
        assert optimizer.oracle_counts == expected
    assert epochs == optimizer.restarts + (optimizer.epoch_step > 0) > 2
    assert int(optimizer.diagnostics["restarts"]) <= optimizer.restarts


def test_fixed_counts_go_on_after_exact_convergence():
    """The linear system is solved exactly in few steps, then warm-started at its solution: no NaN (section 6.2)."""
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.RAHGD([x], [y], lr=0.0, lower_lr=0.5, lower_steps=3, linear_steps=5)
    for curvature in (torch.tensor([2.0, 2.0]), torch.tensor([1.0, 2.0])):
        for _ in range(3):
            optimizer.step(lambda: (y**2).sum() / 2, lambda c=curvature: (c * (y - x) ** 2).sum() / 2)
            assert x.grad.isfinite().all()
        torch.testing.assert_close(optimizer.state[y]["linear_solution"], y.detach() / curvature)


def test_tolerances_stop_the_solvers():
    problem = Quadratic(n=24, m=5, kappa=50.0)
    options = {"lr": 0.0, "lower_lr": 0.02, "lower_momentum": 0.75, "lower_steps": 1000, "linear_steps": 200}
    optimizer = bo.RAHGD(problem.x, problem.y, lower_tol=1e-6, linear_atol=1e-4, **options)
    optimizer.step(problem.upper, problem.lower)
    first = optimizer.oracle_counts
    assert 50 < first["lower_grad"] < 500
    assert optimizer.diagnostics["lower_residual"] <= 1e-6
    assert 1e-9 < optimizer.diagnostics["linear_residual"] <= 1e-4
    optimizer.step(problem.upper, problem.lower)
    second = optimizer.oracle_counts
    assert second["lower_grad"] - first["lower_grad"] == 2  # one step, and the graph
    assert second["hvp"] - first["hvp"] == 1  # the initial residual
    relative = bo.RAHGD(problem.x, problem.y, linear_tol=1e-2, **options)
    relative.step(problem.upper, problem.lower)
    assert 1 < relative.diagnostics["linear_iterations"] < 30


def test_restart_from_zero_is_a_cold_solve():
    problem = Quadratic(n=6, m=3, kappa=4.0)
    with torch.no_grad():
        problem.y[0].fill_(100.0)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=0, restart_steps=2,
                         lower_restart="zero", restart_radius=1e-9)  # fmt: skip
    for _ in range(2):
        y = torch.zeros(6)
        for _ in range(2):
            y = y - 0.2 * (problem.A @ y - problem.D @ problem.x[0].detach() - problem.e)
        optimizer.step(problem.upper, problem.lower)
        torch.testing.assert_close(problem.y[0].detach(), y)


def test_the_perturbation_waits_for_the_update():
    """backward leaves x as it is, keeps one perturbation until step, and the same generator gives the same run."""
    problem = Quadratic(n=6, m=3, kappa=4.0)
    start = problem.x[0].detach().clone()
    optimizer = bo.PRAHGD(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=200, perturbation=0.5)
    optimizer.backward(problem.upper, problem.lower)
    shift = optimizer.state[problem.x[0]]["perturbation"].clone()
    assert 0 < shift.norm() <= 0.5
    optimizer.backward(problem.upper, problem.lower)
    assert torch.equal(shift, optimizer.state[problem.x[0]]["perturbation"])
    assert torch.equal(start, problem.x[0])
    with torch.no_grad():
        problem.x[0].add_(shift)
    assert problem.error() < 1e-10
    with torch.no_grad():
        problem.x[0].copy_(start)
    gradient = problem.x[0].grad.clone()
    optimizer.step()
    torch.testing.assert_close(problem.x[0].detach(), start + shift - 0.1 * gradient, rtol=1e-14, atol=0)
    assert "perturbation" not in optimizer.state[problem.x[0]]


@pytest.mark.parametrize("cls", [bo.RAHGD, bo.PRAHGD])
@pytest.mark.parametrize("stop", [0, 1, 4, 11])
def test_resumes_bit_for_bit_in_the_middle_of_an_epoch(cls, stop):
    def make():
        problem = Cleaning()
        options = {} if cls is bo.RAHGD else {"perturbation": 0.01, "generator": torch.Generator().manual_seed(1)}
        return problem, cls(
            [problem.weights], problem.model.parameters(), lr=2.0, lower_lr=0.3, lower_steps=4, lower_momentum=0.5,
            restart_radius=0.3, restart_period=6, on_converged="continue", **options,
        )  # fmt: skip

    problem, optimizer = make()
    for k in range(20):
        if k == stop:
            file = io.BytesIO()
            parts = {"optimizer": optimizer.state_dict(), "model": problem.model.state_dict()}
            torch.save({**parts, "weights": problem.weights.detach()}, file)
        optimizer.step(problem.upper, problem.lower)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed = make()
    resumed.load_state_dict(saved["optimizer"])
    again.model.load_state_dict(saved["model"])
    again.weights.data.copy_(saved["weights"])
    for _ in range(stop, 20):
        resumed.step(again.upper, again.lower)
    assert torch.equal(problem.weights, again.weights)
    assert torch.equal(problem.model.weight, again.model.weight)
    assert torch.equal(*(o.averaged_parameters()[0] for o in (optimizer, resumed)))
    assert optimizer.oracle_counts == resumed.oracle_counts
    assert optimizer.restarts == resumed.restarts > 0
    assert optimizer.converged == resumed.converged


def test_a_failure_in_the_middle_of_an_epoch_changes_nothing():
    problem = Cleaning()
    optimizer = bo.PRAHGD([problem.weights], problem.model.parameters(), lr=2.0, lower_lr=0.3, lower_steps=4,
                          restart_radius=0.3, generator=torch.Generator().manual_seed(1))  # fmt: skip
    for _ in range(6):
        before = copy.deepcopy(optimizer.state_dict()), problem.weights.detach().clone()
        with pytest.raises(bo.NonFiniteError):
            optimizer.step(lambda: problem.upper() * math.nan, problem.lower)
        assert str(before[0]) == str(optimizer.state_dict())
        assert torch.equal(before[1], problem.weights)
        optimizer.step(problem.upper, problem.lower)
    assert optimizer.restarts > 0


def test_a_finished_run_is_left_alone():
    problem = Quadratic(n=6, m=3, kappa=4.0)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=20, restart_period=5,
                         restart_radius=math.inf)  # fmt: skip
    for _ in range(5):
        last = optimizer.step(problem.upper, problem.lower)
    x, y, counts = problem.x[0].detach().clone(), problem.y[0].detach().clone(), optimizer.oracle_counts
    assert optimizer.converged
    assert torch.equal(optimizer.step(problem.upper, problem.lower), last)
    assert optimizer.step() is None
    assert torch.equal(x, problem.x[0])
    assert torch.equal(y, problem.y[0])
    assert counts == optimizer.oracle_counts
    optimizer.swap_averaged()
    with pytest.raises(RuntimeError, match="swap_averaged"):
        optimizer.step(problem.upper, problem.lower)
    for _ in range(20):
        optimizer.backward(problem.upper, problem.lower)  # improves y at the averaged point
    assert problem.error() < 1e-8
    optimizer.swap_averaged()
    assert torch.equal(x, problem.x[0])


def test_the_check_looks_at_x_itself():
    problem = Quadratic(n=10, m=3, kappa=4.0)
    optimizer = bo.PRAHGD(problem.x, problem.y, lr=0.05, lower_lr=0.3, lower_steps=60, linear_steps=20,
                          perturbation=0.3)  # fmt: skip
    for _ in range(4):
        before = str(optimizer.state_dict())
        assert bo.check_hypergradient(optimizer, problem.upper, problem.lower).relative_error < 1e-8
        assert before == str(optimizer.state_dict())
        optimizer.step(problem.upper, problem.lower)


def test_small_data_cleaning_reaches_a_smaller_loss_than_aid():
    """Section 6.7, ordering only: the same steps, lower steps and linear steps."""
    final = {}
    for name in ("AID", "RAHGD"):
        problem = Cleaning(n=60, d=8)
        options = {} if name == "AID" else {"momentum": 0.9, "restart_radius": 50.0, "lower_momentum": 0.8}
        optimizer = getattr(bo, name)(
            [problem.weights], problem.model.parameters(), lr=20.0, lower_lr=0.3, lower_steps=10, linear_steps=6,
            **options
        )  # fmt: skip
        for _ in range(40):
            loss = optimizer.step(problem.upper, problem.lower)
        final[name] = float(loss)
    assert final["RAHGD"] < final["AID"] - 0.005


# ---------------------------------------------------------------------------------------------------- theory


@pytest.mark.parametrize(
    ("kappa", "smoothness", "curvature"), [(1, 8, 72), (2, 27, 639), (10, 1331, 478_071), (100, 1.0303e6, 3.15262e10)]
)
def test_constants_of_the_lemmas(kappa, smoothness, curvature):
    constants = Constants.bilevel(ell=1.0, mu=1 / kappa, rho=1.0, M=1.0, nu=1.0)
    assert constants.smoothness == pytest.approx(smoothness, rel=1e-5)
    assert constants.curvature == pytest.approx(curvature, rel=1e-5)
    minimax = Constants.minimax(ell=20.0499, mu=10.0, rho=2.0)
    assert (minimax.smoothness, minimax.curvature) == (pytest.approx(60.25, rel=1e-3), pytest.approx(91.2, rel=1e-3))


@pytest.mark.parametrize(
    ("kappa", "eps", "lr", "radius", "theta", "period", "lower_steps", "linear_steps"),
    [
        (2, 1e-2, 9.3e-3, 4.0e-3, 0.612, 1, 28, 15),
        (10, 1e-2, 1.9e-4, 1.5e-4, 0.456, 2, 79, 31),
        (10, 1e-4, 1.9e-4, 1.5e-5, 0.144, 7, 123, 50),
        (100, 1e-2, 2.4e-7, 5.6e-7, 0.263, 4, 340, 101),
        (100, 1e-4, 2.4e-7, 5.6e-8, 0.083, 13, 478, 151),
    ],
)
def test_table_of_theoretical_arguments(kappa, eps, lr, radius, theta, period, lower_steps, linear_steps):
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    constants = {"ell": 1.0, "mu": 1 / kappa, "rho": 1.0, "M": 1.0, "nu": 1.0}
    optimizer = bo.RAHGD.from_theory([x], [y], eps=eps, **constants)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr, rel=0.03)
    assert optimizer.restart_radius == pytest.approx(radius, rel=0.04)
    assert 1 - optimizer.momentum == pytest.approx(theta, rel=2e-3)
    found = (optimizer.restart_period, optimizer.lower_steps, optimizer.linear_steps)
    assert found == (period, lower_steps, linear_steps)
    root = math.sqrt(kappa)
    assert optimizer.lower_momentum == pytest.approx((root - 1) / (root + 1))
    overridden = bo.RAHGD.from_theory([x], [y], restart_period=10, lower_steps=3, **constants)
    assert (overridden.momentum, overridden.lower_steps) == (0.9, 3)
    with pytest.raises(ValueError, match=r"one of eps and restart_period"):
        bo.RAHGD.from_theory([x], [y], **constants)
    with pytest.raises(ValueError, match=r"Invalid eps value: 1000000\.0"):
        bo.RAHGD.from_theory([x], [y], eps=1e6, **constants)
    with pytest.raises(ValueError, match=r"Invalid mu value: 2\.0"):
        bo.RAHGD.from_theory([x], [y], eps=1e-2, **{**constants, "mu": 2.0})


@pytest.mark.parametrize(
    ("theta", "size", "chi", "radius", "ratio"),
    [(0.5, 3, 14.3, 1.7e-5, 4.4e-4), (0.1, 3, 19.4, 9.2e-6, 1.3e-5), (0.02, 10_000, 28.7, 4.2e-6, 3.5e-7)],
)
def test_arguments_of_the_perturbed_theorem(theta, size, chi, radius, ratio):
    constants = {"ell": 1.0, "mu": 0.5, "rho": 1.0, "M": 1.0, "nu": 1.0}
    L, rho = 27.0, 639.0
    eps = (2 * theta) ** 4 * L**2 / rho  # theta = (rho eps lr^2)^(1/4) with lr = 1/(4L) is (1/2)(rho eps / L^2)^(1/4)
    x, y = torch.zeros(size, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.PRAHGD.from_theory([("x", x)], [y], eps=eps, **constants)
    assert 1 - optimizer.momentum == pytest.approx(theta, rel=1e-9)
    assert optimizer.restart_period == pytest.approx(2 * chi / theta, rel=0.02)
    assert optimizer.restart_radius / math.sqrt(eps / rho) == pytest.approx(radius, rel=0.02)
    assert optimizer.perturbation / optimizer.restart_radius == pytest.approx(ratio, rel=0.03)
    smaller = bo.PRAHGD.from_theory([x], [y], eps=eps, gradient_bound=1e9, **constants)
    assert smaller.perturbation == pytest.approx(L * smaller.restart_radius**2 / 4e9)
    # What the proof needs of the corrected theta, for lr = 1/(4L).
    B, K, lr = optimizer.restart_radius, optimizer.restart_period, 1 / (4 * L)
    assert 20 * rho * B * lr * K * (2 / theta + K) <= 0.5


def test_theory_reaches_its_accuracy():
    """The theorem's constants, run to the end on the problem they are made for."""
    problem = Quartic([0.3, 1.0, -1.0, 0.5])
    # Smoothness 6 and curvature 9 hold on the region of the run; the general lemma would be far more careful.
    constants = Constants(1.0, 0.1, 2.0, 6.0, 9.0)
    arguments = {**constants.first_order(1.2e-5, None)}
    arguments.update(constants.linear(arguments.pop("sigma")))
    optimizer, _ = problem.run(**arguments)
    assert optimizer.converged
    assert problem.gradient(optimizer.averaged_parameters()[0]).norm() <= 83 * 1.2e-5

"""The restarted iteration of x in closed form, on `RestartedAGD`, and RAHGD and PRAHGD (sections 3, 6 of RAHGD's)."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch

import bilevel_optim as bo
from recipes.papers.theory import Constants

from ..problems import Cleaning, Problem, Quadratic, close, flat, same, seeded, values


def closure_of(optimizer, phi, *tensors):
    def closure():
        optimizer.zero_grad()
        loss = phi(*tensors)
        loss.backward()
        return loss

    return closure


def run(phi, start, steps, record=None, **options):
    """Steps on a function of one tensor; returns the optimizer, and what ``record`` made of each step."""
    x = torch.as_tensor(start, dtype=torch.float64).clone().requires_grad_()
    optimizer, seen = bo.RestartedAGD([x], **options), []
    for _ in range(steps):
        if optimizer.converged and options.get("on_converged") != "continue":
            break
        optimizer.step(closure_of(optimizer, phi, x))
        seen.append(x.detach().clone() if record is None else record(optimizer))
    return optimizer, x, seen


def reference(gradient, x, lr, theta, radius, period, steps):
    """The algorithm with its whole history: iterates, epoch lengths, output of the last epoch."""
    path, epochs, xs, ws = [], [], [x], []
    for _ in range(steps):
        previous = xs[-2] if len(xs) > 1 else xs[-1]
        w = xs[-1] + (1 - theta) * (xs[-1] - previous)
        ws.append(w)
        xs.append(w - lr * gradient(w))
        path.append(xs[-1])
        k = len(ws)
        lengths = [(b - a).norm() for a, b in itertools.pairwise(xs)]
        if k * sum(length**2 for length in lengths) > radius**2:
            epochs.append(k)
            xs, ws = [xs[-1]], []
        elif k == period:
            chosen = min(range(period // 2, period), key=lambda j: lengths[j])
            return path, epochs, torch.stack(ws[: chosen + 1]).mean(0), chosen
    return path, epochs, None, None


# ---------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize(
    ("theta", "radius", "trigger"),
    [(0.1, 1, 5), (0.5, 1, 6), (0.01, 1, 4), (0.1, 0.05, 1), (0.1, 0.1, 2), (0.1, 10, 17)],
)
def test_restart_index_of_a_linear_objective(theta, radius, trigger):
    """Strict inequality: a radius of exactly the first step does not trigger at k = 1."""
    n, options = 4 * trigger, {"lr": 0.1, "momentum": 1 - theta, "restart_radius": radius}
    _, _, restarts = run(
        lambda x: x * 1, 0.0, n, lambda optimizer: (optimizer.restarts, optimizer.epoch_step), **options
    )
    assert restarts == [((i + 1) // trigger, (i + 1) % trigger) for i in range(n)]


def test_steps_of_a_linear_objective():
    theta, lr = 0.1, 0.1
    _, _, path = run(lambda x: 3 * x, 0.0, 30, lr=lr, momentum=1 - theta, restart_radius=math.inf)
    exact = [-lr * 3 * (1 - (1 - theta) ** (i + 1)) / theta for i in range(30)]
    close(torch.stack([torch.zeros(()), *path]).diff(), torch.tensor(exact), 1e-13, 1e-12)


@pytest.mark.parametrize("curvature", [1.0, -0.3])
def test_quadratic_objective_is_a_power_of_the_matrix(curvature):
    lr, theta = 0.2, 0.1
    _, _, path = run(lambda x: curvature / 2 * x**2, 1.5, 40, lr=lr, momentum=1 - theta, restart_radius=math.inf)
    a = 1 - lr * curvature
    A = torch.tensor([[(2 - theta) * a, -(1 - theta) * a], [1.0, 0.0]])
    for k, x in enumerate(path, 1):
        exact = (torch.linalg.matrix_power(A, k) @ torch.tensor([1.5, 1.5]))[0]
        close(x, exact, 1e-13, 1e-11)


@pytest.mark.parametrize(("theta", "growth"), [(0.1, 1.0674), (0.01, 1.00624)])
def test_growth_along_negative_curvature(theta, growth):
    """lr * curvature = theta^2: growth beyond 1 + theta / 2 per step, where gradient descent has 1 + theta^2."""
    n = round(12 / theta)
    _, _, path = run(lambda x: -(theta**2) / 2 * x**2, 1e-9, n, lr=1.0, momentum=1 - theta, restart_radius=math.inf,
                     restart_period=n + 1)  # fmt: skip
    assert float(path[-1] / path[-2]) == pytest.approx(growth, rel=1e-4)
    assert growth > 1 + theta / 2


START = torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64)


def valley(x):
    return (torch.tensor([1.0, 10.0, 0.1]) * x**2).sum() / 2 + x.cos().sum()


def slope(w):
    return torch.tensor([1.0, 10.0, 0.1]) * w - w.sin()


@pytest.mark.parametrize(("radius", "period"), [(0.3, 12), (0.05, 7), (5.0, 40), (0.3, 1), (0.02, 2)])
def test_iterates_restarts_and_output_of_the_plain_algorithm(radius, period):
    path, epochs, output, _ = reference(slope, START, 0.05, 0.2, radius, period, 3000)
    optimizer, _, seen = run(valley, START, 3000, lr=0.05, momentum=0.8, restart_radius=radius, restart_period=period)
    assert optimizer.converged
    assert optimizer.restarts == len(epochs)
    assert len(epochs) > 0 or radius == 5.0
    close(torch.stack(seen), torch.stack(path), 1e-12, 1e-12)
    close(optimizer.averaged_parameters()[0], output, 1e-12, 1e-10)


def test_averaging_identity_of_a_quadratic():
    """grad Phi(w_hat) = -(x_{K0+1} - x_{K0} + theta (x_{K0} - x_0)) / (lr (K0 + 1)), a consequence of the algorithm."""
    spectrum, lr, theta, x0 = torch.tensor([0.05, 0.3, 1.0]), 0.5, 0.1, torch.tensor([1.0, -2.0, 1.5])
    options = {"lr": lr, "momentum": 1 - theta, "restart_radius": math.inf, "restart_period": 60}
    optimizer, _, path = run(lambda x: (spectrum * x**2).sum() / 2, x0, 60, **options)
    path = [x0, *path]
    k0 = min(range(30, 60), key=lambda k: float((path[k + 1] - path[k]).norm()))
    expected = -(path[k0 + 1] - path[k0] + theta * (path[k0] - x0)) / (lr * (k0 + 1))
    close(spectrum * optimizer.averaged_parameters()[0], expected, 1e-14)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.8, "restart_radius": 1e-9}, {"momentum": 0.0, "restart_radius": 1e9}]
)
def test_no_momentum_or_a_small_radius_is_gradient_descent(options):
    x = START
    optimizer, _, path = run(valley, x, 30, lr=0.05, **options)
    for point in path:
        x = x - 0.05 * slope(x)
        close(point, x, 0, 1e-12)
    assert optimizer.restarts == (30 if options["momentum"] else 0)


def test_groups_are_the_plain_rule_in_rescaled_coordinates():
    """x = D z with D^2 = rate / largest rate: the same restarts, the same iterates, the same output."""
    rates, start = (0.08, 0.02), (torch.tensor([2.0]), torch.tensor([-1.0, 3.0]))

    def phi(a, b):
        return (a**2).sum() / 2 + (torch.tensor([8.0, 0.5]) * b**2).sum() / 2 + 0.2 * (a * b).sum() + b.cos().sum()

    def make(scales, rates):
        variables = [(s / scale).clone().requires_grad_() for s, scale in zip(start, scales, strict=True)]
        groups = [{"params": [v], "lr": lr} for v, lr in zip(variables, rates, strict=True)]
        optimizer, history = bo.RestartedAGD(groups, restart_radius=0.5, restart_period=25), []
        while not optimizer.converged and len(history) < 2000:
            optimizer.step(closure_of(optimizer, lambda *v: phi(v[0] * scales[0], v[1] * scales[1]), *variables))
            history.append([optimizer.restarts, *(v.detach() * s for v, s in zip(variables, scales, strict=True))])
        return history, [a * s for a, s in zip(optimizer.averaged_parameters(), scales, strict=True)]

    (grouped, output), (plain, plain_output) = make((1.0, 1.0), rates), make((1.0, 0.5), (0.08, 0.08))
    assert grouped[-1][0] > 2
    close(grouped, plain, 1e-13)
    close(output, plain_output, 1e-13)


# ---------------------------------------------------------------------------------------------------- details


def test_learning_rate_is_that_of_the_epochs_start():
    """A scheduler's change waits for the next epoch."""
    theta, x, lrs = 0.1, torch.zeros((), requires_grad=True), []
    optimizer = bo.RestartedAGD([x], lr=0.1, momentum=1 - theta, restart_radius=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for _ in range(5 + 7):
        before, first = x.item(), optimizer.epoch_step == 0
        optimizer.step(closure_of(optimizer, lambda: x * 1))
        if first:
            lrs.append(before - x.item())
        scheduler.step()
    # The first epoch keeps 0.1 and so ends at k = 5; the second begins with 0.05, and ends at 7 if it keeps it.
    assert lrs == pytest.approx([0.1, 0.05])
    n = optimizer.epoch_step or 7
    moved = [sum((1 - (1 - theta) ** (i + 1)) / theta for i in range(k)) for k in (5, n)]
    assert x.item() == pytest.approx(-0.1 * moved[0] - 0.05 * moved[1], rel=1e-12)


def test_what_happens_after_the_last_epoch():
    settings = {"lr": 0.05, "momentum": 0.8, "restart_radius": 0.3, "restart_period": 12}
    optimizer, x, seen = run(valley, START, 3000, **settings)

    def closure():
        raise AssertionError("a finished run evaluates nothing")

    assert optimizer.step(closure).isfinite()
    assert torch.equal(x, seen[-1])
    average, live = optimizer.averaged_parameters()[0], x.detach().clone()
    optimizer.swap_averaged()
    assert torch.equal(x, average)
    assert torch.equal(optimizer.averaged_parameters()[0], average)
    with pytest.raises(RuntimeError, match="swap_averaged"):
        optimizer.step(closure)
    optimizer.swap_averaged()
    assert torch.equal(x, live)
    assert torch.equal(optimizer.averaged_parameters()[0], average)
    further, y, more = run(valley, START, len(seen) + 40, on_converged="continue", **settings)
    assert torch.equal(more[len(seen) - 1], live)
    assert further.converged
    assert further.epoch_step == 40 % 12
    assert slope(y.detach()).norm() < 0.5 * slope(live).norm()
    # The step after the end has no momentum.
    close(more[len(seen)], live - 0.05 * slope(live), 0, 1e-14)


def test_before_the_end_the_output_is_the_best_point():
    points = []

    def phi(x):
        points.append(x.detach().clone())
        return valley(x)

    optimizer, x, _ = run(phi, START, 25, lr=0.12, momentum=0.9, restart_radius=math.inf, restart_period=1000)
    best = min(range(25), key=lambda k: float(slope(points[k]).norm()))
    assert best not in (0, 24)
    assert torch.equal(optimizer.averaged_parameters()[0], points[best])
    assert torch.equal(bo.RestartedAGD([x]).averaged_parameters()[0], x)


def test_default_radius_is_five_first_steps_that_move():
    """Also after a warm-up that begins with a learning rate of zero."""
    settings = {"lr": 0.1, "momentum": 0.9}
    automatic, explicit = (
        run(lambda x: x * 1, 0.0, 40, lambda o: o.restarts, **settings, **radius)[2]
        for radius in ({}, {"restart_radius": 0.5})
    )
    assert automatic == explicit
    assert automatic[-1] > 2
    x = torch.zeros((), requires_grad=True)
    optimizer = bo.RestartedAGD([x], lr=0.0, restart_period=1, on_converged="continue")  # each step begins an epoch
    for lr in (0.0, 0.1, 0.1, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step(closure_of(optimizer, lambda: x * 1))
        assert optimizer.restarts == 0


@pytest.mark.parametrize("stop", [3, 20])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_resumes_bit_for_bit_in_the_middle_of_an_epoch(stop, noise):
    def make():
        x = START.clone().requires_grad_()
        optimizer = bo.RestartedAGD([x], lr=0.05, momentum=0.8, restart_radius=0.3, restart_period=12,
                                    perturbation=noise, on_converged="continue", generator=seeded(1))  # fmt: skip
        return x, optimizer

    def advance(x, optimizer, steps):
        for _ in range(steps):
            optimizer.step(closure_of(optimizer, valley, x))

    x, optimizer = make()
    advance(x, optimizer, stop)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), x.detach()), file)
    clones = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    advance(x, optimizer, 60 - stop)
    file.seek(0)
    (saved, at), (again, resumed) = torch.load(file, weights_only=True), make()
    resumed.load_state_dict(saved)
    again.data.copy_(at)
    for z, other in [(again, resumed), *((clone.param_groups[0]["params"][0], clone) for clone in clones)]:
        advance(z, other, 60 - stop)
        assert torch.equal(x, z)
        assert torch.equal(optimizer.averaged_parameters()[0], other.averaged_parameters()[0])
        assert optimizer.restarts == other.restarts > 0
    with pytest.raises(ValueError, match="no 'restarts' entry"):
        resumed.load_state_dict(torch.optim.SGD([again], lr=0.1).state_dict())


def test_a_failing_closure_changes_nothing():
    def fail():
        raise KeyError

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer = bo.RestartedAGD([x], lr=0.1, perturbation=0.1, generator=seeded())
    for _ in range(3):
        before = x.detach().clone(), optimizer.restarts, optimizer.epoch_step
        with pytest.raises(KeyError):
            optimizer.step(fail)
        assert torch.equal(before[0], x)
        assert before[1:3] == (optimizer.restarts, optimizer.epoch_step)
        optimizer.step(closure_of(optimizer, lambda x: (x**2).sum(), x))
    with pytest.raises(RuntimeError, match="needs a closure"):
        optimizer.step()


def test_an_added_group_starts_an_epoch_and_frozen_parameters_stay():
    x, z, frozen = torch.tensor([2.0], requires_grad=True), torch.tensor([1.0], requires_grad=True), torch.ones(1)
    optimizer = bo.RestartedAGD([x, frozen], lr=0.1, restart_radius=math.inf)
    closure = closure_of(optimizer, lambda: (x**2).sum() + (z**2).sum())
    optimizer.step(closure)
    optimizer.step(closure)
    assert optimizer.epoch_step == 2
    optimizer.add_param_group({"params": [z], "lr": 0.05})
    before = x.detach().clone()
    optimizer.zero_grad()
    optimizer.step(closure)
    assert optimizer.epoch_step == 1
    torch.testing.assert_close(x.detach(), 0.8 * before)  # no momentum
    assert float(frozen) == 1
    assert [t.shape for t in optimizer.averaged_parameters()] == [(1,)] * 3


def test_perturbations_at_the_start_and_at_every_restart():
    """Each is in the ball of the groups' metric, where a smaller rate is moved less; no other step is perturbed."""
    radius, rates, (x, z) = 0.01, (0.1, 0.001), (torch.zeros(2, requires_grad=True) for _ in range(2))
    optimizer = bo.RestartedAGD(
        [{"params": [x]}, {"params": [z], "lr": rates[1]}], lr=rates[0], momentum=0.0, restart_radius=0.3,
        perturbation=radius, generator=seeded(),
    )  # fmt: skip
    scaled, perturbed = [], []
    for k in range(25):
        before, restarts = values([x, z]), optimizer.restarts
        optimizer.step(closure_of(optimizer, lambda: x.sum() + z.sum()))
        shifts = [p.detach() - b + rate for p, b, rate in zip((x, z), before, rates, strict=True)]
        if max(float(s.abs().max()) for s in shifts) > 1e-12:
            perturbed.append(k)
            scaled.append(torch.cat([shifts[0], shifts[1] / math.sqrt(rates[1] / rates[0])]))
        assert (k in perturbed) == (k == 0 or optimizer.restarts > restarts)
    assert len(perturbed) == optimizer.restarts + 1 > 4
    norms = torch.stack([s.norm() for s in scaled])
    assert 0.6 * radius < norms.max() <= radius
    assert torch.stack(scaled)[:, 2:].abs().max() > 0.2 * radius


@pytest.mark.parametrize("n", [800, pytest.param(2000, marks=pytest.mark.slow)])
def test_perturbations_are_uniform_in_the_ball(n):
    """E|xi| = r d/(d + 1), half of the points within 0.5^(1/d) r, and no direction preferred, over all tensors."""
    d, r = 3, 0.7
    x, z = torch.zeros(2, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    optimizer = bo.RestartedAGD([x, z], lr=1.0, momentum=0.0, restart_radius=1e-9, perturbation=r, generator=seeded())
    points = [torch.zeros(3)]
    for _ in range(n):  # every step is a restart
        optimizer.step(closure_of(optimizer, lambda: 0.01 * (x.sum() + z.sum())))
        points.append(flat([x, z]))
    points = torch.stack(points).diff(dim=0) + 0.01
    norms = points.norm(dim=1)
    assert float(norms.max()) <= r * (1 + 1e-12)
    assert float(norms.mean()) == pytest.approx(r * d / (d + 1), abs=4 * r * math.sqrt(3 / 80 / n))
    assert float((norms < 0.5 ** (1 / d) * r).double().mean()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(n))
    close(points.T @ points / n, torch.eye(3) * r**2 / (d + 2), 0.03 * r**2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("momentum", 1.0), ("restart_radius", 0.0), ("restart_radius", math.nan), ("restart_period", 0)],
        *[("on_converged", "raise"), ("perturbation", -1.0), ("perturb_initial", 1), ("generator", 1)],
    ],
)
def test_bad_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match=f"Invalid {name} value: {value}"):
        bo.RestartedAGD([torch.zeros(1, requires_grad=True)], **{name: value})
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        bo.RestartedAGD([torch.zeros(1, requires_grad=True)], lr=-1.0)


# ---------------------------------------------------------------------------------------------------- RAHGD, PRAHGD

MOMENTUM_10 = (math.sqrt(10) - 1) / (math.sqrt(10) + 1)  # of the lower solver at condition number 10


class Quartic(Problem):
    """g = (y - x)'A(y - x)/2, f = y1^4/4 - y1^2/2 + |y_2..n|^2/2: a strict saddle at 0, minima at (+-1, 0, ...)."""

    def __init__(self, start=(0.3, 1.0, -1.0, 0.5), basis=None):
        n = len(start)
        basis = torch.eye(n) if basis is None else basis
        self.A = basis @ torch.diag(torch.logspace(-1, 0, n)) @ basis.T
        self.x, self.y = (
            [torch.tensor(start, dtype=torch.float64).requires_grad_()],
            [torch.zeros(n, requires_grad=True)],
        )
        self.points = []  # where f is evaluated

    def upper(self):
        self.points.append(self.x[0].detach().clone())
        y = self.y[0]
        return y[0] ** 4 / 4 - y[0] ** 2 / 2 + (y[1:] ** 2).sum() / 2

    def lower(self):
        d = self.y[0] - self.x[0]
        return d @ self.A @ d / 2

    @staticmethod
    def gradient(x):
        return torch.cat([x[:1] ** 3 - x[:1], x[1:]])

    def finish(self, cls=bo.RAHGD, most=2000, **options):
        """Until it has converged; returns the optimizer and the number of steps."""
        settings = {"lr": 1 / 24, "lower_lr": 1.0, "lower_momentum": MOMENTUM_10, "linear_steps": 6}
        optimizer, steps = cls(self.x, self.y, **{**settings, **options}), 0
        while not optimizer.converged and steps < most:
            self.run(optimizer)
            steps += 1
        return optimizer, steps


@pytest.mark.usually("keep-12-150-109-11-5e-05-15600")
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
    problem, smooth, curvature = Quartic(), 6.0, 9.0
    optimizer, done = problem.finish(
        lower_steps=60, momentum=1 - 1 / period, restart_radius=smooth / (4 * period**2 * curvature),
        restart_period=period, lower_restart=lower_restart,
    )  # fmt: skip
    assert (done, optimizer.restarts) == (steps, restarts)
    average, last = optimizer.averaged_parameters()[0], torch.stack(problem.points[-period:])
    close(average, last[: selected + 1].mean(0), 1e-12, 1e-10)  # K0
    assert float(problem.gradient(average).norm()) == pytest.approx(norm, rel=0.03)
    counts = optimizer.oracle_counts
    assert counts["upper_grad"] == counts["jvp"] == steps
    # The specification does not count the lower gradient that carries the graph of the products.
    assert counts["lower_grad"] - steps == (solved_twice if lower_restart == "zero" else 60 * steps)
    assert counts["hvp"] <= 7 * steps - 1


@pytest.mark.usually("1.0-68-0.0051")
@pytest.mark.parametrize(("radius", "steps", "norm"), [(0.1, 83, 6.6e-4), (1.0, 68, 5.1e-3), (10.0, 40, 0.24)])
def test_practical_radii_on_the_quartic_problem(radius, steps, norm):
    problem = Quartic()
    optimizer, done = problem.finish(lower_steps=30, restart_radius=radius, restart_period=40)
    assert done == steps
    assert float(problem.gradient(optimizer.averaged_parameters()[0]).norm()) == pytest.approx(norm, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("lower_steps", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_theory_reaches_its_accuracy(lower_steps):
    """The theorem's constants, run to the end on the problem they are made for."""
    problem, eps, smooth, curvature = Quartic(), 1.2e-5, 6.0, 9.0  # on the region of the run
    theta = 4 * (curvature * eps / (4 * smooth) ** 2) ** 0.25
    radius, period = math.sqrt(eps / curvature), math.ceil(1 / theta)
    arguments = {"momentum": 1 - theta, "restart_period": period, "restart_radius": radius}
    optimizer, _ = problem.finish(lower_steps=lower_steps, lr=1 / (4 * smooth), **arguments)
    assert optimizer.converged
    assert problem.gradient(optimizer.averaged_parameters()[0]).norm() <= 83 * eps


def saddle(seed, period, radius=None, **options):
    """A run from the exact saddle point with the constants of eps = 1e-5, as in section 6.6."""
    generator = seeded(seed)
    problem = Quartic([0.0] * 4, torch.linalg.qr(torch.randn(4, 4, generator=generator))[0])
    theta, B = 4 * (9 * 1e-5 / 24**2) ** 0.25, math.sqrt(1e-5 / 9)
    settings = {"lower_steps": 60, "momentum": 1 - theta, "restart_radius": B, "restart_period": period}
    if radius is not None:
        settings |= {"perturbation": theta * B / (20 * 13), "generator": generator}
    optimizer, steps = problem.finish(bo.RAHGD if radius is None else bo.PRAHGD, **{**settings, **options})
    return optimizer, steps, problem.x[0].detach()


def test_an_exact_saddle_holds_the_method_without_initial_perturbation():
    for options in ({}, {"radius": "theory", "perturb_initial": False}):
        optimizer, steps, x = saddle(0, 13, **options)
        assert (steps, optimizer.restarts) == (13, 0)
        assert not x.any()
        assert not optimizer.averaged_parameters()[0].any()


@pytest.mark.slow
def test_the_initial_perturbation_leaves_an_exact_saddle():
    _, steps, x = saddle(1, 13, "theory", lower_steps=30)
    assert steps == 13  # shorter than the escape takes
    assert x.norm() < 1e-2
    optimizer, steps, _ = saddle(1, 100, "theory", lower_steps=20, lower_tol=1e-9)
    assert 250 < steps < 800
    assert float(optimizer.averaged_parameters()[0][0].abs()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("period", "median"), [(13, 13), (100, 420), (200, 524)])
def test_escapes_in_fifty_seeds(period, median):
    runs = [saddle(seed, period, "theory", lower_steps=30, lower_tol=1e-10) for seed in range(50)]
    assert sum(float(x[0].abs()) > 0.9 for *_, x in runs) == (0 if period == 13 else 50)
    assert sorted(steps for _, steps, _ in runs)[25] == pytest.approx(median, rel=0.15)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((bo.RAHGD, {"momentum": 0.0, "restart_radius": math.inf, "linear_steps": 4}), (bo.AID, {"linear_steps": 4})),
        (
            (bo.PRAHGD, {"perturbation": 0.0, "restart_radius": 0.2, "lower_momentum": 0.5}),
            (bo.RAHGD, {"restart_radius": 0.2, "lower_momentum": 0.5}),
        ),
    ],
    ids=["no momentum is AID", "no perturbation is RAHGD"],
)
def test_equivalences(one, other):
    found = []
    for cls, options in (one, other):
        problem = Quadratic()
        optimizer = cls(problem.x, problem.y, lr=0.03, lower_lr=0.1, lower_steps=5, **options)
        path = [[problem.run(optimizer), *values(problem.x, problem.y)] for _ in range(25)]
        found.append(([t for part in path for t in part], optimizer.oracle_counts))
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert one[0] is bo.RAHGD or optimizer.restarts > 2


def test_trivial_lower_problem_is_restarted_agd():
    """g = |y - x|^2/2 is solved by one step, so that x follows the single-level method."""
    arguments = {"lr": 0.05, "restart_radius": 0.1, "restart_period": 30}

    def phi(z):
        return z[0] ** 4 / 4 - z[0] ** 2 / 2 + (z[1:] ** 2).sum() / 2

    x, z = (torch.tensor([0.3, 1.0, -1.0], requires_grad=True) for _ in range(2))
    y = torch.zeros(3, requires_grad=True)
    bilevel, single = bo.RAHGD([x], [y], lower_lr=1.0, lower_steps=1, **arguments), bo.RestartedAGD([z], **arguments)
    while not single.converged:
        bilevel.step(lambda: phi(y), lambda: ((y - x) ** 2).sum() / 2)
        single.step(closure_of(single, phi, z))
        close(x.detach(), z.detach(), 1e-13)
        assert bilevel.restarts == single.restarts
    assert single.restarts > 3
    assert bilevel.converged
    close(bilevel.averaged_parameters(), single.averaged_parameters(), 1e-13)


def test_the_lower_solver_is_nesterovs_from_the_last_solution():
    """One step by hand: a fresh AGD from the present y at w, momentum forgotten."""
    problem = Quadratic(n=8, m=3)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.05, lower_lr=0.1, lower_steps=4, lower_momentum=0.5,
                         restart_radius=math.inf)  # fmt: skip
    previous = problem.x[0].detach().clone()
    for _ in range(3):
        before = problem.x[0].detach().clone()
        w, z = before + 0.9 * (before - previous), problem.y[0].detach().clone()
        zt = z
        for _ in range(4):
            new = zt - 0.1 * (problem.A @ zt - problem.D @ w - problem.e)
            z, zt = new, new + 0.5 * (new - z)
        problem.run(optimizer)
        close(problem.y[0].detach(), z, 1e-14)
        previous = before


def test_error_of_the_estimate_is_that_of_the_closed_form():
    """u - grad Phi = (R + D'A^-1 P)(y - y*) + D'(v - v*(y)), at the look-ahead point (section 6.3)."""
    problem = Quadratic(n=12, m=4, kappa=20.0)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.02, lower_lr=0.05, lower_steps=3, linear_steps=3,
                         restart_radius=math.inf)  # fmt: skip
    problem.run(optimizer, 2)
    previous = problem.x[0].detach().clone()
    problem.run(optimizer)
    x = problem.x[0].detach().clone()
    w = x + 0.9 * (x - previous)
    optimizer.backward(problem.upper, problem.lower)
    assert torch.equal(x, problem.x[0])  # bit for bit
    problem.x[0].data.copy_(w)
    y, v = problem.y[0].detach(), optimizer.state[problem.y[0]]["linear_solution"]
    error = problem.x[0].grad - problem.hypergradient()[0]
    sensitivity = problem.R + problem.D.T @ torch.linalg.solve(problem.A, problem.P)
    exact = sensitivity @ (y - problem.solution()[0]) + problem.D.T @ (v - problem.adjoint(y))
    close(error, exact, 1e-13)
    assert exact.norm() > 1e-3


def test_oracle_counts():
    """(1, T + 1, T' + 2, 1) per step, T' in the first one, and the additional solve where an epoch begins."""
    problem, epochs = Quadratic(n=24, m=5, kappa=100.0), 0
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.01, lower_lr=0.01, lower_steps=7, linear_steps=3, restart_steps=11,
                         restart_radius=0.05)  # fmt: skip
    for k in range(1, 21):
        epochs += optimizer.epoch_step == 0
        problem.run(optimizer)
        assert tuple(optimizer.oracle_counts.values()) == (k, 8 * k + 11 * epochs, 5 * k - 1, k, 0)
    assert epochs == optimizer.restarts + (optimizer.epoch_step > 0) > 2
    assert int(optimizer.diagnostics["restarts"]) <= optimizer.restarts


def test_fixed_counts_go_on_after_exact_convergence():
    """The linear system is solved exactly in few steps, then warm-started at its solution: no NaN (section 6.2)."""
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.RAHGD([x], [y], lr=0.0, lower_lr=0.5, lower_steps=3, linear_steps=5)
    for curvature in (torch.tensor([2.0, 2.0]), torch.tensor([1.0, 2.0])):
        for _ in range(3):
            optimizer.step(lambda: (y**2).sum() / 2, lambda c=curvature: (c * (y - x) ** 2).sum() / 2)
            # f is |y|^2/2, so that the gradient is y, which is x once it is solved for.
            assert x.grad.isfinite().all()
        close(x.grad, y.detach(), 1e-12, 1e-9)


def test_tolerances_stop_the_solvers():
    problem = Quadratic(n=24, m=5, kappa=50.0)
    options = {"lr": 0.0, "lower_lr": 0.02, "lower_momentum": 0.75, "lower_steps": 1000, "linear_steps": 200}
    optimizer = bo.RAHGD(problem.x, problem.y, lower_tol=1e-6, linear_atol=1e-4, **options)
    problem.run(optimizer)
    first = optimizer.oracle_counts
    assert 50 < first["lower_grad"] < 500
    assert optimizer.diagnostics["lower_residual"] <= 1e-6
    assert 1e-9 < optimizer.diagnostics["linear_residual"] <= 1e-4
    problem.run(optimizer)
    second = optimizer.oracle_counts
    assert second["lower_grad"] - first["lower_grad"] == 2  # one step, and the graph
    assert second["hvp"] - first["hvp"] == 2  # the initial residual, and that of the solution
    relative = bo.RAHGD(problem.x, problem.y, linear_tol=1e-2, **options)
    problem.run(relative)
    assert 1 < relative.diagnostics["linear_iterations"] < 30


def test_restart_from_zero_is_a_cold_solve():
    problem = Quadratic(n=6, m=3, kappa=4.0)
    problem.y[0].data.fill_(100.0)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=0, restart_steps=2,
                         lower_restart="zero", restart_radius=1e-9)  # fmt: skip
    for _ in range(2):
        y = torch.zeros(6)
        for _ in range(2):
            y = y - 0.2 * (problem.A @ y - problem.D @ problem.x[0].detach() - problem.e)
        problem.run(optimizer)
        torch.testing.assert_close(problem.y[0].detach(), y)


def test_the_perturbation_waits_for_the_update():
    """backward leaves x as it is and keeps one perturbation, where it looks, until step."""
    problem = Quadratic(n=6, m=3, kappa=4.0)
    start = problem.x[0].detach().clone()
    optimizer = bo.PRAHGD(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=200, perturbation=0.5)
    gradients = []
    for _ in range(2):
        optimizer.backward(problem.upper, problem.lower)
        gradients.append(problem.x[0].grad.clone())
        assert torch.equal(start, problem.x[0])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    optimizer.step()
    shift = problem.x[0].detach() - start + 0.1 * gradients[1]
    assert 0 < shift.norm() <= 0.5
    problem.x[0].data.copy_(start + shift)
    assert problem.error() < 1e-10


def test_a_failure_in_the_middle_of_an_epoch_changes_nothing():
    problem = Cleaning()
    optimizer = bo.PRAHGD(problem.x, problem.y, lr=2.0, lower_lr=0.3, lower_steps=4, restart_radius=0.3,
                          generator=seeded(1))  # fmt: skip
    for _ in range(6):
        before = str(optimizer.state_dict()), values(problem.x)
        with pytest.raises(bo.NonFiniteError):
            optimizer.step(lambda: problem.upper() * math.nan, problem.lower)
        assert before[0] == str(optimizer.state_dict())
        assert same(before[1], values(problem.x))
        problem.run(optimizer)
    assert optimizer.restarts > 0


def test_a_finished_run_is_left_alone():
    problem = Quadratic(n=6, m=3, kappa=4.0)
    optimizer = bo.RAHGD(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=20, restart_period=5,
                         restart_radius=math.inf)  # fmt: skip
    last = problem.run(optimizer, 5)
    before, counts = values(problem.x, problem.y), optimizer.oracle_counts
    assert optimizer.converged
    assert torch.equal(problem.run(optimizer), last)
    assert optimizer.step() is None
    assert same(before, values(problem.x, problem.y))
    assert counts == optimizer.oracle_counts
    optimizer.swap_averaged()
    with pytest.raises(RuntimeError, match="swap_averaged"):
        problem.run(optimizer)
    for _ in range(20):
        optimizer.backward(problem.upper, problem.lower)  # improves y at the averaged point
    assert problem.error() < 1e-8
    optimizer.swap_averaged()
    assert torch.equal(before[0], problem.x[0])


def test_the_check_looks_at_x_itself():
    problem = Quadratic(n=10, m=3, kappa=4.0)
    optimizer = bo.PRAHGD(problem.x, problem.y, lr=0.05, lower_lr=0.3, lower_steps=60, linear_steps=20,
                          perturbation=0.3)  # fmt: skip
    for _ in range(3):
        before = str(optimizer.state_dict())
        assert bo.check_hypergradient(optimizer, problem.upper, problem.lower).relative_error < 1e-8
        assert before == str(optimizer.state_dict())
        problem.run(optimizer)


@pytest.mark.slow
def test_small_data_cleaning_reaches_a_smaller_loss_than_aid():
    """Section 6.7, ordering only: the same steps, lower steps and linear steps."""
    final = []
    for cls, options in ((bo.AID, {}), (bo.RAHGD, {"momentum": 0.9, "restart_radius": 50.0, "lower_momentum": 0.8})):
        problem = Cleaning(n=60)
        optimizer = cls(problem.x[:1], problem.y, lr=20.0, lower_lr=0.3, lower_steps=10, linear_steps=6, **options)
        final.append(float(problem.run(optimizer, 30)))
    assert final[1] < final[0] - 0.005


# ---------------------------------------------------------------------------------------------------- theory

UNIT = {"ell": 1.0, "rho": 1.0, "M": 1.0, "nu": 1.0}


def theory(mu, size=None, **accuracy):
    x, y = torch.zeros(size or 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    constants = Constants.bilevel(mu=mu, **UNIT)
    if size is None:
        return bo.RAHGD([x], [y], **constants.first_order(**accuracy))
    return bo.PRAHGD([x], [y], **constants.second_order(size, **accuracy))


@pytest.mark.parametrize(
    ("kappa", "smoothness", "curvature"), [(1, 8, 72), (2, 27, 639), (10, 1331, 478_071), (100, 1.0303e6, 3.15262e10)]
)
def test_constants_of_the_lemmas(kappa, smoothness, curvature):
    eps = 1e-4
    optimizer = theory(mu=1 / kappa, eps=eps)
    assert 1 / (4 * optimizer.param_groups[0]["lr"]) == pytest.approx(smoothness, rel=1e-5)
    assert eps / optimizer.restart_radius**2 == pytest.approx(curvature, rel=1e-5)


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
    optimizer, mu, root = theory(mu=1 / kappa, eps=eps), 1 / kappa, math.sqrt(kappa)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr, rel=0.03)
    assert optimizer.restart_radius == pytest.approx(radius, rel=0.04)
    assert 1 - optimizer.momentum == pytest.approx(theta, rel=2e-3)
    found = (optimizer.restart_period, optimizer.lower_steps, optimizer.linear_steps)
    assert found == (period, lower_steps, linear_steps)
    assert optimizer.lower_momentum == pytest.approx((root - 1) / (root + 1))
    assert theory(mu=mu, restart_period=10).momentum == 0.9
    for options, message in (
        ({"mu": mu}, "one of eps and restart_period"),
        ({"mu": mu, "eps": 1e6}, r"Invalid eps value: 1000000\.0"),
        ({"mu": 2.0, "eps": 1e-2}, r"Invalid mu value: 2\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            theory(**options)


@pytest.mark.parametrize(
    ("theta", "size", "chi", "radius", "ratio"),
    [(0.5, 3, 14.3, 1.7e-5, 4.4e-4), (0.1, 3, 19.4, 9.2e-6, 1.3e-5), (0.02, 10_000, 28.7, 4.2e-6, 3.5e-7)],
)
def test_arguments_of_the_perturbed_theorem(theta, size, chi, radius, ratio):
    L, rho = 27.0, 639.0
    eps = (2 * theta) ** 4 * L**2 / rho  # theta = (rho eps lr^2)^(1/4) with lr = 1/(4L) is (1/2)(rho eps / L^2)^(1/4)
    optimizer = theory(0.5, size, eps=eps)
    assert 1 - optimizer.momentum == pytest.approx(theta, rel=1e-9)
    assert optimizer.restart_period == pytest.approx(2 * chi / theta, rel=0.02)
    assert optimizer.restart_radius / math.sqrt(eps / rho) == pytest.approx(radius, rel=0.02)
    assert optimizer.perturbation / optimizer.restart_radius == pytest.approx(ratio, rel=0.03)
    smaller = theory(0.5, size, eps=eps, gradient_bound=1e9)
    assert smaller.perturbation == pytest.approx(L * smaller.restart_radius**2 / 4e9)
    # Required of the corrected theta by the proof, for lr = 1/(4L).
    B, K, lr = optimizer.restart_radius, optimizer.restart_period, 1 / (4 * L)
    assert 20 * rho * B * lr * K * (2 / theta + K) <= 0.5


def test_the_first_linear_solve_starts_at_y_as_the_paper_has_it():
    """g = |y - x|^2 / 2, f = y: v = 1; without iterations it is its start, 0 or y = x, and the hypergradient is v."""
    for start, expected in (("zero", 0.0), ("y", 2.0)):
        x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        optimizer = bo.RAHGD([x], [y], lr=0.1, lower_lr=1.0, lower_steps=1, linear_steps=0, linear_start=start)
        for _ in range(2):  # the second starts at the last v
            optimizer.backward(lambda y=y: y.sum(), lambda x=x, y=y: (y - x).square().sum() / 2)
            assert float(x.grad) == expected
            with torch.no_grad():
                x += 1.0

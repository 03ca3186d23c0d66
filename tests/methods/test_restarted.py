"""The restarted iteration of x in closed form (RAHGD specification, sections 3.2, 6.5 and 6.6), on `RestartedAGD`."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.methods.restarted.restart import uniform_ball


def run(phi, start, steps, record=None, **options):
    """Steps on a function of one tensor; returns the optimizer, and what ``record`` made of each step."""
    x = torch.as_tensor(start, dtype=torch.float64).clone().requires_grad_()
    optimizer = bo.RestartedAGD([x], **options)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = phi(x)
        loss.backward()
        return loss

    for _ in range(steps):
        if optimizer.converged and options.get("on_converged") != "continue":
            break
        optimizer.step(closure)
        seen.append(x.detach().clone() if record is None else record(optimizer, x))
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
            late = range(period // 2, period)
            chosen = min(late, key=lambda j: lengths[j])
            return path, epochs, torch.stack(ws[: chosen + 1]).mean(0), chosen, xs
    return path, epochs, None, None, xs


@pytest.mark.parametrize(
    ("theta", "radius", "trigger"),
    [(0.1, 1, 5), (0.5, 1, 6), (0.01, 1, 4), (0.1, 0.05, 1), (0.1, 0.1, 2), (0.1, 10, 17)],
)
def test_restart_index_of_a_linear_objective(theta, radius, trigger):
    """Strict inequality: a radius of exactly the first step does not trigger at k = 1."""
    _, _, restarts = run(
        lambda x: x,
        0.0,
        4 * trigger,
        lambda optimizer, x: (optimizer.restarts, optimizer.epoch_step),
        lr=0.1,
        momentum=1 - theta,
        restart_radius=radius,
    )
    assert restarts == [((i + 1) // trigger, (i + 1) % trigger) for i in range(4 * trigger)]


def test_steps_of_a_linear_objective():
    theta, lr = 0.1, 0.1
    _, _, path = run(lambda x: 3 * x, 0.0, 30, lr=lr, momentum=1 - theta, restart_radius=math.inf)
    steps = torch.stack([torch.zeros(()), *path]).diff()
    exact = [-lr * 3 * (1 - (1 - theta) ** (i + 1)) / theta for i in range(30)]
    torch.testing.assert_close(steps, torch.tensor(exact), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("curvature", [1.0, -0.3])
def test_quadratic_objective_is_a_power_of_the_matrix(curvature):
    lr, theta = 0.2, 0.1
    _, _, path = run(lambda x: curvature / 2 * x**2, 1.5, 40, lr=lr, momentum=1 - theta, restart_radius=math.inf)
    a = 1 - lr * curvature
    A = torch.tensor([[(2 - theta) * a, -(1 - theta) * a], [1.0, 0.0]])
    for k, x in enumerate(path, 1):
        exact = (torch.linalg.matrix_power(A, k) @ torch.tensor([1.5, 1.5]))[0]
        torch.testing.assert_close(x, exact, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("theta", "growth"), [(0.1, 1.0674), (0.01, 1.00624)])
def test_growth_along_negative_curvature(theta, growth):
    """lr * curvature = theta^2: growth beyond 1 + theta / 2 per step, where gradient descent has 1 + theta^2."""
    steps = round(20 / theta)
    _, _, path = run(
        lambda x: -(theta**2) / 2 * x**2, 1e-9, steps, lr=1.0, momentum=1 - theta, restart_radius=math.inf,
        restart_period=steps + 1,
    )  # fmt: skip
    assert float(path[-1] / path[-2]) == pytest.approx(growth, rel=1e-4)
    assert growth > 1 + theta / 2


def valley(x):
    return (torch.tensor([1.0, 10.0, 0.1]) * x**2).sum() / 2 + x.cos().sum()


def slope(w):
    return torch.tensor([1.0, 10.0, 0.1]) * w - w.sin()


@pytest.mark.parametrize(("radius", "period"), [(0.3, 12), (0.05, 7), (5.0, 40), (0.3, 1), (0.02, 2)])
def test_iterates_restarts_and_output_of_the_plain_algorithm(radius, period):
    start = torch.tensor([2.0, -1.0, 3.0])
    path, epochs, output, _, _ = reference(slope, start, 0.05, 0.2, radius, period, 3000)
    optimizer, _x, seen = run(valley, start, 3000, lr=0.05, momentum=0.8, restart_radius=radius, restart_period=period)
    assert optimizer.converged
    assert optimizer.restarts == len(epochs)
    assert len(epochs) > 0 or radius == 5.0
    assert len(seen) == len(path)
    for a, b in zip(seen, path, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.averaged_parameters()[0], output, rtol=1e-10, atol=1e-12)


def test_averaging_identity_of_a_quadratic():
    """grad Phi(w_hat) = -(x_{K0+1} - x_{K0} + theta (x_{K0} - x_0)) / (lr (K0 + 1)), a consequence of the algorithm."""
    spectrum, lr, theta = torch.tensor([0.05, 0.3, 1.0]), 0.5, 0.1
    x0 = torch.tensor([1.0, -2.0, 1.5])
    optimizer, _, path = run(
        lambda x: (spectrum * x**2).sum() / 2, x0, 60, lr=lr, momentum=1 - theta, restart_radius=math.inf,
        restart_period=60,
    )  # fmt: skip
    path = [x0, *path]
    k0 = min(range(30, 60), key=lambda k: float((path[k + 1] - path[k]).norm()))
    expected = -(path[k0 + 1] - path[k0] + theta * (path[k0] - x0)) / (lr * (k0 + 1))
    torch.testing.assert_close(spectrum * optimizer.averaged_parameters()[0], expected, rtol=0, atol=1e-14)


def test_small_radius_is_gradient_descent():
    x = torch.tensor([2.0, -1.0, 3.0])
    optimizer, _, path = run(valley, x, 30, lr=0.05, momentum=0.8, restart_radius=1e-9)
    for point in path:
        x = x - 0.05 * slope(x)
        torch.testing.assert_close(point, x, rtol=1e-12, atol=0)
    assert optimizer.restarts == 30


def test_no_momentum_is_gradient_descent():
    x = torch.tensor([2.0, -1.0, 3.0])
    _, _, path = run(valley, x, 30, lr=0.05, momentum=0.0, restart_radius=math.inf)
    for point in path:
        x = x - 0.05 * slope(x)
        torch.testing.assert_close(point, x, rtol=1e-13, atol=0)


def test_groups_are_the_plain_rule_in_rescaled_coordinates():
    """x = D z with D^2 = rate / largest rate: the same restarts, the same iterates, the same output."""
    rates, start = (0.08, 0.02), (torch.tensor([2.0]), torch.tensor([-1.0, 3.0]))

    def phi(a, b):
        return (a**2).sum() / 2 + (torch.tensor([8.0, 0.5]) * b**2).sum() / 2 + 0.2 * (a * b).sum() + b.cos().sum()

    def make(scales, groups):
        variables = [(s / scale).clone().requires_grad_() for s, scale in zip(start, scales, strict=True)]
        optimizer = bo.RestartedAGD(
            [{"params": [v], "lr": lr} for v, lr in zip(variables, groups, strict=True)],
            restart_radius=0.5,
            restart_period=25,
        )

        def closure():
            optimizer.zero_grad()
            loss = phi(*(v * scale for v, scale in zip(variables, scales, strict=True)))
            loss.backward()
            return loss

        history = []
        while not optimizer.converged and len(history) < 2000:
            optimizer.step(closure)
            history.append((optimizer.restarts, [(v * s).detach() for v, s in zip(variables, scales, strict=True)]))
        return history, [a * s for a, s in zip(optimizer.averaged_parameters(), scales, strict=True)]

    grouped, output = make((1.0, 1.0), rates)
    plain, plain_output = make((1.0, 0.5), (0.08, 0.08))
    assert [r for r, _ in grouped] == [r for r, _ in plain]
    assert grouped[-1][0] > 2
    for (_, a), (_, b) in zip(grouped, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    torch.testing.assert_close(output, plain_output, rtol=0, atol=1e-13)


def test_learning_rate_is_that_of_the_epochs_start():
    """A scheduler's change waits for the next epoch."""
    theta, lrs = 0.1, []
    x = torch.zeros((), requires_grad=True)
    optimizer = bo.RestartedAGD([x], lr=0.1, momentum=1 - theta, restart_radius=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def closure():
        optimizer.zero_grad()
        x.backward()  # slope 1
        return x

    for _ in range(5 + 7):
        before, first = x.item(), optimizer.epoch_step == 0
        optimizer.step(closure)
        if first:
            lrs.append(before - x.item())
        scheduler.step()
    # The first epoch keeps 0.1 and so ends at k = 5; the second begins with 0.05 and would still end at 7 if it keeps
    # it.
    assert lrs == pytest.approx([0.1, 0.05])
    exact = 0.05 * sum((1 - (1 - theta) ** (i + 1)) / theta for i in range(optimizer.epoch_step or 7))
    start = -0.1 * sum((1 - (1 - theta) ** (i + 1)) / theta for i in range(5))
    assert x.item() == pytest.approx(start - exact, rel=1e-12)


def test_what_happens_after_the_last_epoch():
    start = torch.tensor([2.0, -1.0, 3.0])
    settings = {"lr": 0.05, "momentum": 0.8, "restart_radius": 0.3, "restart_period": 12}
    optimizer, x, seen = run(valley, start, 3000, **settings)

    def closure():
        raise AssertionError("a finished run evaluates nothing")

    assert optimizer.step(closure) == optimizer._last_loss
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

    further, y, more = run(valley, start, len(seen) + 40, on_converged="continue", **settings)
    assert torch.equal(more[len(seen) - 1], live)
    assert further.converged
    assert further.epoch_step == 40 % 12
    assert slope(y.detach()).norm() < 0.5 * slope(live).norm()
    # The step after the end has no momentum.
    torch.testing.assert_close(more[len(seen)], live - 0.05 * slope(live), rtol=1e-14, atol=0)


def test_before_the_end_the_output_is_the_best_point():
    points = []

    def phi(x):
        points.append(x.detach().clone())
        return valley(x)

    optimizer, x, _ = run(
        phi, [2.0, -1.0, 3.0], 25, lr=0.12, momentum=0.9, restart_radius=math.inf, restart_period=1000
    )
    norms = [float(slope(w).norm()) for w in points]
    best = min(range(25), key=norms.__getitem__)
    assert best not in (0, 24)
    assert torch.equal(optimizer.averaged_parameters()[0], points[best])
    untouched = bo.RestartedAGD([x])
    assert torch.equal(untouched.averaged_parameters()[0], x)


def test_default_radius_is_five_first_steps():
    settings = {"lr": 0.1, "momentum": 0.9}
    _, _, automatic = run(lambda x: x, 0.0, 40, lambda o, x: o.restarts, **settings)
    _, _, explicit = run(lambda x: x, 0.0, 40, lambda o, x: o.restarts, restart_radius=0.5, **settings)
    assert automatic == explicit
    assert automatic[-1] > 2


def test_the_default_radius_waits_for_the_first_step_that_moves():
    """A warm-up that begins with a learning rate of zero does not make every later step a restart."""
    x = torch.zeros((), requires_grad=True)
    optimizer = bo.RestartedAGD([x], lr=0.0)

    def closure():
        optimizer.zero_grad()
        x.backward()

    for lr, restarts in ((0.0, 0), (0.1, 0), (0.1, 0), (0.1, 0)):
        optimizer.param_groups[0]["lr"] = lr
        optimizer._begin_epoch()
        optimizer.step(closure)
        assert optimizer.restarts == restarts


@pytest.mark.parametrize("stop", [3, 7, 20])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_resumes_bit_for_bit_in_the_middle_of_an_epoch(stop, noise):
    def make():
        x = torch.tensor([2.0, -1.0, 3.0], requires_grad=True)
        optimizer = bo.RestartedAGD(
            [x], lr=0.05, momentum=0.8, restart_radius=0.3, restart_period=12, perturbation=noise,
            on_converged="continue", generator=torch.Generator().manual_seed(1),
        )  # fmt: skip

        def closure():
            optimizer.zero_grad()
            loss = valley(x)
            loss.backward()
            return loss

        return x, optimizer, closure

    x, optimizer, closure = make()
    file = io.BytesIO()
    for k in range(60):
        if k == stop:
            torch.save({"optimizer": optimizer.state_dict(), "x": x.detach()}, file)
            clones = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        optimizer.step(closure)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed, closure = make()
    resumed.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        again.copy_(saved["x"])
    for _ in range(stop, 60):
        resumed.step(closure)
    assert torch.equal(x, again)
    assert torch.equal(optimizer.averaged_parameters()[0], resumed.averaged_parameters()[0])
    assert optimizer.restarts == resumed.restarts > 0
    for clone in clones:
        (z,) = clone.param_groups[0]["params"]

        def closure(clone=clone, z=z):
            clone.zero_grad()
            loss = valley(z)
            loss.backward()
            return loss

        for _ in range(stop, 60):
            clone.step(closure)
        assert torch.equal(x, z)
    with pytest.raises(ValueError, match="no 'restarts' entry"):
        resumed.load_state_dict(torch.optim.SGD([again], lr=0.1).state_dict())


def test_a_failing_closure_changes_nothing():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer = bo.RestartedAGD([x], lr=0.1, perturbation=0.1)

    def closure(fail=False):
        if fail:
            raise KeyError
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        before = x.detach().clone(), str(optimizer._progress)
        with pytest.raises(KeyError):
            optimizer.step(lambda: closure(fail=True))
        assert torch.equal(before[0], x)
        assert before[1] == str(optimizer._progress)
        optimizer.step(closure)
    with pytest.raises(RuntimeError, match="needs a closure"):
        optimizer.step()


def test_an_added_group_starts_an_epoch_and_frozen_parameters_stay():
    x, z = torch.tensor([2.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    frozen = torch.ones(1)
    optimizer = bo.RestartedAGD([x, frozen], lr=0.1, restart_radius=math.inf)

    def closure():
        optimizer.zero_grad()
        loss = (x**2).sum() + (z**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    assert optimizer.epoch_step == 2
    optimizer.add_param_group({"params": [z], "lr": 0.05})
    before = x.detach().clone()
    optimizer.step(closure)
    assert optimizer.epoch_step == 1
    torch.testing.assert_close(x.detach(), 0.8 * before)  # no momentum
    assert z.item() == pytest.approx(0.9)
    assert float(frozen) == 1
    assert [t.shape for t in optimizer.averaged_parameters()] == [(1,)] * 3


def test_perturbations_at_the_start_and_at_every_restart():
    """Each is in the ball of the groups' metric, where a smaller rate is moved less; no other step is perturbed."""
    radius, rates = 0.01, (0.1, 0.001)
    x, z = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.RestartedAGD(
        [{"params": [x]}, {"params": [z], "lr": rates[1]}], lr=rates[0], momentum=0.0, restart_radius=0.3,
        perturbation=radius, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        (x.sum() + z.sum()).backward()

    scaled, perturbed = [], []
    for k in range(25):
        before, restarts = [x.detach().clone(), z.detach().clone()], optimizer.restarts
        optimizer.step(closure)
        shifts = [p.detach() - b + rate for p, b, rate in zip((x, z), before, rates, strict=True)]
        if max(float(s.abs().max()) for s in shifts) > 1e-12:
            perturbed.append(k)
            scaled.append(torch.cat([shifts[0], shifts[1] / math.sqrt(rates[1] / rates[0])]))
        assert (k in perturbed) == (k == 0 or optimizer.restarts > restarts)
    assert len(perturbed) == optimizer.restarts + 1 > 4
    norms = torch.stack([s.norm() for s in scaled])
    assert norms.max() <= radius
    assert norms.max() > 0.6 * radius
    assert torch.stack(scaled)[:, 2:].abs().max() > 0.2 * radius


def test_uniform_ball():
    """E||xi|| = r d/(d + 1), half of the points within 0.5^(1/d) r, and no direction preferred, over all tensors."""
    like, d, r, n = [torch.zeros(2), torch.zeros(1, 1)], 3, 0.7, 4000
    points = torch.stack([torch.cat([t.flatten() for t in uniform_ball(like, r)]) for _ in range(n)])
    norms = points.norm(dim=1)
    assert float(norms.max()) <= r
    assert float(norms.mean()) == pytest.approx(r * d / (d + 1), abs=4 * r * math.sqrt(3 / 80 / n))
    assert float((norms < 0.5 ** (1 / d) * r).double().mean()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(n))
    spread = points.T @ points / n
    torch.testing.assert_close(spread, torch.eye(3) * r**2 / (d + 2), rtol=0, atol=0.02 * r**2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"momentum": 1.0}, "Invalid momentum value: 1.0"),
        ({"restart_radius": 0.0}, "Invalid restart_radius value: 0.0"),
        ({"restart_radius": float("nan")}, "Invalid restart_radius value: nan"),
        ({"restart_period": 0}, "Invalid restart_period value: 0"),
        ({"on_converged": "raise"}, "Invalid on_converged value: raise"),
        ({"perturbation": -1.0}, "Invalid perturbation value: -1.0"),
        ({"perturb_initial": 1}, "Invalid perturb_initial value: 1"),
        ({"generator": 1}, "Invalid generator value: 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        bo.RestartedAGD([torch.zeros(1, requires_grad=True)], **arguments)

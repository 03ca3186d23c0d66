"""`suggest`: its measurements against the truth, and the results of its settings."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import bilevel_optim as bo
from bilevel_optim.checking import suggest as module
from bilevel_optim.checking.spectrum import Spectrum, lanczos
from bilevel_optim.checking.trials import TimeLimit, Trials, gradients_of

from .problems import Quadratic, same, seeded, values

suggest = partial(bo.suggest, max_seconds=600)  # of a busy machine


RATES = module.RATES


@pytest.fixture(autouse=True)
def short(monkeypatch, request):
    """Trials of few gradients, and of few rates."""
    least = 40 if request.config.getoption("--slow") else 12
    if not request.config.getoption("--slow"):
        monkeypatch.setattr(module, "RATES", {"SGD": 5, "Adam": 3})
    monkeypatch.setattr(module, "BUDGETS", (least, 2 * least, 4 * least))
    monkeypatch.setattr(module, "LAST", 8 * least)


def spread(n, kappa):
    """A symmetric matrix with eigenvalues from 1 to kappa, and these."""
    basis = torch.linalg.qr(torch.randn(n, n, generator=seeded(0), dtype=torch.float64))[0]
    values = torch.logspace(0, math.log10(kappa), n, dtype=torch.float64)
    return basis @ torch.diag(values) @ basis.T, values


def scaled(kappa, scale, n=24):
    problem = Quadratic(n, 5, kappa)
    problem.A, problem.D, problem.e = (t * scale for t in (problem.A, problem.D, problem.e))
    return problem


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
def test_the_ends_of_a_spectrum(n):
    """For few entries from the matrix, for many from a Krylov space."""
    H, _ = spread(n, 50.0)
    b = torch.randn(n, generator=seeded(2), dtype=torch.float64)
    spectrum = Spectrum(lambda v: H @ v, b, lambda: True)
    assert spectrum.exact == (n == 40)
    assert (spectrum.smallest, spectrum.largest) == pytest.approx((1.0, 50.0), rel=1e-2)


# ---------------------------------------------------------------------------------------------------- settings


def penalized():
    """A ridge regression: x is the logarithm of its penalty; f does not depend on x but through y."""
    x, y = torch.zeros(1, dtype=torch.float64, requires_grad=True), torch.zeros(6, dtype=torch.float64)
    y.requires_grad_()
    A, truth = torch.randn(2, 30, 6, generator=seeded(0), dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    f = lambda: (A[0] @ (y - truth)).square().mean()  # noqa: E731
    g = lambda: (A[1] @ (y - truth)).square().mean() + x.exp() * y.square().sum()  # noqa: E731
    return x, y, f, g


@pytest.mark.filterwarnings("ignore:nu=")  # in proportion to the size of g
@pytest.mark.parametrize("scale", [1e-3, pytest.param(1e3, marks=pytest.mark.slow)])
def test_settings_reach_the_reported_values(scale, monkeypatch, request):
    """At any size of g; a run of what `make` builds is the trial again, and three times the rate is stable too."""
    monkeypatch.setattr(module, "RATES", RATES)
    some = {} if request.config.getoption("--slow") else {"methods": ("AID", "ITD")}
    problem = scaled(10.0, scale)
    x, y = problem.x[0], problem.y[0]
    f = lambda: (y - 1).square().sum() / 2 + x.square().sum() / 100  # noqa: E731
    suggestion = suggest([x], [y], f, problem.lower, **some)
    assert suggestion.smallest == pytest.approx(scale, rel=1e-6)
    assert suggestion.largest == pytest.approx(10.0 * scale, rel=1e-6)
    assert suggestion.lower_noise == suggestion.upper_noise == 0.0
    assert {"AID", "ITD"} <= set(suggestion.rows)
    start = values([x, y])

    def run(name, steps, **overrides):
        for t, value in zip((x, y), start, strict=True):
            t.data.copy_(value)
        optimizer = suggestion.make(name, **overrides)
        return optimizer, [float(optimizer.step(f, problem.lower)) for _ in range(steps)]

    for name, row in suggestion.rows.items():
        last = max(row.steps // 4, 1)
        optimizer, losses = run(name, row.steps)
        assert sum(losses[-last:]) / last == pytest.approx(row.loss, rel=1e-9), name
        assert row.loss < suggestion.start
        if name in ("AID", "ITD"):
            optimizer.backward(f, problem.lower)
            solution = torch.linalg.solve(problem.A, problem.D @ x.detach() + problem.e)
            truth = problem.D.T @ torch.linalg.solve(problem.A, solution - 1) + x.detach() / 50
            assert row.bias * max(float(truth.norm()), 1e-3) == pytest.approx(
                float((x.grad - truth).norm()), rel=0.5, abs=0.02 * float(truth.norm())
            ), name
            x.grad = None
        _, faster = run(name, row.steps, lr=3 * row.settings["lr"])
        assert max(faster) < 100 * suggestion.start, name


def test_the_order_is_that_of_what_was_reached():
    x, y, f, g = penalized()
    some = ("AID", "ITD", "FirstOrder")
    once, twice = (suggest([x], [y], f, g, methods=some) for _ in range(2))
    assert list(once.rows) == list(twice.rows)
    assert len(once.rows) > 1
    losses = [row.loss for row in once.rows.values()]
    assert losses == sorted(losses) == [row.loss for row in twice.rows.values()]
    assert once.gradients == twice.gradients
    assert once.rejected["FirstOrder"] == "its hypergradient is zero"


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
    suggestion = suggest([x], [y], lambda: (y - 3).square().sum(), lower, methods=["AID"])
    true = float(0.1 * shifts.var(0).sum().sqrt() / (1 + 0.1 * shifts.mean(0)).norm())
    assert suggestion.lower_noise == pytest.approx(true, rel=1e-6)
    assert suggestion.upper_noise == 0.0
    assert "solved within the noise of its batches" in str(suggestion)  # the loss is not that of the exact y*


def test_a_nonconvex_lower_problem_is_reported():
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 0.1, requires_grad=True)
    double = lambda: ((y.square() - 1).square() / 4 - x * y).sum()  # noqa: E731
    suggestion = suggest([x], [y], lambda: (y - 2).square().sum(), double, methods=["AID"])
    assert suggestion.smallest == pytest.approx(3 * 0.01 - 1)
    row = suggestion.rows["AID"]
    assert row.settings["linear_solver"] == "minres"
    assert bo.AID([x], [y], **row).linear_solver == "minres"
    assert dict(row) == row.settings
    assert "not convex in y at this point (smallest curvature -0.97)" in str(suggestion)


def test_methods_that_are_not_suggested_have_a_reason(monkeypatch):
    """A hypergradient that is mostly error."""
    monkeypatch.setattr(module, "MOST_STEPS", 90)
    problem = scaled(1e3, 1.0)
    f = lambda: (problem.y[0] - 1).square().sum() / 2  # noqa: E731
    biased = suggest(problem.x, problem.y, f, problem.lower, methods=["ITD"])
    assert not biased.rows
    assert "its hypergradient is off by" in biased.rejected["ITD"]
    assert "not suggested: ITD: its hypergradient is off by" in str(biased)
    with pytest.raises(ValueError, match="Invalid name value: ITD"):
        biased.make("ITD")


def test_losses_without_second_derivatives():
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
    suggestion = suggest([x], [y], *losses, methods=["AID", "F2SA"])
    assert "products with the Hessian differ from differences" in suggestion.second_derivatives
    assert suggestion.rows["AID"].settings["hvp"] == "finite-difference"
    assert suggestion.largest == pytest.approx(1.0, rel=1e-4)
    suggestion.make("AID").step(*losses)


def test_tasks_modules_and_what_may_be_overridden():
    torch.manual_seed(0)
    module, x = nn.Linear(3, 1), torch.zeros(1, requires_grad=True)
    tasks = bo.TensorTasks((torch.randn(2, 6, 3), torch.randn(2, 6, 1)))

    def mean(batch):
        return (module(batch[0]) - batch[1]).square().mean()

    def ridge(batch):
        return mean(batch) + x.exp().sum() * sum(p.square().sum() for p in module.parameters()) / 10

    suggestion = suggest([x], module.parameters(), mean, ridge, tasks=tasks, methods=("AID",))
    assert set(suggestion.rows) == {"AID"}
    row = suggestion.rows["AID"]
    optimizer = suggestion.make("AID", upper_optimizer=torch.optim.Adam, lower_steps=3)
    assert (optimizer.lower_steps, optimizer.param_groups[0]["lr"]) == (3, row.rates["Adam"])
    optimizer = suggestion.make("AID", upper_optimizer=torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == row.rates["SGD"]
    optimizer.step(mean, ridge, tasks=tasks)
    for wrong, text in (("MAML", "methods"), ("aid", "methods")):
        with pytest.raises(ValueError, match=f"Invalid {text} value: {wrong} "):
            bo.suggest([x], module.parameters(), mean, ridge, methods=[wrong])
        with pytest.raises(ValueError, match=f"Invalid {text} value: {wrong} "):
            bo.suggest([x], module.parameters(), mean, ridge, methods=wrong)
    choices = ", ".join(map(repr, suggestion.rows))
    with pytest.raises(ValueError, match=rf"Invalid name value: SOBA \(choose one of {choices}\)"):
        suggestion.make("SOBA")


@pytest.mark.parametrize("count", [1, 4, 20])
def test_trials_with_tasks_make_as_many_steps_as_those_without(count):
    """Up to eight tasks, whose gradients count as one."""
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    tasks = bo.TensorTasks(torch.randn(count, 3, 2, generator=seeded(0)))
    losses = [bo.Objective(lambda batch: (y - batch).square().mean() + (y - x).square().sum())] * 2
    trials = Trials([x, y], *losses, tasks, lambda: True)
    outcome = trials.run(lambda: bo.AID([x], [y], lr=0.01, lower_steps=3, linear_steps=3), 200)
    each = outcome.gradients / outcome.steps / count
    assert outcome.steps == math.ceil(200 * min(count, 8) / (each * count))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_trial_may_diverge_under_anomaly_detection():
    x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
    losses = bo.Objective(lambda: -(9 - y).sqrt().sum() + x.exp().sum()), bo.Objective(lambda: (y + x).square().sum())
    trials = Trials([x, y], *losses, None, lambda: True)
    with torch.autograd.detect_anomaly():
        outcome = trials.run(lambda: bo.AID([x], [y], lr=100.0, lower_lr=0.3, lower_steps=3), 200)
        assert torch.is_anomaly_enabled()
    assert "not finite" in outcome.reason


def test_a_product_with_second_derivatives_costs_two_gradients():
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    curvatures = torch.tensor([1.0, 3.0])
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=3, linear_steps=2, check_derivatives=False)
    optimizer.step(lambda: (y - 1).square().sum(), lambda: (curvatures * y * (y / 2 - x)).sum())
    counts = optimizer.oracle_counts
    assert (counts["lower_grad"], counts["upper_grad"], counts["jvp"]) == (4, 1, 1)
    assert counts["hvp"] >= 2
    assert gradients_of(optimizer) == 4 + 1 + 2 * (counts["hvp"] + 1)


@pytest.mark.parametrize("looks", [0, 40, *(pytest.param(n, marks=pytest.mark.slow) for n in (150, 250))])
def test_there_is_an_end(monkeypatch, looks):
    """Whenever the time ends, suggestions work, and the other methods have a reason."""
    x, y, f, g = penalized()
    left = iter(range(looks))
    monkeypatch.setattr(TimeLimit, "over", property(lambda clock: next(left, None) is None))
    suggestion = suggest([x], [y], f, g, methods=["AID", "F2SA"])
    assert next(left, None) is None
    assert "ended the trials early" in str(suggestion)
    assert set(suggestion.rows) | set(suggestion.rejected) == {"AID", "F2SA"}
    if looks == 0:
        assert suggestion.rejected == dict.fromkeys(
            ("AID", "F2SA"), "not measured: max_seconds was over before its first trials had ended; use a larger one"
        )
    for name in suggestion.rows:
        suggestion.make(name).step(f, g)


@pytest.mark.parametrize("methods", [("AID", "ITD", "FirstOrder"), ("FirstOrder", "ITD", "AID")])
@pytest.mark.parametrize("looks", [50, 150, 420])
def test_methods_that_were_not_measured_are_not_ranked(monkeypatch, looks, methods):
    """A trial of two steps was a row; y starts at the minimiser of f, so that the first steps have the least losses."""
    monkeypatch.setattr(module, "BUDGETS", (200, 400, 800))
    monkeypatch.setattr(module, "LAST", 1600)
    x, y, f, g = penalized()
    y.data.fill_(1.0)
    x.data.fill_(-1.0)
    slower = lambda: g() / 100  # noqa: E731
    both = lambda: f() + x.sum() / 1000  # noqa: E731
    left = iter(range(looks))
    monkeypatch.setattr(TimeLimit, "over", property(lambda clock: next(left, None) is None))
    suggestion = suggest([x], [y], both, slower, methods=methods)
    assert next(left, None) is None
    reached = [sum(row.gradients >= budget for budget in (200, 400, 800, 1600)) for row in suggestion.rows.values()]
    assert 0 not in reached
    assert reached == sorted(reached, reverse=True)
    for name in {*methods} - {*suggestion.rows}:
        assert "measured" in suggestion.rejected[name] or "upper loss smaller" in suggestion.rejected[name]
    unmeasured = [reason for reason in suggestion.rejected.values() if reason == module.NOT_MEASURED]
    assert not ((unmeasured or "ended the trials early" in str(suggestion)) and "nothing was better" in str(suggestion))


def test_smaller_rates_follow_where_larger_ones_stop_lowering_the_loss(monkeypatch):
    """SOBA's fastest rates of a short trial let y fall behind in a longer one."""
    monkeypatch.setattr(module, "BUDGETS", (100, 200, 400))
    monkeypatch.setattr(module, "LAST", 800)
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 6))
    hessian = basis @ torch.diag(torch.tensor([1.0, 2.0, 3.0, 5.0, 8.0, 10.0])) @ basis.T
    cross, target = torch.randn(6, 4), torch.randn(6)
    x, y = torch.randn(4, requires_grad=True), torch.zeros(6, requires_grad=True)
    upper = lambda: (y - target).square().sum() / 2 + 0.1 * x.square().sum()  # noqa: E731
    lower = lambda: y @ hessian @ y / 2 - y @ cross @ x + 0.05 * y.pow(4).sum()  # noqa: E731
    suggestion = suggest([x], [y], upper, lower, methods=["SOBA"])
    assert suggestion.rows["SOBA"].loss < 0.6 * suggestion.start


def test_a_rate_that_was_not_measured_is_not_said_to_raise_the_loss(monkeypatch):
    """The time ends where three times the best rate has diverged; the smaller one would be the next trial."""
    x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(3, requires_grad=True)
    curvature = torch.tensor([1.0, 2.0, 10.0])
    run, diverged = Trials.run, []

    def watched(trials, make, gradients, **options):
        outcome = run(trials, make, gradients, **options)
        if gradients == module.LAST and outcome.reason:
            diverged.append(outcome.reason)
        return outcome

    monkeypatch.setattr(module, "RATES", {"SGD": 9, "Adam": 3})
    monkeypatch.setattr(module, "BUDGETS", (48, 96, 192))
    monkeypatch.setattr(module, "LAST", 384)
    monkeypatch.setattr(Trials, "run", watched)
    monkeypatch.setattr(TimeLimit, "over", property(lambda clock: bool(diverged)))
    suggestion = suggest(
        [x], [y], lambda: (y - 1).square().sum() / 2, lambda: (curvature * (y - x).square()).sum() / 2, methods="SOBA"
    )
    assert diverged
    assert "before a smaller one was measured" in suggestion.rejected["SOBA"]


def test_no_method_to_try_is_refused():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    losses = lambda: y.square().sum(), lambda: (y - x).square().sum()
    with pytest.raises(ValueError, match="Invalid methods value"):
        suggest([x], [y], *losses, methods=[])

"""`lower_lr="auto"`: the measured rate and its cost; also compiled, with tasks, and resumed."""

from functools import partial

import pytest
import torch
from torch import nn

import bilevel_optim as bo

from ..problems import Quadratic, same, seeded, values

FOLLOWING = (
    "AID", "ITD", "F2SA", "SOBA", "FSLA", "StocBiO", "AmIGO", "MRBO", "SABA", "SRBA", "VRBO", "BSA", "TTSA", "BA",
    "FirstOrder", "BOME", "PZOBO", "HOZOG", "PAID",
)  # fmt: skip
STEPS = {"lower_steps": 3}
DIFFERENCES = "finite-difference"


def made(name, problem, **options):
    method = getattr(bo, name)
    if method.declared.lower_steps:
        options = {**STEPS, **({"linear_steps": 30} if name == "AID" else {}), **options}
    return method(problem.x, problem.y, lr=0.01, **options)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", ["AID", "ITD", "F2SA", "SOBA", "PZOBO", "StocBiO"])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_it_is_one_over_the_largest_curvature(name, scale):
    """For methods with and without second derivatives, at any size of g."""
    problem = Quadratic(24, 5, 50.0)
    problem.A, problem.D, problem.e = (t * scale for t in (problem.A, problem.D, problem.e))
    optimizer = made(name, problem, **({"nu": 0.1 * min(scale, 1)} if name == "F2SA" else {}))
    for _ in range(10):
        optimizer.step(problem.upper, problem.lower)
    true = float(torch.linalg.eigvalsh(problem.A)[-1])
    assert float(optimizer.diagnostics["lower_curvature"]) == pytest.approx(true, rel=0.1)
    assert float(optimizer.diagnostics["lower_lr"]) == pytest.approx(1 / (1.1 * true), rel=0.1)
    assert problem.y[0].isfinite().all()


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["F2SA", "PZOBO", "FirstOrder", "BOME", "AID"])
@pytest.mark.parametrize("size", [1e4, 1e6, 1e9])
def test_differences_stay_above_rounding_where_y_starts_far_from_a_large_solution(name, size):
    """Prices in dollars: y begins at zero, and the gradient of g is many orders larger than the curvature."""
    inputs = torch.randn(50, 3, generator=seeded())
    targets = size * (inputs.sum(1) + 1)
    x, w, b = torch.zeros(1, requires_grad=True), torch.zeros(3, requires_grad=True), torch.zeros(1, requires_grad=True)
    features = torch.cat([inputs, torch.ones(50, 1)], 1)
    true = float(torch.linalg.eigvalsh(features.T @ features / 50)[-1])
    options = {**({} if name == "BOME" else {"lower_steps": 30}), **({"hvp": DIFFERENCES} if name == "AID" else {})}
    optimizer = getattr(bo, name)([x], [w, b], lr=0.0, **options)
    for _ in range(3):
        loss = optimizer.step(
            lambda: (inputs @ w + b - targets).square().mean() / size**2 + 0 * x.sum(),
            lambda: (inputs @ w + b - targets).square().mean() / 2 + 1e-3 * x.exp().sum() * w.square().sum(),
        )
        assert float(optimizer.diagnostics["lower_curvature"]) == pytest.approx(true, rel=0.2)
    assert loss < 1e-2 or name == "BOME"


@pytest.mark.parametrize(("name", "options"), [("F2SA", {}), ("FirstOrder", {}), ("AID", {"hvp": DIFFERENCES})])
def test_differences_stay_above_rounding_in_single_precision(name, options):
    torch.set_default_dtype(torch.float32)
    inputs = torch.randn(50, 3, generator=seeded())
    targets = 1e5 * (inputs.sum(1) + 1)
    x, w = torch.zeros(1, requires_grad=True), torch.zeros(3, requires_grad=True)
    true = float(torch.linalg.eigvalsh(inputs.T @ inputs / 50)[-1])
    optimizer = getattr(bo, name)([x], [w], lr=0.0, lower_steps=30, **options)
    for _ in range(3):
        optimizer.step(
            lambda: (inputs @ w - targets).square().mean() / 1e10 + 0 * x.sum(),
            lambda: (inputs @ w - targets).square().mean() / 2 + 1e-3 * x.exp().sum() * w.square().sum(),
        )
        assert float(optimizer.diagnostics["lower_curvature"]) == pytest.approx(true, rel=0.2)


def stiffening():
    """A ridge regression whose penalty is x: g becomes stiffer by a factor of e for each unit of x."""
    x, y = torch.zeros(1, dtype=torch.float64, requires_grad=True), torch.ones(6, dtype=torch.float64)
    y.requires_grad_()
    curvature = torch.linspace(1, 2, 6, dtype=torch.float64)
    f = lambda: (y - 1).square().sum() / 2 - 3 * x.sum()  # noqa: E731
    g = lambda: (curvature * (y - 1).square()).sum() / 2 + x.exp() * y.square().sum() / 2  # noqa: E731
    return x, y, f, g


@pytest.mark.parametrize("name", ["AID", "ITD", "F2SA", "SOBA", "StocBiO"])
def test_it_falls_before_the_lower_steps_of_a_problem_that_x_has_made_stiffer(name):
    """The rate of the start would be four hundred times too large."""
    x, y, f, g = stiffening()
    method, options = getattr(bo, name), STEPS if name != "SOBA" else {}
    optimizer = method([x], [y], lr=0.1, **({"normalize": False} if name == "F2SA" else {}), **options)
    for _ in range(30):
        before = x.item()
        optimizer.step(f, g)
        curvature = 2 + torch.tensor(before).exp()
        assert float(optimizer.diagnostics["lower_lr"]) < 2 / curvature
    assert x.item() > 6
    assert y.isfinite().all()
    assert (y * (x.exp() + 1.5)).mean().item() < 10  # near the solution, 1 / (1 + exp(x))


@pytest.mark.parametrize("name", ["AID", "ITD", "StocBiO"])
def test_a_step_whose_lower_steps_lead_to_where_g_is_stiffer_is_made_again(name):
    """G has a negative curvature of -0.97 at the start, and one of 4.3 at the minimum that its steps go to."""
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 0.1, requires_grad=True)
    well = lambda: ((y.square() - 1).square() / 4 - x * y).sum()  # noqa: E731
    options = {"linear_solver": "minres"} if name == "AID" else {}
    optimizer = getattr(bo, name)([x], [y], lr=0.0, lower_steps=10, **options)
    for _ in range(10):
        optimizer.step(lambda: y.square().sum(), well)
    torch.testing.assert_close(y.detach(), torch.full((2,), 1.3247), rtol=1e-2, atol=0)
    assert float(optimizer.diagnostics["lower_lr"]) < 2 / 4.3


def test_a_loss_that_is_not_finite_still_says_so():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_steps=3)
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(lambda: y.square().sum(), lambda: (y - x).square().sum() * float("nan"))
    assert not optimizer.state


@pytest.mark.parametrize("name", ["AID", "ITD", "F2SA", "SOBA", "PZOBO", "FirstOrder", "BOME"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_loss_without_curvature_is_refused(name, weight):
    """An absolute error, or weights clamped to zero: y went to 1e13 without an error, or the data were blamed."""
    x, y = torch.full((2,), weight, requires_grad=True), torch.zeros(2, requires_grad=True)
    lower = lambda: (x.clamp(min=0) * (y - 1).abs()).sum()  # noqa: E731
    options = {"lower_steps": 3} if getattr(bo, name).declared.lower_steps else {}
    optimizer = getattr(bo, name)([x], [y], lr=0.1, **options)
    with pytest.raises(ValueError, match="has no curvature in y here"):
        optimizer.step(lambda: y.square().sum(), lower)
    assert not y.any()
    with pytest.raises(ValueError, match="has no curvature in y here"):
        optimizer.adapt(lower, **({} if options else {"steps": 3}))


@pytest.mark.few(10)
@pytest.mark.parametrize("name", FOLLOWING)
def test_the_default_of_every_method_that_can(name):
    """It is "auto"; a step costs one product, or one difference of gradients, and one gradient more."""
    problem = Quadratic(6, 3, 5.0)
    torch.manual_seed(0)
    auto = made(name, problem)
    assert "lr=auto\n" in repr(auto)
    assert auto.param_groups[-1]["lr"] == 1.0
    for _ in range(3):
        auto.step(problem.upper, problem.lower)
    other = Quadratic(6, 3, 5.0)
    torch.manual_seed(0)
    fixed = made(name, other, lower_lr=float(auto.diagnostics["lower_lr"]))
    for _ in range(3):
        fixed.step(other.upper, other.lower)
    assert "lower_lr" not in fixed.diagnostics
    more = {k: auto.oracle_counts[k] - fixed.oracle_counts[k] for k in auto.oracle_counts}
    products = 3 + 9  # ten before the first step
    if getattr(bo, name).declared.second_order:
        assert (more["hvp"], more["lower_grad"]) == (products, 3)
    else:
        assert (more["hvp"], more["lower_grad"]) == (0, products + 3)
    assert more["upper_grad"] == more["jvp"] == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [("SVRB", "averaging weights"), ("RAHGD", "momentum"), ("RTMLMC", "halves"), ("GDA", "chosen together")],
)
def test_methods_whose_own_rule_sets_rates_refuse_it_by_name(name, reason):
    problem = Quadratic(4, 2, 3.0)
    options = {"levels": 2, "tasks_per_step": 1} if name == "RTMLMC" else {}
    with pytest.raises(ValueError, match=rf"Invalid lower_lr value: auto \({name} takes a number: .*{reason}"):
        made(name, problem, lower_lr="auto", **options)


def test_optimizers_with_a_scale_of_their_own_refuse_it_and_own_rates_stay():
    problem = Quadratic(4, 2, 3.0)
    with pytest.raises(
        ValueError,
        match=r"Invalid lower_lr value: auto \(the default, .*learning rate of Adam may need another scale: pass AID",
    ):
        made("AID", problem, lower_optimizer=torch.optim.Adam)
    with pytest.raises(ValueError, match=r"Invalid lower_lr value: 'fast' \(a number, or 'auto'\)"):
        made("AID", problem, lower_lr="fast")
    own = made("AID", problem, lower_optimizer=partial(torch.optim.Adam, lr=0.02))
    assert own.param_groups[-1]["lr"] == 0.02
    made("AID", problem, lower_lr=0.02, lower_optimizer=torch.optim.Adam)
    momentum = made("AID", problem, lower_optimizer=partial(torch.optim.SGD, momentum=0.9))
    for _ in range(40):
        momentum.step(problem.upper, problem.lower)
    assert float(momentum.diagnostics["lower_residual"]) < 0.1


def test_a_group_with_a_rate_keeps_it_and_a_schedule_is_a_factor():
    x = torch.zeros(1, requires_grad=True)
    y = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    f = lambda: sum(t.square().sum() for t in y)  # noqa: E731
    g = lambda: 2 * (y[0] - x).square().sum() + (y[1] - x).square().sum() / 2  # noqa: E731
    optimizer = bo.FirstOrder([x], [{"params": [y[0]]}, {"params": [y[1]], "lr": 0.5}], lr=0.0, lower_steps=1)
    optimizer.param_groups[1]["lr"] = 0.3
    optimizer.step(f, g)
    rate = float(optimizer.diagnostics["lower_lr"])
    assert rate == pytest.approx(1 / 4.4, rel=0.05)
    torch.testing.assert_close(y[0].detach(), torch.full((2,), 1 - 0.3 * rate * 4))
    torch.testing.assert_close(y[1].detach(), torch.full((2,), 0.5))


def test_with_tasks_it_is_that_of_the_stiffest():
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(3, requires_grad=True)
    stiffness = torch.tensor([1.0, 9.0, 4.0]).reshape(3, 1, 1)
    tasks = bo.TensorTasks(stiffness)
    loss = lambda rows: (rows.mean() * (y - x - 1).square()).sum() / 2  # noqa: E731
    optimizer = bo.AID([x], [y], lr=0.1, lower_steps=2, warm_start=False)
    for k in range(4):
        optimizer.step(loss, loss, tasks=tasks)
        assert float(optimizer.diagnostics["lower_curvature"]) == pytest.approx(9.0, rel=0.02), k
    assert "curvature" in optimizer.state[y]


@pytest.mark.parametrize("vectorize", [False, 2])
def test_with_tasks_in_slices_the_stiffest_is_kept(vectorize):
    """The next step draws other tasks, and must not start from the curvature of a soft one."""
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(3, requires_grad=True)
    tasks = bo.TensorTasks(torch.tensor([100.0, 1.0, 1.0]).reshape(3, 1, 1))
    loss = lambda rows: (rows.mean() * (y - x - 1).square()).sum() / 2  # noqa: E731
    optimizer = bo.ITD([x], [y], lr=0.1, lower_steps=2, warm_start=False, vectorize=vectorize, generator=seeded(0))
    for k in range(6):
        optimizer.step(loss, loss, tasks=tasks)
        assert float(optimizer.state[y]["curvature"].norm()) == pytest.approx(100.0, rel=0.02), k
    assert float(optimizer.diagnostics["lower_lr"].max()) < 0.01


@pytest.mark.parametrize("many", [False, True])
def test_adaptation_measures_too(many):
    """Also before the first step; with the same steps as training."""
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(3, requires_grad=True)
    loss = lambda stiffness: (stiffness * (y - 1).square()).sum() / 2 + 0 * x.sum()  # noqa: E731
    optimizer = bo.ITD([x], [y], lr=0.1, lower_steps=3)
    if many:
        found = optimizer.adapt(loss, tasks=torch.tensor([8.0, 2.0]))[0]
        expected = torch.tensor([8.0, 2.0]).reshape(2, 1).expand(2, 3)
    else:
        found, expected = optimizer.adapt(loss, torch.tensor(8.0))[0], torch.full((3,), 8.0)
    torch.testing.assert_close(found, 1 - (1 - expected / 8.8) ** 3, rtol=1e-3, atol=1e-3)
    assert not y.any()


@pytest.mark.usually("SOBA")
@pytest.mark.parametrize("name", ["SOBA", "AID", "F2SA", "ITD"])
def test_compiled_and_resumed_runs_go_on_like_eager_ones(name):
    """The rate is a tensor of the graph, so that nothing is recompiled."""
    torch.manual_seed(0)
    batches = [torch.randn(6, dtype=torch.float64) for _ in range(5)]

    def run(compiled, resumed=False):
        problem = Quadratic(6, 3, 5.0)
        lower = bo.Objective(lambda batch: problem.lower() + 0.1 * problem.y[0] @ batch, batches)
        optimizer = made(name, problem)
        if compiled:
            optimizer.compile(backend="eager", fullgraph=True)
        for k in range(6):
            if resumed and k == 3:
                other = made(name, problem)
                other.load_state_dict(optimizer.state_dict())
                optimizer = other
            optimizer.step(problem.upper, lower)
        if compiled:
            assert optimizer.captured_graphs == 1
            assert "compile_fallback" not in optimizer.diagnostics
        return values(problem.x, problem.y), optimizer

    (eager, one), (graph, two), (again, _) = run(False), run(True), run(False, resumed=True)
    torch.testing.assert_close(graph, eager, rtol=1e-12, atol=1e-12)
    assert same(eager, again)
    torch.testing.assert_close(one.diagnostics["lower_lr"], two.diagnostics["lower_lr"])
    if name != "AID":  # a compiled CG makes all its iterations
        assert one.oracle_counts == two.oracle_counts


def test_data_are_drawn_as_with_a_fixed_rate():
    """The first lower batch is looked at before the step, and is the step's own."""
    seen = []

    def loss(batch):
        seen.append(float(batch))
        return (y - x - batch).square().sum() / 2

    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    data = [torch.tensor(float(i)) for i in range(10)]
    orders = []
    for rate in (0.5, "auto"):
        seen.clear()
        optimizer = bo.AID([x], [y], lr=0.0, lower_lr=rate, lower_steps=2, linear_steps=1)
        lower = bo.Objective(loss, data)
        for _ in range(3):
            optimizer.step(lambda: y.square().sum(), lower)
        orders.append([*dict.fromkeys(seen)])
        assert lower.state_dict()["position"] == 9
    assert orders[0] == orders[1]


def test_modules_and_dropout():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    x = torch.zeros(1, requires_grad=True)
    data = torch.randn(12, 3, generator=seeded(0))

    def g():
        return (net(data) - data[:, :1]).square().mean() + x.exp() * sum(
            p.square().sum() for p in net.parameters()
        ) / 10

    optimizer = bo.AID([x], net.parameters(), lr=0.01, lower_steps=3, linear_solver="minres", linear_steps=8)
    losses = [float(optimizer.step(lambda: (net(data) - data[:, :1]).square().mean(), g)) for _ in range(30)]
    assert losses[-1] < losses[0]
    assert int(net[1].num_batches_tracked) == 30


@pytest.mark.usually("SABA")
@pytest.mark.parametrize("name", ["SABA", "SRBA"])
def test_a_finite_sum_measures_the_curvature_of_the_drawn_term(name):
    """Not always of the first; with one over it alone both diverge here. Compiled steps measure the same."""

    def run(compiled, steps=200):
        torch.manual_seed(0)
        x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        data = torch.tensor([0.0, 3.0])
        upper = bo.FiniteSum(lambda t: (y - t).square().mean() / 2, data)
        lower = bo.FiniteSum(lambda t: (1 + t) * (y - x).square().sum() / 2, data)
        optimizer = getattr(bo, name)([x], [y], lr=0.03)
        if compiled:
            optimizer.compile(backend="eager")
        found = []
        for _ in range(steps):
            optimizer.step(upper, lower)
            found.append((float(optimizer.diagnostics["lower_curvature"]), x.item()))
        assert bool(optimizer.captured_graphs) == compiled
        return zip(*found, strict=True)

    found, points = run(compiled=False)
    assert found[0] == 1.0
    assert max(found) >= 4.0
    assert abs(points[-1] - 1.5) < 0.1
    for again, eager in zip(run(compiled=True, steps=40), (found, points), strict=True):
        assert again == pytest.approx(eager[:40], rel=1e-4)

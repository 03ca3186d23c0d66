"""A tensor rests (``requires_grad=False``) for some steps, or joins later: no state of an earlier point is used."""

from functools import partial

import pytest
import torch

import bilevel_optim as bo

from ..problems import seeded

SETTINGS = {
    "MRBO": {"linear_steps": 20, "beta": 0.1},
    "SVRB": {"beta": 0.1},
    "STABLE": {},
    "VRBO": {"lower_steps": 1, "linear_steps": 20, "period": 50},
}


class Two:
    """Two tensors in each level, and losses without noise."""

    def __init__(self):
        own = {"generator": seeded(1), "dtype": torch.float64}
        self.x = [torch.randn(n, **own).requires_grad_() for n in (3, 2)]
        self.y = [
            torch.full((n,), value, dtype=torch.float64, requires_grad=True) for n, value in ((3, 0.7), (2, -0.4))
        ]

    def upper(self):
        (a, b), (y, z) = self.x, self.y
        return (y - 1).square().sum() / 2 + (z.sin() - b).square().sum() / 2 + 0.1 * a @ y + 0.2 * a[:2] @ b

    def lower(self, y=None):
        (a, b), (y, z) = self.x, y or self.y
        own = (y - a.tanh()).square().sum() / 2 + 0.4 * (z - 2 * b).square().sum()
        return own + 0.1 * (y.sum() - z.sum()) ** 2


def relative(found, wanted):
    """Return the relative distance of two lists of tensors."""
    found, wanted = (torch.cat([t.detach().reshape(-1) for t in ts]) for ts in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rests", ["x", "y"])
@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in SETTINGS), ("MRBO", True)])
def test_a_recursion_begins_anew_when_a_tensor_rests_or_returns(name, rests, compiled):
    """Without noise its estimate is that of a fresh optimizer at each point; one from stale state was off by 40 %."""
    problem = Two()
    made = lambda: getattr(bo, name)(problem.x, problem.y, lr=0.05, lower_lr=0.3, **SETTINGS[name])  # noqa: E731
    optimizer, thawed = made(), {"x": problem.x, "y": problem.y}[rests][1]
    if compiled:
        optimizer.compile(backend="eager")
    for k in range(12):
        thawed.requires_grad_(not 3 <= k < 8)
        if k == 6:  # a resumed run knows which tensors rested
            state, optimizer = optimizer.state_dict(), made()
            optimizer.load_state_dict(state)
        wanted = made().propose(problem.upper, problem.lower).gradient
        optimizer.step(problem.upper, problem.lower)
        assert relative([t.grad for t in problem.x if t.requires_grad], wanted) < 1e-10, k


@pytest.mark.parametrize("rests", ["x", "y"])
def test_srba_evaluates_full_sums_for_a_thawed_tensor(rests):
    """Its directions have no noise here, so they are those of SOBA at its v."""
    problem = Two()
    optimizer = bo.SRBA(problem.x, problem.y, lr=0.05, lower_lr=0.3, period=50)
    thawed = {"x": problem.x, "y": problem.y}[rests][1]
    for k in range(12):
        thawed.requires_grad_(not 3 <= k < 8)
        if k >= 8:
            v = [optimizer.state[t]["linear_solution"] for t in problem.y]
            slopes = torch.autograd.grad(problem.lower(), problem.y, create_graph=True)
            cross = torch.autograd.grad(slopes, problem.x, v)
            direct = torch.autograd.grad(problem.upper(), problem.x)
            gradient = [t.detach() for t in slopes]
            before = [t.detach().clone() for t in problem.y]
        optimizer.step(problem.upper, problem.lower)
        if k >= 8:
            assert relative([t.grad for t in problem.x], [d - c for d, c in zip(direct, cross, strict=True)]) < 1e-10, k
            moved = [b - 0.3 * g for b, g in zip(before, gradient, strict=True)]
            assert relative(problem.y, moved) < 1e-10, k


@pytest.mark.parametrize("joins", ["added", "thawed"])
@pytest.mark.parametrize(("name", "compiled"), [("AID", False), ("AID", True), ("F2SA", False), ("PZOBO", False)])
def test_starts_without_warm_start_stay_when_a_tensor_joins(name, joins, compiled):
    """The others still start from their values at the first step, not from where the last solve ended."""
    problem = Two()
    options = {"lr": 0.0, "lower_lr": 0.1, "lower_steps": 1, "warm_start": False}
    late = problem.y[1].requires_grad_(joins == "added")
    first = problem.y[:1] if joins == "added" else problem.y
    optimizer = getattr(bo, name)(problem.x, first, **options)
    if compiled:
        optimizer.compile(backend="eager")
    start = [t.detach().clone().requires_grad_() for t in problem.y]
    for _ in range(3):
        optimizer.step(problem.upper, problem.lower)
    if joins == "added":
        optimizer.add_param_group({"params": [late], "level": "lower"})
    late.requires_grad_()
    wanted = [t - 0.1 * g for t, g in zip(start, torch.autograd.grad(problem.lower(start), start), strict=True)]
    for _ in range(3):
        optimizer.step(problem.upper, problem.lower)
        assert relative(problem.y, wanted) < (1e-4 if name == "F2SA" else 1e-12)  # F2SA: the mean of two copies


@pytest.mark.parametrize("rests", [0, 1])
@pytest.mark.parametrize(("name", "compiled"), [("AID", False), ("AID", True), ("ITD", False)])
def test_the_memory_of_tasks_follows_tensors_that_rest_and_return(name, rests, compiled):
    """Rows of the others go on; those of a tensor that returns begin at the live y."""
    data = torch.randn(4, 5, 3, generator=seeded(2), dtype=torch.float64)
    y = [torch.full((n,), 0.5, dtype=torch.float64, requires_grad=True) for n in (3, 2)]
    x = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)

    def lower(batch, y=y):
        own = (batch.var(0) * (y[0] - x * batch.std(0)).square()).sum() + 0.4 * (
            y[1] - batch.mean(0)[:2]
        ).square().sum()
        return own + 0.1 * (y[0].sum() - y[1].sum()) ** 2

    options = {} if name == "SOBA" else {"lower_steps": 1}
    optimizer = getattr(bo, name)([x], y, lr=0.0, lower_lr=0.1, task_memory=True, **options)
    if compiled:
        optimizer.compile(backend="eager")
    rows = [t.detach().clone().expand(4, -1) for t in y]
    for k in range(9):
        before = y[rests].requires_grad
        y[rests].requires_grad_(not 3 <= k < 6)
        if not before or not y[rests].requires_grad:
            rows[rests] = y[rests].detach().clone().expand(4, -1)
        optimizer.step(lambda batch: (y[0] - batch).square().mean() + y[1].square().sum(), lower,
                       tasks=bo.TensorTasks(data))  # fmt: skip
        for i, t in enumerate(y):
            if t.requires_grad:
                rows[i] = rows[i].clone()
        points = [[row[i].clone().requires_grad_() for row in rows] for i in range(4)]
        for i, point in enumerate(points):
            slopes = torch.autograd.grad(lower(data[i], point), point)
            for t, row, p, slope in zip(y, rows, point, slopes, strict=True):
                if t.requires_grad:
                    row[i] = (p - 0.1 * slope).detach()
        assert relative(y, [row.mean(0) for row in rows]) < 1e-12, k


def test_saba_goes_on_compiled_with_its_tables():
    """A thawed tensor needs no new tables, so its steps stay compiled."""
    problem = Two()
    sums = [bo.FiniteSum(lambda _, f=f: f(), [0, 1]) for f in (problem.upper, problem.lower)]
    optimizer = bo.SABA(problem.x, problem.y, lr=0.05, lower_lr=0.1)
    optimizer.compile(backend="eager")
    for k in range(8):
        problem.y[1].requires_grad_(not 3 <= k < 5)
        optimizer.step(*sums)
        assert "compile_fallback" not in optimizer.diagnostics, k


@pytest.mark.parametrize("name", ["RAHGD", "RestartedAGD"])
def test_the_output_begins_anew_when_a_tensor_rests_or_returns(name):
    """No look-ahead point of before is in the average, and there is no momentum from before."""
    x = [torch.full((1,), start, dtype=torch.float64, requires_grad=True) for start in (2.0, 3.0)]
    y = torch.ones(2, dtype=torch.float64, requires_grad=True)
    options = {
        "lr": 0.1,
        "momentum": 0.5,
        "restart_period": 10,
        "restart_radius": torch.inf,
        "on_converged": "continue",
    }
    points, target = [], 1.0  # where the upper gradient is evaluated

    def upper():
        points.append(torch.cat(x).detach())
        return (y - target).square().sum() / 2

    def closure():
        optimizer.zero_grad()
        points.append(torch.cat(x).detach())
        loss = (torch.cat(x) - target).square().sum() / 2
        loss.backward()
        return loss

    if name == "RAHGD":
        optimizer = bo.RAHGD(x, [y], lower_lr=1.0, lower_steps=1, check_derivatives=False, **options)
    else:
        optimizer = bo.RestartedAGD(x, **options)
    lower = lambda: (y - torch.cat(x)).square().sum() / 2  # noqa: E731
    step = partial(optimizer.step, *([upper, lower] if name == "RAHGD" else [closure]))
    for rests in (True, False, True):
        for _ in range(3):
            step()
        x[1].requires_grad_(not rests)
        target *= -4  # larger gradients than all before
        live = torch.cat(x).detach()
        step()
        assert torch.equal(points[-1], live)  # no momentum
        assert torch.equal(torch.cat(optimizer.averaged_parameters()), live)
        assert optimizer.epoch_step == 1
    while not optimizer.converged:
        step()
    average = torch.stack(points[-10:]).mean(0)  # the steps shrink, so that the last one is the shortest
    torch.testing.assert_close(torch.cat(optimizer.averaged_parameters()), average, rtol=1e-12, atol=0)
    live = torch.cat(x).detach()
    optimizer.swap_averaged()
    torch.testing.assert_close(torch.cat(x).detach(), average, rtol=1e-12, atol=0)
    optimizer.swap_averaged()
    assert torch.equal(torch.cat(x).detach(), live)
    optimizer.swap_averaged()
    for t in x:  # as in older checkpoints
        if "live" in optimizer.state[t]:
            optimizer.state[t]["average"] = optimizer.state[t].pop("live")
    optimizer.swap_averaged()
    assert torch.equal(torch.cat(x).detach(), live)
    torch.testing.assert_close(torch.cat(optimizer.averaged_parameters()), average, rtol=1e-12, atol=0)
    x[1].requires_grad_()
    target *= -4
    step()
    assert torch.equal(torch.cat(optimizer.averaged_parameters()), live)


@pytest.mark.parametrize("joins", ["added", "thawed"])
@pytest.mark.parametrize("name", ["SOBA", "AmIGO", "FSLA"])
def test_the_linear_solution_stays_when_a_tensor_joins(name, joins):
    """That of the new tensor is zero, and the others keep theirs."""
    problem = Two()
    late = problem.y[1].requires_grad_(joins == "added")
    options = {"AmIGO": {"lower_steps": 1, "linear_steps": 1}}
    first = problem.y[:1] if joins == "added" else problem.y
    optimizer = getattr(bo, name)(problem.x, first, lr=0.0, lower_lr=1e-9, **options.get(name, {}))
    kept = torch.tensor([0.7, -0.2, 0.3], dtype=torch.float64)
    for _ in range(3):
        optimizer.step(problem.upper, problem.lower)
    if joins == "added":
        optimizer.add_param_group({"params": [late], "level": "lower", "lr": 1e-9})
    late.requires_grad_()
    optimizer.state[problem.y[0]]["linear_solution"].copy_(kept)
    optimizer.step(problem.upper, problem.lower)
    found = [optimizer.state[t]["linear_solution"] for t in problem.y]
    assert relative(found[:1], [kept]) < 1e-6
    assert float(found[1].norm()) < 1e-6


@pytest.mark.parametrize("joins", ["added", "thawed"])
@pytest.mark.parametrize("compiled", [False, True])
def test_copies_stay_when_a_tensor_joins(joins, compiled):
    """Those of the new tensor begin at it. Otherwise all copies would be at y, and the difference zero."""
    problem = Two()
    late = problem.y[1].requires_grad_(joins == "added")
    first = problem.y[:1] if joins == "added" else problem.y
    optimizer = bo.F2SA(problem.x, first, lr=0.0, lower_lr=0.1, lower_steps=50, nu=0.01)
    if compiled:
        optimizer.compile(backend="eager")
    for _ in range(3):
        optimizer.step(problem.upper, problem.lower)
    before = optimizer.state[problem.y[0]]["copies"].clone()
    if joins == "added":
        optimizer.add_param_group({"params": [late], "level": "lower"})
    late.requires_grad_()
    for group in optimizer.param_groups[1:]:
        group["lr"] = 1e-12
    optimizer.step(problem.upper, problem.lower)
    copies, own = (optimizer.state[t]["copies"] for t in problem.y)
    assert relative([copies], [before]) < 1e-9
    assert (before[1] - before[0]).abs().min() > 1e-3
    assert relative([own], [problem.y[1].detach().expand(2, -1)]) < 1e-9


@pytest.mark.filterwarnings("ignore:steps run eagerly")
@pytest.mark.parametrize("rests", ["start 1", "both starts", "lower 1", "both levels"])
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in ("MAML", "ANIL", "FOMAML", "iMAML", "ESMAML")), ("MAML", True)],
)
def test_starts_stay_with_their_lower_tensors_while_one_of_them_rests(name, rests, compiled):
    """All have the same shape, so nothing but a wrong value would show a start of another tensor."""
    make = {"dtype": torch.float64, "requires_grad": True}
    shift, *starts = (torch.full((3,), value, **make) for value in (5.0, 1.0, -2.0))
    x, y = [shift, *starts], [torch.full((3,), value, **make) for value in (0.4, 0.6)]
    resting = {"start 1": starts[1:], "both starts": starts, "lower 1": y[1:], "both levels": [starts[0], y[1]]}[rests]
    rate = 0.1
    options = {"lower_steps": 1, "lower_lr": rate}
    if name == "iMAML":
        options = {"lower_steps": 40, "lower_lr": 0.4, "proximal": 1.0}
    elif name == "ESMAML":
        options |= {"directions": 18, "direction": "orthogonal", "smoothing": 1e-3}
    optimizer = getattr(bo, name)(x, y, lr=0.0, **options)
    if compiled:
        optimizer.compile(backend="eager")

    def upper(data, y=y, shift=shift):
        return ((y[0] - 1).square().sum() + (y[1] - 2).square().sum() + 0.3 * y[0] @ y[1]) / 2 + shift @ shift / 20

    def lower(data):
        return ((y[0] - 0.3 * shift).square().sum() + 2 * (y[1] - shift).square().sum()) / 2

    def solved(shift, *starts):  # in closed form, of lower tensors that do not rest
        pulls, targets = (1.0, 2.0), (0.3 * shift, shift)
        if name == "iMAML":
            found = [(c * a + s) / (c + 1) for c, a, s in zip(pulls, targets, starts, strict=True)]
        else:
            found = [s - rate * c * (s - a) for c, a, s in zip(pulls, targets, starts, strict=True)]
        if name == "FOMAML":
            found = [s + (t - s).detach() for s, t in zip(starts, found, strict=True)]
        return [t if own.requires_grad else own.detach() for t, own in zip(found, y, strict=True)]

    for tasks in (None, bo.TensorTasks(torch.zeros(2, 1))):
        for k in range(6):
            for t in resting:
                t.requires_grad_(not 2 <= k < 4)
            losses = (upper, lower) if tasks is not None else (lambda: upper(None), lambda: lower(None))
            optimizer.backward(*losses, **({} if tasks is None else {"tasks": tasks}))
            point = [t.detach().clone().requires_grad_() for t in x]
            ends = solved(*point)
            wanted = torch.autograd.grad(upper(None, ends, point[0]), point, materialize_grads=True)
            trained = [i for i, t in enumerate(x) if t.requires_grad]
            assert relative([x[i].grad for i in trained], [wanted[i] for i in trained]) < 1e-6, k
            if name != "ESMAML" or tasks is None:
                assert relative(y, ends) < 1e-10, k
            if k == 3:
                optimizer.load_start()
                assert all(torch.equal(t, s) for t, s in zip(y, starts, strict=True) if t.requires_grad)
        assert "compile_fallback" not in optimizer.diagnostics  # not for a start that no longer rests

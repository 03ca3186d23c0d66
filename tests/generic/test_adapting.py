"""``adapt``: the lower problem of a new task, from the learned start or the live y."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader

import bilevel_optim as bo

from ..problems import same, seeded, values
from ..registry import ARGUMENTS, ROWS, each


def loss_of(x, y):
    """A lower loss of a task, whose solution is (x + target) / 2."""
    return lambda target: ((y - x).square().sum() + (y - target).square().sum()) / 2


def tensors(row, n=2):
    x, y = torch.full((n,), 3.0, requires_grad=True), torch.full((n,), 1.0, requires_grad=True)
    upper = [torch.ones(1, requires_grad=True), x] if row.declared.initial else [x]
    return x, y, upper


@each(lambda row: not row.variant)
def test_adapting_is_lower_steps_and_leaves_everything_as_it_was(row):
    x, y, upper = tensors(row)
    optimizer = row(upper, [y], lower_lr=0.25, **({"proximal": 0.0} if row.name == "iMAML" else {}))
    before, target = values(upper, [y]), torch.tensor([5.0, -1.0])
    task = loss_of(x, y)
    # A minimax method ascends in y.
    loss = (lambda target: -task(target)) if row.declared.losses == 1 else task
    state, counts = copy.deepcopy(optimizer.state_dict()), optimizer.oracle_counts
    (found,) = optimizer.adapt(loss, target, steps=200)
    start = x if row.declared.initial else y
    torch.testing.assert_close(found, (x + target).detach() / 2, atol=1e-6, rtol=0)
    assert same(before, values(upper, [y]))
    assert optimizer.oracle_counts == counts
    assert str(optimizer.state_dict()) == str(state)
    assert all(p.grad is None for p in (*upper, y))
    if row.declared.lower_optimizer == "any" and not hasattr(optimizer, "lower_momentum"):
        (one,) = optimizer.adapt(loss, target, steps=1)
        slope = 2 * start.detach() - x.detach() - target
        torch.testing.assert_close(one, start.detach() - 0.25 * slope)
    (written,) = optimizer.adapt(loss, target, steps=200, write=True)
    assert torch.equal(y, written)
    assert torch.equal(written, found)


@each(("AID", "BA", "F2SA", "MAML", "RAHGD"))
def test_as_many_steps_as_in_training_by_default(row):
    x, y, upper = tensors(row)
    optimizer = row(upper, [y], lower_steps=3)
    target = torch.zeros(2)
    assert same(optimizer.adapt(loss_of(x, y), target), optimizer.adapt(loss_of(x, y), target, steps=3))


def test_single_loops_need_a_number_of_steps():
    x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1)
    with pytest.raises(ValueError, match="has no lower_steps, so adapt needs the number of its steps"):
        optimizer.adapt(lambda: (y - x).square().sum())
    with pytest.raises(ValueError, match="Invalid steps value: -1"):
        optimizer.adapt(lambda: (y - x).square().sum(), steps=-1)
    with pytest.raises(ValueError, match="Invalid start"):
        optimizer.adapt(lambda: (y - x).square().sum(), steps=1, start=[torch.ones(2)])


def test_maml_adapts_as_in_its_steps_and_loads_its_start():
    """After a step with one task the live y is the adapted one, from the start before that step."""
    start = [torch.tensor([[1.0]], requires_grad=True), torch.tensor([2.0], requires_grad=True)]
    head = nn.Linear(1, 1)
    optimizer = bo.MAML(start, head.parameters(), lr=0.1, lower_lr=0.1, lower_steps=3, lower_optimizer=Adam)
    inputs = torch.linspace(-1, 1, 5)[:, None]

    def loss(shift):
        return (head(inputs) - inputs * shift).square().mean()

    tasks = bo.TensorTasks(torch.tensor([[4.0]]))
    expected = optimizer.adapt(loss, torch.tensor([4.0]))
    optimizer.step(loss, loss, tasks=tasks)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(expected, head.parameters(), strict=True))
    optimizer.load_start()
    assert same(values(head.parameters()), values(start))
    assert not same(values(start), values([torch.tensor([[1.0]]), torch.tensor([2.0])]))


@each(lambda row: row.declared.initial and not row.variant)
def test_the_kin_of_maml_load_their_start(row):
    _, y, upper = tensors(row)
    row(upper, [y]).load_start()
    assert torch.equal(y, upper[-1])


def test_only_methods_that_learn_a_start_load_one():
    assert {row.name for row in ROWS if hasattr(row.cls, "load_start")} == {
        row.name for row in ROWS if row.declared.initial
    }


def test_imaml_adapts_with_its_proximal_term():
    x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = bo.iMAML([x], [y], lr=0.1, lower_lr=0.2, lower_steps=100, proximal=3.0)
    (found,) = optimizer.adapt(lambda: (y - 6).square().sum() / 2)
    assert float(found) == pytest.approx(3.0)


def test_data_and_batches():
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    seen = []

    def loss(batch):
        seen.append(float(batch))
        return (y - batch).square().sum()

    optimizer = bo.AID([x], [y], **ARGUMENTS)
    optimizer.adapt(bo.Objective(loss, [1.0, 2.0]), steps=3)
    optimizer.adapt(loss, 5.0, steps=2)
    assert seen == [1.0, 2.0, 1.0, 5.0, 5.0]
    with pytest.raises(ValueError, match="has data of its own"):
        optimizer.adapt(bo.Objective(loss, [1.0]), 2.0)


def test_buffers_stay_unless_the_result_is_written():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    x = torch.zeros(1, requires_grad=True)
    optimizer = bo.AID([x], net.parameters(), **ARGUMENTS)
    rows = torch.randn(8, 3) + 4

    def loss(rows):
        return net(rows).square().mean() + x.sum()

    before = net[0].running_mean.clone()
    optimizer.adapt(loss, rows)
    assert torch.equal(net[0].running_mean, before)
    optimizer.adapt(loss, rows, write=True)
    assert not torch.equal(net[0].running_mean, before)


def test_diverging_adaptation_raises_and_leaves_y():
    x, y = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=1e200, lower_steps=4)
    for write in (False, True):
        with pytest.raises(bo.NonFiniteError):
            optimizer.adapt(lambda: y.square().sum() + x.sum(), write=write)
        assert float(y.detach()) == 1.0
    assert math.isfinite(float(x.detach()))


def test_limits_hold_in_adaptation_too():
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = bo.AID([x], [y], **ARGUMENTS, lower_projection=lambda y: [t.clamp(max=1.0) for t in y])
    (found,) = optimizer.adapt(lambda: (y - 3 - x).square().sum(), steps=50)
    assert float(found) == 1.0  # no hypergradient is made, so there is nothing to refuse


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (bo.AID, {}),
        (bo.AID, {"lower_optimizer": Adam}),
        (bo.F2SA, {"vectorize": False}),
        (bo.ITD, {"lower_clip": 0.5, "lower_projection": lambda y: [t.clamp(max=2.0) for t in y]}),
        (bo.MAML, {}),
    ],
)
def test_many_tasks_at_once_are_each_of_them(method, options):
    x, y = torch.full((2,), 3.0, requires_grad=True), torch.full((2,), 1.0, requires_grad=True)
    optimizer = method([x], [y], **ARGUMENTS, **options)
    targets = torch.tensor([[5.0, -1.0], [0.0, 0.0], [40.0, 2.0]])
    before, counts = values([x, y]), optimizer.oracle_counts
    (found,) = optimizer.adapt(loss_of(x, y), tasks=targets, steps=7)
    assert found.shape == (3, 2)
    for one, target in zip(found, targets, strict=True):
        torch.testing.assert_close(one, optimizer.adapt(loss_of(x, y), target, steps=7)[0])
    again = optimizer.adapt(loss_of(x, y), tasks=targets, steps=2, start=[found])[0]
    torch.testing.assert_close(again[2], optimizer.adapt(loss_of(x, y), targets[2], steps=2, start=[found[2]])[0])
    assert same(before, values([x, y]))
    assert optimizer.oracle_counts == counts


def test_invalid_tasks_are_refused():
    x, y = torch.full((2,), 3.0, requires_grad=True), torch.full((2,), 1.0, requires_grad=True)
    optimizer, loss = bo.AID([x], [y], **ARGUMENTS), loss_of(x, y)
    for options in ({"batch": torch.zeros(2)}, {"write": True}):
        with pytest.raises(ValueError, match="adapt takes tasks= without batch= and without write=True"):
            optimizer.adapt(loss, tasks=torch.zeros(3, 2), **options)
    for wrong in (torch.tensor(1.0), (torch.zeros(2, 2), torch.zeros(3, 2)), []):
        with pytest.raises(ValueError, match="Invalid tasks: they should be tensors"):
            optimizer.adapt(loss, tasks=wrong)
    single = bo.GDA([x], [y], lr=0.1, lower_lr=0.1)
    with pytest.raises(ValueError, match="GDA adapts to one task at a time"):
        single.adapt(loss, tasks=torch.zeros(3, 2))


@pytest.mark.parametrize(("when", "write"), [(2, True), (2, False), (4, True)])
@pytest.mark.parametrize("stepped", [True, False])
def test_adapting_that_fails_moves_nothing(stepped, when, write):
    """Running statistics, the data and torch's random numbers had moved; the fourth call is that for the buffers."""
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    x, calls = torch.ones(1, requires_grad=True), [-100]

    def loss(batch):
        calls[0] += 1
        noise = torch.rand(4, 3)
        if calls[0] == when:
            net(batch + noise)
            raise RuntimeError("on purpose")
        return (net(batch + noise) - x).square().mean()

    data = DataLoader(torch.randn(16, 3, generator=seeded(1)), 4, shuffle=True)
    lower = bo.Objective(loss, data)
    optimizer = bo.F2SA([x], net.parameters(), lr=0.01, lower_lr=0.01, lower_steps=3)
    if stepped:
        optimizer.step(lambda: net[1].weight.sum(), lower)
    before = values(net.buffers(), net.parameters(), [x, torch.get_rng_state()]), str(lower.state_dict())
    calls[0] = 0
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.adapt(lower, write=write)
    assert same(values(net.buffers(), net.parameters(), [x, torch.get_rng_state()]), before[0])
    assert str(lower.state_dict()) == before[1]


@pytest.mark.parametrize("lower_lr", [0.1, "auto"])
@pytest.mark.parametrize(
    "start", [[torch.ones(2), torch.ones(2)], [torch.ones(5)], [torch.ones(4, 2)], [torch.ones(2, 3)]]
)
def test_a_start_of_other_shapes_is_refused(lower_lr, start):
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.ITD([x], [y], lr=0.1, lower_lr=lower_lr, lower_steps=2)
    for data in ({"batch": torch.zeros(2)}, {"tasks": torch.zeros(3, 2)}):
        with pytest.raises(ValueError, match="Invalid start: the lower parameters have shapes"):
            optimizer.adapt(loss_of(x, y), **data, start=start)

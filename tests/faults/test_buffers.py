"""Each evaluation of a loss reads module buffers as they were when the step began, whatever others have moved."""

import copy
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo

from ..problems import Given, close, flat, same, seeded
from ..registry import each

X = torch.randn(3, 6, 4, generator=seeded(3), dtype=torch.float64)


class Running(Given):
    """g normalises by its batch, and moves the running statistics that f reads; ``still``: g moves nothing."""

    def __init__(self, row, *, still, switches):
        self.norm = nn.BatchNorm1d(4, affine=False, momentum=0.5).double()
        x = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
        y = torch.zeros(4, dtype=torch.float64, requires_grad=True)

        def read(batch):
            if switches:
                return self.norm.eval()(batch)
            return (batch - self.norm.running_mean) / (self.norm.running_var + 1e-5).sqrt()

        def upper():
            return (read((X[0] + x).tanh()) @ y - 1).square().mean() / 2 + (y - x).square().sum() / 2

        def lower():
            batch = (2 * X[1] + x).tanh() + 0.5
            normal = F.batch_norm(batch, None, None, training=True) if still else self.norm.train()(batch)
            return (normal @ (y + x) + 1).square().mean() / 2 + (y - 2 * x).square().sum() / 2

        super().__init__([x], [y], upper, lower)
        if row.declared.initial:
            self.x.append(torch.zeros(4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("switches", [False, True])
@each(
    ("AID", "BOME", "F2SA", "F2SA-1", "F2SA-3", "ITD-checkpoint", "PZOBO", "RAHGD", "SOBA", "SVRB", "StocBiO", "iMAML")
)
def test_the_upper_loss_reads_the_buffers_with_which_the_step_began(row, switches):
    """F2SA used to evaluate both losses of a point in one block, so that f read the buffers that g had just moved."""
    ends = []
    for still in (False, True):
        problem = Running(row, still=still, switches=switches)
        optimizer = row(problem.x, problem.y, short=True, vectorize=False)
        gradients = []
        for _ in range(2):
            problem.norm.reset_running_stats()
            problem.apply(optimizer.backward)
            gradients += [t.grad.clone() for t in problem.x]
            assert int(problem.norm.num_batches_tracked) == (not still)
        ends.append(flat([*gradients, *problem.y]))
    close(*ends, atol=1e-9, rtol=1e-9)


@pytest.mark.usually("F2SA")
@each(("AID", "BOME", "F2SA", "F2SA-1", "F2SA-3", "FSLA", "ITD", "PZOBO", "RAHGD", "SOBA", "SVRB", "StocBiO"))
@pytest.mark.parametrize("vectorize", [True, False])
def test_the_lower_loss_reads_buffers_that_the_upper_loss_moves(row, vectorize):
    """The first step of F2SA used to differentiate g only after f had moved the statistics that g's graph reads."""
    ends = []
    for still in (False, True):
        norm = nn.BatchNorm1d(4, affine=False, momentum=0.5).double().eval()
        x = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
        y = torch.ones(4, dtype=torch.float64, requires_grad=True)

        def upper(norm=norm, x=x, y=y, still=still):
            batch = (2 * X[1] + x).tanh() + 0.5
            normal = F.batch_norm(batch, None, None, training=True) if still else norm.train()(batch)
            return (normal @ y - 1).square().mean() / 2

        def lower(norm=norm, x=x, y=y):
            return (norm.eval()((X[0] * (1 + x)).tanh()) @ y + 1).square().mean() / 2 + (y - x).square().sum()

        optimizer, gradients = row([x], [y], short=True, vectorize=vectorize), []
        for _ in range(2):
            optimizer.backward(upper, lower)
            gradients.append(x.grad.clone())
            assert not norm.num_batches_tracked
        ends.append(flat([*gradients, y]))
    close(*ends, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("cls", [bo.F2SA, bo.PZOBO, bo.ITD])
def test_every_task_reads_them_too(cls, vectorize):
    """In a loop, the second task used to read the buffers that the first had moved."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones((), dtype=torch.float64))

        def forward(self, values):
            before = self.scale.clone()
            if self.moves:
                self.scale += 1
            return values * before

    ends = []
    for moves in (False, True):
        module, (x, y) = Scale(), torch.full((2, 4), 0.1, dtype=torch.float64)
        module.moves = moves
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()

        def lower(batch, module=module, x=x, y=y):
            return (module(batch) @ (y + x) - 1).square().mean() + (y - x).square().sum() / 2

        def upper(batch, module=module, x=x, y=y):
            return (module(batch) @ y + 1).square().mean() + x.square().sum()

        optimizer = cls([x], [y], lr=0.1, lower_lr=0.05, lower_steps=2, vectorize=vectorize, generator=seeded())
        for _ in range(2):
            module.scale.fill_(1.0)
            optimizer.backward(upper, lower, tasks=bo.TensorTasks(X))
        ends.append(flat([x.grad, y]))
    close(*ends, atol=1e-9, rtol=1e-9)


def test_every_part_of_a_sample_reads_them_too():
    """With accumulate=."""
    ends = []
    for moves in (0.0, 1.0):
        norm = nn.BatchNorm1d(4, affine=False, momentum=moves).double()
        x, y = (torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True) for _ in range(2))

        def lower(batch, norm=norm, x=x, y=y):
            seen = (batch - norm.running_mean) @ y
            norm(batch)
            return (seen - 1).square().mean() + (y - x).square().sum() / 2

        lower = bo.Objective(lower, list(X), accumulate=3)
        optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.05, lower_steps=2, linear_steps=3)
        optimizer.backward(lambda y=y: (y - 1).square().sum(), lower)
        ends.append(flat([x.grad, y]))
    close(*ends, atol=1e-9, rtol=1e-9)


def test_the_first_check_of_features_moves_nothing():
    ends = []
    for moves in (0.0, 1.0):
        norm = nn.BatchNorm1d(4, affine=False, momentum=moves).double()
        x, y = (torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True) for _ in range(2))

        def features(batch, norm=norm, x=x):
            seen = batch - norm.running_mean + x
            norm(batch)
            return seen

        def head(part, y=y):
            return (part @ y - 1).square().mean() + y.square().sum()

        lower = bo.Objective(head, list(X), features=features)
        optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.05, lower_steps=2)
        optimizer.backward(lambda y=y: (y - 1).square().sum(), lower)
        ends.append(flat([x.grad, y]))
    close(*ends, atol=1e-9, rtol=1e-9)


class Late:
    """A normalisation that the losses call only once it has joined."""

    def __init__(self, kind=nn.BatchNorm1d):
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.norm = kind(4, **({"track_running_stats": True} if kind is nn.InstanceNorm1d else {}))
        self.x, self.data, self.joined = torch.zeros((), requires_grad=True), torch.randn(16, 4), False

    def net(self):
        hidden = self.first(self.data)
        return self.head(self.normalised(hidden) if self.joined else hidden)

    def normalised(self, hidden):
        return self.norm(hidden.T[None])[0].T

    def lower(self):
        own = [*self.first.parameters(), *self.head.parameters(), *self.norm.parameters()]
        return (self.net() - 1).square().mean() + (3 + self.x.exp()) * sum(p.square().sum() for p in own)

    def upper(self):
        return self.net().square().mean()

    def statistics(self):
        return [t.clone() for t in self.norm.buffers()]


def by_closures(problem):
    """Losses that hold the modules in closures of nested functions."""
    first, norm, head, data = problem.first, problem.norm, problem.head, problem.data

    def net():
        return head(norm(first(data).T[None])[0].T if problem.joined else first(data))

    def penalty():
        own = [*first.parameters(), *head.parameters(), *norm.parameters()]
        return (3 + problem.x.exp()) * sum(p.square().sum() for p in own)

    return lambda: net().square().mean(), lambda: (net() - 1).square().mean() + penalty()


def by_data(problem):
    """Losses that are partial functions, with data."""

    def loss(held, batch):
        return held["problem"].lower() * batch

    return problem.upper, bo.Objective(partial(loss, {"problem": problem}), [1.0])


WAYS = {
    "attributes": lambda problem: (problem.upper, problem.lower),
    "closures": by_closures,
    "partial functions": by_data,
}


@pytest.mark.few(7)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.ITD])
def test_a_normalisation_that_joins_later(cls, kind, way):
    """Its statistics used to move at every evaluation, and to stay moved after a step that failed."""
    problem = Late(kind)
    upper, lower = WAYS[way](problem)
    params = [p for m in (problem.first, problem.head, problem.norm) for p in m.parameters()]
    optimizer = cls([problem.x], params, lr=0.01, lower_lr=0.01, lower_steps=4)
    optimizer.step(upper, lower)
    for _ in range(2):
        before = problem.statistics()
        optimizer.step(upper, lower)
        assert same(before, problem.statistics())
    problem.joined, moves = True, []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: moves.append(problem.statistics()) if module is problem.norm else None
    )
    optimizer.step(upper, lower)
    handle.remove()
    assert len(moves) > 4
    assert all(same(moves[0], seen) for seen in moves)  # every evaluation read those at the beginning
    once = copy.deepcopy(problem.norm)
    for buffer, value in zip(once.buffers(), moves[0], strict=True):
        buffer.copy_(value)
    once(problem.first(problem.data).T[None])
    close(flat(problem.statistics()), flat([*once.buffers()]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA])
def test_a_normalisation_of_an_added_group(cls):
    problem = Late()
    hidden = weakref.ref(problem)  # which the search for modules does not follow
    own = [*problem.first.parameters(), *problem.head.parameters()]
    optimizer = cls([problem.x], own, lr=0.01, lower_lr=0.01, lower_steps=4)
    losses = lambda: hidden().upper(), lambda: hidden().lower()
    optimizer.step(*losses)
    problem.joined = True
    optimizer.add_param_group({"params": problem.norm.parameters(), "level": "lower"})
    for k in range(1, 4):
        optimizer.step(*losses)
        assert int(problem.norm.num_batches_tracked) == k


def test_other_losses_may_call_other_normalisations():
    """Losses of the same code, which hold other modules."""
    x, norms = torch.zeros((), requires_grad=True), [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    y, data = torch.zeros(2, requires_grad=True), torch.randn(8, 2)

    def made(norm):
        return lambda: (norm(data) @ y - 1).square().mean() + y.square().sum() * x.exp()

    optimizer = bo.AID([x], [y], lr=0.01, lower_lr=0.01, lower_steps=4)
    for k in range(1, 4):
        for norm in norms:
            optimizer.step(lambda: (y - 1).square().sum(), made(norm))
        assert [int(norm.num_batches_tracked) for norm in norms] == [k, k]


def test_a_normalisation_that_nothing_calls_costs_no_evaluation():
    counts = []
    for kind in (nn.BatchNorm1d, nn.Identity):
        problem = Late(kind) if kind is nn.BatchNorm1d else Late()
        problem.norm = problem.norm if kind is nn.BatchNorm1d else nn.Linear(1, 1)
        params = [p for m in (problem.first, problem.head, problem.norm) for p in m.parameters()]
        optimizer = bo.F2SA([problem.x], params, lr=0.01, lower_lr=0.01, lower_steps=4)
        for _ in range(3):
            optimizer.step(problem.upper, problem.lower)
        counts.append(optimizer.oracle_counts)
    assert counts[0] == counts[1]
    assert counts[0]["loss"] == 0


def test_a_normalisation_that_joins_a_compiled_step():
    problem = Late()
    params = [p for m in (problem.first, problem.head, problem.norm) for p in m.parameters()]
    optimizer = bo.SOBA([problem.x], params, lr=0.01, lower_lr=0.01)
    optimizer.compile(backend="eager")
    for _ in range(3):
        optimizer.step(problem.upper, problem.lower)
    assert not optimizer.diagnostics.get("compile_fallback")
    problem.joined = True
    for k in range(1, 5):
        optimizer.step(problem.upper, problem.lower)
        assert int(problem.norm.num_batches_tracked) == k


@pytest.mark.parametrize("cls", [bo.SOBA, bo.F2SA])
def test_a_step_that_fails_leaves_the_statistics(cls):
    """At any evaluation, also the last one, which moves them, and in the update of x after that."""
    net, x = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.zeros(1, requires_grad=True)
    rows, count, calls, fails_at = torch.randn(5, 2), 0, 0, 0

    class Failing(torch.optim.SGD):
        def step(self):
            if fails_at > count > 0:
                raise ArithmeticError("in the update")
            return super().step()

    def lower():
        nonlocal calls
        value = (net(rows) - 1).square().mean() + x.exp().sum() * net[0].weight.square().sum()
        calls += 1
        if calls == fails_at:
            raise ArithmeticError("in the loss")
        return value

    steps = {} if cls is bo.SOBA else {"lower_steps": 2}
    optimizer = cls([x], net.parameters(), lr=0.01, lower_lr=0.01, upper_optimizer=Failing, **steps)
    for _ in range(3):
        calls = 0
        optimizer.step(lambda: net(rows).square().sum(), lower)
    before, count = [b.clone() for b in net.buffers()], calls
    assert count > 1
    while fails_at <= count:
        calls, fails_at = 0, fails_at + 1
        with pytest.raises(ArithmeticError):
            optimizer.step(lambda: net(rows).square().sum(), lower)
        assert all(map(torch.equal, net.buffers(), before))


class Centred(nn.Module):
    """A layer with a moving mean, which moves in evaluation mode too, and by a method that no hook sees."""

    def __init__(self, assigns):
        super().__init__()
        self.linear, self.assigns = nn.Linear(2, 3).double(), assigns
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def encode(self, rows):
        hidden = self.linear(rows)
        centred, new = hidden - self.mean, 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        if self.assigns:
            self.mean = new
        else:
            self.mean.copy_(new)
        return centred

    forward = encode


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("training", "by_method", "assigns"),
    [(True, False, True), (True, True, False), (False, False, False), (False, True, True)],
)
@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.ITD, bo.PZOBO])
def test_other_buffers_move_once_in_a_step(cls, training, by_method, assigns):
    """They used to move at every evaluation, and to hold a lane of ``vmap`` after an assignment there."""
    torch.manual_seed(0)
    net, x = Centred(assigns).train(training), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    call = net.encode if by_method else net
    rows = torch.randn(5, 2, dtype=torch.float64)

    def lower():
        return (call(rows) - 1).square().mean() + (x.exp() * net.linear.weight.square()).sum()

    optimizer = cls([x], net.parameters(), lr=0.01, lower_lr=0.01, lower_steps=3)
    for _ in range(3):
        before = net.mean.clone()
        optimizer.step(lambda: call(rows).square().mean(), lower)
        close([net.mean], [0.5 * before + 0.5 * net.linear(rows).detach().mean(0)], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"truncate": 1}, {"lower_optimizer": torch.optim.Adam}])
def test_parts_that_run_again_for_a_product_move_nothing(options, compiled):
    """A checkpointed part runs again in the derivative of each lower step of ITD, after the evaluation is over."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    norm, kept = net[1], []

    def loss(part):
        return (checkpoint(net, X[part] * x.exp(), use_reentrant=False) - 1).square().mean()

    optimizer = bo.ITD([x], net.parameters(), lr=0.1, lower_lr=0.1, lower_steps=3, **options)
    if compiled:
        optimizer.compile(backend="eager")
    for _ in range(3):
        kept.append([norm.running_mean.clone(), norm.running_var.clone()])
        start = x.detach().clone()
        optimizer.step(lambda: loss(0), lambda: loss(1))
    assert int(norm.num_batches_tracked) == 3
    rows = F.linear(X[1] * start.exp(), net[0].weight, net[0].bias).detach()
    F.batch_norm(rows, *kept[2], training=True)  # the last step, by hand
    close(norm.running_mean, kept[2][0], 1e-10)
    close(norm.running_var, kept[2][1], 1e-10)


def test_a_sparse_buffer():
    """Torch does not compare sparse tensors."""
    net, x = Centred(False).double(), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    net.register_buffer("graph", torch.eye(5, dtype=torch.float64).to_sparse())
    rows = torch.randn(5, 2, dtype=torch.float64)

    def lower():
        return (net.graph @ net(rows) - 1).square().mean() + (x.exp() * net.linear.weight.square()).sum()

    optimizer = bo.AID([x], net.parameters(), lr=0.01, lower_lr=0.01, lower_steps=3)
    optimizer.step(lambda: net(rows).square().mean(), lower)


class Lately(nn.Module):
    """A layer with a moving mean, which moves in each of these ways."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(2, 3).double(), how
        self.register_buffer("other", None)
        if how != "registered":
            shape = (1, 3) if how == "grows" else 3
            self.register_buffer("mean", None if how == "made" else torch.zeros(shape, dtype=torch.float64))

    def forward(self, rows):
        hidden = self.linear(rows)
        if not hasattr(self, "mean"):
            return hidden
        mean, new = self.mean, hidden.detach().mean(0)
        mean = torch.zeros(3, dtype=torch.float64) if mean is None else mean
        if self.how == "grows":
            hidden = hidden - mean.sum(0)
            self.mean.data = torch.cat([mean, new[None]])
            return hidden
        if self.how == "expanded":
            self.mean = (0.5 * mean[0] + 0.5 * new.mean()).expand(3)
        elif self.how == "made" or self.training:
            self.mean = 0.5 * mean + 0.5 * new
        return hidden - mean


@pytest.mark.parametrize("how", ["made", "grows", "expanded", "trains", "registered", "deleted"])
@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA])
def test_buffers_that_are_made_or_change_later(cls, how):
    """They used to move at every evaluation of a step, or to raise an error that did not say why."""
    torch.manual_seed(0)
    net, x = Lately(how).train(how != "trains"), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(5, 2, dtype=torch.float64)

    def lower():
        return (net(rows) - 1).square().mean() + (x.exp() * net.linear.weight.square()).sum()

    optimizer = cls([x], net.linear.parameters(), lr=0.01, lower_lr=0.01, lower_steps=3)
    for step in range(4):
        if step == 2:
            net.train()
            if how == "registered":
                net.register_buffer("mean", torch.ones(3, dtype=torch.float64))
            if how == "deleted":
                del net.mean
        before = getattr(net, "mean", None)
        before = torch.zeros(3, dtype=torch.float64) if before is None else before.clone()
        has = hasattr(net, "mean")
        optimizer.step(lambda: net(rows).square().mean(), lower)
        new = net.linear(rows).detach().mean(0)
        want = 0.5 * before + 0.5 * (new.mean() if how == "expanded" else new)
        if how == "grows":
            want = torch.cat([before, new[None]])
        if how == "trains" and step < 2:
            want = before
        if has:
            close([net.mean], [want], atol=1e-12, rtol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3, dtype=torch.float64), None], ids=["norm", "own"])
@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA])
def test_buffers_of_a_scripted_module(cls, norm):
    """Torch keeps them in another kind of dict there."""
    ends = []
    for script in (False, True):
        torch.manual_seed(0)
        linear = nn.Linear(2, 3, dtype=torch.float64)
        net = Centred(False) if norm is None else nn.Sequential(linear, copy.deepcopy(norm))
        net, x = torch.jit.script(net) if script else net, torch.zeros(1, dtype=torch.float64, requires_grad=True)
        rows = torch.randn(5, 2, dtype=torch.float64)

        def lower(net=net, x=x, rows=rows):
            return (net(rows) - 1).square().mean() + sum((x.exp() * p.square()).sum() for p in net.parameters())

        optimizer = cls([x], net.parameters(), lr=0.01, lower_lr=0.01, lower_steps=3)
        for _ in range(3):
            optimizer.step(lambda net=net, rows=rows: net(rows).square().mean(), lower)
        ends.append([x.detach(), *(b.clone() for b in net.buffers())])
    close(*ends, atol=1e-12, rtol=1e-12)


class Counting(nn.Module):
    """Counts its calls and averages its inputs, in buffers that the first call makes."""

    def forward(self, h):
        if not hasattr(self, "running_mean"):
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("running_mean", torch.zeros_like(h[0]))
        with torch.no_grad():
            self.calls += 1
            self.running_mean = 0.9 * self.running_mean + 0.1 * h.mean(0)
        return h


@pytest.mark.parametrize("kind", [Counting, partial(nn.LazyBatchNorm1d, affine=False)])
@each(("AID", "F2SA", "ITD", "PZOBO", "SOBA"))
def test_buffers_that_the_first_call_makes_advance_once_per_step(row, kind):
    """The evaluation that made them used to count too, besides the one pass at the end of the step."""
    torch.manual_seed(0)
    body, spare = nn.Linear(4, 3).double(), nn.LazyBatchNorm1d()  # the loss can reach the spare one, but calls it not
    layer = kind().double()
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def loss(batch):
        return layer(body(batch)).sigmoid().square().mean() if spare.training else spare(batch)

    def lower():
        return loss(X[0]) * x[0].exp() + x[1].exp() * sum(p.square().sum() for p in body.parameters())

    optimizer, mean = row([x], [*body.parameters()], short=True), torch.zeros(3, dtype=torch.float64)
    for k in range(1, 4):
        optimizer.step(lambda: loss(X[1]), lower)
        mean = 0.9 * mean + 0.1 * body(X[0]).detach().mean(0)
        close(layer.running_mean, mean, 1e-12)
        assert int(layer.calls if kind is Counting else layer.num_batches_tracked) == k


@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.ITD, bo.PZOBO])
def test_features_of_tasks_that_replace_a_buffer(cls):
    """A step on stacked tasks used to raise: the loss found one of vmap's lanes in the place of the buffer."""
    ends = []
    for vectorize in (True, False):
        torch.manual_seed(0)
        centred, head = Centred(True), nn.Linear(3, 1, dtype=torch.float64)
        x = torch.zeros(1, dtype=torch.float64, requires_grad=True)

        def features(batch, centred=centred, x=x):
            return centred(batch[:, :2] * x.exp())

        def lower(hidden, head=head):
            return (head(hidden) - 1).square().mean() + sum(p.square().sum() for p in head.parameters())

        def upper(hidden, head=head, x=x):
            return head(hidden).square().mean() + (x - 1).square().sum()

        losses = [bo.Objective(loss, features=features) for loss in (upper, lower)]
        options = {"lower_steps": 3, "vectorize": vectorize, "generator": seeded()}
        optimizer = cls([x], head.parameters(), lr=0.01, lower_lr=0.01, **options)
        for _ in range(3):
            mean = centred.mean.clone()
            want = 0.5 * mean + 0.5 * centred.linear(X[0, :, :2] * x.exp()).detach().mean(0)
            optimizer.step(*losses, tasks=bo.TensorTasks(X[:1].repeat(3, 1, 1)))
            close(centred.mean, want, 1e-12)
        ends.append(flat([x, *head.parameters()]))
    close(*ends, atol=1e-9, rtol=1e-9)


class Warm(nn.Module):
    """A layer whose moving mean begins to move when ``warm`` is set."""

    def __init__(self):
        super().__init__()
        self.linear, self.warm = nn.Linear(2, 3).double(), False
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, rows):
        hidden = self.linear(rows)
        self.scale.copy_(torch.ones(()))  # a write without a change
        centred = hidden - self.mean
        if self.warm:
            self.mean.mul_(0.5).add_(0.5 * hidden.detach().mean(0))
        return centred


@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA])
def test_a_buffer_that_begins_to_move_in_a_later_step_is_told(cls):
    """It used to move at every evaluation for good, in silence."""
    torch.manual_seed(0)
    net, x = Warm(), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(5, 2, dtype=torch.float64)

    def lower():
        return (net(rows) - 1).square().mean() + (x.exp() * net.linear.weight.square()).sum()

    optimizer = cls([x], net.parameters(), lr=0.01, lower_lr=0.01, lower_steps=3)
    for step in range(6):
        net.warm = step >= 2
        before = net.mean.clone()
        told = (
            pytest.warns(bo.BilevelWarning, match=r"a loss has written a module buffer .mean of Warm. in this step")
            if step == 2
            else nullcontext()
        )
        with told:
            optimizer.step(lambda: net(rows).square().mean(), lower)
        if step > 2:
            close(net.mean, 0.5 * before + 0.5 * net.linear(rows).detach().mean(0), 1e-12)


@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.SOBA])
def test_a_normalisation_that_is_put_in_later(cls):
    """Without new parameters or losses it used to move at every evaluation, in silence."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(2, 3).double()), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    model, rows = nn.ModuleDict({"net": net}), torch.randn(5, 2, dtype=torch.float64)

    def lower():
        return (model["net"](rows) - 1).square().mean() + (x.exp() * net[0].weight.square()).sum()

    steps = {} if cls is bo.SOBA else {"lower_steps": 3}
    optimizer = cls([x], net.parameters(), lr=0.01, lower_lr=0.01, **steps)
    for step in range(4):
        if step == 2:
            net.append(nn.BatchNorm1d(3, affine=False, dtype=torch.float64))
        optimizer.step(lambda: model["net"](rows).square().mean(), lower)
        if step >= 2:
            assert int(net[1].num_batches_tracked) == step - 1


def test_a_run_that_is_loaded_rounds_as_one_that_goes_on():
    """The first step, which looks at a buffer that rests, and later ones used to sum the losses in two orders."""

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        x, data = torch.zeros(5, dtype=torch.float64, requires_grad=True), torch.randn(2, 40, 6).double()
        net.register_buffer("scale", torch.ones(5))

        def fit(rows):
            return (net(rows[:, :5]) - rows[:, 5:]).square().mean()

        def lower():
            return fit(data[0]) + 0.1 * (x.exp() * net[0].weight.square()).sum()

        optimizer = bo.F2SA([x], net.parameters(), lr=0.05, lower_lr=0.1, lower_steps=3, order=1)
        return optimizer, (x, net), lambda: optimizer.step(lambda: fit(data[1]), lower)

    first, (x, net), step = made()
    for _ in range(4):
        step()
    second, (other, copied), next_step = made()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    copied.load_state_dict(net.state_dict())
    with torch.no_grad():
        other.copy_(x)
    for _ in range(4):
        step()
        next_step()
    assert torch.equal(flat([x, *net.parameters()]), flat([other, *copied.parameters()]))


@pytest.mark.parametrize("method", [bo.SVRB, bo.AID])
def test_a_run_on_tasks_that_is_loaded_rounds_as_one_that_goes_on(method):
    """The first step looked at all tasks in one graph, later ones at one by one: x was summed in two orders."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, t):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * t.detach().mean(0))
            return t

    def made():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(5, 4), Mean(), nn.Tanh(), nn.Dropout(0.3))
        y = torch.randn(*([3] if method is bo.SVRB else []), 4).requires_grad_()
        rows, start = torch.randn(2, 3, 8, 5), torch.randn(4)
        options = {"variant": "matrix_free"} if method is bo.SVRB else {"lower_steps": 2, "warm_start": False}
        optimizer = method(body.parameters(), [y], lr=0.05, lower_lr=0.1, **options)

        def upper(batch):
            return (body(batch) @ y - 1).square().mean()

        def lower(batch):
            return (body(batch) @ y - 2).square().mean() + (y - start).square().sum()

        tasks = bo.TensorTasks(*rows)
        return optimizer, body, y, lambda: optimizer.step(upper, lower, tasks=tasks)

    first, body, y, step = made()
    for _ in range(3):
        step()
    second, copied, other, next_step = made()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    copied.load_state_dict(body.state_dict())
    with torch.no_grad():
        other.copy_(y)
    for go in (step, next_step):
        torch.manual_seed(1)
        for _ in range(3):
            go()
    assert torch.equal(flat([y, *body.parameters()]), flat([other, *copied.parameters()]))

"""Former silent wrong results: each is now right, refused, or warned about."""

import math
import warnings
from functools import partial
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel_optim as bo

from ..problems import P1, Given, Quadratic, close, flat, same, seeded, values
from ..registry import ROWS, each

FEW = ("AID", "F2SA", "SOBA")
SGD, Adam = torch.optim.SGD, torch.optim.Adam


def plain(row):
    return not row.variant and row.declared.tasks != "required" and row.declared.losses == 2


def pair(**options):
    """x, y with f = |y - 1|^2/2 and g = |y - x|^2/2, so that the hypergradient is x - 1."""
    x, y = (torch.tensor([v, v + 1], requires_grad=True, **options) for v in (2.0, 0.0))
    return Given([x], [y], lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2, lr=0.5)


@pytest.mark.parametrize("cls", [bo.RTMLMC, bo.DLSGD])
def test_features_of_contexts_count(cls):
    ends = []
    for apart in (False, True):
        problem = P1()
        upper, lower = problem.losses

        def features(batch, problem=problem):
            xi, sign, noise = batch
            return xi @ problem.B.T + problem.A @ problem.x[0], sign, noise

        def head(part, problem=problem):
            shift, sign, noise = part
            r = problem.y[0] - shift
            return (((1 + 0.1 * sign) / 2) * (r @ problem.H * r).sum(-1) + 0.5 * noise @ problem.y[0]).mean()

        lower = bo.Objective(head, features=features) if apart else lower
        optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=1.0, levels=3, generator=seeded(1))
        ends.append((optimizer.backward(upper, lower, tasks=problem.tasks), problem.x[0].grad))
    close(*[end[0] for end in ends], 1e-12)
    close(*[end[1] for end in ends], 1e-12)


@each(lambda row: not row.variant)
def test_no_grad_makes_no_difference(row):
    ends = []
    for enabled in (True, False):
        torch.manual_seed(0)
        problem = row.quadratic()
        optimizer = row(problem.x, problem.y, short=True)
        with torch.set_grad_enabled(enabled):
            problem.run(optimizer, 3)
        ends.append(values(problem.x, problem.y, (p.grad for p in problem.x)))
    assert same(*ends)


@pytest.mark.parametrize(
    "factory",
    [
        partial(SGD, momentum=0.9, nesterov=True, foreach=True),
        partial(SGD, momentum=0.9, weight_decay=0.1, foreach=True),
        partial(Adam, foreach=True),
        partial(torch.optim.Adagrad, foreach=True, weight_decay=0.1),
        partial(torch.optim.RMSprop, foreach=True, momentum=0.9),
    ],
)
@pytest.mark.parametrize("cls", [bo.FirstOrder, bo.ITD])
def test_gradients_that_alias_are_not_written_into(cls, factory):
    """The gradients of y1 + y2 in a loss are one tensor."""
    ends = []
    for alias in (True, False):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = [torch.zeros(2, requires_grad=True) for _ in range(2)]

        def lower(x=x, y=y, alias=alias):
            total = y[0] + y[1] if alias else 1.0 * y[0] + 1.0 * y[1] * 1.0
            return (total - x).square().sum() / 2

        optimizer = cls([x], y, lr=0.1, lower_lr=0.1, lower_steps=5, lower_optimizer=factory)
        optimizer.backward(lambda x=x, y=y: (y[0] * x).sum() + y[1].sum(), lower)
        ends.append([*values(y), x.grad])
    for a, b in zip(*ends, strict=True):
        close(a, b, 1e-6)


@pytest.mark.usually("AID", "FirstOrder", "F2SA")
@each(lambda row: not row.variant)
def test_gradients_of_upper_parameters_can_be_clipped_in_place(row):
    """They are tensors of their own, dense, wherever the loss's gradients were one tensor or expanded."""
    problem = row.quadratic()
    ones = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    problem.x[1:1] = ones
    inner = problem.upper
    problem.upper = lambda *batch: inner(*batch) + (ones[0] + ones[1]).sum()
    optimizer = row(problem.x, problem.y, short=True)
    problem.apply(optimizer.backward)
    assert len({p.grad.data_ptr() for p in problem.x}) == len(problem.x)
    size = torch.nn.utils.clip_grad_norm_(problem.x, 1.0)
    if row.cls is not bo.iMCN:  # whose "gradient" is the step of a cubic model
        assert size > 1
    norm = flat(p.grad for p in problem.x).norm()
    assert float(norm) == pytest.approx(min(float(size), 1.0), rel=1e-5)


IMPLICIT = ("AID", "BA", "PAID", "RAHGD", "PRAHGD", "StocBiO", "AmIGO", "BSA", "TTSA", "SUSTAIN", "MRBO", "VRBO")
IMPLICIT = (*IMPLICIT, "SOBA", "FSLA", "SABA", "SRBA", "iMAML", "iMCN", "RAGDA-newton", "BOME")


@pytest.mark.parametrize(
    ("row", "where"),
    [
        pytest.param(row, where, id=f"{row.name}-{where}")
        for row in ROWS
        for where in ("factory", "group", "added")
        if row.declared.lower_optimizer != "none" and (where == "factory" or row.name in FEW)
    ],
)
def test_weight_decay_that_the_estimate_leaves_out_is_warned_about(row, where):
    problem = row.quadratic()
    factory = partial(SGD, weight_decay=0.1) if where == "factory" else SGD
    lower = [{"params": problem.y, "weight_decay": 0.1}] if where == "group" else problem.y
    expected = row.name in IMPLICIT or row.cls.__name__ in IMPLICIT

    def make():
        optimizer = row(problem.x, lower, lower_optimizer=factory)
        if where == "added":
            more = torch.zeros(2, dtype=torch.float64, requires_grad=True)
            optimizer.add_param_group({"params": [more], "level": "lower", "weight_decay": 0.1})

    if expected:
        with pytest.warns(bo.BilevelWarning, match="weight_decay .* the hypergradient leaves it out"):
            make()
    else:
        make()


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(bo.AID, {}), (bo.ITD, {}), (bo.F2SA, {}), (bo.PZOBO, {"generator": seeded()}), (bo.FirstOrder, {})],
)
@pytest.mark.parametrize("name", ["momentum", "weight_decay", "lr"])
def test_an_option_changed_during_a_run_counts_at_once(cls, options, name):
    """The change counts at once, as it does after a checkpoint that contains it."""
    ends = []
    for resumed in (False, True):
        problem = Quadratic(n=4, m=2)
        kept = {"lower_optimizer": partial(SGD, momentum=0.5), "warm_start": True, **options}
        if "generator" in kept:
            kept["generator"] = seeded()
        optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=3, **kept)
        problem.run(optimizer, 2)
        optimizer.param_groups[-1][name] = 0.2
        if resumed:
            other = cls(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=3, **kept)
            other.load_state_dict(optimizer.state_dict())
            optimizer = other
        with pytest.MonkeyPatch.context():
            problem.run(optimizer, 2)
        ends.append(values(problem.x, problem.y))
    assert same(*ends)
    problem = Quadratic(n=4, m=2)
    kept = {"lower_optimizer": partial(SGD, momentum=0.5), "warm_start": True, **options}
    if "generator" in kept:
        kept["generator"] = seeded()
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=3, **kept)
    problem.run(optimizer, 4)
    assert not same(ends[0], values(problem.x, problem.y))


class _Broken(Given):
    """g is not finite, but its gradients are."""

    def __init__(self, row, value, level="lower"):
        inner = row.quadratic()
        self.bad, self.lr, self.tasks = False, inner.lr, inner.tasks
        self.x, self.y = inner.x, inner.y

        one = row.declared.losses == 1

        def broken(*batch):
            return (inner.lower if level == "lower" and not one else inner.upper)(*batch) + (value if self.bad else 0.0)

        self.upper = broken if level == "upper" or one else inner.upper
        self.lower = broken if level == "lower" else inner.lower
        self.one = one

    losses = property(lambda self: (self.upper,) if self.one else (self.upper, self.lower))


@each()
def test_a_lower_loss_that_is_not_finite_is_noticed(row):
    value = math.inf if row.name in FEW else math.nan
    problem = _Broken(row, value)
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer)
    problem.bad, before = True, values(problem.x, problem.y)
    with pytest.raises(bo.NonFiniteError):
        problem.run(optimizer)
    assert same(before, values(problem.x, problem.y))


@pytest.mark.parametrize("vectorize", [8, False])
@pytest.mark.parametrize("order", [1, 2])
def test_an_upper_loss_that_is_not_finite_in_the_lower_steps_is_noticed(vectorize, order):
    problem, evaluations = Quadratic(n=4, m=2), []

    def upper():
        evaluations.append(1)
        return problem.upper() + (math.inf if len(evaluations) == first + 1 else 0.0)

    optimizer = bo.F2SA(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=3, order=order, vectorize=vectorize)
    first = 10**6
    optimizer.step(upper, problem.lower)
    first = len(evaluations)
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(upper, problem.lower)


@pytest.mark.parametrize("make", ["F2SA", "PZOBO", "tasks"])
def test_an_exception_under_vmap_is_raised(make):
    """It used to be swallowed by the loop that took over for good."""
    row = next(row for row in ROWS if row.name == ("AID" if make == "tasks" else make))
    problem = row.cleaning("tasks" if make == "tasks" else "whole")
    draws = {"generator": seeded()}
    optimizer = row(problem.x, problem.y, short=True, **draws)
    for k in (0, 1):
        problem.fails = [["lower", 2, "raise"]]
        with pytest.raises(KeyError, match="no such sample"):
            problem.run(optimizer)
        assert "vectorize_fallback" not in optimizer.diagnostics
        problem.fails = []
        problem.run(optimizer)
        assert "vectorize_fallback" not in optimizer.diagnostics, k
    assert optimizer._run_state.found.fallback is None


@each(lambda row: row.cls is not bo.iMAML and plain(row))  # whose lower loss has a proximal term, which reaches y
def test_a_lower_loss_that_no_longer_reaches_y_is_refused(row):
    problem = row.quadratic()
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer)
    z = torch.ones(1, requires_grad=True)
    problem.lower = lambda: (problem.x[0].sum() * z).sum() ** 2
    before = values(problem.x, problem.y)
    with pytest.raises(ValueError, match="lower loss"):
        problem.run(optimizer)
    assert same(before, values(problem.x, problem.y))


@each(plain)
def test_an_upper_loss_with_a_graph_of_its_own_is_refused(row):
    problem, z = row.quadratic(), torch.ones(1, dtype=torch.float64, requires_grad=True)
    problem.upper = lambda: (z**2).sum()
    optimizer = row(problem.x, problem.y, short=True)
    with pytest.raises(ValueError, match=r"depends on no parameter|neither loss depends"):
        problem.run(optimizer)


@each(lambda row: row.takes_tasks and not row.variant)
def test_no_tasks_are_refused(row):
    problem = row.quadratic(tasks=True)
    inner = problem.tasks

    class Nothing:
        sample, lower, upper = inner.sample, inner.lower, inner.upper

        def __len__(self):
            return 0

    optimizer = row(problem.x, problem.y, **({"tasks_per_step": None} if row.declared.tasks == "stacked" else {}))
    with pytest.raises(ValueError, match="length 0"):
        optimizer.step(*problem.losses, tasks=Nothing())


EXEMPT = ("FirstOrder", "MAML", "ANIL", "FOMAML", "iMAML", "ESMAML")


@each(plain)
def test_swapped_losses_are_warned_about(row):
    """If losses are swapped, x is in the upper loss alone, and y does not respond to it."""
    problem = row.quadratic()
    y, x = problem.y[0], problem.x[0]
    f = lambda: (y - 1).square().sum() / 2  # noqa: E731
    g = lambda: (y.mean() - x).square().sum() / 2 + y.square().sum()  # noqa: E731
    optimizer = row(problem.x, problem.y, short=True)
    if row.cls.__name__ in EXEMPT:
        optimizer.step(g, f)
        return
    assert "swapped" in warned(optimizer.step, g, f)


@each(plain)
def test_swapped_parameters_are_warned_about(row):
    """If parameters are swapped, y is in the lower loss alone, and f cannot gain from it."""
    if row.declared.initial:
        pytest.skip("starts y at x")
    problem = row.quadratic()
    y, x = problem.y[0], problem.x[0]
    f = lambda: (x - 1).square().sum() / 2  # noqa: E731
    g = lambda: (y.mean() - x).square().sum() / 2 + y.square().sum()  # noqa: E731
    optimizer = row(problem.x, problem.y, short=True)
    assert "swapped" in warned(optimizer.step, f, g)


def warned(function, *arguments):
    """Return all warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments)
    return " ".join(str(w.message) for w in caught if issubclass(w.category, bo.BilevelWarning))


def test_finite_differences_of_a_kinked_loss_are_warned_about():
    torch.manual_seed(0)
    X, t = torch.randn(40, 6), torch.randn(40, 1)
    for activation, kinked in ((nn.ReLU, True), (nn.Hardsigmoid, True), (nn.Tanh, False)):
        net = nn.Sequential(nn.Linear(6, 20), activation(), nn.Linear(20, 1))
        x = torch.zeros(1, requires_grad=True)

        def lower(net=net, x=x):
            return (net(X) - t).square().mean() + x.exp().sum() * sum(p.square().sum() for p in net.parameters())

        optimizer = bo.AID(
            [x], net.parameters(), lr=0.1, lower_lr=0.01, lower_steps=3, hvp="finite-difference", linear_steps=3
        )
        step = partial(optimizer.step, lambda net=net: (net(X) - t).square().mean(), lower)
        if kinked:
            with pytest.warns(bo.BilevelWarning, match="kinks"):
                step()
        else:
            step()


def test_a_difference_that_autocast_rounds_away_is_warned_about():
    torch.manual_seed(0)
    X, t, net = torch.randn(40, 6), torch.randint(0, 3, (40,)), nn.Linear(6, 3)
    for nu, warns in ((1e-2, True), (0.5, False)):
        w = torch.zeros(40, requires_grad=True)
        optimizer = bo.F2SA([w], net.parameters(), lr=0.1, lower_lr=0.1, lower_steps=3, nu=nu)

        def lower(w=w):
            loss = F.cross_entropy(net(X), t, reduction="none")
            return (w.sigmoid() * loss).mean() + 0.1 * sum(p.square().sum() for p in net.parameters())

        with torch.autocast("cpu", torch.bfloat16):
            if warns:
                with pytest.warns(bo.BilevelWarning, match="autocast"):
                    optimizer.step(lambda: F.cross_entropy(net(X), t), lower)
            else:
                optimizer.step(lambda: F.cross_entropy(net(X), t), lower)


@each(lambda row: not row.variant)
def test_a_state_saved_between_backward_and_step_continues(row):
    """STABLE used to lose a term of its update."""

    def run(stopped):
        torch.manual_seed(0)
        problem = row.quadratic()
        optimizer = row(problem.x, problem.y, short=True)
        problem.run(optimizer, 2)
        problem.apply(optimizer.backward)
        if stopped:
            state = optimizer.state_dict()
            optimizer = row(problem.x, problem.y, short=True)
            optimizer.load_state_dict(state)
        optimizer.step()
        return values(problem.x, problem.y)

    assert same(run(False), run(True))


def test_momentum_with_a_lower_optimizer_is_refused():
    problem = pair()
    with pytest.raises(ValueError, match=r"Invalid lower_momentum value: 0\.5"):
        bo.iMCN(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=3, lower_momentum=0.5, lower_optimizer=Adam)


@pytest.mark.usually("copies", "weight norm")
@pytest.mark.skipif("weight" not in signature(F.l1_loss).parameters, reason="torch's l1_loss has no weights")
@pytest.mark.parametrize("way", ["copies", "tasks", "weight norm", "compiled"])
def test_weights_of_the_l1_loss_count_where_torch_leaves_them_out(way):
    """In a mode of torch functions, F.l1_loss passes its arguments on without the weight."""
    X, target = torch.randn(8, 3, generator=seeded(1)), torch.randn(8, generator=seeded(2))
    ends = []
    for loss in (
        lambda out, x: F.l1_loss(out, target, weight=x.exp()),
        lambda out, x: (x.exp() * (out - target).abs()).sum() / x.exp().sum(),
    ):
        torch.manual_seed(0)
        net, x = nn.Linear(3, 1), torch.linspace(-1, 1, 8).requires_grad_()
        if way == "weight norm":
            net = nn.utils.parametrizations.weight_norm(net)
        y = [*net.parameters()]
        name, options = ("SOBA", {}) if way == "weight norm" else ("F2SA", {"lower_steps": 5})
        optimizer = getattr(bo, name)([x], y, lr=0.1, lower_lr=0.1, **options)

        def lower(*shift, net=net, x=x, y=y, loss=loss):
            return loss(net(X + sum(shift))[:, 0], x) + 0.1 * sum(t.square().sum() for t in y)

        def upper(*shift, net=net):
            return (net(X + sum(shift))[:, 0] - target).square().mean()

        tasks = bo.TensorTasks(torch.linspace(0, 1, 3)[:, None]) if way == "tasks" else None
        if way == "compiled":
            optimizer.compile(backend="eager")
        for _ in range(2):
            optimizer.step(upper, lower, tasks=tasks)
        assert optimizer.diagnostics.keys().isdisjoint({"vectorize_fallback", "compile_fallback"})
        ends.append(flat([x, *y]))
    close(*ends, 1e-12)

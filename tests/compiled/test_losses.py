"""Values that Dynamo reads of a loss: captured steps against eager ones, whatever is read and however it changes."""

import collections
import contextvars
import functools
import math
import random
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo

from ..problems import seeded
from .guards import noticed

pytestmark = pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")

# Torch 2.11 reads less, and words its reasons differently.
NEW = not torch.__version__.startswith("2.11.")
# The first step shows the draws, the second makes the graph; its uses 1, 2, 4, 8 are compared with eager steps.
STEPS, AT = 12, 6  # the last of the steps, and one before which something changes, are by the graph alone
ROWS = torch.randn(4, 3, generator=seeded(1), dtype=torch.float64)
METHODS = {
    "SOBA": (bo.SOBA, {}),  # with second derivatives
    "F2SA": (bo.F2SA, {"lower_steps": 1, "order": 2, "nu": 0.1}),  # with copies of y under vmap
}


def base(x, y, factor=1.0):
    return (factor * (y - x).square()).sum() / 2 + 0.05 * y.square().sum()


class Twin:
    """Return an optimizer, eager or captured, on its own lower loss; it may train the parameters of that loss's net."""

    def __init__(self, make, captured, method="SOBA", **options):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3)
        random.seed(3)
        cls, own = METHODS[method]
        self.x = torch.tensor([0.5, -1.0, 0.2], requires_grad=True)
        self.y = torch.tensor([0.3, 0.1, -0.2], requires_grad=True)
        made = make(self.x, self.y)
        self.loss, self.change, net = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
        self.lower = [self.y, *([] if net is None else net.parameters())]
        self.optimizer = cls([self.x], self.lower, **{"lr": 0.1, "lower_lr": 0.1, **own, **options})
        if captured:
            self.optimizer.compile(backend="eager")

    def upper(self):
        return sum((y - 1).square().sum() for y in self.lower)

    def run(self, steps, at_once=0):
        """Return the results of each step (steps of one run as one), and the reasons for eager steps."""
        left, reasons = [], []
        for k in range(steps - at_once):
            if k == AT and self.change is not None:
                self.change()
            loss = self.optimizer.step(self.upper, self.loss)
            left.append([loss, *(p.detach().clone() for p in (self.x, *self.lower))])
            reasons.append(self.optimizer.diagnostics.get("compile_fallback", ""))
        if at_once:
            losses = self.optimizer.run(self.upper, self.loss, steps=at_once)
            left.append([losses, *(p.detach().clone() for p in (self.x, *self.lower))])
        return left, reasons


def compared(make, rounding=1e-12, steps=STEPS, at_once=0, **options):
    """The reasons of captured steps that are the eager ones, each of them, and how many graphs there are at the end."""
    right, _ = Twin(make, False, **options).run(steps)
    twin = Twin(make, True, **options)
    found, reasons = twin.run(steps, at_once)
    if at_once:
        losses = torch.stack([step[0] for step in right[-at_once:]])
        right[-at_once:] = [[losses, *right[-1][1:]]]
    for k, (mine, theirs) in enumerate(zip(found, right, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=rounding, atol=rounding, msg=f"step {k}: {a} is not {b}")
    return reasons, twin.optimizer.captured_graphs


def captured(make, graphs=1, **options):
    """All steps are captured, in so many graphs."""
    reasons, found = compared(make, **options)
    assert not any(reasons), reasons
    assert found == graphs


def says(reason, found):
    """Return whether one of these words is in it."""
    return any(word in found for word in ((reason,) if isinstance(reason, str) else reason))


def refused(make, reason, first=1, **options):
    """From the first step that cannot be compiled on all are eager, bit for bit, and say why, in one of these words.

    The first of its kind is eager and says nothing: it may be the only one.
    """
    reasons, graphs = compared(make, rounding=0.0 if first < AT else 1e-12, **options)
    told = [says(reason, found) for found in reasons]
    assert told == [k >= first for k in range(len(reasons))], reasons
    assert first >= AT or not graphs


# ------------------------------------------------------------------------------------------------ what losses do


class Cube(torch.autograd.Function):
    """Saves its input; its derivative is another than that of its operations."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a**3 * b

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient * 3 * a.square() * b * 0.9, gradient * a**3

    @staticmethod
    def vmap(info, dims, a, b):
        a, b = (t if dim is None else t.movedim(dim, 0) for t, dim in zip((a, b), dims, strict=True))
        return Cube.apply(a, b), 0


def mlp(x, y):
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    return lambda: (net(ROWS * y)[:, 0] - x.sum()).square().mean() + base(x, y), None, net


def embedding(x, y):
    net, words = nn.Embedding(5, 3), torch.tensor([0, 2, 2, 4])
    return lambda: (net(words) * x - y).square().mean() + base(x, y), None, net


def weight_norm(x, y):
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    return lambda: (net(ROWS * x) - 1).square().mean() + base(x, y), None, net


def checkpointed(x, y):
    return lambda: base(x, y) + checkpoint(lambda w: (y * w).sin().square().sum(), x, use_reentrant=False)


def own_function(x, y):
    return lambda: base(x, y) + Cube.apply(y, x).sin().sum()


def one_hot(x, y):
    classes = torch.tensor([0, 2, 1, 1])
    return lambda: base(x, y) + (F.one_hot(classes, 3).double() @ (y * x)).square().sum()


def lstm(x, y):
    net = nn.LSTM(3, 1)
    return lambda: base(x, y) + (net((ROWS[:2] * y)[:, None])[0] - x.sum()).square().mean(), None, net


def without_gradient(x, y):
    def loss():
        with torch.no_grad():
            target = (y * 2).tanh()
        return base(x, y) + (y * target * x).sum() + (y.detach() * y * x).sum()

    return loss


def numbers_of_tensors(x, y):
    scale = torch.tensor(0.3)
    return lambda: base(x, y, scale.item()) + float(x.detach().sum()) * y.sum() * 0.1, lambda: scale.fill_(0.7)


def slope_of_a_tensor(x, y):
    slope = torch.tensor(0.3)
    return lambda: base(x, y) + F.leaky_relu(y - 1, slope.item()).square().sum(), lambda: slope.fill_(0.5)


def attention(x, y):
    def loss():
        seen = F.scaled_dot_product_attention(ROWS[None] * y, ROWS[None], ROWS[None], dropout_p=0.0)
        return (seen - x).square().mean() + base(x, y)

    return loss


def slope_in_a_leaf(x, y):
    rows = ROWS.clone().requires_grad_()

    def loss():
        (slope,) = torch.autograd.grad((rows @ y).sin().sum(), rows, create_graph=True)
        return base(x, y) + (slope * x).square().mean()

    return loss, lambda: rows.data.mul_(2)


OPERATIONS = (
    mlp, embedding, weight_norm, checkpointed, own_function, one_hot, lstm, without_gradient, numbers_of_tensors,
    slope_of_a_tensor, attention, slope_in_a_leaf,
)  # fmt: skip
# Those with rules of their own for second derivatives, or for copies of y, in whole steps; the others with --slow.
SECOND = (weight_norm, checkpointed, own_function)
COPIED = (own_function, attention)


# Dynamo misses the parameters of a weight norm, which only a whole step finds out.
ALONE = [make for make in OPERATIONS if make is not weight_norm]


@pytest.mark.usually("mlp", "own_function", "attention", "slope_of_a_tensor")
@pytest.mark.parametrize("make", ALONE)
def test_operations_of_losses_are_one_graph(make):
    assert noticed(make) == "value"


@pytest.mark.parametrize(
    ("make", "method"),
    [
        pytest.param(make, method, marks=[pytest.mark.slow] * (make not in (SECOND if method == "SOBA" else COPIED)))
        for method in METHODS
        for make in OPERATIONS
    ],
)
def test_operations_of_losses_are_captured(make, method):
    """With first and second derivatives, for y and for several copies of y at once."""
    captured(make, method=method, check_derivatives=make is not own_function)  # whose backward is wrong


@pytest.mark.parametrize(
    ("method", "tasks"),
    [("SOBA", True), *(pytest.param(*pair, marks=pytest.mark.slow)
     for pair in (("F2SA", False), ("AID", False), ("SOBA", False), ("AID", True), ("F2SA", True)))],
)  # fmt: skip
def test_normalisation_in_training_mode(method, tasks):
    """The buffers go with the steps, by step and by run."""
    cls, options = {**METHODS, "AID": (bo.AID, {"lower_steps": 1, "linear_steps": 1})}[method]
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        x, rows = torch.tensor(0.1, requires_grad=True), torch.randn(5, 6, 3, generator=seeded(5))
        own = {"tasks_per_step": 2, "generator": seeded(2)} if tasks else {}
        optimizer = cls([x], list(net.parameters()), lr=0.05, lower_lr=0.05, **options, **own)

        def upper(rows, net=net):
            return (net(rows)[:, 0] - rows.sum(1) - 0.1).square().mean()

        def lower(rows, net=net, x=x):
            penalty = sum(p.square().sum() for p in net.parameters())
            return (net(rows)[:, 0] - rows.sum(1)).square().mean() + (x.exp() + 1) * penalty

        losses = (upper, lower) if tasks else (bo.Objective(upper, [*rows[1:]]), bo.Objective(lower, [*rows]))
        given = {"tasks": bo.TensorTasks(rows)} if tasks else {}
        if compiled:
            optimizer.compile(backend="eager", fullgraph=True)
        found = [optimizer.step(*losses, **given) for _ in range(10)]
        found += optimizer.run(*losses, steps=10, **given)
        ends.append([torch.stack(found), x.detach(), *(p.detach() for p in net.parameters()), *net.buffers()])
    assert optimizer.captured_graphs == 1
    assert ends[0][-1] == 20  # batches that the normalisation has seen
    torch.testing.assert_close(*ends, rtol=1e-11, atol=1e-12)


# ------------------------------------------------------------------------------------------------ what losses read


class Parent:
    """A loss that reads a number two attributes away."""

    def __init__(self, x, y):
        self.x, self.y, self.settings = x, y, SimpleNamespace(w=1.0)

    def loss(self):
        return base(self.x, self.y, self.settings.w)


class Child(Parent):
    def loss(self):
        return super().loss() * 1.5


class Scaling(nn.Module):
    """A plain attribute, a buffer, and a part of torch's own."""

    def __init__(self):
        super().__init__()
        self.factor, self.act = 1.0, nn.LeakyReLU(1.0)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, t):
        return self.factor * self.act(self.scale * t) * (1.0 if self.act.training else 2.0)


class Doubled(Scaling):
    def forward(self, t):
        return 2 * super().forward(t)


class Norm(nn.LayerNorm):
    """A class of the user's."""


class Held:
    """Ways to have a number."""

    shared = 1.0
    __slots__ = ("slot",)

    def __init__(self):
        self.slot = 1.0

    def current(self):
        return self.slot

    def __call__(self):
        return self.slot

    def __float__(self):
        return self.slot

    def __getitem__(self, name):
        return self.slot

    half = property(lambda self: self.slot / 2)


class Options:
    """A configuration whose entries are attributes."""

    def __init__(self, **entries):
        self.__dict__["entries"] = entries

    def __getattr__(self, name):
        try:
            return self.__dict__["entries"][name]
        except KeyError as error:
            raise AttributeError(name) from error


class Later:
    """Has a number by its class, until it gets its own."""

    w = 1.0


CONFIG = SimpleNamespace()
VARIABLE = contextvars.ContextVar("w", default=1.0)
WEIGHT = 1.0


def current_config():
    return CONFIG


def set_weight(value):
    global WEIGHT
    WEIGHT = value


def numbers():
    """Functions that give a number, and what makes it another; 2 graphs unless a third entry says so."""
    one, late, several = SimpleNamespace(w=1.0), Later(), [SimpleNamespace(w=0.5), SimpleNamespace(w=0.5)]
    holder, double = Held(), torch.full((), 2.0)
    CONFIG.w, Held.shared = 1.0, 1.0
    set_weight(1.0)
    VARIABLE.set(1.0)
    module, many, nested = types.ModuleType("settings"), [1.0] * 100, {"a": {"b": 1.0}}
    module.w = 1.0
    entries, tensors = {"w": 1.0}, [torch.ones(())]
    options, user, slot = Options(w=1.0), collections.UserDict(w=1.0), functools.partial(setattr, holder, "slot", 2.0)
    mapped, chained = types.MappingProxyType(entries), collections.ChainMap({}, entries)
    groups = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).param_groups
    change = functools.partial(setattr, one, "w", 2.0)

    def default(one=one):
        return one.w

    def default_value(w=1.0):
        return w

    def keyword(*, one=one):
        return one.w

    def ours(one, factor):
        return one.w * factor * CONFIG.w

    return {
        "schedule": (lambda: one.w, change),
        "default argument": (default, change),
        "keyword argument": (keyword, change),
        "value of a default argument": (default_value, lambda: setattr(default_value, "__defaults__", (2.0,))),
        "partial": (functools.partial(ours, one, factor=0.5), change),
        "global of a partial": (functools.partial(ours, one, factor=0.5), lambda: setattr(CONFIG, "w", 2.0)),
        "global": (lambda: WEIGHT, lambda: set_weight(2.0)),
        "list of objects": (lambda: sum(o.w for o in several), lambda: setattr(several[1], "w", 2.0)),
        "length of a list": (lambda: sum(o.w for o in several), lambda: several.append(one)),
        "tuple": (lambda fixed=(one,): fixed[0].w, change),
        "dict of objects": (lambda by_name={"a": one}: by_name["a"].w, change),
        "function in a table": (lambda table={"f": holder.current}: table["f"](), slot),
        "entry": (lambda: entries["w"], lambda: entries.update(w=2.0)),
        "nested": (lambda: nested["a"]["b"], lambda: nested["a"].update(b=2.0)),
        "long list": (lambda: many[0], lambda: many.__setitem__(0, 2.0)),
        "item of an object": (lambda: holder["w"], slot),
        "getattr": (lambda: options.w, lambda: options.entries.update(w=2.0)),
        "UserDict": (lambda: user["w"], lambda: user.update(w=2.0)),
        "mapping proxy": (lambda: mapped["w"], lambda: entries.update(w=2.0)),
        "ChainMap": (lambda: chained["w"], lambda: entries.update(w=2.0)),
        "context": (VARIABLE.get, lambda: VARIABLE.set(2.0)),
        "float of an object": (lambda: float(holder), slot),
        "what a function gives": (lambda: current_config().w, lambda: setattr(CONFIG, "w", 2.0)),
        "rate of a group": (lambda: groups[0]["lr"], lambda: groups[0].update(lr=2.0)),
        "module of Python": (lambda: module.w, lambda: setattr(module, "w", 2.0)),
        "class": (lambda: holder.shared, lambda: setattr(Held, "shared", 2.0)),
        "attribute of its own": (lambda: late.w, lambda: setattr(late, "w", 2.0)),
        "slot": (lambda: holder.slot, slot),
        "method": (holder.current, slot),
        "call": (holder, slot),
        "property": (lambda: holder.half, slot),
        "comprehension": (lambda: sum(holder.slot for _ in range(1)), slot),
        "name as a string": (lambda: getattr(holder, "slot"), slot),  # noqa: B009
        "branch": (lambda: 3.0 if one.w > 1.5 else 1.0, change),
        "root": (lambda: math.sqrt(one.w), change),
        "list of tensors": (lambda: tensors[0], lambda: tensors.__setitem__(0, double), 1),
        "value of a tensor": (lambda: tensors[0].item(), lambda: tensors[0].fill_(2.0), 1),
    }


def number(name):
    """Return a loss that reads this number, and what it needs when that changes: a new graph or an argument."""

    def make(x, y):
        read, change, *_ = numbers()[name]
        return lambda: base(x, y, read()), change

    return make, (numbers()[name][2:] or [2])[0]


@pytest.mark.few(18)
@pytest.mark.parametrize("name", numbers())
def test_a_number_that_changes_is_noticed(name):
    """Wherever it is kept."""
    make, graphs = number(name)
    if name in ("context", "float of an object") and not NEW:
        assert "test_losses.py" in noticed(make)
    else:
        assert noticed(make) == ("value" if graphs == 1 else "new graph")


@pytest.mark.usually("value of a tensor")
@pytest.mark.parametrize("name", numbers())
def test_a_number_that_changes(name):
    """It is seen at the next step: in a new graph, or as a value."""
    make, graphs = number(name)
    if name in ("context", "float of an object") and not NEW:
        return refused(make, "test_losses.py")
    captured(make, graphs)


def trained_later(x, y):
    nets = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).requires_grad_(False).eval() for _ in range(2)]
    return lambda: base(x, y) + sum(net(ROWS * y).square().mean() for net in nets), nets[1].train


def evaluated_later(x, y):
    net = Scaling()
    return lambda: base(x, net(y)), net.act.eval


def child_of_a_class(x, y):
    child = Child(x, y)
    return child.loss, lambda: setattr(child.settings, "w", 2.0)


def child_of_a_module(x, y):
    net = Doubled()
    return lambda: base(x, net(y)), lambda: setattr(net, "factor", 2.0)


def part_of_a_module(x, y):
    net = Scaling()
    return lambda: base(x, -net(-y.abs())), lambda: setattr(net.act, "negative_slope", 2.0)


def buffer(x, y):
    net = Scaling()
    return lambda: base(x, net(y)), lambda: setattr(net, "scale", torch.full((), 2.0))


def hook(x, y):
    net = nn.Tanh()
    return lambda: base(x, y) + net(y * x).sum(), lambda: net.register_forward_hook(lambda own, given, out: 2 * out)


def hook_before(x, y):
    net = nn.Tanh()
    return lambda: base(x, y) + net(y * x).sum(), lambda: net.register_forward_pre_hook(lambda own, given: given[0] * 2)


def forward_of_an_object(x, y):
    net = nn.Sequential(nn.Tanh(), nn.Tanh())
    return lambda: base(x, y) + net(y * x).sum(), lambda: setattr(net[1], "forward", lambda t: t * 2)


def parametrised_later(x, y):
    net = nn.Linear(3, 3).requires_grad_(False)

    def change():
        nn.utils.parametrizations.weight_norm(net).requires_grad_(False)
        net.parametrizations.weight.original0.mul_(2)

    return lambda: base(x, y) + net(y * x).square().sum(), change


def data_of_a_tensor(x, y):
    scale = torch.ones(3)
    return lambda: base(x, y, scale), lambda: setattr(scale, "data", torch.full((3,), 2.0))


def set_tensor(x, y):
    scale = torch.ones(3)
    return lambda: base(x, y, scale), lambda: scale.set_(torch.full((3,), 2.0))


def written_tensor(x, y):
    scale = torch.ones(3)
    return lambda: base(x, y, scale), lambda: scale.mul_(2)


def replaced_parameter(x, y):
    net = nn.Linear(3, 3).requires_grad_(False)
    other = nn.Parameter(torch.full((3, 3), 0.3), requires_grad=False)
    return lambda: base(x, y) + net(y * x).square().sum(), lambda: setattr(net, "weight", other)


def assigned_state(x, y):
    net = nn.Linear(3, 3).requires_grad_(False)
    other = {name: 0.9 * value for name, value in net.state_dict().items()}
    return lambda: base(x, y) + net(y * x).square().sum(), lambda: net.load_state_dict(other, assign=True)


def eps_of_a_subclass(x, y):
    net = Norm(3).requires_grad_(False)
    return lambda: base(x, y) + (net(ROWS * y) * x).square().mean(), lambda: setattr(net, "eps", 0.5)


def label_smoothing(x, y):
    loss, classes = nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, 0])
    return lambda: base(x, y) + loss(ROWS * y, classes), lambda: setattr(loss, "label_smoothing", 0.3)


def default_type(x, y):
    third = lambda: (torch.ones(3) / 3).double()  # noqa: E731
    return lambda: base(x, y) + (third() * y * 100).sum(), lambda: torch.set_default_dtype(torch.float32)


def size_of_a_tensor(x, y):
    holder = SimpleNamespace(rows=torch.ones(4))
    change = functools.partial(setattr, holder, "rows", torch.full((6,), 2.0))
    return lambda: base(x, y, holder.rows.sum() / len(holder.rows)), change


def rebound(x, y):
    w = 1.0

    def change():
        nonlocal w
        w = 2.0

    return lambda: base(x, y, w), change


VALUES = [
    (trained_later, 2), (evaluated_later, 2), (child_of_a_class, 2), (child_of_a_module, 2), (part_of_a_module, 2),
    (buffer, 1), (hook, 2), (hook_before, 2), (forward_of_an_object, 2), (parametrised_later, 2),
    (data_of_a_tensor, 1), (set_tensor, 1), (written_tensor, 1), (replaced_parameter, 1), (assigned_state, 1),
    (eps_of_a_subclass, 2), (label_smoothing, 2), (default_type, 2), (size_of_a_tensor, 2), (rebound, 2),
]  # fmt: skip


@pytest.mark.few(10)
@pytest.mark.parametrize(("make", "graphs"), VALUES)
def test_a_value_that_a_loss_reads_is_noticed(make, graphs):
    assert noticed(make) == ("value" if graphs == 1 else "new graph")


@pytest.mark.usually("size_of_a_tensor")
@pytest.mark.parametrize(("make", "graphs"), VALUES)
def test_a_value_that_a_loss_reads_changes(make, graphs):
    captured(make, graphs)


@pytest.mark.usually("mixed")
@pytest.mark.parametrize("kind", ["product", "slope", "mixed"])
def test_a_schedule(kind):
    """The third value is an argument."""
    losses = {
        "product": lambda x, y, w: base(x, y) * w,
        "slope": lambda x, y, w: base(x, y) + F.leaky_relu(y - 1, w).square().sum(),
        "mixed": lambda x, y, w: base(x, y, (w * 2 - 1) / (w + 1)) - w**2 * x.sum() + (y * x * w).pow(2).mul(w) @ y,
    }
    results = []
    for compiled in (False, True):
        values = SimpleNamespace(w=1.0)
        twin = Twin(lambda x, y, values=values: lambda: losses[kind](x, y, values.w), compiled)
        for k in range(16):
            values.w = 1.0 + 0.2 * (k // 4)
            results.append(
                [twin.optimizer.step(twin.upper, twin.loss), twin.x.detach().clone(), twin.y.detach().clone()]
            )
            assert "compile_fallback" not in twin.optimizer.diagnostics
    torch.testing.assert_close(results[:16], results[16:], rtol=1e-12, atol=1e-12)
    assert twin.optimizer.captured_graphs == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_schedule_keeps_the_type_of_the_other_operand(dtype):
    """A number that has become a tensor has no say in the type of a result, and is no less precise."""
    values, kept = SimpleNamespace(w=1.0), [torch.linspace(0, 1, 3, dtype=dtype), torch.tensor(0.7, dtype=dtype)]
    counts, seen = torch.arange(3), []

    def make(x, y):
        def loss():
            parts = [t * values.w for t in (*kept, counts)]
            if not torch.compiler.is_dynamo_compiling():
                seen.append([t.dtype for t in parts])
            return base(x, y) + sum((t.double() * y).sum() for t in parts)

        return loss, lambda: setattr(values, "w", 1.7)

    values.w = 1.0
    first = Twin(make, False).run(STEPS)
    values.w = 1.0
    second = Twin(make, True).run(STEPS)
    torch.testing.assert_close(first[0], second[0], rtol=1e-12, atol=1e-12)
    assert not any(second[1])
    assert seen[0] == [dtype, dtype, torch.float64]


@pytest.mark.usually("number")
@pytest.mark.parametrize("how", ["number", "object", "same"])
def test_recreated_lambdas_are_the_same_losses(how):
    """Until they read something else."""
    results = []
    for compiled in (False, True):
        holder = SimpleNamespace(w=1.0)
        twin = Twin(lambda x, y: None, compiled)
        x, y = twin.x, twin.y
        for k in range(STEPS):
            holder.w = factor = 2.0 if k >= AT and how != "same" else 1.0
            if how == "number":
                lower = lambda factor=factor, x=x, y=y: base(x, y, factor)  # noqa: E731
            else:
                lower = lambda holder=holder, x=x, y=y: base(x, y, holder.w)  # noqa: E731
            results.append([twin.optimizer.step(lambda y=y: (y - 1).square().sum(), lower), y.detach().clone()])
    torch.testing.assert_close(results[:STEPS], results[STEPS:], rtol=1e-12, atol=1e-12)
    assert twin.optimizer.captured_graphs == (1 if how == "same" else 2)


@pytest.mark.usually("F2SA")
@pytest.mark.parametrize("cls", [bo.ITD, bo.F2SA])
def test_a_projection_reads_as_a_loss_does(cls):
    """A radius that changes."""
    results = []
    for compiled in (False, True):
        ball = SimpleNamespace(radius=0.2)
        x, y = (torch.tensor([0.3, 0.1, -0.2], requires_grad=True) for _ in range(2))
        optimizer = cls(
            [x], [y], lr=0.1, lower_lr=0.3, lower_steps=2,
            lower_projection=lambda ys, ball=ball: [t.clamp(-ball.radius, ball.radius) for t in ys],
        )  # fmt: skip
        if compiled:
            optimizer.compile(backend="eager", fullgraph=True)
        for k in range(STEPS):
            ball.radius = 0.2 if k < AT else 0.1
            loss = optimizer.step(lambda y=y: (y - 1).square().sum(), lambda x=x, y=y: base(x, y))
            results.append([loss, x.detach().clone(), y.detach().clone()])
    torch.testing.assert_close(results[:STEPS], results[STEPS:], rtol=1e-12, atol=1e-12)
    assert optimizer.captured_graphs == 2


def test_features_and_starts_of_tasks_read_as_a_loss_does():
    results = []
    for compiled in (False, True):
        values = SimpleNamespace(feature=1.0, start=1.0)
        x, y = (torch.tensor([0.3, 0.1, -0.2], requires_grad=True) for _ in range(2))
        rows = torch.randn(5, 4, 3, generator=seeded(0))
        tasks = bo.TensorTasks(rows)
        one = bo.ITD([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
        other = bo.ITD(
            [x], [y], lr=0.1, lower_lr=0.1, lower_steps=1, tasks_per_step=2, generator=seeded(2),
            lower_init=lambda drawn, values=values, rows=rows: [rows[drawn].mean(1) * values.start],
        )  # fmt: skip
        lower = bo.Objective(
            lambda h, x=x, y=y: (h @ y - 1).square().mean() + base(x, y),
            [*rows],
            features=lambda rows, x=x, values=values: rows * x * values.feature,
        )
        if compiled:
            one.compile(backend="eager", fullgraph=True)
            other.compile(backend="eager", fullgraph=True)
        for k in range(STEPS):
            values.feature, values.start = (1.0, 1.0) if k < AT else (0.5, 2.0)
            loss = one.step(lambda y=y: (y - 1).square().sum(), lower)
            upper = lambda rows, y=y: (rows @ y - 1).square().mean()  # noqa: E731
            error = other.step(upper, lambda rows, x=x, y=y: (rows @ y - x.sum()).square().mean(), tasks=tasks)
            results.append([loss, error, x.detach().clone(), y.detach().clone()])
    torch.testing.assert_close(results[:STEPS], results[STEPS:], rtol=1e-12, atol=1e-12)
    assert (one.captured_graphs, other.captured_graphs) == (2, 2)


@pytest.mark.parametrize("way", ["batch", "loss"])
def test_tensors_that_share_memory_with_a_parameter_move_with_it(way):
    """Also within a run, which writes parameters at its end."""

    def make(x, y):
        seen = y.detach()
        if way == "loss":
            return lambda: base(x, y) + (seen * y * x).sum()
        return bo.Objective(lambda batch: base(x, y) + (batch * y * x).sum(), [seen] * 3)

    assert compared(make, steps=30, at_once=20) == ([""] * 10, 1)


def test_losses_are_read_in_no_other_form_than_before():
    """Batches that are lists or tuples, or have a negative bit that torch has yet to apply, are not the same."""

    def make(x, y):
        complex_rows = torch.complex(ROWS, ROWS + 1).conj()
        batches = [[rows, 1] if k % 2 else (rows, 1) for k, rows in enumerate((*ROWS, *complex_rows.imag))]
        return bo.Objective(lambda b: base(x, y) + (b[0] * y).sum() * (2 if isinstance(b, list) else 1), batches)

    reasons, graphs = compared(make, steps=20)
    assert not any(reasons)
    assert graphs == 4


def test_losses_that_failed_to_compile_stay_eager():
    """Until `compile` is called again: to try at each step whether it can be now would take long."""

    def make(x, y):
        net = nn.Dropout(0.3)
        return lambda: base(x, net(y)), net.eval

    reasons, graphs = compared(make)
    assert all("random" in reason for reason in reasons[1:])
    assert graphs == 0


# ------------------------------------------------------------------------------------------------ refusals


def dropout(x, y):
    net = nn.Dropout(0.3)
    return lambda: base(x, net(y))


def attention_with_dropout(x, y):
    def loss():
        seen = F.scaled_dot_product_attention(ROWS[None] * y, ROWS[None], ROWS[None], dropout_p=0.2)
        return (seen - x).square().mean() + base(x, y)

    return loss


def torch_noise(x, y):
    return lambda: base(x, y, 1 + 0.1 * torch.rand(3))


def own_noise(x, y):
    generator = seeded(5)
    return lambda: base(x, y, 1 + 0.1 * torch.rand(3, generator=generator, dtype=torch.float64))


def python_noise(x, y):
    return lambda: base(x, y, 1 + 0.1 * random.random())


def python_choice(x, y):
    return lambda: base(x, y, random.choice([0.5, 1.0]))


def python_count(x, y):
    return lambda: base(x, y, random.randint(1, 3))


def random_branch(x, y):
    return lambda: base(x, y, 0.5) if random.random() < 0.1 else base(x, y)


def counter(x, y):
    holder = SimpleNamespace(calls=0)

    def loss():
        holder.calls += 1
        return base(x, y, 1 + 0.01 * holder.calls)

    return loss


def list_counter(x, y):
    calls = [0]

    def loss():
        calls[0] += 1
        return base(x, y, 1 + 0.01 * calls[0])

    return loss


def log(x, y):
    values = []

    def loss():
        value = base(x, y)
        values.append(value.detach())
        return value

    return loss


def own_data(x, y):
    rows = iter(torch.linspace(0.5, 1.5, 40))
    return lambda: base(x, y, next(rows, 1.0))


def branch(x, y):
    return lambda: base(x, y) if y.sum() > 0.1 else base(x, y, 1.1)


def list_of_a_tensor(x, y):
    scale = torch.ones(3)
    return lambda: base(x, y, sum(scale.tolist()) / 3)


def array(x, y):
    numbers = np.ones(3)
    return lambda: base(x, y, float(numbers[0])), lambda: numbers.fill(2.0)


def array_as_a_tensor(x, y):
    numbers = np.ones(3)
    return lambda: base(x, y, torch.from_numpy(numbers).sum() / 3), lambda: numbers.fill(2.0)


def average(x, y):
    mean = torch.zeros(3)

    def loss():
        mean.lerp_(y.detach(), 0.1)
        return base(x, y) + (mean * y).sum()

    return loss


def written_row(x, y):
    table = torch.zeros(2, 3)

    def loss():
        table[0] += y.detach()
        return base(x, y) + (table * y).sum()

    return loss


def spectral_norm(x, y):
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    return lambda: base(x, y) + net(ROWS * y).square().mean(), None, net


def slope_in_a_copy(x, y):
    def loss():
        rows = ROWS.clone().requires_grad_()
        (slope,) = torch.autograd.grad((rows @ y).sin().sum(), rows, create_graph=True)
        return base(x, y) + (slope * x).square().mean()

    return loss


def foreign_graph(x, y):
    leaf = torch.ones(3, requires_grad=True)
    twice = leaf * 2
    return lambda: base(x, y, twice)


def rate_of_a_scheduler(x, y):
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
    return lambda: base(x, y, schedule.get_last_lr()[0])


CHANGES = "a loss changes Python values as it runs"
WRITES = "a loss writes into a tensor that is not its own"
HOST = "a value is read on the host"
LINE = "test_losses.py, line "
PYTHON = "a loss draws random numbers (of Python's random)"


REFUSALS = [
    (dropout, "a loss draws random numbers (dropout)", 1),
    (attention_with_dropout, "a loss draws random numbers (scaled_dot_product_attention)", 1),
    (torch_noise, "a loss draws random numbers (rand)", 1),
    (own_noise, "a loss draws random numbers (of a generator)", 1),
    (python_noise, PYTHON, 1),
    (python_choice, PYTHON, 1),
    (python_count, PYTHON, 1),
    (random_branch, LINE, 1),  # the wording depends on the version of torch
    (counter, (CHANGES, LINE), 1),  # names the change or its line, by the version of torch
    (list_counter, CHANGES, 1),
    (log, CHANGES, 1),
    (own_data, CHANGES, 1),
    (branch, HOST, 1),
    (list_of_a_tensor, "tolist", 1),
    (average, WRITES, 1),
    (written_row, WRITES, 1),
    # It replaces its buffers by themselves, which the first step finds out; torch 2.11 reads less of it.
    (spectral_norm, (CHANGES, "Failed to trace builtin operator"), 2),
    (foreign_graph, "a loss uses a tensor with a graph from outside the loss", 1),
    (slope_in_a_copy, "a loss calls requires_grad_()", 1),
    (rate_of_a_scheduler, "which Dynamo cannot trace", 1),
    (array, "a loss reads a NumPy array", 1),
    (array_as_a_tensor, "a loss reads a NumPy array", 1),
]
# Also with a graph of the loss alone.
BY_GUARDS = [(make, reason) for make, reason, first in REFUSALS if first == 1 and make is not attention_with_dropout]


@pytest.mark.parametrize(("make", "reason"), BY_GUARDS)
def test_refusals_of_a_loss_alone(make, reason):
    assert says(reason, noticed(make))


@pytest.mark.usually("counter", "spectral_norm")
@pytest.mark.parametrize(("make", "reason", "first"), REFUSALS)
def test_refusals(make, reason, first):
    method = "F2SA" if make is attention_with_dropout else "SOBA"
    refused(make, reason, first, method=method, check_derivatives=make is not spectral_norm)  # wrong in training mode


def refused_later(x, y):
    net = nn.Dropout(0.3).eval()
    return lambda: base(x, net(y)), net.train


def counted_later(x, y):
    holder = SimpleNamespace(calls=0, on=False)

    def loss():
        if holder.on:
            holder.calls += 1
        return base(x, y, 1 + 0.01 * holder.calls)

    return loss, lambda: setattr(holder, "on", True)


def pruned_later(x, y):
    net = nn.Linear(3, 3).requires_grad_(False)
    change = functools.partial(prune.l1_unstructured, net, "weight", amount=3)
    return lambda: base(x, y) + net(y * x).square().sum(), change


def hooked_parameter(x, y):
    return lambda: base(x, y), lambda: y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@pytest.mark.usually("refused_later", "hooked_parameter")
@pytest.mark.parametrize(
    ("make", "reason", "first"),
    [
        (refused_later, "random numbers", AT),
        (counted_later, (CHANGES, LINE), AT),
        (pruned_later, CHANGES, AT),
        (hooked_parameter, "a parameter has a hook", AT + 1),  # the first of its kind is eager, and may be the only one
    ],
)
def test_later_refusals(make, reason, first):
    """From the step on at which it begins."""
    refused(make, reason, first)

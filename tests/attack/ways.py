"""Ways for a loss to have a number, and ways to reach it: every pair of them is a case; and whole losses."""

import array
import collections
import contextvars
import ctypes
import dataclasses
import enum
import functools
import math
import multiprocessing as mp
import os
import sys
import threading
import time
import types
import weakref
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from ..compiled import test_losses as known
from ..compiled.test_losses import ROWS, base

# ------------------------------------------------------------------------------------------------ where a number is

VARIABLE = contextvars.ContextVar("attacked", default=1.0)
GLOBAL = {"w": 1.0}
NUMBER = 1.0


def set_number(value):
    global NUMBER
    NUMBER = value


class Slots:
    __slots__ = ("w",)


class Class:
    w = 1.0


class Descriptor:
    def __get__(self, owner, kind=None):
        return owner.inner

    def __set__(self, owner, value):
        owner.inner = value


class Described:
    w = Descriptor()

    def __init__(self):
        self.inner = 1.0


class Property:
    def __init__(self):
        self.inner = 1.0

    @property
    def w(self):
        return self.inner


class Getattr:
    def __init__(self):
        self.__dict__["entries"] = {"w": 1.0}

    def __getattr__(self, name):
        return self.__dict__["entries"][name]


class Getitem:
    def __init__(self):
        self.inner = 1.0

    def __getitem__(self, name):
        return self.inner


class Float:
    def __init__(self):
        self.inner = 1.0

    def __float__(self):
        return self.inner


class Mode(enum.Enum):
    LOW = 1.0
    HIGH = 2.0


@dataclasses.dataclass
class Data:
    w: float = 1.0


Pair = collections.namedtuple("Pair", "w other")


def holders():
    """Functions that give 1.0, and what makes it 2.0."""
    space, slots, described, inner, item = SimpleNamespace(w=1.0), Slots(), Described(), Property(), Getitem()
    entries, nested, items, user = {"w": 1.0}, {"a": [{"b": 1.0}]}, [1.0], collections.UserDict(w=1.0)
    queue, default, ordered = collections.deque([1.0]), collections.defaultdict(float, w=1.0), collections.OrderedDict()
    chain, number, module, data = collections.ChainMap({}, entries), Float(), types.ModuleType("settings"), Data()
    config, ones, scalar, tensor = Getattr(), np.ones(2), torch.tensor(1.0), torch.ones(())
    pair, mode, local = SimpleNamespace(p=Pair(1.0, 0)), SimpleNamespace(m=Mode.LOW), threading.local()
    net, groups = nn.LeakyReLU(1.0), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).param_groups
    other, count, text, flag = SimpleNamespace(inner=space), SimpleNamespace(n=1), SimpleNamespace(t="one"), [False]
    slots.w = module.w = local.w = Class.w = 1.0
    ordered["w"] = GLOBAL["w"] = 1.0
    set_number(1.0)
    VARIABLE.set(1.0)
    os.environ["ATTACKED"] = "1.0"
    weak, free = weakref.ref(data), 1.0

    def set_free():
        nonlocal free
        free = 2.0

    return {
        "attribute": (lambda: space.w, lambda: setattr(space, "w", 2.0)),
        "attribute of an attribute": (lambda: other.inner.w, lambda: setattr(space, "w", 2.0)),
        "replaced object": (lambda: other.inner.w, lambda: setattr(other, "inner", SimpleNamespace(w=2.0))),
        "slot": (lambda: slots.w, lambda: setattr(slots, "w", 2.0)),
        "class": (lambda: Class.w, lambda: setattr(Class, "w", 2.0)),
        "descriptor": (lambda: described.w, lambda: setattr(described, "w", 2.0)),
        "property": (lambda: inner.w, lambda: setattr(inner, "inner", 2.0)),
        "getattr": (lambda: config.w, lambda: config.entries.update(w=2.0)),
        "getitem": (lambda: item["w"], lambda: setattr(item, "inner", 2.0)),
        "float": (lambda: float(number), lambda: setattr(number, "inner", 2.0)),
        "data class": (lambda: data.w, lambda: setattr(data, "w", 2.0)),
        "named tuple": (lambda: pair.p.w, lambda: setattr(pair, "p", Pair(2.0, 0))),
        "enumeration": (lambda: mode.m.value, lambda: setattr(mode, "m", Mode.HIGH)),
        "entry": (lambda: entries["w"], lambda: entries.update(w=2.0)),
        "get": (lambda: entries.get("w", 0.0), lambda: entries.update(w=2.0)),
        "missing entry": (lambda: entries.get("v", 1.0), lambda: entries.update(v=2.0)),
        "nested": (lambda: nested["a"][0]["b"], lambda: nested["a"][0].update(b=2.0)),
        "item": (lambda: items[0], lambda: items.__setitem__(0, 2.0)),
        "length": (lambda: 1.0 * len(items), lambda: items.append(0.0)),
        "user dictionary": (lambda: user["w"], lambda: user.update(w=2.0)),
        "queue": (lambda: queue[0], lambda: queue.appendleft(2.0)),
        "default dictionary": (lambda: default["w"], lambda: default.update(w=2.0)),
        "ordered dictionary": (lambda: ordered["w"], lambda: ordered.update(w=2.0)),
        "chain": (lambda: chain["w"], lambda: entries.update(w=2.0)),
        "module of Python": (lambda: module.w, lambda: setattr(module, "w", 2.0)),
        "global": (lambda: NUMBER, lambda: set_number(2.0)),
        "global entry": (lambda: GLOBAL["w"], lambda: GLOBAL.update(w=2.0)),
        "free variable": (lambda: free, set_free),
        "context": (VARIABLE.get, lambda: VARIABLE.set(2.0)),
        "environment": (lambda: float(os.environ["ATTACKED"]), lambda: os.environ.update(ATTACKED="2.0")),
        "thread": (lambda: local.w, lambda: setattr(local, "w", 2.0)),
        "weak reference": (lambda: weak().w, lambda: setattr(data, "w", 2.0)),
        "integer": (lambda: 1.0 * count.n, lambda: setattr(count, "n", 2)),
        "text": (lambda: 2.0 if text.t == "two" else 1.0, lambda: setattr(text, "t", "two")),
        "flag": (lambda: 2.0 if flag[0] else 1.0, lambda: flag.__setitem__(0, True)),
        "attribute of torch's module": (lambda: net.negative_slope, lambda: setattr(net, "negative_slope", 2.0)),
        "mode of a module": (lambda: 1.0 if net.training else 2.0, net.eval),
        "rate": (lambda: groups[0]["lr"], lambda: groups[0].update(lr=2.0)),
        "array": (lambda: float(ones[0]), lambda: ones.fill(2.0)),
        "tensor": (lambda: tensor, lambda: tensor.fill_(2.0)),
        "data of a tensor": (lambda: tensor, lambda: setattr(tensor, "data", torch.tensor(2.0))),
        "item of a tensor": (lambda: scalar.item(), lambda: scalar.fill_(2.0)),
        "gradient mode": (lambda: 1.0, lambda: None),  # nothing changes
    }


# ------------------------------------------------------------------------------------------------ how it is reached


def called(read, factor=1.0):
    return read() * factor


class Reader:
    """Reaches a number in ways of a class."""

    def __init__(self, read):
        self.read = read

    def method(self):
        return self.read()

    def __call__(self):
        return self.read()

    @staticmethod
    def still(read):
        return read()

    @classmethod
    def made(cls, read):
        return cls(read).method()

    @property
    def value(self):
        return self.read()

    part = functools.partialmethod(lambda self, factor: self.read() * factor, 1.0)

    def __enter__(self):
        return self.read()

    def __exit__(self, *error):
        return None

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([self.read()])


class Heir(Reader):
    def method(self):
        return super().method()


class Forward(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, t):
        return t * self.read()


class Backward(Forward):
    def forward(self, t):
        return super().forward(t)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments)

    return wrapper


def yielding(read):
    yield read()


def recursive(read, depth):
    return read() if depth == 0 else recursive(read, depth - 1)


def attempted(read):
    try:
        return read()
    finally:
        pass


def with_context(reader):
    with reader as value:
        return value


def module_of(cls):
    def way(read):
        net = cls(read)
        return lambda: net(torch.ones(()))

    return way


def hooked(read):
    net = nn.Identity()
    net.register_forward_hook(lambda own, given, out: out * read())
    return lambda: net(torch.ones(()))


WAYS = {
    "closure": lambda read: lambda: read(),
    "default": lambda read: lambda read=read: read(),
    "keyword": lambda read: lambda *, read=read: read(),
    "partial": lambda read: functools.partial(called, read, factor=1.0),
    "partial of a partial": lambda read: functools.partial(functools.partial(called, read), 1.0),
    "method": lambda read: Reader(read).method,
    "super": lambda read: Heir(read).method,
    "call": Reader,
    "static": lambda read: lambda: Reader.still(read),
    "class method": lambda read: lambda: Reader.made(read),
    "property": lambda read: (lambda reader: lambda: reader.value)(Reader(read)),
    "partial method": lambda read: Reader(read).part,
    "context": lambda read: (lambda reader: lambda: with_context(reader))(Reader(read)),
    "iteration": lambda read: (lambda reader: lambda: sum(reader))(Reader(read)),
    "module": module_of(Forward),
    "heir of a module": module_of(Backward),
    "hook": hooked,
    "decorated": lambda read: decorated(read),
    "generator": lambda read: lambda: next(yielding(read)),
    "recursion": lambda read: lambda: recursive(read, 2),
    "attempt": lambda read: lambda: attempted(read),
    "comprehension": lambda read: lambda: sum([read() for _ in range(1)]),
    "list of functions": lambda read: (lambda reads: lambda: reads[0]())([read]),
    "table of functions": lambda read: (lambda reads: lambda: reads["f"]())({"f": read}),
    "tuple of objects": lambda read: (lambda parts: lambda: parts[0].method())((Reader(read),)),
    "map": lambda read: lambda: sum(map(lambda own: own(), [read])),  # noqa: C417
    "inner function": lambda read: lambda: (lambda: read())(),
}


def pair(holder, way):
    """A loss with a number that is so held and so reached, as `known.Twin` makes it."""

    def make(x, y):
        read, change = holders()[holder]
        reach = WAYS[way](read)
        return lambda: base(x, y, reach()), change

    return make


# ------------------------------------------------------------------------------------------------ whole losses


def exponential_average(x, y):
    net, slow = nn.Linear(3, 2).requires_grad_(False), nn.Linear(3, 2).requires_grad_(False)

    def change():
        for own, other in zip(slow.parameters(), net.parameters(), strict=True):
            own.data = 0.9 * own.data + 0.1 * other.data

    return lambda: base(x, y) + (slow(ROWS * y) - net(ROWS * x)).square().mean(), change


def part_replaced(x, y):
    net = nn.Sequential(nn.Tanh(), nn.Tanh())
    return lambda: base(x, y) + net(y * x).sum(), lambda: net.__setitem__(1, nn.Sigmoid())


def part_added(x, y):
    net = nn.ModuleList([nn.Tanh()])
    return lambda: base(x, y) + sum(part(y * x).sum() for part in net), lambda: net.append(nn.Sigmoid())


def hook_removed(x, y):
    net = nn.Tanh()
    handle = net.register_forward_hook(lambda own, given, out: 2 * out)
    return lambda: base(x, y) + net(y * x).sum(), handle.remove


def hook_for_all_modules(x, y):
    net, handles = nn.Tanh(), []

    def change():
        handles.append(nn.modules.module.register_module_forward_hook(lambda own, given, out: 2 * out))

    def loss():
        return base(x, y) + net(y * x).sum()

    loss.undo = lambda: [handle.remove() for handle in handles]
    return loss, change


def backward_hook_for_all_modules(x, y):
    net, handles = nn.Tanh(), []

    def change():
        hook = lambda own, before, after: (before[0] / 2,)  # noqa: E731
        handles.append(nn.modules.module.register_module_full_backward_hook(hook))

    def loss():
        return base(x, y) + net(y * x).sum()

    loss.undo = lambda: [handle.remove() for handle in handles]
    return loss, change


def state_loaded(x, y):
    net = nn.Linear(3, 3).requires_grad_(False)
    other = {name: 0.9 * value for name, value in net.state_dict().items()}
    return lambda: base(x, y) + net(y * x).square().sum(), lambda: net.load_state_dict(other)


def other_precision(x, y):
    net = nn.Linear(3, 3).requires_grad_(False)
    return lambda: base(x, y) + net((y * x).to(net.weight.dtype)).square().sum().double(), net.float


def other_layout(x, y):
    net, images = nn.Conv2d(2, 2, 2).requires_grad_(False), torch.randn(1, 2, 3, 3)
    change = functools.partial(net.to, memory_format=torch.channels_last)
    return lambda: base(x, y) + (net(images * y[0]) * x[0]).square().sum(), change


def other_size(x, y):
    holder = SimpleNamespace(rows=ROWS)
    return lambda: base(x, y) + (holder.rows @ y).square().mean(), lambda: setattr(holder, "rows", ROWS[:2])


def method_replaced(x, y):
    reader = Reader(lambda: 1.0)
    return lambda: base(x, y, reader.method()), lambda: setattr(reader, "method", lambda: 2.0)


def class_replaced(x, y):
    reader = Reader(lambda: 1.0)
    twice = type("Twice", (Reader,), {"method": lambda self: 2.0})
    return lambda: base(x, y, reader.method()), lambda: setattr(reader, "__class__", twice)


def code_replaced(x, y):
    def factor():
        return 1.0

    def twice():
        return 2.0

    return lambda: base(x, y, factor()), lambda: setattr(factor, "__code__", twice.__code__)


def function_of_a_module_replaced(x, y):
    module = types.ModuleType("functions")
    module.factor = lambda: 1.0
    return lambda: base(x, y, module.factor()), lambda: setattr(module, "factor", lambda: 2.0)


def tied_later(x, y):
    one, other = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3).requires_grad_(False)
    return (
        lambda: base(x, y) + (one(y * x) - other(y)).square().sum(),
        lambda: setattr(other, "weight", one.weight),
    )


def buffer_registered_again(x, y):
    net = nn.Module()
    net.register_buffer("scale", torch.ones(3))
    return lambda: base(x, y, net.scale), lambda: net.register_buffer("scale", torch.full((3,), 2.0))


def trained_later(x, y):
    net = nn.Linear(3, 3)
    net.requires_grad_(False)
    return lambda: base(x, y) + net(y * x).square().sum(), lambda: net.requires_grad_(True)


def unparametrised(x, y):
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).requires_grad_(False)
    change = functools.partial(nn.utils.parametrize.remove_parametrizations, net, "weight")
    return lambda: base(x, y) + (net(ROWS * y) * x[:2]).square().mean(), change


def dropout_switched_off(x, y):
    net = nn.Dropout(0.3)
    return lambda: base(x, y) + (net(y) * x).square().sum(), net.eval


def rate_of_dropout(x, y):
    net = nn.Dropout(0.0)
    return lambda: base(x, y) + (net(y) * x).square().sum(), lambda: setattr(net, "p", 0.5)


def momentum_of_a_normalisation(x, y):
    net = nn.BatchNorm1d(3, affine=False)
    change = functools.partial(setattr, net, "momentum", 0.5)
    return lambda: base(x, y) + (net(ROWS * y) * x).square().mean() + (net.running_mean * y).sum(), change


def subset_of_indices(x, y):
    index = torch.tensor([0, 1])
    return lambda: base(x, y) + y[index].square().sum(), lambda: index.add_(1)


def boolean_mask(x, y):
    mask = torch.tensor([True, False, True])
    return lambda: base(x, y) + torch.where(mask, y, 0.0).square().sum(), lambda: mask.logical_not_()


def mean_of_some(x, y):
    names = {"a"}
    parts = {"a": lambda: y.sum(), "b": lambda: (y * x).sum()}
    return lambda: base(x, y) + sum(part() for name, part in parts.items() if name in names), lambda: names.add("b")


def own_batch(x, y):
    holder = SimpleNamespace(batch=ROWS[0])
    return lambda: base(x, y) + (holder.batch * y).sum(), lambda: setattr(holder, "batch", ROWS[1])


def sparse_matrix(x, y):
    holder = SimpleNamespace(matrix=torch.eye(3).to_sparse())
    change = functools.partial(setattr, holder, "matrix", (2 * torch.eye(3)).to_sparse())
    return lambda: base(x, y) + (holder.matrix @ y[:, None]).square().sum(), change


def loss_of_a_schedule(x, y):
    schedule = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), lambda k: 1.0 + k
    )

    def change():
        schedule.optimizer.step()
        schedule.step()

    return lambda: base(x, y, schedule.optimizer.param_groups[0]["lr"]), change


NEW = [
    exponential_average, part_replaced, part_added, hook_removed, hook_for_all_modules, state_loaded, other_precision,
    other_layout, other_size, method_replaced, class_replaced, code_replaced, function_of_a_module_replaced, tied_later,
    buffer_registered_again, trained_later, unparametrised, dropout_switched_off, rate_of_dropout,
    momentum_of_a_normalisation, subset_of_indices, boolean_mask, mean_of_some, own_batch, sparse_matrix,
    loss_of_a_schedule, backward_hook_for_all_modules,
]  # fmt: skip
OLD = [
    known.trained_later, known.evaluated_later, known.child_of_a_class, known.child_of_a_module,
    known.part_of_a_module, known.buffer, known.hook, known.hook_before, known.forward_of_an_object,
    known.parametrised_later, known.data_of_a_tensor, known.set_tensor, known.written_tensor, known.replaced_parameter,
    known.assigned_state, known.eps_of_a_subclass, known.label_smoothing, known.default_type, known.size_of_a_tensor,
    known.rebound, known.refused_later, known.counted_later, known.pruned_later, known.hooked_parameter, known.dropout,
    known.torch_noise, known.own_noise, known.python_noise, known.python_choice, known.random_branch, known.counter,
    known.list_counter, known.log, known.own_data, known.branch, known.average, known.foreign_graph, known.mlp,
    known.one_hot, known.checkpointed, known.own_function, known.lstm, known.without_gradient,
]  # fmt: skip


# ------------------------------------------------------------------------------------------------ odd things


class Meta(type):
    w = 1.0


class WithMeta(metaclass=Meta):
    pass


class Truth:
    def __init__(self):
        self.w = 1.0

    def __eq__(self, other):
        return self.w == other

    def __bool__(self):
        return self.w == 1.0

    __hash__ = None


class Cached:
    def __init__(self):
        self.inner = 1.0

    @functools.cached_property
    def w(self):
        return self.inner


class Missing(dict):
    def __missing__(self, name):
        return 1.0


class Attributes(dict):
    __getattr__ = dict.__getitem__


class List(list):
    pass


def odd():
    """Return rarer holders than `holders`; each is reached by a closure."""
    o, here, thing = SimpleNamespace(w=1.0, name="a", a=1.0, b=2.0, n=1), SimpleNamespace(), object()
    shared, number, numbers, raw = mp.Value("d", 1.0), ctypes.c_double(1.0), array.array("d", [1.0]), bytearray(b"\x01")
    some, entries, cached, truth, listed = {1.0}, {"a": 1.0, "b": 2.0}, Cached(), Truth(), List([1.0])
    missing, attributes, arrays, holder = Missing(), Attributes(w=1.0), {"a": np.ones(2)}, np.array(1.0)
    start, part = [time.monotonic()], functools.partial(lambda w: w, w=1.0)
    Meta.w = 1.0
    sys.attacked = 1.0
    here.part, here.cut, here.kind, here.nan, here.zero, here.thing = range(1), slice(0, 1), 1, math.nan, 0.0, thing
    here.some, here.array, here.function, here.complex = frozenset([1.0]), np.float64(1.0), math.floor, 1 + 0j
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)

    class First:
        def factor(self):
            return 1.0

    class Second:
        def factor(self):
            return 2.0

    class Heirs(First):
        pass

    heir = Heirs()

    def default(w=1.0):
        return w

    def keyword(*, w=1.0):
        return w

    def attribute():
        return attribute.w

    attribute.w = 1.0

    def outer():
        w = 1.0
        return lambda: w

    free = outer()

    def uncached():
        cached.inner = 2.0
        del cached.w

    return {
        "shared memory": (lambda: shared.value, lambda: setattr(shared, "value", 2.0)),
        "number of C": (lambda: number.value, lambda: setattr(number, "value", 2.0)),
        "array of Python": (lambda: numbers[0], lambda: numbers.__setitem__(0, 2.0)),
        "bytes": (lambda: 1.0 * raw[0], lambda: raw.__setitem__(0, 2)),
        "set": (lambda: max(some), lambda: some.add(2.0)),
        "frozen set": (lambda: max(here.some), lambda: setattr(here, "some", frozenset([2.0]))),
        "module sys": (lambda: sys.attacked, lambda: setattr(sys, "attacked", 2.0)),
        "cached property": (lambda: cached.w, uncached),
        "array without dimensions": (holder.item, lambda: holder.fill(2.0)),
        "scalar of NumPy": (lambda: here.array, lambda: setattr(here, "array", np.float64(2.0))),
        "array in a dictionary": (lambda: arrays["a"].mean(), lambda: arrays["a"].fill(2.0)),
        "number of entries": (lambda: len(entries) / 2, lambda: entries.update(c=1.0)),
        "order of entries": (lambda: next(iter(entries.values())), lambda: entries.update(a=entries.pop("a"))),
        "name of an attribute": (lambda: getattr(o, o.name), lambda: setattr(o, "name", "b")),
        "class of a class": (lambda: WithMeta.w, lambda: setattr(Meta, "w", 2.0)),
        "kind of an object": (lambda: 2.0 if isinstance(o.n, str) else 1.0, lambda: setattr(o, "n", "")),
        "attribute that comes": (lambda: 2.0 if hasattr(o, "new") else 1.0, lambda: setattr(o, "new", 1)),
        "attribute that goes": (lambda: 1.0 if hasattr(o, "a") else 2.0, lambda: delattr(o, "a")),
        "equality": (lambda: 1.0 if truth == 1.0 else 2.0, lambda: setattr(truth, "w", 2.0)),
        "truth": (lambda: 1.0 if truth else 2.0, lambda: setattr(truth, "w", 2.0)),
        "threads": (lambda: 1.0 * torch.get_num_threads(), lambda: torch.set_num_threads(2)),
        "time": (lambda: 1.0 if time.monotonic() - start[0] < 1e6 else 2.0, lambda: start.__setitem__(0, -1e9)),
        "default": (lambda: default(), lambda: setattr(default, "__defaults__", (2.0,))),
        "keyword": (lambda: keyword(), lambda: setattr(keyword, "__kwdefaults__", {"w": 2.0})),
        "attribute of a function": (lambda: attribute(), lambda: setattr(attribute, "w", 2.0)),
        "cell": (lambda: free(), lambda: setattr(free.__closure__[0], "cell_contents", 2.0)),
        "keywords of a partial": (lambda: part(), lambda: part.keywords.update(w=2.0)),
        "function of C": (lambda: 1.0 * here.function(1.5), lambda: setattr(here, "function", math.ceil)),
        "heir of a list": (lambda: listed[0], lambda: listed.__setitem__(0, 2.0)),
        "missing": (lambda: missing["w"], lambda: missing.update(w=2.0)),
        "attributes of a dictionary": (lambda: attributes.w, lambda: attributes.update(w=2.0)),
        "range": (lambda: 1.0 * len(here.part), lambda: setattr(here, "part", range(2))),
        "slice": (lambda: sum([1.0, 1.0][here.cut]), lambda: setattr(here, "cut", slice(0, 2))),
        "complex": (lambda: here.complex.real, lambda: setattr(here, "complex", 2 + 0j)),
        "not a number": (lambda: 1.0 if here.nan != here.nan else 2.0, lambda: setattr(here, "nan", 0.0)),
        "sign of zero": (lambda: 1.5 - 0.5 * math.copysign(1, here.zero), lambda: setattr(here, "zero", -0.0)),
        "type of a number": (lambda: 2.0 if isinstance(here.kind, float) else 1.0, lambda: setattr(here, "kind", 1.0)),
        # Not seen by torch's guards:
        "method of a base class": (lambda: heir.factor(), lambda: setattr(First, "factor", lambda self: 2.0)),
        "bases of a class": (lambda: heir.factor(), lambda: setattr(Heirs, "__bases__", (Second,))),
        "identity": (lambda: 1.0 if here.thing is thing else 2.0, lambda: setattr(here, "thing", object())),
    }


def odd_one(name):
    """A loss that reads one of them."""

    def make(x, y):
        read, change = odd()[name]
        return lambda: base(x, y, read()), change

    return make

"""A backend for small graphs on a CPU: Inductor's code as a list of calls, whose small results keep their memory.

A small step is one kernel with a hundred and more intermediate results of a few numbers; to allocate these, one by one
and at every call, takes several times as long as the kernel. What Inductor has written is read as Python here, which
depends on the version of torch: what is not understood runs as Inductor has compiled it.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import cycle
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.fx import GraphModule

from .form import Form, picked
from .outline import written_into

__all__ = ["TURNS", "CallList", "Direct", "is_understood", "small_cpu"]

FIRST, LAST = (2, 11), (2, 15)  # versions of torch whose code was looked at

BYTES = 2**22  # of what is kept of a function
TURNS = 8  # calls that follow each other, whose results have memory of their own
ENTRIES = 2**14  # of an intermediate result that is kept
DEPTH = 8  # of the wrappers around what Inductor has written
RETURNED, ALLOCATION, VIEW = "return", "empty_strided_cpu", "reinterpret_tensor"
CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")


def small_cpu(backend: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """The same backend, but for what it gives of graphs of CPU tensors that write into none of their arguments.

    Such a function is called as a list of calls once it has given the same numbers so. Only for versions of torch
    whose generated code was looked at.
    """

    def compiled(module: GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        found = backend(module, examples)
        writes = any(node.op == "placeholder" for node in written_into(module.graph))  # once for each call
        if writes or not is_understood() or not all(t.is_cpu for t in examples):
            return found
        return Direct(found)

    return compiled


def is_understood() -> bool:
    """Whether the code that this version of torch generates was looked at."""
    major, minor, *_ = torch.__version__.split(".")
    return FIRST <= (int(major), int(minor)) <= LAST


class Direct:
    """What Inductor has compiled, without the layers around it once calls have shown that they change nothing."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled: Callable[..., Any] | None = compiled
        self._inner: Callable[..., Any] | None = None

    @property
    def calls(self) -> CallList | None:
        """What is left without them."""
        return self._inner if self._compiled is None and isinstance(self._inner, CallList) else None

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        if self._compiled is None:
            assert self._inner is not None
            found: Sequence[Tensor] = self._inner([*values])
            return found
        outputs: Sequence[Tensor] = self._compiled(*values)
        if self._inner is None:
            inner = written(self._compiled)
            self._inner = None if inner is None else listed(inner, values)
            if self._inner is None:
                self._inner = self._compiled  # which is all there is
                return outputs
            first, second = (self._inner([*values]) for _ in range(2))
            if _alike(outputs, first, values) and _alike(first, second, values):
                self._compiled = None
        return outputs


def _alike(outputs: Sequence[Any], others: Sequence[Any], values: Sequence[Tensor]) -> bool:
    """Whether all are tensors, the same bit for bit, and share memory alike, with each other and with these values."""
    if len(outputs) != len(others) or not all(isinstance(t, Tensor) for t in (*outputs, *others)):
        return False
    forms = [[(t.shape, t.stride(), t.dtype, t.device, t.storage_offset()) for t in some] for some in (outputs, others)]
    places = [[_place(t) for t in (*values, *some)] for some in (outputs, others)]
    apart = {*places[0]} & {*places[1]} <= {*map(_place, values), 0}
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(outputs, others, strict=True))
    first, second = ([*map(some.index, some)] for some in places)
    return forms[0] == forms[1] and first == second and apart and same


def written(compiled: Callable[..., Any]) -> Callable[[list[Tensor]], Any] | None:
    """What Inductor has written, out of what ``torch._inductor.compile`` returned; None if it is not found, or twice.

    It takes a list of arguments, which it empties.
    """
    found: list[Any] = []
    seen, around = set[int](), [compiled]
    for _ in range(DEPTH):
        inner = []
        for outer in around:
            own = vars(outer).get("current_callable") if hasattr(outer, "__dict__") else None
            if own is not None and own not in found:
                found.append(own)
            inner += [each for each in _inside(outer) if id(each) not in seen]
        around = list({id(each): each for each in inner}.values())
        seen.update(map(id, around))
    return found[0] if len(found) == 1 else None


def _inside(outer: Any) -> Iterator[Any]:
    """What a function calls, or an object."""
    cells = [cell.cell_contents for cell in getattr(outer, "__closure__", None) or () if cell != types.CellType()]
    for value in (*cells, *getattr(outer, "__dict__", {}).values()):
        if callable(value) and not isinstance(value, (type, types.ModuleType)):
            yield value


def listed(call: Callable[..., Any], example: Sequence[Tensor]) -> CallList | None:
    """The same function as a list of calls, of tensors like these; None if it is not of a known form.

    Args:
        call: the Python wrapper that Inductor has written around its kernels.
        example: arguments, of the sizes and strides that it is for.
    """
    function: Any = getattr(call, "__func__", call)
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or ALLOCATION not in space or "__file__" not in space:
        return None
    with open(space["__file__"]) as file:
        tree = ast.parse(file.read())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    text = next((node for node in functions if node.lineno == code.co_firstlineno), None)

    def again(new: frozenset[int] | None = None) -> CallList:
        assert text is not None
        return _Listing(text, space, new).function(example, again)

    try:
        return None if text is None else again()
    except _Unknown:
        return None


class _Unknown(Exception):
    """The code has a form that is not known."""


class _Aliases:
    """Names that may stand for the same memory."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def root(self, name: str) -> str:
        while self.of.setdefault(name, name) != name:
            name = self.of[name]
        return name

    def join(self, names: list[str]) -> None:
        for name in names[1:]:
            self.of[self.root(name)] = self.root(names[0])


class _Listing:
    """Statements one after the other, without a branch, as calls on the entries of a list.

    Args:
        text: of a function.
        space: where it stands.
        new: numbers of the results that are new tensors at every call. Default: all.

    Attributes:
        entries: what the list holds before the calls: constants, and what keeps its memory.
        calls: of a function, on entries with these numbers, whose result is an entry of this number.
        slots: the entry of each name.
    """

    def __init__(self, text: ast.FunctionDef, space: dict[str, Any], new: frozenset[int] | None = None) -> None:
        self.space, self.entries, self.calls = space, list[Any](), list[tuple[Any, tuple[int, ...], int]]()
        self.slots: dict[str, int] = {}
        self.fixed = set[int]()  # entries that are known before the calls
        self.results: tuple[int, ...] = ()
        self.given, self.left, self.large = 0, BYTES, False
        own, self.arguments = text.body, text.args.args[-1].arg
        names = {name for s in own if isinstance(s, ast.Assign) for t in s.targets for name in _names(t)}
        self.aliases = _Aliases()
        for statement in own:
            if "self" in _names(statement) or not isinstance(statement, (ast.Assign, ast.Expr, ast.Delete, ast.Return)):
                raise _Unknown
            used = [name for name in _names(statement) if name in names]
            if isinstance(statement, ast.Return):
                results = enumerate(getattr(statement.value, "elts", ()))
                fresh = {name for i, result in results if new is None or i in new for name in _names(result)}
                self.aliases.join([RETURNED, *fresh.intersection(names)])
            elif isinstance(statement, ast.Assign) and _target(statement) is None:
                self.aliases.join([RETURNED, *used])
            elif isinstance(statement, ast.Assign) and _called(statement.value) != ALLOCATION:
                self.aliases.join(used)
        for statement in own:
            self._add(statement)

    def function(self, example: Sequence[Tensor], again: Callable[[frozenset[int]], CallList]) -> CallList:
        """The calls as a function of the arguments, which have to be like these."""
        if self.given != len(example):
            raise _Unknown
        calls = [(function, picked(operands), slot) for function, operands, slot in self.calls]
        return CallList(self.entries, calls, picked(self.results), example, again)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            for name in (name for target in statement.targets for name in _names(target)):
                slot = self.slots.pop(name)
                if self.large and slot >= self.given and slot not in {*self.fixed, *self.slots.values()}:
                    self.calls.append((_nothing, (), slot))
        elif isinstance(statement, ast.Return):
            value = statement.value
            if not isinstance(value, ast.Tuple):
                raise _Unknown
            self.results = tuple(map(self._entry, value.elts))
        elif isinstance(statement, ast.Expr):
            called = _called(statement.value)
            if called not in CHECKS and ast.unparse(statement) != f"{self.arguments}.clear()":
                self._entry(statement.value)
        elif isinstance(statement, ast.Assign):
            self._assign(statement)

    def _assign(self, statement: ast.Assign) -> None:
        target, value = _target(statement), statement.value
        if isinstance(value, ast.Name) and value.id == self.arguments and not self.entries:
            for name in _names(statement.targets[0]):
                self.slots[name] = self._new(None)
            self.given = len(self.entries)
        elif target is None:
            raise _Unknown
        elif _called(value) == ALLOCATION:
            assert isinstance(value, ast.Call)
            self.slots[target] = self._allocated(target, value)
        else:
            self.slots[target] = self._entry(value)

    def _allocated(self, name: str, value: ast.Call) -> int:
        """A new tensor, made here if it may be kept."""
        sizes, strides, dtype = map(self._literal, value.args)
        entries = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        small = entries <= ENTRIES and 8 * entries <= self.left
        self.large = self.large or not small
        if self.aliases.root(name) == self.aliases.root(RETURNED) or not small:
            return self._entry(value)
        self.left -= 8 * entries
        return self._new(self.space[ALLOCATION](sizes, strides, dtype), fixed=True)

    def _new(self, value: Any, *, fixed: bool = False) -> int:
        self.entries.append(value)
        if fixed:
            self.fixed.add(len(self.entries) - 1)
        return len(self.entries) - 1

    def _entry(self, node: ast.expr) -> int:
        """The entry that holds the value of an expression."""
        if isinstance(node, ast.Name) and node.id in self.slots:
            return self.slots[node.id]
        if isinstance(node, ast.Call):
            named = [word.arg for word in node.keywords]
            if None in named or any(isinstance(each, ast.Starred) for each in node.args):
                raise _Unknown
            function = self._literal(node.func)
            operands = [*map(self._entry, node.args), *(self._entry(word.value) for word in node.keywords)]
            if _called(node) == VIEW and self.fixed.issuperset(operands):
                return self._new(function(*(self.entries[i] for i in operands)), fixed=True)
            return self._result(_with_names(function, named) if named else function, operands)
        if isinstance(node, ast.Subscript):
            return self._result(getitem, [self._entry(node.value), self._entry(node.slice)])
        if isinstance(node, (ast.Tuple, ast.List)) and any(name in self.slots for name in _names(node)):
            return self._result(_tuple if isinstance(node, ast.Tuple) else _list, [*map(self._entry, node.elts)])
        return self._new(self._literal(node), fixed=True)

    def _result(self, function: Any, operands: list[int]) -> int:
        slot = self._new(None)
        self.calls.append((function, tuple(operands), slot))
        return slot

    def _literal(self, node: ast.expr) -> Any:
        """A constant, or what stands in the module."""
        if isinstance(node, ast.Name) and node.id in self.space:
            return self.space[node.id]
        if isinstance(node, ast.Attribute):
            return getattr(self._literal(node.value), node.attr)
        try:
            return ast.literal_eval(node)
        except ValueError as error:
            raise _Unknown from error


def _with_names(function: Any, names: list[Any]) -> Callable[..., Any]:
    """A function of its last arguments by name, as one of all by place."""
    k = len(names)
    return lambda *values: function(*values[:-k], **dict(zip(names, values[-k:], strict=True)))


def _nothing() -> None:
    return None


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _list(*values: Any) -> list[Any]:
    return [*values]


def _names(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]


def _target(statement: ast.Assign) -> str | None:
    """The one name that is assigned."""
    target = statement.targets[0] if len(statement.targets) == 1 else None
    return target.id if isinstance(target, ast.Name) else None


def _called(value: ast.expr) -> str | None:
    """The function that is called, by its name in the module."""
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None


class CallList:
    """A function as a list of calls on the entries of a list.

    Its results are new tensors, all else may have the same memory at every call: it is not for two threads at once.

    Args:
        entries: what the list holds before the calls.
        calls: of a function, on what is picked of the entries, whose result is the entry of a number.
        results: picks what is returned.
        example: arguments, which are the first entries; others have to be of their sizes, strides and types.
        again: makes the same, of whose results only those of these numbers are new.
    """

    __slots__ = ("_again", "_calls", "_entries", "_form", "_given", "_results", "_turns")

    def __init__(
        self,
        entries: list[Any],
        calls: Sequence[tuple[Any, Callable[[list[Any]], tuple[Any, ...]], int]],
        results: Callable[[list[Any]], tuple[Any, ...]],
        example: Sequence[Tensor],
        again: Callable[[frozenset[int]], CallList],
    ) -> None:
        self._entries, self._calls, self._results, self._again = entries, calls, results, again
        self._form, self._given = Form(example), len(example)
        self._turns: dict[Any, _Turns] = {}

    def __call__(self, arguments: list[Tensor]) -> tuple[Any, ...]:
        """The results for such arguments, whose list is emptied."""
        self._form.require(arguments)
        entries = self._entries.copy()
        entries[: self._given] = arguments
        arguments.clear()
        return self._called(entries)

    def known(self, arguments: Sequence[Tensor]) -> tuple[Any, ...]:
        """The same for arguments whose sizes, strides and types are known to be right."""
        entries = self._entries.copy()
        entries[: self._given] = arguments
        return self._called(entries)

    def each(
        self,
        arguments: list[Tensor],
        start: int,
        data: Sequence[Sequence[Tensor]],
        carried: Sequence[tuple[int, int]],
        lasting: Sequence[int] = (),
    ) -> Iterator[tuple[Any, ...]]:
        """The results of calls that follow each other; valid until the next one, and new only in the last.

        Args:
            arguments: of the first call.
            start: the argument from which on each call has its own of these data, whose forms are not looked at.
            data: of all calls.
            carried: which argument of the next call is which result.
            lasting: numbers of results that stay valid during so many calls as there are turns. Default: none.
        """
        stop = start + len(data[0])
        first, rest = arguments[:start], arguments[stop:]
        key = start, stop, *carried, *lasting
        if key not in self._turns:
            self._turns[key] = self._in_turns(arguments, start, stop, carried, lasting)
        function, form, turns = self._turns[key]
        form.require([*first, *rest])
        for own, kept in zip(data[:-1], cycle(turns), strict=False):
            entries = kept.copy()
            entries[: self._given] = [*first, *own, *rest]
            results = function._called(entries)
            yield results
            for argument, result in carried:
                first[argument] = results[result]
        entries = self._entries.copy()
        entries[: self._given] = [*first, *data[-1], *rest]
        yield self._called(entries)

    def _in_turns(
        self, arguments: list[Tensor], start: int, stop: int, carried: Sequence[tuple[int, int]], lasting: Sequence[int]
    ) -> _Turns:
        """The same for calls that follow each other, if it gives the same bits."""
        function, form = self._again(frozenset()), self._form.without(start, stop)
        places = {*map(_place, function([*arguments]))}
        kept = {_place(t): t.untyped_storage().nbytes() for t in function._entries if isinstance(t, Tensor)}
        size = sum(size for place, size in kept.items() if place in places)
        if places.isdisjoint(_place(arguments[i]) for i, _ in carried) and TURNS * size <= BYTES:
            turns = [_moved(function._entries, places) for _ in range(TURNS)]
        else:  # what a call is given may be among the results of later ones
            function = self._again(frozenset([*lasting, *(result for _, result in carried)]))
            turns = [function._entries]
        right = self([*arguments])
        for entries in turns:
            entries = entries.copy()
            entries[: self._given] = arguments
            both = zip(right, function._called(entries), strict=True)
            if not all(a.stride() == b.stride() and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in both):
                return _Turns(self, form, [self._entries])
        return _Turns(function, form, turns)

    def _called(self, entries: list[Any]) -> tuple[Any, ...]:
        for function, operands, slot in self._calls:
            entries[slot] = function(*operands(entries))
        return self._results(entries)


class _Turns(NamedTuple):
    """A function for calls that follow each other.

    Attributes:
        function: without new results, or with few.
        form: of its arguments that are no data.
        turns: what its list holds before the calls, with memory for the results: in turn for one call after the other.
    """

    function: CallList
    form: Form
    turns: list[list[Any]]


def _place(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _moved(entries: Sequence[Any], places: Collection[int]) -> list[Any]:
    """The same entries, with other memory in place of that at these places."""
    memory: dict[int, UntypedStorage] = {}
    moved = [*entries]
    for i, t in enumerate(entries):
        if isinstance(t, Tensor) and t.numel() and _place(t) in places:
            storage = memory.setdefault(_place(t), t.untyped_storage().clone())  # type: ignore[no-untyped-call]
            moved[i] = t.new_empty(0).set_(storage, t.storage_offset(), t.size(), t.stride())
    return moved

"""Code of Inductor as a list of calls, whose small intermediate results have their places once and for all.

A small step is one kernel with a hundred and more intermediate results of a few numbers; to allocate these, one by one
and at every call, takes several times as long as the kernel.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

from torch import Tensor

from .calls import BYTES, Listed, picked

__all__ = ["listed", "written"]

ENTRIES = 2**14  # of an intermediate result that is kept
DEPTH = 8  # of the wrappers around what Inductor has written
RETURNED, ALLOCATION, VIEW = "return", "empty_strided_cpu", "reinterpret_tensor"
CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")


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


def listed(call: Callable[..., Any], example: Sequence[Tensor]) -> Listed | None:
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

    def again(new: frozenset[int] | None = None) -> Listed:
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

    def function(self, example: Sequence[Tensor], again: Callable[[frozenset[int]], Listed]) -> Listed:
        """The calls as a function of the arguments, which have to be like these."""
        if self.given != len(example):
            raise _Unknown
        calls = [(function, picked(operands), slot) for function, operands, slot in self.calls]
        return Listed(self.entries, calls, picked(self.results), example, again)

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

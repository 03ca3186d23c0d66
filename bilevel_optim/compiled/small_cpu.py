"""Inductor's code for a small graph on a CPU, as a list of calls whose intermediate results keep their memory.

A small step is one kernel with a hundred and more intermediate results of a few numbers. Allocating them one by one at
every call takes several times as long as the kernel. So Inductor's generated Python is parsed here, which depends on
the version of torch. Code that is not understood runs as Inductor has compiled it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from operator import getitem, itemgetter
from typing import Any

import torch
from torch import Tensor

__all__ = ["CallList", "is_understood", "listed", "storage_of"]

FIRST, LAST = (2, 11), (2, 15)  # versions of torch whose generated code is known

BYTES = 2**22  # most memory that is kept for a function
ENTRIES = 2**14  # most entries of an intermediate result whose memory is kept
RETURNED, ALLOCATION, VIEW = "return", "empty_strided_cpu", "reinterpret_tensor"
CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")


def is_understood() -> bool:
    """Return True if the code that this version of torch generates is known."""
    major, minor, *_ = torch.__version__.split(".")
    return FIRST <= (int(major), int(minor)) <= LAST


def listed(call: Callable[..., Any], example: Sequence[Any]) -> CallList | None:
    """Return the function as a list of calls; None if its form is unknown, or the list gives other numbers.

    Args:
        call: the Python wrapper that Inductor has generated around its kernels. It takes a list of arguments, which it
            empties.
        example: example arguments.
    """
    function: Any = getattr(call, "__func__", call)
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or ALLOCATION not in space or "__file__" not in space:
        return None
    with open(space["__file__"]) as file:
        tree = ast.parse(file.read())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    text = next((node for node in functions if node.lineno == code.co_firstlineno), None)
    if text is None:
        return None
    parts = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    try:
        found = _Listing(_inlined(text, parts), space).function()
    except _Unknown:
        return None
    if found.given != len(example):
        return None
    right, first, second = call([*example]), found(example), found(example)
    return found if _are_identical(right, first, example) and _are_identical(first, second, example) else None


def _are_identical(outputs: Sequence[Any], others: Sequence[Any], values: Sequence[Tensor]) -> bool:
    """Return True if both lists hold tensors, equal bit for bit, that share memory in the same way.

    Memory that they share with ``values`` counts too.
    """
    if len(outputs) != len(others) or not all(isinstance(t, Tensor) for t in (*outputs, *others)):
        return False
    forms = [[(t.shape, t.stride(), t.dtype, t.device, t.storage_offset()) for t in some] for some in (outputs, others)]
    places = [[storage_of(t) for t in (*values, *some)] for some in (outputs, others)]
    apart = {*places[0]} & {*places[1]} <= {*map(storage_of, values), 0}
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(outputs, others, strict=True))
    first, second = ([*map(some.index, some)] for some in places)
    return forms[0] == forms[1] and first == second and apart and same


class _Unknown(Exception):
    """The code has an unknown form."""


def _inlined(text: ast.FunctionDef, parts: dict[str, ast.FunctionDef]) -> ast.FunctionDef:
    """Return a function with the statements of the subgraphs that it calls, each time under names of their own."""
    lists: dict[str, list[ast.expr]] = {}
    results: dict[str, list[ast.expr]] = {}  # of the calls
    found: list[ast.stmt] = []
    called = {_called(s.value) for s in text.body if isinstance(s, ast.Assign)} & parts.keys()
    if not called:
        return text
    own = {_target(s) for s in text.body if isinstance(s, ast.Assign) and _called(s.value) in called}
    for k, statement in enumerate(text.body):
        target, value = (_target(statement), statement.value) if isinstance(statement, ast.Assign) else (None, None)
        if target in own and isinstance(value, ast.BinOp):  # [None] * 3
            continue
        if target is not None and isinstance(value, ast.List):
            names = [
                f"{target}_{k}_{i}" for i in range(len(value.elts))
            ]  # the given ones may be deleted before the call
            found += [_assigned(name, given) for name, given in zip(names, value.elts, strict=True)]
            lists[target] = [ast.Name(name, ast.Load()) for name in names]
        elif target in own and isinstance(value, ast.Call):
            (given,) = value.args
            assert isinstance(value.func, ast.Name)
            assert isinstance(given, ast.Name)
            assert target is not None
            statements, results[target] = _body(parts[value.func.id], lists[given.id], f"{target}_{k}_")
            found += statements
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in results:
            found.append(_assigned(str(target), results[value.value.id][ast.literal_eval(value.slice)]))
        elif isinstance(statement, ast.Delete):
            gone = [name for t in statement.targets for name in _names(t)]
            left = [n for name in gone for n in (_all_names(results.pop(name, [])) if name in own else [name])]
            found += [_deleted(left)] if left else []
        else:
            found.append(statement)
    made = copy.copy(text)
    made.body = found
    return made


def _body(part: ast.FunctionDef, given: list[ast.expr], prefix: str) -> tuple[list[ast.stmt], list[ast.expr]]:
    """Return the statements of a subgraph for these arguments, and its results."""
    argument = part.args.args[-1].arg
    first, *rest = part.body
    if not isinstance(first, ast.Assign) or argument not in _names(first.value):
        raise _Unknown
    names = _names(first.targets[0])
    own = {*names, *(n for s in rest if isinstance(s, ast.Assign) for t in s.targets for n in _names(t))}
    rest = [_renamed(statement, own, prefix) for statement in rest]
    found = [_assigned(prefix + name, value) for name, value in zip(names, given, strict=True)]
    found.append(_deleted(_all_names(given)))  # a tensor is freed once no name is left
    last = rest.pop()
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Tuple):
        raise _Unknown
    kept = {*_names(last.value)}
    for statement in rest:
        if isinstance(statement, ast.Delete):  # results go on under other names
            left = [t for t in statement.targets if not {*_names(t)} & kept]
            found += [ast.Delete(left)] if left else []
        elif not isinstance(statement, ast.Expr) or ast.unparse(statement) != f"{argument}.clear()":
            found.append(statement)
    # The end of a function frees all but its results.
    assigned = {name for s in found if isinstance(s, ast.Assign) for t in s.targets for name in _names(t)}
    gone = {name for s in found if isinstance(s, ast.Delete) for name in _names(s)}
    found.append(_deleted(sorted(assigned - gone - kept)))
    return found, last.value.elts


def _renamed(value: Any, own: Container[str], prefix: str) -> Any:
    """Return a piece of code with a prefix before its own names; what has no names is shared, not copied."""
    if isinstance(value, ast.Name):
        return ast.Name(prefix + value.id, value.ctx) if value.id in own else value
    if isinstance(value, list):
        return [_renamed(each, own, prefix) for each in value]
    if not isinstance(value, ast.AST) or isinstance(value, (ast.Constant, ast.expr_context)):
        return value
    return type(value)(**{name: _renamed(part, own, prefix) for name, part in ast.iter_fields(value)})


def _assigned(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _deleted(names: Sequence[str]) -> ast.stmt:
    return ast.Delete([ast.Name(name, ast.Del()) for name in names])


def _all_names(values: Sequence[ast.expr]) -> list[str]:
    return [*dict.fromkeys(name for value in values for name in _names(value))]


class _Listing:
    """Straight-line statements as calls on the entries of a list.

    Args:
        text: the function.
        space: globals of its module.
        new: positions of the results that are new tensors at every call. Default: None, all of them.

    Attributes:
        entries: the list before the calls: constants, and tensors that keep their memory.
        calls: a function, the indices of its operands among the entries, and the index of its result.
        slots: name -> index of its entry.
    """

    def __init__(self, text: ast.FunctionDef, space: dict[str, Any], new: Container[int] | None = None) -> None:
        self.text, self.space = text, space
        self.entries, self.calls = list[Any](), list[tuple[Any, tuple[int, ...], int]]()
        self.slots: dict[str, int] = {}
        self.fixed = set[int]()  # entries known before the calls
        self.results: tuple[int, ...] = ()
        self.given, self.left, self.large = 0, BYTES, False
        own, self.arguments = text.body, text.args.args[-1].arg
        names = {name for s in own if isinstance(s, ast.Assign) for t in s.targets for name in _names(t)}
        self.aliases: dict[str, set[str]] = {}  # name -> all names that may refer to the same memory
        for statement in own:
            if "self" in _names(statement) or not isinstance(statement, (ast.Assign, ast.Expr, ast.Delete, ast.Return)):
                raise _Unknown
            used = [name for name in _names(statement) if name in names]
            if new is not None and isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
                used = [
                    n for i, part in enumerate(statement.value.elts) if i in new for n in _names(part) if n in names
                ]
            if isinstance(statement, ast.Return) or (isinstance(statement, ast.Assign) and _target(statement) is None):
                self._join([RETURNED, *used])
            elif isinstance(statement, ast.Assign) and _called(statement.value) != ALLOCATION:
                self._join(used)
        for statement in own:
            self._add(statement)

    def function(self) -> CallList:
        """Return the calls as a function."""
        calls = [(function, _picked(operands), slot) for function, operands, slot in self.calls]
        other = partial(_Listing, self.text, self.space)
        return CallList(self.entries, calls, _picked(self.results), self.given, lambda new: other(new).function())

    def _join(self, names: list[str]) -> None:
        together = set[str]().union(*(self.aliases.get(name, {name}) for name in names))
        self.aliases |= dict.fromkeys(together, together)

    def _add(self, statement: ast.stmt) -> None:
        first = len(self.entries)
        if isinstance(statement, ast.Delete):
            self._free([self.slots.pop(name) for target in statement.targets for name in _names(target)])
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
        if not isinstance(statement, ast.Return):
            self._free(range(first, len(self.entries)))  # views that have no name would keep their memory

    def _free(self, slots: Iterable[int]) -> None:
        """Let entries go that have no name, if some result is large."""
        slots = [slot for slot in slots if slot >= self.given and slot not in self.fixed] if self.large else []
        named = {*self.slots.values()} if slots else ()
        self.calls += [(_nothing, (), slot) for slot in slots if slot not in named]

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
        """Return the entry of a new tensor, allocated here if its memory may be kept."""
        sizes, strides, dtype = map(self._literal, value.args)
        entries = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        small = entries <= ENTRIES and 8 * entries <= self.left
        self.large = self.large or not small
        if name in self.aliases.get(RETURNED, ()) or not small:
            return self._entry(value)
        self.left -= 8 * entries
        return self._new(self.space[ALLOCATION](sizes, strides, dtype), fixed=True)

    def _new(self, value: Any, *, fixed: bool = False) -> int:
        self.entries.append(value)
        if fixed:
            self.fixed.add(len(self.entries) - 1)
        return len(self.entries) - 1

    def _entry(self, node: ast.expr) -> int:
        """Return the entry that holds the value of an expression."""
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
        """Return a constant, or an object of the module."""
        if isinstance(node, ast.Name) and node.id in self.space:
            return self.space[node.id]
        if isinstance(node, ast.Attribute):
            return getattr(self._literal(node.value), node.attr)
        try:
            return ast.literal_eval(node)
        except ValueError as error:
            raise _Unknown from error


def _with_names(function: Any, names: list[Any]) -> Callable[..., Any]:
    """Return a function of positional arguments that passes the last ones by these names."""
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
    """Return the assigned name; None if there is more than one."""
    target = statement.targets[0] if len(statement.targets) == 1 else None
    return target.id if isinstance(target, ast.Name) else None


def _called(value: ast.expr) -> str | None:
    """Return the name of the called function in the module."""
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None


def _picked(numbers: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return a function that picks these entries of a list, as a tuple."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda entries: tuple([entries[i] for i in numbers])


def storage_of(t: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return t.untyped_storage().data_ptr()


class CallList:
    """A function as a list of calls on the entries of a list.

    Its results are new tensors. All other memory is reused at every call, so two threads may not call it at once.

    Args:
        entries: the list before the calls.
        calls: a function, a picker of its operands among the entries, and the index of its result.
        results: picks the returned entries.
        given: number of the arguments, which are the first entries.
        reusing: makes the same function with other memory, in which all small results are kept too, except those at
            the positions that it is called with.
    """

    __slots__ = ("_calls", "_entries", "_results", "given", "reusing")

    def __init__(
        self,
        entries: list[Any],
        calls: Sequence[tuple[Any, Callable[[list[Any]], tuple[Any, ...]], int]],
        results: Callable[[list[Any]], tuple[Any, ...]],
        given: int,
        reusing: Callable[[Container[int]], CallList],
    ) -> None:
        self._entries, self._calls, self._results = entries, calls, results
        self.given, self.reusing = given, reusing

    def __call__(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results for arguments of the sizes, strides and types that it was made for."""
        entries = self._entries.copy()
        entries[: self.given] = arguments
        for function, operands, slot in self._calls:
            entries[slot] = function(*operands(entries))
        return self._results(entries)

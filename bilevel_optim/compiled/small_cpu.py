"""Inductor's code for a small graph on a CPU, as a list of calls whose intermediate results keep their memory.

A small step is one kernel with a hundred and more intermediate results of a few numbers. Allocating them one by one at
every call takes several times as long as the kernel. So the calls that Inductor's generated Python makes are recorded
once, and made again without the allocations. Code of an unknown form runs as Inductor has compiled it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Container, Sequence
from functools import partial
from operator import getitem, itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Function", "SmallProgram", "is_understood", "small_program", "storage_of"]

FIRST, LAST = (2, 11), (2, 15)  # versions of torch whose generated code is known

BYTES = 2**22  # most memory that is kept for a function
ENTRIES = 2**14  # most entries of an intermediate result
ALLOCATION, VIEW = "empty_strided_cpu", "reinterpret_tensor"
CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")
PLAIN = (bool, int, float, str, tuple, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))

Function = Callable[[list[Any]], Sequence[Any]]  # of a list of arguments, which it may empty


def is_understood() -> bool:
    """Return True if the code that this version of torch generates is known."""
    major, minor, *_ = torch.__version__.split(".")
    return FIRST <= (int(major), int(minor)) <= LAST


class SmallProgram:
    """Recorded calls as a function. Two threads may not call it at once.

    Args:
        calls: the calls.
        results: the results.

    Attributes:
        call: the function. Its results are new tensors; all other memory is used again by every call.
    """

    def __init__(self, calls: _Calls, results: Sequence[Any]) -> None:
        self._calls, self._results = calls, [calls.entry(t) for t in results]
        owners = {storage_of(t): slot for slot, t in calls.allocated.items()}
        self._returned: dict[int, set[int]] = {}  # entry of an allocated tensor -> positions of results in its memory
        for k, t in enumerate(results):
            if storage_of(t) in owners:
                self._returned.setdefault(owners[storage_of(t)], set()).add(k)
        calls.forget_example()
        self.call = self.reusing({*range(len(results))})

    def reusing(self, new: set[int]) -> Function:
        """Return the same function, whose small results keep memory of their own too, except those at the positions.

        It leaves the list of its arguments as it is.
        """
        new_memory = {slot for slot, places in self._returned.items() if not places.isdisjoint(new)}
        return self._calls.function(self._results, new_memory, self._returned.keys() - new_memory)


class _Unknown(Exception):
    """The code has an unknown form."""


class _Calls:
    """Calls on the entries of a list, as they are made for example arguments.

    Args:
        given: the arguments, which are the first entries.
        allocate, view: functions that allocate a tensor, and make a view of one.

    Attributes:
        allocated: entry -> tensor that was allocated.
    """

    def __init__(self, given: Sequence[Tensor], allocate: Callable[..., Tensor], view: Callable[..., Tensor]) -> None:
        self._entries: list[Any] = [*given]  # as long as they live, no other object has their ids
        self._at = {id(t): k for k, t in enumerate(given)}
        self._given, self._allocate, self._view = len(given), allocate, view
        self._fixed = set[int]()  # entries known before the calls
        self._made: list[tuple[Any, tuple[int, ...], list[str], int]] = []  # function, operands, last names, result
        self._left = BYTES
        self.allocated: dict[int, Tensor] = {}

    def noted(self, value: Any) -> Any:
        """Return a value whose calls are recorded, and those of its attributes; a tensor is a constant."""
        if isinstance(value, Tensor):
            self._fixed.add(self._new(value))
        return value if isinstance(value, (Tensor, *PLAIN)) else _Noted(self, value)

    def made(self, function: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Make a call, and record it."""
        operands = tuple([self.entry(value) for value in (*arguments, *named.values())])
        result = function(*arguments, **named)
        if function is self._allocate:
            self._left -= result.untyped_storage().nbytes()
            if not result.numel() or result.numel() > ENTRIES or self._left < 0:
                raise _Unknown
            self.allocated[self._new(result)] = result
            return result
        self._record(function, operands, result, [*named])
        if isinstance(result, (tuple, list)):
            for k, part in enumerate(result):
                self._record(getitem, (self.entry(result), self.entry(k)), part)
        return result

    def entry(self, value: Any) -> int:
        """Return the entry that holds an operand."""
        if id(value) in self._at:
            return self._at[id(value)]
        if isinstance(value, (tuple, list)) and any(isinstance(part, (Tensor, tuple, list)) for part in value):
            operands = tuple(map(self.entry, value))
            return self._record(_tuple if isinstance(value, tuple) else _list, operands, value)
        if isinstance(value, (Tensor, _Noted)):
            raise _Unknown
        slot = self._new(value)
        self._fixed.add(slot)
        return slot

    def _record(self, function: Any, operands: tuple[int, ...], result: Any, names: Sequence[str] = ()) -> int:
        slot = self._new(result)
        self._made.append((function, operands, [*names], slot))
        return slot

    def _new(self, value: Any) -> int:
        self._entries.append(value)
        if not isinstance(value, PLAIN) or (isinstance(value, tuple) and value):
            self._at.setdefault(id(value), len(self._entries) - 1)  # a call may return the tensor that it writes into
        return len(self._entries) - 1

    def forget_example(self) -> None:
        """Let the example arguments go, and all that was computed from them."""
        self._at.clear()
        self._entries = [value if slot in self._fixed else None for slot, value in enumerate(self._entries)]

    def function(self, results: Sequence[int], new: Container[int], own: Container[int]) -> Function:
        """Return the calls as a function; allocated results are ``new`` tensors, or keep memory of their own."""
        entries, fixed, given = [*self._entries], {*self._fixed}, self._given
        for slot, t in self.allocated.items():
            if slot not in new:
                entries[slot] = t.new_empty_strided(t.shape, t.stride()) if slot in own else t
                fixed.add(slot)
        allocated = [(slot, (tuple(t.shape), t.stride(), t.dtype)) for slot, t in self.allocated.items() if slot in new]
        calls = []  # a function, its first operands, a picker of the next ones, the last ones, and its result
        for function, operands, names, slot in self._made:
            if function is self._view and fixed.issuperset(operands):
                entries[slot] = function(*[entries[i] for i in operands])
                fixed.add(slot)
            else:
                if names:
                    last = operands[-len(names) :]
                    if fixed.issuperset(last):
                        known_ones = {name: entries[i] for name, i in zip(names, last, strict=True)}
                        function, operands = partial(function, **known_ones), operands[: -len(names)]
                    else:
                        function = _with_names(function, names)
                at = [k for k, i in enumerate(operands) if i not in fixed] or [0]
                begin, end = operands[: at[0]], operands[at[-1] + 1 :]
                known = [tuple([entries[i] for i in some]) for some in (begin, end)]
                calls.append((function, known[0], _picked(operands[at[0] : at[-1] + 1]), known[1], slot))
        picked, allocate, rest = _picked(results), self._allocate, entries[given:]
        always = picked(entries) if fixed.issuperset(results) else None

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            values = [*arguments, *rest]
            for slot, form in allocated:
                values[slot] = allocate(*form)
            for function, begin, pick, end, slot in calls:
                values[slot] = function(*begin, *pick(values), *end)
            return picked(values) if always is None else always

        return call


class _Noted:
    """A value whose calls are recorded, and those of its attributes."""

    def __init__(self, calls: _Calls, value: Any) -> None:
        self._calls, self._value = calls, value

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._calls.made(self._value, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._calls.noted(getattr(self._value, name))


def small_program(call: Function, constants: Sequence[Tensor], example: Sequence[Any]) -> SmallProgram | None:
    """Return the function without allocations of intermediate results.

    None if its form is unknown, a result is large, or the numbers are others then.

    Args:
        call: the Python code that Inductor has generated around its kernels.
        constants: its first arguments, which are the same in all calls.
        example: an example of the others.
    """
    function: Any = getattr(call, "__func__", call)
    space = getattr(function, "__globals__", {})
    if not {ALLOCATION, VIEW} <= space.keys():
        return None
    given = [t.detach() for t in example]  # a tensor may be there twice
    calls = _Calls(given, space[ALLOCATION], space[VIEW])
    own = {name: calls.noted(value) for name, value in space.items()} | dict.fromkeys(CHECKS, _nothing)
    try:
        _require_straight(function, space)
        for name, part in space.items():
            if isinstance(part, FunctionType) and part.__code__.co_filename == function.__code__.co_filename:
                own[name] = FunctionType(part.__code__, own)
        whole = [*map(calls.noted, constants), *given]
        results = FunctionType(function.__code__, own)(*[None] * (function.__code__.co_argcount - 1), whole)
        program = SmallProgram(calls, results)
    except _Unknown:
        return None
    right, first, second = call([*constants, *example]), program.call([*example]), program.call([*example])
    return program if _are_identical(right, first, example) and _are_identical(first, second, example) else None


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


def _require_straight(function: Any, space: dict[str, Any]) -> None:
    """Raise if code branches, loops, or makes a number of a tensor, which later calls would not make again."""
    try:
        (text,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        raise _Unknown from None
    if not isinstance(text, ast.FunctionDef):
        raise _Unknown
    if not all(isinstance(statement, (ast.Assign, ast.Expr, ast.Delete, ast.Return)) for statement in text.body):
        raise _Unknown
    for node in [node for statement in text.body for node in ast.walk(statement)]:
        part = space.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(part, FunctionType) and part.__code__.co_filename == function.__code__.co_filename:
            _require_straight(part, space)
        base: ast.AST = node.func if isinstance(node, ast.Call) else node
        if base is not node or isinstance(base, ast.Attribute):
            while isinstance(base, ast.Attribute) and base.attr != "clear":
                base = base.value
            if not (isinstance(base, ast.Attribute) or (isinstance(base, ast.Name) and base.id in space)):
                raise _Unknown


def _with_names(function: Any, names: list[Any]) -> Callable[..., Any]:
    """Return a function of positional arguments that passes the last ones by these names."""
    k = len(names)
    return lambda *values: function(*values[:-k], **dict(zip(names, values[-k:], strict=True)))


def _nothing(*arguments: Any) -> None:
    return None


def _tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _list(*values: Any) -> list[Any]:
    return [*values]


def _picked(numbers: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return a function that picks these entries of a list, as a tuple."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda entries: tuple([entries[i] for i in numbers])


def storage_of(t: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return t.untyped_storage().data_ptr()

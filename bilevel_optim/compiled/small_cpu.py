"""Inductor's code for a small graph on a CPU, with intermediate results that keep their memory.

A small step is one kernel with a hundred and more intermediate results of a few numbers. Allocating them one by one at
every call takes several times as long as the kernel. So the allocations are taken out of Inductor's generated Python,
whose form depends on the version of torch. Code of another form runs as Inductor has compiled it.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Function", "SmallProgram", "is_understood", "small_program", "storage_of"]

FIRST, LAST = (2, 11), (2, 15)  # versions of torch whose generated code is known

BYTES = 2**22  # most memory that is kept for a function
ENTRIES = 2**14  # most entries of an intermediate result whose memory is kept
ALLOCATION, VIEW = "empty_strided_cpu", "reinterpret_tensor"
CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")

Function = Callable[[list[Any]], Sequence[Any]]  # of a list of arguments, which it empties


def is_understood() -> bool:
    """Return True if the code that this version of torch generates is known."""
    major, minor, *_ = torch.__version__.split(".")
    return FIRST <= (int(major), int(minor)) <= LAST


class SmallProgram:
    """Straight-line code whose small intermediate results keep their memory, so two threads may not call it at once.

    Args:
        text: the code.
        space: its globals.
        small: name -> tensor that the code allocates under it.
        returned: name of such a tensor -> positions of the results in its memory.

    Attributes:
        call: the function. Its results are new tensors.
    """

    def __init__(
        self, text: ast.FunctionDef, space: dict[str, Any], small: dict[str, Tensor], returned: dict[str, set[int]]
    ) -> None:
        self._text, self._space, self._small, self._returned = text, space, small, returned
        self._kept = {name: t for name, t in small.items() if name not in returned}
        self.call = self._without_allocations(self._kept)

    def reusing(self, new: set[int]) -> Function:
        """Return the same function with small results that keep their memory too, except those at the positions."""
        more = {name: self._small[name] for name, places in self._returned.items() if places.isdisjoint(new)}
        own = {name: t.new_empty_strided(t.shape, t.stride()) for name, t in more.items()}
        return self._without_allocations(self._kept | own)

    def _without_allocations(self, kept: Mapping[str, Tensor]) -> Function:
        """Return the code as a function in which these tensors are default values of arguments."""
        views = _Views(kept, self._space[VIEW])
        body = [
            views.visit(copy.deepcopy(own)) for own in self._text.body if not (_allocated(own) in kept or _checks(own))
        ]
        kept = {**kept, **views.found}
        names = [self._text.args.args[-1], *map(ast.arg, kept)]
        arguments = ast.arguments([], names, None, [], [], None, [ast.Constant(None)] * len(kept))
        function = ast.FunctionDef(self._text.name, arguments, body, [], None)
        module = compile(ast.fix_missing_locations(ast.Module([function], [])), f"<{self._text.name}>", "exec")
        (code,) = (own for own in module.co_consts if isinstance(own, CodeType))
        return FunctionType(code, self._space, self._text.name, tuple(kept.values()))


class _Views(ast.NodeTransformer):
    """Replaces views of tensors that keep their memory by names of their own.

    Args:
        kept: name -> tensor.
        view: the function that makes a view.

    Attributes:
        found: name -> view.
    """

    def __init__(self, kept: Mapping[str, Tensor], view: Callable[..., Tensor]) -> None:
        self._known, self._view = dict(kept), view
        self.found: dict[str, Tensor] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        value, target = node.value, node.targets[0]
        if isinstance(value, ast.Name) and isinstance(target, ast.Name) and value.id in self._known:
            self._known[target.id] = self._known[value.id]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        first = node.args[0] if node.args else None
        if _called(node) != VIEW or not isinstance(first, ast.Name) or first.id not in self._known:
            return self.generic_visit(node)
        name = f"{first.id}_{len(self.found)}"
        self.found[name] = self._view(self._known[first.id], *map(ast.literal_eval, node.args[1:]))
        return ast.Name(name, ast.Load())


def small_program(call: Function, example: Sequence[Any]) -> SmallProgram | None:
    """Return the function without the allocations of small intermediate results.

    None if its form is unknown, or if it gives other numbers then.

    Args:
        call: the Python code that Inductor has generated around its kernels.
        example: example arguments.
    """
    function: Any = getattr(call, "__func__", call)
    if ALLOCATION not in getattr(function, "__globals__", {}) or (text := _text(function)) is None:
        return None
    space, allocated, parts = function.__globals__, list[Tensor | None](), dict[str, list[Any]]()
    left = BYTES

    def allocate(*form: Any) -> Any:
        nonlocal left
        t = space[ALLOCATION](*form)
        size = t.untyped_storage().nbytes()
        keeps = 0 < size <= left and t.numel() <= ENTRIES
        allocated.append(t if keeps else None)
        left -= size if keeps else 0
        return t

    def called(name: str, arguments: list[Any]) -> Any:
        parts.setdefault(name, [*arguments])
        return space[name](arguments)

    own = {**space, ALLOCATION: allocate}
    file = function.__code__.co_filename
    for name, part in space.items():
        if isinstance(part, FunctionType) and part.__code__.co_filename == file:
            own[name] = partial(called, name)
    results = SmallProgram(text, own, {}, {}).call([*example])
    names = [name for statement in text.body if (name := _allocated(statement)) is not None]
    if len({*names}) < len(names) or len(names) != len(allocated) or not all(isinstance(t, Tensor) for t in results):
        return None
    small = {name: t for name, t in zip(names, allocated, strict=True) if t is not None}
    owners, returned = {storage_of(t): name for name, t in small.items()}, dict[str, set[int]]()
    for k, t in enumerate(results):
        if storage_of(t) in owners:
            returned.setdefault(owners[storage_of(t)], set()).add(k)
    found = {name: small_program(space[name], arguments) for name, arguments in parts.items()}
    program = SmallProgram(text, space | {name: own.call for name, own in found.items() if own}, small, returned)
    right, first, second = (own([*example]) for own in (call, program.call, program.call))
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


def _text(function: Any) -> ast.FunctionDef | None:
    """Return the definition of a function; None if it cannot be read, or branches or loops."""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    straight = (ast.Assign, ast.Expr, ast.Delete, ast.Return)
    if not isinstance(found, ast.FunctionDef) or not all(isinstance(statement, straight) for statement in found.body):
        return None
    names = [name.id for part in found.body for name in ast.walk(part) if isinstance(name, ast.Name)]
    return None if "self" in names else found


def _allocated(statement: ast.stmt) -> str | None:
    """Return the name under which a statement allocates a tensor; None for another statement."""
    if not isinstance(statement, ast.Assign) or _called(statement.value) != ALLOCATION:
        return None
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def _checks(statement: ast.stmt) -> bool:
    """Return True for a check of the form of arguments, which a step has checked."""
    return isinstance(statement, ast.Expr) and _called(statement.value) in CHECKS


def _called(value: ast.expr) -> str | None:
    """Return the name of the called function."""
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None


def storage_of(t: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return t.untyped_storage().data_ptr()

"""Code of Inductor whose small intermediate results have their places once and for all, not anew at every call.

A small step is one kernel with a hundred and more intermediate results of a few numbers; to allocate these takes ten
times as long as the kernel.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["give_workspace", "with_workspace"]

ENTRIES = 2**14  # of an intermediate result that is kept
BYTES = 2**22  # of all of them together
DEPTH = 8  # of the wrappers around what Inductor has written
RETURNED, ALLOCATION = "return", "empty_strided_cpu"


def give_workspace(compiled: Callable[..., Any]) -> bool:
    """Change in place what ``torch._inductor.compile`` has returned; gives whether anything was found to change."""
    found, seen, around = False, set[int](), [compiled]
    for _ in range(DEPTH):
        inner = []
        for outer in around:
            written = vars(outer).get("current_callable") if hasattr(outer, "__dict__") else None
            if written is not None and not isinstance(outer, types.FunctionType):  # which has but a copy of it
                new = with_workspace(written)
                found = found or new is not written
                outer.current_callable = new  # type: ignore[attr-defined]
            inner += [each for each in _inside(outer) if id(each) not in seen]
        around = list({id(each): each for each in inner}.values())
        seen.update(map(id, around))
    return found


def _inside(outer: Any) -> Iterator[Any]:
    """What a function calls, or an object."""
    cells = [cell.cell_contents for cell in getattr(outer, "__closure__", None) or () if cell != types.CellType()]
    for value in (*cells, *getattr(outer, "__dict__", {}).values()):
        if callable(value) and not isinstance(value, (type, types.ModuleType)):
            yield value


def with_workspace(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which keeps the memory of what it does not return; itself, if it is not of a known form.

    Args:
        call: the Python wrapper that Inductor has written around its kernels.
    """
    function: Any = getattr(call, "__func__", call)
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or ALLOCATION not in space or "__file__" not in space:
        return call
    with open(space["__file__"]) as file:
        tree = ast.parse(file.read())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    written = next((node for node in functions if node.lineno == code.co_firstlineno), None)
    try:
        places = [] if written is None else _places(written.body, space[ALLOCATION])
    except _Unknown:
        return call
    return call if all(place is None for place in places) else _placed(call, function, places)


def _placed(call: Callable[..., Any], function: types.FunctionType, places: list[Any]) -> Callable[..., Any]:
    """A function without branches that gets these tensors where it allocates some, in this order; new ones for None."""
    allocate, following = function.__globals__[ALLOCATION], iter(places)

    def place(sizes: Any, strides: Any, dtype: Any) -> Any:
        found = next(following)
        return allocate(sizes, strides, dtype) if found is None else found

    space = {**function.__globals__, ALLOCATION: place}
    own: Any = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__)
    if own is not function and getattr(call, "__self__", None) is not None:
        own = types.MethodType(own, call.__self__)  # type: ignore[attr-defined]

    def called(arguments: Any) -> Any:
        nonlocal following
        following = iter(places)
        return own(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]  # it empties the list of its arguments
    return called


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


def _places(body: list[ast.stmt], allocate: Callable[..., Any]) -> list[Any]:
    """For each allocation of a function a tensor that is kept, as nothing that is returned can share it; or None."""
    aliases = _Aliases()
    own = {name for s in body if isinstance(s, ast.Assign) for t in s.targets for name in _names(t)}
    for statement in body:
        if "self" in _names(statement) or not isinstance(statement, (ast.Assign, ast.Expr, ast.Delete, ast.Return)):
            raise _Unknown
        used = [name for name in _names(statement) if name in own]
        if isinstance(statement, ast.Return) or (isinstance(statement, ast.Assign) and _target(statement) is None):
            aliases.join([RETURNED, *used])
        elif isinstance(statement, ast.Assign) and not _is_allocation(statement):
            aliases.join(used)
    places: list[Any] = []
    space = BYTES
    for statement in filter(_is_allocation, body):
        sizes, strides, dtype = _form(statement)
        entries = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        kept = aliases.root(str(_target(statement))) != aliases.root(RETURNED)
        if kept and entries <= ENTRIES and 8 * entries <= space:
            space -= 8 * entries
            places.append(allocate(sizes, strides, dtype))
        else:
            places.append(None)
    return places


def _names(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]


def _target(statement: ast.stmt) -> str | None:
    """The one name that is assigned."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def _called(statement: ast.stmt) -> str | None:
    """The function whose result is assigned."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None


def _is_allocation(statement: ast.stmt) -> bool:
    return _called(statement) == ALLOCATION


def _form(statement: ast.stmt) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Sizes, strides and type of a new tensor."""
    assert isinstance(statement, ast.Assign)
    assert isinstance(statement.value, ast.Call)
    sizes, strides, dtype = statement.value.args
    try:
        found = ast.literal_eval(sizes), ast.literal_eval(strides), getattr(torch, ast.unparse(dtype).split(".")[-1])
    except ValueError as error:  # a size that is not written there
        raise _Unknown from error
    return found

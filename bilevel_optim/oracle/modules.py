"""Modules that a loss can reach, found in what its function refers to."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = ["modules_of"]

MOST = 2000  # objects to look at
LONG = 64  # longer lists are data


def modules_of(loss: Any) -> Iterator[nn.Module]:
    """Yield the modules, submodules included, that a loss may call.

    The search covers closures, default arguments, global names, attributes and short lists, but runs no code of the
    user, so it misses modules behind properties and those that are created later.
    """
    left, seen = deque([loss]), set[int]()
    while left and len(seen) < MOST:
        value = left.popleft()
        if id(value) in seen or isinstance(value, (Tensor, type, types.ModuleType, str, int, float)):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            for module in value.modules():
                seen.add(id(module))
                yield module
        left += _parts(value)


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects that an object refers to."""
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple, dict, set)) and len(value) <= LONG:
        yield from value.values() if isinstance(value, dict) else value
    if callable(value) and not isinstance(value, nn.Module):
        yield type(value).__call__
    yield from (getattr(value, "__dict__", None) or {}).values()

"""What a loss reads beside its arguments, as far as Python shows it: a graph freezes these, so they are watched."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from ..problem.tracing import Untraceable

__all__ = ["Watch", "same", "undisturbed"]

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, TreeSpec)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DEPTH = 3  # functions that call functions that call functions
_SMALL = 64  # entries of a container that is watched by value


def same(before: Any, after: Any) -> bool:
    """Whether two values are one object, or equal plain values or containers of these."""
    return before is after or (type(before) is type(after) and _is_plain(before) and bool(before == after))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return len(value) <= _SMALL and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) <= _SMALL and all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


class _Place:
    """A name that a function reads, and what was found there."""

    __slots__ = ("copy", "name", "owner", "value")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.value = self.now
        mutable = isinstance(self.value, (list, dict, set)) and _is_plain(self.value)
        self.copy = self.value.copy() if mutable else None

    @property
    def now(self) -> Any:
        return self.owner.get(self.name) if isinstance(self.owner, dict) else self.owner.cell_contents

    @property
    def unchanged(self) -> bool:
        now = self.now
        return same(self.value, now) and (self.copy is None or same(self.copy, now))

    def put_back(self) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = self.value
        else:
            self.owner.cell_contents = self.value
        if self.copy is not None and not same(self.value, self.copy):
            self.value.clear()
            self.value.extend(self.copy) if isinstance(self.value, list) else self.value.update(self.copy)


class Watch:
    """What a function reads: cells, globals, and the attributes that its code names, three calls deep.

    Args:
        function: a loss.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.identities: list[Any] = []  # code of functions, and what is no function itself
        self.places: list[_Place] = []
        self._follow(function, _DEPTH)
        self.modules = [(m, m.training) for m in self._objects() if isinstance(m, nn.Module)]

    def _follow(self, function: Any, depth: int) -> None:
        if isinstance(function, MethodType):
            self.identities.append(function.__self__)
            self._attributes(function.__self__, function.__func__.__code__.co_names)
            function = function.__func__
        if not isinstance(function, FunctionType):
            self.identities.append(function)
            return
        code = function.__code__
        self.identities += [code, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        first = len(self.places)
        for cell in function.__closure__ or ():
            try:
                self.places.append(_Place(cell, ""))
            except ValueError:  # not filled yet
                continue
        names = function.__globals__
        self.places += [_Place(names, name) for name in code.co_names if name in names]
        for place in self.places[first:]:
            value = place.value
            if isinstance(value, (FunctionType, MethodType)):
                if depth:
                    self._follow(value, depth - 1)
            else:
                self._attributes(value, code.co_names)

    def _attributes(self, owner: Any, names: Sequence[str], depth: int = _DEPTH) -> None:
        own = getattr(owner, "__dict__", None)
        if isinstance(own, dict) and not isinstance(owner, (type, ModuleType, Tensor)):
            found = [_Place(own, name) for name in names if name in own]
            self.places += found
            for place in found if depth else ():
                self._attributes(place.value, names, depth - 1)

    def _objects(self) -> list[Any]:
        return [*self.identities, *(place.value for place in self.places)]

    @property
    def values(self) -> list[Any]:
        """What it reads, in the order of its places."""
        return [place.value for place in self.places]

    @property
    def holds(self) -> bool:
        """Whether the function still reads the same."""
        for place in self.places:
            owner = place.owner
            now = owner.get(place.name) if isinstance(owner, dict) else owner.cell_contents
            if (now is not place.value or place.copy is not None) and not place.unchanged:
                return False
        return not self.modules or all(m.training is was for m, was in self.modules)

    def stands_for(self, function: Any) -> bool:
        """Whether another function (a lambda made again) has the same code and reads the same."""
        if function is self.function:
            return self.holds
        other = Watch(function)
        return (
            len(other.identities) == len(self.identities)
            and len(other.places) == len(self.places)
            and all(map(same, self.identities, other.identities))
            and all(map(same, [p.value if p.copy is None else p.copy for p in self.places], other.values))
            and self.modules == other.modules
        )

    def require_passive(self) -> None:
        """Raise `Untraceable` if the function has an iterator at hand."""
        for place in self.places:
            if isinstance(place.value, Iterator):
                raise Untraceable(
                    f"a loss draws its own data (from a {type(place.value).__name__}); pass them by bo.Objective"
                )

    def put_back(self) -> bool:
        """Restore what the function has changed; whether it has changed something."""
        changed = [place for place in self.places if not place.unchanged]
        for place in changed:
            place.put_back()
        return bool(changed)

    def generators(self) -> list[torch.Generator]:
        """Generators that the function may draw from."""
        return [value for value in self._objects() if isinstance(value, torch.Generator)]


@contextmanager
def undisturbed(*functions: Any) -> Generator[None]:
    """Evaluate functions for a look at them: random states, and what they changed, are put back.

    Raises:
        Untraceable: if a function draws its own data, or changes what it reads.
    """
    watches = [Watch(function) for function in functions]
    for watch in watches:
        watch.require_passive()
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numpy_state: Any = None if numpy is None else numpy.random.get_state()
    changed = False
    with ExitStack() as block:
        block.enter_context(torch.random.fork_rng())
        for generator in (g for watch in watches for g in watch.generators()):
            block.callback(generator.set_state, generator.get_state())
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            for watch in watches:
                changed |= watch.put_back()
    if changed:
        raise Untraceable("a loss changes what it reads (a counter, for instance)")

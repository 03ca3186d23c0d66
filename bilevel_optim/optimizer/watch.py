"""What a loss reads beside its arguments, as far as Python shows it: a graph freezes these, so they are watched."""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, lru_cache, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from ..problem.tracing import Untraceable

__all__ = ["Watch", "same", "undisturbed"]

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, TreeSpec)
_SEQUENCES = (list, tuple, deque)
_DEPTH = 3  # functions that call functions that call functions, attributes of attributes of attributes
_NESTED = 3  # containers in containers in containers
_SMALL = 128  # entries of a container that is watched by its entries
_FEW = 4096  # entries of an array that is watched by value
_MISSING = object()
_OTHERS = frozenset({"torch", "torchvision", "numpy", "bilevel_optim", *sys.stdlib_module_names})  # constant


def same(before: Any, after: Any) -> bool:
    """Whether two values are one object, or equal plain values or containers of these."""
    return before is after or _Kept(before).is_still(after)


def _foreign(owner: Any) -> bool:
    """Whether the code of a class or module is a library's, which reads no more than its arguments and attributes."""
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    return str(name).partition(".")[0] in _OTHERS


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """What a function's code names, also in the functions inside it and as strings for ``getattr``."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(_names(constant))
        elif isinstance(constant, str) and constant.isidentifier():
            found[constant] = None
    return tuple(found)


def _static(cls: type, name: str) -> tuple[type, Any]:
    """The class that an attribute comes from, and what it has there."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base, base.__dict__[name]
    return cls, _MISSING


def _size(value: Any) -> float:
    """Of an array of NumPy, in units of what a container may have."""
    return value.size * _SMALL / _FEW if type(value).__name__ == "ndarray" else math.inf


class _Kept:
    """A value as it was: containers and small arrays by their entries, plain values by value, others by identity."""

    __slots__ = ("entries", "fixed", "kind", "value")

    def __init__(self, value: Any, depth: int = _NESTED) -> None:
        self.value, self.kind = value, type(value)
        self.entries: Any = None
        self.fixed = True  # nothing of the object itself can change that is looked at
        if depth and isinstance(value, (*_SEQUENCES, dict)) and len(value) <= _SMALL:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            self.entries = [(key, _Kept(item, depth - 1)) for key, item in items]
            self.fixed = isinstance(value, tuple) and all(kept.fixed for _, kept in self.entries)
        elif (len(value) if isinstance(value, (set, frozenset)) else _size(value)) <= _SMALL:
            self.entries, self.fixed = value.copy(), isinstance(value, frozenset)

    def is_still(self, now: Any) -> bool:
        """Whether another value, or the same object later, stands for this one."""
        entries = self.entries
        if entries is None:
            return now is self.value or (type(now) is self.kind and self.kind in _PLAIN and bool(now == self.value))
        if type(now) is not self.kind:
            return False
        if not isinstance(entries, list):
            alike = getattr(entries, "shape", None) == getattr(now, "shape", None) and entries == now
            return bool(alike if isinstance(alike, bool) else alike.all())
        if len(now) != len(entries):
            return False
        if self.kind is dict or isinstance(now, dict):
            return all(key in now and kept.is_still(now[key]) for key, kept in entries)
        return all(kept.is_still(item) for (_, kept), item in zip(entries, now, strict=True))

    def restored(self) -> Any:
        """The value, with its entries as they were."""
        entries, value = self.entries, self.value
        if isinstance(entries, list):
            items = [(key, kept.restored()) for key, kept in entries]
            if isinstance(value, dict):
                value.clear()
                value.update(items)
            elif not isinstance(value, tuple):
                value.clear()
                value.extend(item for _, item in items)
        elif isinstance(value, set):
            value.clear()
            value.update(entries)
        elif entries is not None and not isinstance(value, frozenset):
            value[...] = entries
        return value


class _Place:
    """Where a function finds something, and what was found there.

    Args:
        read: gives what is there now.
        write: puts something there.
    """

    __slots__ = ("kept", "read", "write")

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.read, self.write = read, write
        self.kept = _Kept(read())

    @classmethod
    def entry(cls, owner: dict[str, Any], name: str) -> _Place:
        """Of a dictionary, such as globals or the attributes of an object; it may come later."""

        def write(value: Any) -> None:
            if value is _MISSING:
                owner.pop(name, None)
            else:
                owner[name] = value

        return cls(partial(owner.get, name, _MISSING), write)

    @classmethod
    def attribute(cls, owner: Any, name: str) -> _Place:
        """Of a class, or in a slot."""
        return cls(partial(getattr, owner, name, _MISSING), partial(setattr, owner, name))

    @property
    def value(self) -> Any:
        """What was found."""
        return self.kept.value

    def put_back(self) -> None:
        """Let the same be there again."""
        self.write(self.kept.restored())


class Watch:
    """What a function reads, three calls deep: cells, globals, attributes that its code names, and those of modules.

    Methods, properties and ``forward`` are followed, but for those of libraries.

    Args:
        function: a loss.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.identities: list[Any] = []  # code of functions, and what is no function itself
        self.places: list[_Place] = []
        self.modules: list[tuple[nn.Module, bool]] = []
        self._cells = 0  # how many places are cells of the function itself
        self._seen: set[Any] = set()
        self._follow(function, _DEPTH)
        self._seen.clear()
        kept = [(place.read, place.kept) for place in self.places]
        self._checks = [(read, it.value, it.fixed, it.is_still) for read, it in kept]

    def _follow(self, function: Any, depth: int) -> None:
        if isinstance(function, MethodType):
            self.identities.append(function.__self__)
            self._look_at(function.__self__, _names(function.__func__.__code__), depth)
            function = function.__func__
        if not isinstance(function, FunctionType):
            self.identities.append(function)
            self._look_at(function, (), depth)
            return
        if self._known(function):
            return
        self.identities += [function.__code__, *(function.__defaults__ or ())]
        self.identities += (function.__kwdefaults__ or {}).values()
        names, first = _names(function.__code__), len(self.places)
        for cell in function.__closure__ or ():
            try:
                self.places.append(_Place(partial(getattr, cell, "cell_contents"), partial(_fill, cell)))
            except ValueError:  # not filled yet
                continue
        if function is self.function:
            self._cells = len(self.places)
        spaces = function.__globals__
        self.places += [_Place.entry(spaces, name) for name in names if name in spaces]
        for value in [place.value for place in self.places[first:]]:
            if isinstance(value, (FunctionType, MethodType)):
                if depth:
                    self._follow(value, depth - 1)
            else:
                self._look_at(value, names, depth)

    def _known(self, *what: Any) -> bool:
        key = tuple(map(id, what))
        known = key in self._seen
        self._seen.add(key)
        return known

    def _look_at(self, owner: Any, names: Collection[str], depth: int) -> None:
        """Attributes of something, and what it does when it is called."""
        if isinstance(owner, nn.Module):
            for module in owner.modules():
                self._module(module, depth)
        elif isinstance(owner, ModuleType):
            if not _foreign(owner):
                for name in names:
                    self._member(owner.__dict__, name, depth)
            return
        elif isinstance(owner, (list, tuple, dict)) and len(owner) <= _SMALL:
            for value in owner.values() if isinstance(owner, dict) else owner:
                if isinstance(value, (FunctionType, MethodType)) and depth:
                    self._follow(value, depth - 1)
        if isinstance(owner, (Tensor, *_PLAIN)) or owner is _MISSING:
            return
        cls = owner if isinstance(owner, type) else type(owner)
        if not _foreign(cls) and callable(owner) and not isinstance(owner, (type, nn.Module)):
            names = (*names, "__call__")
        self._attributes(owner, cls, names, depth)

    def _attributes(self, owner: Any, cls: type, names: Collection[str], depth: int) -> None:
        own = None if owner is cls else getattr(owner, "__dict__", None)
        foreign = _foreign(cls)
        if foreign and not isinstance(own, dict):
            return
        for name in names:
            if isinstance(own, dict) and name in own:
                self._member(own, name, depth, names)
            elif not foreign:
                self._of_class(owner, cls, own, name, depth)

    def _member(self, space: dict[str, Any], name: str, depth: int, names: Collection[str] = ()) -> None:
        if name not in space or self._known(space, name):
            return
        place = _Place.entry(space, name)
        self.places.append(place)
        if depth and isinstance(place.value, (FunctionType, MethodType)):
            self._follow(place.value, depth - 1)
        elif depth:
            self._look_at(place.value, names, depth - 1)

    def _of_class(self, owner: Any, cls: type, own: Any, name: str, depth: int) -> None:
        """An attribute that a class gives: a value, or code to be followed."""
        base, value = _static(cls, name)
        if value is _MISSING or _foreign(base):
            return
        if isinstance(value, MemberDescriptorType):
            if owner is not cls and not self._known(owner, name):
                self.places.append(_Place.attribute(owner, name))
            return
        value = getattr(value, "__func__", value)
        function = value.func if isinstance(value, cached_property) else getattr(value, "fget", value)
        if isinstance(function, FunctionType):
            if depth and not self._known(owner, function):
                self._attributes(owner, cls, _names(function.__code__), depth - 1)
                self._follow(function, depth - 1)
            return
        if not self._known(base, name):
            self.places.append(_Place(partial(base.__dict__.get, name, _MISSING), partial(setattr, base, name)))
        if isinstance(own, dict) and not self._known(own, name):
            self.places.append(_Place.entry(own, name))  # its own one may come later

    def _module(self, module: nn.Module, depth: int) -> None:
        """A module's mode, its parts and buffers, its plain attributes, and what its ``forward`` reads."""
        if self._known(module):
            return
        self.modules.append((module, module.training))
        own, cls = module.__dict__, type(module)
        for name in ("_modules", "_buffers"):
            if own.get(name):
                self.places.append(_Place.entry(own, name))
        if not _foreign(cls):
            if depth:
                self._of_class(module, cls, own, "forward", depth)
            return
        for name, value in own.items():
            if name[0] != "_" and name != "training" and isinstance(value, (*_PLAIN, tuple)):
                self._member(own, name, 0)

    @property
    def holds(self) -> bool:
        """Whether the function still reads the same."""
        return self._hold(0)

    def _hold(self, first: int) -> bool:
        for read, value, fixed, is_still in self._checks[first:] if first else self._checks:
            now = read()
            if not (fixed and now is value) and not is_still(now):
                return False
        return not self.modules or all(m.training is was for m, was in self.modules)

    def stands_for(self, function: Any) -> bool:
        """Whether another function (a lambda made again) has the same code and reads the same."""
        if function is self.function:
            return self.holds
        if self._again(function):
            return self._hold(self._cells)
        other = Watch(function)
        return (
            len(other.identities) == len(self.identities)
            and len(other.places) == len(self.places)
            and all(map(same, self.identities, other.identities))
            and all(mine.kept.is_still(theirs.value) for mine, theirs in zip(self.places, other.places, strict=True))
            and self.modules == other.modules
        )

    def _again(self, function: Any) -> bool:
        """Whether a function is this one made again: the same objects in its cells."""
        own = self.function
        if not (isinstance(function, FunctionType) and isinstance(own, FunctionType)):
            return False
        cells = function.__closure__ or ()
        return (
            function.__code__ is own.__code__
            and function.__globals__ is own.__globals__
            and function.__kwdefaults__ is own.__kwdefaults__ is None
            and same(own.__defaults__, function.__defaults__)
            and len(cells) == self._cells
            and all(_stays(place.kept, cell) for place, cell in zip(self.places, cells, strict=False))
        )

    def require_passive(self) -> None:
        """Raise `Untraceable` if the function has an iterator at hand."""
        for value in (place.value for place in self.places):
            if isinstance(value, Iterator):
                raise Untraceable(
                    f"a loss draws its own data (from a {type(value).__name__}); pass them by bo.Objective"
                )

    def put_back(self) -> bool:
        """Restore what the function has changed; whether it has changed something."""
        changed = [place for place in self.places if not place.kept.is_still(place.read())]
        for place in changed:
            place.put_back()
        return bool(changed)

    def generators(self) -> list[torch.Generator]:
        """Generators that the function may draw from."""
        found = [place.value for place in self.places]
        return [value for value in (*self.identities, *found) if isinstance(value, torch.Generator)]


def _fill(cell: Any, value: Any) -> None:
    cell.cell_contents = value


def _stays(kept: _Kept, cell: Any) -> bool:
    """Whether a cell has the very object that was found, as it was, or an equal plain value."""
    try:
        now = cell.cell_contents
    except ValueError:
        return False
    return (now is kept.value or kept.kind in _PLAIN) and kept.is_still(now)


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

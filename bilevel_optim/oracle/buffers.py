"""Module buffers that evaluations change: running statistics, power iterations."""

from __future__ import annotations

import re
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from ..distributed.sharding import require_no_exchange
from ..problem.objective import Loss, Objective, version_of
from ..problem.parameters import overlaps_itself

__all__ = ["Buffers", "Kept", "modules_of", "unnoted"]

Note = Callable[[nn.Module, Any], None]
Before = dict[tuple[nn.Module, str], tuple[Tensor | None, Tensor, int]]  # buffers with their values and versions
COUNT = "num_batches_tracked"
STRIDED = torch.strided
NOTHING = torch.empty(0)


class Buffers:
    """The module buffers that an evaluation in training mode changes: running statistics, power iterations.

    A closure does not show which modules it calls, and an update need not show in a tensor's version. So in the first
    step, and in that after new losses or groups, the values of the buffers are recorded: of all modules that the losses
    can reach, and, by a hook, of those called; and again in a step that finds one of them in another mode, or with
    other buffers. Those that changed are known from then on, and so are all normalisations that the losses can reach.
    (Not in every step, because the hook makes compiled modules recompile, and constant buffers can be large.)
    """

    def __init__(self, *, complete: bool = False) -> None:
        self._changing: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.complete = complete  # a whole step has been recorded
        self._none = True  # no buffer is known to change
        self._always: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose buffers change in evaluation mode
        self._reached: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those with buffers that the losses can reach
        self._called: dict[bool, weakref.WeakSet[nn.Module]] = {mode: weakref.WeakSet() for mode in (True, False)}
        self._forms: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()  # as recorded
        self._idle: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # known normalisations that nothing has called yet
        self._losses: dict[Any, Any] = {}  # code of the losses whose modules are known, with their own modules
        self._last: list[weakref.ref[Any]] = []  # the last losses
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all that the first step has called

    def expect(self, losses: Sequence[Loss | None]) -> None:
        """If losses are new, record the modules of the next step, and find the normalisations that they can reach.

        Also record them if a module is in a mode, or has buffers, that no recorded step has seen.
        """
        for module, forms in self._forms.items():
            if (form := _form(module)) not in forms:
                forms.add(form)
                self.complete = False
        if len(self._last) == len(losses) and all([ref() is own for ref, own in zip(self._last, losses, strict=True)]):
            return
        self._last = [weakref.ref(own) for own in losses if own is not None]
        for own in losses:
            for loss in (own.loss, own.features) if isinstance(own, Objective) else (own,):
                if loss is None:
                    continue
                code, held = _identity(loss)
                if self._losses.get(id(code)) != (code, held):
                    self._losses[id(code)] = code, held
                    self.complete = False
                    for module in modules_of(loss):
                        self._know(module)
                        if module._buffers:
                            self._reached.add(module)

    def _know(self, module: nn.Module) -> None:
        """Restore the buffers of a module from now on, if it is a normalisation; else note its form."""
        if module._buffers and not _normalises(module):
            self._forms.setdefault(module, set()).add(_form(module))
        if _normalises(module) and module not in self._changing:
            self._none = False
            self._changing[module] = {*_buffers(module)}
            if isinstance(getattr(module, COUNT, None), Tensor):
                self._idle.add(module)

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()  # a copy of an optimizer records its own modules

    @property
    def constant(self) -> bool:
        """True if no evaluation changes any buffer."""
        return self.complete and self._none

    @property
    def mode(self) -> int:
        """Number of the modules with buffers that are in training mode, of those that losses have called."""
        if not (self._called[True] or self._called[False]):
            return 0
        return sum([m.training for modules in self._called.values() for m in modules])

    def changing(self) -> list[Tensor]:
        """Return the buffers that evaluations currently change, in a fixed order."""
        if self._none:
            return []
        now = [(m, names) for m, names in self._changing.items() if m.training or m in self._always]
        found = [getattr(m, name, None) for m, names in now for name in sorted(names)]
        return [buffer for buffer in found if buffer is not None]

    @contextmanager
    def noted(self) -> Generator[Before]:
        """Yield the values of the buffers before the block changes them."""
        if self.complete:
            yield {
                (module, name): (buffer, buffer.detach().clone(), version_of(buffer))
                for module, names in self._changing.items()
                for name in names
                # An evaluation may change a module that trains, or whose mode losses switch.
                if (
                    module.training
                    or module in self._always
                    or (module in self._called[True] and module in self._called[False])
                )
                and (buffer := getattr(module, name, None)) is not None
                and not is_lazy(buffer)
            }
            return
        before: Before = {}
        own = threading.get_ident()  # the hook is called in all threads

        def note(module: nn.Module, inputs: Any) -> None:
            if torch.compiler.is_dynamo_compiling() or threading.get_ident() != own:
                return
            self.modules.add(module)
            for part in module.modules():
                require_no_exchange(part)
                if next(part.buffers(recurse=False), None) is not None:
                    self._called[part.training].add(part)
                _record(part, before)
                self._know(part)

        for reached in [*self._reached]:  # a loss may call a method of a module, which no hook sees
            _record(reached, before)
        _expect_hooks()
        with _NOTES.on(note):
            yield before

    def restored(self, before: Before) -> bool:
        """Restore recorded values; return True if there were any to restore."""
        found, idle = False, self.still_idle(before)
        for (module, name), (buffer, value, _) in before.items():
            if self.complete or _changed(module, name, buffer, value):
                if not self.complete and buffer is not None:  # one that is made is recorded in the next step
                    self._none = False
                    self._changing.setdefault(module, set()).update(_buffers(module) if _normalises(module) else [name])
                    if not module.training:
                        self._always.add(module)
                found = found or module not in idle
                module._buffers[name] = buffer  # a module may have assigned another one, under vmap one of its lanes
                if buffer is None or buffer.layout is not STRIDED:
                    continue
                if buffer.shape != value.shape or overlaps_itself(buffer):
                    buffer.data = value
                else:
                    buffer.data.copy_(value)  # graphs that saved the buffer with this value stay valid
        return found

    def still_idle(self, before: Before) -> set[nn.Module]:
        """Return the normalisations that nothing has called since either: the versions of their buffers show it."""
        if self._idle:
            self._idle -= {
                module
                for (module, name), (buffer, _, version) in before.items()
                if getattr(module, name, None) is not buffer or (buffer is not None and version_of(buffer) != version)
            }
        return {*self._idle}


@dataclass(eq=False)
class Kept:
    """Context that restores the buffers that its block changes.

    Args:
        buffers: the facts known about them.
        session: its ``buffers_skipped`` becomes true if there were any to restore, and the block has not raised.
        on_failure: restore them only if the block raises.
    """

    buffers: Buffers
    session: Any = None
    on_failure: bool = False
    _before: Before = field(default_factory=dict, init=False)

    def __enter__(self) -> Self:
        self._noted = self.buffers.noted()
        self._before = self._noted.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            restored = (error[0] is not None or not self.on_failure) and self.buffers.restored(self._before)
            if restored and error[0] is None and self.session is not None:
                self.session.buffers_skipped = True
        finally:
            self._noted.__exit__(None, None, None)

    def moved(self) -> bool:
        """Return True if graphs of the block are not valid after it: they may have saved buffers that it restores."""
        if not self._before:
            return False
        if self.buffers.complete:  # a comparison would wait for the device
            idle = self.buffers.still_idle(self._before)
            return any(module not in idle for module, _ in self._before)
        return any(_changed(*key, buffer, value) for key, (buffer, value, _) in self._before.items())


class _Notes(threading.local):
    """Hooks on the modules of the whole process, set by one thread; none of them while it traces.

    A trace would include the hooks, which are gone before it is used.
    """

    def __init__(self) -> None:
        self._on: list[tuple[Note, RemovableHandle]] = []

    @contextmanager
    def on(self, note: Note) -> Generator[None]:
        """Call ``note`` for the modules called in the block."""
        self._on.append((note, register_module_forward_pre_hook(note)))
        try:
            yield
        finally:
            self._on.pop()[1].remove()

    @contextmanager
    def off(self) -> Generator[None]:
        """Run the block without these hooks."""
        for _, handle in self._on:
            handle.remove()
        try:
            yield
        finally:
            self._on = [(note, register_module_forward_pre_hook(note)) for note, _ in self._on]


_NOTES = _Notes()


unnoted = _NOTES.off


def _expect_hooks() -> None:
    """Silence the warning that compiled modules see our hook; for good, as filters are shared with other threads."""
    text = "Using `torch.compile(module)` when there are global hooks"
    if not any(own[0] == "ignore" and own[1] is not None and own[1].match(text) for own in warnings.filters):
        warnings.filterwarnings("ignore", message=re.escape(text))


def _record(module: nn.Module, before: Before) -> None:
    """Record the values of a module's own buffers that evaluations may change."""
    if module.training or not _normalises(module):
        for name, buffer in module._buffers.items():
            if (module, name) in before:
                continue
            if buffer is None:
                before[module, name] = None, NOTHING, 0
            elif not is_lazy(buffer) and not buffer.is_meta:
                before[module, name] = buffer, buffer.detach().clone(), version_of(buffer)


def _changed(module: nn.Module, name: str, buffer: Tensor | None, value: Tensor) -> bool:
    """Return True if a buffer has another value, or has been replaced or made, since it was recorded."""
    if getattr(module, name, None) is not buffer:
        return True
    return buffer is not None and buffer.layout is STRIDED and not torch.equal(buffer, value)  # no sparse ones


def _form(module: nn.Module) -> tuple[bool, tuple[str, ...]]:
    """Return the mode of a module, and the names of its buffers."""
    return module.training, tuple([name for name, buffer in module._buffers.items() if buffer is not None])


def _normalises(module: nn.Module) -> bool:
    """Return True if a module has running statistics, which all change together."""
    return bool(getattr(module, "track_running_stats", False))


def _buffers(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_buffers(recurse=False)]


def _identity(loss: Any) -> tuple[Any, list[weakref.ref[nn.Module]]]:
    """Return the code of a loss, and the modules that it holds itself: other ones make it another loss."""
    function, held = loss, []
    if isinstance(loss, MethodType):
        function, held = loss.__func__, [loss.__self__]
    elif isinstance(loss, partial):
        function, held = loss.func, [*loss.args, *loss.keywords.values()]
    if not isinstance(function, FunctionType):
        return type(function), []
    held += _held(function)
    return function.__code__, [weakref.ref(value) for value in held if isinstance(value, nn.Module)]


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


def _held(function: FunctionType) -> Iterator[Any]:
    """Yield the objects in a function's closure, and its default arguments."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects that an object refers to."""
    if isinstance(value, types.FunctionType):
        yield from _held(value)
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

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
from typing import Any, NamedTuple, Self

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
Form = tuple[bool, tuple[str, ...], tuple[int, ...]]  # mode of a module, names of its buffers, ids of its parts
COUNT = "num_batches_tracked"
STRIDED = torch.strided
NOTHING = torch.empty(0)


@dataclass(slots=True)
class Known:
    """Facts about a module.

    Attributes:
        forms: those in recorded steps.
        changing: by mode, the names of the buffers that change in evaluations that begin or end in this mode.
        written: names of buffers that have been written without a change that was seen.
        idle: whether it is a normalisation that nothing has called yet.
    """

    forms: set[Form] = field(default_factory=set)
    changing: dict[bool, set[str]] = field(default_factory=lambda: {True: set(), False: set()})
    written: set[str] = field(default_factory=set)
    idle: bool = False


class Was(NamedTuple):
    """A buffer before an evaluation, its value and version then, and the module's mode and facts."""

    buffer: Tensor | None
    value: Tensor
    version: int
    training: bool
    known: Known


Before = dict[tuple[nn.Module, str], Was]


class Buffers:
    """The module buffers that an evaluation changes: running statistics, power iterations.

    A closure does not show which modules it calls, and an update need not show in a tensor's version. So in the first
    step, and in that after new losses or groups, the values of the buffers are recorded: of all modules that the losses
    can reach, and, by a hook, of those called; and again in a step that begins with one of them in another mode, with
    other buffers or with other parts. Those that changed are known from then on, and so are all normalisations that the
    losses can reach. (Not in every step, because the hook makes compiled modules recompile, and constant buffers can be
    large.) A version tells of a buffer that is first written in a later step: then the next step is recorded.
    """

    def __init__(self, *, complete: bool = False) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()
        self.complete = complete  # a whole step has been recorded
        self._none = True  # no buffer is known to change
        self._still: list[tuple[nn.Module, str, Tensor, int]] = []  # buffers that should stay, with their versions
        self._losses: dict[Any, Any] = {}  # code of the losses whose modules are known, with their own modules
        self._last: list[weakref.ref[Any]] = []  # the last losses
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all that the first step has called

    def expect(self, losses: Sequence[Loss | None]) -> None:
        """If losses are new, record the modules of the next step, and find those with buffers that they can reach.

        Also record them if a module is in a mode, or has buffers or parts, that no recorded step has seen.
        """
        modules = [*self._known.items()] if self._known else []
        for module, known in modules:
            if _form(module) not in known.forms:
                self.complete = False
                for part in module.modules():
                    self._know(part)
        if len(self._last) != len(losses) or not all(
            [ref() is own for ref, own in zip(self._last, losses, strict=True)]
        ):
            self._look_for_modules(losses)
        self._still = [
            (module, name, buffer, version_of(buffer))
            for module, known in (modules if self.complete else ())
            for name, buffer in module._buffers.items()
            if buffer is not None and not (name in known.changing[module.training] or name in known.written)
        ]

    def _look_for_modules(self, losses: Sequence[Loss | None]) -> None:
        """Look for modules with buffers that losses can reach; record the next step if one is new."""
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
                        if module._buffers:
                            self._know(module)

    def first_written(self) -> str:
        """Return buffers that an eager step has written for the first time, and let the next step be recorded."""
        found = []
        for module, name, buffer, version in self._still:
            if getattr(module, name, None) is not buffer or version_of(buffer) != version:
                self._known[module].written.add(name)
                found.append(f"{name} of {type(module).__name__}")
        self._still = []
        self.complete = self.complete and not found
        return ", ".join(found)

    def _know(self, module: nn.Module) -> Known:
        """Return the facts of a module; a normalisation changes all its buffers in training mode."""
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = Known()
            if _normalises(module):
                self._none = False
                known.changing[True].update(_buffers(module))
                known.idle = isinstance(getattr(module, COUNT, None), Tensor)
        known.forms.add(_form(module))
        return known

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()  # a copy of an optimizer records its own modules

    @property
    def constant(self) -> bool:
        """True if no evaluation changes any buffer."""
        return self.complete and self._none

    @property
    def mode(self) -> int:
        """Number of the known modules that are in training mode."""
        return sum([module.training for module in self._known]) if self._known else 0

    def changing(self) -> list[Tensor]:
        """Return the buffers that evaluations currently change, in a fixed order."""
        return [] if self._none else [buffer for _, _, buffer, _ in self._now() if buffer is not None]

    def _now(self) -> Iterator[tuple[nn.Module, str, Tensor | None, Known]]:
        """Yield the buffers that an evaluation may change which begins now."""
        for module, known in self._known.items():
            if names := known.changing[module.training]:
                for name in sorted(names):
                    yield module, name, getattr(module, name, None), known

    @contextmanager
    def noted(self) -> Generator[Before]:
        """Yield the values of the buffers before the block changes them."""
        if self.complete:
            yield {
                (module, name): _was(module, buffer, known)
                for module, name, buffer, known in self._now()
                if buffer is not None and not is_lazy(buffer)
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
                _record(part, self._know(part), before)

        for module, known in [*self._known.items()]:  # a loss may call a method of a module, which no hook sees
            _record(module, known, before)
        _expect_hooks()
        with _NOTES.on(note):
            yield before

    def restored(self, before: Before) -> bool:
        """Restore recorded values; return True if there were any to restore."""
        found = not self.complete and self._unmade(before)
        for (module, name), was in before.items():
            buffer, value = was.buffer, was.value
            if not self.complete:
                if not _changed(module, name, was):
                    if buffer is not None and version_of(buffer) != was.version:
                        was.known.written.add(name)
                    continue
                if buffer is not None:  # one that is made is recorded in the next step
                    self._none = False
                    for mode in (was.training, module.training):
                        was.known.changing[mode].update(_buffers(module) if _normalises(module) else [name])
            found = _called(module, name, was) or found
            module._buffers[name] = buffer  # a module may have assigned another one, under vmap one of its lanes
            if buffer is None or buffer.layout is not STRIDED:
                continue
            if buffer.shape != value.shape or (buffer.stride() != value.stride() and overlaps_itself(buffer)):
                buffer.data = value
            else:
                buffer.data.copy_(value)  # graphs that saved the buffer with this value stay valid
        return found

    def _unmade(self, before: Before) -> bool:
        """Take buffers away that the block has made: the pass at the end of the step makes them again."""
        found = False
        for module, known in self._known.items():
            for name, buffer in [*module._buffers.items()]:
                if not ((module, name) in before or buffer is None or is_lazy(buffer) or buffer.is_meta):
                    found = True
                    if _normalises(module):  # it was lazy
                        module.reset_running_stats()  # type: ignore[operator]
                    else:
                        del module._buffers[name]
                        known.forms.add(_form(module))  # the next step finds another one, and is recorded
        return found


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
        """Return True if graphs of the block are not valid after it: they may have saved buffers that it restores.

        Or buffers that the next block changes; so all of them count until it is known which ones change.
        """
        return any([not self.buffers.complete or _called(*key, was) for key, was in self._before.items()])


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


def _was(module: nn.Module, buffer: Tensor, known: Known) -> Was:
    return Was(buffer, buffer.detach().clone(), version_of(buffer), module.training, known)


def _record(module: nn.Module, known: Known, before: Before) -> None:
    """Record the values of a module's own buffers."""
    for name, buffer in module._buffers.items():
        if (module, name) in before:
            continue
        if buffer is None:
            before[module, name] = Was(None, NOTHING, 0, module.training, known)
        elif not is_lazy(buffer) and not buffer.is_meta:
            before[module, name] = _was(module, buffer, known)


def _changed(module: nn.Module, name: str, was: Was) -> bool:
    """Return True if a buffer has another value, or has been replaced or made, since it was recorded."""
    buffer = was.buffer
    if getattr(module, name, None) is not buffer:
        return True
    return buffer is not None and buffer.layout is STRIDED and not torch.equal(buffer, was.value)  # no sparse ones


def _called(module: nn.Module, name: str, was: Was) -> bool:
    """Return True unless the buffer belongs to a normalisation that nothing has called: its version shows it."""
    if was.known.idle:
        buffer = getattr(module, name, None)
        was.known.idle = buffer is was.buffer and (buffer is None or version_of(buffer) == was.version)
    return not was.known.idle


def _form(module: nn.Module) -> Form:
    """Return the mode of a module, the names of its buffers, and the ids of its parts."""
    names = [name for name, buffer in module._buffers.items() if buffer is not None]
    return module.training, tuple(names), tuple(map(id, module.children()))


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

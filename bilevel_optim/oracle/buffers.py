"""Module buffers that evaluations change: running statistics, power iterations."""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["Buffers", "Kept", "unnoted"]

Note = Callable[[nn.Module, Any], None]

PATIENCE = 60.0  # seconds that threads wait for each other


class Buffers:
    """The module buffers that an evaluation in training mode changes: running statistics, power iterations.

    A closure does not tell which modules it calls, and an update need not show in a tensor's version. So in the first
    step a hook notes the modules called, and what their buffers were; those that changed are known from then on, and so
    are normalisations that were in evaluation mode. (Not in every step, because the hook makes compiled modules compile
    anew, and constant buffers can be large.)
    """

    def __init__(self, *, complete: bool = False) -> None:
        self._changing: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.complete = complete  # a whole step has been seen
        self._none = True  # as long as nothing is known to change
        self._called: dict[bool, weakref.WeakSet[nn.Module]] = {mode: weakref.WeakSet() for mode in (True, False)}

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()  # a copy of an optimizer finds out about its modules anew

    @property
    def constant(self) -> bool:
        """Whether no evaluation changes any buffer."""
        return self.complete and self._none

    def changing(self) -> list[Tensor]:
        """The buffers that evaluations change now, in an order that stays."""
        if self._none:
            return []
        found = [getattr(m, name) for m, names in self._changing.items() if m.training for name in sorted(names)]
        return [buffer for buffer in found if buffer is not None]

    def kept(self) -> AbstractContextManager[Kept]:
        """Restore the buffers that the block changes; what it gives says whether there are any."""
        return nullcontext(Kept({}, self)) if self.constant else self._kept()

    @contextmanager
    def _kept(self) -> Generator[Kept]:
        with self._noted() as before:
            block = Kept(before, self)
            try:
                yield block
            finally:
                block.changed = self._restored(before)

    def kept_on_failure(self) -> AbstractContextManager[None]:
        """Restore the buffers that the block changes, if it raises."""
        return self._kept_on_failure()

    @contextmanager
    def _kept_on_failure(self) -> Generator[None]:
        with self._noted() as before:
            try:
                yield
            except BaseException:
                self._restored(before)
                raise

    @contextmanager
    def _noted(self) -> Generator[dict[tuple[nn.Module, str], Tensor]]:
        """What the buffers hold before the block changes them."""
        if self.complete:
            yield {
                (module, name): buffer.detach().clone()
                for module, names in self._changing.items()
                for name in names
                if self._moves(module) and (buffer := getattr(module, name)) is not None
            }
            return
        before: dict[tuple[nn.Module, str], Tensor] = {}
        own = threading.get_ident()  # the hook is called for every module of the process

        def note(module: nn.Module, inputs: Any) -> None:
            if torch.compiler.is_dynamo_compiling() or threading.get_ident() != own:
                return
            for part in module.modules():
                if next(part.buffers(recurse=False), None) is not None:
                    self._called[part.training].add(part)
                if part.training:
                    for name, buffer in part.named_buffers(recurse=False):
                        if (part, name) not in before:
                            before[part, name] = buffer.detach().clone()
                elif _normalises(part):
                    self._none = False
                    self._changing.setdefault(part, {*_buffers(part)})

        _expect_hooks()
        with _NOTES.on(note):
            yield before

    def _moves(self, module: nn.Module) -> bool:
        """Whether an evaluation may change a module: it trains, or losses switch it to and fro."""
        return module.training or (module in self._called[True] and module in self._called[False])

    def _restored(self, before: dict[tuple[nn.Module, str], Tensor]) -> bool:
        """Put back what was noted; whether there was something to put back."""
        found = False
        for (module, name), value in before.items():
            buffer = getattr(module, name)
            if buffer is not None and (self.complete or not torch.equal(buffer, value)):
                if not self.complete:
                    self._none = False
                    self._changing.setdefault(module, set()).update(_buffers(module) if _normalises(module) else [name])
                found = True
                buffer.data.copy_(value)  # graphs that saved the buffer with this value stay valid
        return found


class Kept:
    """What a block that keeps buffers has moved: so far, and in all."""

    __slots__ = ("_before", "_buffers", "changed")

    def __init__(self, before: dict[tuple[nn.Module, str], Tensor], buffers: Buffers) -> None:
        self._before, self._buffers, self.changed = before, buffers, False

    def moved(self) -> bool:
        """Whether graphs of the block may not be used after it: they may have saved what it puts back."""
        if self._buffers.complete:  # looking would wait for a device
            return bool(self._before)
        return any(
            (buffer := getattr(module, name)) is not None and not torch.equal(buffer, value)
            for (module, name), value in self._before.items()
        )


class _Notes:
    """Hooks for the modules of the whole process, by the threads that need them; none while torch traces.

    What torch traces would look at them, and they are gone before it is used. So a thread that traces waits until
    others need none, and they wait until it has traced; neither for ever, as a loss may wait for another thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._on: dict[int, list[tuple[Note, RemovableHandle]]] = {}
        self._tracing: list[int] = []

    @contextmanager
    def on(self, note: Note) -> Generator[None]:
        """A block in which the modules that this thread calls are noted."""
        own = threading.get_ident()
        with self._changed:
            self._changed.wait_for(partial(self._may_note, own), PATIENCE)
            self._on.setdefault(own, []).append((note, register_module_forward_pre_hook(note)))
        try:
            yield
        finally:
            with self._changed:
                self._on[own].pop()[1].remove()
                if not self._on[own]:
                    del self._on[own]
                self._changed.notify_all()

    @contextmanager
    def off(self) -> Generator[None]:
        """A block in which none is noted."""
        own = threading.get_ident()
        with self._changed:
            mine = self._on.pop(own, [])
            for _, handle in mine:
                handle.remove()
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._on and self._may_note(own), PATIENCE)
                self._tracing.append(own)
            try:
                yield
            finally:
                with self._changed:
                    self._tracing.remove(own)
                    self._changed.notify_all()
        finally:
            with self._changed:
                if mine:
                    try:
                        self._changed.wait_for(partial(self._may_note, own), PATIENCE)
                    finally:
                        self._on[own] = [(note, register_module_forward_pre_hook(note)) for note, _ in mine]

    def _may_note(self, own: int) -> bool:
        return all(thread == own for thread in self._tracing)


_NOTES = _Notes()
unnoted = _NOTES.off


def _expect_hooks() -> None:
    """Have no warning of compiled modules that they see our hook; for good, as other threads have it too."""
    text = "Using `torch.compile(module)` when there are global hooks"
    if not any(own[0] == "ignore" and own[1] is not None and own[1].match(text) for own in warnings.filters):
        warnings.filterwarnings("ignore", message=re.escape(text))


def _normalises(module: nn.Module) -> bool:
    """Whether a module has running statistics, which all change together."""
    return bool(getattr(module, "track_running_stats", False))


def _buffers(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_buffers(recurse=False)]

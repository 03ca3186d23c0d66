"""A block for tracing by torch: one thread at a time, with interrupts deferred."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor
from torch.utils._python_dispatch import _pop_mode

from ..errors import FILTERS

__all__ = ["TRACING", "gradients_aside", "hold_tracing_lock"]

TRACING = FILTERS  # torch's tracers have process-wide settings, as warnings have process-wide filters


@contextmanager
def hold_tracing_lock() -> Generator[None]:
    """Hold the tracing lock and defer an interrupt to the end of the block; a second interrupt acts at once.

    An interrupt while torch enters or leaves one of its modes would leave the mode on, or end the process.
    """
    with TRACING:
        depth = torch._C._len_torch_dispatch_stack()
        try:
            if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
                with _waiting():
                    yield
            else:
                yield
        finally:
            while torch._C._len_torch_dispatch_stack() > depth:
                _pop_mode()


@contextmanager
def _waiting() -> Generator[None]:
    handler, met = signal.getsignal(signal.SIGINT), list[FrameType | None]()
    assert callable(handler)

    def wait(number: int, frame: FrameType | None) -> None:
        met.append(frame)
        if len(met) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if len(met) == 1:
        handler(signal.SIGINT, met[0])


@contextmanager
def gradients_aside(tensors: Sequence[Tensor]) -> Generator[None]:
    """Remove the ``.grad`` of these tensors inside the block.

    Dynamo gives a fake tensor a fake ``.grad`` too. Python's garbage collector does not look into a ``.grad``, and a
    fake one leads back to all fake tensors of its trace, so that the trace would never be freed.
    """
    gradients = [t.grad for t in tensors]
    try:
        for t in tensors:
            t.grad = None
        yield
    finally:
        for t, gradient in zip(tensors, gradients, strict=True):
            t.grad = gradient

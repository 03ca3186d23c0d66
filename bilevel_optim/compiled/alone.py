"""A block in which torch traces: one at a time, and not to be interrupted anywhere."""

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

__all__ = ["TRACING", "alone", "gradients_aside"]

TRACING = FILTERS  # settings of torch's tracers are those of all threads, as filters of warnings are


@contextmanager
def alone() -> Generator[None]:
    """Trace in this block: other threads wait, and an interrupt waits for its end, but for a second one.

    An interrupt where torch enters or leaves one of its modes leaves it on, or ends the process.
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
    """A block in which these tensors have no ``.grad``.

    Dynamo gives the fake tensor of a tensor a fake ``.grad`` too. Python's garbage collector does not look into a
    ``.grad``, and a fake one leads back to all fake tensors of its trace, so that the trace would never be freed.
    """
    gradients = [t.grad for t in tensors]
    try:
        for t in tensors:
            t.grad = None
        yield
    finally:
        for t, gradient in zip(tensors, gradients, strict=True):
            t.grad = gradient

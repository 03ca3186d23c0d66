"""Whether a step is being traced: its values then stand for those of all later steps, and cannot be read.

Whoever traces says so here; nothing else of the package knows how it is done.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch.compiler import is_compiling

__all__ = ["Trace", "Untraceable", "end_region", "traced", "tracing"]


class Trace(Protocol):
    """What is told about the step that is being traced."""

    def end_region(self) -> None:
        """Here something begins or ends that the step repeats."""


_TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)


class Untraceable(Exception):
    """A step cannot be traced, for the reason given."""


def traced() -> bool:
    """Whether a step is being traced: no value may be read, and a loop makes all its steps."""
    return is_compiling() or _TRACE.get() is not None


def end_region() -> None:
    """Here something begins or ends that a step repeats: a trace may be divided here."""
    if is_compiling():
        return
    trace = _TRACE.get()
    if trace is not None:
        trace.end_region()


@contextmanager
def tracing(trace: Trace) -> Generator[None]:
    """What the block does is traced."""
    token = _TRACE.set(trace)
    try:
        yield
    finally:
        _TRACE.reset(token)

"""Traces of the library's code into a graph, and ranges in a profile."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.compiler import is_dynamo_compiling

__all__ = ["is_profiled", "is_tracing", "span", "tracing"]


class _State(threading.local):
    on = False


_STATE = _State()


def is_tracing() -> bool:
    """Return True in a trace, of a compiled step or of the user's own: tensors have no values to be read then."""
    return is_dynamo_compiling() or _STATE.on


@contextmanager
def tracing() -> Generator[None]:
    """Mark the block as a trace."""
    before, _STATE.on = _STATE.on, True
    try:
        yield
    finally:
        _STATE.on = before


def is_profiled() -> bool:
    """Return True if a profiler is on."""
    return torch.autograd.profiler._is_profiler_enabled


_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """Context for a range of that name in the profile; without a profiler a no-op at next to no cost.

    Example:
        >>> import torch
        >>> with torch.profiler.profile() as profile, span("here"):
        ...     _ = torch.ones(1)
        >>> "bilevel_optim.here" in {event.key for event in profile.key_averages()}
        True
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"bilevel_optim.{name}")

"""Whether the library's own code is being traced into a graph, for compiled steps."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["is_tracing", "tracing"]


class _State(threading.local):
    on = False


_STATE = _State()


def is_tracing() -> bool:
    """Return True if this thread traces a step: tensors have no values then, so nothing may be read from them."""
    return _STATE.on


@contextmanager
def tracing() -> Generator[None]:
    """Mark the block as a trace."""
    before, _STATE.on = _STATE.on, True
    try:
        yield
    finally:
        _STATE.on = before

"""The mark of a trace of the library's code into a graph."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from torch.compiler import is_dynamo_compiling

__all__ = ["is_tracing", "tracing"]


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

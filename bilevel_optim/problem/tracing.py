"""Whether a step is being traced: its values then stand for those of all later steps, and cannot be read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Untraceable", "traced", "tracing"]

_TRACING = ContextVar("tracing", default=False)


class Untraceable(Exception):
    """A step cannot be traced, for the reason given."""


def traced() -> bool:
    """Whether a step is being traced: no value may be read, and a loop makes all its steps."""
    return _TRACING.get()


@contextmanager
def tracing() -> Generator[None]:
    """Trace what the block does."""
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)

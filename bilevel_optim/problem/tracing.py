"""Whether a step is being traced: its values then stand for those of all later steps, and cannot be read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["Untraceable", "cut", "traced", "tracing"]

_CUTS: ContextVar[list[Node] | None] = ContextVar("cuts", default=None)


class Untraceable(Exception):
    """A step cannot be traced, for the reason given."""


def traced() -> bool:
    """Whether a step is being traced: no value may be read, and a loop makes all its steps."""
    return _CUTS.get() is not None


def cut() -> None:
    """Here something begins or ends that a step repeats: if it is being traced, its graph may be cut here."""
    cuts = _CUTS.get()
    if cuts is not None:
        mode = get_proxy_mode()
        if mode is not None:
            cuts.append(next(iter(reversed(mode.tracer.graph.nodes))))


@contextmanager
def tracing() -> Generator[list[Node]]:
    """Trace what the block does; gives a list of the nodes after which the graph may be cut."""
    cuts: list[Node] = []
    token = _CUTS.set(cuts)
    try:
        yield cuts
    finally:
        _CUTS.reset(token)

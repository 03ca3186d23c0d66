"""Whether a step is being traced: its values then stand for those of all later steps, and cannot be read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

__all__ = ["Trace", "Untraceable", "cut", "look", "read_by_the_host", "traced", "tracing"]


class Trace(NamedTuple):
    """What is found while a step is traced.

    Attributes:
        cuts: the nodes after which its graph may be cut.
        read: tensors that a loss has looked at on the host, whose values the graph has as constants.
        looks: the nodes that make a number of a vector, to see whether that is finite.
    """

    cuts: list[Node]
    read: list[Tensor]
    looks: list[Node]


_TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)


class Untraceable(Exception):
    """A step cannot be traced, for the reason given."""


def traced() -> bool:
    """Whether a step is being traced: no value may be read, and a loop makes all its steps."""
    return _TRACE.get() is not None


def cut() -> None:
    """Here something begins or ends that a step repeats: if it is being traced, its graph may be cut here."""
    trace = _TRACE.get()
    if trace is not None:
        trace.cuts.extend(_last_node())


def look(vector: Tensor) -> Tensor:
    """In a trace, a number that is finite only if a vector is; the vector is looked at if it is used elsewhere."""
    number = vector.detach().sum(dtype=torch.promote_types(torch.float32, vector.dtype))
    trace = _TRACE.get()
    if trace is not None:
        trace.looks.extend(_last_node())
    return number


def _last_node() -> list[Node]:
    mode = get_proxy_mode()
    return [] if mode is None else [next(iter(reversed(mode.tracer.graph.nodes)))]


def read_by_the_host(tensor: Tensor) -> None:
    """A loss looks at a tensor's values on the host."""
    trace = _TRACE.get()
    if trace is not None and all(known is not tensor for known in trace.read):
        trace.read.append(tensor)


@contextmanager
def tracing() -> Generator[Trace]:
    """Trace what the block does."""
    trace = Trace([], [], [])
    token = _TRACE.set(trace)
    try:
        yield trace
    finally:
        _TRACE.reset(token)

"""How a closure over live tensors is evaluated at other values: one of two strategies, which the oracles do not see.

``in_place`` puts the values into the live tensors for a while: it works with whatever torch does with the closure
(compiled modules, checkpointing, hooks), but for one set of values at a time and not inside a larger graph.
``substituted`` replaces the live tensors in every torch call: no value travels by an exchange of storages, so that a
trace sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from ..problem.vector import Vector, is_sharded
from .substitution import Substitution

__all__ = ["Evaluation", "in_place", "placed", "substituted"]

Evaluation = Callable[[Vector, Vector | None], AbstractContextManager[Vector]]


@contextmanager
def placed(live: Sequence[Tensor], values: Sequence[Tensor] | None) -> Generator[None]:
    """Let ``live`` hold ``values`` inside the block.

    Graphs made inside must not be used outside: a graph saves the live leaf itself, and would read the restored value.
    """
    if values is None:
        yield
        return
    if any(map(is_sharded, live)):
        # A sharded parameter's storage is known to its FSDP group by address: write into it instead of exchanging it.
        before = Vector(live).detach().clone()
        Vector(live).copy_(values)
        try:
            yield
        finally:
            Vector(live).copy_(before)
        return
    storages = [t.data for t in live]
    try:
        for tensor, value in zip(live, values, strict=True):
            tensor.data = value.detach()
        yield
    finally:
        for tensor, storage in zip(live, storages, strict=True):
            tensor.data = storage


@contextmanager
def in_place(live: Vector, values: Vector | None) -> Generator[Vector]:
    """Evaluate inside the block with ``values`` in the live tensors (None: what they hold), which are the variables."""
    with placed(live, values):
        yield live


@contextmanager
def substituted(live: Vector, values: Vector | None) -> Generator[Vector]:
    """Evaluate inside the block with other tensors in place of the live ones: these are the variables."""
    variables = Vector(v.detach().requires_grad_(t.requires_grad) for v, t in zip(values or live, live, strict=True))
    with Substitution(live, variables):
        yield variables

"""Evaluation of a closure over live tensors at other values.

``in_place`` puts the values into the live tensors for a while. It works with everything that torch does with the
closure (compiled modules, checkpointing, hooks), but for one set of values at a time and not inside a larger graph.
Copies and compiled steps replace the live tensors in every torch call instead (`Substitution`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..problem.vector import Vector, any_sharded

__all__ = ["Evaluation", "in_place"]

Values = Sequence[Vector | None]
Evaluation = Callable[[Sequence[Vector], Values], AbstractContextManager[Sequence[Vector]]]


class in_place:
    """Put values into live tensors inside the block; yields the live tensors as variables.

    Graphs made inside must not be used outside: a graph saves the live leaf itself, and would read the restored value.

    Args:
        live: vectors of live tensors.
        values: for each a vector, or None to keep its values.
    """

    __slots__ = ("_before", "_live", "_moved", "_values")

    def __init__(self, live: Sequence[Vector], values: Values) -> None:
        self._live = live
        self._moved: list[Tensor] = []
        self._values: list[Tensor] = []
        for tensors, new in zip(live, values, strict=True):
            if new is not None:
                self._moved += tensors
                self._values += new
        self._before: Sequence[Tensor] | None = None

    def __enter__(self) -> Sequence[Vector]:
        moved = self._moved
        if any_sharded(moved):
            # FSDP knows a sharded parameter's storage by its address: write into it instead.
            self._before = Vector(moved).detach().clone()
            Vector(moved).copy_(self._values)
            return self._live
        before = [t.data for t in moved]
        try:
            for tensor, value in zip(moved, self._values, strict=True):
                tensor.data = value.detach()
        except BaseException:
            for tensor, storage in zip(moved, before, strict=True):
                tensor.data = storage
            raise
        self._before = before
        return self._live

    def __exit__(self, *error: Any) -> None:
        if isinstance(self._before, Vector):
            Vector(self._moved).copy_(self._before)
        elif self._before is not None:
            for tensor, storage in zip(self._moved, self._before, strict=True):
                tensor.data = storage

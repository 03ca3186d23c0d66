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

__all__ = ["Evaluation", "in_place", "placed"]

Values = Sequence[Vector | None]
Evaluation = Callable[[Sequence[Vector], Values], AbstractContextManager[Sequence[Vector]]]


class placed:
    """Let ``live`` hold ``values`` inside the block.

    Graphs made inside must not be used outside: a graph saves the live leaf itself, and would read the restored value.
    """

    __slots__ = ("_before", "_live", "_values")

    def __init__(self, live: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._live, self._values = live, values
        self._before: Sequence[Tensor] | None = None

    def __enter__(self) -> None:
        live = self._live
        if any_sharded(live):
            # FSDP knows a sharded parameter's storage by its address: write into it instead.
            self._before = Vector(live).detach().clone()
            Vector(live).copy_(self._values)
            return
        before = [t.data for t in live]
        try:
            for tensor, value in zip(live, self._values, strict=True):
                tensor.data = value.detach()
        except BaseException:
            _exchanged(live, before)
            raise
        self._before = before

    def __exit__(self, *error: Any) -> None:
        if isinstance(self._before, Vector):
            Vector(self._live).copy_(self._before)
        elif self._before is not None:
            _exchanged(self._live, self._before)


def _exchanged(live: Sequence[Tensor], storages: Sequence[Tensor]) -> None:
    for tensor, storage in zip(live, storages, strict=True):
        tensor.data = storage


class in_place:
    """Put values into live tensors inside the block; yields the live tensors as variables.

    Args:
        live: vectors of live tensors.
        values: for each a vector, or None to keep its values.
    """

    __slots__ = ("_block", "_live")

    def __init__(self, live: Sequence[Vector], values: Values) -> None:
        self._live = live
        self._block = [placed(t, v) for t, v in zip(live, values, strict=True) if v is not None]

    def __enter__(self) -> Sequence[Vector]:
        for block in self._block:
            block.__enter__()
        return self._live

    def __exit__(self, *error: Any) -> None:
        for block in reversed(self._block):
            block.__exit__(None, None, None)

"""What every estimator returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..problem.vector import Vector
from ..solvers.lower import Memory

__all__ = ["Estimate", "Write"]


class Write(NamedTuple):
    """Rows of a tensor that a step changes, where a copy of all of it would cost too much."""

    table: Tensor
    rows: Tensor | int
    values: Tensor


@dataclass(frozen=True)
class Estimate:
    """An estimate of the hypergradient, and what came with it.

    Attributes:
        loss: upper loss at the point where the estimate was made, a scalar tensor.
        gradient: estimate of the hypergradient, shaped like x.
        diagnostics: scalars and small tensors worth a look.
        memory: tensors shaped like y to remember for the next estimate, by name.
        upper_memory: the same shaped like x.
        start: derivative in the lower value that the steps began at, if it is known.
        lower: the improved y. None: as it was.
        solver: the lower optimizer's memory afterwards. None: as it was.
        tables: new tables whose rows mix all the tensors of y, by name; they are remembered with the first of these.
        writes: rows of large tables to be changed.
        numbers: plain numbers that change, by name.
    """

    loss: Tensor
    gradient: Vector
    diagnostics: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Vector] = field(default_factory=dict)
    upper_memory: dict[str, Vector] = field(default_factory=dict)
    start: Vector | None = None
    lower: Vector | None = None
    solver: Memory | None = None
    tables: dict[str, Tensor] = field(default_factory=dict)
    writes: tuple[Write, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)

    def noting(self, **diagnostics: Any) -> Estimate:
        """The same with more diagnostics; those that are None are left out."""
        known = {name: value for name, value in diagnostics.items() if value is not None}
        return replace(self, diagnostics={**self.diagnostics, **known})

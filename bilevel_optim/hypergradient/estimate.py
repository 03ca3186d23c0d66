"""What every estimator returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem.values import changed, values
from ..problem.vector import Vector
from ..solvers.lower import Memory

__all__ = ["Estimate", "Write", "measured"]


class Write(NamedTuple):
    """Rows of a tensor that a step changes, where a copy of all of it would cost too much."""

    table: Tensor
    rows: Tensor | int
    values: Tensor


@values
class Estimate:
    """An estimate of the hypergradient, and what came with it.

    Attributes:
        loss: upper loss at the point where the estimate was made, a scalar tensor.
        gradient: estimate of the hypergradient, shaped like x.
        diagnostics: scalars and small tensors worth a look; a vector stands for its norm.
        memory: tensors shaped like y to remember for the next estimate, by name.
        upper_memory: the same shaped like x.
        start: derivative in the lower value that the steps began at, if it is known.
        lower: the improved y. None: as it was.
        solver: the lower optimizer's memory afterwards. None: as it was.
        tables: new tables whose rows mix all the tensors of y, by name; they are remembered with the first of these.
        writes: rows of large tables to be changed.
        numbers: plain numbers that change, by name.
        complete: every vector that an oracle gave has been added into the gradient, y or the memory, so that these are
            not finite if one of them was not, and need alone be looked at.
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
    complete: bool = False

    @property
    def figures(self) -> dict[str, Any]:
        """The diagnostics with that of the estimate itself."""
        return {"hypergradient_norm": self.gradient, **self.diagnostics}

    @property
    def shown(self) -> list[Tensor] | None:
        """Where it shows whether a vector of an oracle was not finite. With None, look at the vectors themselves."""
        if not self.complete:
            return None
        found = [*self.gradient]
        for vector in (self.lower, *self.memory.values(), *self.upper_memory.values()):
            found += vector or ()
        return found

    def noting(self, **diagnostics: Any) -> Estimate:
        """The same with more diagnostics; those that are None are left out."""
        known = {name: value for name, value in diagnostics.items() if value is not None}
        return changed(self, diagnostics={**self.diagnostics, **known})


def measured(figures: Mapping[str, Any], above: int = -1) -> dict[str, Any]:
    """Diagnostics with norms in place of vectors; only if these have more than so many entries together."""
    vectors = {name: value for name, value in figures.items() if type(value) is Vector}
    if not vectors or sum([t.numel() for vector in vectors.values() for t in vector]) <= above:
        return {**figures}
    with torch.set_grad_enabled(False):
        return {**figures, **{name: vector.norm() for name, vector in vectors.items()}}

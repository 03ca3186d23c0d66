"""The result of every estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem.vector import Later, Vector
from ..pytree import replace, values
from ..solvers.lower import LowerResult, Memory

__all__ = ["Estimate", "Write", "measured"]


class Write(NamedTuple):
    """Rows of a tensor that a step changes, where a copy of the whole tensor would cost too much."""

    table: Tensor
    rows: Tensor | int
    values: Tensor


@values
class Estimate:
    """An estimate of the hypergradient, with the diagnostics and the new state that belong to it.

    Attributes:
        loss: upper loss at the point where the estimate was made, a scalar tensor.
        gradient: estimate of the hypergradient, shaped like x.
        diagnostics: useful scalars and small tensors; a vector is reported by its norm; others may be computed later.
        memory: tensors shaped like y to remember for the next estimate, by name.
        upper_memory: the same shaped like x; neither is reduced over tasks or ranks.
        start: derivative in the initial lower value of the steps, if it is known.
        lower: the improved y. None: unchanged.
        solver: the lower optimizer's new state. None: unchanged.
        tables: new tables whose rows mix all the tensors of y, by name; they are remembered with the first of these.
        writes: rows of large tables to be changed.
        numbers: plain numbers that change, by name.
        covers_all_vectors: every vector that an oracle gave has been added into the gradient, y or the memory. So these
            are not finite if one of the vectors was not, and no others need be checked.
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
    covers_all_vectors: bool = False

    @property
    def figures(self) -> dict[str, Any]:
        """The diagnostics together with the estimate itself."""
        return {"hypergradient_norm": self.gradient, **self.diagnostics}

    @property
    def tensors_to_check(self) -> list[Tensor] | None:
        """Tensors that are not finite if a vector of an oracle was not; if None, check the vectors themselves."""
        if not self.covers_all_vectors:
            return None
        found = [*self.gradient]
        for vector in (self.lower, *self.memory.values(), *self.upper_memory.values()):
            found += vector or ()
        return found

    def with_lower(self, moved: LowerResult) -> Estimate:
        """Return a copy with y, the lower optimizer's state and missing diagnostics of the lower steps before it."""
        return replace(
            self,
            lower=moved.y,
            solver=None if moved.plain else moved.memory,
            diagnostics={**moved.diagnostics, **self.diagnostics},
            covers_all_vectors=self.covers_all_vectors and moved.plain,  # a sign step hides a non-finite gradient
        )


def measured(figures: Mapping[str, Any], above: int = -1) -> dict[str, Any]:
    """Compute diagnostics that are kept as vectors, if these have more than ``above`` entries together."""
    kept = {
        name: (Vector.norm, (value,)) if type(value) is Vector else value
        for name, value in figures.items()
        if type(value) in (Vector, Later)
    }
    entries = {id(v): sum(map(Tensor.numel, v)) for _, vectors in kept.values() for v in vectors}
    if not kept or sum(entries.values()) <= above:
        return {**figures}
    with torch.set_grad_enabled(False):
        return {**figures, **{name: function(*vectors) for name, (function, vectors) in kept.items()}}

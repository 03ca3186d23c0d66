"""What every estimator returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..problem.vector import Vector

__all__ = ["Estimate"]


@dataclass
class Estimate:
    """An estimate of the hypergradient, and what came with it.

    Attributes:
        loss: upper loss at the point where the estimate was made, a scalar tensor.
        gradient: estimate of the hypergradient, shaped like x.
        diagnostics: scalars and small tensors worth a look.
        memory: tensors shaped like y to remember for the next estimate, by name.
        upper_memory: the same shaped like x.
        start: derivative in the lower value that the steps began at, if it is known.
    """

    loss: Tensor
    gradient: Vector
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Vector] = field(default_factory=dict)
    upper_memory: dict[str, Vector] = field(default_factory=dict)
    start: Vector | None = None

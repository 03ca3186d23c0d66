"""The update of x: after a step's estimate, after ``backward``, or after a captured estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..problem.parameters import by_level, tensors_of
from ..problem.vector import Vector
from .checkpoint import initialises
from .method import StepFunctions
from .step import StepInputs, Update
from .transaction import Transaction, Write, writes_of_update

__all__ = ["Updating"]


class Updating(StepFunctions):
    """The part of an optimizer that moves x."""

    param_groups: list[dict[str, Any]]
    state: Any
    numbers: dict[str, Any]
    generator: torch.Generator | None
    _given: Callable[..., StepInputs]
    _initialise: Callable[[], None]
    _parameters: Callable[[str], list[Tensor]]

    @torch.no_grad()
    def _update(self) -> None:
        """Update the upper parameters that have a ``.grad``."""
        if initialises(self):  # type: ignore[arg-type]
            return self._initialise()
        groups = by_level(self.param_groups)
        for group in groups["upper"]:
            group["params"] = [p for p in group["params"] if p.grad is not None]
        moved = [p for group in groups["upper"] for p in group["params"]]
        if not moved:
            return
        given = self._given(groups, moved, tensors_of(groups["lower"], "lower"))
        with Transaction(self.generator) as transaction:
            update = self.update(Vector(p.detach() for p in moved), Vector(p.grad for p in moved), given)
            transaction.commit(self._writes_of_update(moved, update, {}))

    @torch.no_grad()
    def _update_after(self, estimate: Estimate, x: Sequence[Tensor], y: Sequence[Tensor]) -> list[Write]:
        """Writes of the update that follows from an estimate which has been made by a graph."""
        groups = by_level(self.param_groups)
        given = self._given(groups, x, y).after(estimate)
        return self._writes_of_update(x, self.update(Vector(x).detach(), estimate.gradient, given), estimate.numbers)

    def _writes_of_update(self, moved: Sequence[Tensor], update: Update, numbers: dict[str, Any]) -> list[Write]:
        """Writes of an update of x, after those of an estimate with these numbers."""
        writes = writes_of_update(self.state, moved, partial(self._parameters, "lower"), update)
        return [*writes, partial(vars(self).update, numbers={**self.numbers, **numbers, **update.numbers})]

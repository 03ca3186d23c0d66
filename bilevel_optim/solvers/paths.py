"""The lower solve as a map x -> y_N(x), followed from several x at a time on the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..oracle.copies import evaluate_copies, lanes_at_once
from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.vector import Vector, stack
from .lower import Factory, LowerSolver

__all__ = ["Paths"]


class Paths:
    """Lower solves from different x that share everything else: start, samples in their order, steps, optimizer.

    Each path has an optimizer state of its own, which begins anew with the path.

    Args:
        oracle: the losses.
        factory: makes the lower optimizer; it must treat every entry alone, because paths are stacked.
        groups: the lower parameter groups.
        start: y at the beginning of every path; None: every path starts at the last tensors of its own x.
        samples: one lower sample per step.
    """

    def __init__(
        self,
        oracle: Oracle,
        factory: Factory,
        groups: Sequence[dict[str, Any]],
        start: Vector | None,
        samples: Sequence[Sample],
    ) -> None:
        self.oracle, self.samples = oracle, samples
        self._factory, self._groups, self._start = factory, groups, start
        self._solvers: dict[int, LowerSolver] = {}
        self.gradient: Vector | None = None  # the last lower gradient of the last call, stacked

    def at_once(self, n: int) -> int:
        """How many of n paths run together."""
        return lanes_at_once(self.oracle, n)

    def run(self, upper: Vector) -> Vector:
        """Ends of the paths from these x, tensors of shape (n, ...); the result lasts until the next call."""
        n = len(upper[0])
        solver = self._solver(n)
        y = solver.variables
        if self._start is None:  # with tasks, each of them starts there
            own = Vector(upper[-len(y) :])
            y.copy_(
                Vector((s if s.dim() == t.dim() else s.unsqueeze(1)).expand_as(t) for s, t in zip(own, y, strict=True))
            )
        else:
            y.copy_(Vector(t.unsqueeze(0).expand_as(v) for t, v in zip(self._start, y, strict=True)))
        solver.reset()
        if n == 1:
            # The x of a single path stays in place for all its steps, so that what depends on x alone is kept.
            with self.oracle.at(upper=upper.lane(0)):
                self.gradient = self._descend(solver, y, None)
        else:
            self.gradient = self._descend(solver, y, upper)
        return y

    def _descend(self, solver: LowerSolver, y: Vector, upper: Vector | None) -> Vector | None:
        samples = iter(self.samples)
        return solver.run(len(self.samples), lambda: partial(self._gradient, y, upper, next(samples)))

    def _gradient(self, y: Vector, upper: Vector | None, sample: Sample) -> tuple[Tensor, Vector]:
        n = len(y[0])
        result = evaluate_copies(self.oracle, y, [0.0] * n, [1.0] * n, sample, sample, wrt="lower", upper_copies=upper)
        return result.lower.sum(), result.gradient

    def _solver(self, n: int) -> LowerSolver:
        if n not in self._solvers:
            variables = stack([self.oracle.y.detach()] * n)
            states: list[dict[str, Any]] = [{} for _ in variables]
            self._solvers[n] = LowerSolver(self._factory, self._groups, [t.requires_grad_() for t in variables], states)
            self._solvers[n].follow(self._groups)
        return self._solvers[n]

"""The lower solve as a map x -> y_N(x), run from several x at a time on the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..oracle.copies import Copies
from ..oracle.doors import OPTIONS, PROJECTION, STEP
from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.vector import Vector, stack
from .lower import LowerRule

__all__ = ["STACK", "Paths"]

ANOTHER_START = (
    "lower_init returns another start when it is called again at the same upper parameters, so differences of starts "
    "would be noise: let it draw from torch's default generator, which is set back, or from one that it makes anew"
)
STACK = 1 << 22  # most entries of x and y in paths that run together: larger paths gain nothing from it


class PathEnds(NamedTuple):
    """Results of paths, each with a leading dimension of their number.

    Attributes:
        y: where they end.
        first: gradients of g at the first steps; None without steps.
        last: those at the last steps, or the residual of a projected step.
        total: sums of g over the steps.
        start: where they begin.
    """

    y: Vector
    first: Vector | None
    last: Vector | None
    total: Tensor
    start: Vector


class Paths:
    """Lower solves from different x that share everything else: start, samples in their order, steps, optimizer.

    Each path starts with an optimizer state of its own.

    Args:
        oracle: the losses; its y is the start of every path.
        rule: returns the update for tensors like these; it must treat entries independently, because paths are stacked.
        samples: one lower sample per step.
        from_upper: for each tensor of y, where in its own x every path starts instead, or the start of all of them.
        start: returns the start, called at the x of each path, if that depends on x.
    """

    def __init__(
        self,
        oracle: Oracle,
        rule: Callable[[Vector], LowerRule],
        samples: Sequence[Sample],
        *,
        from_upper: Sequence[int | Tensor] | None = None,
        start: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        self.oracle, self.samples, self._rule, self._from_upper = oracle, samples, rule, from_upper
        self._start, self._begun = start, False

    def at_once(self, n: int) -> int:
        """Return how many of n paths run together; if all of them may, as many as ``STACK`` allows."""
        session = self.oracle.session
        if self.oracle.sharded or not session.vmaps(self.oracle.lanes is not None) or session.doors & {OPTIONS, STEP}:
            return 1
        if session.options.vectorize is True:
            entries = sum(t.numel() for t in (*self.oracle.x, *self.oracle.y))
            n = min(n, max(STACK // max(entries, 1), 1))
        return session.options.at_once(n)

    def run(self, upper: Vector) -> PathEnds:
        """Return the results of paths from these x."""
        n, doors = len(upper[0]), self.oracle.session.doors
        with self._at(upper, 0) if doors and n == 1 else nullcontext():  # all that reads x reads that of the path
            return self._run(upper, n)

    def _at(self, upper: Vector, i: int) -> AbstractContextManager[Any]:
        """Context: the live x has the values of one path."""
        return self.oracle.at(upper=upper.lane(i)).placed()

    def _starts(self, upper: Vector, n: int) -> Vector:
        """Return the start of each path, from the function; raise if it is not that of the step at the same x."""
        assert self._start is not None
        found = []
        for i in range(n):
            with self._at(upper, i):
                found.append(Vector(s.detach().to(t) for s, t in zip(self._start(), self.oracle.y, strict=True)))
        if not self._begun and bool((found[0] - self.oracle.y).norm() > 1e-6 * found[0].norm()):
            raise ValueError(ANOTHER_START)
        self._begun = True
        return stack(found)

    def _run(self, upper: Vector, n: int) -> PathEnds:
        start = stack([self.oracle.y] * n) if self._start is None else self._starts(upper, n)
        if self._from_upper is not None:  # with tasks, each starts there
            own = [upper[s] if isinstance(s, int) else s.unsqueeze(0) for s in self._from_upper]
            start = Vector(
                (s if s.dim() == t.dim() else s.unsqueeze(1)).expand_as(t).clone()
                for s, t in zip(own, start, strict=True)
            )
        rule = self._rule(start)
        if n > 1 and PROJECTION in self.oracle.session.doors:
            rule = rule.with_limits(replace(rule.limits, at=partial(self._at, upper)))
        # The x of a single path is that of all its steps, so that what depends on x alone is kept.
        oracle, copies = (self.oracle.at(upper=upper.lane(0)), None) if n == 1 else (self.oracle, upper)
        samples, values = iter(self.samples), list[Tensor]()
        first = list[Vector]()

        def draw() -> Callable[[Vector], tuple[Tensor, Vector]]:
            sample = next(samples)

            def gradient(y: Vector) -> tuple[Tensor, Vector]:
                (own,), slopes = Copies(oracle, y, copies).lower_slopes(("lower", sample, [1.0] * n))
                values.append(own)
                if not first:
                    first.append(slopes)
                return own.sum(), slopes

            return gradient

        solved = rule.run(start, rule.fresh(), len(self.samples), draw)
        solved.watched(oracle.session, rule, start, len(self.samples))
        total = torch.stack(values).sum(0) if values else start[0].new_zeros(n)
        return PathEnds(solved.y, first[0] if first else None, solved.residual, total, start)

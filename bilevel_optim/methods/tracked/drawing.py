"""Which tasks a step looks at: all of them, what the sampler draws, or a draw by importance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...optimizer.draws import TaskDraw
from ...optimizer.step import StepInputs
from ...problem.random import device_of
from ...problem.tasks import sample
from ...problem.vector import Vector
from .rows import Rows

__all__ = ["CHANCES", "Drawing", "Drawn", "Source", "Weighted", "importance_probabilities", "others"]

UNIFORM_PART = 0.2  # of adaptive probabilities, so that 1/p stays bounded
CHANCES = ("probability", "cumulative")  # tables of adapted probabilities, and of their sums


class Drawn(NamedTuple):
    """What a step looks at.

    Attributes:
        ids: different tasks in increasing order.
        scale: 1/m over the share of the draws that were each of them.
        tables: to be remembered.
        batches: the data of these tasks, by level; None: not drawn yet.
        probes: rows for the direction, likewise.
        others: all other rows, if they are to be brought up to date and it is known which they are.
    """

    ids: Tensor
    scale: Tensor
    tables: Rows
    batches: Mapping[str, Any] | None = None
    probes: Tensor | None = None
    others: Tensor | None = None


class Source(NamedTuple):
    """What tasks are drawn with.

    Attributes:
        generator: of the random numbers.
        steps: how many were made.
        tables: what is known of the rows.
        agreed: gives what all ranks take, from what this one has drawn.
    """

    generator: torch.Generator | None
    steps: int = 0
    tables: Mapping[str, Tensor] = {}
    agreed: Callable[[Tensor], Tensor] = Tensor.cpu

    @classmethod
    def of(cls, inputs: StepInputs) -> Source:
        """That of a step."""
        return cls(inputs.generator, inputs.steps, inputs.tables, partial(agreed, inputs=inputs))


@dataclass(frozen=True, eq=False)
class Drawing:
    """What the sampler draws, taken to be uniform.

    Attributes:
        task_batch: tasks in a step; None: all of them, without a draw.
        probes: further rows that are drawn for the direction.
    """

    task_batch: int | None = None
    probes: int = 0

    def batch(self, m: int) -> int:
        """Tasks with data in a step."""
        return m if self.task_batch is None else min(self.task_batch, m)

    def share(self, m: int) -> float:
        """The part q of the tasks that a step looks at."""
        return self.batch(m) / m

    def draw(self, sampler: Any, m: int, source: Source) -> Drawn:
        """The tasks of a step; without a sampler the one problem."""
        if sampler is None or self.task_batch is None:
            return Drawn(torch.arange(m, device="cpu"), torch.ones(m, dtype=torch.float64, device="cpu"), {})
        return self.some(sampler, m, source)

    def draws(self, m: int) -> list[TaskDraw]:
        """What `draw` draws from the sampler."""
        return [] if self.task_batch is None else [TaskDraw("tasks", self.batch(m))]

    def some(self, sampler: Any, m: int, source: Source) -> Drawn:
        """A few tasks."""
        drawn = sample(sampler, self.batch(m), source.generator)
        if not isinstance(drawn, Tensor) or drawn.is_floating_point() or drawn.dim() != 1:
            raise ValueError("a few rows need a sampler of task ids: sample(n, generator) must return n row numbers")
        ids, counts = torch.unique(source.agreed(drawn.long()), return_counts=True)
        if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < m):
            raise ValueError(f"tasks.sample returned ids from {int(ids[0])} to {int(ids[-1])} for {m} rows")
        return Drawn(ids, counts.double() / self.share(m), {})

    def probe(self, m: int, source: Source) -> Tensor:
        """Rows for the direction, independent of those that see data."""
        generator = source.generator
        return source.agreed(torch.randint(m, (self.probes,), generator=generator, device=device_of(generator)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What rows remember for later draws."""
        return ()

    def opened(self, m: int) -> Rows:
        """Tables for later draws, as they begin."""
        return {}

    def noted(self, derivatives: Rows, before: Rows) -> Rows:
        """That, after something was seen of them."""
        return {}


@dataclass(frozen=True, eq=False)
class Weighted(Drawing):
    """Tasks drawn with given probabilities, with replacement.

    Attributes:
        chances: the probabilities, and their sums; None: from the sizes of the derivatives last seen, once for each
            m / task_batch steps.
    """

    chances: tuple[Tensor, Tensor] | None = None

    def draws(self, m: int) -> list[TaskDraw]:
        """Nothing: the probabilities decide."""
        return []

    def some(self, sampler: Any, m: int, source: Source) -> Drawn:
        n = self.batch(m)
        period, known, tables = math.ceil(m / n), {**source.tables}, {}
        if self.chances is None and (source.steps % period == 1 % period or CHANCES[0] not in known):
            best = importance_probabilities(known["size"].cpu())
            chances = (1 - UNIFORM_PART) * best + UNIFORM_PART / m
            tables = dict(zip(CHANCES, (chances, chances.cumsum(0)), strict=True))
        chances, sums = self.chances or ({**known, **tables}[name] for name in CHANCES)
        if len(chances) != m:
            raise ValueError(f"there are {len(chances)} probabilities for {m} tasks")
        device = device_of(source.generator)
        uniform = torch.rand(n, generator=source.generator, dtype=torch.float64, device=device).cpu()
        drawn = torch.searchsorted(sums, uniform * sums[-1], right=True).clamp_max(m - 1)
        ids, counts = torch.unique(source.agreed(drawn), return_counts=True)
        return Drawn(ids, counts / (n * chances[ids]), tables)

    @property
    def notes(self) -> tuple[str, ...]:
        return ("size",) if self.chances is None else ()

    def opened(self, m: int) -> Rows:
        even = torch.full((m,), 1 / m, dtype=torch.float64, device="cpu")
        return {} if self.chances else dict(zip(CHANCES, (even, even.cumsum(0)), strict=True))

    def noted(self, derivatives: Rows, before: Rows) -> Rows:
        if self.chances is not None:
            return {}
        size = torch.stack([t.flatten(1).square().sum(1) for t in derivatives.values()]).sum(0)
        return {"size": (before["size"] + size) / 2 if "size" in before else size}


def agreed(drawn: Tensor, inputs: StepInputs) -> Tensor:
    """What the first rank has drawn."""
    if inputs.ranks.world == 1:
        return drawn.cpu()
    return inputs.ranks.same(Vector([drawn.to(inputs.lower[0].device)]))[0].cpu()


def others(ids: Tensor, count: int) -> Tensor:
    """All of so many rows but these."""
    is_other = torch.ones(count, dtype=torch.bool, device="cpu")
    is_other[ids] = False
    return is_other.nonzero().flatten()


def importance_probabilities(sizes: Tensor) -> Tensor:
    r"""Probabilities :math:`p_i \propto \sqrt{A_i}`, which make :math:`C(p) = \sum_i A_i / p_i` smallest.

    :math:`C(p)/m` is the factor of the theory's sample complexity. With these it is
    :math:`(\sum_i \sqrt{A_i})^2 / m`, by :math:`1 + cv^2(\sqrt A)` less than with uniform ones.

    Args:
        sizes: :math:`A_i`, the sum of the squared sizes of a task's derivatives; shape (m,).
    """
    roots = sizes.double().sqrt()
    if not bool((roots >= 0).all() and roots.sum() > 0 and roots.isfinite().all()):
        raise ValueError("sizes must be non-negative and finite numbers that are not all zero")
    return roots / roots.sum()

"""Choice of the tasks of a step: all of them, a draw of the sampler, or a draw by importance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...optimizer.step import StepInputs, TaskDraw
from ...problem.random import device_of
from ...problem.tasks import sample
from ...problem.vector import Vector
from .rows import Rows

__all__ = ["CHANCES", "Drawing", "Drawn", "Source", "importance_probabilities", "others"]

UNIFORM_PART = 0.2  # uniform fraction of adaptive probabilities, so that 1/p stays bounded
CHANCES = ("probability", "cumulative")  # tables of adapted probabilities, and of their sums


class Drawn(NamedTuple):
    """The tasks of a step, and what has been drawn for them.

    Attributes:
        ids: distinct tasks in increasing order.
        scale: share of the draws of each task over its probability, 1 in expectation over the draws.
        tables: new tables to store.
        batches: the data of these tasks, by level; None if not drawn yet.
        probes: rows for the direction; None if not drawn yet.
        others: all other rows, if they are known and to be brought up to date.
    """

    ids: Tensor
    scale: Tensor
    tables: Rows
    batches: Mapping[str, Any] | None = None
    probes: Tensor | None = None
    others: Tensor | None = None


class Source(NamedTuple):
    """Inputs of a draw of tasks.

    Attributes:
        generator: source of the random numbers.
        steps: number of steps made.
        tables: stored values of the rows.
        broadcast: function from this rank's draw to the draw that all ranks use.
        device: device of the numbers of all rows.
    """

    generator: torch.Generator | None
    steps: int = 0
    tables: Mapping[str, Tensor] = {}
    broadcast: Callable[[Tensor], Tensor] = Tensor.cpu
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, inputs: StepInputs) -> Source:
        """Return the source for a step."""
        return cls(inputs.generator, inputs.steps, inputs.tables, partial(broadcast, inputs=inputs))


@dataclass(frozen=True, eq=False)
class Drawing:
    """The choice of the tasks of a step.

    Attributes:
        task_batch: tasks in a step; None: all of them, without a draw.
        probes: number of further rows to draw for the direction.
        chances: None, the sampler draws, assumed to be uniform; probabilities and their cumulative sums, with which
            tasks are drawn with replacement; ``"adaptive"``, the same, computed from the sizes of the last derivatives
            once every m / task_batch steps.
    """

    task_batch: int | None = None
    probes: int = 0
    chances: tuple[Tensor, Tensor] | str | None = None

    def batch(self, m: int) -> int:
        """Return the number of tasks with data in a step."""
        return m if self.task_batch is None else min(self.task_batch, m)

    def share(self, m: int) -> float:
        """Return the fraction q of the tasks that a step visits."""
        return self.batch(m) / m

    def draw(self, sampler: Any, m: int, source: Source) -> Drawn:
        """Draw the tasks of a step; without a sampler, take the one problem."""
        if sampler is None or self.task_batch is None:
            ids, scale = torch.arange(m, device=source.device), torch.ones(m, dtype=torch.float64, device=source.device)
            return Drawn(ids, scale, {})
        return self._of_sampler(sampler, m, source) if self.chances is None else self._weighted(m, source)

    def draws(self, m: int) -> list[TaskDraw]:
        """Return the sampler's draws in `draw`."""
        return [] if self.task_batch is None or self.chances is not None else [TaskDraw("tasks", self.batch(m))]

    def _of_sampler(self, sampler: Any, m: int, source: Source) -> Drawn:
        drawn = sample(sampler, self.batch(m), source.generator)
        if not isinstance(drawn, Tensor) or drawn.is_floating_point() or drawn.dim() != 1:
            shown = (
                f"{drawn.dtype} of shape {tuple(drawn.shape)}" if isinstance(drawn, Tensor) else type(drawn).__name__
            )
            raise ValueError(
                f"the rows of the drawn tasks are found by their ids, but tasks.sample returned {shown}; return a "
                "LongTensor of shape (n,) from sample(n, generator)"
            )
        ids, counts = torch.unique(source.broadcast(drawn.long()), return_counts=True)
        if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < m):
            raise ValueError(
                f"tasks.sample returned ids from {int(ids[0])} to {int(ids[-1])} for {m} rows; return ids from 0 to "
                f"{m - 1}, or pass lower parameters with one row for each task"
            )
        return Drawn(ids, counts.double() / self.share(m), {})

    def _weighted(self, m: int, source: Source) -> Drawn:
        n = self.batch(m)
        period, known, tables = math.ceil(m / n), {**source.tables}, {}
        if self.notes and (source.steps % period == 1 % period or CHANCES[0] not in known):
            best = importance_probabilities(known["size"].cpu())
            chances = (1 - UNIFORM_PART) * best + UNIFORM_PART / m
            tables = dict(zip(CHANCES, (chances, chances.cumsum(0)), strict=True))
        chances, sums = ({**known, **tables}[name] for name in CHANCES) if self.notes else cast(Any, self.chances)
        if len(chances) != m:
            raise ValueError(
                f"there are {len(chances)} probabilities for {m} tasks; pass as probabilities one number for each task"
            )
        device = device_of(source.generator)
        uniform = torch.rand(n, generator=source.generator, dtype=torch.float64, device=device).cpu()
        drawn = torch.searchsorted(sums, uniform * sums[-1], right=True).clamp_max(m - 1)
        ids, counts = torch.unique(source.broadcast(drawn), return_counts=True)
        return Drawn(ids, counts / (n * chances[ids]), tables)

    def probe(self, m: int, source: Source) -> Tensor:
        """Draw rows for the direction, independently of those that see data."""
        generator = source.generator
        return source.broadcast(torch.randint(m, (self.probes,), generator=generator, device=device_of(generator)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Names of the values that rows keep for later draws."""
        return ("size",) if self.chances == "adaptive" else ()

    def opened(self, m: int) -> Rows:
        """Return the initial tables for later draws."""
        even = torch.full((m,), 1 / m, dtype=torch.float64, device="cpu")
        return dict(zip(CHANCES, (even, even.cumsum(0)), strict=True)) if self.notes else {}

    def noted(self, derivatives: Rows, before: Rows) -> Rows:
        """Return the new `notes` of rows whose derivatives have been measured."""
        if not self.notes:
            return {}
        size = torch.stack([t.flatten(1).square().sum(1) for t in derivatives.values()]).sum(0)
        return {"size": (before["size"] + size) / 2 if "size" in before else size}


def broadcast(drawn: Tensor, inputs: StepInputs) -> Tensor:
    """Return the first rank's draw."""
    if inputs.ranks.world == 1:
        return drawn.cpu()
    return inputs.ranks.copy_from_first(Vector([drawn.to(inputs.lower[0].device)]))[0].cpu()


def others(ids: Tensor, count: int) -> Tensor:
    """Return all of ``count`` rows except these."""
    is_other = torch.ones(count, dtype=torch.bool, device="cpu")
    is_other[ids] = False
    return is_other.nonzero().flatten()


def importance_probabilities(sizes: Tensor) -> Tensor:
    r"""Return the probabilities :math:`p_i \propto \sqrt{A_i}`, which minimise :math:`C(p) = \sum_i A_i / p_i`.

    :math:`C(p)/m` is the factor of the theory's sample complexity. With these it is
    :math:`(\sum_i \sqrt{A_i})^2 / m`, smaller by a factor of :math:`1 + cv^2(\sqrt A)` than with uniform ones.

    Args:
        sizes: :math:`A_i`, the sum of the squared sizes of a task's derivatives; shape (m,).
    """
    roots = sizes.double().sqrt()
    if not bool((roots >= 0).all() and roots.sum() > 0 and roots.isfinite().all()):
        shown = f"range from {float(sizes.min())} to {float(sizes.max())}" if sizes.numel() else "are empty"
        raise ValueError(
            "sizes must be non-negative and finite numbers that are not all zero, because the probabilities are "
            f"proportional to their roots, but {shown}"
        )
    return roots / roots.sum()

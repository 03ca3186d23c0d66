"""Declared draws of a step: batches of the two losses, or of a sampler's tasks, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..problem.values import values
from ..problem.vector import Vector

__all__ = ["LOWER", "UPPER", "Draw", "DrawInputs", "TaskDraw", "of_tasks"]


class Draw(NamedTuple):
    """One draw from a loss.

    Attributes:
        level: ``"upper"``, from f, or ``"lower"``, from g. Both draw from one stream in a minimax method.
        whole: draw all terms of a finite sum, in order, instead of the next sample.
        only: name and number: draw only if the random input of this name is at least the number. A declaration lists
            the most draws that are possible; the first draw from a level is always made.
    """

    level: str
    whole: bool = False
    only: tuple[str, int] | None = None


UPPER, LOWER = Draw("upper"), Draw("lower")


class TaskDraw(NamedTuple):
    """One draw from a sampler of tasks.

    Attributes:
        source: ``"tasks"``, or ``"upper"`` or ``"lower"`` for a batch of each task drawn before.
        size: number of tasks, or of rows for each task; None: all rows.
        only: as for `Draw`.
    """

    source: str
    size: int | None
    only: tuple[str, int] | None = None


@values
class DrawInputs:
    """Inputs that determine a step's draws; of tensors, only their presence and shapes count.

    Attributes:
        steps: steps made so far.
        numbers: plain numbers that change from step to step. In a declaration they include ``upper_terms`` and
            ``lower_terms`` of losses that are finite sums.
        memory: state of y from earlier steps, by name: tensors shaped like y.
        upper_memory: state of x from earlier steps, by name.
        tables: tables whose rows mix all the tensors of y, by name.
    """

    steps: int
    numbers: dict[str, Any]
    memory: dict[str, Vector]
    upper_memory: dict[str, Vector]
    tables: dict[str, Tensor]

    def terms(self, level: str) -> int:
        """Return the number of terms of a level's loss."""
        return int(self.numbers.get(f"{level}_terms", 1))


def of_tasks(draws: Iterable[Draw], rows: Mapping[str, int | None]) -> list[TaskDraw]:
    """Convert draws to draws for tasks, with ``rows`` per batch of each level; all rows are drawn at first use only."""
    found: list[TaskDraw] = []
    known: set[str] = set()
    for level, _, only in draws:
        if rows[level] is not None or level not in known:
            found.append(TaskDraw(level, rows[level], only))
        known.add(level)
    return found

"""What a step draws, declared: which batches of the two losses, or of the tasks of a sampler, in which order."""

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
        level: ``"upper"``, from f, or ``"lower"``, from g. (The two of a minimax method draw from one stream.)
        whole: it is of all terms of a finite sum, in their order, in place of the next sample.
        only: name and number: it is made only where the random input of this name is at least the number. What is
            declared has the most that there may be; the first draw from a level is always made.
    """

    level: str
    whole: bool = False
    only: tuple[str, int] | None = None


UPPER, LOWER = Draw("upper"), Draw("lower")


class TaskDraw(NamedTuple):
    """One draw from a sampler of tasks.

    Attributes:
        source: ``"tasks"``, or ``"upper"`` or ``"lower"``, a batch for each of the tasks drawn before.
        size: how many tasks, or how many rows for each task; None: all rows.
        only: as for `Draw`.
    """

    source: str
    size: int | None
    only: tuple[str, int] | None = None


@values
class DrawInputs:
    """What decides which draws a step makes. Of tensors it is whether there are any, and their shapes.

    Attributes:
        steps: steps made so far.
        numbers: plain numbers that change from step to step. For a declaration ``upper_terms`` and ``lower_terms`` of
            losses that are sums of known terms are among them.
        memory: what earlier steps remembered of y, by name: tensors shaped like y.
        upper_memory: the same of x.
        tables: tables whose rows mix all the tensors of y, by name.
    """

    steps: int
    numbers: dict[str, Any]
    memory: dict[str, Vector]
    upper_memory: dict[str, Vector]
    tables: dict[str, Tensor]

    def terms(self, level: str) -> int:
        """How many terms the loss of a level has."""
        return int(self.numbers.get(f"{level}_terms", 1))


def of_tasks(draws: Iterable[Draw], rows: Mapping[str, int | None]) -> list[TaskDraw]:
    """What draws become for tasks; ``rows`` per batch of each level. All rows are drawn once, where first needed."""
    found: list[TaskDraw] = []
    known: set[str] = set()
    for level, _, only in draws:
        if rows[level] is not None or level not in known:
            found.append(TaskDraw(level, rows[level], only))
        known.add(level)
    return found

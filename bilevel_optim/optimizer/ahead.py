"""What many steps draw, drawn at once where it does not matter which loss draws first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice, takewhile
from typing import Any

from torch import Tensor

from ..problem.feeding import Draw, Drawn, Draws
from ..problem.objective import Objective
from .flat import Like, flat
from .replay import Sources

__all__ = ["are_apart", "data_ahead", "forms"]


def are_apart(sources: Sources) -> bool:
    """Whether each loss draws from a list of its own, so that nothing can tell when it does."""
    upper, lower, tasks = sources
    return tasks is None and upper is not lower and all(o is None or _is_plain(o) for o in (upper, lower))


def _is_plain(objective: Objective) -> bool:
    kind, data = type(objective), type(objective.data)
    return kind is Objective and objective.accumulate == 1 and data in (list, tuple, type(None))


def forms(draws: Sequence[Draw], results: Sequence[Drawn]) -> dict[str, Like] | None:
    """What the batches of a step have in common, for each loss that draws any; None if they have not."""
    found: dict[str, Like] = {}
    for draw, result in zip(draws, results, strict=True):
        if draw.source in ("upper", "lower") and result.data:
            known = found.setdefault(draw.source, Like(flat(*result.data)))
            if known.tensors_of(result.data) is None:
                return None
    return found


def data_ahead(
    draws: Draws, known: Mapping[str, Like], sources: Sources, random_inputs: Mapping[str, Tensor], steps: int
) -> list[Sequence[Tensor]]:
    """Tensors of the data of further steps, as `flattened` gives them, up to the first of another form.

    Args:
        draws: of a step.
        known: the `forms` that the batches must have.
        sources: where they are made, which `are_apart`.
        random_inputs: of the steps, by name, shape (steps,).
        steps: how many.
    """
    plans = draws.plans(random_inputs, steps)
    streams: dict[str, _Stream] = {}
    for source, objective in (("upper", sources.upper), ("lower", sources.lower)):
        if objective is None or source not in plans[0].counts:
            continue
        if (objective.data is None) is (source in known):
            return []  # there are data no more, or now
        if objective.data is not None:
            assert isinstance(objective.data, (list, tuple))
            ends = [*accumulate(plan.counts[source] for plan in plans)]
            streams[source] = stream = _Stream(known[source], objective.take(ends[-1]), len(objective.data))
            steps = min(steps, bisect_right(ends, stream.count))
    own = [column.unbind() for column in random_inputs.values()]
    if all(plan is plans[0] for plan in plans):
        columns = [
            column
            for source, made, again in plans[0].runs
            if source in streams
            for column in streams[source].columns(made, again, plans[0].counts[source])
        ]
        return [*islice(zip(*columns, *own, strict=False), steps)] if columns or own else [()] * steps
    found: list[Sequence[Tensor]] = []
    for k, plan in enumerate(plans[:steps]):
        data: list[Tensor] = []
        for source, made, again in plan.runs:
            if source in streams:
                streams[source].add_next(data, made, again)
        data += [column[k] for column in own]
        found.append(data)
    return found


class _Stream:
    """Tensors of the batches of a loss, one after the other.

    Args:
        like: what the batches must be like.
        batches: as they are drawn.
        period: the number after which they come again.

    Attributes:
        count: how many of them can be used, up to the first of another form.
    """

    def __init__(self, like: Like, batches: Sequence[Any], period: int) -> None:
        different = batches[:period]
        tensors = like.tensors_of(different)
        self.count = len(batches)
        if tensors is None:
            different = [*takewhile(lambda batch: like.tensors_of([batch]) is not None, different)]
            tensors, self.count = [t for batch in different for t in flat(batch).tensors], len(different)
        passes = -(-self.count // max(len(different), 1))
        self._columns = [tensors[k :: like.width] * passes for k in range(like.width)]
        self._place = 0

    @cached_property
    def _pieces(self) -> list[tuple[Tensor, ...]]:
        """The tensors of each batch."""
        return [*zip(*self._columns, strict=True)] if self._columns else [()] * self.count

    def add_next(self, data: list[Tensor], made: int, again: int) -> None:
        """Append the tensors of so many batches, and of the last one some times more."""
        start, self._place = self._place, self._place + made
        for piece in self._pieces[start : self._place]:
            data += piece
        if again:
            data += self._pieces[self._place - 1] * again

    def columns(self, made: int, again: int, apart: int) -> list[list[Tensor]]:
        """Each tensor of `add_next`, and all those that are so many batches apart from it."""
        start, self._place = self._place, self._place + made
        own = [column[k::apart] for k in range(start, self._place) for column in self._columns]
        return own + own[len(own) - len(self._columns) :] * again

"""What many steps draw, drawn at once where it does not matter which loss draws first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice, takewhile
from typing import Any

from torch import Tensor

from ..problem.feeding import Drawn, Draws
from ..problem.objective import Objective
from .flat import Like, flat
from .replay import Sources

__all__ = ["are_apart", "data_ahead"]


def are_apart(sources: Sources) -> bool:
    """Whether each loss draws from a list of its own, so that nothing can tell when it does."""
    upper, lower, tasks = sources
    return tasks is None and upper is not lower and all(o is None or _is_plain(o) for o in (upper, lower))


def _is_plain(objective: Objective) -> bool:
    kind, data = type(objective), type(objective.data)
    return kind is Objective and objective.accumulate == 1 and data in (list, tuple, type(None))


def data_ahead(
    draws: Draws, sources: Sources, results: Sequence[Drawn], chances: Mapping[str, Tensor], steps: int
) -> list[Sequence[Tensor]]:
    """Tensors of the data of further steps, as `flattened` gives them, up to the first of another form.

    Args:
        draws: of a step.
        sources: where they are made, which `are_apart`.
        results: what they gave in a step.
        chances: of the further steps, by name, shape (steps,).
        steps: how many further ones.
    """
    plans = draws.plans(chances, steps)
    streams: dict[str, _Stream] = {}
    for source, objective in (("upper", sources.upper), ("lower", sources.lower)):
        known = [each.data[0] for draw, each in zip(draws, results, strict=True) if draw.source == source and each.data]
        if objective is not None and known:
            ends = [*accumulate(plan.counts[source] for plan in plans)]
            streams[source] = stream = _Stream(known, objective.take(ends[-1]))
            steps = min(steps, bisect_right(ends, stream.count))
    own = [column.unbind() for column in chances.values()]
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
        known: batches that were drawn, whose form the others must have.
        batches: those that were drawn after them.

    Attributes:
        count: how many of these can be used, up to the first of another form; none if the known ones differ.
    """

    def __init__(self, known: Sequence[Any], batches: Sequence[Any]) -> None:
        first = flat(known[0])
        like, width = Like(first), len(first.tensors)
        keys, together = [*map(id, batches)], [*known, *batches]
        different = dict(zip([*map(id, known), *keys], together, strict=True))  # few, if data come again and again
        tensors = like.tensors_of(different.values())
        if tensors is None:
            others = {key for key, batch in different.items() if like.tensors_of([batch]) is None}
            alike = [*takewhile(lambda batch: id(batch) not in others, together)]
            del keys[max(len(alike) - len(known), 0) :]
            different = {id(batch): batch for batch in alike}
            tensors = [t for batch in different.values() for t in flat(batch).tensors]
        pieces = zip(*(tensors[k::width] for k in range(width)), strict=True) if width else [()] * len(different)
        self.count = len(keys)
        self._pieces = [*map(dict(zip(different, pieces, strict=True)).__getitem__, keys)]
        self._place = 0

    def add_next(self, data: list[Tensor], made: int, again: int) -> None:
        """Append the tensors of so many batches, and of the last one some times more."""
        start, self._place = self._place, self._place + made
        for piece in self._pieces[start : self._place]:
            data += piece
        if again:
            data += self._pieces[self._place - 1] * again

    def columns(self, made: int, again: int, apart: int) -> list[tuple[Tensor, ...]]:
        """Each tensor of `add_next`, and all those that are so many batches apart from it."""
        start, self._place = self._place, self._place + made
        own = [[*zip(*self._pieces[k::apart], strict=True)] for k in range(start, self._place)]
        return [*chain.from_iterable(own), *(own[-1] * again)]

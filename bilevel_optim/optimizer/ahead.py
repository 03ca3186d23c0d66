"""What many steps draw, drawn at once where it does not matter which loss draws first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, islice
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
    draws: Draws, sources: Sources, results: Sequence[Drawn], chances: Sequence[dict[str, Any]]
) -> list[Sequence[Tensor]]:
    """Tensors of the data of further steps, as `flattened` gives them, up to the first of another form.

    Args:
        draws: of a step.
        sources: where they are made, which `are_apart`.
        results: what they gave in a step.
        chances: of that step, and of the further ones.
    """
    own = [flat(each) for each in chances if each]
    if own and not (len(own) == len(chances) and Like(own[0]).fits(*own[1:])):
        return []
    plans = draws.plans(chances[1:])
    streams: dict[str, _Stream] = {}
    steps = len(plans)
    for source, objective in (("upper", sources.upper), ("lower", sources.lower)):
        known = [each.data[0] for draw, each in zip(draws, results, strict=True) if draw.source == source and each.data]
        if objective is not None and known:
            streams[source] = stream = _Stream(known)
            if not stream.uniform:
                return []
            ends = [*accumulate(plan.counts[source] for plan in plans)]
            steps = min(steps, bisect_right(ends, stream.take(objective.take(ends[-1]))))
    found: list[Sequence[Tensor]] = []
    if all(plan is plans[0] for plan in plans):
        columns = [
            column
            for source, made, again in plans[0].runs
            if source in streams
            for column in streams[source].columns(made, again, plans[0].counts[source])
        ]
        found.extend(islice(zip(*columns, strict=False), steps) if columns else [()] * steps)
    else:
        for plan in plans[:steps]:
            pieces = (streams[source].next(made, again) for source, made, again in plan.runs if source in streams)
            found.append([*chain.from_iterable(pieces)])
    return [[*data, *each.tensors] for data, each in zip(found, own[1:], strict=False)] if own else found


class _Stream:
    """Tensors of the batches of a loss, one after the other.

    Args:
        known: batches that were drawn, whose form the others must have.

    Attributes:
        uniform: whether these have one.
    """

    def __init__(self, known: Sequence[Any]) -> None:
        first = flat(known[0])
        self._like, self._width, self._place = Like(first), len(first.tensors), 0
        self._tensors: list[Tensor] = []
        self._pieces: dict[int, list[Tensor]] = {}
        self.uniform = self.take(known) == len(known)

    def take(self, batches: Sequence[Any]) -> int:
        """How many of these batches can be used, up to the first of another form; `next` goes through them."""
        keys = [*map(id, batches)]
        new = {
            key: flat(batch) for key, batch in dict(zip(keys, batches, strict=True)).items() if key not in self._pieces
        }
        if not self._like.fits(*new.values()):
            other = next(key for key, each in new.items() if not self._like.fits(each))
            del keys[keys.index(other) :]
        self._pieces |= {key: each.tensors for key, each in new.items()}
        self._tensors = [*chain.from_iterable(map(self._pieces.__getitem__, keys))]
        return len(keys)

    def next(self, made: int, again: int) -> list[Tensor]:
        """Tensors of so many batches, and of the last one some times more."""
        start, self._place = self._place, self._place + made * self._width
        own = self._tensors[start : self._place]
        return own + own[len(own) - self._width :] * again

    def columns(self, made: int, again: int, apart: int) -> list[list[Tensor]]:
        """Each tensor of `next`, and all those that are so many batches apart from it."""
        start, self._place = self._place, self._place + made * self._width
        own = [self._tensors[k :: apart * self._width] for k in range(start, self._place)]
        return own + own[len(own) - self._width :] * again

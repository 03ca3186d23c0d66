"""What many steps draw, drawn at once where it does not matter which loss draws first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from torch import Tensor

from ..problem.feeding import Drawn, Draws
from ..problem.objective import Objective
from .flat import Flat, Like, flat
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
) -> list[list[Tensor]]:
    """Tensors of the data of further steps, as `flattened` gives them, up to the first of another form.

    Args:
        draws: of a step.
        sources: where they are made, which `are_apart`.
        results: what they gave in a step.
        chances: of that step, and of the further ones.
    """
    own = [flat(each) for each in chances] if chances[0] else [Flat([], [])] * len(chances)
    if not Like(own[0]).fits(*own[1:]):
        return []
    plans = _plans(draws, chances[1:])
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
    found: list[list[Tensor]] = []
    for plan, each in zip(plans[:steps], own[1:], strict=False):
        data: list[Tensor] = []
        for source, made, again in plan.runs:
            if source in streams:
                data += streams[source].next(made, again)
        found.append(data + each.tensors)
    return found


class _Run(NamedTuple):
    """Draws of a loss that follow each other: how many, and how often the last one then stands for another."""

    source: str
    made: int
    again: int


class _Plan(NamedTuple):
    """What a step draws: in runs, and how many batches of each loss."""

    runs: list[_Run]
    counts: dict[str, int]


def _plans(draws: Draws, chances: Sequence[Mapping[str, Any]]) -> list[_Plan]:
    """What steps with these chances draw."""
    names = {draw.unless[0] for draw in draws if draw.unless is not None}
    if not names:
        return [_plan(draws, {})] * len(chances)
    keys = [tuple(int(each[name]) for name in names) for each in chances]
    plans = {key: _plan(draws, each) for key, each in dict(zip(keys, chances, strict=True)).items()}
    return [plans[key] for key in keys]


def _plan(draws: Draws, chances: Mapping[str, Any]) -> _Plan:
    runs: list[_Run] = []
    for draw, times in draws.runs:
        last = runs[-1] if runs else None
        if last is not None and not draw.made(chances):
            runs[-1] = last._replace(again=last.again + times)
        elif last is not None and draw.source == last.source and not last.again:
            runs[-1] = last._replace(made=last.made + times)
        else:
            runs.append(_Run(draw.source, times, 0))
    return _Plan(runs, {s: sum(run.made for run in runs if run.source == s) for s in ("upper", "lower")})


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
        """Tensors of a run."""
        start, self._place = self._place, self._place + made * self._width
        own = self._tensors[start : self._place]
        return own + own[len(own) - self._width :] * again if again else own

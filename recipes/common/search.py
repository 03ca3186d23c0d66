"""The best setting of a grid: successive halving, then all neighbours of the best one, also beyond the grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["Axis", "Found", "axis", "search"]

Setting = dict[str, Any]


class Axis(NamedTuple):
    """Values of a hyper-parameter, in order.

    Attributes:
        values: at least one; with one alone there is nothing to choose.
        least: beyond it there is nothing.
        most: beyond it there is nothing.
        extends: whether the grid may go on beyond its ends, by the ratio of the last two values.
    """

    values: tuple[Any, ...]
    least: float = 0.0
    most: float = math.inf
    extends: bool = True

    def neighbours(self, value: Any) -> list[Any]:
        """Values beside one: of the grid, or beyond its ends by the ratio there; none where it is closed."""
        if len(self.values) < 2:
            return []
        found = []
        for ordered in (self.values, self.values[::-1]):
            up = ordered[1] > ordered[0]
            onward = [v for v in ordered if (v > value if up else v < value)]
            if 0 < len(onward) < len(ordered):
                found.append(onward[0])
            elif onward:  # before the first: towards the grid
                nearer = self._beyond(value, ordered[1] / ordered[0])
                found.append(min(nearer, ordered[0]) if up else max(nearer, ordered[0]))
            elif self.extends:
                found.append(self._beyond(value, ordered[-1] / ordered[-2]))
        return [v for v in found if v != value and v > 0]

    def _beyond(self, value: Any, ratio: float) -> Any:
        beside = round(value * ratio) if isinstance(value, int) else float(f"{value * ratio:.6g}")
        return min(max(beside, self.least), self.most)


def axis(*values: Any, least: float = 0.0, most: float = math.inf, extends: bool = True) -> Axis:
    """An `Axis` of these values."""
    return Axis(values, least, most, extends)


class Found(NamedTuple):
    """What a search found.

    Attributes:
        setting: the best one.
        score: its score.
        edges: hyper-parameters at whose value a neighbour was not tried, since the runs were used up.
    """

    setting: Setting
    score: float
    edges: tuple[str, ...]


def search(
    grid: Mapping[str, Axis],
    score: Callable[[Setting, float], float],
    *,
    shares: tuple[float, ...] = (0.1, 0.3),
    keep: float = 1 / 3,
    moves: int = 20,
) -> Found:
    """Minimise a score over a grid.

    All settings are run with the first share of the budget, a part of them with the next, and so on; the best are run
    with all of it. From the best of these the search goes on to a better neighbour, also beyond the grid, until
    there is none: the result is at no edge, and at least as good as everything beside it.

    Args:
        grid: values of each hyper-parameter.
        score: called with a setting and the share of the budget; infinite for what diverged. Less is better.
        shares: shares of the budget of the rounds before the last, which has all.
        keep: part of the settings that a round leaves to the next.
        moves: most runs of neighbours.
    """
    settings = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*(a.values for a in grid.values()))
    ]
    for share in shares:
        if len(settings) <= 2:
            break
        ranked = sorted(settings, key=lambda setting: score(setting, share))
        settings = ranked[: max(2, math.ceil(len(settings) * keep))]
    best = min(settings, key=lambda setting: score(setting, 1.0))
    least, known = score(best, 1.0), {_key(setting) for setting in settings}  # with the whole budget
    while True:
        open_axes: list[str] = []
        for name, value in [(n, v) for n, a in grid.items() for v in a.neighbours(best[n])]:
            beside = {**best, name: value}
            if _key(beside) not in known:
                if not moves:
                    open_axes.append(name)
                    continue
                moves -= 1
                known.add(_key(beside))
            if score(beside, 1.0) < least:
                best, least = beside, score(beside, 1.0)
                break
        else:
            return Found(best, least, tuple(dict.fromkeys(open_axes)))


def _key(setting: Setting) -> tuple[Any, ...]:
    return tuple(sorted(setting.items()))

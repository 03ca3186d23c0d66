"""Search for the best setting: successive halving on a grid, then moves to better neighbours, on or off the grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Axis", "Found", "axis", "search"]

Setting = dict[str, Any]


class Axis(NamedTuple):
    """Ordered values of a hyper-parameter.

    Attributes:
        values: one or more; a single value is not searched.
        least: smallest possible value.
        most: largest possible value.
        extends: True if the search may leave the grid, by the ratio of the last two values; otherwise a best value at
            an end of the grid is at an edge.
    """

    values: tuple[Any, ...]
    least: float = 0.0
    most: float = math.inf
    extends: bool = True

    def neighbours(self, value: Any) -> list[Any]:
        """Return the values next to one: on the grid, or beyond its ends by the ratio there, if the axis extends."""
        if len(self.values) < 2:
            return []
        found = []
        for ordered in (self.values, self.values[::-1]):
            up = ordered[1] > ordered[0]
            onward = [v for v in ordered if (v > value if up else v < value)]
            if 0 < len(onward) < len(ordered):
                found.append(onward[0])
            elif onward:  # beyond the first value: go back towards the grid
                nearer = self._beyond(value, ordered[1] / ordered[0])
                found.append(min(nearer, ordered[0]) if up else max(nearer, ordered[0]))
            elif self.extends:
                found.append(self._beyond(value, ordered[-1] / ordered[-2]))
        return [v for v in found if v != value and v > 0]

    def _beyond(self, value: Any, ratio: float) -> Any:
        beside = round(value * ratio) if isinstance(value, int) else float(f"{value * ratio:.6g}")
        return min(max(beside, self.least), self.most)


def axis(*values: Any, least: float = 0.0, most: float = math.inf, extends: bool = True) -> Axis:
    """Return an `Axis` of these values."""
    return Axis(values, least, most, extends)


class Found(NamedTuple):
    """Result of a search.

    Attributes:
        setting: the best one.
        score: its score.
        edges: hyper-parameters with an untried neighbour, because no runs were left or the axis does not extend
            beyond its end.
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
    joint: Sequence[tuple[str, str]] = (),
    blind: Callable[[Setting, float], bool] = lambda setting, share: False,
) -> Found:
    """Minimise a score over a grid.

    All settings run with the first share of the budget, the better ones with the next share, and so on; the best run
    with the whole budget. The search then moves to a better neighbour, on or off the grid, until there is none: the
    result is at no edge, and at least as good as all its neighbours.

    Args:
        grid: values of each hyper-parameter.
        score: called with a setting and the share of the budget; infinite if the run diverged. Less is better.
        shares: shares of the budget of the rounds before the last, which has the whole budget.
        keep: part of the settings that a round passes to the next.
        moves: maximal number of runs of neighbours.
        joint: pairs of hyper-parameters that also move together, as the best value of one may depend on the other.
        blind: returns True if a setting's score at this share is uninformative; the round then keeps all settings.
    """
    settings = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*(a.values for a in grid.values()))
    ]
    for share in shares:
        if len(settings) <= 2:
            break
        ranked = sorted(settings, key=lambda setting: score(setting, share))
        if not any(blind(setting, share) for setting in settings):
            settings = ranked[: max(2, math.ceil(len(settings) * keep))]
    best = min(settings, key=lambda setting: score(setting, 1.0))
    least, known = score(best, 1.0), {_key(setting) for setting in settings}  # with the whole budget
    while True:
        open_axes = [n for n, a in grid.items() if not a.extends and best[n] in (a.values[0], a.values[-1])]
        near = {name: axis.neighbours(best[name]) for name, axis in grid.items()}
        steps = [{name: value} for name, values in near.items() for value in values]
        steps += [{a: u, b: v} for a, b in joint if a in grid and b in grid for u in near[a] for v in near[b]]
        for moved in steps:
            beside = {**best, **moved}
            if _key(beside) not in known:
                if not moves:
                    open_axes += moved
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

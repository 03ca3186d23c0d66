"""Traffic on a grid of streets: an equilibrium with soft route choice, and its Newton solver."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import figure
from ..common.seeds import stream

__all__ = ["MOST", "Search", "Traffic"]

MOST = 10.0  # largest toll
THETA = 2.0  # sharpness of the drivers' logit choice
LINEAR, QUARTIC = 0.1, 0.5  # slope of a street's time in its flow / capacity, and the term of its fourth power


class Traffic:
    """Drivers between pairs of crossings; at each crossing they choose the next street by a logit of the cost ahead.

    The flows v are in equilibrium if v = flow(s(v) + tolls), where s(v) are the travel times at these flows. They are
    the only stationary point of `lower`, which is strictly convex in s(v) (Baillon, Cominetti, 2008).

    Args:
        rows, columns: size of the grid; streets lead both ways.
        pairs: number of pairs of places between which drivers travel.
        seed: seed of the network.

    Attributes:
        solves: number of equilibria solved so far.
        tollable: half of the streets; the others are free.
    """

    def __init__(self, rows: int, columns: int, pairs: int, seed: int) -> None:
        generator = stream(seed, "data")
        at = torch.arange(rows * columns).view(rows, columns)
        one_way = torch.cat([torch.stack([at[:, :-1].flatten(), at[:, 1:].flatten()]),
                             torch.stack([at[:-1].flatten(), at[1:].flatten()])], 1)  # fmt: skip
        self.tail, self.head = torch.cat([one_way, one_way.flip(0)], 1)
        self.places = torch.stack([at.flatten() % columns, at.flatten() // columns], 1)
        n = self.streets = len(self.tail)
        uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
        self.free, self.capacity = 1 + uniform(n), 0.5 + uniform(n)
        self.start = torch.randint(rows * columns, (pairs,), generator=generator)
        self.end = (self.start + torch.randint(1, rows * columns, (pairs,), generator=generator)) % (rows * columns)
        self.demand = (0.5 + uniform(pairs)) * 0.45 * n / (pairs * (rows + columns) / 3)
        order = torch.randperm(n, generator=generator)
        self.tollable, self.others = order[: n // 2].sort().values, order[n // 2 :]
        self.solves = 0

    def times(self, v: Tensor, rule: Tensor | float = 0.0) -> Tensor:
        """Return s(v), the travel times at flows v, plus ``rule`` times v s'(v), the time a driver costs all others."""
        u = v / self.capacity
        return self.free * (1 + (1 + rule) * LINEAR * u + (1 + 4 * rule) * QUARTIC * u.clamp_min(0) ** 4)

    def slopes(self, v: Tensor, rule: Tensor | float = 0.0) -> Tensor:
        """Return the derivatives of `times`."""
        u = v / self.capacity
        steep = (1 + rule) * LINEAR + 4 * (1 + 4 * rule) * QUARTIC * u.clamp_min(0) ** 3
        return self.free / self.capacity * steep

    def _ways(self, cost: Tensor) -> tuple[Tensor, Tensor]:
        """Return the street weights, and for each pair of crossings the sum over paths of products of weights."""
        weight, n = (-THETA * cost).exp(), len(self.places)
        return weight, torch.linalg.inv(
            torch.eye(n, dtype=cost.dtype) - cost.new_zeros(n, n).index_put((self.tail, self.head), weight)
        )

    def expected(self, cost: Tensor) -> Tensor:
        """Return the expected cost of all drivers (time, tolls and value of choice) at these street costs."""
        ways = self._ways(cost)[1]
        return -(self.demand * (ways[self.start, self.end] / ways[self.end, self.end]).log()).sum() / THETA

    def lower(self, tolls: Tensor, v: Tensor) -> Tensor:
        """Return the lower loss, stationary at the equilibrium."""
        u = v / self.capacity
        own = self.free * v * (LINEAR / 2 * u + 0.8 * QUARTIC * u.clamp_min(0) ** 4)  # v s(v) less the integral of s
        return own.sum() - self.expected(self.times(v) + tolls)

    def social(self, tolls: Tensor, v: Tensor) -> Tensor:
        """Return the expected cost of all drivers minus the tolls, which are not lost."""
        return self.expected(self.times(v) + tolls) - (tolls * v).sum()

    def flow(self, cost: Tensor) -> tuple[Tensor, Tensor]:
        """Return the flows at these street costs, and their derivatives (symmetric, negative semidefinite)."""
        weight, ways = self._ways(cost)
        i, j, o, d = self.tail, self.head, self.start, self.end
        share = torch.zeros_like(ways).index_put((o, d), self.demand / ways[o, d], accumulate=True)
        share = share.index_put((d, d), -self.demand / ways[d, d], accumulate=True)
        between = ways.T @ share @ ways.T
        v = weight * between[i, j]
        both = weight[:, None] * weight * ways[j][:, i] * between[i][:, j]
        whole = weight * ways[o][:, i] * ways[j][:, d].T / ways[o, d, None]  # pairs x streets
        loops = weight * ways[d][:, i] * ways[j][:, d].T / ways[d, d, None]
        second = both + both.T - (self.demand * whole.T) @ whole + (self.demand * loops.T) @ loops
        return v, -THETA * (second + v.diag())

    @torch.no_grad()
    def newton(self, tolls: Tensor, v: Tensor, rule: Tensor | float = 0.0) -> Tensor:
        """Return the equilibrium, by Newton's method with step halving from flows v."""
        self.solves += 1
        found, slope = self.flow(self.times(v, rule) + tolls)
        for _ in range(50):
            gap = v - found
            if not gap.norm() > 1e-10 * v.norm():
                break
            step = torch.linalg.solve(torch.eye(len(v), dtype=v.dtype) - slope * self.slopes(v, rule), gap)
            for size in (1.0, 0.5, 0.25, 0.1, 0.01):
                moved = v - size * step
                found, slope = self.flow(self.times(moved, rule) + tolls)
                if (moved - found).norm() < (1 - size / 4) * gap.norm():
                    break
            v = moved
        return v

    @torch.no_grad()
    def adjoint(self, tolls: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of `social` at the equilibrium, derived by hand."""
        slope, own = self.flow(self.times(v) + tolls)[1], self.slopes(v)
        # d social = v . (s'(v) dv + d tolls) - v . d tolls - tolls . dv, with dv = slope (s'(v) dv + d tolls)
        price: Tensor = torch.linalg.solve((torch.eye(len(v), dtype=v.dtype) - slope * own).T, v * own - tolls)
        return slope @ price

    def draw(self, axis: Any, v: Tensor, colour: Tensor, label: str) -> None:
        """Draw the streets, wider for larger flows; grey where the colour is NaN."""
        from matplotlib import colormaps
        from matplotlib.collections import LineCollection

        a, b = self.places[self.tail].double(), self.places[self.head].double()
        aside = 0.09 * torch.stack([(b - a)[:, 1], (a - b)[:, 0]], 1)  # drivers keep to the right
        colours = colormaps["plasma_r"].with_extremes(bad="0.75")
        ends, widths = torch.stack([a + aside, b + aside], 1).tolist(), 0.4 + 4 * (v / v.max()).numpy()
        lines = LineCollection(ends, linewidths=widths, array=colour.numpy(), cmap=colours)  # fmt: skip
        axis.add_collection(lines)
        axis.figure.colorbar(lines, ax=axis, label=label, shrink=0.6)
        across, along = (self.places.max(0).values + 0.5).tolist()
        axis.set(aspect="equal", xlim=(-0.5, across), ylim=(-0.5, along))
        axis.axis("off")

    def picture(self, stem: Path, title: str, found: dict[str, dict[str, Any]], shown: str) -> None:
        """Draw the streets without tolls and with those of one method, and the gains of all methods."""
        with figure(stem, f"{title}: wide where many drive, grey where free", (17, 5)) as canvas:
            axes, search = canvas.subplots(1, 3), Search(self)
            for axis, name in zip(axes, ("no toll", shown), strict=False):
                search(x := found[name]["tolls"][0])
                tolls = search.tolls(x).index_fill(0, self.others, math.nan)
                crowd = search.v / self.capacity, "flow / capacity"
                self.draw(axis, search.v, *((tolls, "toll") if any(x) else crowd))
                axis.set_title(name)
            gains = [max(sum(r["gain"]) / len(r["gain"]), -50) for r in found.values()]
            axes[2].barh([*found][::-1], gains[::-1])
            axes[2].set(xlabel="per cent of what tolls on all streets gain (cut at -50)")


class Search:
    """Objective of a search: solves the equilibrium for tolls on the tollable half; keeps the best tolls in time."""

    def __init__(self, traffic: Traffic, seconds: float = math.inf) -> None:
        self.traffic, self.v, self.end = traffic, traffic.capacity.clone(), time.process_time() + seconds
        self.best, self.x, self.solves = math.inf, torch.zeros(len(traffic.tollable)).double(), traffic.solves

    def tolls(self, x: Any) -> Tensor:
        """Return the tolls of all streets."""
        zero = torch.zeros(self.traffic.streets, dtype=torch.float64)
        return zero.index_put((self.traffic.tollable,), torch.as_tensor(x, dtype=torch.float64))

    def keep(self, x: Any, value: float) -> float:
        """Record a value; stop the search when the time is over."""
        if time.process_time() > self.end and self.best < math.inf:  # the start is always recorded
            raise StopIteration
        if value < self.best:
            self.best, self.x = value, torch.as_tensor(x).detach().clone()
        return value if math.isfinite(value) else 1e9

    def __call__(self, x: Any) -> float:
        v = self.traffic.newton(self.tolls(x), self.v)
        self.v = v if v.isfinite().all() else self.traffic.capacity.clone()
        return self.keep(x, float(self.traffic.social(self.tolls(x), v)))

    def rule(self, factor: float) -> Tensor:
        """Return the rule's tolls: ``factor`` times the marginal cost of each tollable street, in their equilibrium."""
        half = self.tolls(torch.full_like(self.x, factor))
        v = self.traffic.newton(torch.zeros_like(half), self.traffic.capacity, half)
        return (half * v * self.traffic.slopes(v))[self.traffic.tollable].clamp_max(MOST)

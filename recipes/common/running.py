"""Loops that time steps, without the evaluations between them, and loops that tune learning rates."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import bilevel_optim as bo

__all__ = ["gradients", "median_curve", "progress", "spend", "summary", "synchronize", "timed", "train", "tuned"]

T = TypeVar("T")
Point = dict[str, Any]
COST = {"upper_grad": 1.0, "lower_grad": 1.0, "hvp": 2.0, "jvp": 2.0, "loss": 0.5}


def gradients(optimizer: bo.BilevelOptimizer) -> float:
    """Return the oracle calls in units of one gradient: a Hessian-vector or cross product is 2, a value of f 1/2."""
    return sum(COST[name] * calls for name, calls in optimizer.oracle_counts.items())


def progress(items: Iterable[Any] | None = None, label: str = "", **options: Any) -> Any:
    """Return a progress bar, shown on a terminal only."""
    return tqdm(items, desc=f"{label:12}", **{"unit": "step", "disable": None, **options})


def synchronize(device: torch.device | str) -> None:
    """Wait for the accelerator, if the device is one."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, float]:
    """Call a function; return its result and the seconds it took."""
    start = time.perf_counter()
    result = function()
    synchronize(device)
    return result, time.perf_counter() - start


def train(
    step: Callable[[], Any],
    measure: Callable[[int, Any], Mapping[str, Any]],
    *,
    steps: int,
    label: str,
    every: int = 1,
    first: bool = False,
    device: torch.device | str = "cpu",
) -> list[Point]:
    """Run ``steps`` steps; return the curve of the measurements, each with the steps and seconds so far.

    ``measure`` is called after the first step, after every ``every`` steps and after the last, with the number of steps
    and the result of the last one; with ``first`` also before any step, with 0 and None. A `NonFiniteError` ends the
    curve with a point of NaN.
    """
    curve: list[Point] = [{"step": 0, "seconds": 0.0, **measure(0, None)}] if first else []
    seconds = 0.0
    for k in (bar := progress(range(steps), label)):
        try:
            result, spent = timed(step, device)
        except bo.NonFiniteError:
            if not curve:
                raise
            curve.append({**dict.fromkeys(curve[-1], math.nan), "step": k + 1, "seconds": seconds})
            break
        seconds += spent
        if k % every == 0 or k == steps - 1:
            curve.append({"step": k + 1, "seconds": seconds, **measure(k + 1, result)})
            bar.set_postfix({key: f"{v:.3g}" for key, v in curve[-1].items() if key in ("loss", "accuracy", "cost")})
    return curve


def spend(
    step: Callable[[], Any],
    measure: Callable[[], Mapping[str, Any]],
    *,
    budget: float,
    spent: Callable[[float], float],
    evaluations: int,
    judged: Sequence[str],
) -> Point:
    """Run steps until a budget is spent; return the last point, with the whole ``curve`` and the flag ``diverged``.

    ``spent`` is called with the seconds of the steps so far. Points are denser at the beginning. If a step passes
    several points, all of them get the same values, so that the curves of different seeds correspond. The last point is
    within the budget: the gain of a step beyond it does not count. The values named in ``judged`` are infinite if the
    run diverged.
    """
    curve: list[Point] = []
    seconds, steps, diverged = 0.0, 0, False
    used, cost = spent(0.0), 0.0
    while not diverged:
        passed = 1 + math.floor(evaluations * min(used / budget, 1.0) ** 0.5 + 1e-9)
        last = used + cost > budget  # another step of the same cost would exceed the budget
        if passed > len(curve) or last:
            point = {"seconds": seconds, "steps": steps, **measure()}
            if diverged := not all(math.isfinite(value) for value in point.values() if value is not None):
                break
            within = point
            curve += [point] * (passed - len(curve))
            if used >= budget:
                break
        try:
            seconds += timed(step)[1]
            steps += 1
        except bo.NonFiniteError:
            diverged = True
            break
        used, before = spent(seconds), used
        cost = used - before
        if used > budget:
            diverged = not all(math.isfinite(value) for value in measure().values() if value is not None)
            curve += [within] * (1 + evaluations - len(curve))
            break
    worst = {key: math.inf for key in judged if diverged and curve[-1][key] is not None}
    return {**curve[-1], **worst, "curve": curve, "diverged": diverged}


def tuned(
    names: Iterable[str],
    grid: Sequence[Any],
    run: Callable[[str, Any, int], Point],
    score: str,
    seeds: int = 1,
) -> dict[str, tuple[list[Point], list[Point]]]:
    """Return for each method all runs of the grid with the first seed, and all runs of the best setting.

    The best setting has the least ``score`` with the first seed; it runs with the other seeds too.
    """
    names, found = [*names], {}
    with warnings.catch_warnings(), progress(total=len(names) * (len(grid) + seeds - 1), unit="run") as bar:
        warnings.simplefilter("ignore", bo.BilevelWarning)  # effects of noise are part of the comparison

        def counted(name: str, setting: Any, seed: int) -> Point:
            bar.set_description(name)
            bar.update()
            return run(name, setting, seed)

        for name in names:
            tried = [counted(name, setting, 0) for setting in grid]
            best = min(range(len(grid)), key=lambda i: float(tried[i][score]))
            others = [counted(name, grid[best], seed) for seed in range(1, seeds)]
            found[name] = tried, [tried[best], *others]
    return found


def median_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Return medians of the corresponding points of several curves, for the keys that all of them have."""

    def median(values: list[Any]) -> Any:
        return statistics.median_low(values) if isinstance(values[0], int) else statistics.median(values)

    return [
        {k: median([p[k] for p in points]) for k in points[0] if all(p[k] is not None for p in points)}
        for points in zip(*curves, strict=False)
    ]


def summary(results: Mapping[str, Sequence[Point]], score: str, *keys: str) -> dict[str, Point]:
    """Return medians over the seeds, and the range of the score; the best method comes first."""
    found: dict[str, Point] = {}
    for name, runs in results.items():
        (medians,) = median_curve([[{key: r[key] for key in (score, *keys)}] for r in runs])
        ends = [r[score] for r in runs]
        found[name] = {**medians, "range": max(ends) - min(ends) if math.isfinite(max(ends)) else None}
    return dict(sorted(found.items(), key=lambda item: float(item[1][score])))

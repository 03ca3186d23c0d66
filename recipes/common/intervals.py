"""Intervals of means over few seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Interval", "interval"]


class Interval(NamedTuple):
    """A mean and its interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isinf(self.high):  # a single value
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the confidence interval of the mean (Student's t: the values should be about normal)."""
    from scipy.special import stdtrit

    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):  # runs that diverged have no interval
        return Interval(mean, -math.inf, math.inf)
    t = float(stdtrit(len(values) - 1, (1 + level) / 2))
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)

"""Verdicts: what seeds in pairs say of a claim, by rule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..common import interval
from .experiment import Better, Within

__all__ = ["Verdict", "judge"]

HOLDS, FAILS, UNDECIDED, OTHER = "HOLDS", "FAILS", "UNDECIDED", "NOT DUE TO METHOD"
FEWEST = 3  # seeds


class Verdict(NamedTuple):
    """A word, and why."""

    word: str
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


def judge(
    rule: Better | Within,
    scores: Mapping[str, Sequence[float]],
    gains: Mapping[str, float],
    edges: Mapping[str, Sequence[str]],
) -> Verdict:
    """Whether a claim holds.

    Args:
        rule: of the experiment.
        scores: of each arm, one for each seed, in the same order.
        gains: how much each arm's mean score fell in the last half of its budget.
        edges: of each arm, hyper-parameters whose best value is at the edge of what was tried.
    """
    if isinstance(rule, Within):
        return _within(rule, scores, edges)
    method = scores[rule.method]
    if len(method) < FEWEST:
        return Verdict(UNDECIDED, f"{len(method)} seeds, fewer than {FEWEST}")
    differences = {r: interval(_less(scores[r], method)) for r in rule.rivals}
    best = min(rule.rivals, key=lambda r: differences[r].mean)
    found = differences[best]
    figures = f"{rule.method} {_mean(method)}, {best} {_mean(scores[best])}, difference {found}"
    refuting = [r for r in rule.rivals if differences[r].high < rule.least]
    if refuting:
        best = min(refuting, key=lambda r: differences[r].high)
        found = differences[best]
        figures = f"{rule.method} {_mean(method)}, {best} {_mean(scores[best])}, difference {found}"
        # At the edge of the grid of the rival it is only better still.
        if open_axes := edges.get(rule.method):
            return Verdict(UNDECIDED, f"{', '.join(open_axes)} of {rule.method} at an edge ({figures})")
        if not rule.speed and found.mean < -rule.least and gains[rule.method] > -found.mean / 2:
            return Verdict(UNDECIDED, f"budget too small for {rule.method} ({figures})")
        return Verdict(FAILS, figures)
    if not all(d.low > rule.least for d in differences.values()):
        return Verdict(UNDECIDED, f"interval contains {rule.least:g} ({figures})")
    if at_edge := [f"{axis} of {r}" for r in rule.rivals for axis in edges.get(r, ())]:
        return Verdict(UNDECIDED, f"{', '.join(at_edge)} at an edge ({figures})")
    if not rule.speed and (late := [r for r in rule.rivals if gains[r] > differences[r].mean / 2]):
        return Verdict(UNDECIDED, f"budget too small for {', '.join(late)} ({figures})")
    if rule.control is None:
        return Verdict(UNDECIDED, f"no control ({figures})")
    control = scores[rule.control]
    figures += f", control {rule.control} {_mean(control)}"
    pairs = zip(control, method, scores[best], strict=True)
    surplus = interval([(c - m) - (r - m) / 2 for c, m, r in pairs])
    if surplus.low > 0:
        return Verdict(HOLDS, figures)
    if surplus.high < 0:
        return Verdict(OTHER, figures)
    return Verdict(UNDECIDED, f"the control's part in the gain is about half ({figures})")


def _within(rule: Within, scores: Mapping[str, Sequence[float]], edges: Mapping[str, Sequence[str]]) -> Verdict:
    values = scores[rule.arm] if rule.minus is None else _less(scores[rule.arm], scores[rule.minus])
    found = interval(values)
    text = f"{found} and [{rule.low:g}, {rule.high:g}]"
    if len(values) < FEWEST:
        return Verdict(UNDECIDED, f"{len(values)} seeds, fewer than {FEWEST}")
    if at_edge := [axis for name in rule.arms for axis in edges.get(name, ())]:
        return Verdict(UNDECIDED, f"{', '.join(at_edge)} at an edge ({text})")
    if rule.low <= found.low and found.high <= rule.high:
        return Verdict(HOLDS, text)
    return Verdict(FAILS if found.high < rule.low or found.low > rule.high else UNDECIDED, text)


def _less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [u - v for u, v in zip(a, b, strict=True)]


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g}"

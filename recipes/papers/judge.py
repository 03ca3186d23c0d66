"""Verdicts on claims, by rules for paired seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..common import Interval, interval
from .experiment import STILL, Better, Within

__all__ = ["Evidence", "Verdict", "judge"]

HOLDS, FAILS, TIE, UNDECIDED, OTHER = "HOLDS", "FAILS", "TIE", "UNDECIDED", "NOT DUE TO METHOD"
FEWEST = 3  # seeds


_Figures = Callable[[str, Interval], str]


class Verdict(NamedTuple):
    """Verdict word and its reason."""

    word: str
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


class Evidence(NamedTuple):
    """Results over the seeds.

    Attributes:
        scores: scores of each arm, one per seed, in the same order.
        gains: decrease of each arm's mean score in the last half of its budget.
        edges: hyper-parameters of each arm whose best value is at the edge of the search.
        start: the untrained learner's scores, one per seed. Default: None, if nothing is trained.
        ignorant: scores of the best answer that ignores the inputs, if the experiment has it.
        part: the budget as a part of the paper's, if its text has one.
        alike: pairs of arms with the same numbers that the experiment does not declare equal.
        untuned: fixed learning rates of the arms of a `Within` rule.
        falls: for arms scored by their cost to a target, the decrease of their curves, one per seed.
        missed: for such arms, the number of runs that did not reach it: their cost is only known to be larger.
    """

    scores: Mapping[str, Sequence[float]]
    gains: Mapping[str, float]
    edges: Mapping[str, Sequence[str]]
    start: Sequence[float] | None = None
    ignorant: Sequence[float] | None = None
    part: float | None = None
    alike: Sequence[tuple[str, str]] = ()
    untuned: Mapping[str, Sequence[str]] = MappingProxyType({})
    falls: Mapping[str, Sequence[float]] = MappingProxyType({})
    missed: Mapping[str, int] = MappingProxyType({})

    def moved(self, arm: str) -> bool:
        """Return True if training moved the arm from its start by more than the interval."""
        if arm in self.falls:
            return interval(self.falls[arm]).low > 0
        return self.start is None or interval(_less(self.start, self.scores[arm])).low > 0

    def nothing(self, moved: Sequence[str], varied: Sequence[str]) -> str:
        """Explain why arms prove nothing: training did not move one of ``moved``, or all seeds of ``varied`` agree."""
        if still := [arm for arm in moved if not self.moved(arm)]:
            return f"training did not move {' and '.join(still)} from the start"
        if varied and all(len({*self.scores[arm]}) == 1 for arm in varied):
            return f"one trajectory: all seeds of {' and '.join(varied)} give the same score"
        return ""


def judge(rule: Better | Within, evidence: Evidence) -> Verdict:
    """Judge a claim; the verdict word states the part of the paper's budget."""
    seeds, start = len(evidence.scores[rule.arms[0]]), evidence.start
    if seeds < FEWEST:
        return Verdict(UNDECIDED, f"{seeds} seeds, fewer than {FEWEST}")
    if start is not None and evidence.ignorant is not None and interval(_less(evidence.ignorant, start)).low > 0:
        return Verdict(UNDECIDED, f"the untrained start {_mean(start)} already knows the answer: the best one that "
                       f"ignores the inputs has {_mean(evidence.ignorant)}")  # fmt: skip
    if same := [pair for pair in evidence.alike if {*pair} <= {*rule.arms}]:
        return Verdict(UNDECIDED, f"{' and '.join(same[0])} give the same numbers: they are the same method")
    word, reason = _better(rule, evidence) if isinstance(rule, Better) else _within(rule, evidence)
    if word != UNDECIDED and evidence.part is not None and evidence.part < 0.995:
        word += f" AT {float(f'{100 * evidence.part:.2g}'):g} % OF THE BUDGET"
    return Verdict(word, reason)


def _better(rule: Better, evidence: Evidence) -> Verdict:
    scores, edges, method = evidence.scores, evidence.edges, evidence.scores[rule.method]
    differences = {r: interval(_less(scores[r], method)) for r in rule.rivals}
    # With several rivals, one is ahead by chance more often than a single rival; all are behind less often.
    careful = {r: interval(_less(scores[r], method), 1 - 0.05 / len(rule.rivals)) for r in rule.rivals}

    def figures(rival: str, found: Interval) -> str:
        return f"{rule.method} {_mean(method)}, {rival} {_mean(scores[rival])}, difference {found}"

    if worse := [r for r in rule.rivals if careful[r].high < -rule.least]:
        return _worse(rule, evidence, min(worse, key=lambda r: careful[r].high), careful, figures)
    best = min(rule.rivals, key=lambda r: differences[r].mean)
    text = figures(best, differences[best])
    if tied := [r for r in rule.rivals if -rule.least < careful[r].low and careful[r].high < rule.least]:
        text = figures(tied[0], careful[tied[0]])
        if at_edge := [f"{axis} of {r}" for r in (rule.method, tied[0]) for axis in edges.get(r, ())]:
            return Verdict(UNDECIDED, f"{', '.join(at_edge)} at an edge ({text})")
        if why := evidence.nothing([rule.method, tied[0]], [rule.method, tied[0]]):
            return Verdict(UNDECIDED, f"{why} ({text})")
        return Verdict(TIE, f"{text} within {rule.least:g}")
    if not all(d.low > rule.least for d in differences.values()):
        return Verdict(UNDECIDED, f"interval contains {rule.least:g} ({text})")
    if at_edge := [f"{axis} of {r}" for r in rule.rivals for axis in edges.get(r, ())]:
        return Verdict(UNDECIDED, f"{', '.join(at_edge)} at an edge ({text})")
    if not rule.speed and (late := [r for r in rule.rivals if evidence.gains[r] > differences[r].mean / 2]):
        return Verdict(UNDECIDED, f"budget too small for {', '.join(late)} ({text})")
    # A rival or control that does not move may be broken.
    near = [rule.method, best, *([rule.control] if rule.control not in (None, STILL) else [])]
    if why := evidence.nothing(near, [rule.method, best]):
        return Verdict(UNDECIDED, f"{why} ({text})")
    if rule.control is None:
        return Verdict(UNDECIDED, f"no control ({text})")
    control = scores[rule.control]
    text += f", control {rule.control} {_mean(control)}"
    pairs = zip(control, method, scores[best], strict=True)
    surplus = interval([(c - m) - (r - m) / 2 for c, m, r in pairs])
    if surplus.high < 0:
        return Verdict(OTHER, text)
    if surplus.low <= 0:
        return Verdict(UNDECIDED, f"the control has about half of the gain ({text})")
    if open_axes := edges.get(rule.control):
        return Verdict(UNDECIDED, f"{', '.join(open_axes)} of the control at an edge ({text})")
    # Rivals further behind matter only for a claim that holds, not for NOT DUE TO METHOD.
    if why := next(filter(None, (evidence.nothing([rival], [rule.method, rival]) for rival in rule.rivals)), ""):
        return Verdict(UNDECIDED, f"{why} ({text})")
    return Verdict(HOLDS, text)


def _worse(rule: Better, evidence: Evidence, rival: str, careful: Mapping[str, Interval], figures: _Figures) -> Verdict:
    text, found = figures(rival, careful[rival]), careful[rival]
    # A rival at the edge of its grid could only be better.
    if open_axes := evidence.edges.get(rule.method):
        return Verdict(UNDECIDED, f"{', '.join(open_axes)} of {rule.method} at an edge ({text})")
    if not rule.speed and evidence.gains[rule.method] > -found.mean / 2:
        return Verdict(UNDECIDED, f"budget too small for {rule.method} ({text})")
    if why := evidence.nothing([rival], [rule.method, rival]):
        return Verdict(UNDECIDED, f"{why} ({text})")
    return Verdict(FAILS, text)


def _within(rule: Within, evidence: Evidence) -> Verdict:
    scores, gains = evidence.scores, evidence.gains
    values = scores[rule.arm] if rule.minus is None else _less(scores[rule.arm], scores[rule.minus])
    found, fall = interval(values), gains[rule.arm] - (gains[rule.minus] if rule.minus else 0.0)
    text = f"{found} and [{rule.low:g}, {rule.high:g}]"
    if at_edge := [axis for name in rule.arms for axis in evidence.edges.get(name, ())]:
        return Verdict(UNDECIDED, f"{', '.join(at_edge)} at an edge ({text})")
    if fixed := [f"{axis} of {name}" for name in rule.arms for axis in evidence.untuned.get(name, ())]:
        return Verdict(UNDECIDED, f"{', '.join(fixed)} not tuned ({text})")
    if rule.minus is not None and (short := [name for name in rule.arms if evidence.missed.get(name)]):
        of = ", ".join(f"{evidence.missed[name]} of {len(values)} runs of {name}" for name in short)
        return Verdict(UNDECIDED, f"{of} did not reach the target ({text})")
    moved = [name for name in rule.arms if evidence.moved(name)]
    inside = rule.low <= found.low and found.high <= rule.high
    if why := evidence.nothing([] if moved else rule.arms, rule.arms if inside else []):
        return Verdict(UNDECIDED, f"{why} ({text})")
    if not inside and not (found.high < rule.low or found.low > rule.high):
        return Verdict(UNDECIDED, text)
    # Compare with the bounds towards which the score moves.
    ahead = [b for b in (rule.low, rule.high) if math.isfinite(b) and (b - found.mean) * -fall > 0]
    if ahead and 2 * abs(fall) > min(abs(b - found.mean) for b in ahead):
        return Verdict(UNDECIDED, f"not settled, it moved by {-fall:.2g} in the last half of the budget ({text})")
    return Verdict(HOLDS if inside else FAILS, text)


def _less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [u - v for u, v in zip(a, b, strict=True)]


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g}"

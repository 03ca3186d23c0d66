"""The runner: settings chosen with some seeds, judged with others; every run is kept, so that it is made once."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import bilevel_optim as bo

from ..common import spend
from ..common.records import Missing, Records
from ..common.search import Found, search
from .experiment import SEARCH_SEEDS, Arm, Experiment, Point, Trial
from .judge import Evidence, Verdict, judge

__all__ = ["Outcome", "alike", "complete", "execute", "follow", "middle"]

POINTS = 24  # of a curve that is kept
FEW = 5  # steps, with fewer of which a round of a search is blind


class Outcome(NamedTuple):
    """What an experiment gave.

    Attributes:
        found: of each arm, the setting that was chosen.
        runs: of each arm, the result for each seed.
        scores: of each arm, with equal budgets.
        start: scores of the untrained learner; None where nothing is trained.
        verdict: with equal budgets.
        timed: with equal seconds; None where the paper does not count them.
        seconds: of all runs, those of the search too.
    """

    found: dict[str, Found]
    runs: dict[str, list[Point]]
    scores: dict[str, list[float]]
    start: list[float] | None
    verdict: Verdict
    timed: Verdict | None
    seconds: float


def execute(
    experiment: Experiment,
    scale: str,
    records: Records,
    root: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Make the runs of an experiment that are missing in the records, and judge."""
    found, runs = complete(experiment, scale, records, root, say)
    return judged(experiment, scale, found, runs, sum(r["seconds"] for r in records.results.values()))


def complete(
    experiment: Experiment,
    scale: str,
    records: Records,
    root: Path | None,
    say: Callable[[str], None],
    only: Sequence[str] = (),
) -> tuple[dict[str, Found], dict[str, list[Point]]]:
    """Make the missing runs of all arms, or of some; returns the settings chosen and the results for each seed."""
    numbers = experiment.scales[scale]
    found: dict[str, Found] = {}
    runs: dict[str, list[Point]] = {}

    def run(name: str, arm: Arm, setting: dict[str, Any], seed: int, share: float) -> Point:
        trial = Trial(arm.make, setting, seed, share * numbers["budget"], numbers, root)
        unit = {"arm": name, "setting": setting, "seed": seed, "share": share}

        def made() -> Point:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", bo.BilevelWarning)  # what goes wrong is seen in the scores
                curve = experiment.run(trial)
            result = summarised(experiment, curve, trial.budget, keep=seed not in SEARCH_SEEDS)
            say(f"{experiment.id} {name} {setting} seed {seed} share {share:g}: {result['score']:.5g}")
            return result

        return records.get(unit, made)

    for name, arm in experiment.arms.items():
        if only and name not in only:
            continue

        tried = partial(run, name, arm)
        score = _Median(tried)
        chosen = numbers.get("search", True) and any(len(a.values) > 1 for a in arm.grid.values())
        try:
            best = (
                search(
                    arm.grid,
                    score,
                    shares=experiment.shares,
                    moves=experiment.moves,
                    joint=experiment.joint,
                    blind=partial(_blind, tried),
                )
                if chosen
                else Found(middle(arm), math.nan, ())
            )
            results = [tried(best.setting, seed, 1.0) for seed in range(numbers["seeds"])]
        except Missing:
            if name in experiment.rule.arms:
                raise
            continue  # the verdict does not need it
        found[name], runs[name] = best, results
    return found, runs


def _blind(run: Callable[[dict[str, Any], int, float], Point], setting: dict[str, Any], share: float) -> bool:
    return bool(run(setting, SEARCH_SEEDS[0], share)["steps"] < FEW)


class _Median:
    """The score of a setting: its median over the seeds of the search, infinite if it diverged with one of them.

    With the whole budget the third seed is left out where two are no better than the best setting so far: the median
    is not either. A setting that is asked for again has the score that it had. Of two that do not come to a target the
    nearer is better.
    """

    def __init__(self, run: Callable[[dict[str, Any], int, float], Point]) -> None:
        self.run, self.least = run, math.inf
        self.known: dict[tuple[Any, ...], float] = {}

    def __call__(self, setting: dict[str, Any], share: float) -> float:
        key = (share, *sorted(setting.items()))
        if key not in self.known:
            self.known[key] = self.median(setting, share)
        return self.known[key]

    def median(self, setting: dict[str, Any], share: float) -> float:
        """With as few runs as tell whether it is the best so far."""
        found: list[float] = []
        for seed in SEARCH_SEEDS:
            result = self.run(setting, seed, share)
            if "diverged" in result or not math.isfinite(result["score"]):
                return math.inf
            found.append(float(result["score"]) + float(result.get("short", 0.0)))
            if share == 1 and sum(s >= self.least for s in found) > len(SEARCH_SEEDS) / 2:
                return statistics.median_high(found)
        median = statistics.median(found)
        if share == 1:
            self.least = min(self.least, median)
        return median


def middle(arm: Arm) -> dict[str, Any]:
    """The setting in the middle of its grid."""
    return {key: a.values[len(a.values) // 2] for key, a in arm.grid.items()}


def follow(
    step: Callable[[], Any],
    measure: Callable[[], Mapping[str, Any]],
    spent: Callable[[], float],
    budget: float,
    evaluations: int = 12,
) -> list[Point]:
    """Make steps until the budget is spent, or they diverge; returns the curve of what is measured (``score``)."""
    found = spend(
        step, lambda: {"spent": spent(), **measure()}, budget=budget, spent=lambda _: spent(), evaluations=evaluations,
        judged=(),
    )  # fmt: skip
    curve = [p for i, p in enumerate(found["curve"]) if i == 0 or p != found["curve"][i - 1]]
    return [*curve, {**curve[-1], "score": math.inf}] if found["diverged"] else curve


def judged(
    experiment: Experiment, scale: str, found: dict[str, Found], runs: dict[str, list[Point]], spent: float
) -> Outcome:
    """The verdicts of what was run."""
    rule, budget = experiment.rule, experiment.scales[scale]["budget"]
    edges = {name: f.edges for name, f in found.items()}
    scores = {name: [_finite(r["score"], r) for r in results] for name, results in runs.items()}
    gains = {
        name: statistics.fmean(_finite(r["half"], r) - _finite(r["score"], r) for r in results)
        for name, results in runs.items()
    }
    first = [r["curve"] for r in runs[rule.arms[0]]]
    trained = any(len(curve) > 1 for curve in first)
    start = [scored(experiment, curve[:1], "spent", budget) for curve in first] if trained else None
    ignorant = [curve[0]["ignorant"] for curve in first] if "ignorant" in first[0][0] else None
    same, untuned = alike(experiment, runs), experiment.untuned(scale)
    falls = {}
    if trained and experiment.target is not None:
        falls = {name: [_fall(r["curve"]) for r in results] for name, results in runs.items()}
    evidence = Evidence(scores, gains, edges, start, ignorant, experiment.part(scale), same, untuned, falls)
    # The same for all arms: when the first of those that are compared has spent its budget. Of a time to a target, all.
    shortest = min(statistics.fmean(r["seconds"] for r in runs[name]) for name in rule.arms)
    timed = {
        name: [
            _finite(
                scored(experiment, r["curve"], "seconds", shortest if experiment.target is None else r["seconds"]), r
            )
            for r in results
        ]
        for name, results in runs.items()
    }
    at_equal_seconds = evidence._replace(scores=timed, gains=dict.fromkeys(gains, 0.0))
    second = judge(rule, at_equal_seconds) if experiment.seconds else None
    return Outcome(found, runs, scores, start, judge(rule, evidence), second, spent)


def alike(experiment: Experiment, runs: Mapping[str, Sequence[Point]]) -> list[tuple[str, str]]:
    """Pairs of arms that went the same way with every seed, and are not declared to be equal.

    The whole curves are compared: two arms that never come down to a target have one score, and are not the same. Arms
    that did not move from their start say nothing.
    """
    ways = {
        name: [[p["score"] for p in r["curve"]] for r in results]
        for name, results in runs.items()
        if all(r["steps"] for r in results)
    }
    moved = [name for name, seeds in ways.items() if all(len(way) == 1 or len({*way}) > 1 for way in seeds)]
    declared = [{*pair} for pair in experiment.equal]
    return [(a, b) for a, b in combinations(moved, 2) if ways[a] == ways[b] and {a, b} not in declared]


def _fall(curve: Sequence[Point]) -> float:
    """How much the curve fell; nothing, if the run diverged."""
    return float(curve[0]["score"] - _finite(curve[-1]["score"], {"curve": curve}))


def _finite(score: float, run: Point) -> float:
    """What diverged counts as if it had not begun."""
    return score if math.isfinite(score) else float(run["curve"][0]["score"])


def scored(experiment: Experiment, curve: Sequence[Point], unit: str, budget: float) -> float:
    """The score of a run when so much was spent: of its last point within that, whatever a step beyond it gained."""
    if experiment.target is not None:
        hits = (p[unit] for p in curve if p["score"] <= experiment.target)
        return math.log10(max(min(next(hits, math.inf), budget), 1e-9))
    within = [p for p in curve if p[unit] <= budget] or curve[:1]
    end = within[-1][unit]
    return statistics.fmean(p["score"] for p in within if p[unit] > (1 - experiment.late) * end or p is within[-1])


def summarised(experiment: Experiment, curve: list[Point], budget: float, keep: bool) -> Point:
    """What is kept of a run: its score, the score at half of the budget, and some points of its curve."""
    last = curve[-1]
    result: Point = {
        "score": scored(experiment, curve, "spent", budget),
        "half": scored(experiment, curve, "spent", budget / 2),
        "seconds": last["seconds"],
        "spent": last["spent"],
        "steps": last.get("steps", FEW),
    }
    if experiment.target is not None and not last["score"] <= experiment.target:
        result["reached"] = False
        result["short"] = max(math.log10(last["score"] / experiment.target), 0.0) if experiment.target > 0 else 0.0
    if not math.isfinite(last["score"]):
        result["diverged"] = True
        if experiment.target is not None:
            result["score"] = math.log10(budget)
    if keep:
        hits = [i for i, p in enumerate(curve) if experiment.target is not None and p["score"] <= experiment.target]
        chosen = sorted({0, *hits[:1], len(curve) - 1, *(round(k * (len(curve) - 1) / POINTS) for k in range(POINTS))})
        result["curve"] = [curve[i] for i in chosen]
    return {key: _short(value) for key, value in result.items()}


def _short(value: Any) -> Any:
    """Six digits, which keeps the files small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _short(v) for key, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list) else value

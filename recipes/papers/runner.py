"""Runner of the experiments: settings are chosen with some seeds and judged with others; every run is recorded."""

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

POINTS = 24  # points of a recorded curve
FEW = 5  # minimal number of steps for a round of a search to be informative


class Outcome(NamedTuple):
    """Results of an experiment.

    Attributes:
        found: chosen setting of each arm.
        runs: result of each arm and seed.
        scores: scores of each arm at equal budgets.
        start: scores of the untrained learner; None if nothing is trained.
        verdict: verdict at equal budgets.
        timed: verdict at equal seconds; None if the paper does not count them.
        seconds: total of all runs, including the search.
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
    """Make the missing runs of an experiment, and judge it."""
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
    """Make the missing runs of all arms, or of some; return the chosen settings and the results of each seed."""
    numbers = experiment.scales[scale]
    found: dict[str, Found] = {}
    runs: dict[str, list[Point]] = {}

    def run(name: str, arm: Arm, setting: dict[str, Any], seed: int, share: float) -> Point:
        trial = Trial(arm.make, setting, seed, share * numbers["budget"], numbers, root)
        unit = {"arm": name, "setting": setting, "seed": seed, "share": share}

        def made() -> Point:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", bo.BilevelWarning)  # failures show in the scores
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
    """Score of a setting: its median over the seeds of the search, infinite if a run diverged.

    With the whole budget the third seed is skipped if two are no better than the best setting so far, because then the
    median is no better either. Scores are cached. Of two settings that miss a target, the nearer one is better.
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
        """Compute the median with the fewest runs that show whether it is the best so far."""
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
    """Return the setting in the middle of the arm's grid."""
    return {key: a.values[len(a.values) // 2] for key, a in arm.grid.items()}


def follow(
    step: Callable[[], Any],
    measure: Callable[[], Mapping[str, Any]],
    spent: Callable[[], float],
    budget: float,
    evaluations: int = 12,
) -> list[Point]:
    """Run steps until the budget is spent or they diverge; return the curve of the measurements (``score``)."""
    found = spend(
        step, lambda: {"spent": spent(), **measure()}, budget=budget, spent=lambda _: spent(), evaluations=evaluations,
        judged=(),
    )  # fmt: skip
    curve = [p for i, p in enumerate(found["curve"]) if i == 0 or p != found["curve"][i - 1]]
    return [*curve, {**curve[-1], "score": math.inf}] if found["diverged"] else curve


def judged(
    experiment: Experiment, scale: str, found: dict[str, Found], runs: dict[str, list[Point]], spent: float
) -> Outcome:
    """Judge the runs of an experiment."""
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
    missed = {name: sum(r.get("reached") is False for r in results) for name, results in runs.items()}
    part = experiment.part(scale)
    evidence = Evidence(scores, gains, edges, start, ignorant, part, same, untuned, falls, missed)
    # Equal seconds: those in which the fastest judged arm spends its budget; with a target, all seconds of each run.
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
    """Return pairs of arms with the same curves for every seed that are not declared equal.

    It compares whole curves, because two different arms that never reach a target have the same score. It ignores arms
    that did not move from their start.
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
    """Return the decrease of the curve; zero if the run diverged."""
    return float(curve[0]["score"] - _finite(curve[-1]["score"], {"curve": curve}))


def _finite(score: float, run: Point) -> float:
    """Return the score, or the start's score if the run diverged."""
    return score if math.isfinite(score) else float(run["curve"][0]["score"])


def scored(experiment: Experiment, curve: Sequence[Point], unit: str, budget: float) -> float:
    """Return the score of a run at a budget: that of the last point within it, without steps beyond."""
    if experiment.target is not None:
        hits = (p[unit] for p in curve if p["score"] <= experiment.target)
        return math.log10(max(min(next(hits, math.inf), budget), 1e-9))
    within = [p for p in curve if p[unit] <= budget] or curve[:1]
    end = within[-1][unit]
    return statistics.fmean(p["score"] for p in within if p[unit] > (1 - experiment.late) * end or p is within[-1])


def summarised(experiment: Experiment, curve: list[Point], budget: float, keep: bool) -> Point:
    """Return the record of a run: its score, the score at half of the budget, and some points of its curve."""
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
    """Round to six digits, to keep the files small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _short(v) for key, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list) else value

"""The runner: settings chosen with one seed, judged with others; every run is kept, so that it is made once."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bilevel_optim as bo

from ..common import spend
from ..common.records import Missing, Records
from ..common.search import Found, search
from .experiment import SEARCH_SEED, Arm, Experiment, Point, Trial
from .judge import Verdict, judge

__all__ = ["Outcome", "complete", "execute", "follow", "middle"]

POINTS = 24  # of a curve that is kept


class Outcome(NamedTuple):
    """What an experiment gave.

    Attributes:
        found: of each arm, the setting that was chosen.
        runs: of each arm, the result for each seed.
        scores: of each arm, with equal budgets and with equal seconds.
        verdict: with equal budgets.
        timed: with equal seconds.
        seconds: of all runs, those of the search too.
    """

    found: dict[str, Found]
    runs: dict[str, list[Point]]
    scores: dict[str, list[float]]
    verdict: Verdict
    timed: Verdict
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
    return judged(experiment, found, runs, sum(r["seconds"] for r in records.results.values()))


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
            result = summarised(experiment, curve, trial.budget, keep=seed != SEARCH_SEED)
            say(f"{experiment.id} {name} {setting} seed {seed} share {share:g}: {result['score']:.5g}")
            return result

        return records.get(unit, made)

    for name, arm in experiment.arms.items():
        if only and name not in only:
            continue

        def score(setting: dict[str, Any], share: float, name: str = name, arm: Arm = arm) -> float:
            return float(run(name, arm, setting, SEARCH_SEED, share)["score"])

        chosen = numbers.get("search", True) and any(len(a.values) > 1 for a in arm.grid.values())
        try:
            best = (
                search(arm.grid, score, shares=experiment.shares, moves=experiment.moves)
                if chosen
                else Found(middle(arm), math.nan, ())
            )
            results = [run(name, arm, best.setting, seed, 1.0) for seed in range(numbers["seeds"])]
        except Missing:
            if name in experiment.rule.arms:
                raise
            continue  # the verdict does not need it
        found[name], runs[name] = best, results
    return found, runs


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


def judged(experiment: Experiment, found: dict[str, Found], runs: dict[str, list[Point]], spent: float) -> Outcome:
    """The verdicts of what was run."""
    rule = experiment.rule
    edges = {name: f.edges for name, f in found.items()}
    scores = {name: [_finite(r["score"], r) for r in results] for name, results in runs.items()}
    gains = {
        name: statistics.fmean(_finite(r["half"], r) - _finite(r["score"], r) for r in results)
        for name, results in runs.items()
    }
    # The same for all arms: when the first of those that are compared has spent its budget. Of a time to a target, all.
    first = min(statistics.fmean(r["seconds"] for r in runs[name]) for name in rule.arms)
    timed = {
        name: [
            _finite(scored(experiment, r["curve"], "seconds", first if experiment.target is None else r["seconds"]), r)
            for r in results
        ]
        for name, results in runs.items()
    }
    return Outcome(
        found, runs, scores, judge(rule, scores, gains, edges), judge(rule, timed, dict.fromkeys(gains, 0.0), edges),
        spent,
    )  # fmt: skip


def _finite(score: float, run: Point) -> float:
    """What diverged counts as if it had not begun."""
    return score if math.isfinite(score) else float(run["curve"][0]["score"])


def scored(experiment: Experiment, curve: Sequence[Point], unit: str, budget: float) -> float:
    """The score of a run when so much was spent."""
    if experiment.target is not None:
        hits = (p[unit] for p in curve if p["score"] <= experiment.target)
        return math.log10(max(min(next(hits, math.inf), budget), 1e-9))
    until = [p["score"] for p in curve if p[unit] <= budget] or [curve[0]["score"]]
    return statistics.fmean(until[-experiment.smooth :])


def summarised(experiment: Experiment, curve: list[Point], budget: float, keep: bool) -> Point:
    """What is kept of a run: its score, the score at half of the budget, and some points of its curve."""
    last = curve[-1]
    result: Point = {
        "score": scored(experiment, curve, "spent", budget if experiment.target is not None else math.inf),
        "half": scored(experiment, curve, "spent", budget / 2),
        "seconds": last["seconds"],
        "spent": last["spent"],
    }
    if experiment.target is not None and not last["score"] <= experiment.target:
        result["reached"] = False
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

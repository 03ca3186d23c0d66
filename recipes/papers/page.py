"""The folder of an experiment's results, and the page that is made from all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..common import environment, interval, plot, save_json
from ..common.records import Missing, Records
from .experiment import Better, Experiment
from .runner import Outcome, execute

__all__ = ["RESULTS", "config_of", "keep", "page", "summary", "write_page"]

RESULTS = Path(__file__).parent / "results"
INTRODUCTION = """# The papers' experiments

Made by `python -m recipes.papers report` from the records in `results/`: {} of {} experiments have been run at the
scale `cpu`, whose sizes and budgets suit a small machine (below, with all departures from the papers). Verdicts are
computed, by the rules of `judge.py`:

* **HOLDS**: the 95 % interval of the paired differences lies above the smallest one that counts, for every rival.
* **FAILS**: it lies below that, for some rival.
* **NOT DUE TO METHOD**: it would hold, but a control without what the claim is about has at least half of the gain.
* **UNDECIDED**: the interval says neither, a best setting is at an edge, there are fewer than three seeds or no
  control, or the budget is too small.

Scores: less is better; in brackets 95 % intervals over seeds. Every method has the best setting of a grid, which goes
on until no neighbour is better, chosen with another seed than those it is judged with. Seconds, and the verdicts at
equal seconds, are those of a machine that had other work at the time.

| experiment | claim | paper | here | verdict | at equal seconds | minutes |
|---|---|---|---|---|---|---|"""


def config_of(experiment: Experiment, scale: str, folder: Path) -> None:
    """Write what decides the numbers beside the records; refuse records that were made with something else."""
    path, config = folder / "config.json", json.loads(json.dumps(experiment.config(scale)))
    known = json.loads(path.read_text()) if path.exists() else {"config": config, "environment": environment()}

    def decisive(numbers: dict[str, Any]) -> dict[str, Any]:  # a setting stands beside its record anyway
        return {key: value for key, value in numbers.items() if key not in ("grids", "shares", "moves", "seeds")}

    if decisive(known["config"]) != decisive(config):
        raise SystemExit(f"the records in {folder} were made with other numbers: remove them, or put these back")
    save_json(path, {**known, "config": config})


def summary(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """The verdict and the figures that it is made from."""
    return {
        "verdict": outcome.verdict.word,
        "reason": outcome.verdict.reason,
        "at equal seconds": str(outcome.timed),
        "scores": {name: str(interval(scores)) for name, scores in outcome.scores.items()},
        "settings": {name: found.setting for name, found in outcome.found.items()},
        "diverged": {
            name: sum("diverged" in r or r.get("reached") is False for r in runs) for name, runs in outcome.runs.items()
        },
        "seconds per run": {
            name: float(f"{statistics.fmean(r['seconds'] for r in runs):.3g}") for name, runs in outcome.runs.items()
        },
        "minutes": float(f"{outcome.seconds / 60:.3g}"),
    }


def keep(experiment: Experiment, outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Write the verdict and a picture of the curves of the first seed."""
    found = json.loads(json.dumps(summary(experiment, outcome)))
    save_json(folder / "verdict.json", found)
    if experiment.like:
        return dict(found)
    curves = {name: runs[0]["curve"] for name, runs in outcome.runs.items()}
    positive = all(p["score"] > 0 for curve in curves.values() for p in curve)
    axis = {"ylabel": experiment.score, **({"yscale": "log"} if positive else {})}
    panels = [("spent", "score", {**axis, "xlabel": experiment.unit}), ("seconds", "score", axis)]
    plot(folder / "curves", f"{experiment.id} (seed 0)", curves, panels)
    return dict(found)


def page(experiments: Iterable[Experiment], results: Path = RESULTS, scale: str = "cpu") -> str:
    """The page of all experiments, judged anew from their records."""
    rows, details, known = [], [], list(experiments)
    for experiment in known:
        head = f"| `{experiment.id}` ({experiment.figure}) | {experiment.claim} | {experiment.value} |"
        path = results / experiment.source / "records.jsonl"
        try:
            found = summary(experiment, execute(experiment, scale, Records(path, frozen=True)))
        except Missing:
            rows.append(f"{head} {'begun, not finished' if path.exists() else 'not run'} | | | |")
            continue
        speed = isinstance(experiment.rule, Better) and experiment.rule.speed
        timed = found["at equal seconds"].split(":")[0] if speed else ""
        rows.append(f"{head} {found['reason']} | **{found['verdict']}** | {timed} | {found['minutes']:g} |")
        details.append(_details(experiment, found))
    return "\n".join([INTRODUCTION.format(len(details), len(known)), *rows, "", *details]).rstrip() + "\n"


def _details(experiment: Experiment, found: Mapping[str, Any]) -> str:
    numbers = experiment.scales["cpu"]
    command = f"python -m recipes.papers run {experiment.id}" + (" --data-root DIR" if experiment.data else "")
    lines = [
        f"## {experiment.id}",
        "",
        f"{experiment.paper}, {experiment.figure}. `{command}`. Score: {experiment.score}; "
        f"budget {numbers['budget']:g} {experiment.unit}, {numbers['seeds']} seeds.",
        "",
        "| arm | score | chosen | seconds per run | not reached or diverged |",
        "|---|---|---|---|---|",
    ]
    for name in experiment.arms:
        if name not in found["scores"]:
            lines.append(f"| {name} | not run | | | |")
            continue
        setting = ", ".join(
            f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in found["settings"][name].items()
        )
        lines.append(
            f"| {name} | {found['scores'][name]} | {setting or '-'} | {found['seconds per run'][name]:g} | "
            f"{found['diverged'][name] or ''} |"
        )
    notes = [f"{name}: {arm.note}" for name, arm in experiment.arms.items() if arm.note]
    lines += [
        "",
        "Departures from the paper, and notes:",
        "",
        *(f"- {d}" for d in (*experiment.departures, *notes)),
        "",
    ]
    return "\n".join(lines)


def write_page(experiments: Iterable[Experiment]) -> Path:
    """Write the page beside the experiments, and judge again what the records are complete of."""
    known = list(experiments)
    for experiment in known:
        try:
            records = Records(RESULTS / experiment.source / "records.jsonl", frozen=True)
            found = summary(experiment, execute(experiment, "cpu", records))
        except Missing:
            (RESULTS / experiment.id / "verdict.json").unlink(missing_ok=True)  # of what was searched before
            continue
        save_json(RESULTS / experiment.id / "verdict.json", found)
    path = Path(__file__).parent / "RESULTS.md"
    path.write_text(page(known))
    return path

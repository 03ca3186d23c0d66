"""Result folders of the experiments, and the page made from them."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..common import environment, interval, plot, save_json
from ..common.records import Missing, Records
from .experiment import RULES, Better, Experiment
from .headlines import COSTS, headlines
from .runner import Outcome, execute

__all__ = ["RESULTS", "config_of", "current", "keep", "page", "summary", "write_page"]

RESULTS = Path(__file__).parent / "results"
INTRODUCTION = """# The papers' experiments

The headline of each of the five papers, and our result:

{headlines}

## How to read the verdicts

Made by `python -m recipes.papers report` from the records in `results/`, at the scale `cpu`, whose sizes and budgets
suit a small machine (below, with all departures from the papers). Verdicts are computed, by the rules of `judge.py`:

* **HOLDS**: for every rival, the 95 % interval of the paired differences lies above the smallest difference that
  counts; training moved the method, every rival and the control from their start by more than the interval (except the
  control `direct only`); and a control that lacks only the claimed cause, at its own best setting, loses more than half
  of the gain.
* **FAILS**: for some rival the interval, corrected for the number of rivals, lies below minus that difference.
* **TIE**: for some rival the corrected interval lies within the smallest difference that counts, on both sides of zero.
* **NOT DUE TO METHOD**: the claim would hold, but the control has at least half of the gain over the best rival; the
  other rivals do not matter then.
* **UNDECIDED**: none of these; or a best setting is at an edge, a score has not settled, the start already knows the
  answer, there are fewer than three seeds or no control, all seeds give the same score, or the budget is too small; or
  two arms that should differ give the same numbers; or the claim is about an arm whose learning rate is fixed and was
  not searched, and does not say so.
* **... AT n % OF THE BUDGET**: with this share of the paper's budget.

Less is better for all scores; the gain of a step beyond the budget does not count. Brackets are 95 % intervals over
seeds. Every method runs with its best setting from a grid that is extended until no neighbour is better. Settings are
compared by the median of three seeds other than those of the verdict. *Untrained* is the score of the start. If the
paper counts seconds, there is also a verdict at equal seconds, measured on a machine with other work at the time.
"""
NOT_AGAIN = "not run again under the present rules"


def config_of(experiment: Experiment, scale: str, folder: Path) -> None:
    """Write the inputs of the runs next to the records; refuse records with other inputs."""
    path, config = folder / "config.json", json.loads(json.dumps(experiment.config(scale)))
    known = json.loads(path.read_text()) if path.exists() else {"config": config, "environment": environment()}

    def decisive(numbers: dict[str, Any]) -> dict[str, Any]:  # records contain their setting
        return {key: value for key, value in numbers.items() if key not in ("grids", "shares", "moves", "seeds")}

    if decisive(known["config"]) != decisive(config):
        raise SystemExit(f"the records in {folder} were made with other inputs: remove them or restore the inputs")
    save_json(path, {**known, "config": config})


def current(experiment: Experiment, results: Path) -> Path:
    """Return the path of the records; raise `Missing` if they were not made under the present rules."""
    folder = results / experiment.source
    path = folder / "config.json"
    if not path.exists():
        raise Missing("not run")
    if json.loads(path.read_text())["config"].get("rules") != RULES:
        raise Missing(NOT_AGAIN)
    return folder / "records.jsonl"


def summary(experiment: Experiment, outcome: Outcome, scale: str = "cpu") -> dict[str, Any]:
    """Return the verdict and the figures behind it."""
    part = experiment.part(scale)
    return {
        "verdict": outcome.verdict.word,
        "reason": outcome.verdict.reason,
        "at equal seconds": None if outcome.timed is None else str(outcome.timed),
        "untrained": None if outcome.start is None else str(interval(outcome.start)),
        "part of the budget": None if part is None else float(f"{part:.3g}"),
        "would change": turning(experiment, outcome),
        "scores": {name: str(interval(scores)) for name, scores in outcome.scores.items()},
        "settings": {name: found.setting for name, found in outcome.found.items()},
        "edges": {name: [*found.edges] for name, found in outcome.found.items() if found.edges},
        "diverged": {
            name: sum("diverged" in r or r.get("reached") is False for r in runs) for name, runs in outcome.runs.items()
        },
        "seconds per run": {
            name: float(f"{statistics.fmean(r['seconds'] for r in runs):.3g}") for name, runs in outcome.runs.items()
        },
        "minutes": float(f"{outcome.seconds / 60:.3g}"),
    }


def turning(experiment: Experiment, outcome: Outcome) -> str:
    """Return what would change the verdict."""
    rule, scores, word, reason = experiment.rule, outcome.scores, *outcome.verdict
    if word == "UNDECIDED" and "edge" in reason:
        return "a search beyond the edge"
    if word == "UNDECIDED" and ("budget too small" in reason or "not settled" in reason):
        return "a larger budget"
    if word == "UNDECIDED" and "did not move" in reason:
        return "a budget or problem with which training moves away from the start"
    if word == "UNDECIDED" and "one trajectory" in reason:
        return "data or starts that differ from seed to seed"
    if word == "UNDECIDED" and "same numbers" in reason:
        return "arms that differ"
    if word == "UNDECIDED" and "not tuned" in reason:
        return "a search of the learning rates"
    if not isinstance(rule, Better):
        values = scores[rule.arm]
        if rule.minus is not None:
            values = [a - b for a, b in zip(values, scores[rule.minus], strict=True)]
        found = interval(values)
        bounds = [b for b in (rule.low, rule.high) if math.isfinite(b)]
        nearest = min(bounds, key=lambda b: abs(b - found.mean))
        return f"a mean beyond {nearest:g}, which is {abs(nearest - found.mean):.3g} away" + _seeds(values, nearest)
    pairs = {r: [a - b for a, b in zip(scores[r], scores[rule.method], strict=True)] for r in rule.rivals}
    best = min(pairs, key=lambda r: statistics.fmean(pairs[r]))
    mean = statistics.fmean(pairs[best])
    if rule.control is not None and (word.startswith("NOT DUE") or "control" in reason):
        share = statistics.fmean(scores[best]) - statistics.fmean(scores[rule.control])
        return f"a control with less than half of the gain of {mean:.3g} over {best}; it has {share:.3g}"
    if word.startswith(("FAILS", "TIE")):
        gap = f"{rule.method} better by {max(rule.least - mean, 0):.3g}, so that {best} is behind"
        return gap + (", or the paper's budget, if it reverses the order" if "BUDGET" in word else "")
    if word.startswith("HOLDS"):
        return f"{best} better by {mean - rule.least:.3g}, or a control with half of the gain"
    return f"a difference to {best} whose interval excludes {rule.least:g}" + _seeds(pairs[best], rule.least)


def _seeds(values: list[float], bound: float) -> str:
    """Return how many seeds would make the interval exclude a bound, at the same mean and spread."""
    found = interval(values)
    away, half = abs(found.mean - bound), found.high - found.mean
    if not away or half <= away:
        return ""
    needed = math.ceil(len(values) * (half / away) ** 2)
    return f"; at this spread about {needed} seeds" if needed < 1000 else "; no number of seeds at this spread"


def keep(experiment: Experiment, outcome: Outcome, folder: Path, scale: str = "cpu") -> dict[str, Any]:
    """Write the verdict, and a picture of the curves of the first seed."""
    found = json.loads(json.dumps(summary(experiment, outcome, scale)))
    save_json(folder / "verdict.json", found)
    if experiment.like:
        return dict(found)
    curves = {name: runs[0]["curve"] for name, runs in outcome.runs.items()}
    positive = all(p["score"] > 0 for curve in curves.values() for p in curve)
    aim = re.search(
        r"calls (?:of f )?to an? (.+?) of ", experiment.score
    )  # such a score is the cost to a target; the curve shows the quantity itself
    axis = {"ylabel": aim[1] if aim else experiment.score, **({"yscale": "log"} if positive else {})}
    panels = [("spent", "score", {**axis, "xlabel": experiment.unit}), ("seconds", "score", axis)]
    plot(folder / "curves", f"{experiment.id} (seed 0)", curves, panels, rows=2)
    return dict(found)


def page(experiments: Iterable[Experiment], results: Path = RESULTS, scale: str = "cpu") -> str:
    """Return the page of all experiments, judged from their records: sorted by paper, one line per row."""
    known = sorted(experiments, key=lambda e: e.paper)
    counts, tables, details = Counter[str](), dict[str, list[str]](), list[str]()
    judged, missing = dict[str, Mapping[str, Any]](), dict[str, str]()
    for experiment in known:
        said = f"{experiment.claim} | {experiment.value.removeprefix('no number in the text: ')} |"
        try:
            records = Records(current(experiment, results), frozen=True)
            found = summary(experiment, execute(experiment, scale, records), scale)
        except Missing as error:
            why = str(error.args[0]) if str(error.args[0]).startswith("not run") else "begun, not finished"
            counts[why] += 1
            missing[experiment.id] = f"* {_missing(experiment, why, scale)}"
            continue
        judged[experiment.id] = found
        counts[found["verdict"]] += 1
        part = found["part of the budget"]
        budget = (
            "-"
            if found["untrained"] is None
            else "not in the text"
            if part is None
            else f"{float(f'{100 * part:.2g}'):g} %"
        )
        rule = experiment.rule
        control = found["scores"][rule.control] if isinstance(rule, Better) and rule.control else "-"
        cells = [_ours(experiment, found), control, found["untrained"] or "-", f"**{found['verdict']}**", budget]
        anchor = experiment.id.replace(".", "")
        rows = tables.setdefault(experiment.paper, [])
        rows.append(f"| [`{experiment.id}`](#{anchor}) | {said} {' | '.join(cells)} | {found['minutes']:g} |")
        details.append(_details(experiment, found, scale))
    listed = [f"| {word} | {number} |" for word, number in sorted(counts.items())]
    first = INTRODUCTION.replace("{headlines}", "\n".join(headlines(judged, missing)))
    text = [first, f"{len(known)} rows:", "", "| verdict | rows |", "|---|---|", *listed, ""]
    for paper, rows in tables.items():
        text += [f"## {paper}", "", HEADER, "|---|---|---|---|---|---|---|---|---|", *rows, ""]
    if missing:
        text += ["## Not run", "", NOT_RUN, "", *missing.values(), ""]
    if details:
        text += ["## Row by row", "", *details]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(text)).rstrip() + "\n"


NOT_RUN = """Hours of one core are estimates. A row "not run again under the present rules" has records of earlier
rules, which an audit of these experiments found inadequate: remove its folder in `results/` before you run it.
"""
HEADER = "| row | claim | paper | ours | control | untrained | verdict | part of the paper's budget | minutes |"


def _ours(experiment: Experiment, found: Mapping[str, Any]) -> str:
    """Return the scores of the method and of the best rival, with intervals."""
    rule = experiment.rule
    if not isinstance(rule, Better):
        return str(found["reason"]).rsplit("(", 1)[-1].split(" and [")[0]
    scores = found["scores"]
    best = min(rule.rivals, key=lambda r: float(scores[r].split()[0]))
    return f"{scores[rule.method]}, {best} {scores[best]}"


def _command(experiment: Experiment) -> str:
    return f"python -m recipes.papers run {experiment.id}" + (" --data-root DIR" if experiment.data else "")


def _missing(experiment: Experiment, why: str, scale: str) -> str:
    """Return the line of a row without a verdict: claim, reason, cost and command."""
    line, cost = f"`{experiment.id}`: {experiment.claim}; {why}.", COSTS.get(experiment.id)
    if cost is not None:
        budget = experiment.scales[scale]["budget"]
        hours = f"{cost.hours:g} {'hour' if cost.hours == 1 else 'hours'}"
        if cost.budget not in (None, budget):
            hours += f" with {cost.budget:,.0f} {experiment.unit.split(' (')[0]} (the command makes {budget:,.0f})"
        line += f" Cost: {cost.note or 'about ' + hours}."
    return f"{line} `{_command(experiment)}`"


def _details(experiment: Experiment, found: Mapping[str, Any], scale: str) -> str:
    numbers = experiment.scales[scale]
    lines = [
        f"### {experiment.id}",
        "",
        f"{experiment.paper}, {experiment.figure}. `{_command(experiment)}`. Score: {experiment.score}; "
        f"budget {numbers['budget']:g} {experiment.unit}, {numbers['seeds']} seeds.",
        "",
        f"**{found['verdict']}**: {found['reason']}."
        + (f" At equal seconds: {found['at equal seconds']}." if found["at equal seconds"] else ""),
        "",
        f"What would change it: {found['would change']}.",
        "",
        "| arm | score | chosen | seconds per run | not reached or diverged |",
        "|---|---|---|---|---|",
    ]
    if found["untrained"]:
        lines.append(f"| untrained | {found['untrained']} | | | |")
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
    """Write the page, and judge again all experiments with complete records."""
    known = list(experiments)
    for experiment in known:
        try:
            records = Records(current(experiment, RESULTS), frozen=True)
            found = summary(experiment, execute(experiment, "cpu", records))
        except Missing:
            (RESULTS / experiment.id / "verdict.json").unlink(missing_ok=True)  # from an earlier search
            continue
        save_json(RESULTS / experiment.id / "verdict.json", found)
    path = Path(__file__).parent / "RESULTS.md"
    path.write_text(page(known))
    return path

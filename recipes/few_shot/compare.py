"""Compare meta-learners at equal budgets: learning rates tuned on validation classes, several seeds for the best.

    python -m recipes.few_shot.compare --data cifar_fs --data-root DIR --shot 5 --seconds 20
    python -m recipes.few_shot.compare --data omniglot --data-root DIR --steps 20000 --share 0.1

With ``--share`` learning rates are searched with that part of the budget, and the best one gets the whole. Every
finished run is written to a record in ``--out`` and not repeated, so the program can be stopped and restarted at any
time; after ``--limit`` seconds it begins no further run. The grid of a learner is extended until its best learning rate
is inside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from ..common import environment, plot, share, show
from .episodes import Episodes
from .experiment import arguments, episodes_of, one
from .learners import LEARNERS

Run = dict[str, Any]
# First learning rates of the search, where they differ from Adam's; Reptile takes plain steps.
START = {"reptile": 0.3}
FACTOR = 10**0.5


def _key(run: Run) -> tuple[str, float, int, bool]:
    return run["learner"], run["lr"], run["seed"], run.get("search", False)


class Records:
    """Runs of one comparison, in a file.

    Args:
        path: the file.
        facts: settings shared by all runs; a file with other facts is refused.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts
        self.runs: list[Run] = []
        if path.exists():
            saved = json.loads(path.read_text())
            if saved["facts"] != facts:
                raise SystemExit(f"{path} is of other settings: {saved['facts']}, not {facts}; use another --out")
            self.runs = saved["runs"]

    def find(self, name: str, lr: float, seed: int, search: bool = False) -> Run | None:
        """Return a recorded run, or None; ``search``: one with a part of the budget."""
        return next((r for r in self.runs if _key(r) == (name, lr, seed, search)), None)

    def tried(self, name: str) -> list[Run]:
        """Return the runs that tune the learning rate of a learner: those of the first seed, all of one budget."""
        search = "share" in self.facts
        return [r for r in self.runs if (r["learner"], r["seed"]) == (name, 0) and r.get("search", False) == search]

    def keep(self, run: Run) -> None:
        """Add or replace a run, and write the file."""
        others = [r for r in self.runs if _key(r) != _key(run)]
        self.runs = [*others, run]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        whole = {"facts": self.facts, "environment": environment(), "runs": self.runs}
        part.write_text(json.dumps(whole, indent=None, separators=(",", ":")) + "\n")
        part.replace(self.path)


def merit(run: Run) -> tuple[float, float, float]:
    """Key to rank runs, larger is better: best validation accuracy, last accuracy, smaller learning rate.

    The best accuracies tie if no run improves on the common start; the last one then shows which harms least.
    """
    last = 0.0 if run["diverged"] else float(run["curve"][-1]["accuracy"])
    return float(run["validation"]), last, -float(run["lr"])


def tuned(
    name: str, run: Callable[[str, float, int], Run], start: float, most: int, known: Iterable[Run] = ()
) -> list[Run]:
    """Run seed 0 with larger and smaller learning rates until the best lies between two others, or ``most`` are run.

    The best run has the largest `merit`; ``known`` are runs already made.
    """
    rates = [_rounded(start * FACTOR**k) for k in (-1, 0, 1)]
    found = {r["lr"]: r for r in known} | {rate: run(name, rate, 0) for rate in rates}
    while len(found) < most and (rate := _beyond(found.values())) is not None:
        found[rate] = run(name, rate, 0)
    return [found[rate] for rate in sorted(found)]


def _beyond(runs: Collection[Run]) -> float | None:
    """Return the next learning rate beyond the grid; None if the best is inside."""
    best, rates = max(runs, key=merit)["lr"], [r["lr"] for r in runs]
    factor = 1 / FACTOR if best == min(rates) else FACTOR if best == max(rates) else None
    return _rounded(best * factor) if factor else None


def _grid(runs: list[Run]) -> str:
    """Return a text with the learning rates tried, and remarks on the best."""
    rates = [r["lr"] for r in runs]
    notes = ["edge"] if _beyond(runs) else []
    if all(r["best_step"] == 0 for r in runs):
        notes.append("none improves on the start")
    return f"{min(rates):g} to {max(rates):g}" + (f" ({', '.join(notes)})" if notes else "")


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def compare(args: argparse.Namespace, episodes: dict[str, Episodes], records: Records) -> bool:
    """Make the missing runs; return True if all are complete."""
    begun = time.monotonic()

    def made(name: str, lr: float, seed: int, test: bool, search: bool = False) -> Run:
        found = records.find(name, lr, seed, search)
        if found is None or (test and "test" not in found):
            if args.limit and time.monotonic() - begun > args.limit:
                raise TimeoutError
            # A run that is tested later resumes from its end.
            stem = f"{records.path.stem}_{name}_{lr:g}_{seed}{'_search' if search else ''}"
            checkpoint = args.out / "checkpoints" / f"{stem}.pt"
            found = one(_settings(args, name, search), episodes, name, lr, seed, test=test, checkpoint=checkpoint)
            if search:
                found["search"] = True
            records.keep(found)
            if search or test:  # never resumed again, and of 200 MB with ResNet-12
                checkpoint.unlink(missing_ok=True)
        return found

    def tried(name: str, lr: float, seed: int) -> Run:
        return made(name, lr, seed, False, args.share < 1)

    try:
        first = {}  # the run of seed 0 with the best learning rate and the whole budget
        for name in args.learners:
            start = args.rates or START.get(name, 3e-3)
            best = max(tuned(name, tried, start, args.most, records.tried(name)), key=merit)
            first[name] = made(name, best["lr"], 0, True)
        order = sorted(args.learners, key=lambda name: merit(first[name]), reverse=True)
        for seed in range(1, args.seeds):
            for name in order[: args.best]:
                made(name, first[name]["lr"], seed, True)
    except TimeoutError:
        return False
    return True


def _settings(args: argparse.Namespace, name: str, search: bool) -> argparse.Namespace:
    """Return the settings of a learner's runs, with a part of the budget for a search."""
    settings = {**vars(args), "outer": "sgd" if name == "reptile" else args.outer}
    if search:
        key = "steps" if args.steps else "seconds"
        settings[key] = type(settings[key])(settings[key] * args.share) or 1
    return argparse.Namespace(**settings)


def report(records: Records, title: str, thresholds: list[float]) -> None:
    """Print the tables: accuracies, learning rates tried, time to given accuracies."""
    rows, times, curves = [], [], {}
    for name in dict.fromkeys(r["learner"] for r in records.runs):
        tried = records.tried(name)
        first = records.find(name, max(tried, key=merit)["lr"], 0) if tried else None
        if first is None or "test" not in first:
            continue
        tested = [r for r in records.runs if _key(r)[:2] == (name, first["lr"]) and "test" in r]
        accuracies = [r["test"]["accuracy"] for r in tested]
        spread = max(accuracies) - min(accuracies) if len(accuracies) > 1 else None
        rows.append([name, statistics.mean(accuracies), first["test"]["interval"], len(accuracies), spread,
                     first["validation"], first["lr"], _grid(tried), first["steps"]])  # fmt: skip
        times.append([name, *(_seconds_to(first, level) for level in thresholds)])
        curves[name] = first["curve"]
    rows.sort(key=lambda row: -float(str(row[1])))
    show(title, ("", "test", "95 % +-", "seeds", "range", "validation", "lr", "tried", "meta-steps"), rows)
    order = [row[0] for row in rows]
    times.sort(key=lambda row: order.index(row[0]))
    show("seconds to a validation accuracy, first seed", ("", *(f"{t:.0%}" for t in thresholds)), times)
    stem = records.path.with_suffix("")
    axis = {"xlabel": "seconds", "ylabel": "validation accuracy"}
    plot(stem, title, {name: curves[name] for name in order}, [("seconds", "accuracy", axis)])


def _seconds_to(run: Run, level: float) -> float | None:
    return next((point["seconds"] for point in run["curve"] if point["accuracy"] >= level), None)


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Run the program; return the records."""
    parser = arguments(__doc__)
    parser.methods(LEARNERS, [*LEARNERS], "--learners")
    parser.option("seeds", 3, "seeds of the best learners")
    parser.option("best", 4, "learners that get all seeds")
    parser.option("most", 6, "largest number of learning rates per learner")
    parser.option("share", 1.0, "share of the budget for the search of learning rates", type=share)
    parser.option("rates", None, "first learning rate of the search", type=float, shown="0.003")
    parser.option("limit", None, "seconds after which no run begins", type=float, shown="no limit")
    parser.option("thresholds", [0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 0.9], "accuracies whose time is shown")
    args = parser.parse(given)
    keys = ("data", "size", "way", "shot", "query", "tasks", "backbone", "statistics", "augment", "rotations",
            "autocast", "outer", "schedule", "clip", "steps", "seconds", "evaluations", "episodes",
            "test_episodes")  # fmt: skip
    facts = {key: getattr(args, key) for key in keys}
    if args.pretrain:
        facts["pretrain"] = args.pretrain
    if args.share < 1:
        facts["share"] = args.share
    name = f"{args.data}_{args.backbone}_{args.way}way_{args.shot}shot" + (f"_{args.steps}" if args.share < 1 else "")
    name += "_pretrained" if args.pretrain else ""
    records = Records(args.out / f"{name}.json", facts)
    done = compare(args, episodes_of(args), records)
    budget = f"{args.steps} meta-steps" if args.steps else f"{args.seconds:g} s"
    report(records, f"{args.data}, {args.way}-way {args.shot}-shot, {args.backbone}, {budget}", args.thresholds)
    if not done:
        print("Not all runs are made yet: run the same command again.")
    return {"done": done, "runs": records.runs}


if __name__ == "__main__":
    main()

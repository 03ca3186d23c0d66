"""All meta-learners with equal budgets: learning rates tuned on validation classes, several seeds for the best.

    python -m recipes.few_shot.compare --data cifar_fs --data-root DIR --shot 5 --seconds 20

Every run is written to a record as soon as it is done (``--out``), and one that is there is not made again, so that the
program can be stopped and started at any time; ``--limit`` stops it after so many seconds. The grid of a learner is
extended until its best learning rate is inside of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from ..common import environment, plot, show
from .episodes import Episodes
from .experiment import arguments, episodes_of, one
from .learners import LEARNERS

Run = dict[str, Any]
# Where the search for a learning rate of Adam begins; Reptile moves by plain steps of this length.
START = {"reptile": 0.3}
FACTOR = 10**0.5


class Records:
    """The runs of one comparison, in a file.

    Args:
        path: of the file.
        facts: what all runs have in common; a file with other facts is refused.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts
        self.runs: list[Run] = []
        if path.exists():
            saved = json.loads(path.read_text())
            if saved["facts"] != facts:
                raise SystemExit(f"{path} is of other settings: {saved['facts']}, not {facts}; use another --out")
            self.runs = saved["runs"]

    def find(self, name: str, lr: float, seed: int) -> Run | None:
        """A run that is there."""
        keys = ("learner", "lr", "seed")
        return next((r for r in self.runs if tuple(r[k] for k in keys) == (name, lr, seed)), None)

    def tried(self, name: str) -> list[Run]:
        """The runs that choose the learning rate of a learner: those of the first seed."""
        return [r for r in self.runs if (r["learner"], r["seed"]) == (name, 0)]

    def keep(self, run: Run) -> None:
        """Add a run, or what is new of it, and write the file."""
        keys = ("learner", "lr", "seed")
        others = [r for r in self.runs if any(r[k] != run[k] for k in keys)]
        self.runs = [*others, run]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        whole = {"facts": self.facts, "environment": environment(), "runs": self.runs}
        part.write_text(json.dumps(whole, indent=None, separators=(",", ":")) + "\n")
        part.replace(self.path)


def merit(run: Run) -> tuple[float, float, float]:
    """What the best run is the largest of: best validation accuracy, then the last one, then the smaller learning rate.

    Runs tie in the first if none improves on its start, which they share: there the last tells which harms least.
    """
    last = 0.0 if run["diverged"] else float(run["curve"][-1]["accuracy"])
    return float(run["validation"]), last, -float(run["lr"])


def tuned(
    name: str, run: Callable[[str, float, int], Run], start: float, most: int, known: Iterable[Run] = ()
) -> list[Run]:
    """Runs of seed 0 with growing and falling learning rates, until the best is between two others, or after ``most``.

    Best is that of the largest `merit`; ``known`` are runs that are there already.
    """
    rates = [_rounded(start * FACTOR**k) for k in (-1, 0, 1)]
    found = {r["lr"]: r for r in known} | {rate: run(name, rate, 0) for rate in rates}
    while len(found) < most and (rate := _beyond(found.values())) is not None:
        found[rate] = run(name, rate, 0)
    return [found[rate] for rate in sorted(found)]


def _beyond(runs: Collection[Run]) -> float | None:
    """The learning rate that comes next, beside the grid; None if the best is inside of it."""
    best, rates = max(runs, key=merit)["lr"], [r["lr"] for r in runs]
    factor = 1 / FACTOR if best == min(rates) else FACTOR if best == max(rates) else None
    return _rounded(best * factor) if factor else None


def _grid(runs: list[Run]) -> str:
    """The learning rates that were tried, and what is to be known of the best."""
    rates = [r["lr"] for r in runs]
    notes = ["edge"] if _beyond(runs) else []
    if all(r["best_step"] == 0 for r in runs):
        notes.append("none improves on the start")
    return f"{min(rates):g} to {max(rates):g}" + (f" ({', '.join(notes)})" if notes else "")


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def compare(args: argparse.Namespace, episodes: dict[str, Episodes], records: Records) -> bool:
    """Make the runs that are missing; whether all are there."""
    begun = time.monotonic()

    def made(name: str, lr: float, seed: int, test: bool) -> Run:
        found = records.find(name, lr, seed)
        if found is None or (test and "test" not in found):
            if args.limit and time.monotonic() - begun > args.limit:
                raise TimeoutError
            # A run that is tested later goes on from its end.
            checkpoint = args.out / "checkpoints" / f"{records.path.stem}_{name}_{lr:g}_{seed}.pt"
            found = one(_settings(args, name), episodes, name, lr, seed, test=test, checkpoint=checkpoint)
            records.keep(found)
        return found

    def tried(name: str, lr: float, seed: int) -> Run:
        return made(name, lr, seed, False)

    try:
        rates = {}
        for name in args.learners:
            start = args.rates or START.get(name, 3e-3)
            best = max(tuned(name, tried, start, args.most, records.tried(name)), key=merit)
            rates[name] = best["lr"]
            made(name, rates[name], 0, True)
        order = sorted(args.learners, key=lambda n: max(map(merit, records.tried(n))), reverse=True)
        for seed in range(1, args.seeds):
            for name in order[: args.best]:
                made(name, rates[name], seed, True)
    except TimeoutError:
        return False
    return True


def _settings(args: argparse.Namespace, name: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "outer": "sgd" if name == "reptile" else args.outer})


def report(records: Records, title: str, thresholds: list[float]) -> None:
    """Print the tables: accuracies, learning rates that were tried, time to accuracies."""
    rows, times, curves = [], [], {}
    for name in dict.fromkeys(r["learner"] for r in records.runs):
        tried = records.tried(name)
        first = max(tried, key=merit)
        tested = [r for r in records.runs if (r["learner"], r["lr"]) == (name, first["lr"]) and "test" in r]
        if "test" not in first:
            continue
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
    """Run the program; returns the records."""
    parser = arguments(__doc__)
    parser.methods(LEARNERS, [*LEARNERS], "--learners")
    parser.option("seeds", 3, "of the best learners")
    parser.option("best", 4, "learners that get all seeds")
    parser.option("most", 6, "learning rates of a learner")
    parser.add_argument("--rates", type=float, help="the learning rate that the search begins with; default: 0.003")
    parser.add_argument("--limit", type=float, help="begin no run after so many seconds")
    parser.option("thresholds", [0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 0.9], "accuracies whose time is shown")
    args = parser.parse(given)
    keys = ("data", "size", "way", "shot", "query", "tasks", "backbone", "statistics", "augment", "rotations",
            "autocast", "outer", "schedule", "clip", "steps", "seconds", "evaluations", "episodes",
            "test_episodes")  # fmt: skip
    facts = {key: getattr(args, key) for key in keys}
    name = f"{args.data}_{args.backbone}_{args.way}way_{args.shot}shot"
    records = Records(args.out / f"{name}.json", facts)
    done = compare(args, episodes_of(args), records)
    budget = f"{args.steps} meta-steps" if args.steps else f"{args.seconds:g} s"
    report(records, f"{args.data}, {args.way}-way {args.shot}-shot, {args.backbone}, {budget}", args.thresholds)
    if not done:
        print("Not all runs are made yet: run the same command again.")
    return {"done": done, "runs": records.runs}


if __name__ == "__main__":
    main()

r"""Compare all methods on one problem at an equal budget of oracle calls, each with its best learning rate.

    python -m recipes.compare                               # per-weight regularisation on scikit-learn's digits
    python -m recipes.compare --problem quadratic           # closed form, exact gap to the minimum
    python -m recipes.compare --problem cleaning --methods aid f2sa-2 --grid 1 10 100

The budget counts a gradient of f or g on one batch as 1, a Hessian-vector or cross product as 2, a value of f as 1/2.
Every method makes its own update of x (``optimizer.step``). Its score is the upper loss at (x, y*(x)) with an accurate
lower solve, or the gap to the minimum for the quadratic; the table also shows the loss at the method's own y. Each
lower solve starts where the last one ended, except for ba, which always starts cold. The learning rate is chosen on a
problem with another seed, from a grid that is extended until no neighbour is better. Figures are means over the seeds,
with 95 % intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .common import Parser, gradients, interval, plot, progress, save, show, spend
from .common.methods import EXACT
from .common.search import Axis, Found, search
from .common.seeds import begin, stream
from .problems.images import load_images
from .problems.problem import WHOLE, Index, Problem
from .problems.softmax import Cleaning, Regularised, Softmax, corrupted, with_bias


class Quadratic(Problem):
    """Random quadratics in 20 upper and 30 lower dimensions, condition number 10."""

    lower_lr = 0.1

    def __init__(self, seed: int) -> None:
        generator = stream(seed, "data")

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        basis = torch.linalg.qr(random(30, 30))[0]
        self.A = basis @ torch.diag(torch.logspace(0, 1, 30, dtype=torch.float64)) @ basis.T
        self.B, self.c = random(30, 20) / 20**0.5, random(30)
        self.x, self.y = torch.zeros(20, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
        response = torch.linalg.solve(self.A, self.B)
        best = torch.linalg.solve(response.T @ response + 0.1 * torch.eye(20), response.T @ self.c)
        self.minimum = float(self.upper(best, response @ best))

    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Lower loss, minimised by A^-1 B x."""
        loss: Tensor = y @ self.A @ y / 2 - y @ self.B @ x
        return loss

    def upper(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Upper loss: half the squared distance to a target, plus a ridge."""
        return (y - self.c).square().sum() / 2 + 0.05 * x.square().sum()

    def solution(self, x: Tensor, start: Tensor) -> Tensor:
        """Return y*(x), in closed form."""
        solution: Tensor = torch.linalg.solve(self.A, self.B @ x.detach())
        return solution


def regularisation(seed: int) -> Problem:
    """Return a problem with one ridge weight exp(x) per weight of a classifier; f has no direct dependence on x."""
    parts = load_images("digits", None, False, (150, 600), stream(seed, "data"))
    return Regularised(with_bias(parts), ridge=1 / 20, x=torch.full((65, 10), -3.0))


def cleaning(seed: int) -> Problem:
    """Return a problem with one weight per training example; half of the 500 labels are wrong."""
    train, val, test = load_images("digits", None, False, (500, 300), stream(seed, "data"))
    labels = corrupted(train.labels, 0.5, 10, stream(seed, "labels"))
    return Cleaning(with_bias([train._replace(labels=labels), val, test]), ridge=1e-3)


class Setting(NamedTuple):
    """A problem, and the grid of learning rates."""

    make: Callable[[int], Problem]
    grid: tuple[float, ...]


LOWER_STEPS = 10
TUNING = 1000  # seed offset of the problem on which learning rates are chosen
PROBLEMS = {
    "regularisation": Setting(regularisation, (0.3, 3.0, 30.0, 300.0, 3000.0)),
    "quadratic": Setting(Quadratic, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
    "cleaning": Setting(cleaning, (0.3, 3.0, 30.0, 300.0, 3000.0)),
}


def run(problem: Problem, name: str, lr: float, seed: int, budget: float, evaluations: int) -> dict[str, Any]:
    """Run one method with one learning rate until the budget is spent or it diverges."""
    begin(seed, "method")
    x, y = problem.start()
    optimizer = EXACT[name]([x], [y], lr=lr, lower_lr=problem.lower_lr, lower_steps=LOWER_STEPS)
    solution, minimum = problem.y, getattr(problem, "minimum", 0.0)

    def measure() -> dict[str, float]:
        nonlocal solution
        solution = problem.solution(x, solution)
        held, value = (float(problem.upper(x, at).detach()) - minimum for at in (y, solution))
        return {"calls": gradients(optimizer), "value": value, "held": held}

    def spent(_: float) -> float:  # a converged method spends no more calls
        return math.inf if getattr(optimizer, "converged", False) else gradients(optimizer)

    found = spend(
        lambda: optimizer.step(lambda: problem.upper(x, y), lambda: problem.lower(x, y)), measure, budget=budget,
        spent=spent, evaluations=evaluations, judged=("value", "held"),
    )  # fmt: skip
    accuracy = problem.accuracy(solution) if isinstance(problem, Softmax) and not found["diverged"] else None
    return {**found, "lr": lr, "accuracy": accuracy, "oracle_calls": optimizer.oracle_counts}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True)
    parser.add_argument("--problem", choices=[*PROBLEMS], default="regularisation", help="default: regularisation")
    parser.methods(EXACT, "all", "--methods")
    parser.settings("problem", {k: {"grid": v.grid} for k, v in PROBLEMS.items()}, grid="learning rates of x")
    parser.option("budget", 2000.0, "oracle calls per run, in gradients")
    parser.option("evaluations", 5, "points per curve")
    parser.option("seeds", 3, "number of test problems")
    args = parser.parse(arguments)
    make = lru_cache(PROBLEMS[args.problem].make)
    tried: dict[str, dict[str, float]] = {}
    found: dict[str, Found] = {}
    runs: dict[str, list[dict[str, Any]]] = {}

    def one(name: str, lr: float, seed: int) -> dict[str, Any]:
        return run(make(seed), name, lr, seed, args.budget, args.evaluations)

    for name in (bar := progress([*(args.methods or EXACT)], unit="method")):
        bar.set_description(name)
        scores = tried.setdefault(name, {})

        def score(setting: dict[str, float], _: float, name: str = name, scores: dict[str, float] = scores) -> float:
            if (key := f"{setting['lr']:g}") not in scores:
                scores[key] = one(name, setting["lr"], args.seed + TUNING)["value"]
            return scores[key]

        found[name] = search({"lr": Axis(tuple(sorted(args.grid)))}, score, shares=(), moves=8)
        runs[name] = [one(name, found[name].setting["lr"], args.seed + k) for k in range(args.seeds)]
    means = {name: interval([r["value"] for r in several]) for name, several in runs.items()}
    results = {name: runs[name][0] for name in sorted(runs, key=lambda name: means[name].mean)}
    label = "gap to the minimum" if args.problem == "quadratic" else "validation loss"
    title = (
        f"{args.problem}: {label} after {args.budget:g} oracle calls, best of lr = {', '.join(map(str, args.grid))} ..."
    )
    rows: list[list[object]] = []
    for name, r in results.items():
        lr = f"{r['lr']:g}" + (" (edge)" if found[name].edges else "")
        held, seconds = (fmean(s[key] for s in runs[name]) for key in ("held", "seconds"))
        rows.append([name, str(means[name]), held, r["accuracy"], lr, r["steps"], seconds])
    show(title, ("", f"{label} at y*", "at the held y", "test accuracy", "best lr", "outer steps", "seconds"), rows)
    stem = args.out / f"compare_{args.problem}"
    axis = {"yscale": "log", "ylabel": label}
    panels = [("calls", "value", {**axis, "xlabel": "oracle calls (gradients)"}), ("seconds", "value", axis)]
    plot(stem, title, {name: r["curve"] for name, r in results.items()}, panels)
    seeds = {name: [r["value"] for r in several] for name, several in runs.items()}
    return save(args, stem, {"grid": tried, "seeds": seeds, "results": results})


if __name__ == "__main__":
    main()

r"""Reweight training examples for a shifted test set: one lower problem, or many with different temperatures.

.. math::
    \min_\theta\ \frac1m \sum_{i \le m} \frac1{|V|} \sum_{j \in V} \ell_i(w_i^*(\theta); \xi_j), \qquad
    w_i^*(\theta) = \arg\min_w \frac1{|T|} \sum_{j \in T} \sigma(\theta_j)\, \ell_i(w; \zeta_j)
    + \frac\lambda2 \|w\|^2

with the logistic loss :math:`\ell_i(w; a, b) = \log(1 + e^{-b (w^\top a + w_0) / \sigma_i})` of a linear classifier
with bias. A single lower problem has :math:`\sigma = 1`; for many, each :math:`\sigma_i` is drawn once from [1, 11],
and the lower variable is a matrix with one row per problem. V is the test part of the data: this is a study of speed,
not of generalisation. In the bundled data a fifth of the training labels is flipped, as something to find.

    python -m recipes.hyper_regularization                                              # scikit-learn's breast cancer
    python -m recipes.hyper_regularization --tasks 50
    python -m recipes.hyper_regularization --data a9a --data-root DIR                   # w8a, ijcnn1
    python -m recipes.hyper_regularization --data a9a --data-root DIR --tasks 200

Every run ends when its budget of samples is drawn: each example counts once for each lower problem that uses it.
Methods that do not draw lower problems themselves take all of them at each iteration, with an independent batch for
each. Learning rates are chosen from a grid with the first seed, by the objective at the last iterate; they decay as in
the analysis of each method. The weights of the recursive estimates are the library's defaults and not tuned: they are
constant, whereas the paper's decrease with the step sizes. ``rsvrb`` is the library's default variant; the paper's is
``rsvrb-faithful``. Evaluation time does not count.

Problem: arXiv:2105.02266, appendix E. Its figures have no numbers, its weights have no sigmoid, and its sum over the
lower problems has no factor 1/m.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo

from .common import Parser, median_curve, plot, rows, save, show, spend, summary, tuned
from .common.methods import STOCHASTIC, Method, decaying
from .common.seeds import stream
from .problems.libsvm import load_breast_cancer, load_libsvm
from .problems.problem import WHOLE, Index, Part, Problem
from .problems.softmax import with_bias

# Flipped labels, training and test examples for many lower problems (as many as in a1a and w1a, and 100).
SETTINGS: dict[str, dict[str, Any]] = {
    "breast_cancer": {"flipped": 0.2, "sizes": (None, 100)},
    "a9a": {"flipped": 0.0, "sizes": (1605, 100)},
    "w8a": {"flipped": 0.0, "sizes": (2477, 100)},
    "ijcnn1": {"flipped": 0.0, "sizes": (2000, 100)},
}
CONTROLS = ("ba", "paid", "hozog-1", "pzobo-1")  # offered, but not among the default methods


class Reweighting(Problem):
    """Data and losses of the m lower problems; both losses are sums over them.

    Args:
        train: data of the lower problems.
        val: data of the upper loss.
        ridge: lambda.
        scales: sigma_i, one for each lower problem; the lower variable is a matrix with m rows. Default: one lower
            problem with sigma = 1, whose variable is a vector.
    """

    def __init__(self, train: Part, val: Part, ridge: float, scales: Tensor | None = None) -> None:
        # The losses depend on an example only through label times features.
        self.train, self.val = (labels.unsqueeze(1) * features for features, labels in with_bias([train, val]))
        self.convexity = self.ridge = ridge
        self.tasks = None if scales is None else len(scales)
        self.scales = torch.ones(1) if scales is None else scales.unsqueeze(1)
        self.sizes = len(self.train), len(self.val)
        self.x = torch.zeros(len(self.train))
        self.y = torch.zeros(self.train.shape[1:] if scales is None else (len(scales), self.train.shape[1]))
        self.tol = 1e-5 * len(self.scales) ** 0.5
        largest = torch.linalg.matrix_norm(self.train, 2).item() ** 2 / len(self.train)
        self.lower_lr = 1 / (largest / 4 / float(self.scales.min()) ** 2 + ridge)

    def losses(self, rows: Tensor, y: Tensor, index: Index, scale: Tensor | None) -> Tensor:
        """Return the loss of each example, for the same examples in all rows of y or one row of indices per row."""
        rows = rows[index]
        products = (rows @ y.mT).mT if rows.dim() <= y.dim() == 2 else (rows @ y.unsqueeze(-1)).squeeze(-1)
        return F.softplus(-products / (self.scales if scale is None else scale))

    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE, scale: Tensor | None = None) -> Tensor:
        """Return the weighted training loss with ridge, summed over the rows of y (in a task: one, with ``scale``)."""
        losses = (x[index].sigmoid() * self.losses(self.train, y, index, scale)).mean(-1)
        return losses.sum() + self.ridge / 2 * y.square().sum()

    def upper(self, x: Tensor, y: Tensor, index: Index = WHOLE, scale: Tensor | None = None) -> Tensor:
        """Return the validation loss, summed in the same way."""
        return self.losses(self.val, y, index, scale).mean(-1).sum()

    @torch.no_grad()
    def objective(self, y: Tensor) -> float:
        """Return the upper loss on all its data, as the mean over the lower problems."""
        return float(self.upper(self.x, y)) / len(self.scales)


class Rows(bo.TensorTasks):
    """Lower problems as tasks with rows (index of an example, temperature); counts the examples drawn."""

    def __init__(self, problem: Reweighting) -> None:
        scales, self.drawn = problem.scales, 0
        train, val = ((torch.arange(n).expand(len(scales), n), scales.expand(-1, n)) for n in problem.sizes)
        super().__init__(train, val)

    def lower(self, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Any:
        """Draw training examples."""
        return self._counted(super().lower(tasks, n, generator))

    def upper(self, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Any:
        """Draw validation examples."""
        return self._counted(super().upper(tasks, n, generator))

    def _counted(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.drawn += batch[0].numel()
        return batch


def run(problem: Reweighting, method: Method, rates: tuple[float, float], seed: int, args: Any) -> dict[str, Any]:
    """Run one method with one pair of learning rates until the budget is spent."""
    lr, lower_lr = rates
    x, y = problem.start()
    options: dict[str, Any] = {"generator": stream(seed, "method")}
    sources: tuple[Any, ...]
    if method.tasks:
        sampler = Rows(problem)
        sources, scale = (sampler,), 1
        options |= {
            "task_batch": min(args.task_batch, len(sampler)),
            "lower_batch": args.batch,
            "upper_batch": args.batch,
        }
        losses: tuple[Any, ...] = lambda batch: problem.upper(x, y, *batch), lambda batch: problem.lower(x, y, *batch)
        given: dict[str, Any] = {"tasks": sampler}
    else:
        lower = method.objective(
            lambda i: problem.lower(x, y, i), problem.sizes[0], args.batch, 2 * seed, problem.tasks
        )
        upper = method.objective(
            lambda i: problem.upper(x, y, i), problem.sizes[1], args.batch, 2 * seed + 1, problem.tasks
        )
        sources = losses = upper, lower
        given, scale = {}, problem.tasks or 1  # the stacked losses are sums, the objective is a mean
    optimizer = method.optimizer(x, y, lr=lr / scale, lower_lr=lower_lr, convexity=problem.ridge, **options)
    if args.compile:
        optimizer.compile()
    scheduler, solution = decaying(optimizer, method), problem.y

    def step() -> None:
        optimizer.step(*losses, **given)
        scheduler.step()

    def drawn(_: float = 0.0) -> float:
        return sum(source.drawn for source in sources)

    def measure() -> dict[str, float]:
        nonlocal solution
        solution = problem.solution(x, solution)
        values = {"solved": problem.objective(solution), "current": problem.objective(y)}
        return {"samples": drawn(), "calls": sum(optimizer.oracle_counts.values()), **values}

    found = spend(
        step, measure, budget=args.samples, spent=drawn, evaluations=args.evaluations, judged=("solved", "current")
    )
    return {**found, "lr": lr, "lower_lr": lower_lr, "seed": seed, "oracle_calls": optimizer.oracle_counts}


def load(args: Any) -> Reweighting:
    """Return the problem that the arguments describe."""
    generator = stream(args.data_seed, "data")
    if args.data == "breast_cancer":
        train, val = load_breast_cancer(args.data_seed)
    else:
        train, val = load_libsvm(args.data, args.data_root, args.download, args.data_seed)
    sizes = SETTINGS[args.data]["sizes"] if args.tasks > 1 else (None, None)
    counts = args.train or sizes[0], args.val or sizes[1]
    train, val = (
        part.take(torch.randperm(len(part.labels), generator=generator)[:count])
        for part, count in zip((train, val), counts, strict=True)
    )
    signs = torch.where(torch.rand(len(train.labels), generator=generator) < args.flipped, -1.0, 1.0)
    scales = 1 + 10 * torch.rand(args.tasks, generator=generator) if args.tasks > 1 else None
    return Reweighting(Part(train.features, train.labels * signs), val, args.ridge, scales)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, compiled=True)
    parser.data(SETTINGS)
    parser.option("tasks", 1, "number of lower problems")
    parser.methods(STOCHASTIC, "all but some controls")
    parser.option("samples", None, "budget of a run", type=int, shown="20,000 per problem or three passes")
    parser.option("batch", 32, "examples per batch")
    parser.option("task_batch", 10, "lower problems per step, for methods that draw them")
    parser.option("lr", [1.0, 10.0], "grid of learning rates of x, per training example")
    parser.option("lower_lr", [0.1, 0.5], "grid of lower learning rates, in units of 1/L")
    parser.option("ridge", 0.01, "lambda")
    parser.settings("data", SETTINGS, flipped="share of flipped labels")
    parser.option("train", None, "training examples", type=int, shown="all (many problems: about 2,000)")
    parser.option("val", None, "validation examples", type=int, shown="all (many problems: 100)")
    parser.option("evaluations", 12, "points per curve")
    parser.option("seeds", 3, "runs with the best learning rates")
    parser.add_seed("data_seed", "seed of splits, flips and temperatures")
    args = parser.parse(arguments)
    many = args.tasks > 1
    fits = [name for name, method in STOCHASTIC.items() if (not method.matrices if many else not method.tasks)]
    chosen = args.optimizer or [name for name in fits if name not in CONTROLS]
    if wrong := [name for name in chosen if name not in fits]:
        kind = "one lower problem" if many else "many lower problems: give --tasks"
        parser.error(f"--optimizer {wrong[0]} is for {kind}")

    problem = load(args)
    n, features = problem.train.shape
    args.samples = args.samples or args.tasks * max(20_000, 3 * sum(problem.sizes))
    grid = [(n * lr, lower_lr * problem.lower_lr) for lr in args.lr for lower_lr in args.lower_lr]
    tasks = f"{args.tasks} lower problems" if many else "one lower problem"
    title = f"Reweighting {args.data}: {n:,} / {problem.sizes[1]:,} examples, {features} weights, {tasks}"
    rates = [", ".join(f"{rate:.4g}" for rate in dict.fromkeys(column)) for column in zip(*grid, strict=True)]
    print(f"{title}\nlr: {rates[0]}; lower_lr: {rates[1]}", flush=True)

    def one(name: str, rates: tuple[float, float], seed: int) -> dict[str, Any]:
        return run(problem, STOCHASTIC[name], rates, seed, args)

    found = tuned(chosen, grid, one, "solved", args.seeds)
    results = {name: best for name, (_, best) in found.items()}
    unweighted = problem.objective(problem.solution(*problem.start()))
    keys = ("solved", "current", "range", "lr", "lower_lr", "steps", "samples", "calls", "seconds")
    medians = summary(results, *(key for key in keys if key != "range"))
    equal: list[object] = ["equal weights", unweighted, *[None] * 8]
    header = ("", "f(x, y*(x))", "f(x, y)", "range", "lr", "lower_lr", "steps", "samples", "calls", "seconds")
    show(
        f"{title}\nafter {args.samples:,} samples, median of {args.seeds} seeds", header, [equal, *rows(medians, *keys)]
    )
    stem = args.out / f"hyper_regularization_{args.data}{f'_{args.tasks}' if many else ''}"
    units = {"samples": "samples drawn", "calls": "oracle calls", "seconds": "seconds"}
    labels = {"solved": "f(x, y*(x))", "current": "f(x, y)"}
    panels = [(x, y, {"xlabel": units[x], "ylabel": labels[y]}) for y in labels for x in units]
    plot(stem, title, {name: median_curve([r["curve"] for r in runs]) for name, runs in results.items()}, panels, 2)
    kept = ("lr", "lower_lr", "solved", "current")
    tried = {name: [{k: r[k] for k in kept} for r in runs] for name, (runs, _) in found.items()}
    return save(args, stem, {"equal_weights": unweighted, "grid": tried, "results": results})


if __name__ == "__main__":
    main()

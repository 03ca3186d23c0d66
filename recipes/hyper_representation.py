r"""Hyper-representation: learn features on which a head, trained on other data, does well.

.. math::
    \min_x\ f(\text{head}^*(x), \text{features}_x; D_{out}), \qquad
    \text{head}^*(x) = \arg\min_y g(y, \text{features}_x; D_{in}) + \tfrac{\beta}{2} \|y\|^2

    python -m recipes.hyper_representation                                 # scikit-learn's digits, under a minute
    python -m recipes.hyper_representation --data mnist --data-root DIR    # LeNet, mini-batches of 256
    python -m recipes.hyper_representation --seeds 5                       # intervals, and median curves
    python -m recipes.hyper_representation --data linear                   # synthetic regression, with known losses
    python -m recipes.hyper_representation --data two-layer

Problems: arXiv:2110.07004, 4.1 and 4.2. On MNIST all methods use plain SGD for the lower steps, warm starts, and a
normalisation of the features that the paper does not have. The paper measures accuracy on MNIST on D_out, whose labels
determine x. Here D_in (10,000) and D_out (50,000) are parts of the training set, and accuracy is measured on the unseen
test set.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from .common import CALLS, Parser, plot, rows, save, show, train
from .common.intervals import interval
from .common.running import median_curve
from .common.seeds import begin, stream
from .problems.images import load_images
from .problems.networks import lenet
from .problems.problem import Part

CODE: dict[str, Any] = {"direction": "block_sphere", "scale": "none"}  # as in the authors' public code
METHODS: dict[str, partial[Any]] = {
    "pzobo": partial(bo.PZOBO, directions=1),
    "pzobo-16": partial(bo.PZOBO, directions=16),
    "pzobo-256": partial(bo.PZOBO, directions=256),
    "pzobo-code": partial(bo.PZOBO, directions=1, **CODE),
    "hozog": partial(bo.HOZOG, directions=1),
    "first-order": partial(bo.FirstOrder),
    "itd": partial(bo.ITD),
    "aid-fp": partial(bo.AID, linear_solver="fixed_point"),
    "aid-cg": partial(bo.AID),
    "f2sa": partial(bo.F2SA, order=2, nu=1e-2),
}
ONE_LEVEL = "one-level"  # Adam on f + g over all parameters together
DEFAULT = ["pzobo", "pzobo-code", "hozog", "first-order", "itd", "aid-fp", "aid-cg", "f2sa", ONE_LEVEL]
FIXED = {"smoothing": 0.01, "linear_lr": None, "warm_start": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {**FIXED, "steps": 60, "lr": 0.01, "lower_steps": 10, "lower_lr": 0.5, "linear_lr": 0.5},
    "mnist": {**FIXED, "steps": 200, "lr": 1e-3, "lower_steps": 10, "lower_lr": 0.03, "warm_start": True},
    "linear": {**FIXED, "steps": 100, "lr": 0.05, "lower_steps": 20, "lower_lr": 1e-3},
    "two-layer": {**FIXED, "steps": 100, "lr": 0.01, "lower_steps": 10, "lower_lr": 1e-3, "smoothing": 0.1},
}
# Upper loss of "linear" at these steps, measured independently on the same data (seed 0, one run: the last digits of
# the random methods are noise).
STEPS = (0, 10, 20, 40, 60, 80, 99)
REFERENCE: dict[str, tuple[float, ...]] = {
    "itd": (508.6, 9.326, 2.666, 0.3416, 0.0489, 0.0181, 0.0123),
    "aid-fp": (508.6, 10.42, 3.342, 0.710, 0.2285, 0.1157, 0.0773),
    "aid-cg": (508.6, 7.05, 2.259, 0.464, 0.1505, 0.0910, 0.0664),
    "first-order": (508.6, 5.298, 1.796, 0.419, 0.0866, 0.0321, 0.0166),
    "pzobo-code": (508.6, 5.296, 1.728, 0.433, 0.0841, 0.0357, 0.0157),
    "pzobo": (508.6, 268.3, 158.6, 92.3, 51.5, 30.7, 25.1),
    "pzobo-16": (508.6, 102.1, 29.6, 11.3, 5.55, 4.10, 4.02),
    "pzobo-256": (508.6, 32.8, 9.94, 1.72, 0.547, 0.342, 0.228),
    "hozog": (508.6, 342.3, 232.5, 122.1, 73.7, 54.0, 40.3),
}
CHOSEN = {"linear": [*REFERENCE], "two-layer": ["first-order", "pzobo-code", "itd", "pzobo"]}  # other problems: DEFAULT


class Task(NamedTuple):
    """Newly drawn parameters, and the losses as functions of them."""

    x: list[Tensor]
    y: list[Tensor]
    upper: bo.Objective
    lower: bo.Objective
    accuracy: Callable[[], float] | None


class Batches:
    """Mini-batches of a part in a new random order at each pass."""

    def __init__(self, part: Part, size: int, generator: torch.Generator) -> None:
        self.part, self.size, self.generator = part, size, generator

    def __iter__(self) -> Iterator[Part]:
        order = torch.randperm(len(self.part.labels), generator=self.generator)
        for index in order[: len(order) // self.size * self.size].view(-1, self.size):
            yield self.part.take(index)


def classification(
    parts: tuple[Part, Part, Part], make: Callable[[], nn.Module], width: int, batch: int | None,
    generator: torch.Generator, args: Any,
) -> Task:  # fmt: skip
    """Return a task: a network from ``make``, a linear head; D_in, D_out and test set; full batches or mini-batches."""
    inner, outer, test = (part.to(args.device) for part in parts)
    begin(args.seed, "start")
    net, head = make().to(args.device), nn.Linear(width, 10).to(args.device)

    def features(data: Part = inner) -> tuple[Tensor, Tensor]:
        return net(data.features), data.labels

    def head_loss(part: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(head(part[0]), part[1]) + 1e-2 / 2 * head.weight.square().sum()

    def upper(data: Part = outer) -> Tensor:
        return F.cross_entropy(head(net(data.features)), data.labels)

    @torch.no_grad()
    def accuracy() -> float:
        chunks = torch.arange(len(test.labels), device=test.labels.device).tensor_split(len(test.labels) // 2000 + 1)
        hits = [(head(net(test.features[i])).argmax(1) == test.labels[i]).sum() for i in chunks]
        return float(torch.stack(hits).sum() / len(test.labels))

    streams = (None, None) if batch is None else (Batches(outer, batch, generator), Batches(inner, batch, generator))
    lower = bo.Objective(head_loss, streams[1], features=features)
    return Task([*net.parameters()], [*head.parameters()], bo.Objective(upper, streams[0]), lower, accuracy)


def digits(args: Any) -> Task:
    """Return the task on scikit-learn's digits (700 / 700 / 397 images): a network 64-32 with a head of 10."""
    generator = stream(args.seed, "data")
    parts = load_images("digits", None, False, (700, 700), generator)
    return classification(parts, lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh()), 32, None, generator, args)


def normalised() -> nn.Module:
    """Return LeNet's features, normalised, which bounds the curvature of the lower loss for any x."""
    return nn.Sequential(lenet(), nn.LayerNorm(84, elementwise_affine=False))


def padded(args: Any) -> tuple[Part, Part, Part]:
    """Return MNIST as 32x32 images: D_in and D_out from the training set, and the test set."""
    generator = stream(args.seed, "data")
    parts = load_images("mnist", args.data_root, args.download, tuple(args.sizes), generator)
    resize = partial(F.interpolate, size=(32, 32), mode="bilinear", align_corners=False)
    inner, outer, test = (Part(resize(a.view(-1, 1, 28, 28)), labels) for a, labels in parts)
    return inner, outer, test


def mnist(args: Any) -> Task:
    """Return the task on MNIST with LeNet: D_in 10,000 and D_out 50,000 from the training set."""
    return classification(padded(args), normalised, 84, 256, stream(args.seed, "batches"), args)


def regression(layers: tuple[int, ...], n: int, ridge: float, args: Any) -> Task:
    """Return a task with features X H (one layer) or sigmoid(sigmoid(X H1) H2); data and start have a fixed order."""
    begin(args.seed, "data")
    shapes = list(pairwise(layers))

    def embed(X: Tensor, H: list[Tensor]) -> Tensor:
        for h in H:
            X = X @ h if len(H) == 1 else (X @ h).sigmoid()
        return X

    true_H = [torch.randn(shape) for shape in shapes]
    true_w = torch.randn(layers[-1])
    X_g, noise_g, X_f, noise_f = torch.randn(n, layers[0]), torch.randn(n), torch.randn(n, layers[0]), torch.randn(n)
    t_g, t_f = (embed(X, true_H) @ true_w + 0.1 * noise for X, noise in ((X_g, noise_g), (X_f, noise_f)))
    w = torch.randn(layers[-1]).to(args.device).requires_grad_()
    H = [torch.randn(shape).to(args.device).requires_grad_() for shape in shapes]
    X_g, t_g, X_f, t_f = (t.to(args.device) for t in (X_g, t_g, X_f, t_f))

    def lower(features: Tensor) -> Tensor:
        return (features @ w - t_g).square().mean() / 2 + ridge / 2 * w.square().sum()

    def upper() -> Tensor:
        return (embed(X_f, H) @ w - t_f).square().mean() / 2

    return Task(H, [w], bo.Objective(upper), bo.Objective(lower, features=lambda: embed(X_g, H)), None)


PROBLEMS: dict[str, Callable[[Any], Task]] = {
    "digits": digits,
    "mnist": mnist,
    "linear": partial(regression, (64, 128), 500, 0.1),
    "two-layer": partial(regression, (256, 512, 256), 5000, 1e-3),
}


def learn(name: str, args: Any) -> dict[str, Any]:
    """Run one method, with Adam on x; return its curve and final numbers."""
    task = PROBLEMS[args.data](args)
    begin(args.seed, "method")
    adam = torch.optim.Adam([*task.x, *task.y] if name == ONE_LEVEL else task.x, lr=args.lr)
    optimizer = None if name == ONE_LEVEL else two_level(task, name, args)

    def step() -> Tensor:
        if optimizer is not None:
            loss = optimizer.backward(task.upper, task.lower)
        else:
            adam.zero_grad()
            loss = task.upper.draw()()
            (loss + task.lower.draw()()).backward()
        adam.step()
        return loss.detach()

    every = max(args.steps // 50, 1)

    def measure(k: int, loss: Tensor) -> dict[str, float]:
        point = {"loss": float(loss)}
        if task.accuracy is not None and ((k - 1) % (5 * every) == 0 or k == args.steps):
            point["accuracy"] = task.accuracy()
        return point

    curve = train(step, measure, steps=args.steps, label=name, every=every, device=args.device)
    found: dict[str, Any] = {"curve": curve, "seconds": curve[-1]["seconds"]}
    if optimizer is not None:
        shown = ("direct_norm", "indirect_norm", "noise_to_signal")
        found |= {key: float(value) for key, value in optimizer.diagnostics.items() if key in shown}
        found["oracle_calls"] = optimizer.oracle_counts
    return found


def over_seeds(name: str, args: Any) -> dict[str, Any]:
    """Return the numbers of one method over seeds: median curve, mean seconds, and the last accuracy of each seed."""
    runs = [learn(name, Namespace(**{**vars(args), "seed": args.seed + i})) for i in range(args.seeds)]
    if args.seeds == 1:
        return runs[0]
    found = {**runs[0], "curve": median_curve([run["curve"] for run in runs])}
    found["seconds"] = sum(run["seconds"] for run in runs) / len(runs)
    if all("accuracy" in run["curve"][-1] for run in runs):
        found["accuracies"] = [run["curve"][-1]["accuracy"] for run in runs]
    return found


def two_level(task: Task, name: str, args: Any) -> bo.BilevelOptimizer:
    """Return a method's optimizer with the settings of the data."""
    setting, kind = SETTINGS[args.data], METHODS[name].func
    options: dict[str, Any] = {"warm_start": setting["warm_start"]}
    if kind in (bo.PZOBO, bo.HOZOG):
        options["smoothing"] = args.smoothing
    if kind is bo.AID:
        options |= {"linear_steps": args.lower_steps, "linear_lr": setting["linear_lr"]}
    rates = {"lr": args.lr, "lower_lr": args.lower_lr, "lower_steps": args.lower_steps}
    optimizer: bo.BilevelOptimizer = METHODS[name](task.x, task.y, **rates, **options)
    return optimizer


def report(args: Any, title: str, results: dict[str, Any]) -> None:
    """Print final losses and accuracies, or losses at some steps next to the reference values."""
    if args.data not in CHOSEN:
        last = {name: {**r["curve"][-1], **r} for name, r in results.items()}
        for one in last.values():
            one["accuracy"] = interval(one["accuracies"]) if "accuracies" in one else one.get("accuracy")
        header = ("", "held-out accuracy", "upper loss", "seconds", *CALLS.values())
        show(title, header, rows(last, "accuracy", "loss", "seconds", calls=5))
        return
    found: list[list[object]] = []
    for name, r in results.items():
        losses = {p["step"] - 1: p["loss"] for p in r["curve"]}  # a curve's loss precedes its step's update of x
        found.append([name, *(losses.get(k) for k in STEPS), r["seconds"]])
        if args.data == "linear" and name in REFERENCE:
            found.append(["  reference", *REFERENCE[name], None])
    show(title, ("loss at step", *map(str, STEPS), "seconds"), found)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True, device=True)
    parser.data(PROBLEMS)
    parser.methods([*METHODS, ONE_LEVEL], "most of them")
    parser.option("seeds", 1, "runs of each method, the first with --seed, then the next seeds")
    parser.option("sizes", (10_000, 50_000), "D_in and D_out of MNIST", nargs=2)
    parser.settings(
        "data", SETTINGS, steps="outer steps", lower_steps="lower steps per outer step", lr="rate of Adam on x",
        lower_lr="learning rate of the lower steps", smoothing="for pzobo and hozog",
    )  # fmt: skip
    args = parser.parse(arguments)
    results = {name: over_seeds(name, args) for name in args.optimizer or CHOSEN.get(args.data, DEFAULT)}
    title = f"Hyper-representation, {args.data}, {args.steps} outer steps of {args.lower_steps} lower steps"
    report(args, title, results)
    stem = args.out / f"hyper_representation_{args.data}"
    axis = {"ylabel": "upper loss", "yscale": "log"}
    panels: list[tuple[str, str, dict[str, Any]]] = [("step", "loss", axis), ("seconds", "loss", axis)]
    if args.data not in CHOSEN:
        panels.append(("seconds", "accuracy", {"ylabel": "held-out accuracy"}))
    plot(stem, title, {name: r["curve"] for name, r in results.items()}, panels)
    return save(args, stem, {"results": results})


if __name__ == "__main__":
    main()

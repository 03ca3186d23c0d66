r"""Hyper-representation: learn the features of a network such that a head trained on them on other data does well.

.. math::
    \min_x\ f(\text{head}^*(x), \text{features}_x; D_{out}), \qquad
    \text{head}^*(x) = \arg\min_y g(y, \text{features}_x; D_{in}) + \tfrac{\beta}{2} \|y\|^2

    python -m recipes.hyper_representation                                 # scikit-learn's digits, under a minute
    python -m recipes.hyper_representation --data mnist --data-root DIR    # LeNet, mini-batches of 256
    python -m recipes.hyper_representation --data linear                   # synthetic regression, beside known losses
    python -m recipes.hyper_representation --data two-layer

Problems: arXiv:2110.07004, 4.1 and 4.2; on MNIST with plain SGD for the lower steps and warm starts, alike for all
methods. There the accuracy on MNIST is that on D_out, whose labels drive x; here D_in (10,000) and D_out (50,000) are
parts of the training set, and the accuracy is that on the test set, which nothing sees.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import bilevel_optim as bo

from .data import Split, load
from .report import environment, save_json, table

CODE: dict[str, Any] = {"direction": "block_sphere", "scale": "none"}  # what the authors' public code computes
METHODS: dict[str, Callable[..., bo.BilevelOptimizer]] = {
    "pzobo": partial(bo.PZOBO, directions=1),
    "pzobo-16": partial(bo.PZOBO, directions=16),
    "pzobo-256": partial(bo.PZOBO, directions=256),
    "pzobo-code": partial(bo.PZOBO, directions=1, **CODE),
    "hozog": partial(bo.HOZOG, directions=1),
    "first-order": bo.FirstOrder,
    "itd": bo.ITD,
    "aid-fp": partial(bo.AID, linear_solver="fixed_point"),
    "aid-cg": bo.AID,
    "f2sa": partial(bo.F2SA, order=2, nu=1e-2),
}
ONE_LEVEL = "one-level"  # Adam on f + g over all parameters together
DEFAULT = ["pzobo", "pzobo-code", "hozog", "first-order", "itd", "aid-fp", "aid-cg", "f2sa", ONE_LEVEL]
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"steps": 60, "lr": 0.01, "lower_steps": 10, "lower_lr": 0.5, "smoothing": 0.01, "linear_lr": 0.5},
    "mnist": {
        "steps": 200,
        "lr": 1e-3,
        "lower_steps": 10,
        "lower_lr": 0.03,
        "smoothing": 0.01,
        "warm_start": True,
    },
    "linear": {"steps": 100, "lr": 0.05, "lower_steps": 20, "lower_lr": 1e-3, "smoothing": 0.01},
    "two-layer": {"steps": 100, "lr": 0.01, "lower_steps": 10, "lower_lr": 1e-3, "smoothing": 0.1},
}
# Upper loss at these steps, measured independently with the same data (seed 0, one run: last digits of the random
# methods are noise).
STEPS = (0, 10, 20, 40, 60, 80, 99)
REFERENCE: dict[str, dict[str, tuple[float, ...]]] = {
    "linear": {
        "itd": (508.6, 9.326, 2.666, 0.3416, 0.0489, 0.0181, 0.0123),
        "aid-fp": (508.6, 10.42, 3.342, 0.710, 0.2285, 0.1157, 0.0773),
        "aid-cg": (508.6, 7.05, 2.259, 0.464, 0.1505, 0.0910, 0.0664),
        "first-order": (508.6, 5.298, 1.796, 0.419, 0.0866, 0.0321, 0.0166),
        "pzobo-code": (508.6, 5.296, 1.728, 0.433, 0.0841, 0.0357, 0.0157),
        "pzobo": (508.6, 268.3, 158.6, 92.3, 51.5, 30.7, 25.1),
        "pzobo-16": (508.6, 102.1, 29.6, 11.3, 5.55, 4.10, 4.02),
        "pzobo-256": (508.6, 32.8, 9.94, 1.72, 0.547, 0.342, 0.228),
        "hozog": (508.6, 342.3, 232.5, 122.1, 73.7, 54.0, 40.3),
    },
    "two-layer": {
        "first-order": (37.44, 4.190, 0.6472, 0.0763, 0.00730, 0.00130, 2.47e-4),
        "pzobo-code": (37.44, 4.191, 0.6469, 0.0763, 0.00733, 0.00132, 2.52e-4),
        "itd": (37.44, 3.438, 0.5294, 0.0482, 0.00738, 9.4e-4, 1.34e-4),
        "pzobo": (37.44, 30.3, 29.8, 28.9, 28.1, 27.3, 26.8),
    },
}


class Problem(NamedTuple):
    """Fresh parameters and the losses over them."""

    x: list[Tensor]
    y: list[Tensor]
    upper: bo.Objective
    lower: bo.Objective
    accuracy: Callable[[], float] | None


class Batches:
    """Mini-batches of a split in a new random order at each pass."""

    def __init__(self, split: Split, size: int, generator: torch.Generator) -> None:
        self.split, self.size, self.generator = split, size, generator

    def __iter__(self) -> Iterator[Split]:
        order = torch.randperm(len(self.split.labels), generator=self.generator)
        for index in order[: len(order) // self.size * self.size].view(-1, self.size):
            yield Split(self.split.images[index], self.split.labels[index])


def classification(
    net: nn.Module,
    head: nn.Linear,
    parts: tuple[Split, Split, Split],
    ridge: float,
    batch: int | None,
    generator: torch.Generator,
) -> Problem:
    """Features ``net``, a linear ``head``; D_in, D_out and test set; full batches or mini-batches."""
    inner, outer, test = parts

    def features(data: Split = inner) -> tuple[Tensor, Tensor]:
        return net(data.images), data.labels

    def head_loss(part: tuple[Tensor, Tensor]) -> Tensor:
        rows, labels = part
        return F.cross_entropy(head(rows), labels) + ridge / 2 * head.weight.square().sum()

    def upper(data: Split = outer) -> Tensor:
        return F.cross_entropy(head(net(data.images)), data.labels)

    @torch.no_grad()
    def accuracy() -> float:
        chunks = torch.arange(len(test.labels), device=test.labels.device).tensor_split(len(test.labels) // 2000 + 1)
        hits = [(head(net(test.images[i])).argmax(1) == test.labels[i]).sum() for i in chunks]
        return float(torch.stack(hits).sum() / len(test.labels))

    streams = (None, None) if batch is None else (Batches(outer, batch, generator), Batches(inner, batch, generator))
    return Problem(
        list(net.parameters()),
        list(head.parameters()),
        bo.Objective(upper, streams[0]),
        bo.Objective(head_loss, streams[1], features=features),
        accuracy,
    )


def digits(seed: int, device: str, args: argparse.Namespace) -> Problem:
    """A network 64-32 with a head of 10 on scikit-learn's digits: 700 / 700 / 397 images."""
    generator = torch.Generator().manual_seed(seed)
    parts = load("digits", None, False, (700, 700), generator)
    torch.manual_seed(seed)
    net, head = nn.Sequential(nn.Linear(64, 32), nn.Tanh()).to(device), nn.Linear(32, 10).to(device)
    moved = [Split(a.to(device), b.to(device)) for a, b in parts]
    return classification(net, head, (moved[0], moved[1], moved[2]), 1e-2, None, generator)


def mnist(seed: int, device: str, args: argparse.Namespace) -> Problem:
    """LeNet on 32x32 images; D_in 10,000 and D_out 50,000 of the training set."""
    generator = torch.Generator().manual_seed(seed)
    parts = load("mnist", args.data_root, args.download, args.sizes, generator)
    images = [
        F.interpolate(a.view(-1, 1, 28, 28).to(device), size=(32, 32), mode="bilinear", align_corners=False)
        for a, _ in parts
    ]
    inner, outer, test = (Split(image, b.to(device)) for image, (_, b) in zip(images, parts, strict=True))
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(120, 84), nn.ReLU()),
        nn.LayerNorm(84, elementwise_affine=False),  # bounds the curvature of the lower loss, whatever x becomes
    ).to(device)
    head = nn.Linear(84, 10).to(device)
    return classification(net, head, (inner, outer, test), 1e-2, 256, generator)


def regression(
    layers: tuple[int, ...], n: int, ridge: float, seed: int, device: str, args: argparse.Namespace
) -> Problem:
    """Features X H (one layer) or sigmoid(sigmoid(X H1) H2); data and start drawn in a fixed order."""
    torch.manual_seed(seed)
    shapes = list(pairwise(layers))

    def embed(X: Tensor, H: list[Tensor]) -> Tensor:
        for h in H:
            X = X @ h if len(H) == 1 else (X @ h).sigmoid()
        return X

    true_H = [torch.randn(shape) for shape in shapes]
    true_w = torch.randn(layers[-1])
    X_g, noise_g, X_f, noise_f = torch.randn(n, layers[0]), torch.randn(n), torch.randn(n, layers[0]), torch.randn(n)
    t_g, t_f = (embed(X, true_H) @ true_w + 0.1 * noise for X, noise in ((X_g, noise_g), (X_f, noise_f)))
    w = torch.randn(layers[-1]).to(device).requires_grad_()
    H = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
    X_g, t_g, X_f, t_f = (t.to(device) for t in (X_g, t_g, X_f, t_f))

    def lower(features: Tensor) -> Tensor:
        return (features @ w - t_g).square().mean() / 2 + ridge / 2 * w.square().sum()

    def upper() -> Tensor:
        return (embed(X_f, H) @ w - t_f).square().mean() / 2

    return Problem(H, [w], bo.Objective(upper), bo.Objective(lower, features=lambda: embed(X_g, H)), None)


PROBLEMS: dict[str, Callable[[int, str, argparse.Namespace], Problem]] = {
    "digits": digits,
    "mnist": mnist,
    "linear": partial(regression, (64, 128), 500, 0.1),
    "two-layer": partial(regression, (256, 512, 256), 5000, 1e-3),
}


def train(name: str, args: argparse.Namespace, setting: dict[str, Any]) -> dict[str, Any]:
    """Run one method; returns its curve and final numbers."""
    problem = PROBLEMS[args.data](args.seed, args.device, args)
    torch.manual_seed(args.seed)
    step = one_level(problem, setting) if name == ONE_LEVEL else two_level(name, problem, setting)
    curve: list[dict[str, float]] = []
    seconds, every = 0.0, max(args.steps // 50, 1)
    for k in (bar := tqdm(range(args.steps), desc=f"{name:12}", unit="step")):
        start = time.perf_counter()
        try:
            loss = step()
        except bo.NonFiniteError:  # shown in the table as what it is
            curve.append({"step": float(k), "seconds": seconds, "loss": float("nan"), "accuracy": float("nan")})
            break
        if torch.device(args.device).type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        if k % every == 0 or k in STEPS or k == args.steps - 1:
            point = {"step": float(k), "seconds": seconds, "loss": float(loss)}
            if problem.accuracy is not None and (k % (5 * every) == 0 or k == args.steps - 1):
                point["accuracy"] = problem.accuracy()
            curve.append(point)
            bar.set_postfix({key: f"{value:.3g}" for key, value in point.items() if key in ("loss", "accuracy")})
    return {"curve": curve, "seconds": seconds, **getattr(step, "report", dict)()}


def two_level(name: str, problem: Problem, setting: dict[str, Any]) -> Callable[[], Tensor]:
    """One outer step of a method, with Adam on x."""
    make = METHODS[name]
    kind = make.func if isinstance(make, partial) else make
    options = {key: setting[key] for key in ("lr", "lower_lr", "lower_steps")}
    options["warm_start"] = setting.get("warm_start", False)
    if kind in (bo.PZOBO, bo.HOZOG):
        options["smoothing"] = setting["smoothing"]
    if kind is bo.AID:
        options["linear_steps"] = setting["lower_steps"]
        options["linear_lr"] = setting.get("linear_lr")
    optimizer = make(problem.x, problem.y, **options)
    adam = torch.optim.Adam(problem.x, lr=setting["lr"])

    class Step:
        def __call__(self) -> Tensor:
            loss = optimizer.backward(problem.upper, problem.lower)
            adam.step()
            return loss

        def report(self) -> dict[str, Any]:
            diagnostics = {
                key: float(value)
                for key, value in optimizer.diagnostics.items()
                if key in ("direct_norm", "indirect_norm", "noise_to_signal")
            }
            return {"oracle_calls": optimizer.oracle_counts, **diagnostics}

    return Step()


def one_level(problem: Problem, setting: dict[str, Any]) -> Callable[[], Tensor]:
    """One step of ordinary training of the whole network, on the data of both levels."""
    parameters = [*problem.x, *problem.y]
    adam = torch.optim.Adam(parameters, lr=setting["lr"])

    def step() -> Tensor:
        adam.zero_grad()
        upper: Tensor = problem.upper.draw()()
        (upper + problem.lower.draw()()).backward()
        adam.step()
        return upper.detach()

    return step


def plot(path: Path, title: str, results: dict[str, Any]) -> None:
    """Upper loss against steps and seconds, and the held-out accuracy if there is one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    accurate = any("accuracy" in p for r in results.values() for p in r["curve"])
    figure, axes = plt.subplots(1, 2 + accurate, figsize=(5.5 * (2 + accurate), 4.5), layout="constrained")
    for i, (name, result) in enumerate(results.items()):
        style = {"color": f"C{i}", "label": name, "linestyle": "--" if name in (ONE_LEVEL, "first-order") else "-"}
        curve = result["curve"]
        axes[0].plot([p["step"] for p in curve], [p["loss"] for p in curve], **style)
        axes[1].plot([p["seconds"] for p in curve], [p["loss"] for p in curve], **style)
        if accurate:
            points = [p for p in curve if "accuracy" in p]
            axes[2].plot([p["seconds"] for p in points], [p["accuracy"] for p in points], **style)
    for axis, label in zip(axes, ("outer steps", "seconds", "seconds"), strict=False):
        axis.set(xlabel=label, ylabel="upper loss", yscale="log")
    if accurate:
        axes[2].set(ylabel="held-out accuracy", yscale="linear")
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(data: str, results: dict[str, Any]) -> str:
    """The table: final losses and accuracies, or losses beside the known ones."""
    if data not in REFERENCE:
        rows: list[list[object]] = []
        for name, r in results.items():
            calls = r.get("oracle_calls", {})
            counts = [calls.get(k) for k in ("upper_grad", "lower_grad", "hvp", "jvp", "loss")]
            last = r["curve"][-1]
            rows.append([name, last["accuracy"], last["loss"], r["seconds"], *counts])
        columns = ("f grads", "g grads", "HVPs", "cross", "f values")
        return table(("", "held-out accuracy", "upper loss", "seconds", *columns), rows)
    rows = []
    for name, r in results.items():
        losses = {int(p["step"]): p["loss"] for p in r["curve"]}
        rows.append([name, *(losses.get(k) for k in STEPS), r["seconds"]])
        if name in REFERENCE[data]:
            rows.append(["  reference", *REFERENCE[data][name], None])
    return table(("loss at step", *map(str, STEPS), "seconds"), rows)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns the numbers that it writes."""
    parser = argparse.ArgumentParser(description="Learn features on which a head trained on other data does well.")
    parser.add_argument("--data", choices=sorted(PROBLEMS), default="digits", help="default: digits")
    parser.add_argument("--data-root", type=Path, help="folder of the torchvision data set")
    parser.add_argument("--download", action="store_true", help="let torchvision fetch the data set into --data-root")
    parser.add_argument("--optimizer", nargs="+", choices=sorted([*METHODS, ONE_LEVEL]), help="default: most of them")
    parser.add_argument("--sizes", nargs=2, type=int, default=(10_000, 50_000), help="D_in and D_out of MNIST")
    for name, kind in (("steps", int), ("lower-steps", int), ("lr", float), ("lower-lr", float), ("smoothing", float)):
        parser.add_argument(f"--{name}", type=kind, help="default: that of the paper, or what suits the data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the PNG and JSON")
    args = parser.parse_args(arguments)
    setting = dict(SETTINGS[args.data])
    for name in ("steps", "lower_steps", "lr", "lower_lr", "smoothing"):
        if getattr(args, name) is not None:
            setting[name] = getattr(args, name)
    args.steps = setting["steps"]
    if args.steps < 1:
        parser.error(f"--steps must be positive, not {args.steps}")
    names = args.optimizer or ([*REFERENCE[args.data]] if args.data in REFERENCE else DEFAULT)

    results = {name: train(name, args, setting) for name in names}
    title = f"Hyper-representation, {args.data}, {args.steps} outer steps of {setting['lower_steps']} lower steps"
    print(f"\n{title}\n\n{report(args.data, results)}\n")
    stem = args.out / f"hyper_representation_{args.data}"
    plot(stem.with_suffix(".png"), title, results)
    numbers = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "environment": environment(args.device),
        "results": results,
    }
    save_json(stem.with_suffix(".json"), numbers)
    print(f"Wrote {stem}.png and {stem}.json")
    return numbers


if __name__ == "__main__":
    main()

r"""Data hyper-cleaning: find corrupted training labels by learning one weight per training example.

.. math::
    \min_x\ \frac1{|V|} \sum_{i \in V} \mathrm{CE}(W^*(x); a_i, b_i), \qquad
    W^*(x) = \arg\min_W \frac1{|T|} \sum_{i \in T} \sigma(x_i)\, \mathrm{CE}(W; a_i, \tilde b_i) + C \|W\|^2

W is a linear softmax classifier, T a training set in which a part of the labels is replaced by wrong ones, V a small
clean validation set. The upper loss does not depend on x directly, so all of the hypergradient is indirect.

    python -m recipes.hyper_cleaning                                      # scikit-learn's digits, about a minute
    python -m recipes.hyper_cleaning --data mnist --data-root DIR         # 20,000 / 5,000 / 10,000 images of MNIST

Problem: arXiv:2307.00126, appendix E. Lower steps are full-batch SGD with Nesterov momentum, the upper ones Adam
(of paid, rahgd and prahgd their own).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import bilevel_optim as bo

from .data import Split, load
from .report import environment, save_json, table

METHODS: dict[str, Callable[..., bo.BilevelOptimizer]] = {
    "aid": partial(bo.AID, linear_steps=5),
    "aid-neumann": partial(bo.AID, linear_solver="neumann", linear_steps=20),
    "itd": bo.ITD,
    "f2sa": partial(bo.F2SA, order=2, nu=1e-2),
    "f2sa-1": partial(bo.F2SA, order=1, nu=1e-2),
    "first-order": bo.FirstOrder,
    "ba": partial(bo.BA, linear_steps=5),
    "paid": partial(bo.PAID, linear_steps=5),
    "rahgd": partial(bo.RAHGD, linear_steps=5, restart_radius=math.inf, on_converged="continue"),
    "prahgd": partial(bo.PRAHGD, linear_steps=5, restart_radius=math.inf, on_converged="continue"),
}
# Momentum and perturbations of x belong to the method's own step; the others leave x to Adam.
OWN_STEP = ("paid", "rahgd", "prahgd")
SETTINGS: dict[
    str, dict[str, Any]
] = {  # training and validation size, lower and outer steps, lr of Adam and of the own step on x
    "digits": {"sizes": (1000, 300), "lower_steps": 20, "steps": 100, "lr": 0.1, "own_lr": 100.0},
    "mnist": {"sizes": (20_000, 5_000), "lower_steps": 10, "steps": 40, "lr": 0.2, "own_lr": 2000.0},
    "fashion": {"sizes": (20_000, 5_000), "lower_steps": 10, "steps": 40, "lr": 0.2, "own_lr": 2000.0},
}
RIDGE, MOMENTUM, CLASSES = 1e-3, 0.9, 10


class Cleaning:
    """Data with corrupted labels, and the losses of the classifier on it."""

    def __init__(self, train: Split, val: Split, test: Split, corruption: float, generator: torch.Generator) -> None:
        self.train, self.val, self.test = train, val, test
        count = round(corruption * len(train.labels))
        wrong = torch.randperm(len(train.labels), generator=generator)[:count]
        self.labels = train.labels.clone()
        self.labels[wrong] = (train.labels[wrong] + torch.randint(1, CLASSES, (count,), generator=generator)) % CLASSES
        self.corrupted = self.labels != train.labels
        features = torch.cat([train.images, torch.ones(len(train.images), 1)], 1)
        # Half the largest eigenvalue of the features' second moment bounds the curvature of softmax cross-entropy.
        self.lower_lr = 1 / (torch.linalg.matrix_norm(features, 2).item() ** 2 / len(features) / 2 + 2 * RIDGE)

    def to(self, device: torch.device) -> Cleaning:
        """Move the data, in place."""
        self.train, self.val, self.test = (
            Split(*(t.to(device) for t in split)) for split in (self.train, self.val, self.test)
        )
        self.labels, self.corrupted = self.labels.to(device), self.corrupted.to(device)
        return self

    def classifier(self) -> torch.nn.Linear:
        """A linear classifier that starts from zero."""
        model = torch.nn.Linear(self.train.images.shape[1], CLASSES, device=self.labels.device)
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        return model

    def lower(self, model: torch.nn.Linear, weights: Tensor | float, labels: Tensor) -> Tensor:
        """Weighted training loss with the ridge."""
        losses = F.cross_entropy(model(self.train.images), labels, reduction="none")
        return (weights * losses).mean() + RIDGE * sum(p.square().sum() for p in model.parameters())

    def upper(self, model: torch.nn.Linear) -> Tensor:
        """Validation loss."""
        return F.cross_entropy(model(self.val.images), self.val.labels)

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Linear) -> float:
        """Test accuracy."""
        return float((model(self.test.images).argmax(1) == self.test.labels).float().mean())

    def baseline(self, labels: Tensor, steps: int) -> tuple[float, float]:
        """Test accuracy of plain training on given labels: after all steps, and at the smallest validation loss."""
        model = self.classifier()
        sgd = torch.optim.SGD(model.parameters(), lr=self.lower_lr, momentum=MOMENTUM, nesterov=True)
        stopped, best = 0.0, float("inf")
        for k in range(steps):
            sgd.zero_grad()
            self.lower(model, 1.0, labels).backward()  # type: ignore[no-untyped-call]
            sgd.step()
            if k % 10 == 9:
                with torch.no_grad():
                    loss = float(self.upper(model))
                if loss < best:
                    best, stopped = loss, self.accuracy(model)
        return self.accuracy(model), stopped


def clean(
    problem: Cleaning, name: str, steps: int, lower_steps: int, lr: float, own_lr: float, every: int
) -> dict[str, Any]:
    """Learn the weights with one method; returns its curves and final numbers."""
    x = torch.zeros(len(problem.labels), device=problem.labels.device, requires_grad=True)
    model = problem.classifier()

    def upper() -> Tensor:
        return problem.upper(model)

    def lower() -> Tensor:
        return problem.lower(model, x.sigmoid(), problem.labels)

    nesterov = partial(torch.optim.SGD, momentum=MOMENTUM, nesterov=True)
    optimizer = METHODS[name](
        [x],
        model.parameters(),
        lr=own_lr if name in OWN_STEP else lr,
        lower_lr=problem.lower_lr,
        lower_steps=lower_steps,
        **({"lower_momentum": MOMENTUM} if name.endswith("rahgd") else {"lower_optimizer": nesterov}),
    )
    adam = torch.optim.Adam([x], lr=lr)
    curve: list[dict[str, float]] = []
    seconds = 0.0
    for step in (bar := tqdm(range(steps), desc=f"{name:12}", unit="step")):
        start = time.perf_counter()
        if name in OWN_STEP:
            result = optimizer.step(upper, lower)
            assert result is not None
            loss = result
        else:
            loss = optimizer.backward(upper, lower)
            adam.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        if step % every == 0 or step == steps - 1:
            point = {"step": step + 1, "seconds": seconds, "loss": float(loss), "accuracy": problem.accuracy(model)}
            curve.append(point)
            bar.set_postfix(loss=f"{point['loss']:.3f}", accuracy=f"{point['accuracy']:.3f}")
    weights = x.detach().sigmoid()
    found = weights < 0.5
    hits = int((found & problem.corrupted).sum())
    return {
        "accuracy": curve[-1]["accuracy"],
        "validation_loss": curve[-1]["loss"],
        "precision": hits / max(int(found.sum()), 1),
        "recall": hits / max(int(problem.corrupted.sum()), 1),
        "seconds": seconds,
        "oracle_calls": optimizer.oracle_counts,
        "curve": curve,
        "weights": weights.cpu(),
    }


def plot(path: Path, title: str, results: dict[str, Any], baselines: dict[str, float], corrupted: Tensor) -> None:
    """Loss and accuracy curves, and the learned weights of clean and of corrupted examples."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 1)
    losses, accuracies = figure.add_subfigure(grid[0]).subplots(1, 2)
    panels = figure.add_subfigure(grid[1]).subplots(1, len(results), squeeze=False, sharey=True)[0]
    for name, result in results.items():
        curve = result["curve"]
        losses.plot([p["seconds"] for p in curve], [p["loss"] for p in curve], label=name)
        accuracies.plot([p["step"] for p in curve], [p["accuracy"] for p in curve], label=name)
    for (name, value), style in zip(baselines.items(), (":", "-.", "--"), strict=True):
        accuracies.axhline(value, color="grey", linestyle=style, label=name)
    losses.set(xlabel="seconds", ylabel="validation loss", yscale="log")
    accuracies.set(xlabel="outer steps", ylabel="test accuracy")
    losses.legend()
    accuracies.legend(fontsize="small")
    corrupted = corrupted.cpu()
    for axis, (name, result) in zip(panels, results.items(), strict=True):
        for label, part in (("clean", ~corrupted), ("corrupted", corrupted)):
            axis.hist(result["weights"][part].numpy(), bins=40, range=(0, 1), alpha=0.6, label=label)
        axis.set(title=name, xlabel="learned weight")
    panels[0].set(ylabel="training examples")
    panels[0].legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns the numbers that it writes."""
    parser = argparse.ArgumentParser(description="Learn weights that find corrupted training labels.")
    parser.add_argument("--data", choices=sorted(SETTINGS), default="digits", help="default: digits")
    parser.add_argument("--data-root", type=Path, help="folder of the torchvision data set")
    parser.add_argument("--download", action="store_true", help="let torchvision fetch the data set into --data-root")
    parser.add_argument(
        "--optimizer", nargs="+", choices=sorted(METHODS), default=["aid", "itd", "f2sa"], help="default: aid itd f2sa"
    )
    parser.add_argument("--corruption", type=float, default=0.5, help="part of the labels made wrong; default: 0.5")
    parser.add_argument("--steps", type=int, help="outer steps; default: 100 (digits), 40 (others)")
    parser.add_argument("--lower-steps", type=int, help="lower steps per outer step; default: 20 (digits), 10 (others)")
    parser.add_argument("--lr", type=float, help="learning rate of Adam on x; default: 0.1 (digits), 0.2 (others)")
    parser.add_argument(
        "--own-lr", type=float, help=f"learning rate of {', '.join(OWN_STEP)}; default: 100 (digits), 2000 (others)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of the PNG and JSON; default: results"
    )
    args = parser.parse_args(arguments)
    if not 0 <= args.corruption <= 1:
        parser.error(f"--corruption must be between 0 and 1, not {args.corruption}")
    setting = SETTINGS[args.data]
    steps, lower_steps, lr, own_lr = (
        setting[name] if getattr(args, name) is None else getattr(args, name)
        for name in ("steps", "lower_steps", "lr", "own_lr")
    )
    if steps < 1:
        parser.error(f"--steps must be positive, not {steps}")

    generator = torch.Generator().manual_seed(args.seed)
    parts = load(args.data, args.data_root, args.download, setting["sizes"], generator)
    problem = Cleaning(*parts, args.corruption, generator).to(torch.device(args.device))
    results = {
        name: clean(problem, name, steps, lower_steps, lr, own_lr, max(steps // 40, 1)) for name in args.optimizer
    }
    corrupted, stopped = problem.baseline(problem.labels, steps * lower_steps)
    oracle, _ = problem.baseline(problem.train.labels, steps * lower_steps)
    baselines = {"corrupted labels": corrupted, "corrupted, early stopped": stopped, "true labels": oracle}

    header = ("", "test accuracy", "precision", "recall", "seconds", "f grads", "g grads", "HVPs", "cross")
    rows: list[list[object]] = [[name, value, *[None] * 7] for name, value in baselines.items()]
    for name, r in results.items():
        calls = [r["oracle_calls"][k] for k in ("upper_grad", "lower_grad", "hvp", "jvp")]
        rows.insert(-1, [f"cleaned by {name}", r["accuracy"], r["precision"], r["recall"], r["seconds"], *calls])
    title = f"Data hyper-cleaning, {args.data}, {args.corruption:.0%} of {len(problem.labels):,} labels corrupted"
    print(f"\n{title}\n\n{table(header, rows)}\n")

    stem = args.out / f"hyper_cleaning_{args.data}"
    plot(stem.with_suffix(".png"), title, results, baselines, problem.corrupted)
    numbers = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "environment": environment(args.device),
        "baselines": baselines,
        "results": {name: {k: v for k, v in r.items() if k != "weights"} for name, r in results.items()},
    }
    save_json(stem.with_suffix(".json"), numbers)
    print(f"Wrote {stem}.png and {stem}.json")
    return numbers


if __name__ == "__main__":
    main()

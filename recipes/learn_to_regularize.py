r"""Learn one ridge weight per feature of a softmax classifier on validation data.

.. math::
    \min_\lambda\ \mathrm{CE}_{val}(W^*(\lambda)), \qquad
    W^*(\lambda) = \arg\min_W \mathrm{CE}_{train}(W) + \frac{1}{2cp} \sum_{j \le c} \sum_{k \le p} e^{\lambda_k}
    W_{jk}^2

    python -m recipes.learn_to_regularize                                             # scikit-learn's digits, a minute
    python -m recipes.learn_to_regularize --data 20newsgroups --data-root DIR         # 5,657 / 5,657 / 7,532 texts

All methods take plain steps in lambda with one learning rate; lower steps are full-batch gradient steps from the last W
(Nesterov's for rahgd and prahgd), with the step size 1/L of the training loss. Seconds do not include the evaluation.

Problem: arXiv:2307.00126, appendix E (after arXiv:2010.07962).
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

from .newsgroups import Features, Part, load_newsgroups
from .report import environment, save_json, table

Method = Callable[..., bo.BilevelOptimizer]
METHODS: dict[str, Method] = {
    "aid": bo.AID,
    "aid-nesterov": partial(bo.AID, lower_optimizer=partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
    "itd": bo.ITD,
    "ba": bo.BA,
    "paid": bo.PAID,
    # The hypergradient grows with the weights at first, which a radius of a few first steps takes for divergence.
    "rahgd": partial(bo.RAHGD, restart_radius=math.inf, on_converged="continue"),
    "prahgd": partial(bo.PRAHGD, restart_radius=math.inf, on_converged="continue"),
    "f2sa-1": partial(bo.F2SA, order=1, normalize=False),
    "f2sa-2": partial(bo.F2SA, order=2, normalize=False),
    "f2sa-3": partial(bo.F2SA, order=3, normalize=False),
    "first-order": bo.FirstOrder,
}
LINEAR = ("aid", "aid-nesterov", "ba", "paid", "rahgd", "prahgd")
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"steps": 50, "lower_steps": 10, "linear_steps": 10, "lr": 100.0, "momentum": 0.9},
    "20newsgroups": {"steps": 20, "lower_steps": 10, "linear_steps": 10, "lr": 100.0, "momentum": 0.9},
}


class Problem:
    """The data, and the losses of a classifier on it."""

    def __init__(self, train: Part, val: Part, test: Part) -> None:
        self.train, self.val, self.test = train, val, test
        self.size = train.features.shape[1]
        self.classes = int(train.labels.max()) + 1
        # Half the largest eigenvalue of the features' second moment bounds the curvature of softmax cross-entropy.
        curvature = train.features.largest_singular_value() ** 2 / len(train.labels) / 2
        self.lower_lr = 1 / (curvature + 1 / (self.classes * self.size))

    def to(self, device: torch.device) -> Problem:
        """Move the data, in place."""
        self.train, self.val, self.test = (
            Part(part.features.to(device), part.labels.to(device)) for part in (self.train, self.val, self.test)
        )
        return self

    def lower(self, weight: Tensor, penalty: Tensor) -> Tensor:
        """Training loss with the weighted ridge."""
        ridge = (penalty.exp() * weight.square().sum(1)).sum() / (2 * weight.numel())
        return F.cross_entropy(self.train.features @ weight, self.train.labels) + ridge

    def upper(self, weight: Tensor) -> Tensor:
        """Validation loss."""
        return F.cross_entropy(self.val.features @ weight, self.val.labels)

    @torch.no_grad()
    def evaluate(self, weight: Tensor) -> tuple[float, float, float]:
        """Test accuracy, test loss and validation loss."""
        scores = self.test.features @ weight
        accuracy = (scores.argmax(1) == self.test.labels).float().mean()
        return float(accuracy), float(F.cross_entropy(scores, self.test.labels)), float(self.upper(weight))


def load_digits(seed: int) -> tuple[Part, Part, Part]:
    """The digits bundled with scikit-learn, 300 / 300 / 1,197."""
    from sklearn.datasets import load_digits as bundled

    bunch = bundled()
    images, labels = torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order[:300], order[300:600], order[600:]
    train, val, test = (Part(Features(images[i]), labels[i]) for i in parts)
    return train, val, test


def regularize(
    problem: Problem, name: str, steps: int, lr: float, lower_steps: int, linear_steps: int, momentum: float, seed: int
) -> dict[str, Any]:
    """Learn the penalties with one method; returns its curve and final numbers."""
    device = problem.train.labels.device
    penalty = torch.zeros(problem.size, device=device, requires_grad=True)
    weight = torch.zeros(problem.size, problem.classes, device=device, requires_grad=True)
    options: dict[str, Any] = {"linear_steps": linear_steps} if name in LINEAR else {}
    if name.endswith("rahgd"):
        options["lower_momentum"] = momentum
    optimizer = METHODS[name](
        [penalty],
        [weight],
        lr=lr,
        lower_lr=problem.lower_lr,
        lower_steps=lower_steps,
        generator=torch.Generator(device).manual_seed(seed),
        **options,
    )
    seconds, curve = 0.0, []
    for step in (bar := tqdm(range(steps + 1), desc=f"{name:12}", unit="step")):
        if step:
            start = time.perf_counter()
            optimizer.step(lambda: problem.upper(weight), lambda: problem.lower(weight, penalty))
            if penalty.is_cuda:
                torch.cuda.synchronize()
            seconds += time.perf_counter() - start
        accuracy, loss, validation = problem.evaluate(weight)
        calls = optimizer.oracle_counts
        curve.append(
            {
                "step": step,
                "seconds": seconds,
                "calls": sum(calls.values()),
                "accuracy": accuracy,
                "loss": loss,
                "validation_loss": validation,
            }
        )
        bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.3f}")
    return {
        **{k: curve[-1][k] for k in ("accuracy", "loss", "validation_loss", "seconds", "calls")},
        "oracle_calls": optimizer.oracle_counts,
        "restarts": getattr(optimizer, "restarts", None),
        "penalty_range": [penalty.min().item(), penalty.max().item()],
        "vectorize_fallback": optimizer.diagnostics.get("vectorize_fallback"),
        "curve": curve,
    }


def plot(path: Path, title: str, results: dict[str, Any]) -> None:
    """Test accuracy and loss against seconds and against oracle calls."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for row, (key, label) in zip(axes, (("accuracy", "test accuracy"), ("loss", "test loss")), strict=True):
        for axis, (unit, text) in zip(row, (("seconds", "seconds"), ("calls", "oracle calls")), strict=True):
            for name, result in results.items():
                axis.plot([p[unit] for p in result["curve"]], [p[key] for p in result["curve"]], label=name)
            axis.set(xlabel=text, ylabel=label)
    axes[0, 0].legend(fontsize="small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns the numbers that it writes."""
    parser = argparse.ArgumentParser(description="Learn one ridge weight per feature.")
    parser.add_argument("--data", choices=sorted(SETTINGS), default="digits", help="default: digits")
    parser.add_argument("--data-root", type=Path, help="folder of the texts")
    parser.add_argument("--download", action="store_true", help="let scikit-learn fetch the texts into --data-root")
    parser.add_argument("--keep-headers", action="store_true", help="keep headers, footers and quotes of the texts")
    chosen = ["rahgd", "prahgd", "aid", "aid-nesterov", "itd", "f2sa-1", "f2sa-2", "f2sa-3"]
    parser.add_argument(
        "--optimizer", nargs="+", choices=sorted(METHODS), default=chosen, help=f"default: {' '.join(chosen)}"
    )
    parser.add_argument("--steps", type=int, help="outer steps; default: 50 (digits), 20 (20newsgroups)")
    parser.add_argument("--lower-steps", type=int, help="lower steps per outer step; default: 10")
    parser.add_argument("--linear-steps", type=int, help="steps of conjugate gradients; default: 10")
    parser.add_argument("--lr", type=float, help="learning rate of lambda; default: 100")
    parser.add_argument("--momentum", type=float, help="lower momentum of rahgd and prahgd; default: 0.9")
    parser.add_argument("--lower-lr", type=float, help="lower learning rate; default: 1/L")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of the PNG and JSON; default: results"
    )
    args = parser.parse_args(arguments)
    chosen_settings = {
        name: default if getattr(args, name) is None else getattr(args, name)
        for name, default in SETTINGS[args.data].items()
    }
    if chosen_settings["steps"] < 1:
        parser.error(f"--steps must be positive, not {chosen_settings['steps']}")

    if args.data == "digits":
        parts = load_digits(args.seed)
    else:
        parts = load_newsgroups(args.data_root, args.download, args.keep_headers, args.seed)
    problem = Problem(*parts).to(torch.device(args.device))
    if args.lower_lr is not None:
        problem.lower_lr = args.lower_lr
    sizes = " / ".join(f"{len(part.labels):,}" for part in parts)
    title = (
        f"Learning to regularize, {args.data}: {sizes} examples, {problem.size:,} features, {problem.classes} classes"
    )
    print(f"{title}; lower_lr = {problem.lower_lr:.4g}")
    results = {name: regularize(problem, name, seed=args.seed, **chosen_settings) for name in args.optimizer}

    header = (
        "",
        "test accuracy",
        "test loss",
        "val loss",
        "seconds",
        "f grads",
        "g grads",
        "HVPs",
        "cross",
        "all calls",
    )
    rows: list[list[object]] = []
    for name, r in results.items():
        counts = [r["oracle_calls"][k] for k in ("upper_grad", "lower_grad", "hvp", "jvp")]
        rows.append([name, r["accuracy"], r["loss"], r["validation_loss"], r["seconds"], *counts, r["calls"]])
    print(f"\n{table(header, rows)}\n")
    stem = args.out / f"learn_to_regularize_{args.data}"
    plot(stem.with_suffix(".png"), title, results)
    numbers = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in {**vars(args), **chosen_settings}.items()},
        "environment": environment(args.device),
        "features": problem.size,
        "lower_lr": problem.lower_lr,
        "results": results,
    }
    save_json(stem.with_suffix(".json"), numbers)
    print(f"Wrote {stem}.png and {stem}.json")
    return numbers


if __name__ == "__main__":
    main()

r"""Number of upper learning rates that work, with a fixed lower rate and with ``lower_lr="auto"``.

    python -m recipes.benchmarks.lower_rates

Six upper rates on five problems: Adam at 0.03, 0.1, 0.3 and plain descent at 1, 10, 100, for 300 steps; a method with
its own update of x, such as MRBO, takes these six numbers. ``fixed`` keeps the rate that ``"auto"`` measures at the
start. A rate works if all losses are finite and the last tenth of them have at least half of the largest drop of the
upper loss that any run on this problem has reached. ``calls`` (gradients and products) and ``seconds`` are medians of
``"auto"`` over ``fixed``, over the upper rates that work with both.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import bilevel_optim as bo

from ..common import Parser, environment, gradients, progress, save, show
from ..common.seeds import begin, stream
from .suggest import CASES, STEPS, Case

METHODS: Mapping[str, dict[str, Any]] = {
    "AID": {"lower_steps": 10, "linear_steps": 10}, "ITD": {"lower_steps": 10}, "F2SA": {"lower_steps": 10},
    "SOBA": {}, "StocBiO": {"lower_steps": 10, "linear_steps": 10}, "MRBO": {},
}  # fmt: skip
UPPER = [(torch.optim.Adam, lr) for lr in (0.03, 0.1, 0.3)] + [(torch.optim.SGD, lr) for lr in (1.0, 10.0, 100.0)]


def digits_network() -> Case:
    """Return one weight for each of 300 digits, 40 per cent of them with random labels, below a small CNN."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=stream(0, "data"))[:600]
    images = torch.as_tensor(data.images, dtype=torch.float32)[order, None] / 16
    targets = torch.as_tensor(data.target)[order]
    wrong = torch.rand(300, generator=stream(0, "wrong")) < 0.4
    noisy = torch.where(wrong, torch.randint(10, (300,), generator=stream(0, "labels")), targets[:300])
    begin(0, "weights")
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(),
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    x, y = torch.zeros(300, requires_grad=True), [*model.parameters()]

    def lower() -> Tensor:
        each = functional.cross_entropy(model(images[:300]), noisy, reduction="none")
        return (x.sigmoid() * each).mean() + 1e-3 * torch.stack([p.square().sum() for p in y]).sum()

    return Case([x], y, lambda: functional.cross_entropy(model(images[300:]), targets[300:]), lower)


PROBLEMS = {name: CASES[name] for name in ("penalties", "labels, network", "condition 1,000", "representation")}
PROBLEMS["labels, CNN"] = digits_network


def upper_rates(method: str) -> list[dict[str, Any]]:
    """Return the arguments of the six upper rates; a method with its own update of x takes the numbers alone."""
    own = getattr(bo, method).declared.upper_update
    return [{"lr": lr} if own else {"lr": lr, "upper_optimizer": kind} for kind, lr in UPPER]


class Run(NamedTuple):
    """Upper loss of the last tenth of the steps (infinite if a step failed), gradients and products, seconds."""

    end: float
    calls: float
    seconds: float


def begins(case: Case) -> tuple[float, float]:
    """Return the upper loss at the current tensors, and the lower rate that ``"auto"`` measures there."""
    optimizer = bo.ITD(case.x, case.y, lr=0.0, lower_steps=1)
    optimizer.param_groups[1]["lr"] = 0.0  # a factor of the measured rate: y stays
    start = float(optimizer.step(case.f, case.g, tasks=case.tasks))
    return start, 1 / (1.1 * float(optimizer.diagnostics["lower_curvature"].max()))


def run(case: Case, make: partial[bo.BilevelOptimizer], steps: int) -> Run:
    """Make steps from the current tensors, which are restored."""
    start = [t.detach().clone() for t in (*case.x, *case.y)]
    begin(0, "run")
    optimizer, losses, began = make(case.x, case.y), list[float](), time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            for _ in range(steps):
                losses.append(float(optimizer.step(case.f, case.g, tasks=case.tasks)))
    except bo.NonFiniteError:
        losses.append(math.inf)
    finally:
        for t, value in zip((*case.x, *case.y), start, strict=True):
            t.data.copy_(value)
    last = losses[-max(steps // 10, 1) :]
    return Run(sum(last) / len(last), gradients(optimizer), time.process_time() - began)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Print the table and return the numbers that it writes."""
    parser = Parser(__doc__)
    parser.option("problems", [*PROBLEMS], "problems")
    parser.option("methods", [*METHODS], "methods")
    parser.option("steps", STEPS, "steps per run")
    args = parser.parse(arguments)
    print(", ".join(f"{k} {v}" for k, v in environment("cpu").items()))
    results = dict[str, Any]()
    header = ["method", "fixed", "auto", "calls", "seconds"]
    for name in args.problems:
        case = PROBLEMS[name]()
        start, rate = begins(case)
        found = {
            method: [
                [run(case, partial(getattr(bo, method), lower_lr=lower, **upper, **METHODS[method]), args.steps)
                 for upper in upper_rates(method)]
                for lower in (rate, "auto")
            ]
            for method in progress(args.methods, name)
        }  # fmt: skip
        goal = start - (start - min(one.end for both in found.values() for runs in both for one in runs)) / 2
        cells = list[list[object]]()
        for method, both in found.items():
            pairs = [(a.calls / b.calls, a.seconds / b.seconds) for b, a in zip(*both, strict=True)
                     if max(a.end, b.end) <= goal]  # fmt: skip
            cost = [round(median(pair[k] for pair in pairs), 2) if pairs else math.nan for k in (0, 1)]
            cells.append([method, *(f"{sum(one.end <= goal for one in runs)}/6" for runs in both), *cost])
        show(f"{name}: upper rates that work, of six", header, cells)
        results[name] = {"start": start, "goal": goal, "table": cells} | {
            method: [[one.end for one in runs] for runs in both] for method, both in found.items()
        }
    return save(args, args.out / "lower_rates", results)


if __name__ == "__main__":
    main()

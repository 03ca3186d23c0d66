r"""Best suggestion of `bo.suggest` against the best of a grid, on ten problems.

    python -m recipes.benchmarks.suggest

``reached`` is the mean upper loss over the last tenth of 300 steps from the start, with the settings of the best
suggestion. ``grid`` is the same for the best of a grid: five rates of plain descent and five of Adam, each with three
lower rates (1, 0.3 and 0.1 over the curvature at the start); method and other settings are the same. ``start`` is the
upper loss with the lower problem solved at the first x. ``diverged`` counts suggested methods that ended non-finite.

The problems: quadratics of condition 10, 1,000 and 1,000 with noisy batches; ridge regression with one penalty per
feature; softmax regression with one penalty per feature, in full and in batches; weights of training examples with
noisy labels for softmax regression, and for a network with one hidden layer; a learned linear representation of
few-shot regression tasks; a learned shift of a quartic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import bilevel_optim as bo

from ..common import Parser, environment, progress, show
from ..common.seeds import begin, stream

STEPS = 300
PARTS = (1.0, 0.3, 0.1)  # lower rates of the grid, times the inverse curvature


class Case(NamedTuple):
    """Live tensors, losses, and a task sampler if there is one."""

    x: Sequence[Tensor]
    y: Sequence[Tensor]
    f: Any
    g: Any
    tasks: Any = None


def quadratic(kappa: float, noise: float = 0.0) -> Case:
    """Return a quadratic with 24 lower and 7 upper variables and a log-spaced spectrum; f is convex."""
    generator, n, m = stream(0, "data"), 24, 7
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator))[0]
    H = basis @ torch.diag(torch.logspace(0, math.log10(kappa), n)) @ basis.T
    D, target = torch.randn(n, m, generator=generator), torch.randn(n, generator=generator)
    shifts = [noise * torch.randn(n, generator=generator) for _ in range(16)]
    x, y = torch.zeros(m, requires_grad=True), torch.zeros(n, requires_grad=True)

    def lower(shift: Tensor | float = 0.0) -> Tensor:
        loss: Tensor = y @ H @ y / 2 - y @ (D @ x + shift)
        return loss

    g: Any = bo.Objective(lower, shifts) if noise else lower
    return Case([x], [y], lambda: (y - target).square().sum() / 2 + 0.01 * x.square().sum(), g)


def examples(n: int, width: int, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return features, half of them irrelevant, and labels of a random softmax model."""
    truth = torch.randn(width // 2, classes, generator=stream(0, "truth"))
    features = torch.randn(n, width, generator=stream(seed, "features"))
    return features, (features[:, : width // 2] @ truth).argmax(1)


def ridge() -> Case:
    """Return linear regression with one penalty for each of 40 features; 10 matter."""
    generator = stream(0, "data")
    A, B = torch.randn(2, 60, 40, generator=generator)
    truth = torch.cat([torch.randn(10, generator=generator), torch.zeros(30)])
    noise = torch.randn(2, 60, generator=generator)
    x, y = torch.full((40,), -2.0, requires_grad=True), torch.zeros(40, requires_grad=True)
    return Case(
        [x], [y], lambda: (B @ (y - truth) - noise[1]).square().mean(),
        lambda: (A @ (y - truth) - noise[0]).square().mean() + (x.exp() * y.square()).sum(),
    )  # fmt: skip


def penalties(batches: bool) -> Case:
    """Return softmax regression with one penalty per feature."""
    (A, a), (B, b) = examples(160, 64, seed=1), examples(320, 64, seed=2)
    x, y = torch.full((64,), -3.0, requires_grad=True), torch.zeros(64, 5, requires_grad=True)

    def penalty() -> Tensor:
        return (x.exp()[:, None] * y.square()).sum() / 10

    if not batches:
        return Case(
            [x], [y], lambda: functional.cross_entropy(B @ y, b),
            lambda: functional.cross_entropy(A @ y, a) + penalty() + 1e-3 * y.square().sum(),
        )  # fmt: skip
    split = [list(zip(torch.split(F, 32), torch.split(t, 32), strict=True)) for F, t in ((B, b), (A, a))]
    f = bo.Objective(lambda batch: functional.cross_entropy(batch[0] @ y, batch[1]), split[0])
    g = bo.Objective(
        lambda batch: functional.cross_entropy(batch[0] @ y, batch[1]) + penalty() + 1e-3 * y.square().sum(), split[1]
    )
    return Case([x], [y], f, g)


def labels(hidden: int) -> Case:
    """Return one weight for each of 200 training examples; 40 per cent of the labels are random."""
    begin(0, "weights")
    (A, a), (B, b) = examples(200, 20, seed=1), examples(200, 20, seed=2)
    wrong = torch.rand(200, generator=stream(0, "wrong")) < 0.4
    a = torch.where(wrong, torch.randint(5, (200,), generator=stream(0, "labels")), a)
    layers = [nn.Linear(20, hidden), nn.Tanh(), nn.Linear(hidden, 5)] if hidden else [nn.Linear(20, 5)]
    model, x = nn.Sequential(*layers), torch.zeros(200, requires_grad=True)
    y = [*model.parameters()]

    def lower() -> Tensor:
        each = functional.cross_entropy(model(A), a, reduction="none")
        return (x.sigmoid() * each).mean() + 1e-2 * torch.stack([p.square().sum() for p in y]).sum()

    return Case([x], y, lambda: functional.cross_entropy(model(B), b), lower)


def representation() -> Case:
    """Return a linear map to 3 features, shared by 8 regression tasks."""
    generator = stream(0, "data")
    shared = torch.randn(10, 3, generator=generator)
    features = torch.randn(2, 8, 12, 10, generator=generator)
    heads = torch.randn(8, 3, 1, generator=generator)
    targets = features @ shared @ heads
    x, y = (0.3 * torch.randn(10, 3, generator=generator)).requires_grad_(), torch.zeros(3, 1, requires_grad=True)

    def loss(batch: Any) -> Tensor:
        error: Tensor = (batch[0] @ x @ y - batch[1]).square().mean()
        return error

    tasks = bo.TensorTasks((features[0], targets[0]), (features[1], targets[1]))
    return Case([x], [y], loss, lambda batch: loss(batch) + 0.05 * y.square().sum(), tasks)


def quartic() -> Case:
    """Return a problem whose lower loss grows like the fourth power, so that its curvature changes on the way."""
    x, y = torch.full((4,), 3.0, requires_grad=True), torch.zeros(4, requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0])
    return Case(
        [x], [y], lambda: (y + 1).square().sum(), lambda: (weight * ((y - x).square() / 2 + (y - x) ** 4 / 4)).sum()
    )


CASES: dict[str, Callable[[], Case]] = {
    "condition 10": partial(quadratic, 10.0),
    "condition 1,000": partial(quadratic, 1e3),
    "noisy batches": partial(quadratic, 100.0, 1.0),
    "ridge": ridge,
    "penalties": partial(penalties, False),
    "penalties in batches": partial(penalties, True),
    "labels": partial(labels, 0),
    "labels, network": partial(labels, 16),
    "representation": representation,
    "quartic": quartic,
}


def reached(case: Case, make: Callable[[], bo.BilevelOptimizer], steps: int) -> float:
    """Return the mean upper loss over the last tenth of the steps from the current tensors, which are restored."""
    start = [t.detach().clone() for t in (*case.x, *case.y)]
    begin(0, "run")
    optimizer, losses = make(), list[float]()
    f, g = (bo.Objective(one.loss, one.data) if isinstance(one, bo.Objective) else one for one in case[2:4])
    try:
        for _ in range(steps):
            losses.append(float(optimizer.step(f, g, tasks=case.tasks)))
    except bo.NonFiniteError:
        return math.inf
    finally:
        for t, value in zip((*case.x, *case.y), start, strict=True):
            t.data.copy_(value)
    last = losses[-max(steps // 10, 1) :]
    return sum(last) / len(last)


def best_of_grid(case: Case, suggestion: bo.Suggestion, name: str, steps: int) -> float:
    """Return the least upper loss that the method reaches with the rates of a grid."""
    row = suggestion.rows[name]
    center = row.rates.get("SGD", row.settings["lr"])
    kinds: dict[type[torch.optim.Optimizer], list[float]] = {
        torch.optim.SGD: [center * 10 ** (k / 2) for k in range(-2, 3)],
        torch.optim.Adam: [0.01, 0.03, 0.1, 0.3, 1.0],
    }
    curvature = max(abs(suggestion.largest), abs(suggestion.smallest))
    found = [
        reached(
            case, partial(suggestion.make, name, upper_optimizer=kind, lr=lr, lower_lr=part / curvature), steps
        )
        for kind, rates in kinds.items()
        for lr, part in product(rates, PARTS)
    ]  # fmt: skip
    return min(found)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(__doc__, out=False)
    parser.option("cases", [*CASES], "problems")
    parser.option("methods", ["AID", "ITD", "F2SA", "SOBA", "FirstOrder"], "methods")
    parser.option("steps", STEPS, "steps per run")
    parser.option("max-seconds", 300.0, "budget of each suggestion")
    args = parser.parse(arguments)
    print(", ".join(f"{k} {v}" for k, v in environment("cpu").items()))
    rows: list[list[object]] = []
    for name in progress(args.cases, "problems"):
        case = CASES[name]()
        found = bo.suggest(
            case.x, case.y, case.f, case.g, methods=args.methods, tasks=case.tasks, max_seconds=args.max_seconds
        )
        ends = {method: reached(case, partial(found.make, method), args.steps) for method in found.rows}
        diverged = sum(not math.isfinite(end) for end in ends.values())
        best = next(iter(ends), None)
        if best is None:
            rows.append([name, "-", found.start, math.nan, math.nan, diverged, found.gradients, found.took])
            continue
        grid = best_of_grid(case, found, best, args.steps)
        rows.append([name, best, found.start, ends[best], grid, diverged, found.gradients, found.took])
    header = ["problem", "best", "start", "reached", "grid", "diverged", "gradients", "seconds"]
    show("suggestions of bo.suggest, compared with a grid", header, rows)


if __name__ == "__main__":
    main()

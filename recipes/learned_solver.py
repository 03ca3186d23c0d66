"""Learn the step size, the start, the bounds of a lower problem: the programs of the how-to page, with controls.

    python -m recipes.learned_solver --seeds 3

Each is learned by ITD. The control has one number for all: the best of 60 on a grid, for the same loss. The loss shown
is the one that x minimises, not that on new data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import bilevel_optim as bo

from .common import Parser, draw, figure, progress, save, show
from .common.seeds import begin

GRID = 60
ADAM = torch.optim.Adam


class Problem(NamedTuple):
    """A step that learns, and the upper loss with one number for all.

    Attributes:
        step: makes an outer step and returns the upper loss before it.
        plain: upper loss with a given number.
        grid: numbers to try.
    """

    step: Callable[[], Tensor]
    plain: Callable[[float], Tensor]
    grid: Tensor


def descended(a: Tensor, b: Tensor, y: Tensor, rate: float, steps: int, bound: float = torch.inf) -> Tensor:
    """Return the end of gradient steps for the mean of (a y - b)^2, in plain torch."""
    for _ in range(steps):
        slope = 2 * a.mT @ (a @ y - b) / a.shape[-2]
        y = (y - rate * slope).clamp(-bound, bound)
    return y


def rates() -> Problem:
    """Two groups of unknowns, whose inputs differ in scale: a rate for each."""
    scale = torch.tensor([1.0] * 5 + [0.1] * 5)
    train, test = (torch.randn(20, 30, 10) * scale for _ in range(2))
    truth = torch.randn(20, 10) / scale
    targets, outputs = train @ truth.unsqueeze(-1), test @ truth.unsqueeze(-1)
    data = bo.TensorTasks((train, targets), (test, outputs))
    a, b = (torch.zeros(5, requires_grad=True) for _ in range(2))
    log_rates = torch.tensor([-2.0, -2.0], requires_grad=True)

    def loss(batch: Any) -> Tensor:
        rows, wanted = batch
        return F.mse_loss(rows @ torch.cat([a, b]), wanted.squeeze(-1))

    def lower_optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{**group, "lr": rate} for group, rate in zip(groups, log_rates.exp(), strict=False)]
        )  # it is tried on one group first

    optimizer = bo.ITD(
        [log_rates], [{"params": [a]}, {"params": [b]}], lr=0.1, lower_steps=5, lower_optimizer=lower_optimizer,
        upper_optimizer=ADAM, warm_start=False,
    )  # fmt: skip

    def plain(rate: float) -> Tensor:
        return (test @ descended(train, targets, torch.zeros(20, 10, 1), rate, 5) - outputs).square().mean()

    return Problem(lambda: optimizer.step(loss, loss, tasks=data), plain, torch.logspace(-2, 1, GRID))


def starts() -> Problem:
    """Fifty tasks with fewer rows than unknowns: a network predicts where each begins."""
    context = torch.randn(50, 4)
    truth = torch.tanh(context @ torch.randn(4, 6)) * 2
    train, test = torch.randn(50, 5, 6), torch.randn(50, 30, 6)
    targets, outputs = train @ truth.unsqueeze(-1), test @ truth.unsqueeze(-1)
    data = bo.TensorTasks((train, targets), (test, outputs))
    y = torch.zeros(6, requires_grad=True)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6))

    def loss(batch: Any) -> Tensor:
        rows, wanted = batch
        return F.mse_loss(rows @ y, wanted.squeeze(-1))

    optimizer = bo.ITD(
        net.parameters(), [y], lr=0.01, lower_lr=0.1, lower_steps=3, upper_optimizer=ADAM,
        lower_init=lambda tasks: [net(context[tasks])], warm_start=False,
    )  # fmt: skip

    def plain(rate: float) -> Tensor:
        return (test @ descended(train, targets, torch.zeros(50, 6, 1), rate, 3) - outputs).square().mean()

    return Problem(lambda: optimizer.step(loss, loss, tasks=data), plain, torch.logspace(-2, 0.5, GRID))


def bounds() -> Problem:
    """Fewer rows than weights, of which half are small: a bound for each half."""
    inputs, truth = torch.randn(40, 30), torch.cat([torch.rand(15) * 0.2, torch.full((15,), 2.0)])
    targets = inputs @ truth + torch.randn(40)
    train, test = slice(0, 25), slice(25, 40)
    y, log_bound = torch.zeros(30, requires_grad=True), torch.zeros(2, requires_grad=True)

    def loss(rows: slice) -> Tensor:
        return (inputs[rows] @ y - targets[rows]).square().mean()

    def projection(values: Any) -> list[Tensor]:
        bound = log_bound.exp().repeat_interleave(15)
        return [torch.maximum(torch.minimum(values[0], bound), -bound)]

    optimizer = bo.ITD(
        [log_bound], [y], lr=0.1, lower_lr=0.1, lower_steps=20, lower_projection=projection, upper_optimizer=ADAM,
        warm_start=False,
    )  # fmt: skip

    def plain(bound: float) -> Tensor:
        found = descended(inputs[train], targets[train, None], torch.zeros(30, 1), 0.1, 20, bound)
        return (inputs[test] @ found - targets[test, None]).square().mean()

    return Problem(lambda: optimizer.step(lambda: loss(test), lambda: loss(train)), plain, torch.logspace(-2, 1, GRID))


PROBLEMS = {"two rates": (rates, 150), "the start of each task": (starts, 150), "two bounds": (bounds, 60)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Learn, print the table, and draw the losses."""
    parser = Parser(__doc__, threads=1)
    parser.option("seeds", 3, "seeds, from 0 on")
    parser.option("steps", 0, "outer steps; 0: those of the page")
    args = parser.parse(arguments)
    results: dict[str, Any] = {}
    for name, (make, steps) in progress(PROBLEMS.items(), "problems"):
        runs = []
        for seed in range(args.seeds):
            begin(seed, "data")
            problem = make()
            losses = [float(problem.step()) for _ in range(args.steps or steps)]
            controls = torch.stack([problem.plain(float(number)) for number in problem.grid]).nan_to_num(torch.inf)
            best = int(controls.argmin())
            runs.append({"losses": losses, "control": float(controls[best]), "at_edge": best in (0, GRID - 1)})
        results[name] = runs
    rows = []
    for name, runs in results.items():
        learned, control = (", ".join(f"{value:.3g}" for value in values) for values in (
            [run["losses"][-1] for run in runs], [run["control"] for run in runs]
        ))  # fmt: skip
        rows.append([name, learned, control, sum(run["at_edge"] for run in runs)])
    show("upper loss at the end, by seed", ["learned", "by ITD", "control", "controls at the edge of the grid"], rows)
    with figure(args.out / "learned_solver", "Upper loss; dashed: the best single number", (10, 3)) as canvas:
        for axis, (name, runs) in zip(canvas.subplots(1, len(results)), results.items(), strict=True):
            curves = {
                f"seed {seed}": [{"step": i, "loss": loss} for i, loss in enumerate(run["losses"])]
                for seed, run in enumerate(runs)
            }
            draw(axis, curves, "step", "loss", title=name, yscale="log")
            for seed, run in enumerate(runs):
                axis.axhline(run["control"], color=f"C{seed}", linestyle="--")
    return save(args, args.out / "learned_solver", {"results": results})


if __name__ == "__main__":
    main()

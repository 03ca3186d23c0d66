r"""RSVRB with many lower problems: cost of a step against their number, samples against the theory's factor C(p)/m.

    python -m recipes.benchmarks.many_tasks                     # cost and complexity, minutes
    python -m recipes.benchmarks.many_tasks --part cost --tasks 100 10000 1000000

Cost: tasks with d = 10 upper and p = 3 lower dimensions, 10 of them per step; seconds per step after the first, which
visits all tasks, and the memory of the rows. Complexity: quadratic tasks whose hypergradients z_i have sizes s_i, drawn
uniformly or with probabilities proportional to s_i, at a fixed point. With weight beta, sampling gives the direction d
a squared error. It determines how many task samples d must average (batch / beta) for a given relative error. The law
is

    E|d - mean z|^2 = beta / (2 - beta) (C(p) - |sum z|^2) / (batch m^2),    C(p) = sum |z_i|^2 / p_i.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import bilevel_optim as bo

from ..common import Parser, peak, progress, save, show, timed
from ..common.seeds import stream

UPPER, LOWER, BATCH = 10, 3, 10
COUNT, DRAWN, BETA = 20, 2, 0.1


class Quadratics:
    """Problem of m tasks g = |y|^2/2 - y'(Bx + b), f = |y - c|^2/2, with b and c scaled by s."""

    def __init__(self, scales: Tensor, d: int, p: int) -> None:
        generator, m = stream(0, "data"), len(scales)
        self.B = torch.randn(m, p, d, generator=generator) / d**0.5
        self.b, self.c = (torch.randn(m, p, 1, generator=generator) * scales.view(m, 1, 1) for _ in range(2))
        self.tasks = bo.TensorTasks(torch.cat([self.B, self.b, self.c], -1).unsqueeze(1))
        self.x = torch.zeros(d, requires_grad=True)
        self.y = self.b[..., 0].clone().requires_grad_()  # solutions at x = 0

    def hypergradients(self) -> Tensor:
        """Return the hypergradients of the tasks at x = 0, (m, d)."""
        z: Tensor = (self.B.mT @ (self.b - self.c))[..., 0]
        return z

    def upper(self, rows: Tensor) -> Tensor:
        """Return the upper loss of a task."""
        return (self.y - rows[0, :, -1]).square().sum() / 2

    def lower(self, rows: Tensor) -> Tensor:
        """Return the lower loss of a task."""
        return self.y.square().sum() / 2 - self.y @ (rows[0, :, :-2] @ self.x + rows[0, :, -2])


def cost(numbers: list[int], steps: int) -> list[dict[str, Any]]:
    """Measure seconds per step and memory for each number of tasks, with uniform and importance sampling."""
    found = []
    for m in numbers:
        for kind, variant in (("uniform", "exact_mean"), ("importance", "exact_mean"), ("uniform", "matrix_free")):
            problem = Quadratics(torch.linspace(0.5, 1.5, m), UPPER, LOWER)
            chances = bo.importance_probabilities(torch.linspace(0.5, 1.5, m) ** 2) if kind == "importance" else None
            optimizer = bo.RSVRB(
                [problem.x], [problem.y], lr=1e-3, lower_lr=0.1 * min(1.0, BATCH / m), task_batch=BATCH, lazy=True,
                probabilities=chances, variant=variant, generator=stream(0, "method"),
            )  # fmt: skip
            step = partial(optimizer.step, problem.upper, problem.lower, tasks=problem.tasks)
            _, first = timed(step)
            seconds = [timed(step)[1] for _ in progress(range(steps), f"{m} {kind} {variant}")]
            state = [t for t in tree_leaves(optimizer.state_dict()) if isinstance(t, Tensor) and t.shape[:1] == (m,)]
            found.append(
                {
                    "tasks": m,
                    "sampling": kind,
                    "variant": variant,
                    "first": first,
                    "step": median(seconds),
                    "rows": sum(t.numel() * t.element_size() for t in state) / 2**20,
                    "peak": peak(),
                }
            )
    return found


def noise(problem: Quadratics, chances: Tensor, steps: int, seed: int) -> tuple[float, float]:
    """Return the squared error of the direction at a fixed point: measured, and by the law."""
    m = len(chances)
    optimizer = bo.RSVRB(
        [problem.x], [problem.y], lr=0.0, lower_lr=0.0, beta=BETA, beta_unit="absolute", task_batch=DRAWN,
        probabilities=chances, floor=0.5, lazy=True, variant="exact_mean",
        generator=stream(seed, "method"),
    )  # fmt: skip
    z, total, warm = problem.hypergradients(), 0.0, int(5 / BETA)
    for step in range(warm + steps):
        optimizer.step(problem.upper, problem.lower, tasks=problem.tasks)
        assert problem.x.grad is not None
        total += float((problem.x.grad - z.mean(0)).square().sum()) if step >= warm else 0.0
    spread = (z.double().square().sum(1) / chances).sum() - z.double().sum(0).square().sum()
    return total / steps, float(BETA / (2 - BETA) * spread / (DRAWN * m**2))


def complexity(accuracy: float, steps: int) -> list[dict[str, Any]]:
    """Measure the noise of the direction and the samples to an accuracy, for increasingly unequal tasks."""
    found = []
    for spread in (0.0, 1.0, 2.0):
        scales = torch.exp(spread * torch.linspace(-1, 1, COUNT))
        problem = Quadratics(scales, 3, 2)
        sizes = problem.hypergradients().double().square().sum(1)
        for kind in ("uniform", "importance"):
            p = torch.full_like(sizes, 1 / COUNT) if kind == "uniform" else bo.importance_probabilities(sizes)
            measured, law = noise(problem, p, steps, 0)
            allowed = accuracy**2 * float(sizes.mean())
            # The error scales as beta / (2 - beta): this beta has the allowed error, and averages 1 / beta steps.
            beta = 2 / (1 + (2 - BETA) / BETA * measured / allowed)
            factor = float((sizes / p).sum() / sizes.sum()) / COUNT
            entry = {"spread": spread, "sampling": kind, "factor": factor, "error": measured, "law": law}
            found.append({**entry, "samples": DRAWN / beta})
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return the numbers that it writes."""
    parser = Parser(__doc__)
    parser.add_argument("--part", choices=("cost", "complexity", "both"), default="both", help="default: both")
    parser.option("tasks", [100, 10_000, 1_000_000], "numbers of tasks")
    parser.option("steps", 100, "timed steps")
    parser.option("accuracy", 0.05, "relative error of d")
    parser.option("held", 2000, "steps at a fixed point")
    args = parser.parse(arguments)
    result: dict[str, Any] = {}
    if args.part in ("cost", "both"):
        result["cost"] = found = cost(args.tasks, args.steps)
        rows = [
            [e["tasks"], e["sampling"], e["variant"], e["step"] * 1e3, e["first"], e["rows"], e["peak"]] for e in found
        ]
        header = ("tasks", "sampling", "variant", "ms per step", "first step, s", "rows, MiB", "peak so far, MiB")
        show("Cost of a step", header, rows)
    if args.part in ("complexity", "both"):
        result["complexity"] = found = complexity(args.accuracy, args.held)
        rows = [[e["spread"], e["sampling"], e["factor"], e["error"], e["law"], e["samples"]] for e in found]
        names = ("spread of sizes", "sampling", "C(p)/m, relative", "squared error of d", "law", "samples")
        show("Noise of the direction, and samples to an accuracy", names, rows)
    return save(args, args.out / "many_tasks", result)


if __name__ == "__main__":
    main()

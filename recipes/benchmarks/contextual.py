r"""RT-MLMC against DL-SGD: lower steps to a given accuracy, time per estimate, dependence on the number of tasks.

    python -m recipes.benchmarks.contextual --part end-to-end     # the quadratic problem with known solution
    python -m recipes.benchmarks.contextual --part time           # 512 features x 10 classes, 20 tasks
    python -m recipes.benchmarks.contextual --part tasks          # 10, 1,000 and 100,000 tasks

Problems, and the published numbers in the tables: arXiv:2310.18535.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, progress, save, table, timed, whole
from ..common.seeds import stream
from ..problems.problem import Part
from ..problems.tasks import CLASSES, FEATURES, Centre


class P1:
    r"""Quadratic contextual problem with noise in every oracle and a known gradient.

    :math:`g = \tfrac{1 + 0.1\epsilon}2 (y - Ax - B\xi)^\top H (y - Ax - B\xi) + \tfrac12 \eta^\top y`,
    :math:`f = \tfrac12 \|y - C\xi - d\|^2 + 0.3\,\eta_f^\top y + \tfrac\rho2 \|x\|^2`; also a task sampler.
    """

    A = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.8]], dtype=torch.float64)
    B = torch.tensor([[0.5, 0.0], [0.3, 0.7]], dtype=torch.float64)
    C = torch.tensor([[0.2, 0.1], [-0.4, 0.3]], dtype=torch.float64)
    d, rho, L = torch.tensor([1.0, -0.5], dtype=torch.float64), 0.1, 4.4

    def __init__(self, x: tuple[float, float, float] = (0.7, -0.2, 0.4)) -> None:
        self.x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        self.y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        angle = torch.tensor(0.6, dtype=torch.float64)
        R = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
        self.H = R @ torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)) @ R.T

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw standard normal contexts."""
        return torch.randn(n, 2, generator=generator, dtype=torch.float64)

    def lower(self, tasks: Tensor, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the context, the sign of the Hessian noise, and the gradient noise."""
        sign = torch.randint(2, (len(tasks), n), generator=generator) * 2.0 - 1
        noise = torch.randn(len(tasks), n, 2, generator=generator, dtype=torch.float64)
        return tasks.unsqueeze(1).expand(-1, n, -1), sign.double(), noise

    def upper(self, tasks: Tensor, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the context and the gradient noise."""
        noise = torch.randn(len(tasks), n, 2, generator=generator, dtype=torch.float64)
        return tasks.unsqueeze(1).expand(-1, n, -1), noise

    def g(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the lower loss."""
        xi, sign, noise = batch
        r = self.y - self.A @ self.x - xi @ self.B.T
        return (((1 + 0.1 * sign) / 2) * (r @ self.H * r).sum(-1) + 0.5 * noise @ self.y).mean()

    def f(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the upper loss."""
        xi, noise = batch
        distance = self.y - xi @ self.C.T - self.d
        return (distance.square().sum(-1) / 2 + 0.3 * noise @ self.y).mean() + self.rho / 2 * self.x.square().sum()

    def gradient(self) -> Tensor:
        """Return the gradient of the true objective, with exact lower solutions."""
        return self.rho * self.x.detach() + self.A.T @ (self.A @ self.x.detach() - self.d)


METHODS: dict[str, partial[Any]] = {
    "DL-SGD": partial(bo.DLSGD),
    "RT-MLMC": partial(bo.RTMLMC, level_sampling="independent"),
}
PAPER = {  # seconds per estimate at 512 x 10: mean, standard deviation
    "DL-SGD": {6: (2.65e-2, 6.34e-3), 8: (7.23e-2, 7.77e-3), 10: (2.48e-1, 2.75e-2), 12: (9.38e-1, 3.71e-2)},
    "RT-MLMC": {6: (2.73e-2, 1.46e-2), 8: (3.41e-2, 1.85e-2), 10: (4.93e-2, 4.06e-2), 12: (1.08e-1, 5.44e-2)},
}


def end_to_end(levels: list[int], neumann: list[str], seeds: int, budget: int) -> dict[str, Any]:
    """Count lower steps until the true gradient is small, and measure the noise floor at the end of the budget."""
    rows: list[list[object]] = []
    numbers: dict[str, Any] = {}
    for series in neumann:
        for K in levels:
            for name, make in METHODS.items():
                reached, floors, outer = [], [], 0
                for seed in range(seeds):
                    problem = P1((0.0, 0.0, 0.0))
                    optimizer = make(
                        [problem.x], [problem.y], lr=0.03, lower_lr=1.0, levels=K, neumann=series, neumann_steps=20,
                        smoothness=problem.L, tasks_per_step=16, generator=stream(seed, "method"),
                    )  # fmt: skip
                    used, first, norms = 0, None, [(0, float(problem.gradient().norm()))]
                    with progress(total=budget, label=f"{series} K={K} {name} seed {seed}") as bar:
                        while used < budget if budget > 1 else first is None and used < 2_000_000:
                            optimizer.step(problem.f, problem.g, tasks=problem)
                            made = int(optimizer.diagnostics["lower_steps"])
                            used += made
                            bar.update(made)
                            norms.append((used, float(problem.gradient().norm())))
                            if first is None and norms[-1][1] <= 0.1:
                                first = used
                    reached.append(first)
                    late = [norm for _, norm in norms[round(0.8 * len(norms)) :]]
                    floors.append((sum(norm**2 for norm in late) / len(late)) ** 0.5)
                    outer = len(norms) - 1 if seed == 0 else outer
                known = sorted(r for r in reached if r is not None)
                span = f"{known[0] / 1e3:.1f}k-{known[-1] / 1e3:.1f}k" if known else "never"
                if len(known) < seeds and known:
                    span += f", {seeds - len(known)} of {seeds} never"
                rows.append([series, K, name, outer, sum(floors) / seeds, span])
                numbers[f"{series} {K} {name}"] = {"steps_to_0.1": reached, "rms": floors, "outer_steps": outer}
    print(table(["Neumann", "K", "method", "outer steps", "rms |grad F|, last 20 %", "lower steps to 0.1"], rows))
    for series in neumann:
        for K in levels:
            deep, shallow = (numbers[f"{series} {K} {name}"]["steps_to_0.1"] for name in METHODS)
            if all(r is not None for r in (*deep, *shallow)):
                print(f"{series}, K = {K}: ratio of lower steps to 0.1 {sum(deep) / sum(shallow):.1f}")
    return numbers


def classifiers(tasks: int = 20, rows: int = 100, features: int = FEATURES) -> Centre:
    """Return linear classifiers near a common centre, lambda = 2, on random data."""
    generator = stream(0, "data")
    inputs = F.normalize(torch.randn(tasks, rows, features, generator=generator), dim=-1)
    return Centre(Part(inputs, torch.randint(0, CLASSES, (tasks, rows), generator=generator)))


def method(problem: Centre, cls: type[bo.RTMLMC], levels: int, count: int) -> bo.RTMLMC:
    """Return the optimizer; with lambda = 2 and rows of norm 1 the curvature is between 2 and 2.5."""
    return cls(
        [problem.x], [problem.y], lr=0.0, lower_lr=0.5, levels=levels, neumann_steps=10, smoothness=2.5,
        tasks_per_step=count, generator=stream(1, "method"), lower_init=problem.starts,
    )  # fmt: skip


def seconds(problem: Centre, optimizer: bo.RTMLMC, repeats: int, state: Tensor | None = None) -> list[float]:
    """Time estimates after a warm-up; all start from ``state`` of the generator, if there is one."""
    times = []
    for _ in range(repeats + 1):
        if state is not None and optimizer.generator is not None:
            optimizer.generator.set_state(state)
        times.append(timed(lambda: optimizer.backward(problem.upper, problem.lower, tasks=problem.tasks))[1])
    return times[1:]


def states_by_level(levels: int) -> dict[int, Tensor]:
    """Find generator states from which RT-MLMC draws each level, on a problem with one variable."""
    x, y = (torch.zeros(1, requires_grad=True) for _ in range(2))
    generator, found = stream(1, "method"), dict[int, Tensor]()
    optimizer = bo.RTMLMC(
        [x], [y], lr=0.0, lower_lr=0.5, levels=levels, neumann_steps=1, smoothness=1.0, generator=generator
    )
    tasks = bo.TensorTasks(torch.zeros(1, 1, 1))
    while len(found) < levels:
        state = generator.get_state()
        optimizer.backward(lambda t: (x + y + t).sum(), lambda t: (y - x - t).square().sum(), tasks=tasks)
        found.setdefault(int(optimizer.diagnostics["level_counts"].argmax()), state)
    return found


def timing(levels: list[int], counts: list[int], repeats: int) -> dict[str, Any]:
    """Measure mean seconds per estimate; with one task per step, from least times, weighted over RT-MLMC's levels."""
    problem, rows, numbers = classifiers(), [], {}
    for K in levels:
        for count in counts:
            optimizer = method(problem, bo.DLSGD, K, count)
            deep = seconds(problem, optimizer, max(1, repeats // 2 ** max(K - 4, 0)))
            deep_time = sum(deep) / len(deep)
            optimizer = method(problem, bo.RTMLMC, K, count)
            if count == 1:
                deep_time, states = min(deep), states_by_level(K)
                each = [min(seconds(problem, optimizer, max(1, repeats >> k), states[k])) for k in range(1, K + 1)]
                chances = [2.0**-k / (1 - 2.0**-K) for k in range(1, K + 1)]
                mean, square = (sum(p * t**n for p, t in zip(chances, each, strict=True)) for n in (1, 2))
                std = max(square - mean**2, 0.0) ** 0.5
            else:
                several = seconds(problem, optimizer, repeats)
                mean = sum(several) / len(several)
                std = (sum((t - mean) ** 2 for t in several) / len(several)) ** 0.5
            paper = [PAPER[name][K][0] if count == counts[0] and K in PAPER[name] else None for name in METHODS]
            ratio = paper[0] / paper[1] if paper[0] and paper[1] else None
            rows.append([K, count, deep_time, mean, std, deep_time / mean, *paper, ratio])
            numbers[f"K={K} tasks={count}"] = {"DL-SGD": deep_time, "RT-MLMC": mean, "RT-MLMC std": std}
            print(rows[-1], flush=True)
    header = ["K", "tasks", "DL-SGD s", "RT-MLMC s", "its std", "ratio", "paper DL", "paper RT", "paper ratio"]
    print(table(header, rows))
    return numbers


def many_tasks(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Measure seconds per step against the number of tasks."""
    rows, numbers = [], {}
    for m in sizes:
        problem = classifiers(tasks=m, rows=8, features=64)
        times = sorted(seconds(problem, method(problem, bo.RTMLMC, 6, 4), repeats))
        numbers[str(m)] = {"median": times[len(times) // 2], "mean": sum(times) / len(times)}
        rows.append([m, times[len(times) // 2], sum(times) / len(times)])
    print(table(["tasks", "median s per step", "mean s per step"], rows))
    return numbers


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the selected parts; return the numbers that are written."""
    parser = Parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=["end-to-end", "time", "tasks"], default=["end-to-end"])
    parser.option("levels", [6], "K", type=whole(1, 12), shown="6 (end-to-end), 6 8 10 12 (time)")
    parser.add_argument("--neumann", nargs="+", choices=["sum", "product"], default=["sum"])
    parser.option("seeds", 5, "runs of each method (end-to-end)")
    parser.option("budget", 600_000, "lower steps; 1: stop at a gradient norm of 0.1")
    parser.option("tasks", [1, 4, 20], "tasks per step (time)")
    parser.option("repeats", 32, "timed estimates")
    parser.set_defaults(levels=None)
    args = parser.parse(arguments)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "end-to-end": lambda: end_to_end(args.levels or [6], args.neumann, args.seeds, args.budget),
        "time": lambda: timing(args.levels or [6, 8, 10, 12], args.tasks, args.repeats),
        "tasks": lambda: many_tasks([10, 1000, 100_000], args.repeats),
    }
    return save(args, args.out / "contextual", {part: parts[part]() for part in args.part})


if __name__ == "__main__":
    main()

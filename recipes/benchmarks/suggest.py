r"""What `bo.suggest` sets, and the hypergradient that comes of it, over condition numbers, sizes of g, and noise.

    python -m recipes.benchmarks.suggest

The problem is quadratic, with 24 lower and 7 upper variables and a log-spaced spectrum:

    g = s (y'Ay/2 - y'(Dx + e)) + noise,   f = y'Py/2 + q'y + x'Qx/2 + c'x + x'Ry

s is the scale, the condition number that of A. With noise each batch of g has a linear term of its own, ``noise`` times
the first gradient. ``expected`` is the bias that `suggest` tells, ``true`` the relative error of the first
hypergradient from y = 0 (of `SOBA` after as many steps at one x as it says): with noise its root mean square over 5
orders of the batches. ``calls`` are all gradients and products of such an estimate, ``best`` those of the cheapest
setting of a grid (lower rates 1 and 0.3 over L; T up to 1000 steps; Q up to 100 products; for F2SA nu of 1e-3, 1e-2 and
0.1 times s; without momentum) with at most that error, or with at most one per cent. A dash: no setting of the grid is
as good, or none was searched (with noise, and for SOBA).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, environment, progress, show
from ..common.seeds import stream

N, M = 24, 7
ORDERS = 5  # of noisy batches
STEPS = (1, 3, 10, 30, 100, 300, 1000)
PRODUCTS = (1, 3, 10, 30, 100)
RATES = (1.0, 0.3)


class Problem:
    """Live tensors, losses, and the true hypergradient."""

    def __init__(self, kappa: float, scale: float, noise: float, seed: int = 0) -> None:
        generator = stream(seed, "data")

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        basis = torch.linalg.qr(random(N, N))[0]
        A = basis @ torch.diag(torch.logspace(0, math.log10(kappa), N, dtype=torch.float64)) @ basis.T
        P, Q, D = random(N, N) / N**0.5, random(M, M) / M**0.5, random(N, M) / M**0.5
        e, q, c, R = random(N), random(N), random(M), random(M, N) / N**0.5
        self.x, self.y = random(M).requires_grad_(), torch.zeros(N, dtype=torch.float64, requires_grad=True)
        self.largest, self.scale, x, y = kappa * scale, scale, self.x, self.y
        right = D @ x.detach() + e
        shifts = random(8, N)
        shifts = noise * float(right.norm()) * (shifts - shifts.mean(0)) / N**0.5

        def lower(shift: Tensor | float = 0.0) -> Tensor:
            loss: Tensor = scale * (y @ A @ y / 2 - y @ (D @ x + e + shift))
            return loss

        def upper() -> Tensor:
            loss: Tensor = y @ (P @ P.T) @ y / 2 + q @ y + x @ (Q @ Q.T) @ x / 2 + c @ x + x @ R @ y
            return loss

        self.upper, self.lower = upper, lower
        self.shifts = list(shifts) if noise else None
        z = torch.linalg.solve(A, right)
        adjoint = torch.linalg.solve(A, P @ P.T @ z + q + R.T @ x.detach())
        self.truth = Q @ Q.T @ x.detach() + c + R @ z + D.T @ adjoint

    def data(self, seed: int) -> Any:
        """G, with its batches in an order of their own."""
        if self.shifts is None:
            return self.lower
        order = torch.randperm(len(self.shifts), generator=stream(seed, "order"))
        return bo.Objective(self.lower, [self.shifts[i] for i in order])

    def error(
        self, make: Callable[[], bo.BilevelOptimizer], settled: int = 1, allowed: float = 1e2
    ) -> tuple[float, int]:
        """Relative error of a hypergradient from y = 0, and the calls that it takes; it stops above what is allowed."""
        squares, calls = list[float](), 0
        orders = ORDERS if self.shifts else 1
        for seed in range(orders):
            self.y.data.zero_()
            optimizer, lower = make(), self.data(seed)
            for _ in range(settled):
                optimizer.backward(self.upper, lower)
            assert self.x.grad is not None
            squares.append(float((self.x.grad - self.truth).square().sum() / self.truth.square().sum()))
            calls = sum(optimizer.oracle_counts.values())
            if not sum(squares) <= orders * allowed**2:
                break
        self.y.data.zero_()
        return math.sqrt(sum(squares) / len(squares)), calls


def grid(name: str, largest: float, scale: float) -> Iterator[dict[str, Any]]:
    """Settings of a method, the cheaper ones first."""
    rates = [part / largest for part in RATES]
    if name == "AID":
        pairs = sorted(product(STEPS, PRODUCTS), key=sum)
        for (steps, products), rate in product(pairs, rates):
            yield {"lower_steps": steps, "linear_steps": products, "lower_lr": rate}
    for steps, rate in product(STEPS, rates):
        if name == "ITD":
            yield {"lower_steps": steps, "lower_lr": rate}
        for nu in (0.1, 0.01, 0.001) if name == "F2SA" else ():
            yield {"lower_steps": steps, "lower_lr": rate, "nu": nu * scale}


def cheapest(problem: Problem, name: str, allowed: float) -> int | None:
    """The calls of the cheapest setting of the grid that is good enough."""
    method = getattr(bo, name)
    if name == "SOBA" or problem.shifts:
        return None
    for settings in grid(name, problem.largest, problem.scale):
        make = partial(method, [problem.x], [problem.y], lr=0.0, check_finite=False, **settings)
        error, calls = problem.error(make, allowed=allowed)
        if error <= allowed:
            return calls
    return None


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    warnings.filterwarnings("ignore", "nu=")  # it is in proportion to the size of g
    parser = Parser(__doc__, out=False)
    parser.option("kappa", [1.0, 100.0, 1e4], "condition numbers")
    parser.option("scales", [1e-3, 1e3], "sizes of g")
    parser.option("noise", [0.0, 0.3], "noise of a batch, in units of the first gradient", type=float)
    parser.option("methods", ["AID", "ITD", "F2SA", "SOBA"], "methods")
    parser.option("max-seconds", 60.0, "budget of each suggestion")
    args = parser.parse(arguments)
    print(", ".join(f"{k} {v}" for k, v in environment("cpu").items()))
    rows: list[list[object]] = []
    for kappa, scale, noise in progress(list(product(args.kappa, args.scales, args.noise)), "problems"):
        problem = Problem(kappa, scale, noise)
        suggestion = bo.suggest(
            [problem.x], [problem.y], problem.upper, problem.data(0), methods=args.methods,
            max_seconds=args.max_seconds,
        )  # fmt: skip
        for name, row in suggestion.rows.items():
            error, calls = problem.error(partial(suggestion.make, name), row.settled)
            best = cheapest(problem, name, max(error, 0.01))
            expected = math.nan if row.bias is None else row.bias
            T, Q = row.settings.get("lower_steps", row.settled), row.settings.get("linear_steps", "")
            rows.append(
                [name, kappa, scale, noise, T, Q, expected, row.noise, error, calls, best or "-", suggestion.took]
            )
    header = ["method", "kappa", "scale", "noise", "T", "Q", "expected", "+ noise", "true", "calls", "best", "seconds"]
    show("settings of bo.suggest", header, rows)


if __name__ == "__main__":
    main()

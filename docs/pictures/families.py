"""Measures and draws the pictures of the explanation pages: python docs/pictures/families.py [NAME ...] [--draw].

Numbers are kept in docs/records/NAME.json, pictures in docs/explain/NAME.png; --draw draws from these numbers. One
problem throughout, in float64: ridge regression of 200 rows and 20 weights, one penalty for each weight; its
hypergradient is known in closed form.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import bilevel_optim as bo

DOCS = Path(__file__).parents[1]
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
SIZE, ROWS = 20, 200
SCALES = torch.logspace(0, -0.7, SIZE)
A, C = torch.randn(ROWS, SIZE) * SCALES, torch.randn(ROWS, SIZE) * SCALES
TRUTH = torch.randn(SIZE)
B, D = A @ TRUTH + torch.randn(ROWS), C @ TRUTH + torch.randn(ROWS)


class Ridge:
    """The problem at a point x, with y at zero."""

    def __init__(self) -> None:
        self.x = torch.full((SIZE,), -2.0, requires_grad=True)
        self.y = torch.zeros(SIZE, requires_grad=True)

    def lower(self, rows: Any = slice(None)) -> Tensor:
        return (A[rows] @ self.y - B[rows]).square().mean() / 2 + (self.x.exp() * self.y.square()).sum() / 2

    def upper(self, rows: Any = slice(None)) -> Tensor:
        return (C[rows] @ self.y - D[rows]).square().mean() / 2

    def solution(self) -> Tensor:
        H = A.T @ A / ROWS + torch.diag(self.x.detach().exp())
        return torch.linalg.solve(H, A.T @ B / ROWS)

    def truth(self) -> Tensor:
        """The hypergradient, in closed form."""
        x = self.x.detach()
        H, y = A.T @ A / ROWS + torch.diag(x.exp()), self.solution()
        v = torch.linalg.solve(H, C.T @ (C @ y - D) / ROWS)
        return -x.exp() * y * v


def measured(
    make: Callable[[Ridge], bo.BilevelOptimizer], *, repeats: int = 1, solved: bool = False
) -> dict[str, float]:
    """Relative bias, relative noise and calls of one estimate."""
    estimates, calls = [], []
    for seed in range(repeats):
        torch.manual_seed(seed)
        problem = Ridge()
        if solved:
            problem.y.data.copy_(problem.solution())
        optimizer = make(problem)
        optimizer.backward(problem.upper, problem.lower)
        estimates.append(problem.x.grad)
        calls.append(sum(optimizer.oracle_counts.values()))
    truth, stacked = Ridge().truth(), torch.stack(estimates)
    bias = float((stacked.mean(0) - truth).norm() / truth.norm())
    noise = float((stacked - stacked.mean(0)).norm(dim=1).square().mean().sqrt() / truth.norm())
    return {"bias": bias, "noise": noise, "calls": mean(calls)}


def implicit() -> dict[str, Any]:
    """Error against calls: lower steps, with few and with many products."""
    found: dict[str, Any] = {}
    for products in (2, 5, 20):
        rows = []
        for steps in (1, 2, 5, 10, 20, 50, 100, 200, 500):
            point = measured(
                lambda p: bo.AID([p.x], [p.y], lr=1, lower_lr=0.5, lower_steps=steps, linear_steps=products)
            )
            rows.append({"lower_steps": steps, **point})
        found[f"{products} products"] = rows
    return found


def unrolled() -> dict[str, Any]:
    """Error against the number of steps, from zero and from the solution; and what short horizons prefer."""
    cold = [
        {"lower_steps": k, **measured(lambda p: bo.ITD([p.x], [p.y], lr=1, lower_lr=0.5, lower_steps=k))}
        for k in (1, 2, 5, 10, 20, 50, 100, 200, 500)
    ]
    warm = [
        {"lower_steps": k, **measured(lambda p: bo.ITD([p.x], [p.y], lr=1, lower_lr=0.5, lower_steps=k), solved=True)}
        for k in (1, 2, 5, 10, 20, 50, 100, 200, 500)
    ]
    horizons: dict[str, Any] = {}
    shifts = [k / 4 for k in range(-20, 3)]
    few = slice(0, 25)  # rows of training: without a penalty 20 weights fit their noise
    for steps in (5, 20, 100, 1000):
        values = []
        for shift in shifts:
            problem = Ridge()
            problem.x.data.fill_(shift)
            optimizer = bo.FirstOrder([problem.x], [problem.y], lr=0, lower_lr=0.25, lower_steps=steps)
            values.append(
                float(optimizer.backward(lambda: problem.upper() + 0 * problem.x.sum(), lambda: problem.lower(few)))
            )
        horizons[str(steps)] = values
    return {"from zero": cold, "from y*(x)": warm, "shifts": shifts, "horizons": horizons}


def penalty() -> dict[str, Any]:
    """Error of F2SA against nu, for several orders, with the copies solved."""
    found: dict[str, Any] = {}
    for order in (1, 2, 4):
        rows = []
        for exponent in (-8, -7, -6, -5, -4, -3, -2.5, -2, -1.5, -1):
            nu = 10.0**exponent
            point = measured(lambda p: bo.F2SA([p.x], [p.y], lr=1, lower_lr=0.5, lower_steps=2000, order=order, nu=nu))
            rows.append({"nu": nu, **point})
        found[f"order {order}"] = rows
    return found


def zeroth_order() -> dict[str, Any]:
    """Noise against the number of directions, in 1, 5 and 20 upper dimensions."""
    found: dict[str, Any] = {}
    for directions in (1, 2, 5, 10, 20, 50, 100):
        for name, method in (("PZOBO", bo.PZOBO), ("HOZOG", bo.HOZOG)):
            point = measured(
                lambda p: method(
                    [p.x], [p.y], lr=1, lower_lr=0.5, lower_steps=100, directions=directions, smoothing=1e-3
                ),
                repeats=20,
            )
            found.setdefault(name, []).append({"directions": directions, **point})
    return found


def single_loop() -> dict[str, Any]:
    """The distance of x from its optimum against calls, with batches of 16 rows."""
    reference = Ridge()
    adam = torch.optim.Adam([reference.x], lr=0.05)
    for _ in range(2000):
        reference.x.grad = reference.truth()
        adam.step()
    best = _value(reference)
    found: dict[str, Any] = {}
    entries = {
        "AID, full batches": (bo.AID, {"lr": 2.0, "lower_lr": 0.3, "lower_steps": 10, "linear_steps": 5}, False),
        "StocBiO": (
            bo.StocBiO,
            {"lr": 0.5, "lower_lr": 0.1, "lower_steps": 10, "linear_steps": 10, "linear_lr": 0.2},
            True,
        ),
        "SOBA": (bo.SOBA, {"lr": 0.3, "lower_lr": 0.05}, True),
        "MRBO": (bo.MRBO, {"lr": 0.3, "lower_lr": 0.05, "linear_steps": 10, "linear_lr": 0.1}, True),
    }
    for name, (method, options, sampled) in entries.items():
        torch.manual_seed(1)
        problem = Ridge()
        problem.x.data.fill_(0.0)
        optimizer = method([problem.x], [problem.y], **options)
        batches = [torch.randperm(ROWS)[:16] for _ in range(500)]
        upper = bo.Objective(problem.upper, batches) if sampled else problem.upper
        lower = bo.Objective(problem.lower, batches) if sampled else problem.lower
        rows = []
        examples = 0.0
        while examples < 4e5:
            rows.append((examples, _value(problem) - best))
            for _ in range(1 if name.startswith("AID") else 10):
                optimizer.step(upper, lower)
            examples = sum(optimizer.oracle_counts.values()) * (16 if sampled else ROWS)
        found[name] = rows
    return found


def _value(problem: Ridge) -> float:
    y = problem.solution()
    return float((C @ y - D).square().mean() / 2)


def multilevel() -> dict[str, Any]:
    """Lower steps of an estimate and its noise, against the number of levels: RT-MLMC and DL-SGD."""
    found: dict[str, Any] = {}

    class Contexts:
        """A context shifts the data of the ridge problem; each is met once."""

        def sample(self, n: int, generator: Any) -> Tensor:
            return 0.3 * torch.randn(n, SIZE)

        def lower(self, tasks: Tensor, n: int, generator: Any) -> Any:
            rows = torch.randint(0, ROWS, (len(tasks), n))
            return A[rows], B[rows] + (A[rows] @ tasks[:, :, None]).squeeze(-1)

        def upper(self, tasks: Tensor, n: int, generator: Any) -> Any:
            rows = torch.randint(0, ROWS, (len(tasks), n))
            return C[rows], D[rows] + (C[rows] @ tasks[:, :, None]).squeeze(-1)

    for name, method in (("RTMLMC", bo.RTMLMC), ("DLSGD", bo.DLSGD)):
        for levels in (1, 2, 3, 4, 5, 6, 7):
            estimates, steps = [], []
            for seed in range(30):
                torch.manual_seed(seed)
                problem = Ridge()
                x, y = problem.x, problem.y

                def lower(batch: Any) -> Tensor:
                    return (batch[0] @ y - batch[1]).square().mean() / 2 + (x.exp() * y.square()).sum() / 2

                def upper(batch: Any) -> Tensor:
                    return (batch[0] @ y - batch[1]).square().mean() / 2

                options = {"levels": levels, "neumann_steps": 10, "smoothness": 2.0, "tasks_per_step": 10}
                optimizer = method([x], [y], lr=1, lower_lr=0.5, lower_batch=8, upper_batch=8, **options)
                optimizer.backward(upper, lower, tasks=Contexts())
                estimates.append(x.grad)
                steps.append(float(optimizer.diagnostics["lower_steps"]) / 10)
            stacked, truth = torch.stack(estimates), Ridge().truth()
            bias = float((stacked.mean(0) - truth).norm() / truth.norm())
            noise = float((stacked - stacked.mean(0)).norm(dim=1).square().mean().sqrt() / truth.norm())
            found.setdefault(name, []).append({"levels": levels, "bias": bias, "noise": noise, "steps": mean(steps)})
    return found


def _axes(rows: int) -> Any:
    return plt.subplots(rows, 1, figsize=(5.4, 3.6 * rows), layout="constrained")  # one below the other, for phones


def draw_implicit(found: Any) -> None:
    """Two panels."""
    _, (left, right) = _axes(2)
    for name, rows in found.items():
        left.loglog([r["lower_steps"] for r in rows], [r["bias"] for r in rows], "o-", label=name)
        right.loglog([r["calls"] for r in rows], [r["bias"] for r in rows], "o-", label=name)
    left.set(xlabel="lower steps T", ylabel="relative error of the hypergradient", title="AID")
    right.set(xlabel="gradients and products of an estimate", title="the same against its cost")
    left.legend()


def draw_unrolled(found: Any) -> None:
    """Errors, and the horizon."""
    _, (left, right) = _axes(2)
    for name in ("from zero", "from y*(x)"):
        rows = found[name]
        left.loglog([r["lower_steps"] for r in rows], [r["bias"] for r in rows], "o-", label=f"y starts {name}")
    left.set(xlabel="lower steps T", ylabel="relative error of the hypergradient", title="ITD")
    left.legend()
    for name, values in found["horizons"].items():
        (line,) = right.plot(found["shifts"], values, label=f"T = {name}")
        low = min(range(len(values)), key=values.__getitem__)
        right.plot(found["shifts"][low], values[low], "o", color=line.get_color())
    right.set(
        xlabel="log penalty, one for all weights",
        ylabel="upper loss after T steps",
        title="a short horizon prefers a weaker penalty",
    )
    right.set_yscale("log")
    right.legend()


def draw_penalty(found: Any) -> None:
    """One panel."""
    _, axis = _axes(1)
    for name, rows in found.items():
        axis.loglog([r["nu"] for r in rows], [r["bias"] for r in rows], "o-", label=name)
    axis.set(
        xlabel="nu",
        ylabel="relative error of the hypergradient",
        title="F2SA in float64, copies solved",
        ylim=(1e-13, 10),
    )
    axis.legend()


def draw_zeroth_order(found: Any) -> None:
    """One panel."""
    _, axis = _axes(1)
    for name, rows in found.items():
        axis.loglog(
            [r["directions"] for r in rows], [r["noise"] for r in rows], "o-" if name == "PZOBO" else "s--", label=name
        )
    directions = [r["directions"] for r in found["PZOBO"]]
    axis.loglog(directions, [((SIZE + 1) / q) ** 0.5 for q in directions], "k:", label="sqrt((p + 1) / Q), p = 20")
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set(xlabel="directions Q", ylabel="relative standard deviation", title="20 upper parameters")
    axis.legend()


def draw_single_loop(found: Any) -> None:
    """One panel."""
    _, axis = _axes(1)
    for name, rows in found.items():
        axis.semilogy([r[0] / 1000 for r in rows], [max(r[1], 1e-8) for r in rows], label=name)
    axis.set(
        xlabel="examples evaluated, in thousands",
        ylabel="f(x, y*(x)) above its minimum",
        title="batches of 16 of 200 rows",
    )
    axis.legend()


def draw_multilevel(found: Any) -> None:
    """Cost and noise."""
    _, (left, right) = _axes(2)
    for name, rows in found.items():
        left.plot([r["levels"] for r in rows], [r["steps"] for r in rows], "o-", label=name)
        right.plot([r["levels"] for r in rows], [r["noise"] for r in rows], "o-", label=name)
    left.set(xlabel="levels K", ylabel="lower steps for one context", yscale="log", title="cost")
    right.set(
        xlabel="levels K",
        ylabel="relative standard deviation",
        yscale="log",
        title="noise of an estimate of ten contexts",
    )
    left.legend()


FIGURES = {
    "implicit": (implicit, draw_implicit),
    "unrolled": (unrolled, draw_unrolled),
    "penalty": (penalty, draw_penalty),
    "zeroth_order": (zeroth_order, draw_zeroth_order),
    "single_loop": (single_loop, draw_single_loop),
    "multilevel": (multilevel, draw_multilevel),
}

if __name__ == "__main__":
    again = "--draw" in sys.argv
    for name in [name for name in sys.argv[1:] if name in FIGURES] or FIGURES:
        measure, draw = FIGURES[name]
        record = DOCS / "records" / f"{name}.json"
        record.parent.mkdir(exist_ok=True)
        found = json.loads(record.read_text()) if again else measure()
        record.write_text(json.dumps(found, indent=1) + "\n")
        draw(found)
        plt.savefig(DOCS / "explain" / f"{name}.png", dpi=200)
        plt.close("all")
        print(name)

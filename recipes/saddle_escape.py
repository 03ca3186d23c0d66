r"""Escaping a saddle point: gradient methods on a minimax problem with a W-shaped valley.

.. math::
    \min_{x \in R^3} \max_{y \in R^2}\ w(x_3) - 10 y_1^2 + x_1 y_1 - 5 y_2^2 + x_2 y_2

w is even, twice continuously differentiable, has a maximum at 0 and minima at +-0.6: the maximum over y has a strict
saddle point at the origin, next to which the first start lies. Which methods leave it, after how many steps and oracle
calls?

    python -m recipes.saddle_escape                    # a table and a picture, about a minute
    python -m recipes.saddle_escape --seeds 20         # medians over more seeds of the perturbed runs

Problem: arXiv:2307.00126, appendix E (after arXiv:1711.02838).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import bilevel_optim as bo
from bilevel_optim.optimizer.minimax import MinimaxOptimizer

from .report import environment, save_json, table

ROOT, WIDTH = 0.1, 5.0  # square root of w's parameter, and its L
BEST = -16 / 3e3  # value of the minima
TOLERANCE = 1e-8
STARTS = {"beside the saddle": (1e-3, 1e-3, 1e-16), "on a slope": (0.0, 0.0, 1.0)}
# f is 20-smooth, with condition number 2 in y.
ASCENT: dict[str, Any] = {"lower_lr": 1 / 20, "lower_steps": 10, "lower_momentum": (2**0.5 - 1) / (2**0.5 + 1)}
PRINTED: dict[str, Any] = {
    **ASCENT,
    "lr": 0.5,
    "restart_radius": 0.2,
    "restart_period": 400,
    "lower_restart": "zero",
}

Method = Callable[..., MinimaxOptimizer]
METHODS: dict[str, Method] = {
    "ragda": partial(bo.RAGDA, **PRINTED),
    "pragda as printed": partial(bo.PRAGDA, **PRINTED, perturbation=1e-3, perturb_initial=False),
    "pragda": partial(bo.PRAGDA, **PRINTED, perturbation=1e-3),
    "imcn": partial(bo.iMCN, **ASCENT, lr=0.5, cubic=2.0, cubic_steps=20, linear_steps=2),
    "gda, lr 0.1": partial(bo.GDA, lr=0.1, lower_lr=0.05),
    "gda, lr 0.5": partial(bo.GDA, lr=0.5, lower_lr=0.05),
    "gda, lr 1": partial(bo.GDA, lr=1.0, lower_lr=0.05),
}
RANDOM = ("pragda as printed", "pragda", "imcn")
DRAWN = ("pragda", "ragda", "imcn", "gda, lr 0.5")


def valley(z: Tensor) -> Tensor:
    """The W-shaped function."""
    s, end = ROOT, WIDTH * ROOT
    a = z.abs()
    outer = a - end - s
    return torch.where(
        a > end,
        s * outer**2 + outer**3 / 3 - (3 * WIDTH + 1) * s**3 / 3,
        torch.where(a > s, s**3 / 3 - s**2 * a, a**3 / 3 - s * z**2),
    )


def loss(x: Tensor, y: Tensor) -> Tensor:
    """The objective of both players."""
    return valley(x[2]) - 10 * y[0] ** 2 + x[0] * y[0] - 5 * y[1] ** 2 + x[1] * y[1]


def gap(x: Tensor) -> float:
    """How far the maximum over y is from its minimum over x."""
    x = x.detach()
    return float(valley(x[2]) + x[0] ** 2 / 40 + x[1] ** 2 / 20) - BEST


def run(method: Method, start: tuple[float, ...], steps: int, seed: int = 0) -> dict[str, Any]:
    """Run one method until it ends, has come to the minimum (if it never ends), or diverges."""
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = method([x], [y], generator=torch.Generator().manual_seed(seed))
    hit, done, path, calls = None, 0, [x.tolist()], [0]
    gaps, at_hit = [gap(x)], None
    for done in range(1, steps + 1):
        optimizer.step(lambda: loss(x, y))
        path.append(x.tolist())
        gaps.append(gap(x))
        counts = optimizer.oracle_counts
        calls.append(sum(counts[k] for k in ("upper_grad", "lower_grad", "hvp")))
        if hit is None and gaps[-1] < TOLERANCE:
            hit, at_hit = done, counts
        ended = optimizer.converged if isinstance(optimizer, bo.RAGDA) else hit is not None
        if ended or not gaps[-1] < 1e6:
            break
    output = optimizer.averaged_parameters()[0] if isinstance(optimizer, bo.RAGDA) else x.detach()
    return {
        "hit": hit,
        "steps": done,
        "restarts": optimizer.restarts if isinstance(optimizer, bo.RAGDA) else None,
        "error": abs(abs(float(output[2])) - 0.6),
        "gradients": None if at_hit is None else at_hit["upper_grad"] + at_hit["lower_grad"],
        "hvps": None if at_hit is None else at_hit["hvp"],
        "gaps": gaps,
        "calls": calls,
        "path": path,
    }


def plot(path: Path, curves: dict[str, dict[str, dict[str, Any]]]) -> None:
    """For each start the gap against the oracle calls, and x3 against the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(curves), 3, figsize=(14, 4 * len(curves)), layout="constrained", squeeze=False)
    z = torch.linspace(-1, 1, 400, dtype=torch.float64)
    for row, (start, results) in zip(axes, curves.items(), strict=True):
        row[2].plot(z, valley(z), color="lightgrey", zorder=0)
        for name, result in results.items():
            third = [p[2] for p in result["path"]]
            row[0].plot(result["calls"], [max(g, 1e-16) for g in result["gaps"]], label=name)
            row[1].plot(range(len(third)), third, label=name)
            row[2].plot(third, valley(torch.tensor(third, dtype=torch.float64)), ".", markersize=4, label=name)
        row[0].set(xlabel="gradients and HVPs", ylabel="gap", xscale="symlog", yscale="log", title=f"start {start}")
        row[0].axhline(TOLERANCE, color="grey", linestyle=":")
        row[1].set(xlabel="outer steps", ylabel="$x_3$", xscale="symlog")
        row[2].set(xlabel="$x_3$", ylabel="$w(x_3)$")
        row[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns the numbers that it writes."""
    parser = argparse.ArgumentParser(description="Compare how minimax methods leave a saddle point.")
    parser.add_argument(
        "--optimizer", nargs="+", choices=sorted(METHODS), default=list(METHODS), help="default: all of them"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each perturbed method; default: 3")
    parser.add_argument("--steps", type=int, default=3000, help="most outer steps; default: 3000")
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of the PNG and JSON; default: results"
    )
    args = parser.parse_args(arguments)
    for name in ("seeds", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, not {getattr(args, name)}")

    rows: list[list[object]] = []
    curves: dict[str, dict[str, dict[str, Any]]] = {start: {} for start in STARTS}
    numbers: list[dict[str, Any]] = []
    for start, point in STARTS.items():
        for name in tqdm(args.optimizer, desc=start):
            results = [
                run(METHODS[name], point, args.steps, seed) for seed in range(args.seeds if name in RANDOM else 1)
            ]
            if name in DRAWN:
                curves[start][name] = results[0]
            summary = {k: [r[k] for r in results] for k in ("hit", "steps", "restarts", "error", "gradients", "hvps")}
            numbers.append({"start": start, "method": name, **summary})
            rows.append([f"{start}: {name}", *map(middle, summary.values())])
    header = ("", "steps to 1e-8", "steps in all", "restarts", "error of x3", "gradients to 1e-8", "HVPs to 1e-8")
    print(f"\nW-shaped minimax problem (medians, ranges in brackets)\n\n{table(header, rows)}\n")
    stem = args.out / "saddle_escape"
    plot(stem.with_suffix(".png"), curves)
    result = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "environment": environment(),
        "results": numbers,
    }
    save_json(stem.with_suffix(".json"), result)
    print(f"Wrote {stem}.png and {stem}.json")
    return result


def middle(values: list[Any]) -> object:
    """Median and, if they differ, range."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return f"never in {len(values) - len(known)}" if known else None
    center = median(known)
    if min(known) == max(known) or (isinstance(center, float) and max(known) < 1e-2):
        return center
    return f"{center:g} ({min(known)}-{max(known)})"


if __name__ == "__main__":
    main()

r"""Escape a saddle point: gradient methods on a minimax problem with a W-shaped valley.

.. math::
    \min_{x \in R^3} \max_{y \in R^2}\ w(x_3) - 10 y_1^2 + x_1 y_1 - 5 y_2^2 + x_2 y_2

w is even and twice continuously differentiable, with a maximum at 0 and minima at +-0.6. So the maximum over y has a
strict saddle point at the origin, close to the first start. Which methods leave it, after how many steps and oracle
calls?

    python -m recipes.saddle_escape                    # a table and a picture, about a minute
    python -m recipes.saddle_escape --seeds 20         # medians over more seeds of the perturbed runs

Problem: arXiv:2307.00126, appendix E (after arXiv:1711.02838).
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from .common import Parser, draw, figure, progress, save, show
from .common.seeds import stream

ROOT, WIDTH = 0.1, 5.0  # square root of w's parameter, and its L
BEST = -16 / 3e3  # value of the minima
TOLERANCE = 1e-8
STARTS = {"beside the saddle": (1e-3, 1e-3, 1e-16), "on a slope": (0.0, 0.0, 1.0)}
# f is 20-smooth, with condition number 2 in y.
ASCENT: dict[str, Any] = {"lower_lr": 1 / 20, "lower_steps": 10, "lower_momentum": (2**0.5 - 1) / (2**0.5 + 1)}
PRINTED: dict[str, Any] = {**ASCENT, "lr": 0.5, "restart_radius": 0.2, "restart_period": 400, "lower_restart": "zero"}

Method = partial[Any]
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
    """Return the W-shaped function w."""
    s, end = ROOT, WIDTH * ROOT
    a = z.abs()
    outer = a - end - s
    return torch.where(
        a > end,
        s * outer**2 + outer**3 / 3 - (3 * WIDTH + 1) * s**3 / 3,
        torch.where(a > s, s**3 / 3 - s**2 * a, a**3 / 3 - s * z**2),
    )


def loss(x: Tensor, y: Tensor) -> Tensor:
    """Return the objective of both players."""
    return valley(x[2]) - 10 * y[0] ** 2 + x[0] * y[0] - 5 * y[1] ** 2 + x[1] * y[1]


def gap(x: Tensor) -> float:
    """Return how far the maximum over y lies above its minimum over x."""
    x = x.detach()
    return float(valley(x[2]) + x[0] ** 2 / 40 + x[1] ** 2 / 20) - BEST


def run(method: Method, start: tuple[float, ...], steps: int, seed: int = 0) -> dict[str, Any]:
    """Run one method until it stops by itself, diverges, or (without a stopping rule) reaches the minimum."""
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = method([x], [y], generator=stream(seed, "method"))
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


def points(result: dict[str, Any]) -> list[dict[str, float]]:
    """Return the curve of a run, for the plot."""
    third = [x[2] for x in result["path"]]
    w = valley(torch.tensor(third, dtype=torch.float64)).tolist()
    lines = zip(result["calls"], result["gaps"], third, w, strict=True)
    return [
        {"step": k, "calls": calls, "gap": max(gap, 1e-16), "x3": x3, "w": value}
        for k, (calls, gap, x3, value) in enumerate(lines)
    ]


def middle(values: list[Any]) -> object:
    """Return the median and, if the values differ, their range."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return f"never in {len(values) - len(known)}" if known else None
    center = median(known)
    if min(known) == max(known) or (isinstance(center, float) and max(known) < 1e-2):
        return center
    return f"{center:g} ({min(known)}-{max(known)})"


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__)
    parser.methods(METHODS, "all of them")
    parser.option("seeds", 3, "runs of each perturbed method")
    parser.option("steps", 3000, "maximal number of outer steps")
    args = parser.parse(arguments)
    chosen = args.optimizer or [*METHODS]
    rows: list[list[object]] = []
    curves: dict[str, dict[str, list[dict[str, float]]]] = {start: {} for start in STARTS}
    numbers: list[dict[str, Any]] = []
    for start, point in STARTS.items():
        for name in progress(chosen, start, unit="method"):
            seeds = range(args.seeds if name in RANDOM else 1)
            results = [run(METHODS[name], point, args.steps, seed) for seed in seeds]
            if name in DRAWN:
                curves[start][name] = points(results[0])
            summary = {k: [r[k] for r in results] for k in ("hit", "steps", "restarts", "error", "gradients", "hvps")}
            numbers.append({"start": start, "method": name, **summary})
            rows.append([f"{start}: {name}", *map(middle, summary.values())])
    header = ("", "steps to 1e-8", "total steps", "restarts", "error of x3", "gradients to 1e-8", "HVPs to 1e-8")
    title = "W-shaped minimax problem"
    show(f"{title} (medians, ranges in brackets)", header, rows)
    stem = args.out / "saddle_escape"
    z = torch.linspace(-1, 1, 400, dtype=torch.float64)
    with figure(stem, title, (14, 8)) as canvas:
        for row, (start, lines) in zip(canvas.subplots(2, 3), curves.items(), strict=True):
            row[0].axhline(TOLERANCE, color="grey", linestyle=":")
            row[2].plot(z, valley(z), color="lightgrey", zorder=0)
            along = {"xscale": "symlog", "xlim": (0, None)}
            row[0].set(title=f"start {start}")
            draw(row[0], lines, "calls", "gap", xlabel="gradients and HVPs", yscale="log", **along)
            draw(row[1], lines, "step", "x3", xlabel="outer steps", ylabel="$x_3$", **along)
            draw(row[2], lines, "x3", "w", xlabel="$x_3$", ylabel="$w(x_3)$")
            row[0].legend(fontsize="small")
    return save(args, stem, {"results": numbers})


if __name__ == "__main__":
    main()

"""Train models from scratch on a mixture, to judge its shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common import Interval, interval
from ..common.seeds import stream
from .network import Ranks, mean_over, network, shared
from .texts import windows

__all__ = ["excess", "mean_curve", "mixed", "trained", "valleys"]


def mixed(texts: Sequence[Tensor], weights: Sequence[float], count: int, length: int, g: torch.Generator) -> Tensor:
    """Return a batch of windows: each text's share, rounded up or down at random (systematic sampling)."""
    ends = torch.tensor([0.0, *weights], dtype=torch.float64).cumsum(0)
    ends = (ends / ends[-1] * count + torch.rand((), generator=g, dtype=torch.float64)).floor().long()
    counts = ends.diff().tolist()
    return torch.cat([windows(text, n, length, g) for text, n in zip(texts, counts, strict=True) if n])


def trained(
    texts: Sequence[Tensor], weights: Sequence[float], test: Tensor, args: Any, seed: int, ranks: Ranks
) -> list[dict[str, float]]:
    """Train a model from scratch on these shares; return the held-out loss against the characters seen."""
    model, generator = network(args, seed, ranks, replicate=True), stream(seed, "batches")
    adam = torch.optim.Adam(model.parameters(), lr=args.lower_lr)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, args.lower_lr, args.train_steps, cycle_momentum=False)
    judged = shared(windows(test, args.judged, args.length, stream(0, "data")), ranks)
    curve = []
    for k in range(args.train_steps):
        batch = shared(mixed(texts, weights, args.batch, args.length, generator), ranks)
        adam.zero_grad()
        model(batch).mean().backward()
        adam.step()
        rate.step()
        if (k + 1) % max(args.train_steps // 6, 1) == 0 or k + 1 == args.train_steps:
            with torch.no_grad():
                loss = torch.cat([model(part) for part in torch.split(judged, args.batch)]).mean()
            characters = (k + 1) * args.batch * args.length
            curve.append({"characters": characters, "held-out loss": float(mean_over(ranks, loss))})
    return curve


def mean_curve(curves: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """Return the mean curve over the seeds."""
    return [
        {key: sum(p[key] for p in points) / len(points) for key in points[0]} for points in zip(*curves, strict=True)
    ]


def valleys(grid: Mapping[float, Sequence[float]]) -> list[float]:
    """Return each seed's share of least loss: the vertex of a fitted parabola, or the best of a grid of one or two."""
    if len(grid) < 3:
        seeds = range(len(next(iter(grid.values()))))
        return [min(grid, key=lambda share: grid[share][k]) for k in seeds]
    shares = torch.tensor([*grid], dtype=torch.float64)
    found = torch.tensor([*grid.values()], dtype=torch.float64)  # (shares, seeds)
    powers = torch.stack([torch.ones_like(shares), shares, shares**2], 1)
    _, slope, curvature = torch.linalg.lstsq(powers, found).solution
    vertices: list[float] = (-slope / (2 * curvature)).tolist()
    return vertices


def excess(found: Sequence[float], best: Sequence[float]) -> Interval:
    """Return the interval of the excess over the best, paired by seed."""
    return interval([a - b for a, b in zip(found, best, strict=True)])

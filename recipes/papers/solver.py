"""PZOBO (arXiv:2110.07004) with few upper parameters and a lower solver that cannot be differentiated."""

from __future__ import annotations

import math
import time
from functools import lru_cache
from typing import Any

from ..black_box import METHODS, Tolls
from ..common.search import axis
from .experiment import Arm, Better, Experiment, Point, Trial

__all__ = ["EXPERIMENTS"]

LEAST = 1e-6  # smallest part of the gap in a score


@lru_cache(maxsize=16)  # all seeds
def reference(tolls: int, seed: int, solves: int) -> tuple[float, float]:
    """Return the upper loss without tolls, and the least loss of two long searches."""
    ends = [METHODS[name](Tolls(tolls, seed), solves, seed, size=0.5) for name in ("Nelder-Mead", "COBYLA")]
    return ends[0][0]["value"], min(points[-1]["value"] for points in ends)


def run(trial: Trial) -> list[Point]:
    """Run until the lower solves are spent; the score is log10 of the remaining gap to the best tolls."""
    scale: Any = trial.scale
    start, best = reference(scale["tolls"], trial.seed, scale["reference"])
    begun = time.perf_counter()
    points = trial.make(Tolls(scale["tolls"], trial.seed), round(trial.budget), trial.seed, **trial.setting)
    seconds = time.perf_counter() - begun

    def score(value: float) -> float:
        gap = max(start - best, LEAST * start)  # tolls may not help at all
        return math.log10(max((value - best) / gap, LEAST)) if math.isfinite(value) else math.inf

    return [
        {"spent": p["solves"], "steps": k, "seconds": seconds * k / max(len(points) - 1, 1), "score": score(p["value"])}
        for k, p in enumerate(points)
    ]


GRADIENT = {"lr": axis(0.1, 0.3, 1.0), "smoothing": axis(1e-3, 1e-2, 1e-1)}
SIZE = {"size": axis(0.3, 1.0)}
EXPERIMENTS = [
    Experiment(
        id="000-solver",
        paper="arXiv:2110.07004",
        figure="our own, on the method's use",
        claim="with 8 upper parameters and a lower solver from scipy, PZOBO with 8 orthogonal directions comes nearer "
        "to the solution than HOZOG, finite differences, CMA-ES, Nelder-Mead and COBYLA at equal lower solves, due to "
        "its differences of the solver",
        value="not in the paper",
        run=run,
        arms={
            name: Arm(METHODS[name], grid)
            for name, grid in {
                "PZOBO": GRADIENT,
                "PZOBO, one direction": GRADIENT,
                "HOZOG": GRADIENT,
                "finite differences": GRADIENT,
                "CMA-ES": SIZE,
                "Nelder-Mead": SIZE,
                "COBYLA": SIZE,
                "direct only": {"lr": axis(0.3)},
            }.items()
        },
        rule=Better(
            method="PZOBO",
            rivals=("HOZOG", "finite differences", "CMA-ES", "Nelder-Mead", "COBYLA"),
            control="direct only",
            without=("lr", "smoothing"),
            least=0.1,
            speed=True,
        ),
        score="log10 of the remaining part of the gap to the best known tolls",
        unit="lower solves",
        scales={
            "smoke": {"tolls": 3, "budget": 24, "seeds": 3, "reference": 60, "search": False},
            "cpu": {"tolls": 8, "budget": 100, "seeds": 8, "reference": 600},
            "full": {"tolls": 8, "budget": 300, "seeds": 20, "reference": 2000},
        },
        shares=(),
        moves=8,
        joint=(("lr", "smoothing"),),
        departures=(
            "not an experiment of the paper: random networks of roads, a problem of our own",
            "the tolls start at zero, where the direct gradient is zero: the control stays there",
            "scipy's searches and CMA-ES are scored at their best point so far, the others at the current one",
            "a difference of 0.1, a fifth of the remaining gap, does not count",
            "the best known tolls are the better result of two long searches from one start: on two of the eight "
            "networks CMA-ES found better ones, so that the scores of others there are those of a local minimum",
            "with as many orthogonal directions as tolls, PZOBO, HOZOG and finite differences agree by construction up "
            "to second-order errors: their tie says nothing about the method",
        ),
    )
]

"""Calls to a stationary point of badly conditioned problems (arXiv:2307.00126, rates of its theorems)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import bilevel_optim as bo

from ..benchmarks.conditioning import TARGET, Problem, quadratic, quartic
from ..common.search import axis
from .experiment import Arm, Better, Experiment, Point, Trial
from .runner import follow

__all__ = ["EXPERIMENTS"]


def rahgd(x: Any, y: Any, *, kappa: float, theta: float, agd: bool = True, **options: Any) -> bo.RAHGD:
    """Return RAHGD with the momentum of the theory on y, and 1 - theta on x."""
    root = math.sqrt(kappa) if agd else 1.0
    return bo.RAHGD(
        x, y, momentum=1 - theta, lower_momentum=(root - 1) / (root + 1), on_converged="continue", **options
    )


def plain(kind: type[bo.BilevelOptimizer], x: Any, y: Any, *, kappa: float, **options: Any) -> bo.BilevelOptimizer:
    """Return a method that does not use the condition number."""
    return kind(x, y, **options)


def run(trial: Trial, make: Callable[[float, int], Problem]) -> list[Point]:
    """Run until the true gradient is small or the calls are spent; the score of a point is its norm."""
    kappa = trial.scale["kappa"]
    problem, setting = make(kappa, trial.seed), dict(trial.setting)
    setting["lr"] /= problem.smoothness
    optimizer = trial.make(
        [problem.x], [problem.y], kappa=kappa, lower_lr=1 / problem.lower_smoothness, check_finite=False, **setting
    )

    def calls() -> float:
        return float(sum(optimizer.oracle_counts.values()))

    def norm() -> float:
        return float(problem.gradient().norm())

    return follow(
        lambda: optimizer.step(problem.upper, problem.lower), lambda: {"spent": calls(), "score": norm()},
        lambda: trial.budget if norm() <= TARGET or not norm() < 1e6 else calls(), trial.budget, evaluations=500,
    )  # fmt: skip


LR, STEPS = axis(1.0, 1.5, most=1.9), axis(3, 10, 30, least=1)
OUTER = {"lr": LR, "lower_steps": STEPS, "linear_steps": axis(1, 5, 12, least=1)}
ARMS = {
    "RAHGD": Arm(rahgd, {**OUTER, "theta": axis(0.1, 0.3, most=1.0)}, "B is 5 times the length of the first step"),
    "RAHGD, outer GD": Arm(partial(rahgd, theta=1.0), OUTER),
    "RAHGD, inner GD": Arm(partial(rahgd, agd=False), {**OUTER, "theta": axis(0.1, 0.3, most=1.0)}),
    "AID": Arm(partial(plain, bo.AID), OUTER),
    "ITD": Arm(partial(plain, bo.ITD), {"lr": LR, "lower_steps": STEPS}),
    "BA": Arm(partial(plain, bo.BA), {"lr": LR, "lower_steps": STEPS, "linear_steps": axis(12)}),
}


def experiment(name: str, make: Callable[[float, int], Problem], what: str) -> Experiment:
    """Return the experiment on one of the two problems."""
    return Experiment(
        id=f"003-kappa-{name}",
        paper="arXiv:2307.00126",
        figure="theorem",
        claim="at condition number 100 RAHGD needs fewer calls than AID, ITD and BA, due to its momentum on x "
        f"({what})",
        value="kappa^3.25 eps^-1.75 against kappa^4 eps^-2 (AID)",
        run=partial(run, make=make),
        arms=ARMS,
        rule=Better(
            method="RAHGD", rivals=("AID", "ITD", "BA"), control="RAHGD, outer GD", without=("theta",), speed=True
        ),
        score="log10 of the calls to a gradient norm of 1e-3",
        unit="gradients and products",
        scales={
            "smoke": {"kappa": 30.0, "budget": 2000, "seeds": 3, "search": False},
            "cpu": {"kappa": 100.0, "budget": 6000, "seeds": 5},
            "full": {"kappa": 1000.0, "budget": 100_000, "seeds": 10},
        },
        target=TARGET,
        shares=(),
        moves=40,
        departures=("two problems of 10 variables at each level; the theorems are about a class of problems",),
    )


EXPERIMENTS = [
    experiment("quadratic", quadratic, "both levels ill-conditioned"),
    experiment("quartic", quartic, "a saddle point; only the lower level is ill-conditioned"),
]

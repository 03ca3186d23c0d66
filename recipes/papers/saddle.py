"""Escape from the saddle point of the W-shaped minimax problem (arXiv:2307.00126, figure 3)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import bilevel_optim as bo

from ..common.search import axis
from ..common.seeds import begin, stream
from ..saddle_escape import ASCENT, STARTS, TOLERANCE, gap, loss
from .experiment import Arm, Better, Experiment, Point, Trial
from .runner import follow

__all__ = ["EXPERIMENTS"]

ROOTS: dict[str, Any] = {"lower_lr": 1 / 20, "lower_momentum": ASCENT["lower_momentum"]}


def pragda(x: list[torch.Tensor], y: list[torch.Tensor], *, theta: float, **options: Any) -> bo.PRAGDA:
    """Return PRAGDA with momentum 1 - theta."""
    return bo.PRAGDA(
        x, y, momentum=1 - theta, restart_period=400, perturbation=1e-3, on_converged="continue", **ROOTS, **options
    )


def run(trial: Trial, start: tuple[float, ...]) -> list[Point]:
    """Run to the minimum or the end of the budget; the score of a point is the gap."""
    begin(trial.seed, "start")
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = trial.make([x], [y], generator=stream(trial.seed, "method"), **trial.setting)

    def spent() -> float:
        counts = optimizer.oracle_counts
        reached = gap(x) <= TOLERANCE
        return trial.budget if reached else float(sum(counts[k] for k in ("upper_grad", "lower_grad", "hvp")))

    def measure() -> dict[str, float]:
        counts = optimizer.oracle_counts
        calls = sum(counts[k] for k in ("upper_grad", "lower_grad", "hvp"))
        return {"spent": float(calls), "score": max(gap(x), 1e-16)}

    return follow(lambda: optimizer.step(lambda: loss(x, y)), measure, spent, trial.budget, evaluations=2000)


ARMS = {
    "PRAGDA": Arm(
        pragda,
        {
            "lr": axis(0.5, 1.0, 2.0),
            "lower_steps": axis(1, 3, 10, least=1),
            "theta": axis(0.1, 0.2, 0.5, most=1.0),
            "restart_radius": axis(0.05, 0.2, 1.0, most=1e3),
        },
    ),
    "iMCN": Arm(
        partial(bo.iMCN, **ROOTS),
        {
            "lr": axis(0.5, 1.0, 2.0),
            "lower_steps": axis(1, 3, 10, least=1),
            "cubic": axis(0.5, 2.0, 8.0),
            "cubic_steps": axis(3, 6, 12, least=1),
            "linear_steps": axis(1, 2, least=1, most=2),
        },
    ),
    "GDA": Arm(bo.GDA, {"lr": axis(0.5, 1.0, 2.0), "lower_lr": axis(0.02, 0.05, 0.1)}),
    "no momentum": Arm(
        partial(pragda, theta=1.0),
        {
            "lr": axis(0.5, 1.0, 2.0),
            "lower_steps": axis(1, 3, 10, least=1),
            "restart_radius": axis(0.05, 0.2, 1.0, most=1e3),
        },
    ),
}


EXPERIMENTS = [
    Experiment(
        id="003-saddle-near",
        paper="arXiv:2307.00126",
        figure="figure 3a",
        claim="PRAGDA reaches the minimum with fewer calls than iMCN, due to its momentum (start near the saddle)",
        value="no number in the text: PRAGDA faster than iMCN",
        run=partial(run, start=STARTS["beside the saddle"]),
        arms=ARMS,
        rule=Better(method="PRAGDA", rivals=("iMCN",), control="no momentum", without=("theta",), speed=True),
        score="log10 of the calls to a gap of 1e-8",
        unit="gradients and products",
        scales={
            "smoke": {"budget": 1000.0, "seeds": 3, "search": False},
            "cpu": {"budget": 3000.0, "seeds": 20},
            "full": {"budget": 10000.0, "seeds": 50},
        },
        target=TOLERANCE,
        shares=(),
        moves=40,
        departures=(
            "GDA is shown for comparison; the text does not mention it",
            "the printed grid of step sizes diverges (10 to 5,000); here the step size of y is 1/20, all others are "
            "searched",
            "PRAGDA also perturbs its first point; otherwise its first escape would be due to rounding",
            "a joint product counts as one call",
        ),
    )
]

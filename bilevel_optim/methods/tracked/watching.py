"""Warnings of the methods with a memory of each lower problem."""

from __future__ import annotations

import torch
from torch import Tensor

from ...oracle.session import Checks
from ...tracing import is_tracing
from .rows import Rows

__all__ = ["PATIENCE", "is_large_beta", "warn_if_beta_is_large", "warn_if_floor_is_active"]

LOUD_BETA, PATIENCE = 0.3, 100


def is_large_beta(beta: float) -> bool:
    """Return True if `warn_if_beta_is_large` warns of this weight."""
    return beta > LOUD_BETA


def warn_if_beta_is_large(checks: Checks, beta: float, steps: int) -> None:
    """Warn of a weight, in units of the fraction of tasks in a step, that makes their drawing the largest error."""
    if steps > PATIENCE and is_large_beta(beta) and not is_tracing():  # a graph does not know the step count
        checks.alert(
            "loud beta",
            f"beta = {beta:g}, in units of the fraction of tasks in a step, makes the random choice of tasks the "
            "largest error of the hypergradient; use 0.1 or less, or schedule='cube_root'",
            torch.ones((), dtype=torch.bool, device="cpu"),
        )


def warn_if_floor_is_active(checks: Checks, projected: Rows, rows: int, least: float) -> None:
    """Warn if the floor changes the Hessians of at least half of the visited rows."""
    count: Tensor | None = projected.get("projected_H")
    if count is not None:
        checks.alert_if(
            "floor",
            lambda: (
                f"floor={least:g} is above the least eigenvalue of the lower Hessian for half of the tasks or more "
                '(see diagnostics["projected_H"]), so that the hypergradient is that of another problem; use a floor '
                "below the curvature of the lower loss, or add curvature to the loss"
            ),
            lambda count: 2 * count >= rows,
            count,
        )

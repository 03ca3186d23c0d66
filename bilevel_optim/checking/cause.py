"""The cause of a bias, and advice on what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..optimizer.base import BilevelOptimizer

__all__ = ["cause"]

PART = 0.8  # a setting is the cause if another value leaves no more than this part of the error
OWN = ("linear_steps", "linear_lr", "linear_solver", "neumann_steps", "damping", "truncate", "proximal")


def cause(
    optimizer: BilevelOptimizer,
    error: float,
    at_solution: float,
    figures: Mapping[str, Any],
    retried: Callable[[], float],
) -> str:
    """Describe the cause of an estimate's bias, found by trials where possible.

    Args:
        optimizer: the method.
        error: relative error of its estimate.
        at_solution: the same from the exact lower solution.
        figures: diagnostics of the estimate from the exact lower solution.
        retried: repeats that estimate with the current settings, and returns its error.
    """
    kind = type(optimizer).__name__
    if not optimizer.declared.converges and optimizer.declared.upper_update:
        return (
            f"{kind} sets .grad to a step of its own, not to an estimate of the hypergradient (see its docstring): "
            "this check does not apply to it; see whether the upper loss falls"
        )
    if at_solution < 0.1 * error:
        return (
            "the lower solve is the cause, because the estimator is good at the exact lower solution: use more "
            "lower_steps, a better lower_lr or lower_optimizer, or make some steps before the check (warm start)"
        )
    own = "the estimator's own settings are the cause, because it is as bad at the exact lower solution: "
    if at_solution < 0.5 * error:
        own = (
            "the lower solve and the estimator's own settings are the cause, because some of the error is left at the "
            "exact lower solution: use more lower_steps; and "
        )
    if not optimizer.declared.converges:
        return f"{own}{kind} leaves a part of the hypergradient out, whatever its settings: use another method"
    if step := optimizer.declared.difference_step:
        value = getattr(optimizer, step)
        for factor in (0.25, 4.0):
            if (found := _with(optimizer, step, value * factor, retried)) <= PART * at_solution:
                return (
                    f"{own}{step} = {value:.3g}: use another {step}, such as {value * factor:.3g}, with which the "
                    f"error is at most {found:.2g} (the method's docstring says how the error depends on it)"
                )
        return (
            f"{own}not {step} = {value:.3g}, because a fourth and four times of it are no better; use more lower_steps "
            "(for the copies) or more directions, and check that the losses are those that you mean"
        )
    residual = figures.get("linear_relative_residual")
    unsolved = None if residual is None else float(torch.as_tensor(residual).max())
    if unsolved is not None and unsolved > 0.1 * at_solution:
        return (
            f"{own}the residual of the linear system is {unsolved:.2g} of its right-hand side: use more linear_steps, "
            "another linear_lr or linear_solver"
        )
    left_out = figures.get("start_influence")
    if left_out is not None and (share := float(torch.as_tensor(left_out).max())) > 0.1 * at_solution:
        return (
            f"{own}the differentiated lower steps leave out {share:.2g} of how y responds to x (see "
            "diagnostics['start_influence']): use more lower_steps, a larger lower_lr, or a larger truncate (if set)"
        )
    if not optimizer.declared.lower_steps:
        return (
            f"{own}{kind} is a single loop, whose estimate is good only after some steps: check again after more "
            "steps; if the error stays, check that the losses are those that you mean"
        )
    has = [name for name in OWN if hasattr(optimizer, name)] or ["lower_steps"]
    return f"{own}change {', '.join(has)}, and check that the losses are those that you mean"


def _with(optimizer: BilevelOptimizer, name: str, value: float, measured: Callable[[], float]) -> float:
    """Return ``measured()`` with another value of a setting; warnings are off meanwhile."""
    before = {key: getattr(optimizer, key) for key in (name, "check_finite")}
    try:
        setattr(optimizer, name, value)
        optimizer.check_finite = False
        found = measured()
        return found if math.isfinite(found) else math.inf
    finally:
        for key, own in before.items():
            setattr(optimizer, key, own)

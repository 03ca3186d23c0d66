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
    step: str | None,
) -> str:
    """Describe the cause of an estimate's bias, found by trials where possible.

    Args:
        optimizer: the method.
        error: relative error of its estimate.
        at_solution: the same from the exact lower solution.
        figures: diagnostics of the estimate from the exact lower solution.
        retried: repeats that estimate with the current settings, and returns its error.
        step: name of the setting that differences are divided by, if there is one.
    """
    if at_solution < 0.1 * error:
        return (
            "the lower solve is the cause, as the estimator is good at the exact lower solution: more lower_steps, a "
            "better lower_lr or lower_optimizer, or some steps of warm start"
        )
    kind = type(optimizer).__name__
    own = "the estimator's own settings are the cause, as it is as bad at the exact lower solution: "
    if at_solution < 0.5 * error:
        own = (
            "the lower solve and the estimator's own settings are the cause, as some of the error is left at the exact "
            "lower solution: more lower_steps, and "
        )
    if not optimizer.declared.converges:
        return f"{own}{kind} leaves a part of the hypergradient out, whatever its settings: another method"
    if step is not None:
        value = getattr(optimizer, step)
        for factor in (0.25, 4.0):
            if (found := _with(optimizer, step, value * factor, retried)) <= PART * at_solution:
                return (
                    f"{own}{step} = {value:.3g}: another {step}, such as {value * factor:.3g}, with which the error is "
                    f"{found:.2g} (its error law is in the docstring)"
                )
        return (
            f"{own}not {step} = {value:.3g}, as a fourth and four times of it are no better; more lower_steps (of the "
            "copies), more directions, or the losses are not what they are meant to be"
        )
    residual = figures.get("linear_relative_residual")
    unsolved = None if residual is None else float(torch.as_tensor(residual).max())
    if unsolved is not None and unsolved > 0.1 * at_solution:
        return (
            f"{own}the linear system is solved to {unsolved:.2g} of its right-hand side: more linear_steps, another "
            "linear_lr or linear_solver"
        )
    if not optimizer.declared.lower_steps:
        return f"{own}{kind} is a single loop, whose estimate is good once it has settled: check after some steps"
    has = [name for name in OWN if hasattr(optimizer, name)] or ["lower_steps"]
    return f"{own}{', '.join(has)}, or the losses are not what they are meant to be"


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

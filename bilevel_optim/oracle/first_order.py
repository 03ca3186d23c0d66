"""Gradients of one loss at the placed point, on a whole sample or on its parts one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..problem.objective import Sample
from ..problem.vector import Vector
from .point import Point

__all__ = ["lower_slope", "none_to_zeros", "slopes", "upper_slope"]


def slopes(
    oracle: Point,
    level: str,
    sample: Sample,
    x: Vector,
    y: Vector,
    variables: Sequence[Tensor],
    *,
    frozen: bool = False,
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return a loss and its gradient in some variables; None for those that it does not depend on.

    Args:
        oracle: evaluates the loss.
        level: ``"upper"`` or ``"lower"``.
        sample: the sample to evaluate on.
        x: the upper variables.
        y: the lower variables; the loss must depend on some variable.
        variables: tensors to differentiate in.
        frozen: whether features are constants.
    """
    if sample.parts is None:
        features = oracle.frozen(level, sample) if frozen else None
        loss = oracle.evaluated(level, sample, x, y, features=features)
        return loss, oracle.differentiate(loss, variables)
    loss = torch.zeros((), device=oracle.device)
    total: list[Tensor | None] = [None] * len(variables)
    for part in sample.parts:
        with oracle.session.buffers_kept():
            more, gradients = slopes(oracle, level, part, x, y, variables, frozen=frozen)
        loss = loss + more.detach()
        total = [s if t is None else t if s is None else s + t for s, t in zip(total, gradients, strict=True)]
        del more, gradients  # frees the graph before the next one is built
    if level == "lower":
        oracle.session.lower_sample = sample
    share = 1 / len(sample.parts)
    return loss * share, [None if t is None else t * share for t in total]


def lower_slope(oracle: Point, level: str, sample: Sample) -> tuple[Tensor, Vector]:
    """Return the value of a loss and its gradient in y alone, with constant features.

    Args:
        oracle: evaluates the loss, and counts its gradient.
        level: ``"upper"`` or ``"lower"``.
        sample: the sample to evaluate on.
    """
    session = oracle.session
    with session.buffers_kept(), oracle.placed() as (x, y):
        loss, gradients = slopes(oracle, level, sample, x, y, y, frozen=True)
    if level == "lower":
        session.require_reached(gradients, oracle.lower_names)
    oracle.count(f"{level}_grad")
    loss, gradient = oracle.averaged(loss.detach(), none_to_zeros(gradients, oracle.y))
    oracle.checks.scalar("loss", loss)
    return loss, gradient


def upper_slope(oracle: Point, level: str, sample: Sample) -> tuple[Tensor, Vector]:
    """Return the value of a loss and its gradient in x alone; arguments as in `lower_slope`."""
    session = oracle.session
    with session.buffers_kept(), oracle.placed() as (x, y):
        loss, gradients = slopes(oracle, level, sample, x, y, x)
    session.note_reached(gradients)
    oracle.count(f"{level}_grad")
    loss, gradient = oracle.averaged(loss.detach(), none_to_zeros(gradients, oracle.x))
    oracle.checks.scalar("loss", loss)
    oracle.checks.finite(f"{level}_grad", gradient)
    return loss, gradient


def none_to_zeros(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> Vector:
    """Return gradients with zeros for the tensors without one."""
    return Vector([torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)])

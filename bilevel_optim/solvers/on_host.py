"""Conjugate gradients on a CPU: their scalars are Python numbers, which cost less than operations on tensors of one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..problem.vector import Vector

__all__ = ["conjugate_gradients", "relative"]


def conjugate_gradients(
    product: Callable[[Vector], Vector], b: Vector, start: Vector | None, steps: int, tol: float, atol: float
) -> tuple[Vector, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The iteration of `bo.linear.cg` for one system.

    Args:
        product: v -> H v, with the damping.
        b: right-hand side.
        start: where to start; None: zero.
        steps: largest number of iterations.
        tol: relative tolerance of the residual.
        atol: absolute tolerance of the residual.

    Returns:
        The entries of a `LinearSolution`.
    """
    norm = b.norm()
    b_norm = float(norm)
    floor = max(max(tol, torch.finfo(b[0].dtype).eps) * b_norm, atol) ** 2
    v, r = (b.zeros_like(), b) if start is None else (start, b - product(start))
    p, square = r, float(r.dot(r))
    first, done, indefinite = square, 0, False
    while done < steps and square > floor:
        hp = product(p)
        curvature = float(p.dot(hp))
        indefinite = curvature <= 0
        if indefinite:
            break
        alpha = square / curvature if math.isfinite(curvature) else math.nan
        v, r = _added(v, p, alpha), _added(r, hp, -alpha)
        before, square = square, float(r.dot(r))
        p = _added(r, p, square / before)
        done += 1
    residual = norm.new_tensor(square).sqrt()
    diverged = square > 100 * (b_norm**2 if start is None else max(b_norm**2, first))
    count, *flags = (torch.tensor(figure, device="cpu") for figure in (done, indefinite, diverged))
    return v, residual, count, flags[0], relative(residual, norm), flags[1]


def relative(residual: Tensor, norm: Tensor) -> Tensor:
    """A residual in units of the right-hand side; finite if both are."""
    return residual / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def _added(v: Vector, p: Vector, alpha: float) -> Vector:
    return Vector(torch._foreach_add(v, p, alpha=alpha))

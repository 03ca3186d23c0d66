"""One step of conjugate gradients after the product: two inner products, three updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .counter import precise
from .registry import operator

__all__ = ["Algebra", "cg_step", "iteration"]


class Algebra(NamedTuple):
    """Operations on vectors, and on the scalars made of them.

    Attributes:
        dot: the inner product; with many systems, one for each.
        add: ``(vector, other, alpha) -> vector + alpha * other``.
        where: chooses between two scalars, as ``torch.where`` does.
    """

    dot: Callable[[Any, Any], Any]
    add: Callable[[Any, Any, Any], Any]
    where: Callable[[Any, Any, Any], Any] = torch.where


def iteration(
    algebra: Algebra, v: Any, r: Any, p: Any, hp: Any, rr: Any, active: Any, least: Any
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Run the part of an iteration after the product: `cg_step`, for vectors and scalars of any kind."""
    dot, add, where = algebra
    curvature = dot(p, hp)
    negative = active & (curvature <= least)
    active = active ^ negative
    # A finished solve is frozen by zero steps instead of a branch, which would need the host.
    alpha = where(active, rr / where(active, curvature, 1.0), 0.0)
    v, r = add(v, p, alpha), add(r, hp, -alpha)
    length = dot(r, r)
    p = add(r, p, where(active, length / where(rr > 0, rr, 1.0), 0.0))
    return v, r, p, where(active, length, rr), curvature, negative


def cg_step(
    v: Tensor, r: Tensor, p: Tensor, hp: Tensor, rr: Tensor, active: Tensor, least: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Make one step for every active system; the others stay as they are.

    .. math::
        \alpha = \|r\|^2 / p^\top H p, \qquad v' = v + \alpha p, \qquad r' = r - \alpha H p, \qquad
        p' = r' + p\, \|r'\|^2 / \|r\|^2 .

    Args:
        v: solutions so far, shape (lanes, n).
        r: residuals.
        p: directions.
        hp: products of H with the directions.
        rr: squared lengths of the residuals, float64, shape (lanes,).
        active: mask of the systems that go on, shape (lanes,).
        least: curvatures :math:`p^\top H p` up to this count as non-positive, float64, shape (lanes,).

    Returns:
        The new v, r, p and rr; the curvatures, float64; a mask of the active systems that stay because their direction
        has non-positive curvature.

    Example:
        >>> H, b = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)
        >>> v, r, p, rr = torch.zeros(1, 2), b, b, torch.tensor([2.0]).double()
        >>> for _ in range(2):
        ...     v, r, p, rr, _, _ = cg_step(v, r, p, H * p, rr, rr > 0, 0 * rr)
        >>> v
        tensor([[1.0000, 0.5000]])
    """
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = _OPERATOR(v, r, p, hp, rr, active, least)
    return found


def _cg_step(
    v: Tensor, r: Tensor, p: Tensor, hp: Tensor, rr: Tensor, active: Tensor, least: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return iteration(_ROWS, v, r, p, hp, rr, active, least)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    dtype = precise(a.dtype)
    return (a.to(dtype) * b.to(dtype)).sum(1, dtype=torch.float64)


def _add(a: Tensor, b: Tensor, alpha: Tensor) -> Tensor:
    return (a + b * alpha.to(precise(a.dtype)).unsqueeze(1)).to(a.dtype)


_ROWS = Algebra(_dot, _add)
_OPERATOR = operator(
    _cg_step,
    lambda v, r, p, hp, rr, active, least: (
        *(t.new_empty(t.shape) for t in (v, r, p)),
        *(rr.new_empty(rr.shape) for _ in range(2)),
        active.new_empty(active.shape),
    ),
)

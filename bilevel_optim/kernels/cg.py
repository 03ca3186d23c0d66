"""One step of conjugate gradients on many systems at once, after the product: two inner products, three updates."""

from __future__ import annotations

import torch
from torch import Tensor

from .counter import precise
from .registry import operator

__all__ = ["cg_step"]


def cg_step(
    v: Tensor, r: Tensor, p: Tensor, hp: Tensor, rr: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""One step for every system that is active; the others stay as they are.

    .. math::
        \alpha = \|r\|^2 / p^\top H p, \qquad v' = v + \alpha p, \qquad r' = r - \alpha H p, \qquad
        p' = r' + p\, \|r'\|^2 / \|r\|^2 .

    Args:
        v: solutions so far, shape (lanes, n).
        r: residuals.
        p: directions.
        hp: products with them.
        rr: squared lengths of the residuals, float64, shape (lanes,).
        active: which systems go on, shape (lanes,).

    Returns:
        The new v, r, p and rr, and which of the active systems met a direction of non-positive curvature and stay, too.

    Example:
        >>> H, b = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)
        >>> v, r, p, rr = torch.zeros(1, 2), b, b, torch.tensor([2.0]).double()
        >>> for _ in range(2):
        ...     v, r, p, rr, _ = cg_step(v, r, p, H * p, rr, rr > 0)
        >>> v
        tensor([[1.0000, 0.5000]])
    """
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _OPERATOR(v, r, p, hp, rr, active)
    return found


def _cg_step(
    v: Tensor, r: Tensor, p: Tensor, hp: Tensor, rr: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = precise(v.dtype)
    curvature = (p.to(dtype) * hp.to(dtype)).sum(1, dtype=torch.float64)
    negative = active & (curvature <= 0)
    active = active & ~negative
    alpha = torch.where(active, rr / torch.where(active, curvature, 1.0), 0.0).to(dtype).unsqueeze(1)
    v, r = (v + p * alpha).to(v.dtype), (r - hp * alpha).to(r.dtype)
    length = r.to(dtype).square().sum(1, dtype=torch.float64)
    beta = torch.where(active, length / torch.where(rr > 0, rr, 1.0), 0.0).to(dtype).unsqueeze(1)
    return v, r, (r + p * beta).to(p.dtype), torch.where(active, length, rr), negative


_OPERATOR = operator(
    _cg_step,
    lambda v, r, p, hp, rr, active: (
        *(t.new_empty(t.shape) for t in (v, r, p)),
        rr.new_empty(rr.shape),
        active.new_empty(active.shape),
    ),
)

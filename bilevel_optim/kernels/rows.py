"""The rows of a large table that a step touches: caught up, updated, projected and put back in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from .counter import precise
from .registry import operator

__all__ = ["row_update_"]


def row_update_(
    position: Tensor,
    velocity: Tensor,
    ids: Tensor,
    drift: Tensor,
    shrink: Tensor,
    new: Tensor,
    old: Tensor,
    scale: Tensor,
    rates: Tensor,
    groups: Tensor,
    keep: float,
    tau: float,
    radius: float,
) -> Tensor:
    r"""Change some rows of two tables in place, with :math:`\Pi` the projection to a ball.

    .. math::
        y \leftarrow y - g_i w, \qquad w \leftarrow s_i w, \qquad w \leftarrow k w + a_i (h_i - k h_i^{old}), \qquad
        y \leftarrow (1 - \tau)\, y + \tau\, \Pi(y - \text{lr}\, w) .

    The first two bring a row up to date that rested (`Table` of the tracked methods), the third is STORM's.

    Args:
        position: y, contiguous, shape (m, n).
        velocity: w, likewise.
        ids: rows, each at most once, shape (k,).
        drift: :math:`g_i`, one for each group of entries, shape (k, groups).
        shrink: :math:`s_i`, shape (k,).
        new: :math:`h_i`, shape (k, n).
        old: :math:`h_i^{old}`, at the last point on the same sample.
        scale: :math:`a_i`, shape (k,).
        rates: lr, one for each group.
        groups: of each entry, shape (n,).
        keep: :math:`k = 1 - \beta`.
        tau: :math:`\tau`, the part of a step.
        radius: of the ball; infinite: no projection.

    Returns:
        Which rows were projected, shape (k,).

    Example:
        >>> y, w, ones = torch.ones(3, 2), torch.ones(3, 2), torch.ones(1)
        >>> args = torch.tensor([1]), torch.zeros(1, 1), ones, torch.ones(1, 2), torch.ones(1, 2), ones, ones
        >>> row_update_(y, w, *args, torch.tensor([0, 0]), 0.5, 1.0, float("inf"))
        tensor([False])
        >>> y
        tensor([[1., 1.],
                [0., 0.],
                [1., 1.]])
    """
    if not (position.is_contiguous() and velocity.is_contiguous()):
        raise ValueError("tables that are changed in place must be contiguous")
    outside: Tensor = _OPERATOR(
        position, velocity, ids, drift, shrink, new, old, scale, rates, groups, keep, tau, radius
    )
    return outside


def _row_update_(
    position: Tensor,
    velocity: Tensor,
    ids: Tensor,
    drift: Tensor,
    shrink: Tensor,
    new: Tensor,
    old: Tensor,
    scale: Tensor,
    rates: Tensor,
    groups: Tensor,
    keep: float,
    tau: float,
    radius: float,
) -> Tensor:
    dtype = precise(position.dtype)
    y, w, new, old = (t.to(dtype) for t in (position[ids], velocity[ids], new, old))
    shrink, scale = (t.to(dtype).unsqueeze(1) for t in (shrink, scale))
    y = y - drift.to(dtype)[:, groups] * w
    w = (keep * shrink * w + scale * (new - keep * old)).to(velocity.dtype).to(dtype)
    target = y - rates.to(dtype)[groups] * w
    length = target.square().sum(1, keepdim=True, dtype=torch.float64).sqrt()
    outside = length > radius
    target = torch.where(outside, target * (radius / length).to(dtype), target)
    position[ids] = ((1 - tau) * y + tau * target).to(position.dtype)
    velocity[ids] = w.to(velocity.dtype)
    return outside.squeeze(1)


_OPERATOR = operator(
    _row_update_,
    lambda position, velocity, ids, *_: ids.new_empty(ids.shape, dtype=torch.bool),
    changes=("position", "velocity"),
)

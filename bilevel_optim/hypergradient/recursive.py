"""Tracked quantities of variance-reduced estimators: derivatives of every sampled task, at two points, on one sample.

Points are flat here: x has shape (d,), rows of y have shape (n, p).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..oracle.lanes import stacked
from ..oracle.oracle import Oracle
from ..problem.vector import Vector

__all__ = ["Points", "flat", "matrices", "products", "shaped"]


class Points:
    """Both losses of some tasks, each at its own y, on one pair of samples.

    Args:
        oracle: of one problem; with tasks, its y has a row for each of them.
        draw: returns the data of the tasks, by level; None for a single problem, whose objectives have their own.
        x: an initial point.
        rows: the lower points there.
        apart: whether derivatives in x are wanted for each task, so that each gets a copy of x.
        weights: factors of the tasks' losses. Default: 1.
    """

    def __init__(
        self,
        oracle: Oracle,
        draw: Callable[[str], Any] | None,
        x: Tensor,
        rows: Tensor,
        *,
        apart: bool,
        weights: Tensor | None = None,
    ) -> None:
        self.tasks, self.apart = draw is not None, apart
        self.weights = None if weights is None else weights.to(rows)
        self._x, self._y = oracle.x, oracle.y
        if draw is None:
            self.oracle = oracle
        else:
            own_x = self._upper(x, len(rows)) if apart else None
            self.oracle = stacked(oracle, self.lower(rows), draw, x=own_x, weights=self.weights)
        self.f, self.g = self.oracle.f.draw(), self.oracle.g.draw()

    def at(self, x: Tensor, rows: Tensor) -> Oracle:
        """Return the losses at a point."""
        return self.oracle.at(self._upper(x, len(rows)), self.lower(rows))

    def lower(self, rows: Tensor) -> Vector:
        """Return rows as tensors like y, with a first dimension for the tasks if there are tasks."""
        return shaped(rows, self._y.lane(0)) if self.tasks else shaped(rows[0], self._y)

    def _upper(self, x: Tensor, copies: int) -> Vector:
        upper = shaped(x, self._x)
        return Vector(t.expand(copies, *t.shape) for t in upper) if self.tasks and self.apart else upper


def matrices(points: Points, x: Tensor, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Return the value of f (the weighted sum), and for each task its derivatives at a point.

    ``u`` :math:`= \nabla_x f` (n, d), ``v`` :math:`= \nabla_y f` (n, p), ``w`` :math:`= \nabla_y g` (n, p),
    ``V`` :math:`= \nabla^2_{xy} g` (n, d, p), ``H`` :math:`= \nabla^2_{yy} g` (n, p, p).

    Costs per task one upper and one lower gradient, p Hessian-vector and p cross products.
    """
    oracle, n = points.at(x, rows), len(rows)
    loss, grad_x, grad_y = oracle.upper(points.f)
    gradient, hessian, cross = oracle.lower_matrices(points.g)
    oracle.checks.finite("lower_grad", gradient)
    return loss, {
        "u": flat(grad_x, n),
        "v": flat(grad_y, n),
        "w": flat(gradient, n),
        "V": _precise(cross),
        "H": _precise(hessian),
    }


def products(points: Points, x: Tensor, rows: Tensor, r: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    r"""Return the weighted sums of f and of :math:`\nabla_x f - \nabla^2_{xy} g\, r`, and the tracked quantities.

    The latter are ``w`` :math:`= \nabla_y g` and ``s`` :math:`= \nabla^2_{yy} g\, r - \nabla_y f`, both (n, p).

    Costs per task one upper and one lower gradient, one Hessian-vector and one cross product. No tensor is larger than
    x or the rows.
    """
    oracle, n = points.at(x, rows), len(rows)
    weights = (r.new_ones(n) if points.weights is None else points.weights.to(r)).unsqueeze(-1)
    loss, grad_x, grad_y = oracle.upper(points.f)
    with oracle.lower_system(points.g) as system:
        cross, curved = system.both(points.lower(r))
    oracle.checks.finite("lower_grad", system.gradient)
    oracle.checks.finite("hvp", curved)
    tracked = {"w": flat(system.gradient, n) / weights, "s": (flat(curved, n) - flat(grad_y, n)) / weights}
    return loss, flat(grad_x)[0] - flat(cross)[0], tracked


def flat(vector: Sequence[Tensor], n: int = 1) -> Tensor:
    """Concatenate the tensors of a vector, n rows each, in float32 at least: small weights need it."""
    return _precise(torch.cat([t.detach().reshape(n, -1 if n else prod(t.shape[1:])) for t in vector], 1))


def shaped(rows: Tensor, like: Sequence[Tensor]) -> Vector:
    """Split flat points into tensors like ``like``, with the leading dimensions of ``rows``."""
    parts = torch.split(rows, [t.numel() for t in like], -1)
    return Vector(part.reshape((*rows.shape[:-1], *t.shape)).to(t.dtype) for part, t in zip(parts, like, strict=True))


def _precise(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))

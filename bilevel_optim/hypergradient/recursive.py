"""What variance-reduced estimators track: derivatives of every sampled task, at two points, on one sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..oracle.oracle import Oracle
from ..oracle.tasks import LaneLoss, TaskDraws, TaskObjective
from ..problem.objective import Objective
from ..problem.vector import Vector

__all__ = ["Points", "matrices", "products"]


class Points:
    """Both losses of some tasks at points of their own, on one pair of samples.

    Args:
        oracle: of the live tensors.
        draws: the data of the tasks; None for a single problem, whose objectives have their own.
        x: a point to begin with, flat, shape (d,).
        rows: lower points, shape (n, p).
        apart: whether derivatives in x are wanted for each task, so that each gets a copy of x.
        weights: factors of the tasks' losses. Default: 1.
    """

    def __init__(
        self,
        oracle: Oracle,
        draws: TaskDraws | None,
        x: Tensor,
        rows: Tensor,
        *,
        apart: bool,
        weights: Tensor | None = None,
    ) -> None:
        self.live, self.tasks, self.apart = oracle, draws is not None, apart
        self.weights = None if weights is None else weights.to(rows)
        if draws is None:
            self.oracle = oracle
        else:
            own_y = Vector(t.requires_grad_() for t in self.lower(rows))
            own_x = Vector(t.clone().requires_grad_() for t in self._upper(x, len(rows))) if apart else oracle.x
            variables = Vector((*own_x, *own_y)) if apart else own_y
            live = Vector((*oracle.x, *oracle.y)) if apart else oracle.y

            def objective(level: str) -> Objective:
                loss = LaneLoss(oracle, level, variables, live=live, weights=self.weights)
                features = (oracle.f if level == "upper" else oracle.g).features
                if features is not None:
                    loss.loss = _whole(loss.loss, features)
                return TaskObjective(loss, lambda: draws.batch(level))

            self.oracle = Oracle(
                own_x, own_y, objective("upper"), objective("lower"),
                names=oracle.names, session=oracle.session, lanes=len(rows),
            )  # fmt: skip
        self.oracle.checks = oracle.checks
        self.f, self.g = self.oracle.f.draw(), self.oracle.g.draw()

    def at(self, x: Tensor, rows: Tensor) -> Any:
        """Let the points be elsewhere inside the block."""
        upper = self._upper(x, len(rows) if self.tasks and self.apart else None)
        return self.oracle.at(upper, self.lower(rows))

    def _upper(self, x: Tensor, copies: int | None) -> Vector:
        parts = shaped(x, self.live.x)
        return parts if copies is None else Vector(t.expand(copies, *t.shape) for t in parts)

    def lower(self, rows: Tensor) -> Vector:
        """Rows as tensors like y, whose first dimension is that of the tasks, if there are tasks."""
        parts, start = [], 0
        for t in self.live.y:
            shape = t.shape[1:] if self.tasks else t.shape
            size = shape.numel()
            part = rows[:, start : start + size].to(t.dtype)
            parts.append(part.reshape(len(rows), *shape).clone() if self.tasks else part.reshape(shape))
            start += size
        return Vector(parts)


def matrices(points: Points) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Values of f (their weighted sum), and for each task its derivatives at the present points.

    ``u`` :math:`= \nabla_x f` (n, d), ``v`` :math:`= \nabla_y f` (n, p), ``w`` :math:`= \nabla_y g` (n, p),
    ``V`` :math:`= \nabla^2_{xy} g` (n, d, p), ``H`` :math:`= \nabla^2_{yy} g` (n, p, p).

    Costs per task one upper and one lower gradient, p Hessian-vector and p cross products.
    """
    oracle, n = points.oracle, points.oracle.lanes or 1
    loss, grad_x, grad_y = oracle.upper(points.f)
    gradient, hessian, cross = oracle.lower_matrices(points.g)
    oracle.checks.finite("lower_grad", gradient)
    return loss, {
        "u": flat(grad_x, n),
        "v": flat(grad_y, n),
        "w": flat(gradient, n),
        "V": _tracked(cross),
        "H": _tracked(hessian),
    }


def products(points: Points, r: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    r"""The weighted sums of f and of :math:`\nabla_x f - \nabla^2_{xy} g\, r`, and what each task tracks.

    That is ``w`` :math:`= \nabla_y g` and ``s`` :math:`= \nabla^2_{yy} g\, r - \nabla_y f`, both (n, p).

    Costs per task one upper and one lower gradient, one Hessian-vector and one cross product. No tensor is larger than
    x or the rows.
    """
    oracle, n = points.oracle, points.oracle.lanes or 1
    weights = (r.new_ones(n) if points.weights is None else points.weights.to(r)).unsqueeze(-1)
    loss, grad_x, grad_y = oracle.upper(points.f)
    with oracle.lower_system(points.g) as system:
        cross, curved = system.both(points.lower(r))
    oracle.checks.finite("lower_grad", system.gradient)
    oracle.checks.finite("hvp", curved)
    tracked = {"w": flat(system.gradient, n) / weights, "s": (flat(curved, n) - flat(grad_y, n)) / weights}
    return loss, flat(grad_x, 1)[0] - flat(cross, 1)[0], tracked


def flat(vector: Sequence[Tensor], n: int) -> Tensor:
    """The tensors of a vector, n rows each, side by side, in float32 at least: small weights need it."""
    return _tracked(torch.cat([t.detach().reshape(n, -1) for t in vector], 1))


def shaped(x: Tensor, like: Sequence[Tensor]) -> Vector:
    """A flat vector as tensors like others."""
    parts = torch.split(x, [t.numel() for t in like])
    return Vector(part.view(t.shape).to(t.dtype) for part, t in zip(parts, like, strict=True))


def _tracked(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _whole(loss: Any, features: Any) -> Any:
    return lambda batch: loss(features(batch))

"""Clipping of lower gradients, and projection of y after each lower step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..problem.parameters import is_number, require
from ..problem.vector import Vector, coarsest

__all__ = ["Clip", "Limits", "Projection", "changes", "limits_of"]

CONSTANT_CLIP = (
    "Invalid {name} value: {value} (the limit is a constant number, whose derivative the hypergradient would lack: "
    "pass a float, or clip in the loss)"
)
CLIP = "Invalid {name} value: {value} (a positive number, ('norm', number) or ('value', number))"
PROJECTION = "Invalid {name} value: {value} (a function of the list of lower tensors, or None)"

Clip = float | tuple[str, float]
Projection = Callable[[list[Tensor]], Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Limits:
    r"""Clipping and projection of every lower step: :math:`y \leftarrow P(U(y, m, C(\nabla g)))`.

    Stacked copies stay separate: each is clipped by its own norm and projected separately.

    Attributes:
        clip: ``("norm", c)``: gradients of norm above c, over all of y, are scaled to c; ``("value", c)``: every entry
            is limited to [-c, c].
        projection: takes the values of the lower tensors as a list, and returns their projections.
        at: context in which the i-th of n copies is projected, for a projection that reads the x of each. None: none.
        interior: whether the method takes y for a stationary point, so that the projection must not decide where y is.
    """

    clip: tuple[str, float] | None = None
    projection: Projection | None = None
    interior: bool = False
    at: Callable[[int], AbstractContextManager[Any]] | None = None

    def __bool__(self) -> bool:
        return self.clip is not None or self.projection is not None

    def clipped(self, gradient: Vector, lead: int) -> Vector:
        """Apply C to a gradient whose first ``lead`` dimensions number copies."""
        if self.clip is None:
            return gradient
        kind, bound = self.clip
        if kind == "value":
            # Infinity minus itself is NaN: non-finite values must stay visible, so they are not clipped.
            return Vector(t.clamp(-bound, bound) + (t - t).detach() for t in gradient)
        squares = [t.square().reshape(*t.shape[:lead], -1).sum(-1) for t in gradient]
        square = torch.stack(squares).sum(0)
        factor = bound / torch.where(square > bound**2, square, bound**2).sqrt()
        return Vector(t * factor.to(t.dtype).reshape((*factor.shape, *[1] * (t.dim() - lead))) for t in gradient)

    def projected(self, y: Vector, lead: int) -> Vector:
        """Apply P to y, whose first ``lead`` dimensions number copies."""
        if self.projection is None:
            return y
        if not lead:
            return self._one(y)
        lanes = Vector(t.flatten(0, lead - 1) for t in y)
        ends, of_each = [], len(lanes[0]) // len(y[0])
        for i in range(len(lanes[0])):
            with nullcontext() if self.at is None else self.at(i // of_each):
                ends.append(self._one(lanes.lane(i)))
        return Vector(torch.stack(parts).reshape(t.shape) for parts, t in zip(zip(*ends, strict=True), y, strict=True))

    def _one(self, y: Vector) -> Vector:
        assert self.projection is not None
        found = self.projection([t.clone() for t in y])  # it may write into these
        given = [found] if isinstance(found, Tensor) else list(found) if isinstance(found, Sequence) else []
        if [(t.shape, t.dtype) if isinstance(t, Tensor) else None for t in given] != [(t.shape, t.dtype) for t in y]:
            raise ValueError(
                "lower_projection takes the list of the lower tensors' values and must return a tensor of the same "
                f"shape and dtype for each, {_described(y)}, but returned {_described(found)}; write, for example, "
                "lambda y: [t.clamp(min=0) for t in y]"
            )
        if any(t.requires_grad for t in y) and not any(t.requires_grad for t in given):
            raise ValueError(
                "lower_projection cannot be differentiated through: its result has no graph (a detach, numpy or "
                "torch.no_grad in it); write it in differentiable operations, or use a method that does not "
                "differentiate the lower steps, such as F2SA or PZOBO"
            )
        return Vector(given) if any(t.requires_grad for t in y) else Vector(given).detach()  # it may read x


def changes(before: Vector, after: Vector) -> Tensor:
    """Return a boolean scalar: True if a projection did more than rounding."""
    return (after - before).norm() > 100 * coarsest(before) * before.norm()


def limits_of(clip: Any, projection: Any, *, interior: bool) -> Limits:
    """Return the limits for the arguments ``lower_clip`` and ``lower_projection``; raise if they are invalid."""
    pair = ("norm", clip) if is_number(clip) else clip
    good = isinstance(pair, tuple) and len(pair) == 2 and pair[0] in ("norm", "value") and is_number(pair[1])
    require("lower_clip", clip, clip is None or (good and 0 < pair[1] < math.inf), CLIP)
    learned = isinstance(pair, tuple) and isinstance(pair[1], Tensor) and pair[1].requires_grad
    require("lower_clip", clip, not learned, CONSTANT_CLIP)
    require("lower_projection", projection, projection is None or callable(projection), PROJECTION)
    return Limits(None if clip is None else (pair[0], float(pair[1])), projection, interior)


def _described(found: Any) -> Any:
    if isinstance(found, Tensor):
        return _described([found])[0]
    if isinstance(found, (list, tuple)):
        return [f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__ for t in found]
    return type(found).__name__

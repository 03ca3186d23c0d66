"""The two losses at one point, with all their derivatives at given values of x and y."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from ..problem.objective import Sample
from ..problem.vector import Vector
from . import second_order
from .point import Point
from .second_order import LowerSystem, UpperSystem

__all__ = ["Oracle"]


class Oracle(Point):
    r"""Derivatives of an upper loss f(x, y) and a lower loss g(x, y), given as closures over live tensors, at a point.

    An oracle never changes: :meth:`at` returns the oracle of another point. Losses are evaluated on a sample (from
    ``oracle.f.draw()`` or ``oracle.g.draw()``), and the live tensors hold their old values afterwards.

    Args:
        upper: the live upper tensors x.
        lower: the live lower tensors y.
        upper_loss: f, a callable or an `Objective`.
        lower_loss: g, a callable or an `Objective`.
        names: returns names of the upper, then of the lower tensors, for error messages. Default: their indices.
        session: the bookkeeping of the step. Default: a new one.
        lanes: number of separate lower problems if ``lower`` are stacked tensors, one lane for each, and the losses are
            sums over the lanes. An evaluation then counts that many times, and is not averaged over ranks, whose tasks
            differ. Default: None, one problem.

    Attributes:
        x, y: the point; by default the values of the live tensors.
        moved: whether x, and whether y, are other values than those of the live tensors.
        f, g: the objectives.
        weight: number of times that an evaluation counts.
        shared: whether all ranks evaluate the same problem, each on its own data, and results are their means.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
        >>> oracle = Oracle([x], [y], lambda: (y**2).sum(), lambda: (x * y**2).sum())
        >>> elsewhere = oracle.at(lower=Vector([torch.tensor([3.0])]))
        >>> oracle.lower(oracle.g.draw())[1], elsewhere.lower(oracle.g.draw())[1]
        ((tensor([4.]),), (tensor([12.]),))
        >>> with oracle.lower_system(oracle.g.draw()) as system:
        ...     system.hvp(Vector([torch.ones(1)])), system.cross(Vector([torch.ones(1)]))
        ((tensor([4.]),), (tensor([2.]),))
    """

    def upper_system(self, sample: Sample) -> AbstractContextManager[UpperSystem]:
        """Context for value, gradient and Hessian-vector products of f in both variables together.

        The graph is kept inside the block. A product counts as one Hessian-vector and one cross product.
        """
        return second_order.upper_system(self, sample)

    def lower_system(self, sample: Sample, *, gradient: bool = True) -> AbstractContextManager[LowerSystem]:
        """Context for second derivatives of g: a graph kept inside the block, or finite differences.

        If only products are needed, pass ``gradient=False``: the gradient is then empty, no lower gradient is counted,
        and the value of g need not be finite.
        """
        return second_order.lower_system(self, sample, gradient=gradient)

    def kept_system(self, sample: Sample) -> LowerSystem:
        """Return second derivatives of g from a graph that lasts as long as the result."""
        return second_order.kept_system(self, sample)

    def lower_matrices(self, sample: Sample) -> tuple[Vector, Tensor, Tensor]:
        r"""Return the gradient of g in y, and :math:`\nabla^2_{yy} g` and :math:`\nabla^2_{xy} g` as matrices.

        Their shapes are (lanes, p, p) and (lanes, d, p), with one lane if y is not stacked; x is stacked too if y is.
        """
        return second_order.lower_matrices(self, sample)

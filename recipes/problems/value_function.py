"""Value function h(x) = f(x, y*(x)) and its gradient, by an accurate lower solve, to score the methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.autograd import grad

import bilevel_optim as bo

__all__ = ["Value", "lower_solution", "value_and_gradient"]

Loss = Callable[[Tensor, Tensor], Tensor]  # takes x and y


class Value(NamedTuple):
    """Value function at a point, its gradient, and the lower solution."""

    value: float
    gradient: Tensor
    solution: Tensor


def lower_solution(
    lower: Loss, x: Tensor, start: Tensor, *, tol: float, steps: int = 50, products: int | None = None
) -> Tensor:
    """Minimise g(x, .) by Newton's method with conjugate gradients and backtracking, down to a gradient norm ``tol``.

    g must be strongly convex in y. The solve ends earlier if rounding prevents progress, or after ``steps`` Newton
    steps, each of at most ``products`` products with the Hessian (default: twice the size of y).
    """
    x, y = x.detach(), start.detach().clone()

    def gradient_at(point: Tensor) -> tuple[Tensor, Tensor]:
        value = lower(x, point)
        return value.detach(), grad(value, point, create_graph=True)[0]

    value, gradient = gradient_at(y.requires_grad_())
    for _ in range(steps):
        norm = float(gradient.detach().norm())
        if norm <= tol:
            break
        right, loose = gradient.detach(), min(0.1, norm**0.5)
        direction = bo.linear.cg(_product(gradient, y), [right], steps=products or 2 * y.numel(), tol=loose).solution[0]
        slope, rate = float((direction * right).sum()), 1.0
        while rate > 1e-6:
            point = (y.detach() - rate * direction).requires_grad_()
            new_value, new_gradient = gradient_at(point)
            # Near the solution the values differ by less than their rounding; the gradient norms are still informative.
            if new_value <= value - 1e-4 * rate * slope or float(new_gradient.detach().norm()) < 0.5 * norm:
                break
            rate /= 2
        else:
            break
        y, value, gradient = point, new_value, new_gradient
    return y.detach()


def value_and_gradient(upper: Loss, lower: Loss, x: Tensor, start: Tensor, *, tol: float) -> Value:
    r"""Return h(x) and its gradient :math:`\nabla_x f - \nabla^2_{xy} g\, [\nabla^2_{yy} g]^{-1} \nabla_y f` at y*(x).

    Args:
        upper: f on all its data.
        lower: g on all its data.
        x: the point.
        start: start of the lower solve.
        tol: norm of the lower gradient at which the solve ends, and relative residual of the linear system.
    """
    y = lower_solution(lower, x, start, tol=tol).requires_grad_()
    x = x.detach().clone().requires_grad_()
    f = upper(x, y)
    direct, right = grad(f, (x, y), materialize_grads=True)
    gradient = grad(lower(x, y), y, create_graph=True)[0]
    v = bo.linear.cg(_product(gradient, y), [right], steps=2 * y.numel(), tol=tol).solution[0]
    cross = grad(gradient, x, v, materialize_grads=True)[0]
    return Value(float(f.detach()), direct - cross, y.detach())


def _product(gradient: Tensor, y: Tensor) -> Callable[[bo.Vector], bo.Vector]:
    def product(v: bo.Vector) -> bo.Vector:
        return bo.Vector(grad(gradient, y, v[0], retain_graph=True))

    return product

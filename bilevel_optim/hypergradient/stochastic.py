"""Implicit differentiation with a fresh sample for every product of the linear solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.vector import Vector
from ..solvers.linear import LinearSolution
from ..tracing import span
from .estimate import Estimate
from .implicit import watched

__all__ = ["ImplicitSamples", "stochastic_implicit"]


class ImplicitSamples(NamedTuple):
    """Independent samples for one estimate, which can be repeated on them at another point.

    Attributes:
        upper: sample of f, for its value and gradients.
        products: samples of g, one for each Hessian-vector product.
        cross: sample of g, for the cross product.
        number: number of products that count, as a tensor, if not all do. Default: None.
    """

    upper: Sample
    products: list[Sample]
    cross: Sample
    number: Tensor | None = None

    @classmethod
    def draw(cls, oracle: Oracle, products: int) -> ImplicitSamples:
        """Draw the next samples: one of f, then those of g."""
        return cls(oracle.f.draw(), [oracle.g.draw() for _ in range(products)], oracle.g.draw())

    @classmethod
    def draw_some(cls, oracle: Oracle, products: Tensor, most: int) -> ImplicitSamples:
        """Draw samples for a random number of products; in a trace for ``most``, with the number as a tensor."""
        upper = oracle.f.draw()
        samples = oracle.g.draw_some("products", products, most)
        return cls(upper, samples[:-1], samples[-1], products if len(samples) > most else None)


def stochastic_implicit(
    oracle: Oracle, samples: ImplicitSamples, solve: Callable[..., LinearSolution], start: Vector | None = None
) -> Estimate:
    r"""Estimate :math:`\nabla_x f(\xi) - \nabla^2_{xy} g(\zeta_0)\, v` with v from products by :math:`H(\zeta_q)`.

    The Hessians :math:`H(\zeta_q) = \nabla^2_{yy} g(x, y; \zeta_q)` are independent, so the mean of a product of
    factors :math:`I - \eta H(\zeta_q)` is the power of the mean factor: with `linear.neumann` the estimate has the mean
    of the truncated series at the mean Hessian, with `linear.neumann_term` too.

    Args:
        oracle: the losses; costs one upper gradient, the solver's products and one cross product.
        samples: the samples of the estimate.
        solve: called as ``solve(product, b, start)``, such as ``functools.partial(bo.linear.neumann, steps=9, lr=0.1)``
            (and with ``lanes=True`` if y is stacked). It takes one of ``samples.products`` for each product, in order.
        start: initial v. Default: None.

    Returns:
        Estimate whose memory holds v as ``"linear_solution"``.
    """
    loss, grad_x, grad_y = oracle.upper(samples.upper)
    remaining = iter(samples.products)

    def product(v: Vector) -> Vector:
        with oracle.lower_system(next(remaining), gradient=False) as system:
            return system.hvp(v)

    with span("linear solve"):
        result = solve(product, grad_y, start, **({} if oracle.lanes is None else {"lanes": True}))
    oracle.checks.finite("hvp", [*result.solution, result.residual])
    with oracle.lower_system(samples.cross, gradient=False) as system:
        gradient = grad_x - system.cross(result.solution)
    return Estimate(loss, gradient, watched(oracle, result), {"linear_solution": result.solution})

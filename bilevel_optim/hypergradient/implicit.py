"""Implicit differentiation: one linear system with the lower Hessian."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import Tensor

from ..oracle.oracle import Oracle
from ..oracle.second_order import system_sample
from ..problem.objective import Sample
from ..problem.profiling import span
from ..problem.vector import Vector
from ..solvers.linear import LinearSolution
from .estimate import Estimate

__all__ = ["implicit", "watched"]

INDEFINITE = (
    "the lower Hessian is not positive definite at the current point (conjugate gradients met non-positive curvature, "
    "stopped there and kept the iterate with the smallest residual), so the hypergradient is not reliable. Add damping "
    "(damping=, a little above the most negative eigenvalue's size), regularise the lower loss, solve the system by "
    "MINRES (linear_solver='minres' of AID; 'auto' changes to it), or use a first-order method"
)
SINGULAR = "The lower Hessian is singular, or not finite itself. Add damping (damping=), or regularise the lower loss"
MOST = 4096  # most lower parameters whose Hessian is formed as a matrix
DIVERGING = (
    "the linear system of the implicit hypergradient is not solved but diverges: its residual is larger than the "
    "right-hand side (see diagnostics['linear_relative_residual']), or conjugate gradients stopped because it grew "
    "tenfold. A Neumann series or a fixed point needs a linear_lr (by default the lower learning rate) below 2 / L, "
    "with L the largest eigenvalue of the lower Hessian, which must have no negative one; conjugate gradients need "
    "damping=, or more linear_steps"
)


def implicit(
    oracle: Oracle,
    solve: Callable[..., LinearSolution],
    start: Vector | None = None,
    *,
    upper_sample: Sample | None = None,
    lower_sample: Sample | None = None,
    dense: bool = False,
) -> Estimate:
    r"""Estimate :math:`\nabla_x f - \nabla^2_{xy} g\, v` with :math:`\nabla^2_{yy} g\, v \approx \nabla_y f` at (x, y).

    With :math:`h(y, v)` the formula, its error is :math:`(\partial_y h)(y - y^*) - \nabla^2_{xy} g\,(v - v^*)` to first
    order: linear in the lower error and in that of v.

    Args:
        oracle: the losses; costs one upper gradient, one lower gradient, the solver's products and one cross product.
        solve: called as ``solve(product, b, start)``, such as ``functools.partial(bo.linear.cg, steps=10)``
            (and with ``lanes=True`` if y is stacked, one lower problem per lane).
        start: initial v. Default: None (zero).
        upper_sample: sample of f. Default: the next one.
        lower_sample: sample of g, shared by all products. Default: the next one.
        dense: form the Hessian as a matrix, with a product for each of its rows; ``solve(matrix, b)`` as
            `bo.linear.direct`. Default: False.

    Returns:
        Estimate whose memory holds v as ``"linear_solution"``.
    """
    loss, grad_x, grad_y = oracle.upper(upper_sample or oracle.f.draw(once=True))
    with oracle.lower_system(lower_sample or system_sample(oracle)) as system:
        lanes = {} if oracle.lanes is None else {"lanes": True}
        with span("linear solve"):
            if dense:
                _require_few(oracle)
                result = solve(system.hessian(), grad_y, **lanes)
            else:
                result = solve(system.hvp, grad_y, start, **lanes)
        oracle.checks.finite("hvp", [*result.solution, result.residual], SINGULAR if dense else "")
        gradient = grad_x - system.cross(result.solution)
    diagnostics = {"lower_residual": system.gradient, **watched(oracle, result)}
    return Estimate(loss, gradient, diagnostics, {"linear_solution": result.solution})


def _require_few(oracle: Oracle) -> None:
    n = sum(t.numel() for t in oracle.y) // (oracle.lanes or 1)
    if n > MOST:
        raise ValueError(
            f"linear_solver='direct' forms the lower Hessian as a matrix, which is limited to {MOST} lower parameters, "
            f"but there are {n}. Use linear_solver='cg' or 'minres', which need only products with it"
        )


def watched(oracle: Oracle, result: LinearSolution) -> dict[str, Tensor]:
    """Return diagnostics of a linear solve; warn if the system is not solved."""
    lanes = oracle.lanes is not None
    oracle.checks.alert("indefinite", INDEFINITE, result.indefinite.any() if lanes else result.indefinite)
    found = {"linear_residual": result.residual, "linear_iterations": result.iterations}
    if result.diverged is not None:
        if lanes:
            oracle.checks.alert("diverging system", DIVERGING, (result.diverged > result.indefinite).any())
        else:
            oracle.checks.alert_if("diverging system", DIVERGING, operator.gt, result.diverged, result.indefinite)
    return found if result.relative is None else {**found, "linear_relative_residual": result.relative}

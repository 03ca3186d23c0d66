"""Implicit differentiation: one linear system with the lower Hessian."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.vector import Later, Vector, coarsest
from ..solvers.linear import LinearSolution, quotient, unsolved_from
from ..tracing import span
from .estimate import Estimate

__all__ = ["implicit", "watched"]

INDEFINITE = (
    "the lower Hessian is not positive definite at the current point (conjugate gradients met non-positive curvature, "
    "stopped there and kept the iterate with the smallest residual), so the hypergradient is not reliable"
)
DIVERGING = (
    "the linear system of the implicit hypergradient is not solved but diverges: its residual is larger than the "
    "right-hand side"
)
ROUNDED = (
    "the linear system of the implicit hypergradient is not solved, because rounding errors are too large for the "
    "condition of the lower Hessian"
)
NEARLY_SINGULAR = (
    "the linear system of the implicit hypergradient is not solved by the LU factorisation, because the lower Hessian "
    "is singular up to rounding errors"
)
UNFINISHED = (
    "the linear system of the implicit hypergradient is not solved yet: linear_steps ended the solve, and the error of "
    "its solution can be as large as the residual times the condition"
)
HELP = {
    INDEFINITE: "Add damping (damping=, a little above the most negative eigenvalue's size), regularise the lower "
    "loss, solve the system by MINRES (linear_solver='minres' of AID; 'auto' changes to it), or use a first-order "
    "method",
    DIVERGING: "A Neumann series or a fixed point needs a linear_lr (by default the lower learning rate) below 2 / L, "
    "with L the largest eigenvalue of the lower Hessian, which must have no negative one. Conjugate gradients need "
    "more linear_steps if H is ill-conditioned, and linear_solver='minres' if it is not positive definite",
    ROUNDED: "Use float64, a larger penalty in the lower loss, or damping=",
    UNFINISHED: "Use more linear_steps, or keep_direction=True of AID with conjugate gradients. Where warm starts are "
    "used, later steps go on from this solution: metrics()['linear_relative_residual'] shows whether they solve it",
    NEARLY_SINGULAR: "Use linear_solver='minres', float64, a penalty in the lower loss, or damping=",
}
SINGULAR = "The lower Hessian is singular, or not finite itself. Add damping (damping=), or regularise the lower loss"
MOST = 4096  # most lower parameters whose Hessian is formed as a matrix


def implicit(
    oracle: Oracle,
    solve: Callable[..., LinearSolution],
    start: Vector | None = None,
    *,
    upper_sample: Sample | None = None,
    lower_sample: Sample | None = None,
    dense: bool = False,
    check: bool = True,
    keep_direction: bool = False,
) -> Estimate:
    r"""Estimate :math:`\nabla_x f - \nabla^2_{xy} g\, v` with :math:`\nabla^2_{yy} g\, v \approx \nabla_y f` at (x, y).

    With :math:`h(y, v)` the formula, its error is :math:`(\partial_y h)(y - y^*) - \nabla^2_{xy} g\,(v - v^*)` to first
    order: linear in the lower error and in that of v.

    Args:
        oracle: the losses; costs one upper gradient, one lower gradient, the solver's products, one cross product, and
            one product to check the solution.
        solve: called as ``solve(product, b, start)``, such as ``functools.partial(bo.linear.cg, steps=10)``
            (and with ``lanes=True`` if y is stacked, one lower problem per lane).
        start: initial v. Default: None (zero).
        upper_sample: sample of f. Default: the next one.
        lower_sample: sample of g, shared by all products. Default: the next one.
        dense: form the Hessian as a matrix, with a product for each of its rows; ``solve(matrix, b)`` as
            `bo.linear.direct`. Default: False.
        check: evaluate the residual of v with one more product, in the same pass as the cross product. Otherwise it is
            what the solver says. With ``dense`` it needs no product. Default: True.
        keep_direction: remember the last direction of `bo.linear.cg` too. Default: False.

    Returns:
        Estimate whose memory holds v as ``"linear_solution"``, and with ``keep_direction`` ``"linear_direction"``.
    """
    loss, grad_x, grad_y = oracle.upper(upper_sample or oracle.f.draw(once=True))
    with oracle.lower_system(lower_sample or oracle.system_sample()) as system:
        lanes = {} if oracle.lanes is None else {"lanes": True}
        with span("linear solve"):
            if dense:
                _require_few(oracle)
                result = solve(system.hessian(), grad_y, **lanes)
            else:
                result = solve(system.hvp, grad_y, start, **lanes)
        oracle.checks.finite("hvp", [*result.solution, result.residual], SINGULAR if dense else "")
        said = None if dense else result.relative
        product = grad_y.add(result.solution, -result.damping) if result.damping else grad_y
        if check and not dense:
            if oracle.sharded:  # x and y may be tensors of two kinds, which have no difference
                cross, product = system.cross(result.solution), system.hvp(result.solution)
            else:
                cross, product = system.both(result.solution)
            result = result.evaluated(grad_y, product, **lanes)
        else:
            cross = system.cross(result.solution)
    v, slope, stacked = result.solution, system.gradient, bool(lanes)
    diagnostics = {
        "lower_residual": slope,
        **watched(oracle, result, said, dense=dense),
        "predicted_change": Later(partial(_change, lanes=stacked), (v, slope)),
        "predicted_bound": Later(partial(_bound, lanes=stacked), (v, slope)),
    }
    if check or dense:
        diagnostics["linear_curvature"] = Later(partial(_curvature, lanes=stacked), (v, product))
    memory = {"linear_solution": v}
    if keep_direction and result.direction is not None:
        memory["linear_direction"] = result.direction
    return Estimate(loss, grad_x - cross, diagnostics, memory)


def _change(v: Vector, slope: Vector, *, lanes: bool) -> Tensor:
    """Return the change of f if a Newton step solved the lower problem."""
    return -(v.lane_dot(slope) if lanes else v.dot(slope))


def _bound(v: Vector, slope: Vector, *, lanes: bool) -> Tensor:
    """Return a bound of that change."""
    return v.lane_norm() * slope.lane_norm() if lanes else v.norm() * slope.norm()


def _curvature(v: Vector, product: Vector, *, lanes: bool) -> Tensor:
    """Return the curvature of g along v; ``product`` is that of its Hessian with v."""
    norm, dot = (Vector.lane_norm, Vector.lane_dot) if lanes else (Vector.norm, Vector.dot)
    # Squares of a small or a large v leave the range of single precision.
    inverse = 1 / norm(v).clamp_min(max([torch.finfo(t.dtype).tiny for t in v]))
    v, product = v.times(inverse), product.times(inverse)
    return quotient(dot(v, product), dot(v, v))


def _require_few(oracle: Oracle) -> None:
    n = sum(t.numel() for t in oracle.y) // (oracle.lanes or 1)
    if n > MOST:
        raise ValueError(
            f"linear_solver='direct' forms the lower Hessian as a matrix, which is limited to {MOST} lower parameters, "
            f"but there are {n}. Use linear_solver='cg' or 'minres', which need only products with it"
        )


def watched(
    oracle: Oracle, result: LinearSolution, said: Tensor | None = None, *, dense: bool = False
) -> dict[str, Tensor]:
    """Return diagnostics of a linear solve; warn if the system is not solved.

    Args:
        oracle: receives the alert ``"unsolved system"``.
        result: the solution, with the residual to report.
        said: the relative residual of the solver's own recursion. Default: None, no such thing.
        dense: the system was solved by a factorisation. Default: False.
    """

    def alert(key: str, message: Callable[[], str], test: Callable[..., Any], *figures: Tensor) -> None:
        if oracle.lanes is None:
            oracle.checks.alert_if(key, message, test, *figures)
        else:
            oracle.checks.alert(key, message, test(*figures).any())

    if result.diverged is not None and result.relative is not None:
        figures = [t.detach() for t in (result.relative, result.relative if said is None else said)]
        test = partial(_unsolved, most=unsolved_from(result.solution))
        message = partial(_why_unsolved, result, *figures, test=test, dense=dense)
        alert("unsolved system", message, test, result.indefinite, result.diverged, *figures)
        if result.unfinished is not None and result.condition is not None:
            ends = result.unfinished, result.iterations
            message = partial(_why_unfinished, *ends, result.relative, result.condition)
            alert("unfinished system", message, _ended, *ends)
    found = {"linear_residual": result.residual, "linear_iterations": result.iterations}
    if result.relative is not None:
        found["linear_relative_residual"] = result.relative
    if result.condition is not None:
        found["linear_condition"] = result.condition
    return found


def _unsolved(indefinite: Any, diverged: Any, relative: Any, said: Any, *, most: float) -> Any:
    """Return True for a failed solve, or if the true residual is far above that of the recursion (rounding errors)."""
    return (indefinite > 0) | (diverged > 0) | ((relative > most) & (relative > 10 * said))


def _ended(unfinished: Any, iterations: Any) -> Any:
    # Fewer than ten iterations are made by choice, not in the belief that they solve the system.
    return (unfinished > 0) & (iterations >= 10)


def _why_unfinished(unfinished: Tensor, iterations: Tensor, relative: Tensor, condition: Tensor) -> str:
    worst = int(torch.where(_ended(unfinished, iterations), relative * condition, -1.0).argmax())
    took, own, least = (float(t.reshape(-1)[worst]) for t in (iterations, relative, condition))
    seen = f"|b - H v| = {own:.2g} |b| after {took:.0f} iterations, condition of H at least {least:.1g}"
    return f"{UNFINISHED} ({seen}). {HELP[UNFINISHED]}"


def _why_unsolved(
    result: LinearSolution, relative: Tensor, said: Tensor, *, test: Callable[..., Tensor], dense: bool
) -> str:
    """Say why the system is not solved, with the figures of the worst lane, and what helps."""
    assert result.diverged is not None
    bad = test(result.indefinite, result.diverged, relative, said).reshape(-1)
    worst = int(torch.where(bad, relative.reshape(-1), -1.0).argmax())
    indefinite, diverged, own, condition = (
        0.0 if t is None else float(t.reshape(-1)[worst])
        for t in (result.indefinite, result.diverged, relative, result.condition)
    )
    rounded = not diverged or condition * coarsest(result.solution) > 1e-3
    text = INDEFINITE if indefinite else NEARLY_SINGULAR if dense else ROUNDED if rounded else DIVERGING
    seen = f"|b - H v| = {own:.2g} |b|"
    if not dense:
        seen += f" after {int(result.iterations.reshape(-1)[worst])} iterations"
    if condition and not indefinite:
        seen += f", condition of H at least {condition:.1g}"
    return text + f" ({seen}). {HELP[text]}"

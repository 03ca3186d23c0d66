r"""Linear solvers for :math:`H v = b` with H known only through products, as in the implicit hypergradient.

H is symmetric (a Hessian). All of them return a `LinearSolution` with the residual and the iterations made; none
prints, raises or divides zero by zero, however many iterations it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .vector import Vector

__all__ = ["LinearSolution", "cg", "fixed_point", "neumann"]

Product = Callable[[Vector], Vector]


class LinearSolution(NamedTuple):
    """Solution of a linear system.

    Attributes:
        solution: v.
        residual: norm of b - H v, a scalar tensor: for CG by its recursion, for the two others as it was before the
            last iteration (knowing it afterwards would cost one more product).
        iterations: iterations that changed v, a scalar integer tensor.
        indefinite: whether a direction p with p'Hp <= 0 was met (CG only), a scalar boolean tensor.
    """

    solution: Vector
    residual: Tensor
    iterations: Tensor
    indefinite: Tensor


def cg(
    product: Product,
    b: Sequence[Tensor],
    start: Sequence[Tensor] | None = None,
    *,
    steps: int,
    tol: float = 0.0,
    atol: float = 0.0,
    damping: float = 0.0,
) -> LinearSolution:
    r"""Conjugate gradients for :math:`(H + \delta I) v = b`, H symmetric positive definite.

    Stops, keeping the last iterate, when the residual is at most ``tol * ||b||`` or ``atol``, when it has reached the
    rounding level of the dtype (further iterations only collect rounding errors), or when a direction of non-positive
    curvature shows that H is not positive definite. On an accelerator these tests stay on the device; the host looks
    at them every tenth iteration, and only if a tolerance is positive.

    Args:
        product: v -> H v.
        b: right-hand side.
        start: where to start. Default: zero, which saves one product.
        steps: largest number of iterations; one product each.
        tol: relative tolerance of the residual. Default: 0.
        atol: absolute tolerance of the residual. Default: 0.
        damping: :math:`\delta`. Default: 0.

    Example:
        >>> H = torch.tensor([1.0, 2.0])
        >>> result = cg(lambda v: Vector([H * v[0]]), [torch.ones(2)], steps=200)
        >>> result.solution, int(result.iterations)
        ((tensor([1.0000, 0.5000]),), 2)
    """
    b = Vector(b)

    def apply(v: Vector) -> Vector:
        return product(v) + v * damping if damping else product(v)

    b_norm = b.norm()
    floor = (max(tol, torch.finfo(b[0].dtype).eps) * b_norm).clamp_min(atol) ** 2
    if start is None:
        v, r = b.zeros_like(), b
    else:
        v = Vector(start)
        r = b - apply(v)
    p, rr = r, r.dot(r)
    iterations = torch.zeros((), dtype=torch.int64, device=b_norm.device)
    indefinite = torch.zeros((), dtype=torch.bool, device=b_norm.device)
    on_host = b_norm.device.type == "cpu"
    for k in range(steps):
        active = (rr > floor) & ~indefinite
        if (on_host or (max(tol, atol) > 0 and k % 10 == 0)) and not active:
            break
        hp = apply(p)
        curvature = p.dot(hp)
        indefinite = indefinite | (active & (curvature <= 0))
        active = active & ~indefinite
        # A finished solve is frozen by zero steps instead of a branch, which would need the host.
        alpha = torch.where(active, rr / torch.where(active, curvature, 1.0), 0.0)
        v, r = v + p * alpha, r - hp * alpha
        new_rr = r.dot(r)
        p = r + p * torch.where(active, new_rr / torch.where(rr > 0, rr, 1.0), 0.0)
        rr = torch.where(active, new_rr, rr)
        iterations = iterations + active
    return LinearSolution(v, rr.sqrt(), iterations, indefinite)


def fixed_point(
    product: Product,
    b: Sequence[Tensor],
    start: Sequence[Tensor] | None = None,
    *,
    steps: int,
    lr: float | Sequence[float],
    tol: float = 0.0,
    damping: float = 0.0,
) -> LinearSolution:
    r"""The fixed-point iteration :math:`v \leftarrow v - \eta (H v - b)`.

    From zero, k iterations give :math:`\eta \sum_{i<k} (I - \eta H)^i b`: the hypergradient through the last k steps
    of gradient descent, if H does not change. The error contracts by :math:`\|I - \eta H\|` per iteration, so it needs
    :math:`\eta < 2 / \lambda_{\max}(H)`.

    Args:
        product: v -> H v.
        b: right-hand side.
        start: where to start. Default: zero, whose first iteration needs no product.
        steps: number of iterations.
        lr: :math:`\eta`, one number or one per tensor.
        tol: stop when the residual is at most ``tol * ||b||``. Default: 0, all iterations.
        damping: added to the diagonal of H. Default: 0.

    Example:
        >>> result = fixed_point(lambda v: v * 2.0, [torch.ones(1)], steps=2, lr=0.25)
        >>> result.solution
        (tensor([0.3750]),)
    """
    b = Vector(b)
    v = b.zeros_like() if start is None else Vector(start)
    r = b if start is None else b - _damped(product, v, damping)
    done = 0
    for k in range(steps):
        if k:
            r = b - _damped(product, v, damping)
        if tol > 0 and r.norm() <= tol * b.norm():
            break
        v, done = v + r * lr, k + 1
    return _finished(v, r, done)


def neumann(
    product: Product,
    b: Sequence[Tensor],
    start: Sequence[Tensor] | None = None,
    *,
    steps: int,
    lr: float | Sequence[float],
    tol: float = 0.0,
    damping: float = 0.0,
) -> LinearSolution:
    r"""The truncated Neumann series :math:`\eta \sum_{i=0}^{Q} (I - \eta H)^i b`, Q + 1 terms from Q products.

    Args:
        product: v -> H v.
        b: right-hand side.
        start: must be None: a series has no starting point.
        steps: Q.
        lr: :math:`\eta < 2 / \lambda_{\max}(H)`, one number or one per tensor.
        tol: stop when a term is at most ``tol * ||b||``. Default: 0, all terms.
        damping: added to the diagonal of H. Default: 0.

    Example:
        >>> neumann(lambda v: v * 2.0, [torch.ones(1)], steps=1, lr=0.25).solution
        (tensor([0.3750]),)
    """
    if start is not None:
        raise ValueError("Invalid start: a Neumann series starts from zero; use fixed_point for a warm start")
    term = total = Vector(b)
    norm, done = total.norm(), 0
    for _ in range(steps):
        if tol > 0 and term.norm() <= tol * norm:
            break
        term = term - _damped(product, term * lr, damping)
        total, done = total + term, done + 1
    return _finished(total * lr, term, done)


def _damped(product: Product, v: Vector, damping: float) -> Vector:
    return product(v) + v * damping if damping else product(v)


def _finished(v: Vector, residual: Vector, iterations: int) -> LinearSolution:
    norm = residual.norm()
    return LinearSolution(
        v,
        norm,
        torch.tensor(iterations, device=norm.device),
        torch.zeros((), dtype=torch.bool, device=norm.device),
    )

r"""Linear solvers for :math:`H v = b` with H known only through products, as in the implicit hypergradient.

H is symmetric (a Hessian); `direct` needs it as a matrix. Each solver returns a `LinearSolution` with the residual and
the number of iterations. None of them prints, raises or divides zero by zero, for any number of iterations. With
``lanes=True`` the tensors are stacked and H is block diagonal, with one block for each lane. Each lane is solved as if
it were alone, with its own residual and iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, nan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem.vector import Vector, any_sharded, coarsest
from ..tracing import is_tracing

__all__ = ["LinearSolution", "cg", "direct", "fixed_point", "minres", "neumann", "neumann_term"]

Product = Callable[[Vector], Vector]
ORDINARY = (1e-4, 1e4)  # norms whose squares float32 can hold, also after the solve has reduced them
ENDED = 0.03  # relative error of v, residual times condition, from which on a solve is not finished
KERNEL = 1e-3  # ||H r|| / (||H|| ||r||) of a residual that least squares cannot reduce: it is no sign of a missing part
NARROW = (torch.float16, torch.bfloat16, torch.float32)  # types in which squares may leave the range
SMALLEST = torch.finfo(torch.float64).tiny
GROWTH = 100  # of the squared residual: a v whose residual is ten times the right-hand side is worse than zero


def unsolved_from(b: Sequence[Tensor]) -> float:
    """Return the relative residual above which a system is not solved, though no iteration would improve it."""
    return max(1e-2, 10 * coarsest(b))  # products under bfloat16 autocast are off by 4e-3


class LinearSolution(NamedTuple):
    """Solution of a linear system.

    Attributes:
        solution: v.
        residual: norm of b - H v, a scalar tensor. `cg` and `minres` have it from their recursions, which do not see
            rounding errors; `fixed_point` and `neumann` report it as it was before the last iteration. The true one
            costs one more product: see `evaluated`.
        iterations: iterations that changed v, a scalar integer tensor.
        indefinite: whether a direction p with p'Hp <= 0 was met before the system was solved (CG only), a scalar
            boolean tensor. Curvature that is rounding counts as zero.
        relative: the residual relative to the norm of b, a scalar tensor. None: not known.
        diverged: whether the residual has grown by half, to more than b, or at all and to ten times b, a scalar
            boolean tensor. For CG, whose residual may grow on its way: whether it ended above b and ten times the
            smallest one, or grew more than a positive definite H can explain, so that v is an earlier iterate; or
            whether rounding errors stopped its fall before the system was solved. For `direct`: whether H is singular
            up to rounding errors. None: not known.
        condition: a lower bound of the condition number of H, a scalar tensor. None: not known.
        unfinished: whether the number of iterations ended a solve by `cg` or `minres` where v may be wrong by 3 percent
            (the residual times the condition), a scalar boolean tensor. None: not known.
        damping: the multiple of the identity that was added to H.
        direction: what the next direction of `cg` adds to the residual; zero after a failure. None: another solver.
    """

    solution: Vector
    residual: Tensor
    iterations: Tensor
    indefinite: Tensor
    relative: Tensor | None = None
    diverged: Tensor | None = None
    condition: Tensor | None = None
    unfinished: Tensor | None = None
    damping: float = 0.0
    direction: Vector | None = None

    def evaluated(self, b: Vector, product: Vector, lanes: bool = False) -> LinearSolution:
        """Return this solution with its true residual.

        Args:
            b: right-hand side.
            product: H v, without damping.
            lanes: whether tensors are stacked. Default: False.
        """
        rest = b - product
        rest = rest.add(self.solution, -self.damping) if self.damping else rest
        residual, norm = (rest.lane_norm(), b.lane_norm()) if lanes else (rest.norm(), b.norm())
        return self._replace(residual=residual, relative=quotient(residual, norm))


def cg(
    product: Product,
    b: Sequence[Tensor],
    start: Sequence[Tensor] | None = None,
    *,
    steps: int,
    tol: float = 0.0,
    atol: float = 0.0,
    damping: float = 0.0,
    lanes: bool = False,
    direction: Sequence[Tensor] | None = None,
) -> LinearSolution:
    r"""Solve :math:`(H + \delta I) v = b` by conjugate gradients, H symmetric positive definite.

    Stops, keeping the last iterate, when the residual is at most ``tol * ||b||`` or ``atol``, or when it has reached
    the rounding level of the dtype (further iterations only collect rounding errors). On an accelerator these tests
    stay on the device; the host looks at them every tenth iteration, and only if a tolerance is positive.

    If H is positive definite, the quadratic :math:`q(v) = v^\top H v / 2 - b^\top v` falls with each iteration, while
    the residual may rise up to :math:`\sqrt{\kappa}`-fold and come back. If H is not positive definite, iterates can
    explode. CG stops before a direction of non-positive curvature (up to rounding errors), and where the residual has
    risen by more than a condition number of one over the rounding unit explains. It then returns the iterate with the
    smallest residual, but never the start, unless that is a solution: if the first direction r has non-positive
    curvature, or all iterates have residuals above ten times b, it returns the start plus
    :math:`r\,\|r\| / \|H r\|`. If no stop was needed, it returns the last iterate unless its residual is above b
    and ten times the smallest one.

    Args:
        product: v -> H v.
        b: right-hand side.
        start: initial v. Zero is taken instead if its residual is smaller, unless the start has a residual of at most
            ten times b, the smaller q, and positive curvature: then it is nearer to the solution in the norm that CG
            reduces. Default: zero, which saves one product.
        steps: largest number of iterations; one product each.
        tol: relative tolerance of the residual. Default: 0.
        atol: absolute tolerance of the residual. Default: 0.
        damping: :math:`\delta`. Default: 0.
        lanes: solve each lane of stacked tensors by itself. Default: False.
        direction: `LinearSolution.direction` of the solve whose solution is the start. If H and b are the same, the two
            solves make the iterates of one; if they have changed, all new directions are conjugate to the first one
            under the present H. It is dropped where zero is taken, or where it is no direction of descent. Default:
            None; the first direction is the residual.

    Example:
        >>> H = torch.tensor([1.0, 2.0])
        >>> result = cg(lambda v: Vector([H * v[0]]), [torch.ones(2)], steps=200)
        >>> result.solution, int(result.iterations)
        ((tensor([1.0000, 0.5000]),), 2)
    """
    right, apply = Vector(b), _damped(product, damping)
    one_here = right[0].is_cpu and not lanes and not any_sharded(right) and _host_looks(right[0])
    v, r, kept, norm = _choose_start(apply, right, start, lanes, read=one_here, energy=True)
    turn = None if direction is None or start is None else _where(kept, Vector(direction), right.zeros_like())
    unit, looked_at = _unit(r, lanes, norm, read=one_here), max(tol, atol)
    if unit is not None:
        inverse = 1 / unit
        scaled = right.times(inverse)
        r, v, atol = scaled if r is right else r.times(inverse), v.times(inverse), atol * inverse
        turn = None if turn is None else turn.times(inverse)
        right = scaled
    algebra = _NUMBERS if one_here else _LANES if lanes else _SCALARS
    v, residual, *figures, _, turn = _cg(apply, right, v, r, turn, steps, tol, atol, looked_at, algebra)
    if unit is not None:
        v, residual = v.times(unit), residual * unit
        turn = None if turn is None else turn.times(unit)
    whole: Any = (v, residual, *figures, damping, turn)
    return LinearSolution(*whole)  # Dynamo of torch 2.11 cannot return what `_replace` makes


def _choose_start(
    apply: Product, b: Vector, start: Sequence[Tensor] | None, lanes: bool, *, read: bool = False, energy: bool = False
) -> tuple[Vector, Vector, bool | Tensor, float | None]:
    """Return the first iterate, its residual, and whether it is the start: else zero, which has a smaller residual.

    The last result is the norm of that residual, if it has been read.

    With ``energy`` a start of larger residual is kept if it is nearer to the solution in the norm of H. A start with a
    non-finite residual is kept, so that the caller notices it. Numbers are compared on the host if they may be
    ``read``.
    """
    if start is None:
        return b.zeros_like(), b, False, None
    v = Vector(start)
    r = b - apply(v)
    norm, dot = (Vector.lane_norm, Vector.lane_dot) if lanes else (Vector.norm, Vector.dot)
    norms: Any = [float(norm(t)) if read else norm(t) for t in (r, b)]
    ours, theirs = norms
    useless: Any = (ours > theirs) & (ours < inf)
    if energy and (not read or useless):
        # q(v) < 0 = q(0) and v'Hv > 0 are v'b > -v'r and v'b > v'r. Residuals of CG rise on their way to the solution,
        # so a start of larger residual than zero may be far better. Starts of indefinite systems grow without a bound.
        useless = useless & ((dot(v, r).abs() >= dot(v, b)) | (ours > GROWTH**0.5 * theirs))
    if read:
        return (b.zeros_like(), b, False, theirs) if useless else (v, r, True, ours)
    return _where(~useless, v, b.zeros_like()), _where(~useless, r, b), ~useless, None


def _where(condition: bool | Tensor, a: Vector, b: Vector) -> Vector:
    """Choose one of two vectors, for each lane if the condition has lanes."""
    if not isinstance(condition, Tensor):
        return a if condition else b
    # Lists, not generators: Dynamo turns generators into an empty tuple where the vector leaves the graph.
    if not condition.dim():
        return Vector([torch.where(condition, t, u) for t, u in zip(a, b, strict=True)])
    return Vector([torch.where(condition.view(-1, *[1] * (t.dim() - 1)), t, u) for t, u in zip(a, b, strict=True)])


def _unit(r: Vector, lanes: bool, norm: float | None, *, read: bool) -> Any:
    """Return a scale for the system that keeps squared entries in the range of their type; None if none is needed.

    It is a number if values may be ``read``, else a tensor. ``norm`` is that of r, if it is known.
    """
    narrow = [dtype for dtype in NARROW if any([t.dtype == dtype for t in r])]
    kind = torch.finfo(narrow[0] if narrow else r[0].dtype)
    if kind.bits == 64:
        return None
    if not read:
        norms = r.lane_norm() if lanes else r.norm()
        return torch.where((norms > 0) & norms.isfinite(), norms.clamp_min(kind.tiny), 1.0)
    norm = float(r.norm()) if norm is None else norm
    ordinary = ORDINARY[0] < norm < ORDINARY[1] and kind.max > 1e30
    return None if ordinary or not 0 < norm < inf else max(norm, kind.tiny)


def _cg(
    apply: Product,
    b: Vector,
    v: Vector,
    r: Vector,
    turn: Vector | None,
    steps: int,
    tol: float,
    atol: float | Tensor,
    looked_at: float,
    algebra: _Algebra,
) -> LinearSolution:
    r"""Run the iterations from v, whose residual is r.

    .. math::
        \alpha = \|r\|^2 / p^\top H p, \qquad v' = v + \alpha p, \qquad r' = r - \alpha H p, \qquad
        p' = r' + p\, \|r'\|^2 / \|r\|^2 .

    The first direction p is r, plus ``turn`` where the sum is a direction of descent. If the tolerance ``looked_at``
    is zero, the host does not look whether a system goes on.
    """
    dot, norm, where = algebra
    eps, square = coarsest(b), dot(b, b)
    rr = square if r is b else dot(r, r)
    noise = 4 * eps if eps < 1e-6 else eps  # relative error of H v; sums of half precision are made in single
    floor, given = max(tol, eps) ** 2 * square, atol**2
    floor, p, pp = where(floor > given, floor, given), r, rr
    if turn is not None:
        # p'r = r'r makes the length of the first step the best one, also if b or H has changed.
        tilted = r.add(turn, 1.0)
        descent = dot(tilted, r)
        good = descent > 0.1 * rr
        p = _where(good, tilted.times(where(good, rr / where(good, descent, 1.0), 1.0)), r)
        pp = dot(p, p)
    active = rr > floor
    iterations, indefinite, diverged, stalled = 0 * active, *(active & False for _ in range(3))
    # A Hessian of condition kappa lifts residuals sqrt(kappa)-fold at most. A start that is solved may be kept.
    most, solved = where(rr > square, rr, square) / eps, rr <= eps * square
    best, best_rr = v, rr
    length, pivot, before = 0.0 * rr if r is b else norm(v) ** 2, 0.0 * rr, rr
    top, least, energy = pivot, pivot + inf, rr
    for k in range(steps):
        if _seen_done(active, k, looked_at):
            break
        hp = apply(p)
        if k == 0:
            # If no iterate of CG can be kept, v must neither stay at zero, for then the hypergradient has no cross
            # term and x does not move, nor explode: ||r||^2 / |r'Hr| does where r'Hr is near zero. The step
            # r ||r|| / ||Hr|| is along r, at most ||r|| over the smallest |eigenvalue| long, and its residual is at
            # most 2 ||r||. If H is positive definite, CG's own first step may lift the residual and still be better.
            size = norm(hp)
            top = size / where(pp > 0, pp, 1.0) ** 0.5
            safe = where(solved, 0.0, rr**0.5 * where(size > 0, 1 / where(size > 0, size, 1.0), 0.0))
            begun, first, image = (v, r), p, hp
        curvature = dot(p, hp)
        negative = active & (curvature <= noise * top * rr)
        active = active ^ negative
        indefinite, iterations = indefinite | negative, iterations + active
        # A finished solve is frozen by zero steps instead of a branch, which would need the host.
        alpha = where(active, rr / where(active, curvature, 1.0), 0.0)
        v, r = v.add(p, alpha), r.add(hp, -alpha)
        # The pivots p'Hp / r'r of the Lanczos matrix are at least its smallest eigenvalue.
        upper, pivot = rr / where(before > 0, before, 1.0) * pivot, curvature / where(rr > 0, rr, 1.0)
        least = where(active & (pivot < least), pivot, least)
        if turn is not None and k == 0:
            pivot = 0.0 * pivot  # only in a row of residuals is it an entry of the Lanczos matrix
        top = where(active & (pivot + upper > top), pivot + upper, top)
        length = length + alpha * alpha * pp
        before, rr = rr, where(active, dot(r, r), rr)
        ratio = where(active, rr / where(before > 0, before, 1.0), 0.0)
        p = r.add(p, ratio)
        if turn is None:
            pp = rr + ratio**2 * pp
        else:
            # Without a change of H and b all directions are conjugate to the first one anyway.
            if k == 0:
                energy = curvature
            share = where(energy > 0, dot(r, image) / where(energy > 0, energy, 1.0), 0.0)
            p = p.add(first, -(share + ratio if k == 0 else share))
            pp = dot(p, p)
        better = active & (rr < (best_rr if k else where(solved, before, GROWTH * square)))
        if k == 0 and better is not True:
            rest = begun[1].add(image, -safe)
            best, best_rr = begun[0].add(first, safe), dot(rest, rest)
        best, best_rr = _where(better, v, best), where(better, rr, best_rr)
        growing = active & (rr > most) & (rr < inf)  # an infinite one is left for the caller
        rounded = active & (rr <= (noise * top) ** 2 * length)
        stalled = stalled | (rounded & (rr > unsolved_from(b) ** 2 * square))
        diverged, active = diverged | growing, active & (rr > floor) & (rounded ^ True) & (growing ^ True)
    # The last residual may be on its way up and back, or H may be indefinite without a sign of it so far.
    diverged = diverged | ((rr > square) & ((rr > GROWTH * square) | (rr > GROWTH * best_rr)) & (rr < inf))
    failed = diverged | indefinite | (solved & (rr > best_rr))
    following = _where(failed, b.zeros_like(), p - r)
    v, rr = _where(failed, best, v), where(failed, best_rr, rr)
    iterations = iterations + (indefinite & (iterations == 0))
    unsolved = rr > eps * square  # a solution is one, whatever was met after it
    indefinite, diverged = indefinite & unsolved, (diverged & unsolved) | stalled
    # |v| / |b| is a lower bound of the inverse of the smallest eigenvalue, too.
    inverse, lift = 1 / least, (length / where(square > 0, square, 1.0)) ** 0.5
    condition = top * where(lift > inverse, lift, inverse)
    if isinstance(rr, Tensor):
        residual = rr.sqrt()
        relative = quotient(residual, square.sqrt())
        unfinished = active & ~diverged & (relative * condition > ENDED)
    else:
        own, share = sqrt(rr), sqrt(rr) / max(sqrt(square), SMALLEST)
        unfinished = active and not diverged and share * condition > ENDED
        figures = torch.tensor([own, share, condition], dtype=torch.float64, device="cpu")
        (residual, relative, condition), iterations = figures.unbind(), torch.tensor(iterations, device="cpu")
        indefinite, diverged, unfinished = torch.tensor([indefinite, diverged, unfinished], device="cpu").unbind()
    return LinearSolution(
        v, residual, iterations, indefinite, relative, diverged, condition, unfinished, direction=following
    )


class _Algebra(NamedTuple):
    """Scalars made of vectors, and a choice between two of them as ``torch.where`` makes it.

    With many systems, ``dot`` and ``norm`` return one scalar for each.
    """

    dot: Callable[[Any, Any], Any]
    norm: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any] = torch.where


def _number(a: Vector, b: Vector) -> float:
    """Return the inner product on the host; NaN if it is infinite too, so that no step hides it."""
    value = float(a.dot(b))
    return value if isfinite(value) else nan


def _length(a: Vector) -> float:
    return float(a.norm())


def _either(condition: bool, a: float, b: float) -> float:
    return a if condition else b


_SCALARS, _LANES = _Algebra(Vector.dot, Vector.norm), _Algebra(Vector.lane_dot, Vector.lane_norm)
_NUMBERS = _Algebra(_number, _length, _either)  # they cost less than operations on scalar tensors


def minres(
    product: Product,
    b: Sequence[Tensor],
    start: Sequence[Tensor] | None = None,
    *,
    steps: int,
    tol: float = 0.0,
    atol: float = 0.0,
    damping: float = 0.0,
    lanes: bool = False,
) -> LinearSolution:
    r"""Solve :math:`(H + \delta I) v = b` by minimal residuals (MINRES), H symmetric, definite or not.

    The iterate k minimises :math:`\|b - H v\|` over the Krylov space of dimension k, so the residual never grows. H may
    have negative eigenvalues, as the Hessian of a deep network away from its minima has. With ``damping``,
    :math:`\delta` must not be near one of :math:`-\lambda_i(H)`.

    Stops, keeping the last iterate, when the residual is at most ``tol * ||b||`` or ``atol``, or at the rounding level
    of the dtype. For a singular H without a solution it stops at the least squares, whose residual is not small. Tests
    as in `cg`. Rounding errors grow like :math:`\kappa(H)^2`, so for a positive definite H of large condition `cg` is
    more accurate.

    Args:
        product: v -> H v.
        b: right-hand side.
        start: initial v; zero is taken instead if its residual is smaller. Default: zero, which saves one product.
        steps: largest number of iterations; one product each.
        tol: relative tolerance of the residual. Default: 0.
        atol: absolute tolerance of the residual. Default: 0.
        damping: :math:`\delta`. Default: 0.
        lanes: solve each lane of stacked tensors by itself. Default: False.

    Example:
        >>> H = torch.tensor([1.0, -2.0])
        >>> result = minres(lambda v: Vector([H * v[0]]), [torch.ones(2)], steps=200)
        >>> result.solution[0].round(decimals=4), int(result.iterations)
        (tensor([ 1.0000, -0.5000]), 2)

    Source: Paige, Saunders (1975), SIAM J. Numer. Anal. 12(4).
    """
    b = Vector(b)
    dot, norm = (Vector.lane_dot, Vector.lane_norm) if lanes else (Vector.dot, Vector.norm)
    eps = coarsest(b)
    b_norm = norm(b)
    floor = (max(tol, eps) * b_norm).clamp_min(atol)
    apply = _damped(product, damping)
    first, r, *_ = _choose_start(apply, b, start, lanes)
    v, residual = first, norm(r)
    beta = residual
    # Lanczos makes H tridiagonal in the basis q; Givens rotations (c, s) make that triangular, row by row, and w are
    # the columns of Q R^-1. Names as in the source: the last rows' entries are dbar (not yet rotated) and epsilon.
    q_old, q = b.zeros_like(), r.times(_inverse(beta))
    w_old = w = b.zeros_like()
    c, s, dbar, epsilon = -torch.ones_like(beta), *(torch.zeros_like(beta) for _ in range(3))
    # The residual of a start may lie in the kernel of H: its products are rounding, and do not show the size of H.
    size = torch.zeros_like(beta) if start is None else norm(b - r) * _inverse(norm(first))
    iterations = torch.zeros_like(beta, dtype=torch.int64)
    stuck = torch.zeros_like(beta, dtype=torch.bool)
    least, outside = torch.full_like(beta, inf), beta > 0
    for k in range(steps):
        active = (residual > floor) & ~stuck
        if _seen_done(active, k, max(tol, atol)):
            break
        hq = apply(q) - q_old.times(beta) if k else apply(q)
        alpha = dot(q, hq)
        hq = hq - q.times(alpha)
        old_beta, beta = beta, norm(hq)
        size = torch.maximum(size, alpha.abs() + beta + (old_beta if k else 0.0))
        delta, gbar = c * dbar + s * alpha, s * dbar - c * alpha
        gamma = torch.hypot(gbar, beta)
        # ||H r|| / (||H|| ||r||) this small: r is in the kernel, or H so ill conditioned that only rounding is left.
        normal = torch.hypot(gbar, c * beta)
        outside = torch.where(active, normal > KERNEL * size, outside)
        stuck = stuck | (active & (normal <= eps**0.5 * size))
        # A finished solve is frozen by zero steps instead of a branch, which would need the host.
        active = active & ~stuck
        inverse, least = torch.where(active, _inverse(gamma), 0.0), torch.where(active, least.minimum(gamma), least)
        w_old, w = w, (q - w_old.times(epsilon) - w.times(delta)).times(inverse)
        v = v + w.times(gbar * inverse * residual)
        epsilon, dbar, c, s = s * beta, -c * beta, gbar * inverse, beta * inverse
        residual = torch.where(active, residual * s, residual)
        q_old, q = q, hq.times(_inverse(beta))
        iterations = iterations + active
    found = _finished(v, residual, iterations, b_norm, residual, damping)  # the residual never grows
    condition = size * (1 / least).maximum(norm(v - first) * _inverse(b_norm))
    far = quotient(residual, b_norm) * condition > ENDED
    return found._replace(condition=condition, unfinished=(residual > floor) & ~stuck & outside & far)


def direct(matrix: Tensor, b: Sequence[Tensor], *, damping: float = 0.0, lanes: bool = False) -> LinearSolution:
    r"""Solve :math:`(H + \delta I) v = b` by LU factorisation, H a matrix, definite or not.

    For up to some thousand unknowns: n unknowns take :math:`2 n^3 / 3` operations and :math:`n^2` numbers. The error is
    about the condition number times the rounding error of the dtype. For a matrix that is singular the solution is not
    finite, or, if only rounding errors keep it from being singular, wrong with a large residual (see
    `LinearSolution.diverged`).

    Args:
        matrix: H, of shape (n, n); with ``lanes`` (lanes, n, n).
        b: right-hand side, of n entries in all (in each lane).
        damping: :math:`\delta`. Default: 0.
        lanes: solve each lane of stacked tensors by itself. Default: False.

    Example:
        >>> H = torch.tensor([[2.0, 1.0], [1.0, -1.0]])
        >>> direct(H, [torch.tensor([3.0]), torch.tensor([0.0])]).solution
        (tensor([1.]), tensor([1.]))
    """
    b = Vector(b)
    count = len(b[0]) if lanes else 1
    sizes = [t.numel() // count for t in b]
    right = torch.cat([t.reshape(count, -1) for t in b], 1)
    right = right.to(torch.promote_types(right.dtype, torch.float32))
    rows = matrix.reshape(count, sum(sizes), sum(sizes)).to(right.dtype)
    if damping:
        rows = rows + damping * torch.eye(sum(sizes), dtype=rows.dtype, device=rows.device)
    flat = torch.linalg.solve_ex(rows, right)[0]
    r = right - (rows @ flat.unsqueeze(-1)).squeeze(-1)
    residual, norm = (torch.linalg.vector_norm(t, dim=1) for t in (r, right))
    if not lanes:
        residual, norm = residual.squeeze(0), norm.squeeze(0)
    v = Vector(p.reshape(t.shape).to(t.dtype) for p, t in zip(torch.split(flat, sizes, 1), b, strict=True))
    once, no = torch.ones_like(residual, dtype=torch.int64), torch.zeros_like(residual, dtype=torch.bool)
    relative = quotient(residual, norm)
    return LinearSolution(v, residual, once, no, relative, relative > unsolved_from([right]), damping=damping)


def fixed_point(
    product: Product,
    b: Sequence[Tensor],
    start: Sequence[Tensor] | None = None,
    *,
    steps: int,
    lr: float | Sequence[float],
    tol: float = 0.0,
    damping: float = 0.0,
    lanes: bool = False,
) -> LinearSolution:
    r"""Run the fixed-point iteration :math:`v \leftarrow v - \eta (H v - b)`.

    From zero, k iterations give :math:`\eta \sum_{i<k} (I - \eta H)^i b`: the hypergradient through the last k steps
    of gradient descent, if H does not change. The error contracts by :math:`\|I - \eta H\|` per iteration, so it needs
    :math:`\eta < 2 / \lambda_{\max}(H)`.

    Args:
        product: v -> H v.
        b: right-hand side.
        start: initial v. Default: zero, whose first iteration needs no product.
        steps: number of iterations.
        lr: :math:`\eta`, one number or one per tensor.
        tol: stop when the residual is at most ``tol * ||b||``. Default: 0, all iterations.
        damping: added to the diagonal of H. Default: 0.
        lanes: treat each lane of stacked tensors by itself. Default: False.

    Example:
        >>> result = fixed_point(lambda v: v * 2.0, [torch.ones(1)], steps=2, lr=0.25)
        >>> result.solution
        (tensor([0.3750]),)
    """
    b, apply = Vector(b), _damped(product, damping)
    v = b.zeros_like() if start is None else Vector(start)
    r = b if start is None else b - apply(v)
    norm = Vector.lane_norm if lanes else Vector.norm
    b_norm = norm(b)
    first = b_norm if start is None else norm(r)
    done = torch.zeros_like(b_norm, dtype=torch.int64)
    for k in range(steps):
        if k:
            r = b - apply(v)
        move, active, seen_done = _unfinished(r, norm, b_norm, k, tol)
        if seen_done:
            break
        v, done = v + move * lr, done + active
    return _finished(v, norm(r), done, b_norm, first, damping)


def neumann(
    product: Product,
    b: Sequence[Tensor],
    start: Sequence[Tensor] | None = None,
    *,
    steps: int,
    lr: float | Sequence[float],
    tol: float = 0.0,
    damping: float = 0.0,
    lanes: bool = False,
) -> LinearSolution:
    r"""Compute the Neumann series :math:`\eta \sum_{i=0}^{Q} (I - \eta H)^i b`, Q + 1 terms from Q products.

    Args:
        product: v -> H v.
        b: right-hand side.
        start: must be None: a series has no starting point.
        steps: Q.
        lr: :math:`\eta < 2 / \lambda_{\max}(H)`, one number or one per tensor.
        tol: stop when a term is at most ``tol * ||b||``. Default: 0, all terms.
        damping: added to the diagonal of H. Default: 0.
        lanes: treat each lane of stacked tensors by itself. Default: False.

    Example:
        >>> neumann(lambda v: v * 2.0, [torch.ones(1)], steps=1, lr=0.25).solution
        (tensor([0.3750]),)
    """
    if start is not None:
        raise ValueError("Invalid start: a Neumann series starts from zero; use fixed_point for a warm start")
    norm = Vector.lane_norm if lanes else Vector.norm
    term = total = b = Vector(b)
    apply = _damped(product, damping)
    residual = b_norm = norm(b)
    done = torch.zeros_like(residual, dtype=torch.int64)
    for k in range(steps):
        term, active, seen_done = _unfinished(term, norm, b_norm, k, tol)
        if seen_done:
            break
        term = term - apply(term * lr)
        residual = torch.where(active, norm(term), residual) if isinstance(active, Tensor) else residual
        total, done = total + term, done + active
    return _finished(total * lr, norm(term) if tol <= 0 else residual, done, b_norm, b_norm, damping)


def neumann_term(
    product: Product,
    b: Sequence[Tensor],
    start: Sequence[Tensor] | None = None,
    *,
    steps: int | Tensor,
    terms: int,
    lr: float | Sequence[float],
    lanes: bool = False,
) -> LinearSolution:
    r"""Compute one random term in place of a Neumann series, :math:`N \eta (I - \eta H)^n b`.

    With n uniform on 0, ..., N - 1 its mean is :math:`\eta \sum_{i<N} (I - \eta H)^i b`.

    Args:
        product: v -> H v, which may use another random H at each call.
        b: right-hand side.
        start: must be None: a series has no starting point.
        steps: n, the number of products. A tensor is not read: all N - 1 products are made, and the first n count.
        terms: N, the length of the series.
        lr: :math:`\eta < 2 / \lambda_{\max}(H)`, one number or one per tensor.
        lanes: report a residual for each lane of stacked tensors. Default: False.

    Example:
        >>> neumann_term(lambda v: v * 2.0, [torch.ones(1)], steps=1, terms=2, lr=0.25).solution
        (tensor([0.2500]),)
    """
    if start is not None:
        raise ValueError("Invalid start: a Neumann series starts from zero; use fixed_point for a warm start")
    norm = Vector.lane_norm if lanes else Vector.norm
    term, b_norm = Vector(b), norm(Vector(b))
    count = steps if isinstance(steps, Tensor) else None
    for k in range(int(steps) if count is None else terms - 1):
        new = term - product(term * lr)
        term = new if count is None else Vector(map(torch.where, [k < count] * len(term), new, term))
    residual = norm(term)
    done = torch.zeros_like(residual, dtype=torch.int64) + steps
    return _finished(term * lr * float(terms), residual, done, b_norm, b_norm)


def _damped(product: Product, damping: float) -> Product:
    return (lambda v: product(v) + v * damping) if damping else product


def _inverse(value: Tensor) -> Tensor:
    """Return 1 / value, and zero for zero."""
    return torch.where(value > 0, 1 / torch.where(value > 0, value, 1.0), 0.0)


def quotient(size: Tensor, unit: Tensor) -> Tensor:
    """Return a size in units of another, which may be zero: then it is zero or very large, not NaN."""
    return size / unit.clamp_min(torch.finfo(unit.dtype).tiny)


def _host_looks(t: Tensor, k: int = 0, tol: float = 0.0) -> bool:
    """Return True if the host reads tensors before iteration k: never in a trace, and seldom if it has to wait."""
    return not is_tracing() and (t.is_cpu or (tol > 0 and k % 10 == 0))


def _seen_done(active: Tensor | bool, k: int, tol: float) -> bool:
    """Return True if the host looks before iteration k and finds that no lane goes on."""
    if not isinstance(active, Tensor):
        return not active
    return _host_looks(active, k, tol) and not bool(active.any())


def _unfinished(
    r: Vector, norm: Callable[[Vector], Tensor], b_norm: Tensor, k: int, tol: float
) -> tuple[Vector, Tensor | int, bool]:
    """Return the residual, the lanes that go on, and whether the host has seen that none does.

    The residual is zero in lanes that have reached the tolerance.
    """
    if tol <= 0:
        return r, 1, False
    active = norm(r) > tol * b_norm
    if _host_looks(active, k, tol):
        if active.all():
            return r, active, False
        if not active.any():
            return r, active, True
    return r * active.to(r[0].dtype), active, False


def _finished(
    v: Vector, residual: Tensor, iterations: Tensor, b_norm: Tensor, first: Tensor, damping: float = 0.0
) -> LinearSolution:
    # Directions of small negative curvature grow a little in each solve; warn only of growth that adds up over steps.
    start = b_norm if first is b_norm else torch.maximum(b_norm, first)
    diverged = (residual > 1.5 * start) | ((residual > first) & (residual > 10 * b_norm))
    relative, no = quotient(residual, b_norm), torch.zeros_like(diverged)
    return LinearSolution(v, residual, iterations, no, relative, diverged, damping=damping)

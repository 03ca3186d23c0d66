"""STORM: variance reduction by recursion, and projections that keep tracked quantities in their sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..tracing import is_tracing

__all__ = ["Projected", "ball", "ceiling", "corrected", "floor", "msvr", "storm"]


def storm(tracker: Tensor, new: Tensor, old: Tensor, beta: float, scale: Tensor | float = 1.0) -> Tensor:
    r"""STORM: :math:`(1-\beta) X + a\,(h(e_t; \zeta) - (1-\beta)\, h(e_{t-1}; \zeta))` with one sample at both points.

    Args:
        tracker: X, an estimate of h at :math:`e_{t-1}`; shape (n, ...).
        new: h at the current point.
        old: h at the last one, on the same sample.
        beta: mixing weight; 1 forgets, 0 adds up differences for ever.
        scale: a, 1 over the probability that the row is sampled, shape (n,). Rows that are not sampled are only shrunk
            by :math:`1-\beta` (RC-STORM); with this factor they get a full STORM step in expectation. Default: 1.
    """
    return tracker * (1 - beta) + (new - old * (1 - beta)) * _rows(scale, tracker)


def msvr(tracker: Tensor, new: Tensor, old: Tensor, alpha: float, share: float) -> Tensor:
    r"""MSVR: :math:`(1-\alpha) X + \alpha\, h(e_t; \zeta) + c\,(h(e_t; \zeta) - h(e_{t-1}; \zeta))`, of one row.

    Other rows are unchanged. :math:`c = 1 - \alpha + (1-q)/(q (1-\alpha))` takes the movement out of the mean
    squared error to first order, if a row is sampled with probability q.

    Args:
        tracker: X, an estimate of h; shape (n, ...).
        new: h at the current point.
        old: h at the last one, on the same sample.
        alpha: mixing weight, below 1 unless q is 1.
        share: q.
    """
    catch_up = 1 - alpha if share == 1 else 1 - alpha + (1 - share) / (share * (1 - alpha))
    return tracker * (1 - alpha) + new * alpha + (new - old) * catch_up


class Projected(NamedTuple):
    """Rows moved into their sets, and the number of rows that were outside."""

    value: Tensor
    active: Tensor


def floor(matrices: Tensor, least: Tensor | float) -> Projected:
    """Return the nearest symmetric matrices without an eigenvalue below ``least``.

    Uses eigenvalues, not singular values: differences of samples can make an estimate of a positive matrix indefinite.

    Args:
        matrices: shape (n, p, p).
        least: one bound for all, or one for each, shape (n,).
    """
    matrices = (matrices + matrices.mT) / 2
    # Single precision is noisy at the floor if the matrix is ill-conditioned; small matrices can afford double.
    work = matrices.double() if matrices.shape[-1] <= 64 and matrices.device.type != "mps" else matrices
    bound = least.to(work) if isinstance(least, Tensor) else torch.full((), least, dtype=work.dtype, device=work.device)
    bound = bound.expand(len(work))
    eye = torch.eye(work.shape[-1], dtype=work.dtype, device=work.device)
    below = torch.linalg.cholesky_ex(work - _rows(bound * (1 - 1e-6), work) * eye).info != 0
    below &= work.isfinite().all(-1).all(-1)  # non-finite entries are reported where they were computed

    def raised(some: Tensor, bound: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(some)
        values = torch.maximum(values, bound.unsqueeze(-1))
        result: Tensor = (vectors * values.unsqueeze(-2)) @ vectors.mT
        return result.to(matrices.dtype)

    return Projected(_replaced(matrices, below, raised, work, bound), below.sum())


def ceiling(matrices: Tensor, most: float) -> Projected:
    """Return the nearest matrices with spectral norm at most ``most``; shape (n, d, p)."""
    outside = torch.linalg.matrix_norm(matrices) > most  # Frobenius: an upper bound of the spectral norm
    outside &= matrices.isfinite().all(-1).all(-1)  # non-finite entries are reported where they were computed

    def lowered(some: Tensor) -> Tensor:
        # Singular values from the smaller Gram matrix.
        tall = some if some.shape[-2] >= some.shape[-1] else some.mT
        size = tall.abs().amax((-2, -1), keepdim=True)  # its square may be out of range
        squares, vectors = torch.linalg.eigh((tall / size).mT @ (tall / size))
        roots = squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt() * size.squeeze(-1)
        factors = (most / roots).clamp_max(1.0)
        tall = (tall @ vectors * factors.unsqueeze(-2)) @ vectors.mT
        new = tall if some.shape[-2] >= some.shape[-1] else tall.mT
        return torch.where((factors < 1).any(-1).view(-1, 1, 1), new, some)

    inside = _replaced(matrices, outside, lowered, matrices)
    return Projected(inside, (outside & (inside != matrices).flatten(1).any(1)).sum())


def ball(vectors: Tensor, radius: float) -> Projected:
    """Return the nearest vectors of length at most ``radius``; shape (n, p)."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    outside = norms > radius
    return Projected(torch.where(outside, vectors * (radius / norms), vectors), outside.sum())


def corrected(u: Tensor, V: Tensor, H: Tensor, v: Tensor) -> Tensor:
    """Return the hypergradient :math:`u - V H^{-1} v` of every row, shape (n, d).

    A row whose trackers have all shrunk out of range gets u alone, which is almost zero. If x and y have different
    types, the result has the wider one.
    """
    if u.dtype != v.dtype:
        kind = torch.promote_types(u.dtype, v.dtype)
        u, V, H, v = (t.to(kind) for t in (u, V, H, v))
    gone = H.abs().amax((-2, -1), keepdim=True) < torch.finfo(H.dtype).tiny ** 0.5
    H = torch.where(gone, torch.eye(H.shape[-1], dtype=H.dtype, device=H.device), H)
    solution: Tensor = torch.linalg.solve_ex(H, v.unsqueeze(-1)).result
    return u - (V @ solution).squeeze(-1)


def _replaced(
    matrices: Tensor, chosen: Tensor, new: Callable[..., Tensor], works: Tensor, *arguments: Tensor
) -> Tensor:
    """Replace the chosen matrices by ``new`` of the chosen ``works`` and arguments."""
    if is_tracing():
        eye = torch.eye(*works.shape[-2:], dtype=works.dtype, device=works.device)
        which = chosen.view(-1, 1, 1)
        return torch.where(which, new(torch.where(which, works, eye), *arguments), matrices)
    if not chosen.any():
        return matrices
    matrices = matrices.clone()
    matrices[chosen] = new(works[chosen], *(argument[chosen] for argument in arguments))
    return matrices


def _rows(scale: Tensor | float, like: Tensor) -> Tensor | float:
    """Return one factor for each row, in a shape that multiplies ``like``."""
    return scale.to(like.dtype).view(-1, *[1] * (like.dim() - 1)) if isinstance(scale, Tensor) else scale

"""Triton programs and their launches; imported only with a GPU or Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .counter import precise

__all__ = ["accumulated", "cg_step", "perturbed", "squares"]

BLOCK = 1024


@triton.jit
def _mixed(values):
    values = values + 0x9E3779B97F4A7C15
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return values ^ (values >> 31)


@triton.jit
def _units(key, row, period, index, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """`counter.units` of one key."""
    bits = _mixed(key.to(tl.uint64) + index.to(tl.uint64))
    if KIND == "normal":
        radius = tl.sqrt(-2.0 * tl.log(((bits >> 32).to(DTYPE) + 0.5) * 2.3283064365386963e-10))
        return radius * tl.cos((bits & 0xFFFFFFFF).to(DTYPE) * 1.4629180792671596e-09)
    signs = ((bits >> 63).to(tl.int64) * 2 - 1).to(DTYPE)
    if KIND == "sign":
        return signs
    angle = ((index * row) % period).to(tl.float64) / period * 6.283185307179586
    return (tl.cos(angle) + tl.sin(angle)).to(DTYPE) * signs


@triton.jit
def _perturb(
    out, point, factors, keys, rows, period, offset, n, count,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Consecutive programs read the same part of the point, which then comes from the cache.
    program = tl.program_id(0).to(tl.int64)
    q, at = program % count, program // count * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    u = _units(tl.load(keys + q), tl.load(rows + q), period, offset + at, KIND, DTYPE)
    p = tl.load(point + at, mask=inside).to(DTYPE)
    moved = p + tl.load(factors + q) * u
    tl.store(out + q * n + at, moved.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _accumulate(
    out, coefficients, keys, rows, period, offset, n, count,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), DTYPE)
    for q in range(count):
        u = _units(tl.load(keys + q), tl.load(rows + q), period, offset + at, KIND, DTYPE)
        total += tl.load(coefficients + q) * u
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _square(
    out, keys, rows, period, offset, n, parts,
    KIND: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    q, part = program // parts, program % parts
    at = part * BLOCK + tl.arange(0, BLOCK)
    u = _units(tl.load(keys + q), tl.load(rows + q), period, offset + at, KIND, DTYPE).to(tl.float64)
    tl.store(out + program, tl.sum(tl.where(at < n, u * u, 0.0)))


@triton.jit
def _alpha(rr, active, curvature, least):
    """Return step lengths, and masks of curvature above ``least`` and up to it."""
    negative = active & (curvature <= least)
    going = active & (curvature > least)
    return tl.where(going, rr / tl.where(going, curvature, 1.0), 0.0), going, negative


@triton.jit
def _curvatures(parts, p, hp, n, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    lane, at = program // count, program % count * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    product = tl.load(p + lane * n + at, mask=inside, other=0.0).to(DTYPE)
    product *= tl.load(hp + lane * n + at, mask=inside, other=0.0).to(DTYPE)
    tl.store(parts + program, tl.sum(product.to(tl.float64)))


@triton.jit
def _move(
    new_v, new_r, lengths, v, r, p, hp, curvatures, rr, active, least, n, count,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    lane, at = program // count, program % count * BLOCK + tl.arange(0, BLOCK)
    inside, at = at < n, lane * n + at
    curvature = tl.load(curvatures + lane)
    alpha, _, _ = _alpha(tl.load(rr + lane), tl.load(active + lane) != 0, curvature, tl.load(least + lane))
    alpha = alpha.to(DTYPE)
    moved = tl.load(v + at, mask=inside, other=0.0).to(DTYPE)
    moved += tl.load(p + at, mask=inside, other=0.0).to(DTYPE) * alpha
    left = tl.load(r + at, mask=inside, other=0.0).to(DTYPE)
    left = (left - tl.load(hp + at, mask=inside, other=0.0).to(DTYPE) * alpha).to(new_r.dtype.element_ty)
    tl.store(new_v + at, moved.to(new_v.dtype.element_ty), mask=inside)
    tl.store(new_r + at, left, mask=inside)
    left = left.to(DTYPE)
    tl.store(lengths + program, tl.sum((left * left).to(tl.float64)))


@triton.jit
def _turn(
    new_p, new_rr, negatives, r, p, lengths, curvatures, rr, active, least, n, count,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    lane, part = program // count, program % count
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside, at = at < n, lane * n + at
    before, after, curvature = tl.load(rr + lane), tl.load(lengths + lane), tl.load(curvatures + lane)
    _, going, negative = _alpha(before, tl.load(active + lane) != 0, curvature, tl.load(least + lane))
    beta = tl.where(going, after / tl.where(before > 0, before, 1.0), 0.0).to(DTYPE)
    gradient_dot = tl.load(r + at, mask=inside).to(DTYPE) + tl.load(p + at, mask=inside).to(DTYPE) * beta
    tl.store(new_p + at, gradient_dot.to(new_p.dtype.element_ty), mask=inside)
    if part == 0:
        tl.store(new_rr + lane, tl.where(going, after, before))
        tl.store(negatives + lane, negative)


def perturbed(
    point: Tensor, factors: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str
) -> Tensor:
    """`seeded.perturbed` in one pass over the point."""
    flat, n, count = point.reshape(-1).contiguous(), point.numel(), len(keys)
    out = point.new_empty(count, *point.shape)
    if out.numel():
        _perturb[(triton.cdiv(n, BLOCK) * count,)](
            out, flat, factors.to(precise(point.dtype)).contiguous(), keys.contiguous(), rows.contiguous(),
            period, offset, n, count, KIND=kind, DTYPE=_dtype(point), BLOCK=BLOCK,
        )  # fmt: skip
    return out


def accumulated(
    like: Tensor, coefficients: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str
) -> Tensor:
    """`seeded.accumulated` in one pass over the result."""
    out, n = like.new_empty(like.shape), like.numel()
    if n:
        _accumulate[(triton.cdiv(n, BLOCK),)](
            out, coefficients.to(precise(like.dtype)).contiguous(), keys.contiguous(), rows.contiguous(),
            period, offset, n, len(keys), KIND=kind, DTYPE=_dtype(like), BLOCK=BLOCK,
        )  # fmt: skip
    return out


def squares(like: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str) -> Tensor:
    """`seeded.squares`: a sum for each block, added up in a fixed order."""
    n, count = like.numel(), len(keys)
    parts = triton.cdiv(n, BLOCK)
    out = torch.zeros(count, parts, dtype=torch.float64, device=like.device)
    if out.numel():
        _square[(count * parts,)](
            out, keys.contiguous(), rows.contiguous(), period, offset, n, parts,
            KIND=kind, DTYPE=_dtype(like), BLOCK=BLOCK,
        )  # fmt: skip
    return out.sum(1)


def cg_step(
    v: Tensor, r: Tensor, p: Tensor, hp: Tensor, rr: Tensor, active: Tensor, least: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cg.cg_step` in three passes: each inner product must be known before the next pass."""
    lanes, n = v.shape
    count = triton.cdiv(n, BLOCK)
    v, r, p, hp, rr, active, least = (t.contiguous() for t in (v, r, p, hp, rr, active, least))
    new_v, new_r, new_p, new_rr, negative = (torch.empty_like(t) for t in (v, r, p, rr, active))
    parts = rr.new_empty(lanes, count)  # sums of a lane's blocks
    curvatures = torch.zeros_like(rr)
    if lanes * count:
        grid, sizes = (lanes * count,), {"DTYPE": _dtype(v), "BLOCK": BLOCK}
        _curvatures[grid](parts, p, hp, n, count, **sizes)
        curvatures, own = parts.sum(1), (rr, active, least)
        _move[grid](new_v, new_r, parts, v, r, p, hp, curvatures, *own, n, count, **sizes)
        _turn[grid](new_p, new_rr, negative, new_r, p, parts.sum(1), curvatures, *own, n, count, **sizes)
    return new_v, new_r, new_p, new_rr, curvatures, negative


def _dtype(t: Tensor) -> tl.dtype:
    """Return the dtype in which numbers for a tensor are computed."""
    return tl.float64 if precise(t.dtype) == torch.float64 else tl.float32

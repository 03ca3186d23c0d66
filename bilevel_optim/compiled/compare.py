"""Comparison of a compiled step with an eager one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hypergradient.estimate import Estimate
from ..optimizer.step import Update
from ..problem.vector import Vector

__all__ = ["Accepted", "Results", "mismatch"]

Results = tuple[Estimate, Update | None]

TOLERANCE = 0.55  # a compiled step may differ by this power of the machine epsilon: differences magnify rounding
LARGEST = 0.03  # tolerance for divided results: a loss that reads something else differs by more


class Accepted(NamedTuple):
    """Largest accepted difference between a compiled step and an eager one.

    Attributes:
        rtol, atol: the norm of the difference is at most ``atol + rtol * norm``. None: as much as rounding explains.
        divisor: number by which the hypergradient divides rounded values.
    """

    rtol: float | None = None
    atol: float | None = None
    divisor: float = 1.0


def mismatch(
    right: Results,
    found: Results,
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    accepted: Accepted,
    names: Mapping[int, str],
    other: Results | None = None,
) -> str | None:
    """Name the first result that differs from the eager step by more than is accepted; return None if none does.

    Args:
        right: results of the eager step.
        found: results of the compiled one.
        x: upper parameters before the step, since their changes are compared.
        y: lower parameters before the step, for the same reason.
        accepted: the accepted difference.
        names: names of tables that writes change, by id; others are y.
        other: results of the compiled step for values that are rounded differently, if known.
    """

    def parts(results: Results) -> dict[str, Any]:  # name -> vector, its base or None, and the divisor
        (estimate, update), divisor = results, accepted.divisor
        vectors: dict[str, Any] = {
            "the loss": ([estimate.loss], None, 1.0),
            "the hypergradient": (estimate.gradient, None, divisor),
        }
        if estimate.lower is not None:
            vectors["y"] = estimate.lower, y, 1.0
        vectors |= {name: (vector, None, 1.0) for name, vector in estimate.memory.items()}
        vectors |= {name: (vector, None, divisor) for name, vector in estimate.upper_memory.items()}
        if update is not None:
            vectors["x"] = update.x, x, divisor
            if update.lower is not None:
                vectors["y that moves with x"] = update.lower, y, divisor
        for write in estimate.writes:
            if write.values.is_floating_point():
                # An estimate for all rows from a few magnifies rounding.
                fraction = write.rows.numel() / len(write.table) if isinstance(write.rows, Tensor) else 1.0
                vectors[f"rows of {names.get(id(write.table), 'y')}"] = [write.values], None, fraction
        return vectors

    these, others = parts(found), None if other is None else parts(other)
    for name, (vector, base, divisor) in parts(right).items():
        if name not in these:
            return name
        perturbed = None if others is None else others[name][0]
        if not _close(vector, these[name][0], base, accepted._replace(divisor=divisor), perturbed):
            return name
    return None


def _close(
    right: Sequence[Tensor],
    found: Sequence[Tensor],
    base: Sequence[Tensor] | None,
    accepted: Accepted,
    perturbed: Sequence[Tensor] | None,
) -> bool:
    """Return True if two vectors, or their distances from a base, are equal up to the accepted difference."""
    a, b = _doubled(right), _doubled(found)
    size, distance = a.norm(), (a - b).norm()
    if not bool(size.isfinite()):
        return not bool(b.norm().isfinite())
    if accepted.rtol is not None or accepted.atol is not None:
        return bool(distance <= (accepted.atol or 0.0) + (accepted.rtol or 0.0) * size)
    eps = max(torch.finfo(t.dtype).eps for t in right if t.is_floating_point())
    moved = size if base is None else (a - _doubled(base)).norm()
    if perturbed is not None and bool(distance <= 100 * (b - _doubled(perturbed)).norm()):
        return True
    least = eps**TOLERANCE
    return bool(distance <= min(least / accepted.divisor, max(least, LARGEST)) * moved + 100 * eps * (size + 1e-30))


def _doubled(tensors: Sequence[Tensor]) -> Vector:
    return Vector(t.detach().double() for t in tensors)


def perturbed_by_rounding(tensors: Sequence[Tensor]) -> Vector:
    """Return a copy of a vector that differs by rounding, each entry up or down."""
    generator, found = torch.Generator().manual_seed(0), []
    for t in tensors:
        if t.is_floating_point():
            signs = torch.randint(2, t.shape, generator=generator, device="cpu").to(t.device, t.dtype) * 2 - 1
            other = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            t = other.copy_(t * (1 + torch.finfo(t.dtype).eps * signs))
        found.append(t)
    return Vector(found)

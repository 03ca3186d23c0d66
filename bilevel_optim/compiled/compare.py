"""Whether a compiled step and an eager one agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..hypergradient.estimate import Write
from ..optimizer.step import StepResults
from ..problem.vector import Vector

__all__ = ["Accepted", "difference"]

TOLERANCE = 0.55  # a compiled step may differ by this power of the precision: differences magnify rounding
LARGEST = 0.03  # tolerance of what is divided: a loss that reads something else differs by more


class Accepted(NamedTuple):
    """By how much a compiled step may differ from an eager one.

    Attributes:
        rtol, atol: the norm of the difference is at most ``atol + rtol * norm``. None: what rounding explains.
        divisor: by which the hypergradient divides what has been rounded.
    """

    rtol: float | None = None
    atol: float | None = None
    divisor: float = 1.0


def difference(
    right: StepResults,
    found: StepResults,
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    accepted: Accepted,
    name_of: Callable[[Write], str],
    other: StepResults | None = None,
) -> str | None:
    """What of a compiled step differs from the eager one by more than is accepted; None if nothing does.

    Args:
        right: of the eager step.
        found: of the compiled one.
        x: before the step: it is the change that is compared.
        y: likewise.
        accepted: how much is.
        name_of: names a table that rows are written into.
        other: what is compiled gives for values that are rounded otherwise, if that is known.
    """

    def parts(results: StepResults) -> dict[str, tuple[Sequence[Tensor], Sequence[Tensor] | None, float]]:
        (estimate, update), divisor = results, accepted.divisor
        vectors: dict[str, tuple[Sequence[Tensor], Sequence[Tensor] | None, float]] = {
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
                vectors[f"rows of {name_of(write)}"] = [write.values], None, _part(write)
        return vectors

    these, others = parts(found), None if other is None else parts(other)
    for name, (vector, base, divisor) in parts(right).items():
        if name not in these:
            return name
        shaken = None if others is None else others[name][0]
        if not _close(vector, these[name][0], base, accepted._replace(divisor=divisor), shaken):
            return name
    return None


def _part(write: Write) -> float:
    """Which part of a table is written: what few rows see stands for all, which magnifies rounding."""
    return write.rows.numel() / len(write.table) if isinstance(write.rows, Tensor) else 1.0


def _close(
    right: Sequence[Tensor],
    found: Sequence[Tensor],
    base: Sequence[Tensor] | None,
    accepted: Accepted,
    shaken: Sequence[Tensor] | None,
) -> bool:
    """Whether two vectors, or their distances from a base, are equal up to what is accepted."""
    a, b = Vector(t.detach().double() for t in right), Vector(t.detach().double() for t in found)
    size, distance = a.norm(), (a - b).norm()
    if not bool(size.isfinite()):
        return not bool(b.norm().isfinite())
    if accepted.rtol is not None or accepted.atol is not None:
        return bool(distance <= (accepted.atol or 0.0) + (accepted.rtol or 0.0) * size)
    eps = max(torch.finfo(t.dtype).eps for t in right if t.is_floating_point())
    moved = size if base is None else (a - Vector(t.detach().double() for t in base)).norm()
    if shaken is not None and bool(distance <= 100 * (b - Vector(t.detach().double() for t in shaken)).norm()):
        return True
    least = eps**TOLERANCE
    return bool(distance <= min(least / accepted.divisor, max(least, LARGEST)) * moved + 100 * eps * (size + 1e-30))


def shaken(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that differ from these by rounding, each entry up or down."""
    generator, found = torch.Generator().manual_seed(0), []
    for t in tensors:
        if t.is_floating_point():
            signs = torch.randint(2, t.shape, generator=generator, device="cpu").to(t.device, t.dtype) * 2 - 1
            other = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            t = other.copy_(t * (1 + torch.finfo(t.dtype).eps * signs))
        found.append(t)
    return found

"""Derivatives along directions by differences of values, with estimates of their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem.vector import Vector

__all__ = [
    "Slope",
    "basis_or_normal",
    "directions_for",
    "flat",
    "nearby",
    "normal",
    "rms",
    "slope",
    "tolerance",
    "unflat",
]


class Slope(NamedTuple):
    """A derivative by differences, and about its error."""

    value: float
    error: float

    def compared(self, expected: float, size: float, unit: float) -> str:
        """Compare with an expected derivative: ``"agrees"``, ``"differs"``, or ``"unknown"``.

        Args:
            expected: the derivative by autograd.
            size: typical size of derivatives here, for relative differences.
            unit: precision of the type.
        """
        apart, matter = abs(self.value - expected), tolerance(unit) * max(abs(self.value), abs(expected), size)
        if not math.isfinite(apart) or (apart <= 10 * self.error + matter and self.error > 10 * matter):
            return "unknown"
        return "differs" if apart > 10 * self.error + matter else "agrees"


def slope(value: Callable[[float], float], epsilon: float, unit: float) -> Slope:
    """Return the derivative of a function at 0 by fourth-order differences; its error also shows a kink nearby."""
    a, b, o, c, d = (value(t * epsilon) for t in (-2.0, -1.0, 0.0, 1.0, 2.0))
    near, far = (c - b) / (2 * epsilon), (d - a) / (4 * epsilon)
    fine = near + (near - far) / 3
    # Right slopes minus left slopes grow in proportion to the distance, unless there is a kink.
    kink, noise = 2 * (c - 2 * o + b) / epsilon - (d - 2 * o + a) / (2 * epsilon), unit * max(map(abs, (a, b, c, d)))
    return Slope(fine, abs(fine - near) + max(0.0, abs(kink) - 8 * noise / epsilon) + noise / epsilon)


def tolerance(unit: float) -> float:
    """Return the relative difference between derivatives that does not matter in a precision."""
    return 1e-3 if unit < 1e-12 else 1e-2 if unit < 1e-6 else 3e-2


def normal(like: Sequence[Tensor]) -> Vector:
    """Return a random unit vector, almost surely not orthogonal to a given vector (unless that is zero)."""
    entries = torch.randn(sum(t.numel() for t in like), dtype=torch.float64, device="cpu")
    return unflat(entries / entries.norm(), like)


def nearby(at: Vector, distance: float) -> Vector:
    """Return a random point at a distance relative to the size of a point."""
    moved: Vector = at + normal(at) * (distance * (1 + rms(at)) * len(flat(at)) ** 0.5)
    return moved


def directions_for(*spaces: Sequence[Tensor]) -> Generator[list[Vector]]:
    """Yield unit vectors in several spaces: first with entries of equal size, then two normal ones."""
    yield [
        unflat((torch.randint(2, (n,), device="cpu").double() * 2 - 1) / n**0.5, like)
        for n, like in ((sum(t.numel() for t in like), like) for like in spaces)
    ]
    for _ in range(2):
        yield [normal(like) for like in spaces]


def basis_or_normal(x: Vector, directions: int) -> list[Vector]:
    """Return unit vectors in the space of x: a basis if it is small enough, random ones otherwise."""
    size = sum(t.numel() for t in x)
    if size <= directions:
        return [unflat(e, x) for e in torch.eye(size, dtype=torch.float64, device="cpu")]
    return [normal(x) for _ in range(directions)]


def rms(vector: Vector) -> float:
    """Return the root mean square of all entries."""
    entries: int = sum(t.numel() for t in vector)
    return float(vector.norm()) / math.sqrt(entries)


def flat(vector: Sequence[Tensor]) -> Tensor:
    """Return all entries as one float64 vector on the host."""
    return torch.cat([t.detach().reshape(-1).double().cpu() for t in vector])


def unflat(entries: Tensor, like: Sequence[Tensor]) -> Vector:
    """Invert `flat`."""
    parts = entries.split([t.numel() for t in like])  # type: ignore[no-untyped-call]
    return Vector(part.view(t.shape).to(t) for part, t in zip(parts, like, strict=True))

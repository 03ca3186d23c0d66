"""Random directions of zeroth-order methods, made again from a seed whenever they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, inf, sqrt

import torch
from torch import Tensor

from ..problem.parameters import is_number, require
from ..problem.random import hashed
from ..problem.vector import Vector, stack

__all__ = ["KINDS", "Directions"]

KINDS = ("gaussian", "sphere", "rademacher", "orthogonal", "block_sphere")


class Directions:
    r"""Q random directions :math:`u_j` in the space of x, with :math:`E[u u^\top] = I` unless said otherwise.

    Direction j is a function of the seed and of j: it is the same however many are made at a time, and is never stored.
    A point is :math:`x + s\,\mu D u_j`, and a coefficient c belongs to the output direction
    :math:`D^{-1} \hat u_j`, so that a linear response is unbiased for any diagonal D.

    * ``"gaussian"``: independent standard normal entries;
    * ``"sphere"``: uniform with norm :math:`\sqrt p`, over all tensors together;
    * ``"rademacher"``: independent entries :math:`\pm 1`;
    * ``"orthogonal"``: orthogonal directions of norm :math:`\sqrt p` (rows of a Hartley transform in random order, with
      one random sign per coordinate); every p of them are a basis, and give the exact response;
    * ``"block_sphere"``: in each tensor by itself uniform with norm 1, :math:`E[u_l u_l^\top] = I / p_l`.

    Args:
        x: the point, of p entries in tensors of :math:`p_l`.
        kind: one of the above.
        count: Q.
        seed: of this set.
        smoothing: :math:`\mu`, the length of a difference.
        relative: :math:`D_l = \|x_l\| / \sqrt{p_l}` (1 for a tensor of zeros), instead of 1.
        scale: ``"unbiased"``: :math:`\hat u = u`, but :math:`p_l u_l` for ``"block_sphere"``; ``"none"``:
            :math:`\hat u = u`; a number: that multiple of the unbiased one.
    """

    def __init__(
        self,
        x: Vector,
        kind: str,
        count: int,
        *,
        seed: int,
        smoothing: float,
        relative: bool = False,
        scale: str | float = "unbiased",
    ) -> None:
        require("direction", kind, kind in KINDS)
        require("scale", scale, scale in ("unbiased", "none") or (is_number(scale) and 0 < float(scale) < inf))
        self.x, self.kind, self.count, self.seed, self.smoothing = x.detach(), kind, count, seed, float(smoothing)
        self._sizes = [t.numel() for t in x]
        self._p = sum(self._sizes)
        self._metric = [_root_mean_square(t) for t in self.x] if relative else None
        self._scale = 1.0 if isinstance(scale, str) else float(scale)
        self._restored = scale != "none"  # the dimension factor of "block_sphere"

    @property
    def variance(self) -> float:
        r"""Predicted variance of the estimate of w over :math:`\|w\|^2`: :math:`(p + 1)/Q` for ``"gaussian"``.

        Exact for a linear response, but for ``"block_sphere"`` on several tensors, where it takes w as evenly spread.
        """
        p, q = self._p, self.count
        if self.kind == "gaussian":
            return (p + 1) / q
        if self.kind == "orthogonal":
            rest = q % p
            return rest * (p - rest) / q**2  # full bases are exact, the rest is drawn without replacement
        if self.kind == "block_sphere":
            tensors = len(self._sizes)
            second = tensors * sum(n**2 for n in self._sizes) / p if self._restored else tensors**2
            first = 1.0 if self._restored else sum(1 / n for n in self._sizes)
            return max(second / first - 1, 0.0) / q
        return (p - 1) / q

    def direction(self, j: int) -> Vector:
        """The direction :math:`u_j`."""
        if self.kind == "orthogonal":
            return self._orthogonal(j)
        generator = self._generator(j)
        if self.kind == "rademacher":
            return Vector(_signs(t, generator) for t in self.x)
        normal = Vector(_normal(t, generator) for t in self.x)
        if self.kind == "gaussian":
            return normal
        if self.kind == "sphere":
            return normal * (sqrt(self._p) / normal.norm())
        return Vector(n / n.norm() for n in normal)

    def points(self, lanes: Sequence[tuple[int, float]]) -> Vector:
        r"""Points :math:`x + s \mu D u_j` for pairs (j, s), stacked; with s = 0 exactly x."""
        return stack([self.point(j, s) for j, s in lanes])

    def point(self, j: int, s: float) -> Vector:
        """One such point."""
        if s == 0:
            return self.x
        shift = self.direction(j) * (s * self.smoothing)
        if self._metric is not None:
            shift = Vector(t * d for t, d in zip(shift, self._metric, strict=True))
        return self.x + shift

    def combine(self, coefficients: Tensor) -> Vector:
        r""":math:`\sum_j c_j D^{-1} \hat u_j`."""
        total = self.x.zeros_like()
        for j in range(self.count):
            total = total + self.direction(j) * (coefficients[j] * self._scale).to(total[0].dtype)
        if self.kind == "block_sphere" and self._restored:
            total = Vector(t * n for t, n in zip(total, self._sizes, strict=True))
        if self._metric is not None:
            total = Vector(t / d for t, d in zip(total, self._metric, strict=True))
        return total

    def _generator(self, j: int) -> torch.Generator:
        return torch.Generator(self.x[0].device).manual_seed(hashed(self.seed, j))

    def _orthogonal(self, j: int) -> Vector:
        """Row of the Hartley transform, whose entries cos + sin of 2 pi i k / p are a known orthogonal matrix."""
        block, index = divmod(j, self._p)
        generator = self._generator(-1 - block)
        # A random affine map of the index: every row is as likely as any other, and none comes twice in a block.
        a, b = 1 + hashed(self.seed, block, 1) % self._p, hashed(self.seed, block, 2) % self._p
        while gcd(a, self._p) != 1:
            a = a % self._p + 1
        row = (a * index + b) % self._p
        parts, start = [], 0
        for t, n in zip(self.x, self._sizes, strict=True):
            k = torch.arange(start, start + n, device=t.device)
            angle = (k * row % self._p).double() * (2 * torch.pi / self._p)
            parts.append((angle.cos() + angle.sin()).to(t.dtype).view_as(t) * _signs(t, generator))
            start += n
        return Vector(parts)


def _normal(t: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.promote_types(t.dtype, torch.float32)
    return torch.randn(t.shape, generator=generator, dtype=dtype, device=t.device).to(t.dtype)


def _signs(t: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, t.shape, generator=generator, device=t.device).to(t.dtype) * 2 - 1


def _root_mean_square(t: Tensor) -> Tensor:
    size = t.norm() / max(t.numel(), 1) ** 0.5
    return torch.where(size > 0, size, torch.ones_like(size))

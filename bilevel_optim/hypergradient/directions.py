"""Random directions of zeroth-order methods, computed from a seed whenever they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul, truediv
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter import mixed, remainders
from ..kernels.seeded import accumulated, perturbed, squares
from ..problem.parameters import require_choice
from ..problem.placement import constant
from ..problem.vector import Vector

__all__ = ["KINDS", "Directions"]

ENTRIES = {
    "gaussian": "normal",
    "sphere": "normal",
    "rademacher": "sign",
    "orthogonal": "hartley",
    "block_sphere": "normal",
}
KINDS = tuple(ENTRIES)
PRIME_GAP = 256  # more numbers in a row than can all have a factor in common with one below 2^63


class Directions:
    r"""Q random directions :math:`u_j` in the space of x, with :math:`E[u u^\top] = I` unless said otherwise.

    Entry i of direction j is a function of the seed, j and i. It is computed wherever it is needed, so it does not
    depend on how many directions are computed at a time, and no direction is ever stored.
    A point is :math:`x + s\,\mu D u_j`, and a coefficient c belongs to the output direction
    :math:`D^{-1} \hat u_j`, so that a linear response is unbiased for any diagonal D.

    * ``"gaussian"``: independent standard normal entries;
    * ``"sphere"``: uniform with norm :math:`\sqrt p`, over all tensors together;
    * ``"rademacher"``: independent entries :math:`\pm 1`;
    * ``"orthogonal"``: orthogonal directions of norm :math:`\sqrt p` (rows of a Hartley transform in random order, with
      one random sign per coordinate); every p of them are a basis, and give the exact response;
    * ``"block_sphere"``: uniform with norm 1 in each tensor by itself, :math:`E[u_l u_l^\top] = I / p_l`.

    Args:
        x: the point, of p entries in tensors of :math:`p_l`.
        kind: one of the above.
        count: Q.
        seed: seed of this set.
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
        seed: int | Tensor,
        smoothing: float,
        relative: bool = False,
        scale: str | float = "unbiased",
    ) -> None:
        require_choice("direction", kind, KINDS)
        require_choice("scale", scale, ("unbiased", "none"), or_positive=True)
        self.x, self.kind, self.count, self.smoothing = x.detach(), kind, count, float(smoothing)
        self._sizes = [t.numel() for t in x]
        self._p = sum(self._sizes)
        self._metric = [_root_mean_square(t) for t in self.x] if relative else None
        self._scale = 1.0 if isinstance(scale, str) else float(scale)
        self._restored = scale != "none"  # the dimension factor of "block_sphere"
        self._offsets = [0, *accumulate(self._sizes[:-1])]
        self._keys, self._rows = self._seeded(seed)
        self._lengths = self._measured()

    @property
    def variance(self) -> float | Tensor:
        r"""Predicted variance of the estimate of w over :math:`\|w\|^2`: :math:`(p + 1)/Q` for ``"gaussian"``.

        Exact for a linear response, but for ``"block_sphere"`` or a D of different values it is that of a w whose
        entries are of one size. A tensor if D depends on x.
        """
        p, q = self._p, self.count
        filled = [(n, s) for n, s in zip(self._sizes, self._squared_metric(), strict=True) if n]
        sizes, squares = [n for n, _ in filled], [s for _, s in filled]
        stretch = sum(map(mul, sizes, squares)) * sum(map(truediv, sizes, squares)) / p  # p if D is constant
        if self.kind == "gaussian":
            excess = stretch + 1
        elif self.kind == "orthogonal":
            rest = q % p  # full bases are exact, the rest is drawn without replacement
            excess = (stretch - 1) * (rest * (p - rest) / (q * max(p - 1, 1)))
        elif self.kind == "block_sphere":
            outputs = [n**2 if self._restored else 1 for n in sizes]
            excess = sum(squares) * sum(map(truediv, outputs, squares)) / sum(map(truediv, outputs, sizes)) - 1
        else:
            excess = (stretch + 2) * (p / (p + 2)) - 1 if self.kind == "sphere" else stretch - 1
        return excess.clamp_min(0) / q if isinstance(excess, Tensor) else max(excess, 0.0) / q

    def points(self, lanes: Sequence[tuple[int, float]]) -> Vector:
        r"""Return points :math:`x + s \mu D u_j` for pairs (j, s), stacked; with s = 0 exactly x."""
        parts, chosen = [], constant([j for j, _ in lanes], self._keys)
        keys, rows = self._keys[chosen], self._rows[chosen]
        lengths = constant([s * self.smoothing for _, s in lanes], self._keys, torch.float64)
        for i, (t, offset) in enumerate(zip(self.x, self._offsets, strict=True)):
            own = lengths / self._lengths[i][chosen] if self._lengths else lengths
            if self._metric is not None:
                own = own * self._metric[i].to(own)
            parts.append(perturbed(t, own, keys, rows, self._p, offset, ENTRIES[self.kind]))
        return Vector(parts)

    def combine(self, coefficients: Tensor, own: slice | None = None) -> Vector:
        r"""Return :math:`\sum_j c_j D^{-1} \hat u_j`; ``own`` selects the directions that the coefficients are of."""
        own = slice(None) if own is None else own
        parts, keys, rows = [], self._keys[own], self._rows[own]
        for i, (t, offset) in enumerate(zip(self.x, self._offsets, strict=True)):
            factors = coefficients * self._scale
            if self._lengths:
                factors = factors / self._lengths[i][own].to(factors)
            if self.kind == "block_sphere" and self._restored:
                factors = factors * self._sizes[i]
            if self._metric is not None:
                factors = factors / self._metric[i].to(factors)
            parts.append(accumulated(t, factors, keys, rows, self._p, offset, ENTRIES[self.kind]))
        return Vector(parts)

    def _squared_metric(self) -> list[Any]:
        """Return the square of D for each tensor, wide enough for sums."""
        if self._metric is None:
            return [1.0] * len(self._sizes)
        kind = torch.float32 if self._keys.device.type == "mps" else torch.float64
        return [d.to(self._keys.device, kind) ** 2 for d in self._metric]

    def _seeded(self, seed: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys of all directions, and the row of the Hartley transform for each."""
        j = torch.arange(self.count, device=self.x[0].device)
        own = mixed(seed if isinstance(seed, Tensor) else torch.tensor(seed, device="cpu"))
        if self.kind != "orthogonal":
            return mixed(own + j), torch.zeros_like(j)
        block, index = j // self._p, j % self._p
        keys = mixed(own + block)
        # A random affine map of the index: all rows are equally likely, and none comes twice in a block.
        first, shift = remainders(mixed(torch.stack([keys - 1, keys - 2])), self._p)
        tried = (first.unsqueeze(1) + torch.arange(PRIME_GAP, device=j.device)) % self._p
        prime = torch.gcd(tried, torch.full_like(shift[:1], self._p)) == 1
        a = tried.gather(1, prime.int().argmax(1, keepdim=True)).squeeze(1)
        return keys, (a * index + shift) % self._p

    def _measured(self) -> list[Tensor]:
        """Return divisors of the entries in each tensor, shape (Q,), that give directions their prescribed lengths."""
        if self.kind not in ("sphere", "block_sphere"):
            return []
        found = [
            squares(t, self._keys, self._rows, self._p, offset, ENTRIES[self.kind])
            for t, offset in zip(self.x, self._offsets, strict=True)
        ]
        if self.kind == "block_sphere":
            return [s.sqrt() for s in found]
        return [(torch.stack(found).sum(0) / self._p).sqrt()] * len(found)


def _root_mean_square(t: Tensor) -> Tensor:
    size = t.norm() / max(t.numel(), 1) ** 0.5
    return torch.where(size > 0, size, torch.ones_like(size))

"""Algebra of the parameter space: one vector is a tuple of tensors, one tensor per parameter.

Most operations are one ``torch._foreach_*`` call, so that an algorithm reads as in its paper and costs as many kernels
as a hand-fused one. ``dot``, ``norm``, ``max_abs`` and ``sum`` are the only reductions over all the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Later", "Vector", "any_sharded", "as_variable", "coarsest", "is_sharded", "stack"]

Scalar = float | Tensor


class Vector(tuple[Tensor, ...]):
    """A point or direction in the space of several parameter tensors.

    ``+``, ``-`` and ``*`` act tensor by tensor; ``*`` takes a number, a zero-dimensional tensor, one number per tensor
    (a learning rate per parameter), or, for stacked tensors, a one-dimensional tensor with one factor per lane.

    Example:
        >>> a = Vector([torch.tensor([1.0, 2.0]), torch.tensor(3.0)])
        >>> float((2 * a - a).dot(a)), float(a.norm()) ** 2
        (14.0, 14.0)
    """

    __slots__ = ()

    def __add__(self, other: Sequence[Tensor]) -> Vector:  # type: ignore[override]
        if len(self) == 1 == len(other):  # common, and foreach costs more than the sum
            return Vector((self[0] + other[0],))
        return Vector(torch._foreach_add([*self], [*other]))

    def __sub__(self, other: Sequence[Tensor]) -> Vector:
        if len(self) == 1 == len(other):
            return Vector((self[0] - other[0],))
        return Vector(torch._foreach_sub([*self], [*other]))

    def __mul__(self, factor: Scalar | Sequence[Scalar]) -> Vector:  # type: ignore[override]
        alone = factor[0] if isinstance(factor, list) and len(factor) == len(self) == 1 else factor
        if len(self) == 1 and isinstance(alone, float):
            return Vector((self[0] * alone,))
        if isinstance(factor, Tensor) and factor.dim() == 1:
            return Vector([t * factor.to(t.dtype).view(-1, *[1] * (t.dim() - 1)) for t in self])
        if isinstance(factor, Tensor) and any([t.dim() == 0 for t in self]):
            # A zero-dimensional tensor takes part in type promotion: a wider factor would widen another one.
            return Vector([t * factor.to(t.dtype) for t in self])
        if isinstance(factor, list) and any([isinstance(f, Tensor) for f in factor]):
            return Vector(
                [t * (_match_type(f, t) if isinstance(f, Tensor) else f) for t, f in zip(self, factor, strict=True)]
            )
        return Vector(torch._foreach_mul([*self], factor))  # type: ignore[arg-type]

    __rmul__ = times = __mul__  # type: ignore[assignment]  # `times`: a product with a tensor that Dynamo can trace

    def __neg__(self) -> Vector:
        return Vector(torch._foreach_neg([*self]))

    def add(self, other: Sequence[Tensor], alpha: Scalar) -> Vector:
        """Return ``self + alpha * other``, by one operation if ``alpha`` is a number."""
        if isinstance(alpha, Tensor):
            return self + Vector(other).times(alpha)
        if len(self) == 1 == len(other):
            return Vector((torch.add(self[0], other[0], alpha=alpha),))
        return Vector(torch._foreach_add([*self], [*other], alpha=alpha))

    def descended(self, direction: Sequence[Tensor], rates: Sequence[Scalar]) -> Vector:
        """Return this vector minus the direction, with a learning rate for each tensor."""
        if len(self) == 1 == len(direction) and type(rates[0]) is float:
            return Vector((torch.add(self[0], direction[0], alpha=-rates[0]),))
        if type(rates[0]) is float and len(set(rates)) == 1:
            return Vector(torch._foreach_add([*self], [*direction], alpha=-rates[0]))
        if any([isinstance(rate, Tensor) for rate in rates]):
            return self - Vector(direction) * list(rates)
        return Vector(torch.add(t, d, alpha=-float(rate)) for t, d, rate in zip(self, direction, rates, strict=True))

    def dot(self, other: Sequence[Tensor]) -> Tensor:
        """Return the inner product over all tensors, accumulated in float64 where the device has it."""
        if len(self) == 1 or not _HALF.isdisjoint([t.dtype for t in self]):
            products = [_wide(t) * o for t, o in zip(self, other, strict=True)]
        else:
            products = [*torch._foreach_mul([*self], [*other])]
        return _total(products, _accumulator(products))

    def norm(self) -> Tensor:
        """Return the Euclidean norm over all tensors together, accumulated as in :meth:`dot`."""
        if any_sharded(self):
            return self.dot(self).sqrt()
        kind = _accumulator(self)
        parts: list[Tensor] = [torch.linalg.vector_norm(t, dtype=kind) for t in self]
        if len(parts) == 1:
            return parts[0]
        return torch.linalg.vector_norm(torch.stack(parts)) if parts else torch.zeros((), device="cpu")

    def norms(self) -> list[Tensor]:
        """Return the Euclidean norm of each tensor, in its own precision."""
        return list(torch._foreach_norm([*self])) if self else []

    def lane_dot(self, other: Sequence[Tensor]) -> Tensor:
        """Return each lane's inner product with the same lane of ``other``, or with one vector; shape (n,)."""
        products = [_wide(t) * o for t, o in zip(self, other, strict=True)]
        kind = _accumulator(products)
        sums = [t.sum(tuple(range(1, t.dim())), dtype=kind) if t.dim() > 1 else t.to(kind) for t in products]
        return torch.stack([t if type(t) is Tensor else _full_value(t) for t in sums]).sum(0)

    def lane_norm(self) -> Tensor:
        """Return the Euclidean norm of each lane of stacked tensors, shape (n,)."""
        if any_sharded(self):
            return self.lane_dot(self).sqrt()
        kind = _accumulator(self)
        parts: list[Tensor] = [
            torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim())), dtype=kind) if t.dim() > 1 else t.abs().to(kind)
            for t in self
        ]
        return parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts), dim=0)

    def max_abs(self) -> Tensor:
        """Return the largest absolute entry; NaN or infinite exactly if some entry is."""
        parts = [_largest(t) for t in self if t.numel()]
        return torch.stack(parts).max() if parts else torch.zeros((), device="cpu")

    def sum(self) -> Tensor:
        """Return the sum of all entries; not finite if one of them is not."""
        return _total(self)

    def clone(self) -> Vector:
        return Vector(t.clone() for t in self)

    def detach(self) -> Vector:
        return Vector((self[0].detach(),)) if len(self) == 1 else Vector([t.detach() for t in self])

    def zeros_like(self) -> Vector:
        return Vector(torch.zeros_like(t) for t in self)

    def lane(self, index: int) -> Vector:
        """Return the vector at one index of the leading dimension of stacked tensors (views)."""
        return Vector(t[index] for t in self)

    def combine(self, weights: Sequence[float]) -> Vector:
        """Return ``sum_j weights[j] * lane(j)`` of stacked tensors."""
        first, *rest = [j for j, weight in enumerate(weights) if weight]
        total = self.lane(first) * weights[first]
        for j in rest:
            total = total + self.lane(j) * weights[j]
        return total

    def copy_(self, values: Iterable[Tensor]) -> None:
        """Write ``values`` into these tensors."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.copy_(values)
        elif any_sharded(self):
            for tensor, value in zip(self, values, strict=True):
                if is_sharded(tensor) and is_sharded(value):  # torch's copy_ needs as many rows as ranks
                    _local(tensor).copy_(_local(value.redistribute(placements=tensor.placements)))  # type: ignore[attr-defined]
                else:
                    tensor.copy_(value)
        else:
            torch._foreach_copy_(self, tuple(values))


class Later(NamedTuple):
    """A diagnostic that is computed from vectors when it is read."""

    function: Callable[..., Tensor]
    vectors: tuple[Vector, ...]


def stack(vectors: Sequence[Sequence[Tensor]]) -> Vector:
    """Stack vectors along a new leading dimension, tensor by tensor."""
    return Vector(torch.stack(tensors) for tensors in zip(*vectors, strict=True))


def is_sharded(t: Tensor) -> bool:
    """Return True for a ``DTensor``, which has a part on each rank (as FSDP2 makes them)."""
    return hasattr(t, "full_tensor")


def any_sharded(tensors: Collection[Tensor]) -> bool:
    """Return True if a tensor is sharded."""
    return not _PLAIN.issuperset(map(type, tensors)) and any([is_sharded(t) for t in tensors])


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _accumulator(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """Return the type in which sums over these tensors, all on one device, are accumulated; None: their own."""
    return torch.float64 if tensors and tensors[0].is_floating_point() and not tensors[0].is_mps else None


_HALF = frozenset((torch.float16, torch.bfloat16))


def _wide(t: Tensor) -> Tensor:
    """Convert a factor of products that are summed to a type that can hold the products."""
    return t.float() if t.dtype in _HALF else t


def coarsest(tensors: Sequence[Tensor]) -> float:
    """Return the largest rounding unit of the tensors' types, which need not be that of the first."""
    return max([torch.finfo(kind).eps for kind in {t.dtype for t in tensors}])


def as_variable(t: Tensor, needed: bool = True) -> Tensor:
    """Return the tensor without its graph, to differentiate in; a function, so that Dynamo need not trace it."""
    return t.detach().requires_grad_(needed)


def _largest(t: Tensor) -> Tensor:
    if is_sharded(t):  # the part of a rank may be empty, and nothing has no maximum
        return t.full_tensor().abs().max()  # type: ignore[attr-defined, no-any-return]
    return torch.stack(torch.aminmax(t)).abs().max()


def _match_type(factor: Tensor, t: Tensor) -> Tensor:
    """Convert a factor such that the product has the tensor's type (of two scalars the wider type would win)."""
    return factor.to(t.device) if t.dim() else factor.to(t)


def _local(t: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor."""
    return t.detach().to_local()  # type: ignore[attr-defined, no-any-return]


def _full_value(t: Tensor) -> Tensor:
    """Return the value of a scalar that may be sharded."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined]


def _total(tensors: Sequence[Tensor], kind: torch.dtype | None = None) -> Tensor:
    """Return the sum of all entries, of each tensor first."""
    sums = [t.sum(dtype=kind) for t in tensors]
    parts = [t if type(t) is Tensor else _full_value(t) for t in sums]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0] if parts else torch.zeros((), device="cpu")

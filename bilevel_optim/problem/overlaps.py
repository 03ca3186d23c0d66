"""Entries of strided tensors that share one place in memory, of the same or of different tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .vector import is_sharded

__all__ = ["overlapping", "overlaps_itself"]

Span = tuple[str, int, int, int]  # device, start and end address, index of the tensor


def overlaps_itself(t: Tensor) -> bool:
    """Return True if entries of a strided tensor share one place in memory, as after ``expand`` or ``unfold``."""
    reach = 0  # the furthest entry along the dimensions with smaller strides
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if stride <= reach:
            return _count_places(t) < t.numel()
        reach += stride * (size - 1)
    return False


def overlapping(tensors: Sequence[Tensor]) -> list[int]:
    """Return, in order, the indices of tensors that share entries with one of a lower index."""
    first: dict[int, int] = {}
    for i, t in enumerate(tensors):
        first.setdefault(id(t), i)  # torch refuses duplicates
    found: list[int] = []
    cluster: list[Span] = []  # spans that overlap in a chain
    device, reach = "", 0
    for span in sorted(span for i in first.values() if (span := _span(tensors[i], i))):
        if span[0] != device or span[1] >= reach:
            found += _sharing(cluster, tensors)
            cluster, device, reach = [], span[0], span[2]
        cluster.append(span)
        reach = max(reach, span[2])
    return sorted(found + _sharing(cluster, tensors))


def _span(t: Tensor, index: int) -> Span | None:
    """Return the span of a tensor's memory; None if the address of its memory is not known."""
    if not isinstance(t, Tensor) or is_sharded(t) or t.layout != torch.strided or not t.numel():
        return None
    start = t.data_ptr()
    return (str(t.device), start, start + _length(t) * t.element_size(), index) if start else None


def _length(t: Tensor) -> int:
    """Return the number of places from a tensor's first entry to its last."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True))


def _count_places(t: Tensor) -> int:
    """Return the number of places in memory that the entries of a tensor have."""
    places = torch.zeros(_length(t) if t.numel() else 0, dtype=torch.bool, device="cpu")
    places.as_strided(t.shape, t.stride()).fill_(True)
    return int(places.sum())


def _sharing(cluster: Sequence[Span], tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of a cluster's tensors that share entries with one of a lower index."""
    if len(cluster) < 2:
        return []
    begin, end = cluster[0][1], max(span[2] for span in cluster)
    members = sorted((i, start - begin) for _, start, _, i in cluster)
    sizes = [n for i, start in members for n in (start, tensors[i].element_size())]
    unit = math.gcd(*sizes)  # bytes that no tensor splits
    marks = torch.zeros((end - begin) // unit, dtype=torch.bool, device="cpu")
    found = []
    for i, start in members:
        t, width = tensors[i], tensors[i].element_size() // unit
        own = marks.as_strided((*t.shape, width), (*(width * stride for stride in t.stride()), 1), start // unit)
        if own.any():
            found.append(i)
        own.fill_(True)
    return found

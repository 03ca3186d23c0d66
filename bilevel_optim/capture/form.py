"""Sizes, strides, types and places of tensors, compared at little cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor
from torch._C._dynamo import guards

__all__ = ["Form", "picked"]

_ALIKE: Any = getattr(guards, "assert_size_stride_grouped", None)  # at a third of the cost of comparisons here
_IS_CPU = attrgetter("is_cpu")


class Form:
    """Sizes, strides, types and devices of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.sizes, self.strides = tuple(tuple(t.shape) for t in tensors), tuple(map(Tensor.stride, tensors))
        self.types, self.devices = [t.dtype for t in tensors], [t.device for t in tensors]
        self._on_cpu = all(t.is_cpu for t in tensors)
        self._empty = [t.numel() == 0 for t in tensors]

    def without(self, start: int, stop: int) -> Form:
        """The form of some of them."""
        found = Form(())
        for name, value in vars(self).items():
            setattr(found, name, value if name == "_on_cpu" else value[:start] + value[stop:])
        return found

    def require(self, tensors: Sequence[Tensor]) -> None:
        """Raise unless other tensors have the same."""
        if not self.fits(tensors):
            raise AssertionError("tensors of other sizes, strides or types than those that a graph was made for")

    def fits(self, tensors: Sequence[Tensor], times: int = 1) -> bool:
        """Whether other tensors have the same, so many times."""
        if [t.dtype for t in tensors] != self.types * times:  # of as many, therefore
            return False
        if any(map(Tensor.is_neg, tensors)):  # torch has yet to negate them
            return False
        if not (all(map(_IS_CPU, tensors)) if self._on_cpu else [t.device for t in tensors] == self.devices * times):
            return False
        sizes, strides = self.sizes * times, self.strides * times
        if _ALIKE is None:
            return (*map(Tensor.size, tensors),) == sizes and (*map(Tensor.stride, tensors),) == strides
        try:
            _ALIKE(tuple(tensors), sizes, strides, "input")
        except AssertionError:
            return False
        return [not n for n in map(Tensor.numel, tensors)] == self._empty * times  # it takes empty ones for all


def picked(numbers: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """These entries of a list, as a tuple."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda entries: tuple([entries[i] for i in numbers])

"""A function as a list of calls on the entries of a list: made once, or many times, in memory that is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import cycle
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._C._dynamo import guards

__all__ = ["BYTES", "TURNS", "Form", "Listed", "picked"]

BYTES = 2**22  # of what is kept of a function
TURNS = 8  # calls that follow each other, whose results have memory of their own
_ALIKE: Any = getattr(guards, "assert_size_stride_grouped", None)  # at a third of the cost of comparisons here


class Form:
    """Sizes, strides and types of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.sizes, self.strides = tuple(tuple(t.shape) for t in tensors), tuple(map(Tensor.stride, tensors))
        self.types = [t.dtype for t in tensors]

    def without(self, start: int, stop: int) -> Form:
        """The form of some of them."""
        found = Form(())
        found.sizes, found.strides = self.sizes[:start] + self.sizes[stop:], self.strides[:start] + self.strides[stop:]
        found.types = self.types[:start] + self.types[stop:]
        return found

    def require(self, tensors: Sequence[Tensor]) -> None:
        """Raise unless other tensors have the same."""
        if not self.fits(tensors):
            raise AssertionError("tensors of other sizes, strides or types than those that a graph was made for")

    def fits(self, tensors: Sequence[Tensor], times: int = 1) -> bool:
        """Whether other tensors have the same, so many times."""
        sizes, strides = self.sizes * times, self.strides * times
        if [t.dtype for t in tensors] != self.types * times:  # of as many, therefore
            return False
        if _ALIKE is None:
            return (*map(Tensor.size, tensors),) == sizes and (*map(Tensor.stride, tensors),) == strides
        try:
            _ALIKE(tuple(tensors), sizes, strides, "input")
        except AssertionError:
            return False
        return True


class Listed:
    """A function as a list of calls on the entries of a list.

    Its results are new tensors, all else may have the same memory at every call: it is not for two threads at once.

    Args:
        entries: what the list holds before the calls.
        calls: of a function, on what is picked of the entries, whose result is the entry of a number.
        results: picks what is returned.
        example: arguments, which are the first entries; others have to be of their sizes, strides and types.
        again: makes the same, of whose results only those of these numbers are new.
    """

    __slots__ = ("_again", "_calls", "_entries", "_form", "_given", "_results", "_turns")

    def __init__(
        self,
        entries: list[Any],
        calls: Sequence[tuple[Any, Callable[[list[Any]], tuple[Any, ...]], int]],
        results: Callable[[list[Any]], tuple[Any, ...]],
        example: Sequence[Tensor],
        again: Callable[[frozenset[int]], Listed],
    ) -> None:
        self._entries, self._calls, self._results, self._again = entries, calls, results, again
        self._form, self._given = Form(example), len(example)
        self._turns: dict[Any, _Turns] = {}

    def __call__(self, arguments: list[Tensor]) -> tuple[Any, ...]:
        """The results for such arguments, whose list is emptied."""
        self._form.require(arguments)
        entries = self._entries.copy()
        entries[: self._given] = arguments
        arguments.clear()
        return self._called(entries)

    def known(self, arguments: Sequence[Tensor]) -> tuple[Any, ...]:
        """The same for arguments whose sizes, strides and types are known to be right."""
        entries = self._entries.copy()
        entries[: self._given] = arguments
        return self._called(entries)

    def each(
        self,
        arguments: list[Tensor],
        start: int,
        data: Sequence[Sequence[Tensor]],
        carried: Sequence[tuple[int, int]],
        lasting: Sequence[int] = (),
    ) -> Iterator[tuple[Any, ...]]:
        """The results of calls that follow each other; valid until the next one, and new only in the last.

        Args:
            arguments: of the first call.
            start: the argument from which on each call has its own of these data, whose forms are not looked at.
            data: of all calls.
            carried: which argument of the next call is which result.
            lasting: numbers of results that stay valid during so many calls as there are turns. Default: none.
        """
        stop = start + len(data[0])
        first, rest = arguments[:start], arguments[stop:]
        key = start, stop, *carried, *lasting
        if key not in self._turns:
            self._turns[key] = self._in_turns(arguments, start, stop, carried, lasting)
        function, form, turns = self._turns[key]
        form.require([*first, *rest])
        for own, kept in zip(data[:-1], cycle(turns), strict=False):
            entries = kept.copy()
            entries[: self._given] = [*first, *own, *rest]
            results = function._called(entries)
            yield results
            for argument, result in carried:
                first[argument] = results[result]
        entries = self._entries.copy()
        entries[: self._given] = [*first, *data[-1], *rest]
        yield self._called(entries)

    def _in_turns(
        self, arguments: list[Tensor], start: int, stop: int, carried: Sequence[tuple[int, int]], lasting: Sequence[int]
    ) -> _Turns:
        """The same for calls that follow each other, if it gives the same bits."""
        function, form = self._again(frozenset()), self._form.without(start, stop)
        places = {*map(_place, function([*arguments]))}
        kept = {_place(t): t.untyped_storage().nbytes() for t in function._entries if isinstance(t, Tensor)}
        size = sum(size for place, size in kept.items() if place in places)
        if places.isdisjoint(_place(arguments[i]) for i, _ in carried) and TURNS * size <= BYTES:
            turns = [_moved(function._entries, places) for _ in range(TURNS)]
        else:  # what a call is given may be among the results of later ones
            function = self._again(frozenset([*lasting, *(result for _, result in carried)]))
            turns = [function._entries]
        right = self([*arguments])
        for entries in turns:
            entries = entries.copy()
            entries[: self._given] = arguments
            both = zip(right, function._called(entries), strict=True)
            if not all(a.stride() == b.stride() and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in both):
                return _Turns(self, form, [self._entries])
        return _Turns(function, form, turns)

    def _called(self, entries: list[Any]) -> tuple[Any, ...]:
        for function, operands, slot in self._calls:
            entries[slot] = function(*operands(entries))
        return self._results(entries)


class _Turns(NamedTuple):
    """A function for calls that follow each other.

    Attributes:
        function: without new results, or with few.
        form: of its arguments that are no data.
        turns: what its list holds before the calls, with memory for the results: in turn for one call after the other.
    """

    function: Listed
    form: Form
    turns: list[list[Any]]


def _place(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _moved(entries: Sequence[Any], places: Collection[int]) -> list[Any]:
    """The same entries, with other memory in place of that at these places."""
    memory: dict[int, UntypedStorage] = {}
    moved = [*entries]
    for i, t in enumerate(entries):
        if isinstance(t, Tensor) and t.numel() and _place(t) in places:
            storage = memory.setdefault(_place(t), t.untyped_storage().clone())  # type: ignore[no-untyped-call]
            moved[i] = t.new_empty(0).set_(storage, t.storage_offset(), t.size(), t.stride())
    return moved


def picked(numbers: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """These entries of a list, as a tuple."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda entries: tuple([entries[i] for i in numbers])

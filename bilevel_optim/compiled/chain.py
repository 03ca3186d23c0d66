"""Chains of compiled steps: results of one call are arguments of the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .forms import form_of
from .program import Call, StepProgram
from .reasons import Refused
from .small_cpu import CallList

__all__ = ["Chain"]

TURNS = 4  # most copies of the results of small steps whose memory is kept


class Chain:
    """Repeated calls of a step's program, each with the state that the one before it has left.

    Args:
        program: the program.
        arguments: arguments of one of its calls.
        count: number of its results.
        drawn: leaves of the samples of that call, from `leaves_of`.

    Attributes:
        data: forms of the tensors that every step draws, and the values of all else that it draws.
    """

    def __init__(self, program: StepProgram, arguments: Sequence[Tensor], count: int, drawn: Sequence[Any]) -> None:
        assert program.next_state is not None
        self.program = program
        self._loss, self._flags = program.writer.loss, program.writer.flags
        self._first = len(arguments) - len(program.next_state)  # where the state begins
        pairs = list(enumerate(program.next_state, self._first))
        self._from_results = [(j, int(k)) for j, k in pairs if k < count]
        self._from_arguments = [(j, k - count) for j, k in pairs if k >= count and j != k - count]
        self._tensors = [k for k, leaf in enumerate(drawn) if isinstance(leaf, Tensor)]
        self.data = [form_of(leaf) for leaf in drawn]
        self._alike: dict[tuple[int, int, int], bool] = {}
        self._reusing: Sequence[CallList] | None = None  # the program again, with results that keep their memory

    def shares_memory(self, first: Call, live: Sequence[Tensor]) -> bool:
        """Return True if a loss reads the memory of a live tensor by itself: it changes when a step is written."""
        moving, others = {*map(_storage, live)}, first.arguments[: self._first]
        return any(_storage(t) in moving for t in others)

    def are_alike(self, first: int, place: int, count: int) -> bool:
        """Return True if samples that have the form of those at ``first`` have that of those at ``place``."""
        key = first, place, count
        if key not in self._alike:
            mine, others = self.data[first : first + count], self.data[place : place + count]
            self._alike[key] = mine == others
        return self._alike[key]

    def fits(self, drawn: Sequence[Any], place: int | None = None) -> bool:
        """Return True if samples have the form that the program was made for.

        ``place``: the samples are only a part of a step's, from this position on.
        """
        wanted = self.data if place is None else self.data[place : place + len(drawn)]
        try:
            return [
                # of most leaves, without a call for each
                (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) if isinstance(t, Tensor) else form_of(t)
                for t in drawn
            ] == wanted
        except Refused:
            return False

    def follow(self, first: Call, data: Sequence[Sequence[Any]]) -> tuple[list[Tensor], list[Tensor], Call]:
        """Return losses and flags of the first call and of a call for each element of ``data``, and the last call."""
        call, arguments, results = self.program.program.call, [*first.arguments], first.results
        reusing = self._with_kept_results(first) if len(data) > 2 else ()
        losses, flags, begin = [results[self._loss]], [results[self._flags]], self.program.reads
        with torch.no_grad():
            for k, drawn in enumerate(data):
                for j, t in [(j, arguments[i]) for j, i in self._from_arguments]:
                    arguments[j] = t
                for j, i in self._from_results:
                    arguments[j] = results[i]
                for j, i in enumerate(self._tensors, begin):
                    arguments[j] = drawn[i]
                kept = bool(reusing) and k < len(data) - 1
                results = reusing[k % len(reusing)](arguments) if kept else call([*arguments])
                losses.append(results[self._loss])
                flags.append(results[self._flags])
        if reusing:  # the memory of earlier results will be used again
            for j, _ in (*self._from_results, *self._from_arguments):
                arguments[j] = arguments[j].clone()
        return losses, flags, Call(arguments, results)

    def _with_kept_results(self, first: Call) -> Sequence[CallList]:
        """Return programs whose results keep their memory, to be called in turn for all steps but the last, if any."""
        if self._reusing is None:
            self._reusing = []
            changing = {j for j, _ in (*self._from_results, *self._from_arguments)}
            # Results in the memory of an argument, such as the last x.
            owner = {_storage(first.arguments[j]): j for j in changing}
            passed = {k: owner[_storage(t)] for k, t in enumerate(first.results) if _storage(t) in owner}
            moved = [*self._from_arguments, *((j, passed[k]) for j, k in self._from_results if k in passed)]
            # A result is an argument of the next step, and perhaps of more steps after it.
            turns, later = 2, {j for j, _ in self._from_results}
            while turns <= TURNS and (later := {j for j, k in moved if k in later}):
                turns += 1
            call = self.program.program.call
            if turns <= TURNS and isinstance(call, CallList) and not passed:
                self._reusing = [call.reusing((self._loss, self._flags)) for _ in range(turns)]
        return self._reusing


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()

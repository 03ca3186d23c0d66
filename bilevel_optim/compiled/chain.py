"""Chains of compiled steps: results of one call are arguments of the next."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle, islice, repeat
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .draws import Drawn
from .forms import DataForm, distinct
from .places import Place
from .program import Call, StepProgram
from .small_cpu import Function, storage_of

__all__ = ["Chain", "apart", "memory_of"]

TURNS = 4  # most copies of the results of small steps whose memory is kept


class Chain:
    """Repeated calls of a step's program, each with the state that the one before it has left.

    Args:
        program: the program.
        arguments: those of a call, as an example.
        drawn: samples in them.
        random: random inputs in them.

    Attributes:
        form: that of both.
    """

    def __init__(
        self, program: StepProgram, arguments: Sequence[Tensor], drawn: Drawn, random: Mapping[str, Tensor]
    ) -> None:
        assert program.next_state is not None
        self.program = program
        self._loss, self._flags = program.writer.loss, program.writer.flags
        self._first = len(arguments) - len(program.next_state)  # where the state begins
        self._next_state = itemgetter(*program.next_state)  # of results and arguments
        self.form = DataForm.of((drawn, random))
        self._times = {source: len(samples) for source, samples in drawn.items()}
        # The forms of its batches, without their indices and weights; of one, if all of them have the same.
        self._batches: dict[str, list[DataForm]] = {}
        for source, samples in drawn.items():
            forms = [DataForm.of(own[0] if len(own) == 3 else own) for own in samples]
            self._batches[source] = forms[:1] if all([form == forms[0] for form in forms]) else forms
        count, own = len(arguments), enumerate(program.next_state, self._first)
        changing = [(j, place) for j, place in own if place != j - count]
        self._reusing = self._with_kept_results(arguments, changing)
        passed = {*program.writer.places, *program.next_state}
        self._passed = [j for j, _ in changing if j - count in passed]  # those that are results of the last step too

    def _with_kept_results(
        self, arguments: Sequence[Tensor], changing: Sequence[tuple[int, Place]]
    ) -> Sequence[Function]:
        """Return programs whose results keep their memory, to be called in turn for all steps but the last, if any.

        They run on a CPU, so that reading their losses and flags at once waits for nothing. The arguments that change
        come with their places in the step before.
        """
        small, count = self.program.program.small, len(arguments)
        # A result is an argument of the next step, and perhaps of more steps after it.
        turns, later = 2, {j for j, place in changing if place >= 0}
        while turns <= TURNS and (later := {j for j, place in changing if place + count in later}):
            turns += 1
        if small is None or turns > TURNS:
            return []
        # Results in the memory of an argument, such as the last x.
        owners = {storage_of(arguments[j]) for j, _ in changing}
        if any([storage_of(t) in owners for t in small.call([*arguments])]):
            return []
        return [small.reusing(set()) for _ in range(turns)]

    def shares_memory(self, arguments: Sequence[Tensor], live: Sequence[Tensor]) -> bool:
        """Return True if a loss may read the memory of a live tensor by itself: it changes when a step is written."""
        moving, others = {*map(storage_of, live)}, arguments[: self._first]
        return any(t.layout is not torch.strided or storage_of(t) in moving for t in others)

    def rows(
        self,
        columns: Mapping[str, tuple[Sequence[Any], Sequence[Tensor]]],
        random: Sequence[Sequence[Tensor]],
        count: int,
        memory: Sequence[range],
    ) -> list[Sequence[Tensor]]:
        """Return the tensors that each of ``count`` steps draws, up to the first whose batches `_parts` leaves out.

        Args:
            columns: the batches of all steps, by source, and the indices of terms.
            random: the random inputs.
            count: number of steps.
            memory: that of live tensors.
        """
        drawn: list[Sequence[Tensor]] = []  # by place in a step, the tensors of all steps
        for source, forms in self._batches.items():
            if source in columns:
                (batches, indices), times = columns[source], self._times[source]
                parts = _parts(batches, forms, memory)
                count = min(count, len(parts) // times)
                for k in range(times):
                    drawn += zip(*parts[k::times], strict=True)
                    drawn += [indices[k::times]] if indices else []
        drawn += random
        made: Iterable[Sequence[Tensor]] = zip(*drawn, strict=False) if drawn else repeat(())  # batches without tensors
        return [*islice(made, count)]

    def follow(
        self, arguments: Sequence[Tensor], data: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, Tensor | list[list[bool]], Call]:
        """Return losses and flags of a call and of one for each element of ``data``, and the last call.

        Without gradients.
        """
        call, next_state = self.program.program.call, self._next_state
        reusing = self._reusing if len(data) > 2 else ()
        at_loss, at_flags = self._loss, self._flags
        given, reads = [*arguments], arguments[: self.program.reads]
        losses, flags = list[Any](), list[Any]()  # numbers, of calls whose results keep their memory
        for program, drawn in zip(cycle(reusing or (call,)), data, strict=False):
            results = program(given if reusing else [*given])
            losses.append(results[at_loss].item() if reusing else results[at_loss])
            flags.append(results[at_flags].tolist() if reusing else results[at_flags])
            given = [*reads, *drawn, *next_state([*results, *given])]
        results = call([*given])
        loss, flag = results[at_loss], results[at_flags]
        if not reusing:
            return torch.stack([*losses, loss]), torch.stack([*flags, flag]), Call(given, results)
        for j in self._passed:  # the memory of earlier results will be used again
            given[j] = given[j].clone()
        in_a_row = torch.frombuffer(array("d", [*losses, loss.item()]), dtype=torch.float64)
        return in_a_row.to(loss.dtype), [*flags, flag.tolist()], Call(given, results)


def memory_of(tensors: Sequence[Tensor]) -> list[range]:
    """Return the addresses of the tensors' memory."""
    storages = [t.untyped_storage() for t in tensors]
    return [range(own.data_ptr(), own.data_ptr() + own.nbytes()) for own in storages]


def apart(tensors: Iterable[Tensor], memory: Sequence[range]) -> bool:
    """Return True if no tensor begins in this memory."""
    places = sorted(map(Tensor.data_ptr, tensors))
    return all([bisect_left(places, part.start) == bisect_left(places, part.stop) for part in memory])


def _parts(batches: Sequence[Any], forms: Sequence[DataForm], memory: Sequence[range]) -> Sequence[Sequence[Tensor]]:
    """Return the tensors of each batch, up to the first that has another form than the sample in its place.

    Or that lies in the ``memory`` of live tensors, which a step before it changes.
    """
    some = [distinct(batches[k :: len(forms)]) for k in range(len(forms))]
    if all(map(DataForm.fit_plainly, forms, some)) and apart(chain.from_iterable(chain(*some)), memory):
        return batches
    found: list[list[Tensor]] = []
    for k, batch in enumerate(batches):
        tensors = forms[k % len(forms)].tensors_of((batch,))
        if tensors is None or not apart(tensors, memory):
            break
        found.append(tensors)
    return found

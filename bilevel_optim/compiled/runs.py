"""Runs of compiled steps: many in a chain, written once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby, islice, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..optimizer.hooks import has_hooks
from ..optimizer.method import Method
from ..optimizer.progress import STILL
from ..optimizer.transaction import Action
from ..problem.objective import Loss
from .chain import Chain, apart, memory_of
from .draws import Sources, draw_many
from .entry import CHECKED_EVERY, Entry, Settings
from .key import has_one_key
from .program import Call, StepProgram
from .steps import CompiledSteps

__all__ = ["CompiledRuns"]

FIRST, AT_RISK = 64, 0.5  # steps of the first chain; seconds that a chain may take, which an interrupt undoes


class CompiledRuns(CompiledSteps):
    """Compiled steps of an optimizer, one by one or many in one call; arguments as in `CompiledSteps`."""

    def __init__(self, optimizer: Method, settings: Settings) -> None:
        super().__init__(optimizer, settings)
        self._most = FIRST

    def run(self, upper: Loss, lower: Loss | None, tasks: Any, steps: int, *, one: Callable[[], Tensor]) -> Tensor:
        """Make ``steps`` steps and return their losses; ``one`` makes one of them by itself.

        Where nothing can change in between, one guarded call is followed by direct ones.
        """
        optimizer, losses, done = self.optimizer, list[Tensor](), 0
        while done < steps:
            found = None
            if not (optimizer._finished() or has_hooks(optimizer) or optimizer._sets_below(tasks)):
                with optimizer._turn:
                    found = self._run_chain(self.sources_of(upper, lower, tasks), min(steps - done, self._most))
            if found is not None:
                optimizer._watch_losses(found, moves=True)
            losses.append(one().clone().reshape(1) if found is None else found)
            done += losses[-1].numel()
        return torch.cat(losses) if len(losses) > 1 else losses[0]

    def _run_chain(self, sources: Sources, most: int) -> Tensor | None:
        """Return losses of steps that are written at the end only; None if the next step is made by itself."""
        entry = self.entry_for(sources, True)
        if entry is None or self.why_eager(entry, sources) or self.moves_on_host or not sources.kind.are_lists:
            return None
        kinds = self._kinds(entry, sources, most)
        if sum([count for _, count in kinds]) < 2:
            return None
        began, place, done = time.monotonic(), self.place(sources), self.optimizer._run_state.steps
        enabled = torch.is_grad_enabled()
        try:
            found = self._follow_chain(kinds, sources, place)
        except BaseException:
            torch.set_grad_enabled(enabled)  # an interrupt may have left gradients off
            if self.optimizer._run_state.steps == done:
                self.return_to(place)
            raise
        if found is None:
            self.return_to(place)
            return None
        each = max(time.monotonic() - began, 1e-9) / found.numel()
        self._most = min(max(int(AT_RISK / each), 1), CHECKED_EVERY)
        self.tell_gain()
        return found

    def _kinds(self, first: Entry, sources: Sources, most: int) -> list[tuple[Entry, int]]:
        """Return entries with numbers of next steps, up to one that has to be made by itself, or is to be compared."""
        optimizer, found, left = self.optimizer, list[tuple[Entry, int]](), dict[Entry, int]()
        now, numbers, one = optimizer._run_state.steps, optimizer.numbers | sources.kind.terms, first.key[2]
        most = min(most, STILL - 1 - now) if now < STILL else most
        alike = has_one_key(type(optimizer))
        keys = repeat(one, most) if alike else (optimizer._graph_key(now + k, numbers) for k in range(most))
        for own, same in groupby(keys):
            key = [*first.key[:2], own, *first.key[3:]]
            entry = next((entry for entry in self.entries if entry.key == key), None)
            if entry is None or (found and (entry.reasons or (entry.draws is None and entry is not first))):
                break
            may_follow = entry.compiled and entry.compiled[0][1].may_follow
            kept = left.get(entry, entry.unwatched) if may_follow else 0
            count = len([*islice(same, kept + 1)])
            if kept:
                found.append((entry, min(count, kept)))
            if count > kept:
                break
            left[entry] = kept - count
        return found

    def _follow_chain(self, kinds: list[tuple[Entry, int]], sources: Sources, place: list[Action]) -> Tensor | None:
        """Run steps of these kinds as a chain, and write the last; return the losses of those that passed, if any."""
        optimizer, parts, latest = self.optimizer, list[Part](), dict[Entry, Part]()
        state, structure = kinds[0][0].places.read()
        for entry, count in kinds:
            part = latest.get(entry)
            if part is not None:  # no code of the user has run since its guards were checked
                part = self._part_like(part, sources, count, state)
            else:
                part = self._part(entry, sources, count, (state, structure))
            if part is None or (parts and part.program.writer.written != parts[0].program.writer.written):
                break
            parts.append(part)
            latest[entry] = part
            if part.losses.numel() < count:
                break
            values = part.last.values
            state = [values[k] for k in part.program.next_state or ()]
        made = sum([part.losses.numel() for part in parts])
        sound = self._sound(parts) if optimizer.check_finite else made
        if sound < sum([count for _, count in kinds]):
            self.return_to(place)
            left = sound
            for i, part in enumerate(parts):
                own = min(left, part.losses.numel())
                for _ in range(own):
                    self.drawn(part.entry, sources)
                if 0 < own < part.losses.numel():
                    parts[i] = self._followed(part.entry, part.program, part.arguments, part.data[: own - 1])
                left -= own
                if not left:
                    del parts[i + bool(own) :]
                    break
        if not parts:
            return None
        counts = dict.fromkeys(optimizer._run_state.counts, 0)
        for part in parts:
            part.entry.uses += part.losses.numel()
            for name in counts:
                counts[name] += part.losses.numel() * part.program.writer.counts[name]
        entry, program, last = parts[-1].entry, parts[-1].program, parts[-1].last
        with torch.no_grad():
            self.write(entry, program, last, last.values, True, sound, counts)
        return torch.cat([part.losses for part in parts]) if len(parts) > 1 else parts[0].losses

    def _part(self, entry: Entry, sources: Sources, count: int, state: tuple[list[Tensor], Any]) -> Part | None:
        """Run at most ``count`` steps of one kind from a state; return None if they cannot follow each other."""
        inputs, pure = self.drawn(entry, sources), entry.pure
        ready = None if inputs is None else self.ready(entry, inputs, state)
        if inputs is None or ready is None:
            return None
        program, arguments = ready
        if program.next_state is None:  # a step cannot follow before the one before is written
            return None
        if program.chain is None:
            program.chain = Chain(program, arguments, inputs.drawn, inputs.random)
        chain: Chain = program.chain
        if chain.shares_memory(arguments, [*pure.live_x, *pure.live_y, *pure.buffers]):
            return None
        data = self._ahead(entry, sources, chain, count - 1) if count > 1 else []
        return self._followed(entry, program, arguments, data)

    def _part_like(self, other: Part, sources: Sources, count: int, state: Sequence[Tensor]) -> Part | None:
        """Run at most ``count`` steps with the program of earlier ones; return None if data have another form."""
        program = other.program
        data = self._ahead(other.entry, sources, program.chain, count)
        arguments = [*other.arguments[: program.reads], *data[0], *state] if data else []
        return self._followed(other.entry, program, arguments, data[1:]) if data else None

    def _followed(
        self, entry: Entry, program: StepProgram, arguments: list[Tensor], data: list[Sequence[Tensor]]
    ) -> Part:
        with torch.no_grad():
            return Part(entry, program, arguments, data, *program.chain.follow(arguments, data))

    def _sound(self, parts: Sequence[Part]) -> int:
        """Return the number of steps before the first that has to be repeated eagerly."""
        sound = 0
        for part in parts:
            told = part.flags if isinstance(part.flags, list) else part.flags.tolist()  # one wait for all
            for k, on in enumerate(told if any(map(any, told)) else ()):
                if self.is_troubled(part.program.writer, on):
                    return sound + k
            sound += len(told)
        return sound

    def _ahead(self, entry: Entry, sources: Sources, chain: Chain, count: int) -> list[Sequence[Tensor]]:
        """Draw the tensors that ``count`` steps take from samples, up to the first step of another form."""
        pure = entry.pure
        memory = memory_of([*pure.live_x, *pure.live_y, *pure.buffers])
        if entry.draw_all is None and entry.draws is not None:
            ranges, generator = self.optimizer._random_inputs(), self.optimizer.generator
            found = draw_many(entry.draws, sources, count, ranges, generator)
            if found is not None:
                return chain.rows(*found, count, memory)
        data: list[Sequence[Tensor]] = []
        while len(data) < count:
            more = self.drawn(entry, sources)
            assert more is not None
            own = chain.form.tensors_of((more.drawn, more.random))
            if own is None or not apart(own, memory):
                break
            data.append(own)
        return data


class Part(NamedTuple):
    """Steps of one kind in a chain: arguments of the first, data of the others, their results, and the last call."""

    entry: Entry
    program: StepProgram
    arguments: list[Tensor]
    data: list[Sequence[Tensor]]
    losses: Tensor
    flags: Tensor | list[list[bool]]
    last: Call

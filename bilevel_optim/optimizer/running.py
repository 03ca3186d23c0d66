"""`run`: many steps in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain as joined
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..problem.feeding import Draws, drawn
from ..problem.parameters import is_count, require
from ..problem.random import draw_indices
from .ahead import are_apart, data_ahead
from .binding import Binding
from .capture import Capture
from .compiled import Call, Compiled, Place
from .flat import flattened
from .method import Loss
from .replay import Sources
from .transaction import make

__all__ = ["Running"]


class Running(Compiled):
    """The part of an optimizer that makes many steps at once."""

    def run(self, upper: Loss, lower: Loss | None = None, *, steps: int, tasks: Any = None) -> Tensor:
        """Make many outer steps in one call: the same numbers as that many calls of ``step``.

        After :meth:`compile`, captured steps follow each other without the host looking at a value: their flags are
        read once, at the end, and everything is written once. Learning rates are those at the beginning;
        ``oracle_counts`` are those of all the steps, ``diagnostics`` and ``.grad`` of the last one.

        Args:
            upper: as for :meth:`step`.
            lower: likewise.
            tasks: likewise.
            steps: how many.

        Returns:
            The upper losses of the steps, shape (steps,).

        Raises:
            NonFiniteError: names the step that failed. What the steps before it did is kept, nothing of it or after.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.5)
            >>> losses = optimizer.run(
            ...     lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2, steps=100
            ... )
            >>> losses.shape, round(x.item(), 4)
            (torch.Size([100]), 1.0)
        """
        require("steps", steps, is_count(steps) and steps > 0)
        losses: list[Tensor] = []
        done = 0
        while done < steps:
            if self._capture is None or self.finished():
                losses.append(self.step(upper, lower, tasks=tasks).reshape(1))
            else:
                losses += self._chained(self._capture, self._sources(upper, lower, tasks), steps - done)
            done = sum(map(len, losses))
        return torch.cat(losses)

    def _chained(self, capture: Capture, sources: Sources, steps: int) -> list[Tensor]:
        """Captured steps one after the other, and a single one where they end; at least one step."""
        start, apart = self._place(sources), are_apart(sources)
        chain: list[Sequence[Tensor]] = []
        draws = Draws()
        binding: Binding | None = None
        call: Call | None = None
        last: Any = None  # the step that follows: with what has been drawn for it
        try:
            while last is None and len(chain) < steps:
                call = self._next_call(capture, sources, call, len(chain))
                kind = call.kind
                if kind is None or kind.reason is not None or kind.draws is None:
                    last = partial(self._single, capture, call)
                    break
                if binding is not None and binding not in kind.bindings:
                    break
                draws = kind.draws
                likely = binding or next(filter(self._chains, kind.bindings), None)
                if likely is not None and apart:
                    ahead = self._ahead(call, draws, likely, len(chain), steps - len(chain))
                    if ahead:
                        binding = likely
                        chain += ahead
                        continue
                if self.chances():
                    call = call._replace(chances=self._chances())
                results = drawn(draws, *sources, self.generator, call.chances)
                data = flattened(results, call.chances)
                found = binding if binding is not None and binding.fits(data) else kind.binding(data)
                if found is None or found is not (binding or found) or not (binding or self._chains(found)):
                    last = partial(self._replayed, capture, kind, call, results)
                elif found.due():
                    last = partial(self._compared, capture, kind, call, results, found, data)
                else:
                    binding = found
                    chain.append(data.tensors)
            if binding is not None and not apart and not binding.has_form(chain):
                raise RuntimeError("a batch was resized while others were drawn for the same run")
        except BaseException:
            self._return_to(sources, start)
            raise
        losses, sound = self._linked(capture, binding, chain) if binding is not None else ([], 0)
        if sound < len(chain):
            self._return_behind(sources, start, draws, sound)
            return [*losses, self._captured(capture, *sources, update=True).reshape(1)]
        if last is not None:
            try:
                losses.append(last().reshape(1))
            except BaseException:
                self._return_behind(sources, start, draws, len(chain))
                raise
        return losses

    def _chains(self, binding: Binding) -> bool:
        """Whether steps with this graph may follow each other."""
        return binding.chains and not self.declared.host_update and binding.holds(self.state, self.numbers)

    def _ahead(self, call: Call, draws: Draws, binding: Binding, made: int, most: int) -> list[Sequence[Tensor]]:
        """Data of the next steps, the first of which is this call, as far as they are surely made with this graph."""
        if binding.batches is None:
            return []
        first = self._ledger.steps + made
        same = self.kind_of_step(first, self.numbers)
        following = (self.kind_of_step(first + k, self.numbers) for k in range(min(most, binding.unwatched)))
        steps = len([*takewhile(lambda now: now == same, following)])
        place, data = self._place(call.sources), list[Sequence[Tensor]]()
        while steps:
            chances = {}
            if ranges := self.chances():
                chances = dict(zip(ranges, draw_indices([*ranges.values()], steps, self.generator), strict=True))
            data = data_ahead(draws, binding.batches, call.sources, chances, steps)
            if data and not binding.has_form(data[:1]):
                data = []  # of losses that draw something else now
            if len(data) == steps:
                break
            self._return_to(call.sources, place)
            steps = len(data)
        binding.uses += steps
        return data

    def _return_behind(self, sources: Sources, start: Place, draws: Draws, steps: int) -> None:
        """Let everything draw again from where so many steps that drew this have ended."""
        self._return_to(sources, start)
        for _ in range(steps):
            chances = self._chances()
            drawn(draws, *sources, self.generator, chances)

    def _next_call(self, capture: Capture, sources: Sources, before: Call | None, ahead: int) -> Call:
        """The call of the next step; of the same kind as the one before if nothing says otherwise."""
        steps = self._ledger.steps + ahead
        now, last = (self.kind_of_step(k, self.numbers) for k in (steps, steps - 1))
        if before is None or now is None or now != last:
            return self._call(capture, sources, True, ahead)
        return before

    def _linked(
        self, capture: Capture, binding: Binding, chain: Sequence[Sequence[Tensor]]
    ) -> tuple[list[Tensor], int]:
        """The losses of captured steps that follow each other, of those before the first that failed, and how many."""
        rates = capture.rates(self.param_groups, binding.device)
        with torch.no_grad():
            start = binding.arguments(self.numbers)
            many = binding.several(start, rates, chain)
            losses, flags, last = _followed(binding, many, start, rates, chain)
            sound = len(chain) if not self.check_finite else self._sound(binding, flags)
            if sound < len(chain):  # nothing has been written: make the sound ones again
                if not sound:
                    return [], 0
                losses, _, last = _followed(binding, many, start, rates, chain[:sound])
            make(self._writes_of(*last, losses[-1], sound))
        return [losses], sound

    def _sound(self, binding: Binding, flags: Tensor) -> int:
        """How many steps passed before the first one with a flag that matters."""
        if not bool(flags.any()):
            return len(flags)
        step = binding.step
        known = self._ledger.warned - {self.reacts_to(self.numbers)}
        matters = [True] + [key not in known for key in step.alerts]
        failed = (flags & flags.new_tensor(matters)).any(1).tolist()
        return failed.index(True) if any(failed) else len(flags)


def _followed(
    binding: Binding,
    many: Binding | None,
    arguments: Sequence[Tensor],
    rates: Sequence[Tensor],
    data: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, Tensor, tuple[Binding, Sequence[Tensor]]]:
    """Losses and flags of steps with these data that follow each other, and what the last graph gave."""
    losses: list[Tensor] = []
    flags: list[Tensor] = []
    times = len(data) + 1 if many is None else many.step.times
    single = len(data) % times
    if many is not None and single < len(data):
        parts = [[*joined.from_iterable(data[i : i + times])] for i in range(0, len(data) - single, times)]
        losses, flags, outputs = many.each(arguments, rates, parts)
        if not single:
            return torch.cat(losses), torch.cat(flags), (many, outputs)
        arguments = many.following(arguments, outputs)
    ends, raised, outputs = binding.each(arguments, rates, data[-single:])
    return torch.cat([*losses, *ends]), torch.cat([*flags, *raised]), (binding, outputs)

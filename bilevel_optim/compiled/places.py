"""Places of a compiled step's state and results, found once and used by each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..optimizer.method import Method
from ..optimizer.step import Update
from ..optimizer.transaction import (
    SOLVER,
    TABLE,
    UPPER_SOLVER,
    Action,
    owned,
    remember_solver,
    set_gradients,
    write_rows,
)
from ..problem.vector import Vector
from ..pytree import is_named_tuple, replace, tree_leaves
from .forms import structure_of
from .pure import PureStep, Results, state_of

__all__ = ["Place", "StatePlaces", "Writer", "buffer_writes", "on_tensors"]


class StatePlaces:
    """The places of a step's state: entries of the optimizer's state, live tensors, buffers, and learning rates.

    Args:
        optimizer: the optimizer.
        pure: the step.
        rates: returns the learning rates as tensors on a device.
    """

    def __init__(self, optimizer: Method, pure: PureStep, rates: Callable[[torch.device], list[Tensor]]) -> None:
        self._optimizer, self._pure, self._rates = optimizer, pure, rates
        self._live = [*pure.live_x, *pure.live_y]
        self._structure: Any = None
        self._found = False  # the rest is known
        self._kept: list[Any] = []  # options on which the state depends, and all names in it
        self._owners: list[Tensor] = []  # tensors with a state
        self._states: list[dict[str, Any]] = []  # their states
        self._entries: list[tuple[dict[str, Any], str]] = []  # those that a step reads, in order

    def read(self) -> tuple[list[Tensor], Any]:
        """Return the tensors of the state, in order, and its structure."""
        found = self._at_known_places() if self._found else None
        return self._search() if found is None else (found, self._structure)

    def _at_known_places(self) -> list[Tensor] | None:
        """Return the tensors of the state; None if others belong to it now, or something else has changed."""
        state, owners, states = self._optimizer.state, self._owners, self._states
        # By functions in C, because every step does this, and hashing a tensor is a call of a function in Python.
        if len(state) != len(owners) or not (all(map(is_, state, owners)) and all(map(is_, state.values(), states))):
            return None
        if self._options() != self._kept:
            return None
        tensors = [t.detach() for t in self._live]
        tensors += self._pure.buffers
        tensors += self._rates(tensors[-1].device)
        kept = [entries[name] for entries, name in self._entries]
        if numbers := self._optimizer.numbers:
            kept += [value for value in numbers.values() if isinstance(value, Tensor)]
        return tensors + kept if all([isinstance(t, Tensor) for t in kept]) else None

    def _options(self) -> list[Any]:
        optimizer, numbers = self._optimizer, self._optimizer.numbers
        found = [optimizer.warm_start, optimizer.lower_init is None, optimizer._placeholders, *map(list, self._states)]
        return found + [name for name in numbers if isinstance(numbers[name], Tensor)] if numbers else found

    def _search(self) -> tuple[list[Tensor], Any]:
        optimizer, x, y = self._optimizer, self._pure.live_x, self._pure.live_y
        tensors: list[Tensor] = []
        known = state_of(optimizer, x, y, self._pure.buffers, self._rates(y[0].device))
        self._structure = structure_of(known, tensors)
        state = optimizer.state
        self._owners, self._states = [*state], [*state.values()]
        self._kept = self._options()
        places = [(state[p], name) for name in known["memory"] for p in y]
        places += [(state[p], name) for name in known["upper_memory"] for p in x]
        places += [(state[y[0]], TABLE + name) for name in known["tables"]]
        for prefix, level, memory in ((SOLVER, y, known["solver"]), (UPPER_SOLVER, x, known["upper_solver"])):
            pairs = zip(level, memory or (), strict=False)
            places += [(state[p], prefix + name) for p, entries in pairs for name in entries]
        self._entries, live = places, len(self._live)
        again = self._at_known_places()  # None if an entry is no tensor: then each step searches
        self._found = again is not None and len(again) == len(tensors) and all(map(is_, again[live:], tensors[live:]))
        return tensors, self._structure


# ------------------------------------------------------------------------------------------------ results


class Place(int):
    """The place of a tensor among the results of a step's program, or, negative, among its arguments from the end."""


def on_tensors(function: Callable[[Any], Any], part: Any) -> Any:
    """Apply a function to each tensor, or to each `Place` of one, in a step's state or results."""
    kind = type(part)
    if kind is Place:
        return function(part)
    if kind is dict:
        return {name: on_tensors(function, own) for name, own in part.items()}
    if kind is list or kind is tuple or kind is Vector:
        return kind([on_tensors(function, own) for own in part])
    if is_named_tuple(kind):
        return kind(*[on_tensors(function, own) for own in part])
    if kind is Estimate or kind is Update:
        return replace(part, **on_tensors(function, vars(part)))
    return function(part) if isinstance(part, Tensor) else part


class Writer:
    """Writes the results of a step's program, without putting them together as an estimate.

    Args:
        results: the step's results, from a `PureStep`, with a `Place` for each tensor.
        pure: the step.

    Attributes:
        loss, flags: the places of these results.
        places: those of all results.
        kept: the places of tensors that are kept as they are; others are copied.
        alerts: what the flags after the first one are for.
        counts: oracle calls.
        written: the places written to; if those of another writer are equal, this one's results replace its own.
    """

    def __init__(self, results: Results, pure: PureStep) -> None:
        estimate: Any = results.estimate  # with places, not tensors
        moved: Any = results.moved or Update(Vector())
        self.loss, self.flags = estimate.loss, cast("Any", results.flags)
        self.alerts, self.counts = results.alerts, results.counts
        self._gradient, self._diagnostics = estimate.gradient, estimate.diagnostics
        plain = len(self._diagnostics) > 1 and {*map(type, self._diagnostics.values())} == {Place}
        self._figures = [*self._diagnostics], itemgetter(*self._diagnostics.values()) if plain else None
        self._numbers = {**estimate.numbers, **moved.numbers}
        self._pure, self._x = pure, pure.live_x
        y, self._buffers, self._rows = pure.live_y, cast("Any", results.buffers), results.estimate.writes
        # Entries of the state: parameter, name and place; None deletes the entry.
        self._entries: list[tuple[Tensor, str, Any]] = [
            (p, name, place)
            for live, entries in (
                (y, estimate.memory),
                (self._x, estimate.upper_memory),
                (y[:1], {TABLE + name: [place] for name, place in estimate.tables.items()}),
                (self._x, moved.upper_memory),
            )
            for name, places in entries.items()
            for p, place in zip(live, places or [None] * len(live), strict=True)
        ]
        self._solvers = [
            (live, memory, prefix)
            for live, memory, prefix in ((y, estimate.solver, SOLVER), (self._x, moved.solver, UPPER_SOLVER))
            if memory is not None
        ]
        pairs = [*zip(y, moved.lower or estimate.lower or (), strict=False)]
        pairs += zip(self._x, moved.x, strict=False)
        self._live, self._values = [t for t, _ in pairs], [place for _, place in pairs]
        staying = self.loss, self._diagnostics, self._numbers, self._solvers, [place for *_, place in self._entries]
        self.kept: set[int] = {leaf for leaf in tree_leaves(staying) if isinstance(leaf, Place)}
        self.places: list[Place] = []

        def note(place: Place) -> Place:
            self.places.append(place)
            return place

        on_tensors(note, results)
        entries = [(id(p), name, place is None) for p, name, place in self._entries]
        solvers = [(prefix, structure_of(memory, [])) for _, memory, prefix in self._solvers]
        self.written = entries, solvers, [*map(id, self._live)], len(self._buffers), {*self._numbers}

    def writes(self, optimizer: Method, values: Sequence[Tensor], after: dict[str, Any]) -> list[Action]:
        """Return the writes of a call's results, in the order of `writes_of`; ``after`` is the run state after it."""
        # Copies, because gradients are clipped in place; they may be constants of the graph, or tensors of the user.
        gradients = [values[place].clone() for place in self._gradient]
        found: list[Action] = [partial(self._write_state, optimizer, values, gradients)]
        if self._values:  # last, because the state may hold the old ones
            found.append(partial(torch._foreach_copy_, self._live, [values[place] for place in self._values]))
        if self._buffers:
            found += buffer_writes(self._pure, [values[place] for place in self._buffers])
        names, pick = self._figures
        if pick is None:
            figures = on_tensors(values.__getitem__, self._diagnostics)
        else:
            figures = dict(zip(names, pick(values), strict=True))
        numbers = on_tensors(values.__getitem__, self._numbers) if self._numbers else {}
        found += optimizer._result_writes(figures, numbers, optimizer._run_state.found, after)
        return found

    def _write_state(self, optimizer: Method, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if self._rows:
            write_rows(on_tensors(values.__getitem__, self._rows))
        set_gradients(self._x, gradients)
        state = optimizer.state
        for p, name, place in self._entries:
            if place is None:
                state[p].pop(name, None)
            else:
                t = values[place]
                state[p][name] = owned(t.detach() if t.requires_grad else t, p)
        for live, memory, prefix in self._solvers:
            remember_solver(state, live, on_tensors(values.__getitem__, memory), prefix)


def buffer_writes(pure: PureStep, left: Sequence[Tensor]) -> list[Action]:
    """Return the writes of new values of the module buffers."""
    pairs = [pair for pair in zip(pure.buffers, left, strict=True) if pair[0] is not pair[1]] if left else []
    return [partial(Vector(live for live, _ in pairs).copy_, [value for _, value in pairs])] if pairs else []

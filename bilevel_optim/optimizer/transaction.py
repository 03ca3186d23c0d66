"""State from earlier steps, and the transaction of a step: a failed one changes nothing, others are written whole."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, get_ident
from traceback import clear_frames
from types import FrameType
from typing import Any, NamedTuple, Self
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_dynamic_layer_stack_depth,
    get_interpreter_stack,
    pop_dynamic_layer_stack_and_undo_to_depth,
)
from torch.overrides import _pop_mode

from ..errors import require_uninterrupted
from ..hypergradient import Estimate
from ..hypergradient.estimate import Write
from ..oracle.buffers import Buffers, Kept
from ..oracle.oracle import Oracle
from ..oracle.session import COUNTERS, LossFacts, LowerTrend, Session
from ..oracle.stacks import mapped
from ..problem.objective import version_of
from ..problem.random import default_state, set_default_state
from ..problem.vector import Vector, is_sharded
from ..solvers.lower import Memory
from .progress import SystemTrend, UpperTrend
from .step import Update

__all__ = [
    "AVERAGE",
    "COUNTS",
    "INITIAL",
    "LIVE",
    "SOLVER",
    "SOLVERS",
    "TABLE",
    "UPPER_SOLVER",
    "Action",
    "RunState",
    "State",
    "Transaction",
    "Turn",
    "carry_over",
    "make",
    "owned",
    "recalled",
    "remember",
    "remember_solver",
    "require_no_transform",
    "set_gradients",
    "spent_gradient",
    "undo_of",
    "write_rows",
    "writes_of",
]

Action = Callable[[], object]
CPU = torch.device("cpu")
_TAKING_OVER = Lock()


class Turn:
    """Context of a step: only one thread at a time may be inside; for another one it raises."""

    __slots__ = ("_depth", "_owner")

    def __init__(self) -> None:
        self._owner: dict[str, int] = {}
        self._depth = 0

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()

    def __enter__(self) -> None:
        own = get_ident()
        if self._owner.setdefault("thread", own) != own:  # looks and writes at once
            with _TAKING_OVER:
                if self._is_inside(self._owner.get("thread")):  # None if it has just left
                    raise RuntimeError(
                        "another thread is making a step with this optimizer, and both would write into the same "
                        "parameters and state; hold a lock around the calls, or give each thread parameters and an "
                        "optimizer of its own"
                    )
                self._owner["thread"], self._depth = own, 0
        self._depth += 1

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner.clear()

    def _is_inside(self, thread: int | None) -> bool:
        """Return True if a thread is in a call of the optimizer: an interrupt at the border leaves the turn taken."""
        frame = None if thread is None else sys._current_frames().get(thread)
        return any(getattr(own.f_locals.get("self"), "_turn", None) is self for own in _stack(frame))


class Transaction:
    """A block that changes nothing if it raises before its step is accepted.

    Nothing is written while a step is computed. A failure restores the rest: torch's random state, the optimizer's, the
    positions in the data and module buffers, and, after an interrupt, the storages of the live tensors and torch's
    modes. Until all ranks have called `conclude`, a failure ends the step on all of them.

    Args:
        generator: generator of the optimizer.
        oracle: oracle of the step; None for an update from ``.grad``.
        device: device of the parameters, if there is no oracle.
    """

    __slots__ = (
        "_accepted", "_before", "_buffers", "_data", "_device", "_generator", "oracle",
    )  # fmt: skip

    def __init__(
        self,
        generator: torch.Generator | None,
        oracle: Oracle | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.oracle, self._generator, self._accepted = oracle, generator, False
        constant = oracle is None or oracle.session.buffers_constant
        self._buffers = None if oracle is None or constant else Kept(oracle.session.buffers, on_failure=True)
        self._device = device if oracle is None else oracle.device
        self._before: tuple[Any, ...] = ()
        self._data: list[tuple[Any, Any]] = []

    def __enter__(self) -> Self:
        own = None if self._generator is None else self._generator.get_state()
        if get_dynamic_layer_stack_depth() and not _in_transform():
            _end_layers(0)  # an interrupt has left them on, here or elsewhere
        modes = torch._C._len_torch_function_stack(), get_dynamic_layer_stack_depth(), torch.is_grad_enabled()
        self._before = default_state(self._device), own, modes
        if self.oracle is not None:
            self._data = [(own, own.mark()) for own in (self.oracle.f, self.oracle.g) if own.data is not None]
        if self._buffers is not None:
            self._buffers.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failed = error is not None and not self._accepted
        if error is not None:
            self._restore_modes(error)
        if failed:
            self._restore_storages()
        if self._buffers is not None:
            reason = (kind, error, trace) if failed else (None, None, None)
            self._buffers.__exit__(*reason)
        if failed:
            self._undo()
        if isinstance(error, RuntimeError):
            require_uninterrupted(error)

    def conclude(self) -> None:
        """Wait for all ranks, and agree on how to evaluate copies of y."""
        assert self.oracle is not None
        found, ranks = self.oracle.session.found, self.oracle.session.options.ranks
        if ranks.alone:
            return
        if ranks.conclude(self.oracle.device, found.fallback is not None) and found.fallback is None:
            found.fallback = "another rank could not vectorise the losses"

    def commit(self, writes: Sequence[Action], undo: Callable[[], None] | None = None) -> None:
        """Accept the step and make the writes; an interrupt waits for them, and may repeat one.

        If a write raises, ``undo`` reverts those that were made.
        """
        with torch.set_grad_enabled(False):
            try:
                make([partial(setattr, self, "_accepted", True), *writes])
            except Exception:
                if undo is not None:
                    undo()
                    self._accepted = False
                raise

    def _restore_modes(self, error: BaseException) -> None:
        """End modes that an interrupt has left on."""
        *_, (depth, layers, enabled) = self._before
        while torch._C._len_torch_function_stack() > depth:
            _pop_mode()  # type: ignore[no-untyped-call]
        if get_dynamic_layer_stack_depth() > layers:  # vmap's block ends its layers when the last frame releases it
            clear_frames(error.__traceback__)
        _end_layers(layers)
        torch.set_grad_enabled(enabled)

    def _restore_storages(self) -> None:
        """Give the live tensors their own storages back, if an interrupt has left others."""
        if self.oracle is not None:
            # The oracle's initial point shares the live tensors' own storages.
            own = (*self.oracle.live_x, *self.oracle.live_y), (*self.oracle.x, *self.oracle.y)
            for live, value in zip(*own, strict=True):
                if not is_sharded(live) and live.data_ptr() != value.data_ptr():
                    live.data = value

    def _undo(self) -> None:
        random, own, _ = self._before
        for objective, mark in self._data:
            objective.rewind(mark)
        if self._generator is not None:
            self._generator.set_state(own)
        set_default_state(self._device, random)


def _end_layers(depth: int) -> None:
    """End all layers of functorch (levels of vmap) above a depth."""
    if get_dynamic_layer_stack_depth() > depth:
        try:
            pop_dynamic_layer_stack_and_undo_to_depth(depth)
        except RuntimeError:  # torch 2.11 ends the last level, then looks for another one
            if get_dynamic_layer_stack_depth() > depth:
                raise


def require_no_transform() -> None:
    """Raise RuntimeError under ``torch.func.grad`` and ``jvp``, whose tensors would stay in parameters and state."""
    levels = get_interpreter_stack() or ()  # an interrupt may have left some on
    if any([level.key() in _WRAPPING for level in levels]) and _in_transform():
        raise RuntimeError(
            "a step cannot be made under torch.func.grad, jvp and their relatives, whose tensors end with them: call "
            "it outside the function that is transformed, or solve the lower problem in it by plain steps"
        )


_WRAPPING = (TransformType.Grad, TransformType.Jvp)  # all results are their tensors, under vmap only those of stacks


def _in_transform() -> bool:
    """Return True within a call of one of functorch's transforms, or of `mapped`."""
    return any(
        own.f_globals.get("__name__", "").startswith("torch._functorch.") or own.f_code is mapped.__code__
        for own in _stack(inspect.currentframe())
    )


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Iterate over a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def make(writes: Sequence[Action]) -> None:
    """Make writes; an interrupt waits for them, and may repeat one."""
    done = 0
    try:
        while done < len(writes):
            writes[done]()
            done += 1
    except KeyboardInterrupt:
        make(writes[done:])
        raise


def writes_of(
    state: State,
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    estimate: Estimate | None,
    update: Update | None,
) -> list[Action]:
    """Return the writes of an estimate for these live tensors, ``.grad`` of x included, and of an update of x."""
    writes: list[Action] = []
    lower = None
    if estimate is not None:
        # Copies, because gradients are clipped in place.
        gradients = [gradient.detach().clone() for gradient in estimate.gradient]
        tables = {TABLE + name: [table] for name, table in estimate.tables.items()}
        memories = (y, estimate.memory), (x, estimate.upper_memory), (y[:1], tables)
        if estimate.writes:
            writes.append(partial(write_rows, estimate.writes))
        writes.append(partial(set_gradients, x, gradients))
        writes += [partial(remember, state, tensors, memory) for tensors, memory in memories if memory]
        if estimate.solver is not None:
            writes.append(partial(remember_solver, state, y, estimate.solver))
        lower = estimate.lower
    if update is not None:
        if update.upper_memory:
            writes.append(partial(remember, state, x, update.upper_memory))
        if update.solver is not None:
            writes.append(partial(remember_solver, state, x, update.solver, UPPER_SOLVER))
        lower = lower if update.lower is None else update.lower
    live = (*(() if lower is None else y), *(() if update is None else x))
    values = (*(lower or ()), *(() if update is None else update.x))
    # Last, because the state may hold the old values.
    return [*writes, partial(_write_values, Vector(live), values)] if live else writes


def undo_of(state: State, x: Sequence[Tensor], y: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that restores the state of parameters and ``.grad`` of x; call this before a step is written.

    A write that raises leaves nothing else behind. Rows of tables are written first; values come after the state, once
    their shapes have been checked; plain numbers come last and cannot fail.
    """
    entries = [(p, None if (own := state.get(p)) is None else own.copy()) for p in (*x, *y)]
    gradients = [p.grad for p in x]

    def undo() -> None:
        for p, own in entries:
            if own is None:
                state.pop(p, None)
            else:
                state[p] = own
        set_gradients(x, gradients)

    return undo


def _write_values(live: Vector, values: Sequence[Tensor]) -> None:
    if [t.shape for t in live] != [value.shape for value in values]:
        t, value = next(pair for pair in zip(live, values, strict=True) if pair[0].shape != pair[1].shape)
        raise ValueError(
            f"a method returned a value of shape {tuple(value.shape)} for a parameter of shape {tuple(t.shape)}; "
            "return tensors with the shapes of the parameters from estimate() and update()"
        )
    live.copy_(values)


def set_gradients(x: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Set ``.grad`` of the upper tensors."""
    for parameter, gradient in zip(x, gradients, strict=True):
        parameter.grad = gradient


Spent = tuple[ReferenceType[Tensor], int]  # a ``.grad`` of x that has moved it, and the version of its values


def spent_gradient(x: Iterable[Tensor]) -> Spent | None:
    """Return the first ``.grad`` of x as one that has moved it; None if there is none."""
    for t in x:
        if (grad := t.grad) is not None:
            return ref(grad), version_of(grad)
    return None


SOLVER = "lower_optimizer."  # prefix of the lower optimizer's entries
UPPER_SOLVER = "upper_optimizer."  # prefix of the upper optimizer's entries
SOLVERS = (SOLVER, UPPER_SOLVER)
COUNTS = tuple(solver + name for solver in SOLVERS for name in ("step", "mu_product"))  # entries that only count
INITIAL = "initial"  # entry of y: start of every lower solve without warm starts
SOLUTION = "linear_solution"  # entry of y: v
AVERAGE, LIVE = "average", "live"  # entries of x: a method's output, and x while the parameters hold the output
COPIES = "copies"  # entry of y: perturbed copies of it
TABLE = "rows."  # prefix of tables whose rows mix all lower parameters; the first of these holds them
# Entries that stay where a parameter joins, with the value for the new one: of it and of the entry of another one.
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    INITIAL: lambda p, _: p,
    SOLUTION: lambda p, _: torch.zeros_like(p),
    COPIES: lambda p, copies: p.expand(len(copies), *p.shape),
}

State = MutableMapping[Tensor, dict[str, Any]]


class Recalled(NamedTuple):
    """State of the parameters of one level: entries that all of them have, tables, and their optimizer's state."""

    memory: dict[str, Vector]
    tables: dict[str, Tensor]
    solver: Memory | None  # None if there is none


def recalled(state: State, parameters: Sequence[Tensor], prefix: str) -> Recalled:
    """Return the state of the parameters of one level, whose optimizer's entries have this prefix."""
    own = [state.get(p, _NOTHING) for p in parameters]
    if not any(own):
        return Recalled({}, {}, None)
    memory: dict[str, Vector] = {}
    tables: dict[str, Tensor] = {}
    alike = all([entries.keys() == own[0].keys() for entries in own])
    alone = not alike  # whether a parameter may have entries of its own
    for name, value in own[0].items():
        if name.startswith(SOLVERS):
            alone = True
        elif name.startswith(TABLE):
            tables[name[len(TABLE) :]] = value
        elif alike or all([name in entries for entries in own]):
            memory[name] = Vector([entries[name] for entries in own])
    for name, begin in () if alike else JOINS.items():
        example = next((entries[name] for entries in own if name in entries), None)
        if example is not None:
            pairs = zip(own, parameters, strict=True)
            memory[name] = Vector([e[name] if name in e else begin(p, example) for e, p in pairs]).detach()
    found = own if alone else ()
    solver = [{k[len(prefix) :]: v for k, v in entries.items() if k.startswith(prefix)} for entries in found]
    return Recalled(memory, tables, solver if any(solver) else None)


_NOTHING: Mapping[str, Any] = {}


def remember(state: State, parameters: Sequence[Tensor], memory: Mapping[str, Sequence[Tensor] | None]) -> None:
    """Write state entries; None deletes an entry."""
    for name, vector in memory.items():
        if vector is None:
            for parameter in parameters:
                state[parameter].pop(name, None)
        else:
            for parameter, value in zip(parameters, vector, strict=True):
                state[parameter][name] = owned(value.detach(), parameter)


def write_rows(writes: Iterable[Write]) -> None:
    """Change rows of large tables."""
    for write in writes:
        write.table[write.rows] = write.values


def owned(value: Any, parameter: Tensor) -> Any:
    """Return a value to store: a copy if it shares memory with the live parameter, which will change."""
    alias = isinstance(value, Tensor) and (is_sharded(value) or value.data_ptr() == parameter.data_ptr())
    return value.clone() if alias else value


def remember_solver(state: State, parameters: Sequence[Tensor], memory: Memory, prefix: str = SOLVER) -> None:
    """Replace the state of a level's optimizer."""
    for parameter, entries in zip(parameters, memory, strict=True):
        kept = state[parameter]
        for name in [*kept]:
            if name.startswith(prefix):
                del kept[name]
        for name, value in entries.items():
            kept[prefix + name] = owned(value, parameter)


# Ends of the names of state that stays usable if other parameters are trained: starts of solves, averages for the user,
# and the tables of terms of finite sums, whose rows of a parameter that has rested are old, but fit their mean.
STAYS = (INITIAL, COPIES, "curvature", SOLUTION, "linear_direction", AVERAGE, LIVE, "perturbation", "table",
         "mean")  # fmt: skip
ROWS = (TABLE + "task_memory", TABLE + SOLUTION)


def carry_over(state: State, levels: Sequence[tuple[str, Tensor]], known: Sequence[bool]) -> None:
    """Drop state that is right only while the same parameters require a gradient.

    A recursion compares a step with the last one, between which a parameter that rests now has moved, and a parameter
    that has rested has an earlier state. Tables have columns for the lower parameters; new columns are NaN. ``known``:
    whether each parameter, by position, required a gradient before.
    """
    before = [*known, *[False] * (len(levels) - len(known))]
    old = [p for own, (level, p) in zip(before, levels, strict=True) if own and level == "lower"]
    new = [p for level, p in levels if p.requires_grad and level == "lower"]
    if [*map(id, old)] != [*map(id, new)]:
        owners = [state[p] for p in old if p in state]
        tables = {name: own.pop(name) for own in owners for name in [*own] if name.startswith(TABLE)}
        for name in [name for name in ROWS if name in tables]:
            table = tables[name]
            columns = dict(zip(map(id, old), table.split([p.numel() for p in old], 1), strict=True))
            parts = [columns.get(id(p), table.new_full((len(table), p.numel()), torch.nan)) for p in new]
            state[new[0]][name] = torch.cat(parts, 1)
    for p in [p for _, p in levels if p in state]:
        entries = state[p]
        for name in [name for name in entries if not name.startswith((*SOLVERS, TABLE)) and not name.endswith(STAYS)]:
            del entries[name]
        if not p.requires_grad:  # where it rests is not where its average is
            entries.pop(AVERAGE, None)


# Counts, times of rows and probabilities of tasks have a type of their own.
OWN_TYPE = (*COUNTS, *(TABLE + name for name in ("log", "drift", "last", "probability", "cumulative")))


@dataclass
class RunState:
    """State of a run, written with each accepted step.

    Attributes:
        found: known facts about the losses.
        buffers: module buffers that evaluations change.
        warned: keys of earlier warnings.
        counts: oracle calls.
        steps: outer steps made.
        last_loss: result of the last step.
        trend: trend of lower solves.
        upper_trend: trend of the upper loss.
        system_trend: trend of a linear system whose solution is carried on.
        written: version of each upper tensor at the end of `backward`, by id.
        spent: a ``.grad`` of x that has moved it, in a step with losses.
        kinds: types of all parameters when the state was made.
        trained: whether each parameter required a gradient in the last step.
        begins_anew: number of the step without state that was dropped, so that it may draw others than its like.
    """

    found: LossFacts = field(default_factory=LossFacts)
    buffers: Buffers = field(default_factory=Buffers)
    warned: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    steps: int = 0
    last_loss: Tensor | None = None
    trend: LowerTrend = field(default_factory=LowerTrend)
    upper_trend: UpperTrend = field(default_factory=UpperTrend)
    system_trend: SystemTrend = field(default_factory=SystemTrend)
    written: dict[int, int] = field(default_factory=dict)
    spent: Spent | None = None
    kinds: tuple[torch.dtype, ...] | None = None
    trained: tuple[bool, ...] | None = None
    begins_anew: int = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "spent": None}  # a copy has other tensors

    def note_trained(self, state: State, groups: Sequence[Mapping[str, Any]]) -> None:
        """Before an estimate: if ``requires_grad`` of some has changed, drop what cannot go on with the others."""
        trained = tuple([p.requires_grad for group in groups for p in group["params"]])
        known, self.trained = self.trained, trained
        if known is not None and known != trained:
            self.begins_anew = self.steps
            carry_over(state, [(group["level"], p) for group in groups for p in group["params"]], known)

    def follow(self, state: State, groups: Iterable[Mapping[str, Any]]) -> None:
        """Cast the state if parameters of the groups have been cast since (``module.float()``)."""
        parameters = [p for group in groups for p in group["params"]]
        before, kinds = self.kinds, tuple([p.dtype for p in parameters])
        self.kinds = kinds
        if before is None or kinds == before:
            return
        changes = {pair for pair in zip(before, kinds, strict=False) if pair[0] != pair[1]}
        # Tables mix all parameters, so they keep their type if it has become two.
        common = {old: new for old, new in changes if sum(pair[0] == old for pair in changes) == 1}
        for parameter, old, new in zip(parameters, before, kinds, strict=False):
            for name, value in state.get(parameter, _NOTHING).items():
                if isinstance(value, Tensor) and not name.endswith(OWN_TYPE):
                    to = common.get(value.dtype) if name.startswith(TABLE) else new if value.dtype == old else None
                    if to is not None:
                        precise = name.startswith(TABLE) and name not in ROWS  # recursions
                        state[parameter][name] = value.to(torch.promote_types(to, torch.float32) if precise else to)

    def after(self, session: Session, loss: Tensor) -> dict[str, Any]:
        """Return the attributes' values after a step."""
        counts = {name: count + session.counts[name] for name, count in self.counts.items()}
        return {
            "found": session.found,
            "warned": session.warned,
            "trend": session.trend,
            "counts": counts,
            "steps": self.steps + 1,
            "last_loss": loss.detach(),
        }

    def enter(self, after: dict[str, Any]) -> None:
        """Write a result of `after`; may be repeated."""
        self.__dict__.update(after)
        self.buffers.complete = True

    def saved(self) -> dict[str, Any]:
        """Return the entries for a state dict."""
        return {
            "steps_done": self.steps,
            "oracle_counts": dict(self.counts),
            "fallback": self.found.fallback,
            "last_loss": self.last_loss,
            "warned": sorted(self.warned),  # an alert may change the next steps
            "trained": [*self.trained] if self.steps and self.trained is not None else None,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from a result of `saved`."""
        self.steps, self.last_loss = saved["steps_done"], saved["last_loss"]
        self.counts.update(saved["oracle_counts"])
        self.warned = self.warned | {*saved.get("warned", ())}  # older states have no such entry
        self.written = {}  # parameters are loaded too, before or after this
        # The first step casts the state to the current types.
        self.kinds = tuple(getattr(torch, name) for name in saved["types"]) if "types" in saved else None
        self.trained = None if saved.get("trained") is None else tuple(saved["trained"])
        self.found = LossFacts(fallback=saved["fallback"])  # the other facts are found again, as by a new optimizer

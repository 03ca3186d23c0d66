"""State from earlier steps: that of parameters, in ``state``, and that of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hypergradient.estimate import Write
from ..oracle.buffers import Buffers
from ..oracle.session import COUNTERS, EvaluationOptions, LossFacts, LowerTrend, Session
from ..problem.values import replace
from ..problem.vector import Vector, is_sharded
from ..solvers.lower import Memory
from .progress import UpperTrend

__all__ = [
    "SOLVER",
    "SOLVERS",
    "TABLE",
    "UPPER_SOLVER",
    "RunState",
    "State",
    "owned",
    "recalled",
    "recast",
    "remember",
    "remember_solver",
    "remember_tables",
    "write_rows",
]

SOLVER = "lower_optimizer."  # prefix of the lower optimizer's entries
UPPER_SOLVER = "upper_optimizer."  # prefix of the upper optimizer's entries
SOLVERS = (SOLVER, UPPER_SOLVER)
TABLE = "rows."  # prefix of tables whose rows mix all lower parameters; the first of these holds them

State = MutableMapping[Tensor, dict[str, Any]]


class Recalled(NamedTuple):
    """State of the parameters of one level: entries that all of them have, tables, and their optimizer's state."""

    memory: dict[str, Vector]
    tables: dict[str, Tensor]
    solver: Memory | None  # None if there is none


def recalled(state: State, parameters: Sequence[Tensor], prefix: str) -> Recalled:
    """Return the state of the parameters of one level, whose optimizer's entries have this prefix."""
    own = [state.get(p, _NOTHING) for p in parameters]
    memory: dict[str, Vector] = {}
    tables: dict[str, Tensor] = {}
    alone = len(own) > 1  # whether a parameter may have entries of its own
    for name, value in own[0].items() if own else ():
        if name.startswith(SOLVERS):
            alone = True
        elif name.startswith(TABLE):
            tables[name[len(TABLE) :]] = value
        elif len(own) == 1:
            memory[name] = Vector((value,))
        elif all([name in entries for entries in own]):
            memory[name] = Vector([entries[name] for entries in own])
    found = own if alone else ()
    solver = [{k[len(prefix) :]: v for k, v in entries.items() if k.startswith(prefix)} for entries in found]
    return Recalled(memory, tables, solver if any(solver) else None)


_NOTHING: Mapping[str, Any] = {}


def remember(state: State, parameters: Sequence[Tensor], memory: Mapping[str, Vector | None]) -> None:
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


def remember_tables(state: State, parameters: Sequence[Tensor], tables: Mapping[str, Tensor]) -> None:
    """Write new tables."""
    for name, table in tables.items():
        state[parameters[0]][TABLE + name] = table.detach()


def recast(
    state: State, parameters: Sequence[Tensor], before: Sequence[torch.dtype] | None, kinds: Sequence[torch.dtype]
) -> None:
    """Cast state entries that have the old type of a parameter to its new type."""
    if before is None:
        return
    changes = {pair for pair in zip(before, kinds, strict=False) if pair[0] != pair[1]}
    # Tables mix all parameters, so they keep their type if it has become two.
    common = {old: new for old, new in changes if sum(pair[0] == old for pair in changes) == 1}
    for parameter, old, new in zip(parameters, before, kinds, strict=False):
        for name, value in state.get(parameter, _NOTHING).items():
            if isinstance(value, Tensor) and not name.endswith(OWN_TYPE):
                to = common.get(value.dtype) if name.startswith(TABLE) else new if value.dtype == old else None
                if to is not None:
                    state[parameter][name] = value.to(to)


# Counts, times of rows and probabilities of tasks have a type of their own.
OWN_TYPE = (
    *(solver + name for solver in SOLVERS for name in ("step", "mu_product")),
    *(TABLE + name for name in ("log", "drift", "last", "probability", "cumulative")),
)


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
        written: version of each upper tensor at the end of `backward`, by id.
        kinds: types of all parameters when the state was made.
    """

    found: LossFacts = field(default_factory=LossFacts)
    buffers: Buffers = field(default_factory=Buffers)
    warned: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    steps: int = 0
    last_loss: Tensor | None = None
    trend: LowerTrend = field(default_factory=LowerTrend)
    upper_trend: UpperTrend = field(default_factory=UpperTrend)
    written: dict[int, int] = field(default_factory=dict)
    kinds: tuple[torch.dtype, ...] | None = None

    def follow(self, state: State, groups: Iterable[Mapping[str, Any]]) -> None:
        """Cast the state if parameters of the groups have been cast since (``module.float()``)."""
        parameters = [p for group in groups for p in group["params"]]
        kinds = tuple([p.dtype for p in parameters])
        if kinds != self.kinds:
            recast(state, parameters, self.kinds, kinds)
            self.kinds = kinds

    def session(self, options: EvaluationOptions) -> Session:
        """Return the bookkeeping of a new step."""
        return Session(options, replace(self.found), self.buffers, warned=set(self.warned), trend=replace(self.trend))

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
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from a result of `saved`."""
        self.steps, self.last_loss = saved["steps_done"], saved["last_loss"]
        self.counts.update(saved["oracle_counts"])
        self.warned = self.warned | {*saved.get("warned", ())}  # older states have no such entry
        self.written = {}  # parameters are loaded too, before or after this
        self.found = LossFacts(fallback=saved["fallback"])  # the other facts are found again, as by a new optimizer

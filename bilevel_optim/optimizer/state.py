"""What an optimizer knows from earlier steps: in ``state`` what belongs to parameters, beside it that of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..hypergradient.estimate import Write
from ..oracle.buffers import Buffers
from ..oracle.session import COUNTERS, EvaluationOptions, LossFacts, LowerTrend, Session, UpperTrend
from ..problem.vector import Vector, is_sharded
from ..solvers.lower import Memory

__all__ = [
    "SOLVER",
    "SOLVERS",
    "TABLE",
    "UPPER_SOLVER",
    "RunState",
    "State",
    "recalled",
    "recast",
    "remember",
    "remember_solver",
    "remember_tables",
    "remembered",
    "solver_memory",
    "write_rows",
]

SOLVER = "lower_optimizer."  # prefix of the lower optimizer's entries
UPPER_SOLVER = "upper_optimizer."  # of the upper one's
SOLVERS = (SOLVER, UPPER_SOLVER)
TABLE = "rows."  # prefix of tables whose rows mix all lower parameters; they are with the first of these

State = MutableMapping[Tensor, dict[str, Any]]


def recalled(state: State, parameters: Sequence[Tensor]) -> dict[str, Vector]:
    """What is remembered of all these parameters, by name."""
    return _recalled([state.get(p, _NOTHING) for p in parameters])[0]


def remembered(state: State, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """What is remembered of the lower parameters: of all, tables whose rows mix them, the lower optimizer's state."""
    own = [state.get(p, _NOTHING) for p in parameters]
    memory, tables, alone = _recalled(own)
    return {"memory": memory, "tables": tables, "solver": _solver(own, SOLVER) if alone else None}


def solver_memory(state: State, parameters: Sequence[Tensor]) -> Memory | None:
    """What the upper optimizer has remembered of these parameters; None: nothing."""
    return _solver([state.get(p, _NOTHING) for p in parameters], UPPER_SOLVER)


def _solver(own: Sequence[Mapping[str, Any]], prefix: str) -> Memory | None:
    """Of these states, what an optimizer has remembered; None: nothing."""
    solver = [{k[len(prefix) :]: v for k, v in entries.items() if k.startswith(prefix)} for entries in own]
    return solver if any(solver) else None


def _recalled(own: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Vector], dict[str, Tensor], bool]:
    """Of these states, what all of them have; the tables of the first; whether one may have what the others have not.

    What belongs to an optimizer of a level is left out: some of its parameters may have none.
    """
    memory: dict[str, Vector] = {}
    tables: dict[str, Tensor] = {}
    alone = len(own) > 1
    for name, value in own[0].items() if own else ():
        if name.startswith(SOLVERS):
            alone = True
        elif name.startswith(TABLE):
            tables[name[len(TABLE) :]] = value
        elif len(own) == 1:
            memory[name] = Vector((value,))
        elif all([name in entries for entries in own]):
            memory[name] = Vector([entries[name] for entries in own])
    return memory, tables, alone


_NOTHING: Mapping[str, Any] = {}


def remember(state: State, parameters: Sequence[Tensor], memory: Mapping[str, Vector | None]) -> None:
    """Write what is to be remembered; None forgets."""
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
    """A value to be kept: a copy if it is what the live parameter holds, which will change."""
    alias = isinstance(value, Tensor) and (is_sharded(value) or value.data_ptr() == parameter.data_ptr())
    return value.clone() if alias else value


def remember_solver(state: State, parameters: Sequence[Tensor], memory: Memory, prefix: str = SOLVER) -> None:
    """Write the state of an optimizer of a level in place of what it was."""
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
    """Cast what is remembered of parameters whose types were others before, where it had those types."""
    if before is None:
        return
    changes = {pair for pair in zip(before, kinds, strict=False) if pair[0] != pair[1]}
    # Tables mix all parameters; where one type has become two, they stay.
    common = {old: new for old, new in changes if sum(pair[0] == old for pair in changes) == 1}
    for parameter, old, new in zip(parameters, before, kinds, strict=False):
        for name, value in state.get(parameter, _NOTHING).items():
            if isinstance(value, Tensor) and not name.endswith(OWN_TYPE):
                to = common.get(value.dtype) if name.startswith(TABLE) else new if value.dtype == old else None
                if to is not None:
                    state[parameter][name] = value.to(to)


# Counts, the times of rows and the chances of tasks have a type of their own.
OWN_TYPE = (
    *(solver + name for solver in SOLVERS for name in ("step", "mu_product")),
    *(TABLE + name for name in ("log", "drift", "last", "probability", "cumulative")),
)


@dataclass
class RunState:
    """The account of a run, written with each step that is accepted.

    Attributes:
        found: what is known about the losses.
        buffers: module buffers that evaluations change.
        warned: keys of the warnings that were given.
        counts: oracle calls.
        steps: outer steps made.
        last_loss: what the last step returned.
        trend: how lower solves have gone.
        upper_trend: how the upper loss has gone.
        written: how often each upper tensor had been written into at the end of `backward`, by id.
        kinds: types of all parameters, of which what is remembered has been made.
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

    def follow(self, state: State, parameters: Sequence[Tensor]) -> None:
        """Cast what is remembered if parameters have been cast since (``module.float()``)."""
        kinds = tuple([p.dtype for p in parameters])
        if kinds != self.kinds:
            recast(state, parameters, self.kinds, kinds)
            self.kinds = kinds

    def session(self, options: EvaluationOptions) -> Session:
        """The bookkeeping of a new step."""
        return Session.begun(options, self.found, self.buffers, self.warned, self.trend)

    def after(self, session: Session, loss: Tensor) -> dict[str, Any]:
        """What becomes of it with a step."""
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
        """Write it; may be repeated."""
        self.__dict__.update(after)
        self.buffers.complete = True

    def saved(self) -> dict[str, Any]:
        """What a state dict holds of it."""
        return {
            "steps_done": self.steps,
            "oracle_counts": dict(self.counts),
            "fallback": self.found.fallback,
            "last_loss": self.last_loss,
            "warned": sorted(self.warned),  # an alert may change how a step is made
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` gave."""
        self.steps, self.last_loss = saved["steps_done"], saved["last_loss"]
        self.counts.update(saved["oracle_counts"])
        self.warned = self.warned | {*saved.get("warned", ())}  # older states have none
        self.written = {}  # parameters are loaded too, before this or after it
        self.found = LossFacts(fallback=saved["fallback"])  # first looks are made where a new optimizer makes them

"""What is remembered of parameters, in the ``state`` of a ``torch.optim`` optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ..hypergradient.estimate import Write
from ..problem.vector import Vector, is_sharded
from ..solvers.lower import Memory

__all__ = [
    "TABLE",
    "copied",
    "load_exactly",
    "owned",
    "place_of",
    "recalled",
    "remember",
    "remember_solver",
    "remember_tables",
    "remembered",
    "write_rows",
]

SOLVER = "lower_optimizer."  # prefix of the lower optimizer's entries
TABLE = "rows."  # prefix of tables whose rows mix all lower parameters; they are with the first of these

State = MutableMapping[Tensor, dict[str, Any]]


def recalled(state: State, parameters: Sequence[Tensor]) -> dict[str, Vector]:
    """What is remembered of all these parameters, by name."""
    return _recalled([state.get(p, _NOTHING) for p in parameters])[0]


def remembered(state: State, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """What is remembered of the lower parameters: of all, tables whose rows mix them, the lower optimizer's state."""
    own = [state.get(p, _NOTHING) for p in parameters]
    memory, tables, alone = _recalled(own)
    solver = None
    if alone:
        solver = [{k[len(SOLVER) :]: v for k, v in entries.items() if k.startswith(SOLVER)} for entries in own]
    return {"memory": memory, "tables": tables, "solver": solver if solver and any(solver) else None}


def _recalled(own: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Vector], dict[str, Tensor], bool]:
    """Of these states, what all of them have; the tables of the first; whether one may have what the others have not.

    What belongs to the lower optimizer is left out: some of its parameters may have none.
    """
    memory: dict[str, Vector] = {}
    tables: dict[str, Tensor] = {}
    alone = len(own) > 1
    for name, value in own[0].items() if own else ():
        if name.startswith(SOLVER):
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


def remember_solver(state: State, parameters: Sequence[Tensor], memory: Memory) -> None:
    """Write the lower optimizer's state in place of what it was."""
    for parameter, entries in zip(parameters, memory, strict=True):
        kept = state[parameter]
        for name in [*kept]:
            if name.startswith(SOLVER):
                del kept[name]
        for name, value in entries.items():
            kept[SOLVER + name] = owned(value, parameter)


def remember_tables(state: State, parameters: Sequence[Tensor], tables: Mapping[str, Tensor]) -> None:
    """Write new tables."""
    for name, table in tables.items():
        state[parameters[0]][TABLE + name] = table.detach()


def load_exactly(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    place_of: Callable[[str, Tensor], torch.device | None],
) -> None:
    """``load`` as torch does it, but for its cast of all that is kept to the precision of the parameters.

    ``place_of`` gives the device of an entry of a parameter's state; None for where it was saved.
    """
    loaded: dict[str, Any] = {}

    def withhold(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        loaded.update(given)
        return {**given, "state": {}}

    def fill(_: Optimizer) -> None:
        keys = [key for group in loaded["param_groups"] for key in group["params"]]
        own = dict(zip(keys, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
        for key, entries in loaded["state"].items():
            optimizer.state[own.get(key, key)] = {
                name: copied(value, place_of(name, own[key]) if key in own else None) for name, value in entries.items()
            }

    # Hooks see what they would see with torch's loading.
    handles = (
        optimizer.register_load_state_dict_pre_hook(withhold),
        optimizer.register_load_state_dict_post_hook(fill, prepend=True),
    )
    try:
        load(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def place_of(name: str, parameter: Tensor) -> torch.device | None:
    """The device of an entry of ``state[parameter]``: that of the parameter; None for where it was saved."""
    return None if name == SOLVER + "step" else parameter.device


def copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy that shares no tensor, with its tensors on a device."""
    return tree_map(lambda t: t.to(device or t.device, copy=True) if isinstance(t, Tensor) else copy.copy(t), value)

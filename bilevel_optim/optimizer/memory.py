"""What is remembered of parameters, in the ``state`` of a ``torch.optim`` optimizer."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from ..problem.vector import Vector, is_sharded

__all__ = ["SOLVER", "owned", "recalled", "remember"]

SOLVER = "lower_optimizer."  # prefix of the lower optimizer's entries

State = MutableMapping[Tensor, dict[str, Any]]


def recalled(state: State, parameters: Sequence[Tensor]) -> dict[str, Vector]:
    """What is remembered of all these parameters, by name."""
    first = state.get(parameters[0], {}) if parameters else {}
    return {
        name: Vector(state[p][name] for p in parameters)
        for name in first
        if not name.startswith(SOLVER) and all(name in state[p] for p in parameters)
    }


def remember(state: State, parameters: Sequence[Tensor], memory: Mapping[str, Vector | None]) -> None:
    """Write what is to be remembered; None forgets."""
    for name, vector in memory.items():
        if vector is None:
            for parameter in parameters:
                state[parameter].pop(name, None)
        else:
            for parameter, value in zip(parameters, vector, strict=True):
                state[parameter][name] = owned(value.detach(), parameter)


def owned(value: Any, parameter: Tensor) -> Any:
    """A value to be kept: a copy if it is what the live parameter holds, which will change."""
    alias = isinstance(value, Tensor) and (is_sharded(value) or value.data_ptr() == parameter.data_ptr())
    return value.clone() if alias else value

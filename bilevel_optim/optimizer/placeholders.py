"""State dict before the first step: zeros shaped like a first step's state.

Distributed checkpoints need them, because they load into existing tensors.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed.ranks import Ranks
from ..distributed.sharding import Split
from ..errors import filters_kept
from ..problem.parameters import LEVELS
from ..problem.tasks import TensorTasks
from .state import TABLE

__all__ = ["initial_state", "initialises"]


def initialises(optimizer: Optimizer) -> bool:
    """Return True if an update is called only to make the state, as distributed checkpoints do.

    They set all learning rates to zero, and gradients of the lower parameters too, which no other caller does.
    """
    groups = optimizer.param_groups
    return not optimizer.state and all(
        not float(group["lr"]) and all(p.grad is not None or not p.requires_grad for p in group["params"])
        for group in groups
    )


def initial_state(optimizer: Any, ranks: Ranks) -> dict[Tensor, dict[str, Any]]:
    """Return zeros shaped like each parameter's state after a first step; empty if unknown.

    The shapes come from a step of a copy of the optimizer with parameters of one entry. If table rows mix all
    parameters, the copy has full size, for a single task.
    """
    levels = [(group["level"], p) for group in optimizer.param_groups for p in group["params"]]
    parameters, rows = [p for _, p in levels], optimizer._rows_of([p for level, p in levels if level == "lower"])
    shapes = [[1] * p.dim() if rows is None else _one_row(p, level, rows) for level, p in levels]
    ones = [
        torch.zeros(shape, dtype=p.dtype, device=p.device, requires_grad=p.requires_grad)
        for shape, p in zip(shapes, parameters, strict=True)
    ]
    twin = copy.deepcopy(optimizer, {id(ranks): Ranks(), **{id(p): q for p, q in zip(parameters, ones, strict=True)}})
    twin.check_finite = False
    for group in twin.param_groups:
        group["lr"] = 0.1
    try:
        with torch.random.fork_rng(devices=[]), filters_kept():
            warnings.simplefilter("ignore")
            _step(twin, None if not rows else TensorTasks(torch.zeros(1, 1)))
    except Exception:
        return {}
    found = {p: twin.state[q] for p, q in zip(parameters, ones, strict=True) if q in twin.state}
    if rows is not None:
        split = Split([p for level, p in levels if level == "lower"], ranks) if rows else None
        return {p: {n: _rows(n, value, split) for n, value in entries.items()} for p, entries in found.items()}
    return {p: {name: _widened(value, p) for name, value in entries.items()} for p, entries in found.items()}


def _one_row(parameter: Tensor, level: str, rows: int) -> list[int]:
    """Return the shape of a parameter for a single task."""
    return [1, *parameter.shape[1:]] if level == "lower" and rows else list(parameter.shape)


def _rows(name: str, value: Any, split: Split | None) -> Any:
    """Return zeros shaped like an entry; a table of one row gets a row for each task."""
    if split is None or not isinstance(value, Tensor) or not name.startswith(TABLE):
        return torch.zeros_like(value) if isinstance(value, Tensor) else value
    return split.from_local(value.new_zeros(split.count, *value.shape[1:]))


def _step(twin: Any, tasks: Any) -> None:
    x, y = ([p for g in twin.param_groups if g["level"] == level for p in g["params"]] for level in LEVELS)

    def shift() -> Tensor:
        return torch.stack([p.sum().float() for p in x]).sum()

    def upper(_: Any = None) -> Tensor:
        return torch.stack([(p.float() - 1).square().sum() for p in y]).sum() + shift().square()

    def lower(_: Any = None) -> Tensor:
        return torch.stack([(p.float() - shift()).square().sum() for p in y]).sum()

    if twin._one_loss:
        twin.step(lambda: shift().square() - lower())
    elif tasks is None:
        twin.step(upper, lower)
    else:
        twin.step(upper, lower, tasks=tasks)


def _widened(value: Any, parameter: Tensor) -> Any:
    """Return zeros shaped like the parameter, perhaps stacked, for the state of its twin with one entry."""
    n = parameter.dim()
    if not isinstance(value, Tensor):
        return value
    if value.dim() < n or value.shape[value.dim() - n :] != (1,) * n:
        return torch.zeros_like(value)
    zeros = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
    for size in reversed(value.shape[: value.dim() - n]):
        zeros = torch.stack([zeros] * size)
    return zeros

"""Whether a state dict can be loaded, found out before anything of it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .memory import SOLVER, TABLE

__all__ = ["require_loadable", "shapes_of"]

OWN = ("method", "steps_done", "oracle_counts", "fallback", "generator", "last_loss", "numbers", "options")
# Entries of torch's optimizers that are shaped like the parameter (or like stacked copies of it).
LIKE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta")


def shapes_of(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Shapes of all parameters."""
    return [list(p.shape) for group in groups for p in group["params"]]


def require_loadable(state: Any, method: str, groups: Sequence[Mapping[str, Any]], options: Sequence[str]) -> None:
    """Raise ValueError unless a state dict is one of this method, for such parameters.

    Args:
        state: what the user gave.
        method: name of the class.
        groups: the parameter groups.
        options: hyper-parameters that states hold.
    """
    if not isinstance(state, dict):
        raise ValueError(f"the state dict is not that of a BilevelOptimizer: it is {type(state).__name__}")
    for key, kind in (("bilevel", dict), ("state", dict), ("param_groups", list)):
        if not isinstance(state.get(key), kind):
            raise ValueError(f"the state dict is not that of a BilevelOptimizer: it has no {key!r} entry")
    own = state["bilevel"]
    missing = [name for name in OWN if name not in own]
    missing += [f"options[{name!r}]" for name in options if name not in (own.get("options") or {})]
    if missing:
        raise ValueError(f"the state dict is incomplete: in 'bilevel' there is no {', '.join(missing)}")
    if own["method"] != method:
        raise ValueError(f"the state dict is that of {own['method']}, but this optimizer is {method}")
    for name, kind in (("steps_done", int), ("oracle_counts", dict), ("numbers", dict)):
        if not isinstance(own[name], kind):
            raise ValueError(f"the state dict is damaged: {name} is {type(own[name]).__name__}")
    _require_groups(state["param_groups"], groups)
    here, there = shapes_of(groups), own.get("shapes")
    if there is not None and [list(shape) for shape in there] != here:
        raise ValueError(f"the state dict is that of parameters of shapes {there}, but these have {here}")
    keys = [key for group in state["param_groups"] for key in group["params"]]
    for key, shape in zip(keys, here, strict=True):
        for name, value in (state["state"].get(key) or {}).items():
            if _like_its_parameter(name) and isinstance(value, Tensor) and not _fits(value, shape):
                raise ValueError(
                    f"the state dict is that of other parameters: {name} has shape {tuple(value.shape)} where the "
                    f"parameter has {tuple(shape)}"
                )
    if own["generator"] is not None:
        try:
            torch.Generator().set_state(own["generator"].cpu().clone())
        except (AttributeError, RuntimeError, TypeError) as error:
            if not isinstance(own["generator"], Tensor):
                raise ValueError("the state dict is damaged: generator is no state of a generator") from error


def _require_groups(there: Sequence[Any], here: Sequence[Mapping[str, Any]]) -> None:
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in there):
        raise ValueError("the state dict is damaged: its parameter groups are not dicts with 'params'")
    sizes = [[(group.get("level"), len(group["params"])) for group in groups] for groups in (there, here)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state dict is that of other parameter groups: (level, parameters) are {sizes[0]}, here {sizes[1]}"
        )


def _like_its_parameter(name: str) -> bool:
    if name.startswith(SOLVER):
        return name[len(SOLVER) :] in LIKE
    return not name.startswith(TABLE)


def _fits(value: Tensor, shape: Sequence[int]) -> bool:
    return not shape or list(value.shape[-len(shape) :]) == list(shape)

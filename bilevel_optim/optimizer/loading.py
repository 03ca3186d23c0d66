"""Whether a state dict can be loaded, found out before anything of it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .memory import SOLVER, TABLE

__all__ = ["require_form", "require_loadable", "shapes_of"]

OWN = (
    "method", "variant", "shapes", "steps_done", "oracle_counts", "fallback", "generator", "last_loss", "numbers",
    "options",
)  # fmt: skip
# Entries of torch's optimizers that are shaped like the parameter (or like stacked copies of it).
LIKE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta")


def shapes_of(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Shapes of all parameters."""
    return [list(p.shape) for group in groups for p in group["params"]]


def require_form(state: Any) -> None:
    """Raise ValueError unless a state dict has the form of an optimizer's."""
    if not isinstance(state, dict):
        raise ValueError(f"the state dict is not that of a BilevelOptimizer: it is {type(state).__name__}")
    state_of, groups = state.get("state"), state.get("param_groups")
    if not isinstance(state_of, dict) or not all(isinstance(entries, dict) for entries in state_of.values()):
        raise ValueError("the state dict is not that of a BilevelOptimizer: 'state' does not hold dicts")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError("the state dict is not that of a BilevelOptimizer: 'param_groups' are not dicts with 'params'")


def require_loadable(
    own: Mapping[str, Any],
    state: Mapping[str, Any],
    method: str,
    variant: Mapping[str, Any],
    options: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ValueError unless a state is one of this method, for such parameters.

    Args:
        own: what does not belong to one parameter.
        state: the state dict.
        method: name of the class.
        variant: hyper-parameters that decide what is remembered.
        options: names of the hyper-parameters that are saved.
        groups: the parameter groups.
    """
    missing = [name for name in OWN if name not in own]
    missing += [f"options[{name!r}]" for name in options if name not in (own.get("options") or {})]
    if missing:
        raise ValueError(f"the state dict is incomplete: there is no {', '.join(missing)}")
    if own["method"] != method:
        raise ValueError(f"the state dict is that of {own['method']}, but this optimizer is {method}")
    if own["variant"] != dict(variant):
        raise ValueError(f"the state dict is that of another variant: of {own['variant']}, but this is {dict(variant)}")
    sizes = [[(group.get("level"), len(group["params"])) for group in some] for some in (state["param_groups"], groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state dict is that of other parameter groups: (level, parameters) are {sizes[0]}, here {sizes[1]}"
        )
    if own["shapes"] != shapes_of(groups):
        raise ValueError(
            f"the state dict is that of parameters of shapes {own['shapes']}, but these have {shapes_of(groups)}"
        )
    keys = [key for group in state["param_groups"] for key in group["params"]]
    for key, shape in zip(keys, shapes_of(groups), strict=True):
        for name, value in state["state"].get(key, {}).items():
            if _like_its_parameter(name) and isinstance(value, Tensor) and not _fits(value, shape):
                raise ValueError(
                    f"the state dict is damaged: {name} has shape {tuple(value.shape)} where the parameter has "
                    f"{tuple(shape)}"
                )


def _like_its_parameter(name: str) -> bool:
    if name.startswith(SOLVER):
        return name[len(SOLVER) :] in LIKE
    return not name.startswith(TABLE)


def _fits(value: Tensor, shape: Sequence[int]) -> bool:
    return not shape or list(value.shape[-len(shape) :]) == list(shape)

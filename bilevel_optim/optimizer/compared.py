"""Options that determine a step, as texts, which ranks compare at the beginning of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..distributed.ranks import text_of
from ..solvers.lower import LowerRules
from .checkpoint import OWN
from .step import Groups

__all__ = ["texts_of_arguments", "texts_of_options"]

PLAIN = (bool, int, float, str, tuple, type(None))
# Arguments that may differ between ranks, or that are compared in another form (groups, and the optimizers made).
NOT_COMPARED = (
    "upper", "lower", "lr", "lower_lr", "upper_optimizer", "lower_optimizer", "process_group", "state_device",
    "vectorize",
)  # fmt: skip


def texts_of_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of a constructor that are compared, as texts by name."""
    return {name: text_of(value) for name, value in arguments.items() if name not in NOT_COMPARED}


def texts_of_options(
    method: type[Any],
    steps: int,
    attributes: Mapping[str, Any],
    arguments: Mapping[str, str],
    groups: Sequence[Mapping[str, Any]],
    groups_of: Groups,
    rules: Mapping[str, LowerRules | None],
) -> dict[str, str]:
    """Return the options that determine a step, besides losses, data and values, as texts by name.

    Args:
        method: class of the method.
        steps: outer steps made.
        attributes: attributes of the method, whose present values replace those of the arguments.
        arguments: result of `texts_of_arguments`.
        groups: all parameter groups.
        groups_of: those of each level.
        rules: update of each level by its optimizer; None if there is none.
    """
    found: dict[str, Any] = {"method": method, "steps made": steps}
    for name, value in attributes.items():
        if name in arguments or (isinstance(value, PLAIN) and not name.startswith("_")):
            found[name] = value
    for i, group in enumerate(groups):
        entries = {name: v for name, v in group.items() if name not in ("params", "param_names", "level", OWN)}
        entries["shapes"] = [tuple(p.shape) for p in group["params"] if p.requires_grad]
        found |= {f"group {i}": group["level"], **{f"{name} of group {i}": v for name, v in entries.items()}}
    for level, own_rules in rules.items():
        kind, options = (None, []) if own_rules is None else own_rules.described(groups_of[level])
        found[f"{level}_optimizer"] = kind
        for name in options[0] if options else ():
            values = [own.get(name) for own in options]
            found[f"{name} of {level}_optimizer"] = values if len(values) > 1 else values[0]
    return {**arguments, **{name: text_of(value) for name, value in found.items()}}

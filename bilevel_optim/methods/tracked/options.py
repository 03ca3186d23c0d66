"""Keyword arguments that the methods with a memory of each lower problem share."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from ...optimizer.base import CommonOptions
from ...problem.parameters import is_count, is_number, require, require_choice

__all__ = ["RecursiveOptions", "device_named", "is_weight", "require_recursive"]

SCHEDULES = ("constant", "cube_root")


class RecursiveOptions(CommonOptions, total=False):
    """Keyword arguments that the recursive methods share, see `RecursiveOptimizer`."""

    beta_unit: str
    averaging: float
    ceilings: dict[str, float] | None
    radius: float
    schedule: str
    schedule_offset: float
    restarts: int | None
    initial_steps: int
    state_device: torch.device | str | None
    lazy: bool | None


def require_recursive(
    weighted: Collection[str], limited: Collection[str], given_beta: Any, beta: dict[str, float], **own: Any
) -> None:
    """Raise unless these arguments of the recursive methods are what they should be.

    Args:
        weighted: what may have a mixing weight.
        limited: what may have a ceiling.
        given_beta: as it was given.
        beta: the same by name.
        own: other arguments.
    """
    require("beta", given_beta, set(beta) <= set(weighted) and all(is_weight(b) for b in beta.values()))
    floor, unit, averaging = own["floor"], own["beta_unit"], own["averaging"]
    require("floor", floor, is_number(floor) and 0 < floor < math.inf)
    require_choice("beta_unit", unit, ("q", "absolute"))
    require("averaging", averaging, is_number(averaging) and 0 < averaging <= 1)
    ceilings, radius = own["ceilings"], own["radius"]
    limits = {} if ceilings is None else ceilings
    valid = (
        isinstance(limits, dict)
        and set(limits) <= set(limited)
        and all(is_number(c) and c > 0 for c in limits.values())
    )
    require("ceilings", ceilings, valid)
    require("radius", radius, is_number(radius) and radius > 0)
    schedule, offset, restarts = own["schedule"], own["schedule_offset"], own["restarts"]
    require_choice("schedule", schedule, SCHEDULES)
    require("schedule_offset", offset, is_number(offset) and 0 <= offset < math.inf)
    require("restarts", restarts, restarts is None or (is_count(restarts) and restarts > 0))
    require("initial_steps", own["initial_steps"], is_count(own["initial_steps"]))
    require("lazy", own["lazy"], own["lazy"] is None or isinstance(own["lazy"], bool))


def is_weight(value: object) -> bool:
    """Whether value is a number that can be a mixing weight."""
    return is_number(value) and 0 <= float(value) < math.inf  # type: ignore[arg-type]


def device_named(given: Any) -> torch.device | None:
    """The device that ``state_device`` names."""
    if given is None:
        return None
    require("state_device", given, isinstance(given, (str, torch.device)))
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"Invalid state_device value: {given}") from error

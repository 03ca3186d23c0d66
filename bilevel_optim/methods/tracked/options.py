"""Checks of arguments that the methods with a memory of each lower problem share."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from ...problem.parameters import is_number, require

__all__ = ["are_ceilings", "device_named", "is_weight"]

DEVICE = "Invalid {name} value: {value} (it must be a torch.device, or its name, such as 'cpu' or 'cuda:0')"


def are_ceilings(value: Any, names: Collection[str]) -> bool:
    """Return True for a dict of positive numbers by these names."""
    return isinstance(value, dict) and set(value) <= set(names) and all(is_number(c) and c > 0 for c in value.values())


def is_weight(value: Any) -> bool:
    """Return True for a number that can be a mixing weight."""
    return is_number(value) and 0 <= float(value) < math.inf


def device_named(given: Any) -> torch.device | None:
    """Return the device that ``state_device`` names."""
    if given is None:
        return None
    require("state_device", given, isinstance(given, (str, torch.device)), DEVICE)
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise ValueError(
            f"Invalid state_device value: {given} (torch has no device of that name; use one such as 'cpu' or 'cuda:0')"
        ) from error

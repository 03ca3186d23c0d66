"""Output of an optimizer: numbers for a logger, and its text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .checkpoint import OWN

__all__ = ["described", "floats"]

NOT_SHOWN = ("params", "param_names", "level", OWN)  # entries of a group that are not options


def floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the tensors among values as floats, with one host synchronisation.

    Scalars keep their names; a vector becomes ``name/mean`` and ``name/max`` of its entries that are not NaN.
    """
    tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    entries: dict[torch.device, Iterator[float]] = {}
    for device in {t.device for t in tensors.values()}:  # with one transfer for each
        here = [t.reshape(-1).double() for t in tensors.values() if t.device == device]
        entries[device] = iter(torch.cat(here).tolist())
    found: dict[str, float] = {}
    for name, t in tensors.items():
        own = [next(entries[t.device]) for _ in range(t.numel())]
        if t.dim() == 0:
            (found[name],) = own
        else:
            numbers = [value for value in own if not math.isnan(value)]
            found[f"{name}/mean"] = sum(numbers) / len(numbers) if numbers else math.nan
            found[f"{name}/max"] = max(numbers, default=math.nan)
    return found


def described(name: str, arguments: str, groups: Sequence[Mapping[str, Any]], optimizers: Mapping[str, str]) -> str:
    """Return the text of a method with its arguments, and of each group with its level and that level's optimizer."""
    lines = [arguments]
    for i, group in enumerate(groups):
        numbers, tensors = sum(p.numel() for p in group["params"]), len(group["params"])
        shown = {option: repr(value) for option, value in group.items() if option not in NOT_SHOWN}
        if shown.pop("auto_lr", None):
            shown["lr"] = "auto" if group["lr"] == 1 else f"{group['lr']!r} * auto"
        options = [f"{option}={value}" for option, value in shown.items()]
        size = f"{numbers:,} numbers in {tensors} tensor{'s' if tensors > 1 else ''}"
        optimizer = filter(None, [optimizers[group["level"]]])
        lines.append(", ".join((f"({i}) {group['level']}: {size}", *optimizer, *options)))
    return "\n  ".join((f"{name}(", *(line for line in lines if line))) + "\n)"

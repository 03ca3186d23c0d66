"""Transfer from host to device: from pinned memory, or once for all steps, so that the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..tracing import is_tracing

__all__ = ["constant", "pinned", "to_device"]

MOST = 256  # cached sets of numbers


def to_device(values: Tensor | Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy host values to a device from pinned memory, without waiting; values already there stay as they are."""
    t = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    if t.device == device or device.type == "cpu" or not t.is_cpu:
        return t.to(device)
    if not t.dim():  # an argument of the launch, also in a graph
        return torch.zeros((), dtype=t.dtype, device=device) + t
    if not _pins(device.type):
        return t.to(device)
    # An argument of a graph may be pinned. What a graph makes is copied out of ordinary memory before the call returns.
    return (t if is_tracing() else t.pin_memory()).to(device, non_blocking=True)


def pinned(t: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor in pinned memory, if memory can be pinned for the device."""
    return t.pin_memory() if _pins(device.type) else t


@cache
def _pins(kind: str) -> bool:
    """Return True if host memory can be pinned for a kind of device (MPS uses the host's memory)."""
    present = torch.accelerator.current_accelerator()
    return present is not None and present.type == kind and kind != "mps"


def constant(numbers: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a cached tensor with the type and device of ``like``. Do not write into the result."""
    dtype = dtype or like.dtype
    if is_tracing():  # a constant of the graph
        return torch.tensor(numbers, dtype=dtype, device=like.device)
    key = *numbers, dtype, like.device
    found = _MADE.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = torch.tensor(numbers, dtype=dtype, device=like.device)
        if type(found) is Tensor:
            if len(_MADE) >= MOST:
                _MADE.clear()
            _MADE[key] = found
    return found


_MADE: dict[tuple[Any, ...], Tensor] = {}

"""What one step has to look at on the host, collected on the device and read with one synchronisation."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import BilevelWarning, NonFiniteError
from ..problem.vector import Vector

__all__ = ["Checks"]


class Checks:
    """Finite checks and warnings of one step.

    ``finite`` and ``alert`` only queue device scalars; ``verify`` reads them all at once.
    """

    def __init__(self) -> None:
        self._finite: list[tuple[str, str, Tensor]] = []
        self._alerts: list[tuple[str, str, Tensor]] = []

    def finite(self, oracle: str, tensors: Iterable[Tensor], hint: str = "") -> None:
        """Require that every entry of ``tensors``, which came out of ``oracle``, is finite."""
        self._finite.append((oracle, hint, Vector(tensors).max_abs().isfinite()))

    def alert(self, key: str, message: str, on: Tensor) -> None:
        """Warn with ``message`` if the boolean scalar ``on`` is true, once in an optimizer's life for each ``key``."""
        self._alerts.append((key, message, on))

    def verify(self, step: int, warned: set[str]) -> set[str]:
        """Raise `NonFiniteError` for the first oracle that failed; warn; return the keys of the alerts that were on."""
        flags = [flag for *_, flag in (*self._finite, *self._alerts)]
        if not flags:
            return set()
        read = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        for (oracle, hint, _), finite in zip(self._finite, read, strict=False):
            if not finite:
                raise NonFiniteError(oracle, step, hint)
        on = set()
        for (key, message, _), raised in zip(self._alerts, read[len(self._finite) :], strict=True):
            if raised:
                on.add(key)
                if key not in warned:
                    warned.add(key)
                    warnings.warn(message, BilevelWarning, stacklevel=5)
        return on

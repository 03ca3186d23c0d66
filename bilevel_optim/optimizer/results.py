"""What is read from an optimizer after a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .ledger import Ledger

__all__ = ["Results"]


class Results:
    """What can be read from an optimizer after a step; nothing here changes it."""

    diagnostics: dict[str, Any]
    _ledger: Ledger

    def metrics(self) -> dict[str, float]:
        """The loss and the ``diagnostics`` of the last step as floats for a logger, with one host synchronisation.

        A scalar goes by its name; of a vector there are ``name/mean`` and ``name/max``, of its entries that are not
        NaN. Words are left out, and before the first step the dict is empty.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.5)
            >>> loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
            >>> optimizer.metrics()
            {'loss': 0.5, 'hypergradient_norm': 0.5, 'lower_residual': 2.0, 'linear_residual': 0.5}
        """
        known = {"loss": self._ledger.last_loss, **self.diagnostics}
        tensors = {name: value.detach() for name, value in known.items() if isinstance(value, Tensor)}
        found: dict[str, float] = {}
        for name, entries in _read(tensors).items():
            if tensors[name].dim() == 0:
                (found[name],) = entries
            else:
                numbers = [value for value in entries if not math.isnan(value)]
                found[f"{name}/mean"] = sum(numbers) / len(numbers) if numbers else math.nan
                found[f"{name}/max"] = max(numbers, default=math.nan)
        return found


def _read(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The entries of tensors, those of each device brought to the host at once."""
    found: dict[str, list[float]] = {name: [] for name in tensors}  # in their order
    for device in {t.device for t in tensors.values()}:
        here = {name: t for name, t in tensors.items() if t.device == device}
        entries = iter(torch.cat([t.reshape(-1).double() for t in here.values()]).tolist())
        found |= {name: [next(entries) for _ in range(t.numel())] for name, t in here.items()}
    return found

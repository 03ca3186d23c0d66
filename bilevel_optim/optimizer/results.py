"""What is read from an optimizer after a step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..hypergradient.estimate import measured
from ..problem.vector import Vector
from .checkpoint import OWN
from .run_state import RunState

__all__ = ["Results"]


class Results:
    """What can be read from an optimizer; nothing here changes it."""

    _diagnostics: dict[str, Any]
    param_groups: list[dict[str, Any]]
    _run_state: RunState

    @property
    def diagnostics(self) -> dict[str, Any]:
        """Tensors of the last step, and plain numbers and words, by name; norms are evaluated when they are read."""
        figures = self._diagnostics
        if any(type(value) is Vector for value in figures.values()):
            figures.update(measured(figures))
        return figures

    @diagnostics.setter
    def diagnostics(self, figures: dict[str, Any]) -> None:
        self._diagnostics = figures

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
        known = {"loss": self._run_state.last_loss, **self.diagnostics}
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

    def static_diagnostics(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Diagnostics of a step that are plain numbers before it."""
        return {}

    def extra_repr(self) -> str:
        """The method's own arguments, as ``torch.nn.Module.extra_repr`` gives those of a module."""
        arguments = inspect.signature(type(self)).parameters
        shown = {name: getattr(self, name) for name in arguments if name in vars(self)}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if isinstance(value, (int, float, str)))

    def __repr__(self) -> str:
        """The method with its arguments, and each group with its level.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> x, y = torch.zeros(2, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
            >>> bo.StocBiO([x], [y], lr=0.1, lower_lr=0.5, lower_steps=10)
            StocBiO(
              lower_steps=10, linear_steps=10
              (0) upper: 2 numbers in 1 tensor, lr=0.1
              (1) lower: 12 numbers in 1 tensor, lr=0.5
            )
        """
        lines = [self.extra_repr()]
        for i, group in enumerate(self.param_groups):
            numbers, tensors = sum(p.numel() for p in group["params"]), len(group["params"])
            options = [f"{name}={value!r}" for name, value in group.items() if name not in _OURS]
            size = f"{numbers:,} numbers in {tensors} tensor{'s' if tensors > 1 else ''}"
            lines.append(", ".join((f"({i}) {group['level']}: {size}", *options)))
        return "\n  ".join((f"{type(self).__name__}(", *(line for line in lines if line))) + "\n)"


# Entries of a group that are not options.
_OURS = ("params", "param_names", "level", OWN)


def _read(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The entries of tensors, those of each device brought to the host at once."""
    found: dict[str, list[float]] = {name: [] for name in tensors}  # in their order
    for device in {t.device for t in tensors.values()}:
        here = {name: t for name, t in tensors.items() if t.device == device}
        entries = iter(torch.cat([t.reshape(-1).double() for t in here.values()]).tolist())
        found |= {name: [next(entries) for _ in range(t.numel())] for name, t in here.items()}
    return found

"""Networks, and data cleaning with one of them on random data, for timing steps of a realistic size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.seeds import begin
from .problem import WHOLE, Index

__all__ = ["MLPCleaning", "lenet"]


def lenet() -> nn.Sequential:
    """Return LeNet's feature layers: 84 features of 32x32 images, 60,856 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(120, 84), nn.ReLU()),
    )


class MLPCleaning:
    """Data cleaning: one weight per example (upper), an MLP 784-256-10 (lower).

    Args:
        n: number of training and of validation examples.
        ridge: weight of the squares of the MLP's parameters.
        device: device of all tensors.
    """

    def __init__(self, n: int, ridge: float, device: str) -> None:
        begin(0, "data")
        self.ridge = ridge
        self.X, self.Xv = (torch.randn(n, 784, device=device) for _ in range(2))
        self.t, self.tv = (torch.randint(0, 10, (n,), device=device) for _ in range(2))
        self.x = torch.zeros(n, device=device, requires_grad=True)
        self.net: nn.Module = nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)

    def lower(
        self,
        index: Index = WHOLE,
        net: Callable[[Tensor], Tensor] | None = None,
        parameters: Iterable[Tensor] | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted training loss; optionally of another network with its parameters, or other weights x."""
        losses = F.cross_entropy((net or self.net)(self.X[index]), self.t[index], reduction="none")
        ridge = sum(p.square().sum() for p in (self.net.parameters() if parameters is None else parameters))
        return ((self.x if x is None else x)[index].sigmoid() * losses).mean() + self.ridge * ridge

    def upper(self, index: Index = WHOLE, net: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the validation loss."""
        return F.cross_entropy((net or self.net)(self.Xv[index]), self.tv[index])

"""A bilevel problem as two losses of x, y and the examples, and the value function that methods are judged by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .value_function import Value, lower_solution, value_and_gradient

__all__ = ["WHOLE", "Index", "Part", "Problem", "folder"]

Index = Tensor | slice
WHOLE = slice(None)


class Part(NamedTuple):
    """Features, one row per example (of tasks: tasks and rows), and labels."""

    features: Any  # a Tensor, or SparseFeatures
    labels: Tensor

    def to(self, device: torch.device | str) -> Part:
        """A copy on the device."""
        return Part(self.features.to(device), self.labels.to(device))

    def take(self, index: Tensor) -> Part:
        """Some of the examples."""
        return Part(self.features[index], self.labels[index])


def folder(root: Path | None, name: str) -> Path:
    """The folder of a data set, which has to be given."""
    if root is None:
        raise SystemExit(f"--data {name} needs --data-root, the folder of its files")
    return root


class Problem(ABC):
    """Two losses as functions of x, y and the indices of a batch, a start, and what is measured.

    Attributes:
        sizes: examples of the lower and of the upper loss.
        x, y: where every run starts.
        lower_lr: a step size for full-batch gradient steps on the lower loss.
        tol: accuracy of the lower solve in a measurement.
        convexity: strong convexity of the lower loss, about.
    """

    sizes: tuple[int, int]
    x: Tensor
    y: Tensor
    lower_lr: float
    tol = 1e-9
    convexity = 1e-2

    @abstractmethod
    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """The lower loss on these examples."""

    @abstractmethod
    def upper(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """The upper loss on these examples."""

    def start(self) -> tuple[Tensor, Tensor]:
        """Live x and y."""
        return self.x.clone().requires_grad_(), self.y.clone().requires_grad_()

    def solution(self, x: Tensor, start: Tensor) -> Tensor:
        """y*(x) by Newton's method from ``start``."""
        return lower_solution(self.lower, x, start, tol=self.tol)

    @cached_property
    def first(self) -> Tensor:
        """y*(x) at the start."""
        return self.solution(self.x, self.y)

    def value(self, x: Tensor, start: Tensor) -> Value:
        """The value function, its gradient and the lower solution; the lower solve begins at ``start``."""
        return value_and_gradient(self.upper, self.lower, x, start, tol=self.tol)

    def test_error(self, y: Tensor) -> float | None:
        """Part of the test examples that are classified wrongly, if there are any."""
        return None

"""A bilevel problem: two losses of x, y and the examples, and the value function that scores the methods."""

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
    """Features, one row per example (for tasks: tasks and rows), and labels."""

    features: Any  # a Tensor, or SparseFeatures
    labels: Tensor

    def to(self, device: torch.device | str) -> Part:
        """Return a copy on the device."""
        return Part(self.features.to(device), self.labels.to(device))

    def take(self, index: Tensor) -> Part:
        """Return the examples of these indices."""
        return Part(self.features[index], self.labels[index])


def folder(root: Path | None, name: str) -> Path:
    """Return the folder of a data set; exit if there is none."""
    if root is None:
        raise SystemExit(f"--data {name} needs --data-root, the folder of its files")
    return root


class Problem(ABC):
    """Two losses as functions of x, y and the indices of a batch, a start, and the measurements.

    Attributes:
        sizes: numbers of examples of the lower and of the upper loss.
        x, y: start of every run.
        lower_lr: learning rate for full-batch gradient steps on the lower loss.
        tol: accuracy of the lower solve in a measurement.
        convexity: approximate strong convexity of the lower loss.
    """

    sizes: tuple[int, int]
    x: Tensor
    y: Tensor
    lower_lr: float
    tol = 1e-9
    convexity = 1e-2

    @abstractmethod
    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the lower loss on these examples."""

    @abstractmethod
    def upper(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the upper loss on these examples."""

    def start(self) -> tuple[Tensor, Tensor]:
        """Return new live x and y."""
        return self.x.clone().requires_grad_(), self.y.clone().requires_grad_()

    def solution(self, x: Tensor, start: Tensor) -> Tensor:
        """Return y*(x), by Newton's method from ``start``."""
        return lower_solution(self.lower, x, start, tol=self.tol)

    @cached_property
    def first(self) -> Tensor:
        """Return y*(x) at the start."""
        return self.solution(self.x, self.y)

    def value(self, x: Tensor, start: Tensor) -> Value:
        """Return the value function, its gradient and the lower solution; the lower solve begins at ``start``."""
        return value_and_gradient(self.upper, self.lower, x, start, tol=self.tol)

    def test_error(self, y: Tensor) -> float | None:
        """Return the share of misclassified test examples; None without test examples."""
        return None

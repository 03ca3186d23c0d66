"""Softmax regression on training, validation and test data, with hyper-parameters in the training loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .newsgroups import SparseFeatures
from .problem import WHOLE, Index, Part, Problem

__all__ = ["Cleaning", "Regularised", "Softmax", "corrupted", "standardised", "with_bias"]


class Softmax(Problem):
    """Base class of problems with a validation loss as upper loss; subclasses define the training loss.

    Args:
        parts: training, validation and test data; ``y`` is a matrix of features and classes.
        ridge: weight of the squares of y.
    """

    tol = 1e-5

    def __init__(self, parts: Sequence[Part], ridge: float) -> None:
        (self.train, self.val, self.test), self.ridge = parts, ridge
        self.sizes = len(self.train.labels), len(self.val.labels)
        classes = int(self.train.labels.max()) + 1
        self.y = torch.zeros(self.train.features.shape[1], classes, device=self.train.labels.device)

    @cached_property
    def lower_lr(self) -> float:  # type: ignore[override]
        """Learning rate 1/L."""
        features = self.train.features
        sparse = isinstance(features, SparseFeatures)
        norm: float = features.largest_singular_value() if sparse else torch.linalg.matrix_norm(features, 2).item()
        # Half the largest eigenvalue of the features' second moment bounds the curvature of softmax cross-entropy.
        return 1 / (norm**2 / len(self.train.labels) / 2 + 2 * self.ridge)

    def losses(self, part: Part, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the losses of the examples."""
        return F.cross_entropy(part.features[index] @ y, part.labels[index], reduction="none")

    def upper(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the validation loss."""
        return self.losses(self.val, y, index).mean()

    @torch.no_grad()
    def accuracy(self, y: Tensor) -> float:
        """Return the accuracy on the test data."""
        return float(((self.test.features @ y).argmax(1) == self.test.labels).float().mean())

    def test_error(self, y: Tensor) -> float:
        """Return the share of misclassified test examples."""
        return 1 - self.accuracy(y)


class Regularised(Softmax):
    """Penalties ridge exp(x) of the squares of y; the shape of x makes them one per weight, feature or class."""

    def __init__(self, parts: Sequence[Part], ridge: float, x: Tensor) -> None:
        super().__init__(parts, ridge)
        self.x = x.to(self.y.device)

    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the training loss with the penalties."""
        return self.losses(self.train, y, index).mean() + self.ridge * (x.exp() * y.square()).sum()


class Cleaning(Softmax):
    """Data hyper-cleaning: one weight sigmoid(x_i) per training example; some labels are wrong."""

    def __init__(self, parts: Sequence[Part], ridge: float, start: float = 0.0) -> None:
        super().__init__(parts, ridge)
        self.x, self.convexity = torch.full_like(self.train.labels, start, dtype=self.y.dtype), 2 * ridge

    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the weighted training loss with the ridge."""
        return (x[index].sigmoid() * self.losses(self.train, y, index)).mean() + self.ridge * y.square().sum()


def corrupted(labels: Tensor, share: float, classes: int, generator: torch.Generator) -> Tensor:
    """Return the labels with a share of them replaced by wrong ones."""
    count, changed = round(share * len(labels)), labels.clone()
    wrong = torch.randperm(len(labels), generator=generator)[:count]
    changed[wrong] = (labels[wrong] + torch.randint(1, classes, (count,), generator=generator)) % classes
    return changed


def standardised(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Standardise the features of all parts by mean and deviation of the first."""
    mean, std = parts[0].features.mean(0), parts[0].features.std(0, correction=0)
    return tuple(Part((part.features - mean) / torch.where(std > 0, std, 1.0), part.labels) for part in parts)


def with_bias(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Append a column of ones to the features."""
    return tuple(Part(torch.cat([f, torch.ones_like(f[:, :1])], 1), labels) for f, labels in parts)

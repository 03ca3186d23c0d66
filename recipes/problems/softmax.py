"""Softmax regression on training, validation and test data, with hyper-parameters in its training loss."""

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
    """The validation loss is to be small; what the training loss is depends on the hyper-parameters.

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
        """1/L."""
        features = self.train.features
        sparse = isinstance(features, SparseFeatures)
        norm: float = features.largest_singular_value() if sparse else torch.linalg.matrix_norm(features, 2).item()
        # Half the largest eigenvalue of the features' second moment bounds the curvature of softmax cross-entropy.
        return 1 / (norm**2 / len(self.train.labels) / 2 + 2 * self.ridge)

    def losses(self, part: Part, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Those of the examples."""
        return F.cross_entropy(part.features[index] @ y, part.labels[index], reduction="none")

    def upper(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Validation loss."""
        return self.losses(self.val, y, index).mean()

    @torch.no_grad()
    def accuracy(self, y: Tensor) -> float:
        """On the test data."""
        return float(((self.test.features @ y).argmax(1) == self.test.labels).float().mean())

    def test_error(self, y: Tensor) -> float:
        """On the test data."""
        return 1 - self.accuracy(y)


class Regularised(Softmax):
    """Penalties ridge exp(x) of the squares of y; the shape of x says whether one per weight, feature or class."""

    def __init__(self, parts: Sequence[Part], ridge: float, x: Tensor) -> None:
        super().__init__(parts, ridge)
        self.x = x.to(self.y.device)

    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Training loss with the penalties."""
        return self.losses(self.train, y, index).mean() + self.ridge * (x.exp() * y.square()).sum()


class Cleaning(Softmax):
    """Data hyper-cleaning: one weight sigmoid(x_i) per training example, some of whose labels are wrong."""

    def __init__(self, parts: Sequence[Part], ridge: float, start: float = 0.0) -> None:
        super().__init__(parts, ridge)
        self.x, self.convexity = torch.full_like(self.train.labels, start, dtype=self.y.dtype), 2 * ridge

    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Weighted training loss with the ridge."""
        return (x[index].sigmoid() * self.losses(self.train, y, index)).mean() + self.ridge * y.square().sum()


def corrupted(labels: Tensor, share: float, classes: int, generator: torch.Generator) -> Tensor:
    """The labels with a share of them replaced by wrong ones."""
    count, changed = round(share * len(labels)), labels.clone()
    wrong = torch.randperm(len(labels), generator=generator)[:count]
    changed[wrong] = (labels[wrong] + torch.randint(1, classes, (count,), generator=generator)) % classes
    return changed


def standardised(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Features with mean 0 and variance 1 on the first part."""
    mean, std = parts[0].features.mean(0), parts[0].features.std(0, correction=0)
    return tuple(Part((part.features - mean) / torch.where(std > 0, std, 1.0), part.labels) for part in parts)


def with_bias(parts: Sequence[Part]) -> tuple[Part, ...]:
    """A column of ones beside the features."""
    return tuple(Part(torch.cat([f, torch.ones_like(f[:, :1])], 1), labels) for f, labels in parts)

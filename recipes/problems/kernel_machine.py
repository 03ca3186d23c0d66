"""Kernel logistic regression with one scale per column, on two folds."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Machine", "kernel", "start"]


def start(X: Tensor) -> Tensor:
    """Return the logarithms of equal scales for which distances are about one."""
    return X.new_full((X.shape[1],), -math.log(X.shape[1]) / 2)


def kernel(A: Tensor, B: Tensor, scales: Tensor) -> Tensor:
    """Return the Gaussian kernel matrix of two sets of rows; ``scales`` are logarithms."""
    A, B = A * scales.exp(), B * scales.exp()
    squares = A.square().sum(1)[:, None] + B.square().sum(1) - 2 * A @ B.T
    return (squares.clamp_min(0) / -2).exp()


class Machine:
    """Kernel logistic regression on two folds, as a bilevel problem in scales and a penalty."""

    def __init__(self, X: Tensor, sign: Tensor, begin: Tensor) -> None:
        self.X, self.sign = X, sign
        even = torch.arange(len(X)) % 2 == 0
        self.folds = (even, ~even)
        self.scales, self.rho = begin.clone().requires_grad_(), begin.new_tensor(-4.0).requires_grad_()
        self.alpha = [X.new_zeros(int(fold.sum())).requires_grad_() for fold in self.folds]

    def blocks(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for each fold its kernel, the kernel of the other rows with it, and its signs."""
        K = kernel(self.X, self.X, self.scales)
        return [(K[fold][:, fold], K[~fold][:, fold], self.sign[fold]) for fold in self.folds]

    def lower(self) -> Tensor:
        """Return the sum of both penalised losses."""
        pairs = zip(self.blocks(), self.alpha, strict=True)
        parts = [F.softplus(-s * (K @ a)).mean() + self.rho.exp() / 2 * (a @ K @ a) for (K, _, s), a in pairs]
        return torch.stack(parts).sum()

    def upper(self) -> Tensor:
        """Return the mean loss of both solutions on the respective other rows."""
        pairs = zip(self.blocks(), self.alpha, reversed(self.folds), strict=True)
        return torch.stack([F.softplus(-self.sign[rows] * (K @ a)).mean() for (_, K, _), a, rows in pairs]).mean()

    @torch.no_grad()
    def solve(self) -> None:
        """Write both solutions by Newton's method, from their last values."""
        penalty = self.rho.exp()
        for (K, _, sign), live in zip(self.blocks(), self.alpha, strict=True):
            a = live.clone()
            for _ in range(20):
                wrong = (-sign * (K @ a)).sigmoid()
                slope = penalty * a - sign * wrong / len(a)  # the gradient is K @ slope
                if slope.norm() < 1e-9:
                    break
                curvature = wrong * (1 - wrong) / len(a)
                a = a - torch.linalg.solve(curvature[:, None] * K + penalty * torch.eye(len(a), dtype=a.dtype), slope)
            live.copy_(a)

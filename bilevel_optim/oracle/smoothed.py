"""Losses whose gradient is an evolution-strategies estimate from values alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem.objective import Sample
from .substitution import Substitution

__all__ = ["Smoothed"]


class Smoothed:
    r"""A loss g whose gradient in some live tensors y is estimated from values of g at random points near y.

    .. math::
        \frac1R \sum_{k=1}^R \frac{g(y + \tau v_k) - g(y - \tau v_k)}{2\tau}\, v_k, \qquad v_k \sim \mathcal N(0, I).

    Its mean is the gradient of :math:`g_\tau(y) = \mathbb E\, g(y + \tau v)`. In p dimensions its relative variance is
    (p + 1)/R where g is about linear over :math:`\tau`. The value of the loss is the mean of the values of g.

    The directions are torch's random numbers, as dropout's are: evaluations of one `Sample` share them. All points
    share the random numbers of g itself. The result has no gradient in other tensors, and no second derivative.

    Args:
        loss: g; it need not have a derivative, but must read y by calls of torch.
        live: y.
        directions: R.
        smoothing: :math:`\tau`.

    Example:
        >>> import torch
        >>> y = torch.tensor([1.0], requires_grad=True)
        >>> loss = Smoothed(lambda: y.square().sum(), [y], directions=1000, smoothing=0.1)
        >>> _ = torch.manual_seed(0)
        >>> bool((torch.autograd.grad(loss(), y)[0] - 2).abs() < 0.3)
        True
    """

    def __init__(self, loss: Callable[..., Any], live: Sequence[Tensor], *, directions: int, smoothing: float) -> None:
        self.loss, self.live, self.directions, self.smoothing = loss, [*live], directions, smoothing

    def __call__(self, *arguments: Any) -> Any:
        with torch.no_grad():
            # Torch calls, so that an outer substitution applies to the live tensors.
            points, sample = [t.detach() for t in self.live], Sample(self.loss, arguments)
            values, gradient = [], [torch.zeros_like(t) for t in points]
            for _ in range(self.directions):
                direction = [torch.randn_like(t) for t in points]
                ends = []
                for step in (self.smoothing, -self.smoothing):
                    moved = [t + step * v for t, v in zip(points, direction, strict=True)]
                    with Substitution(self.live, moved), sample.replayed(points[0].device):
                        ends.append(sample())
                slope = (ends[0] - ends[1]) / (2 * self.smoothing * self.directions)
                gradient = [g + slope * v for g, v in zip(gradient, direction, strict=True)]
                values += ends
            value = sum(values) / len(values)
        # A plane, so that autograd finds this value and this gradient.
        planes = [((t - p) * g).sum() for t, p, g in zip(self.live, points, gradient, strict=True)]
        return value + sum(planes[1:], planes[0])

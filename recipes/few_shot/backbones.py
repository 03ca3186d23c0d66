"""Bodies CNN4 and ResNet-12, with a choice of batch statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BACKBONES", "SMALLEST", "STATISTICS", "Body", "Norm", "calibrate", "cnn4", "resnet12"]

STATISTICS = ("batch", "support", "running")
SMALLEST = 16  # height and width that four poolings leave one pixel of


class Norm(nn.Module):
    """Batch normalisation with a choice of statistics; a training step never changes a buffer.

    Args:
        width: number of channels.
        statistics: ``"batch"``: those of the images of the call, in evaluation too. Support and query of an episode are
            normalised separately, and the query images see each other (transductive, as in the public code of MAML
            and of PZOBO). ``"support"``: those of the support images, for the query too (`Body` sets how many come
            first). ``"running"``: like ``"batch"`` in training; in evaluation, the means over training images that
            `calibrate` has set, so that no image sees another.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, statistics: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.statistics = statistics
        self.first: int | None = None  # number of leading images that the statistics use; None: all
        self.seen: list[tuple[Tensor, Tensor]] | None = None  # statistics of the calls, while `calibrate` collects them

    def forward(self, images: Tensor) -> Tensor:
        if self.statistics == "running" and not self.training:
            return F.batch_norm(images, self.mean, self.variance, self.weight, self.bias)
        if self.first is None and self.seen is None:
            return F.batch_norm(images, None, None, self.weight, self.bias, training=True)
        variance, mean = torch.var_mean(images[: self.first], (0, 2, 3), correction=0)
        if self.seen is not None:
            self.seen.append((mean, variance))
        scale = self.weight * torch.rsqrt(variance + 1e-5)
        shift = self.bias - mean * scale
        return images * scale[:, None, None] + shift[:, None, None]

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, statistics={self.statistics!r}"


class Body(nn.Module):
    """Backbone: images (n, channels, size, size) to features (n, width).

    Args:
        layers: its layers.
        channels, size: channels and size of the images.
        gain: mean squared norm of its features relative to `cnn4`'s, both untrained.
    """

    def __init__(self, layers: nn.Module, channels: int, size: int, gain: float = 1.0) -> None:
        super().__init__()
        self.layers, self.layout, self.gain = layers, torch.contiguous_format, gain
        self.norms = [module for module in layers.modules() if isinstance(module, Norm)]
        with torch.no_grad():
            self.width: int = self(torch.zeros(2, channels, size, size)).shape[1]

    def forward(self, images: Tensor, known: Tensor | None = None) -> Tensor:
        """Return the features of the images; ``known`` are images that the statistics use instead."""
        images = images.to(memory_format=self.layout)
        if known is None:
            return cast(Tensor, self.layers(images))
        for norm in self.norms:
            norm.first = len(known)
        try:
            return cast(Tensor, self.layers(torch.cat([known, images])))[len(known) :]
        finally:
            for norm in self.norms:
                norm.first = None


@torch.no_grad()
def calibrate(body: Body, batches: Iterable[Tensor]) -> None:
    """Set the evaluation statistics to the mean statistics of these batches of images."""
    training = body.training
    body.train()
    for norm in body.norms:
        norm.seen = []
    try:
        for images in batches:
            body(images)
        for norm in body.norms:
            assert norm.seen
            means, variances = (torch.stack(parts) for parts in zip(*norm.seen, strict=True))
            norm.mean.copy_(means.mean(0))
            norm.variance.copy_(variances.mean(0) + means.var(0, correction=0))
    finally:
        for norm in body.norms:
            norm.seen = None
        body.train(training)


def cnn4(channels: int, size: int, statistics: str = "batch", width: int = 32) -> Body:
    """Return a CNN4: four times convolution, ReLU, pooling, norm; 28,896 parameters, 800 features of 84x84 images."""
    layers: list[nn.Module] = []
    for i in range(4):
        # Pooling before ReLU gives the same numbers for a quarter of the work.
        layers += [nn.Conv2d(width if i else channels, width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        layers += [Norm(width, statistics)]
    return Body(nn.Sequential(*layers, nn.Flatten()), channels, size)


class _Residual(nn.Module):
    def __init__(self, before: int, width: int, statistics: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(3):
            layers += [nn.Conv2d(width if i else before, width, 3, padding=1, bias=False), Norm(width, statistics)]
            layers += [nn.LeakyReLU(0.1)] if i < 2 else []
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, bias=False), Norm(width, statistics))

    def forward(self, images: Tensor) -> Tensor:
        return F.leaky_relu(F.max_pool2d(self.layers(images) + self.shortcut(images), 2), 0.1)


def resnet12(channels: int, size: int, statistics: str = "batch", width: int = 64) -> Body:
    """Return a ResNet-12, widths 64-160-320-640: 12,424,320 parameters, 640 features of images of any size."""
    widths = [channels, width, width * 5 // 2, width * 5, width * 10]
    blocks = [_Residual(a, b, statistics) for a, b in pairwise(widths)]
    layers = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in layers.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, a=0.1, mode="fan_out", nonlinearity="leaky_relu")
    return Body(layers, channels, size, gain=10.0)


# Adaptation takes the same steps with 64 filters as with 32, as in MAML's paper.
BACKBONES: dict[str, Callable[..., Body]] = {"cnn4": cnn4, "cnn4-64": partial(cnn4, width=64), "resnet12": resnet12}

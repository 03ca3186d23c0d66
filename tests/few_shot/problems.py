"""A small few-shot problem: 2-way episodes of 6x6 images, a body of two convolutions."""

import torch
from torch import nn

from recipes.few_shot.backbones import Body, Norm
from recipes.few_shot.data import Images
from recipes.few_shot.episodes import Episodes


def images(classes=6, each=8, size=6, channels=1):
    """Classes that differ in their mean image."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randint(40, 200, (classes, 1, channels, size, size), generator=generator)
    noise = torch.randint(-30, 30, (classes, each, channels, size, size), generator=generator)
    pixels = (centre + noise).clamp(0, 255).byte()
    return Images("small", {"train": pixels, "val": pixels, "test": pixels}, (0.5,) * channels, (0.2,) * channels)


def episodes(split="train", **options):
    """2-way 3-shot episodes of them."""
    return Episodes(images(), split, **{"way": 2, "shot": 3, "query": 2, **options})


def body(statistics="batch", width=2):
    """Two smooth convolutions with normalisation."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(1, width, 3), nn.Softplus(), Norm(width, statistics), nn.Conv2d(width, width, 3), nn.Tanh()]
    return Body(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 1, 6)

"""Task sampler of N-way K-shot episodes, and augmentation on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.seeds import stream
from .data import Images

__all__ = ["Batch", "Episodes", "augmented"]


class Batch(NamedTuple):
    """Images (..., n, channels, height, width), normalised, and labels (..., n) from 0 to N - 1.

    ``known``, if not None, are further images for batch statistics (the support of a query).
    """

    images: Tensor
    labels: Tensor
    known: Tensor | None = None


class Episodes:
    """Sampler of N-way K-shot episodes, for ``optimizer.step(..., tasks=)``.

    A task is a row of image numbers: K support and then Q query images of each of N classes, all different. Its lower
    data are the support, its upper data the query; every class is drawn with the same probability.

    Args:
        images: the data set.
        split: ``"train"``, ``"val"`` or ``"test"``.
        way: N.
        shot: K.
        query: Q, query images of each class.
        rotations: add classes rotated by 90, 180 and 270 degrees as new classes (Omniglot).
        augment: shift, flip and colour jitter, drawn for each image.
        beside: pass the support images with the query, as ``known``.
        device: device of the batches.
    """

    def __init__(
        self,
        images: Images,
        split: str,
        *,
        way: int,
        shot: int,
        query: int,
        rotations: bool = False,
        augment: bool = False,
        beside: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        pixels = images.pixels[split]
        self.classes, self.each = pixels.shape[:2]
        self.turns = 4 if rotations else 1
        if way > self.classes * self.turns or shot + query > self.each:
            raise SystemExit(
                f"{images.name} has {self.classes * self.turns} {split} classes of {self.each} images: too few for "
                f"{way}-way episodes with {shot} support and {query} query images of a class"
            )
        self.way, self.shot, self.query, self.augment, self.beside = way, shot, query, augment, beside
        self.device = torch.device(device)
        self.pixels = pixels.flatten(0, 1) if self.device.type == "cpu" else pixels.flatten(0, 1).to(self.device)
        self._mean, self._std = (
            torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (images.mean, images.std)
        )

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw tasks (n, N, K + Q): image numbers, plus the number of all images for each quarter turn."""
        total = self.classes * self.turns
        classes = torch.rand(n, total, generator=generator).topk(self.way).indices
        images = torch.rand(n, self.way, self.each, generator=generator).topk(self.shot + self.query).indices
        return classes.unsqueeze(-1) * self.each + images

    def lower(self, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Batch:
        """Return the support of each task, or n of its images drawn with replacement."""
        return self._batch(tasks[..., : self.shot], n, generator)

    def upper(self, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Batch:
        """Return the query of each task, or n of its images drawn with replacement."""
        batch = self._batch(tasks[..., self.shot :], n, generator)
        return batch._replace(known=self.lower(tasks, None, generator).images) if self.beside else batch

    def fixed(self, count: int, seed: int, at_once: int = 20) -> Iterator[tuple[Batch, Batch]]:
        """Yield the same episodes each time, in parts: support and query."""
        tasks = self.sample(count, stream(seed, "data"))
        for part in torch.split(tasks, at_once):
            yield self.lower(part, None, None), self.upper(part, None, None)

    def classified(self, n: int, generator: torch.Generator | None) -> Batch:
        """Return random images of all classes, labelled with their class; each quarter turn is a class."""
        ids = torch.randint(len(self.pixels) * self.turns, (1, n, 1), generator=generator)
        return Batch(self._batch(ids, None, generator).images[0], (ids.flatten() // self.each).to(self.device))

    def _batch(self, ids: Tensor, n: int | None, generator: torch.Generator | None) -> Batch:
        """Return images interleaved by class: the first of each class, the second of each, and so on."""
        flat = ids.mT.flatten(1)
        labels = torch.arange(ids.shape[1]).repeat(ids.shape[-1]).expand(flat.shape)
        if n is not None:
            rows = torch.randint(flat.shape[1], (len(flat), n), generator=generator)
            flat, labels = flat.gather(1, rows), labels.gather(1, rows)
        pixels = self.pixels[(flat % len(self.pixels)).to(self.pixels.device)]
        if self.turns > 1:
            turn = (flat // len(self.pixels)).to(self.device)
            pixels = torch.stack([pixels.rot90(k, (-2, -1)) for k in range(4)])[
                turn, torch.arange(len(flat), device=self.device).unsqueeze(1), torch.arange(flat.shape[1])
            ]
        if self.augment:
            changed = augmented(pixels.flatten(0, 1).to(self.device).float() / 255, generator).view(pixels.shape)
            return Batch((changed - self._mean) / self._std, labels.to(self.device))
        return Batch(self.normalised(pixels), labels.to(self.device))

    def normalised(self, pixels: Tensor) -> Tensor:
        """Convert pixels to the input of a body."""
        return (pixels.to(self.device).float() / 255 - self._mean) / self._std


def augmented(images: Tensor, generator: torch.Generator | None = None, *, jitter: float = 0.4) -> Tensor:
    """Augment images (n, channels, size, size) between 0 and 1 by random shift, flip and colour changes.

    The shift is a crop of the image padded by an eighth of its size; brightness, contrast and saturation change by
    factors between 1 - ``jitter`` and 1 + ``jitter``. Numbers are drawn on the CPU, so that every device gets the same.
    """
    n, size, pad = len(images), images.shape[-1], images.shape[-1] // 8
    device = images.device
    corners = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=generator).to(device)
    flipped = (torch.rand(n, 1, generator=generator) < 0.5).to(device)
    factors = (1 + jitter * (2 * torch.rand(3, n, 1, 1, 1, generator=generator) - 1)).to(device)
    steps = torch.arange(size, device=device)
    rows, columns = corners[0] + steps, corners[1] + torch.where(flipped, size - 1 - steps, steps)
    padded = F.pad(images, [pad] * 4)
    images = padded[torch.arange(n, device=device)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    images = images.permute(0, 3, 1, 2)
    brightness, contrast, saturation = factors
    images = (images * brightness).clamp(0, 1)
    images = (images * contrast + (1 - contrast) * images.mean((1, 2, 3), keepdim=True)).clamp(0, 1)
    if images.shape[1] == 3:
        images = (images * saturation + (1 - saturation) * images.mean(1, keepdim=True)).clamp(0, 1)
    return images

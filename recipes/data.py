"""Data sets as tensors: bundled with a dependency, or read by torchvision from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Split", "load"]

MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels


class Split(NamedTuple):
    """Images as rows of pixels, and labels."""

    images: Tensor
    labels: Tensor


def load(
    name: str, root: Path | None, download: bool, sizes: tuple[int, int], generator: torch.Generator
) -> tuple[Split, Split, Split]:
    """Training, validation and test part of a data set of ten classes.

    Args:
        name: ``"digits"`` (bundled with scikit-learn, 8x8 pixels), ``"mnist"`` or ``"fashion"`` (through torchvision).
        root: folder of the torchvision data sets.
        download: fetch a missing one.
        sizes: number of training and of validation examples, drawn at random from the training part of the data set (of
            all of digits, the rest of which is the test part).
        generator: of the random choice.
    """
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images, labels = torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target)
        order = torch.randperm(len(labels), generator=generator)
        train, val, rest = order[: sizes[0]], order[sizes[0] : sum(sizes)], order[sum(sizes) :]
        return Split(images[train], labels[train]), Split(images[val], labels[val]), Split(images[rest], labels[rest])
    from torchvision import datasets

    kind = {"mnist": datasets.MNIST, "fashion": datasets.FashionMNIST}[name]
    if root is None:
        raise SystemExit(f"--data {name} needs --data-root, the folder that holds (or, with --download, gets) {name}")
    try:
        parts = [kind(str(root), train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        raise SystemExit(f"{error} (--download fetches it into {root})") from error
    whole, test = (Split((part.data.flatten(1).float() / 255 - MEAN) / STD, part.targets) for part in parts)
    order = torch.randperm(len(whole.labels), generator=generator)
    train, val = order[: sizes[0]], order[sizes[0] : sum(sizes)]
    return Split(whole.images[train], whole.labels[train]), Split(whole.images[val], whole.labels[val]), test

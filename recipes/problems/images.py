"""Images as rows of pixels, bundled with a dependency or read by torchvision from a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from .problem import Part, folder

__all__ = ["load_images"]

MEAN, STD = 0.1307, 0.3081  # MNIST's pixels


def load_images(
    name: str, root: Path | None, download: bool, sizes: tuple[int, int], generator: torch.Generator
) -> tuple[Part, Part, Part]:
    """Return the training, validation and test parts of a data set of ten classes.

    Args:
        name: ``"digits"`` (bundled with scikit-learn, 8x8 pixels), ``"mnist"`` or ``"fashion"`` (through torchvision).
        root: folder of the torchvision data sets.
        download: fetch a missing one.
        sizes: number of training and of validation examples, drawn at random from the training part of the data set.
            For digits they are drawn from all examples, and the rest is the test part.
        generator: source of the random choice.
    """
    if name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        whole = Part(torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target))
        order = torch.randperm(len(whole.labels), generator=generator)
        test = whole.take(order[sum(sizes) :])
    else:
        from torchvision import datasets

        kind = {"mnist": datasets.MNIST, "fashion": datasets.FashionMNIST}[name]
        try:
            parts = [kind(str(folder(root, name)), train=train, download=download) for train in (True, False)]
        except RuntimeError as error:
            raise SystemExit(f"{error} (--download fetches it into {root})") from error
        whole, test = (Part((part.data.flatten(1).float() / 255 - MEAN) / STD, part.targets) for part in parts)
        order = torch.randperm(len(whole.labels), generator=generator)
    if min(*sizes, len(test.labels)) < 1 or sum(sizes) > len(order):
        raise SystemExit(f"{sizes[0]} training and {sizes[1]} validation examples cannot be taken out of {len(order)}")
    return whole.take(order[: sizes[0]]), whole.take(order[sizes[0] : sum(sizes)]), test

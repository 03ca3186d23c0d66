"""Images by class, and a memory-mapped cache of the decoded images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common import progress

__all__ = ["SPLITS", "Images", "cached", "decoded", "default_cache", "fingerprint"]

SPLITS = ("train", "val", "test")
Rows = Iterable["np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Images:
    """Images of the classes of each split.

    Attributes:
        name: name of the data set.
        pixels: for each of `SPLITS` a uint8 tensor (classes, images of a class, channels, height, width).
        mean, std: mean and deviation of each channel, for pixels between 0 and 1.
        note: remark on this copy, if it is unusual; else empty.
    """

    name: str
    pixels: dict[str, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str = ""

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.pixels["train"].shape[2]

    @property
    def size(self) -> int:
        """Height and width."""
        return self.pixels["train"].shape[-1]


def default_cache() -> Path:
    """Return the default folder of decoded images."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bilevel_optim"


def fingerprint(files: Iterable[Path], *also: object) -> str:
    """Return a hash that changes if a file's name, size or time changes, or one of the other values."""
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((facts, also)).encode()).hexdigest()[:16]


def cached(cache: Path, key: str, shape: Sequence[int], rows: Callable[[], Rows]) -> Tensor:
    """Return a memory-mapped uint8 array; if the cache lacks it, ``rows`` makes it, with a progress bar.

    The file gets its name only when it is complete, so that an interrupted one is never used.

    Args:
        cache: folder of the arrays.
        key: name of the array, which must change with its content.
        shape: shape of the array.
        rows: yields its rows in order.
    """
    path = cache / f"{key}.npy"
    found = _mapped(path, shape)
    if found is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            array = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=tuple(shape))
        except OSError as error:
            raise SystemExit(f"cannot write the cache {cache} ({error}): give a folder with --cache") from error
        try:
            count = 0
            for count, row in enumerate(progress(rows(), key.rsplit("-", 1)[0], total=shape[0], unit="class"), 1):
                array[count - 1] = row
            if count != shape[0]:
                raise SystemExit(f"{key}: {count} classes were read, {shape[0]} are expected")
            array.flush()
            del array
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        found = _mapped(path, shape)
        assert found is not None
    return found


def _mapped(path: Path, shape: Sequence[int]) -> Tensor | None:
    """Return the array of a file; None if there is none, or its shape or type is wrong."""
    try:
        array = np.load(path, mmap_mode="c")  # copy on write, because torch has no read-only tensors
    except (OSError, ValueError, EOFError):
        return None
    return torch.from_numpy(array) if array.shape == tuple(shape) and array.dtype == np.uint8 else None


def decoded(files: Sequence[Path], size: int, mode: str) -> np.ndarray[Any, Any]:
    """Decode image files to uint8 (images, channels, size, size)."""
    return np.stack([_decoded(path, size, mode) for path in files])


def _decoded(path: Path, size: int, mode: str) -> np.ndarray[Any, Any]:
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert(mode)
            if image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise SystemExit(f"{path} is damaged ({error}): delete it and fetch the data set again") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def resized(images: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Resize uint8 images (n, channels, h, w), with antialiasing."""
    if images.shape[-1] == size:
        return images
    small = torch.nn.functional.interpolate(
        torch.from_numpy(np.ascontiguousarray(images)).float(), (size, size), mode="bilinear", antialias=True,
        align_corners=False,
    )  # fmt: skip
    found: np.ndarray[Any, Any] = small.round().clamp(0, 255).byte().numpy()
    return found


def each(classes: Sequence[np.ndarray[Any, Any]], size: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the images of each class in turn, resized."""
    for images in classes:
        yield resized(images, size)

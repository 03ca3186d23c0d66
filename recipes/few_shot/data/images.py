"""Images by class, and the memory-mapped cache that they are decoded into once."""

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
        name: of the data set.
        pixels: for each of `SPLITS` a uint8 tensor (classes, images of a class, channels, height, width).
        mean, std: of each channel, for pixels between 0 and 1.
        note: what is particular about this copy; empty if nothing is.
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
    """Where decoded images are kept, if nothing else is said."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bilevel_optim"


def fingerprint(files: Iterable[Path], *also: object) -> str:
    """Changes whenever a file, its size or time, or one of the other values does."""
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((facts, also)).encode()).hexdigest()[:16]


def cached(cache: Path, key: str, shape: Sequence[int], rows: Callable[[], Rows]) -> Tensor:
    """The uint8 array with these rows, memory-mapped; made by ``rows``, with a progress bar, unless it is there.

    It gets its name only when it is whole, so that what an interruption leaves behind is never taken for it.

    Args:
        cache: folder of the arrays.
        key: name of the array, which must change with its content.
        shape: of the array.
        rows: gives its rows in order.
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
    """The array of a file; None if there is none, or it is not what it should be."""
    try:
        array = np.load(path, mmap_mode="c")  # copy on write, because torch has no read-only tensors
    except (OSError, ValueError, EOFError):
        return None
    return torch.from_numpy(array) if array.shape == tuple(shape) and array.dtype == np.uint8 else None


def decoded(files: Sequence[Path], size: int, mode: str) -> np.ndarray[Any, Any]:
    """Image files as uint8 (images, channels, size, size)."""
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
    """Uint8 images (n, channels, h, w) at another size, averaged over what a pixel covers."""
    if images.shape[-1] == size:
        return images
    small = torch.nn.functional.interpolate(
        torch.from_numpy(np.ascontiguousarray(images)).float(), (size, size), mode="bilinear", antialias=True,
        align_corners=False,
    )  # fmt: skip
    found: np.ndarray[Any, Any] = small.round().clamp(0, 255).byte().numpy()
    return found


def each(classes: Sequence[np.ndarray[Any, Any]], size: int) -> Iterator[np.ndarray[Any, Any]]:
    """The images of one class after the other, at the size."""
    for images in classes:
        yield resized(images, size)

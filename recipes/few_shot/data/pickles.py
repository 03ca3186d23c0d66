"""Reader of the pickle files of few-shot data sets, which runs no code from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["labelled", "unpickled"]

# Pickles name the functions that build their objects. These build arrays, in versions 1 and 2 of numpy.
ARRAYS = {("numpy", "ndarray"), ("numpy", "dtype"), *(
    (f"numpy.{core}.{module}", name) for core in ("core", "_core")
    for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
)}  # fmt: skip
PLAIN = {("_codecs", "encode"), ("collections", "OrderedDict"), ("copyreg", "_reconstructor"), ("builtins", "object"),
         ("builtins", "bytearray")}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ARRAYS | PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")


def unpickled(path: Path) -> dict[str, Any]:
    """Read the dict in a pickle file of arrays, lists and texts; return it with text keys."""
    try:
        with path.open("rb") as file:
            found = _Unpickler(file, encoding="latin1").load()
        return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in found.items()}
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError, ImportError, TypeError) as error:
        raise SystemExit(
            f"{path} is damaged, or no pickle of images ({type(error).__name__}: {error}): fetch it again"
        ) from error


def labelled(path: Path) -> list[np.ndarray[Any, Any]]:
    """Return the images of each class of a pickle, as uint8 (images, channels, height, width).

    Reads the two common forms: ``image_data`` with ``class_dict`` (class -> indices), and ``data`` with ``labels``.
    """
    content = unpickled(path)
    pixels = np.asarray(content.get("image_data", content.get("data")))
    if "class_dict" in content:
        groups = [np.asarray(index) for _, index in sorted(content["class_dict"].items())]
    elif "labels" in content:
        labels = np.asarray(content["labels"])
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    else:
        groups = []
    count = sum(map(len, groups))
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8 or count != len(pixels):
        raise SystemExit(
            f"{path} must hold image_data and class_dict, or data and labels, with uint8 images (n, height, width, 3), "
            f"but holds {', '.join(sorted(content))} with images {pixels.dtype} {pixels.shape} and {count} labels"
        )
    return [pixels[group].transpose(0, 3, 1, 2) for group in groups]

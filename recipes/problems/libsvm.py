"""Binary classification sets in LIBSVM's text format, read from the files of LIBSVM's site, compressed or not."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..common.seeds import stream
from .problem import Part, folder

__all__ = ["load_breast_cancer", "load_libsvm"]

URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
# Number of features (a part may lack the last ones), and names of the two files on the site.
SETS = {
    "a9a": (123, "a9a", "a9a.t"),
    "w8a": (300, "w8a", "w8a.t"),
    "ijcnn1": (22, "ijcnn1.bz2", "ijcnn1.t.bz2"),
}
# SHA-256 of what the files say (see `_digest`), whatever their compression and spaces; w8a.t is not checked.
CONTENTS = {
    "a9a": "6e5185cecd7829df8cf37437adece2edbe58a4102dc0e95aeb3b275359df8a6b",
    "a9a.t": "666a35bdca57674e06e552c42dd27e18698b91a7372739c75c08bf6f485160a1",
    "w8a": "498eac95ea22fd0a7372d7903c1609dbb45dbea9a1e53c14a4d17a3d1e596353",
    "ijcnn1": "a53e8767e80fc50284eecbe4b1eb30a81a51f6db300685c5e212faf450a4a91b",
    "ijcnn1.t": "ca7ddb4d595af5d5ce0a2f47283cfee3a38bd448d6117cb09e3651907123336f",
}
MOST = 2**24  # bytes of a file to fetch
UNPACKED = 2**26  # and of its text
OPEN: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
HELD_OUT = 0.2  # of the training examples, where there is no test file


def load_libsvm(name: str, root: Path | None, download: bool, seed: int = 0) -> tuple[Part, Part]:
    """Return the training and test parts.

    Args:
        name: ``"a9a"``, ``"w8a"`` or ``"ijcnn1"``.
        root: folder with ``NAME`` and ``NAME.t``, plain or with the suffix ``.gz``, ``.bz2`` or ``.xz``. Without the
            second, a fifth of the first is held out, with a printed note.
        download: fetch missing files into ``root``.
        seed: seed of the choice of held-out examples.
    """
    features, *files = SETS[name]
    root = folder(root, name)
    paths = [_find(root, part, file, download, features) for part, file in zip((name, f"{name}.t"), files, strict=True)]
    if paths[0] is None:
        raise SystemExit(f"no file {name}, {name}.gz, {name}.bz2 or {name}.xz in {root} (--download fetches it)")
    train = _read(paths[0], features)
    if paths[1] is not None:
        return train, _read(paths[1], features)
    print(f"No {name}.t in {root}: {HELD_OUT:.0%} of {name}, drawn at random, are the test part")
    order = torch.randperm(len(train.labels), generator=stream(seed, "data"))
    count = round(HELD_OUT * len(order))
    held_out, kept = order[:count], order[count:]
    return train.take(kept), train.take(held_out)


def load_breast_cancer(seed: int) -> tuple[Part, Part]:
    """Return the 569 standardised examples bundled with scikit-learn: 300 for training, 269 for testing."""
    from sklearn.datasets import load_breast_cancer as bundled

    bunch = bundled()
    features, labels = torch.tensor(bunch.data), torch.tensor(bunch.target * 2.0 - 1)
    whole = Part(((features - features.mean(0)) / features.std(0)).float(), labels.float())
    order = torch.randperm(len(labels), generator=stream(seed, "data"))
    return whole.take(order[:300]), whole.take(order[300:])


def _find(root: Path, part: str, file: str, download: bool, features: int) -> Path | None:
    for suffix in OPEN:
        path = root / f"{part}{suffix}"
        if path.exists():
            return path
    if not download:
        return None
    root.mkdir(parents=True, exist_ok=True)
    unfinished = root / f"unfinished-{file}"
    try:
        with urllib.request.urlopen(URL + file, timeout=60) as source, unfinished.open("wb") as target:
            _copy(source, target, MOST, URL + file)
        with _opened(unfinished) as text:
            _copy(text, None, UNPACKED, URL + file)
        found = _digest(unfinished, features)
        if part in CONTENTS and found != CONTENTS[part]:
            raise SystemExit(f"{URL + file} has other contents than expected (SHA-256 {found}); it was not kept")
        return unfinished.rename(root / file)
    except (urllib.error.URLError, TimeoutError) as error:
        raise SystemExit(f"cannot fetch {URL + file}: {error}") from error
    except (EOFError, OSError, ValueError) as error:
        raise SystemExit(f"{URL + file} is no file of examples ({error}); it was not kept") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _copy(source: Any, target: Any, most: int, name: str) -> None:
    """Copy a file; raise SystemExit if it is larger than expected."""
    size = 0
    while piece := source.read(2**16):
        size += len(piece)
        if size > most:
            raise SystemExit(f"{name} is larger than {most} bytes, which no file of this set is; it was not kept")
        if target is not None:
            target.write(piece)


def _opened(path: Path) -> Any:
    return OPEN[path.suffix if path.suffix in OPEN else ""](path, "rb")


def _digest(path: Path, features: int) -> str:
    """Return the SHA-256 of labels, lengths of rows, indices from zero and values, as little-endian numbers."""
    matrix, labels = _matrix(path, features)
    kinds = ((labels, "<f8"), (matrix.indptr, "<i8"), (matrix.indices, "<i8"), (matrix.data, "<f8"))
    return hashlib.sha256(b"".join(array.astype(kind).tobytes() for array, kind in kinds)).hexdigest()


def _matrix(path: Path, features: int) -> Any:
    from sklearn.datasets import load_svmlight_file

    with _opened(path) as file:
        return load_svmlight_file(file, n_features=features, zero_based=False)


def _read(path: Path, features: int) -> Part:
    matrix, labels = _matrix(path, features)
    return Part(torch.tensor(matrix.toarray(), dtype=torch.float32), torch.tensor(labels, dtype=torch.float32))

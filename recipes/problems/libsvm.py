"""Binary classification sets in LIBSVM's text format, read from the files of LIBSVM's site, compressed or not."""

from __future__ import annotations

import bz2
import gzip
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
    paths = [_find(root, part, file, download) for part, file in zip((name, f"{name}.t"), files, strict=True)]
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


def _find(root: Path, part: str, file: str, download: bool) -> Path | None:
    for suffix in OPEN:
        path = root / f"{part}{suffix}"
        if path.exists():
            return path
    if not download:
        return None
    root.mkdir(parents=True, exist_ok=True)
    unfinished = root / f"{file}.part"
    try:
        urllib.request.urlretrieve(URL + file, unfinished)
    except urllib.error.URLError as error:
        raise SystemExit(f"cannot fetch {URL + file}: {error}") from error
    return unfinished.rename(root / file)


def _read(path: Path, features: int) -> Part:
    from sklearn.datasets import load_svmlight_file

    with OPEN[path.suffix if path.suffix in OPEN else ""](path, "rb") as file:
        matrix, labels = load_svmlight_file(file, n_features=features, zero_based=False)
    return Part(torch.tensor(matrix.toarray(), dtype=torch.float32), torch.tensor(labels, dtype=torch.float32))

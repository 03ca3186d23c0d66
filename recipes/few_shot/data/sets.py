"""Data sets: their layout on disk, and errors with advice if it differs."""

from __future__ import annotations

import csv
import lzma
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.seeds import stream
from ...problems.problem import folder
from .classes import cifar_splits, read_tables
from .images import SPLITS, Images, cached, decoded, each, fingerprint, resized
from .pickles import labelled, unpickled

__all__ = ["DATA", "load"]

Array = np.ndarray[Any, Any]
MINI = {"train": 64, "val": 16, "test": 20}
FC100 = {"train": 60, "val": 20, "test": 20}
PER_CLASS = 600  # images per class of miniImageNet and of CIFAR-100
PACKED = 160  # images per class of the packed part of CIFAR-100
CHARACTERS, DRAWERS = {"train": 1100, "val": 100, "test": 423}, 20  # of Omniglot
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)
SUFFIXES = {".jpg", ".jpeg", ".png"}


def load(
    name: str,
    root: Path | None,
    cache: Path,
    *,
    size: int | None = None,
    download: bool = False,
    tables: Path | None = None,
) -> Images:
    """Return the images of a data set, decoded and resized once into the cache.

    Args:
        name: one of `DATA`.
        root: folder of the data set's files; digits need none.
        cache: folder of the decoded images.
        size: height and width. Default: the usual size of the data set.
        download: fetch CIFAR-100 or Omniglot by torchvision, if missing.
        tables: folder of miniImageNet's split tables. Default: ``root``.
    """
    if name == "digits":
        return _digits(size or 16)
    root = folder(root, name)
    if name == "miniimagenet":
        return _mini_imagenet(root, cache, size or 84, tables)
    if name == "omniglot":
        return _omniglot(root, cache, size or 28, download)
    return _cifar(name, root, cache, size or 32, download)


def _kept(
    name: str,
    cache: Path,
    files: Iterable[Path],
    size: int,
    classes: dict[str, Sequence[Any]],
    images: int,
    read: Callable[[Sequence[Any]], Iterable[Array]],
    channels: int = 3,
) -> dict[str, Tensor]:
    """Return each split from the cache, or read it."""
    mark = fingerprint(files, size)
    return {
        split: cached(
            cache, f"{name}-{size}-{split}-{mark}", (len(some), images, channels, size, size), partial(read, some)
        )
        for split, some in classes.items()
    }


def _require_count(what: str, counts: dict[str, int], expected: int) -> None:
    """Raise unless every class has the expected number of images."""
    wrong = [f"{name} has {count}" for name, count in counts.items() if count != expected]
    if wrong:
        raise SystemExit(
            f"{what}: every class must have {expected} images, but {', '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more are wrong' if len(wrong) > 5 else ''}: fetch or unpack the data set again"
        )


# ------------------------------------------------------------------------------------------------ class folders


def _class_folders(root: Path) -> dict[str, list[Path]]:
    """Return the image files by folder name."""
    found: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() in SUFFIXES:
            found.setdefault(path.parent.name, []).append(path)
    return found


def _require_classes(name: str, root: Path, wanted: Iterable[str], found: Iterable[str], form: str) -> None:
    if missing := sorted({*wanted} - {*found}):
        raise SystemExit(
            f"{len(missing)} classes of {name} are missing under {root} ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}): expected {form}"
        )


def _from_folders(size: int, mode: str, classes: Sequence[Sequence[Path]]) -> Iterable[Array]:
    return (decoded(files, size, mode) for files in classes)


def _pickled(name: str, paths: dict[str, Path], cache: Path, size: int, counts: dict[str, int]) -> dict[str, Tensor]:
    """Return the splits of three pickle files, which are read only if the cache lacks them."""
    mark = fingerprint(paths.values(), size)

    def rows(split: str) -> Iterable[Array]:
        classes = labelled(paths[split])
        if len(classes) != counts[split]:
            raise SystemExit(f"{paths[split]} has {len(classes)} classes, but {split} has {counts[split]}")
        _require_count(str(paths[split]), {f"class {i}": len(c) for i, c in enumerate(classes)}, PER_CLASS)
        return each(classes, size)

    return {
        split: cached(cache, f"{name}-{size}-{split}-{mark}", (counts[split], PER_CLASS, 3, size, size),
                      partial(rows, split))
        for split in SPLITS
    }  # fmt: skip


def _three(root: Path, *patterns: str) -> dict[str, Path]:
    """Find three files, named by a pattern of the split; empty if there are none."""
    for pattern in patterns:
        names = {split: pattern.format(split) for split in SPLITS}
        found = {split: path for split, name in names.items() for path in sorted(root.rglob(name))[:1]}
        if found and len(found) < len(SPLITS):
            missing = [names[split] for split in SPLITS if split not in found]
            raise SystemExit(f"{', '.join(missing)} missing under {root}, where {min(found.values()).name} is")
        if found:
            return found
    return {}


# ------------------------------------------------------------------------------------------------ miniImageNet


def _mini_imagenet(root: Path, cache: Path, size: int, tables: Path | None) -> Images:
    pickles = _three(root, "mini-imagenet-cache-{}.pkl", "mini_imagenet_{}.pkl", "mini-imagenet-cache-{}.pickle")
    if pickles:
        return Images("miniimagenet", _pickled("miniimagenet", pickles, cache, size, MINI), *IMAGENET)
    found = _class_folders(root)
    if not found:
        raise SystemExit(
            f"no miniImageNet under {root}: expected class folders <wnid>/*.jpg (600 images of each of 100 classes of "
            "ImageNet, or all of them in one folder with the names of the split tables) with train.csv, val.csv and "
            "test.csv, or the pickle files mini-imagenet-cache-{train,val,test}.pkl. ImageNet has to be asked for at "
            "image-net.org; github.com/yaoyao-liu/mini-imagenet-tools makes the class folders from it"
        )
    splits = read_tables(root, tables, MINI)
    by_name = {path.name: path for files in found.values() for path in files}
    classes = {split: _mini_classes(root, names, found, by_name) for split, names in splits.items()}
    counts = {label: len(files) for split in SPLITS for label, files in classes[split].items()}
    _require_count(f"miniImageNet under {root}", counts, PER_CLASS)
    files = {split: [*some.values()] for split, some in classes.items()}
    everything = [path for some in files.values() for each_class in some for path in each_class]
    pixels = _kept("miniimagenet", cache, everything, size, {**files}, PER_CLASS, partial(_from_folders, size, "RGB"))
    return Images("miniimagenet", pixels, *IMAGENET)


def _mini_classes(
    root: Path, names: dict[str, list[str]], found: dict[str, list[Path]], by_name: dict[str, Path]
) -> dict[str, list[Path]]:
    """Return the files of each class: those of the table, or all in the folder of the class."""
    classes = {}
    for label, wanted in names.items():
        there = [by_name[name] for name in wanted if name in by_name]
        classes[label] = there or found.get(label, [])
    _require_classes("miniImageNet", root, names, [label for label, files in classes.items() if files],
                     "a folder <wnid>/*.jpg for each class of the split tables")  # fmt: skip
    return classes


# ------------------------------------------------------------------------------------------------ CIFAR-100


def _cifar(name: str, root: Path, cache: Path, size: int, download: bool) -> Images:
    title = {"cifar_fs": "CIFAR_FS", "fc100": "FC100"}[name]
    counts = MINI if name == "cifar_fs" else FC100
    splits = cifar_splits(name)
    if list(root.rglob("images.u8.xz")):
        return _packed_cifar(name, next(iter(sorted(root.rglob("images.u8.xz")))), splits, cache, size)
    pickles = _three(root, title + "_{}.pickle", title + "_{}.pkl")
    if pickles:
        return Images(name, _pickled(name, pickles, cache, size, counts), *CIFAR)
    original = root if root.name == "cifar-100-python" else root / "cifar-100-python"
    if not original.exists() and download:
        from torchvision.datasets import CIFAR100

        CIFAR100(str(root), download=True)
    if original.exists():
        return _original_cifar(name, original, splits, cache, size)
    found = _class_folders(root)
    form = (
        f"torchvision's CIFAR-100 (cifar-100-python/, --download fetches it into {root}), {title}_{{train,val,test}}"
        ".pickle, or the class folders of the CIFAR-FS download, data/<class>/*.png"
    )
    if not found:
        raise SystemExit(f"no CIFAR-100 under {root}: expected {form}")
    _require_classes(title, root, [c for some in splits.values() for c in some], found, form)
    files = {split: [found[c] for c in some] for split, some in splits.items()}
    _require_count(f"{title} under {root}", {c: len(found[c]) for some in splits.values() for c in some}, PER_CLASS)
    everything = [path for some in files.values() for one in some for path in one]
    pixels = _kept(name, cache, everything, size, {**files}, PER_CLASS, partial(_from_folders, size, "RGB"))
    return Images(name, pixels, *CIFAR)


def _original_cifar(name: str, root: Path, splits: dict[str, list[str]], cache: Path, size: int) -> Images:
    paths = [root / part for part in ("meta", "train", "test")]
    for path in paths:
        if not path.exists():
            raise SystemExit(f"{path} is missing: delete {root} and fetch CIFAR-100 again (--download)")
    names = list(unpickled(paths[0]).get("fine_label_names", []))
    _require_classes("CIFAR-100", paths[0], [c for some in splits.values() for c in some], names, "100 fine labels")

    def rows(wanted: Sequence[str]) -> Iterable[Array]:
        parts = [unpickled(path) for path in paths[1:]]
        data = np.concatenate([np.asarray(part["data"], dtype=np.uint8).reshape(-1, 3, 32, 32) for part in parts])
        labels = np.concatenate([np.asarray(part["fine_labels"]) for part in parts])
        classes = [data[labels == names.index(c)] for c in wanted]
        _require_count(f"CIFAR-100 under {root}", dict(zip(wanted, map(len, classes), strict=True)), PER_CLASS)
        return each(classes, size)

    return Images(name, _kept(name, cache, paths, size, {**splits}, PER_CLASS, rows), *CIFAR)


def _packed_cifar(name: str, path: Path, splits: dict[str, list[str]], cache: Path, size: int) -> Images:
    """Read a packed part of CIFAR-100: ``classes.csv`` and ``images.u8.xz``, (100, n, 3, 32, 32) as differences."""
    table = path.with_name("classes.csv")
    if not table.exists():
        raise SystemExit(f"{table} is missing beside {path.name}")
    with table.open() as file:
        index = {row["class"]: int(row["index"]) for row in csv.DictReader(file)}
    _require_classes("CIFAR-100", table, [c for some in splits.values() for c in some], index, "100 classes")
    kept = list[Array]()

    def rows(wanted: Sequence[str]) -> Iterable[Array]:
        kept[:] = kept or [_unpacked_cifar(path)]
        return each([kept[0][index[c]] for c in wanted], size)

    pixels = _kept(name, cache, [path, table], size, {**splits}, PACKED, rows)
    return Images(name, pixels, *CIFAR, note=f"{PACKED} images of each class instead of 600")


def _unpacked_cifar(path: Path) -> Array:
    try:
        with lzma.open(path) as file:
            x = np.frombuffer(file.read(), np.uint8).reshape(100, PACKED, 3, 32, 32)
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise SystemExit(f"{path} is damaged ({error}): copy it again") from error
    x = x.cumsum(-1, dtype=np.uint8).cumsum(-2, dtype=np.uint8)
    x[:, :, 0] += x[:, :, 1]
    x[:, :, 2] += x[:, :, 1]
    return x


# ------------------------------------------------------------------------------------------------ Omniglot, digits


def _omniglot(root: Path, cache: Path, size: int, download: bool) -> Images:
    """Load 1623 characters in a fixed random order: 1100 for training, 100 validation, 423 test; ink is 255."""
    order = torch.randperm(sum(CHARACTERS.values()), generator=stream(0, "data"))
    parts = torch.split(order, [*CHARACTERS.values()])
    splits: dict[str, Sequence[int]] = {s: p.tolist() for s, p in zip(CHARACTERS, parts, strict=True)}
    packed = [root / f"images_{part}.npz" for part in ("background", "evaluation")]
    read: Callable[[Sequence[Any]], Iterable[Array]]
    if any(path.exists() for path in packed):
        files, read = packed, _from_npz(packed, size)
        if missing := [path for path in packed if not path.exists()]:
            raise SystemExit(f"{missing[0]} is missing")
    else:
        if download and not list(root.rglob("images_background")):
            from torchvision.datasets import Omniglot

            for background in (True, False):
                Omniglot(str(root), background=background, download=True)
        both = ("background", "evaluation")
        # Files are named 0001_01.png to 1623_20.png: folders in that order are the rows of the packed form.
        found = [_unique(p.parent for p in _by_name(root.rglob(f"images_{part}/*/*/*.png"))) for part in both]
        if not any(found):
            raise SystemExit(
                f"no Omniglot under {root}: expected torchvision's folders omniglot-py/images_background and "
                f"images_evaluation with <alphabet>/<character>/*.png (--download fetches them into {root})"
            )
        characters = {path: sorted(path.glob("*.png")) for some in found for path in some}
        if len(characters) != len(order):
            raise SystemExit(
                f"Omniglot under {root} has {len(found[0])} background and {len(found[1])} evaluation characters, but "
                f"should have {len(order)} in all (964 and 659): delete it and fetch it again (--download)"
            )
        counts = {str(p.relative_to(root)): len(some) for p, some in characters.items()}
        _require_count(f"Omniglot under {root}", counts, DRAWERS)
        listed = [*characters.values()]
        files = [path for some in listed for path in some]

        def read(wanted: Sequence[int]) -> Iterable[Array]:
            return (255 - decoded(listed[i], size, "L") for i in wanted)

    pixels = _kept("omniglot", cache, files, size, {**splits}, DRAWERS, read, channels=1)
    return Images("omniglot", pixels, (0.0,), (1.0,))


def _by_name(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path.name, path))


def _unique(paths: Iterable[Path]) -> list[Path]:
    return [*dict.fromkeys(paths)]


def _from_npz(paths: Sequence[Path], size: int) -> Callable[[Sequence[int]], Iterable[Array]]:
    whole: list[Array] = []

    def read(wanted: Sequence[int]) -> Iterable[Array]:
        if not whole:
            for path in paths:
                try:
                    whole.append(np.load(path)["images"])
                except Exception as error:  # zipfile, zlib and numpy raise different errors
                    raise SystemExit(f"{path} is damaged ({error}): copy it again") from error
        first = len(whole[0])
        for i in wanted:
            paper = whole[0][i] if i < first else whole[1][i - first]
            yield resized(255 * (1 - paper[:, None].astype(np.uint8)), size)

    return read


def _digits(size: int) -> Images:
    """Load scikit-learn's digits: a digit without symmetry gives eight classes, its rotations and reflections.

    Nine is left out, as it is a rotated six.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images * (255 / 16)).round().astype(np.uint8)[:, None]
    digits = {
        "train": [(d, s) for d in (3, 4, 6) for s in range(8)] + [(0, 0), (1, 0), (1, 1), (8, 0)],
        "val": [(5, s) for s in range(8)],
        "test": [(d, s) for d in (2, 7) for s in range(8)],
    }
    shown = min(np.bincount(bunch.target))

    def laid(digit: int, symmetry: int) -> Array:
        gradient_dot = np.rot90(images[bunch.target == digit][:shown], symmetry % 4, axes=(2, 3))
        return resized(gradient_dot[..., ::-1] if symmetry >= 4 else gradient_dot, size)

    pixels = {split: torch.from_numpy(np.stack([laid(*c) for c in some])) for split, some in digits.items()}
    return Images("digits", pixels, (0.303,), (0.318,))


DATA = ("digits", "omniglot", "cifar_fs", "fc100", "miniimagenet")

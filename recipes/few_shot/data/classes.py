"""Training, validation and test classes of CIFAR-100 and of miniImageNet."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable
from pathlib import Path

from ...problems.tasks import SUPERCLASSES
from .images import SPLITS

__all__ = ["cifar_splits", "read_tables"]

# Bertinetto et al. (2019), arXiv:1805.08136; the 64 others are for training.
CIFAR_FS = {
    "val": "beaver beetle butterfly camel cattle crab crocodile flatfish lamp maple_tree motorcycle otter sea shark "
    "television tractor",
    "test": "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose snail sweet_pepper table "
    "telephone wardrobe whale woman worm",
}
# Oreshkin et al. (2018), arXiv:1805.10123: superclasses; the 12 others are for training.
FC100 = {
    "val": "large_carnivores large_omnivores_and_herbivores non-insect_invertebrates small_mammals",
    "test": "aquatic_mammals insects medium_mammals people",
}
HELD = ("val", "test")


def cifar_splits(name: str) -> dict[str, list[str]]:
    """Return the class names of each split of CIFAR-FS or FC100, in alphabetical order."""
    classes = sorted(word for words in SUPERCLASSES.values() for word in words.split())
    if name == "cifar_fs":
        held = {split: CIFAR_FS[split].split() for split in HELD}
    else:
        held = {split: sorted(w for s in FC100[split].split() for w in SUPERCLASSES[s].split()) for split in HELD}
    return {"train": [c for c in classes if c not in held["val"] and c not in held["test"]], **held}


def read_tables(root: Path, tables: Path | None, counts: dict[str, int]) -> dict[str, dict[str, list[str]]]:
    """Read the split tables of Ravi and Larochelle: for each split the file names of each class.

    Args:
        root: folder with ``train.csv``, ``val.csv`` and ``test.csv``, at any depth; also packed (``.csv.gz``).
        tables: another such folder, searched first.
        counts: required number of classes of each split.
    """
    places = [place for place in (tables, root) if place is not None]
    found = {}
    for split in SPLITS:
        paths = [p for place in places for end in (".csv", ".csv.gz") for p in sorted(place.rglob(split + end))]
        if not paths:
            raise SystemExit(
                f"no split table {split}.csv under {' or '.join(map(str, places))}: miniImageNet needs train.csv, "
                "val.csv and test.csv with the columns filename and label (of Ravi and Larochelle, for example from "
                "github.com/yaoyao-liu/mini-imagenet-tools, mini_imagenet_split/Ravi); --tables DIR says where they are"
            )
        found[split] = _read(paths[0])
        if len(found[split]) != counts[split]:
            raise SystemExit(f"{paths[0]} has {len(found[split])} classes, but {split} has {counts[split]}")
    twice = {c for a in SPLITS for b in SPLITS if a < b for c in found[a].keys() & found[b].keys()}
    if twice:
        raise SystemExit(f"the split tables share {len(twice)} classes ({', '.join(sorted(twice)[:3])}, ...)")
    return found


def _read(path: Path) -> dict[str, list[str]]:
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return _by_class(csv.DictReader(io.StringIO(text)))
    except (OSError, EOFError, UnicodeDecodeError, KeyError) as error:
        raise SystemExit(
            f"{path} is not a split table with the columns filename and label ({type(error).__name__}: {error})"
        ) from error


def _by_class(rows: Iterable[dict[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["label"], []).append(row["filename"])
    return found

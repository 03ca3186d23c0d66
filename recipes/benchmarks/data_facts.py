r"""Count oddities of the data sets: twins with another label, shared rows, empty texts, constant columns.

    python -m recipes.benchmarks.data_facts                                        # digits, bundled
    python -m recipes.benchmarks.data_facts --sets a9a ijcnn1 --data-root FOLDER   # LIBSVM's files
    python -m recipes.benchmarks.data_facts --sets newsgroups --data-root FOLDER
    python -m recipes.benchmarks.data_facts --sets mnist --data-root FOLDER        # torchvision's folder
    python -m recipes.benchmarks.data_facts --effects --sets SETS --data-root DIR --page docs/data.md --out docs/records

FOLDER has the files of the set, or a folder for each set with the names of `SETS`. For sets with test rows that also
occur in training, it fits logistic regression and compares its accuracy on all test rows with that on the others.
``--effects`` runs small recipes on each set as it is and without the oddity, with the same seeds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..common import Parser, interval, save, show
from ..common.seeds import stream
from ..few_shot.data import load
from ..few_shot.data.classes import read_tables
from ..few_shot.data.images import SPLITS, Images
from ..few_shot.data.sets import MINI
from ..problems.images import load_images
from ..problems.libsvm import load_breast_cancer, load_libsvm
from ..problems.newsgroups import stripped, texts_of
from ..problems.problem import Part, folder
from . import data_effects

Facts = dict[str, Any]
MISSING = """Not counted, because no copy was at hand: Fashion-MNIST, covtype, `w8a.t`, the images of miniImageNet, and
the other 440 images of each class of CIFAR-100. The command counts them too (but covtype), from your copy."""
IMAGES = 60_000  # training images of MNIST and Fashion-MNIST
SHOWN = 5e-4  # tables have three digits after the point
HEADER = """# What is odd in the data

Counts for every data set that the recipes read, and whether our tables change without the oddity. A difference is the
mean over seeds of (without - as it is), with its 95 % interval; an interval that contains 0 is within the noise.
`contents` is the start of a SHA-256 of what was read, so that you can tell whether your copy is the same. The control
"nearest image" learns nothing, and the test episodes are the same for all seeds.

```
python -m recipes.benchmarks.data_facts --sets a9a newsgroups --data-root DIR             # counts
python -m recipes.benchmarks.data_facts --sets a9a newsgroups --data-root DIR --effects   # and small recipes
```
"""


def digest(*arrays: Any) -> str:
    """Return the start of a hash of arrays or texts."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.encode() if isinstance(array, str) else np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()[:12]


def keys(rows: Tensor) -> list[bytes]:
    """Return a key for each row; equal rows have equal keys."""
    return [row.tobytes() for row in rows.contiguous().numpy()]


def of_rows(train: Part, test: Part, refit: bool) -> Facts:
    """Count twins, shared rows and useless columns of dense rows."""
    known: dict[bytes, set[int]] = {}
    own, other = keys(train.features), keys(test.features)
    for key, label in zip(own, train.labels.tolist(), strict=True):
        known.setdefault(key, set()).add(label)
    seen = torch.tensor([key in known for key in other])
    spread = train.features.amax(0) - train.features.amin(0)
    facts: Facts = {
        "training rows": len(own),
        "test rows": len(other),
        "training rows that occurred before": len(own) - len(known),
        "training rows with a twin of another label": sum(len(known[key]) > 1 for key in own),
        "test rows that occur in training": int(seen.sum()),
        "training rows without an entry": int((train.features == 0).all(1).sum()),
        "columns": train.features.shape[1],
        "constant columns": int((spread == 0).sum()),
        "rank": int(torch.linalg.matrix_rank(train.features.double().T @ train.features.double())),
    }
    if refit and seen.any():
        from sklearn.linear_model import LogisticRegression

        model = LogisticRegression(max_iter=1000).fit(train.features.numpy(), train.labels.numpy())
        right = torch.from_numpy(model.predict(test.features.numpy()) == test.labels.numpy())
        facts["accuracy on all test rows"] = float(right.double().mean())
        facts["accuracy on test rows not in training"] = float(right[~seen].double().mean())
    return {**facts, "contents": digest(*(t.numpy() for part in (train, test) for t in part))}


def of_newsgroups(root: Path | None) -> Facts:
    """Count what remains of the texts without headers, footers and quotes."""
    from sklearn.datasets import _twenty_newsgroups as rules

    facts: Facts = {}
    parts = {name: texts_of(folder(root, "20newsgroups"), name, False) for name in ("train", "test")}
    groups = defaultdict[str, set[str]](set)
    for name, (texts, labels) in parts.items():
        bare = stripped(texts)
        words = [any(len(w) > 1 and w.isalnum() for w in text.replace("_", "").split()) for text in bare]
        seen = {text for text in groups if text.strip()}
        facts |= {
            f"{name}: texts": len(texts),
            f"{name}: empty without headers, footers and quotes": sum(not text.strip() for text in bare),
            f"{name}: without a word of two letters": sum(not w for w in words),
            f"{name}: identical to an earlier one": len(bare) - len({*bare}),
        }
        if name == "test":
            facts["test: not empty, and in training too"] = sum(text in seen for text in bare)
        for text, label in zip(bare, labels, strict=True):
            groups[text].add(label)
        before = [rules.strip_newsgroup_quoting(rules.strip_newsgroup_header(text)) for text in texts]
        cut = [len(a) - len(rules.strip_newsgroup_footer(a)) for a in before]
        facts[f"{name}: footer rule cuts more than 300 characters"] = sum(c > 300 for c in cut)
        halves = sum(c > len(a) / 2 for c, a in zip(cut, before, strict=True))
        facts[f"{name}: footer rule cuts more than half of the text"] = halves
    facts["texts, not empty, that occur in several groups"] = sum(len(g) > 1 for t, g in groups.items() if t.strip())
    return {**facts, "contents": digest(*(text for texts, labels in parts.values() for text in (*texts, *labels)))}


def of_classes(images: Images) -> Facts:
    """Count images that occur twice: in a class, in two classes, in two splits, or as a turned image of another."""
    places = defaultdict[bytes, list[tuple[str, int]]](list)
    turned = defaultdict[bytes, list[tuple[str, int]]](list)
    for split, pixels in images.pixels.items():
        for c, each in enumerate(pixels.numpy()):
            for image in each:
                places[image.tobytes()].append((split, c))
                for quarter in (1, 2, 3):
                    turned[np.rot90(image, quarter, (1, 2)).tobytes()].append((split, c))
    several = [{*found} for found in places.values() if len(found) > 1]
    pixels = torch.cat([images.pixels[split].flatten(0, 1) for split in images.pixels])
    return {
        **{f"{split} classes": len(images.pixels[split]) for split in images.pixels},
        "images of a class": images.pixels["train"].shape[1],
        "images that occurred before": sum(len(found) - 1 for found in places.values()),
        "images that occur in two classes": sum(len(found) > 1 for found in several),
        "images that occur in two splits": sum(len({split for split, _ in found}) > 1 for found in several),
        "images equal to a turned image of another class": sum(
            bool({*turned[key]} - {*found}) for key, found in places.items() if key in turned
        ),
        "constant pixels": int((pixels.amax(0) == pixels.amin(0)).sum()),
        "contents": digest(*(images.pixels[split].numpy() for split in images.pixels)),
    }


def of_omniglot(root: Path | None) -> Facts:
    """Count twins, and compare the ink at 28 pixels with that of the originals, for several ways to resize."""
    with tempfile.TemporaryDirectory() as cache:
        facts = of_classes(load("omniglot", root, Path(cache)))
        whole = torch.cat([p[:, ::4] for p in load("omniglot", root, Path(cache), size=105).pixels.values()])
    whole = whole.flatten(0, 1)
    facts["ink, 105 pixels (a quarter of the images)"] = float(whole.float().mean() / 255)
    for name, resize in data_effects.RESIZED.items():
        small = resize(whole, 28)
        facts[f"ink, 28 pixels, {name}"] = float(small.float().mean() / 255)
        facts[f"grey values, 28 pixels, {name}"] = len(torch.unique(small))
    return facts


def of_images(name: str) -> Callable[[Path | None], Facts]:
    def count(root: Path | None) -> Facts:
        with tempfile.TemporaryDirectory() as cache:
            return of_classes(load(name, root, Path(cache)))

    return count


def of_tables(root: Path | None) -> Facts:
    """Count the rows of miniImageNet's split tables."""
    tables = read_tables(folder(root, "miniimagenet"), None, MINI)
    names = [file for split in SPLITS for files in tables[split].values() for file in files]
    return {
        **{f"{split} classes": len(tables[split]) for split in SPLITS},
        "files": len(names),
        "files that occurred before": len(names) - len({*names}),
        "classes without 600 files": sum(len(files) != 600 for split in SPLITS for files in tables[split].values()),
        "classes whose file numbers have gaps": sum(
            _last(files) > len(files) for split in SPLITS for files in tables[split].values()
        ),
        "contents": digest(*names),
    }


def _last(files: list[str]) -> int:
    """Return the largest number in names such as n0153282900000005.jpg."""
    return max(int(found[1]) if (found := re.fullmatch(r"n\d{8}(\d+)\.jpg", file)) else 0 for file in files)


def of_digits(_: Path | None) -> Facts:
    train, _unused, test = load_images("digits", None, False, (1000, 1), stream(0, "split"))
    return of_rows(train, test, False)


def of_breast_cancer(_: Path | None) -> Facts:
    return of_rows(*load_breast_cancer(0), False)


def of_pixels(name: str) -> Callable[[Path | None], Facts]:
    def count(root: Path | None) -> Facts:
        train, _unused, test = load_images(name, root, False, (IMAGES - 1, 1), stream(0, "split"))
        facts = of_rows(train, test, False)
        del facts["rank"]  # the mean is subtracted
        return facts

    return count


def of_libsvm(name: str) -> Callable[[Path | None], Facts]:
    def count(root: Path | None) -> Facts:
        return of_rows(*load_libsvm(name, root, False), refit=True)

    return count


class Source(NamedTuple):
    """A data set.

    Attributes:
        counted: returns the facts, from its folder.
        folder: name of that folder, where one folder has one for each set.
        version: origin of the copy that was counted.
        text: what the page says of it.
    """

    counted: Callable[[Path | None], Facts]
    folder: str
    version: str
    text: str


LIBSVM = "files of LIBSVM's site (`a9a.t` and `ijcnn1.t` for testing; none for w8a, so a fifth is held out)"
SETS: dict[str, Source] = {
    "digits": Source(
        of_digits, "", "bundled with scikit-learn; 1,001 of 1,797 drawn for training",
        "Three pixels are 0 in all images. Optimizers that divide by the root of a mean square have a derivative of "
        "0 / 0 there; the library's are right.",
    ),
    "breast_cancer": Source(
        of_breast_cancer, "", "bundled with scikit-learn; 300 of 569 drawn for training", "None of these."
    ),
    "mnist": Source(
        of_pixels("mnist"), "mnist", "torchvision's files, MD5 of the training images 6bbc9ace898e44ae57da46a324031adb",
        "No image occurs twice. 67 pixels at the border are always 0: weights there get no gradient of the loss, and "
        "stay where they start but for a decay.",
    ),
    "fashion": Source(of_pixels("fashion"), "fashion", "torchvision's files", ""),
    "a9a": Source(
        of_libsvm("a9a"), "libsvm", LIBSVM,
        "Binned census records, which many people share. A third of the test rows occur in training, but they do not "
        "flatter a model: rows that are common are ambiguous, and no error can fall below the disagreement of twins. "
        "One-hot blocks add up to one, hence the rank. The last column is empty in the test part: read alone, with the "
        "number of columns guessed, it gets 122.",
    ),
    "w8a": Source(
        of_libsvm("w8a"), "libsvm", LIBSVM,
        "Binary keywords of web pages; a random held-out part shares a third of its rows with the rest. Rows without "
        "an entry are genuine: only the bias decides on them.",
    ),
    "ijcnn1": Source(of_libsvm("ijcnn1"), "libsvm", LIBSVM, "None of these."),
    "newsgroups": Source(
        of_newsgroups, "20newsgroups", "20news-bydate, 11,314 and 7,532 texts; removal of headers, quotes and footers "
        "by scikit-learn's rules",
        "The rule for headers cuts everything before the first empty line, the one for footers everything after the "
        "last one (or a line of dashes): of three paragraphs only the middle one stays, though the last may be no "
        "footer. Posts of quotes alone become empty; these have no features, and any model gives them the same class.",
    ),
    "omniglot": Source(
        of_omniglot, "omniglot", "images_background.npz and images_evaluation.npz, 1,623 characters",
        "The originals are black and white. Resized with antialiasing, as here, the mean ink stays and there are 256 "
        "grey values; nearest neighbour (what Pillow does with mode `1`, whatever filter is asked for) breaks thin "
        "strokes; a tensor of truth values makes every grey pixel ink. torchvision numbers both parts from 0, "
        "in the order of alphabets; here characters are numbered by the file names, 1 to 1623, in both forms of the "
        "data, so that the random split is the same.",
    ),
    "cifar_fs": Source(
        of_images("cifar_fs"), "cifar_fs", "160 of 600 images of each class of CIFAR-100 (the first training images)",
        "One image is a `baby` (a test class of CIFAR-FS) and a `girl` (a training class).",
    ),
    "fc100": Source(
        of_images("fc100"), "cifar_fs", "the same images, split by superclass",
        "The same image: both classes are test classes here.",
    ),
    "miniimagenet": Source(
        of_tables, "mini_imagenet_splits", "split tables of Ravi and Larochelle; the images were not at hand",
        "The numbers of the files of a class have gaps: the 600 are chosen, so class folders of ImageNet have more.",
    ),
}  # fmt: skip


def page(numbers: Mapping[str, Any]) -> str:
    """Return the page of the site."""
    lines = [HEADER.rstrip()]
    for name, facts in numbers["facts"].items():
        source = SETS[name]
        lines += ["", f"## {name}", "", f"{source.text} Source: {source.version}.", ""]
        lines += ["| | count |", "|---|---|", *(f"| {key} | {_text(value)} |" for key, value in facts.items())]
        effects = numbers["effects"].get(name, {})
        for change, measures in effects.items():
            lines += ["", f"**{change}**", "", "| | as it is | difference | |", "|---|---|---|---|"]
            for measure, values in measures.items():
                before, difference, verdict = compared(values)
                lines.append(f"| {measure} | {before:.4g} | {difference} | {verdict} |")
    lines += ["", MISSING]
    versions = ", ".join(f"{name} {version}" for name, version in numbers["versions"].items())
    lines += ["", f"Torch {numbers['environment']['torch']}, {versions}."]
    return "\n".join(lines) + "\n"


def compared(values: Mapping[str, list[float]]) -> tuple[float, str, str]:
    """Return the mean as it is, the paired difference with its interval, and what that says."""
    before, after = values["as it is"], values["without"]
    found = interval([b - a for a, b in zip(before, after, strict=True)])
    inside = found.low <= 0 <= found.high
    verdict = "no change" if before == after else "within the noise" if inside else "a change"
    if verdict == "a change" and abs(found.mean) < SHOWN:
        verdict = "below the digits of a table"
    return interval(before).mean, "0" if before == after else str(found), f"{verdict}, {len(before)} seeds"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else f"`{value}`"


def rooted(root: Path | None, name: str) -> Path | None:
    """Return the folder of a set: one in the root, if that has one of its name."""
    own = None if root is None else root / SETS[name].folder
    return own if own is not None and own.is_dir() else root


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Count, print, and write the numbers."""
    parser = Parser(__doc__, threads=1)
    parser.option("sets", ["digits"], "data sets", choices=[*SETS], metavar="NAME")
    parser.add_argument("--data-root", type=Path, help="folder of downloaded data")
    parser.add_argument("--effects", action="store_true", help="also run small recipes with and without the oddities")
    parser.option("seeds", 5, "seeds of these")
    parser.add_argument("--page", type=Path, help="page of the site to write")
    args = parser.parse(arguments)
    record = args.out / "data_facts.json"  # results of sets that are not asked for are kept
    kept = json.loads(record.read_text()) if record.exists() and args.page else {}
    found, effects = kept.get("facts", {}), kept.get("effects", {})
    for name in args.sets:
        root = rooted(args.data_root, name)
        found[name] = SETS[name].counted(root)
        show(name, ["", "count"], [[key, value] for key, value in found[name].items()])
        if args.effects and name in data_effects.EFFECTS:
            effects[name] = data_effects.EFFECTS[name](root, range(args.seeds))
            for change, measures in effects[name].items():
                rows = [[measure, *compared(values)] for measure, values in measures.items()]
                show(f"{name}: {change}", ["", "as it is", "difference", ""], rows)
    versions = {name: importlib.metadata.version(name) for name in ("scikit-learn", "numpy")}
    found, effects = ({name: table[name] for name in SETS if name in table} for table in (found, effects))
    del args.data_root  # a place on this machine
    numbers = save(args, args.out / "data_facts", {"versions": versions, "facts": found, "effects": effects})
    if args.page is not None:
        args.page.write_text(page(numbers))
    return numbers


if __name__ == "__main__":
    main()

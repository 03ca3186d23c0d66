r"""Count oddities of the data sets: twins with another label, shared rows, empty texts, constant columns.

    python -m recipes.benchmarks.data_facts                                        # digits, bundled
    python -m recipes.benchmarks.data_facts --sets a9a ijcnn1 --data-root FOLDER   # LIBSVM's files
    python -m recipes.benchmarks.data_facts --sets newsgroups --data-root FOLDER
    python -m recipes.benchmarks.data_facts --sets mnist --data-root FOLDER        # torchvision's folder

For sets with test rows that also occur in training, it fits logistic regression and compares its accuracy on all test
rows with that on the others.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import Parser, save, show
from ..common.seeds import stream
from ..problems.images import load_images
from ..problems.libsvm import load_libsvm
from ..problems.newsgroups import stripped, texts_of
from ..problems.problem import Part, folder

Facts = dict[str, float]


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
    return facts


def of_newsgroups(root: Path | None) -> Facts:
    """Count what remains of the texts without headers, footers and quotes."""
    facts: Facts = {}
    for name in ("train", "test"):
        texts, _ = texts_of(folder(root, "20newsgroups"), name, False)
        bare = stripped(texts)
        words = [any(len(w) > 1 and w.isalnum() for w in text.replace("_", "").split()) for text in bare]
        facts |= {
            f"{name}: texts": len(texts),
            f"{name}: empty without headers, footers and quotes": sum(not text.strip() for text in bare),
            f"{name}: without a word of two letters": sum(not w for w in words),
            f"{name}: identical to an earlier one": len(bare) - len({*bare}),
        }
        from sklearn.datasets import _twenty_newsgroups as rules

        before = [rules.strip_newsgroup_quoting(rules.strip_newsgroup_header(text)) for text in texts]
        cut = [len(a) - len(rules.strip_newsgroup_footer(a)) for a in before]
        facts[f"{name}: footer rule cuts more than 300 characters"] = sum(c > 300 for c in cut)
        halves = sum(c > len(a) / 2 for c, a in zip(cut, before, strict=True))
        facts[f"{name}: footer rule cuts more than half of the text"] = halves
    return facts


def of_digits(_: Path | None) -> Facts:
    train, _unused, test = load_images("digits", None, False, (1000, 1), stream(0, "split"))
    return of_rows(train, test, False)


def of_mnist(root: Path | None) -> Facts:
    train, _unused, test = load_images("mnist", root, False, (59_999, 1), stream(0, "split"))
    facts = of_rows(train, test, False)
    del facts["rank"]  # the mean is subtracted
    return facts


def of_libsvm(name: str) -> Callable[[Path | None], Facts]:
    def count(root: Path | None) -> Facts:
        return of_rows(*load_libsvm(name, root, False), refit=True)

    return count


SETS: dict[str, Callable[[Path | None], Facts]] = {
    "digits": of_digits,
    "mnist": of_mnist,
    "newsgroups": of_newsgroups,
    **{name: of_libsvm(name) for name in ("a9a", "ijcnn1", "w8a")},
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Count, print, and write the numbers."""
    parser = Parser(__doc__, threads=1)
    parser.option("sets", ["digits"], "data sets", choices=[*SETS], metavar="NAME")
    parser.add_argument("--data-root", type=Path, help="folder of downloaded data")
    args = parser.parse(arguments)
    found = {}
    for name in args.sets:
        found[name] = SETS[name](args.data_root)
        show(name, ["", "count"], [[key, value] for key, value in found[name].items()])
    versions = {name: importlib.metadata.version(name) for name in ("scikit-learn", "numpy")}
    return save(args, args.out / "data_facts", {"versions": versions, "facts": found})


if __name__ == "__main__":
    main()

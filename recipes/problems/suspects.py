"""Label audits: rows with uncertain labels, trusted rows, label noise to add, and controls that find suspects."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common import figure
from ..common.seeds import begin, stream
from .images import load_images
from .problem import Part

__all__ = [
    *("NOISE", "Batches", "Data", "Fit", "Rows", "alone", "audited", "beside", "corrected", "joint", "listed", "load"),
    *("oneself", "picture", "tuned", "write"),
]

BATCH, MARKS, WORDS = 64, (50, 150, 500), 50


class Data(NamedTuple):
    """Data of an audit.

    Attributes:
        rows: features and labels; some labels may be wrong.
        trusted: rows with checked labels.
        test: rows for accuracies, or None.
        where: file or line of each row.
        classes: names of the classes.
    """

    rows: Part
    trusted: Part
    test: Part | None
    where: list[str]
    classes: list[str]


def load(args: Any, sizes: Mapping[str, tuple[int, int]], seed: int) -> Data:
    """Load the data that the command line asks for."""
    if args.images or args.table:
        if not args.trusted:
            raise SystemExit("--images and --table need --trusted: rows that somebody has checked")
        if args.images:
            return images(args.images, args.trusted, args.test, args.size)
        return table(args.table, args.trusted, args.test, args.label)
    return shipped(args.data, args.data_root, args.download, sizes[args.data], seed)


def shipped(name: str, root: Path | None, download: bool, sizes: tuple[int, int], seed: int) -> Data:
    """Load digits or MNIST, with right labels."""
    rows, trusted, test = (
        Part(part.features.unflatten(1, (1, round(part.features.shape[1] ** 0.5), -1)), part.labels)
        for part in load_images(name, root, download, sizes, stream(seed, "data"))
    )
    return Data(rows, trusted, test, [f"{name} {i}" for i in range(len(rows.labels))], [*map(str, range(10))])


def images(root: Path, trusted: Path, test: Path | None, size: int) -> Data:
    """Load folders that contain one folder of images per class, in the layout of torchvision's ImageFolder."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    look = transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()])
    folders = [None if path is None else ImageFolder(str(path), look) for path in (root, trusted, test)]
    classes = folders[0].classes  # type: ignore[union-attr]

    def part(folder: Any) -> Part | None:
        if folder is None:
            return None
        labels = numbered([folder.classes[k] for k in folder.targets], classes, folder.root)
        return Part(torch.stack([image for image, _ in folder]), labels)

    rows, checked, held = map(part, folders)
    mean, std = rows.features.mean(), rows.features.std()  # type: ignore[union-attr]
    rows, checked, held = (p and Part((p.features - mean) / std, p.labels) for p in (rows, checked, held))
    return Data(rows, checked, held, [file for file, _ in folders[0].samples], classes)  # type: ignore[union-attr, arg-type]


def table(file: Path, trusted: Path, test: Path | None, label: str) -> Data:
    """Load CSV files with a header: numbers are standardised, each word becomes a column of zeros and ones."""
    (whole, lines), *others = (read(path, label) if path else ([], []) for path in (file, trusted, test))
    classes = sorted({row[label] for row in whole})
    columns = list[Callable[[str], list[float]]]()
    names = list[str]()
    for name in (name for name in whole[0] if name != label):
        values = [row[name] for row in whole]
        column = measured(values) or among(values)
        if column is None:
            print(f"Column {name} is left out: more than {WORDS} different words")
        else:
            columns.append(column)
            names.append(name)

    def part(rows: Sequence[Mapping[str, str]], path: Any) -> Part:
        features = torch.tensor(
            [
                [value for name, column in zip(names, columns, strict=True) for value in column(row[name])]
                for row in rows
            ]
        )
        return Part(features, numbered([row[label] for row in rows], classes, path))

    parts = [part(rows, path) for (rows, _), path in zip(others, (trusted, test), strict=True) if rows]
    where = [f"{file}:{line}" for line in lines]
    return Data(part(whole, file), parts[0], parts[1] if len(parts) > 1 else None, where, classes)


def measured(values: Sequence[str]) -> Callable[[str], list[float]] | None:
    """Return a function that standardises a column of numbers; None if some are not numbers."""
    try:
        numbers = torch.tensor([float(value) for value in values])
    except ValueError:
        return None
    mean, std = float(numbers.mean()), float(numbers.std()) or 1.0
    return lambda value: [(float(value) - mean) / std]


def among(values: Sequence[str]) -> Callable[[str], list[float]] | None:
    """Return a function that encodes a column of words as zeros and ones; None if there are too many words."""
    words = sorted({*values})
    return None if len(words) > WORDS else lambda value: [float(value == word) for word in words]


def read(path: Path, label: str) -> tuple[list[dict[str, str]], list[int]]:
    """Read the rows of a CSV file, and the lines at which they end."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if label not in (reader.fieldnames or ()):
            raise SystemExit(f"{path} has no column {label}: {', '.join(reader.fieldnames or ())}")
        rows = [(row, reader.line_num) for row in reader]
    return [row for row, _ in rows], [line for _, line in rows]


def numbered(names: Sequence[str], classes: Sequence[str], where: Any) -> Tensor:
    """Return labels as numbers."""
    if unknown := sorted({*names} - {*classes}):
        raise SystemExit(f"{where} has classes that the untrusted rows lack: {', '.join(unknown)}")
    return torch.tensor([classes.index(name) for name in names])


def at_random(labels: Tensor, share: float, classes: int, g: torch.Generator) -> Tensor:
    """Replace a share of the labels by random other classes."""
    wrong = torch.rand(len(labels), generator=g) < share
    return (labels + wrong * torch.randint(1, classes, labels.shape, generator=g)) % classes


def in_pairs(labels: Tensor, share: float, classes: int, g: torch.Generator) -> Tensor:
    """Replace twice the share of the labels of every second class by the next class."""
    wrong = (torch.rand(len(labels), generator=g) < 2 * share) & (labels % 2 == 1)
    return (labels + wrong.long()) % classes


NOISE: dict[str, Callable[[Tensor, float, int, torch.Generator], Tensor]] = {
    "none": lambda labels, share, classes, g: labels,
    "random": at_random,
    "structured": in_pairs,
}


class Batches:
    """Endless batches of row numbers."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count, self.generator = count, generator

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            order = torch.randperm(self.count, generator=self.generator)
            yield from torch.split(order, BATCH)[: max(self.count // BATCH, 1)]


class Rows(NamedTuple):
    """Inputs of a method.

    Attributes:
        rows: rows with the given labels.
        trusted: rows with checked labels.
        make: returns a new model.
        classes: number of classes.
        seed: seed of starts and batches.
    """

    rows: Part
    trusted: Part
    make: Callable[[], nn.Module]
    classes: int
    seed: int


class Fit(NamedTuple):
    """A model and, if known, the matrix of label noise: true class (row) to label (column)."""

    model: nn.Module
    called: Tensor | None = None

    @torch.no_grad()
    def truth(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return class probabilities, conditional on the labels if these are passed and the label noise is known."""
        self.model.eval()
        found = torch.cat([self.model(part).softmax(1) for part in torch.split(features, 1000)])
        self.model.train()
        if labels is not None and self.called is not None:
            found = F.normalize(found * self.called[:, labels].T + 1e-12, 1, 1)
        return found

    def judged(self, part: Part) -> tuple[float, float]:
        """Return accuracy and negative cross-entropy."""
        found = self.truth(part.features)
        right = found.gather(1, part.labels[:, None]).clamp_min(1e-6)
        return float((found.argmax(1) == part.labels).double().mean()), float(right.log().mean())


Method = Callable[[Rows, float, Sequence[int]], Iterator[Fit]]  # takes a setting, and the steps at which to yield


def oneself(seen: Rows, decay: float, marks: Sequence[int]) -> Iterator[Fit]:
    """Train the model on the given labels."""
    return train(
        seen, lambda model, i: F.cross_entropy(model(seen.rows.features[i]), seen.rows.labels[i]), decay, marks
    )


def alone(seen: Rows, decay: float, marks: Sequence[int]) -> Iterator[Fit]:
    """Train the model on the trusted rows only."""
    return oneself(seen._replace(rows=seen.trusted), decay, marks)


def beside(
    seen: Rows, share: float, marks: Sequence[int], weights: Tensor | None = None, called: Tensor | None = None
) -> Iterator[Fit]:
    """Train the model on all rows, with a share of the loss for trusted ones; row weights and label noise optional."""
    (features, labels), (known, right) = seen.rows, seen.trusted
    held = iter(Batches(len(right), stream(seen.seed, "held")))

    def loss(model: nn.Module, i: Tensor) -> Tensor:
        scores, k = model(features[i]), next(held)
        if called is not None:
            scores = (scores.softmax(1) @ called).clamp_min(1e-6).log()
        each = F.cross_entropy(scores, labels[i], reduction="none")
        own = each.mean() if weights is None else (weights[i] * each).mean()
        found: Tensor = (1 - share) * own + share * F.cross_entropy(model(known[k]), right[k])
        return found

    for fit in train(seen, loss, 1e-2, marks):
        yield Fit(fit.model, called)


def corrected(seen: Rows, first: float, marks: Sequence[int]) -> Iterator[Fit]:
    """Train by GLC (arXiv:1802.05300): estimate the label noise on trusted rows with a model of ``first`` steps."""
    *_, fit = oneself(seen, 1e-2, (round(first),))
    true = F.one_hot(seen.trusted.labels, seen.classes).float()
    called = (true.T @ fit.truth(seen.trusted.features) + 1e-6) / (true.sum(0)[:, None] + 1e-6 * seen.classes)
    return beside(seen, len(true) / (len(true) + len(seen.rows.labels)), marks, called=called)


def joint(seen: Rows, share: float, marks: Sequence[int]) -> Iterator[Fit]:
    """Learn model and label noise together on all rows, in one level: both fit the labels."""
    (features, labels), (known, right) = seen.rows, seen.trusted
    held = iter(Batches(len(right), stream(seen.seed, "held")))
    x = (4 * torch.eye(seen.classes)).requires_grad_()

    def loss(model: nn.Module, i: Tensor) -> Tensor:
        k, found = next(held), (model(features[i]).softmax(1) @ x.softmax(1)).clamp_min(1e-6).log()
        return (1 - share) * F.nll_loss(found, labels[i]) + share * F.cross_entropy(model(known[k]), right[k])

    for fit in train(seen, loss, 1e-2, marks, {"params": [x], "lr": 0.03, "weight_decay": 0.0}):
        yield Fit(fit.model, x.detach().softmax(1))


def train(
    seen: Rows, loss: Callable[[nn.Module, Tensor], Tensor], decay: float, marks: Sequence[int], *more: dict[str, Any]
) -> Iterator[Fit]:
    """Train a new model by AdamW, and yield it at each of ``marks``; the loss takes a model and row numbers."""
    begin(seen.seed, "model")
    model = seen.make()
    adam = torch.optim.AdamW([{"params": model.parameters()}, *more], 3e-3, weight_decay=decay, fused=True)
    batches = iter(Batches(len(seen.rows.labels), stream(seen.seed, "batches")))
    for k in range(1, max(marks) + 1):
        adam.zero_grad()
        loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        adam.step()
        if k in marks:
            yield Fit(model)


def confident(seen: Rows, decay: float, steps: int, folds: int) -> tuple[Tensor, Tensor]:
    """Return scores and guesses of confident learning (arXiv:1911.00068), from models that did not see the row.

    A class counts for a row if its probability exceeds the mean over the rows with this label. A row is a suspect if
    the most probable of these classes is not its label.
    """
    rows, count = seen.rows, len(seen.rows.labels)
    fold = torch.randperm(count, generator=stream(seen.seed, "folds")) % folds
    found = torch.empty(count, seen.classes)
    for k in range(folds):
        (fit,) = oneself(seen._replace(rows=rows.take(fold != k)), decay, (steps,))
        found[fold == k] = fit.truth(rows.features[fold == k])
    own = found.gather(1, rows.labels[:, None]).squeeze(1)
    least = torch.stack([own[rows.labels == c].mean() for c in range(seen.classes)]).nan_to_num(1.0)
    others = found.scatter(1, rows.labels[:, None], 0.0)
    above = torch.where(found >= least, found, 0.0)
    differs = (above.amax(1) > 0) & (above.argmax(1) != rows.labels)
    return others.amax(1) - own + 2.0 * differs, torch.where(differs, above.argmax(1), others.argmax(1))


def tuned(run: Method, grid: Sequence[float], seen: Rows) -> tuple[float, int, float]:
    """Return the setting and the steps that are best on the unseen half of the trusted rows, and the accuracy."""
    half = torch.arange(len(seen.trusted.labels)) % 2 == 0
    tried = dict[tuple[float, int], list[tuple[float, float]]]()
    for setting in grid:
        for part in (half, ~half):
            fits = run(seen._replace(trusted=seen.trusted.take(part)), setting, MARKS)
            for steps, fit in zip(MARKS, fits, strict=True):
                tried.setdefault((setting, steps), []).append(fit.judged(seen.trusted.take(~part)))
    best = max(tried, key=lambda key: [sum(both) for both in zip(*tried[key], strict=True)])
    return *best, sum(accuracy for accuracy, _ in tried[best]) / 2


def audited(run: Method, tuned: tuple[float, int, float], seen: Rows, data: Data, folds: int = 0) -> dict[str, Any]:
    """Return scores, guesses and numbers of a method; with folds, the scores are those of `confident`."""
    setting, steps, accuracy = tuned
    start, labels = time.perf_counter(), seen.rows.labels
    (fit,) = run(seen, setting, (steps,))
    truth = fit.truth(seen.rows.features, labels)
    score, guess = 1 - truth.gather(1, labels[:, None]).squeeze(1), truth.scatter(1, labels[:, None], 0.0).argmax(1)
    if folds:
        score, guess = confident(seen, setting, steps, folds)
    found = {"trusted accuracy": accuracy, "seconds": time.perf_counter() - start, "score": score, "guess": guess}
    if data.test:
        found["own accuracy"] = fit.judged(data.test)[0]
    if (wrong := labels != data.rows.labels).any():
        from sklearn.metrics import average_precision_score

        found["average precision"] = float(average_precision_score(wrong.numpy(), score.numpy()))
        found["right guesses"] = float((guess == data.rows.labels)[wrong].double().mean())
        kept = score.argsort(descending=True)[int(wrong.sum()) :]
        if data.test:
            (again,) = beside(seen._replace(rows=seen.rows.take(kept)), 0.1, MARKS[-1:])
            found["accuracy after removal"] = again.judged(data.test)[0]
    return found


def listed(score: Tensor, guess: Tensor, seen: Rows, data: Data) -> list[list[Any]]:
    """Return index, file or line, label, score and guess of each row, the worst first."""
    labels = seen.rows.labels
    return [
        [i, data.where[i], data.classes[labels[i]], float(score[i]), data.classes[guess[i]]]
        for i in score.argsort(descending=True).tolist()
    ]


def write(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Write the list as a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("index", "where", "label", "score", "guess"))
        writer.writerows([*row[:3], f"{row[3]:.4f}", row[4]] for row in rows)


def picture(
    stem: Path, title: str, bars: Mapping[str, Mapping[str, Mapping[str, float]]], rows: Sequence[Any], data: Data
) -> None:
    """Draw bars of the methods for each noise and, if rows are images, the worst thirty."""
    pictures = data.rows.features.dim() == 4
    with figure(stem, title, (14 if pictures else 7, 3 + 3.5 * len(bars))) as canvas:
        left, *right = canvas.subfigures(1, 2) if pictures else [canvas]
        for (noise, found), axis in zip(bars.items(), left.subplots(len(bars), 1, squeeze=False)[:, 0], strict=True):
            keys = [*next(iter(found.values()))]
            for i, key in enumerate(keys):
                places = [k + 0.8 * ((i + 0.5) / len(keys) - 0.5) for k in range(len(found))]
                axis.barh(places, [bar[key] for bar in found.values()], 0.75 / len(keys), label=key)
            axis.set(yticks=range(len(found)), yticklabels=[*found], xlim=(0, 1), title=f"noise: {noise}")
            axis.invert_yaxis()
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
        for part in right:
            axes = [*part.subplots(6, 5).flat]
            for axis, (i, _, label, _, guess) in zip(axes, rows, strict=False):
                image = data.rows.features[i].movedim(0, -1).squeeze(-1)
                image = (image - image.min()) / (image.max() - image.min() + 1e-9)
                axis.imshow(image.numpy(), cmap="gray_r")
                axis.set_title(f"{label}: {guess}?")
            for axis in axes:
                axis.set_axis_off()

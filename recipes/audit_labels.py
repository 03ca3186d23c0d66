r"""Audit the labels of your own images or table: list suspects, found by learned weights and by controls.

.. math::
    \min_x\ \mathrm{CE}_{trusted}(y^*(x)), \qquad y^*(x) = \arg\min_y \frac1n \sum_i \sigma(x_i)\, \mathrm{CE}_i(y)

    python -m recipes.audit_labels                                       # digits with corrupted labels
    python -m recipes.audit_labels --data mnist --data-root DIR
    python -m recipes.audit_labels --images DIR --trusted DIR            # each with one folder per class
    python -m recipes.audit_labels --table FILE.csv --label COLUMN --trusted FILE.csv --model my_module:make

Trusted rows have checked labels; about ten per class are enough. ``make(shape, classes)`` returns your model for inputs
of that shape. The upper parameters are one weight per row, or a matrix of label noise (true class to label). A new
model is then trained with them and the trusted rows. Settings are tuned with the first seed, by training with one half
of the trusted rows and scoring on the other. Where it does not win: a matrix estimated by GLC, or learned jointly with
the model in one level, is as good and faster; weights are worse. On random noise, the small-loss criterion and any use
of the trusted rows are nearly as good.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from .common import Parser, interval, progress, save, share, show
from .common.seeds import begin, stream
from .problems import suspects
from .problems.suspects import NOISE, Batches, Fit, Rows, beside

KEYS = ("trusted accuracy", "average precision", "own accuracy", "accuracy after removal")
SIZES = {"digits": (1200, 100), "mnist": (4000, 100)}  # rows, trusted rows


def network(shape: Sequence[int], classes: int) -> nn.Module:
    """Return the default model, an MLP."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 128), nn.ReLU(), nn.Linear(128, classes))


def learned(seen: Rows, lr: float, marks: Sequence[int], steps: int, *, matrix: bool = False) -> Iterator[Fit]:
    """Learn row weights, or the matrix of label noise, by the trained model's loss on the trusted rows."""
    (features, labels), (known, right) = seen.rows, seen.trusted
    begin(seen.seed, "model")
    model = seen.make()
    x = (4 * torch.eye(seen.classes) if matrix else torch.zeros(len(labels))).requires_grad_()

    def lower(i: Tensor) -> Tensor:
        decay = 1e-3 * sum(p.square().sum() for p in model.parameters())
        if matrix:
            called = model(features[i]).softmax(1) @ x.softmax(1)
            return F.nll_loss(called.clamp_min(1e-6).log(), labels[i]) + decay
        return (x[i].sigmoid() * F.cross_entropy(model(features[i]), labels[i], reduction="none")).mean() + decay

    optimizer = bo.SOBA([x], model.parameters(), lr=lr, upper_optimizer=torch.optim.Adam)
    held = bo.Objective(
        lambda i: F.cross_entropy(model(known[i]), right[i]), Batches(len(right), stream(seen.seed, "held"))
    )
    data = bo.Objective(lower, Batches(len(labels), stream(seen.seed, "batches")))
    for _ in progress(range(steps), "matrix" if matrix else "weights"):
        optimizer.step(held, data)
    found = {"called": x.detach().softmax(1)} if matrix else {"weights": x.detach().sigmoid()}
    yield from beside(seen, len(right) / (len(right) + len(labels)), marks, **found)


METHODS: dict[str, tuple[Any, tuple[float, ...]]] = {  # method, settings to choose from
    "small-loss": (suspects.oneself, (1e-2, 1.0)),  # decay
    "confident": (suspects.oneself, (1e-2, 1.0)),
    "trusted-only": (suspects.alone, (1e-2, 1.0)),
    "trusted-too": (beside, (0.1, 0.3, 0.6)),  # their share of the loss
    "glc": (suspects.corrected, (50, 150, 500)),  # steps of the first model
    "joint": (suspects.joint, (0.1, 0.3, 0.6)),  # share of the trusted rows
    "weights": (learned, (0.1, 0.3)),  # learning rate of x
    "matrix": (partial(learned, matrix=True), (0.01, 0.03)),
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True, threads=1)
    parser.data(SIZES)
    files = {"images": "folder of your images", "table": "your CSV file", "trusted": "folder or file of trusted rows"}
    for name, text in (files | {"test": "folder or file of test rows"}).items():
        parser.add_argument(f"--{name}", type=Path, help=text)
    parser.option("label", "label", "column of the table with the labels")
    parser.option("size", 32, "side in pixels to which your images are resized")
    parser.option("model", "recipes.audit_labels:network", "module:function that makes your model")
    parser.add_argument("--noise", nargs="+", choices=[*NOISE], help="label noise to add; default: none for your data")
    parser.option("share", 0.3, "share of the labels that are corrupted", type=share)
    parser.methods(METHODS, [*METHODS], "--methods")
    parser.option("steps", 300, "steps of SOBA")
    parser.option("seeds", 3, "number of seeds, for splits, noise and methods")
    args = parser.parse(arguments)
    own, (module, function) = args.images or args.table, args.model.split(":")
    stem, make = (
        args.out / f"audit_labels_{own.stem if own else args.data}",
        getattr(importlib.import_module(module), function),
    )
    results, lists, bars = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for noise in args.noise or (["none"] if own else ["random", "structured"]):
        found = results[noise] = {name: dict[str, list[Any]]() for name in args.methods}
        for seed in range(args.seed, args.seed + (1 if noise == "none" else args.seeds)):
            data = suspects.load(args, SIZES, seed)
            labels = NOISE[noise](data.rows.labels, args.share, len(data.classes), stream(seed, "noise"))
            network = partial(make, data.rows.features.shape[1:], len(data.classes))
            seen = Rows(data.rows._replace(labels=labels), data.trusted, network, len(data.classes), seed)
            for name in progress(args.methods, f"{noise} {seed}", unit="method"):
                run, grid = METHODS[name]
                run = partial(run, steps=args.steps) if name in ("weights", "matrix") else run
                tuned = found[name]["tuned"][0] if found[name] else suspects.tuned(run, grid, seen)
                r = suspects.audited(run, tuned, seen, data, folds=5 * (name == "confident"))
                listed = suspects.listed(r.pop("score"), r.pop("guess"), seen, data)
                if not found[name]:  # with the first seed
                    suspects.write(Path(f"{stem}_{noise}_{name}.csv"), listed)
                    lists[name] = listed, data, tuned[2]
                for key, value in {**r, "tuned": tuned}.items():
                    found[name].setdefault(key, []).append(value)
        bars[noise] = {n: {k: interval(r[k]).mean for k in KEYS if k in r} for n, r in found.items()}
        keys, best = [*bars[noise][args.methods[0]]], max(args.methods, key=lambda name: lists[name][2])
        cells = {n: [str(interval(r[k])) if len({*r[k]}) > 1 else r[k][0] for k in keys] for n, r in found.items()}
        title = f"{stem.stem}: {len(labels):,} rows, {len(data.trusted.labels)} trusted"
        show(
            f"{title}, noise: {noise}",
            ("", *keys, "seconds"),
            [[n, *c, max(found[n]["seconds"])] for n, c in cells.items()],
        )
        print(f"Best model on trusted rows: {best}, see {stem}_{noise}_{best}.csv")
    suspects.picture(stem, f"{title}; label: guess of {best}?", bars, *lists[best][:2])
    return save(args, stem, {"results": results})


if __name__ == "__main__":
    main()

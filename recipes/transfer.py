r"""Features for a head with few labels, wrong labels or new classes: the case in which hyper-representation should pay.

    python -m recipes.transfer                                   # scikit-learn's digits: minutes
    python -m recipes.transfer --data mnist --data-root DIR --steps 500 --labels 10 30 100

A body is trained on many labelled images, then a linear head on its features with ``--labels`` labels, by L-BFGS to
the end. The table has the head's accuracy on test images. There are three cases:

``few``
    The head's labels are few, and of the same ten classes, drawn from the images that train
    the body. The bilevel methods train the body for this very set.
``wrong``
    The same, but half of the head's labels are drawn at random.
``new``
    The head's labels are of the classes 7, 8 and 9. The body sees the classes 0 to 3, and the bilevel methods train it
    for a new random set of labels in each step.

Controls: the body as it is drawn; ordinary training of body and head on the many labels; on both sets; and
``FirstOrder``, which has no indirect term. The learning rate of every arm is searched with seed 0 on validation images
(``new``: of classes 4 to 6), until the best is inside its grid, and the other seeds use it. Finished runs are read from
``--out``, so the program may be stopped and started again.
"""

from __future__ import annotations

import statistics
import warnings
from argparse import Namespace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from .common import Parser, save, show
from .common.intervals import interval
from .common.records import Records
from .common.running import progress
from .common.seeds import begin, stream
from .few_shot.compare import FACTOR
from .hyper_representation import CODE
from .problems.images import load_images
from .problems.problem import Part

CASES = ("few", "wrong", "new")
RIDGE = 1e-2
ORDINARY = {"untrained": 0, "ordinary": 1, "both sets": 2}  # number of the sets that train the body
METHODS: dict[str, partial[Any]] = {
    "direct only": partial(bo.FirstOrder),
    "ITD": partial(bo.ITD),
    "AID-CG": partial(bo.AID, linear_steps=10),
    "AID-FP": partial(bo.AID, linear_steps=20, linear_solver="fixed_point", linear_lr=0.1),
    "StocBiO": partial(bo.StocBiO, linear_steps=20, linear_lr=0.1),
    "F2SA": partial(bo.F2SA, nu=0.1),
    "PZOBO": partial(bo.PZOBO, directions=1, smoothing=0.01),
    "PZOBO, code": partial(bo.PZOBO, directions=1, smoothing=0.01, **CODE),
}
SIZES = {"digits": (700, 300), "mnist": (20_000, 5_000)}


@lru_cache(maxsize=3)
def parts_of(data: str, root: Path | None, download: bool, seed: int) -> tuple[Part, Part, Part]:
    """Return the images with many labels, for validation and for the test."""
    return load_images(data, root, download, SIZES[data], stream(seed, "data"))


class Setting:
    """Data of a case and seed: many labels, the head's labels, validation and test images, each with labels from 0."""

    def __init__(self, args: Namespace, case: str, seed: int) -> None:
        many, val, test = parts_of(args.data, args.data_root, args.download, seed)
        self.generator, self.labels, self.case = stream(seed, "labels"), args.labels, case
        self.classes = 10
        if case == "new":
            self.classes = 4
            pool = Part(torch.cat([many.features, val.features]), torch.cat([many.labels, val.labels]))
            self.many = within(many, (0, 1, 2, 3))
            self.heads = [(within(val, (4, 5, 6)), within(many, (4, 5, 6))),
                          (within(pool, (7, 8, 9)), within(test, (7, 8, 9)))]  # fmt: skip
            self.few = [[self.draw(known) for _ in range(20)] for known, _ in self.heads]
        else:
            few = self.draw(many)
            if case == "wrong":
                drawn = torch.randint(10, few.labels.shape, generator=self.generator)
                half = torch.rand(few.labels.shape, generator=self.generator) < 0.5
                few = Part(few.features, torch.where(half, drawn, few.labels))
            self.many, self.heads, self.few = many, [(few, val), (few, test)], [[few], [few]]

    def draw(self, part: Part) -> Part:
        """Return some labelled images at random."""
        return part.take(torch.randperm(len(part.labels), generator=self.generator)[: self.labels])


def within(part: Part, classes: tuple[int, ...]) -> Part:
    """Return the images of some classes, with labels from 0."""
    rows = torch.isin(part.labels, torch.tensor(classes)).nonzero().squeeze(1)
    found = part.take(rows)
    return Part(found.features, found.labels - classes[0])


def fitted(body: nn.Module, few: Part, asked: Part, classes: int) -> float:
    """Return the accuracy of a head trained to the end on a few labels."""
    with torch.no_grad():
        known, features = body(few.features), body(asked.features)
    head = nn.Linear(known.shape[1], classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    search = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        loss = F.cross_entropy(head(known), few.labels) + RIDGE / 2 * head.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    search.step(closure)  # type: ignore[no-untyped-call]
    return float((head(features).argmax(1) == asked.labels).float().mean())


def run(args: Namespace, case: str, arm: str, lr: float, seed: int) -> dict[str, float]:
    """Train a body; return the validation and test accuracies of heads on its features."""
    setting = Setting(args, case, seed)
    many, classes, width = setting.many, setting.classes, args.width
    begin(seed, "start")
    body = nn.Sequential(
        nn.Linear(many.features.shape[1], 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.Tanh()
    )
    head = nn.Linear(width, classes)
    batches, few = stream(seed, "batches"), setting.few[0][0]

    def outer_batch() -> Part:
        return many.take(torch.randint(len(many.labels), (args.batch,), generator=batches))

    def loss(part: Part) -> Tensor:
        return F.cross_entropy(head(body(part.features)), part.labels)

    def head_loss() -> Tensor:
        return loss(few) + RIDGE / 2 * head.weight.square().sum()

    adam = torch.optim.Adam([*body.parameters(), *(head.parameters() if arm in ORDINARY else ())], lr=lr)
    optimizer = None
    if arm not in ORDINARY:
        rates: dict[str, Any] = {"lr": 1.0, "lower_lr": 0.5, "lower_steps": 20, "warm_start": case != "new"}
        optimizer = METHODS[arm](body.parameters(), head.parameters(), generator=stream(seed, "method"), **rates)
    for _ in progress(range(args.steps if arm != "untrained" else 0), f"{case}, {arm}"):
        if case == "new":
            few = setting.draw(many)
        batch = outer_batch()
        adam.zero_grad()
        if optimizer is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", bo.BilevelWarning)  # PZOBO's noise is part of the comparison
                    optimizer.backward(partial(loss, batch), head_loss)
            except bo.NonFiniteError:
                return {"validation": 0.0, "test": 0.0}
        else:
            total = loss(batch) + (head_loss() if arm == "both sets" else 0.0)
            total.backward()  # type: ignore[no-untyped-call]
        adam.step()
    ways = 3 if case == "new" else 10
    found = []
    for parts, (_, asked) in zip(setting.few, setting.heads, strict=True):
        found.append(statistics.mean(fitted(body, part, asked, ways) for part in parts))
    return dict(zip(("validation", "test"), found, strict=True))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the program; return the numbers that it writes for the last number of labels."""
    parser = Parser(__doc__, threads=1)
    parser.data(SIZES)
    parser.methods([*ORDINARY, *METHODS], [*ORDINARY, *METHODS], "--arms")
    parser.option("cases", list(CASES), "cases to run", choices=CASES)
    parser.option("labels", [20], "labels of a head, one number or several")
    parser.option("steps", 300, "updates of the body")
    parser.option("batch", 200, "images of a batch")
    parser.option("width", 32, "number of features")
    parser.option("seeds", 3, "runs of each arm")
    parser.option("lr", 3e-3, "first learning rate of the search")
    parser.option("most", 6, "largest number of learning rates of an arm")
    args = parser.parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {labels: compared(Namespace(**{**vars(args), "labels": labels})) for labels in args.labels}
    for case in args.cases:
        rows = []
        for arm in args.arms:
            results = [own["results"][f"{case}, {arm}"] for own in found.values()]
            rates = [f"{r['lr']:g}{', at the edge' if r['edge'] else ''}" for r in results]
            rows.append([arm, *(interval(r["tests"]) for r in results), "-" if arm == "untrained" else " ".join(rates)])
        columns = [f"{labels} labels" for labels in args.labels]
        show(f"{case}: test accuracy of heads, {args.data}", ("", *columns, "learning rate"), rows)
    return found[args.labels[-1]]


def compared(args: Namespace) -> dict[str, Any]:
    """Run all arms for one number of labels; return and write the accuracies."""
    stem = args.out / f"transfer_{args.data}_{args.labels}"
    records = Records(Path(f"{stem}.jsonl"))
    facts = {key: getattr(args, key) for key in ("data", "labels", "steps", "batch", "width")}

    def made(case: str, arm: str, lr: float, seed: int) -> dict[str, float]:
        unit = {**facts, "case": case, "arm": arm, "lr": lr, "seed": seed}
        return records.get(unit, lambda: run(args, case, arm, lr, seed))

    results: dict[str, Any] = {}
    for case in args.cases:
        for arm in args.arms:
            tried = {lr: made(case, arm, lr, 0) for lr in ([args.lr] if arm == "untrained" else around(args.lr))}
            while (lr := beyond(tried)) is not None and 1 < len(tried) < args.most:
                tried[lr] = made(case, arm, lr, 0)
            best = max(tried, key=lambda lr: tried[lr]["validation"])
            tests = [made(case, arm, best, seed)["test"] for seed in range(args.seeds)]
            edge = len(tried) > 1 and beyond(tried) is not None
            results[f"{case}, {arm}"] = {"lr": best, "edge": edge, "tests": tests}
    return save(args, stem, {"results": results})


def around(lr: float) -> list[float]:
    """Return a learning rate and its neighbours in the grid."""
    return [float(f"{lr * FACTOR**k:.2g}") for k in (-1, 0, 1)]


def beyond(tried: dict[float, dict[str, float]]) -> float | None:
    """Return the next learning rate, if the best is at the edge of the grid; else None."""
    best = max(tried, key=lambda lr: tried[lr]["validation"])
    lower, _, upper = around(best)
    return lower if best == min(tried) else upper if best == max(tried) else None


if __name__ == "__main__":
    main()

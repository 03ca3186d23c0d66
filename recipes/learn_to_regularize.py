r"""Learn one ridge weight per feature of a softmax classifier on validation data.

.. math::
    \min_\lambda\ \mathrm{CE}_{val}(W^*(\lambda)), \qquad
    W^*(\lambda) = \arg\min_W \mathrm{CE}_{train}(W) + \frac{1}{2cp} \sum_{j \le c} \sum_{k \le p} e^{\lambda_k}
    W_{jk}^2

    python -m recipes.learn_to_regularize                                             # scikit-learn's digits, a minute
    python -m recipes.learn_to_regularize --data 20newsgroups --data-root DIR         # 5,657 / 5,657 / 7,532 texts

All methods take plain steps in lambda with one learning rate. Lower steps are full-batch gradient steps from the last W
(Nesterov's for rahgd and prahgd), with step size 1/L of the training loss. rahgd and prahgd do not restart here (the
radius is infinite): at first the hypergradient grows with the weights, and a radius of a few first steps would take
this for divergence. Scores are those of the method's own W, not of W*(lambda). This favours early stopping, and methods
whose W does not minimise the lower loss alone. Seconds exclude the evaluation.

Problem: arXiv:2307.00126, appendix E (after arXiv:2010.07962). Headers, footers and quotes give the groups away and are
removed, which leaves 101,811 features; ``--keep-headers`` gives the 130,107 of the papers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo

from .common import CALLS, Parser, plot, rows, save, show, train
from .common.seeds import stream
from .problems.images import load_images
from .problems.newsgroups import load_newsgroups
from .problems.softmax import Regularised

RESTARTED: dict[str, Any] = {"restart_radius": math.inf, "on_converged": "continue"}
METHODS: dict[str, partial[Any]] = {
    "rahgd": partial(bo.RAHGD, **RESTARTED),
    "prahgd": partial(bo.PRAHGD, **RESTARTED),
    "aid": partial(bo.AID),
    "aid-nesterov": partial(bo.AID, lower_optimizer=partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
    "itd": partial(bo.ITD),
    "f2sa-1": partial(bo.F2SA, order=1, normalize=False),
    "f2sa-2": partial(bo.F2SA, order=2, normalize=False),
    "f2sa-3": partial(bo.F2SA, order=3, normalize=False),
    "ba": partial(bo.BA),
    "paid": partial(bo.PAID),
    "first-order": partial(bo.FirstOrder),
}
LINEAR = ("aid", "aid-nesterov", "ba", "paid", "rahgd", "prahgd")
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"steps": 50, "lower_steps": 10, "linear_steps": 10, "lr": 100.0, "momentum": 0.9},
    "20newsgroups": {"steps": 20, "lower_steps": 10, "linear_steps": 10, "lr": 100.0, "momentum": 0.9},
}


def regularize(problem: Regularised, name: str, args: Any) -> dict[str, Any]:
    """Learn the penalties with one method; return its curve and final numbers."""
    x, y = problem.start()
    options: dict[str, Any] = {"linear_steps": args.linear_steps} if name in LINEAR else {}
    if name.endswith("rahgd"):
        options["lower_momentum"] = args.momentum
    optimizer = METHODS[name](
        [x], [y], lr=args.lr, lower_lr=args.lower_lr or problem.lower_lr, lower_steps=args.lower_steps,
        generator=stream(args.seed, "method", y.device), **options,
    )  # fmt: skip

    if args.compile:
        optimizer.compile()

    @torch.no_grad()
    def measure(k: int, loss: Tensor | None) -> dict[str, float]:
        return {
            "calls": sum(optimizer.oracle_counts.values()),
            "accuracy": problem.accuracy(y),
            "loss": float(F.cross_entropy(problem.test.features @ y, problem.test.labels)),
            "validation_loss": float(problem.upper(x, y)),
        }

    curve = train(
        lambda: optimizer.step(lambda: problem.upper(x, y), lambda: problem.lower(x, y)),
        measure, steps=args.steps, label=name, first=True, device=args.device,
    )  # fmt: skip
    return {
        **{k: v for k, v in curve[-1].items() if k != "step"},
        "oracle_calls": optimizer.oracle_counts,
        "restarts": getattr(optimizer, "restarts", None),
        "penalty_range": [x.min().item(), x.max().item()],
        "vectorize_fallback": optimizer.diagnostics.get("vectorize_fallback"),
        "curve": curve,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True, device=True, compiled=True)
    parser.data(SETTINGS)
    parser.add_argument("--keep-headers", action="store_true", help="keep headers, footers and quotes of the texts")
    parser.methods(METHODS, [*METHODS][:8])
    parser.settings(
        "data", SETTINGS, steps="outer steps", lower_steps="lower steps per outer step",
        linear_steps="steps of conjugate gradients", lr="learning rate of lambda",
        momentum="lower momentum of rahgd and prahgd",
    )  # fmt: skip
    parser.option("lower_lr", None, "lower learning rate", type=float, shown="1/L")
    args = parser.parse(arguments)
    if args.data == "digits":
        generator = stream(args.seed, "data")
        parts = load_images("digits", None, False, (300, 300), generator)
    else:
        parts = load_newsgroups(args.data_root, args.download, args.keep_headers, args.seed)
    size, classes = parts[0].features.shape[1], int(parts[0].labels.max()) + 1
    moved = [part.to(args.device) for part in parts]
    problem = Regularised(moved, ridge=1 / (2 * classes * size), x=torch.zeros(size, 1))
    sizes = " / ".join(f"{len(part.labels):,}" for part in parts)
    title = f"Learning to regularize, {args.data}: {sizes} examples, {size:,} features, {classes} classes"
    results = {name: regularize(problem, name, args) for name in args.optimizer}

    figures = {"accuracy": "test accuracy", "loss": "test loss", "validation_loss": "val loss", "seconds": "seconds"}
    figures["calls"] = "all calls"
    show(title, ("", *figures.values(), *[*CALLS.values()][:4]), rows(results, *figures, calls=4))
    stem = args.out / f"learn_to_regularize_{args.data}"
    labels = {"ylabel": "test accuracy"}, {"ylabel": "test loss"}
    panels = [
        (x, y, {**label, "xlabel": "oracle calls" if x == "calls" else x})
        for y, label in zip(("accuracy", "loss"), labels, strict=True)
        for x in ("seconds", "calls")
    ]
    plot(stem, title, {name: r["curve"] for name, r in results.items()}, panels, rows=2)
    lower_lr = args.lower_lr or problem.lower_lr
    return save(args, stem, {"features": size, "lower_lr": lower_lr, "results": results})


if __name__ == "__main__":
    main()

r"""Data hyper-cleaning: find corrupted training labels by learning one weight per training example.

.. math::
    \min_x\ \frac1{|V|} \sum_{i \in V} \mathrm{CE}(W^*(x); a_i, b_i), \qquad
    W^*(x) = \arg\min_W \frac1{|T|} \sum_{i \in T} \sigma(x_i)\, \mathrm{CE}(W; a_i, \tilde b_i) + C \|W\|^2

W is a linear softmax classifier, T a training set with some labels replaced by wrong ones, V a small clean validation
set. The upper loss does not depend on x directly, so the whole hypergradient is indirect.

    python -m recipes.hyper_cleaning                                      # scikit-learn's digits, about a minute
    python -m recipes.hyper_cleaning --data mnist --data-root DIR         # 20,000 / 5,000 / 10,000 images of MNIST

Problem: arXiv:2307.00126, appendix E. Accuracies are those of the method's own W. Lower steps are full-batch SGD with
Nesterov momentum, which is kept from solve to solve; upper steps are Adam's. Exceptions: rahgd and prahgd begin each
solve without momentum; they and paid make their own steps on x; and they do not restart here (the radius is infinite),
so that rahgd is plain momentum on x. Do not compare these three with the other methods.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from .common import CALLS, Parser, draw, figure, rows, save, share, show, train
from .common.seeds import stream
from .problems.images import load_images
from .problems.softmax import Cleaning, corrupted, with_bias

RESTARTED: dict[str, Any] = {"linear_steps": 5, "restart_radius": math.inf, "on_converged": "continue"}
METHODS: dict[str, partial[Any]] = {
    "aid": partial(bo.AID, linear_steps=5),
    "aid-neumann": partial(bo.AID, linear_solver="neumann", linear_steps=20),
    "itd": partial(bo.ITD),
    "f2sa": partial(bo.F2SA, order=2, nu=1e-2),
    "f2sa-1": partial(bo.F2SA, order=1, nu=1e-2),
    "first-order": partial(bo.FirstOrder),
    "ba": partial(bo.BA, linear_steps=5),
    "paid": partial(bo.PAID, linear_steps=5),
    "rahgd": partial(bo.RAHGD, **RESTARTED),
    "prahgd": partial(bo.PRAHGD, **RESTARTED),
}
# Their own steps on x include momentum and perturbations; for the other methods Adam updates x.
OWN_STEP = ("paid", "rahgd", "prahgd")
IMAGES = {"sizes": (20_000, 5_000), "lower_steps": 10, "steps": 40, "lr": 0.2, "own_lr": 2000.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"sizes": (1000, 300), "lower_steps": 20, "steps": 100, "lr": 0.1, "own_lr": 100.0},
    "mnist": IMAGES,
    "fashion": IMAGES,
}
RIDGE, MOMENTUM, CLASSES = 1e-3, 0.9, 10
NESTEROV = partial(torch.optim.SGD, momentum=MOMENTUM, nesterov=True)


def baseline(problem: Cleaning, steps: int) -> tuple[float, float]:
    """Return the test accuracy of plain training: after all steps, and at the smallest validation loss."""
    x, (_, y) = torch.full_like(problem.x, math.inf), problem.start()  # weights of one
    sgd = NESTEROV([y], lr=problem.lower_lr)
    stopped, best = 0.0, math.inf
    for k in range(steps):
        sgd.zero_grad()
        problem.lower(x, y).backward()  # type: ignore[no-untyped-call]
        sgd.step()
        if k % 10 == 9 and (loss := float(problem.upper(x, y.detach()))) < best:
            best, stopped = loss, problem.accuracy(y)
    return problem.accuracy(y), stopped


def clean(problem: Cleaning, wrong: Tensor, name: str, args: Any) -> dict[str, Any]:
    """Learn the weights with one method; return its curves and final numbers."""
    x, y = problem.start()
    momentum = {"lower_momentum": MOMENTUM} if name.endswith("rahgd") else {"lower_optimizer": NESTEROV}
    rates = {"lr": args.own_lr if name in OWN_STEP else args.lr, "lower_lr": problem.lower_lr}
    optimizer = METHODS[name](
        [x], [y], lower_steps=args.lower_steps, generator=stream(args.seed, "method", args.device), **rates, **momentum
    )
    if args.compile:
        optimizer.compile()
    adam = torch.optim.Adam([x], lr=args.lr)

    def step() -> Tensor:
        loss: Tensor = optimizer.backward(lambda: problem.upper(x, y), lambda: problem.lower(x, y))
        (optimizer if name in OWN_STEP else adam).step()
        return loss

    curve = train(
        step, lambda k, loss: {"loss": float(loss), "accuracy": problem.accuracy(y)},
        steps=args.steps, label=name, every=max(args.steps // 40, 1), device=args.device,
    )  # fmt: skip
    weights = x.detach().sigmoid()
    hits = int(((weights < 0.5) & wrong).sum())
    return {
        "accuracy": curve[-1]["accuracy"],
        "validation_loss": curve[-1]["loss"],
        "precision": hits / max(int((weights < 0.5).sum()), 1),
        "recall": hits / max(int(wrong.sum()), 1),
        "seconds": curve[-1]["seconds"],
        "oracle_calls": optimizer.oracle_counts,
        "curve": curve,
        "weights": weights.tolist(),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True, device=True, compiled=True)
    parser.data(SETTINGS)
    parser.methods(METHODS, ["aid", "itd", "f2sa"])
    parser.option("corruption", 0.5, "share of corrupted labels", type=share)
    parser.settings(
        "data", SETTINGS, steps="outer steps", lower_steps="lower steps per outer step",
        lr="learning rate of Adam on x", own_lr=f"learning rate of {', '.join(OWN_STEP)}",
    )  # fmt: skip
    args = parser.parse(arguments)
    generator = stream(args.seed, "data")
    parts = with_bias(load_images(args.data, args.data_root, args.download, SETTINGS[args.data]["sizes"], generator))
    train_part, val, test = (part.to(args.device) for part in parts)
    labels = corrupted(parts[0].labels, args.corruption, CLASSES, generator).to(args.device)
    problem = Cleaning([train_part._replace(labels=labels), val, test], RIDGE)
    wrong = labels != train_part.labels
    results = {name: clean(problem, wrong, name, args) for name in args.optimizer}
    plain, stopped = baseline(problem, args.steps * args.lower_steps)
    oracle, _ = baseline(Cleaning([train_part, val, test], RIDGE), args.steps * args.lower_steps)
    baselines = {"corrupted labels": plain, "corrupted, early stopped": stopped, "true labels": oracle}

    known = [[name, value, *[None] * 7] for name, value in baselines.items()]
    cleaned = {f"cleaned by {name}": r for name, r in results.items()}
    found = rows(cleaned, "accuracy", "precision", "recall", "seconds", calls=4)
    title = f"Data hyper-cleaning, {args.data}, {args.corruption:.0%} of {len(labels):,} labels corrupted"
    show(
        title,
        ("", "test accuracy", "precision", "recall", "seconds", *[*CALLS.values()][:4]),
        [*known[:2], *found, known[2]],
    )
    stem = args.out / f"hyper_cleaning_{args.data}"
    curves = {name: r["curve"] for name, r in results.items()}
    heading = title.replace(", ", "\n", 1)
    size = (5.4, 5.2 + 0.75 * len(results))  # stacked panels, narrow enough for a phone
    with figure(stem, heading, size, dpi=200) as canvas:
        upper, lower = canvas.subfigures(2, 1, height_ratios=[4.6, 0.6 + 0.75 * len(results)])
        losses, accuracies = upper.subplots(2, 1, sharex=True, height_ratios=[2, 3])
        draw(losses, curves, "step", "loss", xlabel="", ylabel="validation loss")
        draw(accuracies, curves, "step", "accuracy", xlabel="outer steps", ylabel="test accuracy")
        for (name, value), style in zip(baselines.items(), (":", "-.", "--"), strict=True):
            accuracies.axhline(value, color="grey", linestyle=style, label=name)
        accuracies.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.25), frameon=False)
        axes = lower.subplots(len(results), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axis, (name, r) in zip(axes, results.items(), strict=True):
            weights = torch.tensor(r.pop("weights"))
            for label, part in (("true label", ~wrong), ("wrong label", wrong)):
                axis.hist(weights[part.cpu()].numpy(), bins=40, range=(0, 1), alpha=0.6, label=label)
            axis.set_ylabel(name, rotation=0, ha="right", va="center")
            axis.set_yticks([])
        axes[0].legend(loc="upper center", frameon=False)
        axes[-1].set_xlabel("learned weight of an example")
    return save(args, stem, {"baselines": baselines, "results": results})


if __name__ == "__main__":
    main()

r"""Distil a data set into one or a few images per class, from which a network learns to classify the rest.

.. math::
    \min_{x}\ \mathbb{E}_{y_0}\, \mathrm{CE}_{train}(y_T(x, y_0)), \qquad
    y_T = T \text{ steps on } \mathrm{CE}(y; x, \text{labels}) \text{ from random weights } y_0

    python -m recipes.distil
    python -m recipes.distil --data mnist --data-root DIR
    python -m recipes.distil --data mnist --data-root DIR --per-class 10

Each set of images trains three kinds of networks, each from three new starts. Learning rate and steps (at most 200) are
chosen for each kind on validation images of the first seed. Controls: selected images, class means or k-means, the
weights of a softmax classifier as images, whitened means, feature matching in random networks, and kernel ridge
regression, which plain autograd differentiates. With ten images per class it wins for a softmax classifier only.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo

from .common import Parser, figure, interval, progress, save, show
from .common.seeds import begin, stream
from .problems.few_images import CHOSEN, FITTED, Images, networks, trained, tuned
from .problems.images import load_images
from .problems.problem import Part

SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"sizes": (800, 400), "steps": 500, "lr": 0.02, "lower_lr": 0.05},
    "mnist": {"sizes": (20000, 2000), "steps": 500, "lr": 0.01, "lower_lr": 0.02},
}
NAMES = {
    "random": "random images", "herding": "herding", "centres": "k-means", "weights": "classifier's weights",
    "whitened": "whitened means", "matched": "matched features", "kernel": "kernel regression",
    "itd": "ITD", "itd-labels": "ITD, labels too",
}  # fmt: skip


def distil(data: Part, start: Tensor, labels: Tensor, args: Any, seed: int, *, soft: bool = False) -> Images:
    """Learn the images (``soft``: also their labels) by unrolling an MLP's training, from new weights at each step."""
    make = networks(start.shape[1])["MLP"]
    begin(seed, "method")
    model, images, generator = make(), start.clone().requires_grad_(), stream(seed, "batches")
    logits = (5.0 * F.one_hot(labels, 10)).requires_grad_()
    upper = [images, logits] if soft else [images]

    def targets() -> Tensor:
        return logits.softmax(1) if soft else F.one_hot(labels, 10).float()

    optimizer = bo.ITD(
        upper, model.parameters(), lr=args.lr, lower_lr=args.lower_lr, lower_steps=args.lower_steps,
        lower_optimizer=partial(torch.optim.SGD, momentum=0.9),
        lower_init=lambda: [p.detach() for p in make().parameters()],
    )  # fmt: skip
    adam = torch.optim.Adam(upper, args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, args.steps)
    for _ in progress(range(args.steps), "ITD"):
        batch = data.take(torch.randint(len(data.labels), (512,), generator=generator))
        optimizer.backward(
            lambda batch=batch: F.cross_entropy(model(batch.features), batch.labels),
            lambda: F.cross_entropy(model(images), targets()),
        )
        adam.step()
        schedule.step()
    return images.detach(), targets().detach()


def draw(stem: Path, title: str, images: dict[str, Tensor], results: dict[str, dict[str, list[float]]]) -> None:
    """Draw one image of each class, and bars with the intervals."""
    with figure(stem, title, (13, 4.5)) as canvas:
        left, right = canvas.subfigures(1, 2, width_ratios=[3, 2])
        for (name, some), axes in zip(images.items(), left.subplots(len(images), 10, squeeze=False), strict=True):
            for axis, image in zip(axes, some, strict=True):
                axis.imshow(image.unflatten(0, (math.isqrt(len(image)), -1)).numpy(), cmap="gray_r")
                axis.set(xticks=[], yticks=[])
            axes[0].set_ylabel(name)
        axis = right.subplots()
        for i, net in enumerate(next(iter(results.values()))):
            means = [interval(r[net]) for r in results.values()]
            half = [m.high - m.mean if m.high < math.inf else 0.0 for m in means]
            places = [k + (i - 1) * 0.27 for k in range(len(means))]
            axis.barh(places, [m.mean for m in means], 0.25, xerr=half, label=net)
        axis.set(yticks=range(len(results)), yticklabels=[*results], xlim=(0, 1))
        axis.invert_yaxis()
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True)
    parser.data(SETTINGS)
    parser.methods(NAMES, [*NAMES][:-1], "--methods")
    parser.settings("data", SETTINGS, sizes="training and validation images", steps="outer steps",
                    lr="learning rate of the images", lower_lr="lower learning rate")  # fmt: skip
    parser.option("lower_steps", 20, "lower steps of the MLP")
    parser.option("per_class", 1, "images per class")
    parser.option("seeds", 3, "number of seeds, for splits, methods and tests")
    args = parser.parse(arguments)
    one = args.per_class == 1
    names = {k: v for k, v in NAMES.items() if one or k not in ("weights", "whitened")}
    names["centres"] = "class means" if one else "k-means"
    labels = torch.arange(10).repeat_interleave(args.per_class)
    results, shown = dict[str, Any](), dict[str, Tensor]()
    for seed in range(args.seed, args.seed + args.seeds):
        parts = load_images(args.data, args.data_root, args.download, tuple(args.sizes), stream(seed, "data"))
        std, mean = torch.std_mean(parts[0].features)
        data, val, test = (Part((part.features - mean) / std, part.labels) for part in parts)
        makers = networks(data.features.shape[1])
        rows = [data.features[data.labels == c] for c in range(10)]
        for name in filter(names.__contains__, args.methods):
            chooser = CHOSEN.get(name, CHOSEN["centres"])  # the other methods start there
            generator, began = stream(seed, name), time.perf_counter()
            images = torch.cat([chooser(row, args.per_class, generator) for row in rows])
            known = images, F.one_hot(labels, 10).float()
            begin(seed, name)
            if name in FITTED:
                known = FITTED[name](data, images, labels, generator), known[1]
            elif name not in CHOSEN:
                known = distil(data, images, labels, args, seed, soft=name == "itd-labels")
            seconds = time.perf_counter() - began
            if name not in results:  # with the first seed
                recipe = {net: tuned(known, val, make, seed) for net, make in makers.items()}
                results[name] = {"seconds": [], "recipe": recipe, **{net: [] for net in makers}}
                shown[name] = known[0][:: args.per_class]
            for net, make in progress(makers.items(), f"test {name}"):
                lr, steps = results[name]["recipe"][net]
                results[name][net] += trained(known, test, make, lr, (steps,), seed)
            results[name]["seconds"].append(seconds)

    title = f"{args.data} distilled to {args.per_class} a class: test accuracy, {args.seeds} seeds"
    means = {n: [interval(r[net]) for net in makers] for n, r in results.items()}
    cells = {n: [f"{100 * i.mean:.1f} ± {100 * (i.high - i.mean):.1f}" for i in row] for n, row in means.items()}
    lines = [[names[n], *cells[n], max(r["seconds"])] for n, r in results.items()]
    show(title, ("trained on", *makers, "seconds"), lines)
    stem = args.out / f"distil_{args.data}_{args.per_class}"
    chosen = [n for n in ("itd", "itd-labels", "centres") if n in shown] or [*shown][:3]
    bars = {names[n]: {net: r[net] for net in makers} for n, r in results.items()}
    draw(stem, title, {names[n]: shown[n] for n in chosen}, bars)
    return save(args, stem, {"results": results})


if __name__ == "__main__":
    main()

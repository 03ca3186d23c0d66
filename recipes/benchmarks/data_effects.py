"""Small recipes on data sets as they are, and without their oddities."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import hyper_regularization, learn_to_regularize
from ..common.methods import STOCHASTIC
from ..common.seeds import stream
from ..few_shot.__main__ import nearest
from ..few_shot.data import Images, load
from ..few_shot.data.images import resized
from ..few_shot.episodes import Episodes
from ..few_shot.experiment import TEST_SEED, arguments, learner_of
from ..few_shot.training import Training, evaluate, train
from ..problems.images import load_images
from ..problems.libsvm import load_libsvm
from ..problems.newsgroups import load_newsgroups
from ..problems.problem import Part
from ..problems.softmax import Regularised

__all__ = ["EFFECTS", "RESIZED"]

# change -> measure -> "as it is" and "without" -> a value for each seed
Effects = dict[str, dict[str, dict[str, list[float]]]]


def note(effects: Effects, change: str, form: str, values: Mapping[str, float]) -> None:
    """Add the values of a seed."""
    for measure, value in values.items():
        effects.setdefault(change, {}).setdefault(measure, {}).setdefault(form, []).append(value)


def reweighted(part: Part, seed: int, sizes: tuple[int, int] = (1605, 5000), samples: int = 20_000) -> dict[str, float]:
    """Return h(x) of reweighting in units of its start, on a random split, for three methods."""
    order = torch.randperm(len(part.labels), generator=stream(seed, "data"))
    first, second = part.take(order[: sizes[0]]), part.take(order[sizes[0] : sum(sizes)])
    problem = hyper_regularization.Reweighting(first, second, 0.01)
    args = SimpleNamespace(samples=samples, batch=32, evaluations=1, compile=False)
    found: dict[str, float] = {}
    for name, lr, lower_lr in (("soba", 1.0, 0.5), ("saba", 1.0, 0.5), ("stocbio", 100.0, 2.0)):
        rates = len(problem.train) * lr, lower_lr * problem.lower_lr
        run = hyper_regularization.run(problem, STOCHASTIC[name], rates, seed, args)
        found[f"{name}, h(x) / h(start)"] = run["solved"] / run["curve"][0]["solved"]
    return found


def distinct(part: Part) -> Part:
    """Return the rows without those that occurred before, whatever their label."""
    seen, kept = set[bytes](), list[int]()
    for i, row in enumerate(part.features.numpy()):
        if (key := row.tobytes()) not in seen:
            seen.add(key)
            kept.append(i)
    return part.take(torch.tensor(kept))


def of_libsvm(name: str, root: Path | None, seeds: Iterable[int]) -> Effects:
    """Reweight examples of random splits of the whole set, with and without repeated rows."""
    effects: Effects = {}
    train, test = load_libsvm(name, root, False)
    whole = Part(torch.cat([train.features, test.features]), torch.cat([train.labels, test.labels]))
    once = distinct(whole)
    counts = f"{len(whole.labels):,} rows; without repeated ones {len(once.labels):,}"
    change = f"hyper_regularization, 1,605 and 5,000 of {counts}"
    for seed in seeds:
        note(effects, change, "as it is", reweighted(whole, seed))
        note(effects, change, "without", reweighted(once, seed))
    return effects


def regularised(parts: tuple[Part, Part, Part], ridge: float, seed: int, steps: int) -> dict[str, float]:
    """Return test accuracies of a ridge weight per feature, learned by two methods."""
    size = parts[0].features.shape[1]
    problem = Regularised(parts, ridge=ridge, x=torch.zeros(size, 1))
    args = SimpleNamespace(
        linear_steps=10, momentum=0.9, lr=100.0, lower_lr=None, lower_steps=10, seed=seed, compile=False, steps=steps,
        device="cpu",
    )  # fmt: skip
    found: dict[str, float] = {}
    for name in ("aid", "aid-nesterov"):
        run = learn_to_regularize.regularize(problem, name, args)
        found |= {f"{name}, test accuracy": run["accuracy"], f"{name}, test loss": run["loss"]}
    return found


def of_digits(_: Path | None, seeds: Iterable[int]) -> Effects:
    """Learn a ridge weight per pixel, with and without the pixels that are always zero."""
    effects: Effects = {}
    for seed in seeds:
        parts = load_images("digits", None, False, (300, 300), stream(seed, "data"))
        used = torch.cat([part.features for part in parts]).amax(0) > 0
        few = tuple(Part(part.features[:, used], part.labels) for part in parts)
        for form, given in (("as it is", parts), ("without", few)):
            values = regularised(given, 1 / (2 * 10 * 64), seed, 50)  # type: ignore[arg-type]
            note(effects, "learn_to_regularize; without the pixels that are always zero", form, values)
    return effects


def of_newsgroups(root: Path | None, seeds: Iterable[int], steps: int = 10) -> Effects:
    """Learn a ridge weight per word, with and without empty texts in training and validation, and in all parts."""
    effects: Effects = {}
    for seed in seeds:
        parts = load_newsgroups(root, False, False, seed)
        full = []
        for part in parts:
            rows = part.features.matrix.crow_indices().diff() > 0
            full.append(part.take(rows.nonzero().squeeze(1)))
        size = parts[0].features.shape[1]
        whole = regularised(parts, 1 / (2 * 20 * size), seed, steps)
        for change, given in (
            ("learn_to_regularize; without texts of no word in training and validation", (*full[:2], parts[2])),
            ("learn_to_regularize; without texts of no word, also in the test", tuple(full)),
        ):
            note(effects, change, "as it is", whole)
            note(effects, change, "without", regularised(given, 1 / (2 * 20 * size), seed, steps))  # type: ignore[arg-type]
    for seed in seeds:  # after the others, because the features of one kind are kept
        parts = load_newsgroups(root, False, False, seed, footers=True)
        change = "learn_to_regularize; without the footer rule (footers stay)"
        ridge = 1 / (2 * 20 * parts[0].features.shape[1])
        base = effects["learn_to_regularize; without texts of no word, also in the test"]
        values = regularised(parts, ridge, seed, steps)
        for measure, value in values.items():
            note(effects, change, "without", {measure: value})
    effects[change] = {m: {"as it is": base[m]["as it is"], **v} for m, v in effects[change].items()}
    return effects


def few_shot(name: str, images: Images, seed: int, steps: int, count: int = 200) -> dict[str, float]:
    """Return test accuracies of the nearest image, and of a prototypical network after a short training."""
    args = arguments("").parse(["--data", name, "--steps", str(steps), "--shot", "1"])
    splits = {s: Episodes(images, s, way=5, shot=1, query=5) for s in images.pixels}
    learner = learner_of(args, "protonet", seed, splits["train"])
    how = Training(
        lr=3e-3, steps=steps, seconds=None, outer="adam", clip=10.0, schedule="constant", evaluations=1, episodes=20
    )
    train(learner, splits["train"], splits["val"], how, label=name)
    accuracy = float(evaluate(learner, splits["test"], count, TEST_SEED, splits["train"]).mean())
    return {
        f"protonet, {steps} steps, test accuracy": accuracy,
        "nearest image, test accuracy": nearest(splits["test"], count)["accuracy"],
    }


def without_twins(images: Images) -> Images:
    """Return images in which one that has occurred before is replaced by the next of its class."""
    seen, pixels = set[bytes](), {}
    for split, some in images.pixels.items():
        pixels[split] = some.clone()
        for c in range(len(some)):
            for i in range(some.shape[1]):
                if (key := some[c, i].numpy().tobytes()) in seen:
                    pixels[split][c, i] = some[c, (i + 1) % some.shape[1]]
                seen.add(key)
    return Images(images.name, pixels, images.mean, images.std)


def of_cifar(name: str, root: Path | None, seeds: Iterable[int], steps: int = 60) -> Effects:
    """Train and test with and without the image of two classes."""
    effects: Effects = {}
    change = "few_shot, 5-way 1-shot; the second of the two places gets another image of its class"
    with tempfile.TemporaryDirectory() as cache:
        images = load(name, root, Path(cache))
        for seed in seeds:
            note(effects, change, "as it is", few_shot(name, images, seed, steps))
            note(effects, change, "without", few_shot(name, without_twins(images), seed, steps))
    return effects


def nearest_pixel(images: Tensor, size: int) -> Tensor:
    """Resize by nearest neighbour."""
    return F.interpolate(images.float(), (size, size), mode="nearest-exact").byte()


def any_ink(images: Tensor, size: int) -> Tensor:
    """Resize with antialiasing, then call every pixel ink that has some, as a cast to bool does."""
    return 255 * (antialiased(images, size) > 0).byte()


def antialiased(images: Tensor, size: int) -> Tensor:
    """Resize as the recipes do."""
    return torch.from_numpy(resized(images.numpy(), size))


RESIZED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "antialiased": antialiased, "nearest neighbour": nearest_pixel, "as truth values": any_ink,
}  # fmt: skip


def of_omniglot(root: Path | None, seeds: Iterable[int], steps: int = 60) -> Effects:
    """Train and test on images that are resized in several ways."""
    effects: Effects = {}
    with tempfile.TemporaryDirectory() as cache:
        small, large = (load("omniglot", root, Path(cache), size=size) for size in (28, 105))
        for seed in seeds:
            whole = few_shot("omniglot", small, seed, steps)
            for name, resize in [*RESIZED.items()][1:]:
                change = f"few_shot, 5-way 1-shot; resized {'by ' if name[0] == 'n' else ''}{name}"
                pixels = {s: torch.stack([resize(c, 28) for c in some]) for s, some in large.pixels.items()}
                other = Images("omniglot", pixels, small.mean, small.std)
                note(effects, change, "as it is", whole)
                note(effects, change, "without", few_shot("omniglot", other, seed, steps))
    return effects


EFFECTS: dict[str, Callable[[Path | None, Iterable[int]], Effects]] = {
    "digits": of_digits,
    "a9a": partial(of_libsvm, "a9a"),
    "newsgroups": of_newsgroups,
    "omniglot": of_omniglot,
    "cifar_fs": partial(of_cifar, "cifar_fs"),
    "fc100": partial(of_cifar, "fc100"),
}

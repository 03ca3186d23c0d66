"""Data sets split into classification tasks of equally many classes, on features of a small fixed network."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from ..common.seeds import begin
from .problem import Part, folder

__all__ = ["Centre", "load_tasks"]

FEATURES, CLASSES, LAMBDA = 512, 10, 2.0
SUPERCLASSES = {  # of CIFAR-100
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}


class Centre:
    r"""Linear classifiers near a centre: :math:`g_i = \ell_i(y) + \tfrac\lambda2 \|y - x\|^2`, :math:`f_i = \ell_i(y)`.

    Args:
        support: rows of the lower losses.
        query: rows of the upper losses. Default: the same.
        classes: number of classes per task.
    """

    def __init__(self, support: Part, query: Part | None = None, classes: int = CLASSES) -> None:
        self.support, self.tasks = support, bo.TensorTasks(support, query)
        self.x = torch.zeros(support.features.shape[-1], classes, requires_grad=True)
        self.y = torch.zeros_like(self.x, requires_grad=True)

    def upper(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the query loss."""
        return F.cross_entropy(batch[0] @ self.y, batch[1])

    def lower(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the support loss with the penalty on the distance to the centre."""
        return self.upper(batch) + LAMBDA / 2 * (self.y - self.x).square().sum()

    def starts(self, ids: Tensor) -> Tensor:
        """Return the starts of the lower solves: the centre."""
        return self.x.detach().expand(len(ids), *self.x.shape)


def load_tasks(
    name: str, root: Path | None, count: int, shares: tuple[float, float, float], generator: torch.Generator
) -> tuple[Part, ...]:
    """Return support, query and test rows of every task (tasks, rows, 512), with labels (tasks, rows) of ten classes.

    Args:
        name: ``"digits"``: scikit-learn's digits, rotated by an angle of each task; images of a row, which is support,
            query or test in all tasks, are in no other row of any task;
            ``"cifar_fs"``: the folders ``<class>/*.png`` of the CIFAR-FS download, a task is two superclasses of
            CIFAR-100; ``"omniglot"``: torchvision's folders ``images_background/<alphabet>/<character>/*.png``, a task
            is ten characters of one alphabet.
        root: folder of the downloaded data set.
        count: number of tasks.
        shares: shares of a class's images for support, query and test rows.
        generator: source of the random choices.
    """
    if name == "digits":
        images = _digits(count, generator)
    else:
        images = (_cifar if name == "cifar_fs" else _omniglot)(folder(root, name), count)
    tasks, classes, rows = images.shape[:3]
    inputs = _features(images.flatten(0, 2)).view(tasks, classes, rows, FEATURES)
    labels = torch.arange(classes).view(1, classes, 1).expand(tasks, classes, rows)
    ends = [0, round(shares[0] * rows), round((shares[0] + shares[1]) * rows), round(sum(shares) * rows)]
    order = torch.randperm(rows, generator=generator)
    parts = [order[a:b] for a, b in pairwise(ends)]
    return tuple(Part(inputs[:, :, part].flatten(1, 2), labels[:, :, part].flatten(1)) for part in parts)


def _features(images: Tensor) -> Tensor:
    """Return 512 features of a convolutional network with fixed random weights (seed 0), centred and of norm 5.

    The network is untrained, unlike the paper's pre-trained one; the norm bounds the curvature of the softmax loss by
    12.5.
    """
    state = torch.get_rng_state()
    begin(0, "features")
    network = nn.Sequential(
        nn.Conv2d(images.shape[1], 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip
    torch.set_rng_state(state)
    with torch.no_grad():
        features = torch.cat([network(part) for part in images.split(1000)])  # type: ignore[no-untyped-call]
    features = features - features.mean(0)
    return 5 * F.normalize(features / features.std(0).clamp_min(1e-6), dim=1)


def _digits(count: int, generator: torch.Generator) -> Tensor:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = torch.tensor(bunch.images / 16, dtype=torch.float32), torch.tensor(bunch.target)
    rows, tasks = torch.arange(60), []
    each = [images[labels == c] for c in range(CLASSES)]
    each = [part[torch.randperm(len(part), generator=generator)] for part in each]
    for angle in torch.linspace(-1.2, 1.2, count).tolist():
        turn = torch.tensor([[[torch.tensor(angle).cos(), -torch.tensor(angle).sin(), 0.0],
                              [torch.tensor(angle).sin(), torch.tensor(angle).cos(), 0.0]]])  # fmt: skip
        chosen = torch.stack([part[_one_of_three(rows, len(part), generator)] for part in each])
        flat = chosen.view(-1, 1, 8, 8)
        grid = F.affine_grid(turn.expand(len(flat), 2, 3), [len(flat), 1, 8, 8], align_corners=False)
        tasks.append(F.grid_sample(flat, grid, align_corners=False).view(CLASSES, -1, 1, 8, 8))
    return torch.stack(tasks)


def _one_of_three(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Choose an image for each row; no other row has it in any task, so that test rows are never trained on."""
    choices = (count - 1 - rows) // len(rows) + 1
    return rows + len(rows) * (torch.rand(len(rows), generator=generator) * choices).long()


def _cifar(root: Path, count: int) -> Tensor:
    folders = {path.name: path for path in root.rglob("*") if path.is_dir() and any(path.glob("*.png"))}
    wanted = [name.split() for name in SUPERCLASSES.values()]
    missing = sorted(name for names in wanted for name in names if name not in folders)
    if missing:
        raise SystemExit(
            f"no folder of PNG files for {len(missing)} classes of CIFAR-100 under {root} ({', '.join(missing[:3])}, "
            "...): expected the CIFAR-FS download, data/<class>/*.png"
        )
    if count > len(wanted):
        raise SystemExit(f"CIFAR-FS gives at most {len(wanted)} tasks of two superclasses, not {count}")
    rows = min(len(list(folders[name].glob("*.png"))) for names in wanted for name in names)
    classes = {name: _read(folders[name], rows, 32, "RGB") for names in wanted for name in names}
    tasks = [wanted[i] + wanted[(i + 1) % len(wanted)] for i in range(count)]
    return torch.stack([torch.stack([classes[name] for name in names]) for names in tasks])


def _omniglot(root: Path, count: int) -> Tensor:
    alphabets = sorted(path for path in root.rglob("images_background/*") if path.is_dir())
    groups = []
    for alphabet in alphabets:
        characters = sorted(path for path in alphabet.iterdir() if path.is_dir())
        groups += [characters[i : i + CLASSES] for i in range(0, len(characters) - CLASSES + 1, CLASSES)]
    if len(groups) < count:
        raise SystemExit(
            f"found {len(groups)} groups of ten characters of one alphabet under {root}, but {count} tasks are asked "
            "for: expected torchvision's Omniglot, images_background/<alphabet>/<character>/*.png"
        )
    chosen = [groups[i * len(groups) // count] for i in range(count)]
    return torch.stack([torch.stack([1 - _read(path, 20, 28, "L") for path in group]) for group in chosen])


def _read(folder: Path, rows: int, size: int, mode: str) -> Tensor:
    """Read the first images of a folder, as (rows, channels, size, size) between 0 and 1."""
    from PIL import Image
    from torchvision.transforms.functional import pil_to_tensor

    images = []
    for path in sorted(folder.glob("*.png"))[:rows]:
        with Image.open(path) as image:
            small = image.convert(mode).resize((size, size), Image.Resampling.BILINEAR)
            images.append(pil_to_tensor(small).float() / 255)
    return torch.stack(images)

"""Tests and baselines of `recipes.distil`: a few images per class, selected, averaged or fitted in one level."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common import progress
from ..common.seeds import begin
from .problem import Part

__all__ = ["CHOSEN", "FITTED", "Images", "networks", "trained", "tuned"]

Images = tuple[Tensor, Tensor]  # and their labels, as probabilities
MARKS = (20, 60, 200)  # steps of the final training after which it may stop


def networks(pixels: int, hidden: int = 128) -> dict[str, Callable[[], nn.Sequential]]:
    """Return functions that make the classifiers, for square images of ten classes."""
    side = math.isqrt(pixels)

    def cnn() -> nn.Sequential:
        blocks = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1))
        tail = (nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * (side // 4) ** 2, 10))
        return nn.Sequential(nn.Unflatten(1, (1, side, side)), *blocks, *tail)

    return {
        "softmax": lambda: nn.Sequential(nn.Linear(pixels, 10)),
        "MLP": lambda: nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
        "CNN": cnn,
    }


def random(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Select random images of a class."""
    return rows[torch.randperm(len(rows), generator=generator)[:count]]


def herding(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Select images whose running mean stays nearest to the mean of the class (Welling, 2009)."""
    chosen: list[int] = []
    for k in range(count):
        distance = ((k + 1) * rows.mean(0) - rows[chosen].sum(0) - rows).norm(dim=1)
        distance[chosen] = math.inf
        chosen.append(int(distance.argmin()))
    return rows[chosen]


def centres(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the k-means centres of a class; for one image the mean."""
    from sklearn.cluster import KMeans

    if count == 1:
        return rows.mean(0, keepdim=True)
    seed = int(torch.randint(2**31, (), generator=generator))
    return torch.tensor(KMeans(count, n_init=1, random_state=seed).fit(rows.numpy()).cluster_centers_)


def weights(data: Part, start: Tensor, labels: Tensor, generator: torch.Generator, *, lr: float, steps: int) -> Tensor:
    """Return the weights of a softmax classifier, scaled by their standard deviation, as one image per class."""
    weight = torch.zeros(10, start.shape[1], requires_grad=True)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ weight.T, y) + 1e-3 * weight.square().sum()

    _descend(weight, loss, data, generator, lr, steps)
    return (weight.detach() / weight.detach().std())[labels]


def whitened(data: Part, start: Tensor, labels: Tensor, generator: torch.Generator, *, shrinkage: float) -> Tensor:
    """Return linear discriminants as images: class means times the inverse of the within-class covariance."""
    means = torch.stack([data.features[data.labels == c].mean(0) for c in range(10)])
    within = torch.cov((data.features - means[data.labels]).T)
    within += shrinkage * within.diagonal().mean() * torch.eye(len(within))
    images: Tensor = torch.linalg.solve(within, (means - means.mean(0)).T).T
    return (images / images.std())[labels]


def matched(data: Part, start: Tensor, labels: Tensor, generator: torch.Generator, *, lr: float, steps: int) -> Tensor:
    """Match the mean features of each real class in CNNs with random weights (arXiv:2110.04181)."""
    make, images = networks(start.shape[1])["CNN"], start.clone().requires_grad_()

    def means(features: Tensor, y: Tensor) -> Tensor:
        share = F.one_hot(y, 10).float()
        return share.T @ features / share.sum(0).clamp_min(1).unsqueeze(1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        body = make()[:-1]
        with torch.no_grad():
            real = means(body(x), y)
        return (real - means(body(images), labels)).square().sum()

    return _descend(images, loss, data, generator, lr, steps)


def kernel(data: Part, start: Tensor, labels: Tensor, generator: torch.Generator, *, lr: float, steps: int) -> Tensor:
    """Fit images for kernel ridge regression with the tangent kernel of a wide MLP (arXiv:2011.00050)."""
    images, targets = start.clone().requires_grad_(), F.one_hot(labels, 10) - 0.1

    def tangent(a: Tensor, b: Tensor) -> Tensor:
        sizes = a.norm(dim=1).unsqueeze(1) * b.norm(dim=1) / a.shape[1]
        cosine = (F.normalize(a) @ F.normalize(b).T * (1 - 1e-6)).clamp(max=1 - 2e-7)  # rounding may exceed one
        angle = math.pi - cosine.acos()
        kernel: Tensor = sizes * ((1 - cosine.square()).sqrt() + 2 * angle * cosine) / (2 * math.pi)
        return kernel

    def loss(x: Tensor, y: Tensor) -> Tensor:
        inner = tangent(images, images)
        inner = inner + 1e-3 * inner.diagonal().mean() * torch.eye(len(images))
        found = tangent(x, images) @ torch.linalg.solve(inner, targets)
        error: Tensor = (found - F.one_hot(y, 10) + 0.1).square().sum(1).mean()
        return error

    return _descend(images, loss, data, generator, lr, steps)


def _descend(
    x: Tensor, loss: Callable[[Tensor, Tensor], Tensor], data: Part, generator: torch.Generator, lr: float, steps: int
) -> Tensor:
    adam = torch.optim.Adam([x], lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in progress(range(steps), "a control"):
        batch = data.take(torch.randint(len(data.labels), (512,), generator=generator))
        (x.grad,) = torch.autograd.grad(loss(batch.features, batch.labels), x)
        adam.step()
        schedule.step()
    return x.detach()


CHOSEN: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "random": random,
    "herding": herding,
    "centres": centres,
}
FITTED: dict[str, partial[Tensor]] = {
    "weights": partial(weights, lr=0.01, steps=500),
    "whitened": partial(whitened, shrinkage=0.1),
    "matched": partial(matched, lr=0.1, steps=300),
    "kernel": partial(kernel, lr=0.02, steps=2000),
}


def trained(
    known: Images, asked: Part, make: Callable[[], nn.Module], lr: float, marks: tuple[int, ...], seed: int
) -> list[float]:
    """Return accuracies of a network trained on the images, after each of ``marks`` steps: means of three starts."""
    found = []
    for start in range(3):
        begin(seed, f"test {start}")
        model = make()
        sgd = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
        for k in range(1, marks[-1] + 1):
            sgd.zero_grad()
            F.cross_entropy(model(known[0]), known[1]).backward()  # type: ignore[no-untyped-call]
            sgd.step()
            if k in marks:
                with torch.no_grad():
                    found.append(float((model(asked.features).argmax(1) == asked.labels).double().mean()))
    return [sum(found[i :: len(marks)]) / 3 for i in range(len(marks))]


def tuned(known: Images, val: Part, make: Callable[[], nn.Module], seed: int) -> tuple[float, int]:
    """Return the best learning rate and steps on validation images; the grid grows until the best is inside."""
    tried: dict[int, tuple[float, int]] = {}
    best = -3
    while True:
        for k in {best - 1, best, best + 1} - tried.keys():
            accuracy = trained(known, val, make, 10 ** (k / 2), MARKS, seed)
            tried[k] = max(zip(accuracy, MARKS, strict=True))
        if best == (best := max(tried, key=lambda k: tried[k][0])):
            return 10 ** (best / 2), tried[best][1]

"""Picture of a body's features of unseen classes in two dimensions, before and after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import figure
from .episodes import Episodes
from .learners import Learner

__all__ = ["picture", "projected", "separation"]


@torch.no_grad()
def features(learner: Learner, episodes: Episodes, classes: int = 8, images: int = 15) -> Tensor:
    """Return features (classes, images, width) of the first images of the first classes, normalised together."""
    ids = torch.arange(classes).unsqueeze(1) * episodes.each + torch.arange(min(images, episodes.each))
    shown = episodes.normalised(episodes.pixels[ids.flatten().to(episodes.pixels.device)])
    found: Tensor = learner.body(shown).unflatten(0, ids.shape).cpu()
    return found


def separation(features: Tensor) -> float:
    """Return the ratio of the variance between class means to the variance within classes."""
    means = features.mean(1)
    within = (features - means.unsqueeze(1)).square().sum(-1).mean()
    return float((means - means.mean(0)).square().sum(-1).mean() / within)


def projected(features: Tensor) -> Tensor:
    """Project features on the two directions in which the class means differ most."""
    means = features.mean(1)
    centred = means - means.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    points: Tensor = (features - means.mean(0)) @ directions[:2].T
    return points


def picture(stem: Path, title: str, bodies: dict[str, Tensor]) -> dict[str, float]:
    """Draw the features of each body, with the class means; return their separations."""
    found = {name: separation(values) for name, values in bodies.items()}
    with figure(stem, title, (5.0 * len(bodies), 4.5)) as canvas:
        axes: Any = canvas.subplots(1, len(bodies), squeeze=False)[0]
        for axis, (name, values) in zip(axes, bodies.items(), strict=True):
            points = projected(values)
            for k, one in enumerate(points):
                axis.plot(*one.T, ".", color=f"C{k}", alpha=0.5)
                axis.plot(*one.mean(0), "P", color=f"C{k}", markersize=10, markeredgecolor="black")
            axis.set_title(f"{name}: variance between / within classes {found[name]:.2g}")
    return found

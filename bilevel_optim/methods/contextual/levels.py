"""Mean squares of the corrections between levels, which must fall as fast as the cost of the levels grows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...oracle.session import Checks

__all__ = ["added", "watched"]

SEEN = 30  # corrections of a level needed before its mean square counts

GROWING = (
    "the corrections between levels do not fall like 2^-k (diagnostics['level_variance'] grows with k), so the "
    "variance grows geometrically with levels: lower_lr is too small (lower_lr * mu < 0.75, with mu the strong "
    "convexity of the lower loss), or the noise of the lower gradients does not average out. Use a larger lower_lr, or "
    "fewer levels"
)
EXPLODING = (
    "the first corrections between levels explode (diagnostics['level_variance']): the lower steps are too large for "
    "the curvature, because cap=False, or because smoothness is less than the largest eigenvalue of the lower "
    "Hessians. Use cap=True, a larger smoothness, or a smaller lower_lr"
)


def added(moments: Tensor | None, levels: int, level: int, correction: Tensor) -> Tensor:
    """Return the number and sum of squared corrections of the levels 0, ..., ``levels``, with one more added."""
    one_hot = torch.zeros(levels + 1, dtype=torch.float64, device=correction.device)
    one_hot[level] = 1.0
    new = torch.stack([one_hot, one_hot * correction])
    return new if moments is None else moments.to(new.device) + new


def watched(checks: Checks, moments: Tensor, base: int) -> Tensor:
    """Return the mean squares times 2^k, and warn if they grow above the base level."""
    count, total = moments
    variance = torch.where(count > 0, total / count, torch.nan)
    k = torch.arange(len(count), device=count.device)
    scaled = variance * 2.0**k
    seen = (k >= base + 3) & (count >= SEEN) & (variance > 0)
    weight, log = torch.where(seen, count, 0.0), torch.where(seen, scaled, 1.0).log2()
    mean_k = (weight * k).sum() / weight.sum()
    spread = (weight * (k - mean_k) ** 2).sum()
    slope = (weight * (k - mean_k) * log).sum() / spread
    explodes = (count[:-1] >= SEEN) & (count[1:] >= SEEN / 3) & (variance[1:] > 64 * variance[:-1])
    checks.alert("growing levels", GROWING, (seen.sum() >= 3) & (slope > 0.25))
    checks.alert("exploding levels", EXPLODING, explodes.any())
    return scaled

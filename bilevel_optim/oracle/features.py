"""The part of a loss that does not depend on y, evaluated once for all that happens at one x on one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..problem.objective import Sample

if TYPE_CHECKING:
    from .oracle import Oracle

__all__ = ["Features", "require_free_of_lower"]


class Features:
    """The last features of each level, for one x."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Sample, object, Any]] = {}  # level -> (features' sample, point, features)

    def frozen(
        self,
        oracle: Oracle,
        level: str,
        sample: Sample,
        point: object = None,
        evaluate: Callable[[], Any] | None = None,
    ) -> Any:
        """The features of a sample as constants, for derivatives in y alone; evaluated once for each x and batch.

        Args:
            oracle: evaluates them.
            level: of the objective.
            sample: the sample; None is returned if its objective has no features.
            point: stands for the x at which they are wanted. Default: that of the oracle.
            evaluate: evaluates them there. Default: at what is placed.
        """
        if sample.features is None:
            return None
        if level not in oracle.session.found.features_checked:
            require_free_of_lower(oracle, level, oracle.call(sample.features))
            oracle.session.found.features_checked |= {level}
        point = oracle.x if point is None else point
        kept, at, part = self._kept.get(level, (None, None, None))
        if at is not point or kept is not sample.features:
            part = oracle.call(sample.features, graph=False) if evaluate is None else evaluate()
            self._kept[level] = (sample.features, point, part)
        return part


def require_free_of_lower(oracle: Oracle, level: str, part: Any) -> None:
    """At the first step, raise if the features change with y: they are kept while y moves."""
    parts = [t for t in tree_leaves(part) if isinstance(t, Tensor) and t.requires_grad]
    if parts:
        reached = torch.autograd.grad([t.sum() for t in parts], oracle.live_y, allow_unused=True)
        for gradient, name in zip(reached, oracle.lower_names(), strict=True):
            if gradient is not None:
                raise ValueError(
                    f"the features of the {level} objective depend on lower parameter {name}; they are the part of "
                    "the loss that does not depend on y, so move what reads it into the loss itself"
                )

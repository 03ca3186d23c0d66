"""Derivatives through the part of a loss that does not depend on y, computed once for many steps on one batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..problem.objective import Sample
from ..problem.vector import Vector, as_variable
from ..pytree import tree_flatten, tree_unflatten
from .oracle import Oracle
from .point import none_to_zeros

__all__ = ["FeatureCut"]


class FeatureCut:
    r"""The lower loss as a function of its features z(x), of x and of y, for derivatives of many steps on one batch.

    The derivatives in z are summed and pulled back to x once, so that the features are evaluated once and
    differentiated once.

    Args:
        oracle: oracle at the x of all steps.
        sample: sample of the lower objective, with features.

    Attributes:
        features: the sample of the features.
        usable: False if parameters are sharded, or if several ranks share the loss, each with its own features.
    """

    def __init__(self, oracle: Oracle, sample: Sample) -> None:
        assert sample.features is not None
        self.oracle, self.features, self._last = oracle, sample.features, sample
        self.usable = not oracle.sharded and (not oracle.shared or oracle.session.options.ranks.world == 1)
        if not self.usable:
            return
        oracle.session.note_use("lower", oracle, sample)
        oracle.check_features("lower", sample)
        with oracle.evaluating() as (self._x, _):
            values, structure = tree_flatten(oracle.call(sample.features))
        smooth = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
        self._roots = [values[i] for i in smooth]
        self._leaves = Vector(map(as_variable, self._roots))
        for i, leaf in zip(smooth, self._leaves, strict=True):
            values[i] = leaf
        self._part = tree_unflatten(values, structure)
        self._total = Vector(torch.zeros_like(t) for t in (*self._leaves, *oracle.x))

    def at(self, y: Vector, sample: Sample) -> tuple[Oracle, Sample]:
        """Return the oracle with upper variables z and x, and its form of a sample with these features."""
        oracle, self._last = self.oracle, sample

        loss = partial(sample, self._part)

        def names() -> list[str]:
            return [*(f"feature {i}" for i in range(len(self._leaves))), *oracle.names]

        other = Oracle(
            (*self._leaves, *oracle.live_x), oracle.live_y, loss, loss, names=names, session=oracle.session,
            lanes=oracle.lanes,
            values=(Vector((*self._leaves, *oracle.x)).detach() if oracle.moved[0] else None, y.detach()),
        )  # fmt: skip
        return other, other.g.draw()

    def add(self, derivative: Vector) -> None:
        """Add a derivative in z and x to the sum."""
        self._total = self._total + derivative

    def pulled_back(self) -> Vector:
        """Return the sum of the derivatives, pulled back to x alone."""
        oracle, count = self.oracle, len(self._roots)
        oracle.session.lower_sample = self._last  # buffers advance on a whole sample
        direct = Vector(self._total[count:])
        if not count:
            return direct
        with oracle.placed():  # a graph over live leaves saves the leaves themselves
            found = torch.autograd.grad(self._roots, list(self._x), list(self._total[:count]), allow_unused=True)
        oracle.session.note_reached(found)
        result = direct + none_to_zeros(found, direct)
        oracle.checks.finite("jvp", result)
        return result

"""A variant of a method is what it tracks, and how it makes the direction of x from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...hypergradient.storm import corrected, msvr, storm
from .drawing import Drawing
from .rows import Clock, Rows, Table
from .trackers import Matrices, Measured, Trackers

__all__ = ["Look", "Variant", "blockwise", "exact", "probed", "summed"]


@dataclass(frozen=True)
class Look:
    """What a step looks at: some rows as they are now, and what is to be done with them.

    Attributes:
        table: all rows.
        ids, now: numbers of those looked at, in increasing order, and these rows.
        scale: 1/m over the share of the draws that were this task, 1 in expectation over the draws.
        betas: mixing weights, by name.
        clocks: now and after the step.
        direction: d as it was.
        trackers, drawing: of the method.
        generator: source of random numbers.
    """

    table: Table
    ids: Tensor
    now: Rows
    scale: Tensor
    betas: dict[str, float]
    clocks: tuple[Clock, Clock]
    direction: Tensor
    trackers: Trackers
    drawing: Drawing
    generator: torch.Generator | None

    @property
    def whole(self) -> bool:
        """Whether every row is looked at."""
        return len(self.ids) == self.table.count

    @property
    def z(self) -> Callable[[Rows], Tensor]:
        """What makes the hypergradients of rows, where the trackers have all that it takes."""
        assert isinstance(self.trackers, Matrices)
        return self.trackers.hypergradients

    def storm(self, name: str, tracker: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """The step of a tracker that also shrinks where nobody looks."""
        return storm(tracker, new, old, self.betas[name], self.scale)

    def msvr(self, name: str, tracker: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """The step of a tracker that rests where nobody looks."""
        return msvr(tracker, new, old, self.betas[name], self.drawing.share(self.table.count))


@dataclass(frozen=True)
class Variant:
    """A row of a table of variants.

    Attributes:
        trackers: what is tracked.
        direction: d after a step, from the look, the trackers after the step, and what was measured.
        mean: d is the mean of all z at all times: it can be made anew from the rows, and needs equal weights.
        floored: H is kept above its floor also in rows that are not looked at.
        rests: rows that are not looked at stay as they are.
    """

    trackers: type[Trackers]
    direction: Callable[[Look, Rows, Measured], Tensor]
    mean: bool = False
    floored: bool = False
    rests: bool = False


def exact(look: Look, tracked: Rows, measured: Measured) -> Tensor:
    """The mean of all z, from the change of those looked at."""
    z, m = look.z, look.table.count
    if look.whole:
        return z(tracked).mean(0)
    beta = look.trackers.resting(look.betas["d"])
    return storm(look.direction, z(tracked).sum(0) / m, z(look.now).sum(0) / m, beta)


def probed(look: Look, tracked: Rows, measured: Measured) -> Tensor:
    """STORM over z of probes, before and after the step."""
    z = look.z
    if look.whole:
        return z(tracked).mean(0)
    probes = look.drawing.probe(look.table.count, look.generator)
    before, after = (look.table.gather(probes, clock) for clock in look.clocks)
    where = torch.searchsorted(look.ids, probes).clamp_max(len(look.ids) - 1)
    both = look.ids[where] == probes
    for name, values in tracked.items():
        after[name][both] = values[where[both]]
    return storm(look.direction, z(after).mean(0), z(before).mean(0), look.betas["d"])


def summed(look: Look, tracked: Rows, measured: Measured) -> Tensor:
    """STORM over sums that were measured as such."""
    return storm(look.direction, measured.sums[0], measured.sums[1], look.betas["d"])


def blockwise(look: Look, tracked: Rows, measured: Measured) -> Tensor:
    """STORM over hypergradients with this sample's factors and the tracked H, after and before the step."""
    weights = (look.scale / look.table.count).to(look.direction)
    new, old = (
        weights @ corrected(part["u"], part["V"], rows["H"], part["v"])
        for part, rows in ((measured.new, tracked), (measured.old, look.now))
    )
    return storm(look.direction, new, old, look.betas["d"])

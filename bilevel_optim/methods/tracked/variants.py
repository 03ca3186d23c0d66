"""Variants of a method: its trackers, and the rule that makes the direction of x from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...hypergradient.estimate import Write
from ...hypergradient.recursive import flat
from ...hypergradient.storm import corrected, msvr, storm
from ...optimizer.step import StepInputs
from ...oracle.oracle import Oracle
from ...problem.parameters import is_number, require
from .drawing import Drawing, Drawn, Source, others
from .rows import Clock, Rows, Table
from .trackers import Matrices, Measured, Trackers

__all__ = [
    "Look",
    "Variant",
    "are_ceilings",
    "blockwise",
    "device_named",
    "exact",
    "is_weight",
    "probed",
    "settled",
    "shared",
    "stays_current",
    "summed",
]


EAGER = 1 << 16  # entries of all rows together up to which every row is kept current


@dataclass(frozen=True)
class Look:
    """The rows that a step visits, with everything needed to update them.

    Attributes:
        table: all rows.
        ids, now: numbers of the visited rows, in increasing order, and these rows. If rows are split over ranks, those
            of this rank, counted from its first one.
        whole: True if every row is visited.
        scale: share of the draws of each task over its probability, 1 in expectation over the draws.
        betas: mixing weights, by name.
        clocks: clocks before and after the step.
        drawn: everything already drawn for the step.
        direction: d before the step.
        trackers, drawing: those of the method.
        inputs: those of the step.
    """

    table: Table
    ids: Tensor
    now: Rows
    whole: bool
    scale: Tensor
    betas: dict[str, float]
    clocks: tuple[Clock, Clock]
    drawn: Drawn
    direction: Tensor
    trackers: Trackers
    drawing: Drawing
    inputs: StepInputs

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Return sums over all visited rows, from those over this rank's."""
        return self.inputs.ranks.total(*sums) if self.table.split else sums

    @property
    def z(self) -> Callable[[Rows], Tensor]:
        """Function from rows to their hypergradients; needs `Matrices` as trackers."""
        assert isinstance(self.trackers, Matrices)
        return self.trackers.hypergradients

    def storm(self, name: str, tracker: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """Return a tracker after a STORM step; unvisited rows of it shrink."""
        return storm(tracker, new, old, self.betas[name], self.scale)

    def msvr(self, name: str, tracker: Tensor, new: Tensor, old: Tensor) -> Tensor:
        """Return a tracker after an MSVR step; unvisited rows of it rest."""
        return msvr(tracker, new, old, self.betas[name], self.drawing.share(self.table.total))


def shared(look: Look, measure: Callable[[slice], Measured], oracle: Oracle) -> Measured:
    """Measure the visited rows, split over the ranks: each takes its own, or every n-th if every rank has all rows."""
    ranks, split, n, x = look.inputs.ranks, look.table.split, len(look.ids), flat(oracle.x)[0]
    mine, trackers = slice(None) if split else slice(ranks.rank, n, ranks.world), look.trackers
    shapes = trackers.shapes(len(x), look.now["y"].shape[1])
    new, old = ({name: x.new_zeros(n, *shape) for name, shape in shapes.items()} for _ in range(2))
    loss, sums = x.new_zeros(()), x.new_zeros(2, 0 if trackers.apart else len(x))
    if range(n)[mine]:
        loss, found, last, sums = measure(mine)
        for name in shapes:
            new[name][mine], old[name][mine] = found[name], last[name]
    else:
        oracle.session.note_reached(oracle.x)  # without rows this rank cannot tell
    if split:
        loss, sums = ranks.total(loss.to(x), sums)
        return Measured(loss, new, old, sums)
    loss, sums, *parts = ranks.total(loss.to(x), sums, *new.values(), *old.values())
    new, old = (dict(zip(shapes, half, strict=True)) for half in (parts[: len(new)], parts[len(new) :]))
    return Measured(loss, new, old, sums)


@dataclass(frozen=True)
class Variant:
    """One variant of a method.

    Attributes:
        trackers: class of the trackers.
        direction: returns d after a step, from the look, the trackers after the step, and the measurements.
        mean: d is the mean of all z at all times: it can be recomputed from the rows, and needs equal weights.
        floored: H stays above its floor in unvisited rows too.
        rests: unvisited rows do not change.
    """

    trackers: type[Trackers]
    direction: Callable[[Look, Rows, Measured], Tensor]
    mean: bool = False
    floored: bool = False
    rests: bool = False


def stays_current(table: Table, lazy: bool | None) -> bool:
    """Return True if unvisited rows are brought up to date in every step."""
    return lazy is False or (lazy is None and table.count * table.width <= EAGER)


def settled(look: Look, rows: Rows, rule: Variant, lazy: bool | None) -> tuple[list[Write], Clock, Tensor | None]:
    """Return the writes of visited rows and of those brought up to date, the new clock, and the mean z if computed."""
    table, trackers, after = look.table, look.trackers, look.clocks[1]
    final = after.rebased() if after.exhausted else after
    writes = table.writes(look.ids, rows, final)
    z = trackers.hypergradients if after.exhausted and isinstance(trackers, Matrices) and rule.mean else None
    total = None if z is None else z(rows).sum(0)
    if after.exhausted or (stays_current(table, lazy) and not rule.rests):
        late = look.drawn.others
        for ids in table.chunks(others(look.ids, table.count) if late is None else late):
            caught = table.gather(ids, after)
            writes += table.writes(ids, caught, final)
            total = None if z is None or total is None else total + z(caught).sum(0)
    return writes, final, None if total is None else look.total(total)[0] / table.total


def exact(look: Look, tracked: Rows, measured: Measured) -> Tensor:
    """Return the mean of all z, updated by the change of the visited ones."""
    z, m = look.z, look.table.total
    if look.whole:
        return look.total(z(tracked).sum(0) / m)[0]
    new, old = look.total(z(tracked).sum(0) / m, z(look.now).sum(0) / m)
    return storm(look.direction, new, old, look.trackers.resting(look.betas["d"]))


def probed(look: Look, tracked: Rows, measured: Measured) -> Tensor:
    """Return d by STORM over z of probes, before and after the step."""
    z, table = look.z, look.table
    if look.whole:
        return look.total(z(tracked).sum(0) / table.total)[0]
    drawn = look.drawn.probes
    if drawn is None:
        drawn = look.drawing.probe(table.total, Source.of(look.inputs))
    probes = drawn[table.split.local_positions(drawn)] - table.split.start if table.split else drawn
    before, after = (table.gather(probes, clock) for clock in look.clocks)
    if len(look.ids):
        where = torch.searchsorted(look.ids, probes).clamp_max(len(look.ids) - 1)
        both = (look.ids[where] == probes).to(look.direction.device)
        for name, values in tracked.items():
            seen = both.view(-1, *[1] * (values.dim() - 1))
            after[name] = torch.where(seen, values[where.to(values.device)].to(after[name]), after[name])
    new, old = look.total(z(after).sum(0) / len(drawn), z(before).sum(0) / len(drawn))
    return storm(look.direction, new, old, look.betas["d"])


def summed(look: Look, tracked: Rows, measured: Measured) -> Tensor:
    """Return d by STORM over hypergradients that were measured as sums."""
    return storm(look.direction, measured.sums[0], measured.sums[1], look.betas["d"])


def blockwise(look: Look, tracked: Rows, measured: Measured) -> Tensor:
    """Return d by STORM over hypergradients of this sample's factors and the tracked H, after and before the step."""
    weights = (look.scale / look.table.total).to(look.direction)
    new, old = look.total(*(
        weights @ corrected(part["u"], part["V"], rows["H"], part["v"])
        for part, rows in ((measured.new, tracked), (measured.old, look.now))
    ))  # fmt: skip
    return storm(look.direction, new, old, look.betas["d"])


DEVICE = "Invalid {name} value: {value} (it must be a torch.device, or its name, such as 'cpu' or 'cuda:0')"


def are_ceilings(value: Any, names: Collection[str]) -> bool:
    """Return True for a dict of positive numbers by these names."""
    return isinstance(value, dict) and set(value) <= set(names) and all(is_number(c) and c > 0 for c in value.values())


def is_weight(value: Any) -> bool:
    """Return True for a number that can be a mixing weight."""
    return is_number(value) and 0 <= float(value) < math.inf


def device_named(given: Any) -> torch.device | None:
    """Return the device that ``state_device`` names."""
    if given is None:
        return None
    require("state_device", given, isinstance(given, (str, torch.device)), DEVICE)
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise ValueError(
            f"Invalid state_device value: {given} (torch has no device of that name; use one such as 'cpu' or 'cuda:0')"
        ) from error

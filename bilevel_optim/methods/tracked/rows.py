"""Per-task rows: a method's state of each of m tasks, touched only for the tasks that a step visits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...distributed.sharding import Split
from ...hypergradient.estimate import Write
from ...hypergradient.recursive import flat, shaped
from ...hypergradient.storm import floor
from ...problem.placement import constant, pinned, to_device
from ...problem.vector import Vector
from ...tracing import is_tracing

__all__ = [
    "CHUNK",
    "STAMPS",
    "Clock",
    "GraphClock",
    "Rows",
    "Table",
    "about_to_end",
    "clock_of",
    "pack_clock",
    "table_of",
]

REBASE = -16.0  # below that, exp(sum of logarithms) leaves too few digits in the differences of prefix sums
HISTORY = 1 << 14  # steps that are stored one by one if there is a radius
CHUNK = 1 << 22  # entries handled at a time in a pass over all rows
STAMPS = ("log", "drift", "age")  # tables that record the time at which a row is valid

Rows = dict[str, Tensor]  # some rows at one time, by name
Sums = tuple[tuple[float, ...], ...]


class Clock(NamedTuple):
    r"""The time, and prefix sums over the steps that rows have rested through.

    Attributes:
        time: number of steps.
        log: :math:`\Lambda`, for each tracker.
        drift, last: G now and at the last step, for each position and learning rate.
        history: for each step since the last rebase: mixing weight of the first velocity, part of a step, learning
            rate. Kept only if there is a radius.
    """

    time: int
    log: tuple[float, ...]
    drift: Sums
    last: Sums
    history: tuple[tuple[float, float, float], ...] = ()

    @classmethod
    def started(cls, trackers: int, positions: int, rates: int, time: int = 0) -> Clock:
        """Return the clock of rows that are all current."""
        zeros = ((0.0,) * rates,) * positions
        return cls(time, (0.0,) * trackers, zeros, zeros)

    @property
    def still(self) -> bool:
        """True if no row has moved without a visit since the last rebase."""
        return not (any(self.log) or any(map(any, self.drift)))

    @property
    def exhausted(self) -> bool:
        """True if it is time to bring all rows up to date and restart the sums."""
        return min(self.log) < REBASE or len(self.history) >= HISTORY

    def waited(self) -> Clock:
        """Return the clock one step later, if unvisited rows do not move."""
        return self._replace(time=self.time + 1)

    def ticked(self, table: Table, betas: Mapping[str, float], rates: Tensor, tau: float, keep: bool) -> Clock:
        """Return the clock one step later, for these mixing weights, learning rates and part of a step."""
        numbers: list[float] = rates.tolist()
        levels = {name: old + _lost(betas[name]) for name, old in zip(table.trackers, self.log, strict=True)}
        drift = tuple(
            tuple(old + rate * tau * math.exp(levels[velocity]) for old, rate in zip(sums, numbers, strict=False))
            for sums, (_, velocity) in zip(self.drift, table.moving, strict=True)
        )
        passed = ((betas[table.moving[0][1]], tau, numbers[0]),) if keep else ()
        return Clock(self.time + 1, tuple(levels.values()), drift, self.drift, self.history + passed)

    def rebased(self) -> Clock:
        """Return the clock with all rows current at the same time."""
        return Clock.started(len(self.log), len(self.drift), len(self.drift[0]), self.time)

    def stamps(self, device: torch.device) -> Rows:
        """Return the time and the sums as tensors; a row keeps those named in `STAMPS`."""
        sums = [entry for part in (*self.drift, *self.last) for entry in part]
        time, log, *rest = _taken_apart(
            to_device([self.time, *self.log, *sums], device, torch.float64), len(self.log), len(self.drift)
        )
        return {"log": log, "drift": rest[0], "last": rest[1], "age": time.long()}


@dataclass(frozen=True)
class GraphClock:
    """Clock of a traced step: like `Clock`, but without a history.

    The host checks the clock before each step, and runs eagerly any step that would exhaust it.

    Attributes:
        time, log, drift, last: as those of `Clock`, on the device of the tables.
        still: True if no row ever moves without a visit.
        packed: the clock as the host keeps it; None once it has moved.
    """

    time: Tensor
    log: Tensor
    drift: Tensor
    last: Tensor
    still: bool
    packed: Tensor | None = None
    exhausted: ClassVar[bool] = False

    def waited(self) -> GraphClock:
        return replace(self, time=self.time + 1, packed=None)

    def ticked(self, table: Table, betas: Mapping[str, float], rates: Tensor, tau: float, keep: bool) -> GraphClock:
        log = self.log + constant([_lost(betas[name]) for name in table.trackers], self.log)
        shrunk = torch.stack([log[table.trackers.index(velocity)].exp() for _, velocity in table.moving])
        drift = self.drift + rates[: self.drift.shape[1]].to(log) * tau * shrunk.unsqueeze(1)
        return GraphClock(self.time + 1, log, drift, self.drift, self.still)

    def rebased(self) -> GraphClock:
        raise NotImplementedError("a traced step cannot restart the sums: the host does so in an eager step")

    def stamps(self, device: torch.device) -> Rows:
        age = self.time.long().to(device)
        return {"log": self.log.to(device), "drift": self.drift.to(device), "last": self.last.to(device), "age": age}


def clock_of(
    found: Any, trackers: int, positions: int, device: torch.device, *, still: bool = False
) -> Clock | GraphClock:
    """Return the clock packed by `pack_clock`; in a graph on a device, and ``still`` if unvisited rows never move."""
    if not isinstance(found, Tensor):
        return Clock(*found)
    if is_tracing():
        return GraphClock(*_taken_apart(to_device(found, device), trackers, positions), still, found)
    time, log, drift, last = _taken_apart(found, trackers, positions)
    tuples = (tuple(map(tuple, t.tolist())) for t in (drift, last))
    return Clock(int(time), tuple(log.tolist()), *tuples)


def _taken_apart(numbers: Tensor, trackers: int, positions: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split one tensor into the time, logarithms and two sums of a clock."""
    rates = (len(numbers) - 1 - trackers) // (2 * positions)
    time, log, *sums = torch.split(numbers, [1, trackers, positions * rates, positions * rates])
    drift, last = (t.view(positions, rates) for t in sums)
    return time[0], log, drift, last


def pack_clock(clock: Clock | GraphClock, device: torch.device) -> Any:
    """Return a clock as an optimizer keeps it: one host tensor, an argument of graphs; with a history, a tuple.

    A graph copies it to the device without waiting.
    """
    if isinstance(clock, GraphClock):
        if clock.packed is not None:
            return clock.packed
        return torch.cat([clock.time.reshape(1), clock.log, clock.drift.flatten(), clock.last.flatten()]).cpu()
    if clock.history:
        return tuple(clock)
    sums = [entry for part in (*clock.drift, *clock.last) for entry in part]
    return pinned(torch.tensor([clock.time, *clock.log, *sums], dtype=torch.float64, device="cpu"), device)


def about_to_end(found: Tensor, trackers: Sequence[str], betas: Mapping[str, float]) -> bool:
    """Return True if one more step would exhaust the clock packed by `pack_clock`."""
    logs = found[1 : 1 + len(trackers)].tolist()
    return any(old + _lost(betas[name]) < REBASE for name, old in zip(trackers, logs, strict=True))


def _lost(beta: float) -> float:
    """Return the change of a tracker's logarithm in a step with this weight."""
    return math.log(max(1 - beta, 1e-16))


@dataclass(frozen=True)
class Table:
    r"""Tensors with one row per task; each step changes a few rows by data and all others by a known rule.

    In a step that does not visit a row, each of its trackers X shrinks, :math:`X \leftarrow (1-\beta) X`. Each position
    y moves along its velocity w, :math:`y \leftarrow (1-\tau)\, y + \tau\, \Pi(y - \text{lr}\, w)` with w already
    shrunk. Both have closed forms in prefix sums over the steps, so a row catches up at once at its next visit, however
    many steps it missed:

    .. math::
        X_t = e^{\Lambda_t - \Lambda_a} X_a, \qquad y_t = y_a - e^{-\Lambda_a} (G_t - G_a)\, w_a,
        \qquad \Lambda_t = \sum_{s<t} \log(1 - \beta_s), \quad G_t = \sum_{s<t} \tau_s \text{lr}_s e^{\Lambda_{s+1}}.

    A row keeps :math:`\Lambda_a` and :math:`G_a` of the time at which it is valid. Nothing here writes: `gather`
    returns rows, `writes` returns the writes that store them.

    Attributes:
        positions: tensors of the first position y, each (m, ...); if rows are split over ranks, this rank's rows.
        tables: all other tensors by name, with the same rows: trackers, positions, their values ``NAME_last`` at the
            last step, other state of a method, and `STAMPS`.
        trackers: names of the tensors that shrink.
        moving: (position, velocity) names.
        groups: for each entry of a row of y, the index of its learning rate.
        least: floor of the eigenvalues of ``H``, also applied to unvisited rows; None: no floor.
        radius: radius of the ball onto which :math:`\Pi` projects y.
        split: place of these rows among those of all ranks.
    """

    positions: Vector
    tables: Rows
    trackers: tuple[str, ...]
    moving: tuple[tuple[str, str], ...]
    groups: Tensor
    least: float | None
    radius: float
    split: Split

    @property
    def count(self) -> int:
        """Number of rows; if they are split, of this rank's."""
        return len(self.positions[0])

    @property
    def total(self) -> int:
        """Number of rows of all ranks."""
        return self.split.total

    @property
    def device(self) -> torch.device:
        return self.tables["age"].device

    @property
    def width(self) -> int:
        """Number of entries of a row without y."""
        return sum(t[0].numel() for name, t in self.tables.items() if name not in STAMPS)

    def spread(self, rates: Tensor) -> Tensor:
        """Return the learning rate of each entry of a row of y."""
        return to_device(rates[self.groups], self.positions[0].device)

    def gather(self, ids: Tensor, clock: Clock | GraphClock) -> Rows:
        """Return rows at the clock's time, on the device of y, with the positions' last values as ``NAME_last``."""
        host, ids, home = ids, to_device(ids, self.device), self.positions[0].device
        rows = {name: t[ids] for name, t in self.tables.items()}
        log, drift, age = (rows.pop(name) for name in STAMPS)
        rows["y"] = flat([t[self._at(home, host, ids)] for t in self.positions], len(ids)).to(self.device)
        now = {} if clock.still else clock.stamps(self.device)
        for p, (name, velocity) in enumerate(self.moving):
            at, last = rows[name], rows[name]
            if now:
                unit, along = torch.exp(-log[:, self.trackers.index(velocity)]).unsqueeze(-1), rows[velocity]
                far, near = (unit * (now[key][p] - drift[:, p]) for key in ("drift", "last"))
                groups = to_device(self.groups, self.device)
                rows[name], last = (at - step[:, groups].to(at.dtype) * along for step in (far, near))
                if name == "y" and math.isfinite(self.radius):
                    assert isinstance(clock, Clock)
                    self._confine(rows, at, along, far[:, 0], last, clock, age)
            fresh = (age == clock.time).unsqueeze(-1)
            rows[f"{name}_last"] = torch.where(fresh, rows[f"{name}_last"], last)
        if now:
            for name, factor in zip(self.trackers, torch.exp(now["log"] - log).unbind(1), strict=True):
                rows[name] = rows[name] * factor.to(rows[name].dtype).view(-1, *[1] * (rows[name].dim() - 1))
            if self.least is not None:
                # Once is enough: shrinking and flooring at every step equals all the shrinking, then flooring once.
                rows["H"] = floor(rows["H"], self.least).value
        return {name: t.to(home) for name, t in rows.items()}

    def writes(self, ids: Tensor, rows: Rows, clock: Clock | GraphClock) -> list[Write]:
        """Return the writes that store rows, valid at the clock's time, in the tables."""
        there, live = to_device(ids, self.device), self.positions
        valid = {**rows, **clock.stamps(self.device)}
        y = zip(live, shaped(rows["y"], live.lane(0)), strict=True)
        return [Write(t, there, valid[name].to(t)) for name, t in self.tables.items()] + [
            Write(t, self._at(t.device, ids, there), values) for t, values in y
        ]

    def _at(self, device: torch.device, ids: Tensor, there: Tensor) -> Tensor:
        """Return row numbers on a device; ``there`` holds them on the tables' device."""
        return there if there.device == device else to_device(ids, device)

    def chunks(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield row numbers in parts of bounded size."""
        size = max(CHUNK // max(self.width + sum(t[0].numel() for t in self.positions), 1), 1)
        yield from torch.split(ids, size) if len(ids) else ()

    def _confine(
        self, rows: Rows, at: Tensor, along: Tensor, far: Tensor, last: Tensor, clock: Clock, age: Tensor
    ) -> None:
        """Correct y and ``last`` of rows that may have touched the sphere, by a recursion in two scalars per step."""
        y, w, history = at.double(), along.double(), clock.history
        largest = max((lr for *_, lr in history), default=0.0)
        # The points before projection lie on a line: inside, if both ends are. A row may have started outside.
        ends = torch.stack([y, y - (far + largest).unsqueeze(-1) * w])
        touched = (torch.linalg.vector_norm(ends, dim=-1) > self.radius).any(0)
        for i in touched.nonzero().flatten().tolist():
            yy, yw, ww = (float(a @ b) for a, b in ((y[i], y[i]), (y[i], w[i]), (w[i], w[i])))
            a, b, c = 1.0, 0.0, 1.0
            before = (a, b)
            for beta, tau, lr in history[len(history) - (clock.time - int(age[i])) :]:
                before = (a, b)
                c *= 1 - beta
                moved = b - lr * c
                length = math.sqrt(max(a * a * yy + 2 * a * moved * yw + moved * moved * ww, 0.0))
                factor = 1.0 if length <= self.radius else self.radius / length
                a, b = (1 - tau) * a + tau * factor * a, (1 - tau) * b + tau * factor * moved
            rows["y"][i] = (a * y[i] + b * w[i]).to(at.dtype)
            last[i] = (before[0] * y[i] + before[1] * w[i]).to(at.dtype)


def table_of(rows: Rows, clock: Clock | GraphClock, device: torch.device) -> Rows:
    """Return tables that consist of these rows except y, all valid at the clock's time."""
    stamps, m = clock.stamps(device), len(rows["y"])
    return {name: t.to(device) for name, t in rows.items() if name != "y"} | {
        name: stamps[name].expand(m, *stamps[name].shape).clone() for name in STAMPS
    }

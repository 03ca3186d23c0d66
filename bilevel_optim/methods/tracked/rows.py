"""Per-task rows: a method's state of each of m tasks, touched only for the tasks that a step visits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    "Rows",
    "Table",
    "about_to_end",
    "table_of",
]

REBASE = -16.0  # below that, exp(sum of logarithms) leaves too few digits in the differences of prefix sums
HISTORY = 1 << 14  # steps that are stored one by one if a position is limited
CHUNK = 1 << 22  # entries handled at a time in a pass over all rows
STAMPS = ("log", "drift", "age")  # tables that record the time at which a row is valid

Rows = dict[str, Tensor]  # some rows at one time, by name


@dataclass(frozen=True)
class Clock:
    r"""The time, and prefix sums over the steps that rows have rested through.

    In a graph the host checks the clock before each step, and runs eagerly any step that would exhaust it.

    Attributes:
        numbers: one float64 tensor of the time, the logarithms :math:`\Lambda` of the trackers, and the sums G now and
            at the last step, for each position and learning rate. It is on the host, or in a graph on the tables'
            device.
        trackers, positions: number of these.
        history: for each step since the last rebase: mixing weight of the first velocity, part of a step, learning
            rate, and the weights of the other velocities. Kept only if a position is limited.
        rests: True if no row of a graph ever moves without a visit.
        kept: the clock as the optimizer keeps it; None once it has moved.
    """

    numbers: Tensor
    trackers: int
    positions: int
    history: tuple[tuple[float, ...], ...] = ()
    rests: bool = False
    kept: Any = None

    @classmethod
    def started(cls, trackers: int, positions: int, rates: int) -> Clock:
        """Return the clock of rows that are all current."""
        size = 1 + trackers + 2 * positions * rates
        return cls(torch.zeros(size, dtype=torch.float64, device="cpu"), trackers, positions)

    @classmethod
    def of(cls, kept: Any, trackers: int, positions: int, device: torch.device, rests: bool) -> Clock:
        """Return the clock that an optimizer keeps; in a graph, on a device."""
        if isinstance(kept, Tensor):
            numbers = to_device(kept, device) if is_tracing() else kept
            return cls(numbers, trackers, positions, rests=rests, kept=kept)
        time, log, drift, last, history = kept
        sums = [entry for part in (*drift, *last) for entry in part]
        numbers = torch.tensor([time, *log, *sums], dtype=torch.float64, device="cpu")
        return cls(numbers, trackers, positions, history)

    def packed(self, device: torch.device) -> Any:
        """Return the clock as an optimizer keeps it: one host tensor, an argument of graphs; with a history, a tuple.

        A graph copies it to the device without waiting.
        """
        if self.kept is not None:
            return self.kept
        if is_tracing():
            return self.numbers.cpu()
        if not self.history:
            return pinned(self.numbers, device)
        time, log, drift, last = self._parts()
        return int(time), tuple(log.tolist()), drift.tolist(), last.tolist(), self.history

    def _parts(self, device: torch.device | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the time, the logarithms and the two sums, perhaps on another device."""
        numbers = self.numbers if device is None else to_device(self.numbers, device)
        size = (len(numbers) - 1 - self.trackers) // 2
        time, log, *sums = torch.split(numbers, [1, self.trackers, size, size])
        drift, last = (t.view(self.positions, -1) for t in sums)
        return time[0], log, drift, last

    @property
    def time(self) -> Tensor | int:
        """Number of steps."""
        return self.numbers[0] if is_tracing() else int(self.numbers[0])

    @property
    def still(self) -> bool:
        """True if no row has moved without a visit since the last rebase."""
        return self.rests if is_tracing() else not bool(self.numbers[1:].any())

    @property
    def exhausted(self) -> bool:
        """True if it is time to bring all rows up to date and restart the sums."""
        return not is_tracing() and (bool(self._parts()[1].min() < REBASE) or len(self.history) >= HISTORY)

    def waited(self) -> Clock:
        """Return the clock one step later, if unvisited rows do not move."""
        return replace(self, numbers=torch.cat([self.numbers[:1] + 1, self.numbers[1:]]), kept=None)

    def ticked(self, table: Table, betas: Mapping[str, float], rates: Tensor, tau: float) -> Clock:
        """Return the clock one step later, for these mixing weights, learning rates and part of a step."""
        time, log, drift, _ = self._parts()
        log = log + constant([_lost(betas[name]) for name in table.trackers], log)
        shrunk = torch.stack([log[table.trackers.index(velocity)].exp() for _, velocity in table.moving])
        moved = drift + rates[: drift.shape[1]].to(log) * tau * shrunk.unsqueeze(1)
        numbers = torch.cat([time.reshape(1) + 1, log, moved.flatten(), drift.flatten()])
        first, *others = (betas[velocity] for _, velocity in table.moving)
        passed = ((first, tau, float(rates[0]), *others),) if table.radii else ()
        return replace(self, numbers=numbers, history=self.history + passed, kept=None)

    def rebased(self) -> Clock:
        """Return the clock with all rows current at the same time."""
        numbers = torch.cat([self.numbers[:1], torch.zeros_like(self.numbers[1:])])
        return replace(self, numbers=numbers, history=(), kept=None)

    def stamps(self, device: torch.device) -> Rows:
        """Return the time and the sums on a device; a row keeps those named in `STAMPS`."""
        time, log, drift, last = self._parts(device)
        return {"log": log, "drift": drift, "last": last, "age": time.long()}


def about_to_end(found: Tensor, trackers: Sequence[str], betas: Mapping[str, float]) -> bool:
    """Return True if one more step would exhaust the clock that an optimizer keeps."""
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
        radii: radii of the balls onto which :math:`\Pi` projects positions, by name; others move freely.
        split: place of these rows among those of all ranks.
    """

    positions: Vector
    tables: Rows
    trackers: tuple[str, ...]
    moving: tuple[tuple[str, str], ...]
    groups: Tensor
    least: float | None
    radii: Mapping[str, float]
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

    def gather(self, ids: Tensor, clock: Clock) -> Rows:
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
                if name in self.radii:
                    self._confine(rows, p, at, far[:, 0], last, clock, age)
            fresh = (age == clock.time).unsqueeze(-1)
            rows[f"{name}_last"] = torch.where(fresh, rows[f"{name}_last"], last)
        if now:
            for name, factor in zip(self.trackers, torch.exp(now["log"] - log).unbind(1), strict=True):
                rows[name] = rows[name] * factor.to(rows[name].dtype).view(-1, *[1] * (rows[name].dim() - 1))
            if self.least is not None:
                # Once is enough: shrinking and flooring at every step equals all the shrinking, then flooring once.
                rows["H"] = floor(rows["H"], self.least).value
        return {name: t.to(home) for name, t in rows.items()}

    def writes(self, ids: Tensor, rows: Rows, clock: Clock) -> list[Write]:
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
        self, rows: Rows, p: int, before: Tensor, far: Tensor, last: Tensor, clock: Clock, age: Tensor
    ) -> None:
        """Correct position p of rows that may have touched its sphere, and ``last``, by a recursion in two scalars.

        ``before`` is the position at each row's own time, and ``far`` how far it has moved since if nothing limits it.
        """
        name, velocity = self.moving[p]
        y, w, history, radius = before.double(), rows[velocity].double(), clock.history, self.radii[name]
        largest = max((lr for _, _, lr, *_ in history), default=0.0)
        # The points before projection lie on a line: inside, if both ends are. A row may have started outside.
        ends = torch.stack([y, y - (far + largest).unsqueeze(-1) * w])
        touched = (torch.linalg.vector_norm(ends, dim=-1) > radius).any(0)
        for i in touched.nonzero().flatten().tolist():
            yy, yw, ww = (float(a @ b) for a, b in ((y[i], y[i]), (y[i], w[i]), (w[i], w[i])))
            a, b, c = 1.0, 0.0, 1.0
            step_before = (a, b)
            for beta, tau, lr, *others in history[len(history) - int(clock.time - age[i]) :]:
                step_before = (a, b)
                c *= 1 - (beta, *others)[min(p, len(others))]  # older checkpoints have the first weight only
                moved = b - lr * c
                length = math.sqrt(max(a * a * yy + 2 * a * moved * yw + moved * moved * ww, 0.0))
                factor = 1.0 if length <= radius else radius / length
                a, b = (1 - tau) * a + tau * factor * a, (1 - tau) * b + tau * factor * moved
            rows[name][i] = (a * y[i] + b * w[i]).to(before.dtype)
            last[i] = (step_before[0] * y[i] + step_before[1] * w[i]).to(before.dtype)


def table_of(rows: Rows, clock: Clock, device: torch.device) -> Rows:
    """Return tables that consist of these rows except y, all valid at the clock's time."""
    stamps, m = clock.stamps(device), len(rows["y"])
    return {name: t.to(device) for name, t in rows.items() if name != "y"} | {
        name: stamps[name].expand(m, *stamps[name].shape).clone() for name in STAMPS
    }

"""What the methods with a memory of each lower problem share: rows, two points with one sample, sizes of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from ...distributed.sharding import Split
from ...hypergradient import Estimate
from ...hypergradient.estimate import Write
from ...hypergradient.recursive import Points, flat, shaped
from ...hypergradient.storm import ball
from ...optimizer.base import BilevelOptimizer, CommonOptions
from ...optimizer.memory import TABLE
from ...optimizer.step import Given, Update
from ...oracle.oracle import Oracle
from ...problem.parameters import Params, by_level, is_count, is_number, require
from ...problem.tasks import TaskDraws, task_count
from ...problem.vector import Vector
from . import watching
from .drawing import CHANCES, Drawing
from .rows import CHUNK, STAMPS, Clock, Rows, Table, table_of
from .trackers import Matrices, Measured
from .variants import Look, Variant, settled, shared

__all__ = ["RecursiveOptimizer", "RecursiveOptions", "is_weight"]

SCHEDULES = ("constant", "cube_root")
DEFAULT_BETA = 0.1


class RecursiveOptions(CommonOptions, total=False):
    """Keyword arguments that the recursive methods share, see `RecursiveOptimizer`."""

    beta_unit: str
    averaging: float
    ceilings: dict[str, float] | None
    radius: float
    schedule: str
    schedule_offset: float
    restarts: int | None
    initial_steps: int
    state_device: torch.device | str | None
    lazy: bool | None


class RecursiveOptimizer(BilevelOptimizer):
    r"""Base class of the single-loop methods with trackers of each of m lower problems.

    Without ``tasks`` there is one lower problem, m = 1; with them every lower tensor has a leading dimension m. A step
    gathers the rows of some problems, and says what becomes of them; all others follow a known rule (`Table`).

    Args:
        variant: what is tracked, and how d follows from it.
        drawing: chooses the tasks of a step.
        beta, floor, beta_unit, averaging, ceilings, radius, schedule, schedule_offset, restarts, initial_steps,
            state_device, lazy: see `SVRB` and `RSVRB`.

    State: of the first lower parameter ``rows.NAME``, with a row for each problem that mixes all lower parameters, for
    each tracker, for ``y_last`` (y at the last step; likewise r), and for ``log``, ``drift`` and ``age``, which say at
    what time a row is valid. Of the upper parameters ``direction`` (d) and ``previous`` (x at the last step).
    ``numbers["clock"]``: the time, and sums over the steps by which rows catch up.
    """

    def __init__(
        self,
        upper: Params,
        lower: Params,
        variant: Variant,
        drawing: Drawing,
        *,
        lr: float,
        lower_lr: float,
        beta: float | dict[str, float],
        floor: float,
        beta_unit: str = "q",
        averaging: float = 1.0,
        ceilings: dict[str, float] | None = None,
        radius: float = math.inf,
        schedule: str = "constant",
        schedule_offset: float = 8.0,
        restarts: int | None = None,
        initial_steps: int = 0,
        state_device: torch.device | str | None = None,
        lazy: bool | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        kind = variant.trackers
        names = (*kind.weighted, "d")
        given = beta if isinstance(beta, dict) else dict.fromkeys(names, beta)
        require("beta", beta, set(given) <= set(names) and all(is_weight(b) for b in given.values()))
        require("floor", floor, is_number(floor) and 0 < floor < math.inf)
        require("beta_unit", beta_unit, beta_unit in ("q", "absolute"))
        require("averaging", averaging, is_number(averaging) and 0 < averaging <= 1)
        limits = {} if ceilings is None else ceilings
        valid = (
            isinstance(limits, dict)
            and set(limits) <= set(kind.limits)
            and all(is_number(c) and c > 0 for c in limits.values())
        )
        require("ceilings", ceilings, valid)
        require("radius", radius, is_number(radius) and radius > 0)
        require("schedule", schedule, schedule in SCHEDULES)
        require("schedule_offset", schedule_offset, is_number(schedule_offset) and 0 <= schedule_offset < math.inf)
        require("restarts", restarts, restarts is None or (is_count(restarts) and restarts > 0))
        require("initial_steps", initial_steps, is_count(initial_steps))
        require("lazy", lazy, lazy is None or isinstance(lazy, bool))
        factory = common.get("lower_optimizer")
        wording = "Invalid lower_optimizer value: {value} (the lower steps are part of the recursion)"
        require("lower_optimizer", factory, factory is None, wording)
        super().__init__(upper, lower, lr=lr, lower_lr=lower_lr, lower_steps=0, **common)
        self.rule, self.drawing, self.trackers = variant, drawing, kind(float(floor), dict(limits))
        moving = {name for pair in kind.moving for name in pair}
        self.variant_of_state = {"rows": sorted({*kind.names, *moving, *drawing.notes})}
        self.beta, self.beta_unit = {name: float(given.get(name, DEFAULT_BETA)) for name in names}, beta_unit
        self.floor, self.averaging, self.radius = float(floor), float(averaging), float(radius)
        self.schedule, self.schedule_offset, self.restarts = schedule, float(schedule_offset), restarts
        self.initial_steps, self.lazy = initial_steps, lazy
        self.state_device = None if state_device is None else _device(state_device)

    # ------------------------------------------------------------------------------------------------ steps

    def estimate(self, oracle: Oracle, given: Given) -> Estimate:
        """One step of the recursion for one lower problem."""
        return self._step(oracle, given, Vector(t.unsqueeze(0) for t in oracle.y))

    def estimate_tasks(self, oracle: Oracle, given: Given, sampler: Any) -> Estimate:
        """One step of the recursion for the rows of some tasks."""
        task_count(sampler, 1)
        sizes = {t.shape[0] if t.dim() else None for t in oracle.y}
        if len(sizes) > 1 or None in sizes or (hasattr(sampler, "__len__") and sizes != {len(sampler)}):
            number = f" of the {len(sampler)}" if hasattr(sampler, "__len__") else ""
            shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(oracle.lower_names(), oracle.y, strict=True))
            raise ValueError(
                f"{type(self).__name__} keeps y of every task: the lower parameters need a leading dimension with one "
                f"row for each{number} tasks, but have shapes {shapes}"
            )
        return self.checked(oracle, given, partial(self._step, y=oracle.y, sampler=sampler))

    def kind_of_step(self, steps: int, numbers: Mapping[str, Any]) -> Any:
        """The host makes the first step, and all if their sizes change with their number."""
        steady = self.schedule == "constant" and self.restarts is None and "clock" in numbers
        return (numbers, tuple(self.beta.items())) if steady else None

    def update(self, x: Vector, gradient: Vector, given: Given) -> Update:
        """The step along d, of the present pace."""
        pace = self._pace(given.steps - 1)  # the step has been counted by now
        return super().update(x, gradient if pace == 1.0 else gradient * pace, given)

    def _step(self, oracle: Oracle, given: Given, y: Vector, sampler: Any = None) -> Estimate:
        table = self._table(given, y)
        if table.split:
            if self.drawing.notes:
                raise ValueError("adaptive probabilities need all rows on every rank: these are split over the ranks")
            oracle = oracle.at(lower=table.positions)
        return (self._on if self._goes_on(table, given) else self._begun)(oracle, given, table, sampler)

    def _goes_on(self, table: Table, given: Given) -> bool:
        """Whether there are rows of these parameters, which may have become more."""
        if not self.warm_start or not {"direction", "previous"} <= given.upper_memory.keys() or not table.tables:
            return False
        moving = {f"{name}{at}" for name, _ in table.moving for at in ("", "_last")} - {"y"}
        if other := {*self.trackers.names, *moving, *self.drawing.notes, *STAMPS} ^ table.tables.keys():
            raise ValueError(f"the state is that of another variant: they differ in {', '.join(sorted(other))}")
        if table.tables["w"].shape[1] != len(table.groups):
            return False
        if (known := len(table.tables["age"])) != table.count:
            name = type(self).__name__
            raise ValueError(f"{name} began with {known} lower problems, but now there are {table.count}")
        return True

    def _begun(self, oracle: Oracle, given: Given, table: Table, sampler: Any) -> Estimate:
        """The first step looks at every task, because the recursion has to start close to the truth."""
        trackers, m, kinds, p = self.trackers, table.total, int(table.groups.max()) + 1, len(table.groups)
        if math.isfinite(self.radius) and kinds > 1:
            raise ValueError("a radius needs all lower parameters in one group, as they make one step of one length")
        x, rates = flat(oracle.x)[0], table.spread(_rates(given))
        loss, direction = torch.zeros((), device=oracle.device), torch.zeros_like(x)
        size = max(CHUNK // (p * (len(x) if trackers.apart else p)), self.drawing.batch(m), 1)
        found: list[Rows] = []
        counts: list[Rows] = []
        for ids in torch.split(torch.arange(table.count, device="cpu"), size):
            draws = self._draws(sampler, ids + table.split.start, given, own=bool(table.split))
            y = flat([t[ids.to(t.device)] for t in table.positions], len(ids))
            for _ in range(self.initial_steps):
                points = Points(oracle, draws, x, y, apart=False)
                y = y - rates.to(y) * flat(points.at(x, y).lower(points.g)[1], len(ids))
            shares = torch.full((len(ids),), 1 / m, dtype=torch.float64, device="cpu")
            points = Points(oracle, draws, x, y, apart=trackers.apart, weights=None if trackers.apart else shares)
            rows = trackers.opened(points, x, y, rates)
            value, total, derivatives = trackers.derivatives(points, x, rows)
            tracked, active = trackers.projected({name: derivatives[name] for name in trackers.names})
            if isinstance(trackers, Matrices):  # otherwise the shares are in the weights
                value, total = value / m, trackers.hypergradients({**derivatives, **tracked}).sum(0) / m
            loss, direction = loss + value, direction + total
            rows, active = self._followed({**rows, **tracked}, tracked, active, given, rates)
            found.append({name: t.to(self.state_device or t.device) for name, t in rows.items()})
            counts.append(active)
        whole = {name: torch.cat([part[name] for part in found]) for name in found[0]}
        active = {name: torch.stack([part[name] for part in counts]).sum() for name in counts[0]}
        if table.split:
            loss, direction, *sums = given.ranks.total(loss.to(x), direction, *(t.to(x) for t in active.values()))
            active = dict(zip(active, sums, strict=True))
        watching.held(oracle.checks, active, m, self.floor)
        clock = Clock.started(len(trackers.shrinking), len(trackers.moving), kinds)
        diagnostics, tables = {**active, "rows_touched": torch.tensor(m, device="cpu")}, self.drawing.opened(m)
        return self._kept(oracle, loss, direction, diagnostics, clock, whole, table=table, tables=tables)

    def _on(self, oracle: Oracle, given: Given, table: Table, sampler: Any) -> Estimate:
        """A later step looks at the rows of some tasks; all others follow their rule."""
        trackers, clock, m = self.trackers, Clock.read(given.numbers), table.total
        drawn, betas = self.drawing.draw(sampler, m, given), self._betas(given, m)
        n = len(drawn.ids)
        after = clock.waited() if n < m else clock  # where every row is looked at, no time passes that one could miss
        if n < m and not self.rule.rests:
            keep = math.isfinite(self.radius)
            after = clock.ticked(table, betas, _rates(given).tolist(), self._tau(given), keep)
        ids, scale = drawn.ids, drawn.scale.to(oracle.device)
        if table.split:
            own = table.split.own(ids)
            ids, scale = ids[own] - table.split.start, scale[own]
        look = Look(
            table, ids, table.gather(ids, clock), n == m, scale, betas, (clock, after),
            flat(given.upper_memory["direction"])[0], trackers, self.drawing, given,
        )  # fmt: skip
        if sampler is not None and not look.whole:
            steady = self.beta_unit == "q" and self.schedule == "constant" and self.restarts is None
            share = self.trackers.resting(max(self.beta.values())) if steady else 0.0
            watching.loud(oracle.checks, share, given.steps)
        measured = self._measured(look, oracle, given, sampler)
        tracked, active = trackers.track(look.now, measured, look.msvr if self.rule.rests else look.storm)
        direction = self.rule.direction(look, tracked, measured)
        rows, active = self._followed({**look.now, **tracked}, measured.new, active, given, table.spread(_rates(given)))
        loss = measured.loss / n if trackers.apart else measured.loss
        squares, *sums = look.total(rows["w"].square().sum(), *active.values())
        active = dict(zip(active, sums, strict=True))
        if look.whole:  # of a few rows the drawing decides too
            watching.held(oracle.checks, active, n, self.floor)
        residual = (squares / n).sqrt()
        diagnostics = {**active, "lower_residual": residual, "rows_touched": torch.tensor(n, device="cpu")}
        if look.whole:
            return self._kept(oracle, loss, direction, diagnostics, after, rows, table=table, tables=drawn.tables)
        writes, final, mean = settled(look, rows, self.rule, self.lazy)
        # Made anew from all rows, the mean is rid of what rounding has added up.
        direction = direction if mean is None else mean
        return self._kept(oracle, loss, direction, diagnostics, final, table=table, writes=writes, tables=drawn.tables)

    def _followed(self, rows: Rows, seen: Rows, active: Rows, given: Given, rates: Tensor) -> tuple[Rows, Rows]:
        """Rows with positions after the step, and before it; and how many projections changed something."""
        active, tau = dict(active), self._tau(given)
        after = rows | self.drawing.noted({name: seen[name] for name in self.trackers.weighted}, rows)
        for name, velocity in self.trackers.moving:
            at, along = rows[name], rates.to(rows[velocity]) * rows[velocity]
            radius = self.radius if name == "y" else self.trackers.ceilings.get(name, math.inf)
            moved = at - tau * along
            if math.isfinite(radius):
                target, active[f"projected_{name}"] = ball(at - along, radius)
                moved = (1 - tau) * at + tau * target
            after |= {name: moved, f"{name}_last": at}
        return after, active

    def _kept(
        self,
        oracle: Oracle,
        loss: Tensor,
        direction: Tensor,
        diagnostics: dict[str, Tensor],
        clock: Clock,
        rows: Rows | None = None,
        *,
        table: Table,
        writes: Sequence[Write] = (),
        tables: Rows | None = None,
    ) -> Estimate:
        """The estimate d, and what is to be kept: all rows, or writes into some."""
        lower, tables = None, tables or {}
        if rows is not None:
            own = table_of(rows, clock, self.state_device or oracle.device)
            tables = tables | {name: table.split.whole(t) for name, t in own.items()}
            one = Vector(t.reshape(len(rows["y"]), -1) for t in oracle.y).lane(0)
            parts = zip(shaped(rows["y"], one), oracle.y, strict=True)
            lower = Vector(table.split.whole(part.view_as(t)) for part, t in parts)
        precise = [t.to(direction.dtype) for t in oracle.x]  # what is remembered of d is not rounded as the step is
        return Estimate(
            loss,
            shaped(direction, oracle.x),
            diagnostics,
            memory={} if self.warm_start else {"initial": Vector(map(table.split.whole, oracle.y))},
            upper_memory={"direction": shaped(direction, precise).clone(), "previous": oracle.x.clone()},
            tables=tables,
            lower=lower,
            writes=tuple(writes),
            numbers={"clock": tuple(clock)},
        )

    def _measured(self, look: Look, oracle: Oracle, given: Given, sampler: Any) -> Measured:
        """Derivatives of the rows looked at, at both points; each rank takes care of a part of the tasks."""
        trackers, table = self.trackers, look.table
        x, x_last = flat(oracle.x)[0], flat(given.upper_memory["previous"])[0]

        def measured(part: slice) -> Measured:
            now = {name: t[part] for name, t in look.now.items()}
            weights = None if trackers.apart else look.scale[part] / table.total
            draws = self._draws(sampler, look.ids[part] + table.split.start, given, own=True)
            points = Points(oracle, draws, x, now["y"], apart=trackers.apart, weights=weights)
            return trackers.measure(points, now, x, x_last)

        alone = given.ranks.world == 1 or sampler is None
        return measured(slice(None)) if alone else shared(look, measured, oracle)

    # ------------------------------------------------------------------------------------------------ rows

    def catch_up(self) -> None:
        """Bring every task's row of the lower parameters up to the present step.

        If there are many tasks, the rows that a step does not look at are left behind, so that the cost of a step does
        not grow with their number: they move by a known rule, and catch up when they are next looked at, or here. Until
        then the live tensors hold their older values. Results do not depend on it.
        """
        given = self._given(by_level(self.param_groups), self._parameters("upper"), self._parameters("lower"))
        if len(given.tables.get("age", ())) < 2:  # a single row is looked at in every step
            return
        table, clock = self._table(given, given.lower), Clock.read(given.numbers)
        late = (table.tables["age"] != clock.time).nonzero().flatten()
        with torch.no_grad():
            for ids in table.chunks(late):
                for write in table.writes(ids, table.gather(ids, clock), clock):
                    write.table[write.rows] = write.values

    def rows_of(self, lower: Sequence[Tensor]) -> int:
        """A leading dimension that all have is taken for that of the tasks."""
        sizes = {t.shape[0] if t.dim() else 0 for t in lower}
        return sizes.pop() if len(sizes) == 1 else 0

    def place_of(self, name: str, parameter: Tensor) -> torch.device | None:
        """Tables are where the user wants them, but probabilities, from which is drawn on the host."""
        if name in [TABLE + chance for chance in CHANCES]:
            return torch.device("cpu")
        return (self.state_device if name.startswith(TABLE) else None) or super().place_of(name, parameter)

    def _table(self, given: Given, y: Vector) -> Table:
        """The rows of all problems; y has one for each."""
        group = torch.tensor([i for i, group in enumerate(given.lower_groups) for _ in group["params"]], device="cpu")
        groups = group.repeat_interleave(torch.tensor([t.shape[1:].numel() for t in y], device="cpu"))
        tables = {name: Split.local(t) for name, t in given.tables.items() if name not in CHANCES}
        least = self.floor if self.rule.floored else None
        split, own = Split(y, given.ranks), Vector(map(Split.local, y))
        return Table(own, tables, self.trackers.shrinking, self.trackers.moving, groups, least, self.radius, split)

    def _draws(self, sampler: Any, ids: Tensor, given: Given, *, own: bool) -> TaskDraws | None:
        """The data of tasks, perhaps this rank's own; None for a single problem, which has its own."""
        if sampler is None:
            return None
        generator = given.ranks.own(given.generator, given.steps, *ids[:1].tolist()) if own else given.generator
        return TaskDraws(sampler, ids, len(ids), {"lower": self.lower_batch, "upper": self.upper_batch}, generator)

    # ------------------------------------------------------------------------------------------------ sizes of steps

    def _pace(self, step: int) -> float:
        """What the schedule and the restarts make of the learning rates at a step."""
        pace = 1.0 if self.schedule == "constant" else max(self.schedule_offset + step, 1.0) ** (-1 / 3)
        if self.restarts is not None:
            pace *= 2.0 ** (-int(math.log2(step / self.restarts + 1)) / 2)
        return pace

    def _tau(self, given: Given) -> float:
        """The part of a lower step that is made."""
        return self.averaging * self._pace(given.steps)

    def _betas(self, given: Given, m: int) -> dict[str, float]:
        """Mixing weights of a step."""
        factor = (self.drawing.share(m) if self.beta_unit == "q" else 1.0) * self._pace(given.steps) ** 2
        return self.trackers.weights({name: min(beta * factor, 1.0) for name, beta in self.beta.items()})


def is_weight(value: object) -> bool:
    """Whether value is a number that can be a mixing weight."""
    return is_number(value) and 0 <= float(value) < math.inf  # type: ignore[arg-type]


def _rates(given: Given) -> Tensor:
    """Learning rates of the lower groups."""
    rates = [group["lr"] for group in given.lower_groups]
    return torch.stack([torch.as_tensor(rate, dtype=torch.float64, device="cpu") for rate in rates])


def _device(given: Any) -> torch.device:
    """The device that an argument names."""
    require("state_device", given, isinstance(given, (str, torch.device)))
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"Invalid state_device value: {given}") from error

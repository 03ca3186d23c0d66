"""What the methods with a memory of each lower problem share: rows, two points with one sample, sizes of steps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ...hypergradient import Estimate
from ...hypergradient.estimate import Write
from ...hypergradient.recursive import Points, flat, shaped
from ...hypergradient.storm import ball
from ...optimizer.base import BilevelOptimizer, CommonOptions
from ...optimizer.memory import TABLE
from ...optimizer.step import Given, Update
from ...oracle.oracle import Oracle
from ...problem.parameters import LEVELS, Params, is_count, is_number, level_groups, require
from ...problem.tasks import TaskDraws, task_count
from ...problem.vector import Vector
from .drawing import CHANCES, Drawing
from .rows import CHUNK, STAMPS, Clock, Rows, Table, table_of
from .trackers import Measured, Tracked
from .variants import Look, Variant

__all__ = ["RecursiveOptimizer", "RecursiveOptions", "is_weight"]

EAGER = 1 << 16  # entries of all rows together up to which every row is kept current
SCHEDULES = ("constant", "cube_root")
DEFAULT_BETA, LOUD_BETA, PATIENCE = 0.1, 0.3, 100


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


class Outcome(NamedTuple):
    """What a step makes: d, all rows or writes into some of them, other tables, and the clock when they are valid."""

    loss: Tensor
    direction: Tensor
    diagnostics: dict[str, Tensor]
    clock: Clock
    whole: Rows | None = None
    writes: tuple[Write, ...] = ()
    tables: Rows | None = None


class RecursiveOptimizer(BilevelOptimizer):
    r"""Base class of the single-loop methods with trackers of each of m lower problems.

    Without ``tasks`` there is one lower problem, m = 1; with them every lower tensor has a leading dimension m. A
    method is a row of a table, `Variant`: what is tracked, and how d follows from it.

    Args:
        variant: that row.
        drawing: chooses the tasks of a step.
        beta: mixing weight of the trackers and of the direction d: one number, or a dict with some of their names.
        floor: least eigenvalue of H.
        beta_unit: ``"q"``, beta is in units of the part q of the tasks that a step looks at; ``"absolute"``.
        averaging: tau_t, the part of a lower step that is made.
        ceilings: radii of the trackers' sets, by name. Default: none.
        radius: of the ball that each task's y stays in. Default: infinite.
        schedule: ``"constant"`` or ``"cube_root"``: eta_t = (offset + t)^(-1/3) multiplies both learning rates (lower
            ones through tau_t), and eta_t^2 the mixing weights.
        schedule_offset: its offset. Default: 8.
        restarts: length of the first stage; stages double, learning rates shrink by sqrt(2), mixing weights by 2.
            Default: None, one stage.
        initial_steps: gradient steps on y before the first estimate. Default: 0.
        state_device: where rows are kept. Default: with the lower parameters.
        warm_start: False begins anew at every step, from the first value of y. Default: True.
        lazy: True leaves rows that a step does not look at behind (see :meth:`catch_up`); False keeps all of them
            current in every step. Default: None, the second as long as that is cheap.

    State: in that of the first lower parameter ``rows.NAME`` (m rows that mix all lower parameters) for each tracker,
    for ``y_last`` (y at the last step), and for ``log``, ``drift``, ``age``, which say at what time a row is valid; of
    the upper parameters ``direction`` (d) and ``previous`` (x at the last step). ``numbers["clock"]`` is the time.
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
        require("floor", floor, is_number(floor) and floor > 0)
        require("beta_unit", beta_unit, beta_unit in ("q", "absolute"))
        require("averaging", averaging, is_number(averaging) and 0 < averaging <= 1)
        limits = ceilings or {}
        valid = set(limits) <= set(kind.limits) and all(is_number(c) and c > 0 for c in limits.values())
        require("ceilings", ceilings, valid)
        require("radius", radius, is_number(radius) and radius > 0)
        require("schedule", schedule, schedule in SCHEDULES)
        require("schedule_offset", schedule_offset, is_number(schedule_offset) and schedule_offset >= 0)
        require("restarts", restarts, restarts is None or (is_count(restarts) and restarts > 0))
        require("initial_steps", initial_steps, is_count(initial_steps))
        require("lazy", lazy, lazy is None or isinstance(lazy, bool))
        factory = common.get("lower_optimizer")
        wording = "Invalid lower_optimizer value: {value} (the lower steps are part of the recursion)"
        require("lower_optimizer", factory, factory is None, wording)
        super().__init__(upper, lower, lr=lr, lower_lr=lower_lr, lower_steps=0, **common)
        self.rule, self.drawing, self.trackers = variant, drawing, kind(float(floor), dict(limits))
        self.beta, self.beta_unit = {name: float(given.get(name, DEFAULT_BETA)) for name in names}, beta_unit
        self.floor, self.averaging, self.radius = float(floor), float(averaging), float(radius)
        self.schedule, self.schedule_offset, self.restarts = schedule, float(schedule_offset), restarts
        self.initial_steps, self.lazy = initial_steps, lazy
        self.state_device = None if state_device is None else torch.device(state_device)

    # ------------------------------------------------------------------------------------------------ steps

    def estimate(self, oracle: Oracle, given: Given) -> Estimate:
        """One step of the recursion for one lower problem."""
        return self._estimated(oracle, given, Vector(t.unsqueeze(0) for t in oracle.y))

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
        return self.checked(oracle, given, partial(self._estimated, y=oracle.y, sampler=sampler))

    def update(self, x: Vector, gradient: Vector, given: Given) -> Update:
        """The step along d, of the present pace."""
        pace = self._pace(given.steps - 1)  # the step has been counted by now
        return super().update(x, gradient if pace == 1.0 else gradient * pace, given)

    def _estimated(self, oracle: Oracle, given: Given, y: Vector, sampler: Any = None) -> Estimate:
        """The estimate d, and the rows after the step; y has one row for each problem."""
        table = self._table(given, y)
        step = self._recurred if self._goes_on(table, given) else self._begun
        loss, direction, diagnostics, clock, whole, writes, tables = step(oracle, given, table, sampler)
        tables, lower = tables or {}, None
        if whole is not None:
            tables = {**tables, **table_of(whole, clock, self.state_device or oracle.device)}
            rows = shaped(whole["y"], y.lane(0))
            lower = Vector(part.view_as(t) for part, t in zip(rows, oracle.y, strict=True))
        precise = [t.to(direction.dtype) for t in oracle.x]  # what is remembered of d is not rounded as the step is
        return Estimate(
            loss,
            shaped(direction, oracle.x),
            diagnostics,
            memory={} if self.warm_start else {"initial": oracle.y},
            upper_memory={"direction": shaped(direction, precise).clone(), "previous": oracle.x.clone()},
            tables=tables,
            lower=lower,
            writes=writes,
            numbers=clock.numbers(),
        )

    def _goes_on(self, table: Table, given: Given) -> bool:
        """Whether there are rows of these parameters, which may have become more."""
        if not self.warm_start or not {"direction", "previous"} <= given.upper_memory.keys() or not table.tables:
            return False
        if missing := {*self.trackers.names, "y_last", *STAMPS} - table.tables.keys():
            raise ValueError(f"the state is that of another variant: it has no {', '.join(sorted(missing))}")
        if table.tables["w"].shape[1] != len(table.groups):
            return False
        if (known := len(table.tables["age"])) != table.count:
            raise ValueError(
                f"{type(self).__name__} began with {known} lower problems, but now there are {table.count}"
            )
        return True

    def _begun(self, oracle: Oracle, given: Given, table: Table, sampler: Any) -> Outcome:
        """The first step looks at every task, because the recursion has to start close to the truth."""
        trackers, m, kinds, p = self.trackers, table.count, int(table.groups.max()) + 1, len(table.groups)
        if math.isfinite(self.radius) and kinds > 1:
            raise ValueError("a radius needs all lower parameters in one group, as they make one step of one length")
        x, rates = flat(oracle.x)[0], self._rates(given, table)
        loss, direction = torch.zeros((), device=oracle.device), torch.zeros_like(x)
        size = max(CHUNK // (p * (len(x) if trackers.apart else p)), self.drawing.batch(m), 1)
        found: list[Rows] = []
        counts: list[dict[str, Tensor]] = []
        for ids in torch.split(torch.arange(m), size):
            draws, n = self._draws(sampler, ids, given), len(ids)
            y = flat([t[ids.to(t.device)] for t in table.positions], n)
            for _ in range(self.initial_steps):
                points = Points(oracle, draws, x, y, apart=False)
                y = y - rates.to(y) * flat(points.at(x, y).lower(points.g)[1], n)
            weights = None if trackers.apart else torch.full((n,), 1 / m)
            points = Points(oracle, draws, x, y, apart=trackers.apart, weights=weights)
            value, part, tracked = trackers.first(points, x, y, rates)
            factor = 1 / m if trackers.apart else 1.0  # or it is in the weights
            loss, direction = loss + value * factor, direction + part * factor
            moved = self._moved({**tracked.rows, "y": y}, given, rates)
            noted = self.drawing.noted({name: tracked.rows[name] for name in trackers.weighted}, None)
            rows = {**tracked.rows, **moved.rows, **noted}
            found.append({name: t.to(self.state_device or t.device) for name, t in rows.items()})
            counts.append({**tracked.active, **moved.active})
        totals = _projected({name: torch.stack([part[name] for part in counts]).sum() for name in counts[0]})
        whole = {name: torch.cat([part[name] for part in found]) for name in found[0]}
        clock = Clock.started(len(trackers.names), len(trackers.moving), kinds)
        return Outcome(loss, direction, {**totals, "rows_touched": torch.tensor(m)}, clock, whole)

    def _recurred(self, oracle: Oracle, given: Given, table: Table, sampler: Any) -> Outcome:
        """A step looks at the rows of some tasks, all others follow their rule."""
        trackers, variant, clock = self.trackers, self.rule, Clock.read(given.numbers)
        m, drawn = table.count, self.drawing.draw(sampler, table.count, given)
        n, betas = len(drawn.ids), self._betas(given, m)
        if n == m or variant.rests:
            after = clock.waited()
        else:
            after = clock.ticked(
                [betas[name] for name in trackers.names], table.velocities,
                [float(group["lr"]) for group in given.lower_groups][: len(clock.drift[0])],
                self._tau(given), math.isfinite(self.radius),
            )  # fmt: skip
        look = Look(
            table, drawn.ids, table.gather(drawn.ids, clock), drawn.scale.to(oracle.device),
            self.drawing.batch(m) / m, betas, (clock, after), trackers,
            flat(given.upper_memory["direction"])[0], self.drawing, given.generator,
        )  # fmt: skip
        self._warn_of_loud_beta(look, oracle, given, sampler)
        measured = self._measured(look, oracle, given, sampler)
        tracked = trackers.track(look.now, measured, look.msvr if variant.rests else look.storm)
        direction = variant.direction(look, tracked.rows, measured)
        moved = self._moved({**look.now, **tracked.rows}, given, self._rates(given, table))
        noted = self.drawing.noted({name: measured.new[name] for name in trackers.weighted}, look.now)
        rows = {**look.now, **tracked.rows, **moved.rows, **noted}
        loss = measured.loss / n if trackers.apart else measured.loss
        diagnostics = {
            **_projected({**tracked.active, **moved.active}),
            "lower_residual": rows["w"].norm() / n**0.5,
            "rows_touched": torch.tensor(n),
        }
        if look.whole:
            return Outcome(loss, direction, diagnostics, after, rows, tables=drawn.tables)
        final = after.rebased() if after.exhausted else after
        writes = table.writes(look.ids, rows, final)
        anew = trackers.hypergradients(rows).sum(0) if after.exhausted and variant.mean else None
        if after.exhausted or (self._eager(table) and not variant.rests):
            others = torch.ones(m, dtype=torch.bool)
            others[look.ids] = False
            for ids in table.chunks(others.nonzero().flatten()):
                caught = table.gather(ids, after)
                writes += table.writes(ids, caught, final)
                anew = None if anew is None else anew + trackers.hypergradients(caught).sum(0)
        # Made anew from all rows, the mean is rid of what rounding has added up.
        direction = direction if anew is None else anew / m
        return Outcome(loss, direction, diagnostics, final, None, tuple(writes), drawn.tables)

    def _moved(self, rows: Rows, given: Given, rates: Tensor) -> Tracked:
        """Positions after a step, and before it."""
        positions, active, tau = dict[str, Tensor](), dict[str, Tensor](), self._tau(given)
        for name, velocity in self.trackers.moving:
            at, along = rows[name], rates.to(rows[velocity]) * rows[velocity]
            radius = self.radius if name == "y" else self.trackers.ceilings.get(name, math.inf)
            moved = at - tau * along
            if math.isfinite(radius):
                target, active[name] = ball(at - along, radius)
                moved = (1 - tau) * at + tau * target
            positions |= {name: moved, f"{name}_last": at}
        return Tracked(positions, active)

    def _measured(self, look: Look, oracle: Oracle, given: Given, sampler: Any) -> Measured:
        """Derivatives of the rows looked at, at both points; each rank takes care of a part of the tasks."""
        trackers, n, ranks = self.trackers, len(look.ids), given.ranks
        x, x_last = flat(oracle.x)[0], flat(given.upper_memory["previous"])[0]
        weights = None if trackers.apart else look.scale / look.table.count

        def measured(part: slice) -> Measured:
            now = {name: t[part] for name, t in look.now.items()}
            points = Points(
                oracle, self._draws(sampler, look.ids[part], given), x, now["y"],
                apart=trackers.apart, weights=None if weights is None else weights[part],
            )  # fmt: skip
            return trackers.measure(points, now, x, x_last)

        if ranks.world == 1 or sampler is None:
            return measured(slice(None))
        mine = slice(ranks.rank, n, ranks.world)
        shapes = trackers.shapes(len(x), look.now["y"].shape[1])
        new, old = ({name: x.new_zeros(n, *shape) for name, shape in shapes.items()} for _ in range(2))
        loss, sums = torch.zeros((), device=oracle.device), x.new_zeros(2, 0 if trackers.apart else len(x))
        if range(n)[mine]:
            loss, found, last, sums = measured(mine)
            for whole, some in ((new, found), (old, last)):
                for name, t in whole.items():
                    t[mine] = some[name]
        loss, sums, *parts = ranks.total(loss, sums, *new.values(), *old.values())
        return Measured(loss, dict(zip(new, parts, strict=False)), dict(zip(old, parts[len(new) :], strict=True)), sums)

    # ------------------------------------------------------------------------------------------------ rows

    def catch_up(self) -> None:
        """Bring every task's row of the lower parameters up to the present step.

        If there are many tasks, the rows that a step does not look at are left behind, so that the cost of a step does
        not grow with their number: they move by a known rule, and catch up when they are next looked at, or here. Until
        then the live tensors hold their older values. Results do not depend on it.
        """
        given = self._given(
            {level: level_groups(self.param_groups, level) for level in LEVELS}, *map(self._parameters, LEVELS)
        )
        if len(given.tables.get("age", ())) < 2:  # a single row is looked at in every step
            return
        table, clock = self._table(given, given.lower), Clock.read(given.numbers)
        with torch.no_grad():
            for ids in table.chunks(table.late(clock)):
                for write in table.writes(ids, table.gather(ids, clock), clock):
                    write.table[write.rows] = write.values

    def place_of(self, name: str, parameter: Tensor) -> torch.device | None:
        """Tables of rows are where the user wants them; probabilities are drawn from on the host."""
        if name in (TABLE + chance for chance in CHANCES):
            return torch.device("cpu")
        return self.state_device or parameter.device if name.startswith(TABLE) else super().place_of(name, parameter)

    def _table(self, given: Given, y: Vector) -> Table:
        """The rows of all problems."""
        sizes = torch.tensor([t[0].numel() for t in y])
        group = torch.tensor([i for i, g in enumerate(given.lower_groups) for _ in g["params"]])
        tables = {name: t for name, t in given.tables.items() if name not in CHANCES}
        least = self.floor if self.rule.floored else None
        return Table(
            y, tables, self.trackers.names, self.trackers.moving, group.repeat_interleave(sizes), least, self.radius
        )

    def _eager(self, table: Table) -> bool:
        """Whether all rows are kept current."""
        return self.lazy is False or (self.lazy is None and table.count * table.width <= EAGER)

    def _draws(self, sampler: Any, ids: Tensor, given: Given) -> TaskDraws | None:
        """The data of tasks; None for a single problem, which has its own."""
        sizes = {"lower": self.lower_batch, "upper": self.upper_batch}
        return None if sampler is None else TaskDraws(sampler, ids, len(ids), sizes, given.generator)

    # ------------------------------------------------------------------------------------------------ sizes of steps

    def _pace(self, step: int) -> float:
        """What the schedule and the restarts make of the learning rates at a step."""
        pace = 1.0 if self.schedule == "constant" else max(self.schedule_offset + step, 1.0) ** (-1 / 3)
        if self.restarts is not None:
            pace *= 2.0 ** (-int(math.log2(step / self.restarts + 1)) / 2)
        return pace

    def _tau(self, given: Given) -> float:
        return self.averaging * self._pace(given.steps)

    def _betas(self, given: Given, m: int) -> dict[str, float]:
        """Mixing weights of a step."""
        unit = self.drawing.batch(m) / m if self.beta_unit == "q" else 1.0
        factor = unit * self._pace(given.steps) ** 2
        return self.trackers.weights({name: min(beta * factor, 1.0) for name, beta in self.beta.items()})

    def _rates(self, given: Given, table: Table) -> Tensor:
        """Learning rate of each entry of a row of y."""
        rates = torch.tensor([float(group["lr"]) for group in given.lower_groups], dtype=torch.float64)
        return rates[table.groups].to(table.positions[0].device)

    def _warn_of_loud_beta(self, look: Look, oracle: Oracle, given: Given, sampler: Any) -> None:
        beta = max(self.beta.values())
        steady = self.beta_unit == "q" and self.schedule == "constant" and self.restarts is None
        if steady and sampler is not None and not look.whole and given.steps > PATIENCE and beta > LOUD_BETA:
            oracle.checks.alert(
                "loud beta",
                f"beta = {beta:g} in units of the part of the tasks in a step makes the drawing of tasks the largest "
                "error; use 0.1 or less, or schedule='cube_root'",
                torch.ones((), dtype=torch.bool, device=oracle.device),
            )


def is_weight(value: object) -> bool:
    """Whether value is a number that can be a mixing weight."""
    return is_number(value) and 0 <= float(value) < math.inf  # type: ignore[arg-type]


def _projected(active: dict[str, Tensor]) -> dict[str, Tensor]:
    """Diagnostics: how many projections changed something."""
    return {f"projected_{name}": count for name, count in active.items()}

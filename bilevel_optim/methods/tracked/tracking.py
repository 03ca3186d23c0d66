"""Base class of the methods with a memory of each lower problem: rows, two points with one sample, step sizes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ...distributed.sharding import Split
from ...hypergradient import Estimate
from ...hypergradient.estimate import Write
from ...hypergradient.recursive import Points, flat, shaped
from ...hypergradient.storm import ball
from ...optimizer.base import BilevelOptimizer
from ...optimizer.options import InitVar, choice, count, fixed, flag, number, option
from ...optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs, TaskDraw, Update, of_tasks
from ...optimizer.transaction import SOLVER, TABLE, UPPER_SOLVER, recalled, write_rows
from ...oracle.oracle import Oracle
from ...oracle.session import Checks
from ...problem.parameters import by_level, is_number, require
from ...problem.placement import to_device
from ...problem.tasks import TaskDraws, draw_whole, length_of, task_count
from ...problem.vector import Vector
from ...tracing import is_tracing
from .drawing import CHANCES, Drawing, Drawn, Source, others
from .rows import CHUNK, STAMPS, Clock, Rows, Table, about_to_end, table_of
from .trackers import Matrices, Measured
from .variants import Look, Variant, device_named, probed, settled, shared, stays_current

__all__ = ["RecursiveOptimizer"]

DEFAULT_BETA = 0.1
LOUD_BETA, PATIENCE = 0.3, 100


class RecursiveOptimizer(BilevelOptimizer):
    r"""Base class of the single-loop methods with trackers of each of m lower problems.

    Without ``tasks`` there is one lower problem, m = 1; with them every lower tensor has a leading dimension m. A step
    gathers and updates the rows of some problems; all others follow a known rule (`Table`).

    Args:
        variant: the trackers, and the rule for d.
        drawing: chooses the tasks of a step.
        beta, floor, beta_unit, averaging, ceilings, radius, schedule, schedule_offset, restarts, initial_steps,
            state_device, lazy: see `SVRB` and `RSVRB`.

    State: of the first lower parameter ``rows.NAME`` for each tracker, for ``y_last`` (y at the last step; also ``r``
    and ``r_last``), and for ``log``, ``drift`` and ``age``, which record the time at which a row is valid. Each has a
    row for each problem, which joins all lower parameters. Of the upper parameters ``direction`` (d) and ``previous``
    (x at the last step). ``numbers["clock"]``: the time, and sums over the steps by which rows catch up: a tensor, or
    where a position is limited, a tuple.
    """

    _fixed_rate = "its averaging weights have to be chosen together with the rate"

    lr: InitVar[float] = option()
    lower_lr: InitVar[float] = option()
    lower_steps: int = fixed(default=0)
    beta: float | dict[str, float] = option(default=0.1, saved=True)
    _floor: InitVar[float] = number(default=1e-3, above=0, saved=True, alias="floor")
    beta_unit: str = choice("q", "absolute", default="q")
    averaging: float = number(default=1.0, above=0, most=1)
    ceilings: InitVar[dict[str, float] | None] = option(default=None)
    radius: float = number(default=math.inf, above=0, finite=False)
    schedule: str = choice("constant", "cube_root", default="constant")
    schedule_offset: float = number(default=8.0, least=0)
    restarts: int | None = count(default=None, least=1, optional=True)
    initial_steps: int = count(default=0)
    state_device: torch.device | str | None = option(default=None)
    lazy: bool | None = flag(default=None, optional=True)

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        factory = options["lower_optimizer"]
        wording = "Invalid {name} value: {value} (the lower steps are part of the recursion; leave out {name})"
        require("lower_optimizer", factory, factory is None, wording)
        self._rule, self._drawing = self._parts(options)
        kind, limits = self._rule.trackers, options["ceilings"]
        names, beta = (*kind.weighted, "d"), options["beta"]
        weights = beta if isinstance(beta, dict) else dict.fromkeys(names, beta)
        known = set(weights) <= set(names)
        if not (known and all(is_number(w) and 0 <= float(w) < math.inf for w in weights.values())):
            raise ValueError(
                f"Invalid beta value: {beta} (pass a finite number of at least 0, or a dict of such numbers with keys "
                f"among {', '.join(names)})"
            )
        known = isinstance(limits, dict) and set(limits) <= set(kind.limits)
        if limits is not None and not (known and all(is_number(c) and c > 0 for c in limits.values())):
            raise ValueError(
                f"Invalid ceilings value: {limits} (pass None, or a dict of numbers above 0; keys of this variant: "
                f"{', '.join(kind.limits) or 'none'})"
            )
        options["beta"] = {name: float(weights.get(name, DEFAULT_BETA)) for name in names}
        for name in ("floor", "averaging", "radius", "schedule_offset"):
            options[name] = float(options[name])
        options["state_device"] = device_named(options["state_device"])
        self._trackers = kind(options["floor"], dict(limits or {}))
        moving = {name for pair in kind.moving for name in pair}
        self._variant_of_state = {"rows": sorted({*kind.names, *moving, *self._drawing.notes})}

    @abstractmethod
    def _parts(self, options: dict[str, Any]) -> tuple[Variant, Drawing]:
        """Return the variant (trackers, and the rule for d) and the choice of a step's tasks."""

    @property
    def floor(self) -> float:
        """Least eigenvalue of H, which may be assigned between steps."""
        return self._trackers.floor

    @floor.setter
    def floor(self, value: float) -> None:
        check = self._options["floor"].check
        assert check is not None
        check("floor", value)
        self._trackers = replace(self._trackers, floor=float(value))

    @property
    def _weights(self) -> dict[str, float]:
        """Mixing weights by name."""
        if isinstance(self.beta, dict):
            return self.beta
        return dict.fromkeys((*self._trackers.weighted, "d"), float(self.beta))  # a number that was assigned

    @property
    def _device(self) -> torch.device | None:
        """Device of the rows; None: that of y."""
        return cast("torch.device | None", self.state_device)

    # ------------------------------------------------------------------------------------------------ draws

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return a pair of draws for both points; in the first step, a pair for each initial step comes before."""
        return self._pairs(self._begins(inputs, sum(t.numel() for t in self.parameters("lower"))))

    def _task_draws(self, inputs: DrawInputs, sampler: Any) -> list[TaskDraw]:
        """Return the draws of the tasks, if the sampler chooses them, and of their batches.

        The first step draws batches for all tasks, in chunks. These are the draws of a single process. With several,
        each process draws the batches of its own tasks.
        """
        x, y = self.parameters("upper"), self.parameters("lower")
        m, d, p = self._rows_of(y), sum(t.numel() for t in x), sum(t.shape[1:].numel() for t in y)
        begins = self._begins(inputs, p)
        batches = of_tasks(self._pairs(begins), self._rows_per_batch)
        return batches * math.ceil(m / self._chunk(d, p, m)) if begins else [*self._drawing.draws(m), *batches]

    def _pairs(self, begins: bool) -> list[Draw]:
        """Return the draws of `Points`."""
        return [UPPER, LOWER] * (1 + self.initial_steps * begins)

    def _chunk(self, d: int, p: int, m: int) -> int:
        """Return how many of m tasks the first step visits together; d and p are the sizes of x and of a row of y."""
        return max(CHUNK // (p * (d if self._trackers.apart else p)), self._drawing.batch(m), 1)

    # ------------------------------------------------------------------------------------------------ steps

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Make one step of the recursion for one lower problem."""
        return self._step(oracle, inputs, Vector(t.unsqueeze(0) for t in oracle.y))

    def _estimate_tasks(self, oracle: Oracle, inputs: StepInputs, sampler: Any) -> Estimate:
        """Make one step of the recursion for the rows of some tasks."""
        task_count(sampler, 1)
        if any([not p.requires_grad for g in self.param_groups if g["level"] == "lower" for p in g["params"]]):
            raise ValueError(
                f"{type(self).__name__} keeps y of every task, and a lower parameter rests (requires_grad=False), so "
                "that a loss would see its rows of all tasks; pass them with the data of the tasks instead"
            )
        sizes = {t.shape[0] if t.dim() else None for t in oracle.y}
        length = length_of(sampler)
        if len(sizes) > 1 or None in sizes or (length is not None and sizes != {length}):
            number = "" if length is None else f" of the {length}"
            shapes = ", ".join(f"{n}: {tuple(t.shape)}" for n, t in zip(oracle.lower_names(), oracle.y, strict=True))
            raise ValueError(
                f"{type(self).__name__} keeps y of every task: the lower parameters need a leading dimension with one "
                f"row for each{number} tasks, but have shapes {shapes}; pass tensors that hold y of all tasks, such as "
                "torch.stack of one tensor for each"
            )
        return self._accepted_estimate(oracle, inputs, partial(self._step, y=oracle.y, sampler=sampler))

    def _step(self, oracle: Oracle, inputs: StepInputs, y: Vector, sampler: Any = None) -> Estimate:
        table = self._table(inputs, y)
        if table.split:
            if self._drawing.notes:
                raise ValueError(
                    "adaptive probabilities need all rows on every rank, but the lower parameters are split over the "
                    "ranks; use other probabilities, or lower parameters that are not split"
                )
            oracle = oracle.at(lower=table.positions)
        make_step = self._make_next_step if self._can_continue(table, inputs) else self._make_first_step
        return make_step(oracle, inputs, table, sampler)

    def _remembers(self, inputs: DrawInputs) -> bool:
        """Return True if there are rows to continue from."""
        known = "direction" in inputs.upper_memory and "previous" in inputs.upper_memory
        return self.warm_start and known and len(inputs.tables) > 0

    def _begins(self, inputs: DrawInputs, width: int) -> bool:
        """Return True if a step starts afresh, because there are no rows of ``width`` entries for the present x."""
        if not self._remembers(inputs):
            return True
        shapes = self._trackers.shapes(sum([t.numel() for t in inputs.upper_memory["previous"]]), width)
        return any([t.shape[1:] != shapes[name] for name, t in inputs.tables.items() if name in shapes])

    def _begins_next(self) -> bool:
        """Return True if the next step starts afresh."""
        x, y = self.parameters("upper"), self.parameters("lower")
        tables, memory = recalled(self.state, y, SOLVER).tables, recalled(self.state, x, UPPER_SOLVER).memory
        inputs = DrawInputs(self._run_state.steps, self.numbers, {}, memory, tables)
        return self._begins(inputs, sum([t.numel() for t in y]) // max(len(tables.get("age", ())), 1))

    def _can_continue(self, table: Table, inputs: StepInputs) -> bool:
        """Return True if there are rows of these parameters; False if there are none, or x or y has other sizes."""
        if not self._remembers(inputs):
            return False
        moving = {f"{name}{at}" for name, _ in table.moving for at in ("", "_last")} - {"y"}
        names = {*self._trackers.names, *moving, *self._drawing.notes, *STAMPS}
        if other := names.symmetric_difference(list(table.tables)):
            raise ValueError(
                f"the state is that of another variant: the two differ in the tables {', '.join(sorted(other))}; "
                "create the optimizer with the arguments of the saved run"
            )
        if self._begins(inputs, len(table.groups)):
            return False
        if (known := len(table.tables["age"])) != table.count:
            name = type(self).__name__
            raise ValueError(
                f"{name} began with {known} lower problems, but now there are {table.count}, and its tables have one "
                f"row for each; create a new {name} for the new number"
            )
        return True

    def _make_first_step(self, oracle: Oracle, inputs: StepInputs, table: Table, sampler: Any) -> Estimate:
        """Make the first step, which visits every task because the recursion must start close to the truth."""
        trackers, m, kinds, p = self._trackers, table.total, int(table.groups.max()) + 1, len(table.groups)
        if kinds > 1 and ("y" in table.radii or (table.radii and self._drifts)):
            raise ValueError(
                f"a radius or ceiling of r needs all lower parameters in one group, but there are {kinds}: it limits "
                "the length of their joint step; put them into one group, or leave it out"
            )
        x, rates = flat(oracle.x)[0], table.spread(_rates(inputs))
        loss, direction = torch.zeros((), device=oracle.device), torch.zeros_like(x)
        found: list[Rows] = []
        counts: list[Rows] = []
        for ids in torch.split(torch.arange(table.count, device="cpu"), self._chunk(len(x), p, m)):
            draws = self._batches(sampler, ids + table.split.start, inputs, own=bool(table.split))
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
            rows, active = self._advance_rows({**rows, **tracked}, tracked, active, inputs, rates)
            found.append({name: t if name == "y" else t.to(self._device or t.device) for name, t in rows.items()})
            counts.append(active)
        whole = {name: torch.cat([part[name] for part in found]) for name in found[0]}
        active = {name: torch.stack([part[name] for part in counts]).sum() for name in counts[0]}
        if table.split:
            loss, direction, *sums = inputs.ranks.total(loss.to(x), direction, *(t.to(x) for t in active.values()))
            active = dict(zip(active, sums, strict=True))
        _warn_if_floor_is_active(oracle.checks, active, m, self.floor)
        clock = Clock.started(len(trackers.shrinking), len(trackers.moving), kinds)
        diagnostics, tables = {**active, "rows_touched": torch.tensor(m, device="cpu")}, self._drawing.opened(m)
        return self._kept(oracle, loss, direction, diagnostics, clock, whole, table=table, tables=tables)

    def _make_next_step(self, oracle: Oracle, inputs: StepInputs, table: Table, sampler: Any) -> Estimate:
        """Make a later step, which visits the rows of some tasks; all others follow their rule."""
        trackers, clock, m = self._trackers, self._clock(inputs, table.device), table.total
        drawn, betas = self._chosen(table, inputs, sampler), self._betas(inputs.steps, m)
        n = len(drawn.ids)
        after = clock.waited() if n < m else clock  # if every row is visited, none misses the step
        if n < m and not self._rule.rests:
            after = clock.ticked(table, betas, _rates(inputs), self._tau(inputs))
        ids, scale = drawn.ids, to_device(drawn.scale, oracle.device)
        if table.split:
            own = table.split.local_positions(ids)
            ids, scale = ids[own] - table.split.start, scale[own]
        look = Look(
            table, ids, table.gather(ids, clock), n == m, scale, betas, (clock, after), drawn,
            flat(inputs.upper_memory["direction"])[0], trackers, self._drawing, inputs,
        )  # fmt: skip
        if sampler is not None and not look.whole:
            _warn_if_beta_is_large(oracle.checks, self._share_lost, inputs.steps)
        measured = self._measured(look, oracle, inputs, sampler)
        tracked, active = trackers.track(look.now, measured, look.msvr if self._rule.rests else look.storm)
        direction = self._rule.direction(look, tracked, measured)
        rows, active = self._advance_rows(
            {**look.now, **tracked}, measured.new, active, inputs, table.spread(_rates(inputs))
        )
        loss = measured.loss / n if trackers.apart else measured.loss
        squares, *sums = look.total(rows["w"].square().sum(), *active.values())
        active = dict(zip(active, sums, strict=True))
        if look.whole:  # the count of a few rows depends on the drawing too
            _warn_if_floor_is_active(oracle.checks, active, n, self.floor)
        residual = (squares / n).sqrt()
        diagnostics = {**active, "lower_residual": residual, "rows_touched": torch.tensor(n, device="cpu")}
        if look.whole:
            return self._kept(oracle, loss, direction, diagnostics, after, rows, table=table, tables=drawn.tables)
        writes, final, mean = settled(look, rows, self._rule, self.lazy)
        # A mean recomputed from all rows is free of accumulated rounding errors.
        direction = direction if mean is None else mean
        return self._kept(oracle, loss, direction, diagnostics, final, table=table, writes=writes, tables=drawn.tables)

    def _advance_rows(
        self, rows: Rows, seen: Rows, active: Rows, inputs: StepInputs, rates: Tensor
    ) -> tuple[Rows, Rows]:
        """Return rows with positions after and before the step, and the number of active projections."""
        active, tau, radii = dict(active), self._tau(inputs), self._radii
        after = rows | self._drawing.noted({name: seen[name] for name in self._trackers.weighted}, rows)
        for name, velocity in self._trackers.moving:
            at, along = rows[name], rates.to(rows[velocity]) * rows[velocity]
            moved = at - tau * along
            if name in radii:
                target, active[f"projected_{name}"] = ball(at - along, radii[name])
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
        tables: Rows,
        writes: Sequence[Write] = (),
    ) -> Estimate:
        """Return the estimate d with the state to keep: all rows, or writes into some."""
        lower = None
        if rows is not None:
            own = table_of(rows, clock, self._device or oracle.device)
            tables = tables | {name: table.split.from_local(t) for name, t in own.items()}
            one = Vector(t.reshape(len(rows["y"]), -1) for t in oracle.y).lane(0)
            parts = zip(shaped(rows["y"], one), oracle.y, strict=True)
            lower = Vector(table.split.from_local(part.view_as(t)) for part, t in parts)
        precise = [t.to(direction.dtype) for t in oracle.x]  # unlike the step, the stored d is not rounded
        return Estimate(
            loss,
            shaped(direction, oracle.x),
            diagnostics,
            memory={} if self.warm_start else {"initial": Vector(map(table.split.from_local, oracle.y))},
            upper_memory={"direction": shaped(direction, precise).clone(), "previous": oracle.x.clone()},
            tables=tables,
            lower=lower,
            writes=tuple(writes),
            numbers={"clock": clock.packed(self._device or oracle.device)},
        )

    def _measured(self, look: Look, oracle: Oracle, inputs: StepInputs, sampler: Any) -> Measured:
        """Return derivatives of the visited rows at both points; each rank evaluates a part of the tasks."""
        trackers, table = self._trackers, look.table
        x, x_last = flat(oracle.x)[0], flat(inputs.upper_memory["previous"])[0]

        def measured(part: slice) -> Measured:
            now = {name: t[part] for name, t in look.now.items()}
            weights = None if trackers.apart else look.scale[part] / table.total
            batches = look.drawn.batches
            draw = (
                batches.__getitem__ if batches else self._batches(sampler, look.ids[part] + table.split.start, inputs)
            )
            points = Points(oracle, draw, x, now["y"], apart=trackers.apart, weights=weights)
            return trackers.measure(points, now, x, x_last)

        alone = inputs.ranks.world == 1 or sampler is None
        return measured(slice(None)) if alone else shared(look, measured, oracle)

    # ------------------------------------------------------------------------------------------------ step sizes

    def _graph_key(self, steps: int, numbers: Mapping[str, Any]) -> Any:
        """Cache key for the next step's graph.

        None for the first step, also of x or y with other sizes, for steps that bring all rows up to date, and for one
        that warns: they run eagerly.
        """
        clock = numbers.get("clock")
        if isinstance(clock, tuple) and len(clock[-1]):
            return False  # `_why_eager` gives the reason
        if not isinstance(clock, Tensor):  # a tuple in older checkpoints
            return None
        if steps == self._run_state.steps and self._begins_next():
            return None
        if self._drifts:
            rows = self.param_groups[-1]["params"][0].shape[:1].numel()
            warns = steps == PATIENCE + 1 and self._share_lost > LOUD_BETA
            if warns or about_to_end(clock, self._trackers.shrinking, self._betas(steps, rows)):
                return None
        elif clock[1:].any():
            return None
        return self.floor, *self._weights.items()

    def _why_eager(self, tasks: Any = None) -> str:
        """Return why the host must decide from values or from the step count; empty if it need not."""
        if not self._steady:
            return "step sizes depend on the step count (schedule=, restarts=)"
        if tasks is None:
            return ""
        if not self.warm_start:
            return "with warm_start=False every step begins with all rows"
        if self._drawing.notes:
            return "the host computes the adaptive probabilities of the tasks from values"
        if self._drifts and self._radii:
            return "with a radius or ceiling of r the host brings unvisited rows up to date, one missed step at a time"
        return ""

    def update(self, x: Vector, gradient: Vector, inputs: StepInputs) -> Update:
        """Make the step along d, at the current pace."""
        pace = self._pace(inputs.steps - 1)  # the step has already been counted
        return super().update(x, gradient if pace == 1.0 else gradient * pace, inputs)

    @property
    def _drifts(self) -> bool:
        """True if unvisited rows may move."""
        return self._drawing.task_batch is not None and not self._rule.rests

    @property
    def _radii(self) -> dict[str, float]:
        """Radii of the balls that limit positions, by name."""
        limits = {"y": self.radius, **self._trackers.ceilings}
        return {name: limits[name] for name, _ in self._trackers.moving if limits.get(name, math.inf) < math.inf}

    def _pace(self, step: int) -> float:
        """Return the factor of the schedule and the restarts on the learning rates at a step."""
        pace = 1.0 if self.schedule == "constant" else max(self.schedule_offset + step, 1.0) ** (-1 / 3)
        if self.restarts is not None:
            pace *= 2.0 ** (-int(math.log2(step / self.restarts + 1)) / 2)
        return pace

    def _tau(self, inputs: StepInputs) -> float:
        """Return the fraction of a lower step to make."""
        return self.averaging * self._pace(inputs.steps)

    @property
    def _steady(self) -> bool:
        """True if all steps have the same sizes."""
        return self.schedule == "constant" and self.restarts is None

    @property
    def _share_lost(self) -> float:
        """Fraction of z that unvisited rows lose in a step, in units of the fraction of the tasks in it."""
        return self._trackers.resting(max(self._weights.values())) if self.beta_unit == "q" and self._steady else 0.0

    def _betas(self, steps: int, m: int) -> dict[str, float]:
        """Return the mixing weights of the next step, after ``steps`` steps."""
        factor = (self._drawing.share(m) if self.beta_unit == "q" else 1.0) * self._pace(steps) ** 2
        return self._trackers.weights({name: min(beta * factor, 1.0) for name, beta in self._weights.items()})

    # ------------------------------------------------------------------------------------------------ rows

    def catch_up(self) -> None:
        """Bring every task's row of the lower parameters up to the current step.

        If there are many tasks, a step leaves the rows that it does not visit behind, so that its cost does not grow
        with their number. They move by a known rule, and catch up at their next visit, or here. Until then the live
        tensors hold their older values. Results do not depend on this call.
        """
        inputs = self._inputs(by_level(self.param_groups), self.parameters("upper"), self.parameters("lower"))
        if len(inputs.tables.get("age", ())) < 2:  # every step visits a single row
            return
        table = self._table(inputs, inputs.lower)
        clock = self._clock(inputs, table.device)
        late = (table.tables["age"] != clock.time).nonzero().flatten()
        with torch.no_grad():
            for ids in table.chunks(late):
                write_rows(table.writes(ids, table.gather(ids, clock), clock))

    def _rows_of(self, lower: Sequence[Tensor]) -> int:
        """Return the leading dimension that all tensors share, taken for that of the tasks; 0 if there is none."""
        sizes = {t.shape[0] if t.dim() else 0 for t in lower}
        return sizes.pop() if len(sizes) == 1 else 0

    def _place_of(self, name: str, parameter: Tensor) -> torch.device | None:
        """Return the device of a table: the user's choice, except for probabilities, which the host draws from."""
        if name in [TABLE + chance for chance in CHANCES]:
            return torch.device("cpu")
        return (self._device if name.startswith(TABLE) else None) or super()._place_of(name, parameter)

    def _table(self, inputs: StepInputs, y: Vector) -> Table:
        """Return the rows of all problems; y has one for each."""
        group = [i for i, group in enumerate(inputs.lower_groups) for _ in group["params"]]
        each = [[i] * t.shape[1:].numel() for i, t in zip(group, y, strict=True)]  # t[0] would gather rows of all ranks
        groups = torch.tensor([i for own in each for i in own], device=y[0].device if is_tracing() else "cpu")
        tables = {name: Split.local(t) for name, t in inputs.tables.items() if name not in CHANCES}
        least = self.floor if self._rule.floored else None
        split, own = Split(y, inputs.ranks), Vector(map(Split.local, y))
        return Table(own, tables, self._trackers.shrinking, self._trackers.moving, groups, least, self._radii, split)

    def _batches(
        self, sampler: Any, ids: Tensor, inputs: StepInputs, *, own: bool = True
    ) -> Callable[[str], Any] | None:
        """Return a function that draws the tasks' data, perhaps this rank's own; None for a single problem."""
        if sampler is None:
            return None
        generator = inputs.generator
        if own:
            generator = inputs.ranks.derive_task_generator(generator, inputs.steps, *ids[:1].tolist())
        return TaskDraws(sampler, ids, len(ids), self._rows_per_batch, generator).batch

    def _chosen(self, table: Table, inputs: StepInputs, sampler: Any) -> Drawn:
        """Draw the tasks of a step, with everything else that it draws if that must be known before."""
        if sampler is not None and inputs.ranks.group is None and not self._drawing.notes:
            late = stays_current(table, self.lazy) and not self._rule.rests
            drawn: Drawn | None = draw_whole(sampler, partial(self._drawn, table.total, late), inputs.random_inputs)
            if drawn is not None:
                return drawn
        source = Source.of(inputs)
        if is_tracing() and sampler is None and not table.split:
            source = source._replace(device=table.device)  # the graph's constants
        return self._drawing.draw(sampler, table.total, source)

    def _drawn(self, m: int, late: bool, sampler: Any, random_inputs: Mapping[str, Any]) -> Drawn:
        """Return all draws of a step from m tasks, in order; ``late``: the other rows are to catch up."""
        source = Source(self.generator)
        drawn = self._drawing.draw(sampler, m, source)
        ids, some = drawn.ids, len(drawn.ids) < m
        draws = TaskDraws(sampler, ids, len(ids), self._rows_per_batch, self.generator)
        return drawn._replace(
            batches={level: draws.batch(level) for level in ("upper", "lower")},
            probes=self._drawing.probe(m, source) if some and self._rule.direction is probed else None,
            others=others(ids, m) if some and late else None,
        )

    def _clock(self, inputs: StepInputs, device: torch.device) -> Clock:
        sizes = len(self._trackers.shrinking), len(self._trackers.moving)
        return Clock.of(inputs.numbers["clock"], *sizes, device, not self._drifts)


def _rates(inputs: StepInputs) -> Tensor:
    """Return the learning rates of the lower groups: on the host, but in a graph, whose arguments they are."""
    rates = [group["lr"] for group in inputs.lower_groups]
    if is_tracing():
        return torch.stack(rates).double()
    return torch.stack([torch.as_tensor(rate, dtype=torch.float64, device="cpu") for rate in rates])


def _warn_if_beta_is_large(checks: Checks, beta: float, steps: int) -> None:
    """Warn of a weight, in units of the fraction of tasks in a step, that makes their drawing the largest error."""
    if steps > PATIENCE and beta > LOUD_BETA and not is_tracing():  # a graph does not know the step count
        checks.alert(
            "loud beta",
            f"beta = {beta:g}, in units of the fraction of tasks in a step, makes the random choice of tasks the "
            "largest error of the hypergradient; use 0.1 or less, or schedule='cube_root'",
            torch.ones((), dtype=torch.bool, device="cpu"),
        )


def _warn_if_floor_is_active(checks: Checks, projected: Rows, rows: int, least: float) -> None:
    """Warn if the floor changes the Hessians of at least half of the visited rows."""
    count: Tensor | None = projected.get("projected_H")
    if count is not None:
        checks.alert_if(
            "floor",
            lambda: (
                f"floor={least:g} is above the least eigenvalue of the lower Hessian for half of the tasks or more "
                '(see diagnostics["projected_H"]), so that the hypergradient is that of another problem; use a floor '
                "below the curvature of the lower loss, or add curvature to the loss"
            ),
            lambda count: 2 * count >= rows,
            count,
        )

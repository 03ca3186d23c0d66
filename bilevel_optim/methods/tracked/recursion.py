"""What the methods with a memory of each lower problem share: rows, two points with one sample, and when to write."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ...hypergradient import Estimate
from ...hypergradient.recursive import Points, flat, shaped
from ...hypergradient.storm import ball
from ...optimizer.base import BilevelOptimizer, CommonOptions
from ...oracle import tasks as task_layer
from ...oracle.oracle import Oracle
from ...problem.parameters import Params, is_count, is_number, require
from ...problem.vector import Vector
from .rows import CHUNK, Rows
from .trackers import Measured, Trackers

__all__ = ["Look", "RecursiveOptimizer", "RecursiveOptions", "is_weight"]

EAGER = 1 << 16  # entries of all rows together up to which every row is kept current
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


class Look(NamedTuple):
    """What a step looks at: some rows as they are now, their data, and the points."""

    oracle: Oracle
    sampler: Any
    ids: Tensor
    scale: Tensor  # 1/m over the share of the draws that were this task, 1 in expectation over the draws
    rows: Rows
    now: dict[str, Tensor]
    x: Tensor
    betas: dict[str, float]

    @property
    def whole(self) -> bool:
        return len(self.ids) == len(self.rows)


class RecursiveOptimizer(BilevelOptimizer):
    r"""Base class of the single-loop methods with trackers of each of m lower problems.

    Without ``tasks`` there is one lower problem, m = 1; with them every lower tensor has a leading dimension m. A
    subclass chooses the trackers, draws tasks (:meth:`_draw`), and says what becomes of the rows that a step looks at
    (:meth:`_advance`). Nothing is written before the whole step has been checked.

    Args:
        trackers: what is remembered of each lower problem.
        beta: mixing weight of the trackers and of the direction d: one number, or a dict with some of their names.
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
    """

    def __init__(
        self,
        upper: Params,
        lower: Params,
        trackers: Trackers,
        *,
        lr: float,
        lower_lr: float,
        beta: float | dict[str, float],
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
        names = (*trackers.names, "d")
        given = beta if isinstance(beta, dict) else dict.fromkeys(names, beta)
        require("beta", beta, set(given) <= set(names) and all(is_weight(b) for b in given.values()))
        require("beta_unit", beta_unit, beta_unit in ("q", "absolute"))
        require("averaging", averaging, is_number(averaging) and 0 < averaging <= 1)
        limits = ceilings or {}
        require(
            "ceilings",
            ceilings,
            set(limits) <= set(trackers.limits) and all(is_number(c) and c > 0 for c in limits.values()),
        )
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
        self.trackers, trackers.ceilings = trackers, dict(limits)
        self.beta, self.beta_unit = {name: float(given.get(name, DEFAULT_BETA)) for name in names}, beta_unit
        self.averaging, self.radius = float(averaging), float(radius)
        self.schedule, self.schedule_offset, self.restarts = schedule, float(schedule_offset), restarts
        self.initial_steps, self.lazy = initial_steps, lazy
        self.state_device = None if state_device is None else torch.device(state_device)
        self._rows: Rows | None = None
        self._stored: dict[str, Any] | None = None  # a loaded state, until a step tells how y is laid out
        self._direction: Tensor | None = None  # d, flat
        self._x_last: Tensor | None = None
        self._pending: Callable[[], None] | None = None

    # ------------------------------------------------------------------------------------------------ for the methods

    @abstractmethod
    def _advance(self, look: Look) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
        """Loss, direction d, trackers (and positions other than y) of the rows after the step, diagnostics."""

    def _batch(self, m: int) -> int:
        """Tasks with data in a step: all of them."""
        return m

    def _draw(self, sampler: Any, m: int) -> tuple[Tensor, Tensor]:
        """Different tasks in increasing order, and their scales."""
        return torch.arange(m), torch.ones(m, dtype=torch.float64)

    def _additional(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """What new rows have beside the trackers."""
        return {}

    def _resting(self, betas: dict[str, float]) -> tuple[dict[str, float], float]:
        """Mixing weights and part of a step for the rows that a step does not look at."""
        return betas, self._tau()

    def _refresh(self, rows: Rows) -> None:
        """Called now and then with all rows current: take out what rounding has added up."""

    # ------------------------------------------------------------------------------------------------ steps

    def _estimate(self, oracle: Oracle) -> Estimate:
        return self._recur(oracle, None, [t.detach().unsqueeze(0) for t in oracle.y])

    def _estimate_tasks(self, oracle: Oracle, sampler: Any) -> Estimate:
        task_layer.task_count(sampler, 1)
        live, names = [t.detach() for t in oracle.y], oracle.names[len(oracle.x) :]
        sizes = {t.shape[0] if t.dim() else None for t in live}
        if len(sizes) > 1 or None in sizes or (hasattr(sampler, "__len__") and sizes != {len(sampler)}):
            number = f" of the {len(sampler)}" if hasattr(sampler, "__len__") else ""
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, live, strict=True))
            raise ValueError(
                f"{type(self).__name__} keeps y of every task: the lower parameters need a leading dimension with one "
                f"row for each{number} tasks, but have shapes {shapes}"
            )
        return self._checked_estimate(oracle, partial(self._recur, sampler=sampler, live=live))

    def _checked_estimate(self, oracle: Oracle, make: Callable[[Oracle], Estimate] | None = None) -> Estimate:
        try:
            estimate = super()._checked_estimate(oracle, make)
            if self._pending is not None:
                self._pending()
        finally:
            self._pending = None
        return estimate

    def _at_risk(self) -> list[Tensor]:
        return [] if self.warm_start else super()._at_risk()  # y is written last

    def _recur(self, oracle: Oracle, sampler: Any, live: list[Tensor]) -> Estimate:
        x, m = flat(oracle.x, 1)[0], len(live[0])
        if self._stored is not None:
            self._rows, self._stored = self._restored(live, self._stored), None
        if not self.warm_start:
            oracle.y.copy_(self._start(oracle))
            self._rows = None
        if self._rows is None or self._grown(self._rows, live, x):
            return self._begin(oracle, sampler, live, x)
        rows = self._rows
        if len(rows) != m:
            raise ValueError(f"{type(self).__name__} began with {len(rows)} lower problems, but now there are {m}")
        rows.positions = live
        ids, scale = self._draw(sampler, m)
        betas = self._betas(m)
        look = Look(oracle, sampler, ids, scale.to(oracle.device), rows, rows.gather(ids), x, betas)
        loss, direction, updated, diagnostics = self._advance(look)
        positions = self._moved(look.now, updated)

        def commit() -> None:
            if look.whole:
                rows.clock += 1  # no row rests
            else:
                resting, tau = self._resting(betas)
                rows.tick(resting, [self._rates()] * len(self.trackers.moving), tau)
            rows.scatter(ids, {**look.now, **updated, **positions})
            self._keep(direction, x)

        self._pending = commit
        return Estimate(loss, shaped(direction, oracle.x), {**self._counted(), **diagnostics})

    def _grown(self, rows: Rows, live: list[Tensor], x: Tensor) -> bool:
        """Whether parameters were added since the last step: everything tracked has another shape then."""
        width = sum(t[0].numel() for t in live)
        return self._x_last is None or len(self._x_last) != len(x) or rows.values["w"].shape[1] != width

    def _begin(self, oracle: Oracle, sampler: Any, live: list[Tensor], x: Tensor) -> Estimate:
        """The first estimate looks at every task, because the recursion has to start close to the truth."""
        m, found = len(live[0]), dict[str, list[Tensor]]()
        loss, direction = torch.zeros((), device=oracle.device), torch.zeros_like(x)
        width = sum(t[0].numel() for t in live)
        size = max(CHUNK // (width * (len(x) if self.trackers.apart else width)), self._batch(m), 1)
        rates = self._entry_rates(live)
        for start in range(0, m, size):
            ids = torch.arange(start, min(start + size, m))
            draws, n = self._draws(sampler, ids), len(ids)
            y = flat([t[ids.to(t.device)] for t in live], n)
            weights = None if self.trackers.apart else torch.full((n,), 1 / m)
            for _ in range(self.initial_steps):
                points = Points(oracle, draws, x, y, apart=False)
                with points.at(x, y):
                    y = y - rates * flat(points.oracle.lower(points.g)[1], n)
            points = Points(oracle, draws, x, y, apart=self.trackers.apart, weights=weights)
            value, part, rows = self.trackers.first(points, x, y, rates)
            factor = 1 / m if self.trackers.apart else 1.0  # or it is in the weights
            loss, direction = loss + value * factor, direction + part * factor
            rows |= {"y": y, "y_last": y, **self._additional(rows)}
            for name, t in rows.items():
                found.setdefault(name, []).append(t.to(self.state_device or t.device))
        values = {name: torch.cat(parts) for name, parts in found.items()}

        def commit() -> None:
            final = {**values, **self._moved(values, values, rates.to(values["y"].device))}
            y = final.pop("y")
            self._rows = self._made(live, final)
            self._rows.place(torch.arange(m), y)
            self._keep(direction, x)

        self._pending = commit
        return Estimate(loss, shaped(direction, oracle.x), {**self._counted(), "rows_touched": torch.tensor(m)})

    def _moved(
        self, before: dict[str, Tensor], tracked: dict[str, Tensor], rates: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Positions after a step, and before it."""
        positions: dict[str, Tensor] = {}
        tau = self._tau()
        if rates is None:
            assert self._rows is not None
            rates = self._entry_rates(self._rows.positions)
        for name, velocity in self.trackers.moving:
            at, along = before[name], rates.to(tracked[velocity]) * tracked[velocity]
            radius = self.radius if name == "y" else self.trackers.ceilings.get(name, math.inf)
            moved = at - tau * along
            if math.isfinite(radius):
                target, self.trackers.active[name] = ball(at - along, radius)
                moved = (1 - tau) * at + tau * target
            positions |= {name: moved, f"{name}_last": at}
        return positions

    def _measured(self, look: Look, weights: Tensor | None) -> Measured:
        """Derivatives of the rows looked at, at both points; each rank takes care of a part of the tasks."""
        oracle, n = look.oracle, len(look.ids)
        rank, world = oracle.ranks()
        assert self._x_last is not None
        if world == 1 or look.sampler is None:
            draws = self._draws(look.sampler, look.ids)
            points = Points(oracle, draws, look.x, look.now["y"], apart=self.trackers.apart, weights=weights)
            return self.trackers.measure(points, look.now, look.x, self._x_last)
        mine = torch.arange(rank, n, world)
        x, shapes = look.x, self.trackers.shapes(len(look.x), look.now["y"].shape[1])
        new, old = ({name: x.new_zeros(n, *shape) for name, shape in shapes.items()} for _ in range(2))
        loss, sums = torch.zeros((), device=oracle.device), x.new_zeros(2, 0 if self.trackers.apart else len(x))
        if len(mine):
            own = {name: t[mine] for name, t in look.now.items()}
            part = None if weights is None else weights[mine]
            points = Points(
                oracle, self._draws(look.sampler, look.ids[mine]), x, own["y"],
                apart=self.trackers.apart, weights=part,
            )  # fmt: skip
            loss, found, last, sums = self.trackers.measure(points, own, x, self._x_last)
            for whole, some in ((new, found), (old, last)):
                for name, t in whole.items():
                    t[mine] = some[name]
        results = oracle.totalled(loss, sums, *new.values(), *old.values())
        return Measured(
            results[0],
            dict(zip(new, results[2:], strict=False)),
            dict(zip(old, results[2 + len(new) :], strict=True)),
            results[1],
        )

    # ------------------------------------------------------------------------------------------------ rows

    def _draws(self, sampler: Any, ids: Tensor) -> task_layer.TaskDraws | None:
        if sampler is None:
            return None
        sizes = {"lower": self.lower_batch, "upper": self.upper_batch}
        return task_layer.TaskDraws(sampler, ids, len(ids), sizes, self.generator)

    def _made(self, live: list[Tensor], values: dict[str, Tensor]) -> Rows:
        groups = self._entry_groups(live)
        if math.isfinite(self.radius) and int(groups.max()) > 0:
            raise ValueError("a radius needs all lower parameters in one group, as they make one step of one length")
        same: dict[float, str] = {}
        decays = {name: same.setdefault(self.beta[name], name) for name in self.trackers.names}
        if "scale" in values:
            decays["scale"] = decays["u"]
        return Rows(
            live, groups, values, moving=self.trackers.moving, decays=decays, least=self._least(), radius=self.radius,
            device=self.state_device,
        )  # fmt: skip

    def _least(self) -> float | None:
        """Floor of H in rows that are not looked at."""
        return None

    def _restored(self, live: list[Tensor], stored: dict[str, Any]) -> Rows:
        rows = self._made(live, dict(stored["values"]))
        rows.restore(stored)
        return rows

    def _keep(self, direction: Tensor, x: Tensor) -> None:
        rows = self._rows
        assert rows is not None
        self._direction, self._x_last = direction, x
        width = sum(t[0].numel() for t in rows.values.values())
        if self.lazy is False or (self.lazy is None and len(rows) * width <= EAGER):
            rows.catch_up()
        if rows.rebase():
            self._refresh(rows)

    def catch_up(self) -> None:
        """Bring every task's row of the lower parameters up to the present step.

        If there are many tasks, the rows that a step does not look at are left behind, so that the cost of a step does
        not grow with their number: they move by a known rule, and catch up when they are next looked at, or here. Until
        then the live tensors hold their older values. Results do not depend on it.
        """
        if self._rows is not None:
            self._rows.catch_up()

    # ------------------------------------------------------------------------------------------------ sizes of steps

    def _pace(self, step: int) -> float:
        """What the schedule and the restarts make of the learning rates at a step."""
        pace = 1.0 if self.schedule == "constant" else max(self.schedule_offset + step, 1.0) ** (-1 / 3)
        if self.restarts is not None:
            pace *= 2.0 ** (-int(math.log2(step / self.restarts + 1)) / 2)
        return pace

    def _tau(self) -> float:
        return self.averaging * self._pace(self._steps_done)

    def _betas(self, m: int) -> dict[str, float]:
        unit = self._batch(m) / m if self.beta_unit == "q" else 1.0
        factor = unit * self._pace(self._steps_done) ** 2
        return {name: min(beta * factor, 1.0) for name, beta in self.beta.items()}

    def _direction_scale(self, gradient: Vector) -> Tensor | float:
        return self._pace(self._steps_done - 1)  # the step has been counted by now

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups("lower")]

    def _entry_groups(self, live: Sequence[Tensor]) -> Tensor:
        """The number of the group that each entry of a row of y belongs to."""
        group = torch.tensor([i for i, g in enumerate(self._groups("lower")) for _ in g["params"]])
        return group.repeat_interleave(torch.tensor([t[0].numel() for t in live]))

    def _entry_rates(self, live: Sequence[Tensor]) -> Tensor:
        rates = torch.tensor(self._rates(), dtype=torch.float64, device=live[0].device)
        return rates[self._entry_groups(live).to(live[0].device)]

    def _counted(self) -> dict[str, Tensor]:
        """How many projections changed something."""
        return {f"projected_{name}": count for name, count in self.trackers.active.items()}

    # ------------------------------------------------------------------------------------------------ state

    def _snapshot(self) -> Callable[[], None]:
        restore = super()._snapshot()
        kept = (self._rows, self._stored, self._direction, self._x_last)

        def back() -> None:
            restore()
            self._rows, self._stored, self._direction, self._x_last = kept

        return back

    def state_dict(self) -> dict[str, Any]:
        """As for every method; rows are copied as they are, also those left behind, to go on bit for bit."""
        state = super().state_dict()
        rows = self._stored if self._rows is None else self._rows.state()
        state["bilevel"]["recursion"] = {"rows": rows, "direction": self._direction, "x": self._x_last}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        own = state_dict["bilevel"]["recursion"]
        self._rows, self._stored = None, own["rows"]
        device = self._parameters("upper")[0].device
        self._direction, self._x_last = (
            None if t is None else t.clone().to(device) for t in (own["direction"], own["x"])
        )


def is_weight(value: object) -> bool:
    """Whether value is a number that can be a mixing weight."""
    return is_number(value) and 0 <= float(value) < math.inf  # type: ignore[arg-type]

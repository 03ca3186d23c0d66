r"""Nesterov momentum with restarts for a smooth nonconvex objective: the iteration of x shared by several optimizers.

.. math:: w_k = x_k + (1 - \theta)(x_k - x_{k-1}), \qquad x_{k+1} = w_k - \eta u_k, \qquad u_k \approx \nabla\Phi(w_k),

restarted from :math:`x_{k+1}` without momentum once :math:`(k + 1) \sum_{i \le k} \|x_{i+1} - x_i\|^2 > B^2`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...distributed.ranks import Ranks
from ...optimizer.options import FROM_ONE, FROM_ZERO, TRUE_OR_FALSE
from ...optimizer.step import Update
from ...optimizer.transaction import AVERAGE, LIVE
from ...problem.parameters import is_count, is_number, require, require_choice
from ...problem.random import uniform_ball
from ...problem.vector import Vector

__all__ = ["LookAhead", "Momentum", "Position", "Progress", "Restarted", "iteration_property"]

MOMENTUM = "Invalid {name} value: {value} (it must be a number of at least 0 and below 1)"
RADIUS = "Invalid {name} value: {value} (it must be a number above 0 or None)"
AUTOMATIC_RADIUS = 5.0  # restart radius in lengths of the first step
LARGEST_PERTURBATION = 0.02  # in restart radii: a larger one keeps triggering restarts at a minimum


@dataclass(frozen=True)
class Progress:
    """Progress of a run in plain numbers, as an optimizer keeps them in ``numbers``."""

    step: int = 0  # k, steps made in the current epoch
    restarts: int = 0
    travelled: float = 0.0  # sum of the squared steps of the epoch, in the metric of the learning rates
    shortest: float = math.inf  # smallest squared step in the second half of the epoch
    selected: int = 0  # its index, K0
    rates: list[float] | None = None  # learning rate of each group, as it was when the epoch began
    radius: float | None = None  # the automatic one
    smallest: float = math.inf  # smallest squared gradient, as long as there is no output
    output: float = math.inf  # squared step at which the output was taken
    perturbed: bool = False  # the initial point has had its perturbation
    converged: bool = False
    swapped: bool = False  # the parameters hold the output, and "live" holds x

    @classmethod
    def of(cls, numbers: Mapping[str, Any]) -> Self:
        """Build from plain numbers; a run that has not begun has none."""
        return cls(**{name: value for name, value in numbers.items() if name in cls.__dataclass_fields__})

    @classmethod
    def now(cls, numbers: Mapping[str, Any], memory: Mapping[str, Vector]) -> Self:
        """Return the progress before a step; a parameter without state starts a new epoch and a new output."""
        now = cls.of(numbers)
        known = "previous" in memory and "sum" in memory
        return now if known or now.swapped else replace(now.afresh(), smallest=math.inf, output=math.inf)

    @property
    def numbers(self) -> dict[str, Any]:
        """Progress as plain numbers."""
        return {**vars(self)}

    def afresh(self) -> Self:
        """Return the progress at the start of another epoch, without momentum."""
        return replace(self, step=0, travelled=0.0, shortest=math.inf, rates=None)


@dataclass(frozen=True)
class Position:
    """A point, and everything else that a step from it depends on.

    Attributes:
        x: the point.
        memory: the state of x.
        numbers: progress of the run, see `Progress`.
        groups: the parameter groups of x, with their learning rates.
        generator: source of the perturbations.
        ranks: processes that must have the same perturbation.
    """

    x: Vector
    memory: Mapping[str, Vector]
    numbers: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    generator: torch.Generator | None
    ranks: Ranks

    def rates(self, now: Progress) -> list[float]:
        """Return the learning rate of each group in this epoch."""
        return now.rates or [float(group["lr"]) for group in self.groups]

    def each(self, values: Sequence[float]) -> list[float]:
        """Return the value of its group for each tensor."""
        return [v for group, v in zip(self.groups, values, strict=True) for _ in group["params"]]


class LookAhead(NamedTuple):
    """The point for the next gradient, the state to keep until the update, and the progress of the run."""

    point: Vector
    memory: dict[str, Vector]
    progress: Progress


@dataclass(frozen=True)
class Momentum:
    """The iteration of x, except the gradient, as functions of values; the arguments are those of `PRAHGD`.

    The state of x is ``previous`` (the last x), ``sum`` (of the look-ahead points of the epoch), ``candidate``
    (their average up to the shortest step), ``average`` (the output) and, until the first update, ``perturbation``.
    """

    momentum: float
    restart_radius: float | None
    restart_period: int
    on_converged: str
    perturbation: float = 0.0
    perturb_initial: bool = True

    def __post_init__(self) -> None:
        """Raise if an argument is out of its range."""
        radius, period, noise = self.restart_radius, self.restart_period, self.perturbation
        require("momentum", self.momentum, is_number(self.momentum) and 0 <= self.momentum < 1, MOMENTUM)
        require("restart_radius", radius, radius is None or (is_number(radius) and radius > 0), RADIUS)
        require("restart_period", period, is_count(period) and period > 0, FROM_ONE)
        require_choice("on_converged", self.on_converged, ("stop", "continue"))
        require("perturbation", noise, is_number(noise) and 0 <= noise < math.inf, FROM_ZERO)
        require("perturb_initial", self.perturb_initial, isinstance(self.perturb_initial, bool), TRUE_OR_FALSE)

    def look_ahead(self, point: Position) -> LookAhead:
        """Return the point at which to evaluate the next gradient."""
        now = Progress.now(point.numbers, point.memory)
        new: dict[str, Vector] = {}
        if now.swapped:
            return LookAhead(point.x, new, now)
        if now.step == 0 and self.perturb_initial and self.perturbation > 0 and not now.perturbed:
            # x itself must not move before the update, so the perturbation waits in the memory.
            new["perturbation"], now = self._shift(point, now), replace(now, perturbed=True)
        return LookAhead(self._ahead(point.x, {**point.memory, **new}, now)[1], new, now)

    def update(self, point: Position, gradient: Vector) -> Update:
        """Make one step along a gradient that was evaluated at the look-ahead point, then test for a restart.

        Costs one host synchronisation; nothing else in the step depends on the host.
        """
        now = Progress.now(point.numbers, point.memory)
        now = replace(now, rates=point.rates(now))
        rates, largest = point.each(point.rates(now)), max(point.rates(now), default=0.0)
        start, w = self._ahead(point.x, point.memory, now)
        x = w.descended(gradient, rates)
        step = x - start
        # Different rates precondition the groups; in the rescaled coordinates the plain rule applies.
        weighted = step * [math.sqrt(largest / rate) if rate > 0 else 0.0 for rate in rates]
        squared, slope = (norm**2 for norm in torch.stack([weighted.norm(), gradient.norm()]).tolist())

        total = point.memory["sum"] + w if now.step else w.clone()
        memory: dict[str, Vector | None] = {"previous": start, "sum": total, "perturbation": None}
        if now.output == math.inf and slope < now.smallest:
            memory[AVERAGE], now = w.clone(), replace(now, smallest=slope)
        if now.step >= self.restart_period // 2 and squared < now.shortest:
            memory["candidate"] = total * (1 / (now.step + 1))
            now = replace(now, shortest=squared, selected=now.step)
        if now.radius is None and squared > 0:
            automatic = max(AUTOMATIC_RADIUS * math.sqrt(squared), self.perturbation / LARGEST_PERTURBATION)
            now = replace(now, radius=automatic)
        now = replace(now, step=now.step + 1, travelled=now.travelled + squared)

        radius, restarts_now = now.radius if self.restart_radius is None else self.restart_radius, False
        if radius is not None and now.step * now.travelled > radius * radius:
            now, restarts_now = replace(now, restarts=now.restarts + 1), True
        elif now.step == self.restart_period:
            candidate = memory.get("candidate") or point.memory.get("candidate")
            if now.shortest < now.output and candidate is not None:
                memory[AVERAGE], memory["candidate"] = candidate, None
                now = replace(now, output=now.shortest)
            now, restarts_now = replace(now, converged=True), self.on_converged == "continue"
        if restarts_now:
            x = x + self._shift(point, now) if self.perturbation > 0 else x
            now = now.afresh()
        return Update(x, upper_memory=memory, numbers=now.numbers)

    def _ahead(self, x: Vector, memory: Mapping[str, Vector], now: Progress) -> tuple[Vector, Vector]:
        """Return the x of this step, and the look-ahead point."""
        if "perturbation" in memory:
            x = x + memory["perturbation"]
        return x, x + (x - memory["previous"]) * self.momentum if now.step else x

    def _shift(self, point: Position, now: Progress) -> Vector:
        """Draw a point of the ball, in the metric of the groups' learning rates."""
        rates = point.rates(now)
        largest = max(rates, default=0.0) or 1.0
        shift = point.ranks.copy_from_first(uniform_ball(point.x, self.perturbation, point.generator))
        return shift * point.each([math.sqrt(rate / largest) for rate in rates])


def iteration_property(name: str) -> Any:
    """Return a property for a hyper-parameter of the iteration that an optimizer holds."""

    def assign(optimizer: Restarted, value: Any) -> None:
        optimizer._iteration = replace(optimizer._iteration, **{name: value})

    return property(lambda optimizer: getattr(optimizer._iteration, name), assign)


class Restarted(Optimizer):
    """Public interface of the optimizers that move x by `Momentum`; the next base class takes the other arguments.

    Attributes:
        iteration: the iteration of x, with its hyper-parameters.
        numbers: plain numbers that change from step to step, see `Progress`.
    """

    def _follow(self, iteration: Momentum) -> None:
        """Set the iteration of x."""
        self._iteration = iteration
        self.numbers: dict[str, Any] = {}

    momentum, restart_radius, restart_period = (
        iteration_property("momentum"),
        iteration_property("restart_radius"),
        iteration_property("restart_period"),
    )
    on_converged = iteration_property("on_converged")

    @property
    def _progress(self) -> Progress:
        """Progress of the run."""
        return Progress.of(self.numbers)

    @property
    def converged(self) -> bool:
        """True once an epoch has lasted ``restart_period`` steps without a restart."""
        return self._progress.converged

    @property
    def restarts(self) -> int:
        """Number of restarts so far."""
        return self._progress.restarts

    @property
    def epoch_step(self) -> int:
        """Number of steps since the last restart."""
        return self._progress.step

    def averaged_parameters(self) -> list[Tensor]:
        """Return the method's output, one tensor for each upper parameter.

        Once ``converged``, it is the average of the look-ahead points of the last epoch up to its shortest late step.
        Before, it is the look-ahead point with the smallest gradient estimate so far (at first the parameters).
        """
        swapped = self._progress.swapped
        found = [(p, p if swapped else self.state[p].get(AVERAGE, p)) for p in upper_tensors(self)]
        return [average.detach().to(p, copy=True) for p, average in found]

    @torch.no_grad()
    def swap_averaged(self) -> None:
        """Exchange the parameters' values and `averaged_parameters`; a second call exchanges them back.

        The lower parameters still belong to the last x: ``backward`` improves them at the swapped point (and sets
        ``.grad`` to the hypergradient there). ``step`` raises RuntimeError until they are swapped back.
        """
        swapped = self._progress.swapped
        for p in upper_tensors(self):
            state = self.state[p]
            if LIVE in state:
                p.copy_(state.pop(LIVE))
            elif AVERAGE in state:  # while swapped, older checkpoints have x there
                here = p.detach().clone()
                p.copy_(state[AVERAGE])
                state[AVERAGE if swapped else LIVE] = here
        self.numbers = {**self.numbers, "swapped": not swapped}

    def _finished(self) -> bool:
        """Return True if ``step`` has nothing left to do and returns the last loss."""
        if self._progress.swapped:
            raise RuntimeError("the parameters hold the averaged point; call swap_averaged() again before step")
        return self._progress.converged and self._iteration.on_converged == "stop"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch; a new group of x starts a new epoch, without momentum."""
        super().add_param_group(param_group)
        if param_group.get("level", "upper") == "upper":
            self.numbers = {**self.numbers, **self._progress.afresh().numbers}


def upper_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of x, frozen ones included."""
    groups = [group for group in optimizer.param_groups if group.get("level", "upper") == "upper"]
    return [p for group in groups for p in group["params"]]

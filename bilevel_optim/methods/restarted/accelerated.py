"""Base classes of RAHGD, RAGDA and their perturbed variants: restarted momentum on x over Nesterov's method on y."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch

from ...hypergradient import Estimate
from ...optimizer.base import BilevelOptimizer
from ...optimizer.options import InitVar, choice, count, number, option
from ...optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs, Update, replace
from ...oracle.oracle import Oracle
from ...problem.vector import Vector
from ...solvers.agd import agd_or
from .restart import Momentum, Position, Progress, Restarted, iteration_property

__all__ = ["Accelerated", "Perturbed"]


class Accelerated(Restarted, BilevelOptimizer):
    """Base class of the methods that move x by `Momentum` and y by `AGD`; the arguments are those of `RAHGD`."""

    _hypergradient_draws: ClassVar[list[Draw]] = [UPPER, LOWER]
    _fixed_rate = "its analysis ties the rates of x and y and the momentum together"

    lr: InitVar[float] = option()
    lower_lr: InitVar[float | None] = option(default=None)
    momentum: InitVar[float] = option(default=0.9)
    restart_radius: InitVar[float | None] = option(default=None)
    restart_period: InitVar[int] = option(default=100)
    lower_momentum: float = option(default=0.0, settable=False)
    lower_restart: str = choice("keep", "zero", default="keep")
    restart_steps: int | None = count(default=None, optional=True)
    lower_tol: float = number(default=0.0, least=0, finite=False)
    on_converged: InitVar[str] = option(default="stop")

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        names = [field.name for field in fields(Momentum) if field.name in options]
        self._follow(Momentum(**{name: options[name] for name in names}))
        self._own_solver = options["lower_optimizer"] is None
        options["lower_optimizer"] = agd_or(options["lower_optimizer"], options["lower_momentum"])

    def _draws(self, inputs: DrawInputs) -> list[Draw] | None:
        """Return the draws of the lower steps, which are more when an epoch begins, then those of the hypergradient."""
        if self.lower_tol > 0:
            return None
        fresh = Progress.now(inputs.numbers, inputs.upper_memory).step == 0
        return [LOWER] * sum(self._solves(fresh)) + self._hypergradient_draws

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the lower steps and return the hypergradient, both at the look-ahead point."""
        ahead = self._iteration.look_ahead(_point(oracle.x, inputs))
        now, here = ahead.progress, oracle.at(upper=ahead.point)
        fresh = now.step == 0
        if fresh and self.lower_restart == "zero":
            here = here.at(lower=here.y.zeros_like())
        for steps in self._solves(fresh):
            if self._own_solver:  # the momentum of `AGD` is not carried from one solve to the next
                inputs = replace(inputs, solver=None)
            here, moved = inputs.run_lower_steps(here, steps, tol=self.lower_tol)
            inputs = replace(inputs, solver=moved.memory)
        estimate = self._hypergradient(here, inputs).with_lower(moved)
        return replace(
            estimate,
            solver=None if self._own_solver else estimate.solver,
            upper_memory=ahead.memory,
            numbers=now.numbers,
        )

    def _graph_key(self, steps: int, numbers: Mapping[str, Any]) -> Any:
        """Cache key for the next step's graph; None for the first step of an epoch, which runs eagerly."""
        now = Progress.of(numbers)
        return (self._iteration, now.swapped) if now.step or now.swapped else None

    def _static_diagnostics(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the number of restarts and the step within the epoch."""
        now = Progress.of(numbers)
        return {
            name: torch.tensor(n, device="cpu") for name, n in (("restarts", now.restarts), ("epoch_step", now.step))
        }

    @abstractmethod
    def _hypergradient(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return the estimate at the end of the lower steps."""

    def _solves(self, fresh: bool) -> list[int]:
        """Return the steps of each lower solve; an epoch begins with two solves."""
        if not fresh:
            return [self.lower_steps]
        twice = self.lower_steps if self.lower_restart == "zero" else 0
        return [twice if self.restart_steps is None else self.restart_steps, self.lower_steps]

    def update(self, x: Vector, gradient: Vector, inputs: StepInputs) -> Update:
        """Make one step of the iteration of x."""
        return self._iteration.update(_point(x, inputs), gradient)

    def _without_lookahead(self, inputs: StepInputs) -> StepInputs:
        """Return inputs whose look-ahead point is x itself, as for swapped parameters."""
        return replace(inputs, numbers={**inputs.numbers, "swapped": True})


class Perturbed(Accelerated):
    """Base class of the perturbed variants.

    Args:
        upper, lower, lr, lower_lr, lower_steps, options: those of the method that is perturbed.
        perturbation, perturb_initial: see `PRAHGD`.
    """

    _size: InitVar[float] = option(default=1e-3, alias="perturbation")
    _at_first: InitVar[bool] = option(default=True, alias="perturb_initial")
    perturbation, perturb_initial = iteration_property("perturbation"), iteration_property("perturb_initial")


def _point(x: Vector, inputs: StepInputs) -> Position:
    return Position(x, inputs.upper_memory, inputs.numbers, inputs.upper_groups, inputs.generator, inputs.ranks)

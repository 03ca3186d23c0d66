"""The methods by name, with their settings on the two kinds of problems on which the programs compare all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import configurations

from .sampling import IndexObjective, IndexTerms

__all__ = ["PAPER", "Method", "decaying", "exact", "growing_penalty", "stochastic"]

# Arguments that make a method that of its paper, where the library's defaults are others; by the name of the class.
PAPER: dict[str, dict[str, Any]] = {
    "RTMLMC": {"neumann": "product", "level_sampling": "independent", "cap": False},
    "DLSGD": {"neumann": "product", "cap": False},
    "F2SA": {"samples": "independent"},
    "RSVRB": {"variant": "faithful"},
    "PZOBO": {"directions": 1},
    "RAHGD": {"lower_restart": "zero", "linear_start": "y"},
    "PRAHGD": {"lower_restart": "zero", "linear_start": "y", "perturb_initial": False},
    "PRAGDA": {"lower_restart": "zero", "perturb_initial": False},
}


def growing_penalty(optimizer: bo.F2SA, exponent: float = 1 / 7) -> bo.F2SA:
    """F2SA of Kwon et al.: its penalty 1/nu grows as (1 + t)^exponent with the steps t."""
    first, made = optimizer.nu, 0

    def grow(*_: object) -> None:
        nonlocal made
        made += 1
        optimizer.nu = first * (1 + made) ** -exponent

    optimizer.register_step_post_hook(grow)
    return optimizer


SET = ("decay", "series", "matrices", "tasks")  # fields of `Method` that are among the settings


def exact() -> dict[str, partial[bo.BilevelOptimizer]]:
    """The methods for losses without noise (recipes.compare), as they declare themselves."""
    return {name: partial(cls, **arguments) for name, (cls, arguments) in configurations("compare").items()}


class Method(NamedTuple):
    """A constructor with its settings for sampled losses.

    Attributes:
        make: called with x, y, ``lr`` and ``lower_lr``.
        decay: exponents a with which the step sizes of x and of y fall, as (1 + t / 100)^-a at iteration t.
        series: whether ``linear_lr`` is to stay at the first ``lower_lr``.
        terms: whether it needs losses that are finite sums of known terms.
        floor: whether it takes a lower bound ``floor`` of the curvature of the lower loss.
        matrices: whether it keeps the lower Hessian and the cross derivative as matrices.
        tasks: whether it draws some of many lower problems at each step by itself.
    """

    make: partial[Any]
    decay: tuple[float, float] = (0.0, 0.0)
    series: bool = False
    terms: bool = False
    floor: bool = False
    matrices: bool = False
    tasks: bool = False

    def optimizer(
        self, x: Tensor, y: Tensor, *, lr: float, lower_lr: float, convexity: float, **options: Any
    ) -> bo.BilevelOptimizer:
        """The optimizer with these step sizes, for a lower loss of (about) this strong convexity."""
        if self.series:
            options["linear_lr"] = lower_lr
        if self.floor:
            options["floor"] = convexity / 2  # at the bound itself the estimates would be biased
        optimizer: bo.BilevelOptimizer = self.make([x], [y], lr=lr, lower_lr=lower_lr, **options)
        return optimizer

    def objective(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> IndexObjective | IndexTerms:
        """A loss of indices in the form that the method needs; its ``drawn`` counts the examples."""
        return (IndexTerms if self.terms else IndexObjective)(loss, size, batch, seed, tasks)


def stochastic() -> dict[str, Method]:
    """The methods for sampled losses, as they declare themselves; some settings are fields of `Method`."""
    found = {}
    for name, (cls, arguments) in configurations("stochastic").items():
        own = {key: arguments.pop(key) for key in SET if key in arguments}
        floor = "floor" in inspect.signature(cls).parameters
        found[name] = Method(partial(cls, **arguments), terms=cls.declared.data == "finite_sum", floor=floor, **own)
    return found


def decaying(optimizer: bo.BilevelOptimizer, method: Method) -> torch.optim.lr_scheduler.LambdaLR:
    """The scheduler of the method's decay, with one step per iteration."""

    def factor(level: str) -> Callable[[int], float]:
        exponent = method.decay[level == "lower"]
        return lambda t: (1 + t / 100) ** -exponent

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [factor(group["level"]) for group in optimizer.param_groups])

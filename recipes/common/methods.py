"""The methods by name, with their settings on the two kinds of problems on which the programs compare all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bilevel_optim as bo

from .sampling import IndexObjective, IndexTerms

__all__ = ["ELSEWHERE", "EXACT", "STOCHASTIC", "Method", "decaying"]

# Losses without noise (recipes.compare).
EXACT: dict[str, partial[Any]] = {
    "first-order": partial(bo.FirstOrder),
    "aid-cg": partial(bo.AID),
    "aid-neumann": partial(bo.AID, linear_solver="neumann"),
    "aid-fp": partial(bo.AID, linear_solver="fixed_point"),
    "itd": partial(bo.ITD),
    "f2sa-1": partial(bo.F2SA, order=1),
    "f2sa-2": partial(bo.F2SA, order=2),
    "f2sa-3": partial(bo.F2SA, order=3),
    "pzobo-1": partial(bo.PZOBO, directions=1, warm_start=True),
    "pzobo-16": partial(bo.PZOBO, directions=16, warm_start=True),
    "pzobo-code": partial(bo.PZOBO, directions=1, direction="block_sphere", scale="none", warm_start=True),
    "hozog-1": partial(bo.HOZOG, directions=1, warm_start=True),
    "hozog-16": partial(bo.HOZOG, directions=16, warm_start=True),
    "rahgd": partial(bo.RAHGD),
    "prahgd": partial(bo.PRAHGD),
    "ba": partial(bo.BA),
    "paid": partial(bo.PAID),
}


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


DOUBLE: dict[str, Any] = {"lower_steps": 10}
SERIES: dict[str, Any] = {"linear_steps": 10}
BOTH: dict[str, Any] = {**DOUBLE, **SERIES}
# Sampled losses (recipes.hyper_regularization, recipes.benchmarks.bilevel_suite).
STOCHASTIC: dict[str, Method] = {
    "stocbio": Method(partial(bo.StocBiO, **BOTH)),
    "bsa": Method(partial(bo.BSA, growth=0.0, **BOTH), (1 / 2, 0)),
    "ttsa": Method(partial(bo.TTSA, **SERIES), (3 / 5, 2 / 5), series=True),
    "sustain": Method(partial(bo.SUSTAIN, **SERIES), (1 / 3, 1 / 3), series=True),
    "mrbo": Method(partial(bo.MRBO, **SERIES), (1 / 3, 1 / 3), series=True),
    "vrbo": Method(partial(bo.VRBO, **BOTH)),
    "soba": Method(partial(bo.SOBA), (1 / 2, 1 / 2)),
    "saba": Method(partial(bo.SABA), terms=True),
    "fsla": Method(partial(bo.FSLA), (1 / 2, 1 / 2)),
    "amigo": Method(partial(bo.AmIGO, **BOTH)),
    # Recursions for one lower problem.
    "svrb": Method(partial(bo.SVRB), (1 / 3, 1 / 3), floor=True, matrices=True),
    "svrb-free": Method(partial(bo.SVRB, variant="matrix_free"), (1 / 3, 1 / 3), floor=True),
    "stable": Method(partial(bo.STABLE), (1 / 2, 1 / 2), floor=True, matrices=True),
    # Recursions for many, a few of which are looked at in a step.
    "rsvrb": Method(partial(bo.RSVRB), (1 / 3, 1 / 3), floor=True, tasks=True),
    "rsvrb-faithful": Method(partial(bo.RSVRB, variant="faithful"), (1 / 3, 1 / 3), floor=True, tasks=True),
    "rsvrb-normalised": Method(partial(bo.RSVRB, variant="self_normalised"), (1 / 3, 1 / 3), floor=True, tasks=True),
    "rsvrb-free": Method(partial(bo.RSVRB, variant="matrix_free"), (1 / 3, 1 / 3), floor=True, tasks=True),
    "bsvrb": Method(partial(bo.BSVRB), (1 / 3, 1 / 3), floor=True, tasks=True),
    "bsvrb-2": Method(partial(bo.BSVRB, version=2), (1 / 3, 1 / 3), floor=True, tasks=True),
    # Made for exact losses, here with sampled ones: controls.
    "aid": Method(partial(bo.AID, **BOTH)),
    "aid-neumann": Method(partial(bo.AID, linear_solver="neumann", **BOTH)),
    "itd": Method(partial(bo.ITD, **DOUBLE)),
    "f2sa": Method(partial(bo.F2SA, order=1, normalize=False, **DOUBLE)),
    "f2sa-2": Method(partial(bo.F2SA, order=2, normalize=False, **DOUBLE)),
    "pzobo": Method(partial(bo.PZOBO, directions=1, **DOUBLE)),
    "hozog": Method(partial(bo.HOZOG, directions=1, **DOUBLE)),
    "ba": Method(partial(bo.BA, **BOTH)),
    "paid": Method(partial(bo.PAID, **BOTH)),
    "first-order": Method(partial(bo.FirstOrder, **DOUBLE)),
}
# Public methods that are in neither table, and those that are in one of them only.
INITIAL = dict.fromkeys(("ESMAML", "MAML", "ANIL", "FOMAML", "iMAML"), "x is an initial point for y")
CONTEXTS = dict.fromkeys(("RTMLMC", "DLSGD"), "for contexts that are met once (recipes.meta_classification)")
MINIMAX = dict.fromkeys(("GDA", "RAGDA", "PRAGDA", "iMCN"), "minimax, one loss (recipes.saddle_escape)")
SAMPLED = dict.fromkeys(
    (
        *("StocBiO", "BSA", "TTSA", "SUSTAIN", "MRBO", "VRBO", "SOBA", "SABA", "FSLA", "AmIGO"),
        *("SVRB", "RSVRB", "BSVRB", "STABLE"),
    ),
    "made for sampled losses (recipes.hyper_regularization)",
)
RESTARTED = dict.fromkeys(("RAHGD", "PRAHGD"), "restarts need exact gradients (recipes.learn_to_regularize)")
ELSEWHERE = {
    "compare": {**INITIAL, **CONTEXTS, **MINIMAX, **SAMPLED},
    "stochastic": {**INITIAL, **CONTEXTS, **MINIMAX, **RESTARTED},
}


def decaying(optimizer: bo.BilevelOptimizer, method: Method) -> torch.optim.lr_scheduler.LambdaLR:
    """The scheduler of the method's decay, with one step per iteration."""

    def factor(level: str) -> Callable[[int], float]:
        exponent = method.decay[level == "lower"]
        return lambda t: (1 + t / 100) ** -exponent

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [factor(group["level"]) for group in optimizer.param_groups])

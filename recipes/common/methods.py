"""Methods by name, with their settings for the two kinds of problems on which the programs compare all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bilevel_optim as bo

from .sampling import IndexObjective, IndexTerms

__all__ = ["ELSEWHERE", "EXACT", "PAPER", "STOCHASTIC", "Method", "decaying", "growing_penalty"]

# Arguments that give the paper's version where the library's defaults differ, by class name.
PAPER: dict[str, dict[str, Any]] = {
    "RTMLMC": {"neumann": "product", "neumann_rate": 0.5, "level_sampling": "independent", "cap": False},
    "DLSGD": {"neumann": "product", "neumann_rate": 0.5, "cap": False},
    "F2SA": {"samples": "independent"},
    "RSVRB": {"variant": "faithful"},
    "PZOBO": {"directions": 1},
    "RAHGD": {"lower_restart": "zero", "linear_start": "y"},
    "PRAHGD": {"lower_restart": "zero", "linear_start": "y", "perturb_initial": False},
    "PRAGDA": {"lower_restart": "zero", "perturb_initial": False},
}


def growing_penalty(optimizer: bo.F2SA, exponent: float = 1 / 7) -> bo.F2SA:
    """Make the penalty 1/nu of F2SA grow as (1 + t)^exponent with the steps t, as in Kwon et al."""
    first, made = optimizer.nu, 0

    def grow(*_: object) -> None:
        nonlocal made
        made += 1
        optimizer.nu = first * (1 + made) ** -exponent

    optimizer.register_step_post_hook(grow)
    return optimizer


class Method(NamedTuple):
    """A constructor with its settings for sampled losses.

    Attributes:
        make: called with x, y, ``lr`` and ``lower_lr``.
        decay: exponents a of x and y: their learning rates fall as (1 + t / 100)^-a at iteration t.
        series: True if ``linear_lr`` stays at the first ``lower_lr``.
        terms: True if it needs losses that are finite sums of known terms.
        floor: True if it takes a lower bound ``floor`` of the curvature of the lower loss.
        matrices: True if it stores the lower Hessian and the cross derivative as matrices.
        tasks: True if it draws its own subset of many lower problems at each step.
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
        """Return the optimizer with these learning rates, for a lower loss of (about) this strong convexity."""
        if self.series:
            options["linear_lr"] = lower_lr
        if self.floor:
            options["floor"] = convexity / 2  # at the bound itself the estimates would be biased
        optimizer: bo.BilevelOptimizer = self.make([x], [y], lr=lr, lower_lr=lower_lr, **options)
        return optimizer

    def objective(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> IndexObjective | IndexTerms:
        """Wrap a loss of indices in the form that the method needs; ``drawn`` counts the examples."""
        return (IndexTerms if self.terms else IndexObjective)(loss, size, batch, seed, tasks)


# Methods for deterministic losses (recipes.compare).
EXACT: dict[str, partial[Any]] = {
    "aid": partial(bo.AID),
    "aid-neumann": partial(bo.AID, linear_solver="neumann"),
    "aid-fixed-point": partial(bo.AID, linear_solver="fixed_point"),
    "ba": partial(bo.BA),
    "bome": partial(bo.BOME),
    "f2sa-1": partial(bo.F2SA, order=1),
    "f2sa-2": partial(bo.F2SA, order=2),
    "f2sa-3": partial(bo.F2SA, order=3),
    "first-order": partial(bo.FirstOrder),
    "hozog-1": partial(bo.HOZOG, directions=1, warm_start=True),
    "hozog-16": partial(bo.HOZOG, directions=16, warm_start=True),
    "itd": partial(bo.ITD),
    "paid": partial(bo.PAID),
    "prahgd": partial(bo.PRAHGD),
    "pzobo-1": partial(bo.PZOBO, directions=1, warm_start=True),
    "pzobo-16": partial(bo.PZOBO, directions=16, warm_start=True),
    "pzobo-code": partial(bo.PZOBO, directions=1, direction="block_sphere", scale="none", warm_start=True),
    "rahgd": partial(bo.RAHGD),
}

# Methods for sampled losses.
HALF, THIRD = (1 / 2, 1 / 2), (1 / 3, 1 / 3)
STOCHASTIC: dict[str, Method] = {
    "aid": Method(partial(bo.AID, lower_steps=10, linear_steps=10)),
    "aid-neumann": Method(partial(bo.AID, linear_solver="neumann", lower_steps=10, linear_steps=10)),
    "amigo": Method(partial(bo.AmIGO, lower_steps=10, linear_steps=10)),
    "ba": Method(partial(bo.BA, lower_steps=10, linear_steps=10)),
    "bome": Method(partial(bo.BOME, lower_steps=10)),
    "bsa": Method(partial(bo.BSA, lower_steps=10, linear_steps=10, growth=0.0), decay=(1 / 2, 0)),
    "bsvrb": Method(partial(bo.BSVRB), decay=THIRD, floor=True, tasks=True),
    "bsvrb-2": Method(partial(bo.BSVRB, version=2), decay=THIRD, floor=True, tasks=True),
    "f2sa-1": Method(partial(bo.F2SA, order=1, lower_steps=10, normalize=False)),
    "f2sa-2": Method(partial(bo.F2SA, order=2, lower_steps=10, normalize=False)),
    "fsla": Method(partial(bo.FSLA), decay=HALF),
    "first-order": Method(partial(bo.FirstOrder, lower_steps=10)),
    "hozog-1": Method(partial(bo.HOZOG, directions=1, lower_steps=10)),
    "itd": Method(partial(bo.ITD, lower_steps=10)),
    "mrbo": Method(partial(bo.MRBO, linear_steps=10), decay=THIRD, series=True),
    "paid": Method(partial(bo.PAID, lower_steps=10, linear_steps=10)),
    "pzobo-1": Method(partial(bo.PZOBO, directions=1, lower_steps=10)),
    "rsvrb": Method(partial(bo.RSVRB), decay=THIRD, floor=True, tasks=True),
    "rsvrb-exact": Method(partial(bo.RSVRB, variant="exact_mean"), decay=THIRD, floor=True, tasks=True),
    "rsvrb-faithful": Method(partial(bo.RSVRB, variant="faithful"), decay=THIRD, floor=True, tasks=True),
    "rsvrb-free": Method(partial(bo.RSVRB, variant="matrix_free"), decay=THIRD, floor=True, tasks=True),
    "saba": Method(partial(bo.SABA), terms=True),
    "soba": Method(partial(bo.SOBA), decay=HALF),
    "srba": Method(partial(bo.SRBA), decay=HALF, terms=True),
    "stable": Method(partial(bo.STABLE), decay=HALF, floor=True, matrices=True),
    "sustain": Method(partial(bo.SUSTAIN, linear_steps=10), decay=THIRD, series=True),
    "svrb": Method(partial(bo.SVRB), decay=THIRD, floor=True, matrices=True),
    "svrb-free": Method(partial(bo.SVRB, variant="matrix_free"), decay=THIRD, floor=True),
    "stocbio": Method(partial(bo.StocBiO, lower_steps=10, linear_steps=10)),
    "ttsa": Method(partial(bo.TTSA, linear_steps=10), decay=(3 / 5, 2 / 5), series=True),
    "vrbo": Method(partial(bo.VRBO, lower_steps=10, linear_steps=10)),
}

# Reasons why a method is missing from one list or from both, by class name.
MINIMAX = dict.fromkeys(("GDA", "PRAGDA", "RAGDA", "iMCN"), "minimax, one loss (recipes.saddle_escape)")
META = dict.fromkeys(("ANIL", "ESMAML", "FOMAML", "MAML", "iMAML"), "x is an initial point of y")
ELSEWHERE: dict[str, dict[str, str]] = {
    "exact": {
        **MINIMAX,
        **META,
        **dict.fromkeys(
            ("AmIGO", "BSA", "FSLA", "MRBO", "SABA", "SOBA", "SUSTAIN", "StocBiO", "TTSA", "VRBO"),
            "made for stochastic losses; here the batches are full",
        ),
        **dict.fromkeys(
            ("BSVRB", "RSVRB", "STABLE", "SVRB"), "made for stochastic losses (recipes.hyper_regularization)"
        ),
        "SRBA": "its objectives are finite sums",
        **dict.fromkeys(
            ("DLSGD", "RTMLMC"), "for many lower problems (recipes.meta_classification, recipes.newsvendor)"
        ),
    },
    "stochastic": {
        **MINIMAX,
        **META,
        **dict.fromkeys(("PRAHGD", "RAHGD"), "restarts need exact gradients (recipes.learn_to_regularize)"),
        **dict.fromkeys(("DLSGD", "RTMLMC"), "for contexts that occur once (recipes.meta_classification)"),
    },
}


def decaying(optimizer: bo.BilevelOptimizer, method: Method) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the scheduler of the method's decay; step it once per iteration."""

    def factor(level: str) -> Callable[[int], float]:
        exponent = method.decay[level == "lower"]
        return lambda t: (1 + t / 100) ** -exponent

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [factor(group["level"]) for group in optimizer.param_groups])

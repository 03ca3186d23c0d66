"""What experiments with sampled losses share: batches of indices, methods with their settings, decaying step sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bilevel_optim as bo
from bilevel_optim.problem.objective import Sample

__all__ = ["ELSEWHERE", "METHODS", "IndexBatches", "IndexObjective", "IndexTerms", "Method", "decaying"]


class IndexBatches:
    """Batches of indices, a new random order in every pass; what does not fill a batch is left out of the pass.

    Args:
        size: number of examples; the largest size of a batch.
        batch: size of a batch.
        seed: of the orders.
        tasks: makes batches of shape (tasks, batch), drawn with replacement, an independent sample for each task.
            Default: one sample, without this dimension.
    """

    def __init__(self, size: int, batch: int, seed: int, tasks: int | None = None) -> None:
        self.size, self.batch, self.tasks = size, min(batch, size), tasks
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0  # examples so far

    def __iter__(self) -> Iterator[Tensor]:
        if self.tasks is not None:
            for _ in range(self.size // self.batch):
                self.drawn += self.tasks * self.batch
                yield torch.randint(self.size, (self.tasks, self.batch), generator=self.generator)
            return
        order = torch.randperm(self.size, generator=self.generator)
        for index in order[: self.size // self.batch * self.batch].view(-1, self.batch):
            self.drawn += self.batch
            yield index


class IndexObjective(bo.Objective):
    """A loss of indices, on `IndexBatches`."""

    def __init__(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> None:
        self.batches = IndexBatches(size, batch, seed, tasks)
        super().__init__(loss, self.batches)

    @property
    def drawn(self) -> int:
        """Examples so far."""
        return self.batches.drawn


class IndexTerms(bo.FiniteSum):
    """A loss of indices as a finite sum of fixed batches, in a random order, for methods with a memory of every term.

    Args:
        loss: called with the indices of a batch.
        size: number of examples; the largest size of a batch.
        batch: size of a batch; about so, if it does not divide ``size``.
        seed: of the order and of the draws.
        tasks: how many samples a batch counts for. Default: 1.
    """

    def __init__(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(size, generator=generator)
        super().__init__(loss, order, min(batch, size), generator=generator)
        self.count, self.drawn = tasks or 1, 0

    def term(self, index: int, *, once: bool = False) -> Sample:
        """The sample of one term, counted."""
        sample = super().term(index, once=once)
        self.drawn += self.count * len(sample.batch)
        return sample


class Method(NamedTuple):
    """A constructor with its settings.

    Attributes:
        make: called with x, y, ``lr`` and ``lower_lr``.
        decay: exponents a with which the step sizes of x and of y fall, as (1 + t / 100)^-a at iteration t.
        series: whether ``linear_lr`` is to stay at the first ``lower_lr``.
        terms: whether it needs losses that are finite sums of known terms.
        floor: whether it takes a lower bound ``floor`` of the curvature of the lower loss.
        matrices: whether it keeps the lower Hessian and the cross derivative as matrices.
        tasks: whether it draws some of many lower problems at each step by itself.
    """

    make: Callable[..., bo.BilevelOptimizer]
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
        return self.make([x], [y], lr=lr, lower_lr=lower_lr, **options)

    def objective(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> IndexObjective | IndexTerms:
        """A loss of indices in the form that the method needs; its ``drawn`` counts the examples."""
        return (IndexTerms if self.terms else IndexObjective)(loss, size, batch, seed, tasks)


DOUBLE: dict[str, Any] = {"lower_steps": 10}
SERIES: dict[str, Any] = {"linear_steps": 10}
BOTH: dict[str, Any] = {**DOUBLE, **SERIES}
METHODS: dict[str, Method] = {
    "stocbio": Method(partial(bo.StocBiO, **BOTH)),
    "bsa": Method(partial(bo.BSA, growth=0.0, **BOTH), (1 / 2, 0)),
    "ttsa": Method(partial(bo.TTSA, **SERIES), (3 / 5, 2 / 5), series=True),
    "sustain": Method(partial(bo.SUSTAIN, **SERIES), (1 / 3, 1 / 3), series=True),
    "mrbo": Method(partial(bo.MRBO, **SERIES), (1 / 3, 1 / 3), series=True),
    "vrbo": Method(partial(bo.VRBO, **BOTH)),
    "soba": Method(bo.SOBA, (1 / 2, 1 / 2)),
    "saba": Method(bo.SABA, terms=True),
    "fsla": Method(bo.FSLA, (1 / 2, 1 / 2)),
    "amigo": Method(partial(bo.AmIGO, **BOTH)),
    # Recursions for one lower problem.
    "svrb": Method(bo.SVRB, (1 / 3, 1 / 3), floor=True, matrices=True),
    "svrb-free": Method(partial(bo.SVRB, variant="matrix_free"), (1 / 3, 1 / 3), floor=True),
    "stable": Method(bo.STABLE, (1 / 2, 1 / 2), floor=True, matrices=True),
    # Recursions for many, a few of which are looked at in a step.
    "rsvrb": Method(bo.RSVRB, (1 / 3, 1 / 3), floor=True, tasks=True),
    "rsvrb-faithful": Method(partial(bo.RSVRB, variant="faithful"), (1 / 3, 1 / 3), floor=True, tasks=True),
    "rsvrb-normalised": Method(partial(bo.RSVRB, variant="self_normalised"), (1 / 3, 1 / 3), floor=True, tasks=True),
    "rsvrb-free": Method(partial(bo.RSVRB, variant="matrix_free"), (1 / 3, 1 / 3), floor=True, tasks=True),
    "bsvrb": Method(bo.BSVRB, (1 / 3, 1 / 3), floor=True, tasks=True),
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
# Public methods for problems of another form.
ELSEWHERE = {
    **dict.fromkeys(("ESMAML", "MAML", "ANIL", "FOMAML", "iMAML"), "x is an initial point for y"),
    **dict.fromkeys(("RTMLMC", "DLSGD"), "for contexts that are met once (recipes.meta_classification)"),
    **dict.fromkeys(("GDA", "RAGDA", "PRAGDA", "iMCN"), "minimax, one loss (recipes.saddle_escape)"),
    **dict.fromkeys(("RAHGD", "PRAHGD"), "restarts need exact gradients (recipes.learn_to_regularize)"),
}


def decaying(optimizer: bo.BilevelOptimizer, method: Method) -> torch.optim.lr_scheduler.LambdaLR:
    """The scheduler of the method's decay, with one step per iteration."""

    def factor(level: str) -> Callable[[int], float]:
        exponent = method.decay[level == "lower"]
        return lambda t: (1 + t / 100) ** -exponent

    return torch.optim.lr_scheduler.LambdaLR(optimizer, [factor(group["level"]) for group in optimizer.param_groups])

"""RT-MLMC and DL-SGD: stochastic gradients for contextual bilevel problems, a fresh lower problem at every draw."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...hypergradient import Estimate
from ...hypergradient.multilevel import multilevel
from ...hypergradient.multilevel import smoothness as largest_eigenvalue
from ...optimizer.base import BilevelOptimizer
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import InitVar, choice, count, fixed, flag, number, option
from ...optimizer.step import StepInputs
from ...oracle.oracle import Oracle
from ...oracle.session import Checks
from ...problem.parameters import require
from ...problem.random import SEEDS
from ...problem.tasks import starting_points, task_count
from ...problem.vector import Vector
from ...solvers.contexts import POWER, TASKS, Contexts, coupled_path, draw_levels, level_probabilities

__all__ = ["DLSGD", "RTMLMC"]

NEUMANN = ("sum", "product", "cg")
SAMPLING = ("systematic", "independent")
CURVATURE_SAMPLES, CURVATURE_MARGIN = 16, 1.2

GROWING_SERIES = (
    "a term of the Neumann series was larger than the one before (diagnostics['neumann_ratio']): smoothness is less "
    "than an eigenvalue of a sample Hessian, or the lower loss is not convex on a sample, so the hypergradient is not "
    "reliable. Use a larger smoothness, normalise the data, or regularise"
)
SEEN = 30  # corrections of a level needed before its mean square counts
GROWING = (
    "the corrections between levels do not fall like 2^-k (diagnostics['level_variance'] grows with k), so the "
    "variance grows geometrically with levels: lower_lr is too small (lower_lr * mu < 0.75, with mu the strong "
    "convexity of the lower loss), or the noise of the lower gradients does not average out. Use a larger lower_lr, or "
    "fewer levels"
)
EXPLODING = (
    "the first corrections between levels explode (diagnostics['level_variance']): the lower steps are too large for "
    "the curvature, because cap=False, or because smoothness is less than the largest eigenvalue of the lower "
    "Hessians. Use cap=True, a larger smoothness, or a smaller lower_lr"
)


class RTMLMC(BilevelOptimizer):
    r"""Random truncated multilevel Monte Carlo (RT-MLMC): unbiased for the deep solve at the cost of shallow ones.

    For :math:`\min_x \mathbb E_\xi\, \mathbb E_{\eta|\xi} f(x, y^*(x; \xi); \eta, \xi)` with a lower problem
    :math:`y^*(x; \xi) = \arg\min_y \mathbb E_{\eta|\xi}\, g(x, y; \eta, \xi)` for each of very many contexts
    :math:`\xi`: tasks, users, clients, states of nature. Let :math:`Y_l` be the result of l epochs of EpochSGD. Epoch e
    starts from the mean of the last one, and averages :math:`2^e` iterates with step
    :math:`\min(\beta_0 2^{-e}, 1/L)`. With :math:`u_l` the implicit gradient at :math:`Y_l`, one run of a random number
    k of epochs gives

    .. math::
        v = u_b + (u_k - u_{k-1}) / p_k, \qquad p_k = \frac{2^{-(k-b)}}{1 - 2^{-(K-b)}}, \quad k = b+1, \dots, K,
        \qquad x \leftarrow x - \text{lr}\, \bar v,

    which has the mean of :math:`u_K`, at an expected cost of O(K) lower steps instead of :math:`O(2^K)`. All points
    share the context, the path and the samples of the implicit gradient; :math:`\bar v` is the mean over the contexts
    of a step.

    *When.* More lower problems than could be solved or remembered, each with data that can be drawn repeatedly; the
    cost of a step does not depend on their number. *Needs* ``tasks=``, a lower loss that is strongly convex in y
    for every sample, and Hessian-vector products. :math:`\beta_0` matters: the rate needs
    :math:`\beta_0 \mu \ge 0.75`; :math:`1/\mu` to :math:`2/\mu` is good (the paper's :math:`1/(4\mu)` is too small, and
    then the variance grows geometrically with K). The method watches this and warns. Its noise is heavy tailed:
    clipping :math:`v` biases it, since the rare deep corrections are the large ones; prefer SGD, or more contexts per
    step, to Adam on x. Random numbers drawn inside the losses (dropout) are shared by the contexts of a step. Keep y in
    float32 or better.

    *Cost per step* and context, on average: :math:`2K/(1-2^{-K}) - 2` lower gradients minus those that are not needed
    (K = 6: 10, K = 12: 22; DL-SGD: 126 and 8190); at 3 points (2 if k = b + 1) an upper gradient, N lower gradients,
    N - 1 Hessian-vector products, and 2 cross products, one for v and one for the correction in ``diagnostics``.
    *Draws*: for each context one lower batch per lower step, one for the cross product and one per term of the series,
    all independent, and one upper batch. Each has its own generator, seeded by its purpose, so that results do not
    depend on ``vectorize`` or on the number of processes.

    The contexts start from the live y, or from ``lower_init(contexts)``; the live y changes only with ``warm_start``.

    Args:
        upper: upper parameters x.
        lower: lower parameters y, of one context.
        lr: learning rate of x.
        lower_lr: :math:`\beta_0`, the step of the lower solve before halving.
        levels: K, the largest number of epochs. The bias falls like :math:`2^{-K/2}` or faster. Default: 6.
        neumann_steps: N, terms of the series for the inverse Hessian; relative bias
            :math:`(1 - \text{neumann\_rate}\; \mu/L)^N`. Default: 10.
        neumann: ``"sum"``, all terms (least variance); ``"product"``, one random term, N times as large (the paper's;
            on average half the products and far more variance); ``"cg"``, N conjugate gradient steps on one
            batch, exact for full batches, else biased by the batch. Default: ``"sum"``.
        neumann_rate: step of the series in units of 1/L, at most 1; the paper's eq. 5 has 1/2, whose bias falls
            half as fast in N. Default: 1.
        level_sampling: ``"independent"`` levels of the contexts, or ``"systematic"``, evenly spread over them, with
            less variance of the gradient and of the cost. Default: ``"systematic"``.
        base_level: b. A value of 1 costs little more and has less variance. Default: 0, the paper's.
        implicit_term: False leaves out the implicit term. For minimax (g = -f) it vanishes at the solution, but still
            makes the error of second instead of first order in that of y. Default: True.
        smoothness: L, an upper bound on the eigenvalues of *sample* Hessians of g. Default: None, estimated by power
            iteration with a margin of 1.2, at steps 0, 1, 3, 7, 15, ...; the largest estimate is kept.
        cap: limit lower steps to 1/L. Default: True.
        tasks_per_step: contexts per step. Default: 1.
        lower_batch, upper_batch: rows per batch of a context; None, all of them. Default: 1. warm_start: True writes
            the mean of the lower solutions to the live y. Default: False. upper_optimizer, check_finite,
            check_derivatives, generator, vectorize, hvp, process_group, lower_init: see `BilevelOptimizer`.
            Processes share the contexts of a step, deep ones first.

    *Departures from the paper*, the largest first, all of them arguments. The paper has one random term of the Neumann
    series, N times as large; here all are summed. It has series steps of half the length, independent levels, and no
    limit on the lower steps. Its first lower step, :math:`1/(4\mu)`, is four to eight times shorter than the rate
    allows, so that the variance grows geometrically with K. The step of x is lr, with a torch scheduler if you want
    one; in the paper's experiments it falls. Index errors in the printed formulas are corrected. As in the text:

        >>> PAPER = {"neumann": "product", "neumann_rate": 0.5, "level_sampling": "independent", "cap": False}
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = bo.RTMLMC([x], [y], lr=0.1, lower_lr=0.25, levels=6, smoothness=1.0, **PAPER)  # mu = 1

    State: L as estimated, and the running mean squares of the corrections :math:`V_k = E\|u_k - u_{k-1}\|^2`, measured
    at one context per step. ``diagnostics`` has ``level_variance``, :math:`2^k V_k` by k, which should not grow;
    ``level_counts``, ``lower_steps``, ``correction`` (the last :math:`\|u_k - u_{k-1}\|^2`), ``neumann_ratio`` (largest
    growth of a term of the series, below 1 for a convex g and a valid L), ``smoothness``, ``task_count``.

    Raises:
        ValueError: for an argument out of its range, or without ``tasks``.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> data = torch.randn(1000, 20, 1, generator=torch.Generator().manual_seed(0)) + 2.0  # 1000 contexts
        >>> optimizer = bo.RTMLMC(
        ...     [x], [y], lr=0.1, lower_lr=2.0, levels=6, tasks_per_step=8, generator=torch.Generator().manual_seed(1)
        ... )
        >>> tasks = bo.TensorTasks(data)
        >>> for _ in range(50):  # y* = x + mean of the context's rows, and f asks for y* = 1: x is -1 in the end
        ...     loss = optimizer.step(
        ...         lambda rows: (y - 1).square().sum() / 2,
        ...         lambda rows: (y - x - rows).square().sum(1).mean() / 2,
        ...         tasks=tasks,
        ...     )
        >>> bool((x + 1).abs() < 0.3)
        True

    Source: Hu, Wang, Xie, Krause, Kuhn (2023), arXiv:2310.18535 (RT-MLMC).
    """

    declared = MethodInfo(
        uncaptured=(
            "each set of levels would be a graph of its own, of all the lower steps of its contexts: compiling them "
            "took minutes and made steps only 1.1 times faster"
        ),
        paper="arXiv:2310.18535",
        family="contextual",
        when="more lower problems than could be solved or remembered, each met once",
        cost=(
            "per context about 2 K - 4 + 2.5 N lower, 2.5 (N - 1) hvp, 2.5 upper, 5 jvp; K = levels, N = neumann_steps"
        ),
        tasks="required",
        random=True,
        lower_steps=False,
        lower_optimizer="none",
    )

    _fixed_rate = "it halves the rate from epoch to epoch"
    _one_level = False  # True: all contexts go to the last level, and none is drawn

    lower_lr: InitVar[float] = option()
    lower_steps: int = fixed(default=0)
    levels: int = count(default=6, least=1)
    neumann_steps: int = count(default=10, least=1)
    neumann: str = choice(*NEUMANN, default="sum")
    neumann_rate: float = number(default=1.0, above=0, most=1)
    level_sampling: str = choice(*SAMPLING, default="systematic")
    base_level: int = count(default=0)
    implicit_term: bool = flag(default=True)
    smoothness: float | None = number(default=None, above=0, optional=True)
    cap: bool = flag(default=True)
    tasks_per_step: int | None = count(default=1, least=1, optional=True)
    lower_batch: int | None = count(default=1, least=1, optional=True)
    upper_batch: int | None = count(default=1, least=1, optional=True)
    warm_start: bool = flag(default=False)

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        base, most = options["base_level"], 1 if self._one_level else options["levels"]
        require(
            "base_level", base, base < most, "Invalid {name} value: {value} (it must be less than levels; 0 for DLSGD)"
        )
        factory = options["lower_optimizer"]
        wording = "Invalid lower_optimizer value: {value} (the lower solver is EpochSGD; leave out lower_optimizer)"
        require("lower_optimizer", factory, factory is None, wording)

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Raise, because there is no single lower problem."""
        raise ValueError(
            f"{type(self).__name__} has a lower problem for each context, but got no sampler of contexts: call "
            "step(upper, lower, tasks=sampler)"
        )

    def _estimate_tasks(self, oracle: Oracle, inputs: StepInputs, sampler: Any) -> Estimate:
        """Return the mean over the contexts of one draw; the ranks share them."""
        count = task_count(sampler, self.tasks_per_step)
        contexts = self._contexts(sampler, count, int(inputs.random_inputs["seed"]))
        depths = self._depths(contexts)
        mine = _share(depths, inputs.ranks.rank, inputs.ranks.world)
        make = partial(self._estimate_contexts, contexts, depths, mine)
        return self._accepted_estimate(oracle, inputs, make) if mine else make(oracle, inputs)

    def _random_inputs(self) -> dict[str, int]:
        """Return the range of the seed of all draws of a step."""
        return {"seed": SEEDS}

    def _depths(self, contexts: Contexts) -> list[int]:
        """Return the level of each context."""
        if self._one_level:
            return [self.levels] * contexts.count
        even = self.level_sampling == "systematic"
        return draw_levels(contexts.count, self.levels, self.base_level, contexts.counters, systematic=even)

    def _contexts(self, sampler: Any, count: int, seed: int, purpose: int = TASKS) -> Contexts:
        rows = {"lower_batch": self.lower_batch, "upper_batch": self.upper_batch}
        return Contexts(sampler, count, seed, purpose=purpose, **rows)

    def _starts(self, oracle: Oracle, inputs: StepInputs, contexts: Contexts) -> Vector:
        return starting_points(
            oracle.y, oracle.lower_names(), contexts.tasks, contexts.count, inputs.lower_init
        ).detach()

    def _estimate_contexts(
        self, contexts: Contexts, depths: list[int], mine: list[int], oracle: Oracle, inputs: StepInputs
    ) -> Estimate:
        """Return the contribution of some contexts to the mean."""
        curvature = self._curvature(oracle, inputs, contexts)
        bound = float(self.smoothness or curvature or 1.0)
        chances = None if self._one_level else level_probabilities(self.levels, self.base_level)
        several = chances is not None and len(chances) > 1
        nothing = oracle.x[0].new_zeros(())
        part = Estimate(nothing, oracle.x.zeros_like(), lower=oracle.y.zeros_like())
        if mine:
            starts = self._starts(oracle, inputs, contexts)
            if mine != [*range(contexts.count)]:
                starts = Vector(t[mine] for t in starts)
            largest = 1 / bound if self.cap else math.inf
            path = coupled_path(
                oracle, contexts, starts, [depths[slot] for slot in mine],
                lambda epoch: [min(rate * 2.0**-epoch, largest) for rate in inputs.lower_rates],
                slots=mine, base_level=self.base_level,
            )  # fmt: skip
            part = multilevel(
                oracle, path, chances=chances, steps=self.neumann_steps, rate=self.neumann_rate / bound,
                neumann=self.neumann, implicit_term=self.implicit_term,
                measured=0 if several and mine[0] == 0 else None,
            )  # fmt: skip
            if "neumann_ratio" in part.diagnostics:
                oracle.checks.alert("growing series", GROWING_SERIES, part.diagnostics["neumann_ratio"] > 1 + 1e-4)
        loss, gradient, mean, correction = inputs.ranks.total(
            part.loss.to(nothing), part.gradient, part.lower, part.diagnostics.get("correction", nothing.double())
        )
        diagnostics = dict(part.diagnostics)
        numbers: dict[str, Any] = {}
        if curvature:
            numbers["curvature"] = curvature
        if several:
            moments = _with_correction(inputs.numbers.get("moments"), self.levels, depths[0], correction)
            numbers["moments"], diagnostics["correction"] = moments, correction
            diagnostics["level_variance"] = _watched(oracle.checks, moments, self.base_level)
        diagnostics["level_counts"] = torch.tensor(depths, device="cpu").bincount(minlength=self.levels + 1)
        steps = sum(2 ** (k + 1) - 2 - k for k in depths)
        for name, value in (("lower_steps", steps), ("smoothness", bound), ("task_count", len(depths))):
            diagnostics[name] = torch.tensor(value, device="cpu")
        return Estimate(loss, gradient, diagnostics, lower=mean if self.warm_start else None, numbers=numbers)

    def _curvature(self, oracle: Oracle, inputs: StepInputs, contexts: Contexts) -> float:
        """Return the estimate of L, updated at some of the steps; 0 before the first."""
        known = float(inputs.numbers.get("curvature", 0.0))
        needed = self.cap or (self.implicit_term and self.neumann != "cg")
        if self.smoothness is not None or not needed or (inputs.steps + 1) & inputs.steps:
            return known
        some = self._contexts(contexts.sampler, CURVATURE_SAMPLES, contexts.counters.seed, POWER)
        found = CURVATURE_MARGIN * float(largest_eigenvalue(oracle, some, self._starts(oracle, inputs, some)))
        return max(known, found) if math.isfinite(found) else known


class DLSGD(RTMLMC):
    r"""Double-loop SGD (DL-SGD): for each context a deep lower solve, and the implicit gradient at its end.

    .. math:: v = u_K, \qquad x \leftarrow x - \text{lr}\, \bar v

    in the notation of `RTMLMC`, which has the same mean. *When.* As the control for `RTMLMC`: it has less variance per
    step and costs :math:`2^{K+1} - 2 - K` lower gradients per context. Seconds differ less than lower gradients: an
    estimate took about as long as one of `RTMLMC` with up to 4 levels, and ten times as long with 8
    (``004-time-newsvendor`` of ``recipes.papers``). DL-SGD can be ahead on a problem of three variables (``004-p1``),
    or where a batch of contexts keeps an accelerator busy anyway. *Needs* what `RTMLMC` needs; :math:`\beta_0` is less
    critical.

    *Cost per step* and context: :math:`2^{K+1} - 2 - K` + N lower gradients, N - 1 Hessian-vector products, one upper
    gradient, one cross product. *Draws*: as `RTMLMC`; with the same generator the same contexts and the same paths.

    Args:
        upper, lower, lr, lower_lr, levels, neumann_steps, neumann, neumann_rate, implicit_term, smoothness, cap: see
            `RTMLMC`. level_sampling, base_level: only the defaults; other values would have no effect and are refused.
            tasks_per_step, lower_batch, upper_batch, warm_start, lower_init: see `RTMLMC`. upper_optimizer,
            check_finite, check_derivatives, generator, vectorize, hvp, process_group: see `BilevelOptimizer`.

    *Departures from the paper*: those of `RTMLMC` that apply here. The text's setting:

        >>> PAPER = {"neumann": "product", "neumann_rate": 0.5, "cap": False}
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = bo.DLSGD([x], [y], lr=0.1, lower_lr=0.25, levels=6, smoothness=1.0, **PAPER)  # mu = 1

    State: L as estimated.

    Raises:
        ValueError: for an argument out of its range, or without ``tasks``.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = bo.DLSGD([x], [y], lr=0.1, lower_lr=2.0, levels=1, neumann="cg", cap=False)
        >>> loss = optimizer.backward(
        ...     lambda t: (y - 1).square().sum() / 2,
        ...     lambda t: (y - x - t).square().sum(),
        ...     tasks=bo.TensorTasks(torch.full((10, 1, 1), 3.0)),
        ... )
        >>> x.grad  # y* = 3, the mean of 0 and 6
        tensor([2.])

    Source: Hu, Wang, Xie, Krause, Kuhn (2023), arXiv:2310.18535 (DL-SGD); Ghadimi, Wang (2018), arXiv:1802.02246.
    """

    declared = replace(
        RTMLMC.declared,
        uncaptured=(
            "a graph would be of all the lower steps of the contexts, about 2^(levels + 1) each: compiling it took "
            "most of a minute with two levels and made steps only 1.8 times faster"
        ),
        when="control of RTMLMC: less variance per step, much more expensive",
        cost="per context 2^(K+1) - 2 - K + N lower, N - 1 hvp, 1 upper, 1 jvp; K = levels, N = neumann_steps",
    )

    level_sampling: str = choice(*SAMPLING[:1], default="systematic")

    _one_level = True


def _share(depths: list[int], rank: int, world: int) -> list[int]:
    """Return the contexts of one process: the deepest come first, each goes to the least loaded process."""
    loads, shares = [0] * world, [[] for _ in range(world)]  # type: tuple[list[int], list[list[int]]]
    for slot in sorted(range(len(depths)), key=lambda i: -depths[i]):
        to = loads.index(min(loads))
        loads[to] += 2 ** (depths[slot] + 1)
        shares[to].append(slot)
    return sorted(shares[rank])


def _with_correction(moments: Tensor | None, levels: int, level: int, correction: Tensor) -> Tensor:
    """Return the number and sum of squared corrections of the levels 0, ..., ``levels``, with one more added."""
    one_hot = torch.zeros(levels + 1, dtype=torch.float64, device=correction.device)
    one_hot[level] = 1.0
    new = torch.stack([one_hot, one_hot * correction])
    return new if moments is None else moments.to(new.device) + new


def _watched(checks: Checks, moments: Tensor, base: int) -> Tensor:
    """Return the mean squares times 2^k, and warn if they grow above the base level."""
    count, total = moments
    variance = torch.where(count > 0, total / count, torch.nan)
    k = torch.arange(len(count), device=count.device)
    scaled = variance * 2.0**k
    seen = (k >= base + 3) & (count >= SEEN) & (variance > 0)
    weight, log = torch.where(seen, count, 0.0), torch.where(seen, scaled, 1.0).log2()
    mean_k = (weight * k).sum() / weight.sum()
    spread = (weight * (k - mean_k) ** 2).sum()
    slope = (weight * (k - mean_k) * log).sum() / spread
    explodes = (count[:-1] >= SEEN) & (count[1:] >= SEEN / 3) & (variance[1:] > 64 * variance[:-1])
    checks.alert("growing levels", GROWING, (seen.sum() >= 3) & (slope > 0.25))
    checks.alert("exploding levels", EXPLODING, explodes.any())
    return scaled

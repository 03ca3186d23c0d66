"""VRBO: a double loop with recursive differences between anchors (SPIDER)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import InitVar, count, option
from ...optimizer.step import LOWER, Draw, DrawInputs, StepInputs, replace, require_interior
from ...oracle.oracle import Oracle
from ...problem.vector import Vector
from .mrbo import Recursion
from .stocbio import NeumannMethod

__all__ = ["VRBO"]


class VRBO(NeumannMethod):
    r"""Variance-reduced bilevel optimiser (VRBO): SPIDER on both gradients, with many batches at every q-th step.

    With :math:`z = (x, y)`, :math:`z'` the previous point and :math:`\nabla\Phi(z; \xi)` the estimate of `StocBiO`,
    each outer step adds differences as y moves,

    .. math::
        u \leftarrow u + \nabla_y g(z; \zeta) - \nabla_y g(z'; \zeta), \quad
        h \leftarrow h + \nabla\Phi(z; \xi) - \nabla\Phi(z'; \xi), \quad
        y \leftarrow y - \alpha u,

    ``lower_steps`` times, and the differences once more without a step. The first difference is that of the last update
    of x. Every ``period`` steps, means over ``anchor_batches`` batches then replace u and h, and
    :math:`x \leftarrow x - \text{lr}\, h`.

    *When.* As a baseline: the differences cost two evaluations per sample at every lower step. *Needs* what `StocBiO`
    needs, and losses that are smooth on every batch.

    *Cost per step*, with T = ``lower_steps`` and Q = ``linear_steps``: 2 (T + 1) times one lower gradient, one upper
    gradient, Q Hessian-vector products and one cross product. At every ``period``-th step 2 T lower gradients, and
    ``anchor_batches`` times one of each. *Draws*: for each difference one lower batch for u, then those of `StocBiO`
    for h (not before an anchor); for an anchor ``anchor_batches`` lower batches, then the others as often. The first
    step draws the same number of lower batches before all others.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: T, lower steps per outer step. The first outer step makes them at :math:`x_0`.
        linear_steps: Q, the number of products. Default: 10.
        linear_lr: :math:`\eta`. Default: the learning rate of the lower groups.
        period: outer steps from one anchor to the next. Default: 5.
        anchor_batches: batches of an anchor. Default: 10.
        warm_start: start y at its last value; otherwise every step is an anchor. Default: True.
        lower_optimizer: receives u as the gradient; see `BilevelOptimizer`.
        check_finite, check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step, lower_batch,
            upper_batch, lower_init, task_memory, lower_clip, lower_projection: see `BilevelOptimizer`.

    State: ``previous`` and ``direction`` of the upper and of the lower parameters, the lower optimizer's state, and
    ``initial`` y without warm starts. With tasks every step is an anchor.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = VRBO([x], [y], lr=0.5, lower_steps=3, anchor_batches=1)
        >>> for _ in range(30):  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 4)
        1.0

    Source: Yang, Ji, Liang (2021), arXiv:2106.04692.
    """

    declared = MethodInfo(
        paper="arXiv:2106.04692",
        family="stochastic",
        when="baseline: recursive differences between anchors",
        cost="2 (T + 1) times 1 lower, 1 upper, Q hvp, 1 jvp, with Q = linear_steps; less at an anchor",
        lower_optimizer="given gradient",
        upper_update="steps of lr along an estimate, whose recursion (SPIDER) is made for them",
    )

    lr: InitVar[float] = option()
    period: int = count(default=5, least=1)
    anchor_batches: int = count(default=10, least=1)

    def _graph_key(self, steps: int, numbers: Mapping[str, Any]) -> bool:
        """Cache key for the next step's graph: True if the step is an anchor."""
        return steps % self.period == 0

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return the draws of the differences; where the recursion restarts, also ``anchor_batches`` for each mean."""
        begins = not self.warm_start or Recursion.remembered(inputs) is None
        if not begins and not self._graph_key(inputs.steps, inputs.numbers):
            return [LOWER, *self._sample_draws()] * (self.lower_steps + 1)
        many, differences = [LOWER] * self.anchor_batches, max(self.lower_steps - begins, 0)
        return many * begins + [LOWER] * differences + many + self._sample_draws() * self.anchor_batches

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run lower steps along a recursion that restarts from large batches every ``period`` steps."""
        rule, memory = inputs.solver_for(oracle.y)
        last = Recursion.remembered(inputs) if self.warm_start else None
        begins = last is None
        anchor = begins or self._graph_key(inputs.steps, inputs.numbers)
        if last is None:
            last = Recursion(oracle.x, oracle.y, oracle.x.zeros_like(), self._lower_anchor(oracle))
        point, estimate = oracle, None
        for t in range(self.lower_steps + 1):
            stands, ends = begins and t == 0, t == self.lower_steps
            if not stands and not (ends and anchor):
                last, estimate = self._moved(point, last, inputs, with_upper=not anchor)
            if not ends:
                solved = rule.step(point.y, memory, partial(_along, last.u))
                point, memory = point.at(lower=solved.y), solved.memory
                if t == self.lower_steps - 1:
                    require_interior(oracle, rule, solved.projected)
        oracle.checks.finite("lower_grad", point.y)
        if anchor:
            u, estimate = self._lower_anchor(point), self._anchor(point, inputs)
            last = Recursion(point.x, point.y, estimate.gradient, u)
        assert estimate is not None
        return replace(last.estimate(estimate.loss, estimate.diagnostics), lower=point.y, solver=memory)

    def _moved(
        self, oracle: Oracle, last: Recursion, inputs: StepInputs, *, with_upper: bool
    ) -> tuple[Recursion, Estimate | None]:
        """Return the recursion at the oracle's point, from one pair of samples evaluated at both points."""
        zeta, samples = oracle.g.draw(), self._samples(oracle, inputs) if with_upper else None
        _, u = oracle.lower(zeta)
        estimate = None if samples is None else self._hypergradient(oracle, samples, inputs)
        before, h = oracle.at(last.x, last.y), last.h
        _, before_u = before.lower(zeta)
        if estimate is not None and samples is not None:
            h = h + (estimate.gradient - self._hypergradient(before, samples, inputs).gradient)
        return Recursion(oracle.x, oracle.y, h, last.u + (u - before_u)), estimate

    def _lower_anchor(self, oracle: Oracle) -> Vector:
        """Return the lower gradient averaged over many batches."""
        total = oracle.y.zeros_like()
        for _ in range(self.anchor_batches):
            total = total + oracle.lower(oracle.g.draw(once=True))[1]
        total = total * (1 / self.anchor_batches)
        oracle.checks.finite("lower_grad", total)
        return total

    def _anchor(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return the hypergradient averaged over many batches."""
        share = 1 / self.anchor_batches
        loss, gradient = oracle.x[0].new_zeros(()), oracle.x.zeros_like()
        for _ in range(self.anchor_batches):
            estimate = self._hypergradient(oracle, self._samples(oracle, inputs), inputs)
            loss, gradient = loss + estimate.loss * share, gradient + estimate.gradient * share
        return Estimate(loss, gradient, estimate.diagnostics)


def _along(u: Vector, y: Vector) -> tuple[Tensor, Vector]:
    return u[0].new_zeros(()), u

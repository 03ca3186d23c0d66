"""SRBA: SARAH's recursion of SOBA's three directions, for finite sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import InitVar, count, number, option
from ...optimizer.step import Draw, DrawInputs, StepInputs, replace
from ...oracle.oracle import Oracle
from ...problem.finite_sum import random_term, term_count
from ...problem.objective import Sample
from ...problem.vector import Vector
from .soba import SingleLoop

__all__ = ["SRBA"]


class SRBA(SingleLoop):
    r"""Stochastic recursive bilevel algorithm (SRBA): `SOBA` along directions that follow SARAH's (SPIDER's) recursion.

    With the directions of `SOBA` on a lower term i and an upper term j,

    .. math::
        D_y = \nabla_y g_i, \qquad D_v = \nabla^2_{yy} g_i\, v - \nabla_y f_j, \qquad
        D_x = \nabla_x f_j - \nabla^2_{xy} g_i\, v,

    all three d are those of the full sums every ``period`` steps. In between, with new i and j,
    :math:`d \leftarrow d + D(x, y, v) - D(x^-, y^-, v^-)`, where the minus marks the start of the last step. Then

    .. math::
        y \leftarrow y - \alpha d_y, \qquad v \leftarrow P_R(v - \eta d_v), \qquad x \leftarrow x - \text{lr}\, d_x .

    *When.* Finite sums: nearly optimal there, and linear convergence with constant learning rates like `SABA`, without
    its tables. *Needs* `FiniteSum` objectives (a loss without data is a sum of one term) and what `SOBA` needs.

    *Cost per step*: 2 upper and 2 lower gradients, 2 Hessian-vector and 2 cross products; every ``period`` steps n
    lower gradients and products and m upper gradients instead. *Draws*: a term of g, a term of f.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of y.
        linear_lr: :math:`\eta`. Default: the learning rate of the lower groups.
        period: steps from one evaluation of the full sums to the next. Default: (n + m)/2.
        radius: R, radius of the ball that v stays in. Default: infinite.
        warm_start: continue from the last y, v and directions; otherwise every step evaluates the full sums. Default:
            True. (The first v is one step from zero.)
        lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group, lower_clip,
            lower_projection: see `BilevelOptimizer`. All ranks use the indices that the first draws, and need the same
            numbers of terms.

    State: ``linear_solution`` (v); of the last step ``previous`` (y, x), ``previous_solution``, ``direction`` (of y, of
    x), ``solution_direction``; the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range, for objectives that are not finite sums, and with tasks.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> data = torch.tensor([0.0, 3.0])
        >>> upper = bo.FiniteSum(lambda t: (y - t).square().mean() / 2, data)  # the mean of f asks for y = 1.5
        >>> lower = bo.FiniteSum(lambda t: (1 + t) * (y - x).square().sum() / 2, data)
        >>> optimizer = SRBA([x], [y], lr=0.03)
        >>> for _ in range(1000):
        ...     loss = optimizer.step(upper, lower)
        >>> round(x.item(), 4)
        1.5

    Source: Dagréou, Moreau, Vaiter, Ablin (2023), arXiv:2302.08766.
    """

    declared = MethodInfo(
        paper="arXiv:2302.08766",
        family="stochastic",
        when="finite sums: nearly optimal, linear convergence without tables",
        cost="2 upper, 2 lower, 2 hvp, 2 jvp; every period steps m, n, n, n",
        data="finite_sum",
        tasks="none",
        lower_steps=False,
        lower_optimizer="given gradient",
        upper_update="steps of lr along an estimate, whose recursion (SARAH) is made for them",
    )

    lr: InitVar[float] = option()
    period: int | None = count(default=None, least=1, optional=True)
    radius: float = number(default=math.inf, above=0, finite=False)

    def _estimate_tasks(self, oracle: Oracle, inputs: StepInputs, sampler: object) -> Estimate:
        """Raise, because there is no state for each task."""
        raise ValueError(
            "SRBA continues from its last step, which new tasks do not have; use SOBA with tasks= and task_memory=True"
        )

    def _graph_key(self, steps: int, numbers: Mapping[str, Any]) -> bool:
        """Cache key for the next step's graph: True if the step evaluates the full sums."""
        terms = [numbers.get(f"{level}_terms", 1) for level in ("lower", "upper")]
        return not self.warm_start or steps % self._period(*terms) == 0

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return for each sum a random term, or all terms."""
        whole = self._begins(inputs, inputs.terms("lower"), inputs.terms("upper"))
        return [Draw("lower", whole), Draw("upper", whole)]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Make one step along the recursive directions."""
        n, rates = len(oracle.y), inputs.linear_rates(self.linear_lr)
        loss, v, d = self._recursive(oracle, inputs, rates)
        d_y, d_v, d_x = Vector(d[:n]), Vector(d[n : 2 * n]), Vector(d[2 * n :])
        oracle.checks.finite("hvp", d_v)
        (_, moved), new = inputs.step_along(oracle, d_y), self._inside(v - d_v * rates)
        estimate = Estimate(loss, d_x, {"linear_residual": d_v})
        if self.warm_start:
            lower = {"previous": oracle.y, "previous_solution": v, "direction": d_y, "solution_direction": d_v}
            upper = {"previous": oracle.x, "direction": d_x}
            estimate = replace(estimate, memory={**lower, "linear_solution": new}, upper_memory=upper)
        return estimate.with_lower(moved)

    def _inside(self, v: Vector) -> Vector:
        return v * (self.radius / v.norm()).clamp_max(1.0) if math.isfinite(self.radius) else v

    def _period(self, lower_terms: int, upper_terms: int) -> int:
        return self.period or max((lower_terms + upper_terms) // 2, 1)

    def _begins(self, inputs: DrawInputs, lower_terms: int, upper_terms: int) -> bool:
        """Return True if a step evaluates the full sums."""
        goes_on = self.warm_start and "direction" in inputs.memory and "direction" in inputs.upper_memory
        return not goes_on or inputs.steps % self._period(lower_terms, upper_terms) == 0

    def _recursive(self, oracle: Oracle, inputs: StepInputs, rates: list[float]) -> tuple[Tensor, Vector, Vector]:
        """Return the upper loss, v, and the directions of y, v, x: of the full sums, or from those of the last step."""
        names = ("linear_solution", "previous", "previous_solution", "direction", "solution_direction")
        if self._begins(inputs, term_count(oracle.g, "lower"), term_count(oracle.f, "upper")):
            return self._directions(oracle, self._solution(inputs), oracle.g.samples(), oracle.f.samples(), rates)
        v, y_then, v_then, d_y, d_v = (inputs.memory[name] for name in names)
        x_then, d_x = (inputs.upper_memory[name] for name in ("previous", "direction"))
        sums = (oracle.g, oracle.f)
        zeta, xi = (random_term(terms, lambda i: inputs.ranks.broadcast_number(i, oracle.device))[1] for terms in sums)
        loss, _, now = self._directions(oracle, v, [zeta], [xi], rates)
        _, _, then = self._directions(oracle.at(x_then, y_then), v_then, [zeta], [xi], rates)
        return loss, v, Vector((*d_y, *d_v, *d_x)) + (now - then)

    def _directions(
        self, oracle: Oracle, v: Vector | None, lower: list[Sample], upper: list[Sample], rates: list[float]
    ) -> tuple[Tensor, Vector, Vector]:
        """Return the mean upper loss, v (one step from zero if there is none), and the mean directions on terms."""
        losses, f_x, f_y = zip(*(oracle.upper(xi) for xi in upper), strict=True)
        total = Vector((*oracle.y.zeros_like(), *-_mean(f_y), *_mean(f_x)))
        v, found = self._inside(_mean(f_y) * rates) if v is None else v, []
        for zeta in lower:
            with oracle.lower_system(zeta) as system:
                cross, product = system.both(v)
            found.append(Vector((*system.gradient, *product, *-cross)))
        return torch.stack(losses).mean(), v, total + _mean(found)


def _mean(vectors: Sequence[Vector]) -> Vector:
    return Vector(torch.stack(ts).mean(0) for ts in zip(*vectors, strict=True))

"""MRBO and SUSTAIN: single loops whose two gradients are recursive estimates (STORM)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import InitVar, count, fixed, number, option
from ...optimizer.step import LOWER, Draw, DrawInputs, StepInputs
from ...oracle.oracle import Oracle
from ...problem.vector import Vector
from .stocbio import NeumannMethod

__all__ = ["MRBO", "SUSTAIN", "Recursion"]


class Recursion(NamedTuple):
    """A point and the two recursive estimates there."""

    x: Vector
    y: Vector
    h: Vector  # of the hypergradient
    u: Vector  # of the lower gradient

    @classmethod
    def remembered(cls, inputs: DrawInputs) -> Recursion | None:
        """Return the recursion of the last step; None if its state is incomplete."""
        y, u = (inputs.memory.get(name) for name in ("previous", "direction"))
        x, h = (inputs.upper_memory.get(name) for name in ("previous", "direction"))
        return None if x is None or y is None or h is None or u is None else cls(x, y, h, u)

    def estimate(self, loss: Tensor, diagnostics: dict[str, Tensor]) -> Estimate:
        """Return h as the estimate, with this recursion as its state."""
        return Estimate(
            loss,
            self.h,
            {**diagnostics, "lower_residual": self.u},
            memory={"previous": self.y, "direction": self.u},
            upper_memory={"previous": self.x, "direction": self.h},
        )


class MRBO(NeumannMethod):
    r"""Momentum-based recursive bilevel optimiser (MRBO): STORM on the lower gradient and on the hypergradient.

    With :math:`z_k = (x_k, y_k)`, :math:`\nabla\Phi(z; \xi)` the estimate of `StocBiO` on samples :math:`\xi`,

    .. math::
        u_k &= \nabla_y g(z_k; \zeta) + (1 - \beta_y) (u_{k-1} - \nabla_y g(z_{k-1}; \zeta)),\\
        h_k &= \nabla\Phi(z_k; \xi) + (1 - \beta) (h_{k-1} - \nabla\Phi(z_{k-1}; \xi)),\\
        y_{k+1} &= y_k - \alpha u_k, \qquad x_{k+1} = x_k - \text{lr}\, h_k.

    *When.* Small batches: noise that is common to both points cancels in the differences, and averages out with the
    weights :math:`\beta`; a good single loop where two evaluations per sample are affordable. *Needs* what `StocBiO`
    needs, and losses that are smooth on every batch. In the analysis :math:`\text{lr}, \alpha \sim k^{-1/3}` and
    :math:`\beta \sim \text{lr}^2`: schedulers change the learning rates, and ``beta`` and ``lower_beta`` may be
    assigned between steps.

    *Cost per step*: 2 lower gradients, 2 upper gradients, 2 Q Hessian-vector products, 2 cross products (half of these
    in the first step). *Draws*: one lower batch for u, then one upper batch, one lower batch for each product, one for
    the cross product; each is evaluated at both points.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of y.
        linear_steps: Q, the number of products. Default: 10.
        linear_lr: :math:`\eta`. Default: the learning rate of the lower groups.
        beta: weight :math:`\beta` in [0, 1] of the current sample of the hypergradient; 1 keeps no memory. Default:
            0.1.
        lower_beta: weight :math:`\beta_y` of the current sample of the lower gradient. Default: ``beta``.
        warm_start: start y at its last value. Default: True.
        lower_optimizer: receives u as the gradient, so it must not evaluate gradients itself (``LBFGS``); see
            `BilevelOptimizer`.
        check_finite, check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step, lower_batch,
            upper_batch, lower_init, task_memory, lower_clip, lower_projection: see `BilevelOptimizer`.

    State: ``previous`` and ``direction`` of the upper and of the lower parameters, the lower optimizer's state, and
    ``initial`` y without warm starts. Tasks start without memory at every step.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = MRBO([x], [y], lr=0.2)
        >>> for _ in range(60):  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 4)
        1.0

    Source: Yang, Ji, Liang (2021), arXiv:2106.04692.
    """

    declared = MethodInfo(
        paper="arXiv:2106.04692",
        family="stochastic",
        when="small batches: a single loop with recursive estimates of both gradients",
        cost="2 lower, 2 upper, 2 Q hvp, 2 jvp; Q = linear_steps",
        lower_steps=False,
        lower_optimizer="given gradient",
        upper_update="steps of lr along a momentum, whose recursion (STORM) is made for them",
    )

    lr: InitVar[float] = option()
    lower_steps: int = fixed(default=1)
    beta: float = number(default=0.1, least=0, most=1, saved=True)
    lower_beta: float | None = number(default=None, least=0, most=1, optional=True, saved=True)

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        if options["lower_beta"] is None:
            options["lower_beta"] = options["beta"]

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return a lower draw for u, then the draws of the series."""
        return [LOWER, *self._sample_draws()]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Update both estimates from the same samples at the current and the last point, then step y."""
        last = Recursion.remembered(inputs)
        zeta, samples = oracle.g.draw(), self._samples(oracle, inputs)
        _, u = oracle.lower(zeta)
        estimate = self._hypergradient(oracle, samples, inputs)
        h = estimate.gradient
        if last is not None:
            before = oracle.at(last.x, last.y)
            _, before_u = before.lower(zeta)
            u = u + (last.u - before_u) * (1 - cast("float", self.lower_beta))
            h = h + (last.h - self._hypergradient(before, samples, inputs).gradient) * (1 - self.beta)
        _, moved = inputs.step_along(oracle, u)
        return Recursion(oracle.x, oracle.y, h, u).estimate(estimate.loss, estimate.diagnostics).with_lower(moved)


class SUSTAIN(MRBO):
    r"""Single-timescale doubly stochastic method with momentum (SUSTAIN): `MRBO` with a randomised Neumann series.

    The hypergradient on a sample is that of `BSA`, with
    :math:`v = N \eta \prod_{j=1}^{n} (I - \eta \nabla^2_{yy} g(\zeta_j)) \nabla_y f(\xi)` and n uniform on
    0, ..., N - 1. Both points share all draws, n included; the rest is as in `MRBO`.

    *When.* As `MRBO`, with half of the products and more variance. *Needs* what `MRBO` needs.

    *Cost per step*: 2 lower gradients, 2 upper gradients, 2 n Hessian-vector products (N - 1 on average), 2 cross
    products (half of these in the first step). *Draws*: one lower batch for u, n from ``generator``, then one upper
    batch, one lower batch for each product, one for the cross product. Tasks and ranks share n.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of y.
        linear_steps: N, the number of terms. Default: 10.
        linear_lr: :math:`\eta`, in the original 1/L. Default: the learning rate of the lower groups.
        beta: weight in [0, 1] of the current sample of the hypergradient. Default: 0.1.
        lower_beta: the same for the lower gradient. Default: ``beta``.
        warm_start: start y at its last value. Default: True.
        lower_optimizer: receives u as the gradient; see `BilevelOptimizer`.
        check_finite, check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step, lower_batch,
            upper_batch, lower_init, task_memory, lower_clip, lower_projection: see `BilevelOptimizer`.

    State: as `MRBO`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> generator = torch.Generator().manual_seed(0)
        >>> optimizer = SUSTAIN([x], [y], lr=0.1, linear_steps=3, generator=generator)
        >>> for _ in range(200):
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 2)
        1.0

    Source: Khanduri, Zeng, Hong, Wai, Wang, Yang (2021), arXiv:2102.07367.
    """

    declared = replace(
        MRBO.declared,
        paper="arXiv:2102.07367",
        when="as MRBO, with half of the products and more variance",
        cost="2 lower, 2 upper, Q - 1 hvp on average, 2 jvp; Q = linear_steps",
        random=True,
    )

    linear_steps: int = count(default=10, least=1)

    _randomised = True

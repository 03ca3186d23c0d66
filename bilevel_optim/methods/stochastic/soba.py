"""SOBA and FSLA: y, the solution of the linear system and x move together."""

from __future__ import annotations

from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.base import BilevelOptimizer
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import fixed, number
from ...optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs
from ...oracle.oracle import Oracle
from ...problem.objective import Sample
from ...problem.vector import Vector

__all__ = ["FSLA", "SOBA", "SingleLoop"]


class SingleLoop(BilevelOptimizer):
    """Base class of the methods that carry v, the solution of the linear system, from step to step.

    Args:
        upper, lower, lr, lower_lr: see `BilevelOptimizer`.
        linear_lr: step size of v. Default: the learning rate of the lower groups.
        common: see `BilevelOptimizer`.
    """

    lower_steps: int = fixed(default=1)
    linear_lr: float | None = number(default=None, above=0, optional=True)

    def _solution(self, inputs: StepInputs) -> Vector | None:
        """Return v from the last step; None at the start."""
        return inputs.memory.get("linear_solution") if self.warm_start else None


class SOBA(SingleLoop):
    r"""Stochastic bilevel algorithm (SOBA): stochastic gradient steps on y, v and x at once.

    .. math::
        y_{k+1} &= y_k - \alpha \nabla_y g(x_k, y_k; \zeta),\\
        v_{k+1} &= v_k - \eta (\nabla^2_{yy} g(x_k, y_k; \zeta)\, v_k - \nabla_y f(x_k, y_k; \xi)),\\
        x_{k+1} &= x_k - \text{lr}\, (\nabla_x f(x_k, y_k; \xi) - \nabla^2_{xy} g(x_k, y_k; \zeta)\, v_k).

    *When.* The cheapest step of all methods with second derivatives, and the simplest single loop. *Needs* a lower loss
    that is strongly convex in y, and :math:`\alpha, \eta \lesssim 1/L` with a smaller ``lr``. With constant learning
    rates it ends in a neighbourhood of the solution, of the size of the rates: let them decrease as :math:`k^{-1/2}`,
    or see `SABA`.

    *Cost per step*: 1 lower gradient, 1 upper gradient, 1 Hessian-vector product, 1 cross product. *Draws*: one lower
    batch, one upper batch.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of y.
        linear_lr: :math:`\eta`. Default: the learning rate of the lower groups.
        warm_start: start y and v at their last values. Default: True. (The first v is one step from zero,
            :math:`\eta \nabla_y f`.) With tasks, pass ``task_memory=True``, which keeps y and v of each task, from
            v = 0 when a task is first drawn; without it every v is the first one, so the indirect term keeps a large
            error.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.

    State: ``linear_solution`` (v), the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = SOBA([x], [y], lr=0.1)
        >>> for _ in range(150):  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 4)
        1.0

    Source: Dagréou, Ablin, Vaiter, Moreau (2022), arXiv:2201.13409.
    """

    declared = MethodInfo(
        paper="arXiv:2201.13409",
        family="stochastic",
        when="noisy second derivatives that are affordable: the cheapest step, the simplest single loop",
        cost="1 lower, 1 upper, 1 hvp, 1 jvp",
        kept_by_tasks=("linear_solution",),
        lower_steps=False,
        lower_optimizer="given gradient",
    )

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return a lower and an upper draw."""
        return [LOWER, UPPER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Step y and v once, and return the hypergradient with the current v."""
        rates = inputs.linear_rates(self.linear_lr)
        zeta, xi = oracle.system_sample(), oracle.f.draw(once=True)
        loss, grad_x, grad_y = oracle.upper(xi)
        v = self._solution(inputs)
        v = grad_y * rates if v is None else v
        with oracle.lower_system(zeta) as system:
            cross, product = system.both(v)
        residual = product - grad_y
        _, moved = inputs.step_along(oracle, system.gradient)
        memory = {"linear_solution": v.descended(residual, rates)} if self.warm_start else {}
        estimate = Estimate(
            loss,
            grad_x - cross,
            {"linear_residual": residual, "linear_right_side": grad_y},
            memory,
            covers_all_vectors=self.warm_start,
        )
        return estimate.with_lower(moved)


class FSLA(SingleLoop):
    r"""Fully single loop algorithm (FSLA): one step on y, one on v, and a recursive estimate (STORM) for x.

    With :math:`\nabla\Phi(x, y, v; \xi, \zeta) = \nabla_x f(x, y; \xi) - \nabla^2_{xy} g(x, y; \zeta)\, v`,

    .. math::
        y_{k+1} &= y_k - \alpha \nabla_y g(x_k, y_k; \zeta_1),\\
        v_{k+1} &= v_k - \eta (\nabla^2_{yy} g(x_k, y_{k+1}; \zeta_2)\, v_k - \nabla_y f(x_k, y_{k+1}; \xi_2)),\\
        h_k &= \nabla\Phi(x_k, y_{k+1}, v_{k+1}; \xi_3, \zeta_3)
        + (1 - \beta) (h_{k-1} - \nabla\Phi(x_{k-1}, y_k, v_k; \xi_3, \zeta_3)),\\
        x_{k+1} &= x_k - \text{lr}\, h_k.

    *When.* As `SOBA`, for noisy upper gradients: :math:`\beta` averages them. *Needs* what `SOBA` needs.

    *Cost per step*: 1 lower gradient, 3 upper gradients, 1 Hessian-vector product, 2 cross products (less in the first
    step). *Draws*: a lower batch for y; an upper and a lower batch for v; an upper and a lower batch for h, evaluated
    at both points.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of y.
        linear_lr: :math:`\eta`. Default: the learning rate of the lower groups.
        beta: weight :math:`\beta` in [0, 1] of the current sample; 1 keeps no memory. May be assigned between steps
            (the analysis lets it decrease with ``lr``). Default: 0.1.
        warm_start: start y and v at their last values. Default: True. (The first v is :math:`\eta \nabla_y f`.)
            With tasks, pass ``task_memory=True``, as for `SOBA`.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.

    State: ``linear_solution`` (v) and ``previous`` of the lower parameters, ``previous`` and ``direction`` of the upper
    ones, the lower optimizer's state, and ``initial`` y without warm starts. With tasks h has no recursion.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = FSLA([x], [y], lr=0.1)
        >>> for _ in range(150):
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 4)
        1.0

    Source: Li, Gu, Huang (2021), arXiv:2112.04660.
    """

    declared = MethodInfo(
        paper="arXiv:2112.04660",
        family="stochastic",
        when="as SOBA, for noisy upper gradients",
        cost="1 lower, 3 upper, 1 hvp, 2 jvp",
        kept_by_tasks=("linear_solution",),
        lower_steps=False,
        lower_optimizer="given gradient",
    )

    beta: float = number(default=0.1, least=0, most=1, saved=True)

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return a draw for y, a pair for v, and a pair for h."""
        return [LOWER, UPPER, LOWER, UPPER, LOWER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Step y and v once, and update the recursion of the hypergradient there."""
        point, moved = inputs.run_lower_steps(oracle, 1)
        v, residual, grad_y = self._linear_step(point, inputs)
        xi, zeta = oracle.f.draw(), oracle.g.draw()
        loss, h = _direct(point, xi, zeta, v)
        old_y, old_v = (inputs.memory.get(name) for name in ("previous", "linear_solution"))
        old_x, old_h = (inputs.upper_memory.get(name) for name in ("previous", "direction"))
        if old_y is not None and old_v is not None and old_x is not None and old_h is not None:
            h = h + (old_h - _direct(oracle.at(old_x, old_y), xi, zeta, old_v)[1]) * (1 - self.beta)
        estimate = Estimate(
            loss,
            h,
            {"linear_residual": residual, "linear_right_side": grad_y},
            memory={"linear_solution": v, "previous": point.y},
            upper_memory={"direction": h, "previous": oracle.x},
        )
        return estimate.with_lower(moved)

    def _linear_step(self, oracle: Oracle, inputs: StepInputs) -> tuple[Vector, Vector, Vector]:
        """Return the next v, the residual of the last one, and the right-hand side."""
        xi, zeta, rates = oracle.f.draw(once=True), oracle.system_sample(), inputs.linear_rates(self.linear_lr)
        _, _, grad_y = oracle.upper(xi)
        v = self._solution(inputs)
        if v is None:
            return grad_y * rates, grad_y, grad_y
        with oracle.lower_system(zeta, gradient=False) as system:
            residual = system.hvp(v) - grad_y
        oracle.checks.finite("hvp", residual)
        return v - residual * rates, residual, grad_y


def _direct(oracle: Oracle, xi: Sample, zeta: Sample, v: Vector) -> tuple[Tensor, Vector]:
    """Return the loss, and the hypergradient with a given v."""
    loss, grad_x = oracle.upper_alone(xi)
    with oracle.lower_system(zeta, gradient=False) as system:
        return loss, grad_x - system.cross(v)

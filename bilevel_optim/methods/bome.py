"""BOME: first-order descent along the value function's barrier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..optimizer.base import BilevelOptimizer
from ..optimizer.declaration import MethodInfo
from ..optimizer.options import InitVar, choice, count, number, option
from ..optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs
from ..oracle.oracle import Oracle
from ..problem.parameters import require
from ..problem.vector import Vector
from ..solvers.limits import Projection

__all__ = ["BOME"]


def _no_projection(name: str, value: Any) -> None:
    wording = "Invalid {name} value: {value} (y moves along a joint direction with x; leave out {name})"
    require(name, value, value is None, wording)


class BOME(BilevelOptimizer):
    r"""Bilevel optimisation made easy (BOME): both variables descend f; a barrier keeps y near the lower solution.

    With the value gap :math:`q(x, y) = g(x, y) - g(x, y_T)`, where :math:`y_T` is the end of ``lower_steps`` steps from
    y and counts as a constant,

    .. math::
        \lambda = \max(\phi - \langle \nabla f, \nabla q\rangle,\, 0) / \|\nabla q\|^2, \qquad
        (x, y) \leftarrow (x, y) - (\text{lr}, \xi)\,(\nabla f + \lambda \nabla q),

    with gradients, products and norms over (x, y) jointly, and :math:`\phi = \eta \|\nabla q\|^2` or
    :math:`\phi = \eta\, q`. So :math:`\langle \nabla f + \lambda \nabla q, \nabla q\rangle \ge \phi`: q falls along
    every step. With ``joint_steps`` K, K - 1 such steps of y alone, with x fixed and products over y, precede the step
    of both.

    *When.* First derivatives only, one copy of y, one step for both variables; no penalty to choose. *Needs* a smooth
    g whose gap has no stationary points except the solutions (Polyak-Lojasiewicz), and deterministic losses or large
    batches. Ignoring how :math:`y_T` follows x changes :math:`\nabla_x q` by terms of the size of
    :math:`\nabla_y g(x, y_T)`, which vanish as T grows. The direction is the hypergradient at a solution only:
    elsewhere y lags behind by an amount proportional to it. If tasks are new in every step, y is always far from their
    solutions, and one joint step tells x almost nothing: a head that starts at zero gives the body no gradient of f.
    Then use about ten ``joint_steps``.

    *Cost per step*: ``lower_steps`` + 2 lower gradients, 1 upper gradient; each further joint step 1 of both in y alone
    (``"value"``: ``lower_steps`` + 2 lower gradients). *Draws*: for each joint step of y alone one upper batch and one
    lower batch (``"value"``: after those of its lower steps); then one lower batch for each lower step, one upper batch
    and one lower batch, shared by both gradients of q. With tasks, each task has its own multiplier.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the steps to :math:`y_T`.
        lower_steps: T. Default: 10.
        joint_lr: :math:`\xi`, the step of y along the common direction. Default: the learning rate of its group.
        joint_steps: K, steps of y along the common direction for each step of x. Default: 1, as in the paper.
        eta: :math:`\eta > 0`, how fast the barrier falls. Default: 0.5.
        barrier: ``"grad_norm"``, :math:`\phi = \eta \|\nabla q\|^2`, or ``"value"``, :math:`\phi = \eta\, q`. Default:
            ``"grad_norm"``.
        warm_start, upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp,
            process_group, tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip,
            lower_projection: see `BilevelOptimizer`. The lower optimizer makes the steps to :math:`y_T`; each outer
            step resets it.

    State: ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = BOME([x], [y], lr=0.1)
        >>> for _ in range(500):  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 3)
        1.0

    Source: Ye, Liu, Wright, Stone, Liu (2022), arXiv:2209.08709.
    """

    declared = MethodInfo(
        paper="arXiv:2209.08709",
        family="penalty",
        when="first derivatives only and no penalty to choose; deterministic losses",
        cost="T + 2 lower, 1 upper",
        second_order=False,
        converges=False,
        solves=False,
    )

    lower_steps: int = count(default=10)
    joint_lr: float | None = number(default=None, above=0, optional=True)
    joint_steps: int = count(default=1, least=1)
    eta: float = number(default=0.5, above=0)
    barrier: str = choice("grad_norm", "value", default="grad_norm")
    lower_projection: InitVar[Projection | None] = option(default=None, check=_no_projection)

    _stationary = True  # the value function depends on the lower loss alone

    def _together(self, tasks: int) -> list[slice]:
        """Put each task in a group of its own, because it has its own multiplier."""
        return [slice(i, i + 1) for i in range(tasks)]

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return the draws of the joint steps, each after its lower steps, if any."""
        alone = [LOWER] * self.lower_steps * (self.barrier == "value") + [UPPER, LOWER]
        return alone * (self.joint_steps - 1) + [LOWER] * self.lower_steps + [UPPER, LOWER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return the x part of the common direction as the estimate, and step y along its y part at once."""
        for _ in range(self.joint_steps - 1):
            oracle = self._settled(oracle, inputs)
        ends, _ = inputs.with_lower_state({}).run_lower_steps(oracle, self.lower_steps)
        loss, f_x, f_y = oracle.upper(oracle.f.draw(once=True))
        sample = oracle.g.draw()
        value, g_x, g_y = oracle.lower_jointly(sample)
        least, end_x, _ = ends.lower_jointly(sample)
        f, q, gap = Vector((*f_x, *f_y)), Vector((*(g_x - end_x), *g_y)), value - least
        multiplier = self._multiplier(f, q, gap)
        direction = f + q.times(multiplier)
        split = len(f_x)
        y = self._step_along(oracle, inputs, Vector(direction[split:]))
        diagnostics = {"lower_residual": g_y, "gap": gap, "multiplier": multiplier}
        return Estimate(loss, Vector(direction[:split]), diagnostics, lower=y)

    def _settled(self, oracle: Oracle, inputs: StepInputs) -> Oracle:
        """Return the oracle after a step of y alone, for which the gradient of q is that of g."""
        gap = torch.zeros((), device=oracle.device)
        ends = (
            inputs.with_lower_state({}).run_lower_steps(oracle, self.lower_steps)[0]
            if self.barrier == "value"
            else None
        )
        _, f = oracle.lower(oracle.f.draw(once=True), "upper")
        sample = oracle.g.draw()
        value, q = oracle.lower(sample)
        if ends is not None:
            gap = value - ends.lower(sample)[0]
        return oracle.at(lower=self._step_along(oracle, inputs, f + q.times(self._multiplier(f, q, gap))))

    def _multiplier(self, f: Vector, q: Vector, gap: Tensor) -> Tensor:
        """Return the least weight of q's gradient with which q falls as fast as the barrier asks."""
        norm = q.norm()
        # At a stationary point of q the multiplier is 0/0; the direction is then that of f.
        safe = torch.where(norm > 0, norm, 1.0)
        bound = self.eta * (norm if self.barrier == "grad_norm" else gap.to(norm) / safe)
        return torch.where(norm > 0, (bound - f.dot(q.times(1 / safe))).clamp_min(0) / safe, 0.0)

    def _step_along(self, oracle: Oracle, inputs: StepInputs, direction: Vector) -> Vector:
        """Return y after a step along a direction."""
        y = oracle.y - direction * inputs.linear_rates(self.joint_lr)
        oracle.checks.finite("lower_grad", y)
        return y

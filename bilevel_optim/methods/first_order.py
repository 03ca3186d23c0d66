"""FirstOrder: the direct gradient only."""

from __future__ import annotations

from ..hypergradient import Estimate, direct
from ..optimizer.base import BilevelOptimizer
from ..optimizer.declaration import MethodInfo
from ..optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs
from ..oracle.doors import DOORS
from ..oracle.oracle import Oracle

__all__ = ["FirstOrder"]


class FirstOrder(BilevelOptimizer):
    r"""Alternating descent with the direct gradient only: the control that every comparison should show.

    .. math:: y \leftarrow y - \alpha \nabla_y g(x, y) \quad (\text{lower\_steps times}), \qquad
              x \leftarrow x - \text{lr}\, \nabla_x f(x, y).

    *When.* To see what the indirect term :math:`-\nabla^2_{xy} g [\nabla^2_{yy} g]^{-1} \nabla_y f` contributes. It is
    *not* an estimate of the hypergradient: where f does not depend on x directly (data cleaning, regularisation) it is
    zero and nothing is learned.

    *Cost per step*: ``lower_steps`` lower gradients, 1 upper gradient. *Draws*: one lower batch for each lower step,
    then one upper batch.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step.
        warm_start, upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp,
            process_group, tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip,
            lower_projection: see `BilevelOptimizer`.

    State: the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = FirstOrder([x], [y], lr=0.5, lower_lr=1.0, lower_steps=1)
        >>> loss = optimizer.backward(lambda: (x * y).sum(), lambda: (y - x).square().sum() / 2)
        >>> x.grad  # y = 2; the hypergradient of x y*(x) = x^2 is 4
        tensor([2.])

    Source: the control of the experiments of arXiv:2110.07004.
    """

    declared = MethodInfo(
        paper="arXiv:2110.07004",
        family="control",
        when="control: it ignores how y* depends on x, so a method that does no better gained nothing from that",
        cost="T lower, 1 upper",
        second_order=False,
        converges=False,
        responds=False,
        doors=DOORS,  # it leaves out all of y's response to x
    )

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return one lower draw for each lower step, then an upper draw."""
        return [LOWER] * self.lower_steps + [UPPER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the lower steps, then return the direct gradient."""
        here, moved = inputs.run_lower_steps(oracle, self.lower_steps)
        estimate = direct(here)
        oracle.session.note_reached(estimate.gradient)  # this method exists to show a zero direct gradient
        return estimate.with_lower(moved)

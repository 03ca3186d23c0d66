"""HOZOG: zeroth-order gradient of the whole upper objective."""

from __future__ import annotations

from ...hypergradient import Estimate, full_zeroth_order
from ...optimizer.declaration import MethodInfo
from ...optimizer.step import StepInputs
from ...oracle.doors import DOORS
from ...oracle.oracle import Oracle
from .base import ZerothOrder

__all__ = ["HOZOG"]


class HOZOG(ZerothOrder):
    r"""Hyper-parameter optimisation with zeroth-order gradients (HOZOG): differences of the upper loss itself.

    With :math:`\Phi_N(x) = f(x, y_N(x))`, :math:`y_N(x)` the result of N = ``lower_steps`` steps from :math:`y_0`,

    .. math::
        h = \frac1Q \sum_{j=1}^Q \frac{\Phi_N(x + \mu u_j) - \Phi_N(x)}{\mu}\, u_j, \qquad
        x \leftarrow x - \text{lr}\; h .

    *When.* The upper loss has no derivative (an error rate, a simulator), or x is small. *Needs* values of f and first
    derivatives of g in y. The whole hypergradient has relative variance (p + 1)/Q; with `PZOBO` only the indirect term
    has. If f does not depend on x directly, the means of the two agree to second order in :math:`\mu`, and so does each
    estimate with central differences.

    *Cost per step*: N (Q + 1) lower gradients and Q + 1 values of f (2Q + 1 for central differences). *Draws*, memory,
    buffers and the live y: as `PZOBO`.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: N, the lower steps of every path.
        directions: Q, random directions per step. Default: 8.
        smoothing: :math:`\mu > 0`, the step of a difference. Default: 1e-2.
        smoothing_mode, direction, scale, difference, over_ranks, warm_start: as for `PZOBO`.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer` and `PZOBO`.

    State: ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(2, requires_grad=True)
        >>> optimizer = HOZOG([x], [y], lr=0.1, lower_steps=20, directions=2, direction="orthogonal",
        ...                   difference="central")
        >>> loss = optimizer.backward(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> x.grad.round(decimals=3) + 0.0  # y*(x) = x, so the hypergradient is x - 1
        tensor([0., 1.])

    Source: Gu et al. (2021), arXiv:2102.09026; as compared in arXiv:2110.07004.
    """

    declared = MethodInfo(
        paper="arXiv:2102.09026",
        family="zeroth-order",
        when="upper losses without a derivative; few upper parameters",
        cost="T (Q + 1) lower, Q + 1 losses; Q = directions, 2 Q with central differences",
        second_order=False,
        random=True,
        copies=True,
        lower_optimizer="elementwise",
        doors=DOORS,
        difference_step="smoothing",
    )

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return differences between the paths from perturbed x."""
        return self._estimate_on_paths(oracle, inputs, full_zeroth_order)

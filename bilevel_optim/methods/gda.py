"""GDA: gradient descent ascent."""

from __future__ import annotations

from torch import Tensor

from ..hypergradient import Estimate
from ..optimizer.declaration import MethodInfo
from ..optimizer.minimax import MinimaxOptimizer, danskin
from ..optimizer.options import InitVar, count, flag, option
from ..optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs
from ..oracle.oracle import Oracle
from ..problem.vector import Vector

__all__ = ["GDA"]


class GDA(MinimaxOptimizer):
    r"""Gradient descent ascent, the baseline for minimax problems.

    .. math:: x \leftarrow x - \text{lr}\, \nabla_x f(x, y), \qquad y \leftarrow y + \alpha \nabla_y f(x, y),

    both from the same evaluation. With more ``lower_steps``, the others come before it, at the old x.
    ``simultaneous=False`` evaluates the gradient in x after all of them (multi-step GDA, GDmax for many).

    *When.* As the simplest method. *Needs* ``lr`` much smaller than ``lower_lr`` (about :math:`\kappa^2` times).

    *Cost per step*: 1 upper gradient (both partial derivatives) and ``lower_steps`` - 1 lower gradients (all
    ``lower_steps`` if not simultaneous). *Draws*: one batch for each lower step but the last, then one for the last
    lower step and x (one more if not simultaneous).

    Args:
        upper: upper parameters x, which descend.
        lower: lower parameters y, which ascend.
        lr: learning rate of x.
        lower_lr: learning rate of y.
        lower_steps: ascent steps per step of x. Default: 1.
        simultaneous: the last ascent step and the step of x share one evaluation. Default: True.
        warm_start, upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp,
            process_group, lower_clip, lower_projection: see `BilevelOptimizer`.

    State: the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = GDA([x], [y], lr=0.1, lower_lr=0.5)
        >>> for _ in range(100):  # f = x y - y^2/2 + x^2/2, saddle point (0, 0)
        ...     loss = optimizer.step(lambda: (x * y - y**2 / 2 + x**2 / 2).sum())
        >>> bool(x.abs() < 1e-3), bool(y.abs() < 1e-3)
        (True, True)

    Source: Lin, Jin, Jordan (2020), arXiv:1906.00331.
    """

    declared = MethodInfo(
        paper="arXiv:1906.00331",
        family="minimax",
        when="the simplest method, with lr much smaller than lower_lr: the baseline",
        cost="T - 1 lower, 1 upper; T lower if not simultaneous",
        second_order=False,
        losses=1,
        tasks="none",
    )

    lower_lr: InitVar[float | None] = option(default=None)
    lower_steps: int = count(default=1)
    simultaneous: bool = flag(default=True)

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return the draws of the ascent steps, then one for x; if simultaneous, the last two are one."""
        return [LOWER] * (self.lower_steps - (self.simultaneous and self.lower_steps > 0)) + [UPPER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the ascent steps, and return the gradient in x at the last of them or after it."""
        together = self.simultaneous and self.lower_steps > 0
        here, moved = inputs.run_lower_steps(oracle, self.lower_steps - together)
        rule, _ = inputs.solver_for(oracle.y)
        if not together:
            return danskin(here, rule).with_lower(moved)
        sample, found = oracle.f.draw(once=rule.evaluates_once), []

        def ascent(y: Vector) -> tuple[Tensor, Vector]:
            loss, grad_x, grad_y = oracle.at(lower=y).upper(sample)
            found.append(Estimate(loss, grad_x, {"lower_residual": rule.residual(y, -grad_y)}))
            return -loss, -grad_y

        last = rule.step(here.y, moved.memory, ascent)
        oracle.checks.finite("lower_grad", last.y)
        return found[0].with_lower(last._replace(diagnostics=moved.diagnostics))

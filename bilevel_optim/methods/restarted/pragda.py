"""RAGDA and PRAGDA: restarted accelerated gradient descent ascent, without and with perturbations."""

from __future__ import annotations

from functools import partial
from operator import neg
from typing import ClassVar

from ...hypergradient import Estimate, implicit
from ...optimizer.declaration import MethodInfo
from ...optimizer.minimax import MinimaxOptimizer, danskin
from ...optimizer.options import count, flag
from ...optimizer.step import UPPER, Draw, StepInputs, replace
from ...oracle.oracle import Oracle
from ...solvers import linear
from .accelerated import Accelerated, Perturbed

__all__ = ["PRAGDA", "RAGDA"]


class RAGDA(Accelerated, MinimaxOptimizer):
    r"""Restarted accelerated gradient descent ascent: `RAHGD` for minimax problems, with gradients only.

    .. math::
        w &= x + (1 - \theta)(x - x_{\text{prev}}),\\
        y &\leftarrow \text{Nesterov ascent on } f(w, \cdot) \text{ from the last } y \quad (\text{lower\_steps}),\\
        x_{\text{prev}},\, x &\leftarrow x,\ w - \text{lr}\, \nabla_x f(w, y),

    with the restarts, the end and the averaged output of `RAHGD`; as there, Nesterov's momentum on y is off
    (``lower_momentum=0``) until you set it.

    *When.* Full-batch problems, smooth, strongly concave in y, perhaps nonconvex in x. No second derivatives: the error
    of the gradient is linear in that of y. With ``newton_correction`` the adjoint term
    :math:`-\nabla^2_{xy} f\, [\nabla^2_{yy} f]^{-1} \nabla_y f`, which vanishes at the maximiser, is added: the error
    is quadratic, for one run of conjugate gradients.

    *Cost per step*: ``lower_steps`` lower gradients, 1 upper gradient, no Hessian-vector product; ``restart_steps``
    more lower gradients when an epoch begins. With ``newton_correction`` one more lower gradient, up to
    ``linear_steps`` (+ 1) Hessian-vector products, 1 cross product. *Draws*: one batch for each lower step, then one.

    Args:
        upper: upper parameters x, which descend.
        lower: lower parameters y, which ascend.
        lr: learning rate of x.
        lower_lr: learning rate of the ascent steps.
        lower_steps: ascent steps per outer step.
        momentum, restart_radius, restart_period, lower_momentum, lower_restart, restart_steps, lower_tol, on_converged:
            see `RAHGD`. newton_correction: add the adjoint term. Default: False. linear_steps: maximum iterations of
            CG, for ``newton_correction``. Default: 10. warm_start, lower_optimizer, check_finite, check_derivatives,
            generator, vectorize, hvp, process_group, lower_clip, lower_projection: see `BilevelOptimizer`.

    State: as `RAHGD`, without ``linear_solution``: v is solved from zero at every step.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = RAGDA([x], [y], lr=0.5, lower_lr=0.5, lower_steps=5)
        >>> while not optimizer.converged:  # max_y f = x^2 - 2x
        ...     loss = optimizer.step(lambda: (x * y - y**2 / 2 + x**2 / 2 - 2 * x).sum())
        >>> round(x.item(), 2)
        1.0

    Source: Yang, Luo, Li, Jordan (2023), arXiv:2307.00126 (PRAGDA with radius 0).
    """

    declared = MethodInfo(
        host_update=True,
        paper="arXiv:2307.00126",
        family="minimax",
        when="full batches and bad conditioning, with gradients only",
        cost="T lower, 1 upper; newton_correction: 1 lower, Q hvp, 1 jvp more; Q = linear_steps",
        second_order=False,
        losses=1,
        tasks="none",
        upper_update="Nesterov's momentum with restarts",
    )

    _hypergradient_draws: ClassVar[list[Draw]] = [UPPER]  # for the adjoint term too

    newton_correction: bool = flag(default=False)
    linear_steps: int = count(default=10)

    @property
    def _stationary(self) -> bool:
        """True only with the adjoint term."""
        return self.newton_correction

    def _hypergradient(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return the gradient in x, with the adjoint term if requested."""
        if not self.newton_correction:
            return danskin(oracle, inputs.rule(oracle.y))
        sample = oracle.f.draw()
        # The right-hand side is the error of y, not a smooth function of x, so the last solution is no warm start.
        solve, minus = partial(linear.cg, steps=self.linear_steps), sample.mapped(neg)
        estimate = implicit(oracle, solve, upper_sample=sample, lower_sample=minus, check=self.check_finite)
        return replace(estimate, memory={})


class PRAGDA(Perturbed, RAGDA):
    r"""Perturbed RAGDA: finds second-order stationary points of :math:`\max_y f(x, y)` with gradients only.

    As `RAGDA`; in addition, whenever an epoch begins, :math:`x \leftarrow x + \xi` with :math:`\xi` uniform on the ball
    of radius r, the first epoch included unless ``perturb_initial=False`` (as the paper prints it).

    *When.* The start or the path may come close to a saddle point of :math:`\max_y f(x, y)`.

    *Cost per step*: as `RAGDA`. *Draws*: as `RAGDA`; the perturbations use ``generator``.

    Args:
        upper, lower, lr, lower_lr, lower_steps: see `RAGDA`, also for the options not listed here.
        perturbation: radius r >= 0, in units of x; small compared with B. Default: 1e-3.
        perturb_initial: perturb the initial point too, see `PRAHGD`. Default: True.
        options: as for `RAGDA`.

    *Departures from the paper*, the largest first. ``lower_momentum`` is 0, so that the ascent is *not* accelerated
    unless you set it, to :math:`(\sqrt\kappa - 1)/(\sqrt\kappa + 1)`. When an epoch begins y is kept; the paper sets
    it to zero and solves twice. The initial point is perturbed too; otherwise a run that starts at a saddle point ends
    there. You choose r and B. Its algorithm as printed:

        >>> def printed(kappa):  # kappa: the condition number of f in y
        ...     momentum = (kappa**0.5 - 1) / (kappa**0.5 + 1)
        ...     return {"lower_momentum": momentum, "lower_restart": "zero", "perturb_initial": False}
        >>> import torch
        >>> x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = PRAGDA([x], [y], lr=0.5, lower_lr=0.5, lower_steps=5, restart_radius=1.0, **printed(kappa=4.0))

    State: as `RAGDA`, and ``perturbation`` until the first update.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> generator = torch.Generator().manual_seed(0)
        >>> optimizer = PRAGDA([x], [y], lr=0.5, lower_lr=0.5, lower_steps=5, generator=generator)
        >>> while not optimizer.converged:  # max_y f = x^4/4 - x^2/2 has a maximum at 0
        ...     loss = optimizer.step(lambda: (x * y - y**2 / 2 + x**4 / 4 - x**2).sum())
        >>> round(abs(x.item()), 2)
        1.0

    Source: Yang, Luo, Li, Jordan (2023), arXiv:2307.00126.
    """

    declared = replace(RAGDA.declared, when="as RAGDA, near saddle points", cost="as RAGDA", random=True)

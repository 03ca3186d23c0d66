"""RAHGD and PRAHGD: restarted accelerated hypergradient descent, without and with perturbations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Self, Unpack

from ...hypergradient import Estimate, implicit
from ...optimizer.base import CommonOptions
from ...optimizer.declaration import Method, counts
from ...oracle.oracle import Oracle
from ...problem.parameters import Params, as_groups, is_count, is_number, require, unnamed
from ...solvers import linear
from ...solvers.linear import LinearSolution
from .accelerated import Accelerated, AcceleratedOptions
from .theory import Constants

__all__ = ["PRAHGD", "RAHGD"]


class Options(AcceleratedOptions, total=False):
    """Optional keyword arguments of `RAHGD`."""

    linear_steps: int
    linear_tol: float
    linear_atol: float
    damping: float


class RAHGD(Accelerated):
    r"""Restarted accelerated hypergradient descent: Nesterov momentum on x as well as on y, conjugate gradients for v.

    .. math::
        w &= x + (1 - \theta)(x - x_{\text{prev}}),\\
        y &\leftarrow \text{AGD on } g(w, \cdot) \text{ from the last } y \quad (\text{lower\_steps}),\\
        v &\leftarrow \text{CG on } \nabla^2_{yy} g(w, y)\, v = \nabla_y f(w, y) \text{ from the last } v
             \quad (\text{linear\_steps}),\\
        x_{\text{prev}},\, x &\leftarrow x,\ w - \text{lr}\,(\nabla_x f(w, y) - \nabla^2_{xy} g(w, y)\, v).

    After k steps of an epoch with :math:`k \sum_{i<k} \|x_{i+1} - x_i\|^2 > B^2` the momentum is dropped and a new
    epoch starts at x. An epoch that lasts K steps ends the run; the output is the average of its look-ahead points up
    to the shortest step of its second half (:meth:`averaged_parameters`).

    *When.* Deterministic (full-batch) problems that are badly conditioned: it needs about the square root of the steps
    of `AID` at both levels, for the same work per step. *Needs* what `AID` needs, and smooth losses. With noisy
    hypergradients the restart test fires on noise: use `AID`, or a large B.

    *Choosing B* (``restart_radius``). ``B / lr`` is the hypergradient norm above which every step restarts, so that the
    method is gradient descent; with an infinite B it never restarts. Sweep it by decades. *Choosing the rest*: ``lr``
    up to 1/L (a step size that is only just stable for gradient descent is too large for momentum); ``lower_lr`` =
    :math:`1/\ell` with ``lower_momentum`` = :math:`(\sqrt\kappa - 1)/(\sqrt\kappa + 1)`, :math:`\kappa` the condition
    number of g in y, and lower steps enough (some :math:`\sqrt\kappa`): momentum
    on x amplifies what a lower solve leaves over, and with too few steps the iteration does not settle.
    :meth:`from_theory` has the constants of the theorems, which are safe and very small.

    *Cost per step*: ``lower_steps`` + 1 lower gradients, 1 upper gradient, at most ``linear_steps`` (+ 1 for a warm
    start) Hessian-vector products, 1 cross product; ``restart_steps`` more lower gradients when an epoch begins; one
    host synchronisation for the restart test. *Memory*: four more tensors of the size of x. *Draws*: one lower batch
    for each lower step, then one upper batch, then one lower batch shared by all products.

    The hypergradient is that *at w*, where the loss returned is evaluated too; between steps the live upper parameters
    hold x. The momentum belongs to ``step``: with another optimizer over x after ``backward``, w is x.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x. Groups may differ: the restart test then measures lengths in units of the square roots
            of the rates. A change by a scheduler takes effect when the next epoch begins.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step.
        momentum: :math:`1 - \theta` in [0, 1). Default: 0.9.
        restart_radius: B > 0, in units of x; ``math.inf`` for never. Default: None, 5 times the length of the first
            step.
        restart_period: K >= 1. Default: 100.
        lower_momentum: momentum of the lower steps in [0, 1), forgotten between solves. Default: 0, which every stable
            ``lower_lr`` allows.
        linear_steps: most iterations of CG. Default: 10.
        lower_restart: ``"keep"``: y goes on from where it is when an epoch begins; ``"zero"``: it is set to zero and
            solved twice, as the paper prints it (not for networks). Default: ``"keep"``.
        restart_steps: additional lower steps when an epoch begins. Default: None, 0 with ``"keep"`` and ``lower_steps``
            with ``"zero"``.
        lower_tol: stop a lower solve after a step that found a gradient of at most this norm (host synchronisations).
            Default: 0, make all steps.
        linear_tol: stop CG when the residual is below this part of the right-hand side. Default: 0.
        linear_atol: stop CG when the residual is below this norm. Default: 0.
        damping: solve with :math:`H + \delta I`; biases the hypergradient. Default: 0.
        on_converged: ``"stop"``: once ``converged``, ``step`` does nothing and returns the last loss; ``"continue"``:
            another epoch begins, and the output is that of the epoch with the shortest selected step. Default:
            ``"stop"``.
        warm_start: start y and v at their last values. Default: True.
        lower_optimizer: another optimizer for the lower steps, which keeps its own state. Default: `AGD`.
        check_finite, generator, vectorize, hvp, process_group: see `BilevelOptimizer`.

    State: of x ``previous``, ``sum``, ``candidate``, ``average``; of y ``linear_solution`` (v), the lower optimizer's
    state, and ``initial`` y without warm starts. Attributes ``converged``, ``restarts``, ``epoch_step``.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = RAHGD([x], [y], lr=0.5, lower_lr=1.0, lower_steps=1)
        >>> while not optimizer.converged:  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 2)
        1.0

    Source: Yang, Luo, Li, Jordan (2023), arXiv:2307.00126.
    """

    declared = Method(
        paper="arXiv:2307.00126",
        family="restarted",
        when="full batches and bad conditioning: momentum at both levels",
        cost="as AID",
        calls=lambda o, k: counts(upper=1, lower=o.lower_steps + 1, hvp=o.linear_steps + o.warm_start, cross=1),
        ends=True,
        variants={"descent": {"momentum": 0.0, "restart_radius": math.inf}},
        settings={
            "quadratic": {"linear_steps": 30, "on_converged": "continue"},
            "quadratic/descent": {"linear_steps": 30},
            "compare": {},
        },
        elsewhere={"stochastic": "restarts need exact gradients (recipes.learn_to_regularize)"},
    )

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float,
        lower_lr: float,
        lower_steps: int,
        momentum: float = 0.9,
        restart_radius: float | None = None,
        restart_period: int = 100,
        lower_momentum: float = 0.0,
        linear_steps: int = 10,
        lower_restart: str = "keep",
        restart_steps: int | None = None,
        lower_tol: float = 0.0,
        linear_tol: float = 0.0,
        linear_atol: float = 0.0,
        damping: float = 0.0,
        on_converged: str = "stop",
        **common: Unpack[CommonOptions],
    ) -> None:
        self._set_linear(linear_steps, linear_tol, linear_atol, damping)
        super().__init__(
            upper,
            lower,
            lr=lr,
            lower_lr=lower_lr,
            lower_steps=lower_steps,
            momentum=momentum,
            restart_radius=restart_radius,
            restart_period=restart_period,
            lower_momentum=lower_momentum,
            lower_restart=lower_restart,
            restart_steps=restart_steps,
            lower_tol=lower_tol,
            on_converged=on_converged,
            **common,
        )

    def _set_linear(self, steps: int, tol: float, atol: float, damping: float) -> None:
        require("linear_steps", steps, is_count(steps))
        require("linear_tol", tol, is_number(tol) and tol >= 0)
        require("linear_atol", atol, is_number(atol) and atol >= 0)
        require("damping", damping, is_number(damping) and damping >= 0)
        self.linear_steps, self.linear_tol, self.linear_atol, self.damping = steps, tol, atol, damping

    def _estimate(self, oracle: Oracle) -> Estimate:
        with oracle.at(upper=self._look_ahead(self._groups("upper"))):
            self._solve_lower(oracle)
            start = self._remembered(oracle, "linear_solution") if self.warm_start else None
            estimate = implicit(oracle, self._linear(), start)
        if not self.warm_start:
            estimate.memory.clear()
        estimate.diagnostics.update(self._status())
        return estimate

    def _linear(self) -> Callable[..., LinearSolution]:
        return partial(
            linear.cg, steps=self.linear_steps, tol=self.linear_tol, atol=self.linear_atol, damping=self.damping
        )

    @classmethod
    def from_theory(
        cls,
        upper: Params,
        lower: Params,
        *,
        ell: float,
        mu: float,
        rho: float,
        M: float,
        nu: float,
        eps: float | None = None,
        restart_period: int | None = None,
        **options: Any,
    ) -> Self:
        r"""The method with the constants of its theorem: after it has converged, the gradient is of the order of eps.

        ``lr`` = :math:`1/(4 \tilde L)`, :math:`\theta = \min(4 (\tilde\rho\, \epsilon\, \text{lr}^2)^{1/4}, 1)`,
        :math:`B = \sqrt{\epsilon/\tilde\rho}`, :math:`K = 1/\theta` rounded, ``lower_lr`` = :math:`1/\ell`,
        ``lower_momentum`` = :math:`(\sqrt\kappa - 1)/(\sqrt\kappa + 1)`. The numbers of lower and of CG steps are the
        sufficient ones, with the tolerances that imply the accuracy :math:`\sigma = \min(\epsilon^2, \epsilon/2)` to
        stop earlier; an epoch may begin with up to 100 times as many lower steps.

        Args:
            upper: upper parameters.
            lower: lower parameters.
            ell: Lipschitz constant of the gradients of f and g.
            mu: strong convexity of g in y.
            rho: Lipschitz constant of their second derivatives.
            M: Lipschitz constant of f.
            nu: Lipschitz constant of the third derivatives of g.
            eps: target of the gradient norm.
            restart_period: K, in the place of ``eps``: then :math:`\theta = 1/K` exactly and
                :math:`\epsilon = \tilde L^2/(16 K^4 \tilde\rho)`.
            options: any other argument of the constructor, or the same ones to override a constant.

        Raises:
            ValueError: for constants out of range, or unless one of ``eps`` and ``restart_period`` is given.

        Example:
            >>> import torch
            >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = RAHGD.from_theory([x], [y], ell=1.0, mu=0.5, rho=1.0, M=1.0, nu=1.0, eps=1e-2)
            >>> round(optimizer.param_groups[0]["lr"] * 4 * 27, 12), optimizer.lower_steps, optimizer.linear_steps
            (1.0, 28, 15)
        """
        constants = Constants.bilevel(ell=ell, mu=mu, rho=rho, M=M, nu=nu)
        arguments = constants.first_order(eps, restart_period)
        return cls(upper, lower, **{**constants.linear(arguments.pop("sigma")), **arguments, **options})


class PRAHGD(RAHGD):
    r"""Perturbed RAHGD: finds second-order stationary points, escaping strict saddle points.

    As `RAHGD`; in addition, whenever an epoch begins, :math:`x \leftarrow x + \xi` with :math:`\xi` uniform on the ball
    of radius r, the first epoch included unless ``perturb_initial=False`` (as the paper prints it: such a run started
    at a saddle point ends there).

    The perturbation of the initial point is part of w until the first ``step``, also for another optimizer over x.

    *When.* The start, or the way, may come close to a saddle point. ``restart_period`` has to cover the time of escape.
    r should be small against B (0.02 B; with r of the order of B a minimum keeps triggering restarts).

    *Cost per step*, *memory*: as `RAHGD`. *Draws*: as `RAHGD`; the perturbations use ``generator``.

    Args:
        upper, lower, lr, lower_lr, lower_steps: as for `RAHGD`, as all options that are not named here.
        perturbation: r >= 0, in units of x. Default: 1e-3.
        perturb_initial: perturb the initial point too: the first hypergradient is evaluated there, and x moves there
            with the first update. Default: True.
        restart_radius: B. Default: None, 5 times the length of the first step, and at least 50 r.
        options: as for `RAHGD`.

    State: as `RAHGD`, and ``perturbation`` until the first update.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> generator = torch.Generator().manual_seed(0)
        >>> optimizer = PRAHGD([x], [y], lr=0.5, lower_lr=1.0, lower_steps=1, generator=generator)
        >>> while not optimizer.converged:  # f(x, y*(x)) = x^4/4 - x^2/2 has a maximum at 0
        ...     loss = optimizer.step(lambda: (y**4 / 4 - y**2 / 2).sum(), lambda: (y - x).square().sum() / 2)
        >>> round(abs(x.item()), 2)
        1.0

    Source: Yang, Luo, Li, Jordan (2023), arXiv:2307.00126.
    """

    declared = Method(
        paper="arXiv:2307.00126",
        family="restarted",
        when="as RAHGD, where the way may lead past saddle points",
        cost="as AID",
        calls=RAHGD.declared.calls,
        ends=True,
        random=True,
        settings={"quadratic": {"linear_steps": 30, "perturbation": 1e-13, "restart_radius": 0.5}, "compare": {}},
        elsewhere={"stochastic": "restarts need exact gradients (recipes.learn_to_regularize)"},
    )

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float,
        lower_lr: float,
        lower_steps: int,
        perturbation: float = 1e-3,
        perturb_initial: bool = True,
        **options: Unpack[Options],
    ) -> None:
        self._configure_noise(perturbation, perturb_initial)
        super().__init__(upper, lower, lr=lr, lower_lr=lower_lr, lower_steps=lower_steps, **options)

    @classmethod
    def from_theory(  # type: ignore[override]
        cls,
        upper: Params,
        lower: Params,
        *,
        ell: float,
        mu: float,
        rho: float,
        M: float,
        nu: float,
        eps: float,
        failure: float = 0.1,
        gradient_bound: float | None = None,
        **options: Any,
    ) -> Self:
        r"""The method with the constants of its theorem, which promises second-order stationary points.

        As :meth:`RAHGD.from_theory`, with the corrected :math:`\theta = (\tilde\rho\, \epsilon\, \text{lr}^2)^{1/4}`
        (half of that, as printed, contradicts the proof), :math:`K = 2\chi/\theta`,
        :math:`B = \sqrt{\epsilon/\tilde\rho}/(288 \chi^2)`, :math:`r = \min(\theta B/(20 K), \tilde L B^2/(4 C))` and
        :math:`\chi = \log(800\, \chi \sqrt{d}/(\zeta \theta^3))`, d the number of upper variables. Constants of proof
        quality: very small steps and very long epochs.

        Args:
            upper: upper parameters.
            lower: lower parameters.
            ell: Lipschitz constant of the gradients of f and g.
            mu: strong convexity of g in y.
            rho: Lipschitz constant of their second derivatives.
            M: Lipschitz constant of f.
            nu: Lipschitz constant of the third derivatives of g.
            eps: target of the gradient norm.
            failure: allowed probability :math:`\zeta` of failure. Default: 0.1.
            gradient_bound: C, a bound of the gradient of f(x, y*(x)). Default: None, leave out its term.
            options: any other argument of the constructor, or the same ones to override a constant.

        Raises:
            ValueError: for constants out of range.
        """
        groups = as_groups(upper, "upper")
        size = sum(t.numel() for group in groups for t in map(unnamed, group["params"]) if t.requires_grad)
        constants = Constants.bilevel(ell=ell, mu=mu, rho=rho, M=M, nu=nu)
        arguments = constants.second_order(eps, size, failure, gradient_bound)
        return cls(groups, lower, **{**constants.linear(arguments.pop("sigma")), **arguments, **options})

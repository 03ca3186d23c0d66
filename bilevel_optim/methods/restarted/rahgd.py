"""RAHGD and PRAHGD: restarted accelerated hypergradient descent, without and with perturbations."""

from __future__ import annotations

from functools import partial

from ...hypergradient import Estimate, implicit
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import choice, count, number
from ...optimizer.step import StepInputs, replace
from ...oracle.oracle import Oracle
from ...solvers import linear
from .accelerated import Accelerated, Perturbed

__all__ = ["PRAHGD", "RAHGD"]


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

    *When.* Deterministic (full-batch) problems that are badly conditioned. On two problems, with ``lower_momentum``,
    restarts off and both methods tuned, it reached a small gradient with fewer calls than `AID` at condition number
    100: 0.19 and 0.41 of them from one start (``recipes.benchmarks.conditioning``), 0.47 and 0.31 over three seeds
    (``003-kappa-quadratic``, ``003-kappa-quartic`` of ``recipes.papers``). At 10 it needed 0.89 and 1.11 of them. Try
    ``momentum=0`` too, which keeps the momentum on y: on both problems it needed as few calls at 100 (the same rows of
    ``recipes.papers``). *Needs* what `AID` needs, and smooth losses. With noisy hypergradients the restart test fires
    on noise: use `AID`, or a large B.

    *Choosing B* (``restart_radius``). ``B / lr`` is the hypergradient norm above which every step restarts, so that the
    method is gradient descent; with an infinite B it never restarts. Sweep it by decades. *Choosing the rest*: ``lr``
    up to 1/L (a step size that is only just stable for gradient descent is too large for momentum); ``lower_lr`` =
    :math:`1/\ell` with ``lower_momentum`` = :math:`(\sqrt\kappa - 1)/(\sqrt\kappa + 1)`, :math:`\kappa` the condition
    number of g in y, and enough lower steps (some :math:`\sqrt\kappa`): momentum on x amplifies the remaining lower
    error, and with too few steps the iteration does not settle.
    (``recipes/papers/theory.py`` has the constants of the theorems, which are safe and very small.)

    *Cost per step*: ``lower_steps`` + 1 lower gradients, 1 upper gradient, at most ``linear_steps`` (+ 1 for a warm
    start) Hessian-vector products, 1 cross product; ``restart_steps`` more lower gradients when an epoch begins; one
    host synchronisation for the restart test. *Memory*: four more tensors of the size of x. *Draws*: one lower batch
    for each lower step, then one upper batch, then one lower batch shared by all products.

    The hypergradient and the returned loss are evaluated *at w*; between steps the live upper parameters hold x. The
    momentum belongs to ``step``: with another optimizer over x after ``backward``, w is x.

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
        lower_momentum: momentum of the lower steps in [0, 1), reset between solves. Default: 0, which every stable
            ``lower_lr`` allows.
        linear_steps: maximum iterations of CG. Default: 10.
        lower_restart: when an epoch begins, ``"keep"``: y stays; ``"zero"``: y is set to zero and solved twice, as the
            paper prints it (not for networks). Default: ``"keep"``.
        restart_steps: additional lower steps when an epoch begins. Default: None, 0 with ``"keep"`` and ``lower_steps``
            with ``"zero"``.
        lower_tol: stop a lower solve after a step that found a gradient of at most this norm (host synchronisations).
            Default: 0, make all steps.
        linear_tol: stop CG when the residual is below this fraction, less than 1, of the right-hand side. Default: 0.
        linear_atol: stop CG when the residual norm is below this value. Default: 0.
        linear_start: start of the first CG, ``"zero"`` or ``"y"``, the lower solution at which it is run (the paper
            takes that of the first of its two solves). Default: ``"zero"``.
        damping: solve with :math:`H + \delta I`; biases the hypergradient. Default: 0.
        on_converged: ``"stop"``: once ``converged``, ``step`` does nothing and returns the last loss; ``"continue"``:
            another epoch begins, and the output is that of the epoch with the shortest selected step. Default:
            ``"stop"``.
        warm_start: start y and v at their last values (CG at zero where that is better: `bo.linear.cg`). Default: True.
        lower_optimizer: another optimizer for the lower steps, which keeps its own state. Default: `AGD`.
        check_finite, check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step, lower_batch,
            upper_batch, lower_init, task_memory, lower_clip, lower_projection: see `BilevelOptimizer`.

    *Departures from the paper*, the largest first. ``lower_momentum`` is 0, so that *the accelerated lower solve of the
    formula above is plain gradient descent* unless you set it: the right value needs :math:`\kappa`, and a ``lower_lr``
    that is only just stable without momentum may diverge with it. When an epoch begins y is kept; the paper sets it to
    zero and solves twice. The first CG starts at zero, not at y; a later one does so where zero is a better start
    than the last v, see `bo.linear.cg` (this cannot be turned off). B is 5 times the length of the first step, the
    numbers of steps are constants, and nothing depends on the accuracy. As in the
    paper, a run ends with an epoch of K steps, after which ``step`` does nothing. Its algorithm as printed:

        >>> def printed(kappa):  # kappa: the condition number of g in y
        ...     momentum = (kappa**0.5 - 1) / (kappa**0.5 + 1)
        ...     return {"lower_momentum": momentum, "lower_restart": "zero", "linear_start": "y"}
        >>> import torch
        >>> x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = RAHGD([x], [y], lr=0.5, lower_lr=1.0, lower_steps=5, restart_radius=1.0, **printed(kappa=4.0))

    State: of x ``previous``, ``sum``, ``candidate``, ``average``, and ``live`` while the output is swapped in; of y
    ``linear_solution`` (v), the state of a ``lower_optimizer``, and ``initial`` y without warm starts. Attributes
    ``converged``, ``restarts``, ``epoch_step``.

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

    declared = MethodInfo(
        host_update=True,
        paper="arXiv:2307.00126",
        family="restarted",
        when="full batches and bad conditioning: momentum at both levels",
        cost="as AID",
        upper_update="Nesterov's momentum with restarts",
    )

    linear_steps: int = count(default=10)
    linear_tol: float = number(default=0.0, least=0, below=1)
    linear_atol: float = number(default=0.0, least=0)
    linear_start: str = choice("zero", "y", default="zero")
    damping: float = number(default=0.0, least=0)

    def _hypergradient(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return the implicit hypergradient by conjugate gradients, started from the last solution."""
        tol, atol = self.linear_tol, self.linear_atol
        solve = partial(linear.cg, steps=self.linear_steps, tol=tol, atol=atol, damping=self.damping)
        first = oracle.y if self.linear_start == "y" else None
        if self.warm_start:
            return implicit(oracle, solve, inputs.memory.get("linear_solution", first), check=self.check_finite)
        return replace(implicit(oracle, solve, first, check=self.check_finite), memory={})


class PRAHGD(Perturbed, RAHGD):
    r"""Perturbed RAHGD: finds second-order stationary points, escaping strict saddle points.

    As `RAHGD`; in addition, whenever an epoch begins, :math:`x \leftarrow x + \xi` with :math:`\xi` uniform on the ball
    of radius r, the first epoch included unless ``perturb_initial=False`` (as the paper prints it: such a run started
    at a saddle point ends there).

    The perturbation of the initial point is part of w until the first ``step``, also for another optimizer over x.

    *When.* The start or the path may come close to a saddle point. ``restart_period`` must cover the escape time. r
    should be small compared with B (0.02 B; with r of the order of B a minimum keeps triggering restarts).

    *Cost per step*, *memory*: as `RAHGD`. *Draws*: as `RAHGD`; the perturbations use ``generator``.

    Args:
        upper, lower, lr, lower_lr, lower_steps: see `RAHGD`, also for the options not listed here.
        perturbation: radius r >= 0, in units of x. Default: 1e-3.
        perturb_initial: perturb the initial point too: the first hypergradient is evaluated there, and x moves there
            with the first update. Default: True.
        restart_radius: B. Default: None, 5 times the length of the first step, and at least 50 r.
        options: as for `RAHGD`.

    *Departures from the paper*, the largest first: those of `RAHGD`, above all that ``lower_momentum`` is 0. The
    initial point is perturbed too; otherwise a run that starts at a saddle point ends there. You choose r and B; the
    theorem's are in ``recipes/papers/theory.py``. Its algorithm as printed:

        >>> def printed(kappa):  # kappa: the condition number of g in y
        ...     momentum = (kappa**0.5 - 1) / (kappa**0.5 + 1)
        ...     inner = {"lower_momentum": momentum, "lower_restart": "zero", "linear_start": "y"}
        ...     return {**inner, "perturb_initial": False}
        >>> import torch
        >>> x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = PRAHGD([x], [y], lr=0.5, lower_lr=1.0, lower_steps=5, restart_radius=1.0, **printed(kappa=4.0))

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

    declared = replace(RAHGD.declared, when="as RAHGD, near saddle points", random=True)

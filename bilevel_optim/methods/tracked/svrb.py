"""SVRB: all derivatives of a bilevel problem tracked by STORM, one loop."""

from __future__ import annotations

from typing import Any, ClassVar

from ...optimizer.declaration import MethodInfo
from ...optimizer.options import option
from ...problem.parameters import require_choice
from .drawing import Drawing
from .trackers import Matrices, Products
from .tracking import RecursiveOptimizer
from .variants import Variant, exact, summed

__all__ = ["SVRB"]


class SVRB(RecursiveOptimizer):
    r"""Stochastic variance-reduced bilevel method (SVRB): STORM estimates of all derivatives, one loop, small batches.

    With u, v, V, H, w for :math:`\nabla_x f, \nabla_y f, \nabla^2_{xy} g, \nabla^2_{yy} g, \nabla_y g` and one
    sample at the current and at the last point,

    .. math::
        X &\leftarrow \Pi\,[(1-\beta)(X - h(x_{t-1}, y_{t-1}; \zeta)) + h(x_t, y_t; \zeta)], \quad X = u, v, V, H, w,\\
        x &\leftarrow x - \text{lr}\,(u - V H^{-1} v), \qquad
        y \leftarrow (1-\tau)\, y + \tau\, \Pi_R(y - \text{lower\_lr}\; w),

    both at once; :math:`\Pi` keeps the eigenvalues of H above ``floor`` and u, v, V below their ``ceilings``.

    *When.* Noisy gradients and a small lower problem (the matrices have :math:`p^2` and :math:`dp` entries);
    ``variant="matrix_free"`` for a large one. The noise of the direction is that of a batch :math:`1/\beta` times as
    large, so constant learning rates go further than with fresh estimates. *Needs* second derivatives, a lower loss
    that is strongly convex in y on average, and losses whose noise is smooth in (x, y): the same sample at two near
    points must give nearly the same values. In reweighting examples of a1a, moving averages in place of STORM did as
    well (``002-libsvm-a1a`` of ``recipes.papers``).

    *With tasks* (``tasks=``) the lower tensors have a leading dimension m, one row per task. The loss of a task sees
    its own row, and every step visits all tasks: m such recursions, and the mean of their hypergradients. `RSVRB`
    visits a few tasks per step.

    *Cost per step* (and task): 2 upper and 2 lower gradients, 2 p Hessian-vector and 2 p cross products
    (``"matrix_free"``: 2 of each), one linear solve of size p. *Draws*: one upper and one lower batch, each used at two
    points. The first step is a plain one: it makes the initial estimates from its own batch.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: length of a lower step before averaging, at most a third of the inverse smoothness of g in theory.
        averaging: :math:`\tau`, the fraction of a lower step to make. Default: 1.
        beta: mixing weight in [0, 1], or a dict of weights by name (``u``, ``v``, ``V``, ``H``, ``w``;
            ``"matrix_free"``: ``w``, ``s``, ``d``); names left out get 0.1. 1 forgets (plain stochastic estimates), 0
            never forgets the first batch. Default: 0.1.
        floor: least eigenvalue of H; half of the strong convexity is good (the strong convexity itself biases).
            Default: 1e-3.
        ceilings: bounds by name, on the norm of ``u`` and ``v`` and the spectral norm of ``V`` (``"matrix_free"``: on
            the norm of ``r``). Default: none.
        radius: radius of the ball around zero that y stays in. Default: infinite.
        variant: ``"faithful"``, the paper's; ``"matrix_free"``, where r follows :math:`H^{-1} \nabla_y f` by
            :math:`r \leftarrow r - \tau\, \text{lower\_lr}\; s`, with STORM estimates s of :math:`H r - \nabla_y f`
            and d of :math:`\nabla_x f - \nabla^2_{xy} g\, r`, two products in place of the matrices. The first r is
            :math:`\text{lower\_lr}\, \nabla_y f`. Default: "faithful".
        schedule: ``"constant"``, or ``"cube_root"``: :math:`\eta_t = (c_0 + t)^{-1/3}` multiplies lr and averaging, and
            :math:`\eta_t^2` multiplies beta (the theory's). torch's schedulers change the learning rates alone.
            Default: "constant".
        schedule_offset: :math:`c_0`. Default: 8.
        restarts: T, for stages of T, 2 T, 4 T, ... steps, each with the learning rates and averaging of the last over
            :math:`\sqrt 2` and half of its beta; everything else continues. Default: None.
        initial_steps: lower gradient steps before the first estimates. Default: 0.
        state_device: device of the trackers. Default: that of y.
        warm_start: False restarts every step from the first y, with plain estimates. Default: True.
        beta_unit: see `RSVRB`.
        lazy: see `RSVRB`; with one lower problem it makes no difference.
        lower_batch, upper_batch: rows per batch of a task. Default: all. check_finite, check_derivatives, generator,
            vectorize, hvp, process_group, tasks_per_step, lower_init: see `BilevelOptimizer`.

    *Departures from the paper*, the largest first. Step sizes are constant and beta is 0.1; in the paper's theorem both
    shrink with the step (``schedule="cube_root"``, with a constant of beta that it tunes). The result is the last x,
    not one drawn from all. There are no ceilings unless given. The matrices are explicit and solved directly; the paper
    uses conjugate gradients, which is far cheaper per step if p is large: compare seconds with that in mind. The
    schedule of the paper, with bounds of your own:

        >>> PAPER = {"schedule": "cube_root", "schedule_offset": 8, "beta": 1.0, "variant": "faithful"}
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.3, floor=0.3, ceilings={"u": 10.0, "v": 10.0}, **PAPER)

    State: of the first lower parameter ``rows.NAME`` for each tracker, for ``y_last`` (y at the last step; also ``r``
    and ``r_last``), and for ``log``, ``drift`` and ``age``, which record the time at which a row is valid. Each has a
    row for each problem, which joins all lower parameters. Of the upper parameters ``direction`` (d) and ``previous``
    (x at the last step). ``numbers["clock"]``: the time, and sums over the steps by which rows catch up.
    ``diagnostics`` has ``projected_NAME``, the number of projections that changed something in this step, and
    ``lower_residual``, the norm of w.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> generator = torch.Generator().manual_seed(0)
        >>> noise = [torch.randn(4, generator=generator) for _ in range(500)]
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> upper = bo.Objective(lambda e: (y - 1 + e[0]).square().sum() / 2, noise)
        >>> lower = bo.Objective(lambda e: (1 + e[1] / 4) * (y - x + e[2]).square().sum() / 2, noise)
        >>> optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.3, beta=0.02, floor=0.3)
        >>> for _ in range(500):  # y*(x) = x and the mean upper loss asks for y = 1
        ...     loss = optimizer.step(upper, lower)
        >>> bool((x - 1).abs() < 0.2)
        True

    Source: Guo, Hu, Zhang, Yang (2021), arXiv:2105.02266 (SVRB; ``"matrix_free"`` is in the spirit of its follow-up).
    """

    declared = MethodInfo(
        paper="arXiv:2105.02266",
        family="tracked",
        when="noisy gradients and a small lower problem: the least noise per sample, the most expensive step",
        cost="2 lower, 2 upper, 2 p hvp, 2 p jvp, p the size of y; 2 of each if matrix_free",
        tasks="rows",
        lower_steps=False,
        lower_optimizer="none",
        upper_update="steps of lr along an average, whose recursion (STORM) is made for them",
    )

    _VARIANTS: ClassVar = {"faithful": Variant(Matrices, exact), "matrix_free": Variant(Products, summed)}

    variant: str = option(default="faithful", settable=False)

    def _parts(self, options: dict[str, Any]) -> tuple[Variant, Drawing]:
        require_choice("variant", options["variant"], self._VARIANTS)
        return self._VARIANTS[options["variant"]], Drawing()

"""BSVRB: blockwise variance reduction, rows that rest between visits."""

from __future__ import annotations

from typing import Any, ClassVar

from ...optimizer.declaration import MethodInfo
from ...optimizer.options import choice, count, option
from ...problem.parameters import is_count, require
from .drawing import Drawing
from .trackers import Blocks, Products
from .tracking import RecursiveOptimizer
from .variants import Variant, blockwise, summed

__all__ = ["BSVRB"]


def _is_version(name: str, value: Any) -> None:
    require(name, value, is_count(value) and value in (1, 2), "Invalid {name} value: {value} (choose 1 or 2)")


class BSVRB(RecursiveOptimizer):
    r"""Blockwise stochastic variance-reduced bilevel method (BSVRB), versions 1 and 2: rows rest between visits.

    Only the rows of the tasks S of a step change; their trackers take MSVR steps,

    .. math::
        X_i \leftarrow (1-\beta) X_i + \beta\, h_i(x_t, y_{i,t}; \zeta)
        + c\,(h_i(x_t, y_{i,t}; \zeta) - h_i(x_{t-1}, y_{i,t-1}; \zeta)),
        \qquad c = 1 - \beta + \frac{1-q}{q (1-\beta)},

    with q the fraction of the tasks in a step. Version 1 tracks :math:`w_i` (of :math:`\nabla_y g_i`) and :math:`H_i`.
    Version 2 tracks :math:`w_i` and :math:`s_i` (of :math:`\nabla^2_{yy} g_i r_i - \nabla_y f_i`), along which
    :math:`r_i` descends, and forms no matrix. The direction is STORM over the samples of S,

    .. math:: d \leftarrow (1-\beta)(d - \bar q_{t-1}) + \bar q_t, \qquad
        q = \nabla_x f - \nabla^2_{xy} g\, H^{-1} \nabla_y f
        \quad (\text{version 2: } \nabla_x f - \nabla^2_{xy} g\, r),

    and x steps along d, :math:`y_i` along :math:`w_i`.

    *When.* As `RSVRB`, its predecessor. Resting rows do not drift along stale trackers, so lower steps need not
    shrink with q; the rows lag behind x between visits. *Needs* what `RSVRB` needs; memory per task :math:`p^2 + 3p`
    (version 2: :math:`6p`).

    *Cost per step*: as `RSVRB` with matrices, and (version 2) with ``"matrix_free"``. *Draws*: as `RSVRB`.

    Args:
        upper: upper parameters x.
        lower: lower parameters, each with a leading dimension m.
        lr: learning rate of x.
        lower_lr: learning rate of y (and of r).
        version: 1 or 2. Default: 1.
        beta: mixing weight below 1, or a dict of weights by name (``H``, ``w``; version 2: ``s``, ``w``; and ``d``).
            Default: 0.1.
        floor: least eigenvalue of H, version 1. Default: 1e-3.
        task_batch: tasks in a step, drawn uniformly. Default: 10.
        averaging, ceilings, radius: see `SVRB`; with version 2 ceilings may name ``r``. schedule, schedule_offset,
            restarts, initial_steps, state_device, lazy: see `SVRB`. beta_unit: see `RSVRB`. Default: ``"absolute"``.
            warm_start, check_finite, check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step,
            lower_batch, upper_batch, lower_init: see `BilevelOptimizer`.

    State: as `RSVRB`, and the diagnostics too.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> m = 50  # tasks with lower solutions y_i* = x + c_i
        >>> c = torch.linspace(-1, 1, m).view(m, 1, 1)
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(m, 1, requires_grad=True)
        >>> optimizer = bo.BSVRB(
        ...     [x], [y], lr=0.05, lower_lr=0.3, version=2, generator=torch.Generator().manual_seed(0)
        ... )
        >>> for _ in range(300):
        ...     loss = optimizer.step(
        ...         lambda rows: (y - 1).square().sum() / 2,
        ...         lambda rows: (y - x - rows[0]).square().sum() / 2,
        ...         tasks=bo.TensorTasks(c),
        ...     )
        >>> bool((x - 1).abs() < 0.1)
        True

    Source: Hu, Qiu, Guo, Zhang, Yang (2023), arXiv:2305.18730 (BSVRB).
    """

    declared = MethodInfo(
        paper="arXiv:2305.18730",
        family="tracked",
        when="as RSVRB, its predecessor; rows rest between visits",
        cost="as RSVRB; version 2: 2 of each",
        tasks="rows",
        random=True,
        lower_steps=False,
        lower_optimizer="none",
        upper_update="steps of lr along an average, whose recursion (STORM) is made for them",
    )

    _VERSIONS: ClassVar = {1: Variant(Blocks, blockwise, rests=True), 2: Variant(Products, summed, rests=True)}

    version: int = option(default=1, check=_is_version, settable=False)
    beta_unit: str = choice("q", "absolute", default="absolute")
    task_batch: int = count(default=10, least=1)

    def _parts(self, options: dict[str, Any]) -> tuple[Variant, Drawing]:
        return self._VERSIONS[options["version"]], Drawing(options["task_batch"])

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        beta = options["beta"]
        wording = "Invalid {name} value: {value} (the recursion divides by 1 - beta: pass weights less than 1)"
        require("beta", beta, all(weight < 1 for weight in beta.values()), wording)

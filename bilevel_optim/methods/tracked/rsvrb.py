"""RSVRB: SVRB for very many lower problems; a step visits a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...optimizer.declaration import MethodInfo
from ...optimizer.options import InitVar, count, option
from ...problem.parameters import require, require_choice
from .drawing import Drawing, importance_probabilities
from .trackers import Matrices, Normalised, Products
from .tracking import RecursiveOptimizer
from .variants import Variant, exact, probed, summed

__all__ = ["RSVRB", "importance_probabilities"]

PROBABILITIES = "Invalid {name} value: {value} (pass None, 'adaptive', or one number above 0 for each task)"


class RSVRB(RecursiveOptimizer):
    r"""Randomised SVRB (RSVRB): m lower problems with a memory of each; a step visits a few of them.

    For :math:`\min_x \frac1m \sum_i f_i(x, y_i^*(x))`. Trackers :math:`u_i, v_i, V_i, H_i, w_i` as in `SVRB`; only
    those of the sampled tasks S see data (:math:`a_i` is the number of draws of i over its expected number, 0 if it was
    not drawn):

    .. math::
        X_i &\leftarrow \Pi\,[(1-\beta) X_i + a_i\,(h_i(x_t, y_{i,t}; \zeta) - (1-\beta)\, h_i(x_{t-1}, y_{i,t-1};
        \zeta))], \qquad z_i = u_i - V_i H_i^{-1} v_i,\\
        s_i &\leftarrow (1-\beta)\, s_i + \beta a_i, \qquad
        d \leftarrow d + \tfrac1m \textstyle\sum_{i \in S} (z_i^{new} / s_i^{new} - z_i^{old} / s_i^{old}),\\
        x &\leftarrow x - \text{lr}\; d, \qquad
        y_i \leftarrow (1-\tau)\, y_i + \tau\, \Pi_R(y_i - \text{lower\_lr}\; w_i) \quad \text{for all } i.

    *When.* Thousands to millions of lower problems that each have a state worth keeping (users, clients, temperatures,
    queries): the cost of a step does not depend on m, and no step touches the rows of other tasks. *Needs* what `SVRB`
    needs, ``tasks=`` with a sampler of ids, and lower parameters with a leading dimension m. Memory: m rows of
    :math:`dp + p^2 + d + 4p` numbers (``"matrix_free"``: :math:`6p`).

    The random choice of tasks multiplies all trackers of a task by about one known number :math:`s_i`. Divided by it
    (as :math:`\Pi` acts on u, v, V and H), d converges if the data are exact. Without the division (the other
    variants), noise of relative size :math:`\sqrt{\beta/q}/\sqrt2` is left even then, :math:`q` the fraction of the
    tasks in a step. That is why beta is in units of q, and why the weights should be equal. Unvisited tasks continue
    along their old :math:`w_i`, for 1/q steps on average. So lower_lr times averaging must be below about q over the
    smoothness of g (with probabilities, task_batch times the least of them takes the place of q).

    *Cost per step*: that of `SVRB` for ``task_batch`` tasks; the first step visits all of them. *Draws*: the tasks,
    then one upper and one lower batch for each, used at two points.

    Args:
        upper: upper parameters x.
        lower: lower parameters, each with a leading dimension m.
        lr, lower_lr, averaging, ceilings, radius, schedule, schedule_offset, restarts, initial_steps: see `SVRB`;
            ``restarts`` makes it RE-RSVRB.
        beta: see `SVRB`; also ``d``. Small for noisy data, up to 1 for exact data, about 1 with
            ``schedule="cube_root"``. Default: 0.1.
        beta_unit: ``"q"``, beta is multiplied by q = task_batch/m (the theory's scale); ``"absolute"``. Default: "q".
        floor: see `SVRB`.
        task_batch: tasks in a step. Default: 10.
        probabilities: None, the sampler draws, assumed to be uniform; a tensor of shape (m,), tasks are drawn with
            these probabilities, with replacement (`importance_probabilities` computes good ones from the sizes of the
            tasks' derivatives); ``"adaptive"``, the same from the sizes seen so far, mixed with 20 % uniform.
        variant: formula for d. ``"self_normalised"``, as above, for nearly everything: it converges if the data are
            exact, and is no worse than the next two if they are noisy; needs equal weights. ``"exact_mean"``: the mean
            of all :math:`z_i` without :math:`s_i`, to see the effect of the division; needs equal weights. (H of
            unvisited rows shrinks below the floor.) ``"faithful"``: the paper's, for reproduction:
            :math:`d \leftarrow (1-\beta)(d - \bar z^{old}_J) + \bar z^{new}_J` over probes J, drawn uniformly and
            independently of S. ``"matrix_free"``: see `SVRB`, for y too large for matrices, or noisy data if more
            samples cost less than p products with second derivatives for each. Default: "self_normalised".
        probes: number of probes. Default: 4 task_batch.
        state_device: device of the rows, such as ``"cpu"`` if they do not fit next to the model. Default: that of y.
        lazy: True leaves unvisited rows behind until their next visit or :meth:`catch_up`; False brings all of them up
            to date in every step, at a cost that grows with m. The results are the same. Default: None, False only for
            small states. Once a row left behind has shrunk by :math:`e^{-16}`, one step brings all up to date, and
            needs room for a second copy.
        lower_batch, upper_batch: rows per batch of a task. Default: all.
        warm_start, check_finite, check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step,
            lower_init: see `BilevelOptimizer`. Processes share the tasks of a step; each has all rows, or, of lower
            parameters split along their first dimension (``DTensor``), its own.

    *Departures from the paper*, the largest first. The default variant is not the paper's, which is ``"faithful"``.
    Steps are constant and beta is 0.1, as with `SVRB`, whose other departures apply too. A step has 10 tasks, as in the
    paper's experiments; its algorithm has one. There are four probes for each task; the text has one in all. beta is in
    units of q, so that one value suits any number of tasks. The paper's algorithm, and its restarts:

        >>> PAPER = {"variant": "faithful", "task_batch": 1, "probes": 1, "schedule": "cube_root", "beta": 1.0}
        >>> RESTARTED = {"variant": "faithful", "task_batch": 10, "restarts": 100}
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.ones(1, requires_grad=True), torch.zeros(50, 1, requires_grad=True)
        >>> optimizers = [bo.RSVRB([x], [y], lr=0.01, lower_lr=0.01, **setting) for setting in (PAPER, RESTARTED)]

    State: as with `SVRB`; ``rows.scale``, :math:`s_i`, by which ``rows.u``,
    ``v``, ``V`` and ``H`` are divided (``"self_normalised"``); for adaptive probabilities ``rows.size``,
    ``rows.probability`` and ``rows.cumulative``. ``diagnostics``: as `SVRB`, and ``rows_touched``.

    Raises:
        ValueError: for an argument out of its range; without ``tasks`` if the parameters have no row for each task.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> m = 200  # tasks with lower solutions y_i* = x + c_i
        >>> c = torch.linspace(-1, 1, m).view(m, 1, 1)
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(m, 1, requires_grad=True)
        >>> tasks = bo.TensorTasks(c)
        >>> optimizer = bo.RSVRB(
        ...     [x], [y], lr=0.05, lower_lr=0.03, task_batch=10, generator=torch.Generator().manual_seed(0)
        ... )
        >>> for _ in range(300):  # inside the losses, y is the task's own row
        ...     loss = optimizer.step(
        ...         lambda rows: (y - 1).square().sum() / 2,
        ...         lambda rows: (y - x - rows[0]).square().sum() / 2,
        ...         tasks=tasks,
        ...     )
        >>> bool((x - 1).abs() < 0.1)
        True

    Source: Guo, Hu, Zhang, Yang (2021), arXiv:2105.02266 (RSVRB, RE-RSVRB: ``"faithful"``; the rest is ours).
    """

    declared = MethodInfo(
        paper="arXiv:2105.02266",
        family="tracked",
        when="up to millions of lower problems, each with a state worth keeping",
        cost="as SVRB for each visited task",
        tasks="rows",
        random=True,
        lower_steps=False,
        lower_optimizer="none",
        upper_update="steps of lr along an average, whose recursion (STORM) is made for them",
    )

    _VARIANTS: ClassVar = {
        "self_normalised": Variant(Normalised, exact, mean=True),
        "exact_mean": Variant(Matrices, exact, mean=True),
        "faithful": Variant(Matrices, probed, floored=True),
        "matrix_free": Variant(Products, summed),
    }

    task_batch: int = count(default=10, least=1)
    probes: int | None = count(default=None, least=1, optional=True)
    probabilities: InitVar[Tensor | Sequence[float] | str | None] = option(default=None)
    variant: str = option(default="self_normalised", settable=False)

    def _parts(self, options: dict[str, Any]) -> tuple[Variant, Drawing]:
        require_choice("variant", options["variant"], self._VARIANTS)
        rule, batch, probabilities = self._VARIANTS[options["variant"]], options["task_batch"], options["probabilities"]
        if options["probes"] is None:
            options["probes"] = 4 * batch
        if probabilities is None or isinstance(probabilities, str):
            require("probabilities", probabilities, probabilities in (None, "adaptive"), PROBABILITIES)
            return rule, Drawing(batch, options["probes"], probabilities)
        return rule, Drawing(batch, options["probes"], _chances(probabilities))

    def _arrange(self, options: dict[str, Any]) -> None:
        given = options["beta"]
        super()._arrange(options)
        variant, beta = options["variant"], options["beta"]
        require(
            "beta", given, not self._rule.mean or len({beta[name] for name in ("u", "v", "V", "H", "d")}) == 1,
            f"Invalid beta value: {{value}} (variant {variant!r} needs equal weights of u, v, V, H, d; pass a number)",
        )  # fmt: skip


def _chances(given: Any) -> tuple[Tensor, Tensor]:
    """Return the given probabilities, normalised, and their sums."""
    try:
        chances = torch.as_tensor(given, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        chances = torch.empty(0)
    sound = chances.dim() == 1 and len(chances) > 0 and bool((chances > 0).all() and chances.isfinite().all())
    require("probabilities", given, sound, PROBABILITIES)
    chances = chances / chances.sum()
    return chances, chances.cumsum(0)

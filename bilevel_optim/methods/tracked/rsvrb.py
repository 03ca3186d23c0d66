"""RSVRB: SVRB for very many lower problems, a few of which are looked at in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from ...hypergradient.storm import storm
from ...optimizer.declaration import Method
from ...oracle import tasks as task_layer
from ...problem.parameters import Params, is_count, require
from .recursion import Look, RecursiveOptions
from .rows import Rows
from .svrb import SVRB
from .trackers import Matrices, Measured

__all__ = ["RSVRB", "importance_probabilities"]

LOUD_BETA, PATIENCE = 0.3, 100
UNIFORM_PART = 0.2  # of adaptive probabilities, so that 1/p stays bounded


class RSVRB(SVRB):
    r"""Randomised SVRB (RSVRB): m lower problems with a memory of each, of which a step looks at a few.

    For :math:`\min_x \frac1m \sum_i f_i(x, y_i^*(x))`. Trackers :math:`u_i, v_i, V_i, H_i, w_i` as in `SVRB`, of which
    only those of the sampled tasks S see data (:math:`a_i` is 1 over the expected number of draws of i if it was drawn,
    else 0):

    .. math::
        X_i &\leftarrow \Pi\,[(1-\beta) X_i + a_i\,(h_i(x_t, y_{i,t}; \zeta) - (1-\beta)\, h_i(x_{t-1}, y_{i,t-1};
        \zeta))], \qquad z_i = u_i - V_i H_i^{-1} v_i,\\
        d &\leftarrow (1-\beta)\, d + \tfrac1m \textstyle\sum_{i \in S} (z_i^{new} - (1-\beta)\, z_i^{old}),\\
        x &\leftarrow x - \text{lr}\; d, \qquad
        y_i \leftarrow (1-\tau)\, y_i + \tau\, \Pi_R(y_i - \text{lower\_lr}\; w_i) \quad \text{for all } i.

    *When.* Thousands to millions of lower problems that each have a state worth keeping (users, clients, temperatures,
    queries): the cost of a step does not depend on m, and no step touches the rows of other tasks. *Needs* what `SVRB`
    needs, ``tasks=`` with a sampler of ids, and lower parameters with a leading dimension m. Memory: m rows of
    :math:`dp + p^2 + d + 4p` numbers (``"matrix_free"``: :math:`6p`).

    The randomness of *which* tasks are looked at is noise too, of relative size :math:`\sqrt{\beta/q}/\sqrt2` in every
    tracker, :math:`q` the part of the tasks in a step: that is why beta is in units of q. Its effect cancels in
    :math:`V H^{-1} v` if the weights are equal, so prefer one number. A warning tells of a large one. Tasks that are
    not looked at go on along their old :math:`w_i`, for 1/q steps on average: lower_lr times averaging has to be below
    about q over the smoothness of g (with probabilities, task_batch times the least of them).

    *Cost per step*: that of `SVRB` for ``task_batch`` tasks; the first step looks at all of them. *Draws*: the tasks,
    then one upper and one lower batch for each, used at two points.

    Args:
        upper: upper parameters x.
        lower: lower parameters, each with a leading dimension m.
        lr, lower_lr, averaging, ceilings, radius, schedule, schedule_offset, restarts, initial_steps: see `SVRB`;
            ``restarts`` makes it RE-RSVRB.
        beta: see `SVRB`; also ``d``. Default: 0.1.
        beta_unit: ``"q"``, beta is multiplied by q = task_batch/m (the theory's scale); ``"absolute"``. Default: "q".
        floor: see `SVRB`.
        task_batch: tasks in a step. Default: 10.
        probabilities: None, what the sampler draws, taken to be uniform; a tensor of shape (m,), tasks are drawn with
            these probabilities, with replacement (`importance_probabilities` makes good ones from the sizes of the
            tasks' derivatives); ``"adaptive"``, likewise from the sizes seen so far, mixed with 20 % uniform.
        variant: how d is made. ``"exact_mean"``, as above: the mean of all :math:`z_i` exactly, if the floor only acts
            on sampled rows, as it then does; needs equal weights. ``"faithful"``, the paper's:
            :math:`d \leftarrow (1-\beta)(d - \bar z^{old}_J) + \bar z^{new}_J` over probes J, uniformly drawn and
            independent of S. ``"self_normalised"``: z is divided by the known scale
            :math:`s_i \leftarrow (1-\beta) s_i + \beta a_i` that the drawing has given its trackers; least noise, and a
            lag of the rows between visits. ``"matrix_free"``: see `SVRB`, for large y. Default: "exact_mean".
        probes: number of probes. Default: 4 task_batch.
        state_device: where the rows are kept, such as ``"cpu"`` when they do not fit beside the model. Default: with y.
        lazy: True leaves rows that a step does not look at behind until they are looked at, or until
            :meth:`catch_up`; False brings all of them up to date in every step, at a cost that grows with m. The
            results are the same. Default: None, False only for small states.
        lower_batch, upper_batch: rows per batch of a task. Default: all.
        check_finite, generator, vectorize, hvp, process_group: see `BilevelOptimizer`. Processes share the tasks of a
            step; each has all rows.

    State: the rows, d, the last x. ``diagnostics``: as `SVRB`; ``rows_touched``; ``scale_error``, the mean of
    :math:`|s_i - 1|` (``"self_normalised"``).

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

    declared = Method(
        paper="arXiv:2105.02266",
        family="tracked",
        when="up to millions of lower problems, each with a state worth keeping",
        cost="as SVRB for each task looked at",
        calls=SVRB.declared.calls,
        tasks="rows",
        random=True,
        lower_steps=False,
        lower_optimizer="none",
        variants={
            "faithful": {"variant": "faithful"},
            "normalised": {"variant": "self_normalised"},
            "free": {"variant": "matrix_free"},
        },
        settings={
            "quadratic": {},
            "quadratic/faithful": {},
            "quadratic/normalised": {},
            "quadratic/free": {},
            "stochastic": {"decay": (1 / 3, 1 / 3), "tasks": True},
            "stochastic/faithful": {"decay": (1 / 3, 1 / 3), "tasks": True},
            "stochastic/normalised": {"decay": (1 / 3, 1 / 3), "tasks": True},
            "stochastic/free": {"decay": (1 / 3, 1 / 3), "tasks": True},
        },
        elsewhere={"compare": "made for stochastic losses (recipes.hyper_regularization)"},
    )

    VARIANTS: tuple[str, ...] = ("exact_mean", "faithful", "self_normalised", "matrix_free")

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float,
        lower_lr: float,
        beta: float | dict[str, float] = 0.1,
        floor: float = 1e-3,
        task_batch: int = 10,
        probes: int | None = None,
        probabilities: Tensor | Sequence[float] | str | None = None,
        variant: str = "exact_mean",
        **recursive: Unpack[RecursiveOptions],
    ) -> None:
        require("task_batch", task_batch, is_count(task_batch) and task_batch > 0)
        require("probes", probes, probes is None or (is_count(probes) and probes > 0))
        chances = None if probabilities is None or isinstance(probabilities, str) else torch.as_tensor(probabilities)
        valid = probabilities is None or probabilities == "adaptive" if chances is None else _are_chances(chances)
        require("probabilities", probabilities, valid)
        super().__init__(
            upper,
            lower,
            lr=lr,
            lower_lr=lower_lr,
            beta=beta,
            floor=floor,
            variant=variant,
            **recursive,
        )
        tied = variant in ("exact_mean", "self_normalised")
        require(
            "beta", beta, not tied or len({self.beta[name] for name in ("u", "v", "V", "H", "d")}) == 1,
            f"Invalid beta value: {{value}} (variant {variant!r} needs equal weights of u, v, V, H, d)",
        )  # fmt: skip
        self.task_batch, self.probes = task_batch, 4 * task_batch if probes is None else probes
        self.adaptive = probabilities == "adaptive" if chances is None else False
        self._chances = None if chances is None else chances.double() / chances.double().sum()
        self._cumulated: tuple[Tensor, Tensor] | None = None  # probabilities, and their sums

    _saved = ("_chances",)

    # ------------------------------------------------------------------------------------------------ tasks

    def _batch(self, m: int) -> int:
        return min(self.task_batch, m)

    def _draw(self, sampler: Any, m: int) -> tuple[Tensor, Tensor]:
        if sampler is None:
            return super()._draw(sampler, m)
        n = self._batch(m)
        if self.adaptive and self._steps_done % math.ceil(m / n) == 1 % math.ceil(m / n):
            self._adapt()
        if self._chances is None:
            drawn = task_layer.sample(sampler, n, self.generator)
            if not isinstance(drawn, Tensor) or drawn.is_floating_point() or drawn.dim() != 1:
                raise ValueError(
                    f"{type(self).__name__} needs a sampler of task ids: sample(n, generator) must return a LongTensor "
                    f"of n row numbers"
                )
            ids, counts = torch.unique(drawn.cpu(), return_counts=True)
            if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < m):
                raise ValueError(f"tasks.sample returned ids from {int(ids[0])} to {int(ids[-1])} for {m} rows")
            return ids, counts * (m / n)
        if len(self._chances) != m:
            raise ValueError(f"there are {len(self._chances)} probabilities for {m} tasks")
        if self._cumulated is None or self._cumulated[0] is not self._chances:  # they may have been put back
            self._cumulated = self._chances, self._chances.cumsum(0)
        sums = self._cumulated[1]
        uniform = torch.rand(
            n, generator=self.generator, dtype=torch.float64, device=task_layer.device_of(self.generator)
        ).cpu()
        drawn = torch.searchsorted(sums, uniform * sums[-1], right=True).clamp_max(m - 1)
        ids, counts = torch.unique(drawn, return_counts=True)
        return ids, counts / (n * self._chances[ids])

    def _adapt(self) -> None:
        """Probabilities from the sizes of the derivatives last seen, once for each m / task_batch steps."""
        rows = self._rows
        assert rows is not None
        sizes = rows.values["size"].double().cpu()
        self._chances = (1 - UNIFORM_PART) * importance_probabilities(sizes) + UNIFORM_PART / len(sizes)

    def _additional(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        extra = {}
        if self.adaptive:
            extra["size"] = self._sizes(rows)
        if self.variant == "self_normalised":
            extra["scale"] = rows["w"].new_ones(len(rows["w"]))
        return extra

    def _sizes(self, rows: dict[str, Tensor]) -> Tensor:
        squares = [rows[name].flatten(1).square().sum(1) for name in self.trackers.names]
        return torch.stack(squares).sum(0)

    # ------------------------------------------------------------------------------------------------ steps

    def _advance(self, look: Look) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
        if look.sampler is not None and self.beta_unit == "q" and self.schedule == "constant" and self.restarts is None:
            beta = max(self.beta.values())
            look.oracle.checks.alert(
                "loud beta",
                f"beta = {beta:g} in units of the part of the tasks in a step makes the drawing of tasks the largest "
                "error; use 0.1 or less, or schedule='cube_root'",
                torch.tensor(not look.whole and self._steps_done > PATIENCE and beta > LOUD_BETA, device=look.x.device),
            )
        return super()._advance(look)

    def _measured(self, look: Look, weights: Tensor | None) -> Measured:
        measured = super()._measured(look, weights)
        if self.adaptive:
            look.now["size"] = (look.now["size"] + self._sizes(measured.new)) / 2
        return measured

    def _mean(self, look: Look, tracked: dict[str, Tensor], measured: Measured) -> Tensor:
        assert isinstance(self.trackers, Matrices)
        assert self._direction is not None
        z_of = self.trackers.hypergradients
        if look.whole and self.variant != "self_normalised":
            return super()._mean(look, tracked, measured)
        if self.variant == "faithful":
            return self._probed(look, tracked)
        beta, m = look.betas["d"], len(look.rows)
        new, old = z_of(tracked), z_of(look.now)
        if self.variant == "self_normalised":
            scales = tracked["scale"].unsqueeze(1), look.now["scale"].unsqueeze(1)
            return self._direction + (new / scales[0] - old / scales[1]).sum(0) / m
        return self._direction * (1 - beta) + (new - (1 - beta) * old).sum(0) / m

    def _probed(self, look: Look, tracked: dict[str, Tensor]) -> Tensor:
        """Direction by STORM from the rows of probes, before and after the step."""
        assert isinstance(self.trackers, Matrices)
        assert self._direction is not None
        probes = self._draw_probes(len(look.rows))
        before = look.rows.gather(probes)
        after = {name: before[name] * (1 - look.betas[name]) for name in self.trackers.names}
        look.rows.keep_above(after)
        where = torch.searchsorted(look.ids, probes).clamp_max(len(look.ids) - 1)
        both = look.ids[where] == probes
        for name in self.trackers.names:
            after[name][both] = tracked[name][where[both]]
        z_of = self.trackers.hypergradients
        return storm(self._direction, z_of(after).mean(0), z_of(before).mean(0), look.betas["d"])

    def _draw_probes(self, m: int) -> Tensor:
        """Rows for the direction, independent of those that see data."""
        return torch.randint(
            m, (self.probes,), generator=self.generator, device=task_layer.device_of(self.generator)
        ).cpu()

    def _least(self) -> float | None:
        return self.floor if self.variant == "faithful" else None

    def _refresh(self, rows: Rows) -> None:
        if self.variant not in ("exact_mean", "self_normalised") or not isinstance(self.trackers, Matrices):
            return
        assert self._direction is not None
        total = torch.zeros_like(self._direction)
        for ids in rows.chunks():
            some = rows.gather(ids)
            z = self.trackers.hypergradients(some)
            total += (z / some["scale"].unsqueeze(1) if "scale" in some else z).sum(0)
        self._direction = total / len(rows)


def importance_probabilities(sizes: Tensor) -> Tensor:
    r"""Probabilities :math:`p_i \propto \sqrt{A_i}`, which make :math:`C(p) = \sum_i A_i / p_i` smallest.

    :math:`C(p)/m` is the factor of the theory's sample complexity. With these it is
    :math:`(\sum_i \sqrt{A_i})^2 / m`, by :math:`1 + cv^2(\sqrt A)` less than with uniform ones.

    Args:
        sizes: :math:`A_i`, the sum of the squared sizes of a task's derivatives; shape (m,).
    """
    roots = sizes.double().sqrt()
    if not bool((roots >= 0).all() and roots.sum() > 0 and roots.isfinite().all()):
        raise ValueError("sizes must be non-negative and finite numbers that are not all zero")
    return roots / roots.sum()


def _are_chances(chances: Tensor) -> bool:
    return chances.dim() == 1 and len(chances) > 0 and bool((chances > 0).all() and chances.isfinite().all())

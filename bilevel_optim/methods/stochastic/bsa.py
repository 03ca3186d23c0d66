"""BSA and TTSA: stochastic approximation with a randomised Neumann series."""

from __future__ import annotations

from ...optimizer.declaration import MethodInfo
from ...optimizer.options import count
from ..growing import Growing
from .stocbio import NeumannMethod

__all__ = ["BSA", "TTSA"]


class BSA(Growing, NeumannMethod):
    r"""Bilevel stochastic approximation (BSA): more and more lower steps, one random term of a Neumann series.

    Outer step k = 0, 1, ... makes :math:`\lceil c\,(k + 1)^{\text{growth}} \rceil` lower steps, then draws n uniformly
    from 0, ..., N - 1 and

    .. math::
        v &= N \eta \prod_{j=1}^{n} (I - \eta \nabla^2_{yy} g(x, y; \zeta_j))\, \nabla_y f(x, y; \xi),\\
        x &\leftarrow x - \text{lr}\, (\nabla_x f(x, y; \xi) - \nabla^2_{xy} g(x, y; \zeta_0)\, v).

    *When.* As a baseline: unbiased for the series of N terms with (N - 1)/2 products on average, at the price of a
    variance that grows like N. *Needs* a lower loss that is strongly convex in y, and :math:`\eta \le 1/L` on every
    batch.

    *Cost per step*: the lower steps' gradients, 1 upper gradient, n Hessian-vector products ((N - 1)/2 on average), 1
    cross product. *Draws*: one lower batch for each lower step, n from ``generator``, one upper batch, one lower batch
    for each product, one for the cross product. Tasks and ranks share n.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps (in the original it decreases within an outer step).
        lower_steps: c > 0, not necessarily an integer.
        growth: the exponent; 0 keeps the number of steps constant. Default: 0.5.
        linear_steps: N, the number of terms. Default: 10.
        linear_lr: :math:`\eta`, in the original 1/L. Default: the learning rate of the lower groups.
        warm_start: start y at its last value. Default: True.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.

    State: the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> generator = torch.Generator().manual_seed(0)
        >>> optimizer = BSA(
        ...     [x], [y], lr=0.1, lower_steps=2, linear_steps=3, linear_lr=0.9, generator=generator
        ... )
        >>> for _ in range(100):  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 2)
        1.0

    Source: Ghadimi, Wang (2018), arXiv:1802.02246.
    """

    declared = MethodInfo(
        paper="arXiv:1802.02246",
        family="stochastic",
        when="baseline: StocBiO with a random term of the series, and more and more lower steps",
        cost="T lower, growing like k^(1/2), 1 upper, (Q - 1)/2 hvp on average, 1 jvp; Q = linear_steps",
        random=True,
    )

    _randomised = True

    linear_steps: int = count(default=10, least=1)


class TTSA(NeumannMethod):
    r"""Two-timescale stochastic approximation (TTSA): one lower step, one random term of a Neumann series.

    With n uniform on 0, ..., N - 1,

    .. math::
        y &\leftarrow y - \alpha \nabla_y g(x, y; \zeta),\\
        v &= N \eta \prod_{j=1}^{n} (I - \eta \nabla^2_{yy} g(x, y; \zeta_j))\, \nabla_y f(x, y; \xi),\\
        x &\leftarrow x - \text{lr}\, (\nabla_x f(x, y; \xi) - \nabla^2_{xy} g(x, y; \zeta_0)\, v).

    *When.* As a baseline: y follows a slowly moving x, with :math:`\text{lr} \ll \alpha` (in the analysis
    :math:`\text{lr} \sim k^{-3/5}` and :math:`\alpha \sim k^{-2/5}`: use a ``LambdaLR`` with one function per group,
    and set ``linear_lr``, which follows :math:`\alpha` by default). *Needs* what `BSA` needs.

    *Cost per step*: ``lower_steps`` lower gradients, 1 upper gradient, n Hessian-vector products ((N - 1)/2 on
    average), 1 cross product. *Draws*: as `BSA`. Tasks and ranks share n.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step. Default: 1.
        linear_steps: N, the number of terms. Default: 10.
        linear_lr: :math:`\eta`, in the original c/L with c in (0, 1]. Default: the learning rate of the lower groups.
        warm_start: start y at its last value. Default: True.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.

    State: the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> generator = torch.Generator().manual_seed(0)
        >>> optimizer = TTSA([x], [y], lr=0.05, linear_steps=3, linear_lr=0.9, generator=generator)
        >>> for _ in range(200):
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 2)
        1.0

    Source: Hong, Wai, Wang, Yang (2020), arXiv:2007.05170.
    """

    declared = MethodInfo(
        paper="arXiv:2007.05170",
        family="stochastic",
        when="baseline: one lower step, a random term of the series",
        cost="T lower (T = 1 by default), 1 upper, (Q - 1)/2 hvp on average, 1 jvp; Q = linear_steps",
        random=True,
    )

    _randomised = True

    lower_steps: int = count(default=1)
    linear_steps: int = count(default=10, least=1)

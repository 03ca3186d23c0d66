"""BA: the bilevel approximation method, with a growing number of lower steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..optimizer.declaration import MethodInfo
from ..optimizer.options import InitVar, fixed, flag, number
from .aid import AID
from .growing import Growing

__all__ = ["BA"]


class BA(Growing, AID):
    r"""Bilevel approximation (BA, here with conjugate gradients): `AID` from a fixed start, with a growing step count.

    Outer step k = 0, 1, ... makes :math:`\lceil c\,(k + 1)^{1/4} \rceil` lower steps from the first value of y, then
    solves the linear system from zero, then updates x, all as in `AID`.

    *When.* As a baseline: without warm starts, the lower error shrinks only as the number of lower steps grows. *Needs*
    what `AID` needs.

    *Cost per step*: as `AID`, with the growing number of lower steps. *Draws*: as `AID`.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: c > 0, not necessarily an integer.
        growth: the exponent. Default: 0.25.
        linear_steps: maximum iterations of CG (the original solves the system exactly). Default: 10.
        linear_tol, damping: as in `AID`. warm_start: start y and v at their last values instead. Default: False.
            upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.

    State: ``initial`` y (``linear_solution`` with warm starts), the lower optimizer's state.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = BA([x], [y], lr=0.5, lower_lr=0.5, lower_steps=2)
        >>> for _ in range(20):
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> optimizer.oracle_counts["lower_grad"]  # 2, 4 x 3, 11 x 4, 4 x 5, and 20 x 1
        98

    Source: Ghadimi, Wang (2018), arXiv:1802.02246.
    """

    declared = MethodInfo(
        paper="arXiv:1802.02246",
        family="implicit",
        when="baseline: AID from a fixed start, with more and more lower steps",
        cost="as AID, T growing like k^(1/4)",
    )

    growth: float = number(default=0.25, least=0)
    warm_start: bool = flag(default=False)
    linear_solver: str = fixed(default="cg")
    linear_lr: float | None = fixed(default=None)
    keep_direction: bool = fixed(default=False)
    lower_solver: InitVar[Callable[[], Any] | None] = fixed(default=None)

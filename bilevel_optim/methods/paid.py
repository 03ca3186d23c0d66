"""PAID: approximate implicit differentiation with perturbations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..optimizer.declaration import MethodInfo
from ..optimizer.options import InitVar, count, number, option
from ..optimizer.step import StepInputs, Update
from ..problem.random import uniform_ball
from ..problem.vector import Vector
from .aid import AID

__all__ = ["PAID"]


class PAID(AID):
    r"""Perturbed approximate implicit differentiation (PAID-BiO): `AID` that leaves strict saddle points.

    After a step along a hypergradient of norm at most ``gradient_threshold``, if more than ``perturbation_period``
    steps have passed since the last perturbation, :math:`x \leftarrow x + \xi` with :math:`\xi` uniform on the ball of
    radius r.

    *When.* As the baseline for `PRAHGD`. *Needs* what `AID` needs.

    *Cost per step*: as `AID`, one host synchronisation. *Draws*: as `AID`; the perturbations use ``generator``.

    Args:
        upper, lower, lr, lower_lr, lower_steps: see `AID`, also for the options not listed here.
        gradient_threshold: largest norm of the hypergradient at which x is perturbed. Default: 1e-3.
        perturbation: radius r >= 0, in units of x. Default: 1e-3.
        perturbation_period: steps allowed for an escape. Default: 50.
        options: as for `AID`.

    State: as `AID`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> generator = torch.Generator().manual_seed(0)
        >>> optimizer = PAID([x], [y], lr=0.5, lower_steps=1, generator=generator)
        >>> for _ in range(100):  # f(x, y*(x)) = x^4/4 - x^2/2 has a maximum at 0
        ...     loss = optimizer.step(lambda: (y**4 / 4 - y**2 / 2).sum(), lambda: (y - x).square().sum() / 2)
        >>> round(abs(x.item()), 2)
        1.0

    Source: Huang, Ji, Ma, Lai (2022), arXiv:2203.03830; Jin et al. (2017), arXiv:1703.00887.
    """

    declared = MethodInfo(
        host_update=True,
        paper="arXiv:2203.03830",
        family="implicit",
        when="baseline of PRAHGD: AID that leaves strict saddle points by perturbations",
        cost="as AID",
        random=True,
        upper_update="gradient descent with perturbations where the gradient is small",
    )

    lr: InitVar[float] = option()
    gradient_threshold: float = number(default=1e-3, least=0, finite=False)
    perturbation: float = number(default=1e-3, least=0)
    perturbation_period: int = count(default=50)

    def _graph_key(self, steps: int, numbers: Mapping[str, Any]) -> Any:
        """Cache key for the step's graph: the lower step count, because only the update uses the numbers."""
        return self._lower_step_count(steps)

    def update(self, x: Vector, gradient: Vector, inputs: StepInputs) -> Update:
        """Make the step of `AID`, then perturb x if the gradient is small."""
        new = super().update(x, gradient, inputs).x
        since = inputs.numbers.get("since")  # steps since the last perturbation
        since = None if since is None else since + 1
        if (
            (since is None or since > self.perturbation_period)
            and self.perturbation > 0
            and float(gradient.norm()) <= self.gradient_threshold
        ):
            new, since = new + inputs.ranks.copy_from_first(uniform_ball(x, self.perturbation, inputs.generator)), 0
        return Update(new, numbers={"since": since})

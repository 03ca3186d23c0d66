"""Nesterov's accelerated gradient descent as a ``torch.optim`` optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ..problem.parameters import is_number, require

__all__ = ["AGD", "agd_or"]

MOMENTUM = "Invalid {name} value: {value} (a number of at least 0 and below 1)"


class AGD(Optimizer):
    r"""Nesterov's accelerated gradient descent with constant momentum, for a strongly convex lower problem.

    .. math::
        z_{t+1} = \tilde z_t - \alpha \nabla g(\tilde z_t), \qquad
        \tilde z_{t+1} = z_{t+1} + \beta (z_{t+1} - z_t), \qquad \tilde z_0 = z_0 .

    The parameters hold the gradient-step iterate :math:`z`; the gradient is evaluated at the look-ahead
    :math:`\tilde z`, so :meth:`step` needs a closure. (``torch.optim.SGD(nesterov=True)`` keeps the look-ahead in the
    parameters instead.) With :math:`\alpha = 1/\ell` and
    :math:`\beta = (\sqrt\kappa - 1)/(\sqrt\kappa + 1)` the error decays as :math:`(1 - 1/\sqrt\kappa)^t`, against
    :math:`(1 - 1/\kappa)^t` of gradient descent.

    Args:
        params: tensors, or groups of them.
        lr: step size :math:`\alpha`, at most :math:`1/\ell`.
        momentum: :math:`\beta` in [0, 1). Default: 0.

    Raises:
        ValueError: if ``lr`` or ``momentum`` is out of range.

    Example:
        >>> z = torch.tensor([1.0, 1.0], requires_grad=True)
        >>> optimizer = AGD([z], lr=1.0, momentum=1 / 3)
        >>> def closure():
        ...     z.grad = torch.tensor([1.0, 0.25]) * z.detach()
        >>> for _ in range(3):
        ...     _ = optimizer.step(closure)
        >>> z.detach()
        tensor([0.0000, 0.3125])

    Source: Nesterov (2018), Lectures on Convex Optimization, 2.2; the lower solver of arXiv:2307.00126.
    """

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0) -> None:
        if lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        require("momentum", momentum, 0.0 <= momentum < 1.0, MOMENTUM)
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. ``closure`` sets ``.grad`` at the parameters' current values; its result is returned."""
        if closure is None:
            raise RuntimeError(
                "AGD needs a closure, because it evaluates the gradient at the look-ahead point; call step(closure) "
                "with a function that computes .grad"
            )
        before = []
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                before.append(p.clone())
                if "previous" in state:
                    p.add_(p - state["previous"], alpha=group["momentum"])
        with torch.enable_grad():
            result = closure()
        previous = iter(before)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["previous"] = next(previous)
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
        return result


def agd_or(lower_optimizer: Callable[[Any], Optimizer] | None, lower_momentum: float) -> Callable[[Any], Optimizer]:
    """Return the factory of the lower optimizer: the user's, or `AGD` with this momentum.

    A user's optimizer has its own momentum, so ``lower_momentum`` must be zero with it.
    """
    require("lower_momentum", lower_momentum, is_number(lower_momentum) and 0 <= lower_momentum < 1, MOMENTUM)
    if lower_optimizer is None:
        return partial(AGD, momentum=lower_momentum)
    if lower_momentum:
        raise ValueError(
            f"Invalid lower_momentum value: {lower_momentum} (an option of the default lower optimizer alone: leave "
            "out lower_momentum or lower_optimizer)"
        )
    return lower_optimizer

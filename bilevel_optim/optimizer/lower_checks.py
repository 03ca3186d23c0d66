"""What a lower optimizer must be for a method: found out from a dummy parameter, before it is used."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import BilevelWarning
from ..solvers.agd import AGD
from ..solvers.limits import Limits
from ..solvers.lower import NOT_ELEMENTWISE, is_known, needs_closure
from ..solvers.trust import acts_elementwise, can_be_differentiated, rests_without_gradient
from ..solvers.unrolling import can_be_unrolled

__all__ = ["LowerChecks", "require_unlimited"]

Factory = Callable[[Any], Optimizer]


class LowerChecks:
    """Requirements on the lower optimizer; what its update has to show is seen once.

    Args:
        factory: makes it from parameter groups.
        lr: learning rate of the lower steps.
    """

    def __init__(self, factory: Factory, lr: float) -> None:
        self.factory, self.lr = factory, lr
        self._shown: dict[str, bool] = {}

    def probe(self) -> Optimizer:
        """The lower optimizer made for a dummy parameter, to see what it is."""
        return self.factory([{"params": [torch.zeros(1, 1, device="cpu", requires_grad=True)], "lr": self.lr}])

    def require_at_rest(self) -> None:
        """Raise if it moves y where the gradient is zero."""
        probe = self.probe()
        if not is_known(probe) and not self._shows("resting", rests_without_gradient):
            raise ValueError(
                f"Invalid lower_optimizer value: {type(probe).__name__} moves y where the gradient is zero (a clamp, a "
                "projection or a penalty in a hook or in its step), so y does not end where the implicit hypergradient "
                "is right; use lower_clip= or lower_projection=, put the penalty into the lower loss, or use F2SA"
            )

    def require_differentiable(self) -> None:
        """Raise unless its update can be differentiated."""
        probe = self.probe()
        name = f"Invalid lower_optimizer value: {type(probe).__name__}"
        if isinstance(probe, AGD) or not can_be_unrolled(probe):
            raise ValueError(
                f"{name} cannot be differentiated through; use one of torch's optimizers with a differentiable "
                "argument, such as SGD or Adam, or AID"
            )
        if not is_known(probe) and not self._shows("differentiable", can_be_differentiated):
            raise ValueError(
                f"{name} has an update whose derivative by autograd is not its difference quotient (a hook or its step "
                "changes gradients or parameters out of autograd's sight); use lower_clip= or lower_projection=, which "
                "are differentiated, or a method that does not differentiate the lower steps, such as F2SA or AID"
            )

    def require_elementwise(self, what: str = "copies of y") -> None:
        """Raise if it would mix what is stacked."""
        probe = self.probe()
        kind = type(probe)
        mixes = not is_known(probe) and not self._shows("elementwise", acts_elementwise)
        if issubclass(kind, NOT_ELEMENTWISE) or mixes:
            raise ValueError(
                f"Invalid lower_optimizer value: {kind.__name__} does not treat every entry alone, so it would mix the "
                f"{what}; use SGD, Adam or the like"
            )

    def require_given_gradient(self) -> None:
        """Raise if it asks for gradients at points of its own, where the method has one to give."""
        kind = type(self.probe())
        if issubclass(kind, AGD) or needs_closure(self.probe()):
            raise ValueError(
                f"Invalid lower_optimizer value: {kind.__name__} evaluates gradients at points of its own, but the "
                "lower step takes an estimate made before; use SGD, Adam or the like"
            )

    def warn_of_decay(self, group: Mapping[str, Any]) -> None:
        """Warn of a lower group with a penalty that the linear system would not know."""
        if group.get("weight_decay", self.probe().param_groups[0].get("weight_decay")):
            warnings.warn(
                "weight_decay of the lower_optimizer is not part of the lower loss, so the linear system does not know "
                "it and the hypergradient is biased; put the penalty into the lower loss instead",
                BilevelWarning,
                stacklevel=4,
            )

    def place_of_counts(self, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.device | None:
        """The device of its counts of steps for a parameter of a group; None if it has no option that says so."""
        options = {**self.probe().param_groups[0], **group}
        if not {"capturable", "fused"} & options.keys():
            return None
        return parameter.device if options.get("capturable") or options.get("fused") else torch.device("cpu")

    def _shows(self, what: str, test: Callable[[Factory, float], bool]) -> bool:
        if what not in self._shown:
            self._shown[what] = test(self.factory, self.lr)
        return self._shown[what]


def require_unlimited(limits: Limits, method: str) -> None:
    """Raise if there are limits of lower steps, which a method makes itself."""
    for name, value in (("lower_clip", limits.clip), ("lower_projection", limits.projection)):
        if value is not None:
            raise ValueError(f"Invalid {name} value: {value} ({method} makes its lower steps itself)")

"""Checks of what a method that is defined outside the package returns, and that it writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..hypergradient import Estimate
from ..oracle.oracle import Oracle
from ..problem.objective import version_of
from .step import StepInputs, Update

__all__ = ["ReadOnly", "require_estimate", "require_update"]


def require_estimate(found: Any, oracle: Oracle, method: str) -> None:
    """Raise TypeError or ValueError unless an estimate has a scalar loss and vectors of the right level."""
    if not isinstance(found, Estimate):
        raise TypeError(f"{method}.estimate() must return an Estimate, not {type(found).__name__}")
    loss = found.loss
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the loss in the Estimate of {method} must be a scalar tensor, not {what}")
    _require("gradient", found.gradient, oracle.x, method, shapes=True)
    if found.lower is not None:
        _require("lower", found.lower, oracle.y, method, shapes=True)
    for name, vector in found.memory.items():
        _require(f"memory[{name!r}]", vector, oracle.y, method)
    for name, vector in found.upper_memory.items():
        _require(f"upper_memory[{name!r}]", vector, oracle.x, method)


def require_update(found: Any, method: str) -> None:
    """Raise TypeError unless this is an `Update`."""
    if not isinstance(found, Update):
        raise TypeError(f"{method}.update() must return an Update, not {type(found).__name__}")


def _require(what: str, found: Any, like: Sequence[Tensor], method: str, shapes: bool = False) -> None:
    got = [tuple(t.shape) for t in found] if isinstance(found, tuple) else type(found).__name__
    wanted = [tuple(t.shape) for t in like]
    if isinstance(got, str) or len(got) != len(wanted) or (shapes and got != wanted):
        raise ValueError(
            f"{what} in the result of {method} must be a Vector with a tensor for each parameter of its level, of "
            f"shapes {wanted}, not {got}"
        )


class ReadOnly:
    """Tensors that a step only reads: its parameters, their state and, once known, the hypergradient."""

    def __init__(self, oracle: Oracle, inputs: StepInputs) -> None:
        self._known: list[tuple[Tensor, int]] = []
        if not oracle.sharded:  # sharded parameters are written to evaluate a loss
            self.add(*oracle.live_x, *oracle.live_y)
            for vector in (*inputs.memory.values(), *inputs.upper_memory.values()):
                self.add(*vector)

    def add(self, *tensors: Tensor) -> None:
        """Note these tensors too."""
        self._known += [(t, version_of(t)) for t in tensors]

    def require(self, method: str) -> None:
        """Raise ValueError if one has been written in place."""
        if any([version_of(t) != version for t, version in self._known]):
            raise ValueError(
                f"{method} (or a loss) writes in place into a parameter, its state or the hypergradient, which a step "
                "only reads; return new tensors from estimate() and update(): a + b, not a.add_(b)"
            )

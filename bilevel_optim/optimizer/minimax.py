r"""Minimax problems :math:`\min_x \max_y f(x, y)`: the bilevel problem with g = -f, and one loss."""

from __future__ import annotations

from operator import neg
from typing import Any, Never

from ..hypergradient import Estimate
from ..oracle.oracle import Oracle
from ..problem.objective import Loss, Objective, as_objective
from ..solvers.lower import LowerRule
from .base import BilevelOptimizer
from .step import StepInputs

__all__ = ["MinimaxOptimizer", "danskin"]


class MinimaxOptimizer(BilevelOptimizer):
    """Base class of the methods for one loss that x descends and y ascends, ``step(loss)``.

    The rest of the library sees a pair of losses, f and -f, whose samples come from one stream of data.
    """

    _fixed_rate = "the learning rates of x and y have to be chosen together"

    def _objectives(self, upper: Loss | None, lower: Loss | None) -> tuple[Objective, Objective]:
        """Return the loss, and its negative on the same draws."""
        if upper is None or lower is not None:
            raise TypeError(
                f"{type(self).__name__} takes one loss, which x descends and y ascends: call step(loss), without a "
                "lower loss"
            )
        loss = as_objective(upper, "minimax")
        return loss, loss.mapped(neg)

    def _estimate_tasks(self, oracle: Oracle, inputs: StepInputs, sampler: Any) -> Never:
        """Raise TypeError, because a sampler draws for two losses."""
        raise TypeError(
            f"{type(self).__name__} takes one loss, and no tasks, because a sampler draws for two losses: call "
            "step(loss)"
        )


def danskin(oracle: Oracle, rule: LowerRule) -> Estimate:
    """Return the gradient of f in x at the current y, which is that of max_y f(x, y) if y is the maximiser.

    ``rule`` makes the ascent steps; its limits enter the residual.
    """
    loss, grad_x, grad_y = oracle.upper(oracle.f.draw(once=True))
    return Estimate(loss, grad_x, {"lower_residual": rule.residual(oracle.y, -grad_y)})

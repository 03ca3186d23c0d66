"""The direct gradient, which ignores that y depends on x."""

from __future__ import annotations

from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from .estimate import Estimate

__all__ = ["direct"]


def direct(oracle: Oracle, upper_sample: Sample | None = None) -> Estimate:
    r"""Return :math:`\nabla_x f(x, y)` at the live y: the hypergradient without its indirect term.

    Args:
        oracle: the losses; costs one upper gradient.
        upper_sample: sample of f. Default: the next one.
    """
    loss, gradient, _ = oracle.upper(upper_sample or oracle.f.draw(once=True))
    return Estimate(loss, gradient)

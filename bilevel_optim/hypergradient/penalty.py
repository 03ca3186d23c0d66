"""Finite differences in the weight of a penalty: the hypergradient from first-order gradients only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import DATA_FIRST
from ..oracle.copies import Copies
from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.placement import constant
from ..problem.vector import Vector, coarsest
from .estimate import Estimate
from .finite_difference import Stencil

__all__ = ["penalty"]


def penalty(
    oracle: Oracle,
    copies: Vector,
    formula: Stencil,
    nu: float,
    *,
    upper_sample: Sample | None = None,
    lower_sample: Sample | None = None,
) -> Estimate:
    r"""Estimate :math:`\sum_j c_j [\,j\,\nabla_x f(x, y_j) + \nabla_x g(x, y_j)/\nu\,]`.

    The copies are :math:`y_j \approx \arg\min_y g + j\nu f`. By the envelope theorem
    :math:`\psi(s) = \frac{d}{dx} \min_y (s f + g) = s \nabla_x f + \nabla_x g` at the minimiser, and
    :math:`\psi'(0) = \nabla\Phi(x)`. This is a finite difference of :math:`\psi`, with error :math:`O(\nu^p)` for exact
    copies.

    Args:
        oracle: the losses; costs one lower and one upper gradient for each copy.
        copies: tensors with a leading dimension, one lane for each node of the formula.
        formula: nodes and weights, from `bilevel_optim.finite_difference.stencil`.
        nu: step of the finite difference.
        upper_sample: sample of f, shared by the copies. Default: the next one.
        lower_sample: sample of g, shared by the copies. Default: the next one.

    Returns:
        Estimate whose loss is f extrapolated to :math:`\nu = 0`, with error :math:`O(\nu^p)`. Its diagnostics are both
        losses at the copies, ``"lower"`` and ``"upper"``.
    """
    weights = [c.numerator / c.denominator for c in formula.weights]
    xi, zeta = upper_sample or oracle.f.draw(), lower_sample or oracle.g.draw()
    (lower, values), gradient = Copies(oracle, copies, few=True).upper_slope(
        ("lower", zeta, _summing_to_zero([c / nu for c in weights], coarsest((*oracle.x, *copies)))),
        ("upper", xi, [j * c for j, c in zip(formula.nodes, weights, strict=True)]),
    )
    hint = f"{DATA_FIRST}, and copies at negative nodes diverge, a smaller nu helps, or stencil='forward'"
    oracle.checks.finite("upper_grad", gradient, hint)
    interpolation = constant([w.numerator / w.denominator for w in formula.interpolation], values)
    used = interpolation != 0
    loss = torch.where(used, values * interpolation, 0.0).sum()
    oracle.checks.loss(loss, hint)
    return Estimate(loss, gradient, {"lower": lower, "upper": values})


def _summing_to_zero(weights: Sequence[float], precision: float) -> list[float]:
    """Round weights that sum to zero to multiples of one number, so that they do in this precision and in others.

    The largest takes up the rounding errors. (No tensors, which a trace would record.)
    """
    eps, top = min(precision, torch.finfo(torch.float32).eps), max(map(abs, weights))
    unit = math.ldexp(eps, math.frexp(top)[1] - 1)  # the last digit of the largest
    counts = [round(weight / unit) for weight in weights]
    if abs(sum(counts)) <= len(weights):
        counts[max(range(len(counts)), key=lambda i: abs(counts[i]))] -= sum(counts)
    return [count * unit for count in counts]

r"""Estimators of the hypergradient as plain functions of an `Oracle`, for research that wants only them.

With :math:`\Phi(x) = f(x, y^*(x))` and :math:`y^*(x) = \arg\min_y g(x, y)`,

.. math:: \nabla\Phi = \nabla_x f - \nabla^2_{xy} g\, [\nabla^2_{yy} g]^{-1} \nabla_y f \quad\text{at } (x, y^*(x)).

None of these functions has side effects: those that solve for y (`unrolled` and the zeroth-order ones) return it with
the estimate.

Example:
    >>> import torch, bilevel_optim as bo
    >>> from functools import partial
    >>> x, y = torch.tensor([3.0], requires_grad=True), torch.tensor([6.0], requires_grad=True)
    >>> oracle = bo.Oracle([x], [y], lambda: (y**2).sum() / 2, lambda: ((y - 2 * x) ** 2).sum())  # y*(x) = 2x
    >>> bo.hypergradient.implicit(oracle, partial(bo.linear.cg, steps=1)).gradient
    (tensor([12.]),)
"""

from ..solvers.contexts import Contexts, CoupledPath, coupled_path, level_probabilities
from .direct import direct
from .estimate import Estimate
from .implicit import implicit
from .multilevel import multilevel
from .penalty import penalty
from .stochastic import ImplicitSamples, stochastic_implicit
from .unrolled import unrolled
from .zeroth_order import full_zeroth_order, partial_zeroth_order

__all__ = [
    "Contexts",
    "CoupledPath",
    "Estimate",
    "ImplicitSamples",
    "coupled_path",
    "direct",
    "full_zeroth_order",
    "implicit",
    "level_probabilities",
    "multilevel",
    "partial_zeroth_order",
    "penalty",
    "stochastic_implicit",
    "unrolled",
]

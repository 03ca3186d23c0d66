r"""Estimators of the hypergradient as plain functions of an `Oracle`, for research that wants only them.

With :math:`\Phi(x) = f(x, y^*(x))` and :math:`y^*(x) = \arg\min_y g(x, y)`,

.. math:: \nabla\Phi = \nabla_x f - \nabla^2_{xy} g\, [\nabla^2_{yy} g]^{-1} \nabla_y f \quad\text{at } (x, y^*(x)).

None of these functions has side effects: those that solve for y (`unrolled` and the zeroth-order ones) return it with
the estimate. They take the lower steps as a `LowerRule`, made from an optimizer of torch, or as `Paths` of it from many
x, along random `Directions`.

Example:
    >>> import torch, bilevel_optim as bo
    >>> from functools import partial
    >>> x, y = torch.tensor([3.0], requires_grad=True), torch.tensor([6.0], requires_grad=True)
    >>> oracle = bo.Oracle([x], [y], lambda: (y**2).sum() / 2, lambda: ((y - 2 * x) ** 2).sum())  # y*(x) = 2x
    >>> bo.hypergradient.implicit(oracle, partial(bo.linear.cg, steps=1)).gradient
    (tensor([12.]),)
    >>> make = partial(bo.hypergradient.LowerRule, torch.optim.SGD, [{"params": [y], "lr": 0.25}])
    >>> bo.hypergradient.unrolled(oracle, make(oracle.y), steps=3).gradient  # 12 (1 - 0.5^3)
    (tensor([10.5000]),)
    >>> paths = bo.hypergradient.Paths(oracle, make, [oracle.g.draw() for _ in range(3)])
    >>> directions = bo.hypergradient.Directions(oracle.x, "rademacher", 1, seed=0, smoothing=0.5)
    >>> bo.hypergradient.partial_zeroth_order(oracle, paths, directions).gradient
    (tensor([10.5000]),)
"""

from ..solvers.contexts import Contexts, CoupledPath, coupled_path, level_probabilities
from ..solvers.lower import LowerRule
from ..solvers.paths import Paths
from .direct import direct
from .directions import Directions
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
    "Directions",
    "Estimate",
    "ImplicitSamples",
    "LowerRule",
    "Paths",
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

"""iMCN: inexact minimax cubic Newton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..optimizer.base import CommonOptions
from ..optimizer.declaration import MethodInfo
from ..optimizer.minimax import MinimaxOptimizer
from ..optimizer.step import StepInputs, Update, changed
from ..oracle.oracle import Oracle
from ..oracle.second_order import UpperSystem
from ..problem.parameters import Params, is_count, is_number, require
from ..problem.random import uniform_ball
from ..problem.vector import Vector
from ..solvers import linear
from ..solvers.agd import agd_or

__all__ = ["iMCN"]


class Model(NamedTuple):
    """The cubic model at one s: its decrease from 0, and its gradient."""

    decrease: Tensor
    gradient: Vector


class iMCN(MinimaxOptimizer):
    r"""Inexact minimax cubic Newton, the second-order baseline for minimax problems.

    .. math::
        y &\leftarrow \text{Nesterov ascent on } f(x, \cdot) \quad (\text{lower\_steps}), \qquad
             H = \nabla^2_{xx} f - \nabla^2_{xy} f\, [\nabla^2_{yy} f]^{-1} \nabla^2_{yx} f,\\
        s &\approx \arg\min_s\ m(s) = \nabla_x f^\top s + \tfrac12 s^\top H s + \tfrac{M}{6} \|s\|^3, \qquad
        x \leftarrow x + s.

    The model is minimised by ``cubic_steps`` gradient steps of size ``lr`` from the perturbed Cauchy point; the inverse
    is replaced by conjugate gradients.

    *When.* As a baseline with few outer steps, each of many Hessian-vector products. *Needs* second derivatives, strong
    concavity in y.

    *Cost per step*: ``lower_steps`` lower gradients, 1 upper gradient, (``cubic_steps`` + 2)(``linear_steps`` + 2)
    joint Hessian-vector products, each counted as one Hessian-vector and one cross product (fewer where CG is exact).
    *Draws*: one batch for each lower step, then one.

    ``.grad`` of x is set to -s / lr, so that a step of gradient descent makes the step s; after other uses of ``.grad``
    it is no longer this method.

    Args:
        upper: upper parameters x, which descend.
        lower: lower parameters y, which ascend.
        lr: step size in the minimisation of the model, below 2 / (largest eigenvalue of H).
        lower_lr: learning rate of the ascent steps.
        lower_steps: ascent steps per outer step.
        lower_momentum: as in `RAHGD`. Default: 0.
        cubic: M > 0, about the Lipschitz constant of H. Default: 1.
        cubic_steps: gradient steps on the model. Default: 10.
        linear_steps: most iterations of CG for one product with H. Default: 10.
        perturbation: radius of the perturbation of the Cauchy point. Default: 1e-3.
        tol: once the model decreases by less, it is minimised with ten times the steps, and the run ends:
            ``converged``, ``step`` does nothing. Costs a host synchronisation. Default: 0, never.
        warm_start, lower_optimizer, check_finite, generator, vectorize, process_group: see `BilevelOptimizer`.

    State: that of a ``lower_optimizer``, and ``initial`` y without warm starts. Attribute ``converged``.

    Raises:
        ValueError: for an argument out of its range, or ``hvp="finite-difference"``.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = iMCN([x], [y], lr=0.5, lower_lr=1.0, lower_steps=1, cubic=1e-3, cubic_steps=20)
        >>> for _ in range(2):  # max_y f = x^2, one Newton step
        ...     loss = optimizer.step(lambda: (x * y - y**2 / 2 + x**2 / 2).sum())
        >>> bool(x.abs() < 1e-2)
        True

    Source: Luo, Li, Chen (2022), arXiv:2110.04814.
    """


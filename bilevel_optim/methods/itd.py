"""ITD: iterative differentiation, backpropagation through the lower steps."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..hypergradient import Estimate, unrolled
from ..hypergradient.unrolled import through_start
from ..optimizer.base import BilevelOptimizer
from ..optimizer.declaration import MethodInfo
from ..optimizer.options import count, flag
from ..optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs, replace
from ..oracle import batched
from ..oracle.doors import OPTIONS, PROJECTION, START
from ..oracle.oracle import Oracle

__all__ = ["ITD"]


class ITD(BilevelOptimizer):
    r"""Iterative differentiation (ITD-BiO, reverse unrolling): the exact derivative of the lower steps.

    With :math:`y_T(x)` the result of ``lower_steps`` steps from a constant :math:`y_0`,

    .. math:: x \leftarrow x - \text{lr}\, \frac{d}{dx} f(x, y_T(x)),

    by the reverse recursion :math:`h \leftarrow h - \alpha \nabla^2_{xy} g(x, y_t)\, p`,
    :math:`p \leftarrow p - \alpha \nabla^2_{yy} g(x, y_t)\, p` from :math:`p = \nabla_y f`, :math:`h = \nabla_x f` (for
    plain gradient steps; momentum and adaptive steps are differentiated through their state as well).

    *When.* Few lower steps, or early stopping that is part of the problem (meta-learning): the derivative is exact for
    the steps actually made, convex or not. *Needs* second derivatives and memory that grows with ``lower_steps``: one
    graph per step, or one y per step with ``checkpoint=True``. Compared with :math:`\nabla\Phi`, its error decays like
    the lower error, :math:`(1 - \alpha\mu)^T`.

    *Cost per step*, T differentiated steps: ``lower_steps`` lower gradients (+ T with ``checkpoint``), T Hessian-vector
    and T cross products (one joint pass each), 1 upper gradient. *Draws*: one lower batch for each lower step, then one
    upper batch.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step.
        truncate: number of last lower steps to differentiate. Default: None, all of them.
        checkpoint: keep only the iterates, and rebuild the graphs one by one in the reverse sweep. Default: False.
        warm_start: start y at its last value. Default: True.
        lower_optimizer: as in `BilevelOptimizer`; a torch optimizer that supports ``differentiable=True`` (SGD with
            momentum or Nesterov, Adam, AdamW, RMSprop, Adagrad, Adamax, NAdam, RAdam, Adadelta, ASGD). Default: SGD.
        upper_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step,
            lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see `BilevelOptimizer`.
            ``hvp="finite-difference"`` implies ``checkpoint=True``.

    State: the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range, or a ``lower_optimizer`` that cannot be differentiated.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = ITD([x], [y], lr=0.5, lower_lr=0.5, lower_steps=2)
        >>> loss = optimizer.backward(lambda: y.square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> x.grad  # y_2 = 3/4 x, so f = (3/4 x)^2 / 2
        tensor([1.1250])

    Source: Ji, Yang, Liang (2021), arXiv:2010.07962 (ITD-BiO); Franceschi et al. (2017), arXiv:1703.01785; truncation:
    Shaban et al. (2019), arXiv:1810.10667.
    """

    declared = MethodInfo(
        paper="arXiv:2010.07962",
        family="unrolled",
        when="few lower steps, or early stopping that is part of the problem",
        cost="T lower (2 T with checkpoint), 1 upper, T hvp, T jvp",
        lower_optimizer="differentiable",
        doors=frozenset((PROJECTION, START, OPTIONS)),
    )

    truncate: int | None = count(default=None, optional=True)
    checkpoint: bool = flag(default=False)

    _joined: ClassVar = {"lower_residual": torch.linalg.vector_norm, "lower_growth": torch.amax}

    def _together(self, tasks: int) -> list[slice]:
        """Group the tasks that are evaluated at once; the graphs of one group are freed before the next."""
        return batched.slices(self._oracle_options.at_once(max(tasks, 1)), tasks)

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return one lower draw for each lower step, then an upper draw."""
        return [LOWER] * self.lower_steps + [UPPER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the lower steps and backpropagate through them."""
        rule, memory = inputs.solver_for(oracle.y)
        found = unrolled(oracle, rule, self.lower_steps, memory, truncate=self.truncate, checkpoint=self.checkpoint)
        if inputs.start is None or found.start is None:
            return found
        return replace(found, gradient=found.gradient + through_start(oracle, inputs.start, found.start))

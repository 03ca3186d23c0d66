"""PZOBO: partial zeroth-order-like bilevel optimisation."""

from __future__ import annotations

from ...hypergradient import Estimate, partial_zeroth_order
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import flag
from ...optimizer.step import StepInputs
from ...oracle.doors import DOORS
from ...oracle.oracle import Oracle
from .base import ZerothOrder

__all__ = ["PZOBO"]


class PZOBO(ZerothOrder):
    r"""Partial zeroth-order-like bilevel optimiser (PZOBO, PZOBO-S): Hessian-free, only lower solves from nearby x.

    With :math:`y_N(x)` the result of N = ``lower_steps`` steps from :math:`y_0`, and random directions :math:`u_j`,

    .. math::
        \delta_j &= (y_N(x + \mu u_j) - y_N(x)) / \mu,\\
        h &= \nabla_x f(x, y_N) + \frac1Q \sum_{j=1}^Q \langle \delta_j, \nabla_y f(x, y_N)\rangle\, u_j,\\
        x &\leftarrow x - \text{lr}\; h .

    The direct term is exact, and only the response of the lower solve is estimated. With data (an `Objective`) this is
    PZOBO-S: all paths of a step see the same batches in the same order, with the same dropout masks, so that batch
    noise cancels in the differences.

    *When.* A lower solver that cannot be differentiated (``recipes.black_box``) and few upper parameters (up to about
    10), with ``direction="orthogonal"`` and a multiple of their number of ``directions``. Or upper parameters through
    which a backward pass for each lower step is too expensive, such as a backbone with a head that adapts: pass the
    head's input as ``features`` of the `Objective`, and it is computed once per path. *Needs* first derivatives of g
    in y only. Its indirect term has relative variance (p + 1)/Q in p upper dimensions (p - 1 for ``"sphere"`` and
    ``"rademacher"``), which does *not* fall near a stationary point: with few directions in many dimensions it is all
    noise, and a warning says so. Compare with `FirstOrder`, to see whether the indirect term contributes.

    *Cost per step*: N (Q + 1) lower gradients (N (2Q + 1) for central differences), 1 upper gradient. *Memory*: the
    paths that run together (``vectorize``), whatever the number of directions, which are regenerated from their seed
    entry by entry and never stored. *Draws*: one seed from ``generator``; N lower batches, each shared by all paths;
    then one upper batch.

    The live y is set to the end of the unperturbed path. Module buffers (running statistics) advance once per step, on
    that path.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: N, the lower steps of every path.
        directions: Q, random directions per step. Default: 8.
        smoothing: :math:`\mu > 0`, the step of a difference. For a smooth response the bias is
            :math:`O(\mu^2)`; the rounding error grows as :math:`1/\mu`. Default: 1e-2.
        smoothing_mode: ``"absolute"``, in units of x, or ``"relative"``, in units of the root mean square of each
            tensor, :math:`D_l`. The more these differ, the noisier is the second: for derivatives of similar size, p in
            the variance becomes p times the mean of :math:`D^2` times that of :math:`D^{-2}` over the entries of x.
            Default: ``"absolute"``.
        direction: distribution of :math:`u_j`. ``"gaussian"``, as in the paper; ``"sphere"``, uniform of norm
            :math:`\sqrt p`; ``"rademacher"``, entries of 1 and -1; ``"orthogonal"``, exact for a linear response when Q
            is a multiple of p; ``"block_sphere"``, each tensor uniform of norm 1. Default: ``"gaussian"``.
        scale: ``"unbiased"``; ``"none"``, no dimension factor for ``"block_sphere"``; or a number, a multiple of the
            unbiased one. The authors' public code uses ``direction="block_sphere", scale="none"``: it damps the
            indirect term of a tensor of :math:`p_l` entries by :math:`1/p_l`, which for networks leaves the direct
            gradient. Default: ``"unbiased"``.
        difference: ``"forward"``, or ``"central"``: both sides, for twice the paths. Default: ``"forward"``.
        over_ranks: how the ranks of ``process_group`` divide the work. ``"data"``: each has a part of the data, and all
            follow every path together, exchanging gradients at each of its steps. ``"directions"``: all have the same
            data and random numbers, and each follows the unperturbed path and the paths of its part of the directions
            by itself; a step exchanges one vector like x and a few numbers for each direction. With ``tasks``, the
            ranks divide the tasks instead. Default: ``"data"``.
        warm_start: start each lower solve at the end of the last unperturbed path. Default: False, as in the paper.
        share_directions_across_tasks: with tasks, one set of directions for all of them, as in the paper; otherwise
            each task has its own, which has less variance. Default: True.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.
            Each path has its own optimizer state, which is reset at every step; the optimizer must treat each entry
            independently (SGD, Adam; not LBFGS). ``vectorize`` applies to the paths: True, all stacked, but at most
            :math:`2^{22}` entries of x and y at a time; a number, chunks of that many; False, one after another.

    *Departures from the paper*, the largest first. The default is 8 directions; the paper uses one in all its
    experiments, so that its indirect term has a relative variance of p + 1. Its experiments move x by Adam
    (``upper_optimizer``); its theory has plain steps, as here. Its public code computes a different estimate from its
    text (``scale``), warm-starts some runs, and makes the lower steps with momentum or Adam. The settings of the text
    and of the code:

        >>> TEXT = {"directions": 1, "direction": "gaussian", "smoothing": 1e-2, "warm_start": False}
        >>> CODE = {"directions": 1, "direction": "block_sphere", "scale": "none", "smoothing": 1e-2}
        >>> import torch
        >>> x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
        >>> optimizer = PZOBO([x], [y], lr=0.1, lower_steps=20, **TEXT)

    State: ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(2, requires_grad=True)
        >>> optimizer = PZOBO([x], [y], lr=0.1, lower_steps=20, directions=2, direction="orthogonal")
        >>> loss = optimizer.backward(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> x.grad.round(decimals=3) + 0.0  # y*(x) = x, so the hypergradient is x - 1
        tensor([0., 1.])

    Source: Sow, Ji, Liang (2022), arXiv:2110.07004.
    """

    declared = MethodInfo(
        paper="arXiv:2110.07004",
        family="zeroth-order",
        when="lower solvers that cannot be differentiated; few upper parameters",
        cost="T (Q + 1) lower, 1 upper; Q = directions, 2 Q with central differences",
        second_order=False,
        random=True,
        copies=True,
        lower_optimizer="elementwise",
        doors=DOORS,
        difference_step="smoothing",
    )

    share_directions_across_tasks: bool = flag(default=True)

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return differences between the paths from perturbed x."""
        return self._estimate_on_paths(oracle, inputs, partial_zeroth_order)

    def _together(self, tasks: int) -> list[slice]:
        """Group all tasks if they share their directions; otherwise put each in a group of its own."""
        if self.share_directions_across_tasks:
            return super()._together(tasks)
        return [slice(i, i + 1) for i in range(tasks)]

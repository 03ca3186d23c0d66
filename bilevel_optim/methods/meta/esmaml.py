"""ES-MAML: meta-learning an initial point by evolution strategies."""

from __future__ import annotations

from ...hypergradient import Estimate, full_zeroth_order
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import choice, count, fixed, number
from ...optimizer.step import StepInputs
from ...oracle.doors import DOORS
from ...oracle.oracle import Oracle
from ...oracle.smoothed import Smoothed
from ...problem.objective import Loss, Objective
from ..zeroth_order.base import ZerothOrder
from .maml import Initialised

__all__ = ["ESMAML"]


class ESMAML(Initialised, ZerothOrder):
    r"""Evolution-strategies MAML: a zeroth-order gradient, in the initial point, of the loss after adaptation.

    Let :math:`\Phi_N(x) = f(x, y_N(x))`, with :math:`y_N(x)` the result of N = ``lower_steps`` steps on g that start at
    y = x (adaptation; as for `MAML`, the *last* upper parameters are that initial point). With antithetic pairs of
    directions,

    .. math::
        h = \frac1Q \sum_{j=1}^Q \frac{\Phi_N(x + \sigma u_j) - \Phi_N(x - \sigma u_j)}{2\sigma}\, u_j, \qquad
        x \leftarrow x - \text{lr}\; h .

    With ``lower_directions`` R, the adaptation steps use evolution strategies too: in place of :math:`\nabla_y g` they
    take

    .. math::
        \frac1R \sum_{k=1}^R \frac{g(x, y + \tau v_k) - g(x, y - \tau v_k)}{2\tau}\, v_k, \qquad
        v_k \sim \mathcal N(0, I),

    whose mean is the gradient of :math:`g_\tau = \mathbb E\, g(x, y + \tau v)`; its relative variance is (p + 1)/R.
    Every step and task has its own directions, which all paths share. ``adapt`` makes such steps as well.

    *When.* MAML without any derivative through the adaptation or of the upper loss; with ``lower_directions`` without
    any derivative at all. *Needs* values of f and first derivatives of g in y, or values of g. Its relative variance is
    (p + 1)/Q in p dimensions, so use it for small models.

    *Cost per step*: N (2Q + 1) lower gradients, each made from 2R values of g with ``lower_directions``, and 2Q + 1
    values of f. *Draws*, memory, buffers: as `PZOBO`; :math:`v_k` are torch's random numbers, like those of dropout, so
    that ``compile`` leaves such steps uncompiled. Without tasks the live y is set to the adapted :math:`y_N(x)`; with
    tasks it does not change.

    Args:
        upper: upper parameters; the last of them are copies of the lower parameters, which start from them.
        lower: lower parameters, those of the model that the losses evaluate.
        lr: learning rate of x.
        lower_lr: learning rate of the adaptation steps.
        lower_steps: N, adaptation steps.
        directions: Q, pairs of directions per step. Default: 8.
        smoothing: :math:`\sigma > 0`. Default: 1e-2.
        smoothing_mode, direction, scale: as for `PZOBO`.
        difference: ``"central"``, antithetic pairs, or ``"forward"``, against the unperturbed point, for half the
            paths. Default: ``"central"``.
        over_ranks: as for `PZOBO`. Default: ``"data"``.
        lower_directions: R, pairs of directions of each adaptation step; 0 takes derivatives. Default: 0.
        lower_smoothing: :math:`\tau > 0`. Default: 1e-2.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, lower_clip, lower_projection: see `BilevelOptimizer`
            and `PZOBO`.

    State: ``initial`` y.

    Raises:
        ValueError: for an argument out of its range, or at the first step if the shapes do not fit.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(2, requires_grad=True)
        >>> optimizer = ESMAML([x], [y], lr=0.1, lower_lr=0.5, lower_steps=1, directions=2, direction="orthogonal")
        >>> loss = optimizer.backward(lambda: y.square().sum() / 2, lambda: (y - 4).square().sum() / 2)
        >>> x.grad.round(decimals=3)  # y = x / 2 + 2, so the gradient is y / 2
        tensor([1.2500, 1.5000])

    Source: Song et al. (2020), arXiv:1910.01215.
    """

    declared = MethodInfo(
        paper="arXiv:1910.01215",
        family="meta",
        when="MAML without a derivative through the adaptation or of the upper loss; small models",
        cost="T (2 Q + 1) lower, 2 Q + 1 losses; Q = directions",
        initial=True,
        second_order=False,
        random=True,
        copies=True,
        lower_optimizer="elementwise",
        doors=DOORS,
        difference_step="smoothing",
    )

    difference: str = choice("forward", "central", default="central")
    warm_start: bool = fixed(default=False)
    lower_directions: int = count(default=0)
    lower_smoothing: float = number(default=1e-2, above=0)

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return differences of the loss after paths that start at the perturbed initial point."""
        self._learned_start(oracle)
        oracle.session.note_reached(oracle.x)  # where the paths start
        estimate, spent = (
            self._estimate_on_paths(oracle, inputs, full_zeroth_order, from_upper=self._start_places()),
            oracle.session.counts,
        )
        if self.lower_directions:
            spent["loss"] += 2 * self.lower_directions * spent["lower_grad"]
            spent["lower_grad"] = 0
        return estimate

    @property
    def _derivatives(self) -> frozenset[str]:
        return super()._derivatives - ({"lower y"} if self.lower_directions else set())

    def _objectives(self, upper: Loss | None, lower: Loss | None) -> tuple[Objective, Objective]:
        """Return the objectives; with ``lower_directions``, the lower gradient is estimated from values."""
        f, g = super()._objectives(upper, lower)
        if not self.lower_directions:
            return f, g
        live, count, smoothing = self.parameters("lower"), self.lower_directions, self.lower_smoothing
        return f, g.wrapped(lambda loss: Smoothed(loss, live, directions=count, smoothing=smoothing))

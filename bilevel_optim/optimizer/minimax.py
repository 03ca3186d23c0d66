r"""Minimax problems :math:`\min_x \max_y f(x, y)`: the bilevel problem with g = -f, and one loss."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..oracle.oracle import Oracle
from ..problem.objective import Objective, Sample
from ..problem.parameters import Params, require
from .base import BilevelOptimizer, CommonOptions, Loss, as_objective
from .declaration import Method, counts

__all__ = ["GDA", "MinimaxOptimizer", "danskin", "negated", "opposite"]


class MinimaxOptimizer(BilevelOptimizer):
    """Base class of the methods for one loss that x descends and y ascends; else a `BilevelOptimizer`.

    To the parts of the library it is a pair of losses, f and -f, whose samples come out of one stream of data.
    """

    def step(self, loss: Loss | None = None) -> Tensor | None:  # type: ignore[override]
        """One outer iteration: improve y, estimate the gradient in x, update x.

        Args:
            loss: f, a callable or an `Objective`. Left out: only the update of x is made, from the ``.grad`` that
                :meth:`backward` has set.

        Returns:
            The loss at the point where the gradient was estimated, detached; None without a loss.

        Raises:
            NonFiniteError: if an oracle returned NaN or infinity; nothing has changed then.
            ValueError: at the first step, if the loss is not a scalar or does not depend on the parameters.
        """
        if self._finished():
            return None if loss is None else self._last_loss
        result = None if loss is None else self.backward(loss)
        self._update()
        return result

    def backward(self, loss: Loss) -> Tensor:  # type: ignore[override]
        """Improve y, and set ``.grad`` of the upper parameters to the estimate of the gradient of max_y f(x, y).

        Arguments, result and errors as for :meth:`step`.
        """
        objective = as_objective(loss, "minimax")
        return super().backward(objective, _Negated(objective))


class GDA(MinimaxOptimizer):
    r"""Gradient descent ascent, the baseline for minimax problems.

    .. math:: x \leftarrow x - \text{lr}\, \nabla_x f(x, y), \qquad y \leftarrow y + \alpha \nabla_y f(x, y),

    both from the same evaluation. More ``lower_steps`` make the others before it, at the old x;
    ``simultaneous=False`` evaluates the gradient in x after all of them (multi-step GDA, GDmax for many).

    *When.* As the simplest method. *Needs* ``lr`` much smaller than ``lower_lr`` (about :math:`\kappa^2` times).

    *Cost per step*: 1 upper gradient, which has both partial derivatives, and ``lower_steps`` - 1 lower gradients (all
    ``lower_steps`` if not simultaneous). *Draws*: one batch for each lower step but the last, then one for the last
    lower step and x (one more if not simultaneous).

    Args:
        upper: upper parameters x, which descend.
        lower: lower parameters y, which ascend.
        lr: learning rate of x.
        lower_lr: learning rate of y.
        lower_steps: ascent steps per step of x. Default: 1.
        simultaneous: the last ascent step and the step of x share one evaluation. Default: True.
        warm_start, lower_optimizer, check_finite, generator, vectorize, hvp, process_group: see `BilevelOptimizer`.

    State: the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = GDA([x], [y], lr=0.1, lower_lr=0.5)
        >>> for _ in range(100):  # f = x y - y^2/2 + x^2/2, saddle point (0, 0)
        ...     loss = optimizer.step(lambda: (x * y - y**2 / 2 + x**2 / 2).sum())
        >>> bool(x.abs() < 1e-3), bool(y.abs() < 1e-3)
        (True, True)

    Source: Lin, Jin, Jordan (2020), arXiv:1906.00331.
    """

    declared = Method(
        paper="arXiv:1906.00331",
        family="minimax",
        when="the simplest method, with lr much smaller than lower_lr: the baseline",
        cost="T - 1 lower, 1 upper; T lower if not simultaneous",
        calls=lambda o, k: counts(upper=1, lower=max(o.lower_steps - o.simultaneous, 0)),
        second_order=False,
        losses=1,
        tasks="none",
        variants={"alternating": {"simultaneous": False}},
        settings={"quadratic": {}, "quadratic/alternating": {}},
        elsewhere=dict.fromkeys(("compare", "stochastic"), "minimax, one loss (recipes.saddle_escape)"),
    )

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float,
        lower_lr: float,
        lower_steps: int = 1,
        simultaneous: bool = True,
        **common: Unpack[CommonOptions],
    ) -> None:
        require("simultaneous", simultaneous, isinstance(simultaneous, bool))
        self.simultaneous = simultaneous
        super().__init__(upper, lower, lr=lr, lower_lr=lower_lr, lower_steps=lower_steps, **common)

    def _estimate(self, oracle: Oracle) -> Estimate:
        if not self.simultaneous or self.lower_steps == 0:
            self._descend(oracle)
            return danskin(oracle)
        solver = self._ready_solver(oracle)
        found: list[Estimate] = []
        for k in range(self.lower_steps - 1, -1, -1):
            if k:
                sample = oracle.g.draw(once=solver.evaluates_once)
                solver.step(lambda sample=sample: oracle.lower(sample))  # type: ignore[misc]
                continue
            sample = oracle.f.draw(once=solver.evaluates_once)

            def both(sample: Sample = sample) -> tuple[Tensor, torch.Tensor]:
                loss, grad_x, grad_y = oracle.upper(sample)
                oracle.require_reached(grad_y)
                found[:] = found or [Estimate(loss, grad_x, {"lower_residual": grad_y.norm()})]
                return -loss, -grad_y  # type: ignore[return-value]

            solver.step(both)  # type: ignore[arg-type]
        oracle.checks.finite("lower_grad", oracle.y)
        return found[0]


def danskin(oracle: Oracle) -> Estimate:
    """The gradient of f in x at the present y, which is that of max_y f(x, y) if y is the maximiser."""
    loss, grad_x, grad_y = oracle.upper(oracle.f.draw(once=True))
    return Estimate(loss, grad_x, {"lower_residual": grad_y.norm()})


def negated(sample: Sample) -> Sample:
    """A sample of -f: the same batch, the same random numbers."""
    return _NegatedSample(sample)


class _NegatedSample(Sample):
    __slots__ = ("_sample",)

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample.loss, sample.arguments, once=sample.once)
        self.features, self._sample = sample.features, sample

    def __call__(self, *arguments: Any) -> Any:
        loss = self._sample(*arguments)
        return -loss if isinstance(loss, Tensor) else loss

    @contextmanager
    def replayed(self, device: torch.device) -> Generator[None]:
        with self._sample.replayed(device):
            yield


def opposite(loss: Loss) -> Objective:
    """-f as an objective of its own, which draws from the data itself."""
    objective = as_objective(loss, "minimax")
    return Objective(lambda *batch: -objective.loss(*batch), objective.data, features=objective.features)


class _Negated(Objective):
    """-f, drawn from the same data as f."""

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective.loss, objective.data)
        self._objective = objective

    def draw(self, *, once: bool = False) -> Sample:
        return negated(self._objective.draw(once=once))

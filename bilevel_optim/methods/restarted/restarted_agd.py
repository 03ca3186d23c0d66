"""RestartedAGD: restarted Nesterov descent for ordinary (single-level) nonconvex problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...distributed.ranks import Ranks
from ...optimizer.checkpoint import own_attributes
from ...optimizer.options import is_generator
from ...optimizer.transaction import UPPER_SOLVER, Transaction, carry_over, recalled, remember
from ...oracle.point import in_place, none_to_zeros
from ...problem.parameters import is_number, require, require_rates
from ...problem.vector import Vector
from .restart import Momentum, Position, Restarted, iteration_property

__all__ = ["RestartedAGD"]


class RestartedAGD(Restarted):
    r"""Restarted accelerated gradient descent: an ordinary ``torch.optim`` optimizer, the upper part of `RAHGD`.

    .. math:: w = x + (1 - \theta)(x - x_{\text{prev}}), \qquad
              x_{\text{prev}},\, x \leftarrow x,\ w - \text{lr}\,\nabla\Phi(w)

    After k steps of an epoch with :math:`k \sum_{i<k} \|x_{i+1} - x_i\|^2 > B^2` the momentum is dropped (and x
    perturbed, if requested). An epoch of K steps ends the run.

    *When.* Smooth, deterministic, nonconvex objectives. *Needs* a closure, because the gradient is evaluated at w.

    *Cost per step*: one closure, one host synchronisation; four tensors of the size of x.

    Args:
        params: parameters, or groups of them, as ``torch.optim`` takes.
        lr: learning rate, up to 1/L. Default: 1e-3.
        momentum: :math:`1 - \theta` in [0, 1). Default: 0.9.
        restart_radius: B > 0, in units of x; ``math.inf`` for never. Default: None, 5 times the length of the first
            step (and at least 50 times ``perturbation``).
        restart_period: K >= 1. Default: 100.
        perturbation: radius of the ball from which x is perturbed when an epoch begins. Default: 0.
        perturb_initial: perturb the initial point too. Default: True.
        on_converged: ``"stop"``: once ``converged``, ``step`` does nothing and returns the last loss; ``"continue"``.
            Default: ``"stop"``.
        generator: source of the perturbations. Default: torch's default one.

    State: ``previous``, ``sum``, ``candidate``, ``average`` (and ``perturbation`` until the first update). Attributes
    ``converged``, ``restarts``, ``epoch_step``.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> x = torch.tensor([2.0, 1.0], requires_grad=True)
        >>> optimizer = RestartedAGD([x], lr=0.05)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = (torch.tensor([1.0, 20.0]) * x**2).sum() / 2
        ...     loss.backward()
        ...     return loss
        >>> while not optimizer.converged:
        ...     loss = optimizer.step(closure)
        >>> bool(x.norm() < 0.05)
        True

    Source: Li, Lin (2022), arXiv:2201.11411; arXiv:2307.00126.
    """

    perturbation, perturb_initial = iteration_property("perturbation"), iteration_property("perturb_initial")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        restart_radius: float | None = None,
        restart_period: int = 100,
        *,
        perturbation: float = 0.0,
        perturb_initial: bool = True,
        on_converged: str = "stop",
        generator: torch.Generator | None = None,
    ) -> None:
        require("learning rate", lr, is_number(lr) and 0 <= lr < math.inf, wording="Invalid learning rate: {value}")
        is_generator("generator", generator)
        self._follow(Momentum(momentum, restart_radius, restart_period, on_converged, perturbation, perturb_initial))
        self.generator = generator
        self._last_loss: Tensor | None = None
        self._trained: list[bool] | None = None
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; ``closure`` clears the gradients, computes them at the current values, and returns the loss.

        Returns:
            The loss at the look-ahead point; the last one once the run has finished.

        Raises:
            RuntimeError: without a closure.
        """
        if closure is None:
            raise RuntimeError(
                "RestartedAGD needs a closure, because it evaluates the gradient at the look-ahead point: call "
                "step(closure), as with torch.optim.LBFGS"
            )
        if self._finished():
            return self._last_loss
        groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in self.param_groups]
        live = Vector(p for group in groups for p in group["params"])
        require_rates(groups)
        levels = [("upper", p) for group in self.param_groups for p in group["params"]]
        trained = [p.requires_grad for _, p in levels]
        if self._trained is not None and trained != self._trained:
            carry_over(self.state, levels, self._trained)
        with Transaction(self.generator) as transaction:
            return self._moved(groups, live, closure, transaction, trained)

    def _moved(
        self,
        groups: list[dict[str, Any]],
        live: Vector,
        closure: Callable[[], Any],
        transaction: Transaction,
        trained: list[bool],
    ) -> Any:
        memory = recalled(self.state, live, UPPER_SOLVER).memory
        here = Position(live.detach(), memory, self.numbers, groups, self.generator, Ranks())
        ahead = self._iteration.look_ahead(here)
        with in_place([live], [ahead.point]), torch.enable_grad():
            loss = closure()
        entries: dict[str, Any] = {
            "_last_loss": loss.detach() if isinstance(loss, Tensor) else loss,
            "_trained": trained,
        }
        writes: list[Callable[[], object]] = []
        if any(p.grad is not None for p in live):
            there = replace(here, memory={**here.memory, **ahead.memory}, numbers=ahead.progress.numbers)
            gradient = none_to_zeros([None if p.grad is None else p.grad.detach() for p in live], live.detach())
            update = self._iteration.update(there, gradient)
            writes = [partial(remember, self.state, live, update.upper_memory), partial(live.copy_, update.x)]
            entries["numbers"] = update.numbers
        transaction.commit([*writes, partial(vars(self).update, entries)])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch, with a key ``"restarts"`` for state that belongs to no single parameter."""
        state: dict[str, Any] = super().state_dict()
        generator = None if self.generator is None else self.generator.get_state()
        own = {"loss": self._last_loss, "generator": generator, "trained": self._trained}
        state["restarts"] = {"numbers": dict(self.numbers), **own}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict` into an optimizer made with the same arguments."""
        if "restarts" not in state_dict:
            raise ValueError(
                "the state dict is not that of a RestartedAGD: it has no 'restarts' entry; load the output of "
                "state_dict() of a RestartedAGD"
            )
        super().load_state_dict(state_dict)
        own = state_dict["restarts"]
        self.numbers, self._last_loss, self._trained = dict(own["numbers"]), own["loss"], own.get("trained")
        if own["generator"] is not None and self.generator is not None:
            self.generator.set_state(own["generator"].cpu())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **own_attributes(vars(self))}

"""The output of the convergence theorems: one of the iterates, drawn uniformly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem.random import draw_index
from .base import BilevelOptimizer

__all__ = ["UniformIterate"]


class UniformIterate:
    r"""One of the upper iterates of a run, drawn uniformly, as in the theorems for stochastic methods.

    .. math:: \hat x \sim \text{Uniform}\{x_1, \dots, x_T\}

    It is drawn during the run, without knowing T: the t-th iterate replaces the current choice with probability 1/t.
    *When.* To follow a theorem; in practice the last iterate, or a mean of the last ones, is better. It follows
    ``step`` and ``run`` of the optimizer, not the steps of another optimizer after ``backward``.

    Args:
        optimizer: optimizer to follow from now on. The current x is the first iterate.
        generator: source of the draws. Default: torch's default generator.

    Example:
        >>> from bilevel_optim import FirstOrder
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = FirstOrder([x], [y], lr=0.1, lower_steps=1)
        >>> output = UniformIterate(optimizer, torch.Generator().manual_seed(0))
        >>> for _ in range(9):
        ...     loss = optimizer.step(lambda: -x.sum() + y.sum(), lambda: (y - x).square().sum() / 2)
        >>> output.count, bool(0 <= output.values[0] <= x)
        (10, True)

    Source: for example arXiv:2310.18535, algorithm 2.
    """

    def __init__(self, optimizer: BilevelOptimizer, generator: torch.Generator | None = None) -> None:
        self.generator, self.count = generator, 0
        self.values: list[Tensor] = []
        self._follow(optimizer)
        optimizer.register_step_post_hook(self._follow)

    @torch.no_grad()
    def _follow(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.count += 1
        if draw_index(self.count, self.generator) == 0:
            upper = [p for group in optimizer.param_groups if group["level"] == "upper" for p in group["params"]]
            self.values = [p.detach().clone() for p in upper]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of iterates and the current choice; the generator's state is saved by the caller."""
        return {"count": self.count, "values": [v.clone() for v in self.values]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state_dict`."""
        self.count, self.values = int(state["count"]), [v.clone() for v in state["values"]]

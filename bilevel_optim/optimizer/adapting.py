"""The lower problem alone, for a new task: using what was learned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Never

from torch import Tensor

from ..oracle.advance import advance_buffers
from ..oracle.oracle import Oracle
from ..problem.objective import Objective
from ..problem.parameters import is_count, level_groups, require
from ..problem.vector import Vector
from ..solvers.lower import LowerRules
from .method import Loss, StepFunctions, as_objective
from .run_state import RunState

__all__ = ["Adapting"]


class Adapting(StepFunctions):
    """The solution of one more lower problem."""

    param_groups: list[dict[str, Any]]
    _rules: LowerRules
    _run_state: RunState

    @abstractmethod
    def oracle(self, upper: Loss | None, lower: Loss | None = None) -> Oracle:
        """The two losses at the present point."""

    def learned_start(self, oracle: Oracle) -> Vector:
        """Where the lower parameters of a new task start: what they hold, unless the start is learned itself."""
        return oracle.y

    def adapt(
        self,
        lower: Loss,
        batch: Any = None,
        *,
        steps: int | None = None,
        start: Sequence[Tensor] | None = None,
        write: bool = False,
    ) -> Vector:
        """Lower parameters for a new task: lower steps on its data, at the present x.

        The steps are those of training, by the same optimizer with a fresh state; no hypergradient is made, and the
        counts, the state and the upper parameters stay as they are. Every process adapts by itself.

        Args:
            lower: the lower loss of the task, as for ``step``. (A minimax method takes its loss, which y ascends.)
            batch: what the loss is called with at every step. Default: None, nothing, or the data of an `Objective`.
            steps: how many. Default: ``lower_steps``; has to be given for a method that has none.
            start: where y starts. Default: the learned start of `MAML` and its kin, else what the live y holds.
            write: leave the result, and module buffers, in the live tensors, so that the model is the task's; a later
                ``step`` starts there. Otherwise they are as before.

        Returns:
            The tensors of y, in the order of the lower parameters.

        Raises:
            NonFiniteError: if the steps diverge.
            ValueError: for an argument out of its range.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> start, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = bo.MAML([start], [y], lr=0.1, lower_lr=0.5, lower_steps=2)
            >>> optimizer.adapt(lambda target: (y - target).square().sum() / 2, torch.tensor([6.0])), y.item()
            ((tensor([5.]),), 0.0)
        """
        declared = getattr(self, "declared", None)
        if steps is None and declared is not None and not declared.lower_steps:
            raise ValueError(f"{type(self).__name__} has no lower_steps: adapt(..., steps=...) must say how many")
        steps = self.lower_steps if steps is None else steps
        require("steps", steps, is_count(steps))
        task = as_objective(lower, "lower")
        if batch is not None:
            if task.data is not None:
                raise ValueError("Invalid batch: the Objective has data of its own")
            task = Objective(task.loss, [batch], features=task.features)
        oracle = self.oracle(task) if self.one_loss else self.oracle(_no_upper_loss, task)
        oracle.shared = False
        with nullcontext() if write else self._run_state.buffers.kept():
            found = self._adapted(oracle, Vector(self.learned_start(oracle) if start is None else start), steps)
        if write:
            advance_buffers(oracle, found)
            oracle.live_y.copy_(found)
        return found

    def _adapted(self, oracle: Oracle, start: Vector, steps: int) -> Vector:
        if [t.shape for t in start] != [t.shape for t in oracle.y]:
            raise ValueError(
                f"Invalid start: the lower parameters have shapes {[tuple(t.shape) for t in oracle.y]}, but it has "
                f"{[tuple(t.shape) for t in start]}"
            )
        start = start.detach().clone()
        rule = self._rules(level_groups(self.param_groups, "lower"), start)

        def draw() -> Callable[[Vector], tuple[Tensor, Vector]]:
            sample = oracle.g.draw(once=rule.evaluates_once)
            return lambda y: oracle.at(lower=y).lower(sample)

        found = rule.run(start, rule.fresh(), steps, draw).y
        if self.check_finite:
            oracle.checks.finite("lower_grad", found)
            oracle.checks.verify(self._run_state.steps, set())
        return found


def _no_upper_loss() -> Never:
    raise AssertionError("adaptation evaluates the lower loss only")

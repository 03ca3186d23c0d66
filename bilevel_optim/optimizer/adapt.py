"""Adaptation to a new task: the lower problem alone, at the learned x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

from torch import Tensor

from ..oracle.lanes import stacked
from ..oracle.oracle import Oracle
from ..problem.objective import Loss, Objective, as_objective
from ..problem.vector import Vector
from ..pytree import tree_leaves
from ..solvers.lower import LowerRule

__all__ = ["lower_solution", "no_upper_loss", "objective_of", "require_start", "stack_tasks"]


def objective_of(lower: Loss, batch: Any) -> Objective:
    """Return the lower objective of a task, called with the batch, if any, at every step."""
    task = as_objective(lower, "lower")
    if batch is None:
        return task
    if task.data is not None:
        raise ValueError(
            "Invalid batch: the Objective has data of its own, so there are two sources of batches; leave out batch, "
            "or pass the loss function in place of the Objective"
        )
    return Objective(task.loss, [batch], features=task.features)


def stack_tasks(oracle: Oracle, start: Vector, batches: Any) -> tuple[Oracle, Vector]:
    """Return one oracle for the lower problems of several tasks, and the stacked start.

    Args:
        oracle: oracle of one task's plain lower loss.
        start: tensors shaped like y, shared by all tasks, or with a leading dimension for the tasks.
        batches: data of the tasks: a pytree of tensors with a leading dimension for the tasks.
    """
    leaves = [t for t in tree_leaves(batches) if isinstance(t, Tensor)]
    sizes = {len(t) if t.dim() else 0 for t in leaves}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "Invalid tasks: they should be tensors (or lists, dicts of tensors) with the same number of tasks as their "
            f"first dimension, but the shapes are {[tuple(t.shape) for t in leaves]}; stack the batches of the "
            "tasks with torch.stack"
        )
    (n,) = sizes
    alone, rows = [t.shape for t in oracle.y], [(n, *t.shape) for t in oracle.y]
    if len(start) != len(alone) or any(t.shape not in shapes for t, *shapes in zip(start, alone, rows, strict=True)):
        raise ValueError(
            f"Invalid start: the lower parameters have shapes {[*map(tuple, alone)]}, and there are {n} tasks, but "
            f"start has {[tuple(t.shape) for t in start]}; pass one tensor for each lower parameter, of its shape or "
            "with one row for each task"
        )
    starts = Vector(s.detach().to(y).expand(n, *y.shape) for s, y in zip(start, oracle.y, strict=True))
    return stacked(oracle, starts, lambda _: batches), starts


def require_start(start: Vector, oracle: Oracle) -> None:
    """Raise if the initial values do not have the shapes of the lower parameters."""
    if [t.shape for t in start] != [t.shape for t in oracle.y]:
        raise ValueError(
            f"Invalid start: the lower parameters have shapes {[tuple(t.shape) for t in oracle.y]}, but start has "
            f"{[tuple(t.shape) for t in start]}; pass one tensor of the same shape for each lower parameter"
        )


def lower_solution(
    oracle: Oracle, start: Vector, steps: int, rule_for: Callable[[Vector], LowerRule], *, check_finite: bool, at: int
) -> Vector:
    """Return y after lower steps from a start, with a fresh state; ``at`` is the outer step that errors name."""
    start = start.detach().clone()
    rule = rule_for(start)

    def draw() -> Callable[[Vector], tuple[Tensor, Vector]]:
        sample = oracle.g.draw(once=rule.evaluates_once)
        return lambda y: oracle.at(lower=y).lower(sample)

    found = rule.run(start, rule.fresh(), steps, draw).y
    if check_finite:
        oracle.checks.finite("lower_grad", found)
        oracle.checks.verify(at, set())
    return found


def no_upper_loss() -> Never:
    """Placeholder for the upper loss, which adaptation does not evaluate."""
    raise AssertionError("adaptation evaluates the lower loss only")

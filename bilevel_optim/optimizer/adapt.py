"""Adaptation to a new task: the lower problem alone, at the learned x."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ..oracle.lanes import stacked
from ..oracle.oracle import Oracle
from ..problem.objective import Loss, Objective, as_objective
from ..problem.parameters import is_count, require
from ..problem.vector import Vector
from ..pytree import tree_leaves

__all__ = ["beginning", "number_of_steps", "objective_of", "require_tasks_alone"]


def number_of_steps(steps: int | None, usual: int | None, method: str) -> int:
    """Return the number of lower steps; ``usual`` is the method's own, if it has one."""
    if steps is None and usual is None:
        raise ValueError(
            f"{method} has no lower_steps, so adapt needs the number of its steps as an argument: "
            "adapt(loss, batch, steps=10)"
        )
    found = usual if steps is None else steps
    require("steps", found, is_count(found), "Invalid {name} value: {value} (it must be an integer of at least 0)")
    return cast(int, found)


def require_tasks_alone(batch: Any, *, write: bool, one_at_a_time: bool, method: str) -> None:
    """Raise if many tasks are passed together with other arguments, or to a method that takes one at a time."""
    if batch is not None or write:
        raise ValueError(
            "adapt takes tasks= without batch= and without write=True, because it finds one solution for each "
            "task, and the live y holds only one; leave these out, and use the tensors that adapt returns"
        )
    if one_at_a_time:
        raise ValueError(
            f"{method} adapts to one task at a time, so it does not take tasks=; call adapt(loss, batch) for each task"
        )


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


def beginning(oracle: Oracle, start: Vector, tasks: Any) -> tuple[Oracle, Vector]:
    """Return the oracle of the lower problem, of all tasks as one if there are many, and the initial y.

    Args:
        oracle: oracle of one task's plain lower loss.
        start: tensors shaped like y; with tasks these are shared by all, or have a leading dimension for them.
        tasks: data of the tasks: a pytree of tensors with a leading dimension for the tasks. None: there is one task.
    """
    if tasks is None:
        if [t.shape for t in start] != [t.shape for t in oracle.y]:
            raise ValueError(
                f"Invalid start: the lower parameters have shapes {[tuple(t.shape) for t in oracle.y]}, but start has "
                f"{[tuple(t.shape) for t in start]}; pass one tensor of the same shape for each lower parameter"
            )
        return oracle, start.detach().clone()
    leaves = [t for t in tree_leaves(tasks) if isinstance(t, Tensor)]
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
    starts = Vector(s.detach().to(y).expand(n, *y.shape) for s, y in zip(start, oracle.y, strict=True)).clone()
    return stacked(oracle, starts, lambda _: tasks), starts

"""Starts of lower solves: functions of the user that write y before a step, and the memory of tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import warn
from ..hypergradient import Estimate
from ..hypergradient.estimate import measured
from ..oracle.oracle import Oracle
from ..oracle.substitution import Substitution
from ..problem.random import default_state, set_default_state
from ..problem.tasks import LowerInit, as_start, length_of
from ..problem.vector import Vector, any_sharded
from .step import StepInputs

__all__ = ["alert_if_unsolved", "remembered_tasks", "require_task_memory", "warn_of_forgetting", "write_lower"]

ONE_PROCESS = (
    "lower_init= without tasks is not for several processes or sharded parameters, because each process would draw "
    "its own start; leave out lower_init, and write the same start into y on all processes before the step"
)
UNSOLVED = (
    "y after lower_solver is not a solution of the lower problem: by its gradient and the curvature (see "
    "diagnostics['lower_residual'] and ['linear_curvature']), y would still move by more than one per cent of its "
    "size, so the hypergradient is not reliable. Solve to a smaller tolerance, and check that lower_solver reads the "
    "current x"
)


@torch.no_grad()
def write_lower(
    y: Sequence[Tensor],
    names: Sequence[str],
    init: LowerInit | None,
    solver: Callable[[], Any] | None,
    *,
    generator: torch.Generator | None,
    one_process: bool,
) -> tuple[Callable[[], None], Vector | None]:
    """Write y by the user's functions.

    Return a function that restores y and the random states, and the start with its graph, if it has one.

    Args:
        y: the live lower tensors.
        names: their names.
        init: ``lower_init``, which returns their values.
        solver: ``lower_solver``, which writes them itself.
        generator: the optimizer's generator.
        one_process: False if the step is one of several processes, which cannot use ``init``.
    """
    live, before, start = Vector(y), Vector(y).detach().clone(), Vector()
    drawn, own = default_state(y[0].device), None if generator is None else generator.get_state()

    def put_back() -> None:
        live.copy_(before)
        set_default_state(y[0].device, drawn)
        if generator is not None and own is not None:
            generator.set_state(own)

    try:
        if init is not None:
            if not one_process or any_sharded(y):
                raise ValueError(ONE_PROCESS)
            with Substitution(y, before, stacked=False):  # a graph of the start must not save the y that is overwritten
                start = as_start(init(), live, names)
            live.copy_(start.detach().clone())  # they may be the live tensors in another order
        if solver is not None:
            solver()
    except BaseException:
        put_back()
        raise
    return put_back, start if any(t.requires_grad for t in start) else None


def alert_if_unsolved(oracle: Oracle, inputs: StepInputs, estimate: Estimate) -> None:
    """Raise an alert if y after the user's solver is not a solution.

    Solvers stop too early in directions of small curvature, where a gradient step hardly moves y. The curvature along v
    is that of the directions on which f depends.
    """
    figures = measured(estimate.diagnostics)
    if "lower_residual" in figures:
        rate = max(inputs.lower_rates, default=0.0)
        y = oracle.y if estimate.lower is None else estimate.lower
        slope = figures["lower_residual"].norm()
        curvature = figures.get("linear_curvature", torch.zeros_like(slope))
        oracle.checks.alert_if("unsolved", UNSOLVED, partial(_is_far, rate), slope, curvature, y.norm())


def _is_far(rate: float, slope: Any, curvature: Any, size: Any) -> Any:
    allowed = 0.01 * size + 1e-6
    return (slope * rate > allowed) | ((curvature > 0) & (slope > allowed * curvature))


def require_task_memory(method: str, *, start: str, own_rule: bool, process_group: Any) -> None:
    """Raise if the lower solves of tasks cannot start where earlier ones ended.

    Args:
        method: name of the method.
        start: the option that determines where lower solves start, if one does.
        own_rule: True if the method has a rule of its own for that, or takes no tasks.
        process_group: the optimizer's group.
    """
    if start:
        raise ValueError(
            f"Invalid task_memory value: True ({start} already determines where lower solves start; leave out one "
            "of the two)"
        )
    if own_rule:
        raise ValueError(
            f"Invalid task_memory value: True ({method} has its own rule for where tasks start, or takes no tasks; "
            "leave out task_memory)"
        )
    if process_group is not None:
        raise ValueError(
            "Invalid task_memory value: True (with process_group, each process would remember only the tasks that "
            "it solved itself; leave out one of the two)"
        )


def remembered_tasks(sampler: Any) -> int:
    """Return the number of tasks for which a row is stored."""
    number = length_of(sampler)
    if number is None:
        raise ValueError(
            f"task_memory=True needs a sampler with a length, but {type(sampler).__name__} has none: a row is kept "
            "for each of finitely many tasks; use bo.TensorTasks, or give the sampler a __len__"
        )
    return number


def warn_of_forgetting(method: str, warned: set[str]) -> None:
    """Warn once that a single-loop method keeps neither y nor v of its tasks."""
    if "forgetting" not in warned:
        warned.add("forgetting")
        warn(
            f"{method} makes one step on y and v of each task, and keeps neither without task_memory, so that the "
            "hypergradient stays far off however long it runs; pass task_memory=True if tasks are drawn again and "
            "again (in one process), or use AID or StocBiO"
        )

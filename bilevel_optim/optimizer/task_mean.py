"""A step for tasks: the mean of the estimates for those of one draw, made as one problem with stacked y."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..hypergradient.estimate import measured
from ..oracle.lanes import stacked
from ..oracle.oracle import Oracle
from ..problem.random import draw_random_inputs
from ..problem.tasks import TaskDraws, sample, select, starting_points
from ..problem.vector import Vector
from .step import StepInputs, changed

__all__ = ["task_mean"]


def task_mean(
    oracle: Oracle,
    inputs: StepInputs,
    sampler: Any,
    estimate: Callable[[Oracle, StepInputs], Estimate],
    *,
    count: int,
    sizes: dict[str, int | None],
    together: Callable[[int], list[slice]],
    random_inputs: Mapping[str, int],
    joined: Mapping[str, Callable[[Tensor], Tensor]],
) -> Estimate:
    """The mean of the estimates for the tasks of one draw, and of the lower values that they end at.

    Args:
        oracle: of bare losses, at the point of the step.
        inputs: of the step.
        sampler: of tasks.
        estimate: makes the estimate of a stacked problem.
        count: how many tasks are drawn.
        sizes: of the batches of each level.
        together: which of so many tasks make one stacked problem.
        random_inputs: what an estimate needs beside its samples: by name, of how many numbers one.
        joined: how diagnostics of parts of the tasks become one, by name. Others are stacked.
    """
    drawn = sample(sampler, count, inputs.generator)
    tasks, share = inputs.ranks.share(drawn, count)
    generator = inputs.ranks.own(inputs.generator, inputs.steps)
    whole = together(count)  # every part has random inputs of its own
    own_inputs = [inputs.random_inputs, *(draw_random_inputs(random_inputs, inputs.generator) for _ in whole[1:])]
    loss, gradient, mean = oracle.x[0].new_zeros(()), oracle.x.zeros_like(), oracle.y.zeros_like()
    draws = TaskDraws(sampler, tasks, share, sizes, generator)
    estimates: list[Estimate] = []
    for part in reversed(together(share)):  # module buffers advance by the first task
        some, n = select(tasks, part), len(range(share)[part])
        apart = len(whole) == count > 1
        own = changed(inputs.anew(), random_inputs=own_inputs[inputs.ranks.place(part.start) if apart else 0])
        start = starting_points(oracle.y, oracle.lower_names(), some, n, inputs.lower_init)
        found = estimate(stacked(oracle, start, draws.of(part)), own)
        loss, gradient = loss + (found.loss / count).to(loss), gradient + found.gradient * (1 / count)
        y = start if found.lower is None else found.lower
        mean = mean + Vector(t.sum(0) / count for t in y)
        estimates.insert(0, changed(found, start=None, lower=None, solver=None))  # graphs and copies of y go
    loss, gradient, mean = inputs.ranks.total(loss, gradient, mean)
    # What belongs to x stays; what belongs to the tasks' y goes with them.
    last = estimates[-1]
    diagnostics = _over_parts([measured(found.diagnostics) for found in estimates], joined)
    return Estimate(
        loss,
        gradient,
        {**diagnostics, "task_count": torch.tensor(count, device="cpu")},
        upper_memory=last.upper_memory,
        numbers=last.numbers,
        lower=mean,
    )


def _over_parts(parts: Sequence[dict[str, Any]], joined: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
    """Diagnostics of several parts of a step: stacked, or joined, unless there is only one."""
    if len(parts) <= 1:
        return dict(parts[0]) if parts else {}
    return {
        name: joined.get(name, _same)(torch.stack([part[name] for part in parts]))
        if all(isinstance(p[name], Tensor) for p in parts)
        else value
        for name, value in parts[-1].items()
    }


def _same(stack: Tensor) -> Tensor:
    return stack

"""Estimate for tasks: the mean over the drawn tasks, computed as one problem with stacked y."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..hypergradient import Estimate
from ..hypergradient.estimate import Write, measured
from ..oracle.lanes import stacked
from ..oracle.oracle import Oracle
from ..problem.random import draw_random_inputs
from ..problem.tasks import TaskDraws, require_ids, sample, select, starting_points
from ..problem.vector import Vector, any_sharded
from .step import CURVATURE, StepInputs, replace

__all__ = ["task_mean"]

STARTS = "task_memory"  # table of the tasks' last solutions


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
    remembered: int | None = None,
    kept: Sequence[str] = (),
) -> Estimate:
    """Return the mean of the estimates for the drawn tasks, and of their lower solutions.

    Args:
        oracle: oracle of the plain losses, at the point of the step.
        inputs: inputs of the step.
        sampler: sampler of tasks.
        estimate: makes the estimate of a stacked problem.
        count: number of tasks to draw.
        sizes: batch size of each level.
        together: returns slices of so many tasks, each solved as one stacked problem.
        random_inputs: random integers that an estimate needs: name -> n, drawn uniformly from range(n).
        joined: reduces the stacked diagnostics of several slices, by name. Others stay stacked.
        remembered: number of tasks whose solutions are stored; None: none are.
        kept: entries of y's state that are stored with them. They are zero in tasks that are drawn for the first time.
    """
    drawn = sample(sampler, count, inputs.generator)
    if remembered is not None:
        require_ids(drawn, remembered)
    rows = None if remembered is None else _Rows(STARTS, inputs, oracle.y, remembered)
    memories = [] if remembered is None else [_Rows(name, inputs, oracle.y.zeros_like(), remembered) for name in kept]
    tasks, share = inputs.ranks.share(drawn, count)
    generator = inputs.ranks.derive_task_generator(inputs.generator, inputs.steps)
    whole = together(count)  # every slice has random inputs of its own
    own_inputs = [inputs.random_inputs, *(draw_random_inputs(random_inputs, inputs.generator) for _ in whole[1:])]
    loss, gradient, mean = oracle.x[0].new_zeros(()), oracle.x.zeros_like(), oracle.y.zeros_like()
    draws = TaskDraws(sampler, tasks, share, sizes, generator)
    estimates: list[Estimate] = []
    for part in reversed(together(share)):  # module buffers advance by the first task
        some, n = select(tasks, part), len(range(share)[part])
        apart = len(whole) == count > 1
        own = replace(
            inputs.with_lower_state({memory.name: memory.of(some) for memory in memories}),
            random_inputs=own_inputs[inputs.ranks.place(part.start) if apart else 0],
        )
        if rows is None:
            start = starting_points(oracle.y, oracle.lower_names(), some, n, inputs.lower_init)
        else:
            start = rows.of(some)
        if any(t.requires_grad for t in start):
            own, start = replace(own, start=start), start.detach()
        found = estimate(stacked(oracle, start, draws.of(part)), own)
        loss, gradient = loss + (found.loss / count).to(loss), gradient + found.gradient * (1 / count)
        y = start if found.lower is None else found.lower
        mean = mean + Vector(t.sum(0) / count for t in y)
        if rows is not None:
            rows.note(some, y)
        for memory in memories:
            if memory.name in found.memory:
                memory.note(some, found.memory[memory.name])
        estimates.insert(0, replace(found, start=None, lower=None, solver=None))  # frees graphs and copies of y
    loss, gradient, mean = inputs.ranks.total(loss, gradient, mean)
    # The state of x is kept; that of the tasks' y is dropped.
    last = estimates[-1]
    diagnostics = _over_parts([measured(found.diagnostics) for found in estimates], joined)
    curvatures = [found.memory[CURVATURE] for found in estimates if CURVATURE in found.memory]
    return Estimate(
        loss,
        gradient,
        {**diagnostics, "task_count": torch.tensor(count, device="cpu")},
        memory={CURVATURE: _stiffest(curvatures, inputs.ranks)} if curvatures else {},
        upper_memory=last.upper_memory,
        numbers=last.numbers,
        lower=mean,
        **_stored([] if rows is None else [rows, *memories]),
    )


def _stiffest(curvatures: Sequence[Vector], ranks: Ranks) -> Vector:
    """Return the longest of the curvature vectors of all slices of tasks and of all ranks."""
    found, sizes = curvatures[0], torch.stack([vector.norm() for vector in curvatures])
    if len(curvatures) > 1:
        longest = sizes.argmax().reshape(1)
        found = Vector([torch.stack(parts).index_select(0, longest)[0] for parts in zip(*curvatures, strict=True)])
    if ranks.group is None or any_sharded(found):
        return found
    of_ranks = sizes.new_zeros(ranks.world)
    of_ranks[ranks.rank] = sizes.max()
    (of_ranks,) = ranks.total(of_ranks)
    own = found.times(of_ranks.argmax() == ranks.rank)
    longest_of_all: tuple[Vector] = ranks.total(own)
    return longest_of_all[0]


class _Rows:
    """A vector like y for each task, as rows of one table.

    Args:
        name: name of the table, which has NaN in rows of tasks that have not been drawn.
        inputs: inputs of the step, with the table after the last step if there is one.
        first: values for tasks that are drawn for the first time.
        number: number of all tasks, which may have grown since.
    """

    def __init__(self, name: str, inputs: StepInputs, first: Vector, number: int) -> None:
        self.name, self.first, before = name, first, inputs.tables.get(name)
        missing = number if before is None else number - len(before)
        self.is_new = missing > 0
        if self.is_new:
            more = self._flat().new_full((missing, sum([t.numel() for t in first])), torch.nan)
            before = more if before is None else torch.cat([before, more.to(before)])
        assert before is not None
        self.table = before
        self.noted: list[tuple[Tensor, Tensor]] = []

    def _flat(self) -> Tensor:
        return torch.cat([t.reshape(-1) for t in self.first])

    def of(self, ids: Tensor) -> Vector:
        """Return the vectors of some tasks, stacked."""
        known = self.table[ids.to(self.table.device)]
        known = torch.where(known.isnan(), self._flat().to(known), known)
        rows = torch.split(known, [t.numel() for t in self.first], dim=1)
        return Vector([row.reshape(len(row), *t.shape).to(t.dtype) for row, t in zip(rows, self.first, strict=True)])

    def note(self, ids: Tensor, values: Vector) -> None:
        """Note new vectors of some tasks."""
        rows = torch.cat([t.detach().reshape(len(t), -1).to(self.table.dtype) for t in values], 1)
        self.noted.append((ids.to(self.table.device), rows))


def _stored(tables: Sequence[_Rows]) -> dict[str, Any]:
    """Return the fields of an estimate that store the noted rows."""
    new: dict[str, Tensor] = {}
    writes: list[Write] = []
    for rows in [rows for rows in tables if rows.noted]:
        ids, values = (torch.cat(parts) for parts in zip(*reversed(rows.noted), strict=True))  # the last draw wins
        if rows.is_new:
            new[rows.name] = rows.table.index_copy(0, ids, values)
        else:
            writes.append(Write(rows.table, ids, values))
    return {"tables": new, "writes": tuple(writes)} if tables else {}


def _over_parts(parts: Sequence[dict[str, Any]], joined: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
    """Return the diagnostics of several slices of tasks, stacked or reduced; those of a single slice as they are."""
    found = dict(parts[-1])
    for name in found if len(parts) > 1 else ():
        own = [part[name] for part in parts]
        if all(isinstance(value, Tensor) for value in own):
            stack = torch.stack(own)
            found[name] = joined[name](stack) if name in joined else stack
    return found

"""Ranks that begin with different parameters, and ranks that draw different amounts."""

import pytest
import torch
import torch.distributed as dist

import bilevel_optim as bo

from ..problems import Quadratic, Tasks, same, seeded, values
from ..registry import ROWS
from .processes import together

DRAWING = [row for row in ROWS if row.name in ("AID", "PZOBO", "SVRB", "RSVRB")]


def differing(rank):
    """What is said of an x or y that differs in one bit on one rank; the last run has none."""
    said, group = [], dist.group.WORLD
    for level in ("upper", "lower", None):
        problem = Quadratic(n=4, m=2)
        optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=2, process_group=group)
        if rank == 1 and level is not None:
            (problem.x if level == "upper" else problem.y)[0].data.view(torch.int64)[0] += 1
        before = values(problem.x, problem.y)
        try:
            problem.run(optimizer)
        except ValueError as error:
            said.append(str(error))
        assert same(before, values(problem.x, problem.y)) == (level is not None)
    return said


def uneven():
    """Five tasks of which each rank has a part and draws rows: the parameters and the generator afterwards."""
    ends = {}
    for row in DRAWING:
        rows = row.declared.tasks == "rows"
        problem, generator = Tasks(m=5, rows=rows), seeded(2)
        options = {"task_batch": 5} if row.name == "RSVRB" else {} if rows else {"tasks_per_step": 5}
        options |= {"lower_batch": 2, "upper_batch": 2, "generator": generator, "process_group": dist.group.WORLD}
        optimizer = row(problem.x, problem.y, short=True, **options)
        for _ in range(3):
            problem.run(optimizer)
        ends[row.name] = [*values(problem.x, problem.y), generator.get_state()]
    return ends


CHANGES = {
    "lr of group 0": {"lr": 0.2},
    "lower_steps": {"lower_steps": 3},
    "linear_steps": {"linear_steps": 4},
    "warm_start": {"warm_start": False},
}


def differing_options(rank):
    """What is said where one rank has another option, from the beginning or later; the last runs have none."""
    said, group = [], dist.group.WORLD

    def tried(problem, optimizer):
        before = values(problem.x, problem.y)
        try:
            problem.run(optimizer)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
            assert same(before, values(problem.x, problem.y))

    for options in [*CHANGES.values(), {}]:
        problem = Quadratic(n=4, m=2)
        given = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 2, **(options if rank == 1 else {})}
        tried(problem, bo.AID(problem.x, problem.y, process_group=group, **given))
    problem = Quadratic(n=4, m=2)
    optimizer = bo.AID(problem.x, problem.y, process_group=group, lr=0.1, lower_lr=0.1, lower_steps=2)
    for rate in (None, 0.3, 0.1):
        if rate is not None and rank == 1:
            optimizer.param_groups[1]["lr"] = rate
        tried(problem, optimizer)
    method = bo.AID if rank == 1 else bo.FirstOrder
    tried(problem, method(problem.x, problem.y, process_group=group, lr=0.1, lower_lr=0.1, lower_steps=2))
    return said


def both(rank):
    return [differing(rank), uneven(), differing_options(rank)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_differ(world, tmp_path):
    """Ranks with other parameters ran on; those with more tasks were ahead, and then saw other tasks than the rest."""
    results = together(world, tmp_path, both)
    for rank in range(world):
        said, ends, options = results[rank]
        *first, none, before, changed, again, methods = options
        for message, name in zip([*first, changed], [*CHANGES, "lr of group 1"], strict=True):
            assert f"process_group have different options: {name}; each would make" in message
        assert none is before is again is None
        assert "different options: the methods, or the parameter groups;" in methods
        for message, level in zip(said, ("upper", "lower"), strict=True):
            assert f"process_group hold different values of {level} parameter 0, so" in message
        for row in DRAWING:
            assert same(results[0][1][row.name], ends[row.name]), row.name

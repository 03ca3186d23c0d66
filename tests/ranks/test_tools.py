"""Modules under DDP and FSDP2 with the methods that tools are tested with, however a step is called."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bilevel_optim as bo

from ..problems import flat, same, values
from ..registry import ROWS
from ..tools.test_torch import CALLS, TOOLED
from .processes import together

KEPT = ("AID", "SOBA", "RAHGD")  # second derivatives: the module keeps its full parameters after a backward pass
CELLS = [
    *(("DDP", call, name) for name in TOOLED for call in CALLS),
    *(("DDP called", "losses", name) for name in TOOLED),
    *(("FSDP2", call, name) for name in (*KEPT, "F2SA") for call in CALLS),
]
FEW = CELLS[1::4]  # so that each method is called in another way
REFUSED = {
    "RSVRB": (ValueError, "rows can be split along their first dimension only"),
    "MAML": (ValueError, "MAML cannot start sharded lower parameters"),
    **dict.fromkeys(KEPT, (RuntimeError, "set_reshard_after_backward")),
}


def build(kind, name, rank=None, world=1, keep=None, grouped=True):
    """The body precedes the wrapped module; the loss has a penalty on the wrapped parameters outside of it."""
    row = next(row for row in ROWS if row.name == name)
    torch.manual_seed(0)
    problem = row.cleaning(n=24, part=None if rank is None else (rank, world))
    options = {"nu": 1.0} if name == "F2SA" else {}
    if rank is not None:
        options |= {"process_group": dist.group.WORLD} if grouped else {}
        if kind == "FSDP2":
            fully_shard(problem.head)
            problem.head.set_reshard_after_backward(not (name in KEPT if keep is None else keep))
            problem.y = [*problem.head.parameters()]
        else:
            wrapped = DistributedDataParallel(problem.head)
            problem.head = wrapped if kind == "DDP called" else problem.head
    return problem, row(problem.x, problem.y, short=True, **options)


def ended(kind, call, name, rank=None, world=1):
    problem, optimizer = build(kind, name, rank, world)
    losses = [CALLS[call](problem, optimizer) for _ in range(2)]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in problem.y]
    return flat([*problem.x, *whole, *losses])


def refused(rank, world):
    for name, (error, message) in REFUSED.items():
        problem, optimizer = build("FSDP2", name, rank, world, keep=False)
        before = values(problem.x)
        with pytest.raises(error, match=message):
            problem.run(optimizer)
        assert same(before, values(problem.x)), name


def everything(rank, world, cells):
    refused(rank, world)
    return {cell: ended(*cell, rank, world).tolist() for cell in cells}


@pytest.mark.parametrize(
    ("world", "cells"), [(2, FEW), *(pytest.param(world, CELLS, marks=pytest.mark.slow) for world in (2, 4))]
)
def test_wrapped_modules(world, cells, tmp_path):
    results = together(world, tmp_path, everything, world, cells)
    for cell in cells:
        expected = ended(*cell)
        for rank in range(world):
            got = torch.tensor(results[rank][cell])
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, msg=lambda m, c=cell: f"{c}: {m}")


def warned_of_shards(rank, world):
    """FSDP2 averages the gradients of its own parameters; the losses and x are each rank's own."""
    for name in ("AID", "F2SA"):
        problem, optimizer = build("FSDP2", name, rank, world, grouped=False)
        with pytest.warns(bo.BilevelWarning, match=r"fully_shard.* no process_group.* pass process_group="):
            problem.run(optimizer)
        problem.run(optimizer)  # once
    return problem.x[0].detach().tolist()


def test_a_sharded_module_without_a_process_group_is_warned_of(tmp_path):
    results = together(2, tmp_path, warned_of_shards, 2)
    assert results[0] != results[1]

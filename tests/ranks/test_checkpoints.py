"""Distributed checkpoints on several ranks: resumed bit for bit by as many, to rounding by others, and back."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bilevel_optim as bo

from ..problems import Tasks, flat, seeded
from .processes import together
from .test_equal import split

OPTIONS = {"lr": 0.5, "lower_lr": 0.1, "lower_steps": 2}
SINGLE = {"lr": 0.5, "lower_lr": 0.1}
ADAM = {**OPTIONS, "lr": 0.05, "lower_optimizer": torch.optim.Adam}
KINDS = {
    "DDP, AID": (DistributedDataParallel, bo.AID, OPTIONS),
    "DDP, F2SA": (DistributedDataParallel, bo.F2SA, ADAM),
    "DDP, PRAHGD": (DistributedDataParallel, bo.PRAHGD, {**OPTIONS, "perturbation": 0.1}),  # draws random numbers
    "DDP, RAHGD": (DistributedDataParallel, bo.RAHGD, OPTIONS),
    "DDP, SOBA": (DistributedDataParallel, bo.SOBA, SINGLE),
    "DDP, RSVRB": (DistributedDataParallel, bo.RSVRB, SINGLE),
    "DDP, MAML": (DistributedDataParallel, bo.MAML, OPTIONS),
    "FSDP2, F2SA": (fully_shard, bo.F2SA, ADAM),
    "FSDP2, AID": (fully_shard, bo.AID, {**OPTIONS, "damping": 1.0}),
    "FSDP2, SOBA": (fully_shard, bo.SOBA, SINGLE),
    "FSDP2, RAHGD": (fully_shard, bo.RAHGD, {**OPTIONS, "damping": 1.0}),
    "rows, RSVRB": (None, bo.RSVRB, {"task_batch": 3}),
    "rows, free": (None, bo.RSVRB, {"task_batch": 3, "variant": "matrix_free"}),
}
FEW = ("DDP, PRAHGD", "DDP, MAML", "FSDP2, F2SA", "FSDP2, SOBA", "rows, free")
CELLS = [tuple(kind.split(", ")) for kind in KINDS]


class Both(nn.Module):
    """The parameters of both levels, by their names."""

    def __init__(self, x, lower, start=()):
        super().__init__()
        self.x, self.lower, self.start = nn.Parameter(x), lower, nn.ParameterList(start)


def build(kind, rank, world):
    """The model, the optimizer, and what makes a step."""
    wrapper, cls, options = KINDS[kind]
    options = {**options, "process_group": dist.group.WORLD, "generator": seeded(2)}
    if wrapper is None:
        problem = Tasks(m=11, rows=True)
        model = Both(problem.x[0].detach(), nn.ParameterList([split(t.detach(), world) for t in problem.y]))
        problem.x, problem.y = [model.x], list(model.lower)
        optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.05, **options)
        return model, optimizer, partial(problem.run, optimizer)
    torch.manual_seed(0)
    X, t, Xv = torch.randn(24, 8), torch.randint(0, 4, (24,)), torch.randn(24, 8)
    model = Both(torch.zeros(24), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    part = torch.arange(24).chunk(world)[rank]
    net, x = model.lower, model.x
    if cls is bo.MAML:
        model.start.extend(nn.Parameter(p.detach().clone()) for p in net.parameters())
    upper = [x, *model.start]
    if wrapper is fully_shard:
        fully_shard(net[0])
        fully_shard(net)
        net.set_reshard_after_backward(cls is bo.F2SA)
    else:
        model = wrapper(model)
    optimizer = cls(upper, net.parameters(), **options)

    def lower():
        return (x.sigmoid()[part] * F.cross_entropy(net(X[part]), t[part], reduction="none")).mean()

    def step():
        return optimizer.step(lambda: F.cross_entropy(net(Xv[part]), t[part]), lower)

    return model, optimizer, step


def leg(kind, rank, world, load=None, save=None, steps=2):
    """Return the end of a run that starts from one checkpoint and writes another."""
    model, optimizer, step = build(kind, rank, world)
    if load is None:
        for _ in range(2):
            step()
    else:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=load)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if save is not None:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=save)
    for _ in range(steps):
        step()
    if hasattr(optimizer, "catch_up"):
        optimizer.catch_up()
    kept = [t for p in model.parameters() for name, t in sorted(optimizer.state[p].items()) if name != "step"]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (*model.parameters(), *kept)]
    return flat([t.double() for t in whole]).tolist()


def legs(rank, world, path, kinds, plan):
    return {
        (kind, name): leg(kind, rank, world, *(f"{path}/{kind} {end}" if end else None for end in ends))
        for kind in kinds
        for name, ends in plan.items()
    }


@pytest.mark.parametrize(("kinds", "others"), [(FEW, ()), pytest.param((*KINDS,), (4,), marks=pytest.mark.slow)])
def test_a_run_goes_on_from_a_checkpoint_of_any_number_of_ranks(kinds, others, tmp_path):
    run = partial(together, tmp_path=tmp_path, function=legs)
    results = run(2, arguments=(2, tmp_path, kinds, {"whole": (None, "a"), "resumed": ("a", None)}))
    expected = results[0]
    for kind in kinds:
        for rank in (0, 1):
            assert results[rank][kind, "resumed"] == expected[kind, "whole"], kind
    for world in others:
        elsewhere = run(world, arguments=(world, tmp_path, kinds, {"elsewhere": ("a", "b")}))
        back = run(2, arguments=(2, tmp_path, kinds, {"back": ("b", None)}))
        for kind in kinds:
            for rank in range(world):
                torch.testing.assert_close(
                    torch.tensor(elsewhere[rank][kind, "elsewhere"]),
                    torch.tensor(expected[kind, "whole"]),
                    rtol=1e-7,
                    atol=1e-9,
                    msg=lambda m, kind=kind: f"{kind}: {m}",
                )
            for rank in (0, 1):
                assert back[rank][kind, "back"] == expected[kind, "whole"], kind

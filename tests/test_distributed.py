"""Two processes with half of the data each equal one process with all of it, with replicated and sharded modules."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import bilevel_optim as bo

from .problems import Cleaning
from .registry import METHODS

ARGUMENTS = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 3}


def trajectory(method, group=None, rank=None):
    problem = Cleaning()
    half = slice(None) if rank is None else slice(15 * rank, 15 * rank + 15)
    rows = torch.arange(30)[half]

    def upper():
        return problem.upper(rows)

    def lower():
        return problem.lower(rows)

    generator = torch.Generator().manual_seed(rank or 0)  # directions are those of rank 0, whatever the others draw
    optimizer = method(
        [problem.weights], problem.model.parameters(), **ARGUMENTS, process_group=group, generator=generator
    )
    losses = [optimizer.step(upper, lower) for _ in range(3)]
    return torch.cat([problem.weights.detach(), *(p.detach().reshape(-1) for p in problem.model.parameters())]), losses


def sharded_trajectory(cls, options, rank=None):
    """With the module under FSDP2 if there is a rank; half of the data each."""
    torch.manual_seed(0)
    X, t, Xv = torch.randn(20, 8), torch.randint(0, 4, (20,)), torch.randn(20, 8)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    half = slice(None) if rank is None else slice(10 * rank, 10 * rank + 10)
    x = torch.zeros(20, requires_grad=True)
    if rank is not None:
        fully_shard(net)
        options = {**options, "process_group": dist.group.WORLD}

    def lower():
        return (x.sigmoid()[half] * F.cross_entropy(net(X[half]), t[half], reduction="none")).mean()

    def upper():
        return F.cross_entropy(net(Xv[half]), t[half])

    optimizer = cls([x], net.parameters(), lr=0.5, lower_lr=0.1, lower_steps=3, **options)
    for _ in range(3):
        optimizer.step(upper, lower)
    weights = [p.full_tensor() if rank is not None else p for p in net.parameters()]
    return torch.cat([x.detach(), *(p.detach().reshape(-1) for p in weights)])


SHARDED = {
    "F2SA-2": (bo.F2SA, {"order": 2}),
    "F2SA-1, Adam": (bo.F2SA, {"order": 1, "lower_optimizer": torch.optim.Adam, "normalize": False}),
    "AID, differences": (bo.AID, {"hvp": "finite-difference", "linear_solver": "fixed_point"}),
    "FirstOrder": (bo.FirstOrder, {}),
}


def run(rank, address, results):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    plain = {m.name: trajectory(m, dist.group.WORLD, rank)[0].tolist() for m in METHODS}
    sharded = {name: sharded_trajectory(*row, rank).tolist() for name, row in SHARDED.items()}
    with pytest.raises(RuntimeError, match="first derivatives only"):
        sharded_trajectory(bo.AID, {}, rank)
    results[rank] = {**plain, **{f"sharded {name}": value for name, value in sharded.items()}}
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(run, (f"file://{tmp_path}/rendezvous", results), nprocs=2)
        results = dict(results)
    for method in METHODS:
        if method.options.get("hvp") == "finite-difference":
            tolerance = 1e-6
        else:
            tolerance = 1e-12 if method.options.get("nu", 1.0) > 1e-4 else 1e-7
            tolerance = 1e-10 if method.options.get("direction") else tolerance
        expected = trajectory(method)[0]
        for rank in (0, 1):
            got = torch.tensor(results[rank][method.name])
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        assert results[0][method.name] == results[1][method.name]
    for name, row in SHARDED.items():
        expected = sharded_trajectory(*row)
        for rank in (0, 1):
            got = torch.tensor(results[rank][f"sharded {name}"])
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)

r"""Seconds, memory and bytes exchanged of a step on 1, 2 and 4 gloo ranks of one machine.

    python -m recipes.benchmarks.ranks
    python -m recipes.benchmarks.ranks --cases rows-split --ranks 1 2 4 --tasks 1000000

x has one weight per training example (``--examples``), y is a network (``--width``). Ranks have equal parts of the
data; with ``-fsdp2`` the network is sharded by layer. ``rows`` has a lower problem of two variables for each of
``--tasks`` tasks. Each row of the table shows the largest figures over the ranks.

*MiB of state* is the optimizer's state; *tensors between steps* are all live tensors, parameters and data included; *at
peak* is their maximum within a step. *Reduced* are the bytes that a rank passes to sums over the ranks in a step;
*gathered* are the bytes of the whole tensors that it assembles from shards. Next to each is the number of bytes by the
method's formula: 4 bytes per number, without losses, flags and task numbers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

import bilevel_optim as bo

from ..common import Parser, environment, save, show, timed
from ..common.ledger import Ledger
from ..common.seeds import begin

T, K, Q, BATCH = 5, 5, 8, 16  # lower steps, products of the linear solver, directions, tasks per step
Numbers = Callable[[int, int], int]  # takes the numbers of upper parameters d and lower ones p


class Case(NamedTuple):
    """Method with the communication of a step.

    Attributes:
        cls, options: the method.
        reduced: count of numbers summed over the ranks.
        sharded: the same under FSDP2, where every gradient of the network is reduced, separately for each loss.
        gathered: count of numbers each rank gathers from the shards: parameters in each forward and each backward
            pass, and vectors multiplied by second derivatives.
    """

    cls: type[bo.BilevelOptimizer]
    options: dict[str, Any]
    reduced: Numbers
    sharded: Numbers | None = None
    gathered: Numbers | None = None


NETWORK = {
    "aid": Case(
        bo.AID, {"lower_steps": T, "linear_solver": "fixed_point", "linear_steps": K},
        lambda d, p: (T + K + 3) * p + 2 * d,
        lambda d, p: (T + K + 3) * p + 2 * d, lambda d, p: (2 * (T + 2) + K + 2) * p,
    ),
    "f2sa": Case(
        bo.F2SA, {"lower_steps": T, "nu": 1e-2}, lambda d, p: 2 * T * p + d,
        lambda d, p: 4 * (T + 1) * p + d, lambda d, p: 8 * (T + 1) * p,
    ),
    "soba": Case(bo.SOBA, {}, lambda d, p: 3 * p + 2 * d),
    "pzobo-data": Case(bo.PZOBO, {"lower_steps": T, "directions": Q}, lambda d, p: (Q + 1) * T * p + p + d),
    "pzobo-directions": Case(
        bo.PZOBO, {"lower_steps": T, "directions": Q, "over_ranks": "directions"}, lambda d, p: d + 3 * Q
    ),
}  # fmt: skip
FULLY = ("aid-fsdp2", "f2sa-fsdp2")
ROWS = ("rows-all", "rows-split")
CASES = (*NETWORK, *FULLY, *ROWS)


class Contexts:
    """Tasks whose data are computed from their numbers, so that none are stored."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return self.tasks

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return torch.randint(self.tasks, (n,), generator=generator)

    def lower(self, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Tensor:
        return (tasks / self.tasks).view(-1, 1, 1)

    upper = lower


class Made(NamedTuple):
    """Step to measure, and the count of numbers that it must exchange."""

    optimizer: bo.BilevelOptimizer
    step: Callable[[], Any]
    tensors: list[Tensor]
    reduced: int
    gathered: int = 0


def rows(case: str, world: int, tasks: int) -> Made:
    """Return a method with one row per task."""
    x, y = torch.ones(4, requires_grad=True), torch.zeros(tasks, 2)
    if world > 1 and case == "rows-split":
        y = distribute_tensor(y, init_device_mesh("cpu", (world,)), [Shard(0)])
    y.requires_grad_()
    group = dist.group.WORLD if world > 1 else None
    optimizer = bo.RSVRB([x], [y], lr=1e-3, lower_lr=1e-3 / tasks, task_batch=BATCH, process_group=group)

    def step() -> Any:
        return optimizer.step(
            lambda c: (y - c[0]).square().sum() / 2,
            lambda c: (1 + c[0, 0]) * y.square().sum() / 2 - y @ (x.view(2, 2).sum(1) + c[0]),
            tasks=Contexts(tasks),
        )

    d, p = 4, 2
    return Made(optimizer, step, [x, y], 2 * d if case == "rows-split" else 2 * BATCH * (d + 2 * p + d * p + p * p))


def network(case: str, rank: int, world: int, examples: int, width: int) -> Made:
    """Return a method on a network; splitting zeroth-order directions needs the same data on all ranks."""
    name = case.removesuffix("-fsdp2")
    chosen = NETWORK[name]
    begin(0, "data")
    whole = "over_ranks" in chosen.options
    part = slice(None) if whole else slice(rank * examples // world, (rank + 1) * examples // world)
    inputs, labels = torch.randn(examples, 64)[part].clone(), torch.randint(0, 16, (examples,))[part].clone()
    weights = torch.zeros(examples, requires_grad=True)
    net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 16))
    size = sum(p.numel() for p in net.parameters())
    if world > 1 and case in FULLY:
        for layer in (*net[::2], net):
            fully_shard(layer)
            layer.set_reshard_after_backward(name == "f2sa")
    group = dist.group.WORLD if world > 1 else None
    lower = [*net.parameters()]
    optimizer = chosen.cls([weights], lower, lr=1e-2, lower_lr=1e-2, process_group=group, **chosen.options)

    def loss() -> Tensor:
        return F.cross_entropy(net(inputs), labels)

    def weighted() -> Tensor:
        return (weights[part].sigmoid() * F.cross_entropy(net(inputs), labels, reduction="none")).mean()

    sharded = chosen.sharded if case in FULLY else None
    return Made(
        optimizer, lambda: optimizer.step(loss, weighted), [weights, inputs, labels, *lower],
        (sharded or chosen.reduced)(examples, size),
        chosen.gathered(examples, size) if sharded and chosen.gathered else 0,
    )  # fmt: skip


def measured(case: str, rank: int, world: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one rank of the group."""
    made = rows(case, world, args.tasks) if case in ROWS else network(case, rank, world, args.examples, args.width)
    made.step()  # the first step runs checks and creates the state
    seconds = median(timed(made.step, "cpu")[1] for _ in range(args.repeats))
    state = [t for entries in made.optimizer.state.values() for t in entries.values() if isinstance(t, Tensor)]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in state]
    with Ledger([*made.tensors, *state]) as ledger:
        made.step()
        between = ledger.bytes()
    sent = ledger.sent
    return {
        "seconds": seconds,
        "state": sum(t.numel() * t.element_size() for t in local) / 2**20,
        "between": between / 2**20,
        "tensors": ledger.peak / 2**20,
        "reduced": float(sum(sent.get(kind, 0) for kind in ("allreduce", "broadcast", "reducescatter"))),
        "reduced, needed": 4.0 * made.reduced * (world > 1),
        "gathered": float(sent.get("allgather", 0)),
        "gathered, needed": 4.0 * made.gathered * (world > 1),
    }


def measure(rank: int, world: int, args: argparse.Namespace, folder: str) -> None:
    """Write the figures of one rank into the folder."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    for case in args.cases:
        Path(folder, f"{case}-{rank}.json").write_text(json.dumps(measured(case, rank, world, args)))
        if world > 1:
            dist.barrier()
    if world > 1:
        dist.destroy_process_group()


def largest(world: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the largest figures over all ranks, by case."""
    with tempfile.TemporaryDirectory() as folder:
        if world == 1:
            measure(0, 1, args, folder)
        else:
            start_processes(measure, (world, args, folder), nprocs=world, start_method="spawn")  # type: ignore[no-untyped-call]
        each = {
            case: [json.loads(Path(folder, f"{case}-{rank}.json").read_text()) for rank in range(world)]
            for case in args.cases
        }
    return {case: {key: max(one[key] for one in found) for key in found[0]} for case, found in each.items()}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Print the table and write its numbers."""
    parser = Parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default: all")
    parser.option("ranks", [1, 2, 4], "numbers of processes")
    parser.option("examples", 512, "training examples, upper parameters")
    parser.option("width", 1024, "width of the network")
    parser.option("tasks", 100_000, "tasks of the cases with rows")
    parser.option("repeats", 3, "timed steps")
    args = parser.parse(arguments)
    worlds = {world: largest(world, args) for world in args.ranks}
    found = {
        f"{case}, {world}": {"case": case, "ranks": world, **worlds[world][case]}
        for case in args.cases for world in worlds
    }  # fmt: skip
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    keys = ("ranks", "seconds", "state", "between", "tensors", "reduced", "reduced, needed", "gathered",
            "gathered, needed")  # fmt: skip
    header = ["case", "ranks", "s (median)", "MiB of state", "tensors between steps", "at peak", "bytes reduced",
              "needed", "gathered", "needed"]  # fmt: skip
    show("A step on several ranks", header, [[row["case"], *map(row.get, keys)] for row in found.values()])
    return save(args, args.out / "ranks", {"results": found})


if __name__ == "__main__":
    main()

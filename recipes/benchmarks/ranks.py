r"""Seconds, memory and bytes exchanged of a step on 1, 2 and 4 gloo ranks of one machine.

    python -m recipes.benchmarks.ranks
    python -m recipes.benchmarks.ranks --cases rows-split --ranks 1 2 4 --tasks 1000000

x has a weight for each training example (``--examples``), y is a network (``--width``); ranks have equal parts of the
data. ``rows`` has a lower problem of two variables for each of ``--tasks`` tasks. Every row of the table is made by
processes of its own. *MiB at peak* is what the largest process takes beyond what it took before the optimizer was made,
*of state* what it remembers in the end. *Bytes* are those that a rank gives to all collective operations of a step;
beside them is what the method's formula needs (4 bytes for each number of a mean or sum), without losses and flags. The
bytes of FSDP2's own gathers are not counted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

import bilevel_optim as bo

from ..common import Parser, alone, environment, peak, save, show, timed

T, K, Q, BATCH = 5, 5, 8, 16  # lower steps, products of the linear solver, directions, tasks in a step
NETWORK: dict[str, tuple[type[bo.BilevelOptimizer], dict[str, Any], Callable[[int, int], int]]] = {
    "aid": (bo.AID, {"lower_steps": T, "linear_steps": K}, lambda d, p: (T + K + 2) * p + 2 * d),
    "f2sa": (bo.F2SA, {"lower_steps": T, "nu": 1e-2}, lambda d, p: 2 * T * p + 2 * d),
    "soba": (bo.SOBA, {}, lambda d, p: 3 * p + 2 * d),
    "pzobo-data": (bo.PZOBO, {"lower_steps": T, "directions": Q}, lambda d, p: (Q + 1) * T * p + p + d),
    "pzobo-directions": (
        bo.PZOBO,
        {"lower_steps": T, "directions": Q, "over_ranks": "directions"},
        lambda d, p: d + 3 * Q,
    ),
}
FULLY = ("aid-fsdp2", "f2sa-fsdp2")
ROWS = ("rows-all", "rows-split")
CASES = (*NETWORK, *FULLY, *ROWS)


class Contexts:
    """Tasks whose data follow from their numbers, so that none are stored."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return self.tasks

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        return torch.randint(self.tasks, (n,), generator=generator)

    def lower(self, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Tensor:
        return (tasks / self.tasks).view(-1, 1, 1)

    upper = lower


def rows(case: str, world: int, tasks: int) -> tuple[bo.BilevelOptimizer, Callable[[], Any], int]:
    """The optimizer, its step, and how many numbers a step has to exchange."""
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
    return optimizer, step, 2 * d if case == "rows-split" else 2 * BATCH * (d + 2 * p + d * p + p * p)


def network(case: str, rank: int, world: int, examples: int, width: int) -> tuple[Any, Callable[[], Any], int]:
    """The same for a network; the directions of a zeroth-order method need the same data on all ranks."""
    name = case.removesuffix("-fsdp2")
    cls, options, needed = NETWORK[name]
    torch.manual_seed(0)
    whole = "over_ranks" in options
    part = slice(None) if whole else slice(rank * examples // world, (rank + 1) * examples // world)
    inputs, labels = torch.randn(examples, 64)[part], torch.randint(0, 10, (examples,))[part]
    weights = torch.zeros(examples, requires_grad=True)
    net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    size = sum(p.numel() for p in net.parameters())
    if world > 1 and case in FULLY:
        for layer in (*net[::2], net):
            fully_shard(layer)
            layer.set_reshard_after_backward(name == "f2sa")
    group = dist.group.WORLD if world > 1 else None
    lower = [*net.parameters()]
    optimizer = cls([weights], lower, lr=1e-2, lower_lr=1e-2, process_group=group, **options)

    def loss() -> Tensor:
        return F.cross_entropy(net(inputs), labels)

    def weighted() -> Tensor:
        return (weights[part].sigmoid() * F.cross_entropy(net(inputs), labels, reduction="none")).mean()

    return optimizer, lambda: optimizer.step(loss, weighted), needed(examples, size)


def measure(rank: int, case: str, world: int, args: argparse.Namespace, folder: str) -> dict[str, float]:
    """Figures of one rank, which are written into the folder."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    sent = [0]

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            sent[0] += tensor.numel() * tensor.element_size()
            return operation(tensor, *arguments, **named)

        return call

    operations: Any = dist.all_reduce, dist.broadcast
    dist.all_reduce, dist.broadcast = (counted(operation) for operation in operations)
    try:
        torch.ones(8, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
        before = peak()
        made = rows(case, world, args.tasks) if case in ROWS else network(case, rank, world, args.examples, args.width)
        optimizer, step, needed = made
        step()  # the first one checks, and makes what later ones remember
        sent[0] = 0
        seconds = median(timed(step, "cpu")[1] for _ in range(args.repeats))
    finally:
        dist.all_reduce, dist.broadcast = operations
    state = [t for entries in optimizer.state.values() for t in entries.values() if isinstance(t, Tensor)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in state]
    found = {
        "seconds": seconds,
        "peak": peak() - before,
        "state": sum(t.numel() * t.element_size() for t in local) / 2**20,
        "bytes": sent[0] / args.repeats if world > 1 else 0.0,
        "needed": 4.0 * needed if world > 1 else 0.0,
    }
    if world > 1:
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    return found


def largest(case: str, world: int, args: argparse.Namespace) -> dict[str, float]:
    """The largest figures of all ranks."""
    if world == 1:
        return measure(0, case, 1, args, "")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(measure, (case, world, args, folder), nprocs=world, start_method="spawn")  # type: ignore[no-untyped-call]
        each = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return {key: max(found[key] for found in each) for key in each[0]}


def main(arguments: list[str] | None = None) -> dict[str, Any] | None:
    """Print the table and write its numbers."""
    parser = Parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default: all")
    parser.option("ranks", [1, 2, 4], "numbers of processes")
    parser.option("examples", 2048, "training examples, upper parameters")
    parser.option("width", 512, "width of the network")
    parser.option("tasks", 100_000, "tasks of the cases with rows")
    parser.option("repeats", 3, "timed steps")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse(arguments)
    if args.one:
        print(json.dumps(largest(args.cases[0], args.ranks[0], args)))
        return None
    sizes = [f"--{name}={getattr(args, name)}" for name in ("examples", "width", "tasks", "repeats")]
    found: dict[str, Any] = {}
    for case in args.cases:
        for world in args.ranks:
            figures = alone("recipes.benchmarks.ranks", "--one", "--cases", case, "--ranks", world, *sizes)
            found[f"{case}, {world}"] = {"case": case, "ranks": world} | (
                {"error": figures} if isinstance(figures, str) else figures
            )
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    keys = ("ranks", "seconds", "peak", "state", "bytes", "needed", "error")
    header = ["case", "ranks", "s (median)", "MiB at peak", "MiB of state", "bytes", "bytes needed", ""]
    show("A step on several ranks", header, [[row["case"], *map(row.get, keys)] for row in found.values()])
    return save(args, args.out / "ranks", {"results": found})


if __name__ == "__main__":
    main()

"""The ranks of a process group: means, sums, and values on which all ranks must agree."""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankError
from ..problem.random import derive_generator
from ..problem.vector import Vector, is_sharded
from ..pytree import tree_map

if dist.is_available():
    # Default arguments of its functions keep the default group, and its threads, if it exists before this import, which
    # optimizers and compilers make sooner or later.
    import torch.distributed.nn.functional

__all__ = ["Ranks", "text_of"]


class Ranks:
    """The processes that share a run; without a group there is one process, and nothing is exchanged.

    Args:
        group: a ``torch.distributed`` process group. Default: None, this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise ValueError(
                f"Invalid process_group value: {group} (pass torch.distributed.group.WORLD, or a group that this "
                "process is in)"
            )
        # A weak reference: `destroy_process_group` ends the group's threads only if nothing else refers to it, and a
        # thread that still runs when Python exits aborts the process with "terminate called".
        self._group = None if group is None else weakref.ref(group)
        self.alone = group is None

    @property
    def group(self) -> Any:
        """The process group; None without one."""
        if self._group is None:
            return None
        if (group := self._group()) is None:
            raise RuntimeError(
                "the process_group of this optimizer has been destroyed (destroy_process_group), but its steps need "
                "it; destroy it after the last step"
            )
        return group

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def mean(self, *results: Any) -> tuple[Any, ...]:
        """Return the mean over the ranks of tensors and vectors (sharded tensors are means already)."""
        if self.alone:
            return results
        groups = [[t for t in (r if isinstance(r, Vector) else (r,)) if not is_sharded(t)] for r in results]
        tensors = [t for group in groups for t in group]
        if not tensors:
            return results
        flat = torch.cat([t.reshape(-1).to(torch.promote_types(t.dtype, torch.float32)) for t in tensors])
        exchange(self.group, "sum", flat)
        parts = iter((flat / self.world).split([t.numel() for t in tensors]))  # type: ignore[no-untyped-call]
        found: list[Tensor] = []
        for group in groups:
            # A small view that outlives the step (the loss, a hypergradient) would keep the whole tensor in memory.
            small = 2 * sum([t.numel() for t in group]) < len(flat)
            own = [part.clone() if small else part for part in islice(parts, len(group))]
            found += [part.view_as(t).to(t.dtype) for part, t in zip(own, group, strict=True)]
        means = iter(found)
        return tuple(
            Vector(t if is_sharded(t) else next(means) for t in result) if isinstance(result, Vector) else next(means)
            for result in results
        )

    def total(self, *results: Any) -> tuple[Any, ...]:
        """Return the sum over the ranks of tensors and vectors."""
        return results if self.group is None else self.mean(*(r * self.world for r in results))

    def broadcast_number(self, number: int, device: torch.device | str = "cpu") -> int:
        """Return the first rank's number."""
        if self.group is None:
            return number
        return int(exchange(self.group, "first", torch.tensor([number], device=device)))

    def differing(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of tensors whose bits differ between ranks (shards are not compared)."""
        if self.group is None:
            return []
        marks = [torch.zeros((), dtype=torch.int64, device="cpu") if is_sharded(t) else _mark(t) for t in tensors]
        own = torch.stack([mark.to(tensors[0].device) for mark in marks])
        sums = exchange(self.group, "sum", torch.cat([own, own * own])).tolist()
        pairs = zip(sums[: len(own)], sums[len(own) :], strict=True)
        return [i for i, (total, squares) in enumerate(pairs) if total * total != self.world * squares]

    def begin(self, options: Mapping[str, str], known: bool) -> bool:
        """Begin a step on all ranks; return True if every rank knows that all began with the same parameters.

        One exchange of three numbers, whatever the options are.

        Args:
            options: texts of the options of a step, by name.
            known: True if this rank knows it.

        Raises:
            RankError: if another rank is gone.
            ValueError: on all ranks, if their options are not the same.
        """
        if self.group is None:
            return known
        text = json.dumps(options, sort_keys=True)
        number = zlib.crc32(text.encode()) & 0xFFFFFF  # 24 bits, whose squares can be summed
        own = torch.tensor([int(not known), number, number * number], device=_device_of(self.group))
        unknown, total, squares = exchange(self.group, "sum", own).tolist()
        if total * total != self.world * squares:
            raise ValueError(_refusal([json.loads(one) for one in self._gathered(text)]))
        return not unknown

    def _gathered(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        own, device = text.encode(), _device_of(self.group)
        sizes = torch.zeros(self.world, dtype=torch.int64, device=device)
        sizes[self.rank] = len(own)
        counts = exchange(self.group, "sum", sizes).tolist()
        table = torch.zeros(self.world, max(counts), dtype=torch.uint8, device=device)
        table[self.rank, : len(own)] = torch.tensor([*own], dtype=torch.uint8, device=device)
        exchange(self.group, "sum", table.view(-1))
        return [bytes(row[:count]).decode() for row, count in zip(table.tolist(), counts, strict=True)]

    def copy_from_first(self, vector: Vector) -> Vector:
        """Write the first rank's vector into this one, and return it."""
        if self.group is not None:
            for t in vector:
                t.copy_(exchange(self.group, "first", t.reshape(-1).clone()).view_as(t))
        return vector

    def conclude(self, device: torch.device, flag: bool) -> bool:
        """End a step on all ranks or on none; return True if the flag is up on any of them.

        Args:
            device: device of the step.
            flag: flag of this rank.

        Raises:
            RankError: if another rank is gone.
        """
        if self.group is None:
            return flag
        return bool(exchange(self.group, "sum", torch.tensor([int(flag)], device=device)).item())

    def share(self, tasks: Any, count: int) -> tuple[Any, int]:
        """Return this rank's part of drawn tasks, and their number."""
        if self.world == 1:
            return tasks, count
        if count < self.world:  # state of x advances with the tasks, equally on every rank
            raise ValueError(
                f"{count} tasks cannot be shared by {self.world} ranks, because each rank needs at least one; use more "
                "tasks in a step (tasks_per_step=), or fewer processes"
            )
        part = slice(self.rank, count, self.world)
        return tree_map(lambda t: t[part] if isinstance(t, Tensor) else t, tasks), len(range(count)[part])

    def derive_task_generator(self, generator: torch.Generator | None, *numbers: int) -> torch.Generator | None:
        """Return a generator for this rank's task data, so that the ranks' common generators stay equal."""
        return generator if self.world == 1 else derive_generator(generator, self.rank, *numbers)

    def place(self, index: int) -> int:
        """Return the index, among all drawn tasks, of the task with this index in this rank's part."""
        return self.rank + self.world * index


def exchange(group: Any, kind: str, flat: Tensor) -> Tensor:
    """Write the sum over the ranks (``"sum"``), or the first rank's values (``"first"``), into a flat tensor.

    Raises:
        RankError: if another rank is gone.
    """
    try:
        dist.all_reduce(flat, group=group) if kind == "sum" else dist.broadcast(flat, group=group, group_src=0)
    except RuntimeError as error:
        raise RankError(
            f"a rank is gone: {error}. The step cannot be completed; look for a process that ended or lost its "
            "connection"
        ) from error
    return flat


def text_of(value: Any) -> str:
    """Return an option as text, equal on all ranks for equal options; functions and other objects give their type."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{text_of(name)}: {text_of(v)}' for name, v in value.items()))}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def _refusal(ranks: Sequence[Mapping[str, str]]) -> str:
    """Return the message about options, by name, that differ between ranks."""
    first, names = ranks[0], sorted({name for options in ranks for name in options})
    differing = {name: [options.get(name) for options in ranks] for name in names}
    differing = {name: values for name, values in differing.items() if len({*values}) > 1}
    if "method" in differing:  # then all others differ too
        differing = {"method": differing["method"]}
    said = []
    for name, values in differing.items():
        if any(name.endswith(f" of {other}") for other in differing):  # an option of something that itself differs
            continue
        rank = next(rank for rank, value in enumerate(values) if value != first.get(name))
        said.append(f"{name} ({_shortened(values[0])} on rank 0, {_shortened(values[rank])} on rank {rank})")
    return (
        f"the ranks of process_group have different options: {', '.join(said)}; their steps would differ, so use the "
        "same options on all ranks, and change learning rates on all of them in the same way"
    )


def _shortened(text: str | None) -> str:
    return "none" if text is None else text if len(text) <= 40 else f"{text[:37]}..."


def _device_of(group: Any) -> torch.device:
    """Return a device of a group's exchanges: the CPU, if the group has it."""
    devices = [pair.partition(":")[0] for pair in str(dist.get_backend_config(group)).split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def _mark(tensor: Tensor) -> Tensor:
    """Return a checksum of 24 bits of a tensor's bits and their positions."""
    words = (
        tensor.detach()
        .reshape(-1)
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64))
    )
    total, piece = torch.zeros((), dtype=torch.int64, device=tensor.device), 2**22
    for start in range(0, len(words), piece):
        some = words[start : start + piece].long()
        place = torch.arange(start, start + len(some), device=some.device)
        mixed = (some ^ (some >> 29)) * (2 * place + 0x9E3779B1)  # modulo 2^64
        total = total + (mixed ^ (mixed >> 31)).sum()
    return (total ^ (total >> 24)) & 0xFFFFFF

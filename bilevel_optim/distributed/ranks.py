"""The ranks of a process group: means, sums, and what all of them must agree on."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..problem.random import apart
from ..problem.vector import Vector, is_sharded
from ..pytree import tree_map
from .failures import exchange, report

__all__ = ["Ranks"]


class Ranks:
    """The processes that share a run; without a group there is one of them, and nothing is exchanged.

    Args:
        group: a ``torch.distributed`` process group. Default: None, this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise ValueError(f"Invalid process_group value: {group}")
        self.group = group

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def mean(self, *results: Any) -> tuple[Any, ...]:
        """Mean over the ranks, of tensors and vectors (sharded tensors have theirs already)."""
        if self.group is None:
            return results
        tensors = [t for r in results for t in (r if isinstance(r, Vector) else (r,)) if not is_sharded(t)]
        if not tensors:
            return results
        flat = torch.cat([t.reshape(-1).to(torch.promote_types(t.dtype, torch.float32)) for t in tensors])
        exchange(self.group, "sum", flat)
        parts = (flat / self.world).split([t.numel() for t in tensors])  # type: ignore[no-untyped-call]
        # A number that is kept, as the loss is, must not keep all the rest with it.
        own = (part.view_as(t) if t.dim() else part[0].clone() for part, t in zip(parts, tensors, strict=True))
        means = iter(part.to(t.dtype) for part, t in zip(own, tensors, strict=True))
        return tuple(
            Vector(t if is_sharded(t) else next(means) for t in result) if isinstance(result, Vector) else next(means)
            for result in results
        )

    def total(self, *results: Any) -> tuple[Any, ...]:
        """Sum over the ranks, of tensors and vectors."""
        return results if self.group is None else self.mean(*(r * self.world for r in results))

    def agreed(self, number: int, device: torch.device | str = "cpu") -> int:
        """The number that the first rank has."""
        if self.group is None:
            return number
        return int(exchange(self.group, "first", torch.tensor([number], device=device)))

    def differing(self, tensors: Sequence[Tensor]) -> list[int]:
        """Which of these tensors do not hold the same bits on all ranks (shards are not looked at)."""
        if self.group is None:
            return []
        marks = [torch.zeros((), dtype=torch.int64, device="cpu") if is_sharded(t) else _mark(t) for t in tensors]
        own = torch.stack([mark.to(tensors[0].device) for mark in marks])
        sums = exchange(self.group, "sum", torch.cat([own, own * own])).tolist()
        pairs = zip(sums[: len(own)], sums[len(own) :], strict=True)
        return [i for i, (total, squares) in enumerate(pairs) if total * total != self.world * squares]

    def require_equal(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError, on all ranks, unless all of them have these options.

        Args:
            options: what decides about a step, by name.
        """
        if self.group is not None and not self._equal(_number(options)):
            self._refuse(options)

    def _equal(self, number: int) -> bool:
        """Whether a number of 24 bits is that of all ranks."""
        own = torch.tensor([number, number * number], device=_device_of(self.group))
        total, squares = exchange(self.group, "sum", own).tolist()
        return bool(total * total == self.world * squares)

    def _refuse(self, options: Mapping[str, Any]) -> None:
        """Say which options are not those of all ranks, each of which has found that some are not."""
        names = sorted(options)
        differing = ["the methods, or the parameter groups"]
        if self._equal(_number(names)):
            differing = [name for name in names if not self._equal(_number(options[name]))]
        raise ValueError(
            f"the ranks of process_group have different options: {', '.join(differing)}; each would make steps of its "
            "own, so give all ranks the same, and change learning rates on all of them alike"
        )

    def same(self, vector: Vector) -> Vector:
        """The vector that the first rank has, written into this one."""
        if self.group is not None:
            for t in vector:
                t.copy_(exchange(self.group, "first", t.reshape(-1).clone()).view_as(t))
        return vector

    def conclude(self, device: torch.device, flag: bool, options: Mapping[str, Any]) -> bool:
        """The end of a step, which is one on all ranks or on none; gives whether the flag is up on any of them.

        Args:
            device: of the step.
            flag: what this rank has found.
            options: what decides about a step, by name.

        Raises:
            RankError: if another rank has failed.
            ValueError: if the options are not the same on all ranks.
        """
        if self.group is None:
            return flag
        number = _number(options)
        own = torch.tensor([int(flag), number, number * number], device=device)
        flags, total, squares = exchange(self.group, "sum", own).tolist()
        if total * total != self.world * squares:
            self._refuse(options)
        return bool(flags)

    def failed(self, error: BaseException) -> None:
        """The end of a step on all ranks, because it has failed on this one."""
        if self.group is not None:
            report(self.group, error)

    def share(self, tasks: Any, count: int) -> tuple[Any, int]:
        """This rank's part of drawn tasks, and how many they are."""
        if self.world == 1:
            return tasks, count
        if count < self.world:  # what belongs to x moves on with the tasks, on every rank alike
            raise ValueError(f"{count} tasks cannot be shared by {self.world} ranks, of which each needs at least one")
        part = slice(self.rank, count, self.world)
        return tree_map(lambda t: t[part] if isinstance(t, Tensor) else t, tasks), len(range(count)[part])

    def own(self, generator: torch.Generator | None, *numbers: int) -> torch.Generator | None:
        """Where this rank draws the data of its tasks, so that all ranks' generators go on alike."""
        return generator if self.world == 1 else apart(generator, self.rank, *numbers)

    def place(self, index: int) -> int:
        """Which of all drawn tasks the one of this index in this rank's part is."""
        return self.rank + self.world * index


def _number(value: Any) -> int:
    """A number of 24 bits that follows from a value's text."""
    text = sorted(value.items()) if isinstance(value, Mapping) else value
    return zlib.crc32(repr(text).encode()) & 0xFFFFFF


def _device_of(group: Any) -> torch.device:
    """Where a group's exchanges may be made of which nobody has told the device."""
    return torch.device("cpu") if "gloo" in str(dist.get_backend(group)) else torch.device("cuda")


def _mark(tensor: Tensor, piece: int = 2**22) -> Tensor:
    """A number of 24 bits that follows from a tensor's bits and their places."""
    words = (
        tensor.detach()
        .reshape(-1)
        .view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64))
    )
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), piece):
        some = words[start : start + piece].long()
        place = torch.arange(start, start + len(some), device=some.device)
        mixed = (some ^ (some >> 29)) * (2 * place + 0x9E3779B1)  # modulo 2^64
        total = total + (mixed ^ (mixed >> 31)).sum()
    return (total ^ (total >> 24)) & 0xFFFFFF

"""Sharded parameters: rows split over ranks, and the full parameters in a forward pass of FSDP2."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ..problem.vector import Vector, any_sharded, is_sharded
from .ranks import Ranks

__all__ = ["Gathered", "Split", "require_no_exchange", "sharded_like", "wraps_for_ranks"]


class Split:
    """Rows split over the ranks: tensors (``DTensor``) that are sharded along their first dimension.

    Without sharded tensors this rank has all rows.

    Args:
        tensors: all with a row for each problem.
        ranks: the processes that share the run.

    Attributes:
        total: number of all rows.
        start, count: first row of this rank, and the number of its rows.
    """

    def __init__(self, tensors: Sequence[Tensor], ranks: Ranks) -> None:
        self.total = len(tensors[0]) if tensors[0].dim() else 1
        self.start, self.count, self._mesh = 0, self.total, None
        if not any_sharded(tensors):
            return
        from torch.distributed.tensor import DTensor, Shard

        sharded = [t for t in tensors if isinstance(t, DTensor)]
        self._mesh = sharded[0].device_mesh
        if len(sharded) < len(tensors) or any(
            (t.device_mesh, t.placements) != (self._mesh, (Shard(0),)) for t in sharded
        ):
            found = [str(t.placements) if isinstance(t, DTensor) else "not sharded" for t in tensors]
            raise ValueError(
                "rows can be split along their first dimension only, all lower parameters over one mesh, but their "
                f"placements are {', '.join(found)}; use distribute_tensor(rows, mesh, [Shard(0)])"
            )
        if ranks.world != self._mesh.size():
            raise ValueError(
                f"the rows of y are split over {self._mesh.size()} ranks, but the optimizer runs on {ranks.world}; "
                "pass process_group=mesh.get_group()"
            )
        size = -(-self.total // ranks.world)
        if size * (ranks.world - 1) >= self.total:
            raise ValueError(
                f"{self.total} rows cannot be split over {ranks.world} ranks, because each needs at least one and "
                f"Shard(0) gives the first ranks {size} each; use more rows, or fewer processes"
            )
        self.start = size * ranks.rank
        self.count = min(size, self.total - self.start)

    def __bool__(self) -> bool:
        return self._mesh is not None

    @staticmethod
    def local(t: Tensor) -> Tensor:
        """Return this rank's rows, in the tensor's own memory."""
        return t.detach().to_local() if is_sharded(t) else t  # type: ignore[attr-defined]

    def from_local(self, rows: Tensor) -> Tensor:
        """Return the sharded tensor that has these rows on this rank."""
        if self._mesh is None:
            return rows
        from torch.distributed.tensor import DTensor, Shard

        rows = rows.contiguous()
        shape = torch.Size((self.total, *rows.shape[1:]))
        return DTensor.from_local(rows, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=rows.stride())

    def local_positions(self, ids: Tensor) -> Tensor:
        """Return the positions in ``ids`` of the rows that this rank has."""
        return ((ids >= self.start) & (ids < self.start + self.count)).nonzero().flatten()


class Gathered:
    """FSDP modules that a loss calls, and their gathered parameters.

    FSDP does not gather parameters again before they have been dropped, so a module that keeps them would continue
    with the values of another point. They are dropped before each evaluation, and at the end of a step.

    Attributes:
        spans_ranks: whether a module that a loss has called is split over several processes.
    """

    def __init__(self) -> None:
        self.spans_ranks = False
        self._modules: list[Any] = []
        self._full: dict[int, Tensor] = {}

    @contextmanager
    def watching(self) -> Generator[None]:
        """Evaluate inside the block at the current values of the shards, and record the full parameters."""
        from torch.distributed.fsdp import FSDPModule  # takes longer to import than all of this package

        sites: dict[nn.Module, list[tuple[nn.Module, str, Tensor]]] = {}
        self._full = {}

        def before(module: nn.Module, _: Any) -> None:
            if isinstance(module, FSDPModule) and module not in sites:
                module.reshard()
                sites[module] = [
                    (part, name, parameter)
                    for part in module.modules()
                    for name, parameter in part.named_parameters(recurse=False)
                    if is_sharded(parameter)
                ]
                meshes = [parameter.device_mesh for *_, parameter in sites[module]]  # type: ignore[attr-defined]
                self.spans_ranks = self.spans_ranks or any(mesh.size() > 1 for mesh in meshes)
                if not any(module is known for known in self._modules):
                    self._modules.append(module)

        def after(module: nn.Module, *_: Any) -> None:  # before FSDP's own hook, which may drop them
            for part, name, parameter in sites.get(module, ()):
                full = getattr(part, name)
                if not is_sharded(full):
                    self._full[id(parameter)] = full

        handles = register_module_forward_pre_hook(before), register_module_forward_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def full(self, parameters: Sequence[Tensor]) -> Vector:
        """Return the full parameters of the last evaluation; unsharded ones as they are."""
        return Vector(self._full.get(id(p), p) for p in parameters)

    def require_kept(self) -> None:
        """Raise if the full parameters have been dropped although more derivatives are needed."""
        if any(not full.untyped_storage().size() for full in self._full.values()):
            raise RuntimeError(
                "second derivatives need the full parameters after a backward pass, but the sharded module has dropped "
                "them: call module.set_reshard_after_backward(False), or use a method of first derivatives (F2SA), or "
                "hvp='finite-difference'"
            )

    def release(self) -> None:
        """Drop the gathered parameters."""
        for module in self._modules:
            module.reshard()
        self._full = {}

    @staticmethod
    def gathered(vector: Sequence[Tensor], like: Sequence[Tensor]) -> Vector:
        """Return a vector in full, for derivatives in the full parameters ``like``."""
        return Vector(
            v.full_tensor() if is_sharded(v) and not is_sharded(full) else v  # type: ignore[attr-defined]
            for v, full in zip(vector, like, strict=True)
        )

    @staticmethod
    def scattered(results: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the mean over ranks of derivatives in full parameters, as shards; each rank has its own data."""
        from torch.distributed.tensor import DTensor, Partial

        return [
            DTensor.from_local(t.to(p.dtype), p.device_mesh, [Partial()] * p.device_mesh.ndim).redistribute(
                placements=p.placements
            )
            / p.device_mesh.size()
            if t is not None and isinstance(p, DTensor) and not is_sharded(t)
            else t
            for t, p in zip(results, like, strict=True)
        ]


def sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor that every rank has as ``like`` is sharded; no communication."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(mesh, like.placements)  # type: ignore[attr-defined]


def require_no_exchange(module: nn.Module) -> None:
    """Raise if a wrapper exchanges buffers in every forward pass: ranks may make different numbers of passes."""
    if not isinstance(module, DistributedDataParallel) or not (module.broadcast_buffers and module.modules_buffers):
        return
    if dist.get_world_size(module.process_group) > 1:
        raise ValueError(
            "DistributedDataParallel exchanges the buffers of its module (BatchNorm) in every forward pass, but the "
            "ranks of a step may make different numbers of passes, and would then wait for each other: create it with "
            "forward_sync_buffers=False (in older versions of torch broadcast_buffers=False), or call its .module in "
            "the losses"
        )


def wraps_for_ranks(modules: Iterable[nn.Module]) -> bool:
    """Return True if a module is a `DistributedDataParallel` of several processes."""
    return any(isinstance(m, DistributedDataParallel) and dist.get_world_size(m.process_group) > 1 for m in modules)

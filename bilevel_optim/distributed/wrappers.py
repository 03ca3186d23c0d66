"""Modules that communicate in a forward pass, which a step cannot allow."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["require_no_exchange"]


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

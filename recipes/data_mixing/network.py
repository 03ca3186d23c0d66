"""Small character transformer in plain torch, of several sizes, in one process or over ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..common.seeds import begin
from .texts import VOCABULARY

__all__ = ["SIZES", "Ranks", "Transformer", "mean_over", "network", "ranks_of", "shared"]

# Dimensions and training settings by approximate number of parameters.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 48, "layers": 1, "heads": 2, "length": 32, "batch": 32, "lower_lr": 1e-2},
    "1m": {"width": 144, "layers": 4, "heads": 4, "length": 128, "batch": 32, "lower_lr": 3e-3},
    "3m": {"width": 240, "layers": 4, "heads": 4, "length": 128, "batch": 32, "lower_lr": 2e-3},
    "10m": {"width": 384, "layers": 6, "heads": 6, "length": 256, "batch": 32, "lower_lr": 1e-3},
    "30m": {"width": 560, "layers": 8, "heads": 8, "length": 256, "batch": 32, "lower_lr": 6e-4},
    "100m": {"width": 768, "layers": 14, "heads": 12, "length": 256, "batch": 32, "lower_lr": 4e-4},
}
NEAR = 4  # characters embedded together


class Ranks(NamedTuple):
    """Rank of this process, number of ranks, process group and device."""

    rank: int = 0
    world: int = 1
    group: Any = None
    device: str = "cpu"


def ranks_of(device: str) -> Ranks:
    """Return the ranks that torchrun has started; without it, a single rank."""
    if "WORLD_SIZE" not in os.environ:
        return Ranks(device=device)
    if device != "cpu":
        device = f"{device}:{os.environ['LOCAL_RANK']}"
        torch.get_device_module(device).set_device(device)
    if not dist.is_initialized():
        dist.init_process_group()  # gloo for CPU tensors, NCCL for CUDA tensors
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, device)


def shared(batch: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's part of a batch that all ranks have drawn, split along dimension -2."""
    if batch.shape[-2] % ranks.world:
        raise SystemExit(f"{batch.shape[-2]} windows cannot be shared by {ranks.world} ranks: choose another --batch")
    return batch[..., ranks.rank :: ranks.world, :].to(ranks.device)


def mean_over(ranks: Ranks, value: Tensor) -> Tensor:
    """Return the mean over the ranks."""
    if ranks.group is not None:
        dist.all_reduce(value, group=ranks.group)
        value = value / ranks.world
    return value


class Block(nn.Module):
    """Causal attention, then an MLP for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.gather = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.attend(self.before(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gather(seen.transpose(1, 2).reshape(n, length, width))
        y: Tensor = x + self.narrow(F.gelu(self.widen(self.between(x))))
        return y


class Transformer(nn.Module):
    """Decoder that predicts the next character.

    Args:
        width, layers, heads: dimensions of the blocks.
        length: maximal number of input characters.
        vocabulary: number of characters. Default: `VOCABULARY`.
    """

    def __init__(self, width: int, layers: int, heads: int, length: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        # Embeds each character with those before it; attention would take most of a short run to learn this.
        self.embeddings = nn.ModuleList(nn.Embedding(vocabulary, width) for _ in range(NEAR))
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def scores(self, given: Tensor) -> Tensor:
        """Return the scores of the next character after each given one."""
        x = self.place[: given.shape[1]].expand(*given.shape, -1)
        for k, embedding in enumerate(self.embeddings):
            x = x + F.pad(embedding(given[:, : given.shape[1] - k]), (0, 0, k, 0))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.last(x))
        return found

    def forward(self, characters: Tensor) -> Tensor:
        """Return the mean cross-entropy of each sequence, in nats per predicted character."""
        scores = self.scores(characters[:, :-1])
        losses = F.cross_entropy(scores.flatten(0, 1), characters[:, 1:].flatten(), reduction="none")
        return losses.view(len(characters), -1).mean(1)


def network(args: Any, seed: int, ranks: Ranks, *, keep: bool = False, replicate: bool = False) -> nn.Module:
    """Return a new model, the same on all ranks or with a shard on each.

    Args:
        args: ``scale`` and ``length``; ``parallel``, ``"fsdp"`` to shard it.
        seed: seed of its parameters.
        ranks: ranks that hold it.
        keep: keep full parameters for second derivatives (FSDP2).
        replicate: wrap it for a training loop that calls ``backward`` itself (DDP).
    """
    size = SIZES[args.scale]
    begin(seed, "start")
    model: nn.Module = Transformer(size["width"], size["layers"], size["heads"], args.length).to(ranks.device)
    if ranks.group is None:
        return model
    if args.parallel == "fsdp":
        parts: Sequence[nn.Module] = [*model.blocks, model]  # type: ignore[misc]
        mesh = DeviceMesh(ranks.device.split(":")[0], [*range(ranks.world)])
        for part in parts:
            sharded = fully_shard(part, mesh=mesh)
            if keep:
                sharded.set_reshard_after_backward(False)
    elif replicate:
        return DistributedDataParallel(model)
    return model

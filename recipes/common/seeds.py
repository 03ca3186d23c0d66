"""Seeds of random streams: one for each name, so that no two streams of a run draw the same numbers."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["begin", "derived", "stream"]


def derived(seed: int, name: str) -> int:
    """Seed of the stream of this name: for ``"data"`` that of the run, and for any other a hash of both.

    Two generators with one seed draw the same numbers: a network of a learner that is drawn from the seed of the data
    starts as the network that made the data.
    """
    if name == "data":
        return seed
    return int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "big") >> 1


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator of the stream of this name."""
    return torch.Generator(device).manual_seed(derived(seed, name))


def begin(seed: int, name: str) -> None:
    """Let torch's own generator, of which modules draw their weights, begin the stream of this name."""
    torch.manual_seed(derived(seed, name))

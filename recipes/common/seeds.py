"""Seeds of random streams: one for each name, so that no two streams of a run draw the same numbers."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["begin", "derived", "stream"]


def derived(seed: int, name: str) -> int:
    """Return the seed of the named stream: the run's own for ``"data"``, otherwise a hash of seed and name.

    Two generators with the same seed draw the same numbers: a learner's network drawn with the seed of the data would
    start as the network that generated the data.
    """
    if name == "data":
        return seed
    return int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "big") >> 1


def stream(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator for the named stream."""
    return torch.Generator(device).manual_seed(derived(seed, name))


def begin(seed: int, name: str) -> None:
    """Start the named stream in torch's global generator, from which modules draw their weights."""
    torch.manual_seed(derived(seed, name))

"""Protection of random states that a tool must not advance."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch

from ..problem.random import preserve_rng

__all__ = ["numbers_kept"]


@contextmanager
def numbers_kept(device: torch.device) -> Generator[None]:
    """Restore torch's, Python's and NumPy's random states after the block."""
    numpy = sys.modules.get("numpy")
    pythons, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with preserve_rng(device):
            yield
    finally:
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(arrays)

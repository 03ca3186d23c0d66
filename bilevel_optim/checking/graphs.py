"""Memory of autograd's graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["largest_graph"]


def largest_graph(function: Callable[[], Any]) -> float | None:
    """Return the most memory in MiB that graphs hold at once while a function runs; None if it cannot be measured."""
    references: Counter[int] = Counter()
    now = most = 0

    class SavedTensor:
        """A tensor that a graph has saved."""

        def __init__(self, t: Tensor) -> None:
            nonlocal now, most
            self.tensor, storage = t, t.untyped_storage()
            self.place, self.size = storage.data_ptr(), storage.nbytes()
            now += self.size if not references[self.place] else 0
            references[self.place] += 1
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            references[self.place] -= 1
            now -= self.size if not references[self.place] else 0

    try:
        with torch.autograd.graph.saved_tensors_hooks(SavedTensor, lambda kept: kept.tensor):
            function()
    except (RuntimeError, NotImplementedError):
        return None
    return most / 2**20

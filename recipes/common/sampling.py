"""Losses of the indices of examples, as objectives that count what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from .seeds import stream

__all__ = ["IndexBatches", "IndexObjective", "IndexTerms"]


class IndexBatches:
    """Batches of indices, a new random order in every pass; what does not fill a batch is left out of the pass.

    Args:
        size: number of examples; the largest size of a batch.
        batch: size of a batch.
        seed: of the orders.
        tasks: makes batches of shape (tasks, batch), drawn with replacement, an independent sample for each task.
            Default: one sample, without this dimension.
    """

    def __init__(self, size: int, batch: int, seed: int, tasks: int | None = None) -> None:
        self.size, self.batch, self.tasks = size, min(batch, size), tasks
        self.generator = stream(seed, "batches")
        self.drawn = 0  # examples so far

    def __iter__(self) -> Iterator[Tensor]:
        if self.tasks is not None:
            for _ in range(self.size // self.batch):
                self.drawn += self.tasks * self.batch
                yield torch.randint(self.size, (self.tasks, self.batch), generator=self.generator)
            return
        order = torch.randperm(self.size, generator=self.generator)
        for index in order[: self.size // self.batch * self.batch].view(-1, self.batch):
            self.drawn += self.batch
            yield index


class IndexObjective(bo.Objective):
    """A loss of indices, on `IndexBatches`."""

    def __init__(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> None:
        self.batches = IndexBatches(size, batch, seed, tasks)
        super().__init__(loss, self.batches)

    @property
    def drawn(self) -> int:
        """Examples so far."""
        return self.batches.drawn


class IndexTerms(bo.FiniteSum):
    """A loss of indices as a finite sum of fixed batches, in a random order, for methods with a memory of every term.

    Args:
        loss: called with the indices of a batch.
        size: number of examples; the largest size of a batch.
        batch: size of a batch; about so, if it does not divide ``size``.
        seed: of the order and of the draws.
        tasks: how many samples a batch counts for. Default: 1.
    """

    def __init__(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> None:
        generator = stream(seed, "batches")
        order = torch.randperm(size, generator=generator)
        super().__init__(loss, order, min(batch, size), generator=generator)
        self.count, self.drawn = tasks or 1, 0

    def term(self, index: int, *, once: bool = False) -> Any:
        """The sample of one term, counted."""
        sample = super().term(index, once=once)
        self.drawn += self.count * len(sample.batch)
        return sample

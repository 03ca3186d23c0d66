"""Objectives that pass indices of examples to their loss, and count the examples drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from .seeds import stream

__all__ = ["IndexBatches", "IndexObjective", "IndexTerms"]


class IndexBatches:
    """Batches of indices in a new random order in every pass; a pass drops its last incomplete batch.

    Args:
        size: number of examples; batches are not larger.
        batch: batch size.
        seed: seed of the orders.
        tasks: number of tasks; batches then have shape (tasks, batch), drawn with replacement, independently for each
            task. Default: None, batches of shape (batch,).
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
    """Objective of a loss of indices, on `IndexBatches`."""

    def __init__(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> None:
        self.batches = IndexBatches(size, batch, seed, tasks)
        super().__init__(loss, self.batches)

    @property
    def drawn(self) -> int:
        """Number of examples drawn so far."""
        return self.batches.drawn


class IndexTerms(bo.FiniteSum):
    """Finite sum of a loss of indices over fixed batches, in a random order, for methods that store every term.

    Args:
        loss: called with the indices of a batch.
        size: number of examples; batches are not larger.
        batch: batch size; approximate if it does not divide ``size``.
        seed: seed of the order and of the draws.
        tasks: number of samples that a batch counts as. Default: 1.
    """

    def __init__(
        self, loss: Callable[[Tensor], Tensor], size: int, batch: int, seed: int, tasks: int | None = None
    ) -> None:
        generator = stream(seed, "batches")
        order = torch.randperm(size, generator=generator)
        super().__init__(loss, order, min(batch, size), generator=generator)
        self.count, self.drawn = tasks or 1, 0

    def term(self, index: int, *, once: bool = False) -> Any:
        """Return the sample of one term, and count its examples."""
        sample = super().term(index, once=once)
        self.drawn += self.count * len(sample.batch)
        return sample

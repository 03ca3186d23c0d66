"""A loss over fixed batches that have an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pytree import tree_leaves, tree_map
from .objective import Objective, Sample, require_state
from .parameters import is_count, require
from .random import device_of

__all__ = ["FiniteSum", "random_term", "term_count"]

KEPT = 4096  # most views of terms that are kept

GENERATOR = "Invalid {name} value: {value} (pass a torch.Generator, or None for torch's default one)"
BATCH_SIZE = "Invalid {name} value: {value} (an integer number of rows, at least 1)"
BATCHES = "Invalid {name} value: {value} (leave it out: the entries of a list are the batches)"


class FiniteSum(Objective):
    r"""A loss that is the mean of n terms, each the loss on one fixed batch; a draw gives a random term and its index.

    Methods with a memory for every term need it (`SABA`). The terms are drawn uniformly, with replacement.

    Args:
        loss: callable that takes a batch and returns the mean over its rows.
        data: a tensor, or a tuple or dict (a pytree) of tensors with the same leading dimension: its blocks of
            ``batch_size`` rows are the batches. Or a list of any batches. (Consecutive rows share a block: shuffle
            sorted data first.)
        batch_size: rows of a batch; not for a list. If it does not divide the number of rows, batches differ by one
            row, and the terms have weights such that their mean is the mean over the rows. Default: 1.
        generator: source of the draws. Default: torch's default one.
        features: as for `Objective`.

    Raises:
        ValueError: if the tensors differ in their leading dimension or are empty.

    Example:
        >>> import torch
        >>> y = torch.zeros(1, requires_grad=True)
        >>> g = FiniteSum(lambda batch: (y - batch).square().mean(), torch.arange(6.0), batch_size=2)
        >>> len(g), g.term(1).batch, g.term(1).index
        (3, tensor([2., 3.]), 1)

    To resume a run bit for bit, save :meth:`state_dict` with the optimizer's (and torch's random state, if there is
    no ``generator``).
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        data: Any,
        batch_size: int | None = None,
        *,
        generator: torch.Generator | None = None,
        features: Callable[..., Any] | None = None,
    ) -> None:
        require("generator", generator, generator is None or isinstance(generator, torch.Generator), GENERATOR)
        require("batch_size", batch_size, batch_size is None or (is_count(batch_size) and batch_size > 0), BATCH_SIZE)
        self.generator = generator
        if isinstance(data, list):
            require("batch_size", batch_size, batch_size is None, BATCHES)
            self._rows = self._count = len(data)
        else:
            leaves = tree_leaves(data)
            if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
                raise ValueError(
                    "the data of a FiniteSum must be tensors with a leading dimension, or a list of batches, but are "
                    f"{[tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]}; "
                    "pass stacked tensors, or list(loader)"
                )
            if len({len(leaf) for leaf in leaves}) > 1:
                raise ValueError(
                    "the data of a FiniteSum must have the same number of rows in every tensor, but have "
                    f"{sorted({len(leaf) for leaf in leaves})}; pass one row of each tensor for every example"
                )
            self._rows = len(leaves[0])
            self._count = -(-self._rows // (batch_size or 1))
        if not self._count:
            raise ValueError(
                "the data of a FiniteSum are empty, so there is no term to draw; pass at least one row or batch"
            )
        super().__init__(loss, data if isinstance(data, list) else (), features=features)
        self.data: Any = data
        self._batches: dict[int, Any] = {}
        self._seen: list[Any] = []  # the tensors that these are views of
        self._leaves: Sequence[Any] = ()

    def __len__(self) -> int:
        return self._count

    @property
    def terms(self) -> int:
        return self._count

    def draw(self, *, once: bool = False) -> Sample:
        """Return a random term."""
        return self.term(int(self.indices()), once=once)

    def indices(self, *count: int) -> Tensor:
        """Draw the indices of random terms: one, or ``count`` in one tensor, which are as many single draws."""
        return torch.randint(self._count, count, generator=self.generator, device=device_of(self.generator))

    def term(self, index: int, *, once: bool = False) -> Sample:
        """Return the sample of one term.

        Raises:
            IndexError: if there is no term of this index.
        """
        if not 0 <= index < self._count:
            raise IndexError(f"there is no term {index}: those of this FiniteSum are numbered 0 to {self._count - 1}")
        sample = self.sample(*self.batches([index]), once=once)
        weight = self.weight(index)
        if weight is not None:
            loss = self.loss
            sample.loss, sample.weight = lambda *arguments: loss(*arguments) * weight, weight
        sample.index = index
        return sample

    def batches(self, indices: Sequence[int]) -> list[Any]:
        """Return the batches of terms: views of the data, kept for later calls while the data are the same."""
        data = self.data
        if isinstance(data, list):
            return [data[i] for i in indices]
        leaves = data if type(data) is tuple else tree_leaves(data)
        kept = not any([type(t) is not Tensor or t.requires_grad for t in leaves])
        now = [(id(t), t.data_ptr(), t.shape, t.stride(), t.dtype) for t in leaves] if kept else []
        if not kept or now != self._seen:
            self._seen, self._batches, self._leaves = now, {}, leaves
        found = self._batches
        if len(found) + len(indices) > KEPT:
            found.clear()
        for i in indices:
            if i not in found:
                start, stop = self._bounds(i)
                found[i] = tree_map(lambda t, start=start, stop=stop: t[start:stop], data)
        return [found[i] for i in indices]

    def weight(self, index: int) -> float | None:
        """Return the weight of one term; None if all terms have as many rows."""
        if isinstance(self.data, list) or not self._rows % self._count:
            return None
        start, stop = self._bounds(index)
        return (stop - start) * self._count / self._rows

    def _bounds(self, index: int) -> tuple[int, int]:
        return index * self._rows // self._count, (index + 1) * self._rows // self._count

    def samples(self, most: int | None = None) -> list[Sample]:
        """Return the samples of all terms, whatever ``most`` is."""
        return [self.term(i) for i in range(len(self))]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator, if there is one."""
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: if the state is not that of a `FiniteSum` with such a generator.
        """
        if self.generator is not None:
            require_state(state, "a FiniteSum with a generator", generator=Tensor)
            self.generator.set_state(state["generator"].cpu())

    def mark(self) -> dict[str, Any]:
        return self.state_dict()

    def rewind(self, mark: dict[str, Any]) -> None:
        self.load_state_dict(mark)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_batches": {}, "_seen": [], "_leaves": ()}

    def __repr__(self) -> str:
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return f"FiniteSum({name}, {self._count} terms)"


def term_count(objective: Objective, level: str) -> int:
    """Return the number of terms of a finite sum (1 for a loss without data); raise for other objectives."""
    if objective.terms is not None:
        return objective.terms
    raise ValueError(
        f"the {level} loss draws batches without an index (its data are a {type(objective.data).__name__}), but this "
        "method finds each batch by its index: pass bo.FiniteSum(loss, data, batch_size) instead of an Objective"
    )


def random_term(objective: Objective, agreed: Callable[[int], int]) -> tuple[int | Tensor, Sample]:
    """Return index and sample of a random term, the same on all ranks: ``agreed`` returns the first rank's index.

    An index that is a tensor, because it was drawn for a graph, is left as it is.
    """
    sample = objective.draw()
    own = 0 if sample.index is None else sample.index
    if isinstance(own, Tensor):
        return own, sample
    index = agreed(own)
    return index, sample if index == own else objective.term(index)

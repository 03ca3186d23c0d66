"""Samples that were drawn before a step, passed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem.objective import Objective, Sample
from ..problem.tasks import StandIn
from .draws import Sources

__all__ = ["GivenData", "Recorded"]

OTHERS = (
    "a step draws other samples than an earlier step of the same kind, or than _draws of your method declares, "
    "so its graph has no inputs for them"
)


class GivenData:
    """Samples for a step, by source, each in the order of its draws.

    Args:
        drawn: source -> its samples.
        losses: the user's functions, by role.
        sources: an eager step draws from them if it needs more than it has declared (after an alert).
            Default: the step is traced, and may not draw.
    """

    def __init__(
        self,
        drawn: Mapping[str, Sequence[Any]],
        losses: Mapping[str, Callable[..., Any]],
        sources: Sources | None = None,
    ) -> None:
        self._left = {source: [*found] for source, found in drawn.items()}
        self._losses, self._sources = losses, sources

    def objective(self, level: str) -> _Given | None:
        """Return the objective of a level; None if the method has none."""
        if level not in self._losses:
            return None
        return _Given(level, self, self._losses, None if self._sources is None else self._sources.objectives[level])

    def sampler(self, source: Any) -> _GivenTasks:
        """Return a task sampler that gives the drawn tasks."""
        return _GivenTasks(source, self, traced=self._sources is None)

    def next(self, source: str) -> Any:
        """Return the next sample of a source."""
        left = self._left.get(source)
        if not left:
            raise RuntimeError(OTHERS)
        return left.pop(0)

    def has(self, source: str) -> bool:
        """Return True if samples of a source are left."""
        return len(self._left.get(source, ())) > 0

    def require_used(self) -> None:
        """Raise if samples are left."""
        if any(self._left.values()):
            raise RuntimeError(OTHERS)


class _Given(Objective):
    """An objective whose samples were drawn before the step; an eager step may draw more from the ``source``."""

    def __init__(
        self, level: str, given: GivenData, losses: Mapping[str, Callable[..., Any]], source: Objective | None
    ) -> None:
        self.loss, self.features = losses[level], losses.get(f"{level} features")
        self.device, self.data = None, None if source is None else source.data
        self.accumulate, self.level = 1, level
        self._given, self._source, self._features = given, source, None
        self._terms: Any = losses.get(f"{level} terms")

    @property
    def terms(self) -> int | None:
        return self._terms  # type: ignore[no-any-return]

    def begin(self) -> None:
        super().begin()
        if self._source is not None:
            self._source.begin()

    def mark(self) -> dict[str, Any]:
        return {}  # `CompiledSteps` rewinds the source

    def rewind(self, mark: dict[str, Any]) -> None:
        return None

    def draw(self, *, once: bool = False) -> Sample:
        if self._source is not None and not self._given.has(self.level):
            return self._source.draw(once=once)
        drawn = self._given.next(self.level)
        arguments, index, weight = drawn if len(drawn) == 3 else (drawn, None, None)
        return self._again(arguments, index, weight, once)

    def draw_some(self, name: str, count: Tensor, most: int) -> list[Sample]:
        if self._source is None:
            return [self.draw() for _ in range(most + 1)]
        if not self._given.has(self.level):
            return self._source.draw_some(name, count, most)
        return [self.draw() for _ in range(most + 1)][: int(count) + 1]

    def samples(self, most: int | None = None) -> list[Sample]:
        if self._given.has(f"all of {self.level}"):
            terms = self._given.next(f"all of {self.level}")
            return [self._again(arguments, index, weight, False) for index, (arguments, weight) in enumerate(terms)]
        return [self.sample()] if self._source is None else self._source.samples(most)

    def sample(self, *arguments: Any, once: bool = False) -> Sample:
        if self._source is None:
            return Sample(self.loss, arguments, once=once, features=self.features)
        return super().sample(*arguments, once=once)

    def term(self, index: int, *, once: bool = False) -> Sample:
        return super().term(index, once=once) if self._source is None else self._source.term(index, once=once)

    def _again(self, arguments: Any, index: Any, weight: Any, once: bool) -> Sample:
        sample = self.sample(*arguments, once=once)
        sample.index = index
        if weight is not None:
            sample.loss, sample.weight = _weighted(sample.loss, weight), weight
        return sample


def _weighted(loss: Callable[..., Any], weight: Tensor) -> Callable[..., Any]:
    def weighted(*arguments: Any) -> Any:
        value = loss(*arguments)
        kind = torch.promote_types(value.dtype, torch.float32)  # in which torch multiplies by a number
        return (value.to(kind) * weight.to(kind)).to(value.dtype)

    return weighted


class _GivenTasks(StandIn):
    """A sampler whose tasks and batches were drawn before the step; an eager step may draw more from the source."""

    def __init__(self, source: Any, given: GivenData, traced: bool) -> None:
        super().__init__(source)
        self._given, self._traced = given, traced

    def sample(self, n: int, generator: Any) -> Any:
        return self._given.next("tasks") if self._gives("tasks") else super().sample(n, generator)

    def lower(self, tasks: Any, n: Any, generator: Any) -> Any:
        name = "tasks.lower"
        return self._given.next(name) if self._gives(name) else super().lower(tasks, n, generator)

    def upper(self, tasks: Any, n: Any, generator: Any) -> Any:
        name = "tasks.upper"
        return self._given.next(name) if self._gives(name) else super().upper(tasks, n, generator)

    def whole(self, draw: Any, inputs: Any) -> Any:
        return self._given.next("whole")

    def _gives(self, source: str) -> bool:
        return self._traced or self._given.has(source)


class Recorded(StandIn):
    """A sampler that records how a method that chooses its own tasks draws all that a step needs.

    Attributes:
        draws: that function, of the sampler and the random inputs; None if the method did not use it.
    """

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.draws: Callable[[Any, Mapping[str, Tensor]], Any] | None = None

    def whole(self, draw: Any, inputs: Any) -> Any:
        self.draws = draw
        return draw(self.source, inputs)

"""Objectives and samplers that give what was drawn before the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..problem.objective import Objective, Sample
from ..problem.tasks import StandIn

__all__ = ["GivenData"]


class GivenData:
    """What a step was given, source by source, each in the order of its draws.

    Args:
        drawn: pairs of a source and what was drawn from it.
        losses: the user's functions, by role.
    """

    def __init__(self, drawn: Mapping[str, Sequence[Any]], losses: Mapping[str, Callable[..., Any]]) -> None:
        self._left = {source: [*found] for source, found in drawn.items()}
        self._losses = losses

    def objective(self, level: str) -> _Given | None:
        """The objective of a level; None if the method has none."""
        return _Given(level, self, self._losses) if level in self._losses else None

    def sampler(self, source: Any) -> _GivenTasks:
        """In place of a sampler of tasks."""
        return _GivenTasks(source, self)

    def next(self, source: str) -> Any:
        """What was drawn from a source next."""
        left = self._left.get(source)
        if not left:
            raise RuntimeError("a step draws other samples than the one before that was like it")
        return left.pop(0)

    def has(self, source: str) -> bool:
        """Whether something is left of it."""
        return bool(self._left.get(source))

    def require_used(self) -> None:
        """Raise unless everything was asked for."""
        if any([bool(found) for found in self._left.values()]):
            raise RuntimeError("a step draws other samples than the one before that was like it")


class _Given(Objective):
    """An objective whose samples were drawn before the step."""

    def __init__(self, level: str, given: GivenData, losses: Mapping[str, Callable[..., Any]]) -> None:
        self.loss, self.features = losses[level], losses.get(f"{level} features")
        self.data = self.device = None
        self.accumulate, self.level, self._given = 1, level, given
        self._terms: Any = losses.get(f"{level} terms")

    @property
    def terms(self) -> int | None:
        return self._terms  # type: ignore[no-any-return]

    def begin(self) -> None:
        return None

    def draw(self, *, once: bool = False) -> Sample:
        arguments, index, weight = self._given.next(self.level)
        return self._again(arguments, index, weight, once)

    def draw_some(self, name: str, count: Tensor, most: int) -> list[Sample]:
        return [self.draw() for _ in range(most + 1)]

    def samples(self, most: int | None = None) -> list[Sample]:
        if not self._given.has(f"all of {self.level}"):
            return [self.sample()]
        terms = self._given.next(f"all of {self.level}")
        return [self._again(arguments, index, weight, False) for index, (arguments, weight) in enumerate(terms)]

    def sample(self, *arguments: Any, once: bool = False) -> Sample:
        return Sample(self.loss, arguments, once=once, features=self.features)

    def _again(self, arguments: Any, index: Any, weight: Any, once: bool) -> Sample:
        sample = self.sample(*arguments, once=once)
        sample.index = index
        if weight is not None:
            sample.loss, sample.weight = _weighted(sample.loss, weight), weight
        return sample


def _weighted(loss: Callable[..., Any], weight: Tensor) -> Callable[..., Any]:
    def weighted(*arguments: Any) -> Any:
        value = loss(*arguments)
        return value * weight.to(value.dtype)

    return weighted


class _GivenTasks(StandIn):
    """A sampler whose tasks and batches were drawn before the step."""

    def __init__(self, source: Any, given: GivenData) -> None:
        self.source, self._given = source, given

    def sample(self, n: int, generator: Any) -> Any:
        return self._given.next("tasks")

    def lower(self, tasks: Any, n: Any, generator: Any) -> Any:
        return self._given.next("tasks.lower")

    def upper(self, tasks: Any, n: Any, generator: Any) -> Any:
        return self._given.next("tasks.upper")

    def whole(self, draw: Any, inputs: Any) -> Any:
        return self._given.next("whole")

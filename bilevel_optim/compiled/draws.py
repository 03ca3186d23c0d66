"""Samples of a step, drawn before it and passed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor

from ..optimizer.step import Draw, TaskDraw
from ..problem.finite_sum import FiniteSum
from ..problem.objective import Loss, Objective, Sample, as_objective
from ..problem.tasks import StandIn
from .forms import structure_of

__all__ = [
    "MOST_TERMS", "Drawn", "GivenData", "Plan", "Recorded", "Sources", "draw", "draw_many", "draw_tasks", "in_a_row",
]  # fmt: skip

MOST_TERMS = 64  # most terms of a finite sum in a compiled step
Drawn = dict[str, list[Any]]  # source -> its samples, in order: arguments, or arguments, index and weight


class SourceKind:
    """Properties that a step's sources share with those of others, without a reference to losses or data.

    Args:
        sources: the sources.
        types: types and sizes on which the rest depends.

    Attributes:
        key: cache key for the kinds of a step's draws.
        terms: number of terms of each loss that is a finite sum.
        draw_in_order: whether each loss draws the next batches of a list, or nothing: without random numbers.
        are_lists: whether each loss draws from its own list or finite sum, so that nothing depends on the time of a
            draw.
        why_eager: why steps with these losses are not compiled; empty if they may be.
    """

    def __init__(self, sources: Sources, types: list[Any]) -> None:
        self.types, losses, alone = types, sources.objectives.values(), sources.tasks is None
        self.terms = {f"{level}_terms": o.terms for level, o in sources.objectives.items() if o.terms is not None}
        self.key = [alone] + [
            None if o is None else (type(o), o.data is None, o.features is None, o.terms)
            for o in (sources.upper, sources.lower)
        ]
        self.draw_in_order = alone and all([type(o) is Objective and type(o.data) in _LISTS for o in losses])
        self.are_lists = alone and sources.upper is not sources.lower and all(map(_is_list, losses))
        self.why_eager = "" if all([o.accumulate == 1 for o in losses]) else ACCUMULATES


class Sources:
    """Sources of a step's samples: the two losses as they were passed, and a task sampler.

    Args:
        upper, lower, tasks: the sources.
        last: kind of those of the step before, which most steps share.

    Attributes:
        objectives: the losses by level.
        kind: their kind.
    """

    __slots__ = ("kind", "lower", "objectives", "tasks", "upper")

    def __init__(
        self, upper: Objective | None, lower: Objective | None, tasks: Any, last: SourceKind | None = None
    ) -> None:
        self.upper, self.lower, self.tasks = upper, lower, tasks
        self.objectives: dict[str, Objective] = {}
        types: list[Any] = [tasks is None, upper is lower]
        for level, o in (("upper", upper), ("lower", lower)):
            if o is not None:
                self.objectives[level] = o
                types += level, type(o), type(o.data), o.features is None, o.terms, o.accumulate
        self.kind = last if last is not None and last.types == types else SourceKind(self, types)

    @classmethod
    def of(cls, upper: Loss | None, lower: Loss | None, tasks: Any, last: SourceKind | None = None) -> Self:
        """Return the sources of a step with these arguments."""
        f = None if upper is None else as_objective(upper, "upper")
        return cls(f, None if lower is None else as_objective(lower, "lower"), tasks, last)

    @property
    def code(self) -> tuple[Any, ...]:
        """Cache key for losses that may be new objects at each step."""
        functions = (f for o in self.objectives.values() for f in (o.loss, o.features))
        return tuple([getattr(function, "__code__", None) or type(function) for function in functions])

    @property
    def functions(self) -> dict[str, Any]:
        """The losses and their features, by role, and the number of terms of each loss."""
        found: dict[str, Any] = {}
        for level, objective in self.objectives.items():
            found[level] = objective.loss
            if objective.features is not None:
                found[f"{level} features"] = objective.features
                if hasattr(objective.features, "stacked"):
                    found[f"{level} features stacked"] = objective.features.stacked
            if objective.terms is not None:
                found[f"{level} terms"] = objective.terms
        return found


ACCUMULATES = "an Objective has accumulate > 1, but a compiled step takes a sample as one batch: use larger batches"


def _is_list(objective: Objective) -> bool:
    kind = type(objective)
    return kind is FiniteSum or (kind is Objective and type(objective.data) in _LISTS)


_LISTS = (list, tuple, type(None))


# ------------------------------------------------------------------------------------------------ before a step


def in_a_row(draws: Sequence[Draw]) -> list[tuple[Draw, int]]:
    """Return each declared draw with the number of equal ones in a row."""
    return [(own, len([*same])) for own, same in groupby(draws)]


def draw(draws: Sequence[tuple[Draw, int]], sources: Sources, random: Mapping[str, Tensor]) -> Drawn:
    """Draw the samples of one step from the losses. A draw that is skipped repeats the one before.

    Args:
        draws: the draws that the method has declared, from `in_a_row`.
        sources: the losses.
        random: random inputs of the step.
    """
    found: Drawn = {}
    objectives = sources.objectives
    for (level, whole, only), times in draws:
        if level not in objectives:
            level = "upper"  # the method takes one loss
        objective = objectives[level]
        if whole:
            found.setdefault(f"all of {level}", []).extend(_terms(objective) for _ in range(times))
            continue
        batches = found.setdefault(level, [])
        if only is not None and only[1] > int(random[only[0]]):
            batches += [batches[-1]] * times
        elif type(objective) is not Objective:
            batches += _some(objective, times)
        elif objective.data is None:
            batches += [()] * times
        else:
            batches += zip(objective.take(times))
    return found


class Plan:
    """Draws of a step whose samples are tuples of tensors from lists: the tensors that its graph takes, in order.

    A shortcut, because every step does this: such samples need not be put together and taken apart again.

    Args:
        kind: kind of the sources. The order of draws from others counts.
        drawn: the samples of one step.
        sizes: number of tensors of each sample, by source; 0 for a loss without data.

    Attributes:
        structure: that of the samples, with no random inputs.
    """

    def __init__(self, kind: SourceKind, drawn: Drawn, sizes: Mapping[str, int]) -> None:
        self.kind = kind
        self._sizes = [(source, len(drawn[source]), size) for source, size in sizes.items()]
        self.structure = structure_of((drawn, {}), [])

    @classmethod
    def of(cls, draws: Sequence[tuple[Draw, int]], sources: Sources, drawn: Drawn) -> Self | None:
        """Return the plan for these draws, which have given such samples; None if samples are of another kind."""
        alone = sources.kind.draw_in_order and sources.upper is not sources.lower
        if not alone or any([own.whole or own.only for own, _ in draws]):
            return None
        sizes: dict[str, int] = {}
        for source, samples in drawn.items():
            found = {*map(_size_of, samples)}
            if len(found) > 1 or -1 in found:
                return None
            sizes[source] = found.pop()
        return cls(sources.kind, drawn, sizes)

    def draw(self, sources: Sources) -> tuple[dict[str, list[Any]], list[Tensor] | None]:
        """Draw the batches of a step, by source, and return their tensors too; None if a batch has another form."""
        batches: dict[str, list[Any]] = {}
        tensors: list[Tensor] | None = []
        for source, times, size in self._sizes:
            if not size:
                continue
            batches[source] = taken = sources.objectives[source].take(times)
            for batch in taken:
                if tensors is None or type(batch) is not tuple or len(batch) != size:
                    tensors = None
                else:
                    tensors += batch
        plain = tensors is not None and {*map(type, tensors)} <= {Tensor}
        return batches, tensors if plain else None

    def samples(self, batches: Mapping[str, list[Any]]) -> Drawn:
        """Return the samples of these batches."""
        return {source: [*zip(batches[source])] if size else [()] * times for source, times, size in self._sizes}


def _size_of(sample: Any) -> int:
    """Return the number of tensors of a sample; -1 if it is not one tuple of tensors, or nothing."""
    if not sample:
        return 0
    (batch,) = sample
    return len(batch) if type(batch) is tuple and {*map(type, batch)} == {Tensor} else -1


def draw_many(
    draws: Sequence[tuple[Draw, int]], sources: Sources, count: int
) -> dict[str, tuple[Sequence[Any], Sequence[Tensor]]] | None:
    """Draw the batches of ``count`` steps, by source, without sources that have none; with the indices of terms.

    None if the samples of a step are not the next batches of lists or terms of equal weight.
    """
    order: list[str] = []
    for own, n in draws:
        level = own.level if own.level in sources.objectives else "upper"
        if own.whole or own.only is not None:
            return None
        order += [level] * n
    found: dict[str, tuple[Sequence[Any], Sequence[Tensor]]] = {}
    sums: list[tuple[str, FiniteSum]] = []
    for level in dict.fromkeys(order):
        objective = sources.objectives[level]
        if isinstance(objective, FiniteSum):
            sums.append((level, objective))
        elif type(objective) is not Objective:
            return None
    if any([own.weight(0) is not None for _, own in sums]):
        return None
    together = len({id(own.generator) for _, own in sums}) < len(sums)  # both draw from one stream of random numbers
    if together and len({own.terms for _, own in sums}) > 1:
        return None
    for level in dict.fromkeys(order):
        objective = sources.objectives[level]
        if objective.data is not None and not isinstance(objective, FiniteSum):
            found[level] = objective.take(order.count(level) * count), ()
    if together:
        (_, first), _ = sums
        of_sums = [level for level in order if level in dict(sums)]
        rows = first.indices(count * len(of_sums)).cpu().reshape(count, len(of_sums))
        drawn = {level: rows[:, [k for k, o in enumerate(of_sums) if o == level]].reshape(-1) for level, _ in sums}
    else:
        drawn = {level: own.indices(count * order.count(level)).cpu() for level, own in sums}
    for level, objective in sums:
        found[level] = objective.batches(drawn[level].tolist()), drawn[level].unbind()
    return found


def draw_tasks(draws: Sequence[TaskDraw], sampler: Any, generator: Any, random: Mapping[str, Tensor]) -> Drawn:
    """Draw the tasks of one step and their samples from a task sampler; other arguments as for `draw`."""
    found: Drawn = {}
    for source, size, only in draws:
        given = found.setdefault(source if source == "tasks" else f"tasks.{source}", [])
        if source == "tasks":
            given.append(sampler.sample(size, generator))
        elif only is not None and only[1] > int(random[only[0]]):
            given.append(given[-1])
        else:
            given.append(getattr(sampler, source)(found["tasks"][0], size, generator))
    return found


def _some(objective: Objective, times: int) -> list[Any]:
    """Draw samples with their indices and weights."""
    if type(objective) is not FiniteSum:
        samples = [objective.draw() for _ in range(times)]
        return [(sample.arguments, _tensor(sample.index), _tensor(sample.weight)) for sample in samples]
    indices = objective.indices(times).cpu()
    numbers = indices.tolist()
    return [
        ((batch,), index, _tensor(objective.weight(i)))
        for batch, index, i in zip(objective.batches(numbers), indices.unbind(), numbers, strict=True)
    ]


def _terms(objective: Objective) -> Any:
    if type(objective) is not FiniteSum:
        return [(term.arguments, _tensor(term.weight)) for term in objective.samples()]
    batches = enumerate(objective.batches(range(len(objective))))
    return [((batch,), _tensor(objective.weight(i))) for i, batch in batches]


def _tensor(value: Any) -> Tensor | None:
    return None if value is None else torch.tensor(value, device="cpu")


# ------------------------------------------------------------------------------------------------ in a step

OTHERS = "a step draws other samples than an earlier step of the same kind, so its graph has no inputs for them"


class GivenData:
    """Samples for a step, by source, each in the order of its draws.

    Args:
        drawn: source -> its samples.
        losses: the user's functions, by role.
        sources: an eager step draws from them if it needs more than it has declared (after an alert).
            Default: the step is traced by Dynamo, and may not draw.
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
        if self._sources is None:
            return _Given(level, self, self._losses)
        return _GivenAgain(level, self, self._losses, self._sources.objectives[level])

    def sampler(self, source: Any) -> _GivenTasks:
        """Return a task sampler that gives the drawn tasks."""
        return _GivenTasks(source, self)

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
        if any([len(found) > 0 for found in self._left.values()]):
            raise RuntimeError(OTHERS)

    @property
    def is_eager(self) -> bool:
        """True if the samples are for an eager step."""
        return self._sources is not None


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
        drawn = self._given.next(self.level)
        arguments, index, weight = drawn if len(drawn) == 3 else (drawn, None, None)
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


class _GivenAgain(_Given):
    """Such an objective for an eager step, which may draw more."""

    def __init__(
        self, level: str, given: GivenData, losses: Mapping[str, Callable[..., Any]], source: Objective
    ) -> None:
        super().__init__(level, given, losses)
        self.data, self.source, self._features = source.data, source, None

    def begin(self) -> None:
        Objective.begin(self)
        self.source.begin()

    def mark(self) -> tuple[Any, ...]:
        return ()  # `CompiledSteps` rewinds the source

    def rewind(self, mark: tuple[Any, ...]) -> None:
        return None

    def sample(self, *arguments: Any, once: bool = False) -> Sample:
        return Objective.sample(self, *arguments, once=once)

    def draw(self, *, once: bool = False) -> Sample:
        return super().draw(once=once) if self._given.has(self.level) else self.source.draw(once=once)

    def draw_some(self, name: str, count: Tensor, most: int) -> list[Sample]:
        if not self._given.has(self.level):
            return self.source.draw_some(name, count, most)
        return super().draw_some(name, count, most)[: int(count) + 1]

    def samples(self, most: int | None = None) -> list[Sample]:
        return super().samples(most) if self._given.has(f"all of {self.level}") else self.source.samples(most)

    def term(self, index: int, *, once: bool = False) -> Sample:
        return self.source.term(index, once=once)


def _weighted(loss: Callable[..., Any], weight: Tensor) -> Callable[..., Any]:
    def weighted(*arguments: Any) -> Any:
        value = loss(*arguments)
        return value * weight.to(value.dtype)

    return weighted


class _GivenTasks(StandIn):
    """A sampler whose tasks and batches were drawn before the step."""

    def __init__(self, source: Any, given: GivenData) -> None:
        super().__init__(source)
        self._given = given

    def sample(self, n: int, generator: Any) -> Any:
        return self._given.next("tasks") if self._is_given("tasks") else super().sample(n, generator)

    def lower(self, tasks: Any, n: Any, generator: Any) -> Any:
        name = "tasks.lower"
        return self._given.next(name) if self._is_given(name) else super().lower(tasks, n, generator)

    def upper(self, tasks: Any, n: Any, generator: Any) -> Any:
        name = "tasks.upper"
        return self._given.next(name) if self._is_given(name) else super().upper(tasks, n, generator)

    def whole(self, draw: Any, inputs: Any) -> Any:
        return self._given.next("whole")

    def _is_given(self, source: str) -> bool:
        return not self._given.is_eager or self._given.has(source)


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

"""Samples of a step, drawn before it and passed to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..optimizer.method import Method
from ..optimizer.step import Draw, TaskDraw, replace
from ..problem.finite_sum import FiniteSum
from ..problem.objective import Loss, Objective, as_objective
from ..problem.parameters import by_level
from ..problem.random import device_of
from ..problem.tasks import require_ids
from .forms import structure_of

__all__ = [
    "MOST_TERMS", "Drawn", "Inputs", "Plan", "SourceKind", "Sources",
    "declared", "draw", "draw_many", "draw_tasks", "in_a_row",
]  # fmt: skip

MOST_TERMS = 64  # most terms of a finite sum in a compiled step
Only = tuple[str, int] | None
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

    def __init__(self, upper: Loss | None, lower: Loss | None, tasks: Any, last: SourceKind | None = None) -> None:
        self.upper = None if upper is None else as_objective(upper, "upper")
        self.lower = None if lower is None else as_objective(lower, "lower")
        self.tasks = tasks
        self.objectives: dict[str, Objective] = {}
        types: list[Any] = [tasks is None, self.upper is self.lower]
        for level, o in (("upper", self.upper), ("lower", self.lower)):
            if o is not None:
                self.objectives[level] = o
                types += level, type(o), type(o.data), o.features is None, o.terms, o.accumulate
        self.kind = last if last is not None and last.types == types else SourceKind(self, types)

    def level_of(self, draw: Draw) -> str:
        """Return the level of the loss from which a draw is made; a method may take one loss, for both."""
        return draw.level if draw.level in self.objectives else "upper"

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


def declared(optimizer: Method, sources: Sources) -> tuple[Sequence[Any] | None, str]:
    """Return the draws that the method declares for the next step; None, with the reason, if it cannot."""
    given = optimizer._inputs(
        by_level(optimizer.param_groups), optimizer.parameters("upper"), optimizer.parameters("lower")
    )
    given = replace(given, numbers=given.numbers | sources.kind.terms)
    draws: Sequence[Any] | None
    if sources.tasks is None:
        found = optimizer._draws(given)
        many = any(own.whole for own in found or ()) and max(sources.kind.terms.values(), default=0) > MOST_TERMS
        draws = None if found is None else in_a_row(found)
    else:
        draws, many = optimizer._task_draws(given, sources.tasks), False
    reason = ""
    if draws is None:
        reason = (
            "the number of a step's draws is known only as it runs, but a graph needs its draws in advance: use "
            "lower_tol=0, if it is set; a method of your own has to define _draws"
        )
    elif many:
        reason = (
            f"a step goes over more than {MOST_TERMS} terms of a finite sum, which are all parts of its graph: use "
            "fewer terms (a larger batch_size)"
        )
    return None if reason else draws, reason


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
    for own, times in draws:
        level, (_, whole, only) = sources.level_of(own), own
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
        draws: for each source its draws, each with the random input that decides about it, if any, and the number of
            tensors of a sample; 0 for a loss without data.
        structure: that of the samples, with the random inputs.
    """

    def __init__(self, kind: SourceKind, draws: Mapping[str, tuple[Sequence[Only], int]], structure: Any) -> None:
        self.kind, self.structure = kind, structure
        self._draws = [(source, own, any(own), size) for source, (own, size) in draws.items()]

    @classmethod
    def of(
        cls, draws: Sequence[tuple[Draw, int]], sources: Sources, drawn: Drawn, random: Mapping[str, Tensor]
    ) -> Self | None:
        """Return the plan for these draws, which have given such samples; None if samples are of another kind."""
        if not sources.kind.draw_in_order or sources.upper is sources.lower or any([own.whole for own, _ in draws]):
            return None
        found: dict[str, tuple[Sequence[Only], int]] = {}
        for source, samples in drawn.items():
            sizes = {*map(_size_of, samples)}
            if len(sizes) > 1 or -1 in sizes:
                return None
            own = [draw.only for draw, times in draws for _ in range(times) if sources.level_of(draw) == source]
            found[source] = own, sizes.pop()
        return cls(sources.kind, found, structure_of((drawn, random), []))

    def draw(self, sources: Sources, random: Mapping[str, Tensor]) -> tuple[Drawn, list[Tensor] | None]:
        """Draw the samples of a step, and return their tensors and those of the random inputs too.

        Without the tensors if a sample has another form.
        """
        drawn: Drawn = {}
        tensors: list[Tensor] | None = []
        numbers = {name: [int(value)] for name, value in random.items()} if random else {}
        for source, draws, decided, size in self._draws:
            if not size:
                drawn[source] = [()] * len(draws)
                continue
            objective = sources.objectives[source]
            taken = taken_by(objective, draws, numbers, 1) if decided else objective.take(len(draws))
            drawn[source] = [*zip(taken)]
            for batch in taken:
                if tensors is None or type(batch) is not tuple or len(batch) != size:
                    tensors = None
                else:
                    tensors += batch
        if tensors is None or not {*map(type, tensors)} <= {Tensor}:
            return drawn, None
        tensors += random.values()
        return drawn, tensors


def _size_of(sample: Any) -> int:
    """Return the number of tensors of a sample; -1 if it is not one tuple of tensors, or nothing."""
    if not sample:
        return 0
    (batch,) = sample
    return len(batch) if type(batch) is tuple and {*map(type, batch)} == {Tensor} else -1


def draw_many(
    draws: Sequence[tuple[Draw, int]],
    sources: Sources,
    count: int,
    ranges: Mapping[str, int],
    generator: torch.Generator | None,
) -> tuple[dict[str, tuple[Sequence[Any], Sequence[Tensor]]], list[Sequence[Tensor]]] | None:
    """Draw the batches of ``count`` steps, by source, with the indices of terms, and random inputs below ``ranges``.

    None, and nothing is drawn, if a step's samples are not the next batches of lists or terms of equal weight, or if
    its random inputs cannot be drawn at once.
    """
    order: list[tuple[str, Only]] = []
    for own, n in draws:
        if own.whole:
            return None
        order += [(sources.level_of(own), own.only)] * n
    levels = [level for level, _ in order]
    sums: list[tuple[str, FiniteSum]] = []
    for level in dict.fromkeys(levels):
        objective = sources.objectives[level]
        if isinstance(objective, FiniteSum):
            sums.append((level, objective))
        elif type(objective) is not Objective:
            return None
    if any([own.weight(0) is not None for _, own in sums]):
        return None
    if ranges and (sums or len(ranges) > 1 or device_of(generator).type != "cpu"):
        return None
    together = len({id(own.generator) for _, own in sums}) < len(sums)  # both draw from one stream of random numbers
    if together and len({own.terms for _, own in sums}) > 1:
        return None
    found: dict[str, tuple[Sequence[Any], Sequence[Tensor]]] = {}
    # On a CPU one call gives the numbers of many.
    random = {name: torch.randint(n, (count,), generator=generator, device="cpu") for name, n in ranges.items()}
    numbers = {name: values.tolist() for name, values in random.items()}
    for level in dict.fromkeys(levels):
        objective = sources.objectives[level]
        if objective.data is not None and not isinstance(objective, FiniteSum):
            found[level] = taken_by(objective, [only for own, only in order if own == level], numbers, count), ()
    for some in [sums] if together else [[own] for own in sums]:
        order_of = [level for level in levels if level in dict(some)]
        indices = some[0][1].indices(count * len(order_of)).cpu()
        tensors, plain = indices.unbind(), indices.tolist()
        for level, objective in some:
            at = [k for k, other in enumerate(order_of * count) if other == level]
            found[level] = objective.batches([plain[k] for k in at]), [tensors[k] for k in at]
    return found, [values.unbind() for values in random.values()]


def taken_by(
    objective: Objective, draws: Sequence[Only], numbers: Mapping[str, Sequence[int]], count: int
) -> list[Any]:
    """Return the batches of ``count`` steps with these draws; one that is skipped repeats the one before.

    ``numbers`` are the random inputs of each step.
    """
    if not any(draws):
        return objective.take(len(draws) * count)
    made = [only is None or only[1] <= numbers[only[0]][k] for k in range(count) for only in draws]
    taken, found = iter(objective.take(sum(made))), list[Any]()
    for new in made:
        found.append(next(taken) if new else found[-1])
    return found


def draw_tasks(
    draws: Sequence[TaskDraw], sampler: Any, generator: Any, random: Mapping[str, Tensor], remembered: int | None = None
) -> Drawn:
    """Draw the tasks of one step and their samples from a task sampler; other arguments as for `draw`.

    ``remembered`` is the number of tasks whose solutions are stored, if any, because a graph cannot check their ids.
    """
    found: Drawn = {}
    for source, size, only in draws:
        given = found.setdefault(source if source == "tasks" else f"tasks.{source}", [])
        if source == "tasks":
            given.append(sampler.sample(size, generator))
            if remembered is not None:
                require_ids(given[0], remembered)
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
    """Return an index or a weight as a tensor, in full precision, because the loss may have any type."""
    if value is None:
        return None
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


class Inputs(NamedTuple):
    """Inputs of a step besides the state.

    Attributes:
        sources: the sources of its samples.
        random: random inputs.
        drawn: its samples.
        tensors: tensors of the samples and random inputs, if samples were drawn by a plan and have its form; else None.
    """

    sources: Sources
    random: dict[str, Tensor]
    drawn: Drawn
    tensors: list[Tensor] | None = None

"""What a step draws: recorded, drawn ahead for many steps, and given to a step that is made from it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from ..problem.objective import Objective, Sample
from ..problem.tasks import StandIn, Whole
from .form import Form

__all__ = [
    "Data",
    "Draw",
    "Drawn",
    "Draws",
    "Like",
    "Log",
    "Sources",
    "draw_ahead",
    "flattened",
    "forms_of",
    "versions_of",
]


class Sources(NamedTuple):
    """Where a step draws: the two losses as they were passed, and a sampler of tasks."""

    upper: Objective | None
    lower: Objective | None
    tasks: Any

    @property
    def objectives(self) -> dict[str, Objective]:
        """The losses by level."""
        return {level: o for level, o in (("upper", self.upper), ("lower", self.lower)) if o is not None}

    @property
    def kind(self) -> list[Any]:
        """What decides, beside the losses themselves, which draws a step makes and of which kind."""
        return [
            self.tasks is None,
            *(
                None if o is None else (type(o), o.data is None, o.features is None, o.accumulate, o.terms)
                for o in (self.upper, self.lower)
            ),
        ]

    @property
    def are_lists(self) -> bool:
        """Whether each loss draws from a list of its own, so that nothing can tell when it does."""
        return self.tasks is None and self.upper is not self.lower and all(map(_is_list, self.objectives.values()))

    def recorded(self, log: Log) -> Sources:
        """The same, which note what is drawn."""
        upper, lower = (None if o is None else _Recorded(o, level, log) for o, level in zip(self, LEVELS, strict=False))
        return Sources(upper, lower, None if self.tasks is None else _RecordedTasks(self.tasks, log))

    def replayed(
        self,
        draws: Sequence[Draw],
        drawn: Sequence[Drawn],
        inputs: Mapping[str, Any] | None,
        losses: Mapping[str, Callable[..., Any]] | None = None,
    ) -> Sources:
        """What gives the same again.

        Args:
            draws: of a step.
            drawn: what they gave.
            inputs: the random inputs of that step, which decide which draws it makes; None: all of them.
            losses: what is evaluated in place of the losses and their features, by role. Default: they themselves.
        """
        kept: dict[str, deque[Drawn]] = {}
        for draw, result in zip(draws, drawn, strict=True):
            if inputs is None or draw.is_made(inputs):
                kept.setdefault(draw.source, deque()).append(result)
        upper, lower = (
            None if o is None else _Replayed(o, level, kept.get(level, deque()), losses, inputs is None)
            for o, level in zip(self, LEVELS, strict=False)
        )
        return Sources(upper, lower, None if self.tasks is None else _ReplayedTasks(self.tasks, kept))


LEVELS = ("upper", "lower")


def _is_list(objective: Objective) -> bool:
    kind, data = type(objective), type(objective.data)
    return kind is Objective and objective.accumulate == 1 and data in (list, tuple, type(None))


class Draw(NamedTuple):
    """One draw: from which source, and how.

    Attributes:
        source: ``"upper"`` or ``"lower"``, of the two losses; ``"tasks"``; ``"tasks.upper"`` or ``"tasks.lower"``, for
            the tasks drawn before; ``"whole"``, all that a step draws from the tasks.
        how: whether a sample is evaluated once; or how many are drawn; or the function that draws it all.
        only: name and number: it is made only where the random input of this name is at least the number; otherwise
            what was drawn before stands for it.
    """

    source: str
    how: Any
    only: tuple[str, int] | None = None

    def is_made(self, inputs: Mapping[str, Any]) -> bool:
        """Whether it is, with these random inputs of a step."""
        return self.only is None or self.only[1] <= int(inputs[self.only[0]])


class Drawn(NamedTuple):
    """What a draw gave, as a pytree.

    Attributes:
        data: the arguments of the loss, or what the sampler gave.
        term: index of a term of a finite sum.
        weight: of that term, if the terms are unequal.
    """

    data: Any
    term: Tensor | None = None
    weight: Tensor | None = None


@dataclass
class Log:
    """The draws of a step in their order, what they gave, and why they cannot be made before it, if they cannot.

    Attributes:
        versions: of the tensors when they were drawn.
    """

    draws: list[Draw] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    reason: str = ""
    versions: list[int] = field(default_factory=list)

    def note(self, draw: Draw, result: Drawn) -> None:
        self.draws.append(draw)
        self.drawn.append(result)
        self.versions += versions_of(tree_leaves(result))


def versions_of(values: Iterable[Any]) -> list[int]:
    """How often each of the tensors has been written into."""
    return [0 if t.is_inference() else t._version for t in values if isinstance(t, Tensor)]


class Draws(tuple[Draw, ...]):
    """All draws of a step, in their order."""

    @cached_property
    def runs(self) -> list[tuple[Draw, int]]:
        """Equal draws that follow each other, with their number."""
        return [(draw, len([*same])) for draw, same in groupby(self)]

    def make(self, sources: Sources, generator: torch.Generator | None, inputs: Mapping[str, Any]) -> list[Drawn]:
        """Make those that a step with these random inputs makes."""
        found: list[Drawn] = []
        objectives, tasks, sampled = sources.objectives, sources.tasks, None
        for draw, times in self.runs:
            if not draw.is_made(inputs):
                found += [found[-1]] * times
            elif draw.source in objectives:
                objective = objectives[draw.source]
                if type(objective) is not Objective or objective.accumulate > 1:
                    found += [_drawn(objective.draw(once=draw.how)) for _ in range(times)]
                elif objective.data is None:
                    found += [Drawn(())] * times
                else:
                    found += map(Drawn, zip(objective.take(times), strict=True))
            elif draw.source == "tasks":
                sampled = tasks.sample(draw.how, generator)
                found.append(Drawn(sampled))
            elif draw.source == "whole":
                found.append(Drawn(draw.how(tasks, inputs)))
            else:
                level = getattr(tasks, draw.source.removeprefix("tasks."))
                found += [Drawn(level(sampled, draw.how, generator)) for _ in range(times)]
        return found

    def pattern(self, inputs: Mapping[str, Any]) -> tuple[list[tuple[str, int]], dict[str, int]]:
        """Source and number, among those of its source, of what each draw gives; and how many each source gives."""
        counts = dict.fromkeys((draw.source for draw in self), 0)
        places: list[tuple[str, int]] = []
        for draw in self:
            if draw.is_made(inputs):
                places.append((draw.source, counts[draw.source]))
                counts[draw.source] += 1
            else:
                places.append(places[-1])
        return places, counts


def _drawn(sample: Sample) -> Drawn:
    if sample.index is None:
        return Drawn(sample.arguments)
    weight = None if sample.weight is None else torch.tensor(sample.weight, device="cpu")
    return Drawn(sample.arguments, torch.tensor(sample.index, device="cpu"), weight)


# ------------------------------------------------------------------------------------------------ one step


class _InPlace(Objective):
    """An objective in place of another."""

    def __init__(self, source: Objective, level: str) -> None:
        super().__init__(source.loss, features=source.features)
        self.data, self.source, self.level = source.data, source, level

    @property
    def terms(self) -> int | None:
        return self.source.terms

    def begin(self) -> None:
        super().begin()
        self.source.begin()


class _Recorded(_InPlace):
    """An objective whose draws are noted."""

    def __init__(self, source: Objective, level: str, log: Log) -> None:
        super().__init__(source, level)
        self.log = log

    def mark(self) -> tuple[Any, ...]:
        return self.source.mark()

    def rewind(self, mark: tuple[Any, ...]) -> None:
        self.source.rewind(mark)

    def sample(self, *arguments: Any, once: bool = False) -> Sample:
        return self.source.sample(*arguments, once=once)

    def draw(self, *, once: bool = False) -> Sample:
        return self._noted(once, None)

    def draw_some(self, name: str, count: Tensor, most: int) -> list[Sample]:
        samples = [self._noted(False, (name, k)) for k in range(int(count) + 1)]
        for k in range(len(samples), most + 1):
            self.log.note(Draw(self.level, False, (name, k)), self.log.drawn[-1])
        return samples

    def _noted(self, once: bool, only: tuple[str, int] | None) -> Sample:
        sample = self.source.draw(once=once)
        if sample.parts is not None:
            self.log.reason = "a batch is made of parts (accumulate)"
        self.log.note(Draw(self.level, once, only), _drawn(sample))
        return sample

    def term(self, index: int, *, once: bool = False) -> Sample:
        self.log.reason = "a term of a finite sum is asked for by its number"
        return self.source.term(index, once=once)

    def samples(self, most: int | None = None) -> list[Sample]:
        if self.source.data is not None:
            self.log.reason = "a step goes over all the data"
        return self.source.samples(most)


class _Replayed(_InPlace):
    """An objective whose samples were drawn before; when they are used up, it draws on."""

    def __init__(
        self,
        source: Objective,
        level: str,
        drawn: Iterable[Drawn],
        losses: Mapping[str, Callable[..., Any]] | None,
        padded: bool,
    ) -> None:
        super().__init__(source, level)
        self.drawn, self.padded = deque(drawn), padded
        if losses is not None:
            self.loss, self.features = losses[level], losses.get(f"{level} features")

    def mark(self) -> tuple[Any, ...]:
        return ()  # who has drawn goes back himself

    def rewind(self, mark: tuple[Any, ...]) -> None:
        return None

    def draw(self, *, once: bool = False) -> Sample:
        if not self.drawn:
            return self.source.draw(once=once)
        result = self.drawn.popleft()
        sample = self.sample(*result.data, once=once)
        sample.index = result.term
        if result.weight is not None:
            sample.loss, sample.weight = _weighted(sample.loss, result.weight), result.weight
        return sample

    def draw_some(self, name: str, count: Tensor, most: int) -> list[Sample]:
        return [self.draw() for _ in range((most if self.padded else int(count)) + 1)]

    def samples(self, most: int | None = None) -> list[Sample]:
        return [self.sample()] if self.data is None else self.source.samples(most)


def _weighted(loss: Any, weight: Tensor) -> Any:
    def weighted(*arguments: Any) -> Tensor:
        value: Tensor = loss(*arguments)
        return value * weight.to(value.dtype)

    return weighted


class _RecordedTasks(StandIn):
    """A sampler of tasks whose draws are noted."""

    def __init__(self, source: Any, log: Log) -> None:
        super().__init__(source)
        self.log, self._count = log, 0

    def sample(self, n: int, generator: torch.Generator | None) -> Any:
        if self._count:
            self.log.reason = "a step draws tasks more than once"
        self._count = n
        tasks = self.source.sample(n, generator)
        self.log.note(Draw("tasks", n), Drawn(tasks))
        return tasks

    def lower(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        return self._batch("lower", tasks, n, generator)

    def upper(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        return self._batch("upper", tasks, n, generator)

    def whole(self, draw: Whole, inputs: Mapping[str, Any]) -> Any:
        data = draw(self.source, inputs)
        self.log.note(Draw("whole", draw), Drawn(data))
        return data

    def _batch(self, level: str, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        if not self._count:
            self.log.reason = "the host chooses the tasks of a step"
        elif len(tree_leaves(tasks)[0]) != self._count:
            self.log.reason = "the tasks of a step are solved in several parts"
        batch = getattr(self.source, level)(tasks, n, generator)
        self.log.note(Draw(f"tasks.{level}", n), Drawn(batch))
        return batch


class _ReplayedTasks(StandIn):
    """A sampler of tasks that gives what was drawn before."""

    def __init__(self, source: Any, drawn: dict[str, deque[Drawn]]) -> None:
        super().__init__(source)
        self.drawn = drawn

    def sample(self, n: int, generator: torch.Generator | None) -> Any:
        return self._next("tasks") if self.drawn.get("tasks") else self.source.sample(n, generator)

    def lower(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        return self._next("tasks.lower") if self.drawn.get("tasks.lower") else self.source.lower(tasks, n, generator)

    def upper(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        return self._next("tasks.upper") if self.drawn.get("tasks.upper") else self.source.upper(tasks, n, generator)

    def whole(self, draw: Whole, inputs: Mapping[str, Any]) -> Any:
        return self._next("whole")

    def _next(self, source: str) -> Any:
        return self.drawn[source].popleft().data


# ------------------------------------------------------------------------------------------------ as lists of tensors


class Data(NamedTuple):
    """The tensors of a pytree in the order of torch's ``tree_flatten``, and everything else of it."""

    tensors: list[Tensor]
    constants: list[Any]

    @classmethod
    def of(cls, *parts: Any) -> Data:
        """Those of some parts."""
        data = cls([], [])
        _flatten(parts, *data)
        return data


class Like:
    """What data have in common with others: everything but the tensors' values.

    Args:
        data: the others.

    Attributes:
        width: how many tensors they have.
    """

    def __init__(self, data: Data) -> None:
        self.width = len(data.tensors)
        self._constants, self._types = data.constants, [*map(type, data.constants)]
        self._form = Form(data.tensors)

    def fits(self, data: Data, times: int = 1) -> bool:
        """Whether data have it, or so many of them one after the other."""
        tensors, constants = data
        return (
            [*map(type, constants)] == self._types * times
            and all(map(_same, self._constants * times, constants))
            and self._form.fits(tensors, times)
        )

    def tensors_of(self, parts: Collection[Any]) -> list[Tensor] | None:
        """The tensors of data one after the other, if all of these have it."""
        whole = Data([], [])
        width, others = self.width, len(self._constants)
        for k, part in enumerate(parts, 1):
            _flatten((part,), *whole)
            if len(whole.tensors) != k * width or len(whole.constants) != k * others:
                return None
        return whole.tensors if self.fits(whole, len(parts)) else None

    def has_form(self, tensors: Sequence[Tensor], times: int = 1) -> bool:
        """Whether tensors are of the form, so many times."""
        return self._form.fits(tensors, times)


def _same(value: Any, other: Any) -> bool:
    """Whether two constants, of one type, make the same graph."""
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return bool(value == other) and repr(value) == repr(other) if isinstance(value, float) else bool(value == other)
    if value is other:
        return True
    try:
        return bool(value == other)  # by identity where a class says nothing of equality
    except Exception:  # an array, say, whose equality is not one truth
        return False


def flattened(results: Sequence[Drawn], inputs: Mapping[str, Any]) -> Data:
    """What was drawn, with the random inputs."""
    return Data.of([[data, *other] for data, *other in results], dict(inputs))


_ATOMS = (type(None), int, float, bool, str)


def _flatten(parts: Iterable[Any], tensors: list[Tensor], constants: list[Any]) -> None:
    for part in parts:
        kind = type(part)
        if kind is Tensor or isinstance(part, Tensor):
            tensors.append(part)
        elif kind in _ATOMS:
            constants.append(part)
        elif kind is tuple or kind is list:
            constants += (kind, len(part))
            _flatten(part, tensors, constants)
        elif kind is dict:
            constants.extend(part)
            _flatten(part.values(), tensors, constants)
        else:
            leaves, structure = tree_flatten(part)
            constants.append(structure)
            tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            constants += [leaf for leaf in leaves if not isinstance(leaf, Tensor)]


# ------------------------------------------------------------------------------------------------ many steps


def forms_of(draws: Sequence[Draw], drawn: Sequence[Drawn]) -> dict[str, Like] | None:
    """What the batches of a step have in common, for each loss that draws any; None if they have not."""
    found: dict[str, Like] = {}
    for draw, result in zip(draws, drawn, strict=True):
        if draw.source in LEVELS and result.data:
            known = found.setdefault(draw.source, Like(Data.of(*result.data)))
            if known.tensors_of(result.data) is None:
                return None
    return found


def draw_ahead(
    draws: Draws, known: Mapping[str, Like], sources: Sources, inputs: Mapping[str, Tensor], steps: int
) -> list[list[Tensor]]:
    """Tensors of the data of further steps, as `flattened` gives them, up to the first of another form.

    Args:
        draws: of a step.
        known: the `forms_of` the batches.
        sources: where they are made, which are lists.
        inputs: random inputs of the steps, by name, shape (steps,).
        steps: how many.
    """
    deciding = sorted({draw.only[0] for draw in draws if draw.only is not None})
    keys = [*zip(*(inputs[name].tolist() for name in deciding), strict=True)] if deciding else [()] * steps
    patterns = {key: draws.pattern(dict(zip(deciding, key, strict=True))) for key in {*keys}}
    batches: dict[str, list[list[Tensor]]] = {}
    ends: dict[str, list[int]] = {}
    for source, objective in sources.objectives.items():
        if source not in patterns[keys[0]][1]:
            continue
        if (objective.data is None) is (source in known):
            return []  # there are data no more, or now
        ends[source] = [*accumulate((patterns[key][1][source] for key in keys), initial=0)]
        batches[source] = [[]] * ends[source][-1]
        if objective.data is not None:
            batches[source] = _tensors_of_each(known[source], objective.take(ends[source][-1]))
            steps = min(steps, bisect_right(ends[source], len(batches[source])) - 1)
    own = [[*column.unbind()] for column in inputs.values()]
    found = []
    for k, key in enumerate(keys[:steps]):
        starts = {source: end[k] for source, end in ends.items()}
        data = [t for source, i in patterns[key][0] for t in batches[source][starts[source] + i]]
        data += [column[k] for column in own]
        found.append(data)
    return found


def _tensors_of_each(like: Like, batches: Sequence[Any]) -> list[list[Tensor]]:
    """The tensors of each batch, up to the first of another form."""
    tensors = like.tensors_of(batches)
    if tensors is None:
        batches = [*takewhile(lambda batch: like.tensors_of([batch]) is not None, batches)]
        tensors = like.tensors_of(batches) or []
    width = like.width
    return [tensors[i * width : (i + 1) * width] for i in range(len(batches))]

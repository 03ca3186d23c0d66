"""What a step draws: recorded, drawn ahead for many steps, and given to a step that is made from it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby, islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from ..problem.finite_sum import FiniteSum
from ..problem.objective import Objective, Sample
from ..problem.random import draw_indices
from ..problem.tasks import StandIn, Whole
from ..problem.tracing import Untraceable
from .form import Form

__all__ = [
    "Batches",
    "Data",
    "Draw",
    "Drawn",
    "Draws",
    "Like",
    "Log",
    "Sources",
    "draw_ahead",
    "draw_numbers",
    "flattened",
    "forms_of",
    "versions_of",
]


class Sources:
    """Where a step draws: the two losses as they were passed, and a sampler of tasks.

    Attributes:
        objectives: the losses by level.
    """

    __slots__ = ("lower", "objectives", "tasks", "upper")

    def __init__(self, upper: Objective | None, lower: Objective | None, tasks: Any) -> None:
        self.upper, self.lower, self.tasks = upper, lower, tasks
        self.objectives = {level: o for level, o in (("upper", upper), ("lower", lower)) if o is not None}

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
    def terms(self) -> dict[str, int]:
        """How many terms each loss has, if it is a sum of known ones."""
        return {f"{level}_terms": o.terms for level, o in self.objectives.items() if o.terms is not None}

    @property
    def are_lists(self) -> bool:
        """Whether each loss draws from a list of its own, or terms of a sum, so that nothing can tell when it does."""
        return self.tasks is None and self.upper is not self.lower and all(map(_is_list, self.objectives.values()))

    def recorded(self, log: Log) -> Sources:
        """The same, which note what is drawn."""
        both = zip((self.upper, self.lower), LEVELS, strict=True)
        upper, lower = (None if o is None else _Recorded(o, level, log) for o, level in both)
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
                kept.setdefault(f"all of {draw.source}" if draw.how == ALL else draw.source, deque()).append(result)
        upper, lower = (
            None if o is None else _Replayed(o, level, kept, losses, inputs is None)
            for o, level in zip((self.upper, self.lower), LEVELS, strict=True)
        )
        return Sources(upper, lower, None if self.tasks is None else _ReplayedTasks(self.tasks, kept))


LEVELS = ("upper", "lower")
ALL = "all"  # how a step draws that goes over all terms of a finite sum
MOST_TERMS = 64  # that a step goes over in a graph


def _is_list(objective: Objective) -> bool:
    kind, data = type(objective), objective.data
    if kind is FiniteSum:
        return type(data) is list or {Tensor} == {*map(type, Data.of(data).tensors)}
    return kind is Objective and objective.accumulate == 1 and type(data) in (list, tuple, type(None))


class Draw(NamedTuple):
    """One draw: from which source, and how.

    Attributes:
        source: ``"upper"`` or ``"lower"``, of the two losses; ``"tasks"``; ``"tasks.upper"`` or ``"tasks.lower"``, for
            the tasks drawn before; ``"whole"``, all that a step draws from the tasks.
        how: whether a sample is evaluated once; or how many are drawn; or the function that draws it all; or ``ALL``,
            every term of a finite sum.
        only: name and number: it is made only where the random input of this name is at least the number; otherwise
            what was drawn before stands for it.
    """

    source: str
    how: Any
    only: tuple[str, int] | None = None

    def arguments(self, drawn: Drawn) -> tuple[Any, ...]:
        """What a loss is evaluated on, once, of what the draw gave."""
        if self.how != ALL:
            return tuple(drawn.data)
        (terms,) = drawn.data
        return tuple(terms[0][0])

    def is_made(self, inputs: Mapping[str, Any]) -> bool:
        """Whether it is, with these random inputs of a step."""
        return self.only is None or self.only[1] <= int(inputs[self.only[0]])


class Drawn(NamedTuple):
    """What a draw gave, as a pytree.

    Attributes:
        data: the arguments of the loss, or what the sampler gave; or one tuple, with the arguments and the weight of
            every term of a finite sum.
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
                if draw.how == ALL:
                    found += [_all_drawn(objective.samples()) for _ in range(times)]
                elif type(objective) is not Objective or objective.accumulate > 1:
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

    def terms(self, sources: Sources) -> list[tuple[int, FiniteSum]]:
        """The draws of a random term, by their number, and of which sum."""
        objectives = sources.objectives
        found = [(i, objectives.get(draw.source)) for i, draw in enumerate(self) if draw.how != ALL]
        return [(i, objective) for i, objective in found if isinstance(objective, FiniteSum)]

    def pattern(self, inputs: Mapping[str, Any]) -> tuple[list[tuple[str, int, int]], dict[str, int]]:
        """What a step with these random inputs draws, and how many draws it makes from each source.

        The former are pieces: a source, and the numbers, among its draws, of the first one and of the one after the
        last.
        """
        counts = dict.fromkeys((draw.source for draw in self), 0)
        pieces: list[tuple[str, int, int]] = []
        before = self[0].source
        for draw in self:
            source, last = (draw.source, counts[draw.source]) if draw.is_made(inputs) else (before, counts[before] - 1)
            counts[source] = last + 1
            if pieces and pieces[-1][::2] == (source, last):
                pieces[-1] = (source, pieces[-1][1], last + 1)
            else:
                pieces.append((source, last, last + 1))
            before = source
        return pieces, counts


def _drawn(sample: Sample) -> Drawn:
    if sample.index is None:
        return Drawn(sample.arguments)
    return Drawn(sample.arguments, torch.tensor(sample.index, device="cpu"), _weight(sample))


def _all_drawn(terms: Sequence[Sample]) -> Drawn:
    return Drawn((tuple((term.arguments, _weight(term)) for term in terms),))


def _weight(sample: Sample) -> Tensor | None:
    return None if sample.weight is None else torch.tensor(sample.weight, device="cpu")


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
        samples, source = self.source.samples(most), self.source
        if not isinstance(source, FiniteSum):
            if source.data is not None:
                self.log.reason = "a step goes over all the data"
        elif len(samples) > MOST_TERMS:
            self.log.reason = (
                f"a step goes over {len(samples)} terms of a finite sum, a graph over at most {MOST_TERMS}"
            )
        elif Like(Data.of(samples[0].arguments)).tensors_of([sample.arguments for sample in samples]) is None:
            self.log.reason = "a step goes over terms of a finite sum that are not alike"
        else:
            self.log.note(Draw(self.level, ALL), _all_drawn(samples))
        return samples


class _Replayed(_InPlace):
    """An objective whose samples were drawn before; when they are used up, it draws on, but in a trace."""

    def __init__(
        self,
        source: Objective,
        level: str,
        drawn: Mapping[str, deque[Drawn]],
        losses: Mapping[str, Callable[..., Any]] | None,
        padded: bool,
    ) -> None:
        super().__init__(source, level)
        self.drawn, self.all = (drawn.get(key, deque()) for key in (level, f"all of {level}"))
        self.padded = padded
        if losses is not None:
            self.loss, self.features = losses[level], losses.get(f"{level} features")

    def mark(self) -> tuple[Any, ...]:
        return ()  # who has drawn goes back himself

    def rewind(self, mark: tuple[Any, ...]) -> None:
        return None

    def draw(self, *, once: bool = False) -> Sample:
        if not self.drawn:
            return self._source().draw(once=once)
        (arguments, term, weight) = self.drawn.popleft()
        return self._again(arguments, term, weight, once=once)

    def draw_some(self, name: str, count: Tensor, most: int) -> list[Sample]:
        return [self.draw() for _ in range((most if self.padded else int(count)) + 1)]

    def term(self, index: int, *, once: bool = False) -> Sample:
        return self._source().term(index, once=once)

    def samples(self, most: int | None = None) -> list[Sample]:
        if self.data is None:
            return [self.sample()]
        if not self.all:
            return self._source().samples(most)
        (terms,) = self.all.popleft().data
        return [self._again(arguments, index, weight) for index, (arguments, weight) in enumerate(terms)]

    def _source(self) -> Objective:
        if self.padded:
            raise Untraceable("a step draws other samples than the one before that was like it")
        return self.source

    def _again(
        self, arguments: tuple[Any, ...], index: int | Tensor | None, weight: Tensor | None, *, once: bool = False
    ) -> Sample:
        sample = self.sample(*arguments, once=once)
        sample.index = index
        if weight is not None:
            sample.loss, sample.weight = _weighted(sample.loss, weight), weight
        return sample


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


_ATOMS = (type(None), int, float, bool, str)


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
        self._plain = {*self._types} <= {*_ATOMS, type} - {float}  # equal if they compare so
        self._form = Form(data.tensors)

    def fits(self, data: Data, times: int = 1) -> bool:
        """Whether data have it, or so many of them one after the other."""
        tensors, constants = data
        expected = self._constants * times
        if [*map(type, constants)] != self._types * times:
            return False
        if constants != expected if self._plain else not all(map(_same, expected, constants)):
            return False
        return self._form.fits(tensors, times)

    def tensors_of(self, parts: Collection[Any]) -> list[Tensor] | None:
        """The tensors of data one after the other, if all of these have it."""
        width, others = self.width, len(self._constants)
        if self._constants in ([tuple, width], [list, width]):  # perhaps all of tensors alone, as common batches are
            pieces = [*chain.from_iterable(parts)] if {*map(type, parts)} == {self._constants[0]} else []
            if {*map(type, pieces)} == {Tensor} and {*map(len, parts)} == {width}:
                return pieces if self.has_form(pieces, len(parts)) else None
        whole = Data([], [])
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
    if value is other:
        return True
    try:
        return bool(value == other) and (not isinstance(value, float) or repr(value) == repr(other))
    except Exception:  # an array, say, whose equality is not one truth
        return False


def flattened(results: Sequence[Drawn], inputs: Mapping[str, Any]) -> Data:
    """What was drawn, with the random inputs; the tensors as torch's ``tree_flatten`` has them."""
    data = Data([], [len(results)])
    for drawn, term, weight in results:
        _flatten(drawn if type(drawn) is tuple else (drawn,), *data)
        if term is not None:
            _flatten((term, weight), *data)
    if inputs:
        _flatten(inputs.values(), *data)
    return data


def _flatten(parts: Iterable[Any], tensors: list[Tensor], constants: list[Any]) -> None:
    for part in parts:
        kind = type(part)
        if kind is Tensor:
            tensors.append(part)
        elif kind is tuple or kind is list:
            constants += (kind, len(part))
            _flatten(part, tensors, constants)
        elif kind in _ATOMS:
            constants.append(part)
        elif isinstance(part, Tensor):
            constants.append(kind)
            tensors.append(part)
        elif kind is dict:
            constants.extend(part)
            _flatten(part.values(), tensors, constants)
        else:
            leaves, structure = tree_flatten(part)
            constants.append(structure)
            tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            constants += [leaf for leaf in leaves if not isinstance(leaf, Tensor)]


# ------------------------------------------------------------------------------------------------ many steps


class Batches:
    """The batches that a loss draws for steps of one graph.

    Args:
        like: what they have in common.
    """

    def __init__(self, like: Like) -> None:
        self._like = like
        self._memory: Any = None
        self._known: dict[int | str, list[Tensor]] = {}

    def take(self, objective: Objective, times: int) -> list[list[Tensor]]:
        """The tensors of the next batches, up to the first of another form."""
        return _tensors_of_each(self._like, objective.take(times))

    def terms(self, objective: FiniteSum, which: Iterable[int | str]) -> list[list[Tensor]]:
        """The tensors of terms, each with its index and weight, or of all terms, up to the first of another form.

        They are made once, as long as the data are the same memory.
        """
        data = objective.data
        tensors = [] if isinstance(data, list) else Data.of(data).tensors
        memory = [(t.data_ptr(), t.size(), t.stride(), t.dtype) for t in tensors]
        if not memory or memory != self._memory:
            self._known.clear()
            self._memory = memory
        found = []
        for i in which:
            term = self._known.get(i) or self._term(objective, i)
            if not term:
                break
            found.append(term)
        return found

    def _term(self, objective: FiniteSum, i: int | str) -> list[Tensor]:
        arguments, *numbers = _all_drawn(objective.samples()) if isinstance(i, str) else _drawn(objective.term(i))
        tensors = self._like.tensors_of(arguments)
        if tensors is None:
            return []
        found = [*tensors, *(number for number in numbers if number is not None)]
        if len(self._known) < KEPT:
            self._known[i] = found
        return found


KEPT = 2**12  # terms of a finite sum


def forms_of(draws: Sequence[Draw], drawn: Sequence[Drawn]) -> dict[str, Batches] | None:
    """The batches of a step, for each loss that draws any; None if they are not alike, or random in their number."""
    found: dict[str, Like] = {}
    for draw, result in zip(draws, drawn, strict=True):
        if draw.source in LEVELS and result.data:
            known = found.setdefault(draw.source, Like(Data.of(*result.data)))
            if known.tensors_of(result.data) is None or (draw.only and result.term is not None):
                return None
    return {source: Batches(like) for source, like in found.items()}


def draw_numbers(wanted: Sequence[tuple[Any, int, torch.Generator | None]], steps: int) -> dict[Any, Tensor]:
    """Numbers that further steps draw, for each key a column.

    Args:
        wanted: in the order of a step the key, of how many numbers one, and the generator.
        steps: how many.
    """
    streams: dict[int, list[tuple[Any, int, torch.Generator | None]]] = {}
    for one in wanted:
        streams.setdefault(id(one[-1] or torch.default_generator), []).append(one)
    found: dict[Any, Tensor] = {}
    for stream in streams.values():
        keys, counts, generators = zip(*stream, strict=True)
        found.update(zip(keys, draw_indices(counts, steps, generators[0]), strict=True))
    return {key: found[key] for key, *_ in wanted}


def draw_ahead(
    draws: Draws, known: Mapping[str, Batches], sources: Sources, numbers: Mapping[Any, Tensor], steps: int
) -> list[Sequence[Tensor]]:
    """Tensors of the data of further steps, as `flattened` gives them, up to the first of another form.

    Args:
        draws: of a step.
        known: the `forms_of` the batches.
        sources: where they are made, which are lists or finite sums.
        numbers: what `draw_numbers` gave, each of shape (steps,): the random inputs by name, and the index of a term by
            the number of its draw.
        steps: how many.
    """
    inputs = {name: column for name, column in numbers.items() if isinstance(name, str)}
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
            if isinstance(objective, FiniteSum):
                columns = [numbers[i].tolist() for i, _ in draws.terms(sources) if draws[i].source == source]
                which = chain.from_iterable(zip(*columns, strict=True)) if columns else [ALL] * ends[source][-1]
                batches[source] = known[source].terms(objective, which)
            else:
                batches[source] = known[source].take(objective, ends[source][-1])
            steps = min(steps, bisect_right(ends[source], len(batches[source])) - 1)
    own: list[Sequence[Tensor]] = [column.unbind() for column in inputs.values()]
    if len(patterns) == 1:  # all steps draw alike, and what is drawn at one place of them is a column
        pieces, counts = patterns[keys[0]]
        places = [(batches[source], k, counts[source]) for source, i, j in pieces for k in range(i, j)]
        drawn = [zip(*made[k::times], strict=True) for made, k, times in places]
        whole: list[Sequence[Tensor]] = [*chain.from_iterable(drawn), *own]
        return [*islice(zip(*whole, strict=False), steps)] if whole else [()] * steps
    found: list[Sequence[Tensor]] = []
    for k, key in enumerate(keys[:steps]):
        starts = {source: end[k] for source, end in ends.items()}
        parts = [batches[source][starts[source] + i : starts[source] + j] for source, i, j in patterns[key][0]]
        data = [*chain.from_iterable(chain.from_iterable(parts))]
        data += [column[k] for column in own]
        found.append(data)
    return found


def _tensors_of_each(like: Like, batches: Sequence[Any]) -> list[list[Tensor]]:
    """The tensors of each batch, up to the first of another form; a batch that comes again is looked at once."""
    width, known = like.width, {id(batch): batch for batch in batches}
    tensors = like.tensors_of(known.values())
    if tensors is None:
        batches = [*takewhile(lambda batch: like.tensors_of([batch]) is not None, batches)]
        known = {id(batch): batch for batch in batches}
        tensors = like.tensors_of(known.values()) or []
    found = {key: tensors[k * width : (k + 1) * width] for k, key in enumerate(known)}
    return [found[id(batch)] for batch in batches]

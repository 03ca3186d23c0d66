"""What a step draws, noted, drawn ahead, and given to a step that is made from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .objective import Objective, Sample
from .tasks import StandIn
from .tracing import traced

__all__ = [
    "Draw",
    "Drawn",
    "Draws",
    "Fed",
    "FedTasks",
    "Log",
    "Noted",
    "NotedTasks",
    "drawn",
    "drawn_at_once",
    "several_of",
]


Whole = Callable[[Any, Mapping[str, Any]], Any]


class Draw(NamedTuple):
    """One draw: from which source, and how.

    Attributes:
        source: ``"upper"`` or ``"lower"``, of the two objectives; ``"tasks"``; ``"tasks.upper"`` or ``"tasks.lower"``,
            for the tasks drawn before; ``"whole"``, all that a step draws from the tasks.
        how: whether an objective's sample is evaluated once; or how many are drawn; or the function that draws it all.
        unless: name and place: it is made only where the input of this name is at least the place, and what was drawn
            before stands in for it otherwise.
    """

    source: str
    how: Any
    unless: tuple[str, int] | None = None

    def made(self, random_inputs: Mapping[str, Any]) -> bool:
        """Whether it is, with these random inputs of a step."""
        return self.unless is None or self.unless[1] <= int(random_inputs[self.unless[0]])


class Run(NamedTuple):
    """Draws of a loss that follow each other: how many, and how often the last one then stands for another."""

    source: str
    made: int
    again: int = 0


class Plan(NamedTuple):
    """What a step draws: in runs, and how often from each source."""

    runs: list[Run]
    counts: dict[str, int]


class Draws(list[Draw]):
    """All draws of a step, in their order."""

    @cached_property
    def runs(self) -> list[tuple[Draw, int]]:
        """Equal draws that follow each other, with their number."""
        return [(draw, len([*same])) for draw, same in groupby(self)]

    def plans(self, random_inputs: Mapping[str, Tensor], steps: int) -> list[Plan]:
        """What so many steps make of them, with random inputs of shape (steps,)."""
        names, known = self._plans
        keys = [*zip(*(random_inputs[name].tolist() for name in names), strict=True)] if names else [()] * steps
        for key in {*keys}.difference(known):
            known[key] = self._plan(dict(zip(names, key, strict=True)))
        return [known[key] for key in keys]

    def _plan(self, random_inputs: Mapping[str, Any]) -> Plan:
        runs: list[Run] = []
        for draw, times in self.runs:
            last = runs[-1] if runs else None
            if last is not None and not draw.made(random_inputs):
                runs[-1] = last._replace(again=last.again + times)
            elif last is not None and draw.source == last.source and not last.again:
                runs[-1] = last._replace(made=last.made + times)
            else:
                runs.append(Run(draw.source, times))
        sources = {draw.source for draw in self}
        return Plan(runs, {s: sum(run.made for run in runs if run.source == s) for s in sources})

    @cached_property
    def _plans(self) -> tuple[list[str], dict[tuple[int, ...], Plan]]:
        """Names of the random inputs that decide, and the plans for those that were met."""
        return sorted({draw.unless[0] for draw in self if draw.unless is not None}), {}


class Drawn(NamedTuple):
    """What a draw gave, as a pytree.

    Attributes:
        data: the arguments of the loss, or what the sampler gave.
        term: index of of a finite sum.
        weight: of that term, if the terms are unequal.
    """

    data: Any
    term: Tensor | None = None
    weight: Tensor | None = None


@dataclass
class Log:
    """The draws of a step in their order, and why they cannot be made ahead, if they cannot."""

    draws: list[Draw]
    drawn: list[Drawn]
    reason: str | None = None

    def note(self, source: str, how: Any, result: Drawn) -> None:
        some = _SOME.get()
        self.draws.append(Draw(source, how, None if some is None else (some.name, some.made)))
        self.drawn.append(result)
        if some is not None:
            some.log, some.made = self, some.made + 1


@dataclass
class _Some:
    """Draws of which there are more or fewer in other steps."""

    name: str
    made: int = 0
    log: Log | None = None


_SOME: ContextVar[_Some | None] = ContextVar("some", default=None)


@contextmanager
def several_of(name: str, count: Tensor, most: int) -> Generator[int]:
    """Gives how many draws to make, and one more: ``count``, an input of this name; the most in a trace."""
    if traced():
        yield most
        return
    some = _Some(name)
    token = _SOME.set(some)
    try:
        number = int(count)
        yield number
        if some.log is not None:
            for _ in range(most - number):
                some.log.note(*some.log.draws[-1][:2], some.log.drawn[-1])
    finally:
        _SOME.reset(token)


class _Standing(Objective):
    """An objective in place of another."""

    def __init__(self, source: Objective, level: str) -> None:
        super().__init__(source.loss, features=source.features)
        self.data, self.source, self.level = source.data, source, level

    @property
    def terms(self) -> int | None:
        return self.source.terms

    def sample(self, *arguments: Any, once: bool = False) -> Sample:
        return self.source.sample(*arguments, once=once)

    def begin(self) -> None:
        self.source.begin()


class Noted(_Standing):
    """An objective whose draws are noted."""

    def mark(self) -> tuple[Any, ...]:
        return self.source.mark()

    def rewind(self, mark: tuple[Any, ...]) -> None:
        self.source.rewind(mark)

    def __init__(self, source: Objective, level: str, log: Log) -> None:
        super().__init__(source, level)
        self.log = log

    def draw(self, *, once: bool = False) -> Sample:
        sample = self.source.draw(once=once)
        if sample.parts is not None:
            self.log.reason = "a batch is made of parts (accumulate)"
        self.log.note(self.level, once, _drawn(sample))
        return sample

    def term(self, index: int, *, once: bool = False) -> Sample:
        self.log.reason = "a term of a finite sum is asked for by its number"
        return self.source.term(index, once=once)

    def samples(self, most: int | None = None) -> list[Sample]:
        if self.source.data is not None:
            self.log.reason = "a step goes over all the data"
        return self.source.samples(most)


class Fed(_Standing):
    """An objective whose samples were drawn before; when they are used up, it draws on."""

    def mark(self) -> tuple[Any, ...]:
        return ()

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Who has drawn goes back himself."""

    def __init__(self, source: Objective, level: str, results: Iterable[Drawn]) -> None:
        super().__init__(source, level)
        self.results = deque(results)

    def draw(self, *, once: bool = False) -> Sample:
        if not self.results:
            return self.source.draw(once=once)
        result = self.results.popleft()
        sample = self.source.sample(*result.data, once=once)
        sample.index = result.term
        if result.weight is not None:
            sample.loss, sample.weight = _weighted(sample.loss, result.weight), result.weight
        return sample

    def samples(self, most: int | None = None) -> list[Sample]:
        return self.source.samples(most)


class NotedTasks(StandIn):
    """A sampler of tasks whose draws are noted."""

    def __init__(self, source: Any, log: Log) -> None:
        super().__init__(source)
        self.log, self._count = log, 0

    def sample(self, n: int, generator: torch.Generator | None) -> Any:
        if self._count:
            self.log.reason = "a step draws tasks more than once"
        self._count = n
        tasks = self.source.sample(n, generator)
        self.log.note("tasks", n, Drawn(tasks))
        return tasks

    def lower(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        return self._batch("lower", tasks, n, generator)

    def upper(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        return self._batch("upper", tasks, n, generator)

    def whole(self, draw: Whole, random_inputs: Mapping[str, Any]) -> Any:
        data = draw(self.source, random_inputs)
        self.log.note("whole", draw, Drawn(data))
        return data

    def _batch(self, level: str, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        if not self._count:
            self.log.reason = "the host chooses the tasks of a step"
        elif len(tree_leaves(tasks)[0]) != self._count:
            self.log.reason = "the tasks of a step are solved in several parts"
        batch = getattr(self.source, level)(tasks, n, generator)
        self.log.note(f"tasks.{level}", n, Drawn(batch))
        return batch


class FedTasks(StandIn):
    """A sampler of tasks that gives what was drawn before."""

    def __init__(self, source: Any, results: dict[str, deque[Drawn]]) -> None:
        super().__init__(source)
        self.results = results

    def sample(self, n: int, generator: torch.Generator | None) -> Any:
        kept = self.results["tasks"]
        return kept.popleft().data if kept else self.source.sample(n, generator)

    def lower(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        kept = self.results["tasks.lower"]
        return kept.popleft().data if kept else self.source.lower(tasks, n, generator)

    def upper(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        kept = self.results["tasks.upper"]
        return kept.popleft().data if kept else self.source.upper(tasks, n, generator)

    def whole(self, draw: Whole, random_inputs: Mapping[str, Any]) -> Any:
        return self.results["whole"].popleft().data


def drawn_at_once(tasks: Any, draw: Whole, random_inputs: Mapping[str, Any]) -> Any:
    """All that a step draws from the tasks, if it is to be known before; else None.

    Args:
        tasks: a sampler, or what stands for it.
        draw: draws it as a pytree, from the sampler and the random inputs of the step alone.
        random_inputs: of the step.
    """
    return tasks.whole(draw, random_inputs) if isinstance(tasks, (NotedTasks, FedTasks)) else None


def drawn(
    draws: Draws,
    upper: Objective | None,
    lower: Objective | None,
    tasks: Any,
    generator: torch.Generator | None,
    random_inputs: Mapping[str, Any],
) -> list[Drawn]:
    """Make these draws, those that a step with such inputs makes."""
    found: list[Drawn] = []
    sampled: Any = None
    objectives = {"upper": upper, "lower": lower}
    for draw, times in draws.runs:
        source, how, unless = draw
        objective = objectives.get(source)
        if unless is not None and not draw.made(random_inputs):
            found.append(found[-1])
        elif objective is not None:
            kind = type(objective)
            if kind.draw is Objective.draw and kind.sample is Objective.sample and objective.accumulate == 1:
                if times == 1 or objective.data is None:
                    found += [Drawn(objective.arguments())] * times
                else:
                    found += map(Drawn, zip(objective.take(times)))
            else:
                found += [_drawn(objective.draw(once=how)) for _ in range(times)]
        elif source == "tasks":
            sampled = tasks.sample(how, generator)
            found.append(Drawn(sampled))
        elif source == "whole":
            found.append(Drawn(how(tasks, random_inputs)))
        else:
            found.append(Drawn(getattr(tasks, source[6:])(sampled, how, generator)))
    return found


def _drawn(sample: Sample) -> Drawn:
    if sample.index is None:
        return Drawn(sample.arguments)
    weight = None if sample.weight is None else torch.tensor(sample.weight)
    return Drawn(sample.arguments, torch.tensor(sample.index), weight)


def _weighted(loss: Any, weight: Tensor) -> Any:
    def weighted(*arguments: Any) -> Tensor:
        value: Tensor = loss(*arguments)
        return value * weight.to(value.dtype)

    return weighted

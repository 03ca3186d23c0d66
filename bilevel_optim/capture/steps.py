"""Captured steps of an optimizer: graphs that are compared with eager steps, now and then, and many steps at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..optimizer.base import BilevelOptimizer, Loss, as_objective
from ..optimizer.checkpoint import OWN
from ..optimizer.step import StepInputs, StepResults
from ..optimizer.transaction import Write, make
from ..oracle.oracle import Oracle
from ..problem.finite_sum import FiniteSum
from ..problem.objective import Objective
from ..problem.random import draw_random_inputs, kept
from ..problem.tasks import select
from ..problem.tracing import Untraceable
from .bind import CHECKED_EVERY, CompiledStep, Slot, Unsettled, difference, shaken
from .cache import FULL, MOST_GRAPHS, PLAIN, CacheEntry, DataForm, Identity, Settings, StepCache
from .draws import Data, Drawn, Draws, Log, Sources, draw_ahead, draw_numbers, flattened, forms_of, versions_of
from .losses import NotNow, Readings, Unreadable
from .step_graph import StepGraph, trace_update, values_of
from .trace import storage_of

__all__ = ["CapturedSteps", "Settings"]

FIRST, AT_RISK = 64, 0.5  # such steps at the beginning; seconds that they may take, all of which an interrupt undoes
NOT_GUARDED = ("params", "lr", "param_names", "initial_lr", OWN)  # of a parameter group; the rates are arguments


class Place(NamedTuple):
    """Marks of the objectives, and states of the optimizer's and of torch's generator, where they matter."""

    marks: list[tuple[Any, ...]]
    own: Tensor | None
    default: Tensor | None


class Drawing:
    """A step whose data have been drawn.

    Args:
        sources: where it draws.
        update: whether it moves x too.
        entry: what is known of steps like it.
        inputs: its random inputs.
        draws: what it draws.
        drawn: what these gave.

    Attributes:
        read: the form of the data and the losses, if these were read.
    """

    def __init__(
        self,
        sources: Sources,
        update: bool,
        entry: CacheEntry,
        inputs: dict[str, Any],
        draws: Draws,
        drawn: Sequence[Drawn],
    ) -> None:
        self.sources, self.update, self.entry, self.inputs = sources, update, entry, inputs
        self.draws, self.drawn = draws, drawn
        self.read: tuple[DataForm, Readings] | None = None

    @cached_property
    def data(self) -> Data:
        """What was drawn, as tensors."""
        return flattened(self.drawn, self.inputs)

    @property
    def replayed(self) -> Sources:
        """What gives the same data again."""
        return self.sources.replayed(self.draws, self.drawn, self.inputs)

    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """Arguments of the losses and their features, by role, such as those of the step: with tasks of the first."""
        found: dict[str, tuple[Any, ...]] = {}
        alone = self.sources.tasks is None
        for level, objective in self.sources.objectives.items():
            if objective.data is None and alone:
                found[level] = ()
        for draw, result in zip(self.draws, self.drawn, strict=True):
            if draw.source in found:
                continue
            if alone:
                found[draw.source] = draw.arguments(result)
            elif draw.source == "tasks":
                found["start"] = (result.data,)
            elif draw.source == "whole":
                found |= {level: (select(batch, 0),) for level, batch in result.data["batches"].items()}
            else:
                found[draw.source.removeprefix("tasks.")] = (select(result.data, 0),)
        return found


class Captured(NamedTuple):
    """A step and its graph, with what this gave for it."""

    compiled: CompiledStep
    readings: Readings
    form: DataForm
    arguments: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
    outputs: Sequence[Tensor]


class Link(NamedTuple):
    """Steps with one graph, which others may follow before anything is written; ``arguments`` of their losses."""

    sources: Sources
    entry: CacheEntry
    form: DataForm
    arguments: dict[str, tuple[Any, ...]]
    readings: Readings
    compiled: CompiledStep

    @property
    def draws(self) -> Draws:
        """What each of the steps draws."""
        assert self.entry.draws is not None
        return self.entry.draws


class Segment(NamedTuple):
    """Steps with one graph that follow each other, with their data, and how often these had been written into."""

    link: Link
    data: list[Sequence[Tensor]]
    versions: list[int]

    @property
    def holds(self) -> bool:
        """Whether the data are still what they were when they were drawn."""
        tensors = [*chain.from_iterable(self.data)]
        return self.versions == versions_of(tensors) and self.link.form.like.has_form(tensors, len(self.data))


class Made(NamedTuple):
    """What a segment gave: losses, flags, the last graph and what it gave; ``follow`` makes its steps with data."""

    segment: Segment
    follow: Callable[[Sequence[Sequence[Tensor]]], tuple[Tensor, Tensor, tuple[CompiledStep, Sequence[Tensor]]]]
    losses: Tensor
    flags: Tensor
    ends: tuple[CompiledStep, Sequence[Tensor]]


class CapturedSteps:
    """Captured steps of an optimizer, and eager ones where they cannot be captured.

    Args:
        optimizer: whose steps they are.
        settings: what `BilevelOptimizer.compile` has been told.
    """

    def __init__(self, optimizer: BilevelOptimizer, settings: Settings) -> None:
        self.optimizer, self.cache = optimizer, StepCache(settings)
        self._most = FIRST  # steps that follow each other before anything is written

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.optimizer, self.cache.settings)  # a copy of an optimizer makes its graphs anew

    @property
    def graphs(self) -> int:
        """How many graphs stand for steps at present."""
        return self.cache.graphs

    def say_why_eager(self) -> None:
        """Say at once if no step of the optimizer can be captured.

        Raises:
            RuntimeError: if all have to be.
        """
        if why := self.optimizer._why_eager():
            self.cache.warn(why)

    def why_update_is_eager(self) -> str:
        """Why the host moves x although the method does not ask for it: its optimizer; empty if it does not."""
        factory = self.optimizer._upper_factory
        try:
            if factory is not None:
                trace_update(factory)
        except Untraceable as error:
            return (
                f"x is moved eagerly, by the hypergradient of the graph: the upper_optimizer cannot be traced ({error})"
            )
        return ""

    # ------------------------------------------------------------------------------------------------ one step

    def step(self, upper: Loss | None, lower: Loss | None, tasks: Any, update: bool) -> Tensor:
        """A step, captured if it can be."""
        sources = _sources(upper, lower, tasks)
        start = self._place(sources)
        try:
            return self._step(sources, update)
        except BaseException:
            self._return_to(sources, start)
            raise

    def _step(self, sources: Sources, update: bool) -> Tensor:
        entry, inputs = self._entry(sources, update), self._random_inputs()
        reason = self._why_eager(entry, sources)
        if entry is None or reason:
            loss = self._eager(sources, update, inputs)
        elif entry.draws is None:
            loss = self._recorded(entry, sources, update, inputs)
            reason = next((form.refused[1] for form in entry.forms), "")
        else:
            drawn = entry.draws.make(sources, self.optimizer.generator, inputs)
            return self._drawn(Drawing(sources, update, entry, inputs, entry.draws, drawn))
        return self._noted(loss, reason or self._why_eager(entry, sources))

    def _noted(self, loss: Tensor, reason: str) -> Tensor:
        if reason:
            self.optimizer.diagnostics["compile_fallback"] = reason
        return loss

    def _entry(self, sources: Sources, update: bool) -> CacheEntry | None:
        """What is known of steps like the next one; None: they are the host's."""
        optimizer = self.optimizer
        if self.cache.reason:
            return None
        if why := optimizer._why_eager(sources.tasks):
            self.cache.warn(why)
            return None
        (key,) = self._keys(sources, 1)
        return None if key is None else self.cache.entry(self._guard(sources, update, key))

    def _keys(self, sources: Sources, steps: int) -> Iterator[Any]:
        """What decides, of the state of the run, which operations each of the next steps is made of."""
        optimizer, known = self.optimizer, self.optimizer.numbers | sources.terms
        now = optimizer._run_state.steps
        return (optimizer._graph_key(k, known) for k in range(now, now + steps))

    def _guard(self, sources: Sources, update: bool, key: Any) -> list[Any]:
        """What decides, beside the losses, which operations a step is made of."""
        own = vars(self.optimizer)
        guard: list[Any] = [update, sources.kind, key, [own[name] for name in self.cache.hyperparameters(own)]]
        for group in self.optimizer.param_groups:
            guard += [
                value if isinstance(value, PLAIN) else Identity(value)
                for name, value in group.items()
                if name not in NOT_GUARDED
            ]
            guard += [(p.requires_grad, bool(p._backward_hooks)) for p in group["params"]]
        return guard

    def _why_eager(self, entry: CacheEntry | None, sources: Sources) -> str:
        """Why such steps run eagerly, if they do; those that the host makes in between are told as the others."""
        entry = entry or next(iter(self.cache.entries), None)
        own = "" if entry is None else entry.reason
        known = self.cache.reason or self.optimizer._why_eager(sources.tasks) or own
        return known or (self.cache.unreadable(self._functions(sources)) if self.cache.some_are_unreadable else "")

    def _random_inputs(self) -> dict[str, Tensor]:
        """What the method draws for a step."""
        optimizer = self.optimizer
        if not optimizer._random_inputs():
            return {}
        agreed = partial(optimizer._oracle_options.ranks.agreed, device=optimizer.param_groups[-1]["params"][0].device)
        return draw_random_inputs(optimizer._random_inputs(), optimizer.generator, agreed)

    def _eager(self, sources: Sources, update: bool, inputs: Mapping[str, Any]) -> Tensor:
        """The step as it would be without a capture."""
        optimizer = self.optimizer
        transaction, oracle, groups = optimizer._open_step(sources.upper, sources.lower)
        with transaction:
            given = optimizer._step_inputs(oracle, groups, inputs)
            results = optimizer._compute(oracle, given, sources.tasks, update=update)
            transaction.conclude()
            transaction.commit(optimizer._step_writes(oracle, results))
        return results.loss

    def _recorded(self, entry: CacheEntry, sources: Sources, update: bool, inputs: dict[str, Any]) -> Tensor:
        """An eager step that shows what such steps draw, in the order in which it and the losses draw.

        It is captured if it is not the first that reads so, or not the first of its run.
        """
        log, at_once = Log(), bool(self.optimizer._run_state.steps) and self.cache.is_familiar

        def find(oracle: Oracle, given: StepInputs) -> Captured | None:
            if log.reason:
                raise Unsettled(log.reason)  # a first step may draw otherwise than all later ones
            drawing = Drawing(sources, update, entry, inputs, Draws(log.draws), log.drawn)
            form, readings = self._read(drawing)
            if log.versions != versions_of(tree_leaves(log.drawn)):
                raise Untraceable("the data write into a batch that was drawn before in the same step")
            again, form.met = form.met == readings.key, readings.key
            if readings.writes:  # what buffers held before the step is not known any more
                entry.draws = drawing.draws
                return None
            if not (again or at_once):
                return None
            entry.draws = drawing.draws
            return self._made(drawing, form, readings, oracle, given)

        return self._beside_eager(sources.recorded(log), entry, update, inputs, find, afterwards=True)

    def _drawn(self, drawing: Drawing) -> Tensor:
        """A step of whose like it is known what they draw."""
        entry, update, inputs, optimizer = drawing.entry, drawing.update, drawing.inputs, self.optimizer
        try:
            form, readings = self._read(drawing)
        except Untraceable as error:
            return self._noted(self._eager(drawing.replayed, update, inputs), self.cache.note(error, entry))
        compiled = form.compiled_for(readings.key, optimizer.state, optimizer.numbers)
        if compiled is None:
            if form.refused[0] == readings.key:
                return self._noted(self._eager(drawing.replayed, update, inputs), form.refused[1])
            if self.cache.graphs >= MOST_GRAPHS:
                self.cache.warn(FULL)
                return self._noted(self._eager(drawing.replayed, update, inputs), FULL)
            if form.met != readings.key:  # perhaps what a loss reads changes at every step
                form.met = readings.key
                return self._eager(drawing.replayed, update, inputs)
            made = partial(self._made, drawing, form, readings)
            loss = self._beside_eager(drawing.replayed, entry, update, inputs, made)
            return self._noted(loss, form.refused[1] or self._why_eager(entry, drawing.sources))
        if compiled.due():

            def find(oracle: Oracle, given: StepInputs) -> Captured:
                return self._ran(compiled, form, readings, drawing.data.tensors)

            loss = self._beside_eager(drawing.replayed, entry, update, inputs, find)
            return self._noted(loss, self._why_eager(entry, drawing.sources))
        outputs = compiled.run(*self._arguments(compiled, readings), drawing.data.tensors)
        if optimizer.check_finite and self._troubled(compiled, outputs):
            return self._eager(drawing.replayed, update, inputs)
        found: Tensor = outputs[compiled.out["loss"]]
        writes = self._writes(compiled, readings, outputs, found)
        if update and optimizer._host_update:
            with torch.no_grad():
                writes += optimizer._update_writes_after(compiled.estimate(outputs), compiled.x, compiled.y)
        make(writes)
        return found

    # ------------------------------------------------------------------------------------------------ graphs

    def _functions(self, sources: Sources) -> dict[str, Callable[..., Any]]:
        """The user's functions that a step evaluates, by role; features before what takes them."""
        found: dict[str, Callable[..., Any]] = {}
        for level, objective in sources.objectives.items():
            if objective.features is not None:
                found[f"{level} features"] = objective.features
            found[level] = objective.loss
        if self.optimizer._limits.projection is not None:
            found["projection"] = self.optimizer._limits.projection
        if sources.tasks is not None and self.optimizer.lower_init is not None:
            found["start"] = self.optimizer.lower_init
        return found

    def _read(self, drawing: Drawing) -> tuple[DataForm, Readings]:
        """The form of the data, and the losses as they were when the step was drawn."""
        if drawing.read is None:
            form = drawing.entry.form(drawing.data)
            drawing.read = form, self._readings(drawing.sources, form, drawing.arguments())
        return drawing.read

    def _readings(self, sources: Sources, form: DataForm, arguments: Mapping[str, tuple[Any, ...]]) -> Readings:
        """The losses as they are now."""
        optimizer, functions = self.optimizer, self._functions(sources)
        x, y = optimizer.parameters("upper"), optimizer.parameters("lower")
        row = sources.tasks is not None and optimizer.declared.tasks == "rows"
        if "projection" in functions:
            arguments = {**arguments, "projection": ([t.detach()[0] if row else t.detach() for t in y],)}
        with optimizer._run_state.buffers.unnoted():  # or a loss would read a hook of the first step
            readings = form.readers.read(x, y, functions, arguments, row=row)
        if readings.writes:
            for role, tensor in readings.written:
                if not optimizer._run_state.buffers.advance(tensor):
                    raise Unreadable("a loss writes into a tensor that is not its own", role, functions[role])
        return readings

    def _made(
        self, drawing: Drawing, form: DataForm, readings: Readings, oracle: Oracle, given: StepInputs
    ) -> Captured:
        """The graph of a step that is to be made, and what it gives."""
        optimizer = self.optimizer
        if optimizer._oracle_options.ranks.group is not None:
            raise Untraceable("ranks exchange results in a step")
        if oracle.sharded:
            raise Untraceable("parameters are sharded")
        if any(p._backward_hooks for p in (*oracle.live_x, *oracle.live_y)):
            raise Untraceable("a parameter has a hook")
        rates = self.cache.rates(optimizer.param_groups, oracle.device)
        arguments = values_of(given, oracle.x, oracle.y, readings.reads, rates, optimizer._estimate_reads)
        arguments["data"] = list(drawing.drawn), drawing.inputs
        update = drawing.update and not optimizer._host_update
        parts = optimizer, oracle, given, drawing.sources, drawing.draws, readings, update, arguments
        try:
            graph = StepGraph(*parts, self.cache.backend)
        except Unsettled:
            raise
        except Untraceable as error:
            form.refused = readings.key, str(error)  # it is tried again when the losses read otherwise
            raise NotNow(str(error)) from error
        form.refused = None, ""
        batches = forms_of(drawing.draws, drawing.drawn)
        compiled = CompiledStep(graph, optimizer.state, oracle.live_x, oracle.live_y, readings.key, batches)
        return self._ran(compiled, form, readings, drawing.data.tensors)

    def _ran(self, compiled: CompiledStep, form: DataForm, readings: Readings, data: Sequence[Tensor]) -> Captured:
        arguments = *self._arguments(compiled, readings), data
        return Captured(compiled, readings, form, arguments, compiled.run(*arguments))

    def _arguments(self, compiled: CompiledStep, readings: Readings) -> tuple[list[Tensor], list[Tensor]]:
        """What a graph gets beside the data: values, and learning rates."""
        values = compiled.arguments(self.optimizer.numbers, readings.reads)
        return values, self.cache.rates(self.optimizer.param_groups, compiled.device)

    def _beside_eager(
        self,
        sources: Sources,
        entry: CacheEntry,
        update: bool,
        inputs: Mapping[str, Any],
        find: Callable[[Oracle, StepInputs], Captured | None],
        *,
        afterwards: bool = False,
    ) -> Tensor:
        """An eager step, but what a graph gave for it is written, if there is one and it agrees.

        Args:
            sources: from which the eager step draws.
            entry: what is known of such steps.
            update: whether it moves x too.
            inputs: its random inputs.
            find: gives the graph and its results, if there are.
            afterwards: ask for them after the eager step, which shows what it draws.
        """
        optimizer, host = self.optimizer, self.optimizer._host_update
        transaction, oracle, groups = optimizer._open_step(sources.upper, sources.lower)
        with transaction:
            given = optimizer._step_inputs(oracle, groups, inputs)
            found = None if afterwards else self._found(entry, find, oracle, given)
            results = optimizer._compute(oracle, given, sources.tasks, update=update and not host)
            transaction.conclude()
            with torch.no_grad():
                found = self._found(entry, find, oracle, given) if afterwards else found
                loss, estimate = results.loss, results.estimate
                if found is None or not self._agrees(found, results):
                    writes = optimizer._step_writes(oracle, results)
                else:
                    compiled, outputs = found.compiled, found.outputs
                    if compiled not in found.form.compiled:
                        found.form.compiled.append(compiled)
                    session = oracle.session
                    loss, estimate = outputs[compiled.out["loss"]], compiled.estimate(outputs)
                    writes = [
                        partial(optimizer._run_state.enter, {"found": session.found, "warned": session.warned}),
                        *self._writes(compiled, found.readings, outputs, loss),
                    ]
                if host and update:
                    writes += optimizer._update_writes_after(estimate, oracle.live_x, oracle.live_y)
            transaction.commit(writes)
        return loss

    def _found(
        self,
        entry: CacheEntry,
        find: Callable[[Oracle, StepInputs], Captured | None],
        oracle: Oracle,
        given: StepInputs,
    ) -> Captured | None:
        """What is found, unless a step cannot be captured."""
        try:
            with torch.no_grad(), kept(oracle.device):  # a trace draws what a dropout would
                return find(oracle, given)
        except Untraceable as error:
            if entry.unsettled or not isinstance(error, Unsettled):
                self.cache.note(error, entry)
            entry.unsettled = True  # the first time what is remembered may not have settled
        except Exception as error:  # of the compiler, or of what it has made
            self.cache.refuse(f"{type(error).__name__}: {error}".splitlines()[0], entry)
        return None

    def _agrees(self, found: Captured, results: StepResults) -> bool:
        """Whether what a graph gave is what an eager step gave; if not, no step is captured any more."""
        optimizer = self.optimizer
        step = optimizer._difference_step
        divisor = 1.0 if step is None else min(getattr(optimizer, step), 1.0)
        accepted = self.cache.settings.rtol, self.cache.settings.atol
        what = difference(found.compiled, found.outputs, *results, divisor, accepted=accepted)
        if what is not None:  # perhaps it is small, and what it is made of is not, as close to a solution
            values, rates, data = found.arguments
            otherwise = found.compiled.run(shaken(values), rates, data)
            what = difference(found.compiled, found.outputs, *results, divisor, otherwise, accepted)
        if what is None:
            return True
        self.cache.refuse(
            f"a captured step differs from the eager one in {what}: a loss depends on something that a graph does not "
            "see (data that it draws itself), or is too sensitive to rounding"
        )
        return False

    def _troubled(self, compiled: CompiledStep, outputs: Sequence[Tensor]) -> bool:
        """Whether a step has to be made eagerly after all: something is not finite, or an alert is on."""
        amiss, *raised = flags = outputs[compiled.out["flags"]].tolist()
        if not any(flags):
            return False
        optimizer = self.optimizer
        on = {key for key, is_on in zip(compiled.step.alerts, raised, strict=True) if is_on}
        return bool(amiss) or not on <= optimizer._run_state.warned or optimizer._reacts_to(optimizer.numbers) in on

    def _writes(
        self,
        compiled: CompiledStep,
        readings: Readings,
        outputs: Sequence[Tensor],
        loss: Tensor,
        made: Sequence[tuple[CompiledStep, int]] = (),
    ) -> list[Write]:
        """The writes of captured steps, the last of which gave this; ``made`` are all of them, if it is not the one."""
        state, out = self.optimizer._run_state, compiled.out
        figures = {name: outputs[v] if isinstance(v, Slot) else v for name, v in out["diagnostics"].items()}
        made = made or [(compiled, 1)]
        after: dict[str, Any] = {"counts": {**state.counts}, "steps": state.steps, "last_loss": loss}
        for one, times in made:
            after["steps"] += times
            for name, count in one.step.counts.items():
                after["counts"][name] += times * count
        left = self.optimizer._result_writes(figures, compiled.numbers_of(outputs), state.found, after)
        return [partial(compiled.write, outputs, readings.reads), *left]

    # ------------------------------------------------------------------------------------------------ many steps

    def run(self, upper: Loss, lower: Loss | None, tasks: Any, steps: int) -> Tensor:
        """So many steps, captured ones one after the other without a look at their values; gives the losses."""
        losses: list[Tensor] = []
        steady = True  # nothing is known to change what a loss reads while the data are drawn, or to fail
        while (done := sum(map(len, losses))) < steps:
            if steady and not (self.optimizer._finished() or self.optimizer._has_step_hooks):
                try:
                    losses += self._chain(_sources(upper, lower, tasks), min(steps - done, self._most))
                    continue
                except _Unsteady:
                    steady = False
            losses.append(self.optimizer.step(upper, lower, tasks=tasks).reshape(1))
        return torch.cat(losses)

    def _chain(self, sources: Sources, most: int) -> list[Tensor]:
        """Losses of captured steps that follow each other, at most so many; of a single step if there are none."""
        optimizer, start, before = self.optimizer, self._place(sources), self.optimizer._run_state.steps
        began, many = time.monotonic(), False  # whether what fails may be another step than the next one
        entry = self._entry(sources, True)
        made: list[Draws] = []
        try:
            if entry is None or not entry.draws or self._why_eager(entry, sources):
                return [self._step(sources, True).reshape(1)]
            made.append(entry.draws)
            many = True
            segments, last = self._segments(sources, entry, most)
            many = bool(segments)
            if not segments:
                assert last is not None
                return [self._drawn(last).reshape(1)]
            if not sources.are_lists and not self._hold(segments):
                raise _Unsteady
            made[:] = [segment.link.draws for segment in segments for _ in segment.data]
            losses = self._linked(segments)
            each = max(time.monotonic() - began, 1e-9) / max(len(losses), 1)
            self._most = min(max(int(AT_RISK / each), 1), CHECKED_EVERY)
            if len(losses) < len(made):
                self._return_to(sources, start)
                self._draw_again(sources, made[: len(losses)])
                return [losses, self._step(sources, True).reshape(1)]
            return [losses] if last is None else [losses, self._drawn(last).reshape(1)]
        except BaseException as error:
            self._return_to(sources, start)
            self._draw_again(sources, made[: optimizer._run_state.steps - before])
            if many and isinstance(error, Exception) and optimizer._run_state.steps == before:
                raise _Unsteady from error  # step by step all are kept that come before what fails
            raise

    def _segments(self, sources: Sources, entry: CacheEntry, most: int) -> tuple[list[Segment], Drawing | None]:
        """Steps that follow each other, the first of which is such a one; and one that is drawn and is none of them."""
        links, segments = list[tuple[Any, Link]](), list[Segment]()
        for key, alike in groupby(self._keys(sources, min(most, CHECKED_EVERY))):
            steps, drawn = len([*alike]), None
            link = next((link for known, link in links if known == key), None)
            if link is None:
                if segments:
                    found = None if key is None else self.cache.entry(self._guard(sources, True, key))
                    if found is None or not found.draws or self._why_eager(found, sources):
                        break
                    entry = found
                link, drawn = self._link(sources, entry)
                if link is None or (links and not link.compiled.may_follow(links[0][1].compiled)):
                    return segments, drawn or self._draw(sources, entry)
                links.append((key, link))
            if not link.compiled.unwatched:
                break
            segment, last = self._following(link, drawn, min(steps, link.compiled.unwatched))
            if segment.data:
                segments.append(segment)
            if len(segment.data) < steps:
                return segments, last
        return segments, None

    def _link(self, sources: Sources, entry: CacheEntry) -> tuple[Link | None, Drawing | None]:
        """The graph of the next step, if others may follow it before anything is written; and the step, if drawn."""
        optimizer, drawn = self.optimizer, None
        form = next((form for form in entry.forms if form.arguments is not None), None) if sources.are_lists else None
        try:
            if form is None or form.arguments is None:
                drawn = self._draw(sources, entry)
                form, readings = self._read(drawn)
                arguments = drawn.arguments()
            else:
                arguments = form.arguments
                readings = self._readings(sources, form, arguments)
        except Untraceable:
            return None, drawn
        compiled = form.compiled_for(readings.key, optimizer.state, optimizer.numbers)
        if compiled is None or not compiled.unwatched or not compiled.chains or optimizer._host_update:
            return None, drawn
        moving = {*map(storage_of, (*compiled.x, *compiled.y))}
        others = [*Data.of(*arguments.values()).tensors, *chain.from_iterable(readings.reads.values())]
        if not moving.isdisjoint(map(storage_of, others)):  # what it reads moves with the parameters, once written
            return None, drawn
        if sources.are_lists and compiled.batches is not None:
            form.arguments = arguments
        return Link(sources, entry, form, arguments, readings, compiled), drawn

    def _draw(self, sources: Sources, entry: CacheEntry) -> Drawing:
        """The next step, which is like others."""
        assert entry.draws is not None
        inputs = self._random_inputs()
        drawn = entry.draws.make(sources, self.optimizer.generator, inputs)
        return Drawing(sources, True, entry, inputs, entry.draws, drawn)

    def _following(self, link: Link, drawn: Drawing | None, steps: int) -> tuple[Segment, Drawing | None]:
        """So many steps, the first of which may have been drawn; and one that has been and is none of them."""
        sources, compiled, last = link.sources, link.compiled, None
        found: list[Sequence[Tensor]] = [] if drawn is None else [drawn.data.tensors]
        versions = [] if drawn is None else versions_of(found[0])
        if sources.are_lists and compiled.batches is not None:
            found += self._ahead(link, steps - len(found))
            if not found:
                last = self._draw(sources, link.entry)
        else:
            while len(found) < steps:
                drawing = self._draw(sources, link.entry)
                if not link.form.like.fits(drawing.data):
                    last = drawing
                    break
                found.append(drawing.data.tensors)
                versions += versions_of(found[-1])
        compiled.uses += len(found)
        return Segment(link, found, versions), last

    def _ahead(self, link: Link, steps: int) -> list[Sequence[Tensor]]:
        """Data of the next steps from lists, as far as these have the form that the graph was made for."""
        optimizer, draws, sources = self.optimizer, link.draws, link.sources
        wanted: list[Any] = [(name, count, optimizer.generator) for name, count in optimizer._random_inputs().items()]
        wanted += [(i, objective.terms, objective.generator) for i, objective in draws.terms(sources)]
        assert link.compiled.batches is not None
        data: list[Sequence[Tensor]] = []
        place = self._place(sources)
        while steps:
            data = draw_ahead(draws, link.compiled.batches, sources, draw_numbers(wanted, steps), steps)
            if data and not link.form.like.has_form(data[0]):
                data = []
            if len(data) == steps:
                break
            self._return_to(sources, place)
            steps = len(data)
        return data

    def _hold(self, segments: Sequence[Segment]) -> bool:
        """Whether data and losses still are what they were before all the data were drawn."""
        links = {id(segment.link): segment.link for segment in segments}
        return all(segment.holds for segment in segments) and not any(map(self._changed, links.values()))

    def _changed(self, link: Link) -> bool:
        """Whether a loss reads something else than before the data were drawn."""
        readings = link.readings
        try:
            now = self._readings(link.sources, link.form, link.arguments)
        except Untraceable:
            return True
        return now.key != readings.key or not all(
            a is b or (a.dim() == b.dim() == 0 and a.is_cpu and torch.equal(a, b))
            for role, tensors in now.reads.items()
            for a, b in zip(tensors, readings.reads[role], strict=True)
        )

    def _linked(self, segments: Sequence[Segment]) -> Tensor:
        """The losses of captured steps that follow each other, of those before the first that failed."""
        made: list[Made] = []
        with torch.no_grad():
            for segment in segments:
                compiled = segment.link.compiled
                start, rates = self._arguments(compiled, segment.link.readings)
                if made:
                    start = compiled.after(*made[-1].ends, start)
                many = compiled.several(self.cache.settings.unroll, start, rates, segment.data)
                follow = partial(compiled.follow, many, start, rates)
                made.append(Made(segment, follow, *follow(segment.data)))
            losses = torch.cat([each.losses for each in made])
            if self.optimizer.check_finite and bool(torch.cat([each.flags.flatten() for each in made]).any()):
                made = self._sound(made)
                losses = losses[: sum(len(each.losses) for each in made)]
            if made:
                (compiled, outputs), link = made[-1].ends, made[-1].segment.link
                counted = [(each.segment.link.compiled, len(each.losses)) for each in made]
                make(self._writes(compiled, link.readings, outputs, losses[-1], counted))
        return losses

    def _sound(self, made: Sequence[Made]) -> list[Made]:
        """What came before the first step with a flag that matters: nothing of it has been written."""
        optimizer, found = self.optimizer, list[Made]()
        known = optimizer._run_state.warned - {optimizer._reacts_to(optimizer.numbers)}
        for each in made:
            matters = [True] + [key not in known for key in each.segment.link.compiled.step.alerts]
            failed = (each.flags & each.flags.new_tensor(matters)).any(1).tolist()
            if True not in failed:
                found.append(each)
                continue
            if sound := failed.index(True):
                found.append(Made(each.segment, each.follow, *each.follow(each.segment.data[:sound])))
            break
        return found

    # ------------------------------------------------------------------------------------------------ places

    def _place(self, sources: Sources) -> Place:
        """Where what draws is: positions in the data, and the generators that matter."""
        optimizer = self.optimizer
        plain = sources.tasks is None and (optimizer.generator is not None or not optimizer._random_inputs())
        plain = plain and not any(map(_draws_by_default, sources.objectives.values()))
        own = None if optimizer.generator is None else optimizer.generator.get_state()
        marks = [objective.mark() for objective in sources.objectives.values()]
        return Place(marks, own, None if plain else torch.get_rng_state())

    def _return_to(self, sources: Sources, place: Place) -> None:
        """Let everything draw from such a place again."""
        for objective, mark in zip(sources.objectives.values(), place.marks, strict=True):
            objective.rewind(mark)
        if self.optimizer.generator is not None and place.own is not None:
            self.optimizer.generator.set_state(place.own)
        if place.default is not None:
            torch.set_rng_state(place.default)

    def _draw_again(self, sources: Sources, steps: Sequence[Draws]) -> None:
        """Draw what these steps draw."""
        for draws in steps:
            inputs = self._random_inputs()
            draws.make(sources, self.optimizer.generator, inputs)


def _draws_by_default(objective: Objective) -> bool:
    """Whether torch's default generator may decide what a loss draws."""
    if type(objective) is FiniteSum:
        return objective.generator is None
    return type(objective) is not Objective or type(objective.data) not in (list, tuple, type(None))


class _Unsteady(Exception):
    """What a loss reads, or a batch, changes while further data are drawn."""


def _sources(upper: Loss | None, lower: Loss | None, tasks: Any) -> Sources:
    f = None if upper is None else as_objective(upper, "upper")
    return Sources(f, None if lower is None else as_objective(lower, "lower"), tasks)

"""Captured steps of an optimizer: graphs that are compared with eager steps, now and then, and many steps at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, takewhile
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..optimizer.base import BilevelOptimizer, Loss, as_objective
from ..optimizer.checkpoint import OWN
from ..optimizer.step import StepInputs, StepResults
from ..optimizer.transaction import Write, make
from ..oracle.oracle import Oracle
from ..problem.random import draw_indices, draw_random_inputs, kept
from ..problem.tasks import select
from ..problem.tracing import Untraceable
from .bind import CompiledStep, Slot, Unsettled, difference
from .cache import FULL, MOST_GRAPHS, PLAIN, CacheEntry, DataForm, Identity, Settings, StepCache
from .draws import Data, Drawn, Draws, Log, Sources, draw_ahead, flattened, forms_of, versions_of
from .losses import Readings, Unreadable
from .step_graph import StepGraph, values_of
from .trace import storage_of

__all__ = ["CapturedSteps", "Settings"]

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
        for level, objective in self.sources.objectives.items():
            if objective.data is None and self.sources.tasks is None:
                found[level] = ()
        for draw, result in zip(self.draws, self.drawn, strict=True):
            level = draw.source.removeprefix("tasks.")
            if draw.source == "tasks":
                found.setdefault("start", (result.data,))
            elif draw.source == "whole":
                found |= {level: (select(batch, 0),) for level, batch in result.data["batches"].items()}
            elif level not in found:
                found[level] = result.data if level == draw.source else (select(result.data, 0),)
        return found | {f"{level} features": own for level, own in found.items()}


class Captured(NamedTuple):
    """A step and its graph, with what this gave for it."""

    compiled: CompiledStep
    readings: Readings
    form: DataForm
    outputs: Sequence[Tensor]


class CapturedSteps:
    """Captured steps of an optimizer, and eager ones where they cannot be captured.

    Args:
        optimizer: whose steps they are.
        settings: what `BilevelOptimizer.compile` has been told.
    """

    def __init__(self, optimizer: BilevelOptimizer, settings: Settings) -> None:
        self.optimizer, self.cache = optimizer, StepCache(settings)

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
        if why := self.optimizer.why_eager():
            self.cache.warn(why, stacklevel=4)

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
        else:
            drawn = entry.draws.make(sources, self.optimizer.generator, inputs)
            return self._drawn(Drawing(sources, update, entry, inputs, entry.draws, drawn))
        return self._noted(loss, reason or self._why_eager(entry, sources))

    def _noted(self, loss: Tensor, reason: str) -> Tensor:
        if reason:
            self.optimizer.diagnostics["compile_fallback"] = reason
        return loss

    def _entry(self, sources: Sources, update: bool, ahead: int = 0) -> CacheEntry | None:
        """What is known of steps like the next one but so many; None: they are the host's."""
        optimizer = self.optimizer
        if self.cache.reason:
            return None
        if why := optimizer.why_eager(sources.tasks):
            self.cache.warn(why)
            return None
        key = optimizer.graph_key(optimizer.run_state.steps + ahead, optimizer.numbers)
        return None if key is None else self.cache.entry(self._guard(sources, update, key))

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
        known = self.cache.reason or self.optimizer.why_eager(sources.tasks) or own
        return known or self.cache.unreadable(self._functions(sources))

    def _random_inputs(self) -> dict[str, Tensor]:
        """What the method draws for a step."""
        optimizer = self.optimizer
        if not optimizer.random_inputs():
            return {}
        agreed = partial(optimizer.oracle_options.ranks.agreed, device=optimizer.param_groups[-1]["params"][0].device)
        return draw_random_inputs(optimizer.random_inputs(), optimizer.generator, agreed)

    def _eager(self, sources: Sources, update: bool, inputs: Mapping[str, Any]) -> Tensor:
        """The step as it would be without a capture."""
        optimizer = self.optimizer
        transaction, oracle, groups = optimizer.open_step(sources.upper, sources.lower)
        with transaction:
            given = optimizer.step_inputs(oracle, groups, inputs)
            results = optimizer.compute(oracle, given, sources.tasks, update=update)
            transaction.conclude()
            transaction.commit(optimizer.step_writes(oracle, results))
        return results.loss

    def _recorded(self, entry: CacheEntry, sources: Sources, update: bool, inputs: dict[str, Any]) -> Tensor:
        """An eager step that shows what such steps draw, in the order in which it and the losses draw.

        It is captured if it is not the first that reads so, or not the first of its run.
        """
        log, at_once = Log(), bool(self.optimizer.run_state.steps) and self.cache.is_familiar

        def find(oracle: Oracle, given: StepInputs) -> Captured | None:
            if log.reason:
                raise Untraceable(log.reason)
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
            if self.cache.graphs >= MOST_GRAPHS:
                self.cache.warn(FULL)
                return self._noted(self._eager(drawing.replayed, update, inputs), FULL)
            if form.met != readings.key:  # perhaps what a loss reads changes at every step
                form.met = readings.key
                return self._eager(drawing.replayed, update, inputs)
            made = partial(self._made, drawing, form, readings)
            loss = self._beside_eager(drawing.replayed, entry, update, inputs, made)
            return self._noted(loss, self._why_eager(entry, drawing.sources))
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
        if update and optimizer.declared.host_update:
            with torch.no_grad():
                writes += optimizer.update_writes(compiled.estimate(outputs), compiled.x, compiled.y)
        make(writes)
        return found

    # ------------------------------------------------------------------------------------------------ graphs

    def _functions(self, sources: Sources) -> dict[str, Callable[..., Any]]:
        """The user's functions that a step evaluates, by role; features before what takes them."""
        found: dict[str, Callable[..., Any] | None] = {}
        for level, objective in sources.objectives.items():
            found |= {f"{level} features": objective.features, level: objective.loss}
        found["projection"] = self.optimizer.limits.projection
        found["start"] = None if sources.tasks is None else self.optimizer.lower_init
        return {role: function for role, function in found.items() if function is not None}

    def _read(self, drawing: Drawing) -> tuple[DataForm, Readings]:
        """The form of the data, and the losses as they are now."""
        sources, optimizer = drawing.sources, self.optimizer
        x, y = optimizer.parameters("upper"), optimizer.parameters("lower")
        row = sources.tasks is not None and optimizer.declared.tasks == "rows"
        form = drawing.entry.form(drawing.data)
        arguments = drawing.arguments()
        arguments["projection"] = ([t.detach()[0] if row else t.detach() for t in y],)
        functions = self._functions(sources)
        with optimizer.run_state.buffers.unnoted():  # or a loss would read a hook of the first step
            readings = form.readers.read(x, y, functions, arguments, row=row)
        if readings.writes:
            for role, tensor in readings.written:
                if not optimizer.run_state.buffers.advance(tensor):
                    raise Unreadable("a loss writes into a tensor that is not its own", role, functions[role])
        return form, readings

    def _made(
        self, drawing: Drawing, form: DataForm, readings: Readings, oracle: Oracle, given: StepInputs
    ) -> Captured:
        """The graph of a step that is to be made, and what it gives."""
        optimizer = self.optimizer
        if optimizer.oracle_options.ranks.group is not None:
            raise Untraceable("ranks exchange results in a step")
        if oracle.sharded:
            raise Untraceable("parameters are sharded")
        if any(p._backward_hooks for p in (*oracle.live_x, *oracle.live_y)):
            raise Untraceable("a parameter has a hook")
        rates = self.cache.rates(optimizer.param_groups, oracle.device)
        arguments = values_of(given, oracle.x, oracle.y, readings.reads, rates, optimizer.estimate_reads)
        arguments["data"] = list(drawing.drawn), drawing.inputs
        update = drawing.update and not optimizer.declared.host_update
        graph = StepGraph(
            optimizer, oracle, given, drawing.sources, drawing.draws, readings, update, arguments, self.cache.backend
        )
        batches = forms_of(drawing.draws, drawing.drawn)
        compiled = CompiledStep(graph, optimizer.state, oracle.live_x, oracle.live_y, readings.key, batches)
        return self._ran(compiled, form, readings, drawing.data.tensors)

    def _ran(self, compiled: CompiledStep, form: DataForm, readings: Readings, data: Sequence[Tensor]) -> Captured:
        outputs = compiled.run(*self._arguments(compiled, readings), data)
        return Captured(compiled, readings, form, outputs)

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
        optimizer, host = self.optimizer, self.optimizer.declared.host_update
        transaction, oracle, groups = optimizer.open_step(sources.upper, sources.lower)
        with transaction:
            given = optimizer.step_inputs(oracle, groups, inputs)
            found = None if afterwards else self._found(entry, find, oracle, given)
            results = optimizer.compute(oracle, given, sources.tasks, update=update and not host)
            transaction.conclude()
            with torch.no_grad():
                found = self._found(entry, find, oracle, given) if afterwards else found
                loss, estimate = results.loss, results.estimate
                if found is None or not self._agrees(found, results):
                    writes = optimizer.step_writes(oracle, results)
                else:
                    compiled, outputs = found.compiled, found.outputs
                    if compiled not in found.form.compiled:
                        found.form.compiled.append(compiled)
                    session = oracle.session
                    loss, estimate = outputs[compiled.out["loss"]], compiled.estimate(outputs)
                    writes = [
                        partial(optimizer.run_state.enter, {"found": session.found, "warned": session.warned}),
                        *self._writes(compiled, found.readings, outputs, loss),
                    ]
                if host and update:
                    writes += optimizer.update_writes(estimate, oracle.live_x, oracle.live_y)
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
        step = optimizer.difference_step
        divisor = 1.0 if step is None else min(getattr(optimizer, step), 1.0)
        what = difference(found.compiled, found.outputs, *results, divisor)
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
        return bool(amiss) or not on <= optimizer.run_state.warned or optimizer.reacts_to(optimizer.numbers) in on

    def _writes(
        self, compiled: CompiledStep, readings: Readings, outputs: Sequence[Tensor], loss: Tensor, steps: int = 1
    ) -> list[Write]:
        """The writes of captured steps, the last of which gave this."""
        state, out = self.optimizer.run_state, compiled.out
        figures = {name: outputs[v] if isinstance(v, Slot) else v for name, v in out["diagnostics"].items()}
        after = state.after_steps(compiled.step.counts, loss, steps)
        left = self.optimizer.result_writes(figures, compiled.numbers_of(outputs), state.found, after)
        return [partial(compiled.write, outputs, readings.reads), *left]

    # ------------------------------------------------------------------------------------------------ many steps

    def run(self, upper: Loss, lower: Loss | None, tasks: Any, steps: int) -> Tensor:
        """So many steps, captured ones one after the other without a look at their values; gives the losses."""
        losses: list[Tensor] = []
        steady = True  # nothing is known to change what a loss reads while the data are drawn
        while (done := sum(map(len, losses))) < steps:
            if steady and not (self.optimizer.finished() or self.optimizer.has_step_hooks):
                try:
                    losses += self._chain(_sources(upper, lower, tasks), steps - done)
                    continue
                except _Unsteady:
                    steady = False
            losses.append(self.optimizer.step(upper, lower, tasks=tasks).reshape(1))
        return torch.cat(losses)

    def _chain(self, sources: Sources, most: int) -> list[Tensor]:
        """Losses of captured steps that follow each other, at most so many; of a single step if there are none."""
        optimizer, start, before = self.optimizer, self._place(sources), self.optimizer.run_state.steps
        entry = self._entry(sources, True)
        draws = Draws() if entry is None or entry.draws is None else entry.draws
        try:
            if entry is None or not draws or self._why_eager(entry, sources):
                return [self._step(sources, True).reshape(1)]
            inputs = self._random_inputs()
            first = Drawing(sources, True, entry, inputs, draws, draws.make(sources, optimizer.generator, inputs))
            link = self._link(first)
            if link is None:
                return [self._drawn(first).reshape(1)]
            form, readings, compiled = link
            data, last = self._following(first, form, compiled, most - 1)
            if not sources.are_lists and self._changed(first, readings):
                raise _Unsteady
            losses = self._linked(compiled, readings, data)
            if len(losses) < len(data):
                self._return_to(sources, start)
                self._draw_again(sources, draws, len(losses))
                return [losses, self._step(sources, True).reshape(1)]
            return [losses] if last is None else [losses, self._drawn(last).reshape(1)]
        except BaseException:
            self._return_to(sources, start)
            self._draw_again(sources, draws, optimizer.run_state.steps - before)
            raise

    def _link(self, drawing: Drawing) -> tuple[DataForm, Readings, CompiledStep] | None:
        """The graph of a step, if others may follow it before anything is written."""
        optimizer = self.optimizer
        try:
            form, readings = self._read(drawing)
        except Untraceable:
            return None
        compiled = form.compiled_for(readings.key, optimizer.state, optimizer.numbers)
        if compiled is None or not compiled.unwatched or not compiled.chains or optimizer.declared.host_update:
            return None
        moving = {*map(storage_of, (*compiled.x, *compiled.y))}
        others = chain(drawing.data.tensors, *readings.reads.values())
        if not moving.isdisjoint(map(storage_of, others)):  # what it reads moves with the parameters, once written
            return None
        compiled.uses += 1
        return form, readings, compiled

    def _following(
        self, first: Drawing, form: DataForm, compiled: CompiledStep, most: int
    ) -> tuple[list[Sequence[Tensor]], Drawing | None]:
        """Data of steps with the same graph, from the first on; and a step that has been drawn and is none of them."""
        optimizer, sources = self.optimizer, first.sources
        now = optimizer.run_state.steps
        keys = (optimizer.graph_key(now + k, optimizer.numbers) for k in range(min(most, compiled.unwatched) + 1))
        steps = len([*takewhile(partial(operator.eq, next(keys)), keys)])
        found: list[Sequence[Tensor]] = [first.data.tensors]
        if sources.are_lists and compiled.batches is not None:
            found += self._ahead(first, form, compiled, steps)
            return found, None
        versions, last = versions_of(found[0]), None
        for _ in range(steps):
            inputs = self._random_inputs()
            drawn = first.draws.make(sources, optimizer.generator, inputs)
            drawing = Drawing(sources, True, first.entry, inputs, first.draws, drawn)
            if not form.like.fits(drawing.data):
                last = drawing
                break
            found.append(drawing.data.tensors)
            versions += versions_of(found[-1])
            compiled.uses += 1
        tensors = [*chain.from_iterable(found)]
        if versions != versions_of(tensors) or not form.like.has_form(tensors, len(found)):
            raise _Unsteady
        return found, last

    def _ahead(self, first: Drawing, form: DataForm, compiled: CompiledStep, steps: int) -> list[list[Tensor]]:
        """Data of the next steps from lists, as far as these have the form that the graph was made for."""
        optimizer, ranges, place = self.optimizer, self.optimizer.random_inputs(), self._place(first.sources)
        assert compiled.batches is not None
        data: list[list[Tensor]] = []
        while steps:
            numbers = draw_indices([*ranges.values()], steps, optimizer.generator) if ranges else ()
            inputs = dict(zip(ranges, numbers, strict=True))
            data = draw_ahead(first.draws, compiled.batches, first.sources, inputs, steps)
            if data and not form.like.has_form(data[0]):
                data = []
            if len(data) == steps:
                break
            self._return_to(first.sources, place)
            steps = len(data)
        compiled.uses += steps
        return data

    def _changed(self, drawing: Drawing, readings: Readings) -> bool:
        """Whether a loss reads something else than before the data were drawn."""
        try:
            now = self._read(drawing)[1]
        except Untraceable:
            return True
        return now.key != readings.key or not all(
            a is b or (a.dim() == b.dim() == 0 and a.is_cpu and torch.equal(a, b))
            for role, tensors in now.reads.items()
            for a, b in zip(tensors, readings.reads[role], strict=True)
        )

    def _linked(self, compiled: CompiledStep, readings: Readings, data: Sequence[Sequence[Tensor]]) -> Tensor:
        """The losses of captured steps that follow each other, of those before the first that failed."""
        with torch.no_grad():
            start, rates = self._arguments(compiled, readings)
            many = compiled.several(self.cache.settings.unroll, start, rates, data)
            losses, flags, last = compiled.follow(many, start, rates, data)
            sound = len(data) if not self.optimizer.check_finite else self._sound(compiled, flags)
            if sound < len(data):  # nothing has been written: make the sound ones again
                if not sound:
                    return losses[:0]
                losses, _, last = compiled.follow(many, start, rates, data[:sound])
            make(self._writes(last[0], readings, last[1], losses[-1], sound))
        return losses

    def _sound(self, compiled: CompiledStep, flags: Tensor) -> int:
        """How many steps passed before the first one with a flag that matters."""
        if not bool(flags.any()):
            return len(flags)
        known = self.optimizer.run_state.warned - {self.optimizer.reacts_to(self.optimizer.numbers)}
        matters = [True] + [key not in known for key in compiled.step.alerts]
        failed = (flags & flags.new_tensor(matters)).any(1).tolist()
        return failed.index(True) if any(failed) else len(flags)

    # ------------------------------------------------------------------------------------------------ places

    def _place(self, sources: Sources) -> Place:
        """Where what draws is: positions in the data, and the generators that matter."""
        optimizer = self.optimizer
        plain = sources.tasks is None and (optimizer.generator is not None or not optimizer.random_inputs())
        plain = plain and all(type(o.data) in (list, tuple, type(None)) for o in sources.objectives.values())
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

    def _draw_again(self, sources: Sources, draws: Draws, steps: int) -> None:
        """Draw what so many steps draw."""
        for _ in range(steps):
            inputs = self._random_inputs()
            draws.make(sources, self.optimizer.generator, inputs)


class _Unsteady(Exception):
    """What a loss reads, or a batch, changes while further data are drawn."""


def _sources(upper: Loss | None, lower: Loss | None, tasks: Any) -> Sources:
    f = None if upper is None else as_objective(upper, "upper")
    return Sources(f, None if lower is None else as_objective(lower, "lower"), tasks)

"""`compile`: steps as compiled graphs, compared with eager ones before they are trusted, and now and then after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..oracle.oracle import Oracle
from ..problem.feeding import Drawn, Draws, Log, Noted, NotedTasks, drawn
from ..problem.objective import Loss, as_objective
from ..problem.random import draw_random_inputs
from ..problem.tracing import Untraceable
from .ahead import forms
from .base import BilevelOptimizer
from .binding import Binding, Slot, difference
from .capture import PLAIN, Capture, Identity, Kind
from .checkpoint import OWN
from .flat import Flat, flattened
from .replay import Sources, StepGraph, fed, values_of
from .step import StepInputs, StepResults
from .transaction import Write, make
from .watch import undisturbed

__all__ = ["Call", "Compiled", "Look", "Place", "Seen"]


class Seen(NamedTuple):
    """What is written instead of an eager step, but for an update of x that is to follow from the estimate."""

    writes: list[Write]
    estimate: Estimate


# Sees a step before it is written.
Look = Callable[[Oracle, StepResults, StepInputs], Seen | None]


NOT_GUARDED = ("params", "lr", "param_names", "initial_lr", OWN)  # of a parameter group; the rates are arguments


class Call(NamedTuple):
    """A step to be made.

    Attributes:
        sources: where it draws.
        update: whether it moves x too.
        random_inputs: what the method has drawn for it.
        kind: what is known of steps like it; None if all steps run eagerly.
    """

    sources: Sources
    update: bool
    random_inputs: dict[str, Any]
    kind: Kind | None


class Place(NamedTuple):
    """Marks of the objectives, and states of the optimizer's and of torch's generator, where they matter."""

    marks: list[tuple[Any, ...]]
    own: Tensor | None
    default: Tensor | None


class Compiled:
    """Captured steps of an optimizer, and eager ones where they cannot be captured.

    Args:
        optimizer: whose steps they are.
        strict, backend, mode, options: see `Capture`.
    """

    def __init__(
        self,
        optimizer: BilevelOptimizer,
        strict: bool,
        backend: str | Callable[..., Any],
        mode: str | None,
        options: dict[str, Any] | None,
    ) -> None:
        self.optimizer, self.capture = optimizer, Capture(strict, backend, mode, options)
        self.settings = (strict, backend, mode, options)

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.optimizer, *self.settings)  # a copy of an optimizer makes its graphs anew

    def begin(self) -> None:
        """Say why no step is captured, if it is so."""
        if self.optimizer.declared.uncaptured:
            self.capture.refuse(self.optimizer.declared.uncaptured)

    @property
    def graphs(self) -> int:
        """How many graphs stand for steps at present."""
        return sum(len(kind.bindings) for kind in self.capture.kinds)

    def step(self, upper: Loss | None, lower: Loss | None, tasks: Any, update: bool) -> Tensor:
        """A step, captured if it can be."""
        sources = self._sources(upper, lower, tasks)
        start = self._place(sources)
        try:
            return self._single(self.capture, self._call(self.capture, sources, update))
        except BaseException:
            self._return_to(sources, start)
            raise

    def _sources(self, upper: Loss | None, lower: Loss | None, tasks: Any) -> Sources:
        f = None if upper is None else as_objective(upper, "upper")
        return Sources(f, None if lower is None else as_objective(lower, "lower"), tasks)

    def _place(self, sources: Sources) -> Place:
        """Where what draws is: positions in the data, and the generators that matter."""
        plain = sources.tasks is None and (self.optimizer.generator is not None or not self.optimizer.random_inputs())
        marks = []
        for objective in sources[:2]:
            if objective is not None:
                marks.append(objective.mark())
                plain = plain and type(objective.data) in (list, tuple, type(None))
        own = None if self.optimizer.generator is None else self.optimizer.generator.get_state()
        return Place(marks, own, None if plain else torch.get_rng_state())

    def _return_to(self, sources: Sources, place: Place) -> None:
        """Let everything draw from such a place again."""
        objectives = [objective for objective in sources[:2] if objective is not None]
        for objective, mark in zip(objectives, place.marks, strict=True):
            objective.rewind(mark)
        if self.optimizer.generator is not None and place.own is not None:
            self.optimizer.generator.set_state(place.own)
        if place.default is not None:
            torch.set_rng_state(place.default)

    def _call(self, capture: Capture, sources: Sources, update: bool, ahead: int = 0) -> Call:
        """The next step but so many, for which nothing has been drawn yet."""
        kind = (
            None
            if capture.reason is not None
            else self.optimizer.graph_key(self.optimizer.run_state.steps + ahead, self.optimizer.numbers)
        )
        if kind is None:
            return Call(sources, update, {}, None)
        return Call(sources, update, {}, capture.kind(self._guard(capture, sources, update, kind), sources))

    def _random_inputs(self) -> dict[str, Tensor]:
        """What the method draws for a step."""
        device = self.optimizer.param_groups[-1]["params"][0].device
        return draw_random_inputs(
            self.optimizer.random_inputs(),
            self.optimizer.generator,
            partial(self.optimizer.oracle_options.ranks.agreed, device=device),
        )

    def _guard(self, capture: Capture, sources: Sources, update: bool, kind: Any) -> list[Any]:
        """What decides, beside the losses, which operations a step is made of."""
        own = vars(self.optimizer)
        guard: list[Any] = [
            update,
            sources.tasks is None,
            kind,
            self.optimizer.run_state.buffers.changing,
            torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
            [own[name] for name in capture.hyperparameters(own)],
        ]
        for group in self.optimizer.param_groups:
            guard += [
                value if isinstance(value, PLAIN) else Identity(value)
                for name, value in group.items()
                if name not in NOT_GUARDED
            ]
            guard += [p.requires_grad for p in group["params"]]
        return guard

    def _single(self, capture: Capture, call: Call, *, begun: bool = False) -> Tensor:
        """One step; ``begun``: the method has drawn its random inputs."""
        kind = call.kind
        if not begun and self.optimizer.random_inputs():
            call = call._replace(random_inputs=self._random_inputs())
        beyond = (
            "" if kind is None or kind.reason else self.optimizer.beyond_graphs(call.sources.tasks, call.random_inputs)
        )
        if beyond:
            kind = Kind([], [])
            capture.refuse(beyond, kind)
        if kind is None or kind.reason is not None:
            loss = self._eagerly(call)
        elif kind.draws is None:
            kind.seen += 1
            known = self.optimizer.run_state.steps and capture.familiar(kind)  # a run that goes on: nothing is new
            loss = self._learnt(capture, kind, call) if kind.seen > 1 or known else self._eagerly(call)
        else:
            results = drawn(kind.draws, *call.sources, self.optimizer.generator, call.random_inputs)
            loss = self._replayed(capture, kind, call, results)
        reason = capture.reason_of(kind)
        if reason is not None:
            self.optimizer.diagnostics["compile_fallback"] = reason
        return loss

    def _eagerly(self, call: Call) -> Tensor:
        """The step as it would be without a capture."""
        return self._stepped(call)

    def _stepped(self, call: Call, look: Look | None = None) -> Tensor:
        """An eager step on what has been drawn; ``look`` sees it before it is written, and may say what is."""
        optimizer, (upper, lower, tasks) = self.optimizer, call.sources
        late = look is not None and optimizer.declared.host_update
        transaction, oracle, groups = optimizer.open_step(upper, lower)
        with transaction:
            inputs = optimizer.step_inputs(oracle, groups, call.random_inputs)
            results = optimizer.compute(oracle, inputs, tasks, update=call.update and not late)
            transaction.conclude()
            with torch.no_grad():
                seen = None if look is None else look(oracle, results, inputs)
                writes = optimizer.step_writes(oracle, results) if seen is None else seen.writes
                if late and call.update:
                    estimate = results.estimate if seen is None else seen.estimate
                    writes += optimizer.update_writes(estimate, oracle.live_x, oracle.live_y)
            transaction.commit(writes)
        return results.loss

    def _learnt(self, capture: Capture, kind: Kind, call: Call, results: Sequence[Drawn] | None = None) -> Tensor:
        """An eager step, from which a graph is made."""
        if results is None:
            log = Log([], [])
            f, g, tasks = call.sources
            sources = Sources(
                None if f is None else Noted(f, "upper", log),
                None if g is None else Noted(g, "lower", log),
                None if tasks is None else NotedTasks(tasks, log),
            )
        else:
            assert kind.draws is not None
            log, sources = Log(kind.draws, list(results)), fed(call.sources, kind.draws, results, call.random_inputs)

        def look(oracle: Oracle, results: StepResults, given: StepInputs) -> Seen | None:
            try:
                self._require_capturable(oracle)
                if log.reason is not None:
                    raise Untraceable(log.reason)
                binding = self._traced(capture, call, log, oracle, given)
            except Untraceable as reason:
                if kind.seen > 1:  # else what is remembered may not have settled
                    capture.refuse(str(reason), kind)
                return None
            rates, data = (
                capture.rates(self.optimizer.param_groups, binding.device),
                flattened(log.drawn, call.random_inputs),
            )
            seen = self._agreed(capture, kind, binding, (rates, data.tensors), oracle, results)
            if seen is not None:
                kind.bindings.append(binding)
                kind.read += binding.step.graph.read
                kind.draws = Draws(log.draws)
            return seen

        return self._stepped(call._replace(sources=sources), look)

    def _traced(self, capture: Capture, call: Call, log: Log, oracle: Oracle, given: StepInputs) -> Binding:
        """The graph of a step that has been made, at its beginning."""
        rates = capture.rates(self.optimizer.param_groups, oracle.device)
        arguments = values_of(given, oracle.x, oracle.y, rates, self.optimizer.estimate_reads)
        arguments["data"] = log.drawn, call.random_inputs
        update = call.update and not self.optimizer.declared.host_update
        functions = [f for o in call.sources[:2] if o is not None for f in (o.loss, o.features) if f is not None]
        with undisturbed(*functions):
            graph = StepGraph(
                self.optimizer,
                oracle,
                given,
                call.sources,
                log.draws,
                update,
                self.optimizer.oracle_options,
                arguments,
                capture.backend,
            )
        data, batches = flattened(log.drawn, call.random_inputs), forms(log.draws, log.drawn)
        return Binding(graph, self.optimizer.state, oracle.live_x, oracle.live_y, data, batches)

    def _require_capturable(self, oracle: Oracle) -> None:
        """Raise for what is known not to be captured."""
        if self.optimizer.oracle_options.ranks.group is not None:
            raise Untraceable("ranks exchange results in a step")
        if oracle.sharded:
            raise Untraceable("parameters are sharded")
        if self.optimizer.run_state.buffers.changing:
            raise Untraceable("module buffers change (BatchNorm in training mode)")

    def _replayed(self, capture: Capture, kind: Kind, call: Call, results: Sequence[Drawn]) -> Tensor:
        """A step by its graph."""
        assert kind.draws is not None
        data = flattened(results, call.random_inputs)
        binding = kind.binding(data)
        if binding is None or not binding.holds(self.optimizer.state, self.optimizer.numbers):
            kind.bindings[:] = [b for b in kind.bindings if b is not binding]
            if not capture.full:
                return self._learnt(capture, kind, call, results)
            reason = capture.turned_away()
            eager = self._fed(kind, call, results)
            self.optimizer.diagnostics["compile_fallback"] = reason
            return eager
        if binding.due():
            return self._compared(capture, kind, call, results, binding, data)
        with torch.no_grad():
            rates = capture.rates(self.optimizer.param_groups, binding.device)
            outputs = binding.run(binding.arguments(self.optimizer.numbers), rates, data.tensors)
            if not (self.optimizer.check_finite and self._troubled(binding, outputs)):
                loss: Tensor = outputs[binding.out["loss"]]
                writes = self._writes_of(binding, outputs, loss)
                if call.update and self.optimizer.declared.host_update:
                    writes += self.optimizer.update_writes(binding.estimate(outputs), binding.x, binding.y)
                make(writes)
                return loss
        return self._fed(kind, call, results)

    def _fed(self, kind: Kind, call: Call, results: Sequence[Drawn]) -> Tensor:
        """An eager step on what has been drawn."""
        return self._eagerly(call._replace(sources=fed(call.sources, kind.draws or (), results, call.random_inputs)))

    def _troubled(self, binding: Binding, outputs: Sequence[Tensor]) -> bool:
        """Whether a step has to be made eagerly after all: something is not finite, or an alert is on."""
        amiss, *raised = flags = outputs[binding.out["flags"]].tolist()
        if not any(flags):
            return False
        on = {key for key, is_on in zip(binding.step.alerts, raised, strict=True) if is_on}
        return (
            amiss or not on <= self.optimizer.run_state.warned or self.optimizer.reacts_to(self.optimizer.numbers) in on
        )

    def _writes_of(self, binding: Binding, outputs: Sequence[Tensor], loss: Tensor, steps: int = 1) -> list[Write]:
        """The writes of captured steps, the last of which gave this."""
        step, out = binding.step, binding.out
        figures = {name: outputs[v] if isinstance(v, Slot) else v for name, v in out["diagnostics"].items()}
        optimizer = self.optimizer
        after = optimizer.run_state.after_steps(step.counts, loss, steps)
        found, numbers = optimizer.run_state.found, binding.numbers_of(outputs)
        return [partial(binding.write, outputs), *optimizer.result_writes(figures, numbers, found, after)]

    def _agreed(
        self,
        capture: Capture,
        kind: Kind,
        binding: Binding,
        arguments: tuple[Sequence[Tensor], Sequence[Tensor]],
        oracle: Oracle,
        results: StepResults,
    ) -> Seen | None:
        """What a captured step is, which has been made eagerly too, with the same result; None if it differs."""
        try:
            outputs = binding.run(binding.arguments(self.optimizer.numbers), *arguments)
        except Exception as error:
            capture.refuse(f"{type(error).__name__}: {error}".splitlines()[0], kind)
            return None
        divisor = (
            1.0
            if self.optimizer.difference_step is None
            else min(getattr(self.optimizer, self.optimizer.difference_step), 1.0)
        )
        what = difference(binding, outputs, *results, divisor)
        if what is not None:
            capture.refuse(
                f"a captured step differs from the eager one in {what}: a loss depends on something that a graph does "
                "not see (data that it draws itself, a counter, a global), or is too sensitive to rounding"
            )
            return None
        session = oracle.session
        noted = partial(self.optimizer.run_state.enter, {"found": session.found, "warned": session.warned})
        writes: list[Write] = [noted, *self._writes_of(binding, outputs, outputs[binding.out["loss"]])]
        return Seen(writes, binding.estimate(outputs))

    def _compared(
        self, capture: Capture, kind: Kind, call: Call, results: Sequence[Drawn], binding: Binding, data: Flat
    ) -> Tensor:
        """A captured step, compared with the eager one."""
        arguments = capture.rates(self.optimizer.param_groups, binding.device), data.tensors

        def look(oracle: Oracle, results: StepResults, given: StepInputs) -> Seen | None:
            return self._agreed(capture, kind, binding, arguments, oracle, results)

        sources = fed(call.sources, kind.draws or (), results, call.random_inputs)
        return self._stepped(call._replace(sources=sources), look)

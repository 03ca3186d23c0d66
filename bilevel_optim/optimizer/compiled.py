"""`compile`: steps as compiled graphs, compared with eager ones before they are trusted, and now and then after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..oracle.oracle import Oracle
from ..oracle.session import Options
from ..problem.feeding import Drawn, Draws, Log, Noted, NotedTasks, drawn
from ..problem.parameters import require
from ..problem.random import draw_chances
from ..problem.tracing import Untraceable
from .ahead import forms
from .binding import Binding, Slot, difference
from .capture import PLAIN, Capture, Identity, Kind
from .checkpoint import OWN
from .flat import Flat, flattened
from .ledger import Ledger
from .method import Loss, as_objective
from .replay import Sources, StepGraph, fed, values_of
from .step import Given, Update
from .transaction import Write, make
from .updating import Updating
from .watch import undisturbed

__all__ = ["Call", "Compiled", "Look", "Place", "Seen"]


class Seen(NamedTuple):
    """What is written instead of an eager step, but for an update of x that is to follow from the estimate."""

    writes: list[Write]
    estimate: Estimate


# Sees a step before it is written.
Look = Callable[[Oracle, Estimate, Given, Update | None], Seen | None]


NOT_GUARDED = ("params", "lr", "param_names", "initial_lr", OWN)  # of a parameter group; the rates are arguments


class Call(NamedTuple):
    """A step to be made.

    Attributes:
        sources: where it draws.
        update: whether it moves x too.
        chances: what the method has drawn for it.
        kind: what is known of steps like it; None if all steps run eagerly.
    """

    sources: Sources
    update: bool
    chances: dict[str, Any]
    kind: Kind | None


class Place(NamedTuple):
    """Marks of the objectives, and states of the optimizer's and of torch's generator, where they matter."""

    marks: list[tuple[Any, ...]]
    own: Tensor | None
    default: Tensor | None


class Compiled(Updating):
    """The part of an optimizer that runs captured steps."""

    _capture: Capture | None = None
    _ledger: Ledger
    _options: Options
    param_groups: list[dict[str, Any]]
    state: Any
    numbers: dict[str, Any]
    diagnostics: dict[str, Any]
    generator: torch.Generator | None

    def compile(
        self,
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """From now on run steps captured: each kind of step is traced, compiled, and replayed.

        Named and used as ``torch.nn.Module.compile``. The first steps run eagerly; then ``step(upper, lower)`` and
        ``backward(upper, lower)``, with tasks or without, are traced through all derivatives to one graph, whose
        arguments are x, y, what is remembered, the batch, and the learning rates. Flags of the checks leave the graph
        and are read once. A graph is compared with an eager step on another batch before it is used, and again after 2,
        4, 8, ..., and then every 4096 uses. Where a capture would not be right (a loss that draws random numbers or
        data itself, reads a counter, branches on values, changes module buffers; a method that decides on the host),
        steps run eagerly, with a warning, once, and the reason in ``diagnostics["compile_fallback"]``. Data of other
        shapes, other options or other losses make other graphs, at most 16.

        A captured CG makes all its iterations (frozen where it has converged) and a randomised series all its products
        (of which those of its term count); ``oracle_counts`` has what was computed.

        Args:
            fullgraph: raise where a step cannot be captured. Default: False.
            dynamic: must not be True: shapes are those of the data.
            backend: as ``torch.compile`` takes it; ``"inductor"``, or ``"eager"`` for the traced graph itself.
                Default: ``"inductor"``.
            mode: as ``torch.compile`` takes it, such as ``"reduce-overhead"`` (CUDA graphs). Default: None.
            options: of the backend. Default: None.

        Raises:
            ValueError: for an argument out of its range.
            RuntimeError: with ``fullgraph``, at a step that cannot be captured, or here for a method that cannot be.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.5)
            >>> optimizer.compile(backend="eager")
            >>> for _ in range(100):
            ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
            >>> round(x.item(), 4), optimizer.diagnostics.get("compile_fallback")
            (1.0, None)
        """
        require("fullgraph", fullgraph, isinstance(fullgraph, bool))
        require("dynamic", dynamic, dynamic is None or dynamic is False)
        require("backend", backend, isinstance(backend, str) or callable(backend))
        capture = Capture(fullgraph, backend, mode, options)
        if reason := self.why_eager():
            capture.refuse(reason, Kind([], []))
        self._capture = capture

    @property
    def captured_graphs(self) -> int:
        """How many graphs stand for steps at present."""
        return 0 if self._capture is None else sum(len(kind.bindings) for kind in self._capture.kinds)

    # What the optimizer gives: a whole step.
    step: Callable[..., Any]
    standing: Callable[..., dict[str, Any]]
    _stepped: Callable[..., Tensor]

    def _captured(self, capture: Capture, upper: Loss | None, lower: Loss | None, tasks: Any, update: bool) -> Tensor:
        """A step, captured if it can be."""
        sources = self._sources(upper, lower, tasks)
        start = self._place(sources)
        try:
            return self._single(capture, self._call(capture, sources, update))
        except BaseException:
            self._return_to(sources, start)
            raise

    def _sources(self, upper: Loss | None, lower: Loss | None, tasks: Any) -> Sources:
        f = None if upper is None else as_objective(upper, "upper")
        return Sources(f, None if lower is None else as_objective(lower, "lower"), tasks)

    def _place(self, sources: Sources) -> Place:
        """Where what draws is: positions in the data, and the generators that matter."""
        plain = sources.tasks is None and (self.generator is not None or not self.chances())
        marks = []
        for objective in sources[:2]:
            if objective is not None:
                marks.append(objective.mark())
                plain = plain and type(objective.data) in (list, tuple, type(None))
        own = None if self.generator is None else self.generator.get_state()
        return Place(marks, own, None if plain else torch.get_rng_state())

    def _return_to(self, sources: Sources, place: Place) -> None:
        """Let everything draw from such a place again."""
        objectives = [objective for objective in sources[:2] if objective is not None]
        for objective, mark in zip(objectives, place.marks, strict=True):
            objective.rewind(mark)
        if self.generator is not None and place.own is not None:
            self.generator.set_state(place.own)
        if place.default is not None:
            torch.set_rng_state(place.default)

    def _call(self, capture: Capture, sources: Sources, update: bool, ahead: int = 0) -> Call:
        """The next step but so many, for which nothing has been drawn yet."""
        if reason := self.why_eager(sources.tasks):
            eager = Kind([], [])
            capture.refuse(reason, eager)
            return Call(sources, update, {}, eager)
        kind = None if capture.reason is not None else self.kind_of_step(self._ledger.steps + ahead, self.numbers)
        if kind is None:
            return Call(sources, update, {}, None)
        return Call(sources, update, {}, capture.kind(self._guard(capture, sources, update, kind), sources))

    def _chances(self) -> dict[str, Tensor]:
        """What the method draws for a step."""
        device = self.param_groups[-1]["params"][0].device
        return draw_chances(self.chances(), self.generator, partial(self._options.ranks.agreed, device=device))

    def _guard(self, capture: Capture, sources: Sources, update: bool, kind: Any) -> list[Any]:
        """What decides, beside the losses, which operations a step is made of."""
        own = self.__dict__
        guard: list[Any] = [
            update,
            sources.tasks is None,
            kind,
            self._ledger.buffers.changing,
            torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
            [own[name] for name in capture.hyperparameters(own)],
        ]
        for group in self.param_groups:
            guard += [
                value if isinstance(value, PLAIN) else Identity(value)
                for name, value in group.items()
                if name not in NOT_GUARDED
            ]
            guard += [p.requires_grad for p in group["params"]]
        return guard

    def _single(self, capture: Capture, call: Call) -> Tensor:
        """One step."""
        kind = call.kind
        if self.chances():
            call = call._replace(chances=self._chances())
        if kind is None or kind.reason is not None:
            loss = self._eagerly(call)
        elif kind.draws is None:
            kind.seen += 1
            known = self._ledger.steps and capture.familiar(kind)  # a run that goes on: nothing is new
            loss = self._learnt(capture, kind, call) if kind.seen > 1 or known else self._eagerly(call)
        else:
            results = drawn(kind.draws, *call.sources, self.generator, call.chances)
            loss = self._replayed(capture, kind, call, results)
        reason = capture.reason_of(kind)
        if reason is not None:
            self.diagnostics["compile_fallback"] = reason
        return loss

    def _eagerly(self, call: Call) -> Tensor:
        """The step as it would be without a capture."""
        return self._stepped(*call.sources, update=call.update, chances=call.chances)

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
            log, sources = Log(kind.draws, list(results)), fed(call.sources, kind.draws, results, call.chances)

        def look(oracle: Oracle, estimate: Estimate, given: Given, update: Update | None) -> Seen | None:
            try:
                self._require_capturable(oracle)
                if log.reason is not None:
                    raise Untraceable(log.reason)
                binding = self._traced(capture, call, log, oracle, given)
            except Untraceable as reason:
                if kind.seen > 1:  # else what is remembered may not have settled
                    capture.refuse(str(reason), kind)
                return None
            rates, data = capture.rates(self.param_groups, binding.device), flattened(log.drawn, call.chances)
            seen = self._agreed(capture, kind, binding, (rates, data.tensors), oracle, estimate, update)
            if seen is not None:
                kind.bindings.append(binding)
                kind.read += binding.step.graph.read
                kind.draws = Draws(log.draws)
            return seen

        return self._stepped(*sources, update=call.update, chances=call.chances, look=look)

    def _traced(self, capture: Capture, call: Call, log: Log, oracle: Oracle, given: Given) -> Binding:
        """The graph of a step that has been made, at its beginning."""
        rates = capture.rates(self.param_groups, oracle.device)
        arguments = values_of(given, oracle.x, oracle.y, rates, self.estimate_reads)
        arguments["data"] = log.drawn, call.chances
        update = call.update and not self.declared.host_update
        functions = [f for o in call.sources[:2] if o is not None for f in (o.loss, o.features) if f is not None]
        with undisturbed(*functions):
            graph = StepGraph(
                self, oracle, given, call.sources, log.draws, update, self._options, arguments, capture.backend
            )
        data, batches = flattened(log.drawn, call.chances), forms(log.draws, log.drawn)
        return Binding(graph, self.state, oracle.live_x, oracle.live_y, data, batches)

    def _require_capturable(self, oracle: Oracle) -> None:
        """Raise for what is known not to be captured."""
        if self._options.ranks.group is not None:
            raise Untraceable("ranks exchange results in a step")
        if oracle.sharded:
            raise Untraceable("parameters are sharded")
        if self._ledger.buffers.changing:
            raise Untraceable("module buffers change (BatchNorm in training mode)")

    def _replayed(self, capture: Capture, kind: Kind, call: Call, results: Sequence[Drawn]) -> Tensor:
        """A step by its graph."""
        assert kind.draws is not None
        data = flattened(results, call.chances)
        binding = kind.binding(data)
        if binding is None or not binding.holds(self.state, self.numbers):
            kind.bindings[:] = [b for b in kind.bindings if b is not binding]
            if not capture.full:
                return self._learnt(capture, kind, call, results)
            reason = capture.turned_away()
            eager = self._fed(kind, call, results)
            self.diagnostics["compile_fallback"] = reason
            return eager
        if binding.due():
            return self._compared(capture, kind, call, results, binding, data)
        with torch.no_grad():
            rates = capture.rates(self.param_groups, binding.device)
            outputs = binding.run(binding.arguments(self.numbers), rates, data.tensors)
            if not (self.check_finite and self._troubled(binding, outputs)):
                loss: Tensor = outputs[binding.out["loss"]]
                writes = self._writes_of(binding, outputs, loss)
                if call.update and self.declared.host_update:
                    writes += self._update_after(binding.estimate(outputs), binding.x, binding.y)
                make(writes)
                return loss
        return self._fed(kind, call, results)

    def _fed(self, kind: Kind, call: Call, results: Sequence[Drawn]) -> Tensor:
        """An eager step on what has been drawn."""
        return self._eagerly(call._replace(sources=fed(call.sources, kind.draws or (), results, call.chances)))

    def _troubled(self, binding: Binding, outputs: Sequence[Tensor]) -> bool:
        """Whether a step has to be made eagerly after all: something is not finite, or an alert is on."""
        amiss, *raised = flags = outputs[binding.out["flags"]].tolist()
        if not any(flags):
            return False
        on = {key for key, is_on in zip(binding.step.alerts, raised, strict=True) if is_on}
        return amiss or not on <= self._ledger.warned or self.reacts_to(self.numbers) in on

    def _writes_of(self, binding: Binding, outputs: Sequence[Tensor], loss: Tensor, steps: int = 1) -> list[Write]:
        """The writes of captured steps, the last of which gave this."""
        step, out = binding.step, binding.out
        diagnostics = {
            name: outputs[value] if isinstance(value, Slot) else value for name, value in out["diagnostics"].items()
        } | {**self.standing(self.numbers), **self._ledger.found.told()}
        numbers = {**self.numbers, **binding.numbers_of(outputs)}
        return [
            partial(binding.write, outputs),
            partial(vars(self).update, numbers=numbers, _diagnostics=diagnostics),
            partial(self._ledger.enter, self._ledger.after_steps(step.counts, loss, steps)),
        ]

    def _agreed(
        self,
        capture: Capture,
        kind: Kind,
        binding: Binding,
        arguments: tuple[Sequence[Tensor], Sequence[Tensor]],
        oracle: Oracle,
        estimate: Estimate,
        update: Update | None,
    ) -> Seen | None:
        """What a captured step is, which has been made eagerly too, with the same result; None if it differs."""
        try:
            outputs = binding.run(binding.arguments(self.numbers), *arguments)
        except Exception as error:
            capture.refuse(f"{type(error).__name__}: {error}".splitlines()[0], kind)
            return None
        divisor = 1.0 if self.divided_by is None else min(getattr(self, self.divided_by), 1.0)
        what = difference(binding, outputs, estimate, update, divisor)
        if what is not None:
            capture.refuse(
                f"a captured step differs from the eager one in {what}: a loss depends on something that a graph does "
                "not see (data that it draws itself, a counter, a global), or is too sensitive to rounding"
            )
            return None
        session = oracle.session
        noted = partial(self._ledger.enter, {"found": session.found, "warned": session.warned})
        writes: list[Write] = [noted, *self._writes_of(binding, outputs, outputs[binding.out["loss"]])]
        return Seen(writes, binding.estimate(outputs))

    def _compared(
        self, capture: Capture, kind: Kind, call: Call, results: Sequence[Drawn], binding: Binding, data: Flat
    ) -> Tensor:
        """A captured step, compared with the eager one."""
        arguments = capture.rates(self.param_groups, binding.device), data.tensors

        def look(oracle: Oracle, estimate: Estimate, given: Given, update: Update | None) -> Seen | None:
            return self._agreed(capture, kind, binding, arguments, oracle, estimate, update)

        sources = fed(call.sources, kind.draws or (), results, call.chances)
        return self._stepped(*sources, update=call.update, chances=call.chances, look=look)

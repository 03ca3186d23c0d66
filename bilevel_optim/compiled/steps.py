"""Compiled steps of an optimizer, compared with eager steps now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import warn
from ..optimizer.lower_checks import probe
from ..optimizer.lower_start import remembered_tasks
from ..optimizer.method import Method
from ..optimizer.transaction import Action, make
from ..problem.objective import Loss
from ..problem.parameters import by_level
from ..problem.random import draw_random_inputs
from ..problem.tasks import task_count
from ..solvers.lower import is_known
from .beside import DIFFERS, FUNCTIONAL, compared, require_compilable
from .draws import Inputs, Plan, SourceKind, Sources, declared, draw, draw_tasks
from .entry import MOST, Entry, Full, Settings
from .forms import structure_of
from .gain import LOOKS
from .given import GivenData, Recorded
from .key import OptionsKey, Rates
from .places import StatePlaces, Writer, buffer_writes
from .program import Call, Given, StepProgram
from .pure import PureStep, state_of
from .reasons import Refused, reason_of

__all__ = ["CompiledSteps"]

PATIENCE = 8  # steps in a row of a new kind, after which no more steps are compiled


class CompiledSteps:
    """Steps of an optimizer, compiled where they can be and eager otherwise.

    Args:
        optimizer: the optimizer.
        settings: arguments of `BilevelOptimizer.compile`.
    """

    def __init__(self, optimizer: Method, settings: Settings) -> None:
        self.optimizer, self.settings = optimizer, settings
        self.entries: list[Entry] = []  # the last used first
        self._reason = ""  # why everything runs eagerly from now on
        self._warned: set[str] = set()
        self._key, self.rates = OptionsKey(optimizer), Rates(optimizer)
        self._options: list[Any] = []  # of the last step
        self._new = 0  # steps in a row of a new kind
        self._state: Any = None  # of the optimizer; draws of the entries depend on it
        self._kind: SourceKind | None = None  # of the last step's sources
        self._told = ""  # what the last compilation has gained
        self._loses = False  # it has not paid, which is still to be told

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.optimizer, self.settings)  # a copy of an optimizer compiles its own steps

    @property
    def graphs(self) -> int:
        """Number of compiled graphs that are still in use."""
        return sum(entry.count for entry in self.entries)

    def say_why_eager(self) -> None:
        """Warn at once if no step of the optimizer can be compiled.

        Raises:
            RuntimeError: if every step has to be (``fullgraph``).
        """
        if why := self._why_always(None):
            self._warn(why)

    def why_update_is_eager(self) -> str:
        """Return why the update of x falls back to eager mode; empty if it does not."""
        factory = self.optimizer._upper_factory
        if factory is None:
            return ""
        made = probe(factory, self.optimizer._default_lr["upper"])
        if type(made) in FUNCTIONAL and is_known(made):
            return ""
        name = type(made).__name__
        return (
            f"x is moved eagerly, by the hypergradient of the graph: the upper_optimizer {name} cannot be compiled, "
            "but torch's SGD, Adam and AdamW can, without hooks"
        )

    @property
    def moves_on_host(self) -> bool:
        """True if the host moves x, so that a graph holds only the estimate."""
        return self.optimizer.declared.host_update or bool(self.optimizer._untraced_update)

    # ------------------------------------------------------------------------------------------------ one step

    def step(self, upper: Loss | None, lower: Loss | None, tasks: Any, update: bool) -> Tensor:
        """Make a step, compiled if it can be."""
        sources, done = self.sources_of(upper, lower, tasks), self.optimizer._run_state.steps
        place, enabled = self.place(sources), torch.is_grad_enabled()
        try:
            loss = self._step(sources, update)
        except BaseException:
            torch.set_grad_enabled(enabled)  # an interrupt may have left gradients off
            if self.optimizer._run_state.steps == done:  # else an interrupt has waited for the step
                self.return_to(place)
            raise
        self.tell_gain()
        return loss

    def tell_gain(self) -> None:
        """Add what compilation has gained to the diagnostics of a step, once it is known; warn once if it loses."""
        if self._told:
            self.optimizer._diagnostics["compile"] = self._told
        if self._loses:
            self._loses = False
            warn(f"compiled steps are not faster: {self._told}. Leave out compile()")

    def sources_of(self, upper: Loss | None, lower: Loss | None, tasks: Any) -> Sources:
        """Return the sources of a step with these arguments."""
        sources = Sources(upper, lower, tasks, self._kind)
        self._kind = sources.kind
        return sources

    def _step(self, sources: Sources, update: bool) -> Tensor:
        entry = self.entry_for(sources, update)
        reason = self.why_eager(entry, sources)
        self.require_compiled(reason)
        inputs = None
        if entry is not None and entry.is_known and not reason:
            inputs = self.drawn(entry, sources)
            reason = self.why_eager(entry, sources) if inputs is None else ""
            self.require_compiled(reason)
        if entry is None or inputs is None:
            return self.noted(self._first(entry, sources, update), reason)
        ready = self.ready(entry, inputs, entry.places.read()) if entry.compiled and entry.unwatched else None
        if ready is None:
            return self._beside_eager(entry, inputs, update)
        program, arguments = ready
        enabled = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            call = program(arguments) if self.moves_on_host else program.once(arguments)
            entry.uses += 1
            values, writer = call.values, program.writer
            sound = not (self.optimizer.check_finite and self.is_troubled(writer, values[writer.flags].tolist()))
            if sound:
                self.write(entry, program, call, values, update)
        finally:
            torch._C._set_grad_enabled(enabled)
        loss: Tensor = values[writer.loss]
        if sound:
            return loss
        again = self.again(inputs)
        return self.optimizer._eager_step(again.upper, again.lower, again.tasks, update=update, random=inputs.random)

    def noted(self, loss: Tensor, reason: str) -> Tensor:
        """Report why a step was eager, and return its loss."""
        if reason:
            self.optimizer._diagnostics["compile_fallback"] = reason
            self._warn(reason)
        return loss

    def require_compiled(self, reason: str) -> None:
        """Raise if there is a reason for an eager step, and ``fullgraph`` forbids it."""
        if reason and self.settings.fullgraph:
            raise RuntimeError(f"the step cannot be compiled: {reason}")

    def _warn(self, reason: str) -> None:
        self.require_compiled(reason)
        if reason not in self._warned:
            self._warned.add(reason)
            warn(f"steps run eagerly, because they cannot be compiled: {reason}")

    def _why_always(self, tasks: Any) -> str:
        """Return why no step of the optimizer (with these tasks) is compiled, for any losses; empty if one may be."""
        reason = self._reason or self.optimizer._why_eager(tasks)
        if self.optimizer._oracle_options.ranks.group is not None:
            reason = "ranks exchange results in a step (process_group=), which is always eager"
        return reason

    def why_eager(self, entry: Entry | None, sources: Sources) -> str:
        """Return why a step with these losses runs eagerly; empty if it may be compiled."""
        if entry is not None:  # so nothing stands against all steps
            return sources.kind.why_eager or (entry.reasons.get(sources.code, "") if entry.reasons else "")
        why, code = self._why_always(sources.tasks) or sources.kind.why_eager, sources.code
        # Earlier steps may have had the same losses.
        return why or next((own.reasons[code] for own in self.entries if code in own.reasons), "")

    def entry_for(self, sources: Sources, update: bool) -> Entry | None:
        """Return the entry of steps like the next one; None if it has to run eagerly."""
        optimizer = self.optimizer
        if self._why_always(sources.tasks):
            return None
        state, moves = optimizer._run_state, update and not self.moves_on_host
        options = self._key.now()
        if options is not self._options or optimizer.state is not self._state:  # other parameters may be trained
            self._options = options
            state.note_trained(optimizer.state, optimizer.param_groups)
        if state.begins_anew == state.steps:
            return None
        numbers = optimizer.numbers | sources.kind.terms
        own = optimizer._graph_key(state.steps, numbers)
        if own is None:
            return None
        tasks = sources.tasks
        remembered = remembered_tasks(tasks) if tasks is not None and optimizer.task_memory else None
        count = None if tasks is None else task_count(tasks, optimizer.tasks_per_step)
        key = [moves, sources.kind.key, own, options, remembered, count, optimizer.lower_init is None]
        if optimizer.state is not self._state:  # another one has been loaded
            self._state = optimizer.state
            for entry in self.entries:
                entry.forget_draws()
                entry.is_known = entry.is_known and state.steps > 0
        for i, entry in enumerate(self.entries):
            if entry.key == key:
                self._new = 0
                if i:
                    self.entries.insert(0, self.entries.pop(i))
                    entry.forget_draws()  # other steps may have replaced tables, for example
                return entry
        self._new += 1
        if self._new > PATIENCE:
            self._reason = (
                "from step to step options of the optimizer or of its groups change, or the number of tasks (or plain "
                "numbers of a method of your own), and each value needs a graph of its own: change them rarely "
                "(learning rates may change)"
            )
            return None
        made = Entry(key, self.settings)
        # A run that began before has made such steps; but of a method's kinds (with and without full sums, say), which
        # its first two steps show, only those that have been due.
        due = [optimizer._graph_key(k, numbers) for k in range(min(state.steps, 2))]
        kinds = [[*entry.key[:2], *entry.key[3:], entry.key[2] in due] for entry in self.entries]
        same = all(kind == [*key[:2], *key[3:], True] for kind in kinds)
        made.is_known = own in due and same and sources.tasks is None
        self.entries.insert(0, made)
        del self.entries[4 * MOST :]
        return self.entries[0]

    def drawn(self, entry: Entry, sources: Sources) -> Inputs | None:
        """Draw the inputs of a step; return None, with a reason recorded, if its draws are not known before it."""
        optimizer, tasks = self.optimizer, sources.tasks
        if entry.draw_all is None and entry.draws is None:
            entry.draws, reason = declared(optimizer, sources)
            if reason:
                entry.reasons[sources.code] = reason
                return None
        counts = optimizer._random_inputs()
        random = draw_random_inputs(counts, optimizer.generator) if counts else {}
        if entry.plan is not None and entry.plan.kind is sources.kind:
            return Inputs(sources, random, *entry.plan.draw(sources, random))
        if entry.draw_all is not None:
            return Inputs(sources, random, {"whole": [entry.draw_all(tasks, random)]})
        assert entry.draws is not None
        if tasks is None:
            drawn = draw(entry.draws, sources, random)
            entry.plan = Plan.of(entry.draws, sources, drawn, random)
            return Inputs(sources, random, drawn)
        remembered = remembered_tasks(tasks) if optimizer.task_memory else None
        return Inputs(sources, random, draw_tasks(entry.draws, tasks, optimizer.generator, random, remembered))

    def again(self, inputs: Inputs) -> Sources:
        """Return sources that give the same samples to an eager step."""
        sources = inputs.sources
        data = GivenData(inputs.drawn, self.functions(sources), sources)
        tasks = None if sources.tasks is None else data.sampler(sources.tasks)
        return Sources(data.objective("upper"), data.objective("lower"), tasks)

    # ------------------------------------------------------------------------------------------------ eager steps

    def _first(self, entry: Entry | None, sources: Sources, update: bool) -> Tensor:
        """Make an eager step; if others like it are to be compiled, record how they draw."""
        tasks = sources.tasks if entry is None or sources.tasks is None else Recorded(sources.tasks)
        loss = self.optimizer._eager_step(sources.upper, sources.lower, tasks, update=update)
        if entry is not None:
            entry.is_known = True
            entry.draw_all = tasks.draws if isinstance(tasks, Recorded) else None
        return loss

    def _beside_eager(self, entry: Entry, inputs: Inputs, update: bool) -> Tensor:
        """Make a step both compiled and eagerly, and compare; compile it now if no program fits.

        The compiled results count, as in steps that are not compared. So a run that was saved goes on bit for bit
        wherever it is compared.
        """
        optimizer, host, sources = self.optimizer, self.moves_on_host, self.again(inputs)
        transaction, oracle, groups = optimizer._open_step(sources.upper, sources.lower)
        code, reason = inputs.sources.code, ""
        with transaction:
            began = time.perf_counter()
            given = optimizer._step_inputs(oracle, groups, inputs.random)
            buffers = optimizer._run_state.buffers.changing()
            copies, rates = [t.clone() for t in buffers], self.rates.on(oracle.device)
            state = state_of(optimizer, oracle.live_x, oracle.live_y, copies, rates)
            results = optimizer._compute(oracle, given, sources.tasks, update=update and not host)
            transaction.conclude()
            eager = time.perf_counter() - began
            left: Sequence[Action] = []
            try:
                require_compilable(optimizer, oracle)
                if not hasattr(entry, "pure"):
                    pure = PureStep(optimizer, oracle, given, update and not host, buffers)
                    entry.settle(pure, StatePlaces(optimizer, pure, self.rates.on))
                arguments = Given(
                    self.functions(inputs.sources), inputs.sources.tasks, inputs.drawn, inputs.random, state
                )
                found, what = compared(optimizer, self.settings, entry, arguments, results, oracle, eager, self.graphs)
                if entry.gain.looks == LOOKS and self.settings.backend == "inductor":  # told after the step
                    self._told, self._loses = entry.gain.text, not entry.gain.pays
                if what:
                    reason = self._reason = DIFFERS.format(what)
                    self.entries.clear()
                else:
                    results, left = found[:2], buffer_writes(entry.pure, found.buffers)
                    oracle.session.counts = dict(found.counts)  # those of all other compiled steps
            except Exception as error:
                reason = reason_of(error)
                if not isinstance(error, Full):
                    entry.reasons[code] = reason
            self.require_compiled(reason)
            estimate, writes = results[0], [*optimizer._step_writes(oracle, results), *left]
            if host and update:
                with torch.no_grad():
                    writes += optimizer._update_writes(groups, oracle.live_x, estimate.gradient, estimate)
            transaction.commit(writes)
        return self.noted(estimate.loss.detach(), reason)

    # ------------------------------------------------------------------------------------------------ programs

    def functions(self, sources: Sources) -> dict[str, Any]:
        """Return the user's functions that a step evaluates, by role, and the number of terms of each loss."""
        found, optimizer = sources.functions, self.optimizer
        if optimizer._limits.projection is not None:
            found["projection"] = optimizer._limits.projection
        if sources.tasks is not None and optimizer.lower_init is not None:
            found["start"] = optimizer.lower_init
        return found

    def ready(
        self, entry: Entry, inputs: Inputs, state: tuple[list[Tensor], Any]
    ) -> tuple[StepProgram, list[Tensor]] | None:
        """Return a program for a step from this state, tensors and structure, with its arguments; None if none fits."""
        own, structure = state
        if inputs.tensors is not None and entry.plan is not None:
            tensors, data = inputs.tensors, entry.plan.structure
        else:
            tensors = []
            try:
                data = structure_of((inputs.drawn, inputs.random), tensors)
            except Refused:
                return None
        tensors = [*tensors, *own]
        found = entry.find((data, structure), tensors, self.functions(inputs.sources))
        return None if found is None else (found[0], [*found[1], *tensors])

    def is_troubled(self, writer: Writer, flags: Sequence[bool]) -> bool:
        """Return True if a step has to be repeated eagerly: something is not finite, or an alert is on."""
        if not any(flags):
            return False
        amiss, *raised = flags
        optimizer = self.optimizer
        on = {key for key, is_on in zip(writer.alerts, raised, strict=True) if is_on}
        return bool(amiss) or not on <= optimizer._run_state.warned or optimizer._reacts_to(optimizer.numbers) in on

    def write(
        self,
        entry: Entry,
        program: StepProgram,
        call: Call,
        values: Sequence[Tensor],
        update: bool,
        times: int = 1,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Write the results of a step, without gradients; ``values`` are those of the call.

        It is the last of ``times`` steps, whose oracle calls are ``counts``, by default those of one.
        """
        optimizer, state, writer = self.optimizer, self.optimizer._run_state, program.writer
        counts = writer.counts if counts is None else counts
        after = {
            "counts": {name: n + counts[name] for name, n in state.counts.items()},
            "steps": state.steps + times,
            "last_loss": values[writer.loss],
        }
        writes = writer.writes(optimizer, values, after)
        if update and self.moves_on_host:
            pure = entry.pure
            estimate, groups = program.results(call).estimate, by_level(optimizer.param_groups)
            writes += optimizer._update_writes(groups, pure.live_x, estimate.gradient, estimate)
        make(writes)

    def place(self, sources: Sources) -> list[Action]:
        """Return what `return_to` does to come back to the present place of all draws."""
        generator = self.optimizer.generator
        found: list[Action] = [partial(own.rewind, own.mark()) for own in sources.objectives.values()]
        if sources.kind.draw_in_order and not self.optimizer._random_inputs():
            return found  # an eager step rewinds what its evaluations draw
        if generator is not None:
            found.append(partial(generator.set_state, generator.get_state()))
        return [*found, partial(torch.set_rng_state, torch.get_rng_state())]

    def return_to(self, place: list[Action]) -> None:
        """Rewind all draws to a place."""
        make(place)

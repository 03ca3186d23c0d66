"""Compiled steps of an optimizer, compared with eager steps now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, islice, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.modules import module

from ..errors import warn
from ..hypergradient.estimate import Write
from ..optimizer.checkpoint import OWN
from ..optimizer.hooks import has_hooks
from ..optimizer.lower_checks import probe
from ..optimizer.method import Method
from ..optimizer.progress import STILL
from ..optimizer.step import replace
from ..optimizer.transaction import TABLE, Action, make
from ..oracle.buffers import unnoted
from ..oracle.hooks import any_hooks
from ..oracle.oracle import Oracle
from ..problem.objective import Loss
from ..problem.parameters import LEVELS, by_level, require_rates
from ..problem.random import draw_random_inputs
from ..solvers.agd import AGD
from ..solvers.lower import is_known
from .chain import Chain
from .compare import Accepted, Results, mismatch, perturbed_by_rounding
from .draws import (
    MOST_TERMS,
    Drawn,
    GivenData,
    Plan,
    Recorded,
    SourceKind,
    Sources,
    draw,
    draw_many,
    draw_tasks,
    in_a_row,
)
from .entry import CHECKED_EVERY, MOST, Entry, Full, Settings
from .forms import structure_of
from .gain import LOOKS
from .places import StatePlaces, Writer, buffer_writes, table_at
from .program import Call, Given, StepProgram
from .pure import PureStep, State, results_of, state_of
from .reasons import Refused, reason_of

__all__ = ["CompiledSteps"]

PLAIN = (bool, int, float, str, tuple, type(None))
NOT_IN_KEY = ("lr", "initial_lr", "params", "param_names", OWN)  # entries of a group; learning rates are tensors
HOOKS = (module._global_forward_hooks, module._global_forward_pre_hooks)  # for all modules; Dynamo has no guard on them
_ATTRIBUTES = attrgetter("requires_grad", "_backward_hooks")
PATIENCE = 8  # steps in a row of a new kind, after which no more steps are compiled
FIRST, AT_RISK = 64, 0.5  # steps of the first chain; seconds that a chain may take, which an interrupt undoes
FUNCTIONAL = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # updates that Dynamo can trace
DIFFERS = (
    "a compiled step differs from the eager one in {}: a loss depends on something that a graph does not see (data "
    "that it draws itself), or is too sensitive to rounding; draw data by the Objective, or accept a larger difference "
    "by compile(rtol=, atol=)"
)


class Inputs:
    """Inputs of a step besides the state.

    Args:
        sources: the sources of its samples.
        random: random inputs.
        drawn: its samples, if they are not drawn by a plan.
        plan: that plan, which draws them now.

    Attributes:
        tensors: tensors of the samples, if they were drawn by a plan and have its form; else None.
    """

    __slots__ = ("_batches", "_drawn", "_plan", "random", "sources", "tensors")

    def __init__(
        self, sources: Sources, random: dict[str, Tensor], drawn: Drawn | None = None, plan: Plan | None = None
    ) -> None:
        self.sources, self.random, self._drawn, self._plan = sources, random, drawn, plan
        self._batches, self.tensors = ({}, None) if plan is None else plan.draw(sources)

    @property
    def drawn(self) -> Drawn:
        """The samples, by source."""
        if self._drawn is None:
            assert self._plan is not None
            self._drawn = self._plan.samples(self._batches)
        return self._drawn


class CompiledSteps:
    """Steps of an optimizer, compiled where they can be and eager otherwise.

    Args:
        optimizer: the optimizer.
        settings: arguments of `BilevelOptimizer.compile`.
    """

    def __init__(self, optimizer: Method, settings: Settings) -> None:
        self.optimizer, self.settings = optimizer, settings
        self._entries: list[Entry] = []  # the last used first
        self._reason = ""  # why everything runs eagerly from now on
        self._warned: set[str] = set()
        self._plain: itemgetter[Any] | None = None  # reads options
        self._pickers: dict[tuple[str, ...], itemgetter[Any]] = {}  # names in a group -> reads its options
        self._last: tuple[list[Any], list[Any]] = ([], [])  # the objects that options consist of, and their key
        self._new = 0  # steps in a row of a new kind
        self._state: Any = None  # of the optimizer; draws of the entries depend on it
        self._rates: tuple[list[Any], list[Tensor]] = ([], [])
        self._kind: SourceKind | None = None  # of the last step's sources
        self._most = FIRST
        self._told = ""  # what the last compilation has gained
        self._loses = False  # it has not paid, which is still to be told

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.optimizer, self.settings)  # a copy of an optimizer compiles its own steps

    @property
    def graphs(self) -> int:
        """Number of compiled graphs that are still in use."""
        return sum(entry.count for entry in self._entries)

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
    def _moves_on_host(self) -> bool:
        """True if the host moves x, so that a graph holds only the estimate."""
        return self.optimizer.declared.host_update or bool(self.optimizer._untraced_update)

    # ------------------------------------------------------------------------------------------------ one step

    def step(self, upper: Loss | None, lower: Loss | None, tasks: Any, update: bool) -> Tensor:
        """Make a step, compiled if it can be."""
        sources, done = self._sources_of(upper, lower, tasks), self.optimizer._run_state.steps
        place = self._place(sources)
        try:
            loss = self._step(sources, update)
        except BaseException:
            if self.optimizer._run_state.steps == done:  # else an interrupt has waited for the step
                self._return_to(place)
            raise
        self._tell_gain()
        return loss

    def _tell_gain(self) -> None:
        """Add what compilation has gained to the diagnostics of a step, once it is known; warn once if it loses."""
        if self._told:
            self.optimizer._diagnostics["compile"] = self._told
        if self._loses:
            self._loses = False
            warn(f"compiled steps are not faster: {self._told}. Leave out compile()")

    def _sources_of(self, upper: Loss | None, lower: Loss | None, tasks: Any) -> Sources:
        sources = Sources.of(upper, lower, tasks, self._kind)
        self._kind = sources.kind
        return sources

    def _step(self, sources: Sources, update: bool) -> Tensor:
        entry = self._entry(sources, update)
        reason = self._why_eager(entry, sources)
        self._require_compiled(reason)
        inputs = None
        if entry is not None and entry.is_known and not reason:
            inputs = self._drawn(entry, sources)
            reason = self._why_eager(entry, sources) if inputs is None else ""
            self._require_compiled(reason)
        if entry is None or inputs is None:
            return self._noted(self._first(entry, sources, update), reason)
        ready = self._ready(entry, inputs, entry.places.read()) if entry.compiled and entry.unwatched else None
        if ready is None:
            return self._beside_eager(entry, inputs, update)
        program, arguments = ready
        enabled = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            call = program(arguments) if self._moves_on_host else program.once(arguments)
            entry.uses += 1
            values, writer = call.values, program.writer
            sound = not (self.optimizer.check_finite and self._troubled(writer, values[writer.flags].tolist()))
            if sound:
                self._write(entry, program, call, values, update)
        finally:
            torch._C._set_grad_enabled(enabled)
        loss: Tensor = values[writer.loss]
        if sound:
            return loss
        again = self._again(inputs)
        return self.optimizer._eager_step(again.upper, again.lower, again.tasks, update=update, random=inputs.random)

    def _noted(self, loss: Tensor, reason: str) -> Tensor:
        """Report why a step was eager, and return its loss."""
        if reason:
            self.optimizer._diagnostics["compile_fallback"] = reason
            self._warn(reason)
        return loss

    def _require_compiled(self, reason: str) -> None:
        """Raise if there is a reason for an eager step, and ``fullgraph`` forbids it."""
        if reason and self.settings.fullgraph:
            raise RuntimeError(f"the step cannot be compiled: {reason}")

    def _warn(self, reason: str) -> None:
        self._require_compiled(reason)
        if reason not in self._warned:
            self._warned.add(reason)
            warn(f"steps run eagerly, because they cannot be compiled: {reason}")

    def _why_always(self, tasks: Any) -> str:
        """Return why no step of the optimizer (with these tasks) is compiled, for any losses; empty if one may be."""
        reason = self._reason or self.optimizer._why_eager(tasks)
        if self.optimizer._oracle_options.ranks.group is not None:
            reason = "ranks exchange results in a step (process_group=), which is always eager"
        return reason

    def _why_eager(self, entry: Entry | None, sources: Sources) -> str:
        """Return why a step with these losses runs eagerly; empty if it may be compiled."""
        if entry is not None:  # so nothing stands against all steps
            return sources.kind.why_eager or (entry.reasons.get(sources.code, "") if entry.reasons else "")
        why, code = self._why_always(sources.tasks) or sources.kind.why_eager, sources.code
        # Earlier steps may have had the same losses.
        return why or next((own.reasons[code] for own in self._entries if code in own.reasons), "")

    def _entry(self, sources: Sources, update: bool) -> Entry | None:
        """Return the entry of steps like the next one; None if it has to run eagerly."""
        optimizer = self.optimizer
        if self._why_always(sources.tasks):
            return None
        state, moves = optimizer._run_state, update and not self._moves_on_host
        own = optimizer._graph_key(state.steps, optimizer.numbers | sources.kind.terms)
        if own is None:
            return None
        key = [moves, sources.kind.key, own, self._options()]
        if optimizer.state is not self._state:  # another one has been loaded
            self._state = optimizer.state
            for entry in self._entries:
                entry.forget_draws()
                entry.is_known = entry.is_known and state.steps > 0
        for i, entry in enumerate(self._entries):
            if entry.key == key:
                self._new = 0
                if i:
                    self._entries.insert(0, self._entries.pop(i))
                    entry.forget_draws()  # other steps may have replaced tables, for example
                return entry
        self._new += 1
        if self._new > PATIENCE:
            self._reason = (
                "from step to step options of the optimizer or of its groups change, and each value needs a graph of "
                "its own: change them rarely (learning rates may change)"
            )
            return None
        made = Entry(key, self.settings)
        made.is_known = not self._entries and state.steps > 0 and sources.tasks is None  # the run began before
        self._entries.insert(0, made)
        del self._entries[4 * MOST :]
        return self._entries[0]

    def _options(self) -> list[Any]:
        """Return all that a user may change in a run and that decides the operations of a step."""
        own = vars(self.optimizer)
        if self._plain is None:
            self._plain = itemgetter(*(name for name, v in own.items() if isinstance(v, PLAIN) and name[0] != "_"))
        # The same objects have the same options. Most steps stop here.
        groups, objects = self.optimizer.param_groups, [*self._plain(own)]
        for group in groups:
            names, parameters = tuple(group), group["params"]
            pick = self._pickers.get(names)
            if pick is None:
                pick = self._pickers[names] = itemgetter("level", *[name for name in names if name not in NOT_IN_KEY])
            objects.append(pick)
            objects += pick(group)
            for p in parameters:
                objects += _ATTRIBUTES(p)
            objects += parameters
        objects += (buffers := self.optimizer._run_state.buffers.changing())
        before, options = self._last
        if len(before) == len(objects) and all(map(is_, before, objects)) and not any(HOOKS):
            return options
        found: list[Any] = [self._plain(own)]
        for group in groups:
            for name, value in group.items():
                if name not in NOT_IN_KEY:
                    found.append(value if isinstance(value, PLAIN) else id(value))
            parameters = group["params"]
            found += (any_hooks(parameters), [p.requires_grad for p in parameters], [*map(id, parameters)])
        found += map(id, buffers)
        for hooks in HOOKS:
            found.append(sum([getattr(hook, "__module__", "") != unnoted.__module__ for hook in [*hooks.values()]]))
        hooked = [hooks for group in groups for _, hooks in map(_ATTRIBUTES, group["params"]) if hooks is not None]
        if not (hooked or any(HOOKS)):  # a dict of hooks may change
            self._last = objects, found
        return found

    def _drawn(self, entry: Entry, sources: Sources) -> Inputs | None:
        """Draw the inputs of a step; return None, with a reason recorded, if its draws are not known before it."""
        optimizer, tasks = self.optimizer, sources.tasks
        if entry.plan is not None and entry.plan.kind is sources.kind:
            return Inputs(sources, {}, plan=entry.plan)
        if entry.draw_all is None and entry.draws is None:
            entry.draws = self._declared(entry, sources)
            if entry.draws is None:
                return None
        counts = optimizer._random_inputs()
        random = draw_random_inputs(counts, optimizer.generator) if counts else {}
        if entry.draw_all is not None:
            return Inputs(sources, random, {"whole": [entry.draw_all(tasks, random)]})
        assert entry.draws is not None
        if tasks is None:
            drawn = draw(entry.draws, sources, random)
            entry.plan = None if random else Plan.of(entry.draws, sources, drawn)
            return Inputs(sources, random, drawn)
        return Inputs(sources, random, draw_tasks(entry.draws, tasks, optimizer.generator, random))

    def _declared(self, entry: Entry, sources: Sources) -> Sequence[Any] | None:
        """Return the draws that the method declares for the next step; None, with a reason recorded, if it cannot."""
        optimizer = self.optimizer
        given = optimizer._inputs(
            by_level(optimizer.param_groups), optimizer.parameters("upper"), optimizer.parameters("lower")
        )
        given = replace(given, numbers=given.numbers | sources.kind.terms)
        draws: Sequence[Any] | None
        if sources.tasks is None:
            declared = optimizer._draws(given)
            many = any(own.whole for own in declared or ()) and max(sources.kind.terms.values(), default=0) > MOST_TERMS
            draws = None if declared is None else in_a_row(declared)
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
        if reason:
            entry.reasons[sources.code] = reason
        return None if reason else draws

    def _again(self, inputs: Inputs) -> Sources:
        """Return sources that give the same samples to an eager step."""
        sources = inputs.sources
        data = GivenData(inputs.drawn, self._functions(sources), sources)
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
        optimizer, host, sources = self.optimizer, self._moves_on_host, self._again(inputs)
        transaction, oracle, groups = optimizer._open_step(sources.upper, sources.lower)
        code, reason = inputs.sources.code, ""
        with transaction:
            began = time.perf_counter()
            given = optimizer._step_inputs(oracle, groups, inputs.random)
            buffers = optimizer._run_state.buffers.changing()
            copies, rates = [t.clone() for t in buffers], self._now(oracle.device)
            state = state_of(vars(given), given.numbers, oracle.x, oracle.y, copies, rates)
            results = optimizer._compute(oracle, given, sources.tasks, update=update and not host)
            transaction.conclude()
            eager = time.perf_counter() - began
            left: Sequence[Action] = []
            try:
                self._require_compilable(oracle)
                if not hasattr(entry, "pure"):
                    pure = PureStep(optimizer, oracle, given, update and not host, buffers)
                    entry.settle(pure, StatePlaces(optimizer, pure, self._now))
                found, after, what = self._compared(entry, inputs, state, results, oracle, eager)
                if what:
                    reason = self._reason = DIFFERS.format(what)
                    self._entries.clear()
                else:
                    results, left = found, buffer_writes(entry.pure, after)
            except Exception as error:
                reason = reason_of(error)
                if not isinstance(error, Full):
                    entry.reasons[code] = reason
            self._require_compiled(reason)
            estimate, writes = results[0], [*optimizer._step_writes(oracle, results), *left]
            if host and update:
                with torch.no_grad():
                    writes += optimizer._update_writes_after(estimate, oracle.live_x, oracle.live_y)
            transaction.commit(writes)
        return self._noted(estimate.loss.detach(), reason)

    def _require_compilable(self, oracle: Oracle) -> None:
        if oracle.sharded:
            raise Refused("parameters are sharded (DTensor), and such steps are always eager")
        if any_hooks((*oracle.live_x, *oracle.live_y)):
            raise Refused("a parameter has a hook, which a graph would not call: remove it, or keep the steps eager")
        if oracle.session.one_by_one:
            raise Refused(oracle.session.one_by_one)
        if oracle.session.doors:
            raise Refused(f"upper parameters are read outside the losses ({', '.join(sorted(oracle.session.doors))})")
        for rule in self.optimizer._rules.rules:
            if rule.kind not in (*FUNCTIONAL, AGD):
                raise Refused(
                    f"the lower_optimizer {type(rule.optimizer).__name__} cannot be compiled: use torch's SGD, Adam or "
                    "AdamW, or bo.AGD, without hooks"
                )

    def _compared(
        self, entry: Entry, inputs: Inputs, state: State, right: Results, oracle: Oracle, eager: float
    ) -> tuple[Results, Sequence[Tensor], str | None]:
        """Return results of a compiled step, compiled now if need be, its buffers, and what differs from the eager one.

        ``eager`` is the time that the eager step has taken.
        """
        sources = inputs.sources
        given = Given(self._functions(sources), sources.tasks, inputs.drawn, inputs.random, state)
        began, graphs = time.perf_counter(), entry.count
        found = entry.results(given, self.graphs)
        found["flags"].tolist()  # waits for a device
        seconds = time.perf_counter() - began
        if entry.count > graphs:
            entry.gain.compilation += seconds
        else:
            entry.gain.note(eager, seconds)
            if entry.gain.looks == LOOKS and self.settings.backend == "inductor":  # told after the step
                self._told, self._loses = entry.gain.text, not entry.gain.pays
        optimizer, settings, pure = self.optimizer, self.settings, entry.pure
        name = optimizer.declared.difference_step
        divisor = min(getattr(optimizer, name), 1.0) if name else 1.0
        accepted = Accepted(settings.rtol, settings.atol, divisor)
        results = partial(results_of, table_of=partial(table_at, optimizer, pure))
        tables = {id(t): name for entries in optimizer.state.values() for name, t in entries.items()}

        def part(write: Write) -> str:
            name: str = tables.get(id(write.table), "y")
            return name.removeprefix(TABLE).removeprefix("rows.")

        with torch.no_grad():
            made = results(found)
            what = mismatch(right, made, oracle.x, oracle.y, accepted, part)
            if what is not None:  # it may be a small difference of large terms, as near a solution
                moved = given.at(x=perturbed_by_rounding(state["x"]), y=perturbed_by_rounding(state["y"]))
                otherwise = entry.known(moved)
                other = None if otherwise is None else results(otherwise)
                what = mismatch(right, made, oracle.x, oracle.y, accepted, part, other)
        return made, found["buffers"], what

    # ------------------------------------------------------------------------------------------------ programs

    def _functions(self, sources: Sources) -> dict[str, Any]:
        """Return the user's functions that a step evaluates, by role, and the number of terms of each loss."""
        found, optimizer = sources.functions, self.optimizer
        if optimizer._limits.projection is not None:
            found["projection"] = optimizer._limits.projection
        if sources.tasks is not None and optimizer.lower_init is not None:
            found["start"] = optimizer.lower_init
        return found

    def _ready(
        self, entry: Entry, inputs: Inputs, state: tuple[list[Tensor], Any]
    ) -> tuple[StepProgram, list[Tensor]] | None:
        """Return a program for a step from this state, tensors and structure, with its arguments; None if none fits."""
        losses, (own, structure) = self._functions(inputs.sources), state
        if inputs.tensors is not None and entry.plan is not None:
            tensors, (form, reader) = [*inputs.tensors, *own], entry.compiled[0]
            if form.fits_at_once((entry.plan.structure, structure), tensors):
                known = entry.known_to(reader, losses)
                return None if known is None else (known[0], [*known[1], *tensors])
        tensors = []
        try:
            data = structure_of((inputs.drawn, inputs.random), tensors)
        except Refused:
            return None
        tensors += own
        found = entry.find((data, structure), tensors, losses)
        return None if found is None else (found[0], [*found[1], *tensors])

    def _now(self, device: torch.device) -> list[Tensor]:
        """Return the learning rates as tensors, new ones if a rate has changed, so that no schedule recompiles."""
        groups = self.optimizer.param_groups
        values = [group["lr"] for group in groups]
        if len(values) == len(self._rates[0]) and all(map(is_, values, self._rates[0])):
            return self._rates[1]
        require_rates(groups)
        in_order = [group["lr"] for level in LEVELS for group in groups if group["level"] == level]
        kind = torch.float64 if device.type != "mps" else torch.float32
        # Detached, so that none is a view: a fake view keeps its base where the garbage collector does not look. Of one
        # dimension, because Dynamo takes the value of a scalar for another input, and then traces the step once more.
        made = [torch.as_tensor(value, dtype=kind, device=device).reshape(1).detach() for value in in_order]
        if {*map(type, values)} == {float}:  # others may change in place
            self._rates = values, made
        return made

    def _troubled(self, writer: Writer, flags: Sequence[bool]) -> bool:
        """Return True if a step has to be repeated eagerly: something is not finite, or an alert is on."""
        if not any(flags):
            return False
        amiss, *raised = flags
        optimizer = self.optimizer
        on = {key for key, is_on in zip(writer.alerts, raised, strict=True) if is_on}
        return bool(amiss) or not on <= optimizer._run_state.warned or optimizer._reacts_to(optimizer.numbers) in on

    def _write(
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
        if update and self._moves_on_host:
            pure = entry.pure
            estimate, _ = results_of(program.results(call), partial(table_at, optimizer, pure))
            writes += optimizer._update_writes_after(estimate, pure.live_x, pure.live_y)
        make(writes)

    # ------------------------------------------------------------------------------------------------ many steps

    def run(self, upper: Loss, lower: Loss | None, tasks: Any, steps: int, *, one: Callable[[], Tensor]) -> Tensor:
        """Make ``steps`` steps and return their losses; ``one`` makes one of them by itself.

        Where nothing can change in between, one guarded call is followed by direct ones.
        """
        optimizer, losses, done = self.optimizer, list[Tensor](), 0
        while done < steps:
            found = None
            if not (optimizer._finished() or has_hooks(optimizer) or optimizer._sets_below(tasks)):
                with optimizer._turn:
                    found = self._run_chain(self._sources_of(upper, lower, tasks), min(steps - done, self._most))
            if found is not None:
                optimizer._watch_losses(found, moves=True)
            losses.append(one().clone().reshape(1) if found is None else found)
            done += len(losses[-1])
        return torch.cat(losses) if len(losses) > 1 else losses[0]

    def _run_chain(self, sources: Sources, most: int) -> Tensor | None:
        """Return losses of steps that are written at the end only; None if the next step is made by itself."""
        entry = self._entry(sources, True)
        if entry is None or self._why_eager(entry, sources) or self._moves_on_host or not sources.kind.are_lists:
            return None
        kinds = self._kinds(entry, sources, most)
        if sum([count for _, count in kinds]) < 2:
            return None
        began, place, done = time.monotonic(), self._place(sources), self.optimizer._run_state.steps
        try:
            found = self._follow_chain(kinds, sources, place)
        except BaseException:
            if self.optimizer._run_state.steps == done:
                self._return_to(place)
            raise
        if found is None:
            self._return_to(place)
            return None
        each = max(time.monotonic() - began, 1e-9) / len(found)
        self._most = min(max(int(AT_RISK / each), 1), CHECKED_EVERY)
        self._tell_gain()
        return found

    def _kinds(self, first: Entry, sources: Sources, most: int) -> list[tuple[Entry, int]]:
        """Return entries with numbers of next steps, up to one that has to be made by itself, or is to be compared."""
        optimizer, found, left = self.optimizer, list[tuple[Entry, int]](), dict[Entry, int]()
        now, numbers, one = optimizer._run_state.steps, optimizer.numbers | sources.kind.terms, first.key[2]
        kind, most = type(optimizer), min(most, STILL - 1 - now) if now < STILL else most
        # By default all steps of a run have the same key.
        alike = kind._graph_key is Method._graph_key and kind._lower_step_count is Method._lower_step_count
        keys = repeat(one, most) if alike else (optimizer._graph_key(now + k, numbers) for k in range(most))
        for own, same in groupby(keys):
            key = [*first.key[:2], own, *first.key[3:]]
            entry = next((entry for entry in self._entries if entry.key == key), None)
            if entry is None or (found and (entry.reasons or (entry.draws is None and entry is not first))):
                break
            may_follow = entry.compiled and entry.compiled[0][1].may_follow
            kept = left.get(entry, entry.unwatched) if may_follow else 0
            count = len([*islice(same, kept + 1)])
            if kept:
                found.append((entry, min(count, kept)))
            if count > kept:
                break
            left[entry] = kept - count
        return found

    def _follow_chain(self, kinds: list[tuple[Entry, int]], sources: Sources, place: list[Action]) -> Tensor | None:
        """Run steps of these kinds as a chain, and write the last; return the losses of those that passed, if any."""
        optimizer, parts, latest = self.optimizer, list[Part](), dict[Entry, Part]()
        state, structure = kinds[0][0].places.read()
        for entry, count in kinds:
            part = latest.get(entry)
            if part is not None:  # no code of the user has run since its guards were checked
                part = self._part_like(part, sources, count, state)
            else:
                part = self._part(entry, sources, count, (state, structure))
            if part is None or (parts and not part.program.writer.writes_as(parts[0].program.writer)):
                break
            parts.append(part)
            latest[entry] = part
            if len(part.losses) < count:
                break
            values = part.last.values
            state = [values[k] for k in part.program.next_state or ()]
        made = sum([len(part.losses) for part in parts])
        sound = self._sound(parts) if optimizer.check_finite else made
        if sound < sum([count for _, count in kinds]):
            self._return_to(place)
            left = sound
            for i, part in enumerate(parts):
                own = min(left, len(part.losses))
                for _ in range(own):
                    self._drawn(part.entry, sources)
                if 0 < own < len(part.losses):
                    followed = part.chain.follow(part.first, part.data[: own - 1])
                    parts[i] = part._replace(losses=followed[0], last=followed[2])
                left -= own
                if not left:
                    del parts[i + bool(own) :]
                    break
        if not parts:
            return None
        counts = dict.fromkeys(optimizer._run_state.counts, 0)
        for part in parts:
            part.entry.uses += len(part.losses)
            for name in counts:
                counts[name] += len(part.losses) * part.program.writer.counts[name]
        entry, program, last = parts[-1].entry, parts[-1].program, parts[-1].last
        with torch.no_grad():
            self._write(entry, program, last, last.values, True, sound, counts)
        return torch.cat([part.losses for part in parts]) if len(parts) > 1 else parts[0].losses

    def _part(self, entry: Entry, sources: Sources, count: int, state: tuple[list[Tensor], Any]) -> Part | None:
        """Run at most ``count`` steps of one kind from a state; return None if they cannot follow each other."""
        inputs, pure = self._drawn(entry, sources), entry.pure
        ready = None if inputs is None else self._ready(entry, inputs, state)
        if inputs is None or ready is None:
            return None
        program, arguments = ready
        if program.next_state is None:  # a step cannot follow before the one before is written
            return None
        with torch.no_grad():
            first = program(arguments)
        chain: Chain = program.chain or Chain(program, first, inputs.drawn, inputs.random)
        program.chain = chain
        if chain.shares_memory(first, [*pure.live_x, *pure.live_y, *pure.buffers]):
            return None
        data = self._ahead(entry, sources, chain, count - 1) if count > 1 else []
        return Part(entry, program, chain, first, data, *chain.follow(first, data))

    def _part_like(self, other: Part, sources: Sources, count: int, state: Sequence[Tensor]) -> Part | None:
        """Run at most ``count`` steps with the program of earlier ones; return None if data have another form."""
        entry, program, chain = other.entry, other.program, other.chain
        data = self._ahead(entry, sources, chain, count)
        if not data:
            return None
        with torch.no_grad():
            first = program([*other.first.arguments[: program.reads], *data[0], *state])
        return Part(entry, program, chain, first, data[1:], *chain.follow(first, data[1:]))

    def _sound(self, parts: Sequence[Part]) -> int:
        """Return the number of steps before the first that has to be repeated eagerly."""
        sound = 0
        for part in parts:
            told = part.flags if isinstance(part.flags, list) else part.flags.tolist()  # one wait for all
            for k, on in enumerate(told if any(map(any, told)) else ()):
                if self._troubled(part.program.writer, on):
                    return sound + k
            sound += len(told)
        return sound

    def _ahead(self, entry: Entry, sources: Sources, chain: Chain, count: int) -> list[list[Tensor]]:
        """Draw the tensors that ``count`` steps take from samples, up to the first step of another form."""
        if entry.draw_all is None and entry.draws is not None and not self.optimizer._random_inputs():
            columns = draw_many(entry.draws, sources, count)
            if columns is not None:
                return chain.rows(columns, count)
        data: list[list[Tensor]] = []
        while len(data) < count:
            more = self._drawn(entry, sources)
            assert more is not None
            own = chain.form.tensors_of((more.drawn, more.random))
            if own is None:
                break
            data.append(own)
        return data

    def _place(self, sources: Sources) -> list[Action]:
        """Return what `_return_to` does to come back to the present place of all draws."""
        generator = self.optimizer.generator
        found: list[Action] = [partial(own.rewind, own.mark()) for own in sources.objectives.values()]
        if sources.kind.draw_in_order and not self.optimizer._random_inputs():
            return found  # an eager step rewinds what its evaluations draw
        if generator is not None:
            found.append(partial(generator.set_state, generator.get_state()))
        return [*found, partial(torch.set_rng_state, torch.get_rng_state())]

    def _return_to(self, place: list[Action]) -> None:
        """Rewind all draws to a place."""
        make(place)


class Part(NamedTuple):
    """Steps of one kind in a chain: their first call, the data of the others, their results, and the last call."""

    entry: Entry
    program: StepProgram
    chain: Chain
    first: Call
    data: list[list[Tensor]]
    losses: Tensor
    flags: Tensor | list[list[bool]]
    last: Call

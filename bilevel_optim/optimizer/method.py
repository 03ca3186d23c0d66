"""One step of a method: its inputs, the estimate, its checks, the update of x and the writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from ..distributed.ranks import Ranks, text_of
from ..errors import NonFiniteError, warn
from ..hypergradient import Estimate
from ..hypergradient.estimate import measured
from ..oracle.advance import advance_buffers
from ..oracle.doors import PROJECTION, START, WatchedStart, leads, projection_reads, refusal
from ..oracle.hooks import any_hooks, called_once, require_callable, why_one_by_one
from ..oracle.oracle import Oracle
from ..oracle.probe import EACH_TIME, FIRST, JOINT, SECOND, check_derivatives
from ..oracle.session import Checks, EvaluationOptions, LossFacts, Session
from ..problem.objective import Loss, Objective, as_objective
from ..problem.parameters import (
    LEVELS,
    OF_SGD,
    Params,
    as_groups,
    by_level,
    consistently_named,
    level_of,
    names_of,
    require_apart,
    require_gradients,
    require_one_level,
    require_rates,
    require_usable,
    tensors_of,
)
from ..problem.random import draw_random_inputs
from ..problem.tasks import LowerInit, task_count
from ..problem.vector import Vector, any_sharded
from ..solvers.limits import Clip, Projection, limits_of
from ..solvers.lower import GROWS, LED_AWAY, LowerRules
from ..tracing import is_tracing
from .auto_rate import (
    AUTO,
    MARGIN,
    MARGIN_OF_TERMS,
    SMALLER,
    STIFFER,
    is_quiet,
    led_away,
    lower_rate,
    with_measured_rates,
)
from .checkpoint import OWN, initial_state, initialises
from .declaration import UNDECLARED, MethodInfo, register
from .foreign import ReadOnly, require_estimate, require_update
from .lower_checks import (
    LowerChecks,
    place_of_counts,
    probe,
    rate_of,
    require_given_gradient,
    require_optimizer,
)
from .lower_start import alert_if_unsolved, remembered_tasks, require_task_memory, warn_of_forgetting, write_lower
from .options import (
    InitVar,
    Options,
    argument_error,
    choice,
    chunk,
    count,
    factory,
    flag,
    function,
    is_generator,
    option,
    signature_of,
)
from .progress import DIVERGES, LOOKS, RIGHT_SIDE, STILL, SYSTEM, StepLength, watch_losses, watch_moves, watch_system
from .step import (
    CURVATURE,
    FACTOR,
    Draw,
    DrawInputs,
    Groups,
    StepInputs,
    TaskDraw,
    Update,
    of_tasks,
    replace,
)
from .task_mean import task_mean
from .transaction import (
    COUNTS,
    INITIAL,
    SOLVER,
    UPPER_SOLVER,
    Action,
    RunState,
    Transaction,
    Turn,
    recalled,
    require_no_transform,
    spent_gradient,
    undo_of,
    writes_of,
)
from .upper_gradient import check_gradients, warn_of_spent

MOST_CHECKS = 16  # different losses of one optimizer whose derivatives are checked
SECOND_CHECK = 10  # steps, after which derivatives that were checked before are checked once more
_NONE_OF_SGD = OF_SGD.keys().isdisjoint
NOISE = (
    "a loss returns another value each time it is evaluated at one point on one batch (see "
    "diagnostics['derivatives']), so the differences that this method takes are mostly noise. Draw its random numbers "
    "from torch's default generator, whose numbers are repeated, or put them into the batches; and count nothing in it"
)
FIRST_WRITTEN = (
    "a loss has written a module buffer ({}) in this step, but not in the steps before, so that each evaluation of the "
    "step has moved it; from the next step on it moves once in a step"
)
PLAIN = (bool, int, float, str, tuple, type(None))
# Arguments that may differ between ranks, or that are compared in another form (groups, and the optimizers made).
NOT_COMPARED = (
    "upper", "lower", "lr", "lower_lr", "upper_optimizer", "lower_optimizer", "process_group", "state_device",
    "vectorize",
)  # fmt: skip
KEPT = 1 << 16  # most entries of vectors kept unevaluated for diagnostics, because few steps are asked for their norms
RECOMPUTED = (
    "a loss seems to compute activations a second time, in backward, where torch.func.vmap does not reach them: leave "
    "out torch.utils.checkpoint (or pass vectorize=False, if what it computes again does not read y)"
)

__all__ = ["Method"]


class Method(Options, Optimizer, ABC):
    """One step of a method, from its options to the writes; a subclass defines :meth:`estimate`.

    A step reads its inputs, estimates, has the checks read, moves x, and returns the writes to be made; nothing before
    them writes. Eager and compiled steps are made of the same parts. `BilevelOptimizer` adds the verbs of
    ``torch.optim``, results and checkpoints.
    """

    upper: InitVar[Params] = option(kw_only=False)
    lower: InitVar[Params] = option(kw_only=False)
    lr: InitVar[float | None] = option(default=None)
    lower_lr: InitVar[float | str | None] = option(default=AUTO)
    lower_steps: int = count()
    warm_start: bool = flag(default=True)
    upper_optimizer: InitVar[Callable[[Any], Optimizer] | None] = factory(default=None)
    lower_optimizer: InitVar[Callable[[Any], Optimizer] | None] = factory(default=None)
    check_finite: bool = flag(default=True)
    check_derivatives: bool = flag(default=True)
    generator: torch.Generator | None = option(default=None, check=is_generator)
    vectorize: InitVar[bool | int] = chunk(default=True)
    hvp: InitVar[str] = choice("exact", "finite-difference", default="exact")
    process_group: InitVar[Any] = option(default=None)
    tasks_per_step: int | None = count(default=None, least=1, optional=True)
    lower_batch: int | None = count(default=None, least=1, optional=True)
    upper_batch: int | None = count(default=None, least=1, optional=True)
    lower_init: LowerInit | None = function(default=None)
    task_memory: bool = flag(default=False)
    lower_clip: InitVar[Clip | None] = option(default=None)
    lower_projection: InitVar[Projection | None] = option(default=None)
    declared: ClassVar[MethodInfo] = UNDECLARED  # description for the tables, recipes and generic tests
    _variant_of_state = cast("Mapping[str, Any]", MappingProxyType({}))  # a state of another variant is not loaded
    _saved_options: ClassVar[Mapping[str, str]] = {}  # options in a checkpoint, with their attributes
    _joined: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {}  # by name: reduces stacked diagnostics of tasks
    _fixed_rate: ClassVar[str] = ""  # why lower_lr cannot be "auto"
    _foreign: ClassVar[bool] = False  # True if it is defined outside the package
    _arguments = cast("Mapping[str, str]", MappingProxyType({}))  # texts of the arguments that ranks compare

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._saved_options = {name: one.attribute or name for name, one in cls._options.items() if one.saved}
        cls.__signature__ = signature_of(cls)  # type: ignore[attr-defined]
        cls._foreign = cls.__module__.split(".")[0] != __name__.split(".")[0]
        if "declared" in vars(cls):
            register(cls)

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Report a missing or unknown argument as the method's own, not a base class's."""
        compared = {}
        if arguments or options:  # copying passes none
            try:
                bound = cls.__signature__.bind(*arguments, **options)  # type: ignore[attr-defined]
            except TypeError as error:
                raise argument_error(cls, error, arguments, options) from None
            if options.get("process_group") is not None:
                bound.apply_defaults()
                compared = {k: text_of(v) for k, v in bound.arguments.items() if k not in NOT_COMPARED}
        made = super().__new__(cls)
        if compared:
            made._arguments = compared
        return made

    def __init__(self, upper: Params, lower: Params, **options: Any) -> None:
        values = self._checked_options({"upper": upper, "lower": lower, **options})
        self._one_loss = self.declared.losses == 1  # from which `_objectives` makes the two
        asked = values["lower_optimizer"]  # a method may put one of its own in the place of None
        self._arrange(values)
        for name, one in self._options.items():
            if one.attribute is not None:
                setattr(self, one.attribute, values[name])
        upper_optimizer, lower_optimizer = values["upper_optimizer"], values["lower_optimizer"]
        method = type(self).__name__
        if upper_optimizer is not None and self.declared.upper_update:
            raise ValueError(
                f"Invalid upper_optimizer value: {upper_optimizer} ({method} has its own update of x: "
                f"{self.declared.upper_update}; leave out upper_optimizer)"
            )
        self._upper_factory, self._lower_factory = upper_optimizer, lower_optimizer or SGD
        for level, given in (("upper", upper_optimizer), ("lower", lower_optimizer)):
            if given is not None:
                require_optimizer(level, given)
        lr = rate_of("upper", values["lr"], upper_optimizer, method)
        lower_lr, auto = lower_rate(values["lower_lr"], self._lower_factory, asked, method, self._fixed_rate)
        self._lower_solver: Callable[[], Any] | None = values.get("lower_solver")
        if self.task_memory:
            learns = type(self)._learned_start is not Method._learned_start
            require_task_memory(
                method,
                start="lower_init" if self.lower_init is not None else "" if self.warm_start else "warm_start=False",
                own_rule=learns or self._one_loss or self.declared.tasks in ("rows", "required"),
                process_group=values["process_group"],
            )
        if upper_optimizer is not None:
            require_given_gradient(probe(upper_optimizer, lr), "upper", "there is one hypergradient for each step")
        self._limits = limits_of(values["lower_clip"], values["lower_projection"], interior=self._stationary)
        self._lower_checks = LowerChecks(self._lower_factory, lower_lr)
        self._oracle_options = EvaluationOptions(
            values["vectorize"],
            values["hvp"],
            Ranks(values["process_group"]),
            one_loss=self._one_loss,
            responds=self.declared.responds and not self.declared.initial,
            follows_curvature=auto,
        )
        self._default_lr, self._auto = {"upper": lr, "lower": lower_lr}, auto
        self._rules, self._upper_rules = self._new_rules()
        self._run_state, self._turn = RunState(), Turn()
        self.numbers: dict[str, Any] = {}
        self._diagnostics: dict[str, Any] = {}
        self._placeholders = False  # True while the state holds only zeros, shaped like a first step's state
        self._begun: tuple[WatchedStart, Vector] | None = None  # this step's start of y, if it has a graph
        self._captured: Any = None  # makes the steps after `compile`
        self._untraced_update = ""  # why a graph does not move x, if the upper optimizer is the only obstacle
        super().__init__(consistently_named([*as_groups(upper, "upper"), *as_groups(lower, "lower")]), {"lr": lr})
        require_apart(self.param_groups)
        self.param_groups[0][OWN] = b""
        self._lower_checks.require(self.declared.lower_optimizer, self._limits, method)
        if self._stationary:
            self._lower_checks.require_at_rest()

    @property
    def diagnostics(self) -> dict[str, Any]:
        """Tensors, plain numbers and texts of the last step, by name.

        Norms are computed when this is read, some from tensors of ``state``: read them before you write there in place.
        """
        self._diagnostics.update(measured(self._diagnostics))
        return self._diagnostics

    @diagnostics.setter
    def diagnostics(self, figures: dict[str, Any]) -> None:
        self._diagnostics = figures

    def _make_step(self, upper: Loss | None, lower: Loss | None, tasks: Any, *, update: bool) -> Tensor:
        """Make a step, with or without the update of x, unless another thread makes one; warn if f has grown."""
        with self._turn:
            trend = self._run_state.upper_trend
            if tasks is not None and self._lower_solver is not None:
                raise ValueError(
                    "lower_solver= solves one lower problem, and a step with tasks has many; leave out tasks=, or "
                    "create the optimizer without lower_solver="
                )
            single_loop = self.declared.kept_by_tasks and not self.declared.lower_steps
            if tasks is not None and single_loop and not self.task_memory:
                warn_of_forgetting(type(self).__name__, self._run_state.warned)
            self._heed_options_of_sgd()
            look = update and self._run_state.steps == STILL - 1 and self.check_finite and not self._one_loss
            before = [Vector(self.parameters(level)).detach().clone() for level in LEVELS] if look else []
            put_back, done = self._set_below() if self._sets_below(tasks) else None, self._run_state.steps
            try:
                if self._captured is None:
                    loss = self._eager_step(upper, lower, tasks, update=update)
                else:
                    loss = self._captured.step(upper, lower, tasks, update)
            except BaseException as error:
                if put_back is not None and self._run_state.steps == done:  # else an interrupt has waited for the step
                    put_back()
                if isinstance(error, RuntimeError) and "escaped from inside a function being vmapped" in str(error):
                    raise RuntimeError(RECOMPUTED) from error
                if not isinstance(error, NonFiniteError) or error.hint or not trend.above:
                    raise
                raise NonFiniteError(
                    error.oracle, error.step, f"The run has diverged: {trend.text}. {DIVERGES}"
                ) from None
            finally:
                self._begun = None
            self._run_state.written = {}
            self._run_state.spent = spent_gradient(self.param_groups[0]["params"]) if update else None
            if written := self._run_state.buffers.first_written():
                warn(FIRST_WRITTEN.format(written))
            self._watch_losses(loss, moves=update)
            if look:
                self._watch_moves(float(loss), before)
            return loss

    def _eager_step(
        self,
        upper: Loss | None,
        lower: Loss | None,
        tasks: Any,
        *,
        update: bool,
        random: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Make a step without compilation. Random inputs are drawn unless ``random`` has them."""
        transaction, oracle, groups = self._open_step(upper, lower)
        with transaction:
            inputs = self._step_inputs(oracle, groups, random)
            results = self._compute(oracle, inputs, tasks, update=update)
            transaction.conclude()
            transaction.commit(self._step_writes(oracle, results), undo_of(self.state, oracle.live_x, oracle.live_y))
        return cast(Tensor, self._run_state.last_loss)

    def _open_step(self, upper: Loss | None, lower: Loss | None) -> tuple[Transaction, Oracle, Groups]:
        """Return a transaction for a step, the oracle of both losses at the current point, and the groups by level.

        Ranks compare their options here; a difference ends the step on all of them.
        """
        ranks, groups = self._oracle_options.ranks, by_level(self.param_groups)
        oracle = self._oracle(upper, lower, groups=groups)
        self._look_beside_losses(oracle, groups["lower"])
        if not ranks.alone:
            options = self._decisive(groups)
            oracle.session.begin(oracle.live_x, oracle.live_y, lambda: names_of(self.param_groups), options)
        return Transaction(self.generator, oracle), oracle, groups

    def _oracle(self, upper: Loss | None, lower: Loss | None = None, *, groups: Groups | None = None) -> Oracle:
        """Return the oracle of both losses at the current point; ``groups`` are the groups by level, if known."""
        require_gradients()
        require_no_transform()
        f, g = self._objectives(upper, lower)
        self._run_state.buffers.expect((upper, lower))
        groups = groups or by_level(self.param_groups)
        x, y = tensors_of(groups["upper"], "upper"), tensors_of(groups["lower"], "lower")
        session, names = Session.after(self._run_state, self._oracle_options), lambda: names_of(self.param_groups)
        require_callable((*x, *y), names)
        session.one_by_one, session.hooked = why_one_by_one(self._run_state.buffers.modules), any_hooks(y)
        return Oracle(x, y, f, g, names=names, session=session)

    def _look_beside_losses(self, oracle: Oracle, groups: list[dict[str, Any]]) -> None:
        """Find the ways by which x reaches y besides the losses; raise for one that the estimate leaves out."""
        x, projection = oracle.live_x, self._limits.projection
        plain = projection is None and self._begun is None and self._lower_factory is SGD
        if plain and not any([isinstance(value, Tensor) for group in groups for value in group.values()]):
            return  # as in most runs
        doors = self._lower_checks.doors(groups, x)
        if projection is not None and projection_reads(projection, oracle.y, x):
            doors[PROJECTION] = ""
        if self._begun is not None and leads(self._begun[1], x):
            doors[START] = ""
        for door, name in doors.items():
            if door not in self.declared.doors:
                raise ValueError(refusal(door, type(self).__name__, name))
        oracle.session.doors = frozenset(doors)

    def _start_of(self, init: LowerInit, x: Sequence[Tensor], session: Session | None = None) -> WatchedStart:
        """Return a function like ``lower_init`` that raises if the estimate leaves out how its result depends on x."""

        def note() -> None:
            if START not in self.declared.doors:
                raise ValueError(refusal(START, type(self).__name__))
            if session is not None:
                session.doors |= {START}

        return WatchedStart(init, x, note)

    def _decisive(self, groups: Groups) -> dict[str, str]:
        """Return the options that determine a step, besides losses, data and values, as texts by name."""
        found: dict[str, Any] = {"method": type(self), "steps made": self._run_state.steps}
        for name, value in vars(self).items():  # present values replace those of the arguments
            if name in self._arguments or (isinstance(value, PLAIN) and not name.startswith("_")):
                found[name] = value
        for i, group in enumerate(self.param_groups):
            entries = {name: v for name, v in group.items() if name not in ("params", "param_names", "level", OWN)}
            entries["shapes"] = [tuple(p.shape) for p in group["params"] if p.requires_grad]
            found |= {f"group {i}": group["level"], **{f"{name} of group {i}": v for name, v in entries.items()}}
        moved = self.declared.lower_optimizer != "none"
        for level, rules in (("upper", self._upper_rules), ("lower", self._rules if moved else None)):
            kind, options = (None, []) if rules is None else rules.described(groups[level])
            found[f"{level}_optimizer"] = kind
            for name in options[0] if options else ():
                values = [own.get(name) for own in options]
                found[f"{name} of {level}_optimizer"] = values if len(values) > 1 else values[0]
        return {**self._arguments, **{name: text_of(value) for name, value in found.items()}}

    def _step_inputs(
        self, oracle: Oracle, groups: Groups, random_inputs: Mapping[str, Any] | None = None
    ) -> StepInputs:
        """Return the inputs of a step; ``random_inputs`` are drawn if None."""
        self._run_state.note_trained(self.state, self.param_groups)
        counts = self._random_inputs() if random_inputs is None else {}
        if counts:
            broadcast = partial(self._oracle_options.ranks.broadcast_number, device=oracle.device)
            random_inputs = draw_random_inputs(counts, self.generator, broadcast)
        inputs = self._inputs(groups, oracle.live_x, oracle.live_y, oracle.y, random_inputs or {})
        if self.lower_init is None:
            return inputs
        if self._begun is not None:
            return replace(inputs, lower_init=self._begun[0], start=self._begun[1])
        return replace(inputs, lower_init=self._start_of(self.lower_init, oracle.live_x, oracle.session))

    def _inputs(
        self,
        groups: Groups,
        x: Sequence[Tensor],
        y: Sequence[Tensor],
        lower: Vector | None = None,
        random_inputs: Mapping[str, Any] = MappingProxyType({}),
    ) -> StepInputs:
        """Return the inputs of a step of these tensors, read from the state; ``lower`` holds y's values, if known."""
        return StepInputs(
            upper_groups=groups["upper"],
            lower_groups=groups["lower"],
            **self._remembered(x, y),
            upper_rule=None if self._upper_rules is None else partial(self._upper_rules, groups["upper"]),
            lower=Vector(y).detach() if lower is None else lower,
            numbers=dict(self.numbers),
            steps=self._run_state.steps,
            rule=partial(self._rules, groups["lower"]),
            generator=self.generator,
            ranks=self._oracle_options.ranks,
            lower_init=self.lower_init,
            random_inputs=random_inputs,
        )

    def _remembered(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> dict[str, Any]:
        """Return the state of these tensors that a step reads, under its names in `StepInputs`."""
        if self._placeholders:
            self.state.clear()
            self._placeholders = False
        self._run_state.follow(self.state, self.param_groups)
        lower, upper = recalled(self.state, y, SOLVER), recalled(self.state, x, UPPER_SOLVER)
        return {
            "memory": lower.memory,
            "upper_memory": upper.memory,
            "tables": lower.tables,
            "solver": lower.solver if self.warm_start and self.lower_init is None else None,
            "upper_solver": None if self._upper_rules is None else upper.solver,
        }

    def _compute(
        self, oracle: Oracle, inputs: StepInputs, tasks: Any, *, update: bool
    ) -> tuple[Estimate, Update | None]:
        """Compute the estimate and, with ``update``, the new x; only module buffers are written."""
        losses, found = self._losses(oracle, tasks), oracle.session.found
        known = found.derivatives.get(losses)
        new_losses = known is None and len(found.derivatives) < MOST_CHECKS
        if new_losses:
            found.look_again()
        # A wrong part of a derivative may vanish where x and y begin, such as at zero.
        again = known is not None and known[1] < SECOND_CHECK <= self._run_state.steps
        checks = new_losses or (again and self.check_derivatives)
        if checks:
            oracle.session.used = {} if self.check_derivatives else None
        read_only = ReadOnly(oracle, inputs) if self._foreign else None
        estimate = self._estimate(oracle, inputs, tasks)
        if checks:
            self._check_derivatives(oracle, tasks)
        if oracle.session.buffers_skipped:
            advance_buffers(oracle, estimate.lower)
        oracle.session.lower_sample = None  # a reference cycle would keep the step's graphs
        new = None
        if update:
            if read_only is not None:
                read_only.add(*estimate.gradient)
            with torch.set_grad_enabled(False):
                new = self.update(oracle.x, estimate.gradient, inputs.after(estimate))
        if read_only is not None:
            read_only.require(type(self).__name__)
            if update:
                require_update(new, type(self).__name__)
        if new is not None and new.narrow:
            self._require_range(new, inputs.steps)
        return estimate, new

    def _require_range(self, update: Update, step: int) -> None:
        """Raise if an update in float16 is not finite."""
        if self.check_finite:
            checks = Checks()
            update.check(checks)
            checks.verify(step, set())

    def _losses(self, oracle: Oracle, tasks: Any) -> tuple[Any, ...]:
        """Return what identifies the losses of a step: code, parameters, mode of modules, and the kind of problem."""
        codes = [id(code) for one in (oracle.f, oracle.g) for code in one.codes]
        parameters = [id(t) for t in (*oracle.live_x, *oracle.live_y)]
        return (*codes, *parameters, self._run_state.buffers.mode, tasks is None, self.check_derivatives)

    def _check_derivatives(self, oracle: Oracle, tasks: Any) -> None:
        """Note these losses; if derivatives are checked, raise if one that the estimate has used is wrong."""
        session, opened = oracle.session, ""
        if self.check_derivatives:
            hooked = any_hooks((*oracle.live_x, *oracle.live_y)) or why_one_by_one(self._run_state.buffers.modules)
            unchecked = "losses not checked: hooks change their gradients"
            opened = unchecked if hooked else check_derivatives(session, self._derivatives)
            differs = self.declared.difference_step or self._oracle_options.hvp == "finite-difference"
            if differs and EACH_TIME in opened and "noise of its own" not in session.warned:
                session.warned.add("noise of its own")
                warn(NOISE)
        # While the codes exist, so do their ids; an evaluation may have found modules, whose mode counts.
        losses, steps = self._losses(oracle, tasks), self._run_state.steps
        session.found.note_derivatives(losses, opened, steps, *oracle.f.codes, *oracle.g.codes)

    @property
    def _derivatives(self) -> frozenset[str]:
        """Derivatives of the losses that an estimate takes."""
        if self._exact_products:
            return SECOND
        return JOINT if self._oracle_options.responds and self.declared.family != "zeroth-order" else FIRST

    def _estimate(
        self, oracle: Oracle, inputs: StepInputs, tasks: Any, start: Sequence[Tensor] | None = None
    ) -> Estimate:
        """Return the checked estimate; ``start`` replaces the usual start of lower solves.

        Hooks on x are called once, for the whole hypergradient.
        """
        if any_hooks(oracle.live_x):
            with called_once(oracle.live_x) as called:
                estimate = self._estimate(oracle, inputs, tasks, start)
                return replace(estimate, gradient=called(estimate.gradient))
        warm = self.warm_start or (tasks is None and self.lower_init is not None)  # lower_init has already written y
        initial = None if warm else inputs.memory.get(INITIAL)
        if start is None and not warm:
            start = oracle.y.clone() if initial is None else initial
        here = oracle if start is None else oracle.at(lower=start)
        try:
            if tasks is not None:
                return self._estimate_tasks(here, inputs, tasks)
            estimate = self._accepted_estimate(here, inputs, self._estimate_once)
        finally:
            if oracle.sharded:
                oracle.session.gathered.release()
        # Written in every step, because a parameter may be new.
        return estimate if warm else replace(estimate, memory={**estimate.memory, INITIAL: initial or here.y})

    def _accepted_estimate(
        self, oracle: Oracle, inputs: StepInputs, make: Callable[[Oracle, StepInputs], Estimate]
    ) -> Estimate:
        """Make an estimate and read its flags; make it again if the method or the lower rate reacts to them."""
        if is_tracing():
            return make(oracle, inputs)
        smaller = SMALLER if inputs.follows_curvature else 0  # remaining reductions of the lower rate
        while True:
            estimate, session = make(oracle, inputs), oracle.session
            session.conclude(oracle.lower_names)
            if not self.check_finite:
                return estimate
            try:
                quiet = partial(is_quiet, {GROWS, LED_AWAY} if smaller else {LED_AWAY}, inputs, estimate)
                alerts = session.checks.verify(inputs.steps, session.warned, estimate.tensors_to_check, quiet)
                stiffer = smaller > 0 and (GROWS in alerts or (LED_AWAY in alerts and led_away(estimate)))
            except NonFiniteError:
                if not smaller:
                    raise
                stiffer = True
            if stiffer:
                curvature = estimate.memory[CURVATURE].times(STIFFER)
                inputs, smaller = replace(inputs, memory={**inputs.memory, CURVATURE: curvature}), smaller - 1
            elif not alerts or self._reacts_to(inputs.numbers) not in alerts:
                return estimate
            else:
                oracle, inputs = self._react(oracle, inputs, estimate)
            session.checks.clear()
            session.never_reached = None

    def _estimate_once(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return the estimate, with lower rates from the curvature if they follow it."""
        curvature: Vector | None = None
        told: dict[str, Tensor] = {}
        if inputs.follows_curvature:
            losses = (("upper", oracle.f), ("lower", oracle.g))
            terms = {f"{level}_terms": own.terms for level, own in losses if own.terms}
            draws = self._draws(replace(inputs, numbers=inputs.numbers | terms))
            margin = MARGIN_OF_TERMS if self.declared.data == "finite_sum" else MARGIN
            oracle, groups, rule, curvature, told = with_measured_rates(
                oracle,
                inputs.lower_groups,
                inputs.rule,
                inputs.memory.get(CURVATURE),
                draws,
                exact=self._exact_products,
                margin=margin,
            )
            inputs = replace(inputs, lower_groups=groups, rule=rule)
        estimate = self.estimate(oracle, inputs)
        if self._foreign:
            require_estimate(estimate, oracle, type(self).__name__)
        if self._lower_solver is not None:
            alert_if_unsolved(oracle, inputs, estimate)
        if curvature is None:
            return estimate
        memory = {**estimate.memory, CURVATURE: curvature}
        return replace(estimate, memory=memory, diagnostics={**estimate.diagnostics, **told})

    @property
    def _exact_products(self) -> bool:
        """True if the method makes Hessian-vector products by second derivatives."""
        return self.declared.second_order and self._oracle_options.hvp == "exact"

    def _step_writes(self, oracle: Oracle, results: tuple[Estimate, Update | None]) -> list[Action]:
        """Return the writes of a step's results, ``.grad`` of x included."""
        (estimate, update), session = results, oracle.session
        numbers = estimate.numbers if update is None else {**estimate.numbers, **update.numbers}
        figures = measured(estimate.figures, above=KEPT)
        if session.looped:
            figures["vectorize_fallback"] = session.looped
        return [
            *writes_of(self.state, oracle.live_x, oracle.live_y, estimate, update),
            *self._result_writes(
                figures,
                numbers,
                session.found,
                self._run_state.after(session, estimate.loss),
            ),
        ]

    def _result_writes(
        self, figures: Mapping[str, Any], numbers: Mapping[str, Any], found: LossFacts, after: dict[str, Any]
    ) -> list[Action]:
        """Return the writes of plain numbers, diagnostics and the run state."""
        diagnostics = {**figures, **self._static_diagnostics(self.numbers), **found.diagnostics()}
        if self._untraced_update:
            diagnostics["compile_fallback"] = self._untraced_update
        own = {**self.numbers, **numbers} if numbers else self.numbers
        return [
            partial(vars(self).update, numbers=own, _diagnostics=diagnostics),
            partial(self._run_state.enter, after),
        ]

    def _sets_below(self, tasks: Any) -> bool:
        """Return True if a function of the user writes y before a step."""
        return self._lower_solver is not None or (tasks is None and self.lower_init is not None)

    def _set_below(self) -> Callable[[], None]:
        """Write y by the user's functions; return a function that restores y and the random states."""
        init = None if self.lower_init is None else self._start_of(self.lower_init, self.parameters("upper"))
        put_back, start = write_lower(
            self.parameters("lower"),
            names_of([group for group in self.param_groups if group["level"] == "lower"]),
            init,
            self._lower_solver,
            generator=self.generator,
            one_process=self._oracle_options.ranks.alone,
        )
        self._begun = None if init is None or start is None else (init, start)
        return put_back

    def _solved_below(self) -> Vector:
        """Return y as the user's functions write it before a step; the live y stays as it is."""
        y = Vector(self.parameters("lower")).detach()
        before = y.clone()
        self._set_below()
        self._begun, solved = None, y.clone()
        y.copy_(before)
        return solved

    def _watch_losses(self, losses: Tensor, *, moves: bool) -> None:
        """Warn once if upper losses have grown, except for minimax methods and without ``check_finite``.

        Or if the solution of a linear system that is carried from step to step diverges.
        """
        if not self._one_loss and self.check_finite:
            state = self._run_state
            watch_losses(state.upper_trend, state.warned, state.steps, losses, self._slope if moves else lambda: None)
            if RIGHT_SIDE in self._diagnostics:
                every = SYSTEM if losses.is_cpu else LOOKS
                watch_system(state.system_trend, state.warned, state.steps, every, lambda: self.diagnostics)

    def _watch_moves(self, loss: float, before: Sequence[Vector]) -> None:
        """Warn if x, or y under LBFGS, hardly moved, or if x overshot; ``before`` has the values before the step."""
        if (slope := self._slope()) is None:
            return
        lower_optimizer, _ = self._rules.described(by_level(self.param_groups)["lower"])
        watch_moves(
            self._run_state.upper_trend,
            self._run_state.warned,
            type(self).__name__ if self.declared.family == "control" else "",
            loss,
            before,
            [Vector(self.parameters(level)).detach() for level in LEVELS],
            slope,
            self.diagnostics.get("lower_residual") if issubclass(lower_optimizer, LBFGS) else None,
        )

    def _slope(self) -> StepLength | None:
        """Return the gradient and the rate of x in the last step; None for sharded parameters."""
        groups = by_level(self.param_groups)["upper"]
        tensors = [p for group in groups for p in group["params"]]
        if any_sharded(tensors):
            return None
        norm = self._diagnostics.get("hypergradient_norm")  # that of .grad, which a step has just set
        if type(norm) is not Tensor:
            norm = Vector(p.new_zeros(1) if p.grad is None else p.grad for p in tensors).norm()
        size = float(norm)
        lr, option = max(float(group["lr"]) for group in groups), self.declared.fixed_length
        fixed = bool(option and getattr(self, option))
        if self._upper_factory is not None:  # an optimizer may move each entry by its rate
            return StepLength(size, lr, lr * sum(t.numel() for t in tensors) ** 0.5, fixed)
        return StepLength(size, lr, lr if fixed else lr * size, fixed)

    @torch.no_grad()
    def _update(self) -> None:
        """Update the upper parameters that have a ``.grad``."""
        require_gradients()  # a state that is made in inference mode could not be changed outside
        require_no_transform()
        if initialises(self):
            if self._run_state.steps == 0:
                self.state.update(initial_state(self, self._oracle_options.ranks))
                self._placeholders = bool(self.state)
            return
        self._heed_options_of_sgd()
        groups = by_level(self.param_groups)
        for group in groups["upper"]:
            group["params"] = [p for p in group["params"] if p.grad is not None]
        x = [p for group in groups["upper"] for p in group["params"]]
        check_gradients(x, self._run_state)
        with Transaction(self.generator, device=x[0].device) as transaction:
            writes = self._update_writes(groups, x, Vector(p.grad for p in x))
            transaction.commit(writes, undo_of(self.state, x, ()))
        self._run_state.written = {}  # our own update has changed the versions
        warn_of_spent(x, self._run_state)

    @torch.no_grad()
    def _update_writes(
        self, groups: Groups, x: Sequence[Tensor], gradient: Vector, estimate: Estimate | None = None
    ) -> list[Action]:
        """Return the writes of an update of x along a gradient, that of an estimate made elsewhere, if there is one."""
        y = tensors_of(groups["lower"], "lower")
        inputs, numbers = self._inputs(groups, x, y), self.numbers
        if estimate is not None:
            inputs, numbers = inputs.after(estimate), numbers | estimate.numbers
        update = self.update(Vector(x).detach(), gradient, inputs)
        if update.narrow:
            self._require_range(update, max(inputs.steps - 1, 0))
        writes = writes_of(self.state, x, y, None, update)
        return [*writes, partial(vars(self).update, numbers=numbers | update.numbers)]

    def parameters(self, level: str) -> list[Tensor]:
        """Return the parameters of one level that require a gradient."""
        tensors = [p for group in self.param_groups if group["level"] == level for p in group["params"]]
        return tensors_of([{"params": [p for p in tensors if p.requires_grad]}], level)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in ``torch.optim``, with a ``"level"``: ``"upper"`` or ``"lower"``."""
        level = level_of(param_group)
        if level == "lower" and self._auto and "lr" not in param_group:
            param_group[FACTOR] = True
        param_group.setdefault("lr", self._default_lr.get(str(level)))
        if isinstance(param_group.get("params"), Iterator):
            param_group["params"] = [*param_group["params"]]
        require_one_level(param_group, self.param_groups)
        require_usable(param_group)
        if any(OWN in group for group in self.param_groups[:1]):  # else the constructor checks all groups at once
            require_apart([*self.param_groups, param_group], len(self.param_groups))
        require_rates([param_group])
        self._heed_options_of_sgd(param_group)
        super().add_param_group(param_group)
        if hasattr(self, "_run_state"):
            self._run_state.found.ranks_agree = False  # the new parameters have not been compared
            self._run_state.buffers.complete = False  # the next step may call other modules
            self._run_state.found.forget_derivatives()
        if level == "lower" and self._stationary:
            self._lower_checks.warn_of_decay(self.param_groups[-1])

    def _heed_options_of_sgd(self, *added: dict[str, Any]) -> None:
        """Move x by torch's SGD if an upper group has options of it; refuse them where the method makes the steps."""
        groups, moves_by_sgd = (*self.param_groups, *added), False
        if all(map(_NONE_OF_SGD, groups)):
            return  # as in most steps
        accelerated = self._lower_checks.accelerated
        own_updates = {
            "upper": self.declared.upper_update and f"x: {self.declared.upper_update}",
            "lower": "y" if self.declared.lower_optimizer == "none" else "y: Nesterov's method" if accelerated else "",
        }
        for group in groups:
            level = group["level"]
            for name in filter(group.get, OF_SGD):
                if own_updates[level] and not (level == "lower" and accelerated and name == "momentum"):
                    raise ValueError(
                        f"Invalid {name} value: {group[name]} ({type(self).__name__} has its own update of "
                        f"{own_updates[level]}; leave {name} out of the {level} groups)"
                    )
                moves_by_sgd = moves_by_sgd or level == "upper"
        if moves_by_sgd and self._upper_factory is None:
            self._upper_factory, self._upper_rules = SGD, LowerRules(SGD)

    def _new_rules(self) -> tuple[LowerRules, LowerRules | None]:
        """Return new update rules of y and, if x has an optimizer of its own, of x; not bound to parameters yet."""
        upper = None if self._upper_factory is None else LowerRules(self._upper_factory)
        return LowerRules(self._lower_factory, self._limits), upper

    @abstractmethod
    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return the improved y and the hypergradient at the oracle's point; write nothing."""

    def update(self, x: Vector, gradient: Vector, inputs: StepInputs) -> Update:
        """Return the new x; write nothing. ``inputs`` holds the groups and the state of these tensors."""
        return inputs.step_upper(x, gradient)

    def _arrange(self, options: dict[str, Any]) -> None:
        """Check options that depend on each other, and replace those that others determine, before they are stored."""

    def _objectives(self, upper: Loss | None, lower: Loss | None) -> tuple[Objective, Objective]:
        """Return the two objectives of a step."""
        if upper is None or lower is None:
            raise TypeError(
                f"{type(self).__name__} takes both losses, upper and lower, but got only one: call "
                "step(upper_loss, lower_loss)"
            )
        return as_objective(upper, "upper"), as_objective(lower, "lower")

    def _draws(self, inputs: DrawInputs) -> list[Draw] | None:
        """Return the draws of the next step without tasks from its two losses, in order; draw nothing.

        An estimate that is repeated, after an alert, draws again. None if the draws are not known before the step:

        * `RTMLMC` and `DLSGD` have a lower problem for each context, and no losses of their own to draw from;
        * with ``lower_tol`` the host determines the number of lower steps from values;
        * a method defined elsewhere need not declare them.
        """
        return None

    def _task_draws(self, inputs: DrawInputs, sampler: Any) -> list[TaskDraw] | None:
        """Return the draws of the next step with tasks from the sampler: the tasks, then their batches; draw nothing.

        None if they are not known before the step, as for `_draws`. The draws of `RTMLMC` and `DLSGD` depend on the
        level of each context, a random number, and come from a separate generator for each purpose.
        """
        kept = dict.fromkeys(self.declared.kept_by_tasks if self.task_memory else (), Vector([]))
        draws = self._draws(replace(inputs, memory=kept, tables={}))  # tasks start without other state of y
        if draws is None:
            return None
        return [TaskDraw("tasks", task_count(sampler, self.tasks_per_step)), *of_tasks(draws, self._rows_per_batch)]

    @property
    def _rows_per_batch(self) -> dict[str, int | None]:
        """Number of rows of each task's data that an evaluation of each loss draws; None: all."""
        return {"lower": self.lower_batch, "upper": self.upper_batch}

    def _random_inputs(self) -> dict[str, int]:
        """Return the random integers that an estimate needs: name -> n, drawn uniformly from range(n)."""
        return {}

    def _lower_step_count(self, steps: int) -> int:
        """Return the number of lower steps in the next outer step, after ``steps`` outer steps."""
        return self.lower_steps

    @property
    def _stationary(self) -> bool:
        """True if the estimate assumes that y is a stationary point of the lower loss, as implicit methods do."""
        return self.declared.second_order and self.declared.lower_optimizer != "differentiable"

    def _without_lookahead(self, inputs: StepInputs) -> StepInputs:
        """Return inputs for an estimate at x itself, for a method that would estimate at a look-ahead point."""
        return inputs

    def _reacts_to(self, numbers: Mapping[str, Any]) -> str | None:
        """Return the alert after which `_react` is called and the estimate is repeated; None: no alert."""
        return None

    def _react(self, oracle: Oracle, inputs: StepInputs, estimate: Estimate) -> tuple[Oracle, StepInputs]:
        """Return the oracle and the inputs with which the estimate is repeated after that alert."""
        raise NotImplementedError

    def _finished(self) -> bool:
        """Return True if the run has ended, so that ``step`` only returns the last loss."""
        return False

    def _static_diagnostics(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return diagnostics that follow from the plain numbers before a step."""
        return {}

    def _estimate_tasks(self, oracle: Oracle, inputs: StepInputs, sampler: Any) -> Estimate:
        """Return the mean of the estimates for the drawn tasks, computed as one problem with stacked y."""
        self._lower_checks.require_elementwise("tasks")
        estimate = task_mean(
            oracle,
            inputs,
            sampler,
            partial(self._accepted_estimate, make=self._estimate_once),
            count=task_count(sampler, self.tasks_per_step),
            sizes=self._rows_per_batch,
            together=self._together,
            random_inputs=self._random_inputs(),
            joined=self._joined,
            remembered=remembered_tasks(sampler) if self.task_memory else None,
            kept=self.declared.kept_by_tasks,
        )
        return estimate if self.warm_start else replace(estimate, lower=None)

    def _together(self, tasks: int) -> list[slice]:
        """Return slices of the drawn tasks, each solved as one stacked problem; by default one with all of them."""
        return [slice(0, tasks)] if tasks else []

    def _learned_start(self, oracle: Oracle) -> Vector:
        """Return the initial lower parameters of a new task: the live values. Methods that learn them override this."""
        return oracle.y

    def _rows_of(self, lower: Sequence[Tensor]) -> int | None:
        """Return the number of rows of the method's tables for these parameters; 0: one problem; None: no tables."""
        return None

    def _place_of(self, name: str, parameter: Tensor) -> torch.device | None:
        """Return the device for a loaded entry of ``state[parameter]``; None: the device it was saved from."""
        if name not in COUNTS:
            return parameter.device
        group = next(group for group in self.param_groups if any([p is parameter for p in group["params"]]))
        factory = self._upper_factory if group["level"] == "upper" else self._lower_factory
        return None if factory is None else place_of_counts(factory, group, parameter)

    def _graph_key(self, steps: int, numbers: Mapping[str, Any]) -> Any:
        """Cache key for the next step's graph, from the step count and the plain numbers; None if it must run eagerly.

        The numbers include ``upper_terms`` and ``lower_terms`` of losses that are finite sums. For a method with
        ``host_update`` the graph is that of the estimate.
        """
        return self._lower_step_count(steps), numbers

    def _why_eager(self, tasks: Any = None) -> str:
        """Return why steps (with these tasks) cannot be compiled; empty if they can."""
        return "lower_solver is a function of yours" if self._lower_solver is not None else self.declared.uncaptured

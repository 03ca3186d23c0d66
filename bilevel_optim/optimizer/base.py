"""`BilevelOptimizer`: a ``torch.optim.Optimizer`` over two sets of parameters."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from ..distributed.ranks import Ranks
from ..hypergradient import Estimate
from ..oracle.buffers import Buffers
from ..oracle.checks import Checks
from ..oracle.lanes import stacked
from ..oracle.oracle import Oracle
from ..oracle.session import COUNTERS, Findings, Options, Session
from ..problem import tasks as task_layer
from ..problem.objective import Objective
from ..problem.parameters import (
    LEVELS,
    Params,
    as_groups,
    consistently_named,
    is_count,
    is_number,
    require,
    require_one_level,
)
from ..problem.vector import Vector, is_sharded
from ..solvers.agd import AGD
from ..solvers.lower import NOT_ELEMENTWISE, LowerRule, Memory
from .declaration import Method, register
from .step import Given, Update

__all__ = ["REMADE", "BilevelOptimizer", "ColdOptions", "CommonOptions", "as_objective"]

Loss = Objective | Callable[..., Tensor]
SOLVER = "lower_optimizer."  # prefix of the lower optimizer's entries in state[p]


class ColdOptions(TypedDict, total=False):
    """Keyword arguments that every method takes, but for ``warm_start``; see `BilevelOptimizer`."""

    lower_optimizer: Callable[[Any], Optimizer] | None
    check_finite: bool
    generator: torch.Generator | None
    vectorize: bool | int
    hvp: str
    process_group: Any
    tasks_per_step: int | None
    lower_batch: int | None
    upper_batch: int | None
    lower_init: task_layer.LowerInit | None


class CommonOptions(ColdOptions, total=False):
    """Keyword arguments that every method takes, see `BilevelOptimizer`."""

    warm_start: bool


class BilevelOptimizer(Optimizer, ABC):
    r"""Base class of the methods for :math:`\min_x f(x, y^*(x))`, :math:`y^*(x) = \arg\min_y g(x, y)`.

    A real ``torch.optim.Optimizer``: ``param_groups`` holds the groups of the upper parameters x, then those of the
    lower parameters y; each has a ``"level"`` (``"upper"`` or ``"lower"``) and its own ``"lr"``, which schedulers may
    change.

    A step is a function of values: :meth:`estimate` improves y and estimates the hypergradient, :meth:`update` moves x;
    neither writes anything. What they return is checked, and then written by this class. A method is a subclass that
    has these functions; of ``self`` they read hyper-parameters only.

    Args:
        upper: upper parameters: tensors, ``(name, tensor)`` pairs or group dicts, as ``torch.optim`` takes.
        lower: lower parameters, likewise.
        lr: learning rate of the upper update.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step.
        warm_start: start each lower solve where the last one ended; otherwise each starts from the value that the lower
            parameters had at the first step. Default: True.
        lower_optimizer: makes the optimizer of the lower steps from parameter groups, as ``torch.optim.Adam`` or
            ``lambda groups: torch.optim.SGD(groups, momentum=0.9)`` do. Its learning rate is that of the groups
            (``lower_lr``). With warm starts its state lasts too. Default: ``torch.optim.SGD``.
        check_finite: raise `NonFiniteError`, before anything is written, if an oracle returns NaN or infinity; costs
            one host synchronisation per step. Default: True.
        generator: source of the method's own random numbers. Default: torch's default one.
        vectorize: how several copies of y are evaluated: True, all at once under ``torch.func.vmap``; False, in a loop;
            a number, in chunks of that many. Default: True.
        hvp: ``"exact"`` Hessian-vector products by double backward, or ``"finite-difference"`` of first-order
            gradients. Default: ``"exact"``.
        process_group: average all oracles over the ranks of this ``torch.distributed`` group, each of which has its own
            part of the data and the same parameters. Sharded lower parameters (FSDP2) work with methods that need first
            derivatives only. Default: None.

    Attributes:
        oracle_counts: cumulative number of ``upper_grad``, ``lower_grad``, ``hvp``, ``jvp`` and ``loss`` evaluations,
            each per sample batch. (``jvp`` counts products with the cross derivative.)
        diagnostics: tensors of the last step: ``hypergradient_norm``, and what the method adds.
        numbers: the plain numbers of the method that change from step to step (restart counters and the like).
    """

    declared: ClassVar[Method]  # what tables, recipes and tests need to know of a method

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "declared" in vars(cls):
            register(cls)

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float,
        lower_lr: float,
        lower_steps: int,
        warm_start: bool = True,
        lower_optimizer: Callable[[Any], Optimizer] | None = None,
        check_finite: bool = True,
        generator: torch.Generator | None = None,
        vectorize: bool | int = True,
        hvp: str = "exact",
        process_group: Any = None,
        tasks_per_step: int | None = None,
        lower_batch: int | None = None,
        upper_batch: int | None = None,
        lower_init: task_layer.LowerInit | None = None,
    ) -> None:
        require("learning rate", lr, is_number(lr) and lr >= 0, wording="Invalid learning rate: {value}")
        require("lower_lr", lower_lr, is_number(lower_lr) and lower_lr >= 0)
        require("lower_steps", lower_steps, is_count(lower_steps))
        require("vectorize", vectorize, isinstance(vectorize, bool) or (is_count(vectorize) and vectorize > 0))
        require("hvp", hvp, hvp in ("exact", "finite-difference"))
        require("lower_optimizer", lower_optimizer, lower_optimizer is None or callable(lower_optimizer))
        require("generator", generator, generator is None or isinstance(generator, torch.Generator))
        sizes = {"tasks_per_step": tasks_per_step, "lower_batch": lower_batch, "upper_batch": upper_batch}
        for name, size in sizes.items():
            require(name, size, size is None or (is_count(size) and size > 0))
        require("lower_init", lower_init, lower_init is None or callable(lower_init))
        self.tasks_per_step, self.lower_batch, self.upper_batch = tasks_per_step, lower_batch, upper_batch
        self.lower_init = lower_init
        self.lower_steps, self.warm_start, self.check_finite = lower_steps, bool(warm_start), bool(check_finite)
        self.generator = generator
        self.diagnostics: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self._factory: Callable[[Any], Optimizer] = lower_optimizer or SGD
        self._options = Options(vectorize, hvp, Ranks(process_group))
        self._found, self._buffers, self._warned = Findings(), Buffers(), set[str]()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._steps_done = 0
        self._last_loss: Tensor | None = None
        self._rules: list[LowerRule] = []
        self._default_lr = {"upper": lr, "lower": lower_lr}
        super().__init__(consistently_named([*as_groups(upper, "upper"), *as_groups(lower, "lower")]), {"lr": lr})

    saved_options: tuple[str, ...] = ()  # names of hyper-parameters that a user may change during a run

    # ------------------------------------------------------------------------------------------------ verbs

    def step(  # type: ignore[override]
        self,
        upper: Loss | None = None,
        lower: Loss | None = None,
        *,
        tasks: Any = None,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """One outer iteration: improve y, estimate the hypergradient, update x.

        Args:
            upper: f, a callable or an `Objective`. Left out together with ``lower``: only the update of x is made, from
                the ``.grad`` that :meth:`backward` has set.
            lower: g, likewise.
            tasks: a sampler of tasks, such as `TensorTasks`: there is one lower problem for each task, the losses are
                bare callables that take one task's batch, and the hypergradient is the mean over the tasks drawn. Each
                task starts from the live y (or from ``lower_init``); afterwards the live y holds the mean of the tasks'
                solutions, or with ``warm_start=False`` what it held before. What a method keeps from step to step
                beside y (momentum, solutions of linear systems) belongs to the tasks and starts anew at each step.
            closure: instead of losses, a function that calls :meth:`backward`, as ``torch.optim`` has it; its result is
                returned.

        Returns:
            The upper loss at the point where the hypergradient was estimated, detached; None without losses.

        Raises:
            NonFiniteError: if an oracle returned NaN or infinity; nothing has changed then.
            ValueError: at the first step, if a loss is not a scalar or does not depend on the parameters.
        """
        if self.finished():
            return None if upper is None else self._last_loss
        if closure is not None:
            if upper is not None or lower is not None:
                raise TypeError("step takes a closure or losses, not both")
            with torch.enable_grad():
                result = closure()
            self._commit_update(*self._updated(self._gradients()))
            return result
        if upper is None and lower is None:
            if tasks is not None:
                raise TypeError("step takes tasks only together with both losses")
            self._commit_update(*self._updated(self._gradients()))
            return None
        proposal = self._proposed(upper, lower, tasks)
        x, estimate = proposal[0].live_x, proposal[1]
        update = self._updated(list(zip(x, estimate.gradient, strict=True)), estimate)
        loss = self._commit(*proposal)
        self._commit_update(*update)
        return loss

    def backward(self, upper: Loss, lower: Loss | None = None, *, tasks: Any = None) -> Tensor:
        """Improve y, and set ``.grad`` of the upper parameters to the estimate of the hypergradient.

        Follow it with gradient clipping, with ``step()``, or with a step of any ``torch.optim`` optimizer over x.
        Arguments, result and errors as for :meth:`step`.
        """
        return self._commit(*self._proposed(upper, lower, tasks))

    def propose(
        self,
        upper: Loss,
        lower: Loss | None = None,
        *,
        tasks: Any = None,
        still: bool = False,
        start: Sequence[Tensor] | task_layer.LowerInit | None = None,
    ) -> Estimate:
        """What a step would do, without doing it: the estimate, with the improved y.

        Random numbers are drawn, and data too. The losses and tasks are as for :meth:`step`; ``still`` asks for the
        estimate at x itself of a method that would look ahead of it; ``start`` gives other lower values to begin at
        than the present ones, with tasks as a function like ``lower_init``.
        """
        warned = set(self._warned)
        try:
            return self._proposed(upper, lower, tasks, still=still, start=start)[1]
        finally:
            self._warned = warned

    def oracle(
        self, upper: Loss | None, lower: Loss | None = None, *, groups: dict[str, list[dict[str, Any]]] | None = None
    ) -> Oracle:
        """The two losses at the present point, as a step sees them; ``groups`` are the parameters', if at hand."""
        f, g = self.objectives(upper, lower)
        groups = groups or {level: self._groups(level) for level in LEVELS}
        x, y = (_tensors(groups[level], level) for level in LEVELS)
        session = Session.begun(self._options, self._found, self._buffers)
        return Oracle(x, y, f, g, names=self._names(), session=session)

    @property
    def oracle_counts(self) -> dict[str, int]:
        """Cumulative oracle calls, per sample batch."""
        return dict(self._counts)

    # ------------------------------------------------------------------------------------------------ for the methods

    @abstractmethod
    def estimate(self, oracle: Oracle, given: Given) -> Estimate:
        """The improved y and the hypergradient, from the oracle's point; writes nothing."""

    def update(self, x: Vector, gradient: Vector, given: Given) -> Update:
        """The new x; writes nothing. ``given`` holds the groups and the memory of these tensors."""
        return Update(x.descended(gradient, given.upper_rates))

    def estimate_tasks(self, oracle: Oracle, given: Given, sampler: Any) -> Estimate:
        """The mean of the estimates for the tasks of one draw, made as one problem with stacked y."""
        self.require_elementwise("tasks")
        count = task_layer.task_count(sampler, self.tasks_per_step)
        drawn = task_layer.sample(sampler, count, given.generator)
        tasks, share = given.ranks.share(drawn, count)
        sizes = {"lower": self.lower_batch, "upper": self.upper_batch}
        loss, gradient, mean = torch.zeros((), device=oracle.device), oracle.x.zeros_like(), oracle.y.zeros_like()
        estimates: list[Estimate] = []
        for part in self.together(share):
            some, n = task_layer.select(tasks, part), len(range(share)[part])
            draws = task_layer.TaskDraws(sampler, some, n, sizes, given.generator)
            start = task_layer.starting_points(oracle.y, oracle.lower_names, some, n, given.lower_init)
            estimate = self.checked(stacked(oracle, start, draws.batch), given.anew(), self.estimate)
            loss, gradient = loss + estimate.loss / count, gradient + estimate.gradient * (1 / count)
            y = start if estimate.lower is None else estimate.lower
            mean = mean + Vector(t.sum(0) / count for t in y)
            estimates.append(estimate)
        loss, gradient, mean = given.ranks.total(loss, gradient, mean)
        # What belongs to x stays; what belongs to the tasks' y goes with them.
        kept = estimates[-1] if estimates else Estimate(loss, gradient)
        return Estimate(
            loss,
            gradient,
            {**_over_parts([estimate.diagnostics for estimate in estimates]), "tasks": drawn},
            upper_memory=kept.upper_memory,
            numbers=kept.numbers,
            lower=mean if self.warm_start else None,
        )

    def checked(self, oracle: Oracle, given: Given, make: Callable[[Oracle, Given], Estimate]) -> Estimate:
        """An estimate whose flags have been read; made again where the method reacts to them."""
        while True:
            estimate, session = make(oracle, given), oracle.session
            session.conclude()
            alerts = session.checks.verify(given.steps, self._warned) if self.check_finite else set()
            again = self.react(alerts, oracle, given, estimate) if alerts else None
            if again is None:
                return estimate
            oracle, given = again
            session.checks = Checks()

    def react(self, alerts: set[str], oracle: Oracle, given: Given, estimate: Estimate) -> tuple[Oracle, Given] | None:
        """Where and with what the estimate is to be made again after alerts; None if it stands."""
        return None

    def together(self, tasks: int) -> list[slice]:
        """Which of the drawn tasks make one stacked problem: all of them."""
        return [slice(0, tasks)] if tasks else []

    def finished(self) -> bool:
        """Whether ``step`` has nothing left to do, and returns the last loss."""
        return False

    def standing_still(self, given: Given) -> Given:
        """What makes the next estimate one at x itself, for a method that would look ahead of it."""
        return given

    def lower_step_count(self, given: Given) -> int:
        """Lower steps of the present outer step."""
        return self.lower_steps

    def objectives(self, upper: Loss | None, lower: Loss | None) -> tuple[Objective, Objective]:
        """The two objectives of a step."""
        if upper is None or lower is None:
            raise TypeError("step takes both losses, upper and lower, or none of them (after backward)")
        return as_objective(upper, "upper"), as_objective(lower, "lower")

    def probe(self) -> Optimizer:
        """The lower optimizer made for a dummy parameter, to see what it is."""
        return self._factory([{"params": [torch.zeros(1, 1, requires_grad=True)], "lr": self._default_lr["lower"]}])

    def require_elementwise(self, what: str = "copies of y") -> None:
        """Raise if the lower optimizer would mix what is stacked."""
        kind = type(self.probe())
        if issubclass(kind, NOT_ELEMENTWISE):
            raise ValueError(
                f"Invalid lower_optimizer value: {kind.__name__} does not treat every entry alone, so it would mix the "
                f"{what}; use SGD, Adam or the like"
            )

    def require_given_gradient(self) -> None:
        """Raise if the lower optimizer asks for gradients at points of its own, where the method has one to give."""
        kind = type(self.probe())
        if issubclass(kind, (LBFGS, AGD)):
            raise ValueError(
                f"Invalid lower_optimizer value: {kind.__name__} evaluates gradients at points of its own, but the "
                "lower step takes an estimate made before; use SGD, Adam or the like"
            )

    # ------------------------------------------------------------------------------------------------ the transaction

    def _proposed(
        self,
        upper: Loss | None,
        lower: Loss | None,
        tasks: Any,
        *,
        still: bool = False,
        start: Sequence[Tensor] | task_layer.LowerInit | None = None,
    ) -> tuple[Oracle, Estimate]:
        """Everything that a step computes, checked; nothing is written, so nothing has to be undone."""
        groups = {level: self._groups(level) for level in LEVELS}
        here = oracle = self.oracle(upper, lower, groups=groups)
        given = self._given(groups, oracle.live_x, oracle.live_y)
        if still:
            given = self.standing_still(given)
        if not self.warm_start:
            here = oracle.at(lower=given.memory.get("initial", oracle.y.clone()))
            given = replace(given, solver=None)
        if callable(start):
            given = replace(given, lower_init=start)
        elif start is not None:
            here = oracle.at(lower=start)
        warned, random = set(self._warned), None if self.generator is None else self.generator.get_state()
        try:
            with self._buffers.kept_on_failure():
                if tasks is None:
                    estimate = self.checked(here, given, self.estimate)
                else:
                    estimate = self.estimate_tasks(here, given, tasks)
        except BaseException:
            self._warned = warned
            if self.generator is not None and random is not None:
                self.generator.set_state(random)
            raise
        if not self.warm_start and tasks is None and "initial" not in given.memory:
            estimate = replace(estimate, memory={**estimate.memory, "initial": here.y})
        return oracle, estimate

    def _given(self, groups: dict[str, list[dict[str, Any]]], x: Sequence[Tensor], y: Sequence[Tensor]) -> Given:
        """What a step is given, read from the state."""
        return Given(
            groups["upper"],
            groups["lower"],
            self._memory(y),
            self._memory(x),
            self._solver_memory(y),
            dict(self.numbers),
            self._steps_done,
            lambda like: self._rule(groups["lower"], like),
            self.generator,
            self.lower_init,
            self._options.ranks,
        )

    def _memory(self, parameters: Sequence[Tensor]) -> dict[str, Vector]:
        """What is remembered of all these parameters, by name."""
        first = self.state.get(parameters[0], {}) if parameters else {}
        return {
            name: Vector(self.state[p][name] for p in parameters)
            for name in first
            if not name.startswith(SOLVER) and all(name in self.state[p] for p in parameters)
        }

    def _solver_memory(self, parameters: Sequence[Tensor]) -> Memory | None:
        """The lower optimizer's state."""
        kept = [
            {k[len(SOLVER) :]: v for k, v in self.state.get(p, {}).items() if k.startswith(SOLVER)} for p in parameters
        ]
        return kept if any(kept) else None

    def _rule(self, groups: Sequence[dict[str, Any]], like: Vector) -> LowerRule:
        """The lower optimizer's update for tensors like these; made once for each shape."""
        for rule in self._rules:
            if rule.fits(groups, like):
                rule.follow(groups)
                return rule
        rule = LowerRule(self._factory, groups, like)
        self._rules = [*self._rules[-7:], rule]
        return rule

    @torch.no_grad()
    def _commit(self, oracle: Oracle, estimate: Estimate) -> Tensor:
        """Write what a step has computed; ``.grad`` of x is the estimate."""
        session, x, y = oracle.session, oracle.live_x, oracle.live_y
        norm = estimate.gradient.norm()
        for write in estimate.writes:
            write.table[write.rows] = write.values
        for parameters, memory in ((y, estimate.memory), (x, estimate.upper_memory)):
            self._remember(parameters, memory)
        if estimate.solver is not None:
            for parameter, memory in zip(y, estimate.solver, strict=True):
                kept = self.state[parameter]
                for name in [name for name in kept if name.startswith(SOLVER)]:
                    del kept[name]
                kept.update({SOLVER + name: _owned(value, parameter) for name, value in memory.items()})
        if estimate.lower is not None:
            y.copy_(estimate.lower)  # last, because what is remembered may be what y was
        for parameter, gradient in zip(x, estimate.gradient, strict=True):
            parameter.grad = gradient.detach()
        self.numbers = {**self.numbers, **estimate.numbers}
        self._found, self._buffers.complete = session.found, True
        for name, count in session.counts.items():
            self._counts[name] += count
        self.diagnostics = {"hypergradient_norm": norm, **estimate.diagnostics}
        if session.found.fallback is not None:
            self.diagnostics["vectorize_fallback"] = session.found.fallback
        self._steps_done += 1
        self._last_loss = estimate.loss.detach()
        return self._last_loss

    def _remember(self, parameters: Sequence[Tensor], memory: dict[str, Any]) -> None:
        for name, vector in memory.items():
            if vector is None:
                for parameter in parameters:
                    self.state[parameter].pop(name, None)
            else:
                for parameter, value in zip(parameters, vector, strict=True):
                    self.state[parameter][name] = _owned(value.detach(), parameter)

    def _gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The upper parameters that have a ``.grad``, and that."""
        return [(p, p.grad) for p in self._parameters("upper") if p.grad is not None]

    @torch.no_grad()
    def _updated(
        self, pairs: Sequence[tuple[Tensor, Tensor]], estimate: Estimate | None = None
    ) -> tuple[list[Tensor], Update | None]:
        """The upper parameters that move, and the update of them; ``estimate``: as if that had been committed."""
        if not pairs:
            return [], None
        moved = [p for p, _ in pairs]
        known = {id(p) for p in moved}
        groups = {level: self._groups(level) for level in LEVELS}
        upper = [{**g, "params": [p for p in g["params"] if id(p) in known]} for g in groups["upper"]]
        given = self._given({**groups, "upper": upper}, moved, _tensors(groups["lower"], "lower"))
        if estimate is not None:
            given = replace(
                given,
                memory={**given.memory, **estimate.memory},
                upper_memory={**given.upper_memory, **estimate.upper_memory},
                numbers={**given.numbers, **estimate.numbers},
                steps=given.steps + 1,
            )
        update = self.update(Vector(p.detach() for p in moved), Vector(g for _, g in pairs), given)
        return moved, update

    @torch.no_grad()
    def _commit_update(self, moved: list[Tensor], update: Update | None) -> None:
        """Write an update of x."""
        if update is None:
            return
        for write in update.writes:
            write.table[write.rows] = write.values
        self._remember(moved, update.upper_memory)
        if update.lower is not None:
            Vector(self._parameters("lower")).copy_(update.lower)
        Vector(moved).copy_(update.x)
        self.numbers = {**self.numbers, **update.numbers}

    # ------------------------------------------------------------------------------------------------ state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the group must say its ``"level"``, ``"upper"`` or ``"lower"``."""
        level = param_group.get("level") if isinstance(param_group, dict) else None
        if isinstance(param_group, dict) and level not in LEVELS:
            raise ValueError(f"Invalid level value: {level} (a group of a BilevelOptimizer is 'upper' or 'lower')")
        param_group.setdefault("lr", self._default_lr.get(level))
        require_one_level(param_group, self.param_groups)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the key ``"bilevel"`` for what does not belong to one parameter.

        Together with the parameters themselves (the model's ``state_dict``), and with the position of the data and
        torch's random state where the losses use them, it continues a run bit for bit.
        """
        state: dict[str, Any] = super().state_dict()
        state["bilevel"] = {
            "method": type(self).__name__,
            "steps_done": self._steps_done,
            "oracle_counts": dict(self._counts),
            "fallback": self._found.fallback,
            "generator": None if self.generator is None else self.generator.get_state(),
            "last_loss": self._last_loss,
            "numbers": copy.deepcopy(self.numbers),
            "options": {name: getattr(self, name) for name in self.saved_options},
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, into an optimizer made with the same arguments."""
        own = state_dict.get("bilevel")
        if own is None:
            raise ValueError("the state dict is not that of a BilevelOptimizer: it has no 'bilevel' entry")
        if own["method"] != type(self).__name__:
            raise ValueError(f"the state dict is that of {own['method']}, but this optimizer is {type(self).__name__}")
        super().load_state_dict(state_dict)
        self._rules = []
        self._steps_done, self._last_loss = own["steps_done"], own["last_loss"]
        self._counts.update(own["oracle_counts"])
        self._found = replace(self._found, fallback=own["fallback"])
        if own["generator"] is not None and self.generator is not None:
            self.generator.set_state(own["generator"].cpu())
        self.numbers = copy.deepcopy(own["numbers"])
        for name in self.saved_options:
            setattr(self, name, own["options"][name])

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps three entries and makes the others again; ours must be kept too, the rules excepted.
        own = {k: v for k, v in self.__dict__.items() if k not in REMADE and not k.startswith("_optimizer_")}
        return {**super().__getstate__(), **own, "_rules": []}

    # ------------------------------------------------------------------------------------------------ parameters

    def _groups(self, level: str) -> list[dict[str, Any]]:
        """The groups of one level, with the parameters that require a gradient."""
        return [
            {**group, "params": [p for p in group["params"] if p.requires_grad]}
            for group in self.param_groups
            if group["level"] == level
        ]

    def _parameters(self, level: str) -> list[Tensor]:
        """The parameters of one level that require a gradient."""
        return _tensors(self._groups(level), level)

    def _names(self) -> list[str]:
        names = []
        for level in LEVELS:
            index = 0
            for group in (group for group in self.param_groups if group["level"] == level):
                for i, p in enumerate(group["params"]):
                    if p.requires_grad:
                        names.append(repr(group["param_names"][i]) if "param_names" in group else str(index))
                    index += 1
        return names


# What torch's Optimizer makes again when it is unpickled, or a scheduler has attached.
REMADE = ("step", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called")


def as_objective(loss: Loss, level: str) -> Objective:
    """The objective that a loss stands for."""
    if isinstance(loss, Objective):
        return loss
    if not callable(loss):
        raise TypeError(f"the {level} loss must be a callable or an Objective, but is {type(loss).__name__}")
    return Objective(loss)


def _tensors(groups: Sequence[dict[str, Any]], level: str) -> list[Tensor]:
    tensors = [p for group in groups for p in group["params"]]
    if not tensors:
        raise ValueError(f"no {level} parameter requires a gradient")
    return tensors


def _owned(value: Any, parameter: Tensor) -> Any:
    """A value to be kept: a copy if it is what the live parameter holds, which will change."""
    alias = isinstance(value, Tensor) and (is_sharded(value) or value.data_ptr() == parameter.data_ptr())
    return value.clone() if alias else value


def _over_parts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Diagnostics of several parts of a step: stacked, unless there is only one."""
    if len(parts) <= 1:
        return dict(parts[0]) if parts else {}
    return {
        name: torch.stack([part[name] for part in parts]) if all(isinstance(p[name], Tensor) for p in parts) else value
        for name, value in parts[-1].items()
    }

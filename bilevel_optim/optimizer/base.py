"""`BilevelOptimizer`: a ``torch.optim.Optimizer`` over two sets of parameters."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from ..hypergradient import Estimate
from ..oracle import tasks as task_layer
from ..oracle.checks import Checks
from ..oracle.oracle import Oracle, Session
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
from ..problem.vector import Vector
from ..solvers.lower import AGD, NOT_ELEMENTWISE, LowerSolver
from .declaration import Method, register

__all__ = ["REMADE", "BilevelOptimizer", "ColdOptions", "CommonOptions", "as_objective"]

Loss = Objective | Callable[..., Tensor]


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

    A method is a subclass that says how the lower variable is improved and the hypergradient estimated
    (:meth:`_estimate`); everything else is here.

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
        self._factory: Callable[[Any], Optimizer] = lower_optimizer or SGD
        self._session = Session(vectorize=vectorize, hvp=hvp, process_group=process_group)
        self._steps_done = 0
        self._last_loss: Tensor | None = None
        self._warned: set[str] = set()
        self._solver: LowerSolver | None = None
        self._default_lr = {"upper": lr, "lower": lower_lr}
        super().__init__(consistently_named([*as_groups(upper, "upper"), *as_groups(lower, "lower")]), {"lr": lr})

    _saved: tuple[str, ...] = ()  # names of the method's attributes that change during a run
    _written_in_place: tuple[str, ...] = ()  # names of the per-parameter tensors that a step changes in place

    # ------------------------------------------------------------------------------------------------ verbs

    def step(  # type: ignore[override]
        self, upper: Loss | None = None, lower: Loss | None = None, *, tasks: Any = None
    ) -> Tensor | None:
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

        Returns:
            The upper loss at the point where the hypergradient was estimated, detached; None without losses.

        Raises:
            NonFiniteError: if an oracle returned NaN or infinity; nothing has changed then.
            ValueError: at the first step, if a loss is not a scalar or does not depend on the parameters.
        """
        loss = None
        if self._finished():
            return None if upper is None else self._last_loss
        if upper is not None or lower is not None:
            if upper is None or lower is None:
                raise TypeError("step takes both losses, upper and lower, or none of them (after backward)")
            loss = self.backward(upper, lower, tasks=tasks)
        elif tasks is not None:
            raise TypeError("step takes tasks only together with both losses")
        self._update()
        return loss

    def backward(self, upper: Loss, lower: Loss, *, tasks: Any = None) -> Tensor:
        """Improve y, and set ``.grad`` of the upper parameters to the estimate of the hypergradient.

        Follow it with gradient clipping, with ``step()``, or with a step of any ``torch.optim`` optimizer over x.
        Arguments, result and errors as for :meth:`step`.
        """
        oracle = self._oracle(upper, lower)
        restore = self._snapshot()
        try:
            estimate = self._checked_estimate(oracle) if tasks is None else self._estimate_tasks(oracle, tasks)
        except BaseException:
            restore()
            raise
        for parameters, memory in ((oracle.y, estimate.memory), (oracle.x, estimate.upper_memory)):
            for name, vector in memory.items():
                for parameter, value in zip(parameters, vector, strict=True):
                    self.state[parameter][name] = value.detach()
        for parameter, gradient in zip(oracle.x, estimate.gradient, strict=True):
            parameter.grad = gradient.detach()
        self.diagnostics = {"hypergradient_norm": estimate.gradient.norm(), **estimate.diagnostics}
        if self._session.fallback is not None:
            self.diagnostics["vectorize_fallback"] = self._session.fallback
        self._steps_done += 1
        self._session.buffers.complete = True
        self._last_loss = estimate.loss.detach()
        return self._last_loss

    @property
    def oracle_counts(self) -> dict[str, int]:
        """Cumulative oracle calls, per sample batch."""
        return dict(self._session.counts)

    def _oracle(self, upper: Loss, lower: Loss) -> Oracle:
        """The two losses as functions of the live parameters."""
        return Oracle(
            self._parameters("upper"),
            self._parameters("lower"),
            as_objective(upper, "upper"),
            as_objective(lower, "lower"),
            names=self._names(),
            session=self._session,
        )

    def _checked_estimate(self, oracle: Oracle, make: Callable[[Oracle], Estimate] | None = None) -> Estimate:
        estimate = (make or self._estimate)(oracle)
        oracle.conclude()
        if self.check_finite and self._react(oracle, oracle.checks.verify(self._steps_done, self._warned)):
            oracle.checks = Checks()
            return self._checked_estimate(oracle, make)
        return estimate

    def _estimate_tasks(self, oracle: Oracle, sampler: Any) -> Estimate:
        """The mean of the estimates for the tasks of one draw, made as one problem with stacked y."""
        self._require_elementwise("tasks")
        count = task_layer.task_count(sampler, self.tasks_per_step)
        drawn = task_layer.sample(sampler, count, self.generator)
        tasks, share = oracle.share(drawn, count)
        loss, gradient, mean = torch.zeros((), device=oracle.device), oracle.x.zeros_like(), oracle.y.zeros_like()
        diagnostics: dict[str, Any] = {}
        sizes = {"lower": self.lower_batch, "upper": self.upper_batch}
        for part in self._together(share):
            some = task_layer.select(tasks, part)
            n = len(range(share)[part])
            draws = task_layer.TaskDraws(sampler, some, n, sizes, self.generator)
            start = task_layer.starting_points(oracle.y, oracle.names[len(oracle.x) :], some, n, self.lower_init)
            stacked = task_layer.stacked_oracle(oracle, start, draws)
            estimate = self._checked_estimate(stacked)
            loss, gradient = loss + estimate.loss / count, gradient + estimate.gradient * (1 / count)
            mean, diagnostics = mean + Vector(t.detach().sum(0) / count for t in stacked.y), estimate.diagnostics
            for tensor in stacked.y:
                self.state.pop(tensor, None)
            self._solver = None
        loss, gradient, mean = oracle.totalled(loss, gradient, mean)
        if self.warm_start:
            oracle.y.copy_(mean)
        return Estimate(loss, gradient, {**diagnostics, "tasks": drawn})

    # ------------------------------------------------------------------------------------------------ for the methods

    @abstractmethod
    def _estimate(self, oracle: Oracle) -> Estimate:
        """Improve the live y and estimate the hypergradient at the live x."""

    def _react(self, oracle: Oracle, alerts: set[str]) -> bool:
        """Change course after alerts; returns whether the estimate has to be made again."""
        return False

    def _together(self, tasks: int) -> list[slice]:
        """Which of the drawn tasks make one stacked problem: all of them."""
        return [slice(0, tasks)] if tasks else []

    def _finished(self) -> bool:
        """Whether ``step`` has nothing left to do, and returns the last loss."""
        return False

    def _stand_still(self) -> None:
        """Make the next estimate at x itself, for a method that would look ahead of it."""

    def _direction_scale(self, gradient: Vector) -> Tensor | float:
        """Factor on the upper gradient in the update."""
        return 1.0

    def _probe(self) -> Optimizer:
        """The lower optimizer made for a dummy parameter, to see what it is."""
        return self._factory([{"params": [torch.zeros(1, 1, requires_grad=True)], "lr": self._default_lr["lower"]}])

    def _require_elementwise(self, what: str = "copies of y") -> None:
        """Raise if the lower optimizer would mix what is stacked."""
        kind = type(self._probe())
        if issubclass(kind, NOT_ELEMENTWISE):
            raise ValueError(
                f"Invalid lower_optimizer value: {kind.__name__} does not treat every entry alone, so it would mix the "
                f"{what}; use SGD, Adam or the like"
            )

    def _require_given_gradient(self) -> None:
        """Raise if the lower optimizer asks for gradients at points of its own, where the method has one to give."""
        kind = type(self._probe())
        if issubclass(kind, (LBFGS, AGD)):
            raise ValueError(
                f"Invalid lower_optimizer value: {kind.__name__} evaluates gradients at points of its own, but the "
                "lower step takes an estimate made before; use SGD, Adam or the like"
            )

    def _lower_solver(self, oracle: Oracle, variables: Vector) -> LowerSolver:
        """The solver of the lower problem over these tensors: the live y, or stacked copies of it."""
        groups = self._groups("lower")
        if self._solver is None or not self._solver.serves(variables):
            states = [self.state[parameter].setdefault("lower_optimizer", {}) for parameter in oracle.y]
            self._solver = LowerSolver(self._factory, groups, variables, states)
        self._solver.follow(groups)
        return self._solver

    def _start(self, oracle: Oracle) -> Vector:
        """Where this step's lower solve starts: the live y or, without warm starts, its first value."""
        if self.warm_start:
            return oracle.y.detach()
        for parameter in oracle.y:
            if "initial" not in self.state[parameter]:
                self.state[parameter]["initial"] = parameter.detach().clone()
        return Vector(self.state[parameter]["initial"] for parameter in oracle.y)

    def _remembered(self, oracle: Oracle, name: str, *, upper: bool = False) -> Vector | None:
        """What the last step kept under this name, if every lower parameter has it (or every upper one)."""
        parameters = oracle.x if upper else oracle.y
        if all(name in self.state[parameter] for parameter in parameters):
            return Vector(self.state[parameter][name] for parameter in parameters)
        return None

    def _linear_rates(self, linear_lr: float | None) -> list[float]:
        """Step size of a linear solver for each lower parameter: this one, or the learning rate of its group."""
        groups = self._groups("lower")
        return [float(group["lr"] if linear_lr is None else linear_lr) for group in groups for _ in group["params"]]

    def _ready_solver(self, oracle: Oracle, variables: Vector | None = None) -> LowerSolver:
        """A solver on the live y (or on aliases of it), which is set to where this step starts."""
        solver = self._lower_solver(oracle, oracle.y if variables is None else variables)
        if not self.warm_start:
            oracle.y.copy_(self._start(oracle))
            solver.reset()
        return solver

    def _lower_step_count(self) -> int:
        """Lower steps of the present outer step."""
        return self.lower_steps

    def _descend(self, oracle: Oracle) -> dict[str, Tensor]:
        """The lower steps of a method with a single copy of y, on the live tensors; one lower sample for each."""
        solver = self._ready_solver(oracle)
        gradient = solver.run(
            self._lower_step_count(), lambda: partial(oracle.lower, oracle.g.draw(once=solver.evaluates_once))
        )
        if gradient is None:
            return {}
        oracle.checks.finite("lower_grad", oracle.y)
        return {"lower_residual": gradient.norm()}

    # ------------------------------------------------------------------------------------------------ update, state

    @torch.no_grad()
    def _update(self) -> None:
        gradients = Vector(p.grad for p in self._parameters("upper") if p.grad is not None)
        scale = self._direction_scale(gradients)
        for group in self._groups("upper"):
            moved = [p for p in group["params"] if p.grad is not None]
            if moved:
                direction = Vector(p.grad for p in moved)
                if not (isinstance(scale, float) and scale == 1.0):
                    direction = direction * scale
                torch._foreach_add_(moved, list(direction), alpha=-float(group["lr"]))

    def _at_risk(self) -> list[Tensor]:
        """The parameters that an estimate moves before it is known to be sound."""
        return self._parameters("lower")

    def _snapshot(self) -> Callable[[], None]:
        """Remember everything that a step changes; the result puts it back."""
        lower, at_risk = self._parameters("lower"), self._at_risk()
        in_place = [kept[name] for kept in self.state.values() for name in self._written_in_place if name in kept]
        values = [(t, t.detach().clone()) for t in (*at_risk, *in_place)]
        gradients = [(p, p.grad) for p in (*self._parameters("upper"), *lower)]
        state = {
            parameter: {k: copy.deepcopy(v) if k == "lower_optimizer" else v for k, v in kept.items()}
            for parameter, kept in self.state.items()
        }
        session, warned = replace(self._session, counts=dict(self._session.counts)), set(self._warned)
        attributes = {name: getattr(self, name) for name in ("diagnostics", "_steps_done", *self._saved)}
        random = self.generator.get_state() if self.generator is not None else None

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self.state.clear()
            self.state.update(state)
            self._solver = None
            self._session, self._warned = session, warned
            for name, value in attributes.items():
                setattr(self, name, value)
            if self.generator is not None and random is not None:
                self.generator.set_state(random)

        return restore

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
            "oracle_counts": dict(self._session.counts),
            "fallback": self._session.fallback,
            "generator": None if self.generator is None else self.generator.get_state(),
            **{name: getattr(self, name) for name in self._saved},
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
        self._solver = None
        self._steps_done = own["steps_done"]
        self._session.counts.update(own["oracle_counts"])
        self._session.fallback = own["fallback"]
        if own["generator"] is not None and self.generator is not None:
            self.generator.set_state(own["generator"].cpu())
        for name in self._saved:
            setattr(self, name, own[name])

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps three entries and makes the others again; ours must be kept too, the solver excepted.
        own = {k: v for k, v in self.__dict__.items() if k not in REMADE and not k.startswith("_optimizer_")}
        return {**super().__getstate__(), **own, "_solver": None}

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
        parameters = [p for group in self._groups(level) for p in group["params"]]
        if not parameters:
            raise ValueError(f"no {level} parameter requires a gradient")
        return parameters

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

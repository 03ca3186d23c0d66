"""What a method is: pure functions of values, and what goes with them."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import BilevelWarning
from ..hypergradient import Estimate
from ..hypergradient.estimate import measured
from ..oracle.checks import Checks
from ..oracle.lanes import stacked
from ..oracle.oracle import Oracle
from ..problem import tasks as task_layer
from ..problem.objective import Objective
from ..problem.parameters import is_count, require
from ..problem.random import draw_chances
from ..problem.tracing import traced
from ..problem.vector import Vector
from ..solvers.agd import AGD
from ..solvers.limits import Clip, Limits, Projection
from ..solvers.lower import NOT_ELEMENTWISE, is_known, needs_closure
from ..solvers.trust import acts_elementwise, can_be_differentiated, rests_without_gradient
from ..solvers.unrolling import can_be_unrolled
from .declaration import MethodInfo
from .step import Given, Update, changed

__all__ = [
    "ColdOptions",
    "CommonOptions",
    "Loss",
    "StepFunctions",
    "as_objective",
    "require_common",
    "require_sizes",
    "warn_of_decay",
]

Loss = Objective | Callable[..., Tensor]
HINT = " (pass the class, or a function that makes one: lambda groups: torch.optim.SGD(groups, momentum=0.9))"


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
    lower_clip: Clip | None
    lower_projection: Projection | None


class CommonOptions(ColdOptions, total=False):
    """Keyword arguments that every method takes, see `BilevelOptimizer`."""

    warm_start: bool


class StepFunctions(ABC):
    """The functions that a step is made of; of ``self`` they read hyper-parameters only, and they write nothing."""

    declared: ClassVar[MethodInfo]  # what others need to know of a method
    saved_options: tuple[str, ...] = ()  # names of hyper-parameters that a user may change during a run
    one_loss = False  # whether step takes one loss, from which `objectives` makes the two
    joined: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {}  # how diagnostics of parts of the tasks become one
    estimate_reads: tuple[str, ...] | None = None  # names of what it reads of what is remembered of x; None: of all
    divided_by: str | None = None  # the hyper-parameter that differences in the hypergradient are divided by, if any
    responds = True  # whether the estimate lives on y's response to x in the lower loss

    lower_steps: int
    warm_start: bool
    check_finite: bool
    tasks_per_step: int | None
    lower_batch: int | None
    upper_batch: int | None
    lower_factory: Callable[[Any], Optimizer]
    limits: Limits
    default_lr: dict[str, float]

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
        generator = given.ranks.own(given.generator, given.steps)
        whole = self.together(count)  # every part has chances of its own
        chances = [given.chances, *(draw_chances(self.chances(), given.generator) for _ in whole[1:])]
        sizes = {"lower": self.lower_batch, "upper": self.upper_batch}
        loss, gradient, mean = oracle.x[0].new_zeros(()), oracle.x.zeros_like(), oracle.y.zeros_like()
        draws = task_layer.TaskDraws(sampler, tasks, share, sizes, generator)
        estimates: list[Estimate] = []
        for part in reversed(self.together(share)):  # module buffers advance by the first task
            some, n = task_layer.select(tasks, part), len(range(share)[part])
            apart = len(whole) == count > 1
            own = changed(given.anew(), chances=chances[given.ranks.place(part.start) if apart else 0])
            start = task_layer.starting_points(oracle.y, oracle.lower_names(), some, n, given.lower_init)
            estimate = self.checked(stacked(oracle, start, draws.of(part)), own, self.estimate)
            loss, gradient = loss + (estimate.loss / count).to(loss), gradient + estimate.gradient * (1 / count)
            y = start if estimate.lower is None else estimate.lower
            mean = mean + Vector(t.sum(0) / count for t in y)
            estimates.insert(0, changed(estimate, start=None, lower=None, solver=None))  # graphs and copies of y go
        loss, gradient, mean = given.ranks.total(loss, gradient, mean)
        # What belongs to x stays; what belongs to the tasks' y goes with them.
        kept = estimates[-1]
        diagnostics = _over_parts([measured(estimate.diagnostics) for estimate in estimates], self.joined)
        return Estimate(
            loss,
            gradient,
            {**diagnostics, "task_count": torch.tensor(count, device="cpu")},
            upper_memory=kept.upper_memory,
            numbers=kept.numbers,
            lower=mean if self.warm_start else None,
        )

    def checked(self, oracle: Oracle, given: Given, make: Callable[[Oracle, Given], Estimate]) -> Estimate:
        """An estimate whose flags have been read; made again where the method reacts to them."""
        if traced():
            return make(oracle, given)
        while True:
            estimate, session = make(oracle, given), oracle.session
            session.conclude()
            alerts = session.checks.verify(given.steps, session.warned, estimate.shown) if self.check_finite else set()
            if not alerts or self.reacts_to(given.numbers) not in alerts:
                return estimate
            oracle, given = self.react(oracle, given, estimate)
            session.checks = Checks()

    def reacts_to(self, numbers: Mapping[str, Any]) -> str | None:
        """The alert after which the estimate is made again, if there is one, with the plain numbers of a step."""
        return None

    def react(self, oracle: Oracle, given: Given, estimate: Estimate) -> tuple[Oracle, Given]:
        """Where and with what the estimate is made again after that alert."""
        raise NotImplementedError

    def together(self, tasks: int) -> list[slice]:
        """Which of the drawn tasks make one stacked problem: all of them."""
        return [slice(0, tasks)] if tasks else []

    def chances(self) -> dict[str, int]:
        """What the method draws at random for an estimate beside its samples: by name, of how many numbers one."""
        return {}

    def finished(self) -> bool:
        """Whether ``step`` has nothing left to do, and returns the last loss."""
        return False

    def standing_still(self, given: Given) -> Given:
        """What makes the next estimate one at x itself, for a method that would look ahead of it."""
        return given

    def lower_step_count(self, steps: int) -> int:
        """Lower steps of the next outer step, after so many."""
        return self.lower_steps

    def kind_of_step(self, steps: int, numbers: Mapping[str, Any]) -> Any:
        """What decides, of the number of steps made and of the plain numbers, which operations the next one is made of.

        For a method with ``host_update``: its estimate. None if the host has to make it.
        """
        return self.lower_step_count(steps), numbers

    def beyond_graphs(self, tasks: Any, chances: Mapping[str, Any]) -> str:
        """Why a step with these tasks and chances is not to be captured, if it is not."""
        return ""

    def objectives(self, upper: Loss | None, lower: Loss | None) -> tuple[Objective, Objective]:
        """The two objectives of a step."""
        if upper is None or lower is None:
            raise TypeError(
                f"{type(self).__name__} takes both losses, upper and lower (and step none of them, after backward)"
            )
        return as_objective(upper, "upper"), as_objective(lower, "lower")

    @property
    def stationary(self) -> bool:
        """Whether the estimate takes y for a stationary point of the lower loss alone, as implicit methods do."""
        declared = getattr(self, "declared", None)  # which a method of the user need not have
        return declared is not None and declared.second_order and declared.lower_optimizer != "differentiable"

    def require_lower_step(self) -> None:
        """Raise if the lower step has limits where the method makes it itself, or is not what it must be."""
        declared, probe = getattr(self, "declared", None), self.probe()
        for name, value in (("lower_clip", self.limits.clip), ("lower_projection", self.limits.projection)):
            if value is not None and declared is not None and declared.lower_optimizer == "none":
                raise ValueError(f"Invalid {name} value: {value} ({type(self).__name__} makes its lower steps itself)")
        if self.stationary and not is_known(probe) and not _shown(self, "resting", rests_without_gradient):
            raise ValueError(
                f"Invalid lower_optimizer value: {type(probe).__name__} moves y where the gradient is zero (a clamp, a "
                "projection or a penalty in a hook or in its step), so y does not end where the implicit hypergradient "
                "is right; use lower_clip= or lower_projection=, put the penalty into the lower loss, or use F2SA"
            )

    def require_differentiable(self) -> None:
        """Raise unless the lower optimizer's update can be differentiated."""
        probe = self.probe()
        name = f"Invalid lower_optimizer value: {type(probe).__name__}"
        if isinstance(probe, AGD) or not can_be_unrolled(probe):
            raise ValueError(
                f"{name} cannot be differentiated through; use one of torch's optimizers with a differentiable "
                "argument, such as SGD or Adam, or AID"
            )
        if not is_known(probe) and not _shown(self, "differentiable", can_be_differentiated):
            raise ValueError(
                f"{name} has an update whose derivative by autograd is not its difference quotient (a hook or its step "
                "changes gradients or parameters out of autograd's sight); use lower_clip= or lower_projection=, which "
                "are differentiated, or a method that does not differentiate the lower steps, such as F2SA or AID"
            )

    def probe(self) -> Optimizer:
        """The lower optimizer made for a dummy parameter, to see what it is."""
        return self.lower_factory(
            [{"params": [torch.zeros(1, 1, device="cpu", requires_grad=True)], "lr": self.default_lr["lower"]}]
        )

    def require_elementwise(self, what: str = "copies of y") -> None:
        """Raise if the lower optimizer would mix what is stacked."""
        probe = self.probe()
        kind = type(probe)
        mixes = not is_known(probe) and not _shown(self, "elementwise", acts_elementwise)
        if issubclass(kind, NOT_ELEMENTWISE) or mixes:
            raise ValueError(
                f"Invalid lower_optimizer value: {kind.__name__} does not treat every entry alone, so it would mix the "
                f"{what}; use SGD, Adam or the like"
            )

    def require_given_gradient(self) -> None:
        """Raise if the lower optimizer asks for gradients at points of its own, where the method has one to give."""
        kind = type(self.probe())
        if issubclass(kind, AGD) or needs_closure(self.probe()):
            raise ValueError(
                f"Invalid lower_optimizer value: {kind.__name__} evaluates gradients at points of its own, but the "
                "lower step takes an estimate made before; use SGD, Adam or the like"
            )


def _shown(method: StepFunctions, what: str, test: Callable[[Callable[[Any], Optimizer], float], bool]) -> bool:
    """What a test of a method's lower optimizer found, which is made once."""
    known = vars(method).setdefault("_lower_shown", {})
    if what not in known:
        known[what] = test(method.lower_factory, method.default_lr["lower"])
    return bool(known[what])


def warn_of_decay(method: StepFunctions, group: Mapping[str, Any]) -> None:
    """Warn of a lower group with a penalty that the linear system would not know."""
    if method.stationary and group.get("weight_decay", method.probe().param_groups[0].get("weight_decay")):
        warnings.warn(
            "weight_decay of the lower_optimizer is not part of the lower loss, so the linear system does not know "
            "it and the hypergradient is biased; put the penalty into the lower loss instead",
            BilevelWarning,
            stacklevel=4,
        )


def as_objective(loss: Loss, level: str) -> Objective:
    """The objective that a loss stands for."""
    if isinstance(loss, Objective):
        return loss
    if not callable(loss):
        raise TypeError(f"the {level} loss must be a callable or an Objective, but is {type(loss).__name__}")
    return Objective(loss)


def _same(stack: Tensor) -> Tensor:
    return stack


def _over_parts(parts: Sequence[dict[str, Any]], joined: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
    """Diagnostics of several parts of a step: stacked, or joined, unless there is only one."""
    if len(parts) <= 1:
        return dict(parts[0]) if parts else {}
    return {
        name: joined.get(name, _same)(torch.stack([part[name] for part in parts]))
        if all(isinstance(p[name], Tensor) for p in parts)
        else value
        for name, value in parts[-1].items()
    }


def require_common(*, lower_optimizer: Any, generator: Any, vectorize: Any, hvp: Any, lower_init: Any) -> None:
    """Raise unless these arguments of every method are what they should be."""
    require("vectorize", vectorize, isinstance(vectorize, bool) or (is_count(vectorize) and vectorize > 0))
    require("hvp", hvp, hvp in ("exact", "finite-difference"))
    made = isinstance(lower_optimizer, Optimizer)
    wording = f"Invalid lower_optimizer value: {{value}}{HINT if made else ''}"
    require("lower_optimizer", lower_optimizer, lower_optimizer is None or callable(lower_optimizer), wording)
    require("generator", generator, generator is None or isinstance(generator, torch.Generator))
    require("lower_init", lower_init, lower_init is None or callable(lower_init))


def require_sizes(**sizes: Any) -> None:
    """Raise unless these are positive counts, or None."""
    for name, size in sizes.items():
        require(name, size, size is None or (is_count(size) and size > 0))

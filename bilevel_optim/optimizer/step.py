"""Declared draws, inputs and results of a step, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..hypergradient import Estimate
from ..oracle.oracle import Oracle
from ..oracle.session import Checks
from ..problem.parameters import Rate, rates_of
from ..problem.tasks import LowerInit
from ..problem.vector import Vector
from ..pytree import replace, values
from ..solvers.lower import LowerResult, LowerRule, Memory

__all__ = [
    "CURVATURE",
    "FACTOR",
    "LOWER",
    "UPPER",
    "Draw",
    "DrawInputs",
    "Groups",
    "Start",
    "StepInputs",
    "TaskDraw",
    "Update",
    "lower_gradient",
    "of_tasks",
    "replace",
    "require_interior",
]


CURVATURE = "curvature"  # entry of y's state that tasks share
FACTOR = "auto_lr"  # entry of a group: its rate is a factor of the rate that follows the curvature
OUT_OF_RANGE = (
    "The step leaves the range of float16, or the .grad that it follows was not finite. Keep the parameters in float32 "
    "with autocast in the losses, or use a smaller lr. Adam's default eps=1e-8 is zero in float16: use eps=1e-4"
)
Groups = dict[str, list[dict[str, Any]]]  # the parameter groups of each level
Start = Sequence[Tensor] | LowerInit | None  # start of lower solves; None: the usual one


class Draw(NamedTuple):
    """One draw from a loss.

    Attributes:
        level: ``"upper"``, from f, or ``"lower"``, from g. Both draw from one stream in a minimax method.
        whole: draw all terms of a finite sum, in order, instead of the next sample.
        only: name and number: draw only if the random input of this name is at least the number. A declaration lists
            the most draws that are possible; the first draw from a level is always made.
    """

    level: str
    whole: bool = False
    only: tuple[str, int] | None = None


UPPER, LOWER = Draw("upper"), Draw("lower")


class TaskDraw(NamedTuple):
    """One draw from a sampler of tasks.

    Attributes:
        source: ``"tasks"``, or ``"upper"`` or ``"lower"`` for a batch of each task drawn before.
        size: number of tasks, or of rows for each task; None: all rows.
        only: as for `Draw`.
    """

    source: str
    size: int | None
    only: tuple[str, int] | None = None


@values
class DrawInputs:
    """Inputs that determine a step's draws; of tensors, only their presence and shapes count.

    Attributes:
        steps: steps made so far; in an update, this one too.
        numbers: plain numbers that change from step to step. In a declaration they include ``upper_terms`` and
            ``lower_terms`` of losses that are finite sums.
        memory: state of y from earlier steps, by name: tensors shaped like y.
        upper_memory: state of x from earlier steps, by name.
        tables: tables whose rows mix all the tensors of y, by name.
    """

    steps: int
    numbers: dict[str, Any]
    memory: dict[str, Vector]
    upper_memory: dict[str, Vector]
    tables: dict[str, Tensor]

    def terms(self, level: str) -> int:
        """Return the number of terms of a level's loss."""
        return int(self.numbers.get(f"{level}_terms", 1))


def of_tasks(draws: Iterable[Draw], rows: Mapping[str, int | None]) -> list[TaskDraw]:
    """Convert draws to draws for tasks, with ``rows`` per batch of each level; all rows are drawn at first use only."""
    found: list[TaskDraw] = []
    known: set[str] = set()
    for level, _, only in draws:
        if rows[level] is not None or level not in known:
            found.append(TaskDraw(level, rows[level], only))
        known.add(level)
    return found


@values
class StepInputs(DrawInputs):
    """Inputs of a step besides the losses and the point.

    Attributes:
        upper_groups, lower_groups: parameter groups with their learning rates and options.
        lower: y; for an update, y after the estimate.
        solver: state of the lower optimizer. None: a fresh one.
        upper_solver: state of the upper optimizer. None: a fresh one.
        rule: returns the lower optimizer's update for given tensors.
        upper_rule: returns the upper optimizer's update for given tensors. None: x makes a gradient step.
        generator: source of the method's own random numbers.
        random_inputs: the method's random integers for this step, by name.
        lower_init: start of the lower solves of tasks. None: the live y.
        ranks: the processes that share the run.
        start: start of the lower solve with its graph. None: it has none.
    """

    upper_groups: list[dict[str, Any]]
    lower_groups: list[dict[str, Any]]
    lower: Vector
    solver: Memory | None
    rule: Callable[[Vector], LowerRule]
    generator: torch.Generator | None
    lower_init: LowerInit | None
    ranks: Ranks
    start: Vector | None = None
    random_inputs: Mapping[str, Any] = field(default_factory=dict)
    upper_rule: Callable[[Vector], LowerRule] | None = None
    upper_solver: Memory | None = None

    @property
    def upper_rates(self) -> list[Rate]:
        """Learning rate of each upper tensor."""
        return rates_of(self.upper_groups)

    @property
    def lower_rates(self) -> list[Rate]:
        """Learning rate of each lower tensor."""
        return rates_of(self.lower_groups)

    @property
    def follows_curvature(self) -> bool:
        """True if learning rates of the lower groups follow the curvature of g."""
        return any([group.get(FACTOR, False) for group in self.lower_groups])

    def linear_rates(self, linear_lr: float | None) -> list[Rate]:
        """Return the step size of a linear solver for each lower tensor; None takes the learning rate of its group."""
        return self.lower_rates if linear_lr is None else [linear_lr] * len(self.lower_rates)

    def with_lower_state(self, memory: Mapping[str, Vector]) -> StepInputs:
        """Return these inputs with other entries as the state of y; its curvature is kept."""
        kept = {name: vector for name, vector in self.memory.items() if name == CURVATURE}
        return replace(self, memory={**kept, **memory}, tables={}, solver=None)

    def after(self, estimate: Estimate) -> StepInputs:
        """Return these inputs with the state after an estimate, for the update of x."""
        return replace(
            self,
            memory=self.memory | estimate.memory if estimate.memory else self.memory,
            upper_memory=self.upper_memory | estimate.upper_memory if estimate.upper_memory else self.upper_memory,
            tables=self.tables | estimate.tables if estimate.tables else self.tables,
            lower=self.lower if estimate.lower is None else estimate.lower,
            numbers=self.numbers | estimate.numbers if estimate.numbers else self.numbers,
            steps=self.steps + 1,
        )

    def step_upper(self, x: Vector, gradient: Vector) -> Update:
        """Return x after a step of the upper optimizer along a gradient."""
        if self.upper_rule is None:
            return Update(x.descended(gradient, self.upper_rates))
        rule = self.upper_rule(x)
        solved = rule.step(
            x, rule.fresh() if self.upper_solver is None else self.upper_solver, lambda _: (None, gradient)
        )
        return Update(solved.y, solver=None if rule.plain else solved.memory)

    def solver_for(self, like: Vector) -> tuple[LowerRule, Memory]:
        """Return the lower optimizer's update for tensors like these, and its initial state."""
        rule = self.rule(like)
        return rule, rule.fresh() if self.solver is None else self.solver

    def run_lower_steps(self, oracle: Oracle, steps: int, *, tol: float = 0.0) -> tuple[Oracle, LowerResult]:
        """Make lower steps from the oracle's point, each on its own lower sample; return the oracle at the end too."""
        rule, memory = self.solver_for(oracle.y)
        result = rule.run(oracle.y, memory, steps, partial(lower_gradient, oracle, rule), tol)
        if result.gradient is None:
            return oracle, result._replace(plain=True)
        require_interior(oracle, rule, result.projected)
        oracle.checks.finite("lower_grad", result.y)
        told = result.watched(oracle.session, rule, oracle.y, steps)
        # Without the gradient, whose memory the estimate may need.
        kept = result._replace(gradient=None, mapping=None, plain=rule.plain, diagnostics=told)
        return oracle.at(lower=kept.y), kept

    def step_along(self, oracle: Oracle, gradient: Vector) -> tuple[Oracle, LowerResult]:
        """Make one lower step from the oracle's point along this gradient; return the oracle at the end too."""
        rule, memory = self.solver_for(oracle.y)
        result = rule.step(oracle.y, memory, lambda _: (None, gradient))
        require_interior(oracle, rule, result.projected)
        oracle.checks.finite("lower_grad", result.y)
        told = {"lower_residual": rule.residual(oracle.y, gradient)}
        kept = result._replace(gradient=None, mapping=None, plain=rule.plain, diagnostics=told)
        return oracle.at(lower=kept.y), kept


def lower_gradient(oracle: Oracle, rule: LowerRule) -> Callable[[Vector], tuple[Tensor, Vector]]:
    """Draw the sample of a lower step; return the function from y to g and its gradient on it."""
    sample = oracle.g.draw(once=rule.evaluates_once)
    return lambda y: oracle.at(lower=y).lower(sample)


def require_interior(oracle: Oracle, rule: LowerRule, projected: Tensor | None) -> None:
    """Refuse a y that a projection has moved, if the method assumes a stationary point."""
    if projected is not None and rule.limits.interior:
        oracle.checks.refuse(
            "lower_projection holds y where the gradient of the lower loss does not vanish, and there the implicit "
            "hypergradient is wrong; use ITD, which differentiates the projection, or F2SA or PZOBO, which need no "
            "derivative of it (or more lower steps, if y only passes there)",
            projected,
        )


@values
class Update:
    """New x, and the state written with it.

    Attributes:
        x: the new values.
        upper_memory: new state entries shaped like x, by name; None deletes an entry.
        numbers: plain numbers that change.
        lower: new y, for methods that move it together with x.
        solver: state of the upper optimizer, if it has any.
    """

    x: Vector
    upper_memory: dict[str, Vector | None] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    lower: Vector | None = None
    solver: Memory | None = None

    @property
    def narrow(self) -> list[Tensor]:
        """Parts in float16; other types have so large a range that a step along finite gradients needs no look."""
        solver = [t for entries in self.solver or () for t in entries.values() if isinstance(t, Tensor)]
        return [t for t in (*self.x, *(self.lower or ()), *solver) if t.dtype == torch.float16]

    def check(self, checks: Checks) -> None:
        """Require that the parts in float16 are finite."""
        if narrow := self.narrow:
            checks.finite("the update of x", narrow, OUT_OF_RANGE)

"""The step as a pure function of losses, data, random numbers and state, which is traced as one graph."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..hypergradient.estimate import measured
from ..optimizer.method import Method
from ..optimizer.step import StepInputs, Update
from ..oracle.advance import advance_buffers
from ..oracle.buffers import Buffers
from ..oracle.oracle import Oracle
from ..oracle.session import COUNTERS, Checks, LowerTrend, Session
from ..oracle.substitution import Substitution
from ..problem.vector import Vector, as_variable
from ..pytree import replace
from ..solvers.limits import Limits
from ..solvers.lower import LowerRule
from .given import GivenData
from .key import has_one_key
from .reasons import Refused

__all__ = ["PureStep", "Results", "State", "following", "state_of"]

State = dict[str, Any]  # a pytree of the tensors that a step reads and that change from step to step


def state_of(
    optimizer: Method, x: Sequence[Tensor], y: Sequence[Tensor], buffers: Sequence[Tensor], rates: Sequence[Tensor]
) -> State:
    """Return the state that a step of these live tensors reads, with these buffers and learning rates, as a pytree."""
    return {
        "x": Vector(x).detach(),
        "y": Vector(y).detach(),
        "buffers": buffers,
        "rates": rates,
        **optimizer._remembered(x, y),
        "numbers": {name: value for name, value in optimizer.numbers.items() if isinstance(value, Tensor)},
    }


class Results(NamedTuple):
    """Results of a step, with the entries of the session of an eager one.

    Attributes:
        estimate: the estimate, with its diagnostics measured; of its plain numbers, those that have changed.
        moved: the update of x, if there is one.
        buffers: values of the module buffers after the step.
        counts: oracle calls.
        alerts: what the flags after the first one are for.
        flags: all flags.
    """

    estimate: Estimate
    moved: Update | None
    buffers: Sequence[Tensor]
    counts: dict[str, int]
    alerts: list[str]
    flags: Tensor


class PureStep:
    """An optimizer's step as a function of losses, data, random inputs and state, which writes nothing.

    Args:
        method: the optimizer.
        here: oracle of an eager step like it, which has examined the losses.
        given: inputs of that step.
        update: whether x is updated too.
        buffers: the module buffers that evaluations change.
    """

    def __init__(
        self,
        method: Method,
        here: Oracle,
        inputs: StepInputs,
        update: bool,
        buffers: Sequence[Tensor],
    ) -> None:
        self.method, self.update, self.buffers = method, update, list(buffers)
        self.live_x, self.live_y, self.names = [*here.live_x], [*here.live_y], [*here.names]
        self._found, self._options = replace(here.session.found), method._oracle_options
        self.differentiates_twice = bool(self._found.fused)
        steps: Any = _Steps() if has_one_key(type(method)) else inputs.steps
        self._given = replace(
            inputs, steps=steps, memory={}, upper_memory={}, tables={}, solver=None, upper_solver=None,
            random_inputs={}, generator=None,
        )  # fmt: skip
        self._rules = [*method._rules.rules]
        self._upper_rules = None if method._upper_rules is None else [*method._upper_rules.rules]

    def __call__(
        self, losses: Mapping[str, Callable[..., Any]], tasks: Any, drawn: Any, random: Mapping[str, Any], state: State
    ) -> Results:
        """Compute the step's results.

        Args:
            losses: the user's functions, by role.
            tasks: the task sampler, if there is one; only its length is used.
            drawn: samples from the data or the task sampler, in order.
            random: the random inputs.
            state: the state that the step reads.
        """
        method, evaluation = self.method, _Evaluation(self.buffers, state["buffers"])
        session = self._session(evaluation)
        data = GivenData(drawn, losses)
        f, g = method._objectives(data.objective("upper"), data.objective("lower"))
        values = state["x"], state["y"]
        here = Oracle(self.live_x, self.live_y, f, g, names=lambda: self.names, session=session, values=values)
        given = self._inputs(state, random, losses)
        with torch.enable_grad():
            estimate = method._estimate(here, given, None if tasks is None else data.sampler(tasks))
            evaluation.is_last = True
            advance_buffers(here, estimate.lower)
        buffers = state["buffers"] if evaluation.left is None else evaluation.left
        moved = method.update(here.x, estimate.gradient, given.after(estimate)) if self.update else None
        if moved is not None:
            moved.check(session.checks)
        data.require_used()
        alerts, flags = session.checks.flags()
        return Results(
            replace(
                estimate,
                loss=estimate.loss.detach(),
                gradient=estimate.gradient.detach(),
                diagnostics=measured(estimate.figures),
                memory={name: vector.detach() for name, vector in estimate.memory.items()},
                upper_memory={name: vector.detach() for name, vector in estimate.upper_memory.items()},
                start=None,
                tables={name: t.contiguous() for name, t in estimate.tables.items()},  # strides are guarded
                numbers=self._changed(estimate.numbers),
            ),
            None if moved is None else replace(moved, numbers=self._changed(moved.numbers)),
            buffers,
            session.counts,
            alerts,
            flags,
        )

    def _changed(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers that are tensors, and the plain ones that a step has changed."""
        known = self._given.numbers
        return {n: v for n, v in numbers.items() if isinstance(v, Tensor) or n not in known or known[n] != v}

    def _session(self, evaluation: _Evaluation) -> Session:
        return Session(
            options=replace(self._options, evaluation=evaluation),
            found=replace(self._found),
            buffers=_COMPLETE,
            counts=dict.fromkeys(COUNTERS, 0),
            checks=Checks(),
            buffers_skipped=len(self.buffers) > 0,
            depends_on_something=set(),
            warned=set(),
            trend=LowerTrend(),
        )

    def _inputs(self, state: State, random: Mapping[str, Any], losses: Mapping[str, Any]) -> StepInputs:
        given, rates, limits = self._given, [rate.reshape(()) for rate in state["rates"]], self.method._limits
        split = len(given.upper_groups)
        upper = [{**group, "lr": rate} for group, rate in zip(given.upper_groups, rates[:split], strict=True)]
        lower = [{**group, "lr": rate} for group, rate in zip(given.lower_groups, rates[split:], strict=True)]
        if "projection" in losses:
            limits = replace(limits, projection=losses["projection"])
        upper_rules, rules = self._upper_rules, self._rules
        return replace(
            given,
            upper_groups=upper,
            lower_groups=lower,
            **{name: state[name] for name in ("memory", "upper_memory", "tables", "solver", "upper_solver")},
            lower=state["y"],
            numbers={**given.numbers, **state["numbers"]},
            random_inputs=random,
            lower_init=losses.get("start"),
            rule=lambda like: _rule(rules, rates[split:], like, limits),
            upper_rule=None if upper_rules is None else lambda like: _rule(upper_rules, rates[:split], like, None),
        )


def _refuse(*values: Any) -> Any:
    raise Refused(
        "the method reads inputs.steps, which would be a constant of the graph: make _graph_key of the method depend "
        "on it, or count in its state"
    )


class _Steps:
    """The number of steps in a graph that serves all steps: a method that reads it cannot be compiled like that."""

    def __add__(self, more: int) -> Self:
        return self

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse
    __sub__ = __rsub__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = _refuse
    __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __and__ = __or__ = __neg__ = _refuse
    __int__ = __float__ = __index__ = __hash__ = __str__ = __format__ = _refuse


_COMPLETE = Buffers(complete=True)


class _Evaluation:
    """Evaluates a loss with values in place of the live tensors, and with buffers that it may write into.

    Attributes:
        is_last: whether evaluations from here on set the buffers that the step leaves.
        left: these buffers.
    """

    def __init__(self, buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.buffers, self.values, self.is_last = buffers, values, False
        self.left: list[Tensor] | None = None

    @contextmanager
    def __call__(self, live: Sequence[Vector], values: Sequence[Vector | None]) -> Generator[Sequence[Vector]]:
        copies = [t.clone() for t in self.values]
        if self.is_last:
            self.left = copies
        variables = [
            Vector([as_variable(v, t.requires_grad) for v, t in zip(own or ts, ts, strict=True)])
            for ts, own in zip(live, values, strict=True)
        ]
        before = [t for ts in live for t in ts] + [*self.buffers]
        after = [v for vs in variables for v in vs] + copies
        with Substitution(before, after, stacked=False):
            yield variables


def _rule(known: Sequence[LowerRule], rates: Sequence[Tensor], like: Vector, limits: Limits | None) -> LowerRule:
    """Return the update rule for tensors of these shapes, with these learning rates of the groups."""
    shapes = [tuple(t.shape) for t in like]
    for rule in known:
        if rule.shapes == shapes:
            return rule.with_rates(rates, limits)
    raise RuntimeError("no eager step has updated lower tensors of these shapes, so a graph cannot either")


def following(state: State, results: Results) -> State:
    """Return the state after a step with these results."""
    estimate, moved = results.estimate, results.moved or Update(state["x"])
    upper_memory = {**state["upper_memory"], **estimate.upper_memory, **moved.upper_memory}
    numbers = {**estimate.numbers, **moved.numbers}
    return {
        **state,
        "x": Vector(moved.x),
        "y": Vector(moved.lower or estimate.lower or state["y"]),
        "buffers": results.buffers,
        "memory": {**state["memory"], **estimate.memory},
        "upper_memory": {name: vector for name, vector in upper_memory.items() if vector is not None},
        "tables": {**state["tables"], **estimate.tables},
        "solver": estimate.solver if any(estimate.solver or ()) else state["solver"],
        "upper_solver": moved.solver if any(moved.solver or ()) else state["upper_solver"],
        "numbers": {**state["numbers"], **{name: v for name, v in numbers.items() if isinstance(v, Tensor)}},
    }

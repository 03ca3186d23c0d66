"""The step as a pure function of losses, data, random numbers and state, which is traced as one graph."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..hypergradient.estimate import Write, measured
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

__all__ = ["PureStep", "State", "following", "results_of", "state_of"]

State = dict[str, Any]  # a pytree of the tensors that a step reads and that change from step to step


def state_of(
    known: Mapping[str, Any],
    numbers: Mapping[str, Any],
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    buffers: Sequence[Tensor],
    rates: Sequence[Tensor],
) -> State:
    """Return the state that a step reads, as a pytree; ``known`` has the entries of x and y as in `StepInputs`."""
    return {
        "x": [*x],
        "y": [*y],
        "buffers": [*buffers],
        "rates": [*rates],
        "memory": {name: [*vector] for name, vector in known["memory"].items()},
        "upper_memory": {name: [*vector] for name, vector in known["upper_memory"].items()},
        "tables": {**known["tables"]},
        "solver": _copied(known["solver"]),
        "upper_solver": _copied(known["upper_solver"]),
        "numbers": {name: value for name, value in numbers.items() if isinstance(value, Tensor)},
    }


def _copied(memory: Any) -> Any:
    """Copy the state of an optimizer; return None if it has none."""
    return [dict(entries) for entries in memory] if memory is not None and any(memory) else None


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
        self._given = replace(
            inputs, memory={}, upper_memory={}, tables={}, solver=None, upper_solver=None, random_inputs={},
            generator=None,
        )  # fmt: skip
        self._rules = [*method._rules.rules]
        self._upper_rules = None if method._upper_rules is None else [*method._upper_rules.rules]

    def __call__(
        self, losses: Mapping[str, Callable[..., Any]], tasks: Any, drawn: Any, random: Mapping[str, Any], state: State
    ) -> dict[str, Any]:
        """Compute the step's results, as a pytree.

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
        values = Vector(state["x"]), Vector(state["y"])
        here = Oracle(self.live_x, self.live_y, f, g, names=lambda: self.names, session=session, values=values)
        given = self._inputs(state, random, losses)
        with torch.enable_grad():
            estimate = method._estimate(here, given, None if tasks is None else data.sampler(tasks))
            evaluation.is_last = True
            advance_buffers(here, estimate.lower)
        buffers = state["buffers"] if evaluation.left is None else evaluation.left
        moved = method.update(here.x, estimate.gradient, given.after(estimate)) if self.update else None
        data.require_used()
        return self._results(estimate, moved, state, session, buffers, here.y)

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
            memory={name: Vector(values) for name, values in state["memory"].items()},
            upper_memory={name: Vector(values) for name, values in state["upper_memory"].items()},
            tables=state["tables"],
            lower=Vector(state["y"]),
            solver=state["solver"],
            upper_solver=state["upper_solver"],
            numbers={**given.numbers, **state["numbers"]},
            random_inputs=random,
            lower_init=losses.get("start"),
            rule=lambda like: _rule(rules, rates[split:], like, limits),
            upper_rule=None if upper_rules is None else lambda like: _rule(upper_rules, rates[:split], like, None),
        )

    def _results(
        self,
        estimate: Estimate,
        moved: Update | None,
        state: State,
        session: Session,
        buffers: Sequence[Tensor],
        y: Vector,
    ) -> dict[str, Any]:
        numbers, known = estimate.numbers, self._given.numbers
        results: dict[str, Any] = {
            "loss": estimate.loss.detach(),
            "gradient": [*estimate.gradient.detach()],
            "lower": None if estimate.lower is None else [*estimate.lower],
            "memory": {name: [*vector.detach()] for name, vector in estimate.memory.items()},
            "upper_memory": {name: [*vector.detach()] for name, vector in estimate.upper_memory.items()},
            "tables": {name: t.contiguous() for name, t in estimate.tables.items()},  # strides are guarded
            "solver": estimate.solver,
            "writes": _places(estimate.writes, state, y),
            "buffers": buffers,
            "diagnostics": measured(estimate.figures),
            "counts": session.counts,
            "moved": None,
        }
        if moved is not None:
            numbers = {**numbers, **moved.numbers}
            results["moved"] = {
                "x": [*moved.x],
                "lower": None if moved.lower is None else [*moved.lower],
                "upper_memory": {n: None if v is None else [*v] for n, v in moved.upper_memory.items()},
                "solver": moved.solver,
                "writes": _places(moved.writes, state, y),
            }
        results["numbers"] = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
        results["plain"] = {
            name: value
            for name, value in numbers.items()
            if not isinstance(value, Tensor) and (name not in known or known[name] != value)
        }
        results["alerts"], results["flags"] = session.checks.flags()
        return results


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


# ------------------------------------------------------------------------------------------------ results


def _places(writes: Sequence[Write], state: State, y: Vector) -> list[tuple[tuple[str, str, int], Any, Tensor]]:
    """Return the rows to change, each with the place of its table in the state."""
    if not writes:
        return []
    tables = [(("tables", name, 0), t) for name, t in state["tables"].items()]
    tables += [(("y", "y", i), t) for i, t in enumerate(y)]
    for level in ("memory", "upper_memory"):
        tables += [((level, name, i), t) for name, ts in state[level].items() for i, t in enumerate(ts)]
    found = []
    for write in writes:
        place = next((place for place, table in tables if table is write.table), None)
        if place is None:
            raise RuntimeError("a step writes rows of a table that is not in its state, so a graph cannot return them")
        found.append((place, write.rows, write.values))
    return found


def results_of(
    results: Mapping[str, Any], table_of: Callable[[tuple[str, str, int]], Tensor]
) -> tuple[Estimate, Update | None]:
    """Return a step's results in the form of an eager step; ``table_of`` finds a table by its place."""
    moved = results["moved"]
    estimate = Estimate(
        results["loss"],
        Vector(results["gradient"]),
        results["diagnostics"],
        memory={name: Vector(values) for name, values in results["memory"].items()},
        upper_memory={name: Vector(values) for name, values in results["upper_memory"].items()},
        lower=None if results["lower"] is None else Vector(results["lower"]),
        solver=results["solver"],
        tables=results["tables"],
        writes=tuple([Write(table_of(place), rows, values) for place, rows, values in results["writes"]]),
        numbers={**results["plain"], **results["numbers"]},
    )
    if moved is None:
        return estimate, None
    update = Update(
        Vector(moved["x"]),
        {name: None if values is None else Vector(values) for name, values in moved["upper_memory"].items()},
        lower=None if moved["lower"] is None else Vector(moved["lower"]),
        writes=tuple([Write(table_of(place), rows, values) for place, rows, values in moved["writes"]]),
        solver=moved["solver"],
    )
    return estimate, update


def following(state: State, results: Mapping[str, Any]) -> State:
    """Return the state after a step with these results."""
    moved = results["moved"] or {"x": None, "lower": None, "upper_memory": {}, "solver": None}
    upper_memory = {**state["upper_memory"], **results["upper_memory"], **moved["upper_memory"]}
    return {
        **state,
        "x": moved["x"] or state["x"],
        "y": moved["lower"] or results["lower"] or state["y"],
        "buffers": results["buffers"],
        "memory": {**state["memory"], **results["memory"]},
        "upper_memory": {name: values for name, values in upper_memory.items() if values is not None},
        "tables": {**state["tables"], **results["tables"]},
        "solver": _copied(results["solver"]) or state["solver"],
        "upper_solver": _copied(moved["solver"]) or state["upper_solver"],
        "numbers": {**state["numbers"], **results["numbers"]},
    }

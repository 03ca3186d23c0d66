"""One kind of step as a graph: what goes in, what comes out, and how that is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..hypergradient.estimate import Write, measured
from ..oracle.evaluation import substituted
from ..oracle.oracle import Oracle
from ..oracle.session import Options, Session
from ..problem.feeding import Draw, Drawn, Fed, FedTasks
from ..problem.objective import Objective
from ..problem.tracing import Untraceable
from ..problem.vector import Vector
from ..solvers.lower import LowerRules
from .base import BilevelOptimizer
from .graphs import Backend, Graph
from .step import StepInputs, changed

__all__ = ["Sources", "StepGraph", "fed", "values_of"]

SOURCES = ("upper", "lower", "tasks", "tasks.upper", "tasks.lower", "whole")


class Sources(NamedTuple):
    """Where a step draws: the two losses as they were passed, and a sampler of tasks."""

    upper: Objective | None
    lower: Objective | None
    tasks: Any


def fed(
    sources: Sources, draws: Sequence[Draw], results: Sequence[Drawn], random_inputs: Mapping[str, Any] | None = None
) -> Sources:
    """The sources in place of which these results are given, in this order: those of a step with such inputs."""
    by_source: dict[str, deque[Drawn]] = {source: deque() for source in SOURCES}
    for draw, result in zip(draws, results, strict=True):
        if random_inputs is None or draw.made(random_inputs):
            by_source[draw.source].append(result)
    return Sources(
        None if sources.upper is None else Fed(sources.upper, "upper", by_source["upper"]),
        None if sources.lower is None else Fed(sources.lower, "lower", by_source["lower"]),
        None if sources.tasks is None else FedTasks(sources.tasks, by_source),
    )


def values_of(
    given: StepInputs,
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    rates: Sequence[Tensor],
    reads: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What of a step is values, as a pytree: the arguments of its graph but for what is drawn.

    ``reads`` are the names of what it reads of what is remembered of x. Default: all of it.
    """
    return {
        "x": list(x),
        "y": list(y),
        "memory": {name: list(vector) for name, vector in given.memory.items()},
        "upper_memory": {n: list(vector) for n, vector in given.upper_memory.items() if reads is None or n in reads},
        "tables": dict(given.tables),
        "solver": None if given.solver is None else [dict(entries) for entries in given.solver],
        "numbers": _tensors(given.numbers),
        "rates": list(rates),
    }


class StepGraph:
    """A step, traced.

    Args:
        method: whose step it is.
        oracle: at the point of the step.
        given: what the step is given.
        sources: where it draws.
        draws: what it draws, in order.
        update: whether it moves x too.
        options: of the oracle.
        arguments: the values and what was drawn.
        backend: compiles the graph.
        times: how many steps the graph makes, each with data of its own. Default: 1.

    Attributes:
        graph: the compiled graph.
        counts: oracle calls of a step.
        alerts: keys of the warnings that a step may give.
        numbers: plain numbers that it changes, but for tensors.
    """

    def __init__(
        self,
        method: BilevelOptimizer,
        oracle: Oracle,
        given: StepInputs,
        sources: Sources,
        draws: Sequence[Draw],
        update: bool,
        options: Options,
        arguments: Mapping[str, Any],
        backend: Backend,
        times: int = 1,
    ) -> None:
        self.alerts: list[str] = []
        self.numbers: dict[str, Any] = {}
        found = oracle.session.found

        def step(values: dict[str, Any]) -> dict[str, Any]:
            session = Session(changed(options, evaluation=substituted), changed(found), oracle.session.buffers)
            drawn, now_chances = values["data"]
            f, g, tasks = fed(sources, draws, drawn)
            f, g = method.objectives(f, g)
            here = Oracle(oracle.live_x, oracle.live_y, f, g, names=lambda: oracle.names, session=session)
            here = here.at(values["x"], values["y"])
            now = _given(given, values, now_chances, method)
            estimate, moved = method.compute(here, now, tasks, update=update)
            results = _results(estimate, values, here.y)
            self.numbers = {
                name: value
                for name, value in estimate.numbers.items()
                if not isinstance(value, Tensor) and (name not in given.numbers or given.numbers[name] != value)
            }
            if moved is not None:
                results |= {
                    "x": list(moved.x),
                    "x_memory": {name: v if v is None else list(v) for name, v in moved.upper_memory.items()},
                    "x_lower": None if moved.lower is None else list(moved.lower),
                    "x_writes": _writes(moved.writes, values, here.y),
                }
                self.numbers |= moved.numbers
            self.counts = {name: count for name, count in session.counts.items() if count}
            self.alerts, flags = session.checks.flags()
            return {**results, "flags": flags}

        def several(values: dict[str, Any]) -> dict[str, Any]:
            losses, flags = [], []
            for data in values["data"]:
                results = step({**values, "data": data})
                values = _advanced(values, results)
                losses.append(results["loss"])
                flags.append(results["flags"])
            return {**results, "losses": torch.stack(losses), "flags": torch.stack(flags)}

        self.arguments, self.times, self.reads = arguments, times, method.estimate_reads
        self._again = partial(StepGraph, method, oracle, given, sources, draws, update, options)
        self._backend = backend
        self.graph = Graph(step if times == 1 else several, arguments, backend, [*oracle.live_x, *oracle.live_y])

    def repeated(self, times: int) -> StepGraph:
        """The graph of several steps like this one, one after the other."""
        arguments = {**self.arguments, "data": [self.arguments["data"]] * times}
        return self._again(arguments, self._backend, times)


def _advanced(values: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The values of the step after one with these results."""
    upper = {**values["upper_memory"], **results["upper_memory"], **results.get("x_memory", {})}
    return {
        **values,
        "x": results.get("x") or values["x"],
        "y": results.get("x_lower") or results["lower"] or values["y"],
        "memory": {**values["memory"], **results["memory"]},
        "upper_memory": upper,
        "tables": {**values["tables"], **results["tables"]},
        "solver": results["solver"] or values["solver"],
        "numbers": {**values["numbers"], **results["numbers"]},
    }


def _given(
    given: StepInputs, values: dict[str, Any], random_inputs: dict[str, Any], method: BilevelOptimizer
) -> StepInputs:
    """What a step is given, with these values."""
    rates = iter(values["rates"])
    upper_groups = [{**group, "lr": next(rates)} for group in given.upper_groups]
    lower_groups = [{**group, "lr": next(rates)} for group in given.lower_groups]
    rules = LowerRules(method.lower_factory, method.limits)
    return changed(
        given,
        upper_groups=upper_groups,
        lower_groups=lower_groups,
        memory={name: Vector(ts) for name, ts in values["memory"].items()},
        upper_memory={name: Vector(ts) for name, ts in values["upper_memory"].items()},
        tables=values["tables"],
        lower=Vector(values["y"]),
        solver=values["solver"],
        numbers={**given.numbers, **values["numbers"]},
        random_inputs=random_inputs,
        rule=lambda like: rules(lower_groups, like),
    )


def _results(estimate: Estimate, values: dict[str, Any], y: Vector) -> dict[str, Any]:
    return {
        "loss": estimate.loss.detach(),
        "gradient": list(estimate.gradient.detach()),
        "diagnostics": measured(estimate.figures),
        "memory": {name: list(vector.detach()) for name, vector in estimate.memory.items()},
        "upper_memory": {name: list(vector.detach()) for name, vector in estimate.upper_memory.items()},
        "tables": dict(estimate.tables),
        "solver": estimate.solver,
        "lower": None if estimate.lower is None else list(estimate.lower),
        "numbers": _tensors(estimate.numbers),
        "writes": _writes(estimate.writes, values, y),
    }


def _tensors(numbers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of the plain numbers that are tensors, which are values of a step as any other."""
    return {name: value for name, value in numbers.items() if isinstance(value, Tensor)}


def _writes(
    writes: Sequence[Write], values: dict[str, Any], y: Vector
) -> list[tuple[tuple[str, str, int], Any, Tensor]]:
    """Rows to be changed, with the place of their table in the arguments; y is that of the step's oracle."""
    places = {id(t): ("tables", name, 0) for name, t in values["tables"].items()}
    places |= {id(t): ("y", "y", i) for i, t in enumerate(y)}
    for level in ("memory", "upper_memory"):
        places |= {id(t): (level, name, i) for name, ts in values[level].items() for i, t in enumerate(ts)}
    if any(id(write.table) not in places for write in writes):
        raise Untraceable("a step writes rows of a table that it was not given")
    return [(places[id(write.table)], write.rows, write.values) for write in writes]

"""One kind of step as a graph: the step's own function, traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..hypergradient import Estimate
from ..hypergradient.estimate import Write, measured
from ..optimizer.base import BilevelOptimizer
from ..optimizer.step import StepInputs, changed
from ..oracle.buffers import Buffers
from ..oracle.evaluation import substituted
from ..oracle.oracle import Oracle
from ..oracle.session import Session
from ..problem.tracing import Untraceable
from ..problem.vector import Vector
from ..solvers.lower import LowerRules
from .backends import Backend, backend_of
from .draws import Draw, Sources
from .losses import Readings
from .trace import Graph

__all__ = ["StepGraph", "trace_update", "values_of"]


def values_of(
    given: StepInputs,
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    reads: Mapping[str, Sequence[Tensor]],
    rates: Sequence[Tensor],
    upper_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What of a step is values, as a pytree: the arguments of its graph but for what is drawn.

    ``upper_names`` are the names of what it reads of what is remembered of x. Default: all of it.
    """
    return {
        "x": list(x),
        "y": list(y),
        "memory": {name: list(vector) for name, vector in given.memory.items()},
        "upper_memory": {
            n: list(vector) for n, vector in given.upper_memory.items() if upper_names is None or n in upper_names
        },
        "tables": dict(given.tables),
        "solver": None if given.solver is None else [dict(entries) for entries in given.solver],
        "upper_solver": None if given.upper_solver is None else [dict(entries) for entries in given.upper_solver],
        "numbers": _tensors(given.numbers),
        "reads": {role: list(tensors) for role, tensors in reads.items()},
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
        readings: of the functions that it evaluates.
        update: whether it moves x too.
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
        readings: Readings,
        update: bool,
        arguments: Mapping[str, Any],
        backend: Backend,
        times: int = 1,
    ) -> None:
        self.alerts: list[str] = []
        self.numbers: dict[str, Any] = {}
        found = oracle.session.found

        def step(values: dict[str, Any]) -> dict[str, Any]:
            session = Session(
                changed(method._oracle_options, evaluation=substituted), changed(found), Buffers(complete=True)
            )
            losses = readings.losses(oracle.live_x, oracle.live_y, values["reads"])
            drawn, random_inputs = values["data"]
            again = sources.replayed(draws, drawn, None, losses)
            f, g = method._objectives(again.upper, again.lower)
            here = Oracle(oracle.live_x, oracle.live_y, f, g, names=lambda: oracle.names, session=session)
            here = here.at(values["x"], values["y"])
            now = _given(given, values, random_inputs, method, losses)
            session.buffers_skipped = any(loss.writes for role, loss in losses.items() if role.startswith("lower"))
            estimate, moved = method._compute(here, now, again.tasks, update=update)
            results = _results(estimate, values, here.y)
            # Of all evaluations the last one of the lower loss leaves its buffers.
            results["reads"] = {role: dict(loss.written) for role, loss in losses.items() if role.startswith("lower")}
            self.numbers = {
                name: value
                for name, value in estimate.numbers.items()
                if not isinstance(value, Tensor) and (name not in given.numbers or given.numbers[name] != value)
            }
            if moved is not None:
                results |= {
                    "x": list(moved.x),
                    "x_memory": {name: v if v is None else list(v) for name, v in moved.upper_memory.items()},
                    "x_solver": moved.solver,
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

        self.arguments, self.times, self.reads = arguments, times, method._estimate_reads
        self._again = partial(StepGraph, method, oracle, given, sources, draws, readings, update)
        self._backend = backend
        self.graph = Graph(step if times == 1 else several, arguments, backend, [*oracle.live_x, *oracle.live_y])

    def repeated(self, times: int) -> StepGraph:
        """The graph of several steps like this one, one after the other."""
        arguments = {**self.arguments, "data": [self.arguments["data"]] * times}
        return self._again(arguments, self._backend, times)


def trace_update(factory: Callable[[Any], Optimizer]) -> None:
    """Trace the second step of an optimizer of x; raises `Untraceable` if its update cannot be part of a graph."""
    single, one = torch.zeros(1, 1, device="cpu", requires_grad=True), torch.ones(1, 1, device="cpu")

    def moved(values: tuple[Any, Any]) -> tuple[list[Tensor], Any]:
        rate, memory = values
        rule = LowerRules(factory)([{"params": [single], "lr": rate}], Vector([one]))
        solved = rule.step(Vector([one]), memory or rule.fresh(), lambda _: (None, Vector([one])))
        return list(solved.y), solved.memory

    Graph(moved, (torch.ones((), device="cpu"), moved((1.0, None))[1]), backend_of("eager", None, None))


def _advanced(values: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The values of the step after one with these results."""
    reads = {role: list(tensors) for role, tensors in values["reads"].items()}
    for role, written in results["reads"].items():
        for i, value in written.items():
            reads[role][i] = value
    upper = {**values["upper_memory"], **results["upper_memory"], **results.get("x_memory", {})}
    return {
        **values,
        "x": results.get("x") or values["x"],
        "y": results.get("x_lower") or results["lower"] or values["y"],
        "memory": {**values["memory"], **results["memory"]},
        "upper_memory": upper,
        "tables": {**values["tables"], **results["tables"]},
        "solver": results["solver"] or values["solver"],
        "upper_solver": results.get("x_solver") or values["upper_solver"],
        "numbers": {**values["numbers"], **results["numbers"]},
        "reads": reads,
    }


def _given(
    given: StepInputs,
    values: dict[str, Any],
    random_inputs: dict[str, Any],
    method: BilevelOptimizer,
    losses: Mapping[str, Callable[..., Any]],
) -> StepInputs:
    """What a step is given, with these values."""
    rates = iter(values["rates"])
    upper_groups = [{**group, "lr": next(rates)} for group in given.upper_groups]
    lower_groups = [{**group, "lr": next(rates)} for group in given.lower_groups]
    limits = replace(method._limits, projection=losses.get("projection"))
    rules, upper = LowerRules(method._lower_factory, limits), method._upper_factory
    upper_rules = None if upper is None else LowerRules(upper)
    return changed(
        given,
        upper_groups=upper_groups,
        lower_groups=lower_groups,
        memory={name: Vector(ts) for name, ts in values["memory"].items()},
        upper_memory={name: Vector(ts) for name, ts in values["upper_memory"].items()},
        tables=values["tables"],
        lower=Vector(values["y"]),
        solver=values["solver"],
        upper_solver=values["upper_solver"],
        numbers={**given.numbers, **values["numbers"]},
        random_inputs=random_inputs,
        lower_init=losses.get("start"),
        rule=lambda like: rules(lower_groups, like),
        upper_rule=None if upper_rules is None else lambda like: upper_rules(upper_groups, like),
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

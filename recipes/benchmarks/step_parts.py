"""Measure the parts of a small compiled step, in microseconds: of a single step and of one in a `run`.

    python -m recipes.benchmarks.step_parts
    python -m recipes.benchmarks.step_parts --methods soba --steps 320

The problem is ``logistic`` of `recipes.benchmarks.speed`. Each part is timed in calls of its own, so that the parts do
not pay for each other's clock; the clock's own time is subtracted. "rest" is what no part accounts for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

from bilevel_optim.compiled import steps as compiled
from bilevel_optim.compiled.chain import Chain
from bilevel_optim.compiled.forms import DataForm
from bilevel_optim.compiled.places import StatePlaces
from bilevel_optim.compiled.program import StepProgram, StepReader
from bilevel_optim.compiled.runs import CompiledRuns
from bilevel_optim.optimizer.method import Method

from ..common import Parser, environment, show, whole
from ..problems.shapes import shape
from .speed import optimizer_of

METHODS = ("soba", "aid", "srba", "f2sa")
Compiled = compiled.CompiledSteps
PARTS: dict[str, tuple[Any, str]] = {
    "cache key": (Compiled, "entry_for"),
    "guards": (StepReader, "known"),
    "drawing": (Compiled, "drawn"),
    "drawing ahead": (CompiledRuns, "_ahead"),
    "form of data and state": (DataForm, "fits"),
    "state in": (StatePlaces, "read"),
    "program": (StepProgram, "once"),
    "first program of a run": (StepProgram, "__call__"),
    "programs in a row": (Chain, "follow"),
    "state out": (Compiled, "write"),
    "watchers": (Method, "_watch_losses"),
}
ROUNDS = 9


def seconds(advance: Callable[[], Any], steps: int, calls: int) -> float:
    """Return the median of the processor seconds of a step."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(calls):
            advance()
        found.append((time.process_time() - began) / (calls * steps))
    return median(found)


def part(place: Any, name: str, advance: Callable[[], Any], steps: int, calls: int) -> float:
    """Return the median of the seconds that a step spends in one function."""
    own, spent, times = getattr(place, name), 0.0, 0

    def timed(*arguments: Any, **named: Any) -> Any:
        nonlocal spent, times
        began = time.process_time()
        try:
            return own(*arguments, **named)
        finally:
            spent += time.process_time() - began
            times += 1

    found, clock = [], min(_empty() for _ in range(ROUNDS))
    with patch.object(place, name, timed):
        for _ in range(ROUNDS):
            spent, times = 0.0, 0
            for _ in range(calls):
                advance()
            found.append((spent - times * clock) / (calls * steps))
    return max(median(found), 0.0)


def _empty() -> float:
    """Return the seconds that a clock takes in `part`, for each call."""
    spent = 0.0
    for _ in range(1000):
        began = time.process_time()
        spent += time.process_time() - began
    return spent / 1000


def measure(name: str, entry: str, steps: int, calls: int, backend: str) -> dict[str, float]:
    """Return the microseconds of a step, in all and by part."""
    optimizer, losses, _ = optimizer_of(name, shape("logistic"))
    optimizer.compile(backend=backend)
    run = partial(optimizer.run, steps=steps) if entry == "run" else optimizer.step
    advance = partial(run, *losses)
    for _ in range(3 + 80 // steps):
        advance()
    found = {"in all": seconds(advance, steps, calls)}
    for title, (place, function) in PARTS.items():
        found[title] = part(place, function, advance, steps, calls)
    found["rest"] = 2 * found["in all"] - sum(found.values())
    return {title: 1e6 * taken for title, taken in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__, threads=1, out=False)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--steps", type=whole(1, 1000), default=32, help="of a call of run")
    parser.add_argument("--calls", type=whole(1, 1000), default=40, help="of a step or a run in each of nine rounds")
    parser.add_argument("--backend", default="inductor")
    options = parser.parse(argv)
    print(environment())
    columns = [(name, entry, k) for name in options.methods for entry, k in (("step", 1), ("run", options.steps))]
    measured = [measure(*column, options.calls, options.backend) for column in columns]
    titles = [f"{name}, {entry}" + (f"({k})" if entry == "run" else "") for name, entry, k in columns]
    rows = [[title, *(f"{own[title]:.1f}" for own in measured)] for title in ("in all", *PARTS, "rest")]
    show("Processor microseconds of a step", ["", *titles], rows)


if __name__ == "__main__":
    main()

"""Outcomes of runs with too large learning rates: good, warned, or silently bad.

    python -m recipes.benchmarks.divergence

Every method runs on the ten problems of `recipes.benchmarks.suggest` with its defaults (``lower_lr="auto"`` where
supported, else 1 / L) and upper rates from too small to far too large, by plain descent. ``well``: no warning, and the
last upper loss is at most 1.1 times the first. ``told``: a warning, or a `NonFiniteError`. ``silent``: neither.
"""

from __future__ import annotations

import math
import warnings
from functools import partial

import bilevel_optim as bo

from ..common import Parser, environment, progress, show
from ..common.seeds import begin
from .suggest import CASES, Case

RATES = (1e-12, 1e-2, 1.0, 1e2, 1e4)
METHODS = {
    "AID": {"lower_steps": 10}, "ITD": {"lower_steps": 10}, "F2SA": {"lower_steps": 10}, "BOME": {"lower_steps": 10},
    "FirstOrder": {"lower_steps": 10}, "PZOBO": {"lower_steps": 10}, "StocBiO": {"lower_steps": 10},
    "AmIGO": {"lower_steps": 10}, "SOBA": {}, "SABA": {}, "FSLA": {}, "MRBO": {}, "SRBA": {}, "SUSTAIN": {},
}  # fmt: skip


def outcome(case: Case, make: partial[bo.BilevelOptimizer], steps: int) -> str:
    """Return the outcome of a run from the current tensors, which are restored: well, told, silent, or refused."""
    tensors = [*case.x, *case.y]
    start = [t.detach().clone() for t in tensors]
    begin(0, "run")
    f, g = (bo.Objective(one.loss, one.data) if isinstance(one, bo.Objective) else one for one in case[2:4])
    losses = list[float]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            optimizer = make(case.x, case.y)
            losses = [float(optimizer.step(f, g, tasks=case.tasks)) for _ in range(steps)]
        except bo.NonFiniteError:
            return "told"
        except ValueError:  # the method does not support this problem
            return "refused"
        finally:
            for t, value in zip(tensors, start, strict=True):
                t.data.copy_(value)
    if any(issubclass(one.category, bo.BilevelWarning) for one in said):
        return "told"
    sound = all(map(math.isfinite, losses)) and losses[-1] <= losses[0] + 0.1 * abs(losses[0])
    return "well" if sound else "silent"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(__doc__, out=False)
    parser.option("cases", [*CASES], "problems")
    parser.option("methods", [*METHODS], "methods")
    parser.option("rates", [*RATES], "upper learning rates")
    parser.option("steps", 300, "steps per run")
    args = parser.parse(arguments)
    print(", ".join(f"{k} {v}" for k, v in environment("cpu").items()))
    found: dict[tuple[str, float], list[str]] = {}
    silent: list[list[object]] = []
    for name in progress(args.cases, "problems"):
        case = CASES[name]()
        for method in args.methods:
            for lr in args.rates:
                said = outcome(case, partial(getattr(bo, method), lr=lr, **METHODS[method]), args.steps)
                found.setdefault((method, lr), []).append(said)
                if said == "silent":
                    silent.append([name, method, lr])
    rows = [
        [method, *("/".join(str(found[method, lr].count(w)) for w in ("well", "told", "silent")) for lr in args.rates)]
        for method in args.methods
    ]
    show("problems that end well / told / silent", ["method", *(f"lr {lr:g}" for lr in args.rates)], rows)
    if silent:
        show("silent", ["problem", "method", "lr"], silent)


if __name__ == "__main__":
    main()

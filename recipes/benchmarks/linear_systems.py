r"""Is the linear system of the implicit hypergradient solved, or is it said that it is not?

    python -m recipes.benchmarks.linear_systems --out docs/records

AID with each linear solver on the systems of `recipes.problems.systems`: float32 and float64; 10, 50, 200 iterations;
one call, or five with warm starts. An estimate is right up to one percent. It is silent if it is wrong without a
warning, in this call or an earlier one. It is a false alarm if a warning comes with an error below 0.1 percent although
the system has a solution; "changed" is the same where ``linear_solver="auto"`` says why it changes to MINRES.
The second table compares the number of iterations with scipy's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, NamedTuple

import scipy.sparse.linalg
import torch

import bilevel_optim as bo

from ..common import Parser, environment, progress, save, show
from ..problems.systems import SYSTEMS, Direction, System

VERDICTS = ("right", "told", "silent", "false alarm", "changed")
TYPES = {"float32": torch.float32, "float64": torch.float64}
SOLVERS, STEPS = ("cg", "minres", "auto", "direct"), (10, 50, 200)


class Call(NamedTuple):
    """Relative error of one call, whether it warned, and whether one has warned so far."""

    error: float
    warns: bool
    told: bool


def calls(system: System, right: Direction, solver: str, steps: int, count: int) -> list[Call]:
    """Return the errors and warnings of calls at the same point."""
    x, y = system.x.clone().requires_grad_(), system.y.clone().requires_grad_()
    options: dict[str, Any] = {"lower_steps": 0, "linear_solver": solver, "linear_steps": steps}
    optimizer, made = bo.AID([x], [y], lr=0.0, lower_lr=1.0, **options), []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(count):
            before = len(seen)
            x.grad = None
            try:
                optimizer.backward(lambda: system.f(x, y, system.data), lambda: system.g(x, y, system.data))
            except (ArithmeticError, ValueError):  # refused, which is a way to tell
                made.append(Call(float("nan"), True, True))
                break
            assert x.grad is not None
            error = (x.grad.double() - right.hypergradient).norm() / right.hypergradient.norm()
            made.append(Call(float(error), len(seen) > before, bool(seen)))
    return made


def judged(made: list[Call], solvable: bool, solver: str) -> str:
    """Return the verdict on a series of calls."""
    if any(not call.error <= 1e-2 and not call.told for call in made):
        return "silent"
    if solvable and any(call.warns and call.error < 1e-3 for call in made):
        return "changed" if solver == "auto" else "false alarm"
    return "told" if any(call.warns for call in made) else "right"


def iterations(right: Direction, solver: str) -> tuple[int, int]:
    """Return the iterations of the library and of scipy until the relative residual is 1e-6, in float64."""
    matrix, b = right.matrix, right.right_side
    found = getattr(bo.linear, solver)(lambda v: bo.Vector([matrix @ v[0]]), [b], steps=2000, tol=1e-6)
    made: list[Any] = []
    # MINRES of scipy compares its tolerance with another norm, so its iterates are looked at.
    limit, H, right_side = 1e-6 * float(b.norm()), matrix.numpy(), b.numpy()

    def look(v: Any) -> None:
        made.append(float(((right_side - H @ v) ** 2).sum() ** 0.5))

    getattr(scipy.sparse.linalg, solver)(H, right_side, maxiter=2000, rtol=1e-14, callback=look)
    below = [k + 1 for k, residual in enumerate(made) if residual <= limit]
    return int(found.iterations), below[0] if below else -1


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Print the verdicts and the iterations, and write all errors."""
    parser = Parser(__doc__, threads=1)
    parser.option("systems", [*SYSTEMS], "systems", choices=[*SYSTEMS], metavar="SYSTEM")
    args = parser.parse(arguments)
    print(", ".join(f"{k} {v}" for k, v in environment("cpu").items()))
    results: dict[str, dict[str, Any]] = {}
    table, counted = [], []
    for name in progress(args.systems, "systems"):
        made, system = SYSTEMS[name](), {}
        for kind, dtype in TYPES.items():
            here = made.to(dtype)
            right = here.direction()
            for solver in SOLVERS:
                for steps in STEPS if solver != "direct" else (1,):
                    for count in (1, 5) if solver != "direct" else (1,):
                        found = calls(here, right, solver, steps, count)
                        verdict = judged(found, right.solvable, solver)
                        key = f"{kind}, {solver}, {steps} steps, {count} calls"
                        system[key] = {"verdict": verdict, "errors": [c.error for c in found], "told": found[-1].told}
        results[name] = system
        counts = Counter(cell["verdict"] for cell in system.values())
        table.append([name, *(counts[v] for v in VERDICTS)])
        right = made.direction()
        if right.solvable:
            counted.append([name, *iterations(right, "cg"), *iterations(right, "minres")])
    total = Counter(cell["verdict"] for system in results.values() for cell in system.values())
    show("Verdicts", ["system", *VERDICTS], [*table, ["all", *(total[v] for v in VERDICTS)]])
    show("Iterations to a residual of 1e-6", ["system", "CG", "CG, scipy", "MINRES", "MINRES, scipy"], counted)
    return save(args, args.out / "linear_systems", {"results": results, "iterations": counted})


if __name__ == "__main__":
    main()

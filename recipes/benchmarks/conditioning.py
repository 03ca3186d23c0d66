r"""Oracle calls to a stationary point against the condition number of the lower problem.

Two problems with n = 10 variables at both levels, lower condition number kappa, spectrum of A log-spaced:

    quadratic  g = y'Ay/2 - y'A^(1/2)x, f = |y - t|^2/2: the upper objective has condition number kappa too
    quartic    g = (y - x)'A(y - x)/2, f = y1^4/4 - y1^2/2 + |y_2..n|^2/2: the upper objective is well conditioned

    python -m recipes.benchmarks.conditioning            # kappa = 10, 100, 1000; an hour or less

Each method runs with every setting of a printed grid, then with the neighbours of the best until none is better. The
table shows the fewest calls (all gradients and products) until the true gradient norm is 1e-3. Lower steps have size
1/L; those of RAHGD are Nesterov's, with the momentum of the theory. RAHGD does not restart here (the radius in the grid
is infinite): only momentum at both levels accelerates it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, progress, save, show
from ..common.search import Axis, Found, search
from ..common.seeds import stream

SIZE, TARGET = 10, 1e-3
ENDS: dict[str, dict[str, Any]] = {
    "lower_steps": {"least": 1},
    "linear_steps": {"least": 1},
    "lr": {"most": 1.9},
    "momentum": {"extends": False},
}
# lr is in units of 1/L.
GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "RAHGD": {
        "lower_steps": (10, 30, 100, 200),
        "linear_steps": (5, 12),
        "lr": (1.0, 0.5),
        "momentum": (0.7, 0.9, 0.97),
        "restart_radius": (math.inf,),
    },
    "AID": {"lower_steps": (3, 10, 30, 100), "linear_steps": (5, 12), "lr": (1.5, 1.0, 0.5)},
    "ITD": {"lower_steps": (10, 30, 100, 300), "lr": (1.5, 1.0, 0.5)},
    "BA": {"lower_steps": (10, 100, 1000), "linear_steps": (12,), "lr": (1.5, 1.0, 0.5)},
}


class Problem(NamedTuple):
    """Live tensors, losses, the true gradient of the upper objective, and the smoothness of both levels."""

    x: Tensor
    y: Tensor
    upper: Callable[[], Tensor]
    lower: Callable[[], Tensor]
    gradient: Callable[[], Tensor]
    smoothness: float
    lower_smoothness: float


def with_spectrum(first: float, last: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a symmetric matrix with eigenvalues between powers of ten, and its root."""
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))[0]
    spectrum = torch.logspace(first, last, SIZE, dtype=torch.float64)
    return basis @ torch.diag(spectrum) @ basis.T, basis @ torch.diag(spectrum.sqrt()) @ basis.T


def quadratic(kappa: float, seed: int = 0) -> Problem:
    """Return a problem that is ill-conditioned at both levels."""
    generator = stream(seed, "data")
    A, root = with_spectrum(0, math.log10(kappa), generator)
    target = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    x, y = (torch.zeros(SIZE, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inverse = torch.linalg.inv(root)
    return Problem(
        x, y, lambda: (y - target).square().sum() / 2, lambda: y @ A @ y / 2 - y @ root @ x,
        lambda: inverse @ (inverse @ x.detach() - target), 1.0, kappa,
    )  # fmt: skip


def quartic(kappa: float, seed: int = 0) -> Problem:
    """Return a problem with a strict saddle point at the origin, ill-conditioned at the lower level only."""
    A, _ = with_spectrum(-math.log10(kappa), 0, stream(seed, "data"))
    x = torch.tensor([0.1] + [1.0] * (SIZE - 1), dtype=torch.float64, requires_grad=True)
    y = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)

    def gradient() -> Tensor:
        z = x.detach().clone()
        z[0] = z[0] ** 3 - z[0]
        return z

    return Problem(
        x, y, lambda: y[0] ** 4 / 4 - y[0] ** 2 / 2 + y[1:].square().sum() / 2, lambda: (y - x) @ A @ (y - x) / 2,
        gradient, 2.0, 1.0,
    )  # fmt: skip


def calls(make: Callable[[float], Problem], kappa: float, name: str, setting: dict[str, Any], most: float) -> float:
    """Return the oracle calls until the gradient is small; infinite if more than ``most``."""
    problem, options = make(kappa), dict(setting)
    options["lr"] /= problem.smoothness
    if name == "RAHGD":
        root = math.sqrt(kappa)
        options |= {"lower_momentum": (root - 1) / (root + 1), "on_converged": "continue"}
    optimizer = getattr(bo, name)(
        [problem.x], [problem.y], lower_lr=1 / problem.lower_smoothness, check_finite=False, **options
    )
    while (spent := sum(optimizer.oracle_counts.values())) <= most:
        norm = float(problem.gradient().norm())
        if norm <= TARGET:
            return float(spent)
        if not norm < 1e6:
            break
        optimizer.step(problem.upper, problem.lower)
    return math.inf


def best(make: Callable[[float], Problem], kappa: float, name: str, most: float) -> Found:
    """Search for the setting with the fewest calls; a run stops once it exceeds the best so far."""
    fewest = most

    def score(setting: dict[str, Any], _: float) -> float:
        nonlocal fewest
        if (key := str(setting)) not in known:
            known[key] = calls(make, kappa, name, setting, fewest)
            fewest = min(fewest, known[key])
        return known[key]

    known = dict[str, float]()
    return search({key: Axis(values, **ENDS.get(key, {})) for key, values in GRID[name].items()}, score, shares=())


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return the numbers that it writes."""
    parser = Parser(__doc__)
    parser.option("kappa", [10.0, 100.0, 1000.0], "condition numbers")
    parser.option("most", 100_000, "maximal oracle calls of a run")
    args = parser.parse(arguments)
    print("grid (lr in units of 1/L):", flush=True)
    for name, grid in GRID.items():
        print(f"  {name}: {', '.join(f'{k} {v}' for k, v in grid.items())}")
    numbers: list[dict[str, Any]] = []
    problems: dict[str, Callable[[float], Problem]] = {"quadratic": quadratic, "quartic": quartic}
    for label, make in problems.items():
        rows: list[list[object]] = []
        for name in GRID:
            best_of: list[object] = []
            for kappa in progress(args.kappa, f"{label} {name}", unit="kappa"):
                found = best(make, kappa, name, args.most)
                chosen = found.setting if math.isfinite(found.score) else None
                numbers.append(
                    {"problem": label, "method": name, "kappa": kappa, "calls": found.score, "setting": chosen,
                     "edges": found.edges}
                )  # fmt: skip
                best_of.append(f"more than {args.most}" if chosen is None else int(found.score))
            rows.append([name, *best_of])
        title = f"{label}: oracle calls to a gradient norm of {TARGET:g}"
        show(title, ("", *(f"kappa {k:g}" for k in args.kappa)), rows)
    for entry in numbers:
        print(f"{entry['problem']}, {entry['method']}, kappa {entry['kappa']:g}: {entry['setting']}")
    return save(args, args.out / "conditioning", {"grid": GRID, "results": numbers})


if __name__ == "__main__":
    main()

r"""Tolls on half of the streets of a grid, where your own solver finds the drivers' equilibrium.

.. math::
    \min_{0 \le x \le 10} E(s(v) + x) - x^\top v, \qquad v = \mathrm{flow}(s(v) + x)
    = \arg\min_v \sum_l \Big(v_l s_l(v_l) - \int_0^{v_l} s_l\Big) - E(s(v) + x)

E is the drivers' expected cost, s(v) the travel times of streets with v drivers (fourth power), flow = E' the number of
drivers on each street at these costs: at each crossing they choose by a logit of the cost ahead.

    python -m recipes.tolls        # 98 and 398 streets, three networks each: 6 minutes

With tolls on all streets, the best toll is a driver's marginal cost v s'(v), in closed form: its gain is 100 per cent.
On half of them this rule does harm or little good: drivers move to the free streets. All searches start at the rule
times its best factor, with equal processor seconds. Each street has its own unit of flow, which makes the curvatures
similar: 25 products instead of 70 to 150. Where it does not win: the adjoint by hand finds the same tolls; so do finite
differences with 49 tolls, slowly. The library's own lower steps lose on a stiff problem (last row: flows in one unit).
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from functools import partial
from typing import Any

import torch
from scipy.optimize import Bounds, minimize, minimize_scalar
from torch import Tensor

import bilevel_optim as bo

from .common import Parser, interval, progress, save, show
from .problems.traffic import MOST, Search, Traffic

SIZES = {"tiny": (3, 4, 8), "small": (5, 6, 30), "large": (10, 11, 60)}  # rows, columns, pairs of places


def descend(value: Any, start: Any, jac: Any = None, method: str = "L-BFGS-B") -> None:
    """Run one of SciPy's searches, by default L-BFGS, with forward differences if ``jac`` is None."""
    options = {"maxiter": 10**6} if method == "Powell" else {"maxiter": 10**6, "maxfun": 10**6, "eps": 1e-6}
    minimize(value, start, jac=jac, method=method, bounds=Bounds(0, MOST), options=options)


def by_aid(search: Search, start: Any, units: float = 1.0, **options: Any) -> None:
    """Search with the hypergradient of `AID`, at Newton's solution y or, with options, after the library's steps."""
    traffic, unit = search.traffic, search.traffic.slopes(search.v) ** (-units / 2)
    x, y = torch.tensor(start, requires_grad=True), (search.v / unit).requires_grad_()

    def solve() -> None:
        y.copy_(traffic.newton(search.tolls(x), y * unit) / unit)

    options = options or {"lower_steps": 0, "lower_lr": 1.0, "lower_solver": solve}
    optimizer = bo.AID([x], [y], lr=1.0, linear_steps=100, linear_tol=1e-6, **options)

    def at(loss: Any) -> Any:
        return lambda: loss(search.tolls(x), y * unit)

    def value(point: Any) -> tuple[float, Any]:
        x.data.copy_(torch.from_numpy(point))
        loss = optimizer.backward(at(traffic.social), at(traffic.lower))
        return search.keep(x, float(loss)), x.grad.numpy()  # type: ignore[union-attr]

    descend(value, start, jac=True)


def by_hand(search: Search, start: Any) -> None:
    """Search with the gradient of the adjoint method, written by hand for this problem."""

    def value(x: Any) -> tuple[float, Any]:
        found = search(x)
        return found, search.traffic.adjoint(search.tolls(x), search.v)[search.traffic.tollable].numpy()

    descend(value, start, jac=True)


def by_evolution(search: Search, start: Any, spread: float = 0.05) -> None:
    """Search with CMA-ES (needs `cma`); the spread is the best of 0.02, 0.05, 0.1, 0.3, 1 with seed 100."""
    importlib.import_module("cma").fmin2(
        search, start, spread, {"bounds": [0, MOST], "verbose": -9, "seed": 1, "maxfevals": 10**9}
    )


METHODS: dict[str, Any] = {
    "Powell": partial(descend, method="Powell"),
    "CMA-ES": by_evolution,
    "finite differences, L-BFGS": descend,
    "AID, Newton, L-BFGS": by_aid,
    "adjoint by hand, L-BFGS": by_hand,
    "AID, 50 lower steps, L-BFGS": partial(by_aid, lower_steps=50),
    "the same, flows in one unit": partial(by_aid, lower_steps=50, units=0.0),
}


def compare(size: str, seed: int, args: Any, bar: Any) -> dict[str, dict[str, Any]]:
    """Run all methods on one network; gains are relative to the gain of tolls on all streets."""
    traffic, found = Traffic(*SIZES[size], seed), dict[str, dict[str, Any]]()
    v = traffic.newton(traffic.free * 0, traffic.capacity, 1.0)
    best = v * traffic.slopes(v)
    least, none = float(traffic.social(best, v)), Search(traffic)(best[traffic.tollable] * 0)

    def judge(name: str, x: Tensor) -> None:
        seconds, solves = time.process_time() - since, traffic.solves - search.solves
        gain = 100 * (none - Search(traffic)(x)) / (none - least)
        found[name] = {"gain": gain, "equilibria": solves, "seconds": seconds, "tolls": x.tolist()}

    search, since = Search(traffic), time.process_time()
    judge("no toll", search.x)
    judge("best tolls of all, half of them", best[traffic.tollable].clamp_max(MOST))
    judge("marginal cost", search.rule(1.0))
    factor = minimize_scalar(lambda k: search(search.rule(k)), bounds=(0, 2), method="bounded").x
    start = search.rule(factor)
    judge("marginal cost, best factor", start)
    for name in args.methods:
        bar.set_description(f"{size} {seed} {name}")
        search, since = Search(traffic, args.seconds), time.process_time()
        search(start)
        with contextlib.suppress(StopIteration):
            METHODS[name](search, start.numpy().copy())
        judge(name, search.x)
        bar.update()
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    absent = [] if importlib.util.find_spec("cma") and importlib.import_module("cma") else ["CMA-ES"]
    parser = Parser(__doc__, seed=True, threads=1)
    parser.methods(METHODS, [name for name in METHODS if name not in absent], "--methods")
    parser.option("sizes", ["small", "large"], f"networks, of {', '.join(SIZES)}", choices=[*SIZES])
    parser.option("seconds", 8.0, "processor seconds for each search")
    parser.option("seeds", 3, "networks per size")
    args = parser.parse(arguments)
    seeds, results = range(args.seed, args.seed + args.seeds), {}
    by_aid(Search(Traffic(3, 3, 2, 0)), torch.zeros(12, dtype=torch.float64).numpy())  # warm-up
    with progress(total=len(args.sizes) * len(seeds) * len(args.methods), unit="run") as bar:
        for size in args.sizes:
            runs = [compare(size, seed, args, bar) for seed in seeds]
            found = results[size] = {n: {k: [run[n][k] for run in runs] for k in r} for n, r in runs[0].items()}
            traffic = Traffic(*SIZES[size], args.seed)
            lines = [[n, str(interval(r["gain"])), max(r["equilibria"]), max(r["seconds"])] for n, r in found.items()]
            title = f"Tolls on {traffic.streets // 2} of {traffic.streets} streets, {len(seeds)} networks"
            show(title, ("", "per cent of the gain of tolls on all", "equilibria", "seconds"), lines)
    traffic.picture(args.out / "tolls", title, found, next((n for n in found if n.startswith("AID")), args.methods[0]))
    return save(args, args.out / "tolls", {"results": results})


if __name__ == "__main__":
    main()

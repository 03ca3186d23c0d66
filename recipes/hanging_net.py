r"""Inverse design of a hanging net: choose the rest lengths of 364 threads so that it takes the shape of two bowls.

.. math::
    \min_{|x_l| \le 0.7} \mathrm{mean}_i (z_i - h(p_i))^2, \qquad
    (p, z) = y^*(x) = \arg\min_y \sum_l \tfrac{k}{2} \max(|y_a - y_b| - e^{x_l}, 0)^2 + \sum_i z_i

15 x 15 nodes of weight 1, fixed at the border; threads pull but do not push (the maximum is smoothed), so the energy is
strictly convex. Turned over, as Gaudi did, the net is a vault with two domes.

    python -m recipes.hanging_net                         # one target, 4 seconds for each method
    python -m recipes.hanging_net --seeds 3 --seconds 6   # three targets: 3 minutes

Newton's method finds y and a Cholesky factor of the Hessian. `AID` works in variables u with y = y0 + R u, in which the
Hessian at the solution is the identity, so that its linear system takes one or two products. All searches start at the
lengths measured on the target times the best factor, and have equal processor seconds. RATES are the best with seed
100, out of 0.03 to 0.8 (Adam) and 0.03 to 0.2 (CMA-ES).

Where it does not win: the adjoint by hand is as good, and so are the library's own lower steps, because this problem is
not stiff (condition number 500; `recipes.tolls` is stiff).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from functools import partial
from typing import Any

import torch
from scipy.optimize import Bounds, minimize
from torch import Tensor

import bilevel_optim as bo

from .common import Parser, interval, progress, save, show, whole
from .problems.net import MOST, Net, Search

STEPS: dict[str, Any] = {"lower_steps": 20, "lower_optimizer": partial(torch.optim.SGD, momentum=0.95)}


def descend(value: Any, start: Tensor, jac: Any = True) -> None:
    """Run SciPy's L-BFGS, with forward differences if ``jac`` is None."""
    minimize(value, start.numpy().copy(), jac=jac, method="L-BFGS-B", bounds=Bounds(-MOST, MOST),
             options={"maxiter": 10**6, "maxfun": 10**6, "ftol": 0, "gtol": 0, "eps": 1e-6})  # fmt: skip


def by_newton(search: Search, rate: float) -> None:
    """Search with L-BFGS on the hypergradient of AID, at the equilibrium found by Newton's method."""
    net, x = search.net, search.x.clone().requires_grad_()
    u, at, root = torch.zeros_like(search.y, requires_grad=True), search.y.clone(), torch.eye(len(search.y)).double()

    def solve() -> None:
        y, factor = net.newton(x, at + root @ u)
        at.copy_(y)
        root.copy_(torch.linalg.solve_triangular(factor.T, torch.eye(len(y), dtype=y.dtype), upper=True))
        u.zero_()

    options: dict[str, Any] = {"lower_steps": 0, "lower_lr": 1.0, "lower_solver": solve}
    optimizer = bo.AID([x], [u], lr=1.0, linear_steps=5, linear_tol=1e-6, **options)

    def value(point: Any) -> tuple[float, Any]:
        x.data.copy_(torch.from_numpy(point))
        loss = optimizer.backward(lambda: net.upper(at + root @ u), lambda: net.lower(x, at + root @ u))
        return search.keep(x, float(loss)), x.grad.numpy()  # type: ignore[union-attr]

    descend(value, search.x)


def by_steps(search: Search, rate: float, method: Any, **options: Any) -> None:
    """Search with Adam on x and the library's lower steps with momentum; errors are those of the method's own y."""
    net, x, y = search.net, search.x.clone().requires_grad_(), search.y.clone().requires_grad_()
    optimizer = method([x], [y], lr=rate, upper_optimizer=torch.optim.Adam, **STEPS, **options)
    while True:
        before = x.detach().clone()
        search.keep(before, float(optimizer.step(lambda: net.upper(y), lambda: net.lower(x, y))))
        x.data.clamp_(-MOST, MOST)


def by_hand(search: Search, rate: float) -> None:
    """Search with L-BFGS on the gradient of the adjoint method, written by hand for this problem."""

    def value(x: Any) -> tuple[float, Any]:
        found = search(x.copy())
        return found, search.net.adjoint(torch.from_numpy(x), search.y, search.factor).numpy()

    descend(value, search.x)


def by_evolution(search: Search, rate: float) -> None:
    """Search with CMA-ES; needs the package `cma`."""
    options = {"bounds": [-MOST, MOST], "verbose": -9, "seed": 1, "maxfevals": 10**9}
    importlib.import_module("cma").fmin2(search, search.x.numpy().copy(), rate, options)


METHODS: dict[str, Any] = {
    "AID, Newton, L-BFGS": by_newton,
    "adjoint by hand, L-BFGS": by_hand,
    "ITD, 20 lower steps, Adam": partial(by_steps, method=bo.ITD),
    "AID, 20 lower steps, Adam": partial(by_steps, method=bo.AID, linear_steps=20),
    "finite differences, L-BFGS": lambda search, rate: descend(search, search.x, jac=None),
    "CMA-ES": by_evolution,
}
RATES = {"ITD, 20 lower steps, Adam": 0.2, "AID, 20 lower steps, Adam": 0.05, "CMA-ES": 0.1}  # of Adam; first spread


def shape(net: Net, name: str, seconds: float, rate: float) -> dict[str, Any]:
    """Find rest lengths with one method; return its error, in the equilibrium solved again from the flat net."""
    search, before = Search(net, seconds), net.solves
    with contextlib.suppress(StopIteration, bo.NonFiniteError):
        METHODS[name](search, rate)
    used, solves = time.process_time() - search.start, net.solves - before
    found = {"seconds": used, "equilibria": solves, "x": search.x.tolist(), "curve": search.curve}
    return {"error": net.error(search.x), **found}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    cma = importlib.util.find_spec("cma") and importlib.import_module("cma")
    parser = Parser(__doc__, seed=True, threads=1)
    parser.methods(METHODS, [name for name in METHODS if name != "CMA-ES" or cma], "--methods")
    parser.option("side", 15, "nodes per side", type=whole(3))
    parser.option("seconds", 4.0, "processor seconds for each method")
    parser.option("rate", 0.0, "learning rate of Adam, or first spread of CMA-ES", shown="tuned")
    parser.option("seeds", 1, "number of targets")
    args = parser.parse(arguments)
    nets, results = [Net(args.side, seed) for seed in range(args.seed, args.seed + args.seeds)], {}
    shape(Net(4, 0), args.methods[0], 0.5, 0.01)  # warm-up
    with progress(total=len(args.methods) * len(nets), unit="run") as bar:
        for name in args.methods:
            bar.set_description(name)
            rate, runs = args.rate or RATES.get(name, 0.0), []
            for net in nets:
                runs.append(shape(net, name, args.seconds, rate))
                bar.update()
            results[name] = {key: [run[key] for run in runs] for key in runs[0]}
    start = {"all threads 1.1 long": [net.error(net.start * 0 + math.log(1.1)) for net in nets]}
    start["measured on the target"] = [net.error(net.start) for net in nets]
    lines: list[list[object]] = [[name, str(interval(errors)), None, None] for name, errors in start.items()]
    lines += [[n, str(interval(r["error"])), max(r["equilibria"]), max(r["seconds"])] for n, r in results.items()]
    title = f"A net of {args.side} x {args.side} nodes shaped by {nets[0].threads} rest lengths, targets: {len(nets)}"
    show(title, ("", "rms error in mesh widths", "equilibria", "seconds"), lines)
    shown = {name: r["curve"][0] for name, r in results.items()}
    nets[0].picture(args.out / "hanging_net", title, results[args.methods[0]]["x"][0], args.methods[0], shown)
    return save(args, args.out / "hanging_net", {"start": start, "results": results})


if __name__ == "__main__":
    main()

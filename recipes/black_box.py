r"""Tolls on a few roads, where drivers' routes come from a solver that cannot be differentiated.

.. math::
    \min_x\ \sum_l v_l\, t_l(v_l) + \tfrac{1}{2} \sum_l c_l x_l^2, \qquad
    v = \text{the flows on the roads with which no driver has a faster route, tolls } x \text{ counted as time}

The lower problem is Beckmann's: a convex potential over the route flows y, which are nonnegative and sum to the demand
of each pair of places. `scipy.optimize.minimize` (SLSQP) solves it outside autograd. A method that needs only the
results of a solver S takes it as the lower level, through

    lower_loss = (y - S(x)).square().sum() / 2        # one lower step of length 1 is one solve

    python -m recipes.black_box
    python -m recipes.black_box --tolls 10 --budget 600

Methods are compared at an equal number of lower solves. `PZOBO` suits this case: few upper parameters, one orthogonal
direction for each of them, exact derivatives of f, and finite differences of the solver only. With thousands of upper
parameters and one direction, the noise of its estimate is far larger than the estimate, and `FirstOrder` does as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor

import bilevel_optim as bo

from .common import Parser, interval, save, show
from .common.seeds import stream

PAIRS, ROUTES = 4, 3  # pairs of places, and routes of each
CONGESTION = 1.0  # relative increase of a road's travel time at its capacity
Points = list[dict[str, float]]


class Tolls:
    """Random network: the roads of each route, travel times of empty roads, capacities, demands.

    Args:
        tolls: number of roads that may have a toll, half of all roads.
        seed: seed of the network.

    Attributes:
        solves: number of lower solves so far.
    """

    def __init__(self, tolls: int, seed: int) -> None:
        generator = stream(seed, "data")
        self.tolls, roads = tolls, 2 * tolls
        uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
        used = uniform(PAIRS * ROUTES, roads) < 0.35
        used[torch.arange(len(used)), torch.randint(roads, (len(used),), generator=generator)] = True
        self.uses = used.double()  # (routes, roads)
        self.free, self.capacity = 1 + uniform(roads), 2 + 2 * uniform(roads)
        self.demand, self.cost = 1 + uniform(PAIRS), 0.05 * (0.5 + uniform(tolls))
        self.solves, self.last = 0, (torch.empty(0), torch.empty(0))
        self.x = torch.zeros(tolls, dtype=torch.float64, requires_grad=True)
        self.y = torch.zeros(PAIRS * ROUTES, dtype=torch.float64, requires_grad=True)

    def times(self, v: Tensor) -> Tensor:
        """Return the travel times at these road flows (formula of the Bureau of Public Roads)."""
        return self.free * (1 + CONGESTION * (v / self.capacity) ** 4)

    @torch.no_grad()
    def solver(self, x: Tensor) -> Tensor:
        """Return the route flows in equilibrium, by SLSQP."""
        x = x.detach().clone()
        if torch.equal(self.last[0], x):
            return self.last[1]
        self.solves += 1
        toll = torch.cat([x, x.new_zeros(self.tolls)])
        uses, free, capacity = self.uses.numpy(), self.free.numpy(), self.capacity.numpy()

        def potential(y: Any) -> tuple[float, Any]:
            v = y @ uses
            value = free * (v + CONGESTION / 5 * v * (v / capacity) ** 4) + toll.numpy() * v
            return float(value.sum()), uses @ (free * (1 + CONGESTION * (v / capacity) ** 4) + toll.numpy())

        pairs = torch.eye(PAIRS, dtype=torch.float64)
        equal = pairs.repeat_interleave(ROUTES, dim=1).numpy()
        sums = {"type": "eq", "fun": lambda y: equal @ y - self.demand.numpy(), "jac": lambda _: equal}
        start = (self.demand / ROUTES).repeat_interleave(ROUTES).numpy()
        found = minimize(
            potential, start, jac=True, method="SLSQP", bounds=[(0, None)] * len(start), constraints=[sums],
            options={"ftol": 1e-12, "maxiter": 300},
        )  # fmt: skip
        self.last = x, torch.from_numpy(found.x)
        return self.last[1]

    def upper(self) -> Tensor:
        """Upper loss: total travel time plus the cost of collecting tolls."""
        v = self.y @ self.uses
        return (v * self.times(v)).sum() + (self.cost * self.x.square()).sum() / 2

    def lower(self) -> Tensor:
        """Lower loss, minimal at the solver's result."""
        return (self.y - self.solver(self.x)).square().sum() / 2

    @torch.no_grad()
    def value(self, x: Tensor) -> float:
        """Return the upper loss at the drivers' response to x."""
        v = self.solver(x) @ self.uses
        return float((v * self.times(v)).sum() + (self.cost * x.square()).sum() / 2)


def by_steps(
    make: Callable[..., bo.BilevelOptimizer], problem: Tolls, budget: int, seed: int, **options: Any
) -> Points:
    """Run steps of an optimizer, with one solve per path, until the solves are spent."""
    optimizer = make([problem.x], [problem.y], lower_lr=1.0, lower_steps=1, generator=stream(seed, "method"), **options)
    return _followed(problem, budget, lambda: optimizer.step(problem.upper, problem.lower))


def by_differences(problem: Tolls, budget: int, seed: int, *, lr: float, smoothing: float) -> Points:
    """Run gradient steps with forward differences of the upper loss in each coordinate."""

    def step() -> None:
        x = problem.x.detach()
        value = problem.value(x)
        moved = [problem.value(x + smoothing * e) for e in torch.eye(len(x), dtype=x.dtype)]
        with torch.no_grad():
            problem.x -= lr * (torch.tensor(moved, dtype=x.dtype) - value) / smoothing

    return _followed(problem, budget, step)


def by_search(method: str, problem: Tolls, budget: int, seed: int, *, size: float) -> Points:
    """Run one of SciPy's derivative-free searches; return the best point so far after each solve."""
    points: Points = []

    def value(x: Any) -> float:
        if problem.solves >= budget:
            raise StopIteration
        found = problem.value(torch.from_numpy(x))
        best = min(found, points[-1]["value"]) if points else found
        points.append({"solves": problem.solves, "value": best})
        return found

    p = problem.tolls
    simplex = torch.cat([torch.zeros(1, p, dtype=torch.float64), size * torch.eye(p, dtype=torch.float64)]).numpy()
    options: dict[str, Any] = {"rhobeg": size} if method == "COBYLA" else {"initial_simplex": simplex}
    with contextlib.suppress(StopIteration):
        minimize(value, simplex[0], method=method, options={"maxiter": 10**6, **options})
    return points


def by_evolution(problem: Tolls, budget: int, seed: int, *, size: float) -> Points:
    """Run CMA-ES (Hansen, 2016): a normal distribution of points moves to the better half of each generation."""
    p, generator = problem.tolls, stream(seed, "method")
    count = 4 + int(3 * torch.tensor(float(p)).log())
    weights = torch.tensor(count / 2 + 0.5, dtype=torch.float64).log() - torch.arange(1, count // 2 + 1).double().log()
    weights /= weights.sum()
    mass = float(1 / weights.square().sum())
    c_s, c_c, c_1 = (mass + 2) / (p + mass + 5), (4 + mass / p) / (p + 4 + 2 * mass / p), 2 / ((p + 1.3) ** 2 + mass)
    c_m = min(1 - c_1, 2 * (mass - 2 + 1 / mass) / ((p + 2) ** 2 + mass))
    damping, norm = (
        1 + c_s + 2 * max(0.0, ((mass - 1) / (p + 1)) ** 0.5 - 1),
        p**0.5 * (1 - 1 / (4 * p) + 1 / (21 * p**2)),
    )
    mean, covariance = torch.zeros(p, dtype=torch.float64), torch.eye(p, dtype=torch.float64)
    path_s, path_c = torch.zeros_like(mean), torch.zeros_like(mean)
    points = [{"solves": 0.0, "value": problem.value(mean)}]
    while problem.solves < budget:
        values, basis = torch.linalg.eigh(covariance)
        root = basis * values.clamp_min(1e-30).sqrt()
        z = torch.randn(count, p, generator=generator, dtype=torch.float64)
        steps = z @ root.T
        found = torch.tensor([problem.value(mean + size * s) for s in steps])
        if problem.solves > budget:
            break
        points.append({"solves": problem.solves, "value": min(float(found.min()), points[-1]["value"])})
        best = found.argsort()[: len(weights)]
        step = weights @ steps[best]
        mean = mean + size * step
        path_s = (1 - c_s) * path_s + (c_s * (2 - c_s) * mass) ** 0.5 * (basis @ (weights @ z[best]))
        path_c = (1 - c_c) * path_c + (c_c * (2 - c_c) * mass) ** 0.5 * step
        spread = (weights.unsqueeze(1) * steps[best]).T @ steps[best]
        covariance = (1 - c_1 - c_m) * covariance + c_1 * path_c.outer(path_c) + c_m * spread
        size *= float(((path_s.norm() / norm - 1) * c_s / damping).exp())
    return points


def _followed(problem: Tolls, budget: int, step: Callable[[], Any]) -> Points:
    points: Points = []
    while True:
        solves = problem.solves
        value = problem.value(problem.x)  # not counted, because the next step starts with this solve
        points.append({"solves": solves, "value": value})
        problem.solves = solves
        try:
            step()
        except bo.NonFiniteError:
            return points
        if not solves < problem.solves <= budget or not problem.x.isfinite().all():
            return points  # budget spent, diverged, or stationary


Method = Callable[..., Points]
ORTHOGONAL: dict[str, Any] = {"direction": "orthogonal", "vectorize": False}


def with_directions(kind: Any, problem: Tolls, budget: int, seed: int, **options: Any) -> Points:
    """Run a method with as many orthogonal directions as upper parameters."""
    return by_steps(partial(kind, directions=problem.tolls, **ORTHOGONAL), problem, budget, seed, **options)


METHODS: dict[str, Method] = {
    "PZOBO": partial(with_directions, bo.PZOBO),
    "PZOBO, one direction": partial(by_steps, partial(bo.PZOBO, directions=1, vectorize=False)),
    "HOZOG": partial(with_directions, bo.HOZOG),
    "finite differences": by_differences,
    "CMA-ES": by_evolution,
    "Nelder-Mead": partial(by_search, "Nelder-Mead"),
    "COBYLA": partial(by_search, "COBYLA"),
    "direct only": partial(by_steps, bo.FirstOrder),
}
SETTINGS: dict[str, dict[str, float]] = {
    "PZOBO": {"lr": 0.3, "smoothing": 1e-2},
    "PZOBO, one direction": {"lr": 0.1, "smoothing": 1e-2},
    "HOZOG": {"lr": 0.3, "smoothing": 1e-2},
    "finite differences": {"lr": 0.3, "smoothing": 1e-2},
    "CMA-ES": {"size": 0.5},
    "Nelder-Mead": {"size": 0.5},
    "COBYLA": {"size": 0.5},
    "direct only": {"lr": 0.3},
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True)
    parser.methods(METHODS, [*METHODS], "--methods")
    parser.option("tolls", 6, "upper parameters")
    parser.option("budget", 150, "lower solves of a run")
    parser.option("seeds", 5, "networks")
    args = parser.parse(arguments)
    results: dict[str, Any] = {}
    for name in args.methods:
        runs = [
            METHODS[name](Tolls(args.tolls, seed), args.budget, seed, **SETTINGS[name])
            for seed in range(args.seed, args.seed + args.seeds)
        ]
        gains = [100 * (1 - points[-1]["value"] / points[0]["value"]) for points in runs]
        results[name] = {"gain": gains, "solves": [points[-1]["solves"] for points in runs], "curve": runs[0]}
    rows = [[name, str(interval(r["gain"])), max(r["solves"])] for name, r in results.items()]
    show(
        f"{args.tolls} tolls, {args.budget} lower solves, {args.seeds} networks",
        ("", "gain in percent", "solves"),
        rows,
    )
    return save(args, args.out / "black_box", {"results": results})


if __name__ == "__main__":
    main()

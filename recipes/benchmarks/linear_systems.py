r"""Solvers of the implicit system H v = b on a network away from a minimum: residual against products.

    python -m recipes.benchmarks.linear_systems

H is the Hessian of the training loss of an MLP 784-256-10 on random examples, at its initialisation and after some
gradient steps; b is the gradient of the validation loss. H has negative eigenvalues there: conjugate gradients stop at
the first direction of non-positive curvature, a Neumann series grows in such directions, and MINRES solves the
indefinite system. Residuals ``|b - H v| / |b|`` are evaluated, not taken from the recursions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import bilevel_optim as bo

from ..common import Parser, environment, show
from ..common.seeds import stream
from ..problems.networks import MLPCleaning

Product = Callable[[bo.Vector], bo.Vector]


def largest(product: Product, start: bo.Vector, steps: int = 30) -> float:
    """Return the largest absolute eigenvalue, by power iteration."""
    v = start
    for _ in range(steps):
        v = product(v * (1 / v.norm()))
    return float(v.norm())


def lowest(product: Product, start: bo.Vector, bound: float, steps: int = 100) -> float:
    """Return the smallest eigenvalue, by power iteration with H - bound I."""
    v = start
    for _ in range(steps):
        v = v * (1 / v.norm())
        v = product(v) - v * bound
    v = v * (1 / v.norm())
    return float(v.dot(product(v)))


def residuals(problem: MLPCleaning, products: list[int]) -> tuple[float, float, dict[str, list[object]]]:
    """Return extreme eigenvalues of H, and for each solver the relative residuals at the numbers of products."""
    oracle = bo.Oracle([problem.x], problem.net.parameters(), problem.upper, problem.lower)
    *_, b = oracle.upper(oracle.f.draw())
    with oracle.lower_system(oracle.g.draw()) as system:
        generator = stream(1, "data", problem.x.device)
        start = bo.Vector(torch.randn(t.shape, generator=generator, device=t.device) for t in b)
        size = largest(system.hvp, start)
        solvers: dict[str, Callable[..., bo.linear.LinearSolution]] = {
            "cg": bo.linear.cg,
            "minres": bo.linear.minres,
            "neumann": partial(bo.linear.neumann, lr=1 / size),
        }
        rows: dict[str, list[object]] = {}
        for name, solve in solvers.items():
            found = [solve(system.hvp, b, steps=k) for k in products]
            rows[name] = [float((b - system.hvp(s.solution)).norm() / b.norm()) for s in found]
            rows[name].append(f"stopped after {int(found[-1].iterations)}" if bool(found[-1].indefinite) else "")
        return lowest(system.hvp, start, size), size, rows


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = Parser(__doc__, device=True, out=False)
    parser.option("n", 500, "examples")
    parser.option("ridges", [1e-4, 1e-2], "ridge weights")
    parser.option("products", [1, 3, 10, 30, 100, 300], "Hessian-vector products")
    parser.option("after", 100, "gradient steps of size 0.1 before the second table")
    args = parser.parse(arguments)
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    for ridge in args.ridges:
        problem, made = MLPCleaning(args.n, ridge, args.device), 0
        descent = torch.optim.SGD(problem.net.parameters(), lr=0.1)
        for steps in (0, args.after):
            for _ in range(steps - made):
                descent.zero_grad()
                problem.lower().backward()  # type: ignore[no-untyped-call]
                descent.step()
            made = steps
            low, high, rows = residuals(problem, args.products)
            title = f"|b - H v| / |b| with ridge {ridge:g} after {steps} gradient steps; "
            title += f"eigenvalues of H from {low:.3g}, in size up to {high:.3g}"
            show(title, ["products", *map(str, args.products), ""], [[name, *row] for name, row in rows.items()])


if __name__ == "__main__":
    main()

r"""Compare ways to go on with a linear system from call to call, at equal numbers of products.

    python -m recipes.benchmarks.warm_starts

Two tables. First, a quadratic lower problem in 100 unknowns, whose H turns and whose b drifts from call to call: mean
relative errors of v over the second half of 40 calls. A warm start restarts conjugate gradients. The ways:

* ``restart``: conjugate gradients from the last v, as in the library.
* ``kept``: the same, with ``keep_direction=True``.
* ``rarely``: the products of ten calls at every tenth one, and the same v in between.
* ``direction``: the last search direction is kept (one product), and the new ones are conjugate to it.
* ``change``: the last change of v is kept (one product), and the first new direction is conjugate to it.
* ``Ritz``: two vectors are kept that approximate eigenvectors of least eigenvalue (two products).
* ``momentum``: steps of heavy ball, momentum 0.98, in place of conjugate gradients.

Second, systems of a run: x moves along the right hypergradient, y makes ten lower steps at each call, and the error is
that of the hypergradient. ``still``: x and y stay; ``slow`` and ``fast``: x moves by at most 0.01 or 0.3 in norm;
``batches``: as slow, on another half of the examples at each step and call. There:

* ``residual``: conjugate gradients from the last v, or from zero where that has the smaller residual.
* ``MINRES``: minimal residuals from the last v, as in the library.
* ``MINRES, kept``: the same with the last direction (one product).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, save, show
from ..common.seeds import stream
from ..problems.hard import spectrum
from ..problems.systems import SYSTEMS, System, logistic, ridge

SIZE, CALLS, MOMENTUM = 100, 40, 0.98
Memory = list[Tensor]
Way = Callable[[Tensor, Tensor, Tensor, int, Memory, int], tuple[Tensor, Memory]]


def restart(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    found = bo.linear.cg(lambda u: bo.Vector([H @ u[0]]), [b], [v], steps=products)
    return found.solution[0], kept


def kept(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    direction = kept or None
    found = bo.linear.cg(lambda u: bo.Vector([H @ u[0]]), [b], [v], steps=products, direction=direction)
    assert found.direction is not None
    return found.solution[0], [*found.direction]


def by_residual(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    return restart(H, b, 0 * v if b.norm() < (b - H @ v).norm() else v, products, kept, call)


def minres(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    return bo.linear.minres(lambda u: bo.Vector([H @ u[0]]), [b], [v], steps=products).solution[0], kept


def minres_kept(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    """Minimise the residual along the kept direction, then along new ones with orthogonal images."""
    if b.norm() < (b - H @ v).norm():
        v, kept = 0 * v, []
    r, used = b - H @ v, list[tuple[Tensor, Tensor]]()
    for k in range(products):
        p = kept[0] if kept and not k else r
        image = H @ p
        for q, other in used:
            share = (image @ other) / (other @ other)
            p, image = p - share * q, image - share * other
        if not image.any() or r.norm() < torch.finfo(b.dtype).eps * b.norm():
            break
        length = (image @ r) / (image @ image)
        v, r = v + length * p, r - length * image
        used.append((p, image))
    return v, [used[-1][0] / used[-1][0].norm()] if used else []


def rarely(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    return restart(H, b, v, 10 * products, kept, call) if call % 10 == 0 else (v, kept)


def conjugated(
    H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Minimise along kept directions, then along new conjugate ones; return v, and all of them with their images."""
    r, used = b - H @ v, list[tuple[Tensor, Tensor]]()
    for k in range(products):
        p = kept[k] if k < len(kept) else r
        image = H @ p
        for q, other in used:
            share = (image @ q) / (q @ other)
            p, image = p - share * q, image - share * other
        length = (p @ r) / (p @ image)
        v, r = v + length * p, r - length * image
        used.append((p, image))
    return v, used


def direction(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    v, used = conjugated(H, b, v, products, kept)
    return v, [used[-1][0] / used[-1][0].norm()]


def change(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    start, r, p = v, b - H @ v, b - H @ v
    if kept:
        image = H @ kept[0]
        curvature = kept[0] @ image
        length = (kept[0] @ r) / curvature
        v, r = v + length * kept[0], r - length * image
        p = r - (image @ r) / curvature * kept[0]
    for _ in range(products - len(kept)):
        image, square = H @ p, r @ r
        length = square / (p @ image)
        v, r = v + length * p, r - length * image
        p = r + (r @ r) / square * p
    return v, [v - start]


def ritz(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    v, used = conjugated(H, b, v, products, kept)
    basis, rest = torch.linalg.qr(torch.stack([p for p, _ in used], 1))
    projected = basis.T @ torch.linalg.solve_triangular(rest.T, torch.stack([i for _, i in used], 1).T, upper=False).T
    return v, [*(basis @ torch.linalg.eigh((projected + projected.T) / 2)[1][:, :2]).T]


def momentum(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    speed = kept[0] if kept else torch.zeros_like(v)
    for _ in range(products):
        speed = MOMENTUM * speed - (H @ v - b)  # the largest eigenvalue is 1
        v = v + speed
    return v, [speed]


WAYS: dict[str, Way] = {
    "restart": restart, "kept": kept, "rarely": rarely, "direction": direction, "change": change, "Ritz": ritz,
    "momentum": momentum,
}  # fmt: skip
IN_RUNS: dict[str, Way] = {
    "residual": by_residual, "restart": restart, "kept": kept, "MINRES": minres, "MINRES, kept": minres_kept,
}  # fmt: skip
LOWER_STEPS, FLOOR = 10, 1e-3  # errors below the floor are as good as any
PACES = {"still": (0.0, False), "slow": (0.01, False), "fast": (0.3, False), "batches": (0.01, True)}  # length, halves
RUNS: dict[str, Callable[[], System]] = {
    **{name: SYSTEMS[name] for name in ("convex, penalty 1", "40 rows, 200 unknowns, condition 1e4")},
    "40 rows, 200 unknowns, condition 1e6, weights": lambda: ridge(40, 200, 4e-7, x="weights"),
    **{name: SYSTEMS[name] for name in ("softmax, penalty 1e-6", "softmax without a penalty")},
    "breast cancer, penalty 1e-3": lambda: logistic("breast cancer", 1e-3),
    "digits, penalty 1e-4": lambda: logistic("digits", 1e-4),
    **{name: SYSTEMS[name] for name in ("network, start", "network, trained")},
}


def error(way: Way, condition: float, drift: float, products: int, noise: bool) -> float:
    """Return the mean relative error of v over the second half of the calls.

    With noise b is drawn at each call, around a mean; else it moves along a line.
    """
    matrix, kind = spectrum(SIZE, condition), {"dtype": torch.float64}
    generator = stream(0, "drift")
    first, away = (torch.randn(SIZE, generator=generator, **kind) for _ in range(2))  # type: ignore[call-overload]
    turn = torch.randn(SIZE, SIZE, generator=generator, **kind)  # type: ignore[call-overload]
    turn = (turn - turn.T) / math.sqrt(SIZE)
    v, kept, errors = torch.zeros_like(first), Memory(), []
    for call in range(CALLS):
        turned = torch.linalg.matrix_exp(drift * call / CALLS * turn)
        step = torch.randn(SIZE, generator=generator, **kind) if noise else call * away  # type: ignore[call-overload]
        H, b = turned @ matrix @ turned.T, first + drift * step
        v, kept = way(H, b, v, products, kept, call)
        right = torch.linalg.solve(H, b)
        errors.append(float((v - right).norm() / right.norm()))
    half = errors[CALLS // 2 :]
    return sum(half) / len(half)


class Call(NamedTuple):
    """One system of a run, with the cross derivatives that make the hypergradient of its solution."""

    H: Tensor
    b: Tensor
    cross: Tensor
    v: Tensor
    size: Tensor


def run(system: System, length: float, halves: bool) -> list[Call]:
    """Return the systems of a run along the right hypergradient."""
    x, y, found, generator = system.x, system.y, list[Call](), stream(0, "batches")
    rows = len(system.data["t"])

    def lower(x: Tensor, y: Tensor) -> Tensor:
        if not halves:
            return system.g(x, y, system.data)
        part = {**system.data, "A": system.data["A"][batch], "t": system.data["t"][batch]}
        return system.g(x[batch], y, part)

    slope = torch.func.grad(lower, argnums=1)
    second, mixed = torch.func.jacrev(slope, argnums=1), torch.func.jacrev(slope)
    batch, rate = torch.arange(rows), math.inf
    for _ in range(CALLS):
        top = torch.linalg.matrix_norm(second(x, y), 2)
        for _ in range(LOWER_STEPS if length else 0):
            batch = torch.randperm(rows, generator=generator)[: rows // 2]
            y = y - slope(x, y) / (2 * top)
        batch = torch.randperm(rows, generator=generator)[: rows // 2]
        H, cross = second(x, y), mixed(x, y)
        direct, b = torch.func.grad(system.f, argnums=(0, 1))(x, y, system.data)
        values, basis = torch.linalg.eigh(H)
        large = values.abs() > system.rtol * values.abs().max()
        v = basis @ torch.where(large, basis.T @ b / torch.where(large, values, 1.0), 0.0)
        gradient = direct - cross.T @ v
        found.append(Call(H, b, cross, v, gradient.norm()))
        rate = min(rate, length / float(gradient.norm()))
        x = x - rate * gradient
    return found


def error_in_run(way: Way, calls: list[Call], products: int, dtype: torch.dtype) -> float:
    """Return the mean relative error of the hypergradient over the second half of the calls."""
    v, kept, errors = torch.zeros_like(calls[0].b, dtype=dtype), Memory(), []
    for k, call in enumerate(calls):
        v, kept = way(call.H.to(dtype), call.b.to(dtype), v, products, kept, k)
        errors.append(float((call.cross.T @ (v.to(call.v) - call.v)).norm() / call.size))
    return sum(errors[CALLS // 2 :]) / (CALLS - CALLS // 2)


def compared(results: Mapping[str, Mapping[str, float]], where: Callable[[str], bool]) -> list[list[object]]:
    """Return for each way the rows that are better or worse than the first, and the mean and largest ratio."""
    rows = [values for name, values in results.items() if where(name)]
    found: list[list[object]] = []
    for way in rows[0]:
        ratios = [max(r[way], FLOOR) / max(r["residual"], FLOOR) for r in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        right = sum(r[way] < 0.03 for r in rows)
        better, worse = sum(q < 2 / 3 for q in ratios), sum(q > 1.1 for q in ratios)
        found.append([way, f"{right} of {len(rows)}", better, worse, mean, max(ratios)])
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the program; return the numbers that it writes."""
    parser = Parser(__doc__, threads=1)
    parser.option("conditions", [1e2, 1e4], "condition numbers of H")
    parser.option("products", [5, 10], "products of a call")
    parser.option("drifts", [1e-3, 1e-2, 1e-1], "change of b in a call, and a fortieth of the angle by which H turns")
    parser.option("systems", [*RUNS], "systems of runs", choices=[*RUNS], metavar="SYSTEM")
    parser.option("in-runs", [1, 5, 20], "products of a call in runs")
    parser.option("dtype", "float64", "type of the systems in runs", choices=["float32", "float64"])
    args = parser.parse(arguments)
    drifts = [(0.0, False), *((d, noise) for noise in (False, True) for d in args.drifts)]
    cases = [(c, k, *drift) for c in args.conditions for k in args.products for drift in drifts]
    results = {
        f"{c:g}, {k}, {d:g}{' of noise' if noise else ''}": {n: error(way, c, d, k, noise) for n, way in WAYS.items()}
        for c, k, d, noise in cases
    }
    rows = [[*name.split(", "), *values.values()] for name, values in results.items()]
    show("mean relative error of v", ["condition", "products", "drift", *WAYS], rows)
    runs = dict[str, dict[str, float]]()
    for name in args.systems:
        for pace, (length, halves) in PACES.items():
            calls = run(RUNS[name](), length, halves)
            for k in args.in_runs:
                ways = {n: error_in_run(way, calls, k, getattr(torch, args.dtype)) for n, way in IN_RUNS.items()}
                runs[f"{name}; {pace}; {k}"] = ways
    rows = [[*name.split("; "), *values.values()] for name, values in runs.items()]
    show("mean relative error of the hypergradient", ["system", "x and y", "products", *IN_RUNS], rows)
    kinds: dict[str, Callable[[str], bool]] = {
        "one product": lambda name: name.endswith("; 1"),
        "more, positive definite": lambda name: not name.endswith("; 1") and "network" not in name,
        "more, networks": lambda name: not name.endswith("; 1") and "network" in name,
    }
    summary = {kind: compared(runs, where) for kind, where in kinds.items() if any(map(where, runs))}
    rows = [[kind, *row] for kind, found in summary.items() for row in found]
    show("next to `residual`", ["rows", "way", "within 3 %", "better", "worse", "mean ratio", "largest"], rows)
    return save(args, args.out / "warm_starts", {"results": results, "runs": runs, "summary": summary})


if __name__ == "__main__":
    main()

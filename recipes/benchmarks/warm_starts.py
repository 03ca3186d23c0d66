r"""Compare ways to go on with a linear system from call to call, at equal numbers of products.

    python -m recipes.benchmarks.warm_starts

A quadratic lower problem in 100 unknowns. From call to call, as x moves, H turns and b drifts. Errors of v are means
over the second half of 40 calls. A warm start restarts conjugate gradients. The ways:

* ``restart``: conjugate gradients from the last v, as in the library.
* ``rarely``: the products of ten calls at every tenth one, and the same v in between.
* ``direction``: the last search direction is kept (one product), and the new ones are conjugate to it.
* ``change``: the last change of v is kept (one product), and the first new direction is conjugate to it.
* ``Ritz``: two vectors are kept that approximate eigenvectors of least eigenvalue (two products).
* ``momentum``: steps of heavy ball, momentum 0.98, in place of conjugate gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, save, show
from ..common.seeds import stream
from ..problems.hard import spectrum

SIZE, CALLS, MOMENTUM = 100, 40, 0.98
Memory = list[Tensor]
Way = Callable[[Tensor, Tensor, Tensor, int, Memory, int], tuple[Tensor, Memory]]


def restart(H: Tensor, b: Tensor, v: Tensor, products: int, kept: Memory, call: int) -> tuple[Tensor, Memory]:
    found = bo.linear.cg(lambda u: bo.Vector([H @ u[0]]), [b], [v], steps=products)
    return found.solution[0], kept


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
    "restart": restart, "rarely": rarely, "direction": direction, "change": change, "Ritz": ritz, "momentum": momentum,
}  # fmt: skip


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


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the program; return the numbers that it writes."""
    parser = Parser(__doc__, threads=1)
    parser.option("conditions", [1e2, 1e4], "condition numbers of H")
    parser.option("products", [5, 10], "products of a call")
    parser.option("drifts", [1e-3, 1e-2, 1e-1], "change of b in a call, and a fortieth of the angle by which H turns")
    args = parser.parse(arguments)
    drifts = [(0.0, False), *((d, noise) for noise in (False, True) for d in args.drifts)]
    cases = [(c, k, *drift) for c in args.conditions for k in args.products for drift in drifts]
    results = {
        f"{c:g}, {k}, {d:g}{' of noise' if noise else ''}": {n: error(way, c, d, k, noise) for n, way in WAYS.items()}
        for c, k, d, noise in cases
    }
    rows = [[*name.split(", "), *values.values()] for name, values in results.items()]
    show("mean relative error of v", ["condition", "products", "drift", *WAYS], rows)
    return save(args, args.out / "warm_starts", {"results": results})


if __name__ == "__main__":
    main()

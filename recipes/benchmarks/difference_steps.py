r"""Steps of finite differences: `nu` of F2SA, and the step of ``hvp="finite-difference"``, by precision and order.

    python -m recipes.benchmarks.difference_steps --page docs/difference_steps.md --out docs/records

Five losses of `recipes.problems.hard`, at solved lower problems with dense references in double precision. Each step of
a grid of half decades is tried, and the library's default next to them. F2SA makes 200 lower steps from the solution,
so that only the difference is judged. Products are judged along a random direction, in units of their own norm.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo
from bilevel_optim.oracle.session import EvaluationOptions, Session

from ..common import Parser, progress, save, show
from ..problems import hard
from ..problems.hard import Case, Loss

ORDERS, STEPS = (1, 2, 4), 200
PRECISIONS = {
    "float64": (torch.float64, -9.0, -1.0),
    "float32": (torch.float32, -5.0, 0.0),
    "bfloat16 autocast": (torch.float32, -2.5, 0.0),
}
OLD = 1e-2  # nu of all orders and precisions, before it followed them
WHY = (
    "Products of a loss that is quadratic, or is so around y (the hinge), have no truncation error: the longer the",
    "step, the better. Order 4 crosses the margin of the hinge in float32. All errors in float64 are below 1e-6, those",
    "of this list below 1e-9. Under bfloat16 no nu is good for both the ranking and the quadratic, whose f has ten",
    "times the curvature of g in one direction.",
)
ENOUGH = 3.0  # a default is good if its error is at most so many times the best one


def square() -> Case:
    return hard.at_solution(*hard.quadratic(10.0))


LOSSES: dict[str, tuple[Callable[[], Case], str]] = {
    "quadratic": (square, "a quadratic in 20 unknowns, condition 10"),
    "softmax": (partial(hard.softmax, penalty=0.1), "softmax regression, 12 weights; x: log weights of 30 examples"),
    "ranking": (hard.ranking, "pairwise logistic loss of 64 pairs"),
    "tanh network": (hard.network, "two layers, 16 weights"),
    "squared hinge": (hard.squared_hinge, "a Hessian that jumps at the margin"),
}


def precision(name: str) -> AbstractContextManager[Any]:
    """Return the context of a precision."""
    return torch.autocast("cpu", dtype=torch.bfloat16) if "autocast" in name else nullcontext()


def grid(name: str) -> list[float]:
    """Return the steps to try, two for each power of ten."""
    _, least, most = PRECISIONS[name]
    return [10 ** (least + k / 2) for k in range(round(2 * (most - least)) + 1)]


def of_f2sa(case: Case, name: str, order: int, nu: float | None) -> float:
    """Return the relative error of an estimate; without nu, at the default."""
    x, y = (t.to(PRECISIONS[name][0]).clone().requires_grad_() for t in (case.x, case.y))
    options: dict[str, Any] = {} if nu is None else {"nu": nu}
    assert case.right is not None
    with precision(name), warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        try:
            optimizer = bo.F2SA([x], [y], lr=1.0, lower_steps=STEPS, order=order, **options)
            optimizer.backward(lambda: case.f(x, y), lambda: case.g(x, y))
        except ArithmeticError:
            return math.inf
    assert x.grad is not None
    return float((x.grad.double() - case.right).norm() / case.right.norm())


def of_product(case: Case, name: str, step: float | None) -> float:
    """Return the relative error of a product with the Hessian, by central differences; without a step, the library's.

    Steps are in units of 1 + |y|, as in the library.
    """
    kind = PRECISIONS[name][0]
    direction = hard.normal(len(case.y), name="direction")
    direction = direction / direction.norm()
    right = hard.derivatives(case.g, case.x, case.y)[1] @ direction
    x, y = (t.to(kind).clone().requires_grad_() for t in (case.x, case.y))
    v = direction.to(kind)

    def slope(at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        return torch.autograd.grad(case.g(x, at), at)[0]

    with precision(name), warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        if step is None:
            found = _product_of_library(case.f, case.g, x, y, v)
        else:
            length = step * float(1 + case.y.norm())
            found = (slope(y + length * v) - slope(y - length * v)) / (2 * length)
    return float((found.double() - right).norm() / right.norm())


def _product_of_library(f: Loss, g: Loss, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Return a product of `bo.Oracle` with ``hvp="finite-difference"``."""
    session = Session(EvaluationOptions(hvp="finite-difference"))
    oracle = bo.Oracle([x], [y], lambda: f(x, y), lambda: g(x, y), session=session)
    with oracle.lower_system(oracle.g.draw()) as system:
        return system.hvp(bo.Vector([v]))[0]


def measure(case: Case, name: str) -> dict[str, dict[str, float]]:
    """Return for each quantity the best step and its error, and the errors at the old and the present default."""
    tried: dict[str, Callable[[float | None], float]] = {
        f"nu, order {order}": partial(of_f2sa, case, name, order) for order in ORDERS
    }
    tried["step of products"] = partial(of_product, case, name)
    found = {}
    for quantity, error in tried.items():
        errors = {step: error(step) for step in grid(name)}
        best = min(errors, key=errors.__getitem__)
        found[quantity] = {"best": best, "error": errors[best], "default": error(None)}
        if quantity.startswith("nu"):
            found[quantity]["old"] = error(OLD)
    return found


def page(numbers: dict[str, Any]) -> str:
    """Return the page of the site."""
    head = [
        "# Steps of finite differences",
        "",
        "`F2SA` divides a difference of gradients by `nu`, and `hvp='finite-difference'` one of the gradients of g by",
        "a step along the vector. A long step has a truncation error, a short one a rounding error. By default `nu` is",
        "0.6 u^(1/(p+1)) / p for order p, with u the precision of the losses (2.2e-16 in float64, 1.2e-7 in float32,",
        "7.8e-3 under bfloat16 autocast), at most 0.035 for order 2 and more, and 0.01 with `samples='independent'`,",
        "whose noise grows like 1/nu. The step of products is 0.5 u^(1/3) (1 + |y|) / |v|.",
        "",
        *_exceptions(numbers["results"]),
        "",
        "Relative errors at solved lower problems; the best step is that of a grid of half decades.",
        "`python -m recipes.benchmarks.difference_steps` makes this page.",
        "",
        *(f"* **{loss}**: {text}." for loss, (_, text) in LOSSES.items()),
        "",
    ]  # fmt: skip
    for name in PRECISIONS:
        head += [f"## {name[0].upper()}{name[1:]}", "", "| | loss | best | error there | by default | at 0.01 |"]
        head += ["|---|---|---|---|---|---|"]
        for quantity in [*(f"nu, order {order}" for order in ORDERS), "step of products"]:
            for loss in LOSSES:
                own = numbers["results"][name][loss][quantity]
                old = f"{own['old']:.1e}" if "old" in own else ""
                head.append(
                    f"| {quantity} | {loss} | {own['best']:.0e} | {own['error']:.1e} | {own['default']:.1e} | {old} |"
                )
        head.append("")
    return "\n".join(head).rstrip() + "\n"


def _exceptions(results: dict[str, Any]) -> list[str]:
    """Return lines on the defaults that are not within a factor of the best step, with their factors."""
    ratios = {
        (quantity, loss, name): own["default"] / own["error"]
        for name, losses in results.items()
        for loss, found in losses.items()
        for quantity, own in found.items()
    }
    far = {place: ratio for place, ratio in ratios.items() if not ratio <= ENOUGH}
    return [
        f"{len(ratios) - len(far)} of {len(ratios)} defaults have at most {ENOUGH:g} times the error of the best step."
        " The others:",
        "",
        *(f"* {quantity}, {loss}, {name}: {ratio:.3g} times" for (quantity, loss, name), ratio in far.items()),
        "",
        *WHY,
    ]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, and write the numbers and the page."""
    parser = Parser(__doc__, threads=1)
    parser.option("losses", [*LOSSES], "losses", choices=[*LOSSES], metavar="LOSS")
    parser.option("precisions", [*PRECISIONS], "precisions", choices=[*PRECISIONS], metavar="PRECISION")
    parser.add_argument("--page", type=Path, help="page of the site to write")
    args = parser.parse(arguments)
    record = args.out / "difference_steps.json"  # results of precisions and losses that are not asked for are kept
    kept = json.loads(record.read_text())["results"] if record.exists() else {}
    results: dict[str, dict[str, Any]] = {n: kept.get(n, {}) for n in PRECISIONS if n in (*kept, *args.precisions)}
    for loss in progress(args.losses, "losses"):
        case = LOSSES[loss][0]()
        for name in args.precisions:
            results[name][loss] = measure(case, name)
    rows = [
        [name, quantity, loss, own["best"], own["error"], own["default"], own["default"] / own["error"], own.get("old")]
        for name, losses in results.items()
        for loss, found in losses.items()
        for quantity, own in found.items()
    ]
    rows.sort(key=lambda row: (row[0], row[1]))
    show(
        "relative errors",
        ["precision", "quantity", "loss", "best step", "error", "by default", "ratio", f"at {OLD:g}"],
        rows,
    )
    numbers = save(args, args.out / "difference_steps", {"results": results})
    if args.page is not None:
        args.page.write_text(page(json.loads(json.dumps(numbers))))
    return numbers


if __name__ == "__main__":
    main()

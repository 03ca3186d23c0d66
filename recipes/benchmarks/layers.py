r"""Compare `bo.solve` with cvxpylayers and torchdeq on a problem that both can pose: gradients and seconds.

    python -m recipes.benchmarks.layers --page docs/howto/layer.md --out docs/records   # where both are installed

    ridge        y = argmin |A y - b|^2 + sum_j (p_j y_j)^2     40 rows, 10 unknowns, gradient in b and p
    nonnegative  the same for y >= 0
    fixed point  y = tanh(W y + x), |W| = 1/2                   32 vectors of 50 unknowns, gradient in x

The loss on top is |y - t|^2 / 2. The right gradient comes from dense matrices in double precision, and is compared with
differences first. Seconds are CPU time of one forward and backward pass: the least of several, in turns, on one thread.
On a shared machine the least wall time favours short passes, which fit between two interruptions.
`bo.solve` gets the fixed point as the loss |y - tanh(W y + x)|^2 / 2.
"""

from __future__ import annotations

import importlib.metadata
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, save, show
from ..common.seeds import stream

DOUBLE = torch.float64
PROBLEMS = ("ridge", "nonnegative", "fixed point")
PRECISIONS = {"float32": torch.float32, "float64": DOUBLE}
ITERATIONS = 200
BEGIN, END = "<!-- table of recipes.benchmarks.layers -->\n", "<!-- end of the table -->\n"

Xs = tuple[Tensor, ...]
Solution = Callable[..., Tensor]  # y of the tensors of x


def normal(*shape: int, name: str) -> Tensor:
    return torch.randn(*shape, generator=stream(0, f"layers {name}"), dtype=DOUBLE)


MATRIX = normal(40, 10, name="matrix")
WEIGHT = normal(50, 50, name="weight")
WEIGHT = WEIGHT / (2 * torch.linalg.matrix_norm(WEIGHT, 2))
RIDGE, RIDGE_TARGET = (normal(40, name="targets"), normal(10, name="penalties").exp()), normal(10, name="ridge target")
POINT: dict[str, Xs] = {"ridge": RIDGE, "nonnegative": RIDGE, "fixed point": (normal(32, 50, name="inputs"),)}
TARGET = {
    "ridge": RIDGE_TARGET,
    "nonnegative": RIDGE_TARGET,
    "fixed point": normal(32, 50, name="fixed point target"),
}


def upper(problem: str, y: Tensor) -> Tensor:
    return (y - TARGET[problem].to(y)).square().sum() / 2


def ridge(x: Xs, y: Tensor) -> Tensor:
    return (MATRIX.to(y) @ y - x[0]).square().sum() + (x[1] * y).square().sum()


def update(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(y @ WEIGHT.to(y).T + x)


def dense(problem: str, *x: Tensor) -> Tensor:
    """Return the solution, by operations that torch differentiates."""
    if problem != "fixed point":
        matrix, right, free = MATRIX.T @ MATRIX + torch.diag(x[1].square()), MATRIX.T @ x[0], torch.ones(10).bool()
        while problem == "nonnegative":
            with torch.no_grad():  # active sets: the entries that stay positive
                y = torch.zeros(10, dtype=DOUBLE)
                y[free] = torch.linalg.solve(matrix[free][:, free], right[free])
                after = torch.where(free, y > 0, matrix @ y < right)
            if torch.equal(after, free):
                break
            free = after
        solved = torch.linalg.solve(matrix[free][:, free], right[free])
        return torch.zeros(10, dtype=DOUBLE).masked_scatter(free, solved)
    with torch.no_grad():
        y = torch.zeros_like(x[0])
        for _ in range(ITERATIONS):
            y = update(x[0], y)
    y = update(x[0], y)
    # One Newton step at the solution has its value and its derivative.
    slopes = (1 - y.detach().square())[:, :, None] * WEIGHT
    return y.detach() + torch.linalg.solve(torch.eye(50, dtype=DOUBLE) - slopes, y - y.detach())


def gradient(problem: str, solution: Solution, dtype: torch.dtype = DOUBLE) -> Tensor:
    xs = [t.to(dtype, copy=True).requires_grad_() for t in POINT[problem]]
    found = torch.autograd.grad(upper(problem, solution(*xs)), xs)
    return torch.cat([t.flatten() for t in found]).to(DOUBLE)


def right(problem: str) -> Tensor:
    """Return the right gradient, after a comparison with differences along one direction."""
    found, step = gradient(problem, lambda *xs: dense(problem, *xs)), 1e-5
    along = [normal(*t.shape, name="direction") for t in POINT[problem]]
    ends = [
        upper(problem, dense(problem, *(t + s * step * d for t, d in zip(POINT[problem], along, strict=True))))
        for s in (1, -1)
    ]
    difference = (ends[0] - ends[1]) / (2 * step)
    slope = found @ torch.cat([d.flatten() for d in along])
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=0)
    return found


def iterate(loss: Callable[[Tensor], Tensor], y: Tensor, x: Tensor) -> Tensor:
    limit = 4 * torch.finfo(y.dtype).eps
    for _ in range(ITERATIONS):
        y, before = update(x, y), y
        if float((y - before).norm()) <= limit * float(y.norm()):
            break
    return y


def ours(problem: str, own: bool = False) -> Solution:
    if problem != "fixed point":
        proximal = {"nonnegative": lambda x, z, _: z.clamp(min=0)}.get(problem)
        return lambda *xs: bo.solve(ridge, xs, torch.zeros(10, dtype=xs[0].dtype), proximal=proximal)

    def solution(x: Tensor) -> Tensor:
        data = x.detach()
        minimiser = (lambda loss, y: iterate(loss, y, data)) if own else None
        return bo.solve(
            lambda x, y: (y - update(x, y)).square().sum() / 2, x, torch.zeros_like(data), minimiser=minimiser
        )

    return solution


def cvxpylayers(problem: str, **options: Any) -> Solution:
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    y, targets, penalties = (
        cp.Variable(10, nonneg=problem == "nonnegative"),
        cp.Parameter(40),
        cp.Parameter(10, nonneg=True),
    )
    loss = cp.sum_squares(MATRIX.numpy() @ y - targets) + cp.sum_squares(cp.multiply(penalties, y))
    layer = CvxpyLayer(cp.Problem(cp.Minimize(loss)), parameters=[targets, penalties], variables=[y])
    return lambda *xs: layer(*xs, solver_args=options)[0]


def torchdeq(**options: Any) -> Solution:
    import torchdeq

    deq = torchdeq.get_deq(ift=True, **options)
    return lambda x: deq(lambda y: update(x, y), torch.zeros_like(x))[0][-1]


TIGHT = {"f_max_iter": ITERATIONS, "f_tol": 1e-15, "b_max_iter": ITERATIONS, "b_tol": 1e-15}
# problem: [(library, package, settings, makes the layer)]
ROWS: dict[str, list[tuple[str, str, str, Callable[[], Solution]]]] = {
    problem: [
        ("bo.solve", "bilevel_optim", "defaults", partial(ours, problem)),
        ("cvxpylayers", "cvxpylayers", "defaults", partial(cvxpylayers, problem)),
        ("cvxpylayers", "cvxpylayers", "eps=1e-14", partial(cvxpylayers, problem, eps=1e-14)),
    ]
    for problem in ("ridge", "nonnegative")
} | {
    "fixed point": [
        ("bo.solve", "bilevel_optim", "defaults", lambda: ours("fixed point")),
        ("bo.solve", "bilevel_optim", "minimiser= iterates", lambda: ours("fixed point", own=True)),
        ("torchdeq", "torchdeq", "defaults", torchdeq),
        ("torchdeq", "torchdeq", "tolerances 1e-15", lambda: torchdeq(**TIGHT)),
    ],
}


def version(package: str) -> str | None:
    try:
        return bo.__version__ if package == "bilevel_optim" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compare(problem: str, repeats: int) -> list[dict[str, Any]]:
    """Return errors and seconds of the libraries that are installed."""
    truth, rows, layers = right(problem), list[dict[str, Any]](), list[Solution]()
    for library, package, settings, make in ROWS[problem]:
        if (installed := version(package)) is None:
            continue
        layers.append(make())
        row = {"problem": problem, "library": library, "version": installed, "settings": settings, "said": []}
        for name, dtype in PRECISIONS.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", bo.BilevelWarning)
                error = gradient(problem, layers[-1], dtype) - truth
            row[name] = float(error.norm() / truth.norm())
            row["said"] += [str(w.message) for w in caught if issubclass(w.category, bo.BilevelWarning)]
        rows.append(row)
    seconds: list[list[float]] = [[] for _ in layers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(repeats):
            for layer, taken in zip(layers, seconds, strict=True):
                before = time.process_time()
                gradient(problem, layer)
                taken.append(time.process_time() - before)
    return [{**row, "seconds": min(taken)} for row, taken in zip(rows, seconds, strict=True)]


HEADER = ("problem", "library", "settings", "error, float32", "error, float64", "milliseconds", "times `bo.solve`")


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    first = {row["problem"]: row["seconds"] for row in reversed(rows)}  # of the first row of each problem
    return [
        [row["problem"], f"{row['library']} {row['version']}", row["settings"], f"{row['float32']:.0e}",
         f"{row['float64']:.0e}", f"{1000 * row['seconds']:.1f}", f"{row['seconds'] / first[row['problem']]:.2g}"]
        for row in rows
    ]  # fmt: skip


def page(text: str, numbers: Mapping[str, Any]) -> str:
    """Return the text of the page with its table."""
    before, _, rest = text.partition(BEGIN)
    lines = ["| " + " | ".join(map(str, row)) + " |\n" for row in (HEADER, *cells(numbers["results"]))]
    return before + BEGIN + lines[0] + "|---" * len(HEADER) + "|\n" + "".join(lines[1:]) + END + rest.partition(END)[2]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Compare, and write the numbers."""
    parser = Parser(__doc__, threads=1)
    parser.option("problems", [*PROBLEMS], "problems", choices=[*PROBLEMS], metavar="NAME")
    parser.option("repeats", 20, "passes that are timed")
    parser.add_argument("--page", type=Path, help="page of the site whose table is written")
    args = parser.parse(arguments)
    results = [row for problem in args.problems for row in compare(problem, args.repeats)]
    show("relative error of the gradient, and milliseconds of a pass", HEADER, cells(results))
    numbers = save(args, args.out / "layers", {"results": results})
    if args.page is not None:
        args.page.write_text(page(args.page.read_text(), numbers))
    return numbers


if __name__ == "__main__":
    main()

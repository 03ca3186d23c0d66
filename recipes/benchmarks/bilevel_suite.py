r"""Standard benchmark of stochastic bilevel methods: equal time, the same start, the same grid of step sizes.

    python -m recipes.benchmarks.bilevel_suite                                                  # digits, minutes
    python -m recipes.benchmarks.bilevel_suite --problem quadratics --mu 0.01
    python -m recipes.benchmarks.bilevel_suite --problem ijcnn1 --data-root DIR --compile
    python -m recipes.benchmarks.bilevel_suite --problem ijcnn1 --data-root DIR
    python -m recipes.benchmarks.bilevel_suite --problem mnist --corruption 0.7 --data-root DIR --seconds 60
    python -m recipes.benchmarks.bilevel_suite --problem covtype --download

============== ============================================================================= =========================
problem        lower loss                                                                    upper loss
============== ============================================================================= =========================
``quadratics`` mean of n random quadratics in 100 dimensions, minimal curvature ``mu``       the same, x of dimension 10
``ijcnn1``     logistic on the training part, one penalty exp(x_j) per feature               logistic on the test part
``covtype``    softmax on the training part, one penalty exp(x_c) per class                  softmax, validation part
``mnist``      softmax with weights sigmoid(x_i) on corrupted labels, and 0.2 ||y||^2        softmax, validation part
``digits``     the same on scikit-learn's digits                                             softmax, validation part
============== ============================================================================= =========================

The grid has lower step sizes s and ratios r; the upper step size is s / r. Both decay as in the analysis of each
method. The grid runs with the first seed; its best point, by h at the last iterate, runs with all seeds. The score is
the value function h(x) = f(x, y*(x)), from an accurate lower solve whose time does not count; for the quadratics, it is
h minus its minimum. The test error is that of the current y. With ``--compile`` steps run compiled; the first four,
which make the graph, are not timed. Every finished run is a line of the records; a rerun adds only the missing runs.

Benchmark: Dagreou, Ablin, Vaiter, Moreau (2022), arXiv:2201.13409, and github.com/benchopt/benchmark_bilevel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, gradients, median_curve, plot, rows, save, share, show, spend, summary, tuned
from ..common.methods import STOCHASTIC, decaying
from ..common.records import Records
from ..common.seeds import stream
from ..problems.images import load_images
from ..problems.libsvm import load_libsvm
from ..problems.problem import WHOLE, Index, Part, Problem
from ..problems.softmax import Cleaning, Regularised, standardised
from ..problems.value_function import Value

__all__ = ["Logistic", "Quadratics", "main"]

# Step sizes and ratios: three of each; with --full-grid those of the published runs.
GRIDS: dict[str, dict[str, tuple[list[float], list[float]]]] = {
    "small": {
        "quadratics": ([0.03, 0.1, 0.3], [3.0, 10.0, 30.0]),
        "ijcnn1": ([0.03125, 0.125, 0.5], [0.01, 0.1, 1.0]),
        "covtype": ([0.03125, 0.125, 0.5], [0.01, 0.1, 1.0]),
        "mnist": ([0.01, 0.03, 0.1], [1e-6, 1e-5, 1e-4]),
        "digits": ([0.03, 0.1, 0.3], [1e-5, 1e-4, 1e-3]),
    },
    "full": {
        "quadratics": ([0.001, 0.01, 0.1, 1.0], [0.1, 1.0, 10.0]),
        "ijcnn1": ([2.0**k for k in range(-5, 4)], [10 ** (k / 2) for k in range(-4, 3)]),
        "covtype": ([2.0**k for k in range(-5, 4)], [10 ** (k * 0.6 - 2) for k in range(6)]),
        "mnist": ([10 ** (k / 2) for k in range(-6, 5)], [10 ** (k / 2) for k in range(-10, 1)]),
        "digits": ([10 ** (k / 2) for k in range(-6, 5)], [10 ** (k / 2) for k in range(-10, 1)]),
    },
}
SECONDS = {"digits": 1.0, "quadratics": 10.0, "ijcnn1": 15.0, "mnist": 20.0, "covtype": 60.0}
CONTROLS = ("ba", "paid", "hozog-1", "pzobo-1", "first-order")  # offered, but not among the default methods
CAPTURE = 4  # first steps of a run with --compile; they make and check the graph, and are not timed
MATRICES = 2**24  # methods that store the cross derivative run by default up to this number of entries


class Quadratics(Problem):
    r"""Finite sums of random quadratics whose value function is known.

    :math:`g_i = \tfrac12 (a_i^\top y)^2 + (u_i^\top x)(v_i^\top y) + c_i^\top y`, and f_i is similar, plus
    :math:`\tfrac12 (b_i^\top x)^2 + e_i^\top x`. The mean of :math:`a_i a_i^\top` has eigenvalues between ``mu`` and 1,
    that of :math:`u_i v_i^\top` singular values between ``mu`` and 0.1; they are drawn until h is convex.
    """

    def __init__(self, count: int, dims: tuple[int, int], mu: float, seed: int = 0) -> None:
        generator = stream(seed, "data")
        self.sizes, self.convexity = (count, count), mu
        for _ in range(20):
            self.g, self.f = (_Level(count, dims, mu, generator) for _ in range(2))
            response = -torch.linalg.solve(self.g.A, self.g.C.T)  # dy*/dx
            cross = self.f.C @ response
            self.hessian = response.T @ self.f.A @ response + self.f.B + cross + cross.T
            if torch.linalg.eigvalsh(self.hessian)[0] > 0:
                break
        else:
            raise SystemExit("no convex value function among 20 draws: take a larger --mu")
        self.x = torch.randn(dims[1], generator=generator, dtype=torch.float64)
        self.y = torch.randn(dims[0], generator=generator, dtype=torch.float64)
        origin = torch.zeros_like(self.x)
        self.minimum = 0.0
        self.minimiser = -torch.linalg.solve(self.hessian, self.value(origin, self.y).gradient)
        self.minimum = self.value(self.minimiser, self.y).value

    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the lower loss, without terms in x alone, which have no effect."""
        return self.g(x, y, index)

    def upper(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the upper loss, with terms in x alone."""
        return self.f(x, y, index) + (self.f.b[index] @ x).square().mean() / 2 + (self.f.e[index] @ x).mean()

    def value(self, x: Tensor, start: Tensor) -> Value:
        """Return the value in closed form, minus its minimum."""
        g, f, x = self.g, self.f, x.detach()
        y = -torch.linalg.solve(g.A, g.C.T @ x + g.c.mean(0))
        h = y @ f.A @ y / 2 + x @ f.B @ x / 2 + x @ f.C @ y + f.c.mean(0) @ y + f.e.mean(0) @ x
        v = torch.linalg.solve(g.A, f.A @ y + f.C.T @ x + f.c.mean(0))
        return Value(float(h) - self.minimum, f.B @ x + f.C @ y + f.e.mean(0) - g.C @ v, y)


class _Level:
    """Random vectors of one level, and their mean matrices."""

    def __init__(self, count: int, dims: tuple[int, int], mu: float, generator: torch.Generator) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def root(size: int) -> Tensor:
            basis = torch.linalg.qr(normal(size, size))[0]
            scales: Tensor = torch.logspace(math.log10(mu) / 2, 0, size, dtype=torch.float64)
            product: Tensor = basis * scales @ basis.T
            return product

        lower, upper = dims
        rank = min(dims)
        self.a, self.b = normal(count, lower) @ root(lower), normal(count, upper) @ root(upper)
        left, right = torch.linalg.qr(normal(upper, rank))[0], torch.linalg.qr(normal(lower, rank))[0]
        shared = normal(count, rank)
        values = torch.logspace(math.log10(mu), -1, rank, dtype=torch.float64) if mu < 0.1 else torch.full((rank,), 0.1)
        self.u, self.v = shared * values @ left.T, shared @ right.T
        self.c, self.e = normal(count, lower), normal(count, upper)
        self.A, self.B, self.C = self.a.T @ self.a / count, self.b.T @ self.b / count, self.u.T @ self.v / count

    def __call__(self, x: Tensor, y: Tensor, index: Index) -> Tensor:
        """Return the mean of the terms with y."""
        products = (self.u[index] @ x) * (self.v[index] @ y)
        mean: Tensor = ((self.a[index] @ y).square() / 2 + products + self.c[index] @ y).mean()
        return mean


class Logistic(Problem):
    """Logistic regression with one penalty exp(x_j) / 2 per feature, chosen on the second part."""

    def __init__(self, *parts: Part, seed: int = 0) -> None:
        # The losses depend on an example only through label times features.
        self.train, self.val = ((labels.unsqueeze(1) * features).double() for features, labels in parts)
        self.sizes = (len(self.train), len(self.val))
        generator, features = stream(seed, "start"), self.train.shape[1]
        self.x = torch.rand(features, generator=generator, dtype=torch.float64).log()
        self.y = torch.randn(features, generator=generator, dtype=torch.float64)

    def lower(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the training loss with the penalties."""
        return F.softplus(-self.train[index] @ y).mean() + x.exp() @ y.square() / 2

    def upper(self, x: Tensor, y: Tensor, index: Index = WHOLE) -> Tensor:
        """Return the validation loss."""
        return F.softplus(-self.val[index] @ y).mean()


def softmax(parts: Sequence[Part]) -> Regularised:
    """Return softmax regression with one penalty exp(x_c) / 2 per class, chosen on validation data."""
    return Regularised(standardised(parts), ridge=1 / 2, x=torch.full((int(parts[0].labels.max()) + 1,), -2.0))


def cleaning(parts: Sequence[Part], corruption: float, seed: int = 0) -> Cleaning:
    """Return data hyper-cleaning; each training label is random with probability ``corruption``."""
    train, val, test = standardised(parts)
    generator, labels = stream(seed, "labels"), train.labels
    corrupted = torch.rand(len(labels), generator=generator) < corruption
    random = torch.randint(int(labels.max()) + 1, labels.shape, generator=generator)
    train = train._replace(labels=torch.where(corrupted, random, labels))
    return Cleaning([train, val, test], ridge=0.2, start=-2.0)


def covtype(root: Path | None, download: bool) -> Regularised:
    """Return forest cover types: 371,847 training, 92,962 validation and 116,203 test examples."""
    from sklearn.datasets import fetch_covtype

    try:
        bunch = fetch_covtype(data_home=None if root is None else str(root), download_if_missing=download)
    except OSError as error:
        raise SystemExit(f"no covtype in {root or 'the cache of scikit-learn'}: {error} (--download)") from error
    whole = Part(torch.tensor(bunch.data, dtype=torch.float32), torch.tensor(bunch.target).long() - 1)
    order = torch.randperm(len(whole.labels), generator=stream(0, "data"))
    return softmax([whole.take(part) for part in (order[209_165:], order[116_203:209_165], order[:116_203])])


def make(args: Any) -> tuple[str, Problem]:
    """Return the problem that the arguments describe, and its name in the records."""
    if args.problem == "quadratics":
        dims = tuple(args.dims)
        label = f"quadratics n={args.examples} dims={dims[0]},{dims[1]} mu={args.mu:g}"
        return label, Quadratics(args.examples, dims, args.mu)
    if args.problem == "ijcnn1":
        return "ijcnn1", Logistic(*load_libsvm("ijcnn1", args.data_root, args.download))
    if args.problem == "covtype":
        return "covtype", covtype(args.data_root, args.download)
    sizes = {"mnist": (20_000, 5_000), "digits": (1_000, 300)}[args.problem]
    parts = load_images(args.problem, args.data_root, args.download, sizes, stream(0, "data"))
    return f"{args.problem} corruption={args.corruption:g}", cleaning(parts, args.corruption)


def run(problem: Problem, name: str, step: float, ratio: float, seed: int, args: Any) -> dict[str, Any]:
    """Run one method with one pair of step sizes until its time is up or it diverges."""
    method = STOCHASTIC[name]

    def fresh() -> tuple[Tensor, Tensor, bo.BilevelOptimizer, Callable[[], Any]]:
        x, y = problem.start()
        lower = method.objective(lambda index: problem.lower(x, y, index), problem.sizes[0], args.batch, 2 * seed)
        upper = method.objective(lambda index: problem.upper(x, y, index), problem.sizes[1], args.batch, 2 * seed + 1)
        generator = stream(seed, "method")
        rates = {"lr": step / ratio, "lower_lr": step, "convexity": problem.convexity}
        optimizer = method.optimizer(x, y, **rates, generator=generator)
        scheduler = decaying(optimizer, method)

        def advance() -> None:
            optimizer.step(upper, lower)
            scheduler.step()

        return x, y, optimizer, advance

    with suppress(bo.NonFiniteError):  # exclude one-time costs of a first step
        fresh()[-1]()
    x, y, optimizer, advance = fresh()
    if args.compile:
        optimizer.compile()
        with suppress(bo.NonFiniteError):
            for _ in range(CAPTURE):
                advance()
    solution = problem.y

    def measure() -> dict[str, Any]:
        nonlocal solution
        value = problem.value(x, solution)
        solution = value.solution
        return {
            "calls": gradients(optimizer),
            "value": value.value,
            "gradient_norm": float(value.gradient.norm()),
            "distance": float((y.detach() - solution).norm()),
            "test_error": problem.test_error(y.detach()),
            "solved_test_error": problem.test_error(solution),
        }

    found = spend(
        advance, measure, budget=args.seconds, spent=lambda seconds: seconds, evaluations=args.evaluations,
        judged=("value", "gradient_norm", "distance", "test_error", "solved_test_error"),
    )  # fmt: skip
    fallback = {"compile_fallback": optimizer.diagnostics.get("compile_fallback")} if args.compile else {}
    return {**found, "oracle_calls": optimizer.oracle_counts, **fallback}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Make the missing runs; return the numbers that are written."""
    parser = Parser(__doc__, compiled=True)
    parser.data(("digits", "quadratics", "ijcnn1", "mnist", "covtype"), flag="--problem")
    parser.methods(STOCHASTIC, "all but some controls", "--methods")
    parser.settings(
        "problem", {name: {"seconds": value} for name, value in SECONDS.items()}, seconds="time of a run in seconds"
    )
    parser.option("seeds", 3, "runs with the best step sizes")
    parser.option("batch", 64, "examples per batch")
    parser.option("steps", [0.1], "lower step sizes", shown="three for each problem")
    parser.option("ratios", [0.1], "lower step size / upper step size", shown="three")
    parser.add_argument("--full-grid", action="store_true", help="all step sizes and ratios of the published runs")
    parser.option("evaluations", 10, "points per curve")
    parser.option("corruption", 0.5, "share of corrupted labels (mnist, digits)", type=share)
    parser.option("examples", 32_768, "n of the quadratics")
    parser.option("dims", [100, 10], "dimensions of y and x (quadratics)", nargs=2)
    parser.option("mu", 0.01, "minimal curvature (quadratics)")
    parser.set_defaults(steps=None, ratios=None)
    args = parser.parse(arguments)
    steps, ratios = GRIDS["full" if args.full_grid else "small"][args.problem]
    steps, ratios = args.steps or steps, args.ratios or ratios

    label, problem = make(args)
    entries = problem.x.numel() * problem.y.numel()
    fits = [name for name, method in STOCHASTIC.items() if not method.tasks]
    chosen = args.methods or [
        name for name in fits if name not in CONTROLS and not (STOCHASTIC[name].matrices and entries > MATRICES)
    ]
    if wrong := [name for name in chosen if name not in fits]:
        parser.error(f"--methods {wrong[0]} is for many lower problems (recipes.hyper_regularization)")
    stem = args.out / f"bilevel_suite_{label.replace(' ', '_').replace('=', '').replace(',', 'x')}"
    path = Path(f"{stem}.records.jsonl")
    records = Records(path)

    def record(name: str, rates: tuple[float, float], seed: int) -> dict[str, Any]:
        setting = {
            "problem": label, "method": name, "step": rates[0], "ratio": rates[1], "seed": seed,
            "seconds": args.seconds, "batch": args.batch, "evaluations": args.evaluations,
            **({"compile": True} if args.compile else {}),
        }  # fmt: skip
        chosen = {"step": rates[0], "ratio": rates[1]}
        return records.get(setting, lambda: {**chosen, **run(problem, name, *rates, seed, args)})

    grid = [(step, ratio) for step in steps for ratio in ratios]
    found = tuned(chosen, grid, record, "value", args.seeds)
    figures = ("gradient_norm", "test_error", "solved_test_error", "step", "ratio", "steps", "calls")
    medians = summary({name: best for name, (_, best) in found.items()}, "value", *figures)
    best = {name: found[name][1] for name in medians}
    what = "h(x) - min h" if isinstance(problem, Quadratics) else "h(x)"
    header = ("", what, "range", "|grad h|", "test error", "at y*(x)", "step", "ratio", "steps", "calls")
    shape = f"{problem.sizes[0]:,} / {problem.sizes[1]:,} examples, x: {problem.x.numel():,}, y: {problem.y.numel():,}"
    title = f"{label}: {shape}, {args.seconds:g} s per run"
    start = problem.value(problem.x, problem.y).value
    show(
        f"{title}; median of {args.seeds} seeds\n{what} at the start: {start:.4g}",
        header,
        rows(medians, "value", "range", *figures),
    )
    curves = {name: median_curve([r["curve"] for r in runs if not r["diverged"]]) for name, runs in best.items()}
    panels: list[tuple[str, str, dict[str, Any]]] = [
        ("seconds", "value", {"ylabel": what, "yscale": "log"}),
        ("calls", "value", {"ylabel": what, "yscale": "log", "xlabel": "oracle calls (gradients)"}),
        ("seconds", "gradient_norm", {"ylabel": "|grad h(x)|", "yscale": "log"}),
    ]
    if problem.test_error(problem.y) is not None:
        panels.append(("seconds", "test_error", {"ylabel": "test error"}))
    plot(stem, title, curves, panels)
    print(f"{records.made} new runs in {path}")
    return save(args, stem, {"start": start, "new_runs": records.made, "best": best})


if __name__ == "__main__":
    main()

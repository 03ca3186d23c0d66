r"""First and second derivatives of common operations in torch, and in the library, against differences of values.

    python -m recipes.benchmarks.derivatives                     # adds what is missing for the installed torch
    python -m recipes.benchmarks.derivatives --only nn.LSTM scan # prints some rows, and writes nothing
    python -m recipes.benchmarks.derivatives --page              # makes the page from the records of all versions

Each row is a loss :math:`g(x, y) = \ell(x, y) + 0.05 \|y\|^2` in float64. The truth is a central difference of values
(for the gradient) and of gradients (for products; of values, if the gradient is wrong), in one random direction,
which leaves out rows of padding.

* gradient, product, cross: ``torch.autograd.grad``, the latter two of a gradient with ``create_graph=True``.
* vmap: ``torch.func.vmap(grad)`` for two inputs, against one by one.
* library: `Oracle.lower_system`, which all methods with second derivatives use.
* tasks: hypergradient of `AID` for two tasks, against the mean over one by one.
* compile: hypergradient of a compiled step of `AID` (``backend="eager"``), against the eager one.

`AID` makes no lower steps: near repeated eigenvalues, rounding would decide whether a derivative is NaN.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import bilevel_optim as bo

from ..common import environment, progress
from ..common.seeds import begin, stream
from .derivative_cases import CASES, DOUBLE, Case

COLUMNS = ("gradient", "product", "cross", "vmap", "library", "tasks", "compile")
ROOT = Path(__file__).parents[2]
RECORDS, PAGE = ROOT / "docs" / "records", ROOT / "docs" / "second_derivatives.md"
RIGHT = "right"
STEP = 1e-5


class Row(nn.Module):
    """The loss of a row with its parameters y, at inputs that are scaled by x."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        begin(0, "case")
        self.module, self.function = case.make()
        self.x = torch.ones(case.shape[-1], dtype=DOUBLE, requires_grad=True)
        self.inputs = torch.randn(2, *case.shape, dtype=DOUBLE)
        self.y = list(self.module.parameters())
        self.buffers_before = copy.deepcopy(list(self.module.buffers()))

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return the loss."""
        with torch.no_grad():
            for buffer, before in zip(self.module.buffers(), self.buffers_before, strict=True):
                buffer.copy_(before)
        return self.loss(x, inputs)

    def loss(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return the loss; the module may advance its buffers."""
        out = self.function(self.module, inputs * x)
        value = out if out.dim() == 0 else out.square().mean() + out.sin().mean()
        return value + 0.05 * torch.stack([p.square().sum() for p in self.module.parameters()]).sum()

    def moved(self, y: Sequence[Tensor], x: Tensor, length: float) -> _Moved:
        """Return a block within which y and x are shifted."""
        return _Moved(self, y, x, length)


class _Moved:
    def __init__(self, row: Row, y: Sequence[Tensor], x: Tensor, length: float) -> None:
        self.pairs = [(p, length * d) for p, d in zip((*row.y, row.x), (*y, x), strict=True)]
        self.before = [p.detach().clone() for p, _ in self.pairs]

    def __enter__(self) -> None:
        with torch.no_grad():
            for p, d in self.pairs:
                p.add_(d)

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for (p, _), before in zip(self.pairs, self.before, strict=True):
                p.copy_(before)


def dot(a: Sequence[Tensor | None], b: Sequence[Tensor]) -> float:
    """Return an inner product; None is zero."""
    return sum(float((s.detach() * t).sum()) for s, t in zip(a, b, strict=True) if s is not None)


def judged(found: float, truth: float, rtol: float, scale: float) -> str:
    """Return a cell of the table."""
    if abs(found - truth) <= rtol * max(abs(truth), scale):
        return RIGHT
    if not math.isfinite(found):
        return f"{found}: for {truth:.3g}"
    return f"wrong: {found:.3g} for {truth:.3g}"


def tried(measure: Callable[[], str]) -> str:
    """Return a cell, or the first words of the error."""
    torch._dynamo.reset()  # what other cells have compiled
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return measure()
    except AttributeError:
        return "not in this torch"
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        by = "library" if Path(frames[-1].filename).is_relative_to(Path(bo.__file__).parent) else "torch"
        return f"refused by {by}: {text[:160]}"


def measured(case: Case, columns: Sequence[str] = COLUMNS) -> dict[str, str]:
    """Return the cells of a row."""
    row = Row(case)
    g = stream(1, "directions")
    u, v = ([torch.randn(p.shape, generator=g, dtype=DOUBLE) for p in row.y] for _ in range(2))
    ux = torch.randn(row.x.shape, generator=g, dtype=DOUBLE)
    if case.held is not None:
        u[0][case.held], v[0][case.held] = 0, 0
    none, still = [torch.zeros_like(p) for p in row.y], torch.zeros_like(row.x)
    data = row.inputs[0]

    def value() -> float:
        return float(row(row.x, data).detach())

    def gradient() -> list[Tensor | None]:
        return list(torch.autograd.grad(row(row.x, data), row.y, allow_unused=True))

    def quotient(of: Callable[[], float], y: Sequence[Tensor], x: Tensor, step: float) -> float:
        ends = []
        for sign in (1, -1):
            with row.moved(y, x, sign * step):
                ends.append(of())
        return (ends[0] - ends[1]) / (2 * step)

    def slope() -> float:
        return dot(gradient(), v)

    truth, truth_x = float("nan"), float("nan")

    def truths() -> str:
        nonlocal truth, truth_x
        expected = quotient(value, v, still, STEP)
        cell = judged(slope(), expected, case.rtol, max(abs(expected), 1e-2))
        length = STEP if cell == RIGHT else 1e-3

        def of() -> float:
            return slope() if cell == RIGHT else quotient(value, v, still, length)

        truth, truth_x = quotient(of, u, still, length), quotient(of, none, ux, length)
        return cell

    cells = {"gradient": tried(truths)}
    scales = max(abs(truth), 1e-2), max(abs(truth_x), 1e-2)
    rtol = max(case.rtol, 1e-3)

    def products() -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        slopes = torch.autograd.grad(row(row.x, data), row.y, create_graph=True, allow_unused=True)
        parts = [(s * t).sum() for s, t in zip(slopes, v, strict=True) if s is not None and s.requires_grad]
        total = torch.stack(parts).sum()
        hvp = torch.autograd.grad(total, row.y, retain_graph=True, allow_unused=True)
        return hvp, torch.autograd.grad(total, [row.x], allow_unused=True)

    def by_library() -> str:
        oracle = bo.Oracle([row.x], row.y, lambda: row.y[0].sum(), lambda: row.loss(row.x, data))
        with oracle.lower_system(oracle.g.draw()) as system:
            cross, hvp = system.both(bo.Vector(v))
        oracle.checks.finite("hvp", hvp)
        oracle.checks.verify(0, set())
        cells = judged(dot(hvp, u), truth, rtol, scales[0]), judged(dot(cross, [ux]), truth_x, rtol, scales[1])
        return next((cell for cell in cells if cell != RIGHT), RIGHT)

    def by_vmap() -> str:
        names = [f"module.{name}" for name, _ in row.module.named_parameters()]
        shared = {name: p.detach() for name, p in zip(names, row.y, strict=True)}
        fixed = {f"module.{name}": b for name, b in row.module.named_buffers()}

        def loss(params: dict[str, Tensor], inputs: Tensor) -> Tensor:
            found: Tensor = functional_call(_Loss(row), {**{f"row.{n}": p for n, p in params.items()},
                **{f"row.{n}": b.clone() for n, b in fixed.items()}}, (row.x.detach(), inputs))  # fmt: skip
            return found

        stacked = {name: p.expand(2, *p.shape) for name, p in shared.items()}
        together = vmap(grad(loss))(stacked, row.inputs)
        for i in range(2):
            alone = torch.autograd.grad(row(row.x, row.inputs[i]), row.y, allow_unused=True)
            cell = judged(dot([together[n][i] for n in names], v), dot(alone, v), rtol, max(abs(dot(alone, v)), 1e-2))
            if cell != RIGHT:
                return cell
        return RIGHT

    def aid(inputs: Tensor | None, *, compiled: bool = False) -> tuple[Tensor, dict[str, Any]]:
        with row.moved(none, still, 0.0):
            x = row.x
            options: dict[str, Any] = {"lower_steps": 0, "linear_steps": 2, "linear_lr": 1e-2}
            optimizer = bo.AID([x], row.y, lr=0.0, linear_solver="neumann", **options)
            batch = [data] if inputs is None else [inputs]

            def lower(*z: Tensor) -> Tensor:
                return row.loss(x, z[0] if z else batch[0])

            def upper(*z: Tensor) -> Tensor:
                return torch.stack([(p * d).sum() for p, d in zip(row.y, v, strict=True)]).sum()

            if compiled:
                optimizer.compile(backend="eager")
            tasks = None if inputs is None or inputs.dim() == data.dim() else bo.TensorTasks(inputs)
            start = [p.detach().clone() for p in row.y]
            for _ in range(2 if compiled else 1):
                for p, s in zip(row.y, start, strict=True):
                    p.data.copy_(s)
                optimizer.backward(upper, lower, tasks=tasks)
            assert x.grad is not None
            return x.grad.clone(), optimizer.diagnostics

    def compared(found: Tensor, expected: Tensor) -> str:
        size = max(float(expected.abs().max()), 1e-3)
        return judged(float(found @ ux), float(expected @ ux), 1e-3, size)

    def by_tasks() -> str:
        alone = [aid(inputs)[0] for inputs in row.inputs]
        found, diagnostics = aid(row.inputs)
        cell = compared(found, (alone[0] + alone[1]) / 2)
        return "right, in a loop" if cell == RIGHT and "vectorize_fallback" in diagnostics else cell

    def by_compile() -> str:
        found, diagnostics = aid(None, compiled=True)
        cell = compared(found, aid(None)[0])
        return "right, eager" if cell == RIGHT and "compile_fallback" in diagnostics else cell

    measures = {
        "product": lambda: judged(dot(products()[0], u), truth, rtol, scales[0]),
        "cross": lambda: judged(dot(products()[1], [ux]), truth_x, rtol, scales[1]),
        "vmap": by_vmap,
        "library": by_library,
        "tasks": by_tasks,
        "compile": by_compile,
    }
    return cells | {name: tried(measures[name]) for name in columns if name in measures}


class _Loss(nn.Module):
    """A module whose call is the loss without the buffers' restoration, which vmap cannot do."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row = row

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return the loss."""
        return self.row.loss(x, inputs)


def kind(cell: str) -> str:
    """Return a cell without its figures."""
    return cell.split(":")[0]


def recorded() -> dict[str, dict[str, dict[str, str]]]:
    """Return the recorded rows by version of torch, oldest first."""
    paths = {path.stem.split("_")[1]: path for path in RECORDS.glob("derivatives_*.json")}
    versions = sorted(paths, key=lambda version: [int(part) for part in version.split(".")])
    return {version: json.loads(paths[version].read_text(encoding="utf-8"))["rows"] for version in versions}


def page(records: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the page for the records by version."""
    measured_columns = {column for rows in records.values() for row in rows.values() for column in row}
    columns = [column for column in COLUMNS if column in measured_columns]
    lines = [
        "# Second derivatives in torch", "",
        "Which derivatives of common operations are right, on torch " + ", ".join(records) + " (CPU, float64). "
        "`python -m recipes.benchmarks.derivatives` makes this page; a cell without a version holds for all.", "",
        "* *gradient*, *product* (Hessian-vector), *cross* (in x and y): `torch.autograd.grad`, against central "
        "differences.",
        "* *vmap*: `torch.func.vmap(grad)`, against one by one.",
        "* *library*: products of the library, which all methods with second derivatives use, before a step checks "
        "them.",
        "* *tasks*: hypergradient of `AID` for two tasks at once, against the same one by one. Where the library's "
        "product is wrong, *refused by library* is `DerivativeError` of this check, and *right* means equally wrong.",
        "* *its gradient* (gradient penalties): the loss takes the gradient of the operation in its input, so a "
        "product needs its third derivatives.",
    ]  # fmt: skip
    if "compile" in columns:
        lines.append("* *compile*: hypergradient of a compiled step of `AID`, against the eager one.")
    lines += [
        "",
        "**wrong** is silent: a finite number, no error; a step finds it where *tasks* is *refused*. `nan` raises "
        "`NonFiniteError` in a step. The folder `findings/` has programs that show some of these faults.",
    ]
    for group in dict.fromkeys(case.group for case in CASES.values()):
        header = " | ".join(("operation", *columns))
        lines += ["", f"## {group}", "", f"| {header} |", "|---" * (len(columns) + 1) + "|"]
        for name, case in CASES.items():
            if case.group == group and any(name in rows for rows in records.values()):
                lines.append("| " + " | ".join([f"`{name}`", *(_cell(records, name, c) for c in columns)]) + " |")
    lines += ["", "## Where the library's products are wrong", ""]
    lines += _wrong(records)
    return "\n".join(lines) + "\n"


def _wrong(records: dict[str, dict[str, dict[str, str]]]) -> list[str]:
    newest = records[[*records][-1]]
    return [
        f"* `{name}`: {newest[name]['library'].removeprefix('wrong: ')} (the true number)."
        for name in CASES
        if kind(newest.get(name, {}).get("library", "")) == "wrong"
    ]


def _cell(records: dict[str, dict[str, dict[str, str]]], name: str, column: str) -> str:
    by_kind: dict[str, list[str]] = {}
    for version, rows in records.items():
        if name in rows:
            by_kind.setdefault(kind(rows[name].get(column, "not measured")), []).append(version)
    marked = {k: f"**{k}**" if k == "wrong" else k for k in by_kind}
    if len(by_kind) == 1:
        return next(iter(marked.values()))
    return "; ".join(f"{marked[k]} ({', '.join(found)})" for k, found in by_kind.items())


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows to measure and print; nothing is written")
    parser.add_argument("--columns", nargs="*", default=[*COLUMNS], help="columns to measure")
    parser.add_argument("--page", action="store_true", help="make the page from the records")
    options = parser.parse_args(arguments)
    version = torch.__version__.split("+")[0]
    if options.only:
        for name in options.only:
            for column, cell in measured(CASES[name], options.columns).items():
                print(f"{name}, {column}: {cell}", flush=True)
        return
    if not options.page:
        rows = recorded().get(version, {})
        for name, case in progress(CASES.items(), "rows"):
            missing = [column for column in options.columns if column not in rows.get(name, {})]
            if missing:
                rows[name] = {**rows.get(name, {}), **measured(case, missing)}
                content = {"environment": environment(), "rows": rows}
                path = RECORDS / f"derivatives_{version}.json"
                path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(recorded()), encoding="utf-8")


if __name__ == "__main__":
    main()

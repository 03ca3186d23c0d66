"""Count the files, functions and calls of the package that a step passes, and its lines.

    python -m recipes.benchmarks.step_path
    python -m recipes.benchmarks.step_path --walk AID

A step of three tensors a level is traced with ``sys.setprofile`` after two steps that look at the losses for the first
time. Calls into torch, lambdas, comprehensions and generator resumptions are not counted.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import bilevel_optim as bo

from ..common import Parser, show
from ..common.seeds import begin

PACKAGE = Path(bo.__file__).parent
STEPS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "AID": ("AID", {"lower_steps": 5, "linear_steps": 5, "lower_lr": 0.1}, False),
    "SOBA": ("SOBA", {"lower_lr": 0.1}, False),
    "F2SA with tasks": ("F2SA", {"lower_steps": 5, "lower_lr": 0.1}, True),
    "PZOBO": ("PZOBO", {"lower_steps": 5, "lower_lr": 0.1}, False),
}


def step_of(name: str) -> Callable[[], object]:
    """Return a step of a method on a small smooth problem, after two steps."""
    method, options, tasks = STEPS[name]
    begin(0, "data")
    x, y = ([torch.randn(4, requires_grad=True) for _ in range(3)] for _ in range(2))

    def upper(_: Any = None) -> torch.Tensor:
        return torch.stack([(a - 1).square().sum() for a in y]).sum()

    def lower(_: Any = None) -> torch.Tensor:
        return torch.stack([(a - b).square().sum() for a, b in zip(y, x, strict=True)]).sum()

    optimizer = getattr(bo, method)(x, y, lr=0.01, **options)
    given = {"tasks": bo.TensorTasks(torch.ones(2, 1, 1))} if tasks else {}

    def step() -> object:
        return optimizer.step(upper, lower, **given)

    step()
    step()
    return step


def walk(step: Callable[[], object]) -> Counter[tuple[str, str, int]]:
    """Return how often each function of the package is called in a step, by file, name and line."""
    calls: Counter[tuple[str, str, int]] = Counter()
    root, begun = f"{PACKAGE}/", set[FrameType]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            if code.co_flags & inspect.CO_GENERATOR:
                if frame in begun:
                    return  # resumed
                begun.add(frame)
            calls[code.co_filename.removeprefix(root), code.co_qualname, code.co_firstlineno] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def size() -> dict[str, int]:
    """Return the files, lines of code without comments, blank lines and docstrings, functions and classes."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        tree = ast.parse(text)
        lines = {i for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                found["functions"] += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                found["classes"] += isinstance(node, ast.ClassDef)
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        found["files"] += 1
        found["lines of code"] += len(lines)
    return dict(found)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = Parser(__doc__, out=False)
    parser.add_argument("--walk", choices=[*STEPS], help="print every function of this step")
    args = parser.parse(arguments)
    if args.walk:
        calls = walk(step_of(args.walk))
        rows = [[f"{file}:{line}", name, count] for (file, name, line), count in sorted(calls.items())]
        show(f"a step of {args.walk}", ["place", "function", "calls"], rows)
        return
    rows = []
    for name in STEPS:
        calls = walk(step_of(name))
        rows.append([name, len({file for file, *_ in calls}), len(calls), calls.total()])
    show("One step", ["step", "files", "functions", "calls"], rows)
    show("The package", [*size()], [[*size().values()]])


if __name__ == "__main__":
    main()

"""Diagnostics of a step: keys, shapes, and the same values as plain floats."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bilevel_optim as bo
from bilevel_optim.hypergradient.finite_difference import stencil

from ..problems import close
from ..registry import ARGUMENTS, ROWS, each

PAGE = Path(__file__).parent.parent.parent / "docs" / "diagnostics.md"
ENTRIES = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
]
SOMETIMES = (
    "projected_*",
    "vectorize_fallback",
    "compile_fallback",
    "linear_condition",
    "difference_gap",
    "linear_solver",
)


def documented(row, tasks):
    """Shapes by key, as the page has them for a method."""
    found = {}
    for key, shape, *_, methods in ENTRIES:
        names = re.findall(r"`([^`]*)`", methods)
        named = row.name in names or row.cls.__name__ in names
        if methods == "all":
            holds = True
        elif methods.startswith("all but"):
            holds = not named
        elif methods.startswith("all with"):
            holds = tasks and row.declared.tasks != "rows"
        elif methods == "runs whose lower rate is measured":
            holds = False  # the rows have numbers; see test_auto_rate.py
        elif methods.startswith("those with"):
            own = row.declared.lower_steps and row.declared.lower_optimizer != "none"
            holds = own and not named
        else:
            holds = named
        if holds:
            assert key not in found, f"{key} of {row.name} is on the page twice"
            found[key.strip("`")] = shape
    return found


def length(optimizer, shape, tasks):
    """Return the length of a vector of this shape; None for a scalar."""
    if shape == "copies":
        return len(stencil(optimizer.order, optimizer.stencil).nodes)
    if shape == "directions":
        return optimizer.directions
    if shape == "levels":
        return optimizer.levels + 1
    return int(optimizer.diagnostics["task_count"]) if shape == "tasks" and tasks else None


@each()
def test_every_key_of_every_method_is_documented_with_its_shape(row):
    for tasks in {False, row.takes_tasks} - ({False} if row.declared.tasks == "required" else set()):
        optimizer, _ = stepped(row, tasks, lower_steps=4)
        known, found = documented(row, tasks), optimizer.diagnostics
        if any(name.startswith("projected_") for name in found):
            assert known["projected_*"] == "scalar"
        named = {name for name in found if not name.startswith("projected_")} - {*SOMETIMES}
        told = known.keys() - {*SOMETIMES}
        assert named == told, f"docs/diagnostics.md lacks {named - told} and has {told - named} too many"
        for name, value in found.items():
            n = length(optimizer, known.get(name, "scalar"), tasks)
            assert value.shape == (() if n is None else (n,)), name


def test_the_page_names_methods_that_there_are():
    names = {name for *_, methods in ENTRIES for name in re.findall(r"`([^`]*)`", methods)}
    known = {row.name for row in ROWS} | {row.cls.__name__ for row in ROWS} | {"lower_steps", "tasks=", "floor"}
    assert names <= known
    assert all(len(entry) == 5 for entry in ENTRIES)


def stepped(row, tasks, **options):
    problem = row.quadratic(tasks=tasks)
    optimizer = row(problem.x, problem.y, short=True, **options)
    loss = problem.run(optimizer, 2)
    return optimizer, loss


class HostReads(TorchDispatchMode):
    """Counts the scalars that are read one by one."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@each(lambda row: not row.variant)
def test_metrics_are_the_last_step_as_floats(row):
    optimizer, loss = stepped(row, tasks=row.takes_tasks)
    with HostReads() as reads:
        metrics = optimizer.metrics()
    assert reads.count == 0  # all of them come together
    assert all(type(value) is float for value in metrics.values())
    assert metrics.pop("loss") == float(loss)
    for name, value in optimizer.diagnostics.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            assert str(metrics.pop(name)) == str(float(value))  # NaN too
        elif isinstance(value, torch.Tensor):
            known = value.double()[~value.isnan()]
            assert math.isclose(metrics.pop(f"{name}/mean"), float(known.mean()), rel_tol=1e-12, abs_tol=1e-300)
            assert metrics.pop(f"{name}/max") == float(known.max())
    assert not metrics
    assert "tasks" not in optimizer.diagnostics  # neither ids nor data are kept alive


def test_there_are_no_metrics_before_a_step_and_no_words_in_them():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = bo.F2SA([x], [y], **ARGUMENTS, vectorize=8, check_derivatives=False)
    assert optimizer.metrics() == {}

    def lower():
        return (y * y.detach().sum().item()).sum() + (y - x).square().sum()  # no item under vmap: a loop

    optimizer.backward(lambda: y.square().sum(), lower)
    assert "vectorize_fallback" in optimizer.diagnostics
    assert {"loss", "spread/max"} <= set(optimizer.metrics())
    assert "vectorize_fallback" not in optimizer.metrics()


@pytest.mark.parametrize("size", [3, 100_000])
def test_norms_are_those_of_the_step_whenever_they_are_read(size):
    def made():
        x, y = (torch.linspace(-1, 1, size).requires_grad_() for _ in range(2))
        optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.5)
        optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - 2 * x).square().sum() / 2)
        return x, y, optimizer

    at_once = dict(made()[2].diagnostics)
    x, y, optimizer = made()
    x.grad.zero_()  # clipped, say
    with torch.no_grad():
        x.add_(1), y.mul_(2)
    assert size < 1000 or all(isinstance(value, torch.Tensor) for value in vars(optimizer)["_diagnostics"].values())
    later = copy.deepcopy(optimizer).diagnostics
    assert (
        list(later) == ["hypergradient_norm", "lower_residual", "linear_residual", "linear_right_side"] == list(at_once)
    )
    for name, value in at_once.items():
        assert torch.equal(value, later[name])
        assert (value.dim(), value.dtype) == (0, torch.float64)
    start = torch.linspace(-1, 1, size)
    close(at_once["lower_residual"], start.double().norm(), 0, 1e-6)  # of y - 2 x

"""Tests that need a GPU (else skipped): captured steps, CUDA graphs, waits for the device, kernels.

The first two are run by `tests/devices` too, on a simulated device in CUDA's place.
"""

import sys
import warnings

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.kernels import seeded as seeded_kernels

from ..compiled.test_compile import Regression
from ..layers.test_kernels import operators
from ..registry import each

SIMULATED = "tests.devices.simulated" in sys.modules
if not torch.cuda.is_available() and not SIMULATED:
    pytest.skip("needs a CUDA device", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "simgpu"

WAYS = {
    "traced": {"backend": "eager"},
    **({} if SIMULATED else {"inductor": {}, "cuda graphs": {"mode": "reduce-overhead"}}),
}
SINGLE, AT_ONCE = 12, 8
ANCHORED, PERIOD = ("SRBA", "VRBO"), 4  # every PERIOD-th step has a graph of its own
ALONE = {"SABA": 3}  # waits of a run of three: a step that writes rows of its tables is written before the next


def steps(row, device, compiled=None, **options):
    """Losses and end of some steps, the last ones at once; and the optimizer."""
    problem = Regression(row, device=device, **options)
    optimizer = problem.optimizer(row)
    if compiled is not None:
        optimizer.compile(**compiled)
    torch.manual_seed(0)
    losses = [problem.step(optimizer) for _ in range(SINGLE)]
    losses += problem.run(optimizer, AT_ONCE)
    return [torch.stack(losses), *(t.detach() for t in (*problem.x, *problem.y))], optimizer


@pytest.mark.parametrize("way", list(WAYS))
@each()
def test_captured_steps_are_eager_ones(row, way):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        (eager, _), (captured, optimizer) = (steps(row, DEVICE, compiled) for compiled in (None, WAYS[way]))
    for mine, theirs in zip(captured, eager, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))
    assert optimizer.captured_graphs or "compile_fallback" in optimizer.diagnostics


@each(lambda row: not (row.declared.uncaptured or row.declared.host_update or row.declared.tasks == "required"))
def test_a_captured_step_waits_for_the_device_once(row):
    """And so do the steps of a run: for their flags (but for samplers, whose draws go from the host to the device)."""
    problem = Regression(row, device=DEVICE)
    optimizer = problem.optimizer(row, **({"period": PERIOD} if row.name in ANCHORED else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        optimizer.compile(backend="eager")
        for _ in range(9 * PERIOD):  # uses 1, 2, 4, 8, ... of a graph are compared with eager steps, the next are not
            problem.step(optimizer)
    if "compile_fallback" in optimizer.diagnostics:
        pytest.skip(optimizer.diagnostics["compile_fallback"])
    for advance, most in ((problem.step, 1), (lambda optimizer: problem.run(optimizer, 3), ALONE.get(row.name, 1))):
        torch.get_device_module(DEVICE).set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                advance(optimizer)
        finally:
            torch.get_device_module(DEVICE).set_sync_debug_mode("default")
        waits = [str(w.message) for w in found if "synchroniz" in str(w.message)]
        assert len(waits) <= most, waits


@pytest.mark.parametrize("name", list(operators()))
def test_registration(name):
    with torch.device("cuda"):
        operator, args = operators()[name]
        torch.library.opcheck(operator, args)


def test_more_than_32_bits_count():
    """2^31 + 5 entries in bfloat16."""
    n = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB")
    keys = torch.tensor([7], device="cuda")
    point = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    factors = torch.ones(1, device="cuda")
    moved = seeded_kernels.perturbed(point, factors, keys, keys, 1, 0, "normal")[0]
    for start in (0, 2**31 - 3, n - 5):
        part = point[start : start + 5]
        expected = seeded_kernels._perturbed(part, factors, keys, keys, 1, start, "normal")[0]
        torch.testing.assert_close(moved[start : start + 5], expected, rtol=1e-2, atol=1e-3)
    total = seeded_kernels.accumulated(point, factors, keys, keys, 1, 0, "normal")
    torch.testing.assert_close(total, moved, rtol=1e-2, atol=1e-3)
    squares = seeded_kernels.squares(point, keys, keys, 1, 0, "normal")
    assert float(squares) == pytest.approx(n, rel=1e-3)

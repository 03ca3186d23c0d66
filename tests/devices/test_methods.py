"""Every method on the simulated device makes the steps that it makes on the CPU."""

import warnings

import torch

import bilevel_optim as bo

from ..compiled.test_compile import Regression
from ..problems import seeded
from ..registry import each
from .problems import is_there, placed, results
from .simulated import DEVICE, shared_randomness

STEPS = 2


def compared(row, make, *, steps=STEPS, generators=seeded, compiled=False, **options):
    """Steps of one problem on both devices leave the same; gives the optimizer of the device."""
    left = []
    for on_device in (False, True):
        problem = make(on_device)
        generator = {} if generators is None or not row.declared.random else {"generator": generators(7)}
        if generators is None:
            options |= {"generator": None}
        optimizer = row(problem.x, problem.y, short=True, **{**options, **generator})
        with warnings.catch_warnings(), shared_randomness():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            torch.manual_seed(5)
            if compiled:
                optimizer.compile(backend="eager")
            loss = problem.run(optimizer, steps)
        left.append(results(problem, optimizer, loss))
    here, there = left
    assert here.keys() == there.keys()
    for name, value in here.items():
        tolerance = 1e-9 * max(1.0, float(value.double().abs().nan_to_num(0, 0, 0).max())) if value.numel() else 0.0
        torch.testing.assert_close(there[name], value, rtol=1e-9, atol=tolerance, equal_nan=True, msg=name)
    assert loss.device == DEVICE
    assert is_there(optimizer)
    return optimizer


def moved(make, **arguments):
    return lambda on_device: placed(make(**arguments)) if on_device else make(**arguments)


@each()
def test_steps_are_those_of_the_cpu(row):
    compared(row, moved(row.quadratic, n=4, m=2))


@each(lambda row: not row.variant or row.declared.tasks == "required")
def test_on_batches_with_dropout_and_lower_adam(row):
    """Batches of a loader, which stay on the CPU as indices do; random numbers from torch's default generators."""
    compared(row, moved(row.cleaning, form="batches", dropout=0.3), generators=None, lower_optimizer=torch.optim.Adam)


@each(lambda row: row.takes_tasks and not row.variant and row.declared.tasks != "required")
def test_with_tasks(row):
    sizes = {"lower_batch": 2, "upper_batch": 2}
    compared(row, moved(row.quadratic, tasks=True), **sizes)


CAPTURED = ("AID", "F2SA", "PZOBO", "SABA", "SVRB", "MAML")


@each(CAPTURED)
def test_captured_steps_are_those_of_the_cpu(row):
    def make(on_device):
        return Steps(row, device=DEVICE if on_device else "cpu")

    optimizer = compared(row, make, steps=6, compiled=True)
    assert optimizer.captured_graphs, optimizer.diagnostics.get("compile_fallback")


class Steps(Regression):
    """Steps and a run, as other problems have them."""

    def run(self, optimizer, steps):
        losses = [self.step(optimizer) for _ in range(steps)]
        return torch.stack([*losses, *super().run(optimizer, 3)])

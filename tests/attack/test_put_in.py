"""Faults that are put into captured steps, each of which a test of this size finds."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.capture import steps as captured_steps
from bilevel_optim.capture.bind import CompiledStep
from bilevel_optim.capture.cache import StepCache
from bilevel_optim.capture.losses import LossReader
from bilevel_optim.capture.steps import CapturedSteps

from ..problems import seeded
from . import ways
from .test_reads import attacked

ROWS = [*torch.randn(12, 3, generator=seeded(9), dtype=torch.float64)]


def scheduled(row, x, y, held):
    return (row @ y - held.w).square() + (y - x).square().sum() / 4


def both(drive, data=None):
    """Whether a captured optimizer, driven so, ends where an eager one does."""
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        x, y = (torch.full((3,), value, requires_grad=True) for value in (0.3, 0.1))
        optimizer = bo.SOBA([x], [y], lr=0.05, lower_lr=0.1)
        if captured:
            optimizer.compile(backend="eager")
        held = SimpleNamespace(w=1.0)
        rows = data(held) if data else ROWS
        g = bo.Objective(lambda row, x=x, y=y, held=held: scheduled(row, x, y, held), rows)
        f = bo.Objective(lambda y=y: y.square().sum() + y.sum())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            drive(optimizer, f, g)
        assert not captured or optimizer.captured_graphs  # with the fault a graph would be refused, for no good reason
        ends.append(torch.cat([x, y]).detach())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)


def rates(optimizer, f, g):
    for k in range(26):
        optimizer.param_groups[k % 2]["lr"] = 0.02 + 0.01 * k
        optimizer.step(f, g)


def hooks(optimizer, f, g):
    for _ in range(6):
        optimizer.step(f, g)
    y = optimizer.param_groups[1]["params"][0]
    optimizer.register_step_post_hook(lambda *_: y.data.clamp_(-0.05, 0.05))
    optimizer.run(f, g, steps=20)


def failing(optimizer, f, g):
    for _ in range(20):
        optimizer.step(f, g)
    bad = bo.Objective(g.loss, [torch.full((3,), torch.nan)])
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(f, bad)
    optimizer.step(f, g)


class Unreadable:
    """Every pass ends at a batch that cannot be read."""

    def __init__(self, held):
        self.held = held

    def __iter__(self):
        yield from (ROWS * 5)[:50]
        raise OSError("unreadable")


class Changing(Unreadable):
    """Changes what the loss reads as a batch is drawn."""

    def __iter__(self):
        for k, row in enumerate(ROWS * 10):
            self.held.w = 1.0 if k < 30 else 2.0
            yield row


def interrupted(optimizer, f, g):
    for _ in range(6):
        optimizer.step(f, g)
    with pytest.raises(OSError, match="unreadable"):
        optimizer.run(f, g, steps=100)


def run(optimizer, f, g):
    for _ in range(6):
        optimizer.step(f, g)
    optimizer.run(f, g, steps=30)


def steps(optimizer, f, g):
    for _ in range(26):
        optimizer.step(f, g)


def first_reading(patch):
    read = LossReader.read
    patch.setattr(LossReader, "read", lambda self, *a: vars(self).setdefault("kept", None) or keep(self, read, a))


def keep(reader, read, arguments):
    reader.kept = read(reader, *arguments)
    return reader.kept


def inputs_of_the_trace(patch):
    arguments = CompiledStep.arguments

    def frozen(self, numbers, reads):
        first = {role: [t.clone() for t in tensors] for role, tensors in reads.items()}
        return arguments(self, numbers, vars(self).setdefault("first", first))

    patch.setattr(CompiledStep, "arguments", frozen)


def other_groups(patch):
    made = StepCache.rates
    patch.setattr(StepCache, "rates", lambda self, groups, device: made(self, groups, device)[::-1])


def first_rates(patch):
    made = StepCache.rates
    patch.setattr(StepCache, "rates", lambda self, *a: vars(self).setdefault("first", made(self, *a)))


def no_hooks(patch):
    name = next(name for name in ("_has_step_hooks", "has_step_hooks") if hasattr(bo.BilevelOptimizer, name))
    patch.setattr(bo.BilevelOptimizer, name, property(lambda self: False))


def memory_not_written(patch):
    write = CompiledStep.write

    def forgetful(self, *arguments):
        self.results = []
        write(self, *arguments)

    patch.setattr(CompiledStep, "write", forgetful)


def buffers_not_written(patch):
    write = CompiledStep.write

    def forgetful(self, *arguments):
        self._written = []
        write(self, *arguments)

    patch.setattr(CompiledStep, "write", forgetful)


def flags_not_read(patch):
    patch.setattr(CapturedSteps, "_troubled", lambda *_: False)


def places_not_restored(patch):
    patch.setattr(CapturedSteps, "_return_to", lambda *_: None)


def data_in_another_order(patch):
    ahead = captured_steps.draw_ahead
    patch.setattr(captured_steps, "draw_ahead", lambda *arguments: ahead(*arguments)[::-1])


def changes_not_seen(patch):
    patch.setattr(CapturedSteps, "_hold", lambda *_: True)


FAULTS = {
    "a guard that always holds": (
        first_reading,
        lambda: attacked(ways.pair("attribute", "closure"), "SOBA", 20, "step"),
    ),
    "an input of the trace": (
        inputs_of_the_trace,
        lambda: attacked(ways.pair("tensor", "closure"), "SOBA", 20, "step"),
    ),
    "rates of other groups": (other_groups, lambda: both(rates)),
    "the first rates": (first_rates, lambda: both(rates)),
    "no hooks": (no_hooks, lambda: both(hooks)),
    "memory that is not written": (memory_not_written, lambda: both(steps)),
    "buffers that are not written": (
        buffers_not_written,
        lambda: attacked(ways.momentum_of_a_normalisation, "SOBA", 20, "step"),
    ),
    "flags that are not read": (flags_not_read, lambda: both(failing)),
    "places that are not restored": (places_not_restored, lambda: both(interrupted, Unreadable)),
    "data in another order": (data_in_another_order, lambda: both(run)),
    "changes that are not seen": (changes_not_seen, lambda: both(run, Changing)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_put_in_is_found(name, monkeypatch):
    put_in, check = FAULTS[name]
    check()
    put_in(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError, IndexError, OSError)):
        check()

"""Failures and interrupts in a run: the steps before are kept, and the data continue where they ended."""

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.compiled import runs
from bilevel_optim.compiled import steps as compiled_steps

from ..problems import seeded

ROWS = torch.randn(200, 3, generator=seeded(3), dtype=torch.float64)


class Failing:
    """Batches with one that cannot be read."""

    def __init__(self, at, error):
        self.at, self.error = at, error

    def __iter__(self):
        for k, row in enumerate(ROWS):
            if k == self.at:
                raise self.error("this batch cannot be read")
            yield row


def made(cls, data, compiled, backend="eager"):
    torch.manual_seed(0)
    x, y = (torch.full((3,), value, requires_grad=True) for value in (0.3, 0.1))
    options = {} if cls is bo.SOBA else {"lower_steps": 1, "linear_steps": 2}
    optimizer = cls([x], [y], lr=0.05, lower_lr=0.1, generator=seeded(7), **options)
    if compiled:
        optimizer.compile(backend=backend)
    lower = bo.Objective(lambda row: (row @ y - 1).square() + (y - x).square().sum() / 4, data)
    return optimizer, bo.Objective(lambda: y.square().sum() + y.sum()), lower, x, y


def left(optimizer, lower, x, y):
    numbers = torch.tensor([optimizer._run_state.steps, lower.state_dict()["position"]])
    return torch.cat([x.detach(), y.detach()]), numbers, optimizer.generator.get_state()


@pytest.mark.few(3)
@pytest.mark.parametrize("cls", [bo.SOBA, bo.TTSA])
@pytest.mark.parametrize("at", [90, 91, 92])
@pytest.mark.parametrize("steps", [4, 11])
def test_a_batch_that_cannot_be_read_ends_a_run_at_its_step(cls, at, steps):
    """Captured runs draw ahead, but end where eager ones do."""
    results = []
    for compiled in (False, True):
        optimizer, upper, lower, x, y = made(cls, Failing(at, OSError), compiled)
        for _ in range(steps):
            optimizer.step(upper, lower)
        with pytest.raises(OSError, match="cannot be read"):
            optimizer.run(upper, lower, steps=100)
        results.append(left(optimizer, lower, x, y))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert optimizer.captured_graphs


class Interrupting:
    """A backend whose graphs are interrupted at some call."""

    def __init__(self):
        self.remaining = None

    def __call__(self, module, arguments):
        def call(*tensors):
            if self.remaining is not None:
                self.remaining -= 1
                if self.remaining < 0:
                    self.remaining = None
                    raise KeyboardInterrupt
            return module(*tensors)

        return call


@pytest.mark.usually("7-list", "1-iterable", "20-iterable")
@pytest.mark.parametrize("data", ["list", "iterable"])
@pytest.mark.parametrize("after", [0, 1, 7, 20])
def test_an_interrupted_run_is_whole_and_loses_little(data, after, monkeypatch):
    """Wherever it is interrupted, x, y, counts, numbers and positions are those of as many eager steps."""
    monkeypatch.setattr(runs, "AT_RISK", 0.0)  # a chain is one step long
    monkeypatch.setattr(runs, "FIRST", 3)
    rows = [*ROWS] if data == "list" else Failing(None, OSError)
    backend = Interrupting()
    optimizer, upper, lower, x, y = made(bo.SOBA, rows, True, backend)
    for _ in range(12):
        optimizer.step(upper, lower)
    backend.remaining = after
    with pytest.raises(KeyboardInterrupt):
        optimizer.run(upper, lower, steps=50)
    count = optimizer._run_state.steps
    assert 12 + after - 3 <= count <= 12 + after
    twin = made(bo.SOBA, rows, False)
    for _ in range(count):
        twin[0].step(*twin[1:3])
    torch.testing.assert_close(left(optimizer, *[lower, x, y]), left(twin[0], *twin[2:]), rtol=1e-12, atol=1e-12)
    assert optimizer.oracle_counts == twin[0].oracle_counts
    optimizer.run(upper, lower, steps=5)
    twin[0].run(*twin[1:3], steps=5)
    torch.testing.assert_close(left(optimizer, *[lower, x, y]), left(twin[0], *twin[2:]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 5])
def test_an_interrupt_as_a_compiled_step_is_written_keeps_the_place_in_the_data_too(steps, monkeypatch):
    optimizer, upper, lower, x, y = made(bo.SOBA, [*ROWS], True)
    twin = made(bo.SOBA, [*ROWS], False)
    for _ in range(12):
        optimizer.step(upper, lower)
    inner = compiled_steps.make

    def interrupted(writes):
        inner(writes)
        if len(writes) > 2:  # not those that rewind
            monkeypatch.setattr(compiled_steps, "make", inner)
            raise KeyboardInterrupt

    monkeypatch.setattr(compiled_steps, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.run(upper, lower, steps=steps)
    count = optimizer._run_state.steps
    assert count > 12
    optimizer.step(upper, lower)
    for _ in range(count + 1):
        twin[0].step(*twin[1:3])
    torch.testing.assert_close(left(optimizer, *[lower, x, y]), left(twin[0], *twin[2:]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 5])
def test_an_interrupt_of_compiled_steps_leaves_gradients_on(steps, monkeypatch):
    """It may arrive just before gradients are switched on again."""
    optimizer, upper, lower, x, y = made(bo.SOBA, [*ROWS], True)
    twin = made(bo.SOBA, [*ROWS], False)
    for _ in range(12):
        optimizer.step(upper, lower)
    inner = torch._C._set_grad_enabled

    def interrupted(mode):
        if mode:
            monkeypatch.setattr(torch._C, "_set_grad_enabled", inner)
            raise KeyboardInterrupt
        inner(mode)

    monkeypatch.setattr(torch._C, "_set_grad_enabled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.run(upper, lower, steps=steps)
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert enabled
    optimizer.step(upper, lower)
    for _ in range(optimizer._run_state.steps):
        twin[0].step(*twin[1:3])
    torch.testing.assert_close(left(optimizer, *[lower, x, y]), left(twin[0], *twin[2:]), rtol=1e-12, atol=1e-12)

"""Ctrl-C while a step is traced, and several threads that trace at once."""

import signal
import threading

import pytest
import torch
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_compiling

import bilevel_optim as bo


class Interrupted(bo.AID):
    """Is interrupted in the midst of a trace, so many times."""

    times, went_on = 1, 0

    def estimate(self, oracle, given):
        if is_compiling():
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
                self.went_on += 1
        return super().estimate(oracle, given)


@pytest.fixture(autouse=True)
def _interrupts():
    """As in a terminal: what a shell runs in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def made(cls=bo.AID, start=0.3, captured=True):
    x, y = (torch.full((3,), value, requires_grad=True) for value in (start, 0.1))
    optimizer = cls([x], [y], lr=0.05, lower_lr=0.1, lower_steps=1, linear_steps=2)
    if captured:
        optimizer.compile(backend="eager", fullgraph=True)
    return optimizer, (lambda: y.square().sum() + y.sum(), lambda: (y - x).square().sum()), x, y


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_waits_until_a_trace_is_made(times, monkeypatch):
    """A second one does not; neither leaves a mode on, and the step has not been made."""
    monkeypatch.setattr(Interrupted, "times", times)
    optimizer, losses, x, y = made(Interrupted)
    optimizer.step(*losses)
    before = x.clone(), y.clone()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(*losses)
    assert optimizer.went_on == 1
    assert signal.getsignal(signal.SIGINT) is handler
    assert not _len_torch_dispatch_stack()
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    monkeypatch.setattr(Interrupted, "times", 0)
    twin, others, *ends = made(captured=False)
    optimizer.run(*losses, steps=6)
    twin.run(*others, steps=7)
    assert optimizer.captured_graphs == 1
    torch.testing.assert_close([x, y], ends, rtol=1e-12, atol=1e-12)


def test_threads_that_trace_at_once_all_get_their_graphs():
    ends, errors = {}, []

    def run(k, captured):
        try:
            torch.set_default_dtype(torch.float64)
            optimizer, losses, x, y = made(start=0.1 * k, captured=captured)
            for _ in range(6):
                optimizer.step(*losses)
            assert optimizer.captured_graphs == captured
            ends[k, captured] = torch.cat([x, y]).detach()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k, True)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        run(k, False)
    assert not errors
    for k in range(4):
        torch.testing.assert_close(ends[k, True], ends[k, False], rtol=1e-12, atol=1e-12)

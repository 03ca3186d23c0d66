"""Ctrl-C while a step is compiled, and several threads that compile at once."""

import signal
import threading

import pytest
import torch
from torch._C import _len_torch_dispatch_stack

import bilevel_optim as bo


class Interrupting:
    """A backend that is interrupted a given number of times during compilation."""

    def __init__(self, times):
        self.times, self.went_on = times, 0

    def __call__(self, module, examples):
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)
            self.went_on += 1
        return module.forward


@pytest.fixture(autouse=True)
def _interrupts():
    """Enable interrupts as in a terminal; background processes of a shell ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def made(start=0.3, backend="eager", fullgraph=True):
    x, y = (torch.full((3,), value, requires_grad=True) for value in (start, 0.1))
    optimizer = bo.AID([x], [y], lr=0.05, lower_lr=0.1, lower_steps=1, linear_steps=2)
    if backend is not None:
        optimizer.compile(backend=backend, fullgraph=fullgraph)
    return optimizer, (lambda: y.square().sum() + y.sum(), lambda: (y - x).square().sum()), x, y


@pytest.mark.usually("1")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_waits_until_a_step_is_compiled(times):
    """A second interrupt does not wait; neither leaves a mode on, and the step is not made."""
    backend = Interrupting(times)
    optimizer, losses, x, y = made(backend=backend)
    optimizer.step(*losses)
    before = x.clone(), y.clone()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(*losses)
    assert backend.went_on == 1
    assert signal.getsignal(signal.SIGINT) is handler
    assert not _len_torch_dispatch_stack()
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    backend.times = 0
    twin, others, *ends = made(backend=None)
    optimizer.run(*losses, steps=6)
    twin.run(*others, steps=7)
    assert optimizer.captured_graphs == 1
    torch.testing.assert_close([x, y], ends, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
def test_threads_that_compile_at_once_end_where_eager_ones_do():
    """Steps may be compiled or eager, because torch's tracer may reject the actions of other threads."""
    ends, errors = {}, []

    def run(k, captured):
        try:
            torch.set_default_dtype(torch.float64)
            optimizer, losses, x, y = made(0.1 * k, "eager" if captured else None, fullgraph=False)
            for _ in range(6):
                optimizer.step(*losses)
            ends[k, captured] = torch.cat([x, y]).detach()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k, True)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(2):
        run(k, False)
    assert not errors
    for k in range(2):
        torch.testing.assert_close(ends[k, True], ends[k, False], rtol=1e-12, atol=1e-12)

"""Threads share the state that Python and torch keep for the process."""

import sys
import threading
import time
import warnings

import pytest
import torch
from torch import nn

import bilevel_optim as bo
from bilevel_optim.optimizer.transaction import Turn


@pytest.mark.parametrize("method", ["SOBA", "F2SA"])
def test_warnings_are_filtered_as_before(method):
    """Steps that overlap leave the filters of the process as they were."""

    def steps(wait):
        time.sleep(wait)
        net, x = nn.Linear(2, 1), torch.zeros(1, requires_grad=True)
        given = {"lower_steps": 1} if method == "F2SA" else {}
        optimizer = getattr(bo, method)([x], list(net.parameters()), lr=0.1, lower_lr=0.1, **given)

        def lower():
            time.sleep(0.01)
            return net(torch.ones(3, 2)).square().mean() + x.exp().sum() * net.weight.square().sum()

        for _ in range(2):
            optimizer.step(lambda: net(torch.ones(1, 2)).sum(), lower)

    steps(0)  # permanent filters
    before = [*warnings.filters]
    threads = [threading.Thread(target=steps, args=(0.003 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


def test_steps_are_compiled_and_used_within_the_first_step_of_another_thread():
    """That has hooks for all modules of the process, which a trace sees, and later steps do not."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        net, x = nn.Linear(2, 1), torch.zeros(1, requires_grad=True)

        def lower():
            inside.set()
            assert leave.wait(20)
            return net(torch.ones(3, 2)).square().mean() + x.exp().sum() * net.weight.square().sum()

        # The check of derivatives would call the loss, which waits, several times.
        optimizer = bo.SOBA([x], net.parameters(), lr=0.1, lower_lr=0.1, check_derivatives=False)
        optimizer.step(lambda: net(torch.ones(1, 2)).sum(), lower)

    def made():
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), torch.zeros(1, requires_grad=True)
        optimizer, rows = bo.SOBA([x], net.parameters(), lr=0.01, lower_lr=0.01), torch.randn(5, 2)

        def step():
            optimizer.step(
                lambda: net(rows).square().sum(),
                lambda: (net(rows) - 1).square().mean() + x.exp().sum() * net[2].weight.square().sum(),
            )

        return optimizer, step, [x, *net.state_dict().values()]

    (optimizer, step, values), (_, eager, expected) = made(), made()
    optimizer.compile(backend="eager")
    step()
    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    for _ in range(3):
        step()
    seen = optimizer.captured_graphs
    leave.set()
    thread.join()
    for _ in range(3):
        step()
    assert "compile_fallback" not in optimizer.diagnostics
    assert seen == 1
    assert optimizer.captured_graphs <= 2
    for _ in range(7):
        eager()
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("verb", ["step", "backward", "propose", "adapt", "run"])
def test_one_optimizer_makes_one_step_at_a_time(verb):
    """Two steps at once would write into the same tensors; the second is refused, and the first is not disturbed."""
    (x, y), inside, leave = (torch.zeros(3, requires_grad=True) for _ in range(2)), threading.Event(), threading.Event()
    optimizer, waits, told = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1), False, []

    def upper():
        return (y - 1).square().sum()

    def lower(batch=None):
        if waits:
            inside.set()
            assert leave.wait(20)
        return (y - x - 1).square().sum()

    if verb == "run":
        optimizer.compile(backend="eager")
    optimizer.step(upper, lower)
    twin = [t.detach().clone() for t in (x, y)]
    other = bo.SOBA([u.requires_grad_() for u in twin[:1]], [twin[1].requires_grad_()], lr=0.1, lower_lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    waits = True
    first = threading.Thread(target=optimizer.step, args=(upper, lower))
    first.start()
    assert inside.wait(20)
    waits = False
    calls = {
        "adapt": lambda: optimizer.adapt(lower, steps=1),
        "run": lambda: optimizer.run(upper, lower, steps=3),
    }
    try:
        calls.get(verb, lambda: getattr(optimizer, verb)(upper, lower))()
    except RuntimeError as error:
        told.append(str(error))
    finally:
        leave.set()
        first.join()
    assert told
    assert told[0].startswith("another thread is making a step with this optimizer")
    other.step(lambda: (twin[1] - 1).square().sum(), lambda: (twin[1] - twin[0] - 1).square().sum())
    assert torch.equal(x, twin[0])
    assert torch.equal(y, twin[1])
    optimizer.step(upper, lower)  # its turn again
    assert not torch.equal(x, twin[0])


def test_an_interrupt_at_the_border_of_a_step_leaves_no_turn_taken():
    """At each instruction of the entry and the exit: then another thread makes a step, and this one again."""
    borders, n, interrupted = {Turn.__enter__.__code__, Turn.__exit__.__code__}, 0, True
    while interrupted:
        x, y = (torch.zeros(3, requires_grad=True) for _ in range(2))
        optimizer, left, told = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1), n, []

        def step(x=x, y=y, optimizer=optimizer, told=told):
            try:
                optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x - 1).square().sum())
            except RuntimeError as error:
                told.append(error)

        def trace(frame, event, _):
            nonlocal left
            if frame.f_code not in borders:
                return trace if frame.f_code.co_name in {"step", "_make_step"} else None
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left == -1:
                raise KeyboardInterrupt
            return trace

        before, interrupted = sys.gettrace(), False
        sys.settrace(trace)
        try:
            step()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        for _ in range(2):
            other = threading.Thread(target=step)
            other.start()
            other.join()
            step()
        assert not told
        n += 1
    assert n > 20

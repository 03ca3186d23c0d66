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


def compiled_in_first_step_of_another(before, after):
    """Make compiled steps while the first step of another thread is inside its lower loss."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        net, x = nn.Linear(2, 1), torch.zeros(1, requires_grad=True)

        def lower():
            inside.set()
            leave.wait(3)
            return net(torch.ones(3, 2)).square().mean() + x.exp().sum() * net.weight.square().sum()

        # The check of derivatives would call the loss, which waits, several times.
        optimizer = bo.SOBA([x], list(net.parameters()), lr=0.1, lower_lr=0.1, check_derivatives=False)
        optimizer.step(lambda: net(torch.ones(1, 2)).sum(), lower)

    thread = threading.Thread(target=other)

    def leaves_before_guards(graph, examples):
        leave.set()
        thread.join(3)
        return graph.forward

    net, x = nn.Linear(2, 1), torch.zeros(1, requires_grad=True)
    optimizer = bo.SOBA([x], list(net.parameters()), lr=0.1, lower_lr=0.1)
    optimizer.compile(backend=leaves_before_guards if after == 2 else "eager")

    def step():
        optimizer.step(
            lambda: net(torch.ones(1, 2)).square().sum(),
            lambda: net(torch.ones(3, 2)).square().mean() + x.exp().sum() * net.weight.square().sum(),
        )

    for _ in range(before):
        step()
    thread.start()
    inside.wait()
    for _ in range(after):
        step()
    leave.set()
    thread.join()
    return optimizer


def test_nothing_is_traced_under_the_hooks_of_another_thread():
    """The first steps of another thread have hooks for all modules, which a trace would miss later."""
    optimizer = compiled_in_first_step_of_another(before=1, after=2)
    assert "compile_fallback" not in optimizer.diagnostics
    assert optimizer.captured_graphs == 1


def test_the_hooks_of_another_thread_make_no_new_graphs():
    """Graphs stay in use while another thread makes its first step."""
    optimizer = compiled_in_first_step_of_another(before=3, after=12)
    assert "compile_fallback" not in optimizer.diagnostics
    assert optimizer.captured_graphs == 1


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

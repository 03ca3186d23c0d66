"""Without tasks, ``lower_init`` says where each lower solve starts."""

from functools import partial

import pytest
import torch

import bilevel_optim as bo

A = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
MOMENTUM = partial(torch.optim.SGD, momentum=0.9)
CASES = [
    (bo.AID, {"lower_steps": 3}),
    (bo.AID, {"lower_steps": 3, "lower_lr": 0.05, "lower_optimizer": MOMENTUM}),
    (bo.ITD, {"lower_steps": 3, "lower_lr": 0.05, "lower_optimizer": MOMENTUM}),
    (bo.ITD, {"lower_steps": 3, "warm_start": False}),
    (bo.F2SA, {"lower_steps": 3}),
    (bo.SOBA, {}),
]


def problem(method, **options):
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = method([x], [y], lr=0.05, **options)
    return optimizer, x, y, (lambda: (y - 1).square().sum() / 2, lambda: (y @ A @ y) / 2 - y @ x)


def drawn():
    generator = torch.Generator().manual_seed(3)
    return lambda: torch.randn(2, generator=generator)


def ended(method, options, init, advance, **more):
    optimizer, x, y, losses = problem(method, **options, **more)
    advance(optimizer, y, losses, init)
    return torch.cat([x, y]).detach()


def by_hand(optimizer, y, losses, init):
    """Write the start, and forget the momentum of the last solve."""
    optimizer.warm_start = True
    for _ in range(16):
        with torch.no_grad():
            y.copy_(init())
        optimizer.state[y].pop("lower_optimizer.momentum_buffer", None)
        optimizer.step(*losses)


def by_steps(optimizer, y, losses, init):
    for _ in range(16):
        optimizer.step(*losses)


def compiled(optimizer, y, losses, init):
    optimizer.compile(backend="eager")
    by_steps(optimizer, y, losses, init)
    assert optimizer.diagnostics.get("compile_fallback") is None
    assert optimizer.captured_graphs > 0


def compiled_run(optimizer, y, losses, init):
    optimizer.compile(backend="eager")
    for _ in range(2):  # the first makes the graphs
        optimizer.run(*losses, steps=8)


@pytest.mark.parametrize(("method", "options"), CASES)
def test_each_solve_starts_there(method, options):
    expected = ended(method, options, drawn(), by_hand)
    found = ended(method, options, None, by_steps, lower_init=drawn())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    other = ended(method, options, None, by_steps)
    assert (other - expected).norm() > 1e-3


@pytest.mark.slow  # as the next one, which has AID, and as the starts of tasks in tests/compiled/test_losses.py
@pytest.mark.parametrize("advance", [compiled, compiled_run])
def test_compiled_solves_start_there(advance):
    method, options = CASES[1]
    expected = ended(method, options, None, by_steps, lower_init=drawn())
    found = ended(method, options, None, advance, lower_init=drawn())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_step_that_fails_leaves_y_and_what_was_drawn():
    optimizer, x, y, (upper, _) = problem(bo.AID, lower_steps=3, lower_init=lambda: torch.randn(2))
    before = torch.get_rng_state()
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(upper, lambda: (y * x * torch.nan).sum())
    assert y.tolist() == [0, 0]
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_refused_over_ranks(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        optimizer, _, _, losses = problem(bo.AID, lower_steps=3, lower_init=drawn(), process_group=group)
        with pytest.raises(ValueError, match="lower_init= without tasks is not for several processes"):
            optimizer.step(*losses)
    finally:
        torch.distributed.destroy_process_group()


def test_a_proposal_starts_there_too_and_leaves_y():
    optimizer, _, y, losses = problem(bo.ITD, lower_steps=3, lower_lr=0.05, lower_init=lambda: torch.ones(2))
    proposed = optimizer.propose(*losses)
    assert y.tolist() == [0, 0]
    optimizer.step(*losses)
    torch.testing.assert_close(y, proposed.lower[0])


@pytest.mark.parametrize(("value", "answer"), [(torch.ones(3), r"shape \(2,\) for lower parameter"), ([], "1 tensors")])
def test_a_start_of_another_form(value, answer):
    optimizer, _, _, losses = problem(bo.AID, lower_steps=3, lower_init=lambda: value)
    with pytest.raises(ValueError, match=rf"lower_init must return .*{answer}"):
        optimizer.step(*losses)


def test_steps_that_follow_each_other_start_there():
    """With lists of batches a compiled run would make many steps before anything of the user's is called."""

    def ended(advance):
        x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
        optimizer = bo.AID([x], [y], lr=0.05, lower_lr=0.05, lower_steps=1, linear_steps=5, lower_init=drawn())
        upper = bo.Objective(lambda target: (y - target).square().sum() / 2, [torch.ones(2)] * 8)
        lower = bo.Objective(lambda one: (y @ A @ y) / 2 - y @ (x * one), [torch.ones(2)] * 8)
        advance(optimizer, y, (upper, lower), None)
        return x.detach()

    torch.testing.assert_close(ended(compiled_run), ended(by_steps))

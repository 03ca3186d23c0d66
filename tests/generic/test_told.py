"""What goes wrong with x is told once: a loss that grows, a run that has diverged, an update made twice."""

import warnings

import pytest
import torch

import bilevel_optim as bo

from ..problems import Quadratic

STEPS = {"AID": {"lower_steps": 5}, "ITD": {"lower_steps": 5}, "F2SA": {"lower_steps": 1, "normalize": False},
         "SOBA": {}, "FSLA": {}, "StocBiO": {"lower_steps": 1}, "FirstOrder": {"lower_steps": 1}}  # fmt: skip


def made(name, lr, **options):
    problem = Quadratic(6, 3, 5.0)
    y = problem.y[0]
    f = lambda: (y - 1).square().sum() + problem.x[0].square().sum()  # noqa: E731
    optimizer = getattr(bo, name)(problem.x, problem.y, lr=lr, **STEPS[name], **options)
    return optimizer, f, problem.lower


def repeated(optimizer, f, g, steps):
    for _ in range(steps):
        optimizer.step(f, g)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["AID", "SOBA"])
def test_a_loss_that_grows_is_told_once_and_then_why_it_ends(name, compiled):
    optimizer, f, g = made(name, 30.0)
    if compiled:
        optimizer.compile(backend="eager")
    with pytest.warns(
        bo.BilevelWarning, match=r"the upper loss has grown from .* diverges\. Take a smaller lr"
    ) as told:
        repeated(optimizer, f, g, 6)
    assert len([one for one in told if "has grown from" in str(one.message)]) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(bo.NonFiniteError, match=r"The run has diverged: the upper loss has grown"):
            repeated(optimizer, f, g, 600)


@pytest.mark.parametrize("name", STEPS)
def test_every_method_tells_of_a_rate_that_is_too_large(name):
    optimizer, f, g = made(name, 100.0)
    with pytest.warns(bo.BilevelWarning, match="the upper loss has grown"):
        repeated(optimizer, f, g, 20)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", STEPS)
def test_nothing_is_told_of_a_run_that_goes_well(name):
    """Also with losses that are noisy, change their sign or end near zero."""
    optimizer, f, g = made(name, 0.01)
    noise = torch.Generator().manual_seed(0)
    for shift in (0.0, -3.0):
        for _ in range(40):
            factor = 1 + torch.rand((), generator=noise) * 2
            optimizer.step(lambda factor=factor, shift=shift: f() * factor + shift, g)


def test_in_a_run_of_many_steps_too():
    optimizer, f, g = made("SOBA", 30.0)
    optimizer.compile(backend="eager")
    with pytest.warns(bo.BilevelWarning, match="the upper loss has grown"):
        optimizer.run(f, g, steps=8)


def test_an_update_that_is_made_twice_is_told():
    optimizer, f, g = made("AID", 0.01)
    adam = torch.optim.Adam(optimizer.parameters("upper"), lr=0.01)
    optimizer.backward(f, g)
    torch.nn.utils.clip_grad_norm_(optimizer.parameters("upper"), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.step()  # along the same .grad once more
        optimizer.backward(f, g)
        adam.step()
        optimizer.backward(f, g)
        adam.step()
    with pytest.warns(bo.BilevelWarning, match=r"x has changed between backward\(\) and step\(\)"):
        optimizer.step()

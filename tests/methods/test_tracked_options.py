"""Options of tracked methods that are assigned between steps."""

from __future__ import annotations

import io

import numpy
import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.optimizer.checkpoint import OWN


def _end(cls, name, values, compiled=False):
    """Return x after six steps; the option has the second value from the fourth step on."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(5)]
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = cls([x], [y], lr=0.1, lower_lr=0.1, **{name: values[0]})
    if compiled:
        optimizer.compile(backend="eager")
    upper = bo.Objective(lambda e: (y - 1 + e).square().sum() / 2, batches)
    lower = bo.Objective(lambda e: ((1 + e / 4) * (y - x).square()).sum() / 2, batches)
    for k in range(6):
        if k == 3:
            setattr(optimizer, name, values[1])
        optimizer.step(upper, lower)
    return x.detach().clone()


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cls", [bo.SVRB, bo.STABLE])
def test_an_assigned_floor_counts(cls, compiled):
    kept = _end(cls, "floor", (0.1, 0.1), compiled)
    raised = _end(cls, "floor", (0.1, 3.0), compiled)
    assert float((raised - kept).abs().max()) > 1e-3
    assert torch.allclose(raised, _end(cls, "floor", (0.1, 3.0)), rtol=1e-12)


@pytest.mark.parametrize("cls", [bo.SVRB, bo.STABLE])
def test_a_number_may_be_assigned_to_beta(cls):
    names = ("V", "H") if cls is bo.STABLE else ("u", "v", "V", "H", "w", "d")
    expected = _end(cls, "beta", (0.1, dict.fromkeys((*names,), 0.7)))
    assert torch.equal(_end(cls, "beta", (0.1, 0.7)), expected)


def test_an_assigned_floor_is_checked():
    x, y = (torch.zeros(2, requires_grad=True) for _ in range(2))
    optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.1)
    with pytest.raises(ValueError, match="Invalid floor value: -1"):
        optimizer.floor = -1
    assert optimizer.floor == 1e-3


@pytest.mark.parametrize("beta", [0.3, {"u": numpy.float64(0.3), "v": 0.3, "V": 0.3, "H": 0.3, "w": 0.2, "d": 0.1}])
def test_an_assigned_beta_and_floor_are_saved(beta):
    """As with SUSTAIN and MRBO; a resumed run went on with the arguments of the constructor, without a word."""
    runs = []
    for resumed in (False, True):
        x, y = torch.tensor([2.0, 1.0], requires_grad=True), torch.zeros(2, requires_grad=True)
        generator = torch.Generator().manual_seed(0)

        def step(optimizer, x=x, y=y, generator=generator):
            noise = torch.randn(2, generator=generator)
            optimizer.step(lambda: (y - 1 + noise).square().sum() / 2, lambda: (y - x).square().sum() / 2)

        optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.3)
        step(optimizer)
        optimizer.beta, optimizer.floor = beta, 0.5
        step(optimizer)
        if resumed:
            state, optimizer = optimizer.state_dict(), bo.SVRB([x], [y], lr=0.1, lower_lr=0.3, beta=0.9, floor=0.1)
            optimizer.load_state_dict(state)
            assert optimizer.floor == 0.5
        step(optimizer)
        step(optimizer)
        runs.append((x.detach().clone(), y.detach().clone()))
    assert all(map(torch.equal, *runs))


def test_a_state_dict_without_them_keeps_those_of_the_constructor():
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.3, beta=0.2, floor=0.5)
    state = bo.SVRB([x], [y], lr=0.1, lower_lr=0.3).state_dict()
    own = torch.load(io.BytesIO(state["param_groups"][0][OWN]), weights_only=True)
    own["options"] = {}
    written = io.BytesIO()
    torch.save(own, written)
    state["param_groups"][0][OWN] = written.getvalue()
    with pytest.warns(bo.BilevelWarning, match="does not hold beta and floor"):
        optimizer.load_state_dict(state)
    assert ({*optimizer.beta.values()}, optimizer.floor) == ({0.2}, 0.5)


@pytest.mark.parametrize("cls", [bo.STABLE, bo.RSVRB, bo.BSVRB])
def test_the_same_of_the_relatives(cls):
    def made(**options):
        x, y = torch.zeros(2, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
        return cls([x], [y], lr=0.1, lower_lr=0.1, **options)

    optimizer, other = made(), made(beta=0.2, floor=0.2)
    optimizer.beta, optimizer.floor = 0.4, 0.5
    other.load_state_dict(optimizer.state_dict())
    assert other._weights == optimizer._weights
    assert other.floor == 0.5

"""Options of tracked methods that are assigned between steps."""

from __future__ import annotations

import pytest
import torch

import bilevel_optim as bo


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

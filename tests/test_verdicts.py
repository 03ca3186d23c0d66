"""Verdicts of `check_hypergradient` on planted faults, for five methods, and on the same problems without them."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import bilevel_optim as bo

from .problems import seeded

METHODS = {
    "AID": partial(bo.AID, lower_steps=60, linear_steps=12),
    "ITD": partial(bo.ITD, lower_steps=60),
    "F2SA": partial(bo.F2SA, lower_steps=80, order=2, nu=1e-3),
    "PZOBO": partial(bo.PZOBO, lower_steps=60, directions=4),
    "SOBA": bo.SOBA,
}
CALLS = itertools.count()


class Wrong(torch.autograd.Function):
    """The identity with a wrong derivative."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.5 * grad


def problem(fault):
    """Two losses on three upper and three lower variables; a fault of "" is none."""
    A = torch.randn(3, 3, generator=seeded(1)) / 2
    x, y = torch.full((3,), 0.4).requires_grad_(), torch.zeros(3, requires_grad=True)
    rows, norm = torch.randn(6, 3, generator=seeded(2)), nn.BatchNorm1d(3, affine=False)

    def upper():
        seen = Wrong.apply(x) if fault == "wrong backward in f" else x
        return (y - 1).square().sum() / 2 + seen.square().sum() + (0.2 * x.sum().item() if fault == "item in f" else 0)

    def lower():
        seen, part = x, y
        if fault == "x detached in g":
            seen = x.detach()
        elif fault == "item in g":
            seen = x * x[0].item()
        elif fault == "wrong backward in g":
            seen = Wrong.apply(x)
        elif fault == "y detached in a penalty":
            part = y.detach()
        loss = (y - A @ seen).square().sum() / 2 + 0.2 * (y * part).sum() + 1e-3 * (x * y).sum()
        if fault == "noise of its own":
            loss = loss + 0.01 * torch.randn((), generator=GENERATOR) * y.sum()
        elif fault == "calls counted":
            loss = loss * (1 + 1e-3 * next(CALLS))
        elif fault == "unsolved":
            loss = -(y[0] ** 4) + loss * torch.tensor(0.0) + 1e-12 * (y[1:] * x[1:]).square().sum()
        elif fault == "kink":
            loss = loss + 0.3 * (x - 0.4).relu().sum() * y.sum()
        elif fault == "batch norm":
            loss = loss + 0.1 * (norm(rows * (1 + x)) @ y).square().mean()
        elif fault == "dropout":
            loss = loss + 0.1 * (nn.functional.dropout(rows, 0.3) @ y).square().mean()
        return loss

    return upper, lower, x, y


GENERATOR = torch.Generator().manual_seed(0)
WRONG = {
    "x detached in g": "the lower loss's derivative in x|the lower loss's second derivative in y and x",
    "item in g": "the lower loss's derivative in x|the lower loss's second derivative in y and x",
    "item in f": "the upper loss's derivative in x",
    "wrong backward in g": "the lower loss's derivative in x|the lower loss's second derivative in y and x",
    "wrong backward in f": "the upper loss's derivative in x",
    "y detached in a penalty": "the lower loss's (second )?derivative in y",
    "noise of its own": "the lower loss is .* and then",
    "calls counted": "the lower loss is .* and then",
    "unsolved": "there is no reference",
}
RIGHT = ["", "kink", "batch norm", "dropout"]
# PZOBO takes no derivative of g in x, so that these are none of its faults.
NOT_ITS = {("x detached in g", "PZOBO"), ("item in g", "PZOBO"), ("wrong backward in g", "PZOBO")}


def table(faults):
    """Faults and methods; some pairs, which tell the least that is new or take the longest, at full size only."""
    slow = {"ITD", "PZOBO"}
    return [
        pytest.param(f, m, marks=[pytest.mark.slow] if m in slow or (f == "dropout" and m != "SOBA") else [])
        for f in faults
        for m in METHODS
    ]


def verdict(fault, method, **options):
    """The report, or the error."""
    upper, lower, x, y = problem(fault)
    optimizer = METHODS[method]([x], [y], lr=0.0, lower_lr=0.4, check_derivatives=False)
    if method == "SOBA" and fault != "unsolved":
        optimizer.run(upper, lower, steps=200)  # a single loop settles first
    try:
        return bo.check_hypergradient(optimizer, upper, lower, rtol=2e-2, repeats=8, **options)
    except bo.GradcheckError as error:
        return error


@pytest.mark.few(11)
@pytest.mark.parametrize(("fault", "method"), table(WRONG))
def test_a_fault_is_named(fault, method):
    found = verdict(fault, method)
    if (fault, method) in NOT_ITS:
        assert found.verdict != "biased"
        assert found.reference == "differences"
    else:
        with pytest.raises(bo.GradcheckError, match=WRONG[fault]):
            raise found


@pytest.mark.few(4)
@pytest.mark.parametrize(("fault", "method"), table(RIGHT))
def test_correct_parts_are_not_blamed(fault, method):
    report = verdict(fault, method)
    assert not isinstance(report, Exception), report
    assert report.verdict == "right" or (report.verdict == "inconclusive" and len(report.advice) > 60)
    if fault in ("", "batch norm") and method != "PZOBO":  # whose directions are random
        assert report.verdict == "right"


@pytest.mark.parametrize(("fault", "method"), table(["", "x detached in g", "wrong backward in f"]))
def test_time_that_ends_decides_nothing(fault, method):
    report = verdict(fault, method, max_seconds=1e-9)
    assert report.verdict == "inconclusive"
    assert "time is up" in str(report)

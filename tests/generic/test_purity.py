"""A step is a function: its results are written only at the end, wherever a loss is evaluated."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import bilevel_optim as bo
from bilevel_optim.optimizer.checkpoint import unpacked

from ..problems import close, substituted
from ..registry import each


def contents(optimizer, problem):
    """Everything that a step may write to."""
    return {
        "parameters": [t.detach().clone() for t in (*problem.x, *problem.y)],
        "gradients": [None if t.grad is None else t.grad.clone() for t in (*problem.x, *problem.y)],
        "storages": [t.data_ptr() for t in (*problem.x, *problem.y)],
        "state": optimizer.state_dict()["state"],
        "own": unpacked(optimizer.state_dict())[0],
        "diagnostics": {k: v for k, v in optimizer.diagnostics.items() if not isinstance(v, torch.Tensor)},
        "figures": [v.clone() for v in optimizer.diagnostics.values() if isinstance(v, torch.Tensor)],
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.allclose(a, b, 0, 0, True)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@each()
def test_a_proposal_writes_nothing(row, monkeypatch):
    """Nor does it rebind an attribute of the optimizer; its random numbers alone are drawn."""
    problem = row.quadratic()
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer, 2)
    before = contents(optimizer, problem)
    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer), "__setattr__", _refused)
        estimate = problem.apply(optimizer.propose)
    assert all(t.isfinite().all() for t in estimate.gradient)
    after = contents(optimizer, problem)
    for state in (before, after):
        state["own"].pop("generator")
    for name in before:
        assert equal(before[name], after[name]), name


def _refused(self, name, value):
    raise AssertionError(f"{name} is written while a step is computed")


@each(lambda row: not row.declared.random)
def test_a_proposal_is_what_the_step_does(row):
    problem = row.quadratic()
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer, 2)
    if optimizer.declared.tasks == "required":
        pytest.skip("draws its contexts from torch's default generator")
    first = problem.apply(optimizer.propose)
    problem.apply(optimizer.backward)
    for parameter, gradient in zip(problem.x, first.gradient, strict=True):
        assert torch.equal(parameter.grad, gradient)
    for parameter, value in zip(problem.y, first.lower or (), strict=False):
        assert torch.equal(parameter.detach(), value)


@each()
def test_the_core_does_not_see_how_a_loss_is_evaluated(row):
    """In the live tensors, or with others in their place in every torch call: the same numbers."""
    ends = []
    for evaluation in (None, substituted):
        torch.manual_seed(3)
        problem = row.quadratic()
        optimizer = row(problem.x, problem.y, short=True)
        if evaluation is not None:
            optimizer._oracle_options = replace(optimizer._oracle_options, evaluation=evaluation)
        problem.run(optimizer, 3)
        ends.append([t.detach().clone() for t in (*problem.x, *problem.y)])
    for a, b in zip(*ends, strict=True):
        assert torch.allclose(a, b, rtol=1e-12 + 10 * row.rounding, atol=1e-12 + 10 * row.rounding)


@pytest.mark.every_row
@pytest.mark.parametrize("tasks", [False, True])
@each(("AID", "HOZOG", "F2SA", "SOBA"))
def test_a_loss_may_take_derivatives_itself(row, tasks):
    """Also where its value is all that is needed: a pass for module buffers, a difference of values, a node of zero."""
    found = []
    for own in (False, True):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3, affine=False)
        x, w = (torch.ones(3, requires_grad=True) for _ in range(2))

        def penalty(z, own=own, w=w):
            if own:  # of |z w|^2 / 2 in w
                return (z.T @ (z @ w)).square().sum()
            (slope,) = torch.autograd.grad((z @ w).square().sum() / 2, [w], create_graph=True)
            return slope.square().sum()

        def lower(z, norm=norm, x=x, w=w, penalty=penalty):
            return penalty(norm(z)) / 100 + (w - x).square().sum() / 2

        def upper(z, x=x, w=w, penalty=penalty):
            return penalty(z) + (w + x).square().sum()

        data = torch.randn(2, 5, 3)
        optimizer = row([x], [w], short=True, **({"order": 1} if row.name == "F2SA" else {}))
        for _ in range(2):
            torch.manual_seed(1)
            if tasks:
                optimizer.step(upper, lower, tasks=bo.TensorTasks(data))
            else:
                optimizer.step(partial(upper, data[0]), partial(lower, data[1]))
        assert norm.num_batches_tracked == 2
        found.append(torch.cat([x.detach(), x.grad, w.detach(), norm.running_mean]))
    close(*found, 1e-9, 1e-9)

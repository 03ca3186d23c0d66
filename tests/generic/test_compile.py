"""Captured steps: every method makes the same steps as without, and what a graph cannot see is run eagerly."""

import warnings
from functools import partial

import torch
from torch import nn

import bilevel_optim as bo

from ..problems import seeded
from ..registry import each

STEPS, MANY = 6, 5


class Regression:
    """Ridge regression with one log-penalty for each weight, on batches; the losses count nothing."""

    def __init__(self, row, dtype=torch.float64, tasks=False, dropout=0.0):
        generator = seeded(1)
        tasks = tasks or row.declared.tasks == "required"
        self.rows = tasks and row.declared.tasks == "rows"
        rows = torch.randn(3, 12, 5, generator=generator, dtype=torch.float64)
        targets = rows @ torch.randn(5, generator=generator, dtype=torch.float64) + 0.1
        self.data = rows.to(dtype), targets.to(dtype)
        self.log_penalty = torch.full((5,), -2.0, dtype=dtype, requires_grad=True)
        start = torch.linspace(-0.5, 0.5, 5, dtype=dtype)
        self.weight = (start.expand(3, 5).clone() if self.rows else start.clone()).requires_grad_()
        self.drop = nn.Dropout(dropout)
        self.x, self.y = [self.log_penalty], [self.weight]
        if row.declared.initial:
            self.x.append(start.clone().requires_grad_())
        self.tasks = bo.TensorTasks(self.data) if tasks else None
        self.losses = self._objectives(row)

    def lower(self, batch):
        """The training loss."""
        rows, targets = batch
        error = self.drop(rows) @ self.weight - targets
        return error.square().mean() / 2 + (self.log_penalty.exp() * self.weight.square()).sum() / 2

    def upper(self, batch):
        """The validation loss."""
        rows, targets = batch
        return (rows @ self.weight - targets).square().mean() / 2 + 0.01 * self.log_penalty.square().sum()

    def saddle(self, batch):
        """One loss, convex in x and concave in y."""
        rows, targets = batch
        return (rows @ self.log_penalty - targets) @ (rows @ self.weight) / 12 - self.weight.square().sum() / 2

    def _objectives(self, row):
        losses = (self.saddle,) if row.declared.losses == 1 else (self.upper, self.lower)
        if self.tasks is not None:
            return losses
        batches = [tuple(t[i, k : k + 4] for t in self.data) for i in range(3) for k in (0, 4, 8)]
        if row.declared.data == "finite_sum":
            return tuple(bo.FiniteSum(loss, batches, generator=seeded(i)) for i, loss in enumerate(losses))
        return tuple(bo.Objective(loss, batches[i:] + batches[:i]) for i, loss in enumerate(losses))

    def optimizer(self, row, **arguments):
        options = {"period": 3} if row.name == "SRBA" else {"growth": 0.0} if row.name in ("BA", "BSA") else {}
        return row(self.x, self.y, short=True, **{**options, **arguments})

    def step(self, optimizer, steps=1):
        for _ in range(steps):
            loss = optimizer.step(*self.losses, **({} if self.tasks is None else {"tasks": self.tasks}))
        return loss

    def run(self, optimizer, steps):
        return optimizer.run(*self.losses, steps=steps, **({} if self.tasks is None else {"tasks": self.tasks}))


def close(a, b, rounding):
    return all(torch.allclose(s.detach(), t.detach(), rtol=rounding, atol=rounding) for s, t in zip(a, b, strict=True))


def pair(row, *, make=Regression, compiled=True, **arguments):
    """An eager optimizer and a captured one, each with a problem of its own."""
    both = []
    for captured in (False, True):
        problem = make(row)
        optimizer = problem.optimizer(row, **{name: value() for name, value in arguments.items()})
        if captured and compiled:
            optimizer.compile(backend="eager")
        both.append((problem, optimizer))
    return both


def compared(row, rounding=None, both=None, **arguments):
    """Steps and runs of both end at the same point; gives the captured optimizer."""
    (problem, eager), (other, captured) = both or pair(row, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        torch.manual_seed(0)
        problem.step(eager, STEPS)
        losses = torch.stack([problem.step(eager) for _ in range(MANY)])
        torch.manual_seed(0)
        other.step(captured, STEPS)
        found = other.run(captured, MANY)
    rounding = rounding or max(row.rounding * 100, 1e-10)
    assert close([losses, *problem.x, *problem.y], [found, *other.x, *other.y], rounding)
    for parameter, mine in zip(problem.x, other.x, strict=True):
        assert close([parameter.grad], [mine.grad], rounding)
        for name, value in eager.state[parameter].items():
            assert close([value], [captured.state[mine][name]], rounding), name
    assert eager.numbers == captured.numbers
    return captured


def graphs(optimizer):
    """How many graphs have been made."""
    return optimizer.captured_graphs


@each(lambda row: row.declared.tasks not in ("required",))
def test_captured_steps_are_the_eager_ones(row):
    captured = compared(row)
    declared = row.declared.uncaptured
    reason = captured.diagnostics.get("compile_fallback")
    assert (graphs(captured) == 0) == (reason is not None), reason
    assert (reason is not None) == bool(declared), reason


@each(lambda row: row.takes_tasks and row.declared.losses == 2)
def test_with_tasks(row):
    compared(row, make=partial(Regression, tasks=True), both=None)

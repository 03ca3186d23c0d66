"""A problem with a BatchNorm layer, for every method, with and without tasks; its losses can be made to fail."""

import torch
from torch import nn

import bilevel_optim as bo

from ..problems import Problem, seeded, values


class BatchNormProblem(Problem):
    """x are a bias and a penalty, y a head (or, with one loss, weights) behind a BatchNorm layer without parameters."""

    lr = 0.05

    def __init__(self, row, tasks=False, dropout=0.0):
        self.row, self.fails, self.calls = row, None, 0
        tasks = tasks or row.declared.tasks == "required"
        generator = seeded(4)
        self.X = torch.randn(3, 8, 4, generator=generator, dtype=torch.float64)
        self.t = torch.randn(3, 8, generator=generator, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, affine=False, momentum=0.5).double()
        self.body = nn.Sequential(self.norm, nn.Dropout(dropout))
        rows = row.declared.tasks == "rows" and tasks
        self.head = torch.zeros(*([3] if rows else []), 4, dtype=torch.float64, requires_grad=True)
        self.bias = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
        self.x, self.y = [self.bias], [self.head]
        if row.declared.initial:
            self.x.append(torch.zeros(4, dtype=torch.float64, requires_grad=True))
        self.tasks = bo.TensorTasks((self.X, self.t)) if tasks else None
        self.batches = [(X, t) for X, t in zip(self.X, self.t, strict=True)]
        kind = bo.FiniteSum if row.declared.data == "finite_sum" else bo.Objective
        wrapped = (lambda loss: loss) if tasks else lambda loss: kind(loss, self.batches)
        self.objectives = [wrapped(self.upper), wrapped(self.lower)][: row.declared.losses]

    losses = property(lambda self: tuple(self.objectives))

    def optimizer(self, **options):
        if self.tasks is None:
            options = {k: v for k, v in options.items() if k not in ("lower_batch", "upper_batch")}
        if self.row.declared.random or self.row.declared.tasks == "required":
            options["generator"] = seeded(2)
        return self.row(self.x, self.y, **options)

    def buffers(self):
        return values(self.norm.buffers())

    def _error(self, batch):
        X, t = batch
        return (self.body(X) + self.bias).tanh() @ self.head - t

    def _failing(self, level, loss):
        if self.fails is not None and level == self.fails[0]:
            self.fails[1] -= 1
            if self.fails[1] <= 0:
                if self.fails[2] == "raise":
                    raise KeyError("no such sample")
                return loss * float("nan")
        return loss

    def upper(self, batch):
        loss = self._error(batch).square().mean() / 2
        if len(self.objectives) == 1:
            saddle = self.bias.square().sum() + self.bias @ self.head - self.head.square().sum()
            return self._failing("lower", saddle - 0.1 * loss)
        return self._failing("upper", loss + self.bias.square().sum() / 2)

    def lower(self, batch):
        return self._failing("lower", self._error(batch).square().mean() / 2 + self.head.square().sum() / 2)

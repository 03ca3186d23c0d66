"""Each evaluation of a loss reads module buffers as they were when the step began, whatever others have moved."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel_optim as bo

from ..problems import Given, close, flat, seeded
from ..registry import each

X = torch.randn(3, 6, 4, generator=seeded(3), dtype=torch.float64)


class Running(Given):
    """g normalises by its batch, and moves the running statistics that f reads; ``still``: g moves nothing."""

    def __init__(self, row, *, still, switches):
        self.norm = nn.BatchNorm1d(4, affine=False, momentum=0.5).double()
        x = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
        y = torch.zeros(4, dtype=torch.float64, requires_grad=True)

        def read(batch):
            if switches:
                return self.norm.eval()(batch)
            return (batch - self.norm.running_mean) / (self.norm.running_var + 1e-5).sqrt()

        def upper():
            return (read((X[0] + x).tanh()) @ y - 1).square().mean() / 2 + (y - x).square().sum() / 2

        def lower():
            batch = (2 * X[1] + x).tanh() + 0.5
            normal = F.batch_norm(batch, None, None, training=True) if still else self.norm.train()(batch)
            return (normal @ (y + x) + 1).square().mean() / 2 + (y - 2 * x).square().sum() / 2

        super().__init__([x], [y], upper, lower)
        if row.declared.initial:
            self.x.append(torch.zeros(4, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("switches", [False, True])
@each(
    ("AID", "BOME", "F2SA", "F2SA-1", "F2SA-3", "ITD-checkpoint", "PZOBO", "RAHGD", "SOBA", "SVRB", "StocBiO", "iMAML")
)
def test_the_upper_loss_reads_the_buffers_with_which_the_step_began(row, switches):
    """F2SA used to evaluate both losses of a point in one block, so that f read the buffers that g had just moved."""
    ends = []
    for still in (False, True):
        problem = Running(row, still=still, switches=switches)
        optimizer = row(problem.x, problem.y, short=True, vectorize=False)
        gradients = []
        for _ in range(2):
            problem.norm.reset_running_stats()
            problem.apply(optimizer.backward)
            gradients += [t.grad.clone() for t in problem.x]
            assert int(problem.norm.num_batches_tracked) == (not still)
        ends.append(flat([*gradients, *problem.y]))
    close(*ends, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("cls", [bo.F2SA, bo.PZOBO, bo.ITD])
def test_every_task_reads_them_too(cls, vectorize):
    """In a loop, the second task used to read the buffers that the first had moved."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones((), dtype=torch.float64))

        def forward(self, values):
            before = self.scale.clone()
            if self.moves:
                self.scale += 1
            return values * before

    ends = []
    for moves in (False, True):
        module, (x, y) = Scale(), torch.full((2, 4), 0.1, dtype=torch.float64)
        module.moves = moves
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()

        def lower(batch, module=module, x=x, y=y):
            return (module(batch) @ (y + x) - 1).square().mean() + (y - x).square().sum() / 2

        def upper(batch, module=module, x=x, y=y):
            return (module(batch) @ y + 1).square().mean() + x.square().sum()

        optimizer = cls([x], [y], lr=0.1, lower_lr=0.05, lower_steps=2, vectorize=vectorize, generator=seeded())
        for _ in range(2):
            module.scale.fill_(1.0)
            optimizer.backward(upper, lower, tasks=bo.TensorTasks(X))
        ends.append(flat([x.grad, y]))
    close(*ends, atol=1e-9, rtol=1e-9)


def test_every_part_of_a_sample_reads_them_too():
    """With accumulate=."""
    ends = []
    for moves in (0.0, 1.0):
        norm = nn.BatchNorm1d(4, affine=False, momentum=moves).double()
        x, y = (torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True) for _ in range(2))

        def lower(batch, norm=norm, x=x, y=y):
            seen = (batch - norm.running_mean) @ y
            norm(batch)
            return (seen - 1).square().mean() + (y - x).square().sum() / 2

        lower = bo.Objective(lower, list(X), accumulate=3)
        optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.05, lower_steps=2, linear_steps=3)
        optimizer.backward(lambda y=y: (y - 1).square().sum(), lower)
        ends.append(flat([x.grad, y]))
    close(*ends, atol=1e-9, rtol=1e-9)


def test_the_first_check_of_features_moves_nothing():
    ends = []
    for moves in (0.0, 1.0):
        norm = nn.BatchNorm1d(4, affine=False, momentum=moves).double()
        x, y = (torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True) for _ in range(2))

        def features(batch, norm=norm, x=x):
            seen = batch - norm.running_mean + x
            norm(batch)
            return seen

        def head(part, y=y):
            return (part @ y - 1).square().mean() + y.square().sum()

        lower = bo.Objective(head, list(X), features=features)
        optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.05, lower_steps=2)
        optimizer.backward(lambda y=y: (y - 1).square().sum(), lower)
        ends.append(flat([x.grad, y]))
    close(*ends, atol=1e-9, rtol=1e-9)

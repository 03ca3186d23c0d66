"""A sample of several batches is one large batch, at the memory of a small one."""

import weakref

import pytest
import torch
from torch import nn

import bilevel_optim as bo

from ..problems import close, flat, seeded
from ..registry import each

ROWS = ("AID", "AID-differences", "AID-neumann", "ITD", "ITD-checkpoint", "F2SA", "F2SA-1", "FirstOrder", "PZOBO",
        "HOZOG", "StocBiO", "SOBA", "MRBO", "BOME", "RAHGD", "GDA")  # fmt: skip
# Here no loss is evaluated while the graph of another batch is alive.
FRUGAL = ("AID", "AID-differences", "F2SA", "F2SA-1", "FirstOrder", "StocBiO", "SOBA", "BOME", "RAHGD", "ITD")


class Alive:
    """A network that knows how many of its graphs are alive."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen, self.most = [], 0

    def __call__(self, inputs):
        self.seen = [ref for ref in self.seen if ref() is not None]
        hidden = self.net[0](inputs).tanh()
        if torch.is_grad_enabled():
            self.seen.append(weakref.ref(hidden))
            self.most = max(self.most, len(self.seen))
        return self.net[2](hidden)


def ended(row, accumulate, size, noise=0.0, **options):
    model, decay = Alive(), torch.zeros(3, requires_grad=True)
    data = torch.randn(48, 4, generator=seeded(3)).split(size)

    def lower(batch):
        weight = 1 + noise * torch.rand(len(batch)) if noise else 1.0
        fit = (weight * (model(batch[:, :3]).squeeze(1) - batch[:, 3]).square()).mean()
        return fit + sum((decay.exp()[0] + decay[1].square()) * p.square().sum() for p in model.net.parameters())

    def upper(batch):
        return (model(batch[:, :3]).squeeze(1) - batch[:, 3] - decay[2]).square().mean()

    optimizer = row([decay], model.net.parameters(), short=True, lr=0.01, lower_lr=0.01, **options)
    losses = [bo.Objective(loss, data, accumulate=accumulate) for loss in (upper, lower)][: row.declared.losses]
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.step(*losses)
    return flat([decay, *model.net.parameters()]), optimizer, model.most


@pytest.mark.few(4)
@each(ROWS)
@pytest.mark.parametrize("vectorize", [True, False])
def test_parts_of_a_batch_are_the_batch(row, vectorize):
    whole, one, _ = ended(row, 1, 12, vectorize=vectorize)
    parts, other, _ = ended(row, 3, 4, vectorize=vectorize)
    close(parts, whole, max(row.rounding, 1e-9))
    assert other.oracle_counts == one.oracle_counts


@pytest.mark.few(4)
@each(ROWS)
def test_parts_keep_their_random_numbers(row):
    whole, *_ = ended(row, 1, 12, noise=1.0)
    parts, *_ = ended(row, 3, 4, noise=1.0)  # the numbers of three parts are those of the batch
    close(parts, whole, max(row.rounding, 1e-9))


@pytest.mark.few(4)
@each(FRUGAL)
def test_one_graph_at_a_time(row):
    most = [ended(row, k, 4, vectorize=False)[2] for k in (1, 2, 4)]
    assert most[1] <= max(most[0], 2)
    assert most[2] == most[1]


def test_a_number_of_batches_of_data_is_wanted():
    for accumulate, data in ((0, [1.0]), (1.5, [1.0]), (2, None)):
        with pytest.raises(ValueError, match="Invalid accumulate value"):
            bo.Objective(lambda: None, data, accumulate=accumulate)

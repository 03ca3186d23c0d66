"""Regressions in compiled steps, found by an attack on the previous compiler."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel_optim as bo

from ..problems import seeded

ROWS = torch.randn(6, 8, 3, generator=seeded(2), dtype=torch.float64)


class Batch:
    """Says that it equals every other one, as NumPy's and some users' objects do in their ways."""

    def __init__(self, rows):
        self.rows = rows

    def __eq__(self, other):
        return True

    __hash__ = None


def both(make, steps=6, at_once=20, **options):
    """Return the final parameters of eager and compiled steps, and the compiled optimizer."""
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        x, y, upper, lower, further = make()
        optimizer = bo.SOBA([x], y, lr=0.05, lower_lr=0.05)
        if compiled:
            optimizer.compile(backend="eager", **options)
        found = [optimizer.step(upper, lower) for _ in range(steps)]
        found += optimizer.run(upper, lower, steps=at_once)
        ends.append([torch.stack(found), x.detach(), *(t.detach() for t in y), *further])
    return *ends, optimizer


def normalised():
    """The upper loss reads the statistics that the lower one moves."""
    net, head = nn.BatchNorm1d(3, affine=False, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)

    def lower(rows):
        return (head(net(rows + 1))[:, 0] - rows.sum(1)).square().mean() + x.exp() * head.weight.square().sum()

    def upper(rows):
        seen = F.batch_norm(rows, net.running_mean, net.running_var)
        return (head(seen)[:, 0] - rows.sum(1)).square().mean()

    return x, [*head.parameters()], bo.Objective(upper, [*ROWS]), bo.Objective(lower, [*ROWS]), [*net.buffers()]


def test_a_buffer_that_one_loss_writes_is_read_by_the_other():
    right, found, optimizer = both(normalised)
    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)
    assert optimizer.captured_graphs == 1


def test_batches_of_an_unknown_type_are_not_given_to_graphs():
    """A graph cannot know what they hold; these even claim to be equal."""

    def make():
        x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.5))
        data = [Batch(rows) for rows in ROWS]
        lower = bo.Objective(lambda b: (b.rows @ (y - x)).square().mean() + y.square().sum(), data)
        return x, [y], bo.Objective(lambda: (y - 1).square().sum()), lower, []

    with pytest.warns(bo.BilevelWarning, match="an object of .*Batch'>, which a graph cannot take"):
        right, found, optimizer = both(make)
    torch.testing.assert_close(found, right, rtol=0, atol=0)
    assert optimizer.captured_graphs == 0


def test_a_difference_is_found_with_buffers_too():
    """A compiler that is 0.6 % off."""

    def coarse(module, examples):
        def call(*arguments):
            with torch.no_grad():
                return [t * 1.006 if t.is_floating_point() else t for t in module(*arguments)]

        return call

    x, y, upper, lower, _ = normalised()
    optimizer = bo.SOBA([x], y, lr=0.05, lower_lr=0.05)
    optimizer.compile(backend=coarse)
    with pytest.warns(bo.BilevelWarning, match="differs from the eager one"):
        assert all(optimizer.step(upper, lower).isfinite() for _ in range(4))
    assert optimizer.captured_graphs == 0


def test_batches_are_freed():
    """A compiled step keeps the structure of its inputs, not the batch."""
    x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.5))
    data = [rows.clone() for rows in ROWS]
    optimizer = bo.SOBA([x], [y], lr=0.05, lower_lr=0.05)
    optimizer.compile(backend="eager", fullgraph=True)

    def lower(rows):
        return (rows @ (y - x)).square().mean() + y.square().sum()

    def upper():
        return (y - 1).square().sum()

    for _ in range(4):
        optimizer.step(upper, bo.Objective(lower, data))
    optimizer.run(upper, bo.Objective(lower, data), steps=20)
    kept = [weakref.ref(rows) for rows in data]
    del data
    gc.collect()
    assert not [one for one in kept if one() is not None]
    assert optimizer.captured_graphs == 1


@pytest.mark.slow
def test_batches_with_texts_are_eager_after_a_few():
    """Each text is a constant of a graph of its own."""
    x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.5))
    data = [(ROWS[k % 6], f"line {k}") for k in range(40)]
    optimizer = bo.SOBA([x], [y], lr=0.05, lower_lr=0.05)
    optimizer.compile(backend="eager")
    lower = bo.Objective(lambda b: (b[0] @ (y - x)).square().mean() * len(b[1]) + y.square().sum(), data)
    with pytest.warns(bo.BilevelWarning, match="16 graphs, and none is for data of these shapes and constants"):
        assert all(optimizer.step(lambda: (y - 1).square().sum(), lower).isfinite() for _ in range(40))
    assert optimizer.captured_graphs <= 16


def test_anomaly_detection_is_named():
    """The reason used to be that a loss reads a value."""
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2)
    optimizer.compile(backend="eager")
    losses = lambda: (y - 1).square().sum(), lambda: (y - x).square().sum()
    with torch.autograd.set_detect_anomaly(True):
        optimizer.step(*losses)
        with pytest.warns(bo.BilevelWarning, match="anomaly detection is on"):
            optimizer.step(*losses)

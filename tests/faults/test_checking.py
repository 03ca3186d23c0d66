"""What `check_hypergradient` said that was not so, and what it and `suggest` moved."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import bilevel_optim as bo

from ..problems import seeded


class Drawing:
    """Data that draw from Python's and NumPy's random numbers."""

    def __iter__(self):
        for _ in range(3):
            yield torch.tensor(random.random() + np.random.rand())  # noqa: NPY002


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return float(i)


@pytest.mark.parametrize("drawn", [0, 2])
@pytest.mark.parametrize("tool", ["check", "suggest"])
def test_loaders_with_persistent_workers_stay_where_they_are(tool, drawn):
    """Their only iterator starts again with every `iter`."""
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)

    def made():
        loader = DataLoader(Rows(), 1, shuffle=True, num_workers=1, persistent_workers=True, generator=seeded(3))
        return bo.Objective(lambda c: (y - x).square().sum() + (c * y).sum(), loader)

    lower, twin = made(), made()
    for objective in (lower, twin):
        for _ in range(drawn):
            objective.draw()
    if tool == "check":
        optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.3, lower_steps=30)
        bo.check_hypergradient(optimizer, lambda: y.square().sum(), lower, rtol=1e3, repeats=2)
    else:
        bo.suggest([x], [y], lambda: y.square().sum(), lower)
    ahead, expected = ([float(o.draw().batch) for _ in range(8)] for o in (lower, twin))
    assert ahead == expected


def test_suggest_moves_no_random_numbers():
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    lower = bo.Objective(lambda c: (y - x).square().sum() + (c * y).sum(), Drawing())
    before, arrays, torchs = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    bo.suggest([x], [y], lambda: y.square().sum(), lower)
    assert random.getstate() == before
    assert (np.random.get_state()[1] == arrays).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torchs)

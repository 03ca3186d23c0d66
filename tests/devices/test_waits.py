"""Number of times that a step waits for the device, and its copies there."""

import pytest
import torch

import bilevel_optim as bo

from ..registry import ROWS, each
from .problems import placed
from .simulated import watch
from .waits import WAYS, counted, in_docs

IN_DOCS = in_docs()


def test_every_row_is_in_the_table():
    assert {*IN_DOCS} == {row.name for row in ROWS}


@pytest.mark.parametrize("way", WAYS)
@each()
def test_a_step_waits_as_often_as_the_table_says(row, way):
    """Made by ``python -m tests.devices.waits docs/gpu.md``; nothing is uploaded from memory that is not pinned."""
    seen, said = counted(row, way), IN_DOCS[row.name][WAYS.index(way)]
    if seen is None:
        assert not said
        return
    assert " / ".join(map(str, seen.counts)) == said, seen.report()
    assert not seen.uploads


@each(lambda row: not row.variant)
def test_one_wait_a_step(row):
    """And none without checks; but where the page says why there are more."""
    more = 1 if row.name in MORE else 0
    assert IN_DOCS[row.name][0].startswith(f"{1 + more} / 0 / ")
    seen = counted(row, "a step", check_finite=False)
    assert len(seen.reads) == more, seen.report()


# The restart test; whether x is to be perturbed; whether a matrix has to be projected.
MORE = ("PAID", "RAHGD", "PRAHGD", "RAGDA", "PRAGDA", "SVRB", "RSVRB", "STABLE", "BSVRB")


def test_a_learning_rate_on_the_device_is_not_read():
    row = next(row for row in ROWS if row.name == "AID")
    problem = placed(row.quadratic())
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=3, linear_steps=2)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=problem.x[0].device)
    problem.run(optimizer, 2)
    with watch() as seen:
        problem.run(optimizer)
    assert seen.counts == (1, 0, 0), seen.report()

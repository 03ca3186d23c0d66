"""Data that write each batch into the tensors of one before, as prefetchers do: the same steps as with new tensors."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bilevel_optim as bo

from ..problems import seeded

ROWS = torch.randn(7, 4, 3, generator=seeded(3), dtype=torch.float64)


class Refilled:
    """Batches in so many buffers in turn, each as something that holds a view of the buffer."""

    def __init__(self, buffers=1, made=lambda rows: rows):
        self.buffers, self.made = buffers, made

    def __iter__(self):
        buffers = [torch.zeros(5, 3) for _ in range(self.buffers)]
        for k, rows in enumerate(ROWS):
            yield self.made(buffers[k % self.buffers][:4].copy_(rows))


class Arrays:
    """Batches of NumPy in one buffer."""

    def __iter__(self):
        buffer = np.zeros((4, 3))
        for rows in ROWS:
            buffer[:] = rows.numpy()
            yield buffer


@dataclass(frozen=True)
class Rows:
    """A batch that is no tuple, list or dict."""

    rows: object
    name: str = ""


class OneObject:
    """Batches in one object, whose attribute is replaced."""

    def __iter__(self):
        batch = SimpleNamespace(rows=None)
        for batch.rows in ROWS:
            yield batch


def tensor_of(batch):
    while not isinstance(batch, (torch.Tensor, np.ndarray)):
        batch = {"rows": batch.rows} if hasattr(batch, "rows") else batch
        batch = batch["rows"] if isinstance(batch, dict) else batch[-1] if isinstance(batch[0], int) else batch[0]
    return torch.as_tensor(batch)


METHODS = {
    "AID": (bo.AID, {"lower_steps": 3, "linear_steps": 2}),
    "AmIGO": (bo.AmIGO, {"lower_steps": 2, "linear_steps": 3}),
    "BSA": (bo.BSA, {"lower_steps": 2, "linear_steps": 3}),
    "F2SA": (bo.F2SA, {"lower_steps": 2, "nu": 0.1}),
    "ITD": (bo.ITD, {"lower_steps": 3}),
    "MRBO": (bo.MRBO, {"linear_steps": 2}),
    "PZOBO": (bo.PZOBO, {"lower_steps": 2}),
    "SOBA": (bo.SOBA, {}),
    "StocBiO": (bo.StocBiO, {"lower_steps": 2, "linear_steps": 3}),
    "SUSTAIN": (bo.SUSTAIN, {"linear_steps": 3}),
    "TTSA": (bo.TTSA, {"linear_steps": 3}),
    "VRBO": (bo.VRBO, {"lower_steps": 2, "linear_steps": 2, "anchor_batches": 2}),
}


def ends(name, data, features=False, compiled=False, at_once=False, accumulate=1):
    """Return the parameters after some steps with such data for both losses."""
    torch.manual_seed(0)
    cls, options = METHODS[name]
    x, y = (torch.full((3,), value, requires_grad=True) for value in (0.3, 0.1))
    optimizer = cls([x], [y], lr=0.05, lower_lr=0.1, generator=seeded(7), **options)
    if compiled:
        optimizer.compile(backend="eager")

    def lower(rows):
        rows = rows if features else tensor_of(rows) * x
        return (rows @ y - 1).square().mean() + (y - x).square().sum() / 4

    part = {"features": lambda batch: tensor_of(batch) * x} if features else {}
    losses = (
        bo.Objective(lambda batch: (tensor_of(batch) @ y).square().mean() + y.sum(), data(), accumulate=accumulate),
        bo.Objective(lower, data(), accumulate=accumulate, **part),
    )
    found = [optimizer.step(*losses) for _ in range(4 if at_once else 12)]
    if at_once:
        found += optimizer.run(*losses, steps=8)
    assert not compiled or accumulate > 1 or name == "VRBO" or optimizer.diagnostics.get("compile_fallback") is None
    return torch.cat([torch.stack(found), x.detach(), y.detach()])


@pytest.mark.few(8)
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_steps_are_those_with_new_tensors(name, features):
    """A step's tensors that outlive the next draw stay unchanged."""
    expected = ends(name, lambda: [*ROWS], features)
    assert torch.equal(ends(name, Refilled, features), expected)
    assert torch.equal(ends(name, lambda: Refilled(2), features), expected)


@pytest.mark.usually("SUSTAIN-True")
@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", ["AID", "F2SA", "SUSTAIN", "SOBA"])
def test_captured_steps_are_those_with_new_tensors(name, at_once):
    expected = ends(name, lambda: [*ROWS], features=True)
    found = ends(name, Refilled, features=True, compiled=True, at_once=at_once)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "data",
    [
        lambda: Refilled(made=lambda rows: {"rows": [rows, 1]}),
        lambda: Refilled(made=lambda rows: (rows, "name")),
        lambda: Refilled(made=lambda rows: rows.detach()),
        lambda: DataLoader(TensorDataset(ROWS), batch_size=None),
        Arrays,
        lambda: Refilled(made=Rows),
        lambda: Refilled(made=lambda rows: (1, Rows([rows]))),
        OneObject,
    ],
    ids=["dict", "tuple", "view", "loader", "arrays", "dataclass", "dataclass in a tuple", "one object"],
)
@pytest.mark.parametrize("features", [False, True])
def test_batches_of_any_form(data, features):
    assert torch.equal(ends("StocBiO", data, features), ends("StocBiO", lambda: [*ROWS], features))


def test_tensors_of_a_dataclass_are_moved():
    batch = Rows([ROWS[0], None], "first")
    moved = bo.Objective(torch.sum, [batch], device="meta").draw().batch
    assert (moved.rows[0].device.type, moved.rows[1], moved.name) == ("meta", None, "first")
    assert batch.rows[0] is not moved.rows[0]
    assert batch.rows[0].device.type == "cpu"


def test_a_batch_may_refer_to_itself():
    first, second = SimpleNamespace(rows=ROWS[0]), SimpleNamespace(rows=[ROWS[1]])
    first.other, second.other = second, [first]
    moved = bo.Objective(torch.sum, [first], device="meta").draw().batch
    assert moved.other.other[0] is moved is not first
    assert moved.rows.device.type == moved.other.rows[0].device.type == "meta"
    x, y = torch.ones(3).requires_grad_(), torch.zeros(3).requires_grad_()
    lower = bo.Objective(lambda batch: (batch.other.other[0].rows.mean() * y - x).square().sum(), [first])
    bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1).step(lambda: (y - 1).square().sum(), lower)


def test_samples_of_several_batches():
    expected = ends("AID", lambda: [*ROWS], accumulate=2)
    assert torch.equal(ends("AID", Refilled, accumulate=2), expected)


def test_all_batches_of_a_pass():
    """`check_hypergradient` draws a whole pass."""
    samples = bo.Objective(torch.sum, Refilled()).samples()
    assert torch.equal(torch.stack([sample.batch for sample in samples]), ROWS)


def test_a_batch_that_does_not_change_is_copied_once_and_the_usual_ones_are_not():
    batch, loader = [ROWS[0]], DataLoader(TensorDataset(ROWS), batch_size=2)

    class Whole:
        def __iter__(self):
            yield batch

    objective = bo.Objective(torch.sum, Whole())
    first, second = objective.draw().batch, objective.draw().batch
    assert first is second
    assert first[0] is not batch[0]
    batch[0] = ROWS[1]
    assert torch.equal(objective.draw().batch[0], ROWS[1])
    drawn = iter(loader)
    usual = bo.Objective(torch.sum, loader)
    usual.draw()
    usual._iterator = iter([given := next(drawn)])
    assert usual.draw().batch is given

"""A loss that writes into its batch is refused by name at the first step, and nothing has changed then."""

from types import SimpleNamespace

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.pytree import parts_of

from ..problems import same, seeded, values
from ..registry import each

X = torch.arange(12.0, dtype=torch.float64).reshape(3, 4) / 10


def in_place(batch):
    return batch.mul_(2.0)


def by_index(batch):
    batch[0] = batch[0] + 1
    return batch


def into_a_dict(batch):
    batch["data"] = batch["data"] + 1
    return batch["data"]


def into_a_nested_dict(batch):
    return into_a_dict(batch[1]["parts"][0])


def into_an_object(batch):
    batch.data = batch.data + 1
    return batch.data


def into_its_tensor(batch):
    return batch.data.add_(1)


def problem(write, level, *, kind=bo.Objective, data=None, features=False):
    x, y = torch.ones(4, dtype=torch.float64).requires_grad_(), torch.zeros(4, dtype=torch.float64).requires_grad_()

    def upper_loss(batch):
        batch = write(batch) if level == "upper" else batch
        return ((batch @ y if torch.is_tensor(batch) else y.sum()) - 1).square().mean() + (y - x).square().sum()

    def lower_loss(batch):
        batch = write(batch) if level == "lower" else batch
        return ((batch @ y if torch.is_tensor(batch) else y.sum()) + 1).square().mean() + (y - x).square().sum()

    losses = (upper_loss, lower_loss) if kind is None else (kind(upper_loss, data), kind(lower_loss, data))
    return x, y, losses


@pytest.mark.parametrize("level", ["upper", "lower"])
@each(("AID", "F2SA", "F2SA-4-independent", "PZOBO", "SOBA", "ITD", "SABA", "BOME"))
def test_a_loss_that_writes_into_its_batch_is_refused(row, level):
    """Otherwise F2SA is 96 % off, PZOBO 250 %."""
    data = [X.clone(), X.clone() + 1]
    kind = bo.FiniteSum if row.declared.data == "finite_sum" else bo.Objective
    x, y, losses = problem(in_place, level, kind=kind, data=data)
    optimizer = row([x], [y], short=True)
    before = values([x, y], data), str(optimizer.state_dict()), [str(loss.state_dict()) for loss in losses]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"the loss {level}_loss writes into its batch .*clone"):
            optimizer.step(*losses)
        assert same(values([x, y], data), before[0])
        assert str(optimizer.state_dict()) == before[1]
        assert [str(loss.state_dict()) for loss in losses] == before[2]


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.PZOBO])
def test_the_same_holds_with_tasks(cls, vectorize):
    data = torch.stack([X, X + 1])
    before = data.clone()
    x, y, losses = problem(in_place, "lower", kind=None)
    optimizer = cls([x], [y], lr=0.1, lower_lr=0.01, lower_steps=2, vectorize=vectorize, generator=seeded())
    with pytest.raises(ValueError, match="the loss lower_loss writes into its batch"):
        optimizer.step(*losses, tasks=bo.TensorTasks(data))
    assert torch.equal(data, before)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("write", "form"),
    [
        (by_index, torch.clone),
        (into_a_dict, lambda t: {"data": t}),
        (into_a_nested_dict, lambda t: (0, {"parts": [{"data": t}]})),
        (into_an_object, lambda t: SimpleNamespace(data=t)),
        (into_its_tensor, lambda t: SimpleNamespace(data=t)),
    ],
)
def test_however_it_writes(write, form, accumulate):
    batches = [form(X.clone()) for _ in range(2)]
    x, y, losses = problem(write, "lower", data=batches)
    losses = losses[0], bo.Objective(losses[1].loss, batches, accumulate=accumulate)
    optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.01, lower_steps=2)
    with pytest.raises(ValueError, match="the loss lower_loss writes into its batch"):
        optimizer.step(*losses)
    kept = [leaf for leaf in parts_of(batches) if torch.is_tensor(leaf)]
    assert len(kept) == 2
    assert all(torch.equal(leaf, X) for leaf in kept)

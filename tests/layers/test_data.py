"""The user's data: objectives, finite sums, samplers of tasks."""

import copy
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import bilevel_optim as bo
from bilevel_optim import Objective
from bilevel_optim.problem.finite_sum import KEPT
from bilevel_optim.problem.tasks import select
from bilevel_optim.pytree import tree_leaves

from ..problems import seeded


def batches(objective, n):
    return [objective.draw().batch for _ in range(n)]


def chi_squared(counts, expected=None):
    """Over its degrees of freedom, in standard deviations."""
    expected = counts.sum() / len(counts) if expected is None else expected
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


# ---------------------------------------------------------------------------------------------------- objectives


def test_data_is_cycled_and_reshuffled():
    data = DataLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True)
    drawn = [b[0] for b in batches(Objective(torch.sum, data), 9)]
    passes = [torch.cat(drawn[i : i + 3]) for i in (0, 3, 6)]
    assert all(torch.equal(p.sort().values, torch.arange(12)) for p in passes)
    assert not torch.equal(passes[0], passes[1])


@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 8])
def test_resumes_at_its_position(own_generator, stop):
    def make():
        generator = seeded(1) if own_generator else None
        return Objective(torch.sum, DataLoader(torch.arange(12), batch_size=3, shuffle=True, generator=generator))

    objective = make()
    batches(objective, stop)
    state, random = objective.state_dict(), torch.get_rng_state()
    expected = torch.stack(batches(objective, 9))
    torch.rand(5)
    again = make()
    torch.set_rng_state(random)
    again.load_state_dict(state)
    assert torch.equal(expected, torch.stack(batches(again, 9)))


def test_empty_and_exhausted_data_are_errors():
    with pytest.raises(ValueError, match="empty"):
        Objective(torch.sum, []).draw()
    assert Objective(torch.sum, []).take(0) == []

    class Once:
        batches = iter(range(2))

        def __iter__(self):
            return self.batches

    once = Objective(torch.sum, Once())
    batches(once, 2)
    with pytest.raises(ValueError, match="exhausted"):
        once.draw()
    with pytest.raises(TypeError, match="must be iterable"):
        Objective(torch.sum, 3)
    with pytest.raises(TypeError, match="must be callable"):
        Objective(torch.zeros(2))
    with pytest.raises(TypeError, match="features must be callable"):
        Objective(torch.sum, features=3)
    assert repr(Objective(torch.sum, [1])) == "Objective(sum, data=list)"


def test_evaluations_of_one_sample_share_random_numbers():
    """The first draws are replayed, without disturbing the stream."""
    sample, device = Objective(lambda: torch.rand(3)).draw(), torch.device("cpu")
    with sample.replayed(device):
        first = sample()
    after = torch.rand(1)
    state = torch.get_rng_state()
    with sample.replayed(device):
        assert torch.equal(first, sample())
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(after, torch.rand(1))
    other = Objective(lambda: torch.rand(3)).draw()
    with other.replayed(device):
        assert not torch.equal(first, other())


@pytest.mark.parametrize("kind", ["plain", "batches", "terms", "features"])
def test_mapped_objectives_share_batch_and_random_numbers(kind):
    """A function of the loss on the draws of the same stream; the source draws on where it is."""
    y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def loss(batch=1.0):
        return (torch.rand(3) * y * batch).sum()

    data = torch.arange(1.0, 5.0)
    source = {
        "plain": lambda: Objective(loss),
        "batches": lambda: Objective(loss, list(data)),
        "terms": lambda: bo.FiniteSum(loss, data, generator=seeded()),
        "features": lambda: Objective(lambda part: (part * y).sum(), list(data), features=lambda b: torch.rand(3) * b),
    }[kind]()
    mapped, device = source.mapped(lambda value: y.square().sum() - value), torch.device("cpu")

    def value(sample, own=None):
        """With the random numbers of the sample, and of its features."""
        part = ()
        if own is not None:
            with own.replayed(device):
                part = (own(),)
        with sample.replayed(device):
            return sample(*part)

    for _ in range(2):
        sample = source.draw()
        opposite = sample.mapped(lambda value: y.square().sum() - value)
        torch.rand(7)
        first = value(sample, sample.features)
        torch.rand(7)
        torch.testing.assert_close(value(opposite, opposite.features), 14.0 - first)
        (gradient,) = torch.autograd.grad(value(opposite, opposite.features), y)
        (own,) = torch.autograd.grad(value(sample, sample.features), y)
        torch.testing.assert_close(gradient, 2 * y.detach() - own)
        assert (opposite.batch, opposite.index, opposite.features) == (sample.batch, sample.index, sample.features)
    later = source.mapped(lambda value: -value).draw()  # the mapped one first: its random numbers are the source's too
    again = later.mapped(lambda value: -2 * value)
    torch.testing.assert_close(value(again, again.features), -2 * value(later, later.features))
    if kind in ("batches", "features"):  # one stream; 1, 2 and 3 are drawn above
        assert [float(o.draw().batch) for o in (mapped, source, mapped.mapped(lambda value: value))] == [4.0, 1.0, 2.0]
        assert mapped.sample(2.0).batch == 2.0


def test_mapped_losses_that_are_no_tensors_are_reported_as_they_are():
    """The message about what a loss returned is about the loss, not about a function of it."""
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    oracle = bo.Oracle([x], [y], lambda: y.sum(), Objective(lambda: 3.0).mapped(lambda value: -value))
    with pytest.raises(ValueError, match="the lower loss must return a scalar tensor, but returned float"):
        oracle.lower(oracle.g.draw())


# ---------------------------------------------------------------------------------------------------- finite sums


def test_finite_sum():
    data = {"a": torch.arange(7.0), "b": (-torch.arange(7.0),)}
    objective = bo.FiniteSum(lambda batch: batch["a"].mean(), data, 3, generator=seeded())
    assert len(objective) == 3
    terms = [objective.term(i) for i in range(3)]
    assert [term.batch["a"].tolist() for term in terms] == [[0, 1], [2, 3], [4, 5, 6]]
    assert all(torch.equal(term.batch["a"], -term.batch["b"][0]) for term in terms)
    assert float(sum(term() for term in terms) / 3) == pytest.approx(3.0)  # the mean over the rows
    assert chi_squared(torch.tensor([objective.draw().index for _ in range(3000)]).bincount(minlength=3)) < 5
    state = objective.state_dict()
    expected = [objective.draw().index for _ in range(20)]
    objective.load_state_dict(state)
    assert [objective.draw().index for _ in range(20)] == expected
    listed = bo.FiniteSum(lambda batch: torch.tensor(float(batch)), [3, 4])
    assert (len(listed), listed.term(1).batch, listed.state_dict()) == (2, 4, {})
    assert repr(objective).endswith("3 terms)")
    assert Objective(lambda: None).draw().index is None


@pytest.mark.parametrize("data", [torch.arange(7.0), [torch.ones(1)] * 7])
def test_a_finite_sum_has_no_other_terms(data):
    objective = bo.FiniteSum(lambda batch: batch.sum(), data)
    for index in (-1, 7):
        with pytest.raises(IndexError, match=f"no term {index}: .* numbered 0 to 6"):
            objective.term(index)


def test_many_indices_of_a_finite_sum_are_as_many_draws():
    ends = []
    for together in (False, True):
        objective = bo.FiniteSum(lambda batch: batch.mean(), torch.arange(70.0), 3, generator=seeded())
        found = objective.indices(40).tolist() if together else [objective.draw().index for _ in range(40)]
        ends.append((found, objective.state_dict()["generator"].tolist()))
    assert ends[0] == ends[1]


def test_a_finite_sum_keeps_a_limited_number_of_views():
    data = torch.arange(3.0 * KEPT).unsqueeze(1)
    terms = bo.FiniteSum(lambda batch: batch.sum(), data, batch_size=1, generator=seeded(0))
    for start in range(0, len(data), 1000):
        indices = range(start, min(start + 1000, len(data)))
        assert [float(batch) for batch in terms.batches(indices)] == [*map(float, indices)]
        assert len(terms._batches) <= KEPT


def test_batches_of_a_finite_sum_are_views_of_its_present_data():
    data = {"a": torch.arange(6.0)}
    objective = bo.FiniteSum(lambda batch: batch["a"].mean(), data, 2)
    first = objective.term(1).batch["a"]
    assert objective.term(1).batch["a"] is first
    data["a"].mul_(2)
    assert objective.term(1).batch["a"].tolist() == [4, 6]
    data["a"] = -torch.arange(6.0)
    assert objective.term(1).batch["a"].tolist() == [-2, -3]
    data["a"].data = torch.ones(6)
    assert objective.term(1).batch["a"].tolist() == [1, 1]
    data["a"] = torch.ones(6, requires_grad=True)
    with torch.no_grad():
        objective.term(1)
    assert objective.term(1).batch["a"].requires_grad
    copied = copy.deepcopy(objective)
    copied.data["a"].data.zero_()
    assert copied.term(1).batch["a"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), {}, r"same number of rows in every tensor, but have \[3, 4\]"),
        ((torch.zeros(3), "text"), {}, "must be tensors with a leading dimension, or a list"),
        (torch.zeros(0, 2), {}, "are empty"),
        ([], {}, "are empty"),
        (torch.zeros(3), {"batch_size": 0}, "Invalid batch_size value: 0"),
        ([1, 2], {"batch_size": 2}, "Invalid batch_size value: 2"),
        (torch.zeros(3), {"generator": 3}, "Invalid generator value: 3"),
    ],
)
def test_finite_sum_refuses(data, options, message):
    with pytest.raises(ValueError, match=message):
        bo.FiniteSum(lambda batch: None, data, **options)


# ---------------------------------------------------------------------------------------------------- tasks


def test_task_ids_are_different_and_equally_likely():
    tasks = bo.TensorTasks(torch.zeros(7, 2))
    assert len(tasks) == 7
    for n in range(1, 8):
        ids = tasks.sample(n, seeded(n))
        assert ids.dtype == torch.int64
        assert len(set(ids.tolist())) == n
    assert sorted(tasks.sample(17, seeded()).bincount().tolist()) == [2, 2, 2, 2, 3, 3, 3]
    large, generator = bo.TensorTasks(torch.zeros(64, 1)), seeded(1)
    drawn = torch.stack([large.sample(5, generator) for _ in range(4000)])  # by rejection
    assert all(len(set(ids)) == 5 for ids in drawn.tolist())
    assert chi_squared(drawn.flatten().bincount()) < 5
    positions = torch.stack([tasks.sample(3, generator) for _ in range(3000)])
    assert all(chi_squared(column.bincount(minlength=7)) < 5 for column in positions.T)


def test_few_tasks_out_of_many_are_drawn_with_few_operations():
    """However few: one draw, and one more for those that came up twice."""

    class Counted(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    tasks = bo.TensorTasks(torch.zeros(10_000, 1))
    with Counted() as counted:
        ids = tasks.sample(1_200, seeded())
    assert len(ids.unique()) == 1_200
    assert counted.calls < 60


def test_rows_are_drawn_with_replacement_and_together():
    inputs = torch.arange(4 * 5.0).view(4, 5)
    tasks = bo.TensorTasks({"a": inputs, "b": -inputs}, inputs.unsqueeze(-1) * 2)
    ids = torch.tensor([2, 0, 2])
    batch = tasks.lower(ids, 400, seeded())
    assert batch["a"].shape == (3, 400)
    assert torch.equal(batch["a"], -batch["b"])
    for row, i in zip(batch["a"], ids, strict=True):
        assert set(row.tolist()) == set(inputs[i].tolist())
    assert not torch.equal(batch["a"][0], batch["a"][2])  # the same task twice has independent rows
    assert torch.equal(tasks.upper(ids, None, None), inputs[ids].unsqueeze(-1) * 2)
    assert torch.equal(tasks.lower(ids, 400, seeded())["a"], batch["a"])
    assert isinstance(tasks, bo.TaskSampler)
    assert repr(tasks) == "TensorTasks(4 tasks, rows: 5 lower, 5 upper)"


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        (torch.zeros(3), None, r"lower data must be tensors of shape \(tasks, rows, ...\), but got \[\(3,\)\]"),
        ((torch.zeros(3, 2), torch.zeros(3, 4)), None, r"same number of tasks and of rows.*\(3, 2\), \(3, 4\)"),
        (torch.zeros(3, 2), torch.zeros(4, 2), "lower data are of 3 tasks, but the upper data of 4"),
        (torch.zeros(3, 2), torch.zeros(3, 0), "upper data are empty: 3 tasks with 0 rows"),
        ({"a": "text"}, None, r"lower data must be tensors.*\['str'\]"),
        ({}, None, "lower data must be tensors"),
    ],
)
def test_tensor_tasks_refuses(lower, upper, message):
    with pytest.raises(ValueError, match=message):
        bo.TensorTasks(lower, upper)


class Named(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    "value",
    [
        (), [], {}, torch.zeros(1), 3, None, "text", (torch.zeros(1), [2.0, {"a": torch.ones(1), "b": (None, True)}]),
        Named(torch.zeros(1), Named(torch.ones(2), 3)), (np.zeros(2), torch.zeros(1)), torch.Size([2, 3]),
        OrderedDict(b=torch.zeros(1), a=[torch.ones(1)]), defaultdict(list, a=[torch.ones(1)]),
        deque([torch.ones(1), 2]),        (torch.nn.Parameter(torch.zeros(1)), slice(0, 2)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_leaves_are_those_of_torch(value):
    found, expected = tree_leaves(value), torch.utils._pytree.tree_leaves(value)
    assert len(found) == len(expected)
    assert all(a is b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("batch", [Named(torch.arange(3), torch.arange(6).reshape(3, 2)), (torch.arange(3), {"a": 3})])
def test_a_task_of_a_batch_has_its_form(batch):
    one = select(batch, 1)
    assert type(one) is type(batch)
    assert int(one[0]) == 1
    assert one[1] == {"a": 3} if type(batch) is tuple else one.second.tolist() == [2, 3]


def test_a_task_of_the_results_of_torch_has_their_form():
    found = select((torch.arange(6).reshape(3, 2).max(1), torch.Size([3, 2])), 1)
    assert (int(found[0].values), int(found[0].indices), tuple(found[1])) == (3, 1, (3, 2))

"""Positions in loaders: all their generators, persistent workers, copies."""

import copy
import pickle
import random
from itertools import cycle

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, StackDataset

import bilevel_optim as bo
from bilevel_optim.pytree import tree_map

from ..problems import seeded


class Noisy(Dataset):
    """Examples with noise from a generator of their own."""

    def __init__(self, source, draw):
        self.source, self._draw = source, draw

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.tensor(i + self._draw(self.source), dtype=torch.float64)


class Shuffled:
    """Data of a user's class, in their own order."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        order = [*range(6)]
        self.rng.shuffle(order)
        return iter(order)


def numbers(n=6):
    return torch.arange(float(n), dtype=torch.float64)


def uniform(generator):
    return torch.rand((), generator=generator).item()


def with_two_generators():
    data = Noisy(seeded(1), uniform)
    return DataLoader(data, 2, sampler=RandomSampler(data, generator=seeded(2)), generator=seeded(3))


def of_batch_sampler():
    return DataLoader(numbers(), batch_sampler=BatchSampler(RandomSampler(range(6), generator=seeded(1)), 2, False))


def of_the_loader_alone():
    """The order comes from torch's default generator."""
    return DataLoader(numbers(), 2, sampler=RandomSampler(range(6)), generator=seeded(1))


def with_replacement():
    return DataLoader(numbers(), 2, sampler=RandomSampler(range(6), replacement=True, generator=seeded(1)))


def of_parts():
    data = StackDataset(Noisy(seeded(1), uniform), Noisy(seeded(2), uniform))
    return DataLoader(data, 2, shuffle=True, generator=seeded(3))


LOADERS = {
    "batch sampler": of_batch_sampler,
    "two generators": with_two_generators,
    "the loader alone": of_the_loader_alone,
    "with replacement": with_replacement,
    "parts of the dataset": of_parts,
    "Python": lambda: DataLoader(Noisy(random.Random(1), random.Random.random), 2),
    "NumPy": lambda: DataLoader(Noisy(np.random.default_rng(1), np.random.Generator.normal), 2),
    "older NumPy": lambda: DataLoader(Noisy(np.random.RandomState(1), np.random.RandomState.normal), 2),
    "other data": lambda: Shuffled(random.Random(1)),
    "other data, torch": lambda: DataLoader(numbers(), 2, shuffle=True, generator=seeded(1)),
}


def drawn(objective, n):
    """Return the next batches as plain numbers."""

    def plain(leaf):
        return leaf.tolist() if torch.is_tensor(leaf) else leaf

    return [tree_map(plain, objective.draw().batch) for _ in range(n)]


@pytest.mark.few(17)
@pytest.mark.parametrize("stop", [0, 1, 3, 5])
@pytest.mark.parametrize("kind", LOADERS)
def test_data_continue_with_all_their_generators(kind, stop, tmp_path):
    """Generators of a batch sampler, of a dataset, and all but the first one are saved too."""
    torch.manual_seed(0)
    first, again = (bo.Objective(sum, LOADERS[kind]()) for _ in range(2))
    drawn(first, stop)
    torch.save((first.state_dict(), torch.get_rng_state()), tmp_path / "state.pt")
    expected = drawn(first, 8)
    torch.rand(3)
    drawn(again, 2)
    state, default = torch.load(tmp_path / "state.pt", weights_only=True)
    torch.set_rng_state(default)
    again.load_state_dict(state)
    assert drawn(again, 8) == expected


@pytest.mark.parametrize("stop", [0, 1, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_failed_step_leaves_all_generators_where_they_were(kind, stop):
    x, y = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    failing = [False]

    def loss(batch):
        if failing[0]:
            raise RuntimeError("on purpose")
        return (y - x).square().sum() + 0 * len(str(batch))

    objective, twin = (bo.Objective(loss, LOADERS[kind]()) for _ in range(2))
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=3)
    torch.manual_seed(0)
    drawn(objective, stop)
    failing[0] = True
    default = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.step(lambda: y.sum(), objective)
    assert torch.equal(default, torch.get_rng_state())
    ahead = drawn(objective, 6)
    torch.manual_seed(0)
    drawn(twin, stop)
    assert ahead == drawn(twin, 6)


def test_states_of_other_generators_are_refused_by_name():
    first = bo.Objective(sum, of_batch_sampler())
    drawn(first, 1)
    other = bo.Objective(sum, with_two_generators())
    before = str(other.state_dict())
    with pytest.raises(
        ValueError, match=r"other data: it was saved at position 1 .*batch_sampler.sampler.generator.*dataset.source"
    ):
        other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="but this Objective has no data"):
        bo.Objective(sum).load_state_dict({"position": 1, "present": {}})
    assert str(other.state_dict()) == before


# ------------------------------------------------------------------------------------------------ persistent workers


class Rows(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return float(i)


def persistent(batch_size=1, data=None, seed=3):
    data = Rows() if data is None else data
    return DataLoader(data, batch_size, shuffle=True, num_workers=1, persistent_workers=True, generator=seeded(seed))


def tensors():
    return [torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def test_one_loader_with_persistent_workers_for_both_losses_is_refused():
    """Otherwise each loss sees half of the data in a pass."""
    x, y = tensors()
    loader = persistent()
    upper = bo.Objective(lambda c: (y - 1).square().sum() + 0 * c.sum(), loader)
    lower = bo.Objective(lambda c: (y - x).square().sum() + 0 * c.sum(), loader)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    with pytest.raises(ValueError, match=r"persistent workers serve only one pass .*Create a loader for each"):
        optimizer.run(upper, lower, steps=2)


def test_one_objective_with_persistent_workers_for_both_losses_is_not():
    y = torch.ones(1, requires_grad=True)
    both = bo.Objective(lambda c: (y * c.sum()).sum(), persistent())
    assert sorted(batch for pair in (drawn(both, 3), drawn(both, 3)) for (batch,) in pair) == [*map(float, range(6))]


def test_a_loop_in_the_middle_of_a_pass_is_refused_and_after_it_is_not():
    loader = persistent()
    objective = bo.Objective(sum, loader)
    assert sorted(drawn(objective, 6)) == [[float(i)] for i in range(6)]
    assert len([*loader]) == 6
    assert len(drawn(objective, 2)) == 2
    assert len([*loader]) == 6
    for _ in range(2):
        with pytest.raises(ValueError, match="cut off after 2 batches"):
            objective.draw()


@pytest.mark.parametrize("stop", [0, 2, 6, 7])
def test_a_failed_step_in_any_pass_of_persistent_workers_is_drawn_again(stop):
    """In the first pass, other batches used to come."""
    x, y = tensors()
    failing = [False]

    def loss(c):
        if failing[0]:
            raise RuntimeError("on purpose")
        return (y - x).square().sum() + 0 * c.sum()

    objective, twin = (bo.Objective(loss, persistent()) for _ in range(2))
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2)
    drawn(objective, stop), drawn(twin, stop)
    failing[0] = True
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.step(lambda: y.sum(), objective)
    assert drawn(objective, 9) == drawn(twin, 9)


@pytest.mark.few(4)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("stop", [0, 2, 7])
def test_states_tell_whether_workers_were_there(stop, before):
    """Also where another loop has started them."""

    def made(passes):
        loader = persistent()
        for _ in range(passes):
            assert len([*loader]) == 6
        return bo.Objective(sum, loader)

    first, again = made(before), made(0)
    drawn(first, stop)
    again.load_state_dict(first.state_dict())
    assert drawn(again, 8) == drawn(first, 8)


def test_a_generator_that_moves_in_persistent_workers_is_refused():
    objective = bo.Objective(sum, persistent(data=Noisy(random.Random(1), random.Random.random)))
    drawn(objective, 2)
    again = bo.Objective(sum, persistent(data=Noisy(random.Random(1), random.Random.random)))
    again.load_state_dict(objective.state_dict())
    assert drawn(again, 4) == drawn(objective, 4)
    drawn(objective, 1)
    with pytest.raises(ValueError, match=r"cannot be saved: dataset.source has advanced in persistent workers"):
        objective.state_dict()


# ------------------------------------------------------------------------------------------------ copies

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))}


@pytest.mark.few(17)
@pytest.mark.parametrize("stop", [0, 2, 3, 4])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["list", "default order", "batch sampler", "two generators", "persistent"])
def test_copies_continue_where_they_are(kind, way, stop):
    """It used to be impossible to make copies after a draw."""
    makes = {
        "list": lambda: [*numbers(3)],
        "default order": lambda: DataLoader(numbers(), 2, shuffle=True),
        "persistent": lambda: persistent(2),
    }
    torch.manual_seed(0)
    objective = bo.Objective(sum, (makes | LOADERS)[kind]())
    drawn(objective, stop)
    mapped = objective.mapped(torch.neg)
    copies = [COPIES[way](one) for one in (objective, mapped)]
    default = torch.get_rng_state()
    found = []
    for one in (*copies, objective):
        torch.set_rng_state(default)
        found.append(drawn(one, 7))
    assert found[0] == found[1] == found[2]


def test_a_shallow_copy_has_a_position_of_its_own():
    objective = bo.Objective(sum, DataLoader(numbers(), 2))
    drawn(objective, 2)
    other = copy.copy(objective)
    assert drawn(other, 2) == drawn(objective, 2)


def test_a_step_that_fails_at_the_first_draw_of_a_copy_leaves_it_where_it_is():
    x, y = tensors()

    def loss(c):
        if c.sum() < 100:
            raise RuntimeError("on purpose")
        return (y - x).square().sum()

    objective = bo.Objective(loss, of_batch_sampler())
    drawn(objective, 2)
    other = copy.deepcopy(objective)
    with pytest.raises(RuntimeError, match="on purpose"):
        bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2).step(lambda: y.sum(), other)
    assert drawn(other, 5) == drawn(objective, 5)


# ---------------------------------------------------------------------------------------------------- failing data


class Failing:
    """Items, of which one fails once."""

    def __init__(self, error, at):
        self.error, self.at = error, at

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == self.at:
            self.at = None
            raise self.error("a network file system")
        if i == len(self):
            raise IndexError
        return torch.tensor(float(i), dtype=torch.float64)

    def shuffled(self):
        return DataLoader(self, 1, shuffle=True)


class Streamed(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return (self.items[i] for i in range(12))


FAILING = {
    "loader": lambda items: DataLoader(items, 1),
    "shuffled loader": Failing.shuffled,
    "stream": lambda items: DataLoader(Streamed(items), 1),
    "generator": Streamed,
}


def drawn_by_steps(make, items):
    """Return the batches of four accepted steps, and the position and random state at the end."""
    torch.manual_seed(0)
    x, y = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    step, seen = [], []

    def lower(batch):
        step.append(float(batch.sum()))
        return (y - x - batch.sum()).square()

    data = bo.Objective(lower, make(items))
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2, linear_steps=1)  # three batches in a step
    while len(seen) < 4:
        try:
            optimizer.step(lambda: (y - 1).square(), data)
        except (OSError, KeyboardInterrupt):
            items.failures = getattr(items, "failures", 0) + 1
        else:
            seen.append([*dict.fromkeys(step)])
        step.clear()
    return seen, data.state_dict()["position"], x.item(), torch.get_rng_state().tolist()


@pytest.mark.few(24)
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", FAILING)
def test_a_step_whose_data_fail_is_made_again_with_the_same_batches(kind, error, at):
    """If the first batch of a step failed, a loader used to lose it, and a generator began a new pass."""
    items = Failing(error, at)
    assert drawn_by_steps(FAILING[kind], items) == drawn_by_steps(FAILING[kind], Failing(error, None))
    assert items.failures == 1


def test_data_that_fail_while_a_pass_is_repeated():
    """The position used to be that of the batch that failed."""
    items = Failing(OSError, None)
    objective, usual = bo.Objective(torch.sum, Streamed(items)), bo.Objective(torch.sum, Streamed(Failing(OSError, 0)))
    for _ in range(5):
        objective.draw()
    state = objective.state_dict()
    usual.data.items.at = None
    usual.load_state_dict(state)
    items.at = 2
    with pytest.raises(OSError, match="network"):
        objective.load_state_dict(state)
    assert objective.state_dict()["position"] == 5
    assert [float(objective.draw().batch) for _ in range(9)] == [float(usual.draw().batch) for _ in range(9)]


def test_an_interrupt_between_iterator_and_position():
    class Interrupted:
        count = 0

        def __iter__(self):
            return map(self.get, range(5))

        def get(self, item):
            if item == 2 and self.count == 0:
                self.count = 1
                raise KeyboardInterrupt
            return item

    objective, seen = bo.Objective(torch.sum, Interrupted()), []
    while len(seen) < 7:
        try:
            seen.append(objective.draw().batch)
        except KeyboardInterrupt:
            seen.append("interrupt")
    assert seen == [0, 1, "interrupt", 2, 3, 4, 0]


@pytest.mark.parametrize(
    "make", [cycle, iter, lambda d: (b for b in d), lambda d: map(float, d), lambda d: zip(d, d, strict=True)]
)
def test_iterators_are_refused(make):
    """After a failed step, as many batches were skipped as had been drawn."""
    with pytest.raises(ValueError, match="the data of an Objective are an iterator"):
        bo.Objective(torch.sum, make([1.0, 2.0]))

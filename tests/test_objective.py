import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bilevel_optim import Objective


def batches(objective, n):
    return [objective.draw().batch for _ in range(n)]


def test_data_is_cycled_and_shuffled_anew():
    data = DataLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True)
    drawn = [b[0] for b in batches(Objective(torch.sum, data), 9)]
    passes = [torch.cat(drawn[i : i + 3]) for i in (0, 3, 6)]
    assert all(torch.equal(p.sort().values, torch.arange(12)) for p in passes)
    assert not torch.equal(passes[0], passes[1])


@pytest.mark.parametrize("own_generator", [True, False])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 8])
def test_resumes_at_its_position(own_generator, stop):
    def make():
        generator = torch.Generator().manual_seed(1) if own_generator else None
        data = DataLoader(TensorDataset(torch.arange(12)), batch_size=3, shuffle=True, generator=generator)
        return Objective(torch.sum, data)

    objective = make()
    batches(objective, stop)
    state, random = objective.state_dict(), torch.get_rng_state()
    expected = [b[0] for b in batches(objective, 9)]
    torch.rand(5)
    again = make()
    torch.set_rng_state(random)
    again.load_state_dict(state)
    got = [b[0] for b in batches(again, 9)]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_empty_and_exhausted_data_are_errors():
    with pytest.raises(ValueError, match="empty"):
        Objective(torch.sum, []).draw()
    once = Objective(torch.sum, (i for i in range(2)))
    batches(once, 2)
    with pytest.raises(ValueError, match="exhausted"):
        once.draw()
    with pytest.raises(TypeError, match="must be iterable"):
        Objective(torch.sum, 3)
    with pytest.raises(TypeError, match="must be callable"):
        Objective(torch.zeros(2))
    assert repr(Objective(torch.sum, [1])) == "Objective(sum, data=list)"


def test_evaluations_of_one_sample_share_random_numbers():
    sample = Objective(lambda: torch.rand(3)).draw()
    device = torch.device("cpu")
    with sample.replayed(device):
        first = sample()
    after = torch.rand(1)
    with sample.replayed(device):
        assert torch.equal(first, sample())
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(after, torch.rand(1))
    other = Objective(lambda: torch.rand(3)).draw()
    with other.replayed(device):
        assert not torch.equal(first, other())


def test_replaying_does_not_disturb_the_stream():
    sample = Objective(lambda: torch.rand(3)).draw()
    with sample.replayed(torch.device("cpu")):
        sample()
    torch.rand(5)
    state = torch.get_rng_state()
    with sample.replayed(torch.device("cpu")):
        sample()
    assert torch.equal(state, torch.get_rng_state())

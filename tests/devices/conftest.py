"""The simulated device is there in all tests of this folder; it changes torch for the whole process."""

import pytest
import torch

from . import simulated


@pytest.fixture(autouse=True)
def _own_numbers():
    """The device's random numbers start from one seed in every test, and are not those of the CPU."""
    torch.simgpu.manual_seed(11)
    yield
    assert not simulated.watched()

"""The tests for the first GPU, on the simulated device."""

import pytest

from ..generic.test_cuda import test_a_captured_step_waits_for_the_device_once, test_captured_steps_are_eager_ones

__all__ = ["test_a_captured_step_waits_for_the_device_once", "test_captured_steps_are_eager_ones"]

CHOSEN = ("SOBA", "ITD", "F2SA-1", "FSLA")
WAITING = ("SVRB",)  # whose numbers on the host are arguments of its graph


@pytest.fixture(autouse=True)
def _few(request):
    chosen = CHOSEN + WAITING * ("waits" in request.node.originalname)
    if request.getfixturevalue("row").name not in chosen and not request.config.getoption("--slow"):
        pytest.skip("like others: run with --slow")

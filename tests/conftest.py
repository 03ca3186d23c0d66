import gc
import os
import sys

import pytest
import torch

from .selection import is_slow, left_out

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as cores
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the full-size versions of tests too")
    parser.addoption("--backend", default="eager", help="of the fifty captured steps: eager (as traced), inductor")
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="N new examples for each fuzzed test, for hours")


def pytest_ignore_collect(collection_path, config):
    """Leave out `tests/devices`, which needs its own run: the simulated device changes torch for its process."""
    return True if collection_path.name == "devices" and not _with_devices(config) else None


def _with_devices(config):
    return any("devices" in argument for argument in config.args)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in left_out(items):
            item.add_marker(pytest.mark.slow)
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item)])
        items[:] = [item for item in items if not is_slow(item)]


def pytest_report_header(config):
    return [] if config.getoption("--slow") else ["full sizes and further cases are left out: run with --slow"]


def pytest_collection_finish(session):
    """Search for garbage rarely, and never in what is loaded: that took a sixth of the suite's time."""
    if _with_devices(session.config):  # tensors of the simulated device are garbage that only a search finds
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def _leave_out_time_of_guards():
    """Leave out Dynamo's timing of new guards, which is for its log and empties the processor's caches: 20 ms each."""
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def _reproducible():
    """Start every test from one seed and float64, and restore torch's defaults."""
    _leave_out_time_of_guards()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Tests that count evaluations of a loss, or whose losses are not what their derivatives say on purpose.
UNCHECKED = ("attack", "compiled", "devices", "fuzz", "layers", "methods")
# Without --slow also those of many rows; their neighbours see that the check leaves no trace.
UNCHECKED_FILES = (
    *("test_recipes", "test_papers", "test_data_mixing", "test_training", "test_learners"),
    *("test_auto_rate", "test_limits", "test_tasks", "test_told", "test_truth", "test_upper_optimizer"),
)


@pytest.fixture(autouse=True)
def _derivatives_unchecked(request, monkeypatch):
    """Leave out the check of derivatives in the first step, where it is not the subject of the tests."""
    short = not request.config.getoption("--slow")
    if request.path.parent.name in UNCHECKED or (short and request.path.stem in UNCHECKED_FILES):
        monkeypatch.setattr("bilevel_optim.optimizer.method.MOST_CHECKS", 0)

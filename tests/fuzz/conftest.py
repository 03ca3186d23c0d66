from functools import partial

import pytest
from hypothesis import HealthCheck, settings


@pytest.fixture
def budget(request):
    """Settings for so many examples with --slow, a third of them without: the same ones every time.

    With --fuzz as many as asked for, and new ones.
    """
    asked, share = request.config.getoption("--fuzz"), 1 if request.config.getoption("--slow") else 3
    common = partial(settings, deadline=None, stateful_step_count=10, suppress_health_check=list(HealthCheck))
    if asked:
        return lambda examples: common(max_examples=asked, print_blob=True)
    return lambda examples: common(max_examples=-(-examples // share), derandomize=True, database=None)

from functools import partial

import pytest
from hypothesis import HealthCheck, settings


@pytest.fixture
def budget(request):
    """Settings for so many examples: the same ones every time, or with --fuzz as many as asked for and new ones."""
    asked = request.config.getoption("--fuzz")
    common = partial(settings, deadline=None, stateful_step_count=10, suppress_health_check=list(HealthCheck))
    if asked:
        return lambda examples: common(max_examples=asked, print_blob=True)
    return lambda examples: common(max_examples=examples, derandomize=True, database=None)

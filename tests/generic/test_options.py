"""Options that are set after construction count as if they had been passed, or are refused."""

import math

import pytest
import torch

from ..registry import ARGUMENTS, REPRESENTATIVES, each

# Set through param_groups, or without an effect on a trajectory.
OTHERS = {"generator", "check_finite", "check_derivatives", "process_group", "vectorize", "hvp"}


def others(name, option, value):
    """Valid values besides this one."""
    if isinstance(value, bool):
        found = [not value]
    elif isinstance(value, int):
        found = [value + 2, max(value - 1, 1)]
    elif isinstance(value, float):
        found = [value / 2 if math.isfinite(value) else 0.05, 0.3, 0.9]
    elif value is None:
        found = [2, 0.37]
    else:
        found = {"faithful": ["matrix_free"], "self_normalised": ["blocks"], "cg": ["minres"]}.get(value, [])
    return [other for other in found if option.check is None or _is_valid(option, name, other)]


def _is_valid(option, name, value):
    try:
        option.check(name, value)
    except ValueError:
        return False
    return True


def trajectory(row, given=(), later=(), steps=7):
    torch.manual_seed(0)
    problem = row.quadratic()
    optimizer = row(problem.x, problem.y, **dict(given))
    for name, value in dict(later).items():
        setattr(optimizer, name, value)
    for _ in range(steps):
        problem.run(optimizer)
    return torch.cat([t.detach().flatten() for t in (*problem.x, *problem.y)])


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@each()
def test_options_set_later_count_or_are_refused(row):
    before, compared = trajectory(row), 0
    for name, option in row.cls._options.items():
        value = row.options.get(name, ARGUMENTS.get(name, option.default))
        if not option.init or name in OTHERS | row.refused:
            continue
        for other in others(name, option, value):
            try:
                passed = trajectory(row, {name: other})
            except (ValueError, RuntimeError, ArithmeticError):  # it does not go with the row's other arguments
                continue
            if torch.equal(passed, before):
                continue
            try:
                later, told = trajectory(row, later={name: other}), ""
            except AttributeError as error:
                later, told = passed, str(error)
            assert not told or f"{row.cls.__name__}.{name} cannot be set" in told or "no setter" in told
            torch.testing.assert_close(later, passed, rtol=0, atol=0, msg=f"{name} = {other}, set later")
            compared += 1
            break
    assert compared


@each(REPRESENTATIVES)
@pytest.mark.parametrize("name", ["lr", "lower_lr"])
def test_rates_are_set_in_the_groups(row, name):
    problem = row.quadratic()
    optimizer = row(problem.x, problem.y)
    assert not hasattr(optimizer, name)
    with pytest.raises(AttributeError, match=rf"{name} cannot be set: set group\['lr'\] in param_groups"):
        setattr(optimizer, name, 0.01)

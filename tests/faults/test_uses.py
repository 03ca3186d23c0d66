"""What crashed, or said nothing that helps, in ordinary use."""

import pytest
import torch

import bilevel_optim as bo

from ..problems import same, values
from ..registry import each


@pytest.fixture
def elsewhere():
    """A default device on which nothing can be computed; parameters and data stay on theirs."""

    def on(make):
        def run(*arguments, **options):
            torch.set_default_device("meta")
            try:
                return make(*arguments, **options)
            finally:
                torch.set_default_device(None)

        return run

    return on


@each(("AID", "AID-minres", "F2SA", "ESMAML", "PZOBO", "PRAHGD", "RTMLMC", "SVRB", "RSVRB", "GDA"))
def test_the_default_device_need_not_be_that_of_the_parameters(row, elsewhere):
    def run(problem, optimizer):
        for _ in range(2):
            problem.run(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        problem.run(optimizer)
        return values(problem.x, problem.y)

    ends = []
    for device in (lambda make: make, elsewhere):
        torch.manual_seed(0)
        problem = row.quadratic(tasks=row.takes_tasks)
        ends.append(device(run)(problem, row(problem.x, problem.y, short=True)))
    assert same(*ends)


def test_checking_does_not_mind_the_default_device(elsewhere):
    x, y = (torch.full((2,), v, requires_grad=True) for v in (2.0, 0.0))
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.5, lower_steps=3)
    losses = [lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2]
    report = elsewhere(bo.check_hypergradient)(optimizer, *losses, rtol=1e3)
    assert report.bias >= 0

"""A rank that is killed ends the step on the others, and nothing is changed; a group is not held."""

import gc
import os
import signal
import subprocess
import sys
import weakref

import pytest
import torch.distributed as dist

import bilevel_optim as bo

from ..problems import Quadratic, same, values
from .processes import together


class Dying(Quadratic):
    """A quadratic problem whose process is killed in the given evaluation of the lower loss from now."""

    left = None

    def lower(self):
        if self.left is not None:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().lower()


def made(**options):
    problem = Dying(n=4, m=2)
    return problem, bo.AID([*problem.x], [*problem.y], lr=0.1, lower_lr=0.1, lower_steps=3, **options)


def after_a_kill(rank):
    problem, optimizer = made(process_group=dist.group.WORLD)
    problem.run(optimizer)
    before = values(problem.x, problem.y)
    if rank == 1:
        problem.left = 2
    try:
        problem.run(optimizer)
    except bo.RankError as error:
        return error, same(before, values(problem.x, problem.y))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_step_on_the_others(world, tmp_path):
    results = together(world, tmp_path, after_a_kill, lost=(1,))
    assert 1 not in results
    for rank in set(range(world)) - {1}:
        error, unchanged = results[rank]
        assert "a rank is gone" in str(error)
        assert unchanged


def after_destroying(rank):
    group = dist.new_group()
    problem, optimizer = made(process_group=group)
    optimizer.step(problem.upper, problem.lower)
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(RuntimeError, match="has been destroyed"):
        optimizer.step(problem.upper, problem.lower)
    return reference() is None, optimizer.oracle_counts["lower_grad"], len(optimizer.state_dict()["param_groups"])


def test_a_group_is_not_held_when_it_is_destroyed(tmp_path):
    """Its threads would go on until Python ends, where one that runs ends the process by "terminate called"."""
    assert [*together(2, tmp_path, after_destroying).values()] == [(True, 4, 2)] * 2


@pytest.mark.slow  # as the one of a group of its own below
def test_the_default_group_is_not_held_when_it_is_destroyed():
    program = """
import gc, weakref, torch, torch.distributed as dist, bilevel_optim as bo
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2, process_group=dist.group.WORLD)
optimizer.step(lambda: y.square().sum() + x.sum(), lambda: (y - x).square().sum())
import torch._dynamo
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
assert group() is None
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr

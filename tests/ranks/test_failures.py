"""A rank that fails ends the step on all of them, with its reason and nothing changed; so does one that is killed."""

import gc
import os
import signal
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

import bilevel_optim as bo
from bilevel_optim.distributed import failures

from ..problems import Quadratic, same, values
from .processes import together

METHODS = {"AID": bo.AID, "F2SA": bo.F2SA, "PZOBO": bo.PZOBO, "SOBA": bo.SOBA}
# Number of evaluations of a loss after which the second rank fails.
MOMENTS = {
    "at the first": ("lower", 1),
    "in the middle": ("lower", 3),
    "in the upper loss": ("upper", 1),
    "in the update of x": ("x", 1),
}


def moments_of(name):
    """SOBA evaluates the lower loss once in a step."""
    return [moment for moment in MOMENTS if (name, moment) != ("SOBA", "in the middle")]


class Failing(Quadratic):
    """A quadratic problem with a loss that does something else the k-th time."""

    def __init__(self, **options):
        super().__init__(**options)
        self.event, self.plan = None, {}

    def follow(self, optimizer):
        """Let the update of x count too."""
        update = optimizer.update
        optimizer.update = lambda *arguments: (self._count("x"), update(*arguments))[1]

    def _count(self, level):
        if level in self.plan:
            self.plan[level] -= 1
            if self.plan[level] <= 0:
                self.event()

    def upper(self):
        self._count("upper")
        return super().upper()

    def lower(self):
        self._count("lower")
        return super().lower()


def made(name, **options):
    problem = Failing(n=4, m=2)
    arguments = {} if name == "SOBA" else {"lower_steps": 3}
    arguments |= {"directions": 2, "generator": torch.Generator().manual_seed(0)} if name == "PZOBO" else {}
    return problem, METHODS[name]([*problem.x], [*problem.y], lr=0.1, lower_lr=0.1, **arguments, **options)


def fails(reason):
    def event():
        raise KeyError(reason)

    return event


def after_failures(rank):
    """For each method and moment: what each rank saw, whether all was as before, and how it went on."""
    seen = {}
    for name in METHODS:
        problem, optimizer = made(name, process_group=dist.group.WORLD)
        problem.run(optimizer)
        for moment in moments_of(name):
            level, count = MOMENTS[moment]
            before, counts = values(problem.x, problem.y), optimizer.oracle_counts
            if rank == 1:
                problem.plan, problem.event = {level: count}, fails("the disk is full")
                if level == "x":
                    problem.follow(optimizer)
            error = None
            try:
                problem.run(optimizer)
            except (KeyError, bo.RankError) as caught:
                error = caught
            unchanged = same(before, values(problem.x, problem.y)) and counts == optimizer.oracle_counts
            seen[name, moment] = type(error).__name__, str(error), unchanged
        problem.plan = {}
        problem.run(optimizer)  # the group still works
        seen[name] = [t.tolist() for t in values(problem.x, problem.y)]
    return seen


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_failing_rank_ends_the_step_on_all(world, tmp_path):
    results = together(world, tmp_path, after_failures)
    for name in METHODS:
        problem, optimizer = made(name)
        problem.run(optimizer, 2)  # those that failed do not count
        for rank in range(world):
            for moment in moments_of(name):
                kind, text, unchanged = results[rank][name, moment]
                assert kind == ("KeyError" if rank == 1 else "RankError"), (name, moment, rank)
                assert "the disk is full" in text
                assert rank == 1 or "rank 1 failed: KeyError" in text
                assert unchanged
            for got, expected in zip(results[rank][name], values(problem.x, problem.y), strict=True):
                torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-9, atol=1e-9)


def after_one_loss(rank):
    """The second rank gives the upper loss alone."""
    problem, optimizer = made("SOBA", process_group=dist.group.WORLD)
    problem.run(optimizer)
    try:
        optimizer.step(problem.upper) if rank == 1 else optimizer.step(problem.upper, problem.lower)
    except (TypeError, bo.RankError) as error:
        return type(error).__name__, str(error), problem.run(optimizer)


with_nccl = pytest.mark.skipif(torch.cuda.is_available(), reason="the default group has NCCL too")


@pytest.mark.parametrize("backend", ["gloo", pytest.param(None, id="default", marks=with_nccl)])
def test_a_loss_that_is_missing_on_one_rank_ends_the_step_on_all(backend, tmp_path):
    results = together(2, tmp_path, after_one_loss, timeout=60.0, backend=backend)
    assert [results[rank][0] for rank in (0, 1)] == ["RankError", "TypeError"]
    assert "rank 1 failed: TypeError" in results[0][1]


def after_a_kill(rank):
    problem, optimizer = made("AID", process_group=dist.group.WORLD)
    problem.run(optimizer)
    before = values(problem.x, problem.y)
    if rank == 1:
        problem.plan, problem.event = {"lower": 2}, lambda: os.kill(os.getpid(), signal.SIGKILL)
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


class Late:
    """An operation that is completed just after the patience with it has ended."""

    def __init__(self, fails):
        self.fails, self.waits = fails, 0

    def wait(self, patience=None):
        self.waits += 1
        if self.waits == 1 or self.fails:
            raise RuntimeError("Operation timed out!" if self.waits == 1 else "Connection closed by peer")

    def is_completed(self):
        return True


def test_an_operation_that_is_late_is_no_failure(monkeypatch):
    monkeypatch.setattr(failures, "_missing_rank_error", lambda group, error: bo.RankError(f"a rank is gone: {error}"))
    assert failures._ended(None, Late(fails=False))
    with pytest.raises(bo.RankError, match="Connection closed"):
        failures._ended(None, Late(fails=True))


def after_destroying(rank):
    group = dist.new_group()
    problem, optimizer = made("AID", process_group=group)
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

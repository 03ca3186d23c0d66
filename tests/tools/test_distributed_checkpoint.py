"""``torch.distributed.checkpoint``: nothing of a method's state is dropped, before the first step and after many."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.optim.lr_scheduler
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import bilevel_optim as bo

from ..problems import Both, Quadratic, assign, same, values
from ..registry import ROWS, each

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
PLAIN = next(row for row in ROWS if row.name == "RSVRB")
ADAPTIVE = replace(PLAIN, variant="adaptive", options={**PLAIN.options, "probabilities": "adaptive"})
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def made(row):
    problem = row.quadratic(n=4, m=2, tasks=row.declared.tasks == "rows")
    model = Both(problem)
    torch.manual_seed(0)
    return problem, model, row(problem.x, problem.y, short=True)


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("row", "options"),
    [
        pytest.param(row, options, id=f"{row.name}-{kind}", marks=[] if kept else pytest.mark.slow)
        for row in (*ROWS, ADAPTIVE)
        for kind, options, kept in (
            ("nested", None, not row.variant or row is ADAPTIVE),
            ("flat", FLAT, row.name in ("F2SA", "PRAHGD", "RSVRB")),
        )
    ],
)
def test_a_run_is_resumed_bit_for_bit(row, options, tmp_path):
    """Saved after some steps, read into what a new optimizer says it would have, and continued."""
    problem, model, optimizer = made(row)
    problem.run(optimizer, 3)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)
    saved, random = values(model.parameters()), torch.get_rng_state()
    problem.run(optimizer, 3)

    again, model, resumed = made(row)
    state = get_optimizer_state_dict(model, resumed, options=options)
    assert all(not p.grad.any() if p.grad is not None else True for p in model.parameters())
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, resumed, state, options=options)
    assign(model.parameters(), saved)
    torch.set_rng_state(random)
    again.run(resumed, 3)
    assert same(values(problem.x, problem.y), values(again.x, again.y))
    assert resumed.oracle_counts == optimizer.oracle_counts


@pytest.mark.few(8)
@each(lambda row: row.cls.__name__ in ("AID", "FSLA", "PRAHGD", "RAGDA", "F2SA", "RSVRB"))
def test_asking_before_the_first_step_changes_nothing(row):
    runs = []
    for ask in (False, True):
        problem, model, optimizer = made(row)
        if ask:
            state = get_optimizer_state_dict(model, optimizer)
            assert len(state["state"]) == len([*model.parameters()])
            set_optimizer_state_dict(model, optimizer, state)
            assert not optimizer.oracle_counts["lower_grad"]
        problem.run(optimizer, 2)
        runs.append(values(problem.x, problem.y))
    assert same(*runs)


def test_state_that_only_a_step_can_restore_is_not_lost_silently(tmp_path):
    """One lower problem: the parameters look as if they had a row for each task."""

    def build():
        problem = Quadratic(n=4, m=2)
        model = Both(problem)
        return problem, model, bo.SVRB(problem.x, problem.y, lr=0.1, lower_lr=0.1)

    problem, model, optimizer = build()
    problem.run(optimizer, 2)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    saved, random = values(model.parameters()), torch.get_rng_state()
    problem.run(optimizer, 2)

    again, model, resumed = build()
    state = get_optimizer_state_dict(model, resumed)
    with pytest.raises(CheckpointException, match=r"[Ss]ize mismatch"):
        dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
    again.run(resumed)
    state = get_optimizer_state_dict(model, resumed)
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, resumed, state)
    assign(model.parameters(), saved)
    torch.set_rng_state(random)
    again.run(resumed, 2)
    assert same(values(problem.x, problem.y), values(again.x, again.y))


def test_a_stateful_lower_optimizer_and_a_scheduled_rate(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.y = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))

    def start():
        model = Model()
        optimizer = bo.AID([model.x], [model.y], lr=0.1, lower_lr=0.01, lower_steps=2, lower_optimizer=torch.optim.Adam)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def run(model, optimizer, schedule):
        for _ in range(2):
            optimizer.step(lambda: (model.y - 1).square().sum(), lambda: (model.y - model.x).square().sum())
            schedule.step()

    model, optimizer, schedule = start()
    run(model, optimizer, schedule)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path)
    run(model, optimizer, schedule)
    again, resumed, _ = start()
    state = {"model": again.state_dict(), "optimizer": get_optimizer_state_dict(again, resumed)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, resumed, state["optimizer"])
    assert [group["lr"] for group in resumed.param_groups] == [0.1 / 4, 0.01 / 4]
    run(again, resumed, torch.optim.lr_scheduler.ExponentialLR(resumed, 0.5, last_epoch=2))
    assert torch.equal(model.x, again.x)
    assert torch.equal(model.y, again.y)

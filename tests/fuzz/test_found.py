"""Minimal cases found by fuzzing."""

import copy
import warnings

import pytest
import torch

import bilevel_optim as bo

from ..problems import same, values
from ..registry import each
from .runs import Case, Run, called
from .strategies import data_of
from .toys import Kind


@each(("AID",))
def test_groups_added_to_a_copy_are_those_added_to_the_original(row):
    problem = row.quadratic(n=4, m=2)
    optimizer = row(problem.x, problem.y)
    loaded = row(problem.x, problem.y)
    loaded.load_state_dict(optimizer.state_dict())
    keys = []
    for one in (optimizer, copy.deepcopy(optimizer), loaded):
        one.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "level": "lower"})
        keys.append(one.param_groups[-1].keys())
    assert keys[0] == keys[1] == keys[2]


@each(("SVRB", "F2SA"))
def test_a_proposal_makes_no_state_for_a_new_parameter(row):
    run = Run(Case(row.name))
    run.step()
    run.add_group("upper")
    before = len(run.optimizer.state)
    run.step("propose")
    assert len(run.optimizer.state) == before


@each(("HOZOG", "PZOBO", "ESMAML"))
def test_empty_parameters_among_those_that_are_perturbed(row):
    full, empty = (Run(Case(row.name, Kind(upper=upper))) for upper in (((2,),), ((0, 2), (2,), (0,))))
    for run in (full, empty):
        for _ in range(2):
            run.step()
    assert same(values([full.problem.x[0], *full.problem.y]), values([empty.problem.x[1], *empty.problem.y]))


@pytest.mark.parametrize("features", [False, True])
@each(("PZOBO", "F2SA", "F2SA-4-independent"))
def test_first_checks_draw_no_random_numbers(row, features):
    """An optimizer that has checked the losses and one that checks them now continue in the same way."""
    case = Case(row.name, Kind(dropout=True, features=features))
    old, new = Run(case), Run(case)
    saved = old.saved()
    old.step()
    for run in (old, new):
        run.load(saved)
        for _ in range(2):
            run.step()
    assert same(values(old.problem.tensors), values(new.problem.tensors))


@each(lambda row: not row.variant)
def test_features_with_running_statistics_advance_them_once(row):
    """Methods that differentiate features apart advanced them at every step but those that looked."""
    data = data_of(row)[-1]
    options = (("lower_batch", 2), ("upper_batch", 2)) if data == "tasks" else ()
    run = Run(Case(row.name, Kind(buffers=True, features=True, data=data), options=options))
    for k in (1, 2):
        run.step()
        assert run.problem.norm.num_batches_tracked == k


@each(("AID", "PRAHGD"))
def test_the_base_gradient_of_differences_is_checked(row):
    """The products, which are made at other points, did not show it."""
    run = Run(Case(row.name, options=(("hvp", "finite-difference"),)))
    run.step()
    for k in range(1, 30):
        problem = run.problem
        problem.fails, problem.fired = [["lower", k, "gradient"]], 0
        outcome = called(run.step)
        assert isinstance(outcome, bo.NonFiniteError) == bool(problem.fired), k
        if not problem.fired:
            break


@pytest.mark.parametrize("level", ["upper", "lower"])
@each(("STABLE", "SVRB"))
def test_an_update_after_a_group_was_added(row, level):
    """STABLE moved y with a state of tensors that it had not seen."""
    ends = []
    for added in (False, True):
        run = Run(Case(row.name))
        run.step()
        run.step("backward")
        if added:
            run.add_group(level)
            run.problem.spare_x.grad = torch.ones(1)
        run.optimizer.step()
        ends.append(values([*run.problem.x, *run.problem.y]))
    assert same(*ends)


@each(("HOZOG", "AID", "F2SA"))
def test_features_of_tasks_with_running_statistics_are_vectorised(row):
    """A new optimizer evaluated them in a loop from its first look on, one that was loaded at once: other roundings."""
    options = (("lower_batch", 2), ("tasks_per_step", 3))
    run = Run(Case(row.name, Kind(buffers=True, features=True, data="tasks"), options=options))
    for _ in range(2):
        run.step()
    assert "vectorize_fallback" not in run.optimizer.diagnostics


def test_an_optimizer_that_goes_back_looks_where_a_new_one_does():
    """It knew from before that vmap works on the head, and fell back to the loop later in the step than a new one."""
    case = Case("F2SA", Kind(features=True, data="tasks"), options=(("tasks_per_step", 3),))
    old, new = Run(case), Run(case)
    saved, left = old.saved(), []
    old.step()
    old.load(saved)
    for run in (old, new):
        run.problem.fails = [["lower", 1000, "raise"]]
        run.step()
        left.append(run.problem.fails[0][1])  # evaluations that do not fail
    assert left[0] == left[1] < 1000


def test_parameters_that_are_loaded_have_not_moved_twice():
    """After `backward`, going back to a checkpoint and then `step` warned that another optimizer had made the step."""
    run = Run(Case("AID", Kind(), options=(("lower_lr", 0.02), ("lower_steps", 2), ("lr", 0.1))))
    run.step("backward")
    run.load(run.saved())
    with warnings.catch_warnings():
        warnings.simplefilter("error", bo.BilevelWarning)
        run.optimizer.step()

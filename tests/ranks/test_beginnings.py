"""Ranks that begin with different parameters, options or optimizers, and ranks that draw different amounts."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

import bilevel_optim as bo
from recipes.common.ledger import Ledger

from ..problems import Quadratic, Tasks, same, seeded, values
from ..registry import ROWS
from .processes import together

DRAWING = [row for row in ROWS if row.name in ("AID", "PZOBO", "SVRB", "RSVRB")]


def differing(rank):
    """Return the errors about an x or y that differs in one bit on one rank; the last run has no difference."""
    said, group = [], dist.group.WORLD
    for level in ("upper", "lower", None):
        problem = Quadratic(n=4, m=2)
        optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=2, process_group=group)
        if rank == 1 and level is not None:
            (problem.x if level == "upper" else problem.y)[0].data.view(torch.int64)[0] += 1
        before = values(problem.x, problem.y)
        try:
            problem.run(optimizer)
        except ValueError as error:
            said.append(str(error))
        assert same(before, values(problem.x, problem.y)) == (level is not None)
    return said


def uneven():
    """Five tasks of which each rank has a part and draws rows: the parameters and the generator afterwards."""
    ends = {}
    for row in DRAWING:
        rows = row.declared.tasks == "rows"
        problem, generator = Tasks(m=5, rows=rows), seeded(2)
        options = {"task_batch": 5} if row.name == "RSVRB" else {} if rows else {"tasks_per_step": 5}
        options |= {"lower_batch": 2, "upper_batch": 2, "generator": generator, "process_group": dist.group.WORLD}
        optimizer = row(problem.x, problem.y, short=True, **options)
        for _ in range(3):
            problem.run(optimizer)
        ends[row.name] = [*values(problem.x, problem.y), generator.get_state()]
    return ends


CHANGES = {
    "lr of group 0": {"lr": 0.2},
    "lower_steps": {"lower_steps": 3},
    "linear_steps": {"linear_steps": 4},
    "warm_start": {"warm_start": False},
}


# Options of the second rank alone, and the resulting messages.
OPTIMIZERS = {
    "lower_optimizer (SGD on rank 0, Adam on rank 1);": {"lower_optimizer": torch.optim.Adam},
    "lower_optimizer (SGD on rank 0, LBFGS on rank 1);": {"lower_optimizer": torch.optim.LBFGS},
    "momentum of lower_optimizer (0 on rank 0, 0.9 on rank 1);": {
        "lower_optimizer": partial(torch.optim.SGD, momentum=0.9)
    },
    "upper_optimizer (None on rank 0, Adam on rank 1);": {"upper_optimizer": torch.optim.Adam},
    "hvp ('exact' on rank 0, 'finite-difference' on rank 1);": {"hvp": "finite-difference"},
    "lower_clip (None on rank 0, 1.0 on rank 1);": {"lower_clip": 1.0},
}


def aid(**options):
    problem = Quadratic(n=4, m=2)
    given = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 2, **options}
    return problem, bo.AID(problem.x, problem.y, process_group=dist.group.WORLD, **given)


def error_of(problem, optimizer):
    """Return the error of a step, which must change nothing then; None if there is no error."""
    before = values(problem.x, problem.y)
    try:
        problem.run(optimizer)
        return None
    except ValueError as error:
        assert same(before, values(problem.x, problem.y))
        return str(error)


def differing_optimizers(rank):
    """Return the errors if one rank has a different optimizer or argument."""
    upper = {"upper_optimizer": partial(torch.optim.Adam, betas=(0.5 if rank == 1 else 0.9, 0.9))}
    return [error_of(*aid(**options if rank == 1 else {})) for options in OPTIMIZERS.values()], error_of(*aid(**upper))


def adapting(rank):
    """One rank adapts before the first step, by itself; then all make steps."""
    problem, optimizer = aid()
    if rank == 1:
        found = optimizer.adapt(problem.lower)
        assert not same(found, problem.y)
    return [error_of(problem, optimizer), *values(problem.x, problem.y)]


def changing(rank):
    """An option changes on one rank during a run, and back."""
    problem, optimizer = aid(lower_steps=3)
    said = [error_of(problem, optimizer)]
    for steps in (5, 3):
        optimizer.lower_steps = steps if rank == 1 else 3
        said.append(error_of(problem, optimizer))
    return said


def compiled(rank):
    """Steps over ranks are not compiled, which is said at once; options are compared before anything is drawn."""
    problem = Quadratic(n=4, m=2)
    options = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 2, "directions": 4}
    optimizer = bo.PZOBO(problem.x, problem.y, process_group=dist.group.WORLD, **options)
    assert optimizer._random_inputs()
    said = []
    try:
        optimizer.compile(fullgraph=True)
    except RuntimeError as error:
        said.append(str(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.compile()
    assert len(caught) == 1
    optimizer.directions = 5 if rank == 1 else 4
    said += [str(caught[0].message), error_of(problem, optimizer)]
    optimizer.directions = 4
    return [*said, error_of(problem, optimizer), optimizer.diagnostics["compile_fallback"]]


def differing_options(rank):
    """Return the errors if one rank has another option, from the start or later; the last runs have none."""
    said, group = [], dist.group.WORLD

    def tried(problem, optimizer):
        said.append(error_of(problem, optimizer))

    for options in [*CHANGES.values(), {}]:
        tried(*aid(**options if rank == 1 else {}))
    problem, optimizer = aid()
    for rate in (None, 0.3, 0.1):
        if rate is not None and rank == 1:
            optimizer.param_groups[1]["lr"] = rate
        tried(problem, optimizer)
    method = bo.AID if rank == 1 else bo.FirstOrder
    tried(problem, method(problem.x, problem.y, process_group=group, lr=0.1, lower_lr=0.1, lower_steps=2))
    return said


def everything(rank):
    """All of it, by processes that are started once."""
    found = {"options": differing_options(rank), "parameters": differing(rank), "uneven": uneven()}
    for case in (differing_optimizers, adapting, changing, compiled):
        found[case.__name__] = case(rank)
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request, tmp_path_factory):
    """Return the results of each rank."""
    return together(request.param, tmp_path_factory.mktemp("ranks"), everything)


def test_ranks_with_other_optimizers_are_refused(results):
    """Otherwise the ranks drift apart."""
    for found in results.values():
        said, betas = found["differing_optimizers"]
        for message, expected in zip(said, OPTIMIZERS, strict=True):
            assert f"process_group have different options: {expected}" in message
        assert "options: betas of upper_optimizer ((0.9, 0.9) on rank 0, (0.5, 0.9) on rank 1);" in betas


def test_a_rank_adapts_by_itself(results):
    """Before the first step it waited for the others, and then the process ended."""
    for found in results.values():
        error, *parameters = found["adapting"]
        assert error is None
        assert same(parameters, results[0]["adapting"][1:])


def test_an_option_that_changes_on_one_rank_is_named(results):
    """Otherwise a rank that makes more lower steps than the others ends the process."""
    for found in results.values():
        first, changed, again = found["changing"]
        assert "process_group have different options: lower_steps (3 on rank 0, 5 on rank 1);" in changed
        assert first is again is None


def test_steps_over_ranks_are_not_compiled(results):
    for found in results.values():
        full, warning, differs, after, reason = found["compiled"]
        assert reason == "ranks exchange results in a step (process_group=), which is always eager"
        assert reason in full
        assert reason in warning
        assert "directions (4 on rank 0, 5 on rank 1)" in differs
        assert after is None


def test_ranks_that_differ(results):
    """Ranks with other parameters ran on; those with more tasks were ahead, and then saw other tasks than the rest."""
    for found in results.values():
        said, ends, options = found["parameters"], found["uneven"], found["options"]
        *first, none, before, changed, again, methods = options
        for message, name in zip([*first, changed], [*CHANGES, "lr of group 1"], strict=True):
            assert f"process_group have different options: {name} (" in message
        assert none is before is again is None
        assert "different options: method (FirstOrder on rank 0, AID on rank 1); their steps would differ" in methods
        for message, level in zip(said, ("upper", "lower"), strict=True):
            assert f"process_group hold different values of {level} parameter 0, so" in message
        for row in DRAWING:
            assert same(results[0]["uneven"][row.name], ends[row.name]), row.name


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_a_group_of_any_backend_begins_a_step(backend):
    """Torch's default is a backend for each device of the machine, whose name is "undefined"."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
        rates = {"lr": 0.1, "lower_lr": 0.5, "lower_steps": 1}
        optimizer = bo.AID([x], [y], **rates, process_group=dist.group.WORLD)
        optimizer.backward(lambda: y.sum(), lambda: (y - x).square().sum() / 2)
        assert x.grad.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_what_outlives_a_step_does_not_keep_the_memory_of_an_exchange():
    """A mean over the ranks of x's two entries is no view of a tensor that holds the gradient in y too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, y = torch.ones(2, requires_grad=True), torch.zeros(1000, requires_grad=True)
        rates = {"lr": 0.1, "lower_lr": 0.5, "lower_steps": 1}
        optimizer = bo.FirstOrder([x], [y], **rates, process_group=dist.group.WORLD)
        with Ledger([y]) as ledger:
            optimizer.backward(lambda: y.sum() + x.prod(), lambda: (y - x.sum()).square().sum() / 2)
        assert x.grad.tolist() == [1.0, 1.0]
        assert ledger.bytes() < 1.1 * y.nbytes
    finally:
        dist.destroy_process_group()

"""State between steps: checkpoints, copies, starting points; a failing step does not change it."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils._pytree import tree_flatten

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import FAMILIES

from ..problems import assign, same, seeded, values
from ..registry import ALIKE, ROWS, each


def written(*parts):
    """Return the state as torch.save and torch.load restore it after a stopped run."""
    file = io.BytesIO()
    torch.save(parts, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


FIRST = [next(row for row in ROWS if row.declared.family == family) for family in FAMILIES]


@pytest.mark.parametrize(
    ("row", "how"),
    [
        pytest.param(row, how, id=f"{row.name}-{how}")
        for row in ROWS
        for how in ("warm", "cold", "tasks")
        if row.declared.tasks != {"tasks": "none"}.get(how, "required" if how == "cold" else "")
        # The base class handles these in the same way for each.
        and (row in FIRST if how == "cold" else how == "warm" or not row.variant or row.declared.tasks == "rows")
    ],
)
def test_resumes_bit_for_bit(row, how):
    """Stopped in the middle of a run on drawn data and continued by fresh objects."""

    def make():
        problem = row.cleaning("tasks" if how == "tasks" else "batches")
        options = {"warm_start": how != "cold"} if row.declared.tasks != "required" else {}
        if how != "cold":
            options |= {"lower_optimizer": torch.optim.Adam, "lower_lr": 0.01, "upper_optimizer": torch.optim.Adam}
        if problem.form == "tasks":
            options |= {"generator": seeded(7), "lower_batch": 4, "upper_batch": 5}
            options |= {"tasks_per_step": 2} if row.declared.tasks != "rows" else {}
        return problem, row(problem.x, problem.y, short=True, **options)

    problem, optimizer = make()
    objectives = [o for o in problem.objectives if isinstance(o, bo.Objective)]
    torch.manual_seed(5)
    stops = {}
    for k in range(4):
        if k in (1, 2):
            data = [o.state_dict() for o in objectives]
            stops[k] = written(optimizer.state_dict(), values(problem.parameters), data, torch.get_rng_state())
        problem.run(optimizer)
    end = values(problem.parameters, (p.grad for p in problem.x))
    assert len(optimizer.state) <= len(problem.parameters)  # no stacked tensor stays
    for k, (state, parameters, data, random) in stops.items():
        again, resumed = make()
        resumed.load_state_dict(state)
        assign(again.parameters, parameters)
        for objective, position in zip((o for o in again.objectives if isinstance(o, bo.Objective)), data, strict=True):
            objective.load_state_dict(position)
        torch.set_rng_state(random)
        again.run(resumed, 4 - k)
        assert same(end, values(again.parameters, (p.grad for p in again.x)))
        assert resumed.oracle_counts == optimizer.oracle_counts


@each()
def test_deepcopy_and_pickle_continue(row):
    problem = row.quadratic(n=4, m=2)
    optimizer = row(problem.x, problem.y, short=True, lower_optimizer=torch.optim.Adam, lower_lr=0.01)
    torch.manual_seed(0)
    problem.run(optimizer)
    state = torch.get_rng_state()
    clones = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    problem.run(optimizer, 2)
    for clone in clones:
        twin = row.quadratic(n=4, m=2)
        twin.x = [p for g in clone.param_groups if g["level"] == "upper" for p in g["params"]]
        twin.y = clone.param_groups[-1]["params"]
        torch.set_rng_state(state)
        twin.run(clone, 2)
        assert same(values(problem.x, problem.y), values(twin.x, twin.y))


# ---------------------------------------------------------------------------------------------------- starting points


@each(lambda row: row.declared.solves and not (row.declared.initial or row.declared.tasks == "required" or row.variant))
def test_starts_of_the_lower_steps(row):
    """Warm: the live value, whoever wrote it. Cold: the value at the first step, and all else as then."""
    problem = row.quadratic(n=5)
    optimizer = row(problem.x, problem.y, lr=0.0, lower_lr=problem.lr, lower_steps=1, warm_start=True)
    problem.apply(optimizer.backward)
    problem.solve()
    with torch.no_grad():
        problem.y[0].add_(1e-3)
    problem.apply(optimizer.backward)
    assert (problem.y[0] - problem.solution()[0]).norm() < 4e-3
    for factory in (torch.optim.SGD, torch.optim.Adam):
        problem = row.quadratic(n=5)
        options = {"lr": 0.0, "warm_start": False, "lower_optimizer": factory, **ALIKE.get(row.name, {})}
        optimizer = row(problem.x, problem.y, **{**options, "generator": seeded()})
        first = []
        for _ in range(2):
            optimizer.generator.manual_seed(0)
            problem.apply(optimizer.backward)
            first.append(values(problem.y, (p.grad for p in problem.x)))
        assert same(*first)


# ---------------------------------------------------------------------------------------------------- failures


@each()
def test_nothing_is_written_that_is_not_finite(row):
    """The losses have finite values, but one evaluation has a gradient of NaN."""
    if row.declared.tasks == "required" or row.variant:
        return
    noticed = 0
    for wrt in ("x", "y"):
        problem = row.cleaning("whole")
        optimizer = row(problem.x, problem.y, short=True, generator=seeded(5))
        problem.run(optimizer)
        for level in ("upper",) if problem.single else ("upper", "lower"):
            problem.fails = [[level, 1, wrt]]
            try:
                problem.run(optimizer)
            except bo.NonFiniteError:
                noticed += 1
            kept = [t for entries in optimizer.state_dict()["state"].values() for t in entries.values()]
            gradients = [p.grad for p in problem.x]
            for tensor in [*kept, *gradients, *problem.x, *problem.y]:
                assert not isinstance(tensor, torch.Tensor) or bool(tensor.isfinite().all())
    assert noticed > 0


@pytest.mark.parametrize(
    ("row", "form", "how"),
    [
        pytest.param(row, form, how, id=f"{row.name}-{form}-{how}")
        for row in ROWS
        for form in ("whole", "tasks")
        for how in ("raise", "nan")
        if (row.declared.tasks != "required" if form == "whole" else row.takes_tasks and not row.variant)
        and (how == "nan" or row in FIRST)  # who evaluates a loss that raises is none of a method's business
    ],
)
def test_a_failing_loss_changes_nothing(row, form, how):
    problem = row.cleaning(form)
    draws = {"lower_batch": 4, "generator": seeded(5)} if form == "tasks" else {}
    optimizer = row(problem.x, problem.y, short=True, lower_optimizer=torch.optim.Adam, vectorize=False, **draws)
    problem.run(optimizer)
    for parameter in problem.x:
        parameter.grad = None

    def everything():
        """Bit for bit, so that NaN is NaN."""
        gradients = [p.grad for p in problem.parameters]
        leaves, structure = tree_flatten([optimizer.state_dict(), gradients, optimizer.diagnostics, problem.parameters])
        bits = [leaf.detach().numpy().tobytes() if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in leaves]
        return structure, bits

    step = 1
    for level in ("upper",) if problem.single else ("upper", "lower"):
        for k in (1, 4, 13) if form == "whole" else (1, 6):
            before, problem.fails = everything(), [[level, k, how]]
            try:
                problem.run(optimizer)
            except (KeyError, bo.NonFiniteError, bo.BilevelWarning) as caught:
                error = caught
            else:
                assert problem.fails[0][1] > 0  # it has not evaluated the loss that often
                step += 1
                break
            if isinstance(error, bo.NonFiniteError):
                assert error.step == step
                assert error.oracle in ("upper_grad", "lower_grad", "hvp", "jvp", "loss")
            # One diverging path among many perturbed ones is left out.
            assert isinstance(error, KeyError) == (how == "raise")
            assert not isinstance(error, bo.BilevelWarning) or ("left out" in str(error) and k > 1)
            assert everything() == before
        assert k > 1
    problem.fails = []
    problem.run(optimizer)


@each(("AID", "F2SA", "PZOBO", "SOBA", "RAGDA", "SVRB"))
def test_check_finite_can_be_turned_off(row):
    problem = row.cleaning()
    optimizer = row(problem.x, problem.y, check_finite=False)
    upper, *lower = problem.objectives
    problem.objectives = [lambda: upper() + problem.x[0].sum() * float("inf"), *lower]
    assert not problem.run(optimizer).isfinite()
    assert not problem.x[0].isfinite().any()


# ---------------------------------------------------------------------------------------------------- hooks


def test_hooks_of_state_dicts_are_those_of_torch():
    """They see the whole state dict and may replace it; those after loading see the whole state."""

    def make():
        problem = ROWS[0].quadratic(n=4, m=2)
        return problem, ROWS[0](problem.x, problem.y, short=True, upper_optimizer=torch.optim.Adam)

    (problem, optimizer), (twin, other) = make(), make()
    problem.run(optimizer, 2)
    plain = optimizer.state_dict()
    handle = optimizer.register_state_dict_post_hook(lambda _, state: {"wrapped": state})
    wrapped = optimizer.state_dict()
    handle.remove()
    assert wrapped["wrapped"]["param_groups"] == plain["param_groups"]
    assert wrapped["wrapped"]["state"].keys() == plain["state"].keys()
    assign([*twin.x, *twin.y], values(problem.x, problem.y))
    seen = []
    other.register_load_state_dict_pre_hook(lambda _, state: state["wrapped"])
    other.register_load_state_dict_post_hook(lambda loaded: seen.append((loaded.oracle_counts, len(loaded.state))))
    other.load_state_dict(wrapped)
    assert seen == [(optimizer.oracle_counts, len(optimizer.state))]
    problem.run(optimizer, 2)
    twin.run(other, 2)
    assert same(values(problem.x, problem.y), values(twin.x, twin.y))

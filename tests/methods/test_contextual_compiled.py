"""Captured steps of RT-MLMC and DL-SGD: a graph for each combination of levels, on the draws of the eager steps."""

import copy
import math
import warnings

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.methods.contextual import rtmlmc
from bilevel_optim.solvers.contexts import draw_levels

from ..problems import P1, Tasks, close, seeded

FEW = {"levels": 2, "neumann_steps": 3, "tasks_per_step": 4}


def made(cls=bo.RTMLMC, *, captured=True, strict=True, **options):
    """An optimizer on a problem of its own."""
    problem = Tasks(m=5) if "lower_batch" in options and options["lower_batch"] is None else P1()
    options = {"lr": 0.02, "lower_lr": 1.0, "generator": seeded(3), **FEW, **options}
    optimizer = cls(problem.x, problem.y, **options)
    if captured:
        optimizer.compile(backend="eager", fullgraph=strict)
    return problem, optimizer


def steps(problem, optimizer, count, *, at_once=0):
    """The losses of so many steps, the last ones in a run."""
    losses = [optimizer.step(problem.upper, problem.lower, tasks=problem.tasks) for _ in range(count - at_once)]
    if at_once:
        losses += optimizer.run(problem.upper, problem.lower, tasks=problem.tasks, steps=at_once)
    return torch.stack(losses)


def ends(problem, optimizer):
    moments = optimizer.numbers.get("moments", torch.zeros(()))
    figures = [value for _, value in sorted(optimizer.diagnostics.items()) if isinstance(value, torch.Tensor)]
    return [*problem.x, *problem.y, problem.x[0].grad, moments, *figures, optimizer.generator.get_state()]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (bo.RTMLMC, {}),
        (bo.RTMLMC, {"neumann": "product", "smoothness": 9.0, "base_level": 1}),
        (bo.RTMLMC, {"neumann": "cg", "warm_start": True, "lower_batch": 2, "upper_batch": 3}),
        pytest.param(bo.RTMLMC, {"implicit_term": False, "tasks_per_step": 1}, marks=pytest.mark.slow),
        (bo.DLSGD, {"neumann": "product", "neumann_steps": 2}),
        pytest.param(bo.DLSGD, {"lower_batch": None, "cap": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_captured_steps_are_the_eager_ones(cls, options):
    """On the same draws; in whatever order the levels come, and whatever L is by then, they are few graphs."""
    results = []
    for captured in (False, True):
        problem, optimizer = made(cls, captured=captured, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            losses = steps(problem, optimizer, 18, at_once=8)
        results.append([losses, *ends(problem, optimizer)])
        names = set(optimizer.diagnostics), optimizer.numbers.keys(), optimizer.oracle_counts.keys()
        results[-1].append(names)
    assert results[0].pop() == results[1].pop()
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-12, equal_nan=True)
    assert optimizer.captured_graphs == (1 if cls is bo.DLSGD or "base_level" in options else 2)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (bo.RTMLMC, {}),
        pytest.param(bo.RTMLMC, {"tasks_per_step": 3, "smoothness": 9.0}, marks=pytest.mark.slow),
        (bo.DLSGD, {}),
    ],
    ids=["levels", "one graph", "one level"],
)
def test_a_captured_run_goes_on_bit_for_bit(cls, options):
    """From a checkpoint, as steps or as a run; and from one in which L is a plain number, as it was once."""
    problem, optimizer = made(cls, **options)
    steps(problem, optimizer, 9)
    saved, at = copy.deepcopy(optimizer.state_dict()), [t.detach().clone() for t in (*problem.x, *problem.y)]
    steps(problem, optimizer, 8)
    right = ends(problem, optimizer)
    for at_once in (0, 8):
        other, again = made(cls, **options)
        again.load_state_dict(copy.deepcopy(saved))
        with torch.no_grad():
            for parameter, value in zip((*other.x, *other.y), at, strict=True):
                parameter.copy_(value)
        steps(other, again, 8, at_once=at_once)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(right, ends(other, again), strict=True))
        assert again.oracle_counts == optimizer.oracle_counts
    if options:
        return
    graphs = optimizer.captured_graphs
    optimizer.numbers["curvature"] = float(optimizer.numbers["curvature"])
    steps(problem, optimizer, 3)
    assert optimizer.captured_graphs == graphs
    assert isinstance(optimizer.numbers["curvature"], torch.Tensor)


def test_deep_levels_run_eagerly_and_the_others_do_not(monkeypatch):
    monkeypatch.setattr(rtmlmc, "LONGEST_PATH", 4)  # as many as level 2 has
    results, told = [], {}
    for captured in (False, True):
        problem, optimizer = made(captured=captured, strict=False, levels=3, tasks_per_step=1)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            losses = [steps(problem, optimizer, 1) for _ in range(16)]
            for _ in range(captured * 12):
                losses.append(steps(problem, optimizer, 1))
                told.setdefault(int(optimizer.diagnostics["level_counts"].argmax()), set()).add(
                    optimizer.diagnostics.get("compile_fallback")
                )
        results.append(torch.stack(losses[:16]))
    close(*results, 1e-11)
    (warning,) = given
    assert "11 lower steps (of level 3) make too long a graph" in str(warning.message)
    assert optimizer.captured_graphs == 2
    assert told == {1: {None}, 2: {None}, 3: {"11 lower steps (of level 3) make too long a graph"}}
    problem, optimizer = made(levels=3, tasks_per_step=1)
    with pytest.raises(RuntimeError, match="make too long a graph"):
        steps(problem, optimizer, 30)


@pytest.mark.parametrize("at_once", [0, 3])
def test_a_failing_captured_step_changes_nothing(at_once):
    problem, optimizer = made()
    steps(problem, optimizer, 12)
    problem.x[0].data[0] = math.nan
    before = [t.clone() for t in ends(problem, optimizer)]
    counts = optimizer.oracle_counts
    with pytest.raises(bo.NonFiniteError):
        steps(problem, optimizer, at_once or 1, at_once=at_once)
    after = ends(problem, optimizer)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    assert optimizer.oracle_counts == counts


def test_steps_that_estimate_the_curvature_are_the_hosts():
    """Steps 0, 1, 3, 7, ...; a given L leaves the first one alone."""
    for smoothness, eager in ((None, [0, 1, 3, 7, 15]), (9.0, [0])):
        _, optimizer = made(smoothness=smoothness)
        numbers = {"curvature": torch.tensor(1.0)}
        assert [k for k in range(20) if optimizer.graph_key(k, numbers) is None] == eager


def test_random_numbers_of_the_losses_are_those_of_eager_steps():
    """Losses that draw run eagerly; what was noted of a first step has drawn no more than without."""
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        problem, optimizer = made(captured=captured, strict=False, neumann="product", neumann_steps=9, tasks_per_step=1)

        def lower(batch, problem=problem):
            return problem.lower(batch) * (1 + 0.01 * torch.rand(()))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)
            losses = [optimizer.step(problem.upper, lower, tasks=problem.tasks) for _ in range(8)]
        results.append(torch.stack([*losses, torch.rand(())]))
    close(*results, 1e-11)
    assert "random numbers" in optimizer.diagnostics["compile_fallback"]


def test_depths_of_a_step_are_those_of_its_seed():
    """Which the host draws before the step."""
    _, optimizer = made(levels=5, tasks_per_step=6)
    problem = P1()
    drawn = optimizer._drawn(problem.tasks, {"seed": torch.tensor(11)})
    contexts = optimizer._contexts(problem.tasks, 6, 11)
    levels = draw_levels(6, 5, 0, contexts.counters, systematic=True)
    assert drawn["depths"] == sorted(levels, reverse=True)
    (place,) = drawn["first"].nonzero().flatten().tolist()
    assert drawn["depths"][place] == levels[0]
    assert torch.equal(drawn["contexts"]["tasks"][place], contexts.tasks[0])

"""RT-MLMC and DL-SGD after `compile`: the eager steps, and why."""

import copy
import warnings

import pytest
import torch

import bilevel_optim as bo

from ..problems import P1, seeded

METHODS = pytest.mark.parametrize(
    ("cls", "reason"),
    [(bo.RTMLMC, "each set of levels would be a graph of its own"), (bo.DLSGD, r"about 2\^\(levels \+ 1\) each")],
    ids=["RTMLMC", "DLSGD"],
)


def made(cls):
    """An optimizer on a problem of its own."""
    problem = P1()
    options = {"levels": 2, "neumann_steps": 3, "tasks_per_step": 4}
    return problem, cls(problem.x, problem.y, lr=0.02, lower_lr=1.0, generator=seeded(3), **options)


def ends(problem, optimizer):
    """Return the losses of some steps (the last ones as a run) and their final parameters."""
    losses = [optimizer.step(problem.upper, problem.lower, tasks=problem.tasks) for _ in range(12)]
    losses += optimizer.run(problem.upper, problem.lower, tasks=problem.tasks, steps=4)
    optimizer.backward(problem.upper, problem.lower, tasks=problem.tasks)
    return [torch.stack(losses), *problem.x, *problem.y, problem.x[0].grad, optimizer.generator.get_state()]


@pytest.mark.usually("RTMLMC")
@METHODS
def test_compiled_ones_run_eagerly_and_say_why(cls, reason):
    problem, optimizer = made(cls)
    right = ends(problem, optimizer)
    assert "compile_fallback" not in optimizer.diagnostics
    problem, optimizer = made(cls)
    with pytest.warns(bo.BilevelWarning, match=reason):
        optimizer.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        found = ends(problem, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
    assert optimizer.diagnostics["compile_fallback"] == cls.declared.uncaptured
    assert optimizer.captured_graphs == 0


@pytest.mark.usually("DLSGD")
@METHODS
def test_fullgraph_raises_and_leaves_the_steps_as_they_are(cls, reason):
    problem, optimizer = made(cls)
    with pytest.raises(RuntimeError, match=reason):
        optimizer.compile(backend="eager", fullgraph=True)
    ends(problem, optimizer)
    assert "compile_fallback" not in optimizer.diagnostics


@pytest.mark.slow
def test_checkpoints_of_captured_steps_go_on():
    """In which the estimate of L was a tensor."""
    results = []
    for older in (False, True):
        problem, optimizer = made(bo.RTMLMC)
        ends(problem, optimizer)
        if older:
            optimizer.numbers["curvature"] = torch.tensor(optimizer.numbers["curvature"], dtype=torch.float64)
        saved = copy.deepcopy(optimizer.state_dict())
        at = problem.x[0].detach().clone()
        problem, optimizer = made(bo.RTMLMC)
        optimizer.load_state_dict(saved)
        problem.x[0].data.copy_(at)
        results.append(ends(problem, optimizer))
        assert isinstance(optimizer.numbers["curvature"], float)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

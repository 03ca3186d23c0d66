"""References of the speed benchmark: the algorithms by hand are those of the library."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from bilevel_optim.problem.random import draw_index, draw_seed
from recipes.benchmarks import by_hand, in_jax, speed, step_parts
from recipes.common.seeds import stream
from recipes.problems.shapes import SHAPES, shape

from .problems import close

STEPS = 3
# The library's first step of AmIGO takes one product less, as its linear system starts from zero: other batches follow.
SAME = [name for name, recipe in by_hand.ALGORITHMS.items() if not recipe.random and name != "amigo"]


def values(problem):
    return torch.cat([t.detach().flatten() for t in (*problem.x, *problem.y)])


def library(name, steps=STEPS):
    problem = shape("softmax" if name == "itd" else "logistic", torch.float64)
    advance, _ = speed.library(name, problem, "eager", steps)
    advance()
    return problem


@pytest.mark.parametrize("name", SAME)
def test_algorithms_by_hand_are_those_of_the_library(name):
    expected, problem = values(library(name)), shape("softmax" if name == "itd" else "logistic", torch.float64)
    recipe, (uppers, lowers) = by_hand.ALGORITHMS[name], problem.streams()
    start, step = recipe.make(by_hand.Oracles(by_hand.TORCH, problem.f, problem.g), problem.steps)
    x, y = (tuple(t.detach() for t in ts) for ts in (problem.x, problem.y))
    generator, state = stream(0, "method"), None
    up, low = recipe.draws(problem.steps)
    for _ in range(STEPS):
        draw = by_hand.drawn([next(uppers) for _ in range(up)], [next(lowers) for _ in range(low)])
        state = start(x, y, draw) if state is None else state
        if recipe.seeded:
            state = (torch.tensor(draw_seed(generator)), *state[1:])
        x, y, state = step(x, y, state, draw)
    close(torch.cat([t.flatten() for t in (*x, *y)]), expected, 1e-13)
    assert not torch.equal(expected, values(shape("softmax" if name == "itd" else "logistic", torch.float64)))


@pytest.mark.parametrize("name", ["bsa", "ttsa"])
def test_random_algorithms_by_hand_are_those_of_the_library(name):
    """On one batch again and again: how many they draw differs."""
    problem = shape("logistic", torch.float64)
    problem.batches = tuple(level[:1] for level in problem.batches)
    x, y = (tuple(t.detach().clone() for t in ts) for ts in (problem.x, problem.y))
    optimizer, losses, _ = speed.optimizer_of(name, problem)
    optimizer.run(*losses, steps=STEPS)
    api = replace(by_hand.TORCH, random=lambda generator, n: (draw_index(n, generator), generator))
    _, step = by_hand.ALGORITHMS[name].make(by_hand.Oracles(api, problem.f, problem.g), problem.steps)
    state, batches = stream(0, "method"), dict(zip(("upper", "lower"), problem.batches, strict=True))
    for _ in range(STEPS):
        x, y, state = step(x, y, state, lambda level, k: batches[level][0])
    close(torch.cat([t.flatten() for t in (*x, *y)]), values(problem), 1e-13)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="no JAX")
@pytest.mark.parametrize("name", ["soba", "stocbio"])
def test_algorithms_in_jax_are_those_of_the_library(name):
    advance, ends = in_jax.loop("logistic", name, shape("logistic", torch.float64), STEPS)
    advance()
    close(torch.cat([t.flatten() for t in ends()]), values(library(name)), 1e-13)


@pytest.mark.slow
def test_random_ones_in_jax_go_on():
    pytest.importorskip("jax")
    advance, ends = in_jax.loop("logistic", "sustain", shape("logistic", torch.float64), STEPS)
    before = ends()
    for _ in range(2):
        advance()
        before, last = ends(), before
        assert not any(torch.equal(a, b) for a, b in zip(before, last, strict=True))


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
def test_every_method_is_offered_and_steps():
    """On the smallest problem, but those of contexts, which are made for the tasks."""
    for name in speed.offered():
        size = "tasks" if name in ("dl-sgd", "rt-mlmc") else "logistic"
        optimizer, losses, extra = speed.optimizer_of(name, shape(size))
        if size == "logistic":
            optimizer.step(*losses, **extra)


def test_problems_are_the_same_closures_and_functions():
    for name in SHAPES:
        problem = shape(name)
        if problem.tasks is not None:
            ids = torch.arange(1)
            batches = [
                tuple(t[0] for t in draw(ids, None, None)) for draw in (problem.tasks.upper, problem.tasks.lower)
            ]
        else:
            batches = [level[3] for level in problem.batches]
        assert torch.equal(problem.live_f(batches[0]), problem.f(problem.x, problem.y, batches[0]))
        assert torch.equal(problem.live_g(batches[1]), problem.g(problem.x, problem.y, batches[1]))
        assert torch.equal(values(problem), values(shape(name)))


def test_the_parts_of_a_step_exist():
    assert all(callable(getattr(place, name)) for place, name in step_parts.PARTS.values())

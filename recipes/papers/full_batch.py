"""Runs of methods on a deterministic problem, scored by the upper loss at an accurate lower solution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo

from ..common import gradients
from ..common.seeds import begin, stream
from ..problems.problem import Problem
from ..problems.softmax import Softmax
from .experiment import Point, Trial
from .runner import follow

__all__ = ["descend", "tested", "upper_loss"]

Score = Callable[[Any, Tensor, Tensor], float]


@torch.no_grad()
def upper_loss(problem: Problem, x: Tensor, solution: Tensor) -> float:
    """Return f(x, y*(x))."""
    return float(problem.upper(x, solution))


@torch.no_grad()
def tested(problem: Softmax, x: Tensor, solution: Tensor) -> float:
    """Return the loss on the test data."""
    return float(F.cross_entropy(problem.test.features @ solution, problem.test.labels))


def descend(trial: Trial, problem: Problem, score: Score = upper_loss, **options: Any) -> list[Point]:
    """Run one method until its oracle calls are spent, scored by a function of x and y*(x).

    In the setting, ``rate`` is the lower learning rate in units of 1/L; ``adam`` is the learning rate of Adam on x,
    which replaces the method's own step.
    """
    begin(trial.seed, "start")
    x, y = problem.start()
    setting = dict(trial.setting)
    adam = torch.optim.Adam([x], lr=setting.pop("adam", 1.0)) if "adam" in setting else None
    options = {"lower_lr": setting.pop("rate", 1.0) * problem.lower_lr, **options, **setting}
    optimizer: bo.BilevelOptimizer = trial.make([x], [y], generator=stream(trial.seed, "method"), **options)
    solution = problem.first

    def measure() -> dict[str, float]:
        nonlocal solution
        solution = problem.solution(x, solution)
        found = {"score": score(problem, x, solution)}
        if isinstance(problem, Softmax):
            found["accuracy"] = problem.accuracy(solution)
        return found

    def step() -> None:
        losses = lambda: problem.upper(x, y), lambda: problem.lower(x, y)
        if adam is None:
            optimizer.step(*losses)
        else:
            optimizer.backward(*losses)
            adam.step()

    return follow(
        step, measure, lambda: gradients(optimizer), trial.budget, trial.scale["evaluations"],
    )  # fmt: skip

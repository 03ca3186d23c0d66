"""Runs of methods on a problem without noise, judged by the upper loss where the lower problem is solved anew."""

from __future__ import annotations

from typing import Any

import torch

import bilevel_optim as bo

from ..common import gradients
from ..problems.problem import Problem
from ..problems.softmax import Softmax
from .experiment import Point, Trial
from .runner import follow

__all__ = ["descend"]


def descend(trial: Trial, problem: Problem, **options: Any) -> list[Point]:
    """Steps of one method until its oracle calls are spent; ``rate`` in the setting is in units of 1/L."""
    torch.manual_seed(trial.seed)
    x, y = problem.start()
    setting = dict(trial.setting)
    options = {"lower_lr": setting.pop("rate", 1.0) * problem.lower_lr, **options, **setting}
    optimizer: bo.BilevelOptimizer = trial.make(
        [x], [y], generator=torch.Generator().manual_seed(trial.seed), **options
    )
    solution = problem.y

    def measure() -> dict[str, float]:
        nonlocal solution
        solution = problem.solution(x, solution)
        found = {"score": float(problem.upper(x, solution).detach())}
        if isinstance(problem, Softmax):
            found["accuracy"] = problem.accuracy(solution)
        return found

    return follow(
        lambda: optimizer.step(lambda: problem.upper(x, y), lambda: problem.lower(x, y)),
        measure, lambda: gradients(optimizer), trial.budget, trial.scale["evaluations"],
    )  # fmt: skip

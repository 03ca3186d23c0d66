"""Laws of errors in the theorems: exponents, with an interval over random problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from ..benchmarks.contextual import P1
from ..common.seeds import stream
from .experiment import Arm, Experiment, Point, Trial, Within

__all__ = ["EXPERIMENTS"]

SIZE = 6  # entries of y


def response(trial: Trial, p: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Return PZOBO's hypergradient estimates on a random problem with a curved response, and the exact one."""
    generator = stream(trial.seed, "data")
    B, c = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((SIZE, p), (SIZE,)))
    x = (torch.randn(p, generator=stream(trial.seed, "start"), dtype=torch.float64) / p**0.5).requires_grad_()
    y = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)

    def answer(x: Tensor) -> Tensor:  # y*(x)
        z: Tensor = B @ x / p**0.5
        return z + z.square() / 2

    optimizer = bo.PZOBO(
        [x], [y], lr=0.0, lower_lr=1.0, lower_steps=1, generator=stream(trial.seed, "method"), **options
    )

    def upper() -> Tensor:
        return (y - c).square().sum() / 2

    found = []
    for _ in range(trial.scale["repeats"]):
        optimizer.backward(upper, lambda: (y - answer(x)).square().sum() / 2)
        assert x.grad is not None
        found.append(x.grad.clone())
    point = x.detach().requires_grad_()
    (exact,) = torch.autograd.grad((answer(point) - c).square().sum() / 2, point)
    return torch.stack(found), exact


def slope(ends: list[float], ratio: float) -> float:
    """Return the slope in log-log scale between two values whose arguments have this ratio."""
    return math.log(ends[1] / ends[0]) / math.log(ratio)


def of_variance(trial: Trial) -> list[Point]:
    """Measure the distance of two exponents from 1 and -1: in the numbers of upper parameters and of directions."""
    sizes, counts = trial.scale["sizes"], trial.scale["counts"]
    by_size, by_count = [], []
    for p in sizes:
        found, exact = response(trial, p, directions=1, smoothing=1e-6)
        by_size.append(float((found - exact).square().sum(1).mean() / exact.square().sum()))
    for q in counts:
        found, exact = response(trial, 16, directions=q, smoothing=1e-6)
        by_count.append(float((found - exact).square().sum(1).mean()))
    size, directions = slope(by_size, sizes[1] / sizes[0]), slope(by_count, counts[1] / counts[0])
    score = max(abs(size - 1), abs(directions + 1))
    return [{"spent": 0.0, "seconds": 0.0, "score": score, "size": size, "directions": directions}]


def of_levels(trial: Trial) -> list[Point]:
    """Measure the log2 change per level of the error of DL-SGD's mean over many contexts."""
    errors = []
    for levels in trial.scale["depths"]:
        problem = P1()
        optimizer = bo.DLSGD(
            [problem.x], [problem.y], lr=0.0, lower_lr=1.0, levels=levels, neumann_steps=60, smoothness=problem.L,
            tasks_per_step=trial.scale["contexts"], generator=stream(trial.seed, "method"),
        )  # fmt: skip
        optimizer.backward(problem.f, problem.g, tasks=problem)
        assert problem.x.grad is not None
        errors.append(float((problem.x.grad - problem.gradient()).norm()))
    depths = trial.scale["depths"]
    return [{"spent": 0.0, "seconds": 0.0, "score": math.log2(errors[1] / errors[0]) / (depths[1] - depths[0])}]


def law(
    name: str, paper: str, figure: str, claim: str, value: str, run: Callable[[Trial], list[Point]], rule: Within,
    score: str, departure: str, **numbers: Any,
) -> Experiment:  # fmt: skip
    """Return the experiment of one law, with three numbers of seeds."""
    fewer = {key: n // 10 if key in ("repeats", "contexts") else n for key, n in numbers.items()}
    scales = {
        "smoke": {"budget": 1, "seeds": 3, **fewer},
        "cpu": {"budget": 1, "seeds": 10, **numbers},
        "full": {"budget": 1, "seeds": 40, **numbers},
    }
    return Experiment(
        id=name, paper=paper, figure=figure, claim=claim, value=value, run=run, arms={rule.arm: Arm(None)}, rule=rule,
        score=score, unit="estimates", scales=scales, departures=(departure,),
    )  # fmt: skip


EXPERIMENTS = [
    law(
        "000-law-variance", "arXiv:2110.07004", "proposition 2",
        "the relative variance is proportional to p/Q, with p upper parameters and Q directions",
        "exponents 1 and -1: distance 0", of_variance, Within(arm="PZOBO", low=-math.inf, high=0.2),
        "the larger distance of the two measured exponents from 1 and -1 (both are in the records)",
        "random problems with 6 lower variables and a quadratic response; p = 8 and 64 with one direction, Q = 1 and 8 "
        "with p = 16",
        sizes=(8, 64), counts=(1, 8), repeats=200,
    ),
    law(
        "004-law-levels", "arXiv:2310.18535", "lemma 2",
        "the bias falls like 2^(-K/2) with the number K of levels, or faster", "-1/2 per level, or less", of_levels,
        Within(arm="DL-SGD", low=-3.0, high=-0.4), "slope of logarithms",
        "one quadratic problem of three variables; the error includes the noise of 4,000 contexts",
        depths=(1, 4), contexts=4000,
    ),
]  # fmt: skip

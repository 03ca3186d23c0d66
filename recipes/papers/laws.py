"""What the theorems say of errors: slopes of logarithms, with an interval over random problems."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from ..benchmarks.conditioning import quadratic
from ..benchmarks.contextual import P1
from ..common.search import axis
from ..common.seeds import stream
from .experiment import Arm, Experiment, Point, Trial, Within
from .kappa import plain, rahgd
from .kappa import run as stationary

__all__ = ["EXPERIMENTS"]

SIZE = 6  # of y


def response(trial: Trial, p: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Estimates of PZOBO's hypergradient on a random problem with a curved response, and the exact one."""
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


def slope(ends: list[float], ratio: float) -> list[Point]:
    """Of the logarithm, for arguments of this ratio."""
    first, second = ends
    return [{"spent": 0.0, "seconds": 0.0, "score": math.log(second / first) / math.log(ratio)}]


def of_size(trial: Trial) -> list[Point]:
    """Relative variance of one direction against the number of upper parameters."""
    found = [response(trial, p, directions=1, smoothing=1e-6) for p in trial.scale["sizes"]]
    noise = [float((g - e).square().sum(1).mean() / e.square().sum()) for g, e in found]
    return slope(noise, trial.scale["sizes"][1] / trial.scale["sizes"][0])


def of_directions(trial: Trial) -> list[Point]:
    """Variance against the number of directions."""
    found = [response(trial, 16, directions=q, smoothing=1e-6) for q in trial.scale["counts"]]
    noise = [float((g - e).square().sum(1).mean()) for g, e in found]
    return slope(noise, trial.scale["counts"][1] / trial.scale["counts"][0])


def of_smoothing(trial: Trial) -> list[Point]:
    """Error of as many orthogonal directions as there are parameters, against their length."""
    options: dict[str, Any] = {"directions": 8, "direction": "orthogonal"}
    found = [response(trial, 8, smoothing=mu, **options) for mu in trial.scale["lengths"]]
    error = [statistics.fmean((g - e).norm(dim=1).tolist()) for g, e in found]
    return slope(error, trial.scale["lengths"][1] / trial.scale["lengths"][0])


def of_levels(trial: Trial) -> list[Point]:
    """log2 of the error of the mean of DL-SGD, for each level more: where the lower noise is all there is, and in x."""
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


def of_condition(trial: Trial) -> list[Point]:
    """Exponent of the condition number in the calls to a gradient norm of 1e-3."""
    setting, calls = dict(trial.setting), []
    for kappa in trial.scale["kappas"]:
        given = {**trial.scale, "kappa": kappa}
        setting |= {"lower_steps": round(3 * kappa**0.5), "linear_steps": 12}
        curve = stationary(trial._replace(scale=given, setting=setting, budget=1e5 * trial.budget), make=quadratic)
        calls.append(curve[-1]["spent"])
    return slope(calls, trial.scale["kappas"][1] / trial.scale["kappas"][0])


def law(
    name: str, paper: str, figure: str, claim: str, value: str, run: Callable[[Trial], list[Point]], rule: Within,
    arms: dict[str, Arm], departure: str, **numbers: Any,
) -> Experiment:  # fmt: skip
    """One exponent, at three numbers of seeds."""
    fewer = {key: n // 10 if key in ("repeats", "contexts") else n for key, n in numbers.items()}
    scales = {
        "smoke": {"budget": 1, "seeds": 3, **fewer},
        "cpu": {"budget": 1, "seeds": 10, **numbers},
        "full": {"budget": 1, "seeds": 40, **numbers},
    }
    return Experiment(
        id=name, paper=paper, figure=figure, claim=claim, value=value, run=run, arms=arms, rule=rule,
        score="slope of logarithms", unit="estimates", scales=scales, departures=(departure,),
    )  # fmt: skip


ZEROTH, LEVELS = {"PZOBO": Arm(None)}, {"DL-SGD": Arm(None)}
RANDOM = "random problems with 6 lower variables and a quadratic response"
EXPERIMENTS = [
    law(
        "000-law-size", "arXiv:2110.07004", "proposition 2",
        "the relative variance of one direction grows like the number p of upper parameters", "1", of_size,
        Within(arm="PZOBO", low=0.8, high=1.2), ZEROTH, RANDOM, sizes=(8, 64), repeats=200,
    ),
    law(
        "000-law-directions", "arXiv:2110.07004", "proposition 2",
        "the variance falls like 1/Q with the number of directions", "-1", of_directions,
        Within(arm="PZOBO", low=-1.2, high=-0.8), ZEROTH, RANDOM, counts=(1, 8), repeats=200,
    ),
    law(
        "000-law-smoothing", "arXiv:2110.07004", "proposition 2",
        "the bias of forward differences falls like their length", "1", of_smoothing,
        Within(arm="PZOBO", low=0.8, high=1.2), ZEROTH, RANDOM, lengths=(1e-3, 1e-2), repeats=20,
    ),
    law(
        "004-law-levels", "arXiv:2310.18535", "lemma 2",
        "the bias falls like 2^(-K/2) with the number of levels, or faster", "-1/2 for each level, or less", of_levels,
        Within(arm="DL-SGD", low=-3.0, high=-0.4), LEVELS,
        "one quadratic problem of three variables; the noise of 4,000 contexts is in the error",
        depths=(1, 4), contexts=4000,
    ),
    law(
        "003-law-kappa", "arXiv:2307.00126", "corollary 3.6",
        "the calls of RAHGD grow with a smaller power of the condition number than those of AID, by 0.75",
        "3.25 and 4: a difference of -0.75, of upper bounds", of_condition,
        Within(arm="RAHGD", minus="AID", low=-math.inf, high=-0.25),
        {
            "RAHGD": Arm(partial(rahgd, theta=0.1), {"lr": axis(1.0)}, "lower momentum of the theory, 1 - theta = 0.9"),
            "AID": Arm(partial(plain, bo.AID), {"lr": axis(1.0)}),
        },
        "quadratic problems of 10 variables at each level, condition numbers 10 and 100, 3 sqrt(kappa) lower steps and "
        "12 products for both; a difference of a quarter and more counts as that",
        kappas=(10.0, 100.0),
    ),
]  # fmt: skip

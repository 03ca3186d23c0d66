"""Shallow hyper-representation with random directions (arXiv:2110.07004, figure 2)."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import bilevel_optim as bo

from ..common import gradients
from ..common.search import axis
from ..common.seeds import begin, stream
from ..hyper_representation import CODE, regression
from .experiment import Arm, Better, Experiment, Point, Trial
from .runner import follow

__all__ = ["EXPERIMENTS"]


def run(trial: Trial) -> list[Point]:
    """Run until the oracle calls are spent; the score is the loss of all methods after N lower steps from y_0."""
    scale, setting = trial.scale, dict(trial.setting)
    task = regression(
        tuple(scale["layers"]), scale["n"], scale["ridge"], SimpleNamespace(seed=trial.seed, device="cpu")
    )
    begin(trial.seed, "method")
    adam = torch.optim.Adam(task.x, lr=setting.pop("lr"))
    optimizer: bo.BilevelOptimizer = trial.make(
        task.x, task.y, lr=1.0, lower_lr=1e-3, lower_steps=scale["lower_steps"], warm_start=False,
        generator=stream(trial.seed, "directions"), **setting,
    )  # fmt: skip
    start = [t.detach().clone() for t in task.y]
    probe = bo.FirstOrder(task.x, task.y, lr=1.0, lower_lr=1e-3, lower_steps=scale["lower_steps"], warm_start=False)

    def step() -> None:
        optimizer.backward(task.upper, task.lower)
        adam.step()

    def measure() -> dict[str, float]:
        loss = float(probe.backward(task.upper, task.lower))
        with torch.no_grad():  # restore the start of y for the method
            for live, first in zip(task.y, start, strict=True):
                live.copy_(first)
        return {"score": math.log10(loss)}

    return follow(step, measure, lambda: gradients(optimizer), trial.budget, scale["evaluations"])


def arms(lr: dict[str, Any], smoothing: float, linear_steps: int) -> dict[str, Arm]:
    """Return the arms of the figure, and PZOBO as in the authors' code; ``lr`` is by name."""
    random: dict[str, Any] = {"smoothing": smoothing}
    makes: dict[str, tuple[Any, str]] = {
        "PZOBO": (partial(bo.PZOBO, directions=1, **random), "one Gaussian direction, as in the text"),
        "PZOBO, code": (
            partial(bo.PZOBO, directions=1, **random, **CODE),
            "blocks of norm 1 and no dimension factor, as in the authors' public code",
        ),
        "PZOBO, 16": (partial(bo.PZOBO, directions=16, **random), "16 directions"),
        "HOZOG": (partial(bo.HOZOG, directions=1, **random), ""),
        "AID-FP": (partial(bo.AID, linear_solver="fixed_point", linear_steps=linear_steps), ""),
        "AID-CG": (partial(bo.AID, linear_steps=linear_steps), ""),
        "ITD": (partial(bo.ITD), ""),
        "direct only": (partial(bo.FirstOrder), "the control, without an indirect term"),
    }
    return {name: Arm(make, {"lr": lr.get(name, lr[""])}, note) for name, (make, note) in makes.items()}


RIVALS = ("AID-FP", "AID-CG", "HOZOG")
LINEAR = {"layers": [64, 128], "n": 500, "ridge": 0.1, "lower_steps": 20}
LAYERS = {"layers": [256, 512, 256], "n": 1000, "ridge": 1e-3, "lower_steps": 10}
COMMON: dict[str, Any] = {
    "paper": "arXiv:2110.07004",
    "run": run,
    "score": "log10 of the upper loss after N lower steps",
    "unit": "gradients (a product is 2)",
    "seconds": True,
}
CLAIM = "PZOBO converges faster than AID-FP, AID-CG and HOZOG"
VALUE = "fastest; 0.0185 (step 99) in the authors' notebook, AID-FP 0.077, AID-CG 0.067, HOZOG 16.9"
TWO_VALUE = "fastest; 2.5e-4 (step 99) in the authors' notebook, AID-FP 1.5e-4, AID-CG 0.029, HOZOG 26.6"


def pair(name: str, figure: str, value: str, **fields: Any) -> list[Experiment]:
    """Return the claim about the method of the text, and the claim about that of the authors' code."""
    literal = Experiment(
        id=name, figure=figure, claim=f"{CLAIM} ({name.split('-')[1]})", value=value,
        rule=Better(method="PZOBO", rivals=RIVALS, control="direct only", speed=True), **COMMON, **fields,
    )  # fmt: skip
    code = Experiment(
        id=f"{name}-code", figure=figure, claim=f"the same for PZOBO as in the authors' code ({name.split('-')[1]})",
        value=value, like=name,
        rule=Better(method="PZOBO, code", rivals=RIVALS, control="direct only", speed=True), **COMMON, **fields,
    )  # fmt: skip
    return [literal, code]


EXPERIMENTS = [
    *pair(
        "000-linear",
        "figure 2a",
        VALUE,
        arms=arms({"": axis(0.02, 0.05, 0.125)}, 0.01, 20),
        scales={
            "smoke": {**LINEAR, "budget": 800, "seeds": 3, "evaluations": 3, "search": False},
            "cpu": {**LINEAR, "budget": 4100, "seeds": 5, "evaluations": 10},
            "full": {**LINEAR, "budget": 20_000, "seeds": 10, "evaluations": 20},
        },
        shares=(),
        moves=4,
        whole=4100,
        departures=("Adam's learning rates are searched for all methods; in the paper 0.05 (HOZOG in its code 0.1)",),
    ),
    *pair(
        "000-twolayer",
        "figure 2d",
        TWO_VALUE,
        arms=arms({"": axis(0.01), "HOZOG": axis(0.2)}, 0.1, 10),
        scales={
            "smoke": {**LAYERS, "n": 100, "budget": 200, "seeds": 3, "evaluations": 3},
            "cpu": {**LAYERS, "budget": 1500, "seeds": 5, "evaluations": 6},
            "full": {**LAYERS, "n": 5000, "budget": 2100, "seeds": 5, "evaluations": 10},
        },
        whole=2100,
        departures=(
            "1,000 examples at the scale cpu (5,000 in the paper's code)",
            "learning rates as in the paper and its code (0.01; HOZOG 0.2), without a search",
        ),
    ),
]

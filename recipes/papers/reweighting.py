"""Example reweighting with one lower problem and with many (arXiv:2105.02266, figures 1 and 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

import bilevel_optim as bo
from bilevel_optim.methods.tracked.rows import Rows
from bilevel_optim.methods.tracked.trackers import Matrices, Measured, Mix
from bilevel_optim.methods.tracked.variants import Variant, exact

from ..common.methods import STOCHASTIC, Method
from ..common.search import Axis, axis
from ..common.seeds import stream
from ..hyper_regularization import Reweighting
from ..hyper_regularization import run as reweight
from ..problems.libsvm import load_breast_cancer, load_libsvm
from ..problems.problem import Part
from .experiment import Arm, Better, Experiment, Point, Trial

__all__ = ["EXPERIMENTS"]

# Source of a split, numbers of its training and validation examples (the test part in the paper).
SPLITS = {
    "a1a": ("a9a", 1605, 30_956),
    "w1a": ("w8a", 2477, 47_272),
}


@lru_cache(maxsize=1)
def whole(name: str, root: Path | None) -> Part:
    """Return all examples of a data set."""
    if name == "breast_cancer":
        parts = load_breast_cancer(0)
    else:
        parts = load_libsvm(name, None if root is None else root / "libsvm", False)
    return Part(torch.cat([p.features for p in parts]), torch.cat([p.labels for p in parts]))


@lru_cache(maxsize=8)  # all seeds of an arm
def problem_of(seed: int, root: Path | None, data: str, most: int, tasks: int, ridge: float) -> Reweighting:
    """Return the problem on a random split of one seed, with at most ``most`` validation examples."""
    source, train, val = SPLITS.get(data, (data, 300, 269))
    examples = whole(source, root)
    generator = stream(seed, "data")
    order = torch.randperm(len(examples.labels), generator=generator)
    scales = 1 + 10 * torch.rand(tasks, generator=generator) if tasks > 1 else None
    first, second = examples.take(order[:train]), examples.take(order[train : train + min(val, most)])
    return Reweighting(first, second, ridge, scales)


def run(trial: Trial) -> list[Point]:
    """Run until the samples are drawn; the score is h(x) = f(x, y*(x)) in units of its value at equal weights."""
    scale: Mapping[str, Any] = trial.scale
    problem = problem_of(trial.seed, trial.root, scale["data"], scale["val"], scale["tasks"], scale["ridge"])
    method: Method = trial.make
    options = {key: value for key, value in trial.setting.items() if key not in ("lr", "lower_lr")}
    method = method._replace(make=partial(method.make, **options))
    rates = len(problem.train) * trial.setting["lr"], trial.setting["lower_lr"] * problem.lower_lr
    args = SimpleNamespace(
        samples=trial.budget, batch=32, task_batch=10, evaluations=scale["evaluations"], compile=False
    )
    found = reweight(problem, method, rates, trial.seed, args)
    start = found["curve"][0]["solved"]
    curve = [
        {
            "spent": p["samples"],
            "seconds": p["seconds"],
            "calls": p["calls"],
            "steps": p["steps"],
            "score": p["solved"] / start,
        }
        for p in found["curve"]
    ]
    curve = [p for i, p in enumerate(curve) if i == 0 or p != curve[i - 1]]
    return [*curve, {**curve[-1], "score": math.inf}] if found["diverged"] else curve


class Averages(Matrices):
    """Moving averages of new samples: STORM without the correction at the last point."""

    def track(self, rows: Rows, measured: Measured, mix: Mix) -> tuple[Rows, Rows]:
        """Return (1 - beta) X + beta h, which is STORM with the new value in place of the old one."""
        return super().track(rows, measured._replace(old=measured.new), mix)


class Average(bo.SVRB):
    """SVRB with moving averages, a variant that SVRB itself does not offer."""

    _VARIANTS: ClassVar = {"average": Variant(Averages, exact)}


RATES = {"lr": axis(1.0, 10.0, 100.0), "lower_lr": axis(0.1, 0.5, 2.0)}
STORM: dict[str, Axis] = {**RATES, "beta": axis(0.3, 1.0, most=1.0)}
CUBE_ROOT: dict[str, Any] = {"schedule": "cube_root"}


def arms(*names: str) -> dict[str, Arm]:
    """Return methods with their own decay of the step sizes."""
    return {name: Arm(STOCHASTIC[name], RATES) for name in names}


def one(data: str) -> Experiment:
    """Return the experiment with one lower problem."""
    problem = {"data": data, "tasks": 1, "ridge": 0.01}
    svrb = Method(partial(bo.SVRB, **CUBE_ROOT), floor=True, matrices=True)
    average = Method(partial(Average, variant="average", **CUBE_ROOT), floor=True, matrices=True)
    fresh = Method(partial(bo.SVRB, beta=1.0), (1 / 3, 1 / 3), floor=True, matrices=True)
    return Experiment(
        id=f"002-libsvm-{data}",
        paper="arXiv:2105.02266",
        figure="figure 1",
        claim=f"SVRB is the fastest per sample, due to its variance reduction ({data})",
        value="no number in the text: SVRB fastest in samples and in time",
        run=run,
        arms={
            "SVRB": Arm(svrb, STORM),
            "SVRB, average": Arm(average, STORM, "moving averages instead of STORM: SVRB without the correction"),
            "SVRB, no memory": Arm(fresh, RATES, "its Hessian comes from 32 rows only, and it stalls"),
            **arms("stable", "ttsa", "stocbio", "bsa"),
        },
        rule=Better(
            method="SVRB", rivals=("stable", "ttsa", "stocbio", "bsa"), control="SVRB, average", speed=True
        ),
        score="h(x) in units of its start",
        unit="samples",
        scales={
            "smoke": {**problem, "data": "breast_cancer", "val": 300, "budget": 3000, "seeds": 3, "evaluations": 3,
                      "search": False},
            "cpu": {**problem, "val": 5000, "budget": 20_000, "seeds": 5, "evaluations": 6},
            "full": {**problem, "val": 50_000, "budget": 500_000, "seeds": 5, "evaluations": 12},
        },
        shares=(0.2,),
        moves=30,
        departures=(
            f"random splits of the larger set ({SPLITS[data][0]}), a new one per seed; 5,000 validation examples "
            "and 20,000 samples at the scale cpu",
            "weights are sigmoids; ridge 0.01; batches of 32: the text has none of these",
            "baselines with their own decay of the step sizes, not 1/sqrt(t) for x and 1/t for y",
            "c0 = 8; the constant of beta is at most 1",
            "SVRB has a floor of lambda / 2, no ceilings, and explicit matrices; the paper uses conjugate gradients, "
            "which matters at equal seconds",
        ),
        data="libsvm",
        seconds=True,
    )  # fmt: skip


def many(data: str, tasks: int) -> Experiment:
    """Return the experiment with many lower problems of different temperatures."""
    problem = {"data": data, "tasks": tasks, "ridge": 0.01}
    rsvrb = partial(bo.RSVRB, variant="faithful")
    return Experiment(
        id=f"002-tasks-{data}-{tasks}",
        paper="arXiv:2105.02266",
        figure="figure 2",
        claim=f"RE-RSVRB is the fastest per sample, because a step uses only 10 of {tasks} tasks ({data})",
        value="no number in the text: RE-RSVRB fastest in most cases",
        run=run,
        arms={
            "RE-RSVRB": Arm(Method(partial(rsvrb, restarts=100), floor=True, tasks=True), STORM),
            "RSVRB, self-normalised": Arm(STOCHASTIC["rsvrb"], RATES, "the library's default variant"),
            "all tasks": Arm(
                Method(partial(bo.SVRB, variant="matrix_free", **CUBE_ROOT), floor=True),
                STORM,
                "SVRB, all tasks at every step",
            ),
            **arms("ttsa", "stocbio", "bsa"),
        },
        rule=Better(method="RE-RSVRB", rivals=("ttsa", "stocbio", "bsa"), control="all tasks", speed=True),
        score="h(x) in units of its start",
        unit="samples",
        scales={
            "smoke": {**problem, "data": "breast_cancer", "tasks": 20, "val": 100, "budget": 20_000, "seeds": 3,
                      "evaluations": 2, "search": False},
            "cpu": {**problem, "val": 100, "budget": 1000 * tasks, "seeds": 3, "evaluations": 4},
            "full": {**problem, "val": 100, "budget": 50_000 * tasks, "seeds": 5, "evaluations": 12},
        },
        shares=(0.05, 0.2),
        moves=6,
        departures=(
            f"random splits of {SPLITS[data][0]}, a new one per seed; 100 validation examples, as in the paper",
            "the baselines take all tasks at each step; weights are sigmoids; a mean over tasks, not their sum",
            "stages of 100, 200, ... steps: the text gives no lengths",
            "40 probes, beta in units of q, a floor of lambda / 2",
            "1,000 samples per task at the scale cpu",
        ),
        data="libsvm",
        seconds=True,
    )  # fmt: skip


EXPERIMENTS = [*(one(data) for data in SPLITS), many("a1a", 200)]

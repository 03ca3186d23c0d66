"""Meta-learn a centre of linear classifiers (arXiv:2310.18535, figures 1, 2, 4 and table 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

import bilevel_optim as bo

from ..benchmarks.contextual import classifiers, method, seconds
from ..common.search import axis
from ..common.seeds import begin, stream
from ..meta_classification import LEVELS, evaluate
from ..problems.problem import Part
from ..problems.tasks import Centre, load_tasks
from .experiment import Arm, Better, Experiment, Point, Trial, Within
from .runner import follow

__all__ = ["EXPERIMENTS"]

ROWS = 8


@lru_cache(maxsize=8)  # all seeds of an arm
def parts_of(seed: int, tasks: int) -> tuple[Part, ...]:
    """Return support, query and test rows of the tasks of one seed: scikit-learn's digits, rotated."""
    return load_tasks("digits", None, tasks, (0.6, 0.2, 0.2), stream(seed, "data"))


def run(trial: Trial, adapted: bool = False) -> list[Point]:
    """Run the updates of the centre; the score is the test loss after the method's own kind of adaptation."""
    scale, setting = trial.scale, dict(trial.setting)
    begin(trial.seed, "start")
    support, query, test = parts_of(trial.seed, scale["tasks"])
    problem, made = Centre(support, query), 0
    rows = bool(setting.pop("rows", False))
    if rows:
        problem.y = torch.zeros(scale["tasks"], *problem.x.shape, requires_grad=True)
    else:
        setting |= {"tasks_per_step": 4}
    few = (setting["lower_steps"], setting["lower_lr"]) if "lower_steps" in setting else ()
    if not few and not rows:
        setting["lower_init"] = problem.starts
    optimizer: bo.BilevelOptimizer = trial.make(
        [problem.x], [problem.y], lower_batch=ROWS, upper_batch=4 * ROWS,
        generator=stream(trial.seed, "method"), **setting,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: (t + 1) ** -0.5, lambda t: 1.0])

    def step() -> None:
        nonlocal made
        optimizer.step(problem.upper, problem.lower, tasks=problem.tasks)
        scheduler.step()
        made += 1

    def measure() -> dict[str, float]:
        loss, accuracy = evaluate(problem, test, *few)
        return {"score": loss, "accuracy": accuracy}

    return follow(step, measure, lambda: float(made), trial.budget, scale["evaluations"])


def levels_of(trial: Trial) -> int:
    """Return the arm's number of levels; half of it at the scale smoke."""
    levels: int = trial.setting["levels"]
    return levels // 2 if trial.scale.get("half") else levels


def timed(trial: Trial) -> list[Point]:
    """Measure log10 of DL-SGD's time per estimate over RT-MLMC's."""
    problem, levels, count = classifiers(), levels_of(trial), trial.scale["count"]
    spent = []
    for kind in (bo.DLSGD, bo.RTMLMC):
        optimizer = method(problem, kind, levels, count)
        optimizer.generator = stream(trial.seed, "method")
        spent.append(seconds(problem, optimizer, trial.scale["deep" if kind is bo.DLSGD else "shallow"]))
    deep, shallow = (sum(times) / len(times) for times in spent)
    return [{"spent": 0.0, "seconds": sum(map(sum, spent)), "score": math.log10(deep / shallow)}]


LR = axis(1.0, 10.0, 100.0)
STEP = {"lr": LR, "lower_lr": axis(0.02, 0.1, 0.5)}
ONE = {**STEP, "lower_steps": axis(1)}
META = Experiment(
    id="004-meta",
    paper="arXiv:2310.18535",
    figure="figures 1, 2 and 4",
    claim="RT-MLMC generalises better than MAML with 1 and more steps and than BSVRB v2, due to its deep lower solves",
    value="no number in the text: RT-MLMC best, MAML better with more steps",
    run=run,
    arms={
        "RT-MLMC": Arm(partial(bo.RTMLMC, **LEVELS, levels=6), {"lr": LR}),
        "RT-MLMC, 1 level": Arm(partial(bo.RTMLMC, **LEVELS, levels=1), {"lr": LR}),
        "RT-MLMC, 4 levels": Arm(partial(bo.RTMLMC, **LEVELS, levels=4), {"lr": LR}),
        "MAML": Arm(bo.MAML, ONE),
        "MAML, several steps": Arm(bo.MAML, {**STEP, "lower_steps": axis(4, 8, 12, least=1, extends=False)}),
        "BSVRB v2": Arm(
            partial(bo.BSVRB, version=2, task_batch=4, floor=1.0),
            {"lr": LR, "lower_lr": axis(0.02, 0.1, 0.5), "rows": axis(1)},
        ),
    },
    rule=Better(
        method="RT-MLMC",
        rivals=("MAML", "MAML, several steps", "BSVRB v2"),
        control="RT-MLMC, 1 level",
        least=0.002,
    ),
    score="test loss after adaptation",
    unit="updates",
    scales={
        "smoke": {"tasks": 4, "budget": 20, "seeds": 3, "evaluations": 2, "search": False},
        "cpu": {"tasks": 20, "budget": 150, "seeds": 5, "evaluations": 6},
        "full": {"tasks": 20, "budget": 3000, "seeds": 5, "evaluations": 12},
    },
    moves=6,
    departures=(
        "features of a small network with random weights, on digits rotated by an angle of the task; in the paper "
        "tiny-ImageNet on a trained network",
        "in the test MAML adapts with its own number of steps, the others with 100 full-batch steps",
        "step sizes lr / sqrt(t); all terms of the Neumann series, evenly spread levels",
    ),
)


def evolved(directions: int, lower_directions: int = 0, kind: str = "gaussian") -> Arm:
    """Return ES-MAML with one step of adaptation and these numbers of pairs of directions, above and in adaptation."""
    options: dict[str, Any] = {"directions": directions, "direction": kind, "lower_directions": lower_directions}
    return Arm(partial(bo.ESMAML, **options), ONE)


EVOLUTION = Experiment(
    id="000-esmaml",
    paper="arXiv:2110.07004",
    figure="section 5, a sentence",
    claim="ES-MAML does not come near MAML, because of its variance",
    value="no number: the variance is too large for the target accuracy of MAML",
    run=run,
    arms={
        "MAML": Arm(bo.MAML, ONE),
        "ES-MAML": evolved(8),
        "ES-MAML, adapted by values": evolved(8, 8),
        "ES-MAML, 64 pairs": evolved(64),
    },
    rule=Within(arm="ES-MAML", minus="MAML", low=0.1, high=math.inf),
    score="test loss after adaptation",
    unit="updates",
    scales=META.scales,
    shares=(0.3,),
    moves=10,
    departures=(
        *META.departures[:1],
        "8 pairs of directions: the paper gives no number",
        "in the test all arms adapt by one gradient step, including the arm trained with adaptation by values",
    ),
)


def growth(
    name: str, figure: str, where: str, count: int, times: tuple[tuple[int, str], ...],
    run: Callable[[Trial], list[Point]], *departures: str,
) -> Experiment:  # fmt: skip
    """Return an experiment on the growth of the time ratio from the fewest to the most levels."""
    few, many = f"{times[0][0]} levels", f"{times[-1][0]} levels"
    repeats = 1 if count > 1 else 5  # a single task rarely draws deep levels
    return Experiment(
        id=name,
        paper="arXiv:2310.18535",
        figure=figure,
        claim=f"the ratio of DL-SGD's to RT-MLMC's time per estimate grows from {times[0][0]} to {many} ({where})",
        value=f"{', '.join(value for _, value in times)} at {', '.join(f'{k}' for k, _ in times)} levels: a growth of "
        f"{math.log10(float(times[-1][1]) / float(times[0][1])):.2f}",
        run=run,
        arms={f"{levels} levels": Arm(None, {"levels": axis(levels)}, f"paper: {value}") for levels, value in times},
        rule=Within(arm=many, minus=few, low=0.0, high=math.inf),
        score="log10 of the time of DL-SGD over that of RT-MLMC",
        unit="estimates",
        scales={
            "smoke": {"budget": 1, "seeds": 3, "count": min(count, 2), "deep": 1, "shallow": 1, "half": True},
            "cpu": {"budget": 1, "seeds": 5, "count": count, "deep": 2, "shallow": 12 * repeats},
            "full": {"budget": 1, "seeds": 20, "count": count, "deep": 10, "shallow": 50 * repeats},
        },
        departures=(
            "wall-clock seconds on a machine with other work; the paper's are those of its machine, so that only the "
            "growth is judged",
            *departures,
        ),
    )


EXPERIMENTS = [
    EVOLUTION,
    META,
    growth(
        "004-time-tasks",
        "table 2",
        "20 tasks at once",
        20,
        ((6, "0.97"), (8, "2.1"), (10, "5.0")),
        timed,
        "random data of the same shape; the paper does not say how many tasks it takes at once",
    ),
]

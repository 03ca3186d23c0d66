"""Decisions robust to shifts of the side information (arXiv:2310.18535, figure 3 and table 3)."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from types import SimpleNamespace

import torch

import bilevel_optim as bo

from ..common import timed
from ..common.search import axis
from ..common.seeds import begin, stream
from ..newsvendor import SIDE, Newsvendor, Rule, constant, learn, losses
from .experiment import Arm, Better, Experiment, Point, Trial
from .meta import growth, levels_of

__all__ = ["EXPERIMENTS"]


@lru_cache(maxsize=9)  # all seeds of an arm
def data(seed: int, demands: int, shift: float, test_points: int) -> Newsvendor:
    """Return the data of one seed."""
    return Newsvendor(
        SimpleNamespace(
            seed=seed, literal_init=False, contexts=50, demands=demands, test_points=test_points, shift=shift
        )
    )


def run(trial: Trial) -> list[Point]:
    """Run the updates; the score is the mean cost on test contexts."""
    scale = trial.scale
    problem = data(trial.seed, scale["demands"], scale["shift"], scale["test_points"])
    args = SimpleNamespace(
        seed=trial.seed, lr=trial.setting["lr"], tasks_per_step=4, rows=4, levels=4, steps=round(trial.budget)
    )
    curve = learn(problem, trial.make, trial.setting["price"], args)["curve"]
    points = [{"spent": p["step"], "steps": p["step"], "seconds": p["seconds"], "score": p["cost"]} for p in curve]
    points[0]["ignorant"] = constant(problem)
    return points


def ratio(trial: Trial) -> list[Point]:
    """Measure log10 of DL-SGD's time per estimate over RT-MLMC's."""
    scale, price = trial.scale, 10.0
    problem = data(trial.seed, 30, 0.0, 100)
    begin(trial.seed, "start")
    rule, y = Rule(), torch.zeros(SIDE, requires_grad=True)
    upper, lower = losses(rule, y, price)
    means, spent = [], 0.0
    for kind, repeats in ((bo.DLSGD, scale["deep"]), (bo.RTMLMC, scale["shallow"])):
        optimizer = kind(
            rule.parameters(), [y], lr=0.0, lower_lr=1 / (2 * price), levels=levels_of(trial), neumann_steps=8,
            tasks_per_step=1, lower_batch=4, upper_batch=4, lower_init=lambda ids: problem.xi[ids],
            generator=stream(trial.seed, "method"),
        )  # fmt: skip
        estimate = partial(optimizer.backward, upper, lower, tasks=problem.tasks)
        times = [timed(estimate)[1] for _ in range(repeats + 1)]
        means.append(sum(times[1:]) / repeats)  # the first one warms up
        spent += sum(times[1:])
    return [{"spent": 0.0, "seconds": spent, "score": math.log10(means[0] / means[1])}]


LR = axis(3e-3, 1e-2)
PRICES = axis(1.0, 10.0, 100.0, most=1e4, least=1e-3)
ARMS = {
    "WDRO-SI": Arm("rt-mlmc", {"lr": LR, "price": PRICES}, "all terms of the Neumann series, evenly spread levels"),
    "WDRO-SI as printed": Arm("rt-mlmc-paper", {"lr": LR, "price": PRICES}),
    "WDRO": Arm("wdro", {"lr": LR, "price": PRICES}),
    "ERM": Arm(
        "rt-mlmc",
        {"lr": LR, "price": axis(1e6)},
        "WDRO-SI with lambda = 1e6, where no shift is worth its price: ERM on the same draws, so that seeds are paired",
    ),
    "ERM, plain": Arm("erm", {"lr": LR, "price": axis(1e6)}, "with its own draws"),
}


def experiment(name: str, demands: int, shift: float = 0.0) -> Experiment:
    """Return the experiment with this number of demands per context and this noise on the test contexts."""
    what = "" if not shift else f", test contexts with noise of standard deviation {shift:g}"
    problem = {"demands": demands, "shift": shift}
    return Experiment(
        id=name,
        paper="arXiv:2310.18535",
        figure="figure 3" if not shift else "figure 3, shifted",
        claim=f"WDRO-SI has a lower test cost than ERM and WDRO ({demands} demands per context{what})",
        value="no number in the text: WDRO-SI best for each number of demands",
        run=run,
        arms=ARMS,
        rule=Better(method="WDRO-SI", rivals=("ERM", "WDRO"), control="ERM", without=("price",), least=0.005),
        score="test cost",
        unit="updates",
        scales={
            "smoke": {**problem, "budget": 15, "seeds": 3, "test_points": 2000, "search": False},
            "cpu": {**problem, "budget": 200, "seeds": 5, "test_points": 5000},
            "full": {**problem, "budget": 3000, "seeds": 10, "test_points": 200_000},
        },
        late=0.2,
        shares=(0.3,),
        moves=6,
        joint=(("lr", "price"),),
        departures=(
            "h = 1, b = 4, networks 100-64-64-1 and the numbers of updates and rows are ours; none are in the text",
            "the true weights are uniform on +-1/sqrt(fan in): the printed [0, 1) makes the demand constant",
            "step sizes lr / sqrt(t), not 1/sqrt(t) and then 1/t",
            "5,000 test points at the scale cpu (200,000 in the paper), the same for all methods of a seed",
            "200 updates at the scale cpu: with 50 contexts no tested method is better by then than the best constant "
            "order (ignorant, in the records)",
            "a difference of less than 0.005 does not count",
            *(() if not shift else ("the paper has no shifted test set; robustness should show on one",)),
        ),
    )


EXPERIMENTS = [
    growth(
        "004-time-newsvendor",
        "table 3",
        "newsvendor, one task at once",
        1,
        ((2, "2.5"), (4, "4.2"), (6, "8.3"), (8, "13.6")),
        ratio,
        "the runs are those of four earlier rows, one per number of levels, which tested the paper's own ratios and "
        "did not hold (UNDECIDED at 2 levels, FAILS at 4, 6 and 8); the claim about the growth was written after "
        "them, and from 2 to 4 levels there is no growth",
        "networks 100-64-64-1 and lambda = 10: the text has neither",
        "one context at a time: with several, the deepest level dominates, which hides the ratio; the paper does not "
        "say how many it takes at once",
    ),
    experiment("004-newsvendor-30", 30),
    experiment("004-newsvendor-shift", 30, 3.0),
]

"""Learn to regularise 20 Newsgroups with mini-batches (arXiv:2509.02937, figure 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo

from ..common import gradients
from ..common.methods import growing_penalty
from ..common.search import axis
from ..common.seeds import begin, stream
from ..problems.images import load_images
from ..problems.newsgroups import load_newsgroups
from ..problems.problem import Part
from ..problems.softmax import Regularised
from ..problems.value_function import lower_solution
from .experiment import Arm, Better, Experiment, Point, Trial
from .full_batch import tested
from .runner import follow

__all__ = ["EXPERIMENTS", "problem_of"]


class Chunks:
    """Fixed batches of about ``size`` examples, in a new random order at every pass."""

    def __init__(self, part: Part, size: int, generator: torch.Generator) -> None:
        count = len(part.labels)
        self.parts = [part.take(i) for i in torch.randperm(count, generator=generator).chunk(max(count // size, 1))]
        self.generator = generator

    def __iter__(self) -> Iterator[Part]:
        for i in torch.randperm(len(self.parts), generator=self.generator).tolist():
            yield self.parts[i]


class Texts(Regularised):
    """Regularised problem with a bounded solve for y*(x), as a method that diverges leaves almost no penalty."""

    def solution(self, x: Tensor, start: Tensor) -> Tensor:
        """Return y*(x), by at most ten Newton steps."""
        return lower_solution(self.lower, x, start, tol=self.tol, steps=10, products=100)


@lru_cache(maxsize=8)  # all seeds of an arm
def problem_of(
    seed: int, data: str, root: Path | None, least: int, batch: int, tol: float
) -> tuple[Texts, Chunks, Chunks]:
    """Return the problem of one split, and the batches of its training and validation part.

    ``tol`` is the norm of the lower gradient at which y*(x) counts as solved. The curvature is about 1e-5 here, so at
    3e-4 scores depend on the path by 0.01, as much as methods differ.
    """
    generator = stream(seed, "data")
    if data == "digits":
        parts = load_images("digits", None, False, (300, 300), generator)
    else:
        parts = load_newsgroups(None if root is None else root / data, False, True, seed, least)
    size, classes = parts[0].features.shape[1], int(parts[0].labels.max()) + 1
    problem = Texts(parts, ridge=1 / (2 * classes * size), x=torch.zeros(size, 1))
    problem.tol = tol
    train, val = (Chunks(part, batch, generator) for part in parts[:2])
    return problem, train, val


def run(trial: Trial) -> list[Point]:
    """Run until the oracle calls are spent; the score is the test loss at y*(x)."""
    scale = trial.scale
    problem, train, val = problem_of(
        trial.seed, scale["data"], trial.root, scale["least"], scale["batch"], scale["tol"]
    )
    for name, chunks in (("training", train), ("validation", val)):
        chunks.generator = stream(trial.seed, f"{name} batches")
    begin(trial.seed, "start")
    x, y = problem.start()
    setting = dict(trial.setting)
    lower_lr = setting.pop("rate") * problem.lower_lr

    def loss(part: Part) -> Tensor:
        return F.cross_entropy(part.features @ y, part.labels)

    upper = bo.Objective(loss, val)
    lower = bo.Objective(lambda part: loss(part) + problem.ridge * (x.exp() * y.square()).sum(), train)
    generator = stream(trial.seed, "method")
    optimizer: bo.BilevelOptimizer = trial.make([x], [y], lower_lr=lower_lr, generator=generator, **setting)
    solution = problem.first

    def measure() -> dict[str, float]:
        nonlocal solution
        solution = problem.solution(x, solution)
        return {"score": tested(problem, x, solution), "accuracy": problem.accuracy(solution)}

    step: Callable[[], Tensor] = partial(optimizer.step, upper, lower)
    return follow(step, measure, lambda: gradients(optimizer), trial.budget, scale["evaluations"])


RAW, LENGTH, RATE = axis(100.0, 1000.0, 10000.0), axis(0.3, 1.0, 3.0), axis(1.0, 4.0)
STEPS: dict[str, Any] = {"lower_steps": 10}
HVP = {"lr": RAW, "rate": RATE}


def f2sa(order: int, normalize: bool, samples: str = "shared") -> Arm:
    """Return the arm of F2SA with one order."""
    make = partial(bo.F2SA, order=order, normalize=normalize, samples=samples, **STEPS)
    return Arm(make, {"lr": LENGTH if normalize else RAW, "nu": axis(0.03, 0.1), "rate": RATE})


def growing(x: list[Tensor], y: list[Tensor], **options: Any) -> bo.F2SA:
    """Return F2SA as in its own paper."""
    return growing_penalty(bo.F2SA(x, y, order=1, normalize=False, **STEPS, **options))


ARMS = {
    "F2SA-2": f2sa(2, True),
    "F2SA-1": f2sa(1, False),
    "F2SA-1, normalised": f2sa(1, True),
    "StocBiO": Arm(partial(bo.StocBiO, linear_steps=10, **STEPS), HVP),
    "MRBO": Arm(partial(bo.MRBO, linear_steps=10), HVP),
    "VRBO": Arm(partial(bo.VRBO, linear_steps=10, lower_steps=3), HVP),
    "F2SA-2, raw": f2sa(2, False),
    "F2SA-3": f2sa(3, True),
    "F2SA-4": f2sa(4, True),
    "F2SA-5": f2sa(5, True),
    "F2SA-1, growing penalty": Arm(growing, f2sa(1, False).grid, "1/nu grows like the seventh root of the steps"),
    "without": Arm(partial(bo.FirstOrder, lr=1.0, **STEPS), {"rate": axis(1.0)}, "x stays at its start"),
}

EXPERIMENTS = [
    Experiment(
        id="001-news",
        paper="arXiv:2509.02937",
        figure="figure 1",
        claim="F2SA-2 is better than F2SA, StocBiO, MRBO and VRBO at equal cost, due to its order",
        value="no number in the text; the authors' plot has test losses of about 0.71 (F2SA-2), 0.73 (F2SA), 0.87 to "
        "0.89 (others)",
        run=run,
        arms=ARMS,
        rule=Better(
            method="F2SA-2", rivals=("F2SA-1", "StocBiO", "MRBO", "VRBO"), control="F2SA-1, normalised", speed=True
        ),
        score="test loss at y*(x)",
        unit="gradients (a product is 2)",
        scales={
            "smoke": {"data": "digits", "least": 1, "batch": 100, "tol": 1e-6, "budget": 400, "seeds": 3,
                      "evaluations": 2, "search": False},
            "cpu": {"data": "20newsgroups", "least": 50, "batch": 1000, "tol": 1e-6, "budget": 2000, "seeds": 3,
                    "evaluations": 3},
            "full": {"data": "20newsgroups", "least": 1, "batch": 1000, "tol": 1e-6, "budget": 40_000, "seeds": 5,
                     "evaluations": 10},
        },
        shares=(0.3,),
        moves=12,
        whole=44_000,
        departures=(
            "words in fewer than 50 texts are left out at the scale cpu: 4,444 features, not 130,107; with headers",
            "penalty as in the authors' code, half of the mean of exp(x) y^2; y starts at zero",
            "about 45 outer steps of F2SA-2, not 1,000",
            "scores are those of an accurate y*(x), not of the copy of y with weight on the validation data",
            "antisymmetric weights of F2SA-p, where the text prints symmetric ones; new samples for each lower step",
            "the copies of F2SA share samples; all Neumann series are scaled correctly (those of the authors' code are "
            "not)",
        ),
        data="20newsgroups",
    )
]  # fmt: skip

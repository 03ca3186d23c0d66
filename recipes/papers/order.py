"""Error of F2SA-p in nu (arXiv:2509.02937, lemma on the bias)."""

from __future__ import annotations

import math

import torch

import bilevel_optim as bo

from ..common.seeds import stream
from .experiment import Arm, Experiment, Point, Trial, Within

__all__ = ["EXPERIMENTS"]

SIZE = 6


def run(trial: Trial) -> list[Point]:
    """Measure the slope of log error against log nu, on one random problem with a quartic in f."""
    generator = stream(trial.seed, "data")

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(random(SIZE, SIZE))[0]
    A = basis @ torch.diag(torch.linspace(1, 3, SIZE, dtype=torch.float64)) @ basis.T
    B, c, x0 = random(SIZE, SIZE), random(SIZE), random(SIZE)

    def error(nu: float) -> float:
        x, y = x0.clone().requires_grad_(), torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
        arguments = {"lr": 1.0, "lower_lr": 0.3, "lower_steps": trial.scale["lower_steps"]}
        optimizer = trial.make([x], [y], nu=nu, **arguments)

        def upper() -> torch.Tensor:
            z = y - c
            loss: torch.Tensor = (z.square() / 2 + z.square().square() / 40).sum()
            return loss

        optimizer.backward(upper, lambda: y @ A @ y / 2 - y @ B @ x)
        z = torch.linalg.solve(A, B @ x0) - c
        exact = B.T @ torch.linalg.solve(A, z + z**3 / 10)
        return float((x.grad - exact).norm() / exact.norm())

    first, second = (error(nu) for nu in trial.scale["nu"])
    slope = math.log(first / second) / math.log(trial.scale["nu"][0] / trial.scale["nu"][1])
    return [{"spent": 0.0, "seconds": 0.0, "score": slope}]


def experiment(order: int) -> Experiment:
    """Return the experiment for one order."""
    nu = {1: (4e-4, 2e-4), 2: (4e-3, 2e-3), 3: (4e-3, 2e-3), 4: (2e-2, 1e-2)}[order]
    return Experiment(
        id=f"001-order-{order}",
        paper="arXiv:2509.02937",
        figure="lemma",
        claim=f"the error of F2SA-{order} falls like nu^{order}",
        value=f"{order}",
        run=run,
        arms={"F2SA": Arm(lambda x, y, **options: bo.F2SA(x, y, order=order, **options))},
        rule=Within(arm="F2SA", low=order - 0.25, high=order + 0.25),
        score="slope of log error against log nu",
        unit="estimates",
        scales={
            name: {"budget": 1, "seeds": seeds, "nu": nu, "lower_steps": steps}
            for name, seeds, steps in (("smoke", 3, 70), ("cpu", 10, 120), ("full", 20, 120))
        },
        departures=("random problems of 6 variables, with a quartic in f",),
    )


EXPERIMENTS = [experiment(order) for order in (1, 2, 3, 4)]

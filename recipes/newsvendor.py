r"""Newsvendor with side information, robust to shifts of it: a lower problem for each context.

.. math::
    \min_x\ E_{\xi} E_{\eta|\xi} \big[ \ell(\varphi(x; y^*(\xi)), \eta) - \lambda \|y^*(\xi) - \xi\|^2 \big], \qquad
    y^*(\xi) = \arg\min_y\ E_{\eta|\xi} \big[ \lambda \|y - \xi\|^2 - \ell(\varphi(x; y), \eta) \big]

:math:`\varphi(x; \cdot)` is a neural network that decides how much to order from 100 numbers of side information,
:math:`\ell(w, \eta) = h (w - \eta)_+ + b (\eta - w)_+` the cost, smoothed for training. The shift of a context may not
depend on the demand :math:`\eta` (Wasserstein robustness with side information, WDRO-SI). Baselines: empirical risk
minimisation (ERM), and WDRO, which shifts every row by itself.

    python -m recipes.newsvendor
    python -m recipes.newsvendor --literal-init      # the paper's initialisation of the demand, taken literally

The demand is :math:`10\,\sigma(\text{network}(\xi))` plus noise. With weights from ``torch.nn.init.uniform_`` and its
default range [0, 1), as the text says, the sigmoid saturates and the demand has mean 10 and no variation at all. Here
they are uniform on :math:`\pm 1/\sqrt{\text{fan in}}`; ``--literal-init`` shows the trap.

Shape of the problem: arXiv:2310.18535, section 4.2. The costs h and b, the widths of the networks, the number of
updates and their steps are not given there; they are ours.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import bilevel_optim as bo

from .report import environment, save_json, table

SIDE, WIDTH, RANGE = 100, 64, 15.0
HOLDING, SHORTAGE, SHARPNESS = 1.0, 4.0, 5.0
METHODS = ("erm", "wdro", "rt-mlmc", "dl-sgd", "aid", "no-implicit")


class Demand:
    """The true demand: contexts, and demands given them."""

    def __init__(self, literal: bool, generator: torch.Generator) -> None:
        self.layers = []
        for inputs, outputs in ((SIDE, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)):
            weight, bias = torch.rand(outputs, inputs, generator=generator), torch.rand(outputs, generator=generator)
            if not literal:
                weight, bias = ((2 * t - 1) / math.sqrt(inputs) for t in (weight, bias))
            self.layers.append((weight, bias))

    def contexts(self, n: int, generator: torch.Generator) -> Tensor:
        """Side information, uniform."""
        return RANGE * (2 * torch.rand(n, SIDE, generator=generator) - 1)

    def mean(self, xi: Tensor) -> Tensor:
        """Of the demand."""
        for i, (weight, bias) in enumerate(self.layers):
            xi = F.linear(xi if i == 0 else xi.relu(), weight, bias)
        return 10 * xi.squeeze(-1).sigmoid()

    def draw(self, xi: Tensor, generator: torch.Generator) -> Tensor:
        """Demands, with standard normal noise."""
        mean = self.mean(xi)
        return mean + torch.randn(mean.shape, generator=generator)


def cost(order: Tensor, demand: Tensor) -> Tensor:
    """The true cost."""
    return HOLDING * (order - demand).relu() + SHORTAGE * (demand - order).relu()


def smooth_cost(order: Tensor, demand: Tensor) -> Tensor:
    """The cost with rounded corners."""
    beta = SHARPNESS
    return (HOLDING * F.softplus(beta * (order - demand)) + SHORTAGE * F.softplus(beta * (demand - order))) / beta


class Rule(nn.Module):
    """The decision rule: a smooth network of the same shape as the demand's."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(SIDE, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)
        )

    def forward(self, xi: Tensor) -> Tensor:
        """How much to order."""
        order: Tensor = 10 * self.network(xi).squeeze(-1).sigmoid()
        return order


class Newsvendor:
    """Training data, and the losses of the rule on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(args.seed)
        self.demand = Demand(args.literal_init, generator)
        self.xi = self.demand.contexts(args.contexts, generator)
        self.rows = self.xi.unsqueeze(1).expand(-1, args.demands, -1)
        self.eta = self.demand.draw(self.rows, generator)
        self.test_xi = self.demand.contexts(args.test_points, generator)
        self.test_eta = self.demand.draw(self.test_xi, generator)
        self.tasks = bo.TensorTasks((self.rows, self.eta))
        self.y = torch.zeros(SIDE, requires_grad=True)

    def start(self, seed: int) -> None:
        """A fresh rule."""
        torch.manual_seed(seed)
        self.rule = Rule()

    def losses(self, price: float) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
        """Upper and lower loss of one context's rows (xi repeated, eta)."""

        def upper(batch: tuple[Tensor, Tensor]) -> Tensor:
            xi, eta = batch
            return smooth_cost(self.rule(self.y), eta).mean() - price * (self.y - xi[0]).square().sum()

        return upper, lambda batch: -upper(batch)

    @torch.no_grad()
    def test(self) -> float:
        """The true cost on fresh contexts."""
        orders = torch.cat([self.rule(part) for part in self.test_xi.split(50_000)])  # type: ignore[no-untyped-call]
        return float(cost(orders, self.test_eta).mean())


def train(problem: Newsvendor, name: str, price: float, args: argparse.Namespace) -> dict[str, Any]:
    """Learn the rule with one method; returns its curve."""
    problem.start(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    parameters = list(problem.rule.parameters())
    upper, lower = problem.losses(price)
    common = {"lr": args.lr, "tasks_per_step": args.tasks_per_step, "generator": generator}
    rows = {"lower_batch": args.rows, "upper_batch": args.rows}

    def starts(ids: Tensor) -> Tensor:
        return problem.xi[ids]

    optimizer: bo.BilevelOptimizer | None = None
    if name in ("rt-mlmc", "dl-sgd", "no-implicit"):
        kind = bo.DLSGD if name == "dl-sgd" else bo.RTMLMC
        optimizer = kind(
            parameters, [problem.y], lower_lr=1 / (2 * price), levels=args.levels, neumann_steps=8,
            implicit_term=name != "no-implicit", lower_init=starts, **common, **rows,
        )  # fmt: skip
    elif name == "aid":
        optimizer = bo.AID(
            parameters, [problem.y], lower_lr=1 / (3 * price), lower_steps=20, linear_steps=10, lower_init=starts,
            **common, **rows,
        )  # fmt: skip
    plain = torch.optim.SGD(parameters, lr=args.lr)
    moving = optimizer or plain
    decay = [lambda t: (t + 1) ** -0.5] + ([lambda t: 1.0] if optimizer else [])
    scheduler = torch.optim.lr_scheduler.LambdaLR(moving, decay)
    curve, seconds = [{"step": 0, "seconds": 0.0, "cost": problem.test()}], 0.0
    for step in (bar := tqdm(range(args.steps), desc=f"{name:12} {price:g}", unit="step")):
        start = time.perf_counter()
        if optimizer is not None:
            optimizer.step(upper, lower, tasks=problem.tasks)
        else:
            ids = problem.tasks.sample(args.tasks_per_step, generator)
            xi, eta = problem.tasks.lower(ids, args.rows, generator)
            shifted = _shifted(problem.rule, xi, eta, price) if name == "wdro" else xi
            plain.zero_grad()
            smooth_cost(problem.rule(shifted), eta).mean().backward()  # type: ignore[no-untyped-call]
            plain.step()
        scheduler.step()
        seconds += time.perf_counter() - start
        if step % max(args.steps // 25, 1) == 0 or step == args.steps - 1:
            curve.append({"step": step + 1, "seconds": seconds, "cost": problem.test()})
            bar.set_postfix(cost=f"{curve[-1]['cost']:.3f}")
    late = [point["cost"] for point in curve[-5:]]
    calls = optimizer.oracle_counts if optimizer is not None else None
    return {
        "cost": sum(late) / len(late), "milliseconds_per_step": 1e3 * seconds / args.steps, "oracle_calls": calls,
        "curve": curve,
    }  # fmt: skip


def _shifted(rule: Rule, xi: Tensor, eta: Tensor, price: float, steps: int = 10) -> Tensor:
    """Side information moved by Adam to where it is worst, every row by itself."""
    moved = xi.clone().requires_grad_()
    adam = torch.optim.Adam([moved], lr=0.1, maximize=True)
    for _ in range(steps):
        value = smooth_cost(rule(moved), eta) - price * (moved - xi).square().sum(-1)
        (moved.grad,) = torch.autograd.grad(value.sum(), [moved])
        adam.step()
    return moved.detach()


def plot(path: Path, title: str, results: dict[str, Any]) -> None:
    """Test cost against updates and time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for name, result in results.items():
        for axis, key in zip(axes, ("step", "seconds"), strict=True):
            points = result["curve"][1:]
            axis.plot([p[key] for p in points], [p["cost"] for p in points], label=name)
    axes[0].set(xlabel="updates of the rule", ylabel="test cost")
    axes[1].set(xlabel="seconds", xscale="log")
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; returns the numbers that it writes."""
    parser = argparse.ArgumentParser(description="Robust newsvendor with side information.")
    parser.add_argument("--optimizer", nargs="+", choices=METHODS, default=list(METHODS[:5]))
    parser.add_argument("--price", type=float, nargs="+", default=[1.0, 10.0, 100.0], help="lambda; the best is shown")
    parser.add_argument("--contexts", type=int, default=50)
    parser.add_argument("--demands", type=int, default=30, help="demands per context; default: 30")
    parser.add_argument("--levels", type=int, default=4, help="K; default: 4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--lr", type=float, default=0.01, help="of the rule, divided by the root of the step; default: 0.01"
    )
    parser.add_argument("--tasks-per-step", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch of a context; default: 4")
    parser.add_argument("--test-points", type=int, default=200_000)
    parser.add_argument("--literal-init", action="store_true", help="weights of the demand uniform on [0, 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args(arguments)
    if min(args.price) <= 0:
        parser.error(f"--price must be positive, not {min(args.price)}")
    problem = Newsvendor(args)
    mean = problem.demand.mean(problem.test_xi)
    print(f"demand without noise: mean {float(mean.mean()):.3f}, standard deviation {float(mean.std()):.3f}")
    constant = float(torch.quantile(problem.eta.flatten(), SHORTAGE / (HOLDING + SHORTAGE)))
    noise = math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * SHORTAGE / (HOLDING + SHORTAGE) - 1)))
    results: dict[str, Any] = {}
    for name in args.optimizer:
        prices = args.price[:1] if name == "erm" else args.price
        runs = {price: train(problem, name, price, args) for price in prices}
        best = min(runs, key=lambda price: runs[price]["cost"])
        results[name] = {**runs[best], "price": None if name == "erm" else best,
                         "all": {str(price): run["cost"] for price, run in runs.items()}}  # fmt: skip
    references = {
        "best constant order": float(cost(torch.tensor(constant), problem.test_eta).mean()),
        "true demand known": float(cost(mean + noise, problem.test_eta).mean()),
    }
    header = ["", "test cost", "lambda", "ms/step", "f grads", "g grads", "HVPs", "by lambda"]
    rows: list[list[object]] = [[name, value, *[None] * 6] for name, value in references.items()]
    for name, r in results.items():
        calls = r["oracle_calls"] or {}
        others = ", ".join(f"{p}: {c:.3f}" for p, c in r["all"].items())
        rows.append([name, r["cost"], r["price"], r["milliseconds_per_step"],
                     *(calls.get(k) for k in ("upper_grad", "lower_grad", "hvp")), others])  # fmt: skip
    title = f"Newsvendor, {args.contexts} contexts of {args.demands} demands, {args.steps} updates"
    print(f"\n{title}\n\n{table(header, rows)}\n")
    stem = args.out / "newsvendor"
    plot(stem.with_suffix(".png"), title, results)
    numbers = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "environment": environment(),
        "demand": {"mean": float(mean.mean()), "std": float(mean.std())},
        "references": references,
        "results": results,
    }
    save_json(stem.with_suffix(".json"), numbers)
    print(f"Wrote {stem}.png and {stem}.json")
    return numbers


if __name__ == "__main__":
    main()

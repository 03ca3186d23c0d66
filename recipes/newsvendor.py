r"""Newsvendor decisions robust to shifts of the side information: one lower problem for each context.

.. math::
    \min_x\ E_{\xi} E_{\eta|\xi} \big[ \ell(\varphi(x; y^*(\xi)), \eta) - \lambda \|y^*(\xi) - \xi\|^2 \big], \qquad
    y^*(\xi) = \arg\min_y\ E_{\eta|\xi} \big[ \lambda \|y - \xi\|^2 - \ell(\varphi(x; y), \eta) \big]

:math:`\varphi(x; \cdot)` is a neural network that computes the order from 100 numbers of side information;
:math:`\ell(w, \eta) = h (w - \eta)_+ + b (\eta - w)_+` is the cost, smoothed for training. The shift of a context may
not depend on the demand :math:`\eta` (Wasserstein robustness with side information, WDRO-SI). Baselines: empirical risk
minimisation (ERM), and WDRO, which shifts every row separately.

    python -m recipes.newsvendor
    python -m recipes.newsvendor --literal-init      # the paper's initialisation of the demand, taken literally

The demand is :math:`10\,\sigma(\text{network}(\xi))` plus noise. With weights from ``torch.nn.init.uniform_`` and its
default range [0, 1), as the paper says, the sigmoid saturates and the mean demand is always 10. Here the weights are
uniform on :math:`\pm 1/\sqrt{\text{fan in}}`; ``--literal-init`` shows the trap.

Shape of the problem: arXiv:2310.18535, section 4.2. The costs h and b, the network widths, the number of updates and
the learning rates are not given there; they are ours. rt-mlmc has evenly spread levels, lower steps of at most 1/L, and
all terms of the Neumann series; rt-mlmc-paper has independent levels, no such cap and one random term, as in the paper.
The test contexts are shifted only if ``--shift`` is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from .common import CALLS, Parser, not_negative, plot, rows, save, show, train, whole
from .common.methods import PAPER
from .common.seeds import begin, stream

SIDE, WIDTH, RANGE = 100, 64, 15.0
HOLDING, SHORTAGE, SHARPNESS = 1.0, 4.0, 5.0
Loss = Callable[[tuple[Tensor, Tensor]], Tensor]
METHODS = ("erm", "wdro", "rt-mlmc", "dl-sgd", "aid", "no-implicit", "rt-mlmc-paper")


class Demand:
    """True distribution of contexts, and of demands given a context."""

    def __init__(self, literal: bool, generator: torch.Generator) -> None:
        self.layers = []
        for inputs, outputs in ((SIDE, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)):
            weight, bias = torch.rand(outputs, inputs, generator=generator), torch.rand(outputs, generator=generator)
            if not literal:
                weight, bias = ((2 * t - 1) / math.sqrt(inputs) for t in (weight, bias))
            self.layers.append((weight, bias))

    def contexts(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n contexts uniformly."""
        return RANGE * (2 * torch.rand(n, SIDE, generator=generator) - 1)

    def mean(self, xi: Tensor) -> Tensor:
        """Return the mean demand."""
        for i, (weight, bias) in enumerate(self.layers):
            xi = F.linear(xi if i == 0 else xi.relu(), weight, bias)
        return 10 * xi.squeeze(-1).sigmoid()

    def draw(self, xi: Tensor, generator: torch.Generator) -> Tensor:
        """Draw demands, with standard normal noise."""
        mean = self.mean(xi)
        return mean + torch.randn(mean.shape, generator=generator)


def cost(order: Tensor, demand: Tensor) -> Tensor:
    """Return the true cost."""
    return HOLDING * (order - demand).relu() + SHORTAGE * (demand - order).relu()


def smooth_cost(order: Tensor, demand: Tensor) -> Tensor:
    """Return the cost with rounded corners."""
    beta = SHARPNESS
    return (HOLDING * F.softplus(beta * (order - demand)) + SHORTAGE * F.softplus(beta * (demand - order))) / beta


class Rule(nn.Sequential):
    """Decision rule: a smooth network of the same shape as the demand's."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(SIDE, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, xi: Tensor) -> Tensor:
        """Return the order."""
        order: Tensor = super().forward(xi).squeeze(-1).sigmoid()  # type: ignore[no-untyped-call]
        return 10 * order


class Newsvendor:
    """Training and test data."""

    def __init__(self, args: Any) -> None:
        generator = stream(args.seed, "data")
        self.demand = Demand(args.literal_init, generator)
        self.xi = self.demand.contexts(args.contexts, generator)
        rows = self.xi.unsqueeze(1).expand(-1, args.demands, -1)
        self.eta = self.demand.draw(rows, generator)
        self.test_xi = self.demand.contexts(args.test_points, generator)
        self.test_eta = self.demand.draw(self.test_xi, generator)
        # The rule sees shifted test contexts; the demand follows the true ones.
        self.shown_xi = self.test_xi + args.shift * torch.randn(self.test_xi.shape, generator=generator)
        self.tasks = bo.TensorTasks((rows, self.eta))


def constant(problem: Newsvendor) -> float:
    """Return the test cost of the best constant order, without side information."""
    quantile = torch.quantile(problem.eta.flatten(), SHORTAGE / (HOLDING + SHORTAGE))
    return float(cost(quantile, problem.test_eta).mean())


def losses(rule: Rule, y: Tensor, price: float) -> tuple[Loss, Loss]:
    """Return upper and lower loss for batches from one context; every row of a batch repeats the context."""

    def upper(batch: tuple[Tensor, Tensor]) -> Tensor:
        xi, eta = batch
        loss: Tensor = smooth_cost(rule(y), eta).mean() - price * (y - xi[0]).square().sum()
        return loss

    return upper, lambda batch: -upper(batch)


def learn(problem: Newsvendor, name: str, price: float, args: Any) -> dict[str, Any]:
    """Learn the rule with one method; return its curve."""
    begin(args.seed, "start")
    rule, y = Rule(), torch.zeros(SIDE, requires_grad=True)
    generator = stream(args.seed, "method")
    upper, lower = losses(rule, y, price)
    common: dict[str, Any] = {
        "lr": args.lr, "tasks_per_step": args.tasks_per_step, "lower_batch": args.rows, "upper_batch": args.rows,
        "lower_init": lambda ids: problem.xi[ids], "generator": generator,
    }  # fmt: skip
    optimizer: torch.optim.Optimizer
    if name in ("erm", "wdro"):
        optimizer = torch.optim.SGD(rule.parameters(), lr=args.lr)
    elif name == "aid":
        optimizer = bo.AID(rule.parameters(), [y], lower_lr=1 / (3 * price), lower_steps=20, linear_steps=10, **common)
    else:
        kind = bo.DLSGD if name == "dl-sgd" else bo.RTMLMC
        optimizer = kind(
            rule.parameters(), [y], lower_lr=1 / (2 * price), levels=args.levels, neumann_steps=8,
            implicit_term=name != "no-implicit", **common, **(PAPER["RTMLMC"] if name == "rt-mlmc-paper" else {}),
        )  # fmt: skip
    decay = [lambda t: (t + 1) ** -0.5, lambda t: 1.0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay[: len(optimizer.param_groups)])

    def step() -> None:
        if isinstance(optimizer, bo.BilevelOptimizer):
            optimizer.step(upper, lower, tasks=problem.tasks)
        else:
            xi, eta = problem.tasks.lower(problem.tasks.sample(args.tasks_per_step, generator), args.rows, generator)
            shifted = _shifted(rule, xi, eta, price) if name == "wdro" else xi
            optimizer.zero_grad()
            smooth_cost(rule(shifted), eta).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        scheduler.step()

    @torch.no_grad()
    def test(k: int, _: None) -> dict[str, float]:
        orders = torch.cat([rule(part) for part in problem.shown_xi.split(50_000)])
        return {"cost": float(cost(orders, problem.test_eta).mean())}

    curve = train(step, test, steps=args.steps, label=f"{name} {price:g}", every=max(args.steps // 25, 1), first=True)
    late = [point["cost"] for point in curve[-5:]]
    return {
        "cost": sum(late) / len(late),
        "milliseconds_per_step": 1e3 * curve[-1]["seconds"] / args.steps,
        "oracle_calls": getattr(optimizer, "oracle_counts", None),
        "curve": curve,
    }


def _shifted(rule: Rule, xi: Tensor, eta: Tensor, price: float, steps: int = 10) -> Tensor:
    """Return the worst-case side information, which Adam finds for every row separately."""
    moved = xi.clone().requires_grad_()
    adam = torch.optim.Adam([moved], lr=0.1, maximize=True)
    for _ in range(steps):
        value = smooth_cost(rule(moved), eta) - price * (moved - xi).square().sum(-1)
        (moved.grad,) = torch.autograd.grad(value.sum(), [moved])
        adam.step()
    return moved.detach()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the recipe; return the numbers that it writes."""
    parser = Parser(__doc__, seed=True)
    parser.methods(METHODS, METHODS[:5])
    parser.option("price", [1.0, 10.0, 100.0], "grid of lambda; the best is shown")
    parser.option("contexts", 50, "contexts to learn from")
    parser.option("demands", 30, "demands per context")
    parser.option("levels", 4, "K; dl-sgd makes about 2^K lower steps per context", type=whole(1, 12))
    parser.option("steps", 200, "updates of the rule")
    parser.option("lr", 0.01, "learning rate of the rule, divided by the root of the step")
    parser.option("tasks_per_step", 4, "contexts per step")
    parser.option("rows", 4, "rows per batch of a context")
    parser.option("test_points", 200_000, "contexts to test on")
    parser.option("shift", 0.0, "standard deviation of the noise added to the test contexts", type=not_negative)
    parser.add_argument("--literal-init", action="store_true", help="weights of the demand uniform on [0, 1)")
    args = parser.parse(arguments)
    problem = Newsvendor(args)
    mean = problem.demand.mean(problem.test_xi)
    print(f"demand without noise: mean {float(mean.mean()):.3f}, standard deviation {float(mean.std()):.3f}")
    results: dict[str, Any] = {}
    for name in args.optimizer:
        runs = {price: learn(problem, name, price, args) for price in (args.price[:1] if name == "erm" else args.price)}
        best = min(runs, key=lambda price: float(runs[price]["cost"]))
        every = {str(price): run["cost"] for price, run in runs.items()}
        results[name] = {**runs[best], "price": None if name == "erm" else best, "all": every}
    quantile = SHORTAGE / (HOLDING + SHORTAGE)
    noise = math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * quantile - 1)))
    references = {
        "best constant order": constant(problem),
        "true demand known": float(cost(mean + noise, problem.test_eta).mean()),
    }
    known = [[name, value, *[None] * 6] for name, value in references.items()]
    found = rows(results, "cost", "price", "milliseconds_per_step", calls=3)
    others = [", ".join(f"{p}: {c:.3f}" for p, c in r["all"].items()) for r in results.values()]
    found = [[*row, by_price] for row, by_price in zip(found, others, strict=True)]
    title = f"Newsvendor, {args.contexts} contexts of {args.demands} demands, {args.steps} updates"
    show(title, ("", "test cost", "lambda", "ms/step", *[*CALLS.values()][:3], "by lambda"), [*known, *found])
    stem = args.out / "newsvendor"
    axis = {"ylabel": "test cost"}
    panels = [("step", "cost", {**axis, "xlabel": "updates"}), ("seconds", "cost", {**axis, "xscale": "log"})]
    plot(stem, title, {name: r["curve"][1:] for name, r in results.items()}, panels)
    demand = {"mean": float(mean.mean()), "std": float(mean.std())}
    return save(args, stem, {"demand": demand, "references": references, "results": results})


if __name__ == "__main__":
    main()

r"""F2SA's copies of y as one batched problem, in chunks, and in a loop: time and peak memory of one step.

    python -m recipes.benchmarks.copies

Lower problem: data cleaning with an MLP 784-256-10 and mini-batches; 10 lower steps. The variants run in turn, and the
ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from ..report import environment, table

VARIANTS: dict[str, bool | int] = {"loop": False, "chunks of 2": 2, "stacked": True}


def optimizer_and_losses(
    batch: int, order: int, vectorize: bool | int, device: str
) -> tuple[bo.F2SA, bo.Objective, bo.Objective]:
    """A fresh problem and F2SA on it."""
    torch.manual_seed(0)
    X, t = torch.randn(8 * batch, 784, device=device), torch.randint(0, 10, (8 * batch,), device=device)
    x = torch.zeros(8 * batch, device=device, requires_grad=True)
    net = nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
    batches = list(torch.arange(8 * batch, device=device).split(batch))  # type: ignore[no-untyped-call]

    def lower(index: Tensor) -> Tensor:
        losses = F.cross_entropy(net(X[index]), t[index], reduction="none")
        return (x[index].sigmoid() * losses).mean() + 1e-3 * sum(p.square().sum() for p in net.parameters())

    def upper(index: Tensor) -> Tensor:
        return F.cross_entropy(net(X[index]), t[index])

    optimizer = bo.F2SA(
        [x], net.parameters(), lr=0.1, lower_lr=0.1, lower_steps=10, order=order, nu=1e-2, vectorize=vectorize
    )
    return optimizer, bo.Objective(upper, batches), bo.Objective(lower, batches)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time one step of F2SA with stacked, chunked and looped copies.")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256, 1024], help="batch sizes")
    parser.add_argument("--orders", type=int, nargs="+", default=[2, 4], help="orders of the difference")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    rows: list[list[object]] = []
    for order in args.orders:
        for batch in args.batches:
            runs = {name: optimizer_and_losses(batch, order, v, args.device) for name, v in VARIANTS.items()}
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(args.repeats + 2):
                for name, (optimizer, upper, lower) in runs.items():
                    start = time.perf_counter()
                    optimizer.step(upper, lower)
                    if args.device != "cpu":
                        torch.cuda.synchronize()
                    if repeat > 1:
                        seconds[name].append(time.perf_counter() - start)
            for name, (optimizer, _, _) in runs.items():
                ratios = sorted(a / b for a, b in zip(seconds[name], seconds["loop"], strict=True))
                fell_back = optimizer.diagnostics.get("vectorize_fallback", "")
                row = [order, batch, name, 1e3 * sorted(seconds[name])[len(seconds[name]) // 2]]
                rows.append([*row, ratios[len(ratios) // 2], fell_back])
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    print(f"One step of F2SA, 10 lower steps, MLP 784-256-10, {args.repeats} repetitions in turn")
    print(table(["order", "batch", "copies", "ms (median)", "ratio to loop", "fallback"], rows))


if __name__ == "__main__":
    main()

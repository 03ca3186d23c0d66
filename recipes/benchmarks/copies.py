r"""Time of one step of F2SA with its copies of y in one batch, in chunks, and in a loop.

    python -m recipes.benchmarks.copies

Lower problem: data cleaning with an MLP 784-256-10 and mini-batches; 10 lower steps. The variants alternate, and ratios
are taken pair by pair.
"""

from __future__ import annotations

from statistics import median

import torch

import bilevel_optim as bo

from ..common import Parser, environment, show, timed
from ..problems.networks import MLPCleaning

VARIANTS: dict[str, bool | int] = {"loop": False, "chunks of 2": 2, "stacked": True}


def seconds(batch: int, order: int, repeats: int, device: str) -> dict[str, tuple[list[float], str | None]]:
    """Return the times of the variants after two warm-up steps, and the reason for a fallback to the loop."""
    runs, times = {}, {name: list[float]() for name in VARIANTS}
    for name, vectorize in VARIANTS.items():
        problem = MLPCleaning(8 * batch, 1e-3, device)
        batches = list(torch.arange(8 * batch, device=device).split(batch))  # type: ignore[no-untyped-call]
        optimizer = bo.F2SA(
            [problem.x], problem.net.parameters(), lr=0.1, lower_lr=0.1, lower_steps=10, order=order, nu=1e-2,
            vectorize=vectorize,
        )  # fmt: skip
        runs[name] = optimizer, bo.Objective(problem.upper, batches), bo.Objective(problem.lower, batches)
    for repeat in range(repeats + 2):
        for name, (optimizer, upper, lower) in runs.items():
            _, spent = timed(lambda o=optimizer, f=upper, g=lower: o.step(f, g), device)  # type: ignore[misc]
            if repeat > 1:
                times[name].append(spent)
    return {name: (times[name], run[0].diagnostics.get("vectorize_fallback")) for name, run in runs.items()}


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(__doc__, device=True, out=False)
    parser.option("batches", [16, 64, 256, 1024], "batch sizes")
    parser.option("orders", [2, 4], "orders of the difference")
    parser.option("repeats", 15, "timed steps")
    args = parser.parse(arguments)
    rows: list[list[object]] = []
    for order in args.orders:
        for batch in args.batches:
            runs = seconds(batch, order, args.repeats, args.device)
            for name, (times, fallback) in runs.items():
                ratio = median(a / b for a, b in zip(times, runs["loop"][0], strict=True))
                rows.append([order, batch, name, 1e3 * median(times), ratio, fallback or ""])
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    title = f"One step of F2SA, 10 lower steps, MLP 784-256-10, {args.repeats} repetitions in turn"
    show(title, ["order", "batch", "copies", "ms (median)", "ratio to loop", "fallback"], rows)


if __name__ == "__main__":
    main()

r"""Time and peak memory of one step of PZOBO on LeNet, with its paths in one batch, in chunks, and in a loop.

    python -m recipes.benchmarks.paths                    # --device cuda on a GPU
    python -m recipes.benchmarks.paths --directions 1 4 16 64 --repeats 5

x are LeNet's features (60,856 parameters), y the last layer; 10 lower steps on one batch of 256 images, with the
features evaluated once per path. Every row is a separate process; its peak is that of the process minus the peak before
the first step.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from ..common import Parser, alone, environment, peak, show, timed
from ..common.seeds import begin
from ..problems.networks import lenet

VARIANTS = ("loop", "chunks", "stacked")


def measure(variant: str, directions: int, chunk: int, repeats: int, device: str) -> dict[str, float]:
    """Measure the median seconds of a step, and peak memory in MiB."""
    begin(0, "data")
    net, head = lenet().to(device), nn.Linear(84, 10).to(device)
    images, labels = torch.randn(256, 1, 32, 32, device=device), torch.randint(0, 10, (256,), device=device)

    def loss(features: Tensor) -> Tensor:
        return F.cross_entropy(head(features), labels)

    optimizer = bo.PZOBO(
        list(net.parameters()), list(head.parameters()), lr=1e-6, lower_lr=0.1, lower_steps=10, directions=directions,
        smoothing=1e-2, vectorize={"loop": False, "chunks": chunk, "stacked": True}[variant],
    )  # fmt: skip
    lower = bo.Objective(loss, features=lambda: net(images))
    loss(net(images)).backward()  # type: ignore[no-untyped-call]
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak(device)
    times = [timed(lambda: optimizer.step(lambda: loss(net(images)), lower), device)[1] for _ in range(repeats + 1)]
    found: dict[str, Any] = {"seconds": median(times[1:]), "peak": peak(device) - before}
    return {**found, "fallback": optimizer.diagnostics.get("vectorize_fallback")}


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(__doc__, device=True, out=False)
    parser.option("directions", [1, 4, 16, 64], "numbers of directions")
    parser.option("chunk", 8, "paths per chunk")
    parser.option("repeats", 5, "timed steps")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # internal: one measurement in a separate process
    args = parser.parse(arguments)
    if args.one:
        print(json.dumps(measure(args.one, args.directions[0], args.chunk, args.repeats, args.device)))
        return
    rows: list[list[object]] = []
    for directions in args.directions:
        options = (
            "--directions",
            directions,
            "--chunk",
            args.chunk,
            "--repeats",
            args.repeats,
            "--device",
            args.device,
        )
        loop = None
        for variant in VARIANTS:
            found = alone("recipes.benchmarks.paths", "--one", variant, *options)
            if isinstance(found, str):
                rows.append([directions, variant, found, None, None, None])
                continue
            loop = loop or found["seconds"]
            one = [directions, variant, 1e3 * found["seconds"], found["seconds"] / loop, found["peak"]]
            rows.append([*one, found["fallback"]])
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    title = f"One step of PZOBO on LeNet, 10 lower steps, batch 256, chunks of {args.chunk}, {args.repeats} repetitions"
    show(
        title,
        ["directions", "paths", "ms (median)", "ratio to loop", "peak MiB over start", "one by one because"],
        rows,
    )


if __name__ == "__main__":
    main()

r"""Memory of one step of PZOBO with a million upper parameters, against the number of directions.

    MALLOC_MMAP_THRESHOLD_=65536 python -m recipes.benchmarks.directions
    python -m recipes.benchmarks.directions --directions 4 16 64 256 --direction sphere

x is a layer of 1,000 by 1,000 weights (``--width``), y the next layer; two lower steps on one batch of 64. Directions
are regenerated from their seed where needed, and the paths run in chunks of constant size. Every row is a separate
process; its peak is that of the process minus the peak before the first step. The environment variable makes the C
library of Linux return freed memory at once, so that the peak counts only memory in use; this costs time.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo
from bilevel_optim.hypergradient.directions import KINDS

from ..common import Parser, alone, environment, peak, show, timed
from ..common.seeds import begin


def measure(directions: int, width: int, direction: str, repeats: int, device: str) -> dict[str, float]:
    """Measure the median seconds of a step, and peak memory in MiB."""
    begin(0, "data")
    net, head = nn.Linear(width, width, bias=False).to(device), nn.Linear(width, 10).to(device)
    rows, labels = torch.randn(64, width, device=device), torch.randint(0, 10, (64,), device=device)

    def loss(features: Tensor) -> Tensor:
        return F.cross_entropy(head(features), labels)

    def whole() -> Tensor:
        return loss(net(rows).tanh())

    optimizer = bo.PZOBO(
        list(net.parameters()), list(head.parameters()), lr=1e-9, lower_lr=0.1, lower_steps=2, directions=directions,
        smoothing=1e-2, direction=direction,
    )  # fmt: skip
    lower = bo.Objective(loss, features=lambda: net(rows).tanh())
    whole().backward()  # type: ignore[no-untyped-call]
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak(device)
    times = [timed(lambda: optimizer.step(whole, lower), device)[1] for _ in range(repeats)]
    return {"seconds": median(times), "peak": peak(device) - before}


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(__doc__, device=True, out=False)
    parser.option("directions", [4, 16, 64, 256], "numbers of directions")
    parser.option("width", 1000, "square root of the number of upper parameters")
    parser.add_argument("--direction", default="gaussian", choices=KINDS, help="distribution of the directions")
    parser.option("repeats", 1, "timed steps")
    parser.add_argument(
        "--one", action="store_true", help=argparse.SUPPRESS
    )  # internal: one measurement in a separate process
    args = parser.parse(arguments)
    if args.one:
        print(json.dumps(measure(args.directions[0], args.width, args.direction, args.repeats, args.device)))
        return
    shared = ("--width", args.width, "--direction", args.direction, "--repeats", args.repeats, "--device", args.device)
    rows: list[list[object]] = []
    for directions in args.directions:
        found = alone("recipes.benchmarks.directions", "--one", *shared, "--directions", directions)
        stored = 4 * directions * args.width**2 / 2**20
        if isinstance(found, str):
            rows.append([directions, found, None, stored])
        else:
            rows.append([directions, found["seconds"], found["peak"], stored])
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    title = f"One step of PZOBO in {args.width**2:,} upper parameters, {args.direction} directions"
    show(title, ["directions", "s (median)", "peak MiB over start", "MiB if they were stored"], rows)


if __name__ == "__main__":
    main()

r"""PZOBO's paths as one batched problem, in chunks, and in a loop: time and peak memory of one step on LeNet.

    python -m recipes.benchmarks.paths                    # --device cuda on a GPU
    python -m recipes.benchmarks.paths --directions 1 4 16 64 --repeats 5

x are LeNet's features (60,856 parameters), y the last layer; 10 lower steps on one batch of 256 images, with the
features evaluated once per path. Every row is a process of its own; its peak is that of the process less what it was
before the first step.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from ..report import environment, table

VARIANTS = ("loop", "chunks", "stacked")


def measure(variant: str, directions: int, chunk: int, repeats: int, device: str) -> tuple[float, float]:
    """Median seconds of a step, and peak memory in MiB."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(120, 84), nn.ReLU()),
    ).to(device)
    head = nn.Linear(84, 10).to(device)
    images, labels = torch.randn(256, 1, 32, 32, device=device), torch.randint(0, 10, (256,), device=device)

    def loss(features: Tensor) -> Tensor:
        return F.cross_entropy(head(features), labels)

    optimizer = bo.PZOBO(
        list(net.parameters()),
        list(head.parameters()),
        lr=1e-6,
        lower_lr=0.1,
        lower_steps=10,
        directions=directions,
        smoothing=1e-2,
        vectorize={"loop": False, "chunks": chunk, "stacked": True}[variant],
    )
    lower = bo.Objective(loss, features=lambda: net(images))
    cuda = torch.device(device).type == "cuda"
    loss(net(images)).backward()  # type: ignore[no-untyped-call]
    before = torch.cuda.memory_allocated() / 2**20 if cuda else _peak()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        optimizer.step(lambda: loss(net(images)), lower)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if "vectorize_fallback" in optimizer.diagnostics:
        raise RuntimeError(optimizer.diagnostics["vectorize_fallback"])
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else _peak()
    return sorted(seconds[1:])[repeats // 2], peak - before


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time one step of PZOBO with stacked, chunked and looped paths.")
    parser.add_argument("--directions", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--chunk", type=int, default=8, help="paths per chunk; default: 8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a single measurement, in a process of its own
    args = parser.parse_args(arguments)
    if args.one:
        variant, directions = args.one
        print(*measure(variant, int(directions), args.chunk, args.repeats, args.device))
        return
    rows: list[list[object]] = []
    for directions in args.directions:
        baseline = None
        for variant in VARIANTS:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "recipes.benchmarks.paths",
                "--one",
                variant,
                str(directions),
            ]
            command += ["--chunk", str(args.chunk), "--repeats", str(args.repeats), "--device", args.device]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds, peak = map(float, printed.split())
            baseline = baseline or seconds
            rows.append([directions, variant, 1e3 * seconds, seconds / baseline, peak])
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    print(f"One step of PZOBO on LeNet, 10 lower steps, batch 256, chunks of {args.chunk}, {args.repeats} repetitions")
    print(table(["directions", "paths", "ms (median)", "ratio to loop", "peak MiB over start"], rows))


if __name__ == "__main__":
    main()

r"""What the library costs beyond its oracle calls: AID and ITD beside hand-written loops and other libraries.

One hypergradient of data cleaning with an MLP 784-256-10 on n = 4000 random examples: T = 100 gradient steps on the
weighted loss, then conjugate gradients with K = 20 Hessian-vector products (AID, implicit), or backpropagation through
the steps (ITD, unrolled). Every entry runs in a process of its own, for its peak memory; the time is the shortest of
several repetitions, the entries in turn.

    python -m recipes.benchmarks.overhead
    python -m recipes.benchmarks.overhead --memory        # peak memory against T

``torchopt`` and ``higher`` are measured too if they are installed (``pip install torchopt higher``).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bilevel_optim as bo

from ..report import environment, table

LR, RIDGE, K = 0.1, 0.037, 20  # with this ridge the Hessian is positive definite and CG needs all K iterations


class Job:
    """The problem: one weight per example (upper), an MLP (lower)."""

    def __init__(self, n: int, steps: int, device: str) -> None:
        torch.manual_seed(0)
        self.steps, self.device = steps, torch.device(device)
        self.X, self.Xv = (torch.randn(n, 784, device=device) for _ in range(2))
        self.t, self.tv = (torch.randint(0, 10, (n,), device=device) for _ in range(2))
        self.x = torch.zeros(n, device=device, requires_grad=True)
        self.net = nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)

    def lower(self, net: Callable[[Tensor], Tensor] | None = None, parameters: Any = None) -> Tensor:
        """Weighted training loss."""
        losses = F.cross_entropy((net or self.net)(self.X), self.t, reduction="none")
        ridge = sum(p.square().sum() for p in (self.net.parameters() if parameters is None else parameters))
        return (self.x.sigmoid() * losses).mean() + RIDGE * ridge

    def upper(self, net: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Validation loss."""
        return F.cross_entropy((net or self.net)(self.Xv), self.tv)


def library_implicit(job: Job) -> Tensor | None:
    """AID of this library."""
    optimizer = bo.AID(
        [job.x], job.net.parameters(), lr=0.0, lower_lr=LR, lower_steps=job.steps, linear_steps=K, warm_start=False
    )
    optimizer.backward(job.upper, job.lower)
    return job.x.grad


def library_unrolled(job: Job) -> Tensor | None:
    """ITD of this library."""
    bo.ITD([job.x], job.net.parameters(), lr=0.0, lower_lr=LR, lower_steps=job.steps).backward(job.upper, job.lower)
    return job.x.grad


def library_recomputed(job: Job) -> Tensor | None:
    """ITD of this library that keeps iterates instead of graphs."""
    optimizer = bo.ITD([job.x], job.net.parameters(), lr=0.0, lower_lr=LR, lower_steps=job.steps, checkpoint=True)
    optimizer.backward(job.upper, job.lower)
    return job.x.grad


def hand_implicit(job: Job) -> Tensor:
    """The same oracles in a plain loop."""
    y: list[Tensor] = list(job.net.parameters())
    for _ in range(job.steps):
        gradients = torch.autograd.grad(job.lower(), y)
        with torch.no_grad():
            torch._foreach_add_(y, gradients, alpha=-LR)
    b = torch.autograd.grad(job.upper(), y)
    graph = torch.autograd.grad(job.lower(), y, create_graph=True)
    v = [torch.zeros_like(t) for t in b]
    r, p = list(b), list(b)
    rr = sum((t * t).sum() for t in r)
    for _ in range(K):
        hp = torch.autograd.grad(graph, y, p, retain_graph=True)
        alpha = rr / sum((s * t).sum() for s, t in zip(p, hp, strict=True))
        v = [a + alpha * s for a, s in zip(v, p, strict=True)]
        r = [a - alpha * s for a, s in zip(r, hp, strict=True)]
        previous, rr = rr, sum((t * t).sum() for t in r)
        p = [a + rr / previous * s for a, s in zip(r, p, strict=True)]
    (cross,) = torch.autograd.grad(graph, [job.x], v)
    return -cross


def hand_unrolled(job: Job) -> Tensor:
    """Steps with a graph, written with torch.func.functional_call."""
    names = [name for name, _ in job.net.named_parameters()]
    y = [p.detach().clone().requires_grad_() for p in job.net.parameters()]

    def net(X: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(job.net, dict(zip(names, y, strict=True)), (X,))
        return logits

    for _ in range(job.steps):
        gradients = torch.autograd.grad(job.lower(net, y), y, create_graph=True)
        y = [t - LR * g for t, g in zip(y, gradients, strict=True)]
    return torch.autograd.grad(job.upper(net), job.x)[0]


def higher_unrolled(job: Job) -> Tensor:
    """The library higher."""
    import higher

    sgd = torch.optim.SGD(job.net.parameters(), lr=LR)
    with higher.innerloop_ctx(job.net, sgd) as (net, steps):
        for _ in range(job.steps):
            steps.step(job.lower(net, list(net.parameters())))
        gradient: Tensor = torch.autograd.grad(job.upper(net), job.x)[0]
        return gradient


def torchopt_unrolled(job: Job) -> Tensor:
    """TorchOpt's MetaSGD."""
    import torchopt

    sgd = torchopt.MetaSGD(job.net, lr=LR)
    for _ in range(job.steps):
        sgd.step(job.lower())
    return torch.autograd.grad(job.upper(), job.x)[0]


def torchopt_implicit(job: Job) -> Tensor:
    """TorchOpt's custom_root with conjugate gradients."""
    import torchopt

    names = [name for name, _ in job.net.named_parameters()]

    def lower(y: Any, x: Tensor) -> Tensor:
        logits = torch.func.functional_call(job.net, dict(zip(names, y, strict=True)), (job.X,))
        losses = F.cross_entropy(logits, job.t, reduction="none")
        total: Tensor = (x.sigmoid() * losses).mean() + RIDGE * sum(p.square().sum() for p in y)
        return total

    @torchopt.diff.implicit.custom_root(  # type: ignore[untyped-decorator]
        torch.func.grad(lower, argnums=0),
        argnums=1,
        solve=torchopt.linear_solve.solve_cg(maxiter=K, rtol=0.0, atol=0.0),
    )
    def solve(y: Any, x: Tensor) -> Any:
        y = tuple(t.detach().clone().requires_grad_() for t in y)
        for _ in range(job.steps):
            with torch.enable_grad():
                gradients = torch.autograd.grad(lower(y, x), y)
            y = tuple((t - LR * g).detach().requires_grad_() for t, g in zip(y, gradients, strict=True))
        return y

    y = solve(tuple(job.net.parameters()), job.x)
    logits = torch.func.functional_call(job.net, dict(zip(names, y, strict=True)), (job.Xv,))
    return torch.autograd.grad(F.cross_entropy(logits, job.tv), job.x)[0]


ENTRIES: dict[str, tuple[Callable[[Job], Tensor | None], str | None]] = {
    "implicit: hand-written": (hand_implicit, None),
    "implicit: bilevel_optim AID": (library_implicit, None),
    "implicit: torchopt custom_root": (torchopt_implicit, "torchopt"),
    "unrolled: hand-written": (hand_unrolled, None),
    "unrolled: bilevel_optim ITD": (library_unrolled, None),
    "unrolled: bilevel_optim ITD checkpoint": (library_recomputed, None),
    "unrolled: higher": (higher_unrolled, "higher"),
    "unrolled: torchopt MetaSGD": (torchopt_unrolled, "torchopt"),
}


def measure(name: str, n: int, steps: int, device: str) -> None:
    """Run one entry once in this process, and print its figures as JSON."""
    job = Job(n, steps, device)
    torch.autograd.grad(job.lower(), list(job.net.parameters()))  # warm up
    # The first torch.optim object of a process imports torch's compiler: a second and 100 MiB that are nobody's here.
    torch.optim.SGD(job.net.parameters(), lr=LR)
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    gradient = ENTRIES[name][0](job)
    assert gradient is not None
    norm = float(gradient.norm())
    seconds = time.perf_counter() - start
    if device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    else:
        peak = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps({"seconds": seconds, "peak": peak, "norm": norm}))


def in_a_process(name: str, n: int, steps: int, device: str) -> dict[str, float] | str:
    """Figures of one entry from a process of its own, or why there are none."""
    command = [sys.executable, "-m", __spec__.name, "--only", name, "--n", str(n), "--steps", str(steps)]
    result = subprocess.run([*command, "--device", device], capture_output=True, text=True, check=False)
    if result.returncode:
        return result.stderr.strip().splitlines()[-1][:80]
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=4000, help="examples; default: 4000")
    parser.add_argument("--steps", type=int, default=100, help="lower steps T; default: 100")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", action="store_true", help="peak memory for T = 10, 50, 100, 200 instead of times")
    parser.add_argument("--only", choices=list(ENTRIES), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.only:
        measure(args.only, args.n, args.steps, args.device)
        return
    names = [k for k, (_, needs) in ENTRIES.items() if needs is None or importlib.util.find_spec(needs)]
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))
    if args.memory:
        horizons = (10, 50, 100, 200)
        rows: list[list[object]] = []
        for name in names:
            results = [in_a_process(name, args.n, T, args.device) for T in horizons]
            rows.append([name, *(r if isinstance(r, str) else round(r["peak"]) for r in results)])
        print(f"Peak memory in MiB, MLP 784-256-10, n = {args.n}, K = {K}")
        print(table(["", *(f"T={T}" for T in horizons)], rows))
        return
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failures: dict[str, str] = {}
    for _ in range(args.repeats):
        for name in names:
            result = in_a_process(name, args.n, args.steps, args.device)
            if isinstance(result, str):
                failures[name] = result
            else:
                figures[name].append(result)
    rows = []
    for name in names:
        if not figures[name]:
            rows.append([name, failures[name], None, None, None])
            continue
        reference = figures[f"{name.split(':')[0]}: hand-written"]
        ratios = sorted(a["seconds"] / b["seconds"] for a, b in zip(figures[name], reference, strict=False))
        fastest = min(figures[name], key=lambda r: r["seconds"])
        rows.append(
            [name, fastest["seconds"], ratios[len(ratios) // 2], round(fastest["peak"]), f"{fastest['norm']:.6e}"]
        )
    print(f"One hypergradient, MLP 784-256-10, n = {args.n}, T = {args.steps}, K = {K}, {args.repeats} repetitions")
    print(table(["", "seconds (min)", "ratio (median)", "peak MiB", "norm of the result"], rows))


if __name__ == "__main__":
    main()

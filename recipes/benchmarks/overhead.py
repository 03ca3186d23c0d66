r"""Overhead of the library beyond its oracle calls: AID and ITD against hand-written loops and other libraries.

One hypergradient of data cleaning with an MLP 784-256-10 on n = 4000 random examples: T = 100 gradient steps on the
weighted loss, then conjugate gradients with K = 20 Hessian-vector products (AID, implicit), or backpropagation through
the steps (ITD, unrolled). F2SA (first order) takes the difference of two copies of y after T steps each. "matrix
products alone" is the limit of the implicit entries: their products of matrices with n rows, and nothing else. Every
entry runs in its own process. Its peak memory is that of the timed call, including everything that the process already
holds (libraries, the compiler). The time is the shortest of several repetitions, with the entries in turn.
``compiled``: after ``optimizer.compile()`` and the calls that make the graph. With few examples (n = 1000) the Hessian
is indefinite; then AID's eager solver stops after fewer than K products.

    python -m recipes.benchmarks.overhead --compiled      # prefix MALLOC_MMAP_THRESHOLD_=65536 for memory only
    python -m recipes.benchmarks.overhead --memory        # peak memory against T
    python -m recipes.benchmarks.overhead --step          # a step of every method on a tiny problem

``torchopt`` and ``higher`` are measured too if they are installed (``pip install torchopt higher``).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, alone, environment, forget_peak, peak, show, timed
from ..problems.networks import MLPCleaning
from . import steps

WARM_UP = 4  # calls: observe, trace and compare, compare again, use
LR, RIDGE, K, NU = 0.1, 0.037, 20, 0.1  # with this ridge the Hessian is positive definite and CG needs all K iterations


class Job(MLPCleaning):
    """Problem with the number of lower steps."""

    def __init__(self, n: int, steps: int, device: str) -> None:
        super().__init__(n, RIDGE, device)
        self.steps = steps


def library(job: Job, kind: type[bo.BilevelOptimizer], **options: Any) -> Tensor | None:
    """Run a method of this library."""
    optimizer = kind([job.x], job.net.parameters(), lr=0.0, lower_lr=LR, lower_steps=job.steps, **options)
    optimizer.backward(job.upper, job.lower)
    return job.x.grad


def captured(job: Job, kind: type[bo.BilevelOptimizer], **options: Any) -> Callable[[], Tensor | None]:
    """Return a method's compiled hypergradient, once its graph is made; every call starts at the same y."""
    optimizer = kind(
        [job.x], job.net.parameters(), lr=0.0, lower_lr=LR, lower_steps=job.steps, warm_start=False, **options
    )
    optimizer.compile(fullgraph=True)

    def again() -> Tensor | None:
        optimizer.backward(job.upper, job.lower)
        return job.x.grad

    for _ in range(WARM_UP):
        again()
    return again


def hand_implicit(job: Job) -> Tensor:
    """Compute the implicit hypergradient with the same oracles in a plain loop."""
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


def products(job: Job) -> Tensor:
    """Make the matrix products of the gradients and products with the Hessian in `hand_implicit`, and nothing else."""
    first, second = (t.detach() for t in job.net.parameters() if t.dim() == 2)
    hidden = job.X @ first.T
    logits = slope = hidden @ second.T
    for _ in range(job.steps + K + 2):  # each has two large products, with all inputs, and three small ones
        hidden, logits = job.X @ first.T, hidden @ second.T
        slope = hidden.T @ job.X
        _ = logits.T @ hidden, logits @ second
    return 0 * slope


def network(job: Job, y: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the network with other parameters."""
    values = dict(zip([name for name, _ in job.net.named_parameters()], y, strict=True))
    return lambda X: torch.func.functional_call(job.net, values, (X,))


def hand_first_order(job: Job) -> Tensor:
    """Compute F2SA's central difference with a plain loop for each copy of y."""
    copies = []
    for nu in (-NU, NU):
        y = [p.detach().clone().requires_grad_() for p in job.net.parameters()]
        net = network(job, y)
        for _ in range(job.steps):
            gradients = torch.autograd.grad(job.lower(net=net, parameters=y) + nu * job.upper(net=net), y)
            with torch.no_grad():
                torch._foreach_add_(y, gradients, alpha=-LR)
        copies.append(y)
    below, above = (job.lower(net=network(job, y), parameters=y) for y in copies)
    return torch.autograd.grad((above - below) / (2 * NU), job.x)[0]


def hand_unrolled(job: Job) -> Tensor:
    """Unroll the steps by hand, with torch.func.functional_call."""
    names = [name for name, _ in job.net.named_parameters()]
    y = [p.detach().clone().requires_grad_() for p in job.net.parameters()]

    def net(X: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(job.net, dict(zip(names, y, strict=True)), (X,))
        return logits

    for _ in range(job.steps):
        gradients = torch.autograd.grad(job.lower(net=net, parameters=y), y, create_graph=True)
        y = [t - LR * g for t, g in zip(y, gradients, strict=True)]
    return torch.autograd.grad(job.upper(net=net), job.x)[0]


def higher_unrolled(job: Job) -> Tensor:
    """Unroll the steps with the library higher."""
    import higher

    sgd = torch.optim.SGD(job.net.parameters(), lr=LR)
    with higher.innerloop_ctx(job.net, sgd) as (net, steps):
        for _ in range(job.steps):
            steps.step(job.lower(net=net, parameters=list(net.parameters())))
        gradient: Tensor = torch.autograd.grad(job.upper(net=net), job.x)[0]
        return gradient


def torchopt_unrolled(job: Job) -> Tensor:
    """Unroll the steps with TorchOpt's MetaSGD."""
    import torchopt

    sgd = torchopt.MetaSGD(job.net, lr=LR)
    for _ in range(job.steps):
        sgd.step(job.lower())
    return torch.autograd.grad(job.upper(), job.x)[0]


def torchopt_implicit(job: Job) -> Tensor:
    """Compute the implicit hypergradient with TorchOpt's custom_root and conjugate gradients."""
    import torchopt

    names = [name for name, _ in job.net.named_parameters()]

    def network(y: Any) -> Callable[[Tensor], Tensor]:
        return lambda X: torch.func.functional_call(job.net, dict(zip(names, y, strict=True)), (X,))

    def lower(y: Any, x: Tensor) -> Tensor:
        return job.lower(net=network(y), parameters=y, x=x)

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
    return torch.autograd.grad(job.upper(net=network(y)), job.x)[0]


CENTRAL: dict[str, Any] = {"order": 2, "nu": NU, "normalize": False, "stencil": "central"}
ENTRIES: dict[str, tuple[Callable[[Job], Any], str | None]] = {
    "implicit: hand-written": (hand_implicit, None),
    "implicit: bilevel_optim AID": (lambda job: library(job, bo.AID, linear_steps=K, warm_start=False), None),
    "implicit: bilevel_optim AID compiled": (lambda job: captured(job, bo.AID, linear_steps=K), None),
    "implicit: matrix products alone": (products, None),
    "implicit: torchopt custom_root": (torchopt_implicit, "torchopt"),
    "unrolled: hand-written": (hand_unrolled, None),
    "unrolled: bilevel_optim ITD": (lambda job: library(job, bo.ITD), None),
    "unrolled: bilevel_optim ITD compiled": (lambda job: captured(job, bo.ITD), None),
    "unrolled: bilevel_optim ITD checkpoint": (lambda job: library(job, bo.ITD, checkpoint=True), None),
    "unrolled: higher": (higher_unrolled, "higher"),
    "unrolled: torchopt MetaSGD": (torchopt_unrolled, "torchopt"),
    "first order: hand-written": (hand_first_order, None),
    "first order: bilevel_optim F2SA": (lambda job: library(job, bo.F2SA, **CENTRAL), None),
    "first order: bilevel_optim F2SA compiled": (lambda job: captured(job, bo.F2SA, **CENTRAL), None),
}


def measure(name: str, n: int, steps: int, device: str) -> dict[str, float]:
    """Run one entry once in this process; return its figures."""
    job = Job(n, steps, device)
    torch.autograd.grad(job.lower(), list(job.net.parameters()))  # warm up
    # The first torch.optim object of a process imports torch's compiler, which costs a second and 100 MiB.
    torch.optim.SGD(job.net.parameters(), lr=LR)
    run = ENTRIES[name][0]
    call = run(job) if name.endswith("compiled") else partial(run, job)
    start = forget_peak(device)
    gradient, seconds = timed(call, device)
    assert gradient is not None
    return {"seconds": seconds, "start": start, "peak": peak(device), "norm": float(gradient.norm())}


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(__doc__, device=True, out=False)
    parser.option("n", 4000, "examples")
    parser.option("steps", 100, "lower steps T")
    parser.option("repeats", 3, "runs per entry")
    parser.add_argument("--memory", action="store_true", help="peak memory for T = 10, 50, 100, 200 instead of times")
    parser.add_argument("--step", action="store_true", help="microseconds per step on a tiny problem instead")
    parser.add_argument("--compiled", action="store_true", help="also measure compiled steps")
    parser.add_argument("--only", nargs="+", help="with --step: only these methods")
    args = parser.parse(arguments)
    if args.step:
        steps.measure(args.only, args.repeats)
        return
    if args.only:
        print(json.dumps(measure(args.only[0], args.n, args.steps, args.device)))
        return
    names = [k for k, (_, needs) in ENTRIES.items() if needs is None or importlib.util.find_spec(needs)]
    names = [name for name in names if args.compiled or not name.endswith("compiled")]
    print(", ".join(f"{k} {v}" for k, v in environment(args.device).items()))

    def one(name: str, steps: int) -> dict[str, Any] | str:
        options = ("--n", args.n, "--steps", steps, "--device", args.device)
        return alone("recipes.benchmarks.overhead", "--only", name, *options)

    rows: list[list[object]] = []
    if args.memory:
        horizons = (10, 50, 100, 200)
        for name in names:
            results = [one(name, T) for T in horizons]
            rows.append([name, *(r if isinstance(r, str) else round(r["peak"]) for r in results)])
        title = f"Peak memory in MiB, MLP 784-256-10, n = {args.n}, K = {K}"
        show(title, ["", *(f"T={T}" for T in horizons)], rows)
        return
    found: dict[str, list[dict[str, Any] | str]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name in names:
            found[name].append(one(name, args.steps))
    for name in names:
        figures = [f for f in found[name] if not isinstance(f, str)]
        if not figures:
            rows.append([name, found[name][0], *[None] * 4])
            continue
        reference = [f for f in found[f"{name.split(':')[0]}: hand-written"] if not isinstance(f, str)]
        ratio = median(a["seconds"] / b["seconds"] for a, b in zip(figures, reference, strict=False))
        fastest = min(figures, key=lambda f: float(f["seconds"]))
        memory = round(fastest["peak"]), round(fastest["peak"] - fastest["start"])
        rows.append([name, fastest["seconds"], ratio, *memory, f"{fastest['norm']:.6e}"])
    title = f"One hypergradient, MLP 784-256-10, n = {args.n}, T = {args.steps}, K = {K}, {args.repeats} repetitions"
    show(title, ["", "seconds (min)", "ratio (median)", "peak MiB", "over its start", "norm of the result"], rows)


if __name__ == "__main__":
    main()

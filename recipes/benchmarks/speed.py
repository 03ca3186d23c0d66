r"""Processor time per step of every method: eager, compiled, by hand and in JAX, on problems of five sizes.

    python -m recipes.benchmarks.speed                                     # hours
    python -m recipes.benchmarks.speed --problems logistic --methods soba aid itd
    python -m recipes.benchmarks.speed --problems mlp lenet --methods aid-neumann itd f2sa --entries eager step hand
    python -m recipes.benchmarks.speed --device cuda                       # the tables of a GPU, wall-clock time

============ ================================================================== =======================
problem      lower variables                                                    upper variables
============ ================================================================== =======================
``logistic`` 22 weights, batches of 64                                          a log-penalty for each
``softmax``  softmax regression 64-10, batches of 64                            weights of the examples
``mlp``      MLP 784-256-10, batches of 64                                      weights of the examples
``lenet``    LeNet, batches of 64                                               weights of the examples
``tasks``    a head for each of 16 tasks with 25 images                         a body of four convolutions
============ ================================================================== =======================

``eager`` is ``optimizer.step``; ``step`` is the same after ``optimizer.compile()``; ``run`` is ``optimizer.run`` of
many steps at once after it; ``hand`` is the algorithm in plain functions, traced and compiled, one step at a time;
``jax`` is the same functions in JAX, many steps in one jitted scan (``pip install bilevel-optim[bench]``). Methods make
ten lower steps and products, five on the last two problems, and one lower step if that is their default (TTSA).

Every record is a separate process on one thread, whose entries are timed in turn; figures are medians over the rounds.
Compile times are seconds of the first calls minus those of later ones: cold with an empty Inductor cache, warm in a
second process with the cache of the first. The difference is the largest deviation from the eager iterates after three
calls, relative to their largest entry. A rerun makes only the missing records.

With ``--device`` the problems are on that device, there is no ``jax``, and times are wall-clock, with a synchronisation
at the end of each call.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import bilevel_optim as bo
from bilevel_optim.problem.random import draw_seed

from ..common import Parser, alone, environment, figure, save, show
from ..common.methods import STOCHASTIC
from ..common.running import synchronize
from ..common.seeds import begin, stream
from ..problems.shapes import SHAPES, TASKS, Shape, shape
from . import in_jax
from .by_hand import ALGORITHMS, DIRECTIONS, LR, MU, NU, RATE, TORCH, Oracles, compiled, drawn

ENTRIES = ("eager", "step", "run", "hand", "jax")
STEPS = {"logistic": 32, "softmax": 32, "mlp": 32, "lenet": 8, "tasks": 8}
MATRICES = 2**22  # methods that store the cross derivative are measured up to this number of entries
CALLS = 3  # calls of every entry before it is timed
PLACES = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
Advance = Callable[[], object]


# Methods missing from `recipes.common.methods` for sampled losses, or measured in another configuration.
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "aid-neumann": (bo.AID, {"linear_solver": "neumann"}),
    "anil": (bo.ANIL, {}),
    "ba": (bo.BA, {"lower_steps": 10, "linear_steps": 10, "growth": 0.0}),
    "dl-sgd": (bo.DLSGD, {"levels": 2, "neumann_steps": 3, "neumann": "cg"}),
    "es-maml": (bo.ESMAML, {}),
    "f2sa": (bo.F2SA, {"order": 2, "normalize": False, "nu": NU, "stencil": "central"}),
    "first-order": (bo.FirstOrder, {}),
    "fomaml": (bo.FOMAML, {}),
    "gda": (bo.GDA, {}),
    "hozog": (bo.HOZOG, {"directions": 1}),
    "imaml": (bo.iMAML, {"proximal": 1.0}),
    "imcn": (bo.iMCN, {"cubic_steps": 5}),
    "maml": (bo.MAML, {}),
    "pragda": (bo.PRAGDA, {"perturbation": 1e-13, "restart_radius": 0.5}),
    "prahgd": (bo.PRAHGD, {"linear_steps": 30, "perturbation": 1e-13, "restart_radius": 0.5}),
    "pzobo": (bo.PZOBO, {"directions": DIRECTIONS, "smoothing": MU}),
    "ragda": (bo.RAGDA, {"on_converged": "continue"}),
    "rahgd": (bo.RAHGD, {"on_converged": "continue"}),
    "rsvrb": (bo.RSVRB, {"variant": "matrix_free"}),
    "rt-mlmc": (bo.RTMLMC, {"levels": 3, "neumann_steps": 3}),
}


def offered() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return every method in one configuration, and AID in two."""
    plain = {name: method.make for name, method in STOCHASTIC.items() if "-" not in name}  # no variants
    return {**{name: (make.func, make.keywords) for name, make in plain.items()}, **OTHERS}


def optimizer_of(name: str, problem: Shape) -> tuple[bo.BilevelOptimizer, tuple[Any, ...], dict[str, Any]]:
    """Return a method's optimizer on a problem, and the arguments of its ``step``."""
    cls, arguments = offered()[name]
    declared, known = cls.declared, inspect.signature(cls).parameters
    if name in STOCHASTIC and STOCHASTIC[name].matrices and problem.entries > MATRICES:
        raise ValueError(f"matrices of {problem.entries:,} entries")
    arguments = {**arguments, "lr": LR, "lower_lr": RATE}
    for steps in ("lower_steps", "linear_steps"):
        if steps in known and known[steps].default != 1:  # a method designed for one lower step keeps it
            arguments[steps] = problem.steps
    if "floor" in known:
        arguments["floor"] = 0.02
    if declared.random:
        arguments["generator"] = stream(0, "method")
    extra: dict[str, Any] = {}
    if problem.tasks is not None:
        extra["tasks"] = problem.tasks
        if declared.tasks == "rows":
            problem.give_rows()
            arguments |= {"task_batch": TASKS // 2} if "task_batch" in known else {}
        elif declared.tasks != "none":
            arguments["tasks_per_step"] = TASKS
    x = list(problem.x)
    if declared.initial:
        x += [t.detach().clone().requires_grad_() for t in problem.y]
    losses: tuple[Any, ...] = problem.objectives()
    if declared.data == "finite_sum":
        losses = problem.terms()
    if declared.losses == 1:
        losses = (problem.saddle(),)
    return cls(x, list(problem.y), **arguments), losses, extra


def library(name: str, problem: Shape, entry: str, steps: int) -> tuple[Advance, bo.BilevelOptimizer]:
    """Return a function that runs steps of a method, one by one or at once, and the optimizer."""
    optimizer: Any
    begin(0, "method")  # the terms of a finite sum are drawn from torch's generator
    optimizer, losses, extra = optimizer_of(name, problem)
    if entry != "eager":
        optimizer.compile()
    if entry == "run":
        return lambda: optimizer.run(*losses, steps=steps, **extra), optimizer

    def advance() -> None:
        for _ in range(steps):
            optimizer.step(*losses, **extra)

    return advance, optimizer


def by_hand(name: str, problem: Shape, steps: int) -> tuple[Advance, Callable[[], tuple[Any, ...]]]:
    """Return a function that runs steps by hand, and one that returns the iterates."""
    recipe = ALGORITHMS[name]
    start, step = recipe.make(Oracles(TORCH, problem.f, problem.g), problem.steps)
    (up, low), (uppers, lowers) = recipe.draws(problem.steps), problem.streams()
    x, y = (tuple(t.detach().clone() for t in ts) for ts in (problem.x, problem.y))
    state: Any = None
    call: Callable[..., Any] | None = None
    generator = stream(0, "method")

    def advance() -> None:
        nonlocal x, y, state, call
        for _ in range(steps):
            batches = [next(uppers) for _ in range(up)], [next(lowers) for _ in range(low)]
            if call is None:
                state = start(x, y, drawn(*batches))
            if recipe.seeded:
                state = (torch.tensor(draw_seed(generator)), *state[1:])
            if call is None:
                call = compiled(step, x, y, state, *batches)
            x, y, state = call(x, y, state, *batches)

    return advance, lambda: (*x, *y)


def make(
    problem: str, name: str, entry: str, steps: int, device: str = "cpu", lower: int | None = None
) -> tuple[Advance, Callable[[], Sequence[Any]], Any]:
    """Return an entry: a function that runs the steps, one for the values of x and y, and the optimizer or None."""
    own = shape(problem, device=device)
    own.steps = lower or own.steps
    if entry == "hand":
        return *by_hand(name, own, steps), None
    if entry == "jax":
        return *in_jax.loop(problem, name, own, steps), None
    advance, optimizer = library(name, own, entry, steps)
    return advance, lambda: [t.detach() for t in (*own.x, *own.y)], optimizer


def difference(found: Sequence[Any], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest entry."""
    pairs = [(torch.as_tensor(a), b) for a, b in zip(found, expected, strict=True)]
    return float(max((a - b).abs().max() for a, b in pairs) / max(b.abs().max() for _, b in pairs))


def possible(problem: str, name: str, entries: Sequence[str], device: str = "cpu") -> list[str]:
    """Return the entries that exist for a method and problem."""
    hand = name in ALGORITHMS and not ALGORITHMS[name].random and problem != "tasks"
    jax = (
        device == "cpu"
        and problem in in_jax.LOSSES
        and name in in_jax.METHODS
        and importlib.util.find_spec("jax") is not None
    )
    return [e for e in entries if e in ("eager", "step", "run") or (hand if e == "hand" else jax)]


def measure(
    problem: str,
    name: str,
    entries: Sequence[str],
    steps: int,
    rounds: int,
    device: str = "cpu",
    lower: int | None = None,
) -> dict[str, Any]:
    """Measure a method on a problem in this process; without rounds, only the compile times."""
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    advances: dict[str, Advance] = {}
    result: dict[str, Any] = {"us": {}, "compile": {}, "difference": {}, "fallback": {}, "errors": {}}
    expected: Sequence[Tensor] = ()
    for entry in possible(problem, name, entries, device):
        try:
            begin = time.perf_counter()
            advance, values, optimizer = make(problem, name, entry, steps, device, lower)
            taken = [time.perf_counter() - begin]
            for _ in range(CALLS):
                begin = time.perf_counter()
                advance()
                synchronize(device)
                taken.append(time.perf_counter() - begin)
        except Exception as error:
            result["errors"][entry] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        advances[entry] = advance
        result["compile"][entry] = max(sum(taken) - CALLS * taken[-1], 0.0)
        if entry == "eager":
            expected = [t.clone() for t in values()]
        elif expected and not (name in ALGORITHMS and ALGORITHMS[name].random and entry == "jax"):
            result["difference"][entry] = difference(values(), expected)
        if optimizer is not None and "compile_fallback" in optimizer.diagnostics:
            result["fallback"][entry] = str(optimizer.diagnostics["compile_fallback"])
    found: dict[str, list[float]] = {entry: [] for entry in advances}
    for _ in range(rounds):
        for entry, advance in advances.items():
            begin, calls = clock(), 0
            while calls == 0 or clock() - begin < 0.1:
                advance()
                synchronize(device)
                calls += 1
            found[entry].append((clock() - begin) / (calls * steps) * 1e6)
    result["us"] = {entry: median(times) for entry, times in found.items() if times}
    result["rounds"] = found
    return result


def record(
    problem: str, name: str, entries: Sequence[str], steps: int, rounds: int, device: str, lower: int | None
) -> dict[str, Any] | str:
    """Return the figures of two processes: all with an empty cache, then compile times with the filled cache."""
    with tempfile.TemporaryDirectory() as cache:
        options = (
            "--one",
            problem,
            name,
            "--entries",
            *entries,
            "--inner",
            steps,
            "--cache",
            cache,
            "--device",
            device,
            *(("--lower-steps", lower) if lower else ()),
        )
        cold = alone("recipes.benchmarks.speed", *options, "--rounds", rounds)
        if isinstance(cold, str):
            return cold
        again = alone("recipes.benchmarks.speed", *options, "--compile-only")
        cold["warm"] = {} if isinstance(again, str) else again["compile"]
        return cold


def line(name: str, r: dict[str, Any]) -> list[object]:
    """Return a row of the table."""
    us = r["us"]

    def ratio(a: str, b: str) -> float | None:
        return us[a] / us[b] if a in us and b in us else None

    both = [f"{r['compile'][e]:.1f} / {r['warm'].get(e, float('nan')):.1f}" for e in ("step", "run") if e in us]
    worst = max((d for e, d in r["difference"].items() if e in ("step", "run")), default=None)
    notes = {**r["errors"], **r["fallback"]}
    return [
        name, *(us.get(e) for e in ENTRIES), ratio("eager", "step"), ratio("eager", "run"), ratio("step", "hand"),
        ratio("run", "jax"), ", ".join(both) or None, worst, "; ".join(f"{e}: {t[:60]}" for e, t in notes.items()),
    ]  # fmt: skip


HEADER = (
    "", *(f"{e} us" for e in ENTRIES), "eager/step", "eager/run", "step/hand", "run/jax",
    "compile s, cold / warm", "difference", "notes",
)  # fmt: skip


def plot(stem: Path, results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Plot microseconds per step of every entry, one panel per problem."""
    with figure(stem, "Microseconds of processor time per step, one thread", (5.5 * len(results), 8)) as canvas:
        axes = canvas.subplots(1, len(results), squeeze=False)[0]
        for axis, (problem, rows) in zip(axes, results.items(), strict=True):
            for entry, marker in zip(ENTRIES, "osDx^", strict=True):
                known = [(i, r["us"][entry]) for i, r in enumerate(rows.values()) if entry in r["us"]]
                if known:
                    axis.plot([us for _, us in known], [i for i, _ in known], marker, label=entry)
            axis.set(title=problem, xscale="log", xlabel="us per step")
            axis.set_yticks(range(len(rows)), [*rows])
            axis.invert_yaxis()
            axis.grid(alpha=0.3)
        axes[-1].legend()


def main(arguments: list[str] | None = None) -> dict[str, Any] | None:
    """Make the missing records; return the numbers that are written."""
    parser = Parser(__doc__, device=True)
    parser.add_argument("--problems", nargs="+", choices=[*SHAPES], default=[*SHAPES], help="default: all")
    parser.methods(offered(), [*offered()], "--methods")
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=[*ENTRIES], help="default: all")
    parser.option("rounds", 5, "rounds of timing")
    parser.option("inner", 32, "steps per call", shown=", ".join(f"{n} ({p})" for p, n in STEPS.items()))
    several = "lower steps and products of methods that make several"
    parser.option("lower_steps", 10, several, shown="10, or 5 on the last two problems")
    parser.set_defaults(inner=None, lower_steps=None)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # internal: one record in a separate process
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse(arguments)
    if args.one:
        (problem, name), rounds = args.one, 0 if args.compile_only else args.rounds
        with patch.dict(os.environ, PLACES, TORCHINDUCTOR_CACHE_DIR=args.cache), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(measure(problem, name, args.entries, args.inner, rounds, args.device, args.lower_steps)))
        return None
    path = args.out / "speed.records.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = {json.dumps(r["setting"], sort_keys=True): r for r in map(json.loads, lines)}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for problem in args.problems:
        results[problem] = {}
        for name in args.methods:
            steps = args.inner or STEPS[problem]
            setting = {
                "problem": problem, "method": name, "entries": args.entries, "inner": steps, "rounds": args.rounds,
                **({} if args.device == "cpu" else {"device": args.device}),
                **({"lower_steps": args.lower_steps} if args.lower_steps else {}),
            }  # fmt: skip
            key = json.dumps(setting, sort_keys=True)
            if key not in records:
                found = record(problem, name, args.entries, steps, args.rounds, args.device, args.lower_steps)
                if isinstance(found, str):
                    print(f"{problem}, {name}: {found}", flush=True)
                    continue
                records[key] = {"setting": setting, "environment": environment(args.device), **found}
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps(records[key]) + "\n")
            results[problem][name] = records[key]
        show(shape(problem).title, HEADER, [line(name, r) for name, r in results[problem].items()])
    plot(args.out / "speed", {problem: rows for problem, rows in results.items() if rows})
    return save(args, args.out / "speed", {"results": results})


if __name__ == "__main__":
    main()

r"""Overhead of a step beyond its oracle calls, on a problem so small that little but overhead is left.

Logistic regression with 22 weights (lower) and one log-penalty for each (upper), batches of 64, one thread.
The tables show microseconds of processor time per step, of every method for sampled losses. For comparison they show
the same calls of `bo.Oracle` in a plain loop, which gives the cost of the optimizer around them. The same derivatives
by ``torch.autograd.grad`` alone give the cost of the oracles too.

    python -m recipes.benchmarks.overhead --step
    python -m recipes.benchmarks.overhead --step --only soba aid
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel_optim as bo
from bilevel_optim.oracle.copies import Copies
from bilevel_optim.problem.vector import stack

from ..common import environment, show
from ..common.methods import STOCHASTIC, Method
from ..common.seeds import stream

__all__ = ["measure"]

T, RATE, NU, BATCHES = 10, 0.1, 1e-2, 10
Batch = tuple[Tensor, Tensor]


class Problem:
    """Batches, losses and live tensors."""

    def __init__(self) -> None:
        generator = stream(0, "data")
        self.train, self.val = (self._batches(generator) for _ in range(2))
        self.x, self.y = (torch.zeros(22, requires_grad=True) for _ in range(2))
        self.drawn = 0

    @staticmethod
    def _batches(generator: torch.Generator) -> list[Batch]:
        weights = torch.randn(22, generator=generator)
        inputs = torch.randn(BATCHES, 64, 22, generator=generator)
        return [(rows, (rows @ weights > 0).float()) for rows in inputs]

    def next(self, batches: list[Batch]) -> Batch:
        """Return the next batch, in turn."""
        self.drawn += 1
        return batches[self.drawn % BATCHES]

    def lower(self, batch: Batch, y: Tensor | None = None) -> Tensor:
        """Return the training loss with its penalties."""
        y = self.y if y is None else y
        return F.binary_cross_entropy_with_logits(batch[0] @ y, batch[1]) + 0.05 * (self.x.exp() * y.square()).sum()

    def upper(self, batch: Batch) -> Tensor:
        """Return the validation loss."""
        return F.binary_cross_entropy_with_logits(batch[0] @ self.y, batch[1])

    def objectives(self) -> tuple[bo.Objective, bo.Objective]:
        """Return both losses as objectives of the library."""
        return bo.Objective(self.upper, self.val), bo.Objective(self.lower, self.train)


def cg(product: Callable[[Tensor], Tensor], b: Tensor, v: Tensor, steps: int) -> Tensor:
    """Run plain conjugate gradients."""
    r = b - product(v)
    p, rr = r, r @ r
    for _ in range(steps):
        hp = product(p)
        alpha = rr / (p @ hp)
        v, r = v + alpha * p, r - alpha * hp
        rr, before = r @ r, rr
        p = r + (rr / before) * p
    return v


def oracles(name: str) -> Callable[[int], None]:
    """Return a plain loop over the library's oracles."""
    problem = Problem()
    oracle = bo.Oracle([problem.x], [problem.y], *problem.objectives())
    state = {"y": oracle.y, "v": oracle.y.zeros_like(), "copies": stack([oracle.y, oracle.y])}

    def f2sa() -> None:
        copies, weights = state["copies"], [-NU, NU]
        for _ in range(T):
            xi, zeta = oracle.f.draw(), oracle.g.draw()
            _, slopes = Copies(oracle, copies).lower_slopes(("lower", zeta, [1.0, 1.0]), ("upper", xi, weights))
            copies = copies - slopes * RATE
        xi, zeta = oracle.f.draw(), oracle.g.draw()
        _, h = Copies(oracle, copies).upper_slope(("lower", zeta, [-0.5 / NU, 0.5 / NU]), ("upper", xi, [0.5, 0.5]))
        _ = h * (1 / h.norm())
        state["copies"] = copies

    def soba() -> None:
        here = oracle.at(lower=state["y"])
        _, grad_x, grad_y = here.upper(oracle.f.draw())
        with here.lower_system(oracle.g.draw()) as system:
            cross, product = system.both(state["v"])
        state["y"] = state["y"] - system.gradient * RATE
        state["v"] = state["v"] - (product - grad_y) * RATE
        _ = grad_x - cross

    def descend() -> bo.Oracle:
        here = oracle.at(lower=state["y"])
        for _ in range(T):
            here = here.at(lower=here.y - here.lower(oracle.g.draw())[1] * RATE)
        state["y"] = here.y
        return here

    def aid() -> None:
        here = descend()
        _, grad_x, grad_y = here.upper(oracle.f.draw())
        with here.lower_system(oracle.g.draw()) as system:
            v = cg(lambda v: system.hvp(bo.Vector([v]))[0], grad_y[0], state["v"][0], T)
            _ = grad_x - system.cross(bo.Vector([v]))
        state["v"] = bo.Vector([v])

    def itd() -> None:
        here, systems = oracle.at(lower=state["y"]), []
        for _ in range(T):
            systems.append(here.kept_system(oracle.g.draw()))
            here = here.at(lower=here.y - systems[-1].gradient * RATE)
        state["y"] = here.y
        _, h, p = here.upper(oracle.f.draw())
        for system in reversed(systems):
            cross, hvp = system.both(p * -RATE)
            h, p = h + cross, p + hvp

    return _repeated({"soba": soba, "aid": aid, "itd": itd, "f2sa": f2sa}[name])


def by_hand(name: str) -> Callable[[int], None]:
    """Return the same loop in torch only."""
    problem = Problem()
    x, y, state = problem.x, problem.y, {"v": torch.zeros(22)}

    def gradient(batch: Batch, graph: bool = False) -> Tensor:
        return torch.autograd.grad(problem.lower(batch), y, create_graph=graph)[0]

    def adjoint() -> Tensor:
        _, grad_y = torch.autograd.grad(problem.upper(problem.next(problem.val)), [x, y], allow_unused=True)
        return grad_y

    def soba() -> None:
        b, slope = adjoint(), gradient(problem.next(problem.train), graph=True)
        cross, product = torch.autograd.grad(slope, [x, y], state["v"])
        with torch.no_grad():
            y.sub_(slope, alpha=RATE)
            x.add_(cross, alpha=RATE)
        state["v"] = state["v"] - RATE * (product - b)

    def aid() -> None:
        for _ in range(T):
            slope = gradient(problem.next(problem.train))
            with torch.no_grad():
                y.sub_(slope, alpha=RATE)
        b, graph = adjoint(), gradient(problem.next(problem.train), graph=True)
        v = cg(lambda v: torch.autograd.grad(graph, y, v, retain_graph=True)[0], b, state["v"], T)
        (cross,) = torch.autograd.grad(graph, x, v)
        state["v"] = v
        with torch.no_grad():
            x.add_(cross, alpha=RATE)

    def itd() -> None:
        w, steps = y.detach().clone().requires_grad_(), []
        for _ in range(T):
            (slope,) = torch.autograd.grad(problem.lower(problem.next(problem.train), w), w, create_graph=True)
            steps.append((w, slope))
            w = (w - RATE * slope).detach().requires_grad_()
        with torch.no_grad():
            y.copy_(w)
        p, h = adjoint(), torch.zeros(22)
        for w, slope in reversed(steps):
            cross, product = torch.autograd.grad(slope, [x, w], p)
            h, p = h - RATE * cross, p - RATE * product
        with torch.no_grad():
            x.sub_(h, alpha=RATE)

    def f2sa() -> None:
        for _ in range(T):
            train, val = problem.next(problem.train), problem.next(problem.val)
            for sign, copy in ((-1, state["minus"]), (1, state["plus"])):
                upper = F.binary_cross_entropy_with_logits(val[0] @ copy, val[1])
                (slope,) = torch.autograd.grad(problem.lower(train, copy) + sign * NU * upper, copy)
                with torch.no_grad():
                    copy.sub_(slope, alpha=RATE)
        train = problem.next(problem.train)
        difference = problem.lower(train, state["plus"]) - problem.lower(train, state["minus"])
        (h,) = torch.autograd.grad(difference / (2 * NU), x)
        with torch.no_grad():
            x.sub_(h / h.norm(), alpha=RATE)
            y.copy_((state["plus"] + state["minus"]) / 2)

    if name == "f2sa":
        state |= {sign: torch.zeros(22, requires_grad=True) for sign in ("plus", "minus")}
    return _repeated({"soba": soba, "aid": aid, "itd": itd, "f2sa": f2sa}[name])


def library(method: Method) -> Callable[[int], None]:
    """Return a loop over the method's own steps."""
    problem = Problem()
    options = {"linear_lr": RATE} if method.series else {"floor": 0.02} if method.floor else {}
    optimizer = method.make([problem.x], [problem.y], lr=1e-3, lower_lr=RATE, **options)
    losses = problem.objectives()
    if method.terms:
        stacked = (tuple(map(torch.cat, zip(*b, strict=True))) for b in (problem.val, problem.train))
        losses = tuple(  # type: ignore[assignment]
            bo.FiniteSum(loss, data, 64) for loss, data in zip((problem.upper, problem.lower), stacked, strict=True)
        )
    return _repeated(lambda: optimizer.step(*losses))


def _repeated(step: Callable[[], object]) -> Callable[[int], None]:
    def run(times: int) -> None:
        for _ in range(times):
            step()

    return run


def measure(only: list[str] | None, rounds: int) -> None:
    """Print the table: medians of several rounds, with all entries of a method in turn."""
    torch.set_num_threads(1)
    plain = {name: method for name, method in STOCHASTIC.items() if not method.tasks}
    plain["f2sa"] = plain["f2sa-1"]._replace(make=partial(bo.F2SA, lower_steps=T, order=2, nu=NU))
    names = [name for name in plain if only is None or name in only]
    rows: list[list[object]] = []
    for name in names:
        entries = {"step": library(plain[name])}
        if name in ("soba", "aid", "itd", "f2sa"):
            entries["oracles"] = oracles(name)
            entries["torch"] = by_hand(name)
        for run in entries.values():
            run(5)
        times = 300 if name == "soba" else 30
        found: dict[str, list[float]] = {entry: [] for entry in entries}
        for _ in range(rounds):
            for entry, run in entries.items():
                start = time.process_time()
                run(times)
                found[entry].append((time.process_time() - start) / times * 1e6)
        ratios = {
            entry: median(a / b for a, b in zip(found["step"], found[entry], strict=True))
            for entry in ("oracles", "torch")
            if entry in found
        }
        middle = {entry: round(median(values)) for entry, values in found.items()}
        columns: list[object] = [middle["step"]]
        for other in ("oracles", "torch"):
            columns += [middle.get(other), ratios.get(other)]
        rows.append([name, *columns])
    print(", ".join(f"{k} {v}" for k, v in environment("cpu").items()))
    title = f"Microseconds of processor time per step, 22 weights, batches of 64, {T} lower steps where there are any"
    show(title, ["", "step", "oracles alone", "ratio", "torch alone", "ratio"], rows)

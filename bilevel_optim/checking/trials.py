"""Short runs of a method from a point, which is restored afterwards."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import FILTERS, NonFiniteError
from ..optimizer.base import BilevelOptimizer
from ..oracle.buffers import Buffers, Kept
from ..problem.objective import Objective
from ..problem.tasks import task_count
from ..problem.vector import Vector

__all__ = ["SECONDS", "Outcome", "TimeLimit", "TimeUp", "Trials", "gradients_of"]

TOGETHER = 8  # tasks of a step whose gradients count as one in a budget, because they are evaluated together
COSTS = {"upper_grad": 1, "lower_grad": 1, "hvp": 2, "jvp": 2, "loss": 1}  # in units of a gradient


def gradients_of(optimizer: BilevelOptimizer) -> int:
    """Return the cost of a run in gradients: a product with second derivatives counts as two."""
    return sum(COSTS[name] * count for name, count in optimizer.oracle_counts.items())


@dataclass
class Outcome:
    """Result of a trial.

    Attributes:
        losses: upper losses of its steps.
        gradients: its cost.
        seconds: its duration.
        reason: why it ended early by itself; empty if it did not.
        cut: whether the time limit ended it before its cost was reached.
        warning_texts: its warnings.
        residual: norm of the gradient of g at its end, over that with the first y; NaN with tasks.
    """

    losses: list[float] = field(default_factory=list)
    gradients: int = 0
    seconds: float = 0.0
    reason: str = ""
    cut: bool = False
    warning_texts: list[str] = field(default_factory=list)
    residual: float = math.nan

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.losses)

    @property
    def final_loss(self) -> float:
        """Mean upper loss over the last quarter of the steps; infinite if the trial ended early."""
        if self.reason or not self.losses:
            return math.inf
        last = self.losses[-max(len(self.losses) // 4, 1) :]
        mean = sum(last) / len(last)
        return mean if math.isfinite(mean) else math.inf


class Trials:
    """Trials of optimizers over the same tensors, each from the same point, with the same data and random numbers.

    Args:
        tensors: x and y, live.
        f: the upper loss; its data start again in each trial.
        g: the lower loss; the same holds for its data.
        tasks: a sampler of tasks.
        until: returns True if there is time for more.
    """

    def __init__(
        self, tensors: Sequence[Tensor], f: Objective, g: Objective, tasks: Any, until: Callable[[], bool]
    ) -> None:
        self.tensors, self.f, self.g, self.tasks, self.until = tensors, f, g, tasks, until
        self.gradients = 0  # of all trials
        self.ended = False  # whether the time limit has ended one
        self._start = [t.detach().clone() for t in tensors]
        self._random = torch.get_rng_state()

    @contextmanager
    def _from_the_start(self) -> Generator[list[str]]:
        """Run the block from the start of all trials, and collect its warnings instead of showing them."""
        warning_texts: list[str] = []
        slopes = [t.grad for t in self.tensors]
        try:
            with torch.no_grad():
                Vector(self.tensors).detach().copy_(self._start)
            torch.set_rng_state(self._random)
            with (
                torch.autograd.set_detect_anomaly(False),  # trials may diverge
                FILTERS,
                warnings.catch_warnings(record=True) as caught,
                Kept(Buffers()),
            ):
                warnings.simplefilter("always")
                yield warning_texts
            warning_texts += dict.fromkeys(str(one.message) for one in caught)
        finally:
            with torch.no_grad():
                Vector(self.tensors).detach().copy_(self._start)
            for t, slope in zip(self.tensors, slopes, strict=True):
                t.grad = slope

    def run(
        self,
        make: Callable[[], BilevelOptimizer],
        gradients: int,
        *,
        after: Callable[[BilevelOptimizer], None] | None = None,
        stop: Callable[[Outcome], bool] | None = None,
    ) -> Outcome:
        """Run steps that cost this many gradients, at least one step, and return their outcome.

        Args:
            make: makes the optimizer.
            gradients: cost after which the trial ends; those of up to `TOGETHER` tasks count as one.
            after: called with the optimizer at the end of the trial.
            stop: returns True to end the trial early.
        """
        outcome = Outcome()
        f, g = self.f.over(self.f.data), self.g.over(self.g.data)
        with self._from_the_start() as outcome.warning_texts:
            optimizer = make()
            y = [t for t in optimizer.parameters("lower") if t.requires_grad]
            before = [t.detach().clone() for t in y]
            began = time.perf_counter()
            try:
                while not outcome.losses or outcome.gradients < gradients * self._together(optimizer):
                    if outcome.losses and not self.until():
                        self.ended = outcome.cut = True
                        break
                    loss = float(optimizer.step(f, g, tasks=self.tasks))
                    outcome.losses.append(loss)
                    outcome.gradients = gradients_of(optimizer)
                    if not math.isfinite(loss) or (stop is not None and stop(outcome)):
                        outcome.reason = f"diverged at step {outcome.steps}"
                        break
            except NonFiniteError:
                outcome.reason = f"not finite at step {outcome.steps + 1}"
            outcome.seconds = time.perf_counter() - began
            self.gradients += outcome.gradients
            if not outcome.reason:
                outcome.residual = self._residual(y, before, g)
                if after is not None:
                    after(optimizer)
        return outcome

    def _together(self, optimizer: BilevelOptimizer) -> int:
        """Return how many gradients count as one: those of the tasks of a step, up to a limit."""
        return 1 if self.tasks is None else min(task_count(self.tasks, optimizer.tasks_per_step), TOGETHER)

    def _residual(self, y: Sequence[Tensor], before: Sequence[Tensor], g: Objective) -> float:
        """Return the norm of the gradient of g in y, over that at an earlier y; NaN with tasks."""
        if self.tasks is not None:
            return math.nan
        now = [t.detach().clone() for t in y]
        here = _slope(y, g)
        with torch.no_grad():
            Vector(y).detach().copy_(before)
            there = _slope(y, g)
            Vector(y).detach().copy_(now)
        return here / there if there > 0 else math.nan


def _slope(y: Sequence[Tensor], g: Objective) -> float:
    """Return the norm of the gradient of g in y, over the batches that represent the data."""
    total = [torch.zeros_like(t) for t in y]
    for sample in g.samples():
        with torch.enable_grad(), sample.replayed(y[0].device):
            slopes = torch.autograd.grad(sample(), y, allow_unused=True)
        for t, slope in zip(total, slopes, strict=True):
            t += 0 if slope is None else slope.detach()
    return float(torch.stack([t.norm() for t in total]).norm())


SECONDS = "Invalid {name} value: {value} (a positive number of seconds)"
SILENT = 5.0  # seconds before anything is shown


class TimeUp(Exception):
    """The time is up before the work named in the message was done."""


class TimeLimit:
    """A time limit, and a line on the terminal that tells of long work.

    Args:
        seconds: time after which no new work begins.
        name: name of the tool.
    """

    def __init__(self, seconds: float = math.inf, name: str = "check_hypergradient") -> None:
        self._name = name
        self._start, self._seconds, self._last, self._shown = time.monotonic(), seconds, 0.0, 0
        self.note = ""  # a fact for the report if the time is up
        self.lenient = False  # True once a report can be made: its last evaluations are let through

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._seconds - self.spent

    @property
    def over(self) -> bool:
        """True if the time is up."""
        return self.spent > self._seconds

    def require(self, what: str) -> None:
        """Raise `TimeUp` if there is no time for this work."""
        if self.over:
            raise TimeUp(what)

    def show(self, text: str) -> None:
        """Show the current work, if the tool takes long and runs on a terminal."""
        spent = self.spent
        if spent < SILENT or spent - self._last < 0.2 or not sys.stderr.isatty():
            return
        limit = "" if math.isinf(self._seconds) else f" of {self._seconds:.0f}"
        line = f"{self._name}, {spent:.0f}{limit} s: {text}"
        print(f"\r{line.ljust(self._shown)}", end="", file=sys.stderr, flush=True)
        self._last, self._shown = spent, len(line)

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0

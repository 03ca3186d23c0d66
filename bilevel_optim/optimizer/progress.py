"""Warnings about the progress of a run: upper losses that grow, and parameters that do not move or move too far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import warn
from ..problem.vector import Vector

__all__ = [
    "DIVERGES",
    "STILL",
    "StepLength",
    "SystemTrend",
    "UpperTrend",
    "watch_losses",
    "watch_moves",
    "watch_system",
]

STILL = 20  # number of the step that checks whether x and y move
CALIBRATION = 2  # losses after the first that set the scale of losses
EARLY = 10  # first losses, which may change that scale
RISE = 300.0  # times the size of the first upper loss, above which a run diverges
WINDOW = 20  # upper losses in a window
LITTLE, MUCH = 1e-9, 1e-3  # relative changes of the upper loss: by a step, and by one as long as max(|x|, 1)
SOLVED = 1e-6  # part of the first upper loss, below which only rounding is left
LOOKS = 100  # steps between checks of the upper loss on an accelerator
SYSTEM, FAR = 10, 100.0  # steps between looks at a running linear system; |b - H v| that is far, in units of |b|
RIGHT_SIDE = "linear_right_side"  # |b| among the diagnostics of methods that have such a system
DIVERGES = "Use a smaller lr (a tenth of it to begin with), or let bo.suggest find a stable one"


class StepLength(NamedTuple):
    """Norm of ``.grad`` of x, the largest learning rate, the approximate length of a step, and whether it is lr."""

    norm: float
    lr: float
    length: float
    fixed_length: bool


@dataclass
class UpperTrend:
    """Trend of the upper loss over the steps of a run.

    Attributes:
        first: the first loss; None before it.
        spread: largest distance from it among the first ten losses, without those far above it.
        above: number of last losses in a row far above the first, each higher than the one before.
        count: number of losses.
        last: the last loss.
        window: losses since the last full window.
        least: smallest loss of that full window.
        most: largest loss of it.
        rise: distance of ``least`` above that of the window before.
        faster: number of windows in a row above the one before, each by more than the last one.
        far: number of windows in a row far above the first losses.
        early: largest distance from the first loss among the first three.
        settled: largest loss of the first window.
        promised: approximate decrease that the moves of x so far promise to first order.
    """

    first: float | None = None
    spread: float = 0.0
    above: int = 0
    count: int = 0
    last: float = 0.0
    window: list[float] = field(default_factory=list)
    least: float = math.inf
    most: float = math.inf
    rise: float = 0.0
    faster: int = 0
    far: int = 0
    early: float = 0.0
    settled: float = math.inf
    promised: float = 0.0

    def usual(self, losses: Sequence[float], begin: int) -> int:
        """Note losses from here on inside a window that are not above the first or the one before; return their end.

        A shortcut with the same result as `note_loss` and `describe_rise`, because most losses are of this kind.
        """
        end, first, last = begin, self.first or 0.0, self.last
        room = WINDOW - 1 - len(self.window) if self.count >= WINDOW else 0
        for loss in losses[begin : begin + room]:
            if not (loss <= first or loss <= last):
                break
            end, last = end + 1, loss
        if end > begin:
            self.above, self.last, self.count = 0, last, self.count + end - begin
            self.window += losses[begin:end]
        return end

    def note_loss(self, loss: float) -> bool:
        """Note a loss; return True if it is the second in a row that is far above the first, or if moves of x did that.

        The first three losses set the scale, because y goes to its solution. If one of x's first moves was so long that
        it promised to lower f by more than the rise, then it was that move.
        """
        if self.first is None:
            self.first = self.last = loss
        scale = max(abs(self.first), self.spread)
        self.above = self.above + 1 if loss > max(self.first + RISE * scale, self.last) else 0
        if self.count <= CALIBRATION:
            self.spread = self.early = max(self.spread, abs(loss - self.first))
            by_moves = self.count == CALIBRATION and self.promised > loss - self.first > RISE * abs(self.first) > 0
            self.above = 2 if by_moves else 0
        elif self.count < EARLY and not self.above:
            self.spread = max(self.spread, abs(loss - self.first))
        self.count, self.last = self.count + 1, loss
        return self.above == 2

    def describe_rise(self, loss: float) -> str:
        """Add a loss to its window; return a description if windows rise faster and faster, or stay far above.

        Faster: three in a row lie entirely above the one before, each by more than the last one, and in the end a tenth
        above the first loss. Far: two in a row lie above the first window by more than the size of the first loss.
        If moves of x promised to lower f by less than a third of the rise, or if the rise slows down, then f rises
        because y goes to its solution. Only `RISE` is far then.
        """
        self.window.append(loss)
        if len(self.window) < WINDOW or self.first is None:
            return ""
        least, most = min(self.window), max(self.window)
        rise, before, self.window = least - self.least, self.rise, []
        self.faster = self.faster + 1 if least > self.most and rise > before else 0
        self.least, self.most, self.rise = least, most, rise
        above = least - self.first
        self.settled = min(self.settled, most) if self.count <= WINDOW else self.settled
        by_moves = 3 * self.promised > above
        further = by_moves and least - self.settled > abs(self.first)
        self.far = self.far + 1 if further or above > RISE * max(abs(self.first), self.early) else 0
        worse = self.far >= 2 or (self.faster >= 3 and above > 0.1 * abs(self.first) and by_moves)
        return (
            f"the upper loss was {self.first:.3g} in the first step, and {least:.3g} to {most:.3g} in the last {WINDOW}"
            if worse
            else ""
        )

    @property
    def text(self) -> str:
        """Description of the trend, for the warning."""
        return f"the upper loss has grown from {self.first:.3g} to {self.last:.3g}"


def watch_losses(
    trend: UpperTrend, warned: set[str], steps: int, losses: Tensor, slope: Callable[[], StepLength | None]
) -> None:
    """Warn once if upper losses have grown.

    Args:
        trend: that of earlier losses; it changes.
        warned: keys of earlier warnings; it changes.
        steps: number of steps made.
        losses: losses of the last steps.
        slope: returns None if x is not moved here.
    """
    # Reading a loss on a device waits for the device.
    looks = losses.is_cpu or steps % LOOKS < losses.numel()
    values: list[float] = [] if not looks else losses.tolist() if losses.dim() else [losses.item()]
    begins, ends = trend.count < WINDOW, len(trend.window) + len(values) >= WINDOW  # a window of losses
    if values and (begins or ends) and (here := slope()) is not None:
        trend.promised += here.norm * here.length * (len(values) if begins else max(len(values), WINDOW))
    done = 0
    while (done := trend.usual(values, done)) < len(values):
        loss, done = values[done], done + 1
        if trend.note_loss(loss) and "growing upper loss" not in warned:
            warned.add("growing upper loss")
            warn(f"{trend.text}: the run diverges. {DIVERGES}")
        said = trend.describe_rise(loss)
        if said and not warned & {"growing upper loss", "worse upper loss"}:
            warned.add("worse upper loss")
            warn(
                f"{said}: the run makes the upper loss worse, unless y started where f is less than at y*(x). "
                f"{DIVERGES}"
            )


@dataclass
class SystemTrend:
    """Trend of a linear system whose solution v a method carries from step to step.

    Attributes:
        step: number of steps at the last look.
        scale: the largest |b| that was seen.
        far: number of looks in a row at which |b - H v| was far above that: noise stays below now and then.
    """

    step: int = 0
    scale: float = 0.0
    far: int = 0


def watch_system(
    trend: SystemTrend, warned: set[str], steps: int, every: int, figures: Callable[[], Mapping[str, Tensor]]
) -> None:
    """Warn once if v diverges.

    Args:
        trend: that of earlier looks; it changes.
        warned: keys of earlier warnings; it changes.
        steps: number of steps made.
        every: steps between looks.
        figures: returns the diagnostics of the last step.
    """
    if steps - trend.step < every or "runaway system" in warned:
        return
    last = figures()
    trend.step, trend.scale = steps, max(trend.scale, float(last[RIGHT_SIDE]))
    trend.far = trend.far + 1 if float(last["linear_residual"]) > FAR * trend.scale else 0
    if trend.far == 3:
        warned.add("runaway system")
        warn(
            f"the running solution v of the linear system diverges: at the last three looks |b - H v| was above "
            f"{FAR:g} times the largest |b| so far, so the hypergradient is wrong. Use a smaller linear_lr (by default "
            "the lower learning rate), below 2 / L with L the largest eigenvalue of the lower Hessian. If that has "
            "negative eigenvalues, no rate helps: use AID with linear_solver='minres', or F2SA"
        )


def watch_moves(
    trend: UpperTrend,
    warned: set[str],
    control: str,
    loss: float,
    before: Sequence[Vector],
    after: Sequence[Vector],
    slope: StepLength,
    lbfgs_residual: Tensor | None,
) -> None:
    """Warn if x hardly moved, or overshot, or if y under LBFGS did not move, in the step with number `STILL`.

    Args:
        trend: that of the upper losses.
        warned: keys of earlier warnings.
        control: name of the method if it is a control, else empty.
        loss: upper loss of the step.
        before: values of x and of y before the step.
        after: those after it.
        slope: gradient and rate of x in the step.
        lbfgs_residual: lower residual, if LBFGS moves y and it is known; else None.
    """
    x, moved = before[0], float((after[0] - before[0]).norm())
    change, possible = (moved or slope.length) * slope.norm, max(float(x.norm()), 1.0) * slope.norm
    left = max(abs(loss), SOLVED * abs(trend.first or 0.0))
    if 0 < change < LITTLE * abs(loss) and possible > MUCH * left:
        warn(
            f"x hardly moves: step {STILL} changed the upper loss by about {change / abs(loss):.0e} of its size, "
            f"although the hypergradient is not small (norm {slope.norm:.2g}). lr={slope.lr:g} is too small; "
            "bo.suggest finds a rate"
        )
    if not slope.norm and slope.lr and control:
        warn(
            f"x does not move: the upper loss depends on x only through y, and {control} ignores that dependence, "
            "because it is a control for comparisons. Use another method, such as AID or F2SA"
        )
    if slope.lr and not control and trend.count >= STILL and trend.spread and not trend.promised:
        warn(
            f"x does not move: the hypergradient was exactly zero in each of the first {STILL} steps. Look for an "
            "operation whose derivative is zero at this x (clamp, relu, round, a saturated sigmoid), or start x "
            "elsewhere"
        )
    first, grows = trend.first or 0.0, "growing upper loss" in warned
    if slope.fixed_length and not grows and moved * slope.norm > abs(loss) and loss > 3 * abs(first):
        warn(
            f"x goes past a minimum and back: step {STILL} moved it by {moved:.2g} along a slope of {slope.norm:.2g}, "
            f"although the upper loss was only {loss:.2g}, and {first:.2g} in the first step. lr={slope.lr:g} is too "
            f"large. {DIVERGES}"
        )
    residual = 0.0 if lbfgs_residual is None else float(torch.as_tensor(lbfgs_residual).norm())
    still = residual > 0 and all(map(torch.equal, before[1], after[1]))
    if still and moved > LITTLE * float(x.norm()):
        warn(
            f"LBFGS did not move y in step {STILL}: it takes y for a solution, but x has moved, and the gradient "
            f"of the lower loss has norm {residual:.2g}. Give it smaller tolerances (lower_optimizer="
            "functools.partial(torch.optim.LBFGS, tolerance_grad=0, tolerance_change=0)), or a larger lower loss"
        )

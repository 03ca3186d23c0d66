"""Trend of the upper loss over the steps of a run, from which a run warns that it diverges."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["WINDOW", "UpperTrend"]

CALIBRATION = 2  # losses after the first that set the scale of losses
EARLY = 10  # first losses, which may change that scale
RISE = 300.0  # times the size of the first upper loss, above which a run diverges
WINDOW = 20  # upper losses in a window


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

    def asks(self, number: int) -> bool:
        """Return True if, with so many more losses, the decrease promised by the last move of x is needed."""
        return self.count < WINDOW or len(self.window) + number >= WINDOW

    def note_loss(self, loss: float) -> bool:
        """Note a loss; return True if it is the second in a row that is far above the first, or if moves of x did that.

        The first three losses set the scale, because y goes to its solution. If one of x's first moves was so long that
        it promised to lower f by more than the rise, then it was that move.
        """
        if loss <= self.last and self.count >= EARLY:  # the common case: a shortcut with the same result
            self.above, self.count, self.last = 0, self.count + 1, loss
            return False
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
        """Note a loss; return a description if windows rise faster and faster, or stay far above the first loss.

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

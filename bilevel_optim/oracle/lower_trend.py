"""Trend of the lower solves of a run, from which a step warns of lower steps that diverge or swing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LowerTrend"]

STREAK = 10  # lower solves in a row that must agree before a warning


@dataclass
class LowerTrend:
    """Trend of lower solves, of at least three steps each, over several outer steps.

    Attributes:
        grew: number of last solves in a row that ended with a larger gradient than they began with.
        factor: total growth of the gradient in them.
        began: norm of the gradient before the first of them.
        swung: number in a row that ended with gradients that pointed against each other and did not get smaller.
        largest: the largest norm at the end of a solve.
        text: description of the trend, for the warning.
    """

    grew: int = 0
    factor: float = 1.0
    began: float = 0.0
    swung: int = 0
    largest: float = 0.0
    text: str = ""

    def note_solve(self, first: float, last: float, turn: float) -> bool:
        """Note the norms of a solve's first and last gradient and the product of its last two; return True to warn.

        Noise alone gives no warning: with independent gradients each solve grows with probability one half.
        """
        growth = last / first if first > 0 else 1.0
        self.largest = max(self.largest, last)
        if growth <= 1:
            self.grew, self.factor = 0, 1.0
        else:
            self.began = self.began if self.grew else first
            self.grew, self.factor = self.grew + 1, self.factor * growth
        opposed = turn < -0.5 * last * last and growth > 0.9 and last > 0.1 * self.largest
        self.swung = self.swung + 1 if opposed else 0
        if (self.grew >= STREAK and last > 10 * self.began) or (self.grew >= 2 * STREAK and self.factor > 100):
            self.text = (
                f"the gradient of the lower loss has grown in each of the last {self.grew} lower solves, from "
                f"{self.began:.2g} to {last:.2g}"
            )
        elif self.swung >= STREAK:
            self.text = (
                f"y swings about a solution: at the end of each of the last {self.swung} lower solves two gradients in "
                f"a row pointed against each other, and their norm, {last:.2g}, does not get smaller"
            )
        else:
            return False
        return True

    def message(self) -> str:
        """Return the warning."""
        return (
            f"{self.text} (see diagnostics['lower_growth']), so y is no solution of the lower problem and "
            "the hypergradient is not reliable. Use a smaller lower_lr (half of it to begin with), "
            "another lower_optimizer, or lower_clip"
        )

"""How long a check may take, and what it does meanwhile."""

from __future__ import annotations

import math
import sys
import time

__all__ = ["Clock"]

SILENT = 2.0  # seconds before anything is shown


class Clock:
    """Time that is left, and a line on the terminal about what takes so long.

    Args:
        seconds: after which nothing new is begun.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._start, self._seconds, self._last, self._shown = time.monotonic(), seconds, 0.0, 0

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._start

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.spent > self._seconds

    def show(self, text: str) -> None:
        """Say what is done now, if it takes long and somebody looks."""
        spent = self.spent
        if spent < SILENT or spent - self._last < 0.2 or not sys.stderr.isatty():
            return
        limit = "" if math.isinf(self._seconds) else f" of {self._seconds:.0f}"
        line = f"check_hypergradient, {spent:.0f}{limit} s: {text}"
        print(f"\r{line.ljust(self._shown)}", end="", file=sys.stderr, flush=True)
        self._last, self._shown = spent, len(line)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0

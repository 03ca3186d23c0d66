"""The time limit of a tool, and its progress bar."""

from __future__ import annotations

import math
import sys
import time

__all__ = ["SECONDS", "TimeLimit", "TimeUp"]

SECONDS = "Invalid {name} value: {value} (a positive number of seconds)"
SILENT = 5.0  # seconds before anything is shown
WIDTH = 20  # characters of the bar


class TimeUp(Exception):
    """The time is up before the work named in the message was done."""


class TimeLimit:
    """A time limit, and a progress bar on the terminal.

    Args:
        seconds: time after which no new work begins.
        name: name of the tool.
    """

    def __init__(self, seconds: float = math.inf, name: str = "check_hypergradient") -> None:
        self._name = name
        self._start, self._seconds, self._last, self._shown = time.monotonic(), seconds, 0.0, 0
        self._from, self._to = 0.0, 1.0
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

    def stage(self, begin: float, end: float) -> None:
        """Set the part of the whole work that further progress refers to."""
        self._from, self._to = begin, end

    def show(self, text: str, part: float = 0.0) -> None:
        """Show the current work and the finished part of the stage, if the tool takes long and runs on a terminal."""
        spent = self.spent
        if spent < SILENT or spent - self._last < 0.2 or not sys.stderr.isatty():
            return
        limit = "" if math.isinf(self._seconds) else f" of {self._seconds:.0f}"
        whole = self._from + (self._to - self._from) * min(part, 1.0)
        bar = ("#" * int(WIDTH * whole)).ljust(WIDTH, ".")
        line = f"{self._name} [{bar}] {whole:.0%}, {spent:.0f}{limit} s: {text}"
        print(f"\r{line.ljust(self._shown)}", end="", file=sys.stderr, flush=True)
        self._last, self._shown = spent, len(line)

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0

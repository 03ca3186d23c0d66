"""Times of compiled and of eager steps: whether compilation pays."""

from __future__ import annotations

import math

__all__ = ["LOOKS", "Gain"]

LOOKS = 4  # steps made both ways before the gain is told
LEAST = 0.9  # largest part of an eager step's time that is a gain


class Gain:
    """Seconds of compilation, and the least seconds of an eager and of a compiled step.

    Attributes:
        compilation: seconds of all compilations so far.
        looks: number of steps that were made both ways, without a compilation.
    """

    def __init__(self) -> None:
        self.compilation, self.looks = 0.0, 0
        self._eager = self._compiled = math.inf

    def note(self, eager: float, compiled: float) -> None:
        """Note the seconds of a step that was made both ways."""
        self.looks += 1
        self._eager, self._compiled = min(self._eager, eager), min(self._compiled, compiled)

    @property
    def pays(self) -> bool:
        """True if compiled steps are faster than eager ones by a tenth."""
        return self._compiled <= LEAST * self._eager

    @property
    def text(self) -> str:
        """Description, for the diagnostics and a warning."""
        compiled, eager, spent = (
            float(f"{t:.3g}") for t in (1e3 * self._compiled, 1e3 * self._eager, self.compilation)
        )
        times = f"a compiled step takes {compiled:g} ms, an eager one {eager:g} ms"
        if not self.pays:
            return f"{times}, so the {spent:g} s of compilation do not pay"
        steps = math.ceil(self.compilation / (self._eager - self._compiled))
        return f"{times}, so the {spent:g} s of compilation pay after {steps:,} steps"

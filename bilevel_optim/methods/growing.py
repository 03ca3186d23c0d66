"""Base class of the methods that make more and more lower steps."""

from __future__ import annotations

import math
from typing import Any

from ..optimizer.base import BilevelOptimizer
from ..optimizer.options import number

__all__ = ["Growing"]


class Growing(BilevelOptimizer):
    r"""Outer step k = 0, 1, ... makes :math:`\lceil c\,(k + 1)^{\text{growth}} \rceil` lower steps.

    Args:
        lower_steps: c > 0, not necessarily an integer.
        growth: the exponent.
    """

    lower_steps: float = number(above=0, settable=False)  # type: ignore[assignment]  # an attribute that is rounded up
    growth: float = number(default=0.5, least=0)

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        self._scale: float = options["lower_steps"]
        options["lower_steps"] = math.ceil(self._scale)

    def _lower_step_count(self, steps: int) -> int:
        """Return the number of lower steps, which grows with ``steps``."""
        return math.ceil(self._scale * math.pow(steps + 1, self.growth))

    def _why_eager(self, tasks: Any = None) -> str:
        """Return why steps run eagerly, if the number of lower steps grows; otherwise an empty string."""
        return (
            "the number of lower steps grows, but a graph has a fixed number (use growth=0)" if self.growth > 0 else ""
        )

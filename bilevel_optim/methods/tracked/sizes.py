"""Sizes of the steps of methods with a memory of each lower problem, and which of their steps are alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...optimizer.base import BilevelOptimizer
from ...optimizer.step import StepInputs, Update
from ...problem.vector import Vector
from . import watching
from .drawing import Drawing
from .rows import about_to_end
from .trackers import Trackers
from .variants import Variant

__all__ = ["SizedSteps"]


class SizedSteps(BilevelOptimizer):
    """The part of a method that knows how large its steps are."""

    rule: Variant
    drawing: Drawing
    trackers: Trackers
    beta: dict[str, float]
    beta_unit: str
    averaging: float
    radius: float
    schedule: str
    schedule_offset: float
    restarts: int | None

    def graph_key(self, steps: int, numbers: Mapping[str, Any]) -> Any:
        """The host makes the first step, those that bring all rows up to date, and one that warns."""
        clock = numbers.get("clock")
        if isinstance(clock, tuple) and len(clock[-1]):
            return False  # for which there is a reason
        if not isinstance(clock, Tensor):  # but a tuple in older checkpoints
            return None
        if self._drifts:
            rows = self.param_groups[-1]["params"][0].shape[:1].numel()
            warns = steps == watching.PATIENCE + 1 and watching.is_loud(self._share_lost)
            if warns or about_to_end(clock, self.trackers.shrinking, self._betas(steps, rows)):
                return None
        elif clock[1:].any():
            return None
        return tuple(self.beta.items())

    def why_eager(self, tasks: Any = None) -> str:
        """What the host decides from values or from the number of the step."""
        if not self._steady:
            return "the sizes of its steps change with their number (schedule, restarts)"
        if tasks is None:
            return ""
        if not self.warm_start:
            return "without warm starts every step begins with all rows"
        if self.drawing.notes:
            return "the host makes the probabilities of the tasks from what their rows have shown"
        if self._drifts and math.isfinite(self.radius):
            return "with a radius the host takes rows that were not looked at through the steps one by one"
        return ""

    def update(self, x: Vector, gradient: Vector, given: StepInputs) -> Update:
        """The step along d, of the present pace."""
        pace = self._pace(given.steps - 1)  # the step has been counted by now
        return super().update(x, gradient if pace == 1.0 else gradient * pace, given)

    @property
    def _drifts(self) -> bool:
        """Whether there may be rows that move without being looked at."""
        return self.drawing.task_batch is not None and not self.rule.rests

    def _pace(self, step: int) -> float:
        """What the schedule and the restarts make of the learning rates at a step."""
        pace = 1.0 if self.schedule == "constant" else max(self.schedule_offset + step, 1.0) ** (-1 / 3)
        if self.restarts is not None:
            pace *= 2.0 ** (-int(math.log2(step / self.restarts + 1)) / 2)
        return pace

    def _tau(self, given: StepInputs) -> float:
        """The part of a lower step that is made."""
        return self.averaging * self._pace(given.steps)

    @property
    def _steady(self) -> bool:
        """Whether all steps have the same sizes."""
        return self.schedule == "constant" and self.restarts is None

    @property
    def _share_lost(self) -> float:
        """What rows that are not looked at lose of z in a step, in units of the part of the tasks in it."""
        return self.trackers.resting(max(self.beta.values())) if self.beta_unit == "q" and self._steady else 0.0

    def _betas(self, steps: int, m: int) -> dict[str, float]:
        """Mixing weights of the step after so many."""
        factor = (self.drawing.share(m) if self.beta_unit == "q" else 1.0) * self._pace(steps) ** 2
        return self.trackers.weights({name: min(beta * factor, 1.0) for name, beta in self.beta.items()})

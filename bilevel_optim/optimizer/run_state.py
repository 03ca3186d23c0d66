"""What an optimizer knows of its run beside the parameters and what is remembered of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..oracle.buffers import Buffers
from ..oracle.session import COUNTERS, LossFacts, Options, Session

__all__ = ["RunState"]


@dataclass
class RunState:
    """The account of a run, written with each step that is accepted.

    Attributes:
        found: what is known about the losses.
        buffers: module buffers that evaluations change.
        warned: keys of the warnings that were given.
        counts: oracle calls.
        steps: outer steps made.
        last_loss: what the last step returned.
    """

    found: LossFacts = field(default_factory=LossFacts)
    buffers: Buffers = field(default_factory=Buffers)
    warned: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    steps: int = 0
    last_loss: Tensor | None = None

    def session(self, options: Options) -> Session:
        """The bookkeeping of a new step."""
        return Session.begun(options, self.found, self.buffers, self.warned)

    def after(self, session: Session, loss: Tensor) -> dict[str, Any]:
        """What becomes of it with a step."""
        counts = {name: count + session.counts[name] for name, count in self.counts.items()}
        return {
            "found": session.found,
            "warned": session.warned,
            "counts": counts,
            "steps": self.steps + 1,
            "last_loss": loss.detach(),
        }

    def enter(self, after: dict[str, Any]) -> None:
        """Write it; may be repeated."""
        self.__dict__.update(after)
        self.buffers.complete = True

    def after_steps(self, counts: Mapping[str, int], loss: Tensor, steps: int = 1) -> dict[str, Any]:
        """What becomes of it with steps of these oracle calls each, the last with this loss, and nothing else new."""
        total = {name: count + steps * counts.get(name, 0) for name, count in self.counts.items()}
        return {"counts": total, "steps": self.steps + steps, "last_loss": loss}

    def saved(self) -> dict[str, Any]:
        """What a state dict holds of it."""
        return {
            "steps_done": self.steps,
            "oracle_counts": dict(self.counts),
            "fallback": self.found.fallback,
            "last_loss": self.last_loss,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` gave."""
        self.steps, self.last_loss = saved["steps_done"], saved["last_loss"]
        self.counts.update(saved["oracle_counts"])
        self.found = LossFacts(fallback=saved["fallback"])  # first looks are made where a new optimizer makes them

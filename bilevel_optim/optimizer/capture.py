"""What is known of captured steps: the kinds that were met, the draws and the graphs of each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import BilevelWarning
from ..problem.feeding import Draws
from .binding import Binding
from .flat import Flat
from .graphs import Backend, backend_of
from .replay import Sources
from .watch import Watch

__all__ = ["PLAIN", "Capture", "Identity", "Kind"]

PLAIN = (bool, int, float, str, tuple, type(None))
STRANGERS = 8  # steps in a row that are like none before, after which no more are expected to be
MOST_GRAPHS = 16  # of an optimizer; other kinds of steps run eagerly
FULL = f"there are {MOST_GRAPHS} graphs, and none is for data of these shapes and constants"


class Identity:
    """A value that is compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Kind:
    """The steps that are made of the same operations.

    Attributes:
        guard: what they have in common.
        watches: the losses and what they read.
        seen: how many were met.
        draws: what each of them draws; None: not known yet.
        bindings: the graphs, one for each shape of the data.
        read: tensors whose values are constants of the graphs; and these.
        reason: why they run eagerly, if they do.
    """

    guard: list[Any]
    watches: list[Watch]
    seen: int = 0
    draws: Draws | None = None
    bindings: list[Binding] = field(default_factory=list)
    read: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    reason: str | None = None

    def binding(self, data: Flat) -> Binding | None:
        """The graph for data like these."""
        return next((binding for binding in self.bindings if binding.fits(data)), None)

    def fits(self, guard: list[Any], functions: Sequence[Any]) -> bool:
        """Whether a step is of this kind."""
        return (
            self.guard == guard
            and len(functions) == len(self.watches)
            and all(map(Watch.stands_for, self.watches, functions))
            and (not self.read or all(torch.equal(tensor, value) for tensor, value in self.read))
        )


class Capture:
    """What `BilevelOptimizer.compile` has been told, and the graphs made since.

    Args:
        strict: raise where a step cannot be captured, instead of running it eagerly.
        backend: as ``torch.compile`` takes it.
        mode: likewise.
        options: likewise.
    """

    def __init__(
        self, strict: bool, backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None
    ) -> None:
        self.strict = strict
        self.given = (strict, backend, mode, options)
        self.backend: Backend = backend_of(backend, mode, options)
        self.kinds: list[Kind] = []  # the last used first
        self.reason: str | None = None  # why everything runs eagerly from now on
        self.warned: set[str] = set()
        self._names: list[str] = []
        self._strangers = 0  # steps in a row of a kind that was not met before
        self._rates: tuple[list[Any], list[Tensor]] = ([], [])

    def __reduce__(self) -> tuple[type[Capture], tuple[Any, ...]]:
        return Capture, self.given  # a copy of an optimizer makes its graphs anew

    def kind(self, guard: list[Any], sources: Sources) -> Kind:
        """The kind of a step."""
        functions = [f for o in (sources.upper, sources.lower) if o is not None for f in (o.loss, o.features)]
        for i, kind in enumerate(self.kinds):
            if kind.fits(guard, functions):
                self._strangers = 0
                if i:
                    self.kinds.insert(0, self.kinds.pop(i))
                return kind
        self._strangers += 1
        if self._strangers > STRANGERS:
            self.refuse("from step to step the losses read something else (a counter, new tensors) or options change")
        self.kinds.insert(0, Kind(guard, [Watch(function) for function in functions]))
        del self.kinds[4 * MOST_GRAPHS :]
        return self.kinds[0]

    def reason_of(self, kind: Kind | None) -> str | None:
        """Why steps of a kind run eagerly; those that the host makes in between (None) are told as the others."""
        known = kind or next(iter(self.kinds), None)
        return self.reason or (None if known is None else known.reason)

    def familiar(self, kind: Kind) -> bool:
        """Whether a kind of steps is the first that was met, or other steps of the same losses are captured."""
        return len(self.kinds) == 1 or any(
            other.bindings
            and len(other.watches) == len(kind.watches)
            and all(map(Watch.stands_for, other.watches, (w.function for w in kind.watches)))
            for other in self.kinds
        )

    def hyperparameters(self, own: dict[str, Any]) -> list[str]:
        """Names of the attributes that are plain values and not results."""
        if not self._names:
            self._names = [n for n, v in own.items() if isinstance(v, PLAIN) and not n.startswith("_")]
        return self._names

    @property
    def full(self) -> bool:
        """Whether no more graphs are to be made."""
        return sum(len(kind.bindings) for kind in self.kinds) >= MOST_GRAPHS

    def rates(self, groups: Sequence[dict[str, Any]], device: torch.device) -> list[Tensor]:
        """Learning rates of all groups as tensors, made anew where they have changed."""
        values = [group["lr"] for group in groups]
        options: Any = {"dtype": torch.float64 if device.type != "mps" else torch.float32, "device": device}
        if any(isinstance(value, Tensor) for value in values):
            return [torch.as_tensor(value, **options).reshape(()) for value in values]
        if values != self._rates[0]:
            self._rates = (values, [torch.full((), float(value), **options) for value in values])
        return self._rates[1]

    def refuse(self, reason: str, kind: Kind | None = None) -> None:
        """From now on run these steps eagerly, or all of them."""
        if self.strict:
            raise RuntimeError(f"the step cannot be captured: {reason}")
        if kind is None:
            self.reason = reason
            self.kinds.clear()
        else:
            kind.reason = reason
            kind.bindings.clear()
        self._warn(reason)

    def turned_away(self) -> str:
        """Why a step runs eagerly that no graph fits, once there are as many as there may be."""
        if self.strict:
            raise RuntimeError(f"the step cannot be captured: {FULL}")
        self._warn(FULL)
        return FULL

    def _warn(self, reason: str) -> None:
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(f"steps run eagerly, because they cannot be captured: {reason}", BilevelWarning, stacklevel=7)

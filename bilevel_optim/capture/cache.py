"""What is known of captured steps: what each of them draws, its graphs, and why some run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import warn
from ..problem.parameters import LEVELS
from ..problem.tracing import Untraceable
from .backends import Backend, backend_of
from .bind import CompiledStep
from .draws import Data, Draws, Like
from .losses import NotNow, Readers, Unreadable

__all__ = ["PLAIN", "CacheEntry", "DataForm", "Identity", "Settings", "StepCache"]

PLAIN = (bool, int, float, str, tuple, type(None))
PATIENCE = 8  # steps in a row that are like none before, after which no more are expected to be
MOST_GRAPHS = 16  # of an optimizer; other steps run eagerly
FULL = f"there are {MOST_GRAPHS} graphs, and none is for data of these shapes and constants"


class Identity:
    """A value that is compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Settings:
    """What `BilevelOptimizer.compile` has been told.

    Attributes:
        fullgraph: raise where a step cannot be captured, instead of running it eagerly.
        backend, mode, options: as ``torch.compile`` takes them.
        unroll: steps in one graph of ``run``.
        rtol, atol: the difference from an eager step that is accepted; None: what rounding explains.
    """

    fullgraph: bool = False
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    unroll: int = 1
    rtol: float | None = None
    atol: float | None = None


class DataForm:
    """Steps with data of one form.

    Args:
        data: such data.

    Attributes:
        like: the form.
        readers: read the losses with such data.
        compiled: the graphs, one for each way in which the losses read.
        arguments: such as those of the losses, by role, if they are known and draws do not matter to anybody else.
        met: the last way that was met without having a graph.
        refused: the last way that could not be traced, and why.
    """

    def __init__(self, data: Data) -> None:
        self.like, self.readers = Like(data), Readers()
        self.compiled: list[CompiledStep] = []
        self.met: Any = None
        self.refused: tuple[Any, str] = (None, "")
        self.arguments: dict[str, tuple[Any, ...]] | None = None

    def compiled_for(self, key: Any, state: Any, numbers: Mapping[str, Any]) -> CompiledStep | None:
        """The graph for losses that read so, in an optimizer with this state; one that does not fit any more goes."""
        for compiled in self.compiled:
            if compiled.key == key:
                if compiled.holds(state, numbers):
                    return compiled
                self.compiled.remove(compiled)
                break
        return None


@dataclass
class CacheEntry:
    """The steps that are alike but for their data and for what the losses read.

    Attributes:
        guard: what they have in common.
        draws: what each of them draws; None: not known yet.
        forms: the forms of their data.
        reason: why they run eagerly, if they do.
        unsettled: whether one did not leave behind what it had found.
    """

    guard: list[Any]
    draws: Draws | None = None
    forms: list[DataForm] = field(default_factory=list)
    reason: str = ""
    unsettled: bool = False

    def form(self, data: Data) -> DataForm:
        """That of these data."""
        found = next((form for form in self.forms if form.like.fits(data)), None)
        if found is None:
            found = DataForm(data)
            self.forms.insert(0, found)
            del self.forms[4 * MOST_GRAPHS :]
        return found

    @property
    def compiled(self) -> list[CompiledStep]:
        """All graphs of these steps."""
        return [compiled for form in self.forms for compiled in form.compiled]


class StepCache:
    """The graphs of an optimizer, made since `BilevelOptimizer.compile`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend: Backend = backend_of(settings.backend, settings.mode, settings.options)
        self.entries: list[CacheEntry] = []  # the last used first
        self.reason = ""  # why everything runs eagerly from now on
        self._unreadable: dict[tuple[str, Any], str] = {}
        self._warned: set[str] = set()
        self._names: list[str] = []
        self._new = 0  # steps in a row that were like none before
        self._rates: tuple[list[Any], list[Tensor]] = ([], [])

    def entry(self, guard: list[Any]) -> CacheEntry:
        """That of steps with this in common."""
        for i, entry in enumerate(self.entries):
            if entry.guard == guard:
                self._new = 0
                if i:
                    self.entries.insert(0, self.entries.pop(i))
                return entry
        self._new += 1
        if self._new > PATIENCE:
            self.refuse("from step to step options of the optimizer or of its groups change")
        self.entries.insert(0, CacheEntry(guard))
        del self.entries[4 * MOST_GRAPHS :]
        return self.entries[0]

    @property
    def is_familiar(self) -> bool:
        """Whether the steps met last are the first of all, or others are captured."""
        return len(self.entries) == 1 or any(entry.compiled for entry in self.entries)

    def hyperparameters(self, own: dict[str, Any]) -> list[str]:
        """Names of the attributes that are plain values and not results."""
        if not self._names:
            self._names = [n for n, v in own.items() if isinstance(v, PLAIN) and not n.startswith("_")]
        return self._names

    @property
    def graphs(self) -> int:
        """How many there are."""
        return sum(len(entry.compiled) for entry in self.entries)

    def rates(self, groups: Sequence[dict[str, Any]], device: torch.device) -> list[Tensor]:
        """Learning rates of all groups, the upper ones first, as tensors that are made anew where they have changed."""
        values = [group["lr"] for level in LEVELS for group in groups if group["level"] == level]
        if {*map(type, values)} == {float} and values == self._rates[0]:
            return self._rates[1]
        options: Any = {"dtype": torch.float64 if device.type != "mps" else torch.float32, "device": device}
        if any(isinstance(value, Tensor) for value in values):
            return [torch.as_tensor(value, **options).reshape(()) for value in values]
        self._rates = (values, [torch.full((), float(value), **options) for value in values])
        return self._rates[1]

    # ------------------------------------------------------------------------------------------------ refusals

    @property
    def some_are_unreadable(self) -> bool:
        """Whether some function was found that cannot be captured."""
        return bool(self._unreadable)

    def unreadable(self, functions: Mapping[str, Callable[..., Any]]) -> str:
        """Why one of these functions cannot be captured, as was found before."""
        for role, function in functions.items():
            if (role, _code(function)) in self._unreadable:
                return self._unreadable[role, _code(function)]
        return ""

    def note(self, error: Untraceable, entry: CacheEntry) -> str:
        """Remember why steps cannot be captured: because of a function, or all that are alike."""
        if isinstance(error, Unreadable):
            self._unreadable[error.role, _code(error.function)] = str(error)
            self.warn(str(error))
        elif isinstance(error, NotNow):
            self.warn(str(error))
        else:
            self.refuse(str(error), entry)
        return str(error)

    def refuse(self, reason: str, entry: CacheEntry | None = None) -> None:
        """From now on run these steps eagerly, or all of them."""
        if entry is None:
            self.reason = reason
            self.entries.clear()
        else:
            entry.reason = reason
            entry.forms.clear()
        self.warn(reason)

    def warn(self, reason: str) -> None:
        """Say, once, why a step runs eagerly.

        Raises:
            RuntimeError: if it must not.
        """
        if self.settings.fullgraph:
            raise RuntimeError(f"the step cannot be captured: {reason}")
        if reason not in self._warned:
            self._warned.add(reason)
            warn(f"steps run eagerly, because they cannot be captured: {reason}")


def _code(function: Callable[..., Any]) -> Any:
    """What stands for a function that may be made anew at each step."""
    return getattr(function, "__code__", None) or type(function)

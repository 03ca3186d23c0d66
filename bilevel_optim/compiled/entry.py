"""Programs of steps that are alike: found for the next step, or compiled for it."""

from __future__ import annotations

import math
import random as python_random
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..optimizer.options import FROM_ZERO, TRUE_OR_FALSE
from ..oracle.buffers import unnoted
from ..problem.parameters import is_number, require
from ..problem.random import preserve_rng
from .alone import gradients_aside, hold_tracing_lock
from .backend import maker_of
from .draws import Plan
from .forms import DataForm
from .gain import Gain
from .places import StatePlaces
from .program import Given, StepProgram, StepReader
from .pure import PureStep, Results
from .reading import Unread, WantsConstants
from .reasons import Refused, require_no_effects

__all__ = ["CHECKED_EVERY", "MOST", "Entry", "Full", "Settings"]

# By default Dynamo skips some of these checks, to be fast; but it notes every call for a profiler, which takes as long
# as the checks of a small loss. A version of torch may lack some of the names.
SETTINGS: dict[str, Any] = {
    name: value
    for name, value in {
        "allow_rnn": True,
        "capture_scalar_outputs": True,
        "record_runtime_overhead": False,
        "side_effect_replay_policy": "warn",
        "skip_guards_on_constant_func_defaults": False,
        "skip_nnmodule_hook_guards": False,
        "specialize_int": True,
        "trace_autograd_ops": True,
    }.items()
    if hasattr(dynamo.config, name)
}
CHECKED_EVERY = 4096  # uses after which a compiled step is compared again, at the latest
MOST = 16  # most programs of an optimizer; other steps run eagerly
MOST_ALIKE = 8  # most for data of one form, as torch.compile's limit for a function
FULL = (
    f"there are {MOST} graphs, and none is for data of these shapes and constants, but no more are compiled: use fewer "
    "shapes (padding, drop_last=True)"
)
NOT_DYNAMIC = "Invalid {name} value: {value} (it must be None or False, because shapes are those of the data)"
BACKEND = "Invalid {name} value: {value} (it must be the name of a backend of torch.compile, or a function)"


@dataclass(frozen=True)
class Settings:
    """Arguments of `BilevelOptimizer.compile`, checked."""

    fullgraph: bool = False
    dynamic: InitVar[bool | None] = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self, dynamic: bool | None) -> None:
        require("fullgraph", self.fullgraph, isinstance(self.fullgraph, bool), TRUE_OR_FALSE)
        require("dynamic", dynamic, dynamic is None or dynamic is False, NOT_DYNAMIC)
        require("backend", self.backend, isinstance(self.backend, str) or callable(self.backend), BACKEND)
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            require(name, value, value is None or (is_number(value) and 0 <= value < math.inf), FROM_ZERO)


class Full(Refused):
    """The limit on the number of graphs is reached."""


class Entry:
    """Steps that differ only in values and losses.

    Args:
        key: their cache key.
        settings: how they are compiled.

    Attributes:
        is_known: whether there was such a step before; the first may be the only one.
        draws: draws of each step (without tasks from `in_a_row`); None if the method has to be asked.
        plan: draws samples that are tuples of tensors, once there were some.
        draw_all: draws all that a step needs, for a method that chooses its own tasks.
        pure, places: see `settle`; before, the entry has neither.
        compiled: form of the data and the function compiled for it, the last used first.
        reasons: code of the losses -> why steps with such losses run eagerly.
        uses: number of uses since the last compilation.
        count: number of compilations.
        gain: their times.
    """

    pure: PureStep
    places: StatePlaces

    def __init__(self, key: Any, settings: Settings) -> None:
        self.key, self._settings = key, settings
        self.is_known = False
        self.draws: Sequence[Any] | None = None
        self.plan: Plan | None = None
        self.draw_all: Callable[[Any, Mapping[str, Tensor]], Any] | None = None
        self.compiled: list[tuple[DataForm, StepReader]] = []
        self.reasons: dict[Any, str] = {}
        self.uses = self.count = 0
        self.gain = Gain()

    def forget_draws(self) -> None:
        """Let the method be asked for the draws of the next step."""
        self.draws = self.plan = None

    def settle(self, pure: PureStep, places: StatePlaces) -> None:
        """Note the step as a function, and where its state lives, once the state has settled."""
        self.pure, self.places = pure, places

    @property
    def unwatched(self) -> int:
        """Number of uses before the next one that is compared with an eager step: 1, 2, 4, 8, ..., 4096, 8192, ..."""
        n = self.uses
        after = 1 << n.bit_length() if n < CHECKED_EVERY else CHECKED_EVERY * (n // CHECKED_EVERY + 1)
        return after - n - 1

    def find(
        self, structure: Any, tensors: Sequence[Tensor], losses: Mapping[str, Any]
    ) -> tuple[StepProgram, list[Tensor]] | None:
        """Return the program for such data and such a state, and what the losses read at present, if one fits."""
        for i, (form, reader) in enumerate(self.compiled):
            if form.fits(structure, tensors):
                if i:
                    self.compiled.insert(0, self.compiled.pop(i))
                return reader.known(losses)
        return None

    def known(self, given: Given) -> Results | None:
        """Run a compiled program for this step, without gradients; return None if none fits."""
        found = self.find(given.structure, given.tensors, given.losses)
        if found is None:
            return None
        with torch.no_grad():
            return found[0].results(found[0]([*found[1], *given.tensors]))

    def results(self, given: Given, graphs: int) -> Results:
        """Run a compiled program for this step; compile it now if none fits. The optimizer has ``graphs`` programs."""
        results = self.known(given)
        if results is not None:
            self.uses += 1
            return results
        if graphs >= MOST:
            raise Full(FULL)
        settings = self._settings
        alike = [pair for pair in self.compiled if pair[0].fits(given.structure, given.tensors)]
        form, known = alike[0] if alike else (DataForm(given.structure, given.tensors), None)
        if known is not None and len(known.programs) >= MOST_ALIKE:
            raise Refused(
                f"a loss reads a value that keeps changing, and none of {MOST_ALIKE} graphs is for the present one: "
                "make it a tensor, which is an input of a graph"
            )
        backend = maker_of(settings.backend, settings.mode, settings.options)
        reader = known or StepReader(self.pure, backend, constant=False)
        try:
            results = self._compile(reader, given)
        except Exception as error:
            wants_constants = isinstance(getattr(error, "inner_exception", error), WantsConstants)
            if reader.constant or not (known or wants_constants):
                raise
            reader = StepReader(self.pure, backend, constant=True)
            results = self._compile(reader, given)
        self.compiled = [(form, reader), *(pair for pair in self.compiled if pair[0] is not form)]
        self.count, self.uses = self.count + 1, 1
        return results

    def _compile(self, reader: StepReader, given: Given) -> Results:
        """Compile a step, and return its results."""
        before, constant, pure = python_random.getstate(), reader.constant, self.pure
        settings = {**SETTINGS, "automatic_dynamic_shapes": not constant, "specialize_float": constant}
        try:
            with (
                unnoted(),
                hold_tracing_lock(),
                gradients_aside([*pure.live_x, *pure.live_y]),
                dynamo.config.patch(**settings),
                warnings.catch_warnings(),
                preserve_rng(pure.live_y[0].device),
                sdpa_kernel(SDPBackend.MATH) if pure.differentiates_twice else nullcontext(),
                torch.no_grad(),
            ):
                warnings.simplefilter("always")
                warnings.showwarning = require_no_effects
                program, arguments = reader.compile(given)
                return program.results(program(arguments))
        except Unread:
            raise Refused(
                "torch.compile is switched off here, or a torch dispatch mode is on: look for torch.compiler.disable, "
                "TORCH_COMPILE_DISABLE, or a with block"
            ) from None
        finally:
            python_random.setstate(before)

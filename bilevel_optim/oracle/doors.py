"""Ways by which x reaches y besides the lower loss: functions and options of the user that depend on x.

Losses are differentiated by every method; these only by some. So each is looked at where it is called or read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..problem.random import default_state, preserve_rng, set_default_state
from ..problem.vector import Vector
from ..pytree import tree_leaves
from .differentiable import all_arguments, reaches

__all__ = [
    "DOORS", "OPTIONS", "PROJECTION", "START", "STEP", "WatchedStart", "leads", "options_of", "projection_reads",
    "refusal", "require_free_batch", "steps_read",
]  # fmt: skip

PROJECTION, START, OPTIONS, STEP = "lower_projection", "lower_init", "options of lower_optimizer", "its step"
DOORS = frozenset((PROJECTION, START, OPTIONS, STEP))

UNROLL = "ITD, MAML and ANIL differentiate through it, and PZOBO, HOZOG and ESMAML evaluate it at the perturbed x"
_WHAT = {
    PROJECTION: (
        "lower_projection depends on upper parameters",
        f"{UNROLL}. Or put the bound into the losses by a change of variables (y = x - z.exp(), with z as the lower "
        "parameter); or detach the upper parameters in the projection, if it shall count as constant",
    ),
    START: (
        "the start that lower_init returns depends on upper parameters",
        "ITD differentiates through it, and PZOBO and HOZOG evaluate it at the perturbed x. Or detach the result of "
        "lower_init, if only the solution counts and not where the lower steps begin",
    ),
    OPTIONS: (
        "{} of the lower steps depends on upper parameters",
        f"{UNROLL}. Or detach it, and learn a factor or a penalty in the lower loss instead (factor * loss, or "
        "loss + factor * y.square().sum())",
    ),
    STEP: (
        "the step of lower_optimizer reads upper parameters",
        "PZOBO, HOZOG and ESMAML evaluate it at the perturbed x. Or make them options of one of torch's optimizers, "
        "lower_optimizer=lambda groups: torch.optim.SGD(groups, lr=x.exp()), which ITD, MAML and ANIL differentiate",
    ),
}


def refusal(door: str, method: str, option: str = "") -> str:
    """Return the message about a way that a method leaves out of its hypergradient, by an option if it has a name."""
    what, cure = _WHAT[door]
    return (
        f"{what.format(option)}, but {method} differentiates only the losses, so the hypergradient would lack this "
        f"part: {cure}"
    )


def require_free_batch(level: str, batch: Any, x: Sequence[Tensor], why: str) -> None:
    """Raise if a batch depends on upper parameters; ``why`` says why the method cannot follow that."""
    if leads([t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.grad_fn is not None], x):
        raise ValueError(
            f"a batch of the {level} loss depends on upper parameters, but {why}; compute in the loss what depends on "
            "them, or detach the batch, if it shall count as constant"
        )


def leads(value: Any, x: Sequence[Tensor]) -> bool:
    """Return True if the graph of some tensor of a pytree leads to one of these leaves."""
    parts = tree_leaves([*value] if isinstance(value, tuple) else value)  # a `Vector` is a leaf
    return any([reaches(t, x) for t in parts if isinstance(t, Tensor) and t.requires_grad])


def projection_reads(projection: Callable[..., Any], y: Vector, x: Sequence[Tensor]) -> bool:
    """Return True if the result of a projection depends on x, be it under ``torch.no_grad``; a ``detach`` counts."""

    def called() -> Any:
        return projection([t.detach().clone() for t in y])

    look = _Look(x, graph=True)
    with preserve_rng(y[0].device), torch.enable_grad():
        try:
            with look:
                return leads(called(), x)
        except RuntimeError:  # it can only run without a graph (out=..., for example)
            with torch.no_grad(), (look := _Look(x)):
                called()
    return look.read


def steps_read(step: Callable[[], Any], x: Sequence[Tensor]) -> bool:
    """Return True if the step of an optimizer, which makes no graph, reads one of these tensors."""
    look = _Look(x)
    with look:
        step()
    return look.read


class _Look(TorchFunctionMode):
    """Note whether one of some tensors is read in the block; with ``graph``, ``torch.no_grad`` has no effect in it."""

    def __init__(self, tensors: Sequence[Tensor], *, graph: bool = False) -> None:
        super().__init__()
        self._tensors, self._graph, self.read = {id(t) for t in tensors}, graph, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._graph and func is torch._C._set_grad_enabled:
            return None
        kwargs = all_arguments(func, kwargs)
        if not self._graph and not self.read:
            self.read = any([id(t) in self._tensors for t in tree_leaves((args, kwargs))])
        return func(*args, **kwargs)


class WatchedStart:
    """A function of the user that returns a start; a note is made if the start depends on x.

    Args:
        init: the function, ``lower_init``.
        x: the upper parameters.
        note: called if it does.
    """

    def __init__(self, init: Callable[..., Any], x: Sequence[Tensor], note: Callable[[], None]) -> None:
        self._init, self._x, self._note = init, x, note
        self._last: tuple[tuple[Any, ...], Any] = (), None

    def __call__(self, *tasks: Any) -> list[Any]:
        """Return the start, with its graph unless the function writes into leaves."""
        device = self._x[0].device
        self._last = tasks, default_state(device)
        try:
            with torch.enable_grad():
                given = self._init(*tasks)
        except RuntimeError as error:
            if "leaf" not in str(error):
                raise
            set_default_state(device, self._last[1])
            with torch.no_grad():
                given = self._init(*tasks)
        given = [given] if isinstance(given, Tensor) else [*given]
        if leads(given, self._x):
            self._note()
        return given

    def again(self) -> list[Tensor]:
        """Return the last start again, on the same random numbers, at the current values of x."""
        (tasks, state), device = self._last, self._x[0].device
        with preserve_rng(device), torch.no_grad():
            set_default_state(device, state)
            given = self._init(*tasks)
        return [given] if isinstance(given, Tensor) else [*given]


def options_of(groups: Iterable[Mapping[str, Any]], x: Sequence[Tensor]) -> dict[str, Any]:
    """Return the options of groups that depend on x, by name."""
    return {
        name: value
        for group in groups
        for name, value in group.items()
        if name != "params" and (type(value) in (list, tuple) or isinstance(value, Tensor)) and leads(value, x)
    }

"""Step hooks, profiler ranges, and a guard that keeps Dynamo out of an optimizer's public methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..tracing import is_profiled
from .options import explain_bad_call

__all__ = ["has_hooks", "no_dynamo", "with_hooks"]

Verb = TypeVar("Verb", bound=Callable[..., Any])


def no_dynamo(verb: Verb) -> Verb:
    """Make a method that ``torch.compile`` calls without tracing it, at no cost without compilation."""
    wall, explained = _disable_dynamo(verb), explain_bad_call(verb)

    @functools.wraps(verb)
    def called(*arguments: Any, **named: Any) -> Any:
        return (wall if torch.compiler.is_dynamo_compiling() else explained)(*arguments, **named)

    return cast(Verb, called)


def has_hooks(optimizer: Any) -> bool:
    """Return True if an optimizer has step hooks, its own or global ones."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def with_hooks(step: Verb) -> Verb:
    """Wrap ``step`` with torch's hooks, its profiler range and `no_dynamo`, at no cost if none of these is in use.

    torch wraps every ``step`` this way, with or without hooks, unless the function is marked as ``hooked``.
    """
    in_full, explained = Optimizer.profile_hook_step(no_dynamo(step)), explain_bad_call(step)

    @functools.wraps(step)
    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        plain = not (has_hooks(self) or is_profiled() or torch.compiler.is_dynamo_compiling())
        return (explained if plain else in_full)(self, *arguments, **named)

    called.hooked = True  # type: ignore[attr-defined]
    return cast(Verb, called)

"""Decorators of public methods: step hooks, profiler ranges, hints after wrong calls, and a guard against Dynamo."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..tracing import is_profiled

__all__ = ["explain_bad_call", "has_hooks", "no_dynamo", "with_hooks"]

Verb = TypeVar("Verb", bound=Callable[..., Any])

# Words of other libraries in names of arguments, with the words of this one.
PARTS = {"inner": "lower", "outer": "upper", "loss": "", "fn": "", "objective": "", "sampler": "tasks"}


def explain_bad_call(verb: Verb, sentence: str = "") -> Verb:
    """Decorate a function so that a call with wrong arguments raises an error with a hint, or with this sentence."""

    @functools.wraps(verb)
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return verb(*arguments, **named)
        except TypeError as error:
            if (told := _explained(error, verb, [*named], sentence)) is error:
                raise
            raise told from None

    return cast(Verb, called)


def _explained(error: TypeError, verb: Callable[..., Any], named: Sequence[str], sentence: str = "") -> TypeError:
    """Return the error of a call with a hint if the call was wrong, and itself if it comes from inside the function."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return error
    hint = sentence or _hint_at_call(verb, str(error), named)
    return TypeError(f"{error}: {hint}" if hint else str(error))


def _hint_at_call(verb: Callable[..., Any], error: str, named: Sequence[str]) -> str:
    """Return what to do after a call with wrong arguments, whose error says this."""
    parameters = inspect.signature(verb).parameters
    known = [name for name in parameters if name != "self"]
    if "were given" in error:
        named_only = [name for name in known if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]
        return f"pass these by name: {', '.join(named_only)}"
    return ": ".join([_near(name, known) for name in named if name not in known])


def _near(name: str, known: list[str]) -> str:
    plain = "_".join(word for word in (PARTS.get(word, word) for word in name.lower().split("_")) if word)
    close = [plain] if plain in known else difflib.get_close_matches(name, known, 1, 0.7)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"


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
    in_full = Optimizer.profile_hook_step(no_dynamo(step))

    @functools.wraps(step)
    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        if has_hooks(self) or is_profiled() or torch.compiler.is_dynamo_compiling():
            return in_full(self, *arguments, **named)
        try:
            return step(self, *arguments, **named)
        except TypeError as error:
            if (told := _explained(error, step, [*named])) is error:
                raise
            raise told from None

    called.hooked = True  # type: ignore[attr-defined]
    return cast(Verb, called)

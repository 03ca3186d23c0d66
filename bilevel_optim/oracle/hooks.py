"""Hooks of the user on parameters and modules, which change gradients out of sight of the losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.func import vmap
from torch.nn.modules import module

from ..problem.vector import Vector

__all__ = ["any_hooks", "called_once", "on_copies", "on_lanes", "require_callable", "why_one_by_one"]

_OF_MANY = register_multi_grad_hook.__code__.co_filename  # of the hooks that it puts on each tensor
_GLOBAL = (module._global_backward_hooks, module._global_backward_pre_hooks)


def any_hooks(tensors: Sequence[Tensor]) -> bool:
    """Return True if one of the tensors has a hook."""
    return any([bool(t._backward_hooks) for t in tensors])


def require_callable(tensors: Sequence[Tensor], names: Callable[[], Sequence[str]]) -> None:
    """Raise if a hook would never be called, because a step makes no ``backward()`` that accumulates in ``.grad``."""
    for i, t in enumerate(tensors):
        if t._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {names()[i]} has a hook that is called when a gradient has been accumulated "
                "(register_post_accumulate_grad_hook), but a step accumulates none, so it would never be called: use "
                "register_hook, or change x.grad between backward() and step()"
            )
        for hook in t._backward_hooks.values() if t._backward_hooks else ():
            if getattr(getattr(hook, "__code__", None), "co_filename", None) == _OF_MANY:
                raise ValueError(
                    f"parameter {names()[i]} has a hook that waits for the gradients of several tensors "
                    "(register_multi_grad_hook), but a step differentiates many times, by torch.autograd.grad for some "
                    "of them: use register_hook"
                )


def why_one_by_one(modules: Collection[nn.Module]) -> str:
    """Return why evaluations of these modules cannot run together: a hook that vmap leaves out; empty if none does."""
    if any(_GLOBAL):
        return "there is a backward hook on all modules, which torch does not call for copies that run together"
    for own in modules if len(modules) else ():
        if own._backward_hooks or own._backward_pre_hooks:
            return f"module {type(own).__name__} has a backward hook, which torch does not call for copies together"
    return ""


def on_lanes(live: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return the values of one lane, with the hooks of the live tensors that they replace."""
    found = []
    for t, value in zip(live, values, strict=True):
        own = value
        if t._backward_hooks and value.requires_grad:
            own = value.view_as(value)
            for hook in [*t._backward_hooks.values()]:
                own.register_hook(hook)  # type: ignore[no-untyped-call]
        found.append(own)
    return found


def on_copies(live: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients of stacked copies after the hooks of the live tensors, called for each copy."""
    found = []
    for t, gradient in zip(live, gradients, strict=True):
        own = gradient
        for hook in [*(t._backward_hooks or {}).values()]:
            own = vmap(partial(_changed, hook), randomness="different")(own)
        found.append(own)
    return found


def _changed(hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor:
    found = hook(gradient)
    if found is None:  # it may keep the gradient, which must then be of one copy
        raise RuntimeError("a hook of a lower parameter returns no gradient")
    return found


@contextmanager
def called_once(x: Sequence[Tensor]) -> Generator[Callable[[Vector], Vector]]:
    """Call hooks on x for no part of a hypergradient in the block; yields a function that calls them for the whole."""
    aside: list[dict[Any, Any]] = [{**(t._backward_hooks or {})} for t in x]

    def called(gradient: Vector) -> Vector:
        found = []
        for t, hooks in zip(gradient, aside, strict=True):
            own = t.clone() if hooks else t  # a hook may write into it
            for hook in hooks.values():
                changed = hook(own)
                own = own if changed is None else changed
            found.append(own)
        return Vector(found)

    for t in x:
        if t._backward_hooks:
            t._backward_hooks.clear()
    try:
        yield called
    finally:
        for t, hooks in zip(x, aside, strict=True):
            if hooks and t._backward_hooks is not None:
                t._backward_hooks.update(hooks)

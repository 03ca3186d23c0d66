"""Replacement of live tensors in every torch call: works under ``vmap``, under a trace, and for values with a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..tracing import is_tracing
from .differentiable import all_arguments
from .stacks import FORMS

__all__ = ["Substitution", "replacement"]


class Substitution(TorchFunctionMode):
    """Replace each tensor of ``live`` (by identity) by its value in every torch call of the block.

    Args:
        live: tensors to replace.
        values: tensors that are read in their place.
        stacked: whether the values are lanes of a stack under ``vmap``. Some operations then have other forms, and
            running statistics, which cannot follow every lane, do not advance.
    """

    def __init__(self, live: Iterable[Tensor], values: Iterable[Tensor], *, stacked: bool = True) -> None:
        super().__init__()
        self._live = [*live]  # so that no other tensor gets the identity of one of them
        self._value_of = dict(zip(map(id, self._live), values, strict=True))
        self._forms = _STACKED if stacked else _PLAIN

    def __enter__(self) -> Self:
        if is_tracing():
            _STACK.values.append(self._value_of)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if is_tracing():
            _STACK.values.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value_of = self._value_of.get  # most arguments are tensors or numbers: a look without a call
        new = [self._inside(a) if type(a) in _SEQUENCES else value_of(id(a), a) for a in args]
        call = self._forms.get(func, func)
        if call is None:
            return func(*args)
        if not kwargs and func is not F.l1_loss:
            return call(*new)
        kwargs = all_arguments(func, kwargs)
        named = {k: self._inside(a) if type(a) in _SEQUENCES else value_of(id(a), a) for k, a in kwargs.items()}
        return call(*new, **named)

    def _inside(self, a: Any) -> Any:
        """Return a list or tuple with the replacements of its entries; most are sizes, which have none."""
        if all([type(v) is int for v in a]):
            return a
        return type(a)([self._inside(v) if type(v) in _SEQUENCES else self._value_of.get(id(v), v) for v in a])


_SEQUENCES = (list, tuple)
# None: asked of the live tensor, because a loss may choose parameters by it, and values in a stack say no.
_PLAIN: dict[Any, Callable[..., Any] | None] = {Tensor.requires_grad.__get__: None}  # type: ignore[attr-defined]
_STACKED = {**FORMS, **_PLAIN}


class _Stack(threading.local):
    def __init__(self) -> None:
        self.values: list[dict[int, Tensor]] = []


_STACK = _Stack()  # in a trace, the replacements of the open blocks


def replacement(live: Tensor) -> Tensor:
    """Return the value that replaces a tensor in a trace; graphs of the user's functions are called with it."""
    for values in reversed(_STACK.values):
        if id(live) in values:
            return values[id(live)]
    return live

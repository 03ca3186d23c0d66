"""Replacement of live tensors in every torch call: works under ``vmap``, under a trace, and for values with a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..tracing import is_tracing
from .differentiable import all_arguments

__all__ = ["Substitution", "replacement"]


class Substitution(TorchFunctionMode):
    """Replace each tensor of ``live`` (by identity) by its value in every torch call of the block.

    Args:
        live: tensors to replace.
        values: tensors that are read in their place.
        stacked: whether the values are lanes of a stack under ``vmap``. Linear layers then use a layout for it, and
            running statistics, which cannot follow every lane, do not advance.
    """

    def __init__(self, live: Iterable[Tensor], values: Iterable[Tensor], *, stacked: bool = True) -> None:
        super().__init__()
        self._live = [*live]  # so that no other tensor gets the identity of one of them
        self._value_of = dict(zip(map(id, self._live), values, strict=True))
        self._stacked = stacked

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
        value_of = self._value_of  # most arguments are tensors or numbers: a look without a call
        new = [self._new(a) if type(a) in _SEQUENCES else value_of.get(id(a), a) for a in args]
        if not kwargs and func not in _CHANGED:
            return func(*new)
        if self._stacked and func is F.batch_norm:
            func = _batch_norm_without_update
        if func is F.l1_loss:
            kwargs = all_arguments(func, kwargs)
        kwargs = {k: self._new(a) for k, a in kwargs.items()} if kwargs else {}
        if self._stacked and func is F.linear and len(new) > 1 and (new[1] is not args[1] or is_tracing()):
            return _linear(*new, **kwargs)
        if self._stacked and func is F.embedding and kwargs.get("padding_idx") is not None:
            return _padded_embedding(*new, **kwargs)
        return func(*new, **kwargs)

    def _new(self, a: Any) -> Any:
        """Return the replacement of an argument, also within lists."""
        if type(a) in _SEQUENCES:
            return type(a)([self._new(v) for v in a])
        return self._value_of.get(id(a), a)


_SEQUENCES = (list, tuple)
_CHANGED = frozenset((F.batch_norm, F.l1_loss, F.linear, F.embedding))


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


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` in the transposed layout, so that gradients of stacked weights are laid out as the weights.

    Under vmap the ordinary form gives them transposed, which makes both that product and the update that reads it
    slow. The result is not contiguous.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.layout != torch.strided:
        return F.linear(x, weight, bias)
    transposed = weight.mm(x.t())
    return (transposed if bias is None else transposed.add_(bias.unsqueeze(-1))).t()


def _padded_embedding(input: Tensor, weight: Tensor, padding_idx: int, **options: Any) -> Tensor:
    """Compute ``F.embedding`` with a constant row; torch's, under vmap, holds that of the first lane alone."""
    constant = torch.arange(weight.shape[0], device=weight.device) == padding_idx % weight.shape[0]
    return F.embedding(input, torch.where(constant.unsqueeze(-1), weight.detach(), weight), **options)


def _batch_norm_without_update(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        running_mean = running_var = None
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

"""Replacement of live tensors in every torch call: works under ``vmap``, under a trace, and for values with a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

__all__ = ["Substitution", "stands_for", "stands_for_itself"]


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
        pairs = list(zip(live, values, strict=True))
        if is_dynamo_compiling():
            pairs = [(t, stands_for(value, t)) for t, value in pairs]
        self._value_of = dict(pairs)  # a tensor is a key by its identity
        self._live = [t for t, _ in pairs]
        self._stacked = stacked

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if is_dynamo_compiling():
            for t in self._live:
                stands_for_itself(t)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._stacked and func is F.batch_norm:
            func = _batch_norm_without_update
        new, value_of = [], self._value_of  # in a loop, because Dynamo traces each call of a function by itself
        for a in args:
            new.append(value_of.get(a, a) if isinstance(a, Tensor) else self._new(a) if type(a) in _SEQUENCES else a)
        kwargs = {k: self._new(a) for k, a in kwargs.items()} if kwargs else {}
        if self._stacked and func is F.linear and len(new) > 1 and new[1] is not args[1]:
            return _linear(*new, **kwargs)
        return func(*new, **kwargs)

    def _new(self, a: Any) -> Any:
        """Return the replacement of an argument."""
        if isinstance(a, Tensor):
            return self._value_of.get(a, a)
        return type(a)([self._new(v) for v in a]) if type(a) in _SEQUENCES else a


_SEQUENCES = (list, tuple)


def stands_for(value: Tensor, live: Tensor) -> Tensor:
    """Return ``value``; marks it, in a compiled step's graph, as the replacement of ``live`` in calls no mode sees."""
    return value


def stands_for_itself(live: Tensor) -> Tensor:
    """Return ``live``; marks the end of its replacement by this block; that by an outer block continues."""
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

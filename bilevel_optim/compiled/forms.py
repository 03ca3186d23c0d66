"""Forms of nested data: all of them but the values of their tensors, which is what a graph is specialised on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..pytree import tree_flatten
from .reasons import Refused

__all__ = ["Form", "empty", "form_of", "form_of_tensor"]

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def form_of_tensor(t: Tensor) -> Form:
    """Return all of a tensor that a graph is specialised on."""
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad


def form_of(value: Any, tensors: list[Tensor] | None = None) -> Any:
    """Return the form of nested data, to be compared with others; append their tensors to a list.

    Raises:
        Refused: if an object may hold values that are not seen here.
    """
    found = [] if tensors is None else tensors
    return _form_of(value, found)


def _form_of(value: Any, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if kind is dict:
        return [(name, _form_of(part, tensors)) for name, part in value.items()] if value else "{}"
    if kind is list or kind is tuple:
        forms: list[Any] = [kind]
        for part in value:  # tensors without a call each: every step does this
            if isinstance(part, Tensor):
                tensors.append(part)
                forms.append((part.shape, part.stride(), part.dtype, part.device, part.requires_grad))
            else:
                forms.append(part if part is None else _form_of(part, tensors))
        return forms
    if isinstance(value, Tensor):
        tensors.append(value)
        return form_of_tensor(value)
    if value is None or isinstance(value, PLAIN):
        return kind, repr(value)
    leaves, structure = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        raise Refused(
            f"a batch holds an object of {kind}, which a graph cannot take: use tensors and numbers in tuples, lists "
            "and dicts, or register the type with torch.utils._pytree"
        )
    return structure, [_form_of(part, tensors) for part in leaves]


def empty(form: Form) -> Tensor:
    """Return a tensor of this form."""
    shape, stride, dtype, device, differentiable = form
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(differentiable)

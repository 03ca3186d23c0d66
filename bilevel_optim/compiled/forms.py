"""Forms of nested data: all of them but the values of their tensors, which is what a graph is specialised on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, starmap
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from ..problem.vector import Vector
from ..pytree import tree_flatten
from .reasons import Refused

__all__ = ["DataForm", "Form", "distinct", "empty", "form_of_tensor", "forms_of", "structure_of"]

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def form_of_tensor(t: Tensor) -> Form:
    """Return all of a tensor that a graph is specialised on."""
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad


class DataForm:
    """The form of nested data, compared with others by functions in C, because every step does this.

    Args:
        structure: their structure, from `structure_of`.
        tensors: their tensors.
    """

    def __init__(self, structure: Any, tensors: Sequence[Tensor]) -> None:
        self.structure, self._forms = structure, _all_of(tensors)
        self._guards = _guards_of(tensors)
        first: dict[Any, int] = {}  # form -> the first tensor that has it
        self._kinds = [first.setdefault(form, k) for k, form in enumerate(zip(*self._forms, strict=True))]
        self._guard_of = {k: _guards_of([tensors[k]]) for k in first.values()}

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the form of nested data."""
        tensors: list[Tensor] = []
        return cls(structure_of(value, tensors), tensors)

    def fits(self, structure: Any, tensors: Sequence[Tensor]) -> bool:
        """Return True if other data have this form."""
        if structure != self.structure or not self._alike(*tensors):
            return False
        self.structure = structure  # comparing an object with itself takes no time
        return True

    def tensors_of(self, value: Any) -> list[Tensor] | None:
        """Return the tensors of nested data; None if these have another form."""
        found: list[Tensor] = []
        try:
            return found if self.fits(structure_of(value, found), found) else None
        except Refused:
            return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataForm) and self.structure == other.structure and self._forms == other._forms

    __hash__ = None  # type: ignore[assignment]

    def fit_plainly(self, batches: Sequence[Any]) -> bool:
        """Return True if this is the form of a sample, and all these batches for it are tuples of tensors and fit."""
        size = len(self._forms[0])
        plain = self.structure == [tuple, [tuple, *[Tensor] * size]] and {*map(type, batches)} == {tuple}
        plain = plain and {*map(len, batches)} == {size} and {*map(type, chain.from_iterable(batches))} == {Tensor}
        return plain and (all(starmap(self._guards.check, batches)) or all(starmap(self._alike, batches)))

    def _alike(self, *tensors: Tensor) -> bool:
        if self._guards.check(*tensors):
            return True
        # Guards refuse a tensor that is there twice: then each is looked at once.
        own, ids = dict(zip(map(id, tensors), tensors, strict=True)), [*map(id, tensors)]
        if len(own) < len(ids) == len(self._kinds):
            kinds = dict(zip(ids, self._kinds, strict=True))
            if [kinds[i] for i in ids] == self._kinds and all(
                [self._guard_of[kinds[i]].check(t) for i, t in own.items()]
            ):
                return True
        return _all_of(tensors) == self._forms  # guards compare still more


def distinct(objects: Sequence[Any]) -> list[Any]:
    """Return the objects, one that comes again only once."""
    return [*{id(own): own for own in objects}.values()]


def _guards_of(tensors: Sequence[Tensor]) -> TensorGuards:
    sizes: Any = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes[0], dynamic_dims_strides=sizes[1])


def _all_of(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Return the forms of tensors, and which ones still have to be conjugated or negated."""
    return *forms_of(tensors), [*map(Tensor.is_conj, tensors)], [*map(Tensor.is_neg, tensors)]


def forms_of(tensors: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """Return attributes and strides of tensors, to be compared with those of others, also in a trace."""
    return [*map(_ATTRIBUTES, tensors)], [*map(Tensor.stride, tensors)]


_ATTRIBUTES = attrgetter("shape", "dtype", "device", "requires_grad")


def structure_of(value: Any, tensors: list[Tensor]) -> Any:
    """Return nested data without their tensors, to be compared with others; append these to a list.

    Raises:
        Refused: if an object may hold values that are not seen here.
    """
    kind = type(value)
    if kind is list or kind is tuple or kind is Vector:
        found: list[Any] = [kind]
        for part in value:  # tensors without a call each: every step does this
            if type(part) is Tensor:
                tensors.append(part)
                found.append(Tensor)
            else:
                found.append(type(None) if part is None else structure_of(part, tensors))
        return found
    if kind is dict:
        return [(name, structure_of(part, tensors)) for name, part in value.items()]
    if value is None:
        return kind
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, PLAIN):
        return kind, repr(value)
    leaves, structure = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        raise Refused(
            f"a batch holds an object of {kind}, which a graph cannot take: use tensors and numbers in tuples, lists "
            "and dicts, or register the type with torch.utils._pytree"
        )
    return structure, [structure_of(part, tensors) for part in leaves]


def empty(form: Form) -> Tensor:
    """Return a tensor of this form."""
    shape, stride, dtype, device, differentiable = form
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(differentiable)

"""Plain values: nested tuples, lists and dicts of tensors, and dataclasses that a step creates often."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, dataclass_transform

from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten
from torch.utils._pytree import tree_leaves as leaves_by_torch

__all__ = [
    "attributes_of",
    "is_named_tuple",
    "map_batch",
    "parts_of",
    "replace",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "values",
]


Class = TypeVar("Class")
Values = TypeVar("Values")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def values(cls: type[Class]) -> type[Class]:
    """Make a dataclass that only the type checker treats as frozen: freezing at run time would triple its cost."""
    return dataclass(cls)


def replace(values: Values, **changes: Any) -> Values:
    """Return a copy with some fields changed, as ``dataclasses.replace`` does, at a fraction of its cost."""
    new: Values = object.__new__(type(values))
    new.__dict__.update(values.__dict__, **changes)
    return new


def is_named_tuple(kind: type) -> bool:
    """Return True if a class is a named tuple; the results of torch and ``torch.Size`` are tuples of other kinds."""
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of a nested value; those of plain tuples, lists and dicts at a fraction of torch's cost."""
    found: list[Any] = []
    return found if _collected(value, found) else leaves_by_torch(value)


def _collected(value: Any, found: list[Any]) -> bool:
    """Add the leaves of a nested value; return False at a kind of node that only torch knows."""
    kind = type(value)
    if kind is Tensor or kind in _LEAVES:
        found.append(value)
        return True
    if kind in _SEQUENCES or is_named_tuple(kind):
        return all([_collected(own, found) for own in value])
    return kind is dict and all([_collected(own, found) for own in value.values()])


_LEAVES, _SEQUENCES = {Parameter, int, float, bool, str, type(None)}, {tuple, list}


def attributes_of(leaf: Any) -> dict[str, Any] | None:
    """Return the attributes of a dataclass or namespace, which batches may be; None for other leaves."""
    if type(leaf) is SimpleNamespace:
        return dict(vars(leaf))
    if isinstance(leaf, (Tensor, type)) or not is_dataclass(leaf):
        return None
    return {one.name: getattr(leaf, one.name) for one in fields(leaf) if hasattr(leaf, one.name)}


def parts_of(batch: Any, seen: set[int] | None = None) -> list[Any]:
    """Return the leaves of a batch; those of the attributes of a dataclass or namespace follow it, the first time."""
    found: list[Any] = []
    seen = set() if seen is None else seen
    for leaf in tree_leaves(batch):
        found.append(leaf)
        attributes = attributes_of(leaf)
        if attributes and id(leaf) not in seen:
            seen.add(id(leaf))
            found += parts_of([*attributes.values()], seen)
    return found


def map_batch(function: Callable[[Any], Any], batch: Any, twins: dict[int, Any] | None = None) -> Any:
    """Apply a function to the leaves of a batch, as ``tree_map`` does, also in copies of its dataclasses.

    ``twins``: the copies made before, by id; an object may refer to itself.
    """
    known = {} if twins is None else twins

    def one(leaf: Any) -> Any:
        attributes = attributes_of(leaf)
        if attributes is None:
            return function(leaf)
        if id(leaf) not in known:
            known[id(leaf)] = twin = copy.copy(leaf)
            for name, value in attributes.items():
                object.__setattr__(twin, name, map_batch(function, value, known))  # the dataclass may be frozen
        return known[id(leaf)]

    return tree_map(one, batch)

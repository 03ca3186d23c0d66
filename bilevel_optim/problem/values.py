"""Values that pass through a step: made often, never changed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, dataclass_transform

from torch.compiler import is_dynamo_compiling

__all__ = ["changed", "values"]

Class = TypeVar("Class")
Values = TypeVar("Values")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def values(cls: type[Class]) -> type[Class]:
    """A dataclass that is frozen for the type checker, and not at run time, where that would triple its cost."""
    return dataclass(cls)


def changed(values: Values, **changes: Any) -> Values:
    """The same values but for these; as ``dataclasses.replace``, at a fraction of its cost."""
    if is_dynamo_compiling():  # of torch 2.11, which does not read a __dict__ whole
        return replace(values, **changes)  # type: ignore[type-var]
    new: Values = object.__new__(type(values))
    new.__dict__.update(values.__dict__, **changes)
    return new

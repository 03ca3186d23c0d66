"""What a step has drawn as a list of tensors and one of everything else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..problem.feeding import Drawn
from .calls import Form
from .watch import same

__all__ = ["Flat", "Like", "flat", "flattened"]

_ATOMS = (type(None), int, float, bool, str)
_SEQUENCES = (tuple, list)


class Flat(NamedTuple):
    """Tensors of a pytree in the order of torch's, and everything else of it."""

    tensors: list[Tensor]
    constants: list[Any]


class Like:
    """What data have in common with others: everything but the tensors' values.

    Args:
        data: the others.

    Attributes:
        width: how many tensors they have.
    """

    def __init__(self, data: Flat) -> None:
        self.width = len(data.tensors)
        self._constants, self._types = data.constants, [*map(type, data.constants)]
        self._plain = all(kind in _ATOMS for kind in self._types)
        self._form, self._devices = Form(data.tensors), [t.device for t in data.tensors]

    def fits(self, data: Flat, times: int = 1) -> bool:
        """Whether data have it, or so many of them one after the other."""
        tensors, constants = data
        if [*map(type, constants)] != self._types * times:
            return False
        expected = self._constants * times
        if constants != expected if self._plain else not all(map(same, expected, constants)):
            return False
        return self.has_form(tensors, times)

    def tensors_of(self, parts: Collection[Any]) -> list[Tensor] | None:
        """The tensors of data one after the other, if all of these have it."""
        width, others = self.width, len(self._constants)
        if self._constants == [width] and {*map(type, parts)} <= {*_SEQUENCES}:  # perhaps of tensors alone
            pieces = [*chain.from_iterable(parts)]
            if {*map(type, pieces)} <= {Tensor} and {*map(len, parts)} <= {width}:
                return pieces if self.has_form(pieces, len(parts)) else None
        tensors, constants = whole = Flat([], [])
        for k, part in enumerate(parts, 1):
            if type(part) in _SEQUENCES:
                constants.append(len(part))
                _flatten(part, tensors, constants)
            else:
                _flatten((part,), tensors, constants)
            if len(tensors) != k * width or len(constants) != k * others:
                return None
        return tensors if self.fits(whole, len(parts)) else None

    def has_form(self, tensors: Sequence[Tensor], times: int) -> bool:
        """Whether tensors have the sizes, strides, types and devices, so many times."""
        return self._form.fits(tensors, times) and [t.device for t in tensors] == self._devices * times


def flat(*parts: Any) -> Flat:
    """Tensors of some parts, and everything else of them."""
    tensors: list[Tensor] = []
    constants: list[Any] = []
    _flatten(parts, tensors, constants)
    return Flat(tensors, constants)


def flattened(results: Sequence[Drawn], random_inputs: dict[str, Any]) -> Flat:
    """What was drawn, as torch's ``tree_flatten`` has it; for common batches at a fraction of its cost."""
    tensors: list[Tensor] = []
    constants: list[Any] = [len(results)]
    for result in results:
        data, *unequal = result
        parts = data if type(data) is tuple else (data,)
        constants.append(len(data) if parts is data else None)
        for part in parts:
            if type(part) is Tensor:
                tensors.append(part)
            elif type(part) in _SEQUENCES:
                constants.append(len(part))
                for entry in part:
                    if type(entry) is Tensor:
                        tensors.append(entry)
                    else:
                        _flatten((entry,), tensors, constants)
            else:
                _flatten((part,), tensors, constants)
        if result.term is not None:
            _flatten(unequal, tensors, constants)
    if random_inputs:
        _flatten((random_inputs,), tensors, constants)
    return Flat(tensors, constants)


def _flatten(parts: Iterable[Any], tensors: list[Tensor], constants: list[Any]) -> None:
    for part in parts:
        kind = type(part)
        if kind is Tensor or isinstance(part, Tensor):
            tensors.append(part)
        elif kind in _ATOMS:
            constants.append(part)
        elif kind in _SEQUENCES:
            constants.append(len(part))
            _flatten(part, tensors, constants)
        elif kind is dict:
            constants.extend(part)
            _flatten(part.values(), tensors, constants)
        else:
            leaves, structure = tree_flatten(part)
            constants.append(structure)
            tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            constants += [leaf for leaf in leaves if not isinstance(leaf, Tensor)]

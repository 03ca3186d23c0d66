"""How compiled steps follow each other: results of one call are arguments of the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from .backend import Call
from .pure import State, following

__all__ = ["Chain", "Unchained", "leaves_of", "set_apart"]

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


PLAIN = (bool, int, float, str, bytes, type(None))


def leaves_of(drawn: Mapping[str, Sequence[Any]], random: Mapping[str, Tensor]) -> list[Any]:
    """What a step draws, in order, as leaves of a pytree."""
    return [*leaves(drawn), *random.values()]


def leaves(value: Any) -> list[Any]:
    """The leaves of a pytree, as torch has them; in a fraction of its time where it is made of plain containers."""
    kind = type(value)
    if kind is dict:
        value, kind = value.values(), list
    if kind is list or kind is tuple:
        return [leaf for part in value for leaf in (leaves(part) if type(part) in _CONTAINERS else _leaf(part))]
    return _leaf(value)


_CONTAINERS = (dict, list, tuple)


def _leaf(value: Any) -> list[Any]:
    return [value] if value is None or isinstance(value, Tensor) else tree_leaves(value)


def set_apart(value: Any) -> Any:
    """A pytree of the same form, with each leaf `apart`."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([set_apart(part) for part in value])
    if kind is dict:
        return {name: set_apart(part) for name, part in value.items()}
    return apart(value) if value is None or isinstance(value, Tensor) else tree_map(apart, value)


def apart(leaf: Any) -> Any:
    """The leaf; of a tensor its memory: what else it is, a batch that comes twice or what a loss reads, is no fact."""
    return leaf.detach() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf


def _form(leaf: Any) -> Form | Any:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


class Unchained(Exception):
    """A step cannot follow another one before that is written."""


class Chain:
    """Which results of a program are which arguments of its next call, found by identity in one call of it.

    Args:
        call: of the program.
        live: the live tensors, which are among its arguments, and for which values of the state stand.
        state: what the step read.
        drawn: what it drew, as `leaves_of` gives it.
        results: what it gave.

    Raises:
        Unchained: if a step cannot follow this one before it is written.

    Attributes:
        program: what is called.
        data: forms of the tensors that every step draws, and all else that it draws.
    """

    def __init__(
        self, call: Call, live: Sequence[Tensor], state: State, drawn: Sequence[Any], results: dict[str, Any]
    ) -> None:
        self.program = call.program.call
        before, after = tree_flatten(state), tree_flatten(following(state, results))
        if before[1] != after[1] or results["writes"] or (results["moved"] or {}).get("writes"):
            raise Unchained
        place = {id(t): k for k, t in enumerate(call.results)}
        given = {id(t): k for k, t in enumerate(before[0])}
        own = {id(t): k for k, t in enumerate(drawn) if isinstance(t, Tensor)}
        memory = {_memory(t): j for j, t in enumerate(call.arguments) if isinstance(t, Tensor)}
        standing = {id(t) for t in live}
        moving = {_storage(t) for t in (*state["x"], *state["y"], *state["buffers"])}
        self._from_results: list[tuple[int, int]] = []  # argument, result
        self._from_arguments: list[tuple[int, int]] = []  # argument, argument of the call before
        self._from_data: list[tuple[int, int]] = []  # argument, number of the tensor that was drawn
        for j, t in enumerate(call.arguments):
            if id(t) in given:
                new = after[0][given[id(t)]]
                if id(new) in place:
                    self._from_results.append((j, place[id(new)]))
                elif new is not t:
                    self._from_arguments.append((j, _known(memory, new)))
            elif isinstance(t, Tensor) and id(t) not in standing and _storage(t) in moving:
                raise Unchained  # a loss reads memory of a parameter, which moves once it is written
            elif id(t) in own:
                self._from_data.append((j, own[id(t)]))
        leaves, self._structure = tree_flatten(results)
        # Where each leaf of the results is: among the results of the program, among its arguments, or a constant.
        self._leaves: list[tuple[str, Any]] = []
        for t in leaves:
            if not isinstance(t, Tensor):
                self._leaves.append(("constant", t))
            elif id(t) in place:
                self._leaves.append(("result", place[id(t)]))
            else:
                self._leaves.append(("argument", _known(memory, t)))
        where = {id(t): at for t, at in zip(leaves, self._leaves, strict=True)}
        (kind, self._loss), (other, self._flags) = where[id(results["loss"])], where[id(results["flags"])]
        if (kind, other) != ("result", "result"):
            raise Unchained
        self.data = [*map(_form, drawn)]

    def fits(self, drawn: Sequence[Any]) -> bool:
        """Whether what a step draws has the form that the program was made for."""
        return len(drawn) == len(self.data) and all(map(_has_form, drawn, self.data))

    def follow(self, first: Call, data: Sequence[Sequence[Any]]) -> tuple[list[Tensor], list[Tensor], Call]:
        """Losses and flags of a call and of those that follow it, with these data, and the last call."""
        call, arguments, results = self.program, [*first.arguments], first.results
        losses, flags = [results[self._loss]], [results[self._flags]]
        with torch.no_grad():
            for drawn in data:
                for j, t in [(j, arguments[k]) for j, k in self._from_arguments]:
                    arguments[j] = t
                for j, k in self._from_results:
                    arguments[j] = results[k]
                for j, k in self._from_data:
                    arguments[j] = apart(drawn[k])
                results = call([*arguments])
                losses.append(results[self._loss])
                flags.append(results[self._flags])
        return losses, flags, Call(first.program, arguments, results)

    def results(self, call: Call) -> dict[str, Any]:
        """The results of a step from its call."""
        kinds = {"result": call.results, "argument": call.arguments}
        leaves = [at if kind == "constant" else kinds[kind][at] for kind, at in self._leaves]
        found: dict[str, Any] = tree_unflatten(leaves, self._structure)
        return found


def _memory(t: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return t.data_ptr(), t.shape, t.stride()


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _known(memory: dict[Any, int], t: Any) -> int:
    found = memory.get(_memory(t)) if isinstance(t, Tensor) else None
    if found is None:
        raise Unchained
    return found


def _has_form(leaf: Any, form: Any) -> bool:
    if isinstance(leaf, Tensor):
        if type(form) is not tuple or len(form) != 4:
            return False
        size, stride, kind, device = form
        return bool(leaf.shape == size and leaf.dtype is kind and leaf.stride() == stride and leaf.device == device)
    # What other objects say of being equal need not be so, and what they hold may be another tensor at each step.
    return type(leaf) is type(form) and isinstance(leaf, PLAIN) and repr(leaf) == repr(form)

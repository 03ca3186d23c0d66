"""Chains of compiled steps: results of one call are arguments of the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from ..pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from .backend import Call, Program
from .pure import State, following
from .small_cpu import CallList

__all__ = ["Chain", "Unchained", "leaves", "leaves_of", "set_apart"]

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


PLAIN = (bool, int, float, str, bytes, type(None))
TURNS = 4  # most copies of the results of small steps whose memory is kept


def leaves_of(drawn: Mapping[str, Sequence[Any]], random: Mapping[str, Tensor]) -> list[Any]:
    """Return a step's samples and random inputs, in order, as leaves of a pytree."""
    return [*leaves(drawn), *random.values()]


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a pytree as torch does, in a fraction of the time if its containers are plain."""
    kind = type(value)
    if kind is dict:
        value, kind = value.values(), list
    if kind is not list and kind is not tuple:
        return [value] if value is None or isinstance(value, Tensor) else tree_leaves(value)
    found: list[Any] = []
    for part in value:
        if part is None or isinstance(part, Tensor):
            found.append(part)
        else:
            found += leaves(part)
    return found


def set_apart(value: Any) -> Any:
    """Apply `detached` to each leaf of a pytree."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([part if part is None else set_apart(part) for part in value])
    if kind is dict:
        return {name: set_apart(part) for name, part in value.items()}
    return detached(value) if isinstance(value, Tensor) else tree_map(detached, value)


def detached(leaf: Any) -> Any:
    """Detach a tensor that needs no gradient, so that no guard relies on its identity; return other leaves unchanged.

    A batch may come twice, or a loss may read the same tensor by itself.
    """
    return leaf.detach() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf


def _form(leaf: Any) -> Form | Any:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


class Unchained(Exception):
    """A step cannot run before the results of the one before it are written."""


class Chain:
    """The results of a program that are arguments of its next call, found by identity in one of its calls.

    Args:
        call: a call of the program.
        live: the live tensors, which are among its arguments and whose values are in the state.
        state: the state that the step read.
        drawn: its samples, from `leaves_of`.
        results: the step's results.
        times: number of steps that one program makes, where that many are left.

    Raises:
        Unchained: if a step cannot follow this one before its results are written.

    Attributes:
        program: the function to call.
        data: forms of the tensors that every step draws, and the values of all else that it draws.
        seconds: time that the compilation of several steps took.
    """

    def __init__(
        self,
        call: Call,
        live: Sequence[Tensor],
        state: State,
        drawn: Sequence[Any],
        results: dict[str, Any],
        times: int = 1,
    ) -> None:
        self.program = call.program.call
        self._reusing: Sequence[CallList] | None = None  # the program again, with results that keep their memory
        self._times = times if call.program.graph is not None else 1
        self._several: Several | None = None
        self.seconds = 0.0
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
        self._from_data: list[tuple[int, int]] = []  # argument, index of the drawn leaf
        for j, t in enumerate(call.arguments):
            if id(t) in given:
                new = after[0][given[id(t)]]
                if id(new) in place:
                    self._from_results.append((j, place[id(new)]))
                elif new is not t:
                    self._from_arguments.append((j, _known(memory, new)))
            elif isinstance(t, Tensor) and id(t) not in standing and _storage(t) in moving:
                raise Unchained  # a loss reads a parameter's memory, which changes when the step is written
            elif id(t) in own:
                self._from_data.append((j, own[id(t)]))
        leaves, self._structure = tree_flatten(results)
        # Source of each leaf of the results: a result of the program, one of its arguments, or a constant.
        self._leaves: list[tuple[str, Any]] = []
        for t in leaves:
            if not isinstance(t, Tensor):
                self._leaves.append(("constant", t))
            elif id(t) in place:
                self._leaves.append(("result", place[id(t)]))
            else:
                self._leaves.append(("argument", _known(memory, t)))
        changing = {j for j, _ in (*self._from_results, *self._from_arguments)}
        self._returned = {at for kind, at in self._leaves if kind == "argument" and at in changing}
        where = {id(t): at for t, at in zip(leaves, self._leaves, strict=True)}
        (kind, self._loss), (other, self._flags) = where[id(results["loss"])], where[id(results["flags"])]
        if (kind, other) != ("result", "result"):
            raise Unchained
        self.data = [*map(_form, drawn)]
        self._alike: dict[tuple[int, int, int], bool] = {}

    def are_alike(self, first: int, place: int, count: int) -> bool:
        """Return True if samples that have the form of those at ``first`` have that of those at ``place``."""
        key = first, place, count
        if key not in self._alike:
            mine, others = self.data[first : first + count], self.data[place : place + count]
            self._alike[key] = len(mine) == len(others) and all(map(_same_form, mine, others))
        return self._alike[key]

    def fits(self, drawn: Sequence[Any], place: int | None = None) -> bool:
        """Return True if samples have the form that the program was made for.

        ``place``: the samples are only a part of a step's, from this position on.
        """
        if place is None:
            return len(drawn) == len(self.data) and all(map(_has_form, drawn, self.data))
        wanted = self.data[place : place + len(drawn)]
        return len(drawn) == len(wanted) and all(map(_has_form, drawn, wanted))

    def follow(self, first: Call, data: Sequence[Sequence[Any]]) -> tuple[list[Tensor], list[Tensor], Call]:
        """Return losses and flags of the first call and of a call for each element of ``data``, and the last call."""
        call, arguments, results = self.program, [*first.arguments], first.results
        reusing = self._with_kept_results(first) if len(data) > 2 and self._times == 1 else ()
        losses, flags, k = [results[self._loss]], [results[self._flags]], 0
        with torch.no_grad():
            while k < len(data):
                self._continue(arguments, results, data[k])
                if self._times > 1 and k + self._times <= len(data):
                    several = self._repeated(first.program, arguments, data[k + 1 : k + self._times])
                    own, found, arguments, results = several(arguments, data[k + 1 : k + self._times])
                    losses += own
                    flags += found
                    k += self._times
                else:
                    kept = bool(reusing) and k < len(data) - 1
                    results = reusing[k % len(reusing)](arguments) if kept else call([*arguments])
                    losses.append(results[self._loss])
                    flags.append(results[self._flags])
                    k += 1
        return losses, flags, Call(first.program, arguments, results)

    def _continue(self, arguments: list[Any], results: Sequence[Any], drawn: Sequence[Any]) -> None:
        """Replace the arguments of a call by those of the next one."""
        for j, t in [(j, arguments[k]) for j, k in self._from_arguments]:
            arguments[j] = t
        for j, k in self._from_results:
            arguments[j] = results[k]
        for j, k in self._from_data:
            arguments[j] = drawn[k]

    def _with_kept_results(self, first: Call) -> Sequence[CallList]:
        """Return programs whose results keep their memory, to be called in turn for all steps but the last, if any."""
        if self._reusing is None:
            self._reusing = []
            changing = {j for j, _ in (*self._from_results, *self._from_arguments)}
            # Results in the memory of an argument, such as the last x.
            owner = {_storage(first.arguments[j]): j for j in changing}
            passed = {k: owner[_storage(t)] for k, t in enumerate(first.results) if _storage(t) in owner}
            moved = [*self._from_arguments, *((j, passed[k]) for j, k in self._from_results if k in passed)]
            # A result is an argument of the next step, and perhaps of more steps after it.
            turns, later = 2, {j for j, _ in self._from_results}
            while turns <= TURNS and (later := {j for j, k in moved if k in later}):
                turns += 1
            returned = {at for kind, at in self._leaves if kind == "result"}
            if turns <= TURNS and isinstance(self.program, CallList) and not returned & passed.keys():
                self._reusing = [self.program.reusing((self._loss, self._flags)) for _ in range(turns)]
        return self._reusing

    def _repeated(self, program: Program, arguments: list[Any], data: Sequence[Sequence[Any]]) -> Several:
        """Return the program of several steps, compiled on first use."""
        if self._several is None:
            began = time.monotonic()
            self._several = Several(
                program, arguments, data, self._continue, (self._loss, self._flags), self._from_data
            )
            self.seconds = time.monotonic() - began
        return self._several

    def results(self, call: Call) -> dict[str, Any]:
        """Return the results of a step from its call."""
        arguments = [*call.arguments]
        for j in self._returned if self._reusing else ():  # the memory of earlier results will be used again
            arguments[j] = arguments[j].clone()
        kinds = {"result": call.results, "argument": arguments}
        leaves = [at if kind == "constant" else kinds[kind][at] for kind, at in self._leaves]
        found: dict[str, Any] = tree_unflatten(leaves, self._structure)
        return found


class Several:
    """A program of several steps: copies of one step's graph, each with results of the one before as arguments.

    Args:
        program: the program of one step.
        arguments: arguments of the first step.
        data: samples of the other steps.
        following: replaces the arguments of a step by those of the next one.
        told: positions of the loss and of the flags among the results.
        from_data: pairs of an argument's position and the index of a drawn leaf.
    """

    def __init__(
        self,
        program: Program,
        arguments: list[Any],
        data: Sequence[Sequence[Any]],
        following: Callable[[list[Any], Sequence[Any], Sequence[Any]], None],
        told: tuple[int, int],
        from_data: Sequence[tuple[int, int]],
    ) -> None:
        assert program.graph is not None
        assert program.compiled is not None
        graph, self._places = Graph(), [k for _, k in from_data]
        nodes: list[Any] = [graph.placeholder(f"a{j}") for j in range(len(arguments))]
        given = {node: j for j, node in enumerate(nodes)}
        losses, flags, results = [], [], list[Any]()
        for n, drawn in enumerate([None, *data]):
            if drawn is not None:
                own: list[Any] = [None] * len(drawn)
                for _, k in from_data:
                    own[k] = graph.placeholder(f"b{n}_{k}")
                following(nodes, results, own)
            inner = dict(zip((one for one in program.graph.graph.nodes if one.op == "placeholder"), nodes, strict=True))
            results = [*graph.graph_copy(program.graph.graph, inner)]  # type: ignore[misc]
            losses.append(results[told[0]])
            flags.append(results[told[1]])
        # For each argument of the last step: its position among the given ones; None if a step computes it.
        self._count, self._kept = len(losses), len(results)
        self._last = [given.get(node) for node in nodes]
        graph.output([*losses, *flags, *results, *[node for node in nodes if node not in given]])
        graph.lint()
        module = GraphModule(program.graph, graph)
        self._call = program.compiled(module, self._given(arguments, data))

    def _given(self, arguments: list[Any], data: Sequence[Sequence[Any]]) -> list[Any]:
        return [*arguments, *(drawn[k] for drawn in data for k in self._places)]

    def __call__(
        self, arguments: list[Any], data: Sequence[Sequence[Any]]
    ) -> tuple[list[Tensor], list[Tensor], list[Any], Sequence[Any]]:
        """Return losses and flags of the steps, and arguments and results of the last one."""
        found, n = [*self._call(self._given(arguments, data))], self._count
        rest = iter(found[2 * n + self._kept :])
        last = [next(rest) if j is None else arguments[j] for j in self._last]
        return found[:n], found[n : 2 * n], last, found[2 * n : 2 * n + self._kept]


def _memory(t: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return t.data_ptr(), t.shape, t.stride()


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _known(memory: dict[Any, int], t: Any) -> int:
    found = memory.get(_memory(t)) if isinstance(t, Tensor) else None
    if found is None:
        raise Unchained
    return found


def _same_form(one: Any, other: Any) -> bool:
    """Return True if all samples that have one form have the other: forms of tensors, or None."""
    return one is other is None or (type(one) is type(other) is tuple and one == other)


def _has_form(leaf: Any, form: Any) -> bool:
    if leaf is None:
        return form is None
    if isinstance(leaf, Tensor):
        if type(form) is not tuple or len(form) != 4:
            return False
        size, stride, kind, device = form
        return bool(leaf.shape == size and leaf.dtype is kind and leaf.stride() == stride and leaf.device == device)
    # Other objects may compare equal without being so, or hold another tensor at each step.
    return type(leaf) is type(form) and isinstance(leaf, PLAIN) and repr(leaf) == repr(form)

"""The user's functions as graphs: Dynamo reads each of them alone, and its guards tell when a graph is out of date."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import _callback_from_stance, remove_from_cache
from torch._dynamo.mutation_guard import GenerationTracker
from torch.fx import GraphModule, Interpreter, Node

from ..oracle.point import in_place
from ..oracle.substitution import replacement
from ..problem.vector import Vector
from ..pytree import tree_flatten, tree_unflatten
from .forms import empty, form_of, form_of_tensor
from .reasons import Refused, place_of
from .rewrites import differentiable_twice, require_deterministic, require_unwritten

__all__ = ["Arguments", "Needed", "Reader", "Reading", "Together", "Unread", "UserGraph", "WantsConstants", "look"]

OUTSIDE = "a loss uses a tensor with a graph from outside the loss: compute it in the loss, or detach it"
_NUMBERS, _NOTHING = itertools.count(), nullcontext(None)


class Unread(Exception):
    """No graph fits the present state of what a function reads."""


class WantsConstants(Exception):
    """A number that is an argument of the graph has to be a constant of it."""


class Arguments:
    """The arguments of a user's function, without values: what a graph of it is specialised on.

    Args:
        role: what the function is for, its key among the losses.
        leaves: leaves of its arguments; of tensors, only the forms count.
        structure: structure of its arguments.
        live: the live tensors, whose replacements may have another shape: one row of a table.
        shapes: their own shapes.

    Attributes:
        rows: position of such a live tensor -> form of the value in its place.
    """

    def __init__(
        self,
        role: str,
        leaves: Sequence[Any],
        structure: Any,
        live: Sequence[Tensor],
        shapes: Sequence[torch.Size],
    ) -> None:
        self.structure, self.role, self.grad = structure, role, torch.is_grad_enabled()
        self.forms = [form_of_tensor(leaf) if isinstance(leaf, Tensor) else form_of(leaf) for leaf in leaves]
        self._plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values = [replacement(t) for t in live]
        self.rows = {k: form_of_tensor(values[k]) for k, shape in enumerate(shapes) if values[k].shape != shape}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Arguments)
            and (self.role, self.grad, self.forms, self.rows) == (other.role, other.grad, other.forms, other.rows)
            and self.structure == other.structure
        )

    __hash__ = None  # type: ignore[assignment]

    def examples(self) -> list[Any]:
        """Return leaves of arguments of this form."""
        pairs = zip(self.forms, self._plain, strict=True)
        return [empty(form) if len(form) == 5 else value for form, value in pairs]


class Needed(BaseException):  # not an Exception, so that no fallback of an evaluation catches it
    """A trace has come to a function that has no graph yet for such arguments."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments


@dataclass
class _Output:
    """An output of a graph, while Dynamo's code puts a function's result together."""

    place: int


@dataclass(frozen=True)
class _Place:
    """A place among the live tensors (``"live"``), the arguments' leaves (``"argument"``) or other reads."""

    kind: str
    position: int


class UserGraph:
    """A graph of a user's function.

    Args:
        module: the graph that Dynamo has traced; None if the function computes nothing.
        places: the place of each input of the graph.
        result: the function's result, with `_Output` or a place in the place of each tensor.
    """

    def __init__(self, module: GraphModule | None, places: Sequence[_Place], result: Any) -> None:
        self._module, self.places = module, places
        self._leaves, self._structure = tree_flatten(result)

    def __call__(self, arguments: Sequence[Any], live: Sequence[Tensor], reads: Sequence[Tensor]) -> Any:
        """Return the function's result.

        Args:
            arguments: leaves of its arguments.
            live: the live tensors, whose replacements are read.
            reads: the other tensors that it reads.
        """
        of = {"argument": arguments, "live": [replacement(t) for t in live], "read": reads}
        inputs = [of[place.kind][place.position] for place in self.places]
        outputs = () if self._module is None else _Run(self._module).run(*inputs)
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, _Output):
                leaves.append(outputs[leaf.place])
            elif isinstance(leaf, _Place):
                leaves.append(of[leaf.kind][leaf.position])
            else:
                leaves.append(leaf)
        return tree_unflatten(leaves, self._structure)


class _Run(Interpreter):
    """Runs a graph, and tells which line of the user's code failed."""

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            if not hasattr(error, "place"):
                error.place = place_of(n)  # type: ignore[attr-defined]
            raise


class Reading(NamedTuple):
    """One look at a user's function.

    Attributes:
        graph: its graph.
        tensors: the tensors that it reads at present, besides its arguments and the live tensors.
    """

    graph: UserGraph
    tensors: list[Tensor]


def look(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function. Dynamo uses its compiled code there, and compiles nothing.

    As `torch._dynamo.run`, whose wrapper takes longer than the guards of a small loss.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        GenerationTracker.generation += 1  # by which CUDA graphs tell steps apart
    before = set_eval_frame(None)  # first, so that an interrupt leaves no setting of ours
    try:
        set_eval_frame(_callback_from_stance(False))
        return function(*arguments)
    finally:
        set_eval_frame(before)


def _by_dynamo(
    read: Any, calls: list[tuple[GraphModule, Sequence[Tensor]]], constant: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a function to be called by `look`, and the same function compiled: ``calls`` notes its graph.

    Dynamo identifies code by file, line and name. By these it remembers which sizes and numbers have changed, and it
    keeps graphs until that code is removed. So each function has code of its own.
    """
    code = read.__code__.replace(co_name=f"read_{next(_NUMBERS)}")
    own = types.FunctionType(code, read.__globals__, code.co_name, None, read.__closure__)
    weakref.finalize(own, remove_from_cache, code).atexit = False
    made = torch.compile(
        own,
        fullgraph=True,
        dynamic=False if constant else None,
        backend=_backend(calls),
        options={"guard_filter_fn": _about_the_user},
    )
    return own, made


class Reader:
    """Reads a user's function for arguments of one form, by Dynamo.

    Args:
        arguments: the arguments.
        live: the tensors that a step replaces: parameters and module buffers.
        buffers: those of them that the function may write into.
        plain: replace operations without a right second derivative.
        constant: whether numbers that change are constants of a graph; otherwise they become arguments.
    """

    def __init__(
        self, arguments: Arguments, live: Sequence[Tensor], buffers: Sequence[Tensor], *, plain: bool, constant: bool
    ) -> None:
        self.arguments, self.constant = arguments, constant
        self._live, self._buffers, self._differentiates_twice = live, buffers, plain
        self._leaves = arguments.examples()
        self._examples = tree_unflatten(self._leaves, arguments.structure)
        rows = arguments.rows.items()
        self._rows = [live[k] for k, _ in rows], [empty(form).detach() for _, form in rows]
        self._positions = {id(t): _Place("live", k) for k, t in enumerate(live)}
        self._positions |= {id(t): _Place("argument", k) for k, t in enumerate(self._leaves) if isinstance(t, Tensor)}
        self._calls: list[tuple[GraphModule, Sequence[Tensor]]] = []  # of graphs, by Dynamo's code: graph and inputs
        self._graphs: list[tuple[GraphModule | None, Sequence[Tensor | None], UserGraph]] = []
        role = arguments.role

        def read(losses: Any, arguments: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                raise Unread
            return losses[role](*arguments)

        self._known, self._compile = _by_dynamo(read, self._calls, constant)

    def known(self, losses: Mapping[str, Any]) -> Reading:
        """Look at the function, inside `look`; raise `Unread` if the present state has no graph yet."""
        return self._look(self._known, losses)

    def compile(self, losses: Mapping[str, Any]) -> Reading:
        """Look at the function; let Dynamo trace it if the present state has no graph yet."""
        return self._look(self._compile, losses)

    def _look(self, function: Callable[..., Any], losses: Mapping[str, Any]) -> Reading:
        arguments = self.arguments
        with ExitStack() if arguments.rows or torch.is_grad_enabled() is not arguments.grad else _NOTHING as stack:
            if stack is not None:
                stack.enter_context(torch.set_grad_enabled(arguments.grad))
                live, values = map(Vector, self._rows)
                stack.enter_context(in_place([live], [values]))
            result = function({arguments.role: losses[arguments.role]}, self._examples)
        module, inputs = self._calls.pop() if self._calls else (None, ())
        for own, expected, graph in self._graphs:
            if own is module:
                reads = self._reads(inputs, expected)
                if reads is not None:
                    return Reading(graph, reads)
        if function is self._known:
            raise Unread
        places = [self._positions.get(id(t)) for t in inputs]
        reads = [t for t, place in zip(inputs, places, strict=True) if place is None]
        if any(t.grad_fn is not None for t in reads):
            raise Refused(OUTSIDE)
        numbers = itertools.count()
        graph = self._made(module, inputs, [place or _Place("read", next(numbers)) for place in places], result)
        expected = [None if place is None else t for t, place in zip(inputs, places, strict=True)]
        self._graphs.append((module, expected, graph))
        return Reading(graph, reads)

    def _reads(self, inputs: Sequence[Tensor], expected: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Return the inputs of a graph besides the expected ones; None if others are in the place of these."""
        reads = []
        for t, own in zip(inputs, expected, strict=True):
            if own is None:
                if id(t) in self._positions or t.grad_fn is not None:
                    return None
                reads.append(t)
            elif own is not t:
                return None
        return reads

    def _made(
        self, module: GraphModule | None, inputs: Sequence[Tensor], places: list[_Place], result: Any
    ) -> UserGraph:
        if module is not None:
            given = [node for node in module.graph.nodes if node.op == "placeholder"]
            own = {id(t) for t in self._buffers}
            require_unwritten(module, [node for node, t in zip(given, inputs, strict=True) if id(t) in own])
            differentiable_twice(module, plain=self._differentiates_twice)
            for node in module.graph.nodes:
                node.meta = {key: value for key, value in node.meta.items() if key == "stack_trace"}
        leaves, structure = tree_flatten(result)
        found = []
        for leaf in leaves:
            place = self._positions.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf
            if isinstance(place, Tensor):
                raise Refused("a loss returns a tensor that it does not compute, so that a graph cannot follow it")
            found.append(place)
        return UserGraph(module, places, tree_unflatten(found, structure))


class Together:
    """All functions that a step reads, in one look: half the time of a look at each.

    Args:
        readers: their readers, all with gradients.

    Attributes:
        count: number of functions.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self.count = len(readers)
        self._examples = [reader._examples for reader in readers]
        self._positions = {id(t) for reader in readers for t in reader._leaves} | {*map(id, readers[0]._live)}
        self._calls: list[tuple[GraphModule, Sequence[Tensor]]] = []
        self._found: list[tuple[Any, Sequence[Tensor | None], list[int], Any]] = []
        roles = [reader.arguments.role for reader in readers]

        def read(losses: Any, arguments: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                raise Unread
            return [losses[role](*own) for role, own in zip(roles, arguments, strict=True)]

        self._known, self._compile = _by_dynamo(read, self._calls, readers[0].constant)

    def note(self, losses: Mapping[str, Any], reads: Sequence[Tensor], program: Any) -> bool:
        """Note the program for the present state of the functions; return False if a look does not find their reads."""
        self._compile(losses, self._examples)
        module, inputs = self._calls.pop() if self._calls else (None, ())
        places = {id(t): k for k, t in enumerate(inputs)}
        expected = [t if id(t) in self._positions else None for t in inputs]
        own = {id(t) for t, fixed in zip(inputs, expected, strict=True) if fixed is None}
        if own != {*map(id, reads)}:  # a number that is an input is a new tensor at every look
            return False
        self._found.append((module, expected, [places[id(t)] for t in reads], program))
        return True

    def known(self, losses: Mapping[str, Any]) -> tuple[Any, list[Tensor]] | None:
        """Look at the functions; return the program for their state, with the tensors read; None if none is noted."""
        try:
            look(self._known, losses, self._examples)
        except Unread:
            return None
        module, inputs = self._calls.pop() if self._calls else (None, ())
        for own, expected, places, program in self._found:
            if own is module and all(
                [
                    t is fixed if fixed is not None else t.grad_fn is None and id(t) not in self._positions
                    for t, fixed in zip(inputs, expected, strict=True)
                ]
            ):
                return program, [inputs[k] for k in places]
        return None


def _backend(calls: list[tuple[GraphModule, Sequence[Tensor]]]) -> Callable[..., Any]:
    """Return a backend whose programs compute nothing, but note their calls; torch keeps backends for ever."""

    def backend(module: GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        if not all(isinstance(t, Tensor) for t in examples):
            raise WantsConstants
        require_deterministic(module)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        outputs = tuple(_Output(k) for k in range(len(output.args[0])))

        def call(*inputs: Tensor) -> Any:
            calls[:] = [(module, inputs)]
            return outputs

        return call

    return backend


def _about_the_user(guards: Sequence[Any]) -> list[bool]:
    """Return which guards to keep.

    All but those on the library's own objects, on the example arguments, and on hooks that only AOTAutograd heeds: a
    function in Python, which takes a tenth of a look.
    """
    return [
        _OWN not in guard.name and not guard.name.startswith(_FIXED) and guard.guard_type != _OF_AOT for guard in guards
    ]


_OF_AOT = "AUTOGRAD_SAVED_TENSORS_HOOKS"
_OWN = "__import_bilevel_optim_dot_"
_FIXED = ("arguments", "role")  # torch leaves out the L['...'] of local names

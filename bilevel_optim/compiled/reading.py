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
from .forms import empty, form_of_tensor, structure_of
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
        self.role, self.grad, self.structure = role, torch.is_grad_enabled(), structure
        tensors: list[Tensor] = []
        plain = structure_of([*leaves], tensors)
        self._forms = [*map(form_of_tensor, tensors)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        values = [replacement(t) for t in live]
        self.rows = {k: form_of_tensor(values[k]) for k, shape in enumerate(shapes) if values[k].shape != shape}
        self._key = role, self.grad, self._forms, self.rows, plain, structure

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arguments) and self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    def examples(self) -> list[Any]:
        """Return leaves of arguments of this form."""
        forms = iter(self._forms)
        return [empty(next(forms)) if k in self._tensors else leaf for k, leaf in enumerate(self._leaves)]


class Needed(BaseException):  # not an Exception, so that no fallback of an evaluation catches it
    """A trace has come to a function that has no graph yet for such arguments."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments


@dataclass(frozen=True)
class _Place:
    """A place among the live tensors (``"live"``), the arguments' leaves (``"argument"``), other reads, or outputs."""

    kind: str
    position: int


class UserGraph:
    """A graph of a user's function.

    Args:
        module: the graph that Dynamo has traced; None if the function computes nothing.
        places: the place of each input of the graph.
        result: the function's result, with a place for each tensor; ``"output"`` are those of the graph.
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
        if self._module is not None:
            of["output"] = _Run(self._module).run(*[of[place.kind][place.position] for place in self.places])
        leaves = [of[leaf.kind][leaf.position] if isinstance(leaf, _Place) else leaf for leaf in self._leaves]
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


class _Looks:
    """Looks at functions of the user, by Dynamo, and a value kept for each state of the things read.

    Dynamo identifies code by file, line and name. By these it remembers which sizes and numbers have changed, and it
    keeps graphs until that code is removed. So each object has code of its own.

    Args:
        arguments: those of each function.
        leaves: example leaves of these arguments.
        live: the tensors that a step replaces: parameters and module buffers.
        constant: whether numbers that change are constants of a graph; otherwise they become arguments.
    """

    def __init__(
        self, arguments: Sequence[Arguments], leaves: Sequence[list[Any]], live: Sequence[Tensor], constant: bool
    ) -> None:
        self.constant, self._live, self._leaves = constant, live, leaves
        self._examples = [tree_unflatten(own, a.structure) for own, a in zip(leaves, arguments, strict=True)]
        self._places = {id(t): _Place("live", k) for k, t in enumerate(live)}
        for own in leaves:
            self._places |= {id(t): _Place("argument", k) for k, t in enumerate(own) if isinstance(t, Tensor)}
        # For each state the graph, its inputs (None for those neither live nor arguments), and the kept value.
        self._states: list[tuple[GraphModule | None, list[Tensor | None], Any]] = []
        calls: list[tuple[GraphModule, Sequence[Tensor]]] = []  # of graphs, by Dynamo's code: graph and inputs
        roles = [own.role for own in arguments]
        self._calls, self._roles = calls, roles

        def read(losses: Any, arguments: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                raise Unread
            return [losses[role](*own) for role, own in zip(roles, arguments, strict=True)]

        code = read.__code__.replace(co_name=f"read_{next(_NUMBERS)}")
        self.known = types.FunctionType(code, read.__globals__, code.co_name, None, read.__closure__)
        weakref.finalize(self.known, remove_from_cache, code).atexit = False
        self.compiled = torch.compile(
            self.known,
            fullgraph=True,
            dynamic=False if constant else None,
            backend=_backend(calls),
            options={"guard_filter_fn": _about_the_user},
        )

    def _arguments(self, losses: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the arguments of ``known`` and ``compiled``."""
        return {role: losses[role] for role in self._roles}, self._examples

    def _called(self) -> tuple[GraphModule | None, Sequence[Tensor]]:
        """Return the graph that Dynamo's code has called, with its inputs."""
        return self._calls.pop() if self._calls else (None, ())

    def _note(self, module: GraphModule | None, inputs: Sequence[Tensor], kept: Any) -> None:
        self._states.append((module, [t if id(t) in self._places else None for t in inputs], kept))

    def _find(self, module: GraphModule | None, inputs: Sequence[Tensor]) -> Any:
        """Return the value kept for a state; None if there is none."""
        for own, expected, kept in self._states:
            if own is module and all(
                [
                    t is fixed if fixed is not None else t.grad_fn is None and id(t) not in self._places
                    for t, fixed in zip(inputs, expected, strict=True)
                ]
            ):
                return kept
        return None


class Reader(_Looks):
    """Reads a user's function for arguments of one form.

    Args:
        arguments: the arguments.
        live: the tensors that a step replaces.
        buffers: those of them that the function may write into.
        plain: replace operations without a right second derivative.
        constant: as for `_Looks`.
    """

    def __init__(
        self, arguments: Arguments, live: Sequence[Tensor], buffers: Sequence[Tensor], *, plain: bool, constant: bool
    ) -> None:
        super().__init__([arguments], [arguments.examples()], live, constant)
        self.arguments, self._buffers, self._differentiates_twice = arguments, buffers, plain
        rows = arguments.rows.items()
        self._rows = Vector(live[k] for k, _ in rows), Vector(empty(form).detach() for _, form in rows)

    def look(self, function: Callable[..., Any], losses: Mapping[str, Any]) -> Reading:
        """Look at the function: by ``known``, inside `look`, or by ``compiled``, which traces it if need be.

        Raises:
            Unread: if only Dynamo could tell the graph.
        """
        arguments = self.arguments
        with ExitStack() if arguments.rows or torch.is_grad_enabled() is not arguments.grad else _NOTHING as stack:
            if stack is not None:
                stack.enter_context(torch.set_grad_enabled(arguments.grad))
                live, values = self._rows
                stack.enter_context(in_place([live], [values]))
            (result,) = function(*self._arguments(losses))
        module, inputs = self._called()
        reads = [t for t in inputs if id(t) not in self._places]
        graph = self._find(module, inputs)
        if graph is None:
            if function is self.known:
                raise Unread
            if any(t.grad_fn is not None for t in reads):
                raise Refused(OUTSIDE)
            graph = self._made(module, inputs, result)
            self._note(module, inputs, graph)
        return Reading(graph, reads)

    def _made(self, module: GraphModule | None, inputs: Sequence[Tensor], result: Any) -> UserGraph:
        if module is not None:
            given = [node for node in module.graph.nodes if node.op == "placeholder"]
            own = {id(t) for t in self._buffers}
            require_unwritten(module, [node for node, t in zip(given, inputs, strict=True) if id(t) in own])
            differentiable_twice(module, plain=self._differentiates_twice)
            for node in module.graph.nodes:
                node.meta = {key: value for key, value in node.meta.items() if key == "stack_trace"}
        leaves, structure = tree_flatten(result)
        found = [self._places.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any([isinstance(place, Tensor) for place in found]):
            raise Refused("a loss returns a tensor that it does not compute, so that a graph cannot follow it")
        numbers = itertools.count()
        places = [self._places.get(id(t)) or _Place("read", next(numbers)) for t in inputs]
        return UserGraph(module, places, tree_unflatten(found, structure))


class Together(_Looks):
    """All functions that a step reads, in one look: half the time of a look at each.

    Args:
        readers: their readers, all with gradients.

    Attributes:
        count: number of functions.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        (first, *_), self.count = readers, len(readers)
        leaves = [own for reader in readers for own in reader._leaves]
        super().__init__([reader.arguments for reader in readers], leaves, first._live, first.constant)

    def note(self, losses: Mapping[str, Any], reads: Sequence[Tensor], program: Any) -> bool:
        """Note the program for the present state of the functions; return False if a look does not find their reads."""
        self.compiled(*self._arguments(losses))
        module, inputs = self._called()
        places = {id(t): k for k, t in enumerate(inputs)}
        if places.keys() - self._places.keys() != {*map(id, reads)}:  # a number that is an input is always a new tensor
            return False
        self._note(module, inputs, (program, [places[id(t)] for t in reads]))
        return True

    def program(self, losses: Mapping[str, Any]) -> tuple[Any, list[Tensor]] | None:
        """Look at the functions; return the program for their state, with the tensors read; None if none is noted."""
        try:
            look(self.known, *self._arguments(losses))
        except Unread:
            return None
        module, inputs = self._called()
        found = self._find(module, inputs)
        return None if found is None else (found[0], [inputs[k] for k in found[1]])


def _backend(calls: list[tuple[GraphModule, Sequence[Tensor]]]) -> Callable[..., Any]:
    """Return a backend whose programs compute nothing, but note their calls; torch keeps backends for ever."""

    def backend(module: GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        if not all(isinstance(t, Tensor) for t in examples):
            raise WantsConstants
        require_deterministic(module)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        outputs = tuple(_Place("output", k) for k in range(len(output.args[0])))

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

"""A step as one program: the library's own code is traced by itself, with the user's functions as graphs in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..oracle.substitution import replacement
from ..pytree import tree_flatten, tree_unflatten
from ..tracing import tracing
from .backend import Maker, Program
from .forms import form_of, structure_of
from .places import Place, Writer, picked
from .pure import PureStep, State, following
from .reading import Arguments, Needed, Reader, Reading, Together, UserGraph, look
from .reasons import Refused
from .small_cpu import CallList

__all__ = ["Call", "Given", "StepProgram", "StepReader"]


_NOTHING = nullcontext()


class Given:
    """The arguments of a `PureStep`.

    Args:
        losses: the user's functions, by role.
        tasks: the task sampler, if there is one.
        drawn: samples, by source.
        random: random inputs.
        state: the state that the step reads.

    Attributes:
        structure: those of the samples with the random inputs, and of the state.
        tensors: their tensors, in order.
    """

    def __init__(
        self, losses: dict[str, Any], tasks: Any, drawn: dict[str, list[Any]], random: dict[str, Tensor], state: State
    ) -> None:
        self.losses, self.tasks, self.drawn, self.random, self.state = losses, tasks, drawn, random, state
        self.tensors: list[Tensor] = []
        self.structure = structure_of((drawn, random), self.tensors), structure_of(state, self.tensors)

    def at(self, **state: Any) -> Given:
        """Return the same arguments with other entries of the state."""
        return Given(self.losses, self.tasks, self.drawn, self.random, {**self.state, **state})


class Call(NamedTuple):
    """One call of a step's program, with its arguments and its results."""

    arguments: list[Tensor]
    results: Sequence[Tensor]

    @property
    def values(self) -> list[Tensor]:
        """All tensors that the step's results may be, at their places."""
        return [*self.results, *self.arguments]


class StepProgram:
    """A program for a step, from flat arguments to flat results.

    Its arguments are what the user's functions read, then the tensors of the samples, the random inputs and the state.

    Args:
        program: the compiled function, from a list of tensors to the results that it computes.
        reads: number of those that the user's functions read.
        results: the step's results, with a `Place` for each tensor.
        next_state: places of the tensors of the next step's state; None if a step cannot follow at once.
        pure: the step.

    Attributes:
        writer: writes the results of a call.
        chain: the chain of its calls, once there is one.
    """

    def __init__(
        self,
        program: Program,
        reads: int,
        results: dict[str, Any],
        next_state: Sequence[Place] | None,
        pure: PureStep,
    ) -> None:
        self.program, self.reads, self.next_state, self._results = program, reads, next_state, results
        self.writer = Writer(results, pure)
        self.chain: Any = None
        self._once: Callable[[list[Tensor]], Sequence[Tensor]] | None = None

    def __call__(self, arguments: list[Tensor]) -> Call:
        """Run the program."""
        return Call(arguments, self.program([*arguments]))

    def once(self, arguments: list[Tensor]) -> Call:
        """Run the program for results that are written before its next call: memory of those to copy is used again."""
        if self._once is None:
            call = self.program.call
            self._once = call.reusing(self.writer.kept) if isinstance(call, CallList) else self.program
        return Call(arguments, self._once([*arguments]))

    def results(self, call: Call) -> dict[str, Any]:
        """Return the step's results from a call."""
        found: dict[str, Any] = picked(self._results, call.values)
        return found


class StepReader:
    """Programs for steps whose data have one form.

    Args:
        pure: the step.
        backend: makes a program from a graph, from `maker_of`.
        constant: whether numbers that change are constants of a graph; otherwise they become arguments.
    """

    def __init__(self, pure: PureStep, backend: Maker, constant: bool) -> None:
        self.pure, self.constant, self._backend = pure, constant, backend
        self._live = [*pure.live_x, *pure.live_y, *pure.buffers]
        self.readers: list[Reader] = []
        self.programs: list[tuple[list[UserGraph], StepProgram]] = []
        self._together: Together | None = None

    @property
    def may_follow(self) -> bool:
        """True if a step can follow another before that is written, in some program."""
        return any([program.next_state is not None for _, program in self.programs])

    def known(self, losses: Mapping[str, Any]) -> tuple[StepProgram, list[Tensor]] | None:
        """Return the program for what the losses read at present, and that; None, or `Unread`, if none fits."""
        with _NOTHING if torch.is_grad_enabled() else torch.enable_grad():
            if self._together is not None and (both := self._together.known(losses)) is not None:
                return both
            readings = look(_look, self.readers, losses)  # one switch of Dynamo for all
        found = self._find(readings)
        return None if found is None else (found, [t for reading in readings for t in reading.tensors])

    def _find(self, readings: Sequence[Reading]) -> StepProgram | None:
        graphs = [reading.graph for reading in readings]
        return next((program for own, program in self.programs if own == graphs), None)

    def compile(self, given: Given) -> tuple[StepProgram, list[Tensor]]:
        """Return a program for this step, compiled now if there is none, with its arguments."""
        if any([t.grad_fn is not None for t in given.tensors]):
            raise Refused(
                "a batch has a graph of its own, which a graph would cut: compute it in the loss, or detach it"
            )
        readings = self._expected(given)
        while True:
            readings += [reader.compile(given.losses) for reader in self.readers[len(readings) :]]
            arguments = [t for reading in readings for t in reading.tensors] + given.tensors
            program = self._find(readings)
            if program is None:
                try:
                    program = self._traced(readings, arguments, given)
                except Needed as needed:
                    self._read(needed.arguments)
                    continue
                self.programs.append(([reading.graph for reading in readings], program))
            self._join(readings, given.losses, program)
            return program, arguments

    def _join(self, readings: Sequence[Reading], losses: Mapping[str, Any], program: StepProgram) -> None:
        """Let the next look at what the functions read be one for all of them, if there is more than one."""
        if len(readings) < 2 or any([r.arguments.rows or not r.arguments.grad for r in self.readers]):
            return
        if self._together is None or self._together.count != len(readings):
            self._together = Together(self.readers)
        with torch.enable_grad():
            if not self._together.note(losses, [t for reading in readings for t in reading.tensors], program):
                self._together = None

    def _expected(self, given: Given) -> list[Reading]:
        """Read plain losses on their first batches before the first trace, which would begin again for each of them."""
        losses, readings = given.losses, list[Reading]()
        if self.readers or {"upper features", "lower features"} & losses.keys():
            return readings
        for level in ("lower", "upper"):
            first = next(iter(given.drawn.get(level, ())), None)
            if callable(losses.get(level)) and isinstance(first, tuple):
                with torch.enable_grad():
                    leaves, structure = tree_flatten([*first])
                    arguments = Arguments(level, leaves, structure, self._live, [t.shape for t in self._live])
                self._read(arguments)
                try:
                    readings.append(self.readers[-1].compile(losses))
                except Exception:  # if the step needs this loss, the trace will tell
                    self.readers.pop()
        return readings

    def _read(self, arguments: Arguments) -> None:
        self.readers.append(
            Reader(
                arguments,
                self._live,
                self.pure.buffers,
                plain=self.pure.differentiates_twice,
                constant=self.constant,
            )
        )

    def _traced(self, readings: Sequence[Reading], arguments: list[Tensor], given: Given) -> StepProgram:
        """Trace the step: the library's code runs once, on tensors without values."""
        own, structure = tree_flatten((given.drawn, given.random, given.state))
        where = [i for i, t in enumerate(own) if isinstance(t, Tensor)]
        reads = [len(reading.tensors) for reading in readings]
        first = sum(reads)
        shapes = [t.shape for t in self._live]
        out: dict[str, Any] = {}

        def step(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors[:first])
            parts = [[next(rest) for _ in range(n)] for n in reads]
            flat = list(own)
            for i, t in zip(where, tensors[first:], strict=True):
                flat[i] = t
            drawn, random, state = tree_unflatten(flat, structure)
            known = [
                (r.arguments, reading.graph, part)
                for r, reading, part in zip(self.readers, readings, parts, strict=True)
            ]
            losses: dict[str, Any] = {
                role: _Function(role, known, self._live, shapes) if callable(value) else value
                for role, value in given.losses.items()
            }
            for role in losses:
                if f"{role} stacked" in losses:
                    losses[role].stacked = losses[f"{role} stacked"]
            results = self.pure(losses, given.tasks, drawn, random, state)
            flat_results, out["structure"] = tree_flatten(results)
            given_at = {id(t): k for k, t in enumerate(tensors)}
            made: dict[int, int] = {}
            returned: list[Tensor] = []

            def place(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                if id(leaf) in given_at:
                    return _Early("argument", given_at[id(leaf)])
                if id(leaf) not in made:
                    made[id(leaf)] = len(returned)
                    returned.append(leaf)
                return _Early("result", made[id(leaf)])

            out["results"] = [place(leaf) for leaf in flat_results]
            out["next"] = self._next(state, results, place)
            out["kept"] = results, drawn, random, state  # so that no id is used twice
            return returned

        # Without a `ShapeEnv`, item() of a fake tensor is the value that the tensor has now, without an error.
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
        fakes: list[Tensor] = [mode.from_tensor(t.detach(), static_shapes=True) for t in arguments]
        with tracing(), mode, torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
            graph = make_fx(step, get_decompositions(_WRITES))(*fakes)  # type: ignore[arg-type]
        out.pop("kept")
        at, count = _simplified(graph)

        def final(leaf: Any) -> Any:
            """Return the place of a tensor among the results and the arguments of the simplified graph."""
            if not isinstance(leaf, _Early):
                return leaf
            kind, k = at[leaf.position] if leaf.kind == "result" else leaf
            return Place(k if kind == "result" else count + k)

        results = tree_unflatten([*map(final, out["results"])], out["structure"])
        following = out["next"] and [*map(final, out["next"])]
        program = self._backend(graph, fakes, arguments)
        return StepProgram(program, first, results, following, self.pure)

    def _next(self, state: State, results: dict[str, Any], place: Callable[[Any], Any]) -> list[Any] | None:
        """Return the places of the tensors of the next step's state; None if its structure differs."""
        before, after = tree_flatten(state), tree_flatten(following(state, results))
        if before[1] != after[1] or results["writes"] or (results["moved"] or {}).get("writes"):
            return None
        if form_of(before[0]) != form_of(after[0]):
            return None
        return [place(new) for new in after[0] if isinstance(new, Tensor)]


def _look(readers: Sequence[Reader], losses: Mapping[str, Any]) -> list[Reading]:
    return [reader.known(losses) for reader in readers]


class _Early(NamedTuple):
    """The place of a tensor before a graph is simplified: ``"result"`` or ``"argument"``, and its position."""

    kind: str
    position: int


def _simplified(module: GraphModule) -> tuple[list[tuple[str, int]], int]:
    """Let a graph return each tensor that it computes once; return the places of its former results, and how many."""
    graph = module.graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    for node in list(graph.nodes):
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    (output,) = (node for node in graph.nodes if node.op == "output")
    position = {node: ("argument", k) for k, node in enumerate(given)}
    returned, places = list[Node](), list[tuple[str, int]]()
    for node in output.args[0]:
        if node not in position:
            position[node] = "result", len(returned)
            returned.append(node)
        places.append(position[node])
    output.args = (returned,)
    graph.eliminate_dead_code()
    module.recompile()
    return places, len(returned)


# Their schemas do not say that they write running statistics; those of their decompositions do.
_WRITES = [torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm, torch.ops.aten.miopen_batch_norm]
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _Function:
    """One of the user's functions in a trace: a graph of it, for each form of its arguments."""

    def __init__(
        self,
        role: str,
        known: Sequence[tuple[Arguments, UserGraph, list[Tensor]]],
        live: Sequence[Tensor],
        shapes: Sequence[torch.Size],
    ) -> None:
        self._role, self._known, self._live, self._shapes = role, known, live, shapes

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = tree_flatten(list(arguments))
        leaves = [replacement(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        wanted = Arguments(self._role, leaves, structure, self._live, self._shapes)
        for own, graph, reads in self._known:
            if own == wanted:
                return graph(leaves, self._live, reads)
        raise Needed(wanted)

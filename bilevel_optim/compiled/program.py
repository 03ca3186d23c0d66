"""A step as one program: the library's own code is traced by itself, with the user's functions as graphs in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..oracle.substitution import replacement
from ..problem.vector import as_variable
from ..pytree import tree_flatten, tree_unflatten
from ..tracing import tracing
from .backend import Maker, Program
from .forms import forms_of, structure_of
from .places import Place, Writer, on_tensors
from .pure import PureStep, Results, State, following
from .reading import Arguments, Needed, Reader, Reading, Together, UserGraph, look
from .reasons import Refused
from .rewrites import require_drawn_before

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
        results: Results,
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
            small = self.program.small
            self._once = self.program if small is None else small.reusing(self.writer.kept)
        return Call(arguments, self._once([*arguments]))

    def results(self, call: Call) -> Results:
        """Return the step's results from a call."""
        found: Results = on_tensors(call.values.__getitem__, self._results)
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
        """Return the program for what the losses read at present, and that; None if none fits."""
        try:
            with _NOTHING if torch.is_grad_enabled() else torch.enable_grad():
                if self._together is not None and (both := self._together.program(losses)) is not None:
                    return both
                readings = look(_look, self.readers, losses)  # one switch of Dynamo for all
        except Exception:  # `Unread`, or the losses have changed in a way that torch's guards do not see
            return None
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
            readings += [reader.look(reader.compiled, given.losses) for reader in self.readers[len(readings) :]]
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
                reader = self._read(arguments)
                try:
                    readings.append(reader.look(reader.compiled, losses))
                except Exception:  # if the step needs this loss, the trace will tell
                    self.readers.pop()
        return readings

    def _read(self, arguments: Arguments) -> Reader:
        plain = self.pure.differentiates_twice
        self.readers.append(Reader(arguments, self._live, self.pure.buffers, plain=plain, constant=self.constant))
        return self.readers[-1]

    def _traced(self, readings: Sequence[Reading], arguments: list[Tensor], given: Given) -> StepProgram:
        """Trace the step: the library's code runs once, on tensors without values."""
        own, structure = tree_flatten((given.drawn, given.random))
        shapes = [t.shape for t in self._live]
        out: dict[str, Any] = {}

        def step(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors)
            # A loss may differentiate in tensors that it reads.
            parts = [[_like(next(rest), t) for t in reading.tensors] for reading in readings]
            leaves = [_like(next(rest), t) if isinstance(t, Tensor) else t for t in own]
            drawn, random = tree_unflatten(leaves, structure)
            state = on_tensors(lambda _: next(rest), given.state)
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
            at = {id(t): k - len(tensors) for k, t in enumerate(tensors)}
            returned: list[Tensor] = []

            def place(t: Tensor) -> Place:
                if id(t) not in at:
                    at[id(t)] = len(returned)
                    returned.append(t)
                return Place(at[id(t)])

            out["results"], out["next"] = on_tensors(place, results), self._next(state, results, place)
            out["kept"] = results, drawn, random, state  # so that no id is used twice
            return returned

        # Without a `ShapeEnv`, item() of a fake tensor is the value that the tensor has now, without an error.
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
        fakes: list[Tensor] = [mode.from_tensor(t.detach(), static_shapes=True) for t in arguments]
        with tracing(), mode, torch.no_grad(), torch.autograd.set_multithreading_enabled(False):
            graph = make_fx(step, get_decompositions(_WRITES))(*fakes)  # type: ignore[arg-type]
        require_drawn_before(graph)
        out.pop("kept")
        places = _simplified(graph)
        final = partial(on_tensors, lambda place: places[place] if place >= 0 else place)
        results, following = final(out["results"]), final(out["next"])
        if any([write.table >= 0 for write in results.estimate.writes]):
            raise RuntimeError("a step writes rows of a table that is not in its state, so a graph cannot return them")
        program = self._backend(graph, fakes, arguments)
        reads = sum([len(reading.tensors) for reading in readings])
        return StepProgram(program, reads, results, following, self.pure)

    def _next(self, state: State, results: Results, place: Callable[[Tensor], Place]) -> list[Place] | None:
        """Return the places of the tensors of the next step's state; None if its structure differs."""
        before, after = list[Tensor](), list[Tensor]()
        structure = structure_of(state, before)
        if results.estimate.writes or structure_of(following(state, results), after) != structure:
            return None
        return [*map(place, after)] if forms_of(before) == forms_of(after) else None


def _look(readers: Sequence[Reader], losses: Mapping[str, Any]) -> list[Reading]:
    return [reader.look(reader.known, losses) for reader in readers]


def _like(fake: Tensor, t: Tensor) -> Tensor:
    return as_variable(fake) if t.requires_grad else fake


def _simplified(module: GraphModule) -> list[Place]:
    """Let a graph return each tensor that it computes once; return the places of its former results."""
    graph = module.graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    for node in list(graph.nodes):
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    (output,) = (node for node in graph.nodes if node.op == "output")
    at = {node: Place(k - len(given)) for k, node in enumerate(given)}
    returned, places = list[Node](), list[Place]()
    for node in output.args[0]:
        if node not in at:
            at[node] = Place(len(returned))
            returned.append(node)
        places.append(at[node])
    output.args = (returned,)
    graph.eliminate_dead_code()
    module.recompile()
    return places


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

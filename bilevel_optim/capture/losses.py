"""Losses as pure functions: Dynamo reads each of them, and torch's own guards say when one has changed."""

from __future__ import annotations

import inspect
import itertools
import operator
import random
import re
import threading
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.eval_frame import remove_from_cache
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from ..compiled.alone import TRACING, alone
from ..oracle.evaluation import placed
from ..problem.tracing import Untraceable
from .draws import Data

__all__ = ["LossReader", "NotNow", "PureLoss", "Readers", "Reading", "Readings", "Unreadable"]

# What Dynamo does not look at by default, to be fast, is looked at too. A version need not have all of the names.
SETTINGS: dict[str, Any] = {
    name: value
    for name, value in {
        "allow_rnn": True,
        "side_effect_replay_policy": "error",
        "trace_autograd_ops": True,
        "skip_guards_on_constant_func_defaults": False,
        "skip_nnmodule_hook_guards": False,
        "specialize_int": True,
    }.items()
    if hasattr(dynamo.config, name)
}


_NUMBERS = itertools.count()


class Reading(NamedTuple):
    """A function as it is now.

    Attributes:
        graph: what it computes.
        places: where each input of the graph comes from: ``("x", i)`` and ``("y", i)`` are parameters,
            ``("argument", k)`` is the k-th tensor of the arguments, ``("read", j)`` another one.
        reads: the other tensors.
        live: the parameters.
    """

    graph: LossGraph
    places: tuple[tuple[str, int], ...]
    reads: list[Tensor]
    live: list[Tensor]

    def is_still(
        self,
        graph: LossGraph,
        tensors: Sequence[Tensor],
        x: Sequence[Tensor],
        y: Sequence[Tensor],
        arguments: Sequence[Tensor],
    ) -> bool:
        """Whether it is what is read in a call with this graph, these inputs, and these tensors of arguments."""
        if graph is not self.graph or not all(map(operator.is_, self.live, (*x, *y))):
            return False
        kinds = {"x": x, "y": y, "argument": arguments, "read": self.reads}
        others = {*map(id, arguments)}
        return all(
            [
                tensor is kinds[kind][i] and (kind == "argument" or id(tensor) not in others)
                for tensor, (kind, i) in zip(tensors, self.places, strict=True)
            ]
        )


class Called(NamedTuple):
    """What a call of a function gave: its output, its graph, and the inputs of that."""

    output: Any
    graph: LossGraph
    tensors: Sequence[Tensor]


class LossReader:
    """Hands a function to Dynamo: its graph, and the tensors that it reads now.

    One for each role and each form of the data, because torch keeps a limit of recompilations for each code object, and
    takes shapes that change between two calls of the same one for dynamic.

    Attributes:
        known: calls a function as it was read, in Dynamo's mode without compilation, and notes what it reads.
    """

    def __init__(self) -> None:
        self._last: Reading | None = None
        self._begin()

    def _begin(self, *, constant: bool = False) -> None:
        """Forget what was read; ``constant``: numbers and sizes that change are from now on no inputs of a graph."""
        self._constant = constant

        def call(function: Callable[..., Any], *arguments: Any) -> Any:
            if not torch.compiler.is_compiling():
                raise _Unread
            return function(*arguments)

        # Torch knows code by file, line and name, where it remembers which sizes and floats have changed; and it keeps
        # what it has compiled, in the globals of the function too, until it is told that there is no such code now.
        own = types.FunctionType(call.__code__.replace(co_name=f"call_{next(_NUMBERS)}"), {**globals()}, "call")
        weakref.finalize(own, remove_from_cache, own.__code__).atexit = False
        self.known: Callable[..., Any] = own
        self._read: Callable[..., Any] = _READ(own)

    def read(
        self,
        x: Sequence[Tensor],
        y: Sequence[Tensor],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        called: Called | None,
    ) -> Reading:
        """What a function computes from such arguments and from the live parameters.

        ``called`` is what it gave as it was read before, if it is as it was then.

        Raises:
            Untraceable: with Dynamo's reason and the user's line, if Dynamo cannot read it.
        """
        if called is None:
            _CALLED.last = None
            called = _noted(self._read_anew(function, arguments))
        output, graph, tensors = called
        own = Data.of(*arguments).tensors
        if self._last is not None and self._last.is_still(graph, tensors, x, y, own):
            return self._last
        sized = not all(isinstance(t, Tensor) for t in tensors)  # some sizes are inputs
        if (graph.wants_constants or sized) and not self._constant:
            self._begin(constant=True)
            return self.read(x, y, function, arguments, None)
        graph.settle(tensors, output)
        names = {id(t): ("argument", k) for k, t in enumerate(own)}
        for kind, live in (("x", x), ("y", y)):
            for i, t in enumerate(live):
                names[id(t)] = (kind, i)
        reads: list[Tensor] = []
        places = []
        for tensor in tensors:
            place = names.get(id(tensor))
            if place is None:
                place = names[id(tensor)] = ("read", len(reads))
                reads.append(tensor)
                if tensor.requires_grad and not tensor.is_leaf:
                    raise Untraceable("a loss uses a tensor with a graph of its own")
            places.append(place)
        if any(places[i][0] != "read" for i in graph.writes):
            raise Untraceable("a loss writes into a parameter or into its batch")
        self._last = Reading(graph, tuple(places), reads, [*x, *y])
        return self._last

    def _read_anew(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        settings = {"specialize_float": self._constant, "automatic_dynamic_shapes": not self._constant, **SETTINGS}
        state = random.getstate()  # what a loss draws is drawn when it is read
        try:
            with alone(), dynamo.config.patch(**settings), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Dynamo warns of is among its reasons
                return self._read(function, *arguments)
        except _Unread:
            raise NotNow("torch.compile is switched off here, or a torch dispatch mode is on") from None
        except Exception as error:
            raise Untraceable(_reason(error)) from error
        finally:
            random.setstate(state)


class _Unread(Exception):
    """A function is not as it was when Dynamo read it."""


class LossGraph:
    """What Dynamo has read of a function, as a pure function of tensors.

    Args:
        module: Dynamo's graph, which is changed.

    Attributes:
        results: stand for the results of the graph when the function is called, and are known again by identity.
        writes: the number of each input that the function would write into, and the result that is its new value.
        wants_constants: whether a number that is an input would have to be read on the host.
    """

    def __init__(self, module: GraphModule) -> None:
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.results = tuple(torch.zeros((), device="cpu") for _ in _results(module.graph))
        _write_apart(module)
        self.writes, complete = _write_nowhere(module, places)
        self.wants_constants = not _keep_numbers(module.graph)
        if any(node.name.startswith("random_value") for node in places):
            self._reason = "a loss draws random numbers (of Python's random)"
        elif not complete:
            self._reason = "a loss writes into a tensor that is not its own"
        else:
            self._reason = "a value is read on the host (.item())" if self.wants_constants else ""
        module.graph.lint()
        module.recompile()
        self._module = module
        self._output: list[Any] = []

    def settle(self, tensors: Sequence[Any], output: Any) -> None:
        """Note, at the first call, which results the function returns, and in which form.

        Raises:
            Untraceable: if it is not a pure function of tensors.
        """
        if self._output:
            return
        known = {id(t): _Slot(0, i) for i, t in enumerate(tensors)} | {
            id(t): _Slot(1, i) for i, t in enumerate(self.results)
        }
        leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        if not all(isinstance(t, Tensor) for t in tensors) or not all(id(t) in known for t in leaves):
            self._reason = self._reason or "what a loss reads or returns is not made of its own tensors"
        if self._reason:
            raise Untraceable(self._reason)
        self._output = [tree_map(lambda leaf: known[id(leaf)] if isinstance(leaf, Tensor) else leaf, output)]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        """What the function returns, and the new values of inputs that it would write into."""
        both = tensors, self._module(*tensors)
        (output,) = tree_map(lambda leaf: both[leaf[0]][leaf[1]] if isinstance(leaf, _Slot) else leaf, self._output)
        return output, {i: both[1][k] for i, k in self.writes.items()}


class _Slot:
    """A tensor of an output: of the inputs (0) or the results (1) the one of this number."""

    def __init__(self, *place: int) -> None:
        self._place = place

    def __getitem__(self, i: int) -> int:
        return self._place[i]


_CALLED = threading.local()  # the graph that was called last, with its tensors


def _noting(module: GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    """A backend of Dynamo: a call of the function notes the graph and its tensors."""
    graph = LossGraph(module)

    def note(*tensors: Any) -> tuple[Tensor, ...]:
        _CALLED.last = graph, tensors
        return graph.results

    return note


def _noted(output: Any) -> Called:
    """The call that was noted last, which gave this."""
    if _CALLED.last is None:
        raise Untraceable("a loss computes nothing with tensors")
    (graph, tensors), _CALLED.last = _CALLED.last, None
    return Called(output, graph, tensors)


def _call_known(calls: Sequence[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]) -> list[Called | None]:
    """Call functions, with these arguments, as they were read; None for each that is not what it was then."""
    found: list[Called | None] = []
    for known, function, arguments in calls:
        _CALLED.last = None
        try:
            output = known(function, *arguments)
        except _Unread:
            found.append(None)
        else:
            found.append(None if _CALLED.last is None else Called(output, *_CALLED.last))
    _CALLED.last = None
    return found


_READ: Callable[..., Any] = dynamo.optimize(_noting, nopython=True)  # one for all, because torch keeps every backend
_KNOWN: Callable[..., list[Called | None]] = dynamo.run(_call_known)  # as they were read, and never anew


class PureLoss:
    """What was read of a function, in its place: a function of its arguments, of the parameters, and of given tensors.

    Args:
        reading: of the function.
        x: the live upper parameters, in whose place an evaluation puts others.
        y: the live lower parameters, likewise.
        reads: the other tensors.

    Attributes:
        writes: whether the function writes into some of these.
        written: their new values as the last call would have written them, by their number.
    """

    def __init__(self, reading: Reading, x: Sequence[Tensor], y: Sequence[Tensor], reads: Sequence[Tensor]) -> None:
        self._reading, self._parameters, self._reads = reading, {"x": x, "y": y}, reads
        self.writes = bool(reading.graph.writes)
        self.written: dict[int, Tensor] = {}

    def __call__(self, *arguments: Any) -> Any:
        own = Data.of(*arguments).tensors
        tensors = []
        for kind, i in self._reading.places:
            if kind == "argument":
                tensors.append(own[i])
            elif kind == "read":
                tensors.append(self._reads[i])
            else:  # a call of torch, in which what stands for the parameter is put in its place
                live = self._parameters[kind][i]
                tensors.append(live.view_as(live))
        output, written = self._reading.graph(tensors)
        self.written = {self._reading.places[i][1]: value for i, value in written.items()}
        return output


class Readings(dict[str, Reading]):
    """All functions of a step by role: ``"upper"``, ``"upper features"``, ``"lower"``, ..., ``"projection"``."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides about the operations of a step."""
        return tuple((role, id(reading.graph), reading.places) for role, reading in self.items())

    @property
    def writes(self) -> bool:
        """Whether one of them writes into what it reads."""
        return any(reading.graph.writes for reading in self.values())

    @property
    def written(self) -> list[tuple[str, Tensor]]:
        """The tensors that they write into, each with the role."""
        return [(role, own.reads[own.places[i][1]]) for role, own in self.items() for i in own.graph.writes]

    @property
    def reads(self) -> dict[str, list[Tensor]]:
        """The tensors that are read beside parameters and arguments."""
        return {role: reading.reads for role, reading in self.items()}

    def losses(
        self, x: Sequence[Tensor], y: Sequence[Tensor], reads: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, PureLoss]:
        """The functions with other tensors in place of those."""
        return {role: PureLoss(reading, x, y, reads[role]) for role, reading in self.items()}


class NotNow(Untraceable):
    """Nothing can be captured at present, whatever it is."""


class Unreadable(Untraceable):
    """A function cannot be captured."""

    def __init__(self, reason: str, role: str, function: Callable[..., Any]) -> None:
        super().__init__(reason)
        self.role, self.function = role, function


class Readers:
    """Reads all functions of steps with data of one form."""

    def __init__(self) -> None:
        self._readers: dict[str, LossReader] = {}
        self._examples: dict[int, Any] = {}  # values of features, by their graph

    def read(
        self,
        x: Sequence[Tensor],
        y: Sequence[Tensor],
        functions: Mapping[str, Callable[..., Any]],
        arguments: Mapping[str, tuple[Any, ...]],
        *,
        row: bool,
    ) -> Readings:
        """What the functions are now.

        Args:
            x: the live upper parameters.
            y: the live lower parameters.
            functions: by role.
            arguments: of each but features, which have those of their loss; functions without are left out.
            row: whether a loss sees one row of y.
        """
        readers = self._readers
        own, calls = {}, {}
        for role, function in functions.items():
            values = arguments.get(role.removesuffix(" features"))
            if values is not None:
                own[role] = values
                if role not in readers:
                    readers[role] = LossReader()
                if f"{role} features" not in own:
                    calls[role] = (readers[role].known, function, values)
        readings = Readings()
        row_of_y = placed(y, [t.detach()[0] for t in y]) if row else nullcontext()
        with TRACING, row_of_y, torch.enable_grad():
            called = dict(zip(calls, _KNOWN([*calls.values()]), strict=True))
            for role, values in own.items():
                function, features = functions[role], readings.get(f"{role} features")
                try:
                    if features is not None:
                        values = (self._example(features, x, y, values),)
                        (called[role],) = _KNOWN([(readers[role].known, function, values)])
                    readings[role] = readers[role].read(x, y, function, values, called[role])
                except NotNow:
                    raise
                except Untraceable as error:
                    raise Unreadable(str(error), role, function) from error
        return readings

    def _example(self, features: Reading, x: Sequence[Tensor], y: Sequence[Tensor], arguments: tuple[Any, ...]) -> Any:
        """Features like those of the step: of their values nothing is read."""
        known = self._examples.get(id(features.graph))
        if known is None:
            known = self._examples[id(features.graph)] = PureLoss(features, x, y, features.reads)(*arguments)
            known = self._examples[id(features.graph)] = tree_map(_detached, known)
        return known


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _results(graph: Graph) -> Sequence[Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    results: Sequence[Node] = output.args[0]
    return results


def _reason(error: Exception) -> str:
    """What Dynamo says in one sentence, and where in the user's code."""
    error = getattr(error, "inner_exception", error)  # of a backend, which is ours
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "side effects" in first:
        changed = re.findall(r"\[.*\]", first)
        first = f"a loss changes Python values as it runs {''.join(changed[-1:])}"
    elif "recompile_limit" in first or "recompile limit" in text:
        first = "what a loss reads keeps changing, each time to another value"
    elif "(Generator)" in text:
        first = "a loss draws random numbers (of a generator)"
    elif "UnspecializedPythonVariable" in text or "qualname: Random." in text:
        first = "a loss draws random numbers (of Python's random)"
    elif "marked as skipped" in first and (called := re.search(r"(?:function|builtin) `(.+?)`", text)):
        first = f"a loss calls {called[1]}, which Dynamo does not read"
    elif "data-dependent" in first.lower():
        first = "a value is read on the host (a branch on it)"
    places = [p for p in re.findall(r'File "(.+)", line (\d+), in (.+)', text) if p[0] != __file__]
    where = " ({}, line {}, in {})".format(*places[-1]) if places else ""
    return first.strip().rstrip(".") + where


# ----------------------------------------------------------------------------------------- graphs without effects


def _write_nowhere(module: GraphModule, places: Sequence[Node]) -> tuple[dict[int, int], bool]:
    """Make writes into inputs results of the graph.

    Gives the number of each such input and that of the result, and whether these are all that is written into.
    """
    graph = module.graph
    current: dict[Node, Node] = {}
    rewritten = Counter[Node]()
    for node in list(graph.nodes):
        for place, value in current.items():
            node.replace_input_with(place, value)
        origin = {current.get(place, place): place for place in places}
        target = node.args[0] if node.args else None
        with graph.inserting_after(node):
            if node.op == "call_method" and node.target in _IN_PLACE and target in origin:
                new = graph.call_function(_IN_PLACE[node.target], node.args, node.kwargs)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
                current[origin[target]] = new
                rewritten[origin[target]] += 1
            elif node.target is F.batch_norm:
                _running_statistics(graph, node, origin, current)
    finals = [*_results(graph)]
    writes = {places.index(place): len(finals) + k for k, place in enumerate(current)}
    (output,) = (node for node in graph.nodes if node.op == "output")
    output.args = ((*finals, *current.values()),)
    module.recompile()
    return writes, _leaves_alone(module, places, rewritten)


def _leaves_alone(module: GraphModule, places: Sequence[Node], rewritten: Mapping[Node, int]) -> bool:
    """Whether a graph writes into none of its inputs, of whose examples Dynamo has made so many writes."""

    def versions() -> list[int]:
        return [getattr(example, "_version", 0) for example in examples]

    examples = [place.meta.get("example_value") for place in places]
    before = versions()
    if before == [rewritten.get(place, 0) for place in places]:
        return True  # those that are rewritten
    with torch.enable_grad():  # inputs that share memory have a version too
        module(*examples)
    return versions() == before


_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    "add_": torch.add,
    "sub_": torch.sub,
    "mul_": torch.mul,
    "lerp_": torch.lerp,
}


def _running_statistics(graph: Graph, node: Node, origin: dict[Node, Node], current: dict[Node, Node]) -> None:
    """Let a normalisation give its new statistics instead of writing them."""
    given = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    own = given.arguments
    if own["training"] is not True or not isinstance(own["running_mean"], Node):
        return
    for name, new in (("running_mean", _new_mean), ("running_var", _new_variance)):
        if own[name] in origin:
            current[origin[own[name]]] = graph.call_function(new, (own[name], own["input"], own["momentum"]))
            own[name] = None
    own["momentum"] = 0.0
    node.args, node.kwargs = tuple(own.values()), {}


def _new_mean(mean: Tensor, values: Tensor, momentum: Any) -> Tensor:
    now = values.detach().to(mean.dtype).mean([0, *range(2, values.dim())])
    moved: Tensor = (1 - momentum) * mean + momentum * now
    return moved


def _new_variance(variance: Tensor, values: Tensor, momentum: Any) -> Tensor:
    now = values.detach().to(variance.dtype).var([0, *range(2, values.dim())], unbiased=True)
    moved: Tensor = (1 - momentum) * variance + momentum * now
    return moved


# What takes a tensor in place of a number: functions of torch and of Python, and methods.
_NAMES = ("add", "sub", "mul", "div", "pow", "neg", "gt", "ge", "lt", "le", "eq", "ne", "where")
_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "neg", "gt", "ge", "lt", "le", "eq", "ne")
_ARITHMETIC = {key: getattr(torch, name) for name in _NAMES for key in (name, getattr(torch, name))}
_ARITHMETIC |= {function: function for function in (getattr(operator, name) for name in _OPERATORS)}


def _keep_numbers(graph: Graph) -> bool:
    """Leave numbers that a tensor holds (a schedule, which Dynamo hands over as one) on the device, if this can be."""
    numbers: set[Node] = set()
    for node in list(graph.nodes):
        own = [i for i, argument in enumerate(node.args) if isinstance(argument, Node) and argument in numbers]
        if node.target == "item" or getattr(node.target, "__name__", "") == "wrapped_item":  # of NumPy's arrays
            node.op, node.target = "call_function", Tensor.detach
            numbers.add(node)
        elif own and node.target in _ARITHMETIC and not node.kwargs:
            node.op, node.target = "call_function", _ARITHMETIC[node.target]
            if set(node.all_input_nodes) <= numbers:
                numbers.add(node)
            else:
                node.target = _BesideNumbers(node.target, own)
    for node in reversed(graph.nodes):
        if not numbers.isdisjoint(node.all_input_nodes) and not node.users and node.op == "call_function":
            graph.erase_node(node)
    known = numbers | {node for node in graph.nodes if isinstance(node.target, _BesideNumbers)}
    return all(user in known for number in numbers for user in number.users)


class _BesideNumbers:
    """A function some of whose arguments are numbers, which do not decide about the type of its result."""

    __name__ = "beside_numbers"

    def __init__(self, function: Callable[..., Tensor], numbers: Sequence[int]) -> None:
        self._function, self._numbers = function, numbers

    def __call__(self, *arguments: Any) -> Tensor:
        given = [*arguments]
        kinds = [a.dtype for i, a in enumerate(given) if isinstance(a, Tensor) and i not in self._numbers]
        kind = next((kind for kind in kinds if kind.is_floating_point), torch.get_default_dtype())
        exact = torch.promote_types(kind, torch.float32)  # in which low precision computes with a number
        for i in self._numbers:
            given[i] = given[i].to(exact)
        result: Tensor = self._function(*given)
        return result.to(kind) if result.is_floating_point() else result


def _write_apart(module: GraphModule) -> None:
    """Operations that cannot be differentiated twice, mapped or traced as they stand, as others that can."""
    for part in [*module.children()]:
        if isinstance(part, GraphModule):
            _write_apart(part)
            part.recompile()
    for node in list(module.graph.nodes):
        called = getattr(node.target, "__name__", str(node.target))
        if node.op != "call_function":
            continue
        if called == "one_hot" and node.args[1:2] and node.args[1] != -1:
            node.target = _one_hot
        elif called == "tag_activation_checkpoint":
            node.target, node.kwargs = _called, {}
        elif called == "autograd_function_apply":
            forward, backward = (getattr(module, body.target) for body in node.args[:2])
            node.target, node.args, node.kwargs = _function_of(forward, backward), node.args[2:], {}


def _called(body: Callable[..., Any], *arguments: Any) -> Any:
    return body(*arguments)


def _one_hot(classes: Tensor, count: int) -> Tensor:
    return (classes.unsqueeze(-1) == torch.arange(count, device=classes.device)).long()


def _function_of(forward: GraphModule, backward: GraphModule) -> Callable[..., Any]:
    """A ``torch.autograd.Function`` of two bodies, whose derivative can be differentiated and mapped.

    Dynamo's own has wrong second derivatives: what its backward pass uses is a constant to it.
    """
    for body in (forward, backward):
        for node in list(body.graph.nodes):
            if node.target is torch._C._set_grad_enabled:
                body.graph.erase_node(node)
        body.recompile()

    class Own(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            outputs, _ = forward(*inputs)
            return tuple(outputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            _, saved = forward(*ctx.saved_tensors)
            return tuple(backward(*gradients, *saved))

    def apply(*inputs: Any) -> Any:
        return Own.apply(*inputs)

    return apply

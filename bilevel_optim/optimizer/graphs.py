"""Functions of tensors as compiled graphs: traced once through all derivatives, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._guards import tracing as installed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..problem.tracing import Untraceable, tracing
from .calls import Listed
from .looks import blind_to_unused, look_later
from .parts import in_parts, number_parts, out_of_place, written_into
from .workspace import listed, written

__all__ = ["Backend", "Graph", "Signature", "backend_of", "signature"]

LONGEST = 3000  # operations of a graph that is compiled as a whole
LARGE = 2**14  # entries of a tensor from which on operations take longer than calls of compiled parts
APART = {"pattern_matcher": False}  # or a product that is added to a vector would be made into a copy of the vector
# Decomposed, what a node saves of its own result would hold the node, and neither would ever be freed.
DETACHED: dict[torch._ops.OpOverload, Callable[..., Any]] = {torch.ops.aten.detach.default: lambda t: NotImplemented}
SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)  # their argument
Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]


class Signature(NamedTuple):
    """What a graph is made for: all of its arguments but the tensors' values."""

    structure: TreeSpec
    constants: tuple[Any, ...]  # leaves that are not tensors; None where there is one
    tensors: tuple[Any, ...]  # shape, dtype and device of each tensor


def signature(arguments: Any) -> tuple[Signature, list[Tensor]]:
    """The signature of arguments, and their tensors."""
    leaves, structure = tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    kinds = tuple((t.shape, t.dtype, t.device) for t in tensors)
    return Signature(structure, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), kinds), tensors


class Graph:
    """A function as a graph, for arguments of one signature.

    Args:
        function: takes one pytree and returns one; it may differentiate, but not read a value.
        arguments: for which it is traced.
        backend: compiles the graph.
        own: tensors that it gets among its arguments, and must not read elsewhere. Default: none.

    Attributes:
        nodes: operations in the graph.
        read: tensors whose values it has as constants, because the function looked at them on the host; and these.
        shared: outputs that share memory with another or with an argument, known after the first call.
    """

    def __init__(
        self, function: Callable[[Any], Any], arguments: Any, backend: Backend, own: Sequence[Tensor] = ()
    ) -> None:
        self.signature, tensors = signature(arguments)
        structure = self.signature.structure
        leaves = tree_flatten(arguments)[0]
        results: list[Any] = []

        def flat(*values: Tensor) -> list[Tensor]:
            remaining = iter(values)
            given = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            result = function(tree_unflatten(given, structure))
            results[:] = tree_flatten(result)
            return [leaf for leaf in results[0] if isinstance(leaf, Tensor)]

        try:
            # One mode for the descriptions of all results, which otherwise get one each: most of the time it takes.
            modes = TracingContext(FakeTensorMode(allow_fallback_kernels=True))
            with installed(modes), tracing() as trace, torch.enable_grad():
                module = make_fx(flat, DETACHED)(*(t.detach() for t in tensors))
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(_reason(error)) from error
        found, self._structure = results
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in found]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in found]
        self.outputs = sum(self._is_tensor)
        number_parts(module, trace.cuts)
        self.read = [(t, t.detach().clone()) for t in trace.read]
        self._captured = _lifted(module, own)
        blind_to_unused(module, trace.looks)
        look_later(module, trace.looks)
        self.nodes = len(module.graph.nodes)
        self.shared: frozenset[int] | None = None
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        large = (t.numel() > LARGE and not _is_looked_up(p) for p, t in zip(places, tensors, strict=False))
        long = self.nodes > LONGEST or any(large)
        parts = in_parts(module, backend) if long else None
        for node in module.graph.nodes:
            node.meta.pop("val", None)  # of another fake mode, which Inductor's C++ wrapper takes for its own
        with torch.no_grad():
            self._run = parts or backend(module, [*(t.detach() for t in tensors), *self._captured])

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of the result."""
        outputs: Sequence[Tensor] = self._run(*tensors, *self._captured)
        if self.shared is None:
            known = {_storage(t) for t in (*tensors, *self._captured) if t.numel()}
            shared = set()
            for i, output in enumerate(outputs):
                if output.numel():
                    if _storage(output) in known:
                        shared.add(i)
                    known.add(_storage(output))
            self.shared = frozenset(shared)
        return outputs

    def each(
        self,
        tensors: Sequence[Tensor],
        data: Sequence[Sequence[Tensor]],
        carried: Sequence[tuple[int, int]],
        lasting: Sequence[int] = (),
    ) -> Iterator[Sequence[Tensor]]:
        """The tensors of the results of calls that follow each other; valid until the next one.

        Args:
            tensors: the first arguments of the first call.
            data: the others of each call; all of the sizes, strides and types that the graph was made for.
            carried: which argument of the next call is which result.
            lasting: numbers of results that stay valid for TURNS calls. Default: none.
        """
        first = list(tensors)
        fast = self._run.listed if isinstance(self._run, _Direct) and self.shared is not None else None
        if fast is not None:
            yield from fast.each([*first, *data[0], *self._captured], len(first), data, carried, lasting)
            return
        for own in data:
            outputs = [*self([*first, *own])]
            for i in lasting:
                outputs[i] = outputs[i].clone()
            yield outputs
            for argument, result in carried:
                first[argument] = outputs[result]

    def structured(self, outputs: Sequence[Any]) -> Any:
        """The result as the function gave it, with these in place of the tensors."""
        remaining = iter(outputs)
        leaves = [
            next(remaining) if is_tensor else constant
            for is_tensor, constant in zip(self._is_tensor, self._constants, strict=True)
        ]
        return tree_unflatten(leaves, self._structure)


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _lifted(module: GraphModule, own: Sequence[Tensor]) -> list[Tensor]:
    """Make what the graph holds as constants arguments of it; raises for what a graph must not do."""
    graph = module.graph
    captured: list[Tensor] = []
    place = [node for node in graph.nodes if node.op == "placeholder"]
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if not isinstance(value, Tensor):
                continue
            if value.requires_grad and not value.is_leaf:
                raise Untraceable("the loss uses a tensor with a graph of its own")
            with graph.inserting_after(place[-1]) if place else graph.inserting_before(None):
                new = graph.placeholder(f"captured_{len(captured)}")
            new.meta["val"] = value.detach()
            place.append(new)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            captured.append(value.detach())
        elif node.op == "call_function" and "profiler" in str(node.target):
            node.replace_all_uses_with(None)
            graph.erase_node(node)
    outside = set(place)
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _without_dropout(node, schema):
            raise Untraceable(f"a loss draws random numbers ({node.target})")
        if schema is not None and schema.is_mutable:
            for argument, value in zip(schema.arguments, node.args, strict=False):
                if argument.is_write and value in outside:
                    raise Untraceable(f"a loss writes into a tensor that is not its own ({node.target})")
    out_of_place(graph)
    fixed = written_into(graph)
    for node in [*graph.nodes]:
        if node.target in SAME and node not in fixed:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    graph.lint()
    memory = {_storage(t) for t in own if t.numel()}
    for node, value in zip(place[len(place) - len(captured) :], captured, strict=True):
        if node.users and _storage(value) in memory:
            raise Untraceable("a loss reads its parameters out of torch's sight (checkpointing, an autograd function)")
    held = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    for name in held.difference(node.target for node in graph.nodes if node.op == "get_attr"):
        delattr(module, name)  # or it would be an argument too
    module.recompile()
    return captured


def _is_looked_up(node: Node) -> bool:
    """Whether of an argument only some rows are used, so that its size does not matter."""
    looks = torch.ops.aten.index.Tensor
    return all(use.target is looks and use.args[0] is node for use in node.users)


def _without_dropout(node: Node, schema: Any) -> bool:
    """Whether an operation, such as attention, would draw random numbers for its dropout alone, which it does not."""
    for argument, value in zip_longest(schema.arguments, node.args):
        if argument.name == "dropout_p":
            given = node.kwargs.get("dropout_p", argument.default_value if value is None else value)
            return isinstance(given, float) and given == 0
    return False


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if "data-dependent" in text.lower() or "get value out of" in text or "_local_scalar_dense" in text:
        return "a value is read on the host (a branch on it, or .item())"
    if "Generator" in text:  # what torch 2.11 says of one
        return "a loss draws random numbers (of a generator)"
    return text


class _Direct:
    """What Inductor has compiled, without the layers around it once a call has shown that they change nothing."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled: Callable[..., Any] | None = compiled
        self._listed: Callable[..., Any] | None = None

    @property
    def listed(self) -> Listed | None:
        """What is left without them."""
        return self._listed if self._compiled is None and isinstance(self._listed, Listed) else None

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        if self._compiled is None:
            assert self._listed is not None
            found: Sequence[Tensor] = self._listed([*values])
            return found
        outputs: Sequence[Tensor] = self._compiled(*values)
        if self._listed is None:
            inner = written(self._compiled)
            self._listed = None if inner is None else listed(inner, values)
            if self._listed is None:
                self._listed = self._compiled  # which is all there is
                return outputs
            first, second = (self._listed([*values]) for _ in range(2))
            if _alike(outputs, first, values) and _alike(first, second, values):
                self._compiled = None
        return outputs


def _alike(outputs: Sequence[Any], others: Sequence[Any], values: Sequence[Tensor]) -> bool:
    """Whether all are tensors, the same bit for bit, and share memory alike, with each other and with these values."""
    if len(outputs) != len(others) or not all(isinstance(t, Tensor) for t in (*outputs, *others)):
        return False
    forms = [[(t.shape, t.stride(), t.dtype, t.device, t.storage_offset()) for t in some] for some in (outputs, others)]
    places = [[_storage(t) for t in (*values, *some)] for some in (outputs, others)]
    apart = {*places[0]} & {*places[1]} <= {*map(_storage, values), 0}
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(outputs, others, strict=True))
    first, second = ([*map(some.index, some)] for some in places)
    return forms[0] == forms[1] and first == second and apart and same


def backend_of(backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None) -> Backend:
    """What ``torch.compile`` takes as its backend, without the look at Python code that a graph does not need."""
    if backend == "inductor":
        import torch._inductor as inductor

        settings = {**(inductor.list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}

        def compiled(module: GraphModule, example: list[Tensor]) -> Callable[..., Any]:
            # Inductor keeps in its cache what was compiled in a shape environment, as dynamo has one.
            fake = FakeTensorMode(shape_env=ShapeEnv())
            own = {**(APART if any(t.is_cpu and t.numel() > LARGE for t in example) else {}), **settings}
            with torch.no_grad(), installed(TracingContext(fake)):
                known: list[Any] = [fake.from_tensor(t, static_shapes=True) for t in example]
                found: Callable[..., Any] = inductor.compile(module, known, options=own or None)
            if settings.get("triton.cudagraphs") and any(t.is_cuda for t in example):
                # The next replay of a CUDA graph writes over what this one gives.
                return lambda *values: [t.clone() for t in found(*values)]
            writes = any(node.op == "placeholder" for node in written_into(module.graph))  # once for each call
            return found if writes else _Direct(found)

        return compiled
    if backend == "eager":
        return lambda module, example: module.forward
    if callable(backend):
        return backend
    from torch._dynamo.backends.registry import lookup_backend

    found: Backend = lookup_backend(backend)
    return found

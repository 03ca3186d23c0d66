"""Functions of tensors as compiled graphs: traced once through all derivatives, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._guards import tracing as installed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..compiled.alone import alone
from ..problem.tracing import Untraceable, tracing
from .backends import LARGE, Backend
from .outline import in_parts, number_parts, out_of_place, written_into
from .small_cpu import Direct

__all__ = ["LONGEST", "Graph", "storage_of"]

LONGEST = 3000  # operations of a graph that is compiled as a whole
# Decomposed, what a node saves of its own result would hold the node, and neither would ever be freed.
DETACHED: dict[torch._ops.OpOverload, Callable[..., Any]] = {torch.ops.aten.detach.default: lambda t: NotImplemented}
SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)  # their argument


class _Regions:
    """What is told about a step while it is traced: the nodes after which its graph may be divided, ``ends``."""

    def __init__(self) -> None:
        self.ends: list[Node] = []

    def end_region(self) -> None:
        mode = get_proxy_mode()
        if mode is not None:
            self.ends.append(next(iter(reversed(mode.tracer.graph.nodes))))


class Graph:
    """A function as a graph, for arguments of one signature.

    Args:
        function: takes one pytree and returns one; it may differentiate, but not read a value.
        arguments: for which it is traced.
        backend: compiles the graph.
        own: tensors that it gets among its arguments, and must not read elsewhere. Default: none.

    Attributes:
        nodes: operations in the graph.
        shared: outputs that share memory with another or with an argument, known after the first call.
    """

    def __init__(
        self, function: Callable[[Any], Any], arguments: Any, backend: Backend, own: Sequence[Tensor] = ()
    ) -> None:
        leaves, structure = tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results: list[Any] = []
        trace = _Regions()

        def flat(*values: Tensor) -> list[Tensor]:
            remaining = iter(values)
            given = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            result = function(tree_unflatten(given, structure))
            results[:] = tree_flatten(result)
            return [leaf for leaf in results[0] if isinstance(leaf, Tensor)]

        try:
            # One mode for the descriptions of all results, which otherwise get one each: most of the time it takes.
            modes = TracingContext(FakeTensorMode(allow_fallback_kernels=True))
            with alone(), installed(modes), tracing(trace), torch.enable_grad():
                module = make_fx(flat, DETACHED)(*(t.detach() for t in tensors))
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(_reason(error)) from error
        found, self._structure = results
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in found]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in found]
        self.outputs = sum(self._is_tensor)
        number_parts(module, trace.ends)
        self._captured = _lifted(module, own)
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
            known = {storage_of(t) for t in (*tensors, *self._captured) if t.numel()}
            shared = set()
            for i, output in enumerate(outputs):
                if output.numel():
                    if storage_of(output) in known:
                        shared.add(i)
                    known.add(storage_of(output))
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
        fast = self._run.calls if isinstance(self._run, Direct) and self.shared is not None else None
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


def storage_of(t: Tensor) -> int:
    """The memory of a tensor."""
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
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _without_dropout(node, schema):
            raise Untraceable(f"a loss draws random numbers ({node.target})")
    out_of_place(graph)
    fixed = written_into(graph)
    if any(node in fixed for node in place):
        raise Untraceable("a loss writes into a tensor that is not its own")
    for node in [*graph.nodes]:
        if node.target in SAME and node not in fixed:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    graph.lint()
    memory = {storage_of(t) for t in own if t.numel()}
    for node, value in zip(place[len(place) - len(captured) :], captured, strict=True):
        if node.users and storage_of(value) in memory:
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

"""Parts of a graph that repeat, such as lower steps: each kind of part is compiled once and called several times."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx import Graph, GraphModule, Node, map_arg

__all__ = ["fold_repeats"]

OPERATIONS, TIMES = 8, 3  # least number of operations in a part, and of equal parts
LEAST, MOST = 2_000, 50_000  # operations of a graph that is searched; a smaller one compiles soon, to fewer kernels

_numbers = itertools.count()  # torch identifies parts by their names


class _Part(NamedTuple):
    """Operations in a row.

    Attributes:
        nodes: the operations.
        form: all of them without their inputs; parts of one form compute the same function.
        given: their inputs.
    """

    nodes: Sequence[Node]
    form: Any
    given: list[Node]


def fold_repeats(module: GraphModule) -> GraphModule:
    """Return a graph in which operations that repeat are calls of one subgraph, for `compile_fx`.

    Inductor takes some milliseconds for each operation of a graph. Lower steps, products with the Hessian and terms of
    a finite sum are the same operations again and again, so most of that time is saved. A small graph stays as it is,
    because on a CPU it becomes a single kernel, whereas a part has kernels of its own at each call.

    Args:
        module: a graph of functions, whose nodes have the metadata of `make_fx`.
    """
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    if not LEAST <= len(nodes) <= MOST:
        return module
    parts = [part for some in _repeats(nodes, _kinds(nodes)) if (part := _part_of(some)) is not None]
    kinds: dict[Any, list[_Part]] = defaultdict(list)
    for part in parts:
        kinds[part.form].append(part)
    kept = [(same, results) for same in kinds.values() if len(same) >= TIMES and (results := _results(same))]
    return _folded(module, kept) if kept else module


def _written(node: Node) -> list[Node]:
    """Return the tensors into which an operation writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[Node] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name), found.append)
    return found


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return tuple(map(_form, value)) if isinstance(value, (tuple, list)) else value


def _kinds(nodes: Sequence[Node]) -> Tensor:
    """Return a number for each operation, equal for those that differ only in their tensors."""
    found: dict[Any, int] = {}
    kinds = []
    for node in nodes:
        plain = map_arg((node.args, node.kwargs), lambda n: "*")
        kinds.append(found.setdefault((node.target, repr(plain), _form(node.meta.get("val"))), len(found)))
    return torch.tensor(kinds, device="cpu")


def _repeats(nodes: Sequence[Node], kinds: Tensor) -> list[Sequence[Node]]:
    """Return rows of operations that occur several times one after the other, those that save most first."""
    n, (run, first, period) = len(nodes), (0, 0, 0)
    for p in range(OPERATIONS, n // TIMES + 1):
        differs = (kinds[p:] != kinds[:-p]).nonzero().flatten()
        ends = torch.cat([differs.new_tensor([-1]), differs, differs.new_tensor([n - p])])
        longest, place = (ends.diff() - 1).max(0)
        if longest > run and longest >= (TIMES - 1) * p:  # of two periods, the shorter one saves more
            run, first, period = int(longest), int(ends[place]) + 1, p
    if not run:
        return []
    begin = _quietest(nodes, first, period, run)
    end = begin + (first + run + period - begin) // period * period
    found = [nodes[i : i + period] for i in range(begin, end, period)]
    return found + _repeats(nodes[:begin], kinds[:begin]) + _repeats(nodes[end:], kinds[end:])


def _quietest(nodes: Sequence[Node], begin: int, period: int, run: int) -> int:
    """Return the begin of the first part for which parts leave least to each other, such as y between lower steps."""
    place = {node: i for i, node in enumerate(nodes)}
    last = {i: max((place.get(user, len(nodes)) for user in nodes[i].users), default=i) for i in range(len(nodes))}
    # Several results in one stay with what takes them apart.
    cost = [1 if isinstance(node.meta.get("val"), Tensor) else len(nodes) for node in nodes]
    middle = begin + (run // period) // 2 * period

    def crossing(shift: int) -> tuple[int, int]:
        at = middle + shift
        return sum(cost[i] for i in range(at - period, at) if last[i] >= at), shift

    most = min(period, run - (TIMES - 1) * period + 1)
    return begin + min(crossing(shift) for shift in range(most))[1]


def _part_of(nodes: Sequence[Node]) -> _Part | None:
    """Return operations in a row as a part; None if others use a result that is no tensor, or it writes into others."""
    place = {node: i for i, node in enumerate(nodes)}
    given: dict[Node, int] = {}
    form = []
    for node in nodes:

        def named(n: Node) -> Any:
            return ("local", place[n]) if n in place else ("given", given.setdefault(n, len(given)))

        arguments = map_arg((node.args, node.kwargs), named)
        form.append((node.target, repr(arguments), _form(node.meta.get("val"))))
        if not isinstance(node.meta.get("val"), Tensor) and any(user not in place for user in node.users):
            return None
        for t in _written(node):
            while (base := _base(t)) is not None:
                t = base
            if t not in place:  # the tensor in whose memory it is
                return None
    return _Part(nodes, (tuple(form), tuple(_form(n.meta.get("val")) for n in given)), [*given])


def _base(node: Node) -> Node | None:
    """Return the base of an operation that returns a view; None for others."""
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, Node) and _base(source) is not None else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None


def _folded(module: GraphModule, kinds: Sequence[tuple[Sequence[_Part], Sequence[int]]]) -> GraphModule:
    """Return the graph with a call for each part; ``kinds`` are equal parts with the results that others use."""
    named = {f"repeated_{next(_numbers)}": own for own in kinds}
    where = {part.nodes[0]: (name, part, results) for name, (same, results) in named.items() for part in same}
    inside = {node for same, _ in kinds for part in same for node in part.nodes}
    graph, made = Graph(), dict[Node, Node]()

    def at(node: Node) -> Node:
        if node not in made:  # a view of a result or of an input of a part
            base = _base(node)
            made[node] = at(base) if base is not None and _written(node) else graph.node_copy(node, at)
        return made[node]

    for node in module.graph.nodes:
        if node in where:
            name, part, results = where[node]
            call = graph.call_function(invoke_subgraph, (graph.get_attr(name), name, *map(at, part.given)))
            for j, i in enumerate(results):
                made[part.nodes[i]] = graph.call_function(operator.getitem, (call, j))
        elif node not in inside:
            made[node] = graph.node_copy(node, at)
    root = torch.nn.Module()
    for name in {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}:
        setattr(root, name, getattr(module, name))
    for name, (same, results) in named.items():
        setattr(root, name, _subgraph(same[0], results))
    return GraphModule(root, graph)


def _results(same: Sequence[_Part]) -> list[int]:
    """Return which operations' results are needed outside, in some part: no views, which are made again there."""
    found = set()
    for part in same:
        own = {node: i for i, node in enumerate(part.nodes)}
        needed = [node for node in part.nodes if any(user not in own for user in node.users)]
        while needed:
            node = needed.pop()
            base = _base(node)
            if base is None:
                found.add(own[node])
            elif base in own:
                needed.append(base)
    return sorted(found)


def _subgraph(part: _Part, results: Sequence[int]) -> GraphModule:
    graph = Graph()
    made = {node: graph.placeholder(f"given_{k}") for k, node in enumerate(part.given)}
    for node in part.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple([made[part.nodes[i]] for i in results]))
    return GraphModule(torch.nn.Module(), graph)

"""A long graph in parts, of which equal ones are compiled once: a lower step, a product, whatever is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from .form import Form, picked

__all__ = ["in_parts", "number_parts", "out_of_place", "written_into"]

Function = Callable[..., Any]
WORTH = 0.7  # of the operations may be left, if equal parts count once, for parts to be worth it
END = 2**62  # after all parts; more than any size
OUT_OF_PLACE = {
    torch.ops.aten.add_.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.mul_.Tensor: torch.ops.aten.mul.Tensor,
}
SHORT = 4  # operations that are not worth a compilation


class _Call(NamedTuple):
    """A part of the graph.

    Attributes:
        kind: which of the different parts it is.
        inputs: picks the values that it takes.
        outputs: numbers of the values that it gives.
        done: numbers of the values that nobody needs after it.
    """

    kind: _Kind
    inputs: Callable[[list[Any]], tuple[Any, ...]]
    outputs: list[int]
    done: list[int]


class _Kind:
    """All parts that are the same operations, compiled when the first of them is called."""

    def __init__(self, whole: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        self.whole, self.nodes, self.inputs = whole, nodes, inputs
        self.outputs: list[int] = []  # places of the operations whose results some part of the kind has to give
        self.run: Function | None = None

    def __call__(self, values: Sequence[Tensor], backend: Callable[..., Function]) -> Sequence[Tensor]:
        if self.run is None:
            module = self._module()
            self.run = module.forward if len(self.nodes) <= SHORT else backend(module, [*values])
        listed = getattr(self.run, "calls", None)
        results: Sequence[Tensor] = self.run(*values) if listed is None else listed.known(values)
        return results

    def _module(self) -> fx.GraphModule:
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"value_{i}") for i, node in enumerate(self.inputs)}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {}
        graph.output([copies[self.nodes[i]] for i in self.outputs])
        return fx.GraphModule(self.whole, graph)


def number_parts(module: fx.GraphModule, ends: Sequence[fx.Node]) -> None:
    """Note in ``meta`` of which part each operation is, of a graph that may be cut after ``ends``."""
    behind, k = set(ends), 0
    for node in module.graph.nodes:
        node.meta["part"] = k
        k += node in behind


def in_parts(module: fx.GraphModule, backend: Callable[..., Function]) -> Callable[..., list[Any]] | None:
    """The graph as a function that calls its parts; None if these are hardly ever equal.

    Args:
        module: a traced graph, whose operations have in ``meta`` their part and their value.
        backend: compiles a part for example arguments.
    """
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    (result,) = next(iter(reversed(module.graph.nodes))).args
    assert isinstance(result, (list, tuple))
    owner = {node: node.meta["part"] for node in module.graph.nodes if node.op not in ("placeholder", "output")}
    _move_to_users(owner, written_into(module.graph))
    parts: dict[int, list[fx.Node]] = {k: [] for k in sorted({*owner.values()})}
    for node, k in owner.items():
        parts[k].append(node)
    number = {node: i for i, node in enumerate((*places, *owner))}
    last: dict[fx.Node, int] = {}
    for k, nodes in parts.items():
        for node in nodes:
            for used in node.all_input_nodes:
                last[used] = k
    for node in result:
        if isinstance(node, fx.Node):
            last[node] = max(parts) + 1
    kinds: dict[Any, dict[tuple[int, ...], _Kind]] = {}
    met: list[tuple[_Kind, list[fx.Node], list[fx.Node]]] = []
    structures = {k: _Structure.of(nodes) for k, nodes in parts.items()}
    for structure in sorted(structures.values(), key=lambda s: -len({*s.slots})):
        alike = kinds.setdefault(structure.key, {})
        if structure.one_of(alike) is None:
            alike[structure.places] = _Kind(module, structure.nodes, structure.inputs(structure.places))
    for k, nodes in parts.items():
        alike = kinds[structures[k].key]
        case = structures[k].one_of(alike)
        assert case is not None
        kind, inputs = alike[case], structures[k].inputs(case)
        given = [i for i, node in enumerate(nodes) if last.get(node, -1) > k]
        if any(not isinstance(nodes[i].meta.get("val"), Tensor) for i in given):
            return None
        kind.outputs = sorted({*kind.outputs, *given})
        met.append((kind, nodes, inputs))
    if sum(len(kind.nodes) for alike in kinds.values() for kind in alike.values()) > WORTH * len(owner):
        return None
    calls = []
    for kind, nodes, inputs in met:
        outputs = [nodes[i] for i in kind.outputs]
        k = owner[nodes[0]]
        done = [number[n] for n in (*inputs, *outputs) if last.get(n, -1) <= k]
        calls.append(_Call(kind, picked([number[n] for n in inputs]), [number[n] for n in outputs], done))
    wanted = [number[node] if isinstance(node, fx.Node) else None for node in result]

    empty, form = [None] * len(owner), Form([node.meta["val"] for node in places])

    def run(*arguments: Tensor) -> list[Any]:
        form.require(arguments)
        values: list[Any] = [*arguments, *empty]
        del arguments
        for kind, inputs, outputs, done in calls:
            for i, value in zip(outputs, kind(inputs(values), backend), strict=True):
                values[i] = value
            for i in done:
                values[i] = None
        return [None if i is None else values[i] for i in wanted]

    return run


def written_into(graph: fx.Graph) -> set[fx.Node]:
    """The values that share memory with one that an operation writes into: where they are read matters."""
    group: dict[fx.Node, list[fx.Node]] = {}
    written = []
    for node in graph.nodes:
        group[node] = [node]
        written += [node] if _is_mutable(node) else []
        for argument in _shared_inputs(node):
            one, other = group[node], group[argument]
            if one is not other:
                one += other
                group.update(dict.fromkeys(other, one))
    return {member for node in written for member in group[node]}


def _shared_inputs(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result may share."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target in (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default):
        return node.all_input_nodes
    pairs = zip(schema.arguments, node.args, strict=False)
    found = [value for argument, value in pairs if argument.alias_info is not None]
    nodes: list[fx.Node] = []
    map_arg(found, nodes.append)
    return nodes


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def out_of_place(graph: fx.Graph) -> None:
    """Sums and products that are written into a value that nobody else reads, as sums and products."""
    for node in graph.nodes:
        if node.target not in OUT_OF_PLACE:
            continue
        inner, alone = node, True
        while alone and (shared := _shared_inputs(inner)):
            alone = len(shared) == 1 and len(shared[0].users) == 1
            inner = shared[0]
        values = [i.meta.get("val") for i in (node.args[0], *node.all_input_nodes)]
        same = len({v.dtype if isinstance(v, Tensor) else None for v in values}) == 1
        if alone and same and inner.op == "call_function":
            node.target = OUT_OF_PLACE[node.target]


def _move_to_users(owner: dict[fx.Node, int], fixed: set[fx.Node]) -> None:
    """Let a part make what it alone needs, where that hands on fewer numbers between parts; changes ``owner``."""

    def movable(node: fx.Node) -> bool:
        return _is_cheap(node) and node not in fixed and fixed.isdisjoint(node.all_input_nodes)

    def handed_on(group: set[fx.Node], to: int) -> set[fx.Node]:
        """What would have to be handed on to that part instead, and is not anyway."""
        needed = {i for node in group for i in node.all_input_nodes if i in owner} - group
        return {i for i in needed if all(owner.get(user, END) < to for user in i.users if user not in group)}

    for node in reversed(list(owner)):
        users, here = {owner.get(user, END) for user in node.users}, owner[node]
        to = max(users, default=END)
        if len(users) != 1 or to in (here, END) or not movable(node):
            continue
        group, new = {node}, handed_on({node}, to)
        while sum(map(_size, new)) >= _size(node):
            more = {i for i in new if owner[i] == here and group.issuperset(i.users) and movable(i)}
            if not more:
                break
            group |= more
            new = handed_on(group, to)
        else:
            owner.update(dict.fromkeys(group, to))


def _is_cheap(node: fx.Node) -> bool:
    """Whether an operation is made for each entry apart, or a view."""
    target = node.target
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags or getattr(target, "is_view", False) or target is torch.ops.aten._to_copy.default


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else END


class _Structure(NamedTuple):
    """A part as what it has in common with others, and what is its own.

    Attributes:
        nodes: its operations.
        key: the operations, and the kind of value in each place where one is given.
        slots: the values given, in each of these places.
        places: for each of them the first with the same value.
    """

    nodes: Sequence[fx.Node]
    key: Any
    slots: list[fx.Node]
    places: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> _Structure:
        """The structure of some operations."""
        own = {node: i for i, node in enumerate(nodes)}
        slots: list[fx.Node] = []
        first: dict[fx.Node, int] = {}

        def named(node: fx.Node) -> _Name:
            if node in own:
                return _Name("own", own[node])
            first.setdefault(node, len(slots))
            slots.append(node)
            return _Name("given", len(slots) - 1)

        operations = tuple(
            (node.target, _frozen(map_arg(node.args, named)), _frozen(map_arg(node.kwargs, named))) for node in nodes
        )
        values = [node.meta.get("val") for node in slots]
        kinds = tuple((v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else repr(v) for v in values)
        places = tuple(first[node] for node in slots)
        written = places if any(map(_is_mutable, nodes)) else None  # then it matters which values are the same
        return cls(nodes, (operations, kinds, written), slots, places)

    def one_of(self, alike: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Places of which these are a case: one value may be given twice where two are taken."""
        return next((p for p in alike if len({*zip(p, self.places, strict=True)}) == len({*p})), None)

    def inputs(self, places: Sequence[int]) -> list[fx.Node]:
        """The values given, where those of a kind are different."""
        return [node for i, node in enumerate(self.slots) if places[i] == i]


class _Name(NamedTuple):
    """A value of a part, wherever the part is."""

    whose: str
    place: int


def _frozen(value: Any) -> Any:
    if isinstance(value, (_Name, str)) or callable(value):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return type(value), repr(value)  # 1, 1.0, True and 0.0, -0.0 are different constants

"""What a graph computes only to see whether its numbers are finite: no more of it, and no earlier, than is needed."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .outline import written_into

__all__ = ["blind_to_unused", "look_later"]

# A sum has an entry that is not finite if one of its vectors has; and so has a product, also one with zero.
SUMS = frozenset((
    torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten._foreach_add.List,
    torch.ops.aten._foreach_sub.List,
))  # fmt: skip
PRODUCTS = frozenset((
    torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar, torch.ops.aten.neg.default, torch.ops.aten.t.default,
    torch.ops.aten.view.default, torch.ops.aten._foreach_mul.Scalar, torch.ops.aten._foreach_mul.ScalarList,
    torch.ops.aten._foreach_mul.Tensor, torch.ops.aten._foreach_neg.default,
))  # fmt: skip


def blind_to_unused(module: GraphModule, looks: Sequence[Node]) -> None:
    """Leave out what would only be looked at: nothing that a step leaves behind depends on it."""
    ends = {*looks}
    used: set[Node] = set()
    waiting = [node for node in module.graph.nodes if node.op == "output" or node.is_impure()]
    while waiting:
        node = waiting.pop()
        if node not in used:
            used.add(node)
            waiting += () if node in ends else node.all_input_nodes
    for node in used & ends:
        if used.isdisjoint(node.all_input_nodes):
            _leave_out(node)
    module.graph.eliminate_dead_code()
    module.recompile()


def look_later(module: GraphModule, looks: Sequence[Node]) -> None:
    """Look at the sum to which a vector is added, which is not finite if the vector is not, in place of the vector.

    Of vectors that are added up one by one, the last sum alone is then looked at, where the number is used: what is
    added need not leave its part of the graph, nor be written. A step looks at its own vectors: nothing is looked at
    that is made after the first use of the number.
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    written = written_into(module.graph)
    looked: dict[tuple[Node, str], Node] = {}
    for node in looks:
        if node not in order or len(node.users) != 1 or len(node.all_input_nodes) != 1:
            continue
        (vector,), (user,) = node.all_input_nodes, node.users
        last = _last_sum(vector, order, order[user])
        last = vector if last in written else last
        key = last, repr(node.kwargs)
        if key in looked:
            _leave_out(node)
            continue
        looked[key] = node
        if last is not vector:
            user.prepend(node)
            node.replace_input_with(vector, last)
            node.meta["part"] = user.meta["part"]
    module.graph.eliminate_dead_code()
    module.recompile()


def _leave_out(look: Node) -> None:
    """Take a number out of the sums that it is in."""
    for total in [*look.users]:
        (rest,) = (n for n in total.all_input_nodes if n is not look)
        total.replace_all_uses_with(rest)


def _last_sum(vector: Node, order: dict[Node, int], end: int) -> Node:
    """The last sum before the end that is not finite if the vector is not, of the same type; else the vector."""
    last = vector
    while following := [n for n in _following(vector) if order[n] < end and _holds(n, vector)]:
        vector = max(following, key=order.__getitem__)
        whole = vector.args[0] if vector.target is operator.getitem else vector
        if isinstance(whole, Node) and whole.target in SUMS:
            last = vector
    return last


def _following(vector: Node) -> list[Node]:
    """The sums and products that a vector is in."""
    found = []
    for user in vector.users:
        if user.target not in SUMS | PRODUCTS:
            continue
        lists = [given for given in user.args if isinstance(given, (list, tuple))]
        if any(given is vector for given in user.args) and not lists:
            found.append(user)
        places = {i for given in lists for i, value in enumerate(given) if value is vector}
        found += [part for part in user.users if part.target is operator.getitem and part.args[1] in places]
    return found


def _holds(node: Node, vector: Node) -> bool:
    """Whether a value has the type of a vector, and at least as many entries."""
    value, other = node.meta.get("val"), vector.meta.get("val")
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return False
    return value.dtype == other.dtype and value.numel() >= other.numel()

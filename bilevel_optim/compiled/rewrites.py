"""Rewrites of a graph that Dynamo has traced, and checks for operations that it must not contain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ..oracle.differentiable import plain_layer_norm, plain_weight_norm
from .reasons import UNDRAWN, Refused, place_of

__all__ = ["differentiable_twice", "require_deterministic", "require_drawn_before", "require_unwritten"]

RANDOM = {
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_",
    "normal", "normal_", "multinomial", "poisson",
    "uniform_", "exponential_", "rrelu", "gumbel_softmax", "log_normal_", "cauchy_", "geometric_", "random_",
}  # fmt: skip
DROPOUT = {
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
}  # fmt: skip


def require_deterministic(module: GraphModule) -> None:
    """Raise `Refused` if a graph draws random numbers: an eager step draws others, and repeats them."""
    parts = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    for node in itertools.chain.from_iterable(graph.nodes for graph in parts):
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "placeholder" and node.name.startswith("random_value"):
            raise Refused(f"a loss draws random numbers (of Python's random){UNDRAWN}")
        rate = 0.0
        if name in DROPOUT and _argument(node, 2, "training", True):
            rate = _argument(node, 1, "p", 0.5)
        elif name == "scaled_dot_product_attention":
            rate = _argument(node, 4, "dropout_p", 0.0)
        if name in RANDOM or rate:
            raise Refused(f"a loss draws random numbers ({name}){UNDRAWN}{place_of(node)}")


def require_drawn_before(module: GraphModule) -> None:
    """Raise `Refused` if a traced step draws random numbers, which only code of the method can do by now."""
    for node in module.graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if name in RANDOM:
            raise Refused(
                f"the method draws random numbers ({name}), and a graph would draw others than an eager step: declare "
                "them in _random_inputs, for example as a seed"
            )


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else default)


def require_unwritten(module: GraphModule, allowed: Sequence[Node]) -> None:
    """Raise `Refused` if a graph writes into other inputs than ``allowed``: an eager step would write them too."""
    given: dict[int, Node] = {}  # arguments, by their values
    same: dict[Node, Node] = {}  # detached tensor -> its argument
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if node not in allowed:
                given[_memory_of(node)] = node
            continue
        first = node.args[0] if node.args else None
        if getattr(node.target, "__name__", node.target) == "detach" and isinstance(first, Node):
            same[node] = same.get(first, first)
        for written in _written(node):
            if given.get(_memory_of(same.get(written, written))) is not None:
                raise Refused(
                    "a loss writes into a tensor that is not its own, so an eager and a compiled step would both "
                    f"write: use an out-of-place operation{place_of(node)}"
                )


def _memory_of(node: Node) -> int:
    """Return the id of the tensor that an operation returns, or of the base if the result is a view."""
    value = node.meta.get("example_value")
    return id(value._base if isinstance(value, Tensor) and value._is_view() else value)


def _written(node: Node) -> list[Node]:
    """Return the operands that an operation mutates, judged by its name and arguments."""
    name = getattr(node.target, "__name__", str(node.target))
    places = [node.kwargs.get("out")]
    writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if writes or name in _WRITING or node.kwargs.get("inplace"):
        places += node.args[:1]
    return [place for place in places if isinstance(place, Node)]


_WRITING = {
    "setitem", "__setitem__", "iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod", "iand", "ior", "ixor",
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__",
}  # fmt: skip


def differentiable_twice(module: GraphModule, *, plain: bool) -> None:
    """Replace operations whose derivative cannot be differentiated by others whose derivative can.

    ``plain``: also replace torch's fused ones, whose second derivative is missing (attention) or wrong (weight norms;
    layer norms that the graph differentiates).
    """
    names = {getattr(node.target, "__name__", "") for node in module.graph.nodes}
    fused = _PLAIN if names & _DERIVATIVES else {k: v for k, v in _PLAIN.items() if k != "layer_norm"}
    for part in module.children():
        if isinstance(part, GraphModule):
            differentiable_twice(part, plain=plain)
    for node in list(module.graph.nodes):
        name = getattr(node.target, "__name__", str(node.target))
        if node.op != "call_function":
            continue
        if name == "one_hot" and len(node.args) > 1 and node.args[1] != -1:
            node.target = _one_hot
        elif name == "l1_loss" and {"weight"} <= node.kwargs.keys() <= {"weight", "reduction"}:
            node.target = _weighted_l1_loss
        elif plain and name in fused:
            node.target = fused[name]
        elif name == "tag_activation_checkpoint":
            node.target, node.kwargs = _called, {}
        elif name == "autograd_function_apply":
            forward, backward = (getattr(module, body.target) for body in node.args[:2])
            node.target, node.args, node.kwargs = _function_of(forward, backward), node.args[2:], {}
    module.recompile()


def _weighted_l1_loss(input: Tensor, target: Tensor, *, weight: Tensor | None, reduction: str = "mean") -> Tensor:
    """Compute ``F.l1_loss`` with weights, which torch leaves out while it traces."""
    if weight is None:
        return F.l1_loss(input, target, reduction=reduction)
    errors = (input - target).abs() * weight
    return errors if reduction == "none" else errors.sum() if reduction == "sum" else errors.sum() / weight.sum()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
    return scores.softmax(-1) @ value


_DERIVATIVES = {"grad", "_autograd_grad"}  # of torch.autograd and of torch.func
_PLAIN: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "_weight_norm": plain_weight_norm,
    "layer_norm": plain_layer_norm,
}


def _one_hot(classes: Tensor, count: int) -> Tensor:
    return (classes.unsqueeze(-1) == torch.arange(count, device=classes.device)).long()


def _called(body: Callable[..., Any], *arguments: Any) -> Any:
    return body(*arguments)


def _function_of(forward: GraphModule, backward: GraphModule) -> Callable[..., Any]:
    """Return a custom autograd function whose derivative can be differentiated and mapped.

    Dynamo's own form treats values that the backward pass uses as constants: its second derivatives are wrong.
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

"""Operations that can be differentiated twice, and error messages for those that cannot."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..problem.vector import coarsest

__all__ = [
    "FUSED",
    "JUMPING",
    "KINKED",
    "ROOTS",
    "UNCHUNKED",
    "OtherForms",
    "all_arguments",
    "custom_operations",
    "explain_second",
    "has",
    "has_casts",
    "has_large_convolutions",
    "is_marked",
    "kinds_in",
    "mark_graph",
    "padding_rows",
    "plain_layer_norm",
    "plain_operations",
    "plain_weight_norm",
    "products_of",
    "reaches",
    "require_constant_weights",
    "working_unit",
]


def all_arguments(func: Callable[..., Any], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keyword arguments of a call that a mode has got: torch passes ``F.l1_loss`` on without its weight."""
    kwargs = kwargs or {}
    if func is not F.l1_loss or "weight" in kwargs:
        return kwargs
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return kwargs if frame is None else {**kwargs, "weight": frame.f_locals["weight"]}


class OtherForms(TorchFunctionMode):
    """Call other forms of some of torch's functions in the block."""

    def __init__(self, forms: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._forms = forms

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._forms.get(func, func)(*args, **all_arguments(func, kwargs))


def plain_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Compute weight normalisation in plain operations: torch's fused one has a silently wrong second derivative."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def plain_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Compute a layer norm in plain operations: torch's fused one has a silently wrong third derivative."""
    values = input.to(torch.promote_types(input.dtype, torch.float32))
    variance, mean = torch.var_mean(values, [*range(-len(normalized_shape), 0)], correction=0, keepdim=True)
    normal = (values - mean) * torch.rsqrt(variance + eps)
    scaled = normal if weight is None else normal * weight
    return (scaled if bias is None else scaled + bias).to(input.dtype)


def _unchunked_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    return F.linear_cross_entropy(*args, **kwargs)


# Without options: in chunks it has no second derivative, silently.
UNCHUNKED = {getattr(F, "linear_cross_entropy", None): _unchunked_cross_entropy}


def has(loss: Tensor, operations: tuple[str, ...]) -> bool:
    """Return True if a loss's graph contains operations whose names begin like these."""
    return any(node.name().startswith(operations) for node in _nodes(loss))


def kinds_in(loss: Tensor, kinds: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the kinds of operations in a loss's graph, each given by how the names of its operations begin."""
    names = {node.name() for node in _nodes(loss)}
    return tuple(kind for kind, starts in kinds.items() if any(name.startswith(starts) for name in names))


def has_casts(loss: Tensor, unit: float) -> bool:
    """Return True if a loss's graph changes values to a type whose rounding unit is larger (autocast)."""
    kinds = [node._input_metadata[0].dtype for node in _nodes(loss) if node.name().startswith("ToCopy")]
    return any(torch.finfo(kind).eps > unit for kind in kinds)


def custom_operations(loss: Tensor) -> list[str]:
    """Return the names of the operations in a loss's graph whose derivatives are Python functions, not torch's own."""
    found = {node.name() for node in _nodes(loss) if issubclass(type(node), BackwardCFunction)}
    return sorted(name.removeprefix("GeneratedBackwardFor_").removesuffix("Backward") for name in found)


def padding_rows(loss: Tensor, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the rows of leaves that embeddings in a loss's graph hold constant (padding), as (leaf, row)."""
    places, found = {id(t): i for i, t in enumerate(tensors)}, set()
    for node in _nodes(loss):
        row = getattr(node, "_saved_padding_idx", None)
        i = None if row is None else places.get(id(getattr(node.next_functions[0][0], "variable", None)))
        if row is not None and i is not None and row < len(tensors[i]):  # without padding a huge number
            found.add((i, int(row)))
    return sorted(found)


def has_large_convolutions(loss: Tensor, large: int) -> bool:
    """Return True if a loss's graph contains convolutions on a CPU with at least ``large`` input entries."""
    found = (getattr(node, "_saved_input", None) for node in _nodes(loss) if node.name().startswith("Convolution"))
    return any(isinstance(t, Tensor) and t.device.type == "cpu" and t.numel() >= large for t in found)


def mark_graph(loss: Any, outside: Sequence[Tensor]) -> object:
    """Mark the graph of a loss without that of other tensors; return what `is_marked` takes."""
    mark, others = object(), {node for t in outside for node in _nodes(t)}
    for node in _nodes(loss) if isinstance(loss, Tensor) else ():
        if node.next_functions and node not in others:
            node.metadata["bilevel_optim"] = mark
    return mark


def is_marked(loss: Any, mark: object, leaves: Sequence[Tensor]) -> bool:
    """Return True if a loss's graph has a part of the graph that was marked, and that leads to one of these leaves."""
    marked = [n for n in _nodes(loss) if n.metadata.get("bilevel_optim") is mark] if isinstance(loss, Tensor) else []
    return _leads_to(marked, leaves)


def reaches(loss: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return True if a loss's graph has one of these leaves (that of a compiled module has all its inputs)."""
    if loss.grad_fn is None:
        return any([loss is t for t in tensors])
    return _leads_to([loss.grad_fn], tensors)


def _leads_to(nodes: list[Any], leaves: Sequence[Tensor]) -> bool:
    wanted = {id(t) for t in leaves}
    return any(id(getattr(node, "variable", None)) in wanted for node in _reached(nodes))


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Yield the operations in a loss's graph."""
    return _reached([] if loss.grad_fn is None else [loss.grad_fn])


def _reached(stack: list[Any]) -> Iterator[Any]:
    """Yield these operations and those that they lead to."""
    seen = {*stack}
    while stack:
        node = stack.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)


def products_of(loss: Tensor) -> frozenset[str]:
    """Return the kinds of products in a loss's graph that torch may compute in less than single precision."""
    return frozenset(kinds_in(loss, _PRODUCTS))


def working_unit(tensors: Sequence[Tensor], products: frozenset[str] | None = None) -> float:
    """Return the rounding unit of computations with tensors: of the coarsest type, of autocast's, or of products."""
    unit = coarsest(tensors)
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        unit = max(unit, torch.finfo(torch.get_autocast_dtype(kind)).eps)
    if products and any([t.dtype == torch.float32 for t in tensors]):
        of_host = kind in ("cpu", "xpu")
        for name in products:
            own = torch.backends.cuda if name == "matmul" else torch.backends.cudnn
            library = torch.backends.mkldnn if of_host else own
            unit = max(unit, _UNITS.get(getattr(library, name).fp32_precision, unit))
    return unit


_UNITS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
_PRODUCTS = {
    "conv": ("Convolution", "CudnnConvolution", "MkldnnConvolution"),
    "matmul": ("Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv", "Linear"),
    "rnn": ("CudnnRnn", "MkldnnRnn"),
}

# Activations, at whose kinks differences of gradients fail; and other operations whose derivative may jump.
KINKED = (
    "Relu", "LeakyRelu", "Prelu", "Rrelu", "Hardtanh", "Hardswish", "Hardsigmoid", "Threshold", "MaxPool",
    "AdaptiveMaxPool",
)  # fmt: skip
# Operations, as users call them, without a finite second derivative at zero.
ROOTS = {"norm": ("Norm", "LinalgVectorNorm"), "sqrt": ("Sqrt",)}
JUMPING = (
    "Abs", "Amax", "Amin", "Aminmax", "Ceil", "Clamp", "Cummax", "Cummin", "Floor", "Fmod", "FractionalMaxPool", "Frac",
    "GridSampler", "HingeEmbedding", "Kthvalue", "L1Loss", "Max", "Maximum", "Median", "Min", "Minimum",
    "MultiMargin", "MultilabelMargin", "Remainder", "Round", "Sgn", "Sign", "Softshrink", "Hardshrink", "Sort", "Topk",
    "Trunc", "Where",
)  # fmt: skip
# Operations whose second derivative is missing or wrong, and one that a loss has differentiated: then it is its third.
FUSED = (
    "WeightNorm", "ScaledDotProductFlash", "ScaledDotProductEfficient", "ScaledDotProductCudnn",
    "NativeLayerNormBackwardBackward",
)  # fmt: skip
_PLAIN: dict[Any, Callable[..., Tensor]] = {
    torch._weight_norm: plain_weight_norm,
    F.layer_norm: plain_layer_norm,
    torch.layer_norm: plain_layer_norm,
}


@contextmanager
def plain_operations() -> Generator[None]:
    """Replace fused operations: attention has no second derivative in torch, weight and layer norms have wrong ones."""
    with sdpa_kernel(SDPBackend.MATH), OtherForms(_PLAIN):
        yield


def explain_second(error: RuntimeError | NotImplementedError) -> None:
    """Raise an error that says what to do, if a second derivative failed for a known reason."""
    text = str(error)
    if "cudnn" in text.lower() and "rnn" in text.lower():
        reason = (
            "cuDNN's recurrent layers have no second derivative in torch (call the model within "
            "torch.backends.cudnn.flags(enabled=False) in the loss)"
        )
    elif "double backward" in text.lower() or "donated buffers" in text:
        reason = "it runs a torch.compile'd module or a kernel without double backward (pass the module uncompiled)"
    elif "is not implemented" in text and "derivative" in text:
        reason = "one of its operations has no second derivative in torch"
    else:
        return
    raise RuntimeError(
        f"the lower loss cannot be differentiated twice: {reason}. hvp='finite-difference' or a first-order method "
        f"(F2SA) needs no second derivatives. torch said: {text.splitlines()[0]}"
    ) from error


def require_constant_weights(error: RuntimeError) -> None:
    """Explain torch's refusal to differentiate a loss in its ``weight=`` or ``pos_weight=``."""
    refused = re.search(r"'(\w+)' is not differentiable with respect to argument '(\w*weight)'", str(error))
    if refused is None:
        return
    function, argument = refused.groups()
    instead = (
        "-(pos_weight * target * F.logsigmoid(z) + (1 - target) * F.logsigmoid(-z)).mean()"
        if argument == "pos_weight"
        else "(weight[target] * F.cross_entropy(z, target, reduction='none')).mean(), or .sum() / weight[target].sum()"
    )
    raise RuntimeError(
        f"a loss passes a parameter as {argument}= of an operation that torch cannot differentiate in it ({function}). "
        f"Multiply the unreduced loss by the weights: {instead}"
    ) from error

"""Updates of ``torch.optim`` optimizers in operations that can be differentiated and traced."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.adam import adam
from torch.overrides import TorchFunctionMode

from ..problem.vector import Vector
from ..tracing import is_tracing

__all__ = ["Memory", "can_be_unrolled", "made_by", "sgd", "updated"]

Memory = list[dict[str, Any]]  # an optimizer's state (momentum and the like), one dict per tensor
COUNT, KIND = (
    "step",
    torch.float32,
)  # key of torch.optim's step count, and its type unless the default dtype is double


def sgd(group: dict[str, Any], y: Tensor, memory: dict[str, Any], gradient: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Make one step of ``torch.optim.SGD`` as a function that can be differentiated.

    torch's own ``differentiable=True`` cuts the graph at the first momentum buffer. With options that are numbers the
    results are torch's bit for bit.
    """
    direction = -gradient if group["maximize"] else gradient
    if isinstance(group["weight_decay"], Tensor) or group["weight_decay"]:
        direction = _plus(direction, y, group["weight_decay"])
    if isinstance(group["momentum"], Tensor) or group["momentum"]:
        buffer = memory.get("momentum_buffer")
        kept = 1 - group["dampening"]
        buffer = direction if buffer is None else _plus(group["momentum"] * buffer, direction, kept)
        memory = {"momentum_buffer": buffer}
        direction = _plus(direction, buffer, group["momentum"]) if group["nesterov"] else buffer
    rate = group["lr"]
    if isinstance(rate, Tensor) and not y.dim():  # an operation on two scalars would return the wider type
        rate = rate.to(y.dtype)
    return _plus(y, direction, -rate), memory


def _plus(a: Tensor, b: Tensor, factor: Any) -> Tensor:
    """Return a + factor * b; one operation, rounded as in torch's optimizers, if the factor is a number."""
    return a + factor * b if isinstance(factor, Tensor) else torch.add(a, b, alpha=factor)


def made_by(factory: Callable[[Any], Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that a function makes from groups, with ``differentiable=False``.

    torch's steps with ``differentiable=True`` fail on leaf tensors; `updated` sets it where a step is differentiated.
    """
    made = factory(groups)
    if isinstance(made, Optimizer) and made.defaults.get("differentiable"):
        made.defaults["differentiable"] = False
        for group in made.param_groups:
            group["differentiable"] = False
    return made


def can_be_unrolled(optimizer: Optimizer) -> bool:
    """Return True if `updated` knows the optimizer's update."""
    return "differentiable" in optimizer.defaults


def updated(
    optimizer: Optimizer, y: Vector, memory: Memory, gradient: Vector, *, differentiated: bool = False
) -> tuple[list[Tensor], Memory]:
    r"""Apply the optimizer's update as a function that can be differentiated.

    Adam and its like divide by :math:`\sqrt v + \epsilon`, where v is a mean of squares of the gradients. Where all
    gradients are 0, so is v, and the derivative of torch's root is infinite. That of the update is not: its numerator m
    is 0 too, and :math:`m / (\sqrt v + \epsilon) = m / \epsilon + O(|g|^2)`. So the derivative of the root counts as 0
    there.

    With ``differentiated`` the caller needs the derivative, and not the state's last bits.
    """
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    if getattr(optimizer, "kind", type(optimizer)) is SGD:
        pairs = [sgd(*one) for one in zip(groups, y, memory, gradient, strict=True)]
        return [value for value, _ in pairs], [state for _, state in pairs]
    if is_tracing():
        return _adam(optimizer, groups, y, memory, gradient, differentiated)
    if not can_be_unrolled(optimizer):
        raise NotImplementedError(f"{type(optimizer).__name__} has no differentiable form, so it cannot be unrolled")
    twin = copy.copy(optimizer)
    vars(twin).update(vars(optimizer))  # torch's copy loses the flag that capturable=True needs no warning
    twin.defaults = {**optimizer.defaults, "differentiable": True}
    values = [v.clone() for v in y]
    remaining = iter(values)
    twin.param_groups = [
        {**group, **_unfused(group), "params": [next(remaining) for _ in group["params"]], "differentiable": True}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for value, state, grad in zip(values, memory, gradient, strict=True):
        if value.requires_grad:
            value.retain_grad()  # lets torch read .grad of a tensor that is not a leaf without a warning
        value.grad = grad
        if state:
            twin.state[value] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            _recount(twin.state[value], torch.float64)
    counting = None if all(memory) else _Counting()
    with counting or nullcontext(), _FlatRoots() if differentiated else nullcontext():
        twin.step()
    for value, state in zip(values, memory, strict=True):
        count = state.get(COUNT)
        if isinstance(count, Tensor):
            _recount(twin.state[value], count.dtype)
        elif counting is not None and counting.widened:
            _recount(twin.state[value], KIND)
    return values, [twin.state[value] for value in values]


def _adam(
    optimizer: Any, groups: Any, y: Vector, memory: Memory, gradient: Vector, differentiated: bool
) -> tuple[list[Tensor], Memory]:
    """Apply the update of Adam or AdamW by torch's own function; step counts are in double, as Python's numbers."""
    if optimizer.kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise NotImplementedError(f"{optimizer.kind.__name__} has no differentiable form, so it cannot be traced")
    values, kept = [], []
    for group, value, state, slope in zip(groups, y, memory, gradient, strict=True):
        has_state = len(state) > 0
        count = state[COUNT].to(torch.float64) if has_state else torch.zeros((), dtype=torch.float64)
        zero = 0 * slope if differentiated else torch.zeros_like(value)  # Dynamo asks before the sums whether they vary
        first, second = (state[n].clone() if has_state else zero.clone() for n in ("exp_avg", "exp_avg_sq"))
        if differentiated:  # in a trace no mode: a root far below epsilon, whose derivative is finite
            second = second.clamp_min(torch.finfo(second.dtype).tiny)
        largest = [state["max_exp_avg_sq"].clone() if has_state else zero.clone()] if group["amsgrad"] else []
        new, step, rate = value.clone(), count.clone(), group["lr"]
        adam(
            [new], [slope], [first], [second], largest, [step], foreach=False, capturable=False, differentiable=True,
            fused=False, amsgrad=group["amsgrad"], beta1=group["betas"][0], beta2=group["betas"][1], lr=rate,
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )  # fmt: skip
        kind = KIND if not has_state else state[COUNT].dtype
        values.append(new)
        kept.append({COUNT: step.to(kind), "exp_avg": first, "exp_avg_sq": second,
                     **({"max_exp_avg_sq": largest[0]} if largest else {})})  # fmt: skip
    return values, kept


def _unfused(group: dict[str, Any]) -> dict[str, Any]:
    """Return options that build a group's update from single operations and keep the way steps are counted."""
    counts_there = group.get("fused") and any([p.device.type != "cpu" for p in group["params"]])
    options = {"foreach": False, "fused": False, "capturable": group.get("capturable") or counts_there}
    return {name: value for name, value in options.items() if name in group}


def _recount(state: dict[str, Any], kind: torch.dtype) -> None:
    """Convert the step count to another type, in which torch then computes its powers (otherwise in Python's)."""
    count = state.get(COUNT)
    if isinstance(count, Tensor) and count.is_floating_point() and not count.is_mps:
        state[COUNT] = count.to(kind)


class _Counting(TorchFunctionMode):
    """Step counts that torch's optimizers create in single precision become double precision.

    Attributes:
        widened: whether there was such a count.
    """

    widened = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("dtype") is KIND and args == (0.0,):
            self.widened, kwargs = True, {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


class _FlatRoots(TorchFunctionMode):
    """Square roots have derivative 0 at 0, where torch's is infinite."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ROOTS:
            is_zero = args[0] == 0
            return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, args[0]).sqrt())
        return func(*args, **(kwargs or {}))


_ROOTS = (torch.sqrt, Tensor.sqrt, Tensor.sqrt_)  # torch's optimizers only use their results

"""The derivative of one update of a lower optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem.parameters import rates_of
from ..problem.vector import Vector, as_variable
from .functional import Memory, updated
from .lower import LowerRule

__all__ = ["update_vjp"]


def update_vjp(
    rule: LowerRule,
    values: Vector,
    memory: Memory,
    gradient: Vector,
    adjoint: Vector,
    memory_adjoint: list[dict[str, Tensor]],
    upper: Sequence[Tensor] = (),
) -> tuple[Vector, list[dict[str, Tensor]], Vector, list[Tensor | None]]:
    r"""Pull adjoints back through one update :math:`(y, m) \mapsto P(U(y, m, C(\nabla g)))` of a lower optimizer.

    Args:
        rule: the update, with its clipping C and projection P.
        values: y before the update.
        memory: its state m before the update, one dict per tensor.
        gradient: the gradient that the update used, before it was clipped.
        adjoint: derivative of the final value in the updated y.
        memory_adjoint: the same for the updated state (missing entries are zero).
        upper: tensors that the projection and the optimizer's options may depend on.

    Returns:
        Adjoints of y (through the update alone), of m, of the gradient, and of ``upper`` (None where it is zero).
    """
    if rule.plain and not rule.limits and not rule.carried:
        rates = rates_of(rule.optimizer.param_groups)
        return adjoint, memory_adjoint, adjoint * [-rate for rate in rates], [None] * len(upper)
    y = Vector(as_variable(v.clone()) for v in values)
    g = Vector(as_variable(v.clone()) for v in gradient)
    with torch.enable_grad(), rule.with_graph():
        m = [{key: _leaf(key, value, v) for key, value in state.items()} for state, v in zip(memory, y, strict=True)]
        slope = rule.limits.clipped(g, rule.lead)
        if rule.carried:  # torch then adds the weight decay in place
            slope = Vector(t.clone() for t in slope)
        new_y, new_m = updated(rule.optimizer, y, m, slope, differentiated=True)
        new_y = [*rule.limits.projected(Vector(new_y), rule.lead)]
    outputs, seeds = list(new_y), list(adjoint)
    for state, seed in zip(new_m, memory_adjoint, strict=True):
        outputs += [state[key] for key in seed]
        seeds += seed.values()
    smooth = [(i, key) for i, state in enumerate(m) for key in state if getattr(state[key], "requires_grad", False)]
    inputs = [*y, *g, *(m[i][key] for i, key in smooth), *upper]
    kept = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
    results = torch.autograd.grad(
        [o for o, _ in kept], inputs, [s for _, s in kept], allow_unused=True, retain_graph=bool(upper) or None
    )  # the graph of the options is that of all steps
    count, own = len(y), len(inputs) - len(upper)
    zero = [torch.zeros_like(t) if r is None else r for r, t in zip(results[:own], inputs, strict=False)]
    pulled: list[dict[str, Tensor]] = [{} for _ in y]
    for (i, key), value in zip(smooth, zero[2 * count :], strict=True):
        pulled[i][key] = value
    return Vector(zero[:count]), pulled, Vector(zero[count : 2 * count]), [*results[own:]]


def _leaf(key: str, value: Any, like: Tensor) -> Any:
    if not isinstance(value, Tensor) or key == "step":  # a count; if y is a scalar, it has the shape of y
        return value
    return as_variable(value.clone(), value.is_floating_point() and value.shape == like.shape)

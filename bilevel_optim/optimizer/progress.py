"""Warnings about the progress of a run: upper losses that grow, and parameters that do not move or move too far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import warn
from ..problem.vector import Vector, any_sharded
from .state import RunState
from .upper_trend import WINDOW

__all__ = ["DIVERGES", "STILL", "StepLength", "step_length", "watch_losses", "watch_moves"]

STILL = 20  # number of the step that checks whether x and y move
LITTLE, MUCH = 1e-9, 1e-3  # relative changes of the upper loss: by a step, and by one as long as max(|x|, 1)
LOOKS = 100  # steps between checks of the upper loss on an accelerator
DIVERGES = "Use a smaller lr (a tenth of it to begin with), or let bo.suggest find a stable one"


class StepLength(NamedTuple):
    """Norm of ``.grad`` of x, the largest learning rate, the approximate length of a step, and whether it is lr."""

    norm: float
    lr: float
    length: float
    fixed_length: bool


def step_length(groups: Sequence[Mapping[str, Any]], *, by_optimizer: bool, fixed_length: bool) -> StepLength | None:
    """Return the gradient and the rate of x in the last step; None for sharded parameters.

    Args:
        groups: the upper groups.
        by_optimizer: True if an optimizer moves x, so that each entry may move by the rate.
        fixed_length: True if the length of a step of x is the rate, independent of the gradient's.
    """
    tensors = [p for group in groups for p in group["params"]]
    if any_sharded(tensors):
        return None
    size = float(Vector(p.new_zeros(1) if p.grad is None else p.grad for p in tensors).norm())
    lr = max(float(group["lr"]) for group in groups)
    if by_optimizer:
        return StepLength(size, lr, lr * sum(t.numel() for t in tensors) ** 0.5, fixed_length)
    return StepLength(size, lr, lr if fixed_length else lr * size, fixed_length)


def watch_losses(state: RunState, losses: Tensor, slope: Callable[[], StepLength | None]) -> None:
    """Warn once if upper losses have grown; ``slope`` returns None if x is not moved here."""
    trend = state.upper_trend
    # Reading a loss on a device waits for the device.
    looks = losses.is_cpu or state.steps % LOOKS < losses.numel()
    values = [] if not looks else losses.tolist() if losses.dim() else [losses.item()]
    if values and trend.asks(len(values)) and (here := slope()) is not None:
        trend.promised += here.norm * here.length * (len(values) if trend.count < WINDOW else max(len(values), WINDOW))
    for loss in values:
        if trend.note_loss(loss) and "growing upper loss" not in state.warned:
            state.warned.add("growing upper loss")
            warn(f"{trend.text}: the run diverges. {DIVERGES}")
        said = trend.describe_rise(loss)
        if said and not state.warned & {"growing upper loss", "worse upper loss"}:
            state.warned.add("worse upper loss")
            warn(
                f"{said}: the run makes the upper loss worse, unless y started where f is less than at y*(x). "
                f"{DIVERGES}"
            )


def watch_moves(
    state: RunState,
    control: str,
    loss: float,
    before: Sequence[Vector],
    after: Sequence[Vector],
    slope: StepLength,
    lbfgs_residual: Tensor | None,
) -> None:
    """Warn if x hardly moved, or overshot, or if y under LBFGS did not move, in the step with number `STILL`.

    Args:
        state: state of the run, with the first upper loss.
        control: name of the method if it is a control, else empty.
        loss: upper loss of the step.
        before: values of x and of y before the step.
        after: those after it.
        slope: gradient and rate of x in the step.
        lbfgs_residual: lower residual, if LBFGS moves y and it is known; else None.
    """
    x, moved = before[0], float((after[0] - before[0]).norm())
    change, possible = (moved or slope.length) * slope.norm, max(float(x.norm()), 1.0) * slope.norm
    if 0 < change < LITTLE * abs(loss) and possible > MUCH * abs(loss):
        warn(
            f"x hardly moves: step {STILL} changed the upper loss by about {change / abs(loss):.0e} of its size, "
            f"although the hypergradient is not small (norm {slope.norm:.2g}). lr={slope.lr:g} is too small; "
            "bo.suggest finds a rate"
        )
    if not slope.norm and slope.lr and control:
        warn(
            f"x does not move: the upper loss depends on x only through y, and {control} ignores that dependence, "
            "because it is a control for comparisons. Use another method, such as AID or F2SA"
        )
    trend = state.upper_trend
    if slope.lr and not control and trend.count >= STILL and trend.spread and not trend.promised:
        warn(
            f"x does not move: the hypergradient was exactly zero in each of the first {STILL} steps. Look for an "
            "operation whose derivative is zero at this x (clamp, relu, round, a saturated sigmoid), or start x "
            "elsewhere"
        )
    first, warned = trend.first or 0.0, "growing upper loss" in state.warned
    if slope.fixed_length and not warned and moved * slope.norm > abs(loss) and loss > 3 * abs(first):
        warn(
            f"x goes past a minimum and back: step {STILL} moved it by {moved:.2g} along a slope of {slope.norm:.2g}, "
            f"although the upper loss was only {loss:.2g}, and {first:.2g} in the first step. lr={slope.lr:g} is too "
            f"large. {DIVERGES}"
        )
    residual = 0.0 if lbfgs_residual is None else float(torch.as_tensor(lbfgs_residual).norm())
    still = residual > 0 and all(map(torch.equal, before[1], after[1]))
    if still and moved > LITTLE * float(x.norm()):
        warn(
            f"LBFGS did not move y in step {STILL}: it takes y for a solution, but x has moved, and the gradient "
            f"of the lower loss has norm {residual:.2g}. Give it smaller tolerances (lower_optimizer="
            "functools.partial(torch.optim.LBFGS, tolerance_grad=0, tolerance_change=0)), or a larger lower loss"
        )

r"""``lower_lr="auto"``: the rate of the lower steps follows the largest curvature of g, measured before each step.

With :math:`H = \nabla^2_{yy} g(x_k, y_k)` on the step's first lower batch, and :math:`w` what the step before left,

.. math::
    u &= w / \|w\| + 0.3\, \nabla_y g / \|\nabla_y g\|, \qquad L = \|H u\| / \|u\|,\\
    L_k &= \max(L \min(\max(L / L_{k-1}, 1), 2),\; 0.95\, L_{k-1}), \qquad w \leftarrow L_k\, H u / \|H u\|,

and the rate is :math:`1 / (1.1 L_k)`: a step of power iteration, which the gradient of g turns to directions that x has
made stiff, held back where the curvature grows. The first step makes ten of them. Methods that renew one term of a sum
in each step take :math:`1 / (3 L_k)`. A step whose lower
steps lead to where g is stiffer, so that its gradient grows or is not finite, is made again with L four times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from ..distributed.sharding import sharded_like
from ..hypergradient import Estimate
from ..hypergradient.estimate import measured
from ..oracle.differentiable import working_unit
from ..oracle.oracle import Oracle
from ..problem.objective import Ahead, Sample
from ..problem.values import replace
from ..problem.vector import Vector, is_sharded
from ..solvers.agd import AGD
from ..solvers.lower import LowerRule, is_known
from .draws import Draw
from .step import CURVATURE, FACTOR, StepInputs

__all__ = ["AUTO", "MARGIN", "SMALLER", "led_away", "require_own_scale", "rule_at", "stiffened", "with_measured_rates"]

AUTO = "auto"  # in the place of a learning rate
Rule = Callable[[Vector], LowerRule]
MARGIN = 1.1
FIRST = 10  # products before the first step
SMALLER = 3  # how often a step is made again because its lower steps led to where g is stiffer
STIFFER = 4.0  # how much stiffer it is taken for then
NEGLIGIBLE = 1e-3  # length of a step over that of y, which lower steps that went away exceed
DECAY = 0.95  # of the curvature from step to step, at most
GROWTH = 2.0  # by which a curvature that grows is taken for more than it is, at most
TURN = 0.3  # of the gradient in the direction


def require_own_scale(made: torch.optim.Optimizer, method: str) -> None:
    """Raise unless the rate of a lower optimizer is one over a curvature."""
    if not is_known(made) or type(made) not in (SGD, AGD):
        raise ValueError(
            f"Invalid lower_lr value: auto ({type(made).__name__} has a scale of its own, which is not one over a "
            f"curvature: give {method} a number, or use SGD or AGD)"
        )


def with_measured_rates(
    oracle: Oracle, inputs: StepInputs, draws: Sequence[Draw] | None, *, exact: bool, margin: float
) -> tuple[Oracle, StepInputs, Vector, dict[str, Tensor]]:
    """An oracle and the inputs for a step whose rates follow the curvature; what is remembered, and diagnostics.

    Args:
        oracle: of the step. The sample that this one looks at is the first one that the other gives.
        inputs: inputs of the step.
        draws: what the step draws, if it is known.
        exact: whether second derivatives may be used; otherwise differences of gradients.
        margin: the rate is one over so many times the curvature.
    """
    oracle, sample = _with_first_sample(oracle, draws)
    w = _followed(oracle, sample, inputs.memory.get(CURVATURE), exact)
    curvature, rate = _curvature(w, margin)
    groups, rule = _scaled(rate, inputs.lower_groups, inputs.rule)
    inputs = replace(inputs, lower_groups=groups, rule=rule)
    return oracle, inputs, w, {"lower_curvature": curvature, "lower_lr": rate}


def led_away(estimate: Estimate) -> bool:
    """Whether the last lower gradient, which has grown, is more than rounding: a step along it moves y."""
    figures = measured(estimate.diagnostics)
    if estimate.lower is None:
        return False
    step = figures["lower_residual"].norm() * figures["lower_lr"]
    return bool(step > NEGLIGIBLE * estimate.lower.norm())


def stiffened(inputs: StepInputs, estimate: Estimate) -> StepInputs:
    """Inputs for the same step with smaller rates, because that estimate's lower steps led away from a solution."""
    return replace(inputs, memory={**inputs.memory, CURVATURE: estimate.memory[CURVATURE].times(STIFFER)})


def rule_at(
    oracle: Oracle, groups: Sequence[dict[str, Any]], rule: Rule, last: Vector | None, *, exact: bool
) -> tuple[Oracle, Rule]:
    """The update of y with rates that follow the curvature at an oracle's point, and the oracle for its steps.

    Args:
        oracle: of the lower problem.
        groups: of y.
        rule: the update without them.
        last: what was remembered.
        exact: as for `with_measured_rates`.
    """
    oracle, sample = _with_first_sample(oracle, None)
    _, rate = _curvature(_followed(oracle, sample, last, exact), MARGIN)
    return oracle, _scaled(rate, groups, rule)[1]


def _curvature(w: Vector, margin: float) -> tuple[Tensor, Tensor]:
    """A curvature, and the rate that it allows."""
    curvature = w.norm().clamp_min(torch.finfo(w[0].dtype).tiny)
    return curvature, 1 / (margin * curvature)


def _scaled(rate: Tensor, groups: Sequence[dict[str, Any]], rule: Rule) -> tuple[list[dict[str, Any]], Rule]:
    """Groups, and an update, with factors of a rate in place of those that follow it."""
    scaled = [{**group, "lr": rate * group["lr"]} if group.get(FACTOR, False) else group for group in groups]
    return scaled, lambda like: rule(like).with_rates([group["lr"] for group in scaled], None)


def _with_first_sample(oracle: Oracle, draws: Sequence[Draw] | None) -> tuple[Oracle, Sample]:
    """The first sample of g, and an oracle that gives it again; what the step draws of f before is drawn before."""
    held: dict[str, list[Sample]] = {"upper": [], "lower": []}
    whole = False
    for draw in draws or ():
        if draw.level == "lower":
            whole = draw.whole
            break
        held["upper"].append(oracle.f.draw())
    held["lower"] = oracle.g.samples() if whole else [oracle.g.draw()]
    other = oracle.at()
    if held["upper"]:
        other.f = Ahead(oracle.f, held["upper"])
    other.g = Ahead(oracle.g, held["lower"], whole=whole)
    return other, held["lower"][0]


def _followed(oracle: Oracle, sample: Sample, last: Vector | None, exact: bool) -> Vector:
    """The direction of largest curvature, as long as that; of separate lower problems that of the stiffest."""
    if exact:
        with oracle.lower_system(sample) as system:
            return _iterated(oracle, system.gradient, system.hvp, last)
    _, gradient = oracle.lower(sample)
    y, unit = oracle.y, working_unit(oracle.y[0])

    def difference(u: Vector) -> Vector:
        step = math.sqrt(unit) * (1 + y.norm()) / u.norm().clamp_min(torch.finfo(u[0].dtype).tiny)
        return (oracle.at(lower=y + u.times(step)).lower(sample)[1] - gradient).times(1 / step)

    return _iterated(oracle, gradient, difference, last)


def _iterated(oracle: Oracle, gradient: Vector, product: Callable[[Vector], Vector], last: Vector | None) -> Vector:
    """Steps of power iteration, with products that are the Hessian's."""
    lanes, tiny = oracle.lanes, torch.finfo(gradient[0].dtype).tiny

    def step(u: Vector) -> tuple[Tensor, Vector]:
        """Norm and direction of the product with a vector of length 1."""
        found = product(u if lanes is None else Vector([t.expand(lanes, *t.shape) for t in u]))
        oracle.checks.finite("hvp", found)
        if lanes is None:
            size = found.norm()
        else:
            sizes = found.lane_norm()
            size, stiffest = sizes.max(), sizes.argmax().reshape(1)
            found = Vector([t.index_select(0, stiffest)[0] for t in found])
        return size, found.times(1 / size.clamp_min(tiny))

    slope = gradient if lanes is None else Vector([t.mean(0) for t in gradient])
    if last is None:
        u = Vector([_spread(t) for t in slope])
        before, u = step(u.times(1 / u.norm()))
        for _ in range(FIRST - 1):
            size, new = step(u)
            before, size, u = size, size * (size / before.clamp_min(tiny)).clamp(1, GROWTH), new
        return u.times(size)
    before = last.norm()
    u = last.times(1 / before.clamp_min(tiny)) + slope.times(TURN / slope.norm().clamp_min(tiny))
    size, u = step(u.times(1 / u.norm().clamp_min(tiny)))
    grown = size * (size / before.clamp_min(tiny)).clamp(1, GROWTH)
    return u.times(torch.maximum(grown, DECAY * before))


def _spread(like: Tensor) -> Tensor:
    """A vector without any symmetry, the same each time."""
    found = torch.arange(1, like.numel() + 1, device=like.device).mul(1.7).sin().reshape(like.shape).to(like.dtype)
    return sharded_like(found, like) if is_sharded(like) else found

r"""``lower_lr="auto"``: the rate of the lower steps follows the largest curvature of g, measured before each step.

With :math:`H = \nabla^2_{yy} g(x_k, y_k)` on the step's first lower batch, and :math:`w` from the step before,

.. math::
    u &= w / \|w\| + 0.3\, \nabla_y g / \|\nabla_y g\|, \qquad L = \|H u\| / \|u\|,\\
    L_k &= \max(L \min(\max(L / L_{k-1}, 1), 2),\; 0.95\, L_{k-1}), \qquad w \leftarrow L_k\, H u / \|H u\|,

and the rate is :math:`1 / (1.1 L_k)`. This is one step of power iteration; the first step makes ten. The gradient of g
turns it towards directions that x has made stiff, and the rate is smaller while the curvature grows. Methods that
renew one term of a sum in each step use :math:`1 / (3 L_k)`. If the lower steps lead to a stiffer region, so that the
gradient of g grows or is not finite, the step is repeated with L four times as large.
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
from ..problem.vector import Vector, coarsest, is_sharded
from ..solvers.agd import AGD
from ..solvers.lower import NO_END, LowerRule, is_known
from .lower_checks import Factory, own_rate, probe, rate_of
from .step import FACTOR, Draw, StepInputs

__all__ = [
    "AUTO", "MARGIN", "MARGIN_OF_TERMS", "SMALLER", "STIFFER", "is_quiet", "led_away", "lower_rate",
    "with_measured_rates",
]  # fmt: skip

AUTO = "auto"  # in place of a learning rate
Rule = Callable[[Vector], LowerRule]
MARGIN = 1.1
MARGIN_OF_TERMS = 3.0  # curvature is measured on the terms drawn so far, but the largest of all counts
FIRST = 10  # products before the first step
SMALLER = 3  # most repetitions of a step whose lower steps led to a stiffer region
STIFFER = 4.0  # factor of the curvature at each repetition
NEGLIGIBLE = 1e-3  # relative length of a lower step, above which growing lower gradients are no rounding
DECAY = 0.95  # smallest ratio of the curvature to that of the step before
GROWTH = 2.0  # largest extra factor for a growing curvature
TURN = 0.3  # weight of the gradient in the direction
FLAT = (
    "the lower loss has no curvature in y here (is it piecewise linear, like an absolute error, or constant?), so "
    "lower_lr='auto' finds no rate; pass a number as lower_lr, or add a penalty such as 1e-3 * y.square().sum()"
)


def lower_rate(
    lower_lr: Any, lower_factory: Factory, given_factory: Factory | None, method: str, fixed: str
) -> tuple[Any, bool]:
    """Return the rate of the lower groups, and whether it is a factor of the measured rate.

    Args:
        lower_lr: the argument.
        lower_factory: makes the lower optimizer.
        given_factory: the argument ``lower_optimizer``.
        method: name of the method.
        fixed: reason why the method cannot use a measured rate, if it cannot.
    """
    if not isinstance(lower_lr, str):
        return rate_of("lower", lower_lr, given_factory, method), False
    if lower_lr != AUTO:
        raise ValueError(f"Invalid lower_lr value: {lower_lr!r} (a number, or 'auto')")
    if fixed:
        raise ValueError(f"Invalid lower_lr value: auto ({method} takes a number: {fixed})")
    own, sets = (None, False) if lower_factory is SGD else own_rate(lower_factory)
    if sets:
        return rate_of("lower", own, given_factory, method), False
    made = probe(lower_factory, 1.0)
    if not is_known(made) or type(made) not in (SGD, AGD):  # only their rates scale as one over a curvature
        raise ValueError(
            f"Invalid lower_lr value: auto (the default, which is one over the measured curvature; the learning rate "
            f"of {type(made).__name__} may need another scale: pass {method} a number as lower_lr, or plain "
            "torch.optim.SGD or bilevel_optim.AGD as lower_optimizer)"
        )
    return 1.0, True


def with_measured_rates(
    oracle: Oracle,
    groups: Sequence[dict[str, Any]],
    rule: Rule,
    last: Vector | None,
    draws: Sequence[Draw] | None = None,
    *,
    exact: bool,
    margin: float = MARGIN,
) -> tuple[Oracle, list[dict[str, Any]], Rule, Vector, dict[str, Tensor]]:
    """Measure the curvature at the oracle's point; refuse a loss without any.

    Return the oracle, groups and update of y for lower steps with rates that follow it, the state, and diagnostics.

    Args:
        oracle: oracle of the lower problem. The returned one draws the sample that is used here as its first.
        groups: parameter groups of y.
        rule: update of y without measured rates.
        last: curvature vector from an earlier step; None if there is none.
        draws: draws of the step, if known.
        exact: use second derivatives; if False, differences of gradients.
        margin: the rate is 1 / (margin * curvature).
    """
    oracle, sample = _with_first_sample(oracle, draws)
    w, flat = _estimate_curvature(oracle, sample, last, exact)
    curvature = w.norm().clamp_min(torch.finfo(w[0].dtype).tiny)
    oracle.checks.refuse(FLAT, flat)
    rate = (1 / (margin * curvature)).masked_fill(flat, 0)  # finite values, so that the refusal is read
    scaled = [{**group, "lr": rate * group["lr"]} if group.get(FACTOR, False) else group for group in groups]

    def scaled_rule(like: Vector) -> LowerRule:
        return rule(like).with_rates([group["lr"] for group in scaled], None)

    return oracle, scaled, scaled_rule, w, {"lower_curvature": curvature, "lower_lr": rate}


def led_away(estimate: Estimate) -> bool:
    """Return True if the last lower gradient, which has grown, exceeds rounding: a step along it moves y."""
    figures = measured(estimate.diagnostics)
    if estimate.lower is None:
        return False
    step = figures["lower_residual"].norm() * figures["lower_lr"]
    return bool(step > NEGLIGIBLE * estimate.lower.norm())


def is_quiet(keys: set[str], inputs: StepInputs, estimate: Estimate, key: str) -> bool:
    """Return True for an alert without a warning: one of these, or lower solves that move y by rounding errors only."""
    if key != NO_END:
        return key in keys
    residual = estimate.diagnostics.get("lower_residual")
    y = inputs.lower if estimate.lower is None else estimate.lower
    rate = estimate.diagnostics.get("lower_lr", max(inputs.lower_rates, default=0.0))
    rounding = 10 * coarsest(y)
    return residual is not None and bool(residual.norm() * rate <= rounding * y.norm())


def _with_first_sample(oracle: Oracle, draws: Sequence[Draw] | None) -> tuple[Oracle, Sample]:
    """Draw the first sample of g, after the draws of f that precede it; return an oracle that repeats these draws."""
    before: list[Sample] = []
    whole = False
    for draw in draws or ():
        if draw.level == "lower":
            whole = draw.whole
            break
        before.append(oracle.f.draw())
    first = oracle.g.samples() if whole else [oracle.g.draw()]
    other = oracle.at()
    if before:
        other.f = Ahead(oracle.f, before)
    other.g = Ahead(oracle.g, first, whole=whole)
    return other, first[0]


def _estimate_curvature(oracle: Oracle, sample: Sample, last: Vector | None, exact: bool) -> tuple[Vector, Tensor]:
    """Return the direction of largest curvature, with the curvature as its norm; of tasks, that of the stiffest.

    The second result is true if there is no earlier curvature, ``last``, and one of the last two products was zero.
    """
    changes: list[Tensor] = []
    if exact:
        with oracle.lower_system(sample) as system:

            def product(u: Vector, _: Tensor | None) -> Vector:
                found = system.hvp(u)
                changes.append(found.norm())
                return found

            w = _iterated(oracle, system.gradient, product, last)
    else:
        _, gradient = oracle.lower(sample)
        y, unit, slope = oracle.y, working_unit(oracle.y), gradient.norm()
        tiny = torch.finfo(slope.dtype).tiny
        step = least = math.sqrt(unit) * (1 + y.norm())

        def difference(u: Vector, curvature: Tensor | None) -> Vector:
            """Return a difference of gradients over a step on which they change by more than their rounding errors."""
            nonlocal step
            if curvature is not None:  # below the rounding error of the last difference it is not known
                known = torch.maximum(curvature, unit * slope / step).clamp_min(tiny)
                step = torch.maximum(least, math.sqrt(unit) * slope / known)
            scale = step / u.norm().clamp_min(torch.finfo(u[0].dtype).tiny)
            change = oracle.at(lower=y + u.times(scale)).lower(sample)[1] - gradient
            changes.append(change.norm())
            found = change.times(1 / scale)
            return found.add(u, unit**2 * slope / step)  # keeps the direction where rounding leaves none

        w = _iterated(oracle, gradient, difference, last)
    products = torch.stack(changes[-2:])
    return w, (products == 0).any() if last is None else torch.zeros_like(products[0], dtype=torch.bool)


def _iterated(
    oracle: Oracle, gradient: Vector, product: Callable[[Vector, Tensor | None], Vector], last: Vector | None
) -> Vector:
    """Make steps of power iteration with Hessian-vector products, each told the curvature found so far."""
    lanes, tiny = oracle.lanes, torch.finfo(gradient[0].dtype).tiny

    def step(u: Vector, curvature: Tensor | None) -> tuple[Tensor, Vector]:
        """Return the norm and the direction of the product with a unit vector."""
        found = product(u if lanes is None else Vector([t.expand(lanes, *t.shape) for t in u]), curvature)
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
        before, u = step(u.times(1 / u.norm()), None)
        for _ in range(FIRST - 1):
            size, new = step(u, before)
            before, size, u = size, size * (size / before.clamp_min(tiny)).clamp(1, GROWTH), new
        return u.times(size)
    before = last.norm()
    u = last.times(1 / before.clamp_min(tiny)) + slope.times(TURN / slope.norm().clamp_min(tiny))
    size, u = step(u.times(1 / u.norm().clamp_min(tiny)), before)
    grown = size * (size / before.clamp_min(tiny)).clamp(1, GROWTH)
    return u.times(torch.maximum(grown, DECAY * before))


def _spread(like: Tensor) -> Tensor:
    """Return a deterministic vector without symmetry."""
    found = torch.arange(1, like.numel() + 1, device=like.device).mul(1.7).sin().reshape(like.shape).to(like.dtype)
    return sharded_like(found, like) if is_sharded(like) else found

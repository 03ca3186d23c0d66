"""Zeroth-order estimates: differences of whole lower solves along random directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..oracle.copies import Copies
from ..oracle.differentiable import working_unit
from ..oracle.doors import require_free_batch
from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.placement import constant
from ..problem.vector import Later, Vector, coarsest
from ..solvers.linear import quotient
from ..solvers.paths import Paths
from .directions import Directions
from .estimate import Estimate

__all__ = ["AT_PERTURBED", "full_zeroth_order", "partial_zeroth_order"]

AT_PERTURBED = "the method evaluates the loss at perturbed upper parameters, and the batch would not follow them"

NOISE_LIMIT = 10.0  # largest predicted noise-to-signal ratio of an estimate without a warning
ERROR_LIMIT = 1e-2  # the same for the rounding error of the differences
AGREEMENT = 1e-4  # largest relative deviation between ranks' common values that rounding explains


def partial_zeroth_order(
    oracle: Oracle,
    paths: Paths,
    directions: Directions,
    *,
    central: bool = False,
    upper_sample: Sample | None = None,
    ranks: Ranks | None = None,
) -> Estimate:
    r"""Estimate :math:`\nabla_x f + \frac1Q \sum_j \langle \delta_j, \nabla_y f\rangle\, u_j` (PZOBO).

    :math:`\delta_j = (y_N(x + \mu u_j) - y_N(x)) / \mu` approximates :math:`J_N u_j`, with :math:`J_N` the derivative
    of the lower solve. So the second term has mean :math:`J_N^\top \nabla_y f` and relative variance (p + 1)/Q. Both
    derivatives of f are those at :math:`(x, y_N(x))`; the estimate's y is :math:`y_N(x)`.

    Args:
        oracle: the losses; costs the lower gradients of Q + 1 paths (2 Q + 1 if ``central``) and one upper gradient.
        paths: the lower solve.
        directions: :math:`u_j` and :math:`\mu`.
        central: :math:`\delta_j = (y_N(x + \mu u_j) - y_N(x - \mu u_j)) / 2\mu`.
        upper_sample: sample of f. Default: the next one.
        ranks: processes that share the directions, and must have the same data. Default: this one follows all paths.
    """
    sample = upper_sample or oracle.f.draw()
    found: list[tuple[Tensor, Vector, Vector]] = []

    def measure(upper: Vector, ends: Vector, base: Vector) -> tuple[Tensor, Tensor]:
        if not found:
            found.append(oracle.at(lower=base).upper(sample))
        return (ends - Vector(t.unsqueeze(0) for t in base)).lane_dot(found[0][2]), found[0][0]

    indirect, base, diagnostics, left = _indirect(oracle, paths, directions, central, measure, ranks)
    loss, direct, slope = found[0]
    if left is not None:
        diagnostics["predicted_change"] = Later(_change, (slope, *left))
    diagnostics["direct_norm"] = norm = direct.norm()
    _warn_of_noise(oracle, directions, norm, diagnostics)
    return Estimate(loss, direct + indirect, diagnostics, lower=base)


def full_zeroth_order(
    oracle: Oracle,
    paths: Paths,
    directions: Directions,
    *,
    central: bool = False,
    upper_sample: Sample | None = None,
    ranks: Ranks | None = None,
) -> Estimate:
    r"""Estimate the gradient of :math:`\Phi_N(x) = f(x, y_N(x))` by differences along random directions (HOZOG).

    .. math:: \frac1Q \sum_j \frac{\Phi_N(x + \mu u_j) - \Phi_N(x)}{\mu}\, u_j

    Takes no derivative of f. The relative variance is (p + 1)/Q too, but of the whole hypergradient. The
    estimate's y is :math:`y_N(x)`.

    Args:
        oracle: the losses; costs the lower gradients and a value of f for Q + 1 paths (2 Q + 1 if ``central``).
        paths: the lower solve.
        directions: :math:`u_j` and :math:`\mu`.
        central: :math:`(\Phi_N(x + \mu u_j) - \Phi_N(x - \mu u_j)) / 2\mu` instead.
        upper_sample: sample of f. Default: the next one.
        ranks: processes that share the directions, and must have the same data. Default: this one follows all paths.
    """
    sample = upper_sample or oracle.f.draw()
    require_free_batch("upper", sample.arguments, oracle.live_x, AT_PERTURBED)
    found: list[Tensor] = []

    def measure(upper: Vector, ends: Vector, base: Vector) -> tuple[Tensor, Tensor]:
        values = Copies(oracle, ends, upper).values("upper", sample)
        if not found:
            found.append(values[0].clone())
            oracle.checks.loss(found[0])
        wide = values if values.device.type == "mps" else values.double()
        return wide - found[0], found[0]

    gradient, base, diagnostics, _ = _indirect(oracle, paths, directions, central, measure, ranks)
    loss = found[0]
    differences = diagnostics["coefficients"] * (directions.smoothing * (2 if central else 1))
    diagnostics["difference_error"] = _rounding(oracle, Vector([loss]), differences.square())
    if not oracle.session.found.reaches_upper:
        oracle.session.note_reached([loss if bool(gradient.norm() != 0) else None])
    _warn_of_noise(oracle, directions, torch.zeros_like(loss), diagnostics)
    return Estimate(loss, gradient, diagnostics, lower=base)


def _indirect(
    oracle: Oracle,
    paths: Paths,
    directions: Directions,
    central: bool,
    measure: Callable[[Vector, Vector, Vector], tuple[Tensor, Tensor]],
    ranks: Ranks | None,
) -> tuple[Vector, Vector, dict[str, Any], tuple[Vector, ...] | None]:
    r"""Return :math:`\frac1Q \sum_j c_j u_j`, with :math:`c_j` the difference quotients of ``measure``, and the base.

    The last result has what `_change` needs besides the gradient of f. A direction whose coefficient is not finite is
    left out, and the mean is over the others. ``measure`` also returns the upper loss at the base. Each rank follows
    the base and the paths of its own directions.
    """
    ranks = ranks or Ranks()
    signs, own = (1.0, -1.0) if central else (1.0,), slice(ranks.rank, None, ranks.world)
    lanes = [(0, 0.0), *((j, s) for j in range(directions.count)[own] for s in signs)]
    measured, moved, on_the_way = [], [], []
    base: Vector | None = None
    ahead: list[Vector] = []  # of the base path: gradients at its first and its last step, and its start
    rests: list[list[Tensor]] = []
    done = 0
    while done < len(lanes):
        part = lanes[done : done + paths.at_once(len(lanes))]
        upper = directions.points(part)
        found = paths.run(upper)
        ends, slopes = found.y, [own for own in (found.first, found.last) if own is not None]
        on_the_way.append(found.total)
        if base is None:
            base = ends.lane(0).clone()
            oracle.checks.finite("lower_grad", base)
            oracle.checks.loss(found.total[0])
            ahead = [own.lane(0).clone() for own in (*slopes, found.start)] if slopes else []
        values, loss = measure(upper, ends, base)
        measured.append(values)
        difference = ends - Vector(t.unsqueeze(0) for t in base)
        moved.append(difference.lane_norm() ** 2)
        pairs = zip(slopes, ahead[:2], strict=True)
        rests.append([(own - Vector(t.unsqueeze(0) for t in of_base)).lane_norm() for own, of_base in pairs])
        done += len(part)
        del upper, found, ends, slopes, difference
    assert base is not None
    values, squares = torch.cat(measured)[1:], torch.cat(moved)[1:]
    values = values.view(-1, 2) @ constant(signs, values) / 2 if central else values
    coefficients = values / directions.smoothing
    sound = coefficients.isfinite() & torch.cat(on_the_way)[1:].view(-1, len(signs)).isfinite().all(1)
    mine = torch.where(sound, coefficients, 0.0)
    if ranks.world > 1:
        common = [base.norm(), torch.cat(on_the_way)[0], loss]
        coefficients, squares, sound = _together(
            oracle, ranks, directions.count, [coefficients, squares.view(-1, len(signs)), sound], common
        )
    # More than rounding: y responds to x, whatever autograd sees of that.
    oracle.session.note_response(_rounding(oracle, base, squares) <= ERROR_LIMIT)
    dropped = (~sound).sum()
    oracle.checks.alert_if(
        "dropped directions",
        "the lower solve or a loss at some perturbed x is not finite, so those directions are left out (see "
        "diagnostics['dropped_directions']). Use a smaller smoothing or lower_lr",
        lambda dropped: dropped > 0,
        dropped,
    )
    squares_left = [torch.cat(part).nan_to_num(0, 0, 0).square().sum() for part in zip(*rests, strict=True)]
    estimate, *squares_left = ranks.total(directions.combine(mine / (directions.count - dropped), own), *squares_left)
    oracle.checks.finite("lower_grad", estimate, "Every perturbed lower solve diverged: use a smaller smoothing")
    ratio = directions.variance**0.5
    diagnostics: dict[str, Any] = {
        "indirect_norm": estimate.norm(),
        "coefficients": coefficients,
        "noise_to_signal": ratio.to(values) if isinstance(ratio, Tensor) else values.new_full((), ratio),
        "difference_error": _rounding(oracle, base, squares) if paths.samples else squares.new_zeros(()),
        "dropped_directions": dropped,
    }
    left = None
    if ahead:
        first, last, start = ahead
        diagnostics["lower_residual"] = last
        if len(paths.samples) > 2:  # otherwise the first and the last gradient say little of a trend
            diagnostics["lower_growth"] = Later(_growth, (first, last))
            left = base, start, first, last
        diagnostics["response_residual"] = Later(_root, (Vector(squares_left),))
    return estimate, base, diagnostics, left


def _growth(first: Vector, last: Vector) -> Tensor:
    return quotient(last.norm(), first.norm())


def _root(squares: Vector) -> Tensor:
    first, last = squares
    return quotient(last, first).sqrt()


def _change(slope: Vector, base: Vector, start: Vector, first: Vector, last: Vector) -> Tensor:
    """Return the change of f on the way to a zero gradient, if the gradient goes on to fall as it has (a secant)."""
    moved = base - start
    along, fall = moved.dot(last), moved.dot(first - last)
    return slope.dot(moved.times(along / torch.where(fall != 0, fall, torch.finfo(fall.dtype).tiny)))


def _together(
    oracle: Oracle, ranks: Ranks, count: int, found: list[Tensor], common: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Collect the ranks' results along their directions; ``common`` must be the same on each rank."""
    rows = torch.column_stack([t.to(found[0]) for t in found])
    numbers, same = rows.new_zeros(count, rows.shape[1]), torch.stack([t.to(rows) for t in common])
    numbers[ranks.rank :: ranks.world] = rows
    numbers, mean, square = ranks.total(numbers, same / ranks.world, same.square() / ranks.world)
    oracle.checks.refuse(
        "with over_ranks='directions' all ranks must have the same data and random numbers, but their lower solves or "
        "upper losses differ: use the same seeds for loaders and torch on all ranks, or let each rank have its part of "
        "the data (over_ranks='data')",
        (square - mean.square() > AGREEMENT**2 * square).any(),
    )
    return numbers[:, 0], numbers[:, 1:-1].flatten(), numbers[:, -1] > 0.5


def _rounding(oracle: Oracle, base: Vector, squares: Tensor) -> Tensor:
    """Return the predicted relative rounding error of the differences: about 2.5 ulp of y over their size.

    It is infinite without any difference, also for a y of zero. Coarser products (autocast, TF32) count for a
    hundredth: the paths share most of their rounding, and sums over a batch average it.
    """
    finite = squares.isfinite()
    size = (torch.where(finite, squares, 0.0).sum() / finite.sum()).sqrt()
    tensors = (*oracle.x, *base)
    unit = max(coarsest(tensors), working_unit(tensors, oracle.session.found.products) / 100)
    return torch.where(size > 0, 2.5 * unit * base.norm() / size, torch.inf)


def _warn_of_noise(oracle: Oracle, directions: Directions, direct: Tensor, diagnostics: dict[str, Any]) -> None:
    """Warn if one estimate is mostly noise, or its differences mostly rounding."""
    ratio = diagnostics["noise_to_signal"]

    def noisy(indirect: Any, direct: Any, ratio: Any) -> Any:
        # E|estimate|^2 = (1 + ratio^2) |indirect term|^2 gives signal and noise from one estimate.
        size = indirect / (1 + ratio**2) ** 0.5
        noise = size * ratio / NOISE_LIMIT
        return (noise > size) & (noise > direct)

    oracle.checks.alert_if(
        "noisy estimate",
        lambda: (
            f"the estimate of the hypergradient is mostly noise: with {directions.count} directions in "
            f"{sum(t.numel() for t in directions.x):,} dimensions the standard deviation of its indirect term is "
            f"{float(ratio):.3g} times its size (see diagnostics['noise_to_signal']). Use more directions, fewer "
            "upper parameters, or a method that differentiates (AID, ITD, F2SA)"
        ),
        noisy,
        diagnostics["indirect_norm"],
        direct,
        ratio,
    )
    oracle.checks.alert_if(
        "rounded differences",
        "the differences of the lower solves are mostly rounding (see diagnostics['difference_error']): the smoothing "
        "is too small for the precision, or the lower solution does not respond to x at all. Use a larger smoothing, "
        "or float64, and no autocast or TF32 in the lower loss",
        lambda error: error > ERROR_LIMIT,
        diagnostics["difference_error"],
    )

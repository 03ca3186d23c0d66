"""Iterative differentiation: the exact derivative of the last lower steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..oracle.doors import OPTIONS, PROJECTION
from ..oracle.features import FeatureCut
from ..oracle.oracle import LowerSystem, Oracle
from ..oracle.point import none_to_zeros
from ..problem.objective import Sample
from ..problem.vector import Vector
from ..solvers.linear import quotient
from ..solvers.lower import LowerRule, Memory
from ..solvers.unrolling import update_vjp
from .estimate import Estimate

__all__ = ["through_start", "unrolled"]


class _Step(NamedTuple):
    """State of one lower step that the reverse sweep needs."""

    point: Oracle
    sample: Sample
    system: LowerSystem | None  # None: built again when it is needed
    cut: FeatureCut | None  # collects derivatives in features over all steps on one batch, to pull them back to x once


def unrolled(
    oracle: Oracle,
    rule: LowerRule,
    steps: int,
    memory: Memory | None = None,
    *,
    truncate: int | None = None,
    checkpoint: bool = False,
    upper_sample: Sample | None = None,
) -> Estimate:
    r"""Run lower steps from y, and differentiate :math:`f(x, y_T(x))` through the last of them in reverse.

    With the update :math:`y_{t+1} = U(y_t, m_t, \nabla_y g(x, y_t))` (m: momentum and the like), the adjoints obey
    :math:`h \leftarrow h + \nabla^2_{xy} g\, \bar g`,
    :math:`\bar y \leftarrow \partial_y U^\top \bar y + \nabla^2_{yy} g\, \bar g` with
    :math:`\bar g = \partial_g U^\top \bar y`. The starting point is a constant.

    Args:
        oracle: the losses; costs one lower gradient, one Hessian-vector and one cross product per differentiated step
            (one more lower gradient with ``checkpoint``), and one upper gradient.
        rule: makes the steps; its optimizer must be one that can be unrolled.
        steps: number of lower steps T.
        memory: the optimizer's initial state. Default: a new one.
        truncate: number of last steps to differentiate. Default: all.
        checkpoint: keep only the iterates and rebuild each step's graph in the reverse sweep, memory O(T d) instead
            of O(T (activations + d)), for one more gradient per step. Default: False.
        upper_sample: sample of f. Default: the next one, drawn after the lower steps.

    Returns:
        Estimate with :math:`y_T`, and the derivative in the starting point, if no step was left out.
    """
    differentiated = steps if truncate is None else min(truncate, steps)
    # Graphs of sharded modules share the memory of the gathered parameters, so only one can be kept.
    keep_graphs = not checkpoint and oracle.session.options.hvp == "exact" and not oracle.sharded
    trajectory, states, parts = list[_Step](), list[Memory](), list[FeatureCut]()

    def draw() -> Callable[[Vector], tuple[Tensor, Vector]]:
        sample = oracle.g.draw()
        return lambda y: oracle.at(lower=y).lower(sample)

    def draw_recorded() -> Callable[[Vector], tuple[Tensor | None, Vector]]:
        return recorded

    def recorded(y: Vector) -> tuple[Tensor | None, Vector]:
        point, sample, cut = _differentiable(oracle, y, parts)
        system = point.kept_system(sample) if keep_graphs else None
        trajectory.append(_Step(point, sample, system, cut))
        return point.lower(sample) if system is None else (None, system.gradient)

    solved = rule.run(oracle.y, rule.fresh() if memory is None else memory, steps - differentiated, draw)
    begin = solved.y
    if differentiated:
        solved = rule.run(begin, solved.memory, differentiated, draw_recorded, states=states)
    oracle.checks.finite("lower_grad", solved.y)
    loss, h, adjoint = oracle.at(lower=solved.y).upper(upper_sample or oracle.f.draw(once=True))
    memory_adjoint: list[dict[str, Tensor]] = [{} for _ in adjoint]
    end = adjoint.norm()
    while trajectory:
        step = trajectory.pop()
        adjoint, cross, memory_adjoint = _pulled_back(rule, step, states.pop(), adjoint, memory_adjoint)
        if step.cut is None:
            h = h + cross
        else:
            step.cut.add(cross)
    for part in parts:
        if part.usable:
            h = h + part.pulled_back()
    diagnostics = solved.watched(oracle.session, rule, begin, differentiated)
    if differentiated:
        diagnostics["start_influence"] = quotient(adjoint.norm(), end)
    start = adjoint if differentiated == steps else None
    return Estimate(loss, h, diagnostics, start=start, lower=solved.y, solver=solved.memory)


def _differentiable(oracle: Oracle, y: Vector, parts: list[FeatureCut]) -> tuple[Oracle, Sample, FeatureCut | None]:
    """Return the point and sample of the next step, and the feature derivatives; steps on one batch share these."""
    sample = oracle.g.draw()
    if sample.features is None:
        return oracle.at(lower=y), sample, None
    cut = next((part for part in parts if part.features is sample.features), None)
    if cut is None:
        cut = FeatureCut(oracle, sample)
        parts.append(cut)
    return (*cut.at(y, sample), cut) if cut.usable else (oracle.at(lower=y), sample, None)


def _pulled_back(
    rule: LowerRule, step: _Step, state: Memory, adjoint: Vector, memory_adjoint: list[dict[str, Tensor]]
) -> tuple[Vector, Vector, list[dict[str, Tensor]]]:
    """Return the adjoints before a step, and the step's part of the gradient in x."""
    session, x = step.point.session, Vector(())
    doors = session.doors & {PROJECTION, OPTIONS}
    with step.point.lower_system(step.sample) if step.system is None else nullcontext(step.system) as system:
        with step.point.placed() if doors else nullcontext((x, x)) as (x, _):
            before, memory, slope, beside = update_vjp(
                rule, step.point.y, state, system.gradient, adjoint, memory_adjoint, x
            )
        cross, hvp = system.both(slope)
    if doors:
        session.note_reached(beside)
        cross = cross + none_to_zeros(beside, cross)
    return before + hvp, cross, memory


def through_start(oracle: Oracle, start: Vector, adjoint: Vector) -> Vector:
    """Return the derivative in x through the start of the lower steps, from its graph and the adjoint there."""
    roots = [(t, own.to(t.dtype)) for t, own in zip(start, adjoint, strict=True) if t.requires_grad]
    found = torch.autograd.grad(
        [t for t, _ in roots], list(oracle.live_x), [own for _, own in roots], allow_unused=True
    )
    oracle.session.note_reached(found)
    return none_to_zeros(found, oracle.x)

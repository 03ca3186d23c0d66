"""Iterative differentiation: the exact derivative of the last lower steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..oracle.oracle import LowerSystem, Oracle
from ..problem.objective import Sample
from ..problem.vector import Vector
from ..solvers.lower import LowerSolver, update_vjp
from .estimate import Estimate

__all__ = ["unrolled"]


class _Step(NamedTuple):
    """What the reverse sweep needs of one lower step."""

    y: Vector
    memory: list[dict[str, Any]]
    sample: Sample
    system: LowerSystem | None  # None: made again when it is needed


def unrolled(
    oracle: Oracle,
    solver: LowerSolver,
    steps: int,
    *,
    truncate: int | None = None,
    checkpoint: bool = False,
    upper_sample: Sample | None = None,
) -> Estimate:
    r"""Run lower steps from the live y, and differentiate :math:`f(x, y_T(x))` through the last of them in reverse.

    With the update :math:`y_{t+1} = U(y_t, m_t, \nabla_y g(x, y_t))` (m: momentum and the like), the adjoints obey
    :math:`h \leftarrow h + \nabla^2_{xy} g\, \bar g`,
    :math:`\bar y \leftarrow \partial_y U^\top \bar y + \nabla^2_{yy} g\, \bar g` with
    :math:`\bar g = \partial_g U^\top \bar y`. The starting point is a constant.

    Args:
        oracle: the losses; costs one lower gradient, one Hessian-vector and one cross product per differentiated step
            (one more lower gradient with ``checkpoint``), and one upper gradient.
        solver: makes the steps, on aliases of the live y (``y.data``, so that the graphs do not see them as changed);
            its optimizer must be one that can be unrolled.
        steps: number of lower steps T.
        truncate: differentiate only the last that many steps. Default: all.
        checkpoint: keep the iterates only and make each step's graph again in the reverse sweep, memory O(T d) instead
            of O(T (activations + d)), for one more gradient per step. Default: False.
        upper_sample: sample of f. Default: the next one, drawn after the lower steps.

    Returns:
        Estimate with the derivative in the starting point, if no step was left out.
    """
    differentiated = steps if truncate is None else min(truncate, steps)
    keep_graphs = not checkpoint and oracle.session.hvp == "exact"
    trajectory: list[_Step] = []
    # One block for all iterates: as tensors of their own between the graphs' they would fragment the memory.
    iterates = Vector(torch.empty((differentiated, *t.shape), dtype=t.dtype, device=t.device) for t in oracle.y)

    def recorded() -> Callable[[], tuple[Tensor, Vector]]:
        step = _Step(iterates.lane(len(trajectory)), solver.memory(), oracle.g.draw(), None)
        step.y.copy_(oracle.y)
        if keep_graphs:
            # The graph is made on a copy that stays as it is, and used while that copy is in place again.
            with oracle.at(lower=step.y):
                step = step._replace(system=oracle.kept_system(step.sample))
        trajectory.append(step)
        return partial(_evaluated, oracle, step)

    gradient = solver.run(steps - differentiated, lambda: partial(oracle.lower, oracle.g.draw()))
    gradient = solver.run(differentiated, recorded) or gradient
    oracle.checks.finite("lower_grad", oracle.y)
    loss, h, adjoint = oracle.upper(upper_sample or oracle.f.draw())
    memory_adjoint: list[dict[str, Tensor]] = [{} for _ in adjoint]
    while trajectory:
        step = trajectory.pop()
        with (
            oracle.at(lower=step.y),
            nullcontext(step.system) if step.system else oracle.lower_system(step.sample) as system,
        ):
            adjoint, memory_adjoint, gradient_adjoint = update_vjp(
                solver.optimizer, step.y, step.memory, system.gradient, adjoint, memory_adjoint
            )
            cross, hvp = system.both(gradient_adjoint)
        h, adjoint = h + cross, adjoint + hvp
        del step, system
    diagnostics = {} if gradient is None else {"lower_residual": gradient.norm()}
    return Estimate(loss, h, diagnostics, start=adjoint if differentiated == steps else None)


def _evaluated(oracle: Oracle, step: _Step) -> tuple[Tensor, Vector]:
    if step.system is None:
        return oracle.lower(step.sample)
    return torch.zeros((), device=oracle.device), step.system.gradient

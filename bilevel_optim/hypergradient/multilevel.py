"""Multilevel Monte Carlo over the accuracy of the lower solve, with a new lower problem at every draw (contexts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..oracle.lanes import stacked, weighted_upper
from ..oracle.oracle import LowerSystem, Oracle
from ..problem.objective import Sample
from ..problem.placement import to_device
from ..problem.tasks import select
from ..problem.vector import Vector
from ..solvers import linear
from ..solvers.contexts import CROSS, NEUMANN, POWER, TRUNCATION, UPPER, Contexts, CoupledPath
from ..tracing import span
from .estimate import Estimate

__all__ = ["multilevel", "smoothness"]

BASE, PREVIOUS, LAST = range(3)  # kinds of points


@dataclass(frozen=True)
class _Lanes:
    """Points where the hypergradient formula is evaluated: row of the path, weight, and kind."""

    rows: list[int]
    weights: list[float]
    kinds: list[int]

    @classmethod
    def of(cls, path: CoupledPath, chances: Tensor | None) -> _Lanes:
        """Return the lanes of :math:`u_b + (u_k - u_{k-1})/p_k` for each context; without chances, of :math:`u_k`."""
        scale, lanes = 1 / path.contexts.count, []
        for row, depth in enumerate(path.depths):
            if chances is None:
                lanes.append((row, scale, LAST))
                continue
            correction = scale / float(chances[depth - path.base_level - 1])
            if depth == path.base_level + 1:  # the base and the previous point are one
                lanes.append((row, scale - correction, BASE))
            else:
                lanes += [(row, scale, BASE), (row, -correction, PREVIOUS)]
            lanes.append((row, correction, LAST))
        lanes = [lane for lane in lanes if lane[1] != 0]
        return cls(*(list(part) for part in zip(*lanes, strict=True))) if lanes else cls([], [], [])

    def difference(self, row: int) -> list[float]:
        """Return the weights of :math:`u_k - u_{k-1}` of one context."""
        lower = PREVIOUS if self.rows.count(row) == 3 else BASE
        signs = {LAST: 1.0, lower: -1.0}
        return [signs.get(kind, 0.0) if own == row else 0.0 for own, kind in zip(self.rows, self.kinds, strict=True)]


def multilevel(
    oracle: Oracle,
    path: CoupledPath,
    *,
    chances: Tensor | None,
    steps: int,
    rate: float,
    neumann: str = "sum",
    implicit_term: bool = True,
    measured: int | None = None,
) -> Estimate:
    r"""Compute the mean over contexts of :math:`u_b + (u_k - u_{k-1})/p_k`, or of :math:`u_k`.

    .. math:: u_l = \nabla_x f(x, Y_l; \eta'') - \nabla^2_{xy} g(x, Y_l; \eta')\, \Lambda\, \nabla_y f(x, Y_l; \eta'')

    with :math:`\Lambda \approx [\nabla^2_{yy} g]^{-1}`. All points of a context share :math:`\eta', \eta''` and the
    samples in :math:`\Lambda`. The weighted points of all contexts are one stacked problem, so there is one backward
    pass to x and no tensor of size (points, x).

    Args:
        oracle: of one problem, whose losses take the batch of a context; costs per point one upper gradient, one lower
            gradient and one cross product, and one lower gradient and one Hessian-vector product for each term of the
            series after the first.
        path: contexts, their levels k and their lower points (`coupled_path`); contexts without a lane here are summed
            elsewhere.
        chances: :math:`p_k` for k = b + 1, ... (`level_probabilities`); None for :math:`u_k` alone.
        steps: N, number of terms of the series (iterations of conjugate gradients).
        rate: c, at most 1/L.
        neumann: ``"sum"``, :math:`c \sum_{n<N} \prod_{i \le n} (I - c H_i)`; ``"product"``, one random term of it,
            times N; ``"cg"``, conjugate gradients on one batch.
        implicit_term: False leaves the second term out.
        measured: lane of the path whose :math:`u_k - u_{k-1}` is computed by itself; its squared norm is the diagnostic
            ``"correction"``. Costs one more backward pass.

    Returns:
        Estimate whose ``lower`` is the mean of :math:`Y_k`.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> oracle = bo.Oracle(  # y* = x + the context's number, and f asks for y* = 1
        ...     [x], [y], lambda t: (y - 1).square().sum() / 2, lambda t: (y - x - t).square().sum() / 2
        ... )
        >>> tasks = bo.TensorTasks(torch.tensor([[[3.0]], [[5.0]]]))
        >>> contexts = bo.hypergradient.Contexts(tasks, 2, seed=0)
        >>> start = bo.Vector([torch.zeros(2, 1)])
        >>> path = bo.hypergradient.coupled_path(oracle, contexts, start, [3, 3], lambda e: [1.0])
        >>> [float(t.mean()) for t in (*path.base, *path.previous, *path.last)]  # 0, 7/8 and 63/64 of y*
        [0.0, 3.5, 3.9375]
        >>> bo.hypergradient.multilevel(oracle, path, chances=None, steps=1, rate=1.0).gradient  # their mean, less 1
        (tensor([2.9375]),)
    """
    lanes = _Lanes.of(path, chances)
    ends = (path.base, path.previous, path.last)
    y = Vector(
        torch.stack([ends[kind][i][row] for row, kind in zip(lanes.rows, lanes.kinds, strict=True)])
        for i in range(len(oracle.y))
    )
    points = _PathPoints(oracle, stacked(oracle, y, shared_rng=True), path, torch.tensor(lanes.rows, device="cpu"))
    weights = to_device(lanes.weights, y[0].device, y[0].dtype)
    deepest = to_device([i for i, kind in enumerate(lanes.kinds) if kind == LAST], y[0].device)
    differences = [] if measured is None else [to_device(lanes.difference(measured), y[0].device, y[0].dtype)]
    values, gradient, adjoint, changes = weighted_upper(
        points.problem, points.sample("upper", UPPER), weights, differences
    )
    diagnostics = {}
    if implicit_term:
        with span("linear solve"):
            solution, ratio, rest = points.inverse(adjoint, steps, rate, neumann)
        with points.problem.lower_system(points.sample("lower", CROSS)) as system:
            gradient = gradient - system.cross(solution)
            changes = [
                change - system.cross(solution * (difference / weights))
                for change, difference in zip(changes, differences, strict=True)
            ]
        diagnostics["neumann_ratio"] = ratio
        squares = torch.stack([rest, adjoint.lane_norm()])[:, deepest].square().sum(1)
        diagnostics["linear_relative_residual"] = linear.quotient(squares[0], squares[1]).sqrt()
        diagnostics["lower_residual"] = (system.gradient.lane_norm()[deepest] ** 2).mean().sqrt()
    for change in changes:
        diagnostics["correction"] = change.norm() ** 2
    count = path.contexts.count
    mean = Vector(t.sum(0) / count for t in path.last)
    return Estimate(values[deepest].sum() / count, gradient, diagnostics, lower=mean)


@dataclass(frozen=True)
class _PathPoints:
    """Points of a path as one stacked problem, each with the batches of its context.

    Attributes:
        oracle: oracle of one problem.
        problem: oracle of the stacked problem.
        path: the path.
        rows: the lane of the path that each point belongs to.
    """

    oracle: Oracle
    problem: Oracle
    path: CoupledPath
    rows: Tensor

    def sample(self, level: str, role: int) -> Sample:
        """Return the sample of batches for this purpose; their features are evaluated once for each context."""
        (batch,) = self.path.contexts.batches(level, self.path.slots, role)
        objective = self.problem.f if level == "upper" else self.problem.g
        features, rows = objective.features, self.rows
        if features is None:
            return Sample(objective.loss, (select(batch, rows),))
        return Sample(objective.loss, (batch,), features=lambda batch: select(features(batch), rows))

    def systems(self, times: int = 1) -> Iterator[tuple[Sample, Any]]:
        """Yield lower samples that serve for products only, and the same by context."""
        for head in self.path.contexts.heads(self.oracle, self.path.slots, NEUMANN, times=times):
            yield Sample(self.problem.g.loss, (select(head, self.rows),)), head

    def inverse(self, r: Vector, steps: int, rate: float, neumann: str) -> tuple[Vector, Tensor, Tensor]:
        """Return the inverse Hessians applied to r, the largest growth of a term of the series, and the residuals."""
        problem = self.problem
        if neumann == "cg":
            ((sample, _),) = self.systems()
            with problem.lower_system(sample) as system:
                result = linear.cg(system.hvp, r, steps=steps, lanes=True)
            problem.checks.finite("hvp", result.solution)
            problem.checks.alert(
                "indefinite",
                "the lower Hessian is not positive definite at a point of the path (conjugate gradients stopped there "
                "and kept the iterate with the smallest residual), so the hypergradient is not reliable. Add a penalty "
                "to the lower loss that makes it strongly convex",
                result.indefinite.any(),
            )
            return result.solution, torch.full((), torch.nan, device=problem.device), result.residual
        counts = [steps] * len(self.rows)
        if neumann == "product":
            generator = self.path.contexts.counters.generator
            last = [
                int(torch.randint(steps, (), generator=generator(slot, TRUNCATION), device="cpu"))
                for slot in self.path.slots
            ]
            counts = [last[row] + 1 for row in self.rows.tolist()]
        lengths = to_device(counts, problem.device)
        total, term = r, r
        ratio = torch.zeros((), dtype=torch.float64, device=problem.device)
        for n, product in enumerate(self.products(counts), 1):
            alive = lengths > n
            new = term - product(term) * (alive.to(term[0].dtype) * rate)
            growth = torch.where(alive, new.lane_norm() / term.lane_norm().clamp_min(1e-300), 0.0)
            ratio = torch.maximum(ratio, growth.max())
            term, total = new, total + new
        solution = term * (steps * rate) if neumann == "product" else total * rate
        problem.checks.finite("hvp", solution, "A larger smoothness is the usual remedy")
        return solution, ratio, term.lane_norm()

    def products(self, counts: list[int]) -> Iterator[Callable[[Vector], Vector]]:
        """Yield products with independent sample Hessians; a point is left out once its series has ended."""
        times = max(counts) - 1
        if self.path.contexts.deterministic and times > 0 and min(counts) > times:
            ((sample, _),) = self.systems()
            with self.problem.lower_system(sample) as system:
                for _ in range(times):
                    yield system.hvp
            return
        for n, (sample, head) in enumerate(self.systems(times) if times > 0 else (), 1):
            going = [i for i, count in enumerate(counts) if n < count]
            if len(going) == len(counts):
                with self.problem.lower_system(sample) as system:
                    yield system.hvp
                continue
            some = stacked(self.oracle, Vector(t[going] for t in self.problem.y), shared_rng=True)
            with some.lower_system(Sample(some.g.loss, (select(head, self.rows[going]),))) as system:

                def embedded(v: Vector, system: LowerSystem = system, going: list[int] = going) -> Vector:
                    result = v.zeros_like()
                    for t, part in zip(result, system.hvp(Vector(t[going] for t in v)), strict=True):
                        t[going] = part
                    return result

                yield embedded


def smoothness(oracle: Oracle, contexts: Contexts, start: Vector, iterations: int = 12) -> Tensor:
    r"""Return the largest eigenvalue of the sample Hessians of g over the contexts at ``start``, by power iteration.

    Args:
        oracle: of one problem; costs ``iterations`` Hessian-vector products for each context.
        contexts: the contexts; one lower batch of each.
        start: stacked lower points.
        iterations: number of products.
    """
    problem = stacked(oracle, start, shared_rng=True)
    own = [contexts.counters.generator(POWER, i) for i in range(len(start))]
    v = Vector(
        to_device(torch.randn(t.shape, generator=generator, dtype=t.dtype, device="cpu"), t.device)
        for generator, t in zip(own, start, strict=True)
    )
    norm = v.lane_norm()
    (head,) = contexts.heads(oracle, range(contexts.count), POWER)
    with problem.lower_system(Sample(problem.g.loss, (head,))) as system:
        for _ in range(iterations):
            v = system.hvp(v * (1 / norm.clamp_min(1e-300)))
            norm = v.lane_norm()
    oracle.checks.finite("hvp", [norm])
    return norm.max()

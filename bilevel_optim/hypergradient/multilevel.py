"""Multilevel Monte Carlo over the accuracy of the lower solve, for a fresh lower problem at every draw (contexts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..oracle.oracle import Oracle, filled
from ..oracle.tasks import LaneLoss, TaskObjective, select
from ..problem.objective import Sample
from ..problem.vector import Vector
from ..solvers import linear
from ..solvers.contexts import CROSS, NEUMANN, POWER, TRUNCATION, UPPER, Contexts, Path
from .estimate import Estimate

__all__ = ["multilevel", "smoothness"]


@dataclass(frozen=True)
class _Lanes:
    """Points where the hypergradient formula is evaluated: context, weight, and kind (0 base, 1 previous, 2 last)."""

    slots: list[int]
    weights: list[float]
    kinds: list[int]

    @classmethod
    def of(cls, depths: Sequence[int], mine: Sequence[int], base: int | None, chances: Tensor, scale: float) -> _Lanes:
        """With a base level :math:`u_b + (u_k - u_{k-1})/p_k` for each context, without :math:`u_k`."""
        lanes: list[tuple[int, float, int]] = []
        for slot in mine:
            if base is None:
                lanes.append((slot, scale, 2))
                continue
            correction = scale / float(chances[depths[slot] - base - 1])
            if depths[slot] == base + 1:  # the base and the previous point are one
                lanes.append((slot, scale - correction, 0))
            else:
                lanes += [(slot, scale, 0), (slot, -correction, 1)]
            lanes.append((slot, correction, 2))
        lanes = [lane for lane in lanes if lane[1] != 0]
        return cls(*(list(part) for part in zip(*lanes, strict=True))) if lanes else cls([], [], [])

    def difference(self, slot: int) -> list[float]:
        """Weights of :math:`u_k - u_{k-1}` of one context."""
        count = self.slots.count(slot)
        lower_kind = 1 if count == 3 else 0
        return [
            (1.0 if kind == 2 else -1.0 if kind == lower_kind else 0.0) if own == slot else 0.0
            for own, kind in zip(self.slots, self.kinds, strict=True)
        ]


def multilevel(
    oracle: Oracle,
    contexts: Contexts,
    path: Path,
    depths: Sequence[int],
    mine: Sequence[int],
    *,
    base: int | None,
    chances: Tensor,
    steps: int,
    rate: float,
    neumann: str = "sum",
    implicit_term: bool = True,
    measured: int | None = None,
) -> Estimate:
    r"""The mean over contexts of :math:`u_b + (u_k - u_{k-1})/p_k`, or of :math:`u_k` without a base level.

    .. math:: u_l = \nabla_x f(x, Y_l; \eta'') - \nabla^2_{xy} g(x, Y_l; \eta')\, \Lambda\, \nabla_y f(x, Y_l; \eta'')

    with :math:`\Lambda \approx [\nabla^2_{yy} g]^{-1}`. All points of a context share :math:`\eta', \eta''` and the
    samples in :math:`\Lambda`. The weighted points of all contexts are one stacked problem, so there is one backward
    pass to x and no tensor of size (points, x).

    Args:
        oracle: of the live tensors; costs per point one upper gradient, one lower gradient and one cross product, and
            one lower gradient and one Hessian-vector product for each term of the series after the first.
        contexts: contexts and data.
        path: their lower points.
        depths: their levels k.
        mine: the contexts that this process takes care of.
        base: base level b; None for :math:`u_k` alone.
        chances: :math:`p_k` for k = b + 1, ...
        steps: N, number of terms of the series (iterations of conjugate gradients).
        rate: c, at most 1/L.
        neumann: ``"sum"``, :math:`c \sum_{n<N} \prod_{i \le n} (I - c H_i)`; ``"product"``, one term of it at random,
            times N; ``"cg"``, conjugate gradients on one batch.
        implicit_term: False leaves the second term out.
        measured: context whose :math:`u_k - u_{k-1}` is computed by itself; its squared norm is the diagnostic
            ``"correction"``. Costs one more backward pass.
    """
    lanes = _Lanes.of(depths, mine, base, chances, 1 / contexts.count)
    where = {slot: i for i, slot in enumerate(mine)}
    rows = [where[slot] for slot in lanes.slots]
    y = Vector(
        torch.stack([path[kind][i][row] for row, kind in zip(rows, lanes.kinds, strict=True)]).requires_grad_()
        for i in range(len(oracle.y))
    )
    difference = None if measured is None else y[0].new_tensor(lanes.difference(measured))
    points = _Points(oracle, contexts, lanes, mine, rows, y)
    loss, direct, adjoint, measured_direct = points.upper(difference)
    gradient, diagnostics = direct, {}
    change = measured_direct
    if implicit_term:
        solution, ratio = points.solve(adjoint, steps, rate, neumann)
        weights = y[0].new_tensor(lanes.weights)
        with points.oracle.lower_system(points.sample(CROSS)) as system:
            gradient = gradient - system.cross(solution)
            if difference is not None:
                change = change - system.cross(solution * (difference / weights))
        diagnostics["neumann_ratio"] = ratio
        deepest = torch.tensor([kind == 2 for kind in lanes.kinds], device=y[0].device)
        diagnostics["lower_residual"] = (system.gradient.lane_norm()[deepest] ** 2).mean().sqrt()
    if difference is not None:
        diagnostics["correction"] = change.dot(change)
    return Estimate(loss, gradient, diagnostics)


class _Points:
    """Both losses at all points, each with the batches of its context."""

    def __init__(
        self, oracle: Oracle, contexts: Contexts, lanes: _Lanes, mine: Sequence[int], rows: list[int], y: Vector
    ) -> None:
        self.live, self.contexts, self.lanes, self.mine, self.y = oracle, contexts, lanes, mine, y
        self.rows = torch.tensor(rows)
        self.oracle = self._oracle(y)

    def _oracle(self, y: Vector) -> Oracle:
        def nothing() -> Any:
            raise AssertionError("samples are given")

        f, g = (TaskObjective(LaneLoss(self.live, level, y, alike=True), nothing) for level in ("upper", "lower"))
        live = self.live
        points = Oracle(live.x, y, f, g, names=live.names, session=live.session, lanes=len(y[0]))
        points.checks = live.checks
        return points

    def batches(self, role: int, times: int = 1) -> Iterator[Any]:
        """Batches for the points, those of their contexts."""
        level = "upper" if role == UPPER else "lower"
        for batch in self.contexts.batches(level, self.mine, role, times=times):
            yield select(batch, self.rows)

    def sample(self, role: int) -> Sample:
        (batch,) = self.batches(role)
        return Sample(self.oracle.g.loss, (batch,))

    def upper(self, difference: Tensor | None) -> tuple[Tensor, Vector, Vector, Vector]:
        """Mean of f at the last points, weighted gradients in x and in y, and the gradient in x of the difference."""
        oracle, x, y = self.oracle, self.oracle.x, self.y
        (batch,) = self.batches(UPPER)
        loss = oracle.f.loss
        assert isinstance(loss, LaneLoss)
        with oracle.buffers_kept():
            values = oracle.dependent("upper", loss.values(batch), y)
            weights = values.new_tensor(self.lanes.weights)
            gradients = torch.autograd.grad(
                values, [*x, *y], weights, allow_unused=True, retain_graph=difference is not None
            )
            direct = filled(gradients[: len(x)], x)
            oracle.note_reached(gradients[: len(x)])
            change = x.zeros_like()
            if difference is not None and any(g is not None for g in gradients[: len(x)]):
                change = filled(torch.autograd.grad(values, list(x), difference.to(values), allow_unused=True), x)
        oracle.count("upper_grad")
        adjoint = filled(gradients[len(x) :], y)
        oracle.checks.finite("loss", [values.detach()])
        oracle.checks.finite("upper_grad", [*direct, *adjoint])
        deepest = torch.tensor([kind == 2 for kind in self.lanes.kinds], device=values.device)
        return values.detach()[deepest].sum() / self.contexts.count, direct, adjoint, change

    def solve(self, r: Vector, steps: int, rate: float, neumann: str) -> tuple[Vector, Tensor]:
        """The inverse Hessians applied to r, and the largest growth of a term of the series."""
        if neumann == "cg":
            (batch,) = self.batches(NEUMANN)
            with self.oracle.lower_system(Sample(self.oracle.g.loss, (batch,))) as system:
                result = linear.cg(system.hvp, r, steps=steps, lanes=True)
            self.oracle.checks.finite("hvp", result.solution)
            self.oracle.checks.alert(
                "indefinite",
                "the lower Hessian is not positive definite at a point of the path (conjugate gradients kept their "
                "last iterate), so the hypergradient is not reliable",
                result.indefinite.any(),
            )
            return result.solution, torch.full((), torch.nan, device=self.oracle.device)
        counts = [steps] * len(self.lanes.slots)
        if neumann == "product":
            truncation = {
                slot: int(torch.randint(steps, (), generator=self.contexts.counters.generator(slot, TRUNCATION)))
                for slot in self.mine
            }
            counts = [truncation[slot] + 1 for slot in self.lanes.slots]
        total, term = r, r
        ratio = torch.zeros((), dtype=torch.float64, device=self.oracle.device)
        for n, product in enumerate(self._products(max(counts) - 1, counts), 1):
            alive = torch.tensor([n < count for count in counts], device=self.oracle.device)
            new = term - product(term) * (alive.to(term[0].dtype) * rate)
            growth = torch.where(alive, new.lane_norm() / term.lane_norm().clamp_min(1e-300), 0.0)
            ratio = torch.maximum(ratio, growth.max())
            term, total = new, total + new
        solution = term * (steps * rate) if neumann == "product" else total * rate
        self.oracle.checks.finite("hvp", solution, "A larger smoothness is the usual remedy")
        return solution, ratio

    def _products(self, times: int, counts: list[int]) -> Iterator[Callable[[Vector], Vector]]:
        """Products with independent sample Hessians; a lane is left out once its series has ended."""
        if times <= 0:
            return
        if self.contexts.deterministic and min(counts) > times:
            (batch,) = self.batches(NEUMANN)
            with self.oracle.lower_system(Sample(self.oracle.g.loss, (batch,))) as system:
                for _ in range(times):
                    yield system.hvp
            return
        for n, batch in enumerate(self.batches(NEUMANN, times), 1):
            going = [i for i, count in enumerate(counts) if n < count]
            if len(going) == len(counts):
                with self.oracle.lower_system(Sample(self.oracle.g.loss, (batch,))) as system:
                    yield system.hvp
                continue
            some = self._oracle(Vector(t.detach()[going].requires_grad_() for t in self.y))
            with some.lower_system(Sample(some.g.loss, (select(batch, torch.tensor(going)),))) as system:

                def embedded(v: Vector, system: Any = system, going: list[int] = going) -> Vector:
                    result = v.zeros_like()
                    for t, part in zip(result, system.hvp(Vector(t[going] for t in v)), strict=True):
                        t[going] = part
                    return result

                yield embedded


def smoothness(oracle: Oracle, contexts: Contexts, start: Vector, iterations: int = 12) -> Tensor:
    r"""The largest eigenvalue of the sample Hessians of g over the contexts at ``start``, by power iteration.

    Args:
        oracle: of the live tensors; costs ``iterations`` Hessian-vector products for each context.
        contexts: the contexts; one lower batch of each.
        start: stacked lower points.
        iterations: number of products.
    """
    slots = list(range(contexts.count))
    lanes = _Lanes(slots, [1.0] * len(slots), [2] * len(slots))
    y = Vector(t.detach().clone().requires_grad_() for t in start)
    points = _Points(oracle, contexts, lanes, slots, slots, y)
    v = Vector(torch.randn(t.shape, generator=contexts.counters.generator(POWER, i)).to(t) for i, t in enumerate(y))
    norm = v.lane_norm()
    with points.oracle.lower_system(points.sample(POWER)) as system:
        for _ in range(iterations):
            v = system.hvp(v * (1 / norm.clamp_min(1e-300)))
            norm = v.lane_norm()
    oracle.checks.finite("hvp", [norm])
    return norm.max()

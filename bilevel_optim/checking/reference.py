"""The exact hypergradient, by paths that share nothing with the methods but the evaluation of the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import LBFGS

from ..errors import GradcheckError
from ..hypergradient.finite_difference import stencil
from ..oracle.oracle import Oracle
from ..oracle.session import Session
from ..problem.objective import Sample
from ..problem.vector import Vector

__all__ = ["Coordinates", "Reference", "reference_of"]

DENSE_LIMIT = 512  # lower variables up to which the Hessian is formed
PATIENCE = 100  # of the last steps of a lower solve
MAX_BATCHES = 256  # batches of an objective that stand for its data

Coordinates = Callable[[Vector], Tensor]


@dataclass(frozen=True)
class Reference:
    """The mean hypergradient of lower problems.

    Attributes:
        gradient: in some coordinates.
        coordinates: how to get these of an estimate.
        kind: ``"dense"`` or ``"differences"``.
        solutions: of the lower problems.
        residual: the largest norm of a lower gradient there.
    """

    gradient: Tensor
    coordinates: Coordinates
    kind: str
    solutions: list[Vector]
    residual: float


def reference_of(problems: Sequence[Oracle], starts: Sequence[Vector], kind: str, directions: int) -> Reference:
    """The reference of problems whose lower solves start at these points.

    Args:
        problems: the losses of each, with their data.
        starts: where their lower solves start.
        kind: ``"dense"``, ``"differences"``, or ``"auto"``.
        directions: how many ``"differences"`` takes.
    """
    x, y = problems[0].x, problems[0].y
    dense = kind == "dense" or (kind == "auto" and sum(t.numel() for t in y) <= DENSE_LIMIT)
    probes = [] if dense else _probes(x, directions)
    parts, solutions, residual = list[Tensor](), list[Vector](), 0.0
    for problem, start in zip(problems, starts, strict=True):
        truth = _Truth(problem)
        solution, norm = truth.solve(start, patience=5 if dense else PATIENCE)  # Newton steps do the rest
        if dense:
            gradient, solution, norm = truth.dense(solution)
            parts.append(_flat(gradient))
        else:
            parts.append(torch.stack([truth.directional(probe, solution) for probe in probes]))
        solutions.append(solution)
        residual = max(residual, norm)
    mean = torch.stack(parts).sum(0) / len(problems)
    if dense:
        return Reference(mean, _flat, "dense", solutions, residual)
    # Random unit vectors d_i in p dimensions: |e|^2 is the mean of p (d_i . e)^2.
    scale = math.sqrt(sum(t.numel() for t in x) / len(probes))

    def coordinates(gradient: Vector) -> Tensor:
        return scale * torch.stack([probe.dot(gradient) for probe in probes]).double().cpu()

    return Reference(scale * mean, coordinates, "differences", solutions, residual)


class _Truth:
    """The losses of one problem averaged over their data, and the exact hypergradient."""

    def __init__(self, oracle: Oracle) -> None:
        session = oracle.session
        # Products are exact here, whatever the method takes.
        oracle.session = Session.begun(
            replace(session.options, hvp="exact"), session.found, session.buffers, session.warned
        )
        self.oracle = oracle
        self._upper, self._lower = oracle.f.samples(MAX_BATCHES), oracle.g.samples(MAX_BATCHES)
        self._unit = torch.finfo(oracle.y[0].dtype).eps

    def lower(self, y: Vector, x: Vector | None = None) -> tuple[Tensor, Vector]:
        """Value of the averaged lower loss, and its gradient in y."""
        point = self.oracle.at(x, y)
        with point.session.buffers_kept():
            return _mean(point.lower, self._lower)

    def upper(self, y: Vector, x: Vector | None = None) -> tuple[Tensor, Vector]:
        """Value of the averaged upper loss, and its gradient in x and y."""
        point = self.oracle.at(x, y)

        def joined(sample: Sample) -> tuple[Tensor, Vector]:
            loss, grad_x, grad_y = point.upper(sample)
            return loss, Vector((*grad_x, *grad_y))

        return _mean(joined, self._upper)

    def solve(self, start: Vector, x: Vector | None = None, patience: int = PATIENCE) -> tuple[Vector, float]:
        """Minimiser of the averaged lower loss over y, and the norm of its gradient there.

        ``patience``: how many steps may be made that lessen the gradient by less than one per cent.
        """
        variables = Vector(t.clone().requires_grad_() for t in start)

        def closure() -> float:
            value, gradient = self.lower(variables.detach(), x)
            for tensor, grad in zip(variables, gradient, strict=True):
                tensor.grad = grad
            return float(value)

        LBFGS(
            list(variables),
            max_iter=500,
            history_size=50,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        ).step(closure)  # type: ignore[no-untyped-call]
        # A line search sees rounding errors of the value, so it stops at the root of the precision. Gradient steps of
        # Barzilai and Borwein's length look at the gradient only.
        y = variables.detach()
        gradient = self.lower(y, x)[1]
        best, residual = y, float(gradient.norm())
        move, idle = gradient * -1e-3, 0
        while residual > 0 and idle < patience:
            y, change = y + move, gradient
            gradient = self.lower(y, x)[1]
            change, norm = gradient - change, float(gradient.norm())
            idle = 0 if norm < 0.99 * residual else idle + 1
            if norm < residual:
                best, residual = y, norm
            curvature = float(move.dot(change))
            if not curvature > 0:
                break
            move = gradient * (-float(move.dot(move)) / curvature)
        return best, residual

    def dense(self, y: Vector) -> tuple[Vector, Vector, float]:
        """Implicit differentiation with the whole lower Hessian; the solution, polished by Newton steps; its gradient.

        Of the last, the norm.
        """
        hessian = self._hessian(y)
        eigenvalues = torch.linalg.eigvalsh(hessian)
        if not eigenvalues[0] > self._unit * len(hessian) * eigenvalues[-1].abs():
            raise GradcheckError(
                "there is no reference: the lower loss is not strongly convex at the solution that was found (smallest "
                f"eigenvalue of its Hessian {float(eigenvalues[0]):.3g}, largest {float(eigenvalues[-1]):.3g})"
            )
        for _ in range(5):
            slope = _flat(self.lower(y)[1])
            step = torch.linalg.solve(hessian, slope)
            if not step.norm() > self._unit * _flat(y).norm():
                break
            y = y - _unflat(step, y)
        error = float(step.norm())
        if not error <= max(1e-4, self._unit**0.5) * (1 + float(_flat(y).norm())):
            raise GradcheckError(
                f"there is no reference: the lower problem could not be solved (error about {error:.3g})"
            )
        split, gradient = len(self.oracle.x), self.upper(y)[1]
        v = _unflat(torch.linalg.solve(hessian, _flat(gradient[split:])), y)
        point, cross = self.oracle.at(lower=y), self.oracle.x.zeros_like()
        for sample in self._lower:
            with point.lower_system(sample, gradient=False) as system:
                cross = cross + system.cross(v)
        return Vector(gradient[:split]) - cross * (1 / len(self._lower)), y, float(slope.norm())

    def _hessian(self, y: Vector) -> Tensor:
        point, size = self.oracle.at(lower=y), sum(t.numel() for t in y)
        rows = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        for sample in self._lower:
            with point.lower_system(sample, gradient=False) as system:
                for i, unit in enumerate(torch.eye(size, dtype=torch.float64, device="cpu")):
                    rows[i] += _flat(system.hvp(_unflat(unit, y)))
        rows /= len(self._lower)
        return (rows + rows.T) / 2

    def directional(self, probe: Vector, solution: Vector) -> Tensor:
        """Derivative of f(x, y*(x)) along a direction, by fourth-order differences."""
        x = self.oracle.x
        epsilon = self._unit**0.2 * max(1.0, float(x.norm()) / len(_flat(x)) ** 0.5)
        formula = stencil(4)
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for node, weight in zip(formula.nodes, formula.weights, strict=True):
            moved = x + probe * (node * epsilon)
            value, _ = self.upper(self.solve(solution, moved)[0], moved)
            total = total + float(weight) / epsilon * value
        return total


def _mean(evaluate: Callable[[Sample], tuple[Tensor, Vector]], samples: Sequence[Sample]) -> tuple[Tensor, Vector]:
    """Means over samples of a value, as a float64 number on the host, and of a vector."""
    value, total = evaluate(samples[0])
    value = value.double().cpu()
    for sample in samples[1:]:
        more, gradient = evaluate(sample)
        value, total = value + more.double().cpu(), total + gradient
    return value / len(samples), total * (1 / len(samples))


def _probes(x: Vector, directions: int) -> list[Vector]:
    """Unit vectors in the space of x: a basis if it is small enough, random ones otherwise."""
    size = sum(t.numel() for t in x)
    if size <= directions:
        return [_unflat(e, x) for e in torch.eye(size, dtype=torch.float64, device="cpu")]
    random = torch.randn(directions, size, dtype=torch.float64, device="cpu")
    return [_unflat(d / d.norm(), x) for d in random]


def _flat(vector: Sequence[Tensor]) -> Tensor:
    """All entries as one float64 vector on the host."""
    return torch.cat([t.detach().reshape(-1).double().cpu() for t in vector])


def _unflat(entries: Tensor, like: Sequence[Tensor]) -> Vector:
    """The inverse of `_flat`."""
    parts = entries.split([t.numel() for t in like])  # type: ignore[no-untyped-call]
    return Vector(part.view(t.shape).to(t) for part, t in zip(parts, like, strict=True))

"""The exact hypergradient, by paths that share nothing with the methods but the evaluation of the losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import LBFGS

from ..errors import GradcheckError
from ..oracle.oracle import Oracle
from ..oracle.session import Session
from ..problem.objective import Sample
from ..problem.vector import Vector
from ..solvers.linear import cg
from .clock import Clock

__all__ = ["Coordinates", "Reference", "reference_of"]

DENSE_LIMIT = 512  # lower variables up to which the Hessian is formed
PATIENCE = 100  # of the last steps of a lower solve
COARSE = 1e-3  # precision of types whose differences say nothing
WHY = (
    "So a loss detaches what it should not, reads a value with .item() or .data, or has a custom backward that is "
    "wrong: what autograd gives is not the derivative of what the losses return"
)
MAX_BATCHES = 256  # batches of an objective that stand for its data

Coordinates = Callable[[Vector], Tensor]


@dataclass(frozen=True)
class Reference:
    """The mean hypergradient of lower problems.

    Attributes:
        gradient: in some coordinates.
        coordinates: how to get these of an estimate.
        kind: ``"dense"``, ``"implicit"`` or ``"differences"``.
        solutions: of the lower problems.
        residual: the largest norm of a lower gradient there.
        faults: which derivatives of the losses are not those of their values, in words.
        gap: relative difference of the reference to one of the solved problem along a direction; NaN: not known.
    """

    gradient: Tensor
    coordinates: Coordinates
    kind: str
    solutions: list[Vector]
    residual: float
    faults: list[str]
    gap: float = math.nan


def reference_of(
    problems: Sequence[Oracle], starts: Sequence[Vector], kind: str, directions: int, clock: Clock
) -> Reference:
    """The reference of problems whose lower solves start at these points.

    Args:
        problems: the losses of each, with their data.
        starts: where their lower solves start.
        kind: ``"dense"``, ``"implicit"``, ``"differences"``, or ``"auto"``.
        directions: how many ``"differences"`` takes.
        clock: says when to end.
    """
    truths = [_Truth(problem, clock) for problem in problems]
    faults = truths[0].faults(starts[0])
    if kind == "auto":
        small = sum(t.numel() for t in problems[0].y) <= DENSE_LIMIT
        kind = "dense" if small else "implicit"
        if not small:
            try:
                return _exact(truths, starts, kind, faults)
            except (GradcheckError, RuntimeError):  # it is not convex enough, or cannot be differentiated twice
                kind = "differences"
    return (
        _by_differences(truths, starts, directions, faults)
        if kind == "differences"
        else _exact(truths, starts, kind, faults)
    )


def _exact(truths: Sequence[_Truth], starts: Sequence[Vector], kind: str, faults: list[str]) -> Reference:
    """By implicit differentiation, with a difference of the first solved problem beside it."""
    parts, solutions, residual, gap = list[Tensor](), list[Vector](), 0.0, math.nan
    for k, (truth, start) in enumerate(zip(truths, starts, strict=True)):
        solution, _ = truth.solve(start, patience=5 if kind == "dense" else PATIENCE)  # Newton steps do the rest
        gradient, solution, norm = truth.dense(solution) if kind == "dense" else truth.implicit(solution)
        parts.append(_flat(gradient))
        solutions.append(solution)
        residual = max(residual, norm)
        if k == 0:
            gap = truth.gap(gradient, solution, faults)
    return Reference(torch.stack(parts).mean(0), _flat, kind, solutions, residual, faults, gap)


def _by_differences(
    truths: Sequence[_Truth], starts: Sequence[Vector], directions: int, faults: list[str]
) -> Reference:
    """Along random directions, as many as there is time for."""
    x, clock = truths[0].oracle.x, truths[0].clock
    solved = [truth.solve(start) for truth, start in zip(truths, starts, strict=True)]
    rows, probes = list[Tensor](), _probes(x, directions)
    for k, probe in enumerate(probes):
        if rows and clock.over:
            break
        clock.show(f"differences along direction {k + 1} of {len(probes)}")
        found = [truth.directional(probe, y)[0] for truth, (y, _) in zip(truths, solved, strict=True)]
        rows.append(torch.tensor(sum(found) / len(truths), dtype=torch.float64, device="cpu"))
    probes = probes[: len(rows)]
    # Random unit vectors d_i in p dimensions: |e|^2 is the mean of p (d_i . e)^2.
    scale = math.sqrt(sum(t.numel() for t in x) / len(probes))

    def coordinates(gradient: Vector) -> Tensor:
        return scale * torch.stack([probe.dot(gradient) for probe in probes]).double().cpu()

    residual = max(norm for _, norm in solved)
    return Reference(scale * torch.stack(rows), coordinates, "differences", [y for y, _ in solved], residual, faults)


class _Truth:
    """The losses of one problem averaged over their data, and the exact hypergradient."""

    def __init__(self, oracle: Oracle, clock: Clock) -> None:
        session = oracle.session
        # Products are exact here, whatever the method takes.
        oracle.session = Session.begun(
            replace(session.options, hvp="exact"), session.found, session.buffers, session.warned
        )
        self.oracle, self.clock = oracle, clock
        self._upper, self._lower = oracle.f.samples(MAX_BATCHES), oracle.g.samples(MAX_BATCHES)
        self._unit = torch.finfo(oracle.y[0].dtype).eps
        self._factor: Tensor | None = None  # of the lower Hessian at the solution, if it is formed

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

        solver = LBFGS(
            list(variables),
            max_iter=50,
            history_size=50,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )
        for k in range(10):
            if self.clock.over:
                break
            self.clock.show(f"lower solve, step {50 * k}")
            before = variables.clone()
            solver.step(closure)  # type: ignore[no-untyped-call]
            if all(map(torch.equal, before, variables)):
                break
        # A line search sees rounding errors of the value, so it stops at the root of the precision. Gradient steps of
        # Barzilai and Borwein's length look at the gradient only.
        y = variables.detach()
        gradient = self.lower(y, x)[1]
        best, residual = y, float(gradient.norm())
        move, idle = gradient * -1e-3, 0
        while residual > 0 and idle < patience and not self.clock.over:
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
        self._factor = torch.linalg.inv(hessian)
        split, gradient = len(self.oracle.x), self.upper(y)[1]
        v = _unflat(torch.linalg.solve(hessian, _flat(gradient[split:])), y)
        return Vector(gradient[:split]) - self._products(y, v)[1], y, float(slope.norm())

    def implicit(self, y: Vector) -> tuple[Vector, Vector, float]:
        """Implicit differentiation with conjugate gradients; the solution; the norm of its gradient."""
        split, gradient = len(self.oracle.x), self.upper(y)[1]
        b, made = Vector(gradient[split:]), 0

        def product(v: Vector) -> Vector:
            nonlocal made
            made += 1
            self.clock.show(f"implicit differentiation, product {made}")
            return self._products(y, v)[0]

        tol = max(1e-8, 10 * self._unit)
        result = cg(product, b, steps=2000, tol=tol) if float(b.norm()) else None
        if result is not None and (bool(result.indefinite) or not float(result.relative) <= 100 * tol):  # type: ignore[arg-type]
            raise GradcheckError(
                "there is no reference: the lower loss is not strongly convex at the solution that was found, or its "
                f"Hessian too badly conditioned (relative residual {float(result.relative):.3g})"  # type: ignore[arg-type]
            )
        norm = float(self.lower(y)[1].norm())
        direct = Vector(gradient[:split])
        return direct if result is None else direct - self._products(y, result.solution)[1], y, norm

    def _products(self, y: Vector, v: Vector) -> tuple[Vector, Vector]:
        """H v, and the cross derivative times v, of the averaged lower loss at y."""
        point, bent, cross = self.oracle.at(lower=y), y.zeros_like(), self.oracle.x.zeros_like()
        for sample in self._lower:
            with point.lower_system(sample, gradient=False) as system:
                bent, cross = bent + system.hvp(v), cross + system.cross(v)
        return bent * (1 / len(self._lower)), cross * (1 / len(self._lower))

    def _hessian(self, y: Vector) -> Tensor:
        point, size = self.oracle.at(lower=y), sum(t.numel() for t in y)
        rows = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        for sample in self._lower:
            with point.lower_system(sample, gradient=False) as system:
                for i, unit in enumerate(torch.eye(size, dtype=torch.float64, device="cpu")):
                    rows[i] += _flat(system.hvp(_unflat(unit, y)))
        rows /= len(self._lower)
        return (rows + rows.T) / 2

    def directional(self, probe: Vector, solution: Vector) -> tuple[float, float]:
        """Derivative of f(x, y*(x)) along a direction, by fourth-order differences; and how exact it is."""
        x = self.oracle.x
        epsilon = self._unit**0.2 * max(1.0, float(x.norm()) / len(_flat(x)) ** 0.5)

        def value(t: float) -> float:
            moved = x + probe * t
            return float(self.upper(self._solved_near(solution, moved), moved)[0])

        return _slope(value, epsilon, self._unit)

    def _solved_near(self, solution: Vector, x: Vector) -> Vector:
        """The solution at an x near that of another solution."""
        y = solution
        if self._factor is not None:
            last = math.inf
            for _ in range(20):  # Newton steps with the Hessian of there
                step = self._factor @ _flat(self.lower(y, x)[1])
                length = float(step.norm())
                if not length < 0.5 * last:
                    break
                y, last = y - _unflat(step, y), length
            if last <= 100 * self._unit * (1 + float(y.norm())):
                return y
        return self.solve(solution, x)[0]

    def gap(self, gradient: Vector, solution: Vector, faults: list[str]) -> float:
        """Relative difference of a hypergradient to one of the solved problem along a direction.

        Raises:
            GradcheckError: if they are not the same but for errors of differences, or a loss has other derivatives
                than its values say.
        """
        if self._unit > COARSE:
            return math.nan
        probe = _signs(gradient)
        self.clock.show("a difference of the solved problem")
        (found, error), expected = self.directional(probe, solution), float(probe.dot(gradient))
        size = max(abs(found), abs(expected), float(gradient.norm()) / len(_flat(gradient)) ** 0.5)
        wrong = abs(found - expected) > 10 * error + _tolerance(self._unit) * size
        if faults or wrong:
            seen = (
                f"along a random direction the reference by second derivatives is {expected:.6g}, a difference of the "
                f"solved problem {found:.6g}"
            )
            raise GradcheckError(f"{'; '.join(faults)}; {seen}. {WHY}" if faults else f"{seen}. {WHY}")
        return abs(found - expected) / size if size else 0.0

    def faults(self, start: Vector) -> list[str]:
        """Which derivatives of the losses are not those of their values, near where the lower solve starts."""
        if self._unit > COARSE:
            return []
        self.clock.show("derivatives of the losses")
        x, size = self.oracle.x, float(start.norm()) / len(_flat(start)) ** 0.5
        y = start + _signs(start) * (0.03 * (1 + size) * len(_flat(start)) ** 0.5)  # where no gradient is zero
        if not all(math.isfinite(float(value(y, x)[0])) for value in (self.lower, self.upper)):
            y = start
        split, along_x, along_y = len(x), _signs(x), _signs(y)
        upper, (bent, cross) = self.upper(y)[1], self._products_if_any(y, along_y)
        checks = [
            ("upper", "derivative in x", Vector(upper[:split]), along_x, lambda t: self.upper(y, x + along_x * t)[0]),
            ("upper", "derivative in y", Vector(upper[split:]), along_y, lambda t: self.upper(y + along_y * t, x)[0]),
            ("lower", "derivative in y", self.lower(y)[1], along_y, lambda t: self.lower(y + along_y * t, x)[0]),
        ]
        if bent is not None and cross is not None:
            across = _signs(y)
            checks += [
                ("lower", "second derivative in y", bent, across,
                 lambda t: across.dot(self.lower(y + along_y * t, x)[1])),
                ("lower", "second derivative in y and x", cross, along_x,
                 lambda t: along_y.dot(self.lower(y, x + along_x * t)[1])),
            ]  # fmt: skip
        found = []
        for level, what, vector, along, evaluate in checks:
            at = x if "x" in what.split()[-1] else y
            rms = float(at.norm()) / len(_flat(at)) ** 0.5
            epsilon = self._unit**0.25 * (1 + rms) * len(_flat(at)) ** 0.5
            slope, error = _slope(lambda t, value=evaluate: float(value(t)), epsilon, self._unit)  # type: ignore[misc]
            expected = float(along.dot(vector))
            size = max(abs(slope), abs(expected), float(vector.norm()) / len(_flat(vector)) ** 0.5)
            if abs(slope - expected) > 10 * error + _tolerance(self._unit) * size:
                found.append(
                    f"the {self.oracle.session.called(level)}'s {what} is {expected:.6g} by autograd along a "
                    f"direction, but {slope:.6g} by differences"
                )
        return found

    def _products_if_any(self, y: Vector, v: Vector) -> tuple[Vector | None, Vector | None]:
        try:
            return self._products(y, v)
        except RuntimeError:  # it cannot be differentiated twice
            return None, None


def _slope(value: Callable[[float], float], epsilon: float, unit: float) -> tuple[float, float]:
    """The derivative of a function at 0, of fourth order; and about its error."""
    a, b, c, d = (value(t * epsilon) for t in (-2.0, -1.0, 1.0, 2.0))
    near, far = (c - b) / (2 * epsilon), (d - a) / (4 * epsilon)
    fine = near + (near - far) / 3
    return fine, abs(fine - near) + unit * max(map(abs, (a, b, c, d))) / epsilon


def _tolerance(unit: float) -> float:
    """Relative differences between derivatives that are no matter in a precision."""
    return 1e-3 if unit < 1e-12 else 3e-2


def _signs(like: Vector) -> Vector:
    """A random unit vector in which all entries weigh the same."""
    count = len(_flat(like))
    signs = torch.randint(2, (count,), device="cpu").double() * 2 - 1
    return _unflat(signs / count**0.5, like)


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

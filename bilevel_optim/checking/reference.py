"""The exact hypergradient, by paths that share only the evaluation of the losses with the methods."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS

from ..errors import GradcheckError
from ..oracle.differentiable import custom_operations
from ..oracle.oracle import Oracle
from ..oracle.session import Session
from ..problem.objective import Sample
from ..problem.vector import Vector, coarsest
from ..solvers.linear import cg
from .differences import Slope, basis_or_normal, directions_for, flat, nearby, normal, rms, slope, unflat
from .trials import TimeLimit, TimeUp

__all__ = [
    "FIRST",
    "JOINT",
    "KINK",
    "MAX_BATCHES",
    "SECOND",
    "WHY",
    "Coordinates",
    "Reference",
    "largest_graph",
    "reference_of",
]

DENSE_LIMIT = 512  # lower variables up to which the Hessian is formed
PATIENCE = 10  # last steps of a lower solve without progress; Newton steps do the rest
PRODUCTS = 2000  # most products of a linear solve
COARSE = 1e-3  # precision of types that are too coarse for differences
FINER = 1 / 30  # factor of the step of differences if a kink is within reach
SMALLER = 3  # times that this step becomes finer to stay where the lower problem has a solution
WHY = (
    "So autograd's derivative of a loss is not that of the values that it returns: look in it for .detach(), .item(), "
    ".data, torch.no_grad(), or a custom backward that is wrong"
)
UNSOLVED = (
    "Add a penalty to the lower loss that makes it strongly convex (0.01 times the square of y), start y nearer to the "
    "solution, scale y such that its curvatures are similar, or use float64. A solution at a kink (abs, max) has none"
)
MAX_BATCHES = 256  # most batches of an objective that represent its data
# Derivatives of the losses that methods of each kind take.
FIRST = frozenset({"upper x", "upper y", "lower y"})
JOINT = FIRST | {"lower x"}
SECOND = JOINT | {"lower yy", "lower xy"}

NEWTON = 20  # most Newton steps of a lower solve
OTHERS = 2  # points nearby that are checked before a loss is reported as wrong
AWAY = 0.03  # relative distance of the first of these
OUTCOMES = ("agrees", "unknown", "differs")  # of a comparison, the worst last
DERIVATIVES = {
    "x": "derivative in x",
    "y": "derivative in y",
    "yy": "second derivative in y",
    "xy": "second derivative in y and x",
}
KINK = (
    "a kink of the losses (ReLU, abs, max) or rounding disturbs the differences here, although elsewhere they agree "
    "with the derivatives: check at another point (move x a little), in float64, or with smooth losses"
)
ONE_POINT = (
    "differences of the solved problem, which no kink disturbs, disagree with the second derivatives here, although "
    "elsewhere they agree: an operation has a wrong second derivative at this point (std or norm of zero)? Check at "
    "another point (move x a little), or add a small number under the root"
)
UNCONFIRMED = (
    "differences of the solved problem are too inaccurate to confirm the reference, because of kinks of the losses "
    "(ReLU, abs, max) or of rounding: check at another point (move x a little), in float64, or with smooth losses"
)
NO_TIME = "time is up before the reference was compared with differences: use a larger max_seconds"

Coordinates = Callable[[Vector], Tensor]
Product = Callable[[Vector], Vector]


@dataclass(frozen=True)
class Reference:
    """The mean hypergradient of lower problems.

    Attributes:
        gradient: in some coordinates.
        coordinates: map from an estimate to these coordinates.
        kind: ``"dense"``, ``"implicit"`` or ``"differences"``.
        solutions: of the lower problems.
        residual: the largest norm of a lower gradient there.
        faults: derivatives of the losses that are not those of their values, in words.
        gap: relative difference of the reference to one of the solved problem along a direction; NaN: not known.
        uncertainty: about the norm of its error.
        doubt: why it may be unreliable, and what to do; empty if it is reliable.
    """

    gradient: Tensor
    coordinates: Coordinates
    kind: str
    solutions: list[Vector]
    residual: float
    faults: list[str]
    gap: float = math.nan
    uncertainty: float = 0.0
    doubt: str = ""


def reference_of(
    problems: Sequence[Oracle],
    starts: Sequence[Vector],
    kind: str,
    directions: int,
    clock: TimeLimit,
    concerns: frozenset[str],
) -> Reference:
    """Compute the reference for problems whose lower solves start at these points.

    Args:
        problems: the losses of each, with their data.
        starts: initial points of their lower solves.
        kind: ``"dense"``, ``"implicit"``, ``"differences"``, or ``"auto"``.
        directions: number of directions for ``"differences"``.
        clock: the time limit.
        concerns: derivatives of the losses that matter.

    Raises:
        GradcheckError: if there is no reference.
        TimeUp: if there is no time for one.
    """
    truths = [_Truth(problem, clock) for problem in problems]
    truths[0].require_repeatable(starts[0])
    found = truths[0].faults(starts[0])
    faults = [text for which, text in found.items() if which in concerns]
    if kind == "auto":
        small = sum(t.numel() for t in problems[0].y) <= DENSE_LIMIT
        kind = "dense" if small else "implicit"
        if found and not faults:  # second derivatives are wrong, but the method does not take them
            kind = "differences"
        elif not small or not (found or concerns >= SECOND):
            try:
                return _exact(truths, starts, kind, faults)
            except (GradcheckError, RuntimeError) as error:
                if str(error).endswith(WHY):
                    # A fault that the start does not show may be of second derivatives, which the method does not take.
                    found = truths[0].faults(truths[0].solve(starts[0])[0])
                    if faults or not found or found.keys() & concerns:
                        raise
                elif small:
                    raise
                kind = "differences"  # it is not convex enough, or cannot be differentiated twice
    try:
        if kind == "differences":
            return _by_differences(truths, starts, directions, faults)
        return _exact(truths, starts, kind, [*found.values()])
    except GradcheckError as error:
        if not found or str(error).endswith(WHY):
            raise
        raise GradcheckError(f"{'; '.join(found.values())}. {WHY}") from error


def _exact(truths: Sequence[_Truth], starts: Sequence[Vector], kind: str, faults: list[str]) -> Reference:
    """Compute the reference by implicit differentiation; compare it with differences of the first solved problem."""
    found = list[_Exact]()
    for k, (truth, start) in enumerate(zip(truths, starts, strict=True)):
        found.append(truth.exact(kind, truth.solve(start)[0]))
        if k == 0:
            gap, doubt = truth.gap(kind, found[0], faults)
            truth.require_lower_gradient(found[0].at.y)
    mean = torch.stack([flat(one.gradient) for one in found]).mean(0)
    solutions, residual = [one.at.y for one in found], max(one.at.residual for one in found)
    return Reference(mean, flat, kind, solutions, residual, faults, gap, max(one.error for one in found), doubt)


def _by_differences(
    truths: Sequence[_Truth], starts: Sequence[Vector], directions: int, faults: list[str]
) -> Reference:
    """Compute the reference along random directions, as many as there is time for."""
    x, clock, doubt = truths[0].oracle.x, truths[0].clock, ""
    solved = [truth.polished(truth.solve(start)[0]) for truth, start in zip(truths, starts, strict=True)]
    truths[0].require_lower_gradient(solved[0].y)
    rows, errors, probes = list[float](), list[float](), basis_or_normal(x, directions)
    for k, probe in enumerate(probes):
        clock.show(f"differences along direction {k + 1} of {len(probes)}")
        try:
            found = [truth.directional(probe, one.y) for truth, one in zip(truths, solved, strict=True)]
        except TimeUp:
            if not rows:
                raise
            doubt = (
                f"time is up after {k} of {len(probes)} directions, along which alone the estimate is known to be "
                "right: use a larger max_seconds, or fewer directions"
            )
            break
        rows.append(sum(one.value for one in found) / len(truths))
        errors.append(sum(one.error for one in found) / len(truths))
    probes = probes[: len(rows)]
    # Random unit vectors d_i in p dimensions: |e|^2 is the mean of p (d_i . e)^2.
    scale = math.sqrt(sum(t.numel() for t in x) / len(probes))

    def coordinates(gradient: Vector) -> Tensor:
        return scale * torch.stack([probe.dot(gradient) for probe in probes]).double().cpu()

    gradient = scale * torch.tensor(rows, dtype=torch.float64, device="cpu")
    return Reference(
        gradient,
        coordinates,
        "differences",
        [one.y for one in solved],
        max(one.residual for one in solved),
        faults,
        uncertainty=scale * math.hypot(*errors),
        doubt=doubt,
    )


class _Solved(NamedTuple):
    """A lower solution, the norm of the gradient there, and the change by one more Newton step."""

    y: Vector
    residual: float
    step: Vector


class _Exact(NamedTuple):
    """A hypergradient, the lower solution, and the error of the hypergradient."""

    gradient: Vector
    at: _Solved
    error: float


class _Truth:
    """The losses of one problem averaged over their data, and the exact hypergradient."""

    def __init__(self, oracle: Oracle, clock: TimeLimit) -> None:
        session = oracle.session
        # Products are exact here, even if the method's are not.
        oracle.session = Session.after(session, replace(session.options, hvp="exact"))
        self.oracle, self.clock = oracle, clock
        self._upper, self._lower = oracle.f.samples(MAX_BATCHES), oracle.g.samples(MAX_BATCHES)
        self._unit = coarsest(oracle.y)
        self._factor: Tensor | None = None  # inverse of the lower Hessian at the solution, if it is formed

    def lower(self, y: Vector, x: Vector | None = None) -> tuple[Tensor, Vector]:
        """Return the value of the averaged lower loss, and its gradient in y."""
        point = self.oracle.at(x, y)
        with point.session.buffers_kept():
            return _mean(point.lower, self._lower)

    def upper(self, y: Vector, x: Vector | None = None) -> tuple[Tensor, Vector, Vector]:
        """Return the value of the averaged upper loss, and its gradients in x and in y."""
        point, split = self.oracle.at(x, y), len(self.oracle.x)

        def joined(sample: Sample) -> tuple[Tensor, Vector]:
            loss, grad_x, grad_y = point.upper(sample)
            return loss, Vector((*grad_x, *grad_y))

        value, gradient = _mean(joined, self._upper)
        return value, Vector(gradient[:split]), Vector(gradient[split:])

    def solve(self, start: Vector, x: Vector | None = None) -> tuple[Vector, float]:
        """Return about the minimiser of the averaged lower loss over y, and the norm of its gradient there."""
        variables = Vector(t.clone().requires_grad_() for t in start)
        known: list[tuple[float, Vector]] = []  # the last finite value, and its point

        def closure() -> float:
            y = variables.detach().clone()
            loss, gradient = self.lower(y, x)
            value = float(loss)
            if math.isfinite(value) and math.isfinite(float(gradient.norm())):
                known[:] = [(value, y)]
            elif known:  # the loss is undefined here: return a wall, because the line search would go on at NaN
                height, away = 1 + abs(known[0][0]), y - known[0][1]
                value, gradient = known[0][0] + height, away * (height / (float(away.dot(away)) or 1.0))
            for tensor, grad in zip(variables, gradient, strict=True):
                tensor.grad = grad.contiguous()  # LBFGS views it as a row
            return value

        solver = LBFGS(
            list(variables),
            max_iter=50,
            history_size=50,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )
        for k in range(10):
            self.clock.require("the lower problem was solved")
            self.clock.show(f"lower solve, step {50 * k}")
            before = variables.clone()
            try:
                solver.step(closure)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if "overflow" not in str(error):
                    raise
                break  # the length of a step is infinite
            if all(map(torch.equal, before, variables)):
                break
        # A line search is stopped by rounding errors of the value, at the root of the precision. Gradient steps of
        # Barzilai and Borwein's length use the gradient only.
        y = variables.detach()
        gradient = self.lower(y, x)[1]
        best, residual = y, float(gradient.norm())
        move, idle = gradient * -1e-3, 0
        while residual > 0 and idle < PATIENCE:
            self.clock.require("the lower problem was solved")
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
        if not math.isfinite(residual):
            self._require_solved(best, residual)
        return best, residual

    def polished(self, start: Vector, x: Vector | None = None, product: Product | None = None) -> _Solved:
        """Return a solution after Newton steps, from first derivatives only if there is no Hessian-vector product.

        Raises:
            GradcheckError: if the Newton steps do not reach a solution.
        """
        y, (_, slope_) = start, self.lower(start, x)
        for _ in range(NEWTON):
            if not float(slope_.norm()):
                return _Solved(y, 0.0, slope_)
            most = min(PRODUCTS, 4 * len(flat(y)) + 50)
            result = cg(product or self._differences(y, x), slope_, steps=most, tol=1e-3)
            if bool(result.indefinite) or not float(result.relative) <= 0.1:  # type: ignore[arg-type]
                raise GradcheckError(
                    "there is no reference: the lower problem could not be solved, because the lower loss is not "
                    f"strongly convex near the point reached, or its Hessian is too badly conditioned. {UNSOLVED}"
                )
            step = result.solution
            after = y - step
            slope_after = self.lower(after, x)[1]
            if not float(slope_after.norm()) < float(slope_.norm()):
                break  # only rounding errors are left, or a kink is in the way
            y, slope_ = after, slope_after
            if not float(step.norm()) > 10 * self._unit * float(y.norm()):
                break
        self._require_solved(y, float(step.norm()))
        return _Solved(y, float(slope_.norm()), step)

    def _require_solved(self, y: Vector, error: float) -> None:
        if not error <= max(1e-4, self._unit**0.5) * (1 + float(y.norm())) < math.inf:
            raise GradcheckError(
                f"there is no reference: the lower problem could not be solved (its solution is known to within about "
                f"{error:.3g}, at a norm of {float(y.norm()):.3g}). {UNSOLVED}"
            )

    def _differences(self, y: Vector, x: Vector | None) -> Product:
        """Return products with the lower Hessian by differences of gradients."""
        reach = self._unit ** (1 / 3) * (1 + float(y.norm()))

        def product(v: Vector) -> Vector:
            self.clock.require("the lower problem was solved")
            self.clock.show("lower solve, Newton steps")
            size = float(v.norm())
            if not size:
                return v
            along = v * (reach / size)
            change = self.lower(y + along, x)[1] - self.lower(y - along, x)[1]
            scaled: Vector = change * (size / (2 * reach))
            return scaled

        return product

    def exact(self, kind: str, near: Vector) -> _Exact:
        """Differentiate implicitly at the solution near a point, with the whole lower Hessian or by products."""
        return self._dense(near) if kind == "dense" else self._implicit(near)

    def _dense(self, near: Vector) -> _Exact:
        y, hessian = near, self._definite_hessian(near)
        slope_ = flat(self.lower(y)[1])
        for _ in range(5):
            step = torch.linalg.solve(hessian, slope_)
            after = y - unflat(step, y)
            slope_after = flat(self.lower(after)[1])
            if not (step.norm() > self._unit * flat(y).norm() and slope_after.norm() < slope_.norm()):
                break
            y, slope_ = after, slope_after
        self._require_solved(y, float(step.norm()))
        if float((y - near).norm()) > 100 * self._unit * float(y.norm()):
            hessian = self._definite_hessian(y)  # the cross derivative is that at y too
        self._factor = torch.linalg.inv(hessian)
        v = unflat(torch.linalg.solve(hessian, flat(self.upper(y)[2])), y)
        return self._with_adjoint(v, _Solved(y, float(slope_.norm()), unflat(step, y)))

    def _implicit(self, near: Vector) -> _Exact:
        solved = self.polished(near, product=lambda v: self._products(near, v)[0])
        y, made = solved.y, 0
        b = self.upper(y)[2]

        def product(v: Vector) -> Vector:
            nonlocal made
            made += 1
            self.clock.require("the implicit differentiation was done")
            self.clock.show(f"implicit differentiation, product {made}")
            return self._products(y, v)[0]

        if not float(b.norm()):
            return self._with_adjoint(b, solved)
        tol = max(1e-8, 10 * self._unit)
        result = cg(product, b, steps=PRODUCTS, tol=tol)
        if bool(result.indefinite) or not float(result.relative) <= 100 * tol:  # type: ignore[arg-type]
            raise GradcheckError(
                "there is no reference: the lower loss is not strongly convex at the solution that was found, or its "
                f"Hessian is too badly conditioned (relative residual {float(result.relative):.3g}). {UNSOLVED}"  # type: ignore[arg-type]
            )
        return self._with_adjoint(result.solution, solved)

    def _with_adjoint(self, v: Vector, solved: _Solved) -> _Exact:
        """Return the hypergradient, and its change by the remaining error of the lower solve."""

        def gradient(y: Vector) -> Vector:
            return self.upper(y)[1] - self._products(y, v)[1]

        here, moved = gradient(solved.y), solved.y - solved.step
        left = float(solved.step.norm()) > 100 * self._unit * float(solved.y.norm())
        return _Exact(here, solved, float((gradient(moved) - here).norm()) if left else 0.0)

    def _products(self, y: Vector, v: Vector, x: Vector | None = None) -> tuple[Vector, Vector]:
        """Return H v, and the cross derivative times v, of the averaged lower loss."""
        point, bent, cross = self.oracle.at(x, y), y.zeros_like(), self.oracle.x.zeros_like()
        for sample in self._lower:
            with point.lower_system(sample, gradient=False) as system:
                bent, cross = bent + system.hvp(v), cross + system.cross(v)
        return bent * (1 / len(self._lower)), cross * (1 / len(self._lower))

    def _definite_hessian(self, y: Vector) -> Tensor:
        """Return the lower Hessian; raise GradcheckError if it is not positive definite."""
        self.clock.require("the lower Hessian was made")
        self.clock.show("the lower Hessian")
        hessian = self._hessian(y)
        eigenvalues = torch.linalg.eigvalsh(hessian)
        if not eigenvalues[0] > self._unit * len(hessian) * eigenvalues[-1].abs():
            raise GradcheckError(
                "there is no reference: the lower loss is not strongly convex at the solution that was found (smallest "
                f"eigenvalue of its Hessian {float(eigenvalues[0]):.3g}, largest {float(eigenvalues[-1]):.3g}). "
                f"{UNSOLVED}"
            )
        return hessian

    def _hessian(self, y: Vector) -> Tensor:
        point, size = self.oracle.at(lower=y), sum(t.numel() for t in y)
        rows = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        for sample in self._lower:
            with point.lower_system(sample, gradient=False) as system:
                for i, unit in enumerate(torch.eye(size, dtype=torch.float64, device="cpu")):
                    self.clock.require("the lower Hessian was made")
                    rows[i] += flat(system.hvp(unflat(unit, y)))
        rows /= len(self._lower)
        return (rows + rows.T) / 2

    def directional(self, probe: Vector, solution: Vector, finer: float = 1.0) -> Slope:
        """Return the derivative of f(x, y*(x)) along a direction, by fourth-order differences.

        Where a step leads to an x without a lower solution (a negative weight decay), it becomes smaller.
        """
        for _ in range(SMALLER):
            try:
                return self._difference(probe, solution, finer)
            except GradcheckError:
                finer *= FINER
        return self._difference(probe, solution, finer)

    def _difference(self, probe: Vector, solution: Vector, finer: float) -> Slope:
        """Return the derivative of f(x, y*(x)) along a direction, with steps of one size."""
        x, worst = self.oracle.x, 0.0
        epsilon = self._unit**0.2 * max(1.0, rms(x)) * finer

        def value(t: float) -> float:
            nonlocal worst
            moved = x + probe * t
            y, step = self._solved_near(solution, moved)
            f, _, slope_ = self.upper(y, moved)
            if step is not None:
                worst = max(worst, abs(float(slope_.dot(step))))
            return float(f)

        found = slope(value, epsilon, self._unit)
        return Slope(found.value, found.error + worst / epsilon)

    def _solved_near(self, solution: Vector, x: Vector) -> tuple[Vector, Vector | None]:
        """Return the solution at an x near that of another solution, and its last Newton step if that matters."""
        y = solution
        if self._factor is not None:
            last = math.inf
            for _ in range(20):  # Newton steps with the Hessian at the other solution
                step = self._factor @ flat(self.lower(y, x)[1])
                length = float(step.norm())
                if not length < 0.5 * last:
                    break
                y, last = y - unflat(step, y), length
            if last <= 100 * self._unit * (1 + float(y.norm())):
                return y, None
        try:
            solved = self.polished(solution, x)
        except GradcheckError:
            solved = self.polished(self.solve(solution, x)[0], x)
        return solved.y, solved.step

    def gap(self, kind: str, found: _Exact, faults: list[str]) -> tuple[float, str]:
        """Return the relative difference of a hypergradient to differences of the solved problem along directions.

        The text says why that is not conclusive, and is empty if it is. If they disagree, finer differences are taken,
        and then the comparison is repeated at other x nearby. A kink is at some points only, a wrong derivative at all.

        Raises:
            GradcheckError: if they disagree by more than errors of differences, or a derivative of a loss is not that
                of its values.
        """
        if self._unit > COARSE:
            return math.nan, ""
        self.clock.show("a difference of the solved problem")
        try:
            value, outcome, seen = self._compare_with_differences(found)
            if faults:
                raise GradcheckError(f"{'; '.join(faults)}; {seen}. {WHY}")
            for k in range(OTHERS if outcome != "agrees" else 0):
                other = copy.copy(self)
                other._factor = None
                other.oracle = self.oracle.at(nearby(self.oracle.x, AWAY * (k + 1)))
                try:
                    there = other.exact(kind, other.solve(found.at.y)[0])
                    confirmed = other._compare_with_differences(there)[1] == "agrees"
                except GradcheckError:  # the lower problem has no good solution there
                    continue
                if confirmed:
                    return value, KINK if outcome == "unknown" else ONE_POINT
        except TimeUp:
            return math.nan, NO_TIME
        if outcome == "differs":
            raise GradcheckError(f"{seen}. {WHY}")
        return value, "" if outcome == "agrees" else UNCONFIRMED

    def _compare_with_differences(self, found: _Exact) -> tuple[float, str, str]:
        """Return the relative difference, its outcome, and a description."""
        gradient, results = found.gradient, []
        for _ in range(2):
            probe = normal(gradient)
            expected = float(probe.dot(gradient))
            for finer in (1.0, FINER) if self._unit < 1e-12 else (1.0,):
                one = self.directional(probe, found.at.y, finer)
                outcome = one.compared(expected, rms(gradient), self._unit)
                if outcome == "agrees":
                    break
            size = max(abs(one.value), abs(expected), rms(gradient))
            results.append(
                (
                    OUTCOMES.index(outcome),
                    abs(one.value - expected) / size if size else 0.0,
                    f"along a random direction the reference by second derivatives is {expected:.6g}, a difference of "
                    f"the solved problem {one.value:.6g}",
                )
            )
        worst, value, text = max(results)
        return value, OUTCOMES[worst], text

    def require_repeatable(self, start: Vector) -> None:
        """Raise GradcheckError if a loss changes its value from call to call."""
        y = nearby(start, AWAY)  # where nothing is zero
        if not all(math.isfinite(float(value(y)[0])) for value in (self.lower, self.upper)):
            y = start
        for level, evaluate in (("upper", self.upper), ("lower", self.lower)):
            first, second = (float(evaluate(y)[0]) for _ in range(2))
            if level == "lower" and not math.isfinite(first):
                raise GradcheckError(
                    f"there is no reference: the {self.oracle.session.called(level)} is {first} at the present x, "
                    "where the lower solve starts. Check the data, x and y first"
                )
            if abs(first - second) > 1e3 * self._unit * max(abs(first), abs(second)):
                raise GradcheckError(
                    f"there is no reference: the {self.oracle.session.called(level)} is {first:.9g} and then "
                    f"{second:.9g} at one point, on the same batch: it changes with its calls, or draws random numbers "
                    "that cannot be repeated. Draw them from torch's default generator, which is reset for each "
                    "evaluation of a sample, put them into the batches of an Objective, or check without noise "
                    "(model.eval())"
                )

    def require_lower_gradient(self, solution: Vector) -> None:
        """Raise GradcheckError if the lower loss's derivative in y is not that of its values near a solution.

        The problem is solved by that derivative, so differences of the solved problem do not show this. At the start
        of the lower solve a wrong part of it may be too small to be seen.
        """
        if self._unit <= COARSE and (found := self._confirmed(solution, self._lower_fault_at)):
            raise GradcheckError(f"{found['lower y']}. {WHY}")

    def faults(self, start: Vector) -> dict[str, str]:
        """Describe the derivatives of the losses that are not those of their values, near the start of the lower solve.

        Those that are wrong at one point are checked again at two others, because a kink is at some points only.
        """
        if self._unit > COARSE:
            return {}
        self.clock.show("derivatives of the losses")
        for level in ("lower", "upper"):
            if cause := self._cause(level):
                self.clock.note += (
                    f"; a step of the optimizer takes less time to find wrong derivatives of the "
                    f"{self.oracle.session.called(level)}{cause}"
                )
        return self._confirmed(start, self._faults_at)

    def _confirmed(self, start: Vector, faults_at: Callable[[Vector, Vector, float], dict[str, str]]) -> dict[str, str]:
        """Return the faults that are found at each of several points nearby."""
        found: dict[str, str] = {}
        for k in range(OTHERS + 1):
            x, y = self.oracle.x, nearby(start, AWAY * (1 + k))
            if k:  # where no gradient is zero; later also another x
                x = nearby(x, AWAY * k)
            if not all(math.isfinite(float(value(y, x)[0])) for value in (self.lower, self.upper)):
                x, y = self.oracle.x, start
            here = faults_at(x, y, 1.0 if not k or self._unit > 1e-12 else FINER)
            found = {which: text for which, text in (found or here).items() if which in here}
            if not found:
                break
        return found

    def _lower_fault_at(self, x: Vector, y: Vector, finer: float) -> dict[str, str]:
        """Describe the lower loss's derivative in y at one point, if it is not that of the values."""
        found, slope_ = dict[str, str](), self.lower(y, x)[1]
        for along, *_ in directions_for(y):
            self._compare(found, "lower y", y, slope_, along, finer, lambda p: self.lower(p, x)[0])
        return found

    def _faults_at(self, x: Vector, y: Vector, finer: float) -> dict[str, str]:
        """Describe all derivatives at one point that are not those of the values."""
        point, found = self.oracle.at(x, y), dict[str, str]()
        (_, in_x, in_y), slope_ = self.upper(y, x), self.lower(y, x)[1]
        joint = _mean(lambda sample: point.lower_jointly(sample)[:2], self._lower)[1]
        for along_x, along_y, across in directions_for(x, y, y):
            self._compare(found, "upper x", x, in_x, along_x, finer, lambda p: self.upper(y, p)[0])
            self._compare(found, "upper y", y, in_y, along_y, finer, lambda p: self.upper(p, x)[0])
            self._compare(found, "lower y", y, slope_, along_y, finer, lambda p: self.lower(p, x)[0])
            self._compare(found, "lower x", x, joint, along_x, finer, lambda p: self.lower(y, p)[0])
            try:
                bent, cross = self._products(y, along_y, x)
            except RuntimeError:  # it cannot be differentiated twice
                continue
            self._compare(found, "lower yy", y, bent, across, finer, self._along(along_y, x=x))
            self._compare(found, "lower xy", x, cross, along_x, finer, self._along(along_y, y=y))
        return found

    def _along(self, v: Vector, x: Vector | None = None, y: Vector | None = None) -> Callable[[Vector], Tensor]:
        """Return the derivative of the lower loss in y along a direction, as a function of x or of y."""
        return lambda p: v.dot(self.lower(p if y is None else y, p if x is None else x)[1])

    def _compare(
        self,
        found: dict[str, str],
        which: str,
        at: Vector,
        vector: Vector,
        along: Vector,
        finer: float,
        evaluate: Callable[[Vector], Tensor],
    ) -> None:
        """Record a derivative along a direction that is not that of the values."""
        epsilon = self._unit**0.25 * (1 + rms(at)) * len(flat(at)) ** 0.5 * finer
        one = slope(lambda t: float(evaluate(at + along * t)), epsilon, self._unit)
        expected, (level, variables) = float(along.dot(vector)), which.split()
        if one.compared(expected, rms(vector), self._unit) == "differs":
            found.setdefault(
                which,
                f"the {self.oracle.session.called(level)}'s {DERIVATIVES[variables]} is {expected:.6g} by autograd "
                f"along a direction, but {one.value:.6g} by differences{self._cause(level)}",
            )

    def _cause(self, level: str) -> str:
        """Return a clause that names the operations of a loss that are the likely cause of a wrong derivative."""
        sample = (self._upper if level == "upper" else self._lower)[0]
        with self.oracle.evaluating():
            found = custom_operations(self.oracle.value(level, sample))
        return f" (the likely cause is the operation {', '.join(found)})" if found else ""


def _mean(evaluate: Callable[[Sample], tuple[Tensor, Vector]], samples: Sequence[Sample]) -> tuple[Tensor, Vector]:
    """Return means over samples of a value, as a float64 number on the host, and of a vector."""
    value, total = evaluate(samples[0])
    value = value.double().cpu()
    for sample in samples[1:]:
        more, gradient = evaluate(sample)
        value, total = value + more.double().cpu(), total + gradient
    return value / len(samples), total * (1 / len(samples))


def largest_graph(function: Callable[[], Any]) -> float | None:
    """Return the most memory in MiB that graphs hold at once while a function runs; None if it cannot be measured."""
    references: Counter[int] = Counter()
    now = most = 0

    class SavedTensor:
        """A tensor that a graph has saved."""

        def __init__(self, t: Tensor) -> None:
            nonlocal now, most
            self.tensor, storage = t, t.untyped_storage()
            self.place, self.size = storage.data_ptr(), storage.nbytes()
            now += self.size if not references[self.place] else 0
            references[self.place] += 1
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            references[self.place] -= 1
            now -= self.size if not references[self.place] else 0

    try:
        with torch.autograd.graph.saved_tensors_hooks(SavedTensor, lambda kept: kept.tensor):
            function()
    except (RuntimeError, NotImplementedError):
        return None
    return most / 2**20

"""`check_hypergradient`: compare a method's estimate with a reference from an independent path."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS

from ..errors import GradcheckError
from ..hypergradient.finite_difference import stencil
from ..methods.tracked.tracking import RecursiveOptimizer
from ..optimizer.base import BilevelOptimizer, Loss, as_objective
from ..optimizer.minimax import MinimaxOptimizer, opposite
from ..oracle import tasks as task_layer
from ..oracle.oracle import filled
from ..oracle.substitution import twice_differentiable
from ..problem.finite_sum import FiniteSum
from ..problem.objective import Objective
from ..problem.parameters import require
from ..problem.vector import Vector

__all__ = ["HypergradientReport", "check_hypergradient"]

DENSE_LIMIT = 512  # lower variables up to which the Hessian is formed
MAX_BATCHES = 256  # batches of an objective that stand for its data

Coordinates = Callable[[Vector], Tensor]


@dataclass(frozen=True)
class HypergradientReport:
    """Result of `check_hypergradient`.

    Attributes:
        relative_error: norm of the bias over the norm of the reference.
        relative_error_at_solution: the same with the lower variable started at the exact lower solution: what is left
            then is the fault of the estimator, not of too few lower steps.
        bias: norm of (mean estimate - reference).
        std: square root of the variance of one estimate, summed over its entries; 0 for a deterministic method.
        standard_error: of the mean estimate, ``std / sqrt(repeats)``.
        cosine: between the mean estimate and the reference.
        norm: norm of the reference.
        lower_residual: norm of the lower gradient at the solution that the reference is based on (with tasks, the
            largest).
        repeats: estimates that the mean is taken over.
        reference: how it was made: ``"dense"`` or ``"differences"``.
    """

    relative_error: float
    relative_error_at_solution: float
    bias: float
    std: float
    standard_error: float
    cosine: float
    norm: float
    lower_residual: float
    repeats: int
    reference: str


def check_hypergradient(
    optimizer: BilevelOptimizer,
    upper: Loss,
    lower: Loss | None = None,
    *,
    tasks: Any = None,
    atol: float = 1e-8,
    rtol: float = 1e-2,
    repeats: int = 32,
    reference: str = "auto",
    directions: int = 16,
) -> HypergradientReport:
    r"""Check that a method's hypergradient is right: the ``torch.autograd.gradcheck`` of this library.

    Solves the lower problem on all the data to high accuracy, computes the hypergradient by an independent path, and
    compares it with ``optimizer.backward``, as it would run now: from the present lower value, with the present warm
    starts. It tells in one call whether ``nu``, ``lower_steps``, ``linear_steps`` and the like are any good. Use
    float64 if possible. Nothing is changed: parameters, ``.grad``, state, counters, random state and the position in
    the data are as they were.

    With ``tasks`` the mean over one draw of tasks is checked: the reference solves the lower problem of every drawn
    task on all of its data, from where the method starts it too, and the method makes all its estimates for these
    tasks (on batches of them, if it has ``lower_batch`` or ``upper_batch``). The cost grows with ``tasks_per_step``.

    Args:
        optimizer: the method, with its parameters at the point to check.
        upper: upper loss, as for ``optimizer.step``.
        lower: lower loss. Left out for a minimax method, whose only loss is ``upper``.
        tasks: a sampler of tasks, as for ``optimizer.step``, whose ``lower`` and ``upper`` take ``n=None``.
        atol: allowed bias, absolute. Default: 1e-8.
        rtol: allowed bias relative to the norm of the reference. Default: 1e-2.
        repeats: estimates to average for a stochastic method (a deterministic one needs two). Default: 32.
        reference: ``"dense"``: implicit differentiation with the full lower Hessian; ``"differences"``: central
            differences of :math:`\Phi` along random directions, each with two accurate lower solves (first derivatives
            only); ``"auto"``: dense up to 512 lower variables. Default: ``"auto"``.
        directions: directions of ``"differences"``; the norm of the bias is then an estimate. Default: 16.

    Returns:
        The figures of the comparison.

    Raises:
        GradcheckError: if the bias exceeds ``atol + rtol * norm + 4 * standard_error``, or if there is no reference
            because the lower problem could not be solved or is not strongly convex at its solution.
        ValueError: for an argument out of its range, or for ``tasks`` with a method that keeps rows of y for all tasks
            (check it on one task, without ``tasks``) or has a single loss.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
        >>> y = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        >>> f, g = lambda: (y - 1).square().sum(), lambda: (y - x).square().sum() + y.square().sum()
        >>> optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=50)
        >>> bo.check_hypergradient(optimizer, f, g).relative_error < 1e-8
        True
        >>> hasty = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
        >>> bo.check_hypergradient(hasty, f, g)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bilevel_optim.errors.GradcheckError: AID: hypergradient off by ...
    """
    require("atol", atol, atol >= 0)
    require("rtol", rtol, rtol >= 0)
    require("repeats", repeats, isinstance(repeats, int) and repeats >= 2)
    require("reference", reference, reference in ("auto", "dense", "differences"))
    require("directions", directions, isinstance(directions, int) and directions >= 1)
    lower = opposite(upper) if lower is None else lower
    restore, lower_init = optimizer._snapshot(), optimizer.lower_init
    try:
        with torch.random.fork_rng():
            case = _Case(optimizer, upper, lower) if tasks is None else _TaskCase(optimizer, upper, lower, tasks)
            expected, coordinates, kind = case.reference(reference, directions)
            mean, std, count = _repeated(optimizer, partial(case.estimate, case.starts), coordinates, repeats)
            at_solution, *_ = _repeated(optimizer, partial(case.estimate, case.solutions), coordinates, repeats)
    finally:
        optimizer.lower_init = lower_init
        restore()
    norm, bias = float(expected.norm()), float((mean - expected).norm())
    estimate_norm = float(mean.norm())
    report = HypergradientReport(
        relative_error=_ratio(bias, norm),
        relative_error_at_solution=_ratio(float((at_solution - expected).norm()), norm),
        bias=bias,
        std=std,
        standard_error=std / count**0.5,
        cosine=_ratio(float(mean @ expected), estimate_norm * norm),
        norm=norm,
        lower_residual=case.residual,
        repeats=count,
        reference=kind,
    )
    if not bias <= atol + rtol * norm + 4 * report.standard_error:
        raise GradcheckError(_explanation(optimizer, report, atol, rtol))
    return report


def _ratio(numerator: float, denominator: float) -> float:
    if denominator > 0:
        return numerator / denominator
    return math.inf if numerator > 0 else 0.0


def _explanation(optimizer: BilevelOptimizer, report: HypergradientReport, atol: float, rtol: float) -> str:
    allowed = atol + rtol * report.norm + 4 * report.standard_error
    cause = (
        "The estimator is good at the exact lower solution, so the lower solve is the cause: more lower_steps, a "
        "better lower_lr or lower_optimizer, or some steps of warm start"
        if report.relative_error_at_solution < 0.1 * report.relative_error
        else "It is as bad at the exact lower solution, so the estimator's own settings are the cause (linear_steps, "
        "linear_lr, damping, nu, truncate and the like), or the loss is not what it is meant to be"
    )
    return (
        f"{type(optimizer).__name__}: hypergradient off by {report.bias:.3g}, allowed {allowed:.3g}; "
        f"relative error {report.relative_error:.3g} "
        f"({report.relative_error_at_solution:.3g} if started at the exact lower solution), "
        f"cosine {report.cosine:.4f}, std of one estimate {report.std:.3g}, reference norm {report.norm:.3g} "
        f"({report.reference}). {cause}."
    )


class _Shuffled:
    """Batches in a new random order at each pass."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return (self._batches[i] for i in torch.randperm(len(self._batches)).tolist())


def _materialised(objective: Objective) -> tuple[Objective, list[tuple[Any, ...]]]:
    """An objective over the same batches in random order, and the arguments of its loss for each of them."""
    if objective.data is None:
        return objective, [()]
    if isinstance(objective, FiniteSum):
        own = copy.copy(objective)
        own.generator = None  # that of the user stays as it is
        return own, [own.term(i).arguments for i in range(len(own))]
    batches = list(islice(objective.data, MAX_BATCHES))
    if not batches:
        raise ValueError("the data of an Objective gave no batch")
    return Objective(objective.loss, _Shuffled(batches), features=objective.features), [(b,) for b in batches]


def _repeated(
    optimizer: BilevelOptimizer, estimate: Callable[[], Vector], coordinates: Coordinates, repeats: int
) -> tuple[Tensor, float, int]:
    """Mean, standard deviation and number of estimates, each from the optimizer's present state."""
    estimates: list[Tensor] = []
    while len(estimates) < repeats:
        restore = optimizer._snapshot()
        try:
            optimizer._stand_still()
            estimates.append(coordinates(estimate()))
        finally:
            random = optimizer.generator.get_state() if optimizer.generator is not None else None
            restore()
            if optimizer.generator is not None and random is not None:
                optimizer.generator.set_state(random)  # the next estimate is to use other random numbers
        if len(estimates) == 2 and torch.equal(*estimates):
            break
    stacked = torch.stack(estimates)
    return stacked.mean(0), float(stacked.var(0).sum().sqrt()), len(estimates)


class _Case:
    """What is checked: one lower problem, or (in a subclass) several with the mean of their hypergradients.

    Attributes:
        truths: the lower problems.
        starts: where the method starts to solve them.
        solutions: their solutions, once there is a reference.
        residual: the largest norm of a lower gradient there.
    """

    def __init__(self, optimizer: BilevelOptimizer, upper: Loss, lower: Loss) -> None:
        truth = _Truth(optimizer, upper, lower)
        self.optimizer, self.truths, self.starts = optimizer, [truth], [truth.oracle.y.detach().clone()]
        self.solutions: list[Vector] = []
        self.residual = 0.0

    def estimate(self, starts: list[Vector]) -> Vector:
        """The method's, from these lower values."""
        truth = self.truths[0]
        truth.oracle.y.copy_(starts[0])
        BilevelOptimizer.backward(self.optimizer, truth.upper, truth.lower)  # a minimax method's own takes one loss
        return self._gradient()

    def _gradient(self) -> Vector:
        return Vector(t.grad for t in self.truths[0].oracle.x if t.grad is not None)

    def reference(self, kind: str, directions: int) -> tuple[Tensor, Coordinates, str]:
        """The mean hypergradient in some coordinates, and how to get these of an estimate."""
        oracle, n = self.truths[0].oracle, len(self.truths)
        size = sum(t.numel() for t in oracle.y)
        dense = kind == "dense" or (kind == "auto" and size <= DENSE_LIMIT)
        probes = [] if dense else _probes(oracle.x, directions)
        parts: list[Tensor] = []
        for truth, start in zip(self.truths, self.starts, strict=True):
            solution, residual = truth.solve(start)
            self.residual = max(self.residual, residual)
            parts.append(flat(truth.dense(solution)) if dense else truth.directional(probes, solution))
            self.solutions.append(solution)
        expected = torch.stack(parts).sum(0) / n
        if dense:
            return expected, flat, "dense"
        # Random unit vectors d_i in p dimensions: |e|^2 is the mean of p (d_i . e)^2.
        scale = math.sqrt(sum(t.numel() for t in oracle.x) / len(probes))

        def coordinates(gradient: Vector) -> Tensor:
            return scale * torch.stack([probe.dot(gradient) for probe in probes]).double().cpu()

        return scale * expected, coordinates, "differences"


class _TaskCase(_Case):
    """The lower problems of one draw of tasks."""

    def __init__(self, optimizer: BilevelOptimizer, upper: Loss, lower: Loss, sampler: Any) -> None:
        if isinstance(optimizer, (RecursiveOptimizer, MinimaxOptimizer)):
            why = "has one loss" if isinstance(optimizer, MinimaxOptimizer) else "keeps y of every task"
            raise ValueError(f"{type(optimizer).__name__} {why}: it is checked on one problem, without tasks")
        n = task_layer.task_count(sampler, optimizer.tasks_per_step)
        self.drawn = _DrawnTasks(sampler, n, optimizer.generator)
        self.upper, self.lower = as_objective(upper, "upper"), as_objective(lower, "lower")
        oracle = optimizer._oracle(self.upper, self.lower)
        first = task_layer.starting_points(
            oracle.y, oracle.names[len(oracle.x) :], self.drawn.tasks, n, optimizer.lower_init
        )
        self.starts = [Vector(t[i].clone() for t in first) for i in range(n)]
        f, g = (self.drawn.objectives(o, level) for o, level in ((self.upper, "upper"), (self.lower, "lower")))
        self.optimizer, self.truths = optimizer, [_Truth(optimizer, *pair) for pair in zip(f, g, strict=True)]
        self.solutions, self.residual = [], 0.0

    def estimate(self, starts: list[Vector]) -> Vector:
        values = [torch.stack(parts) for parts in zip(*starts, strict=True)]
        self.optimizer.lower_init = lambda tasks: [t[tasks[0].to(t.device)] for t in values]
        self.optimizer.backward(self.upper, self.lower, tasks=self.drawn)
        return self._gradient()


class _DrawnTasks:
    """A sampler of nothing but tasks that were drawn before; each knows its position among them."""

    def __init__(self, sampler: Any, count: int, generator: torch.Generator | None) -> None:
        self.sampler, self.count = sampler, count
        self.tasks = task_layer.sample(sampler, count, generator)

    def __len__(self) -> int:
        return self.count

    def objectives(self, objective: Objective, level: str) -> list[Objective]:
        """The loss on all the data of each task."""
        data = task_layer.draw(self.sampler, level, self.tasks, self.count, None, None)
        batches = [task_layer.select(data, i) for i in range(self.count)]
        return [Objective(objective.loss, [batch], features=objective.features) for batch in batches]

    def sample(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Any]:
        positions = torch.arange(n) % self.count
        return positions, task_layer.select(self.tasks, positions)

    def lower(self, tasks: tuple[Tensor, Any], n: int | None, generator: torch.Generator | None) -> Any:
        return self.sampler.lower(tasks[1], n, generator)

    def upper(self, tasks: tuple[Tensor, Any], n: int | None, generator: torch.Generator | None) -> Any:
        return self.sampler.upper(tasks[1], n, generator)


class _Truth:
    """The losses averaged over their data, and the exact hypergradient."""

    def __init__(self, optimizer: BilevelOptimizer, upper: Loss, lower: Loss) -> None:
        self.upper, upper_batches = _materialised(as_objective(upper, "upper"))
        self.lower, lower_batches = _materialised(as_objective(lower, "lower"))
        self.oracle = optimizer._oracle(self.upper, self.lower)
        self._samples = {
            "upper": [self.oracle.f.sample(*batch) for batch in upper_batches],
            "lower": [self.oracle.g.sample(*batch) for batch in lower_batches],
        }
        self._unit = torch.finfo(self.oracle.y[0].dtype).eps

    def gradient(self, level: str, variables: Sequence[Tensor]) -> tuple[Tensor, Vector]:
        """Value and gradient of one averaged loss at the live point."""
        samples = self._samples[level]
        total, value = filled([None] * len(variables), variables), torch.zeros((), dtype=torch.float64)
        for sample in samples:
            with self.oracle.buffers_kept():
                loss = self.oracle.dependent(level, self.oracle.value(level, sample), self.oracle.y)
                total = total + filled(self.oracle.differentiate(loss, variables), variables)
            value = value + loss.detach().double().cpu()
        mean, total = self.oracle.averaged(value / len(samples), total * (1 / len(samples)))
        return mean, total

    def solve(self, start: Vector) -> tuple[Vector, float]:
        """Minimiser of the averaged lower loss over the live y, which is left there, and the norm of its gradient."""
        y = self.oracle.y
        y.copy_(start)

        def closure() -> float:
            value, gradient = self.gradient("lower", y)
            for tensor, grad in zip(y, gradient, strict=True):
                tensor.grad = grad
            return float(value)

        LBFGS(
            list(y),
            max_iter=500,
            history_size=50,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        ).step(closure)  # type: ignore[no-untyped-call]
        # A line search sees rounding errors of the value, so it stops at the root of the precision. Gradient steps of
        # Barzilai and Borwein's length look at the gradient only.
        gradient = self.gradient("lower", y)[1]
        best, residual = y.detach().clone(), float(gradient.norm())
        move, idle = gradient * -1e-3, 0
        while residual > 0 and idle < 100:
            y.copy_(y.detach() + move)
            change = gradient
            gradient = self.gradient("lower", y)[1]
            change, norm = gradient - change, float(gradient.norm())
            idle = 0 if norm < 0.99 * residual else idle + 1
            if norm < residual:
                best, residual = y.detach().clone(), norm
            curvature = float(move.dot(change))
            if not curvature > 0:
                break
            move = gradient * (-float(move.dot(move)) / curvature)
        y.copy_(best)
        return best, residual

    def dense(self, solution: Vector) -> Vector:
        """Implicit differentiation with the whole lower Hessian, at a solution polished by Newton steps."""
        x, y = self.oracle.x, self.oracle.y
        y.copy_(solution)
        hessian = self._hessian()
        eigenvalues = torch.linalg.eigvalsh(hessian)
        if not eigenvalues[0] > self._unit * len(hessian) * eigenvalues[-1].abs():
            raise GradcheckError(
                "there is no reference: the lower loss is not strongly convex at the solution that was found (smallest "
                f"eigenvalue of its Hessian {float(eigenvalues[0]):.3g}, largest {float(eigenvalues[-1]):.3g})"
            )
        for _ in range(5):
            step = torch.linalg.solve(hessian, flat(self.gradient("lower", y)[1]))
            if not step.norm() > self._unit * flat(y).norm():
                break
            y.copy_(y.detach() - unflat(step, y))
        error = float(step.norm())
        solution.copy_(y.detach())
        if not error <= max(1e-4, self._unit**0.5) * (1 + float(flat(y).norm())):
            raise GradcheckError(
                f"there is no reference: the lower problem could not be solved (error about {error:.3g})"
            )
        upper_x, upper_y = self.gradient("upper", x)[1], self.gradient("upper", y)[1]
        v = unflat(torch.linalg.solve(hessian, flat(upper_y)), y)
        return upper_x - self._products(x, [v])[0]

    def _hessian(self) -> Tensor:
        y = self.oracle.y
        identity = torch.eye(sum(t.numel() for t in y), dtype=torch.float64)
        rows = torch.stack([flat(row) for row in self._products(y, [unflat(e, y) for e in identity])])
        return (rows + rows.T) / 2

    def _products(self, variables: Vector, vectors: list[Vector]) -> list[Vector]:
        """Derivatives in ``variables`` of <gradient of the averaged lower loss in y, v> for several v."""
        oracle, samples = self.oracle, self._samples["lower"]
        totals = [filled([None] * len(variables), variables) for _ in vectors]
        for sample in samples:
            with oracle.buffers_kept(), twice_differentiable():
                gradient = filled(oracle.twice_differentiable_gradient(sample), oracle.y)
                parts = [i for i, g in enumerate(gradient) if g.requires_grad]
                for k, v in enumerate(vectors if parts else ()):
                    products = torch.autograd.grad(
                        [gradient[i] for i in parts],
                        variables,
                        [v[i] for i in parts],
                        retain_graph=True,
                        allow_unused=True,
                    )
                    totals[k] = totals[k] + filled(products, variables)
        return [oracle.averaged_vector(total * (1 / len(samples))) for total in totals]

    def directional(self, probes: list[Vector], solution: Vector) -> Tensor:
        """Derivatives of f(x, y*(x)) along directions, by fourth-order differences."""
        return torch.stack([self._directional(probe, solution) for probe in probes])

    def _directional(self, probe: Vector, solution: Vector) -> Tensor:
        x = self.oracle.x
        epsilon = self._unit**0.2 * max(1.0, float(x.detach().norm()) / len(flat(x)) ** 0.5)
        formula = stencil(4)
        total = torch.zeros((), dtype=torch.float64)
        for node, weight in zip(formula.nodes, formula.weights, strict=True):
            with self.oracle.at(upper=x.detach() + probe * (node * epsilon)):
                self.solve(solution)
                value, _ = self.gradient("upper", self.oracle.y)
            total = total + float(weight) / epsilon * value
        return total


def _probes(x: Vector, directions: int) -> list[Vector]:
    """Unit vectors in the space of x: a basis if it is small enough, random ones otherwise."""
    size = sum(t.numel() for t in x)
    if size <= directions:
        return [unflat(e, x) for e in torch.eye(size, dtype=torch.float64)]
    random = torch.randn(directions, size, dtype=torch.float64)
    return [unflat(d / d.norm(), x) for d in random]


def flat(vector: Sequence[Tensor]) -> Tensor:
    """All entries as one float64 vector on the host."""
    return torch.cat([t.detach().reshape(-1).double().cpu() for t in vector])


def unflat(entries: Tensor, like: Sequence[Tensor]) -> Vector:
    """The inverse of `flat`."""
    parts = entries.split([t.numel() for t in like])  # type: ignore[no-untyped-call]
    return Vector(part.view(t.shape).to(t) for part, t in zip(parts, like, strict=True))

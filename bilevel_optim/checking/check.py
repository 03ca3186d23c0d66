"""`check_hypergradient`: compare a method's estimate with a reference from an independent path."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import GradcheckError
from ..optimizer.base import BilevelOptimizer
from ..oracle.buffers import Buffers
from ..oracle.oracle import Oracle
from ..problem.finite_sum import FiniteSum
from ..problem.objective import Loss, Objective, as_objective
from ..problem.parameters import require, require_choice
from ..problem.random import kept
from ..problem.tasks import draw, sample, select, starting_points, task_count
from ..problem.vector import Vector, stack
from ..solvers.limits import changes
from .reference import MAX_BATCHES, Coordinates, reference_of

__all__ = ["HypergradientReport", "check_hypergradient"]


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
        ValueError: for an argument out of its range, where ``lower_projection`` changes the solution, or for
            ``tasks`` with a method that keeps rows of y for all tasks (check it on one task, without ``tasks``) or has
            a single loss.

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
    require_choice("reference", reference, ("auto", "dense", "differences"))
    require("directions", directions, isinstance(directions, int) and directions >= 1)
    with _undisturbed(optimizer):
        case = _one_problem(optimizer, upper, lower) if tasks is None else _tasks(optimizer, upper, lower, tasks)
        truth = reference_of(case.problems, case.starts, reference, directions)
        if any(bool(changes(y, optimizer._limits.projected(y, 0))) for y in truth.solutions):
            raise ValueError("there is no reference where lower_projection changes the solution of the lower problem")
        mean, std, count = _repeated(lambda: case.estimate(None), truth.coordinates, repeats)
        at_solution, *_ = _repeated(lambda: case.estimate(truth.solutions), truth.coordinates, repeats)
    norm, bias = float(truth.gradient.norm()), float((mean - truth.gradient).norm())
    estimate_norm = float(mean.norm())
    report = HypergradientReport(
        relative_error=_ratio(bias, norm),
        relative_error_at_solution=_ratio(float((at_solution - truth.gradient).norm()), norm),
        bias=bias,
        std=std,
        standard_error=std / count**0.5,
        cosine=_ratio(float(mean @ truth.gradient), estimate_norm * norm),
        norm=norm,
        lower_residual=truth.residual,
        repeats=count,
        reference=truth.kind,
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


@contextmanager
def _undisturbed(optimizer: BilevelOptimizer) -> Generator[None]:
    """Leave torch's random numbers, the optimizer's generator and module buffers as they were before the block."""
    generator = optimizer.generator
    random = None if generator is None else generator.get_state()
    try:
        with kept(optimizer.parameters("upper")[0].device), Buffers().kept():
            yield
    finally:
        if generator is not None and random is not None:
            generator.set_state(random)


def _repeated(estimate: Callable[[], Vector], coordinates: Coordinates, repeats: int) -> tuple[Tensor, float, int]:
    """Mean, standard deviation and number of estimates; two are enough if they are equal."""
    estimates: list[Tensor] = []
    while len(estimates) < repeats:
        estimates.append(coordinates(estimate()))
        if len(estimates) == 2 and torch.equal(*estimates):
            break
    stacked = torch.stack(estimates)
    return stacked.mean(0), float(stacked.var(0).sum().sqrt()), len(estimates)


@dataclass(frozen=True)
class _Case:
    """What is checked: one lower problem, or several with the mean of their hypergradients.

    Attributes:
        problems: the two losses of each.
        starts: where their lower solves start.
        estimate: the method's, started as it would start now, or at other lower points.
    """

    problems: list[Oracle]
    starts: list[Vector]
    estimate: Callable[[list[Vector] | None], Vector]


def _one_problem(optimizer: BilevelOptimizer, upper: Loss, lower: Loss | None) -> _Case:
    f = _replica(as_objective(upper, "upper"))
    g = None if lower is None else _replica(as_objective(lower, "lower"))
    oracle = optimizer._oracle(f, g)

    def estimate(points: list[Vector] | None) -> Vector:
        return optimizer.propose(f, g, still=True, start=None if points is None else points[0]).gradient

    return _Case([oracle], [oracle.y.clone()], estimate)


def _tasks(optimizer: BilevelOptimizer, upper: Loss, lower: Loss | None, sampler: Any) -> _Case:
    """The lower problems of one draw of tasks."""
    kinds = {"rows": "keeps y of every task", "none": "takes no tasks"}
    why = "has one loss" if optimizer._one_loss else kinds.get(optimizer.declared.tasks)
    if why is not None:
        raise ValueError(f"{type(optimizer).__name__} {why}: it is checked on one problem, without tasks")
    n = task_count(sampler, optimizer.tasks_per_step)
    drawn = _DrawnTasks(sampler, n, optimizer.generator)
    oracle = optimizer._oracle(upper, lower)
    first = starting_points(oracle.y, oracle.lower_names(), drawn.tasks, n, optimizer.lower_init)
    starts = [first.lane(i).clone() for i in range(n)]
    pairs = zip(drawn.objectives(upper, "upper"), drawn.objectives(lower, "lower"), strict=True)

    def estimate(points: list[Vector] | None) -> Vector:
        values = stack(starts if points is None else points)

        def start(tasks: tuple[Tensor, Any]) -> list[Tensor]:
            return [t[tasks[0].to(t.device)] for t in values]

        return optimizer.propose(upper, lower, tasks=drawn, still=True, start=start).gradient

    return _Case([optimizer._oracle(*pair) for pair in pairs], starts, estimate)


class _Shuffled:
    """Batches in a new random order at each pass."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return (self._batches[i] for i in torch.randperm(len(self._batches), device="cpu").tolist())


def _replica(objective: Objective) -> Objective:
    """An objective over the same batches in random order, whose draws that of the user does not notice."""
    if objective.data is None:
        return objective
    if isinstance(objective, FiniteSum):
        own = copy.copy(objective)
        own.generator = None
        return own
    batches = [sample.batch for sample in objective.samples(MAX_BATCHES)]
    return Objective(objective.loss, _Shuffled(batches), features=objective.features)


class _DrawnTasks:
    """A sampler of nothing but tasks that were drawn before; each knows its position among them."""

    def __init__(self, sampler: Any, count: int, generator: torch.Generator | None) -> None:
        self.sampler, self.count = sampler, count
        self.tasks = sample(sampler, count, generator)

    def __len__(self) -> int:
        return self.count

    def objectives(self, loss: Loss | None, level: str) -> list[Objective]:
        """The loss on all the data of each task."""
        assert loss is not None  # the optimizer has taken it
        objective = as_objective(loss, level)
        data = draw(self.sampler, level, self.tasks, self.count, None, None)
        batches = [select(data, i) for i in range(self.count)]
        return [Objective(objective.loss, [batch], features=objective.features) for batch in batches]

    def sample(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Any]:
        positions = torch.arange(n, device="cpu") % self.count
        return positions, select(self.tasks, positions)

    def lower(self, tasks: tuple[Tensor, Any], n: int | None, generator: torch.Generator | None) -> Any:
        return self.sampler.lower(tasks[1], n, generator)

    def upper(self, tasks: tuple[Tensor, Any], n: int | None, generator: torch.Generator | None) -> Any:
        return self.sampler.upper(tasks[1], n, generator)

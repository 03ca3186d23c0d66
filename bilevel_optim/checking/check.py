"""`check_hypergradient`: compare a method's estimate with a reference from an independent path."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import GradcheckError
from ..hypergradient import Estimate
from ..optimizer.base import BilevelOptimizer
from ..oracle.buffers import Buffers
from ..oracle.oracle import Oracle
from ..problem.finite_sum import FiniteSum
from ..problem.objective import Loss, Objective, as_objective
from ..problem.parameters import is_number, require, require_choice
from ..problem.tasks import draw, sample, select, starting_points, task_count
from ..problem.vector import Vector, stack
from ..solvers.limits import changes
from .clock import Clock
from .numbers import numbers_kept
from .reference import MAX_BATCHES, WHY, Coordinates, reference_of

__all__ = ["HypergradientReport", "check_hypergradient"]


@dataclass(frozen=True)
class HypergradientReport:
    """Result of `check_hypergradient`; ``print`` shows a verdict, the figures, and what to do, in three lines.

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
        reference: how it was made: ``"dense"``, ``"implicit"`` or ``"differences"``.
        gap: relative difference of the reference to a difference of the solved problem along a random direction; NaN
            where it is made of such differences itself, or the precision is too low for them.
        seconds: what the check took.
        verdict: ``"right"``, ``"biased"`` or ``"inconclusive"`` (the noise of the estimates hides the tolerance).
        advice: what the bias comes from, and what to change.
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
    gap: float
    seconds: float
    verdict: str
    advice: str

    def __str__(self) -> str:
        verdict = {
            "right": f"right: relative error {self.relative_error:.2g}",
            "biased": f"biased by {self.relative_error:.2g} of the norm",
            "inconclusive": f"inconclusive: relative error {self.relative_error:.2g} within noise of "
            f"{_ratio(self.standard_error, self.norm):.2g}",
        }[self.verdict]
        beside = "" if math.isnan(self.gap) else f", {self.gap:.1g} from a difference of the solved problem"
        return (
            f"{verdict} ({self.relative_error_at_solution:.2g} from the exact lower solution, cosine "
            f"{self.cosine:.4f})\n"
            f"reference: {self.reference}{beside}; norm {self.norm:.3g}, std of one estimate {self.std:.2g} "
            f"({self.repeats} estimates), {self.seconds:.1f} s\n"
            f"{self.advice}"
        )


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
    max_seconds: float = math.inf,
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
        reference: ``"dense"``: implicit differentiation with the full lower Hessian; ``"implicit"``: with conjugate
            gradients; ``"differences"``: central differences of :math:`\Phi` along random directions, each with four
            accurate lower solves (first derivatives only). ``"auto"``: dense up to 512 lower variables, implicit above,
            differences where the losses cannot be differentiated twice. Beside the first two stands a difference of the
            solved problem along one direction. Default: ``"auto"``.
        directions: directions of ``"differences"``; the norm of the bias is then an estimate. Default: 16.

        max_seconds: after which the solve of the reference, further directions and further repeats are left out.
            Above two seconds a line on the terminal says what is done. Default: no limit.

    Returns:
        The figures of the comparison, and a verdict.

    Raises:
        GradcheckError: if the bias exceeds ``atol + rtol * norm + 4 * standard_error`` (its ``report`` has the
            figures), if the derivatives of a loss are not those of its values, or if there is no reference because the
            lower problem could not be solved or is not strongly convex at its solution.
        ValueError: for an argument out of its range, where ``lower_projection`` changes the solution, or for
            ``tasks`` with a method that keeps rows of y for all tasks (check it on one task, without ``tasks``) or has
            a single loss.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
        >>> y = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        >>> f, g = lambda: (y - 1).square().sum(), lambda: (y - x).square().sum() + y.square().sum()
        >>> optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=50)
        >>> report = bo.check_hypergradient(optimizer, f, g)
        >>> report.relative_error < 1e-8, report.verdict
        (True, 'right')
        >>> hasty = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
        >>> bo.check_hypergradient(hasty, f, g)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bilevel_optim.errors.GradcheckError: AID: hypergradient off by ...
    """
    require("atol", atol, atol >= 0)
    require("rtol", rtol, rtol >= 0)
    require("repeats", repeats, isinstance(repeats, int) and repeats >= 2)
    require_choice("reference", reference, ("auto", "dense", "implicit", "differences"))
    require("directions", directions, isinstance(directions, int) and directions >= 1)
    require("max_seconds", max_seconds, is_number(max_seconds) and max_seconds > 0)
    clock = Clock(float(max_seconds))
    try:
        with _undisturbed(optimizer):
            case = _one_problem(optimizer, upper, lower) if tasks is None else _tasks(optimizer, upper, lower, tasks)
            truth = reference_of(case.problems, case.starts, reference, directions, clock)
            if any(bool(changes(y, optimizer._limits.projected(y, 0))) for y in truth.solutions):
                raise ValueError(
                    "there is no reference where lower_projection changes the solution of the lower problem"
                )
            here = _repeated(lambda: case.estimate(None), truth.coordinates, repeats, clock)
            there = _repeated(lambda: case.estimate(truth.solutions), truth.coordinates, repeats, clock)
    finally:
        clock.clear()
    norm, bias = float(truth.gradient.norm()), float((here.mean - truth.gradient).norm())
    error, at_solution = (_ratio(float((found.mean - truth.gradient).norm()), norm) for found in (here, there))
    faults = [text for text in truth.faults if optimizer.declared.second_order or "second" not in text]
    standard_error, allowed = here.std / here.number**0.5, atol + rtol * norm
    verdict = "right" if bias + 4 * standard_error <= allowed or (bias <= allowed and not here.std) else "inconclusive"
    verdict = "biased" if bias > allowed + 4 * standard_error or faults else verdict
    report = HypergradientReport(
        relative_error=error,
        relative_error_at_solution=at_solution,
        bias=bias,
        std=here.std,
        standard_error=standard_error,
        cosine=_ratio(float(here.mean @ truth.gradient), float(here.mean.norm()) * norm),
        norm=norm,
        lower_residual=truth.residual,
        repeats=here.number,
        reference=truth.kind,
        gap=truth.gap,
        seconds=clock.spent,
        verdict=verdict,
        advice=_advice(optimizer, verdict, error, at_solution, there.figures, faults),
    )
    if verdict == "biased" or not math.isfinite(bias):
        failure = GradcheckError(
            f"{type(optimizer).__name__}: hypergradient off by {bias:.3g}, allowed {allowed + 4 * standard_error:.3g}\n"
            f"{report}"
        )
        failure.report = report
        raise failure
    return report


def _advice(
    optimizer: BilevelOptimizer,
    verdict: str,
    error: float,
    at_solution: float,
    figures: Mapping[str, Any],
    faults: Sequence[str],
) -> str:
    """What a bias comes from, and what to change.

    Args:
        optimizer: the method.
        verdict: about it.
        error: relative error of its estimate.
        at_solution: the same from the exact lower solution.
        figures: diagnostics of the latter.
        faults: of the derivatives of the losses.
    """
    if verdict == "right":
        return "nothing to change"
    if verdict == "inconclusive":
        return "the noise of the estimates is larger than the tolerance: more repeats, larger batches, or a larger rtol"
    if faults:
        return f"the losses are the cause: {'; '.join(faults)}. {WHY}"
    if at_solution < 0.1 * error:
        return (
            "the lower solve is the cause, as the estimator is good at the exact lower solution: more lower_steps, a "
            "better lower_lr or lower_optimizer, or some steps of warm start"
        )
    own = "the estimator's own settings are the cause, as it is as bad at the exact lower solution: "
    step, residual = optimizer._difference_step, figures.get("linear_relative_residual")
    if step is not None:
        return f"{own}{step} = {getattr(optimizer, step):.3g}: another {step} (its error law is in the docstring)"
    unsolved = None if residual is None else float(torch.as_tensor(residual).max())
    if unsolved is not None and unsolved > 0.1 * at_solution:
        return (
            f"{own}the linear system is solved to {unsolved:.2g} of its right-hand side: more linear_steps, another "
            "linear_lr or linear_solver"
        )
    return (
        f"{own}linear_steps, linear_lr, damping, truncate and the like, or the losses are not what they are meant to be"
    )


def _ratio(numerator: float, denominator: float) -> float:
    if denominator > 0:
        return numerator / denominator
    return math.inf if numerator > 0 else 0.0


@contextmanager
def _undisturbed(optimizer: BilevelOptimizer) -> Generator[None]:
    """Leave all random numbers (torch's, Python's, NumPy's, the optimizer's) and module buffers as they were before."""
    generator = optimizer.generator
    own = None if generator is None else generator.get_state()
    try:
        with numbers_kept(optimizer.parameters("upper")[0].device), Buffers().kept():
            yield
    finally:
        if generator is not None and own is not None:
            generator.set_state(own)


class _Mean(NamedTuple):
    """Mean, standard deviation and number of estimates, and diagnostics of the last."""

    mean: Tensor
    std: float
    number: int
    figures: Mapping[str, Any]


def _repeated(estimate: Callable[[], Estimate], coordinates: Coordinates, repeats: int, clock: Clock) -> _Mean:
    """Two estimates if they are equal, otherwise so many, or as many as there is time for."""
    estimates: list[Tensor] = []
    figures: Mapping[str, Any] = {}
    while len(estimates) < repeats and not (len(estimates) >= 2 and clock.over):
        clock.show(f"estimate {len(estimates) + 1} of {repeats}")
        found = estimate()
        figures = found.diagnostics
        estimates.append(coordinates(found.gradient))
        if len(estimates) == 2 and torch.equal(*estimates):
            break
    stacked = torch.stack(estimates)
    return _Mean(stacked.mean(0), float(stacked.var(0).sum().sqrt()), len(estimates), figures)


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
    estimate: Callable[[list[Vector] | None], Estimate]


def _one_problem(optimizer: BilevelOptimizer, upper: Loss, lower: Loss | None) -> _Case:
    f = _replica(as_objective(upper, "upper"))
    g = None if lower is None else _replica(as_objective(lower, "lower"))
    oracle = optimizer._oracle(f, g)

    def estimate(points: list[Vector] | None) -> Estimate:
        return optimizer.propose(f, g, still=True, start=None if points is None else points[0])

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

    def estimate(points: list[Vector] | None) -> Estimate:
        values = stack(starts if points is None else points)

        def start(tasks: tuple[Tensor, Any]) -> list[Tensor]:
            return [t[tasks[0].to(t.device)] for t in values]

        return optimizer.propose(upper, lower, tasks=drawn, still=True, start=start)

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

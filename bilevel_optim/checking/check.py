"""`check_hypergradient`: compare a method's estimate with a reference from an independent path."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import GradcheckError
from ..hypergradient import Estimate
from ..optimizer.base import BilevelOptimizer
from ..optimizer.hooks import explain_bad_call
from ..oracle.buffers import Buffers, Kept
from ..oracle.doors import START, leads
from ..oracle.oracle import Oracle
from ..problem.finite_sum import FiniteSum
from ..problem.objective import Loss, Objective, as_objective
from ..problem.parameters import by_level, is_number, require, require_choice
from ..problem.random import default_state, numbers_kept, set_states, states_of
from ..problem.tasks import draw, sample, select, starting_points, task_count
from ..problem.vector import Vector, stack
from ..solvers.limits import changes
from .cause import cause
from .reference import FIRST, JOINT, KINK, MAX_BATCHES, SECOND, WHY, Coordinates, Reference, reference_of
from .trials import SECONDS, TimeLimit, TimeUp

__all__ = ["DrawnTasks", "HypergradientReport", "check_hypergradient"]

TOLERANCE = "Invalid {name} value: {value} (a number of at least 0)"
ONE = "Invalid {name} value: {value} (an integer of at least 1)"
TWO = "Invalid {name} value: {value} (an integer of at least 2)"


@dataclass(frozen=True)
class HypergradientReport:
    """Result of `check_hypergradient`; ``print`` shows a verdict, the figures, and what to do, in three lines.

    If the check ends without a reference, it has no figures.

    Attributes:
        relative_error: norm of the bias over the norm of the reference.
        relative_error_at_solution: the same with the lower variable started at the exact lower solution. This part is
            due to the estimator, not to too few lower steps.
        bias: norm of (mean estimate - reference).
        std: square root of the variance of one estimate, summed over its entries; 0 for a deterministic method.
        standard_error: of the mean estimate, ``std / sqrt(repeats)``.
        cosine: between the mean estimate and the reference.
        norm: norm of the reference.
        lower_residual: norm of the lower gradient at the solution that the reference is based on (with tasks, the
            largest).
        repeats: number of estimates in the mean.
        reference: method of the reference: ``"dense"``, ``"implicit"`` or ``"differences"``.
        gap: relative difference of the reference to a difference of the solved problem along a random direction. NaN
            if the reference is itself made of such differences, or the precision is too low for them.
        uncertainty: about the norm of the reference's own error, from errors of its lower solve and of differences.
        seconds: duration of the check.
        verdict: ``"right"``, ``"biased"`` or ``"inconclusive"``: noise of the estimates, an inaccurate reference, or
            the time limit do not allow a decision.
        advice: the cause of the bias, or why there is no decision; and what to change.
    """

    seconds: float
    verdict: str
    advice: str
    relative_error: float = math.nan
    relative_error_at_solution: float = math.nan
    bias: float = math.nan
    std: float = math.nan
    standard_error: float = math.nan
    cosine: float = math.nan
    norm: float = math.nan
    lower_residual: float = math.nan
    repeats: int = 0
    reference: str = "none"
    gap: float = math.nan
    uncertainty: float = math.inf

    def __str__(self) -> str:
        hidden = _ratio(self.standard_error, self.norm), _ratio(self.uncertainty, self.norm)
        verdict = {
            "right": f"right: relative error {self.relative_error:.2g}",
            "biased": f"biased by {self.relative_error:.2g} of the norm",
            "inconclusive": f"inconclusive: relative error {self.relative_error:.2g}, noise of the estimate "
            f"{hidden[0]:.2g}, of the reference {hidden[1]:.2g}",
        }[self.verdict]
        if not self.repeats:
            return f"inconclusive: there is no estimate\nreference: none, {self.seconds:.1f} s\n{self.advice}"
        beside = "" if math.isnan(self.gap) else f", {self.gap:.1g} from a difference of the solved problem"
        return (
            f"{verdict} ({self.relative_error_at_solution:.2g} from the exact lower solution, cosine "
            f"{self.cosine:.4f})\n"
            f"reference: {self.reference}{beside}; norm {self.norm:.3g}, std of one estimate {self.std:.2g} "
            f"({self.repeats} estimates), {self.seconds:.1f} s\n"
            f"{self.advice}"
        )


@explain_bad_call
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
    compares it with ``optimizer.backward`` as it would run now: from the current lower value, with the current warm
    starts. One call shows whether ``nu``, ``lower_steps``, ``linear_steps`` and the like are good enough. Use
    float64 if possible. Nothing is changed: parameters, ``.grad``, state, counters, random state and the position in
    the data are as they were.

    With ``tasks`` the mean over one draw of tasks is checked. The reference solves the lower problem of every drawn
    task on all of its data, from the same start as the method. The method makes all its estimates for these
    tasks (on batches of them, if it has ``lower_batch`` or ``upper_batch``). The cost grows with ``tasks_per_step``.

    Args:
        optimizer: the method, with its parameters at the point to check.
        upper: upper loss, as for ``optimizer.step``.
        lower: lower loss. Leave it out for a minimax method, whose only loss is ``upper``.
        tasks: a sampler of tasks, as for ``optimizer.step``, whose ``lower`` and ``upper`` take ``n=None``.
        atol: allowed bias, absolute. Default: 1e-8.
        rtol: allowed bias relative to the norm of the reference. Default: 1e-2.
        repeats: estimates to average for a stochastic method (a deterministic one needs two). Default: 32.
        reference: ``"dense"``: implicit differentiation with the full lower Hessian; ``"implicit"``: with conjugate
            gradients; ``"differences"``: central differences of :math:`\Phi` along random directions, each with four
            accurate lower solves (first derivatives only). ``"auto"``: dense up to 512 lower variables, implicit above,
            differences where the losses cannot be differentiated twice. ``"dense"`` and ``"implicit"`` are compared
            with differences of the solved problem along two directions. Default: ``"auto"``.
        directions: directions of ``"differences"``; the norm of the bias is then an estimate. Default: 16.
        max_seconds: time limit for further directions and further repeats. If there is no reference by then,
            or one along some directions only, the verdict is ``"inconclusive"``. Above five seconds a line on the
            terminal names the present work. Default: no limit.

    Returns:
        The figures of the comparison, and a verdict.

    Raises:
        GradcheckError: if the bias exceeds ``atol + rtol * norm + 4 * standard_error + uncertainty`` (its ``report``
            has the figures), if the derivatives of a loss are not those of its values, or if there is no reference: the
            lower problem could not be solved or is not strongly convex at its solution, or a loss gives another value
            each time.
        ValueError: for an argument out of its range; if ``lower_projection`` changes the solution; if x reaches y by
            the start of the lower steps or by options of their optimizer, and the method differentiates that; or for
            ``tasks`` with a method that keeps rows of y for all tasks (check it on one task, without ``tasks``) or has
            a single loss.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
        >>> y = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        >>> f, g = lambda: (y - 1).square().sum(), lambda: (y - x).square().sum() + y.square().sum()
        >>> optimizer = bo.AID([x], [y], lr=0.1, lower_steps=50)
        >>> report = bo.check_hypergradient(optimizer, f, g)
        >>> report.relative_error < 1e-8, report.verdict
        (True, 'right')
        >>> hasty = bo.AID([x], [y], lr=0.1, lower_steps=1)
        >>> bo.check_hypergradient(hasty, f, g)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bilevel_optim.errors.GradcheckError: AID: hypergradient off by ...
    """
    require("atol", atol, atol >= 0, TOLERANCE)
    require("rtol", rtol, rtol >= 0, TOLERANCE)
    require("repeats", repeats, isinstance(repeats, int) and repeats >= 2, TWO)
    require_choice("reference", reference, ("auto", "dense", "implicit", "differences"))
    require("directions", directions, isinstance(directions, int) and directions >= 1, ONE)
    require("max_seconds", max_seconds, is_number(max_seconds) and max_seconds > 0, SECONDS)
    clock = TimeLimit(float(max_seconds))
    try:
        with _undisturbed(optimizer):
            report, allowed = _checked(
                optimizer, upper, lower, tasks, (atol, rtol), repeats, reference, directions, clock
            )
    except TimeUp as time:
        advice = f"time is up before {time}: use a larger max_seconds (now {max_seconds:.3g}), or less data{clock.note}"
        return HypergradientReport(seconds=clock.spent, verdict="inconclusive", advice=advice)
    finally:
        clock.clear()
    if report.verdict == "biased":
        failure = GradcheckError(
            f"{type(optimizer).__name__}: hypergradient off by {report.bias:.3g}, allowed {allowed:.3g}\n{report}"
        )
        failure.report = report
        raise failure
    return report


def _checked(
    optimizer: BilevelOptimizer,
    upper: Loss,
    lower: Loss | None,
    tasks: Any,
    tolerances: tuple[float, float],
    repeats: int,
    reference: str,
    directions: int,
    clock: TimeLimit,
) -> tuple[HypergradientReport, float]:
    """Return the report, and the largest bias that passes: the tolerance plus the uncertainty of the comparison."""
    f, g = _timed(upper, "upper", clock), None if lower is None else _timed(lower, "lower", clock)
    _require_losses_alone(optimizer, tasks)
    case = _one_problem(optimizer, f, g) if tasks is None else _tasks(optimizer, f, g, tasks)
    concerns = FIRST if optimizer.declared.family == "zeroth-order" else JOINT  # the derivatives that it takes
    concerns = SECOND if optimizer.declared.second_order else concerns
    truth = reference_of(case.problems, case.starts, reference, directions, clock, concerns)
    if any(bool(changes(y, optimizer._limits.projected(y, 0))) for y in truth.solutions):
        raise ValueError(
            "there is no reference where lower_projection changes the solution of the lower problem, because the "
            "reference is that of the problem without it; check at an x where the projection changes nothing"
        )
    here = _repeated(lambda: case.estimate(None), truth.coordinates, repeats, clock)
    there = _repeated(lambda: case.estimate(truth.solutions), truth.coordinates, repeats, clock)
    norm, bias = float(truth.gradient.norm()), float((here.mean - truth.gradient).norm())
    error, at_solution = (_ratio(float((found.mean - truth.gradient).norm()), norm) for found in (here, there))
    standard_error, allowed = here.std / here.number**0.5, tolerances[0] + tolerances[1] * norm
    slack = 4 * standard_error + truth.uncertainty
    # A difference to a doubtful reference is no fault of the method, except along directions that were compared.
    decided = not case.noise and (not truth.doubt or truth.kind == "differences")
    verdict = "inconclusive"
    if truth.faults or not math.isfinite(bias) or (bias > allowed + slack and decided):
        verdict = "biased"
    elif bias + slack <= allowed and truth.doubt in ("", KINK):
        verdict = "right"
    if verdict == "right":
        advice = "nothing to change" + (f"; {truth.doubt}" if truth.doubt else "")
        if bias > tolerances[1] * norm + slack and norm:
            advice = (
                f"only atol = {tolerances[0]:.3g} lets it pass, because the hypergradient is as small as that (norm "
                f"{norm:.3g}): pass a smaller atol if such values matter"
            )
    elif verdict == "inconclusive":
        advice = _why_inconclusive(case, truth, bias > allowed + slack, 4 * standard_error, allowed)
    elif truth.faults:
        advice = f"the losses are the cause: {'; '.join(truth.faults)}. {WHY}"
    else:

        def retried() -> float:
            found = _repeated(lambda: case.estimate(truth.solutions), truth.coordinates, repeats, clock)
            return _ratio(float((found.mean - truth.gradient).norm()) + 2 * found.std / found.number**0.5, norm)

        advice = cause(optimizer, error, at_solution, there.figures, retried)
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
        uncertainty=truth.uncertainty,
        seconds=clock.spent,
        verdict=verdict,
        advice=advice,
    )
    return report, allowed + slack


def _require_losses_alone(optimizer: BilevelOptimizer, tasks: Any) -> None:
    """Raise where x decides how the lower problem is solved: the reference is that of the solution."""
    x = optimizer.parameters("upper")
    doors = [*optimizer._lower_checks.doors(by_level(optimizer.param_groups)["lower"], x)]
    if tasks is None and optimizer.lower_init is not None and leads(optimizer.lower_init(), x):
        doors.append(START)
    if optimizer.declared.doors.intersection(doors):  # others refuse it themselves
        raise ValueError(
            f"there is no reference where x reaches y by {doors[0]}, because the reference is that of the solved lower "
            "problem, which does not depend on how it is solved; compare the hypergradient with differences of the "
            "whole step at x plus and minus a small number"
        )


def _why_inconclusive(case: _Case, truth: Reference, off: bool, noise: float, allowed: float) -> str:
    """Return why there is no decision, and what would allow one.

    Args:
        case: the lower problems and their estimates.
        truth: the reference.
        off: whether the estimate is off by more than all noise.
        noise: noise of the estimate.
        allowed: allowed bias.
    """
    if off and case.noise:
        return case.noise
    if truth.doubt:
        return truth.doubt
    if truth.uncertainty > max(noise, allowed / 2):
        return (
            f"the reference is known within {_ratio(truth.uncertainty, float(truth.gradient.norm())):.2g} of its norm "
            "only, because a kink of the losses (ReLU, abs, max) or rounding is within reach of the differences, or "
            "the lower solve is not exact: check at another point (move x a little), in float64, or with a larger rtol"
        )
    return "the noise of the estimates is larger than the tolerance: use more repeats, larger batches, or a larger rtol"


def _ratio(numerator: float, denominator: float) -> float:
    if denominator > 0:
        return numerator / denominator
    return math.inf if numerator > 0 else 0.0


@contextmanager
def _undisturbed(optimizer: BilevelOptimizer) -> Generator[None]:
    """Restore all random states (torch's, Python's, NumPy's, the optimizer's) and module buffers after the block."""
    generators = {} if optimizer.generator is None else {"generator": optimizer.generator}
    own = states_of(generators)
    try:
        with numbers_kept(optimizer.parameters("upper")[0].device), Kept(Buffers()):
            yield
    finally:
        set_states(generators, own)


class _EstimateMean(NamedTuple):
    """Mean, standard deviation and number of estimates, and diagnostics of the last."""

    mean: Tensor
    std: float
    number: int
    figures: Mapping[str, Any]


def _repeated(
    estimate: Callable[[], Estimate], coordinates: Coordinates, repeats: int, clock: TimeLimit
) -> _EstimateMean:
    """Return the mean of ``repeats`` estimates, of two if they are equal, or of as many as there is time for."""
    estimates: list[Tensor] = []
    figures: Mapping[str, Any] = {}
    while len(estimates) < repeats and not (len(estimates) >= 2 and clock.over):
        clock.show(f"estimate {len(estimates) + 1} of {repeats}")
        try:
            found = estimate()
        except TimeUp:
            if len(estimates) < 2:
                raise
            break
        figures = found.diagnostics
        estimates.append(coordinates(found.gradient))
        if len(estimates) == 2 and torch.equal(*estimates):
            break
    clock.lenient = True
    stacked = torch.stack(estimates)
    return _EstimateMean(stacked.mean(0), float(stacked.var(0).sum().sqrt()), len(estimates), figures)


@dataclass(frozen=True)
class _Case:
    """The checked problem: one lower problem, or several with the mean of their hypergradients.

    Attributes:
        problems: the two losses of each.
        starts: initial points of their lower solves.
        estimate: returns the method's estimate from its current start, or from other lower points.
        noise: why a difference to the reference may be no fault of the method, if the losses' own random numbers differ
            between the two.
    """

    problems: list[Oracle]
    starts: list[Vector]
    estimate: Callable[[list[Vector] | None], Estimate]
    noise: str = ""


def _one_problem(optimizer: BilevelOptimizer, upper: Objective, lower: Objective | None) -> _Case:
    drawing = _drawing(optimizer._oracle(upper, lower), lower is not None)
    f, g = _replica(upper, drawing[0]), None if lower is None else _replica(lower, drawing[1])
    oracle = optimizer._oracle(f, g)
    loose = any(draws and isinstance(one, FiniteSum) for draws, one in zip(drawing, (f, g), strict=True))

    def estimate(points: list[Vector] | None) -> Estimate:
        return optimizer.propose(f, g, still=True, start=None if points is None else points[0])

    return _Case([oracle], [oracle.y.clone()], estimate, LOOSE if loose else "")


def _tasks(optimizer: BilevelOptimizer, upper: Objective, lower: Objective | None, sampler: Any) -> _Case:
    """Return the lower problems of one draw of tasks."""
    kinds = {"rows": "keeps y of every task", "none": "takes no tasks"}
    why = "has one loss" if optimizer._one_loss else kinds.get(optimizer.declared.tasks)
    if why is not None:
        raise ValueError(
            f"{type(optimizer).__name__} {why}, so it cannot be checked with tasks; call check_hypergradient for one "
            "problem, without tasks="
        )
    n = task_count(sampler, optimizer.tasks_per_step)
    drawn = DrawnTasks(sampler, n, optimizer.generator)
    oracle = optimizer._oracle(upper, lower)
    assert lower is not None  # the oracle has taken it
    first = starting_points(oracle.y, oracle.lower_names(), drawn.tasks, n, optimizer.lower_init).detach()
    starts = [first.lane(i).clone() for i in range(n)]
    pairs = zip(drawn.objectives(upper, "upper"), drawn.objectives(lower, "lower"), strict=True)
    problems = [optimizer._oracle(*pair) for pair in pairs]

    def estimate(points: list[Vector] | None) -> Estimate:
        values = stack(starts if points is None else points)

        def start(tasks: tuple[Tensor, Any]) -> list[Tensor]:
            return [t[tasks[0].to(t.device)] for t in values]

        return optimizer.propose(upper, lower, tasks=drawn, still=True, start=start)

    return _Case(problems, starts, estimate, LOOSE if any(_drawing(problems[0].at(lower=starts[0]))) else "")


class _Timed:
    """A loss that is not evaluated after the time limit, also within solvers and estimates.

    Args:
        loss: the loss.
        clock: the time limit.
    """

    def __init__(self, loss: Callable[..., Any], clock: TimeLimit) -> None:
        self.loss, self._clock = loss, clock  # by this name an `Objective` finds the user's code
        functools.update_wrapper(self, loss, updated=())

    def __call__(self, *arguments: Any) -> Any:
        if not self._clock.lenient:
            self._clock.require("the reference and two estimates were made")
        return self.loss(*arguments)


def _timed(loss: Loss, level: str, clock: TimeLimit) -> Objective:
    """Return the objective of a loss that reads the clock."""
    timed = copy.copy(as_objective(loss, level))
    timed.loss = _Timed(timed.loss, clock)
    return timed


class _Shuffled:
    """Batches in a new random order for each pass."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return (self._batches[i] for i in torch.randperm(len(self._batches), device="cpu").tolist())


LOOSE = (
    "the losses draw random numbers (dropout), which with tasks or a FiniteSum differ between the reference and the "
    "estimates: check without them (model.eval()), or make the noise a part of the batches"
)
DRAWS = 8  # least number of random draws of a loss that represent all its draws


def _drawing(oracle: Oracle, lower: bool = True) -> tuple[bool, bool]:
    """Return, for each of the two losses, True if its evaluations draw random numbers."""

    def draws(evaluate: Callable[[Any], Any], objective: Objective) -> bool:
        sample = objective.samples(1)[0]
        before = default_state(oracle.device)
        evaluate(sample)
        return not all(map(torch.equal, before, default_state(oracle.device)))

    return draws(oracle.upper, oracle.f), lower and draws(oracle.lower, oracle.g)


def _seeded(function: Callable[..., Any]) -> Callable[[tuple[int, tuple[Any, ...]]], Any]:
    """Return a loss, or its features, with random numbers that belong to the batch."""

    def seeded(numbered: tuple[int, tuple[Any, ...]]) -> Any:
        seed, arguments = numbered
        torch.manual_seed(seed)
        return function(*arguments)

    return seeded


def _replica(objective: Objective, draws: bool) -> Objective:
    """Return an objective over the same batches in random order that does not advance the user's.

    Random numbers that the loss draws become a part of the batches, so the reference and the estimates use the same.
    """
    if isinstance(objective, FiniteSum):
        own = copy.copy(objective)
        own.generator = None
        return own
    if objective.data is None and not draws:
        return objective
    samples = objective.samples(MAX_BATCHES)
    if not draws:
        return objective.over(_Shuffled([one.batch for one in samples]))
    times = -(-DRAWS // len(samples))
    seeds = torch.randint(2**31, (times * len(samples),), device="cpu").tolist()
    batches = [(seed, samples[i % len(samples)].arguments) for i, seed in enumerate(seeds)]
    made = None if objective.features is None else _seeded(objective.features)
    # The seed is passed on to the loss.
    features = None if made is None else lambda numbered: (numbered[0], (made(numbered),))
    return Objective(_seeded(objective.loss), _Shuffled(batches), features=features, accumulate=objective.accumulate)


class DrawnTasks:
    """A sampler of tasks that are already drawn; each knows its position among them."""

    def __init__(self, sampler: Any, count: int, generator: torch.Generator | None) -> None:
        self.sampler, self.count = sampler, count
        self.tasks = sample(sampler, count, generator)

    def __len__(self) -> int:
        return self.count

    def objectives(self, objective: Objective, level: str) -> list[Objective]:
        """Return the loss on all the data of each task."""
        data = draw(self.sampler, level, self.tasks, self.count, None, None)
        return [Objective(objective.loss, [select(data, i)], features=objective.features) for i in range(self.count)]

    def sample(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Any]:
        positions = torch.arange(n, device="cpu") % self.count
        return positions, select(self.tasks, positions)

    def lower(self, tasks: tuple[Tensor, Any], n: int | None, generator: torch.Generator | None) -> Any:
        return self.sampler.lower(tasks[1], n, generator)

    def upper(self, tasks: tuple[Tensor, Any], n: int | None, generator: torch.Generator | None) -> Any:
        return self.sampler.upper(tasks[1], n, generator)

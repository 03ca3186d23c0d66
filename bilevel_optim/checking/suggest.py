"""`suggest`: settings of methods for a problem, from short trials at its current point."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import GradcheckError
from ..optimizer.base import BilevelOptimizer
from ..optimizer.declaration import methods as known_methods
from ..optimizer.hooks import explain_bad_call
from ..optimizer.transaction import require_no_transform
from ..oracle.buffers import Buffers, Kept
from ..oracle.oracle import Oracle
from ..oracle.session import EvaluationOptions, Session
from ..problem.objective import Loss, Objective, Sample, as_objective
from ..problem.parameters import Params, as_groups, is_number, require, require_choice, require_gradients, unnamed
from ..problem.random import numbers_kept
from ..solvers.agd import AGD
from .check import DrawnTasks, check_hypergradient
from .differences import unflat
from .reference import largest_graph
from .spectrum import Spectrum
from .trials import SECONDS, Outcome, TimeLimit, Trials

__all__ = ["Suggestion", "suggest"]

METHODS = ("AID", "ITD", "F2SA", "SOBA", "FirstOrder")
BATCHES = 16  # most batches of each loss that represent the data
BUDGETS = (200, 600, 2000)  # gradients of a trial, from round to round
LAST = 6000  # of the best methods
FINALISTS = 2  # methods that go that far, besides the control
RATIO = math.sqrt(10.0)  # ratio of neighbouring upper rates; also the margin of the suggested one
PART = 0.01  # relative change of f by the smallest step of plain descent
RATES = {"SGD": 9, "Adam": 7}  # number of upper rates that are tried
SMALLEST = 1e-3  # smallest rate of Adam
KEPT = 2  # rates of a kind that go on after the first round
STEPS = (3, 10, 30)  # lower steps
COUNTS = ("lower_steps", "linear_steps")
MOST_STEPS = 300  # limit for raising these counts to reduce the bias
ACCELERATED = 30.0  # condition number from which momentum pays in the lower solve
LARGEST_BIAS = 0.5  # largest bias of a suggested method
WORSE = 2.0  # growth of f, relative to the start's loss, above which a trial has diverged
NOT_MEASURED = "not measured: max_seconds was over before its first trials had ended; use a larger one"
NO_MARGIN = (
    "three times its best rate diverged, and max_seconds was over before a smaller one was measured; use a larger one"
)
SHIFT = 0.03  # relative shift of F2SA's copies of y by nu, about


Groups = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # of both levels


@dataclass(frozen=True, eq=False)
class SuggestionRow(Mapping[str, Any]):
    """Suggested settings of a method, as a mapping from its arguments to their values, and the result of their trial.

    Attributes:
        settings: the method's arguments.
        loss: the mean upper loss over the last quarter of the trial.
        steps: steps of the trial.
        gradients: their cost; a product with second derivatives counts as two.
        residual: norm of the gradient of g at the end, over that at the start. NaN with tasks.
        seconds: seconds per step.
        mebibytes: memory of the graphs that a step keeps at once, without parameters. None: not measured.
        bias: norm of the hypergradient's error over its norm (or over 1 % of its norm at the start, if that is more),
            at the end of the trial. None: not measured.
        noise: standard deviation of an estimate, over the norm. None: not measured.
        told: warnings of the trial.
        rates: the best upper rate of each kind of update, ``"SGD"`` and ``"Adam"``.
    """

    settings: dict[str, Any]
    loss: float
    steps: int
    gradients: int
    residual: float
    seconds: float
    mebibytes: float | None
    bias: float | None
    noise: float | None
    told: list[str]
    rates: dict[str, float]

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __len__(self) -> int:
        return len(self.settings)


@dataclass(frozen=True)
class Suggestion:
    """Measurements of `suggest`, and settings for each method; ``print`` shows both.

    Attributes:
        rows: a `SuggestionRow` for each suggested method, by name. Methods that went further come first; then the
            order is by upper loss. A row is a mapping of its ``settings`` (``bo.AID(x, y, **rows["AID"])``). It has the
            ``loss`` after so many ``steps`` and ``gradients``, the ``residual`` of the lower problem, ``seconds`` and
            ``mebibytes`` of a step, ``bias`` and ``noise`` of the hypergradient. It also has the warnings that were
            ``told``, and the best ``rates`` of each kind of update.
        rejected: for each method that is not suggested, why.
        start: the upper loss with the lower problem solved at the current x, by lower steps like those of the trials:
            with noisy batches of g it includes their effect on y.
        largest, smallest: curvature of g in y at the point, with their ``uncertainty``.
        lower_noise, upper_noise: standard deviation of a gradient over batches, over the norm of the mean; 0 without
            data.
        second_derivatives: empty if they work; else why not.
        notes: problems that were found, and remedies.
        gradients: cost of all trials.
        took: seconds in all.
    """

    rows: dict[str, SuggestionRow]
    rejected: dict[str, str]
    start: float
    largest: float
    smallest: float
    uncertainty: float
    lower_noise: float
    upper_noise: float
    second_derivatives: str
    notes: list[str]
    gradients: int
    took: float
    _parameters: Groups = field(repr=False, default=([], []))

    def make(self, name: str, **overrides: Any) -> BilevelOptimizer:
        """Make the optimizer of this name as it was tried, with some settings overridden.

        With ``upper_optimizer=torch.optim.Adam`` (or ``SGD``) and no ``lr``, it takes the best rate that was found for
        that optimizer.
        """
        require_choice("name", name, self.rows)
        row = self.rows[name]
        settings = {**row.settings, **overrides}
        if "upper_optimizer" in overrides and "lr" not in overrides:
            kind = getattr(overrides["upper_optimizer"], "__name__", "")
            settings["lr"] = row.rates.get(kind)
        return _made(name, self._parameters, settings)

    def __str__(self) -> str:
        convex = f", condition number {self.largest / self.smallest:.3g}" if self.smallest > 0 else ""
        within = " within the noise of its batches" if self.lower_noise else ""
        lines = [
            f"upper loss {self.start:.4g} with the lower problem solved{within} at the present x",
            f"curvature of g in y: {self.smallest:.3g} to {self.largest:.3g} (within {self.uncertainty:.1g}){convex}",
            f"noise of a batch's gradient: {self.lower_noise:.2g} of g, {self.upper_noise:.2g} of f",
            f"second derivatives: {self.second_derivatives or 'work'}",
            "",
        ]
        for name, row in self.rows.items():
            settings = ", ".join(f"{option}={_short(value)}" for option, value in row.settings.items())
            bias = "not measured" if row.bias is None else f"{row.bias:.1%}"
            noise = "" if not row.noise else f", noise {row.noise:.1%}"
            graph = "" if row.mebibytes is None else f", {row.mebibytes:.2g} MiB"
            lines.append(f"{name}({settings})")
            lines.append(f"    upper loss {row.loss:.4g} after {row.steps} steps ({row.gradients} gradients)")
            lines.append(f"    gradient of g {row.residual:.2g} of the start's; bias {bias}{noise}")
            lines.append(f"    {row.seconds:.2g} s{graph} a step")
            lines += ["    warned: " + text for text in row.told]
        lines += [f"not suggested: {name}: {reason}" for name, reason in self.rejected.items()]
        lines += ["note: " + note for note in self.notes]
        return "\n".join([*lines, f"{self.gradients} gradients in {self.took:.1f} s"])


@explain_bad_call
def suggest(
    upper_params: Params,
    lower_params: Params,
    upper: Loss,
    lower: Loss,
    *,
    methods: Sequence[str] = METHODS,
    tasks: Any = None,
    max_seconds: float = 60.0,
) -> Suggestion:
    """Try methods for some steps from the current point, and suggest their settings.

    Every trial starts at the current x and y, with the same batches and random numbers. Plain descent and Adam update
    x, each with several rates: all of them for a few steps, the best for more, the best of each method for 2,000
    gradients (a product with second derivatives counts as two), and of the two best methods for 6,000. The suggested
    rate was stable in its trial and stays so with three times the rate. Then 3, 10 and 30 lower steps are compared at
    equal cost. The lower rate follows the curvature (``lower_lr="auto"``). Methods that went further come first; then
    the order is by the upper loss that they reached, whatever the load of the machine. ``FirstOrder``, which leaves the
    indirect term out, is the control.

    *When.* Before the first run. Nothing is changed: parameters, ``.grad``, random state, module buffers and the
    position in the data are as they were. Up to 16 batches of each loss represent the data. Above five seconds a line
    on the terminal names the present work.

    *Cost*: about 20,000 gradients for each method and 40,000 for the two best, unless ``max_seconds`` ends the trials.
    With tasks up to eight times as many: the gradients of the tasks of a step, up to eight, count as one.

    Args:
        upper_params: upper parameters, as a method takes them.
        lower_params: lower parameters, in the same form.
        upper: f, as for ``step``.
        lower: g, as for ``step``.
        methods: some of ``"AID"``, ``"ITD"``, ``"F2SA"``, ``"SOBA"``, ``"FirstOrder"``. Default: all.
        tasks: a sampler of tasks, as for ``step``; curvatures are those of the first task that it draws. Default: None.
        max_seconds: time limit for further steps; the result says which trials are missing. Default: 60.

    Returns:
        A row for each method, the best first, and the measurements.

    Raises:
        ValueError: for an argument out of its range, and as the first step of a method would.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(3, requires_grad=True)
        >>> curvature = torch.tensor([1.0, 2.0, 10.0])
        >>> f, g = lambda: (y - 1).square().sum() / 2, lambda: (curvature * (y - x).square()).sum() / 2
        >>> suggestion = bo.suggest([x], [y], f, g, methods=["AID", "FirstOrder"], max_seconds=3)
        >>> list(suggestion.rows), round(suggestion.smallest, 3), round(suggestion.largest, 3)
        (['AID'], 1.0, 10.0)
        >>> optimizer = suggestion.make("AID")
        >>> loss = optimizer.step(f, g)

    Source: Jamieson, Talwalkar (2016), arXiv:1502.07943 (successive halving).
    """
    methods = (methods,) if isinstance(methods, str) else methods
    require("methods", methods, len(methods) > 0, "Invalid {name} value: {value} (it must name at least one method)")
    for name in methods:
        require_choice("methods", name, METHODS)
    require("max_seconds", max_seconds, is_number(max_seconds) and max_seconds > 0, SECONDS)
    require_gradients()
    require_no_transform()
    clock = TimeLimit(max_seconds, "suggest")
    groups = as_groups(upper_params, "upper"), as_groups(lower_params, "lower")
    x, y = ([t for g in level for t in map(unnamed, g["params"]) if t.requires_grad] for level in groups)
    f, g = as_objective(upper, "upper"), as_objective(lower, "lower")
    try:
        # Trials must not advance the run's random states and data.
        with numbers_kept(y[0].device), Kept(Buffers()):
            few = _few(f), _few(g)
            one = few
            if tasks is not None:
                task = DrawnTasks(tasks, 1, torch.Generator().manual_seed(0))
                one = task.objectives(f, "upper")[0], task.objectives(g, "lower")[0]
            measured = _Measured(x, y, *one, lambda: not clock.over)
            search = _Search(Trials([*x, *y], *few, tasks, lambda: not clock.over), measured, groups, clock)
            search.find(methods)
    finally:
        clock.clear()
    rows, rejected = search.results(methods)
    notes = measured.notes()
    if search.trials.ended:
        notes.append(
            f"max_seconds={max_seconds:g} ended the trials early, so the order is that of shorter trials, and some "
            "rates were perhaps not tried with a margin; use a larger max_seconds"
        )
    best = min(rows, key=lambda name: rows[name].loss, default="")
    if best == next(iter(rows), "") == "FirstOrder" and not search.trials.ended:
        notes.append("nothing was better than leaving the indirect term out (FirstOrder)")
    return Suggestion(
        rows=rows,
        rejected=rejected,
        start=search.start,
        largest=measured.spectrum.largest,
        smallest=measured.spectrum.smallest,
        uncertainty=measured.spectrum.uncertainty,
        lower_noise=measured.lower_noise,
        upper_noise=measured.upper_noise,
        second_derivatives=measured.why_differences,
        notes=notes,
        gradients=search.trials.gradients,
        took=clock.spent,
        _parameters=groups,
    )


def _made(name: str, groups: Groups, settings: dict[str, Any]) -> BilevelOptimizer:
    """Make the optimizer of a method; it does not change the groups."""
    upper, lower = ([dict(group) for group in level] for level in groups)
    made: BilevelOptimizer = known_methods()[name](upper, lower, **settings)
    return made


def _short(value: Any) -> str:
    if isinstance(value, partial):
        options = ", ".join(f"{name}={_short(option)}" for name, option in value.keywords.items())
        return f"partial({value.func.__name__}, {options})"
    if isinstance(value, type):
        return value.__name__
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def _few(objective: Objective) -> Objective:
    """Return the loss on some batches, drawn without moving the position in the data."""
    if objective.data is None:
        return objective.over(None)
    return objective.over([one.arguments[0] for one in objective.samples(BATCHES * objective.accumulate)])


def _samples(objective: Objective) -> list[Sample]:
    """Return the samples that a pass over some batches gives, without moving the position in them."""
    if objective.accumulate == 1:
        return objective.samples()
    own = _few(objective)
    return [own.draw() for _ in range(max(len(own.samples()) // objective.accumulate, 1))]


# ---------------------------------------------------------------------------------------------------- the point


class _Measured:
    """Curvature and noise at the point.

    Args:
        x, y: the live tensors.
        f, g: the losses.
        goes_on: returns True if there is time for more.
    """

    def __init__(
        self, x: list[Tensor], y: list[Tensor], f: Objective, g: Objective, goes_on: Callable[[], bool]
    ) -> None:
        self.oracle = Oracle(x, y, f, g, session=Session(EvaluationOptions()))
        self.f, self.g = _samples(f), _samples(g)
        self.y = _flat(self.oracle.y)
        each = self._lower_each(self.y)
        self.slope = torch.stack(each).mean(0)
        self.lower_noise = _spread(each)
        at = [self.oracle.upper(one) for one in self.f]
        self.loss, pulls = sum(float(loss) for loss, *_ in at) / len(at), [own[1:] for own in at]
        self.upper_noise = _spread([torch.cat([_flat(in_x), _flat(in_y)]) for in_x, in_y in pulls])
        self.pull = float(torch.stack([_flat(in_y) for _, in_y in pulls]).mean(0).norm())
        self.why_differences = self._try_second_derivatives()
        with self._products() as product:
            self.spectrum = Spectrum(product, self.y, goes_on)

    @property
    def convex(self) -> bool:
        """True if the smallest curvature is above rounding."""
        spectrum = self.spectrum
        return spectrum.smallest > 100 * torch.finfo(self.y.dtype).eps * spectrum.largest

    @property
    def momentum(self) -> float:
        """Momentum for accelerated descent if g has no noise and is badly conditioned; else zero."""
        if not self.convex or len(self.g) > 1:
            return 0.0
        root = math.sqrt(self.spectrum.largest / self.spectrum.smallest)
        return (root - 1) / (root + 1) if root**2 > ACCELERATED else 0.0

    @property
    def nu(self) -> float:
        """Value of nu for F2SA that moves copies of y by a small part of its size, by its sharpest curvature."""
        sharpest = max(abs(self.spectrum.largest), abs(self.spectrum.smallest), torch.finfo(self.y.dtype).tiny)
        size = float(self.y.norm()) + float(self.slope.norm()) / sharpest
        return SHIFT * sharpest * max(size, 1e-3) / max(self.pull, 1e-12)

    def _lower_each(self, y: Tensor) -> list[Tensor]:
        at = self.oracle.at(lower=unflat(y, self.oracle.y))
        return [_flat(at.lower(one)[1]) for one in self.g]

    @contextmanager
    def _products(self) -> Generator[Callable[[Tensor], Tensor]]:
        """Yield products with the Hessian of g, on the mean of the batches."""
        with ExitStack() as stack:
            systems = [stack.enter_context(self.oracle.lower_system(one)) for one in self.g]
            yield lambda v: torch.stack([_flat(system.hvp(unflat(v, self.oracle.y))) for system in systems]).mean(0)

    def _try_second_derivatives(self) -> str:
        """Return why differences of gradients are used (a product fails, or disagrees with them); else empty."""
        generator = torch.Generator().manual_seed(1)
        v = torch.randn(self.y.numel(), generator=generator, dtype=self.y.dtype, device="cpu").to(self.y)
        step = torch.finfo(self.y.dtype).eps ** (1 / 3) * (1 + float(self.y.norm())) / float(v.norm())
        ends = [torch.stack(self._lower_each(self.y + sign * step * v)).mean(0) for sign in (1, -1)]
        along = (ends[0] - ends[1]) / (2 * step)
        try:
            with self._products() as product:
                found = product(v)
            if float((found - along).norm()) <= 0.5 * float(along.norm()):
                return ""
            why = "products with the Hessian differ from differences of gradients"
        except (RuntimeError, NotImplementedError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        self.oracle.session = Session(EvaluationOptions(hvp="finite-difference"))
        return f"{why} (hvp='finite-difference' is used)"

    def notes(self) -> list[str]:
        """Return problems of the lower loss, and remedies."""
        spectrum = self.spectrum
        if not self.convex:
            ridge = 2 * abs(spectrum.smallest) + 1e-3 * spectrum.largest
            return [
                f"g is not convex in y at this point (smallest curvature {spectrum.smallest:.3g}), so AID uses MINRES: "
                f"add a penalty to g, {ridge:.2g} / 2 times the square of y, which makes it convex here"
            ]
        if (condition := spectrum.largest / spectrum.smallest) > 1e4:
            return [
                f"g is badly conditioned ({condition:.1g}), so the hypergradient is that of a lower solve which stops "
                "early: add a penalty to g, normalise the inputs, or use lower_optimizer= with momentum or Adam"
            ]
        return []


def _flat(vector: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in vector])


def _spread(each: Sequence[Tensor]) -> float:
    """Return the standard deviation of vectors, over the norm of their mean."""
    if len(each) < 2:
        return 0.0
    stacked = torch.stack(list(each))
    size, deviation = float(stacked.mean(0).norm()), float(stacked.var(0).sum().sqrt())
    return deviation / size if size > 0 else math.inf


# ---------------------------------------------------------------------------------------------------- the search


@dataclass
class _Try:
    """Settings of a method, with an update of x of some kind, and their outcome so far.

    Attributes:
        reach: cost of the longest trial that was not cut by the time limit; 0 if there is none.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    outcome: Outcome = field(default_factory=Outcome)
    reach: int = 0

    @property
    def loss(self) -> float:
        """Loss at the end; infinite if the trial diverged, or has not been measured at all."""
        return self.outcome.final_loss if self.reach else math.inf

    @property
    def order(self) -> tuple[int, float]:
        """Key by which tries are sorted: those that went further come first, because losses fall with the cost."""
        return -self.reach, self.loss

    def but(self, **options: Any) -> _Try:
        """Return a new try with some settings changed."""
        return _Try(self.name, self.kind, {**self.settings, **options})


class _Search:
    """Successive halving over upper rates, for each method, at equal numbers of gradients.

    Args:
        trials: runs the trials.
        measured: measurements at the point.
        groups: the parameters.
        clock: time limit for all.

    Attributes:
        start: the upper loss with the lower problem solved at the current x.
    """

    def __init__(self, trials: Trials, measured: _Measured, groups: Groups, clock: TimeLimit) -> None:
        self.trials, self.measured, self._groups, self._clock = trials, measured, groups, clock
        self.start, self._most, self._scale = math.nan, math.inf, math.inf
        self._all: dict[str, list[_Try]] = {}  # of each method, by kind in order of rates
        self._found: dict[str, SuggestionRow] = {}
        self._reasons: dict[str, str] = {}
        self._reach: dict[str, int] = {}  # of the tries that became rows
        self._unmeasured = set[str]()  # methods with a rate that the time limit has left without a result
        self._norms: dict[str, float] = {}  # norms of the first hypergradients
        self._finalists: list[str] = []

    def find(self, methods: Sequence[str]) -> None:
        """Try all methods, round after round, so that all have got equally far when the time ends."""
        fixed = self._tried(self._with_fixed_x("FirstOrder"), BUDGETS[1])
        first = self.measured.loss
        self.start = fixed.outcome.final_loss if math.isfinite(fixed.outcome.final_loss) else first
        self._scale = max(abs(self.start), abs(first - self.start), 1e-12)
        self._most = max(self.start, first)
        self._all = {name: self._rates(name) for name in methods}
        left = dict(self._all)
        for budget in BUDGETS:
            for name, tries in left.items():
                left[name] = self._best(tries, budget)
        self._unmeasured = {name for name, tries in self._all.items() if not all([one.reach for one in tries])}
        found = sorted(left, key=lambda name: min((one.order for one in left[name]), default=(0, math.inf)))
        self._finalists = [*[name for name in found if name != "FirstOrder"][:FINALISTS], "FirstOrder"]
        for name in found:
            self._conclude(name, left[name])
            if name not in self._found:
                unmeasured = name in self._unmeasured
                self._reasons.setdefault(
                    name, NOT_MEASURED if unmeasured else "diverged with every rate that was tried"
                )

    def results(self, methods: Sequence[str]) -> tuple[dict[str, SuggestionRow], dict[str, str]]:
        """Return the suggested rows, the best first, and why other methods are rejected."""
        rejected = {name: self._reasons[name] for name in methods if name not in self._found}
        for name, row in self._found.items():
            if row.bias is not None and row.bias > LARGEST_BIAS and name != "FirstOrder":
                rejected[name] = f"its hypergradient is off by {row.bias:.0%} at the end of the trial"
            elif row.loss >= self.start and self.start > -math.inf:
                which = "no rate that was measured before max_seconds" if name in self._unmeasured else "no rate"
                rejected[name] = f"{which} made the upper loss smaller ({row.loss:.4g} at best)"
        rows = {name: row for name, row in self._found.items() if name not in rejected}
        return dict(sorted(rows.items(), key=lambda pair: (-self._reach[pair[0]], pair[1].loss))), rejected

    # ------------------------------------------------------------------------------------------------ one method

    def _sound(self, tries: Sequence[_Try], budget: int | None = None) -> list[_Try]:
        """Run tries of one method, and return those that did not diverge.

        If none of a kind lowers the upper loss at this cost, smaller rates follow that did so at a smaller cost.
        """
        for one in tries:
            self._clock.show(f"{one.name}, {one.kind} {one.settings['lr']:.2g}")
            self._tried(one, budget)
        found = [*tries]
        for kind in {one.kind for one in tries}:
            least = min([one.settings["lr"] for one in tries if one.kind == kind])
            smaller = [one for one in self._all[tries[0].name] if one.kind == kind and one.settings["lr"] < least]
            while smaller and not any(one.kind == kind and one.loss < self.start for one in found):
                if (one := smaller.pop()).loss < self.start:
                    found.append(self._tried(one, budget))
        return [one for one in found if math.isfinite(one.loss)]

    def _best(self, tries: Sequence[_Try], budget: int) -> list[_Try]:
        """Return the best tries of each kind, after a round at this cost."""
        sound = sorted(self._sound(tries, budget), key=lambda one: one.order)
        kept = KEPT if budget == BUDGETS[0] else 1
        return [one for kind in RATES for one in [t for t in sound if t.kind == kind][:kept]]

    def _with_fixed_x(self, name: str) -> _Try:
        """Return a try of a method that does not move x; the lower rate follows the curvature."""
        measured, settings = self.measured, dict[str, Any]()
        if name != "SOBA":
            settings["lower_steps"] = STEPS[1]
        if name == "AID":
            settings["linear_steps"] = 10
        if measured.momentum and name in ("AID", "F2SA", "FirstOrder"):
            settings["lower_optimizer"] = partial(AGD, momentum=measured.momentum)
        if name == "AID" and not measured.convex:
            settings["linear_solver"] = "minres"
        if name == "F2SA":
            settings |= {"order": 2, "nu": measured.nu, "normalize": False}
        elif measured.why_differences and name != "FirstOrder":
            settings["hvp"] = "finite-difference"
        return _Try(name, "SGD", {**settings, "lr": 0.0})

    def _rates(self, name: str) -> list[_Try]:
        """Return all tries of a method."""

        def measure(optimizer: BilevelOptimizer) -> None:
            self._norms[name] = float(optimizer.diagnostics["hypergradient_norm"])

        first = self._tried(self._with_fixed_x(name), BUDGETS[0], measure)
        if name not in self._norms:
            self._reasons[name] = (
                f"{first.outcome.reason}, although x was fixed" if first.outcome.reason else NOT_MEASURED
            )
            return []
        if (norm := self._norms[name]) == 0:
            self._reasons[name] = "its hypergradient is zero"
            return []
        smallest = {"SGD": PART * self._scale / norm**2, "Adam": SMALLEST}
        update: dict[str, dict[str, Any]] = {"SGD": {}, "Adam": {"upper_optimizer": torch.optim.Adam}}
        return [
            _Try(name, kind, {**first.settings, "lr": rate, **update[kind]})
            for kind, number in RATES.items()
            for rate in (smallest[kind] * RATIO**k for k in range(number))
        ]

    def _tried(
        self, one: _Try, budget: int | None = None, after: Callable[[BilevelOptimizer], None] | None = None
    ) -> _Try:
        """Run a try for some gradients, by default those of the last trials of its method, and return it."""

        def diverged(outcome: Outcome) -> bool:
            return outcome.losses[-1] > self._most + 10 * WORSE * self._scale

        if self._clock.over:
            self.trials.ended = True
            return one
        if budget is None:
            budget = LAST if one.name in self._finalists else BUDGETS[-1]
        make = partial(_made, one.name, self._groups, one.settings)
        outcome = self.trials.run(make, budget, after=after, stop=diverged)
        if not outcome.cut:
            one.reach = budget
        if not outcome.cut or outcome.steps >= one.outcome.steps:
            one.outcome = outcome
        if not one.outcome.reason and one.outcome.final_loss > self._most + WORSE * self._scale:
            one.outcome.reason = "diverged"
        return one

    def _conclude(self, name: str, tries: Sequence[_Try]) -> None:
        """Find the row of a method: its best update of x, with the best lower steps, a small bias, and a margin."""
        sound = self._sound(tries)
        if not sound:
            return
        best = min(sound, key=lambda one: one.order)
        for steps in STEPS if "lower_steps" in best.settings else ():
            if steps != STEPS[1]:
                self._clock.show(f"{name}, {steps} lower steps")
                other = self._tried(best.but(lower_steps=steps))
                if other.loss < best.loss - 0.02 * abs(best.loss):
                    best = other
        best, row = self._less_biased(best)
        rates = {}
        for one in sound:
            options = {option: best.settings[option] for option in COUNTS if option in best.settings}
            kind, settled = one.kind, best if one.kind == best.kind else one.but(**options)
            self._clock.show(f"{name}, {kind} with a larger rate")
            margin = self._with_margin(settled)
            if margin is not None:
                rates[kind] = margin.settings["lr"]
            if kind == best.kind and margin is not best:
                row = None if margin is None else self._measured_row(margin)
            if row is not None and not row.steps:
                row, self._reasons[name] = None, NO_MARGIN
        if row is not None:
            self._found[name], self._reach[name] = replace(row, rates=rates), best.reach

    def _less_biased(self, best: _Try) -> tuple[_Try, SuggestionRow | None]:
        """Return settings with more steps if the bias is large, and their row."""
        row = self._measured_row(best)
        counts = [option for option in COUNTS if option in best.settings]
        while counts and best.name != "FirstOrder" and (row.bias or 0.0) > LARGEST_BIAS:
            more: dict[str, Any] = {option: 3 * best.settings[option] for option in counts}
            if max(more.values()) > MOST_STEPS:
                break
            self._clock.show(f"{best.name}, more steps for a smaller bias")
            other = self._tried(best.but(**more))
            if not math.isfinite(other.loss):
                break
            best, row = other, self._measured_row(other)
        return best, row

    def _with_margin(self, one: _Try) -> _Try | None:
        """Return the same settings, or with a smaller rate, such that three times the rate is stable."""
        rate = one.settings["lr"]
        for part in (1.0, 1 / RATIO, 1 / RATIO**2):
            faster = self._tried(one.but(lr=rate * part * RATIO))
            if not faster.outcome.reason:
                return one if part == 1.0 else one.but(lr=rate * part)
        return None

    def _measured_row(self, one: _Try) -> SuggestionRow:
        """Return the row of some settings, with bias and memory at the end of their trial."""
        found = dict[str, float | None].fromkeys(("bias", "noise", "mebibytes"))

        def measure(optimizer: BilevelOptimizer) -> None:
            self._clock.show(f"{one.name}: bias")
            found["bias"], found["noise"] = self._bias(optimizer, self._norms[one.name])
            found["mebibytes"] = largest_graph(
                lambda: optimizer.step(self.trials.f, self.trials.g, tasks=self.trials.tasks)
            )

        last = self._tried(one.but(), after=measure)
        outcome = last.outcome if math.isfinite(last.loss) else one.outcome
        return SuggestionRow(
            settings=one.settings,
            loss=outcome.final_loss,
            steps=outcome.steps,
            gradients=outcome.gradients,
            residual=outcome.residual,
            seconds=outcome.seconds / max(outcome.steps, 1),
            told=outcome.warning_texts,
            rates={},
            **found,
        )

    def _bias(self, optimizer: BilevelOptimizer, first: float) -> tuple[float | None, float | None]:
        """Return bias and noise of the hypergradient at the end of a trial; None if they are not known.

        They are relative to its norm, or to one per cent of the norm at the start if that is larger (near a solution).
        """
        seconds = self._clock.left / 4
        if seconds <= 0:
            return None, None
        f, g, tasks = self.trials.f, self.trials.g, self.trials.tasks
        try:
            report = check_hypergradient(optimizer, f, g, tasks=tasks, rtol=1e6, repeats=8, max_seconds=seconds)
        except (GradcheckError, ValueError, RuntimeError, NotImplementedError):
            return None, None
        known = report.uncertainty + 2 * report.standard_error
        if not math.isfinite(report.relative_error) or not known <= max(0.5 * report.bias, 0.05 * report.norm):
            return None, None
        norm = max(report.norm, 0.01 * first)
        return report.bias / norm, report.std / norm

"""`suggest`: settings of methods for a problem, from what is measured at the point where it is."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..errors import filters_kept
from ..optimizer.base import BilevelOptimizer
from ..optimizer.declaration import methods as known_methods
from ..oracle.buffers import Buffers
from ..oracle.copies import evaluate_copies
from ..oracle.oracle import Oracle
from ..oracle.session import Options, Session
from ..problem.objective import Loss, Objective, as_objective
from ..problem.parameters import Params, as_groups, is_number, require, require_choice, unnamed
from ..problem.tasks import draw, sample, select
from ..problem.vector import Vector, stack
from ..solvers.agd import AGD
from .numbers import numbers_kept
from .spectrum import STEPS as MOST_PRODUCTS
from .spectrum import Spectrum, lanczos

__all__ = ["Suggestion", "suggest"]

METHODS = ("AID", "ITD", "F2SA", "SOBA")
BATCHES = 8  # of each loss that are looked at
MOST_STEPS = 1000  # lower steps that are suggested; a problem that needs more is too badly conditioned
STEPS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, MOST_STEPS)
PRODUCTS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200)
ACCELERATED = 30.0  # condition number from which momentum pays in the lower solve
PART = 0.01  # part of f that a first step of x would change it by

Polynomial = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """What is suggested for a method.

    Attributes:
        settings: its arguments.
        seconds: of a step.
        mebibytes: of the graphs that a step keeps at once, beside parameters.
        bias: norm of the hypergradient's error over its norm, expected of the first step from here; of a single loop of
            so many steps at one x as ``settled``. None: not known.
        noise: standard deviation of an estimate from single batches, over the norm.
        settled: steps after which a single loop has settled.
        why: what decided.
    """

    settings: dict[str, Any]
    seconds: float
    mebibytes: float
    bias: float | None
    noise: float
    why: str
    settled: int = 1


@dataclass(frozen=True)
class Suggestion:
    """What `suggest` has measured, and settings for each method; ``print`` shows both.

    Attributes:
        rows: for each method, by name: ``settings``, ``seconds`` and ``mebibytes`` of a step, ``bias`` and ``noise`` of
            the estimate, ``settled`` (steps after which a single loop has settled), and ``why``.
        largest, smallest: curvature of g in y at the point, with their ``uncertainty``.
        lower_noise, upper_noise: standard deviation of a gradient over batches, over the norm of the mean (at the
            solution of the lower problem for f); 0 without data.
        second_derivatives: empty if they work; else why not.
        vectorized: empty if ``vmap`` works; else why not.
        seconds: of a gradient of f (``"upper"``), of g (``"lower"``), and of a product with second derivatives.
        mebibytes: of their graphs.
        notes: what stands in the way, and what helps.
        took: seconds that it took to measure.
    """

    rows: dict[str, Row]
    largest: float
    smallest: float
    uncertainty: float
    lower_noise: float
    upper_noise: float
    second_derivatives: str
    vectorized: str
    seconds: dict[str, float]
    mebibytes: dict[str, float]
    notes: list[str]
    took: float
    _parameters: tuple[list[dict[str, Any]], list[dict[str, Any]]] = field(repr=False, default=([], []))

    def make(self, name: str, **overrides: Any) -> BilevelOptimizer:
        """The optimizer of this name with its settings, of which some may be overridden."""
        require_choice("name", name, self.rows)
        upper, lower = ([dict(group) for group in groups] for groups in self._parameters)
        settings = {**self.rows[name].settings, **overrides}
        if "upper_optimizer" in overrides and "lr" not in overrides:
            del settings["lr"]  # it is a step of plain descent
        with filters_kept():
            warnings.filterwarnings("ignore", "nu=")  # it is in proportion to the size of g
            made: BilevelOptimizer = known_methods()[name](upper, lower, **settings)
        return made

    def __str__(self) -> str:
        convex = f", condition number {self.largest / self.smallest:.3g}" if self.smallest > 0 else ""
        lines = [
            f"curvature of g in y: {self.smallest:.3g} to {self.largest:.3g} (within {self.uncertainty:.1g}){convex}",
            f"noise of a batch's gradient: {self.lower_noise:.2g} of g, {self.upper_noise:.2g} of f",
            f"second derivatives: {self.second_derivatives or 'work'}; vmap: {self.vectorized or 'works'}",
            "seconds: " + ", ".join(f"{name} {value:.2g}" for name, value in self.seconds.items())
            + "; MiB of the graph: " + ", ".join(f"{name} {value:.2g}" for name, value in self.mebibytes.items()),
            "",
        ]  # fmt: skip
        for name, row in self.rows.items():
            settings = ", ".join(f"{option}={_short(value)}" for option, value in row.settings.items())
            bias = "unknown" if row.bias is None else f"{row.bias:.1%}"
            when = f" after {row.settled} steps at one x" if row.settled > 1 else ""
            lines.append(
                f"{name}({settings})\n    {row.seconds:.2g} s and {row.mebibytes:.2g} MiB a step; bias {bias}{when}, "
                f"noise {row.noise:.1%}; {row.why}"
            )
        return "\n".join([*lines, *("note: " + note for note in self.notes), f"measured in {self.took:.1f} s"])


def suggest(
    upper_params: Params,
    lower_params: Params,
    upper: Loss,
    lower: Loss,
    *,
    methods: Sequence[str] = METHODS,
    tasks: Any = None,
    bias: float = 1e-2,
    max_seconds: float = 10.0,
) -> Suggestion:
    r"""Measure a problem where it stands, and say what to set.

    The curvature of g comes from products with its Hessian (all of them for few lower parameters, Lanczos's method for
    many; differences of gradients where second derivatives do not work). ``lower_lr`` is the inverse of the largest
    curvature. The lower steps, products and ``nu`` are the least with which the error of the first hypergradient from
    here stays below ``bias``: with the solution of the lower problem from Newton steps, the error of y after T steps is
    :math:`\varphi_T(H)(y - y^*)`, and the losses are evaluated there. ``lr`` is the step along the hypergradient that
    changes f by one per cent, to first order; or leave it out with ``make(..., upper_optimizer=torch.optim.Adam)``.

    *When.* Before the first run, and again where it has led to: the figures hold at one point. Nothing is changed:
    parameters, ``.grad``, random state, module buffers and the position in the data are as they were. Up to 8 batches
    of each loss stand for the data.

    Args:
        upper_params: upper parameters, as a method takes them.
        lower_params: lower parameters, likewise.
        upper: f, as for ``step``.
        lower: g, likewise.
        methods: some of ``"AID"``, ``"ITD"``, ``"F2SA"``, ``"SOBA"``. Default: all four.
        tasks: a sampler of tasks, as for ``step``: the first task that it draws is measured. Default: None.
        bias: relative error of the hypergradient to aim at. Default: 1e-2.
        max_seconds: budget of the measurements, which end a little later; curvatures are then less certain.
            Default: 10.

    Returns:
        The measurements, and a row for each method.

    Raises:
        ValueError: for an argument out of its range, and as the first step of a method would.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(3, requires_grad=True)
        >>> curvature = torch.tensor([1.0, 2.0, 10.0])
        >>> f, g = lambda: (y - 1).square().sum() / 2, lambda: (curvature * (y - x).square()).sum() / 2
        >>> suggestion = bo.suggest([x], [y], f, g)
        >>> round(suggestion.smallest, 3), round(suggestion.largest, 3), suggestion.rows["AID"].settings["lower_lr"]
        (1.0, 10.0, 0.1)
        >>> optimizer = suggestion.make("AID", lr=0.1)
        >>> loss = optimizer.step(f, g)

    Source: Lanczos (1950), doi:10.6028/jres.045.026.
    """
    for name in methods:
        require_choice("methods", name, METHODS)
    require("bias", bias, is_number(bias) and 0 < bias < 1)
    require("max_seconds", max_seconds, is_number(max_seconds) and max_seconds > 0)
    began = time.perf_counter()
    groups = as_groups(upper_params, "upper"), as_groups(lower_params, "lower")
    x, y = ([t for g in level for t in map(unnamed, g["params"]) if t.requires_grad] for level in groups)
    f, g = as_objective(upper, "upper"), as_objective(lower, "lower")
    # Times and figures must not draw from what the run draws from.
    with numbers_kept(y[0].device), Buffers().kept():
        if tasks is not None:
            f, g = _of_one_task(f, g, tasks)
        problem = _Measured(x, y, f, g, began + max_seconds, bias)
        rows = {name: problem.row(name) for name in methods}
    return Suggestion(
        rows=rows,
        largest=problem.spectrum.largest,
        smallest=problem.spectrum.smallest,
        uncertainty=problem.spectrum.uncertainty,
        lower_noise=problem.lower_noise,
        upper_noise=problem.upper_noise,
        second_derivatives=problem.why_differences,
        vectorized=problem.why_looped,
        seconds=problem.seconds,
        mebibytes=problem.mebibytes,
        notes=problem.notes(),
        took=time.perf_counter() - began,
        _parameters=groups,
    )


def _short(value: Any) -> str:
    if isinstance(value, partial):
        options = ", ".join(f"{name}={_short(option)}" for name, option in value.keywords.items())
        return f"partial({value.func.__name__}, {options})"
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def _of_one_task(f: Objective, g: Objective, sampler: Any) -> tuple[Objective, Objective]:
    """The losses on all the data of one task."""
    task = sample(sampler, 1, torch.Generator().manual_seed(0))
    data = {level: select(draw(sampler, level, task, 1, None, None), 0) for level in ("upper", "lower")}
    return Objective(f.loss, [data["upper"]], features=f.features), Objective(
        g.loss, [data["lower"]], features=g.features
    )


def _descent(rate: float, momentum: float, steps: int) -> Polynomial:
    """What is left of an error after lower steps, as a function of the curvature."""

    def left(curvature: Tensor) -> Tensor:
        last = now = torch.ones_like(curvature)
        for k in range(steps):
            ahead = now + momentum * (now - last) if k else now
            last, now = now, ahead * (1 - rate * curvature)
        return now

    return left


def _inverse(curvature: Tensor) -> Tensor:
    return torch.where(curvature == 0, 0.0, 1 / curvature)


class _Measured:
    """The losses around a point, and what was measured there.

    Args:
        x, y: the live tensors.
        f, g: the losses.
        until: when there is no time for more.
        bias: the relative error to aim at.
    """

    def __init__(self, x: list[Tensor], y: list[Tensor], f: Objective, g: Objective, until: float, bias: float) -> None:
        self.oracle, self.until, self.bias = Oracle(x, y, f, g, session=Session(Options())), until, bias
        self.f, self.g = f.samples(BATCHES), g.samples(BATCHES)
        self.seconds: dict[str, float] = {}
        self.mebibytes: dict[str, float] = {}
        self.y = self._flat(self.oracle.y)
        each, self.seconds["lower"], self.mebibytes["lower"] = _timed(lambda: self._lower_each(self.y))
        self.slope = torch.stack(each).mean(0)
        self.lower_noise = _spread(each, self.slope)
        _, self.seconds["upper"], self.mebibytes["upper"] = _timed(lambda: self.oracle.upper(self.f[0]))
        for name in self.seconds:
            self.seconds[name] /= len(self.g) if name == "lower" else 1
        self.why_differences = self._try_second_derivatives()
        self.why_looped = self._try_vmap()
        _, _, kept = _timed(self._one_product)
        with self._products(self.y) as product:
            _, seconds, more = _timed(lambda: product(self.slope)[1])
            self.seconds["product"], self.mebibytes["product"] = seconds / len(self.g), kept + more
            self.spectrum = Spectrum(lambda v: product(v)[1], self.y, self._goes_on)

    @property
    def convex(self) -> bool:
        """Whether the smallest curvature is above rounding."""
        spectrum = self.spectrum
        return spectrum.smallest > 100 * torch.finfo(self.y.dtype).eps * spectrum.largest

    # ------------------------------------------------------------------------------------------------ evaluations

    def _goes_on(self) -> bool:
        return time.perf_counter() < self.until

    def _flat(self, vector: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in vector])

    def _like(self, flat: Tensor, like: Sequence[Tensor]) -> Vector:
        parts = torch.split(flat, [t.numel() for t in like])
        return Vector(part.reshape(t.shape).to(t) for part, t in zip(parts, like, strict=True))

    def _at(self, y: Tensor) -> Oracle:
        return self.oracle.at(lower=self._like(y, self.oracle.y))

    def _lower_each(self, y: Tensor) -> list[Tensor]:
        return [self._flat(self._at(y).lower(sample)[1]) for sample in self.g]

    def _lower(self, y: Tensor) -> Tensor:
        return torch.stack(self._lower_each(y)).mean(0)

    def _upper_each(self, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Gradients of f in x and in y, on each batch."""
        found = (self._at(y).upper(sample) for sample in self.f)
        return [(self._flat(in_x), self._flat(in_y)) for _, in_x, in_y in found]

    def _upper(self, y: Tensor) -> tuple[Tensor, Tensor]:
        in_x, in_y = zip(*self._upper_each(y), strict=True)
        return torch.stack(in_x).mean(0), torch.stack(in_y).mean(0)

    def _lower_in_x(self, y: Tensor) -> Tensor:
        return torch.stack([self._flat(self._at(y).lower_jointly(sample)[1]) for sample in self.g]).mean(0)

    @contextmanager
    def _products(self, y: Tensor) -> Generator[Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Products with the cross derivative and with the Hessian of g, on the mean of the batches."""
        with ExitStack() as stack:
            systems = [stack.enter_context(self._at(y).lower_system(sample)) for sample in self.g]

            def product(v: Tensor) -> tuple[Tensor, Tensor]:
                both = [system.both(self._like(v, self.oracle.y)) for system in systems]
                cross, hvp = zip(*both, strict=True)
                return torch.stack([*map(self._flat, cross)]).mean(0), torch.stack([*map(self._flat, hvp)]).mean(0)

            yield product

    def _one_product(self) -> None:
        with self._products(self.y) as product:
            product(self.slope)

    def _try_second_derivatives(self) -> str:
        """Why differences of gradients are used instead, if they are: a product fails, or is not what they are."""
        v = torch.randn(self.y.numel(), generator=torch.Generator().manual_seed(1), device="cpu").to(self.y)
        step = torch.finfo(self.y.dtype).eps ** (1 / 3) * (1 + float(self.y.norm())) / float(v.norm())
        along = (self._lower(self.y + step * v) - self._lower(self.y - step * v)) / (2 * step)
        try:
            with self._products(self.y) as product:
                found = product(v)[1]
            if float((found - along).norm()) <= 0.5 * float(along.norm()):
                return ""
            why = "products with the Hessian differ from differences of gradients"
        except (RuntimeError, NotImplementedError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        self.oracle.session = Session(Options(hvp="finite-difference"))
        return f"{why} (hvp='finite-difference' is used)"

    def _try_vmap(self) -> str:
        copies, (xi, zeta) = stack([self.oracle.y] * 2), (self.f[0], self.g[0])
        evaluate_copies(self.oracle, copies, [0.01, 0.02], [1.0, 1.0], xi, zeta, wrt="lower")
        return self.oracle.session.found.fallback or ""

    # ------------------------------------------------------------------------------------------------ the problem

    @cached_property
    def solution(self) -> Tensor:
        """Y*, by Newton steps from y."""
        y, slope = self.y, self.slope
        for _ in range(6):
            y = y - self.spectrum.applied(_inverse, slope)
            slope = self._lower(y)
            if float(slope.norm()) <= 1e-6 * float(self.slope.norm()):
                break
        return y

    @cached_property
    def truth(self) -> Tensor:
        """The hypergradient at the solution."""
        return self._implicit(self.solution, lambda slope: self.spectrum.applied(_inverse, slope))

    @cached_property
    def adjoint(self) -> Tensor:
        """What f pulls y along at the solution: the inverse Hessian of g times the gradient of f."""
        return self.spectrum.applied(_inverse, self._upper(self.solution)[1])

    @cached_property
    def upper_noise(self) -> float:
        """Standard deviation of f's gradients over batches, at the solution."""
        each = [torch.cat(pair) for pair in self._upper_each(self.solution if self.convex else self.y)]
        return _spread(each, torch.stack(each).mean(0))

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the hypergradient over batches of both losses at the solution, over its norm."""
        if not self.convex or len(self.f) == len(self.g) == 1:
            return 0.0
        direct = [in_x for in_x, _ in self._upper_each(self.solution)]
        cross = []
        for batch in self.g:
            with self._at(self.solution).lower_system(batch) as system:
                cross.append(self._flat(system.cross(self._like(self.adjoint, self.oracle.y))))
        parts = [_spread(each, self.truth) for each in (direct, cross)]
        return math.hypot(*parts)

    def _implicit(self, y: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        in_x, in_y = self._upper(y)
        v = solve(in_y)
        with self._products(y) as product:
            return in_x - product(v)[0]

    def _error(self, found: Tensor) -> float:
        norm = float(self.truth.norm())
        return float((found - self.truth).norm()) / norm if norm > 0 else 0.0

    def _after(self, left: Polynomial) -> Tensor:
        """Y after the lower steps of which so much of the error is left."""
        return self.solution + self.spectrum.applied(left, self.y - self.solution)

    def _unrolled(self, left: Polynomial) -> Tensor:
        """The derivative through the steps."""
        solve = partial(self.spectrum.applied, lambda c: (1 - left(c)) * _inverse(c))
        return self._implicit(self._after(left), solve)

    def _noisy(self, rate: float, momentum: float) -> float:
        """What the noise of the lower steps adds to the hypergradient, over its norm; after many steps."""
        if len(self.g) == 1:
            return 0.0
        each = self._lower_each(self.solution)
        mean = torch.stack(each).mean(0)

        def settled(c: Tensor) -> Tensor:  # standard deviation for noise of one, of descent; more with momentum
            return (rate / (c * (2 - rate * c).clamp_min(1e-3) * (1 - momentum))).sqrt()

        found = [
            self._error(
                self._implicit(
                    self.solution + self.spectrum.applied(settled, one - mean), partial(self.spectrum.applied, _inverse)
                )
            )
            for one in each[:3]
        ]
        return math.sqrt(sum(e * e for e in found) / len(found)) * math.sqrt(len(each) / (len(each) - 1))

    # ------------------------------------------------------------------------------------------------ settings

    @cached_property
    def lower(self) -> tuple[float, float]:
        """Learning rate and momentum of the lower steps."""
        rate = 1 / max(abs(self.spectrum.largest), abs(self.spectrum.smallest), torch.finfo(self.y.dtype).tiny)
        if not self.convex:
            return rate, 0.0
        condition = self.spectrum.largest / self.spectrum.smallest
        if len(self.g) == 1:
            root = math.sqrt(condition)
            return rate, (root - 1) / (root + 1) if condition > ACCELERATED else 0.0
        allowed = max(self.bias, self.noise / 2)
        for part in (1.0, 0.3, 0.1, 0.03):
            if self._noisy(part * rate, 0.0) <= allowed or not self._goes_on():
                break
        return part * rate, 0.0

    def _fewest(
        self, choices: Sequence[int], error: Callable[[int], float], allowed: float, enough: Callable[[int], bool]
    ) -> tuple[int, float]:
        """The least of these numbers whose error is allowed, or the last; and its error.

        Without any time left it is the least that is ``enough`` by the spectrum alone.
        """
        if not self._goes_on():
            choice = next(filter(enough, choices), choices[-1])
            return choice, error(choice)
        low, high, found = 0, len(choices) - 1, dict[int, float]()
        while low < high and self._goes_on():
            middle = (low + high) // 2
            found[middle] = error(choices[middle])
            low, high = (low, middle) if found[middle] <= allowed else (middle + 1, high)
        return choices[high], found[high] if high in found else error(choices[high])

    def _learning_rate(self, normalized: bool) -> float:
        """The step along the hypergradient that changes f by `PART` of it, to first order."""
        y = self.solution if self.convex else self.y
        loss = abs(sum(float(self._at(y).upper(one)[0]) for one in self.f) / len(self.f))
        norm = float((self.truth if self.convex else self._upper(y)[0]).norm())
        return PART * loss / max(norm if normalized else norm**2, 1e-30) or PART

    def row(self, name: str) -> Row:
        """The settings of a method."""
        momentum = self.lower[1] if name in ("AID", "F2SA") else 0.0
        rate = self.lower[0]
        settings: dict[str, Any] = {"lr": self._learning_rate(name == "F2SA"), "lower_lr": rate}
        if momentum:
            settings["lower_optimizer"] = partial(AGD, momentum=momentum)
        if self.why_differences and name != "F2SA":
            settings["hvp"] = "finite-difference"
        if not self.convex:
            return self._not_convex(name, settings)

        def after(steps: int) -> float:
            return self._error(self._unrolled(_descent(rate, momentum, steps)))

        if name == "AID":
            return self._implicit_row(settings, momentum)
        if name == "F2SA":
            return self._penalty_row(settings, momentum)
        if name == "SOBA":
            return self._single_loop_row(settings)
        steps, error = self._fewest(STEPS, after, self.bias, partial(self._converges, rate, momentum))
        slow = ", all that are suggested" if error > self.bias else f" for a bias of {self.bias:.1%}"
        settings["lower_steps"] = steps
        why = f"{steps} lower steps{slow}"
        seconds, graph = self._seconds(upper=1, product=2 * steps), self.mebibytes["product"] * steps
        return Row(settings, seconds, graph, error, self._total_noise(), why)

    def _single_loop_row(self, settings: dict[str, Any]) -> Row:
        """The steps at one x, taken on all batches: v follows an y that moves, which no polynomial of H tells."""
        rate, steps, error = settings["lower_lr"], 0, math.inf
        y, v = self.y, rate * self._upper(self.y)[1]
        while error > self.bias and steps < MOST_STEPS and self._goes_on():
            in_x, in_y = self._upper(y)
            with self._products(y) as product:
                cross, image = product(v)
            error, steps = self._error(in_x - cross), steps + 1
            y, v = y - rate * self._lower(y), v - rate * (image - in_y)
        late = ", all that were tried" if error > self.bias else f" for a bias of {self.bias:.1%}"
        graph = self.mebibytes["product"] + self.mebibytes["upper"]
        seconds, why = self._seconds(upper=1, product=1), f"settles in {steps} steps{late}"
        known = error if math.isfinite(error) else None
        return Row(settings, seconds, graph, known, self._total_noise(), why, max(steps, 1))

    def _penalty_row(self, settings: dict[str, Any], momentum: float) -> Row:
        rate = settings["lower_lr"]
        nu, truncated = self._penalty()
        after = self._copies_after(nu)
        converges = partial(self._converges, rate, momentum)
        steps, error = self._fewest(STEPS, lambda n: after(_descent(rate, momentum, n)), self.bias, converges)
        ended = not self._goes_on()  # a part of the Krylov spaces, whose errors are divided by nu
        settings |= {"lower_steps": steps, "order": 2, "nu": nu}
        why = f"{steps} lower steps" + (
            ", all that are suggested" if error > self.bias else f" for a bias of {self.bias:.1%}"
        )
        why += f", nu for an error of {truncated:.1%} of the difference"
        seconds = self._seconds(upper=2 * (steps + 1), lower=2 * (steps + 1))
        graph = 2 * (self.mebibytes["upper"] + self.mebibytes["lower"])
        return Row(settings, seconds, graph, None if ended else error, self._total_noise(), why)

    def _implicit_row(self, settings: dict[str, Any], momentum: float) -> Row:
        rate = settings["lower_lr"]

        def solved(steps: int, products: int) -> float:
            y = self._after(_descent(rate, momentum, steps))

            def solve(b: Tensor) -> Tensor:
                return self._conjugate(y, b, products)

            exact = partial(self.spectrum.applied, _inverse)
            return self._error(self._implicit(y, solve if products else exact))

        converges = partial(self._converges, rate, momentum)
        steps, error = self._fewest(STEPS, lambda n: solved(n, 0), self.bias / 2, converges)
        products, error = self._fewest(
            PRODUCTS, lambda n: solved(steps, n), max(self.bias, 1.1 * error), self._conjugate_converges
        )
        settings |= {"lower_steps": steps, "linear_steps": products}
        why = f"{steps} lower steps and {products} products" + (
            ", all that are suggested" if error > self.bias else f" for a bias of {self.bias:.1%}"
        )
        seconds = self._seconds(upper=1, lower=steps + 1, product=products + 1)
        return Row(settings, seconds, self.mebibytes["product"], error, self._total_noise(), why)

    def _converges(self, rate: float, momentum: float, steps: int) -> bool:
        """Whether so many lower steps leave less than the bias of any error."""
        return float(_descent(rate, momentum, steps)(self.spectrum.values).abs().max()) <= self.bias / 2

    def _conjugate_converges(self, products: int) -> bool:
        root = math.sqrt(self.spectrum.largest / self.spectrum.smallest)
        return 2 * ((root - 1) / (root + 1)) ** products <= self.bias / 2

    def _conjugate(self, y: Tensor, b: Tensor, steps: int) -> Tensor:
        """Conjugate gradients from zero."""
        v, r = torch.zeros_like(b), b
        p, square = r, r.dot(r)
        with self._products(y) as product:
            for _ in range(steps):
                image = product(p)[1]
                along = p.dot(image)
                if float(along) <= 0 or float(square) == 0:
                    break
                v, r = v + square / along * p, r - square / along * image
                square, before = r.dot(r), square
                p = r + square / before * p
        return v

    def _penalty(self) -> tuple[float, float]:
        """Nu of the central difference, and its error: measured with copies that are solved."""
        v = self.adjoint
        if float(v.norm()) == 0:
            return 1e-2, 0.0
        size = float(self.solution.norm()) + float((self.solution - self.y).norm())
        nu = 0.3 * max(size, 1e-6) / max(float(v.norm()), 1e-30)  # copies that are so far apart, to begin with
        rounding = torch.finfo(self.y.dtype).eps ** 0.5
        best = nu, math.inf
        for _ in range(12):
            error = self._error(self._difference(nu, self._ends(nu)))
            best = min(best, (nu, error), key=lambda one: one[1])
            if error <= self.bias / 20 or nu * float(v.norm()) < rounding * size or not self._goes_on():
                break
            nu /= 3 if not error < 10 * self.bias else max(math.sqrt(25 * error / self.bias), 1.3)
        return best

    def _ends(self, nu: float) -> list[Tensor]:
        """Solutions of the copies' problems, g + nu f and g - nu f."""
        ends = []
        for sign in (1.0, -1.0):
            y = self.solution - sign * nu * self.adjoint
            for _ in range(4):  # Newton steps with the Hessian of g alone
                y = y - self.spectrum.applied(_inverse, self._lower(y) + sign * nu * self._upper(y)[1])
            ends.append(y)
        return ends

    def _difference(self, nu: float, copies: Sequence[Tensor]) -> Tensor:
        """The estimate from two copies."""
        plus, minus = (
            self._lower_in_x(y) + sign * nu * self._upper(y)[0] for sign, y in zip((1.0, -1.0), copies, strict=True)
        )
        estimate: Tensor = (plus - minus) / (2 * nu)
        return estimate

    def _copies_after(self, nu: float) -> Callable[[Polynomial], float]:
        r"""The error of the estimate from copies of which lower steps have left so much.

        With H and F the Hessians of g and f, the copy of node j gets to
        :math:`y_j + \varphi_T(H + j \nu F)(y - y_j)`, where :math:`y_j` solves its problem. What is left of the two
        differs by as much as their solutions do, in proportion to nu, so H alone would not do.
        """
        step = torch.finfo(self.y.dtype).eps ** (1 / 3) * (1 + float(self.y.norm()))
        ends, runs = self._ends(nu), []
        with self._products(self.y) as product:
            for sign, end in zip((1.0, -1.0), ends, strict=True):

                def perturbed(v: Tensor, sign: float = sign) -> Tensor:  # v has the norm 1
                    along = self._upper(self.y + step * v)[1] - self._upper(self.y - step * v)[1]
                    change: Tensor = sign * nu * along / (2 * step)
                    return product(v)[1] + change

                far = self.y - end
                runs.append(lanczos(perturbed, far, MOST_PRODUCTS, self._goes_on) if float(far.norm()) > 0 else None)

        def error(left: Polynomial) -> float:
            copies = []
            for end, run in zip(ends, runs, strict=True):
                values, vectors = run[:2] if run else (torch.ones(1), torch.zeros_like(end)[:, None])
                copies.append(end + vectors @ (left(values).to(end) * (vectors.mT @ (self.y - end))))
            return self._error(self._difference(nu, copies))

        return error

    def _not_convex(self, name: str, settings: dict[str, Any]) -> Row:
        """Settings that make sense without a solution of the lower problem; what they lead to is not known."""
        shift, steps = 2 * abs(self.spectrum.smallest), 20
        own: dict[str, dict[str, Any]] = {
            "AID": {"lower_steps": steps, "linear_steps": 10, "damping": shift},
            "ITD": {"lower_steps": steps},
            "F2SA": {"lower_steps": steps, "order": 1, "nu": 1e-2},
            "SOBA": {},
        }
        counts: dict[str, Mapping[str, int]] = {
            "AID": {"upper": 1, "lower": steps + 1, "product": 11},
            "ITD": {"upper": 1, "product": 2 * steps},
            "F2SA": {"upper": steps + 1, "lower": 2 * (steps + 1)},
            "SOBA": {"upper": 1, "product": 1},
        }
        graph = self.mebibytes["product"] * (steps if name == "ITD" else 1)
        why = "g is not convex here, so that only the step size is measured"
        return Row(settings | own[name], self._seconds(**counts[name]), graph, None, 0.0, why)

    def _seconds(self, **counts: int) -> float:
        return sum(count * self.seconds[name] for name, count in counts.items())

    def _total_noise(self) -> float:
        return math.hypot(self.noise, self._noise_of_steps)

    @cached_property
    def _noise_of_steps(self) -> float:
        return self._noisy(*self.lower)

    def _bends(self) -> bool:
        """Whether the Hessian at the solution is another one, for what f asks of it."""
        with self._products(self.solution) as product:
            slope = product(self.adjoint)[1] - self._upper(self.solution)[1]
        return float(slope.norm()) > self.bias * float(self._upper(self.solution)[1].norm())

    def notes(self) -> list[str]:
        """What stands in the way, and what helps."""
        found, spectrum = list[str](), self.spectrum
        if not self.convex:
            ridge = 2 * abs(spectrum.smallest) + 1e-3 * spectrum.largest
            found.append(
                f"g is not convex in y at this point (smallest curvature {spectrum.smallest:.3g}): first train y for "
                f"some steps and measure again; a ridge, {ridge:.2g} / 2 times the square of y in g, makes it convex "
                "here; AID solves with damping or MINRES, F2SA stays with order=1, and lower_optimizer=Adam "
                "trains what plain descent does not"
            )
        elif (condition := spectrum.largest / spectrum.smallest) > 1e4:
            found.append(
                f"g is badly conditioned ({condition:.1g}): plain lower steps need about as many; a ridge in g, "
                "lower_optimizer=AGD (momentum) or Adam, and normalised inputs help; without them the hypergradient is "
                "that of a lower solve which stops early"
            )
        if self.convex and float(self._lower(self.solution).norm()) > 1e-3 * float(self.slope.norm()):
            found.append("Newton steps did not find the solution of the lower problem: the biases are rough")
        elif self.convex and self._bends():
            found.append(
                "the curvature of g changes between y and the solution of the lower problem: the biases are rough; "
                "train y for some steps and measure again"
            )
        if self.noise > 1:
            found.append(
                f"the noise of a batch is {self.noise:.1f} times the hypergradient: larger batches, or "
                f"Objective(..., accumulate={math.ceil(self.noise**2)})"
            )
        if not self._goes_on():
            found.append("max_seconds ended some measurements early")
        return found


def _spread(each: Sequence[Tensor], mean: Tensor) -> float:
    """Standard deviation of vectors, over the norm of a mean."""
    if len(each) < 2:
        return 0.0
    size = float(mean.norm())
    deviation = float(torch.stack(list(each)).var(0).sum().sqrt())
    return deviation / size if size > 0 else math.inf


def _timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a function returns, the seconds of the faster of two calls, and MiB that its graphs keep."""
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        function()
    seconds = []
    for _ in range(2):
        _finished()
        began = time.perf_counter()
        result = function()
        _finished()
        seconds.append(time.perf_counter() - began)
    return result, min(seconds), sum(kept.values()) / 2**20


def _finished() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

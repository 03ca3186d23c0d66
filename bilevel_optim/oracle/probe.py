r"""Check of the derivatives that a step has used, against differences along one random direction.

Torch returns wrong second derivatives of some operations without an error, and of a few even a wrong gradient. With a
loss :math:`g`, a random unit vector :math:`v` and a step :math:`\epsilon`,

.. math::
    \nabla g^\top v \approx \frac{g(y + \epsilon v) - g(y - \epsilon v)}{2\epsilon}, \qquad
    \nabla^2 g\, v \approx \frac{\nabla g(y + \epsilon v) - \nabla g(y - \epsilon v)}{2\epsilon}.

Tensors whose derivatives are much smaller than those of others are compared alone too. If the two disagree, in all or
in one tensor of y, a second difference, with a fourth of the step, shows how accurate differences are here. A
derivative is wrong only if it is off by many times that, along three directions; kinks, noise and low precision leave
it open.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DerivativeError, require_uninterrupted
from ..problem.objective import Sample
from ..problem.random import default_state, numbers_kept, preserve_rng
from ..problem.tasks import select
from ..problem.vector import Vector, as_variable, stack
from .copies import Copies
from .differentiable import (
    JUMPING,
    KINKED,
    UNCHUNKED,
    OtherForms,
    custom_operations,
    has,
    has_casts,
    padding_rows,
    products_of,
    working_unit,
)
from .lanes import LaneLoss, stacked
from .oracle import Oracle, local_problem
from .point import afresh
from .session import Session
from .substitution import Substitution

__all__ = [
    "CLEAR_OF_KINKS", "EACH_TIME", "FIRST", "JOINT", "LOOK", "SECOND", "SEEDS", "SHIFT", "Judgement",
    "check_derivatives", "compare", "direction", "require_right",
]  # fmt: skip

# Derivatives of the losses that methods of each kind take: the loss and the variables.
FIRST = frozenset({"upper x", "upper y", "lower y"})
JOINT = FIRST | {"lower x"}
SECOND = FIRST | {"lower yy", "lower xy"}

COARSE = 1e-4  # rounding unit of types that are too coarse for differences
SMALLER = 0.25  # factor of the second step
CLEAR = 30.0  # a derivative is wrong if it is off by so many times the error of the differences
CLEAR_OF_HIDDEN = 100.0  # the same for a loss with operations of unknown contents, which may have kinks
CLEAR_OF_KINKS = 1000.0  # the same for a loss with kinks; of n kinks crossed, the two differences share about sqrt(n)
LANE_ROUNDING = 1e4  # rounding units that evaluations under vmap may differ by
ROUNDED = 1e3  # the same for two evaluations at one point, whose order of summation may differ
SEEDS = (1, 2, 3)
OTHER = 4  # added to the seeds for x, so that x and y of one shape do not move together
HIDDEN = 1e-2  # ratio of derivatives below which one does not show in the sum of both
MOST_GROUPS = 3  # most groups of such smaller ones
SHIFT = 0.03  # relative distance from the point of the step at which derivatives are compared

NAMES = {
    "x": "{}'s gradient in x, compared with differences of values,",
    "y": "{}'s gradient in y, compared with differences of values,",
    "yy": "{}'s second derivative in y, compared with differences of gradients,",
    "xy": "{}'s second derivative in x and y, compared with differences of gradients,",
    "lanes": "{}'s evaluation under torch.func.vmap, compared with a plain one,",
}


EACH_TIME = "it returns another value"
LOOK = "look in it for .detach(), .item(), .data, torch.no_grad() and custom backwards"
REWRITE = f"Write the loss with other operations of torch (plain Python instead of control flow operators), and {LOOK}"


class Judgement(NamedTuple):
    """Outcome of a comparison: ``"right"``, ``"wrong"`` or ``"unknown"``, and the relative error."""

    outcome: str
    error: float


def compare(
    claimed: Vector,
    difference: Callable[[float], Vector],
    *,
    size: float,
    noise: float,
    tolerance: float,
    clear: float = CLEAR,
) -> Judgement:
    """Compare a derivative along a direction with differences.

    Args:
        claimed: the derivative.
        difference: returns a central difference, for a factor of the usual step.
        size: typical size of derivatives here, to which errors are relative if it is larger than the derivative.
        noise: rounding error of a difference with the usual step.
        tolerance: relative error that does not matter.
        clear: a derivative is wrong if it is off by so many times the error of the differences.
    """
    usual = difference(1.0)
    scale = max(float(claimed.norm()), float(usual.norm()), size)
    error = float((claimed - usual).norm())
    if not math.isfinite(scale + error):
        return Judgement("unknown", math.nan)
    floor = clear * noise / SMALLER
    parts = [
        (float((a - b).norm()), max(float(a.norm()), float(b.norm())), i)
        for i, (a, b) in enumerate(zip(claimed, usual, strict=True))
    ]
    parts = [part for part in parts if part[0] > max(floor, tolerance * part[1])]
    if error <= tolerance * scale and not parts:
        return Judgement("right", error / scale if scale else 0.0)
    smaller = difference(SMALLER)
    error = min(error, float((claimed - smaller).norm()))  # the benefit of the doubt
    own = max(float((usual - smaller).norm()), noise / SMALLER)
    if not math.isfinite(error + own):
        return Judgement("unknown", math.nan)
    if error <= tolerance * scale:  # but one of several tensors, with small derivatives, may be wrong
        for apart, own_scale, i in parts:
            apart = min(apart, float((claimed[i] - smaller[i]).norm()))
            if apart > max(clear * own, tolerance * own_scale):
                return Judgement("wrong", apart / own_scale)
        return Judgement("right", error / scale)
    return Judgement("wrong" if error > clear * own else "unknown", error / scale)


def check_derivatives(session: Session, concerns: frozenset[str]) -> str:
    """Raise `DerivativeError` if a derivative is wrong at the noted evaluations; return open questions.

    The losses are evaluated with the random numbers of the noted samples. Nothing is counted, and random states and
    module buffers are as before.

    Args:
        session: the session of a step; ``session.used`` has a point and a sample for each loss.
        concerns: the derivatives that the method takes.
    """
    used, session.used = session.used or {}, None
    opened: list[str] = []
    for level in ("lower", "upper"):
        if level not in used:
            continue
        oracle, sample = used[level]
        called = session.called(level)
        if oracle.sharded:
            opened.append(f"{called} not checked: its parameters are sharded")
            continue
        other = used.get("upper") if level == "lower" and "lower x" in concerns else None
        with numbers_kept(oracle.device):
            mover = None if other is None else _LossCheck("upper", *other, session)
            opened += _LossCheck(level, oracle, sample, session, mover).open(concerns)
    return "; ".join(opened)


def require_right(oracle: Oracle, concerns: frozenset[str]) -> None:
    """Raise `DerivativeError` if a derivative of the lower loss is wrong at the oracle's point.

    For a loss that no method minimises. Random states are as before.
    """
    with numbers_kept(oracle.device):
        _LossCheck("lower", oracle, oracle.g.draw(), oracle.session, alone=True).open(concerns)


class _LossCheck:
    """The derivatives of one loss at one point, on one sample.

    Args:
        level: ``"upper"`` or ``"lower"``.
        oracle: the point.
        sample: the sample; of several parts, the first.
        session: the session of the step.
        mover: the same for f, if the method evaluates g at y that f has moved, and not only its derivatives at y.
        alone: True if no method uses the loss, so that no option of one can help.
    """

    def __init__(
        self,
        level: str,
        oracle: Oracle,
        sample: Sample,
        session: Session,
        mover: _LossCheck | None = None,
        alone: bool = False,
    ) -> None:
        self.level, self.session, self.called, self.mover = level, session, session.called(level), mover
        self.alone = alone
        self.oracle = _apart(oracle, session)
        one = sample if sample.parts is None else sample.parts[0]
        self.sample, self.of_tasks = copy.copy(one), isinstance(one.loss, LaneLoss)
        self.sample.once = False
        self.x, self.y = self.oracle.x, self.oracle.y

    def open(self, concerns: frozenset[str]) -> list[str]:
        """Raise if a derivative is wrong; return what could not be decided, with the reason."""
        if not any(which.startswith(self.level) for which in concerns):
            return []
        unit = working_unit((*self.x, *self.y))
        if unit > COARSE:
            return [f"{self.called} not checked: the precision is too low for differences"]
        try:
            self._place()
            if self.casts:
                return [f"{self.called} not checked: it changes values to a type of less precision"]
            self.unit = working_unit((*self.x, *self.y), self.products)
            self.tolerance = 1e-3 if self.unit < 1e-12 else 1e-2
            if self.unit > COARSE:
                return [f"{self.called} not checked: the precision is too low for differences (TF32)"]
            found = self._compared(concerns, SEEDS[0])
            wrong = {which for which, one in found.items() if one.outcome == "wrong"}
            for seed in (SEEDS[1:2] if self.operations else SEEDS[1:]) if wrong else ():
                again = self._compared(concerns, seed)
                wrong &= {which for which, one in again.items() if one.outcome == "wrong"}
            doubtful = wrong or any(one.outcome == "unknown" for one in found.values())
            if doubtful and (apart := abs((value := self._value()) - self._value())):
                how = EACH_TIME if apart > ROUNDED * self.unit * abs(value) else "its value is rounded differently"
                return [f"{self.called} not checked: {how} each time"]
        except Exception as error:
            require_uninterrupted(error)
            return [f"{self.called} not checked: {type(error).__name__}: {str(error).strip()}".splitlines()[0]]
        if wrong:
            which = min(wrong, key=ORDER.index)
            raise self._error(which, found[which].error)
        opened = [which for which, one in found.items() if one.outcome != "right"]
        return [f"{NAMES[which].format(self.called)} not decided: {self._why(which)}" for which in opened]

    # ------------------------------------------------------------------------------------------------ evaluations

    def _place(self) -> None:
        """Move the point a little, as faults may not show where a gradient is zero; not to undefined values."""
        here = self.start = self.oracle
        x, y = (t + direction(t, k) * (SHIFT * max(1.0, float(t.norm()))) for t, k in ((here.x, OTHER), (here.y, 0)))
        try:
            self._look(here.at(x, y))
        except Exception as error:  # a loss may be undefined there in any way; at the point of the step it has run
            require_uninterrupted(error)
            self.value = math.nan
        if not math.isfinite(self.value):
            self._look(here)
        self._hold_padding(here)

    def _look(self, oracle: Oracle) -> None:
        """Evaluate at this point; note facts about the graph of the loss, and whether it draws random numbers."""
        self.oracle, self.x, self.y = oracle, oracle.x, oracle.y
        before = default_state(oracle.device)
        with oracle.evaluating() as (x, y):
            loss = oracle.value(self.level, afresh(self.sample))
            self.padding = self._padding_of_tasks(x) if self.of_tasks else padding_rows(loss, (*x, *y))
        self.value = float(loss.detach())
        self.draws = not all(map(torch.equal, before, default_state(oracle.device)))
        self.products, self.operations = products_of(loss), custom_operations(loss)
        self.casts = has_casts(loss, working_unit((*self.x, *self.y)))
        self.kinks = has(loss, KINKED + JUMPING)
        self.clear = CLEAR_OF_KINKS if self.kinks else CLEAR_OF_HIDDEN if self.operations else CLEAR

    def _padding_of_tasks(self, x: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Return the padding rows that the first task's loss holds constant, which stacks of tasks do not show."""
        loss, batch = self.sample.loss, select(self.sample.arguments[0], 0)
        assert isinstance(loss, LaneLoss)
        values = [as_variable(t[0].clone()) for t in loss.leaves]
        with preserve_rng(self.oracle.device), torch.enable_grad():
            if self.sample.features is not None:
                features: Any = self.sample.features.loss
                batch = features.features(batch)
            with Substitution(loss.live, values, stacked=False):
                value = loss.loss(batch)
        return padding_rows(value, values if len(values) > len(self.y) else (*x, *values))

    def _hold_padding(self, here: Oracle) -> None:
        """Leave padding rows out of all directions: their gradient is masked, and so is their second derivative.

        A row of y that another term of the lower loss moves is no constant of the lower problem, and stays in. So does
        one that f moves, where differences over such moves take the place of products.
        """
        self.held, split = self.padding, len(here.x)
        if self.level == "lower" and any(i >= split for i, _ in self.padding):
            moves = [here.lower(self.sample)[1]]
            if self.mover is not None:
                moves.append(self.mover.oracle.upper(self.mover.sample)[2])
            self.held = [
                (i, row)
                for i, row in self.held
                if i < split or not any(gradient[i - split][..., row, :].any() for gradient in moves)
            ]

    def _directions(self, seed: int) -> tuple[Vector, Vector]:
        """Return random directions in x and in y, without the rows that are held."""
        both = [*direction(self.x, seed + OTHER), *direction(self.y, seed)]
        for i, row in self.held:
            both[i][..., row, :] = 0
        return Vector(both[: len(self.x)]), Vector(both[len(self.x) :])

    def _value(self, x: Vector | None = None, y: Vector | None = None) -> float:
        point = self.oracle.at(x, y)
        with point.evaluating():
            return float(point.value(self.level, self.sample).detach().double())

    def _gradient(self, x: Vector, y: Vector) -> Vector:
        """Return the gradient of the lower loss in y."""
        return self.oracle.at(x, y).lower(self.sample)[1]

    # ------------------------------------------------------------------------------------------------ comparisons

    def _compared(self, concerns: frozenset[str], seed: int, copies: bool = False) -> dict[str, Judgement]:
        """Return the outcome for each derivative of this loss that matters, along directions of this seed.

        ``copies``: compare copies under vmap, even if the step has made none.
        """
        along_x, along_y = self._directions(seed)
        concerns = frozenset(which for which in concerns if which.startswith(self.level))
        found: dict[str, Judgement] = {}
        if concerns & {"lower yy", "lower xy"}:
            with self.oracle.lower_system(self.sample) as system:
                (cross, product), size = system.both(along_y), float(system.gradient.norm())

            def difference(e: float) -> Vector:
                above, below = (self._gradient(self.x, self.y + along_y * t) for t in (e, -e))
                return (above - below) * (0.5 / e)

            def slope(e: float, along: Vector) -> Vector:
                above, below = (self._gradient(self.x + along * t, self.y) for t in (e, -e))
                return _number(float(along_y.dot(above - below)) / (2 * e))

            if "lower yy" in concerns:
                found["yy"] = self._judged(product, difference, self.y, product, size, self.clear)
            if "lower xy" in concerns:  # along a direction in x, the gradient in y along one in y
                found["xy"] = self._judged_along(along_x, slope, self.x, cross, size, self.clear)
        vmapped = self._vmapped(copies)
        if concerns & JOINT or vmapped:
            _, in_x, in_y = self.oracle.upper(self.sample, self.level)
            for name, along, gradient in (("x", along_x, in_x), ("y", along_y, in_y)):
                if f"{self.level} {name}" in concerns:
                    found[name] = self._slope(name, along, gradient)
            if vmapped:
                found["lanes"] = self._lanes(in_x, in_y)
        return found

    def _slope(self, name: str, along: Vector, gradient: Vector) -> Judgement:
        """Compare a gradient with differences of values."""
        at = self.x if name == "x" else self.y

        def slope(e: float, own: Vector) -> Vector:
            above, below = (self._value(**{name: at + own * t}) for t in (e, -e))
            return _number((above - below) / (2 * e))

        return self._judged_along(along, slope, at, gradient, abs(self.value))

    def _judged_along(
        self,
        along: Vector,
        slope: Callable[[float, Vector], Vector],
        at: Vector,
        vector: Vector,
        size: float,
        clear: float = CLEAR,
    ) -> Judgement:
        """Compare a derivative along a direction with differences: of all tensors, then of those that hide in them."""

        def judged(own: Vector, size: float, entries: Vector, longer: float = 1.0) -> Judgement:
            claimed = _number(float(own.dot(vector)))
            return self._judged(claimed, lambda e: slope(e * longer, own), at, entries, size, clear)

        longer = self.unit ** (-1 / 6)  # because the values of a loss that cancels large numbers are not accurate
        found = judged(along, size, vector)
        if found.outcome == "wrong":
            return (
                found if judged(along, size, vector, longer).outcome == "wrong" else found._replace(outcome="unknown")
            )
        largest = max(size, float(vector.norm()) * float(at.norm()))  # of the numbers that are rounded
        for group in _groups(vector)[1 : MOST_GROUPS + 1]:
            own = Vector([t if i in group else torch.zeros_like(t) for i, t in enumerate(along)])
            entries = Vector(vector[i] for i in group)
            one = judged(own, largest, entries)
            if one.outcome == "wrong" == judged(own, largest, entries, longer).outcome:
                return one  # others are too small to be seen
        return found

    def _judged(
        self,
        claimed: Vector,
        difference: Callable[[float], Vector],
        at: Vector,
        vector: Vector,
        size: float,
        clear: float,
    ) -> Judgement:
        """Compare a derivative with differences over steps; ``vector`` has all entries, ``size`` is what differs."""
        step = self.unit ** (1 / 3) * max(1.0, float(at.norm()))
        return compare(
            claimed,
            lambda factor: difference(step * factor),
            size=float(vector.norm()) / math.sqrt(sum(t.numel() for t in vector)),
            noise=4 * self.unit * size / step,
            tolerance=self.tolerance,
            clear=clear,
        )

    def _vmapped(self, copies: bool) -> bool:
        """Return True if the step has evaluated copies or tasks under vmap, so that these are compared."""
        found = self.session.found
        if found.fallback is not None:
            return False
        if self.of_tasks:
            return f"{self.level} tasks" in found.vmapped and self.oracle.lanes != 1
        return copies or f"{self.level} copies" in found.vmapped

    def _lanes(self, in_x: Vector, in_y: Vector) -> Judgement:
        """Compare evaluations under vmap with plain ones."""
        if isinstance(self.sample.loss, LaneLoss):
            pairs = list(zip(*(self._first_tasks(self.sample.loss, way) for way in (True, False)), strict=True))
        else:
            other = self.y + direction(self.y, SEEDS[0]) * SHIFT
            points = Copies(self.oracle, stack([self.y, other]))
            (values,), of_y = points.lower_slopes((self.level, self.sample, [1.0, 1.0]))
            _, of_x = points.upper_slope((self.level, self.sample, [1.0, 0.0]))
            value = float(values[0])
            pairs = [(_number(value), _number(self._value())), (of_y.lane(0), in_y), (of_x, in_x)]
        scales = [max(float(a.norm()), float(b.norm())) for a, b in pairs]
        least = LANE_ROUNDING * self.unit * max(scales)
        error = max(
            [
                apart / scale
                for (a, b), scale in zip(pairs, scales, strict=True)
                if (apart := float((a - b).norm())) > least
            ],
            default=0.0,
        )
        if error <= self.tolerance:
            return Judgement("right", error)
        return Judgement("unknown" if self.draws or not math.isfinite(error) else "wrong", error)

    def _first_tasks(self, loss: LaneLoss, vectorize: bool) -> tuple[Vector, Vector, Vector]:
        """Return value and gradients of the sum of the first two tasks' losses, under vmap or one by one."""
        base = _apart(loss.oracle, self.session, vectorize=vectorize)
        x = None if len(loss.leaves) == len(self.y) else Vector(t[:2] for t in self.x)
        few = stacked(base, Vector(t[:2] for t in self.y), x=x, shared_rng=loss.shared_rng)
        batch = select(self.sample.arguments[0], slice(0, 2))
        objective = few.f if self.level == "upper" else few.g
        value, in_x, in_y = few.upper(objective.sample(batch), self.level)
        return Vector([value]), in_x, in_y

    # ------------------------------------------------------------------------------------------------ messages

    def _why(self, which: str) -> str:
        if which == "lanes":
            return "the loss draws random numbers, which differ under vmap"
        if self.kinks and which not in ("x", "y"):
            return "kinks (ReLU, max, abs) are within reach of the differences"
        return "rounding or kinks are within reach of the differences"

    def _error(self, which: str, error: float) -> DerivativeError:
        """Return the error about a wrong derivative, with remedies that are right when tried."""
        tried = self._remedies(which)
        otherwise = REWRITE if self.alone else f"No option of the optimizer helps. {REWRITE}"
        remedy = f"Tried here and found right: {', or '.join(tried)}" if tried else otherwise
        operations = self.operations + ["embedding, whose padding row is moved"] * (self.held != self.padding)
        return DerivativeError(NAMES[which].format(self.called), error, ", ".join(operations), remedy)

    def _remedies(self, which: str) -> list[str]:
        """Return what to do instead, of that which is right when tried."""
        found = []
        if any("linear_cross_entropy" in name for name in self.operations):
            with OtherForms(UNCHUNKED):
                if self._are_right(which):
                    found.append("F.linear_cross_entropy without options=")
        if self.held != self.padding:
            if self._without_padding()._are_right(which):
                found.append("a padding row of zeros (weight[padding_idx] = 0 under torch.no_grad())")
            if self.mover is not None and self._changed(self.start, mover=None)._are_right("y", "yy", "xy", "lanes"):
                found.append("exact products (AID with hvp='exact')")
        if which == "lanes" and self._are_right("x", "y"):
            found.append("vectorize=False")
        if which in ("yy", "xy") and not self.alone:
            differences = _apart(self.oracle, self.oracle.session, hvp="finite-difference")
            if not self.kinks and self._changed(self.start, oracle=differences)._are_right(*ORDER):
                found.append("hvp='finite-difference'")
            if not self.of_tasks and self._are_right("x", "y"):
                found.append("F2SA" if self._are_right("lanes", copies=True) else "F2SA with vectorize=False")
        return found

    def _are_right(self, *names: str, copies: bool = False) -> bool:
        """Return True if these derivatives are right; ``copies``: compare copies under vmap in any case."""
        found = self._compared(frozenset(f"{self.level} {name}" for name in names), SEEDS[0], copies)
        return all(found[name].outcome == "right" for name in names if name in found)

    def _changed(self, start: Oracle, **changes: Any) -> _LossCheck:
        """Return a check with other attributes; ``start`` is where it is seen which padding rows move."""
        other = copy.copy(self)
        vars(other).update(changes)
        other._hold_padding(start)
        return other

    def _without_padding(self) -> _LossCheck:
        """Return the same check where padding rows are zero, so that decay does not move them."""
        y, split = self.y.clone(), len(self.x)
        for i, row in self.padding:
            if i >= split:
                y[i - split][..., row, :] = 0
        there = self.oracle.at(self.x, y)
        return self._changed(there, oracle=there, y=y)


ORDER = ("y", "x", "lanes", "yy", "xy")  # a wrong gradient is the cause of wrong products


def _apart(oracle: Oracle, session: Session, *, hvp: str = "exact", **options: Any) -> Oracle:
    """Return an oracle at the same point with bookkeeping of its own, whose ranks do not wait for each other."""
    return local_problem(oracle, Session.after(session, replace(session.options, hvp=hvp, **options)))


def _groups(vector: Vector) -> list[list[int]]:
    """Return the places of tensors in groups of similar norms, the largest first."""
    norms, found = (
        torch.stack([t.norm().double().cpu() for t in vector]).tolist() if len(vector) else [],
        list[list[int]](),
    )
    for i in sorted(range(len(norms)), key=lambda i: -norms[i]):
        if not found or norms[i] < HIDDEN * norms[found[-1][0]]:
            found.append([])
        found[-1].append(i)
    return found


def direction(like: Sequence[Tensor], seed: int) -> Vector:
    """Return a random unit vector from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    normal = Vector(torch.randn(t.shape, generator=generator, dtype=t.dtype, device="cpu").to(t) for t in like)
    return normal * float(1 / normal.norm())


def _number(value: float) -> Vector:
    return Vector([torch.tensor([value], dtype=torch.float64, device="cpu")])

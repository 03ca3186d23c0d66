"""Lower solves: the update of any ``torch.optim`` optimizer as a pure function."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from ..oracle.session import Session
from ..problem.parameters import Rate, rates_of
from ..problem.vector import Later, Vector, is_sharded
from ..tracing import is_tracing, span
from .agd import AGD
from .functional import Memory, made_by, updated
from .limits import Limits, changes
from .linear import quotient

__all__ = [
    "GROWS",
    "LED_AWAY",
    "NOT_ELEMENTWISE",
    "NO_END",
    "LowerResult",
    "LowerRule",
    "LowerRules",
    "Memory",
    "is_known",
    "largest_rate",
    "needs_closure",
]

Factory = Callable[[Any], Optimizer]
Described = tuple[type[Optimizer], list[dict[str, Any]]]
Gradient = Callable[[Vector], tuple[Tensor | None, Vector]]  # y -> g (None if it is not needed), its gradient

# Optimizers that do not update each entry independently, and so would mix stacked copies.
NOT_ELEMENTWISE = tuple(
    getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name)
)
# Entries of our groups that are not options of the optimizer.
_OURS = frozenset(("params", "level", "param_names", "initial_lr", "auto_lr", "differentiable"))


GROWS = "growing lower gradient"  # the key of the alert
LED_AWAY = "lower steps led away"  # the key of a silent alert: such steps may be repeated
NO_END = "lower solve without an end"  # the key of an alert about several solves
GROWTH = 4.0  # of the norm of the gradient, in each half of the lower steps
LEAP = 1e3  # how much further gradient steps may go than steps along gradients like the first
LEAPING = (
    "the lower steps went more than a thousand times further than their first gradient explains: the lower loss is "
    "much steeper on the way than where they began, so y is most likely far from any solution. Start y elsewhere, or "
    "use a smaller lower_lr, or lower_clip"
)
GROWING = (
    "the gradient of the lower loss grows over the lower steps (see diagnostics['lower_growth']), so y goes away "
    "from a solution and the hypergradient is not reliable. Use a smaller lower_lr, another lower_optimizer, or "
    "lower_clip"
)


NUMBER = (
    "{0} of the lower steps depends on upper parameters, but {1} cannot be differentiated in it: use torch.optim.SGD, "
    "all of whose options can be, or learn only lr or weight_decay (which must not be 0) with another optimizer"
)


class LowerResult(NamedTuple):
    """Result of lower steps.

    Attributes:
        y: the new values.
        memory: the optimizer's state.
        gradient: the last gradient, before it was clipped; None without steps.
        projected: whether the projection moved the last y, a boolean scalar; None without a projection.
        early: norms of the gradients at the first and at the middle step of at least three, for stacked copies one
            each; None if there were fewer steps.
        mapping: with a projection, the residual in place of the gradient, if the norm was asked for: the displacement
            of a projected gradient step, per unit of the learning rate.
        turn: inner product of the last gradient with the one before it; None in a trace, and for few steps.
        size: norm of the gradient (of ``mapping``, if there is one), for stacked copies one each, if it was asked for
            with the step. A part of a graph then need not return the gradient, which takes longer to write than to
            read.
        plain: the optimizer's state is known not to have changed.
        diagnostics: what `watched` has found, if it belongs in an estimate.
    """

    y: Vector
    memory: Memory
    gradient: Vector | None
    projected: Tensor | None = None
    early: tuple[Tensor, Tensor] | None = None
    mapping: Vector | None = None
    turn: Tensor | None = None
    size: Tensor | None = None
    plain: bool = False
    diagnostics: Mapping[str, Any] = MappingProxyType({})

    @property
    def residual(self) -> Vector | None:
        """A vector that is zero at a solution: the last gradient, or with a projection ``mapping``."""
        return self.gradient if self.mapping is None else self.mapping

    def norm(self, lanes: bool = False) -> Tensor:
        """Return the norm of the last residual; with ``lanes``, one for each stacked copy."""
        if self.size is not None:
            return self.size if lanes else _together(self.size)
        residual = self.residual
        assert residual is not None
        return residual.lane_norm() if lanes else residual.norm()

    def watched(self, session: Session, rule: LowerRule, start: Vector, steps: int) -> dict[str, Any]:
        """Return diagnostics of steps from ``start``; warn if they diverge or leap.

        They diverge if the norm of the gradient grew ``GROWTH`` times in each half of them, or if `LowerTrend` finds
        growth over several solves. Gradient steps leap if they went much further than gradients like the first explain.
        The last gradient may be as small as the first then: that of exp(y) - y is -1 far to the left, where a long step
        ends.
        """
        if self.gradient is None:
            return {}
        last = self.norm()
        if self.early is None:
            return {"lower_residual": last}
        first, middle = (_together(norms) for norms in self.early)
        session.checks.alert_if(GROWS, GROWING, _grows, first, middle, last)
        if session.options.follows_curvature:
            session.checks.alert_if(LED_AWAY, "", _led_away, first, last)
        if self.turn is not None:
            trend = session.trend
            session.checks.alert_if(NO_END, trend.message, trend.note_solve, first, last, self.turn)
        if rule.plain:
            test = partial(_leapt, self.y, start, steps, rule.rates)
            session.checks.alert_if("leaping lower steps", LEAPING, test, self.y.norm(), first, last)
        return {"lower_residual": last, "lower_growth": Later(_growth, (Vector((first, last)),))}


class LowerRule:
    r"""An optimizer's update as a function :math:`(y, m, \nabla g) \mapsto (y', m')` that writes nothing.

    Args:
        factory: makes the optimizer from parameter groups, as ``torch.optim.Adam`` does.
        groups: the lower parameter groups, with their options.
        like: tensors shaped like y, in the order of the groups' parameters: y itself, or stacked copies.
        limits: clipping and projection of every step. Default: none.

    Attributes:
        evaluates_once: a step evaluates the gradient only once (a line search may do so more often).
        rates: learning rate of each tensor.
        plain: the update is a gradient step and nothing else.
        kind: class of the optimizer if its update is known; else ``Optimizer``.
        shapes: shapes of the tensors that the rule was made for.
        carried: the options that depend on upper parameters: group, name and value with its graph.
    """

    def __init__(
        self, factory: Factory, groups: Sequence[dict[str, Any]], like: Vector, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        single = next((p for group in groups for p in group["params"]), None)
        self.lead = like[0].dim() - single.dim() if isinstance(single, Tensor) else 0  # dimensions that number copies
        # The optimizer has tensors of its own, which hold values only during its steps.
        # Sharded ones keep their memory: the data of a DTensor cannot be exchanged.
        self._empty = Vector(t.detach().clone() if is_sharded(t) else t.new_zeros(()).expand(t.shape) for t in like)
        self._scratch = Vector(t.detach().requires_grad_() for t in self._empty)
        self._sizes = [(t.shape, t.dtype, t.device) for t in self._scratch]
        remaining = iter(self._scratch)
        self.shapes = [tuple(t.shape) for t in like]
        own = [{"params": [next(remaining) for _ in group["params"]], **_options(group)} for group in groups]
        self.optimizer = made_by(factory, own)
        self._given = [{*_options(group)} for group in groups]  # names of options that the groups themselves hold
        self.carried = _set_apart(self.optimizer)
        # Some optimizers create their state at once, others in their first step.
        self._initial = [dict(self.optimizer.state.get(t, {})) for t in self._scratch]
        # The steps of an optimizer whose update is unknown are made by the optimizer itself.
        known = is_known(self.optimizer)
        self.kind = type(self.optimizer) if known else Optimizer
        trial = [{"params": [torch.zeros(1, 1, device="cpu", requires_grad=True)], **_options(groups[0])}]
        self.evaluates_once = not needs_closure(self.optimizer if known else made_by(factory, trial))
        self._heed_options()

    def follow(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over the options of the lower groups, which a scheduler may have changed."""
        changed = False
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            for name, value in group.items():
                if name not in _OURS and (own.get(name) is not value or isinstance(value, Tensor)):
                    own[name], changed = value, True
        if changed:
            self._given = [{*_options(group)} for group in groups]
            self._heed_options()

    def _heed_options(self) -> None:
        groups = self.optimizer.param_groups
        self.rates = rates_of(groups)
        self.plain = self.kind is SGD and not any(
            [group["momentum"] or group["weight_decay"] or group["maximize"] for group in groups]
        )
        if any([name in ("momentum", "weight_decay") for _, name, _ in self.carried]):
            self.plain = False  # they may be zero, but have a derivative

    @contextmanager
    def with_graph(self) -> Generator[None]:
        """Context: the options that depend on upper parameters have their graphs."""
        for group, name, value in self.carried:
            group[name] = value
        try:
            yield
        except TypeError as error:  # torch takes such an option for a number
            if not self.carried:
                raise
            raise ValueError(NUMBER.format(self.carried[0][1], self.kind.__name__)) from error
        finally:
            for group, name, value in self.carried:
                group[name] = value.detach()

    def fits(self, groups: Sequence[dict[str, Any]], like: Vector) -> bool:
        """Return True if these groups and tensors have the sizes, types and devices that the rule was made for.

        Not so without an option that a group had: its default is that of the factory.
        """
        own = self.optimizer.param_groups
        if len(own) != len(groups):
            return False
        for i, group in enumerate(groups):
            if len(own[i]["params"]) != len(group["params"]) or not group.keys() >= self._given[i]:
                return False
        return self._sizes == [(t.shape, t.dtype, t.device) for t in like]

    def with_rates(self, rates: Sequence[Any], limits: Limits | None) -> LowerRule:
        """Return the same update with another learning rate for each group, and other limits, for a compiled step."""
        groups = [{**own, "lr": rate} for own, rate in zip(self.optimizer.param_groups, rates, strict=True)]
        other = self.with_limits(limits or self.limits)
        other.optimizer = _Groups(groups, self.kind, self.optimizer.defaults)  # type: ignore[assignment]
        other.rates = rates_of(groups)
        own = {id(group): new for group, new in zip(self.optimizer.param_groups, groups, strict=True)}
        carried = [(own[id(group)], name, value) for group, name, value in self.carried]
        # Another rate than that of the group does not depend on x.
        other.carried = [(new, name, value) for new, name, value in carried if name != "lr" or new["lr"] is value]
        for new, name, value in other.carried:
            new[name] = value.detach()
        return other

    def with_limits(self, limits: Limits) -> LowerRule:
        """Return the same update with other limits."""
        other = copy.copy(self)
        other.limits = limits
        return other

    def fresh(self) -> Memory:
        """Return the initial state."""
        return copy.deepcopy(self._initial) if any(self._initial) else [{} for _ in self._initial]

    def step(self, y: Vector, memory: Memory, gradient: Gradient, *, sized: bool = False) -> LowerResult:
        """Make one step on the gradients that ``gradient`` evaluates, at y or where the optimizer asks for them.

        ``sized``: compute the norm of the last one too.
        """
        limited = self.limits.clip is not None or self.limits.projection is not None
        solved = self._limited(y, memory, gradient, sized) if limited else self._step(y, memory, gradient)
        if sized and solved.gradient is not None:
            solved = solved._replace(size=solved.norm(bool(self.lead)))
        return solved

    def residual(self, y: Vector, gradient: Vector) -> Vector:
        """Return a vector that is zero at a solution.

        This is the gradient at y, or with a projection the displacement of a projected step along it, per unit of the
        learning rate.
        """
        if self.limits.projection is None:
            return gradient
        rates = [torch.where(rate > 0, rate, 1.0) if isinstance(rate, Tensor) else rate or 1.0
                 for rate in self.rates]  # fmt: skip
        moved = y - self.limits.projected(y.descended(gradient, rates), self.lead)
        return Vector((t / rate).to(t.dtype) for t, rate in zip(moved, rates, strict=True))

    def _limited(self, y: Vector, memory: Memory, gradient: Gradient, sized: bool) -> LowerResult:
        last: list[Vector] = []

        def clipped(at: Vector) -> tuple[Tensor | None, Vector]:
            loss, slope = gradient(at)
            last[:] = [slope]
            return loss, self.limits.clipped(slope, self.lead)

        new, memory, *_ = self._step(y, memory, clipped)
        end = self.limits.projected(new, self.lead)
        if self.limits.projection is None:
            return LowerResult(end, memory, last[0])
        return LowerResult(
            end, memory, last[0], changes(new, end), mapping=self.residual(y, last[0]) if sized else None
        )

    def _step(self, y: Vector, memory: Memory, gradient: Gradient) -> LowerResult:
        if self.plain:
            _, slope = gradient(y)
            return LowerResult(y.descended(slope, self.rates), memory, slope)
        if self.kind is AGD:
            each = [group for group in self.optimizer.param_groups for _ in group["params"]]
            ahead = [
                torch.add(v, v - state["previous"], alpha=group["momentum"]) if "previous" in state else v
                for group, v, state in zip(each, y, memory, strict=True)
            ]
            _, slope = gradient(Vector(ahead))
            return LowerResult(Vector(ahead).descended(slope, self.rates), [{"previous": v} for v in y], slope)
        if self.kind is not SGD and not is_tracing():
            return self._by_torch(y, memory, gradient)
        if self.kind is Optimizer:
            name = type(self.optimizer).__name__
            raise NotImplementedError(
                f"the optimizer {name} is not an unchanged one of torch's, so it cannot be traced"
            )
        _, slope = gradient(y)
        values, kept = updated(self.optimizer, y, memory, slope)
        return LowerResult(Vector(values).detach(), kept, slope)

    def _by_torch(self, y: Vector, memory: Memory, gradient: Gradient) -> LowerResult:
        """Make one step by the optimizer itself, on copies."""
        for scratch, value, state in zip(self._scratch, y, memory, strict=True):
            if is_sharded(scratch):
                Vector([scratch.detach()]).copy_([value])
            else:
                scratch.data = value.detach().clone()
            self.optimizer.state[scratch] = copy.deepcopy(state)
        last: list[Vector] = []

        def closure() -> Any:
            loss, values = gradient(self._scratch.detach().clone() if not self.evaluates_once else y)
            last[:] = [values]
            for scratch, value in zip(self._scratch, values, strict=True):
                scratch.grad = value.clone()  # the optimizer may write into it
            return loss

        try:
            if not self.evaluates_once:
                self.optimizer.step(closure)
            else:  # hooks before the step see the gradient
                closure()
                self.optimizer.step()
            # Not detach(): its version would go on with that of the copy.
            new = Vector(t.detach().clone() if is_sharded(t) else t.data for t in self._scratch)
            states = [dict(self.optimizer.state[scratch]) for scratch in self._scratch]
        finally:
            for scratch, empty in zip(self._scratch, self._empty, strict=True):
                scratch.grad = None
                if not is_sharded(scratch):
                    scratch.data = empty
            self.optimizer.state.clear()
        return LowerResult(new, states, last[0])

    def run(
        self,
        y: Vector,
        memory: Memory,
        steps: int,
        draw: Callable[[], Gradient],
        tol: float = 0.0,
        states: list[Memory] | None = None,
    ) -> LowerResult:
        """Make several steps, each on a gradient function from ``draw``; ``states`` gets the state before each of them.

        With a positive ``tol``, which costs a host synchronisation per step, the first step whose gradient has at most
        that norm is the last one.
        """
        solved = before = LowerResult(y, memory, None)
        early = []
        with span("lower solve"):
            for k in range(steps):
                if states is not None:
                    states.append(solved.memory)
                is_early, before = steps > 2 and k in (0, steps // 2), solved
                solved = self.step(solved.y, solved.memory, draw(), sized=is_early or k == steps - 1 or tol > 0)
                if is_early and solved.size is not None:
                    early.append(solved.size)
                if tol > 0 and solved.gradient is not None and solved.norm() <= tol:
                    break
        if len(early) < 2:
            return solved
        turn = None  # so that graphs need not return the gradients
        if not is_tracing() and before.gradient is not None and solved.gradient is not None:
            turn = solved.gradient.dot(before.gradient)
        return solved._replace(early=(early[0], early[1]), turn=turn)


def _together(norms: Tensor) -> Tensor:
    """Return the norm over all copies."""
    return norms.norm() if norms.dim() else norms


def largest_rate(rates: Sequence[Rate], like: Tensor) -> Rate:
    """Return the largest learning rate, a number if all of them are."""
    if all([isinstance(rate, float) for rate in rates]):
        return max(rates)
    return torch.stack([torch.as_tensor(rate).to(like) for rate in rates]).max()


def _growth(norms: Vector) -> Tensor:
    first, last = norms
    return quotient(last, first)


def _leapt(y: Vector, start: Vector, steps: int, rates: Sequence[Rate], length: Any, first: Any, last: Any) -> Any:
    """Return True for a leap to where a step would not undo it; ``length`` is the norm of y."""
    if not isinstance(length, Tensor) and not length > LEAP:
        return False  # then y has not moved LEAP * (1 + |start|)
    moved, size = (y - start).norm(), 1 + start.norm()  # from a saddle steps go far, but not that far
    reach = steps * largest_rate(rates, moved) * first
    far = (moved > LEAP * reach) & (moved > LEAP * size) & (first > 0)
    return far & (last > 0.1 * first) & (100 * reach * last < moved * first)


def _grows(first: Any, middle: Any, last: Any) -> Any:
    return (middle > GROWTH * first) & (last > GROWTH * middle)


def _led_away(first: Any, last: Any) -> Any:
    return last > GROWTH**3 * first


class _Groups:
    """An optimizer's kind and groups, which are all that a compiled step reads of it."""

    def __init__(self, groups: list[dict[str, Any]], kind: type[Optimizer], defaults: dict[str, Any]) -> None:
        self.param_groups, self.kind, self.defaults = groups, kind, defaults


class LowerRules:
    """Cache of the rules of one optimizer, by the shapes of y and of each stack of copies.

    Args:
        factory, limits: as for `LowerRule`.

    Attributes:
        rules: the rules in the cache.
    """

    def __init__(self, factory: Factory, limits: Limits | None = None) -> None:
        self._factory, self._limits = factory, limits
        self.rules: list[LowerRule] = []
        self._described: tuple[int, Described] | None = None

    def described(self, groups: Sequence[dict[str, Any]]) -> Described:
        """Return the optimizer's class, and for each group those options that the group itself does not hold.

        They are found once, from an optimizer of parameters of one entry.
        """
        if self._described is None or self._described[0] != len(groups):
            ones = [[torch.zeros(1, 1, device="cpu", requires_grad=True) for _ in group["params"]] for group in groups]
            pairs = zip(ones, groups, strict=True)
            made = self._factory([{"params": own, **_options(group)} for own, group in pairs])
            options = [
                {name: value for name, value in own.items() if name not in (*_OURS, *group)}
                for own, group in zip(getattr(made, "param_groups", ()), groups, strict=False)
            ]  # `LowerRule` reports a wrong optimizer
            self._described = len(groups), (type(made), options)
        return self._described[1]

    def __call__(self, groups: Sequence[dict[str, Any]], like: Vector) -> LowerRule:
        """Return the rule for these tensors and groups, with the groups' current options."""
        for rule in self.rules:
            if rule.fits(groups, like):
                rule.follow(groups)
                return rule
        made = LowerRule(self._factory, groups, like, self._limits)
        if not made.carried:  # else options follow x
            del self.rules[:-7]
            self.rules.append(made)
        return made


def is_known(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is one of torch's or ours unchanged: no subclass, no hooks, no step of its own."""
    own, kind = vars(optimizer), type(optimizer)
    hooked = any(own.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    return (kind is AGD or f"{kind.__module__}.".startswith("torch.optim.")) and not hooked and "step" not in own


def needs_closure(probe: Optimizer) -> bool:
    """Return True if steps evaluate gradients themselves, so that they need a closure.

    ``probe`` is such an optimizer with dummy parameters. If it is unknown, it makes a step to find out.
    """
    closure = inspect.signature(type(probe).step).parameters.get("closure")
    if isinstance(probe, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        return True
    if is_known(probe):
        return False
    for group in probe.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    try:
        probe.step()
    except Exception:  # it lacks a closure, or will fail with one too
        return True
    return False


def _set_apart(optimizer: Any) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Detach the options that have a graph; return for each the group, the name and the value with its graph."""
    found = []
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    for group in groups:
        for name, value in [*group.items()]:
            own = optimizer.defaults.get(name) if name == "lr" else None
            if isinstance(own, Tensor) and own.requires_grad:  # it was made with that rate; groups hold a former value
                value = own
            if isinstance(value, Tensor) and value.requires_grad:
                if type(optimizer) is not SGD and (name not in ("lr", "weight_decay") or (name != "lr" and not value)):
                    raise ValueError(NUMBER.format(name, type(optimizer).__name__))
                group[name] = value.detach()
                found.append((group, name, value))
    return found


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in _OURS}

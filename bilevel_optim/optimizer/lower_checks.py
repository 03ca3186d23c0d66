"""Checks that a method can use an optimizer of a level, made with a dummy parameter before the first step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from ..errors import warn
from ..oracle.doors import OPTIONS, STEP, options_of, steps_read
from ..problem.parameters import is_number, require
from ..solvers.agd import AGD
from ..solvers.functional import can_be_unrolled, made_by
from ..solvers.limits import Limits
from ..solvers.lower import NOT_ELEMENTWISE, is_known, needs_closure
from ..solvers.trust import acts_elementwise, can_be_differentiated, rests_without_gradient
from .options import FROM_ZERO

__all__ = [
    "Factory",
    "LowerChecks",
    "own_rate",
    "place_of_counts",
    "probe",
    "rate_of",
    "require_given_gradient",
    "require_optimizer",
]

Factory = Callable[[Any], Optimizer]


class LowerChecks:
    """Requirements on the lower optimizer.

    Args:
        factory: function that makes it from parameter groups.
        lr: learning rate of the lower steps.
    """

    def __init__(self, factory: Factory, lr: float) -> None:
        self.factory, self.lr = factory, lr
        self._own: tuple[list[str], list[str]] | None = None

    def probe(self) -> Optimizer:
        """Return the lower optimizer made for a dummy parameter."""
        return probe(self.factory, self.lr)

    @cached_property
    def accelerated(self) -> bool:
        """True for `AGD`, which has no option of torch's SGD but the momentum."""
        return isinstance(self.probe(), AGD)

    @cached_property
    def keeps_entries_apart(self) -> bool:
        """True if the update of an entry depends only on that entry and its gradient."""
        made = self.probe()
        return not isinstance(made, NOT_ELEMENTWISE) and (is_known(made) or acts_elementwise(self.factory, self.lr))

    def require(self, kind: str, limits: Limits, method: str) -> None:
        """Raise unless the optimizer is of this kind, a value of `MethodInfo.lower_optimizer`, and takes the limits."""
        if kind == "none":
            for name, value in (("lower_clip", limits.clip), ("lower_projection", limits.projection)):
                if value is not None:
                    raise ValueError(
                        f"Invalid {name} value: {value} ({method} makes its lower steps itself, without limits; leave "
                        "it out)"
                    )
        elif kind == "elementwise":
            self.require_elementwise()
        elif kind == "differentiable":
            self._require_differentiable()
        elif kind == "given gradient":
            why = "this method passes it one gradient, computed before the lower step"
            require_given_gradient(self.probe(), "lower", why)

    def require_at_rest(self) -> None:
        """Raise if the optimizer moves y at zero gradient."""
        probe = self.probe()
        if not is_known(probe) and not rests_without_gradient(self.factory, self.lr):
            raise ValueError(
                f"Invalid lower_optimizer value: {type(probe).__name__} moves y where the gradient is zero (a clamp, a "
                "projection or a penalty in a hook or in its step), so y does not end where the implicit hypergradient "
                "is right; use lower_clip= or lower_projection=, put the penalty into the lower loss, or use F2SA"
            )

    def _require_differentiable(self) -> None:
        """Raise unless the optimizer's update can be differentiated."""
        probe = self.probe()
        name = f"Invalid lower_optimizer value: {type(probe).__name__}"
        if isinstance(probe, AGD) or not can_be_unrolled(probe):
            raise ValueError(
                f"{name} cannot be differentiated through, but this method differentiates its steps; use one of "
                "torch's optimizers with a differentiable argument, such as SGD or Adam, or a method that does not "
                "differentiate the lower steps, such as AID"
            )
        if not is_known(probe) and not can_be_differentiated(self.factory, self.lr):
            raise ValueError(
                f"{name} has an update whose derivative by autograd is not its difference quotient (a hook or its step "
                "changes gradients or parameters out of autograd's sight); use lower_clip= or lower_projection=, which "
                "are differentiated, or a method that does not differentiate the lower steps, such as F2SA or AID"
            )

    def require_elementwise(self, what: str = "copies of y") -> None:
        """Raise if the optimizer would mix stacked tensors."""
        if not self.keeps_entries_apart:
            raise ValueError(
                f"Invalid lower_optimizer value: {type(self.probe()).__name__} does not update every entry "
                f"independently, so it would mix the {what}; use an optimizer that does, such as SGD or Adam"
            )

    def warn_of_decay(self, group: Mapping[str, Any]) -> None:
        """Warn of weight decay in a lower group, which the estimate ignores."""
        if group.get("weight_decay", self.probe().param_groups[0].get("weight_decay")):
            warn(
                "weight_decay of the lower_optimizer is not part of the lower loss, so the hypergradient leaves it out "
                "and is biased; put the penalty into the lower loss instead"
            )

    def doors(self, groups: Sequence[Mapping[str, Any]], x: Sequence[Tensor]) -> dict[str, str]:
        """Return the ways by which x reaches y in lower steps, each with the name of an option.

        Raises:
            ValueError: for an option that was computed from x once, so that later values of x would not reach it.
        """
        found = options_of(groups, x)
        stale = [name for name, value in found.items() if not isinstance(value, Tensor) or value.grad_fn is not None]
        if not (isinstance(self.factory, type) and self.factory.__module__.startswith("torch.optim")):
            if self._own is None:
                self._own = self._reads(x)
            own, reads = self._own
            stale += own
            found = {**found, **dict.fromkeys(reads)}
        if stale:
            raise ValueError(
                f"{stale[0]} of the lower steps was computed from upper parameters once, so it would not follow them: "
                "compute it where the optimizer is made, such as lower_optimizer=lambda groups: "
                "torch.optim.SGD(groups, lr=x.exp()), or pass the upper parameter itself"
            )
        return {STEP if name == STEP else OPTIONS: name for name in found}

    def _reads(self, x: Sequence[Tensor]) -> tuple[list[str], list[str]]:
        """Return the names of the factory's options that depend on x: those computed once, and all; or `STEP`."""
        found, others = (options_of(self._probe_of_factory().param_groups, x) for _ in range(2))
        once = [name for name, t in found.items() if others.get(name) is t and getattr(t, "grad_fn", None) is not None]
        probe = self.probe()
        if not is_known(probe):
            for group in probe.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            with suppress(Exception):  # it needs a closure, for example
                if steps_read(probe.step, x):
                    found[STEP] = None
        return once, [*found]

    def _probe_of_factory(self) -> Optimizer:
        """Return the optimizer made for a dummy parameter, with the factory's own learning rate if it has one."""
        try:
            return probe(self.factory)
        except Exception:  # it needs a rate
            return self.probe()


def probe(factory: Factory, lr: Any = None) -> Optimizer:
    """Return the optimizer made for a dummy parameter."""
    group = {"params": [torch.zeros(1, 1, device="cpu", requires_grad=True)]}
    return made_by(factory, [group if lr is None else {**group, "lr": lr}])


def rate_of(level: str, rate: Any, factory: Factory | None, method: str) -> Any:
    """Return the learning rate of a level: the argument, or the rate of the level's optimizer.

    Raises:
        ValueError: if the argument and a rate that the optimizer sets differ, or the rate is out of range.
        TypeError: if there is neither.
    """
    name = "lr" if level == "upper" else "lower_lr"
    own, sets = (None, False) if factory is None else own_rate(factory)
    if rate is None:
        if own is None:
            option = f", or an {level}_optimizer that has a rate" if level == "upper" else ""
            raise TypeError(f"{method}: missing a required argument: {name!r}{option}")
        rate = own  # `LowerRule` takes that of the optimizer, if it has a graph
    elif sets and own != rate:
        raise ValueError(
            f"Invalid {name} value: {rate} (the {level}_optimizer sets lr={own} itself; leave one of the two out)"
        )
    valid = is_number(rate) and 0 <= rate < math.inf
    if level == "upper":
        require("learning rate", rate, valid, "Invalid learning rate: {value}")
    else:
        require(name, rate, valid, FROM_ZERO)
    return rate


def place_of_counts(factory: Factory, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.device | None:
    """Return the device of a torch optimizer's step counts for a parameter; None if its options do not determine it."""
    options = {**probe(factory, group["lr"]).param_groups[0], **group}
    if not {"capturable", "fused"} & options.keys():
        return None
    return parameter.device if options.get("capturable") or options.get("fused") else torch.device("cpu")


def own_rate(factory: Factory) -> tuple[Any, bool]:
    """Return the rate of an optimizer made from groups without one, or None, and whether its factory sets it.

    A rate that is a tensor is returned without its graph.
    """
    try:
        made = probe(factory)
        rate = made.param_groups[0].get("lr")
        rate = rate.detach() if isinstance(rate, Tensor) else rate
    except Exception:  # it needs a rate; other errors come again when it is made with one
        return None, False
    default = inspect.signature(type(made)).parameters.get("lr")
    if rate is None or default is None or default.default is inspect.Parameter.empty or rate != default.default:
        return rate, rate is not None
    # The rate is the default, but the factory may still set it explicitly.
    if isinstance(factory, partial):
        return rate, "lr" in factory.keywords
    constants = getattr(getattr(factory, "__code__", None), "co_consts", ())
    return rate, any(isinstance(names, tuple) and "lr" in names for names in constants)


def require_optimizer(level: str, factory: Factory) -> None:
    """Raise unless the optimizer of a level can be made from parameter groups alone."""
    cure = "pass a class such as torch.optim.Adam, or a function of parameter groups that returns an optimizer"
    try:
        made = probe(factory, 1.0)
    except TypeError as error:
        raise TypeError(
            f"{level}_optimizer must make an optimizer from parameter groups alone, but raised: {error}; {cure} (a "
            "scheduler is made later, from the finished optimizer)"
        ) from error
    if isinstance(made, SparseAdam):
        raise ValueError(
            f"Invalid {level}_optimizer value: SparseAdam (it takes sparse gradients, but gradients are dense here; "
            "pass torch.optim.Adam)"
        )
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"{level}_optimizer must return a torch.optim.Optimizer, but returned {type(made).__name__}; {cure}"
        )


def require_given_gradient(made: Optimizer, level: str, why: str) -> None:
    """Raise if the optimizer of a level evaluates gradients at points of its own; ``why`` says that there is one."""
    if isinstance(made, AGD) or needs_closure(made):
        raise ValueError(
            f"Invalid {level}_optimizer value: {type(made).__name__} evaluates gradients at points of its own, but "
            f"{why}; use an optimizer that needs only that, such as SGD or Adam"
        )

"""Options as fields: a method declares each argument once, and `BilevelOptimizer` derives the rest.

``linear_steps: int = count(default=10)`` in the body of a class declares an argument of its constructor, with its
check, and the attribute ``self.linear_steps``. It also enters the signature, the optimizer's text and messages about
misspelt arguments. A type checker reads the same line (``typing.dataclass_transform``).
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, dataclass_transform

import torch
from torch.optim import Optimizer

from ..problem.parameters import is_count, is_number, require, require_choice
from .declaration import methods

__all__ = [
    "FROM_ONE",
    "FROM_ZERO",
    "GENERATOR",
    "TRUE_OR_FALSE",
    "InitVar",
    "Options",
    "argument_error",
    "choice",
    "chunk",
    "count",
    "factory",
    "fixed",
    "flag",
    "function",
    "is_generator",
    "number",
    "option",
    "signature_of",
]

REQUIRED = inspect.Parameter.empty
GENERATOR = "Invalid {name} value: {value} (it must be a torch.Generator or None)"
FROM_ONE = "Invalid {name} value: {value} (it must be an integer of at least 1)"
FROM_ZERO = "Invalid {name} value: {value} (it must be a finite number of at least 0)"
TRUE_OR_FALSE = "Invalid {name} value: {value} (it must be True or False)"
HINT = " (pass the class, or a function that makes one: functools.partial(torch.optim.SGD, momentum=0.9))"


@dataclass(frozen=True, kw_only=True)
class Option:
    """An argument of a method.

    Attributes:
        check: function of the argument's name and value that raises ValueError for a value out of range.
        default: default value. Default: none, the argument is required.
        saved: checkpoints hold it, because a user may change the attribute during a run.
        alias: name of the argument, if it differs from the attribute's.
        init: False for an option that a subclass fixes, which is then not an argument.
        attribute: name of the attribute that holds it. None if there is none, because the annotation is an ``InitVar``.
        settable: False if the constructor alone reads it. Then, and without an attribute, it cannot be set later.
        annotation: the argument's type.
    """

    check: Callable[[str, Any], None] | None = None
    default: Any = REQUIRED
    saved: bool = False
    init: bool = True
    alias: str | None = None
    attribute: str | None = None
    settable: bool = True
    annotation: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a default that all optimizers of the class would share and change."""
        if isinstance(self.default, (list, dict, set)):
            raise ValueError(f"an option has the mutable default {self.default!r}: take a tuple, or None")


class _Unsettable:
    """An attribute that is set once, by the constructor, if at all: setting it later would have no effect."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[self.name]
        except KeyError:
            raise AttributeError(f"{type(instance).__name__} has no attribute {self.name!r}") from None

    def __set__(self, instance: Any, value: Any) -> None:
        if self.name in vars(instance) or not type(instance)._options[self.name].attribute:
            called = f"{type(instance).__name__}.{self.name}"
            if self.name in ("lr", "lower_lr"):
                raise AttributeError(f"{called} cannot be set: set group['lr'] in param_groups, or use a scheduler")
            raise AttributeError(f"{called} cannot be set: only the constructor reads it; make a new optimizer")
        vars(instance)[self.name] = value


def option(
    *,
    default: Any = REQUIRED,
    check: Callable[[str, Any], None] | None = None,
    saved: bool = False,
    alias: str | None = None,
    settable: bool = True,
    kw_only: bool = True,
) -> Any:
    """Declare an argument with a check of its own, or with the base class's check."""
    return Option(check=check, default=default, saved=saved, alias=alias, settable=settable)


def fixed(*, default: Any, init: Literal[False] = False) -> Any:
    """Fix an argument of the base class, which the method then does not take."""
    return Option(default=default, init=init)


def number(
    *,
    default: Any = REQUIRED,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    finite: bool = True,
    optional: bool = False,
    saved: bool = False,
    alias: str | None = None,
    settable: bool = True,
) -> Any:
    """Declare a real number in a range: > ``above``, >= ``least``, <= ``most``, < ``below``; None if ``optional``."""

    def valid(value: Any) -> bool:
        if not is_number(value):
            return False
        upper = bool(value < below) if finite or below < math.inf else True
        return bool(above < value) and bool(least <= value <= most) and upper

    limits = {"above": above, "at least": least, "at most": most, "below": below}
    bounds = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit))
    kind = "a finite number" if finite and most == below == math.inf else "a number"
    what = f"{kind} {'of ' if bounds.startswith('at') else ''}{bounds}".strip()
    return _valid_option(valid, what, optional, default=default, saved=saved, alias=alias, settable=settable)


def count(*, default: Any = REQUIRED, least: int = 0, optional: bool = False, saved: bool = False) -> Any:
    """Declare an integer that is at least ``least``; or None if ``optional``."""

    def valid(value: Any) -> bool:
        return is_count(value) and int(value) >= least

    return _valid_option(valid, f"an integer of at least {least}", optional, default=default, saved=saved)


def flag(*, default: Any = REQUIRED, optional: bool = False) -> Any:
    """Declare True or False; or None if ``optional``."""
    return _valid_option(lambda value: isinstance(value, bool), "True or False", optional, default=default)


def function(*, default: Any = REQUIRED) -> Any:
    """Declare a function, or None."""
    return _valid_option(callable, "a function", True, default=default)


def chunk(*, default: Any = REQUIRED) -> Any:
    """Declare True, False, or a chunk size."""

    def valid(value: Any) -> bool:
        return isinstance(value, bool) or (is_count(value) and value > 0)

    return _valid_option(valid, "True, False or an integer of at least 1", False, default=default)


def _valid_option(valid: Callable[[Any], bool], what: str, optional: bool, **rest: Any) -> Option:
    """Return an option whose values are valid, or None if ``optional``; errors call them ``what``."""
    wording = f"Invalid {{name}} value: {{value}} (it must be {what}{' or None' if optional else ''})"

    def check(name: str, value: Any) -> None:
        require(name, value, (optional and value is None) or valid(value), wording)

    return Option(check=check, **rest)


def choice(*values: str, default: Any = REQUIRED, or_positive: bool = False, alias: str | None = None) -> Any:
    """Declare one of these words; or a positive number if ``or_positive``."""
    check = partial(require_choice, choices=values, or_positive=or_positive)
    return Option(check=check, default=default, alias=alias)


def factory(*, default: Any = REQUIRED) -> Any:
    """Declare a function that makes an optimizer from parameter groups, or None."""

    def check(name: str, value: Any) -> None:
        if not (value is None or callable(value)):
            shown = type(value).__name__ if isinstance(value, Optimizer) else value
            raise ValueError(f"Invalid {name} value: {shown}{HINT}")

    return Option(check=check, default=default)


def is_generator(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a random generator or None."""
    require(name, value, value is None or isinstance(value, torch.Generator), GENERATOR)


@dataclass_transform(
    kw_only_default=True, field_specifiers=(option, fixed, number, count, flag, choice, function, factory, chunk)
)
class Options:
    """Base of a class whose annotated fields are its options."""

    _own_options: ClassVar[Mapping[str, Option]] = {}  # declared in the class itself, by the name of the argument
    _options: ClassVar[Mapping[str, Option]] = {}  # with those of its base classes

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        annotations, own = inspect.get_annotations(cls), dict[str, Option]()
        for name, value in [(name, value) for name, value in vars(cls).items() if isinstance(value, Option)]:
            if (annotation := annotations.get(name)) is None:
                raise TypeError(
                    f"option {name!r} of {cls.__name__} has no type: write {name}: int = ..., or another type"
                )
            annotation = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
            kind = annotation.removeprefix("dataclasses.").removeprefix("InitVar[")
            stored, annotation = kind == annotation, annotation if kind == annotation else kind.removesuffix("]")
            own[value.alias or name] = replace(value, attribute=name if stored else None, annotation=annotation)
            delattr(cls, name)
        for name, value in own.items():
            unsettable = value.init and not (value.attribute and value.settable)
            if unsettable and not isinstance(getattr(cls, name, None), property):
                setattr(cls, name, _Unsettable(name))
        cls._own_options = own
        cls._options = known = dict[str, Option]()
        for base in reversed(cls.__mro__):
            for argument, value in vars(base).get("_own_options", {}).items():
                last = known.get(argument, value)  # a check or flag that is not repeated is inherited
                attribute = None if last.attribute is None else value.attribute
                known[argument] = replace(
                    value, check=value.check or last.check, saved=value.saved or last.saved, attribute=attribute
                )

    def __dir__(self) -> list[str]:
        hidden = {name for own in type(self).__mro__ for name, value in vars(own).items() if type(value) is _Unsettable}
        return sorted({*super().__dir__()} - (hidden - vars(self).keys()))

    def _checked_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of each option, checked.

        Raises:
            TypeError: if an option that is required is missing, or one is unknown.
            ValueError: if a value is out of range.
        """
        known = type(self)._options
        if unknown := [name for name in given if name not in known or not known[name].init]:
            raise TypeError(
                f"{type(self).__name__} has no option {unknown[0]!r}; it has "
                f"{', '.join(name for name, one in known.items() if one.init)}"
            )
        values = {name: given.get(name, one.default) for name, one in known.items()}
        for name, one in known.items():
            if values[name] is REQUIRED:
                raise TypeError(f"{type(self).__name__}: missing a required argument: {name!r}")
            if one.check is not None:
                one.check(name, values[name])
        return values


# Words of other libraries and of papers, with the words of this one.
WORDS = {
    "inner": "lower", "unroll": "lower", "unrolled": "lower", "unrolling": "lower", "y": "lower", "outer": "upper",
    "x": "upper", "cg": "linear", "hvp": "linear", "adjoint": "linear", "ihvp": "linear", "solver": "solver",
    "iters": "steps", "iter": "steps", "iterations": "steps", "loops": "steps", "step": "steps", "opt": "optimizer",
    "optim": "optimizer", "lr": "lr", "rate": "lr", "learning": "", "num": "", "n": "", "number": "", "of": "",
    "max": "",
}  # fmt: skip
WHOLE = {"upper_lr": "lr", "lambda": "nu", "lam": "nu", "penalty": "nu", "upper_steps": "step"}
# Options of torch's optimizers, and an optimizer that has each.
OF_TORCH = {
    "momentum": "SGD", "dampening": "SGD", "nesterov": "SGD", "weight_decay": "SGD", "betas": "Adam", "amsgrad": "Adam",
}  # fmt: skip


FIRST = ("upper", "lower", "lr", "lower_lr", "lower_steps")  # then the method's own options, then the common ones


def signature_of(cls: type[Options]) -> inspect.Signature:
    """Return the signature of a method: its options by name, and the arguments of an ``__init__`` of its own."""
    # The first class with options declares the common ones.
    base = next(owner for owner in reversed(cls.__mro__) if issubclass(owner, Options) and owner._options)
    found: dict[str, inspect.Parameter] = {}
    takes_options = True
    for owner in cls.__mro__[: cls.__mro__.index(base) + 1]:
        if takes_options and "__init__" in vars(owner):
            own = [*inspect.signature(vars(owner)["__init__"]).parameters.values()][1:]
            named = [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            found |= {p.name: p for p in named if p.name not in found}
            takes_options = any(p.kind is p.VAR_KEYWORD for p in own)
    options = {name: one for name, one in cls._options.items() if one.init and takes_options}
    order = [*FIRST, *(name for name in options if name not in base._options), *base._options]
    for name in order:
        if name in options and name not in found:
            kind, one = inspect.Parameter.KEYWORD_ONLY, options[name]
            found[name] = inspect.Parameter(name, kind, default=one.default, annotation=one.annotation)
    return inspect.Signature(sorted(found.values(), key=lambda p: p.kind))  # positional parameters first


def argument_error(
    cls: type[Any], error: TypeError, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> TypeError:
    """Return the error for a method's constructor called with wrong arguments."""
    name, known = cls.__name__, signature_of(cls).parameters
    unknown = [option for option in options if option not in known]
    if len(arguments) > 2:
        return TypeError(
            f"{name} takes the upper and the lower parameters by position, but got {len(arguments)} values: pass "
            "everything else by name, such as lr=..."
        )
    if not unknown:
        usual = (
            " (10 is usual; bo.suggest compares some for AID, ITD and F2SA)" if "'lower_steps'" in str(error) else ""
        )
        return TypeError(f"{name}: {error}{usual}")
    texts = [f"{name} has no option {option!r}{_hint(option, [*known])}" for option in unknown]
    return TypeError("\n".join(texts))


def _hint(option: str, known: list[str]) -> str:
    if option == "lower_steps":
        return ": it is a single loop, with one lower step in each step; leave lower_steps out"
    takers = [name for name in ("upper_optimizer", "lower_optimizer") if name in known]
    if option in OF_TORCH and takers:
        made = f"functools.partial(torch.optim.{OF_TORCH[option]}, {option}=...)"
        return f": it is an option of torch's optimizers; pass {' or '.join(takers)}={made}"
    words = [WORDS.get(word, word) for word in option.lower().split("_")]
    plain = "_".join(word for word in words if word)
    meant = next((name for name in (WHOLE.get(plain), plain) if name in known), None)
    if meant is not None and meant != option:
        return f"; did you mean {meant!r}?" + (" (one over the penalty's multiplier)" if meant == "nu" else "")
    owners = [method.__name__ for method in methods().values() if option in signature_of(method).parameters]
    if owners:
        others = ", ..." if len(owners) > 3 else ""
        return f", which is an option of {', '.join(owners[:3])}{others}"
    close = difflib.get_close_matches(option, known, 1, 0.7) or difflib.get_close_matches(plain, known, 1, 0.7)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"

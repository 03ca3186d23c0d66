"""Options as fields: a method declares each argument once, and `BilevelOptimizer` derives the rest.

``linear_steps: int = count(default=10)`` in the body of a class declares an argument of its constructor, with its
check, and the attribute ``self.linear_steps``. It also enters the signature, the optimizer's text and messages about
misspelt arguments. A type checker reads the same line (``typing.dataclass_transform``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, replace
from typing import Any, ClassVar, Literal, dataclass_transform

import torch
from torch.optim import Optimizer

from ..problem.parameters import is_count, is_number, require, require_choice

__all__ = [
    "FROM_ONE", "FROM_ZERO", "GENERATOR", "POSITIVE", "TRUE_OR_FALSE", "InitVar", "Options",
    "choice", "chunk", "count", "factory", "fixed", "flag", "function", "is_generator",
    "number", "option", "owner_of_common_options", "parameters_of",
]  # fmt: skip

REQUIRED = inspect.Parameter.empty
GENERATOR = "Invalid {name} value: {value} (it must be a torch.Generator or None)"
POSITIVE = "Invalid {name} value: {value} (it must be a finite number above 0)"
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
        annotation: the argument's type.
    """

    check: Callable[[str, Any], None] | None = None
    default: Any = REQUIRED
    saved: bool = False
    init: bool = True
    alias: str | None = None
    attribute: str | None = None
    annotation: str = ""


def option(
    *,
    default: Any = REQUIRED,
    check: Callable[[str, Any], None] | None = None,
    alias: str | None = None,
    kw_only: bool = True,
) -> Any:
    """Declare an argument with a check of its own, or with the base class's check."""
    return Option(check=check, default=default, alias=alias)


def fixed(*, default: Any, init: Literal[False] = False) -> Any:
    """Fix an argument of the base class, which the method then does not take."""
    return Option(default=default, init=init)


def number(
    *,
    default: Any = REQUIRED,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    finite: bool = True,
    optional: bool = False,
    saved: bool = False,
    alias: str | None = None,
) -> Any:
    """Declare a real number larger than ``above``, at least ``least`` and at most ``most``; or None if ``optional``."""

    def valid(value: Any) -> bool:
        if value is None or not is_number(value):
            return optional and value is None
        return bool(above < value) and bool(least <= value <= most) and (not finite or bool(value < math.inf))

    limits = {"above": above, "at least": least, "at most": most}
    bounds = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit))
    kind = "a finite number" if finite and most == math.inf else "a number"
    wording = _wording(f"{kind} {'of ' if bounds.startswith('at') else ''}{bounds}".strip(), optional)

    def check(name: str, value: Any) -> None:
        require(name, value, valid(value), wording)

    return Option(check=check, default=default, saved=saved, alias=alias)


def count(*, default: Any = REQUIRED, least: int = 0, optional: bool = False, saved: bool = False) -> Any:
    """Declare an integer that is at least ``least``; or None if ``optional``."""

    def valid(value: Any) -> bool:
        return optional if value is None else is_count(value) and int(value) >= least

    wording = _wording(f"an integer of at least {least}", optional)
    return Option(check=lambda name, value: require(name, value, valid(value), wording), default=default, saved=saved)


def flag(*, default: Any = REQUIRED, optional: bool = False) -> Any:
    """Declare True or False; or None if ``optional``."""

    def valid(value: Any) -> bool:
        return isinstance(value, bool) or (optional and value is None)

    wording = _wording("True or False", optional)
    return Option(check=lambda name, value: require(name, value, valid(value), wording), default=default)


def _wording(kind: str, optional: bool) -> str:
    """Return the message for a value that is not of this kind."""
    return f"Invalid {{name}} value: {{value}} (it must be {kind}{' or None' if optional else ''})"


def choice(*values: str, default: Any = REQUIRED, or_positive: bool = False, alias: str | None = None) -> Any:
    """Declare one of these words; or a positive number if ``or_positive``."""

    def check(name: str, value: Any) -> None:
        require_choice(name, value, values, or_positive=or_positive)

    return Option(check=check, default=default, alias=alias)


def function(*, default: Any = REQUIRED) -> Any:
    """Declare a function, or None."""
    wording = _wording("a function", optional=True)
    return Option(
        check=lambda name, value: require(name, value, value is None or callable(value), wording), default=default
    )


def factory(*, default: Any = REQUIRED) -> Any:
    """Declare a function that makes an optimizer from parameter groups, or None."""

    def check(name: str, value: Any) -> None:
        if not (value is None or callable(value)):
            shown = type(value).__name__ if isinstance(value, Optimizer) else value
            raise ValueError(f"Invalid {name} value: {shown}{HINT}")

    return Option(check=check, default=default)


def chunk(*, default: Any = REQUIRED) -> Any:
    """Declare True, False, or a chunk size."""

    def check(name: str, value: Any) -> None:
        wording = "Invalid {name} value: {value} (it must be True, False or an integer of at least 1)"
        require(name, value, isinstance(value, bool) or (is_count(value) and value > 0), wording)

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
        cls._own_options = own
        cls._options = known = dict[str, Option]()
        for base in reversed(cls.__mro__):
            for argument, value in vars(base).get("_own_options", {}).items():
                last = known.get(argument, value)  # a check or flag that is not repeated is inherited
                attribute = None if last.attribute is None else value.attribute
                known[argument] = replace(
                    value, check=value.check or last.check, saved=value.saved or last.saved, attribute=attribute
                )

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


def parameters_of(cls: type[Options]) -> dict[str, inspect.Parameter]:
    """Return a class's options as keyword arguments, in the order in which they were declared, base class first."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=one.default, annotation=one.annotation)
        for name, one in cls._options.items()
        if one.init
    }


def owner_of_common_options(cls: type[Options]) -> type[Options]:
    """Return the base class that declares the options which all methods have."""
    return next(owner for owner in reversed(cls.__mro__) if issubclass(owner, Options) and owner._options)

"""Signature of a method, and errors for calls with wrong arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from .options import Options, owner_of_common_options, parameters_of

__all__ = ["argument_error", "explain_bad_call", "signature_of", "wrong_call"]

Verb = TypeVar("Verb", bound=Callable[..., Any])

# Words of other libraries and of papers, with the words of this one.
WORDS = {
    "inner": "lower", "unroll": "lower", "unrolled": "lower", "unrolling": "lower", "y": "lower", "outer": "upper",
    "x": "upper", "cg": "linear", "hvp": "linear", "adjoint": "linear", "ihvp": "linear", "solver": "solver",
    "iters": "steps", "iter": "steps", "iterations": "steps", "loops": "steps", "step": "steps", "opt": "optimizer",
    "optim": "optimizer", "lr": "lr", "rate": "lr", "learning": "", "num": "", "n": "", "number": "", "of": "",
    "max": "",
}  # fmt: skip
# The same for arguments of public methods.
PARTS = {"inner": "lower", "outer": "upper", "loss": "", "fn": "", "objective": "", "sampler": "tasks"}
WHOLE = {"upper_lr": "lr", "lambda": "nu", "lam": "nu", "penalty": "nu", "upper_steps": "step"}
# Options of torch's optimizers, and an optimizer that has each.
OF_TORCH = {
    "momentum": "SGD", "dampening": "SGD", "nesterov": "SGD", "weight_decay": "SGD", "betas": "Adam", "amsgrad": "Adam",
}  # fmt: skip


FIRST = ("upper", "lower", "lr", "lower_lr", "lower_steps")  # then the method's own options, then the common ones


def signature_of(cls: type[Options]) -> inspect.Signature:
    """Return the signature of a method: its options by name, and the arguments of an ``__init__`` of its own."""
    base = owner_of_common_options(cls)
    options, common = parameters_of(cls), parameters_of(base)
    found: dict[str, inspect.Parameter] = {}
    for owner in cls.__mro__[: cls.__mro__.index(base) + 1]:
        if "__init__" in vars(owner):
            own = [*inspect.signature(vars(owner)["__init__"]).parameters.values()][1:]
            named = [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            found |= {p.name: p for p in named if p.name not in found}
            if not any(p.kind is p.VAR_KEYWORD for p in own):
                return _ordered(found)
    order = [*FIRST, *(name for name in options if name not in common), *common]
    return _ordered(found | {name: options[name] for name in order if name in options and name not in found})


def _ordered(parameters: Mapping[str, inspect.Parameter]) -> inspect.Signature:
    """Return the signature with the positional parameters before the keyword-only ones."""
    return inspect.Signature(sorted(parameters.values(), key=lambda p: p.kind))


def argument_error(
    cls: type[Any],
    error: TypeError,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    methods: Iterable[type[Any]],
) -> TypeError:
    """Return the error for a method's constructor called with wrong arguments; ``methods`` are all known methods."""
    name, known = cls.__name__, signature_of(cls).parameters
    unknown = [option for option in options if option not in known]
    if len(arguments) > 2:
        return TypeError(
            f"{name} takes the upper and the lower parameters by position, but got {len(arguments)} values: pass "
            "everything else by name, such as lr=..."
        )
    if not unknown:
        usual = " (10 is usual; bo.suggest tries some)" if "'lower_steps'" in str(error) else ""
        return TypeError(f"{name}: {error}{usual}")
    texts = [f"{name} has no option {option!r}{_hint(cls, option, [*known], methods)}" for option in unknown]
    return TypeError("\n".join(texts))


def _hint(cls: type[Any], option: str, known: list[str], methods: Iterable[type[Any]]) -> str:
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
    owners = [method.__name__ for method in methods if option in signature_of(method).parameters]
    if owners:
        others = ", ..." if len(owners) > 3 else ""
        return f", which is an option of {', '.join(owners[:3])}{others}"
    close = difflib.get_close_matches(option, known, 1, 0.7) or difflib.get_close_matches(plain, known, 1, 0.7)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}"


def explain_bad_call(sentence: str = "") -> Callable[[Verb], Verb]:
    """Decorate a function so that a call with wrong arguments raises an error with a hint."""

    def decorated(verb: Verb) -> Verb:
        @functools.wraps(verb)
        def called(*arguments: Any, **named: Any) -> Any:
            try:
                return verb(*arguments, **named)
            except TypeError as error:
                if (told := wrong_call(verb, error, named, sentence)) is None:
                    raise
                raise told from None

        return cast(Verb, called)

    return decorated


def wrong_call(
    verb: Callable[..., Any], error: TypeError, named: Mapping[str, Any], sentence: str = ""
) -> TypeError | None:
    """Return the error for a function called with wrong arguments; None if the error comes from inside the function."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return None
    parameters = inspect.signature(verb).parameters
    known = [name for name in parameters if name != "self"]
    hints = [_near(name, known) for name in named if name not in known]
    if "were given" in str(error):
        named_only = [name for name in known if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]
        hints = [f"pass these by name: {', '.join(named_only)}"]
    hints = [sentence] if sentence else hints
    return TypeError(": ".join([str(error), *hints]))


def _near(name: str, known: list[str]) -> str:
    plain = "_".join(word for word in (PARTS.get(word, word) for word in name.lower().split("_")) if word)
    close = [plain] if plain in known else difflib.get_close_matches(name, known, 1, 0.7)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"

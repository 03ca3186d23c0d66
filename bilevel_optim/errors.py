"""Exceptions and warnings of the library, beyond Python's own."""

import contextlib
import inspect
import os
import threading
import warnings
from collections.abc import Generator

import torch
from torch.autograd.gradcheck import GradcheckError as _TorchGradcheckError

__all__ = [
    "DATA_FIRST",
    "FILTERS",
    "BilevelWarning",
    "DerivativeError",
    "GradcheckError",
    "NonFiniteError",
    "RankError",
    "filters_kept",
    "require_uninterrupted",
    "root_hint",
    "warn",
]

# Paths without user code: this package, torch (its hooks and decorators), and contextlib, which runs their blocks.
INSIDE = (*(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__)), contextlib.__file__)

FILTERS = threading.RLock()  # held while warning filters change, because all threads share them

DATA_FIRST = (
    "Look at the data first (the mean over an empty batch is NaN, and so is a loss on data with a NaN); if they are "
    "right"
)
REMEDY = f"{DATA_FIRST}, use a smaller lr or lower_lr"
PRODUCTS = ("hvp", "jvp")
PRODUCT = (
    "The gradients are finite and their derivative is not. Either the run diverges (use a smaller lr or lower_lr), or "
    "an operation of the loss has no finite second derivative at this point"
)


class NonFiniteError(ArithmeticError):
    """An oracle or an update of x gave NaN or infinity; parameters and state are as they were before the call.

    Attributes:
        oracle: name of the oracle, as in ``BilevelOptimizer.oracle_counts``, or ``"the update of x"``.
        step: index of the outer step, from 0.
        hint: advice of the method itself; empty if it has none.
    """

    def __init__(self, oracle: str, step: int, hint: str = "") -> None:
        self.oracle, self.step, self.hint = oracle, step, hint
        super().__init__(
            f"Non-finite values in {oracle} at outer step {step}; the parameters and the optimizer's state "
            f"are unchanged. {hint or (PRODUCT if oracle in PRODUCTS else REMEDY)}. "
            "check_finite=False turns this check off."
        )


def root_hint(oracle: str, roots: tuple[str, ...], hint: str) -> str:
    """Return advice for a derivative that is not finite.

    Args:
        oracle: name of the oracle that returned it.
        roots: operations of the loss, as users call them, that have no finite derivative of some order at zero.
        hint: advice of the method itself; empty if it has none.
    """
    if oracle in PRODUCTS and "norm" in roots:
        return (
            "The gradients are finite and their derivative is not. The loss calls norm(), whose second derivative in "
            "torch is NaN at zero: write y.square().sum() for y.norm() ** 2, and (y.square().sum() + 1e-12).sqrt() for "
            "a norm. If nothing is zero there, use a smaller lr or lower_lr"
        )
    if oracle == "lower_grad" and "sqrt" in roots:
        return (
            "The loss calls sqrt(), whose derivative at zero is infinite: add a small number, (v + 1e-12).sqrt(), or "
            "write the square without the root. If nothing is zero there, look at the data, or use a smaller lower_lr"
        )
    return hint


class DerivativeError(RuntimeError):
    """A derivative of a loss is not that of its values; nothing has been changed by the call.

    Attributes:
        derivative: the derivative, in words.
        relative_error: its error, relative to its norm.
        operation: the operation in the graph of the loss that may be the cause; empty if none is known.
    """

    def __init__(self, derivative: str, relative_error: float, operation: str, remedy: str) -> None:
        self.derivative, self.relative_error, self.operation = derivative, relative_error, operation
        cause = f"The likely cause is the operation {operation}. " if operation else ""
        super().__init__(
            f"the {derivative} is off by {relative_error:.2g} of its norm; nothing has been changed. "
            f"{cause}{remedy}. If this is intended (straight-through estimators, surrogate losses), "
            "check_derivatives=False turns the check off."
        )


class RankError(RuntimeError):
    """Another rank is gone, so the step has ended; parameters and state are as they were before it."""


class GradcheckError(_TorchGradcheckError):
    """A hypergradient estimate is further from the reference than the tolerance of `check_hypergradient`.

    Attributes:
        report: the `HypergradientReport`; None if there is no reference.
    """

    report: object = None


class BilevelWarning(RuntimeWarning):
    """The method still runs, but its hypergradient is unreliable."""


def warn(text: str) -> None:
    """Issue a `BilevelWarning` at the line that called the library."""
    level, frame = 2, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, BilevelWarning, stacklevel=level)


def require_uninterrupted(error: BaseException) -> None:
    """Raise KeyboardInterrupt if an error hides one: torch raises others while an interrupt ends its vmap."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__
    if cause is not None and not isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt from error


@contextlib.contextmanager
def filters_kept() -> Generator[None]:
    """Restore the warning filters after the block, which may change them; for one thread at a time."""
    with FILTERS, warnings.catch_warnings():
        yield

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


class NonFiniteError(ArithmeticError):
    """An oracle returned NaN or infinity; parameters and state are as they were before the call.

    Attributes:
        oracle: name of the oracle, as in ``BilevelOptimizer.oracle_counts``.
        step: index of the outer step, from 0.
        hint: advice of the method itself; empty if it has none.
    """

    def __init__(self, oracle: str, step: int, hint: str = "") -> None:
        self.oracle, self.step, self.hint = oracle, step, hint
        super().__init__(
            f"Non-finite values in {oracle} at outer step {step}; the parameters and the optimizer's state "
            f"are unchanged. {hint or REMEDY}. "
            "check_finite=False turns this check off."
        )


class DerivativeError(RuntimeError):
    """A derivative of a loss is not that of its values; parameters and state are as they were before the call.

    Attributes:
        derivative: the derivative, in words.
        relative_error: its error, relative to its norm.
        operation: the operation in the graph of the loss that may be the cause; empty if none is known.
    """

    def __init__(self, derivative: str, relative_error: float, operation: str, remedy: str) -> None:
        self.derivative, self.relative_error, self.operation = derivative, relative_error, operation
        cause = f"The likely cause is the operation {operation}. " if operation else ""
        super().__init__(
            f"the {derivative} is off by {relative_error:.2g} of its norm; the parameters and the optimizer's state "
            f"are unchanged. {cause}{remedy}. If this is intended (straight-through estimators, surrogate losses), "
            "check_derivatives=False turns the check off."
        )


class RankError(RuntimeError):
    """Another rank failed or is gone, so the step has ended; parameters and state are as they were before it."""


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


@contextlib.contextmanager
def filters_kept() -> Generator[None]:
    """Restore the warning filters after the block, which may change them; for one thread at a time."""
    with FILTERS, warnings.catch_warnings():
        yield

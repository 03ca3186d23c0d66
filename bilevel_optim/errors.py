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
    "GradcheckError",
    "NonFiniteError",
    "RankError",
    "filters_kept",
    "product_hint",
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
PRODUCT = (
    "The gradients are finite and their derivative is not. Either the run diverges (use a smaller lr or lower_lr), or "
    "an operation of the loss has no finite second derivative at this point"
)


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
            f"are unchanged. {hint or (PRODUCT if oracle in ('hvp', 'jvp') else REMEDY)}. "
            "check_finite=False turns this check off."
        )


def product_hint(roots: tuple[str, ...], hint: str) -> str:
    """Return advice for a product that is not finite although the gradients are.

    Args:
        roots: operations of the loss, as users call them, whose second derivative is not finite at zero.
        hint: advice of the method itself; empty if it has none.
    """
    if not roots:
        return hint
    calls = " and ".join(f"{name}()" for name in roots)
    return (
        f"The gradients are finite and their derivative is not. The loss calls {calls}, whose second derivative in "
        "torch is NaN at zero. Write a squared norm as y.square().sum(), a squared std as var(), and give other roots "
        "a small number, (y.square().sum() + 1e-12).sqrt(). If nothing is zero there, use a smaller lr or lower_lr"
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

"""Many evaluations at once: one ``vmap``, chunks of it, or a loop, and why it was the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..errors import filters_kept
from .differentiable import has_large_convolutions
from .session import Session

__all__ = ["CONVOLUTIONS", "no_large_convolutions", "no_slow_batching", "run", "slices"]

LARGE = 1 << 17  # entries of what goes into a convolution
CONVOLUTIONS = "convolutions of this size are faster one by one on a CPU"
Part = TypeVar("Part")


class Unsuited(RuntimeError):
    """The evaluations could be batched, but the loop is better."""


def run(
    session: Session,
    n: int,
    together: Callable[[slice], Part],
    alone: Callable[[int], Part],
    *,
    possible: bool = True,
    first: Callable[[], None] | None = None,
) -> list[Part]:
    """The results of n evaluations, in parts.

    What vmap cannot do, the loop can: after an exception that comes again the loop takes over, for good and with the
    reason in ``session.found.fallback``. What is wrong with the loss itself is raised.

    Args:
        session: says how many may run together, and remembers that they cannot.
        n: number of evaluations.
        together: evaluates a slice of them at once.
        alone: evaluates one of them.
        possible: False if these cannot be batched (this time).
        first: a look at whether the batched evaluation can be trusted; raises if not.
    """
    size, fallback = session.options.at_once(n), session.found.fallback
    if is_dynamo_compiling() and fallback == CONVOLUTIONS:  # others are large there
        first = fallback = None
    if size == 1 or not possible or fallback:
        return [alone(i) for i in range(n)]

    def attempt() -> list[Part]:
        if first is not None:
            first()
        return [together(part) for part in slices(size, n)]

    try:
        return attempt()
    except Unsuited as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        if _passes(attempt):  # then it was not vmap's
            raise
    results = [alone(i) for i in range(n)]
    session.found.fallback = reason
    return results


def slices(size: int, n: int) -> list[slice]:
    """The parts of n things, so many in each."""
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _passes(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except Exception:
        return False
    return True


def no_large_convolutions(loss: Tensor) -> None:
    """Raise where grouped convolutions are slower than those one by one.

    What is around them is faster for all at once in a compiled graph, so that they may be twice as large there.
    """
    if has_large_convolutions(loss, 2 * LARGE if is_dynamo_compiling() else LARGE):
        raise Unsuited(CONVOLUTIONS)


@contextmanager
def no_slow_batching(look: bool) -> Generator[None]:
    """Raise where vmap would run an operation without a batching rule one by one, slower than our own loop."""
    if not look:
        yield
        return
    with filters_kept():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield

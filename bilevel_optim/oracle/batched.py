"""Many evaluations, by one ``vmap``, in chunks, or in a loop, with the reason for the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import filters_kept, require_uninterrupted
from ..problem.objective import version_of
from ..problem.vector import Vector, any_sharded, as_variable
from .differentiable import has_large_convolutions, reaches
from .hooks import why_one_by_one
from .point import SPARSE, STRIDED, WRITES, Point, in_place
from .session import Session

__all__ = ["no_large_convolutions", "require_redirection", "run", "slices"]

LARGE = 1 << 17  # input entries of a convolution
CONVOLUTIONS = (
    "convolutions of this size are faster one by one on a CPU than in a batch, so a loop evaluates them; "
    "nothing needs to change"
)
ANOMALY = (
    "torch's anomaly detection is on, and reads values in backward passes, so a loop evaluates what cannot be batched "
    "then; a step without it batches again"
)
HOOKED = "a lower parameter has a hook, which is called for the gradient of one task at a time"
Part = TypeVar("Part")


class Unsuited(RuntimeError):
    """The evaluations could be batched, but a loop is faster."""


def run(
    session: Session,
    n: int,
    together: Callable[[slice], Part],
    alone: Callable[[int], Part],
    *,
    possible: bool = True,
    lanes: bool = True,
    new: frozenset[str] = frozenset(),
    first: Callable[[], None] | None = None,
) -> list[Part]:
    """Return the results of n evaluations, in parts.

    A loop can do what vmap cannot. So after an exception that occurs twice the loop takes over, for good and with the
    reason in ``session.found.fallback``. Errors of the loss itself are raised.

    Args:
        session: limits how many may run together, and stores the fallback.
        n: number of evaluations.
        together: evaluates a slice of them at once.
        alone: evaluates one of them.
        possible: False if these cannot be batched (this time).
        lanes: whether they are, or contain, evaluations of several tasks.
        new: the losses, as in `LossFacts`, that are not known to work under vmap.
        first: check of the batched evaluation of new losses; raises if it cannot be trusted.
    """
    size = session.options.at_once(n)
    if size > 1 and possible:
        _look(session)
    if size == 1 or not possible or not session.vmaps(lanes):
        if size > 1 and session.found.fallback is None and possible:
            session.looped = session.one_by_one or HOOKED
        return [alone(i) for i in range(n)]

    def attempt() -> list[Part]:
        if not new:
            return [together(part) for part in slices(size, n)]
        if first is not None:
            first()
            if _look(session):
                raise Unsuited(session.one_by_one)
        with filters_kept():  # an operation without a batching rule would run one by one, slower than the loop
            warnings.filterwarnings("error", message="There is a performance drop")
            return [together(part) for part in slices(size, n)]

    try:
        parts = attempt()
        session.found.vmapped |= new
        return parts
    except Unsuited as error:
        reason = str(error)
    except Exception as error:
        require_uninterrupted(error)
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        try:
            attempt()
        except Exception as again:
            require_uninterrupted(again)
        else:  # then vmap was not the cause
            raise
    results = [alone(i) for i in range(n)]
    if torch.is_anomaly_enabled():
        session.looped = ANOMALY
    elif session.one_by_one:  # which is asked again in each step
        session.looped = reason
    else:
        session.found.fallback = reason
    return results


def _look(session: Session) -> str:
    """In the first step, look at the modules called so far; return why evaluations cannot run together."""
    if not session.buffers.complete and not session.one_by_one:
        session.one_by_one = why_one_by_one(session.buffers.modules)
    return session.one_by_one


def slices(size: int, n: int) -> list[slice]:
    """Split n items into slices of ``size``."""
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def no_large_convolutions(loss: Tensor) -> None:
    """Raise `Unsuited` if a loss has convolutions so large that grouping them is slower than a loop."""
    if has_large_convolutions(loss, LARGE):
        raise Unsuited(CONVOLUTIONS)


def require_redirection(
    oracle: Point,
    loss: str,
    live: Vector,
    values: Sequence[Tensor],
    evaluate: Callable[[Sequence[Tensor]], Tensor],
    where: str,
    free: Sequence[Tensor] = (),
    *,
    graph: bool = False,
) -> None:
    """Raise if a loss reads live tensors where no replacement reaches them, as TorchScript modules do.

    Args:
        oracle: remembers the outcome in its session.
        loss: which loss, as in `LossFacts`.
        live: tensors that are replaced.
        values: values to read in their place.
        evaluate: evaluates the loss at such values, with the same random numbers each time.
        where: ending of the message: the copies that it should read, and the cure.
        free: more tensors, whose gradients must not depend on what the live ones hold.
        graph: whether it must not be differentiable in live tensors either, as an autograd.Function of one is.
    """
    session, at = oracle.session, [as_variable(t.clone()) for t in values]  # unknown to every substitution
    every = (*oracle.live_x, *oracle.live_y)
    name_of, replaced = dict(zip(map(id, every), oracle.names, strict=True)), [*map(id, live)]
    others = [t for t in oracle.live_x if t.requires_grad and id(t) not in replaced and not any_sharded([t])]
    others += free
    before, results, passed = [t.grad for t in every], list[Vector](), False
    # If the result depends on what the live tensors hold, then the loss has read these. A sharded tensor can hold no
    # row of a stack.
    for held in () if any_sharded(live) else (at, [t * 1.1 + 0.1 for t in at]):
        # Gradients too: in a checkpoint's second evaluation, in the backward pass, nothing is replaced.
        with torch.enable_grad(), in_place([live], [Vector(held).detach()]), session.buffers_kept():
            versions = [version_of(t) for t in at]
            try:
                value = evaluate(at)
                for t, own, version in zip(live, at, versions, strict=True):
                    if version_of(own) != version:
                        upper = any([t is other for other in oracle.live_x])
                        raise ValueError(WRITES.format("upper" if upper else "lower", name_of[id(t)]))
                wanted, passed = [*at, *others], graph and reaches(value, live)
                reached: Sequence[Tensor | None] = ()
                if value.requires_grad:  # a batch may have a graph
                    reached = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=True)
            finally:
                for t, gradient in zip(every, before, strict=True):
                    t.grad = gradient
        for t, gradient in zip((*live, *others), reached, strict=False):
            if gradient is not None and gradient.layout is not STRIDED:
                raise ValueError(SPARSE.format(name_of.get(id(t), "")))
        results.append(Vector((value.detach(), *(t for t in reached if t is not None))))
    # Never true of values that are not finite. Tensors whose gradient is zero but for rounding do not count alone.
    if passed or (results and (results[0] - results[1]).norm() > 1e-5 * results[0].norm()):
        level = loss.split()[0]
        raise RuntimeError(f"the {level} loss reads parameters in a way that cannot be redirected to {where}")
    session.found.redirected |= {loss}

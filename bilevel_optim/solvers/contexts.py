"""Contexts: lower problems of which each is met once. Their draws, their levels, and the coupled lower solve of all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..oracle.oracle import Oracle, as_scalar, filled
from ..oracle.tasks import LaneLoss, draw, select
from ..problem.random import Counters
from ..problem.vector import Vector

__all__ = ["Contexts", "Path", "coupled_path", "draw_levels", "level_probabilities"]

TASKS, LEVEL, ORDER, TRUNCATION, PATH, CROSS, UPPER, NEUMANN, POWER = range(9)  # what a random number is for
BLOCK = 128  # steps of an epoch whose batches are drawn at once


def level_probabilities(levels: int, base: int = 0) -> Tensor:
    r""":math:`p_k = 2^{-(k - b)} / (1 - 2^{-(K - b)})` for k = b + 1, ..., K."""
    k = torch.arange(1, levels - base + 1, dtype=torch.float64)
    return 2**-k / (1 - 2.0 ** -(levels - base))


def draw_levels(count: int, levels: int, base: int, counters: Counters, *, systematic: bool) -> list[int]:
    """Levels with the probabilities of `level_probabilities`, by inversion.

    Systematic: with evenly spaced uniforms that share one random shift, in random order: each level has the right
    distribution, and the numbers of them hardly vary.
    """
    if systematic:
        shift = torch.rand((), dtype=torch.float64, generator=counters.generator(LEVEL))
        uniform = (torch.arange(count, dtype=torch.float64) + shift) / count
        uniform = uniform[torch.randperm(count, generator=counters.generator(ORDER))]
    else:
        uniform = torch.rand(count, dtype=torch.float64, generator=counters.generator(LEVEL))
    depth = 1 + (-torch.log2(1 - uniform * (1 - 2.0 ** -(levels - base)))).floor().long()
    return [base + min(k, levels - base) for k in depth.tolist()]


class Contexts:
    """The contexts of one step, and their conditional draws: each from the counters of its slot and purpose."""

    def __init__(self, sampler: Any, tasks: Any, count: int, sizes: dict[str, int | None], counters: Counters) -> None:
        self.sampler, self.tasks, self.count, self.sizes, self.counters = sampler, tasks, count, sizes, counters
        self._all: dict[str, Any] = {}

    @property
    def deterministic(self) -> bool:
        """Whether the lower batches are all the data of a context."""
        return self.sizes["lower"] is None

    def batches(self, level: str, slots: Sequence[int], *counter: int, times: int = 1) -> list[Any]:
        """Independent batches for these slots: ``times`` pytrees with leading dimension ``len(slots)``."""
        rows = self.sizes[level]
        if rows is None:
            if level not in self._all:
                generator = self.counters.generator(TASKS, 1)
                self._all[level] = draw(self.sampler, level, self.tasks, self.count, None, generator)
            return [select(self._all[level], torch.tensor(slots))] * times
        parts = [
            tree_flatten(
                draw(
                    self.sampler,
                    level,
                    select(self.tasks, slice(slot, slot + 1)),
                    1,
                    times * rows,
                    self.counters.generator(slot, *counter),
                )
            )
            for slot in slots
        ]
        steps = []
        for leaves in zip(*(part[0] for part in parts), strict=True):
            if isinstance(leaves[0], Tensor):
                joined = torch.cat(leaves) if len(leaves) > 1 else leaves[0]
                steps.append(joined.view(len(joined), times, rows, *joined.shape[2:]).unbind(1))
            else:
                steps.append((leaves[0],) * times)
        return [tree_unflatten(list(leaves), parts[0][1]) for leaves in zip(*steps, strict=True)]


class Path(NamedTuple):
    """Lower points of every context, stacked: after the base level, before the last epoch, and after it."""

    base: Vector
    previous: Vector
    last: Vector


def coupled_path(
    oracle: Oracle,
    contexts: Contexts,
    start: Vector,
    depths: Sequence[int],
    rates: Callable[[int], list[float]],
    *,
    slots: Sequence[int] | None = None,
    base: int = 0,
) -> Path:
    r"""EpochSGD for every context, once, as deep as each needs; epoch e has :math:`2^e` steps and restarts from a mean.

    .. math:: z_{j+1} = z_j - \beta_e \nabla_y g(x, z_j; \eta_{e,j}), \qquad Y_e = 2^{-e} \sum_{j < 2^e} z_j .

    The epochs of a shallow run are the first ones of a deep run. In an epoch all contexts that take part in it advance
    together; the last step of an epoch, whose result would not be used, is not made.

    Args:
        oracle: of the live tensors; costs :math:`2^{k+1} - 2 - k` lower gradients for a context of depth k.
        contexts: the contexts and their data.
        start: :math:`Y_0`, stacked, one lane for each of ``depths``.
        depths: number of epochs of each context.
        rates: epoch -> :math:`\beta_e`, one for each lower tensor.
        slots: the contexts that the lanes belong to. Default: the first ones.
        base: the level that is kept as ``base``.
    """
    own = list(range(len(depths))) if slots is None else list(slots)
    order = sorted(range(len(depths)), key=lambda lane: -depths[lane])
    first, previous, last = (Vector(t[order] for t in start) for _ in range(3))
    for e in range(1, max(depths, default=0) + 1):
        going = [own[lane] for lane in order if depths[lane] >= e]
        active = slice(len(going))
        Vector(t[active] for t in previous).copy_(Vector(t[active] for t in last))
        mean = _epoch(oracle, contexts, going, Vector(t[active].clone() for t in last), e, rates(e))
        Vector(t[active] for t in last).copy_(mean)
        if e == base:
            first = last.clone()
    back = torch.tensor(order).argsort().tolist()
    oracle.checks.finite("lower_grad", last, "A smaller lower_lr, or a larger smoothness, is the usual remedy")
    return Path(*(Vector(t[back] for t in points) for points in (first, previous, last)))


def _epoch(oracle: Oracle, contexts: Contexts, slots: list[int], z: Vector, e: int, rates: list[float]) -> Vector:
    steps, total = 2**e, z.zeros_like()
    with _moving(oracle, z) as (variables, gradient):
        sums = total if variables is z else total.lane(0)
        for start in range(0, steps, BLOCK):
            size = min(BLOCK, steps - start)
            batches = contexts.batches("lower", slots, PATH, e, start, times=size)
            for j, batch in enumerate(batches, start):
                with torch.no_grad():
                    torch._foreach_add_(sums, variables)
                if j < steps - 1:
                    step = gradient(batch)
                    with torch.no_grad():
                        torch._foreach_sub_(variables, step * rates)
    oracle.count("lower_grad", (steps - 1) * len(slots))
    return Vector(t / steps for t in total)


@contextmanager
def _moving(oracle: Oracle, z: Vector) -> Generator[tuple[Vector, Callable[[Any], Vector]]]:
    """The tensors to move and the gradient of g at them: the live y if there is one context, else the stack."""
    if len(z[0]) == 1:

        def alone(batch: Any) -> Vector:
            oracle.forget_casts()
            loss = oracle.dependent("lower", as_scalar("lower", oracle.g.loss(select(batch, 0))), oracle.y)
            gradients = torch.autograd.grad(loss, list(oracle.y), allow_unused=True)
            oracle.require_reached(gradients)
            return filled(gradients, oracle.y)

        with oracle.at(lower=z.lane(0)), oracle.buffers_kept(), torch.enable_grad():
            yield oracle.y, alone
        return
    for tensor in z:
        tensor.requires_grad_()
    loss = LaneLoss(oracle, "lower", z, alike=True)

    def together(batch: Any) -> Vector:
        oracle.forget_casts()
        total = oracle.dependent("lower", loss(batch), z)
        gradients = torch.autograd.grad(total, list(z), allow_unused=True)
        oracle.require_reached(gradients)
        return filled(gradients, z)

    with torch.enable_grad():
        yield z, together

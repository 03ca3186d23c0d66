"""Contexts, lower problems that are each met once: their draws, their levels, and one coupled lower solve for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..oracle.lanes import LaneFeatures, stacked
from ..oracle.oracle import Oracle, local_problem
from ..problem.objective import Sample
from ..problem.placement import to_device
from ..problem.random import Counters
from ..problem.tasks import draw, draw_apart, sample, select
from ..problem.vector import Vector
from ..pytree import tree_flatten, tree_unflatten
from .epoch_sgd import epoch_sgd

__all__ = ["Contexts", "CoupledPath", "coupled_path", "draw_levels", "level_probabilities"]

TASKS, LEVEL, ORDER, TRUNCATION, PATH, CROSS, UPPER, NEUMANN, POWER = range(9)  # purposes of random numbers
BLOCK = 128  # steps of an epoch whose batches are drawn at once


def level_probabilities(levels: int, base: int = 0) -> Tensor:
    r"""Return :math:`p_k = 2^{-(k - b)} / (1 - 2^{-(K - b)})` for k = b + 1, ..., K.

    Args:
        levels: K.
        base: b. Default: 0.
    """
    k = torch.arange(1, levels - base + 1, dtype=torch.float64, device="cpu")
    return 2**-k / (1 - 2.0 ** -(levels - base))


def draw_levels(count: int, levels: int, base: int, counters: Counters, *, systematic: bool) -> list[int]:
    """Draw levels with the probabilities of `level_probabilities`, by inverting the distribution function.

    ``systematic``: systematic sampling. The uniform numbers are evenly spaced, share one random shift and come in
    random order. Each level still has the right distribution, and the number of draws of a level hardly varies.
    """
    options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    if systematic:
        shift = torch.rand((), generator=counters.generator(LEVEL), **options)
        uniform = (torch.arange(count, **options) + shift) / count
        uniform = uniform[torch.randperm(count, generator=counters.generator(ORDER), device="cpu")]
    else:
        uniform = torch.rand(count, generator=counters.generator(LEVEL), **options)
    depth = 1 + (-torch.log2(1 - uniform * (1 - 2.0 ** -(levels - base)))).floor().long()
    return [base + min(k, levels - base) for k in depth.tolist()]


class Contexts:
    """Contexts drawn from a sampler, and their conditional draws, each from counters of its slot and purpose.

    Args:
        sampler: the `TaskSampler` that they are drawn from.
        count: number of contexts; their slots are 0, ..., count - 1.
        seed: decides all the draws: equal seeds give equal contexts and equal batches, in any order.
        lower_batch, upper_batch: rows per batch of a context; None, all of them. Default: 1.
        purpose: purpose of the contexts. Default: the estimate of a step.

    Attributes:
        tasks: the contexts that the sampler has drawn.
        counters: source of the random numbers.
    """

    def __init__(
        self,
        sampler: Any,
        count: int,
        seed: int,
        *,
        lower_batch: int | None = 1,
        upper_batch: int | None = 1,
        purpose: int = TASKS,
    ) -> None:
        self.sampler, self.count, self.counters = sampler, count, Counters(seed)
        self.sizes = {"lower": lower_batch, "upper": upper_batch}
        self.tasks = sample(sampler, count, self.counters.generator(purpose))
        self._all: dict[str, Any] = {}
        self._features: tuple[Vector, Sequence[int], Any] | None = None  # of all the lower data, at one x

    @property
    def deterministic(self) -> bool:
        """True if a lower batch is all the data of its context."""
        return self.sizes["lower"] is None

    def batches(self, level: str, slots: Sequence[int], *counter: int, times: int = 1) -> list[Any]:
        """Draw independent batches for these slots: ``times`` pytrees with leading dimension ``len(slots)``."""
        rows, index = self.sizes[level], torch.tensor(slots, device="cpu")
        if rows is None:
            if level not in self._all:
                generator = self.counters.generator(TASKS, 1)
                self._all[level] = draw(self.sampler, level, self.tasks, self.count, None, generator)
            return [select(self._all[level], index)] * times
        generators = (self.counters.generator(slot, *counter) for slot in slots)
        batch = draw_apart(self.sampler, level, select(self.tasks, index), times * rows, generators)
        leaves, structure = tree_flatten(batch)
        shape = len(slots), times, rows
        steps = [t.view(*shape, *t.shape[2:]).unbind(1) if isinstance(t, Tensor) else (t,) * times for t in leaves]
        return [tree_unflatten(list(each), structure) for each in zip(*steps, strict=True)]

    def heads(self, oracle: Oracle, slots: Sequence[int], *counter: int, times: int = 1) -> Iterator[Any]:
        """Yield lower batches as the loss takes them for derivatives in y alone, with their features as constants.

        Without features these are the batches themselves. Features of all the data are evaluated once for each x.
        """
        features = oracle.g.features
        batches = self.batches("lower", slots, *counter, times=times)
        if features is None:
            yield from batches
            return
        evaluate = LaneFeatures(oracle, "lower", features, shared_rng=True)
        for batch in batches:
            kept = self._features if self.deterministic else None
            if kept is None or kept[0] is not oracle.x or not {*slots} <= {*kept[1]}:
                with oracle.evaluating():
                    part = oracle.call(Sample(evaluate, (batch,), once=True), graph=False)
                kept = (oracle.x, list(slots), part)
                self._features = kept if self.deterministic else None
            yield (
                kept[2]
                if kept[1] == [*slots]
                else select(kept[2], torch.tensor([*map(kept[1].index, slots)], device="cpu"))
            )


@dataclass(frozen=True)
class CoupledPath:
    """Lower points of contexts that an estimate needs from their lower solves, stacked.

    Attributes:
        contexts: the contexts.
        slots: the contexts that have a lane here.
        depths: the number of epochs k of each.
        base_level: b.
        base: :math:`Y_b`.
        previous: :math:`Y_{k-1}`.
        last: :math:`Y_k`.
    """

    contexts: Contexts
    slots: Sequence[int]
    depths: Sequence[int]
    base_level: int
    base: Vector
    previous: Vector
    last: Vector


def coupled_path(
    oracle: Oracle,
    contexts: Contexts,
    start: Vector,
    depths: Sequence[int],
    rates: Callable[[int], Sequence[float]],
    *,
    slots: Sequence[int] | None = None,
    base_level: int = 0,
) -> CoupledPath:
    r"""Run EpochSGD once for every context, to its own depth; epoch e has :math:`2^e` steps and restarts from a mean.

    .. math:: z_{j+1} = z_j - \beta_e \nabla_y g(x, z_j; \eta_{e,j}), \qquad Y_e = 2^{-e} \sum_{j < 2^e} z_j .

    The epochs of a shallow run are the first ones of a deep run. In an epoch all contexts that take part in it advance
    together. The last step of an epoch is left out, because its result would not be used.

    Args:
        oracle: of one problem; costs :math:`2^{k+1} - 2 - k` lower gradients for a context of depth k.
        contexts: the contexts and their data.
        start: :math:`Y_0`, stacked, one lane for each of ``depths``.
        depths: number of epochs of each context.
        rates: epoch -> :math:`\beta_e`, one for each lower tensor.
        slots: the contexts that the lanes belong to. Default: the first ones.
        base_level: the level b whose mean is kept too. Default: 0.
    """
    own = [*range(len(depths))] if slots is None else [*slots]
    order = sorted(range(len(depths)), key=lambda lane: -depths[lane])
    first, previous, last = (_ordered(start, order) for _ in range(3))
    with oracle.session.buffers_kept():
        for e in range(1, max(depths, default=0) + 1):
            going = [own[lane] for lane in order if depths[lane] >= e]
            active = slice(len(going))
            before = Vector(t[active].clone() for t in last)
            Vector(t[active] for t in previous).copy_(before)
            Vector(t[active] for t in last).copy_(_epoch(oracle, contexts, going, before, e, rates))
            if e == base_level:
                first = last.clone()
    back = torch.tensor(order, device="cpu").argsort().tolist()
    oracle.checks.finite("lower_grad", last, "A smaller lower_lr, or a larger smoothness, is the usual remedy")
    points = (_ordered(part, back) for part in (first, previous, last))
    return CoupledPath(contexts, own, [*depths], base_level, *points)


def _ordered(lanes: Vector, order: Sequence[int]) -> Vector:
    """Return copies of the lanes in another order."""
    if len(order) == 1:
        return lanes.clone()
    index = to_device(order, lanes[0].device, torch.int64)
    return Vector(t[index] for t in lanes)


def _epoch(
    oracle: Oracle,
    contexts: Contexts,
    slots: list[int],
    start: Vector,
    e: int,
    rates: Callable[[int], Sequence[float]],
) -> Vector:
    """Return the means of one epoch of these contexts together."""
    blocks = ((done, min(BLOCK, 2**e - done)) for done in range(0, 2**e, BLOCK))
    heads = (head for done, size in blocks for head in contexts.heads(oracle, slots, PATH, e, done, times=size))
    alone = len(slots) == 1  # no stack, which would make a step slower
    problem = local_problem(oracle) if alone else stacked(oracle, start, shared_rng=True)

    def own() -> Sample:
        head = next(heads)
        return Sample(problem.g.loss, (select(head, 0) if alone else head,), once=True)

    (mean,) = epoch_sgd(problem, start.lane(0) if alone else start, 1, rates, own, first=e)
    return Vector(t.unsqueeze(0) for t in mean) if alone else mean

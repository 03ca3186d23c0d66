"""Contexts: lower problems of which each is met once. Their draws, their levels, and the coupled lower solve of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..oracle.lanes import LaneFeatures, one_of_many, stacked
from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.random import Counters
from ..problem.tasks import draw, draw_apart, sample, select
from ..problem.vector import Vector
from .epoch_sgd import epoch_sgd

__all__ = [
    "Asked",
    "Contexts",
    "CoupledPath",
    "DrawnContexts",
    "asked_by_path",
    "coupled_path",
    "draw_levels",
    "level_chances",
    "level_probabilities",
]

TASKS, LEVEL, ORDER, TRUNCATION, PATH, CROSS, UPPER, NEUMANN, POWER = range(9)  # what a random number is for
BLOCK = 128  # steps of an epoch whose batches are drawn at once


def level_probabilities(levels: int, base: int = 0) -> Tensor:
    r""":math:`p_k = 2^{-(k - b)} / (1 - 2^{-(K - b)})` for k = b + 1, ..., K.

    Args:
        levels: K.
        base: b. Default: 0.
    """
    return torch.tensor(level_chances(levels, base), dtype=torch.float64, device="cpu")


def level_chances(levels: int, base: int = 0) -> list[float]:
    """The same as plain numbers."""
    return [2.0**-k / (1 - 2.0 ** -(levels - base)) for k in range(1, levels - base + 1)]


def draw_levels(count: int, levels: int, base: int, counters: Counters, *, systematic: bool) -> list[int]:
    """Levels with the probabilities of `level_probabilities`, by inversion.

    Systematic: with evenly spaced uniforms that share one random shift, in random order: each level has the right
    distribution, and the numbers of them hardly vary.
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
    """Contexts drawn from a sampler, and their conditional draws: each from the counters of its slot and purpose.

    Args:
        sampler: where they come from, a `TaskSampler`.
        count: how many; their slots are 0, ..., count - 1.
        seed: decides all the draws: equal seeds give equal contexts and equal batches, in whatever order they are made.
        lower_batch, upper_batch: rows per batch of a context; None, all of them. Default: 1.
        purpose: what the contexts are for. Default: the estimate of a step.

    Attributes:
        tasks: what the sampler has drawn.
        counters: give the random numbers.
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
        """Whether the lower batches are all the data of a context."""
        return self.sizes["lower"] is None

    def batches(self, level: str, slots: Sequence[int], *counter: int, times: int = 1) -> list[Any]:
        """Independent batches for these slots: ``times`` pytrees with leading dimension ``len(slots)``."""
        if self.sizes[level] is None:
            return [select(self.all(level), torch.tensor(slots, device="cpu"))] * times
        leaves, structure = tree_flatten(self.stack(level, slots, *counter, times=times))
        steps = [leaf.unbind(1)[:times] if isinstance(leaf, Tensor) else (leaf,) * times for leaf in leaves]
        return [tree_unflatten(list(each), structure) for each in zip(*steps, strict=True)]

    def all(self, level: str) -> Any:
        """All the data of every context."""
        if level not in self._all:
            generator = self.counters.generator(TASKS, 1)
            self._all[level] = draw(self.sampler, level, self.tasks, self.count, None, generator)
        return self._all[level]

    def stack(self, level: str, slots: Sequence[int], *counter: int, times: int = 1) -> Any:
        """Independent batches for these slots as one pytree, with leading dimensions ``(len(slots), times, rows)``."""
        rows = self.sizes[level]
        assert rows is not None
        own = select(self.tasks, torch.tensor(slots, device="cpu"))
        generators = (self.counters.generator(slot, *counter) for slot in slots)
        batch = draw_apart(self.sampler, level, own, times * rows, generators)
        return tree_map(lambda t: t.view(len(slots), times, rows, *t.shape[2:]) if isinstance(t, Tensor) else t, batch)

    def lengths(self, slots: Sequence[int], most: int) -> Tensor:
        """A random number from 1, ..., ``most`` for each of these slots."""
        generator = self.counters.generator
        return 1 + torch.stack(
            [torch.randint(most, (), generator=generator(slot, TRUNCATION), device="cpu") for slot in slots]
        )

    def ahead(self, order: Sequence[int], asked: Iterable[Asked]) -> dict[str, Any]:
        """The batches that are asked of all contexts in this order: the data of `DrawnContexts`."""
        index = torch.tensor(order, device="cpu")
        found: dict[str, Any] = {"all": {}, "stacks": {}, "tasks": select(self.tasks, index)}
        for level, lanes, counter, times, drawn in asked:
            name = _name(level, counter)
            if self.sizes[level] is None:
                found["all"][level] = select(self.all(level), index)
            elif drawn:
                found["stacks"][name] = self.stack(level, [order[lane] for lane in lanes], *counter, times=drawn)
            if self.sizes[level] is not None and drawn < times:
                other = found["stacks"][_name(level, (CROSS,))]
                found["stacks"][name] = _filled(found["stacks"].get(name), other, times - drawn)
        return found

    def heads(self, oracle: Oracle, slots: Sequence[int], *counter: int, times: int = 1) -> Iterator[Any]:
        """Lower batches as the loss takes them where derivatives in y alone are wanted: their features, as constants.

        Without features these are the batches themselves. Those of all the data are evaluated once for each x.
        """
        features = oracle.g.features
        batches = self.batches("lower", slots, *counter, times=times)
        if features is None:
            yield from batches
            return
        evaluate = LaneFeatures(oracle, "lower", features, alike=True)
        for batch in batches:
            kept = self._features if self.deterministic else None
            if kept is None or kept[0] is not oracle.x or not {*slots} <= {*kept[1]}:
                with oracle.session.buffers_kept(), oracle.placed():
                    part = oracle.call(Sample(evaluate, (batch,), once=True), graph=False)
                kept = (oracle.x, list(slots), part)
                self._features = kept if self.deterministic else None
            yield (
                kept[2]
                if kept[1] == [*slots]
                else select(kept[2], torch.tensor([*map(kept[1].index, slots)], device="cpu"))
            )


class Asked(NamedTuple):
    """Batches that an estimate needs.

    Attributes:
        level: ``"lower"`` or ``"upper"``.
        lanes: of which contexts.
        counter: what they are for.
        times: how many.
        drawn: of which the first ones are looked at.
    """

    level: str
    lanes: Sequence[int]
    counter: tuple[int, ...]
    times: int
    drawn: int


def _name(level: str, counter: Sequence[int]) -> str:
    return " ".join(map(str, (level, *counter)))


def _filled(stack: Any, other: Any, missing: int) -> Any:
    """A stack with some more batches, which nobody looks at: repetitions of another one."""

    def longer(filling: Any, own: Any = None) -> Any:
        if not isinstance(filling, Tensor):
            return filling
        more = filling.expand(-1, missing, *filling.shape[2:])
        return more.clone() if own is None else torch.cat([own, more], 1)

    return tree_map(longer, *([other] if stack is None else [other, stack]))


class DrawnContexts(Contexts):
    """Contexts of which everything was drawn before.

    Args:
        data: from `Contexts.ahead`.
        count: how many.
        lower_batch, upper_batch: as they were then.
    """

    def __init__(self, data: dict[str, Any], count: int, *, lower_batch: int | None, upper_batch: int | None) -> None:
        self.count, self.tasks, self.sizes = count, data["tasks"], {"lower": lower_batch, "upper": upper_batch}
        self._all, self._features = data["all"], None
        self._stacks, self._lengths = data["stacks"], data.get("lengths")

    def stack(self, level: str, slots: Sequence[int], *counter: int, times: int = 1) -> Any:
        """Those that were drawn for this purpose."""
        return self._stacks[_name(level, counter)]

    def lengths(self, slots: Sequence[int], most: int) -> Tensor:
        """Those that were drawn."""
        assert isinstance(self._lengths, Tensor)
        return self._lengths


@dataclass(frozen=True)
class CoupledPath:
    """Lower points of contexts, stacked: those of the lower solve of each that an estimate needs.

    Attributes:
        contexts: the contexts.
        slots: those that have a lane here.
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
    r"""EpochSGD for every context, once, as deep as each needs; epoch e has :math:`2^e` steps and restarts from a mean.

    .. math:: z_{j+1} = z_j - \beta_e \nabla_y g(x, z_j; \eta_{e,j}), \qquad Y_e = 2^{-e} \sum_{j < 2^e} z_j .

    The epochs of a shallow run are the first ones of a deep run. In an epoch all contexts that take part in it advance
    together; the last step of an epoch, whose result would not be used, is not made.

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
    first, previous, last = (Vector(t[order] for t in start) for _ in range(3))
    with oracle.session.buffers_kept():
        for e in range(1, max(depths, default=0) + 1):
            going = [own[lane] for lane in order if depths[lane] >= e]
            before = Vector(t[: len(going)] for t in last)
            previous = _replaced(previous, before)
            last = _replaced(last, _epoch(oracle, contexts, going, before, e, rates))
            if e == base_level:
                first = last
    back = torch.tensor(order, device="cpu").argsort().tolist()
    oracle.checks.finite("lower_grad", last, "A smaller lower_lr, or a larger smoothness, is the usual remedy")
    points = (Vector(t[back] for t in part) for part in (first, previous, last))
    return CoupledPath(contexts, own, [*depths], base_level, *points)


def _replaced(stack: Vector, new: Vector) -> Vector:
    """Stacked tensors with these in place of the first lanes."""
    if len(new[0]) == len(stack[0]):
        return new
    return Vector(torch.cat([t, whole[len(t) :]]) for t, whole in zip(new, stack, strict=True))


def asked_by_path(depths: Sequence[int]) -> Iterator[Asked]:
    """The batches of a `coupled_path` of contexts with these depths, the deepest first."""
    for e in range(1, depths[0] + 1):
        going = range(sum(depth >= e for depth in depths))
        for done, size in _blocks(e):
            yield Asked("lower", going, (PATH, e, done), size, size)


def _blocks(e: int) -> Iterator[tuple[int, int]]:
    """The steps of an epoch whose batches are drawn at once: how many were made before, and their number."""
    return ((done, min(BLOCK, 2**e - done)) for done in range(0, 2**e, BLOCK))


def _epoch(
    oracle: Oracle,
    contexts: Contexts,
    slots: list[int],
    start: Vector,
    e: int,
    rates: Callable[[int], Sequence[float]],
) -> Vector:
    """The mean of one epoch of these contexts together."""
    heads = (head for done, size in _blocks(e) for head in contexts.heads(oracle, slots, PATH, e, done, times=size))
    if len(slots) == 1:  # no stack, which would make a step slower
        alone = one_of_many(oracle)

        def own() -> Sample:
            return Sample(oracle.g.loss, (select(next(heads), 0),), once=True)

        (mean,) = epoch_sgd(alone, start.lane(0), 1, rates, own, first=e)
        return Vector(t.unsqueeze(0) for t in mean)
    problem = stacked(oracle, start, alike=True)
    (mean,) = epoch_sgd(problem, start, 1, rates, lambda: Sample(problem.g.loss, (next(heads),), once=True), first=e)
    return mean

"""The losses at several points: stacked copies of y, and perhaps of x, evaluated together or one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ..problem.objective import Sample
from ..problem.placement import constant
from ..problem.random import preserve_rng
from ..problem.vector import Vector, as_variable, stack
from ..pytree import tree_leaves, tree_map
from . import batched
from .differentiable import custom_operations, products_of
from .hooks import on_copies
from .oracle import Oracle
from .point import afresh, none_to_zeros
from .stacks import mapped, mapped_over
from .substitution import Substitution

__all__ = ["Copies"]

FEW = 3  # points that a loop evaluates as fast as vmap on a CPU, or up to twice as fast

Samples = Sample | Sequence[Sample]  # one for all points, or one for each
Term = tuple[str, Samples, Sequence[float]]  # level of a loss, its samples, and its weight at each point


class Copies:
    r"""The points :math:`(x_j, y_j)` for j = 1, ..., n.

    Args:
        oracle: evaluates the losses; its options say how many points it evaluates together.
        lower: copies of y, tensors of shape (n, ...).
        upper: copies of x, tensors of shape (n, ...). Default: the oracle's x for all points.
        few: a loop may evaluate up to three points where it is faster than vmap, which is on a CPU.
    """

    def __init__(self, oracle: Oracle, lower: Vector, upper: Vector | None = None, *, few: bool = False) -> None:
        self.oracle, self.lower, self.upper = oracle, lower, upper
        whole = oracle.session.options.vectorize is True and oracle.lanes is None
        self._apart = few and whole and len(lower[0]) <= FEW and oracle.device.type == "cpu"
        self._live = oracle.live_y if upper is None else Vector((*oracle.live_y, *oracle.live_x))
        self._kind = "copies" if oracle.lanes is None else "copies of tasks"

    def __len__(self) -> int:
        return len(self.lower[0])

    def __getitem__(self, part: slice) -> Copies:
        if part == slice(0, len(self)):
            return self
        upper = None if self.upper is None else Vector(t[part] for t in self.upper)
        return Copies(self.oracle, Vector(t[part] for t in self.lower), upper)

    def values(self, level: str, sample: Sample) -> Tensor:
        """Return the values of a loss at all points, shape (n,)."""
        self.oracle.count("loss", len(self))
        found = []
        for own in _parts(sample):
            (values,), _ = self._slopes_of_parts("", [(level, own, [1.0] * len(self))])
            found.append(values)
        (mean,) = self.oracle.averaged(_mean(found))
        return mean  # type: ignore[no-any-return]

    def lower_slopes(self, *terms: Term) -> tuple[list[Tensor], Vector]:
        r"""Return the gradient of a weighted sum of losses in each :math:`y_j`.

        Args:
            terms: a loss each: its level, its samples, and its weights.

        Returns:
            For each loss its values at the points (0 where a loop leaves it out because its weight is 0), and the
            gradients, shape (n, ...).
        """
        return self._slopes("lower", terms)

    def upper_slope(self, *terms: Term) -> tuple[list[Tensor], Vector]:
        """Return the values of the losses at all points, and the gradient in the oracle's x of their weighted sum."""
        assert self.upper is None
        return self._slopes("upper", terms)

    def _slopes(self, wrt: str, terms: Sequence[Term]) -> tuple[list[Tensor], Vector]:
        oracle, n = self.oracle, len(self)
        for level, _, weights in terms:
            needed = n if level == "lower" else sum([weight != 0 for weight in weights])
            oracle.count(f"{level}_grad", needed)
            if wrt == "upper":
                oracle.count("loss", n - needed)
        parts = [_parts(samples) for _, samples, _ in terms]
        values: list[list[Tensor]] = [[] for _ in terms]
        gradients = []
        for i in range(max([len(own) for own in parts])):
            present = [k for k, own in enumerate(parts) if i < len(own)]
            found, gradient = self._slopes_of_parts(wrt, [_part_of(terms[k], parts[k], i) for k in present])
            gradients.append(gradient)
            for k, value in zip(present, found, strict=True):
                values[k].append(value)
        for level, samples, _ in terms:
            if level == "lower":  # all of it, not its last part
                oracle.session.lower_sample = samples if isinstance(samples, Sample) else samples[-1]
            oracle.session.note_use(level, oracle, samples if isinstance(samples, Sample) else samples[0])
        *means, total = oracle.averaged(*[_mean(found) for found in values], reduce(add, gradients))
        return means, total

    def _slopes_of_parts(self, wrt: str, terms: Sequence[Term]) -> tuple[list[Tensor], Vector]:
        oracle = self.oracle
        parts = batched.run(
            oracle.session,
            len(self),
            partial(self._together, wrt, terms),
            partial(self._alone, wrt, terms),
            possible=not oracle.sharded and not self._apart and all([_can_be_stacked(own) for _, own, _ in terms]),
            lanes=oracle.lanes is not None,
            new=self._new(terms),
            first=partial(self._require_redirection, terms),
        )
        if len(parts) == 1:
            return parts[0]
        values, gradients = zip(*parts, strict=True)
        joined = [torch.cat(own) for own in zip(*values, strict=True)]
        if wrt == "upper":
            return joined, reduce(add, gradients)
        return joined, Vector(torch.cat(ts) for ts in zip(*gradients, strict=True))

    # ------------------------------------------------------------------------------------------------ together or alone

    def _new(self, terms: Sequence[Term]) -> frozenset[str]:
        """Return the losses that are not known to work under vmap."""
        return frozenset([f"{level} {self._kind}" for level, _, _ in terms]) - self.oracle.session.found.vmapped

    def _require_redirection(self, terms: Sequence[Term]) -> None:
        """Raise if a loss reads parameters where they cannot be replaced by copies."""
        at = [t[0] for t in (self.lower if self.upper is None else (*self.lower, *self.upper))]
        for level, samples, _ in terms:
            shared = isinstance(samples, Sample)
            sample = samples if isinstance(samples, Sample) else afresh(samples[0])
            with self.oracle.placed():
                batched.require_redirection(
                    self.oracle,
                    f"{level} {self._kind}",
                    self._live,
                    at,
                    partial(self._replaced, level, sample, shared),
                    "copies of y, as TorchScript modules do, so a loop evaluates the copies; pass the plain module to "
                    "evaluate them together",
                )

    def _replaced(self, level: str, sample: Sample, shared: bool, values: Sequence[Tensor]) -> Tensor:
        """Return a loss at these values; only a shared sample replays the random numbers of its first evaluation."""
        with nullcontext() if shared else preserve_rng(self.oracle.device), Substitution(self._live, values):
            return self.oracle.value(level, sample)

    # ------------------------------------------------------------------------------------------------ evaluations

    def _asks(self, wrt: str, terms: Sequence[Term]) -> bool:
        """Return True if only the values of a loss are needed, whose dependencies are not known."""
        return not wrt and terms[0][0] not in self.oracle.session.found.dependency_checked

    def _note_dependency(self, level: str, values: Tensor, x: Vector | None, y: Vector) -> None:
        """Look once at the dependencies of a loss if only its values are needed."""
        if values.requires_grad:
            self.oracle.session.dependent(level, values, y, x)
        self.oracle.session.found.dependency_checked |= {level}

    def _together(self, wrt: str, terms: Sequence[Term], part: slice) -> tuple[list[Tensor], Vector]:
        """Evaluate some points by one vmap of each loss and one backward pass."""
        oracle, points, new = self.oracle, self[part], bool(self._new(terms))
        asks = self._asks(wrt, terms)
        y = Vector(as_variable(t, wrt == "lower" or asks) for t in points.lower)

        def evaluate(level: str, samples: Samples, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
            values, constants = points._vmapped(wrt, level, samples, x, y)
            if new:
                batched.no_large_convolutions(values)
            if not wrt:
                if asks:
                    self._note_dependency(level, values, None if constants else x, y)
                return values, values
            if wrt == "lower":
                oracle.session.dependent(level, values, y, None if constants else x)
                if not constants:
                    oracle.session.reaching(level, values, y, x)
            weighted = values if set(weights) == {1.0} else values * constant(weights, values)
            return values, weighted.sum()

        with oracle.placed() as (x, _), torch.set_grad_enabled(bool(wrt) or asks):
            x = points._variables(x)
            return self._collected(wrt, [_at(term, part) for term in terms], x, y, evaluate)

    def _alone(self, wrt: str, terms: Sequence[Term], j: int) -> tuple[list[Tensor], Vector]:
        """Evaluate one point, which is put into the live tensors."""
        here = self.oracle.at(None if self.upper is None else self.upper.lane(j), self.lower.lane(j))
        asks = self._asks(wrt, terms)

        def evaluate(level: str, samples: Samples, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
            sample, (weight,) = samples if isinstance(samples, Sample) else samples[0], weights
            if not wrt:
                value = here.value(level, sample, graph=asks)
                if asks:
                    self._note_dependency(level, value, x if sample.features is None else None, y)
                return value, value
            if not weight and wrt == "lower":
                zero = torch.zeros((), dtype=here.y[0].dtype, device=here.device)
                return zero, zero
            if not weight:
                value = here.value(level, sample, graph=False)
                return value, value * weight
            # Features at the one x are constants for y; at other values of x they are needed only once.
            constants = here.frozen(level, sample) if wrt == "lower" and here.session.found.reaches_upper else None
            value = here.evaluated(level, sample, x, y, features=constants)
            if wrt == "lower" and constants is None and not here.sharded:
                here.session.reaching(level, value, y, x)
            return value, value * weight

        with here.placed() as (x, y), torch.set_grad_enabled(bool(wrt) or asks):
            values, gradient = self._collected(wrt, [_at(term, slice(j, j + 1)) for term in terms], x, y, evaluate)
        return [value.reshape(1) for value in values], stack([gradient]) if wrt == "lower" else gradient

    def _collected(
        self,
        wrt: str,
        terms: Sequence[Term],
        x: Vector,
        y: Vector,
        evaluate: Callable[[str, Samples, Sequence[float]], tuple[Tensor, Tensor]],
    ) -> tuple[list[Tensor], Vector]:
        """Return the values of the losses, and the gradient of their sum; ``evaluate`` returns values and their sum.

        ``wrt`` is the level to differentiate in; empty: in none.
        """
        session, found = self.oracle.session, []
        gradient: Vector | None = None
        total: Tensor | None = None
        levels: list[str] = []
        for i, (level, samples, weights) in enumerate(terms, 1):
            with session.buffers_kept() as kept:
                values, weighted = evaluate(level, samples, weights)
                found.append(values.detach())
                if not wrt:
                    continue
                if wrt == level == "lower" and session.found.products is None:
                    session.found.products = products_of(weighted)
                total, levels = weighted if total is None else total + weighted, [*levels, level]
                unknown = wrt == level == "lower" and not session.found.reaches_lower
                # A graph that has saved buffers is not valid once they are restored, and that of sharded parameters not
                # after the next evaluation. Backwards in Python, as of compiled modules, may refuse a second call. Once
                # apart they stay so: a run that is loaded, which looks again, would round otherwise.
                if self.oracle.sharded or kept.moved() or (unknown and custom_operations(total)):
                    session.found.apart = True
                if i == len(terms) or session.found.apart:
                    shared = wrt == "upper" and any(map(_has_graph, terms))  # all points need the graph of a batch
                    own = self._gradient(wrt, levels, total, x, y, again=shared)
                    gradient = own if gradient is None else gradient + own
                    total, levels = None, []
                elif unknown:  # the sum does not show it
                    self._note_reached(levels, self.oracle.differentiate(total, (*y, *x), again=True), y)
        return found, Vector(()) if gradient is None else gradient

    def _gradient(self, wrt: str, levels: Sequence[str], total: Tensor, x: Vector, y: Vector, *, again: bool) -> Vector:
        oracle, session = self.oracle, self.oracle.session
        variables = x if wrt == "upper" else y
        if not total.requires_grad:  # `Session.conclude` decides whether that is a mistake
            return variables.zeros_like()
        if wrt == "upper":
            gradients = oracle.differentiate(total, x, again=again)
            session.note_reached(gradients)
            return none_to_zeros(gradients, x)
        gradients = oracle.differentiate(total, y if session.found.reaches_upper else (*y, *x))
        self._note_reached(levels, gradients, y)
        found = none_to_zeros(gradients[: len(y)], y)
        if session.hooked and y[0] is not oracle.live_y[0]:
            return Vector(on_copies(oracle.live_y, found))
        return found

    def _note_reached(self, levels: Sequence[str], gradients: Sequence[Tensor | None], y: Vector) -> None:
        """Note which tensors of y, and of x if their gradients follow, the losses depend on; g must depend on y."""
        session = self.oracle.session
        session.note_reached(gradients[len(y) :])
        if "lower" in levels:
            session.require_reached(gradients[: len(y)], self.oracle.lower_names)

    # ------------------------------------------------------------------------------------------------ at the points

    def _variables(self, x: Vector) -> Vector:
        """Return the copies of x, as variables until a loss is known to depend on x; without copies, x."""
        found = self.oracle.session.found
        if self.upper is None:
            return x
        known = found.reaches_upper and len(found.dependency_checked) == 2
        return self.upper if known else Vector(map(as_variable, self.upper))

    def _vmapped(self, wrt: str, level: str, samples: Samples, x: Vector, y: Vector) -> tuple[Tensor, bool]:
        """Return the values, and True if features are constants, so that the graph does not show all dependencies.

        ``wrt`` is the level that values are differentiated in; empty: in none.
        """
        oracle, live, values = self.oracle, self._live, y if self.upper is None else Vector((*y, *x))
        if isinstance(samples, Sample):
            shared, sample, batch = True, samples, ()
            features, are_stacks = self._features(wrt, level, sample, values)
        else:
            shared, sample = False, samples[0]
            batch = tree_map(lambda *leaves: torch.stack(leaves), *(one.arguments for one in samples))
            features, are_stacks = None, False
            if wrt == "lower":
                oracle.check_features(level, afresh(sample))
        own_features = None if shared or sample.features is None else sample.features.loss

        def at(mine: Any, *own: Tensor) -> Tensor:
            with Substitution(live, own):
                if shared:
                    return oracle.value(level, sample, features=mine if are_stacks else features)
                return oracle.value(level, Sample(sample.loss, mine, once=True, features=own_features))

        known, randomness = f"{level} {self._kind}" in oracle.session.found.vmapped, "same" if shared else "different"
        own_batch = features if are_stacks else batch
        return mapped_over(at, own_batch, values, len(self), randomness, known=known), features is not None

    def _features(self, wrt: str, level: str, sample: Sample, values: Sequence[Tensor]) -> tuple[Any, bool]:
        """Return features of a shared sample, evaluated outside the vmap over y, and whether each copy has its own."""
        oracle, live = self.oracle, self._live
        if sample.features is None:
            return None, False
        if wrt == level == "lower":
            oracle.check_features(level, sample)
        if self.upper is None:
            if wrt == "upper":
                return oracle.call(sample.features), False  # at the one x, for all copies
            return oracle.frozen(level, sample), False
        inner = sample.features
        watched = torch.is_grad_enabled() and not oracle.session.found.reaches_upper

        def at(*values: Tensor) -> Any:
            with Substitution(live, values):
                return oracle.call(inner, graph=watched)

        evaluate = partial(mapped, at, values, len(self), "same", known=False)
        if watched:
            return evaluate(), True
        return oracle.frozen(level, sample, self.upper, evaluate), True


def _parts(samples: Samples) -> Sequence[Samples]:
    return samples.parts if isinstance(samples, Sample) and samples.parts is not None else [samples]


def _has_graph(term: Term) -> bool:
    """Return True if a batch of a term was computed with gradients."""
    _, samples, _ = term
    batches = [own.arguments for own in ([samples] if isinstance(samples, Sample) else samples)]
    return any([isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(batches)])


def _part_of(term: Term, parts: Sequence[Samples], i: int) -> Term:
    """Return a loss on the i-th part of its samples, with its share of the weights."""
    level, _, weights = term
    return level, parts[i], weights if len(parts) == 1 else [weight / len(parts) for weight in weights]


def _at(term: Term, part: slice) -> Term:
    """Return a loss at some of the points."""
    level, samples, weights = term
    return level, samples if isinstance(samples, Sample) else samples[part], weights[part]


def _mean(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack([*values]).mean(0)


def _can_be_stacked(samples: Samples) -> bool:
    """Return True if samples that differ between copies can be stacked (a data set's last batch may be smaller)."""
    if isinstance(samples, Sample):
        return True
    shapes = [[getattr(leaf, "shape", None) for leaf in tree_leaves(one.arguments)] for one in samples]
    return all([shape == shapes[0] for shape in shapes])

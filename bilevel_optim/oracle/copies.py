"""Both losses at several points: stacked copies of y, and perhaps of x, evaluated together or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..problem import random
from ..problem.objective import Sample
from ..problem.placement import constant
from ..problem.vector import Vector, as_variable, stack
from ..pytree import tree_leaves, tree_map
from . import batched
from .buffers import Kept
from .differentiable import products_of
from .first_order import none_to_zeros
from .oracle import Oracle
from .substitution import Substitution

__all__ = ["Copies", "evaluate_copies"]

Samples = Sample | Sequence[Sample]


class Copies(NamedTuple):
    """Values of f and g per copy (NaN where not needed), the gradient of a weighted sum, and that sum (``total``)."""

    upper: Tensor
    lower: Tensor
    gradient: Vector
    total: Tensor


@dataclass
class _WeightedPoints:
    """The n points of an evaluation, with their weights and samples."""

    lower: Vector
    upper: Vector | None
    f_weights: Sequence[float]
    g_weights: Sequence[float]
    f_sample: Samples
    g_sample: Samples
    wrt: str

    def __getitem__(self, part: slice) -> _WeightedPoints:
        if part == slice(0, len(self)):
            return self
        f, g = self.f_sample, self.g_sample
        return _WeightedPoints(
            Vector(t[part] for t in self.lower),
            None if self.upper is None else Vector(t[part] for t in self.upper),
            self.f_weights[part],
            self.g_weights[part],
            f if isinstance(f, Sample) else f[part],
            g if isinstance(g, Sample) else g[part],
            self.wrt,
        )

    def __len__(self) -> int:
        return len(self.f_weights)

    @property
    def needs_f(self) -> bool:
        return self.wrt != "lower" or any(self.f_weights)

    @property
    def needs_g(self) -> bool:
        return self.wrt != "nothing"


def evaluate_copies(
    oracle: Oracle,
    copies: Vector,
    upper_weights: Sequence[float],
    lower_weights: Sequence[float],
    upper_sample: Samples,
    lower_sample: Samples,
    *,
    wrt: str,
    upper_copies: Vector | None = None,
) -> Copies:
    r"""Compute the gradient of :math:`\sum_j a_j f(x_j, y_j) + b_j g(x_j, y_j)` over stacked copies :math:`y_j`.

    Args:
        oracle: evaluates the losses; its options say whether copies are vectorised.
        copies: tensors of shape (n, ...): n copies of y.
        upper_weights: :math:`a_j`, n numbers.
        lower_weights: :math:`b_j`, n numbers.
        upper_sample: one sample shared by all copies, or n samples.
        lower_sample: the same for g.
        wrt: ``"lower"``: gradients of shape (n, ...), one for each copy. ``"upper"``: one gradient in x, and the values
            of f at every copy, also where :math:`a_j = 0`. ``"nothing"``: only the values of f.
        upper_copies: tensors of shape (n, ...): n copies of x, not with ``wrt="upper"``. Default: the oracle's x.
    """
    n = len(upper_weights)
    needed = sum(a != 0 for a in upper_weights)
    if wrt == "nothing":
        oracle.count("loss", n)
    else:
        oracle.count("lower_grad", n)
        oracle.count("upper_grad", needed)
        if wrt == "upper":
            oracle.count("loss", n - needed)
    if wrt != "nothing":
        oracle.session.lower_sample = lower_sample if isinstance(lower_sample, Sample) else lower_sample[-1]
    points = _WeightedPoints(copies, upper_copies, upper_weights, lower_weights, upper_sample, lower_sample, wrt)
    pieces = [_evaluated(oracle, piece) for piece in _pieces(points)]
    return Copies(*oracle.averaged(*(pieces[0] if len(pieces) == 1 else _summed(pieces, points))))


def _parts(samples: Samples) -> Sequence[Samples]:
    return samples.parts if isinstance(samples, Sample) and samples.parts is not None else [samples]


def _pieces(points: _WeightedPoints) -> list[_WeightedPoints]:
    """Return the points once for each part of the samples, with weights that add up to those of the whole."""
    f, g = _parts(points.f_sample), _parts(points.g_sample)
    if len(f) == len(g) == 1:
        return [points]
    return [
        replace(
            points,
            f_sample=f[i % len(f)],
            g_sample=g[i % len(g)],
            f_weights=[a / len(f) if i < len(f) else 0.0 for a in points.f_weights],
            g_weights=[b / len(g) if i < len(g) else 0.0 for b in points.g_weights],
        )
        for i in range(max(len(f), len(g)))
    ]


def _summed(pieces: list[Copies], points: _WeightedPoints) -> Copies:
    """Combine the results for parts of the samples: means of the values, and sums of the gradients."""
    f, g = len(_parts(points.f_sample)), len(_parts(points.g_sample))
    gradient = pieces[0].gradient
    for piece in pieces[1:] if gradient else ():  # empty if only values are needed
        gradient = gradient + piece.gradient
    return Copies(
        torch.stack([piece.upper for piece in pieces[:f]]).mean(0),
        torch.stack([piece.lower for piece in pieces[:g]]).mean(0),
        gradient,
        torch.stack([piece.total for piece in pieces]).sum(),
    )


def _evaluated(oracle: Oracle, points: _WeightedPoints) -> Copies:
    """Evaluate all points together, in chunks, or one by one."""
    found, n, wrt = oracle.session.found, len(points), points.wrt
    upper_sample, lower_sample = points.f_sample, points.g_sample
    parts = batched.run(
        oracle.session,
        n,
        lambda part: _together(oracle, points[part]),
        lambda j: _alone(oracle, points[slice(j, j + 1)]),
        possible=not oracle.sharded and _can_be_stacked(upper_sample, lower_sample),
        first=None if found.vmapped else lambda: _require_substitution(oracle, points),
    )
    found.vmapped |= n > 1 and found.fallback is None and oracle.session.options.at_once(n) > 1
    return _joined(parts, wrt)


def _require_substitution(oracle: Oracle, points: _WeightedPoints) -> None:
    """Raise if the result depends on the values of the live tensors: a loss then reads them where torch cannot see it.

    TorchScript modules do, for instance. Checked once in the life of an optimizer, and not counted.
    """
    pair = points[slice(0, 2)]
    shared = isinstance(pair.f_sample, Sample)
    xi, zeta = (s if isinstance(s, Sample) else _again(s[0]) for s in (pair.f_sample, pair.g_sample))
    pair = _WeightedPoints(pair.lower, pair.upper, [1.0, 1.0], [1.0, 1.0], xi, zeta, "lower")
    session, results = oracle.session, []
    before = session.found.dependency_checked, session.found.ignores_other_level, session.depends_on_something.copy()
    for factor, shift in ((1.0, 0.0), (1.1, 0.1)):
        y = Vector(t * factor + shift for t in pair.lower.lane(0))
        x = None if pair.upper is None else Vector(t * factor + shift for t in pair.upper.lane(0))
        # Only shared samples replay the random numbers of their first evaluation.
        with nullcontext() if shared else random.preserve_rng(oracle.device):
            values = _together(oracle.at(x, y), pair)
        results.append(Vector((values.upper, values.lower, *values.gradient)))
    # Discard these findings: if f is not needed, its sample is one of g.
    session.found.dependency_checked, session.found.ignores_other_level, session.depends_on_something = before
    # Non-finite values prove nothing here; the finite check reports them.
    if (results[0] - results[1]).norm() > 1e-5 * results[0].norm():
        raise RuntimeError(
            "a loss reads parameters in a way that cannot be redirected to copies of y, as TorchScript modules do, so "
            "a loop evaluates the copies; pass the plain module to evaluate them together"
        )


def _again(sample: Sample) -> Sample:
    return Sample(sample.loss, sample.arguments, features=None if sample.features is None else sample.features.loss)


def _can_be_stacked(*groups: Samples) -> bool:
    """Return True if samples that differ between copies can be stacked (a data set's last batch may be smaller)."""
    for group in groups:
        if not isinstance(group, Sample):
            shapes = [[getattr(leaf, "shape", None) for leaf in tree_leaves(one.arguments)] for one in group]
            if any(shape != shapes[0] for shape in shapes):
                return False
    return True


def _together(oracle: Oracle, points: _WeightedPoints) -> Copies:
    """Evaluate all the points by one vmap of each loss and one backward pass."""
    wrt, session = points.wrt, oracle.session
    watched = wrt == "nothing" and "upper" not in session.found.dependency_checked
    y = Vector(as_variable(t, wrt == "lower" or watched) for t in points.lower)
    with (
        oracle.placed() as (variables, _),
        batched.no_slow_batching(look=not session.found.vmapped),
        torch.set_grad_enabled(wrt != "nothing" or watched),
    ):
        x = variables if points.upper is None else _watched(oracle, points.upper)
        if not points.needs_g:
            with session.buffers_kept():
                return _only_values(_values(oracle, "upper", points.f_sample, points, x, y))
        wanted = y if wrt == "lower" else x
        with session.buffers_kept() as kept:
            g = _values(oracle, "lower", points.g_sample, points, x, y)
            _look(oracle, g, y, None if points.upper is None else x, wrt)
            if not session.found.vmapped:
                batched.no_large_convolutions(g)
            total = (g if set(points.g_weights) == {1.0} else g * constant(points.g_weights, g)).sum()
            gradient, total = _at_once(oracle, total, wanted, wrt, kept)
        if not points.needs_f:
            f = torch.full_like(g, torch.nan)
            gradient = _gradient(oracle, total, wanted, wrt) if gradient is None else gradient
        else:
            with session.buffers_kept():
                f = _values(oracle, "upper", points.f_sample, points, x, y)
                total = total + (f * constant(points.f_weights, f)).sum()
                gradient = _added(gradient, _gradient(oracle, total, wanted, wrt))
    return Copies(f.detach(), g.detach(), gradient, total.detach())


def _at_once(oracle: Oracle, total: Tensor, variables: Vector, wrt: str, kept: Kept) -> tuple[Vector | None, Tensor]:
    """Return the gradient of g alone, and its value without a graph, if that graph cannot last until f is evaluated."""
    # Sharded parameters: the backward pass of a joint graph would need what the second evaluation has dropped.
    if oracle.sharded or kept.moved():
        return _gradient(oracle, total, variables, wrt, of_lower=True), total.detach()
    return None, total


def _added(gradient: Vector | None, more: Vector) -> Vector:
    return more if gradient is None else gradient + more


def _only_values(f: Tensor) -> Copies:
    f = f.detach()
    return Copies(f, torch.full_like(f, torch.nan), Vector(()), f.sum())


def _watched(oracle: Oracle, upper: Vector) -> Vector:
    """Return the copies of x, as variables until a loss is known to depend on x."""
    found = oracle.session.found
    return upper if found.reaches_upper and len(found.dependency_checked) == 2 else Vector(map(as_variable, upper))


def _values(oracle: Oracle, level: str, samples: Samples, points: _WeightedPoints, x: Vector, y: Vector) -> Tensor:
    """Return values of one loss at every point; x are the copies, or the variables of the one x."""
    live, values = [*oracle.live_y], [*y]
    if points.upper is not None:
        live, values = [*live, *oracle.live_x], [*values, *x]
    shared = isinstance(samples, Sample)
    sample = samples if isinstance(samples, Sample) else Sample(samples[0].loss)
    part, part_dims = _features(oracle, level, sample, points, live, values) if shared else (None, None)
    batch = () if isinstance(samples, Sample) else _stacked_arguments(samples)
    features = None if isinstance(samples, Sample) or samples[0].features is None else samples[0].features.loss

    def at(own: Any, part: Any, *values: Tensor) -> Tensor:
        with Substitution(live, values):
            if shared:
                return oracle.value(level, sample, features=part)
            return oracle.value(level, Sample(sample.loss, own, once=True, features=features))

    results: Tensor = vmap(
        at,
        in_dims=(0 if batch else None, part_dims, *[0] * len(values)),
        randomness="same" if shared else "different",
    )(batch, part, *values)
    if points.wrt == "upper" or not torch.is_grad_enabled():
        return results
    if points.wrt == "nothing" and not results.requires_grad:  # values are enough
        oracle.session.found.dependency_checked |= {level}
        return results
    whole = part is None and features is None
    results = oracle.session.dependent(level, results, y, x if whole else None)
    return oracle.session.reaching(level, results, y, x) if part is None else results


def _features(
    oracle: Oracle,
    level: str,
    sample: Sample,
    points: _WeightedPoints,
    live: Sequence[Tensor],
    values: Sequence[Tensor],
) -> tuple[Any, Any]:
    """Return features of a shared sample, evaluated outside the vmap over y, and their vmap dimension."""
    if sample.features is None:
        return None, None
    if points.wrt == "lower" and level == "lower":
        oracle.check_features(level, sample)
    if points.upper is None:
        if points.wrt == "upper":
            return oracle.call(sample.features), None  # at the one x, for all copies
        return oracle.frozen(level, sample), None
    inner = sample.features
    watched = torch.is_grad_enabled() and not oracle.session.found.reaches_upper

    def at(*values: Tensor) -> Any:
        with Substitution(live, values):
            return oracle.call(inner, graph=watched)

    def evaluate() -> Any:
        return vmap(at, randomness="same")(*values)

    if watched:
        return evaluate(), 0
    return oracle.frozen(level, sample, points.upper, evaluate), 0


def _stacked_arguments(samples: Sequence[Sample]) -> tuple[Any, ...]:
    stacked: tuple[Any, ...] = tree_map(lambda *leaves: torch.stack(leaves), *(one.arguments for one in samples))
    return stacked


def _alone(oracle: Oracle, point: _WeightedPoints) -> Copies:
    """Evaluate a single point."""
    (a,), (b,), wrt, session = point.f_weights, point.g_weights, point.wrt, oracle.session
    xi = point.f_sample if isinstance(point.f_sample, Sample) else point.f_sample[0]
    zeta = point.g_sample if isinstance(point.g_sample, Sample) else point.g_sample[0]
    here = oracle.at(None if point.upper is None else point.upper.lane(0), point.lower.lane(0))
    with here.placed() as (x, y):
        if wrt == "nothing":
            with session.buffers_kept():
                if "upper" in session.found.dependency_checked:
                    return _only_values(here.value("upper", xi, graph=False).reshape(1))
                f = here.value("upper", xi)
            if f.requires_grad:
                session.dependent("upper", f, y, x if xi.features is None else None)
            else:  # values are enough
                session.found.dependency_checked |= {"upper"}
            return _only_values(f.reshape(1))
        if wrt == "lower":
            here.check_features("lower", zeta)
        # Features at the one x are constants for y; at other values of x they are needed only once.
        frozen = wrt == "lower" and session.found.reaches_upper
        watched = wrt == "lower" and not here.sharded and zeta.features is xi.features is None
        variables = y if wrt == "lower" else x
        with session.buffers_kept() as kept:
            part = here.frozen("lower", zeta) if frozen else None
            g = here.evaluated("lower", zeta, x, y, features=part)
            if watched:
                session.reaching("lower", g, y, x)
            _look(here, g, y, x, wrt)
            gradient, total = _at_once(here, b * g, variables, wrt, kept)
        with session.buffers_kept():
            if a:
                part = here.frozen("upper", xi) if frozen else None
                f = here.evaluated("upper", xi, x, y, features=part)
                if watched:
                    session.reaching("upper", f, y, x)
                total = total + a * f
            elif wrt == "upper":
                f = here.value("upper", xi, graph=False)
            else:
                f = torch.full_like(g, torch.nan)
            if gradient is None or a:
                gradient = _added(gradient, _gradient(here, total, variables, wrt))
    if wrt == "lower":
        gradient = stack([gradient])
    return Copies(f.detach().reshape(1), g.detach().reshape(1), gradient, total.detach())


def _look(oracle: Oracle, g: Tensor, y: Vector, x: Vector | None, wrt: str) -> None:
    """In the first step, differentiate g alone: its sum with f does not show what g depends on."""
    if wrt != "lower" or oracle.sharded:
        return
    session = oracle.session
    if session.found.products is None and g.requires_grad:
        session.found.products = products_of(g)
    if not session.found.reaches_lower:
        gradients = oracle.differentiate(g.sum(), y, again=True)
        session.require_reached(gradients, oracle.lower_names)
    if x is not None and not session.found.reaches_upper:
        session.note_reached(oracle.differentiate(g.sum(), x, again=True))


def _gradient(oracle: Oracle, total: Tensor, variables: Vector, wrt: str, *, of_lower: bool = False) -> Vector:
    if wrt == "lower":
        if not total.requires_grad:  # f of x alone, and g has been differentiated before
            return variables.zeros_like()
        gradients = oracle.differentiate(total, variables)
        if of_lower:  # g alone shows its dependencies
            oracle.session.require_reached(gradients, oracle.lower_names)
        else:
            oracle.session.note_unreached(gradients)
        return none_to_zeros(gradients, variables)
    if not total.requires_grad:  # neither loss depends on x; `Session.conclude` decides whether that is a mistake
        return oracle.x.zeros_like()
    gradients = oracle.differentiate(total, variables)
    oracle.session.note_reached(gradients)
    return none_to_zeros(gradients, oracle.x)


def _joined(parts: Sequence[Copies], wrt: str) -> Copies:
    if len(parts) == 1:
        return parts[0]
    if wrt != "upper":
        gradient = Vector(torch.cat(ts) for ts in zip(*(part.gradient for part in parts), strict=True))
    else:
        gradient = parts[0].gradient
        for part in parts[1:]:
            gradient = gradient + part.gradient
    total = torch.stack([part.total for part in parts]).sum()
    return Copies(torch.cat([p.upper for p in parts]), torch.cat([p.lower for p in parts]), gradient, total)

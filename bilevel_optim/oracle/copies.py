"""Both losses at several points: stacked copies of y, and perhaps of x, under one ``vmap``, in chunks, or in a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from ..problem.objective import Sample
from ..problem.vector import Vector, stack
from .oracle import Oracle, filled
from .substitution import Substitution

__all__ = ["Copies", "evaluate_copies", "lanes_at_once"]

Samples = Sample | Sequence[Sample]


class Copies(NamedTuple):
    """Values of f and g per copy (NaN where they were not needed), and the gradient asked for."""

    upper: Tensor
    lower: Tensor
    gradient: Vector


@dataclass
class _Lanes:
    """What is evaluated: n points and their weights and samples."""

    lower: Vector
    upper: Vector | None
    f_weights: Sequence[float]
    g_weights: Sequence[float]
    f_sample: Samples
    g_sample: Samples
    wrt: str

    def __getitem__(self, lanes: slice) -> _Lanes:
        if lanes == slice(0, len(self)):
            return self
        f, g = self.f_sample, self.g_sample
        return _Lanes(
            Vector(t[lanes] for t in self.lower),
            None if self.upper is None else Vector(t[lanes] for t in self.upper),
            self.f_weights[lanes],
            self.g_weights[lanes],
            f if isinstance(f, Sample) else f[lanes],
            g if isinstance(g, Sample) else g[lanes],
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
    r"""Gradient of :math:`\sum_j a_j f(x_j, y_j) + b_j g(x_j, y_j)` over stacked copies :math:`y_j`, perhaps of x too.

    Args:
        oracle: evaluates the losses; its session says whether copies are vectorised.
        copies: tensors of shape (n, ...): n copies of y.
        upper_weights: :math:`a_j`, n numbers.
        lower_weights: :math:`b_j`, n numbers.
        upper_sample: one sample shared by all copies, or n samples.
        lower_sample: likewise.
        wrt: ``"lower"``: gradients of shape (n, ...), one for each copy. ``"upper"``: one gradient in x, and the values
            of f at every copy, also where :math:`a_j = 0`. ``"nothing"``: only the values of f.
        upper_copies: tensors of shape (n, ...): n copies of x, not with ``wrt="upper"``. Default: the live x for all.
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
    lanes = _Lanes(copies, upper_copies, upper_weights, lower_weights, upper_sample, lower_sample, wrt)

    def run(size: int, evaluate: Callable[[Oracle, _Lanes], Copies]) -> Copies:
        return _joined([evaluate(oracle, lanes[i : min(i + size, n)]) for i in range(0, n, size)], wrt)

    session = oracle.session
    size = lanes_at_once(oracle, n)
    if size == 1 or not _alike(upper_sample, lower_sample):
        return Copies(*oracle.averaged(*run(1, _one)))
    try:
        if not session.vmapped:
            _require_substitution(oracle, lanes)
        result = run(size, _together)
        session.vmapped = True
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    else:
        return Copies(*oracle.averaged(*result))
    # What vmap cannot do, the loop can; what is wrong with the loss itself is raised again here.
    result = run(1, _one)
    session.fallback = reason
    return Copies(*oracle.averaged(*result))


def lanes_at_once(oracle: Oracle, n: int) -> int:
    """How many of n copies are evaluated together."""
    session = oracle.session
    if oracle.sharded or session.fallback:
        return 1
    return min(n if session.vectorize is True else max(int(session.vectorize), 1), n)


def _require_substitution(oracle: Oracle, lanes: _Lanes) -> None:
    """Raise if the result depends on what the live tensors hold: then a loss reads them out of torch's sight.

    TorchScript modules do, for instance. Looked at once in the life of an optimizer, and not counted.
    """
    pair = lanes[slice(0, 2)]
    xi, zeta = (s if isinstance(s, Sample) else s[0] for s in (pair.f_sample, pair.g_sample))
    pair = _Lanes(pair.lower, pair.upper, [1.0, 1.0], [1.0, 1.0], xi, zeta, "lower")
    results = []
    for factor, shift in ((1.0, 0.0), (1.1, 0.1)):
        y = Vector(t * factor + shift for t in pair.lower.lane(0))
        x = None if pair.upper is None else Vector(t * factor + shift for t in pair.upper.lane(0))
        with oracle.at(upper=x, lower=y):
            values = _together(oracle, pair)
            results.append(Vector((values.upper, values.lower, *values.gradient)))
    if not (results[0] - results[1]).norm() <= 1e-5 * results[0].norm():
        raise RuntimeError("a loss reads parameters in a way that cannot be redirected (as TorchScript modules do)")


def _alike(*groups: Samples) -> bool:
    """Whether samples that differ from copy to copy can be stacked (the last batch of a data set may be smaller)."""
    for group in groups:
        if not isinstance(group, Sample):
            shapes = [[getattr(leaf, "shape", None) for leaf in tree_leaves(one.arguments)] for one in group]
            if any(shape != shapes[0] for shape in shapes):
                return False
    return True


def _together(oracle: Oracle, lanes: _Lanes) -> Copies:
    """All the points given, by one vmap of each loss and one backward pass."""
    wrt = lanes.wrt
    y = Vector(t.detach().requires_grad_(wrt == "lower") for t in lanes.lower)
    with ExitStack() as block:
        block.enter_context(oracle.buffers_kept())
        if not oracle.session.vmapped:
            # An operation without a batching rule would be run copy by copy inside vmap, slower than our own loop.
            block.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("error", message="There is a performance drop")
        if wrt == "nothing":
            block.enter_context(torch.no_grad())
        x = None if lanes.upper is None else _watched(oracle, lanes.upper)
        values = {
            level: _values(oracle, level, sample, lanes, x, y)
            for level, sample, needed in (
                ("lower", lanes.g_sample, lanes.needs_g),
                ("upper", lanes.f_sample, lanes.needs_f),
            )
            if needed
        }
        f, g = values.get("upper"), values.get("lower")
        if g is None:
            assert f is not None
            return Copies(f, torch.full_like(f, torch.nan), Vector())
        _require_reached(oracle, g.sum(), y, x, wrt)
        total = (g * g.new_tensor(lanes.g_weights)).sum()
        if f is None:
            f = torch.full_like(g, torch.nan)
        else:
            total = total + (f * f.new_tensor(lanes.f_weights)).sum()
        gradient = _gradient(oracle, total, y, wrt)
    return Copies(f.detach(), g.detach(), gradient)


def _watched(oracle: Oracle, upper: Vector) -> Vector:
    """Copies of x, as variables until it is known that a loss depends on x."""
    return upper if oracle.session.reaches_upper else Vector(t.detach().requires_grad_() for t in upper)


def _values(oracle: Oracle, level: str, samples: Samples, lanes: _Lanes, x: Vector | None, y: Vector) -> Tensor:
    """Values of one loss at every point."""
    live, points = [*oracle.y], [*y]
    if x is not None:
        live, points = [*live, *oracle.x], [*points, *x]
    shared = isinstance(samples, Sample)
    sample = samples if isinstance(samples, Sample) else Sample(samples[0].loss)
    part, part_dims = _features(oracle, level, sample, lanes, live, points) if shared else (None, None)
    batch = () if isinstance(samples, Sample) else _stacked_arguments(samples)
    features = None if isinstance(samples, Sample) or samples[0].features is None else samples[0].features.loss

    def at(own: Any, part: Any, *values: Tensor) -> Tensor:
        with Substitution(live, values):
            if shared:
                return oracle.value(level, sample, features=part)
            return oracle.value(level, Sample(sample.loss, own, once=True, features=features))

    results: Tensor = vmap(
        at,
        in_dims=(0 if batch else None, part_dims, *[0] * len(points)),
        randomness="same" if shared else "different",
    )(batch, part, *points)
    if lanes.wrt == "nothing":
        return results
    return oracle.dependent(level, results, points)


def _features(
    oracle: Oracle, level: str, sample: Sample, lanes: _Lanes, live: Sequence[Tensor], points: Sequence[Tensor]
) -> tuple[Any, Any]:
    """Features of a shared sample, evaluated outside of the vmap over y, and the dimension that vmap goes over."""
    if sample.features is None:
        return None, None
    if lanes.upper is None:
        if lanes.wrt == "upper":
            return oracle.call(sample.features), None  # at the live x, for all copies
        return oracle.frozen_features(level, sample), None
    inner = sample.features
    watched = torch.is_grad_enabled() and not oracle.session.reaches_upper

    def at(*values: Tensor) -> Any:
        with Substitution(live, values):
            return oracle.call(inner, graph=watched)

    def evaluate() -> Any:
        return vmap(at, randomness="same")(*points)

    if watched:
        return evaluate(), 0
    return oracle.frozen_features(level, sample, lanes.upper, evaluate), 0


def _stacked_arguments(samples: Sequence[Sample]) -> tuple[Any, ...]:
    stacked: tuple[Any, ...] = tree_map(lambda *leaves: torch.stack(leaves), *(one.arguments for one in samples))
    return stacked


def _one(oracle: Oracle, lanes: _Lanes) -> Copies:
    """A single point, placed in the live tensors."""
    (a,), (b,), wrt = lanes.f_weights, lanes.g_weights, lanes.wrt
    xi = lanes.f_sample if isinstance(lanes.f_sample, Sample) else lanes.f_sample[0]
    zeta = lanes.g_sample if isinstance(lanes.g_sample, Sample) else lanes.g_sample[0]
    with ExitStack() as block:
        x = None if lanes.upper is None else lanes.upper.lane(0)
        block.enter_context(oracle.at(upper=x, lower=lanes.lower.lane(0)))
        block.enter_context(oracle.buffers_kept())
        if wrt == "nothing":
            f = oracle.value("upper", xi, graph=False).reshape(1)
            return Copies(f, torch.full_like(f, torch.nan), Vector())
        # Features at the live x are constants for y; at other values of x they are needed once only.
        frozen = wrt == "lower" and oracle.session.reaches_upper
        part = oracle.frozen_features("lower", zeta) if frozen else None
        g = oracle.dependent("lower", oracle.value("lower", zeta, features=part), oracle.y)
        _require_reached(oracle, g, oracle.y, oracle.x, wrt)
        total = b * g
        if a:
            part = oracle.frozen_features("upper", xi) if frozen else None
            f = oracle.dependent("upper", oracle.value("upper", xi, features=part), oracle.y)
            total = total + a * f
        elif wrt == "upper":
            f = oracle.value("upper", xi, graph=False)
        else:
            f = torch.full_like(g, torch.nan)
        gradient = _gradient(oracle, total, oracle.y, wrt)
    if wrt == "lower":
        gradient = stack([gradient])
    return Copies(f.detach().reshape(1), g.detach().reshape(1), gradient)


def _require_reached(oracle: Oracle, g: Tensor, y: Vector, x: Vector | None, wrt: str) -> None:
    """At the first step look at g alone: in the sum with f it cannot be seen what it depends on."""
    if wrt != "lower" or oracle.sharded:
        return
    if not oracle.session.reaches_lower:
        oracle.require_reached(torch.autograd.grad(g, list(y), retain_graph=True, allow_unused=True))
    if x is not None and not oracle.session.reaches_upper:
        oracle.note_reached(torch.autograd.grad(g, list(x), retain_graph=True, allow_unused=True))


def _gradient(oracle: Oracle, total: Tensor, variables: Vector, wrt: str) -> Vector:
    if wrt == "lower":
        return filled(oracle.differentiate(total, variables), variables)
    if not total.requires_grad:  # neither loss depends on x; whether that is a mistake is decided over the whole step
        return oracle.x.zeros_like()
    gradients = oracle.differentiate(total, oracle.x)
    oracle.note_reached(gradients)
    return filled(gradients, oracle.x)


def _joined(parts: list[Copies], wrt: str) -> Copies:
    if len(parts) == 1:
        return parts[0]
    if wrt != "upper":
        gradient = Vector(torch.cat(ts) for ts in zip(*(part.gradient for part in parts), strict=True))
    else:
        gradient = parts[0].gradient
        for part in parts[1:]:
            gradient = gradient + part.gradient
    return Copies(torch.cat([p.upper for p in parts]), torch.cat([p.lower for p in parts]), gradient)

"""Both losses at several lower points: stacked copies of y under one ``vmap``, in chunks, or in a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from .objective import Sample
from .oracle import Oracle, filled
from .substitution import Substitution
from .vector import Vector, stack

__all__ = ["Copies", "evaluate_copies"]

Samples = Sample | Sequence[Sample]


class Copies(NamedTuple):
    """Values of f and g per copy (f is NaN where it was not needed), and the gradient asked for."""

    upper: Tensor
    lower: Tensor
    gradient: Vector


def evaluate_copies(
    oracle: Oracle,
    copies: Vector,
    upper_weights: Sequence[float],
    lower_weights: Sequence[float],
    upper_sample: Samples,
    lower_sample: Samples,
    *,
    wrt: str,
) -> Copies:
    r"""Gradient of :math:`\sum_j a_j f(x, y_j) + b_j g(x, y_j)` over stacked copies :math:`y_j`.

    Args:
        oracle: evaluates the losses; its session says whether copies are vectorised.
        copies: tensors of shape (n, ...): n copies of y.
        upper_weights: :math:`a_j`, n numbers.
        lower_weights: :math:`b_j`, n numbers.
        upper_sample: one sample shared by all copies, or n samples.
        lower_sample: likewise.
        wrt: ``"lower"``: gradients of shape (n, ...), one for each copy. ``"upper"``: one gradient in x, and the values
            of f at every copy, also where :math:`a_j = 0`.
    """
    n = len(upper_weights)
    needed = sum(a != 0 for a in upper_weights)
    oracle.count("lower_grad", n)
    oracle.count("upper_grad", needed)
    if wrt == "upper":
        oracle.count("loss", n - needed)

    def run(size: int, evaluate: Callable[..., Copies]) -> Copies:
        parts = []
        for start in range(0, n, size):
            lanes = slice(start, start + size)
            parts.append(
                evaluate(
                    oracle,
                    Vector(t[lanes] for t in copies),
                    upper_weights[lanes],
                    lower_weights[lanes],
                    upper_sample if isinstance(upper_sample, Sample) else upper_sample[lanes],
                    lower_sample if isinstance(lower_sample, Sample) else lower_sample[lanes],
                    wrt,
                )
            )
        return _joined(parts, wrt)

    session = oracle.session
    size = n if session.vectorize is True else max(int(session.vectorize), 1)
    if min(size, n) == 1 or oracle.sharded or session.fallback or not _alike(upper_sample, lower_sample):
        return Copies(*oracle.averaged(*run(1, _one)))
    try:
        if not session.vmapped:
            _require_substitution(oracle, copies, upper_sample, lower_sample)
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


def _require_substitution(oracle: Oracle, copies: Vector, upper_sample: Samples, lower_sample: Samples) -> None:
    """Raise if the result depends on what the live tensors hold: then a loss reads them out of torch's sight.

    TorchScript modules do, for instance. Looked at once in the life of an optimizer, and not counted.
    """
    xi = upper_sample if isinstance(upper_sample, Sample) else upper_sample[0]
    zeta = lower_sample if isinstance(lower_sample, Sample) else lower_sample[0]
    pair = Vector(t[:2] for t in copies)
    moved = Vector(t * 1.1 + 0.1 for t in copies.lane(0))
    results = []
    for live in (copies.lane(0), moved):
        with oracle.at(lower=live):
            values = _together(oracle, pair, [1.0, 1.0], [1.0, 1.0], xi, zeta, "lower")
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


def _together(
    oracle: Oracle,
    copies: Vector,
    upper_weights: Sequence[float],
    lower_weights: Sequence[float],
    upper_sample: Samples,
    lower_sample: Samples,
    wrt: str,
) -> Copies:
    """All the copies given, by one vmap of each loss and one backward pass."""
    variables = Vector(t.detach().requires_grad_(wrt == "lower") for t in copies)
    with ExitStack() as block:
        block.enter_context(oracle.buffers_kept())
        if not oracle.session.vmapped:
            # An operation without a batching rule would be run copy by copy inside vmap, slower than our own loop.
            block.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("error", message="There is a performance drop")
        need_f = wrt == "upper" or any(upper_weights)
        g, f = _values(oracle, lower_sample, upper_sample if need_f else None, variables)
        _require_reached(oracle, g.sum(), variables, wrt)
        total = (g * g.new_tensor(lower_weights)).sum()
        if f is None:
            f = torch.full_like(g, torch.nan)
        else:
            total = total + (f * f.new_tensor(upper_weights)).sum()
        gradient = _gradient(oracle, total, variables, wrt)
    return Copies(f.detach(), g.detach(), gradient)


def _values(
    oracle: Oracle, lower_sample: Samples, upper_sample: Samples | None, variables: Vector
) -> tuple[Tensor, Tensor | None]:
    """Values of g and, if it has a sample, of f at every copy."""
    shared = isinstance(lower_sample, Sample)
    groups = [("lower", lower_sample)] + ([] if upper_sample is None else [("upper", upper_sample)])
    losses = [sample if isinstance(sample, Sample) else Sample(sample[0].loss) for _, sample in groups]
    batches = [() if isinstance(sample, Sample) else _stacked_arguments(sample) for _, sample in groups]

    def at(arguments: list[Any], *values: Tensor) -> tuple[Tensor, ...]:
        with Substitution(oracle.y, values):
            return tuple(
                oracle.value(level, sample if shared else Sample(sample.loss, own, once=True))
                for (level, _), sample, own in zip(groups, losses, arguments, strict=True)
            )

    in_dims = ([0 if batch else None for batch in batches], *[0] * len(variables))
    results = vmap(at, in_dims=in_dims, randomness="same" if shared else "different")(batches, *variables)
    checked = [oracle.dependent(level, value, variables) for (level, _), value in zip(groups, results, strict=True)]
    return checked[0], checked[1] if upper_sample is not None else None


def _stacked_arguments(samples: Sequence[Sample]) -> tuple[Any, ...]:
    stacked: tuple[Any, ...] = tree_map(lambda *leaves: torch.stack(leaves), *(one.arguments for one in samples))
    return stacked


def _one(
    oracle: Oracle,
    copies: Vector,
    upper_weights: Sequence[float],
    lower_weights: Sequence[float],
    upper_sample: Samples,
    lower_sample: Samples,
    wrt: str,
) -> Copies:
    """A single copy, placed in the live tensors."""
    (a,), (b,) = upper_weights, lower_weights
    xi = upper_sample if isinstance(upper_sample, Sample) else upper_sample[0]
    zeta = lower_sample if isinstance(lower_sample, Sample) else lower_sample[0]
    with ExitStack() as block:
        block.enter_context(oracle.at(lower=copies.lane(0)))
        block.enter_context(oracle.buffers_kept())
        g = oracle.dependent("lower", oracle.value("lower", zeta), oracle.y)
        _require_reached(oracle, g, oracle.y, wrt)
        total = b * g
        if a:
            f = oracle.dependent("upper", oracle.value("upper", xi), oracle.y)
            total = total + a * f
        elif wrt == "upper":
            f = oracle.value("upper", xi, graph=False)
        else:
            f = torch.full_like(g, torch.nan)
        gradient = _gradient(oracle, total, oracle.y, wrt)
    if wrt == "lower":
        gradient = stack([gradient])
    return Copies(f.detach().reshape(1), g.detach().reshape(1), gradient)


def _require_reached(oracle: Oracle, g: Tensor, variables: Vector, wrt: str) -> None:
    """At the first step look at g alone: in the sum with f it cannot be seen what it depends on."""
    if wrt == "lower" and not oracle.session.reaches_lower and not oracle.sharded:
        oracle.require_reached(torch.autograd.grad(g, list(variables), retain_graph=True, allow_unused=True))


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
    if wrt == "lower":
        gradient = Vector(torch.cat(ts) for ts in zip(*(part.gradient for part in parts), strict=True))
    else:
        gradient = parts[0].gradient
        for part in parts[1:]:
            gradient = gradient + part.gradient
    return Copies(torch.cat([p.upper for p in parts]), torch.cat([p.lower for p in parts]), gradient)

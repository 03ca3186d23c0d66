r"""Seeded directions that are never stored: perturbed points, and combinations of directions.

Entry i of direction q is a function of ``keys[q]`` and ``offset + i`` (`counter.units`). Common arguments:

* ``keys``: (Q,) integers;
* ``rows``, ``period``: needed for ``"hartley"`` only, (Q,) integers and their bound;
* ``offset``: number of the first entry, so that several tensors share one direction;
* ``kind``: ``"normal"``, ``"sign"`` or ``"hartley"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .counter import precise, units

__all__ = ["BLOCK", "OPERATORS", "accumulated", "perturbed", "squares"]

BLOCK = 1 << 16  # entries of directions made at a time on a CPU, to stay in its cache
WIDE_BLOCK = 1 << 22  # on other devices, where a call costs more than memory
OPERATORS: dict[str, Callable[..., Tensor]] = {}  # whose inside no trace sees


def _operator(empty: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function of directions the operator ``bilevel_optim::NAME``, unless one block holds all its entries.

    Plain torch, which can be traced, is then as good. ``empty`` returns an empty result.
    """

    def made(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        operator = torch.library.custom_op(f"bilevel_optim::{function.__name__}", function, mutates_args=())
        operator.register_fake(empty)

        def each(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
            lanes = [
                operator(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
                for i in range(info.batch_size)
            ]
            return torch.stack(lanes), 0

        operator.register_vmap(each)
        OPERATORS[function.__name__] = operator

        @wraps(function)
        def called(like: Tensor, *arguments: Any) -> Tensor:
            keys: Tensor = arguments[-5]
            small = like.device.type == "cpu" and like.numel() * keys.numel() <= BLOCK
            return (function if small else operator)(like, *arguments)

        return called

    return made


def _blocks(like: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of directions and entries, as many at a time as one block holds."""
    n, count, block = like.numel(), keys.numel(), BLOCK if like.device.type == "cpu" else WIDE_BLOCK
    width = max(min(n, block), 1)
    height = block // width
    for i in range(0, n, width):
        for q in range(0, count, height):
            yield slice(q, min(q + height, count)), slice(i, min(i + width, n))


def _units(like: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str, q: slice, i: slice) -> Tensor:
    index = torch.arange(offset + i.start, offset + i.stop, device=like.device)
    return units(kind, keys[q].unsqueeze(1), rows[q].unsqueeze(1), period, index, precise(like.dtype))


@_operator(lambda point, factors, *_: point.new_empty(len(factors), *point.shape))
def perturbed(
    point: Tensor, factors: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str
) -> Tensor:
    r"""Return points :math:`p + c_q u_q`, shape (Q, ...), each rounded once.

    Args:
        point: p, of any strides.
        factors: :math:`c_q`, shape (Q,).
        keys: of the directions.
        rows: of the transform.
        period: of the transform.
        offset: number of the first entry.
        kind: of entry.

    Example:
        >>> zero, keys = torch.zeros(3), torch.tensor([5, 6])
        >>> perturbed(zero, torch.tensor([0.0, 2.0]), keys, keys, 1, 0, "sign").abs()
        tensor([[0., 0., 0.],
                [2., 2., 2.]])
    """
    flat, parts = point.reshape(-1), list(_blocks(point, keys))
    factors = factors.to(precise(point.dtype)).unsqueeze(1)

    def part(q: slice, i: slice) -> Tensor:
        moves = factors[q] * _units(point, keys, rows, period, offset, kind, q, i)
        return (flat[i].to(moves.dtype) + moves).to(point.dtype)

    if len(parts) == 1:
        return part(*parts[0]).view(len(keys), *point.shape)
    out = point.new_empty(len(keys), point.numel())
    for q, i in parts:
        out[q, i] = part(q, i)
    return out.view(len(keys), *point.shape)


@_operator(lambda like, *_: like.new_empty(like.shape))
def accumulated(
    like: Tensor, coefficients: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str
) -> Tensor:
    r"""Return the combination :math:`\sum_q c_q u_q`, with the shape and dtype of ``like``.

    Args:
        like: a tensor of the result's shape, dtype and device.
        coefficients: :math:`c_q`, shape (Q,).
        keys: of the directions.
        rows: of the transform.
        period: of the transform.
        offset: number of the first entry.
        kind: of entry.

    Example:
        >>> keys = torch.tensor([5, 5])
        >>> accumulated(torch.zeros(3), torch.tensor([1.0, -1.0]), keys, keys, 1, 0, "normal")
        tensor([0., 0., 0.])
    """
    parts, coefficients = list(_blocks(like, keys)), coefficients.to(precise(like.dtype))

    def part(q: slice, i: slice) -> Tensor:
        return coefficients[q] @ _units(like, keys, rows, period, offset, kind, q, i)

    if len(parts) == 1:
        return part(*parts[0]).to(like.dtype).view(like.shape)
    total = coefficients.new_zeros(like.numel())
    for q, i in parts:
        total[i] += part(q, i)
    return total.to(like.dtype).view(like.shape)


@_operator(lambda like, keys, *_: keys.new_empty(len(keys), dtype=torch.float64))
def squares(like: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str) -> Tensor:
    r"""Return the squared lengths :math:`\|u_q\|^2` of directions shaped like a tensor, shape (Q,), in float64.

    Args:
        like: a tensor of a direction's shape, dtype and device.
        keys: of the directions.
        rows: of the transform.
        period: of the transform.
        offset: number of the first entry.
        kind: of entry.

    Example:
        >>> squares(torch.zeros(3), torch.tensor([5, 6]), torch.tensor([5, 6]), 1, 0, "sign")
        tensor([3., 3.], dtype=torch.float64)
    """

    def part(q: slice, i: slice) -> Tensor:
        return _units(like, keys, rows, period, offset, kind, q, i).double().square().sum(1)

    parts = list(_blocks(like, keys))
    if len(parts) == 1:
        return part(*parts[0])
    total = keys.new_zeros(len(keys), dtype=torch.float64)
    for q, i in parts:
        total[q] += part(q, i)
    return total

r"""Seeded directions that are never stored: perturbed points, and combinations of directions.

Entry i of direction q is a function of ``keys[q]`` and ``offset + i`` (`counter.units`). Common arguments:

* ``keys``: (Q,) integers;
* ``rows``, ``period``: needed for ``"hartley"`` only, (Q,) integers and their bound;
* ``offset``: number of the first entry, so that several tensors share one direction;
* ``kind``: ``"normal"``, ``"sign"`` or ``"hartley"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .counter import precise, units

__all__ = ["BLOCK", "accumulated", "perturbed", "squares"]

BLOCK = 1 << 16  # entries of directions made at a time on a CPU, to stay in its cache
WIDE_BLOCK = 1 << 22  # on other devices, where a call costs more than memory


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
    call = _perturbed if _is_small(point, keys) else _PERTURBED
    return call(point, factors, keys, rows, period, offset, kind)


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
    call = _accumulated if _is_small(like, keys) else _ACCUMULATED
    return call(like, coefficients, keys, rows, period, offset, kind)


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
    call = _squares if _is_small(like, keys) else _SQUARES
    return call(like, keys, rows, period, offset, kind)


def _is_small(like: Tensor, keys: Tensor) -> bool:
    """Return True if one block holds all: plain torch, which can be traced, is then as good as the operator."""
    return like.device.type == "cpu" and like.numel() * keys.numel() <= BLOCK


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


def _perturbed(
    point: Tensor, factors: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str
) -> Tensor:
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


def _accumulated(
    like: Tensor, coefficients: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str
) -> Tensor:
    parts, coefficients = list(_blocks(like, keys)), coefficients.to(precise(like.dtype))

    def part(q: slice, i: slice) -> Tensor:
        return coefficients[q] @ _units(like, keys, rows, period, offset, kind, q, i)

    if len(parts) == 1:
        return part(*parts[0]).to(like.dtype).view(like.shape)
    total = coefficients.new_zeros(like.numel())
    for q, i in parts:
        total[i] += part(q, i)
    return total.to(like.dtype).view(like.shape)


def _squares(like: Tensor, keys: Tensor, rows: Tensor, period: int, offset: int, kind: str) -> Tensor:
    def part(q: slice, i: slice) -> Tensor:
        return _units(like, keys, rows, period, offset, kind, q, i).double().square().sum(1)

    parts = list(_blocks(like, keys))
    if len(parts) == 1:
        return part(*parts[0])
    total = keys.new_zeros(len(keys), dtype=torch.float64)
    for q, i in parts:
        total[q] += part(q, i)
    return total


def _operator(reference: Callable[..., Tensor], empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the operator ``bilevel_optim::NAME`` of a function, in which no trace looks; ``empty`` gives its shape."""
    made = torch.library.custom_op(f"bilevel_optim::{reference.__name__.removeprefix('_')}", reference, mutates_args=())
    made.register_fake(empty)

    def each(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        lanes = [
            made(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return torch.stack(lanes), 0

    made.register_vmap(each)
    return made


_PERTURBED = _operator(_perturbed, lambda point, factors, *_: point.new_empty(len(factors), *point.shape))
_ACCUMULATED = _operator(_accumulated, lambda like, *_: like.new_empty(like.shape))
_SQUARES = _operator(_squares, lambda like, keys, *_: keys.new_empty(len(keys), dtype=torch.float64))

"""Random numbers by counter: a hash of a key and an index, the same in Python, in torch and in a GPU program."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

__all__ = ["mixed", "mixed_number", "precise", "remainders", "signed", "units"]

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHIFTS = (30, 27, 31)
_MASK = (1 << 64) - 1


def mixed_number(value: int) -> int:
    """Return the finaliser of SplitMix64, a number below 2^64."""
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> SHIFTS[0])) * FIRST) & _MASK
    value = ((value ^ (value >> SHIFTS[1])) * SECOND) & _MASK
    return value ^ (value >> SHIFTS[2])


def mixed(values: Tensor) -> Tensor:
    """Return `mixed_number`, the hash, of every entry, as signed 64-bit integers."""
    values = values + signed(GOLDEN)  # in place from here on: memory traffic is most of the cost
    values.bitwise_xor_(_shifted(values, SHIFTS[0])).mul_(signed(FIRST))
    values.bitwise_xor_(_shifted(values, SHIFTS[1])).mul_(signed(SECOND))
    return values.bitwise_xor_(_shifted(values, SHIFTS[2]))


def remainders(keys: Tensor, divisor: int) -> Tensor:
    """Return the remainders of keys, converted to numbers below 2^63 as in `problem.random.hashed`."""
    return _shifted(keys, 1) % divisor


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers for tensors of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def units(kind: str, keys: Tensor, rows: Tensor, period: int, index: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Return entries of mean 0 and variance 1 for each key, from the 64 bits h = mixed(key + i) at position i.

    * ``"normal"``: :math:`\sqrt{-2 \ln a} \cos 2 \pi b`, with a the upper 32 bits of h and b the lower ones;
    * ``"sign"``: 1 or -1, by the highest bit of h;
    * ``"hartley"``: that sign times entry i of the row of a Hartley transform, cos + sin of 2 pi i row / period.

    Args:
        kind: one of these.
        keys: integers, of a shape that broadcasts with ``index`` to that of the result.
        rows: rows of the transform, shaped like the keys.
        period: size of the transform.
        index: positions.
        dtype: dtype of the result, float32 or float64.
    """
    bits = mixed(keys + index)
    if kind == "normal":
        # Half a unit more keeps the logarithm finite.
        radius = _shifted(bits, 32).to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        return bits.bitwise_and_(0xFFFFFFFF).to(dtype).mul_(2 * pi * 2.0**-32).cos_().mul_(radius)
    highest = bits < 0
    if kind == "sign":
        return torch.where(highest, 1.0, -1.0).to(dtype)
    angle = (index * rows % period).double() / period * (2 * pi)
    entries = (angle.cos() + angle.sin()).to(dtype)
    return torch.where(highest, entries, -entries)


def signed(value: int) -> int:
    """Return a number below 2^64 as a signed integer, which torch needs."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, by: int) -> Tensor:
    """Shift bits to the right without extending the sign."""
    return (values >> by).bitwise_and_((1 << (64 - by)) - 1)

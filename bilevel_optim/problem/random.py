"""Random numbers by counter: each draw has its own generator, seeded by a hash of what the draw is for."""

from __future__ import annotations

import torch

__all__ = ["Counters"]

_MASK = (1 << 64) - 1


class Counters:
    """Generators that depend on a seed and on counters only, not on what was drawn before.

    A draw can be made again, left out, or made elsewhere without changing any other: results do not depend on the order
    or the grouping of the draws, nor on the number of processes that share them.

    Example:
        >>> a, b = Counters(1), Counters(1)
        >>> _ = torch.rand(3, generator=a.generator(7))
        >>> bool(torch.rand(1, generator=a.generator(2, 5)) == torch.rand(1, generator=b.generator(2, 5)))
        True
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = torch.Generator()

    def generator(self, *counters: int) -> torch.Generator:
        """The generator of these counters, at its beginning; valid until the next call."""
        value = _mixed(self.seed)
        for counter in counters:
            value = _mixed(value ^ _mixed(counter + 1))
        return self._generator.manual_seed(value >> 1)


def _mixed(value: int) -> int:
    """The finaliser of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

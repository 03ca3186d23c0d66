"""What a step over contexts draws, as one, and who makes what of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...hypergradient.multilevel import asked_by_estimate
from ...solvers.contexts import Contexts, asked_by_path

__all__ = ["path_length", "share", "whole"]


def whole(
    contexts: Contexts, levels: Sequence[int], *, steps: int, neumann: str, implicit_term: bool
) -> dict[str, Any]:
    """Everything that is drawn of contexts with these levels: the deepest first, whatever order they were drawn in.

    Returns:
        ``"depths"``: the levels in that order. ``"first"``: which one was drawn first. ``"contexts"``: the data of
        `DrawnContexts`.
    """
    order = sorted(range(contexts.count), key=lambda slot: -levels[slot])
    depths = [levels[slot] for slot in order]
    lengths = contexts.lengths(order, steps) if implicit_term and neumann == "product" else None
    asked = asked_by_estimate(
        contexts.count, steps=steps, neumann=neumann, implicit_term=implicit_term,
        longest=None if lengths is None else int(lengths.max()),
    )  # fmt: skip
    data = contexts.ahead(order, [*asked_by_path(depths), *asked])
    first = torch.tensor([slot == 0 for slot in order], device="cpu")
    return {"depths": depths, "first": first, "contexts": {**data, "lengths": lengths}}


def path_length(level: int) -> int:
    """Lower steps of a context of this level."""
    return int(2 ** (level + 1)) - 2 - level


def share(depths: list[int], rank: int, world: int) -> list[int]:
    """The contexts of one process: the deepest first, each to the process with the least to do."""
    loads, shares = [0] * world, [[] for _ in range(world)]  # type: tuple[list[int], list[list[int]]]
    for slot in sorted(range(len(depths)), key=lambda i: -depths[i]):
        to = loads.index(min(loads))
        loads[to] += 2 ** (depths[slot] + 1)
        shares[to].append(slot)
    return sorted(shares[rank])

"""The arguments that every method takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer

from ..problem.parameters import is_count, require, require_choice
from ..problem.tasks import LowerInit
from ..solvers.limits import Clip, Projection

__all__ = ["ColdOptions", "CommonOptions", "require_common", "require_sizes"]

HINT = " (pass the class, or a function that makes one: functools.partial(torch.optim.SGD, momentum=0.9))"


class ColdOptions(TypedDict, total=False):
    """Keyword arguments that every method takes, but for ``warm_start``; see `BilevelOptimizer`."""

    upper_optimizer: Callable[[Any], Optimizer] | None
    lower_optimizer: Callable[[Any], Optimizer] | None
    check_finite: bool
    generator: torch.Generator | None
    vectorize: bool | int
    hvp: str
    process_group: Any
    tasks_per_step: int | None
    lower_batch: int | None
    upper_batch: int | None
    lower_init: LowerInit | None
    task_memory: bool
    lower_clip: Clip | None
    lower_projection: Projection | None


class CommonOptions(ColdOptions, total=False):
    """Keyword arguments that every method takes, see `BilevelOptimizer`."""

    warm_start: bool


def require_common(
    *,
    upper_optimizer: Any,
    lower_optimizer: Any,
    generator: Any,
    vectorize: Any,
    hvp: Any,
    lower_init: Any,
    task_memory: Any,
) -> None:
    """Raise unless these arguments of every method are what they should be."""
    require("vectorize", vectorize, isinstance(vectorize, bool) or (is_count(vectorize) and vectorize > 0))
    require_choice("hvp", hvp, ("exact", "finite-difference"))
    for name, factory in (("upper_optimizer", upper_optimizer), ("lower_optimizer", lower_optimizer)):
        if not (factory is None or callable(factory)):
            shown = type(factory).__name__ if isinstance(factory, Optimizer) else factory
            raise ValueError(f"Invalid {name} value: {shown}{HINT}")
    require("generator", generator, generator is None or isinstance(generator, torch.Generator))
    require("lower_init", lower_init, lower_init is None or callable(lower_init))
    require("task_memory", task_memory, isinstance(task_memory, bool))


def require_sizes(**sizes: Any) -> None:
    """Raise unless these are positive counts, or None."""
    for name, size in sizes.items():
        require(name, size, size is None or (is_count(size) and size > 0))

"""Ranges in a profile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["is_profiled", "span"]


def is_profiled() -> bool:
    """Return True if a profiler is on."""
    return torch.autograd.profiler._is_profiler_enabled


def span(name: str) -> AbstractContextManager[object]:
    """Context for a range of that name in the profile; without a profiler a no-op at next to no cost.

    Example:
        >>> import torch
        >>> with torch.profiler.profile() as profile, span("here"):
        ...     _ = torch.ones(1)
        >>> "bilevel_optim.here" in {event.key for event in profile.key_averages()}
        True
    """
    if not is_profiled():
        return nullcontext()
    return torch.profiler.record_function(f"bilevel_optim.{name}")

"""Registration of operators: a reference for every device, a Triton program for CUDA, a vmap rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ..errors import BilevelWarning
from ..pytree import tree_map

__all__ = ["launch_of", "operator", "programs"]


@cache
def programs() -> Any:
    """Return the module of Triton programs; None if there is no Triton (it comes with torch on Linux)."""
    try:
        return import_module(f"{__package__}.programs")
    except ImportError:
        return None


def operator(reference: Callable[..., Any], empty: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator ``bilevel_optim::NAME`` of a reference; its program has the same name and arguments.

    Args:
        reference: the computation in torch.
        empty: returns an empty result (`torch.library.register_fake`).
    """
    made = torch.library.custom_op(f"bilevel_optim::{reference.__name__.removeprefix('_')}", reference, mutates_args=())
    made.register_fake(empty)

    def each(info: Any, in_dims: Any, *args: Any) -> Any:
        lanes = [
            made(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        stacked = tree_map(lambda *results: torch.stack(results), *lanes)
        return stacked, tree_map(lambda _: 0, stacked)

    made.register_kernel("cuda")(launch_of(reference))
    made.register_vmap(each)
    return made


def launch_of(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that launches a reference's program on the first tensor's GPU.

    If Triton cannot run there, it calls the reference.
    """

    def launch(*args: Any) -> Any:
        device = args[0].device
        if not _runs(device):
            return reference(*args)
        with torch.cuda.device(device):
            return getattr(programs(), reference.__name__.removeprefix("_"))(*args)

    return launch


@cache
def _runs(device: torch.device) -> bool:
    """Return True if Triton's programs run on a device: they need a driver and, for the launch, a C compiler."""
    if programs() is None:
        return False
    try:
        keys = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.cuda.device(device):
            programs().squares(torch.zeros(1, device=device), keys, keys, 1, 0, "sign")
    except Exception as error:  # Triton raises errors of many types
        warnings.warn(
            f"Triton cannot run on {device}, so torch's operations run instead, which are slower but correct. It often "
            f"lacks a C compiler (gcc). The error was {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            BilevelWarning,
            stacklevel=2,
        )
        return False
    return True

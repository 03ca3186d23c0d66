"""How an operator is registered: a reference for every device, a Triton program for CUDA, a vmap rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ..pytree import tree_map

__all__ = ["launch_of", "operator", "programs"]


@cache
def programs() -> Any:
    """The module of Triton programs; None if there is no Triton (it comes with torch on Linux)."""
    try:
        return import_module(f"{__package__}.programs")
    except ImportError:
        return None


def operator(reference: Callable[..., Any], empty: Callable[..., Any]) -> Callable[..., Any]:
    """The operator ``bilevel_optim::NAME`` of a reference, whose program has the same name and arguments.

    Args:
        reference: what it computes, in torch.
        empty: what the result looks like (`torch.library.register_fake`).
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
    """The launch of a reference's program on the GPU of the first tensor; the reference, if there is no Triton."""

    def launch(*args: Any) -> Any:
        found = programs()
        if found is None:
            return reference(*args)
        with torch.cuda.device(args[0].device):
            return getattr(found, reference.__name__.removeprefix("_"))(*args)

    return launch

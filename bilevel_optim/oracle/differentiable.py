"""Operations that can be differentiated twice, and what to say of those that cannot."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

__all__ = ["twice_differentiable", "uses_weight_norm"]


class _PlainWeightNorm(TorchFunctionMode):
    """Weight normalisation in plain operations: torch's fused one has a wrong second derivative, without an error."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def uses_weight_norm(loss: Tensor) -> bool:
    """Whether the graph of a loss contains fused weight normalisation."""
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            if node.name().startswith("WeightNorm"):
                return True
            seen.add(node)
            stack += [parent for parent, _ in node.next_functions]
    return False


@contextmanager
def twice_differentiable(plain_weight_norm: bool = False) -> Generator[None]:
    """Choose operations that can be differentiated twice, and say what to do about those that cannot.

    Fused attention has no second derivative in torch, fused weight normalisation a wrong one; their plain forms serve.
    """
    try:
        with sdpa_kernel(SDPBackend.MATH), _PlainWeightNorm() if plain_weight_norm else nullcontext():
            yield
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        if "double backward" in text.lower() or "donated buffers" in text:
            reason = "it runs a torch.compile'd module or a kernel without double backward (pass the module uncompiled)"
        elif "is not implemented" in text and "derivative" in text:
            reason = "one of its operations has no second derivative in torch"
        elif "use_reentrant" in text or "Checkpointing is not compatible" in text:
            reason = "it uses reentrant checkpointing (pass use_reentrant=False)"
        else:
            raise
        raise RuntimeError(
            f"the lower loss cannot be differentiated twice: {reason}. hvp='finite-difference' or a first-order method "
            f"(F2SA) needs no second derivatives. torch said: {text.splitlines()[0]}"
        ) from error

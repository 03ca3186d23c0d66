"""What compiles a traced graph: functions ``(GraphModule, examples) -> callable``, as ``torch.compile`` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .small_cpu import small_cpu

__all__ = ["LARGE", "Backend", "backend_of"]

LARGE = 2**14  # entries of a tensor from which on operations take longer than calls of compiled parts
APART = {"pattern_matcher": False}  # or a product that is added to a vector would be made into a copy of the vector
Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Any]]


def backend_of(backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None) -> Backend:
    """What ``torch.compile`` takes as its backend, without the look at Python code that a graph does not need."""
    if backend == "inductor":
        return small_cpu(_inductor(mode, options))
    if backend == "eager":
        return lambda module, examples: module.forward
    if callable(backend):
        return backend
    from torch._dynamo.backends.registry import lookup_backend

    found: Backend = lookup_backend(backend)
    return found


def _inductor(mode: str | None, options: dict[str, Any] | None) -> Backend:
    import torch._inductor as inductor

    settings = {**(inductor.list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}

    def compiled(module: GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        # Inductor keeps in its cache what was compiled in a shape environment, as Dynamo has one.
        fake = FakeTensorMode(shape_env=ShapeEnv())
        own = {**(APART if any(t.is_cpu and t.numel() > LARGE for t in examples) else {}), **settings}
        with torch.no_grad(), tracing(TracingContext(fake)):
            known: list[Any] = [fake.from_tensor(t, static_shapes=True) for t in examples]
            found: Callable[..., Any] = inductor.compile(module, known, options=own or None)
        if settings.get("triton.cudagraphs") and any(t.is_cuda for t in examples):
            # The next replay of a CUDA graph writes over what this one gives.
            return lambda *values: [t.clone() for t in found(*values)]
        return found

    return compiled

"""Evaluating a closure over live tensors at other values than the live ones.

Two ways, because each fails somewhere. ``placed`` puts the values into the live tensors for a while: it works with
whatever torch does with the closure (compiled modules, checkpointing, hooks), but for one set of values at a time and
not inside a larger graph. ``Substitution`` replaces the live tensors in every torch call: it works under ``vmap`` and
for values that carry a graph.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ..problem.vector import Vector, is_sharded

__all__ = ["Buffers", "Substitution", "placed", "twice_differentiable", "uses_weight_norm"]


@contextmanager
def placed(live: Sequence[Tensor], values: Sequence[Tensor] | None) -> Generator[None]:
    """Let ``live`` hold ``values`` inside the block.

    Graphs made inside must not be used outside: a graph saves the live leaf itself, and would read the restored value.
    """
    if values is None:
        yield
        return
    if any(map(is_sharded, live)):
        # A sharded parameter's storage is known to its FSDP group by address: write into it instead of exchanging it.
        before = Vector(live).detach().clone()
        Vector(live).copy_(values)
        try:
            yield
        finally:
            Vector(live).copy_(before)
        return
    storages = [t.data for t in live]
    try:
        for tensor, value in zip(live, values, strict=True):
            tensor.data = value.detach()
        yield
    finally:
        for tensor, storage in zip(live, storages, strict=True):
            tensor.data = storage


class Substitution(TorchFunctionMode):
    """Replace each of the tensors ``live`` (by identity) by the value beside it in every torch call of the block."""

    def __init__(self, live: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        super().__init__()
        self._value_of = {id(t): value for t, value in zip(live, values, strict=True)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value_of = self._value_of
        new = [value_of.get(id(a), a) if type(a) not in _SEQUENCES else self._inside(a) for a in args]
        if kwargs:
            kwargs = {
                k: value_of.get(id(a), a) if type(a) not in _SEQUENCES else self._inside(a) for k, a in kwargs.items()
            }
        else:
            kwargs = {}
        if func is F.linear and len(new) > 1 and new[1] is not args[1]:
            return _linear(*new, **kwargs)
        if func is F.batch_norm:
            return _batch_norm_without_update(*new, **kwargs)
        return func(*new, **kwargs)

    def _inside(self, values: Sequence[Any]) -> Any:
        return type(values)(
            self._value_of.get(id(v), v) if type(v) not in _SEQUENCES else self._inside(v) for v in values
        )  # type: ignore[call-arg]


_SEQUENCES = (list, tuple)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` in the transposed layout, in which stacked weights' gradients come out as the weights lie in memory.

    Under vmap the ordinary form gives them transposed, which makes both that product and the update that reads it
    slow. The result is not contiguous.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.layout != torch.strided:
        return F.linear(x, weight, bias)
    transposed = weight.mm(x.t())
    return (transposed if bias is None else transposed.add_(bias.unsqueeze(-1))).t()


def _batch_norm_without_update(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        running_mean = running_var = None
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


class Buffers:
    """The module buffers that an evaluation in training mode changes: running statistics, power iterations.

    A closure does not tell which modules it calls, and an update need not show in a tensor's version. So in the first
    step a hook notes the modules called, and what their buffers were; those that changed are known from then on. (Not
    in every step, because the hook makes compiled modules compile anew, and constant buffers can be large.)
    """

    def __init__(self) -> None:
        self._changing: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.complete = False

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()  # a copy of an optimizer finds out about its modules anew

    @contextmanager
    def kept(self) -> Generator[list[bool]]:
        """Restore the buffers that the block changes; yields a list that is non-empty afterwards if there are any."""
        before: dict[tuple[nn.Module, str], Tensor] = {}
        found: list[bool] = []

        def note(module: nn.Module, inputs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            for part in module.modules():
                if part.training:
                    for name, buffer in part._buffers.items():
                        if buffer is not None and (part, name) not in before:
                            before[part, name] = buffer.detach().clone()

        if self.complete:
            before = {
                (module, name): buffer.detach().clone()
                for module, names in self._changing.items()
                for name in names
                if module.training and (buffer := module._buffers[name]) is not None
            }
            yield found
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=r"Using `torch.compile\(module\)` when there are global hooks"
                )
                handle = register_module_forward_pre_hook(note)
                try:
                    yield found
                finally:
                    handle.remove()
        for (module, name), value in before.items():
            buffer = module._buffers[name]
            if buffer is not None and (self.complete or not torch.equal(buffer, value)):
                self._changing.setdefault(module, set()).add(name)
                found[:] = [True]
                buffer.data.copy_(value)  # graphs that saved the buffer with this value stay valid


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

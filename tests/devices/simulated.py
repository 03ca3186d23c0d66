"""A simulated accelerator: ``device="simgpu"`` behaves as a GPU does, and computes on the CPU.

Its tensors are plain ``torch.Tensor`` (no subclass, no mode) of an out-of-tree backend (``PrivateUse1``). Their storage
is host memory that torch takes for device memory. So views, in-place operations, autograd (in its own thread, as for
CUDA), double backward, functorch, checkpoints, hooks, ``deepcopy`` and ``torch.save`` run torch's own code. Only
kernels are Python: they run the same operator on CPU tensors in the same memory. The device refuses the same calls as a
GPU, and counts the waits of a GPU:

* a CPU tensor with dimensions (or a zero-dimensional one in a non-pointwise operator) meets a tensor of the
  device: ``RuntimeError``, in the wording of CUDA;
* a generator of the CPU for random numbers of the device: ``RuntimeError`` as well;
* ``numpy()`` of a tensor of the device: ``TypeError`` of torch itself;
* host reads (``item``, ``bool``, ``tolist``, ``cpu``, ``nonzero``, boolean masks, ``equal``, ``unique``, ...) and
  uploads (``torch.tensor(..., device=...)``, ``.to(device)``, CPU indices), each with the line of the library that
  asked for it: both wait for the device. A copy of pinned memory with ``non_blocking=True`` does not wait, and is
  counted by itself (``transfers``).

The device draws random numbers from its own generator. ``tf32()`` rounds the inputs of convolutions as tensor cores do,
``shared_randomness()`` lets the device draw the numbers that the CPU would draw.

Limits: it cannot show streams and events (all is synchronous), CUDA graphs, Triton's code, limits of kernels (grid
sizes, 32-bit offsets, alignment), memory, nondeterministic atomics, a second device, or speed. A generator of the
device that is used for CPU tensors goes unnoticed.

Implementation: DLPack gives a tensor of the device in a CPU tensor's memory (the capsule's device is overwritten), and
a storage made of an address gives the way back; views are torch's own kernels for the CPU, called on tensors of the
device. It relies on private parts of torch and changes torch for the whole process, so tests that use it run by
themselves (``pytest tests/devices``).
"""

from __future__ import annotations

import ctypes
import importlib.resources
import os
import threading
import traceback
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "simgpu"
PACKAGE, UPLOADS = "bilevel_optim", "placement.py"  # whose lines are said to have asked, and not what serves them
CPU = torch.device("cpu")
aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------------- memory

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_storage_at = torch._C._construct_storage_from_data_pointer


def _placed(t: Tensor) -> Tensor:
    """A tensor of the device in the memory of a CPU tensor, which lives as long; by DLPack, whose device is changed."""
    capsule = torch._C._to_dlpack(t)
    where = _pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(
        where + 8
    ).value = 12  # kDLExtDev: DLTensor is {void* data; {int32 type; int32 id}; ...}
    ctypes.c_int32.from_address(where + 12).value = 0
    return torch._C._from_dlpack(capsule)


def _alias(t: Tensor) -> Tensor:
    """A CPU tensor in the memory of a tensor of the device, which must live on."""
    if t.is_conj() or t.is_neg() or t.layout != torch.strided:
        raise NotImplementedError(f"simgpu: tensors with layout {t.layout} or lazy conjugation")
    memory = t.untyped_storage()
    here = _storage_at(memory.data_ptr(), CPU, memory.nbytes())
    return torch.empty(0, dtype=t.dtype, device=CPU).set_(here, t.storage_offset(), t.size(), t.stride())


def to_device(t: Tensor) -> Tensor:
    """A copy on the device that counts as nothing; it requires what the tensor requires."""
    return _placed(t.detach().cpu().clone()).requires_grad_(t.requires_grad)


def from_device(t: Tensor) -> Tensor:
    """A copy of a tensor's values on the CPU that counts as nothing."""
    return (_alias(t.detach()) if t.device.type == NAME else t.detach()).clone()


# ---------------------------------------------------------------------------------------------------- counts


@dataclass(frozen=True)
class Event:
    """A copy between host and device: the operator, and ``file:line function`` of who asked for it."""

    op: str
    where: str


@dataclass
class Seen:
    """Record of the device's operations.

    Attributes:
        reads: where the host read from the device, and waited.
        uploads: where the host copied to the device from pageable memory, and waited.
        transfers: where it copied from pinned memory, without waiting.
    """

    reads: list[Event] = field(default_factory=list)
    uploads: list[Event] = field(default_factory=list)
    transfers: list[Event] = field(default_factory=list)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the number of each."""
        return len(self.reads), len(self.uploads), len(self.transfers)

    def report(self) -> str:
        """All of it in words."""
        kinds = {"read": self.reads, "upload": self.uploads, "transfer": self.transfers}
        lines = [
            f"{name} x{n}: {event.op} at {event.where}"
            for name, events in kinds.items()
            for event, n in Counter(events).items()
        ]
        return "\n".join(lines) or "nothing"


_WATCHING: list[Seen] = []


def watched() -> bool:
    """Return True if a count is active."""
    return bool(_WATCHING)


_TORCH = os.path.dirname(torch.__file__)
_SELF = os.path.abspath(__file__)


@contextmanager
def watch() -> Iterator[Seen]:
    """Count what the block does."""
    seen = Seen()
    _WATCHING.append(seen)
    try:
        yield seen
    finally:
        _WATCHING[:] = [s for s in _WATCHING if s is not seen]


def _asked() -> str:
    """The innermost line of the package, else the innermost one that is not torch's."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if not frame.filename.startswith((_TORCH, "<frozen")) and os.path.abspath(frame.filename) != _SELF
    ]
    inside = [f for f in frames if f"{os.sep}{PACKAGE}{os.sep}" in f.filename and not f.filename.endswith(UPLOADS)]
    if not frames:
        return "backward thread"
    frame = (inside or frames)[-1]
    return f"{os.path.relpath(frame.filename)}:{frame.lineno} {frame.name}"


_DEBUG = [0]  # the mode of `torch.simgpu.set_sync_debug_mode`


def _read(op: str) -> None:
    for seen in _WATCHING:
        seen.reads.append(Event(op, _asked()))
    _warn(op)


def _upload(op: str) -> None:
    for seen in _WATCHING:
        seen.uploads.append(Event(op, _asked()))
    _warn(op)


def _transfer(op: str) -> None:
    for seen in _WATCHING:
        seen.transfers.append(Event(op, _asked()))


def _warn(op: str) -> None:
    if _DEBUG[0] == 1:
        warnings.warn(f"called a synchronizing {NAME} operation: {op}", UserWarning, stacklevel=2)
    elif _DEBUG[0] == 2:
        raise RuntimeError(f"called a synchronizing {NAME} operation: {op}")


def _set_debug(mode: int | str) -> None:
    _DEBUG[0] = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)


# ---------------------------------------------------------------------------------------------------- random numbers

_Native = torch.Generator
_RANDOM = _Native()  # of the device
_GENERATORS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_SHARED = [False]


class _Kind(type(_Native)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Native)


class _Generator(_Native, metaclass=_Kind):
    """``torch.Generator`` that knows the device too."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != NAME:
            return _Native(device)
        made = _Native.__new__(cls, "cpu")
        _GENERATORS[made._cdata] = made
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        return DEVICE


@contextmanager
def shared_randomness() -> Iterator[None]:
    """In the block the device draws from the default generator of the CPU: the numbers that a run on the CPU has."""
    before, _SHARED[0] = _SHARED[0], True
    try:
        yield
    finally:
        _SHARED[0] = before


@contextmanager
def _default_is_of_device() -> Iterator[None]:
    """For kernels that take no generator."""
    if _SHARED[0]:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(_RANDOM.get_state())
    try:
        yield
    finally:
        _RANDOM.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


# ---------------------------------------------------------------------------------------------------- operators

_WAITS = frozenset(  # the size of the result, or a value, is read by the host
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
    )
)
_SCALARS = frozenset(  # take a zero-dimensional CPU tensor as a number, besides torch's pointwise ones
    f"aten::{name}"
    for name in (
        "fill_",
        "masked_fill_",
        "masked_fill",
        "index_fill_",
        "_index_put_impl_",
        "index_put_",
        "where",
        "lerp",
        "lerp_",
        "copy_",
        "_copy_from",
        "_copy_from_and_resize",
        "_local_scalar_dense",
    )
)
_VALUE_READ = frozenset(("aten::masked_fill_", "aten::index_fill_"))  # call item() of a value that is on the device
_CPU_INDEX = frozenset(("aten::_index_put_impl_", "aten::index", "aten::_unsafe_index", "aten::index_put_"))


@cache
def _unchecked() -> frozenset[tuple[str, str]]:
    """Operators that CUDA runs on tensors of several devices, because the kernel checks them itself."""
    text = importlib.resources.files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml")
    if not text.is_file():
        return frozenset()
    entries = text.read_text().split("\n- func: ")[1:]
    names = (entry.partition("(")[0].partition(".") for entry in entries if "device_check: NoCheck" in entry)
    return frozenset((f"aten::{name}", overload) for name, _, overload in names)


class _Op:
    """Properties of an operator."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op, self.name, self.arguments = op, schema.name, schema.arguments
        self.full = f"{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"
        self.writes = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.out = [
            a.name for a in schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
        ]
        self.names = [a.name for a in schema.arguments]
        self.tensors = [i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"]
        self.returned = [
            None if r.alias_info is None or not r.alias_info.is_write else self._same(schema, r) for r in schema.returns
        ]
        known = torch.Tag.pointwise in op.tags or self.name in _SCALARS or self.name.startswith("aten::_foreach_")
        self.scalars = known or (self.name, schema.overload_name) in _unchecked()
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.generator = "generator" in self.names

    @staticmethod
    def _same(schema: Any, returned: Any) -> int:
        return next(
            i
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.before_set == returned.alias_info.before_set
        )


_OPS: dict[Any, _Op] = {}


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Every operator on the device: called by torch's dispatcher, below autograd and functorch."""
    with torch._C.DisableTorchFunction():
        known = _OPS.get(op)
        if known is None:
            known = _OPS[op] = _Op(op)
        special = _SPECIAL.get(known.name)
        if special is not None:
            return special(known, args, kwargs)
        return _run(known, args, kwargs)


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors(v)


def _require_one_device(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for place, value in (*zip(known.names, args, strict=False), *kwargs.items()):
        for t in tensors(value):
            if t.device.type == NAME:
                continue
            if t.device.type == "cpu":
                if t.dim() == 0 and known.scalars:
                    continue
                if known.name in _CPU_INDEX and place == "indices":
                    if known.name == "aten::_index_put_impl_":  # of others torch has copied them before
                        _upload(known.full + " (CPU index)")
                    continue
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{DEVICE} and {t.device}! (when checking argument for argument {place} in method simgpu_{known.full})"
            )


def _own_generator(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Require a generator of the device, and give one."""
    place = known.names.index("generator")
    given = args[place] if place < len(args) else kwargs.get("generator")
    if given is not None and given._cdata not in _GENERATORS:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{given.device.type}'")
    if given is None and place >= len(args) and not _SHARED[0]:
        kwargs["generator"] = _RANDOM


def _unwrapped(value: Any, made: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        if value.device.type != NAME:
            return value
        for known, here in made:
            if known is value:
                return here
        here = _alias(value)
        made.append((value, here))
        return here
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrapped(v, made) for v in value)
    if isinstance(value, torch.device) and value.type == NAME:
        return CPU
    return value


def _number(value: Any, args: Sequence[Any]) -> Tensor:
    """Return the tensor for a Python number; it does not change the type of the others."""
    like = next((a for a in args if isinstance(a, Tensor)), None)
    kind = torch.tensor(value, device=CPU).dtype if not isinstance(value, float) else torch.float64
    if like is not None and torch.result_type(like, value) == like.dtype:
        kind = like.dtype
    return torch.tensor(value, dtype=kind, device=CPU)


def _run(known: _Op, args: Sequence[Any], kwargs: dict[str, Any], op: Any = None) -> Any:
    """The operator on CPU tensors in the same memory."""
    _require_one_device(known, args, kwargs)
    if known.generator:
        _own_generator(known, args, kwargs)
    if known.name in _WAITS:
        _read(known.full)
    made: list[tuple[Tensor, Tensor]] = []
    for name in known.out:  # may be resized by the kernel, as the memory of an alias cannot be
        value = kwargs.get(name)
        if isinstance(value, Tensor) and not value.numel():
            made.append((value, torch.empty_like(_alias(value))))
    own = [_unwrapped(a, made) for a in args]
    for i in known.tensors:
        if i < len(own) and isinstance(own[i], (bool, int, float, complex)):
            own[i] = _number(own[i], own)
    named = {k: _unwrapped(v, made) for k, v in kwargs.items()}
    if "pin_memory" in named:
        named["pin_memory"] = False
    if known.random and not known.generator:
        with _default_is_of_device():
            result = (op or known.op)(*own, **named)
    else:
        result = (op or known.op)(*own, **named)
    for i in known.writes:  # out= may have been resized
        value = args[i] if i < len(args) else kwargs.get(known.names[i])
        if isinstance(value, Tensor) and _is_here(value):
            here = next(h for t, h in made if t is value)
            if here.untyped_storage().data_ptr() != value.untyped_storage().data_ptr() or here.size() != value.size():
                _resized(value, here.size())
                _alias(value).copy_(here)
    return _wrapped(known, result, args, kwargs, made)


def _wrapped(
    known: _Op, result: Any, args: Sequence[Any], kwargs: dict[str, Any], made: list[tuple[Tensor, Tensor]]
) -> Any:
    def given(i: int) -> Any:
        return args[i] if i < len(args) else kwargs[known.names[i]]

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            place = value.untyped_storage().data_ptr()
            for t, here in made if place else ():
                if here.untyped_storage().data_ptr() == place:
                    return _view(t, value)
            return _placed(value)
        if isinstance(value, (list, tuple)):
            return type(value)(one(v) for v in value)
        return value

    if not known.returned:
        return None
    if len(known.returned) == 1:
        same = known.returned[0]
        return one(result) if same is None else given(same)
    return tuple(one(r) if same is None else given(same) for r, same in zip(result, known.returned, strict=True))


def _view(base: Tensor, like: Tensor) -> Tensor:
    """A view of the base's storage with the form of a tensor."""
    if like.dtype == base.dtype:
        return aten.as_strided.default.redispatch(_CPU_KEYS, base, like.size(), like.stride(), like.storage_offset())
    made = _placed(torch.empty(0, dtype=like.dtype, device=CPU))
    _set(made, base.untyped_storage(), like.storage_offset(), like.size(), like.stride())
    return made


def _set(t: Tensor, storage: Any, offset: int, size: Sequence[int], stride: Sequence[int]) -> None:
    aten.set_.source_Storage_storage_offset.redispatch(_CPU_KEYS, t, storage, offset, size, stride)


def _resized(t: Tensor, size: Sequence[int]) -> None:
    stride, n = [], 1
    for k in reversed(size):
        stride.insert(0, n)
        n *= max(k, 1)
    needed = (n if all(size) else 0) * t.element_size()
    offset = t.storage_offset() * t.element_size()
    if needed + offset <= t.untyped_storage().nbytes():
        _set(t, t.untyped_storage(), t.storage_offset(), size, stride)
    else:
        more = torch.empty(needed // t.element_size(), dtype=t.dtype, device=CPU)
        more[: t.numel()] = _alias(t).reshape(-1)
        _set(t, _placed(more).untyped_storage(), 0, size, stride)


# Operators that are no kernels.


def _as_strided(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    t, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    offset = t.storage_offset() if offset is None else offset
    return aten.as_strided.default.redispatch(_CPU_KEYS, t, size, stride, offset)


def _viewed(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if known.full == "view.default":
        return aten.view.default.redispatch(_CPU_KEYS, *args)
    return _run(known, args, kwargs)


def _resize(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    _resized(args[0], args[1])
    return args[0]


def _assigned(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    t, *source = args
    if source and isinstance(source[0], Tensor):
        _set(t, source[0].untyped_storage(), source[0].storage_offset(), source[0].size(), source[0].stride())
    elif len(source) == 1:
        _set(t, source[0], 0, [source[0].nbytes() // t.element_size()], [1])
    elif source:
        known.op.redispatch(_CPU_KEYS, *args)
    else:
        _set(t, _placed(torch.empty(0, dtype=t.dtype, device=CPU)).untyped_storage(), 0, [0], [1])
    return t


def _copied(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``copy_``: between devices the host waits, but for pinned memory told not to."""
    to, source = args[:2]
    if known.name != "aten::copy_":
        source, to = args[:2]
        if known.name == "aten::_copy_from_and_resize" and to.size() != source.size():
            to.resize_(source.size())
    if not _is_here(to):
        _read("copy to the CPU")
    elif not _is_here(source):
        quickly = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        (_transfer if quickly and source.is_pinned() else _upload)("copy from the CPU")
    (_alias(to) if _is_here(to) else to).copy_(_alias(source) if _is_here(source) else source)
    return to


def _foreach_copy(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if all(map(_is_here, (*args[0], *args[1]))):
        return _run(known, args, kwargs)
    for to, source in zip(*args[:2], strict=True):
        to.copy_(source)
    return None if not known.returned else args[0]


def _index_put(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    indices, values = args[1], args[2]
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if masks and not (values.numel() == 1 and len(masks) == 1 and not (len(args) > 3 and args[3])):
        _read(known.full + " (mask)")
    if values.device.type == "cpu" and values.dim() == 0:
        _upload(known.full + " (CPU value)")
    return _run(known, args, kwargs)


def _valued(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if _is_here(args[-1]) and known.full.endswith("Tensor"):
        _read(known.full + " (value)")
    return _run(known, args, kwargs)


def _repeated(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("output_size") is None:
        _read(known.full)
    return _run(known, args, kwargs)


def _zeros(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``_efficientzerotensor``, which CUDA does not even allocate: zeros in memory."""
    return _placed(torch.zeros(args[0], dtype=kwargs.get("dtype"), device=CPU))


_TF32: list[tuple[str, ...]] = []
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot")


@contextmanager
def tf32(matmul: bool = False) -> Iterator[None]:
    """In the block convolutions (and products of matrices) round float32 inputs to 10 bits, as tensor cores do.

    CUDA does so for convolutions unless ``torch.backends.cudnn.allow_tf32 = False``, for products only if asked to.
    """
    _TF32.append(("convolution", *(_PRODUCTS if matmul else ())))
    try:
        yield
    finally:
        _TF32.pop()


def _rounded(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)  # to the nearest, ties to even


def _product(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def low(first: Any, *rest: Any, **named: Any) -> Any:
        return known.op(first if "add" in known.name else _rounded(first), *map(_rounded, rest), **named)

    return _run(known, args, kwargs, low if _TF32 and known.name in _TF32[-1] else None)


def _convolution(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def low(input: Tensor, weight: Tensor, *rest: Any) -> Any:
        return aten.convolution.default(_rounded(input), _rounded(weight), *rest)

    return _run(known, args, kwargs, low if _TF32 else aten.convolution.default)


def _convolution_backward(known: _Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    _grad, _input, weight, stride, padding, dilation, transposed, output_padding, groups, mask = args
    sizes = [weight.size(0) if not transposed else weight.size(1) * groups]

    def both(grad: Tensor, input: Tensor, weight: Tensor, *_: Any) -> Any:
        grad, input, weight = map(_rounded, (grad, input, weight)) if _TF32 else (grad, input, weight)
        return aten.convolution_backward(
            grad, input, weight, sizes, stride, padding, dilation, transposed, output_padding, groups, mask
        )

    return _run(known, args, kwargs, both)


_SPECIAL = {
    "aten::as_strided": _as_strided,
    "aten::view": _viewed,
    "aten::resize_": _resize,
    "aten::set_": _assigned,
    "aten::copy_": _copied,
    "aten::_copy_from": _copied,
    "aten::_copy_from_and_resize": _copied,
    "aten::_foreach_copy_": _foreach_copy,
    "aten::_index_put_impl_": _index_put,
    "aten::masked_fill_": _valued,
    "aten::index_fill_": _valued,
    "aten::repeat_interleave": _repeated,
    "aten::_efficientzerotensor": _zeros,
    **dict.fromkeys(_PRODUCTS, _product),
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward_overrideable": _convolution_backward,
}


def _directly() -> Iterator[tuple[str, Any]]:
    """Operators with a kernel of their own: what torch does not make of others, or what CUDA has kernels for anyway.

    (A fallback for all would do, except for calls inside a mode that is not on: ``torch.tensor`` in a trace.)
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::"):
            continue
        name, _, overload = full.removeprefix("aten::").partition(".")
        structured, explicit, implicit = (
            has(full, key)
            for key in (
                "CompositeExplicitAutogradNonFunctional",
                "CompositeExplicitAutograd",
                "CompositeImplicitAutograd",
            )
        )
        if implicit or structured:
            continue
        lists = name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")) and not overload.endswith(
            "out"
        )
        faster = has(full, "CPU") and (has(full, "CUDA") or not torch.version.cuda)
        if not explicit or lists or faster or f"aten::{name}" in _SPECIAL:
            try:
                yield full, getattr(getattr(aten, name), overload or "default")
            except AttributeError:
                continue


# ---------------------------------------------------------------------------------------------------- torch.simgpu


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class device:
    """``torch.simgpu.device``: there is one."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _module() -> types.ModuleType:
    """The part of ``torch.cuda`` that torch itself and callers use."""
    module = types.ModuleType(f"torch.{NAME}")

    def get_rng_state(device: Any = NAME) -> Tensor:
        return _RANDOM.get_state()

    def set_rng_state(new_state: Tensor, device: Any = NAME) -> None:
        _RANDOM.set_state(new_state.clone())

    def manual_seed_all(seed: int) -> None:
        _RANDOM.manual_seed(int(seed))

    found: dict[str, Any] = {
        "_initialized": True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": device,
        "synchronize": lambda device=None: _read("synchronize"),
        "set_sync_debug_mode": _set_debug,
        "get_sync_debug_mode": lambda: _DEBUG[0],
        "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
        "empty_cache": lambda: None,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state()],
        "manual_seed": manual_seed_all,
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: _RANDOM.initial_seed(),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": lambda device=None: (9, 0),
    }
    for name, value in found.items():
        setattr(module, name, value)
    return module


# ---------------------------------------------------------------------------------------------------- storages, files


def _storage(size: int) -> Any:
    return _placed(torch.empty(size, dtype=torch.uint8, device=CPU)).untyped_storage()


def _patch_storages() -> None:
    """Storages that are made by size, copied or loaded: torch asks an allocator, which only C++ can register."""
    cls, base = torch.UntypedStorage, torch.storage._StorageBase
    new, clone = cls.__new__, base.clone

    def __new__(c: Any, *args: Any, **kwargs: Any) -> Any:
        where = kwargs.get("device")
        if where is not None and torch.device(where).type == NAME:
            return _storage(int(args[0]) if args else int(kwargs.get("size", 0)))
        return new(c, *args, **kwargs)

    def cloned(self: Any) -> Any:
        if self.device.type != NAME:
            return clone(self)
        made = _storage(self.nbytes())
        ctypes.memmove(made.data_ptr(), self.data_ptr(), self.nbytes())
        return made

    cls.__new__ = __new__
    base.clone = cloned

    def tag(storage: Any) -> str | None:
        return f"{NAME}:0" if storage.device.type == NAME else None

    def load(storage: Any, location: str) -> Any:
        if not location.startswith(NAME):
            return None
        if (torch.device(location).index or 0) > 0:
            raise RuntimeError(
                f"Attempting to deserialize object on {NAME} device {torch.device(location).index} but "
                f"torch.{NAME}.device_count() is 1. Please use torch.load with map_location to map your storages "
                "to an existing device."
            )
        made = _storage(storage.nbytes())
        ctypes.memmove(made.data_ptr(), storage.data_ptr(), storage.nbytes())
        return made

    torch.serialization.register_package(1, tag, load)


_PINNED: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by address


def _pin_memory(t: Tensor, device: Any = None) -> Tensor:
    made = t.clone()
    _PINNED[made.data_ptr()] = made
    return made


def _patch_torch() -> None:
    torch.Generator = _Generator
    torch.Tensor.pin_memory = _pin_memory
    torch.Tensor.is_pinned = lambda t, device=None: t.untyped_storage().data_ptr() in _PINNED


_LOST: list[BaseException] = []  # raised by unpack hooks


def _patch_hooks() -> None:
    """Let what an unpack hook (a checkpoint) raises in the thread of the device arrive where the backward pass began.

    It would end the process, because torch's guard for Python backends calls Python while it unwinds. So the hook gives
    nothing instead, which torch refuses, and the error is raised later.
    """
    hooks, graph = torch.autograd.graph.saved_tensors_hooks, torch.autograd.graph
    init, backward = hooks.__init__, graph._engine_run_backward

    def __init__(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        def unpacked(packed: Any) -> Any:
            try:
                return unpack_hook(packed)
            except BaseException as error:
                if isinstance(threading.current_thread(), threading._DummyThread):
                    _LOST.append(error)
                    return None
                raise

        init(self, pack_hook, unpacked)

    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return backward(*args, **kwargs)
        except TypeError:
            if _LOST:
                raise _LOST.pop() from None
            raise

    hooks.__init__ = __init__
    graph._engine_run_backward = torch.autograd._engine_run_backward = _engine_run_backward


# ---------------------------------------------------------------------------------------------------- installation


def _install() -> tuple[Any, Any]:
    _setup_privateuseone_for_python_backend(NAME, _module(), _Hook(), _Guard())
    every = torch.library.Library("_", "IMPL")
    every.fallback(_call, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for full, op in [*_directly()]:
        own.impl(full, lambda *args, _op=op, **kwargs: _call(_op, *args, **kwargs), "PrivateUse1")
    _patch_storages()
    _patch_torch()
    _patch_hooks()
    return every, own


DEVICE = None
_LIBRARIES = _install()
DEVICE = torch.device(NAME, 0)

"""Random numbers: by counter (each draw has a generator seeded by its purpose), and from a stream."""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..kernels.counter import mixed_number
from ..pytree import tree_map
from .placement import to_device
from .vector import Vector

__all__ = [
    "SEEDS",
    "Counters",
    "RandomState",
    "default_state",
    "derive_generator",
    "device_of",
    "draw_index",
    "draw_random_inputs",
    "draw_seed",
    "generators_of",
    "hashed",
    "numbers_kept",
    "preserve_rng",
    "set_default_state",
    "set_states",
    "states_of",
    "uniform_ball",
]

SEEDS = 2**62
LONG = 100  # lists with more entries are not searched for generators


class Counters:
    """Generators that depend on a seed and on counters only, not on earlier draws.

    A draw can be repeated, left out, or made elsewhere without changing any other: results do not depend on the order
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
        """Return the generator of these counters, at its start; valid until the next call."""
        value = mixed_number(self.seed)
        for counter in counters:
            value = mixed_number(value ^ mixed_number(counter + 1))
        return self._generator.manual_seed(value >> 1)


def hashed(*numbers: int) -> int:
    """Return a well-mixed number below 2^63, a function of these numbers."""
    state = 0
    for number in numbers:
        state = mixed_number(state + number)
    return state >> 1


def device_of(generator: torch.Generator | None) -> torch.device:
    """Return the device of a generator; the CPU for None."""
    return generator.device if generator is not None else torch.device("cpu")


def draw_index(count: int, generator: torch.Generator | None) -> int:
    """Draw a number from 0, ..., count - 1."""
    return int(torch.randint(count, (), generator=generator, device=device_of(generator)))


def draw_random_inputs(
    counts: Mapping[str, int], generator: torch.Generator | None, agreed: Callable[[int], int] = int
) -> dict[str, Tensor]:
    """Draw an index below each count, as integer tensors on the CPU; ``agreed`` makes it equal on all ranks."""
    return {name: torch.tensor(agreed(draw_index(count, generator)), device="cpu") for name, count in counts.items()}


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for other generators."""
    return draw_index(SEEDS, generator)


def derive_generator(generator: torch.Generator | None, *numbers: int) -> torch.Generator:
    """Return a new generator, seeded by these numbers and the state of ``generator``, which does not advance."""
    twin = torch.Generator(device_of(generator))
    twin.set_state(torch.get_rng_state() if generator is None else generator.get_state())
    return twin.manual_seed(hashed(draw_seed(twin), *numbers))


@contextmanager
def preserve_rng(device: torch.device, start: RandomState | None = None) -> Generator[None]:
    """Restore torch's random state after the block, whatever it draws; ``start`` is the state in which it begins.

    Raises:
        RuntimeError: if there is a start, but random numbers of evaluations on the device cannot be replayed.
    """
    if start is not None:
        _require_replayable(device, start)
    state = default_state(device)
    if start is not None:
        set_default_state(device, start)
    try:
        yield
    finally:
        set_default_state(device, state)


@contextmanager
def numbers_kept(device: torch.device) -> Generator[None]:
    """Restore torch's, Python's and NumPy's random states after the block."""
    numpy = sys.modules.get("numpy")
    pythons, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with preserve_rng(device):
            yield
    finally:
        random.setstate(pythons)
        if numpy is not None:
            numpy.random.set_state(arrays)


RandomState = tuple[Tensor, ...]  # of the host, and of a device with a random state of its own


def default_state(device: torch.device) -> RandomState:
    """Return the state of torch's default generators for evaluations on a device (if unknown, the host's alone)."""
    own = _own_state(device)
    return (torch.get_rng_state(),) if own is None else (torch.get_rng_state(), own[0]())


def set_default_state(device: torch.device, state: RandomState) -> None:
    """Restore a state from `default_state`."""
    torch.set_rng_state(state[0])
    if (own := _own_state(device)) is not None:
        own[1](state[1])


def _require_replayable(device: torch.device, state: RandomState) -> None:
    """Raise RuntimeError if random numbers of evaluations on a device cannot be replayed."""
    if len(state) == 1 and device.type != "cpu":
        raise RuntimeError(
            f"the random state of devices of type {device.type!r} cannot be read: torch.{device.type} has no "
            "get_rng_state and set_rng_state. A sample is evaluated several times with the same random numbers "
            "(dropout), which is not possible there; move the parameters and the data to another device"
        )


@cache
def _own_state(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]] | None:
    """Return functions that read and set the random state of an accelerator; None for the CPU, or if torch cannot."""
    try:
        module = None if device.type == "cpu" else torch.get_device_module(device.type)
    except RuntimeError:
        return None
    read, write = (getattr(module, f"{verb}_rng_state", None) for verb in ("get", "set"))
    if read is None or write is None:
        return None
    if not inspect.signature(read).parameters:  # there is one device only
        return read, write
    return partial(read, device), lambda state: write(state, device)


def uniform_ball(like: Sequence[Tensor], radius: float, generator: torch.Generator | None = None) -> Vector:
    r"""Return a uniform random point of the ball of given radius in the space of all these tensors together.

    :math:`\xi = r\, U^{1/d}\, n / \|n\|` with n normal, U uniform on (0, 1), d the number of all entries.

    Args:
        like: tensors that give shape, dtype and device.
        radius: r.
        generator: source of the random numbers, of any device. Default: torch's default one.
    """
    device = like[0].device if generator is None else generator.device
    normal = Vector(
        to_device(torch.randn(t.shape, generator=generator, dtype=t.dtype, device=device), t.device) for t in like
    )
    uniform = torch.rand((), generator=generator, dtype=torch.float32, device=device_of(generator))
    length = radius * (uniform if uniform.is_mps else uniform.double()) ** (1 / max(sum(t.numel() for t in like), 1))
    return Vector((n * (length / normal.norm())).to(n.dtype) for n in normal)


# ------------------------------------------------------------------------------------------------ data


def generators_of(data: Any) -> dict[str, Any]:
    """Return the random generators (of torch, NumPy or Python) of data, by their attribute paths.

    The search covers attributes of the data and of their samplers, datasets and lists of transforms. Long lists, and
    lists in lists, are assumed to be examples and are skipped.
    """
    found: dict[str, Any] = {}
    left, seen = deque([("", data, False)]), {id(torch.default_generator)}
    while left:
        path, value, listed = left.popleft()
        if id(value) in seen or isinstance(value, (Tensor, type, ModuleType)):
            continue
        seen.add(id(value))
        if _is_generator(value):
            found[path] = value
            continue
        parts = [*getattr(value, "__dict__", {}).items()]
        short = isinstance(value, (list, tuple, dict)) and len(value) <= LONG and not listed
        if short:
            parts += value.items() if isinstance(value, dict) else enumerate(value)
        # Generators of a loader's iterator belong to one pass.
        left += [(f"{path}.{name}".lstrip("."), part, short) for name, part in parts if name != "_iterator"]
    return found


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    kind = type(value)
    return kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generators, as tensors and built-in types of Python."""
    found: dict[str, Any] = {}
    for name, generator in generators.items():
        if isinstance(generator, torch.Generator):
            found[name] = generator.get_state()
        elif isinstance(generator, random.Random):
            found[name] = generator.getstate()
        else:
            old = hasattr(generator, "get_state")  # a RandomState of NumPy
            state = generator.get_state(legacy=False) if old else generator.bit_generator.state
            found[name] = tree_map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, state)
    return found


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restore the states of generators."""
    for name, state in states.items():
        generator = generators[name]
        if isinstance(generator, torch.Generator):
            generator.set_state(state.cpu())
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state

"""Many lower problems, one for each task or context: samplers and their draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..pytree import is_named_tuple, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten
from ..tracing import is_tracing
from .placement import to_device
from .random import device_of
from .vector import Vector

__all__ = [
    "LowerInit",
    "StandIn",
    "TaskDraws",
    "TaskSampler",
    "TensorTasks",
    "as_start",
    "draw",
    "draw_apart",
    "draw_whole",
    "length_of",
    "require_ids",
    "sample",
    "select",
    "starting_points",
    "task_count",
]

LowerInit = Callable[..., Tensor | Sequence[Tensor]]  # takes the drawn tasks; without tasks, nothing
Whole = Callable[[Any, Mapping[str, Any]], Any]  # draws all that a step needs, from a sampler and random inputs


@runtime_checkable
class TaskSampler(Protocol):
    """Sampler for ``step(upper, lower, tasks=sampler)``: any object with these three methods.

    A sampler of a finite set of tasks should also have a length, the number of tasks.
    """

    def sample(self, n: int, generator: torch.Generator | None) -> Any:
        """Draw n tasks: a LongTensor of n ids, or a pytree of contexts with leading dimension n."""

    def lower(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        """Draw n rows of the lower data of each task: a pytree with leading dimensions (len(tasks), n).

        With n = None, return all data of the task.
        """

    def upper(self, tasks: Any, n: int | None, generator: torch.Generator | None) -> Any:
        """Draw n rows of the upper data of each task, in the same form."""


class TensorTasks:
    r"""A finite set of m tasks whose data are stacked tensors.

    ``sample`` draws *different* tasks, each equally likely. If n > m, every task comes up
    :math:`\lfloor n/m \rfloor` times and the rest are different. So the mean over the draw is an unbiased
    estimate of the mean over all tasks, and exact for n = m. ``lower`` and ``upper`` draw rows *with* replacement,
    independently for each task: independent samples of the task's own distribution.

    Args:
        lower: data of the lower problems: a tensor of shape (m, rows, ...), or a pytree (tuple, dict, ...) of such
            tensors with the same m and the same number of rows. Tasks with fewer rows need padding and a mask.
        upper: data of the upper losses, in the same form, with its own number of rows. Default: the lower data.

    Raises:
        ValueError: if the tensors do not have common leading dimensions, or are empty.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> inputs, labels = torch.randn(20, 50, 8), torch.randint(0, 3, (20, 50))  # 20 tasks of 50 examples
        >>> tasks = bo.TensorTasks((inputs[:, :40], labels[:, :40]), (inputs[:, 40:], labels[:, 40:]))
        >>> ids = tasks.sample(4, torch.Generator().manual_seed(0))
        >>> [tuple(t.shape) for t in tasks.lower(ids, 5, None)], [tuple(t.shape) for t in tasks.upper(ids, None, None)]
        ([(4, 5, 8), (4, 5)], [(4, 10, 8), (4, 10)])
    """

    def __init__(self, lower: Any, upper: Any = None) -> None:
        self._data = {"lower": lower, "upper": lower if upper is None else upper}
        sizes = {level: self._sizes(level, data) for level, data in self._data.items()}
        self._tasks, others = sizes["lower"][0], sizes["upper"][0]
        if self._tasks != others:
            raise ValueError(
                f"the lower data are of {self._tasks} tasks, but the upper data of {others}; each task needs "
                "both, so pass the same tasks in the same order"
            )
        self._last: tuple[Tensor, Tensor] | None = None  # ids, and their copy on another device
        self._rows = {level: rows for level, (_, rows) in sizes.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a pickle, also of an earlier version, which had the attributes ``_lower`` and ``_upper``."""
        if "_data" not in state:
            old = {level: f"_{level}" for level in ("lower", "upper")}
            own = {name: value for name, value in state.items() if name not in old.values()}
            state = {**own, "_data": {level: state[name] for level, name in old.items()}}
        vars(self).update(state, _last=None)

    @staticmethod
    def _sizes(name: str, data: Any) -> tuple[int, int]:
        leaves = tree_leaves(data)
        if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() >= 2 for leaf in leaves):
            raise ValueError(
                f"the {name} data must be tensors of shape (tasks, rows, ...), but got "
                f"{[tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]}; stack "
                "the data of all tasks (torch.stack)"
            )
        if any(leaf.grad_fn is not None for leaf in leaves):
            raise ValueError(
                f"the {name} data have a graph, but are computed only once, so they would not follow the parameters; "
                "compute in the loss what depends on parameters, or detach the data"
            )
        shapes = {leaf.shape[:2] for leaf in leaves}
        if len(shapes) > 1:
            raise ValueError(
                f"the {name} data must have the same number of tasks and of rows in every tensor, but have "
                f"{sorted(tuple(shape) for shape in shapes)}; pad tasks with fewer rows, and mask the padding in the "
                "loss"
            )
        (m, rows) = shapes.pop()
        if not m or not rows:
            raise ValueError(
                f"the {name} data are empty: {m} tasks with {rows} rows; there must be at least one task, with one row"
            )
        return m, rows

    def __len__(self) -> int:
        return self._tasks

    def to(self, device: torch.device | str) -> TensorTasks:
        """Return the same tasks with their data on a device."""
        lower, upper = (tree_map(lambda t: t.to(device), data) for data in self._data.values())
        return TensorTasks(lower, None if self._data["upper"] is self._data["lower"] else upper)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw task ids, as different as possible, in random order."""
        whole, rest = divmod(n, self._tasks)
        if 0 < rest < self._tasks // 8:  # few out of many: a permutation of all costs more
            ids = self._few(rest, generator)
        else:
            ids = torch.randperm(self._tasks, generator=generator, device=device_of(generator))[:rest]
        if whole:
            ids = torch.cat([torch.arange(self._tasks, device=ids.device).repeat(whole), ids])
            ids = ids[torch.randperm(n, generator=generator, device=ids.device)]
        return ids

    def _few(self, n: int, generator: torch.Generator | None) -> Tensor:
        found: dict[int, None] = {}  # in the order drawn
        while len(found) < n:  # redrawing repeated ids is uniform over the sets of different ids
            more = torch.randint(self._tasks, (n - len(found),), generator=generator, device=device_of(generator))
            found.update(dict.fromkeys(more.tolist()))
        return torch.tensor([*found], device=device_of(generator))

    def lower(self, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Any:
        """Draw rows of the lower data of these tasks."""
        return self._draw("lower", tasks, n, generator)

    def upper(self, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Any:
        """Draw rows of the upper data of these tasks."""
        return self._draw("upper", tasks, n, generator)

    def _draw(self, level: str, tasks: Tensor, n: int | None, generator: torch.Generator | None) -> Any:
        if n is None:
            return self._of(level, tasks)
        shape = (len(tasks), n)
        rows = torch.randint(self._rows[level], shape, generator=generator, device=device_of(generator))
        return self._of(level, tasks, rows)

    def apart(self, level: str, tasks: Tensor, n: int, generators: Iterable[torch.Generator]) -> Any:
        """Draw rows of the lower or upper data of each task with its own generator."""
        rows = [torch.randint(self._rows[level], (n,), generator=own, device=own.device) for own in generators]
        return self._of(level, tasks, torch.stack(rows))

    def _of(self, level: str, tasks: Tensor, rows: Tensor | None = None) -> Any:
        """Return these rows of the data of each task, by default all."""
        data = self._data[level]
        device = tree_leaves(data)[0].device
        if tasks.device != device:  # cached, because a step asks for the same ids many times
            if self._last is None or self._last[0] is not tasks or self._last[1].device != device:
                self._last = tasks, to_device(tasks, device)
            tasks = self._last[1]
        index = tasks if rows is None else (tasks.unsqueeze(1), to_device(rows, device))
        return tree_map(lambda t: t[index], data)

    def __repr__(self) -> str:
        return f"TensorTasks({self._tasks} tasks, rows: {self._rows['lower']} lower, {self._rows['upper']} upper)"


class StandIn:
    """Replacement of a sampler of tasks, which draws as that does.

    Args:
        source: the replaced sampler.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def sample(self, n: int, generator: Any) -> Any:
        return self.source.sample(n, generator)

    def lower(self, tasks: Any, n: Any, generator: Any) -> Any:
        return self.source.lower(tasks, n, generator)

    def upper(self, tasks: Any, n: Any, generator: Any) -> Any:
        return self.source.upper(tasks, n, generator)


def draw_whole(tasks: Any, draw: Whole, random_inputs: Mapping[str, Any]) -> Any:
    """Return all data that a step draws from the tasks, if they must be known in advance; else None.

    Args:
        tasks: a sampler, or a `StandIn`.
        draw: draws the data as a pytree, from the sampler and the step's random inputs alone.
        random_inputs: random inputs of the step.
    """
    whole = getattr(tasks, "whole", None) if isinstance(tasks, StandIn) else None
    return None if whole is None else whole(draw, random_inputs)


def length_of(sampler: Any) -> int | None:
    """Return the number of tasks of a sampler; None if it has no length."""
    source = sampler.source if isinstance(sampler, StandIn) else sampler
    return len(source) if hasattr(source, "__len__") else None


def task_count(sampler: Any, asked: int | None) -> int:
    """Return the number of tasks of a step: the number asked for, else all of a finite sampler, else one."""
    for name in ("sample", "lower", "upper"):
        if not callable(getattr(sampler, name, None)):
            raise TypeError(
                f"tasks must be a sampler with the methods sample, lower and upper, but {type(sampler).__name__} has "
                f"no {name}; bo.TensorTasks makes one from stacked tensors"
            )
    length = length_of(sampler)
    if length == 0:
        raise ValueError(
            f"the sampler of tasks has length 0: {type(sampler).__name__} has no tasks to draw; its __len__ must "
            "return the number of tasks, at least 1"
        )
    if asked is not None:
        return asked
    return 1 if length is None else length


def select(batch: Any, index: Any) -> Any:
    """Return the same entries of the leading dimension of every tensor of a pytree."""
    if isinstance(index, Tensor) and index.dim() and index.is_cpu:
        index = _move_to_data(index, batch)
    kind = type(batch)  # tuples are common, and this is three times as fast as the general form
    if kind is tuple or is_named_tuple(kind):
        parts = [t[index] if isinstance(t, Tensor) else select(t, index) for t in batch]
        return tuple(parts) if kind is tuple else kind(*parts)
    return tree_map(lambda t: t[index] if isinstance(t, Tensor) else t, batch)


def _move_to_data(index: Tensor, batch: Any) -> Tensor:
    """Return an index on the device of the data, if all data are on one."""
    for t in batch if type(batch) is tuple else ():
        if isinstance(t, Tensor) and t.is_cpu:
            return index
    devices = {leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    return to_device(index, devices.pop()) if len(devices) == 1 else index


def require_shape(what: str, batch: Any, sizes: tuple[int, ...]) -> None:
    """Raise ValueError unless every tensor of the pytree has these leading dimensions."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not leaves:
        raise ValueError(
            f"tasks.{what} must return a tensor or a pytree of tensors, but returned {type(batch).__name__}"
        )
    if all(leaf.shape[: len(sizes)] == sizes for leaf in leaves):
        return
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor) and leaf.shape[: len(sizes)] != sizes:
            where = f" at {''.join(map(str, path))}" if path else ""
            raise ValueError(
                f"tasks.{what} must return tensors with leading dimensions {sizes}, for the tasks"
                f"{' and the rows of each' if len(sizes) > 1 else ''}, but returned one of shape "
                f"{tuple(leaf.shape)}{where}"
            )


class TaskDraws:
    """Data of drawn tasks, with checked shapes.

    Args:
        sampler: source of the data.
        tasks: the drawn tasks.
        count: number of these tasks.
        sizes: rows per batch, for ``"lower"`` and for ``"upper"``; None: all.
        generator: source of the draws.
    """

    def __init__(
        self,
        sampler: Any,
        tasks: Any,
        count: int,
        sizes: dict[str, int | None],
        generator: torch.Generator | None,
    ) -> None:
        self.sampler, self.tasks, self.count, self.sizes, self.generator = sampler, tasks, count, sizes, generator
        self._all: dict[str, Any] = {}
        self._kept: dict[str, list[Any]] = {"lower": [], "upper": []}

    def of(self, part: slice) -> Callable[[str], Any]:
        """Return a function that draws batches of some tasks; each draw is made for all tasks together."""
        taken = {"lower": 0, "upper": 0}
        last: dict[str, tuple[Any, Any]] = {}  # by level: last batch of all tasks, and its part

        def batch(level: str) -> Any:
            kept, k = self._kept[level], taken[level]
            if k == len(kept):
                kept.append(self.batch(level))
            taken[level] += 1
            whole = kept[k]
            if part == slice(0, self.count):
                return whole
            if last.get(level, (None, None))[0] is not whole:  # features are cached by the object's identity
                last[level] = whole, select(whole, part)
            return last[level][1]

        return batch

    def batch(self, level: str) -> Any:
        """Draw one batch of each task."""
        n = self.sizes[level]
        if n is None and level in self._all:
            return self._all[level]
        batch = draw(self.sampler, level, self.tasks, self.count, n, self.generator)
        if n is None:
            self._all[level] = batch
        return batch


def sample(sampler: Any, count: int, generator: torch.Generator | None) -> Any:
    """Draw tasks, and check their shape."""
    tasks = sampler.sample(count, generator)
    require_shape(f"sample({count}, generator)", tasks, (count,))
    return tasks


def require_ids(tasks: Any, number: int) -> None:
    """Raise ValueError unless tasks are ids below a number; values are read on the CPU only, and not in a graph."""
    if not isinstance(tasks, Tensor) or tasks.dim() != 1 or tasks.dtype != torch.long:
        shown = f"{tasks.dtype} of shape {tuple(tasks.shape)}" if isinstance(tasks, Tensor) else type(tasks).__name__
        raise ValueError(
            "task_memory=True needs a sampler that draws ids of tasks, because a row is found by its id, but "
            f"sample returned {shown}; return a LongTensor of shape (n,)"
        )
    if is_tracing() or not tasks.is_cpu:
        return
    least, most = int(tasks.min()), int(tasks.max())
    if not 0 <= least <= most < number:
        raise ValueError(
            f"task_memory=True keeps a row for each of {number} tasks, but sample returned ids from {least} to {most}; "
            "return ids of at least 0, below the length of the sampler"
        )


def draw(sampler: Any, level: str, tasks: Any, count: int, n: int | None, generator: torch.Generator | None) -> Any:
    """Draw a batch for each task, and check its shape."""
    batch = getattr(sampler, level)(tasks, n, generator)
    require_shape(f"{level}(tasks, {n}, generator)", batch, (count,) if n is None else (count, n))
    return batch


def draw_apart(sampler: Any, level: str, tasks: Any, n: int, generators: Iterable[torch.Generator]) -> Any:
    """Draw n rows for each task with its own generator, as `draw` does for one task after another.

    Each generator is used before the next one is requested.
    """
    if type(sampler) is TensorTasks:
        return sampler.apart(level, tasks, n, generators)
    parts = [
        tree_flatten(draw(sampler, level, select(tasks, slice(i, i + 1)), 1, n, own))
        for i, own in enumerate(generators)
    ]
    joined = [
        (torch.cat(leaves) if len(leaves) > 1 else leaves[0]) if isinstance(leaves[0], Tensor) else leaves[0]
        for leaves in zip(*(part[0] for part in parts), strict=True)
    ]
    return tree_unflatten(joined, parts[0][1])


def starting_points(y: Vector, names: Sequence[str], tasks: Any, count: int, lower_init: LowerInit | None) -> Vector:
    """Return the starting points of the tasks' lower solves: those of ``lower_init``, by default ``y``."""
    if lower_init is None:
        return Vector(t.detach().expand(count, *t.shape) for t in y)
    return as_start(lower_init(tasks), y, names, (count,))


def as_start(given: Any, y: Vector, names: Sequence[str], leading: tuple[int, ...] = ()) -> Vector:
    """Return a result of ``lower_init`` as a vector; ``leading`` are its dimensions before those of y."""
    values = [given] if isinstance(given, Tensor) else list(given)
    if len(values) != len(y):
        raise ValueError(
            f"lower_init must return {len(y)} tensors, one per lower parameter, but returned {len(values)}"
        )
    for value, t, name in zip(values, y, names, strict=True):
        if value.shape != (*leading, *t.shape):
            raise ValueError(
                f"lower_init must return a tensor of shape {(*leading, *t.shape)} for lower parameter {name}, but "
                f"returned one of shape {tuple(value.shape)}"
            )
    return Vector(value.to(t) for value, t in zip(values, y, strict=True))  # with its graph, if it has one

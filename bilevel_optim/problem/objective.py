"""A loss with the data it is evaluated on, and a sample of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..pytree import attributes_of, map_batch, parts_of
from ..tracing import is_tracing, span
from .random import RandomState, default_state, generators_of, preserve_rng, set_states, states_of

__all__ = [
    "Ahead",
    "Loss",
    "Objective",
    "Sample",
    "as_objective",
    "batch_kept",
    "note_batch",
    "require_fit",
    "require_placed",
    "require_state",
    "version_of",
]


class Objective:
    r"""A loss and the batches that it is averaged over.

    Without ``data`` the loss is called with no argument and is deterministic. With ``data`` it is called with one batch
    and estimates :math:`\mathbb E_{\text{batch}}[\text{loss}(\text{batch})]`. Batches are drawn in the order of
    ``data``, which restarts whenever it ends. The *optimizer* decides when a batch is drawn and which
    evaluations share it, so a loss must not draw data itself.

    Args:
        loss: callable that returns a scalar tensor. It reads the live parameters, and must not call ``backward``.
        data: any iterable that can be iterated more than once: a ``DataLoader``, a list of batches, but no iterator.
            Its batches are of any type. If it writes the next batch into the tensors of the last one, these must be in
            tuples, lists, dicts or dataclasses. Default: none.
        features: the part of the loss that does not depend on the lower parameters, a callable with the arguments that
            the loss would have. The loss is then called with its result alone: ``loss(features(batch))``. For
            derivatives in y alone, methods evaluate it without a graph, and once for all steps at one x on one batch:
            with a frozen backbone and a head that adapts, lower steps cost as much as the head. Its random numbers
            (dropout) are drawn once for such steps. If it has a method ``stacked``, that is called with the stacked
            batches of several tasks and returns their stacked features: for a backbone that normalises over tasks, or
            is faster outside ``vmap``. Default: none.
        accumulate: number of batches of ``data`` in one sample, whose loss is their mean loss. Gradients, products and
            copies of y process them one after another, so that memory is that of one batch; a product with second
            derivatives builds its graph again. Counts as one sample. Default: 1.
        device: the tensors of each batch are moved to it when drawn. Default: None, they stay where they are.
        non_blocking: whether the move does not block the host, which needs batches in pinned memory (a ``DataLoader``
            with ``pin_memory=True``). Default: False.

    Raises:
        ValueError: if ``data`` is an iterator, such as a generator; if ``features`` depends on a lower parameter; at
            the first draw, if ``data`` is empty.

    Example:
        >>> import torch
        >>> y = torch.zeros(1, requires_grad=True)
        >>> objective = Objective(lambda batch: (y - batch).square().sum(), [1.0, 2.0])
        >>> [objective.draw().batch for _ in range(5)]
        [1.0, 2.0, 1.0, 2.0, 1.0]

    To resume a run bit for bit, save :meth:`state_dict` with the optimizer's.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        data: Iterable[Any] | None = None,
        *,
        features: Callable[..., Any] | None = None,
        accumulate: int = 1,
        device: torch.device | str | None = None,
        non_blocking: bool = False,
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1 or (accumulate > 1 and data is None):
            raise ValueError(
                f"Invalid accumulate value: {accumulate} (an integer of at least 1; above 1 it needs data)"
            )
        if not callable(loss) or not (features is None or callable(features)):
            name, value = ("features", features) if callable(loss) else ("loss", loss)
            raise TypeError(
                f"{name} must be callable, but got {type(value).__name__}; pass the function, without calling it"
            )
        if data is not None and not isinstance(data, Iterable):
            raise TypeError(
                f"data must be iterable, but got {type(data).__name__}; pass a DataLoader or a list such as [batch]"
            )
        if data is not None and isinstance(data, Iterator):
            raise ValueError(
                f"the data of an Objective are an iterator (a {type(data).__name__}), which cannot go back to a batch "
                "after a failed step or a check, and would skip many; pass a DataLoader or a list, which repeat by "
                "themselves (without itertools.cycle), or an object whose __iter__ makes a new iterator"
            )
        self.device, self.non_blocking = None if device is None else torch.device(device), non_blocking
        self.loss, self.data, self.features, self.accumulate = loss, data, features, accumulate
        self._features: tuple[Any, Sample] | None = None  # of the last sample, for the next one on its batch
        self._last: tuple[Any, Any] | None = None  # the last batch of data that may overwrite it, and its copy
        # Batches are never overwritten. The default collation of a ``DataLoader`` makes new tensors.
        makes_new = getattr(data, "collate_fn", None) is torch.utils.data.default_collate
        self._lasting = makes_new or data is None or type(data) in (list, tuple)
        self._iterator: Iterator[Any] | None = None
        self._passes = 0  # iterators started
        self._position = 0  # batches drawn from the iterator; without one, batches to skip in a new one
        self._start: dict[str, Any] = {}  # random state at the start of the iterator
        self._pass: Any = None  # with persistent workers: identifies the pass, changes when another one starts
        self._generators: dict[str, Any] | None = None  # of the data; None: not searched yet

    def draw(self, *, once: bool = False) -> Sample:
        """Return the next batch as a sample, whose evaluations share their random numbers.

        ``once`` promises a single evaluation, so that the random state need not be kept.
        """
        if self.accumulate == 1:
            arguments = () if self.data is None else (self._draw_batch(),)
            if self.features is None:
                return Sample(self.loss, arguments, once=once)
            return self.sample(*arguments, once=once)
        with span("draw"):
            batches = [self._moved(self._next()) for _ in range(self.accumulate)]
        parts = [self.sample(batch, once=once) for batch in batches]
        return Sample(partial(_mean_of, parts), once=once, parts=parts)

    def draw_some(self, name: str, count: Tensor, most: int) -> list[Sample]:
        """Return the next ``count`` + 1 samples; in a trace ``most`` + 1, with placeholders for missing ones.

        ``count`` is the random input called ``name``.
        """
        return [self.draw() for _ in range((most if is_tracing() else int(count)) + 1)]

    def _draw_batch(self) -> Any:
        """Draw the next batch."""
        with span("draw"):
            return self._moved(self._next())

    def take(self, times: int) -> list[Any]:
        """Return the next ``times`` batches."""
        data = self.data
        if type(data) is not list and type(data) is not tuple:
            return [self._draw_batch() for _ in range(times)]
        found = self._of_list(data, times)
        if self.device is None:
            return found
        with span("draw"):
            return [*map(self._moved, found)]

    def sample(self, *arguments: Any, once: bool = False) -> Sample:
        """Return the sample of a given batch (without an argument, for a loss without data)."""
        sample = Sample(self.loss, arguments, once=once, features=self.features)
        if sample.features is not None:
            mark = _mark(arguments)
            if self._features is not None and _same(self._features[0], mark):
                sample.features = self._features[1]
            self._features = mark, sample.features
        return sample

    def samples(self, most: int | None = None) -> list[Sample]:
        """Return samples of the (first) batches of a pass, without a change to the position or order of the data."""
        if self.data is None:
            return [self.sample()]
        random, states = torch.get_rng_state(), states_of(self._own())
        try:
            batches = [
                batch if self._lasting else self._kept(batch)
                for batch in islice(_twin(self.data, persistent_workers=False), most)
            ]
        finally:
            torch.set_rng_state(random)
            set_states(self._own(), states)
        if not batches:
            raise ValueError(NO_BATCH.format(type(self.data).__name__))
        return [self.sample(self._moved(batch)) for batch in batches]

    @property
    def terms(self) -> int | None:
        """Number of indexed terms whose mean is the loss; 1 without data, None if terms are not indexed."""
        return 1 if self.data is None else None

    def term(self, index: int, *, once: bool = False) -> Sample:
        """Return the sample of one term of a finite sum."""
        assert self.terms == 1, "only a FiniteSum knows its terms"
        return self.sample(once=once)

    def over(self, data: Iterable[Any] | None) -> Objective:
        """Return an objective of the same loss on other data, or from the beginning of the same ones."""
        return Objective(self.loss, data, features=self.features, accumulate=self.accumulate)

    def mapped(self, function: Callable[[Any], Any]) -> Objective:
        """Return an objective whose value is ``function`` of this one's, on samples of the same stream.

        Args:
            function: differentiable; it may read the live parameters too (a proximal term does).

        Example:
            >>> import torch
            >>> y = torch.ones(1, requires_grad=True)
            >>> opposite = Objective(lambda batch: (y * batch).sum(), [2.0]).mapped(lambda loss: -loss)
            >>> opposite.draw()()
            tensor(-2., grad_fn=<NegBackward0>)
        """
        return self.wrapped(partial(_Composed, function))

    def wrapped(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Objective:
        """Return an objective whose loss is ``wrap`` of this one's, on samples of the same stream."""
        return _Wrapped(self, wrap)

    @property
    def codes(self) -> tuple[Any, ...]:
        """Code of the loss and, if it has them, of its features; a module is itself."""
        features = self.features
        known = features is None or isinstance(features, torch.nn.Module)
        return _code_of(self.loss), features if known else _code_of(features)

    def begin(self) -> None:
        """Begin an outer step: drop cached features, also for the same batch."""
        self._features = None

    def _kept(self, batch: Any) -> Any:
        """Return a copy of a batch, for data that may overwrite it to make the next one."""
        mark = _mark((batch,))
        if self._last is None or not _same(self._last[0], mark):
            self._last = mark, map_batch(_copied, batch)
        return self._last[1]

    def _moved(self, batch: Any) -> Any:
        """Return a batch on ``device``, if that is set."""
        device, quickly = self.device, self.non_blocking
        if device is None:
            return batch
        return map_batch(lambda t: t.to(device, non_blocking=quickly) if isinstance(t, Tensor) else t, batch)

    def _of_list(self, data: Sequence[Any], times: int) -> list[Any]:
        """Return the next batches of a list, which needs no iterator: they are those from the position on."""
        position, passes, size, found = self._position, self._passes, len(data), list[Any]()
        while len(found) < times:
            if not 0 < position < size:  # a pass begins
                if not size:
                    raise ValueError(NO_BATCH.format(type(data).__name__))
                whole = (times - len(found) - 1) // size  # passes before the last
                found += [*data] * whole
                position, passes = 0, passes + whole + 1
            more = data[position : position + times - len(found)]
            found += more
            position += len(more)
        self._position, self._passes = position, passes
        return found

    def _next(self) -> Any:
        data = self.data
        assert data is not None
        if type(data) is list or type(data) is tuple:
            return self._of_list(data, 1)[0]
        self._continue()
        for _ in range(2):
            if self._iterator is None:
                self._generators, self._position = None, 0
                self._start = {
                    **self._get_pass_start(),
                    "default": torch.get_rng_state(),
                    "own": states_of(self._own()),
                }
                self._iterator = iter(data)
                self._passes += 1
            try:
                for batch in self._iterator:
                    if not self._position:
                        self._pass = _pass_of(self.data)
                    self._position += 1
                    return batch if self._lasting else self._kept(batch)
            except BaseException:
                self._iterator = None  # it may have moved: another one begins at the position
                raise
            self._iterator, self._position = None, 0
        raise ValueError(NO_BATCH.format(type(self.data).__name__))

    def _continue(self) -> None:
        """Before a draw within a pass: restore the iterator of a copy; raise if another loop has taken it."""
        if not self._position:
            return
        if self._iterator is None:  # in a copy
            self._resume(self.mark())
        elif self._pass is not _pass_of(self.data):
            if isinstance(self.data, Sized) and len(self.data) == self._position:  # the pass was over
                self._iterator, self._position = None, 0
                return
            raise ValueError(
                f"a pass of an Objective over its {type(self.data).__name__} was cut off after {self._position} "
                "batches: another Objective or loop iterates the same loader, whose persistent workers serve only one "
                "pass at a time. Create a loader for each of them, or pass persistent_workers=False"
            )

    def _own(self) -> dict[str, Any]:
        """Return the generators of the data."""
        if self._generators is None:
            self._generators = {} if type(self.data) in (list, tuple) else generators_of(self.data)
        return self._generators

    def _get_pass_start(self) -> dict[str, Any]:
        """Return the random state at the start of this pass; between passes, ``new``: True if new workers come."""
        return self._start if self._position else {"new": getattr(self.data, "_iterator", None) is None}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: the number of batches drawn in this pass, and its initial random state.

        Enough to continue any data whose order follows from random states at ``iter(data)``: torch's, and those of
        generators (of torch, NumPy or Python) that are attributes of the data, their samplers, datasets, transforms.
        Random numbers that a dataset draws in persistent workers after their first pass differ after a resume.

        Raises:
            ValueError: if these come from a generator of the dataset.
        """
        start = self._get_pass_start()
        if getattr(self.data, "persistent_workers", False) and not start["new"]:
            lost = [name for name in self._own() if name.startswith("dataset")]
            if lost:
                raise ValueError(
                    f"the state of the data cannot be saved: {', '.join(lost)} has advanced in persistent workers, "
                    "whose copies of it cannot be read. Pass persistent_workers=False, or let the dataset create a "
                    "generator for each example, seeded by its index"
                )
        return copy.deepcopy({**self.mark(), **start})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position: restart the pass as before, and skip the batches already drawn.

        Generators of the data get their saved states, also if other objects share them.

        Raises:
            ValueError: if the state is not that of an `Objective` with such data; nothing has changed then.
        """
        require_state(state, type(self).__name__, position=int, present=dict)
        self._generators = None
        saved, own = state["present"].keys(), self._own().keys()
        if (
            saved != own
            or state.get("own", state["present"]).keys() != own
            or (state["position"] and self.data is None)
        ):
            raise ValueError(
                f"the state is that of other data: it was saved at position {state['position']} with generators "
                f"{[*saved]}, but this Objective has {'no data' if self.data is None else f'generators {[*own]}'}; "
                "create its data as in the saved run"
            )
        size = _batches_of(self.data)
        if size is not None and state["position"] > size:
            raise ValueError(
                f"the state is that of other data: it was saved at batch {state['position']} of a pass, but the data "
                f"of this Objective have {size} batches; create its data as in the saved run"
            )
        self._resume(state)

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `mark` or `state_dict`."""
        position, passes = state["position"], state.get("passes", 1)
        if type(self.data) in (list, tuple):
            self._position, self._passes = position, passes
            return
        default = torch.get_rng_state()
        self._iterator, self._position = None, 0
        if getattr(self.data, "persistent_workers", False):
            data: Any = self.data
            if state.get("new", True):
                data._iterator = None  # new workers draw a seed, existing ones do not
            elif data._iterator is None:
                iter(data)
        try:
            if position:
                if "default" in state:
                    torch.set_rng_state(state["default"].cpu())
                    set_states(self._own(), state["own"])
                for _ in range(position):
                    self._next()
        except BaseException:
            start = {name: state[name] for name in ("new", "default", "own") if name in state}
            self._iterator, self._position, self._start = None, position, start  # the next draw tries again
            raise
        finally:
            self._passes = passes
            set_states(self._own(), state["present"])
            torch.set_rng_state(default)

    def mark(self) -> dict[str, Any]:
        """Return the current position, for `rewind`; costs next to nothing."""
        if self.data is None or type(self.data) in (list, tuple):  # as at each compiled step
            return {"position": self._position, "passes": self._passes, "present": {}}
        start = self._get_pass_start()
        return {"position": self._position, "passes": self._passes, "present": states_of(self._own()), **start}

    def rewind(self, mark: dict[str, Any]) -> None:
        """Go back to a position, as after loading a state; impossible if data do not repeat their order."""
        if (mark["position"], mark["passes"]) != (self._position, self._passes):
            self._resume(mark)
        else:
            set_states(self._own(), mark["present"])

    def __getstate__(self) -> dict[str, Any]:
        # Iterators cannot be copied: a copy continues at its position, as after loading a state.
        anew = dict.fromkeys(("_features", "_last", "_generators", "_pass", "_iterator"))
        return {**self.__dict__, **anew, "data": _twin(self.data)}

    def __repr__(self) -> str:
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return f"Objective({name}, data={None if self.data is None else type(self.data).__name__})"


def _code_of(loss: Any) -> Any:
    """Return the code of a function, which stays the same if an equal one is made at each step; else its type."""
    while not hasattr(loss, "__code__"):
        inner = getattr(loss, "func", None) or getattr(loss, "loss", None)
        if inner is None:
            return type(loss)
        loss = inner
    return loss.__code__


def _twin(data: Any, **changes: Any) -> Any:
    """Return a copy of a loader with persistent workers, with changed attributes; other data as they are.

    Such a loader has one iterator, which ``iter`` restarts. The copy has workers of its own, which have not started.
    """
    if not getattr(data, "persistent_workers", False):
        return data
    own = copy.copy(data)
    own.__dict__.update(changes, _iterator=None)
    return own


def _pass_of(data: Any) -> Any:
    """Return an object that identifies the pass of a loader with persistent workers; None for other data."""
    if not getattr(data, "persistent_workers", False):
        return None
    return getattr(getattr(data, "_iterator", None), "_sampler_iter", None)


def _batches_of(data: Any) -> int | None:
    """Return the number of batches of a pass; None if it is not known for sure."""
    known = isinstance(data, (list, tuple))
    if isinstance(data, DataLoader):
        known = not isinstance(data.dataset, IterableDataset)
    try:
        return len(data) if known else None
    except TypeError:  # a sampler without a length
        return None


def _mark(arguments: tuple[Any, ...]) -> list[tuple[Any, int]]:
    """Return the parts of a batch, each with its number of in-place writes (-1 if unknown)."""
    return [*((part, 0) for part in arguments), *((leaf, version_of(leaf)) for leaf in parts_of(arguments))]


def version_of(leaf: Any) -> int:
    """Return the number of in-place writes to a tensor; -1 if unknown, 0 for other values than tensors or arrays."""
    if isinstance(leaf, Tensor):
        return -1 if leaf.is_inference() else leaf._version
    return -1 if type(leaf).__module__ == "numpy" else 0


def _same(mark: list[tuple[Any, int]], other: list[tuple[Any, int]]) -> bool:
    """Return True if two marks are of the same, unchanged batch."""
    return len(mark) == len(other) and all(a is b and i == k >= 0 for (a, i), (b, k) in zip(mark, other, strict=True))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf if leaf.requires_grad else leaf.clone()
    return leaf.copy() if type(leaf).__module__ == "numpy" else leaf


class _OnDraws(Objective):
    """An objective on the draws of another one, the source."""

    def __init__(self, source: Objective, loss: Callable[..., Any]) -> None:
        super().__init__(loss, source.data, features=source.features)
        self._source = source

    def begin(self) -> None:
        self._source.begin()

    def mark(self) -> dict[str, Any]:
        return self._source.mark()

    def rewind(self, mark: dict[str, Any]) -> None:
        self._source.rewind(mark)


class _Wrapped(_OnDraws):
    """An objective with another loss on the same draws."""

    def __init__(self, source: Objective, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__(source, wrap(source.loss))
        self._wrap = wrap

    def draw(self, *, once: bool = False) -> Sample:
        return self._source.draw(once=once).wrapped(self._wrap)

    def sample(self, *arguments: Any, once: bool = False) -> Sample:
        return self._source.sample(*arguments, once=once).wrapped(self._wrap)

    def samples(self, most: int | None = None) -> list[Sample]:
        return [sample.wrapped(self._wrap) for sample in self._source.samples(most)]


class Ahead(_OnDraws):
    """An objective that first returns samples drawn earlier."""

    def __init__(self, source: Objective, first_samples: Sequence[Sample], *, whole: bool = False) -> None:
        super().__init__(source, source.loss)
        self.accumulate, self.device = source.accumulate, source.device
        self._first_samples, self._whole = [*first_samples], whole

    def draw(self, *, once: bool = False) -> Sample:
        return self._first_samples.pop(0) if self._first_samples and not self._whole else self._source.draw(once=once)

    def draw_some(self, name: str, count: Tensor, most: int) -> list[Sample]:
        if not self._first_samples or self._whole:
            return self._source.draw_some(name, count, most)
        return [self._first_samples.pop(0), *self._source.draw_some(name, count - 1, most - 1)]

    def sample(self, *arguments: Any, once: bool = False) -> Sample:
        return self._source.sample(*arguments, once=once)

    def samples(self, most: int | None = None) -> list[Sample]:
        return self._first_samples[:most] if self._first_samples and self._whole else self._source.samples(most)

    @property
    def terms(self) -> int | None:
        return self._source.terms

    def term(self, index: int, *, once: bool = False) -> Sample:
        return self._source.term(index, once=once)


class _Composed:
    """A function of a loss's value."""

    def __init__(self, function: Callable[[Any], Any], loss: Callable[..., Any]) -> None:
        self.function, self.loss = function, loss

    def __call__(self, *arguments: Any) -> Any:
        value = self.loss(*arguments)
        return self.function(value) if isinstance(value, Tensor) else value


def _mean_of(parts: Sequence[Sample]) -> Any:
    """Return the mean loss of the parts of a sample, for callers that do not take them one by one."""
    return torch.stack([part() for part in parts]).mean()


class Sample:
    """One draw of an objective: a batch and the state of torch's random generators at its first evaluation.

    Dropout masks, augmentations and label noise belong to the sample: all evaluations of one sample use the same random
    numbers, at any parameters. ``index`` is the number of its term in a `FiniteSum`; None for other samples.
    """

    __slots__ = ("_random", "arguments", "features", "index", "loss", "once", "parts", "weight")

    def __init__(
        self,
        loss: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        *,
        once: bool = False,
        features: Callable[..., Any] | None = None,
        parts: list[Sample] | None = None,
    ) -> None:
        self.loss, self.arguments, self.once, self.parts = loss, arguments, once, parts
        self.features = None if features is None else Sample(features, arguments)
        self.index: int | Tensor | None = None
        self.weight: float | Tensor | None = None  # of a term of an unequal sum; the loss includes it
        self._random: list[RandomState] = []  # at most one, shared with the samples mapped from this one

    def wrapped(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Sample:
        """Return the sample of ``wrap(loss)``, with the same batch, features and random numbers."""
        sample = Sample(wrap(self.loss), self.arguments, once=self.once)
        sample.features, sample.index, sample._random = self.features, self.index, self._random
        return sample

    def mapped(self, function: Callable[[Any], Any]) -> Sample:
        """Return the sample of ``function`` of the loss."""
        return self.wrapped(partial(_Composed, function))

    @property
    def batch(self) -> Any:
        return self.arguments[0] if self.arguments else None

    def __call__(self, *arguments: Any) -> Any:
        """Return the loss on the sample, or on other arguments (its features, if these are known)."""
        if arguments:
            return self.loss(*arguments)
        if self.features is not None:
            return self.loss(self.features())
        try:
            return self.loss(*self.arguments)
        except TypeError as error:
            require_fit(self.loss, self.arguments, error)
            raise

    def replayed(self, device: torch.device) -> AbstractContextManager[None]:
        """Context that replays the random numbers of the first evaluation, without effect on later draws."""
        if is_tracing():
            return nullcontext()
        if self._random:
            return preserve_rng(device, self._random[0])
        self._random.append(default_state(device))
        return nullcontext()


def require_fit(loss: Callable[..., Any], arguments: Sequence[Any], error: TypeError) -> None:
    """After a failed call, raise an error that says what to do if the loss does not take these arguments."""
    called = loss.forward if isinstance(loss, torch.nn.Module) else loss
    try:
        inspect.signature(called).bind(*arguments)
    except TypeError:
        name = getattr(loss, "__name__", type(loss).__name__)
        if isinstance(loss, torch.nn.Module):
            raise TypeError(
                f"the loss is the module {name}, which needs other arguments ({error}); write a function that calls "
                f"it, such as def loss({'batch' if arguments else ''}): return criterion(model(inputs), targets)"
            ) from error
        if arguments:
            several = ". Write def loss(batch): ...; without data and tasks the loss is called without arguments"
            if len([p for p in inspect.signature(loss).parameters.values() if p.default is p.empty]) > 1:
                several = f". Take the batch apart in the loss: def {name}(batch): inputs, labels = batch"
            raise TypeError(
                f"the loss {name} is called with one batch, but does not take one argument ({error}){several}"
            ) from error
        raise TypeError(
            f"the loss {name} takes a batch, but has no data: pass bo.Objective({name}, data), or tasks= ({error})"
        ) from error
    except ValueError:  # the loss has no signature
        return


def note_batch(sample: Sample, error: Exception) -> None:
    """Add the name of the loss and the contents of its batch to an error that it raised."""
    if not sample.arguments or getattr(error, "__notes__", None):
        return
    leaves = [*map(_kind_of, parts_of(sample.arguments[0]))]
    parts = f"{len(leaves)} parts: " if len(leaves) > 1 else ""
    more = ", ..." if len(leaves) > 5 else ""
    error.add_note(f"This was in the loss {_name_of(sample)}, on a batch of {parts}{', '.join(leaves[:5])}{more}.")


def _kind_of(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"


def require_placed(sample: Sample, device: torch.device, error: RuntimeError) -> None:
    """After an error of a loss, raise one that says what to do if its batch is not on the parameters' device."""
    if not any(words in str(error) for words in MIXED):
        return
    leaves = [leaf for leaf in parts_of(sample.arguments) if isinstance(leaf, Tensor) and leaf.device != device]
    if leaves:
        name = _name_of(sample)
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves[:3])
        raise RuntimeError(
            f"the batch of the loss {name} is on {leaves[0].device} (tensors of shape {shapes}), but the parameters "
            f"are on {device}. bo.Objective({name}, data, device={str(device)!r}) moves every batch; with a DataLoader "
            "that has pin_memory=True, non_blocking=True does so without waiting. Or call .to(device) in the loss, or "
            f"once for all the data. torch said: {str(error).splitlines()[0]}"
        ) from error


@contextmanager
def batch_kept(sample: Sample) -> Generator[None]:
    """Restore the sample's batch and raise if the block, an evaluation of the sample, writes into it."""
    arguments = sample.arguments
    leaves = parts_of(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    before_call = [(t, t._version, t.detach().clone()) for t in tensors]
    entries = [(part, part.copy()) for part in _containers(arguments)]
    objects = [(part, attributes_of(part)) for part in leaves]
    yield
    after = parts_of(arguments)
    replaced = len(after) != len(leaves) or any(a is not b for a, b in zip(after, leaves, strict=True))
    written = [(t, value) for t, version, value in before_call if t._version != version]
    if not (replaced or written):
        return
    with torch.no_grad():
        for t, value in written:
            t.copy_(value)
    for part, before in entries if replaced else ():
        part.clear()
        part.update(before) if isinstance(part, dict) else part.extend(before)
    for part, attributes in objects if replaced else ():
        for attribute, value in (attributes or {}).items():
            object.__setattr__(part, attribute, value)
    name = _name_of(sample)
    what = f"a tensor of shape {tuple(written[0][0].shape)}" if written else "it replaces an entry"
    raise ValueError(
        f"the loss {name} writes into its batch ({what}), which other evaluations read again: a batch is evaluated "
        "several times, and data in memory are used again in the next pass. Work on a copy, batch.clone(), or replace "
        "in-place operations (add_, clamp_, batch[...] = ...) by out-of-place ones (add, clamp)"
    )


def _containers(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the dicts and lists of a batch, which may be written into."""
    parts = [*arguments, *(value for leaf in parts_of(arguments) for value in (attributes_of(leaf) or {}).values())]
    found: list[Any] = []
    while parts:
        part = parts.pop()
        if isinstance(part, (dict, list)):
            found.append(part)
        if isinstance(part, (dict, list, tuple)):
            parts += part.values() if isinstance(part, dict) else part
    return found


def _name_of(sample: Sample) -> str:
    """Return the name of a sample's loss for messages."""
    loss: Any = sample.loss
    while hasattr(loss, "loss") and not hasattr(loss, "__name__"):
        loss = loss.loss
    return str(getattr(loss, "__name__", type(loss).__name__))


NO_BATCH = (
    "the data of an Objective contain no batch: the {} is empty, or can be iterated only once and is exhausted; pass a "
    "DataLoader or a list with at least one batch"
)
MIXED = ("same device", "two devices", "Input type")  # in torch's messages about tensors on several devices


def require_state(state: Any, owner: str, **kinds: type) -> None:
    """Raise ValueError unless a state is a dict with entries of these types."""
    missing = [k for k, kind in kinds.items() if not (isinstance(state, dict) and isinstance(state.get(k), kind))]
    if missing:
        found = f"has the keys {sorted(map(str, state))}" if isinstance(state, dict) else f"is {type(state).__name__}"
        needed = ", ".join(f"{k!r} ({kinds[k].__name__})" for k in missing)
        raise ValueError(
            f"the state is not that of {owner}: it needs {needed}, but {found}; load what its state_dict() returned"
        )


Loss = Objective | Callable[..., Tensor]


def as_objective(loss: Loss, level: str) -> Objective:
    """Return the objective of a loss, which may be one already."""
    if isinstance(loss, Objective):
        return loss
    if not callable(loss):
        raise TypeError(
            f"the {level} loss must be a callable or an Objective, but is {type(loss).__name__}; pass the "
            "function that computes the loss, without calling it"
        )
    return Objective(loss)

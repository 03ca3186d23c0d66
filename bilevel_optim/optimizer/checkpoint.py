"""The form of a checkpoint, such that torch's distributed checkpoints keep all of it.

Tensors are with the parameters, each of which has some; everything else is one entry of the first group.
"""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed.ranks import Ranks
from ..distributed.sharding import Split
from ..oracle.session import Options
from ..problem.parameters import LEVELS
from ..problem.tasks import TensorTasks
from ..solvers.limits import Limits
from ..solvers.lower import LowerRules
from . import memory
from .loading import require_form, require_loadable, shapes_of
from .run_state import RunState

__all__ = ["OWN", "REMADE", "Checkpointed", "initialises"]

OWN = "bilevel"  # the entry of the first parameter group; always there, because loading goes by the entries of groups
# What torch's Optimizer makes again when it is unpickled, or a scheduler has attached.
REMADE = ("step", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called")
STEP = "step"  # of every parameter, so that none of them is without state, which loading takes for a missing one


class Checkpointed(Optimizer):
    """An optimizer whose state can be saved and loaded, with torch's ``state_dict`` or its distributed checkpoints."""

    check_finite: bool
    one_loss: bool
    generator: torch.Generator | None
    numbers: dict[str, Any]
    saved_options: tuple[str, ...]
    variant_of_state: Mapping[str, Any] = MappingProxyType({})  # what decides what is remembered: others are not loaded
    lower_factory: Callable[[Any], Optimizer]
    limits: Limits
    _options: Options
    _run_state: RunState
    _placeholders = False  # the state holds zeros that only show what a step would remember

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """As for any class, but that a missing or unknown argument is one of the method, not of a base class."""
        if arguments or options:  # copies are made without
            try:
                inspect.signature(cls).bind(*arguments, **options)
            except TypeError as error:
                raise TypeError(f"{cls.__name__}: {error}") from None
        return super().__new__(cls)

    def state_dict(self) -> dict[str, Any]:
        """As in torch; what does not belong to one parameter is the entry ``"bilevel"`` of the first group.

        Together with the parameters themselves (the model's ``state_dict``), and with the position of the data and
        torch's random state where the losses use them, it continues a run bit for bit.
        """
        state: dict[str, Any] = super().state_dict()
        state["state"] = memory.copied(state["state"])  # later steps write into tables
        own = {
            "method": type(self).__name__,
            "variant": dict(self.variant_of_state),
            "shapes": shapes_of(self.param_groups),
            **self._run_state.saved(),
            "placeholders": self._placeholders,
            "generator": None if self.generator is None else self.generator.get_state(),
            "numbers": self.numbers,
            "options": {name: plain(getattr(self, name)) for name in self.saved_options},
        }
        return completed(state, own, [p.device for group in self.param_groups for p in group["params"]])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, into an optimizer made with the same arguments."""
        require_form(state_dict)
        own, state_dict = checked(state_dict)
        require_loadable(
            own, state_dict, type(self).__name__, self.variant_of_state, self.saved_options, self.param_groups
        )
        memory.load_exactly(self, super().load_state_dict, state_dict, self.place_of)
        self.param_groups[0][OWN], self._placeholders = b"", False
        self._rules = LowerRules(self.lower_factory, self.limits)
        self._run_state.load(own)
        if own["generator"] is not None and self.generator is not None:
            self.generator.set_state(own["generator"].cpu())
        self.numbers = own["numbers"]
        for name in self.saved_options:
            setattr(self, name, own["options"][name])

    def rows_of(self, lower: Sequence[Tensor]) -> int | None:
        """How many rows tables will have that mix these parameters; 0 for a single problem, None if there are none."""
        return None

    def place_of(self, name: str, parameter: Tensor) -> torch.device | None:
        """The device of an entry of ``state[parameter]`` that is loaded; None for where it was saved."""
        return memory.place_of(name, parameter)

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps three entries and makes the others again; ours must be kept too, the rules excepted.
        own = {k: v for k, v in self.__dict__.items() if k not in REMADE and not k.startswith("_optimizer_")}
        return {**super().__getstate__(), **own, "_rules": LowerRules(self.lower_factory, self.limits)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch's own optimizers have it; added groups would get it from here

    def _initialise(self) -> None:
        """Before the first step, let the state show what a step would remember."""
        if self._run_state.steps == 0:
            self.state.update(initial_state(self, self._options.ranks))
            self._placeholders = bool(self.state)

    def _forget_placeholders(self) -> None:
        if self._placeholders:
            self.state.clear()
            self._placeholders = False


def plain(value: Any) -> Any:
    """A number of another library as one of Python, which checkpoints can hold."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def completed(state_dict: dict[str, Any], own: dict[str, Any], devices: Sequence[torch.device]) -> dict[str, Any]:
    """A state dict with what does not belong to one parameter, and with an entry for each of them.

    ``own`` becomes one value, which no tool takes apart: what it consists of differs from step to step.
    """
    state, groups = state_dict["state"], state_dict["param_groups"]
    own = {**own, "kept": _names(state_dict)}
    for key, device in zip((key for group in groups for key in group["params"]), devices, strict=True):
        state.setdefault(key, {})[STEP] = torch.tensor([float(own["steps_done"])], device=device)
    file = io.BytesIO()
    torch.save(own, file)
    groups[0][OWN] = file.getvalue()
    return state_dict


def checked(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What :func:`completed` was given, taken apart again; raises unless all of it is there."""
    written = state_dict["param_groups"][0].get(OWN) if state_dict.get("param_groups") else None
    if not isinstance(written, bytes) or not written:
        raise ValueError(f"the state dict is not that of a BilevelOptimizer: it has no {OWN!r} entry")
    try:
        own: dict[str, Any] = torch.load(
            io.BytesIO(written), map_location=None if torch.cuda.is_available() else "cpu", weights_only=True
        )
    except Exception as error:  # torch raises what it likes for bytes that are not its own
        raise ValueError(f"the state dict is damaged: its {OWN!r} entry cannot be read") from error
    if "kept" not in own:
        raise ValueError("the state dict is incomplete: it does not say what it keeps")
    kept = {} if own.get("placeholders") else own["kept"]
    state: dict[Any, dict[str, Any]] = {}
    for group in state_dict["param_groups"]:
        names = kept.get(group.get("level"), {})
        for key in group["params"]:
            entries = {n: value for n, value in state_dict["state"].get(key, {}).items() if n in names}
            if entries:
                state[key] = entries
    pruned = {**state_dict, "state": state}
    found = _names(pruned)
    missing = [name for level, names in kept.items() for name, count in names.items() if found[level][name] < count]
    if missing:
        raise ValueError(
            f"the checkpoint holds {', '.join(missing)}, but not all of it has been loaded: before the first step it "
            "was not known what to ask for. Make one step before loading (its effects are overwritten)"
        )
    return own, pruned


def _names(state_dict: dict[str, Any]) -> dict[str, dict[str, int]]:
    """For each level how many parameters have an entry, by its name."""
    found = {level: Counter[str]() for level in LEVELS}
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            found[group.get("level", "upper")].update(state_dict["state"].get(key, {}).keys())
    return {level: Counter({n: k for n, k in names.items() if n != STEP}) for level, names in found.items()}


def initialises(optimizer: Optimizer) -> bool:
    """Whether an update is asked for only to make the state, as distributed checkpoints do.

    They do so with learning rates of zero, and gradients for the lower parameters too, which nobody else gives.
    """
    groups = optimizer.param_groups
    return not optimizer.state and all(
        not float(group["lr"]) and all(p.grad is not None or not p.requires_grad for p in group["params"])
        for group in groups
    )


def initial_state(optimizer: Checkpointed, ranks: Ranks) -> dict[Tensor, dict[str, Any]]:
    """Zeros shaped as what a first step would remember of each parameter.

    Found by a step of a twin with parameters of one entry, or, where rows mix all parameters, by one of full size for a
    single task. Empty where that does not tell.
    """
    levels = [(group["level"], p) for group in optimizer.param_groups for p in group["params"]]
    parameters, rows = [p for _, p in levels], optimizer.rows_of([p for level, p in levels if level == "lower"])
    shapes = [[1] * p.dim() if rows is None else _one_row(p, level, rows) for level, p in levels]
    ones = [
        torch.zeros(shape, dtype=p.dtype, device=p.device, requires_grad=p.requires_grad)
        for shape, p in zip(shapes, parameters, strict=True)
    ]
    twin = copy.deepcopy(optimizer, {id(ranks): Ranks(), **{id(p): q for p, q in zip(parameters, ones, strict=True)}})
    twin.check_finite = False
    for group in twin.param_groups:
        group["lr"] = 0.1
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _step(twin, None if not rows else TensorTasks(torch.zeros(1, 1)))
    except Exception:
        return {}
    found = {p: twin.state[q] for p, q in zip(parameters, ones, strict=True) if q in twin.state}
    if rows is not None:
        split = Split([p for level, p in levels if level == "lower"], ranks) if rows else None
        return {p: {n: _rows(n, value, split) for n, value in entries.items()} for p, entries in found.items()}
    return {p: {name: _widened(value, p) for name, value in entries.items()} for p, entries in found.items()}


def _one_row(parameter: Tensor, level: str, rows: int) -> list[int]:
    """The shape of a parameter if there were a single task."""
    return [1, *parameter.shape[1:]] if level == "lower" and rows else list(parameter.shape)


def _rows(name: str, value: Any, split: Split | None) -> Any:
    """Zeros in place of an entry, with a row for each task in place of a table's only one."""
    if split is None or not isinstance(value, Tensor) or not name.startswith(memory.TABLE):
        return torch.zeros_like(value) if isinstance(value, Tensor) else value
    return split.whole(value.new_zeros(split.count, *value.shape[1:]))


def _step(twin: Any, tasks: Any) -> None:
    x, y = ([p for g in twin.param_groups if g["level"] == level for p in g["params"]] for level in LEVELS)

    def shift() -> Tensor:
        return torch.stack([p.sum().float() for p in x]).sum()

    def upper(_: Any = None) -> Tensor:
        return torch.stack([(p.float() - 1).square().sum() for p in y]).sum() + shift().square()

    def lower(_: Any = None) -> Tensor:
        return torch.stack([(p.float() - shift()).square().sum() for p in y]).sum()

    if twin.one_loss:
        twin.step(lambda: shift().square() - lower())
    elif tasks is None:
        twin.step(upper, lower)
    else:
        twin.step(upper, lower, tasks=tasks)


def _widened(value: Any, parameter: Tensor) -> Any:
    """Zeros for the parameter in place of an entry for a parameter of one entry, perhaps stacked."""
    n = parameter.dim()
    if not isinstance(value, Tensor):
        return value
    if value.dim() < n or value.shape[value.dim() - n :] != (1,) * n:
        return torch.zeros_like(value)
    zeros = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
    for size in reversed(value.shape[: value.dim() - n]):
        zeros = torch.stack([zeros] * size)
    return zeros

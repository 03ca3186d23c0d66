"""Format of a checkpoint, which torch's distributed checkpoints preserve, and checks before it is loaded.

Every parameter has an entry with its tensors; everything else is one entry of the first group.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.serialization import default_restore_location

from ..distributed.ranks import Ranks
from ..distributed.sharding import Split
from ..errors import filters_kept
from ..oracle.session import COUNTERS
from ..problem.parameters import LEVELS, is_count, is_number
from ..problem.tasks import TensorTasks
from ..pytree import tree_map
from .transaction import COUNTS, SOLVERS, TABLE

__all__ = [
    "OWN",
    "copied",
    "initial_state",
    "initialises",
    "load_exactly",
    "own_attributes",
    "pack",
    "plain",
    "require_dict",
    "require_loadable",
    "types",
    "unpacked",
]

CPU = torch.device("cpu")
OWN = "bilevel"  # entry of the first parameter group; always present, because loading goes by the entries of groups
# Attributes that torch's Optimizer makes again when it is unpickled, or that a scheduler has attached.
REMADE = ("step", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called")
STEP = "step"  # an entry of every parameter, because loading takes a parameter without state for a missing one
NEEDED = (
    "method", "variant", "shapes", "steps_done", "oracle_counts", "fallback", "generator", "last_loss", "numbers",
    "options",
)  # fmt: skip
LATER = {"beta", "floor"}  # options that some methods have not saved in earlier versions
SAVED = "load the output of state_dict() of the same method"
INTACT = "load the unchanged output of state_dict(), or an earlier checkpoint"
# Entries of torch's optimizers that are shaped like the parameter or like stacked copies of it.
LIKE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta")


def own_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those attributes of an optimizer that torch neither pickles nor makes again."""
    return {k: v for k, v in attributes.items() if k not in REMADE and not k.startswith("_optimizer_")}


def plain(value: Any) -> Any:
    """Convert a number of another library, or a dict of them, to Python numbers, which checkpoints can hold."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def pack(state_dict: dict[str, Any], own: dict[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Write ``own``, the state of the whole method, and an entry for each parameter into a state dict.

    ``own`` is serialised to one value, because its contents differ from step to step.
    """
    state, groups = state_dict["state"], state_dict["param_groups"]
    own = {**own, "shapes": _shapes(param_groups), "kept": _names(state_dict), "tables": _tables(state)}
    keys = [key for group in groups for key in group["params"]]
    parameters = [p for group in param_groups for p in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        state.setdefault(key, {})[STEP] = torch.tensor([float(own["steps_done"])], device=parameter.device)
    file = io.BytesIO()
    torch.save(own, file)
    groups[0][OWN] = file.getvalue()


def unpacked(state_dict: dict[str, Any], device: torch.device = CPU) -> tuple[dict[str, Any], dict[str, Any]]:
    """Undo :func:`pack`; raise ValueError unless the state dict is complete.

    Tensors that were on an accelerator when they were saved are moved to ``device``.
    """

    def placed(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else default_restore_location(storage, str(device))  # type: ignore[no-untyped-call]

    _require_form(state_dict)
    written = state_dict["param_groups"][0].get(OWN) if state_dict.get("param_groups") else None
    if not isinstance(written, bytes) or not written:
        raise ValueError(
            f"the state dict is not that of a BilevelOptimizer: its first group has no {OWN!r} entry; {SAVED}"
        )
    for i, group in enumerate(state_dict["param_groups"]):
        if group.get("level") not in LEVELS:
            raise ValueError(
                f"the state dict is damaged: group {i} has the level {group.get('level')!r}, which should be 'upper' "
                f"or 'lower'; {INTACT}"
            )
        if not is_number(group.get("lr")):
            raise ValueError(
                f"the state dict is damaged: group {i} has the learning rate {group.get('lr')!r}, which should be a "
                f"number; {INTACT}"
            )
    try:
        own: dict[str, Any] = torch.load(io.BytesIO(written), map_location=placed, weights_only=True)
    except Exception as error:  # torch raises errors of many types for foreign bytes
        raise ValueError(f"the state dict is damaged: its {OWN!r} entry cannot be read; {INTACT}") from error
    if not isinstance(own, dict) or "kept" not in own:
        raise ValueError(f"the state dict is incomplete: its {OWN!r} entry does not list the saved tensors; {INTACT}")
    kept = own["kept"]
    if not isinstance(kept, dict) or not all(
        isinstance(names, dict) and all(map(is_count, names.values())) for names in kept.values()
    ):
        raise ValueError(
            f"the state dict is damaged: its list of saved tensors should hold names with counts, but is "
            f"{str(kept)[:80]}; {INTACT}"
        )
    kept = {} if own.get("placeholders") else kept
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
            f"the checkpoint holds {', '.join(missing)}, but not all of it has been loaded: before its first step, the "
            "optimizer may not know which entries to request. Make one step before loading (the load overwrites its "
            "effects)"
        )
    return own, pruned


def _names(state_dict: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the number of parameters that have an entry, by level and name."""
    found = {level: Counter[str]() for level in LEVELS}
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            found[group.get("level", "upper")].update(state_dict["state"].get(key, {}).keys())
    return {level: Counter({n: k for n, k in names.items() if n != STEP}) for level, names in found.items()}


def _shapes(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the shapes of all parameters."""
    return [list(p.shape) for group in groups for p in group["params"]]


def types(groups: Sequence[Mapping[str, Any]], kinds: Sequence[torch.dtype] = ()) -> list[str]:
    """Return the names of the types of all parameters; ``kinds``: those that the first ones had in the last step."""
    present = [p.dtype for group in groups for p in group["params"]]
    return [str(kind).removeprefix("torch.") for kind in (*kinds, *present[len(kinds) :])]


def require_dict(state: Any) -> None:
    """Raise ValueError unless a state dict is a dict."""
    if not isinstance(state, dict):
        raise ValueError(
            f"the state dict is not that of a BilevelOptimizer: it should be a dict, but is {type(state).__name__}; "
            f"{SAVED}"
        )


def _require_form(state: Any) -> None:
    """Raise ValueError unless a state dict has the form of an optimizer's."""
    require_dict(state)
    state_of, groups = state.get("state"), state.get("param_groups")
    if not isinstance(state_of, dict) or not all(isinstance(entries, dict) for entries in state_of.values()):
        raise ValueError(f"the state dict is not that of a BilevelOptimizer: 'state' does not hold dicts; {SAVED}")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError(
            f"the state dict is not that of a BilevelOptimizer: 'param_groups' are not dicts with 'params'; {SAVED}"
        )


def require_loadable(
    own: Mapping[str, Any],
    state: Mapping[str, Any],
    method: str,
    variant: Mapping[str, Any],
    options: AbstractSet[str],
    groups: Sequence[Mapping[str, Any]],
    generator: torch.Generator | None,
) -> None:
    """Raise ValueError unless a state belongs to this method and fits the parameters.

    Args:
        own: the state that belongs to no parameter, such as counters.
        state: the state dict.
        method: name of the class.
        variant: hyperparameters that determine the state's entries.
        options: names of the saved hyperparameters.
        groups: the parameter groups.
        generator: generator of the optimizer.
    """
    missing = [name for name in NEEDED if name not in own]
    missing += [f"options[{name!r}]" for name in options - LATER if name not in (own.get("options") or {})]
    if missing:
        raise ValueError(f"the state dict is incomplete: it lacks {', '.join(missing)}; {SAVED}")
    if own["method"] != method:
        raise ValueError(
            f"the state dict is that of {own['method']}, but this optimizer is {method}; "
            f"load it into an optimizer of the method {own['method']}"
        )
    if own["variant"] != dict(variant):
        raise ValueError(
            f"the state dict is that of another variant: it has {own['variant']}, but this optimizer {dict(variant)}; "
            "create the optimizer with the arguments of the saved run"
        )
    sizes = [[(group.get("level"), len(group["params"])) for group in some] for some in (state["param_groups"], groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state dict is that of other parameter groups: (level, number of parameters) are {sizes[0]}, but here "
            f"{sizes[1]}; create the optimizer with the groups of the saved run, in the same order"
        )
    if own["shapes"] != _shapes(groups):
        raise ValueError(
            f"the state dict is that of parameters of shapes {own['shapes']}, but this optimizer's have "
            f"{_shapes(groups)}; create it with the parameters of the saved run, in the same order"
        )
    for name, right in FORMS.items():
        if name in own and not right(own[name]):
            raise ValueError(
                f"the state dict is damaged: {name} is {str(own[name])[:80]}, which is not a valid value; {INTACT}"
            )
    _require_generator(own["generator"], generator)
    names = own.get("types", types(groups))
    known = isinstance(names, list) and all(
        isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype) for name in names
    )
    if not known or len(names) != len(_shapes(groups)):
        raise ValueError(
            f"the state dict is damaged: the types of the parameters are {names!r}, which should be one name of a "
            f"torch.dtype for each of {len(_shapes(groups))} parameters; {INTACT}"
        )
    found, saved = _tables(state["state"]), own.get("tables", {})
    for name in saved.keys() & found.keys():
        if found[name] != saved[name]:
            raise ValueError(
                f"the state dict is damaged: the table {name.removeprefix(TABLE)} has (shape, whether it is of a "
                f"floating-point type) {found[name]}, but had {saved[name]} when it was saved; {INTACT}"
            )
    keys = [key for group in state["param_groups"] for key in group["params"]]
    for key, shape in zip(keys, _shapes(groups), strict=True):
        for name, value in state["state"].get(key, {}).items():
            if not _is_kept(name, value):
                raise ValueError(
                    f"the state dict is damaged: {name} should be a tensor, but is of type {type(value).__name__}; "
                    f"{INTACT}"
                )
            if not _like_its_parameter(name) or not isinstance(value, Tensor):
                continue
            if shape and list(value.shape[-len(shape) :]) != shape:
                raise ValueError(
                    f"the state dict is damaged: {name} has shape {tuple(value.shape)}, but its parameter has shape "
                    f"{tuple(shape)}; {INTACT}"
                )
            if not value.is_floating_point():
                raise ValueError(
                    f"the state dict is damaged: {name} should be of a floating-point type, but is of {value.dtype}; "
                    f"{INTACT}"
                )


def _tables(state: Mapping[Any, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the shape of each table, and whether it holds real numbers."""
    return {
        name: [list(value.shape), value.is_floating_point()] if isinstance(value, Tensor) else [type(value).__name__]
        for entries in state.values()
        for name, value in entries.items()
        if name.startswith(TABLE)
    }


def _is_kept(name: str, value: Any) -> bool:
    """Return True if a step can continue from an entry of a parameter; entries of unknown optimizers always pass."""
    if isinstance(value, Tensor) or name.startswith(TABLE):  # tables are compared with their saved form
        return True
    if not name.startswith(SOLVERS):
        return False
    return is_number(value) if name in COUNTS else value is None or not _like_its_parameter(name)


def _require_generator(saved: Any, generator: torch.Generator | None) -> None:
    """Raise ValueError unless this generator can continue the random numbers of a run."""
    if saved is None:
        return
    if generator is None:
        raise ValueError(
            "the state dict is that of an optimizer with a generator, but this one has none, so it would draw "
            "different random numbers; create it with generator=torch.Generator(), into which the saved state is loaded"
        )
    try:
        torch.Generator(generator.device).set_state(saved.cpu())
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"the state dict is damaged: its generator state does not fit a generator on {generator.device}; create "
            f"the generator on the device of the saved run, or {INTACT}"
        ) from error


# Checks of the entries that belong to no parameter.
FORMS: dict[str, Callable[[Any], bool]] = {
    "steps_done": is_count,
    "oracle_counts": lambda v: isinstance(v, dict) and {*v} <= {*COUNTERS} and all(map(is_count, v.values())),
    "fallback": lambda v: v is None or isinstance(v, str),
    "last_loss": lambda v: v is None or isinstance(v, Tensor),
    "numbers": lambda v: isinstance(v, dict) and all(isinstance(name, str) for name in v),
    "warned": lambda v: isinstance(v, list) and all(isinstance(key, str) for key in v),
    "trained": lambda v: v is None or (isinstance(v, list) and all(isinstance(own, bool) for own in v)),
}


def _like_its_parameter(name: str) -> bool:
    if prefix := next(filter(name.startswith, SOLVERS), ""):
        return name.removeprefix(prefix) in LIKE
    return not name.startswith(TABLE)


def load_exactly(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    *,
    read: Callable[[dict[str, Any]], dict[str, Any]],
    place_of: Callable[[str, Tensor], torch.device | None],
    end: Callable[[], None],
) -> None:
    """Call torch's ``load`` without its cast of the state to the precision of the parameters.

    Args:
        optimizer: the optimizer.
        load: its base class's ``load_state_dict``.
        state_dict: the state dict.
        read: checks and unpacks what the user's hooks before loading have made of it.
        place_of: returns the device of an entry of a parameter's state; None: the device it was saved from.
        end: called before the user's hooks after loading.
    """
    loaded: dict[str, Any] = {}

    def withhold(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        loaded.update(read(given))
        return {**loaded, "state": {}}

    def fill(_: Optimizer) -> None:
        keys = [key for group in loaded["param_groups"] for key in group["params"]]
        own = dict(zip(keys, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
        for key, entries in loaded["state"].items():
            optimizer.state[own.get(key, key)] = {
                name: copied(value, place_of(name, own[key]) if key in own else None) for name, value in entries.items()
            }
        end()

    # In this order, hooks of the user see the same as with torch's loading.
    handles = (
        optimizer.register_load_state_dict_pre_hook(withhold),
        optimizer.register_load_state_dict_post_hook(fill, prepend=True),
    )
    try:
        load(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def copied(value: Any, device: torch.device | None = None) -> Any:
    """Return a copy that shares no tensor, with its tensors on ``device`` or where they were."""
    return tree_map(lambda t: t.to(device or t.device, copy=True) if isinstance(t, Tensor) else copy.copy(t), value)


def initialises(optimizer: Optimizer) -> bool:
    """Return True if an update is called only to make the state, as distributed checkpoints do.

    They set all learning rates to zero, and gradients of the lower parameters too, which no other caller does.
    """
    groups = optimizer.param_groups
    return not optimizer.state and all(
        not float(group["lr"]) and all(p.grad is not None or not p.requires_grad for p in group["params"])
        for group in groups
    )


def initial_state(optimizer: Any, ranks: Ranks) -> dict[Tensor, dict[str, Any]]:
    """Return zeros shaped like each parameter's state after a first step; empty if unknown.

    The shapes come from a step of a copy of the optimizer with parameters of one entry. If table rows mix all
    parameters, the copy has full size, for a single task.
    """
    levels = [(group["level"], p) for group in optimizer.param_groups for p in group["params"]]
    parameters, rows = [p for _, p in levels], optimizer._rows_of([p for level, p in levels if level == "lower"])
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
        with torch.random.fork_rng(devices=[]), filters_kept():
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
    """Return the shape of a parameter for a single task."""
    return [1, *parameter.shape[1:]] if level == "lower" and rows else list(parameter.shape)


def _rows(name: str, value: Any, split: Split | None) -> Any:
    """Return zeros shaped like an entry; a table of one row gets a row for each task."""
    if split is None or not isinstance(value, Tensor) or not name.startswith(TABLE):
        return torch.zeros_like(value) if isinstance(value, Tensor) else value
    return split.from_local(value.new_zeros(split.count, *value.shape[1:]))


def _step(twin: Any, tasks: Any) -> None:
    x, y = ([p for g in twin.param_groups if g["level"] == level for p in g["params"]] for level in LEVELS)

    def shift() -> Tensor:
        return torch.stack([p.sum().float() for p in x]).sum()

    def upper(_: Any = None) -> Tensor:
        return torch.stack([(p.float() - 1).square().sum() for p in y]).sum() + shift().square()

    def lower(_: Any = None) -> Tensor:
        return torch.stack([(p.float() - shift()).square().sum() for p in y]).sum()

    if twin._one_loss:
        twin.step(lambda: shift().square() - lower())
    else:
        twin.step(upper, lower, tasks=tasks)


def _widened(value: Any, parameter: Tensor) -> Any:
    """Return zeros shaped like the parameter, perhaps stacked, for the state of its twin with one entry."""
    n = parameter.dim()
    if not isinstance(value, Tensor):
        return value
    if value.dim() < n or value.shape[value.dim() - n :] != (1,) * n:
        return torch.zeros_like(value)
    zeros = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
    for size in reversed(value.shape[: value.dim() - n]):
        zeros = torch.stack([zeros] * size)
    return zeros

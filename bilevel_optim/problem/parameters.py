"""Validation in torch's wording, and parameter groups marked with their level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .vector import is_sharded

__all__ = [
    "LEVELS",
    "OF_SGD",
    "Params",
    "Rate",
    "as_groups",
    "consistently_named",
    "is_count",
    "is_number",
    "level_of",
    "names_of",
    "overlapping",
    "overlaps_itself",
    "rates_of",
    "require",
    "require_apart",
    "require_choice",
    "require_gradients",
    "require_one_level",
    "require_rates",
    "require_usable",
    "tensors_of",
    "unnamed",
]

Rate = Any  # a learning rate: a number or a scalar tensor
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

LEVELS = ("upper", "lower")
COMPUTES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # types of parameters
# Options of torch.optim.SGD besides lr, in the order of their errors.
OF_SGD = dict.fromkeys(("momentum", "dampening", "weight_decay", "nesterov", "maximize"))


def require(name: str, value: object, valid: bool, wording: str = "Invalid {name} value: {value}") -> None:
    """Raise ValueError in torch's wording unless ``valid``; a number in a string is shown in quotes."""
    if not valid:
        quoted = isinstance(value, str) and value[:1].isdigit()
        raise ValueError(wording.format(name=name, value=repr(value) if quoted else value))


def require_choice(name: str, value: Any, choices: Iterable[object], *, or_positive: bool = False) -> None:
    """Raise ValueError, with the choices, unless a value is one of them (or, if allowed, a positive number)."""
    known = tuple(choices)
    listed = ", ".join(map(repr, known)) + (", or a positive number" if or_positive else "")
    valid = any(value == choice for choice in known) or (
        or_positive and is_number(value) and 0 < float(value) < math.inf
    )
    require(name, value, valid, f"Invalid {{name}} value: {{value}} (choose one of {listed})")


def is_number(value: object) -> bool:
    """Return True for a real number (or a tensor of one element, which torch takes as a learning rate)."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """Return True for a non-negative integer."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def as_groups(parameters: Params, level: str) -> list[dict[str, Any]]:
    """Return the groups in ``parameters``, marked with their level."""
    entries: list[Any] = []
    if isinstance(parameters, torch.nn.Module):
        entries = [parameters]
    elif isinstance(parameters, (Tensor, dict)) or not isinstance(parameters, Iterable):
        raise TypeError(
            f"{level} parameters should be an iterable of tensors, of (name, tensor) pairs or of dicts, but got "
            f"{torch.typename(parameters)}"
            f"{' (write [tensor])' if isinstance(parameters, Tensor) else '; pass model.parameters() or a list'}"
        )
    else:
        entries = list(parameters)
    if not entries:
        why = (
            ": the iterator that was passed is used up (it has been iterated before), or its module has no "
            "parameters; pass list(model.parameters())"
        )
        raise ValueError(
            f"optimizer got an empty {level} parameter list"
            f"{why if isinstance(parameters, Iterator) else '; pass at least one tensor'}"
        )
    if modules := [entry for entry in entries if isinstance(entry, torch.nn.Module)]:
        raise TypeError(
            f"{level} parameters should be tensors, but got the module {type(modules[0]).__name__}: pass its "
            ".parameters()"
        )
    groups: list[dict[str, Any]] = [dict(e) for e in entries] if isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        if "params" not in group:
            raise ValueError(
                f"the {level} group {group} has no entry 'params': write {{'params': list of tensors, 'lr': ...}}"
            )
        given = group["params"]
        group["params"] = [given] if isinstance(given, Tensor) else list(given)
        group["level"] = level
    return groups


def unnamed(entry: Tensor | tuple[str, Tensor]) -> Tensor:
    """Return the tensor of a group's entry, which may be a ``(name, tensor)`` pair."""
    return entry[1] if isinstance(entry, tuple) else entry


def consistently_named(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Name the parameters of all groups if those of one group have names, as torch demands."""
    if any(isinstance(p, tuple) for group in groups for p in group["params"]):
        for i, group in enumerate(groups):
            group["params"] = [
                p if isinstance(p, tuple) else (f"{group['level']}.{i}.{k}", p) for k, p in enumerate(group["params"])
            ]
    return groups


def level_of(group: Any) -> str | None:
    """Return the level of a group; raise ValueError if it has none. None: not a group, which torch reports."""
    if not isinstance(group, dict):
        return None
    level = group.get("level")
    if level not in LEVELS:
        raise ValueError(
            f"Invalid level value: {level} (a group of a BilevelOptimizer needs the entry 'level': 'upper' or "
            "'level': 'lower')"
        )
    return cast(str, level)


def require_one_level(group: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Raise ValueError if a parameter of ``group`` already belongs to a group of the other level."""
    elsewhere = {id(p): other["level"] for other in others for p in other["params"] if other["level"] != group["level"]}
    for name, parameter in _named(group):
        if id(parameter) in elsewhere:
            raise ValueError(
                f"{group['level']} parameter {name!r} of shape {tuple(parameter.shape)} is also among the "
                f"{elsewhere[id(parameter)]} parameters; a parameter belongs to one level, so leave it out of the other"
            )


def require_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if a learning rate is not a valid number (schedulers and users may have changed it)."""
    for group in groups:
        lr = group["lr"]
        if type(lr) is float and 0 <= lr < math.inf:
            continue
        if not isinstance(lr, Tensor) and not (is_number(lr) and 0 <= lr < math.inf):  # a tensor may be on a device
            raise ValueError(
                f"Invalid learning rate: {lr!r} (of {group.get('level', 'some')} parameters; a finite number, at least "
                "0)"
            )


def require_usable(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a parameter of a group is not a dense, real leaf tensor of its own memory."""
    for name, p in _named(group):
        if not isinstance(p, Tensor):
            continue  # torch reports it
        if is_lazy(p):
            raise ValueError(
                f"{group['level']} parameter {name!r} is not initialised, because its lazy module has not been called "
                "yet; call the module on one batch before you create the optimizer"
            )
        if p.layout != torch.strided or p.is_nested or p.is_quantized:
            kind = "nested" if p.is_nested else "quantised" if p.is_quantized else p.layout
            raise ValueError(
                f"{group['level']} parameter {name!r} is not a dense tensor ({kind}), and only dense ones can be "
                "optimised; pass a dense tensor, such as the values of a sparse one, and convert it in the losses"
            )
        called = f"{group['level']} parameter {name!r} of shape {tuple(p.shape)}"
        if not p.is_leaf and not p.retains_grad:
            raise ValueError(
                f"{called} is the result of an operation (such as .to(device), or a sum) and cannot be optimised; pass "
                "the tensor that it was computed from, or make it a leaf tensor: t = t.detach().requires_grad_()"
            )
        if p.is_inference():
            raise ValueError(
                f"{called} was created under torch.inference_mode(), so torch cannot differentiate in it; create it "
                "outside, or pass a copy that is made outside: t.clone().detach().requires_grad_()"
            )
        if p.is_complex():
            raise ValueError(
                f"{called} is complex, but only real tensors can be optimised; pass real = "
                "torch.view_as_real(t.detach()).requires_grad_(), and use torch.view_as_complex(real) in the losses"
            )
        if p.requires_grad and p.dtype not in COMPUTES:
            raise ValueError(
                f"{called} has the type {p.dtype}, in which torch cannot compute; pass a tensor of type float32 or "
                "bfloat16, and convert it in the losses"
            )
        if overlaps_itself(p):
            raise ValueError(
                f"{called} is expanded: several of its entries share one place in memory, so they cannot be updated "
                "separately; pass the tensor before expand() or unfold(), or t.detach().contiguous().requires_grad_()"
            )


def require_gradients() -> None:
    """Raise RuntimeError under ``torch.inference_mode()``, where torch computes no gradients."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "torch.inference_mode() is on, and then torch computes no gradients, which this call needs; leave the "
            "block before the call, or use torch.no_grad() instead, which does not disturb it"
        )


def require_apart(groups: Sequence[Mapping[str, Any]], known: int = 0) -> None:
    """Raise ValueError if two parameters share memory, unless both belong to the first ``known`` groups."""
    entries = [(i, *entry) for i, group in enumerate(groups) for entry in _named(group)]
    for number in overlapping([p for *_, p in entries]):
        i, name, p = entries[number]
        if i >= known:
            raise ValueError(
                f"{groups[i]['level']} parameter {name!r} of shape {tuple(p.shape)} shares memory with another "
                "parameter, so an update of one would change both; pass the tensor that both are views of"
            )


def _named(group: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the parameters of a group, which torch may not have validated, with their names or indices."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    names = group.get("param_names", range(len(params)))
    return [p if isinstance(p, tuple) else (name, p) for name, p in zip(names, params, strict=True)]


def by_level(groups: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of each level, with the parameters that require a gradient; raise for an invalid rate."""
    require_rates(groups)
    found: dict[str, list[dict[str, Any]]] = {level: [] for level in LEVELS}
    for group in groups:
        found[group["level"]].append({**group, "params": [p for p in group["params"] if p.requires_grad]})
    return found


def rates_of(groups: Sequence[dict[str, Any]]) -> list[Rate]:
    """Return the learning rate of each tensor of these groups."""
    rates: list[Rate] = []
    for group in groups:
        rate = group["lr"]
        if type(rate) is not float:
            rate = rate.detach().reshape(()) if isinstance(rate, Tensor) else float(rate)
        rates += [rate] * len(group["params"])
    return rates


def tensors_of(groups: Iterable[dict[str, Any]], level: str) -> list[Tensor]:
    """Return the parameters of these groups; raise if there are none."""
    tensors: list[Tensor] = []
    for group in groups:
        tensors += group["params"]
    if not tensors:
        raise ValueError(
            f"no {level} parameter requires a gradient, so there is nothing to optimise; call tensor.requires_grad_() "
            "on those to optimise"
        )
    return tensors


def names_of(groups: Iterable[dict[str, Any]]) -> list[str]:
    """Return names, or indices, of the upper and then of the lower parameters that require a gradient."""
    names, groups = [], list(groups)
    for level in LEVELS:
        index = 0
        for group in (group for group in groups if group["level"] == level):
            for i, p in enumerate(group["params"]):
                if p.requires_grad:
                    names.append(repr(group["param_names"][i]) if "param_names" in group else str(index))
                index += 1
    return names


Span = tuple[str, int, int, int]  # device, start and end address, index of the tensor


def overlaps_itself(t: Tensor) -> bool:
    """Return True if entries of a strided tensor share one place in memory, as after ``expand`` or ``unfold``."""
    reach = 0  # the furthest entry along the dimensions with smaller strides
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if stride <= reach:
            places = torch.zeros(_length(t) if t.numel() else 0, dtype=torch.bool, device="cpu")
            places.as_strided(t.shape, t.stride()).fill_(True)
            return int(places.sum()) < t.numel()
        reach += stride * (size - 1)
    return False


def overlapping(tensors: Sequence[Tensor]) -> list[int]:
    """Return, in order, the indices of tensors that share entries with one of a lower index."""
    first: dict[int, int] = {}
    for i, t in enumerate(tensors):
        first.setdefault(id(t), i)  # torch refuses duplicates
    found: list[int] = []
    cluster: list[Span] = []  # spans that overlap in a chain
    device, reach = "", 0
    for span in sorted(span for i in first.values() if (span := _span(tensors[i], i))):
        if span[0] != device or span[1] >= reach:
            found += _sharing(cluster, tensors)
            cluster, device, reach = [], span[0], span[2]
        cluster.append(span)
        reach = max(reach, span[2])
    return sorted(found + _sharing(cluster, tensors))


def _span(t: Tensor, index: int) -> Span | None:
    """Return the span of a tensor's memory; None if the address of its memory is not known."""
    if not isinstance(t, Tensor) or is_sharded(t) or t.layout != torch.strided or not t.numel():
        return None
    start = t.data_ptr()
    return (str(t.device), start, start + _length(t) * t.element_size(), index) if start else None


def _length(t: Tensor) -> int:
    """Return the number of places from a tensor's first entry to its last."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True))


def _sharing(cluster: Sequence[Span], tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of a cluster's tensors that share entries with one of a lower index."""
    if len(cluster) < 2:
        return []
    begin, end = cluster[0][1], max(span[2] for span in cluster)
    members = sorted((i, start - begin) for _, start, _, i in cluster)
    sizes = [n for i, start in members for n in (start, tensors[i].element_size())]
    unit = math.gcd(*sizes)  # bytes that no tensor splits
    marks = torch.zeros((end - begin) // unit, dtype=torch.bool, device="cpu")
    found = []
    for i, start in members:
        t, width = tensors[i], tensors[i].element_size() // unit
        own = marks.as_strided((*t.shape, width), (*(width * stride for stride in t.stride()), 1), start // unit)
        if own.any():
            found.append(i)
        own.fill_(True)
    return found

"""Values of an optimizer that a user may change in a run: its options, by which steps are told apart, and its rates."""

from __future__ import annotations

from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module

from ..optimizer.checkpoint import OWN
from ..optimizer.method import Method
from ..oracle.buffers import unnoted
from ..oracle.hooks import any_hooks
from ..problem.parameters import LEVELS, require_rates

__all__ = ["OptionsKey", "Rates", "has_one_key"]

PLAIN = (bool, int, float, str, tuple, type(None))
NOT_IN_KEY = ("lr", "initial_lr", "params", "param_names", OWN)  # entries of a group; learning rates are tensors
HOOKS = (  # for all modules; Dynamo has no guard on them
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_backward_hooks,
    module._global_backward_pre_hooks,
)
_ATTRIBUTES = attrgetter("requires_grad", "_backward_hooks")


def has_one_key(method: type[Method]) -> bool:
    """Return True if all steps of a run have the same key of a graph, unless options change."""
    return method._graph_key is Method._graph_key and method._lower_step_count is Method._lower_step_count


class OptionsKey:
    """Options of an optimizer and of its groups that decide the operations of a step, as a part of a cache key."""

    def __init__(self, optimizer: Method) -> None:
        self.optimizer = optimizer
        self._plain: itemgetter[Any] | None = None  # reads options
        self._pickers: dict[tuple[str, ...], itemgetter[Any]] = {}  # names in a group -> reads its options
        self._last: tuple[list[Any], list[Any]] = ([], [])  # the objects that options consist of, and their key

    def now(self) -> list[Any]:
        """Return all that a user may change in a run and that decides the operations of a step."""
        own = vars(self.optimizer)
        if self._plain is None:
            plain = [name for name, v in own.items() if isinstance(v, PLAIN) and name[0] != "_"]
            self._plain = itemgetter(*(name for name in plain if name != "lower_init"))  # its code is guarded
        # The same objects have the same options. Most steps stop here.
        groups, objects = self.optimizer.param_groups, [*self._plain(own)]
        for group in groups:
            names, parameters = tuple(group), group["params"]
            pick = self._pickers.get(names)
            if pick is None:
                pick = self._pickers[names] = itemgetter("level", *[name for name in names if name not in NOT_IN_KEY])
            objects.append(pick)
            objects += pick(group)
            for p in parameters:
                objects += _ATTRIBUTES(p)
            objects += parameters
        objects += (buffers := self.optimizer._run_state.buffers.changing())
        before, options = self._last
        if len(before) == len(objects) and all(map(is_, before, objects)) and not any(HOOKS):
            return options
        found: list[Any] = [self._plain(own)]
        for group in groups:
            for name, value in group.items():
                if name not in NOT_IN_KEY:
                    found.append(value if isinstance(value, PLAIN) else id(value))
            parameters = group["params"]
            found += (any_hooks(parameters), [p.requires_grad for p in parameters], [*map(id, parameters)])
        found += map(id, buffers)
        for hooks in HOOKS:
            found.append(sum([getattr(hook, "__module__", "") != unnoted.__module__ for hook in [*hooks.values()]]))
        hooked = [hooks for group in groups for _, hooks in map(_ATTRIBUTES, group["params"]) if hooks is not None]
        if not (hooked or any(HOOKS)):  # a dict of hooks may change
            self._last = objects, found
        return found


class Rates:
    """Learning rates of an optimizer as tensors, by level, so that no schedule recompiles a step."""

    def __init__(self, optimizer: Method) -> None:
        self.optimizer = optimizer
        self._last: tuple[list[Any], list[Tensor]] = ([], [])  # the values, and their tensors

    def on(self, device: torch.device) -> list[Tensor]:
        """Return them on a device; new tensors if a rate has changed."""
        groups = self.optimizer.param_groups
        values = [group["lr"] for group in groups]
        if len(values) == len(self._last[0]) and all(map(is_, values, self._last[0])):
            return self._last[1]
        require_rates(groups)
        in_order = [group["lr"] for level in LEVELS for group in groups if group["level"] == level]
        kind = torch.float64 if device.type != "mps" else torch.float32
        # Detached, so that none is a view: a fake view keeps its base where the garbage collector does not look. Of one
        # dimension, because Dynamo takes the value of a scalar for another input, and then traces the step once more.
        made = [torch.as_tensor(value, dtype=kind, device=device).reshape(1).detach() for value in in_order]
        if {*map(type, values)} == {float}:  # others may change in place
            self._last = values, made
        return made

"""One row per method: what it is called with, what it must refuse, what it supports."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import bilevel_optim as bo


@dataclass
class MethodInfo:
    """A method in one configuration.

    Attributes:
        cls: the class.
        options: its arguments beyond lr, lower_lr and lower_steps.
        tolerance: relative error of the hypergradient on the quadratic problem with plenty of lower steps; None if the
            method does not estimate it.
        errors: (arguments, message) pairs that the constructor must refuse.
        copies: keeps several copies of y, so that ``vectorize`` matters.
        stacks_tasks: takes tasks as one problem with stacked y (others have their own way with tasks, or take none).
        lower_steps: takes that argument.
        initial: its last upper parameters are the initial values of the lower ones.
    """

    cls: type[bo.BilevelOptimizer]
    options: dict[str, Any]
    tolerance: float | None
    name: str = ""
    errors: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    copies: bool = False
    stacks_tasks: bool = True
    lower_steps: bool = True
    initial: bool = False

    def __post_init__(self):
        self.name = self.name or self.cls.__name__

    def __call__(self, upper, lower, **arguments):
        if not self.lower_steps:
            arguments.pop("lower_steps", None)
        return self.cls(upper, lower, **{**self.options, **arguments})


F2SA_ERRORS = [
    ({"nu": -0.1}, "Invalid nu value: -0.1"),
    ({"nu": 0}, "Invalid nu value: 0"),
    ({"nu": float("nan")}, "Invalid nu value: nan"),
    ({"order": 0}, "Invalid order value: 0"),
    ({"order": 2.5}, "Invalid order value: 2.5"),
    ({"order": 2, "stencil": "centred"}, "Invalid stencil value: centred"),
    ({"order": 3, "stencil": "central"}, "Invalid stencil value: central"),
    ({"stencil": "backward"}, "Invalid stencil value: backward"),
    ({"samples": "own"}, "Invalid samples value: own"),
    ({"normalize": "yes"}, "Invalid normalize value: yes"),
    ({"lower_optimizer": torch.optim.LBFGS}, "Invalid lower_optimizer value: LBFGS"),
]

METHODS = [
    MethodInfo(
        bo.AID,
        {"linear_steps": 30},
        1e-10,
        name="AID-cg",
        errors=[
            ({"linear_solver": "gmres"}, "Invalid linear_solver value: gmres"),
            ({"linear_steps": -1}, "Invalid linear_steps value: -1"),
            ({"linear_steps": 2.5}, "Invalid linear_steps value: 2.5"),
            ({"linear_tol": -1e-3}, "Invalid linear_tol value: -0.001"),
            ({"linear_lr": 0.0}, "Invalid linear_lr value: 0.0"),
            ({"damping": -1.0}, "Invalid damping value: -1.0"),
        ],
    ),
    MethodInfo(bo.AID, {"linear_steps": 200, "linear_solver": "neumann"}, 1e-10, name="AID-neumann"),
    MethodInfo(bo.AID, {"linear_steps": 200, "linear_solver": "fixed_point"}, 1e-10, name="AID-fixed_point"),
    MethodInfo(bo.AID, {"linear_steps": 30, "hvp": "finite-difference"}, 1e-8, name="AID-differences"),
    MethodInfo(
        bo.ITD,
        {},
        1e-10,
        errors=[
            ({"truncate": -1}, "Invalid truncate value: -1"),
            ({"checkpoint": 1}, "Invalid checkpoint value: 1"),
            ({"lower_optimizer": torch.optim.LBFGS}, "Invalid lower_optimizer value: LBFGS"),
            ({"lower_optimizer": partial(bo.AGD, momentum=0.5)}, "Invalid lower_optimizer value: AGD"),
        ],
    ),
    MethodInfo(bo.ITD, {"checkpoint": True}, 1e-10, name="ITD-checkpoint"),
    MethodInfo(bo.FirstOrder, {}, None),
    MethodInfo(bo.F2SA, {"order": 1, "nu": 1e-6, "normalize": False}, 1e-5, name="F2SA-1", copies=True),
    MethodInfo(
        bo.F2SA, {"order": 2, "nu": 1e-4, "normalize": False}, 1e-7, name="F2SA-2", errors=F2SA_ERRORS, copies=True
    ),
    MethodInfo(bo.F2SA, {"order": 3, "nu": 1e-3, "normalize": False}, 1e-7, name="F2SA-3", copies=True),
    MethodInfo(
        bo.F2SA,
        {"order": 4, "nu": 1e-3, "normalize": False, "samples": "independent"},
        1e-8,
        name="F2SA-4-independent",
        copies=True,
    ),
]

MULTILEVEL_ERRORS = [
    ({"levels": 0}, "Invalid levels value: 0"),
    ({"levels": 2.0}, "Invalid levels value: 2.0"),
    ({"neumann_steps": 0}, "Invalid neumann_steps value: 0"),
    ({"neumann": "series"}, "Invalid neumann value: series"),
    ({"level_sampling": "shared"}, "Invalid level_sampling value: shared"),
    ({"base_level": 3}, "Invalid base_level value: 3"),
    ({"base_level": -1}, "Invalid base_level value: -1"),
    ({"implicit_term": 1}, "Invalid implicit_term value: 1"),
    ({"smoothness": 0.0}, "Invalid smoothness value: 0.0"),
    ({"smoothness": float("nan")}, "Invalid smoothness value: nan"),
    ({"cap": "1/L"}, "Invalid cap value: 1/L"),
    ({"lower_optimizer": torch.optim.Adam}, "the lower solver is EpochSGD"),
]

# Methods that are for tasks, or that start their lower problems from upper parameters: tested on problems of that kind.
TASK_METHODS = [
    MethodInfo(bo.RTMLMC, {"levels": 3, "neumann_steps": 3}, None, errors=MULTILEVEL_ERRORS, lower_steps=False),
    MethodInfo(
        bo.RTMLMC,
        {"levels": 3, "neumann_steps": 3, "neumann": "product", "base_level": 1, "level_sampling": "independent"},
        None,
        name="RTMLMC-product",
        lower_steps=False,
    ),
    MethodInfo(bo.DLSGD, {"levels": 2, "neumann_steps": 3, "neumann": "cg"}, None, lower_steps=False),
    MethodInfo(
        bo.MAML,
        {},
        None,
        errors=[
            ({"truncate": -1}, "Invalid truncate value: -1"),
            ({"lower_optimizer": torch.optim.LBFGS}, "Invalid lower_optimizer value: LBFGS"),
        ],
        initial=True,
    ),
    MethodInfo(bo.ANIL, {"checkpoint": True}, None, initial=True),
    MethodInfo(bo.FOMAML, {}, None, initial=True),
    MethodInfo(
        bo.iMAML,
        {"proximal": 1.0, "linear_steps": 2},
        None,
        errors=[({"proximal": -1.0}, "Invalid proximal value: -1.0"), ({"damping": -1}, "Invalid damping value: -1")],
        initial=True,
    ),
]

COMMON_ERRORS = [
    ({"lr": -0.1}, "Invalid learning rate: -0.1"),
    ({"lr": float("nan")}, "Invalid learning rate: nan"),
    ({"lower_lr": -0.1}, "Invalid lower_lr value: -0.1"),
    ({"lower_steps": -1}, "Invalid lower_steps value: -1"),
    ({"lower_steps": 1.5}, "Invalid lower_steps value: 1.5"),
    ({"vectorize": 0}, "Invalid vectorize value: 0"),
    ({"vectorize": -2}, "Invalid vectorize value: -2"),
    ({"vectorize": "yes"}, "Invalid vectorize value: yes"),
    ({"hvp": "fast"}, "Invalid hvp value: fast"),
    ({"lower_optimizer": "adam"}, "Invalid lower_optimizer value: adam"),
    ({"generator": 3}, "Invalid generator value: 3"),
    ({"tasks_per_step": 0}, "Invalid tasks_per_step value: 0"),
    ({"lower_batch": 1.5}, "Invalid lower_batch value: 1.5"),
    ({"upper_batch": -1}, "Invalid upper_batch value: -1"),
    ({"lower_init": 3}, "Invalid lower_init value: 3"),
]

"""One row per method and variant: the arguments that tests give it; what a method is, its class declares.

A worked example: the new method ``bo.Mine`` takes ``linear_steps``, ``linear_solver``, ``damping`` and ``growth``::

    SETTINGS["Mine"] = {
        "": {"linear_steps": 30},  # the plain row, named "Mine": accurate on the quadratic problem
        "neumann": {"linear_solver": "neumann", "linear_steps": 200},  # a variant, named "Mine-neumann"
    }
    TOLERANCES["Mine-neumann"] = 1e-4  # relative error of its hypergradient, if not 1e-8; None: not compared
    SINGLE["Mine"] = ({"damping": 0.1}, 1e-4)  # float32: other arguments, and a tolerance other than 5e-6
    HALF["Mine"] = {"damping": 0.1}  # autocast to bfloat16: other arguments; None: not tested
    ALIKE["Mine"] = {"growth": 0.0}  # arguments with which all outer steps make equally many lower steps
    ERRORS["Mine"] = {"damping": [-1.0]}  # values that it must refuse

Only ``SETTINGS`` is required here (``test_every_public_method_has_a_row``); ``CALLS`` in ``test_oracle_calls.py`` and
the table in ``docs/gpu.md`` must have the method too. `MOMENTUM` lists rows whose x does not follow gradient descent.

A row runs in each test with ``@each()``, and with ``@each(condition)`` if it meets the condition, which most often asks
for the plain row, or reads ``declared``. Of a kind of methods only one row runs without ``--slow`` in ``compiled/``,
``faults/`` and ``generic/``, but all rows in `test_quadratic` of ``generic/test_truth.py`` (see ``selection.py``):

* ``generic/test_truth.py``: y and the hypergradient, as far as it declares ``solves`` and ``converges``;
* the rest of ``generic/``: purity, interface, state, draws, evaluation, tasks, limits, adapting, diagnostics;
* ``compiled/``: its compiled steps are its eager ones, or it falls back for the reason in ``uncaptured``;
* ``faults/``, ``ranks/test_equal.py``, ``test_oracle_calls.py``, and ``devices/`` on the simulated GPU;
* ``fuzz/``: some examples of its family, whose members are drawn at random.

Tests with a tuple of names, such as those of ``tools/``, do not run it unless it is added there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import methods

from .problems import Cleaning, Problem, Quadratic, Saddle, Tasks, seeded

ARGUMENTS = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 3}

# Every method in the configurations worth testing, "" being the plain one: its arguments besides those above for the
# quadratic problem, where an estimate can be accurate.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "AID": {
        "": {"linear_steps": 30},
        "minres": {"linear_solver": "minres", "linear_steps": 30},
        "direct": {"linear_solver": "direct"},
        "neumann": {"linear_solver": "neumann", "linear_steps": 200},
        "fixed-point": {"linear_solver": "fixed_point", "linear_steps": 200},
        "differences": {"hvp": "finite-difference", "linear_steps": 30},
        "direction": {"linear_steps": 30, "keep_direction": True},
    },
    "ANIL": {"": {}},
    "AmIGO": {"": {"linear_steps": 40}},
    "BA": {"": {"linear_steps": 30, "warm_start": True}},
    "BOME": {"": {}, "value": {"barrier": "value", "joint_steps": 2}, "joint": {"joint_steps": 4}},
    "BSA": {"": {"linear_steps": 4}},
    "BSVRB": {"": {}, "2": {"version": 2}},
    "DLSGD": {"": {"levels": 2, "neumann_steps": 3, "neumann": "cg"}},
    "ESMAML": {"": {"direction": "orthogonal"}},
    "F2SA": {
        "": {"nu": 1e-4, "normalize": False},
        "1": {"order": 1, "nu": 1e-6, "normalize": False},
        "3": {"order": 3, "nu": 1e-3, "normalize": False},
        "4-independent": {"order": 4, "samples": "independent", "nu": 1e-3, "normalize": False},
    },
    "FOMAML": {"": {}},
    "FSLA": {"": {}},
    "FirstOrder": {"": {}},
    "GDA": {"": {}, "alternating": {"simultaneous": False}},
    "HOZOG": {"": {"direction": "orthogonal", "difference": "central"}},
    "ITD": {"": {}, "checkpoint": {"checkpoint": True}},
    "MAML": {"": {}, "checkpoint": {"checkpoint": True}},
    "MRBO": {"": {"linear_steps": 20}},
    "PAID": {
        "": {"linear_steps": 30, "perturbation": 1e-13, "gradient_threshold": 10.0, "perturbation_period": 1},
    },
    "PRAGDA": {"": {"perturbation": 1e-13, "restart_radius": 0.5}},
    "PRAHGD": {"": {"linear_steps": 30, "perturbation": 1e-13, "restart_radius": 0.5}},
    "PZOBO": {
        "": {"direction": "orthogonal"},
        "relative-central": {"direction": "orthogonal", "smoothing_mode": "relative", "difference": "central"},
    },
    "RAGDA": {
        "": {"on_converged": "continue"},
        "descent": {"momentum": 0.0, "restart_radius": math.inf},
        "newton": {"newton_correction": True, "linear_steps": 30},
    },
    "RAHGD": {
        "": {"linear_steps": 30, "on_converged": "continue"},
        "descent": {"linear_steps": 30, "momentum": 0.0, "restart_radius": math.inf},
    },
    "RSVRB": {
        "": {},
        "exact": {"variant": "exact_mean"},
        "faithful": {"variant": "faithful"},
        "free": {"variant": "matrix_free"},
    },
    "RTMLMC": {
        "": {"levels": 3, "neumann_steps": 3},
        "product": {
            **{"levels": 3, "neumann_steps": 3, "neumann": "product"},
            **{"base_level": 1, "level_sampling": "independent"},
        },
    },
    "SABA": {"": {}},
    "SOBA": {"": {}},
    "SRBA": {"": {}},
    "STABLE": {"": {}},
    "SUSTAIN": {"": {"linear_steps": 4}},
    "SVRB": {"": {}, "free": {"variant": "matrix_free"}},
    "StocBiO": {"": {"linear_steps": 40}},
    "TTSA": {"": {"linear_steps": 4}},
    "VRBO": {"": {"linear_steps": 20, "anchor_batches": 2}},
    "iMAML": {"": {"proximal": 1.0, "linear_steps": 30}},
    "iMCN": {"": {"cubic_steps": 5, "linear_steps": 5}},
}

# Relative error of the hypergradient on the quadratic problem with its standard settings, where it is not 1e-8, by name
# of the row; None: another formula holds, or it is random for deterministic losses too. Their own tests say more.
TOLERANCES = {
    **dict.fromkeys(("BSA", "TTSA", "SUSTAIN", "RTMLMC", "RTMLMC-product", "DLSGD", "iMAML"), None),
    **dict.fromkeys(("MRBO", "VRBO"), 1e-4),  # the Neumann series, of 20 products
    **{"F2SA": 1e-6, "F2SA-1": 1e-5, "F2SA-3": 1e-6, "AID-differences": 1e-7, "ESMAML": 1e-6},
}
MOMENTUM = ("RAHGD", "PRAHGD", "RAGDA", "RAGDA-newton", "PRAGDA")  # x does not follow gradient descent
# Arguments for equal outer steps, and for low precision.
ALIKE: dict[str, dict[str, Any]] = {"BA": {"growth": 0.0}, "BSA": {"growth": 0.0}}
SINGLE: dict[str, tuple[dict[str, Any], float]] = {
    "F2SA": ({"nu": 1e-2}, 2e-3),
    **dict.fromkeys(("PZOBO", "HOZOG", "ESMAML"), ({"smoothing": 0.5}, 5e-5)),
    **dict.fromkeys(("MRBO", "VRBO"), ({}, 1e-4)),
}
HALF: dict[str, dict[str, Any] | None] = {
    "F2SA": {"nu": 0.3},
    "PZOBO": {"smoothing": 1.0, "smoothing_mode": "absolute"},
    **dict.fromkeys(("HOZOG", "ESMAML")),  # differences of losses that are rounded to three digits mean nothing
}


@dataclass(frozen=True)
class Row:
    """A method in one configuration, made for the quadratic problem."""

    cls: type[bo.BilevelOptimizer]
    variant: str
    options: dict[str, Any]

    @property
    def name(self):
        return f"{self.cls.__name__}-{self.variant}" if self.variant else self.cls.__name__

    @property
    def declared(self):
        return self.cls.declared

    @property
    def tolerance(self):
        return TOLERANCES.get(self.name, 1e-8) if self.declared.converges else None

    @property
    def rounding(self):
        """Precision left of 1e-12, as finite differences divide rounding errors by a small step."""
        return 1e-8 if "hvp" in self.options else 1e-12 / min(self.options.get("nu", 1.0), 0.1)

    @property
    def takes_tasks(self):
        return self.declared.tasks != "none"

    @property
    def settling(self):
        """Backward passes at one x until y, and what else is carried from step to step, has settled there."""
        return 2 if self.declared.lower_steps else 60

    @property
    def refused(self):
        """Arguments of the base class that it does not take."""
        refused = {"lower_steps"} if not self.declared.lower_steps else set()
        refused |= {"lower_optimizer"} if self.declared.lower_optimizer == "none" else set()
        refused |= {"upper_optimizer"} if self.declared.upper_update else set()
        return refused | ({"warm_start"} if self.declared.initial else set())  # always from x

    def __call__(self, upper, lower, *, short=False, **arguments):
        """An optimizer; ``short``: few iterations and directions, where nothing has to be accurate."""
        options = {**self.options, **({"linear_steps": 2} if short and "linear_steps" in self.options else {})}
        options |= {"generator": seeded(7)} if self.declared.random else {}
        upper, lower = list(upper), list(lower)
        if options.get("direction") == "orthogonal":  # a basis of directions is exact for a linear response
            accurate = not short and isinstance(upper[0], torch.Tensor)
            options["directions"] = sum(t.numel() for t in upper) if accurate else 2
        arguments = {**ARGUMENTS, **options, **arguments}
        return self.cls(upper, lower, **{name: value for name, value in arguments.items() if name not in self.refused})

    def quadratic(self, n=8, m=3, kappa=2.0, dtype=torch.float64, tasks=False) -> Problem:
        """A problem of the method's kind with a closed form."""
        if tasks or self.declared.tasks == "required":
            problem = Tasks(m=3, dtype=dtype, rows=self.declared.tasks == "rows")
        else:
            problem = (Quadratic if self.declared.losses == 2 else Saddle)(n, m, kappa, dtype)
        if self.declared.initial:
            problem.x.append(problem.y[0].detach().clone().requires_grad_())
        return problem

    def cleaning(self, form="whole", **options) -> Cleaning:
        """A problem of the method's kind with modules and data; ``form`` as in `Cleaning`."""
        if self.declared.tasks == "required":
            form = "tasks"
        if form == "batches" and self.declared.data == "finite_sum":
            form = "terms"
        rows = form == "tasks" and self.declared.tasks == "rows"
        return Cleaning(self.declared.losses, initial=self.declared.initial, form=form, rows=rows, **options)


def rows():
    """Return the rows of all methods that have settings."""
    return [
        Row(methods()[name], variant, options) for name, found in SETTINGS.items() for variant, options in found.items()
    ]


ROWS = rows()
# For what only the base class does: a loop in the live tensors, copies of y, a single loop, one loss.
REPRESENTATIVES = ("AID", "F2SA", "SOBA", "RAGDA")


def each(condition=lambda row: True):
    """Parametrise a test over the rows for which the condition holds, or that have these names."""
    names = condition if isinstance(condition, tuple) else ()
    chosen = [row for row in ROWS if row.name in names or (not names and condition(row))]
    return pytest.mark.parametrize("row", chosen, ids=lambda row: row.name)


# Bad values of the arguments that a class has, or has of its own: each is refused with "Invalid name value: value".
nan, inf = math.nan, math.inf
WHOLE, LBFGS = [-1, 1.5], torch.optim.LBFGS
ERRORS: dict[str, dict[str, list[Any]]] = {
    "AID": {
        **{"lower_lr": [-0.1], "lower_steps": WHOLE, "vectorize": [0, -2, "yes"], "hvp": ["fast"], "generator": [3]},
        **{"lower_optimizer": ["adam"], "tasks_per_step": [0], "lower_batch": [1.5], "upper_batch": [-1]},
        **{"lower_init": [3], "linear_solver": ["gmres", []], "linear_steps": WHOLE, "linear_tol": [-1e-3, 1.0, inf]},
        **{"linear_lr": [0.0], "damping": [-1.0]},
    },
    "ITD": {"truncate": [-1], "checkpoint": [1], "lower_optimizer": [LBFGS, partial(bo.AGD, momentum=0.5)]},
    "F2SA": {
        **{"nu": [-0.1, 0, nan], "order": [0, 2.5], "stencil": ["backward", "centred"], "samples": ["own"]},
        **{"normalize": ["yes"], "lower_optimizer": [LBFGS]},
    },
    "PZOBO": {
        **{"directions": [0, 1.5], "smoothing": [0.0, -1e-2, inf], "smoothing_mode": ["both"]},
        **{"direction": ["cauchy"], "scale": ["biased", nan], "difference": ["backward"], "lower_optimizer": [LBFGS]},
        "share_directions_across_tasks": [1],
        "over_ranks": ["paths"],
    },
    "RAHGD": {
        **{"momentum": [1.0, -0.1], "restart_radius": [0.0, nan], "restart_period": [0, 1.5], "lower_momentum": [1.0]},
        **{"lower_restart": ["warm"], "restart_steps": [-1], "lower_tol": [-1.0], "on_converged": ["raise"]},
        **{"linear_start": ["x"]},
        **{"linear_steps": [-1], "linear_tol": [-1e-3, 1.0], "linear_atol": [-1e-3, inf], "damping": [-1.0, inf]},
    },
    "PRAHGD": {"perturbation": [-1.0, inf], "perturb_initial": [1]},
    "BA": {"lower_steps": [0], "growth": [-0.5], "linear_steps": [-1]},
    "PAID": {"perturbation": [-1.0, inf], "gradient_threshold": [-1.0], "perturbation_period": [0.5]},
    "StocBiO": {"linear_steps": [-1], "linear_lr": [0.0]},
    "AmIGO": {"linear_steps": [0], "linear_lr": [0.0]},
    "BSA": {"linear_steps": [0], "linear_lr": [0.0], "lower_steps": [0], "growth": [-0.5]},
    "TTSA": {"linear_steps": [0]},
    "SUSTAIN": {"linear_steps": [0], "beta": [-0.1, 1.5], "lower_optimizer": [LBFGS, bo.AGD]},
    "MRBO": {"linear_steps": [-1], "beta": [-0.1, 1.5], "lower_beta": [-1], "lower_optimizer": [LBFGS, bo.AGD]},
    "VRBO": {"period": [0], "anchor_batches": [1.5], "linear_lr": [0.0], "lower_optimizer": [LBFGS, bo.AGD]},
    "SOBA": {"linear_lr": [0.0], "lower_optimizer": [LBFGS, bo.AGD]},
    "SABA": {"linear_lr": [0.0], "lower_optimizer": [LBFGS]},
    "FSLA": {"beta": [-0.1, 1.5], "lower_optimizer": [bo.AGD]},
    "SVRB": {
        **{"averaging": [0.0, 1.5], "beta": [-0.1, {"z": 0.1}], "beta_unit": ["m"], "floor": [0.0], "radius": [0.0]},
        **{"ceilings": [{"V": 0.0}, {"H": 1.0}, 3], "schedule": ["linear"], "schedule_offset": [-1.0], "restarts": [0]},
        **{"initial_steps": [-1], "lazy": ["yes"], "variant": ["exact_mean", {}]},
        "state_device": ["nowhere", 0],
    },
    "RSVRB": {"task_batch": [0], "probes": [0], "probabilities": ["best", [0.5, 0.0], {}], "variant": ["blocks"]},
    "BSVRB": {"ceilings": [{"V": 1.0}], "version": [3, []], "beta": [1.0]},
    "STABLE": {"beta": [-1.0]},
    "GDA": {"simultaneous": [1]},
    "RAGDA": {
        **{"momentum": [1.0], "restart_radius": [nan], "restart_period": [0], "lower_momentum": [1.0]},
        **{"lower_restart": ["warm"], "lower_tol": [-1.0], "newton_correction": [1], "linear_steps": [-1]},
    },
    "PRAGDA": {"perturbation": [-1.0, inf], "perturb_initial": [1]},
    "iMCN": {
        **{"perturbation": [-1.0], "cubic": [0.0], "cubic_steps": [-1], "linear_steps": [-1], "tol": [-1.0]},
        **{"lower_momentum": [1.0], "hvp": ["finite-difference"]},
    },
    "RTMLMC": {
        **{"levels": [0, 2.0], "neumann_steps": [0], "neumann": ["series"], "level_sampling": ["shared"]},
        **{"base_level": [10, -1], "implicit_term": [1], "smoothness": [0.0, nan], "cap": ["1/L"]},
        **{"neumann_rate": [0.0, 1.5, nan]},
    },
    "MAML": {"truncate": [-1], "lower_optimizer": [LBFGS]},
    "iMAML": {"proximal": [-1.0], "damping": [-1], "linear_solver": ["lu"]},
    "ESMAML": {"directions": [0], "lower_directions": [-1, 2.0], "lower_smoothing": [0.0]},
}

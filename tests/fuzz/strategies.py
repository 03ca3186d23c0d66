"""Hypothesis strategies: problems, options, and what may fail."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from ..registry import ROWS
from .runs import Case
from .toys import Kind

SHAPES = ((), (1,), (2,), (0,), (1, 2), (2, 1), (0, 2))
ELEMENTWISE = ("sgd", "momentum", "nesterov", "adam", "rmsprop")
CHOICES = {  # of the lower optimizer, by what the method declares
    "any": (*ELEMENTWISE, "agd", "lbfgs"),
    "elementwise": (*ELEMENTWISE, "agd"),
    "given gradient": ELEMENTWISE,
    "differentiable": ("sgd", "momentum", "nesterov"),
    "none": ("sgd",),
}
EXACT = {"stacked": ("none", "one", "tasks"), "rows": ("none", "one"), "none": ("none", "one")}  # data without noise


def shapes():
    """A few small shapes with at least one entry, and few entries."""
    lists = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)
    return lists.map(tuple).filter(lambda ss: 1 <= sum(math.prod(s) for s in ss) <= 4)


def data_of(row):
    """The forms of data that a method takes."""
    if row.declared.tasks == "required":
        return ("tasks",)
    if row.declared.data == "finite_sum":
        return ("none", "terms")
    return ("none", "one", "list", "loader", "terms", *(("tasks",) if row.takes_tasks else ()))


@st.composite
def kinds(draw, row, *, exact=False):
    """Problems for a method; ``exact``: only such as have no noise."""
    flags = {name: draw(st.booleans()) for name in ("tied", "own", "features", "wavy", "groups", "named")}
    forms = data_of(row)
    if exact:
        forms = [form for form in forms if form in EXACT[row.declared.tasks]]
        flags["wavy"] &= row.declared.family != "zeroth-order" and row.cls.__name__ != "ESMAML"  # exact if linear
    else:
        flags |= {name: draw(st.booleans()) for name in ("buffers", "dropout")}
    form = draw(st.sampled_from(forms))
    return Kind(
        upper=draw(shapes()),
        lower=draw(shapes()),
        dtype=torch.float64 if exact else draw(st.sampled_from((torch.float64, torch.float32))),
        layout=draw(st.sampled_from(("plain", "views", "strided"))),
        data=form,
        seed=draw(st.integers(0, 9)),
        **flags,
    )


@st.composite
def cases(draw, family):
    """A method of a family with options and a problem."""
    row = draw(st.sampled_from([row for row in ROWS if row.declared.family == family]))
    kind, declared = draw(kinds(row)), row.declared
    choices = [
        o for o in CHOICES[declared.lower_optimizer] if o != "lbfgs" or not (kind.groups or kind.data == "tasks")
    ]
    options = {"lr": draw(st.sampled_from((0.0, 0.02, 0.1))), "lower_lr": draw(st.sampled_from((0.02, 0.1)))}
    if declared.lower_steps:
        options["lower_steps"] = draw(st.integers(1, 3))
    if not declared.initial and declared.tasks != "required":
        options["warm_start"] = draw(st.booleans())
    options["vectorize"] = draw(st.sampled_from((True, False, 2)))
    if declared.second_order and row.cls.__name__ != "iMCN" and "hvp" not in row.options:
        options["hvp"] = draw(st.sampled_from(("exact", "finite-difference")))
    if declared.family == "contextual":  # an estimate of the smoothness costs more than the rest of the schedule
        options |= {"levels": draw(st.integers(2, 3)), "neumann_steps": 2}
        options["smoothness"] = draw(st.sampled_from((8.0, 8.0, 8.0, None)))
    if kind.data == "tasks":
        options["lower_batch"] = draw(st.sampled_from((None, 2)))
        options["upper_batch"] = draw(st.sampled_from((None, 3)))
        if declared.tasks != "rows":
            options["tasks_per_step"] = draw(st.sampled_from((None, 1, 2, 4)))
    return Case(row.name, kind, draw(st.sampled_from(choices)), draw(st.booleans()), tuple(sorted(options.items())))

"""Bad input is refused with the name of the argument, before anything is written; accepted input works."""

from __future__ import annotations

import inspect
import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import FAMILIES

from ..registry import ROWS
from .runs import Case, called
from .strategies import data_of
from .toys import Kind


class Thing:
    """Neither a number nor anything else."""

    def __repr__(self):
        return "Thing()"


# Values of no valid type, and numbers that few arguments take.
JUNK = (None, "banana", b"b", 1j, [], [0.5], {}, {"a": 1.0}, Thing(), torch.zeros(2))
NUMBERS = (-1, 0, 1, 3, -0.5, 0.0, 0.5, 2.5, 1e-30, 1e30, math.nan, math.inf, -math.inf, True, False)
TYPES = {"bool": bool, "int": int, "float": (int, float), "str": str, "None": type(None)}


def arguments_of(cls):
    """The arguments of a method with their annotations; those that all methods have too."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}


def suits(value, annotation):
    """Return True if the annotation names the type of a value; None if this cannot be decided."""
    names = re.split(r"\s*\|\s*", annotation)
    if not all(name in TYPES for name in names):
        return None
    if isinstance(value, bool):
        return "bool" in names
    return any(isinstance(value, TYPES[name]) for name in names)


def named(error, argument):
    """Return True if an error is of the right kind and names the argument."""
    words = {argument, argument.replace("_", " ")} | ({"learning rate"} if argument.endswith("lr") else set())
    return isinstance(error, (TypeError, ValueError)) and any(word in str(error) for word in words)


@st.composite
def constructions(draw, family):
    row = draw(st.sampled_from([row for row in ROWS if row.declared.family == family]))
    arguments = {name: of for name, of in arguments_of(row.cls).items() if name not in row.refused}
    name = draw(st.sampled_from(sorted(arguments)))
    return row.name, data_of(row)[0], name, arguments[name], draw(st.sampled_from((*JUNK, *NUMBERS)))


@pytest.mark.parametrize("family", FAMILIES)
def test_constructors(family, budget):
    @budget(12)
    @given(constructions(family))
    def check(construction):
        name, data, argument, annotation, value = construction
        case = Case(name, Kind(data=data))
        problem = case.problem()
        made = called(partial(case.made, problem, **{argument: value}))
        if isinstance(made, BaseException):
            assert named(made, argument), repr(made)
            return
        assert suits(value, annotation) is not False, f"{argument}={value!r} is accepted"
        outcome = called(problem.apply, made.step)
        if isinstance(outcome, BaseException):
            assert named(outcome, argument) or isinstance(outcome, bo.NonFiniteError), repr(outcome)
        assert all(t.isfinite().all() for t in problem.tensors), "something that is not finite has been written"

    check()

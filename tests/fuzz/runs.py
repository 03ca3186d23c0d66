"""An optimizer on a problem that can be made again from plain values, and everything that a call may change of it."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from ..problems import assign, seeded, values
from ..registry import ROWS
from .toys import Kind, Toy

OPTIMIZERS = {
    "sgd": None,
    "momentum": partial(torch.optim.SGD, momentum=0.5),
    "nesterov": partial(torch.optim.SGD, momentum=0.5, nesterov=True, foreach=True),
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "agd": partial(bo.AGD, momentum=0.3),
    "lbfgs": partial(torch.optim.LBFGS, max_iter=2),
}
BY_NAME = {row.name: row for row in ROWS}


@dataclass(frozen=True)
class Case:
    """A method, a problem and options by their names: what can be printed, and made twice."""

    row: str
    kind: Kind = field(default_factory=Kind)
    optimizer: str = "sgd"
    generator: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def registered(self):
        return BY_NAME[self.row]

    def problem(self) -> Toy:
        declared = self.registered.declared
        return Toy(self.kind, declared.losses, initial=declared.initial, rows=declared.tasks == "rows")

    def made(self, problem, first=(), **more):
        row, options = self.registered, {"short": True, **dict(self.options)}
        options |= {"lower_optimizer": OPTIMIZERS[self.optimizer], "generator": seeded(7) if self.generator else None}
        groups = (problem.groups(level, **dict(first)) for level in ("upper", "lower"))
        return row(*groups, **{**options, **more})


class Run:
    """A problem and its optimizer."""

    def __init__(self, case: Case) -> None:
        self.case, self.problem = case, case.problem()
        self.optimizer = case.made(self.problem, {"lr": 0.07})

    def add_group(self, level):
        problem = self.problem
        spare = getattr(problem, f"spare_{'x' if level == 'upper' else 'y'}")
        params = [(f"spare_{level}", spare)] if problem.kind.named else [spare]
        self.optimizer.add_param_group({"params": params, "level": level})
        problem.added.append(level)

    def step(self, how="step"):
        """One outer step, in one of the ways to make it; returns the loss."""
        problem, optimizer = self.problem, self.optimizer
        if how == "closure":
            return optimizer.step(closure=lambda: problem.apply(optimizer.backward))
        if how == "split":
            loss = problem.apply(optimizer.backward)
            optimizer.step()
            return loss
        return problem.apply(getattr(optimizer, how))

    def contents(self):
        """Everything that a call may change."""
        problem, optimizer = self.problem, self.optimizer
        return {
            "parameters": values(problem.tensors),
            "gradients": [None if t.grad is None else t.grad.clone() for t in problem.tensors],
            "buffers": {name: b.clone() for name, b in problem.norm.named_buffers()},
            "state": optimizer.state_dict(),
            "counts": optimizer.oracle_counts,
            "diagnostics": copy.deepcopy(optimizer.diagnostics),
            "random": torch.get_rng_state(),
            "positions": [o.state_dict() for o in problem.stateful],
            "draws": [g.get_state() for g in self.generators()],
        }

    def generators(self):
        """Return the generators of the data."""
        owners = [owner for o in self.problem.stateful for owner in (o, o.data)]
        return [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]

    # ------------------------------------------------------------------------------------------------ copies

    def saved(self):
        """Return a program's checkpoint as bytes."""
        problem, file = self.problem, io.BytesIO()
        data = [o.state_dict() for o in problem.stateful]
        rest = {"added": list(problem.added), "data": data, "random": torch.get_rng_state()}
        parts = {"optimizer": self.optimizer.state_dict(), "tensors": values(problem.tensors), **rest}
        parts |= {"gradients": [None if t.grad is None else t.grad.clone() for t in problem.tensors]}
        torch.save({**parts, "norm": problem.norm.state_dict()}, file)
        return file.getvalue()

    def load(self, saved, *, optimizer=True):
        """Load a saved checkpoint."""
        parts = torch.load(io.BytesIO(saved), weights_only=True)
        for level in parts["added"]:
            if level not in self.problem.added:
                self.add_group(level)
        assign(self.problem.tensors, parts["tensors"])
        for tensor, gradient in zip(self.problem.tensors, parts["gradients"], strict=True):
            tensor.grad = gradient
        self.problem.norm.load_state_dict(parts["norm"])
        for objective, position in zip(self.problem.stateful, parts["data"], strict=True):
            objective.load_state_dict(position)
        if optimizer:
            self.optimizer.load_state_dict(parts["optimizer"])
        torch.set_rng_state(parts["random"])

    def again(self, how):
        """A run that continues like this one: resumed by fresh objects, or with a copy of the optimizer."""
        saved = self.saved()
        if how == "load":
            run = Run(self.case)
            run.load(saved)
            run.optimizer.diagnostics = copy.deepcopy(self.optimizer.diagnostics)  # which are not saved
            return run
        copied = copy.deepcopy(self.optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(self.optimizer))
        run = object.__new__(Run)
        run.case, run.problem, run.optimizer = self.case, self.case.problem(), copied
        run.problem.added = list(self.problem.added)
        run.adopt(copied.param_groups)
        run.load(saved, optimizer=False)
        return run

    def adopt(self, groups):
        """Let the problem read the tensors of these groups."""
        problem = self.problem
        upper, lower = ([p for g in groups if g["level"] == level for p in g["params"]] for level in ("upper", "lower"))
        if "upper" in problem.added:
            problem.spare_x = upper.pop()
        if "lower" in problem.added:
            problem.spare_y = lower.pop()
        problem.x, problem.start, problem.y = upper[: len(problem.x)], upper[len(problem.x) :], lower


def called(function, *arguments, thread=False):
    """Return the result of a call or its exception, without the library's warnings."""

    def call():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", bo.BilevelWarning)
                outcome.append(function(*arguments))
        except BaseException as error:
            outcome.append(error)

    outcome: list[Any] = []
    if thread:
        worker = threading.Thread(target=call)
        worker.start()
        worker.join()
    else:
        call()
    return outcome[0]


def difference(a, b, path=""):
    """Return the first place where two nested values differ in a bit; None if there is none."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        alike = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return None if alike and torch.allclose(a, b, 0, 0, equal_nan=True) else f"{path}: {a} is not {b}"
    if type(a) is not type(b):
        return f"{path}: {a} is not {b}"
    if isinstance(a, bytes) and a != b:  # of a checkpoint, which says the same in other bytes after it was loaded
        a, b = (torch.load(io.BytesIO(entry), weights_only=True) for entry in (a, b))
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))} in one of them"
        found = (difference(a[k], b[k], f"{path}[{k!r}]") for k in a)
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{path}: {len(a)} entries and {len(b)}"
        found = (difference(s, t, f"{path}[{i}]") for i, (s, t) in enumerate(zip(a, b, strict=True)))
    else:
        return None if a == b else f"{path}: {a} is not {b}"
    return next(filter(None, found), None)

"""Small problems of many kinds, each made from plain values, so that it can be made twice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import bilevel_optim as bo
from bilevel_optim.oracle.point import none_to_zeros

from ..problems import Problem, assign, flat, seeded, values

ROWS, TASKS, BATCH = 12, 3, 4  # rows of data, four for each task


@dataclass(frozen=True)
class Kind:
    """Settings of a problem.

    Attributes:
        upper, lower: shapes of the tensors.
        dtype: of all of them.
        layout: ``"plain"``; ``"views"`` of one storage; ``"strided"``, no tensor is contiguous.
        tied: the first lower tensor is used twice.
        data: ``"none"``, ``"one"`` batch, ``"list"`` of batches, ``"loader"``, ``"terms"`` of a sum, or ``"tasks"``.
        own: data draw from a generator of their own.
        buffers: the losses call a module with running statistics.
        dropout: they draw random numbers.
        features: the part without y is given apart.
        wavy: they are not quadratic, and the solution not linear in x.
        groups: every tensor has a group.
        named: the parameters have names.
        seed: of the constants.
    """

    upper: tuple[tuple[int, ...], ...] = ((2,),)
    lower: tuple[tuple[int, ...], ...] = ((2,),)
    dtype: torch.dtype = torch.float64
    layout: str = "plain"
    tied: bool = False
    data: str = "none"
    own: bool = True
    buffers: bool = False
    dropout: bool = False
    features: bool = False
    wavy: bool = False
    groups: bool = False
    named: bool = False
    seed: int = 0


class Toy(Problem):
    r"""g = u'Au/2 - u'h + w sum sqrt(1 + u^2) and f = \|Pu - h'\|^2/2 + x'Qx/2, u the entries of all lower tensors.

    h is linear in x and has the rows of the batch, normalised and dropped out as the kind says. The eigenvalues of A
    are between 1 and 2. ``spare_x`` and ``spare_y`` are in the losses too, but in no group at first.

    Args:
        kind: what decides it.
        losses: 1 or 2; with one y ascends f - g.
        initial: more upper tensors, where y starts.
        rows: each task has a row of y.
    """

    def __init__(self, kind: Kind, losses: int = 2, *, initial: bool = False, rows: bool = False) -> None:
        random = partial(torch.randn, generator=seeded(kind.seed), dtype=torch.float64)
        self.kind, self.single = kind, losses == 1
        lead = (TASKS,) if rows and kind.data == "tasks" else ()
        self.x = _tensors([random(s) for s in kind.upper], kind)
        self.y = _tensors([0.1 * random((*lead, *s)) for s in kind.lower], kind)
        self.start = [t.detach().clone().requires_grad_() for t in self.y] if initial else []
        self.spare_x = torch.tensor([0.3], dtype=kind.dtype, requires_grad=True)
        self.spare_y = torch.full((*lead, 1), 0.2, dtype=kind.dtype, requires_grad=True)
        d, n = sum(math.prod(s) for s in kind.upper) + 1, sum(math.prod(s) for s in kind.lower) + 1
        n += math.prod(kind.lower[0]) if kind.tied else 0
        root = random(n, n)
        A = torch.eye(n, dtype=torch.float64) + root @ root.T / torch.linalg.matrix_norm(root, 2) ** 2
        constants = (A, random(n, d) / d**0.5, random(ROWS, n), random(n, n) / n**0.5, random(d, d) / d**0.5)
        self.A, self.D, self.data, self.P, self.Q = (t.to(kind.dtype) for t in constants)
        self.scale = (1 + random(ROWS, 1).abs()).to(kind.dtype)
        self.norm = nn.BatchNorm1d(n, affine=False, dtype=kind.dtype)
        self.fails: list[list] = []  # (level, evaluations until then, how)
        self.fired = 0
        index = torch.arange(ROWS)
        if kind.data == "tasks":
            self.tasks = bo.TensorTasks(index.view(TASKS, -1))
        self.objectives = [self._objective(level, index) for level in ("upper", "lower")[:losses]]
        self.added: list[str] = []  # levels of the spare tensors that are in a group, in their order

    losses = property(lambda self: tuple(self.objectives))
    tensors = property(lambda self: [*self.x, *self.start, *self.y, self.spare_x, self.spare_y])
    upper_tensors = property(lambda self: [*self.x, *self.start, *([self.spare_x] * ("upper" in self.added))])
    lower_tensors = property(lambda self: [*self.y, *([self.spare_y] * ("lower" in self.added))])

    @property
    def stateful(self):
        """The objectives that have a position in data."""
        return [o for o in self.objectives if isinstance(o, bo.Objective)]

    def groups(self, level, **first):
        """Return the constructor's argument for a level; the first group may have its own options."""
        tensors = [*self.x, *self.start] if level == "upper" else self.y
        entries = [(f"{level}_{i}", t) for i, t in enumerate(tensors)] if self.kind.named else tensors
        if self.kind.groups:
            return [{"params": [e], **({} if i else first)} for i, e in enumerate(entries)]
        return entries

    def _objective(self, level, index):
        kind = self.kind
        split = {"features": partial(self._features, level)} if kind.features else {}
        loss = partial(self._head, level) if split else getattr(self, level)
        generator = seeded(3 + (level == "lower")) if kind.own else None
        if kind.data in ("list", "one"):
            return bo.Objective(loss, list(index.split(BATCH if kind.data == "list" else ROWS)), **split)
        if kind.data == "loader":
            return bo.Objective(loss, DataLoader(index, BATCH, shuffle=True, generator=generator), **split)
        if kind.data == "terms":
            return bo.FiniteSum(loss, index, BATCH, generator=generator, **split)
        return bo.Objective(loss, **split) if split else loss

    def upper(self, index=None):
        return self._head("upper", self._features("upper", index))

    def lower(self, index=None):
        return self._head("lower", self._features("lower", index))

    def point(self):
        """All entries of x, and of y as often as they are used."""
        again = self.y[:1] if self.kind.tied else []
        spare = (
            self.spare_y if "lower" in self.added else self.spare_y.flatten()[:1]
        )  # its rows are not for the tasks yet
        y = [*self.y, spare, *again]
        return [torch.cat([t.reshape(-1) for t in ts]) for ts in ([*self.x, self.spare_x], y)]

    def _features(self, level, index=None):
        x = torch.cat([t.reshape(-1) for t in (*self.x, self.spare_x)])
        index = torch.arange(ROWS) if index is None else index
        rows = self.data[index] + self.scale[index] * (self.D @ x)
        if self.kind.buffers:
            rows = self.norm(rows)
        if self.kind.dropout:
            rows = F.dropout(rows, 0.3)
        return (rows.tanh() if self.kind.wavy else rows).mean(0) + self.D @ x

    def _head(self, level, h):
        (x, u), wavy = self.point(), self.kind.wavy
        g = u @ (self.A @ u) / 2 - u @ h + (0.5 * (1 + u * u).sqrt().sum() if wavy else 0.0)
        direct = x @ self.Q @ x / 2 + 0.1 * x.sum()
        f = direct - g if self.single else (self.P @ u - 0.5 * h).square().sum() / 2 + direct
        return self._failing(level, g if level == "lower" else f)

    def _failing(self, level, loss):
        for fail in self.fails:
            if fail[0] == level:
                fail[1] -= 1
                if fail[1] == 0:
                    self.fired += 1
                    if fail[2] in FAILURES:
                        raise FAILURES[fail[2]]("no such sample")
                    return NON_FINITE[fail[2]](loss)
        return loss

    # ------------------------------------------------------------------------------------------------ reference

    def reference(self):
        """The exact hypergradient, by Newton's method and dense second derivatives, and the lower solution."""
        start, gradients = values(self.lower_tensors), []
        for batch in self.batches():
            assign(self.lower_tensors, start)
            gradients.append(self._dense(*batch))
            solution = values(self.lower_tensors)
        assign(self.lower_tensors, start)
        return torch.stack(gradients).mean(0), solution

    def rate(self):
        """A step size for the lower problem, and the factor by which a step at least contracts."""
        H = torch.stack([self._derivatives(*batch)[0] for batch in self.batches()])
        spectrum = torch.linalg.eigvalsh(H)
        low, high = float(spectrum.min()), float(spectrum.max()) + (0.5 if self.kind.wavy else 0.0)
        return 2 / (low + high), (high - low) / (high + low)

    def batches(self):
        """All data, of each task."""
        index = torch.arange(ROWS)
        return [(part,) for part in index.view(TASKS, -1)] if self.kind.data == "tasks" else [(index,)]

    def _dense(self, *batch):
        for _ in range(30):
            H, _, slope = self._derivatives(*batch)
            move = torch.linalg.solve(H, slope)
            parts = move.split([t.numel() for t in self.lower_tensors])
            moved = zip(self.lower_tensors, parts, strict=True)
            assign(self.lower_tensors, [t.detach() - part.view(t.shape) for t, part in moved])
            if move.norm() < 1e-15:
                break
        H, C, _ = self._derivatives(*batch)
        split, variables = len(self.upper_tensors), [*self.upper_tensors, *self.lower_tensors]
        slopes = none_to_zeros(torch.autograd.grad(self.upper(*batch), variables, allow_unused=True), variables)
        return flat(slopes[:split]) - C.T @ torch.linalg.solve(H, flat(slopes[split:]))

    def _derivatives(self, *batch):
        """Second derivatives of g in y and in (y, x), and its gradient."""
        variables = [*self.lower_tensors, *self.upper_tensors]
        loss = -self.upper(*batch) if self.single else self.lower(*batch)
        slope = torch.cat([s.reshape(-1) for s in torch.autograd.grad(loss, self.lower_tensors, create_graph=True)])
        rows = [torch.autograd.grad(s, variables, retain_graph=True, allow_unused=True) for s in slope]
        table = torch.stack([flat(none_to_zeros(row, variables)) for row in rows])
        return table[:, : len(slope)], table[:, len(slope) :], slope.detach()


FAILURES = {"raise": KeyError, "interrupt": KeyboardInterrupt}
NON_FINITE = {
    "nan": lambda loss: loss * math.nan,
    "infinite": lambda loss: loss * math.inf,
    "value": lambda loss: loss + math.nan,  # with finite gradients
    "gradient": lambda loss: loss + (0 * loss).sqrt(),  # with a finite value
}


def _tensors(values, kind):
    """Live tensors that hold these values."""
    values = [v.to(kind.dtype) for v in values]
    if kind.layout == "strided":
        return [v.unsqueeze(-1).repeat_interleave(2, -1)[..., 0].requires_grad_() for v in values]
    if kind.layout == "views":
        storage, at, made = torch.cat([v.reshape(-1) for v in values]), 0, []
        for v in values:
            made.append(storage[at : at + v.numel()].view(v.shape).requires_grad_())
            at += v.numel()
        return made
    return [v.clone().requires_grad_() for v in values]

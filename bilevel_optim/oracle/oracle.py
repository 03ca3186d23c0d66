r"""The two losses at one point, with all their derivatives at given values of x and y."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem.objective import Sample
from ..problem.vector import Vector, stack
from ..tracing import is_tracing, span
from . import batched
from .differentiable import (
    FUSED,
    KINKED,
    ROOTS,
    explain_second,
    has,
    kinds_in,
    plain_operations,
    products_of,
    working_unit,
)
from .point import Point, none_to_zeros
from .session import Session

__all__ = ["LowerSystem", "Oracle", "UpperSystem", "local_problem"]

SHARDED = (
    "matrices of second derivatives need lower parameters that are not sharded (DTensor), because they are computed "
    "from full vectors; do not shard y, or use products alone (linear_solver='cg' of AID, variant='matrix_free' of "
    "SVRB)"
)
ROWS = 128  # rows of a Hessian in one pass, whose memory is that many times that of a product
Product = Callable[[Vector, str], Vector]  # of a vector, and the level to differentiate in: "lower", "upper" or "both"
Gradients = Sequence[Tensor | None]


class Oracle(Point):
    r"""Derivatives of an upper loss f(x, y) and a lower loss g(x, y), given as closures over live tensors, at a point.

    An oracle never changes: :meth:`at` returns the oracle of another point. Losses are evaluated on a sample (from
    ``oracle.f.draw()`` or ``oracle.g.draw()``), and the live tensors hold their old values afterwards.

    Args:
        upper: the live upper tensors x.
        lower: the live lower tensors y.
        upper_loss: f, a callable or an `Objective`.
        lower_loss: g, a callable or an `Objective`.
        names: returns names of the upper, then of the lower tensors, for error messages. Default: their indices.
        session: the bookkeeping of the step. Default: a new one.
        lanes: number of separate lower problems if ``lower`` are stacked tensors, one lane for each, and the losses are
            sums over the lanes. An evaluation then counts that many times, and is not averaged over ranks, whose tasks
            differ. Default: None, one problem.

    Attributes:
        x, y: the point; by default the values of the live tensors.
        moved: whether x, and whether y, are other values than those of the live tensors.
        f, g: the objectives.
        weight: number of times that an evaluation counts.
        shared: whether all ranks evaluate the same problem, each on its own data, and results are their means.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
        >>> oracle = Oracle([x], [y], lambda: (y**2).sum(), lambda: (x * y**2).sum())
        >>> elsewhere = oracle.at(lower=Vector([torch.tensor([3.0])]))
        >>> oracle.lower(oracle.g.draw())[1], elsewhere.lower(oracle.g.draw())[1]
        ((tensor([4.]),), (tensor([12.]),))
        >>> with oracle.lower_system(oracle.g.draw()) as system:
        ...     system.hvp(Vector([torch.ones(1)])), system.cross(Vector([torch.ones(1)]))
        ((tensor([4.]),), (tensor([2.]),))
    """

    @contextmanager
    def upper_system(self, sample: Sample) -> Generator[UpperSystem]:
        """Context for value, gradient and Hessian-vector products of f in both variables together.

        The graph is kept inside the block. A product counts as one Hessian-vector and one cross product.
        """
        split, like = len(self.x), Vector((*self.x, *self.y))
        with self.evaluating() as (x, y):
            gradients, loss, variables = self._graph("upper", sample, x, y)
            self.session.note_reached(gradients[:split])
            self.session.require_reached(gradients[split:], self.lower_names)

            def product(v: Vector) -> Vector:
                self.count("hvp")
                self.count("jvp")
                products = self._pulled(gradients, variables, variables, v, like)
                return Vector(self.averaged(none_to_zeros(products, like))[0])

            loss, gradient = self.results("upper_grad", loss, (self._constant(gradients, like), like))
            self.checks.finite("upper_grad", gradient)
            yield UpperSystem(loss, gradient, product)

    @contextmanager
    def lower_system(self, sample: Sample, *, gradient: bool = True) -> Generator[LowerSystem]:
        """Context for second derivatives of g: a graph kept inside the block, or finite differences.

        If only products are needed, pass ``gradient=False``: the gradient is then empty, no lower gradient is counted,
        and the value of g need not be finite.
        """
        if self.session.options.hvp == "finite-difference":
            yield _by_differences(self, sample, gradient)
        elif sample.parts is not None:
            yield _by_parts(self, sample.parts, gradient)
        else:
            with self.evaluating() as (x, y):
                yield self._by_graph(sample, x, y, gradient)

    def system_sample(self) -> Sample:
        """Return the next sample of g for one `lower_system`, marked ``once`` if products do not evaluate it again."""
        session = self.session
        alone = session.options.hvp == "exact" and session.found.fused is False and session.buffers_constant
        return self.g.draw(once=alone and self.g.accumulate == 1)  # products evaluate the parts again

    def kept_system(self, sample: Sample) -> LowerSystem:
        """Return second derivatives of g from a graph that lasts as long as the result.

        A graph over live leaves saves the leaves themselves, so they get the same values again while it is used.
        """
        if sample.parts is not None:
            return _by_parts(self, sample.parts, True)
        with self.evaluating() as (x, y):
            return self._by_graph(sample, x, y, True, kept=True)

    def lower_matrices(self, sample: Sample) -> tuple[Vector, Tensor, Tensor]:
        r"""Return the gradient of g in y, and :math:`\nabla^2_{yy} g` and :math:`\nabla^2_{xy} g` as matrices.

        Their shapes are (lanes, p, p) and (lanes, d, p), with one lane if y is not stacked; x is stacked too if y is.
        """
        split = len(self.x)
        with self.lower_system(sample) as system:
            products = system._all_products("both", sum(map(Tensor.numel, self.y)))
        self.count("jvp", sum(len(part[0]) for part in products))
        cross = _matrix(self, [part[:split] for part in products]).permute(1, 2, 0)
        hessian = _matrix(self, [part[split:] for part in products]).transpose(0, 1)
        cross, hessian = self.averaged(cross, hessian)
        self.checks.finite("hvp", [hessian])
        self.checks.finite("jvp", [cross])
        return system.gradient, hessian, cross

    # ------------------------------------------------------------------------------------------------------- graphs

    def _graph(self, level: str, sample: Sample, x: Vector, y: Vector) -> tuple[Gradients, Tensor, Vector]:
        """Return the gradient of g in y, or of f in both, with a graph; the loss; the variables (full if sharded)."""
        found, variables = self.session.found, y if level == "lower" else Vector((*x, *y))
        try:
            with plain_operations() if found.fused and not is_tracing() else nullcontext():
                loss = self.evaluated(level, sample, x, y)
                if not found.fused and (found.fused is None or level == "upper"):
                    found.fused = has(loss, FUSED)
                    if found.fused:
                        return self._graph(level, sample, x, y)
                    found.roots = kinds_in(loss, ROOTS) or found.roots
                if found.roots:
                    self.checks.roots = found.roots
                if self.sharded:
                    variables = self.session.gathered.full(variables)
                gradients = self.differentiate(loss, variables, graph=True)
                if self.sharded:
                    self.session.gathered.require_kept()
        except (RuntimeError, NotImplementedError) as error:
            explain_second(error)
            raise
        if level == "lower":
            self.session.require_reached(gradients, self.lower_names)
        return gradients, loss, variables

    def _by_graph(
        self, sample: Sample, live_x: Vector, live_y: Vector, gradient: bool, *, kept: bool = False
    ) -> LowerSystem:
        """Return the system of a gradient with a graph; if it is ``kept``, the live tensors get their values again."""
        session, found = self.session, Vector(())
        gradients, loss, y = self._graph("lower", sample, live_x, live_y)
        x = session.gathered.full(live_x) if self.sharded else live_x
        variables, like = _by_level(x, y), _by_level(self.x, self.y)
        alone = session.options.ranks.alone

        def own(v: Vector, wrt: str, stacked: bool = False) -> Vector:
            products = self._pulled(gradients, variables[wrt], y, v, like[wrt], stacked=stacked)
            if wrt != "lower":
                session.note_reached(products[: len(x)])
            return none_to_zeros(products, [t.expand(len(v[0]), *t.shape) for t in like[wrt]] if stacked else like[wrt])

        def product(v: Vector, wrt: str) -> Vector:
            found = own(v, wrt)
            return found if alone else Vector(self.averaged(found)[0])

        if gradient:  # a compiled step leaves out an unused loss
            _, found = self.results("lower_grad", loss, (self._constant(gradients, self.y), self.y))
        return LowerSystem(self, found, product, own, placed=kept)

    def _pulled(
        self, gradients: Gradients, variables: Vector, at: Vector, v: Vector, like: Vector, *, stacked: bool = False
    ) -> Gradients:
        """Return derivatives of <gradients, v> in the variables, None where there are none, sharded as ``like``.

        Args:
            gradients: with a graph.
            variables: tensors to differentiate in.
            at: the variables of the gradients.
            v: a vector like ``at``, or several, stacked.
            like: the parameters of the variables.
            stacked: whether v is stacked.
        """
        # A constant component has no graph, and contributes nothing to any product.
        parts = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]
        if not parts:
            return [None] * len(variables)
        session = self.session
        if self.sharded:
            v = session.gathered.gathered(v, at)
        try:
            with plain_operations() if session.found.fused and not is_tracing() else nullcontext():
                products = torch.autograd.grad(
                    [g for _, g in parts],
                    list(variables),
                    [v[i] for i, _ in parts],
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=stacked,
                )
        except (RuntimeError, NotImplementedError) as error:
            explain_second(error)
            raise
        if self.sharded:
            return session.gathered.scattered(products, like)
        return self.apart(products) if session.hooked else products

    def _constant(self, gradients: Gradients, like: Vector) -> Gradients:
        """Return gradients without their graphs, sharded as the parameters."""
        own = self.session.gathered.scattered(gradients, like) if self.sharded else gradients
        return [None if t is None else t.detach() for t in own]


class LowerSystem:
    r"""First and second derivatives of g at one point.

    Args:
        oracle: the losses at the point; counts and checks the products.
        gradient: the gradient of g in y.
        product: products with a vector, in y (``"lower"``), x (``"upper"``) or both.
        own: the same for this process alone, perhaps with stacked vectors. Default: None, only ``product`` is known.
        placed: whether the live tensors must hold the point's values for a product. Default: False.
    """

    def __init__(
        self,
        oracle: Oracle,
        gradient: Vector,
        product: Product,
        own: Callable[[Vector, str, bool], Vector] | None = None,
        *,
        placed: bool = False,
    ) -> None:
        self.gradient, self._oracle, self._product, self._own, self._placed = gradient, oracle, product, own, placed

    def hvp(self, v: Vector) -> Vector:
        r"""Return :math:`\nabla^2_{yy} g\, v`."""
        self._oracle.count("hvp")
        if not self._placed:
            return self._product(v, "lower")
        with self._again():
            return self._product(v, "lower")

    def cross(self, v: Vector) -> Vector:
        r"""Return :math:`\nabla^2_{xy} g\, v`, shaped like x."""
        return self._in_x(v, "upper")

    def both(self, v: Vector) -> tuple[Vector, Vector]:
        """Return ``(cross(v), hvp(v))`` from one pass."""
        self._oracle.count("hvp")
        result, split = self._in_x(v, "both"), len(self._oracle.x)
        return Vector(result[:split]), Vector(result[split:])

    def _in_x(self, v: Vector, wrt: str) -> Vector:
        oracle = self._oracle
        oracle.count("jvp")
        with span("cross product"), self._again() if self._placed else nullcontext():
            result = self._product(v, wrt)
        oracle.checks.finite("jvp", result)
        return result

    @contextmanager
    def _again(self) -> Generator[None]:
        """Place the point's values; checkpointed parts run again, and may change module buffers."""
        with self._oracle.placed(), self._oracle.session.buffers_kept():
            yield

    def hessian(self) -> Tensor:
        r"""Return :math:`\nabla^2_{yy} g` as a matrix for each lane, with one lane if y is not stacked."""
        parts = self._all_products("lower", ROWS)
        matrix: Tensor = self._oracle.averaged(_matrix(self._oracle, parts).transpose(0, 1))[0]
        return matrix

    def _all_products(self, wrt: str, at_once: int) -> list[Vector]:
        """Return products with the unit vectors of y, the same in every lane, ``at_once`` stacked in one pass."""
        oracle, own = self._oracle, self._own
        n = sum(map(Tensor.numel, oracle.y)) // (oracle.lanes or 1)
        if oracle.sharded:
            raise ValueError(SHARDED)

        def together(part: slice) -> list[Vector]:
            assert own is not None
            steps = range(part.start, part.stop, at_once)
            return [own(_basis(oracle, slice(i, min(i + at_once, part.stop))), wrt, True) for i in steps]

        def alone(i: int) -> list[Vector]:
            unit = _basis(oracle, slice(i, i + 1)).lane(0)
            return [stack([self._product(unit, wrt) if own is None else own(unit, wrt, False)])]

        with oracle.placed() if self._placed else nullcontext():
            found = batched.run(oracle.session, n, together, alone, possible=own is not None)
        oracle.count("hvp", n)
        return [own for part in found for own in part]


class UpperSystem(NamedTuple):
    """Value, gradient and Hessian-vector products of f in (x, y) together at one point.

    Vectors have the tensors of x, then those of y.
    """

    loss: Tensor
    gradient: Vector
    product: Callable[[Vector], Vector]


def local_problem(oracle: Oracle, session: Session | None = None) -> Oracle:
    """Return the oracle of a problem of this process alone, as other ranks have their own or do not wait.

    ``session`` is its bookkeeping, by default the same.
    """
    other = oracle.at()
    other.shared = False
    if session is not None:
        other.session, other.checks, other._features = session, session.checks, {}
    return other


def _by_level(x: Vector, y: Vector) -> dict[str, Vector]:
    return {"lower": y, "upper": x, "both": Vector((*x, *y))}


def _by_parts(oracle: Oracle, parts: Sequence[Sample], gradient: bool) -> LowerSystem:
    """Return the system of the mean over several samples; each product builds their graphs again, one by one."""
    own = local_problem(oracle)
    own.weight = 0  # the parts together are one product

    def mean(of: Callable[[LowerSystem], Vector]) -> Vector:
        total: Vector | None = None
        for part in parts:
            with own.lower_system(part) as system:
                found = of(system)
            total = found if total is None else total + found
        assert total is not None
        return Vector(oracle.averaged(total * (1 / len(parts)))[0])

    def product(v: Vector, wrt: str) -> Vector:
        return mean(lambda system: system._product(v, wrt))

    if not gradient:
        return LowerSystem(oracle, Vector(()), product)
    oracle.count("lower_grad")
    return LowerSystem(oracle, mean(lambda system: system.gradient), product)


def _by_differences(oracle: Oracle, sample: Sample, gradient: bool) -> LowerSystem:
    """Return the system with products from central differences of gradients, all on the same sample."""
    y, session, both = oracle.y, oracle.session, (*oracle.x, *oracle.y)

    def slope(at: Vector, wrt: str) -> Vector:
        point = oracle.at(lower=at)
        with point.evaluating() as (live_x, live_y):
            variables = _by_level(live_x, live_y)[wrt]
            loss, gradients = point.slopes("lower", sample, live_x, live_y, variables, frozen=wrt == "lower")
            if session.found.kinked is None and loss.requires_grad:
                session.found.kinked, session.found.products = has(loss, KINKED), products_of(loss)
        if wrt == "lower":
            session.require_reached(gradients, oracle.lower_names)
        else:
            session.note_reached(gradients[: len(oracle.x)])
        like = _by_level(oracle.x, y)[wrt]
        loss, result = oracle.averaged(loss.detach(), none_to_zeros(gradients, like))
        oracle.checks.loss(loss)
        return Vector(result)

    def product(v: Vector, wrt: str) -> Vector:
        # Truncation eps^2 balances round-off u / eps at eps ~ u^(1/3), in units of the size of y along v. Half of that
        # is better on average: too long a step costs more than too short a one.
        length = v.norm().clamp_min(torch.finfo(torch.float32).tiny)
        epsilon = 0.5 * math.pow(working_unit(both), 1 / 3) * (1 + y.norm()) / length
        shift = v.times(epsilon)
        return (slope(y + shift, wrt) - slope(y - shift, wrt)).times(0.5 / epsilon)

    if not gradient:
        return LowerSystem(oracle, Vector(()), product)
    oracle.count("lower_grad")
    system = LowerSystem(oracle, slope(y, "lower"), product)
    oracle.checks.finite("lower_grad", system.gradient)
    if session.found.kinked:
        oracle.checks.alert(
            "kinks",
            "the lower loss has kinks (ReLU, max-pooling and the like), across which differences of its gradient say "
            "little of its second derivative: products can be wrong by any factor. Use hvp='exact', or smooth "
            "activations (softplus, GELU, tanh)",
            torch.ones((), dtype=torch.bool, device=oracle.device),
        )
    # A longer step would not help: its truncation error is larger than the rounding error.
    if working_unit(both, session.found.products) > working_unit(both):
        oracle.checks.alert(
            "rounded products",
            "the lower loss contains convolutions or products of matrices that torch computes in less than single "
            "precision (TF32), so differences of its gradient can be wrong by a third. Set "
            "torch.backends.cudnn.allow_tf32 = False (and torch.set_float32_matmul_precision('highest')), or use "
            "hvp='exact'",
            torch.ones((), dtype=torch.bool, device=oracle.device),
        )
    return system


def _matrix(oracle: Oracle, parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Join products with the unit vectors of y to a matrix for each lane, of shape (rows, lanes, columns)."""
    columns = [_joined(own) for own in zip(*parts, strict=True)]
    return _joined([t.reshape(len(t), oracle.lanes or 1, -1) for t in columns], -1)


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)  # no copy of a large matrix


def _basis(oracle: Oracle, part: slice) -> Vector:
    """Return stacked unit vectors of the space of y, the same in every lane."""
    lanes = oracle.lanes or 1
    rows = torch.arange(part.start, part.stop, device=oracle.device)
    parts, offset = [], 0
    for t in oracle.y:
        n = t.numel() // lanes
        unit = (rows.unsqueeze(1) == torch.arange(offset, offset + n, device=rows.device)).to(t.dtype)
        parts.append(unit.unsqueeze(1).expand(-1, lanes, -1).reshape(len(rows), *t.shape))
        offset += n
    return Vector(parts)

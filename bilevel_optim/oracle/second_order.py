r"""Second derivatives of the losses at one point: products, and matrices where these are small."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem.objective import Sample
from ..problem.profiling import span
from ..problem.vector import Vector, stack
from ..tracing import is_tracing
from . import batched
from .differentiable import (
    explain_second,
    has_fused,
    has_kinks,
    plain_operations,
    products_of,
    roots_in,
    working_unit,
)
from .point import Point, none_to_zeros

__all__ = ["LowerSystem", "UpperSystem", "kept_system", "lower_matrices", "lower_system", "pulled", "system_sample"]


class LowerSystem(NamedTuple):
    r"""First and second derivatives of g at one point.

    ``hvp(v)`` is :math:`\nabla^2_{yy} g\, v`; ``cross(v)`` is :math:`\nabla^2_{xy} g\, v`, shaped like x; ``both(v)``
    is ``(cross(v), hvp(v))`` from one pass; ``hessian()`` is :math:`\nabla^2_{yy} g` as a matrix for each lane, with
    one lane if y is not stacked.
    """

    gradient: Vector
    hvp: Callable[[Vector], Vector]
    cross: Callable[[Vector], Vector]
    both: Callable[[Vector], tuple[Vector, Vector]]
    hessian: Callable[[], Tensor]


class UpperSystem(NamedTuple):
    """Value, gradient and Hessian-vector products of f in (x, y) together at one point.

    Vectors have the tensors of x, then those of y.
    """

    loss: Tensor
    gradient: Vector
    product: Callable[[Vector], Vector]


SHARDED = (
    "matrices of second derivatives need lower parameters that are not sharded (DTensor), because they are computed "
    "from full vectors; do not shard y, or use products alone (linear_solver='cg' of AID, variant='matrix_free' of "
    "SVRB)"
)
ROWS = 128  # rows of a Hessian in one pass, whose memory is that many times that of a product
Product = Callable[[Vector, str], Vector]  # of a vector, and the level to differentiate in: "lower", "upper" or "both"


@contextmanager
def upper_system(oracle: Point, sample: Sample) -> Generator[UpperSystem]:
    """See `Oracle.upper_system`."""
    session, split, like = oracle.session, len(oracle.x), Vector((*oracle.x, *oracle.y))
    with oracle.evaluating() as (x, y):
        gradients, loss, variables = _graph(oracle, "upper", sample, x, y, Vector((*x, *y)))
        session.note_reached(gradients[:split])
        session.require_reached(gradients[split:], oracle.lower_names)
        oracle.count("upper_grad")

        def product(v: Vector) -> Vector:
            oracle.count("hvp")
            oracle.count("jvp")
            return Vector(oracle.averaged(none_to_zeros(_products(oracle, gradients, variables, v, like), like))[0])

        loss, gradient = oracle.averaged(loss.detach(), none_to_zeros(_own(oracle, gradients, like), like).detach())
        oracle.checks.scalar("loss", loss)
        oracle.checks.finite("upper_grad", gradient)
        yield UpperSystem(loss, gradient, product)


@contextmanager
def lower_system(oracle: Point, sample: Sample, *, gradient: bool = True) -> Generator[LowerSystem]:
    """See `Oracle.lower_system`."""
    if oracle.session.options.hvp == "finite-difference":
        yield _by_differences(oracle, sample, gradient)
    elif sample.parts is not None:
        yield _by_parts(oracle, sample.parts, gradient)
    elif oracle.session.options.graphs_outlast:  # Dynamo is slow to trace a solver within the block
        with oracle.evaluating() as (x, y):
            gradients, loss, y = _lower_gradient(oracle, sample, x, y)
        yield _by_graph(oracle, gradients, loss, x, y, gradient)
    else:
        with oracle.evaluating() as (x, y):
            gradients, loss, y = _lower_gradient(oracle, sample, x, y)
            yield _by_graph(oracle, gradients, loss, x, y, gradient)


def system_sample(oracle: Point) -> Sample:
    """Return the next sample of g for a single `lower_system`, marked ``once`` if products do not evaluate it again."""
    session = oracle.session
    alone = session.options.hvp == "exact" and session.found.fused is False and session.buffers.constant
    return oracle.g.draw(once=alone)


def kept_system(oracle: Point, sample: Sample) -> LowerSystem:
    """See `Oracle.kept_system`.

    A graph over live leaves saves the leaves themselves, so they get the same values again while it is used.
    """
    if sample.parts is not None:
        return _by_parts(oracle, sample.parts, True)
    with oracle.evaluating() as (x, y):
        gradients, loss, y = _lower_gradient(oracle, sample, x, y)
        system = _by_graph(oracle, gradients, loss, x, y, True)

    def back(function: Callable[[Vector], Vector]) -> Callable[[Vector], Vector]:
        def placed(v: Vector) -> Vector:
            with oracle.placed():
                return function(v)

        return placed

    def both(v: Vector) -> tuple[Vector, Vector]:
        with oracle.placed():
            return system.both(v)

    def hessian() -> Tensor:
        with oracle.placed():
            return system.hessian()

    return LowerSystem(system.gradient, back(system.hvp), back(system.cross), both, hessian)


def _lower_gradient(
    oracle: Point, sample: Sample, x: Vector, y: Vector
) -> tuple[Sequence[Tensor | None], Tensor, Vector]:
    """Return the gradient of g in y, with a graph, at the placed point; g; and the variables y (full if sharded)."""
    gradients, loss, y = _graph(oracle, "lower", sample, x, y, y)
    oracle.session.require_reached(gradients, oracle.lower_names)
    return gradients, loss.detach(), y


def _graph(
    oracle: Point, level: str, sample: Sample, x: Vector, y: Vector, variables: Vector
) -> tuple[Sequence[Tensor | None], Tensor, Vector]:
    """Return the gradient of a loss in variables, with a graph to differentiate again; the loss; the variables."""
    found = oracle.session.found
    try:
        with plain_operations() if found.fused and not is_tracing() else nullcontext():
            loss = oracle.evaluated(level, sample, x, y)
            if not found.fused and (found.fused is None or level == "upper"):
                found.fused = has_fused(loss)
                if found.fused:
                    return _graph(oracle, level, sample, x, y, variables)
                found.roots = roots_in(loss) or found.roots
            if found.roots:
                oracle.checks.roots = found.roots
            if oracle.sharded:
                variables = oracle.session.gathered.full(variables)
            gradients = oracle.differentiate(loss, variables, graph=True)
            if oracle.sharded:
                oracle.session.gathered.require_kept()
            return gradients, loss, variables
    except (RuntimeError, NotImplementedError) as error:
        explain_second(error)
        raise


def pulled(
    gradients: Sequence[Tensor | None],
    variables: Vector,
    v: Sequence[Tensor],
    *,
    plain: bool = False,
    batched: bool = False,
) -> Sequence[Tensor | None]:
    """Return derivatives of <gradients, v> in the variables (None where there are none); v may be stacked."""
    # A constant component has no graph, and contributes nothing to any product.
    parts = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]
    if not parts:
        return [None] * len(variables)
    try:
        with plain_operations() if plain and not is_tracing() else nullcontext():
            return torch.autograd.grad(
                [g for _, g in parts],
                list(variables),
                [v[i] for i, _ in parts],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
    except (RuntimeError, NotImplementedError) as error:
        explain_second(error)
        raise


def _by_graph(
    oracle: Point, gradients: Sequence[Tensor | None], loss: Tensor, x: Vector, y: Vector, gradient: bool
) -> LowerSystem:
    """Return the system of a gradient that has a graph."""
    session = oracle.session
    x = session.gathered.full(x) if oracle.sharded else x

    def product(v: Vector, wrt: str) -> Vector:
        if wrt == "lower":
            variables, like = y, oracle.y
        else:
            variables, like = _of_levels(wrt, x, y), _of_levels(wrt, oracle.x, oracle.y)
        products = _products(oracle, gradients, variables, v, like, at=y)
        if wrt != "lower":
            session.note_reached(products[: len(x)])
        return Vector(oracle.averaged(none_to_zeros(products, like))[0])

    def rows(basis: Vector) -> Vector:
        plain = bool(session.found.fused)
        return _stacked(pulled(gradients, y, basis, plain=plain, batched=True), oracle.y, len(basis[0]))

    if not gradient:
        return _counted(oracle, Vector(()), product, rows)  # a compiled step leaves out an unused loss
    own = none_to_zeros(_own(oracle, gradients, oracle.y), oracle.y).detach()
    loss, own = oracle.averaged(loss, own)
    oracle.checks.scalar("loss", loss)
    oracle.count("lower_grad")
    return _counted(oracle, own, product, rows)


def _of_levels(wrt: str, x: Vector, y: Vector) -> Vector:
    return y if wrt == "lower" else x if wrt == "upper" else Vector((*x, *y))


def _products(
    oracle: Point,
    gradients: Sequence[Tensor | None],
    variables: Vector,
    v: Vector,
    like: Vector,
    *,
    at: Vector | None = None,
) -> Sequence[Tensor | None]:
    """Return derivatives of <gradients, v>, sharded as the parameters; ``at``: the variables of the gradients."""
    plain = bool(oracle.session.found.fused)
    if not oracle.sharded:
        return pulled(gradients, variables, v, plain=plain)
    v = oracle.session.gathered.gathered(v, variables if at is None else at)
    return _own(oracle, pulled(gradients, variables, v, plain=plain), like)


def _own(oracle: Point, results: Sequence[Tensor | None], like: Vector) -> Sequence[Tensor | None]:
    return oracle.session.gathered.scattered(results, like) if oracle.sharded else results


def _by_parts(oracle: Point, parts: Sequence[Sample], gradient: bool) -> LowerSystem:
    """Return the system of the mean over several samples; each product builds their graphs again, one by one."""
    own = oracle.at()  # for this process alone, without counts: the parts together are one product
    own.shared, own.weight = False, 0

    def mean(of: Callable[[LowerSystem], Sequence[Tensor]]) -> Vector:
        total: Vector | None = None
        for part in parts:
            with lower_system(own, part) as system:
                found = Vector(of(system))
            total = found if total is None else total + found
        assert total is not None
        return Vector(oracle.averaged(total * (1 / len(parts)))[0])

    products: dict[str, Callable[[LowerSystem, Vector], Sequence[Tensor]]] = {
        "lower": lambda system, v: system.hvp(v),
        "upper": lambda system, v: system.cross(v),
        "both": lambda system, v: [t for part in system.both(v) for t in part],
    }

    def product(v: Vector, wrt: str) -> Vector:
        return mean(lambda system: products[wrt](system, v))

    if not gradient:
        return _counted(oracle, Vector(()), product)
    oracle.count("lower_grad")
    return _counted(oracle, mean(lambda system: system.gradient), product)


def _by_differences(oracle: Point, sample: Sample, gradient: bool) -> LowerSystem:
    """Return the system with products from central differences of gradients, all on the same sample."""
    y, session, both = oracle.y, oracle.session, (*oracle.x, *oracle.y)

    def slope(at: Vector, wrt: str) -> Vector:
        point = oracle.at(lower=at)
        with point.evaluating() as (live_x, live_y):
            variables = _of_levels(wrt, live_x, live_y)
            loss, gradients = point.slopes("lower", sample, live_x, live_y, variables, frozen=wrt == "lower")
            if session.found.kinked is None and loss.requires_grad:
                session.found.kinked, session.found.products = has_kinks(loss), products_of(loss)
        if wrt == "lower":
            session.require_reached(gradients, oracle.lower_names)
        else:
            session.note_reached(gradients[: len(oracle.x)])
        like = _of_levels(wrt, oracle.x, y)
        loss, result = oracle.averaged(loss.detach(), none_to_zeros(gradients, like))
        oracle.checks.scalar("loss", loss)
        return Vector(result)

    def product(v: Vector, wrt: str) -> Vector:
        # Truncation eps^2 balances round-off u / eps at eps ~ u^(1/3), in units of the size of y along v. Half of that
        # is better on average: too long a step costs more than too short a one.
        length = v.norm().clamp_min(torch.finfo(torch.float32).tiny)
        epsilon = 0.5 * math.pow(working_unit(both), 1 / 3) * (1 + y.norm()) / length
        shift = v.times(epsilon)
        return (slope(y + shift, wrt) - slope(y - shift, wrt)).times(0.5 / epsilon)

    if not gradient:
        return _counted(oracle, Vector(()), product)
    oracle.count("lower_grad")
    system = _counted(oracle, slope(y, "lower"), product)
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


def _counted(
    oracle: Point, gradient: Vector, product: Product, rows: Callable[[Vector], Vector] | None = None
) -> LowerSystem:
    """Return the system, with counted and checked products; ``rows``: products with stacked vectors at once."""
    split = len(oracle.x)

    def hvp(v: Vector) -> Vector:
        oracle.count("hvp")
        return product(v, "lower")

    def cross(v: Vector) -> Vector:
        oracle.count("jvp")
        with span("cross product"):
            result = product(v, "upper")
        oracle.checks.finite("jvp", result)
        return result

    def both(v: Vector) -> tuple[Vector, Vector]:
        oracle.count("hvp")
        oracle.count("jvp")
        with span("cross product"):
            result = product(v, "both")
        oracle.checks.finite("jvp", result)
        return Vector(result[:split]), Vector(result[split:])

    def hessian() -> Tensor:
        lanes = oracle.lanes or 1
        sizes = [t.numel() // lanes for t in oracle.y]
        n = sum(sizes)
        if oracle.sharded:
            raise ValueError(SHARDED)

        def together(part: slice) -> list[Vector]:
            assert rows is not None
            steps = range(part.start, part.stop, ROWS)
            return [rows(_basis(oracle, sizes, slice(i, min(i + ROWS, part.stop)))) for i in steps]

        def alone(i: int) -> list[Vector]:
            return [stack([product(_basis(oracle, sizes, slice(i, i + 1)).lane(0), "lower")])]

        parts = [
            own for part in batched.run(oracle.session, n, together, alone, possible=rows is not None) for own in part
        ]
        oracle.count("hvp", n)
        matrix: Tensor = oracle.averaged(_matrix(parts, n, lanes).transpose(0, 1))[0]
        return matrix

    return LowerSystem(gradient, hvp, cross, both, hessian)


def _stacked(products: Sequence[Tensor | None], like: Sequence[Tensor], n: int) -> Vector:
    """Return products with n stacked vectors, with zeros for missing ones."""
    return Vector(t.new_zeros(n, *t.shape) if p is None else p for p, t in zip(products, like, strict=True))


def _matrix(parts: Sequence[Vector], n: int, lanes: int) -> Tensor:
    """Join rows of a matrix for each lane, to shape (n, lanes, columns)."""
    return _joined([_joined([part[i] for part in parts]).reshape(n, lanes, -1) for i in range(len(parts[0]))], -1)


def lower_matrices(oracle: Point, sample: Sample) -> tuple[Vector, Tensor, Tensor]:
    """See `Oracle.lower_matrices`."""
    lanes, split = oracle.lanes or 1, len(oracle.x)
    sizes = [t.numel() // lanes for t in oracle.y]
    like = Vector((*oracle.x, *oracle.y))
    if oracle.session.options.hvp == "finite-difference":
        with lower_system(oracle, sample) as system:
            gradient = system.gradient
            pairs = [system.both(_basis(oracle, sizes, slice(i, i + 1)).lane(0)) for i in range(sum(sizes))]
            products = [stack([Vector((*c, *h))]) for c, h in pairs]
    else:
        with oracle.evaluating() as (x, y):
            if oracle.sharded:
                raise ValueError(SHARDED)
            gradients, loss, _ = _lower_gradient(oracle, sample, x, y)
            variables = Vector((*x, *y))
            loss, gradient = oracle.averaged(loss, none_to_zeros(gradients, oracle.y).detach())
            oracle.checks.scalar("loss", loss)

            def together(part: slice) -> Vector:
                basis = _basis(oracle, sizes, part)
                found = pulled(gradients, variables, basis, batched=True)
                oracle.session.note_reached(found[:split])
                return _stacked(found, like, len(basis[0]))

            def alone(i: int) -> Vector:
                found = pulled(gradients, variables, _basis(oracle, sizes, slice(i, i + 1)).lane(0))
                oracle.session.note_reached(found[:split])
                return stack([none_to_zeros(found, like)])

            products = batched.run(oracle.session, sum(sizes), together, alone)
        oracle.count("lower_grad")
        oracle.count("hvp", sum(sizes))
        oracle.count("jvp", sum(sizes))
    cross = _matrix([Vector(part[:split]) for part in products], sum(sizes), lanes).permute(1, 2, 0)
    hessian = _matrix([Vector(part[split:]) for part in products], sum(sizes), lanes).transpose(0, 1)
    cross, hessian = oracle.averaged(cross, hessian)
    oracle.checks.finite("hvp", [hessian])
    oracle.checks.finite("jvp", [cross])
    return gradient, hessian, cross


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)  # no copy of a large matrix


def _basis(oracle: Point, sizes: Sequence[int], part: slice) -> Vector:
    """Return stacked unit vectors of the space of y, the same in every lane."""
    lanes = oracle.lanes or 1
    rows = torch.arange(part.start, part.stop, device=oracle.device)
    parts, offset = [], 0
    for t, n in zip(oracle.y, sizes, strict=True):
        unit = (rows.unsqueeze(1) == torch.arange(offset, offset + n, device=rows.device)).to(t.dtype)
        parts.append(unit.unsqueeze(1).expand(-1, lanes, -1).reshape(len(rows), *t.shape))
        offset += n
    return Vector(parts)

"""The only code that evaluates a user's loss: derivatives of f and g at a given point, singly or for stacked copies.

An `Oracle` is bound to the live parameters and to the two objectives of one step. It counts what it evaluates, averages
over a process group, and queues what has to be checked at the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..problem.objective import Objective, Sample
from ..problem.vector import Vector, is_sharded, stack
from .checks import Checks
from .substitution import Buffers, placed, twice_differentiable, uses_weight_norm

__all__ = ["COUNTERS", "LowerSystem", "Oracle", "Session", "UpperSystem"]

COUNTERS = ("upper_grad", "lower_grad", "hvp", "jvp", "loss")


@dataclass
class Session:
    """Options of the oracles of one optimizer, and what they keep from step to step."""

    vectorize: bool | int = True
    hvp: str = "exact"
    process_group: Any = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    weight_norm: bool | None = None  # the lower loss contains fused weight normalisation
    buffers: Buffers = field(default_factory=Buffers)
    fallback: str | None = None  # why the loop runs although vmap was asked for
    vmapped: bool = False  # vmap is known to work on these losses
    vmapped_tasks: bool = False  # the same, over tasks
    redirected: set[str] = field(default_factory=set)  # losses known to read y where torch sees it
    reaches_lower: bool = False  # the lower loss is known to depend on every lower parameter
    reaches_upper: bool = False  # some loss is known to depend on some upper parameter
    features_checked: frozenset[str] = frozenset()  # levels whose features are known not to depend on y


class LowerSystem(NamedTuple):
    r"""First and second derivatives of g at one point, valid inside the block that made it.

    ``hvp(v)`` is :math:`\nabla^2_{yy} g\, v`; ``cross(v)`` is :math:`\nabla^2_{xy} g\, v`, shaped like x; ``both(v)``
    is ``(cross(v), hvp(v))`` from one pass.
    """

    gradient: Vector
    hvp: Callable[[Vector], Vector]
    cross: Callable[[Vector], Vector]
    both: Callable[[Vector], tuple[Vector, Vector]]


class UpperSystem(NamedTuple):
    """Value, gradient and Hessian-vector products of f in (x, y) together at one point, inside the block that made it.

    Vectors have the tensors of x, then those of y.
    """

    loss: Tensor
    gradient: Vector
    product: Callable[[Vector], Vector]


class Oracle:
    r"""Derivatives of an upper loss f(x, y) and a lower loss g(x, y), given as closures over live tensors.

    Everything is evaluated on a `Sample` (from ``oracle.f.draw()`` or ``oracle.g.draw()``) at the live values, or
    inside ``with oracle.at(x, y)`` at others.

    Args:
        upper: the live upper tensors x.
        lower: the live lower tensors y.
        upper_loss: f, a callable or an `Objective`.
        lower_loss: g, a callable or an `Objective`.
        names: names of the upper, then of the lower tensors, for error messages. Default: their indices.
        session: options, counters and memory shared by the steps of an optimizer. Default: fresh ones.
        lanes: number of separate lower problems if ``lower`` are stacked tensors, one lane for each, and the losses are
            sums over the lanes; an evaluation counts that many times, and is not averaged over ranks, whose tasks
            differ. Default: None, one problem.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
        >>> oracle = Oracle([x], [y], lambda: (y**2).sum(), lambda: (x * y**2).sum())
        >>> with oracle.lower_system(oracle.g.draw()) as system:
        ...     system.hvp(Vector([torch.ones(1)])), system.cross(Vector([torch.ones(1)]))
        ((tensor([4.]),), (tensor([2.]),))
    """

    def __init__(
        self,
        upper: Iterable[Tensor],
        lower: Iterable[Tensor],
        upper_loss: Objective | Callable[..., Tensor],
        lower_loss: Objective | Callable[..., Tensor],
        *,
        names: Sequence[str] | None = None,
        session: Session | None = None,
        lanes: int | None = None,
    ) -> None:
        self.lanes = lanes
        self.x, self.y = Vector(upper), Vector(lower)
        self.f = upper_loss if isinstance(upper_loss, Objective) else Objective(upper_loss)
        self.g = lower_loss if isinstance(lower_loss, Objective) else Objective(lower_loss)
        self.session = session or Session()
        self.checks = Checks()
        self.device = self.y[0].device
        self.sharded = any(map(is_sharded, (*self.x, *self.y)))
        self.buffers_skipped = False  # some module would have updated buffers at a point that is not the live one
        self._point: object = None  # stands for the values that the upper tensors have
        self._kept: dict[str, tuple[Sample, object, Any]] = {}  # level -> (features' sample, point, features)
        self.f.begin()
        self.g.begin()
        self.names = names or [f"{level} {i}" for level, ts in zip(("upper", "lower"), (self.x, self.y), strict=True)
                                for i in range(len(ts))]  # fmt: skip
        if not self.session.reaches_upper:
            for tensor, name in zip((*self.x, *self.y), self.names, strict=True):
                if tensor.device != self.device:
                    raise ValueError(
                        f"all parameters must be on one device, but parameter {name} is on {tensor.device} and "
                        f"parameter {self.names[len(self.x)]} is on {self.device}"
                    )

    def count(self, oracle: str, times: int = 1) -> None:
        """Add to the counters."""
        self.session.counts[oracle] += times * (self.lanes or 1)

    @contextmanager
    def at(self, upper: Sequence[Tensor] | None = None, lower: Sequence[Tensor] | None = None) -> Generator[None]:
        """Let the live tensors hold other values inside the block."""
        point = self._point
        if upper is not None:
            self._point = object()
        try:
            with placed(self.x, upper), placed(self.y, lower):
                yield
        finally:
            self._point = point

    # ------------------------------------------------------------------------------------------------ first order

    def upper(self, sample: Sample) -> tuple[Tensor, Vector, Vector]:
        """Value of f, its gradient in x and its gradient in y, from one backward pass."""
        with self.buffers_kept():
            loss = self.dependent("upper", self.value("upper", sample), self.y)
            gradients = self.differentiate(loss, (*self.x, *self.y))
        if all(gradient is None for gradient in gradients):
            raise ValueError(_INDEPENDENT.format(level="upper"))
        split = len(self.x)
        self.note_reached(gradients[:split])
        self.count("upper_grad")
        loss, grad_x, grad_y = self.averaged(
            loss.detach(), filled(gradients[:split], self.x), filled(gradients[split:], self.y)
        )
        self.checks.finite("loss", [loss])
        self.checks.finite("upper_grad", [*grad_x, *grad_y])
        return loss, grad_x, grad_y

    def lower(self, sample: Sample) -> tuple[Tensor, Vector]:
        """Value of g and its gradient in y, as in a training step: module buffers advance."""
        part = self.frozen_features("lower", sample)
        loss = self.dependent("lower", self.value("lower", sample, features=part), self.y)
        gradients = self.differentiate(loss, self.y)
        self.require_reached(gradients)
        self.count("lower_grad")
        loss, gradient = self.averaged(loss.detach(), filled(gradients, self.y))
        return loss, gradient

    # ------------------------------------------------------------------------------------------------ second order

    @contextmanager
    def upper_system(self, sample: Sample) -> Generator[UpperSystem]:
        """Value, gradient and Hessian-vector products of f in both variables together: a graph kept inside the block.

        A product counts as one Hessian-vector and one cross product.
        """
        variables, split = Vector((*self.x, *self.y)), len(self.x)
        with self.buffers_kept():
            with twice_differentiable():
                loss = self.dependent("upper", self.value("upper", sample), self.y)
                gradients = self.differentiate(loss, variables, graph=True)
            self.note_reached(gradients[:split])
            self.require_reached(gradients[split:])
            self.count("upper_grad")
            parts = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]

            def product(v: Vector) -> Vector:
                self.count("hvp")
                self.count("jvp")
                if not parts:
                    return v.zeros_like()
                with twice_differentiable():
                    products = torch.autograd.grad(
                        [g for _, g in parts], variables, [v[i] for i, _ in parts], retain_graph=True, allow_unused=True
                    )
                return self.averaged_vector(filled(products, variables))

            loss, gradient = self.averaged(loss.detach(), filled(gradients, variables).detach())
            self.checks.finite("loss", [loss])
            self.checks.finite("upper_grad", gradient)
            yield UpperSystem(loss, gradient, product)

    @contextmanager
    def lower_system(self, sample: Sample) -> Generator[LowerSystem]:
        """Second derivatives of g at the current point: a graph kept inside the block, or finite differences."""
        if self.session.hvp == "finite-difference":
            yield self._difference_system(sample)
        else:
            with self.buffers_kept():
                yield self._system(sample)

    def lower_matrices(self, sample: Sample) -> tuple[Vector, Tensor, Tensor]:
        r"""Gradient of g in y, and :math:`\nabla^2_{yy} g` and :math:`\nabla^2_{xy} g` as matrices.

        Shapes (lanes, p, p) and (lanes, d, p), with one lane if y is not stacked; x is stacked too if y is.
        """
        lanes = self.lanes or 1
        sizes = [t.numel() // lanes for t in self.y]
        variables, split = Vector((*self.x, *self.y)), len(self.x)
        with self.buffers_kept():
            if self.session.hvp == "finite-difference":
                system = self._difference_system(sample)
                gradient = system.gradient
                products = [
                    stack([Vector((*c, *h)) for c, h in [system.both(e.lane(0))]]) for e in self._basis(sizes, 1)
                ]
            else:
                gradients = self.twice_differentiable_gradient(sample)
                self.require_reached(gradients)
                self.count("lower_grad")
                self.count("hvp", sum(sizes))
                self.count("jvp", sum(sizes))
                gradient = self.averaged_vector(filled(gradients, self.y).detach())
                size = sum(sizes) if self.session.vectorize is True else max(int(self.session.vectorize), 1)
                products = [self._pulled_back(gradients, variables, e) for e in self._basis(sizes, size)]
                if not self.session.reaches_upper and products:
                    self.note_reached([part if bool(part.any()) else None for part in products[0][:split]])
        flat = [torch.cat([part[i] for part in products]).reshape(sum(sizes), lanes, -1) for i in range(len(variables))]
        cross, hessian = torch.cat(flat[:split], -1).permute(1, 2, 0), torch.cat(flat[split:], -1).transpose(0, 1)
        cross, hessian = self.averaged(cross, hessian)
        self.checks.finite("hvp", [hessian])
        self.checks.finite("jvp", [cross])
        return gradient, hessian, cross

    def _basis(self, sizes: Sequence[int], size: int) -> Iterator[Vector]:
        """Unit vectors of the space of y, the same in every lane, in parts of at most ``size``."""
        total, lanes = sum(sizes), self.lanes or 1
        for start in range(0, total, size):
            rows = torch.arange(start, min(start + size, total), device=self.device)
            parts, offset = [], 0
            for t, n in zip(self.y, sizes, strict=True):
                unit = torch.zeros(len(rows), lanes, n, dtype=t.dtype, device=t.device)
                mine = (rows >= offset) & (rows < offset + n)
                unit[mine.nonzero().flatten(), :, rows[mine] - offset] = 1.0
                parts.append(unit.reshape(len(rows), *t.shape))
                offset += n
            yield Vector(parts)

    def _pulled_back(self, gradients: Sequence[Tensor | None], variables: Vector, directions: Vector) -> Vector:
        """Products of second derivatives with stacked directions, by one batched pass or one by one."""
        parts = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]
        n = len(directions[0])
        if not parts:
            return Vector(t.new_zeros(n, *t.shape) for t in variables)

        def products(along: Vector, batched: bool) -> Vector:
            with twice_differentiable():
                found = torch.autograd.grad(
                    [g for _, g in parts],
                    list(variables),
                    [along[i] for i, _ in parts],
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=batched,
                )
            shape = (n,) if batched else ()
            return Vector(
                t.new_zeros(*shape, *t.shape) if p is None else p for p, t in zip(found, variables, strict=True)
            )

        if n > 1 and not self.session.fallback:
            try:
                return products(directions, True)
            except RuntimeError as error:
                reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            result = stack([products(directions.lane(i), False) for i in range(n)])
            self.session.fallback = reason
            return result
        return stack([products(directions.lane(i), False) for i in range(n)])

    @contextmanager
    def lower_products(self, sample: Sample) -> Generator[LowerSystem]:
        """The same for the products alone: ``gradient`` is empty, and no lower gradient is counted."""
        if self.session.hvp == "finite-difference":
            yield self._difference_system(sample, gradient=False)
        else:
            with self.buffers_kept():
                yield self._system(sample, gradient=False)

    def kept_system(self, sample: Sample) -> LowerSystem:
        """Second derivatives of g at the current point, for later use at the same point; module buffers advance.

        The graph saves the live leaves themselves, so its products are right only while these hold the same values
        again (``with oracle.at(...)``).
        """
        return self._system(sample)

    def _system(self, sample: Sample, *, gradient: bool = True) -> LowerSystem:
        y = self.y
        gradients = self.twice_differentiable_gradient(sample)
        self.require_reached(gradients)
        # A component that is constant in x and y has no graph, and contributes nothing to any product.
        parts = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]

        def product(v: Vector, inputs: Vector) -> Vector:
            if not parts:
                return inputs.zeros_like()
            with twice_differentiable():
                products = torch.autograd.grad(
                    [g for _, g in parts], inputs, [v[i] for i, _ in parts], retain_graph=True, allow_unused=True
                )
            if inputs is not y:
                self.note_reached(products[: len(self.x)])
            return self.averaged_vector(filled(products, inputs))

        if not gradient:
            return self._counted(Vector(), product)
        self.count("lower_grad")
        return self._counted(self.averaged_vector(filled(gradients, y).detach()), product)

    def twice_differentiable_gradient(self, sample: Sample) -> Sequence[Tensor | None]:
        """Gradient of g in the live y, with a graph."""
        session = self.session
        if self.sharded:
            raise RuntimeError(
                "sharded lower parameters (DTensor) have first derivatives only in torch; use a first-order method "
                "(F2SA) or hvp='finite-difference'"
            )
        with twice_differentiable(plain_weight_norm=bool(session.weight_norm)):
            loss = self.dependent("lower", self.value("lower", sample), self.y)
        if session.weight_norm is None:
            session.weight_norm = uses_weight_norm(loss)
            if session.weight_norm:
                return self.twice_differentiable_gradient(sample)
        with twice_differentiable():
            return self.differentiate(loss, self.y, graph=True)

    def _counted(self, gradient: Vector, product: Callable[[Vector, Vector], Vector]) -> LowerSystem:
        """The system whose products ``product(v, variables)`` are counted and checked."""
        both_variables = Vector((*self.x, *self.y))
        split = len(self.x)

        def hvp(v: Vector) -> Vector:
            self.count("hvp")
            return product(v, self.y)

        def cross(v: Vector) -> Vector:
            self.count("jvp")
            result = product(v, self.x)
            self.checks.finite("jvp", result)
            return result

        def both(v: Vector) -> tuple[Vector, Vector]:
            self.count("hvp")
            self.count("jvp")
            result = product(v, both_variables)
            self.checks.finite("jvp", result)
            return Vector(result[:split]), Vector(result[split:])

        return LowerSystem(gradient, hvp, cross, both)

    def _difference_system(self, sample: Sample, *, gradient: bool = True) -> LowerSystem:
        """Products from central differences of first-order gradients, all on the same sample."""
        y = self.y.detach().clone()

        def slope(at: Vector, variables: Vector) -> Vector:
            with self.at(lower=at), self.buffers_kept():
                part = self.frozen_features("lower", sample) if variables is self.y else None
                loss = self.dependent("lower", self.value("lower", sample, features=part), self.y)
                gradients = self.differentiate(loss, variables)
            if variables is self.y:
                self.require_reached(gradients)
            else:
                self.note_reached(gradients[: len(self.x)])
            return self.averaged_vector(filled(gradients, variables))

        def product(v: Vector, variables: Vector) -> Vector:
            # Truncation eps^2 against round-off u / eps gives eps ~ u^(1/3), in units of the size of y along v.
            length = v.norm().clamp_min(torch.finfo(torch.float32).tiny)
            epsilon = math.pow(torch.finfo(y[0].dtype).eps, 1 / 3) * (1 + y.norm()) / length
            shift = v * epsilon
            return (slope(y + shift, variables) - slope(y - shift, variables)) * (0.5 / epsilon)

        if not gradient:
            return self._counted(Vector(), product)
        self.count("lower_grad")
        return self._counted(slope(y, self.y), product)

    # ------------------------------------------------------------------------------------------------ parts

    def value(self, level: str, sample: Sample, *, graph: bool = True, features: Any = None) -> Tensor:
        """The loss on a sample, with the random numbers of that sample, checked to be a scalar.

        ``features`` are those of the sample at the present x, if the caller has them.
        """
        if sample.features is None:
            loss = self.call(sample, graph=graph)
        else:
            part = self.call(sample.features, graph=graph) if features is None else features
            loss = self.call(sample, part, graph=graph)
        return as_scalar(level, loss)

    def forget_casts(self) -> None:
        """Drop autocast's low-precision copies of the weights, which last longer than the values they were made of."""
        if torch.is_autocast_enabled(self.device.type):
            torch.clear_autocast_cache()

    def call(self, sample: Sample, *arguments: Any, graph: bool = True) -> Any:
        """What a sample's function returns on its arguments, or on others, with the random numbers of that sample."""
        self.forget_casts()
        with torch.set_grad_enabled(graph), nullcontext() if sample.once else sample.replayed(self.device):
            return sample(*arguments)

    def frozen_features(
        self, level: str, sample: Sample, point: object = None, evaluate: Callable[[], Any] | None = None
    ) -> Any:
        """The features of a sample as constants, for derivatives in y alone; evaluated once for each x and batch.

        Args:
            level: of the objective.
            sample: the sample; None is returned if its objective has no features.
            point: stands for the x at which they are wanted. Default: the present one.
            evaluate: evaluates them there. Default: in the live tensors.
        """
        if sample.features is None:
            return None
        if level not in self.session.features_checked:
            self.require_free_of_lower(level, self.call(sample.features))
            self.session.features_checked |= {level}
        point = self._point if point is None else point
        kept, at, part = self._kept.get(level, (None, None, None))
        if at is not point or kept is not sample.features:
            part = self.call(sample.features, graph=False) if evaluate is None else evaluate()
            self._kept[level] = (sample.features, point, part)
        return part

    def require_free_of_lower(self, level: str, part: Any) -> None:
        """At the first step, raise if the features change with y: they are kept while y moves."""
        parts = [t for t in tree_leaves(part) if isinstance(t, Tensor) and t.requires_grad]
        if parts:
            reached = torch.autograd.grad([t.sum() for t in parts], self.y, allow_unused=True)
            for gradient, name in zip(reached, self.names[len(self.x) :], strict=True):
                if gradient is not None:
                    raise ValueError(
                        f"the features of the {level} objective depend on lower parameter {name}; they are the part of "
                        "the loss that does not depend on y, so move what reads it into the loss itself"
                    )

    def dependent(self, level: str, loss: Tensor, y: Sequence[Tensor]) -> Tensor:
        """The loss, checked to depend on something where ``y`` is a variable."""
        if not loss.requires_grad and any(t.requires_grad for t in y):
            raise ValueError(_INDEPENDENT.format(level=level))
        return loss

    def differentiate(self, loss: Tensor, inputs: Sequence[Tensor], *, graph: bool = False) -> Sequence[Tensor | None]:
        """Gradient of a loss in live tensors; None where it does not depend on one."""
        if self.sharded and not graph:
            return _by_backward(loss, inputs)
        return torch.autograd.grad(loss, list(inputs), create_graph=graph, allow_unused=True)

    @contextmanager
    def buffers_kept(self) -> Generator[None]:
        """Leave module buffers (running statistics) as they are, whatever the block evaluates."""
        with self.session.buffers.kept() as changed:
            yield
        self.buffers_skipped |= bool(changed)

    def advance_buffers(self, sample: Sample) -> None:
        """One forward pass of g at the live point, for methods that evaluated g only elsewhere."""
        if self.buffers_skipped:
            with torch.no_grad():
                sample()
            self.count("loss")

    def averaged(self, *results: Any) -> tuple[Any, ...]:
        """Mean over the ranks of the process group, of tensors and vectors (sharded tensors have theirs already)."""
        group = self.session.process_group
        if group is None or self.lanes is not None:
            return results
        tensors = [t for r in results for t in (r if isinstance(r, Vector) else (r,)) if not is_sharded(t)]
        if not tensors:
            return results
        flat = torch.cat([t.reshape(-1).to(torch.promote_types(t.dtype, torch.float32)) for t in tensors])
        dist.all_reduce(flat, group=group)
        parts = (flat / dist.get_world_size(group)).split([t.numel() for t in tensors])  # type: ignore[no-untyped-call]
        means = iter(part.view_as(t).to(t.dtype) for part, t in zip(parts, tensors, strict=True))
        return tuple(
            Vector(t if is_sharded(t) else next(means) for t in result) if isinstance(result, Vector) else next(means)
            for result in results
        )

    def share(self, tasks: Any, count: int) -> tuple[Any, int]:
        """This rank's part of drawn tasks, and how many they are."""
        rank, world = self.ranks()
        if world == 1:
            return tasks, count
        part = slice(rank, count, world)
        return tree_map(lambda t: t[part] if isinstance(t, Tensor) else t, tasks), len(range(count)[part])

    def agreed(self, number: int) -> int:
        """The number that the first rank of the process group has."""
        group = self.session.process_group
        if group is None:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.broadcast(shared, group=group, group_src=0)
        return int(shared)

    def ranks(self) -> tuple[int, int]:
        """This process's rank in the process group, and the size of that; (0, 1) without one."""
        group = self.session.process_group
        return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def totalled(self, *results: Any) -> tuple[Any, ...]:
        """Sum over the ranks of the process group, of tensors and vectors."""
        group = self.session.process_group
        return results if group is None else self.averaged(*(r * dist.get_world_size(group) for r in results))

    def averaged_vector(self, vector: Vector) -> Vector:
        """Mean over the ranks of one vector."""
        return Vector(self.averaged(vector)[0])

    def require_reached(self, gradients: Sequence[Tensor | None]) -> None:
        """At the first step, raise if the lower loss does not depend on some lower parameter."""
        if not self.session.reaches_lower:
            for gradient, name in zip(gradients, self.names[len(self.x) :], strict=True):
                if gradient is None:
                    raise ValueError(
                        f"the lower loss does not depend on lower parameter {name}; leave it out of the lower "
                        "parameters, or check that the loss reads the live tensor and not a detached or old one"
                    )
            self.session.reaches_lower = True

    def note_reached(self, gradients: Iterable[Tensor | None]) -> None:
        """Remember whether any loss depended on an upper parameter."""
        if not self.session.reaches_upper:
            self.session.reaches_upper = any(gradient is not None for gradient in gradients)

    def conclude(self) -> None:
        """At the first step, raise if neither loss depended on any upper parameter: the hypergradient would be zero."""
        if not self.session.reaches_upper:
            raise ValueError(
                "neither loss depends on any upper parameter, so the hypergradient would be silently zero; check that "
                "the losses read the live upper tensors and not detached or old ones"
            )


_INDEPENDENT = (
    "the {level} loss depends on no parameter of this optimizer; check that it reads the live tensors, and that it "
    "does not detach, call .item() or run under torch.no_grad()"
)


def as_scalar(level: str, loss: Any) -> Tensor:
    """What a loss returned, checked to be a scalar."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the {level} loss must return a scalar tensor, but returned {found}; reduce it (mean, sum)")
    return loss if loss.dim() == 0 else loss.reshape(())


def filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> Vector:
    """Gradients with zeros for the tensors that were not reached."""
    return Vector(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True))


def _by_backward(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients through ``.backward()``, the only way that sharded parameters (FSDP2) have."""
    before = [t.grad for t in inputs]
    for tensor in inputs:
        tensor.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return [t.grad for t in inputs]
    finally:
        for tensor, grad in zip(inputs, before, strict=True):
            tensor.grad = grad

"""The two losses at one point: derivatives of f and g at given values of x and y."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..problem.objective import Objective, Sample
from ..problem.tracing import end_region
from ..problem.vector import Vector, any_sharded
from . import second_order
from .checks import Checks
from .features import Features
from .first_order import filled, lower_slope, slopes
from .second_order import LowerSystem, UpperSystem
from .session import Session, as_scalar, forget_casts

__all__ = ["Oracle"]


class Oracle:
    r"""Derivatives of an upper loss f(x, y) and a lower loss g(x, y), given as closures over live tensors, at a point.

    An oracle never changes: :meth:`at` gives the oracle of another point. Everything is evaluated on a `Sample` (from
    ``oracle.f.draw()`` or ``oracle.g.draw()``), and the live tensors hold afterwards what they held before.

    Args:
        upper: the live upper tensors x.
        lower: the live lower tensors y.
        upper_loss: f, a callable or an `Objective`.
        lower_loss: g, a callable or an `Objective`.
        names: gives names of the upper, then of the lower tensors, for error messages. Default: their indices.
        session: the bookkeeping of the step. Default: a fresh one.
        lanes: number of separate lower problems if ``lower`` are stacked tensors, one lane for each, and the losses are
            sums over the lanes; an evaluation counts that many times, and is not averaged over ranks, whose tasks
            differ. Default: None, one problem.

    Attributes:
        x, y: the point; by default what the live tensors hold.
        moved: whether x, and whether y, are other values than those of the live tensors.
        f, g: the objectives.
        weight: how often an evaluation counts.
        shared: whether all ranks evaluate the same problem, each on data of its own, and results are their means.

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

    def __init__(
        self,
        upper: Iterable[Tensor],
        lower: Iterable[Tensor],
        upper_loss: Objective | Callable[..., Tensor],
        lower_loss: Objective | Callable[..., Tensor],
        *,
        names: Callable[[], Sequence[str]] | None = None,
        session: Session | None = None,
        lanes: int | None = None,
    ) -> None:
        self.lanes, self.shared, self.weight = lanes, lanes is None, lanes or 1
        self.live_x, self.live_y = Vector(upper), Vector(lower)
        self.x, self.y = self.live_x.detach(), self.live_y.detach()
        self.moved = (False, False)
        self.f = upper_loss if isinstance(upper_loss, Objective) else Objective(upper_loss)
        self.g = lower_loss if isinstance(lower_loss, Objective) else Objective(lower_loss)
        self.session = session or Session()
        self.device = self.live_y[0].device
        self.sharded = any_sharded((*self.live_x, *self.live_y))
        self.features = Features()
        self.f.begin()
        self.g.begin()
        self._names = names
        if not self.session.found.reaches_upper:
            for tensor, name in zip((*self.x, *self.y), self.names, strict=True):
                if tensor.device != self.device:
                    raise ValueError(
                        f"all parameters must be on one device, but parameter {name} is on {tensor.device} and "
                        f"parameter {self.lower_names()[0]} is on {self.device}"
                    )

    def at(self, upper: Sequence[Tensor] | None = None, lower: Sequence[Tensor] | None = None) -> Oracle:
        """The oracle at other values of x, or of y, or of both."""
        other = object.__new__(Oracle)
        other.__dict__.update(self.__dict__)
        if upper is not None:
            other.x = Vector(upper).detach()
        if lower is not None:
            other.y = Vector(lower).detach()
        other.moved = (self.moved[0] or upper is not None, self.moved[1] or lower is not None)
        return other

    def placed(self) -> AbstractContextManager[Sequence[Vector]]:
        """Evaluate at this point inside the block; gives the variables x and y to differentiate in."""
        x_moved, y_moved = self.moved
        return self.session.options.evaluation(
            (self.live_x, self.live_y), (self.x if x_moved else None, self.y if y_moved else None)
        )

    @property
    def checks(self) -> Checks:
        """The flags of the step."""
        return self.session.checks

    @property
    def names(self) -> Sequence[str]:
        """Names of the upper, then of the lower tensors."""
        if self._names is not None:
            return self._names()
        levels = zip(("upper", "lower"), (self.x, self.y), strict=True)
        return [f"{level} {i}" for level, ts in levels for i in range(len(ts))]

    def lower_names(self) -> Sequence[str]:
        """Names of the lower tensors."""
        return self.names[len(self.x) :]

    def count(self, oracle: str, times: int = 1) -> None:
        """Add to the counters."""
        self.session.counts[oracle] += times * self.weight

    # ------------------------------------------------------------------------------------------------ derivatives

    def upper(self, sample: Sample) -> tuple[Tensor, Vector, Vector]:
        """Value of f, its gradient in x and its gradient in y, from one backward pass."""
        return self._jointly("upper", sample)

    def lower_jointly(self, sample: Sample) -> tuple[Tensor, Vector, Vector]:
        """The same of g; counts as a lower gradient."""
        return self._jointly("lower", sample)

    def _jointly(self, level: str, sample: Sample) -> tuple[Tensor, Vector, Vector]:
        with self.session.buffers_kept(), self.placed() as (x, y):
            loss, gradients = slopes(self, level, sample, x, y, (*x, *y))
        if all(gradient is None for gradient in gradients):
            raise ValueError(self.session.independent(level))
        split = len(x)
        if level == "lower" or self.session.options.one_loss:
            self.session.require_reached(gradients[split:], self.lower_names)
        self.session.note_reached(gradients[:split])
        self.count(f"{level}_grad")
        loss, grad_x, grad_y = self.averaged(
            loss.detach(), filled(gradients[:split], self.x), filled(gradients[split:], self.y)
        )
        self.checks.scalar("loss", loss)
        self.checks.finite(f"{level}_grad", [*grad_x, *grad_y])
        return loss, grad_x, grad_y

    def lower(self, sample: Sample) -> tuple[Tensor, Vector]:
        """Value of g and its gradient in y."""
        return lower_slope(self, "lower", sample)

    def upper_system(self, sample: Sample) -> AbstractContextManager[UpperSystem]:
        """Value, gradient and Hessian-vector products of f in both variables together: a graph kept inside the block.

        A product counts as one Hessian-vector and one cross product.
        """
        return second_order.upper_system(self, sample)

    def lower_system(self, sample: Sample, *, gradient: bool = True) -> AbstractContextManager[LowerSystem]:
        """Second derivatives of g: a graph kept inside the block, or finite differences.

        For products alone: without ``gradient`` that is empty, no lower gradient is counted, and the value of g is not
        required to be finite.
        """
        return second_order.lower_system(self, sample, gradient=gradient)

    def kept_system(self, sample: Sample) -> LowerSystem:
        """Second derivatives of g from a graph that lasts as long as the result."""
        return second_order.kept_system(self, sample)

    def lower_matrices(self, sample: Sample) -> tuple[Vector, Tensor, Tensor]:
        r"""Gradient of g in y, and :math:`\nabla^2_{yy} g` and :math:`\nabla^2_{xy} g` as matrices.

        Shapes (lanes, p, p) and (lanes, d, p), with one lane if y is not stacked; x is stacked too if y is.
        """
        return second_order.lower_matrices(self, sample)

    # ------------------------------------------------------------------------------------------------ parts

    def evaluated(
        self, level: str, sample: Sample, x: Sequence[Tensor], y: Sequence[Tensor], *, features: Any = None
    ) -> Tensor:
        """The loss as a function of the variables x and y, with a graph, and checked to depend on something."""
        loss = self.value(level, sample, features=features)
        if level == "lower":
            self.session.lower_sample = sample
        whole = False
        if level not in self.session.found.looked and not self.sharded and features is None:
            # The graph does not show all that depends on x where features are constants.
            objective = self.f if level == "upper" else self.g
            whole = (sample.features is None) == (objective.features is None)
        return self.session.dependent(level, loss, y, x if whole else None)

    def value(self, level: str, sample: Sample, *, graph: bool = True, features: Any = None) -> Tensor:
        """The loss on a sample at whatever is placed, with the random numbers of that sample, checked to be a scalar.

        ``features`` are those of the sample at the present x, if the caller has them.
        """
        if sample.features is None:
            loss = self.call(sample, graph=graph)
        else:
            part = self.call(sample.features, graph=graph) if features is None else features
            loss = self.call(sample, part, graph=graph)
        return as_scalar(level, loss, self.session.called(level))

    def call(self, sample: Sample, *arguments: Any, graph: bool = True) -> Any:
        """What a sample's function returns on its arguments, or on others, with the random numbers of that sample."""
        forget_casts(self.device)
        end_region()
        if sample.once and not self.sharded and graph is torch.is_grad_enabled():
            return sample(*arguments)  # contexts cost more than small losses
        watched = self.session.gathered.watching() if self.sharded else nullcontext()
        with watched, torch.set_grad_enabled(graph), nullcontext() if sample.once else sample.replayed(self.device):
            return sample(*arguments)

    def differentiate(self, loss: Tensor, inputs: Sequence[Tensor], *, graph: bool = False) -> Sequence[Tensor | None]:
        """Gradient of a loss; None where it does not depend on an input."""
        if self.sharded and not graph:
            return _by_backward(loss, inputs)
        return torch.autograd.grad(loss, list(inputs), create_graph=graph, allow_unused=True)

    def averaged(self, *results: Any) -> tuple[Any, ...]:
        """Mean over the ranks if these share the problem; otherwise nothing is averaged."""
        return (
            results if self.session.options.ranks.group is None or not self.shared else self.session.averaged(*results)
        )


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

"""A lower problem as a differentiable function of tensors, for use inside any torch program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import warn
from ..problem.vector import Vector
from ..solvers import linear

__all__ = ["solve"]

Loss = Callable[[Any, Any], Tensor]  # of x and y, each a tensor or a tuple
Minimiser = Callable[[Callable[[Any], Tensor], Any], Any]
NEWTON, NEWTON_PRODUCTS = 5, 100
UNSOLVED = 1e-2  # relative residual of the linear system from which the gradient is said to be wrong


def solve(
    loss: Loss,
    x: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    *,
    minimiser: Minimiser | None = None,
    steps: int = 200,
    tol: float | None = None,
    linear_steps: int = 200,
) -> Any:
    r"""Return the minimiser of a loss in y as a differentiable function of x.

    .. math:: y^*(x) = \arg\min_y g(x, y), \qquad
        \frac{\partial y^*}{\partial x}^{\top} b = -\nabla^2_{xy} g\, v, \quad [\nabla^2_{yy} g]\, v = b.

    *When.* A lower problem is one operation among others: its solution goes into a network, a loss or a second lower
    problem, and ``backward()`` runs through it. No constraints: put them into the loss by a penalty, or by new
    variables (softmax for a simplex, softplus for bounds). If the whole program is a bilevel problem, a method such as
    `AID` is cheaper, because it keeps y and v from step to step.

    *Cost.* Forward: one gradient for each evaluation of the minimiser. Backward: one Hessian-vector product for each
    iteration of MINRES, and one cross derivative. No graph of the minimiser's iterations is kept. Derivatives of any
    order exist. *State*: none. *Draws*: none; a loss with random numbers has no fixed minimiser.

    Args:
        loss: g, called with x and y as they are passed here; returns a scalar. For a batch of independent problems
            return the sum of their losses. All tensors that need gradients must be in x: others that the loss reads
            are constants.
        x: tensor, or tuple of tensors, with or without ``requires_grad``.
        y: where the minimiser starts: a tensor, or a tuple of tensors.
        minimiser: solver of your own, called with a function of y and the start; returns y, without a graph.
            Default: None, which is L-BFGS with a strong Wolfe line search.
        steps: largest number of iterations of L-BFGS. Default: 200.
        tol: largest norm of :math:`\nabla_y g`, relative to that at the start (or to :math:`\nabla^2_{yy} g\, y`, if
            that is larger); above it a `BilevelWarning` says that y is no minimiser. Default: None, which is the square
            root of the rounding error of y's dtype.
        linear_steps: largest number of iterations of MINRES. Default: 200.

    Returns:
        :math:`y^*`, a tensor or a tuple, as y was passed.

    Raises:
        ValueError: if the loss is not a scalar, or does not depend on y.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x = torch.tensor([3.0, 1.0], requires_grad=True)
        >>> y = bo.solve(lambda x, y: (y - 2 * x).square().sum(), x, torch.zeros(2))
        >>> y.square().sum().backward()
        >>> y.detach(), x.grad.round()  # y = 2x
        (tensor([6., 2.]), tensor([24.,  8.]))
    """
    xs, ys = _parts(x), Vector(t.detach() for t in _parts(y))
    problem = _Problem(loss, len(xs), isinstance(x, Tensor), isinstance(y, Tensor), linear_steps)
    found = _minimise(problem, Vector(t.detach() for t in xs), ys, minimiser, steps, tol)
    results: tuple[Tensor, ...] = _Implicit.apply(problem, *xs, *found)
    return results[0] if isinstance(y, Tensor) else results


def _parts(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


class _Problem:
    """A user's loss, called with flat tuples."""

    def __init__(self, loss: Loss, split: int, one_x: bool, one_y: bool, linear_steps: int) -> None:
        self.loss, self.split, self.one_x, self.one_y, self.linear_steps = loss, split, one_x, one_y, linear_steps

    def structured(self, ys: Sequence[Tensor]) -> Any:
        return ys[0] if self.one_y else tuple(ys)

    def value(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        found = self.loss(xs[0] if self.one_x else tuple(xs), self.structured(ys))
        if not isinstance(found, Tensor) or found.dim():
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"Invalid loss value: {shape} (solve needs a scalar tensor: use .sum() or .mean())")
        return found

    def slope(self, xs: Sequence[Tensor], ys: Sequence[Tensor], graph: bool = False) -> Vector:
        """Return the gradient in y; the y must require gradients."""
        value = self.value(xs, ys)
        if not value.requires_grad:
            raise ValueError("Invalid loss value: a constant (it must depend on y, by differentiable operations)")
        found = torch.autograd.grad(value, tuple(ys), create_graph=graph, materialize_grads=True)
        if graph and not any(t.requires_grad for t in found):
            raise ValueError("Invalid loss value: piecewise linear in y (its Hessian is zero, so y has no derivative)")
        return Vector(found)


def _minimise(
    problem: _Problem, xs: Vector, start: Vector, minimiser: Minimiser | None, steps: int, tol: float | None
) -> Vector:
    """Return the minimiser, and warn if it is none."""
    with torch.enable_grad():
        ys = Vector(t.clone().requires_grad_() for t in start)
        first = problem.slope(xs, ys).norm()
        if minimiser is not None:
            made = minimiser(lambda y: problem.value(xs, _parts(y)), problem.structured(start))
            ys = Vector(t.detach().clone().requires_grad_() for t in _parts(made))
        else:
            descent = torch.optim.LBFGS(
                [*ys], max_iter=steps, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
            )

            def closure() -> Tensor:
                for t, own in zip(ys, problem.slope(xs, ys), strict=True):
                    t.grad = own
                with torch.no_grad():
                    return problem.value(xs, ys)

            descent.step(closure)  # type: ignore[no-untyped-call]
            ys = _polish(problem, xs, ys)
        slope = problem.slope(xs, ys, graph=True)
    residual = float(slope.detach().norm())
    scale = max(float(first.detach()), float(_pulled(slope, ys, ys.detach()).norm()))
    limit = torch.finfo(ys[0].dtype).eps ** 0.5 if tol is None else tol
    if not residual <= limit * scale:
        warn(
            f"the lower problem of solve is not solved: the gradient in y has norm {residual:.2g}, more than "
            f"{limit:.1g} of {scale:.2g}, so y and its derivative are wrong. Take more steps, a minimiser of your own, "
            "or a loss with a minimum (a penalty on y)"
        )
    return Vector(t.detach() for t in ys)


def _pulled(slope: Vector, variables: Sequence[Tensor], v: Sequence[Tensor], graph: bool = False) -> Vector:
    """Return the derivative of <slope, v>."""
    own = [(t, w) for t, w in zip(slope, v, strict=True) if t.requires_grad]  # others are constants
    if not own:
        return Vector(torch.zeros_like(t) for t in variables)
    ends, weights = zip(*own, strict=True)
    options: dict[str, bool] = {"retain_graph": True, "create_graph": graph, "materialize_grads": True}
    return Vector(torch.autograd.grad(ends, [*variables], weights, **options))


def _polish(problem: _Problem, xs: Vector, ys: Vector) -> Vector:
    """Return y after Newton steps, as long as they reduce the gradient; line searches end at half of the digits."""
    slope = problem.slope(xs, ys, graph=True)
    for _ in range(NEWTON):
        right = slope.detach()
        step = linear.minres(partial(_pulled, slope, ys), right, steps=NEWTON_PRODUCTS).solution
        moved = Vector((t - s).detach().requires_grad_() for t, s in zip(ys, step, strict=True))
        after = problem.slope(xs, moved, graph=True)
        if not float(after.detach().norm()) < float(right.norm()):
            break
        ys, slope = moved, after
    return ys


def _variables(tensors: Sequence[Tensor], graph: bool) -> list[Tensor]:
    """Return aliases by which to differentiate: partial derivatives do not go through what a tensor was made of."""
    return [t.view_as(t) if graph and t.requires_grad else t.detach().requires_grad_() for t in tensors]


class _Implicit(torch.autograd.Function):
    """The identity on y, whose derivative with respect to x is that of the minimiser."""

    @staticmethod
    def forward(ctx: Any, problem: _Problem, *tensors: Tensor) -> tuple[Tensor, ...]:
        xs, ys = tensors[: problem.split], tuple(t.clone() for t in tensors[problem.split :])
        ctx.problem = problem
        ctx.save_for_backward(*xs, *ys)
        return ys

    @staticmethod
    def backward(ctx: Any, *b: Tensor) -> tuple[Tensor | None, ...]:
        problem, graph = ctx.problem, torch.is_grad_enabled()
        v: tuple[Tensor, ...] = _Inverse.apply(problem, len(b), *b, *ctx.saved_tensors)
        with torch.enable_grad():
            tensors = _variables(ctx.saved_tensors, graph)
            xs, ys = tensors[: problem.split], tensors[problem.split :]
            cross = _pulled(problem.slope(xs, ys, graph=True), xs, v, graph)
        needed = ctx.needs_input_grad[1 : 1 + len(xs)]
        return None, *(-t if n else None for t, n in zip(cross, needed, strict=True)), *[None] * len(ys)


class _Inverse(torch.autograd.Function):
    """The solution v of H v = b, H the Hessian at x and y, as a function of b, x and y."""

    @staticmethod
    def forward(ctx: Any, problem: _Problem, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        b = Vector(tensors[:n]).detach()
        xs, ys = tensors[n : n + problem.split], tensors[n + problem.split :]
        with torch.enable_grad():
            ys = Vector(_variables(ys, False))
            slope = problem.slope([t.detach() for t in xs], ys, graph=True)
            v = linear.minres(partial(_pulled, slope, ys), b, steps=problem.linear_steps).solution
            left = float((b - _pulled(slope, ys, v)).norm()) / (float(b.norm()) or 1.0)
        if not left <= UNSOLVED:
            warn(
                f"the linear system of solve is not solved: its residual is {left:.2g} of its right-hand side, so the "
                "gradient is wrong. Take more linear_steps, or a penalty on y in the loss if its Hessian is singular"
            )
        ctx.problem, ctx.n = problem, n
        ctx.save_for_backward(*v, *tensors[n:])
        return tuple(v)

    @staticmethod
    def backward(ctx: Any, *b: Tensor) -> tuple[Tensor | None, ...]:
        problem, n, graph = ctx.problem, ctx.n, torch.is_grad_enabled()
        v, others = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        u: tuple[Tensor, ...] = _Inverse.apply(problem, n, *b, *others)
        with torch.enable_grad():
            tensors = _variables(others, graph)
            xs, ys = tensors[: problem.split], tensors[problem.split :]
            product = _pulled(problem.slope(xs, ys, graph=True), ys, v, True)
            found = _pulled(product, tensors, u, graph)
        return None, None, *u, *(-t for t in found)

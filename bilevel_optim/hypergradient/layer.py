"""A lower problem as a differentiable function of tensors, for use inside any torch program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks

from ..errors import DerivativeError, require_uninterrupted, warn
from ..oracle.differentiable import FUSED, has, plain_operations
from ..oracle.oracle import Oracle
from ..oracle.probe import CLEAR_OF_KINKS, LOOK, SECOND, SEEDS, SHIFT, Judgement, compare, direction, require_right
from ..oracle.session import EvaluationOptions, Session
from ..problem.parameters import require_gradients
from ..problem.vector import Vector, coarsest
from ..solvers import linear

__all__ = ["solve"]

Loss = Callable[[Any, Any], Tensor]  # of x and y, each a tensor or a tuple
Minimiser = Callable[[Callable[[Any], Tensor], Any], Any]
Proximal = Callable[[Any, Any, float], Any]  # of x, y and the step
NEWTON, NEWTON_PRODUCTS = 5, 100
FIRST_NEWTON = 20  # proximal steps before Newton's method is tried, and between two trials at least
ROUNDING = 100  # times eps |y|: change of y in a proximal gradient step that rounding explains
HALVINGS = 60  # of one proximal step
LONGER = 16.0  # times the step, to see that a proximal function fits it
UPHILL = 1e-6  # cosine with the gradient, below which a Newton step goes uphill by more than rounding
TOLERANCE = 1e-2  # relative error of the derivative of a proximal function that does not matter
UNSOLVED = 1e-2  # relative residual of the linear system, or error of y, from which the gradient is said to be wrong


def solve(
    loss: Loss,
    x: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    *,
    proximal: Proximal | None = None,
    minimiser: Minimiser | None = None,
    steps: int | None = None,
    tol: float | None = None,
    linear_steps: int = 200,
    check_derivatives: bool = True,
) -> Any:
    r"""Return the minimiser of a loss in y as a differentiable function of x.

    .. math:: y^*(x) = \arg\min_y g(x, y), \qquad
        \frac{\partial y^*}{\partial x}^{\top} b = -\nabla^2_{xy} g\, v, \quad [\nabla^2_{yy} g]\, v = b.

    With ``proximal``, the minimiser of g + h: the fixed point of y -> prox(x, y - s grad g, s), and its derivative.

    *When.* A lower problem is one operation among others: its solution goes into a network, a loss or a second
    lower problem, and ``backward()`` runs through it. Constraints on y and absolute values are a ``proximal``;
    others need new variables or a penalty. If the whole program is a bilevel problem, a method such as `AID` is
    cheaper, because it keeps y and v from step to step.

    *Cost.* Forward: one gradient for each evaluation of the minimiser; about four more, and two products, compare the
    derivatives with differences. Backward: one Hessian-vector product for each
    iteration of MINRES (with ``proximal`` also two products with its derivative), and one cross derivative. No graph of
    the minimiser's iterations is kept. Derivatives of any order exist. *State*: none. *Draws*: none; a loss with random
    numbers has no fixed minimiser.

    Args:
        loss: g, called with x and y as they are passed here; returns a scalar. For a batch of independent problems
            return the sum of their losses. All tensors that need gradients must be in x: others that the loss reads
            are constants.
        x: tensor, or tuple of tensors, with or without ``requires_grad``.
        y: where the minimiser starts: a tensor, or a tuple of tensors.
        proximal: for constraints or a term h(x, y) that is convex in y and not smooth: called with x, a point z and a
            step s, returns :math:`\arg\min_y |y - z|^2 / (2 s) + h(x, y)` by differentiable operations. For a
            constraint, this is the projection of z. Default: None, no such term.
        minimiser: solver of your own, called with a function of y (the loss) and the start; returns y, without a graph.
            Default: None, which is L-BFGS with a strong Wolfe line search, or, with ``proximal``, accelerated proximal
            gradient steps. Newton's method follows.
        steps: largest number of iterations of L-BFGS, or of proximal gradient steps. Default: None, 200 or 2000.
        tol: largest norm of :math:`\nabla_y g`, relative to that at the start (or to :math:`\nabla^2_{yy} g\, y`, if
            that is larger); with ``proximal``, of the change of y in a proximal gradient step, relative to that at the
            start or to y. Above it a `BilevelWarning` says that y is no minimiser; so it does if y runs away to
            infinity. Default: None, which is the square root of the rounding error of y's dtype.
        linear_steps: largest number of iterations of MINRES. Default: 200.
        check_derivatives: compare the derivatives of the loss, and that of ``proximal``, with differences. Default:
            True.

    Returns:
        :math:`y^*`, a tensor or a tuple, as y was passed.

    Raises:
        ValueError: if x or y holds no tensors, or y no real ones or no entries; if the loss is not a scalar, or does
            not depend on y; if the result of ``proximal`` has another form than y, or no graph.
        RuntimeError: under the transforms of ``torch.func``.
        DerivativeError: if a derivative is wrong.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x = torch.tensor([3.0, 1.0], requires_grad=True)
        >>> y = bo.solve(lambda x, y: (y - 2 * x).square().sum(), x, torch.zeros(2))
        >>> y.square().sum().backward()
        >>> y.detach(), x.grad.round()  # y = 2x
        (tensor([6., 2.]), tensor([24.,  8.]))
    """
    call = _untraced if torch.compiler.is_dynamo_compiling() else _solve
    return call(loss, x, y, proximal, minimiser, steps, tol, linear_steps, check_derivatives)


def _solve(
    loss: Loss,
    x: Tensor | Sequence[Tensor],
    y: Tensor | Sequence[Tensor],
    proximal: Proximal | None,
    minimiser: Minimiser | None,
    steps: int | None,
    tol: float | None,
    linear_steps: int,
    check_derivatives: bool,
) -> Any:
    require_gradients()
    try:
        torch.zeros((), device="cpu").requires_grad_()
    except RuntimeError as error:
        raise RuntimeError(
            "solve cannot be called under the transforms of torch.func (grad, jacrev, vmap, ...): use "
            "torch.autograd.grad or torch.autograd.functional, and for a batch of problems the sum of their losses"
        ) from error
    xs, ys = _parts(x), Vector(_parts(y))
    for name, tensors in (("x", xs), ("y", ys)):
        for t in tensors:
            if not isinstance(t, Tensor):
                raise ValueError(f"Invalid {name} value: {_form(t)} in it (pass a tensor, or a tuple of tensors)")
    if not all([t.is_floating_point() for t in ys]):
        kinds = ", ".join(_form(t) for t in ys if not t.is_floating_point())
        raise ValueError(f"Invalid y value: {kinds} (y takes real values: pass tensors of float32 or float64)")
    if not sum([t.numel() for t in ys]):
        raise ValueError("Invalid y value: no entries (there is nothing to minimise over)")
    ys = ys.detach()
    problem = _Problem(loss, proximal, len(xs), isinstance(x, Tensor), isinstance(y, Tensor), linear_steps)
    if steps is None:
        steps = 200 if proximal is None else 2000
    problem.minimum = proximal is None and minimiser is None
    found = _minimise(problem, Vector(t.detach() for t in xs), ys, minimiser, steps, tol)
    if check_derivatives:
        with _no_hooks():
            _check(problem, [t.detach() for t in xs], found, any([t.requires_grad for t in xs]))
    # Aliases, because an optimizer whose loss calls solve puts values in place of its parameters in torch's calls only.
    own = [t.view_as(t) if t.requires_grad and t.layout is torch.strided else t for t in xs]
    results: tuple[Tensor, ...] = _Implicit.apply(problem, *own, *found)
    return results[0] if isinstance(y, Tensor) else results


def _no_hooks() -> AbstractContextManager[Any]:
    """Return a context without the hooks of a checkpoint, which counts the tensors that graphs save and read."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()  # torch.func takes no hooks
    return saved_tensors_hooks(_same, _same)


def _same(t: Tensor) -> Tensor:
    return t


_untraced = _disable_dynamo(_solve)  # the iterations read numbers, and differentiate


def _parts(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) or not isinstance(value, Iterable) else tuple(value)


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


class _Problem:
    """A user's loss and proximal function, called with flat tuples.

    The solution is the zero of `root`; with a proximal function, for any step.
    """

    def __init__(
        self, loss: Loss, proximal: Proximal | None, split: int, one_x: bool, one_y: bool, linear_steps: int
    ) -> None:
        self.loss, self.proximal, self.linear_steps = loss, proximal, linear_steps
        self.split, self.one_x, self.one_y = split, one_x, one_y
        self.step = 1.0
        self.fused = False  # whether the loss needs plain operations for its second derivative
        self.accepted = inf  # norm of `root` at y, above which the loss is no longer that which was solved
        self.minimum = False  # whether y should be a minimum: a solver of the user's may go to a saddle on purpose

    def structured(self, ys: Sequence[Tensor]) -> Any:
        return ys[0] if self.one_y else tuple(ys)

    def value(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        torch.clear_autocast_cache()  # its copies outlive the values they have, within an outer autocast
        found = self.loss(xs[0] if self.one_x else tuple(xs), self.structured(ys))
        if not isinstance(found, Tensor) or found.dim():
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"Invalid loss value: {shape} (solve needs a scalar tensor: use .sum() or .mean())")
        return found

    def evaluate(self, xs: Sequence[Tensor], ys: Sequence[Tensor], graph: bool = False) -> tuple[Tensor, Vector]:
        """Return the loss and its gradient in y; the y must require gradients."""
        with plain_operations() if graph and self.fused else nullcontext():
            value = self.value(xs, ys)
        if not value.requires_grad:
            raise ValueError("Invalid loss value: a constant (it must depend on y, by differentiable operations)")
        if graph and not self.fused and has(value, FUSED):
            self.fused = True
            return self.evaluate(xs, ys, graph=True)
        found = torch.autograd.grad(value, tuple(ys), create_graph=graph, materialize_grads=True)
        if graph and self.proximal is None and not any(t.requires_grad for t in found):
            raise ValueError(
                "Invalid loss value: piecewise linear in y, or of a backward that has no derivative (its Hessian is "
                "zero, so y has no derivative)"
            )
        return value.detach(), Vector(found)

    def project(self, xs: Sequence[Tensor], zs: Sequence[Tensor]) -> Vector:
        """Return the result of the proximal function."""
        assert self.proximal is not None
        result = self.proximal(xs[0] if self.one_x else tuple(xs), self.structured(zs), self.step)
        found = Vector(result) if isinstance(result, (tuple, list)) else Vector([result])
        if list(map(_form, found)) != list(map(_form, zs)):
            raise ValueError(
                f"Invalid proximal result: {', '.join(map(_form, found))} (it must be like y: "
                f"{', '.join(map(_form, zs))})"
            )
        if any(t.requires_grad for t in zs) and not all(t.requires_grad for t in found):
            raise ValueError("Invalid proximal result: a constant (it must depend on y, by differentiable operations)")
        return found

    def root(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Vector:
        """Return, with a graph, the gradient in y, or y minus the result of a proximal gradient step."""
        slope = self.evaluate(xs, ys, graph=True)[1]
        return slope if self.proximal is None else Vector(ys) - self.project(xs, Vector(ys) - slope * self.step)


class _System:
    """The derivative M of `root` in y, at a point: H, or I - P (I - s H), where P is that of the proximal function."""

    def __init__(self, problem: _Problem, xs: Vector, ys: Sequence[Tensor]) -> None:
        variables = _variables(ys, False)
        slope = problem.evaluate(xs, variables, graph=True)[1]
        self.step, self.ys, self.root = problem.step, Vector(variables).detach(), slope.detach()
        self.hessian, self.proximal = partial(_pulled, slope, variables), problem.proximal is not None
        if self.proximal:
            inner = _variables(self.ys - self.root * self.step, False)
            outer = problem.project(xs, inner)
            self.jacobian, self.root = partial(_pulled, outer, inner), self.ys - outer.detach()

    def explicit(self, v: Vector) -> Vector:
        return v - self.hessian(v) * self.step

    def product(self, v: Vector, transposed: bool) -> Vector:
        if not self.proximal:
            return self.hessian(v)
        return v - (self.explicit(self.jacobian(v)) if transposed else self.jacobian(self.explicit(v)))

    def solve(self, b: Vector, steps: int, transposed: bool) -> Vector:
        """Return v of M v = b, or of M'v = b.

        H and P are symmetric, M is not. But P M P = P (I - P) + s P H P is, and it gives the part of v in the range of
        P; the other part of v is explicit. With a projection P, this is the Hessian within the constraints.
        """
        if not self.proximal:
            return linear.minres(self.hessian, b, steps=steps).solution

        def within(u: Vector) -> Vector:
            return self.jacobian(u - self.explicit(self.jacobian(u)))

        right = self.jacobian(b if transposed else self.explicit(b))
        w = self.jacobian(linear.minres(within, right, steps=steps).solution)
        return b + (self.explicit(w) if transposed else w)

    def distance(self) -> float:
        """Return the length of Newton's step, an estimate of the error of y."""
        return float(self.solve(self.root, NEWTON_PRODUCTS, False).norm())

    def least_step(self, iterations: int = 10) -> float:
        """Return 1 / L, where L is the largest curvature, from power iterations."""
        v, size = self.root if float(self.root.norm()) else Vector(torch.ones_like(t) for t in self.ys), 0.0
        for _ in range(iterations):
            v = self.hessian(v * (1 / float(v.norm())))
            if not (size := float(v.norm())):
                break
        return 1 / size if size else 1.0


def _minimise(
    problem: _Problem, xs: Vector, start: Vector, minimiser: Minimiser | None, steps: int, tol: float | None
) -> Vector:
    """Return the minimiser, and warn if it is none."""
    with torch.enable_grad():
        limit = coarsest(start) ** 0.5 if tol is None else tol
        if minimiser is not None:
            ys = Vector(_parts(minimiser(lambda y: problem.value(xs, _parts(y)), problem.structured(start)))).detach()
        elif problem.proximal is None:
            ys = _polish(problem, xs, _System(problem, xs, _lbfgs(problem, xs, start, steps))).ys
        else:
            ys = _proximal_gradient(problem, xs, start, steps, limit)
        system = _System(problem, xs, ys)
        if system.proximal:
            problem.step = system.least_step()
            system = _System(problem, xs, ys)
        first = float(_System(problem, xs, start).root.norm())
        residual, changes = float(system.root.norm()), dict[float, float]()
        for factor in (0.5, LONGER) if system.proximal else ():
            problem.step *= factor
            changes[factor] = float(problem.root(xs, _variables(ys, False)).detach().norm())
            problem.step /= factor
    curved = float((ys if system.proximal else system.hessian(ys)).norm())
    scale, moved = max(first, curved), float((ys - start).norm())
    # A proximal function changes y by no more if the step is shorter, and no more than in proportion if it is longer.
    wrong = [k for k, change in changes.items() if change > max(1.0, k) * max(limit * scale, 2 * residual)]
    problem.accepted = 2 * max(limit * scale, residual)
    if wrong:
        part = "half of it" if wrong[0] < 1 else f"{wrong[0]:g} times of it"
        warn(
            f"proximal does not fit its step: a step of {problem.step:.2g} changes y by {residual:.2g}, but {part} "
            f"by {changes[wrong[0]]:.2g}, so y is wrong. A threshold, for example, must be multiplied by the step"
        )
    elif not residual <= limit * scale:
        measure = "a proximal gradient step changes y by" if system.proximal else "the gradient in y has norm"
        warn(
            f"the lower problem of solve is not solved: {measure} {residual:.2g}, more than {limit:.1g} of "
            f"{scale:.2g}, so y and its derivative are wrong. Take more steps, a minimiser of your own, or a loss with "
            "a minimum (a penalty on y)"
        )
    elif not system.proximal:
        # Small beside the gradient at the start, but not beside H y: so it is where y is 0, and where y runs away.
        if residual > limit * curved and not (distance := system.distance()) <= UNSOLVED * moved:
            warn(
                f"the lower problem of solve is not solved: the gradient in y has norm {residual:.2g} only, but "
                f"Newton's method changes y by {distance:.2g} more, after {moved:.2g} from the start, so y and its "
                "derivative are wrong. Take a loss with a minimum (a penalty on y), a minimiser of your own, or a "
                "smaller tol"
            )
    else:
        size = float(ys.norm())
        allowed = min(UNSOLVED * size, max(UNSOLVED * moved, limit * size))
        if residual > ROUNDING * coarsest(start) * size and not (distance := system.distance()) <= allowed:
            warn(
                f"the lower problem of solve is not solved: a proximal gradient step changes y by {residual:.2g} only, "
                f"but Newton's method by {distance:.2g} of {size:.2g}, {moved:.2g} from the start, so y and its "
                "derivative are wrong. Take more steps, float64, a minimiser of your own, or a smaller tol"
            )
    return ys


def _check(problem: _Problem, xs: Sequence[Tensor], ys: Vector, differentiated: bool) -> None:
    """Raise if a derivative that y, or its derivative, depends on is not that of the values."""
    variables, y = _variables(xs, False), [t.clone().requires_grad_() for t in ys]
    x = [t for t in variables if t.requires_grad and t.is_floating_point() and t.device == y[0].device]
    with torch.enable_grad():
        session = Session(options=EvaluationOptions(one_loss=True))
        oracle = Oracle(x, y, Tensor.sum, lambda: problem.value(variables, y), session=session)
        concerns = SECOND if differentiated and x else frozenset({"lower y", "lower yy"})
        require_right(oracle, concerns if differentiated else frozenset({"lower y"}))
        if differentiated and problem.proximal is not None:
            _check_projection(problem, variables, ys)


def _check_projection(problem: _Problem, xs: Sequence[Tensor], ys: Vector) -> None:
    """Raise if the derivative of the proximal function, near the point where it gives y, is not that of its values."""
    free = [k for k, t in enumerate(xs) if t.requires_grad and t.is_floating_point()]
    zs = ys - problem.evaluate(xs, _variables(ys, False))[1] * problem.step
    here = Vector([*(xs[k] for k in free), *zs]).detach()
    sizes, step = [float(t.norm()) or 1.0 for t in here], coarsest(here) ** (1 / 3)
    parts = range(len(free)), range(len(free), len(here))

    def project(at: Sequence[Tensor]) -> Vector:
        own = dict(zip(free, at, strict=False))
        return problem.project([own.get(k, t) for k, t in enumerate(xs)], at[len(free) :])

    def judged(at: Vector, part: range, seed: int) -> Judgement:
        """Compare the derivative along a direction in x, or in z, with differences."""
        variables = _variables(at, False)
        result, weights = project(variables), direction(ys, seed)
        along = Vector(t * sizes[k] * (k in part) for k, t in enumerate(direction(here, -seed)))
        slope = _pulled(result, variables, weights)
        own = Vector(slope[k] * sizes[k] for k in part)

        def difference(factor: float) -> Vector:
            with torch.no_grad():
                above, below = (weights.dot(project(at + along * e)) for e in (step * factor, -step * factor))
            return Vector([(above - below).reshape(1) / (2 * step * factor)])

        return compare(
            Vector([slope.dot(along).reshape(1)]),
            difference,
            size=float(own.norm()) / sum(t.numel() for t in own) ** 0.5,
            noise=4 * coarsest(here) * float(result.detach().norm()) / step,
            tolerance=TOLERANCE,
            clear=CLEAR_OF_KINKS,
        )

    try:
        at = Vector(t + d * (SHIFT * s) for t, d, s in zip(here, direction(here, 0), sizes, strict=True))
        with torch.no_grad():
            if not all([t.isfinite().all() for t in project(at)]):
                at = here
        outcomes = [[judged(at, part, seed) for seed in SEEDS] for part in parts if sum(here[k].numel() for k in part)]
    except Exception as error:  # it may be undefined there in any way; at the point itself it has run
        require_uninterrupted(error)
        return
    for found in outcomes:
        if {one.outcome for one in found} == {"wrong"}:
            remedy = f"Write it with operations of torch, and {LOOK}"
            raise DerivativeError("derivative of proximal, compared with differences,", found[0].error, "", remedy)


def _lbfgs(problem: _Problem, xs: Vector, start: Vector, steps: int) -> Vector:
    ys = [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in start]  # LBFGS takes views
    descent = torch.optim.LBFGS(ys, max_iter=steps, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        value, slope = problem.evaluate(xs, ys)
        for t, own in zip(ys, slope, strict=True):
            t.grad = own.contiguous()
        return value

    descent.step(closure)  # type: ignore[no-untyped-call]
    return Vector(ys).detach()


def _proximal_gradient(problem: _Problem, xs: Vector, start: Vector, steps: int, limit: float) -> Vector:
    """Return y after accelerated proximal gradient steps with restarts, and Newton's method from time to time.

    Sources: Beck, Teboulle (2009), SIAM J. Imaging Sci. 2(1), with backtracking; O'Donoghue, Candes (2015), Found.
    Comput. Math. 15, the restart by gradients.
    """
    eps = coarsest(start)
    problem.step = _System(problem, xs, start).least_step()
    y = point = start
    momentum, newton, first = 1.0, FIRST_NEWTON, 0.0
    for k in range(1, steps + 1):
        value, slope = problem.evaluate(xs, _variables(point, False))
        if not isfinite(float(value)) and point is not y:  # momentum has left the domain of the loss
            point, momentum = y, 1.0
            value, slope = problem.evaluate(xs, _variables(point, False))
        for _ in range(HALVINGS):
            new = problem.project(xs, point - slope * problem.step)
            move, after = new - point, problem.value(xs, new)
            rounding = 32 * eps * float(torch.maximum(value.abs(), after.abs()))
            if float(after - value - slope.dot(move)) <= float(move.dot(move)) / (2 * problem.step) + rounding:
                break
            problem.step /= 2
        else:
            return y  # the loss is not finite, or its gradient wrong
        size = float(move.norm())
        first = first or size
        if float(move.dot(new - y)) < 0:
            momentum = 1.0
        grown = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        point, momentum, y = new + (new - y) * ((momentum - 1) / grown), grown, new
        if size <= 2 * eps * float(y.norm()):
            break
        if k == newton:
            newton = max(k + FIRST_NEWTON, k * 3 // 2)
            system = _System(problem, xs, y)
            if (better := _polish(problem, xs, system)) is not system:
                y = point = better.ys
                momentum = 1.0
            elif size <= limit * max(first, float(y.norm())) and system.distance() <= limit * float(y.norm()):
                break
    return y


def _polish(problem: _Problem, xs: Vector, system: _System) -> _System:
    """Return the best point of some Newton steps; line searches end at half of the digits."""
    best = system
    for _ in range(NEWTON):
        newton = system.solve(system.root, NEWTON_PRODUCTS, False)
        if not system.proximal and float(newton.dot(system.root)) < -UPHILL * float(newton.norm() * system.root.norm()):
            break  # the loss has no minimum near, but a saddle or a maximum
        moved = system.ys - newton
        if system.proximal:  # zeros and bounds are exact
            slope = problem.evaluate(xs, _variables(moved, False))[1]
            moved = problem.project(xs, moved - slope * problem.step)
        system = _System(problem, xs, moved)
        if float(system.root.norm()) < float(best.root.norm()):
            best = system
        else:
            break
    return best


def _pulled(slope: Vector, variables: Sequence[Tensor], v: Sequence[Tensor], graph: bool = False) -> Vector:
    """Return the derivative of <slope, v>."""
    own = [(t, w) for t, w in zip(slope, v, strict=True) if t.requires_grad]  # others are constants
    free = [t for t in variables if t.requires_grad]  # others are integers
    if not own or not free:
        return Vector(torch.zeros_like(t) for t in variables)
    ends, weights = zip(*own, strict=True)
    options: dict[str, bool] = {"retain_graph": True, "create_graph": graph, "materialize_grads": True}
    found = iter(torch.autograd.grad(ends, free, weights, **options))
    return Vector(next(found) if t.requires_grad else torch.zeros_like(t) for t in variables)


def _variables(tensors: Sequence[Tensor], graph: bool) -> list[Tensor]:
    """Return aliases by which to differentiate: partial derivatives do not go through what a tensor was made of."""
    return [
        t.view_as(t) if graph and t.requires_grad else t.detach().requires_grad_(_has_derivative(t)) for t in tensors
    ]


def _has_derivative(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


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
        saved = ctx.saved_tensors  # read once, as torch's checkpoint demands
        v: tuple[Tensor, ...] = _Inverse.apply(problem, True, len(b), *b, *saved)
        with torch.enable_grad():
            tensors = _variables(saved, graph)
            xs, ys = tensors[: problem.split], tensors[problem.split :]
            cross = _pulled(problem.root(xs, ys), xs, v, graph)
        needed = ctx.needs_input_grad[1 : 1 + len(xs)]
        return None, *(-t if n else None for t, n in zip(cross, needed, strict=True)), *[None] * len(ys)


class _Inverse(torch.autograd.Function):
    """The solution v of M v = b, or of M'v = b, M the derivative of `root` at x and y, as a function of b, x and y."""

    @staticmethod
    def forward(ctx: Any, problem: _Problem, transposed: bool, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        try:
            b = Vector(tensors[:n]).detach()
        except RuntimeError as error:  # torch batches only operations without views
            raise RuntimeError(
                "solve takes one gradient at a time: leave out is_grads_batched=True of torch.autograd.grad, and "
                "vectorize=True of torch.autograd.functional"
            ) from error
        xs, ys = Vector(tensors[n : n + problem.split]).detach(), tensors[n + problem.split :]
        with torch.enable_grad():
            system = _System(problem, xs, ys)
            v = system.solve(b, problem.linear_steps, transposed)
            left = float((b - system.product(v, transposed)).norm()) / (float(b.norm()) or 1.0)
        if float(system.root.norm()) > problem.accepted:
            warn(
                "the loss of solve has changed between solve and backward (a module or a tensor that it reads), and y "
                "does not solve the new one, so the gradient is wrong. Change them after backward"
            )
        elif not left <= UNSOLVED:
            warn(
                f"the linear system of solve is not solved: its residual is {left:.2g} of its right-hand side, so the "
                "gradient is wrong. Take more linear_steps, or a penalty on y in the loss if its Hessian is singular"
            )
        elif problem.minimum and float(v.dot(b)) < -UPHILL * float(v.norm() * b.norm()):
            warn(
                "y of solve is at a saddle or a maximum of the loss, not at a minimum: its curvature is negative along "
                "a direction on which the result depends, so the gradient is that of a stationary point. Start y "
                "elsewhere"
            )
        ctx.problem, ctx.transposed, ctx.n = problem, transposed, n
        ctx.save_for_backward(*v, *tensors[n:])
        return tuple(v)

    @staticmethod
    def backward(ctx: Any, *b: Tensor) -> tuple[Tensor | None, ...]:
        problem, n, graph = ctx.problem, ctx.n, torch.is_grad_enabled()
        saved = ctx.saved_tensors
        v, others = saved[:n], saved[n:]
        u: tuple[Tensor, ...] = _Inverse.apply(problem, not ctx.transposed, n, *b, *others)
        with torch.enable_grad():
            tensors = _variables(others, graph)
            xs, ys = tensors[: problem.split], tensors[problem.split :]
            left, right = (v, u) if ctx.transposed else (u, v)
            product = _pulled(problem.root(xs, ys), ys, left, True)
            found = _pulled(product, tensors, right, graph)
        return None, None, None, *u, *(-t if _has_derivative(t) else None for t in found)

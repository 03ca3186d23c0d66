"""iMCN: inexact minimax cubic Newton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..hypergradient import Estimate
from ..optimizer.declaration import MethodInfo
from ..optimizer.minimax import MinimaxOptimizer
from ..optimizer.options import InitVar, count, number, option
from ..optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs, Update, replace
from ..oracle.oracle import Oracle, UpperSystem
from ..problem.random import uniform_ball
from ..problem.vector import Vector
from ..solvers import linear
from ..solvers.agd import agd_or

__all__ = ["iMCN"]


class iMCN(MinimaxOptimizer):
    r"""Inexact minimax cubic Newton, the second-order baseline for minimax problems.

    .. math::
        y &\leftarrow \text{Nesterov ascent on } f(x, \cdot) \quad (\text{lower\_steps}), \qquad
             H = \nabla^2_{xx} f - \nabla^2_{xy} f\, [\nabla^2_{yy} f]^{-1} \nabla^2_{yx} f,\\
        s &\approx \arg\min_s\ m(s) = \nabla_x f^\top s + \tfrac12 s^\top H s + \tfrac{M}{6} \|s\|^3, \qquad
        x \leftarrow x + s.

    The model is minimised by ``cubic_steps`` gradient steps of size ``lr`` from the perturbed Cauchy point; conjugate
    gradients replace the inverse.

    *When.* As a baseline with few outer steps, each of many Hessian-vector products. *Needs* second derivatives and
    strong concavity in y.

    *Cost per step*: ``lower_steps`` lower gradients, 1 upper gradient, (``cubic_steps`` + 2)(``linear_steps`` + 2)
    joint Hessian-vector products, each counted as one Hessian-vector and one cross product (fewer where CG is exact).
    *Draws*: one batch for each lower step, then one.

    ``.grad`` of x is set to -s / lr, so that gradient descent makes the step s. Any other use of ``.grad`` is a
    different method.

    Args:
        upper: upper parameters x, which descend.
        lower: lower parameters y, which ascend.
        lr: step size in the minimisation of the model, below 2 / (largest eigenvalue of H).
        lower_lr: learning rate of the ascent steps.
        lower_steps: ascent steps per outer step.
        lower_momentum: as in `RAHGD`. Default: 0.
        cubic: M > 0, about the Lipschitz constant of H. Default: 1.
        cubic_steps: gradient steps on the model. Default: 10.
        linear_steps: maximum iterations of CG for one product with H. Default: 10.
        perturbation: radius of the perturbation of the Cauchy point. Default: 1e-3.
        tol: once the model decreases by less than this, it is minimised further, by ten times the steps, and the run
            ends: ``converged`` is True and ``step`` does nothing. Costs a host synchronisation. Default: 0, never.
        warm_start, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            lower_clip, lower_projection: see `BilevelOptimizer`.

    State: the state of a ``lower_optimizer``, and ``initial`` y without warm starts. Attribute ``converged``.

    Raises:
        ValueError: for an argument out of its range, or ``hvp="finite-difference"``.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = iMCN([x], [y], lr=0.5, lower_lr=1.0, lower_steps=1, cubic=1e-3, cubic_steps=20)
        >>> for _ in range(2):  # max_y f = x^2, one Newton step
        ...     loss = optimizer.step(lambda: (x * y - y**2 / 2 + x**2 / 2).sum())
        >>> bool(x.abs() < 1e-2)
        True

    Source: Luo, Li, Chen (2022), arXiv:2110.04814.
    """

    declared = MethodInfo(
        uncaptured=(
            "a step draws the perturbation of its Cauchy point, and with tol the host decides from a value whether the "
            "run ends"
        ),
        paper="arXiv:2110.04814",
        family="minimax",
        when="second-order baseline: few outer steps, each of many products",
        cost="T lower, 1 upper, (cubic_steps + 2) (linear_steps + 2) hvp and jvp",
        losses=1,
        tasks="none",
        random=True,
        converges=False,
        upper_update="the minimiser of a cubic model",
    )

    lr: InitVar[float] = option()
    lower_lr: InitVar[float | None] = option(default=None)
    lower_momentum: InitVar[float] = option(default=0.0)
    cubic: float = number(default=1.0, above=0)
    cubic_steps: int = count(default=10)
    linear_steps: int = count(default=10)
    perturbation: float = number(default=1e-3, least=0)
    tol: float = number(default=0.0, least=0, finite=False)

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        if options["hvp"] == "finite-difference":
            raise ValueError(
                "Invalid hvp value: finite-difference (iMCN needs exact Hessian-vector products; leave out hvp)"
            )
        self._own_solver = options["lower_optimizer"] is None
        options["lower_optimizer"] = agd_or(options["lower_optimizer"], options["lower_momentum"])

    @property
    def converged(self) -> bool:
        """True once the run has ended."""
        return bool(self.numbers.get("converged", False))

    def _finished(self) -> bool:
        """Return True if ``step`` has nothing left to do and returns the last loss."""
        return self.converged

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return the draws of the ascent steps, then one for x."""
        return [LOWER] * self.lower_steps + [UPPER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the ascent steps, and return the gradient whose step minimises the cubic model there."""
        inputs = replace(inputs, solver=None) if self._own_solver else inputs
        point, moved = inputs.run_lower_steps(oracle, self.lower_steps)
        rates = inputs.upper_rates
        with point.upper_system(point.f.draw()) as system:
            model = _CubicModel(point, system, self.cubic, self.linear_steps)
            s = model.cauchy_point()
            if self.perturbation > 0:
                s = s + inputs.ranks.copy_from_first(uniform_ball(oracle.x, self.perturbation, inputs.generator))
            s = model.descended(s, rates, self.cubic_steps)
            decrease, _ = model.at(s)
            ending = self.tol > 0 and bool(decrease < self.tol)
            if ending:
                s = model.descended(s, rates, 10 * self.cubic_steps)
        oracle.checks.finite("hvp", s)
        gradient = s * [-1 / rate if rate > 0 else 0.0 for rate in rates]
        estimate = Estimate(system.loss, gradient, {"model_decrease": decrease}, numbers={"ending": ending})
        estimate = estimate.with_lower(moved)
        return replace(estimate, solver=None if self._own_solver else estimate.solver)

    def update(self, x: Vector, gradient: Vector, inputs: StepInputs) -> Update:
        """Make the step, and record whether it was the last."""
        return replace(super().update(x, gradient, inputs), numbers={"converged": inputs.numbers.get("ending", False)})


class _CubicModel:
    """The model m(s) around the oracle's point, with conjugate gradients in place of the inverse."""

    def __init__(self, oracle: Oracle, system: UpperSystem, cubic: float, linear_steps: int) -> None:
        self.oracle, self.system, self.cubic, self.linear_steps = oracle, system, cubic, linear_steps
        self.gradient = Vector(system.gradient[: len(oracle.x)])

    def cauchy_point(self) -> Vector:
        """Return the minimiser along the gradient."""
        norm = self.gradient.norm()
        safe = torch.where(norm > 0, norm, 1.0)
        unit = self.gradient * (1 / safe)
        slope = unit.dot(self.hessian(unit)) / self.cubic
        length = (slope**2 + 2 * norm / self.cubic).sqrt() - slope
        return unit * torch.where(norm > 0, -length, 0.0)

    def descended(self, s: Vector, rates: Sequence[float], steps: int) -> Vector:
        """Return s after gradient steps on the model."""
        for _ in range(steps):
            s = s.descended(self.at(s)[1], rates)
        return s

    def at(self, s: Vector) -> tuple[Tensor, Vector]:
        """Return how much less the model is than at zero, and its gradient."""
        bent, norm = self.hessian(s), s.norm()
        decrease = -(self.gradient.dot(s) + bent.dot(s) / 2 + self.cubic / 6 * norm**3)
        return decrease, self.gradient + bent + s * (self.cubic / 2 * norm)

    def hessian(self, s: Vector) -> Vector:
        """Return H s; CG inverts -d2f/dy2, which is positive definite."""
        system, split = self.system, len(self.oracle.x)
        nothing_x, nothing_y = self.oracle.x.zeros_like(), self.oracle.y.zeros_like()
        product = system.product(Vector((*s, *nothing_y)))
        v = linear.cg(
            lambda p: -Vector(system.product(Vector((*nothing_x, *p)))[split:]),
            product[split:],
            steps=self.linear_steps,
        ).solution
        return Vector(product[:split]) + Vector(system.product(Vector((*nothing_x, *v)))[:split])

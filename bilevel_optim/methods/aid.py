"""AID: approximate implicit differentiation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..hypergradient import Estimate, implicit
from ..optimizer.base import BilevelOptimizer
from ..optimizer.declaration import MethodInfo
from ..optimizer.options import InitVar, choice, count, flag, function, number
from ..optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs, replace
from ..oracle.oracle import Oracle
from ..solvers import linear
from ..solvers.linear import LinearSolution

__all__ = ["AID"]

_SOLVE: dict[str, Callable[..., LinearSolution]] = {
    "cg": linear.cg,
    "minres": linear.minres,
    "direct": linear.direct,
    "auto": linear.cg,  # until it meets non-positive curvature
    "neumann": linear.neumann,
    "fixed_point": linear.fixed_point,
}


class AID(BilevelOptimizer):
    r"""Approximate implicit differentiation (AID-BiO): lower steps, one linear system with the lower Hessian.

    .. math::
        y &\leftarrow y - \alpha \nabla_y g(x, y) \quad (\text{lower\_steps times}),\\
        v &\approx [\nabla^2_{yy} g(x, y)]^{-1} \nabla_y f(x, y),\\
        x &\leftarrow x - \text{lr}\, (\nabla_x f(x, y) - \nabla^2_{xy} g(x, y)\, v).

    *When.* The first choice when Hessian-vector products are affordable: memory does not grow with ``lower_steps``, and
    with warm starts of y and v a few steps of each suffice. *Needs* a lower loss that is twice differentiable, and
    strongly convex in y (or ``damping``). The error is :math:`O(\|y - y^*\|) + O(\|v - v^*\|)`: linear in both.

    *Cost per step*: ``lower_steps`` + 1 lower gradients, 1 upper gradient, about ``linear_steps`` (+ 1 for a warm
    start, + 1 to check the solution unless ``check_finite=False``) Hessian-vector products (``"direct"``: one for each
    lower parameter), 1 cross product. *Draws*: one lower
    batch for each lower step, then one upper batch, then one lower batch shared by all products.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step.
        linear_solver: ``"cg"``, conjugate gradients (fastest; H must be positive definite); ``"minres"``, minimal
            residuals (H may have negative eigenvalues, as in deep networks away from their minima); ``"auto"``, CG
            until it meets non-positive curvature or fails otherwise, which is told once, then MINRES, as
            ``diagnostics["linear_solver"]`` says from the next step on (CG stays with ``check_finite=False``);
            ``"direct"``, an LU factorisation of the explicit Hessian: as exact as the dtype allows (it warns if H is
            singular up to rounding errors), for at most 4,096 lower parameters (of each task); ``"neumann"``, the
            series :math:`\eta \sum_{i \le Q} (I - \eta H)^i`, always from zero; ``"fixed_point"``, the same iteration
            from a warm start. Default: ``"cg"``.
        linear_steps: maximum iterations of the linear solver, about one Hessian-vector product each. Default: 10.
        linear_tol: stop when the residual is below this fraction, less than 1, of the right-hand side. Default: 0, use
            all steps (CG and MINRES stop by themselves at the rounding level).
        linear_lr: :math:`\eta` of ``"neumann"`` and ``"fixed_point"``, below :math:`2/\lambda_{\max}(H)`. Default: the
            learning rate of the lower groups.
        damping: solve with :math:`H + \delta I`; biases the hypergradient. Default: 0.
        lower_solver: a function without arguments that writes a solution of the lower problem at the current x into the
            live y, by any means (Newton's method, a simulator). It is called before each step, and ``lower_steps``
            (possibly 0) continue from there. Warns if y is not a solution. Not for tasks; such steps are not compiled.
            Default: None.
        warm_start: start y and v at their last values (MINRES at zero where that has the smaller residual, CG where it
            is the better start, see `bo.linear.cg`). Default: True. With tasks, v starts from zero at every
            step, unless ``task_memory=True`` keeps it.
        keep_direction: go on with the last direction of CG too, so that steps at the same point make the iterates of
            one long solve. It costs no product. Far better where H is ill-conditioned and x moves slowly; no better
            where H is well-conditioned or changes at random; worse where H is indefinite, or ill-conditioned and
            ``linear_steps=1``. Needs ``warm_start`` and ``"cg"`` or ``"auto"``. Default: False, as in the source.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.

    State: ``linear_solution`` (v), ``linear_direction`` with ``keep_direction``, the lower optimizer's state, and
    ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = AID([x], [y], lr=0.5, lower_steps=1)
        >>> for _ in range(30):  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 4)
        1.0

    Source: Ji, Yang, Liang (2021), arXiv:2010.07962 (AID-BiO); Pedregosa (2016), arXiv:1602.02355; Grazzi et al.
    (2020), arXiv:2006.16218.
    """

    declared = MethodInfo(
        paper="arXiv:2010.07962",
        family="implicit",
        when="first choice where Hessian-vector products are affordable; memory does not grow with T",
        cost="T + 1 lower, 1 upper, Q hvp (+ 1 for a warm start, + 1 to check), 1 jvp; Q = linear_steps",
        kept_by_tasks=("linear_solution",),
    )

    linear_solver: str = choice(*_SOLVE, default="cg")
    linear_steps: int = count(default=10)
    linear_tol: float = number(default=0.0, least=0, below=1)  # 1: v = 0, no indirect term
    linear_lr: float | None = number(default=None, above=0, optional=True)
    damping: float = number(default=0.0, least=0)
    keep_direction: bool = flag(default=False)
    lower_solver: InitVar[Callable[[], Any] | None] = function(default=None)

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        if options["keep_direction"] and not (options["warm_start"] and options["linear_solver"] in ("cg", "auto")):
            raise ValueError(
                "keep_direction=True continues conjugate gradients from step to step, so it needs warm_start=True and "
                f"linear_solver='cg' or 'auto', not warm_start={options['warm_start']} and linear_solver="
                f"{options['linear_solver']!r}"
            )
        self._lower_solver = options["lower_solver"]

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return the draws of the lower steps, then one of each level for the linear system."""
        return [LOWER] * self._lower_step_count(inputs.steps) + [UPPER, LOWER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the lower steps, then solve the linear system at their end, with a warm start from its last solution."""
        here, moved = inputs.run_lower_steps(oracle, self._lower_step_count(inputs.steps))
        dense = self.linear_solver == "direct"
        warm = self.warm_start and self.linear_solver != "neumann" and not dense
        start = inputs.memory.get("linear_solution") if warm else None
        solve, keep = self._linear_solve(inputs), self.keep_direction
        estimate = implicit(here, solve, start, dense=dense, check=self.check_finite, keep_direction=keep)
        chosen = {name: inputs.numbers[name] for name in ("linear_solver",) if name in inputs.numbers}
        return replace(estimate, numbers=chosen, memory=estimate.memory if warm else {}).with_lower(moved)

    def _static_diagnostics(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the solver to which ``"auto"`` has changed in an earlier step."""
        return {name: numbers[name] for name in ("linear_solver",) if name in numbers}

    def _linear_solve(self, inputs: StepInputs) -> Callable[..., LinearSolution]:
        """Return the linear solver with its arguments."""
        name = inputs.numbers.get("linear_solver", self.linear_solver)
        if name == "direct":
            return partial(linear.direct, damping=self.damping)
        stop = partial(_SOLVE[name], steps=self.linear_steps, tol=self.linear_tol, damping=self.damping)
        if name in ("neumann", "fixed_point"):
            return partial(stop, lr=inputs.linear_rates(self.linear_lr))
        if self.keep_direction and name != "minres":
            return partial(stop, direction=inputs.memory.get("linear_direction"))
        return stop

    def _reacts_to(self, numbers: Mapping[str, Any]) -> str | None:
        """Return the alert that makes the solver change; None if it cannot change."""
        return "unsolved system" if self.linear_solver == "auto" and "linear_solver" not in numbers else None

    def _react(self, oracle: Oracle, inputs: StepInputs, estimate: Estimate) -> tuple[Oracle, StepInputs]:
        """Change from CG to MINRES."""
        return oracle, replace(inputs, numbers={**inputs.numbers, "linear_solver": "minres"})

"""StocBiO and AmIGO: stochastic implicit differentiation with two loops; base class of the Neumann series methods."""

from __future__ import annotations

from functools import partial

from ...hypergradient import Estimate, ImplicitSamples, stochastic_implicit
from ...optimizer.base import BilevelOptimizer
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import count, number
from ...optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs, replace
from ...oracle.oracle import Oracle
from ...problem.vector import Vector
from ...solvers import linear

__all__ = ["AmIGO", "NeumannMethod", "StocBiO"]


class NeumannMethod(BilevelOptimizer):
    """Base class of the methods with a stochastic Neumann series: its length, step size, samples and estimate.

    Args:
        upper, lower, lr, lower_lr, lower_steps: see `BilevelOptimizer`.
        linear_steps: Q, the number of products; for the randomised series N, the number of terms.
        linear_lr: its step size. Default: the learning rate of the lower groups.
        common: see `BilevelOptimizer`.
    """

    _randomised = False  # one random term, times the number of terms, instead of the sum of all

    linear_steps: int = count(default=10)
    linear_lr: float | None = number(default=None, above=0, optional=True)

    def _random_inputs(self) -> dict[str, int]:
        """Return the range of the number of products of a randomised series."""
        return {"products": self.linear_steps} if self._randomised else {}

    def _samples(self, oracle: Oracle, inputs: StepInputs) -> ImplicitSamples:
        """Draw the samples for one estimate; a randomised series takes as many as its term needs."""
        if not self._randomised:
            return ImplicitSamples.draw(oracle, self.linear_steps)
        return ImplicitSamples.draw_some(oracle, inputs.random_inputs["products"], self.linear_steps - 1)

    def _sample_draws(self) -> list[Draw]:
        """Return the draws of `_samples`; for a randomised series, the most it may make."""
        if not self._randomised:
            return [UPPER] + [LOWER] * (self.linear_steps + 1)
        return [UPPER, LOWER, *(Draw("lower", only=("products", k)) for k in range(1, self.linear_steps))]

    def _hypergradient(self, oracle: Oracle, samples: ImplicitSamples, inputs: StepInputs) -> Estimate:
        """Return the estimate on these samples at the oracle's point, without state."""
        lr = inputs.linear_rates(self.linear_lr)
        if self._randomised:
            steps = len(samples.products) if samples.number is None else samples.number
            solve = partial(linear.neumann_term, steps=steps, terms=self.linear_steps, lr=lr)
        else:
            solve = partial(linear.neumann, steps=self.linear_steps, lr=lr)
        return replace(stochastic_implicit(oracle, samples, solve), memory={})

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return the draws of the lower steps, then those of the series."""
        return [LOWER] * self._lower_step_count(inputs.steps) + self._sample_draws()

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the lower steps, then evaluate the series at their end."""
        here, moved = inputs.run_lower_steps(oracle, self._lower_step_count(inputs.steps))
        return self._hypergradient(here, self._samples(oracle, inputs), inputs).with_lower(moved)


class StocBiO(NeumannMethod):
    r"""Stochastic bilevel optimiser (stocBiO): lower steps, then a Neumann series with a fresh batch in every factor.

    .. math::
        y &\leftarrow y - \alpha \nabla_y g(x, y; \zeta) \quad (\text{lower\_steps times, each on a new batch}),\\
        v &= \eta \sum_{q=0}^{Q} \prod_{j=1}^{q} (I - \eta \nabla^2_{yy} g(x, y; \zeta_j))\, \nabla_y f(x, y; \xi),\\
        x &\leftarrow x - \text{lr}\, (\nabla_x f(x, y; \xi) - \nabla^2_{xy} g(x, y; \zeta_0)\, v).

    *When.* Stochastic losses with batches that are large enough for a meaningful Hessian-vector product; the simplest
    of the stochastic methods with second derivatives. *Needs* a lower loss that is strongly convex in y, and
    :math:`\eta \le 1/L` on every batch. The mean of v is the truncated series at the mean Hessian, with bias
    :math:`O((1 - \eta\mu)^{Q+1})`.

    *Cost per step*: ``lower_steps`` lower gradients, 1 upper gradient, Q Hessian-vector products, 1 cross product.
    *Draws*: one lower batch for each lower step, one upper batch, one lower batch for each product, one for the cross
    product.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step.
        linear_steps: Q, the number of products. Default: 10.
        linear_lr: :math:`\eta`. Default: the learning rate of the lower groups.
        warm_start: start y at its last value. Default: True.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.

    State: the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = StocBiO([x], [y], lr=0.5, lower_steps=5)
        >>> for _ in range(30):  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 4)
        1.0

    Source: Ji, Yang, Liang (2021), arXiv:2010.07962 (there the batches of the factors may shrink geometrically).
    """

    declared = MethodInfo(
        paper="arXiv:2010.07962",
        family="stochastic",
        when="noisy second derivatives, batches large enough for a meaningful product; the simplest",
        cost="T lower, 1 upper, Q hvp, 1 jvp; Q = linear_steps",
    )


class AmIGO(BilevelOptimizer):
    r"""Amortised implicit gradient optimisation (AmIGO): warm-started stochastic steps on y and on the linear system.

    .. math::
        y &\leftarrow y - \alpha \nabla_y g(x, y; \zeta) \quad (\text{lower\_steps times}),\\
        v &\leftarrow v - \eta (\nabla^2_{yy} g(x, y; \zeta_j)\, v - \nabla_y f(x, y; \xi))
        \quad (\text{linear\_steps times}),\\
        x &\leftarrow x - \text{lr}\, (\nabla_x f(x, y; \xi) - \nabla^2_{xy} g(x, y; \zeta_0)\, v).

    *When.* As `StocBiO`, and better conditioned by the warm start of v: its error is carried over and shrinks from step
    to step, so few linear steps suffice. *Needs* a lower loss that is strongly convex in y, and :math:`\eta < 2/L` on
    every batch.

    *Cost per step*: ``lower_steps`` lower gradients, 1 upper gradient, ``linear_steps`` Hessian-vector products (one
    less where v starts from zero), 1 cross product. *Draws*: one lower batch for each lower step, one upper batch, one
    lower batch for each product, one for the cross product.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step.
        linear_steps: steps on the linear system. Default: 10.
        linear_lr: :math:`\eta`. Default: the learning rate of the lower groups.
        warm_start: start y and v at their last values. Default: True. With tasks, v starts from zero at every
            step, unless ``task_memory=True`` keeps it.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip, lower_projection: see
            `BilevelOptimizer`.

    State: ``linear_solution`` (v), the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = AmIGO([x], [y], lr=0.5, lower_steps=2, linear_steps=2)
        >>> for _ in range(50):
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 4)
        1.0

    Source: Arbel, Mairal (2022), arXiv:2111.14580.
    """

    declared = MethodInfo(
        paper="arXiv:2111.14580",
        family="stochastic",
        when="as StocBiO, with a warm-started linear system: few linear steps suffice",
        cost="as StocBiO",
        kept_by_tasks=("linear_solution",),
    )

    linear_steps: int = count(default=10, least=1)
    linear_lr: float | None = number(default=None, above=0, optional=True)

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return the draws of the lower steps, an upper one, one for each product (not for a zero start), one more."""
        products = self.linear_steps - (self._solution(inputs) is None)
        return [LOWER] * self.lower_steps + [UPPER] + [LOWER] * (products + 1)

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the lower steps, then steps on the linear system from its last solution."""
        here, moved = inputs.run_lower_steps(oracle, self.lower_steps)
        start = self._solution(inputs)
        samples = ImplicitSamples.draw(oracle, self.linear_steps - (start is None))
        solve = partial(_sampled_steps, steps=self.linear_steps, lr=inputs.linear_rates(self.linear_lr))
        estimate = stochastic_implicit(here, samples, solve, start)
        return (estimate if self.warm_start else replace(estimate, memory={})).with_lower(moved)

    def _solution(self, inputs: DrawInputs) -> Vector | None:
        """Return v from the last step; None at the start."""
        return inputs.memory.get("linear_solution") if self.warm_start else None


def _sampled_steps(
    product: linear.Product, b: Vector, start: Vector | None, *, steps: int, lr: list[float], lanes: bool = False
) -> linear.LinearSolution:
    """Run fixed-point steps with a sample for each product, whose residuals say little of growth: compare v itself."""
    result = linear.fixed_point(product, b, start, steps=steps, lr=lr, lanes=lanes)
    if start is None or result.relative is None:
        return result
    norm = Vector.lane_norm if lanes else Vector.norm
    most = norm(start) + norm(b * lr) * steps  # no more if each sample's Hessian is between 0 and 2 / lr
    size = norm(result.solution)
    return result._replace(diverged=(size > 1.5 * most) | ((size > most) & (result.relative > 10)))

"""F2SA-p: fully first-order stochastic approximation with p-th order finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..errors import DATA_FIRST, warn
from ..hypergradient import Estimate, penalty
from ..hypergradient.finite_difference import KINDS, Stencil, inner_weights, stencil
from ..optimizer.base import BilevelOptimizer
from ..optimizer.declaration import MethodInfo
from ..optimizer.options import choice, count, flag, number
from ..optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs, Update, replace
from ..oracle.copies import Copies
from ..oracle.differentiable import working_unit
from ..oracle.oracle import Oracle
from ..problem.objective import Sample
from ..problem.parameters import Rate
from ..problem.placement import constant
from ..problem.vector import Later, Vector, coarsest, stack
from ..solvers.lower import LowerResult, largest_rate
from ..tracing import is_tracing

__all__ = ["F2SA"]

stencil_of = cache(stencil)
SAMPLES = ("shared", "independent")
LARGEST_NU = 1.0  # a larger value is taken for a mistake
NOISY_NU = 1e-2  # with independent samples, whose noise is divided by nu
SHARE = 0.6  # of the step that balances the errors at unit scale: more than that costs more than less
LONGEST = 0.035  # by default, for order 2 and more: a copy at a negative node may have no minimum at a larger one
DIVERGED = f"{DATA_FIRST}, a smaller lower_lr helps, or if copies at negative nodes diverge a smaller nu"
ROUNDING_LIMIT = 0.05  # rounding of the losses over nu above which their differences are unreliable
SPREAD_LIMIT = 10.0  # how much further from y* one copy may be than another, per unit of its perturbation
LEAVING = 10.0  # how much further a negative node's copy may go than a positive node's while its gradient grows
PARTING = 10.0  # how much further both copies may go, and apart, than steps along gradients that do not grow
MOVED = 5e-3  # smallest movement that matters, as a fraction of the distance between the two copies
UNEVEN = (
    "the copies of y are not similarly far from y* for their perturbations (see diagnostics['spread']), so their "
    "difference is not a derivative: use more lower_steps, or a smaller nu"
)
BASIN = (
    "the lower loss is smaller at the perturbed copy of y than at y, by more than such a perturbation explains: y is "
    "not at a minimum (a saddle, such as weights of zero), or the two are in different minima, so their difference is "
    "not a derivative. Start y elsewhere, or add a penalty that makes the lower solution unique"
)
PARTED = (
    "the copies of y went apart from their common start, and further than steps along gradients that do not grow: y is "
    "at a saddle or a maximum of the lower loss (such as weights of zero), and the copies may be in different minima, "
    "so their difference is not a derivative. Start y elsewhere, or add a penalty that makes the lower solution unique"
)


class F2SA(BilevelOptimizer):
    r"""Fully first-order stochastic approximation (F2SA-p): no second derivatives at all.

    Copies :math:`y_j` follow perturbed lower problems, :math:`y_j \approx \arg\min_y g(x, y) + j\nu f(x, y)`, and a
    finite difference in :math:`\nu` of order p with nodes j and weights :math:`c_j` gives the hypergradient:

    .. math::
        y_j &\leftarrow y_j - \alpha\,(\nabla_y g(x, y_j) + j\nu \nabla_y f(x, y_j))
            \quad (\text{lower\_steps times}),\\
        \Psi &= \textstyle\sum_j c_j\,[\,j\,\nabla_x f(x, y_j) + \nabla_x g(x, y_j)/\nu\,],\\
        x &\leftarrow x - \text{lr}\; \Psi/\|\Psi\|
            \quad\text{(or } x - \text{lr}\,\Psi \text{ with normalize=False).}

    Order 1 is F2SA of Kwon et al.; order 2 costs the same two copies and has error :math:`O(\nu^2)` instead of
    :math:`O(\nu)`.

    *When.* Lower models too large or too awkward for Hessian-vector products (fused attention, compiled modules,
    sharded parameters); noisy data. *Needs* first derivatives only, p copies of y (p + 1 for odd orders), and a lower
    loss that stays strongly convex under the perturbations: negative nodes need
    :math:`|j|\nu\,\lambda_{\max}([\nabla^2_{yy} g]^{-1} \nabla^2_{yy} f) < 1`. For a lower problem that is not convex
    use order 1, whose perturbation :math:`g + \nu f` is never unbounded when f is not.

    *Choosing nu.* It is not scale free: multiplying g by s multiplies the right nu by s. In units of 1/r,
    r the :math:`\lambda_{\max}` above, rounding and truncation balance near 5e-3 (order 2), 3e-2 (4) and 7e-2 (6) in
    float32, and near 7e-6, 6e-4 and 4e-3 in float64. The default is :math:`0.6\, u^{1/(p+1)} / p`, with u the precision
    of the losses: 2.1e-4 (order 1), 1.5e-3 (2) and 6.2e-3 (4) in float32, 8.9e-9, 1.8e-6 and 1.1e-4 in float64. Under
    bfloat16 autocast around the step it is 0.053 for order 1, and at most 0.035 for others, whose copies at negative
    nodes may have no minimum at a larger one. Test a choice with `check_hypergradient`.
    With ``samples="shared"`` sampling noise does not grow as nu falls; with independent samples it grows like 1/nu.

    *Cost per step*, n copies: n ``lower_steps`` lower and upper gradients in y, n of each in x (node 0 needs no upper
    gradient, only one value of f). *Draws*: for each lower step one upper and one lower batch, shared by the copies (n
    of each with ``samples="independent"``); then one of each for the difference, always shared.

    The live y is set to :math:`\sum_j w_j y_j`, the copies extrapolated to :math:`\nu = 0` (their mean for order 2; the
    unperturbed copy where there is one), with error :math:`O(\nu^p)`. If it is changed from outside between two steps,
    the copies move with it. Module buffers (running statistics) advance once per step, at the live y.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x: the length of a step if ``normalize``.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step, for each copy.
        order: p >= 1, the order of the finite difference. Default: 2.
        nu: :math:`\nu > 0`, the step of the finite difference, 1 / (penalty multiplier). Default: None, by the
            precision and the order, as above; 1e-2 with independent samples.
        stencil: ``"central"`` (even p), ``"forward"`` (nodes 0 to p; no negative perturbations, but weights that grow
            like :math:`2^p`), ``"centred"`` (odd p, nearly central), or ``"auto"``: central for even p, forward for odd
            p, and a change to forward, with a warning, when copies at negative nodes diverge. Default: ``"auto"``.
        samples: ``"shared"`` or ``"independent"`` batches for the copies in the lower steps. Default: ``"shared"``.
        normalize: divide the step by the norm of the estimate over all of x, as in the paper. ``.grad`` is never
            normalised. Default: None, which is True without an ``upper_optimizer``, and False with one, so that a step
            equals ``backward`` and then a step of that optimizer.
        warm_start, upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp,
            process_group, tasks_per_step, lower_batch, upper_batch, lower_init, task_memory, lower_clip,
            lower_projection: see `BilevelOptimizer`. The lower optimizer acts on stacked copies, so it must treat each
            entry independently (SGD, Adam; not LBFGS).

    *Departures from the paper*, the largest first. The copies share their samples; the paper draws for each copy
    (``samples="independent"``). Its algorithm draws one pair of samples per outer step and keeps it for all lower
    steps; here each lower step has fresh ones, which the proof needs. nu is chosen once; the theorem ties nu and all
    rates to the accuracy (``recipes/papers/theory.py``, too conservative in practice). The result is the last x, not
    one drawn from all. The paper prints equal weights for j and -j; a derivative needs opposite signs, as here. The
    algorithm of the paper, with rates of your own:

        >>> PAPER = {"order": 2, "samples": "independent", "normalize": True, "warm_start": True}
        >>> import torch
        >>> x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = F2SA([x], [y], lr=0.1, lower_steps=10, nu=1e-2, **PAPER)

    State: ``copies`` (a leading dimension of n), the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range, or an order that the stencil does not have.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = F2SA([x], [y], lr=0.1, lower_steps=60, order=2, nu=1e-2)
        >>> loss = optimizer.backward(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> x.grad.round(decimals=3)  # exact hypergradient: 1; relative error nu^2
        tensor([1.])

    Source: Chen, Li, Zhang (2025), arXiv:2509.02937 (F2SA-p); Kwon et al. (2023), arXiv:2301.10945 (F2SA).
    """

    declared = MethodInfo(
        paper="arXiv:2509.02937",
        family="penalty",
        when="lower models too large or too awkward for Hessian-vector products; noisy data",
        cost="p (T + 1) upper and lower, p = order; if p is odd (p + 1) (T + 1) lower and 1 loss",
        second_order=False,
        copies=True,
        lower_optimizer="elementwise",
        difference_step="nu",
        fixed_length="normalize",
    )

    order: int = count(least=1, default=2)
    given_nu: float | None = number(default=None, above=0, optional=True, saved=True, alias="nu")
    _given_stencil: str = choice(*KINDS, "auto", default="auto", alias="stencil")
    samples: str = choice(*SAMPLES, default="shared")
    normalize: bool | None = flag(default=None, optional=True)

    def _arrange(self, options: dict[str, Any]) -> None:
        super()._arrange(options)
        order, nu = options["order"], options["nu"]
        if nu is not None and nu > LARGEST_NU:
            warn(
                f"nu={nu:g} is the step of a finite difference, whose error grows like nu^{order}; use 1e-3 to 1e-1 "
                f"for losses of similar size, or nu={1 / nu:.3g} if {nu:g} was meant as the multiplier of a penalty"
            )
        if options["normalize"] is None:
            options["normalize"] = options["upper_optimizer"] is None
        self._variant_of_state = {"order": order, "stencil": stencil_of(order, options["stencil"]).kind}

    @property
    def nu(self) -> float:
        """Step of the finite difference; unless it is given, the one that balances truncation and rounding errors."""
        if self.given_nu is not None:
            return self.given_nu
        if self.samples == "independent":
            return NOISY_NU
        unit = working_unit([p for group in self.param_groups for p in group["params"]])
        nu = SHARE / self.order * math.pow(unit, 1 / (self.order + 1))
        return nu if self.order == 1 else min(nu, LONGEST)

    @nu.setter
    def nu(self, value: float) -> None:
        self.given_nu = value

    @property
    def stencil(self) -> str:
        """Current stencil, which ``"auto"`` may have changed."""
        present: str = self.numbers.get("stencil", self._given_stencil)
        return stencil_of(self.order, present).kind

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return a pair of draws for each lower step (or one for each copy), then a pair for the difference."""
        n = 1 if self.samples == "shared" else len(self._formula(inputs).nodes)
        return ([UPPER] * n + [LOWER] * n) * self.lower_steps + [UPPER, LOWER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Run the lower steps of all copies, then take the finite difference between them."""
        formula = self._formula(inputs)
        n, interpolation = len(formula.nodes), [w.numerator / w.denominator for w in formula.interpolation]
        copies, kept = self._copies(oracle, inputs, n, interpolation)
        rule, memory = inputs.solver_for(copies) if kept else replace(inputs, solver=None).solver_for(copies)
        start, solved = copies, rule.run(copies, memory, self.lower_steps, partial(self._perturbed, oracle, formula))
        copies = solved.y
        oracle.checks.finite("lower_grad", copies, DIVERGED)
        self._watch_rounding(oracle)
        xi, zeta = oracle.f.draw(), oracle.g.draw()
        estimate = penalty(oracle, copies, formula, self.nu, upper_sample=xi, lower_sample=zeta)
        y = copies.combine(interpolation)
        found = solved.watched(oracle.session, rule, start, self.lower_steps)
        if solved.gradient is not None:
            found["lower_residual"] = solved.norm(lanes=True)
        if formula.nodes != (-1, 1) and sum(j != 0 for j in formula.nodes) > 1:
            self._watch_spread(oracle, y, copies, formula, inputs)
        if formula.nodes == (-1, 1) and solved.early is not None:
            self._watch_leaving(oracle, solved, start, found["lower_residual"], inputs)
        if formula.nodes == (0, 1) and solved.gradient is not None:
            apart, (g, f) = Vector(t[1] - t[0] for t in copies).norm(), estimate.diagnostics.values()
            figures = *g.unbind(), *f.unbind(), apart, found["lower_residual"].max()
            falls = partial(_falls, self.nu, 1e3 * coarsest(y))
            oracle.checks.alert_if("another basin", BASIN, falls, *figures)
        if {-1, 1} <= {*formula.nodes} and solved.early is not None and rule.plain:
            self._watch_parting(oracle, formula, solved, start, rule.rates)
        values = Vector(estimate.diagnostics.values())
        if formula.nodes == (0, 1) or len(formula.nodes) > 2:
            gap = partial(_difference_gap, formula, self.nu, working_unit((*oracle.x, *y)))
            found["difference_gap"] = Later(gap, (copies, values))
        if solved.gradient is not None:
            unsolved = partial(_unsolved_part, formula, self.nu)
            found["linear_relative_residual"] = Later(unsolved, (copies, solved.gradient, values))
        found["spread"] = Later(partial(_spread, formula, self.nu), (y, copies))
        return replace(
            estimate,
            diagnostics=found,
            lower=y,
            memory={"copies": copies},
            solver=solved.memory,
            numbers={k: inputs.numbers[k] for k in ("stencil",) if k in inputs.numbers},
        )

    def _formula(self, inputs: DrawInputs) -> Stencil:
        return stencil_of(self.order, inputs.numbers.get("stencil", self._given_stencil))

    def _copies(self, oracle: Oracle, inputs: StepInputs, n: int, interpolation: list[float]) -> tuple[Vector, bool]:
        """Return the stacked copies, and True if they continue: they start at y, and later follow changes of it."""
        copies = inputs.memory.get("copies")
        if copies is None or len(copies[0]) != n or not self.warm_start:
            return stack([oracle.y] * n), False
        moved = oracle.y - copies.combine(interpolation)  # exactly zero if nobody wrote to the live y
        return copies + Vector(m.unsqueeze(0) for m in moved), True

    def _perturbed(self, oracle: Oracle, formula: Stencil) -> Callable[[Vector], tuple[Tensor, Vector]]:
        """Return a function for the gradients of g + j nu f at copies, on the next samples."""
        n, weights = len(formula.nodes), [j * self.nu for j in formula.nodes]
        xi: Sample | list[Sample]
        zeta: Sample | list[Sample]
        if self.samples == "shared":
            xi, zeta = oracle.f.draw(), oracle.g.draw()
        else:
            xi, zeta = [oracle.f.draw() for _ in range(n)], [oracle.g.draw() for _ in range(n)]

        def gradient(copies: Vector) -> tuple[Tensor, Vector]:
            (g, f), slopes = Copies(oracle, copies, few=True).lower_slopes(
                ("lower", zeta, [1.0] * n), ("upper", xi, weights)
            )
            oracle.checks.loss((g + f * constant(weights, f)).sum(), DIVERGED)
            return g.sum(), slopes

        return gradient

    def _watch_spread(self, oracle: Oracle, y: Vector, copies: Vector, formula: Stencil, inputs: StepInputs) -> None:
        """Warn if the distances of the copies from y*, per unit of perturbation, differ much.

        They are similar if nu is small enough. For a quadratic pair they are proportional to 1/(1 + j nu r), which
        exposes a negative copy near its pole or beyond. Order 2 does not: it takes y* for the mean of its two copies.
        """
        spread = _spread(formula, self.nu, y, copies)
        known = torch.stack([spread[i] for i, j in enumerate(formula.nodes) if j])
        rounding = 1e4 * coarsest(y) * y.norm()
        limit = SPREAD_LIMIT * max(map(abs, formula.nodes))
        apart = (known.max() > limit * known.min()) & (_distances(y, copies).max() > rounding)
        if any(j < 0 for j in formula.nodes):
            oracle.checks.alert("diverging copies", self._diverging(formula, inputs), apart)
        else:
            oracle.checks.alert("uneven copies", UNEVEN, apart)

    def _watch_leaving(
        self, oracle: Oracle, solved: LowerResult, start: Vector, last: Tensor, inputs: StepInputs
    ) -> None:
        """For order 2, warn if the copy at the negative node goes much further than the other one, and uphill.

        In a convex problem, a gradient grows by noise, or with a step size or a momentum that is too large. It then
        grows for the copy at the positive node too, whose problem is steeper.
        """
        assert solved.early is not None
        first, middle = solved.early
        own, other = (solved.y - start).lane_norm().unbind()
        apart = Vector(t[0] - t[1] for t in solved.y).norm()
        text = self._diverging(self._formula(inputs), inputs)
        oracle.checks.alert_if("diverging copies", text, _leaves, own, other, apart, first[0], middle[0], last[0])

    def _watch_parting(
        self, oracle: Oracle, formula: Stencil, solved: LowerResult, start: Vector, rates: Sequence[Rate]
    ) -> None:
        """Warn if the copies at -1 and 1 went apart as from a saddle or a maximum of g.

        In a convex problem gradients do not grow over gradient steps, so none goes further than steps along the first.
        """
        assert solved.early is not None
        one, other = (formula.nodes.index(j) for j in (-1, 1))
        apart = Vector(t[one] - t[other] for t in solved.y).norm()
        moved, reach = (solved.y - start).lane_norm(), solved.early[0] * largest_rate(rates, apart) * self.lower_steps
        beyond = moved - reach * PARTING
        least = torch.minimum(beyond[one], beyond[other])
        oracle.checks.alert_if("another basin", PARTED, _part, apart, moved[one] + moved[other], least)

    def _diverging(self, formula: Stencil, inputs: StepInputs) -> str:
        return (
            "the copies of y are not similarly far from y*, or go away from it (see diagnostics['spread'], of order 2 "
            f"diagnostics['lower_residual'], for the nodes {formula.nodes}): those at negative nodes minimise "
            "g - |j| nu f, which is no longer strongly convex, so the hypergradient is not reliable. Use a smaller nu, "
            "stencil='forward' or order=1"
            + (". Changing to stencil='forward' from here on" if self._reacts_to(inputs.numbers) else "")
        )

    def _watch_rounding(self, oracle: Oracle) -> None:
        if is_tracing():
            return
        unit = working_unit((*oracle.x, *oracle.y), oracle.session.found.products)
        if unit > ROUNDING_LIMIT * self.nu:
            oracle.checks.alert(
                "rounded differences",
                f"the losses are computed with a precision of {unit:.1g} (autocast, TF32, or the parameters' type), "
                f"and the division by nu = {self.nu:.1g} turns this into an error of about {unit / self.nu:.0%} in the "
                "hypergradient; use a larger nu, or float32 without autocast and TF32 "
                "(torch.backends.cudnn.allow_tf32 = False)",
                torch.ones((), dtype=torch.bool, device=oracle.device),
            )

    def _reacts_to(self, numbers: Mapping[str, Any]) -> str | None:
        """Return the alert that makes the stencil change, for diverging copies; None if it cannot change."""
        return "diverging copies" if self._given_stencil == "auto" and "stencil" not in numbers else None

    def _react(self, oracle: Oracle, inputs: StepInputs, estimate: Estimate) -> tuple[Oracle, StepInputs]:
        """Change to a forward stencil, starting from the sound copy: those at negative nodes diverge."""
        nodes = self._formula(inputs).nodes
        sound = estimate.memory["copies"].lane(nodes.index(min(j for j in nodes if j > 0)))
        return oracle.at(lower=sound), replace(
            inputs.with_lower_state({}), numbers={**inputs.numbers, "stencil": "forward"}
        )

    def update(self, x: Vector, gradient: Vector, inputs: StepInputs) -> Update:
        """Make the step, of length lr if ``normalize``."""
        if self.normalize:
            norm = gradient.norm()
            gradient = gradient.times(1 / torch.where(norm > 0, norm, 1.0))
        return super().update(x, gradient, inputs)


def _distances(y: Vector, copies: Vector) -> Tensor:
    return (copies - Vector(t.unsqueeze(0) for t in y)).lane_norm()


def _spread(formula: Stencil, nu: float, y: Vector, copies: Vector) -> Tensor:
    """Return the distance of each copy from y* per unit of perturbation."""
    distances = _distances(y, copies)
    nodes = constant(formula.nodes, distances)
    return torch.where(nodes == 0, torch.nan, distances / (nodes.abs() * nu).clamp_min(1e-300))


def _unsolved_part(formula: Stencil, nu: float, copies: Vector, slopes: Vector, values: Vector) -> Tensor:
    """Return an upper bound of the relative residual of the linear system that two neighbouring copies solve.

    Their distance d per unit of perturbation approximates -v. The difference of their gradients is the residual of
    H v = b, with b the gradient of f in y, whose norm is at least the change of f over d.
    """
    i, j = formula.nodes.index(0 if 0 in formula.nodes else -1), formula.nodes.index(1)
    apart, rest = (Vector(t[j] - t[i] for t in both).norm() for both in (copies, slopes))
    _, f = values
    change = torch.maximum((f[j] - f[i]).abs(), coarsest(copies) * f[j].abs())
    step = (formula.nodes[j] - formula.nodes[i]) * nu
    return apart * rest / (step * change).clamp_min(torch.finfo(change.dtype).tiny)


def _difference_gap(formula: Stencil, nu: float, unit: float, copies: Vector, values: Vector) -> Tensor:
    """Return the relative difference of two finite differences at the copies, above rounding.

    They are those of y by this formula and by the one of lower order without the outermost nodes. Order 1 compares
    f and g: the derivative of g + s f at its minimum is f, so a trapezoid has both. The nodes of order 2 have no other
    formula.
    """
    nodes, (g, f) = formula.nodes, values
    if nodes == (0, 1):
        size = (f[1] - f[0]).abs()
        gap = (f[1] - f[0] + (g[1] - g[0]) * (2 / nu)).abs()
        rounding = f.abs().max() + g.abs().max() * (2 / nu)
    else:
        weights, inner = [float(c) for c in formula.weights], inner_weights(nodes)
        change = [a - b for a, b in zip(weights, inner, strict=True)]
        size, gap = copies.combine(weights).norm(), copies.combine(change).norm()
        rounding = copies.lane(0).norm() * sum(map(abs, change))
    found: Tensor = (gap - 4 * unit * rounding).clamp_min(0) / size.clamp_min(torch.finfo(size.dtype).tiny)
    return found


def _falls(nu: float, rounding: float, g: Any, g_nu: Any, f: Any, f_nu: Any, apart: Any, residual: Any) -> Any:
    """Return True if g falls from y to its perturbed copy by ten times what f gains, or a slope at y allows."""
    return (g - g_nu > 10 * (nu * abs(f - f_nu) + residual * apart)) & (g - g_nu > rounding * abs(g))


def _part(apart: Any, moved: Any, beyond: Any) -> Any:
    return (apart > 0.5 * moved) & (beyond > 0)


def _leaves(own: Any, other: Any, apart: Any, first: Any, middle: Any, last: Any) -> Any:
    return (own > LEAVING * other) & (own > MOVED * apart) & (middle > first) & (last > middle)

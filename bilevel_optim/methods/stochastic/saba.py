"""SABA: SOBA with a memory of every term of two finite sums (SAGA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...hypergradient import Estimate
from ...hypergradient.estimate import Write
from ...optimizer.declaration import MethodInfo
from ...optimizer.step import Draw, DrawInputs, StepInputs
from ...oracle.oracle import Oracle
from ...problem.finite_sum import random_term, term_count
from ...problem.objective import Sample
from ...problem.placement import to_device
from ...problem.vector import Vector, stack
from .soba import SingleLoop

__all__ = ["SABA"]


class _Memory(NamedTuple):
    """Last values of the terms of a sum, and their mean."""

    table: Vector
    mean: Vector

    def visited(self, index: int | Tensor, value: Vector) -> tuple[Vector, Vector]:
        """Return the mean plus the full change of one term, unbiased for the present mean, and the mean with it."""
        last = Vector(_row(t, index) for t in self.table)
        change = value - last
        return self.mean + change, self.mean + change * (1 / len(self.table[0]))


def _row(table: Tensor, index: int | Tensor) -> Tensor:
    return table.index_select(0, index.reshape(1))[0] if isinstance(index, Tensor) else table[index]


class SABA(SingleLoop):
    r"""Stochastic average bilevel algorithm (SABA): `SOBA` with SAGA's variance reduction, for finite sums.

    The method stores the last :math:`\nabla_y g_i,\ \nabla^2_{yy} g_i v,\ \nabla^2_{xy} g_i v` and
    :math:`\nabla_y f_j,\ \nabla_x f_j` of each term of both losses. A step draws i and j, and replaces each quantity t
    in the updates of `SOBA` by

    .. math:: t_i - \bar t_i + \tfrac1n \sum_{i'} \bar t_{i'}

    with :math:`\bar t` the stored values; then it stores :math:`t_i`.

    *When.* Data that can be divided into fixed batches: the step of `SOBA`, with *constant* learning rates and linear
    convergence (for strongly convex f(x, y*(x))). *Needs* `FiniteSum` objectives (a loss without data is a sum of one
    term), what `SOBA` needs, and memory: for n lower and m upper terms 2n + m copies of y, n + m of x. Losses with
    their own random numbers (dropout) keep that noise. :math:`\alpha, \eta` must be at most about 1/(3 L), L the
    largest curvature of any term.

    *Cost per step*: 1 lower gradient, 1 upper gradient, 1 Hessian-vector product, 1 cross product; in the first step n,
    m, n, n, which fill the memory. *Draws*: a term of f, a term of g.

    Args:
        upper: upper parameters x.
        lower: lower parameters y.
        lr: learning rate of x.
        lower_lr: learning rate of y.
        linear_lr: :math:`\eta`. Default: the learning rate of the lower groups.
        warm_start: start y and v at their last values. Default: True. (The first v is one step from zero,
            :math:`\eta \nabla_y f`.)
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            lower_clip, lower_projection: see `BilevelOptimizer`. Each rank keeps a memory; all use the indices that the
            first one draws, and need the same numbers of terms.

    State: ``linear_solution`` (v); ``lower_table``, ``product_table``, ``adjoint_table`` of the lower parameters and
    ``cross_table``, ``direct_table`` of the upper ones, with a row for each term, and their means ``lower_mean``, ...;
    the lower optimizer's state, and ``initial`` y without warm starts.

    Raises:
        ValueError: for an argument out of its range; at the first step, for an objective that does not know the indices
            of its draws, and with tasks (there are no tables for tasks).

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> data = torch.tensor([0.0, 3.0])
        >>> upper = bo.FiniteSum(lambda t: (y - t).square().mean() / 2, data)  # the mean of f asks for y = 1.5
        >>> lower = bo.FiniteSum(lambda t: (1 + t) * (y - x).square().sum() / 2, data)
        >>> optimizer = SABA([x], [y], lr=0.03)
        >>> for _ in range(1000):
        ...     loss = optimizer.step(upper, lower)
        >>> round(x.item(), 4)
        1.5

    Source: Dagréou, Ablin, Vaiter, Moreau (2022), arXiv:2201.13409; Defazio, Bach, Lacoste-Julien (2014),
    arXiv:1407.0202 (SAGA).
    """

    declared = MethodInfo(
        paper="arXiv:2201.13409",
        family="stochastic",
        when="data of moderate size in fixed batches: converges with constant learning rates",
        cost="1 lower, 1 upper, 1 hvp, 1 jvp; the first step: all batches",
        tasks="none",
        data="finite_sum",
        lower_steps=False,
        lower_optimizer="given gradient",
    )

    def _estimate_tasks(self, oracle: Oracle, inputs: StepInputs, sampler: Any) -> Estimate:
        """Raise, because there are no tables for tasks."""
        raise ValueError(
            "SABA remembers every term of its losses, but not those of a sampler of tasks; use SOBA with tasks= and "
            "task_memory=True"
        )

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return for each sum a random term, or all terms if there are no tables of that length."""
        return [Draw(level, whole=_kept(inputs, level, inputs.terms(level)) is None) for level in ("upper", "lower")]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Make the step of `SOBA` along SAGA's directions."""
        rates = inputs.linear_rates(self.linear_lr)
        losses: list[Tensor] = []

        def upper(sample: Sample) -> dict[str, Vector]:
            loss, direct, adjoint = oracle.upper(sample)
            losses.append(loss)
            return {"direct": direct, "adjoint": adjoint}

        f = _averaged(oracle, inputs, "upper", upper)
        v = self._solution(inputs)
        v = f.directions["adjoint"] * rates if v is None else v

        def lower(sample: Sample) -> dict[str, Vector]:
            with oracle.lower_system(sample) as system:
                cross, product = system.both(v)
                return {"lower": system.gradient, "product": product, "cross": cross}

        g = _averaged(oracle, inputs, "lower", lower)
        residual = g.directions["product"] - f.directions["adjoint"]
        oracle.checks.finite("hvp", residual)
        _, moved = inputs.step_along(oracle, g.directions["lower"])
        solution = {"linear_solution": v - residual * rates} if self.warm_start else {}
        estimate = Estimate(
            torch.stack(losses).mean(),
            f.directions["direct"] - g.directions["cross"],
            {"linear_residual": residual, "linear_right_side": f.directions["adjoint"]},
            memory={**f.memory, **g.memory, **solution},
            upper_memory={**f.upper_memory, **g.upper_memory},
            writes=(*f.writes, *g.writes),
        )
        return estimate.with_lower(moved)


class _Averaged(NamedTuple):
    """SAGA's directions for a sum, and the new tables of its terms."""

    directions: dict[str, Vector]
    memory: dict[str, Vector]
    upper_memory: dict[str, Vector]
    writes: list[Write]


def _averaged(
    oracle: Oracle, inputs: StepInputs, level: str, evaluate: Callable[[Sample], dict[str, Vector]]
) -> _Averaged:
    """Return SAGA's directions for the quantities that ``evaluate`` returns of one term."""
    objective = oracle.f if level == "upper" else oracle.g
    count = term_count(objective, level)
    kept = _kept(inputs, level, count)
    result = _Averaged({}, {}, {}, [])
    memories = {True: result.upper_memory, False: result.memory}
    if kept is None:
        terms = [evaluate(objective.term(i)) for i in range(count)]
        for name, is_upper in _QUANTITIES[level].items():
            table = stack([term[name] for term in terms])
            result.directions[name] = Vector(t.mean(0) for t in table)
            memories[is_upper] |= {f"{name}_table": table, f"{name}_mean": result.directions[name].clone()}
        return result
    index, sample = random_term(objective, lambda i: inputs.ranks.broadcast_number(i, oracle.device))
    row = to_device(index, oracle.device) if isinstance(index, Tensor) else index
    for name, value in evaluate(sample).items():
        memory = kept[name]
        result.directions[name], mean = memory.visited(row, value)
        memories[_QUANTITIES[level][name]][f"{name}_mean"] = mean
        result.writes.extend(Write(table, index, row) for table, row in zip(memory.table, value, strict=True))
    return result


def _kept(inputs: DrawInputs, level: str, count: int) -> dict[str, _Memory] | None:
    """Return the tables of a finite sum, by quantity; None unless each has one row for every term."""
    kept = {}
    for name, is_upper in _QUANTITIES[level].items():
        memory = inputs.upper_memory if is_upper else inputs.memory
        table, mean = (memory.get(f"{name}_{part}") for part in ("table", "mean"))
        if table is None or mean is None or len(table[0]) != count:
            return None
        kept[name] = _Memory(table, mean)
    return kept


# Quantities stored for a term of each sum; True if shaped like x.
_QUANTITIES = {
    "upper": {"direct": True, "adjoint": False},
    "lower": {"lower": False, "product": False, "cross": True},
}

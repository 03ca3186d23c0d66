"""STABLE: tracked second derivatives, plain first ones, and lower steps that follow x."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...distributed.sharding import Split
from ...hypergradient.recursive import flat, shaped
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import number
from ...optimizer.step import StepInputs, Update
from ...problem.vector import Vector
from .drawing import Drawing
from .rows import CHUNK
from .trackers import Matrices
from .tracking import RecursiveOptimizer
from .variants import Variant, exact

__all__ = ["STABLE"]

PLAIN = {"u": 1.0, "v": 1.0, "w": 1.0}  # mixing weights of plain first derivatives


class STABLE(RecursiveOptimizer):
    r"""Single-timescale stochastic bilevel method (STABLE): plain gradients, STORM matrices, y follows x.

    .. math::
        V, H &\leftarrow \text{STORM estimates of } \nabla^2_{xy} g, \nabla^2_{yy} g \text{, as in `SVRB`},\\
        x^+ &= x - \text{lr}\,(\nabla_x f(x, y; \xi) - V H^{-1} \nabla_y f(x, y; \xi)),\\
        y^+ &= y - \text{lower\_lr}\, \nabla_y g(x, y; \zeta) - H^{-1} V^\top (x^+ - x).

    *When.* As the baseline of `SVRB`, which tracks the first derivatives too and leaves the last term out. That term
    moves y along with :math:`y^*(x)`, so both levels may have steps of the same size. *Needs* what `SVRB` needs.

    *Cost per step*: that of `SVRB`, and one more solve. *Draws*: as `SVRB`.

    ``step`` adds the term; after ``backward`` and the step of another optimizer it is missing.

    Args:
        upper: upper parameters x.
        lower: lower parameters y; with ``tasks=``, one row for each task (every step visits all of them).
        lr: learning rate of x.
        lower_lr: learning rate of y.
        beta: mixing weight of V and H. Default: 0.1.
        floor: least eigenvalue of H. Default: 1e-3.
        averaging, ceilings, radius, schedule, schedule_offset, restarts, initial_steps, state_device, lazy, beta_unit:
            see `SVRB`. warm_start, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init: see `BilevelOptimizer`.

    State: as with `SVRB`.

    Raises:
        ValueError: for an argument out of its range.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = bo.STABLE([x], [y], lr=0.1, lower_lr=0.1)
        >>> for _ in range(200):  # y*(x) = x, so the minimiser of f(x, y*(x)) is 1
        ...     loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
        >>> round(x.item(), 3)
        1.0

    Source: Chen, Sun, Xiao, Yin (2022), arXiv:2102.04671 (STABLE).
    """

    declared = MethodInfo(
        paper="arXiv:2102.04671",
        family="tracked",
        when="baseline of SVRB: plain first derivatives, lower steps that follow x",
        cost="as SVRB",
        tasks="rows",
        lower_steps=False,
        lower_optimizer="none",
        upper_update="steps of lr along an average, which y follows",
    )

    beta: float = number(default=0.1, least=0)

    def _parts(self, options: dict[str, Any]) -> tuple[Variant, Drawing]:
        return Variant(Matrices, exact), Drawing()

    def _arrange(self, options: dict[str, Any]) -> None:
        options["beta"] = {**PLAIN, "V": options["beta"], "H": options["beta"]}
        super()._arrange(options)

    def _betas(self, steps: int, m: int) -> dict[str, float]:
        return {**super()._betas(steps, m), **PLAIN}

    def update(self, x: Vector, gradient: Vector, inputs: StepInputs) -> Update:
        """Make the step along d, and move y with it."""
        update = super().update(x, gradient, inputs)
        if not inputs.tables:
            return update
        moved = dict(zip((id(p) for group in inputs.upper_groups for p in group["params"]), update.x - x, strict=True))
        still = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in self.parameters("upper")]
        movement = flat([moved.get(id(p), zero) for p, zero in zip(self.parameters("upper"), still, strict=True)])[0]
        split, y = Split(inputs.lower, inputs.ranks), Vector(map(Split.local, inputs.lower))
        V, H = (Split.local(inputs.tables[name]) for name in ("V", "H"))
        m = len(H)
        movement = movement[: V.shape[1]]  # tensors added since then come last, and V does not know them
        size = max(CHUNK // H[0].numel(), 1)
        right = (V.mT @ movement.to(V)).to(H).unsqueeze(-1)  # autocast may have lowered its precision
        parts = [
            torch.linalg.solve_ex(h, r).result
            for h, r in zip(torch.split(H, size), torch.split(right, size), strict=True)
        ]
        rows, shift = flat(y, m), torch.cat(parts).squeeze(-1).to(movement.device)
        rows = rows - torch.nn.functional.pad(shift, (0, rows.shape[1] - shift.shape[1]))
        like = Vector(t.reshape(m, -1) for t in y).lane(0)
        new = (split.from_local(r.view_as(t)) for r, t in zip(shaped(rows, like), y, strict=True))
        return replace(update, lower=Vector(new))

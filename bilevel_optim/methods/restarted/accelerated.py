"""What RAHGD and PRAGDA share: the restarted iteration of x over Nesterov's method on y."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from ...optimizer.base import BilevelOptimizer, CommonOptions
from ...oracle.oracle import Oracle
from ...problem.parameters import Params, is_count, is_number, require
from ...solvers.lower import AGD
from .restart import Restarting

__all__ = ["Accelerated", "AcceleratedOptions"]


class AcceleratedOptions(CommonOptions, total=False):
    """Optional keyword arguments of every method of this family, see `RAHGD`."""

    momentum: float
    restart_radius: float | None
    restart_period: int
    lower_momentum: float
    lower_restart: str
    restart_steps: int | None
    lower_tol: float
    on_converged: str


class Accelerated(Restarting, BilevelOptimizer):
    """Base class of the methods that move x by `Restarting` and y by `AGD`; the arguments are those of `RAHGD`."""

    _saved = ("_progress", "_last_loss")

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float,
        lower_lr: float,
        lower_steps: int,
        momentum: float,
        restart_radius: float | None,
        restart_period: int,
        lower_momentum: float,
        lower_restart: str,
        restart_steps: int | None,
        lower_tol: float,
        on_converged: str,
        **common: Unpack[CommonOptions],
    ) -> None:
        self._configure(momentum, restart_radius, restart_period, on_converged)
        require("lower_momentum", lower_momentum, is_number(lower_momentum) and 0 <= lower_momentum < 1)
        require("lower_restart", lower_restart, lower_restart in ("keep", "zero"))
        require("restart_steps", restart_steps, restart_steps is None or is_count(restart_steps))
        require("lower_tol", lower_tol, is_number(lower_tol) and lower_tol >= 0)
        self._own_solver = common.get("lower_optimizer") is None
        if self._own_solver:
            common["lower_optimizer"] = partial(AGD, momentum=lower_momentum)
        elif lower_momentum:
            raise ValueError(
                f"Invalid lower_momentum value: {lower_momentum} (the lower_optimizer has its own; leave one out)"
            )
        self.lower_momentum, self.lower_restart, self.lower_tol = lower_momentum, lower_restart, lower_tol
        self.restart_steps = restart_steps
        super().__init__(upper, lower, lr=lr, lower_lr=lower_lr, lower_steps=lower_steps, **common)

    def _solve_lower(self, oracle: Oracle) -> None:
        """Improve the live y at the live x, which is the look-ahead point; momentum does not last across solves."""
        solver = self._ready_solver(oracle)
        steps, fresh = self.lower_steps, self._run.step == 0
        extra = (
            self.restart_steps if self.restart_steps is not None else self.lower_steps * (self.lower_restart == "zero")
        )
        if fresh and self.lower_restart == "zero":
            oracle.y.copy_(oracle.y.zeros_like())
        for count in (extra, steps) if fresh else (steps,):
            if self._own_solver:
                solver.reset()
            solver.run(
                count, lambda: partial(oracle.lower, oracle.g.draw(once=solver.evaluates_once)), tol=self.lower_tol
            )
        if steps:
            oracle.checks.finite("lower_grad", oracle.y)

    def _status(self) -> dict[str, Tensor]:
        """Where in the run the estimate is made, for ``diagnostics``."""
        return {"restarts": torch.tensor(self.restarts), "epoch_step": torch.tensor(self.epoch_step)}

    def _update(self) -> None:
        self._advance(self._groups("upper"))

    def _all_upper_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["level"] == "upper"]

    def _ranks(self) -> Any:
        return self._session.process_group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `BilevelOptimizer`; a new upper group starts a new epoch, without momentum."""
        super().add_param_group(param_group)
        if param_group["level"] == "upper":
            self._begin_epoch()

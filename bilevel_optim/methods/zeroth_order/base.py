"""What the zeroth-order methods share: their arguments, directions and paths."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.distributed as dist

from ...hypergradient.directions import KINDS, Directions, draw_seed
from ...optimizer.base import BilevelOptimizer, ColdOptions
from ...oracle.oracle import Oracle
from ...problem.parameters import Params, is_count, is_number, require
from ...problem.vector import Vector, is_sharded
from ...solvers.paths import Paths

__all__ = ["ZerothOrder"]


class ZerothOrder(BilevelOptimizer):
    """Base class of the methods that perturb x along random directions and solve the lower problem again.

    Args:
        upper, lower, lr, lower_lr, lower_steps, warm_start, common: see `BilevelOptimizer`.
        directions, smoothing, smoothing_mode, direction, scale, difference: see `PZOBO`.
    """

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float,
        lower_lr: float,
        lower_steps: int,
        directions: int = 8,
        smoothing: float = 1e-2,
        smoothing_mode: str = "absolute",
        direction: str = "gaussian",
        scale: str | float = "unbiased",
        difference: str = "forward",
        warm_start: bool = False,
        **common: Unpack[ColdOptions],
    ) -> None:
        require("directions", directions, is_count(directions) and directions > 0)
        require("smoothing", smoothing, is_number(smoothing) and 0 < smoothing < float("inf"))
        require("smoothing_mode", smoothing_mode, smoothing_mode in ("absolute", "relative"))
        require("direction", direction, direction in KINDS)
        require("scale", scale, scale in ("unbiased", "none") or (is_number(scale) and scale == scale))
        require("difference", difference, difference in ("forward", "central"))
        self.directions, self.smoothing, self.smoothing_mode = directions, smoothing, smoothing_mode
        self.direction, self.scale, self.difference = direction, scale, difference
        super().__init__(
            upper, lower, lr=lr, lower_lr=lower_lr, lower_steps=lower_steps, warm_start=warm_start, **common
        )
        self._require_elementwise()

    _saved: tuple[str, ...] = ("smoothing", "directions")  # which a user may change during a run

    def _directions(self, oracle: Oracle) -> Directions:
        """The directions of this step, the same on every rank."""
        if any(map(is_sharded, oracle.x)):
            raise ValueError(f"{type(self).__name__} cannot perturb sharded upper parameters (DTensor)")
        seed = draw_seed(self.generator)
        group = self._session.process_group
        if group is not None:
            shared = torch.tensor(seed, device=oracle.device)
            dist.broadcast(shared, group=group, group_src=0)
            seed = int(shared)
        return Directions(
            oracle.x,
            self.direction,
            self.directions,
            seed=seed,
            smoothing=self.smoothing,
            relative=self.smoothing_mode == "relative",
            scale=self.scale,
        )

    def _paths(self, oracle: Oracle, start: Vector | None) -> Paths:
        """The lower solve; the samples of all its steps are drawn here, so that every path sees the same."""
        samples = [oracle.g.draw() for _ in range(self.lower_steps)]
        return Paths(oracle, self._factory, self._groups("lower"), start, samples)

    def _finish(self, oracle: Oracle, paths: Paths) -> None:
        """Advance running statistics, which no path has changed, once."""
        if paths.samples:
            oracle.advance_buffers(paths.samples[-1])

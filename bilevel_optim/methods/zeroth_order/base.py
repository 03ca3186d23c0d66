"""What the zeroth-order methods share: their arguments, directions and paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from ...distributed.ranks import Ranks
from ...hypergradient import Estimate
from ...hypergradient.directions import KINDS, Directions
from ...optimizer.base import BilevelOptimizer, ColdOptions
from ...optimizer.draws import LOWER, UPPER, Draw, DrawInputs
from ...optimizer.step import StepInputs
from ...oracle.lanes import one_of_many
from ...oracle.oracle import Oracle
from ...problem.parameters import Params, is_count, is_number, require, require_choice
from ...problem.random import SEEDS
from ...problem.vector import any_sharded
from ...solvers.paths import Paths

__all__ = ["ZerothOrder"]


class ZerothOrder(BilevelOptimizer):
    """Base class of the methods that perturb x along random directions and solve the lower problem again.

    Args:
        upper, lower, lr, lower_lr, lower_steps, warm_start, common: see `BilevelOptimizer`.
        directions, smoothing, smoothing_mode, direction, scale, difference, over_ranks: see `PZOBO`.
    """

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float | None = None,
        lower_lr: float | str = "auto",
        lower_steps: int,
        directions: int = 8,
        smoothing: float = 1e-2,
        smoothing_mode: str = "absolute",
        direction: str = "gaussian",
        scale: str | float = "unbiased",
        difference: str = "forward",
        over_ranks: str = "data",
        warm_start: bool = False,
        **common: Unpack[ColdOptions],
    ) -> None:
        require("directions", directions, is_count(directions) and directions > 0)
        require("smoothing", smoothing, is_number(smoothing) and 0 < smoothing < float("inf"))
        require_choice("smoothing_mode", smoothing_mode, ("absolute", "relative"))
        require_choice("direction", direction, KINDS)
        require_choice("scale", scale, ("unbiased", "none"), or_positive=True)
        require_choice("difference", difference, ("forward", "central"))
        require_choice("over_ranks", over_ranks, ("data", "directions"))
        self.directions, self.smoothing, self.smoothing_mode = directions, smoothing, smoothing_mode
        self.direction, self.scale, self.difference = direction, scale, difference
        self.over_ranks = over_ranks
        super().__init__(
            upper, lower, lr=lr, lower_lr=lower_lr, lower_steps=lower_steps, warm_start=warm_start, **common
        )
        self._lower_checks.require_elementwise()

    _saved_options, _difference_step = ("smoothing", "directions"), "smoothing"

    def _random_inputs(self) -> dict[str, int]:
        """The seed of the directions."""
        return {"seed": SEEDS}

    def _draws(self, given: DrawInputs) -> list[Draw]:
        """One for each lower step, which all paths share, then an upper one."""
        return [LOWER] * self.lower_steps + [UPPER]

    def _drawn_directions(self, oracle: Oracle, given: StepInputs) -> Directions:
        """The directions of this step, the same on every rank."""
        if any_sharded(oracle.live_x):
            raise ValueError(f"{type(self).__name__} cannot perturb sharded upper parameters (DTensor)")
        return Directions(
            oracle.x,
            self.direction,
            self.directions,
            seed=given.random_inputs["seed"],
            smoothing=self.smoothing,
            relative=self.smoothing_mode == "relative",
            scale=self.scale,
        )

    def _followed(
        self, oracle: Oracle, given: StepInputs, estimator: Callable[..., Estimate], *, from_upper: bool = False
    ) -> Estimate:
        """An estimate from paths that all start at the oracle's y, or at the last tensors of their own x.

        The samples of all the paths' steps are drawn before the first of them, so that every path sees the same.
        """
        directions, ranks = self._drawn_directions(oracle, given), Ranks()
        if self.over_ranks == "directions" and oracle.shared:
            if oracle.sharded:
                raise ValueError(
                    "over_ranks='directions' lets each rank follow paths of its own, which sharded lower parameters "
                    "(DTensor) cannot do: use over_ranks='data'"
                )
            oracle, ranks = one_of_many(oracle), given.ranks
        samples = [oracle.g.draw() for _ in range(self.lower_steps)]
        paths = Paths(oracle, given.rule, samples, from_upper=from_upper)
        return estimator(oracle, paths, directions, central=self.difference == "central", ranks=ranks)

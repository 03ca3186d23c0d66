"""Base class of the zeroth-order methods: their arguments, directions and paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...distributed.ranks import Ranks
from ...hypergradient import Estimate
from ...hypergradient.directions import KINDS, Directions
from ...hypergradient.zeroth_order import AT_PERTURBED
from ...optimizer.base import BilevelOptimizer
from ...optimizer.options import choice, count, flag, number
from ...optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs
from ...oracle.doors import START, WatchedStart, require_free_batch
from ...oracle.oracle import Oracle, local_problem
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

    directions: int = count(default=8, least=1, saved=True)
    smoothing: float = number(default=1e-2, above=0, saved=True)
    smoothing_mode: str = choice("absolute", "relative", default="absolute")
    direction: str = choice(*KINDS, default="gaussian")
    scale: str | float = choice("unbiased", "none", default="unbiased", or_positive=True)
    difference: str = choice("forward", "central", default="forward")
    over_ranks: str = choice("data", "directions", default="data")
    warm_start: bool = flag(default=False)

    def _random_inputs(self) -> dict[str, int]:
        """Return the range of the seed of the directions."""
        return {"seed": SEEDS}

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return one draw for each lower step, shared by all paths, then an upper draw."""
        return [LOWER] * self.lower_steps + [UPPER]

    def _estimate_on_paths(
        self,
        oracle: Oracle,
        inputs: StepInputs,
        estimator: Callable[..., Estimate],
        *,
        from_upper: Sequence[int | Tensor] | None = None,
    ) -> Estimate:
        """Return an estimate from paths that all start at the oracle's y, or at tensors of their own x.

        The samples of all steps are drawn before the first path, so that every path sees the same samples.
        """
        if any_sharded(oracle.live_x):
            raise ValueError(
                f"{type(self).__name__} cannot perturb sharded upper parameters (DTensor): do not shard the module of "
                "x, and let the ranks share the tasks, or the directions (over_ranks='directions')"
            )
        directions = Directions(
            oracle.x,
            self.direction,
            self.directions,
            seed=inputs.random_inputs["seed"],
            smoothing=self.smoothing,
            relative=self.smoothing_mode == "relative",
            scale=self.scale,
        )
        ranks = Ranks()
        if self.over_ranks == "directions" and oracle.shared:
            if oracle.sharded:
                raise ValueError(
                    "over_ranks='directions' lets each rank follow paths of its own, which is not possible with "
                    "sharded lower parameters (DTensor): use over_ranks='data'"
                )
            oracle, ranks = local_problem(oracle), inputs.ranks
        samples = [oracle.g.draw() for _ in range(self.lower_steps)]
        for sample in samples:
            require_free_batch("lower", sample.arguments, oracle.live_x, AT_PERTURBED)
        init, follows = inputs.lower_init, START in oracle.session.doors and from_upper is None
        start = init.again if follows and isinstance(init, WatchedStart) else None
        paths = Paths(oracle, inputs.rule, samples, from_upper=from_upper, start=start)
        return estimator(oracle, paths, directions, central=self.difference == "central", ranks=ranks)

"""Many lower problems as one: y is a stack with a lane for each, the losses are sums over the lanes.

The lower Hessian is block diagonal then. Every estimator that works on an `Oracle` works on it, and does for each
problem what it would do for that one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..problem.objective import Objective, Sample
from ..problem.tasks import select
from ..problem.vector import Vector
from . import batched
from .evaluation import placed
from .features import require_free_of_lower
from .oracle import Oracle
from .session import as_scalar
from .substitution import Substitution

__all__ = ["LaneLoss", "stacked"]


def stacked(
    oracle: Oracle,
    y: Vector,
    draw: Callable[[str], Any],
    *,
    x: Vector | None = None,
    weights: Tensor | None = None,
    alike: bool = False,
) -> Oracle:
    """The oracle of many lower problems as one.

    Args:
        oracle: of one problem, at the x of all of them.
        y: stacked lower points, shape (n, ...).
        draw: gives the next batch of every problem, for ``"upper"`` and for ``"lower"``.
        x: stacked upper points, if each problem has its own. Default: that of the oracle, for all.
        weights: factors of the problems in the sums. Default: 1.
        alike: whether the problems share their random numbers (dropout) instead of each having its own.
    """
    own_y = Vector(t.detach().clone().requires_grad_() for t in y)
    own_x = None if x is None else Vector(t.detach().clone().requires_grad_() for t in x)
    inner = oracle.live_y if own_x is None else Vector((*oracle.live_x, *oracle.live_y))
    leaves = own_y if own_x is None else Vector((*own_x, *own_y))

    def objective(level: str) -> Objective:
        source = oracle.f if level == "upper" else oracle.g
        if source.data is not None:
            raise ValueError(
                f"with tasks, the {level} loss takes its batches from the sampler: pass the loss itself, not an "
                "Objective with data"
            )
        loss = LaneLoss(oracle, level, source.loss, inner, leaves, alike=alike, weights=weights)
        features: Callable[..., Any] | None = None
        if source.features is not None:
            if own_x is None:
                features = _LaneFeatures(oracle, level, source.features)
            else:  # each problem has features of its own x, which are not shared by anything
                loss.loss = _whole(source.loss, source.features)
        return _Drawn(loss, lambda: draw(level), features)

    result = Oracle(
        oracle.live_x if own_x is None else own_x,
        own_y,
        objective("upper"),
        objective("lower"),
        names=oracle.names,
        session=oracle.session,
        lanes=len(own_y[0]),
    )
    return result if own_x is not None else result.at(upper=oracle.x)


class _Drawn(Objective):
    """A sum of losses over lanes, whose batches are drawn by a function."""

    def __init__(self, loss: LaneLoss, batch: Callable[[], Any], features: Callable[..., Any] | None) -> None:
        super().__init__(loss, features=features)
        self._batch = batch

    def draw(self, *, once: bool = False) -> Sample:
        return self.sample(self._batch(), once=once)


def _whole(loss: Any, features: Any) -> Any:
    return lambda batch: loss(features(batch))


class LaneLoss:
    """One of the losses at stacked points, each with its own batch; called with the batches, it gives the sum.

    Inside an evaluation of several copies of the stacked tensors it is the copy that is read.

    Args:
        oracle: of one problem.
        level: ``"upper"`` or ``"lower"``.
        loss: takes the batch of one problem.
        live: the live tensors that the loss reads.
        leaves: the stacked leaves that stand for them.
        alike: whether the lanes share their random numbers.
        weights: factors of the lanes in the sum. Default: 1.
    """

    def __init__(
        self,
        oracle: Oracle,
        level: str,
        loss: Callable[..., Any],
        live: Vector,
        leaves: Vector,
        *,
        alike: bool = False,
        weights: Tensor | None = None,
    ) -> None:
        self.oracle, self.level, self.loss = oracle, level, loss
        self.live, self.leaves, self.alike, self.weights = live, leaves, alike, weights
        self._first = [t.detach()[0].clone() for t in leaves]  # not known to any substitution

    def __call__(self, batch: Any) -> Tensor:
        values = self.values(batch)
        return values.sum() if self.weights is None else (values * self.weights.to(values)).sum()

    def values(self, batch: Any) -> Tensor:
        """The losses of all lanes, shape (n,)."""
        # Passing the leaves through torch lets an outer substitution or vmap see them.
        lanes = [t.view_as(t) for t in self.leaves]
        session, n = self.oracle.session, len(lanes[0])
        random = Sample(self.loss)  # keeps the random state that alike lanes share
        with session.buffers.kept():
            if self.level not in session.found.redirected:
                self._require_redirection(batch)
                session.found.redirected |= {self.level}
            parts = batched.run(
                session,
                n,
                lambda part: self._together(select(batch, part), [t[part] for t in lanes], random, n),
                lambda i: self._alone(select(batch, i), [t[i] for t in lanes], random, n).reshape(1),
            )
        session.found.vmapped_tasks |= session.found.fallback is None and session.options.at_once(n) > 1
        return torch.cat(parts)

    def _together(self, batch: Any, lanes: list[Tensor], random: Sample, n: int) -> Tensor:
        leaves, structure = tree_flatten(batch)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def one(own: list[Tensor], *values: Tensor) -> Tensor:
            mine = list(leaves)
            for i, leaf in zip(tensors, own, strict=True):
                mine[i] = leaf
            return self._at(tree_unflatten(mine, structure), values)

        shared = self.alike and len(lanes[0]) < n
        with (
            batched.no_slow_batching(look=not self.oracle.session.found.vmapped_tasks),
            random.replayed(self.oracle.device) if shared else nullcontext(),
        ):
            result: Tensor = vmap(one, randomness="same" if self.alike else "different")(
                [leaves[i] for i in tensors], *lanes
            )
        return result

    def _alone(self, batch: Any, lanes: list[Tensor], random: Sample, n: int) -> Tensor:
        with random.replayed(self.oracle.device) if self.alike and n > 1 else nullcontext():
            return self._at(batch, lanes)

    def _at(self, batch: Any, values: Sequence[Tensor]) -> Tensor:
        with Substitution(self.live, values):
            return as_scalar(self.level, self.loss(batch))

    def _require_redirection(self, batch: Any) -> None:
        """Raise if the result depends on what the live tensors hold: then the loss reads them out of torch's sight."""
        oracle, results = self.oracle, []
        devices = [oracle.device] if oracle.device.type == "cuda" else []
        with torch.no_grad():
            for values in (self._first, [t * 1.1 + 0.1 for t in self._first]):
                with placed(self.live, values), torch.random.fork_rng(devices=devices):
                    results.append(self._at(select(batch, 0), self._first))
        try:
            same = torch.allclose(results[0], results[1], rtol=1e-5, equal_nan=True)
        except RuntimeError:  # the batches are stacked for an outer vmap, which has looked itself
            return
        if not same:
            raise RuntimeError(
                f"the {self.level} loss reads lower parameters in a way that cannot be redirected to the tasks' own "
                "values, as TorchScript modules or numpy do; pass the plain module"
            )


class _LaneFeatures:
    """The features of an objective for a batch of each problem, stacked; they read x alone."""

    def __init__(self, oracle: Oracle, level: str, features: Callable[..., Any]) -> None:
        self.oracle, self.level, self.features = oracle, level, features

    def __call__(self, batch: Any) -> Any:
        session, n = self.oracle.session, len(tree_leaves(batch)[0])
        if self.level not in session.found.features_checked:
            with torch.enable_grad():
                require_free_of_lower(self.oracle, self.level, self.features(select(batch, 0)))
        parts = batched.run(
            session,
            n,
            lambda part: vmap(self.features, randomness="different")(select(batch, part)),
            lambda i: tree_map(lambda t: t.unsqueeze(0), self.features(select(batch, i))),
        )
        return parts[0] if len(parts) == 1 else tree_map(lambda *ts: torch.cat(ts), *parts)

"""Many lower problems as one: y is a stack with a lane for each, the losses are sums over the lanes.

The lower Hessian is then block diagonal. Every estimator for an `Oracle` also works here, and treats each problem as
it would that problem alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..problem import random
from ..problem.objective import Objective, Sample, batch_kept, require_fit
from ..problem.tasks import select
from ..problem.vector import Vector, as_variable
from ..pytree import tree_leaves, tree_map
from . import batched
from .hooks import on_lanes
from .oracle import Oracle
from .point import none_to_zeros
from .session import as_scalar
from .stacks import mapped_over
from .substitution import Substitution

__all__ = ["LaneFeatures", "LaneLoss", "stacked", "weighted_upper"]


def stacked(
    oracle: Oracle,
    y: Vector,
    draw: Callable[[str], Any] | None = None,
    *,
    x: Vector | None = None,
    weights: Tensor | None = None,
    shared_rng: bool = False,
) -> Oracle:
    """Return the oracle of many lower problems as one.

    Args:
        oracle: oracle of one problem, at the x of all of them.
        y: stacked lower points, shape (n, ...).
        draw: returns the next batch of every problem, for ``"upper"`` and for ``"lower"``. Default: none, samples are
            made of given batches.
        x: stacked upper points, if each problem has its own. Default: the oracle's x, for all.
        weights: factors of the problems in the sums. Default: 1.
        shared_rng: whether the problems share their random numbers (dropout) instead of each having its own.
    """
    own_y = Vector(as_variable(t.clone()) for t in y)
    own_x = None if x is None else Vector(as_variable(t.clone()) for t in x)
    inner = oracle.live_y if own_x is None else Vector((*oracle.live_x, *oracle.live_y))
    leaves = own_y if own_x is None else Vector((*own_x, *own_y))

    def objective(level: str) -> Objective:
        source = oracle.f if level == "upper" else oracle.g
        if source.data is not None:
            raise ValueError(
                f"with tasks, the {level} loss takes its batches from the sampler: pass the loss itself, not an "
                "Objective with data"
            )
        own, features = source.loss, source.features
        if features is not None and own_x is not None:  # those at each problem's own x cannot be shared
            own, features = partial(_whole, own, features), None
        if features is not None:
            features = LaneFeatures(oracle, level, features, shared_rng=shared_rng)
        loss = LaneLoss(oracle, level, own, inner, leaves, shared_rng, weights)
        return _LaneSum(loss, None if draw is None else partial(draw, level), features)

    return _LaneOracle(
        oracle.live_x if own_x is None else own_x,
        own_y,
        objective("upper"),
        objective("lower"),
        names=lambda: oracle.names,
        session=oracle.session,
        lanes=len(own_y[0]),
        values=(oracle.x if own_x is None and oracle.moved[0] else None, None),
    )


def weighted_upper(
    oracle: Oracle, sample: Sample, weights: Tensor, others: Sequence[Tensor]
) -> tuple[Tensor, Vector, Vector, list[Vector]]:
    """Return gradients of weighted sums of the upper losses of stacked problems, from one evaluation of each loss.

    Args:
        oracle: from `stacked`, without weights of its own.
        sample: sample of f.
        weights: factors of the problems.
        others: more sets of factors; each costs another backward pass.

    Returns:
        The value of f in every lane; the gradients of the weighted sum in x and in y; and for each of ``others`` the
        gradient in x.
    """
    session, split, losses = oracle.session, len(oracle.x), sample.loss
    assert isinstance(losses, LaneLoss)
    each = Sample(losses.values, sample.arguments)
    each.features = sample.features
    session.note_use("upper", oracle, sample)
    with oracle.evaluating() as (x, y):
        part = () if each.features is None else (oracle.call(each.features),)
        values = session.dependent("upper", oracle.call(each, *part), y, x)
        kept = bool(others)
        gradients = torch.autograd.grad(values, [*x, *y], weights.to(values), allow_unused=True, retain_graph=kept)
        session.note_reached(gradients[:split])
        more = [oracle.x.zeros_like() for _ in others]
        if any(gradient is not None for gradient in gradients[:split]):
            for i, other in enumerate(others):
                found = torch.autograd.grad(
                    values, list(x), other.to(values), allow_unused=True, retain_graph=i < len(others) - 1
                )
                more[i] = none_to_zeros(found, oracle.x)
    oracle.count("upper_grad")
    grad_x, grad_y = none_to_zeros(gradients[:split], oracle.x), none_to_zeros(gradients[split:], oracle.y)
    oracle.checks.finite("loss", [values.detach()])
    oracle.checks.finite("upper_grad", [*grad_x, *grad_y])
    return values.detach(), grad_x, grad_y, more


class _LaneOracle(Oracle):
    """Oracle of many problems as one; where they are evaluated one by one, the graph of only one is kept at a time."""

    def slopes(
        self,
        level: str,
        sample: Sample,
        x: Vector,
        y: Vector,
        variables: Sequence[Tensor],
        *,
        frozen: bool = False,
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        loss, session = sample.loss, self.session
        if not isinstance(loss, LaneLoss) or sample.features is not None or session.hooked:
            return super().slopes(level, sample, x, y, variables, frozen=frozen)
        known = level in session.found.dependency_checked and session.used is None
        if not known or not loss.are_apart((*x, *y)):
            before = random.default_state(self.device) if sample.once and not known else None
            looked = super().slopes(level, sample, x, y, variables, frozen=frozen)
            if known or not loss.are_apart((*x, *y)):
                return looked
            del looked  # frees the graph
            # Again, one by one: a run that is loaded looks once more, and the two ways round differently.
            if before is not None:
                random.set_default_state(self.device, before)
        if level == "lower":
            session.lower_sample = sample
        each = sample.wrapped(lambda _: partial(loss.one_by_one, variables, self.differentiate))
        found: tuple[Tensor, Sequence[Tensor | None]] = self.call(each)
        return found


class _LaneSum(Objective):
    """A sum of losses over lanes, with batches drawn by a function."""

    def __init__(self, loss: LaneLoss, batch: Callable[[], Any] | None, features: Callable[..., Any] | None) -> None:
        super().__init__(loss, features=features)
        self._batch = batch

    def draw(self, *, once: bool = False) -> Sample:
        assert self._batch is not None, "samples are made of given batches"
        return self.sample(self._batch(), once=once)


def _whole(loss: Callable[..., Any], features: Callable[..., Any], batch: Any) -> Any:
    return loss(features(batch))


@dataclass(eq=False)
class LaneLoss:
    """One of the losses at stacked points, each with its own batch; called with the batches, it returns the sum.

    Inside an evaluation of several copies of the stacked tensors, it reads the copy.

    Args:
        oracle: oracle of one problem.
        level: ``"upper"`` or ``"lower"``.
        loss: takes the batch of one problem.
        live: the live tensors that the loss reads.
        leaves: the stacked leaves that replace them.
        shared_rng: whether the lanes share their random numbers.
        weights: factors of the lanes in the sum. None: 1.
    """

    oracle: Oracle
    level: str
    loss: Callable[..., Any]
    live: Vector
    leaves: Vector
    shared_rng: bool
    weights: Tensor | None

    def __post_init__(self) -> None:
        self.key = f"{self.level} tasks"

    def __call__(self, batch: Any) -> Tensor:
        values = self.values(batch)
        return values.sum() if self.weights is None else (values * self.weights.to(values)).sum()

    def values(self, batch: Any) -> Tensor:
        """Return the losses of all lanes, shape (n,)."""
        # Passing the leaves through torch lets an outer substitution or vmap see them.
        lanes = [t.view_as(t) for t in self.leaves]
        session = self.oracle.session
        with session.buffers_kept():
            if self.key not in session.found.redirected:
                self._require_redirection(batch)
            parts = _each(self, self._at, batch, lanes, len(lanes[0]))
        return torch.cat(parts)

    def are_apart(self, placed: Sequence[Tensor]) -> bool:
        """Return True if lanes are evaluated one by one, and the stacks that they read are among these tensors."""
        session, n = self.oracle.session, len(self.leaves[0])
        apart = session.options.at_once(n) == 1 or not session.vmaps(True)
        return apart and self.key in session.found.redirected and {*map(id, self.leaves)} <= {*map(id, placed)}

    def one_by_one(
        self, variables: Sequence[Tensor], differentiate: Callable[..., Sequence[Tensor | None]], batch: Any
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the sum over the lanes and its gradient in some variables; memory is that of one lane."""
        session, stacks = self.oracle.session, {id(t): i for i, t in enumerate(self.leaves)}
        others, wanted = [t for t in variables if id(t) not in stacks], [*map(id, variables)]
        moved = [i for i, t in enumerate(self.leaves) if id(t) in wanted]
        total, sums, rows = list[Tensor](), list[Tensor | None]([None] * len(others)), list[Sequence[Tensor | None]]()
        one = Sample(self.loss)  # keeps the random state that lanes share
        for i, lane in enumerate(zip(*[t.detach().unbind() for t in self.leaves], strict=True)):
            own = [as_variable(t, id(stack) in wanted) for t, stack in zip(lane, self.leaves, strict=True)]
            with one.replayed(self.oracle.device) if self.shared_rng else nullcontext(), session.buffers_kept():
                value = self._at(select(batch, i), *own)
                value = value if self.weights is None else value * self.weights[i].to(value)
                inputs = [*others, *[own[k] for k in moved]]
                found = differentiate(value, inputs) if value.requires_grad else [None] * len(inputs)
            total.append(value.detach())
            sums = [a if b is None else b if a is None else a + b for a, b in zip(sums, found, strict=False)]
            rows.append(found[len(others) :])
        rest, places = iter(sums), {id(self.leaves[k]): j for j, k in enumerate(moved)}
        gradients = [
            _stacked([row[places[id(t)]] for row in rows], t[0]) if id(t) in places else next(rest) for t in variables
        ]
        if all([gradient is None for gradient in gradients]):
            raise ValueError(session.independent(self.level))
        return torch.stack(total).sum(), gradients

    def _at(self, batch: Any, *values: Tensor) -> Tensor:
        if self.oracle.session.hooked:
            values = (*on_lanes(self.live, values),)
        with Substitution(self.live, values):
            try:
                loss = self.loss(batch)
            except TypeError as error:
                require_fit(self.loss, (batch,), error)
                raise
            return as_scalar(loss, f"{self.level} loss")

    def _require_redirection(self, batch: Any) -> None:
        def variable(t: Any) -> Any:  # features have a graph, which is not to be differentiated here
            return as_variable(t) if isinstance(t, Tensor) and t.requires_grad else t

        one = Sample(self.loss, (tree_map(variable, select(batch, 0)),))
        free = [t for t in tree_leaves(one.batch) if isinstance(t, Tensor) and t.requires_grad]

        def loss(values: Sequence[Tensor]) -> Tensor:
            with random.preserve_rng(self.oracle.device), batch_kept(one):
                return self._at(one.batch, *values)

        batched.require_redirection(
            self.oracle,
            self.key,
            self.live,
            [t[0] for t in self.leaves],
            loss,
            "the tasks' own values, as TorchScript modules, checkpointing and NumPy do, so all tasks would read the "
            "same values; pass the plain module, without checkpointing, and use torch's functions; pass a parameter to "
            "an autograd.Function, torch.func.vmap or torch.func.grad as a view, weight.view_as(weight)",
            free,
            graph=True,
        )


def _stacked(row: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """Return gradients of all lanes as a stack; None if there are none."""
    if all([t is None for t in row]):
        return None
    return torch.stack([torch.zeros_like(like) if t is None else t for t in row])


class LaneFeatures:
    """Features of an objective for the stacked batches of all problems; they read x alone.

    Args:
        oracle: oracle of one problem.
        level: ``"upper"`` or ``"lower"``.
        features: those of the objective of one problem; its method ``stacked``, if it has one, evaluates all problems.
        shared_rng: whether the problems share their random numbers.
    """

    def __init__(self, oracle: Oracle, level: str, features: Callable[..., Any], *, shared_rng: bool) -> None:
        self.oracle, self.level, self.features, self.shared_rng = oracle, level, features, shared_rng
        self.key = f"{level} features"

    def __call__(self, batch: Any) -> Any:
        if self.level not in self.oracle.session.found.features_checked:
            first = Sample(self.features, (select(batch, 0),), features=self.features)
            with torch.enable_grad(), random.preserve_rng(self.oracle.device):
                self.oracle.check_features(self.level, first)
        if hasattr(self.features, "stacked"):
            return self.features.stacked(batch)
        with self.oracle.session.buffers_kept():  # a lane of vmap that a module has kept must not outlive it
            parts = _each(self, self._of_one, batch, [], len(tree_leaves(batch)[0]))
        return parts[0] if len(parts) == 1 else tree_map(lambda *ts: torch.cat(ts), *parts)

    def _of_one(self, batch: Any) -> Any:
        with Substitution((), ()):  # vmap cannot advance running statistics
            return self.features(batch)


def _each(
    of: LaneLoss | LaneFeatures, function: Callable[..., Any], batch: Any, values: Sequence[Tensor], n: int
) -> list[Any]:
    """Return, in parts, the stacked results of ``function`` for the batch and the values of each of n lanes."""
    session, shared_rng = of.oracle.session, of.shared_rng
    new = frozenset({of.key}) - session.found.vmapped
    shared = Sample(function)  # keeps the random state that lanes share

    def replayed(part: int) -> AbstractContextManager[None]:
        return shared.replayed(of.oracle.device) if shared_rng and part < n else nullcontext()

    def together(part: slice) -> Any:
        size, own_batch, own_values = part.stop - part.start, batch, values
        if size < n:  # a slice of all would cost a copy of the gradient
            own_batch, own_values = select(batch, part), [t[part] for t in values]
        with replayed(size):
            return mapped_over(
                function, own_batch, own_values, size, "same" if shared_rng else "different", known=not new
            )

    lanes: list[Sequence[Tensor]] = []

    def alone(i: int) -> Any:
        if not lanes and values:  # in one operation: the gradient of an index is as large as all lanes together
            lanes.extend(t.unbind() for t in values)
        with replayed(1), session.buffers_kept():
            return tree_map(lambda t: t.unsqueeze(0), function(select(batch, i), *(own[i] for own in lanes)))

    return batched.run(session, n, together, alone, new=new)

"""The two losses at one point: evaluation and first derivatives at given values of x and y, and cached features."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from ..problem.objective import Objective, Sample, batch_kept, note_batch, require_placed
from ..problem.random import numbers_kept
from ..problem.vector import Vector, any_sharded
from ..pytree import tree_leaves
from .buffers import Kept
from .differentiable import is_marked, mark_graph, require_constant_weights
from .doors import require_free_batch
from .session import Session, as_scalar

__all__ = ["Point", "afresh", "in_place", "none_to_zeros"]

CALLS_BACKWARD = (
    "the {} seems to call backward() or zero_grad(), or to return a loss whose graph has been freed, but its "
    "derivatives are taken after it returns: compute it afresh on every call, and return it without either call"
)
OUTSIDE = (
    "the {} uses a tensor with a graph that was computed outside it (a variable, torch.nn.utils.parametrize.cached(), "
    "a hook or cache of a module), and would not follow the parameters: compute it in the loss, or detach it"
)
REENTRANT = (
    "a loss uses reentrant checkpointing, which torch supports only in backward(), and not in torch.autograd.grad, by "
    "which it is differentiated: pass use_reentrant=False to torch.utils.checkpoint"
)
SPARSE = (
    "the gradient of parameter {} is sparse, but only dense gradients are supported: create its module (nn.Embedding, "
    "nn.EmbeddingBag) with sparse=False"
)
WRITES = (
    "a loss writes into {} parameter {}, which no loss may change; remove the in-place operation "
    "(nn.Embedding(max_norm=...) is one). An optimizer constrains lower parameters with lower_projection="
)
STRIDED = torch.strided


class Point:
    """Two losses at a point, with their first derivatives; arguments and attributes as in `Oracle`."""

    def __init__(
        self,
        upper: Iterable[Tensor],
        lower: Iterable[Tensor],
        upper_loss: Objective | Callable[..., Tensor],
        lower_loss: Objective | Callable[..., Tensor],
        *,
        names: Callable[[], Sequence[str]] | None = None,
        session: Session | None = None,
        lanes: int | None = None,
        values: tuple[Vector | None, Vector | None] = (None, None),
    ) -> None:
        self.lanes, self.shared, self.weight = lanes, lanes is None, lanes or 1
        self.live_x, self.live_y = Vector(upper), Vector(lower)
        x, y = values  # those of the live tensors, if None
        self.x, self.y = self.live_x.detach() if x is None else x, self.live_y.detach() if y is None else y
        self.live, self.placing = (self.live_x, self.live_y), values
        self.f = upper_loss if isinstance(upper_loss, Objective) else Objective(upper_loss)
        self.g = lower_loss if isinstance(lower_loss, Objective) else Objective(lower_loss)
        self.session = session or Session()
        self.checks = self.session.checks
        self.device = self.live_y[0].device
        self.sharded = any_sharded((*self.live_x, *self.live_y))
        self._features: dict[str, tuple[Sample, object, Any]] = {}  # the last ones, with their sample and x
        self.f.begin()
        self.g.begin()
        self._names = names
        if not self.session.found.reaches_upper:
            if self.device.type == "meta":
                raise ValueError(
                    f"parameter {self.lower_names()[0]} is on device meta, which stores no values; give the module "
                    "values (module.to_empty(device=...), then its weights) before you pass them"
                )
            for tensor, name in zip((*self.x, *self.y), self.names, strict=True):
                if tensor.device != self.device:
                    raise ValueError(
                        f"all parameters must be on one device, but parameter {name} is on {tensor.device} and "
                        f"parameter {self.lower_names()[0]} is on {self.device}; move them, or their module, to one "
                        "device before you pass them"
                    )

    def at(self, upper: Sequence[Tensor] | None = None, lower: Sequence[Tensor] | None = None) -> Self:
        """Return the same losses at other values of x, of y, or of both."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        x, y = self.placing
        if upper is not None:
            other.x = x = Vector([t.detach() if t.requires_grad else t for t in upper])
        if lower is not None:
            other.y = y = Vector([t.detach() if t.requires_grad else t for t in lower])
        other.placing = x, y
        return other

    @property
    def moved(self) -> tuple[bool, bool]:
        """True for x, and True for y, if the point has other values than the live tensors."""
        x, y = self.placing
        return x is not None, y is not None

    def placed(self) -> AbstractContextManager[Sequence[Vector]]:
        """Evaluate at this point inside the block; yields the variables x and y to differentiate in."""
        return (self.session.options.evaluation or in_place)(self.live, self.placing)

    def evaluating(self) -> AbstractContextManager[Sequence[Vector]]:
        """Context like `placed`, after which module buffers (running statistics) have their old values."""
        session = self.session
        if not session.buffers_constant:
            return self._evaluating()
        return (session.options.evaluation or in_place)(self.live, self.placing)

    @contextmanager
    def _evaluating(self) -> Generator[Sequence[Vector]]:
        with self.session.buffers_kept(), self.placed() as variables:
            yield variables

    @property
    def names(self) -> Sequence[str]:
        """Names of the upper, then of the lower tensors."""
        if self._names is not None:
            return self._names()
        levels = zip(("upper", "lower"), (self.x, self.y), strict=True)
        return [f"{level} {i}" for level, ts in levels for i in range(len(ts))]

    def lower_names(self) -> Sequence[str]:
        """Return the names of the lower tensors."""
        return self.names[len(self.x) :]

    def count(self, oracle: str, times: int = 1) -> None:
        """Count calls of an oracle."""
        self.session.counts[oracle] += times * self.weight

    # ------------------------------------------------------------------------------------------------ evaluations

    def evaluated(
        self, level: str, sample: Sample, x: Sequence[Tensor], y: Sequence[Tensor], *, features: Any = None
    ) -> Tensor:
        """Return the loss as a function of the variables x and y, with a graph; raise if it depends on nothing."""
        known = level in self.session.found.dependency_checked
        loss = self.value(level, sample, features=features) if known else self._first_value(level, sample, features)
        if level == "lower":
            self.session.lower_sample = sample
        if self.session.used is not None:
            self.session.note_use(level, self, sample)
        if known and loss.requires_grad:
            return loss
        # With constant features, the graph does not show every dependence on x.
        objective = self.f if level == "upper" else self.g
        whole = not known and not self.sharded and features is None
        whole = whole and (sample.features is None) == (objective.features is None)
        return self.session.dependent(level, loss, y, x if whole else None)

    def _first_value(self, level: str, sample: Sample, features: Any) -> Tensor:
        """Return the loss; if it sets ``.grad`` of a parameter, restore that and raise."""
        live = (*self.live_x, *self.live_y)
        before = [t.grad for t in live]
        loss = self.value(level, sample, features=features)
        if any(t.grad is not gradient for t, gradient in zip(live, before, strict=True)):
            for t, gradient in zip(live, before, strict=True):
                t.grad = gradient
            raise ValueError(CALLS_BACKWARD.format(self.session.called(level)))
        return loss

    def value(self, level: str, sample: Sample, *, graph: bool = True, features: Any = None) -> Tensor:
        """Return the loss on a sample at the placed point, with the sample's random numbers; raise if not a scalar.

        ``features`` are those of the sample at the current x, if the caller has them.
        """
        session = self.session
        if not graph:
            loss = self.without_graph(level, partial(self._called, sample, features=features))
        elif session.used is not None and level not in session.graphs_checked and not self.sharded:
            loss = self._with_own_graph(level, sample, features)
        elif sample.features is None:
            loss = self.call(sample)
        else:
            loss = self._called(sample, features=features)
        if not (type(loss) is Tensor and loss.dim() == 0 and not loss.is_complex()):
            loss = as_scalar(loss, session.called(level))
        if not graph:
            loss = loss.detach()
        # A parameter or an entry of one, whose memory will hold other values, is copied.
        return loss.clone() if loss.is_leaf or loss._is_view() else loss

    def without_graph(self, level: str, evaluate: Callable[..., Any]) -> Any:
        """Return the loss as ``evaluate(graph=False)`` does; with a graph if the loss takes derivatives itself."""
        found = self.session.found
        if level not in found.differentiates:
            try:
                with Kept(self.session.buffers, on_failure=True):
                    loss = evaluate(graph=False)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                found.differentiates = {**found.differentiates, level: True}
            else:
                found.differentiates = {**found.differentiates, level: False}
                return loss
        return evaluate(graph=found.differentiates[level])

    def _called(self, sample: Sample, *, graph: bool = True, features: Any = None) -> Any:
        """Return what the loss returns, with the features of the sample."""
        if sample.features is None:
            return self.call(sample, graph=graph)
        part = self.call(sample.features, graph=graph) if features is None else features
        return self.call(sample, part, graph=graph)

    def _with_own_graph(self, level: str, sample: Sample, features: Any) -> Any:
        """Return what the loss returns; raise if it uses graphs that are made outside it."""
        data = (self.f if level == "upper" else self.g).data
        if self.lanes is None and (level == "lower" or isinstance(data, (list, tuple))):
            why = "batches are computed outside the losses, and would not follow them"
            require_free_batch(level, sample.arguments, self.live_x, why)
        batch = [t for t in tree_leaves(sample.arguments) if isinstance(t, Tensor)]
        with self.session.buffers_kept(), numbers_kept(self.device):
            mark = mark_graph(self._called(afresh(sample), features=features), batch)
        loss = self._called(sample, features=features)
        if is_marked(loss, mark, (*self.live_x, *self.live_y)):
            raise ValueError(OUTSIDE.format(self.session.called(level)))
        self.session.graphs_checked.add(level)
        return loss

    def call(self, sample: Sample, *arguments: Any, graph: bool = True) -> Any:
        """Call a sample's function on its arguments, or on others, with the sample's random numbers."""
        # Copies of weights by autocast outlive the values they have; also those of an autocast in the loss, if the step
        # is in another that is disabled or of another device.
        torch.clear_autocast_cache()
        known = self.session.found.writes_seen
        try:
            if sample.once and known and not self.sharded and graph is torch.is_grad_enabled():
                return sample(*arguments)  # contexts cost more than small losses
            watched = self.session.gathered.watching() if self.sharded else nullcontext()
            with (
                nullcontext() if known else self._unwritten(sample),
                watched,
                nullcontext() if graph is torch.is_grad_enabled() else torch.set_grad_enabled(graph),
                nullcontext() if sample.once else sample.replayed(self.device),
            ):
                return sample(*arguments)
        except Exception as error:
            if isinstance(error, RuntimeError):
                require_placed(sample, self.device, error)
                require_constant_weights(error)
            note_batch(sample, error)
            raise

    @contextmanager
    def _unwritten(self, sample: Sample) -> Generator[None]:
        """In the first step: if a loss writes into parameters or its batch, restore them and raise."""
        live = [*self.live_x, *self.live_y]
        if any(t.is_inference() for t in live):
            yield
            return
        values, versions = [t.detach().clone() for t in live], [t._version for t in live]
        with batch_kept(sample):
            yield
        written = [i for i, t in enumerate(live) if t._version != versions[i]]
        if written:
            Vector(live[i].detach() for i in written).copy_(values[i] for i in written)
            level = "upper" if written[0] < len(self.live_x) else "lower"
            raise ValueError(WRITES.format(level, self.names[written[0]]))

    def differentiate(
        self, loss: Tensor, inputs: Sequence[Tensor], *, graph: bool = False, again: bool = False
    ) -> Sequence[Tensor | None]:
        """Return the gradient of a loss; None for inputs that it does not depend on.

        Args:
            loss: the loss.
            inputs: tensors to differentiate in.
            graph: make a graph of the gradient.
            again: keep the graph of the loss, which is differentiated once more.
        """
        if self.sharded and not graph:
            return _by_backward(loss, inputs, (*self.live_x, *self.live_y))
        try:
            found = torch.autograd.grad(
                loss, list(inputs), create_graph=graph, retain_graph=graph or again, allow_unused=True
            )
        except RuntimeError as error:
            if "a second time" in str(error):
                raise RuntimeError(CALLS_BACKWARD.format("loss")) from error
            if "use_reentrant" in str(error) or "Checkpointing is not compatible" in str(error):
                raise ValueError(REENTRANT) from error
            raise
        for gradient in found:
            if gradient is not None and gradient.layout is not STRIDED:
                names = dict(zip(map(id, (*self.live_x, *self.live_y)), self.names, strict=True))
                own = next(t for t, other in zip(inputs, found, strict=True) if other is gradient)
                raise ValueError(SPARSE.format(names.get(id(own), "")))
        return self.apart(found, graph=graph) if self.session.hooked else found

    @staticmethod
    def apart(gradients: Sequence[Tensor | None], *, graph: bool = False) -> Sequence[Tensor | None]:
        """Return copies of gradients, without a graph by default: a hook may return one tensor of its own each time."""
        return [None if t is None else (t if graph else t.detach()).clone() for t in gradients]

    def averaged(self, *results: Any) -> tuple[Any, ...]:
        """Return means over the ranks if these share the problem; otherwise the results themselves."""
        ranks = self.session.options.ranks
        return results if ranks.alone or not self.shared else ranks.mean(*results)

    # ------------------------------------------------------------------------------------------------ derivatives

    def lower_jointly(self, sample: Sample) -> tuple[Tensor, Vector, Vector]:
        """Return the value of g and both its gradients, as `upper` does for f; counts as a lower gradient."""
        return self.upper(sample, "lower")

    def upper(self, sample: Sample, level: str = "upper") -> tuple[Tensor, Vector, Vector]:
        """Return the value of f (with ``level``, of g) and its gradients in x and in y, from one backward pass."""
        with self.evaluating() as (x, y):
            loss, gradients = self.slopes(level, sample, x, y, (*x, *y))
        if gradients[0] is None and all(gradient is None for gradient in gradients):
            raise ValueError(self.session.independent(level))
        split = len(x)
        if level == "lower" or self.session.options.one_loss:
            self.session.require_reached(gradients[split:], self.lower_names)
        self.session.note_reached(gradients[:split])
        name = f"{level}_grad"
        loss, grad_x, grad_y = self.results(name, loss, (gradients[:split], self.x), (gradients[split:], self.y))
        self.checks.finite(name, [*grad_x, *grad_y])
        return loss, grad_x, grad_y

    def lower(self, sample: Sample, level: str = "lower") -> tuple[Tensor, Vector]:
        """Return the value of g (with ``level``, of f) and its gradient in y alone, with constant features."""
        with self.evaluating() as (x, y):
            loss, gradients = self.slopes(level, sample, x, y, y, frozen=True)
        if level == "lower":
            self.session.require_reached(gradients, self.lower_names)
        loss, gradient = self.results(f"{level}_grad", loss, (gradients, self.y))
        return loss, gradient

    def upper_alone(self, sample: Sample) -> tuple[Tensor, Vector]:
        """Return the value of f and its gradient in x alone."""
        with self.evaluating() as (x, y):
            loss, gradients = self.slopes("upper", sample, x, y, x)
        self.session.note_reached(gradients)
        loss, gradient = self.results("upper_grad", loss, (gradients, self.x))
        self.checks.finite("upper_grad", gradient)
        return loss, gradient

    def results(
        self, counted: str, loss: Tensor, *gradients: tuple[Sequence[Tensor | None], Vector]
    ) -> tuple[Any, ...]:
        """Return a loss and gradients of it, means over the ranks, and count them under a name.

        Gradients come with the values that they belong to: those of tensors that the loss leaves out are zero.
        """
        self.session.counts[counted] += self.weight
        found: tuple[Any, ...] = (
            loss.detach(),
            *[none_to_zeros(own, like) for own, like in gradients],
        )
        if not self.session.options.ranks.alone:
            found = self.averaged(*found)
        self.checks.loss(found[0])
        return found

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
        """Return a loss at the placed point and its gradient in some variables; None for those that it leaves out.

        Args:
            level: ``"upper"`` or ``"lower"``.
            sample: the sample to evaluate on; its parts, if it has any, one after another.
            x: the upper variables.
            y: the lower variables; the loss must depend on some variable.
            variables: tensors to differentiate in.
            frozen: whether features are constants.
        """
        if sample.parts is None:
            features = None if sample.features is None or not frozen else self.frozen(level, sample)
            loss = self.evaluated(level, sample, x, y, features=features)
            return loss, self.differentiate(loss, variables)
        loss = torch.zeros((), device=self.device)
        total: list[Tensor | None] = [None] * len(variables)
        for part in sample.parts:
            with self.session.buffers_kept():
                more, gradients = self.slopes(level, part, x, y, variables, frozen=frozen)
            loss = loss + more.detach()
            total = [s if t is None else t if s is None else s + t for s, t in zip(total, gradients, strict=True)]
            del more, gradients  # frees the graph before the next one is built
        if level == "lower":
            self.session.lower_sample = sample
        share = 1 / len(sample.parts)
        return loss * share, [None if t is None else t * share for t in total]

    # ------------------------------------------------------------------------------------------------ features

    def frozen(self, level: str, sample: Sample, at: object = None, evaluate: Callable[[], Any] | None = None) -> Any:
        """Return a sample's features as constants, for derivatives in y alone; evaluated once for each x and batch.

        Args:
            level: level of the objective.
            sample: the sample; the result is None if its objective has no features.
            at: identifies the x of the features. Default: that of this point.
            evaluate: evaluates them there. Default: at the placed point.
        """
        if sample.features is None:
            return None
        self.check_features(level, sample)
        at = self.x if at is None else at
        kept, place, part = self._features.get(level, (None, None, None))
        if place is not at or kept is not sample.features:
            part = self.call(sample.features, graph=False) if evaluate is None else evaluate()
            self._features[level] = (sample.features, at, part)
        return part

    def check_features(self, level: str, sample: Sample) -> None:
        """Raise, at the first call, if the features of a sample depend on y."""
        if sample.features is not None and level not in self.session.found.features_checked:
            with self.session.buffers_kept():
                self.require_free_of_lower(level, self.call(sample.features))
            self.session.found.features_checked |= {level}

    def require_free_of_lower(self, level: str, part: Any) -> None:
        """Raise if features depend on y: they are cached while y moves."""
        parts = [t for t in tree_leaves(part) if isinstance(t, Tensor) and t.requires_grad]
        if parts:
            reached = torch.autograd.grad([t.sum() for t in parts], self.live_y, allow_unused=True)
            for gradient, name in zip(reached, self.lower_names(), strict=True):
                if gradient is not None:
                    raise ValueError(
                        f"the features of the {level} objective depend on lower parameter {name}, but are evaluated "
                        "only once for many values of y; move the part that reads y from features= into the loss"
                    )


class in_place:
    """Put values into live tensors inside the block; yields the live tensors as variables.

    This works with everything that torch does with a closure over them (compiled modules, checkpointing, hooks), but
    for one set of values at a time and not inside a larger graph: copies and compiled steps replace the live tensors
    in every torch call instead (`Substitution`). Graphs made inside must not be used outside: a graph saves the live
    leaf itself, and would read the restored value.

    Args:
        live: vectors of live tensors.
        values: for each a vector, or None to keep its values.
    """

    __slots__ = ("_before", "_live", "_moved", "_values")

    def __init__(self, live: Sequence[Vector], values: Sequence[Vector | None]) -> None:
        self._live = live
        self._moved: list[Tensor] = []
        self._values: list[Tensor] = []
        for tensors, new in zip(live, values, strict=True):
            if new is not None:
                self._moved += tensors
                self._values += new
        self._before: Sequence[Tensor] = ()

    def __enter__(self) -> Sequence[Vector]:
        moved = self._moved
        if any_sharded(moved):
            # FSDP knows a sharded parameter's storage by its address: write into it instead.
            self._before = Vector(moved).detach().clone()
            Vector(moved).copy_(self._values)
            return self._live
        self._before = [t.data for t in moved]
        try:
            for tensor, value in zip(moved, self._values, strict=True):
                tensor.data = value
        except BaseException:
            self.__exit__()
            raise
        return self._live

    def __exit__(self, *error: Any) -> None:
        if isinstance(self._before, Vector):
            Vector(self._moved).copy_(self._before)
            return
        for tensor, storage in zip(self._moved, self._before, strict=True):
            tensor.data = storage


def afresh(sample: Sample) -> Sample:
    """Return a sample of the same batch, with random numbers of its own."""
    return Sample(sample.loss, sample.arguments, features=None if sample.features is None else sample.features.loss)


def none_to_zeros(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> Vector:
    """Return gradients with zeros for the tensors without one."""
    if any([g is None for g in gradients]):
        return Vector([torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)])
    return Vector(gradients)  # type: ignore[arg-type]


def _by_backward(loss: Tensor, inputs: Sequence[Tensor], live: Sequence[Tensor]) -> list[Tensor | None]:
    """Return gradients through ``.backward()``, the only way for sharded parameters (FSDP2); restore ``.grad``."""
    before = [t.grad for t in live]
    for tensor in live:
        tensor.grad = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return [t.grad for t in inputs]
    finally:
        for tensor, grad in zip(live, before, strict=True):
            tensor.grad = grad

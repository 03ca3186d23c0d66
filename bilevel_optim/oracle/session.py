"""State that the evaluations of one step share: options, counts, flags, and facts found about the losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..distributed.ranks import Ranks
from ..distributed.sharding import Gathered, wraps_for_ranks
from ..errors import NonFiniteError, root_hint, warn
from ..problem.objective import Sample
from ..problem.vector import Vector, any_sharded
from ..pytree import replace
from ..tracing import is_tracing
from .buffers import Buffers, Kept
from .differentiable import reaches

__all__ = ["COUNTERS", "Checks", "EvaluationOptions", "LossFacts", "LowerTrend", "Session", "as_scalar"]

Evaluation = Callable[[Sequence[Vector], Sequence[Vector | None]], AbstractContextManager[Sequence[Vector]]]
_NONE = Kept(Buffers(complete=True))
COUNTERS = ("upper_grad", "lower_grad", "hvp", "jvp", "loss")
STREAK = 10  # lower solves in a row that must agree before a warning


Message = str | Callable[[], str]  # or a function that makes it when needed

REFUSAL = "refusal"  # the key of alerts that are errors


class Checks:
    """Checks of one step: for finite values, and for reasons to warn.

    ``finite`` and ``alert`` only queue; ``verify`` reads everything at once.

    Attributes:
        roots: operations of a loss, as users call them, that have no finite derivative of some order at zero.
    """

    roots: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all checks, before an estimate is made again."""
        self._finite: list[tuple[str, str, list[Tensor]]] = []
        self._scalars: list[tuple[str, Tensor]] = []
        self._sums: list[Tensor] = []  # in a trace, a number for each tensor
        self._alerts: list[tuple[str, Message, Callable[..., Any], tuple[Tensor, ...]]] = []

    def finite(self, oracle: str, tensors: Iterable[Tensor], hint: str = "") -> None:
        """Require that every entry of ``tensors``, results of ``oracle``, is finite."""
        if is_tracing():  # summed here, so that parts of a graph hand on a number, not a vector
            self._sums += [t.detach().sum(dtype=torch.promote_types(torch.float32, t.dtype)) for t in tensors]
            return
        self._finite.append((oracle, hint, [t.detach() if t.requires_grad else t for t in tensors]))

    def loss(self, value: Tensor, hint: str = "") -> None:
        """Require that a loss, a single number, is finite, at less cost."""
        self._scalars.append((hint, value))

    def alert(self, key: str, message: Message, on: Tensor) -> None:
        """Warn with ``message`` if the boolean scalar ``on`` is true, once in an optimizer's life for each ``key``."""
        self.alert_if(key, message, _itself, on)

    def alert_if(self, key: str, message: Message, test: Callable[..., Any], *figures: Tensor) -> None:
        """Warn if ``test`` is true of the scalar tensors ``figures``; see `alert` for ``key`` and ``message``.

        `verify` reads the figures of all checks at once, and the test gets numbers. In a trace it gets the tensors, so
        it must consist of comparisons, ``&`` and ``|``.
        """
        self._alerts.append((key, message, test, figures))

    def refuse(self, message: str, on: Tensor) -> None:
        """Raise ValueError with ``message`` if the boolean scalar ``on`` is true."""
        self.alert(REFUSAL, message, on)

    def flags(self) -> tuple[list[str], Tensor]:
        """Replace `verify` in a graph: return the keys of the alerts, and a tensor of non-finite flag and alerts.

        Nothing is read on the host. If a value is not finite, an eager step finds out which one.
        """
        tensors = [*self._sums, *(t.reshape(()) for *_, t in self._scalars)]
        alerts = [test(*figures).reshape(()) for *_, test, figures in self._alerts]
        like = next(iter((*tensors, *alerts)), torch.empty((), device="cpu"))
        kind = torch.promote_types(torch.float32, like.dtype)
        total = torch.zeros((), dtype=kind, device=like.device)
        for t in tensors:
            total = total + t
        # Not (total * 0).isnan(): Inductor of torch 2.11 takes 0 for the product.
        return [key for key, *_ in self._alerts], torch.stack([~total.isfinite(), *alerts])

    def verify(
        self,
        step: int,
        warned: set[str],
        shown: Sequence[Tensor] | None = None,
        quiet: Callable[[str], bool] = lambda key: False,
    ) -> set[str]:
        """Raise `NonFiniteError` for the first oracle that failed; warn; return the keys of the alerts that were on.

        ``warned`` receives the key of each warning. ``shown`` are tensors that show whether any vector was not finite;
        by default all vectors are checked. Keys for which ``quiet`` is true give no warning.
        """
        # A norm is cheap, and not finite if an entry is not; `_require_finite` recognises a mere overflow.
        tensors = [t for *_, vector in self._finite for t in vector] if shown is None else shown
        signs = [Vector([t]).norm() for t in tensors] if any_sharded(tensors) else Vector(tensors).norms()
        for *_, value in self._scalars:
            signs.append(value)
        if not self._alerts:
            if not all(map(math.isfinite, _read(signs))):
                self._require_finite(step)
            return set()
        numbers = _read([*signs, *[figure for *_, figures in self._alerts for figure in figures]])
        if not all(map(math.isfinite, numbers[: len(signs)])):
            self._require_finite(step)
        on, remaining = set(), iter(numbers[len(signs) :])
        for key, message, test, figures in self._alerts:
            if not test(*islice(remaining, len(figures))):
                continue
            text = message if isinstance(message, str) else message()
            if key == REFUSAL:
                raise ValueError(text)
            on.add(key)
            if key not in warned and not quiet(key):
                warned.add(key)
                warn(text)
        return on

    def _require_finite(self, step: int) -> None:
        """Raise for the first oracle that returned a non-finite entry."""
        for oracle, hint, vector in self._finite:
            if not bool(Vector(vector).max_abs().isfinite()):
                raise NonFiniteError(oracle, step, root_hint(oracle, self.roots, hint))
        for hint, value in self._scalars:
            if not bool(value.isfinite()):
                raise NonFiniteError("loss", step, hint)


@dataclass(frozen=True)
class EvaluationOptions:
    """Options for the evaluation of losses.

    Attributes:
        vectorize: copies and lanes under one vmap (True), in a loop (False), or in chunks of that many.
        hvp: ``"exact"`` or ``"finite-difference"`` second derivatives.
        ranks: ranks over which results are averaged.
        evaluation: context that puts given values in the place of live tensors. Default: `in_place`.
        one_loss: whether the user gave one loss for both levels, so that messages say "the loss".
        follows_curvature: whether learning rates of y follow the curvature of g.
        responds: whether the estimate relies on y's response to x in the lower loss.
    """

    vectorize: bool | int = True
    hvp: str = "exact"
    ranks: Ranks = field(default_factory=Ranks)
    evaluation: Evaluation | None = None
    one_loss: bool = False
    follows_curvature: bool = False
    responds: bool = True

    def at_once(self, n: int) -> int:
        """Return how many of n evaluations may run together."""
        return min(n if self.vectorize is True else max(int(self.vectorize), 1), n)


@dataclass
class LossFacts:
    """Facts about the losses, found by the first evaluations and not checked again."""

    fused: bool | None = None  # a loss contains fused operations that cannot be differentiated twice
    roots: tuple[str, ...] = ()  # operations of the lower loss without a finite second derivative at zero
    kinked: bool | None = None  # the lower loss contains activations whose derivative jumps
    products: frozenset[str] | None = None  # products in the lower loss whose precision torch can lower
    apart: bool = False  # losses of copies are differentiated one by one, not their sum
    fallback: str | None = None  # why the loop runs although vmap was requested
    vmapped: frozenset[str] = frozenset()  # losses ("lower copies", "upper tasks") that are known to work under vmap
    redirected: frozenset[str] = frozenset()  # those that are known to read parameters where torch sees it
    ranks_agree: bool = False  # all ranks are known to have begun with the same parameters
    writes_seen: bool = False  # losses have been checked for writes into parameters
    reaches_lower: bool = False  # the lower loss is known to depend on every lower parameter
    reaches_upper: bool = False  # some loss is known to depend on some upper parameter
    features_checked: frozenset[str] = frozenset()  # levels whose features are known not to depend on y
    dependency_checked: frozenset[str] = frozenset()  # levels whose dependencies are known
    # By level: True if its loss takes derivatives itself (torch.autograd.grad), so that its value alone needs a graph.
    differentiates: Mapping[str, bool] = field(default_factory=dict)
    # For losses whose derivatives were checked: open questions, steps before the last check, code.
    derivatives: Mapping[Any, tuple[Any, ...]] = field(default_factory=dict)
    opened: str = ""  # all of these questions
    ignores_other_level: frozenset[str] = frozenset()  # levels whose loss depends on no parameter of the other one

    def __getstate__(self) -> dict[str, Any]:
        # They are known by the code of the losses, which cannot be pickled.
        return {**vars(self), "derivatives": {}, "opened": ""}

    def look_again(self) -> None:
        """Forget which facts are known, for other losses or parameters; keep those that demand care."""
        self.writes_seen, self.fused, self.kinked = False, self.fused or None, self.kinked or None
        self.vmapped = self.redirected = self.features_checked = self.dependency_checked = frozenset()
        self.ignores_other_level, self.differentiates = frozenset(), {}

    def diagnostics(self) -> dict[str, str]:
        """Return the facts that the diagnostics of a step report."""
        found = {} if self.fallback is None else {"vectorize_fallback": self.fallback}
        if self.opened:
            found["derivatives"] = self.opened
        return found

    def note_derivatives(self, losses: Any, opened: str, steps: int, *codes: Any) -> None:
        """Note that derivatives of losses were checked after so many steps, and which questions that has left open."""
        self.derivatives = {**self.derivatives, losses: (opened, steps, *codes)}
        self.opened = "; ".join(sorted({own[0] for own in self.derivatives.values()} - {""}))

    def forget_derivatives(self) -> None:
        """Let derivatives be checked again."""
        self.derivatives, self.opened = {}, ""


@dataclass
class LowerTrend:
    """Trend of lower solves, of at least three steps each, over several outer steps.

    Attributes:
        grew: number of last solves in a row that ended with a larger gradient than they began with.
        factor: total growth of the gradient in them.
        began: norm of the gradient before the first of them.
        swung: number in a row that ended with gradients that pointed against each other and did not get smaller.
        kinked: number that ended with gradients against each other, less three times the number that did not.
        largest: the largest norm at the end of a solve.
        text: description of the trend, for the warning.
    """

    grew: int = 0
    factor: float = 1.0
    began: float = 0.0
    swung: int = 0
    kinked: int = 0
    largest: float = 0.0
    text: str = ""

    def note_solve(self, first: float, last: float, turn: float) -> bool:
        """Note the norms of a solve's first and last gradient and the product of its last two; return True to warn.

        Noise alone gives no warning: with independent gradients each solve grows with probability one half.
        """
        growth = last / first if first > 0 else 1.0
        self.largest = max(self.largest, last)
        if growth <= 1:
            self.grew, self.factor = 0, 1.0
        else:
            self.began = self.began if self.grew else first
            self.grew, self.factor = self.grew + 1, self.factor * growth
        opposed = turn < -0.5 * last * last and growth > 0.9 and last > 0.1 * self.largest
        self.swung = self.swung + 1 if opposed else 0
        # At kinks not every pair of gradients is opposed. One that is not counts thrice, so that noise does not add up.
        back = turn < -0.2 * last * last and growth > 0.5 and last > 0.1 * self.largest
        self.kinked = self.kinked + 1 if back else max(self.kinked - 3, 0)
        if (self.grew >= STREAK and last > 10 * self.began) or (self.grew >= 2 * STREAK and self.factor > 100):
            self.text = (
                f"the gradient of the lower loss has grown in each of the last {self.grew} lower solves, from "
                f"{self.began:.2g} to {last:.2g}"
            )
        elif self.swung >= STREAK or self.kinked >= 2 * STREAK:
            count = f"each of the last {self.swung}" if self.swung >= STREAK else "most of the last"
            self.text = (
                f"y swings about a solution: at the end of {count} lower solves two gradients in a row pointed against "
                f"each other, and their norm, {last:.2g}, does not get smaller"
            )
        else:
            return False
        return True

    def message(self) -> str:
        """Return the warning."""
        return (
            f"{self.text} (see diagnostics['lower_growth']), so y is no solution of the lower problem and "
            "the hypergradient is not reliable. Use a smaller lower_lr (half of it to begin with), "
            "another lower_optimizer, or lower_clip. At a kink (abs, relu) no rate helps: use a smooth loss, or "
            "proximal steps (lower_projection) with ITD"
        )


@dataclass
class Session:
    """One step's bookkeeping; nothing of it reaches the optimizer before the step has been checked.

    Attributes:
        options: options for the evaluation of losses.
        found: a copy of the known facts about the losses, to which the step may add.
        buffers: module buffers that evaluations change.
        counts: oracle calls of this step.
        checks: flags to be read at its end.
        warned: keys of earlier warnings.
        trend: trend of lower solves; also a copy.
        buffers_skipped: whether some module would have updated buffers.
        lower_sample: the last sample that g was evaluated on.
        used: for each loss the point and the sample of its first derivative; None: not noted.
        depends_on_something: levels whose loss was seen to depend on something in this step.
        never_reached: indices of the lower tensors that no evaluation of the lower loss has reached in this step.
        doors: ways by which y depends on x besides the lower loss, see `doors`.
        one_by_one: why copies and lanes cannot run together in this step; empty if they can.
        hooked: some lower parameter has a hook.
        looped: why they ran in a loop, if that is not among the facts.
        buffers_constant: whether no evaluation changes module buffers.
        graphs_checked: levels whose loss has been checked in this step for graphs from outside.
    """

    options: EvaluationOptions = field(default_factory=EvaluationOptions)
    found: LossFacts = field(default_factory=LossFacts)
    buffers: Buffers = field(default_factory=Buffers)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    checks: Checks = field(default_factory=Checks)
    buffers_skipped: bool = False
    lower_sample: Sample | None = None
    used: dict[str, tuple[Any, Sample]] | None = None
    depends_on_something: set[str] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
    trend: LowerTrend = field(default_factory=LowerTrend)
    never_reached: set[int] | None = None
    doors: frozenset[str] = frozenset()
    one_by_one: str = ""
    hooked: bool = False
    looped: str = ""
    graphs_checked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.buffers_constant = self.buffers.constant  # as long as the step lasts: asked once

    def vmaps(self, lanes: bool) -> bool:
        """Return True if evaluations may run together; ``lanes`` if these are, or contain, those of several tasks."""
        return self.found.fallback is None and not self.one_by_one and not (self.hooked and lanes)

    @cached_property
    def gathered(self) -> Gathered:
        """Full parameters of sharded modules."""
        return Gathered()

    @classmethod
    def after(cls, known: Any, options: EvaluationOptions) -> Session:
        """Return the bookkeeping of another step, with copies of what a session or the state of a run knows."""
        return cls(options, replace(known.found), known.buffers, warned=set(known.warned), trend=replace(known.trend))

    def note_use(self, level: str, point: Any, sample: Sample) -> None:
        """Note the first point and sample at which a step takes a derivative of a loss, if these are asked for."""
        if self.used is not None:
            self.used.setdefault(level, (point, sample))

    def buffers_kept(self) -> AbstractContextManager[Kept]:
        """Restore module buffers (running statistics) after the block, which evaluates one loss once."""
        return nullcontext(_NONE) if self.buffers_constant else Kept(self.buffers, self)

    # ------------------------------------------------------------------------------------------------ dependencies

    def begin(
        self, x: Sequence[Tensor], y: Sequence[Tensor], names: Callable[[], Sequence[str]], options: Mapping[str, str]
    ) -> None:
        """Raise on all ranks unless they have the same options and, in the first step, the same parameters."""
        if self.options.ranks.alone or self.options.ranks.begin(options, self.found.ranks_agree):
            return
        differing = self.options.ranks.differing([*x, *y])
        if differing:
            called = [f"{'upper' if i < len(x) else 'lower'} parameter {names()[i]}" for i in differing[:3]]
            raise ValueError(
                f"the ranks of process_group hold different values of {', '.join(called)}"
                f"{', ...' if len(differing) > 3 else ''}, so each rank would solve a different problem; use the same "
                "seed on all ranks, load the same checkpoint, or broadcast the parameters of one rank "
                "(torch.distributed.broadcast)"
            )
        self.found.ranks_agree = True

    def require_reached(self, gradients: Sequence[Tensor | None], names: Callable[[], Iterable[str]]) -> None:
        """Raise if the lower loss leaves out a lower parameter or, after the first step, all of them.

        After the first step single evaluations may leave out a tensor; one that no evaluation reaches is noted.
        """
        if self.found.reaches_lower:
            if self.never_reached is None or self.never_reached:
                left_out = {i for i, gradient in enumerate(gradients) if gradient is None}
                self.never_reached = left_out if self.never_reached is None else self.never_reached & left_out
            if not (gradients and gradients[0] is not None) and all(gradient is None for gradient in gradients):
                raise ValueError(self.independent("lower"))
        else:
            for gradient, name in zip(gradients, names(), strict=True):
                if gradient is None:
                    raise ValueError(
                        f"the {self.called('lower')} does not depend on lower parameter {name}, so lower steps cannot "
                        "optimise it; leave it out of the lower parameters, or check that the loss reads the live "
                        "tensor and not a detached or old one (checkpointing needs use_reentrant=False)"
                    )
            self.found.reaches_lower, self.never_reached = True, set()

    def note_reached(self, gradients: Iterable[Tensor | None]) -> None:
        """Note if any loss depended on an upper parameter."""
        if not self.found.reaches_upper:
            self.found.reaches_upper = any(gradient is not None for gradient in gradients)

    def note_response(self, responds: Tensor) -> None:
        """Note that y responds to x, if a measurement without derivatives has shown it."""
        known = self.found.reaches_upper and "lower" not in self.found.ignores_other_level
        if not known and not is_tracing() and bool(responds):
            self.found.reaches_upper = True
            self.found.ignores_other_level -= {"lower"}

    def conclude(self, names: Callable[[], Sequence[str]]) -> None:
        """Raise if no loss has depended on an upper parameter; warn once of each dependency that is missing."""
        self.found.writes_seen = True
        alone = self.options.ranks.alone and not self.buffers.complete and "process_group" not in self.warned
        if alone and self.gathered.spans_ranks:
            self.warned.add("process_group")
            warn(
                "a loss calls a module that fully_shard has split over processes, but the method has no process_group: "
                "gradients of its parameters are means over the processes, but losses and all other gradients are "
                "those of each process's own data, so that x drifts apart if the data differ; pass "
                "process_group=torch.distributed.group.WORLD to the method"
            )
        if alone and wraps_for_ranks(self.buffers.modules):
            self.warned.add("process_group")
            warn(
                "a loss calls a DistributedDataParallel module, but the method has no process_group: a step does not "
                "run the wrapper's reductions, so each process uses its own data alone, and x and y drift apart; pass "
                "process_group=torch.distributed.group.WORLD to the method"
            )
        for i in self.never_reached or ():  # the lower loss reached them in the first step
            if (key := f"unreached {i}") not in self.warned:
                self.warned.add(key)
                warn(
                    f"no evaluation of the {self.called('lower')} in this step depended on lower parameter "
                    f"{names()[i]}, although those of the first step did, so it is no longer optimised. "
                    "If the module now has a new tensor in its place (module.weight = ...), write into the old tensor "
                    "instead of replacing it: with torch.no_grad(): module.weight.copy_(...)"
                )
        if not self.found.reaches_upper:
            raise ValueError(
                f"{'the loss does not depend' if self.options.one_loss else 'neither loss depends'} on any upper "
                "parameter, so the hypergradient would be silently zero; check that the live upper tensors are read "
                "and not detached or old ones (checkpointing needs use_reentrant=False)"
            )
        for level in self.found.ignores_other_level and self.found.ignores_other_level - self.warned:
            other = "lower" if level == "upper" else "upper"
            if level == "upper" or (self.options.responds and not self.doors):
                warn(
                    f"the {level} loss depends on no {other} parameter, so that the hypergradient has no indirect "
                    "term; check that the two losses, or the upper and the lower parameters, are not swapped"
                )
                self.warned.add(level)

    def dependent(self, level: str, loss: Tensor, y: Sequence[Tensor], x: Sequence[Tensor] | None) -> Tensor:
        """Return the loss, checked to depend on something; with x, note once if it ignores the other level."""
        if not loss.requires_grad and any(t.requires_grad for t in y):
            raise ValueError(self.independent(level))
        if x is not None and level not in self.found.dependency_checked and loss.requires_grad:
            reached = [reaches(loss, tensors) for tensors in (x, y)]
            if not any(reached):
                raise ValueError(self.independent(level))
            self.found.dependency_checked |= {level}
            if not reached[level == "upper"] and not self.options.one_loss:
                self.found.ignores_other_level |= {level}
        return loss

    def reaching(self, level: str, loss: Tensor, y: Sequence[Tensor], x: Sequence[Tensor]) -> Tensor:
        """Return the loss, checked once in a step to reach y (f: y or x), which the gradient of a sum does not show."""
        if level not in self.depends_on_something and not is_tracing():
            if not reaches(loss, y if level == "lower" else (*y, *x)):
                raise ValueError(self.independent(level))
            self.depends_on_something.add(level)
        return loss

    def independent(self, level: str) -> str:
        """Return the message about a loss that depends on nothing, or no longer on y."""
        if level == "lower" and self.found.reaches_lower:
            return (
                f"the {self.called(level)} depends on no lower parameter, although that of the first step did; check "
                "that it does not detach, and if the module has new tensors in their place (after "
                "load_state_dict(assign=True)), write into the old ones instead, or create a new optimizer"
            )
        return (
            f"the {self.called(level)} depends on no parameter, upper or lower; check that it reads the live tensors "
            "(after load_state_dict(assign=True) a module has new ones: write into the old ones instead, or create a "
            "new optimizer), and that it does not detach, call .item() or run under torch.no_grad()"
        )

    def called(self, level: str) -> str:
        """Return the name of a level's loss in messages."""
        return "loss" if self.options.one_loss else f"{level} loss"


def as_scalar(loss: Any, called: str) -> Tensor:
    """Return the result of a loss as a scalar, or raise; ``called`` is its name in the message."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"the {called} must return a scalar tensor, but returned {found}; return loss.mean() or loss.sum(), "
            "without .item()"
        )
    if loss.is_complex():
        raise ValueError(
            f"the {called} is complex, but only real numbers can be minimised; return a real "
            "number, such as loss.abs() or loss.real"
        )
    if type(loss) not in (Tensor, Parameter) and type(loss).__torch_dispatch__ is Tensor.__torch_dispatch__:
        loss = loss.as_subclass(Tensor)  # data of a subclass do not pass it on to gradients and state
    scalar: Tensor = loss if loss.dim() == 0 else loss.reshape(())
    return scalar


def _itself(on: Any) -> Any:
    return on


def _read(scalars: list[Tensor]) -> list[float]:
    """Read scalars on the host, with one synchronisation."""
    if all([t.is_cpu for t in scalars]):  # cheaper than to stack them
        return [t.item() for t in scalars]
    away = next(t for t in scalars if not t.is_cpu)
    kind = functools.reduce(torch.promote_types, {t.dtype for t in scalars})
    read: list[float] = torch.stack([t.to(away.device, kind) for t in scalars]).tolist()
    return read

"""`BilevelOptimizer`: a ``torch.optim.Optimizer`` over two sets of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..distributed.ranks import Ranks
from ..hypergradient import Estimate
from ..hypergradient.estimate import measured
from ..oracle.advance import advance_buffers
from ..oracle.oracle import Oracle
from ..oracle.session import Options
from ..problem import tasks as task_layer
from ..problem.parameters import (
    LEVELS,
    Params,
    as_groups,
    by_level,
    consistently_named,
    is_count,
    is_number,
    level_groups,
    names_of,
    require,
    require_one_level,
    require_rates,
    require_usable,
    tensors_of,
)
from ..problem.random import draw_random_inputs
from ..problem.vector import Vector
from ..solvers.limits import Clip, Projection, limits_of
from ..solvers.lower import LowerRules
from . import memory, method
from .adapting import Adapting
from .checkpoint import OWN, REMADE, Checkpointed
from .compiled import Look
from .declaration import register
from .hooks import no_dynamo, with_hooks
from .method import ColdOptions, CommonOptions, Loss, as_objective
from .results import Results
from .run_state import RunState
from .running import Running
from .step import Groups, Start, StepInputs, Update, changed
from .transaction import Transaction, Write, agree_on_fallback, writes_of

KEPT = 1 << 16  # entries of vectors that are kept for diagnostics, which most steps are not asked for

__all__ = ["REMADE", "BilevelOptimizer", "ColdOptions", "CommonOptions", "Loss", "as_objective"]


class BilevelOptimizer(Running, Adapting, Results, Checkpointed):
    r"""Base class of the methods for :math:`\min_x f(x, y^*(x))`, :math:`y^*(x) = \arg\min_y g(x, y)`.

    A real ``torch.optim.Optimizer``: ``param_groups`` holds the groups of the upper parameters x, then those of the
    lower parameters y; each has a ``"level"`` (``"upper"`` or ``"lower"``) and its own ``"lr"``, which schedulers may
    change.

    A step is a function of values: :meth:`estimate` improves y and estimates the hypergradient, :meth:`update` moves x;
    neither writes anything. What they return is checked, and then written by this class. A method is a subclass that
    has these functions; of ``self`` they read hyper-parameters only.

    Args:
        upper: upper parameters: tensors, ``(name, tensor)`` pairs or group dicts, as ``torch.optim`` takes.
        lower: lower parameters, likewise.
        lr: learning rate of the upper update.
        lower_lr: learning rate of the lower steps.
        lower_steps: lower steps per outer step.
        warm_start: start each lower solve where the last one ended; otherwise each starts from the value that the lower
            parameters had at the first step. Default: True.
        lower_optimizer: makes the optimizer of the lower steps from parameter groups, as ``torch.optim.Adam`` or
            ``lambda groups: torch.optim.SGD(groups, momentum=0.9)`` do. Its learning rate is that of the groups
            (``lower_lr``). With warm starts its state lasts too. Default: ``torch.optim.SGD``.
        lower_clip: limit lower gradients: a number, the norm over all of y (of each task or copy by itself) above which
            they are scaled down to it; ``("value", c)``, every entry to [-c, c]. Default: None.
        lower_projection: takes the list of the lower tensors' values after each lower step, and returns what they are
            to be, such as ``lambda y: [t.clamp(min=0) for t in y]``. It is differentiated where lower steps are;
            implicit methods raise ValueError when y is where it changes the solution. Default: None.
        check_finite: raise `NonFiniteError`, before anything is written, if an oracle returns NaN or infinity; costs
            one host synchronisation per step. Default: True.
        generator: source of the method's own random numbers. Default: torch's default one.
        vectorize: how several copies of y are evaluated: True, all at once under ``torch.func.vmap``; False, in a loop;
            a number, in chunks of that many. Default: True.
        hvp: ``"exact"`` Hessian-vector products by double backward, or ``"finite-difference"`` of first-order
            gradients. Default: ``"exact"``.
        process_group: average all oracles over the ranks of this ``torch.distributed`` group, each of which has its own
            part of the data and the same parameters, which is looked at in the first step. Default: None.

    Attributes:
        oracle_counts: cumulative number of ``upper_grad``, ``lower_grad``, ``hvp``, ``jvp`` and ``loss`` evaluations,
            each per sample batch. (``jvp`` counts products with the cross derivative.)
        diagnostics: tensors of the last step: ``hypergradient_norm``, and what the method adds.
        numbers: the plain numbers of the method that change from step to step (restart counters and the like).
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "declared" in vars(cls):
            register(cls)

    def __init__(
        self,
        upper: Params,
        lower: Params,
        *,
        lr: float,
        lower_lr: float,
        lower_steps: int,
        warm_start: bool = True,
        lower_optimizer: Callable[[Any], Optimizer] | None = None,
        check_finite: bool = True,
        generator: torch.Generator | None = None,
        vectorize: bool | int = True,
        hvp: str = "exact",
        process_group: Any = None,
        tasks_per_step: int | None = None,
        lower_batch: int | None = None,
        upper_batch: int | None = None,
        lower_init: task_layer.LowerInit | None = None,
        lower_clip: Clip | None = None,
        lower_projection: Projection | None = None,
    ) -> None:
        require("learning rate", lr, is_number(lr) and 0 <= lr < math.inf, wording="Invalid learning rate: {value}")
        require("lower_lr", lower_lr, is_number(lower_lr) and 0 <= lower_lr < math.inf)
        require("lower_steps", lower_steps, is_count(lower_steps))
        require("warm_start", warm_start, isinstance(warm_start, bool))
        require("check_finite", check_finite, isinstance(check_finite, bool))
        method.require_common(
            lower_optimizer=lower_optimizer, generator=generator, vectorize=vectorize, hvp=hvp, lower_init=lower_init
        )
        method.require_sizes(tasks_per_step=tasks_per_step, lower_batch=lower_batch, upper_batch=upper_batch)
        self.tasks_per_step, self.lower_batch, self.upper_batch = tasks_per_step, lower_batch, upper_batch
        self.lower_steps, self.warm_start, self.check_finite = lower_steps, warm_start, check_finite
        self.lower_init, self.generator = lower_init, generator
        self.diagnostics: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.lower_factory = lower_optimizer or SGD
        self.limits = limits_of(lower_clip, lower_projection, interior=self.stationary)
        self._options = Options(vectorize, hvp, Ranks(process_group), one_loss=self.one_loss, responds=self.responds)
        self._run_state = RunState()
        self._rules = LowerRules(self.lower_factory, self.limits)
        self.default_lr = {"upper": lr, "lower": lower_lr}
        super().__init__(consistently_named([*as_groups(upper, "upper"), *as_groups(lower, "lower")]), {"lr": lr})
        self.param_groups[0][OWN] = b""
        self.require_lower_step()

    # ------------------------------------------------------------------------------------------------ verbs

    @with_hooks
    def step(  # type: ignore[override]
        self,
        upper: Loss | None = None,
        lower: Loss | None = None,
        *,
        tasks: Any = None,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """One outer iteration: improve y, estimate the hypergradient, update x.

        Args:
            upper: f, a callable or an `Objective`. Without any loss only the update of x is made, from the ``.grad``
                that :meth:`backward` has set. A callable alone is a closure, unless the method takes one loss.
            lower: g, likewise; left out for a method that takes one loss.
            tasks: a sampler of tasks, such as `TensorTasks`: there is one lower problem for each task, the losses are
                bare callables that take one task's batch, and the hypergradient is the mean over the tasks drawn. Each
                task starts from the live y (or from ``lower_init``); afterwards the live y holds the mean of the tasks'
                solutions, or with ``warm_start=False`` what it held before. What a method keeps from step to step
                beside y (momentum, solutions of linear systems) belongs to the tasks and starts anew at each step.
            closure: instead of losses, a function that calls :meth:`backward`, as ``torch.optim`` has it; its result is
                returned.

        Returns:
            The upper loss at the point where the hypergradient was estimated, detached; None without losses.

        Raises:
            NonFiniteError: if an oracle returned NaN or infinity; nothing has changed then.
            ValueError: at the first step, if a loss is not a scalar or does not depend on the parameters.
        """
        if self.finished():
            return None if upper is None else self._run_state.last_loss
        alone = not self.one_loss and callable(upper) and lower is tasks is closure is None
        if closure is not None or alone:
            if not alone and not (upper is lower is tasks is None):
                raise TypeError("step takes a closure or losses, not both")
            return self._step_after(upper if alone else closure, required=alone)
        if upper is None and lower is None:
            if tasks is not None:
                raise TypeError("step takes tasks only together with both losses")
            self._update()
            return None
        if self._capture is not None:
            return self._captured(self._capture, upper, lower, tasks, update=True)
        return self._stepped(upper, lower, tasks, update=True)

    def _stepped(
        self,
        upper: Loss | None,
        lower: Loss | None,
        tasks: Any,
        *,
        update: bool,
        random_inputs: dict[str, Any] | None = None,
        look: Look | None = None,
    ) -> Tensor:
        """A step, or all of it but the update of x; ``look`` sees it before, and may give what is to be written."""
        transaction, oracle, groups = self._opened(upper, lower)
        with transaction:
            estimate, given = self._proposed(oracle, groups, tasks, random_inputs=random_inputs)
            advance_buffers(oracle, estimate.lower)
            with torch.set_grad_enabled(False):
                late = look is not None and self.declared.host_update
                new = self.update(oracle.x, estimate.gradient, given.after(estimate)) if update and not late else None
                seen = None if look is None else look(oracle, estimate, given, new)
                writes = self._writes(oracle, estimate, new) if seen is None else seen.writes
                if late and update:
                    writes += self._update_after(
                        estimate if seen is None else seen.estimate, oracle.live_x, oracle.live_y
                    )
                transaction.commit(writes)
        assert self._run_state.last_loss is not None
        return self._run_state.last_loss

    def _step_after(self, closure: Any, *, required: bool) -> Any:
        """Update x after a closure; ``required``: it is one only if it calls :meth:`backward`."""
        before = self._run_state.steps
        with torch.enable_grad():
            result = closure()
        if required and self._run_state.steps == before:
            self.objectives(closure, None)  # one loss is not enough
        self._update()
        return result

    @no_dynamo
    def backward(self, upper: Loss, lower: Loss | None = None, *, tasks: Any = None) -> Tensor:
        """Improve y, and set ``.grad`` of the upper parameters to the estimate of the hypergradient.

        Follow it with gradient clipping, with ``step()``, or with a step of any ``torch.optim`` optimizer over x.
        Arguments, result and errors as for :meth:`step`.
        """
        wrapped = vars(self).get("_optimizer")
        if wrapped is not None:  # Lightning's wrapper inherits from this class, and would keep the results to itself
            return wrapped.backward(upper, lower, tasks=tasks)  # type: ignore[no-any-return]
        self._opt_called = True  # schedulers may go on: it is another optimizer's step that follows
        if self._capture is not None:
            return self._captured(self._capture, upper, lower, tasks, update=False)
        return self._stepped(upper, lower, tasks, update=False)

    def propose(
        self,
        upper: Loss,
        lower: Loss | None = None,
        *,
        tasks: Any = None,
        still: bool = False,
        start: Start = None,
    ) -> Estimate:
        """What a step would do, without doing it: the estimate, with the improved y.

        Random numbers are drawn, and data too. The losses and tasks are as for :meth:`step`; ``still`` asks for the
        estimate at x itself of a method that would look ahead of it; ``start`` gives other lower values to begin at
        than the present ones, with tasks as a function like ``lower_init``.
        """
        transaction, oracle, groups = self._opened(upper, lower)
        with transaction, self._run_state.buffers.kept():
            estimate = self._proposed(oracle, groups, tasks, still=still, start=start)[0]
            oracle.session.lower_sample = None  # a cycle, as after a step
            return changed(estimate, diagnostics=measured(estimate.diagnostics))

    def oracle(
        self, upper: Loss | None, lower: Loss | None = None, *, groups: dict[str, list[dict[str, Any]]] | None = None
    ) -> Oracle:
        """The two losses at the present point, as a step sees them; ``groups`` are the parameters', if at hand."""
        f, g = self.objectives(upper, lower)
        groups = groups or by_level(self.param_groups)
        x, y = tensors_of(groups["upper"], "upper"), tensors_of(groups["lower"], "lower")
        session = self._run_state.session(self._options)
        session.require_alike(x, y, lambda: names_of(self.param_groups))
        return Oracle(x, y, f, g, names=lambda: names_of(self.param_groups), session=session)

    @property
    def oracle_counts(self) -> dict[str, int]:
        """Cumulative oracle calls, per sample batch."""
        return dict(self._run_state.counts)

    # ------------------------------------------------------------------------------------------------ the transaction

    def _opened(self, upper: Loss | None, lower: Loss | None) -> tuple[Transaction, Oracle, Groups]:
        """A step of these losses, which leaves everything as it was if it fails."""
        groups = by_level(self.param_groups)
        oracle = self.oracle(upper, lower, groups=groups)
        return Transaction(self.generator, oracle, self._run_state.buffers), oracle, groups

    def _proposed(
        self,
        oracle: Oracle,
        groups: Groups,
        tasks: Any,
        *,
        still: bool = False,
        start: Start = None,
        random_inputs: dict[str, Any] | None = None,
    ) -> tuple[Estimate, StepInputs]:
        """Everything that a step computes but for the update of x, checked; nothing is written."""
        here = oracle
        given = self._given(groups, oracle.live_x, oracle.live_y, oracle.y)
        if still:
            given = self.without_lookahead(given)
        if not self.warm_start:
            here, given = given.from_the_start(oracle)
        if callable(start):
            given = changed(given, lower_init=start)
        elif start is not None:
            here = oracle.at(lower=start)
        try:
            if random_inputs is None:
                agreed = partial(given.ranks.agreed, device=oracle.device)
                random_inputs = draw_random_inputs(self.random_inputs(), self.generator, agreed)
            given = changed(given, random_inputs=random_inputs) if random_inputs else given
            if tasks is None:
                estimate = self.checked(here, given, self.estimate)
            else:
                estimate = self.estimate_tasks(here, given, tasks)
            agree_on_fallback(oracle, given.ranks)
            oracle.session.gathered.release()
        except BaseException as error:
            oracle.session.gathered.release()
            given.ranks.failed(error)
            raise
        if not self.warm_start and tasks is None and "initial" not in given.memory:
            estimate = changed(estimate, memory={**estimate.memory, "initial": here.y})
        return estimate, given

    def _given(
        self, groups: Groups, x: Sequence[Tensor], y: Sequence[Tensor], lower: Vector | None = None
    ) -> StepInputs:
        """What a step is given, read from the state; ``lower``: the values of y, if at hand."""
        self._forget_placeholders()
        return StepInputs(
            upper_groups=groups["upper"],
            lower_groups=groups["lower"],
            **memory.remembered(self.state, y),
            upper_memory=memory.recalled(self.state, x),
            lower=Vector(y).detach() if lower is None else lower,
            numbers=dict(self.numbers),
            steps=self._run_state.steps,
            rule=partial(self._rules, groups["lower"]),
            generator=self.generator,
            ranks=self._options.ranks,
            lower_init=self.lower_init,
        )

    def _writes(self, oracle: Oracle, estimate: Estimate, update: Update | None) -> list[Write]:
        """Writes of what a step has computed; ``.grad`` of x is the estimate."""
        session = oracle.session
        figures = measured(estimate.figures, above=KEPT)
        diagnostics = {**figures, **self.static_diagnostics(self.numbers), **session.found.diagnostics()}
        numbers = {**self.numbers, **estimate.numbers, **({} if update is None else update.numbers)}
        return [
            *writes_of(self.state, oracle, estimate, update),
            partial(vars(self).update, numbers=numbers, _diagnostics=diagnostics),
            partial(self._run_state.enter, self._run_state.after(session, estimate.loss)),
        ]

    # ------------------------------------------------------------------------------------------------ state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the group must say its ``"level"``, ``"upper"`` or ``"lower"``."""
        level = param_group.get("level") if isinstance(param_group, dict) else None
        if isinstance(param_group, dict) and level not in LEVELS:
            raise ValueError(f"Invalid level value: {level} (a group of a BilevelOptimizer is 'upper' or 'lower')")
        param_group.setdefault("lr", self.default_lr.get(str(level)))
        require_one_level(param_group, self.param_groups)
        require_usable(param_group, self.param_groups)
        require_rates([param_group])
        super().add_param_group(param_group)
        if level == "lower":
            method.warn_of_decay(self, self.param_groups[-1])

    def _parameters(self, level: str) -> list[Tensor]:
        """The parameters of one level that require a gradient."""
        return tensors_of(level_groups(self.param_groups, level), level)

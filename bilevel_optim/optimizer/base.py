"""`BilevelOptimizer`: a ``torch.optim.Optimizer`` over two sets of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import SGD

from ..errors import warn
from ..hypergradient import Estimate
from ..hypergradient.estimate import measured
from ..oracle.advance import advance_buffers
from ..oracle.buffers import Kept
from ..problem.objective import Loss, version_of
from ..problem.parameters import by_level, is_count, require
from ..problem.tasks import as_start
from ..problem.vector import Vector
from ..solvers.lower import LowerRule
from . import adapt, checkpoint
from .auto_rate import with_measured_rates
from .checkpoint import OWN
from .diagnostics import described, floats
from .hooks import explain_bad_call, no_dynamo, with_hooks
from .lower_checks import probe
from .method import Method
from .options import FROM_ONE, signature_of
from .step import CURVATURE, FACTOR, Start, lower_gradient, replace
from .transaction import SOLVER, Transaction, recalled, spent_gradient

Result = TypeVar("Result")

__all__ = ["BilevelOptimizer"]


class BilevelOptimizer(Method):
    r"""Base class of the methods for :math:`\min_x f(x, y^*(x))`, :math:`y^*(x) = \arg\min_y g(x, y)`.

    It is a ``torch.optim.Optimizer``. ``param_groups`` holds the groups of the upper parameters x, then those of the
    lower parameters y. Each group has a ``"level"`` (``"upper"`` or ``"lower"``) and its own ``"lr"``, which schedulers
    may change.

    Each method is a subclass. Its ``estimate`` improves y and estimates the hypergradient; its ``update`` moves
    x. Both return new values and write nothing: this class checks the values, then writes them. From ``self`` they read
    hyperparameters only.

    Args:
        upper: upper parameters: tensors, ``(name, tensor)`` pairs or group dicts, as in ``torch.optim``.
        lower: lower parameters, in the same forms.
        lr: learning rate of the upper update. Not needed if ``upper_optimizer`` has a rate of its own.
        lower_lr: learning rate of the lower steps. ``"auto"`` uses 1 / (1.1 L), where L is the largest curvature of g
            at the current (x, y). L is measured before each step on its first lower batch, by one Hessian-vector
            product (or one difference of gradients, where no second derivatives are used). A group's ``"lr"`` is then
            a factor of that rate, initially 1.0, which schedulers may change. A rate set in a group is used as it is,
            and so is a rate set by ``lower_optimizer``. Default: ``"auto"``.
        lower_steps: lower steps per outer step.
        warm_start: start each lower solve where the last one ended. If False, each starts from the values that the
            lower parameters had at the first step. Default: True.
        upper_optimizer: function that makes the optimizer of x from parameter groups, such as ``torch.optim.Adam`` or
            ``lambda groups: torch.optim.Adam(groups, lr=1e-2, betas=(0.5, 0.9))``. If it sets a rate, ``lr`` must be
            left out or equal to it. Its state is in ``state[p]``, under ``upper_optimizer.``. Methods that define their
            own update of x do not take it. Default: ``torch.optim.SGD``, with the options in the groups (``momentum``,
            ``weight_decay`` and others).
        lower_optimizer: function that makes the optimizer of the lower steps, with ``lower_lr``. With warm starts its
            state carries over to the next step. Default: ``torch.optim.SGD``.
        lower_clip: limit on lower gradients. A number limits the norm over all of y (of each task or copy separately);
            ``("value", c)`` limits every entry to [-c, c]. Default: None.
        lower_projection: function that maps the list of the lower tensors' values after each lower step to the
            projected values, such as ``lambda y: [t.clamp(min=0) for t in y]``. It is differentiated where lower steps
            are. Implicit methods raise ValueError where it changes the solution. Default: None.
        check_finite: raise `NonFiniteError` if an oracle returns NaN or infinity, or an update of x in float16 does,
            before anything is written. Costs one host synchronisation per step (two in float16). Default: True.
        check_derivatives: in the first step with new losses, and once more after ten steps, compare each derivative
            that the method takes with differences along a random direction, and raise `DerivativeError` if one is
            wrong. This costs about ten lower gradients, which are not counted. What cannot be decided, because of
            kinks, noise or low precision, is named in ``diagnostics["derivatives"]``. Each loss is also called once
            more to see whether it uses a graph that was made outside it. Default: True.
        generator: source of the method's own random numbers. Default: torch's default generator.
        vectorize: how to evaluate several copies of y: True, all at once under ``torch.func.vmap`` (but two or three
            copies of `F2SA` on a CPU in a loop, which is faster there); False, in a loop; a number, in chunks of that
            size. Default: True.
        hvp: ``"exact"`` for Hessian-vector products by double backward, ``"finite-difference"`` for differences of
            first-order gradients. Default: ``"exact"``.
        tasks_per_step: number of tasks drawn per step. Default: all tasks if the sampler has a length, else 1.
        lower_batch, upper_batch: number of rows of each task's data that one evaluation of g, or of f, draws. Default:
            all rows.
        lower_init: function without arguments that returns the start of each lower solve: the tensors of y, such as
            freshly drawn weights. The lower optimizer then starts each solve with a fresh state too. With tasks, it
            takes the drawn tasks and returns tensors with a leading dimension for them. Default: the live y.
        task_memory: with tasks, start the lower solve of each task where it ended when the task was last drawn, and the
            first time at the live y. The sampler must have a length and draw ids. One row of the size of y is stored
            per task; `AID`, `AmIGO`, `SOBA` and `FSLA` keep v as well. Default: False.
        process_group: ``torch.distributed`` group over whose ranks all oracles are averaged. Each rank has its own part
            of the data, the same parameters (compared in the first step) and the same options (compared at the
            beginning of each step). Default: None.

    Attributes:
        oracle_counts: cumulative number of ``upper_grad``, ``lower_grad``, ``hvp``, ``jvp`` and ``loss`` evaluations,
            per sample batch. ``hvp`` counts products of a vector with the Hessian of g in y, ``jvp`` those with its
            cross derivative in x and y.
        diagnostics: tensors of the last step: ``hypergradient_norm``, and those that the method adds.
        numbers: the method's plain numbers that change from step to step, such as restart counters.
    """

    @overload  # type: ignore[override]
    def step(self, upper: Loss, lower: Loss | None = None, *, tasks: Any = None) -> Tensor: ...

    @overload
    def step(self, *, closure: Callable[[], Result]) -> Result: ...

    @overload
    def step(self) -> None: ...

    @with_hooks
    def step(
        self,
        upper: Loss | None = None,
        lower: Loss | None = None,
        *,
        tasks: Any = None,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Make one outer step: improve y, estimate the hypergradient, update x.

        Args:
            upper: f, a callable or an `Objective`. Without losses, ``step()`` only updates x, from the ``.grad`` that
                :meth:`backward` has set. A callable alone is a closure, unless the method takes one loss.
            lower: g, a callable or an `Objective`. Leave it out for a method that takes one loss.
            tasks: sampler of tasks, such as `TensorTasks`. Each task has its own lower problem, the losses are plain
                callables that take one task's batch, and the hypergradient is the mean over the drawn tasks. Each task
                starts from the live y (or from ``lower_init``). After the step the live y holds the mean of the tasks'
                solutions, or with ``warm_start=False`` its old values. Other state of y (momentum, solutions of linear
                systems) belongs to the tasks and is reset at each step, but for what ``task_memory`` keeps.
            closure: instead of losses, a function that calls :meth:`backward`, as in ``torch.optim``. Its result is
                returned.

        Returns:
            The upper loss at the point where the hypergradient was estimated, detached; None without losses.

        Raises:
            NonFiniteError: if an oracle returned NaN or infinity. Nothing has changed then.
            ValueError: at the first step, if a loss is not a scalar or does not depend on the parameters.
        """
        if self._finished():
            return None if upper is None else self._run_state.last_loss
        alone = not self._one_loss and callable(upper) and lower is tasks is closure is None
        if closure is not None or alone:
            if not alone and not (upper is lower is tasks is None):
                raise TypeError(
                    "step takes a closure or losses, not both, because a closure passes the losses to backward() "
                    "itself; call step(closure=closure) alone, or step(upper_loss, lower_loss)"
                )
            return self._step_after(upper if alone else closure, required=alone)
        if upper is None and lower is None:
            if tasks is not None:
                raise TypeError(
                    "step takes tasks only together with both losses, because without losses it only moves x by its "
                    ".grad; call step(upper_loss, lower_loss, tasks=sampler)"
                )
            self._update()
            return None
        return self._make_step(upper, lower, tasks, update=True)

    def _step_after(self, closure: Any, *, required: bool) -> Any:
        """Call a closure, then update x; with ``required``, a callable that does not call `backward` is a lone loss."""
        before = self._run_state.steps
        with torch.enable_grad():
            result = closure()
        if required and self._run_state.steps == before:
            self._objectives(closure, None)  # raises: one loss is not enough
        self._update()
        return result

    @no_dynamo
    def backward(self, upper: Loss, lower: Loss | None = None, *, tasks: Any = None) -> Tensor:
        """Improve y, and set ``.grad`` of the upper parameters to the estimated hypergradient.

        Afterwards, clip gradients if needed, then call ``step()`` or the step of any ``torch.optim`` optimizer of x.
        Arguments, result and errors are those of :meth:`step`.
        """
        wrapped = vars(self).get("_optimizer")
        if wrapped is not None:  # Lightning's wrapper inherits from this class, and would store the results in itself
            return wrapped.backward(upper, lower, tasks=tasks)  # type: ignore[no-any-return]
        self._opt_called = True  # keeps schedulers from warning if another optimizer makes the step
        loss = self._make_step(upper, lower, tasks, update=False)
        self._run_state.written = {id(t): version_of(t) for t in self.parameters("upper")}
        return loss

    @partial(explain_bad_call, sentence="pass the number of steps by name, run(upper, lower, steps=10)")
    def run(self, upper: Loss, lower: Loss | None = None, *, steps: int, tasks: Any = None) -> Tensor:
        """Make many outer steps in one call, with the same results as that many calls of :meth:`step`.

        After :meth:`compile`, the guards are checked once per call. The host then reads no value until the end, where
        flags are read and results are written once. This requires that each loss draws from its own list or
        `FiniteSum`, or draws nothing. Learning rates are those at the beginning. ``oracle_counts`` includes all the
        steps; ``diagnostics`` and ``.grad`` are those of the last one.

        Args:
            upper: f, as for :meth:`step`.
            lower: g, as for :meth:`step`.
            tasks: sampler of tasks, as for :meth:`step`.
            steps: number of steps.

        Returns:
            The upper losses of the steps, shape (steps,).

        Raises:
            NonFiniteError: at the step that failed, which the error names. After any error, the steps before the failed
                one are kept, and nothing else. An interrupt of compiled steps may undo those of the last half second.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.5)
            >>> losses = optimizer.run(
            ...     lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2, steps=100
            ... )
            >>> losses.shape, round(x.item(), 4)
            (torch.Size([100]), 1.0)
        """
        require("steps", steps, is_count(steps) and steps > 0, FROM_ONE)
        if self._captured is not None:
            losses: Tensor = self._captured.run(
                upper, lower, tasks, steps, one=partial(self.step, upper, lower, tasks=tasks)
            )
            self._run_state.spent = spent_gradient(self.param_groups[0]["params"])
            return losses
        return torch.cat([self.step(upper, lower, tasks=tasks).reshape(1) for _ in range(steps)])

    @explain_bad_call
    def propose(
        self,
        upper: Loss,
        lower: Loss | None = None,
        *,
        tasks: Any = None,
        still: bool = False,
        start: Start = None,
    ) -> Estimate:
        """Compute the estimate of the next step, with the improved y, without making the step.

        It draws random numbers and data.

        Args:
            upper: f, as for :meth:`step`.
            lower: g, as for :meth:`step`.
            tasks: sampler of tasks, as for :meth:`step`.
            still: estimate at x itself, for a method that would estimate at a look-ahead point. Default: False.
            start: lower values to start from; with tasks, a function like ``lower_init``. Default: the current ones.
        """
        transaction, oracle, groups = self._open_step(upper, lower)
        with self._turn, transaction, Kept(self._run_state.buffers):
            inputs = self._step_inputs(oracle, groups)
            if still:
                inputs = self._without_lookahead(inputs)
            if callable(start):
                inputs, start = replace(inputs, lower_init=self._start_of(start, oracle.live_x, oracle.session)), None
            elif start is None and tasks is None and self._lower_solver is not None:
                start = self._solved_below()
            elif start is None and tasks is None and inputs.lower_init is not None:
                begun = as_start(inputs.lower_init(), oracle.y, oracle.lower_names())
                inputs, start = replace(inputs, start=begun), begun.detach()
            estimate = self._estimate(oracle, inputs, tasks, start)
            transaction.conclude()
            oracle.session.lower_sample = None  # breaks a reference cycle, as after a step
            return replace(estimate, diagnostics=measured(estimate.diagnostics))

    @explain_bad_call
    def adapt(
        self,
        lower: Loss,
        batch: Any = None,
        *,
        tasks: Any = None,
        steps: int | None = None,
        start: Sequence[Tensor] | None = None,
        write: bool = False,
    ) -> Vector:
        """Adapt the lower parameters to a new task, or to many at once, by lower steps on its data at the current x.

        The steps are those of training, by the same optimizer with a fresh state. No hypergradient is computed. Counts,
        state and upper parameters do not change. Each process adapts separately.

        Args:
            lower: the task's lower loss, as for :meth:`step`. A minimax method takes its one loss, which y ascends.
            batch: argument of the loss at every step. Default: None, no argument, or the data of an `Objective`.
            tasks: instead of ``batch``, the data of many tasks: a tensor, or a pytree of tensors, whose first dimension
                is the task. They are solved together, and each takes its own steps. Default: None.
            steps: number of steps. Required for methods without ``lower_steps``. Default: ``lower_steps``.
            start: initial y. Default: the learned start of `MAML` and similar methods, else the live y.
            write: write the result, and module buffers, into the live tensors, so that the model is adapted and a later
                :meth:`step` starts there. Default: False, they do not change.

        Returns:
            The tensors of y, in the order of the lower parameters; with ``tasks``, each with a leading dimension.

        Raises:
            NonFiniteError: if the steps diverge. Nothing has changed then.
            ValueError: if an argument is out of range.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> start, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = bo.MAML([start], [y], lr=0.1, lower_lr=0.5, lower_steps=2)
            >>> optimizer.adapt(lambda target: (y - target).square().sum() / 2, torch.tensor([6.0])), y.item()
            ((tensor([5.]),), 0.0)
        """
        method = type(self).__name__
        steps = adapt.number_of_steps(steps, self.lower_steps if self.declared.lower_steps else None, method)
        if tasks is not None:
            one_at_a_time = self._one_loss or self.declared.tasks == "rows"
            adapt.require_tasks_alone(batch, write=write, one_at_a_time=one_at_a_time, method=method)
            self._lower_checks.require_elementwise("tasks")
        task = adapt.objective_of(lower, batch)
        oracle = self._oracle(task, None if self._one_loss else task)  # the upper loss is not evaluated
        oracle.shared = False
        groups = by_level(self.param_groups)["lower"]
        self._run_state.follow(self.state, self.param_groups)
        known = {} if self._placeholders else recalled(self.state, self.parameters("lower"), SOLVER).memory
        kept = nullcontext() if write else Kept(self._run_state.buffers)
        rule_for: Callable[[Vector], LowerRule] = partial(self._rules, groups)
        with self._turn, Transaction(self.generator, oracle), kept:
            given = Vector(self._learned_start(oracle) if start is None else start)
            problem, y = adapt.beginning(oracle, given, tasks)
            if any([group.get(FACTOR, False) for group in groups]):
                problem, _, rule_for, *_ = with_measured_rates(
                    problem.at(lower=y), groups, rule_for, known.get(CURVATURE), exact=self._exact_products
                )
            rule = rule_for(y)
            found = rule.run(y, rule.fresh(), steps, partial(lower_gradient, problem, rule)).y
            if self.check_finite:
                problem.checks.finite("lower_grad", found)
                problem.checks.verify(self._run_state.steps, set())
            if write:
                advance_buffers(oracle, found)
                oracle.live_y.copy_(found)
        return found

    @explain_bad_call
    def compile(
        self,
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Compile all further steps with ``torch.compile``: the library's own step and your losses, as one graph.

        Use it like ``torch.nn.Module.compile``. The first step of each kind is eager, because it may be the only one
        (unless a run without tasks is resumed). The next ``step(upper, lower)`` or ``backward(upper, lower)`` compiles.
        Dynamo reads the losses. Its guards watch everything that a loss reads, and a change recompiles the step.
        Learning rates are tensors, so schedules do not recompile. Other data shapes, options or losses need other
        graphs, at most 16.
        At uses 1, 2, 4, 8, ..., and every 4096, a compiled step is compared with an eager one.

        If Dynamo cannot trace a step, steps with that loss are eager until ``compile`` is called again. A warning is
        given once. ``diagnostics["compile_fallback"]`` has the reason, with the file and line of your code. Losses must
        not draw random numbers (dropout included), write into tensors other than their own, change Python values,
        branch on values, or read NumPy arrays. Steps over ranks and with sharded parameters are eager.

        A compiled CG always makes all its iterations (frozen after convergence), and a randomised series computes all
        its products (those past its random length do not count). ``oracle_counts`` includes all of them.

        Args:
            fullgraph: raise if a step cannot be compiled, and change nothing. Default: False.
            dynamic: must not be True, because shapes are those of the data.
            backend: backend of ``torch.compile``, or ``"eager"`` for the graph itself. Default: ``"inductor"``.
            mode: mode of ``torch.compile``, such as ``"reduce-overhead"`` (CUDA graphs). Default: None.
            options: options of the backend. Default: None.
            rtol: relative tolerance of the comparison with an eager step. It applies to the loss, the hypergradient,
                and the norm of each vector that the step writes. Default: None, the effect of rounding.
            atol: absolute tolerance, added to the relative one. Default: None.

        Raises:
            ValueError: if an argument is out of range.
            RuntimeError: with ``fullgraph``: here if the method cannot be compiled, else at a step that cannot be.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.5)
            >>> optimizer.compile(backend="eager")
            >>> def upper(y=y):
            ...     return (y - 1).square().sum() / 2
            >>> def lower(x=x, y=y):
            ...     return (y - x).square().sum() / 2
            >>> for _ in range(100):
            ...     loss = optimizer.step(upper, lower)
            >>> round(x.item(), 4), optimizer.diagnostics.get("compile_fallback")
            (1.0, None)
        """
        from ..compiled.entry import Settings
        from ..compiled.runs import CompiledRuns

        captured = CompiledRuns(self, Settings(fullgraph, dynamic, backend, mode, options, rtol, atol))
        captured.say_why_eager()
        self._captured, self._untraced_update = captured, captured.why_update_is_eager()

    @property
    def oracle_counts(self) -> dict[str, int]:
        """Cumulative oracle calls, per sample batch."""
        return dict(self._run_state.counts)

    def metrics(self) -> dict[str, float]:
        """Return the loss and the ``diagnostics`` of the last step as floats for a logger.

        Scalars keep their names. A vector becomes ``name/mean`` and ``name/max`` of its entries that are not NaN. Texts
        are left out. The dict is empty before the first step. This costs one host synchronisation.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
            >>> optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.5)
            >>> loss = optimizer.step(lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2)
            >>> figures = optimizer.metrics()
            >>> figures["loss"], figures["hypergradient_norm"], figures["linear_residual"]
            (0.5, 0.5, 0.5)
        """
        return floats({"loss": self._run_state.last_loss, **self.diagnostics})

    @property
    def captured_graphs(self) -> int:
        """Number of compiled graphs."""
        graphs: int = 0 if self._captured is None else self._captured.graphs
        return graphs

    def __repr__(self) -> str:
        """Return the method with its arguments, and each group with its level and its optimizer.

        Example:
            >>> import torch, bilevel_optim as bo
            >>> x, y = torch.zeros(2, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
            >>> bo.StocBiO([x], [y], lr=0.1, lower_lr=0.5, lower_steps=10)
            StocBiO(
              lower_steps=10, linear_steps=10
              (0) upper: 2 numbers in 1 tensor, SGD, lr=0.1
              (1) lower: 12 numbers in 1 tensor, SGD, lr=0.5
            )
        """
        lr, lower_lr = self._default_lr.values()
        upper = "" if self.declared.upper_update else type(probe(self._upper_factory or SGD, lr)).__name__
        lower = "" if self.declared.lower_optimizer == "none" else type(probe(self._lower_factory, lower_lr)).__name__
        return described(type(self).__name__, self._extra_repr(), self.param_groups, {"upper": upper, "lower": lower})

    def _extra_repr(self) -> str:
        """Return the method's own arguments as text, like ``torch.nn.Module.extra_repr``."""
        common = signature_of(BilevelOptimizer).parameters
        own = {*vars(self), *self._saved_options}
        shown = {name: getattr(self, name) for name in signature_of(type(self)).parameters if name in own}
        shown = {name: value for name, value in shown.items() if name not in common or value != common[name].default}
        if self._oracle_options.hvp != "exact":
            shown["hvp"] = self._oracle_options.hvp
        plain = [f"{name}={value!r}" for name, value in shown.items() if isinstance(value, (int, float, str))]
        if self._captured is not None:
            plain.append(f"compiled: {self.captured_graphs} graphs")
        return ", ".join(plain)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, as in ``torch.optim``.

        State that belongs to no single parameter is the entry ``"bilevel"`` of the first group. To continue a run bit
        for bit, also save the parameters (the model's ``state_dict``), and, if the losses use them, the position in the
        data and torch's random state.
        """
        # First, so that hooks of the user see the whole state.
        handle = self.register_state_dict_post_hook(lambda _, state: self._pack(state), prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _pack(self, state: dict[str, Any]) -> None:
        state["state"] = checkpoint.copied(state["state"])  # later steps write into tables
        own = {
            "method": type(self).__name__,
            "variant": dict(self._variant_of_state),
            **self._run_state.saved(),
            "placeholders": self._placeholders,
            "generator": None if self.generator is None else self.generator.get_state(),
            "numbers": self.numbers,
            "options": {name: checkpoint.plain(getattr(self, own)) for name, own in self._saved_options.items()},
            "types": checkpoint.types(self.param_groups, self._run_state.kinds or ()),
        }
        checkpoint.pack(state, own, self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict` into an optimizer made with the same arguments."""
        own: dict[str, Any] = {}

        def read(given: dict[str, Any]) -> dict[str, Any]:
            found, given = checkpoint.unpacked(given, self.param_groups[0]["params"][0].device)
            checkpoint.require_loadable(
                found, given, type(self).__name__, self._variant_of_state, self._saved_options.keys(),
                self.param_groups, self.generator,
            )  # fmt: skip
            own.update(found)
            return given

        checkpoint.require_dict(state_dict)
        checkpoint.load_exactly(
            self, super().load_state_dict, state_dict, read=read, place_of=self._place_of, end=lambda: self._resume(own)
        )

    def _resume(self, own: dict[str, Any]) -> None:
        """Continue from the state that belongs to no single parameter."""
        self.param_groups[0][OWN], self._placeholders = b"", False
        self._rules, self._upper_rules = self._new_rules()
        self._run_state.load(own)
        if own["generator"] is not None and self.generator is not None:
            self.generator.set_state(own["generator"].cpu())
        self.numbers = own["numbers"]
        missing = [name for name in self._saved_options if name not in own["options"]]
        if missing:
            warn(
                f"the state dict does not hold {' and '.join(missing)}, because it was saved by an earlier version: "
                "the values of this optimizer stay"
            )
        for name, value in own["options"].items():
            if name in self._saved_options:
                setattr(self, self._saved_options[name], value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None or to zero, the same as in torch."""
        super().zero_grad(set_to_none)
        self._run_state.spent = None  # zeros are kept in the same tensors

    def __getstate__(self) -> dict[str, Any]:
        rules, upper_rules = self._new_rules()  # these are made again
        own = checkpoint.own_attributes(vars(self))
        return {**super().__getstate__(), **own, "_rules": rules, "_upper_rules": upper_rules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and added groups would take it over

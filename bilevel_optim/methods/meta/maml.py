"""MAML, first-order MAML, ANIL and implicit MAML: learning the start or the proximal centre of tasks' lower solves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...hypergradient import Estimate
from ...optimizer.base import BilevelOptimizer
from ...optimizer.declaration import MethodInfo
from ...optimizer.options import InitVar, fixed, number
from ...optimizer.step import LOWER, UPPER, Draw, DrawInputs, StepInputs, replace
from ...oracle.doors import START
from ...oracle.oracle import Oracle
from ...problem.objective import Loss, Objective
from ...problem.parameters import LEVELS
from ...problem.vector import Vector, any_sharded
from ..aid import AID
from ..itd import ITD

__all__ = ["ANIL", "FOMAML", "MAML", "Initialised", "iMAML"]

RESTS = "an upper parameter from which a lower one starts does not require a gradient; steps are compiled once it does"


class Initialised(BilevelOptimizer):
    """Base class of the methods whose lower solves start from the last upper parameters, one for each lower one."""

    def _learned_start(self, oracle: Oracle) -> Vector:
        """Return the upper tensors from which the lower ones start."""
        if any_sharded(oracle.y):
            raise ValueError(
                f"{type(self).__name__} cannot start sharded lower parameters (DTensor) from upper ones: do not "
                "shard the module, and let the ranks share the tasks"
            )
        return Vector(oracle.x[place] if isinstance(place, int) else place for place in self._start_places())

    def _start_places(self) -> list[int | Tensor]:
        """Return, for each trained lower tensor, where its start is in x, or the start itself if that is not trained.

        All tensors count, trained or not, so that pairs stay together while one of them rests.
        """
        upper, lower = ([p for g in self.param_groups if g["level"] == level for p in g["params"]] for level in LEVELS)
        first = max(len(upper) - len(lower), 0)
        start = upper[first:]
        shapes = [t.shape for t in lower]
        if [t.shape for t in start] != shapes:
            raise ValueError(
                f"{type(self).__name__} starts the lower parameters from the last {len(lower)} upper ones, which must "
                f"have the same shapes: {[tuple(s) for s in shapes]}, but they have {[tuple(t.shape) for t in start]}. "
                "Pass copies of the lower parameters there, such as [p.detach().clone().requires_grad_() for p in "
                "model.parameters()]"
            )
        trained = itertools.accumulate([p.requires_grad for p in upper], initial=0)  # before each
        pairs = zip(start, lower, itertools.islice(trained, first, None), strict=False)
        return [place if s.requires_grad else s.detach() for s, t, place in pairs if t.requires_grad]

    def _why_eager(self, tasks: Any = None) -> str:
        """Return why steps cannot be compiled: a start that rests is not among the inputs of a graph."""
        rests = any([not isinstance(place, int) for place in self._start_places()])
        return RESTS if rests else super()._why_eager(tasks)

    def load_start(self) -> None:
        """Write the learned initial point into the live lower parameters, those of the model."""
        x = self.parameters("upper")
        starts = [x[place] if isinstance(place, int) else place for place in self._start_places()]
        Vector(self.parameters("lower")).copy_(starts)

    def _start_adaptation(self, oracle: Oracle, inputs: StepInputs) -> tuple[Oracle, StepInputs]:
        """Return the oracle at the start of adaptation, and inputs with a fresh lower optimizer."""
        start = Vector(
            s.expand_as(t).to(t.dtype, copy=True) for s, t in zip(self._learned_start(oracle), oracle.y, strict=True)
        )
        return oracle.at(lower=start), replace(inputs, solver=None, start=None)

    def _through_start(self, oracle: Oracle, estimate: Estimate, derivative: Vector) -> Estimate:
        """Return the estimate with the derivative in the initial point added."""
        gradient = [*estimate.gradient]
        for place, t in zip(self._start_places(), derivative, strict=True):
            if isinstance(place, int):
                extra = t if oracle.lanes is None else t.sum(0)
                oracle.session.note_reached([extra])
                gradient[place] = gradient[place] + extra.to(oracle.x[place].dtype)  # x and y may have different types
        return replace(estimate, gradient=Vector(gradient))


class MAML(Initialised, ITD):
    r"""Model-agnostic meta-learning (MAML): the initial value from which a few steps adapt well to any task.

    .. math:: y_0 = x, \quad y_{t+1} = y_t - \alpha \nabla_y g(x, y_t) \quad (\text{lower\_steps times}), \qquad
              x \leftarrow x - \text{lr}\, \frac{d}{dx} f(x, y_T(x))

    for each task of ``tasks=``, and the mean over them. The *last* upper parameters are the initial values of the lower
    ones, in the same order; the losses read the lower ones (the model). Other upper parameters may precede them.
    One step is MAML, more are multi-step MAML; g may contain a proximal term :math:`\tfrac\lambda2\|y - x\|^2` (with
    one step it makes no difference, because it is flat at y = x).

    *When.* Few-shot learning, as the best-known baseline. *Needs* second derivatives and one graph per lower step. It
    does not converge to a solution of the bilevel problem: few steps are part of the model. The derivative is exact,
    through the steps as in `ITD` and through their start. After training, ``adapt`` gives the parameters for a new
    task, and ``load_start()`` writes the initial values into the lower parameters.

    *Cost per step* and task, T lower steps: T lower gradients (2 T with ``checkpoint``), T Hessian-vector and T cross
    products, 1 upper gradient. *Draws*: one lower batch for each lower step, then one upper batch.

    Args:
        upper: upper parameters; the last of them are copies of the lower parameters, which start from them.
        lower: lower parameters, those of the model that the losses evaluate.
        lr: learning rate of x.
        lower_lr: learning rate of the adaptation.
        lower_steps: adaptation steps T.
        truncate: number of last steps to differentiate; fewer than ``lower_steps`` leave out the derivative in the
            initial value. Default: None, all of them.
        checkpoint: keep only the iterates, and rebuild the graphs. Default: False.
        warm_start: with tasks, set the live y to the mean of the adapted values; adaptation always starts at x.
            Default: True.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, lower_clip, lower_projection: see `BilevelOptimizer`.
            ``lower_init`` has no effect.

    State: the lower optimizer's, which is reset at each step.

    Raises:
        ValueError: for an argument out of its range, or at the first step if the shapes do not fit.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = bo.MAML([x], [y], lr=0.1, lower_lr=0.5, lower_steps=1)
        >>> loss = optimizer.backward(
        ...     lambda t: (y - t).square().sum() / 2,
        ...     lambda t: (y - t).square().sum() / 2,
        ...     tasks=bo.TensorTasks(torch.tensor([[1.0], [5.0]])),
        ... )
        >>> x.grad  # y_1 = (x + t)/2, so the mean of (y_1 - t)/2 is (x - 3)/4
        tensor([-0.2500])

    Source: Finn, Abbeel, Levine (2017), arXiv:1703.03400; as compared in arXiv:2310.18535.
    """

    declared = MethodInfo(
        paper="arXiv:1703.03400",
        family="meta",
        when="few-shot learning: the best-known baseline",
        cost="T lower (2 T with checkpoint), 1 upper, T hvp, T jvp",
        initial=True,
        lower_optimizer="differentiable",
        doors=ITD.declared.doors,
    )

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Backpropagate through adaptation from the initial point."""
        oracle, inputs = self._start_adaptation(oracle, inputs)
        estimate = super().estimate(oracle, inputs)
        return estimate if estimate.start is None else self._through_start(oracle, estimate, estimate.start)


class ANIL(MAML):
    r"""Almost no inner loop (ANIL): MAML that adapts only the head, on features shared by the tasks.

    .. math:: w_0 = x_2, \quad w_{t+1} = w_t - \alpha \nabla_w g(x_1, w_t), \qquad
              (x_1, x_2) \leftarrow (x_1, x_2) - \text{lr}\, \frac{d}{d(x_1, x_2)} f(x_1, w_T(x_1, x_2))

    The upper parameters are those of the body, :math:`x_1`, and then copies of those of the head, :math:`x_2`, from
    which the lower ones start. *When.* Almost the accuracy of `MAML` at the least cost. *Needs* second derivatives of
    the head's loss, in the body too. (Without a learned initial head it is `ITD` over tasks.)

    *Cost per step* and *Draws*: as `MAML`; the body is evaluated at each step, unless the losses keep features.

    Args:
        upper: parameters of the body, then copies of the head's.
        lower: parameters of the head.
        lr, lower_lr, lower_steps, truncate, checkpoint, warm_start: see `MAML`. upper_optimizer, lower_optimizer,
            check_finite, check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step, lower_batch,
            upper_batch, lower_init, lower_clip, lower_projection: see `BilevelOptimizer`.

    State: as `MAML`.

    Raises:
        ValueError: as `MAML`, and at the first step if there is no upper parameter besides the initial head.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> body, head = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
        >>> start = [p.detach().clone().requires_grad_() for p in head.parameters()]
        >>> loss = lambda batch: torch.nn.functional.cross_entropy(head(body(batch[0])), batch[1])
        >>> tasks = bo.TensorTasks((torch.randn(5, 6, 4), torch.randint(0, 2, (5, 6))))
        >>> optimizer = bo.ANIL([*body.parameters(), *start], head.parameters(), lr=0.1, lower_lr=0.1, lower_steps=3)
        >>> value = optimizer.step(loss, loss, tasks=tasks)

    Source: Raghu, Raghu, Bengio, Vinyals (2020), arXiv:1909.09157.
    """

    declared = replace(
        MAML.declared,
        paper="arXiv:1909.09157",
        when="few-shot learning where adapting a head on shared features is enough",
        cost="as MAML",
    )

    def _learned_start(self, oracle: Oracle) -> Vector:
        """Return the initial head, which follows the body among the upper parameters."""
        upper, lower = (sum([len(g["params"]) for g in self.param_groups if g["level"] == level]) for level in LEVELS)
        if upper == lower:
            raise ValueError(
                "ANIL needs upper parameters besides the initial values of the lower ones, but got as many tensors for "
                f"both levels ({lower}): pass the parameters of the body that the tasks share before them, "
                "[*body.parameters(), *start]. To learn initial values only, use MAML"
            )
        return super()._learned_start(oracle)


class FOMAML(Initialised):
    r"""First-order MAML: MAML with the identity in place of the derivative of the adaptation.

    .. math:: y_0 = x, \quad y_{t+1} = y_t - \alpha \nabla_y g(x, y_t), \qquad
              x \leftarrow x - \text{lr}\, (\nabla_x f + \nabla_y f)(x, y_T)

    *When.* To avoid second derivatives; for long adaptation, whose exact derivative is costly and not much better.
    *Needs* first derivatives only. The gradient is biased by :math:`O(\alpha T)`.

    *Cost per step* and task: ``lower_steps`` lower gradients, 1 upper gradient. *Draws*: as `MAML`.

    Args:
        upper, lower, lr, lower_lr, lower_steps, warm_start: see `MAML`. upper_optimizer, lower_optimizer, check_finite,
            check_derivatives, generator, vectorize, hvp, process_group, tasks_per_step, lower_batch, upper_batch,
            lower_init, lower_clip, lower_projection: see `BilevelOptimizer`.

    State: as `MAML`.

    Raises:
        ValueError: as `MAML`.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = bo.FOMAML([x], [y], lr=0.1, lower_lr=0.5, lower_steps=1)
        >>> loss = optimizer.backward(lambda: (y - 3).square().sum() / 2, lambda: (y - 3).square().sum() / 2)
        >>> x.grad  # y_1 = (x + 3)/2
        tensor([-0.5000])

    Source: Finn, Abbeel, Levine (2017), arXiv:1703.03400, section 5.2.
    """

    declared = MethodInfo(
        paper="arXiv:1703.03400",
        family="meta",
        when="few-shot learning without second derivatives; long adaptation",
        cost="T lower, 1 upper",
        second_order=False,
        initial=True,
        converges=False,
        doors=frozenset((START,)),  # lower_init has no effect
    )

    def _draws(self, inputs: DrawInputs) -> list[Draw]:
        """Return one lower draw for each lower step, then an upper draw."""
        return [LOWER] * self.lower_steps + [UPPER]

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Return the gradient after adaptation, as if adaptation were the identity in the initial point."""
        oracle, inputs = self._start_adaptation(oracle, inputs)
        here, moved = inputs.run_lower_steps(oracle, self.lower_steps)
        loss, grad_x, grad_y = here.upper(oracle.f.draw(once=True))
        return self._through_start(oracle, Estimate(loss, grad_x).with_lower(moved), grad_y)


class iMAML(Initialised, AID):
    r"""Implicit MAML (iMAML): adaptation that stays near x by a proximal term, differentiated implicitly.

    .. math::
        y^*(x) = \arg\min_y g(y) + \tfrac\lambda2 \|y - x\|^2, \qquad
        x \leftarrow x - \text{lr}\, (I + \nabla^2 g(y) / \lambda)^{-1} \nabla f(y)

    The lower solve starts at x; the linear system is solved as in `AID`. The last upper parameters are x, in
    the order of the lower ones, as in `MAML`.

    *When.* Adaptation by many steps: memory does not grow with them. *Needs* Hessian-vector products, and a lower solve
    that comes near :math:`y^*`. The error is that of `AID`.

    *Cost per step* and task: ``lower_steps`` + 1 lower gradients, about ``linear_steps`` Hessian-vector products, 1
    upper gradient, 1 cross product. *Draws*: as `AID`.

    Args:
        upper, lower, lr, lower_lr, lower_steps, warm_start: see `MAML`.
        proximal: :math:`\lambda`, the weight of the proximal term that is added to the lower loss; 0 if the loss has it
            already. Default: 0.
        linear_solver: ``"cg"``, ``"minres"`` or ``"auto"``, see `AID`. Default: ``"cg"``.
        linear_steps, linear_tol, damping: see `AID`.
        upper_optimizer, lower_optimizer, check_finite, check_derivatives, generator, vectorize, hvp, process_group,
            tasks_per_step, lower_batch, upper_batch, lower_init, lower_clip, lower_projection: see `BilevelOptimizer`.

    State: ``linear_solution`` (without tasks).

    Raises:
        ValueError: as `MAML`; at the first step if there is no proximal term, neither here nor in the loss.

    Example:
        >>> import torch, bilevel_optim as bo
        >>> x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
        >>> optimizer = bo.iMAML([x], [y], lr=0.1, lower_lr=0.25, lower_steps=50, proximal=3.0)
        >>> loss = optimizer.backward(lambda: (y - 6).square().sum() / 2, lambda: (y - 6).square().sum() / 2)
        >>> x.grad.round(decimals=4)  # y* = 3, and (1 + 1/3)^-1 (3 - 6)
        tensor([-2.2500])

    Source: Rajeswaran, Finn, Kakade, Levine (2019), arXiv:1909.04630.
    """

    declared = MethodInfo(
        paper="arXiv:1909.04630",
        family="meta",
        when="few-shot learning with many steps that stay near x",
        cost="as AID",
        initial=True,
        doors=frozenset((START,)),  # lower_init has no effect
    )

    proximal: float = number(default=0.0, least=0)
    linear_lr: float | None = fixed(default=None)
    keep_direction: bool = fixed(default=False)
    lower_solver: InitVar[Callable[[], Any] | None] = fixed(default=None)

    def estimate(self, oracle: Oracle, inputs: StepInputs) -> Estimate:
        """Adapt from the initial point, then solve the linear system."""
        return super().estimate(*self._start_adaptation(oracle, inputs))

    def _objectives(self, upper: Loss | None, lower: Loss | None) -> tuple[Objective, Objective]:
        """Return the objectives, with the proximal term in the lower loss."""
        f, g = super()._objectives(upper, lower)
        if not self.proximal:
            return f, g
        lower_tensors, upper_tensors = self.parameters("lower"), self.parameters("upper")
        starts = [upper_tensors[place] if isinstance(place, int) else place for place in self._start_places()]
        pairs = list(zip(lower_tensors, starts, strict=True))

        def penalised(loss: Tensor) -> Tensor:
            distances = [(y - x).square().sum() for y, x in pairs]
            return loss + self.proximal / 2 * sum(distances[1:], distances[0])

        return f, g.mapped(penalised)

"""Solving the lower problem: steps of a ``torch.optim`` optimizer on the live y or on copies; Nesterov's method."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from ..problem.vector import Vector

__all__ = ["AGD", "NOT_ELEMENTWISE", "LowerSolver", "can_be_unrolled", "update_vjp"]

Factory = Callable[[Any], Optimizer]

# Optimizers that do not treat every entry alone, and so would mix stacked copies.
NOT_ELEMENTWISE = tuple(
    getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name)
)


class AGD(Optimizer):
    r"""Nesterov's accelerated gradient descent with constant momentum, for a strongly convex lower problem.

    .. math::
        z_{t+1} = \tilde z_t - \alpha \nabla g(\tilde z_t), \qquad
        \tilde z_{t+1} = z_{t+1} + \beta (z_{t+1} - z_t), \qquad \tilde z_0 = z_0 .

    The parameters hold the gradient-step iterate :math:`z`; the gradient is evaluated at the look-ahead
    :math:`\tilde z`, so :meth:`step` needs a closure. (``torch.optim.SGD(nesterov=True)`` keeps the look-ahead in the
    parameters instead.) With :math:`\alpha = 1/\ell` and
    :math:`\beta = (\sqrt\kappa - 1)/(\sqrt\kappa + 1)` the error decays as :math:`(1 - 1/\sqrt\kappa)^t`, against
    :math:`(1 - 1/\kappa)^t` of gradient descent.

    Args:
        params: tensors, or groups of them.
        lr: step size :math:`\alpha`, at most :math:`1/\ell`.
        momentum: :math:`\beta` in [0, 1). Default: 0.

    Raises:
        ValueError: if ``lr`` or ``momentum`` is out of range.

    Example:
        >>> z = torch.tensor([1.0, 1.0], requires_grad=True)
        >>> optimizer = AGD([z], lr=1.0, momentum=1 / 3)
        >>> def closure():
        ...     z.grad = torch.tensor([1.0, 0.25]) * z.detach()
        >>> for _ in range(3):
        ...     _ = optimizer.step(closure)
        >>> z.detach()
        tensor([0.0000, 0.3125])

    Source: Nesterov (2018), Lectures on Convex Optimization, 2.2; the lower solver of arXiv:2307.00126.
    """

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0) -> None:
        if lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` sets ``.grad`` at the parameters' present values, and its result is returned."""
        if closure is None:
            raise RuntimeError("AGD needs a closure, because it evaluates the gradient at the look-ahead point")
        before = []
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                before.append(p.clone())
                if "previous" in state:
                    p.add_(p - state["previous"], alpha=group["momentum"])
        with torch.enable_grad():
            result = closure()
        previous = iter(before)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["previous"] = next(previous)
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
        return result


class LowerSolver:
    """A ``torch.optim`` optimizer over given leaf tensors, fed with gradients that the library computes.

    Args:
        factory: makes the optimizer from parameter groups, as ``torch.optim.Adam`` does.
        groups: the lower parameter groups; their ``lr`` (and any other option of the optimizer) is followed.
        variables: the tensors to optimize, in the order of the groups' parameters: those themselves, or stacked copies.
        states: dicts that hold the optimizer's state of each variable, and are kept by the caller.
    """

    def __init__(
        self,
        factory: Factory,
        groups: Sequence[dict[str, Any]],
        variables: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
    ) -> None:
        self.variables, self._states = Vector(variables), states
        remaining = iter(self.variables)
        own = []
        for group in groups:
            options = {k: v for k, v in group.items() if k not in ("params", "level", "param_names", "initial_lr")}
            own.append({"params": [next(remaining) for _ in group["params"]], **options})
        self.optimizer = factory(own)
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"lower_optimizer must return a torch.optim.Optimizer, but returned {type(self.optimizer).__name__}"
            )
        # Some optimizers make their state at once; what they made is where a reset goes back to.
        self._initial = [dict(self.optimizer.state.get(variable, {})) for variable in self.variables]
        for variable, state, initial in zip(self.variables, states, self._initial, strict=True):
            if not state:
                state.update(copy.deepcopy(initial))
            self.optimizer.state[variable] = state

    def serves(self, variables: Sequence[Tensor]) -> bool:
        """Whether these are the solver's variables."""
        return [id(v) for v in variables] == [id(v) for v in self.variables]

    @property
    def evaluates_once(self) -> bool:
        """Whether a step is known to evaluate the gradient once only (a line search may do so more often)."""
        kind = type(self.optimizer)
        return kind is AGD or (kind.__module__.startswith("torch.optim.") and kind is not LBFGS)

    def follow(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over the learning rates of the lower groups, which a scheduler may have changed."""
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            own["lr"] = group["lr"]

    def step(self, gradient: Callable[[], tuple[Tensor, Vector]]) -> Vector:
        """One step on the gradients that ``gradient`` evaluates at the present values; returns the last of them."""
        last: list[Vector] = []

        def closure() -> Any:
            loss, values = gradient()
            last[:] = [values]
            for variable, value in zip(self.variables, values, strict=True):
                variable.grad = value
            return loss

        kept = [variable.grad for variable in self.variables]
        try:
            self.optimizer.step(closure)
        finally:
            for variable, grad in zip(self.variables, kept, strict=True):
                variable.grad = grad
        return last[0]

    def run(
        self, steps: int, draw: Callable[[], Callable[[], tuple[Tensor, Vector]]], tol: float = 0.0
    ) -> Vector | None:
        """Several steps, each on what ``draw`` gives for it; returns the last gradient, None without steps.

        With a positive ``tol``, which costs a host synchronisation per step, the step that found a gradient of at most
        that norm is the last one.
        """
        gradient = None
        for _ in range(steps):
            gradient = self.step(draw())
            if tol > 0 and gradient.norm() <= tol:
                break
        return gradient

    def memory(self) -> list[dict[str, Any]]:
        """A copy of the optimizer's state (momentum and the like), one dict per variable."""
        return copy.deepcopy(list(self._states))

    def reset(self) -> None:
        """Forget the optimizer's state."""
        for state, initial in zip(self._states, self._initial, strict=True):
            state.clear()
            state.update(copy.deepcopy(initial))


def can_be_unrolled(optimizer: Optimizer) -> bool:
    """Whether `update_vjp` knows how to differentiate the optimizer's update."""
    return "differentiable" in optimizer.defaults and not isinstance(optimizer, AGD)


def update_vjp(
    optimizer: Optimizer,
    values: Vector,
    memory: list[dict[str, Any]],
    gradient: Vector,
    adjoint: Vector,
    memory_adjoint: list[dict[str, Tensor]],
) -> tuple[Vector, list[dict[str, Tensor]], Vector]:
    r"""Pull adjoints back through one update :math:`(y, m) \mapsto U(y, m, \nabla g)` of an optimizer.

    Args:
        optimizer: the optimizer whose update it is.
        values: y before the update.
        memory: its state m before the update, one dict per tensor.
        gradient: the gradient that the update used.
        adjoint: derivative of the final value in the updated y.
        memory_adjoint: the same for the updated state (missing entries are zero).

    Returns:
        Adjoints of y (through the update alone), of m, and of the gradient.
    """
    y = Vector(v.detach().clone().requires_grad_() for v in values)
    g = Vector(v.detach().clone().requires_grad_() for v in gradient)
    with torch.enable_grad():
        m = [{key: _leaf(value, v) for key, value in state.items()} for state, v in zip(memory, y, strict=True)]
        new_y, new_m = _updated(optimizer, y, m, g)
    outputs, seeds = list(new_y), list(adjoint)
    for state, seed in zip(new_m, memory_adjoint, strict=True):
        outputs += [state[key] for key in seed]
        seeds += seed.values()
    smooth = [(i, key) for i, state in enumerate(m) for key in state if _is_smooth(state[key], y[i])]
    inputs = [*y, *g, *(m[i][key] for i, key in smooth)]
    kept = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
    results = torch.autograd.grad([o for o, _ in kept], inputs, [s for _, s in kept], allow_unused=True)
    count = len(y)
    zero = [torch.zeros_like(t) if r is None else r for r, t in zip(results, inputs, strict=True)]
    pulled: list[dict[str, Tensor]] = [{} for _ in y]
    for (i, key), value in zip(smooth, zero[2 * count :], strict=True):
        pulled[i][key] = value
    return Vector(zero[:count]), pulled, Vector(zero[count : 2 * count])


def _updated(
    optimizer: Optimizer, y: Vector, memory: list[dict[str, Any]], gradient: Vector
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The update as a differentiable function."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    if type(optimizer) is SGD:
        pairs = [_sgd(*one) for one in zip(groups, y, memory, gradient, strict=True)]
        return [value for value, _ in pairs], [state for _, state in pairs]
    twin = copy.copy(optimizer)
    twin.defaults = {**optimizer.defaults, "differentiable": True}
    values = [v.clone() for v in y]
    remaining = iter(values)
    twin.param_groups = [
        {**group, "params": [next(remaining) for _ in group["params"]], "differentiable": True, "foreach": False}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for value, state, grad in zip(values, memory, gradient, strict=True):
        value.retain_grad()  # lets torch read .grad of a tensor that is not a leaf without a warning
        value.grad = grad
        if state:
            twin.state[value] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    twin.step()
    return values, [twin.state[value] for value in values]


def _sgd(group: dict[str, Any], y: Tensor, memory: dict[str, Any], gradient: Tensor) -> tuple[Tensor, dict[str, Any]]:
    # torch's own differentiable=True cuts the graph at the first momentum buffer (grad.detach()).
    direction = -gradient if group["maximize"] else gradient
    if group["weight_decay"]:
        direction = direction + group["weight_decay"] * y
    if group["momentum"]:
        buffer = memory.get("momentum_buffer")
        kept = 1 - group["dampening"]
        buffer = direction if buffer is None else group["momentum"] * buffer + kept * direction
        memory = {"momentum_buffer": buffer}
        direction = direction + group["momentum"] * buffer if group["nesterov"] else buffer
    return y - group["lr"] * direction, memory


def _is_smooth(value: Any, like: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == like.shape and value.requires_grad


def _leaf(value: Any, like: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().clone()
    return leaf.requires_grad_() if leaf.is_floating_point() and leaf.shape == like.shape else leaf

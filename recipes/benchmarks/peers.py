r"""Hypergradients of other libraries on six problems with closed forms.

    python -m recipes.benchmarks.peers --page docs/peers.md --out docs/records   # where the libraries are installed

Each library solves the problem and differentiates the solution in the way that its documentation shows, in double
precision. Iterations and tolerances are set so that a right method is right to 1e-6. Rows "at defaults" leave them as
they are. Results of libraries that are not installed are those of the record.

    quadratic          g = y'Ay / 2 - y'x,                                     f = |y - t|^2 / 2 in all six
    ridge weights      g = mean(e^x (Ay - b)^2) / 2 + 0.05 |y|^2               x: a log weight for each example
    over-parametrised  g = mean((Ay - x)^2) / 2, more unknowns than examples   the least solution, from y = 0
    early stopped      five gradient steps of the first, from y = 0            the derivative of these steps
    constrained        g = |y - x|^2 / 2 on the probability simplex            a projection
    sparse             g = |y - b|^2 / 2 + sum_j e^(x_j) |y_j|                 soft thresholds
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bilevel_optim as bo

from ..common import Parser, save, show
from ..common.seeds import stream
from ..problems.hard import dense

PROBLEMS = ("quadratic", "ridge weights", "over-parametrised", "early stopped", "constrained", "sparse")
SMOOTH = PROBLEMS[:3]
STEPS, RATE, EARLY, RIDGE = 500, 0.3, 5, 0.1
TOLERANCE = 1e-6


def normal(*shape: int, name: str) -> Tensor:
    return torch.randn(*shape, generator=stream(0, name), dtype=torch.float64)


TARGET = normal(6, name="target")
BASIS = torch.linalg.qr(normal(6, 6, name="basis"))[0]
MATRIX = BASIS @ torch.diag(torch.linspace(0.5, 2.0, 6, dtype=torch.float64)) @ BASIS.T
TALL, TALL_TARGET = normal(12, 6, name="tall"), normal(12, name="tall target")
WIDE = normal(3, 6, name="wide")
SPARSE = torch.tensor([2.0, -1.5, 0.3, -0.2, 1.1, 0.05], dtype=torch.float64)
POINT = {
    "quadratic": normal(6, name="x"),
    "ridge weights": 0.3 * normal(12, name="log weights"),
    "over-parametrised": normal(3, name="targets"),
    "early stopped": normal(6, name="x"),
    "constrained": torch.tensor([0.7, 0.4, -0.3, 0.2, -1.0, -0.1], dtype=torch.float64),
    "sparse": torch.full((6,), -0.9, dtype=torch.float64),
}


def upper(x: Any, y: Any, target: Any = TARGET) -> Any:
    """Return f, of tensors of torch or JAX."""
    return ((y - target) ** 2).sum() / 2


def lower(
    problem: str, x: Any, y: Any, exp: Callable[[Any], Any] = torch.exp, to: Callable[[Any], Any] = lambda t: t
) -> Any:
    """Return g of a smooth problem, of tensors of torch or JAX (`to` converts the data)."""
    if problem == "ridge weights":
        return (exp(x) * (to(TALL) @ y - to(TALL_TARGET)) ** 2).mean() / 2 + RIDGE / 2 * (y**2).sum()
    if problem == "over-parametrised":
        return ((to(WIDE) @ y - x) ** 2).mean() / 2
    return y @ to(MATRIX) @ y / 2 - y @ x


def smooth_part(problem: str, x: Any, y: Any, **options: Any) -> Any:
    """Return g without its constraint or its absolute values."""
    if problem == "constrained":
        return ((y - x) ** 2).sum() / 2
    if problem == "sparse":
        return ((y - options.get("to", lambda t: t)(SPARSE)) ** 2).sum() / 2
    return lower(problem, x, y, **options)


def right(problem: str) -> Tensor:
    """Return the closed form."""
    x = POINT[problem]
    if problem == "quadratic":
        return torch.linalg.solve(MATRIX, torch.linalg.solve(MATRIX, x) - TARGET)
    if problem == "ridge weights":
        weights = x.exp() / 12
        inverse = torch.linalg.inv(TALL.T @ (weights[:, None] * TALL) + RIDGE * torch.eye(6, dtype=torch.float64))
        y = inverse @ TALL.T @ (weights * TALL_TARGET)
        return -weights * (TALL @ y - TALL_TARGET) * (TALL @ (inverse @ (y - TARGET)))
    if problem == "over-parametrised":
        inverse = torch.linalg.pinv(WIDE)
        return inverse.T @ (inverse @ x - TARGET)
    if problem == "early stopped":
        decay = torch.matrix_power(torch.eye(6, dtype=torch.float64) - RATE * MATRIX, EARLY)
        response = torch.linalg.solve(MATRIX, torch.eye(6, dtype=torch.float64) - decay)
        return response @ (response @ x - TARGET)
    if problem == "constrained":
        y = simplex(x)
        residual, support = y - TARGET, y > 0
        return torch.where(support, residual - residual[support].mean(), 0.0)
    y = shrunk(SPARSE, x.exp())
    return torch.where(y != 0, -SPARSE.sign() * x.exp() * (y - TARGET), 0.0)


def simplex(z: Tensor) -> Tensor:
    """Project onto the probability simplex."""
    ordered = z.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(z) + 1)
    return (z - excess[(ordered > excess).sum() - 1]).clamp_min(0)


def start(problem: str) -> tuple[Tensor, Tensor]:
    return POINT[problem].clone().requires_grad_(), torch.zeros(6, dtype=torch.float64, requires_grad=True)


def gradient(problem: str, solution: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of f through a differentiable solution."""
    x, _ = start(problem)
    return torch.autograd.grad(upper(x, solution(x)), x)[0]


def shrunk(z: Any, threshold: Any) -> Any:
    """Return soft thresholds of tensors of torch or JAX."""
    return z - z.clip(-threshold, threshold)


class Unsupported(Exception):
    """The library has no way to pose the problem."""


def only(problem: str, *known: str) -> None:
    if problem not in known:
        raise Unsupported


def descended(problem: str, x: Tensor, steps: int = STEPS) -> Tensor:
    """Return y after gradient steps, without a graph."""
    y = torch.zeros(6, dtype=torch.float64)
    for _ in range(steps):
        y = y - RATE * torch.func.grad(lambda z: lower(problem, x.detach(), z))(y)
    return y


def ours_aid(problem: str) -> Tensor:
    only(problem, *SMOOTH)
    x, y = start(problem)
    bo.AID([x], [y], lr=1.0, lower_lr=RATE, lower_steps=STEPS).backward(
        lambda: upper(x, y), lambda: lower(problem, x, y)
    )
    assert x.grad is not None
    return x.grad


def ours_minres(problem: str) -> Tensor:
    only(problem, *SMOOTH)
    x, y = start(problem)
    options: dict[str, Any] = {"lr": 1.0, "lower_lr": RATE, "lower_steps": STEPS, "linear_solver": "minres"}
    bo.AID([x], [y], **options).backward(lambda: upper(x, y), lambda: lower(problem, x, y))
    assert x.grad is not None
    return x.grad


def ours_solve(problem: str) -> Tensor:
    only(problem, *SMOOTH, *PROBLEMS[4:])
    zero = torch.zeros(6, dtype=torch.float64)
    proximal = {"constrained": lambda x, z, _: simplex(z), "sparse": lambda x, z, step: shrunk(z, step * x.exp())}
    options = {"proximal": proximal[problem]} if problem in proximal else {}
    return gradient(problem, lambda x: bo.solve(lambda x, y: smooth_part(problem, x, y), x, zero, **options))


def ours_itd(problem: str) -> Tensor:
    x, y = start(problem)
    steps = EARLY if problem == "early stopped" else STEPS
    options: dict[str, Any] = {"lr": 1.0, "lower_lr": RATE, "lower_steps": steps}
    if problem == "constrained":
        options["lower_projection"] = lambda values: [simplex(v) for v in values]
    if problem == "sparse":  # the proximal map of the rest of the loss, which may depend on x
        options["lower_projection"] = lambda values: [shrunk(v, RATE * x.exp()) for v in values]
    bo.ITD([x], [y], **options).backward(lambda: upper(x, y), lambda: smooth_part(problem, x, y))
    assert x.grad is not None
    return x.grad


def torchopt_root(problem: str, solver: str = "solve_cg") -> Tensor:
    only(problem, *SMOOTH, *PROBLEMS[4:])
    import torchopt

    def condition(y: Tensor, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: smooth_part(problem, x, y))(y)
        if problem == "constrained":
            return y - simplex(y - slope)
        return y - shrunk(y - slope, x.exp()) if problem == "sparse" else slope

    def solved(start: Tensor, x: Tensor) -> Tensor:
        if problem in SMOOTH:
            return descended(problem, x)
        return simplex(x.detach()) if problem == "constrained" else shrunk(SPARSE, x.detach().exp())

    linear = getattr(torchopt.linear_solve, solver)()
    root = torchopt.diff.implicit.custom_root(condition, argnums=1, solve=linear)(solved)
    return gradient(problem, lambda x: root(torch.zeros(6, dtype=torch.float64), x))


def torchopt_meta(problem: str) -> Tensor:
    only(problem, *PROBLEMS[:4])
    import torchopt

    x, _ = start(problem)
    model = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    inner = torchopt.MetaSGD(model, lr=RATE)
    for _ in range(EARLY if problem == "early stopped" else STEPS):
        inner.step(lower(problem, x, model.weight[0]))
    return torch.autograd.grad(upper(x, model.weight[0]), x)[0]


def higher_unrolled(problem: str) -> Tensor:
    only(problem, *PROBLEMS[:4])
    import higher

    x, _ = start(problem)
    model = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    with higher.innerloop_ctx(model, torch.optim.SGD(model.parameters(), lr=RATE)) as (inner, descent):
        for _ in range(EARLY if problem == "early stopped" else STEPS):
            descent.step(lower(problem, x, inner.weight[0]))
        return torch.autograd.grad(upper(x, inner.weight[0]), x)[0]


def learn2learn(problem: str) -> Tensor:
    only(problem, *PROBLEMS[:4])
    import learn2learn

    x, _ = start(problem)
    model = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    learner = learn2learn.algorithms.MAML(model, lr=RATE).clone()
    for _ in range(EARLY if problem == "early stopped" else STEPS):
        learner.adapt(lower(problem, x, learner.module.weight[0]))
    return torch.autograd.grad(upper(x, learner.module.weight[0]), x)[0]


def betty(**options: Any) -> Callable[[str], Tensor]:
    """Return the hypergradient of Betty: what one upper step of length 1 takes off x."""

    def run(problem: str) -> Tensor:
        only(problem, *SMOOTH)
        import logging

        from betty.configs import Config, EngineConfig
        from betty.engine import Engine
        from betty.problems import ImplicitProblem

        class Outer(ImplicitProblem):
            def training_step(self, batch: Any) -> Tensor:
                return upper(self.module.x, self.inner.module.weight[0])

        class Inner(ImplicitProblem):
            def training_step(self, batch: Any) -> Tensor:
                return lower(problem, self.outer.module.x, self.module.weight[0])

        up, low = torch.nn.Module(), torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
        up.x = torch.nn.Parameter(POINT[problem].clone())
        torch.nn.init.zeros_(low.weight)
        steps, none = {"lr": RATE}, [[]]
        outer = Outer("outer", Config(), up, torch.optim.SGD(up.parameters(), lr=1.0), train_data_loader=none)
        config = Config(unroll_steps=STEPS, **options)
        inner = Inner("inner", config, low, torch.optim.SGD(low.parameters(), **steps), train_data_loader=none)
        ways = {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}}
        logging.disable(logging.INFO)
        Engine(problems=[outer, inner], dependencies=ways, config=EngineConfig(train_iters=STEPS)).run()
        logging.disable(logging.NOTSET)
        return POINT[problem] - up.x.detach()

    return run


def boat(operator: str) -> Callable[[str], Tensor]:
    """Return the hypergradient of BOAT with one operator; losses are given by import path, so a module is made."""

    def run(problem: str) -> Tensor:
        only(problem, *(PROBLEMS[:4] if operator == "RAD" else SMOOTH))
        import boat_torch

        low = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(low.weight)
        up = torch.nn.Module()
        up.x = torch.nn.Parameter(POINT[problem].clone())
        losses = types.ModuleType("recipes_benchmarks_peers_losses")

        def value(params: Any, model: Any) -> Tensor:
            row: Tensor = next(iter(model.parameters() if params is None else params))[0]
            return row

        vars(losses)["low"] = lambda _, ul, ll, params=None: lower(problem, ul.x, value(params, ll))
        vars(losses)["up"] = lambda _, ul, ll, params=None: upper(ul.x, value(params, ll))
        sys.modules[losses.__name__] = losses
        config = {
            "fo_op": None, "gm_op": ["NGD"], "na_op": [operator], "lower_level_model": low, "upper_level_model": up,
            "lower_level_var": [*low.parameters()], "upper_level_var": [*up.parameters()],
            "lower_level_opt": torch.optim.SGD(low.parameters(), lr=RATE),
            "upper_level_opt": torch.optim.SGD(up.parameters(), lr=1.0), "device": "cpu",
            "lower_iters": EARLY if problem == "early stopped" else STEPS, "loss_log_path": "/dev/null",
            "accumulate_grad": False, "copy_last_param": False, "return_grad": False,
            "CG": {"tolerance": 1e-12, "k": 100}, "NS": {"k": 1000}, "GDA": {"alpha_init": 0.0, "alpha_decay": 0.0},
            "RGT": {"truncate_iter": 0}, "RAD": {}, "fo_ol_batch_input": False,
        }  # fmt: skip
        names = {
            f"{k}_level_loss": {"function": f"{losses.__name__}.{f}", "params": {}}
            for k, f in (("lower", "low"), ("upper", "up"))
        }
        solver = boat_torch.Problem(config, names)
        solver.build_ll_solver()
        solver.build_ul_solver()
        before = up.x.detach().clone()
        solver.run_iter({}, {}, current_iter=0)
        return before - up.x.detach()

    return run


def jax_problem(problem: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Return JAX in double precision, the point, and g(y, x)."""
    import jax

    jax.config.update("jax_enable_x64", True)
    to = lambda t: jax.numpy.asarray(t.numpy())  # noqa: E731
    return jax, to(POINT[problem]), lambda y, x: lower(problem, x, y, jax.numpy.exp, to)


def of_jax(jax: Any, x: Any, solution: Callable[[Any], Any]) -> Tensor:
    target = jax.numpy.asarray(TARGET.numpy())
    return torch.from_numpy(jax.numpy.array(jax.grad(lambda x: upper(x, solution(x), target))(x)).__array__().copy())


def jaxopt(defaults: bool = False) -> Callable[[str], Tensor]:
    def run(problem: str) -> Tensor:
        if defaults:
            only(problem, *SMOOTH, *PROBLEMS[4:])
        jax, x, g = jax_problem(problem)
        import jaxopt

        zero, early = jax.numpy.zeros(6), problem == "early stopped"
        limits: dict[str, Any] = {} if defaults else {"maxiter": 500, "tol": 0.0 if early else 1e-12}
        if problem == "constrained":
            project = jaxopt.projection.projection_simplex
            solver = jaxopt.ProjectedGradient(lambda y, x: ((y - x) ** 2).sum() / 2, lambda y, _: project(y), **limits)
            return of_jax(jax, x, lambda x: solver.run(zero, hyperparams_proj=None, x=x).params)
        if problem == "sparse":
            b = jax.numpy.asarray(SPARSE.numpy())
            solver = jaxopt.ProximalGradient(lambda y: ((y - b) ** 2).sum() / 2, jaxopt.prox.prox_lasso, **limits)
            return of_jax(jax, x, lambda x: solver.run(zero, hyperparams_prox=jax.numpy.exp(x)).params)
        if not defaults:
            limits |= {"stepsize": RATE, "acceleration": False, "implicit_diff": not early, "unroll": early}
        solver = jaxopt.GradientDescent(g, **limits | ({"maxiter": EARLY} if early else {}))
        return of_jax(jax, x, lambda x: solver.run(zero, x).params)

    return run


def optimistix(problem: str) -> Tensor:
    only(problem, *SMOOTH)
    jax, x, g = jax_problem(problem)
    import optimistix

    solver = optimistix.BFGS(rtol=1e-10, atol=1e-10)
    return of_jax(jax, x, lambda x: optimistix.minimise(g, solver, jax.numpy.zeros(6), x, max_steps=1000).value)


def optimistix_fixed_point(problem: str) -> Tensor:
    only(problem, *SMOOTH, *PROBLEMS[4:])
    jax, x, _ = jax_problem(problem)
    import optimistix

    np = jax.numpy
    to = lambda t: np.asarray(t.numpy())  # noqa: E731
    g = lambda y, x: smooth_part(problem, x, y, exp=np.exp, to=to)  # noqa: E731

    def step(y: Any, x: Any) -> Any:
        y = y - RATE * jax.grad(g)(y, x)
        if problem == "sparse":
            return shrunk(y, RATE * np.exp(x))
        if problem == "constrained":
            ordered = np.sort(y)[::-1]
            excess = (ordered.cumsum() - 1) / np.arange(1, 7)
            return np.maximum(y - excess[(ordered > excess).sum() - 1], 0)
        return y

    solver = optimistix.FixedPointIteration(rtol=1e-12, atol=1e-12)
    return of_jax(jax, x, lambda x: optimistix.fixed_point(step, solver, np.zeros(6), x, max_steps=2000).value)


def cvxpylayers(problem: str, **options: Any) -> Tensor:
    only(problem, *SMOOTH, "constrained", "sparse")
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    y, p = cp.Variable(6), cp.Parameter(len(POINT[problem]), nonneg=problem == "sparse" or None)
    limits, value = [], lambda x: x
    if problem == "quadratic":
        loss = cp.sum_squares(torch.linalg.cholesky(MATRIX).T.numpy() @ y) / 2 - p @ y
    elif problem == "ridge weights":
        residual = cp.multiply(p, TALL.numpy() @ y - TALL_TARGET.numpy())
        loss, value = cp.sum_squares(residual) / 24 + RIDGE / 2 * cp.sum_squares(y), lambda x: (x / 2).exp()
    elif problem == "over-parametrised":
        loss = cp.sum_squares(WIDE.numpy() @ y - p) / 6
    elif problem == "constrained":
        loss, limits = cp.sum_squares(y - p) / 2, [y >= 0, cp.sum(y) == 1]
    else:
        loss = cp.sum_squares(y - SPARSE.numpy()) / 2 + p @ cp.abs(y)
        value = lambda x: x.exp()  # noqa: E731
    layer = CvxpyLayer(cp.Problem(cp.Minimize(loss), limits), parameters=[p], variables=[y])
    return gradient(problem, lambda x: layer(value(x), **options)[0])


def qpth(problem: str) -> Tensor:
    only(problem, *SMOOTH, "constrained")
    from qpth.qp import QPFunction

    one, none = torch.eye(6, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    row, total = torch.ones(1, 6, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    if problem == "constrained":
        zero = torch.zeros(6, dtype=torch.float64)
        return gradient(problem, lambda x: QPFunction()(one, -x, -one, zero, row, total)[0])

    def solution(x: Tensor) -> Tensor:
        quadratic, linear = MATRIX, -x
        if problem == "ridge weights":
            weighted = (x.exp() / 12)[:, None] * TALL
            quadratic, linear = TALL.T @ weighted + RIDGE * one, -weighted.T @ TALL_TARGET
        if problem == "over-parametrised":
            quadratic, linear = WIDE.T @ WIDE / 3, -WIDE.T @ x / 3
        never_active = torch.full((6,), 100.0, dtype=torch.float64)  # without an inequality it raises ValueError
        return QPFunction()(quadratic, linear, one, never_active, none, none)[0]

    return gradient(problem, solution)


def torchdeq(problem: str, **options: Any) -> Tensor:
    only(problem, *SMOOTH, *PROBLEMS[4:])
    import torchdeq

    deq = torchdeq.get_deq(ift=True, **options)

    def solution(x: Tensor) -> Tensor:
        def step(y: Tensor) -> Tensor:
            with torch.enable_grad():
                z = y[0] if y.requires_grad else y[0].detach().requires_grad_()
                y = y - RATE * torch.autograd.grad(smooth_part(problem, x, z), z, create_graph=True)[0][None]
            if problem == "constrained":
                return simplex(y[0])[None]
            return shrunk(y, RATE * x.exp()) if problem == "sparse" else y

        return deq(step, torch.zeros(1, 6, dtype=torch.float64))[0][-1][0]

    return gradient(problem, solution)


def torchdiffeq(name: str) -> Callable[[str], Tensor]:
    def run(problem: str) -> Tensor:
        only(problem, *SMOOTH)
        import torchdiffeq

        x, _ = start(problem)

        class Flow(torch.nn.Module):
            def forward(self, t: Tensor, y: Tensor) -> Tensor:
                with torch.enable_grad():
                    z = y if y.requires_grad else y.detach().requires_grad_()
                    return -torch.autograd.grad(lower(problem, x, z), z, create_graph=True)[0]

        # Ridge weights have small curvatures; the adjoint is best where their flow has not ended.
        horizon = 60.0 if problem != "ridge weights" else 200.0 if name == "odeint" else 10.0
        ends = torch.tensor([0.0, horizon], dtype=torch.float64)
        options: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}
        if name == "odeint_adjoint":
            options["adjoint_params"] = (x,)
        y = getattr(torchdiffeq, name)(Flow(), torch.zeros(6, dtype=torch.float64), ends, **options)[-1]
        return torch.autograd.grad(upper(x, y), x)[0]

    return run


def sparho(problem: str) -> Tensor:
    only(problem, "sparse")
    import numpy
    import sparho

    # Its squared loss is a mean over the rows, so six rows are scaled by the root of six.
    task = sparho.Problem(sparho.SquaredLoss(), sparho.WeightedL1(), 6**0.5 * numpy.eye(6), 6**0.5 * SPARSE.numpy())
    penalty = POINT["sparse"].exp().numpy()
    from sparho.adapters import SklearnWeightedLasso

    solved = SklearnWeightedLasso(tol=1e-12)(task, penalty)
    found = sparho.implicit_forward(task, penalty, solved, solved.coef - TARGET.numpy())
    return torch.from_numpy(numpy.asarray(found)) * POINT["sparse"].exp()


def hypergrad(name: str, **options: Any) -> Callable[[str], Tensor]:
    def run(problem: str) -> Tensor:
        only(problem, *SMOOTH)
        from hypergrad import approx_hypergrad

        x, _ = start(problem)
        y = descended(problem, x)
        call = getattr(approx_hypergrad, name)
        return call(lambda i, o: lower(problem, o[0], i[0]), lambda i, o: upper(o[0], i[0]) + 0 * o[0].sum(), (y,),
                    (x.detach(),), **options)[0].detach()  # fmt: skip

    return run


def gradhpo(problem: str, steps: int = EARLY) -> Tensor:
    only(problem, "early stopped")
    jax, x, g = jax_problem(problem)
    import gradhpo
    import optax

    target = jax.numpy.asarray(TARGET.numpy())
    method = gradhpo.GreedyOptimizer(optax.sgd(RATE), optax.sgd(1.0), unroll_steps=steps)
    state = method.init(jax.numpy.zeros(6), x)
    after = method.step(state, None, None, lambda y, x, _: g(y, x), lambda y, x, _: upper(x, y, target))
    after = after[0] if isinstance(after, tuple) else after
    return torch.from_numpy(jax.numpy.array(x - after.hyperparams).__array__().copy())


FIXED = {
    "f_solver": "fixed_point_iter", "f_max_iter": STEPS, "f_tol": 1e-12, "b_solver": "fixed_point_iter",
    "b_max_iter": STEPS, "b_tol": 1e-12,
}  # fmt: skip
# name: (package, way to call it)
PEERS: dict[str, tuple[str, Callable[[str], Tensor]]] = {
    "bilevel_optim, AID": ("bilevel-optim", ours_aid),
    "bilevel_optim, AID, minres": ("bilevel-optim", ours_minres),
    "bilevel_optim, solve": ("bilevel-optim", ours_solve),
    "bilevel_optim, ITD": ("bilevel-optim", ours_itd),
    "TorchOpt, custom_root": ("torchopt", torchopt_root),
    "TorchOpt, custom_root, normal_cg": ("torchopt", partial(torchopt_root, solver="solve_normal_cg")),
    "TorchOpt, MetaSGD": ("torchopt", torchopt_meta),
    "higher": ("higher", higher_unrolled),
    "learn2learn, MAML": ("learn2learn", learn2learn),
    "Betty, cg": ("betty-ml", betty(type="cg", cg_iterations=6)),
    "Betty, neumann": ("betty-ml", betty(type="neumann", neumann_iterations=STEPS, neumann_alpha=RATE)),
    "Betty, darts": ("betty-ml", betty(type="darts")),
    "BOAT, RAD": ("boat-torch", boat("RAD")),
    "BOAT, CG": ("boat-torch", boat("CG")),
    "JAXopt": ("jaxopt", jaxopt()),
    "JAXopt, at defaults": ("jaxopt", jaxopt(defaults=True)),
    "optimistix, minimise": ("optimistix", optimistix),
    "optimistix, fixed_point": ("optimistix", optimistix_fixed_point),
    "cvxpylayers": ("cvxpylayers", partial(cvxpylayers, solver_args={"eps": 1e-10})),
    "cvxpylayers, at defaults": ("cvxpylayers", cvxpylayers),
    "qpth": ("qpth", qpth),
    "torchdeq": ("torchdeq", partial(torchdeq, **FIXED)),
    "torchdeq, at defaults": ("torchdeq", torchdeq),
    "torchdiffeq, odeint": ("torchdiffeq", torchdiffeq("odeint")),
    "torchdiffeq, odeint_adjoint": ("torchdiffeq", torchdiffeq("odeint_adjoint")),
    "sparho": ("sparho", sparho),
    "hypergrad, conjugate_gradient": ("hypergrad", hypergrad("conjugate_gradient", num_iters=6, lr=1.0)),
    "hypergrad, neumann": ("hypergrad", hypergrad("neumann", num_iters=STEPS, lr=RATE)),
    "gradhpo, greedy": ("gradhpo", gradhpo),
}
APPROXIMATIONS = ("Betty, darts", "gradhpo, greedy")  # as their documentation says
TIGHT = {name: name.removesuffix(", at defaults") for name in PEERS if name.endswith(", at defaults")}


def judge(name: str, problem: str) -> dict[str, Any]:
    """Return the verdict, with the relative error, and what the library said."""
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            found = PEERS[name][1](problem)
    except Unsupported:
        return {"verdict": "no"}
    except Exception as error:  # whatever the other library raises is the result
        return {"verdict": "refused", "said": f"{type(error).__name__}: {error}".split("\n")[0][:120]}
    truth = right(problem)
    error = float((found - truth).norm() / truth.norm())
    quiet = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
    said = [str(w.message).split("\n")[0][:120] for w in caught if not issubclass(w.category, quiet)]
    if error < TOLERANCE:
        return {"verdict": "right", "error": error}
    if name in APPROXIMATIONS:
        return {"verdict": "approximation", "error": error}
    return {"verdict": "warned", "error": error, "said": said[0]} if said else {"verdict": "silent", "error": error}


def version(package: str) -> str | None:
    try:
        return bo.__version__ if package == "bilevel-optim" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


VERDICTS = {
    "approximation": "*approximate*: by design, as the documentation says",
    "tolerance": "*tolerance*: wrong at the library's default tolerance, right at a tighter one",
    "warned": "**warned**: wrong, with a warning",
    "silent": "**silent**: wrong, without a word",
    "refused": "**refused**: an error instead of a number",
    "no": "no: it has no way to pose the problem",
}
HEADER = (
    "# Hypergradients of other libraries",
    "",
    "Relative error of the hypergradient on six problems with closed forms, in double precision. Each library solves",
    "and differentiates the problem in the way that its documentation shows. Iterations and tolerances are set so that",
    "a right method is right to 1e-6; rows *at defaults* leave them as they are.",
    "`python -m recipes.benchmarks.peers` makes this page from the libraries that are installed, and keeps the results",
    "of the others.",
)


def page(numbers: Mapping[str, Any]) -> str:
    """Return the page of the site."""
    lines = [*HEADER, "", f"| library | version | {' | '.join(PROBLEMS)} |", "|---" * 8 + "|"]
    for name, row in numbers["results"].items():
        cells = [cell(row[problem]) for problem in PROBLEMS]
        lines.append(f"| {name} | {row['version']} | {' | '.join(cells)} |")
    doc = __doc__ or ""
    problems = doc[doc.index("    quadratic") :].strip("\n")
    legend = ["A number alone is right: its error is below 1e-6.", "", *(f"* {text}" for text in VERDICTS.values())]
    lines += ["", *legend, "", "The problems:", "", "```text", textwrap.dedent(problems), "```", "", *NOTES, ""]
    return "\n".join(lines)


def cell(found: Mapping[str, Any]) -> str:
    """Return an entry of the table."""
    verdict = found["verdict"]
    if verdict in ("right", "no"):
        return (f"{found['error']:.0e}" if found["error"] else "0") if verdict == "right" else "no"
    if verdict == "refused":
        return f"**refused** ({found['said'].split(':')[0]})"
    word = {"approximation": "*approximate*", "tolerance": "*tolerance*"}.get(verdict, f"**{verdict}**")
    return f"{found['error']:.2g} {word}"


NOTES = (
    "Every wrong entry was looked at twice: is it the library, or how it is called here?",
    "",
    "* **Over-parametrised**: the Hessian is singular, and the right value is the derivative of the least solution,",
    "  which gradient descent from zero finds. Conjugate gradients break down by luck, with a number or an error. They",
    '  are the default of `AID` here, which warns; `linear_solver="minres"` is right. TorchOpt has `solve_normal_cg`,',
    "  and optimistix is right (5e-13) with `ImplicitAdjoint(lineax.AutoLinearSolver(well_posed=False))`. cvxpylayers",
    "  returns another minimiser, and its derivative is 16 % off that of what it returns.",
    "* **Betty, cg** and **hypergrad, conjugate_gradient** make each direction from the old residual, and **BOAT, CG**",
    "  drops the last iterate (scripts in the folder `findings` of the repository, and the test of Betty's page).",
    "* **torchdiffeq** integrates the gradient flow. `odeint_adjoint` integrates the reversed flow for the gradient,",
    "  which is unstable where the flow contracts: with ridge weights its error is 0.10 at time 10, where the flow has",
    "  not ended, and 520 at time 20. In the other two problems the gradient does not depend on the path.",
    "* **Betty, darts** takes the identity for the inverse Hessian; so does **sama** with SGD. **gradhpo, greedy** is",
    "  exact for one lower step only.",
    "* **At defaults**: JAXopt has `tol=1e-3`, and torchdeq `f_tol=1e-3` and `f_max_iter=40`, without a warning.",
    "* qpth needs an inequality, though its documentation says that there may be none: here one that is never active.",
    "* Betty and learn2learn were installed as [their](howto/from_betty.md) [pages](howto/from_learn2learn.md) say,",
    "  qpth and BOAT with `pip install --no-deps`: they ask for an old numpy, and run with 2.4.",
    "* torchsde and geomloss solve no lower problem; second derivatives of geomloss's losses are wrong (`findings`),",
    '  so a lower loss made of them needs `hvp="finite-difference"` or `F2SA`.',
    "",
    "[What other libraries have](peer_features.md) lists two features of each, and what takes their place here.",
)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Compare, and write the numbers."""
    parser = Parser(__doc__, threads=1)
    parser.option("peers", [*PEERS], "libraries", choices=[*PEERS], metavar="NAME")
    parser.option("problems", [*PROBLEMS], "problems", choices=[*PROBLEMS], metavar="NAME")
    parser.add_argument("--page", type=Path, help="page of the site to write")
    args = parser.parse(arguments)
    for problem in SMOOTH:  # the closed forms against dense matrices
        y = descended(problem, POINT[problem])
        truth = dense(upper, lambda x, y, problem=problem: lower(problem, x, y), POINT[problem], y)
        assert torch.allclose(truth, right(problem), rtol=1e-6), problem
    record = args.out / "peers.json"  # results of libraries that are not asked for are kept
    results: dict[str, Any] = json.loads(record.read_text())["results"] if record.exists() else {}
    for name in args.peers:
        if (found := version(PEERS[name][0])) is None:
            print(f"{name}: {PEERS[name][0]} is not installed", file=sys.stderr)
        else:
            results[name] = {"version": found, **{problem: judge(name, problem) for problem in args.problems}}
            if sys.stderr.isatty():
                print(name, *results[name].values(), sep="  ", file=sys.stderr, flush=True)
    results = {name: results[name] for name in PEERS if name in results}
    for name, tight in TIGHT.items():
        for problem in args.problems:
            verdicts = [results[row][problem]["verdict"] for row in (name, tight) if row in results]
            if verdicts == ["silent", "right"]:
                results[name][problem]["verdict"] = "tolerance"
    rows = [
        [name, row["version"], *(cell(row[problem]).replace("*", "") for problem in args.problems)]
        for name, row in results.items()
    ]
    show("relative error of the hypergradient", ["", "version", *args.problems], rows)
    numbers = save(args, args.out / "peers", {"results": results})
    if args.page is not None:
        args.page.write_text(page(numbers))
    return numbers


if __name__ == "__main__":
    main()

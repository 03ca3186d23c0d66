"""Nesterov's method in closed form (RAHGD specification, section 6.1); torch's update rules and their derivatives."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from bilevel_optim import AGD, Vector
from bilevel_optim.problem.parameters import rates_of
from bilevel_optim.solvers.functional import can_be_unrolled, updated
from bilevel_optim.solvers.lower import LowerResult, LowerRule
from bilevel_optim.solvers.unrolling import update_vjp

from ..problems import close


def agd(spectrum, steps, lr, momentum, start=1.0):
    spectrum = torch.as_tensor(spectrum, dtype=torch.float64)
    z = (torch.ones_like(spectrum) * start).requires_grad_()
    optimizer, path = AGD([z], lr=lr, momentum=momentum), []

    def closure():
        z.grad = spectrum * z.detach()

    for _ in range(steps):
        optimizer.step(closure)
        path.append(z.detach().clone())
    return torch.stack(path)


def test_agd_iterates_of_the_specification():
    path = agd([1.0, 0.25], 3, lr=1.0, momentum=1 / 3)
    expected = torch.tensor([[0.0, 0.75], [0.0, 0.5], [0.0, 0.3125]])
    close(path, expected, 1e-15, 1e-15)


@pytest.mark.parametrize("kappa", [4.0, 100.0, 1e4])
def test_agd_closed_form(kappa):
    """The slowest component is (1 - 1/sqrt kappa)^T (1 + T / sqrt kappa), the stiffest zero after one step."""
    root = kappa**0.5
    path = agd([1.0, 1 / kappa], 200, lr=1.0, momentum=(root - 1) / (root + 1))
    steps = torch.arange(1, 201, dtype=torch.float64)
    exact = (1 - 1 / root) ** steps * (1 + steps / root)
    assert path[:, 0].abs().max() == 0
    close(path[:, 1], exact, 1e-13)


def test_agd_without_momentum_is_gradient_descent_and_kappa_one_needs_one_step():
    path = agd([1.0, 0.5], 5, lr=0.8, momentum=0.0)
    torch.testing.assert_close(path[-1], torch.tensor([0.2, 0.6], dtype=torch.float64) ** 5)
    assert agd([2.0, 2.0], 1, lr=0.5, momentum=0.0).abs().max() == 0


def test_agd_needs_as_many_steps_as_the_table_says():
    """Error reduced by 1e-6 (d = 50, log-spaced): 36, 131, 427 steps for kappa = 10, 100, 1000."""
    for kappa, needed in ((10.0, 36), (100.0, 131), (1000.0, 427)):
        spectrum = torch.logspace(0, torch.tensor(kappa).log10().item(), 50, dtype=torch.float64) / kappa
        root, start = kappa**0.5, torch.from_numpy(np.random.default_rng(1).standard_normal(50))
        path = agd(spectrum, needed + 30, lr=1.0, momentum=(root - 1) / (root + 1), start=start)
        reached = int((path.norm(dim=1) <= 1e-6 * start.norm()).nonzero()[0]) + 1
        assert reached == needed


def test_agd_refuses_bad_arguments():
    z = torch.zeros(1, requires_grad=True)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        AGD([z], lr=-1)
    with pytest.raises(ValueError, match=r"Invalid momentum value: 1\.0"):
        AGD([z], momentum=1.0)
    with pytest.raises(RuntimeError, match="needs a closure"):
        AGD([z]).step()


# ---------------------------------------------------------------------------------------------------- lower steps


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "dampening": partial(torch.optim.SGD, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "maximize": partial(torch.optim.SGD, momentum=0.5, maximize=True),
    "Adam": torch.optim.Adam,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop-centered": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
}


class ExtraGradient(torch.optim.Optimizer):
    """Not torch's own: it evaluates the gradient twice, the second time elsewhere."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        each = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        start = [p.clone() for p, _ in each]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for (p, lr), before in zip(each, start, strict=True):
                p.copy_(before - lr * p.grad)
        return loss


WHOLE = {  # those that need the loss, or look at all the tensors together
    "AGD": partial(AGD, momentum=0.6),
    "LBFGS": partial(torch.optim.LBFGS, max_iter=3),
    "LBFGS-wolfe": partial(torch.optim.LBFGS, max_iter=4, history_size=3, line_search_fn="strong_wolfe"),
    "extragradient": ExtraGradient,
}
ones = Vector([torch.ones(2), torch.ones(3)])


def loss_of(y):
    """Neither quadratic nor separable."""
    a, b = y
    return a.cosh().sum() + (b.square().sum() + 1).sqrt() + (a.sum() - b[0]).square()


def same_memory(a, b):
    def same(s, t):
        if isinstance(s, (list, tuple)):
            return len(s) == len(t) and all(map(same, s, t))
        return torch.equal(s, t) if isinstance(s, torch.Tensor) else s == t

    return all(s.keys() == t.keys() and all(same(s[k], t[k]) for k in s) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("name", [*OPTIMIZERS, *WHOLE])
def test_a_rule_is_the_optimizer_step_for_step(name):
    """Also with a learning rate that changes; the arguments stay unchanged."""
    factory = {**OPTIMIZERS, **WHOLE}[name]
    start = Vector([torch.tensor([0.5, -0.7]), torch.tensor([0.9, 0.1, -1.3])])
    live = [t.clone().requires_grad_() for t in start]
    if name.startswith("LBFGS"):  # takes one group alone
        groups = [{"params": live, "lr": 0.3}]
    else:
        groups = [{"params": [live[0]], "lr": 0.05}, {"params": [live[1]], "lr": 0.02}]
    optimizer = factory([dict(group) for group in groups])
    rule = LowerRule(factory, [{**group, "level": "lower", "initial_lr": 1.0} for group in groups], Vector(live))
    y, memory, sign = start, rule.fresh(), -1.0 if name == "maximize" else 1.0

    def closure():
        optimizer.zero_grad()
        loss = sign * loss_of(live)
        loss.backward()
        return loss

    def evaluated(y):
        y = Vector(t.detach().clone().requires_grad_() for t in y)
        loss = sign * loss_of(y)
        return loss.detach(), Vector(torch.autograd.grad(loss, list(y)))

    for step in range(12):
        if step == 7:
            for theirs, ours in zip(optimizer.param_groups, groups, strict=True):
                theirs["lr"] = ours["lr"] = ours["lr"] / 2
            rule.follow(groups)
        optimizer.step(closure)
        before = y.clone(), copy.deepcopy(memory)
        solved = rule.step(y, memory, evaluated)
        assert all(map(torch.equal, y, before[0]))
        assert same_memory(memory, before[1])
        again = rule.step(y, memory, evaluated)  # a function: the same once more
        assert all(map(torch.equal, again.y, solved.y))
        assert same_memory(again.memory, solved.memory)
        y, memory = solved.y, solved.memory
        for ours, theirs in zip(y, live, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-11, atol=1e-13)
        assert not any(t.requires_grad for t in y)
    assert float((y - start).norm()) > 1e-3
    assert rule.evaluates_once == (name not in ("LBFGS", "LBFGS-wolfe", "extragradient"))


def test_a_rule_works_on_stacked_copies_as_on_each():
    rules = [LowerRule(torch.optim.Adam, [{"params": [0], "lr": 0.1}], Vector([torch.zeros(s)])) for s in ((3, 2), 2)]
    start, slope = torch.randn(3, 2), lambda y: (torch.zeros(()), Vector([y[0] ** 3 - 1]))
    stacked = rules[0].run(Vector([start]), rules[0].fresh(), 5, lambda: slope).y[0]
    for lane in range(3):
        alone = rules[1].run(Vector([start[lane]]), rules[1].fresh(), 5, lambda: slope).y[0]
        torch.testing.assert_close(stacked[lane], alone)
    groups = [{"params": [0], "lr": 0.1}]
    assert rules[0].fits(groups, Vector([torch.ones(3, 2)]))
    for other in (torch.ones(2), torch.ones(3, 2).float()):
        assert not rules[0].fits(groups, Vector([other]))
    assert not rules[0].fits(groups * 2, Vector([torch.ones(3, 2)]))


def test_a_rule_takes_groups_and_touches_no_parameter():
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    a.grad = torch.full((2,), 7.0)
    groups = [
        {"params": [a], "lr": 0.1, "level": "lower"},
        {"params": [b], "lr": 0.2, "momentum": 0.5, "level": "lower"},
    ]
    rule = LowerRule(partial(torch.optim.SGD, momentum=0.0), groups, Vector([a, b]))
    draw = lambda: lambda y: (torch.zeros(()), ones)  # noqa: E731
    y, memory, *_ = rule.run(Vector([a, b]).detach(), rule.fresh(), 2, draw)
    torch.testing.assert_close(y[0], torch.full((2,), 0.8))
    torch.testing.assert_close(y[1], torch.full((3,), 1 - 0.2 - 0.3))
    assert a.grad.eq(7.0).all()
    assert b.grad is None
    assert a.eq(1).all()
    assert b.eq(1).all()
    groups[0]["lr"] = 0.0
    rule.follow(groups)
    torch.testing.assert_close(rule.step(y, memory, draw()).y[0], torch.full((2,), 0.8))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_learning_rate_that_is_a_tensor_is_one_that_is_a_number(momentum):
    """It is not read, and decides no type, also of y that is a number."""
    ends = []
    for lr in (torch.tensor([0.1], dtype=torch.float64, requires_grad=True)[0], 0.1):
        params = [torch.ones(shape, dtype=torch.float32, requires_grad=True) for shape in ((2,), ())]
        groups = [{"params": params, "lr": lr}]
        rule = LowerRule(partial(torch.optim.SGD, momentum=momentum), groups, Vector(params))
        ends.append(rule.run(Vector(params).detach(), rule.fresh(), 3, lambda: lambda y: (None, y * 1.0)).y)
    assert [t.dtype for t in ends[0]] == [torch.float32] * 2
    torch.testing.assert_close(ends[0], ends[1])
    (rate, *_) = rates_of([{"params": params, "lr": torch.ones(1, device="meta")}])  # which cannot be read
    assert rate.shape == ()


@pytest.mark.parametrize("copies", [0, 3])
def test_norms_that_a_run_made_are_those_of_its_gradients(copies):
    y = Vector([torch.randn(*[copies] * bool(copies), 2), torch.randn(*[copies] * bool(copies), 3)])
    groups = [{"params": [torch.zeros(2), torch.zeros(3)], "lr": 0.1}]
    seen = []

    def gradient(y):
        seen.append(y * 2.0)
        return None, seen[-1]

    solved = LowerRule(torch.optim.SGD, groups, y).run(y, [{}, {}], 4, lambda: gradient)
    torch.testing.assert_close(solved.norm(), seen[-1].norm())
    for found, slope in zip((*solved.early, solved.norm(lanes=bool(copies))), (seen[0], seen[2], seen[3]), strict=True):
        torch.testing.assert_close(found, slope.lane_norm() if copies else slope.norm())


def test_a_run_ends_with_the_step_that_found_a_small_gradient():
    """From 1 with lr 1/2 on y^2/2 the gradients are 1, 1/2, 1/4, ...; each step asks for a gradient of its own."""
    rule = LowerRule(torch.optim.SGD, [{"params": [0], "lr": 0.5}], Vector([torch.ones(1)]))
    drawn = []

    def draw():
        drawn.append(None)
        return lambda y: (y.dot(y) / 2, y)

    start = Vector([torch.ones(1)])
    y, _, gradient, *_ = rule.run(start, rule.fresh(), 10, draw, tol=0.25)
    assert (float(y[0]), float(gradient[0]), len(drawn)) == (1 / 8, 1 / 4, 3)
    y, _, gradient, *_ = rule.run(start, rule.fresh(), 10, draw)
    assert (float(y[0]), float(gradient[0]), len(drawn)) == (2.0**-10, 2.0**-9, 13)
    assert rule.run(start, rule.fresh(), 0, draw) == LowerResult(start, [{}], None)


@pytest.mark.parametrize("factory", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS, AGD])
def test_a_rule_is_unharmed_by_a_loss_that_fails(factory):
    rule = LowerRule(factory, [{"params": [0], "lr": 0.1}], Vector([torch.ones(2)]))
    start, memory = Vector([torch.ones(2)]), rule.fresh()
    slope = lambda y: (y.dot(y), y * 2.0)  # noqa: E731
    expected = rule.run(start, memory, 3, lambda: slope).y

    def fails(y):
        raise RuntimeError("out of data")

    once = rule.step(start, memory, slope)
    with pytest.raises(RuntimeError, match="out of data"):
        rule.step(once.y, once.memory, fails)
    own = [t for group in rule.optimizer.param_groups for t in group["params"]]
    assert not rule.optimizer.state  # it holds nothing between steps
    assert all(t.grad is None and t.untyped_storage().nbytes() == t.element_size() for t in own)
    assert torch.equal(rule.run(once.y, once.memory, 2, lambda: slope).y[0], expected[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_derivative_of_an_unrolled_solve(name):
    """update_vjp, chained over real steps, against central differences of the real steps."""
    factory, steps, lr = OPTIMIZERS[name], 4, 0.05
    H, b, seed = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.randn(3), torch.randn(3)
    start = Vector([torch.tensor([0.5, -0.7, 0.9]).double()])
    rule = LowerRule(factory, [{"params": [0], "lr": lr}], start)

    def run(b, record):
        y, memory = start, rule.fresh()
        for _ in range(steps):
            gradient = Vector([H @ y[0] - b])
            record.append((y, memory, gradient))
            y, memory, *_ = rule.step(y, memory, lambda y, gradient=gradient: (torch.zeros(()), gradient))
        return y[0]

    record = []
    run(b, record)
    adjoint, memory_adjoint, total = Vector([seed]), [{}], torch.zeros(3)
    for y, memory, gradient in reversed(record):
        before = y.clone(), copy.deepcopy(memory)
        adjoint, memory_adjoint, g, _ = update_vjp(rule, y, memory, gradient, adjoint, memory_adjoint)
        assert torch.equal(y[0], before[0][0])
        assert same_memory(memory, before[1])
        total = total - g[0]  # d(Hy - b)/db = -1
        adjoint = adjoint + Vector([H @ g[0]])
    epsilon = 1e-6
    for i in range(3):
        shift = epsilon * torch.eye(3)[i]
        difference = (run(b + shift, []) - run(b - shift, [])) @ seed / (2 * epsilon)
        assert float(total[i]) == pytest.approx(float(difference), rel=2e-5, abs=1e-8)


def test_which_optimizers_can_be_unrolled():
    z = [torch.zeros(1, requires_grad=True)]
    assert all(can_be_unrolled(factory([{"params": z, "lr": 0.1}])) for factory in OPTIMIZERS.values())
    assert not can_be_unrolled(torch.optim.LBFGS(z))
    assert not can_be_unrolled(AGD(z))


class Indexed(torch.optim.Optimizer):
    """One of the user's, which can be differentiated, makes integers and counts in double precision."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "differentiable": False})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", torch.zeros((), dtype=torch.float64)) + 1
                order = torch.tensor([1, 0])
                with torch.no_grad():
                    p.sub_(group["lr"] * p.grad[order])


def test_only_the_counts_of_torchs_optimizers_change_their_type():
    torch.set_default_dtype(torch.float32)
    y, slope = Vector([torch.tensor([1.0, 2.0])]), Vector([torch.tensor([1.0, 3.0])])
    optimizer, memory = Indexed([torch.zeros(2, requires_grad=True)]), [{}]
    for count in (1, 2):
        values, memory = updated(optimizer, y, memory, slope)
        assert values[0].tolist() == pytest.approx([0.7, 1.9])
        assert (memory[0]["step"].item(), memory[0]["step"].dtype) == (count, torch.float64)

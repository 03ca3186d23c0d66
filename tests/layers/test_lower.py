"""Nesterov's method in closed form (RAHGD specification, section 6.1), and derivatives of torch's update rules."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from bilevel_optim import AGD
from bilevel_optim.problem.vector import Vector
from bilevel_optim.solvers.lower import LowerSolver, can_be_unrolled, update_vjp

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


def test_solver_follows_groups_and_leaves_grad_alone():
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    a.grad = torch.full((2,), 7.0)
    groups = [
        {"params": [a], "lr": 0.1, "level": "lower"},
        {"params": [b], "lr": 0.2, "momentum": 0.5, "level": "lower"},
    ]
    solver = LowerSolver(partial(torch.optim.SGD, momentum=0.0), groups, [a, b], [{}, {}])
    ones = Vector([torch.ones(2), torch.ones(3)])
    for _ in range(2):
        solver.step(lambda: (torch.zeros(()), ones))
    torch.testing.assert_close(a.detach(), torch.full((2,), 0.8))
    torch.testing.assert_close(b.detach(), torch.full((3,), 1 - 0.2 - 0.3))
    assert a.grad.eq(7.0).all()
    assert b.grad is None
    groups[0]["lr"] = 0.0
    solver.follow(groups)
    solver.step(lambda: (torch.zeros(()), ones))
    torch.testing.assert_close(a.detach(), torch.full((2,), 0.8))
    with pytest.raises(TypeError, match=r"must return a torch\.optim\.Optimizer"):
        LowerSolver(lambda groups: None, groups, [a, b], [{}, {}])


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_derivative_of_an_unrolled_solve(name):
    """update_vjp, chained over real steps, against central differences of the real steps."""
    factory, steps, lr = OPTIMIZERS[name], 4, 0.05
    H, b, seed = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.randn(3), torch.randn(3)
    start = torch.tensor([0.5, -0.7, 0.9]).double()

    def run(b, record=None):
        y = start.clone()
        solver = LowerSolver(factory, [{"params": [y], "lr": lr}], [y], [{}])
        for _ in range(steps):
            gradient = Vector([H @ y - b])
            if record is not None:
                record.append((Vector([y.clone()]), solver.memory(), gradient))
            solver.step(lambda gradient=gradient: (torch.zeros(()), gradient))
        return y, solver

    record = []
    _, solver = run(b, record)
    adjoint, memory_adjoint, total = Vector([seed]), [{}], torch.zeros(3)
    for y, memory, gradient in reversed(record):
        adjoint, memory_adjoint, g = update_vjp(solver.optimizer, y, memory, gradient, adjoint, memory_adjoint)
        total = total - g[0]  # d(Hy - b)/db = -1
        adjoint = adjoint + Vector([H @ g[0]])
    epsilon = 1e-6
    for i in range(3):
        shift = epsilon * torch.eye(3)[i]
        difference = (run(b + shift)[0] - run(b - shift)[0]) @ seed / (2 * epsilon)
        assert float(total[i]) == pytest.approx(float(difference), rel=2e-5, abs=1e-8)


def test_which_optimizers_can_be_unrolled():
    z = [torch.zeros(1, requires_grad=True)]
    assert all(can_be_unrolled(factory([{"params": z, "lr": 0.1}])) for factory in OPTIMIZERS.values())
    assert not can_be_unrolled(torch.optim.LBFGS(z))
    assert not can_be_unrolled(AGD(z))


def test_solver_memory_is_a_copy():
    y, state = torch.ones(2), {}
    solver = LowerSolver(torch.optim.Adam, [{"params": [y], "lr": 0.1}], [y], [state])
    solver.step(lambda: (torch.zeros(()), Vector([torch.ones(2)])))
    memory = solver.memory()
    before = copy.deepcopy(memory)
    solver.step(lambda: (torch.zeros(()), Vector([torch.ones(2)])))
    assert torch.equal(memory[0]["exp_avg"], before[0]["exp_avg"])
    assert not torch.equal(state["exp_avg"], before[0]["exp_avg"])
    solver.reset()
    assert state == {}

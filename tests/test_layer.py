"""`bo.solve`: closed forms, differences, many uses, and what it says if there is nothing to solve."""

import pytest
import torch

import bilevel_optim as bo

A, B = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGET = B[:, 0]


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)


def ridge(x, y):
    weights, penalty = x
    return (weights.exp() * (A @ y - TARGET) ** 2).sum() / 2 + penalty.exp() / 2 * y.square().sum()


def closed(weights, penalty):
    hessian = A.T @ (weights.exp()[:, None] * A) + penalty.exp() * torch.eye(4)
    return torch.linalg.solve(hessian, A.T @ (weights.exp() * TARGET))


def start():
    return torch.linspace(-1, 1, 7).requires_grad_(), torch.tensor(-2.0, requires_grad=True)


def test_value_and_gradients_are_those_of_the_closed_form():
    y = bo.solve(ridge, start(), torch.zeros(4))
    torch.testing.assert_close(y, closed(*start()), rtol=1e-10, atol=1e-12)
    for b in torch.eye(4):
        x, same = start(), start()
        ours = torch.autograd.grad(bo.solve(ridge, x, torch.zeros(4)), x, b)
        torch.testing.assert_close(ours, torch.autograd.grad(closed(*same), same, b), rtol=1e-8, atol=1e-10)


def test_gradcheck_of_a_loss_that_is_not_quadratic():
    def loss(x, y):
        return ridge(x, y) + y.pow(4).sum()

    assert torch.autograd.gradcheck(lambda *x: bo.solve(loss, x, torch.zeros(4)), start())


def test_structures_are_kept_and_only_what_needs_a_gradient_has_one():
    x = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 1.0], requires_grad=True)

    def loss(x, y):
        return (y[0] - x[0] * x[1]).square().sum() + (y[1] - y[0].sum()).square()

    one, two = bo.solve(loss, x, (torch.zeros(2), torch.zeros(())))
    torch.testing.assert_close(one, torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(two, torch.tensor(5.0))
    two.backward()
    torch.testing.assert_close(x[1].grad, torch.tensor([2.0, 3.0]))
    assert x[0].grad is None


def test_a_solution_goes_into_a_second_problem():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    first = bo.solve(lambda x, y: (y - 3 * x).square().sum(), x, torch.zeros(2))
    second = bo.solve(lambda z, y: (y - z.square()).square().sum() + y.square().sum(), first, torch.zeros(2))
    (first.sum() + second.sum()).backward()  # 3x + 9 x^2 / 2
    torch.testing.assert_close(x.grad, 3 + 9 * x.detach())


def test_a_saddle_is_a_stationary_point_too_and_a_solver_of_ones_own_is_used():
    x, asked = torch.tensor([1.5], requires_grad=True), []

    def own(loss, y):
        asked.append(float(loss(y)))
        return torch.stack([x.detach()[0] / 2, -x.detach()[0]])

    def loss(x, y):
        return y[0].square() - x[0] * y[0] - y[1].square() / 2 - x[0] * y[1]

    y = bo.solve(loss, x, torch.zeros(2), minimiser=own)
    assert asked == [0.0]
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.tensor([1.0, 10.0]))[0], torch.tensor([0.5 - 10.0]))


def test_a_batch_of_problems_is_a_sum():
    x = torch.linspace(0.5, 2, 5).requires_grad_()
    bo.solve(lambda x, y: (y.square() * x - y).sum(), x, torch.zeros(5)).sum().backward()  # y = 1 / (2x)
    torch.testing.assert_close(x.grad, -1 / (2 * x.detach() ** 2))


def test_single_precision():
    x = torch.ones(3, dtype=torch.float32, requires_grad=True)
    y = bo.solve(lambda x, y: (y - x.exp()).square().sum(), x, torch.zeros(3, dtype=torch.float32))
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda x, y: x * y, r"Invalid loss value: \(2,\)"),
        (lambda x, y: 1.0, "Invalid loss value: float"),
        (lambda x, y: y.detach().sum(), "Invalid loss value: a constant"),
        (lambda x, y: (y * x).sum(), "Invalid loss value: piecewise linear"),
    ],
)
def test_losses_that_cannot_be_solved(loss, text):
    with pytest.raises(ValueError, match=text):
        bo.solve(loss, torch.ones(2, requires_grad=True), torch.zeros(2))


def test_a_problem_without_a_minimum_is_told():
    with pytest.warns(bo.BilevelWarning, match="the lower problem of solve is not solved"):
        bo.solve(lambda x, y: torch.nn.functional.softplus(-y).sum() - x.sum() * y.sum(), torch.ones(1), torch.zeros(2))


def test_a_solver_that_stops_early_is_told():
    with pytest.warns(bo.BilevelWarning, match="the lower problem of solve is not solved"):
        bo.solve(ridge, start(), torch.zeros(4), minimiser=lambda loss, y: y + 0.1)


def test_a_singular_system_is_told():
    x = torch.ones(2, requires_grad=True)
    y = bo.solve(lambda x, y: (y.sum() - x.sum()).square(), x, torch.zeros(2))
    with pytest.warns(bo.BilevelWarning, match="the linear system of solve is not solved"):
        y[0].backward()


def test_second_derivatives():
    def loss(x, y):
        return ridge(x, y) + (x[0].mean() + 1).square() * y.pow(4).sum()

    def solved(*x):
        return bo.solve(loss, x, torch.zeros(4))

    assert torch.autograd.gradgradcheck(solved, start())
    quadratic, same = start(), start()
    for x, y in ((quadratic, bo.solve(ridge, quadratic, torch.zeros(4))), (same, closed(*same))):
        slopes = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        sum(t.square().sum() for t in slopes).backward()
    torch.testing.assert_close(quadratic[0].grad, same[0].grad, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(quadratic[1].grad, same[1].grad, rtol=1e-7, atol=1e-10)


def test_derivatives_with_respect_to_x_do_not_go_through_what_x_was_made_of():
    z = torch.tensor([0.5, 2.0], requires_grad=True)
    y = bo.solve(lambda x, y: (y - x[0] * x[1]).square().sum(), (z.exp(), z.square()), torch.zeros(2))
    (first,) = torch.autograd.grad(y.sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    exact = z.exp() * z.square()
    (one,) = torch.autograd.grad(exact.sum(), z, create_graph=True)
    torch.testing.assert_close(first, one)
    torch.testing.assert_close(second, torch.autograd.grad(one.sum(), z)[0])


def test_the_second_derivative_of_a_quadratic_problem_with_a_constant_hessian_is_zero():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = bo.solve(lambda x, y: (y - 3 * x).square().sum(), x, torch.zeros(2))
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(first, torch.full((2,), 3.0))
    if first.requires_grad:
        torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], torch.zeros(2))

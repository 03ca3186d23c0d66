"""`bo.solve`: closed forms, differences, many uses, and what it says if there is nothing to solve."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo
from bilevel_optim.hypergradient import layer

from .faults.test_derivatives import Once
from .problems import seeded

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


def test_masks_and_indices_may_be_in_x():
    rows, mask = torch.tensor([1, 0, 2]), torch.tensor([True, False, True])
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def loss(x, y):
        return (x[2] * (y - x[0][x[1]].square()).square()).sum() + (~x[2] * (y - 1).square()).sum()

    y = bo.solve(loss, (x, rows, mask), torch.zeros(3))
    torch.testing.assert_close(y.detach(), torch.tensor([4.0, 1.0, 9.0]))
    (slope,) = torch.autograd.grad(y.square().sum() / 2, x, create_graph=True)
    torch.testing.assert_close(slope.detach(), torch.tensor([0.0, 16.0, 54.0]))
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], torch.tensor([0.0, 24.0, 54.0]))


def test_a_third_level():
    """z = argmin (z - x y)^2 and y = argmin (y - 1)^2 + z^2 = 1 / (1 + x^2); f = y."""
    x, y = torch.tensor(0.7, requires_grad=True), torch.tensor(0.0, requires_grad=True)

    def lower():
        z = bo.solve(lambda x, z: (z - x[0] * x[1]).square(), (x, y), torch.tensor(0.0))
        return (y - 1).square() + z.square()

    bo.AID([x], [y], lr=1.0, lower_lr=0.3, lower_steps=200).backward(lambda: y + 0 * x, lower)
    torch.testing.assert_close(x.grad, -2 * x.detach() / (1 + x.detach().square()).square())


def test_a_third_level_whose_x_are_parameters_with_tasks_and_copies():
    """As above, with z = argmin (z - t x y)^2: y = 1 / (1 + t^2 x^2)."""
    x, y = torch.tensor(0.7, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    t = torch.tensor([[1.0], [2.0]])

    def lower(t):
        z = bo.solve(lambda x, z: (z - t * x[0] * x[1]).square().sum(), (x, y), torch.tensor(0.0))
        return (y - 1).square() + z.square()

    slope = -2 * t * t * x.detach() / (1 + (t * x.detach()).square()).square()
    optimizer = bo.AID([x], [y], lr=1.0, lower_lr=0.2, lower_steps=60)
    optimizer.backward(lambda _: y + 0 * x, lower, tasks=bo.TensorTasks(t, t))
    torch.testing.assert_close(x.grad, slope.mean())
    y.data.zero_()
    optimizer = bo.F2SA([x], [y], lr=1.0, lower_lr=0.3, lower_steps=40, order=4, nu=1e-2, normalize=False)
    with warnings.catch_warnings(action="error"):
        optimizer.backward(lambda: y + 0 * x, lambda: lower(t[0]))
    torch.testing.assert_close(x.grad, slope[0, 0], rtol=1e-6, atol=0)


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


@pytest.mark.parametrize(
    ("loss", "start"),
    [
        (lambda x, y: (y[0] * y[1] - 1 - x).square().sum(), torch.zeros(2)),
        (lambda x, y: -(y - x).square().sum(), torch.ones(2)),
    ],
)
def test_a_start_at_a_saddle_or_a_maximum_is_told(loss, start):
    """The gradient is zero there, so descent stays."""
    y = bo.solve(loss, torch.ones(1, requires_grad=True), start)
    with pytest.warns(bo.BilevelWarning, match="y of solve is at a saddle or a maximum"):
        y.sum().backward()


def test_a_loss_that_changes_before_backward_is_told():
    x, constant = torch.ones(2, requires_grad=True), torch.zeros(1)
    y = bo.solve(lambda x, y: (y - x + constant).square().sum() + y.pow(4).sum(), x, torch.zeros(2))
    y.sum().backward(retain_graph=True)
    constant += 1
    with pytest.warns(bo.BilevelWarning, match="the loss of solve has changed between solve and backward"):
        y.sum().backward()


def test_a_layer_under_a_checkpoint():
    plain, x = start(), start()
    bo.solve(ridge, plain, torch.zeros(4)).square().sum().backward()
    checkpoint(lambda *x: bo.solve(ridge, x, torch.zeros(4)), *x, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close([t.grad for t in x], [t.grad for t in plain])


def test_weight_normalisation_and_attention_have_the_derivatives_of_plain_operations():
    """torch's second derivative is wrong for the fused weight norm, and missing for the fused attention."""
    rows, keys = torch.randn(6, 3), torch.randn(1, 1, 4, 2)

    def normalised(x, y, fused):
        v, g = y
        weight = torch._weight_norm(v, g, 0) if fused else v * (g / v.norm(dim=1, keepdim=True))
        error = (rows @ weight.T - x).tanh().square().sum()
        return error + 0.2 * (v - 1).square().sum() + 0.2 * (g - 1).square().sum()

    def attending(x, y, fused):
        query, value = keys * y[0], keys * x[0, 0]
        if fused:
            found = F.scaled_dot_product_attention(query, keys, value)
        else:
            found = (query @ keys.mT / 2**0.5).softmax(-1) @ value
        return found.sum().square() + (y[0] - 1).square().sum() + y[1].square().sum()

    x = torch.randn(6, 2, requires_grad=True)
    for loss, start in (
        (normalised, (torch.ones(2, 3) + 0.1 * torch.randn(2, 3), torch.ones(2, 1))),
        (attending, (torch.ones(2), torch.zeros(1))),
    ):
        first, second = [], []
        for fused in (True, False):
            y = bo.solve(partial(loss, fused=fused), x, start)
            first += torch.autograd.grad(y[0].sin().sum() + y[1].prod(), x, create_graph=True)
            second += torch.autograd.grad(first[-1].square().sum(), x)
        torch.testing.assert_close(first[0], first[1])
        torch.testing.assert_close(second[0], second[1])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_start_or_a_gradient_that_is_not_contiguous(transposed):
    """LBFGS flattens both without a copy; weights in channels_last are such a start."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    start = torch.zeros(2, 3).T if transposed else torch.zeros(3, 2)
    y = bo.solve(lambda x, y: 2 * (y.T - x[:, None] / 2).square().sum(), x, start)
    torch.testing.assert_close(y, (x / 2).expand(3, 2))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 1.5))


def sparse_cube(y):
    places = torch.tensor([[0, 1], [1, 0]])
    return torch.sparse.mm(torch.sparse_coo_tensor(places, y, (2, 2)), torch.ones(2, 1, dtype=y.dtype)) ** 3


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("cube", [Once.apply, sparse_cube], ids=["custom", "sparse"])
def test_wrong_second_derivatives_are_refused(cube):
    """With them the gradient would be 1, without a warning."""
    x = torch.tensor([0.5, 0.9], dtype=torch.float64, requires_grad=True)

    def solved(cube, **options):
        def loss(x, y):
            return cube(y).sum() / 3 + (y - x).square().sum() / 2

        return bo.solve(loss, x, torch.full_like(x, 0.3), **options)

    with pytest.raises(
        bo.DerivativeError, match=r"the loss's second derivative in y.*Write the loss with other"
    ) as caught:
        solved(cube)
    assert "hvp=" not in str(caught.value)  # which is an option of methods
    y = solved(lambda y: y**3)
    (right,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(right, 1 / (1 + 2 * y.detach()))
    (wrong,) = torch.autograd.grad(solved(cube, check_derivatives=False).sum(), x)
    torch.testing.assert_close(wrong, torch.ones_like(x))
    torch.testing.assert_close(solved(cube, check_derivatives=False), y)


@pytest.mark.filterwarnings("ignore:the lower problem of solve is not solved")
@pytest.mark.parametrize("part", ["y", "x"])
def test_wrong_derivatives_of_first_order_are_refused(part):
    def loss(x, y):
        a, b = (x.detach(), y) if part == "x" else (x, y.detach())
        return (y - a).square().sum() / 2 + (b * y).square().sum()

    x = torch.tensor([0.5, 0.9], dtype=torch.float64, requires_grad=True)
    with pytest.raises(bo.DerivativeError):
        bo.solve(loss, x, torch.full_like(x, 0.3))


@pytest.mark.parametrize("detached", [False, True])
def test_the_derivative_of_a_projection_is_compared_with_differences(detached):
    """The threshold of a projection onto the simplex depends on the point."""

    def simplex(x, z, step):
        u = (z.detach() if detached else z).sort(descending=True).values
        level = (u.cumsum(0) - 1) / torch.arange(1, len(z) + 1)
        return (z - level[(u > level).sum() - 1]).clamp_min(0)

    def solved(x):
        return bo.solve(lambda x, y: (y - x).square().sum() / 2, x, torch.full_like(x, 0.3), proximal=simplex)

    x = torch.tensor([0.5, 0.9, -1.0], dtype=torch.float64, requires_grad=True)
    if detached:
        with pytest.raises(bo.DerivativeError, match="derivative of proximal"):
            solved(x)
        return
    (slope,) = torch.autograd.grad(solved(x)[0], x)
    torch.testing.assert_close(slope, torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("x", "proximal"),
    [
        ([0.0, 0.0, 0.0], lambda x, z, s: z.clamp(min=0)),
        ([1.0, 1.0, 1.0], lambda x, z, s: z.clamp(0, 1)),
        ([0.5, -0.5, 2.0], lambda x, z, s: z.sign() * (z.abs() - s).clamp(min=0)),
        ([1.0, 0.0, 0.0], lambda x, z, s: z * (1 / z.norm()).clamp(max=1)),
        ([1e-8, 3e-9, -2e-8], lambda x, z, s: z.sign() * (z.abs() - s * 1e-8).clamp(min=0)),
    ],
    ids=["bound", "box", "threshold", "ball", "tiny"],
)
def test_a_projection_at_a_kink_is_not_called_wrong(x, proximal, dtype):
    x = torch.tensor(x, dtype=dtype, requires_grad=True)
    y = bo.solve(lambda x, y: (y - x).square().sum(), x, torch.ones(3, dtype=dtype), proximal=proximal)
    assert y.requires_grad


def test_a_proximal_function_that_refuses_values_near_x_is_not_compared_there():
    def shrink(x, z, step):
        assert (x >= 0).all()
        return z.sign() * (z.abs() - step * x).clamp(min=0)

    x = torch.tensor([0.0, 0.1, 0.3], requires_grad=True)
    y = bo.solve(lambda x, y: (y - 1).square().sum(), x, torch.zeros(3), proximal=shrink)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), -0.5))


def test_a_small_threshold_that_is_detached_is_found_beside_large_points():
    x = torch.randn(40, generator=seeded(0), dtype=torch.float64).requires_grad_(), torch.tensor(1e-3).requires_grad_()

    def shrink(x, z, step):
        return z.sign() * (z.abs() - step * x[1].item()).clamp(min=0)

    with pytest.raises(bo.DerivativeError, match="derivative of proximal"):
        bo.solve(lambda x, y: (y - x[0]).square().sum(), x, torch.zeros(40), proximal=shrink)


def test_a_kink_between_x_and_y_of_one_shape_is_not_called_wrong():
    """The second derivative jumps where y = x, which is the solution."""
    x = torch.tensor([0.5, -0.3, 1.0], requires_grad=True)
    y = bo.solve(lambda x, y: torch.maximum(y - x, 2 * (x - y)).square().sum(), x, torch.zeros(3))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.ones(3))


def test_complex_x_has_a_gradient():
    x = torch.tensor([1 + 2j, -0.5 + 0.3j], dtype=torch.complex128, requires_grad=True)

    def solved(x):
        return bo.solve(lambda x, y: ((y - x.real * x.imag).square() + 0.1 * y**4).sum(), x, torch.zeros(2))

    assert torch.autograd.gradcheck(solved, x)
    assert torch.autograd.gradgradcheck(solved, x)


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


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (torch.ones(2), torch.zeros(2, dtype=torch.int64), r"Invalid y value: int64 of shape \(2,\) \(y takes real"),
        (torch.ones(2), (torch.zeros(2), torch.zeros(1, dtype=torch.complex64)), "Invalid y value: complex64 of shape"),
        (torch.ones(2), torch.zeros(0), r"Invalid y value: no entries"),
        (torch.ones(2), (), r"Invalid y value: no entries"),
        (torch.ones(2), [0.0], r"Invalid y value: float in it \(pass a tensor, or a tuple of tensors\)"),
        ({"a": torch.ones(2)}, torch.zeros(2), "Invalid x value: str in it"),
        (1.0, torch.zeros(2), r"Invalid x value: float in it \(pass a tensor"),
    ],
)
def test_tensors_that_cannot_be_solved_for(x, y, text):
    with pytest.raises(ValueError, match=text):
        bo.solve(lambda x, y: sum(t.sum() ** 2 for t in y), x, y)


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


# With a proximal function. The references are dense: they know which entries are free, and solve for these alone.


def soft(z, threshold):
    return z.sign() * (z.abs() - threshold).clamp(min=0)


def simplex(z):
    ordered = z.sort(dim=-1, descending=True).values
    excess = (ordered.cumsum(-1) - 1) / torch.arange(1, z.shape[-1] + 1)
    return (z - excess.gather(-1, (ordered > excess).sum(-1, keepdim=True) - 1)).clamp(min=0)


def least_squares(x, y):
    return (x[0].exp() * (A @ y - TARGET) ** 2).sum() / 2


def normal_equations(x):
    weights = x[0].exp()
    return A.T @ (weights[:, None] * A), A.T @ (weights * TARGET)


def penalised_x():
    return torch.linspace(-0.5, 0.5, 7).requires_grad_(), torch.tensor([0.5, 1.5, -1.0, 0.0], requires_grad=True)


def sparse_reference(x, y, ridge=0.0):
    """Return the minimiser of least squares + sum_j e^(x_j) |y_j| + ridge |y|^2 / 2 with the signs of y."""
    (matrix, right), signs, free = normal_equations(x), y.detach().sign(), y.detach() != 0
    matrix = matrix[free][:, free] + ridge * torch.eye(int(free.sum()))
    found = torch.linalg.solve(matrix, (right - x[1].exp() * signs)[free])
    return torch.zeros(4).masked_scatter(free, found)


def bounded_reference(x, y, low, high):
    """Return the minimiser of least squares with the free entries of y between bounds."""
    matrix, right = normal_equations(x)
    fixed = torch.where(y <= low, low, high)
    free = (y.detach() > low) & (y.detach() < high)
    fixed = torch.where(free, 0.0, fixed)
    found = torch.linalg.solve(matrix[free][:, free], (right - matrix @ fixed)[free])
    return torch.where(free, torch.zeros(4).masked_scatter(free, found), fixed)


def assert_same_gradients(solved, reference, make_x, rtol=1e-8):
    """Compare y and all its derivatives with those of a dense reference, which is called with x and y."""
    x = make_x()
    y = solved(x)
    torch.testing.assert_close(y, reference(x, y), rtol=1e-10, atol=1e-12)
    for b in torch.eye(y.numel()).view(-1, *y.shape):
        x, same = make_x(), make_x()
        y = solved(x)
        options = {"allow_unused": True, "materialize_grads": True}
        ours, truth = (torch.autograd.grad(t, v, b, **options) for t, v in ((y, x), (reference(same, y), same)))
        torch.testing.assert_close(ours, truth, rtol=rtol, atol=1e-10)


def lasso(x, **options):
    return bo.solve(least_squares, x, torch.zeros(4), proximal=lambda x, z, s: soft(z, s * x[1].exp()), **options)


def elastic_net(x, ridge=0.7):
    def proximal(x, z, step):
        return soft(z, step * x[1].exp()) / (1 + step * ridge)

    return bo.solve(least_squares, x, torch.zeros(4), proximal=proximal)


def test_sparse_solutions_have_the_support_and_the_derivatives_of_the_dense_reference():
    assert 0 < int((lasso(penalised_x()) == 0).sum()) < 4
    assert_same_gradients(lasso, sparse_reference, penalised_x)


def test_a_proximal_function_that_is_no_projection():
    assert 0 < int((elastic_net(penalised_x()) == 0).sum()) < 4
    assert_same_gradients(elastic_net, lambda x, y: sparse_reference(x, y, ridge=0.7), penalised_x)


def test_bounds_that_are_active_and_depend_on_x():
    def solved(x):
        return bo.solve(least_squares, x, torch.zeros(4), proximal=lambda x, z, _: z.clamp(-x[1].exp(), x[2]))

    def make_x():
        return (
            torch.linspace(-1, 1, 7).requires_grad_(),
            torch.tensor(-3.0, requires_grad=True),
            torch.tensor([0.1] * 4, requires_grad=True),
        )

    y = solved(make_x())
    assert (y == 0.1).any()
    assert (y == -torch.tensor(-3.0).exp()).any()
    assert_same_gradients(solved, lambda x, y: bounded_reference(x, y, -x[1].exp(), x[2]), make_x)


def test_nonnegative_least_squares():
    def solved(x):
        return bo.solve(least_squares, x, torch.ones(4), proximal=lambda x, z, _: z.clamp(min=0))

    def make_x():
        return (torch.linspace(-1, 1, 7).requires_grad_(),)

    assert 0 < int((solved(make_x()) == 0).sum()) < 4
    infinite = torch.tensor(torch.inf)
    assert_same_gradients(solved, lambda x, y: bounded_reference(x, y, torch.tensor(0.0), infinite), make_x)


def test_a_batch_of_projections_onto_the_simplex():
    matrix = A.T @ A
    start = torch.tensor([[0.7, 0.4, -0.3, 0.2], [0.1, 3.0, 0.3, 0.2], [-3.0, 0.4, 2.9, -0.2]])

    def solved(x):
        def loss(x, y):
            return ((y @ matrix) * y).sum() / 2 - (x * y).sum()

        return bo.solve(loss, x[0], torch.full((3, 4), 0.25), proximal=lambda x, z, _: simplex(z))

    def reference(x, y):  # the conditions of optimality of the free entries: gradient = multiplier, sum = 1
        rows = []
        for row, at in zip(x[0], y.detach(), strict=True):
            free = at > 0
            ones = torch.ones(int(free.sum()), 1)
            system = torch.cat([torch.cat([matrix[free][:, free], ones], 1), torch.cat([ones.T, torch.zeros(1, 1)], 1)])
            found = torch.linalg.solve(system, torch.cat([row[free], torch.ones(1)]))[:-1]
            rows.append(torch.zeros(4).masked_scatter(free, found))
        return torch.stack(rows)

    y = solved((start,))
    assert ((y == 0).sum(1) > 0).all()
    assert ((y > 0).sum(1) > 1).any()
    assert_same_gradients(solved, reference, lambda: (start.clone().requires_grad_(),))


def group_lasso(x, y=(2, 2), ridge=0.0):
    """Two groups, one tensor for each; the proximal function is curved and not diagonal."""

    def loss(x, y):
        return least_squares(x, torch.cat(y)) + ridge * sum(t.pow(4).sum() for t in y)

    def proximal(x, z, step):
        return tuple(t * (1 - step * p.exp() / t.norm()).clamp(min=0) for t, p in zip(z, x[1], strict=True))

    return bo.solve(loss, x, tuple(torch.ones(n) for n in y), proximal=proximal)


def test_groups_with_a_curved_proximal_function():
    def make_x():
        return torch.linspace(-0.5, 0.5, 7).requires_grad_(), torch.tensor([0.5, 2.0], requires_grad=True)

    def reference(x, y):  # one Newton step of the free group's conditions has the value and the derivative
        (matrix, right), free = normal_equations(x), y.detach() != 0
        at = y.detach()[free]
        unit, norm = at / at.norm(), at.norm()
        penalty = x[1].exp()[free[::2]]
        assert penalty.numel() == 1
        curvature = matrix[free][:, free] + penalty * (torch.eye(2) - torch.outer(unit, unit)) / norm
        slope = matrix[free][:, free] @ at - right[free] + penalty * unit
        return torch.zeros(4).masked_scatter(free, at - torch.linalg.solve(curvature.detach(), slope))

    assert [bool((t == 0).all()) for t in group_lasso(make_x())] == [False, True]
    assert_same_gradients(lambda x: torch.cat(group_lasso(x)), reference, make_x)


WHOLE = pytest.param(False, marks=pytest.mark.slow)  # all entries; in torch's fast mode one random direction


@pytest.mark.parametrize("fast_mode", [True, WHOLE])
def test_second_derivatives_with_a_proximal_function(fast_mode):
    assert torch.autograd.gradgradcheck(lambda *x: elastic_net(x), penalised_x(), fast_mode=fast_mode)
    x = torch.linspace(-0.5, 0.5, 7).requires_grad_(), torch.tensor([-1.0, -2.0], requires_grad=True)
    assert all((t != 0).all() for t in group_lasso(x, ridge=1.0))
    assert torch.autograd.gradcheck(lambda *x: group_lasso(x, ridge=1.0), x, fast_mode=fast_mode)
    assert torch.autograd.gradgradcheck(lambda *x: group_lasso(x, ridge=1.0), x, fast_mode=fast_mode)


@pytest.mark.parametrize("fast_mode", [True, WHOLE])
def test_third_derivatives_with_a_proximal_function(fast_mode):
    x = penalised_x()

    def slopes(*x):
        y = elastic_net(x).square().sum()
        first = torch.autograd.grad(y, x, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), x, create_graph=True)
        return second

    assert torch.autograd.gradcheck(slopes, x, fast_mode=fast_mode)
    assert all(t.abs().max() > 0.01 for t in slopes(*x))


def test_a_logistic_loss_whose_curvature_grows_on_the_way():
    labels = torch.tensor([1.0, 0, 1, 1, 0, 1, 0])

    def loss(x, y):
        return torch.nn.functional.softplus(-(2 * labels - 1) * (A @ y)).sum() + (y - 3).exp().sum() + y.pow(4).sum()

    def solved(x):
        return bo.solve(loss, x, torch.full((4,), -9.0), proximal=lambda x, z, s: soft(z, s * x.exp()))

    x = torch.tensor([0.1, 0.2, 0.3, -3.0], requires_grad=True)
    assert 0 < int((solved(x) == 0).sum()) < 4
    assert torch.autograd.gradcheck(solved, (x,))


def test_a_linear_loss_with_a_curved_proximal_function():
    x = torch.tensor([3.0, -0.5, -2.0], requires_grad=True)  # x y + y^2 / 2 + |y|: y = soft(-x, 1)
    y = bo.solve(lambda x, y: (x * y).sum(), x, torch.zeros(3), proximal=lambda x, z, s: soft(z, s) / (1 + s))
    torch.testing.assert_close(y.detach(), torch.tensor([-2.0, 0.0, 1.0]))
    (slope,) = torch.autograd.grad(y, x, torch.tensor([1.0, 10.0, 100.0]))
    torch.testing.assert_close(slope, torch.tensor([-1.0, 0.0, -100.0]))


def test_a_loss_that_is_defined_inside_the_constraints_only():
    x = torch.tensor([0.3, 0.01, 2.0], requires_grad=True)  # y - x log y, y >= 0.1: y = max(x, 0.1)

    def loss(x, y):
        return (y - x * y.log()).sum()

    y = bo.solve(loss, x, torch.full((3,), 5.0), proximal=lambda x, z, _: z.clamp(min=0.1))
    torch.testing.assert_close(y.detach(), x.detach().clamp(min=0.1))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.tensor([1.0, 0.0, 1.0]))


def test_sparse_solutions_in_single_precision():
    def make_x():
        return tuple(t.detach().float().requires_grad_() for t in penalised_x())

    def loss(x, y):
        return (x[0].exp() * (A.float() @ y - TARGET.float()) ** 2).sum() / 2

    x = make_x()
    y = bo.solve(loss, x, torch.zeros(4, dtype=torch.float32), proximal=lambda x, z, s: soft(z, s * x[1].exp()))
    assert y.dtype == torch.float32
    same = penalised_x()
    truth = sparse_reference(same, y.double())
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-6)
    ours, right = (torch.autograd.grad(t.square().sum(), v) for t, v in ((y, x), (truth, same)))
    torch.testing.assert_close([t.double() for t in ours], [*right], rtol=1e-5, atol=1e-6)


def test_badly_conditioned_sparse_problems_are_solved_to_rounding():
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(40, 120, generator=generator) * 0.5 + torch.randn(40, 1, generator=generator)
    target = wide[:, :6] @ torch.ones(6)
    x = torch.tensor(0.5, requires_grad=True)
    y = bo.solve(
        lambda x, y: (wide @ y - target).square().sum() / 2,
        x,
        torch.zeros(120),
        proximal=lambda x, z, s: soft(z, s * x.exp()),
    )
    free, signs = y.detach() != 0, y.detach().sign()
    matrix = wide[:, free].T @ wide[:, free]
    same = x.detach().clone().requires_grad_()
    found = torch.linalg.solve(matrix, wide[:, free].T @ target - same.exp() * signs[free])
    assert (wide.T @ (target - wide @ y.detach())).abs().max() <= x.exp() * (1 + 1e-9)  # the support is right
    torch.testing.assert_close(y[free], found, rtol=1e-8, atol=1e-10)
    ours, right = torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(found.sum(), same)[0]
    torch.testing.assert_close(ours, right, rtol=1e-7, atol=0)


def test_newton_steps_keep_zeros_and_bounds():
    wide = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    target = wide[:, :6] @ torch.ones(6)
    penalty = (wide.T @ target).abs().max() / 3

    def solved(steps):
        return bo.solve(
            lambda x, y: (wide @ y - x).square().sum() / 2,
            target,
            torch.zeros(100),
            proximal=lambda x, z, s: soft(z, s * penalty),
            steps=steps,
        )

    y, exact = solved(layer.FIRST_NEWTON), solved(2000)  # the former ends with Newton's method
    torch.testing.assert_close(y, exact, rtol=1e-10, atol=0)
    assert 80 < int((y == 0).sum()) < 100


def test_newton_steps_find_the_support_of_a_badly_conditioned_problem():
    generator = torch.Generator().manual_seed(0)
    tall = torch.randn(100, 1, generator=generator) + torch.randn(100, 30, generator=generator) / 10
    target = tall[:, :8].mean(1) + torch.randn(100, generator=generator) / 10
    y = bo.solve(
        lambda x, y: (tall @ y - x).square().sum() / 2,
        target,
        torch.zeros(30),
        proximal=lambda x, z, _: simplex(z),
        steps=2 * layer.FIRST_NEWTON,
    )
    slope = tall.T @ (tall @ y - target)
    free = y > 0
    assert 2 < int(free.sum()) < 20
    torch.testing.assert_close(slope[free], slope.min().expand(int(free.sum())), rtol=0, atol=1e-10)


def test_accelerated_steps_are_restarted(monkeypatch):
    monkeypatch.setattr(layer, "FIRST_NEWTON", 10**9)
    curvature, x = torch.logspace(0, 4, 20), torch.linspace(-1, 1, 20)
    y = bo.solve(
        lambda x, y: (curvature * (y - x).square()).sum(),
        x,
        torch.zeros(20),
        proximal=lambda x, z, _: z.clamp(-0.5, 0.5),
        steps=2000,
    )
    torch.testing.assert_close(y, x.clamp(-0.5, 0.5), rtol=1e-10, atol=0)


def test_momentum_out_of_the_domain_of_the_loss(monkeypatch):
    monkeypatch.setattr(layer, "FIRST_NEWTON", 10**9)
    x, seen = torch.tensor([3.0, 1e-4]), []

    def loss(x, y):
        value = 50 * (y[0] - x[0]).square() + y[1] - x[1] * y[1].sqrt()
        seen.append(bool(value.isnan()))
        return value

    y = bo.solve(loss, x, torch.tensor([0.0, 5.0]), proximal=lambda x, z, _: z.clamp(min=0.1))
    assert any(seen)
    torch.testing.assert_close(y, torch.tensor([3.0, 0.1]))


def test_a_start_out_of_the_domain_of_the_loss_is_told():
    with pytest.warns(bo.BilevelWarning, match="the lower problem of solve is not solved"):
        bo.solve(
            lambda x, y: (y - x * y.sqrt()).sum(),
            torch.ones(1),
            -torch.ones(1),
            proximal=lambda x, z, _: z.clamp(min=0.1),
        )


def test_a_sparse_solution_of_a_solver_of_ones_own():
    x = penalised_x()
    exact = lasso(x).detach()
    y = lasso(x, minimiser=lambda loss, y: exact)
    (ours, truth) = (torch.autograd.grad(t.sum(), x) for t in (y, lasso(x)))
    torch.testing.assert_close(ours, truth)
    with pytest.warns(bo.BilevelWarning, match="a proximal gradient step changes y by"):
        lasso(x, minimiser=lambda loss, y: exact + 1e-3)


def test_a_sparse_problem_without_a_minimum_or_with_many_is_told():
    x = torch.ones(2, requires_grad=True)
    with pytest.warns(bo.BilevelWarning, match="the lower problem of solve is not solved"):
        bo.solve(lambda x, y: -(x * y).sum(), x, torch.zeros(2), proximal=lambda x, z, _: z.clamp(min=0))
    y = bo.solve(lambda x, y: (y.sum() - x.sum()).square(), x, torch.zeros(2), proximal=lambda x, z, s: soft(z, s))
    with pytest.warns(bo.BilevelWarning, match="the linear system of solve is not solved"):
        y[0].backward()


def test_a_function_that_is_no_proximal_function_is_told():
    turn = torch.tensor([[0.0, -0.5], [0.5, 0.0]])  # the derivative of a proximal function is symmetric
    x, curvature = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 0.3])
    with pytest.warns(bo.BilevelWarning, match="the lower problem of solve is not solved"):
        y = bo.solve(
            lambda x, y: (curvature * (y - x).square()).sum() / 2,
            x,
            torch.zeros(2),
            proximal=lambda x, z, _: turn @ z,
        )
    with pytest.warns(bo.BilevelWarning, match="the linear system of solve is not solved"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("proximal", "text"),
    [
        (lambda x, z, s: z.detach(), "Invalid proximal result: a constant"),
        (
            lambda x, z, s: z[:1],
            r"Invalid proximal result: float64 of shape \(1,\) \(it must be like y: float64 of shape \(2,",
        ),
        (lambda x, z, s: z.float(), r"Invalid proximal result: float32 of shape \(2,\)"),
        (lambda x, z, s: None, r"Invalid proximal result: NoneType"),
        (lambda x, z, s: (z, z), r"Invalid proximal result: float64 of shape \(2,\), float64 of shape \(2,\) \("),
    ],
)
def test_proximal_functions_without_a_derivative_or_of_another_form(proximal, text):
    with pytest.raises(ValueError, match=text):
        bo.solve(lambda x, y: (x - y).square().sum(), torch.ones(2), torch.zeros(2), proximal=proximal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m"), [(200, 60), (50, 150), pytest.param(100, 300, marks=pytest.mark.slow)])
def test_correlated_features_are_no_end_of_the_proximal_steps(dtype, n, m):
    generator = torch.Generator().manual_seed(n)
    features = torch.randn(n, m, generator=generator) + 2 * torch.randn(n, 1, generator=generator)
    targets = features[:, :5].sum(1) + torch.randn(n, generator=generator)
    weights = torch.randn(m, generator=generator)

    def solved(dtype):
        own, x = features.to(dtype), torch.tensor(0.1, dtype=dtype, requires_grad=True)
        y = bo.solve(
            lambda x, y: (own @ y - targets.to(dtype)).square().sum() / (2 * n),
            x,
            torch.zeros(m, dtype=dtype),
            proximal=lambda x, z, s: soft(z, s * x),
        )
        return y.detach(), torch.autograd.grad((y * weights).sum(), x)[0]

    y, gradient = solved(dtype)
    truth = y if dtype == torch.float64 else solved(torch.float64)[0]
    slope = features.T @ (features @ truth - targets) / n
    used = truth != 0  # the conditions of optimality, and the closed form on the support
    torch.testing.assert_close(slope[used], -0.1 * truth[used].sign(), rtol=1e-8, atol=1e-8)
    assert bool((slope[~used].abs() < 0.1).all())
    hessian = features[:, used].T @ features[:, used] / n
    right = -weights[used] @ torch.linalg.solve(hessian, truth[used].sign())
    assert torch.equal(y != 0, used)
    torch.testing.assert_close(gradient.double(), right, rtol=1e-3 if dtype == torch.float32 else 1e-8, atol=0)


def test_small_steps_far_from_the_solution_are_told():
    scales = torch.tensor([1.0, 1e-8])  # a proximal gradient step changes the second entry by 1e-8 of its error

    def loss(x, y):
        return (scales * (y - x).square()).sum() / 2

    x = torch.ones(2, requires_grad=True)
    with pytest.warns(bo.BilevelWarning, match="but Newton's method by 0.5 of"):
        bo.solve(
            loss,
            x,
            torch.zeros(2),
            proximal=lambda x, z, s: z.clamp(-9, 9),
            minimiser=lambda loss, y: torch.tensor([1 - 1e-9, 0.5]),
        )


def test_a_threshold_without_the_step_is_told():
    with pytest.warns(bo.BilevelWarning, match="proximal does not fit its step: .* but half of it by"):
        bo.solve(
            lambda x, y: (A @ y - TARGET).square().sum() / 2,
            torch.ones(4, requires_grad=True),
            torch.zeros(4),
            proximal=lambda x, z, s: soft(z, 0.1 * x),
        )


def test_a_threshold_without_the_step_that_holds_y_at_zero_is_told():
    with pytest.warns(bo.BilevelWarning, match="proximal does not fit its step: .* but 16 times of it by"):
        bo.solve(
            lambda x, y: (A @ y - TARGET).square().sum() / 2,
            torch.ones(4, requires_grad=True),
            torch.zeros(4),
            proximal=lambda x, z, s: soft(z, 0.5 * x),
        )


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"torch.inference_mode\(\) is on"):
        bo.solve(ridge, start(), torch.zeros(4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
@pytest.mark.parametrize("proximal", [None, lambda x, z, s: z.clamp(max=0.5)])
def test_a_program_with_a_layer_is_compiled(proximal):
    def program(x):
        return bo.solve(lambda x, y: (y - x).square().sum(), x.sin(), torch.zeros(3), proximal=proximal).square().sum()

    x = torch.tensor([0.1, 1.0, -2.0], requires_grad=True)
    (ours,) = torch.autograd.grad(torch.compile(program, backend="eager")(x), x)
    right = 2 * x.sin() * x.cos() * (torch.tensor([1.0, 0.0, 1.0]) if proximal else 1.0)
    torch.testing.assert_close(ours, right.detach())


@pytest.mark.parametrize("loss", [lambda x, y: y[0] ** 2 - y[1] ** 2 + 0 * x, lambda x, y: -(y - x).square().sum()])
def test_a_loss_without_a_minimum_is_told_and_gives_no_saddle(loss):
    """Newton steps from far away went uphill, to the saddle at 0, without a word."""
    with pytest.warns(bo.BilevelWarning, match="not solved"):
        y = bo.solve(loss, torch.tensor(1.0), torch.tensor([0.5, 0.3]))
    assert y.norm() > 1e6


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vmap])
def test_transforms_of_torch_func_are_refused_with_the_cure(transform):
    def norm(x):
        return bo.solve(lambda x, y: (y - x).square().sum(), x, torch.zeros(2)).square().sum()

    with pytest.raises(RuntimeError, match=r"torch\.autograd\.functional"):
        transform(norm)(torch.ones(2, 2) if transform is torch.func.vmap else torch.ones(2))


def test_batched_gradients_are_refused_with_the_cure():
    x = torch.ones(2, requires_grad=True)

    def layer(x):
        return bo.solve(lambda x, y: (y - x.square()).square().sum(), x, torch.zeros(2))

    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x), 2 * torch.eye(2))
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.autograd.functional.jacobian(layer, x, vectorize=True)
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.autograd.grad(layer(x), x, torch.eye(2), is_grads_batched=True)


def test_an_error_of_the_users_own_transform_is_passed_on():
    """Its text speaks of functorch too."""

    def loss(x, y):
        return torch.func.grad(lambda z: z.detach().requires_grad_().square().sum())(y - x).sum()

    with pytest.raises(RuntimeError, match="functorch") as error:
        bo.solve(loss, torch.ones(2), torch.zeros(2))
    assert "solve" not in str(error.value)


@pytest.mark.parametrize("proximal", [None, lambda x, z, step: 0.1 * z + 0.9 * z.detach()])
def test_a_wrong_derivative_is_told_without_words_about_optimizers(proximal):
    """It spoke of the optimizer's state, which a caller of solve does not have."""
    x = torch.tensor([0.5, 0.9], requires_grad=True)

    def loss(x, y):
        return (sparse_cube(y) if proximal is None else y).sum() / 3 + (y - x).square().sum() / 2

    with pytest.raises(bo.DerivativeError, match="nothing has been changed") as caught:
        bo.solve(loss, x, torch.full_like(x, 0.3), proximal=proximal)
    assert "optimizer" not in str(caught.value)
    assert "parameters" not in str(caught.value)


def test_errors_of_an_oracle_do_not_speak_of_an_optimizer():
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)

    def overwritten():
        with torch.no_grad():
            y.mul_(1)
        return (y - x).square().sum()

    def differentiated():
        loss = (y - x).square().sum()
        loss.backward()
        return loss

    for loss, text in (
        (lambda: torch.ones((), requires_grad=True) * 2, "depends on no parameter, upper or lower"),
        (overwritten, "writes into lower parameter lower 0, which no loss may change"),
        (differentiated, "seems to call backward"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            bo.hypergradient.implicit(bo.Oracle([x], [y], lambda: y.sum(), loss), partial(bo.linear.cg, steps=1))
        assert "this optimizer" not in str(caught.value)
        assert "the optimizer" not in str(caught.value)


RUNAWAY = {
    "exponential": lambda x, y: (-x * y).exp().sum(),
    "softplus": lambda x, y: torch.nn.functional.softplus(-x * y).sum(),
    "rational": lambda x, y: (x / (1 + y.square())).sum(),
    "shifted": lambda x, y: (1000 - x * y).exp().sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RUNAWAY)
def test_a_loss_whose_infimum_is_at_infinity_is_told(name, dtype):
    """Its gradient gets as small as one likes, and y was returned without a word."""
    start = torch.full((2,), 1000.0 if name == "shifted" else 1.0, dtype=dtype)
    with pytest.warns(bo.BilevelWarning, match=r"is not solved: the gradient .* only, but Newton's method changes y"):
        bo.solve(RUNAWAY[name], torch.ones(2, dtype=dtype), start)
    with pytest.warns(bo.BilevelWarning, match=r"is not solved: a proximal gradient step .* only, but Newton's method"):
        bo.solve(RUNAWAY[name], torch.ones(2, dtype=dtype), start, proximal=lambda x, z, step: z.clamp(min=0))


def test_a_loss_without_a_minimum_in_a_solver_of_ones_own_is_told():
    with pytest.warns(bo.BilevelWarning, match="but Newton's method changes y by 1.4 more, after 57 from the start"):
        bo.solve(lambda x, y: (-y).exp().sum(), torch.ones(2), torch.zeros(2), minimiser=lambda loss, y: y + 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [2, 4, 6])
@pytest.mark.parametrize("begin", [0.0, 1.0, 1e3])
def test_a_minimum_at_zero_and_a_flat_one_are_minima(begin, power, dtype):
    """There the gradient is as small, relative to that at the start, as where y runs away."""
    y = bo.solve(lambda x, y: y.pow(power).sum(), torch.ones(3, dtype=dtype), torch.full((3,), begin, dtype=dtype))
    assert float(y.norm()) <= 1e-2 * max(begin, 1e-9)


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_in_a_loss_sees_the_present_y_within_another(enabled):
    """Autocast forgets its copies of y only at the end of the outermost context."""
    inputs, targets = torch.randn(30, 6, generator=seeded(0)).float(), torch.randn(30, generator=seeded(1)).float()

    def gap(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = (inputs @ y)[:, 0]
        return (outputs.float() - targets).square().mean() + (x.exp() * y[:, 0].square()).sum()

    found = []
    for outer in (nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=enabled)):
        x = torch.zeros(6, requires_grad=True, dtype=torch.float)
        with outer, warnings.catch_warnings():
            warnings.simplefilter("ignore", bo.BilevelWarning)  # bfloat16 leaves a gradient
            y = bo.solve(gap, x, torch.zeros(6, 1, dtype=torch.float))
            y.sum().backward()
        found.append([y.detach(), x.grad])
    torch.testing.assert_close(*found, rtol=0, atol=0)

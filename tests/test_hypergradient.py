"""Closed forms and error laws of AID, ITD and FirstOrder (sections 6.3 of the RAHGD, 6 of the PZOBO specification)."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

import bilevel_optim as bo
from bilevel_optim.problem.vector import Vector

from .problems import Cleaning, PenaltyQuadratic, Quadratic, Scalar


def hypergradient(cls, problem, steps=200, **options):
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=steps, **options)
    optimizer.backward(problem.upper, problem.lower)
    return problem.error(), optimizer


@pytest.mark.parametrize("linear_steps", [24, 30, 200])
def test_cg_reaches_the_closed_form_and_stays_there(linear_steps):
    error, optimizer = hypergradient(bo.AID, Quadratic(), linear_steps=linear_steps)
    assert error < 1e-10
    assert optimizer.diagnostics["lower_residual"] < 1e-10
    assert optimizer.diagnostics["linear_residual"] < 1e-10
    assert optimizer.diagnostics["linear_iterations"] <= 30
    error, _ = hypergradient(bo.AID, Quadratic(dtype=torch.float32), linear_steps=linear_steps)
    assert error < 1e-6


@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"truncate": 150}])
def test_unrolling_reaches_the_closed_form(options):
    assert hypergradient(bo.ITD, Quadratic(), **options)[0] < 1e-10
    assert hypergradient(bo.ITD, Quadratic(dtype=torch.float32), 100, **options)[0] < 1e-6


def test_exact_error_identity():
    """u - grad Phi = (R + D'A^-1 P)(y - y*) + D'(v - v*(y)) for any (y, v): every sign and transpose."""
    problem = Quadratic()
    y, v = torch.randn(24), torch.randn(24)
    problem.y[0].data.copy_(y)
    oracle = bo.Oracle(problem.x, problem.y, problem.upper, problem.lower)
    estimate = bo.hypergradient.implicit(
        oracle,
        lambda product, b, start: bo.linear.LinearSolution(
            Vector([v]), torch.tensor(0.0), torch.tensor(0), torch.tensor(False)
        ),
    )
    DA = torch.linalg.solve(problem.A, problem.D).T
    predicted = (problem.R + DA @ problem.P) @ (y - problem.solution()[0]) + problem.D.T @ (v - problem.adjoint(y))
    error = estimate.gradient[0] - problem.hypergradient()[0]
    torch.testing.assert_close(error, predicted, rtol=1e-12, atol=1e-12)


def test_hand_numbers():
    """T1: y^2 = 0.375, direct 0.1, ITD = AID-FP(2) = -0.134375, AID-CG(1) = -0.2125, exact -0.15."""

    def gradient(cls, steps=2, **options):
        problem = Scalar()
        optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.25, lower_steps=steps, **options)
        optimizer.backward(problem.upper, problem.lower)
        return float(problem.x[0].grad), float(problem.y[0].detach())

    assert gradient(bo.FirstOrder) == pytest.approx((0.1, 0.375), abs=1e-12)
    assert gradient(bo.ITD) == pytest.approx((-0.134375, 0.375), abs=1e-12)
    assert gradient(bo.AID, linear_solver="fixed_point", linear_steps=2)[0] == pytest.approx(-0.134375, abs=1e-12)
    assert gradient(bo.AID, linear_solver="neumann", linear_steps=1)[0] == pytest.approx(-0.134375, abs=1e-12)
    assert gradient(bo.AID, linear_steps=1)[0] == pytest.approx(-0.2125, abs=1e-12)
    assert gradient(bo.AID, steps=100, linear_steps=1)[0] == pytest.approx(-0.15, abs=1e-12)
    assert gradient(bo.ITD, steps=100)[0] == pytest.approx(-0.15, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_fixed_point_of_as_many_steps_equals_unrolling(steps):
    """T8: on a constant Hessian, with the same lr, AID-FP(K = N) and ITD are the same number."""
    a, b = Quadratic(), Quadratic()
    hypergradient(bo.AID, a, steps, linear_solver="fixed_point", linear_steps=steps)
    hypergradient(bo.ITD, b, steps)
    torch.testing.assert_close(a.x[0].grad, b.x[0].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", ["neumann", "fixed_point"])
def test_error_law_of_the_series(solver):
    """With y exact, the error is D' (I - lr A)^k v* and nothing else."""
    for steps in (3, 10, 30):
        problem = Quadratic()
        problem.solve()
        optimizer = bo.AID(
            problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=0, linear_solver=solver, linear_steps=steps
        )
        optimizer.backward(problem.upper, problem.lower)
        terms = steps + (solver == "neumann")
        power = torch.linalg.matrix_power(torch.eye(24) - problem.lr * problem.A, terms)
        predicted = -problem.D.T @ power @ problem.adjoint(problem.solution()[0])
        error = problem.x[0].grad - problem.hypergradient()[0]
        torch.testing.assert_close(error, predicted, rtol=1e-8, atol=1e-12)


def test_error_law_of_unrolling():
    """The error contracts by 1 - lr mu per step once the fast directions are gone."""
    errors = [hypergradient(bo.ITD, Quadratic(kappa=20.0), steps)[0] for steps in (60, 80)]
    rate = 1 - Quadratic(kappa=20.0).lr * 1.0
    # A Jordan-like factor T (1 - lr mu)^T: the derivative of the iteration and the iterate contract together.
    assert (errors[1] / errors[0]) ** (1 / 20) == pytest.approx(rate, rel=2e-2)


def test_truncation_leaves_out_the_first_steps():
    """Differentiating the last k of T steps equals k steps of unrolling from where the first T - k ended."""
    a, b = Quadratic(), Quadratic()
    hypergradient(bo.ITD, a, 10, truncate=4)
    plain = bo.FirstOrder(b.x, b.y, lr=0.1, lower_lr=b.lr, lower_steps=6)
    plain.backward(b.upper, b.lower)
    hypergradient(bo.ITD, b, 4)
    torch.testing.assert_close(a.x[0].grad, b.x[0].grad, rtol=1e-12, atol=1e-12)
    zero = Quadratic()
    _, optimizer = hypergradient(bo.ITD, zero, 10, truncate=0)
    assert optimizer.oracle_counts == {"upper_grad": 1, "lower_grad": 10, "hvp": 0, "jvp": 0, "loss": 0}


@pytest.mark.parametrize(
    "factory",
    [partial(torch.optim.SGD, momentum=0.8), partial(torch.optim.SGD, momentum=0.8, nesterov=True), torch.optim.Adam],
    ids=["momentum", "nesterov", "adam"],
)
def test_unrolling_through_momentum(factory):
    """Against central differences of f(x, y_T(x)) run with torch's own optimizer; second step too (state lasts)."""

    def run(x):
        problem = Quadratic(n=6, m=3)
        problem.x[0].data.copy_(x)
        inner = factory([problem.y[0]], lr=0.05)
        for _ in range(2 * 5):
            inner.zero_grad()
            problem.lower().backward(inputs=problem.y)
            inner.step()
        return problem.upper().item()

    problem = Quadratic(n=6, m=3)
    x = problem.x[0].detach().clone()
    optimizer = bo.ITD(problem.x, problem.y, lr=0.0, lower_lr=0.05, lower_steps=5, lower_optimizer=factory)
    with torch.no_grad():
        problem.x[0].add_(0)
    optimizer.backward(problem.upper, problem.lower)
    first = problem.x[0].grad.clone()
    optimizer.backward(problem.upper, problem.lower)
    second = problem.x[0].grad.clone()
    fresh = Quadratic(n=6, m=3)
    whole = bo.ITD(fresh.x, fresh.y, lr=0.0, lower_lr=0.05, lower_steps=10, lower_optimizer=factory)
    whole.backward(fresh.upper, fresh.lower)
    for i in range(3):
        shift = 1e-6 * torch.eye(3)[i]
        difference = (run(x + shift) - run(x - shift)) / 2e-6
        assert float(fresh.x[0].grad[i]) == pytest.approx(difference, rel=1e-5, abs=1e-8)
    # The last 5 of 10 steps, from the state that the first 5 left: what truncation computes in one go.
    last = Quadratic(n=6, m=3)
    truncated = bo.ITD(last.x, last.y, lr=0.0, lower_lr=0.05, lower_steps=10, truncate=5, lower_optimizer=factory)
    truncated.backward(last.upper, last.lower)
    torch.testing.assert_close(last.x[0].grad, second, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(first, second)


def test_no_indirect_term_without_cause():
    """f independent of y, or no lower step to differentiate: the direct gradient exactly."""
    problem = PenaltyQuadratic()

    def upper():
        return (problem.x[0] ** 3).sum()

    expected = 3 * problem.x[0].detach() ** 2
    for cls, options in ((bo.AID, {}), (bo.ITD, {}), (bo.FirstOrder, {}), (bo.F2SA, {"nu": 0.05})):
        optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=3, **options)
        optimizer.backward(upper, problem.lower)
        torch.testing.assert_close(problem.x[0].grad, expected, rtol=1e-12, atol=1e-12)


def test_separable_lower_bound_instance():
    """g that does not depend on x: nothing to differentiate implicitly, but f does, so it is no error."""
    x, y = torch.randn(3).requires_grad_(), torch.ones(2, requires_grad=True)
    for cls, options in ((bo.AID, {}), (bo.ITD, {}), (bo.F2SA, {"order": 1}), (bo.F2SA, {"order": 4})):
        optimizer = cls([x], [y], lr=0.1, lower_lr=0.5, lower_steps=3, **options)
        optimizer.backward(lambda: (x**4).sum() + 0 * y.sum(), lambda: y.square().sum() / 2)
        torch.testing.assert_close(x.grad, 4 * x.detach() ** 3, rtol=1e-12, atol=1e-12)


def dense(problem):
    """Implicit differentiation of Cleaning by torch.func, at the minimiser found by Newton's method."""
    shapes = [p.shape for p in problem.model.parameters()]
    sizes = [s.numel() for s in shapes]

    def parts(y):
        weight, bias = (part.view(shape) for part, shape in zip(y.split(sizes), shapes, strict=True))
        return weight, bias

    def g(x, y):
        weight, bias = parts(y)
        losses = F.cross_entropy(problem.X @ weight.T + bias, problem.t, reduction="none")
        return (x.sigmoid() * losses).mean() + 0.05 * (y**2).sum()

    def f(y):
        weight, bias = parts(y)
        return F.cross_entropy(problem.Xv @ weight.T + bias, problem.tv)

    x, y = problem.weights.detach(), torch.cat([p.detach().reshape(-1) for p in problem.model.parameters()])
    for _ in range(20):
        y = y - torch.linalg.solve(jacrev(jacrev(g, 1), 1)(x, y), jacrev(g, 1)(x, y))
    v = torch.linalg.solve(jacrev(jacrev(g, 1), 1)(x, y), jacrev(f)(y))
    return -jacrev(jacrev(g, 1), 0)(x, y).T @ v


@pytest.mark.parametrize(
    "options", [(bo.AID, {"linear_steps": 40}), (bo.ITD, {}), (bo.F2SA, {"order": 4, "nu": 5e-3})], ids=str
)
def test_data_cleaning_against_torch_func(options):
    """A softmax classifier in an nn.Module, against dense implicit differentiation by torch.func."""
    cls, arguments = options
    problem = Cleaning()
    truth = dense(problem)
    optimizer = cls([problem.weights], problem.model.parameters(), lr=0.1, lower_lr=1.0, lower_steps=400, **arguments)
    optimizer.backward(problem.upper, problem.lower)
    error = (problem.weights.grad - truth).norm() / truth.norm()
    assert error < (1e-6 if cls is bo.F2SA else 1e-9)


def test_finite_difference_products_in_both_precisions():
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 2e-2)):
        problem = Cleaning(dtype=dtype)
        exact, approximate = (
            bo.AID(
                [problem.weights],
                problem.model.parameters(),
                lr=0.0,
                lower_lr=1.0,
                lower_steps=0,
                linear_steps=20,
                hvp=hvp,
            )
            for hvp in ("exact", "finite-difference")
        )
        exact.backward(problem.upper, problem.lower)
        truth = problem.weights.grad.clone()
        approximate.backward(problem.upper, problem.lower)
        assert (problem.weights.grad - truth).norm() < tolerance * truth.norm()


def test_damping_shifts_the_hessian():
    problem = Quadratic()
    problem.solve()
    optimizer = bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=0, linear_steps=50, damping=2.0)
    optimizer.backward(problem.upper, problem.lower)
    y = problem.y[0].detach()
    b = problem.A @ problem.adjoint(y)
    v = torch.linalg.solve(problem.A + 2 * torch.eye(24), b)
    x = problem.x[0].detach()
    expected = problem.Q @ x + problem.c + problem.R @ y + problem.D.T @ v
    torch.testing.assert_close(problem.x[0].grad, expected, rtol=1e-10, atol=1e-10)


def test_warm_start_of_the_linear_solver_pays():
    """With y and v warm, one CG step per outer step goes on where the last one ended."""
    problem = Quadratic(kappa=100.0)
    problem.solve()
    optimizer = bo.AID(problem.x, problem.y, lr=0.0, lower_lr=0.0, lower_steps=0, linear_steps=5)
    errors = []
    for _ in range(6):
        optimizer.backward(problem.upper, problem.lower)
        errors.append(problem.error())
    assert errors[-1] < 0.1 * errors[0]
    counts = optimizer.oracle_counts
    assert counts == {"upper_grad": 6, "lower_grad": 6, "hvp": 5 + 5 * 6, "jvp": 6, "loss": 0}


def test_oracle_counts_of_one_step():
    def counts(cls, **options):
        problem = Quadratic()
        optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=0.01, lower_steps=7, **options)
        optimizer.step(problem.upper, problem.lower)
        return tuple(optimizer.oracle_counts.values())  # upper_grad, lower_grad, hvp, jvp, loss

    assert counts(bo.AID, linear_steps=5) == (1, 8, 5, 1, 0)
    assert counts(bo.AID, linear_steps=5, linear_solver="neumann") == (1, 8, 5, 1, 0)
    assert counts(bo.AID, linear_steps=5, linear_solver="fixed_point") == (1, 8, 4, 1, 0)
    assert counts(bo.ITD) == (1, 7, 7, 7, 0)
    assert counts(bo.ITD, checkpoint=True) == (1, 14, 7, 7, 0)
    assert counts(bo.ITD, truncate=3) == (1, 7, 3, 3, 0)
    assert counts(bo.FirstOrder) == (1, 7, 0, 0, 0)
    assert counts(bo.F2SA, order=2) == (16, 16, 0, 0, 0)
    assert counts(bo.F2SA, order=1) == (8, 16, 0, 0, 1)
    assert counts(bo.F2SA, order=3, stencil="centred") == (24, 32, 0, 0, 1)


def test_indefinite_lower_hessian_is_reported_once():
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 0.1, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.01, lower_steps=1)

    def lower():
        return (x * y**2).sum() - (y**2).sum() * 3

    with pytest.warns(bo.BilevelWarning, match="not positive definite"):
        optimizer.step(lambda: ((y - 1) ** 2).sum(), lower)
    optimizer.step(lambda: ((y - 1) ** 2).sum(), lower)
    assert x.isfinite().all()


def test_stochastic_batches_are_drawn_as_documented():
    """lower_steps lower batches, one upper batch, one lower batch for the products."""
    x, y = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)

    def drawn(cls, **options):
        log = []

        def upper(batch):
            log.append(("f", batch))
            return ((y - batch) ** 2).sum() + 0 * x.sum()

        def lower(batch):
            log.append(("g", batch))
            return ((y - x * batch) ** 2).sum()

        f, g = bo.Objective(upper, range(100)), bo.Objective(lower, range(100))
        optimizer = cls([x], [y], lr=0.0, lower_lr=0.01, lower_steps=3, **options)
        optimizer.backward(f, g)
        return log

    steps = [("g", 0), ("g", 1), ("g", 2)]
    assert drawn(bo.AID) == [*steps, ("f", 0), ("g", 3)]
    assert drawn(bo.FirstOrder) == [*steps, ("f", 0)]
    assert drawn(bo.ITD) == [*steps, ("f", 0)]
    assert drawn(bo.ITD, checkpoint=True) == [*steps, ("f", 0), ("g", 2), ("g", 1), ("g", 0)]
    pair = [[("g", k), ("f", k)] for k in range(4)]
    looped = drawn(bo.F2SA, vectorize=False)
    assert looped == [entry for k in range(4) for entry in 2 * pair[k]]
    independent = drawn(bo.F2SA, vectorize=False, samples="independent")
    assert independent[:4] == [("g", 0), ("f", 0), ("g", 1), ("f", 1)]
    assert independent[-4:] == 2 * [("g", 6), ("f", 6)]


def test_weight_decay_outside_the_loss_is_warned_of():
    problem = Quadratic()
    with pytest.warns(bo.BilevelWarning, match="put the penalty into the lower loss"):
        bo.AID(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=1, lower_optimizer=torch.optim.AdamW)


def test_the_base_class_is_abstract():
    problem = Quadratic()
    with pytest.raises(TypeError, match="abstract"):
        bo.BilevelOptimizer(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=1)

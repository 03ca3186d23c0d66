"""AID, ITD, FirstOrder, BA, PAID: closed forms and error laws (6.3 of the RAHGD, 6 of the PZOBO specification)."""

import itertools
import math
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

import bilevel_optim as bo

from ..problems import Cleaning, PenaltyQuadratic, Quadratic, Scalar, close, flat, seeded


def hypergradient(cls, problem, steps=200, **options):
    """Relative error of one estimate, and the optimizer that made it."""
    optimizer = cls(problem.x, problem.y, **{"lr": 0.1, "lower_lr": problem.lr, "lower_steps": steps, **options})
    optimizer.backward(problem.upper, problem.lower)
    return problem.error(), optimizer


@pytest.mark.parametrize("linear_steps", [24, 200])
def test_cg_reaches_the_closed_form_and_stays_there(linear_steps):
    error, optimizer = hypergradient(bo.AID, Quadratic(), 140, linear_steps=linear_steps)
    assert error < 1e-10
    assert optimizer.diagnostics["lower_residual"] < 1e-10
    assert optimizer.diagnostics["linear_residual"] < 1e-10
    assert optimizer.diagnostics["linear_iterations"] <= 30
    error, _ = hypergradient(bo.AID, Quadratic(dtype=torch.float32), 80, linear_steps=linear_steps)
    assert error < 1e-6


@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"truncate": 120}])
def test_unrolling_reaches_the_closed_form(options):
    assert hypergradient(bo.ITD, Quadratic(), 160, **options)[0] < 1e-10
    assert hypergradient(bo.ITD, Quadratic(dtype=torch.float32), 100, **options)[0] < 1e-6


def test_exact_error_identity():
    """u - grad Phi = (R + D'A^-1 P)(y - y*) + D'(v - v*(y)) for any (y, v): every sign and transpose."""
    problem = Quadratic()
    y, v = torch.randn(24), torch.randn(24)
    problem.y[0].data.copy_(y)
    oracle = bo.Oracle(problem.x, problem.y, problem.upper, problem.lower)
    solution = bo.linear.LinearSolution(bo.Vector([v]), torch.tensor(0.0), torch.tensor(0), torch.tensor(False))
    estimate = bo.hypergradient.implicit(oracle, lambda product, b, start: solution)
    DA = torch.linalg.solve(problem.A, problem.D).T
    predicted = (problem.R + DA @ problem.P) @ (y - problem.solution()[0]) + problem.D.T @ (v - problem.adjoint(y))
    error = estimate.gradient[0] - problem.hypergradient()[0]
    close(error, predicted, 1e-12, 1e-12)


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
    """T8, T9: on a constant Hessian, with one lr, AID-FP(K = N) and ITD are the same number; CG is exact at y_N."""
    a, b, c = Quadratic(n=8), Quadratic(n=8), Quadratic(n=8)
    hypergradient(bo.AID, a, steps, linear_solver="fixed_point", linear_steps=steps)
    hypergradient(bo.ITD, b, steps)
    close(a.x[0].grad, b.x[0].grad, 1e-12, 1e-12)
    hypergradient(bo.AID, c, steps, linear_steps=8)
    y = c.y[0].detach()
    close(c.x[0].grad, c.direct(y) + c.D.T @ c.adjoint(y), 1e-10, 1e-10)


@pytest.mark.parametrize("solver", ["neumann", "fixed_point"])
def test_error_law_of_the_series(solver):
    """With y exact, the error is D' (I - lr A)^k v* and nothing else."""
    for steps in (3, 10, 30):
        problem = Quadratic()
        problem.solve()
        hypergradient(bo.AID, problem, 0, linear_solver=solver, linear_steps=steps)
        power = torch.linalg.matrix_power(torch.eye(24) - problem.lr * problem.A, steps + (solver == "neumann"))
        predicted = -problem.D.T @ power @ problem.adjoint(problem.solution()[0])
        error = problem.x[0].grad - problem.hypergradient()[0]
        close(error, predicted, 1e-12, 1e-8)


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
    hypergradient(bo.FirstOrder, b, 6)
    hypergradient(bo.ITD, b, 4)
    close(a.x[0].grad, b.x[0].grad, 1e-12, 1e-12)
    _, optimizer = hypergradient(bo.ITD, Quadratic(), 10, truncate=0)
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

    def itd(problem, **options):
        return bo.ITD(problem.x, problem.y, lr=0.0, lower_lr=0.05, lower_optimizer=factory, **options)

    problem, whole, last = (Quadratic(n=6, m=3) for _ in range(3))
    optimizer, gradients = itd(problem, lower_steps=5), []
    for _ in range(2):
        optimizer.backward(problem.upper, problem.lower)
        gradients.append(problem.x[0].grad.clone())
    itd(whole, lower_steps=10).backward(whole.upper, whole.lower)
    for i in range(3):
        shift = 1e-6 * torch.eye(3)[i]
        difference = (run(problem.x[0].detach() + shift) - run(problem.x[0].detach() - shift)) / 2e-6
        assert float(whole.x[0].grad[i]) == pytest.approx(difference, rel=1e-5, abs=1e-8)
    # The last 5 of 10 steps, from the state that the first 5 left: what truncation computes in one go.
    itd(last, lower_steps=10, truncate=5).backward(last.upper, last.lower)
    close(last.x[0].grad, gradients[1], 1e-12, 1e-12)
    assert not torch.allclose(*gradients)


ADAPTIVE = {
    **{
        name: getattr(torch.optim, name)
        for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adamax", "Adadelta")
    },
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "decay": partial(torch.optim.Adam, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5),
    "centered": partial(torch.optim.RMSprop, centered=True),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_unrolling_where_a_column_of_the_data_is_zero(name):
    """Its weight has no gradient, and torch's derivative of the root of its second moment is infinite."""
    data, target, held, direction = torch.randn(12, 4), torch.randn(12), torch.randn(9, 4), torch.randn(12)
    data[:, 2] = 0.0
    start = torch.randn(4)

    def lower(x, y):
        return (x.exp() * (data @ y - target).square()).mean()

    def upper(y):
        return (held @ y - 1).square().mean()

    def value(x):
        y = start.clone().requires_grad_()
        inner = ADAPTIVE[name]([y], lr=0.05)
        for _ in range(7):
            inner.zero_grad()
            lower(x, y).backward()
            inner.step()
        return upper(y).item()

    x, y = torch.zeros(12, requires_grad=True), start.clone().requires_grad_()
    optimizer = bo.ITD([x], [y], lr=0.1, lower_lr=0.05, lower_steps=7, lower_optimizer=ADAPTIVE[name])
    optimizer.backward(lambda: upper(y), lambda: lower(x, y))
    expected = (value(1e-4 * direction) - value(-1e-4 * direction)) / 2e-4
    assert float(x.grad @ direction) == pytest.approx(expected, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RMSprop", "Adagrad"])
def test_unrolling_where_a_gradient_is_zero_and_varies(name):
    """Near a gradient g = 0 the first step is c g / epsilon: with g = x a, its derivative is that of a small x."""
    factory, a = partial(ADAPTIVE[name], eps=0.01), torch.tensor([1.0, -2.0])

    def end(x):
        y = torch.zeros(2, requires_grad=True)
        inner = factory([y], lr=0.05)
        y.grad = x * a
        inner.step()
        return float(y.detach().sum())

    x, y = torch.zeros((), requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.ITD([x], [y], lr=0.1, lower_lr=0.05, lower_steps=1, lower_optimizer=factory)
    optimizer.backward(lambda: y.sum(), lambda: x * (a * y).sum())
    assert float(x.grad) == pytest.approx((end(1e-9) - end(-1e-9)) / 2e-9, rel=1e-5)


@pytest.mark.filterwarnings("ignore:the (upper|lower) loss depends on no")
def test_no_indirect_term_without_cause():
    """f independent of y, no lower step, or g without x (on which f depends): the direct gradient exactly."""
    problem = PenaltyQuadratic()
    x, y = torch.randn(3).requires_grad_(), torch.ones(2, requires_grad=True)
    for cls, options in ((bo.AID, {}), (bo.ITD, {}), (bo.FirstOrder, {}), (bo.F2SA, {"nu": 0.05})):
        optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=3, **options)
        optimizer.backward(lambda: (problem.x[0] ** 3).sum(), problem.lower)
        close(problem.x[0].grad, 3 * problem.x[0].detach() ** 2, 1e-12, 1e-12)
        optimizer = cls([x], [y], lr=0.1, lower_lr=0.5, lower_steps=3, **options)
        optimizer.backward(lambda: (x**4).sum() + 0 * y.sum(), lambda: y.square().sum() / 2)
        close(x.grad, 4 * x.detach() ** 3, 1e-12, 1e-12)


def dense(problem):
    """Implicit differentiation of `Cleaning` by torch.func, at the minimiser found by Newton's method."""
    shapes = [p.shape for p in (*problem.x, *problem.y)]
    sizes = [s.numel() for s in shapes]
    split = sum(sizes[: len(problem.x)])

    def scores(x, y, inputs):
        parts = torch.cat([x, y]).split(sizes)
        w, A, a, B, b = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        return w, (inputs @ A.T + a).tanh() @ B.T + b

    def g(x, y):
        w, logits = scores(x, y, problem.X)
        return (w.sigmoid() * F.cross_entropy(logits, problem.t, reduction="none")).mean() + 0.05 * (y**2).sum()

    def f(x, y):
        return F.cross_entropy(scores(x, y, problem.Xv)[1], problem.tv)

    x, y = flat(problem.parameters)[:split], flat(problem.parameters)[split:]
    for _ in range(12):
        y = y - torch.linalg.solve(jacrev(jacrev(g, 1), 1)(x, y), jacrev(g, 1)(x, y))
    v = torch.linalg.solve(jacrev(jacrev(g, 1), 1)(x, y), jacrev(f, 1)(x, y))
    return jacrev(f, 0)(x, y) - jacrev(jacrev(g, 1), 0)(x, y).T @ v


@pytest.mark.parametrize(
    ("cls", "options"), [(bo.AID, {"linear_steps": 40}), (bo.ITD, {}), (bo.F2SA, {"order": 4, "nu": 5e-3})]
)
def test_data_cleaning_against_torch_func(cls, options):
    """Modules on both levels, against dense implicit differentiation by torch.func."""
    problem = Cleaning()
    truth = dense(problem)
    optimizer = cls(problem.x, problem.y, lr=0.1, lower_lr=1.5, lower_steps=200, **options)
    optimizer.backward(*problem.losses)
    error = (flat(p.grad for p in problem.x) - truth).norm() / truth.norm()
    assert error < (1e-6 if cls is bo.F2SA else 1e-9)


def test_finite_difference_products_in_both_precisions():
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 2e-2)):
        gradients = []
        for hvp in ("exact", "finite-difference"):
            problem = Cleaning(dtype=dtype)
            optimizer = bo.AID(problem.x, problem.y, lr=0.0, lower_lr=1.0, lower_steps=0, linear_steps=20, hvp=hvp)
            optimizer.backward(*problem.losses)
            gradients.append(flat(p.grad for p in problem.x))
        assert (gradients[1] - gradients[0]).norm() < tolerance * gradients[0].norm()


def test_damping_shifts_the_hessian():
    problem = Quadratic()
    problem.solve()
    hypergradient(bo.AID, problem, 0, linear_steps=50, damping=2.0)
    y = problem.y[0].detach()
    v = torch.linalg.solve(problem.A + 2 * torch.eye(24), problem.A @ problem.adjoint(y))
    close(problem.x[0].grad, problem.direct(y) + problem.D.T @ v, 1e-10, 1e-10)


@pytest.mark.parametrize("solver", ["minres", "direct"])
def test_the_curvature_of_a_damped_solve_is_that_of_the_loss(solver):
    x, y = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"lower_lr": 0.1, "lower_steps": 0, "linear_solver": solver, "damping": 1.0}
    optimizer = bo.AID([x], [y], lr=0.1, **options)
    optimizer.backward(lambda: (y - 3).square().sum(), lambda: -0.1 * y.square().sum() - x @ y)
    assert optimizer.metrics()["linear_curvature"] == pytest.approx(-0.2)


def test_warm_start_of_the_linear_solver_pays():
    """With y and v warm, one CG step per outer step goes on where the last one ended."""
    problem, errors = Quadratic(kappa=100.0), []
    problem.solve()
    optimizer = bo.AID(problem.x, problem.y, lr=0.0, lower_lr=0.0, lower_steps=0, linear_steps=5)
    for _ in range(6):
        optimizer.backward(problem.upper, problem.lower)
        errors.append(problem.error())
    assert errors[-1] < 0.1 * errors[0]
    assert optimizer.oracle_counts == {"upper_grad": 6, "lower_grad": 6, "hvp": 6 + 7 * 5, "jvp": 6, "loss": 0}


@pytest.mark.filterwarnings("ignore:the linear system of the implicit hypergradient is not solved yet")
@pytest.mark.parametrize("solver", ["cg", "auto"])
def test_steps_with_a_kept_direction_are_one_long_solve(solver):
    """At a fixed point. A state of an optimizer without it has v alone, and begins with the residual."""
    errors, solutions = {}, {}
    for name, calls, options in (
        ("restarted", 3, {"linear_steps": 4}),
        ("kept", 3, {"linear_steps": 4, "keep_direction": True}),
        ("one", 1, {"linear_steps": 12}),
    ):
        problem = Quadratic(kappa=1e3)
        problem.solve()
        options = {"linear_solver": solver, **options}
        optimizer = bo.AID(problem.x, problem.y, lr=0.0, lower_lr=0.0, lower_steps=0, **options)
        for _ in range(calls):
            optimizer.backward(problem.upper, problem.lower)
        errors[name], solutions[name] = problem.error(), optimizer.state[problem.y[0]]["linear_solution"]
        assert ("linear_direction" in optimizer.state[problem.y[0]]) == (name == "kept")
        if name == "restarted":
            saved = optimizer.state_dict()
        if name == "kept":
            assert optimizer.oracle_counts["hvp"] == 3 * (4 + 1) + 2  # as without
            optimizer.load_state_dict(saved)
            assert "linear_direction" not in optimizer.state[problem.y[0]]
            optimizer.backward(problem.upper, problem.lower)
            assert "linear_direction" in optimizer.state[problem.y[0]]
    close(solutions["kept"], solutions["one"], 1e-9, 1e-9)
    assert errors["kept"] == pytest.approx(errors["one"], rel=1e-8)
    assert errors["kept"] < 0.8 * errors["restarted"]


def test_a_kept_direction_needs_warm_starts_of_cg():
    problem = Quadratic()
    for options in ({"linear_solver": "minres"}, {"linear_solver": "direct"}, {"warm_start": False}):
        with pytest.raises(ValueError, match="keep_direction=True continues conjugate gradients from step to step"):
            bo.AID(problem.x, problem.y, lr=0.1, lower_steps=1, keep_direction=True, **options)


@pytest.mark.parametrize(
    ("cls", "options", "counts"),  # upper_grad, lower_grad, hvp, jvp, loss
    [
        (bo.AID, {"linear_steps": 5}, (1, 8, 6, 1, 0)),
        (bo.AID, {"linear_steps": 5, "linear_solver": "minres"}, (1, 8, 6, 1, 0)),
        (bo.AID, {"linear_solver": "direct"}, (1, 8, 24, 1, 0)),
        (bo.AID, {"linear_steps": 5, "linear_solver": "neumann"}, (1, 8, 6, 1, 0)),
        (bo.AID, {"linear_steps": 5, "linear_solver": "fixed_point"}, (1, 8, 5, 1, 0)),
        (bo.ITD, {}, (1, 7, 7, 7, 0)),
        (bo.ITD, {"checkpoint": True}, (1, 14, 7, 7, 0)),
        (bo.ITD, {"truncate": 3}, (1, 7, 3, 3, 0)),
        (bo.FirstOrder, {}, (1, 7, 0, 0, 0)),
        (bo.F2SA, {"order": 2}, (16, 16, 0, 0, 0)),
        (bo.F2SA, {"order": 1}, (8, 16, 0, 0, 1)),
        (bo.F2SA, {"order": 3, "stencil": "centred"}, (24, 32, 0, 0, 1)),
    ],
)
def test_oracle_counts_of_the_first_step(cls, options, counts):
    _, optimizer = hypergradient(cls, Quadratic(), 7, lower_lr=0.01, **options)
    assert tuple(optimizer.oracle_counts.values()) == counts


def test_indefinite_lower_hessian_is_reported_once():
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 0.1, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.01, lower_steps=1)

    def lower():
        return (x * y**2).sum() - (y**2).sum() * 3

    with pytest.warns(bo.BilevelWarning, match="not positive definite"):
        optimizer.step(lambda: ((y - 1) ** 2).sum(), lower)
    optimizer.step(lambda: ((y - 1) ** 2).sum(), lower)
    assert x.isfinite().all()


@pytest.mark.usually("eager")
@pytest.mark.parametrize(
    ("cls", "options"),
    [(bo.AID, {}), (bo.BA, {}), (bo.AID, {"compiled": True, "lower_steps": 3, "linear_steps": 4})],
    ids=["eager", "BA", "compiled"],
)
def test_weights_of_wrong_labels_below_a_network_stay_finite_and_move(cls, options):
    """The lower Hessian is indefinite at almost every step."""
    X, Xv, teacher = torch.randn(40, 6), torch.randn(40, 6), torch.randn(6, 3)
    t, tv = (X @ teacher).argmax(1), (Xv @ teacher).argmax(1)
    t[:16] = (t[:16] + 1) % 3
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    x = torch.zeros(40, requires_grad=True)
    options = {"lower_steps": 10, "linear_steps": 10, **options}
    compiled = options.pop("compiled", False)
    optimizer = cls([x], net.parameters(), lr=100.0, lower_lr=0.5, **options)
    if compiled:
        optimizer.compile(backend="eager")

    def step():
        return float(
            optimizer.step(
                lambda: F.cross_entropy(net(Xv), tv),
                lambda: (x.sigmoid() * F.cross_entropy(net(X), t, reduction="none")).mean(),
            )
        )

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        losses = [step() for _ in range(150)]
    told = [str(w.message) for w in warned if "not positive definite" in str(w.message)]
    assert len(told) == 1
    assert "damping" in told[0]
    assert bool(optimizer.captured_graphs) == compiled
    assert all(map(math.isfinite, losses))
    assert x.isfinite().all()
    assert losses[-1] < 0.95 * losses[0]
    assert x[:16].mean() < x[16:].mean() - 1


class Indefinite(Quadratic):
    """The quadratic problem with every third eigenvalue of the lower Hessian negative; y* is its stationary point."""

    def __init__(self):
        super().__init__(n=24)
        spectrum, basis = torch.linalg.eigh(self.A)
        spectrum[::3] *= -1
        self.A = basis @ torch.diag(spectrum) @ basis.T
        self.solve()


def test_minres_gives_the_implicit_gradient_of_an_indefinite_problem():
    problem = Indefinite()
    with pytest.warns(bo.BilevelWarning, match="linear_solver='minres'"):
        error, _ = hypergradient(bo.AID, problem, 0, linear_steps=60)
    assert error > 0.1
    error, optimizer = hypergradient(bo.AID, problem, 0, linear_steps=60, linear_solver="minres")
    assert error < 1e-10
    assert optimizer.diagnostics["linear_residual"] < 1e-10
    error, optimizer = hypergradient(bo.AID, problem, 0, linear_solver="direct")
    assert error < 1e-10
    assert "linear_solution" not in optimizer.state[problem.y[0]]


@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"hvp": "finite-difference"}], ids=str)
def test_a_direct_solve_is_exact_where_cg_is_not(options):
    """Condition 1e6: with 10 products CG is far off; differences of gradients have errors of their own."""
    problem = Quadratic(kappa=1e6)
    problem.solve()
    with pytest.warns(bo.BilevelWarning, match="not solved yet"):
        error, _ = hypergradient(bo.AID, problem, 0, linear_steps=10)
    assert error > 1e-2
    error, optimizer = hypergradient(bo.AID, problem, 0, linear_solver="direct", **options)
    assert error < (1e-3 if "hvp" in options else 1e-9)
    assert optimizer.diagnostics["linear_iterations"] == 1


def test_a_direct_solve_of_many_rows_is_made_in_parts(monkeypatch):
    """Compute the Hessian of a lower loss over two tensors, with some zero rows, by 7 rows at a time."""
    monkeypatch.setattr("bilevel_optim.oracle.oracle.ROWS", 7)
    x, a, b = (torch.randn(n).requires_grad_() for n in (3, 5, 4))
    direct = bo.AID([x], [a, b], lr=0.1, lower_lr=0.1, lower_steps=0, linear_solver="direct", damping=0.7)
    direct.backward(
        lambda: (a.sum() * b.square().sum() + x.sum()).square(),
        lambda: (a.square().sum() * x.square().sum() + a.sum() * x.sum() + b[:2].sum() * x[0]) / 2,
    )
    with torch.no_grad():
        c, s = a.sum() * b.square().sum() + x.sum(), x.square().sum() + 0.7
        va, vb = 2 * c * b.square().sum() / s, 4 * c * a.sum() * b / 0.7
        crosses = 2 * a.sum() * va * x + 5 * va / 2
        crosses[0] += vb[:2].sum() / 2
    close(x.grad, 2 * c - crosses, 1e-12, 1e-12)


def test_direct_solves_say_what_they_cannot_do():
    x, y = torch.ones(1, requires_grad=True), torch.zeros(5000, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1, linear_solver="direct")
    with pytest.raises(ValueError, match=r"limited to 4096 lower parameters, but there are 5000.*'cg'"):
        optimizer.step(lambda: y.sum(), lambda: (y - x).square().sum())
    z = torch.zeros(2, requires_grad=True)
    optimizer = bo.AID([x], [z], lr=0.1, lower_lr=0.1, lower_steps=1, linear_solver="direct")
    with pytest.raises(bo.NonFiniteError, match=r"Hessian is singular.*damping"):
        optimizer.step(lambda: z.sum(), lambda: (z[0] - x).square().sum() + 0 * z[1])
    assert not z.any()


def test_auto_changes_to_minres_and_stays_there():
    definite, problem = Quadratic(n=24), Indefinite()
    options = {"lr": 0.0, "lower_lr": 0.0, "lower_steps": 0, "linear_steps": 60, "linear_solver": "auto"}
    definite.solve()
    easy = bo.AID(definite.x, definite.y, **options)
    definite.apply(easy.backward)
    assert definite.error() < 1e-10
    assert easy.numbers == {}
    optimizer = bo.AID(problem.x, problem.y, **options)
    with pytest.warns(bo.BilevelWarning, match="not positive definite"):
        problem.apply(optimizer.backward)
    assert problem.error() < 1e-10
    resumed = bo.AID(problem.x, problem.y, **options)
    resumed.load_state_dict(optimizer.state_dict())
    problem.apply(resumed.backward)  # CG is not tried again
    assert (easy.diagnostics.get("linear_solver"), resumed.diagnostics["linear_solver"]) == (None, "minres")
    assert problem.error() < 1e-10


def test_auto_warns_of_a_saddle():
    """MINRES solves its system, and the curvature along the solution is positive."""
    H = torch.diag(torch.cat([torch.tensor([-0.5]), torch.logspace(-2, 0, 9)]))
    x, y = torch.ones(1, requires_grad=True), torch.zeros(10, requires_grad=True)
    options = {"lr": 0.0, "lower_lr": 0.0, "lower_steps": 0, "linear_solver": "auto", "linear_steps": 40}
    optimizer = bo.AID([x], [y], **options)
    with pytest.warns(bo.BilevelWarning, match="not positive definite"):
        optimizer.backward(lambda: y.sum(), lambda: y @ H @ y / 2 - (x - x.detach()) * y.sum())
    assert optimizer.metrics()["linear_curvature"] > 0
    torch.testing.assert_close(x.grad, torch.linalg.solve(H, torch.ones(10)).sum()[None], rtol=1e-8, atol=0)


@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("scale", [1e-25, 1e19])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_curvature_of_a_very_small_or_large_solution(kind, scale, tasks):
    """Squares of such a v leave the range of single precision: it was 0, infinite, or that of the wider tensors."""
    h = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float32)
    x, y = torch.ones_like(h).requires_grad_(), torch.zeros_like(h).requires_grad_()
    z = torch.zeros(3, dtype=kind, requires_grad=True)

    def lower(*batch):
        return ((h * (y - x).square()).sum() + (h * (z - x).square()).sum().float()) / 2

    def upper(*batch):
        return scale * ((h * y).sum() + z.sum().float())

    optimizer = bo.AID([x], [y, z], lr=0.0, lower_lr=0.1, lower_steps=1, linear_solver="direct")
    two = torch.zeros(2, 1)
    optimizer.backward(upper, lower, **({"tasks": bo.TensorTasks(two, two)} if tasks else {}))
    v, curvatures = torch.cat([torch.ones_like(h), 1 / h]), torch.cat([h, h])
    want = float(v.square() @ curvatures / v.square().sum())
    found = optimizer.diagnostics["linear_curvature"].double()
    torch.testing.assert_close(found, torch.full((2,) if tasks else (), want), rtol=1e-5, atol=0)


def test_a_start_solved_but_for_the_kernel_is_kept_by_minres():
    """Products with its residual are rounding; the second call was off by 17 %."""
    H, b = torch.diag(torch.tensor([0.0, 0.0, 0.03, 0.1, 0.3])), torch.tensor([1.0, -1.0, 2.0, 0.5, 1.0])
    basis = torch.linalg.qr(torch.randn(5, 5, generator=seeded(0)))[0]
    H, b = basis @ H @ basis.T, basis @ b
    right, v = torch.linalg.pinv(H, rtol=1e-9, hermitian=True) @ b, None
    for _ in range(3):
        v = bo.linear.minres(lambda v: bo.Vector([H @ v[0]]), [b], v, steps=100).solution
        torch.testing.assert_close(H @ v[0], H @ right, rtol=1e-9, atol=1e-9)


def test_batches_are_drawn_as_documented():
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
        cls([x], [y], lr=0.0, lower_lr=0.01, lower_steps=3, check_derivatives=False, **options).backward(f, g)
        return log

    steps = [("g", 0), ("g", 1), ("g", 2)]
    assert drawn(bo.AID) == [*steps, ("f", 0), ("g", 3)]
    assert drawn(bo.FirstOrder) == [*steps, ("f", 0)]
    assert drawn(bo.ITD) == [*steps, ("f", 0)]
    assert drawn(bo.ITD, checkpoint=True) == [*steps, ("f", 0), *steps[::-1]]
    pair = [[("g", k), ("f", k)] for k in range(4)]
    assert drawn(bo.F2SA, vectorize=False) == [entry for k in range(4) for entry in 2 * pair[k]]
    independent = drawn(bo.F2SA, vectorize=False, samples="independent")
    assert independent[:4] == [("g", 0), ("f", 0), ("g", 1), ("f", 1)]
    assert independent[-4:] == 2 * [("g", 6), ("f", 6)]


# ---------------------------------------------------------------------------------------------------- BA, PAID

BASELINE = {"lr": 0.02, "lower_lr": 0.1, "linear_steps": 5}


@pytest.mark.parametrize(("scale", "growth"), [(0.5, 0.25), (2, 0.25), (4, 0.25), (3, 1.0)])
def test_ba_makes_more_and_more_steps(scale, growth):
    problem, total = Quadratic(n=5, m=3, kappa=4.0), 0
    optimizer = bo.BA(problem.x, problem.y, **BASELINE, lower_steps=scale, growth=growth)
    for k in range(12):
        problem.run(optimizer)
        total += math.ceil(scale * (k + 1) ** growth) + 1
        assert optimizer.oracle_counts["lower_grad"] == total


def test_ba_solves_from_its_first_value():
    """Each step is AID from a fixed y and from zero; the number of steps so far survives a checkpoint."""
    problem = Quadratic(n=5, m=3, kappa=4.0)
    start = torch.randn(5)
    problem.y[0].data.copy_(start)
    optimizer = bo.BA(problem.x, problem.y, **BASELINE, lower_steps=2)
    for k in range(6):
        x, y = problem.x[0].detach().clone(), start.clone()
        for _ in range(math.ceil(2 * (k + 1) ** 0.25)):
            y = y - 0.1 * (problem.A @ y - problem.D @ x - problem.e)
        truth = problem.direct(y) + problem.D.T @ problem.adjoint(y)  # exact in 5 steps
        if k == 3:
            state = optimizer.state_dict()
            optimizer = bo.BA(problem.x, problem.y, **BASELINE, lower_steps=2)
            optimizer.load_state_dict(state)
        problem.run(optimizer)
        torch.testing.assert_close(problem.y[0].detach(), y)
        torch.testing.assert_close(problem.x[0].detach(), x - 0.02 * truth)


def test_paid_perturbs_after_small_gradients_only():
    """A saddle point of f(x, y*(x)) = x1^4/4 - x1^2/2 + x2^2/2: kicks are at least the period apart, and rare."""
    x, y = torch.tensor([0.0, 1.0], requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.PAID(
        [x], [y], lr=0.1, lower_lr=1.0, lower_steps=1, gradient_threshold=1e-2, perturbation=1e-3,
        perturbation_period=30, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    kicks = []
    for k in range(220):
        before, slope = x.detach().clone(), torch.stack([x[0] ** 3 - x[0], x[1]]).detach()
        optimizer.step(lambda: y[0] ** 4 / 4 - y[0] ** 2 / 2 + y[1] ** 2 / 2, lambda: (y - x).square().sum() / 2)
        moved = x.detach() - before + 0.1 * slope
        if moved.norm() > 1e-12:
            kicks.append(k)
            assert moved.norm() <= 1e-3
            assert slope.norm() <= 1e-2
    assert kicks[0] == 44  # 0.9^44 <= 1e-2 is the first small gradient
    assert min(b - a for a, b in itertools.pairwise(kicks)) >= 31
    assert abs(abs(x[0].item()) - 1) < 1e-2


def test_paid_without_perturbation_is_aid():
    paths = []
    for cls, options in ((bo.AID, {}), (bo.PAID, {"perturbation": 0.0, "gradient_threshold": 1e9})):
        problem = Quadratic()
        problem.run(cls(problem.x, problem.y, **BASELINE, lower_steps=3, **options), 10)
        paths.append(problem.x[0].detach())
    assert torch.equal(*paths)


def rows_fewer_than_unknowns(rows, unknowns, penalty, dtype):
    """Return least squares with x as targets, at its solution of least norm: losses, parameters, hypergradient."""
    A, V = torch.randn(rows, unknowns) * 3 / unknowns**0.5, torch.randn(60, unknowns) * 3 / unknowns**0.5
    t, s = torch.randn(rows), torch.randn(60)
    inverse = torch.linalg.pinv(A @ A.mT / rows + penalty * torch.eye(rows), hermitian=True)
    solution = A.mT @ inverse @ t / rows
    truth = inverse @ A @ V.mT @ (V @ solution - s) / 60 / rows
    x, y = (v.to(dtype).requires_grad_() for v in (t, solution))
    a, v, u = (m.to(dtype) for m in (A, V, s))

    def lower():
        return (a @ y - x).square().mean() / 2 + penalty * y.square().sum() / 2

    return [x], [y], lambda: (v @ y - u).square().mean() / 2, lower, truth


def error_of_system(rows, unknowns, penalty, dtype=torch.float64, **options):
    """Return the relative error of AID's hypergradient, the optimizer, and its warnings."""
    x, y, upper, lower, truth = rows_fewer_than_unknowns(rows, unknowns, penalty, dtype)
    optimizer = bo.AID(x, y, lr=0.1, lower_lr=0.1, lower_steps=0, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.backward(upper, lower)
    return float((x[0].grad - truth).norm() / truth.norm()), optimizer, [str(w.message) for w in seen]


@pytest.mark.parametrize("cls", [bo.AID, bo.RAHGD, bo.BA])
def test_more_unknowns_than_rows_are_solved_though_residuals_rise(cls):
    """Condition 4e4: CG's residual rises above b and comes back."""
    x, y, upper, lower, truth = rows_fewer_than_unknowns(40, 200, 1e-5, torch.float64)
    optimizer = cls(x, y, lr=0.1, lower_lr=1e-9, linear_steps=200, lower_steps=1)
    optimizer.backward(upper, lower)
    assert (x[0].grad - truth).norm() < 1e-6 * truth.norm()
    assert optimizer.diagnostics["linear_condition"] > 1e3
    assert optimizer.diagnostics["linear_condition"] < 1e5


def test_the_true_residual_is_reported_and_rounding_errors_are_told():
    """In float32 MINRES's recursion ends near 1e-7."""
    options = {"linear_steps": 200, "linear_solver": "minres"}
    error, optimizer, told = error_of_system(40, 200, 1e-6, torch.float32, **options)
    assert error > 0.1
    assert optimizer.diagnostics["linear_relative_residual"] > 0.01
    (message,) = told
    assert "rounding errors are too large" in message
    assert "condition of H at least" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_direct_solve_of_a_matrix_that_is_nearly_singular_is_told(dtype):
    error, _, told = error_of_system(20, 60, 0.0, dtype, linear_solver="direct")
    assert error > 0.1
    assert "singular up to rounding errors" in told[0]


def test_warm_starts_in_a_null_space_do_not_grow():
    """Softmax regression without a penalty: a vector added to all classes changes nothing."""
    A, V = torch.randn(120, 8), torch.randn(120, 8)
    teacher = torch.randn(8, 3)
    t, s = ((m @ teacher + 3 * torch.randn(120, 3)).argmax(1) for m in (A, V))
    y = torch.zeros(24, requires_grad=True)
    for _ in range(30):
        slope = torch.func.grad(lambda q: F.cross_entropy(A @ q.view(8, 3), t))(y.detach())
        H = torch.autograd.functional.hessian(lambda q: F.cross_entropy(A @ q.view(8, 3), t), y.detach())
        y.data -= torch.linalg.pinv(H, hermitian=True, rtol=1e-10) @ slope
    x, y = torch.zeros(120, dtype=torch.float32, requires_grad=True), y.detach().float().requires_grad_()
    a, v = A.float(), V.float()

    def lower(x, y, a):
        return (x.exp() * F.cross_entropy(a @ y.view(8, 3), t, reduction="none")).mean()

    def upper(y, v):
        return F.cross_entropy(v @ y.view(8, 3), s)

    optimizer = bo.AID([x], [y], lr=0.0, lower_lr=0.1, lower_steps=0, linear_steps=50)
    lengths = []
    for k in range(60):
        with torch.no_grad():
            x.copy_(0.3 * torch.sin(torch.arange(120) * (1 + k / 60)))
        x.grad = None
        optimizer.backward(lambda: upper(y, v), lambda: lower(x, y, a))
        wide, at = x.detach().double(), y.detach().double()
        b = torch.func.grad(upper)(at, V)
        H = torch.autograd.functional.hessian(partial(lower, wide, a=A), at)
        solution = torch.linalg.pinv(H, hermitian=True, rtol=1e-8) @ b
        truth = -torch.func.grad(lambda w, q=at, s=solution: torch.func.grad(lower, argnums=1)(w, q, A) @ s)(wide)
        assert (x.grad - truth).norm() < 1e-2 * truth.norm()
        lengths.append(float(optimizer.state[y]["linear_solution"].norm() / solution.norm()))
    assert max(lengths) < 3

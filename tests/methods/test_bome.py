"""BOME: the barrier, its closed forms, and a literal loop."""

import pytest
import torch

import bilevel_optim as bo


class Quadratic:
    """g = y'Ay/2 - y'(Dx + e), f = y'Py/2 + q'y + x'Qx/2 + c'x + x'Ry."""

    def __init__(self, direct=True):
        g = torch.Generator().manual_seed(3)

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        a, p, q = draw(4, 4), draw(4, 4), draw(3, 3)
        self.A, self.P, self.Q = a @ a.T / 4 + torch.eye(4), p @ p.T / 4 + torch.eye(4), q @ q.T / 3 + torch.eye(3)
        self.D, self.e, self.q, self.c, self.R = draw(4, 3), draw(4), draw(4), draw(3), 0.3 * draw(3, 4)
        if not direct:
            self.Q, self.c, self.R = self.Q * 0, self.c * 0, self.R * 0
        self.x, self.y = (draw(n).requires_grad_() for n in (3, 4))

    def lower(self, x=None, y=None):
        x, y = (self.x, self.y) if x is None else (x, y)
        return y @ self.A @ y / 2 - y @ (self.D @ x + self.e)

    def upper(self, x=None, y=None):
        x, y = (self.x, self.y) if x is None else (x, y)
        return y @ self.P @ y / 2 + self.q @ y + x @ self.Q @ x / 2 + self.c @ x + x @ self.R @ y

    def optimum(self):
        """The x where the hypergradient vanishes, and y*(x)."""
        inverse = torch.linalg.inv(self.A)
        J, k = inverse @ self.D, inverse @ self.e
        matrix = self.Q + self.R @ J + J.T @ self.R.T + J.T @ self.P @ J
        right = self.c + self.R @ k + J.T @ (self.P @ k + self.q)
        x = torch.linalg.solve(matrix, -right)
        return x, J @ x + k


def literal(problem, steps, *, lr, lower_lr, T, joint_lr, eta, barrier, joint_steps=1):
    """Points and quantities of a run, as the paper writes it; x moves in every ``joint_steps``-th step alone."""
    x, y = problem.x.detach().clone(), problem.y.detach().clone()
    rows = []
    for k in range(steps * joint_steps):
        end = y.clone()
        for _ in range(T):
            w = end.clone().requires_grad_()
            end = end - lower_lr * torch.autograd.grad(problem.lower(x, w), w)[0]
        if (k + 1) % joint_steps:
            w = y.clone().requires_grad_()
            f, q = (torch.autograd.grad(loss(x, w), w)[0] for loss in (problem.upper, problem.lower))
            phi = eta * (q @ q if barrier == "grad_norm" else problem.lower(x, y) - problem.lower(x, end))
            y = y - joint_lr * (f + max(float(phi - f @ q), 0.0) / float(q @ q) * q)
            continue
        both = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        f = torch.cat(torch.autograd.grad(problem.upper(*both), both))
        q = problem.lower(*both) - problem.lower(both[0], end)
        dq = torch.cat(torch.autograd.grad(q, both))
        phi = eta * (dq @ dq if barrier == "grad_norm" else q.detach())
        multiplier = max(float(phi - f @ dq), 0.0) / float(dq @ dq)
        d = f + multiplier * dq
        rows.append((x, y, d, dq, phi, multiplier))
        x, y = x - lr * d[: len(x)], y - joint_lr * d[len(x) :]
    return x, y, rows


@pytest.mark.usually("grad_norm-1", "value-3")
@pytest.mark.parametrize("joint_steps", [1, 3])
@pytest.mark.parametrize("barrier", ["grad_norm", "value"])
def test_equals_the_literal_loop(barrier, joint_steps):
    problem = Quadratic()
    options = {"lr": 0.03, "lower_lr": 0.1, "joint_lr": 0.05, "eta": 0.7, "barrier": barrier}
    x, y, rows = literal(problem, 12, T=4, joint_steps=joint_steps, **options)
    optimizer = bo.BOME([problem.x], [problem.y], lower_steps=4, joint_steps=joint_steps, **options)
    for _, _, d, dq, phi, multiplier in rows:
        optimizer.step(problem.upper, problem.lower)
        assert float(optimizer.diagnostics["multiplier"]) == pytest.approx(multiplier, rel=1e-10, abs=1e-12)
        assert torch.allclose(problem.x.grad, d[:3], rtol=1e-12, atol=1e-12)
        assert float(d @ dq) >= float(phi) - 1e-12 * float(1 + phi)  # what the barrier promises
    assert torch.allclose(problem.x, x, rtol=1e-12, atol=1e-12)
    assert torch.allclose(problem.y, y, rtol=1e-12, atol=1e-12)
    assert any(row[5] == 0 for row in rows) or any(row[5] > 0 for row in rows)


# y starts where f is less than at y*(x), which the warning names as the exception.
FROM_BELOW = pytest.mark.filterwarnings("ignore:the upper loss was .* unless y started where f is less")


@pytest.mark.slow
@FROM_BELOW
@pytest.mark.parametrize("direct", [True, False])
def test_converges_to_the_optimum(direct):
    """Without a direct gradient the barrier has to carry all of the hypergradient."""
    problem = Quadratic(direct)
    optimizer = bo.BOME([problem.x], [problem.y], lr=0.2, lower_lr=0.2, lower_steps=15, joint_lr=0.1)
    x, y = problem.optimum()
    errors = []
    for _ in range(6):  # constant steps end in a neighbourhood whose size is theirs
        for _ in range(130):
            optimizer.step(problem.upper, problem.lower)
        ends = ((problem.x, x), (problem.y, y))
        errors.append(sum(float((at.detach() - end).norm() / end.norm()) for at, end in ends))
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.joint_lr /= 2
    assert errors[-1] < 0.06
    assert errors[-1] < 0.5 * errors[2] < 0.4 * errors[0]


@pytest.mark.slow
@FROM_BELOW
@pytest.mark.parametrize("direct", [True, False])
def test_converges_closely(direct):
    """The same with many small steps."""
    problem = Quadratic(direct)
    optimizer = bo.BOME([problem.x], [problem.y], lr=0.02, lower_lr=0.2, lower_steps=20, joint_lr=0.02)
    for _ in range(3):
        for _ in range(2000):
            optimizer.step(problem.upper, problem.lower)
        optimizer.param_groups[0]["lr"] /= 5
        optimizer.joint_lr /= 5
    for live, best in zip((problem.x, problem.y), problem.optimum(), strict=True):
        assert float((live.detach() - best).norm()) < 1e-2 * (1 + float(best.norm()))


@pytest.mark.parametrize("T", [1, 3, 50])
def test_gap_in_closed_form(T):
    """For g = mu/2 |y - Ax|^2 the gap is mu/2 (1 - (1 - alpha mu)^(2T)) |y - Ax|^2."""
    mu, alpha = 2.0, 0.15
    A = torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.0, 1.0]], dtype=torch.float64)
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    e = (y - A @ x).detach()
    optimizer = bo.BOME([x], [y], lr=0.1, lower_lr=alpha, lower_steps=T)
    optimizer.backward(lambda: y.sum() + x.sum(), lambda: mu / 2 * (y - A @ x).square().sum())
    rate = (1 - alpha * mu) ** T
    assert float(optimizer.diagnostics["gap"]) == pytest.approx(mu / 2 * (1 - rate**2) * float(e @ e), rel=1e-12)
    # The gradient of q with y_T held: in y that of g, in x -mu A'(e - e_T) = -mu (1 - rate) A'e.
    dq = torch.cat([-mu * (1 - rate) * A.T @ e, mu * e])
    f = torch.ones(5, dtype=torch.float64)
    multiplier = max(float(0.5 * dq @ dq - f @ dq), 0.0) / float(dq @ dq)
    assert torch.allclose(x.grad, (f + multiplier * dq)[:2], rtol=1e-12)


def test_joint_steps_carry_the_hypergradient_from_a_point_far_from_the_solution():
    """f has no gradient in x at the start of y, as with a head that starts at zero."""
    generator = torch.Generator().manual_seed(0)
    target, x0 = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 9))
    x = x0.clone().requires_grad_()
    y = torch.zeros(3, dtype=torch.float64, requires_grad=True)

    def prediction():
        return x.view(3, 3) @ y

    def upper():
        return (prediction() - 2 * target).square().sum() / 2

    def lower():
        return (prediction() - target).square().sum() / 2 + 0.25 * y.square().sum()

    exact = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=500, linear_steps=3)
    exact.backward(upper, lower)
    cosines = {}
    expected = x.grad.clone()
    for k in (1, 20):
        y.data.zero_()
        bo.BOME([x], [y], lr=0.1, lower_lr=0.05, lower_steps=100, joint_steps=k, eta=1.0).backward(upper, lower)
        cosines[k] = float(torch.nn.functional.cosine_similarity(x.grad, expected, 0))
    assert cosines[20] > 0.9 > 0.5 > cosines[1]


def test_is_joint_descent_where_the_barrier_is_slack():
    """With f = g - min g the gap falls by itself as long as eta is below 1."""
    problem = Quadratic()
    x, y = (t.detach().clone().requires_grad_() for t in (problem.x, problem.y))
    optimizer = bo.BOME([problem.x], [problem.y], lr=0.02, lower_lr=0.1, lower_steps=60, eta=0.01)

    def upper(x=problem.x, y=problem.y):
        return (
            problem.lower(x, y)
            + (problem.D @ x + problem.e) @ torch.linalg.inv(problem.A) @ (problem.D @ x + problem.e) / 2
        )

    for _ in range(10):
        optimizer.step(upper, problem.lower)
        assert float(optimizer.diagnostics["multiplier"]) == 0
        d = torch.autograd.grad(upper(x, y), (x, y))
        x, y = ((t - rate * s).detach().requires_grad_() for t, s, rate in zip((x, y), d, (0.02, 0.1), strict=True))
    assert torch.allclose(problem.x, x, rtol=1e-12)
    assert torch.allclose(problem.y, y, rtol=1e-12)


def test_a_stationary_gap_leaves_the_direction_of_f():
    x, y = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = bo.BOME([x], [y], lr=0.1, lower_lr=0.1)
    optimizer.step(lambda: (2 * x + 3 * y).sum(), lambda: (y - x).square().sum())
    assert (float(optimizer.diagnostics["multiplier"]), float(x.detach()), float(y.detach())) == pytest.approx(
        (0, 0.8, 0.7)
    )


def test_each_task_has_a_multiplier_of_its_own():
    """A step with tasks is the mean of steps on each of them."""
    data = torch.tensor([[[1.0]], [[-2.0]], [[0.5]]], dtype=torch.float64)
    x, y = (
        torch.tensor([0.3], dtype=torch.float64, requires_grad=True),
        torch.zeros(1, dtype=torch.float64).requires_grad_(),
    )
    losses = (lambda rows: (y - 1).square().sum() + x.square().sum(), lambda rows: (y - x * rows[0]).square().sum())
    together = bo.BOME([x], [y], lr=0.1, lower_lr=0.1)
    together.backward(*losses, tasks=bo.TensorTasks(data))
    gradient, end = x.grad.clone(), y.detach().clone()
    alone = []
    for rows in data:
        y.data.zero_()
        bo.BOME([x], [y], lr=0.1, lower_lr=0.1).backward(*(lambda loss=loss, rows=rows: loss(rows) for loss in losses))
        alone.append((x.grad.clone(), y.detach().clone()))
    assert torch.allclose(gradient, torch.stack([g for g, _ in alone]).mean(0), rtol=1e-12)
    assert torch.allclose(end, torch.stack([t for _, t in alone]).mean(0), rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eta": 0.0}, "Invalid eta value: 0.0"),
        ({"eta": float("inf")}, "Invalid eta value: inf"),
        ({"barrier": "log"}, "Invalid barrier value: log"),
        ({"joint_lr": -1.0}, "Invalid joint_lr value: -1.0"),
        ({"joint_steps": 0}, "Invalid joint_steps value: 0"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        bo.BOME(
            [torch.zeros(1, requires_grad=True)],
            [torch.zeros(1, requires_grad=True)],
            lr=0.1,
            lower_lr=0.1,
            **arguments,
        )

"""SRBA: the recursion, its closed forms, and a literal loop."""

import math

import pytest
import torch

import bilevel_optim as bo


class Terms:
    """n lower and m upper quadratic terms, which differ, with well-conditioned means."""

    def __init__(self, n=6, m=4, spread=1.0):
        g = torch.Generator().manual_seed(5)

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        scale = 1 + 0.8 * spread * torch.linspace(-1, 1, n, dtype=torch.float64)
        self.lower_data = (scale.view(n, 1), spread * draw(n, 3))
        self.upper_data = spread * draw(m, 3) + 1
        self.D = draw(3, 2)
        self.x, self.y = (draw(k).requires_grad_() for k in (2, 3))

    def g(self, batch, x=None, y=None):
        x, y = (self.x, self.y) if x is None else (x, y)
        scale, shift = batch
        return (scale * (y - self.D @ x - shift).square()).sum(1).mean() / 2

    def f(self, batch, x=None, y=None):
        x, y = (self.x, self.y) if x is None else (x, y)
        return (y - batch).square().sum(1).mean() / 2 + 0.1 * x.square().sum()

    def objectives(self, seed=0):
        upper, lower = (torch.Generator().manual_seed(seed + k) for k in (1, 2))
        return (
            bo.FiniteSum(self.f, self.upper_data, 1, generator=upper),
            bo.FiniteSum(self.g, self.lower_data, 1, generator=lower),
        )

    def gradient_norm(self):
        """Return the gradient norm of f(x, y*(x)) over all terms."""
        scale, shift = self.lower_data
        mean = (scale * shift).mean(0) / scale.mean()
        y = self.D @ self.x.detach() + mean
        return float((0.2 * self.x.detach() + self.D.T @ (y - self.upper_data.mean(0))).norm())


def directions(problem, point, i, j):
    """SOBA's directions on some terms, by autograd."""
    x, y, v = point
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    slope = torch.autograd.grad(
        problem.g(tuple(t[i] for t in problem.lower_data), *leaves), leaves[1], create_graph=True
    )[0]
    cross, product = torch.autograd.grad(slope, leaves, v)
    f_x, f_y = torch.autograd.grad(problem.f(problem.upper_data[j], *leaves), leaves)
    return slope.detach(), product - f_y, f_x - cross, f_y


def literal(problem, steps, *, lr, lower_lr, linear_lr, period, radius=math.inf, seed=0):
    n, m = len(problem.upper_data), len(problem.lower_data[0])
    upper, lower = (torch.Generator().manual_seed(seed + k) for k in (1, 2))
    everything = slice(None)

    def inside(v):
        return v * (radius / v.norm()) if v.norm() > radius else v

    x, y = problem.x.detach().clone(), problem.y.detach().clone()
    v = inside(linear_lr * directions(problem, (x, y, torch.zeros_like(y)), everything, everything)[3])
    last, d, history = None, None, []
    for k in range(steps):
        point = (x, y, v)
        if k % period == 0:
            d = directions(problem, point, everything, everything)[:3]
        else:
            i = torch.randint(m, (), generator=lower).view(1)
            j = torch.randint(n, (), generator=upper).view(1)
            new, old = (directions(problem, at, i, j)[:3] for at in (point, last))
            d = tuple(a + b - c for a, b, c in zip(d, new, old, strict=True))
        history.append((point, d))
        last = point
        x, y, v = x - lr * d[2], y - lower_lr * d[0], inside(v - linear_lr * d[1])
    return x, y, v, history


@pytest.mark.parametrize("radius", [math.inf, 0.5, 0.1])  # of a ball of 0.1 the first v is outside
def test_equals_the_literal_loop(radius):
    problem = Terms()
    arguments = {"lr": 0.05, "lower_lr": 0.1, "linear_lr": 0.15, "period": 4, "radius": radius}
    x, y, v, history = literal(problem, 15, **arguments)
    optimizer, objectives = bo.SRBA([problem.x], [problem.y], **arguments), problem.objectives()
    for _, d in history:
        optimizer.step(*objectives)
        assert torch.allclose(problem.x.grad, d[2], rtol=1e-12, atol=1e-12)
    assert torch.allclose(problem.x, x, rtol=1e-12, atol=1e-12)
    assert torch.allclose(problem.y, y, rtol=1e-12, atol=1e-12)
    assert torch.allclose(optimizer.state[problem.y]["linear_solution"], v, rtol=1e-12, atol=1e-12)


def test_with_period_one_is_soba_on_the_full_sums():
    ours, theirs = Terms(), Terms()
    srba = bo.SRBA([ours.x], [ours.y], lr=0.05, lower_lr=0.1, period=1)
    soba = bo.SOBA([theirs.x], [theirs.y], lr=0.05, lower_lr=0.1)
    for _ in range(10):
        srba.step(*ours.objectives())
        soba.step(lambda: theirs.f(theirs.upper_data), lambda: theirs.g(theirs.lower_data))
    assert torch.allclose(ours.x, theirs.x, rtol=1e-12)
    assert torch.allclose(ours.y, theirs.y, rtol=1e-12)


class AlwaysFirst(bo.FiniteSum):
    def draw(self, *, once=False):
        return self.term(0, once=once)


def test_the_recursion_telescopes():
    """On the same terms at every step, the directions less those on these terms do not change within a period."""
    problem = Terms()
    f, g = (
        AlwaysFirst(loss, data, 1) for loss, data in ((problem.f, problem.upper_data), (problem.g, problem.lower_data))
    )
    optimizer = bo.SRBA([problem.x], [problem.y], lr=0.05, lower_lr=0.1, period=100)
    rest = []
    for _ in range(6):
        optimizer.step(f, g)
        lower, upper = optimizer.state[problem.y], optimizer.state[problem.x]
        point = upper["previous"], lower["previous"], lower["previous_solution"]
        own = directions(problem, point, slice(0, 1), slice(0, 1))
        d = lower["direction"], lower["solution_direction"], upper["direction"]
        rest.append(torch.cat([a - b for a, b in zip(d, own[:3], strict=True)]))
    assert rest[0].norm() > 0.1
    for one in rest[1:]:
        assert torch.allclose(one, rest[0], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_converges_linearly_where_soba_stalls():
    norms = {}
    for cls in (bo.SRBA, bo.SOBA):
        problem = Terms()
        optimizer, objectives = cls([problem.x], [problem.y], lr=0.03, lower_lr=0.1), problem.objectives()
        norms[cls] = []
        for _ in range(3):
            for _ in range(700):
                optimizer.step(*objectives)
            norms[cls].append(problem.gradient_norm())
    first, second, third = norms[bo.SRBA]
    assert second < 1e-2 * first or second < 1e-12
    assert third < 1e-10
    assert norms[bo.SOBA][-1] > 1e-3


def test_counts_its_oracle_calls():
    problem = Terms(n=6, m=4)
    optimizer, objectives = bo.SRBA([problem.x], [problem.y], lr=0.01, lower_lr=0.1, period=3), problem.objectives()
    for _ in range(7):  # the full sums at steps 0, 3, 6
        optimizer.step(*objectives)
    full, between = 3, 4
    assert optimizer.oracle_counts == {
        "upper_grad": 4 * full + 2 * between,
        "lower_grad": 6 * full + 2 * between,
        "hvp": 6 * full + 2 * between,
        "jvp": 6 * full + 2 * between,
        "loss": 0,
    }


def test_default_period_is_half_of_the_terms():
    problem = Terms(n=6, m=4)
    optimizer, objectives = bo.SRBA([problem.x], [problem.y], lr=0.01, lower_lr=0.1), problem.objectives()
    for _ in range(6):
        optimizer.step(*objectives)
    assert optimizer.oracle_counts["upper_grad"] == 2 * 4 + 4 * 2  # steps 0 and 5 look at all of them


def test_objectives_must_be_finite_sums():
    problem = Terms()
    optimizer = bo.SRBA([problem.x], [problem.y], lr=0.01, lower_lr=0.1)
    loader = bo.Objective(problem.g, [tuple(t[:2] for t in problem.lower_data)])
    with pytest.raises(ValueError, match=r"bo\.FiniteSum"):
        optimizer.step(lambda: problem.f(problem.upper_data), loader)
    with pytest.raises(ValueError, match="SRBA continues from its last step, which new tasks do not have"):
        optimizer.step(*problem.objectives(), tasks=bo.TensorTasks(torch.zeros(3, 2, 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"period": 0}, "Invalid period value: 0"),
        ({"period": 1.5}, "Invalid period value: 1.5"),
        ({"radius": 0.0}, "Invalid radius value: 0.0"),
        ({"linear_lr": 0.0}, "Invalid linear_lr value: 0.0"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        bo.SRBA(
            [torch.zeros(1, requires_grad=True)],
            [torch.zeros(1, requires_grad=True)],
            lr=0.1,
            lower_lr=0.1,
            **arguments,
        )

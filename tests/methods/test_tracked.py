"""SVRB, RSVRB and their kin: section 6 of the specification, by number."""

import copy
import io
import math

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.hypergradient import storm
from bilevel_optim.hypergradient.recursive import Points, matrices
from bilevel_optim.methods.tracked.rows import Rows


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Family:
    """m quadratic tasks: g = y'Ay/2 - y'(Bx + b), f = y'Py/2 - c'y + x'Qx/2 - q'x + x'Ry; batches are noise on them.

    A batch is one vector per draw, the noise on (A, B, b, P, c, q); of zeros where it is exact.
    """

    def __init__(self, m=20, d=5, p=4, seed=0, noise=0.0, draws=1, scales=None):
        g = seeded(seed)

        def random(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.m, self.d, self.p = m, d, p
        basis = torch.linalg.qr(random(m, p, p))[0]
        spectrum = 0.5 + 3.5 * torch.rand(m, p, generator=g, dtype=torch.float64)
        spectrum[:, 0], spectrum[:, -1] = 0.5, 4.0
        self.A = basis @ torch.diag_embed(spectrum) @ basis.mT
        self.B, self.b, self.c = random(m, p, d) / d**0.5, random(m, p), random(m, p)
        self.P = torch.eye(p, dtype=torch.float64).expand(m, p, p).clone()
        self.Q = 0.3 * torch.eye(d, dtype=torch.float64).expand(m, d, d).clone()
        self.q, self.R = 0.3 * random(m, d), 0.1 * random(m, d, p)
        if scales is not None:
            for t in (self.B, self.b, self.c, self.P, self.Q, self.q, self.R):
                t *= scales.view(m, *[1] * (t.dim() - 1))
        self.sizes = [p * p, p * d, p, p * p, p, d]
        self.width, self.noise = sum(self.sizes), noise
        solved = torch.linalg.solve(self.A, torch.cat([self.B, self.b.unsqueeze(-1)], -1))
        self.S, self.s = solved[..., :d], solved[..., d]
        S, R = self.S, self.R
        self.hessian = (S.mT @ self.P @ S + self.Q + R @ S + S.mT @ R.mT).mean(0)
        at_zero = (S.mT @ ((self.P @ self.s.unsqueeze(-1)).squeeze(-1) - self.c).unsqueeze(-1)).squeeze(-1)
        self.linear = (at_zero - self.q + (R @ self.s.unsqueeze(-1)).squeeze(-1)).mean(0)
        self.solution = torch.linalg.solve(self.hessian, -self.linear)
        self.x = torch.zeros(d, dtype=torch.float64, requires_grad=True)
        self.y = torch.zeros(m, p, dtype=torch.float64, requires_grad=True)
        self.stack = (self.A, self.B, self.b, self.P, self.Q, self.R, self.c, self.q)

    def gradient(self, x=None):
        return self.hessian @ (self.x.detach() if x is None else x) + self.linear

    def lower_solutions(self, x=None):
        x = self.x.detach() if x is None else x
        return self.S @ x + self.s

    # The losses see (index of the task, noise).
    def noisy(self, batch):
        index, e = batch
        A, B, b, P, Q, R, c, q = (t[index.reshape(-1)[0]] for t in self.stack)
        p, d = self.p, self.d
        eA, eB, eb, eP, ec, eq = e.mean(0).split(self.sizes)
        sym = lambda t: (t.view(p, p) + t.view(p, p).T) / 2  # noqa: E731
        return A + sym(eA), B + eB.view(p, d), b + eb, P + sym(eP), Q, R, c + ec, q + eq

    def upper(self, batch):
        _, _, _, P, Q, R, c, q = self.noisy(batch)
        x, y = self.x, self.y
        return y @ P @ y / 2 - c @ y + x @ Q @ x / 2 - q @ x + x @ R @ y

    def lower(self, batch):
        A, B, b, *_ = self.noisy(batch)
        x, y = self.x, self.y
        return y @ A @ y / 2 - y @ (B @ x + b)

    def __len__(self):
        return self.m

    def sample(self, n, generator):
        return torch.randperm(self.m, generator=generator)[:n]

    def batch(self, tasks, n, generator):
        rows = n or 1
        e = self.noise * torch.randn(len(tasks), rows, self.width, generator=generator, dtype=torch.float64)
        return tasks.view(-1, 1).expand(-1, rows), e

    def both(self, tasks, n, generator):
        self.drawn = self.batch(tasks, n, generator)
        return self.drawn

    lower_batch_of = both


class Sampler:
    """Tasks of a family; f and g get the same noise, in one draw for both."""

    def __init__(self, family, chosen=None):
        self.family, self.chosen, self.log = family, chosen, []

    def __len__(self):
        return self.family.m

    def sample(self, n, generator):
        ids = torch.tensor(next(self.chosen)) if self.chosen is not None else self.family.sample(n, generator)
        self.log.append(ids)
        return ids

    def lower(self, tasks, n, generator):
        return self.family.batch(tasks, n, generator)

    upper = lower


class Given:
    """A sampler of given tasks and given noise, one of each per step; the first step looks at every task."""

    def __init__(self, draws, noises):
        self.draws, self.noises, self.step = draws, noises, 0

    def __len__(self):
        return len(self.noises[0])

    def sample(self, n, generator):
        return torch.tensor(self.draws[self.step - 1])

    def lower(self, tasks, n, generator):
        return tasks.view(-1, 1), self.noises[self.step][tasks]

    upper = lower


def derivatives(family, i, x, y, e=None):
    """u, v, w, V, H of task i in matrices."""
    index = torch.tensor([i])
    e = torch.zeros(1, family.width, dtype=torch.float64) if e is None else e
    A, B, b, P, Q, R, c, q = family.noisy((index, e))
    return {
        "u": Q @ x - q + R @ y,
        "v": P @ y - c + R.T @ x,
        "w": A @ y - B @ x - b,
        "V": -B.T,
        "H": A,
    }


def floored(H, least):
    values, vectors = torch.linalg.eigh((H + H.T) / 2)
    return vectors @ torch.diag(values.clamp_min(least)) @ vectors.T


# ---------------------------------------------------------------------------------------------------- projections


def test_t10_floor_is_by_eigenvalues_not_singular_values():
    H = torch.diag(torch.tensor([1.0, -0.5], dtype=torch.float64))
    value, active = storm.floor(H.unsqueeze(0), 0.1)
    torch.testing.assert_close(value[0], torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64)))
    assert int(active) == 1
    value, active = storm.floor(torch.eye(2, dtype=torch.float64).unsqueeze(0), 0.1)
    assert int(active) == 0
    assert torch.equal(value[0], torch.eye(2, dtype=torch.float64))


def test_t11_flooring_after_each_shrinking_is_flooring_once():
    H = torch.randn(6, 4, 4, generator=seeded(), dtype=torch.float64)
    H = H @ H.mT + H + H.mT
    factors = torch.rand(30, generator=seeded(1), dtype=torch.float64) * 0.2 + 0.8
    often = H
    for c in factors:
        often = storm.floor(c * often, 0.1).value
    once = storm.floor(factors.prod() * H, 0.1).value
    torch.testing.assert_close(often, once, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 3, 7)])
def test_t15_ceiling_is_the_clamp_of_singular_values(shape):
    V = torch.randn(*shape, generator=seeded(), dtype=torch.float64)
    V[0] *= 0.01
    left, values, right = torch.linalg.svd(V, full_matrices=False)
    expected = left @ torch.diag_embed(values.clamp_max(1.5)) @ right
    result, active = storm.ceiling(V, 1.5)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    assert int(active) == int((values.amax(-1) > 1.5).sum())
    assert torch.equal(result[0], V[0])


def test_ball_leaves_the_inside_alone():
    v = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    value, active = storm.ball(v, 1.0)
    torch.testing.assert_close(value, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert int(active) == 1


# ---------------------------------------------------------------------------------------------------- trackers


def test_t2_random_rows_take_a_storm_step_in_expectation():
    g = seeded()
    X, new, old = (torch.randn(4, 3, generator=g, dtype=torch.float64) for _ in range(3))
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    mean = torch.zeros_like(X)
    for i in range(4):
        a = torch.zeros(4, dtype=torch.float64)
        a[i] = 1 / p[i]
        mean += p[i] * storm.storm(X, new, old, 0.3, a)
    torch.testing.assert_close(mean, 0.7 * (X - old) + new, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("p", "beta"), [(0.01, 0.05), (0.05, 0.05), (0.01, 0.005), (0.9, 0.1)])
def test_t7_drawing_tasks_alone_makes_noise(p, beta):
    steps, chains = 4000, 400
    hit = torch.rand(steps, chains, generator=seeded(), dtype=torch.float64) < p
    s, total, square, count = torch.ones(chains, dtype=torch.float64), 0.0, 0.0, 0
    one = torch.ones(chains, dtype=torch.float64)
    for t in range(steps):
        s = storm.storm(s, one, one, beta, hit[t] / p)
        if t >= steps // 3:
            total, square, count = total + s.sum(), square + (s * s).sum(), count + chains
    mean = total / count
    # 400 independent chains: standard error of the mean and of the variance are within these bounds.
    law = beta * (1 - p) / (p * (2 - beta))
    assert mean == pytest.approx(1.0, abs=0.03)
    assert square / count - mean**2 == pytest.approx(law, rel=0.06)


@pytest.mark.parametrize("beta", [0.02, 0.1, 0.5])
def test_t8_noise_of_storm_does_not_depend_on_the_speed(beta):
    g, chains, steps = seeded(), 2000, 1200
    X = torch.zeros(chains, dtype=torch.float64)
    errors = []
    for t in range(1, steps):
        noise = torch.randn(chains, generator=g, dtype=torch.float64)
        new, old = 3.0 * t + noise, 3.0 * (t - 1) + noise
        X = storm.storm(X, new, old, beta)
        if t > steps // 2:
            errors.append((X - 3.0 * t).square().mean())
    assert torch.stack(errors).mean() == pytest.approx(beta / (2 - beta), rel=0.03)


def test_t9_error_recursion_of_storm():
    g, chains, beta = seeded(), 4000, 0.2
    e = torch.zeros(chains, dtype=torch.float64)
    X = torch.randn(chains, generator=g, dtype=torch.float64)
    for _ in range(20):  # h(e; s) = (1 + s) e with s of variance sigma^2 / e^2 at most ... noise 0.5 on the slope
        before = (X - e).square()
        step = 0.3 * torch.randn(chains, generator=g, dtype=torch.float64)
        slope = 1 + 0.5 * torch.randn(chains, generator=g, dtype=torch.float64)
        new = storm.storm(X, slope * (e + step), slope * e, beta)
        after = (new - e - step).square()
        sigma2, L2 = 0.25 * (e + step).square(), 1 + 0.25
        bound = (1 - beta) * before + 2 * beta**2 * sigma2 + 2 * L2 * step.square()
        gap = after - bound
        assert gap.mean() <= 3 * gap.std() / chains**0.5
        X, e = new, e + step


def test_msvr_on_a_line_has_the_mean_of_its_recursion():
    """Its c takes the movement out of the squared error to first order; the mean has a lag of known size."""
    q, alpha, chains = 0.2, 0.1, 20000
    X = torch.zeros(chains, dtype=torch.float64)
    for t in range(1, 300):
        hit = torch.rand(chains, generator=seeded(t), dtype=torch.float64) < q
        new = storm.msvr(X, torch.full_like(X, float(t)), torch.full_like(X, float(t - 1)), alpha, q)
        X = torch.where(hit, new, X)
    # l = E[X - t] solves l = (1 - q)(l - 1) + q((1 - alpha)(l - 1) + c - 1 + alpha + 1 - alpha).
    c = 1 - alpha + (1 - q) / (q * (1 - alpha))
    lag = (q * (c - 1 + alpha) - (1 - q)) / (q * alpha)
    assert float((X - 299).mean()) == pytest.approx(lag, abs=4.5 * float(X.std()) / chains**0.5)


# ---------------------------------------------------------------------------------------------------- oracles


def test_points_give_every_derivative_of_every_task():
    family = Family(m=6, noise=0.2)
    x, y = torch.randn(5, generator=seeded(1), dtype=torch.float64), torch.randn(3, 4, generator=seeded(2)).double()
    ids = torch.tensor([4, 1, 5])
    batch = family.batch(ids, None, seeded(3))

    class Draws:
        def batch(self, level):
            return batch

    for options in ({}, {"vectorize": False}, {"hvp": "finite-difference"}):
        optimizer = bo.SVRB([family.x], [family.y], lr=0.1, lower_lr=0.1, **options)
        oracle = optimizer._oracle(family.upper, family.lower)
        points = Points(oracle, Draws(), x * 0, y * 0, apart=True)
        with points.at(x, y):
            _, found = matrices(points)
        for k, i in enumerate(ids.tolist()):
            for name, truth in derivatives(family, i, x, y[k], batch[1][k]).items():
                atol = 1e-8 if "hvp" in options else 1e-12
                torch.testing.assert_close(found[name][k], truth, rtol=0, atol=atol)
        counts = optimizer.oracle_counts
        assert (counts["upper_grad"], counts["lower_grad"], counts["hvp"], counts["jvp"]) == (3, 3, 12, 12)


def test_t23_orientation_of_the_cross_derivative():
    family = Family(m=1)
    x, h = torch.randn(5, generator=seeded(1), dtype=torch.float64), 1e-5
    parts = derivatives(family, 0, x, family.lower_solutions(x)[0])
    jacobian = -torch.linalg.solve(parts["H"], parts["V"].T)
    for k in range(5):
        e = torch.zeros(5, dtype=torch.float64)
        e[k] = h
        slope = (family.lower_solutions(x + e) - family.lower_solutions(x - e))[0] / (2 * h)
        torch.testing.assert_close(jacobian[:, k], slope, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- SVRB


@pytest.mark.parametrize("beta", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("tasks", [False, True])
def test_t1_without_noise_every_beta_gives_the_deterministic_method(beta, tasks):
    family = Family(m=3 if tasks else 1)
    m = family.m
    x, y = torch.zeros(5, dtype=torch.float64), torch.zeros(m, 4, dtype=torch.float64)
    if not tasks:
        family.y = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    exact = (torch.tensor([[0]]).expand(1, 1), torch.zeros(1, family.width, dtype=torch.float64))
    optimizer = bo.SVRB([family.x], [family.y], lr=0.2, lower_lr=0.1, averaging=0.8, beta=beta, floor=0.25)
    for _ in range(40):
        if tasks:
            optimizer.step(family.upper, family.lower, tasks=Sampler(family))
        else:
            optimizer.step(lambda: family.upper(exact), lambda: family.lower(exact))
        parts = [derivatives(family, i, x, y[i]) for i in range(m)]
        z = sum(t["u"] - t["V"] @ torch.linalg.solve(t["H"], t["v"]) for t in parts) / m
        x, y = x - 0.2 * z, torch.stack([y[i] - 0.08 * parts[i]["w"] for i in range(m)])
    torch.testing.assert_close(family.x.detach(), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(family.y.detach().view(m, 4), y, rtol=0, atol=1e-12)
    assert float(family.gradient(x).norm()) < 0.7 * float(family.gradient(x * 0).norm())


def literal_svrb(family, noises, betas, lr, lower_lr, tau, floor, radius=math.inf, ceilings=None):
    """Section 2.1, line by line, for one task with given noise; returns the path of x and y."""
    x, y = torch.zeros(family.d, dtype=torch.float64), torch.zeros(family.p, dtype=torch.float64)
    ceilings = ceilings or {}
    T, last, path = None, None, []
    for e in noises:
        new = derivatives(family, 0, x, y, e)
        if T is None:
            T = new
        else:
            old = derivatives(family, 0, *last, e)
            T = {k: (1 - betas[k]) * (T[k] - old[k]) + new[k] for k in T}
        for k in ("u", "v"):
            if k in ceilings and T[k].norm() > ceilings[k]:
                T[k] = T[k] * ceilings[k] / T[k].norm()
        if "V" in ceilings:
            a, s, b = torch.linalg.svd(T["V"], full_matrices=False)
            T["V"] = a @ torch.diag(s.clamp_max(ceilings["V"])) @ b
        T["H"] = floored(T["H"], floor)
        z = T["u"] - T["V"] @ torch.linalg.solve(T["H"], T["v"])
        last = x, y
        target = y - lower_lr * T["w"]
        if target.norm() > radius:
            target = target * radius / target.norm()
        x, y = x - lr * z, (1 - tau) * y + tau * target
        path.append((x, y))
    return path


class Stream:
    """Noise in a given order."""

    def __init__(self, noises):
        self.noises = noises

    def __iter__(self):
        return iter(self.noises)


def test_svrb_is_the_listing_with_noise_projections_and_unequal_weights():
    family = Family(m=1, noise=1.0)
    family.y = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    noises = [torch.randn(1, family.width, generator=seeded(k), dtype=torch.float64) * 0.7 for k in range(40)]
    betas = {"u": 0.3, "v": 0.2, "V": 0.4, "H": 0.5, "w": 0.6}
    ceilings = {"u": 1.5, "v": 2.0, "V": 1.2}
    path = literal_svrb(family, noises, betas, 0.05, 0.1, 0.7, 0.3, radius=0.8, ceilings=ceilings)
    index = torch.tensor([[0]])
    upper = bo.Objective(lambda e: family.upper((index, e)), Stream(noises))
    lower = bo.Objective(lambda e: family.lower((index, e)), Stream(noises))
    optimizer = bo.SVRB(
        [family.x], [family.y], lr=0.05, lower_lr=0.1, averaging=0.7, beta=betas, floor=0.3, radius=0.8,
        ceilings=ceilings,
    )  # fmt: skip
    projected = dict.fromkeys(("u", "v", "V", "H", "y"), 0)
    for x, y in path:
        optimizer.step(upper, lower)
        torch.testing.assert_close(family.x.detach(), x, rtol=0, atol=1e-10)
        torch.testing.assert_close(family.y.detach(), y, rtol=0, atol=1e-10)
        for name in projected:
            projected[name] += int(optimizer.diagnostics.get(f"projected_{name}", 0))
    assert all(projected.values()), projected  # each projection was active somewhere


def test_t5_rsvrb_of_one_problem_is_svrb():
    results = []
    for cls, options in (
        (bo.SVRB, {}),
        (bo.RSVRB, {"variant": "faithful"}),
        (bo.RSVRB, {"variant": "self_normalised"}),
    ):
        family = Family(m=1, noise=0.3)
        optimizer = cls([family.x], [family.y], lr=0.1, lower_lr=0.1, beta=0.2, generator=seeded(), **options)
        for _ in range(30):
            optimizer.step(family.upper, family.lower, tasks=Sampler(family, iter([[0]] * 100)))
        results.append(family.x.detach().clone())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-12)
    assert float(results[0].norm()) > 0.1


def test_t6_all_tasks_in_every_step_are_independent_recursions():
    path = {}
    for name, cls, options in (
        ("all", bo.SVRB, {}),
        ("mean", bo.RSVRB, {"task_batch": 5}),
        ("normalised", bo.RSVRB, {"task_batch": 5, "variant": "self_normalised"}),
    ):
        family = Family(m=5, noise=0.3)
        optimizer = cls([family.x], [family.y], lr=0.1, lower_lr=0.1, beta=0.2, generator=seeded(), **options)
        sampler = Sampler(family, iter([[0, 1, 2, 3, 4]] * 100))
        for _ in range(20):
            optimizer.step(family.upper, family.lower, tasks=sampler)
        path[name] = family.x.detach().clone()
    torch.testing.assert_close(path["mean"], path["all"], rtol=0, atol=1e-12)
    torch.testing.assert_close(path["normalised"], path["all"], rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- RSVRB


class Golden:
    """The two tasks of the golden trace."""

    a, b, c = torch.tensor([2.0, 4.0]).double(), torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0, 3.0]).double()

    def __init__(self, data):
        self.x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.y = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
        self.data = iter(data)

    def __len__(self):
        return 2

    def sample(self, n, generator):
        return torch.tensor([next(self.data)])

    def lower(self, tasks, n, generator):
        return torch.stack([self.a[tasks], self.b[tasks], self.c[tasks]], 1).unsqueeze(1)

    upper = lower

    def f(self, row):
        return (self.y - row[0, 2]).square().sum() / 2

    def g(self, row):
        return (row[0, 0] * self.y * self.y / 2 - row[0, 1] * self.x * self.y).sum()


@pytest.mark.parametrize("lazy", [True, False])
def test_golden_trace(lazy, monkeypatch):
    problem = Golden([0, 1, 0])
    probes = iter([1, 1, 0])
    optimizer = bo.RSVRB(
        [problem.x], [problem.y], lr=0.1, lower_lr=0.2, averaging=0.5, beta=0.5, beta_unit="absolute", floor=1.0,
        task_batch=1, probes=1, variant="faithful", lazy=lazy,
    )  # fmt: skip
    monkeypatch.setattr(optimizer, "_draw_probes", lambda m: torch.tensor([next(probes)]))
    optimizer.step(problem.f, problem.g, tasks=problem)
    assert problem.x.item() == pytest.approx(0.1, abs=1e-15)
    assert optimizer._direction.item() == pytest.approx(-1.0)
    table = [  # v, V, H, w, d, x, y
        ((-1.5, -1.5), (-1.5, -1.0), (3.0, 2.0), (-0.2, 0.0), -0.5, 0.15, (0.02, 0.0)),
        ((-0.75, -3.75), (-0.75, -2.5), (1.5, 5.0), (-0.1, -0.4), -1.75, 0.325, (0.03, 0.04)),
        ((-1.335, -1.875), (-1.375, -1.25), (2.75, 2.5), (-0.47, -0.2), -1.355, 0.4605, (0.077, 0.06)),
    ]
    for v, V, H, w, d, x, y in table:
        optimizer.step(problem.f, problem.g, tasks=problem)
        rows = optimizer._rows.gather(torch.arange(2))
        for name, values in (("v", v), ("V", V), ("H", H), ("w", w), ("y", y)):
            assert rows[name].flatten().tolist() == pytest.approx(values, abs=1e-12), name
        assert optimizer._direction.item() == pytest.approx(d, abs=1e-12)
        assert problem.x.item() == pytest.approx(x, abs=1e-12)
        if not lazy:
            assert problem.y.flatten().tolist() == pytest.approx(y, abs=1e-12)
    optimizer.catch_up()
    assert problem.y.flatten().tolist() == pytest.approx((0.077, 0.06), abs=1e-12)


def literal_rsvrb(family, draws, probes, noises, *, betas, lr, lower_lr, tau, floor, radius, share, variant="faithful"):
    """Section 2.2 with minibatches, eagerly: every row in every step."""
    m, x = family.m, torch.zeros(family.d, dtype=torch.float64)
    y = [torch.zeros(family.p, dtype=torch.float64) for _ in range(m)]
    y_last = list(y)
    T = [derivatives(family, i, x, y[i], noises[0][i]) for i in range(m)]
    s = [1.0] * m

    def z_of(t):
        return t["u"] - t["V"] @ torch.linalg.solve(t["H"], t["v"])

    def confined(v):
        return v if v.norm() <= radius else v * radius / v.norm()

    for t in T:
        t["H"] = floored(t["H"], floor)
    d = sum(z_of(t) for t in T) / m
    x_last = x
    x, y = x - lr * d, [(1 - tau) * y[i] + tau * confined(y[i] - lower_lr * T[i]["w"]) for i in range(m)]
    path = [(x, y)]
    for S, J, e in zip(draws, probes, noises[1:], strict=True):
        before = [dict(t) for t in T]
        for i in range(m):
            a = S.count(i) / share
            s[i] = (1 - betas["u"]) * s[i] + a * betas["u"]
            if a:
                new, old = derivatives(family, i, x, y[i], e[i]), derivatives(family, i, x_last, y_last[i], e[i])
                T[i] = {k: (1 - betas[k]) * T[i][k] + a * (new[k] - (1 - betas[k]) * old[k]) for k in T[i]}
            else:
                T[i] = {k: (1 - betas[k]) * T[i][k] for k in T[i]}
            if a or variant == "faithful":
                T[i]["H"] = floored(T[i]["H"], floor * (s[i] if variant == "self_normalised" else 1.0))
        if variant == "faithful":
            d = (1 - betas["d"]) * (d - sum(z_of(before[j]) for j in J) / len(J)) + sum(z_of(T[j]) for j in J) / len(J)
        elif variant == "exact_mean":
            d = sum(z_of(t) for t in T) / m
        else:
            d = sum(z_of(t) / c for t, c in zip(T, s, strict=True)) / m
        x_last, y_last = x, y
        x, y = x - lr * d, [(1 - tau) * y[i] + tau * confined(y[i] - lower_lr * T[i]["w"]) for i in range(m)]
        path.append((x, y))
    return path


@pytest.mark.parametrize("radius", [math.inf, 0.35])
@pytest.mark.parametrize("variant", ["faithful", "exact_mean", "self_normalised"])
@pytest.mark.parametrize("lazy", [True, False])
def test_t13_rows_left_behind_catch_up_exactly(variant, lazy, radius, monkeypatch):
    """Also T12 and T19: the literal method does in every step what the lazy rows do at once when looked at."""
    m, steps = 12, 25
    family = Family(m=m, noise=0.3)
    g = seeded(5)
    draws = [torch.randint(m, (2,), generator=g).tolist() for _ in range(steps)]
    probes = [torch.randint(m, (3,), generator=g).tolist() for _ in range(steps)]
    noises = [0.3 * torch.randn(m, 1, family.width, generator=g, dtype=torch.float64) for _ in range(steps + 1)]
    beta = 0.05
    betas = dict.fromkeys(("u", "v", "V", "H", "w", "d"), beta)
    if variant == "faithful":
        betas |= {"H": 0.04, "w": 0.08}
    options = {"lr": 0.02, "lower_lr": 0.05, "floor": 0.25}
    path = literal_rsvrb(
        family, draws, probes, noises, betas=betas, tau=0.6, radius=radius, share=2 / m, variant=variant, **options
    )

    given = Given(draws, noises)
    optimizer = bo.RSVRB(
        [family.x], [family.y], averaging=0.6, beta=betas, beta_unit="absolute", task_batch=2, radius=radius,
        variant=variant, lazy=lazy, **options,
    )  # fmt: skip
    monkeypatch.setattr(optimizer, "_draw_probes", lambda m: torch.tensor(probes[given.step - 1]))
    touched = 0
    for x, y in path:
        optimizer.step(family.upper, family.lower, tasks=given)
        given.step += 1
        torch.testing.assert_close(family.x.detach(), x, rtol=0, atol=1e-10)
        if not lazy:
            torch.testing.assert_close(family.y.detach(), torch.stack(y), rtol=0, atol=1e-10)
        touched += int(optimizer.diagnostics["rows_touched"])
    optimizer.catch_up()
    torch.testing.assert_close(family.y.detach(), torch.stack(path[-1][1]), rtol=0, atol=1e-10)
    assert touched <= m + 2 * steps  # T14
    if math.isfinite(radius):
        assert float(family.y.detach().norm(dim=1).max()) <= radius + 1e-12
        assert float(torch.stack([torch.stack(y) for _, y in path]).norm(dim=-1).max()) > 0.999 * radius


def test_rebasing_changes_nothing(monkeypatch):
    results = []
    for limit in (-16.0, -0.2):
        monkeypatch.setattr("bilevel_optim.rows.REBASE", limit)
        family = Family(m=12, noise=0.3)
        optimizer = bo.RSVRB(
            [family.x], [family.y], lr=0.02, lower_lr=0.05, beta=0.3, task_batch=2, generator=seeded(), lazy=True
        )
        rebased = 0
        for _ in range(80):
            optimizer.step(family.upper, family.lower, tasks=Sampler(family))
            rebased += float(optimizer._rows.now["log"].min()) == 0.0
        results.append(family.x.detach().clone())
        assert (rebased > 5) == (limit > -1)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-10)


def test_t3_the_direction_needs_independent_probes():
    """E[mean over probes of z_new] is the mean over all tasks if the probes do not know the sampled task."""
    g = seeded()
    m, z_old = 3, torch.randn(3, generator=g, dtype=torch.float64)
    z_new = torch.randn(3, 3, generator=g, dtype=torch.float64)  # row i: all z after data for task i
    independent = sum(z_new[i, j] - 0.5 * z_old[j] for i in range(m) for j in range(m)) / m**2
    tied = sum(z_new[i, i] - 0.5 * z_old[i] for i in range(m)) / m
    truth = float((z_new.mean(1) - 0.5 * z_old.mean()).mean())
    assert float(independent) == pytest.approx(truth, abs=1e-12)
    assert abs(tied - truth) > 0.1
    family = Family(m=50)
    optimizer = bo.RSVRB([family.x], [family.y], lr=0.1, lower_lr=0.1, probes=4000, generator=seeded())
    counts = optimizer._draw_probes(50).bincount(minlength=50).double()
    assert float(((counts - 80).square() / 80).sum()) < 49 + 4.5 * 98**0.5  # chi-squared with 49 degrees


@pytest.mark.parametrize(
    ("variant", "options", "bound"),
    [
        ("self_normalised", {"lr": 0.3, "lower_lr": 0.2}, 0.01),  # frozen iterates: no noise of the drawing is left
        ("exact_mean", {"lr": 0.05, "lower_lr": 0.2, "beta": 0.05}, 0.3),
        ("faithful", {"lr": 0.05, "lower_lr": 0.2, "beta": 0.05, "probes": 12}, 0.3),
        ("matrix_free", {"lr": 0.01, "lower_lr": 0.2, "beta": 0.2}, 0.5),
    ],
)
def test_converges_without_noise_of_the_data(variant, options, bound):
    """To the neighbourhood that the drawing of tasks makes; relative to the gradient at the start."""
    family = Family(m=4, d=2, p=2)
    optimizer = bo.RSVRB(
        [family.x], [family.y], task_batch=2, variant=variant, floor=0.25, generator=seeded(), **options
    )
    start, norms = family.gradient().norm(), []
    for _ in range(150):
        optimizer.step(family.upper, family.lower, tasks=Sampler(family))
        norms.append(float(family.gradient().norm() / start))
    assert sum(norms[-50:]) / 50 < bound


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "bound"), [("faithful", 0.08), ("exact_mean", 0.012), ("self_normalised", 0.012)])
def test_t22_convergence_on_the_noisy_family(variant, bound):
    """Settings of section 2.10; two replicas of 4,000 steps instead of sixteen of 10,000, by the law T^(-2/3)."""
    replicas, steps, means = 2, 4000, []
    for seed in range(replicas):
        family = Family(m=20, noise=0.3)
        with torch.no_grad():
            family.x += family.solution + 1 / 5**0.5
            family.y += family.lower_solutions()
        optimizer = bo.RSVRB(
            [family.x], [family.y], lr=0.1, lower_lr=1 / 12, task_batch=2, probes=2, variant=variant, beta=1.0,
            schedule="cube_root", floor=0.25, generator=seeded(seed),
        )  # fmt: skip
        squares = []
        for _ in range(steps):
            optimizer.step(family.upper, family.lower, tasks=Sampler(family))
            squares.append(float(family.gradient().square().sum()))
        means.append(sum(squares[int(0.4 * steps) :]) / (0.6 * steps))
    assert sum(means) / replicas < bound * (10_000 / steps) ** (2 / 3) * 1.5, means


def test_noise_of_the_data_is_averaged():
    """In the last third, the gradient of one short noisy run is far below that of its start and of plain estimates."""
    norms = {}
    for beta in (0.02, 1.0):
        family = Family(m=1, d=2, p=2, noise=1.0)
        optimizer = bo.SVRB([family.x], [family.y], lr=0.1, lower_lr=0.2, beta=beta, floor=0.25, generator=seeded())
        squares = []
        for _ in range(150):
            optimizer.step(family.upper, family.lower, tasks=Sampler(family))
            squares.append(float(family.gradient().square().sum()))
        norms[beta] = sum(squares[100:]) / 50
    assert norms[0.02] < norms[1.0] / 3


# ---------------------------------------------------------------------------------------------------- importance


def test_t20_importance_probabilities_minimise_the_factor_of_the_theory():
    A = torch.rand(30, generator=seeded(), dtype=torch.float64) ** 4 + 1e-3
    p = bo.importance_probabilities(A)
    best = float((A / p).sum())
    assert best == pytest.approx(float(A.sqrt().sum() ** 2), rel=1e-12)
    roots = A.sqrt()
    cv2 = float(roots.var(unbiased=False) / roots.mean() ** 2)
    assert 30 * float(A.sum()) / best == pytest.approx(1 + cv2, rel=1e-12)
    for seed in range(20):
        other = p * (1 + 0.1 * torch.rand(30, generator=seeded(seed), dtype=torch.float64))
        assert (A / (other / other.sum())).sum() >= best


@pytest.mark.parametrize("kind", ["given", "adaptive"])
def test_drawing_by_importance_is_unbiased(kind):
    """The mean of the scales over many draws is one for every task."""
    family = Family(m=6, scales=torch.tensor([0.1, 0.1, 0.5, 1.0, 2.0, 5.0], dtype=torch.float64))
    given = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    optimizer = bo.RSVRB(
        [family.x], [family.y], lr=0.0, lower_lr=0.0, task_batch=2, generator=seeded(),
        probabilities=given if kind == "given" else "adaptive",
    )  # fmt: skip
    for _ in range(2):
        optimizer.step(family.upper, family.lower, tasks=Sampler(family))
    p = optimizer._chances
    total, n = torch.zeros(6, dtype=torch.float64), 20_000
    for _ in range(n):
        ids, scale = optimizer._draw(Sampler(family), 6)
        total[ids] += scale
    error = (1 / (2 * p) / n).sqrt()  # standard deviation of a scale is below sqrt(1/(B p))
    assert bool(((total / n - 1).abs() < 4.5 * error).all())
    if kind == "adaptive":
        assert float(p[5] / p[0]) > 2
        assert float(p.min()) >= 0.2 / 6 - 1e-12


def test_a_failing_step_puts_adapted_probabilities_back():
    family = Family(m=4, d=2, p=2, scales=torch.tensor([0.3, 0.5, 1.0, 1.5], dtype=torch.float64))
    optimizer = bo.RSVRB(
        [family.x], [family.y], lr=0.1, lower_lr=0.1, task_batch=2, generator=seeded(), probabilities="adaptive"
    )
    sampler = Sampler(family)
    for _ in range(3):
        optimizer.step(family.upper, family.lower, tasks=sampler)
    before = optimizer._chances
    with pytest.raises(bo.NonFiniteError):  # this step adapts them
        optimizer.step(lambda b: family.upper(b) * float("nan"), family.lower, tasks=sampler)
    assert optimizer._chances is before
    optimizer.step(family.upper, family.lower, tasks=sampler)
    optimizer._draw(sampler, 4)
    torch.testing.assert_close(optimizer._cumulated[1], optimizer._chances.cumsum(0))
    assert optimizer._chances is not before


def test_importance_sampling_is_unbiased_for_the_fixed_point():
    family = Family(m=4, d=2, p=2, scales=torch.tensor([0.3, 0.5, 1.0, 1.5], dtype=torch.float64))
    optimizer = bo.RSVRB(
        [family.x], [family.y], lr=0.2, lower_lr=0.2, task_batch=2, variant="self_normalised", floor=0.25,
        generator=seeded(), probabilities="adaptive",
    )  # fmt: skip
    start = family.gradient().norm()
    for _ in range(150):
        optimizer.step(family.upper, family.lower, tasks=Sampler(family))
    assert float(family.gradient().norm() / start) < 0.01


# ---------------------------------------------------------------------------------------------------- special cases


def test_t16_compositions():
    """g = -y'h(x) + |y|^2/2: z at y = h(x) is the gradient of f(h(x))."""
    W = torch.randn(3, 4, generator=seeded(), dtype=torch.float64)
    x = torch.randn(4, generator=seeded(1), dtype=torch.float64).requires_grad_()
    y = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        y += (W @ x).tanh()
    optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.1, floor=0.5)
    optimizer.backward(lambda: y.pow(3).sum(), lambda: y.square().sum() / 2 - y @ (W @ x).tanh())
    (truth,) = torch.autograd.grad((W @ x).tanh().pow(3).sum(), x)
    torch.testing.assert_close(x.grad, truth, rtol=0, atol=1e-12)


def test_t17_personal_increments():
    g = seeded()
    A, b, c = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((4, 4), (4,), (4,)))
    A = A @ A.T + torch.eye(4)
    x = torch.randn(4, generator=g, dtype=torch.float64).requires_grad_()
    lam = 0.7

    def adapted(x):
        return -torch.linalg.solve(A + lam * torch.eye(4, dtype=torch.float64), A @ x - b)

    y = adapted(x.detach()).requires_grad_()
    optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.1, floor=0.5)

    def inner():
        return (x + y) @ A @ (x + y) / 2 - b @ (x + y) + lam / 2 * y.square().sum()

    optimizer.backward(lambda: (x + y - c).square().sum() / 2, inner)
    (truth,) = torch.autograd.grad((x + adapted(x) - c).square().sum() / 2, x)
    torch.testing.assert_close(x.grad, truth, rtol=0, atol=1e-12)


def test_t18_minimax():
    """g = -f: at y* the implicit term vanishes, whatever V and H are."""
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()

    def f():
        return x.pow(4).sum() / 4 + x @ y - y.square().sum() / 2

    optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.1, floor=0.5)
    optimizer.backward(f, lambda: -f())
    torch.testing.assert_close(x.grad, x.detach() ** 3 + y.detach(), rtol=0, atol=1e-14)


# ---------------------------------------------------------------------------------------------------- matrix-free


def test_matrix_free_is_its_recursion():
    family = Family(m=1, noise=1.0)
    family.y = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    noises = [torch.randn(1, family.width, generator=seeded(k), dtype=torch.float64) * 0.3 for k in range(40)]
    index, betas, lr, rate, tau = torch.tensor([[0]]), {"w": 0.3, "s": 0.2, "d": 0.15}, 0.05, 0.1, 0.7
    upper = bo.Objective(lambda e: family.upper((index, e)), Stream(noises))
    lower = bo.Objective(lambda e: family.lower((index, e)), Stream(noises))
    optimizer = bo.SVRB([family.x], [family.y], lr=lr, lower_lr=rate, averaging=tau, beta=betas, variant="matrix_free")
    x, y, r = (torch.zeros(n, dtype=torch.float64) for n in (5, 4, 4))
    last = None
    for e in noises:
        optimizer.step(upper, lower)
        new = derivatives(family, 0, x, y, e)
        if last is None:
            r = rate * new["v"]
        s_new, q_new = new["H"] @ r - new["v"], new["u"] - new["V"] @ r
        if last is None:
            w, s, d = new["w"], s_new, q_new
        else:
            old = derivatives(family, 0, last[0], last[1], e)
            s_old, q_old = old["H"] @ last[2] - old["v"], old["u"] - old["V"] @ last[2]
            w = (1 - betas["w"]) * (w - old["w"]) + new["w"]
            s = (1 - betas["s"]) * (s - s_old) + s_new
            d = (1 - betas["d"]) * (d - q_old) + q_new
        last = x, y, r
        x, y, r = x - lr * d, y - tau * rate * w, r - tau * rate * s
        torch.testing.assert_close(family.x.detach(), x, rtol=0, atol=1e-11)
        torch.testing.assert_close(family.y.detach(), y, rtol=0, atol=1e-11)
    assert optimizer.oracle_counts == {
        "upper_grad": 2 * 40, "lower_grad": 2 * 40, "hvp": 2 * 40, "jvp": 2 * 40, "loss": 0,
    }  # fmt: skip


@pytest.mark.parametrize("lazy", [True, False])
def test_matrix_free_rows_left_behind_catch_up_exactly(lazy):
    m, steps, tau, lr, rate = 8, 50, 0.6, 0.02, 0.05
    family = Family(m=m, noise=0.3)
    g = seeded(5)
    draws = [torch.randperm(m, generator=g)[:2].tolist() for _ in range(steps)]
    noises = [0.3 * torch.randn(m, 1, family.width, generator=g, dtype=torch.float64) for _ in range(steps + 1)]
    betas = {"w": 0.05, "s": 0.08, "d": 0.1}

    given = Given(draws, noises)
    optimizer = bo.RSVRB(
        [family.x], [family.y], lr=lr, lower_lr=rate, averaging=tau, beta=betas, beta_unit="absolute", task_batch=2,
        variant="matrix_free", lazy=lazy,
    )  # fmt: skip
    x, y, r = torch.zeros(5).double(), list(torch.zeros(m, 4).double()), list(torch.zeros(m, 4).double())
    first = [derivatives(family, i, x, y[i], noises[0][i]) for i in range(m)]
    r = [rate * t["v"] for t in first]
    w, s = [t["w"] for t in first], [t["H"] @ r[i] - t["v"] for i, t in enumerate(first)]
    d = sum(t["u"] - t["V"] @ r[i] for i, t in enumerate(first)) / m
    last = None
    for S, e in zip([[], *draws], noises, strict=True):
        optimizer.step(family.upper, family.lower, tasks=given)
        given.step += 1
        q_new, q_old, before = 0, 0, (x, list(y), list(r))
        for i in range(m):
            if last is None:
                break
            w[i], s[i] = (1 - betas["w"]) * w[i], (1 - betas["s"]) * s[i]
            if i in S:
                new, old = derivatives(family, i, x, y[i], e[i]), derivatives(family, i, last[0], last[1][i], e[i])
                a, s_old = m / 2, old["H"] @ last[2][i] - old["v"]
                w[i] = w[i] + a * (new["w"] - (1 - betas["w"]) * old["w"])
                s[i] = s[i] + a * (new["H"] @ r[i] - new["v"] - (1 - betas["s"]) * s_old)
                q_new = q_new + (new["u"] - new["V"] @ r[i]) / 2
                q_old = q_old + (old["u"] - old["V"] @ last[2][i]) / 2
        if last is not None:
            d = (1 - betas["d"]) * (d - q_old) + q_new
        last, x = before, x - lr * d
        y, r = [y[i] - tau * rate * w[i] for i in range(m)], [r[i] - tau * rate * s[i] for i in range(m)]
        torch.testing.assert_close(family.x.detach(), x, rtol=0, atol=1e-11)
    optimizer.catch_up()
    torch.testing.assert_close(family.y.detach(), torch.stack(y), rtol=0, atol=1e-11)
    assert optimizer.oracle_counts["hvp"] == 2 * m + steps * 4


# ---------------------------------------------------------------------------------------------------- kin


def test_t21_stable_is_svrb_with_plain_first_derivatives_and_lower_steps_that_follow():
    family = Family(m=1, noise=1.0)
    family.y = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    noises = [torch.randn(1, family.width, generator=seeded(k), dtype=torch.float64) * 0.3 for k in range(30)]
    index = torch.tensor([[0]])
    upper = bo.Objective(lambda e: family.upper((index, e)), Stream(noises))
    lower = bo.Objective(lambda e: family.lower((index, e)), Stream(noises))
    optimizer = bo.STABLE([family.x], [family.y], lr=0.05, lower_lr=0.1, beta=0.2, floor=0.3)
    x, y = (torch.zeros(n, dtype=torch.float64) for n in (5, 4))
    last = None
    for e in noises:
        optimizer.step(upper, lower)
        new = derivatives(family, 0, x, y, e)
        if last is None:
            V, H = new["V"], new["H"]
        else:
            old = derivatives(family, 0, *last, e)
            V, H = (0.8 * (t - old[k]) + new[k] for t, k in ((V, "V"), (H, "H")))
        H = floored(H, 0.3)
        last = x, y
        x = x - 0.05 * (new["u"] - V @ torch.linalg.solve(H, new["v"]))
        y = y - 0.1 * new["w"] - torch.linalg.solve(H, V.T @ (x - last[0]))
        torch.testing.assert_close(family.x.detach(), x, rtol=0, atol=1e-11)
        torch.testing.assert_close(family.y.detach(), y, rtol=0, atol=1e-11)


def test_stable_keeps_y_at_the_solution_that_moves():
    """Without noise, and starting at y*(x), the last term alone follows y*(x): it is affine here."""
    family = Family(m=3)
    with torch.no_grad():
        family.y.copy_(family.lower_solutions())
    optimizer = bo.STABLE([family.x], [family.y], lr=0.3, lower_lr=0.0, floor=0.1)
    for _ in range(60):
        optimizer.step(family.upper, family.lower, tasks=Sampler(family))
        torch.testing.assert_close(family.y.detach(), family.lower_solutions(), rtol=0, atol=1e-10)
    assert float(family.gradient().norm()) < 1e-2


@pytest.mark.parametrize("version", [1, 2])
def test_bsvrb_is_its_recursion_and_other_rows_rest(version):
    m, steps = 6, 40
    family = Family(m=m, noise=0.3)
    g = seeded(5)
    draws = [torch.randperm(m, generator=g)[:2].tolist() for _ in range(steps)]
    noises = [0.3 * torch.randn(m, 1, family.width, generator=g, dtype=torch.float64) for _ in range(steps + 1)]
    betas = {"w": 0.3, "d": 0.2, **({"H": 0.25} if version == 1 else {"s": 0.25})}
    lr, rate, share = 0.03, 0.1, 2 / m

    def mixed(X, new, old, alpha):
        c = 1 - alpha + (1 - share) / (share * (1 - alpha))
        return (1 - alpha) * X + alpha * new + c * (new - old)

    given = Given(draws, noises)
    optimizer = bo.BSVRB(
        [family.x], [family.y], lr=lr, lower_lr=rate, version=version, beta=betas, floor=0.3, task_batch=2
    )
    x = torch.zeros(5, dtype=torch.float64)
    y = [torch.zeros(4, dtype=torch.float64) for _ in range(m)]
    r = [torch.zeros(4, dtype=torch.float64) for _ in range(m)]
    first = [derivatives(family, i, x, y[i], noises[0][i]) for i in range(m)]
    w, H = [t["w"] for t in first], [floored(t["H"], 0.3) for t in first]
    if version == 1:
        q = [t["u"] - t["V"] @ torch.linalg.solve(h, t["v"]) for t, h in zip(first, H, strict=True)]
        s = [torch.zeros(4, dtype=torch.float64)] * m
    else:
        r = [rate * t["v"] for t in first]
        q = [t["u"] - t["V"] @ a for t, a in zip(first, r, strict=True)]
        s = [t["H"] @ a - t["v"] for t, a in zip(first, r, strict=True)]
    d = sum(q) / m
    optimizer.step(family.upper, family.lower, tasks=given)
    last = x, list(y), list(r)
    x, y, r = x - lr * d, [y[i] - rate * w[i] for i in range(m)], [r[i] - rate * s[i] for i in range(m)]
    for S, e in zip(draws, noises[1:], strict=True):
        given.step += 1
        optimizer.step(family.upper, family.lower, tasks=given)
        q_new, q_old, before = 0, 0, (x, list(y), list(r))
        for i in S:
            new, old = derivatives(family, i, x, y[i], e[i]), derivatives(family, i, last[0], last[1][i], e[i])
            w[i] = mixed(w[i], new["w"], old["w"], betas["w"])
            if version == 1:
                q_old = q_old + (old["u"] - old["V"] @ torch.linalg.solve(H[i], old["v"])) / 2
                H[i] = floored(mixed(H[i], new["H"], old["H"], betas["H"]), 0.3)
                q_new = q_new + (new["u"] - new["V"] @ torch.linalg.solve(H[i], new["v"])) / 2
            else:
                q_old = q_old + (old["u"] - old["V"] @ last[2][i]) / 2
                q_new = q_new + (new["u"] - new["V"] @ r[i]) / 2
                s[i] = mixed(s[i], new["H"] @ r[i] - new["v"], old["H"] @ last[2][i] - old["v"], betas["s"])
                r[i] = r[i] - rate * s[i]
            y[i] = y[i] - rate * w[i]
        d = (1 - betas["d"]) * (d - q_old) + q_new
        last, x = before, x - lr * d
        torch.testing.assert_close(family.x.detach(), x, rtol=0, atol=1e-10)
        torch.testing.assert_close(family.y.detach(), torch.stack(y), rtol=0, atol=1e-10)


@pytest.mark.parametrize("version", [1, 2])
def test_bsvrb_converges_without_noise_of_the_data(version):
    family = Family(m=4, d=2, p=2)
    optimizer = bo.BSVRB(
        [family.x],
        [family.y],
        lr=0.02,
        lower_lr=0.2,
        version=version,
        floor=0.25,
        beta={"d": 0.02},
        task_batch=2,
        generator=seeded(),
    )
    start, norms = family.gradient().norm(), []
    for _ in range(150):
        optimizer.step(family.upper, family.lower, tasks=Sampler(family))
        norms.append(float(family.gradient().norm() / start))
    assert sum(norms[-50:]) / 50 < 0.3  # what is left is noise of the drawing of tasks


# ---------------------------------------------------------------------------------------------------- state, samples


@pytest.mark.parametrize("variant", ["exact_mean", "faithful", "self_normalised", "matrix_free"])
def test_t24_resumes_bit_for_bit_with_rows_left_behind(variant):
    def made(family, seed):
        return bo.RSVRB(
            [family.x], [family.y], lr=0.02, lower_lr=0.05, task_batch=3, variant=variant, generator=seeded(seed),
            lazy=True, probabilities="adaptive",
        )  # fmt: skip

    family = Family(m=12, noise=0.3)
    optimizer, sampler = made(family, 0), Sampler(family)
    for _ in range(20):
        optimizer.step(family.upper, family.lower, tasks=sampler)
    buffer = io.BytesIO()
    torch.save((optimizer.state_dict(), family.x.detach(), family.y.detach()), buffer)
    for _ in range(50):
        optimizer.step(family.upper, family.lower, tasks=sampler)
    buffer.seek(0)
    state, x, y = torch.load(buffer, weights_only=True)
    other = Family(m=12, noise=0.3)
    with torch.no_grad():
        other.x.copy_(x)
        other.y.copy_(y)
    again = made(other, 99)
    again.load_state_dict(state)
    assert (again._stored["age"] < again._stored["clock"]).any()  # some rows are behind
    for _ in range(50):
        again.step(other.upper, other.lower, tasks=Sampler(other))
    assert torch.equal(other.x, family.x)
    assert torch.equal(other.y, family.y)
    assert again.oracle_counts == optimizer.oracle_counts


def test_t25_both_points_see_one_sample_and_one_dropout_mask():
    seen = []
    family = Family(m=6, noise=0.3)
    mask = torch.nn.Dropout(0.5)

    def lower(batch):
        kept = mask(torch.ones(4, dtype=torch.float64))
        seen.append((batch[0].clone(), kept.clone()))
        return family.lower(batch) + (kept * family.y.square()).sum()

    optimizer = bo.RSVRB(
        [family.x], [family.y], lr=0.1, lower_lr=0.1, task_batch=1, generator=seeded(), vectorize=False
    )
    sampler = Sampler(family)
    optimizer.step(family.upper, lower, tasks=sampler)
    for _ in range(5):
        seen.clear()
        optimizer.step(family.upper, lower, tasks=sampler)
        assert len(seen) == 2
        assert torch.equal(seen[0][0], seen[1][0])
        assert torch.equal(seen[0][1], seen[1][1])


def test_a_failing_step_changes_nothing():
    family = Family(m=8, noise=0.1)
    optimizer = bo.RSVRB([family.x], [family.y], lr=0.1, lower_lr=0.1, task_batch=3, generator=seeded())
    sampler = Sampler(family)
    for _ in range(5):
        optimizer.step(family.upper, family.lower, tasks=sampler)
    before = copy.deepcopy((optimizer.state_dict(), family.x.detach(), family.y.detach()))
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(lambda b: family.upper(b) * float("nan"), family.lower, tasks=sampler)

    def broken(batch):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step(family.upper, broken, tasks=sampler)
    after = (optimizer.state_dict(), family.x.detach(), family.y.detach())
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])
    old, new = before[0]["bilevel"], after[0]["bilevel"]
    assert old["oracle_counts"] == new["oracle_counts"]
    assert torch.equal(old["generator"], new["generator"])
    for name, value in old["recursion"]["rows"]["values"].items():
        assert torch.equal(value, new["recursion"]["rows"]["values"][name])


def test_rows_of_another_number_of_tasks_are_refused():
    family = Family(m=8)
    optimizer = bo.RSVRB([family.x], [family.y], lr=0.1, lower_lr=0.1)
    with pytest.raises(ValueError, match=r"one row for each of the 5 tasks, but have shapes 0 \(8, 4\)"):
        optimizer.step(family.upper, family.lower, tasks=Sampler(Family(m=5)))
    optimizer = bo.RSVRB([family.x], [family.y], lr=0.1, lower_lr=0.1, probabilities=[0.5, 0.5])
    optimizer.step(family.upper, family.lower, tasks=Sampler(family))
    with pytest.raises(ValueError, match="2 probabilities for 8 tasks"):
        optimizer.step(family.upper, family.lower, tasks=Sampler(family))


def test_two_groups_have_their_own_lower_learning_rates_also_when_behind():
    results = []
    for lazy in (True, False):
        m = 9
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        a = torch.zeros(m, 2, dtype=torch.float64, requires_grad=True)
        b = torch.zeros(m, 3, 1, dtype=torch.float64, requires_grad=True)
        data = torch.randn(m, 4, 5, generator=seeded(), dtype=torch.float64)

        def lower(rows, x=x, a=a, b=b):
            target = rows.mean(0)
            return (a - x * target[:2]).square().sum() + (b.flatten() - target[2:] * x[0]).square().sum()

        def upper(rows, a=a, b=b):
            return (a - 1).square().sum() + b.square().sum()

        optimizer = bo.RSVRB(
            [x], [{"params": [a]}, {"params": [b], "lr": 0.01}], lr=0.05, lower_lr=0.03, task_batch=2,
            generator=seeded(), lazy=lazy,
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        for _ in range(40):
            optimizer.step(upper, lower, tasks=bo.TensorTasks(data))
            scheduler.step()
        optimizer.catch_up()
        results.append([t.detach().clone() for t in (x, a, b)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_restarts_shrink_steps_and_weights():
    family = Family(m=4)
    optimizer = bo.RSVRB([family.x], [family.y], lr=0.1, lower_lr=0.1, restarts=10, task_batch=2)
    paces = [optimizer._pace(step) for step in (0, 9, 10, 29, 30, 69, 70)]
    assert paces == pytest.approx([1, 1, 2**-0.5, 2**-0.5, 0.5, 0.5, 2**-1.5])
    optimizer._steps_done = 30
    assert optimizer._betas(4)["u"] == pytest.approx(0.1 * 0.5 * 0.25)


def test_a_loud_beta_is_told():
    family = Family(m=20)
    optimizer = bo.RSVRB([family.x], [family.y], lr=0.01, lower_lr=0.01, beta=1.0, task_batch=2, generator=seeded())
    for _ in range(101):
        optimizer.step(family.upper, family.lower, tasks=Sampler(family))
    with pytest.warns(bo.BilevelWarning, match="drawing of tasks"):
        optimizer.step(family.upper, family.lower, tasks=Sampler(family))


def test_rows_live_on_another_device_type_and_in_double():
    """Trackers of half-precision parameters are kept in single precision."""
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    y = torch.zeros(5, 1, dtype=torch.bfloat16, requires_grad=True)
    data = torch.linspace(-1, 1, 5, dtype=torch.bfloat16).view(5, 1, 1)
    optimizer = bo.RSVRB([x], [y], lr=0.01, lower_lr=0.1, task_batch=2, state_device="cpu", generator=seeded())
    for _ in range(5):
        optimizer.step(
            lambda r: (y - 1).square().sum(), lambda r: (y - x - r[0]).square().sum(), tasks=bo.TensorTasks(data)
        )
    assert all(t.dtype == torch.float32 for t in optimizer._rows.values.values())
    assert isinstance(optimizer._rows, Rows)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (bo.RSVRB, {"task_batch": 0}, "Invalid task_batch value: 0"),
        (bo.RSVRB, {"probes": 0}, "Invalid probes value: 0"),
        (bo.RSVRB, {"probabilities": "best"}, "Invalid probabilities value: best"),
        (bo.RSVRB, {"probabilities": [0.5, 0.0]}, r"Invalid probabilities value: \[0.5, 0.0\]"),
        (bo.RSVRB, {"beta": {"u": 0.1, "V": 0.2}}, "needs equal weights"),
        (bo.RSVRB, {"variant": "blocks"}, "Invalid variant value: blocks"),
        (bo.RSVRB, {"variant": "matrix_free", "ceilings": {"V": 1.0}}, "Invalid ceilings value"),
        (bo.BSVRB, {"ceilings": {"V": 1.0}}, "Invalid ceilings value"),
        (bo.BSVRB, {"version": 3}, "Invalid version value: 3"),
        (bo.BSVRB, {"beta": 1.0}, "Invalid beta value: 1.0"),
        (bo.SVRB, {"lower_optimizer": torch.optim.Adam}, "the lower steps are part of the recursion"),
        (bo.STABLE, {"beta": -1.0}, "Invalid beta value: -1.0"),
    ],
)
def test_bad_arguments(cls, arguments, message):
    family = Family(m=2)
    with pytest.raises(ValueError, match=message):
        cls([family.x], [family.y], **{"lr": 0.1, "lower_lr": 0.1, **arguments})

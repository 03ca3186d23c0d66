"""What variance-reduced methods are made of: projections and recursions (T2, T7 to T11, T15), points, rows."""

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.hypergradient import storm
from bilevel_optim.hypergradient.recursive import Points, matrices
from bilevel_optim.methods.tracked import rows

from ..methods.test_tracked import Family
from ..problems import close, seeded

# ---------------------------------------------------------------------------------------------------- projections


def test_t10_floor_is_by_eigenvalues_not_singular_values():
    value, active = storm.floor(torch.diag(torch.tensor([1.0, -0.5])).unsqueeze(0), 0.1)
    torch.testing.assert_close(value[0], torch.diag(torch.tensor([1.0, 0.1])))
    assert int(active) == 1
    value, active = storm.floor(torch.eye(2).unsqueeze(0), 0.1)
    assert int(active) == 0
    assert torch.equal(value[0], torch.eye(2))


def test_t11_flooring_after_each_shrinking_is_flooring_once():
    H = torch.randn(6, 4, 4, generator=seeded())
    often = H = H @ H.mT + H + H.mT
    factors = torch.rand(30, generator=seeded(1)) * 0.2 + 0.8
    for c in factors:
        often = storm.floor(c * often, 0.1).value
    close(often, storm.floor(factors.prod() * H, 0.1).value, 1e-12)


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 3, 7)])
def test_t15_ceiling_is_the_clamp_of_singular_values(shape):
    V = torch.randn(*shape, generator=seeded())
    V[0] *= 0.01
    left, values, right = torch.linalg.svd(V, full_matrices=False)
    result, active = storm.ceiling(V, 1.5)
    close(result, left @ torch.diag_embed(values.clamp_max(1.5)) @ right, 1e-10)
    assert int(active) == int((values.amax(-1) > 1.5).sum())
    assert torch.equal(result[0], V[0])


def test_ball_leaves_the_inside_alone():
    value, active = storm.ball(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]), 1.0)
    torch.testing.assert_close(value, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert int(active) == 1


# ---------------------------------------------------------------------------------------------------- recursions


def test_t2_random_rows_take_a_storm_step_in_expectation():
    (X, new, old), p = torch.randn(3, 4, 3, generator=seeded()), torch.tensor([0.1, 0.2, 0.3, 0.4])
    mean = sum(p[i] * storm.storm(X, new, old, 0.3, torch.eye(4)[i] / p) for i in range(4))
    close(mean, 0.7 * (X - old) + new, 1e-12)


@pytest.mark.parametrize(("p", "beta"), [(0.01, 0.05), (0.05, 0.05), (0.01, 0.005), (0.9, 0.1)])
def test_t7_drawing_tasks_alone_makes_noise(p, beta):
    steps, chains, late = 4000, 400, []
    hit, s, one = torch.rand(steps, chains, generator=seeded()) < p, torch.ones(chains), torch.ones(chains)
    for t in range(steps):
        s = storm.storm(s, one, one, beta, hit[t] / p)
        if t >= steps // 3:
            late.append(s)
    late = torch.stack(late)
    # 400 independent chains: standard error of the mean and of the variance are within these bounds.
    assert late.mean() == pytest.approx(1.0, abs=0.03)
    assert late.var() == pytest.approx(beta * (1 - p) / (p * (2 - beta)), rel=0.06)


@pytest.mark.parametrize("beta", [0.02, 0.1, 0.5])
def test_t8_noise_of_storm_does_not_depend_on_the_speed(beta):
    g, chains, steps, errors = seeded(), 2000, 1200, []
    X = torch.zeros(chains)
    for t in range(1, steps):
        noise = torch.randn(chains, generator=g)
        X = storm.storm(X, 3.0 * t + noise, 3.0 * (t - 1) + noise, beta)
        if t > steps // 2:
            errors.append((X - 3.0 * t).square().mean())
    assert torch.stack(errors).mean() == pytest.approx(beta / (2 - beta), rel=0.03)


def test_t9_error_recursion_of_storm():
    g, chains, beta = seeded(), 4000, 0.2
    e, X = torch.zeros(chains), torch.randn(chains, generator=g)
    for _ in range(20):  # h(e; s) = (1 + s) e, with noise of 0.5 on the slope
        before, step = (X - e).square(), 0.3 * torch.randn(chains, generator=g)
        slope = 1 + 0.5 * torch.randn(chains, generator=g)
        new = storm.storm(X, slope * (e + step), slope * e, beta)
        bound = (1 - beta) * before + 2 * beta**2 * 0.25 * (e + step).square() + 2 * 1.25 * step.square()
        gap = (new - e - step).square() - bound
        assert gap.mean() <= 3 * gap.std() / chains**0.5
        X, e = new, e + step


def test_msvr_on_a_line_has_the_mean_of_its_recursion():
    """Its c takes the movement out of the squared error to first order; the mean has a lag of known size."""
    q, alpha, chains = 0.2, 0.1, 20000
    X = torch.zeros(chains)
    for t in range(1, 300):
        hit = torch.rand(chains, generator=seeded(t)) < q
        new = storm.msvr(X, torch.full_like(X, float(t)), torch.full_like(X, float(t - 1)), alpha, q)
        X = torch.where(hit, new, X)
    # l = E[X - t] solves l = (1 - q)(l - 1) + q((1 - alpha)(l - 1) + c - 1 + alpha + 1 - alpha).
    c = 1 - alpha + (1 - q) / (q * (1 - alpha))
    lag = (q * (c - 1 + alpha) - (1 - q)) / (q * alpha)
    assert float((X - 299).mean()) == pytest.approx(lag, abs=4.5 * float(X.std()) / chains**0.5)


# ---------------------------------------------------------------------------------------------------- points, rows


@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"hvp": "finite-difference"}], ids=str)
def test_points_give_every_derivative_of_every_task(options):
    family, ids = Family(6, noise=0.2), torch.tensor([4, 1, 5])
    x, y = torch.randn(5, generator=seeded(1)), torch.randn(3, 4, generator=seeded(2))
    batch = family.tasks.lower(ids, None, seeded(3))

    class Draws:
        def batch(self, level):
            return batch

    optimizer = bo.SVRB(family.x, family.y, lr=0.1, lower_lr=0.1, **options)
    points = Points(optimizer._oracle(family.upper, family.lower), Draws(), x * 0, y * 0, apart=True)
    with points.at(x, y):
        _, found = matrices(points)
    for k, i in enumerate(ids.tolist()):
        for name, truth in family.derivatives(i, x, y[k], batch[1][k]).items():
            close(found[name][k], truth, 1e-8 if "hvp" in options else 1e-12)
    assert tuple(optimizer.oracle_counts.values()) == (3, 3, 12, 12, 0)


def test_rebasing_changes_nothing(monkeypatch):
    results = []
    for limit in (-16.0, -0.2):
        monkeypatch.setattr(rows, "REBASE", limit)
        family, rebased = Family(12, noise=0.3), 0
        optimizer = bo.RSVRB(family.x, family.y, lr=0.02, lower_lr=0.05, beta=0.3, task_batch=2, generator=seeded(),
                             lazy=True)  # fmt: skip
        for _ in range(40):
            family.run(optimizer)
            rebased += float(optimizer._rows.now["log"].min()) == 0.0
        results.append(family.x[0].detach().clone())
        assert (rebased > 3) == (limit > -1)
    close(results[0], results[1], 1e-10)


def test_rows_of_half_precision_are_kept_in_single():
    x, y = torch.ones(1, dtype=torch.bfloat16), torch.zeros(5, 1, dtype=torch.bfloat16)
    data = torch.linspace(-1, 1, 5, dtype=torch.bfloat16).view(5, 1, 1)
    optimizer = bo.RSVRB([x.requires_grad_()], [y.requires_grad_()], lr=0.01, lower_lr=0.1, task_batch=2,
                         state_device="cpu", generator=seeded())  # fmt: skip
    for _ in range(5):
        optimizer.step(
            lambda r: (y - 1).square().sum(), lambda r: (y - x - r[0]).square().sum(), tasks=bo.TensorTasks(data)
        )
    assert all(t.dtype == torch.float32 for t in optimizer._rows.values.values())

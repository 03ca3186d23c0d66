"""Parts of variance-reduced methods: projections and recursions (T2, T7 to T11, T15), points, rows."""

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.hypergradient import storm
from bilevel_optim.hypergradient.recursive import Points, matrices, products
from bilevel_optim.methods.tracked import rows
from bilevel_optim.oracle.session import EvaluationOptions, Session

from ..methods.test_tracked import Family
from ..problems import seeded

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
    torch.testing.assert_close(often, storm.floor(factors.prod() * H, 0.1).value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 3, 7)])
def test_t15_ceiling_is_the_clamp_of_singular_values(shape):
    V = torch.randn(*shape, generator=seeded())
    V[0] *= 0.01
    left, values, right = torch.linalg.svd(V, full_matrices=False)
    result, active = storm.ceiling(V, 1.5)
    torch.testing.assert_close(result, left @ torch.diag_embed(values.clamp_max(1.5)) @ right, rtol=0, atol=1e-10)
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
    torch.testing.assert_close(mean, 0.7 * (X - old) + new, rtol=0, atol=1e-12)


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


class Draws:
    """The same batches whenever they are asked for."""

    def __init__(self, batch):
        self.same = batch

    def batch(self, level):
        return self.same


def measured(options, apart, weights=None):
    """A family, three of its tasks with their noise, and their points, made elsewhere than the point measured."""
    family, ids = Family(6, noise=0.2), torch.tensor([4, 1, 5])
    x, y = torch.randn(5, generator=seeded(1)), torch.randn(3, 4, generator=seeded(2))
    batch = family.tasks.lower(ids, None, seeded(3))
    oracle = bo.Oracle(family.x, family.y, family.upper, family.lower, session=Session(EvaluationOptions(**options)))
    points = Points(oracle, Draws(batch).batch, x * 0, y * 0, apart=apart, weights=weights)
    truths = [family.derivatives(i, x, y[k], batch[1][k]) for k, i in enumerate(ids.tolist())]
    return points, x, y, truths, oracle.session.counts


every_way = pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"hvp": "finite-difference"}], ids=str)


@every_way
def test_points_give_every_derivative_of_every_task(options):
    points, x, y, truths, counts = measured(options, apart=True)
    _, found = matrices(points, x, y)
    for k, truth in enumerate(truths):
        for name, value in truth.items():
            torch.testing.assert_close(found[name][k], value, rtol=0, atol=1e-8 if "hvp" in options else 1e-12)
    assert tuple(counts.values()) == (3, 3, 12, 12, 0)


@every_way
def test_products_are_those_of_the_matrices(options):
    """Compare each task's tracked vectors, and the weighted sum of u - V r."""
    weights = torch.tensor([0.5, 2.0, 1.0])
    points, x, y, truths, counts = measured(options, apart=False, weights=weights)
    r, tolerance = torch.randn(3, 4, generator=seeded(4)), 1e-8 if "hvp" in options else 1e-12
    _, direction, found = products(points, x, y, r)
    expected = sum(w * (t["u"] - t["V"] @ r_k) for w, t, r_k in zip(weights, truths, r, strict=True))
    torch.testing.assert_close(direction, expected, rtol=0, atol=tolerance)
    for k, truth in enumerate(truths):
        torch.testing.assert_close(found["w"][k], truth["w"], rtol=0, atol=tolerance)
        torch.testing.assert_close(found["s"][k], truth["H"] @ r[k] - truth["v"], rtol=0, atol=tolerance)
    assert tuple(counts.values()) == (3, 3, 3, 3, 0)


def test_rebasing_changes_nothing(monkeypatch):
    results = []
    for limit in (-16.0, -0.2):
        monkeypatch.setattr(rows, "REBASE", limit)
        family, rebased = Family(12, noise=0.3), 0
        optimizer = bo.RSVRB(family.x, family.y, lr=0.02, lower_lr=0.05, beta=0.3, task_batch=2, generator=seeded(),
                             lazy=True)  # fmt: skip
        for _ in range(40):
            family.run(optimizer)
            rebased += not optimizer.numbers["clock"][1:].any()
        results.append(family.x[0].detach().clone())
        assert (rebased > 3) == (limit > -1)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-10)


def test_rows_of_half_precision_are_kept_in_single():
    x, y = torch.ones(1, dtype=torch.bfloat16), torch.zeros(5, 1, dtype=torch.bfloat16)
    data = torch.linspace(-1, 1, 5, dtype=torch.bfloat16).view(5, 1, 1)
    optimizer = bo.RSVRB([x.requires_grad_()], [y.requires_grad_()], lr=0.01, lower_lr=0.1, task_batch=2,
                         state_device="cpu", generator=seeded())  # fmt: skip
    for _ in range(5):
        optimizer.step(
            lambda r: (y - 1).square().sum(), lambda r: (y - x - r[0]).square().sum(), tasks=bo.TensorTasks(data)
        )
    kept = {name: t for name, t in optimizer.state[y].items() if name.startswith("rows.")}
    single = {name for name, t in kept.items() if t.dtype == torch.float32}
    assert single == kept.keys() - {f"rows.{name}" for name in rows.STAMPS}
    assert {f"rows.{name}" for name in ("u", "v", "w", "V", "H", "y_last")} <= single


@pytest.mark.parametrize("shape", [(4, 3, 3), (4, 2, 3), (4, 3, 2)])
def test_projections_in_a_graph_are_the_same(shape):
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(shape, generator=generator, dtype=torch.float64)
    matrices[0] = 0.1 * torch.eye(*shape[1:])  # in one of both sets

    def projected(m):
        found = [storm.ceiling(m, 1.0)] + ([storm.floor(m, 0.05)] if shape[1] == shape[2] else [])
        return [part for one in found for part in one]

    graph = torch.compile(projected, backend="eager", fullgraph=True)
    other = matrices.flip(0).contiguous()
    for values in (matrices, other):
        expected, found = projected(values), graph(values)
        assert 0 < int(expected[1]) < len(values)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

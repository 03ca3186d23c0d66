"""Levels, coupled lower solves of contexts, and the multilevel estimate context by context."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import bilevel_optim as bo
from bilevel_optim.hypergradient.multilevel import multilevel, smoothness
from bilevel_optim.problem.random import Counters
from bilevel_optim.solvers.contexts import (
    CROSS,
    NEUMANN,
    PATH,
    TRUNCATION,
    UPPER,
    Contexts,
    coupled_path,
    draw_levels,
    level_probabilities,
)

from ..problems import P0, P1, Given, close, z_scores


def contexts_of(problem, count, seed=0, rows=1):
    return Contexts(problem.tasks, count, seed, lower_batch=rows, upper_batch=rows)


def path_of(problem, contexts, depths, beta=1.0, cap=1.0, **options):
    start = bo.Vector([torch.zeros(len(depths), *problem.y[0].shape)])
    return coupled_path(oracle_of(problem), contexts, start, depths, lambda e: [min(beta * 2.0**-e, cap)], **options)


def oracle_of(problem):
    return bo.Oracle(problem.x, problem.y, problem.upper, problem.lower)


# ---------------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize("base", [0, 1, 3])
@pytest.mark.parametrize("levels", [4, 7, 12])
def test_level_probabilities(levels, base):
    p = level_probabilities(levels, base)
    assert len(p) == levels - base
    assert abs(float(p.sum()) - 1) < 1e-12
    close(p[:-1] / p[1:], torch.full((len(p) - 1,), 2.0), 0, 1e-12)


@pytest.mark.parametrize("systematic", [True, False])
@pytest.mark.parametrize("base", [0, 2])
def test_levels_are_drawn_with_their_probabilities(systematic, base):
    def chi(n, runs, pick):
        drawn = torch.tensor([pick(draw_levels(n, 6, base, Counters(s), systematic=systematic)) for s in range(runs)])
        counts = drawn.flatten().bincount(minlength=7)
        assert counts[: base + 1].sum() == 0
        expected = level_probabilities(6, base) * counts.sum()
        return float(((counts[base + 1 :] - expected) ** 2 / expected).sum())

    freedom = 5 - base
    assert chi(1000, 100, lambda levels: levels) < (1 if systematic else freedom + 5 * (2 * freedom) ** 0.5 + 10)
    if systematic:  # hardly any variation; the order is random, so that any slot is like any other
        assert chi(1, 3000, lambda levels: levels[0]) < 30
        assert chi(64, 3000, lambda levels: levels[0]) < 30


@pytest.mark.parametrize("levels", [1, 6, 8, 12, 20])
def test_expected_cost(levels):
    """Sections 2.9: exact expectation of the step count, with and without the last steps that nobody needs."""
    p, k = level_probabilities(levels), torch.arange(1, levels + 1, dtype=torch.float64)
    whole, formula = float((p * (2 ** (k + 1) - 2)).sum()), 2 * levels / (1 - 2.0**-levels) - 2
    assert whole == pytest.approx(formula, rel=1e-12)
    saved = (2 - (levels + 2) * 2.0**-levels) / (1 - 2.0**-levels)
    assert whole - float((p * k).sum()) == pytest.approx(formula - saved, rel=1e-12)
    assert whole == pytest.approx({6: 10.19, 12: 22.01}.get(levels, whole), abs=5e-3)


# ---------------------------------------------------------------------------------------------------- paths


def test_shallow_runs_are_prefixes_of_deep_ones():
    problem, mixed = P1(), [2, 5, 1, 3, 2]
    deep = {k: path_of(problem, contexts_of(problem, 5), [k] * 5) for k in range(1, 6)}
    for k in range(2, 6):
        close(deep[k].previous[0], deep[k - 1].last[0], 1e-12)
    path = path_of(problem, contexts_of(problem, 5), mixed)
    for lane, k in enumerate(mixed):
        close(path.last[0][lane], deep[k].last[0][lane], 1e-12)
        close(path.previous[0][lane], deep[k].previous[0][lane], 1e-12)
    assert not path.last[0].requires_grad
    some = path_of(problem, contexts_of(problem, 5), [3, 2], slots=[3, 0], base_level=1)
    torch.testing.assert_close(some.last[0], path.last[0][[3, 0]], rtol=0, atol=1e-12)
    for lane, slot in enumerate([3, 0]):
        torch.testing.assert_close(some.base[0][lane], deep[1].last[0][slot], rtol=0, atol=1e-12)
    assert path.base[0].eq(0).all()


def test_the_path_is_epoch_sgd():
    """Averages of z_0, ..., z_{n-1}, restarted from the average, with fresh noise for each step."""
    problem, K = P1(), 4
    contexts = contexts_of(problem, 2, rows=3)
    path = path_of(problem, contexts, [K, K - 1], cap=0.4)
    for slot, depth in enumerate([K, K - 1]):
        Y = [torch.zeros(2)]
        for e in range(1, depth + 1):
            z, visited = Y[-1].clone(), []
            for batch in contexts.batches("lower", [slot], PATH, e, 0, times=2**e):
                visited.append(z)
                xi, sign, noise = (t[0] for t in batch)
                r = problem.H @ (z - problem.A @ problem.x[0].detach() - problem.B @ xi[0])
                z = z - min(2.0**-e, 0.4) * ((1 + 0.1 * sign.mean()) * r + 0.5 * noise.mean(0))
            Y.append(torch.stack(visited).mean(0))
        close(path.last[0][slot], Y[-1], 1e-12, 1e-12)
        close(path.previous[0][slot], Y[-2], 1e-12, 1e-12)


def test_epochs_of_one_problem_are_means_of_gradient_steps():
    """y -> y - beta (y - x) from 4 with x = 1: means of geometric sums; a run can be continued at any epoch."""
    x, y = torch.ones(1, requires_grad=True), torch.full((1,), 4.0, requires_grad=True)
    oracle = bo.Oracle([x], [y], lambda: y.sum(), lambda: (y - x).square().sum() / 2)
    means, expected = bo.epoch_sgd(oracle, oracle.y, 4, lambda e: [0.9 * 2.0**-e]), 3.0
    assert oracle.session.counts["lower_grad"] == 2**5 - 2 - 4
    for e, mean in enumerate(means, 1):
        contraction = 1 - 0.9 * 2.0**-e
        expected *= (1 - contraction ** (2**e)) / (2**e * (1 - contraction))
        assert float(mean[0]) == pytest.approx(1 + expected, rel=1e-14)
    rest = bo.epoch_sgd(oracle, means[1], 2, lambda e: [0.9 * 2.0**-e], first=3)
    assert [float(mean[0]) for mean in rest] == [float(mean[0]) for mean in means[2:]]
    assert bo.epoch_sgd(oracle, oracle.y, 4, rates=0.9) == means
    assert float(y.detach()) == 4.0


def test_golden_values_of_p0():
    """The exact moments (whose printed values are checked here), and those of the path that the code makes."""
    problem, n = P0(), 1500
    mean, variance, V = problem.exact(6)
    printed = ([-0.96, -0.56, -0.180312, 0.101554, 0.293281, 0.418812, 0.499543],
               [0, 0.185, 0.531398, 0.910899, 1.232706, 1.472980, 1.640620],
               [0.345, 0.297553, 0.167763, 0.081181, 0.036943, 0.016436])  # fmt: skip
    for ours, theirs in zip((mean, variance, V), printed, strict=True):
        close(ours, torch.tensor(theirs), 1e-6)
    contexts, Y = contexts_of(problem, n, seed=3), [torch.zeros(n)]
    for k in (2, 4, 6):
        path = path_of(problem, contexts, [k] * n)
        Y += [path.previous[0].squeeze(1), path.last[0].squeeze(1)]
    u = problem.rho * problem.x0 + problem.a * (torch.stack(Y) - problem.d)
    assert z_scores(u[1:].T, mean[1:]).abs().max() < 4.5
    assert z_scores((u[1:] - mean[1:, None]).T ** 2, variance[1:]).abs().max() < 4.5
    assert z_scores((u[1:] - u[:-1]).T ** 2, V).abs().max() < 4.5


def slopes(beta, n, last, first):
    problem = P1()
    contexts, Y = contexts_of(problem, n, seed=9), {}
    for k in range(2, last + 1, 2):
        path = path_of(problem, contexts, [k] * n, beta=beta / problem.mu, cap=1 / problem.L)
        Y[k - 1], Y[k] = path.previous[0], path.last[0]
    # u is affine in Y, with the same samples at both points.
    V = [((Y[k] - Y[k - 1]) @ problem.A).square().sum(1).mean() for k in range(first, last + 1)]
    k, log = torch.arange(len(V), dtype=torch.float64), torch.stack(V).log2()
    return float(((k - k.mean()) * (log - log.mean())).sum() / ((k - k.mean()) ** 2).sum())


def test_corrections_fall_like_2_to_the_minus_k_if_beta_is_large_enough():
    assert abs(slopes(0.75, 150, 8, 4) + 1) < 0.2
    assert abs(slopes(0.25, 150, 8, 4) + 0.51) < 0.15  # the paper's step: too slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "slope"), [(0.25, -0.51), (0.4, -0.59), (0.75, -0.98), (1, -1.16), (2, -1.14), (4, -1.05)]
)
def test_level_slopes_in_full(beta, slope):
    assert abs(slopes(beta, 400, 10, 5) - slope) < 0.15


# ---------------------------------------------------------------------------------------------------- the estimate


@pytest.mark.parametrize(("neumann", "steps"), [("sum", 5), ("product", 5), ("cg", 15)])
def test_batched_equals_dense_formulas_context_by_context(neumann, steps):
    """Softmax tasks: dense Hessians and Jacobians, one context and one point at a time, on the same samples."""
    torch.manual_seed(2)
    x, y = (0.3 * torch.randn(5, 3)).requires_grad_(), torch.zeros(5, 3, requires_grad=True)
    scale, c, B, levels, total = torch.linspace(0.5, 1.5, 5).unsqueeze(1), 0.2, 6, 4, torch.zeros(5, 3)

    def g(u, v, batch):
        return F.cross_entropy(batch[0] @ v, batch[1]) + (scale * (v - u) ** 2).sum()

    def f(u, v, batch):
        return F.cross_entropy(batch[0] @ (v + 0.1 * u), batch[1])

    problem = Given([x], [y], lambda b: f(x, y, b), lambda b: g(x, y, b))
    problem.tasks = bo.TensorTasks((torch.randn(9, 12, 5), torch.randint(0, 3, (9, 12))))
    contexts = contexts_of(problem, B, seed=8, rows=2)
    depths = draw_levels(B, levels, 0, contexts.counters, systematic=False)
    assert len(set(depths)) > 1
    start, oracle = bo.Vector([x.detach().expand(B, 5, 3).clone()]), oracle_of(problem)
    path = coupled_path(oracle, contexts, start, depths, lambda e: [min(0.5 * 2.0**-e, c)])
    p, xd, hessian = level_probabilities(levels), x.detach(), torch.func.jacrev(torch.func.grad(g, 1), 1)
    found = multilevel(oracle, path, chances=p, steps=steps, rate=c, neumann=neumann)
    for b in range(B):
        one = lambda role, times=1, b=b: [  # noqa: E731
            tuple(t[0] for t in batch)
            for batch in contexts.batches("upper" if role == UPPER else "lower", [b], role, times=times)
        ]
        times = int(torch.randint(steps, (), generator=contexts.counters.generator(b, TRUNCATION)))

        def u(Y, one=one, times=times):
            direct, r = torch.func.grad(f, (0, 1))(xd, Y, one(UPPER)[0])
            terms = [r.reshape(-1)]
            if neumann == "cg":
                q = torch.linalg.lstsq(hessian(xd, Y, one(NEUMANN)[0]).reshape(15, 15), terms[0]).solution
            else:
                for batch in one(NEUMANN, steps - 1):
                    terms.append(terms[-1] - c * hessian(xd, Y, batch).reshape(15, 15) @ terms[-1])
                q = c * sum(terms) if neumann == "sum" else steps * c * terms[times]
            cross = torch.func.jacrev(torch.func.grad(g, 1), 0)(xd, Y, one(CROSS)[0]).reshape(15, 5, 3)
            return direct - torch.einsum("i,iab->ab", q, cross)

        total += (u(xd) + (u(path.last[0][b]) - u(path.previous[0][b])) / p[depths[b] - 1]) / B
    close(found.gradient[0], total, 1e-11, 1e-9)


def test_smoothness_is_estimated_on_samples():
    problem = P1()
    found = float(smoothness(oracle_of(problem), contexts_of(problem, 16), bo.Vector([torch.zeros(16, 2)])))
    assert 0.999 * 4.4 < found <= 4.4 * (1 + 1e-12)


def test_warns_if_beta_is_too_small():
    """Corrections as after 800 steps, falling too slowly and fast enough."""
    count = torch.tensor([0, 400, 200, 100, 60, 40, 30.0])
    for lower_lr, variance, growing in (
        (0.1, [0, 1, 0.7, 0.5, 0.37, 0.26, 0.19], True),
        (1.0, [0, 0.345, 0.298, 0.168, 0.081, 0.037, 0.0164], False),
    ):
        problem = P0()
        optimizer = bo.RTMLMC(problem.x, problem.y, lr=0.0, lower_lr=lower_lr, levels=6, neumann="cg", smoothness=1.0)
        optimizer.numbers["moments"] = torch.stack([count, count * torch.tensor(variance)])
        with pytest.warns(bo.BilevelWarning, match="lower_lr is too small") if growing else warnings.catch_warnings():
            problem.apply(optimizer.backward)

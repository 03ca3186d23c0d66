"""RT-MLMC and DL-SGD against exact moments, dense per-context formulas, and what must hold path by path."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import bilevel_optim as bo
from bilevel_optim.hypergradient.multilevel import multilevel, smoothness
from bilevel_optim.oracle.oracle import Oracle
from bilevel_optim.problem.objective import Objective
from bilevel_optim.problem.random import Counters
from bilevel_optim.problem.vector import Vector
from bilevel_optim.solvers.contexts import PATH, TASKS, Contexts, coupled_path, draw_levels, level_probabilities

from .problems import P0, P1


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def method(cls, problem, depth=None, **options):
    """An optimizer on P0 or P1; with ``depth`` every context gets that level."""
    options = {"lr": 0.0, "lower_lr": 1.0, "smoothness": getattr(problem, "L", 1.0), **options}
    optimizer = cls([problem.x], [problem.y], **options)
    if depth is not None:
        optimizer._depths = lambda contexts: [depth] * contexts.count
    return optimizer


def gradients(optimizer, problem, n=1):
    out = []
    for _ in range(n):
        optimizer.backward(problem.f, problem.g, tasks=problem)
        out.append(problem.x.grad.clone())
    return torch.stack(out)


def contexts_of(problem, count, seed=0, rows=1):
    counters = Counters(seed)
    tasks = problem.sample(count, counters.generator(TASKS))
    return Contexts(problem, tasks, count, {"lower": rows, "upper": rows}, counters)


def oracle_of(problem):
    return Oracle([problem.x], [problem.y], Objective(problem.f), Objective(problem.g))


def path_of(problem, contexts, depths, beta=1.0, cap=1.0):
    start = Vector([torch.zeros(len(depths), *problem.y.shape)])
    return coupled_path(oracle_of(problem), contexts, start, depths, lambda e: [min(beta * 2.0**-e, cap)])


# ---------------------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize("base", [0, 1, 3])
@pytest.mark.parametrize("levels", [4, 7, 12])
def test_level_probabilities(levels, base):
    p = level_probabilities(levels, base)
    assert len(p) == levels - base
    assert abs(float(p.sum()) - 1) < 1e-12
    torch.testing.assert_close(p[:-1] / p[1:], torch.full((len(p) - 1,), 2.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("systematic", [True, False])
@pytest.mark.parametrize("base", [0, 2])
def test_levels_are_drawn_with_their_probabilities(systematic, base):
    counts = torch.zeros(7)
    for seed in range(100):
        drawn = draw_levels(1000, 6, base, Counters(seed), systematic=systematic)
        counts += torch.tensor(drawn).bincount(minlength=7)
    expected = torch.cat([torch.zeros(base + 1), level_probabilities(6, base) * 1e5])
    assert counts[: base + 1].sum() == 0
    chi = ((counts - expected) ** 2 / expected)[base + 1 :].sum()
    freedom = 5 - base
    assert chi < freedom + 5 * (2 * freedom) ** 0.5 + 10
    if systematic:
        assert chi < 1  # evenly spread: hardly any variation
        alone = torch.tensor([draw_levels(1, 6, base, Counters(s), systematic=True)[0] for s in range(3000)])
        one = alone.bincount(minlength=7)[base + 1 :]
        assert ((one - expected[base + 1 :] * 0.03) ** 2 / (expected[base + 1 :] * 0.03)).sum() < 30
        first = [draw_levels(64, 6, base, Counters(s), systematic=True)[0] for s in range(3000)]
        one = torch.tensor(first).bincount(minlength=7)[
            base + 1 :
        ]  # the order is random, so any slot is like any other
        assert ((one - expected[base + 1 :] * 0.03) ** 2 / (expected[base + 1 :] * 0.03)).sum() < 30


@pytest.mark.parametrize("levels", [1, 6, 8, 12, 20])
def test_expected_cost(levels):
    """Sections 2.9: exact expectation of the step count, with and without the last steps that nobody needs."""
    p, k = level_probabilities(levels), torch.arange(1, levels + 1, dtype=torch.float64)
    whole = float((p * (2 ** (k + 1) - 2)).sum())
    formula = 2 * levels / (1 - 2.0**-levels) - 2
    assert whole == pytest.approx(formula, rel=1e-12)
    saved = (2 - (levels + 2) * 2.0**-levels) / (1 - 2.0**-levels)
    assert whole - float((p * k).sum()) == pytest.approx(formula - saved, rel=1e-12)
    if levels in (6, 12):
        assert whole == pytest.approx({6: 10.19, 12: 22.01}[levels], abs=5e-3)


def test_steps_are_counted_exactly():
    problem = P0()
    for cls, k, points in ((bo.DLSGD, 4, 1), (bo.RTMLMC, 4, 3), (bo.RTMLMC, 1, 2)):
        optimizer = method(cls, problem, k, levels=4, neumann_steps=3, tasks_per_step=2)
        gradients(optimizer, problem)
        counts = optimizer.oracle_counts
        assert counts["lower_grad"] == 2 * (2 ** (k + 1) - 2 - k + 3 * points)  # 2 for the series, 1 for the cross term
        assert counts["hvp"] == 2 * 2 * points
        assert counts["upper_grad"] == 2 * points
        assert int(optimizer.diagnostics["lower_steps"]) == 2 * (2 ** (k + 1) - 2 - k)
    optimizer = method(bo.RTMLMC, problem, levels=6, tasks_per_step=64, implicit_term=False)
    steps = []
    for _ in range(12):
        gradients(optimizer, problem)
        steps.append(float(optimizer.diagnostics["lower_steps"]) / 64)
    steps = torch.tensor(steps)
    expected = 2 * 6 / (1 - 2.0**-6) - 2 - (2 - 8 * 2.0**-6) / (1 - 2.0**-6)
    assert abs(steps.mean() - expected) < 5 * steps.std() / 12**0.5
    assert optimizer.oracle_counts["lower_grad"] == round(float(steps.sum()) * 64)


# ---------------------------------------------------------------------------------------------------- pathwise


@pytest.mark.parametrize("neumann", ["sum", "product", "cg"])
@pytest.mark.parametrize("base", [0, 2])
def test_telescoping_path_by_path(neumann, base):
    """sum_k p_k v(k) = u_K for one context and fixed noise; a wrong normaliser or an uncoupled path fails here."""
    levels = 5
    options = {"levels": levels, "neumann": neumann, "neumann_steps": 6, "tasks_per_step": 3}
    problem = P1()
    v = [
        gradients(method(bo.RTMLMC, problem, k, **options, base_level=base, generator=seeded(4)), problem)[0]
        for k in range(base + 1, levels + 1)
    ]
    deep = gradients(method(bo.DLSGD, problem, **options, generator=seeded(4)), problem)[0]
    telescoped = (level_probabilities(levels, base).unsqueeze(1) * torch.stack(v)).sum(0)
    torch.testing.assert_close(telescoped, deep, rtol=0, atol=1e-10)
    assert (torch.stack(v) - deep).norm(dim=1).min() > 1e-3


def test_shallow_runs_are_prefixes_of_deep_ones():
    problem = P1()
    deep = {k: path_of(problem, contexts_of(problem, 5), [k] * 5) for k in range(1, 6)}
    for k in range(2, 6):
        torch.testing.assert_close(deep[k].previous[0], deep[k - 1].last[0], rtol=0, atol=1e-12)
    mixed = path_of(problem, contexts_of(problem, 5), [2, 5, 1, 3, 2])
    for lane, k in enumerate([2, 5, 1, 3, 2]):
        torch.testing.assert_close(mixed.last[0][lane], deep[k].last[0][lane], rtol=0, atol=1e-12)
        torch.testing.assert_close(mixed.previous[0][lane], deep[k].previous[0][lane], rtol=0, atol=1e-12)
    assert not mixed.last[0].requires_grad


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
                r = problem.H @ (z - problem.A @ problem.x.detach() - problem.B @ xi[0])
                z = z - min(2.0**-e, 0.4) * ((1 + 0.1 * sign.mean()) * r + 0.5 * noise.mean(0))
            Y.append(torch.stack(visited).mean(0))
        torch.testing.assert_close(path.last[0][slot], Y[-1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(path.previous[0][slot], Y[-2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("neumann", ["sum", "product", "cg"])
def test_batched_equals_dense_formulas_context_by_context(neumann):
    """Softmax tasks: dense Hessians and Jacobians, one context and one point at a time, on the same samples."""
    torch.manual_seed(2)
    x, y = 0.3 * torch.randn(5, 3), torch.zeros(5, 3, requires_grad=True)
    x.requires_grad_()
    tasks = bo.TensorTasks((torch.randn(9, 12, 5), torch.randint(0, 3, (9, 12))))
    scale = torch.linspace(0.5, 1.5, 5).unsqueeze(1)

    def parts(u, v, batch):
        return F.cross_entropy(batch[0] @ v, batch[1]) + (scale * (v - u) ** 2).sum()

    def upper(u, v, batch):
        return F.cross_entropy(batch[0] @ (v + 0.1 * u), batch[1])

    N, c, B, levels = 5, 0.2, 6, 4
    options = {
        "lr": 0.0, "lower_lr": 0.5, "levels": levels, "neumann": neumann, "neumann_steps": N, "smoothness": 1 / c
    }  # fmt: skip
    optimizer = bo.RTMLMC(
        [x], [y], **options, tasks_per_step=B, lower_batch=2, upper_batch=3, generator=seeded(8),
        lower_init=lambda ids: x.detach().expand(len(ids), 5, 3), level_sampling="independent",
    )  # fmt: skip
    kept = {}
    inner = optimizer._estimate_contexts

    def spy(contexts, oracle):
        kept.update(contexts=contexts, depths=optimizer._depths(contexts))
        return inner(contexts, oracle)

    optimizer._estimate_contexts = spy
    optimizer.backward(lambda b: upper(x, y, b), lambda b: parts(x, y, b), tasks=tasks)
    contexts, depths = kept["contexts"], kept["depths"]
    assert len(set(depths)) > 1
    oracle = Oracle([x], [y], Objective(lambda b: upper(x, y, b)), Objective(lambda b: parts(x, y, b)))
    start = Vector([x.detach().expand(B, 5, 3).clone()])
    path = coupled_path(oracle, contexts, start, depths, lambda e: [min(0.5 * 2.0**-e, c)])
    from bilevel_optim.solvers.contexts import CROSS, NEUMANN, TRUNCATION, UPPER

    p, total, xd = level_probabilities(levels), torch.zeros(5, 3), x.detach()
    hessian = torch.func.jacrev(torch.func.grad(parts, 1), 1)
    for b in range(B):
        one = lambda role, times=1, b=b: [  # noqa: E731
            tuple(t[0] for t in batch)
            for batch in contexts.batches("upper" if role == UPPER else "lower", [b], role, times=times)
        ]
        times = int(torch.randint(N, (), generator=contexts.counters.generator(b, TRUNCATION)))

        def u(Y, one=one, times=times):
            direct, r = torch.func.grad(upper, (0, 1))(xd, Y, one(UPPER)[0])
            r = r.reshape(-1)
            if neumann == "cg":
                q = torch.linalg.lstsq(hessian(xd, Y, one(NEUMANN)[0]).reshape(15, 15), r).solution
            else:
                terms = [r]
                for batch in one(NEUMANN, N - 1):
                    terms.append(terms[-1] - c * hessian(xd, Y, batch).reshape(15, 15) @ terms[-1])
                q = c * sum(terms) if neumann == "sum" else N * c * terms[times]
            cross = torch.func.jacrev(torch.func.grad(parts, 1), 0)(xd, Y, one(CROSS)[0]).reshape(15, 5, 3)
            return direct - torch.einsum("i,iab->ab", q, cross)

        previous, last = path.previous[0][b], path.last[0][b]
        total += (u(xd) + (u(last) - u(previous)) / p[depths[b] - 1]) / B
    if neumann == "cg":  # 5 iterations are not exact here
        optimizer.neumann_steps = 15
        optimizer.generator = seeded(8)
        optimizer.backward(lambda b: upper(x, y, b), lambda b: parts(x, y, b), tasks=tasks)
    torch.testing.assert_close(x.grad, total, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cls", [bo.RTMLMC, bo.DLSGD])
def test_vectorised_equals_looped(cls):
    results = []
    for vectorize in (True, False, 2):
        problem = P1()
        optimizer = method(
            cls, problem, levels=3, tasks_per_step=5, vectorize=vectorize, generator=seeded(1), neumann_steps=3
        )
        results.append((gradients(optimizer, problem, 2), optimizer.oracle_counts))
        assert "vectorize_fallback" not in optimizer.diagnostics
    for values, counts in results[1:]:
        torch.testing.assert_close(values, results[0][0], rtol=1e-12, atol=1e-12)
        assert counts == results[0][1]


# ---------------------------------------------------------------------------------------------------- moments


def z_scores(sample, mean):
    return (sample.mean(0) - mean) / (sample.std(0) / len(sample) ** 0.5)


def test_golden_values_of_p0():
    """The exact moments (whose printed values are checked here), and those of the path that the code makes."""
    problem = P0()
    mean, variance, V = problem.exact(6)
    printed = ([-0.96, -0.56, -0.180312, 0.101554, 0.293281, 0.418812, 0.499543],
               [0, 0.185, 0.531398, 0.910899, 1.232706, 1.472980, 1.640620],
               [0.345, 0.297553, 0.167763, 0.081181, 0.036943, 0.016436])  # fmt: skip
    for ours, theirs in zip((mean, variance, V), printed, strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs), rtol=0, atol=1e-6)
    n = 1500
    contexts = contexts_of(problem, n, seed=3)
    Y = [torch.zeros(n)]
    for k in (2, 4, 6):
        path = path_of(problem, contexts, [k] * n)
        Y += [path.previous[0].squeeze(1), path.last[0].squeeze(1)]
    u = problem.rho * problem.x0 + problem.a * (torch.stack(Y) - problem.d)
    assert z_scores(u[1:].T, mean[1:]).abs().max() < 4.5
    deviations = (u[1:] - mean[1:, None]).T ** 2
    assert z_scores(deviations, variance[1:]).abs().max() < 4.5
    assert z_scores((u[1:] - u[:-1]).T ** 2, V).abs().max() < 4.5


def test_mean_and_variance_on_p0():
    """E v = E u_K; the second moment from V_k and p_k. One context per step, as the estimate is meant."""
    problem, K = P0(), 6
    mean, variance, V = problem.exact(K)
    p = level_probabilities(K)
    sample = stratified(problem, K, 32, 8, neumann="cg", neumann_steps=1)
    assert z_scores(sample, mean[-1]).abs().max() < 5.7
    second = mean[0] ** 2 + 2 * mean[0] * (mean[-1] - mean[0]) + (V / p).sum() - mean[-1] ** 2
    assert float(second) == pytest.approx(4.519450, abs=2e-6)
    assert float(variance[-1]) == pytest.approx(1.640620, abs=2e-6)


@pytest.mark.slow
def test_mean_and_variance_on_p0_by_plain_monte_carlo():
    problem = P0()
    mean, *_ = problem.exact(6)
    optimizer = method(bo.RTMLMC, problem, levels=6, neumann="cg", generator=seeded(1))
    sample = gradients(optimizer, problem, 6000).squeeze(1)
    assert abs(z_scores(sample, mean[-1])) < 4.5
    assert float(sample.var()) == pytest.approx(4.51945, rel=5 * (24 / 6000) ** 0.5)


def stratified(problem, K, count, repeats, **options):
    """Estimates from the same number of contexts at each level, combined with the exact probabilities."""
    p = level_probabilities(K)
    means = []
    for r in range(repeats):
        mean = 0
        for k in range(1, K + 1):
            draws = {"tasks_per_step": count, "generator": seeded(100 * r + k)}
            mean = mean + p[k - 1] * gradients(method(bo.RTMLMC, problem, k, levels=K, **draws, **options), problem)[0]
        means.append(mean)
    return torch.stack(means)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_mean_on_p1(K):
    problem = P1()
    sample = stratified(problem, K, 32, 10, neumann_steps=12)
    assert z_scores(sample, problem.mean(K)).abs().max() < 5.7  # Student's t with 9 degrees at 3.5 sigma
    assert (sample.std(0) / 10**0.5).max() < 0.15


def test_exact_means_of_p1_are_those_of_the_specification():
    problem = P1()
    torch.testing.assert_close(problem.gradient(), torch.tensor([-0.218, -1.44, 1.124]), rtol=0, atol=1e-12)
    torch.testing.assert_close(problem.mean(6), torch.tensor([-0.3015, -1.4263, 1.1057]), rtol=0, atol=5e-5)
    far = problem.mean(14, steps=400)
    torch.testing.assert_close(far, problem.gradient(), rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("sampling", ["systematic", "independent"])
def test_mean_on_p1_by_plain_monte_carlo(K, sampling):
    problem = P1()
    optimizer = method(
        bo.RTMLMC, problem, levels=K, neumann_steps=12, tasks_per_step=256, level_sampling=sampling, generator=seeded(K)
    )
    sample = gradients(optimizer, problem, 120)
    assert z_scores(sample, problem.mean(K)).abs().max() < 4.5


def test_sum_and_product_have_one_mean_and_very_different_noise():
    problem = P1()
    samples = {}
    for neumann in ("sum", "product"):
        optimizer = method(
            bo.DLSGD, problem, levels=1, neumann=neumann, neumann_steps=12, tasks_per_step=64, generator=seeded(5)
        )
        samples[neumann] = gradients(optimizer, problem, 16)
        assert z_scores(samples[neumann], problem.mean(1)).abs().max() < 4.5
    assert samples["product"].var(0).sum() > 5 * samples["sum"].var(0).sum()


class Noiseless(P1):
    """P1 without any noise, one context."""

    def sample(self, n, generator):
        return torch.zeros(n, 2)

    def lower(self, tasks, n, generator):
        n = n or 1
        return torch.zeros(len(tasks), n, 2), torch.zeros(len(tasks), n), torch.zeros(len(tasks), n, 2)

    def upper(self, tasks, n, generator):
        return torch.zeros(len(tasks), n or 1, 2), torch.zeros(len(tasks), n or 1, 2)


@pytest.mark.parametrize("rows", [1, None])
@pytest.mark.parametrize("steps", [1, 3, 12])
def test_bias_of_the_series_and_of_the_path_are_exact_without_noise(steps, rows):
    problem = Noiseless()
    for K in (1, 4):
        optimizer = method(bo.DLSGD, problem, levels=K, neumann_steps=steps, lower_batch=rows, upper_batch=rows)
        torch.testing.assert_close(gradients(optimizer, problem)[0], problem.mean(K, steps=steps), rtol=0, atol=1e-12)
    exact = gradients(method(bo.DLSGD, problem, levels=4, neumann="cg", neumann_steps=2), problem)[0]
    torch.testing.assert_close(exact, problem.mean(4, steps=None), rtol=0, atol=1e-12)


def slopes(problem, beta, n, last, first):
    contexts, V = contexts_of(problem, n, seed=9), []
    Y = {}
    for k in range(2, last + 1, 2):
        path = path_of(problem, contexts, [k] * n, beta=beta, cap=1 / problem.L)
        Y[k - 1], Y[k] = path.previous[0], path.last[0]
    for k in range(first, last + 1):  # u is affine in Y, with the same samples at both points
        V.append(((Y[k] - Y[k - 1]) @ problem.A).square().sum(1).mean())
    k = torch.arange(len(V), dtype=torch.float64)
    log = torch.stack(V).log2()
    return float(((k - k.mean()) * (log - log.mean())).sum() / ((k - k.mean()) ** 2).sum())


def test_corrections_fall_like_2_to_the_minus_k_if_beta_is_large_enough():
    problem = P1()
    assert abs(slopes(problem, 0.75 / problem.mu, 150, 8, 4) + 1) < 0.2
    assert abs(slopes(problem, 0.25 / problem.mu, 150, 8, 4) + 0.51) < 0.15  # the paper's step: too slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "slope"), [(0.25, -0.51), (0.4, -0.59), (0.75, -0.98), (1, -1.16), (2, -1.14), (4, -1.05)]
)
def test_level_slopes_in_full(beta, slope):
    assert abs(slopes(P1(), beta / P1.mu, 400, 10, 5) - slope) < 0.15


def test_smoothness_is_estimated_on_samples():
    problem = P1()
    contexts = contexts_of(problem, 16)
    found = float(smoothness(oracle_of(problem), contexts, Vector([torch.zeros(16, 2)])))
    assert 0.999 * 4.4 < found <= 4.4 * (1 + 1e-12)
    optimizer = method(bo.RTMLMC, problem, levels=3, smoothness=None)
    gradients(optimizer, problem, 5)
    assert 1.19 * 4.4 < float(optimizer.diagnostics["smoothness"]) <= 1.2 * 4.4 + 1e-12


# ---------------------------------------------------------------------------------------------------- special cases


@pytest.mark.parametrize("y0", [-3.0, 0.2, 5.0])
def test_minimax_is_exact_at_every_y(y0):
    """f = xy - lam/2 (y - xi)^2, g = -f: u(y) = xi + x/lam for every y; with N terms the error contracts."""
    lam, x0 = 1.5, 0.7
    x, y = torch.tensor([x0], requires_grad=True), torch.tensor([y0], requires_grad=True)
    xi = torch.tensor([[0.3], [-1.2], [2.0]])

    def f(batch):
        return (x * y - lam / 2 * (y - batch) ** 2).sum()

    def run(**options):
        optimizer = bo.DLSGD([x], [y], lr=0.0, lower_lr=0.0, levels=1, smoothness=2.0, tasks_per_step=3, **options)
        optimizer.backward(f, lambda b: -f(b), tasks=bo.TensorTasks(xi))
        return float(x.grad)

    solution = float(xi.mean()) + x0 / lam
    assert run(neumann="cg") == pytest.approx(solution, abs=1e-12)
    for N in (1, 4):
        expected = solution + (1 - lam / 2) ** N * (y0 - solution)
        assert run(neumann_steps=N) == pytest.approx(expected, abs=1e-12)
    assert run(implicit_term=False) == pytest.approx(y0, abs=1e-12)


def test_conditional_stochastic_optimisation():
    """g = |y - h|^2 with beta_0 = 2 and no cap: A_1 = 0, so every level is exact: grad phi(E h) E grad h."""
    h = torch.tensor([[0.3, 1.0, -2.0], [2.0, 0.1, 0.4]])
    x, y = torch.tensor([0.8], requires_grad=True), torch.zeros(1, requires_grad=True)
    for cls, k in ((bo.DLSGD, 1), (bo.DLSGD, 3), (bo.RTMLMC, 1), (bo.RTMLMC, 3)):
        for neumann in ({"neumann": "cg"}, {"neumann_steps": 1, "smoothness": 2.0}):
            optimizer = cls(
                [x], [y], lr=0.0, lower_lr=2.0, levels=3, cap=False, tasks_per_step=2,
                lower_batch=None, upper_batch=None, **neumann,
            )  # fmt: skip
            optimizer._depths = lambda contexts, k=k: [k] * contexts.count
            optimizer.backward(
                lambda b: y.sum().sin(), lambda b: (y - (x * b).sin().mean()).square().sum(), tasks=bo.TensorTasks(h)
            )
            xh = x.detach() * h
            exact = ((xh.sin().mean(1)).cos() * (xh.cos() * h).mean(1)).mean()
            if cls is bo.DLSGD:
                torch.testing.assert_close(x.grad, exact.reshape(1), rtol=0, atol=1e-12)
            else:  # u_k - u_{k-1} vanishes beyond the first level, where v = u_0 + (u_1 - u_0)/p_1
                zero = ((xh.cos() * h).mean(1)).mean()
                expected = zero + (exact - zero) / level_probabilities(3)[0] if k == 1 else zero
                torch.testing.assert_close(x.grad, expected.reshape(1), rtol=0, atol=1e-12)


def test_softmax_proximal_gradient_against_finite_differences():
    """512 x 10 in the paper; here smaller. Lower problems solved tightly, so the estimate is the gradient of F."""
    torch.manual_seed(3)
    m, n, d, C, lam = 3, 20, 12, 4, 2.0
    data = [(torch.randn(m, n, d) / d**0.5, torch.randint(0, C, (m, n))) for _ in range(2)]
    x, y = 0.5 * torch.randn(d, C), torch.zeros(d, C, requires_grad=True)
    x.requires_grad_()

    def solve(at, i):
        v = at.clone().requires_grad_()
        newton = torch.func.jacrev(torch.func.grad(lambda v: lower(v, at, i)))
        for _ in range(12):
            gradient = torch.func.grad(lambda v: lower(v, at, i))(v.detach())
            step = torch.linalg.solve(newton(v.detach()).reshape(d * C, d * C), gradient.reshape(-1))
            v = v.detach() - step.view(d, C)
        return v

    def lower(v, at, i):
        return F.cross_entropy(data[0][0][i] @ v, data[0][1][i]) + lam / 2 * (v - at).square().sum()

    def objective(at):
        return sum(F.cross_entropy(data[1][0][i] @ solve(at, i), data[1][1][i]) for i in range(m)) / m

    def solutions(ids):
        return torch.stack([solve(x.detach(), int(i)) for i in ids])

    optimizer = bo.RTMLMC(
        [x], [y], lr=0.0, lower_lr=0.0, levels=2, neumann="cg", neumann_steps=60, tasks_per_step=m,
        lower_batch=None, upper_batch=None, lower_init=solutions,
    )  # fmt: skip
    loss = optimizer.backward(
        lambda b: F.cross_entropy(b[0] @ y, b[1]),
        lambda b: F.cross_entropy(b[0] @ y, b[1]) + lam / 2 * (y - x).square().sum(),
        tasks=bo.TensorTasks(*data),
    )
    direction = torch.randn(d, C)
    direction /= direction.norm()
    eps = 1e-4
    with torch.no_grad():
        difference = (objective(x + eps * direction) - objective(x - eps * direction)) / (2 * eps)
        torch.testing.assert_close(loss, objective(x.detach()))
    assert float((x.grad * direction).sum()) == pytest.approx(float(difference), rel=1e-6)


# ---------------------------------------------------------------------------------------------------- the optimizer


def test_live_parameters():
    """Contexts start from the live y, which stays; warm_start=True writes the mean of the last points."""
    problem = P1()
    with torch.no_grad():
        problem.y.copy_(torch.tensor([0.3, -0.4]))
    optimizer = method(bo.DLSGD, problem, lower_lr=0.0, levels=2)
    gradients(optimizer, problem, 2)
    assert torch.equal(problem.y.detach(), torch.tensor([0.3, -0.4]))
    optimizer = method(bo.DLSGD, problem, levels=4, warm_start=True)
    gradients(optimizer, problem)
    assert not torch.equal(problem.y.detach(), torch.tensor([0.3, -0.4]))


def test_schedulers_and_groups():
    """beta_0 of each lower group is its own, and follows the scheduler."""
    x, y, z = (torch.zeros(1, requires_grad=True) for _ in range(3))
    optimizer = bo.DLSGD(
        [x], [{"params": [y]}, {"params": [z], "lr": 0.0}], lr=0.1, lower_lr=1.0, levels=1, neumann="cg",
        warm_start=True, tasks_per_step=1, smoothness=1.0,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 1.0, lambda k: 0.5**k, lambda k: 1.0])
    moved = []
    for _ in range(2):
        y.data.zero_()
        tasks = bo.TensorTasks(torch.zeros(1, 1))
        optimizer.step(lambda b: (y + z + x).sum(), lambda b: ((y - 1) ** 2 + (z - 1) ** 2).sum() / 2, tasks=tasks)
        moved.append(y.item())
        assert z.item() == 0
        scheduler.step()
    assert moved == pytest.approx([0.25, 0.125])  # half of beta_0/2
    assert x.item() == pytest.approx(-0.2)


def test_diagnostics_measure_the_corrections():
    problem = P0()
    *_, V = problem.exact(4)
    optimizer = method(bo.RTMLMC, problem, levels=4, neumann="cg", tasks_per_step=2, generator=seeded(2))
    squares = []
    for _ in range(120):
        gradients(optimizer, problem)
        squares.append(float(optimizer.diagnostics["correction"]))
    scaled = optimizer.diagnostics["level_variance"]
    count = optimizer._moments[0]
    assert int(count.sum()) == 120
    for k in (1, 2):
        ratio = float(scaled[k]) / float(2**k * V[k - 1])
        assert abs(ratio - 1) < 4.5 * (3 / float(count[k])) ** 0.5
    assert {"level_counts", "lower_steps", "smoothness", "tasks"} <= set(optimizer.diagnostics)
    assert min(squares) >= 0


def test_warns_if_beta_is_too_small():
    problem = P0()
    optimizer = method(bo.RTMLMC, problem, lower_lr=0.1, levels=6, neumann="cg", tasks_per_step=1)
    count = torch.tensor([0, 400, 200, 100, 60, 40, 30.0])
    variance = torch.tensor([0, 1, 0.7, 0.5, 0.37, 0.26, 0.19])
    optimizer._moments = torch.stack([count, count * variance])
    with pytest.warns(bo.BilevelWarning, match="lower_lr is too small"):
        gradients(optimizer, problem)
    healthy = method(bo.RTMLMC, problem, levels=6, neumann="cg", tasks_per_step=1)
    healthy._moments = torch.stack([count, count * torch.tensor([0, 0.345, 0.298, 0.168, 0.081, 0.037, 0.0164])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(healthy, problem)


def test_warns_if_the_path_explodes_or_the_series_grows():
    stiff = torch.tensor([1.0, 40.0])
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    tasks = bo.TensorTasks(torch.randn(50, 1, 2))

    def run(steps=1, **options):
        optimizer = bo.RTMLMC([x], [y], lr=0.0, lower_lr=2.0, levels=4, generator=seeded(3), **options)
        for _ in range(steps):
            optimizer.backward(lambda b: y.square().sum(), lambda b: (stiff * (y - x - b) ** 2).sum() / 2, tasks=tasks)

    run(3)
    with pytest.warns(bo.BilevelWarning, match="cap=False"):
        run(120, cap=False, neumann_steps=1, smoothness=40.0)
    with pytest.warns(bo.BilevelWarning, match="Give a larger smoothness"):
        run(1, smoothness=10.0, neumann_steps=3)


def test_needs_tasks():
    problem = P1()
    with pytest.raises(ValueError, match=r"RTMLMC has a lower problem for each context: step\(upper, lower, tasks="):
        method(bo.RTMLMC, problem).step(lambda: problem.y.sum(), lambda: problem.y.square().sum())


def test_end_to_end_reaches_the_minimiser():
    """x falls to where the mean of u_K vanishes, and RT-MLMC pays far fewer lower steps for it than DL-SGD."""
    costs = {}
    for cls, alpha in ((bo.RTMLMC, 0.1), (bo.DLSGD, 0.1)):
        problem = P1((0.0, 0.0, 0.0))
        optimizer = method(cls, problem, lr=alpha, levels=5, neumann_steps=20, tasks_per_step=8, generator=seeded(1))
        while problem.gradient().norm() > 0.2:
            optimizer.step(problem.f, problem.g, tasks=problem)
            costs[cls] = costs.get(cls, 0) + int(optimizer.diagnostics["lower_steps"])
            assert costs[cls] < 4e5
    assert costs[bo.DLSGD] > 2 * costs[bo.RTMLMC]


def test_the_estimator_is_a_plain_function_too():
    problem = P1()
    contexts = contexts_of(problem, 4)
    depths = [1, 3, 2, 1]
    path = path_of(problem, contexts, depths, cap=1 / 4.4)
    estimate = multilevel(
        oracle_of(problem), contexts, path, depths, range(4), base=0, chances=level_probabilities(3), steps=2, rate=0.2
    )
    assert estimate.gradient[0].shape == (3,)

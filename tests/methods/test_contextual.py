"""RT-MLMC and DL-SGD against exact moments, closed forms, and what must hold path by path."""

import pytest
import torch
import torch.nn.functional as F

import bilevel_optim as bo

from ..problems import P0, P1, close, seeded, z_scores


def made(cls, problem, **options):
    options = {"lr": 0.0, "lower_lr": 1.0, "smoothness": problem.L, **options}
    return cls(problem.x, problem.y, **options)


def gradients(optimizer, problem, n=1):
    out = []
    for _ in range(n):
        problem.apply(optimizer.backward)
        out.append(problem.x[0].grad.clone())
    return torch.stack(out)


def probabilities(levels, base=0):
    return [2.0 ** (base - k) / (1 - 2.0 ** (base - levels)) for k in range(base + 1, levels + 1)]


def level(optimizer):
    """Return the level of the only context of the last step."""
    (k,) = optimizer.diagnostics["level_counts"].nonzero().flatten().tolist()
    return k


# ---------------------------------------------------------------------------------------------------- pathwise


@pytest.mark.usually("0-sum", "2-cg")
@pytest.mark.parametrize("neumann", ["sum", "product", "cg"])
@pytest.mark.parametrize("base", [0, 2])
def test_telescoping_path_by_path(neumann, base):
    """v = u_b + (u_k - u_{k-1})/p_k, the u_k being those of DL-SGD with the same contexts and noise: so E v = u_K.

    A wrong normaliser or an uncoupled path fails here. u_0 is that of a lower solve that does not move.
    """
    levels, problem, seen = base + 3, P1(), set()
    options = {"neumann": neumann, "neumann_steps": 6}

    def u(k, seed):
        still = {} if k else {"lower_lr": 0.0}
        return gradients(made(bo.DLSGD, problem, levels=k or 1, generator=seeded(seed), **options, **still), problem)[0]

    for seed in range(12):
        optimizer = made(bo.RTMLMC, problem, levels=levels, base_level=base, generator=seeded(seed), **options)
        v = gradients(optimizer, problem)[0]
        k = level(optimizer)
        correction = u(k, seed) - u(k - 1, seed)
        expected = u(base, seed) + correction / probabilities(levels, base)[k - base - 1]
        close(v, expected, 1e-10)
        assert correction.norm() > 1e-4
        assert float(optimizer.diagnostics["correction"]) == pytest.approx(float(correction.norm() ** 2), rel=1e-9)
        seen.add(k)
    assert seen == {base + 1, base + 2, base + 3}


def test_steps_are_counted_exactly():
    problem, seen = P0(), set()
    for cls in (bo.DLSGD, bo.RTMLMC):
        optimizer = made(cls, problem, levels=3, neumann_steps=3, generator=seeded(1))
        for _ in range(10):
            before = optimizer.oracle_counts
            gradients(optimizer, problem)
            calls = {name: n - before[name] for name, n in optimizer.oracle_counts.items()}
            k = level(optimizer)
            points = 1 if cls is bo.DLSGD else min(k + 1, 3)
            assert calls["lower_grad"] == 2 ** (k + 1) - 2 - k + 3 * points  # 2 for the series, 1 for the cross term
            assert (calls["hvp"], calls["upper_grad"]) == (2 * points, points)
            assert int(optimizer.diagnostics["lower_steps"]) == 2 ** (k + 1) - 2 - k
            seen.add((cls, k))
    assert seen == {(bo.DLSGD, 3), *((bo.RTMLMC, k) for k in (1, 2, 3))}
    optimizer, steps = (
        made(bo.RTMLMC, problem, levels=6, tasks_per_step=64, implicit_term=False, generator=seeded()),
        [],
    )
    for _ in range(10):
        gradients(optimizer, problem)
        steps.append(float(optimizer.diagnostics["lower_steps"]) / 64)
    expected = 2 * 6 / (1 - 2.0**-6) - 2 - (2 - 8 * 2.0**-6) / (1 - 2.0**-6)
    steps = torch.tensor(steps)
    assert abs(steps.mean() - expected) < 5 * steps.std() / 10**0.5
    assert optimizer.oracle_counts["lower_grad"] == round(float(steps.sum()) * 64)


# ---------------------------------------------------------------------------------------------------- moments


@pytest.mark.parametrize("drawn", [40, pytest.param(128, marks=pytest.mark.slow)])
def test_mean_and_variance_on_p0(drawn):
    """E v = E u_K; the second moment from V_k and p_k. One context per step, as the estimate is meant."""
    problem, K = P0(), 6
    mean, variance, V = problem.exact(K)
    second = (
        mean[0] ** 2 + 2 * mean[0] * (mean[-1] - mean[0]) + (V / torch.tensor(probabilities(K))).sum() - mean[-1] ** 2
    )
    assert float(second) == pytest.approx(4.519450, abs=2e-6)
    assert float(variance[-1]) == pytest.approx(1.640620, abs=2e-6)
    optimizer = made(bo.RTMLMC, problem, levels=K, neumann="cg", tasks_per_step=drawn, generator=seeded(1))
    sample = gradients(optimizer, problem, 16)
    assert z_scores(sample, mean[-1]).abs().max() < 5.7
    assert sample.mean() == pytest.approx(float(mean[-1]), abs=4.5 * (float(second) / (16 * drawn)) ** 0.5)


@pytest.mark.slow
def test_mean_and_variance_on_p0_by_plain_monte_carlo():
    problem = P0()
    mean, *_ = problem.exact(6)
    sample = gradients(made(bo.RTMLMC, problem, levels=6, neumann="cg", generator=seeded(1)), problem, 6000).squeeze(1)
    assert abs(z_scores(sample, mean[-1])) < 4.5
    assert float(sample.var()) == pytest.approx(4.51945, rel=5 * (24 / 6000) ** 0.5)


@pytest.mark.usually("systematic-16-2")
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize(
    ("sampling", "n"),
    [("systematic", 16), *(pytest.param(s, 120, marks=pytest.mark.slow) for s in ("systematic", "independent"))],
)
def test_mean_on_p1(K, sampling, n):
    problem, options = P1(), {"levels": K, "neumann_steps": 12, "level_sampling": sampling, "generator": seeded(K)}
    sample = gradients(made(bo.RTMLMC, problem, tasks_per_step=128 if n < 100 else 256, **options), problem, n)
    assert z_scores(sample, problem.mean(K)).abs().max() < (5.7 if n < 100 else 4.5)
    assert (sample.std(0) / n**0.5).max() < 0.2


def test_exact_means_of_p1_are_those_of_the_specification():
    problem = P1()
    (gradient,) = problem.hypergradient()
    close(gradient, torch.tensor([-0.218, -1.44, 1.124]), 1e-12)
    close(problem.mean(6), torch.tensor([-0.3015, -1.4263, 1.1057]), 5e-5)
    close(problem.mean(14, steps=400), gradient, 2e-3)


@pytest.mark.slow
def test_sum_and_product_have_one_mean_and_very_different_noise():
    problem, samples = P1(), []
    for neumann in ("sum", "product"):
        options = {"neumann": neumann, "neumann_steps": 12, "tasks_per_step": 64, "generator": seeded(5)}
        samples.append(gradients(made(bo.DLSGD, problem, levels=1, **options), problem, 16))
        assert z_scores(samples[-1], problem.mean(1)).abs().max() < 4.5
    assert samples[1].var(0).sum() > 5 * samples[0].var(0).sum()


class Noiseless(P1):
    """P1 without any noise, one context."""

    def sample(self, n, generator):
        return torch.zeros(n, 2)

    def lower_batch(self, tasks, n, generator):
        return torch.zeros(len(tasks), n or 1, 2), torch.zeros(len(tasks), n or 1), torch.zeros(len(tasks), n or 1, 2)

    def upper_batch(self, tasks, n, generator):
        return torch.zeros(len(tasks), n or 1, 2), torch.zeros(len(tasks), n or 1, 2)


@pytest.mark.parametrize("rows", [1, None])
@pytest.mark.parametrize("steps", [1, 3, 12])
def test_bias_of_the_series_and_of_the_path_are_exact_without_noise(steps, rows):
    problem = Noiseless()
    for K in (1, 4):
        optimizer = made(bo.DLSGD, problem, levels=K, neumann_steps=steps, lower_batch=rows, upper_batch=rows)
        close(gradients(optimizer, problem)[0], problem.mean(K, steps), 1e-12)
    exact = gradients(made(bo.DLSGD, problem, levels=4, neumann="cg", neumann_steps=2), problem)[0]
    close(exact, problem.mean(4, steps=None), 1e-12)


@pytest.mark.parametrize("neumann_rate", [1.0, 0.5, 0.2])
def test_bias_of_the_series_with_another_step(neumann_rate):
    """g = (y - x)^2/2 and f = y^2/2 with L = 2: N terms of step c/L leave (1 - c/2)^N of the hypergradient x."""
    x, y = torch.tensor([3.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    for steps in (1, 4):
        optimizer = bo.DLSGD([x], [y], lr=0.1, lower_lr=0.1, levels=1, neumann_steps=steps, smoothness=2.0,
                             neumann_rate=neumann_rate)  # fmt: skip
        optimizer.backward(lambda _: y.square().sum() / 2, lambda _: (y - x).square().sum() / 2,
                           tasks=bo.TensorTasks(torch.zeros(1, 1, 1)))  # fmt: skip
        close(x.grad, torch.tensor([3 * (1 - (1 - neumann_rate / 2) ** steps)]), 1e-12)


# ---------------------------------------------------------------------------------------------------- special cases


@pytest.mark.parametrize("y0", [-3.0, 0.2, 5.0])
def test_minimax_is_exact_at_every_y(y0):
    """f = xy - lam/2 (y - xi)^2, g = -f: u(y) = xi + x/lam for every y; with N terms the error contracts."""
    lam, x, y = 1.5, torch.tensor([0.7], requires_grad=True), torch.tensor([y0], requires_grad=True)
    xi = torch.tensor([[0.3], [-1.2], [2.0]])

    def f(batch):
        return (x * y - lam / 2 * (y - batch) ** 2).sum()

    def run(**options):
        optimizer = bo.DLSGD([x], [y], lr=0.0, lower_lr=0.0, levels=1, smoothness=2.0, tasks_per_step=3, **options)
        optimizer.backward(f, lambda b: -f(b), tasks=bo.TensorTasks(xi))
        return float(x.grad)

    solution = float(xi.mean()) + 0.7 / lam
    assert run(neumann="cg") == pytest.approx(solution, abs=1e-12)
    for N in (1, 4):
        assert run(neumann_steps=N) == pytest.approx(solution + (1 - lam / 2) ** N * (y0 - solution), abs=1e-12)
    assert run(implicit_term=False) == pytest.approx(y0, abs=1e-12)


@pytest.mark.parametrize("neumann", [{"neumann": "cg"}, {"neumann_steps": 1, "smoothness": 2.0}], ids=str)
def test_conditional_stochastic_optimisation(neumann):
    """g = |y - h|^2 with beta_0 = 2 and no cap: A_1 = 0, so every level is exact: grad phi(E h) E grad h."""
    x, y, seen = torch.tensor([0.8], requires_grad=True), torch.zeros(1, requires_grad=True), set()
    for h in (torch.tensor([[0.3, 1.0, -2.0]]), torch.tensor([[2.0, 0.1, 0.4]])):
        xh = x.detach() * h
        slope = (xh.cos() * h).mean(1)
        exact = xh.sin().mean(1).cos() * slope
        for cls, seed in ((bo.DLSGD, 0), *((bo.RTMLMC, seed) for seed in range(4))):
            optimizer = cls([x], [y], lr=0.0, lower_lr=2.0, levels=3, cap=False, generator=seeded(seed),
                            lower_batch=None, upper_batch=None, **neumann)  # fmt: skip
            optimizer.backward(
                lambda b: y.sum().sin(), lambda b: (y - (x * b).sin().mean()).square().sum(), tasks=bo.TensorTasks(h)
            )
            k = level(optimizer)
            seen.add((cls, k))
            # u_k - u_{k-1} vanishes beyond the first level, where v = u_0 + (u_1 - u_0)/p_1.
            correction = (exact - slope) / probabilities(3)[0] if k == 1 else 0 * slope
            expected = exact if cls is bo.DLSGD else slope + correction
            close(x.grad, expected, 1e-12)
    assert len(seen) >= 3


def test_softmax_proximal_gradient_against_finite_differences():
    """512 x 10 in the paper; here smaller. Lower problems solved tightly, so the estimate is the gradient of F."""
    torch.manual_seed(3)
    m, n, d, C, lam, eps = 3, 20, 12, 4, 2.0, 1e-4
    data = [(torch.randn(m, n, d) / d**0.5, torch.randint(0, C, (m, n))) for _ in range(2)]
    x, y = (0.5 * torch.randn(d, C)).requires_grad_(), torch.zeros(d, C, requires_grad=True)

    def lower(v, at, i):
        return F.cross_entropy(data[0][0][i] @ v, data[0][1][i]) + lam / 2 * (v - at).square().sum()

    def solve(at, i):
        v, slope = at.clone(), torch.func.grad(lower)
        for _ in range(8):
            H = torch.func.jacrev(slope)(v, at, i).reshape(d * C, d * C)
            v = v - torch.linalg.solve(H, slope(v, at, i).reshape(-1)).view(d, C)
        return v

    def objective(at):
        return sum(F.cross_entropy(data[1][0][i] @ solve(at, i), data[1][1][i]) for i in range(m)) / m

    optimizer = bo.RTMLMC(
        [x], [y], lr=0.0, lower_lr=0.0, levels=2, neumann="cg", neumann_steps=60, tasks_per_step=m, lower_batch=None,
        upper_batch=None, lower_init=lambda ids: torch.stack([solve(x.detach(), int(i)) for i in ids]),
    )  # fmt: skip
    loss = optimizer.backward(
        lambda b: F.cross_entropy(b[0] @ y, b[1]),
        lambda b: F.cross_entropy(b[0] @ y, b[1]) + lam / 2 * (y - x).square().sum(),
        tasks=bo.TensorTasks(*data),
    )
    direction = torch.randn(d, C)
    at, direction = x.detach(), direction / direction.norm()
    difference = (objective(at + eps * direction) - objective(at - eps * direction)) / (2 * eps)
    torch.testing.assert_close(loss, objective(at))
    assert float((x.grad * direction).sum()) == pytest.approx(float(difference), rel=1e-6)


# ---------------------------------------------------------------------------------------------------- the optimizer


def test_live_parameters():
    """Contexts start from the live y, which stays; warm_start=True writes the mean of the last points."""
    problem, start = P1(), torch.tensor([0.3, -0.4])
    problem.y[0].data.copy_(start)
    gradients(made(bo.DLSGD, problem, lower_lr=0.0, levels=2), problem, 2)
    assert torch.equal(problem.y[0].detach(), start)
    gradients(made(bo.DLSGD, problem, levels=4, warm_start=True), problem)
    assert not torch.equal(problem.y[0].detach(), start)


def test_schedulers_and_groups():
    """beta_0 of each lower group is its own, and follows the scheduler."""
    x, y, z = (torch.zeros(1, requires_grad=True) for _ in range(3))
    optimizer = bo.DLSGD([x], [{"params": [y]}, {"params": [z], "lr": 0.0}], lr=0.1, lower_lr=1.0, levels=1,
                         neumann="cg", warm_start=True, smoothness=1.0)  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 1.0, lambda k: 0.5**k, lambda k: 1.0])
    moved, tasks = [], bo.TensorTasks(torch.zeros(1, 1))
    for _ in range(2):
        y.data.zero_()
        optimizer.step(
            lambda b: (y + z + x).sum(), lambda b: (0 * x + (y - 1) ** 2 + (z - 1) ** 2).sum() / 2, tasks=tasks
        )
        moved.append(y.item())
        assert z.item() == 0
        scheduler.step()
    assert moved == pytest.approx([0.25, 0.125])  # half of beta_0/2
    assert x.item() == pytest.approx(-0.2)


def test_diagnostics_measure_the_corrections():
    problem, squares = P0(), {k: [] for k in range(1, 5)}
    *_, V = problem.exact(4)
    optimizer = made(bo.RTMLMC, problem, levels=4, neumann="cg", generator=seeded(2))
    for _ in range(120):
        gradients(optimizer, problem)
        squares[level(optimizer)].append(float(optimizer.diagnostics["correction"]))
    for k in (1, 2):
        mean = sum(squares[k]) / len(squares[k])
        assert float(optimizer.diagnostics["level_variance"][k]) == pytest.approx(2**k * mean)
        assert abs(mean / float(V[k - 1]) - 1) < 4.5 * (3 / len(squares[k])) ** 0.5
    assert {"lower_steps", "smoothness", "task_count"} <= set(optimizer.diagnostics)
    problem = P1()
    optimizer = made(bo.RTMLMC, problem, levels=3, smoothness=None)
    gradients(optimizer, problem, 5)
    assert 1.19 * 4.4 < float(optimizer.diagnostics["smoothness"]) <= 1.2 * 4.4 + 1e-12


@pytest.mark.filterwarnings("ignore:the upper loss has grown")
def test_warns_if_the_path_explodes_or_the_series_grows():
    stiff, tasks = torch.tensor([1.0, 40.0]), bo.TensorTasks(torch.randn(50, 1, 2))
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)

    def run(steps=1, **options):
        optimizer = bo.RTMLMC([x], [y], lr=0.0, lower_lr=2.0, levels=4, generator=seeded(3), **options)
        for _ in range(steps):
            optimizer.backward(lambda b: y.square().sum(), lambda b: (stiff * (y - x - b) ** 2).sum() / 2, tasks=tasks)

    run(3)
    with pytest.warns(bo.BilevelWarning, match="cap=False"):
        run(120, cap=False, neumann_steps=1, smoothness=40.0)
    with pytest.warns(bo.BilevelWarning, match="Use a larger smoothness"):
        run(1, smoothness=10.0, neumann_steps=3)
    with pytest.raises(
        ValueError, match=r"RTMLMC has a lower problem for each context.* call step\(upper, lower, tasks="
    ):
        bo.RTMLMC([x], [y], lr=0.0, lower_lr=2.0).step(lambda: y.sum(), lambda: y.square().sum())


@pytest.mark.slow
def test_end_to_end_reaches_the_minimiser():
    """x falls to where the mean of u_K vanishes, and RT-MLMC pays far fewer lower steps for it than DL-SGD."""
    costs = {}
    for cls in (bo.RTMLMC, bo.DLSGD):
        problem = P1((0.0, 0.0, 0.0))
        optimizer = made(cls, problem, lr=0.2, levels=5, neumann_steps=20, tasks_per_step=8, generator=seeded(1))
        costs[cls] = 0
        while problem.hypergradient()[0].norm() > 0.3:
            problem.run(optimizer)
            costs[cls] += int(optimizer.diagnostics["lower_steps"])
            assert costs[cls] < 4e5
    assert costs[bo.DLSGD] > 2 * costs[bo.RTMLMC]

"""Minimax methods: what every one of them does, the W-shaped problem of the RAHGD specification, error laws."""

import copy
import io
import itertools
import math
import pickle
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bilevel_optim as bo
from recipes.saddle_escape import METHODS as RECIPE
from recipes.saddle_escape import STARTS, run, valley

from .problems import Cleaning
from .registry import COMMON_ERRORS, MINIMAX
from .test_methods import Failing, same, values

every = pytest.mark.parametrize("method", MINIMAX, ids=lambda m: m.name)
ARGUMENTS = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 3}


class Saddle:
    """f = x'Qx/2 + c'x + x'Cy + b'y - y'Ay/2, so that y*(x) = A^-1 (C'x + b) and the gradient is Qx + c + C y*."""

    def __init__(self, n=5, m=3, kappa=4.0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        basis = torch.linalg.qr(random(n, n))[0]
        A = basis @ torch.diag(torch.logspace(0, math.log10(kappa), n, dtype=torch.float64)) @ basis.T
        Q = random(m, m)
        constants = A, Q @ Q.T / m + 0.2 * torch.eye(m), random(m, n) / n**0.5, random(n), random(m)
        self.A, self.Q, self.C, self.b, self.c = (t.to(dtype) for t in constants)
        self.x, self.y = [random(m).to(dtype).requires_grad_()], [torch.zeros(n, dtype=dtype, requires_grad=True)]
        self.lr = 2 / (1 + kappa)

    def loss(self):
        x, y = self.x[0], self.y[0]
        return x @ self.Q @ x / 2 + self.c @ x + x @ self.C @ y + self.b @ y - y @ self.A @ y / 2

    def solution(self):
        return torch.linalg.solve(self.A, self.C.T @ self.x[0].detach() + self.b)

    def gradient(self):
        return self.Q @ self.x[0].detach() + self.c + self.C @ self.solution()

    def minimiser(self):
        CA = torch.linalg.solve(self.A, self.C.T).T
        return torch.linalg.solve(self.Q + CA @ self.C.T, -(self.c + CA @ self.b))


class Robust(Cleaning):
    """The worst weights of training examples, near equal ones: x is the model's list of tensors, y the weights."""

    def __init__(self, dtype=torch.float64):
        super().__init__(dtype=dtype)
        self.x, self.y = list(self.model.parameters()), [self.weights]

    def loss(self, index=None):
        index = torch.arange(len(self.t)) if index is None else index
        losses = torch.nn.functional.cross_entropy(self.model(self.X[index]), self.t[index], reduction="none")
        return ((1 + self.weights[index]) * losses).mean() - self.weights.square().mean() + self.penalty()

    def objective(self, seed=3):
        data = TensorDataset(torch.arange(len(self.t)))
        loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(seed))
        return bo.Objective(lambda batch: self.loss(batch[0]), loader)


# ---------------------------------------------------------------------------------------------------- every method


@every
def test_gradient_of_the_quadratic(method):
    problem = Saddle(n=12, kappa=10.0)
    optimizer = method(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=150)
    optimizer.backward(problem.loss)
    (found,), exact = (p.grad for p in problem.x), problem.gradient()
    assert (problem.y[0] - problem.solution()).norm() < 1e-8
    if method.tolerance is not None:
        assert (found - exact).norm() < method.tolerance * exact.norm()
    else:
        assert found @ exact > 0


@every
def test_converges_to_the_saddle_point(method):
    for dtype, tolerance in ((torch.float64, 2e-2), (torch.float32, 2e-2)):
        problem = Saddle(dtype=dtype)
        optimizer = method(problem.x, problem.y, lr=0.2, lower_lr=problem.lr, lower_steps=10)
        start, target = problem.x[0].detach().clone(), problem.minimiser()
        for _ in range(12 if method.cls is bo.iMCN else 90):
            loss = optimizer.step(problem.loss)
        assert (problem.x[0] - target).norm() < tolerance * (start - target).norm()
        assert loss.dtype == problem.x[0].dtype == dtype
        torch.testing.assert_close(problem.y[0].detach(), problem.solution(), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        pytest.param(m, arguments, message, id=f"{m.name}-{message}")
        for m in MINIMAX
        for arguments, message in [*m.errors, *COMMON_ERRORS]
    ],
)
def test_bad_arguments_are_refused(method, arguments, message):
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        method([x], [y], **{**ARGUMENTS, **arguments})


@every
def test_step_equals_backward_then_step(method):
    one, two = Robust(), Robust()
    a, b = method(one.x, one.y, **ARGUMENTS), method(two.x, two.y, **ARGUMENTS)
    for _ in range(4):
        before = values(two.x)
        loss = a.step(one.loss)
        assert torch.equal(loss, b.backward(two.loss))
        assert same(before, values(two.x))
        assert b.step() is None
    assert same(values(one.x, one.y), values(two.x, two.y))


@every
def test_any_torch_optimizer_can_take_the_upper_step(method):
    problem = Robust()
    optimizer = method(problem.x, problem.y, **ARGUMENTS)
    adam = torch.optim.Adam(problem.x, lr=0.01, eps=1e-15)
    before = values(problem.x)
    optimizer.backward(problem.loss)
    adam.step()
    moved = [a - b for a, b in zip(values(problem.x), before, strict=True)]
    torch.testing.assert_close(moved, [-0.01 * p.grad.sign() for p in problem.x], rtol=1e-2, atol=1e-9)


@every
@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("adam", [False, True])
def test_resumes_bit_for_bit(method, warm_start, adam):
    def make():
        problem = Robust()
        options = {"lower_optimizer": torch.optim.Adam, "lower_lr": 0.01} if adam else {}
        optimizer = method(problem.x, problem.y, **{**ARGUMENTS, **options}, warm_start=warm_start)
        return problem, optimizer, problem.objective()

    problem, optimizer, objective = make()
    torch.manual_seed(5)
    file = io.BytesIO()
    for k in range(6):
        if k == 3:
            parts = {"optimizer": optimizer.state_dict(), "model": problem.model.state_dict()}
            parts |= {"weights": problem.weights.detach(), "data": objective.state_dict()}
            torch.save({**parts, "random": torch.get_rng_state()}, file)
        optimizer.step(objective)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed, objective = make()
    resumed.load_state_dict(saved["optimizer"])
    again.model.load_state_dict(saved["model"])
    again.weights.data.copy_(saved["weights"])
    objective.load_state_dict(saved["data"])
    torch.set_rng_state(saved["random"])
    for _ in range(3, 6):
        resumed.step(objective)
    assert same(values(problem.x, problem.y), values(again.x, again.y))
    assert resumed.oracle_counts == optimizer.oracle_counts


@every
def test_deepcopy_and_pickle_continue(method):
    problem = Saddle()
    optimizer = method(problem.x, problem.y, **ARGUMENTS)
    optimizer.step(problem.loss)
    clones = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for _ in range(2):
        optimizer.step(problem.loss)
    for clone in clones:
        twin = Saddle()
        twin.x, twin.y = (clone.param_groups[i]["params"] for i in (0, 1))
        for _ in range(2):
            clone.step(twin.loss)
        assert same(values(problem.x, problem.y), values(twin.x, twin.y))


@every
@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_failing_loss_changes_nothing(method, how):
    problem = Robust()
    optimizer = method(problem.x, problem.y, **ARGUMENTS, lower_optimizer=torch.optim.Adam)
    loss = Failing(problem.loss, how)
    optimizer.step(loss)
    failures = 0
    for k in (1, 2, 3, 4, 5):
        before = values(problem.x, problem.y), str(optimizer.state_dict()), str(optimizer.diagnostics)
        loss.left = k
        try:
            optimizer.step(loss)
        except (KeyError, bo.NonFiniteError):
            failures += 1
        else:
            break
        after = values(problem.x, problem.y), str(optimizer.state_dict()), str(optimizer.diagnostics)
        assert same(before[0], after[0])
        assert before[1:] == after[1:]
    assert failures >= 3
    loss.left = None
    optimizer.step(loss)


@every
def test_schedulers_groups_hooks_and_counts(method):
    problem, calls = Saddle(), []
    extra = torch.ones(2, requires_grad=True)
    optimizer = method(problem.x, problem.y, lr=0.0, lower_lr=0.1, lower_steps=1)
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 1.0, lambda k: 10.0**-k])
    moves = []
    for _ in range(3):
        y, slope = values(problem.y)[0], torch.autograd.grad(problem.loss(), problem.y)[0]
        optimizer.step(problem.loss)
        moves.append((problem.y[0].detach() - y) @ slope / slope.square().sum())
        scheduler.step()
    # Ascent, whose gradient may be that at a look-ahead point of the perturbed methods.
    torch.testing.assert_close(torch.stack(moves), torch.tensor([0.1, 0.01, 0.001]), rtol=1e-9, atol=0)
    assert calls == ["pre", "post"] * 3
    assert set(optimizer.diagnostics) >= {"hypergradient_norm", "lower_residual"}
    optimizer.add_param_group({"params": [extra], "level": "upper", "lr": 0.1})
    optimizer.step(lambda: problem.loss() + extra.square().sum())
    assert extra.detach().abs().max() < 1
    assert [g["level"] for g in optimizer.param_groups] == ["upper", "lower", "upper"]
    if method.cls is not bo.iMCN and not method.options.get("newton_correction"):
        assert optimizer.oracle_counts["hvp"] == optimizer.oracle_counts["jvp"] == 0


@every
def test_starts_of_the_lower_steps(method):
    """Warm: the live value, whoever wrote it. Cold: the value at the first step."""
    problem = Saddle()
    optimizer = method(problem.x, problem.y, lr=0.0, lower_lr=problem.lr, lower_steps=1)
    optimizer.backward(problem.loss)
    with torch.no_grad():
        problem.y[0].copy_(problem.solution() + 1e-3)
    optimizer.backward(problem.loss)
    assert (problem.y[0] - problem.solution()).norm() < 3e-3
    cold = method(problem.x, problem.y, lr=0.0, lower_lr=0.1, lower_steps=2, warm_start=False)
    seen = []
    for _ in range(2):
        cold.backward(problem.loss)
        seen.append(values(problem.y)[0])
    assert torch.equal(*seen)


@every
def test_losses_are_checked(method):
    problem = Robust()

    def optimizer():
        return method(problem.x, problem.y, **ARGUMENTS)

    for loss, message in (
        (lambda: problem.loss() * torch.ones(2), "must return a scalar.*shape"),
        (lambda: problem.loss().item(), "must return a scalar.*float"),
        (lambda: problem.loss().detach(), "depends on no parameter"),
        (lambda: problem.penalty(), "does not depend on lower parameter 0"),
        (lambda: -problem.weights.square().sum(), "depends on any upper parameter"),
        (bo.Objective(problem.loss, []), "gave no batch"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer().step(loss)
    with pytest.raises(TypeError, match="minimax loss must be a callable"):
        optimizer().step(3.0)
    with pytest.raises(TypeError, match="positional argument"):
        optimizer().step(problem.loss, problem.loss)
    with pytest.raises(TypeError, match="lower_momentums"):
        method(problem.x, problem.y, **ARGUMENTS, lower_momentums=0.9)
    assert not optimizer().step(lambda: problem.loss() + 0 * problem.weights.sum()).requires_grad


@every
def test_the_check_takes_one_loss(method):
    problem = Saddle()
    good, hasty = (
        method(problem.x, problem.y, **{**ARGUMENTS, "lower_steps": n, "lower_lr": problem.lr}) for n in (90, 1)
    )
    before = values(problem.x, problem.y)
    if method.tolerance is not None:
        report = bo.check_hypergradient(good, problem.loss)
        assert report.relative_error < 1e-8
        assert report.norm == pytest.approx(float(problem.gradient().norm()))
        assert (
            bo.check_hypergradient(good, bo.Objective(lambda c: c * problem.loss(), [0.5, 1.5]), repeats=3).cosine
            > 0.99
        )
    if method.tolerance is not None and not method.options.get("newton_correction"):
        with pytest.raises(bo.GradcheckError):
            bo.check_hypergradient(hasty, problem.loss)
    assert same(before, values(problem.x, problem.y))


# ---------------------------------------------------------------------------------------------------- GDA


def test_gda_is_simultaneous():
    problem = Saddle()
    optimizer = bo.GDA(problem.x, problem.y, lr=0.1, lower_lr=0.2)
    for _ in range(3):
        x, y = values(problem.x, problem.y)
        optimizer.step(problem.loss)
        slope_x = problem.Q @ x + problem.c + problem.C @ y
        slope_y = problem.C.T @ x + problem.b - problem.A @ y
        torch.testing.assert_close(problem.x[0].detach(), x - 0.1 * slope_x)
        torch.testing.assert_close(problem.y[0].detach(), y + 0.2 * slope_y)
    assert optimizer.oracle_counts == {"upper_grad": 3, "lower_grad": 0, "hvp": 0, "jvp": 0, "loss": 0}


@pytest.mark.parametrize("simultaneous", [True, False])
def test_gda_with_several_ascent_steps(simultaneous):
    problem = Saddle()
    optimizer = bo.GDA(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=3, simultaneous=simultaneous)
    x, y = values(problem.x, problem.y)
    path = [y]
    for _ in range(3):
        path.append(path[-1] + 0.2 * (problem.C.T @ x + problem.b - problem.A @ path[-1]))
    optimizer.step(problem.loss)
    torch.testing.assert_close(problem.y[0].detach(), path[3])
    slope = problem.Q @ x + problem.c + problem.C @ path[2 if simultaneous else 3]
    torch.testing.assert_close(problem.x[0].detach(), x - 0.1 * slope)
    assert optimizer.oracle_counts["lower_grad"] == (2 if simultaneous else 3)


# ---------------------------------------------------------------------------------------------------- error laws


@pytest.mark.parametrize(("newton", "power"), [(False, 1), (True, 2)])
def test_error_law_in_the_lower_error(newton, power):
    """O(|y - y*|) with the plain gradient, O(|y - y*|^2) with the Newton correction (section 6.4)."""
    generator = torch.Generator().manual_seed(0)
    C, offset = torch.randn(3, 4, generator=generator), torch.randn(4, generator=generator)
    x, y = torch.randn(3, generator=generator).requires_grad_(), torch.zeros(4, requires_grad=True)

    def loss():
        return (C.T @ x).tanh() @ y + (x.sin().sum() * y.tanh()).sum() / 4 - 2 * y.square().sum()

    solver = bo.RAGDA([x], [y], lr=0.0, lower_lr=0.2, lower_steps=400)
    solver.backward(loss)
    solution, exact = y.detach().clone(), x.grad.clone()
    errors = []
    for size in (1e-1, 1e-2, 1e-3):
        with torch.no_grad():
            y.copy_(solution + size * offset)
        optimizer = bo.RAGDA([x], [y], lr=0.0, lower_lr=0.2, lower_steps=0, newton_correction=newton, linear_steps=4)
        optimizer.backward(loss)
        errors.append(float((x.grad - exact).norm()))
        assert optimizer.oracle_counts["hvp"] == (4 if newton else 0)
    ratios = [math.log10(a / b) for a, b in itertools.pairwise(errors)]
    assert ratios == pytest.approx([power] * 2, abs=0.1)


def test_newton_correction_is_exact_on_a_quadratic():
    problem = Saddle(kappa=100.0)
    optimizer = bo.RAGDA(problem.x, problem.y, lr=0.1, lower_lr=0.0, lower_steps=0, newton_correction=True)
    optimizer.backward(problem.loss)
    torch.testing.assert_close(problem.x[0].grad, problem.gradient())


def test_the_correction_shares_the_sample():
    """The same batch and the same random numbers in both gradients and in the products."""
    problem, drawn, noise = Saddle(), [], []

    def loss(batch):
        drawn.append(batch)
        noise.append(float(torch.rand(())))
        return problem.loss()

    optimizer = bo.RAGDA(problem.x, problem.y, **ARGUMENTS, newton_correction=True)
    optimizer.backward(bo.Objective(loss, list(range(100))))
    assert drawn == [0, 1, 2, 3, 3]
    assert noise[3] == noise[4]
    assert len(set(noise)) == 4


# ---------------------------------------------------------------------------------------------------- the W-shaped
# problem


def test_values_of_the_w_shaped_function():
    z = torch.tensor([-1, -0.6, -0.5, -0.1, -0.05, 0, 0.05, 0.3, 0.6, 1.0], requires_grad=True)
    w = valley(z)
    (slope,) = torch.autograd.grad(w.sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    table = [0.032, -0.00533333, -0.00466667, -0.00066667, -0.00020833, 0, -0.00020833, -0.00266667, -0.00533333, 0.032]
    torch.testing.assert_close(w.detach(), torch.tensor(table), rtol=0, atol=1e-8)
    slopes = torch.tensor([-0.24, 0, 0.01, 0.01, 0.0075, 0, -0.0075, -0.01, 0, 0.24])
    torch.testing.assert_close(slope.detach(), slopes, rtol=0, atol=1e-12)
    torch.testing.assert_close(curvature, torch.tensor([1, 0.2, 0, 0, -0.1, -0.2, -0.1, 0, 0.2, 1]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "start", "hit", "steps", "restarts"),
    [
        ("ragda", "beside the saddle", 172, 547, 4),
        pytest.param("ragda", "on a slope", 35, 457, 3, marks=pytest.mark.slow),
        pytest.param("pragda as printed", "beside the saddle", 172, 547, 4, marks=pytest.mark.slow),
        pytest.param("pragda as printed", "on a slope", 35, 457, 3, marks=pytest.mark.slow),
    ],
)
def test_table_of_the_w_shaped_problem(name, start, hit, steps, restarts):
    result = run(RECIPE[name], STARTS[start], 700)
    assert result["hit"] == hit
    assert result["steps"] == pytest.approx(steps, abs=3)
    assert result["restarts"] == restarts
    assert result["error"] < 5e-5
    assert result["hvps"] == 0


@pytest.mark.parametrize(("start", "lr", "steps"), [("beside the saddle", 1.0, 263), ("on a slope", 1.0, 26),
                                                    ("on a slope", 0.5, 57), ("on a slope", 0.1, 299)])  # fmt: skip
def test_gda_on_the_w_shaped_problem(start, lr, steps):
    assert run(RECIPE[f"gda, lr {lr:g}"], STARTS[start], 300)["hit"] == steps


def test_perturbing_the_initial_point_saves_steps():
    hits = [run(RECIPE["pragda"], STARTS["beside the saddle"], 90, seed)["hit"] for seed in range(3)]
    assert sorted(hits)[1] == pytest.approx(69, abs=4)


def test_theory_of_the_minimax_theorem_stops_at_the_saddle():
    """With the true constants L = 1, rho = 2 the printed algorithm ends beside the saddle, after K steps."""
    for eps, period in ((1e-2, 2), (1e-5, 8)):
        theta = min(4 * (2 * eps / 16) ** 0.25, 1.0)
        method = partial(
            bo.PRAGDA, lr=0.25, lower_lr=0.05, lower_steps=10, momentum=1 - theta, restart_period=period,
            restart_radius=math.sqrt(eps / 2), perturbation=1e-6, perturb_initial=False,
        )  # fmt: skip
        result = run(method, STARTS["beside the saddle"], 100)
        assert (result["steps"], result["restarts"]) == (period, 0)
        assert result["gaps"][-1] == pytest.approx(5.33e-3, rel=1e-2)
    x, y = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.RAGDA.from_theory([x], [y], ell=20.0499, mu=10.0, rho=2.0, eps=1e-2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / (4 * 60.25), rel=1e-3)
    assert optimizer.restart_radius == pytest.approx(math.sqrt(1e-2 / 91.2), rel=1e-3)
    perturbed = bo.PRAGDA.from_theory([x], [y], ell=20.0499, mu=10.0, rho=2.0, eps=1e-2)
    assert 0 < perturbed.perturbation < 1e-4 * perturbed.restart_radius < 1e-4 * optimizer.restart_radius


# ---------------------------------------------------------------------------------------------------- iMCN


def test_imcn_takes_newton_steps():
    """A small cubic term and an exact subproblem: one Newton step from anywhere to the minimiser of the quadratic."""
    problem = Saddle()
    optimizer = bo.iMCN(problem.x, problem.y, lr=0.2, lower_lr=problem.lr, lower_steps=200, cubic=1e-9,
                        cubic_steps=400, linear_steps=5, perturbation=0.0)  # fmt: skip
    optimizer.step(problem.loss)
    torch.testing.assert_close(problem.x[0].detach(), problem.minimiser(), rtol=0, atol=1e-6)


def test_imcn_minimises_its_cubic_model():
    """On a quadratic the step is the minimiser of the model whose Hessian is known: (H + M|s|/2) s = -g."""
    problem = Saddle()
    optimizer = bo.iMCN(problem.x, problem.y, lr=0.1, lower_lr=problem.lr, lower_steps=200, cubic=3.0,
                        cubic_steps=300, linear_steps=5, perturbation=1e-2)  # fmt: skip
    optimizer.backward(problem.loss)
    s, g = -0.1 * problem.x[0].grad, problem.gradient()
    H = problem.Q + problem.C @ torch.linalg.solve(problem.A, problem.C.T)
    torch.testing.assert_close(H @ s + 1.5 * s.norm() * s, -g, rtol=0, atol=1e-8)
    model = g @ s + s @ H @ s / 2 + s.norm() ** 3 / 2
    torch.testing.assert_close(optimizer.diagnostics["model_decrease"], -model)
    assert optimizer.oracle_counts["upper_grad"] == 1
    assert optimizer.oracle_counts["lower_grad"] == 200
    assert optimizer.oracle_counts["hvp"] <= 302 * 7


def test_imcn_leaves_an_exact_saddle_and_ends():
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)

    def loss():
        return x[0] ** 4 / 4 - x[0] ** 2 + x[1] ** 2 + x @ y - y @ y / 2  # max_y: x1^4/4 - x1^2/2 + 3/2 x2^2

    optimizer = bo.iMCN([x], [y], lr=0.2, lower_lr=1.0, lower_steps=1, cubic=6.0, tol=1e-10)
    steps = 0
    while not optimizer.converged and steps < 50:
        optimizer.step(loss)
        steps += 1
    assert steps < 30
    torch.testing.assert_close(x.detach().abs(), torch.tensor([1.0, 0.0]), rtol=0, atol=1e-4)
    counts, last = optimizer.oracle_counts, x.detach().clone()
    optimizer.step(loss)
    assert torch.equal(last, x)
    assert counts == optimizer.oracle_counts

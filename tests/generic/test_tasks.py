"""Many lower problems: samplers, and every method on stacked tasks against closed forms and against one task alone."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import bilevel_optim as bo

from .problems import P1, Tasks
from .registry import COMMON_ERRORS, METHODS, TASK_METHODS

# The methods that do for tasks what they do for one problem.
GENERIC = [m for m in METHODS if m.stacks_tasks]
generic = pytest.mark.parametrize("method", GENERIC, ids=lambda m: m.name)
with_tasks = pytest.mark.parametrize("method", [*GENERIC, *TASK_METHODS], ids=lambda m: m.name)
for_tasks = pytest.mark.parametrize("method", TASK_METHODS, ids=lambda m: m.name)
# What a single loop carries from step to step starts anew with tasks, so it has not settled after one step.
estimating = pytest.mark.parametrize(
    "method",
    [m for m in GENERIC if m.tolerance is not None and not m.noisy and m.lower_steps],
    ids=lambda m: m.name,
)

ARGUMENTS = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 2}


def short(method):
    """Few iterations of the linear solver: what is asked here does not need more."""
    return {"linear_steps": 2} if "linear_steps" in method.options else {}


def rounding(method):
    """What divides rounding errors by a small step leaves of 1e-12."""
    return 1e-8 if "hvp" in method.options else 1e-12 / min(method.options.get("nu", 1.0), 1.0)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------- sampler


def test_task_ids_are_different_and_equally_likely():
    tasks = bo.TensorTasks(torch.zeros(7, 2))
    assert len(tasks) == 7
    for n in range(1, 8):
        ids = tasks.sample(n, seeded(n))
        assert ids.dtype == torch.int64
        assert len(set(ids.tolist())) == n
    assert sorted(tasks.sample(17, seeded()).bincount().tolist()) == [2, 2, 2, 2, 3, 3, 3]
    large = bo.TensorTasks(torch.zeros(64, 1))
    generator = seeded(1)
    counts = torch.zeros(64)
    for _ in range(4000):
        ids = large.sample(5, generator)  # by rejection
        assert len(set(ids.tolist())) == 5
        counts[ids] += 1
    expected = 4000 * 5 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * (2 * 63) ** 0.5
    positions = torch.stack([tasks.sample(3, generator) for _ in range(3000)])
    for column in positions.T:
        assert ((column.bincount(minlength=7) - 3000 / 7) ** 2 / (3000 / 7)).sum() < 6 + 5 * 12**0.5


def test_rows_are_drawn_with_replacement_and_together():
    inputs = torch.arange(4 * 5.0).view(4, 5)
    tasks = bo.TensorTasks({"a": inputs, "b": -inputs}, inputs.unsqueeze(-1) * 2)
    ids = torch.tensor([2, 0, 2])
    batch = tasks.lower(ids, 400, seeded())
    assert batch["a"].shape == (3, 400)
    assert torch.equal(batch["a"], -batch["b"])
    for row, i in zip(batch["a"], ids, strict=True):
        assert set(row.tolist()) == set(inputs[i].tolist())
    assert not torch.equal(batch["a"][0], batch["a"][2])  # the same task twice has independent rows
    assert torch.equal(tasks.upper(ids, None, None), inputs[ids].unsqueeze(-1) * 2)
    assert torch.equal(tasks.lower(ids, 400, seeded())["a"], batch["a"])
    assert isinstance(tasks, bo.TaskSampler)
    assert repr(tasks) == "TensorTasks(4 tasks, rows: 5 lower, 5 upper)"


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        (torch.zeros(3), None, r"lower data must be tensors of shape \(tasks, rows, ...\), but got \[\(3,\)\]"),
        ((torch.zeros(3, 2), torch.zeros(3, 4)), None, r"same number of tasks and of rows.*\(3, 2\), \(3, 4\)"),
        (torch.zeros(3, 2), torch.zeros(4, 2), "lower data are of 3 tasks, but the upper data of 4"),
        (torch.zeros(3, 2), torch.zeros(3, 0), "upper data are empty: 3 tasks with 0 rows"),
        ({"a": "text"}, None, r"lower data must be tensors.*\['str'\]"),
        ({}, None, "lower data must be tensors"),
    ],
)
def test_tensor_tasks_refuses(lower, upper, message):
    with pytest.raises(ValueError, match=message):
        bo.TensorTasks(lower, upper)


# ---------------------------------------------------------------------------------------------------- truth


@estimating
@pytest.mark.parametrize("vectorize", [True, False, 2])
def test_hypergradient_is_the_mean_over_the_tasks(method, vectorize):
    problem = Tasks(m=3)
    optimizer = method(
        [problem.x], [problem.y], lr=0.1, lower_lr=problem.lr, lower_steps=40, vectorize=vectorize, warm_start=True
    )
    loss = optimizer.backward(problem.upper, problem.lower, tasks=bo.TensorTasks(*problem.data()))
    assert problem.error() < max(10 * method.tolerance, 1e-9)
    assert "vectorize_fallback" not in optimizer.diagnostics
    solutions = problem.solutions()
    torch.testing.assert_close(problem.y.detach(), solutions.mean(0), rtol=1e-5, atol=1e-5)
    values = ((solutions.unsqueeze(1) - problem.t) ** 2).sum(-1).mean(1) / 2 + problem.x.detach().square().sum() / 2
    torch.testing.assert_close(loss, values.mean(), rtol=1e-4, atol=1e-4)
    assert sorted(optimizer.diagnostics["tasks"].tolist()) == list(range(3))


@generic
def test_together_equals_each_alone(method):
    """Also where nothing has converged: few lower steps, few iterations of the linear solver, adaptive steps."""
    options = {"lower_optimizer": torch.optim.Adam, "lower_lr": 0.05, **short(method)}

    def gradient(ids):
        problem = Tasks()
        lower, upper = problem.data()
        picked = bo.TensorTasks({"A": lower["A"][ids], "rest": tuple(t[ids] for t in lower["rest"])}, upper[ids])
        picked.sample = lambda n, generator: torch.arange(n)  # draws nothing, so that methods draw the same
        torch.manual_seed(0)
        optimizer = method([problem.x], [problem.y], **{**ARGUMENTS, **options}, warm_start=True)
        optimizer.backward(problem.upper, problem.lower, tasks=picked)
        return problem.x.grad, problem.y.detach(), optimizer.oracle_counts

    together = gradient(slice(0, 3))
    alone = [gradient(slice(i, i + 1)) for i in range(3)]
    for k in (0, 1):
        mean = torch.stack([a[k] for a in alone]).mean(0)
        torch.testing.assert_close(together[k], mean, rtol=0, atol=rounding(method))
    assert together[2] == {name: 3 * count for name, count in alone[0][2].items()}


def test_each_task_has_its_own_conjugate_gradients():
    """Easy and hard systems side by side: stopped by their own tolerance, and warned about by any."""
    H = torch.stack([torch.eye(6), torch.diag(torch.logspace(0, 3, 6)), -torch.eye(6)])
    b = torch.randn(3, 6)
    product = lambda v: bo.Vector([(H @ v[0].unsqueeze(-1)).squeeze(-1)])  # noqa: E731
    solver = partial(bo.linear.cg, steps=4, tol=1e-6)
    result = solver(product, [b], lanes=True)
    for i in range(3):
        one = solver(lambda v, i=i: bo.Vector([H[i] @ v[0]]), [b[i]])
        torch.testing.assert_close(result.solution[0][i], one.solution[0], rtol=1e-12, atol=1e-12)
        assert result.iterations[i] == one.iterations
        assert result.indefinite[i] == one.indefinite
        torch.testing.assert_close(result.residual[i], one.residual)
    assert result.iterations.tolist() == [1, 4, 0]
    assert result.indefinite.tolist() == [False, False, True]


@pytest.mark.parametrize("solver", ["neumann", "fixed_point"])
def test_each_task_stops_at_its_own_tolerance(solver):
    scale = torch.tensor([1.0, 0.2, 0.7]).unsqueeze(-1)
    b = torch.randn(3, 4)
    solve = partial(getattr(bo.linear, solver), steps=60, lr=0.9, tol=1e-3)
    result = solve(lambda v: bo.Vector([scale * v[0]]), [b], lanes=True)
    for i in range(3):
        one = solve(lambda v, i=i: bo.Vector([scale[i] * v[0]]), [b[i]])
        torch.testing.assert_close(result.solution[0][i], one.solution[0], rtol=1e-12, atol=1e-12)
        assert result.iterations[i] == one.iterations
        torch.testing.assert_close(result.residual[i], one.residual)
    assert len(set(result.iterations.tolist())) == 3


def test_stochastic_batches_and_subsets_are_unbiased():
    """g is quadratic with random e and D only, so that y* and the hypergradient are linear in the drawn rows."""
    problem = Tasks()
    problem.A = problem.A.mean((0, 1)).expand(6, 3, 5, 5)
    optimizer = bo.AID(
        [problem.x], [problem.y], lr=0.0, lower_lr=problem.lr, lower_steps=1, linear_steps=5, warm_start=False,
        tasks_per_step=2, lower_batch=2, upper_batch=1, generator=seeded(3),
    )  # fmt: skip
    tasks = bo.TensorTasks(*problem.data())

    def estimates(n):
        for _ in range(n):
            optimizer.backward(problem.upper, problem.lower, tasks=tasks)
            yield problem.x.grad.clone()

    drawn = torch.stack(list(estimates(300)))
    solutions = problem.lr * (problem.D.mean(1) @ problem.x.detach() + problem.e.mean(1))  # one step from zero
    v = torch.linalg.solve(problem.A[0, 0], (solutions - problem.t.mean(1)).T).T
    # The rows of the last batch (in the cross product) are independent of those of the lower step.
    truth = (problem.D.mean(1).mT @ v.unsqueeze(-1)).squeeze(-1).mean(0) + problem.x.detach()
    z = (drawn.mean(0) - truth) / (drawn.std(0) / 300**0.5)
    assert z.abs().max() < 4.5
    assert drawn.std(0).min() > 0.01


# ---------------------------------------------------------------------------------------------------- starting points


@generic
def test_starts(method):
    """All tasks start at the live y, or where lower_init says; warm starts write the mean back, cold ones leave y."""
    if not method.lower_steps or any(arguments == {"lower_steps": 0} for arguments, _ in method.errors):
        pytest.skip("takes at least one lower step")
    problem = Tasks()
    lower, upper = problem.data()
    tasks = bo.TensorTasks(lower, upper)
    with torch.no_grad():
        problem.y.copy_(torch.randn(5))
    start = problem.y.detach().clone()
    no_steps = {"lr": 0.0, "lower_lr": 0.1, "lower_steps": 0, "warm_start": True}
    optimizer = method([problem.x], [problem.y], **no_steps)
    optimizer.backward(problem.upper, problem.lower, tasks=tasks)
    torch.testing.assert_close(problem.y.detach(), start, rtol=1e-12, atol=1e-12)
    start = problem.y.detach().clone()
    cold = method([problem.x], [problem.y], **ARGUMENTS, **short(method), warm_start=False)
    torch.manual_seed(0)
    cold.backward(problem.upper, problem.lower, tasks=tasks)
    first = problem.x.grad.clone()
    assert torch.equal(problem.y.detach(), start)
    torch.manual_seed(0)
    cold.backward(problem.upper, problem.lower, tasks=tasks)
    torch.testing.assert_close(problem.x.grad, first, rtol=0, atol=rounding(method))
    warm = method([problem.x], [problem.y], **ARGUMENTS, **short(method), warm_start=True)
    warm.backward(problem.upper, problem.lower, tasks=tasks)
    assert not torch.equal(problem.y.detach(), start)

    def init(ids):
        return problem.solutions()[ids]

    exact = method([problem.x], [problem.y], **no_steps, lower_init=init)
    exact.backward(problem.upper, problem.lower, tasks=tasks)
    torch.testing.assert_close(problem.y.detach(), problem.solutions().mean(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (
            lambda ids: torch.zeros(5),
            r"tensor of shape \(2, 5\) for lower parameter 0, but returned one of shape \(5,\)",
        ),
        (lambda ids: [torch.zeros(2, 5)] * 2, "must return 1 tensors, one per lower parameter, but returned 2"),
    ],
)
def test_bad_starting_points(init, message):
    problem = Tasks()
    optimizer = bo.AID([problem.x], [problem.y], **ARGUMENTS, lower_init=init, tasks_per_step=2)
    with pytest.raises(ValueError, match=message):
        optimizer.step(problem.upper, problem.lower, tasks=bo.TensorTasks(*problem.data()))


# ---------------------------------------------------------------------------------------------------- interface


class Contexts:
    """Infinitely many contexts: a pytree of them, and conditional draws."""

    def sample(self, n, generator):
        return {"shift": torch.randn(n, 5, generator=generator)}

    def lower(self, tasks, n, generator):
        shift = tasks["shift"]
        return shift.unsqueeze(1) + 0.1 * torch.randn(len(shift), n, 5, generator=generator), {"label": 3}

    def upper(self, tasks, n, generator):
        return torch.randn(len(tasks["shift"]), n, 5, generator=generator)


def test_infinite_contexts_and_constants_in_batches():
    x, y = torch.randn(5, requires_grad=True), torch.zeros(5, requires_grad=True)

    def lower(batch):
        target, constant = batch
        assert constant == {"label": 3}
        return (y - x - target).square().sum(-1).mean() / 2

    def upper(batch):
        return (y - batch).square().sum(-1).mean() / 2

    results = []
    for vectorize in (True, False):
        optimizer = bo.AID(
            [x], [y], lr=0.0, lower_lr=1.0, lower_steps=1, tasks_per_step=4, lower_batch=3, upper_batch=2,
            generator=seeded(7), vectorize=vectorize, warm_start=False,
        )  # fmt: skip
        optimizer.backward(upper, lower, tasks=Contexts())
        results.append(x.grad)
        assert optimizer.diagnostics["tasks"]["shift"].shape == (4, 5)
    generator, sampler = seeded(7), Contexts()
    tasks = sampler.sample(4, generator)
    target, _ = sampler.lower(tasks, 3, generator)
    truth = (x.detach() + target.mean(1) - sampler.upper(tasks, 2, generator).mean(1)).mean(0)
    for result in results:
        torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-12)
    optimizer = bo.AID([x], [y], **ARGUMENTS, lower_batch=1, upper_batch=1)
    optimizer.step(upper, lower, tasks=Contexts())
    assert len(optimizer.diagnostics["tasks"]["shift"]) == 1  # a sampler without a length


class Wrong(bo.TensorTasks):
    def __init__(self, problem, what):
        super().__init__(*problem.data())
        self.what = what

    def sample(self, n, generator):
        return super().sample(n + (self.what == "sample"), generator)

    def lower(self, tasks, n, generator):
        batch = super().lower(tasks, n, generator)
        if self.what == "rows":
            batch["A"] = batch["A"][:, :1]
        return 3 if self.what == "nothing" else batch

    def upper(self, tasks, n, generator):
        batch = super().upper(tasks, n, generator)
        return batch[:1] if self.what == "upper" else batch


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sample", r"tasks.sample\(3, generator\) must return tensors with leading dimensions \(3,\).*of shape \(4,\)"),
        ("rows", r"tasks.lower\(tasks, 2, generator\).*leading dimensions \(3, 2\).*\(3, 1, 5, 5\) at \['A'\]"),
        ("upper", r"tasks.upper\(tasks, None, generator\).*leading dimensions \(3,\).*of shape \(1, 4, 5\)"),
        ("nothing", r"tasks.lower\(tasks, 2, generator\) must return a tensor or a pytree of tensors.*returned int"),
    ],
)
@generic
def test_samplers_of_the_wrong_shape(method, what, message):
    problem = Tasks()
    optimizer = method([problem.x], [problem.y], **ARGUMENTS, tasks_per_step=3, lower_batch=2)
    before = problem.x.detach().clone(), problem.y.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step(problem.upper, problem.lower, tasks=Wrong(problem, what))
    assert torch.equal(problem.x, before[0])
    assert torch.equal(problem.y, before[1])


def test_misuse():
    problem = Tasks()
    tasks = bo.TensorTasks(*problem.data())
    optimizer = bo.AID([problem.x], [problem.y], **ARGUMENTS)
    with pytest.raises(TypeError, match="Tensor has no sample"):
        optimizer.step(problem.upper, problem.lower, tasks=problem.A)
    with pytest.raises(TypeError, match="tasks only together with both losses"):
        optimizer.step(tasks=tasks)
    with pytest.raises(ValueError, match="the upper loss takes its batches from the sampler"):
        optimizer.step(bo.Objective(problem.upper, [1]), problem.lower, tasks=tasks)
    with pytest.raises(ValueError, match="Invalid lower_optimizer value: LBFGS does not treat every entry alone"):
        bo.AID([problem.x], [problem.y], **ARGUMENTS, lower_optimizer=torch.optim.LBFGS).step(
            problem.upper, problem.lower, tasks=tasks
        )
    with pytest.raises(ValueError, match="upper loss must return a scalar tensor, but returned a tensor of shape"):
        optimizer.step(lambda batch: problem.y * 2, problem.lower, tasks=tasks)
    with pytest.raises(ValueError, match="lower loss depends on no parameter"):
        optimizer.step(problem.upper, lambda batch: batch["A"].sum(), tasks=tasks)
    with pytest.raises(ValueError, match="lower loss does not depend on lower parameter 0"):
        optimizer.step(problem.upper, lambda batch: problem.x.sum(), tasks=tasks)
    with pytest.raises(ValueError, match="neither loss depends on any upper parameter"):
        optimizer.step(
            lambda b: problem.y.square().sum(), lambda b: (problem.y - b["A"].sum()).square().sum(), tasks=tasks
        )


# ---------------------------------------------------------------------------------------------------- modules


class FewShot:
    """A body shared by the tasks and a head for each: modules, labels, dropout and batch normalisation."""

    def __init__(self, extra=None):
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 6), *([] if extra is None else [extra]), nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.tasks = bo.TensorTasks(*[(torch.randn(5, 8, 4), torch.randint(0, 3, (5, 8))) for _ in range(2)])

    def upper(self, batch):
        inputs, labels = batch
        return F.cross_entropy(self.head(self.body(inputs)), labels)

    def lower(self, batch):
        return self.upper(batch) + 0.1 * sum(p.square().sum() for p in self.head.parameters())

    def parameters(self, method):
        """Those of the two levels: the body, perhaps with an initial head, and the head."""
        start = [p.detach().clone().requires_grad_() for p in self.head.parameters()]
        return [*self.body.parameters(), *(start if getattr(method, "initial", False) else [])], list(
            self.head.parameters()
        )

    def run(self, method, steps=2, **options):
        upper, lower = self.parameters(method)
        optimizer = method(upper, lower, **{**ARGUMENTS, **options})
        for _ in range(steps):
            optimizer.step(self.upper, self.lower, tasks=self.tasks)
        return optimizer, torch.cat([p.detach().reshape(-1) for p in (*upper, *lower)])


@with_tasks
def test_modules_vectorised_equal_looped(method):
    results = []
    for v in (True, False, 2):
        draws = {"tasks_per_step": 3, "lower_batch": 4, "generator": seeded()}
        results.append(FewShot().run(method, vectorize=v, **draws, **short(method)))
    for optimizer, values in results:
        torch.testing.assert_close(values, results[0][1], rtol=0, atol=rounding(method))
        assert "vectorize_fallback" not in optimizer.diagnostics
        assert optimizer.oracle_counts == results[0][0].oracle_counts


@generic
def test_dropout_is_drawn_for_each_task_and_shared_by_the_evaluations_of_a_sample(method):
    problem = FewShot(nn.Dropout(0.5))
    optimizer, values = problem.run(method, **short(method))
    assert values.isfinite().all()
    assert "vectorize_fallback" not in optimizer.diagnostics
    torch.manual_seed(4)
    _, first = FewShot(nn.Dropout(0.5)).run(method, **short(method))
    torch.manual_seed(4)
    _, second = FewShot(nn.Dropout(0.5)).run(method, **short(method))
    assert torch.equal(first, second)


def test_dropout_masks_differ_between_tasks():
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(50, requires_grad=True)
    tasks = bo.TensorTasks(torch.ones(3, 1))
    masks = []
    optimizer = bo.AID(
        [x], [y], lr=0.0, lower_lr=1.0, lower_steps=1,
        lower_init=lambda ids: torch.zeros(3, 50),
    )  # fmt: skip

    def lower(batch):
        return (y - F.dropout(torch.ones(50), 0.5) * batch.mean() - x).square().sum() / 2

    def upper(batch):
        masks.append(None)
        return y.square().sum() / 2

    optimizer.backward(upper, lower, tasks=tasks)
    # The mean of three independent masks of 0 and 2 takes values between as well.
    assert {round(v, 3) for v in y.tolist()} > {0.667, 1.333}


def test_buffers_stay():
    problem = FewShot(nn.BatchNorm1d(6))
    before = copy.deepcopy(problem.body.state_dict())
    for vectorize in (True, False):
        optimizer, _ = problem.run(bo.AID, vectorize=vectorize)
        assert "vectorize_fallback" not in optimizer.diagnostics
        after = problem.body.state_dict()
        assert torch.equal(after["1.running_mean"], before["1.running_mean"])
        assert after["1.num_batches_tracked"] == 0


@pytest.mark.parametrize("method", [bo.AID, bo.ITD, bo.F2SA])
def test_what_vmap_cannot_do_is_looped_over(method):
    class Sequence(FewShot):
        def __init__(self):
            super().__init__()
            self.body = nn.LSTM(4, 6)

        def upper(self, batch):
            inputs, labels = batch
            return F.cross_entropy(self.head(self.body(inputs)[0]), labels)

    optimizer, values = Sequence().run(method)
    assert optimizer.diagnostics["vectorize_fallback"]
    _, looped = Sequence().run(method, vectorize=False)
    torch.testing.assert_close(values, looped, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:FutureWarning", "ignore:.*torch.jit.script.*:DeprecationWarning"
)
@pytest.mark.parametrize("vectorize", [True, False])
def test_a_loss_that_hides_its_parameters_is_an_error_not_a_wrong_number(vectorize):
    problem = FewShot()
    problem.head = torch.jit.script(problem.head)
    with pytest.raises(RuntimeError, match="the lower loss reads lower parameters in a way that cannot be redirected"):
        problem.run(bo.AID, vectorize=vectorize)


# ---------------------------------------------------------------------------------------------------- state


@with_tasks
@pytest.mark.parametrize("own", [True, False], ids=["generator", "default"])
def test_resumes_bit_for_bit_with_the_draws(method, own):
    def make():
        problem = FewShot()
        options = {"generator": seeded(5)} if own else {}
        if method.lower_steps:
            options["lower_optimizer"] = partial(torch.optim.SGD, momentum=0.5)
        upper, lower = problem.parameters(method)
        return problem, [*upper, *lower], method(
            upper, lower, **ARGUMENTS, **options, **short(method),
            tasks_per_step=2, lower_batch=3, upper_batch=4,
        )  # fmt: skip

    def advance(problem, parameters, optimizer, n):
        for _ in range(n):
            optimizer.step(problem.upper, problem.lower, tasks=problem.tasks)
        return [p.detach().clone() for p in parameters]

    problem, parameters, optimizer = make()
    values = advance(problem, parameters, optimizer, 2)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), values, torch.get_rng_state()], file)
    end = advance(problem, parameters, optimizer, 2)
    file.seek(0)
    saved, values, random = torch.load(file, weights_only=True)
    again, parameters, resumed = make()
    bo.Vector(parameters).copy_(values)
    resumed.load_state_dict(saved)
    torch.set_rng_state(random)
    for a, b in zip(advance(again, parameters, resumed, 2), end, strict=True):
        assert torch.equal(a, b)
    assert resumed.oracle_counts == optimizer.oracle_counts
    assert len(optimizer.state) <= len(end)  # nothing of the stacked tensors stays


@with_tasks
@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_failing_task_changes_nothing(method, how):
    problem = FewShot()
    draws = {"generator": seeded(), "tasks_per_step": 2, "lower_batch": 2}
    optimizer, _ = problem.run(method, steps=1, **draws, **short(method), vectorize=False)
    good = problem.lower

    def everything():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [p.detach().clone() for p in parameters], str([p.grad for p in parameters]), str(optimizer.state_dict())

    before, calls = everything(), []

    def lower(batch):
        calls.append(None)
        if len(calls) == 2:
            if how == "raise":
                raise KeyError("no such sample")
            return good(batch) * float("nan")
        return good(batch)

    with pytest.raises((KeyError, bo.NonFiniteError)):
        optimizer.step(problem.upper, lower, tasks=problem.tasks)
    after = everything()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1:] == after[1:]


# ---------------------------------------------------------------------------------------------------- methods for tasks


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        pytest.param(m, arguments, message, id=f"{m.name}-{message}")
        for m in TASK_METHODS
        for arguments, message in [*m.errors, *COMMON_ERRORS]
        if m.lower_steps or not {"lower_steps", "lower_optimizer"} & set(arguments) or "EpochSGD" in message
    ],
)
def test_bad_arguments_are_refused(method, arguments, message):
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        method([x], [y], **{**ARGUMENTS, **arguments})
    with pytest.raises(TypeError, match="lower_momentums"):
        method([x], [y], **ARGUMENTS, lower_momentums=0.9)


@for_tasks
def test_behaves_like_an_optimizer(method):
    problem, twin, calls = FewShot(), FewShot(), []
    upper, lower = problem.parameters(method)
    names = [(f"upper{i}", p) for i, p in enumerate(upper)]
    draws = {"tasks_per_step": 2, "lower_batch": 3}
    optimizer = method(names, iter(lower), **ARGUMENTS, **draws, generator=seeded(4))
    assert [(g["level"], g["lr"]) for g in optimizer.param_groups] == [("upper", 0.1), ("lower", 0.1)]
    assert repr(optimizer).startswith(method.cls.__name__)
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))
    loss = optimizer.step(problem.upper, problem.lower, tasks=problem.tasks)
    assert calls == ["post"]
    assert loss.shape == ()
    assert not loss.requires_grad
    assert set(optimizer.diagnostics) >= {"hypergradient_norm", "lower_residual", "tasks"}
    again, below = twin.parameters(method)
    other = method(again, below, **ARGUMENTS, **draws, generator=seeded(4))
    assert torch.equal(loss, other.backward(twin.upper, twin.lower, tasks=twin.tasks))
    other.step()
    for a, b in zip((*upper, *lower), (*again, *below), strict=True):
        assert torch.equal(a, b)
    assert optimizer.oracle_counts == other.oracle_counts
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert clone.state_dict()["bilevel"].keys() == optimizer.state_dict()["bilevel"].keys()


class Empty(bo.TensorTasks):
    def lower(self, tasks, n, generator):
        return super().lower(tasks, 1, generator)


@for_tasks
def test_samplers_of_the_wrong_shape_for_methods_for_tasks(method):
    problem = FewShot()
    problem.tasks = Empty(*[(torch.randn(5, 8, 4), torch.randint(0, 3, (5, 8))) for _ in range(2)])
    with pytest.raises(
        ValueError, match=r"tasks.lower\(tasks, \d+, generator\) must return tensors with leading dimen"
    ):
        problem.run(method, steps=1, lower_batch=3)


# ---------------------------------------------------------------------------------------------------- ranks


def trajectory(method, group=None):
    problem = Tasks(m=5)
    optimizer = method(
        [problem.x],
        [problem.y],
        **ARGUMENTS,
        **short(method),
        process_group=group,
        generator=seeded(2),
        tasks_per_step=3,
    )
    losses = [optimizer.step(problem.upper, problem.lower, tasks=bo.TensorTasks(*problem.data())) for _ in range(2)]
    return torch.cat([problem.x.detach(), problem.y.detach(), torch.stack(losses)])


def contexts(cls, group=None):
    problem = P1()
    optimizer = cls(
        [problem.x], [problem.y], lr=0.05, lower_lr=1.0, levels=3, neumann_steps=3, tasks_per_step=5,
        process_group=group, generator=seeded(2),
    )  # fmt: skip
    losses = [optimizer.step(problem.f, problem.g, tasks=problem) for _ in range(3)]
    return torch.cat([problem.x.detach(), torch.stack(losses), optimizer._moments.reshape(-1)])


RECURSIVE = [
    (bo.SVRB, {}),
    (bo.RSVRB, {"task_batch": 3}),
    (bo.RSVRB, {"task_batch": 3, "variant": "matrix_free"}),
    (bo.BSVRB, {"task_batch": 1}),  # leaves the second rank without a task
]


def rows(cls, options, group=None):
    problem = Tasks()
    tasks = bo.TensorTasks(*problem.data())
    y = torch.zeros(len(tasks), *problem.y.shape, dtype=torch.float64, requires_grad=True)
    problem.y, live = y, [problem.x]
    optimizer = cls(live, [y], lr=0.1, lower_lr=0.05, generator=seeded(), process_group=group, **options)
    for _ in range(6):
        optimizer.step(problem.upper, problem.lower, tasks=tasks)
    return torch.cat([problem.x.detach().flatten(), y.detach().flatten()])


def run(rank, address, results):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    own = {m.name: trajectory(m, dist.group.WORLD).tolist() for m in GENERIC}
    own |= {f"{cls.__name__} {options}": rows(cls, options, dist.group.WORLD).tolist() for cls, options in RECURSIVE}
    results[rank] = own | {cls.__name__: contexts(cls, dist.group.WORLD).tolist() for cls in (bo.RTMLMC, bo.DLSGD)}
    dist.destroy_process_group()


def test_ranks_share_the_tasks(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(run, (f"file://{tmp_path}/rendezvous", results), nprocs=2)
        results = dict(results)
    for cls in (bo.RTMLMC, bo.DLSGD):
        assert results[0][cls.__name__] == results[1][cls.__name__]
        torch.testing.assert_close(torch.tensor(results[0][cls.__name__]), contexts(cls), rtol=1e-10, atol=1e-10)
    for cls, options in RECURSIVE:
        key = f"{cls.__name__} {options}"
        assert results[0][key] == results[1][key]
        torch.testing.assert_close(torch.tensor(results[0][key]), rows(cls, options), rtol=1e-10, atol=1e-10)
    for method in GENERIC:
        assert results[0][method.name] == results[1][method.name]
        got = torch.tensor(results[0][method.name])
        torch.testing.assert_close(got, trajectory(method), rtol=0, atol=rounding(method))


# ---------------------------------------------------------------------------------------------------- PZOBO, features


def test_directions_of_their_own_have_less_variance():
    """Shared: variance (p + 1) |mean w_i|^2; one set per task: (p + 1) mean |w_i|^2 / m. Both have the same mean."""
    for shared in (True, False):
        problem = Tasks()
        tasks = bo.TensorTasks(*problem.data())
        optimizer = bo.PZOBO(
            [problem.x], [problem.y], lr=0.1, lower_lr=problem.lr, lower_steps=5, directions=1,
            share_directions_across_tasks=shared,
        )  # fmt: skip
        itd = bo.ITD([problem.x], [problem.y], lr=0.1, lower_lr=problem.lr, lower_steps=5, warm_start=False)
        itd.backward(problem.upper, problem.lower, tasks=tasks)
        exact, p, m = problem.x.grad.clone(), problem.x.numel(), len(tasks)
        singles = []
        for i in range(m):
            tasks.sample = lambda n, generator, i=i: torch.tensor([i])
            itd.tasks_per_step = 1
            itd.backward(problem.upper, problem.lower, tasks=tasks)
            singles.append(problem.x.grad - problem.x.detach())  # f depends on x through |x|^2/2
        del tasks.sample
        w = torch.stack(singles)
        draws = []
        for _ in range(150):
            optimizer.backward(problem.upper, problem.lower, tasks=tasks)
            draws.append(problem.x.grad.clone())
        draws = torch.stack(draws)
        predicted = (p + 1) * (w.mean(0).square().sum() if shared else w.square().sum() / m**2)
        squares = (draws - exact).square().sum(1)
        assert abs(squares.mean() - predicted) < 4.5 * squares.std() / 150**0.5
        assert (draws.mean(0) - exact).norm() < 4.5 * (predicted / 150) ** 0.5


@pytest.mark.parametrize("vectorize", [True, 2, False])
@pytest.mark.parametrize("method", [bo.PZOBO, bo.AID, bo.F2SA, bo.ITD], ids=lambda m: m.__name__)
def test_features_of_tasks(method, vectorize):
    """A backbone's features for each task, once per path; the same gradients as with the whole loss."""
    generator = torch.Generator().manual_seed(0)
    X, t = torch.randn(3, 8, 4, generator=generator), torch.randint(0, 3, (3, 8), generator=generator)
    tasks, grads = bo.TensorTasks((X, t)), []
    for split in (False, True):
        torch.manual_seed(0)
        net, head = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh()), torch.nn.Linear(5, 3)
        calls = []

        def features(batch, net=net, calls=calls):
            calls.append(1)
            return net(batch[0]), batch[1]

        def loss(part, head=head):
            return F.cross_entropy(head(part[0]), part[1]) + 0.1 * head.weight.square().sum()

        def whole(batch, features=features, loss=loss):
            return loss(features(batch))

        options = {"directions": 2} if method is bo.PZOBO else {}
        optimizer = method(
            net.parameters(), head.parameters(), lr=0.1, lower_lr=0.2, lower_steps=6, vectorize=vectorize,
            generator=torch.Generator().manual_seed(1), **options,
        )  # fmt: skip
        lower = bo.Objective(loss, features=features) if split else whole
        for _ in range(2):
            calls.clear()
            optimizer.step(whole, lower, tasks=tasks)
        assert "vectorize_fallback" not in optimizer.diagnostics
        grads.append([q.grad.clone() for q in net.parameters()])
        if split and method is bo.PZOBO and vectorize is True:
            assert len(calls) == 2  # one batched call for all paths and tasks, one in the upper loss
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    wrong = bo.Objective(lambda part: part.square().mean(), features=lambda batch: head(net(batch[0])))
    optimizer = method(net.parameters(), head.parameters(), lr=0.1, lower_lr=0.2, lower_steps=1)
    with pytest.raises(ValueError, match="features of the lower objective depend on lower parameter 0"):
        optimizer.step(whole, wrong, tasks=tasks)

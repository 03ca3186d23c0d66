"""Many lower problems at once: what the base class does with them, and samplers that are not as they must be."""

import copy
import gc
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo

from ..problems import Cleaning, Tasks, close, flat, same, seeded, values
from ..registry import ARGUMENTS, each


def test_stochastic_batches_and_subsets_are_unbiased():
    """g is quadratic with random e and D only, so that y* and the hypergradient are linear in the drawn rows."""
    problem, drawn = Tasks(), []
    A = problem.A.mean((0, 1))
    problem.A.copy_(A.expand_as(problem.A))
    optimizer = bo.AID(
        problem.x, problem.y, lr=0.0, lower_lr=problem.lr, lower_steps=1, linear_steps=5, warm_start=False,
        tasks_per_step=2, lower_batch=2, upper_batch=1, generator=seeded(3),
    )  # fmt: skip
    for _ in range(120):
        problem.apply(optimizer.backward)
        drawn.append(problem.x[0].grad.clone())
    drawn, x = torch.stack(drawn), problem.x[0].detach()
    solutions = problem.lr * (problem.D.mean(1) @ x + problem.e.mean(1))  # one step from zero
    v = torch.linalg.solve(A, (solutions - problem.t.mean(1)).T).T
    # The rows of the last batch (in the cross product) are independent of those of the lower step.
    truth = (problem.D.mean(1).mT @ v.unsqueeze(-1)).squeeze(-1).mean(0) + x
    z = (drawn.mean(0) - truth) / (drawn.std(0) / 120**0.5)
    assert z.abs().max() < 4.5
    assert drawn.std(0).min() > 0.01


class Alike:
    """So many tasks in each step, all of them the same."""

    def __init__(self, *counts):
        self.counts = iter(counts)

    def sample(self, n, generator):
        return torch.zeros(next(self.counts), dtype=torch.int64)

    def lower(self, tasks, n, generator):
        return tasks.new_ones((len(tasks), 1), dtype=torch.float64)

    upper = lower


# ANIL needs more tensors of x than of y.
@each(lambda row: row.takes_tasks and row.declared.tasks not in ("rows", "required") and row.name != "ANIL")
def test_steps_do_not_depend_on_how_many_tasks_are_the_same(row):
    """What a method keeps of x is that of the mean over tasks, not of their sum."""

    def after(*counts):
        x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.3, 0.5))
        optimizer, tasks = row([x], [y], short=True), Alike(*counts)

        def upper(rows):
            return ((y - 1).square() * rows).sum() + x.square().sum() / 10

        def lower(rows):
            return ((y - x).square() * rows).sum() / 2 + y.square().sum() / 10

        torch.manual_seed(0)
        for n in counts:
            optimizer.tasks_per_step = n
            optimizer.step(upper, lower, tasks=tasks)
        return torch.cat([x.detach(), y.detach(), x.grad])

    close(after(1, 4, 2, 3), after(2, 2, 2, 2), 1e-9, 1e-9)


@each(("AID", "ITD", "F2SA", "PZOBO", "StocBiO", "RAHGD"))
def test_starts(row):
    """All tasks start at the live y, or where lower_init says; warm starts write the mean back, cold ones leave y."""
    problem = Tasks()
    problem.y[0].data.copy_(torch.randn(5))
    start, solutions = problem.y[0].detach().clone(), problem.solutions()
    no_steps = {"lr": 0.0, "lower_steps": 0, "warm_start": True}
    problem.apply(row(problem.x, problem.y, **no_steps).backward)
    close(problem.y[0].detach(), start, 1e-12, 1e-12)
    start = problem.y[0].detach().clone()
    problem.apply(row(problem.x, problem.y, short=True, warm_start=False).backward)
    assert torch.equal(problem.y[0].detach(), start)
    problem.apply(row(problem.x, problem.y, short=True, warm_start=True).backward)
    assert not torch.equal(problem.y[0].detach(), start)
    problem.apply(row(problem.x, problem.y, **no_steps, lower_init=lambda ids: solutions[ids]).backward)
    close(problem.y[0].detach(), solutions.mean(0), 1e-9, 1e-9)


@pytest.mark.parametrize("verb", ["backward", "propose"])
@each(("AID", "ITD", "F2SA", "PZOBO", "StocBiO", "RAHGD"))
def test_nothing_of_a_step_waits_for_garbage_collection(row, verb):
    """A cycle would keep the graphs of large bodies until the collector comes by chance."""
    problem, counts = Tasks(), []
    optimizer = row(problem.x, problem.y, short=True)
    gc.disable()
    gc.freeze()  # what other tests keep is not looked at
    try:
        for _ in range(4):
            problem.apply(getattr(optimizer, verb))
            counts.append(sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()))
            if len(counts) == 2:  # the first steps also look at what the losses depend on
                gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    assert counts[3] == counts[2] <= counts[1]


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (
            lambda ids: torch.zeros(5),
            r"shape \(2, 5\) for lower parameter 0, but returned one of shape \(5,\)",
        ),
        (lambda ids: [torch.zeros(2, 5)] * 2, "must return 1 tensors, one per lower parameter, but returned 2"),
    ],
)
def test_bad_starting_points(init, message):
    problem = Tasks()
    with pytest.raises(ValueError, match=message):
        problem.run(bo.AID(problem.x, problem.y, **ARGUMENTS, lower_init=init, tasks_per_step=2))


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

    generator, sampler = seeded(7), Contexts()
    tasks = sampler.sample(4, generator)
    target, _ = sampler.lower(tasks, 3, generator)
    truth = (x.detach() + target.mean(1) - sampler.upper(tasks, 2, generator).mean(1)).mean(0)
    for vectorize in (True, False):
        optimizer = bo.AID(
            [x], [y], lr=0.0, lower_lr=1.0, lower_steps=1, tasks_per_step=4, lower_batch=3, upper_batch=2,
            generator=seeded(7), vectorize=vectorize, warm_start=False,
        )  # fmt: skip
        optimizer.backward(upper, lower, tasks=Contexts())
        close(x.grad, truth, 1e-12, 1e-12)
        assert optimizer.diagnostics["task_count"] == 4
    optimizer = bo.AID([x], [y], **ARGUMENTS, lower_batch=1, upper_batch=1)
    optimizer.step(upper, lower, tasks=Contexts())
    assert optimizer.diagnostics["task_count"] == 1  # a sampler without a length


class Wrong:
    """A sampler whose one answer has another shape than it must have."""

    def __init__(self, tasks, what):
        self.tasks, self.what = tasks, what

    def __len__(self):
        return len(self.tasks)

    def sample(self, n, generator):
        return self.tasks.sample(n + (self.what == "sample"), generator)

    def lower(self, tasks, n, generator):
        batch = self.tasks.lower(tasks, n, generator)
        if self.what == "rows":
            batch = {**batch, "A": batch["A"][:, :1]}
        return 3 if self.what == "nothing" else batch

    def upper(self, tasks, n, generator):
        batch = self.tasks.upper(tasks, n, generator)
        return batch[0] if self.what == "upper" else batch


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sample", r"tasks.sample\((\d), generator\) must return tensors with leading dimensions \((\d),\)"),
        ("rows", r"tasks.lower\(tasks, \d+, generator\).*leading dimensions \(\d, \d+\).*\(\d, 1, 5, 5\) at \['A'\]"),
        ("upper", r"tasks.upper\(tasks, .*, generator\).*leading dimensions \(\d,.*\).*of shape \(\d, 5\)"),
        ("nothing", r"tasks.lower\(tasks, \d+, generator\) must return a tensor or a pytree of tensors.*returned int"),
    ],
)
@each(("AID", "F2SA", "PZOBO", "MAML", "RTMLMC", "SVRB"))
def test_samplers_of_the_wrong_shape(row, what, message):
    if what == "sample" and row.name == "SVRB":
        pytest.skip("looks at all tasks without asking which")
    problem = row.quadratic(tasks=True)
    problem.tasks, before = Wrong(problem.tasks, what), values(problem.x, problem.y)
    options = {} if row.declared.tasks == "rows" else {"tasks_per_step": 3}
    optimizer = row(problem.x, problem.y, lower_batch=2, **options)
    with pytest.raises(ValueError, match=message):
        problem.run(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, values(problem.x, problem.y), strict=True))


def test_misuse():
    problem = Tasks()
    optimizer, x, y = bo.AID(problem.x, problem.y, **ARGUMENTS), problem.x[0], problem.y[0]
    step = partial(optimizer.step, tasks=problem.tasks)
    with pytest.raises(TypeError, match="Tensor has no sample"):
        optimizer.step(*problem.losses, tasks=problem.A)
    with pytest.raises(TypeError, match="tasks only together with both losses"):
        step()
    with pytest.raises(
        ValueError, match="Invalid lower_optimizer value: LBFGS does not update every entry independently"
    ):
        problem.run(bo.AID(problem.x, problem.y, **ARGUMENTS, lower_optimizer=torch.optim.LBFGS))
    for upper, lower, message in (
        (bo.Objective(problem.upper, [1]), problem.lower, "the upper loss takes its batches from the sampler"),
        (lambda b: y * 2, problem.lower, "upper loss must return a scalar tensor, but returned a tensor of shape"),
        (problem.upper, lambda b: b["A"].sum(), "lower loss depends on no parameter"),
        (problem.upper, lambda b: x.sum(), "lower loss does not depend on lower parameter 0"),
        (lambda b: y.square().sum(), lambda b: (y - b["A"].sum()).square().sum(),
         "neither loss depends on any upper parameter"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            step(upper, lower)


def test_dropout_masks_differ_between_tasks():
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(50, requires_grad=True)
    optimizer = bo.AID([x], [y], lr=0.0, lower_lr=1.0, lower_steps=1, lower_init=lambda ids: torch.zeros(3, 50))

    def lower(batch):
        return (y - F.dropout(torch.ones(50), 0.5) * batch.mean() - x).square().sum() / 2

    optimizer.backward(lambda batch: y.square().sum() / 2, lower, tasks=bo.TensorTasks(torch.ones(3, 1)))
    # The mean of three independent masks of 0 and 2 takes values between as well.
    assert {round(v, 3) for v in y.tolist()} > {0.667, 1.333}


def few_shot(body, cls=bo.AID, vectorize=True, head=None, **options):
    """Two steps on five tasks with a body that they share; returns its optimizer, and the values."""
    torch.manual_seed(1)
    body, head = body(), (head or nn.Linear)(6, 3)
    tasks = bo.TensorTasks(*[(torch.randn(5, 8, 4), torch.randint(0, 3, (5, 8))) for _ in range(2)])

    def loss(batch):
        hidden = body(batch[0])
        return F.cross_entropy(head(hidden[0] if isinstance(hidden, tuple) else hidden), batch[1])

    def lower(batch):
        return loss(batch) + 0.1 * sum(p.square().sum() for p in head.parameters())

    optimizer = cls(body.parameters(), head.parameters(), **ARGUMENTS, vectorize=vectorize, **options)
    for _ in range(2):
        optimizer.step(loss, lower, tasks=tasks)
    return optimizer, flat([*body.parameters(), *head.parameters()]), body


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("cls", [bo.AID, bo.FirstOrder])
def test_buffers_advance_once_in_a_step(cls, vectorize):
    """On the batch of the first task drawn."""
    norm = nn.BatchNorm1d(6)
    optimizer, _, _ = few_shot(lambda: nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh()), cls, vectorize)
    assert "vectorize_fallback" not in optimizer.diagnostics
    assert norm.running_mean.abs().min() > 0
    assert norm.num_batches_tracked == 2


@pytest.mark.usually("AID", "ITD")
@pytest.mark.parametrize("cls", [bo.AID, bo.ITD, bo.F2SA])
def test_losses_that_vmap_cannot_run_are_looped_over(cls):
    (optimizer, values, _), (_, looped, _) = (few_shot(lambda: nn.LSTM(4, 6), cls, v) for v in (True, False))
    assert optimizer.diagnostics["vectorize_fallback"]
    close(values, looped, 1e-12, 1e-12)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:FutureWarning", "ignore:.*torch.jit.script.*:DeprecationWarning"
)
@pytest.mark.parametrize("vectorize", [True, False])
def test_a_loss_that_hides_its_parameters_is_an_error_not_a_wrong_number(vectorize):
    with pytest.raises(RuntimeError, match="the lower loss reads parameters in a way that cannot be redirected"):
        few_shot(lambda: nn.Linear(4, 6), vectorize=vectorize, head=lambda *n: torch.jit.script(nn.Linear(*n)))


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, w):
        return (8 * w).round() / 8

    @staticmethod
    def backward(ctx, slope):
        return slope


class Quantised(nn.Linear):
    """A layer with rounded weights, which it passes to the estimator as they are or as a view."""

    viewed = False

    def forward(self, inputs):
        return F.linear(inputs, Rounded.apply(self.weight.view_as(self.weight) if self.viewed else self.weight))


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_function_of_a_parameter_itself_is_an_error_not_a_wrong_number(vectorize):
    """Without the derivatives' check too, which rounding does not pass; of a view the numbers are right."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 3), Quantised(3, 2)
    data = [(torch.randn(3, 6, 4), torch.randn(3, 6, 2)) for _ in range(2)]

    def upper(batch):
        return (head(body(batch[0]).tanh()) - batch[1]).square().mean()

    def lower(batch):
        return upper(batch) + 0.1 * head.weight.square().sum() + 0.1 * head.bias.square().sum()

    optimizer = bo.FOMAML(
        [*body.parameters(), *[p.detach().clone().requires_grad_() for p in head.parameters()]], head.parameters(),
        lr=0.1, lower_lr=0.1, lower_steps=2, vectorize=vectorize, check_derivatives=False,
    )  # fmt: skip
    start = head.weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"cannot be redirected to the tasks' own values, .*weight.view_as\(weight\)"
    ):
        optimizer.backward(upper, lower, tasks=bo.TensorTasks(*data))
    head.viewed = True
    optimizer.backward(upper, lower, tasks=bo.TensorTasks(*data))
    ends = []
    for inputs, targets in zip(*data[0], strict=True):
        weight, hidden = start, body(inputs).tanh().detach()
        for _ in range(2):
            error = hidden @ ((8 * weight).round() / 8).T - targets
            weight = weight - 0.1 * (2 / error.numel() * error.T @ hidden + 0.2 * weight)
        ends.append(weight)
    close(head.weight.detach(), torch.stack(ends).mean(0), 1e-12, 1e-12)


def test_checkpointing_is_found_where_only_the_gradient_in_x_shows_it():
    """That of a linear layer in its weight does not depend on the weight."""
    with pytest.raises(RuntimeError, match=r"cannot be redirected to the tasks' own values, as .* checkpointing"):
        few_shot(lambda: nn.Linear(4, 6), vectorize=False, head=Recomputed, check_derivatives=False)


class Recomputed(nn.Linear):
    def forward(self, inputs):
        return checkpoint(super().forward, inputs, use_reentrant=False)


def test_features_of_tasks_are_evaluated_once():
    """PZOBO: one batched call for all paths and tasks, and one in the upper loss."""
    problem = Cleaning(form="tasks", features=True)
    optimizer = bo.PZOBO(problem.x, problem.y, lr=0.1, lower_lr=0.2, lower_steps=6, directions=2, generator=seeded())
    for _ in range(2):
        problem.evaluations["features"] = 0
        problem.run(optimizer)
    assert problem.evaluations["features"] == 2


@pytest.mark.parametrize("method", ["BOME", "PZOBO"])
def test_features_of_tasks_that_are_taken_one_by_one_are_evaluated_once_for_each(method):
    """Not at every lower step: what each task's batch was, it is again."""
    calls = []
    counts = {}
    x, y = torch.eye(3, dtype=torch.float64, requires_grad=True), torch.zeros(3, dtype=torch.float64).requires_grad_()

    def features(batch):
        calls.append(1)
        return batch @ x

    data = torch.randn(4, 5, 3, dtype=torch.float64, generator=seeded())
    own = {"directions": 1, "share_directions_across_tasks": False, "generator": seeded()}
    for steps in (2, 7):
        optimizer = getattr(bo, method)(
            [x], [y], lr=0.1, lower_lr=0.1, lower_steps=steps, **(own if method == "PZOBO" else {"joint_steps": steps})
        )
        objectives = [bo.Objective(lambda z: ((z @ y) - 1).square().mean(), features=features) for _ in range(2)]
        optimizer.backward(*objectives, tasks=bo.TensorTasks(data))
        calls.clear()
        optimizer.backward(*objectives, tasks=bo.TensorTasks(data))
        counts[steps] = len(calls)
    assert counts[2] == counts[7]


class Whitened:
    """Features of one task, or of several, normalised by the largest input of each."""

    def __init__(self, x):
        self.x, self.together = x, 0

    def __call__(self, batch):
        return batch[0] @ self.x / batch[0].abs().amax(), batch[1]

    def stacked(self, batch):
        self.together += 1
        return batch[0] @ self.x / batch[0].abs().amax((1, 2), keepdim=True), batch[1]


@each(("AID", "ITD", "F2SA", "PZOBO", "ANIL", "BOME", "DLSGD"))
def test_features_may_be_those_of_all_tasks_together(row):
    """The same numbers as under vmap, from one call for all tasks."""
    found = []
    for together in (False, True):
        torch.manual_seed(0)
        tasks = bo.TensorTasks((torch.randn(3, 6, 4), torch.randint(0, 2, (3, 6))))
        x, y = torch.randn(4, 5, requires_grad=True), torch.zeros(5, 2, requires_grad=True)
        start = [y.detach().clone().requires_grad_()] if row.cls.declared.initial else []

        def loss(part, y=y):
            return F.cross_entropy(part[0] @ y, part[1]) + 0.1 * y.square().sum()

        features = Whitened(x)
        objective = bo.Objective(loss, features=features if together else features.__call__)
        optimizer = row([x, *start], [y], short=True)
        optimizer.backward(objective, objective, tasks=tasks)
        torch.manual_seed(1)
        optimizer.backward(objective, objective, tasks=tasks)
        found.append(x.grad.clone())
        assert bool(features.together) == together
    close(*found, 1e-10, 1e-10)


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_pickle_of_an_earlier_version_is_loaded(one, last):
    """It had the data of the two levels as two attributes, at first without a cache of ids; the first step failed."""
    lower = torch.randn(4, 6, 2, generator=seeded(0)), torch.arange(24).reshape(4, 6)
    upper = lower if one else (torch.randn(4, 3, 2, generator=seeded(1)), torch.arange(12).reshape(4, 3))
    rows = {"lower": 6, "upper": 6 if one else 3}
    old = bo.TensorTasks.__new__(bo.TensorTasks)
    vars(old).update(_lower=lower, _upper=upper, _tasks=4, _rows=rows, **({"_last": None} if last else {}))
    loaded, made = pickle.loads(pickle.dumps(old)), bo.TensorTasks(lower, None if one else upper)
    assert vars(loaded).keys() == vars(made).keys()
    assert (len(loaded), repr(loaded)) == (len(made), repr(made))
    assert (loaded._data["upper"] is loaded._data["lower"]) == one
    ids = made.sample(3, seeded(2))
    assert torch.equal(ids, loaded.sample(3, seeded(2)))
    for level in ("lower", "upper"):
        for n in (None, 2):
            drawn = [getattr(tasks, level)(ids, n, seeded(3)) for tasks in (loaded, made, copy.deepcopy(loaded))]
            assert all(same(drawn[0], other) for other in drawn[1:])

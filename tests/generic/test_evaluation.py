"""Results do not depend on the evaluation of losses: vmap or loop, separate features, precision, device."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import bilevel_optim as bo

from ..problems import Tasks, close, flat, same, seeded, values
from ..registry import HALF, ROWS, each

FORMS = pytest.mark.parametrize(
    ("row", "form"),
    [
        pytest.param(row, form, id=f"{row.name}-{form}")
        for row in ROWS
        for form in ("whole", "tasks")
        if row.declared.tasks != ("none" if form == "tasks" else "required")
    ],
)


def outcome(row, form="whole", steps=2, **options):
    """Values and gradients after some steps, and the optimizer."""
    chosen = {name: options.pop(name) for name in ("features", "dropout", "dtype", "rank") if name in options}
    problem = row.cleaning(form, **chosen)
    if form == "tasks":
        options = {"generator": seeded(), "lower_batch": 4, **options}
    torch.manual_seed(0)
    optimizer = row(problem.x, problem.y, short=True, **options)
    problem.run(optimizer, steps)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in problem.x]
    return flat([*problem.parameters, *gradients]), optimizer


def agree(row, a, b):
    close(a, b, row.rounding)


@FORMS
def test_separate_features_equal_inline_features(row, form):
    """Objective(features=) gives the same numbers; other tests count its savings for a few methods."""
    inline = outcome(row, form)[0]
    apart, optimizer = outcome(row, form, features=True)
    agree(row, apart, inline)
    assert "vectorize_fallback" not in optimizer.diagnostics


@pytest.mark.parametrize(
    ("row", "form"),
    [pytest.param(row, "batches", id=row.name) for row in ROWS if row.declared.copies]
    + [pytest.param(row, "tasks", id=f"{row.name}-tasks") for row in ROWS if row.takes_tasks and not row.variant],
)
def test_vectorised_equals_looped(row, form):
    together, optimizer = outcome(row, form)
    for chunk in (False, 2):
        other, looped = outcome(row, form, vectorize=chunk)
        agree(row, other, together)
        assert looped.oracle_counts == optimizer.oracle_counts
        assert "vectorize_fallback" not in looped.diagnostics
    assert "vectorize_fallback" not in optimizer.diagnostics


@each(lambda row: row.declared.tasks == "stacked")
def test_tasks_together_are_a_loop_over_tasks(row):
    """Also where nothing has converged: few lower steps, few iterations of the linear solver, adaptive steps."""

    def gradient(ids):
        problem = Tasks(m=3, tasks=ids)
        if row.declared.initial:
            problem.x.append(problem.y[0].detach().clone().requires_grad_())
        problem.tasks.sample = lambda n, generator: torch.arange(n)  # draws nothing, so that methods draw the same
        torch.manual_seed(0)
        options = {"lower_steps": 2, "lower_optimizer": torch.optim.Adam, "lower_lr": 0.05, "warm_start": True}
        optimizer = row(problem.x, problem.y, short=True, **options)
        problem.apply(optimizer.backward)
        return flat(p.grad for p in problem.x), problem.y[0].detach(), optimizer.oracle_counts

    together, alone = gradient(slice(0, 3)), [gradient(slice(i, i + 1)) for i in range(3)]
    for k in (0, 1):
        agree(row, together[k], torch.stack([a[k] for a in alone]).mean(0))
    assert together[2] == {name: 3 * count for name, count in alone[0][2].items()}


@each(lambda row: not row.variant)
def test_dropout_is_shared_by_the_evaluations_of_a_sample(row):
    """It is drawn from torch's generator, so that a seed repeats a step, and does not prevent vmap."""
    form = "tasks" if row.takes_tasks else "whole"
    (first, optimizer), (second, _) = (outcome(row, form, dropout=0.5) for _ in range(2))
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert "vectorize_fallback" not in optimizer.diagnostics


@pytest.mark.usually("F2SA")
@pytest.mark.parametrize("vectorize", [pytest.param(True, marks=pytest.mark.slow), False])
@each(lambda row: not row.variant)
def test_steps_where_gradients_are_off(row, vectorize):
    """A step turns them on for what it differentiates, as for a distributed checkpoint, which makes one."""
    ends = []
    for off in (False, True):
        problem = row.cleaning()
        optimizer = row(problem.x, problem.y, short=True, vectorize=vectorize, generator=seeded(1))
        with torch.no_grad() if off else nullcontext():
            problem.run(optimizer, 2)
        ends.append(values(problem.parameters))
    assert same(*ends)


# ---------------------------------------------------------------------------------------------------- precision, device


@each(lambda row: not row.variant and HALF.get(row.name, {}) is not None)
def test_bfloat16_autocast(row):
    """Losses under autocast, parameters and solver vectors in float32; around the loss or around the step."""
    torch.set_default_dtype(torch.float32)
    found = []
    for where in ("none", "loss", "step"):
        problem = row.cleaning(n=60, dtype=torch.float32)
        start = flat(problem.x)
        torch.manual_seed(0)
        optimizer = row(problem.x, problem.y, **HALF.get(row.name, {}))
        cast = torch.autocast("cpu", torch.bfloat16)
        if where == "loss":
            problem.objectives = [cast(loss) for loss in problem.objectives]
        with cast if where == "step" else nullcontext():
            problem.run(optimizer, 3)
        assert {p.dtype for p in problem.parameters} == {torch.float32}
        found.append(flat(problem.x) - start)
    for other in found[1:]:
        assert 0 < (other - found[0]).norm() <= 0.1 * found[0].norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each(lambda row: row.declared.tasks != "required")
def test_cuda_equals_cpu(row):
    results = []
    for device in ("cpu", "cuda"):
        problem = row.cleaning()
        for name in ("X", "Xv", "t", "tv", "index"):
            setattr(problem, name, getattr(problem, name).to(device))
        for parameter in problem.parameters:
            parameter.data = parameter.data.to(device)
        optimizer = row(problem.x, problem.y, short=True, **({"generator": None} if row.declared.random else {}))
        if row.declared.random:  # each device draws its own numbers
            problem.run(optimizer, 3)
            continue
        problem.run(optimizer, 3)
        results.append(flat(problem.parameters).cpu())
    if results:
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", [bo.SOBA, bo.FSLA, bo.AID])
def test_differences_of_gradients_share_the_random_numbers_of_a_sample(method):
    """An exact product needs a single evaluation, which may draw anything."""
    found = []
    for hvp in ("exact", "finite-difference"):
        x, y = (torch.linspace(a, 1, 4, dtype=torch.float64).requires_grad_() for a in (0.2, -1))
        options = {"lower_steps": 2} if method is bo.AID else {}
        optimizer = method([x], [y], lr=0.1, lower_lr=0.1, hvp=hvp, **options)

        def lower(x=x, y=y):
            return ((1 + torch.rand(4, dtype=y.dtype)) * (x.exp() * y.square() - x * y)).sum()

        torch.manual_seed(3)
        for _ in range(3):
            optimizer.step(lambda y=y: (y - 1).square().sum(), lower)
        found.append(torch.stack([x.detach(), y.detach()]))
    close(*found, 1e-6)


def test_a_lower_step_that_overflows_is_refused():
    x, y = (torch.ones(2, dtype=torch.float32, requires_grad=True) for _ in range(2))
    optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=1e30, linear_lr=0.1)
    with pytest.raises(bo.NonFiniteError, match="lower_grad"):
        optimizer.step(lambda: (y - 1).square().sum(), lambda: 1e10 * (y - x + 1).square().sum())
    assert bool((y == 1).all())


def test_a_step_of_signs_hides_no_infinite_gradient():
    x, y = (torch.zeros(2, dtype=torch.float32, requires_grad=True) for _ in range(2))
    options = {"lower_optimizer": torch.optim.Rprop, "hvp": "finite-difference"}
    optimizer, calls = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1, **options), []

    def lower():  # its value is zero, its slope overflows
        calls.append(1)
        return (y - x).square().sum() + (
            (y * 1e30 * 1e10).sum() if len(calls) <= 2 else 0
        )  # the first is compared with the second

    with pytest.raises(bo.NonFiniteError, match="lower_grad"):
        optimizer.step(lambda: (y - 1).square().sum(), lower)
    assert y.tolist() == [0, 0]


@pytest.mark.parametrize("form", ["F2SA", "PZOBO", "AID", "RTMLMC", "ESMAML"])
def test_a_loss_may_choose_parameters_by_requires_grad(form):
    """Copies and tasks replace the parameters by values under vmap, or without a gradient; both are still trained."""

    def estimated(chosen):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(2, 1), torch.full((1,), 0.3, requires_grad=True)
        start = [p.detach().clone().requires_grad_() for p in model.parameters()]
        inputs = torch.randn(5, 2)

        def upper(batch=0.0):
            return (model(inputs) - 2 - batch).square().mean()

        def lower(batch=0.0):
            return (model(inputs) * x - 1 - batch).square().mean() + sum(p.square().sum() for p in chosen(model))

        def with_few(method, upper_parameters=(x,), **options):
            generator = torch.Generator().manual_seed(0)
            return method(upper_parameters, model.parameters(), lr=0.1, lower_lr=0.1, generator=generator, **options)

        tasks = bo.TensorTasks(torch.arange(3.0).view(3, 1, 1))
        given = {"lower_batch": None, "upper_batch": None, "tasks_per_step": 3}
        options = {
            "F2SA": {"lower_steps": 3},
            "PZOBO": {"lower_steps": 3, "directions": 2, "direction": "orthogonal"},
            "AID": {"lower_steps": 3, **given},
            "RTMLMC": {"levels": 2, "smoothness": 9.0, **given},
            "ESMAML": {"lower_steps": 3, "directions": 2, "lower_directions": 2, "upper_parameters": [x, *start]},
        }[form]
        optimizer = with_few(getattr(bo, form), **options)
        optimizer.backward(upper, lower, **({"tasks": tasks} if "tasks_per_step" in options else {}))
        return [p.grad for p in optimizer.parameters("upper")]

    plain = estimated(lambda model: model.parameters())
    assert all(
        map(
            torch.equal,
            estimated(lambda model: [p for p in model.parameters() if p.requires_grad and p.is_leaf]),
            plain,
        )
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [partial(bo.AID, lower_steps=3), bo.BOME, bo.SOBA], ids=["AID", "BOME", "SOBA"])
@pytest.mark.parametrize(
    "entry", [lambda y: y, lambda y: y.reshape(1)[0], lambda y: y.view(1).squeeze()], ids=["y", "view", "squeeze"]
)
def test_an_upper_loss_may_be_an_entry_of_y(make, entry, compiled):
    """Losses, diagnostics and iterates are those of the same number computed, and do not change later."""
    found = []
    for upper in (entry, lambda y: 1.0 * y):
        x, y = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.3, 0.7))
        optimizer = make([x], [y], lr=0.05, lower_lr=0.2)
        if compiled:
            optimizer.compile(backend="eager")
        losses = partial(upper, y), lambda x=x, y=y: (y - x.sin()).square() / 2 + y**4 / 10
        kept = [optimizer.step(*losses).reshape(1) for _ in range(4)] + [optimizer.run(*losses, steps=9)]
        figures = [value for value in optimizer.diagnostics.values() if isinstance(value, torch.Tensor)]
        assert "compile_fallback" not in optimizer.diagnostics
        found.append([*kept, *figures, x.detach(), y.detach()])
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs, 1e-12)

"""Resumes that were not exact: shared generators, persistent workers, states before a draw, first-step checks."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Sampler

import bilevel_optim as bo

from ..problems import Given, assign, same, seeded, values
from ..registry import each
from .batch_norm_problem import BatchNormProblem


def drawn(objectives, n):
    return [[o.draw().batch.tolist() for o in objectives] for _ in range(n)]


@pytest.mark.parametrize("after", [0, 1, 3, 4, 7])
def test_loaders_that_share_a_generator_continue(after):
    def make():
        generator = seeded(1)
        data = torch.arange(8.0), torch.arange(12.0)
        return [bo.Objective(sum, DataLoader(t, batch_size=2, shuffle=True, generator=generator)) for t in data]

    first, again = make(), make()
    drawn(first, after)
    for objective, source in zip(again, first, strict=True):
        objective.load_state_dict(source.state_dict())
    assert drawn(first, 9) == drawn(again, 9)


def test_a_generator_shared_with_the_optimizer_continues():
    def make():
        generator = seeded(1)
        x, y = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
        data = [DataLoader(torch.arange(6.0), batch_size=2, shuffle=True, generator=generator) for _ in range(2)]
        upper = bo.Objective(lambda b: (y - b.mean()).square().sum(), data[0])
        lower = bo.Objective(lambda b: (y - x * b.mean()).square().sum(), data[1])
        return Given([x], [y], upper, lower), bo.PZOBO(
            [x], [y], lr=0.01, lower_lr=0.01, lower_steps=2, directions=2, generator=generator
        )

    (problem, optimizer), (twin, other) = make(), make()
    problem.run(optimizer, 4)
    for objective, source in zip(twin.losses, problem.losses, strict=True):
        objective.load_state_dict(source.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assign([*twin.x, *twin.y], values(problem.x, problem.y))
    problem.run(optimizer, 4)
    twin.run(other, 4)
    assert same(values(problem.x, problem.y), values(twin.x, twin.y))


def test_persistent_workers_continue_after_the_first_pass():
    def make():
        loader = DataLoader(
            torch.arange(8.0), 2, shuffle=True, num_workers=1, persistent_workers=True, generator=seeded(1)
        )
        return [bo.Objective(sum, loader)]

    first, again = make(), make()
    drawn(first, 6)
    again[0].load_state_dict(first[0].state_dict())
    assert drawn(first, 8) == drawn(again, 8)


def test_a_state_before_the_first_draw_has_the_generator():
    loaders = [DataLoader(torch.arange(8.0), 2, shuffle=True, generator=seeded(k)) for k in (1, 2)]
    first, again = ([bo.Objective(sum, loader)] for loader in loaders)
    again[0].load_state_dict(first[0].state_dict())
    assert drawn(first, 6) == drawn(again, 6)


@pytest.mark.parametrize("stop", [1, 2])
@pytest.mark.parametrize("case", ["independent", "features", "tasks"])
def test_first_step_checks_use_up_no_random_numbers(case, stop):
    """With dropout: what a fresh optimizer looks at once more is not drawn from what the run draws from."""

    def make():
        X, Xv = (torch.randn(3, 6, 4, generator=seeded(k), dtype=torch.float64) for k in (0, 1))
        x, y = torch.ones(4, dtype=torch.float64, requires_grad=True), torch.zeros(4, dtype=torch.float64)
        y.requires_grad_()

        def features(batch):
            return F.dropout(batch * x, 0.5)

        def head(part):
            return (part @ y - 1).square().mean() + y.square().sum()

        whole = lambda batch: head(features(batch))  # noqa: E731
        options = {"lr": 0.1, "lower_lr": 0.1, "lower_steps": 2, "generator": seeded(2)}
        if case == "independent":
            losses = [bo.Objective(whole, list(data)) for data in (Xv, X)]
            return Given([x], [y], *losses), bo.F2SA([x], [y], order=4, samples="independent", **options)
        kind = {"features": features} if case == "features" else {}
        losses = [bo.Objective(head if kind else whole, **kind) for _ in range(2)]
        problem = Given([x], [y], *losses)
        problem.tasks = bo.TensorTasks(X, Xv)
        return problem, bo.AID([x], [y], tasks_per_step=2, lower_batch=3, upper_batch=3, linear_steps=2, **options)

    (problem, optimizer), (twin, other) = make(), make()
    torch.manual_seed(0)
    problem.run(optimizer, stop)
    state, random = optimizer.state_dict(), torch.get_rng_state()
    positions = [o.state_dict() for o in problem.losses]
    assign([*twin.x, *twin.y], values(problem.x, problem.y))
    problem.run(optimizer, 2)
    for objective, position in zip(twin.losses, positions, strict=True):
        objective.load_state_dict(position)
    other.load_state_dict(state)
    torch.set_rng_state(random)
    twin.run(other, 2)
    assert same(values(problem.x, problem.y), values(twin.x, twin.y))


@each(lambda row: not row.variant or row.variant == "differences")
def test_parameters_without_dimensions_keep_their_precision(row):
    """A 0-dim float32 lower parameter had its linear solution in float64, and an upper one a gradient: no step ran."""
    x, y = torch.tensor(0.5, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    tasks = row.declared.tasks == "required"
    if row.declared.losses == 1:
        problem = Given([x], [y], lambda: x * y - y**2 + x**2, None)
    elif tasks or row.declared.data == "finite_sum":
        problem = Given([x], [y], lambda b: (y - 1) ** 2 + 0 * b.mean(), lambda b: (y - x) ** 2 + 0 * b.mean())
        problem.tasks = bo.TensorTasks(torch.zeros(3, 2, 1)) if tasks else None
        if not tasks:
            problem.upper, problem.lower = (bo.FiniteSum(f, torch.zeros(4, 1)) for f in (problem.upper, problem.lower))
    else:
        problem = Given([x], [y], lambda: (y - 1) ** 2, lambda: (y - x) ** 2)
    if row.declared.losses == 1:
        type(problem).losses = property(lambda self: (self.upper,) if self.lower is None else (self.upper, self.lower))
    if row.declared.initial:
        problem.x.append(torch.tensor(0.2, requires_grad=True))
    if row.cls is bo.ANIL:
        problem.x[:1] = [x]
    options = {"lower_optimizer": torch.optim.Adam} if row.declared.lower_optimizer == "differentiable" else {}
    optimizer = row(problem.x, problem.y, short=True, **options)
    for _ in range(3):
        problem.apply(optimizer.step)
        problem.apply(optimizer.backward)
    for p, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and not name.startswith("rows.") and "." not in name:
                assert value.dtype == p.dtype, name


@each(lambda row: not row.variant)
@pytest.mark.parametrize("tasks", [False, True])
def test_buffers_advance_once_per_step_and_counts_continue(row, tasks):
    """Buffers advance once, with and without tasks; counts continue after a resume, which detects the modules again."""
    if (tasks and not row.takes_tasks) or (not tasks and row.declared.tasks == "required"):
        pytest.skip("takes no such problem")

    def make():
        problem = BatchNormProblem(row, tasks)
        return problem, problem.optimizer(short=True, lower_batch=4, upper_batch=4)

    (problem, optimizer), (twin, other) = make(), make()
    torch.manual_seed(0)
    problem.run(optimizer, 2)
    assert int(problem.norm.num_batches_tracked) == 2
    if not tasks and row.declared.tasks != "required":
        means = torch.stack([X.mean(0) for X in problem.X])
        mean = problem.norm.running_mean
        assert any(torch.allclose(mean, 0.5 * a + 0.25 * b) for a in means for b in means)
    state, random = optimizer.state_dict(), torch.get_rng_state()
    positions = [o.state_dict() for o in problem.losses if isinstance(o, bo.Objective)]
    assign([*twin.x, *twin.y, *twin.norm.buffers()], [*values(problem.x, problem.y), *problem.buffers()])
    for objective, position in zip((o for o in twin.losses if isinstance(o, bo.Objective)), positions, strict=True):
        objective.load_state_dict(position)
    other.load_state_dict(state)
    problem.run(optimizer, 2)
    torch.set_rng_state(random)
    twin.run(other, 2)
    assert same([*values(problem.x, problem.y), *problem.buffers()], [*values(twin.x, twin.y), *twin.buffers()])
    assert optimizer.oracle_counts == other.oracle_counts


@each(("RTMLMC", "DLSGD"))
def test_buffers_advance_once_per_step_with_conjugate_gradients(row):
    problem = BatchNormProblem(row)
    optimizer = problem.optimizer(short=True, lower_batch=4, upper_batch=4, neumann="cg")
    for k in (1, 2):
        problem.run(optimizer)
        assert problem.norm.num_batches_tracked == k
    before = problem.buffers()
    problem.fails = ["upper", 1, "nan"]
    with pytest.raises(bo.NonFiniteError):
        problem.run(optimizer)
    assert same(before, problem.buffers())


@pytest.mark.parametrize("kind", [list, tuple, DataLoader])
def test_a_position_beyond_the_end_of_other_data_is_refused(kind):
    long, short = ([torch.tensor([float(k)]) for k in range(n)] for n in (5, 3))
    saved = bo.Objective(torch.sum, kind(long))
    for _ in range(4):
        saved.draw()
    other, same = (bo.Objective(torch.sum, kind(data)) for data in (short, long))
    with pytest.raises(ValueError, match="saved at batch 4 of a pass, but the data of this Objective have 3 batches"):
        other.load_state_dict(saved.state_dict())
    assert torch.equal(other.draw().batch.flatten(), short[0])
    same.load_state_dict(saved.state_dict())
    assert torch.equal(same.draw().batch, saved.draw().batch)


def test_a_sampler_without_a_length_continues():
    class Endless(Sampler):
        def __iter__(self):
            return itertools.cycle(range(5))

    saved, other = (bo.Objective(torch.sum, DataLoader(torch.arange(5.0), sampler=Endless())) for _ in range(2))
    for _ in range(7):
        saved.draw()
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other.draw().batch, saved.draw().batch)

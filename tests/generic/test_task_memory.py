"""`task_memory=True`: the lower solve of each task starts where it ended when the task was last drawn."""

import pytest
import torch

import bilevel_optim as bo

from ..problems import same, seeded, values

METHODS = {"AID": {"linear_steps": 5}, "ITD": {}, "F2SA": {"normalize": False}, "SOBA": {}, "StocBiO": {},
           "FirstOrder": {}, "PZOBO": {"warm_start": True}}  # fmt: skip
TARGETS = torch.tensor([[-4.0, 1.0], [2.0, 3.0], [8.0, -5.0], [0.5, 0.5], [3.0, 3.0]], dtype=torch.float64)


def made(name, **options):
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    y = [torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.zeros((), dtype=torch.float64).requires_grad_()]
    upper = lambda batch: (y[0] - 1).square().sum() + y[1].square()  # noqa: E731
    lower = lambda batch: (y[0] - x - batch[0]).square().sum() / 2 + (y[1] - batch[0, 0]).square() / 2  # noqa: E731
    steps = {"lower_steps": 1} if getattr(bo, name).declared.lower_steps else {}
    options = {"lr": 0.0, "lower_lr": 0.5, "tasks_per_step": 2, "generator": seeded(0), **options}
    optimizer = getattr(bo, name)([x], y, **steps, **METHODS[name], **options)
    return optimizer, x, y, upper, lower, bo.TensorTasks(TARGETS.unsqueeze(1))


def table(optimizer, y):
    return optimizer.state[y[0]]["rows.task_memory"]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", METHODS)
def test_each_task_goes_on_where_it_ended(name):
    """Half of the way in each step that draws it; after many steps each task is at its own solution, not at a mean.

    When it is drawn for the first time it starts at the live y, which the tasks before it have moved.
    """
    optimizer, _, y, upper, lower, tasks = made(name, task_memory=True)
    solutions = torch.cat([TARGETS, TARGETS[:, :1]], 1)
    drawn = torch.zeros(5)
    for _ in range(30):
        live = torch.cat([t.detach().reshape(-1) for t in y]).expand_as(solutions)
        known = table(optimizer, y) if y[0] in optimizer.state else live
        before = torch.where(drawn.bool().unsqueeze(1), known, live).clone()
        optimizer.step(upper, lower, tasks=tasks)
        after = torch.where(table(optimizer, y).isnan(), before, table(optimizer, y))
        moved = (after - before).abs().sum(1) > 1e-12
        assert moved.sum() <= 2
        drawn += moved
        torch.testing.assert_close((after - solutions)[moved], 0.5 * (before - solutions)[moved])
    assert (table(optimizer, y) - solutions).abs().max() < 0.5 ** min(drawn.tolist()) * 9
    forgetting, _, z, *rest = made(name)
    for _ in range(30):
        forgetting.step(*rest[:2], tasks=rest[2])
    assert "rows.task_memory" not in forgetting.state.get(z[0], {})


def coupled(name, **options):
    """Five tasks, y*(x) = A x + c_t with coupled y, and their mean hypergradient."""
    double = {"dtype": torch.float64, "generator": seeded(3)}
    a, x = torch.randn(3, 2, **double), torch.randn(2, **double).requires_grad_()
    targets, wanted = torch.randn(5, 3, **double), torch.randn(5, 3, **double)
    curvature = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 0.6]], dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.float64, requires_grad=True)

    def upper(batch):
        return (y - batch).square().sum() / 2 + x.square().sum() / 2

    def lower(batch):
        gap = y - a @ x - batch
        return gap @ curvature @ gap / 2

    tasks = bo.TensorTasks(targets, wanted)
    optimizer = getattr(bo, name)([x], [y], lr=0.0, lower_lr=0.4, generator=seeded(0), **options)
    slope = lambda ids: a.T @ (a @ x + targets[ids] - wanted[ids]).mean(0) + x  # noqa: E731
    return optimizer, x, upper, lower, tasks, slope


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["SOBA", "FSLA", "AmIGO", "AID"])
def test_v_of_each_task_goes_on_where_it_ended(name, compiled):
    """At fixed x one step on y and v in each draw leads to the exact hypergradient of the drawn tasks."""
    steps = {"lower_steps": 1, "linear_steps": 1} if getattr(bo, name).declared.lower_steps else {}
    optimizer, x, upper, lower, tasks, slope = coupled(name, task_memory=True, tasks_per_step=2, **steps)
    drawn, sample = [], tasks.sample
    tasks.sample = lambda n, generator: drawn.append(sample(n, generator)) or drawn[-1]
    if compiled:
        optimizer.compile(backend="eager", fullgraph=True)
    for _ in range(250):
        optimizer.backward(upper, lower, tasks=tasks)
    assert not compiled or "compile_fallback" not in optimizer.diagnostics
    torch.testing.assert_close(x.grad, slope(drawn[-1]).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["SOBA", "FSLA"])
def test_tasks_without_memory_are_told(name):
    """Neither y nor v of a task is kept, and one step from their mean is far from both."""
    optimizer, x, upper, lower, tasks, slope = coupled(name)
    with pytest.warns(bo.BilevelWarning, match="keeps neither without task_memory"):
        optimizer.backward(upper, lower, tasks=tasks)
    for _ in range(100):  # once is enough
        optimizer.backward(upper, lower, tasks=tasks)
    exact = slope(torch.arange(5)).detach()
    assert (x.grad - exact).norm() > 0.2 * exact.norm()


@pytest.mark.usually("SOBA")
@pytest.mark.parametrize("name", ["AID", "F2SA", "SOBA", "ITD"])
def test_it_is_the_same_compiled_and_resumed(name):
    def run(compiled=False, resumed=False):
        optimizer, x, y, upper, lower, tasks = made(name, lr=0.05, task_memory=True)
        if compiled:
            optimizer.compile(backend="eager", fullgraph=True)
        for k in range(6):
            if resumed and k == 3:
                state, generator = optimizer.state_dict(), optimizer.generator
                steps = {"lower_steps": 1} if optimizer.declared.lower_steps else {}
                optimizer = getattr(bo, name)(
                    [x], y, lr=0.05, lower_lr=0.5, tasks_per_step=2, generator=generator, task_memory=True, **steps,
                    **METHODS[name],
                )  # fmt: skip
                optimizer.load_state_dict(state)
            optimizer.step(upper, lower, tasks=tasks)
        return values([x], [table(optimizer, y)]), optimizer

    (eager, _), (graph, two), (again, _) = run(), run(compiled=True), run(resumed=True)
    assert "compile_fallback" not in two.diagnostics
    torch.testing.assert_close(graph, eager, rtol=1e-12, atol=1e-12)
    assert same(eager, again)


def test_incompatible_options_are_refused():
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    for options, text in (
        ({"warm_start": False}, r"warm_start=False already determines where"),
        ({"lower_init": lambda tasks: [torch.zeros(1)]}, r"lower_init already determines where"),
    ):
        with pytest.raises(ValueError, match=r"Invalid task_memory value: True \(" + text):
            bo.AID([x], [y], lr=0.1, lower_steps=1, task_memory=True, **options)
    with pytest.raises(
        ValueError, match=r"Invalid task_memory value: True \(MAML has its own rule for where tasks start"
    ):
        bo.MAML([x], [y], lr=0.1, lower_steps=1, task_memory=True)
    with pytest.raises(ValueError, match="Invalid task_memory value: 3"):
        bo.AID([x], [y], lr=0.1, lower_steps=1, task_memory=3)

    class Endless:
        def sample(self, n, generator):
            return torch.rand(n, 1)

        def lower(self, tasks, n, generator):
            return tasks

        upper = lower

    optimizer = bo.AID([x], [y], lr=0.1, lower_steps=1, task_memory=True, tasks_per_step=2)
    loss = lambda row: (y - x - row).square().sum()  # noqa: E731
    with pytest.raises(ValueError, match="needs a sampler with a length, but Endless has none"):
        optimizer.step(loss, loss, tasks=Endless())
    Endless.__len__ = lambda self: 5
    with pytest.raises(
        ValueError, match=r"needs a sampler that draws ids of tasks, .*torch\.float\d+ of shape \(2, 1\)"
    ):
        optimizer.step(loss, loss, tasks=Endless())
    assert not optimizer.state


def test_f2sa_with_an_upper_optimizer_is_backward_and_that_optimizer():
    ends = []
    for split in (False, True):
        x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        f, g = lambda: (y - 2).square().sum(), lambda: (y - x).square().sum() / 2  # noqa: B023
        optimizer = bo.F2SA([x], [y], lr=0.3, lower_steps=5, upper_optimizer=torch.optim.SGD)
        assert not optimizer.normalize
        sgd = torch.optim.SGD([x], lr=0.3)
        for _ in range(4):
            if split:
                optimizer.backward(f, g)
                sgd.step()
            else:
                optimizer.step(f, g)
        ends.append(x.detach().clone())
    assert torch.equal(*ends)
    assert bo.F2SA([x], [y], lr=0.3, lower_steps=5).normalize
    assert bo.F2SA([x], [y], lr=0.3, lower_steps=5, upper_optimizer=torch.optim.SGD, normalize=True).normalize


@pytest.mark.parametrize(
    ("ids", "answer"),
    [
        ([-1, 0], "keeps a row for each of 5 tasks, but sample returned ids from -1 to 0"),
        ([0, 5], "keeps a row for each of 5 tasks, but sample returned ids from 0 to 5"),
        ([True, False], r"sample returned torch\.bool of shape \(2,\); return a LongTensor"),
        (torch.tensor([1, 3], dtype=torch.int32), r"sample returned torch\.int32 of shape \(2,\)"),
    ],
)
@pytest.mark.parametrize(("steps", "compiled"), [(0, False), (1, False), (0, True), (1, True), (3, True)])
def test_ids_that_no_row_has(ids, answer, steps, compiled):
    optimizer, x, y, upper, lower, tasks = made("AID", lr=0.05, task_memory=True)
    if compiled:
        optimizer.compile(backend="eager")
    for _ in range(steps):
        optimizer.step(upper, lower, tasks=tasks)
    before = [t.detach().clone() for t in (x, *y)]
    tasks.sample = lambda n, generator: torch.as_tensor(ids)
    tasks.lower = tasks.upper = lambda ids, n, generator: torch.zeros(2, 1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=answer):
        optimizer.step(upper, lower, tasks=tasks)
    assert all(map(torch.equal, before, (x, *y)))


class Growing:
    """The first tasks of a sampler, whose length they are, or (``whole``) that of all of them."""

    def __init__(self, tasks, whole):
        self.tasks, self.whole, self.known = tasks, whole, 3

    def __len__(self):
        return len(self.tasks) if self.whole else self.known

    def sample(self, n, generator):
        return torch.randperm(self.known, generator=generator)[:n]

    def lower(self, tasks, n, generator):
        return self.tasks.lower(tasks, n, generator)

    def upper(self, tasks, n, generator):
        return self.tasks.upper(tasks, n, generator)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["AID", "SOBA"])
def test_sampler_may_grow(name, compiled):
    """As if its later tasks had always been there, and had not been drawn."""
    runs = []
    for whole in (False, True):
        steps = {"lower_steps": 1, "linear_steps": 1} if name == "AID" else {}
        optimizer, x, upper, lower, tasks, _ = coupled(name, task_memory=True, tasks_per_step=2, **steps)
        optimizer.param_groups[0]["lr"] = 0.05
        growing = Growing(tasks, whole)
        if compiled:
            optimizer.compile(backend="eager")
        for step in range(24):
            growing.known = 3 if step < 12 else 5
            optimizer.step(upper, lower, tasks=growing)
        assert "compile_fallback" not in optimizer.diagnostics
        (rows,) = [own["rows.task_memory"] for own in optimizer.state.values() if "rows.task_memory" in own]
        runs.append([x.detach().clone(), rows])
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-10)  # compiled steps round differently
    assert len(rows) == 5
    assert not rows.isnan().any()


class Places(bo.TensorTasks):
    """Tasks whose data depend on the place in the step, so that one task may have several."""

    def __init__(self, ids):
        super().__init__(TARGETS.unsqueeze(1))
        self.ids = torch.tensor(ids)

    def sample(self, n, generator):
        return self.ids

    def lower(self, tasks, n, generator):
        return super().lower(torch.arange(len(tasks)), n, generator)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["AID", "BOME", "F2SA", "PZOBO"])
def test_a_task_drawn_several_times_in_a_step_goes_on_where_its_last_draw_ended(name, steps):
    """`BOME` solves the tasks one by one, the others together."""
    options = {"lr": 0.0, "lower_lr": 0.5, "lower_steps": 1, "tasks_per_step": 4, "task_memory": True}
    options |= {"warm_start": True, "generator": seeded(0)}

    def rows(ids):
        _, x, y, upper, lower, _ = made("AID")
        optimizer = getattr(bo, name)([x], y, **options)
        for _ in range(steps):
            optimizer.step(upper, lower, tasks=Places(ids))
        return table(optimizer, y)

    assert torch.equal(rows([0, 1, 0, 0])[:2], rows([0, 1, 2, 3])[[3, 1]])

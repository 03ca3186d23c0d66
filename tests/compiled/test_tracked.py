"""Captured steps of SVRB, RSVRB, BSVRB and STABLE with rows of tasks: on the draws of the eager steps, and as local."""

import copy
import math
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bilevel_optim as bo
from bilevel_optim.methods.tracked import tracking

from ..problems import Problem, close, same, seeded

pytestmark = pytest.mark.filterwarnings("ignore:floor=")

CAPTURED = {"backend": "eager", "fullgraph": True}
CHANCES = [0.1, 0.2, 0.3, 0.4, 0.2, 0.1, 0.2]


class Noisy(Problem):
    """m quadratic tasks in three and two dimensions, with noise on both losses; the sampler has no length."""

    def __init__(self, m=7):
        random = torch.randn(m, 3, generator=seeded(), dtype=torch.float64)
        self.x = [torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)]
        self.y = [torch.zeros(m, 3, dtype=torch.float64, requires_grad=True)]
        self.targets, self.tasks = random, self

    def sample(self, n, generator):
        return (torch.randint(m := len(self.targets), (), generator=generator) + 3 * torch.arange(n)) % m

    def lower(self, tasks, n=None, generator=None):
        """The loss of a batch, or one for each of some tasks."""
        if isinstance(tasks, tuple):
            target, noise = tasks
            x, y = self.x[0], self.y[0]
            return (
                (1.5 + noise[0, 0]) * y.square().sum() / 2 + x.exp().sum() * y[0] ** 2 / 4 - y @ (target[0] * x.sum())
            )
        return self.targets[tasks].unsqueeze(1), 0.2 * torch.randn(len(tasks), 1, 3, generator=generator).double()

    def upper(self, tasks, n=None, generator=None):
        if isinstance(tasks, tuple):
            target, noise = tasks
            return (self.y[0] - target[0] + noise[0]).square().sum() / 2 + self.x[0].square().sum() / 20
        return self.lower(tasks, n, generator)


def made(cls, *, captured=None, m=7, **options):
    """An optimizer on a problem of its own."""
    problem = Noisy(m)
    optimizer = cls(problem.x, problem.y, **{"lr": 0.05, "lower_lr": 0.05, "generator": seeded(3), **options})
    if captured is not None:
        optimizer.compile(**captured)
    return problem, optimizer


def steps(problem, optimizer, count, at_once=0):
    """The losses of so many steps, the last ones in a run."""
    losses = [problem.run(optimizer) for _ in range(count - at_once)]
    if at_once:
        losses += optimizer.run(*problem.losses, tasks=problem.tasks, steps=at_once)
    return torch.stack(losses)


def ends(problem, optimizer):
    """All that a run leaves behind: y as it is, and the rest after all rows have caught up."""
    before = problem.y[0].detach().clone()
    optimizer.catch_up()
    state = [t for p in (*problem.x, *problem.y) for _, t in sorted(optimizer.state[p].items())]
    figures = [t for _, t in sorted(optimizer.diagnostics.items()) if isinstance(t, torch.Tensor)]
    own = optimizer.generator.get_state()
    return [t.detach().clone() for t in (before, *problem.x, *problem.y, problem.x[0].grad, *state, *figures, own)]


WAYS = {
    "svrb": (bo.SVRB, {}),
    "svrb free": (bo.SVRB, {"variant": "matrix_free"}),
    "stable": (bo.STABLE, {"ceilings": {"V": 0.7}}),
    "bsvrb": (bo.BSVRB, {"task_batch": 2, "radius": 0.4}),
    "bsvrb 2": (bo.BSVRB, {"task_batch": 2, "version": 2}),
    "rsvrb": (bo.RSVRB, {"task_batch": 2}),
    "rsvrb exact": (bo.RSVRB, {"task_batch": 2, "variant": "exact_mean", "lazy": True, "beta": 0.7}),  # is rebased
    "rsvrb faithful": (bo.RSVRB, {"task_batch": 2, "variant": "faithful", "probes": 3}),
    "rsvrb free": (bo.RSVRB, {"task_batch": 2, "variant": "matrix_free", "probabilities": CHANCES, "lazy": True}),
}


@pytest.mark.usually("rsvrb free")
@pytest.mark.parametrize("way", WAYS)
def test_captured_steps_are_the_eager_ones(way, monkeypatch):
    """Steps and a run agree; each number of different tasks has its own graph."""
    cls, options = WAYS[way]
    monkeypatch.setattr("bilevel_optim.methods.tracked.rows.REBASE", -2.0)
    results = []
    for captured in (None, CAPTURED):
        problem, optimizer = made(cls, captured=captured, **options)
        losses = steps(problem, optimizer, 50, at_once=16)
        results.append([losses, *ends(problem, optimizer)])
        names = set(optimizer.diagnostics), optimizer.numbers.keys()
        results[-1].append((*names, optimizer.oracle_counts))
    assert results[0].pop() == results[1].pop()
    for mine, theirs in zip(*results, strict=True):
        close(mine.double(), theirs.double(), 1e-13, rtol=1e-11)
    assert optimizer.captured_graphs == 1 + ("probabilities" in options)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["svrb", "rsvrb", "stable"])
def test_captured_steps_begin_anew_when_x_has_another_size(way):
    """That step visits all tasks, and draws otherwise than those that follow."""
    cls, options = WAYS[way]
    results = []
    for captured in (None, CAPTURED):
        problem, optimizer = made(cls, captured=captured, **options)
        losses = [steps(problem, optimizer, 5)]
        more = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer.add_param_group({"params": [more], "level": "upper", "lr": 0.1})
        losses.append(steps(problem, optimizer, 8, at_once=4))
        results.append([*losses, *ends(problem, optimizer)])
        assert "compile_fallback" not in optimizer.diagnostics
    for mine, theirs in zip(*results, strict=True):
        close(mine.double(), theirs.double(), 1e-13, rtol=1e-11)
    assert optimizer.captured_graphs == 2


@pytest.mark.slow  # as that in test_compile.py
@pytest.mark.parametrize("way", ["svrb free", "bsvrb 2"])
def test_a_captured_run_goes_on_bit_for_bit(way):
    cls, options = WAYS[way]
    problem, optimizer = made(cls, captured=CAPTURED, **options)
    steps(problem, optimizer, 9)
    saved, at = copy.deepcopy(optimizer.state_dict()), [t.detach().clone() for t in (*problem.x, *problem.y)]
    steps(problem, optimizer, 8)
    other, again = made(cls, captured=CAPTURED, **options)
    again.load_state_dict(saved)
    with torch.no_grad():
        for parameter, value in zip((*other.x, *other.y), at, strict=True):
            parameter.copy_(value)
    steps(other, again, 8, at_once=8)
    assert same(ends(problem, optimizer), ends(other, again))


class Copies(TorchDispatchMode):
    """Notes what makes a tensor with a row for each of m tasks."""

    def __init__(self, m):
        super().__init__()
        self.m, self.found = m, set()

    @classmethod
    def ignore_compile_internals(cls):
        return True  # else nothing is captured while it is on

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        new = [
            t
            for t in tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known
        ]
        self.found |= {str(function) for t in new if t.numel() >= self.m}
        return result


@pytest.mark.parametrize("lazy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_captured_step_makes_nothing_that_grows_with_the_number_of_tasks(lazy):
    """But where all rows are kept up to date; and where it fails, nothing has changed."""
    problem, optimizer = made(bo.RSVRB, captured=CAPTURED, m=2000, task_batch=1, lazy=lazy, lower_lr=1e-5)
    steps(problem, optimizer, 6)
    with Copies(1000) as copies:
        steps(problem, optimizer, 1)
    assert optimizer.captured_graphs == 1
    assert bool(copies.found) is not lazy
    optimizer.catch_up()
    problem.x[0].data[0] = math.nan
    before, counts = ends(problem, optimizer), optimizer.oracle_counts
    with pytest.raises(bo.NonFiniteError):
        steps(problem, optimizer, 1)
    after = ends(problem, optimizer)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    assert optimizer.oracle_counts == counts


@pytest.mark.parametrize(
    ("cls", "options", "reason"),
    [
        (bo.RSVRB, {"radius": 0.4}, "with a radius"),
        (bo.RSVRB, {"variant": "matrix_free", "ceilings": {"r": 0.4}}, "with a radius or ceiling"),
        (bo.RSVRB, {"probabilities": "adaptive"}, "computes the adaptive probabilities"),
        (bo.BSVRB, {"schedule": "cube_root"}, "depend on the step count"),
        (bo.SVRB, {"warm_start": False}, "begins with all rows"),
    ],
    ids=["radius", "ceiling", "adaptive", "schedule", "cold"],
)
def test_uncaptured_steps_say_why(cls, options, reason):
    results = []
    for captured in (None, {"backend": "eager"}):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            problem, optimizer = made(cls, captured=captured, **options)
            losses = steps(problem, optimizer, 6)
        results.append([losses, *ends(problem, optimizer)])
    assert same(*results)
    assert reason in optimizer.diagnostics["compile_fallback"]
    assert sum(reason in str(warning.message) for warning in given) == 1
    with pytest.raises(RuntimeError, match=reason):
        steps(*made(cls, captured=CAPTURED, **options), 3)


def test_a_captured_step_warns_of_a_noisy_beta_when_an_eager_one_does(monkeypatch):
    monkeypatch.setattr(tracking, "PATIENCE", 5)
    for captured in (None, CAPTURED):
        problem, optimizer = made(bo.RSVRB, captured=captured, task_batch=1, variant="matrix_free", beta=0.5)
        for k in range(9):
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                steps(problem, optimizer, 1)
            assert bool([w for w in given if "beta = 0.5" in str(w.message)]) == (k == 6)
    assert optimizer.captured_graphs == 1


@pytest.mark.parametrize("options", [{}, {"radius": 0.4}], ids=str)
def test_a_clock_of_an_older_checkpoint_goes_on(options):
    """It was a tuple; with a radius it has a history, and still is one."""
    results = []
    for old in (False, True):
        problem, optimizer = made(bo.RSVRB, task_batch=2, lazy=True, **options)
        steps(problem, optimizer, 5)
        state = optimizer.state_dict()
        clock = optimizer.numbers["clock"]
        if old and not options:
            time, *sums = clock.tolist()
            logs, drift, last = sums[:-2], ((sums[-2],),), ((sums[-1],),)
            optimizer.numbers["clock"] = (int(time), tuple(logs), drift, last, ())
        assert isinstance(clock, tuple) == bool(options)
        optimizer.load_state_dict(optimizer.state_dict() if old else state)
        steps(problem, optimizer, 5)
        assert isinstance(optimizer.numbers["clock"], torch.Tensor) != bool(options)
        results.append([*problem.x, *problem.y, *optimizer.state[problem.y[0]].values()])
    assert same(*results)


def test_a_loss_that_changes_out_of_sight_shows_in_the_rows():
    """A linear part of g is seen by w alone: neither by d nor by x in the same step."""
    problem, optimizer = made(bo.RSVRB, captured={"backend": "eager"}, task_batch=2, lazy=True)
    hidden = iter(range(9))
    left = torch.compiler.assume_constant_result(lambda: hidden.__length_hint__())  # which it is not

    def lower(batch):
        return problem.lower(batch) + 0.1 * left() * problem.y[0].sum()

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in hidden:
            optimizer.step(problem.upper, lower, tasks=problem.tasks)
    (warning,) = given
    assert "differs from the eager one in rows of w" in str(warning.message)

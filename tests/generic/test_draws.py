"""A method's declared draws are those of its eager steps, from the losses and from a sampler of tasks."""

import math

import pytest
import torch

import bilevel_optim as bo
from bilevel_optim.methods.tracked import tracking
from bilevel_optim.optimizer.step import LOWER, UPPER, TaskDraw, replace

from ..problems import seeded
from ..registry import ROWS, each

STEPS = 6
CONTEXTS = ("RTMLMC", "DLSGD")  # their draws depend on random levels


class Noted(bo.Objective):
    """An objective that records the level of each draw."""

    def __init__(self, source, level, log):
        super().__init__(source.loss, features=source.features)
        self.data, self.source, self.level, self.log = source.data, source, level, log

    terms = property(lambda self: self.source.terms)

    def begin(self):
        self.source.begin()

    def mark(self):
        return self.source.mark()

    def rewind(self, mark):
        self.source.rewind(mark)

    def sample(self, *arguments, once=False):
        return self.source.sample(*arguments, once=once)

    def draw(self, *, once=False):
        self.log.append((self.level, False))
        return self.source.draw(once=once)

    def samples(self, most=None):
        assert most is None
        self.log.append((self.level, True))
        return self.source.samples()

    def term(self, index, *, once=False):
        """All terms, one by one."""
        if index == 0:
            self.log.append((self.level, True))
            self.next = 0
        assert (self.log[-1], self.next) == ((self.level, True), index)
        self.next = (index + 1) % self.terms
        return self.source.term(index, once=once)


class NotedTasks:
    """A sampler that records its draws."""

    def __init__(self, source, log):
        self.source, self.log = source, log

    def __len__(self):
        return len(self.source)

    def sample(self, n, generator):
        self.log.append(("tasks", n))
        return self.source.sample(n, generator)

    def lower(self, tasks, n, generator):
        self.log.append(("lower", n))
        return self.source.lower(tasks, n, generator)

    def upper(self, tasks, n, generator):
        self.log.append(("upper", n))
        return self.source.upper(tasks, n, generator)


def watch(optimizer):
    """Let each step compare its draws with those declared before; return the list of declared draws."""
    log, declared = [], []
    objectives, compute = optimizer._objectives, optimizer._compute

    def noted(upper, lower):
        return tuple(
            Noted(o, level, log) for o, level in zip(objectives(upper, lower), ("upper", "lower"), strict=True)
        )

    def compared(oracle, inputs, tasks, *, update):
        sums = {"upper_terms": oracle.f.terms, "lower_terms": oracle.g.terms}
        terms = {name: n for name, n in sums.items() if n is not None}
        given = replace(inputs, numbers={**inputs.numbers, **terms})
        draws = optimizer._draws(given) if tasks is None else optimizer._task_draws(given, tasks)
        tasks = None if tasks is None else NotedTasks(tasks, log)
        log.clear()
        results = compute(oracle, inputs, tasks, update=update)
        if draws is not None:
            made = [draw for draw in draws if draw.only is None or inputs.random_inputs[draw.only[0]] >= draw.only[1]]
            assert log == [draw[:2] for draw in made]
        declared.append(draws)
        return results

    optimizer._objectives, optimizer._compute = noted, compared
    return declared


def watched(row, problem, **options):
    """Return the declarations of a method's first steps, after comparing each; the state is cleared in the middle."""
    optimizer = row(problem.x, problem.y, **{"short": True, "lr": 0.01, "lower_lr": 0.02, **options})
    declared = watch(optimizer)
    for k in range(STEPS):
        if k == 3:
            optimizer.state.clear()
        problem.apply(optimizer.step)
    assert len(declared) == STEPS
    return declared


@each(lambda row: row.declared.tasks != "required")
def test_steps_draw_what_is_declared(row):
    assert None not in watched(row, row.cleaning("batches"))


@each(lambda row: row.declared.data == "finite_sum")
def test_a_loss_without_data_is_a_sum_of_one_term(row):
    assert None not in watched(row, row.cleaning("whole"))


@pytest.mark.parametrize("options", [{}, {"lower_batch": 4, "upper_batch": 3}], ids=["all", "rows"])
@each(lambda row: row.takes_tasks)
def test_steps_with_tasks_draw_what_is_declared(row, options):
    stacked = row.declared.tasks == "stacked"
    found = watched(row, row.cleaning("tasks"), **options, **({"tasks_per_step": 2} if stacked else {}))
    assert {draws is None for draws in found} == {row.cls.__name__ in CONTEXTS}
    if stacked:
        assert found[0][0] == TaskDraw("tasks", 2)


OPTIONS = {
    "AID": [{"lower_steps": 0}, {"lower_steps": 5, "linear_steps": 7}, {"warm_start": False}],
    "AmIGO": [{"linear_steps": 1}, {"warm_start": False}],
    "BA": [{"growth": 1.0}, {"lower_steps": 0.5, "growth": 0.5}],
    "BOME": [{"joint_steps": 3, "barrier": b, "lower_steps": n} for b in ("grad_norm", "value") for n in (0, 2)],
    "BSA": [{"linear_steps": 6}, {"linear_steps": 1, "growth": 0.0, "lower_steps": 1}],
    "BSVRB": [{"task_batch": 2}, {"initial_steps": 2}],
    "F2SA": [{"samples": "independent", "order": p, "lower_steps": p} for p in (1, 2, 3)] + [{"stencil": "forward"}],
    "FOMAML": [{"lower_steps": 0}],
    "FSLA": [{"beta": 1.0}],
    "GDA": [{"lower_steps": n, "simultaneous": s} for n in (0, 1, 3) for s in (True, False)],
    "HOZOG": [{"difference": "forward", "lower_steps": 4}],
    "ITD": [{"truncate": 1}, {"truncate": 0, "checkpoint": True}, {"lower_steps": 0}],
    "MRBO": [{"linear_steps": 0}, {"linear_steps": 5}],
    "PRAGDA": [{"restart_steps": 2}],
    "PRAHGD": [{"restart_radius": 1e-9, "restart_steps": 1, "perturbation": 0.0}],
    "PZOBO": [{"difference": "central", "vectorize": 1}, {"lower_steps": 0}],
    "RAGDA": [{"newton_correction": True, "restart_radius": 1e-9, "lower_restart": "zero"}],
    "RAHGD": [
        {"restart_radius": 1e-9, "restart_steps": 2}, {"restart_radius": 1e-9, "lower_restart": "zero"},
        {"lower_restart": "zero", "restart_steps": 1}, {"restart_period": 2, "restart_radius": math.inf},
    ],
    "RSVRB": [
        {"task_batch": 2}, {"task_batch": 1, "initial_steps": 1}, {"task_batch": 2, "probabilities": "adaptive"},
        {"task_batch": 2, "variant": "faithful"}, {"task_batch": 2, "variant": "matrix_free", "warm_start": False},
    ],
    "SABA": [{"warm_start": False}],
    "SOBA": [{"warm_start": False}],
    "SRBA": [{"period": 1}, {"period": 2}, {"warm_start": False}],
    "STABLE": [{"initial_steps": 1}],
    "SUSTAIN": [{"linear_steps": 5}],
    "SVRB": [{"initial_steps": 2}, {"warm_start": False, "initial_steps": 1}, {"variant": "matrix_free"}],
    "StocBiO": [{"linear_steps": 0}, {"linear_steps": 5, "lower_steps": 1}],
    "TTSA": [{"linear_steps": 6, "lower_steps": 0}],
    "VRBO": [
        {"lower_steps": 0, "period": 2}, {"period": 2, "anchor_batches": 3}, {"period": 1}, {"warm_start": False},
    ],
    "iMAML": [{"lower_steps": 0, "linear_steps": 1}],
    "iMCN": [{"lower_steps": 0}],
}  # fmt: skip
CASES = [(row, options) for row in ROWS if not row.variant for options in OPTIONS.get(row.name, [])]


@pytest.mark.few(8)
@pytest.mark.filterwarnings("ignore::bilevel_optim.errors.BilevelWarning")  # no solution is looked for
@pytest.mark.parametrize(("row", "options"), CASES, ids=lambda part: getattr(part, "name", None))
def test_with_the_options_that_draws_depend_on(row, options):
    assert None not in watched(row, row.cleaning("batches"), **options)
    if row.takes_tasks:
        assert None not in watched(row, row.cleaning("tasks"), **options, lower_batch=4)


def test_a_first_step_in_chunks(monkeypatch):
    """A step visits all tasks, which are too many for one evaluation."""
    monkeypatch.setattr(tracking, "CHUNK", 1)
    (row,) = (row for row in ROWS if row.name == "RSVRB")
    first, second, *_ = watched(row, row.cleaning("tasks"), task_batch=2, initial_steps=1)
    assert first == [TaskDraw("upper", None), TaskDraw("lower", None)] * 2
    assert second == [TaskDraw("tasks", 2), *first[:2]]


@each(("AmIGO", "VRBO"))
def test_tasks_start_without_the_state_of_y(row):
    problem = row.cleaning("tasks")
    optimizer = row(problem.x, problem.y, short=True, lr=0.01, lower_lr=0.02, lower_batch=4, upper_batch=4)
    declared = watch(optimizer)
    for tasks in (None, None, problem.tasks, None):
        optimizer.step(*problem.losses, tasks=tasks)
    assert None not in declared


def test_a_sum_of_other_terms_starts_over():
    x, y = torch.tensor([2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer, data = bo.SABA([x], [y], lr=0.01, lower_lr=0.1), torch.randn(12)
    declared = watch(optimizer)
    upper = bo.FiniteSum(lambda t: (y - t).square().mean(), data, 3, generator=seeded(0))
    for size in (2, 2, 6, 6):
        optimizer.step(upper, bo.FiniteSum(lambda t: (y - x - t).square().mean(), data, size, generator=seeded(1)))
    assert [[draw.whole for draw in draws] for draws in declared] == [
        [True, True], [False, False], [False, True], [False, False],
    ]  # fmt: skip


@each(("RAHGD", "RAGDA"))
def test_decisions_of_the_host_are_not_declared(row):
    assert watched(row, row.cleaning("batches"), lower_tol=1e-12) == [None] * STEPS


@each(("AID", "SVRB"))
def test_a_wrong_declaration_is_found(row, monkeypatch):
    for wrong in ([LOWER, UPPER] * 4, [UPPER], []):
        monkeypatch.setattr(row.cls, "_draws", lambda self, given, wrong=wrong: wrong)
        with pytest.raises(AssertionError):
            watched(row, row.cleaning("batches"))

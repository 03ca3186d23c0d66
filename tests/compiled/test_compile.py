"""Captured steps: every method makes the same steps as without, and what a graph cannot see is run eagerly."""

import copy
import gc
import random
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bilevel_optim as bo
from bilevel_optim.compiled.backend import Program
from bilevel_optim.compiled.program import StepReader
from bilevel_optim.compiled.pure import PureStep
from bilevel_optim.oracle import batched

from ..problems import seeded
from ..registry import ROWS, each
from .test_losses import Held

STEPS, MANY = 5, 3


class Regression:
    """Ridge regression with one log-penalty for each weight, on batches; the losses count nothing."""

    def __init__(self, row, dtype=torch.float64, tasks=False, dropout=0.0, device="cpu"):
        generator = seeded(1)
        tasks = tasks or row.declared.tasks == "required"
        self.rows = tasks and row.declared.tasks == "rows"
        rows = torch.randn(3, 12, 5, generator=generator, dtype=torch.float64)
        targets = rows @ torch.randn(5, generator=generator, dtype=torch.float64) + 0.1
        self.data = rows.to(device, dtype), targets.to(device, dtype)
        self.log_penalty = torch.full((5,), -2.0, dtype=dtype, device=device, requires_grad=True)
        start = torch.linspace(-0.5, 0.5, 5, dtype=dtype, device=device)
        self.weight = (start.expand(3, 5).clone() if self.rows else start.clone()).requires_grad_()
        self.drop = nn.Dropout(dropout)
        self.x, self.y = [self.log_penalty], [self.weight]
        if row.declared.initial:
            self.x.append(start.clone().requires_grad_())
        self.tasks = bo.TensorTasks(self.data) if tasks else None
        self.losses = self._objectives(row)

    def lower(self, batch):
        """The training loss."""
        rows, targets = batch
        error = self.drop(rows) @ self.weight - targets
        return error.square().mean() / 2 + (self.log_penalty.exp() * self.weight.square()).sum() / 2

    def upper(self, batch):
        """The validation loss."""
        rows, targets = batch
        return (rows @ self.weight - targets).square().mean() / 2 + 0.01 * self.log_penalty.square().sum()

    def saddle(self, batch):
        """One loss, convex in x and concave in y."""
        rows, targets = batch
        return (rows @ self.log_penalty - targets) @ (rows @ self.weight) / 12 - self.weight.square().sum() / 2

    def _objectives(self, row):
        losses = (self.saddle,) if row.declared.losses == 1 else (self.upper, self.lower)
        if self.tasks is not None:
            return losses
        batches = [tuple(t[i, k : k + 4] for t in self.data) for i in range(3) for k in (0, 4, 8)]
        if row.declared.data == "finite_sum":
            return tuple(bo.FiniteSum(loss, batches, generator=seeded(i)) for i, loss in enumerate(losses))
        return tuple(bo.Objective(loss, batches[i:] + batches[:i]) for i, loss in enumerate(losses))

    def optimizer(self, row, **arguments):
        options = {"period": 3} if row.name == "SRBA" else {"growth": 0.0} if row.name in ("BA", "BSA") else {}
        options |= {"lr": 1e-6} if "independent" in row.name else {}  # noise over nu
        return row(self.x, self.y, short=True, **{**options, **arguments})

    def step(self, optimizer, steps=1):
        for _ in range(steps):
            loss = optimizer.step(*self.losses, **({} if self.tasks is None else {"tasks": self.tasks}))
        return loss

    def run(self, optimizer, steps):
        return optimizer.run(*self.losses, steps=steps, **({} if self.tasks is None else {"tasks": self.tasks}))


def close(a, b, rounding):
    return all(torch.allclose(s.detach(), t.detach(), rtol=rounding, atol=rounding) for s, t in zip(a, b, strict=True))


def pair(row, *, make=Regression, compiled=True, **arguments):
    """An eager optimizer and a captured one, each with a problem of its own."""
    both = []
    for captured in (False, True):
        problem = make(row)
        optimizer = problem.optimizer(row, **{name: value() for name, value in arguments.items()})
        if captured and compiled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", bo.BilevelWarning)
                optimizer.compile(backend="eager")
        both.append((problem, optimizer))
    return both


def compared(row, rounding=None, both=None, **arguments):
    """Steps and runs of both end at the same point; gives the captured optimizer."""
    (problem, eager), (other, captured) = both or pair(row, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bo.BilevelWarning)
        torch.manual_seed(0)
        problem.step(eager, STEPS)
        losses = torch.stack([problem.step(eager) for _ in range(MANY)])
        torch.manual_seed(0)
        other.step(captured, STEPS)
        found = other.run(captured, MANY)
    rounding = rounding or max(row.rounding * 100, 1e-10)
    assert close([losses, *problem.x, *problem.y], [found, *other.x, *other.y], rounding)
    for parameter, mine in zip(problem.x, other.x, strict=True):
        assert close([parameter.grad], [mine.grad], rounding)
        for name, value in eager.state[parameter].items():
            assert close([value], [captured.state[mine][name]], rounding), name
    assert captured.numbers.keys() == eager.numbers.keys()
    for name, value in eager.numbers.items():
        now = captured.numbers[name]
        if isinstance(value, torch.Tensor):
            assert close([now], [value], rounding), name
        else:
            assert now == value or now == pytest.approx(value, rel=rounding), name
    counts, expected = captured.oracle_counts, eager.oracle_counts
    if row.options.get("neumann") == "product":  # of a random number of products all are made
        assert counts["upper_grad"] == expected["upper_grad"]
    else:
        assert {**counts, "hvp": 0} == {**expected, "hvp": 0}
    return captured


def graphs(optimizer):
    """Return the number of graphs made so far."""
    return optimizer.captured_graphs


@pytest.mark.usually("AID", "ITD", "F2SA", "BOME", "SOBA", "PZOBO", "RAHGD", "MAML")
@each(lambda row: row.declared.tasks not in ("required",))
def test_captured_steps_are_the_eager_ones(row):
    captured = compared(row)
    reason = captured.diagnostics.get("compile_fallback", "")
    assert (graphs(captured) == 0) == bool(reason), reason
    assert reason == row.declared.uncaptured


@pytest.mark.usually("MAML")
@each(lambda row: row.takes_tasks and row.declared.losses == 2 and not row.declared.uncaptured)
def test_with_tasks(row):
    captured = compared(row, make=partial(Regression, tasks=True), rounding=1e-9)
    assert graphs(captured) or captured.diagnostics["compile_fallback"]


@pytest.mark.usually("AID")
@each(("AID", "F2SA", "MAML"))
def test_samplers_of_other_lengths_give_all_their_tasks(row):
    """A step takes all tasks of the present sampler, also where a graph for another number of tasks is there."""
    ends = []
    for captured in (False, True):
        problem = Regression(row, tasks=True)
        samplers = {n: bo.TensorTasks(tuple(t[:n] for t in problem.data)) for n in (3, 2)}
        optimizer = problem.optimizer(row)
        if captured:
            optimizer.compile(backend="eager", fullgraph=True)
        losses = []
        for n in (3, 3, 3, 2, 2, 2, 3, 2, 3):
            losses.append(optimizer.step(*problem.losses, tasks=samplers[n]))
            assert optimizer.diagnostics["task_count"] == n
        ends.append([torch.stack(losses), *problem.x, *problem.y])
    assert graphs(optimizer) == 2
    assert close(*ends, 1e-9)


@pytest.mark.usually("True")
@pytest.mark.parametrize("tasks", [True, False])
def test_a_lower_init_that_was_taken_away_comes_back(tasks):
    """A graph of steps without it does not serve steps with it."""
    row, ends = next(row for row in ROWS if row.name == "AID"), []
    for captured in (False, True):
        problem = Regression(row, tasks=tasks)
        start = problem.weight.detach().expand(3, 5).clone() if tasks else problem.weight.detach().clone()
        optimizer = problem.optimizer(row, lower_init=lambda *ids, start=start: [2 * start])
        init = optimizer.lower_init
        if captured:
            optimizer.compile(backend="eager", fullgraph=True)
        losses = []
        again = lambda *ids, start=start: [2 * start]  # noqa: E731 - as the first one
        for own in (None, init, None, again, init):
            optimizer.lower_init = own
            losses += [problem.step(optimizer) for _ in range(3)]
        ends.append([torch.stack(losses), *problem.x, *problem.y])
    assert graphs(optimizer) == (3 if tasks else 2)
    assert close(*ends, 1e-9)


@each(lambda row: row.name in ("SUSTAIN", "TTSA", "BSA"))
def test_a_random_number_of_products_is_one_graph(row):
    ends = []
    for captured in (False, True):
        problem = Regression(row)
        optimizer = problem.optimizer(row, linear_steps=3, generator=seeded(3))
        if captured:
            optimizer.compile(backend="eager", fullgraph=True)
        losses = [problem.step(optimizer) for _ in range(6)] + [*problem.run(optimizer, 14)]
        ends.append([torch.stack(losses), *problem.x, *problem.y, optimizer.generator.get_state()])
        positions = [objective.state_dict()["position"] for objective in problem.losses]
        ends[-1].append(torch.tensor(positions))
    assert graphs(optimizer) == 1
    assert close(*ends, 1e-12)
    assert ends[0][-1].tolist() == ends[1][-1].tolist()


GROWS = "the number of lower steps grows"


@pytest.mark.slow  # as the test below
@each(("BA", "BSA"))
def test_more_and_more_lower_steps_run_eagerly_at_once(row):
    """With the reason, as long as they grow; with a fixed number they are captured."""
    (problem, eager), (other, captured) = pair(row, compiled=False, growth=lambda: 0.5)
    with pytest.warns(bo.BilevelWarning, match=GROWS):
        captured.compile(backend="eager")
    for growth, steps, made in ((0.5, 14, 0), (0.0, 4, 1), (0.5, 2, 1)):
        for optimizer in (eager, captured):
            optimizer.growth = growth
        for _ in range(steps):
            assert close([problem.step(eager)], [other.step(captured)], 1e-11)
            assert (GROWS in captured.diagnostics.get("compile_fallback", "")) == (growth > 0)
        assert close(problem.run(eager, 3), other.run(captured, 3), 1e-11)
        assert (GROWS in captured.diagnostics.get("compile_fallback", "")) == (growth > 0)
        assert graphs(captured) == made
        assert captured.oracle_counts["lower_grad"] == eager.oracle_counts["lower_grad"]
    assert close([*problem.x, *problem.y], [*other.x, *other.y], 1e-11)


@pytest.mark.usually("BSA")
@each(("BA", "BSA"))
def test_more_and_more_lower_steps_are_no_full_graph(row):
    problem = Regression(row)
    optimizer = problem.optimizer(row, growth=0.5)
    with pytest.raises(RuntimeError, match=GROWS):
        optimizer.compile(backend="eager", fullgraph=True)
    optimizer.growth = 0.0
    optimizer.compile(backend="eager", fullgraph=True)
    problem.step(optimizer, 4)
    assert graphs(optimizer) == 1
    optimizer.growth = 0.5
    before = [t.detach().clone() for t in (*problem.x, *problem.y)]
    for advance in (problem.step, problem.run):
        with pytest.raises(RuntimeError, match=GROWS):
            advance(optimizer, 2)
    assert close(before, [*problem.x, *problem.y], 0.0)


CHOSEN = ("ITD", "F2SA", "SOBA")


@pytest.mark.slow  # as the test below, and learning rates in test_steps.py
@each(CHOSEN)
def test_with_lower_adam_and_an_upper_scheduler(row):
    if row.declared.lower_optimizer == "given gradient" and row.name != "SOBA":
        pytest.skip("makes its lower steps itself")
    both = pair(row, lower_optimizer=lambda: torch.optim.Adam)
    for problem, optimizer in both:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(10):
            problem.step(optimizer)
            scheduler.step()
    (problem, _), (other, captured) = both
    assert graphs(captured) == 1  # another learning rate is another argument
    assert close([*problem.x, *problem.y], [*other.x, *other.y], 1e-8)


@pytest.mark.usually("Adam")
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_bias_of_adam_is_corrected_in_double_precision_as_torch_does(kind):
    """The count of steps is a tensor of the default type, and its powers would be too."""
    torch.set_default_dtype(torch.float32)
    both = pair(next(row for row in ROWS if row.name == "ITD"), lower_optimizer=lambda: kind)
    for problem, optimizer in both:
        problem.step(optimizer, 9)
    (problem, _), (other, captured) = both
    assert "compile_fallback" not in captured.diagnostics
    assert graphs(captured) == 1
    assert close([*problem.x, *problem.y], [*other.x, *other.y], 1e-13)
    states = [optimizer.state[one.y[0]] for one, optimizer in both]
    counts = [next(value for name, value in state.items() if name.endswith("step")) for state in states]
    assert counts[0] == counts[1]
    assert counts[0].dtype == counts[1].dtype == torch.float32


@pytest.mark.parametrize("level", ["upper_optimizer", "lower_optimizer"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_no_factor_of_adam_is_a_python_number_in_a_graph(kind, level):
    """Inductor passes such a number on in single precision, so that compiled steps in double were found to differ."""
    found = []

    def backend(module, _):
        found.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    x, y = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = bo.SOBA([x], [y], lr=0.05, lower_lr=0.1, **{level: partial(kind, weight_decay=0.0)})
    optimizer.compile(backend=backend)
    for _ in range(3):
        optimizer.step(lambda: (y - 2).square().sum(), lambda: (y - x).square().sum())
    assert any("addcdiv" in name for name in found)
    assert not any("_local_scalar_dense" in name or "item" in name for name in found)


SAVE_AT, MORE = 8, 6
PROGRAM = """
import sys, torch
from tests.compiled.test_compile import resumed
from tests.registry import ROWS
row = next(row for row in ROWS if row.name == sys.argv[1])
torch.save(resumed(row, torch.load(sys.argv[2]), backend=sys.argv[4]), sys.argv[3])
"""


def resumed(row, saved, backend, more=MORE):
    """Return the results of some more steps of a run that resumes from a saved state, or that begins."""
    problem = Regression(row)
    optimizer = problem.optimizer(row)
    optimizer.compile(backend=backend)
    if saved is not None:
        with torch.no_grad():
            for parameter, value in zip((*problem.x, *problem.y), saved["parameters"], strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
        for objective, position in zip(problem.losses, saved["data"], strict=True):
            objective.load_state_dict(position)
        problem.step(optimizer, more)
        assert graphs(optimizer) == 1
        return [t.detach() for t in (*problem.x, *problem.y)], optimizer.oracle_counts
    problem.step(optimizer, SAVE_AT)
    state = {
        "parameters": [t.detach().clone() for t in (*problem.x, *problem.y)],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "data": [objective.state_dict() for objective in problem.losses],
    }
    problem.step(optimizer, more)
    return state, [t.detach() for t in (*problem.x, *problem.y)], optimizer.oracle_counts


@pytest.mark.usually("SOBA")
@each(CHOSEN)
def test_a_captured_run_resumes_bit_for_bit(row, request, tmp_path):
    """In a new process: all steps are those of graphs, also the first ones and those that are compared."""
    state, values, counts = resumed(row, None, "eager")
    again, others = resumed(row, state, "eager")
    assert counts == others
    assert all(map(torch.equal, values, again))
    if not request.config.getoption("--slow"):
        return
    state, values, counts = resumed(row, None, "inductor")
    torch.save(state, tmp_path / "state.pt")
    names = [row.name, tmp_path / "state.pt", tmp_path / "found.pt", "inductor"]
    subprocess.run([sys.executable, "-c", PROGRAM, *map(str, names)], check=True, cwd=Path(__file__).parents[2])
    again, others = torch.load(tmp_path / "found.pt")
    assert counts == others
    assert all(map(torch.equal, values, again))


@pytest.mark.usually("SRBA", "4")
@pytest.mark.parametrize("made", [1, 2, 4])
@pytest.mark.parametrize("name", ["SRBA", "VRBO"])
def test_a_run_of_steps_of_two_kinds_resumes_bit_for_bit(name, made):
    """The steps of a kind are graphs in the resumed run from where they are graphs in the other one."""

    def problem():
        x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.1, 0.5))
        rows = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        losses = [
            bo.FiniteSum(loss, list(rows), generator=torch.Generator().manual_seed(k))
            for k, loss in enumerate([lambda b: (b @ y - 1).sin().mean(), lambda b: (b @ y - x.sum()).cosh().mean()])
        ]
        options = {} if name == "SRBA" else {"lower_steps": 1, "linear_steps": 2, "anchor_batches": 2}
        optimizer = getattr(bo, name)([x], [y], lr=0.1, lower_lr=0.1, period=3, **options)
        optimizer.compile(backend="eager")
        eager, steps = [], optimizer._eager_step
        optimizer._eager_step = lambda *args, **kwargs: (
            eager.append(optimizer._run_state.steps) or steps(*args, **kwargs)
        )
        return optimizer, losses, [x, y], eager

    optimizer, losses, parameters, eager = problem()
    for _ in range(made):
        optimizer.step(*losses)
    again, others, copies, resumed_eager = problem()
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(losses, others, strict=True):
        other.load_state_dict(one.state_dict())
    with torch.no_grad():
        for one, other in zip(parameters, copies, strict=True):
            other.copy_(one)
    for _ in range(4):
        optimizer.step(*losses)
        again.step(*others)
    assert eager == [0, 1]
    assert resumed_eager == [k for k in eager if k >= made]
    assert all(map(torch.equal, parameters, copies))


def simple(lower, upper=None, **arguments):
    """An eager and a captured optimizer of AID for losses made of x and y; with their parameters."""
    found = []
    for captured in (False, True):
        x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
        y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimizer = bo.AID([x], [y], **{"lr": 0.1, "lower_lr": 0.3, "lower_steps": 1, "linear_steps": 1, **arguments})
        if captured:
            optimizer.compile(backend="eager")
        losses = (upper or (lambda x, y: lambda: (y - 1).square().sum() + 0.1 * x.square().sum()))(x, y), lower(x, y)
        found.append((optimizer, losses, x, y))
    return found


def base(x, y, factor=1.0):
    return (factor * (y - x).square()).sum() / 2 + 0.05 * y.square().sum()


def counting(x, y):
    calls = [0]

    def loss():
        calls[0] += 1
        return base(x, y, 1 + 0.01 * calls[0])

    return loss


def drawing(x, y):
    rows = iter(torch.linspace(0.5, 1.5, 100, dtype=torch.float64))  # Dynamo unpacks all of it
    return lambda: base(x, y, next(rows))


def noisy(x, y):
    generator = seeded(5)
    return lambda: base(x, y, 1 + 0.1 * torch.rand(2, generator=generator, dtype=torch.float64))


def python_noise(x, y):
    return lambda: base(x, y, 1 + 0.1 * random.random())


def branching(x, y):
    return lambda: base(x, y) if y.sum() > 0.1 else base(x, y, 1.1)


def normalising(x, y):
    norm = nn.BatchNorm1d(2, affine=False, dtype=torch.float64)
    rows = torch.randn(6, 2, generator=seeded(1), dtype=torch.float64)
    return lambda: base(x, y) + 0.1 * (norm(rows * x) @ y).square().mean()


@pytest.mark.slow  # as test_refusals in test_losses.py
@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize(
    ("lower", "word"),
    [
        (counting, "changes Python values"),
        (drawing, "changes Python values"),
        (noisy, "random numbers"),
        (python_noise, "andom"),  # torch 2.11 says that it cannot read Python's random
        (branching, "read on the host"),
    ],
)
def test_steps_are_eager_if_a_graph_cannot_see_a_value(lower, word):
    results = []
    for optimizer, losses, x, y in simple(lower):
        random.seed(3)
        values = [optimizer.step(*losses) for _ in range(12)]
        results.append((torch.stack(values), x.detach(), y.detach()))
    assert any(isinstance(value, tuple) for value in vars(optimizer)["_diagnostics"].values())  # norms nobody has read
    assert word in optimizer.diagnostics["compile_fallback"]
    assert close(*results, 0.0)


@pytest.mark.slow  # as that in test_losses.py
def test_normalisation_in_training_mode_is_captured():
    results = []
    for optimizer, losses, x, y in simple(normalising):
        values = [optimizer.step(*losses) for _ in range(12)]
        results.append((torch.stack(values), x.detach(), y.detach()))
    assert graphs(optimizer) == 1
    assert close(*results, 1e-12)


def test_reads_inside_a_checkpoint_are_captured():
    """Also in the backward pass, and in several steps at once, where y has moved on."""
    ends = []
    for captured in (False, True):
        x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
        y = torch.zeros(2, dtype=torch.float64, requires_grad=True)

        def lower(x=x, y=y):
            return base(x, y) + checkpoint(lambda w: (y * w).sin().square().sum(), x, use_reentrant=False)

        optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.3)
        if captured:
            optimizer.compile(backend="eager")

        def upper(y=y):
            return (y - 1).square().sum()

        losses = [optimizer.step(upper, lower) for _ in range(5)]
        ends.append((torch.stack([*losses, *optimizer.run(upper, lower, steps=6)]), x, y))
    assert close(*ends, 1e-12)
    assert graphs(optimizer) == 1


@pytest.mark.slow  # as test_recreated_lambdas_are_the_same_losses
@pytest.mark.parametrize("how", ["number", "object"])
def test_a_lambda_made_again_is_the_same_until_it_reads_something_else(how):
    made = []
    for optimizer, losses, x, y in simple(lambda x, y: None):
        one = Held()
        for k in range(12):
            factor = 1.0 if k < 6 else 2.0
            if how == "object":
                one.slot = factor

            def lower(x=x, y=y, one=one):
                return lambda: base(x, y, one.slot)

            def number(factor, x=x, y=y):
                return lambda: base(x, y, factor)

            optimizer.step(losses[0], lower() if how == "object" else number(factor))
        made.append((x.detach(), y.detach()))
    assert close(*made, 1e-12)
    assert graphs(optimizer) == 2


@pytest.mark.slow  # as "value of a tensor" in test_losses.py
@pytest.mark.parametrize("read", [float, torch.Tensor.item])
def test_a_value_that_is_read_on_the_host_stays_on_the_device(read):
    """It is an argument of the graph, which stays right when it is written in place."""
    scale, made = torch.tensor(1.0, dtype=torch.float64), []

    def lower(x, y):
        return lambda: base(x, y, read(scale))

    for optimizer, losses, x, y in simple(lower):
        scale.fill_(1.0)
        for k in range(12):
            if k == 6:
                scale.fill_(2.0)
            optimizer.step(*losses)
        made.append((x.detach(), y.detach()))
    assert close(*made, 1e-12)
    assert graphs(optimizer) == 1
    assert "compile_fallback" not in optimizer.diagnostics


@pytest.mark.slow  # as "attention" in test_losses.py
@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_is_captured_without_dropout(dropout):
    rows, ends = torch.randn(2, 1, 3, 2, generator=seeded(1), dtype=torch.float64), []
    for captured in (False, True):
        x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        y = torch.eye(2, dtype=torch.float64, requires_grad=True)

        def lower(x=x, y=y):
            seen = F.scaled_dot_product_attention(rows @ y, rows, rows, dropout_p=dropout)
            return (seen - x).square().mean() + 0.1 * y.square().sum()

        optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2)
        if captured:
            optimizer.compile(backend="eager")
        torch.manual_seed(0)
        ends.append(([optimizer.step(lambda y=y: (y - 1).square().sum(), lower) for _ in range(6)], x, y))
    assert close(*([torch.stack(losses), x, y] for losses, x, y in ends), 1e-10)
    assert graphs(optimizer) == (dropout == 0)
    assert ("random numbers" in optimizer.diagnostics.get("compile_fallback", "")) == (dropout > 0)


@pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
def test_every_step_says_why_it_is_eager():
    """Also those that the host makes between others, where it restarts."""
    x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = bo.RAHGD([x], [y], lr=0.1, lower_lr=0.3, lower_steps=2, linear_steps=2, restart_radius=0.3)
    optimizer.compile(backend="eager")
    reasons = []
    for _ in range(20):
        optimizer.step(lambda: (y - 1).square().sum() + x.sum(), branching(x, y))
        reasons.append(optimizer.diagnostics.get("compile_fallback", ""))
    assert all("read on the host" in reason for reason in reasons[5:])


def test_a_reason_is_warned_of_once_and_raised_if_asked_for():
    (_, _, _, _), (optimizer, losses, _, _) = simple(branching)
    optimizer.step(*losses)  # the first of its kind may be the only one
    with pytest.warns(bo.BilevelWarning, match="read on the host"):
        optimizer.step(*losses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(*losses)
    optimizer.compile(backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        optimizer.step(*losses)
    with pytest.raises(ValueError, match="Invalid dynamic value"):
        optimizer.compile(dynamic=True)
    with pytest.raises(RuntimeError, match="host"):
        bo.iMCN([torch.ones(1, requires_grad=True)], [torch.ones(1, requires_grad=True)], lr=0.1, lower_lr=0.1,
                lower_steps=1).compile(fullgraph=True)  # fmt: skip


@pytest.mark.slow  # as test_steps.py and test_losses.py
def test_visible_changes_are_seen():
    """A number that a loss closes over, its training mode, an option of a group, a frozen parameter."""
    factors = {"now": 1.0}
    results = []
    for optimizer, losses, x, y in simple(lambda x, y: lambda: base(x, y, factors["now"])):
        factors["now"] = 1.0
        for k in range(16):
            if k in (6, 11):
                factors["now"] *= 1.5
            if k == 13:
                optimizer.linear_steps = 2
            optimizer.step(*losses)
        results.append((x.detach(), y.detach()))
    assert close(*results, 1e-12)
    assert "compile_fallback" not in optimizer.diagnostics
    assert graphs(optimizer) >= 2


@pytest.mark.slow  # as test_losses.py, in training mode
def test_normalisation_is_captured_in_both_modes():
    """Its running statistics change nothing then; in training mode they are results of the step."""
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double().eval()
        rows = torch.randn(6, 3, dtype=torch.float64)
        optimizer = bo.SOBA([x], list(net.parameters()), lr=0.1, lower_lr=0.1)
        if captured:
            optimizer.compile(backend="eager")
        losses = (
            lambda net=net, rows=rows: net(rows).square().mean(),
            lambda net=net, rows=rows, x=x: (net(rows) - x.sum() + 1).square().mean(),
        )
        for _ in range(6):
            optimizer.step(*losses)
        assert graphs(optimizer) == captured
        net[1].train()
        for _ in range(6):
            optimizer.step(*losses)
        assert graphs(optimizer) == 2 * captured
        ends.append([x.detach(), *(t.detach() for t in net.parameters()), *net.buffers()])
    assert close(*ends, 1e-12)


class Config:
    """Attributes of attributes."""

    def __init__(self):
        self.factor = 1.0


class Trainer:
    """A loss that reads a number two attributes away."""

    def __init__(self, x, y):
        self.x, self.y, self.config = x, y, Config()

    def lower(self):
        return base(self.x, self.y, self.config.factor)


@pytest.mark.slow  # as "child_of_a_class" in test_losses.py
def test_attributes_of_attributes_are_in_sight():
    results = []
    for optimizer, losses, x, y in simple(lambda x, y: Trainer(x, y).lower):
        for k in range(10):
            losses[1].__self__.config.factor = 1.0 if k < 6 else 2.0  # uses 1, 2, 4 of the graph are compared, 3 is not
            optimizer.step(*losses)
        results.append((x.detach(), y.detach()))
    assert close(*results, 1e-12)
    assert graphs(optimizer) == 2


class Batch(NamedTuple):
    rows: torch.Tensor
    label: nn.Parameter


@pytest.mark.slow  # as test_losses_are_read_in_no_other_form_than_before
def test_batches_of_any_pytree_are_arguments():
    results = []
    for optimizer, _, x, y in simple(lambda x, y: lambda: base(x, y)):
        batches = [Batch(torch.full((2,), 0.1 * k, dtype=torch.float64), nn.Parameter(torch.ones(2))) for k in range(3)]
        lower = bo.Objective(lambda b, x=x, y=y: base(x, y) + (b.rows * y * b.label.detach()).sum(), batches)
        for _ in range(8):
            optimizer.step(bo.Objective(lambda y=y: (y - 1).square().sum()), lower)
        results.append((x.detach(), y.detach()))
    assert close(*results, 1e-12)
    assert graphs(optimizer) == 1


@pytest.mark.slow  # as "written_tensor" in test_losses.py
def test_a_tensor_that_is_written_in_place_is_an_argument():
    results = []
    for optimizer, _, x, y in simple(lambda x, y: lambda: base(x, y)):
        scale = torch.ones((), dtype=torch.float64)
        for _ in range(12):
            optimizer.step(lambda y=y: (y - 1).square().sum(), lambda s=scale, x=x, y=y: base(x, y, s))
            scale.mul_(1.1)
        results.append((x.detach(), y.detach()))
    assert close(*results, 1e-12)
    assert graphs(optimizer) == 1


OLD = pytest.mark.xfail(torch.__version__.startswith("2.11."), reason="torch 2.11 keeps fake tensors of a trace")


@pytest.mark.parametrize("method", [pytest.param(bo.ITD, marks=OLD), pytest.param(bo.AID, marks=pytest.mark.slow)])
def test_a_trace_leaves_nothing_behind(method):
    """The graphs of a traced step, with operations that save their own results, are freed with the optimizer."""

    def left():
        gc.collect()
        gc.collect()  # what torch lets go when the first one has ended a reader
        kinds = (torch.Tensor, PureStep, StepReader, Program)  # fake tensors too
        return Counter(type(o) for o in gc.get_objects() if issubclass(type(o), kinds))

    def captured():
        x, y = (torch.full((3,), value, requires_grad=True) for value in (0.5, 0.2))
        optimizer = method([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2)
        optimizer.compile(backend="eager")
        for _ in range(4):
            optimizer.step(lambda: (y.tanh() - 1).square().sum(), lambda: (y.exp() - x.sigmoid()).square().sum())
        assert optimizer.captured_graphs == 1

    for _ in range(2):  # torch keeps its last reading
        captured()
    before = left()
    captured()
    assert left() <= before


@pytest.mark.filterwarnings("ignore::bilevel_optim.errors.BilevelWarning")
def test_losses_that_vmap_cannot_run_are_captured_as_a_loop():
    ends = []
    for captured in (False, True):
        x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
        y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimizer = bo.F2SA([x], [y], lr=0.1, lower_lr=0.3, lower_steps=2, nu=0.1, order=2, vectorize=8)
        if captured:
            optimizer.compile(backend="eager", fullgraph=True)

        def lower(x=x, y=y):
            written = torch.zeros(2, dtype=torch.float64)
            written += y  # vmap has one of it for all copies of y
            return base(x, written)

        losses = torch.stack([optimizer.step(lambda y=y: (y - 1).square().sum(), lower) for _ in range(8)])
        ends.append([losses, x, y])
    assert "vectorize_fallback" in optimizer.diagnostics
    assert graphs(optimizer) == 1
    assert close(*ends, 1e-10)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shapes_are_captured_a_bounded_number_of_times(strict, monkeypatch):
    monkeypatch.setattr("bilevel_optim.compiled.entry.MOST", 4)
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = bo.SOBA([x], [y], lr=0.01, lower_lr=0.1)
    optimizer.compile(backend="eager", fullgraph=strict)
    data = [torch.ones(n) for n in range(1, 8)]
    lower = bo.Objective(lambda batch: (y - x - batch).square().mean(), data)
    upper = bo.Objective(lambda batch: (y - batch).square().mean(), data)
    eager = []
    with pytest.raises(RuntimeError, match="graphs, and none") if strict else pytest.warns(bo.BilevelWarning) as found:
        for k in range(16):
            optimizer.step(upper, lower)
            eager += [k] if "compile_fallback" in optimizer.diagnostics else []
    assert graphs(optimizer) == 4
    if not strict:
        assert ["none is for data of these shapes and constants" in str(w.message) for w in found] == [True]  # once
        assert eager == [5, 6, 7, 12, 13, 14]  # all of the three that came last


@pytest.mark.usually("11")
@pytest.mark.parametrize("at", [7, 8, 11])
def test_a_run_keeps_what_came_before_a_failure(at):
    """Nothing of the failing step or after it; the data go on where the failing step had begun."""
    batches = [torch.full((2,), 0.1 * k, dtype=torch.float64) for k in range(60)]
    results = []
    for optimizer, _, x, y in simple(lambda x, y: lambda: base(x, y)):
        data = [b.clone() for b in batches]
        data[2 * at + 1].fill_(torch.nan)  # two lower draws in a step: a step and a product
        lower = bo.Objective(lambda batch, x=x, y=y: base(x, y) + (batch * y).sum(), data)
        upper = bo.Objective(lambda y=y: (y - 1).square().sum())
        optimizer.run(upper, lower, steps=4)
        with pytest.raises(bo.NonFiniteError, match=f"outer step {at}"):
            optimizer.run(upper, lower, steps=12)
        assert lower.draw().batch is data[2 * at]
        results.append((x.detach(), y.detach()))
    assert close(*results, 1e-12)


SHOWN = ((bo.AID, "lower"), (bo.ITD, "upper"))


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        pytest.param(kind, level, marks=[pytest.mark.slow] * ((kind, level) not in SHOWN))
        for kind in (bo.AID, bo.ITD, bo.StocBiO, bo.RAHGD)
        for level in ("upper", "lower")
    ],
)
def test_a_nan_gradient_at_a_finite_loss_fails(kind, level):
    """The root has no derivative if a batch contains 0."""
    x = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    steps = {"lower_steps": 1, "linear_steps": 1} if kind is not bo.ITD else {"lower_steps": 1}
    optimizer = kind([x], [y], lr=0.1, lower_lr=0.3, **steps)
    optimizer.compile(backend="eager")
    at = [torch.ones((), dtype=torch.float64) for _ in range(40)]

    def rooted(batch):
        return (batch * (x * y + 2.0).square()).sqrt().sum()

    if level == "upper":
        losses = bo.Objective(lambda batch: (y - 1).square().sum() + rooted(batch), at), lambda: base(x, y)
    else:
        losses = lambda: (y - 1).square().sum(), bo.Objective(lambda batch: base(x, y) + 0.1 * rooted(batch), at)
    for _ in range(6):
        optimizer.step(*losses)
    assert graphs(optimizer) == 1
    for t in at:
        t.fill_(0.0)
    before = x.clone(), y.clone()
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(*losses)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_a_loss_that_is_infinite_while_its_gradient_is_not_fails():
    """Nothing but the value shows it."""
    for optimizer, _, x, y in simple(lambda x, y: lambda: base(x, y)):
        offsets = [torch.zeros((), dtype=torch.float64) for _ in range(8)]
        offsets[6].fill_(torch.inf)  # a step of the graph alone
        upper = bo.Objective(lambda offset, y=y: (y - 1).square().sum() + offset, offsets)
        (lower,) = (lambda x=x, y=y: base(x, y),)  # one function, so that the graph is used
        for _ in range(6):
            optimizer.step(upper, lower)
        before = x.clone(), y.clone()
        with pytest.raises(bo.NonFiniteError, match="loss"):
            optimizer.step(upper, lower)
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])


@pytest.mark.filterwarnings("ignore::bilevel_optim.errors.BilevelWarning")
def test_a_known_alert_makes_no_step_eager(monkeypatch):
    """A lower Hessian that is not positive definite is warned of once; CG goes on, and so do the graphs."""
    made = []
    function = bo.BilevelOptimizer._open_step
    monkeypatch.setattr(bo.BilevelOptimizer, "_open_step", lambda *a: made.append(0) or function(*a))
    _, (optimizer, _, x, y) = simple(lambda x, y: lambda: base(x, y), lower_steps=2, linear_steps=2)
    signs = torch.tensor([1.0, -0.1], dtype=torch.float64)
    losses = lambda: (y - 1).square().sum(), lambda: (signs * (y - x).square()).sum()
    for _ in range(12):
        optimizer.step(*losses)
    assert "unsolved system" in optimizer._run_state.warned
    assert len(made) == 5  # the first, the one that is traced (use 1), and those that are compared: uses 2, 4, 8


@pytest.mark.slow
def test_batches_with_other_strides_get_a_graph_of_their_own():
    """A graph addresses the memory of its arguments by the strides that it was made for."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(24)]
    data = [r if k < 12 else r.t().contiguous().t() for k, r in enumerate(rows)]
    results = []
    for optimizer, _, x, y in simple(lambda x, y: lambda: base(x, y)):
        if optimizer._captured is not None:
            optimizer.compile(backend="inductor")
        lower = bo.Objective(lambda batch, x=x, y=y: base(x, y) + (batch @ y).square().mean(), data)
        for _ in range(8):
            optimizer.step(lambda y=y: (y - 1).square().sum(), lower)
        results.append((x.detach(), y.detach()))
    assert close(*results, 1e-11)


def test_a_run_gives_the_losses_of_the_steps():
    (eager, losses, x, _), (captured, others, z, _) = simple(lambda x, y: lambda: base(x, y))
    assert torch.equal(eager.run(*losses, steps=3), torch.stack([captured.step(*others) for _ in range(3)]))
    assert close([x], [z], 1e-12)
    with pytest.raises(ValueError, match="Invalid steps value: 0"):
        eager.run(*losses, steps=0)


def test_copies_of_a_captured_optimizer_capture_again():
    (_, _, _, _), (optimizer, losses, _, _) = simple(lambda x, y: lambda: base(x, y))
    for _ in range(4):
        optimizer.step(*losses)
    other = copy.deepcopy(optimizer)
    assert graphs(optimizer) == 1
    assert graphs(other) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::bilevel_optim.errors.BilevelWarning")
def test_compiled_by_inductor(request):
    """The default backend; for all methods with ``--slow``."""
    names = [row.name for row in ROWS] if request.config.getoption("--slow") else ["SOBA"]
    for row in ROWS:
        if row.name in names and not row.declared.uncaptured:
            (problem, eager), (other, captured) = pair(row)
            captured.compile()
            problem.step(eager, STEPS)
            other.step(captured, STEPS)
            other.run(captured, MANY)
            problem.run(eager, MANY)
            assert close([*problem.x, *problem.y], [*other.x, *other.y], 1e-8), row.name


@pytest.mark.slow
def test_convolutions_too_large_to_be_batched_are_compiled_one_by_one(monkeypatch):
    """As in the first, eager step, which alone can see their size."""
    monkeypatch.setattr(batched, "LARGE", 1)
    torch.manual_seed(0)
    images, labels = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1] * 3)
    losses = partial(F.cross_entropy, reduction="none")
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 2)).double()
        weights = torch.zeros(6, dtype=torch.float64, requires_grad=True)
        optimizer = bo.F2SA([weights], net.parameters(), lr=0.1, lower_lr=0.1, lower_steps=2, nu=0.1)
        if compiled:
            optimizer.compile(backend="eager")
        for _ in range(4):
            optimizer.step(
                lambda net=net: losses(net(images), labels).mean(),
                lambda net=net, x=weights: (x.sigmoid() * losses(net(images), labels)).mean(),
            )
        assert optimizer.captured_graphs == compiled
        ends.append([t.detach() for t in (weights, *net.parameters())])
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)

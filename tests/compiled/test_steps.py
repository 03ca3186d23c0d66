"""Steps that ``torch.compile`` has made of the library's own step: those of eager steps, whatever changes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import bilevel_optim as bo
from bilevel_optim.compiled.chain import Chain

from ..registry import ROWS, each
from . import test_losses as losses
from .test_compile import Regression

pytestmark = pytest.mark.filterwarnings("ignore::bilevel_optim.BilevelWarning")
STEPS, AT_ONCE = 6, 20  # of these, some are compared with eager steps, and the others follow each other


@pytest.fixture
def chain_lengths(monkeypatch):
    """Return the numbers of directly chained steps."""
    found, follow = [], Chain.follow

    def noted(chain, first, data):
        found.append(len(data))
        return follow(chain, first, data)

    monkeypatch.setattr(Chain, "follow", noted)
    return found


def ends(row, compiled):
    """Losses, parameters and counts after some steps and a run, and why steps were eager."""
    problem = Regression(row, tasks=True)
    optimizer = problem.optimizer(row)
    torch.manual_seed(0)
    if compiled:
        optimizer.compile(backend="eager")
    found = [problem.step(optimizer) for _ in range(STEPS)]
    if compiled:
        found += [*problem.run(optimizer, AT_ONCE)]
    else:
        found += [problem.step(optimizer) for _ in range(AT_ONCE)]
    values = [torch.stack(found), *problem.x, *problem.y, *(x.grad for x in problem.x)]
    return [t.detach() for t in values], optimizer


@pytest.mark.usually("SUSTAIN")  # what Dynamo reads of a step takes seconds
@each(lambda row: row.takes_tasks and row.declared.losses == 2 and row.name != "F2SA")
def test_rows_with_tasks(row):
    (right, eager), (found, optimizer) = (ends(row, compiled) for compiled in (False, True))
    rounding = max(row.rounding * 100, 1e-10)
    torch.testing.assert_close(found, right, rtol=rounding, atol=rounding)
    reason = optimizer.diagnostics.get("compile_fallback", "")
    assert reason == row.declared.uncaptured
    assert bool(optimizer.captured_graphs) == (not reason)
    if row.options.get("neumann") != "product":  # of a random number of products all are made
        assert {**optimizer.oracle_counts, "hvp": 0} == {**eager.oracle_counts, "hvp": 0}


def test_options_that_change_in_a_run_are_followed():
    """Changed options of the optimizer or of groups make another graph; learning rates do not."""
    (row,) = (row for row in ROWS if row.name == "AID")
    changes = {
        4: lambda optimizer: setattr(optimizer, "linear_steps", 1),
        7: lambda optimizer: setattr(optimizer, "damping", 0.5),
        10: lambda optimizer: optimizer.param_groups[-1].update(lr=0.05),
        12: lambda optimizer: optimizer.param_groups[-1].update(momentum=0.5),
    }
    left = []
    for compiled in (False, True):
        problem = Regression(row)
        momentum = partial(torch.optim.SGD, momentum=0.9)
        optimizer = problem.optimizer(row, lower_steps=1, linear_steps=2, lower_optimizer=momentum)
        if compiled:
            optimizer.compile(backend="eager", fullgraph=True)
        for k in range(16):
            changes.get(k, lambda _: None)(optimizer)
            problem.step(optimizer)
        left.append([t.detach() for t in (*problem.x, *problem.y)])
    torch.testing.assert_close(*left, rtol=1e-11, atol=1e-12)
    assert optimizer.captured_graphs == 4


@pytest.mark.parametrize("make", [losses.counter, losses.dropout, losses.branch], ids=lambda f: f.__name__)
def test_uncompilable_losses_run_eagerly_and_say_where(make):
    reasons, graphs = losses.compared(make, steps=6, rounding=0.0)
    told = [reason for reason in reasons if reason]
    assert len(told) >= 4
    assert all("test_losses.py, line" in reason or losses.CHANGES in reason for reason in told), told
    assert not graphs


def test_a_run_keeps_what_came_before_a_step_that_fails(chain_lengths):
    """A run fails as single steps do, and names the failing step."""
    left = []
    for how in ("step", "run"):
        x, y = (torch.full((), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 1.0))
        batches = [torch.tensor(value, dtype=torch.float64) for value in [1.0] * 19 + [float("nan")]]
        upper = bo.Objective(lambda b, y=y: (y - b).square(), batches)
        optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1)
        optimizer.compile(backend="eager", fullgraph=True)
        step = partial(optimizer.step, upper, lambda x=x, y=y: (y - x).square())
        run = partial(optimizer.run, upper, lambda x=x, y=y: (y - x).square(), steps=30)
        with pytest.raises(bo.NonFiniteError, match="step 19"):
            run() if how == "run" else [step() for _ in range(30)]
        left.append([x.detach(), y.detach(), optimizer.oracle_counts, upper.state_dict()["position"]])
    torch.testing.assert_close(left[0][:2], left[1][:2], rtol=1e-12, atol=1e-12)
    assert left[0][2:] == left[1][2:]
    assert max(chain_lengths) > 5


def test_steps_follow_each_other_unless_a_loss_reads_the_memory_of_a_parameter(chain_lengths):
    """The counter advances only once steps are written."""
    for shares in (False, True):
        chain_lengths.clear()
        left = []
        for how in ("step", "run"):
            x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 1.0))
            seen = y.detach() if shares else torch.ones(3, dtype=torch.float64)
            upper = lambda y=y: (y - 1).square().sum()  # noqa: E731
            lower = lambda x=x, y=y, seen=seen: losses.base(x, y) + (seen * y).sum()  # noqa: E731
            optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1)
            if how == "run":
                optimizer.compile(backend="eager", fullgraph=True)
                optimizer.run(upper, lower, steps=40)
            else:
                for _ in range(40):
                    optimizer.step(upper, lower)
            left.append([x.detach(), y.detach()])
        torch.testing.assert_close(*left, rtol=1e-12, atol=1e-12)
        assert bool(chain_lengths) == (not shares)


class Shuffled:
    """Batches in an order that is drawn at the start of each pass."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter([self.batches[i] for i in torch.randperm(len(self.batches)).tolist()])


def pairs(count):
    return [tuple(torch.randn(3, dtype=torch.float64) for _ in range(2)) for _ in range(count)]


LATER_DATA = {
    "one stream for both losses": lambda upper, lower: [bo.Objective(lower, pairs(7))] * 2,
    "orders drawn from one generator": lambda upper, lower: [
        bo.Objective(upper, Shuffled(pairs(3))), bo.Objective(lower, Shuffled(pairs(5)))
    ],
    "numbers among tensors": lambda upper, lower: [
        bo.Objective(own, [(a, 2.0) for a, _ in pairs(4)]) for own in (upper, lower)
    ],
    "nothing among tensors": lambda upper, lower: [
        bo.Objective(own, [*pairs(2), (torch.ones(3, dtype=torch.float64), None)]) for own in (upper, lower)
    ],
}  # fmt: skip


@pytest.mark.parametrize("later", LATER_DATA.values(), ids=LATER_DATA)
def test_draws_are_those_of_eager_steps_if_other_data_follow(later):
    """Draws that were planned for tuples of tensors from two lists."""

    def fit(y, batch):
        return (batch[0] * y - (0 if batch[1] is None else batch[1])).square().sum()

    left = []
    for compiled in (False, True):
        torch.manual_seed(0)
        x, y = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 1.0))
        upper, lower = partial(fit, y), lambda batch, x=x, y=y: fit(y, batch) + (y - x).square().sum()
        optimizer = bo.AID([x], [y], lr=0.05, lower_lr=0.05, lower_steps=3)
        if compiled:
            optimizer.compile(backend="eager")
        first = bo.Objective(upper, pairs(3)), bo.Objective(lower, pairs(5))
        second = later(upper, lower)
        found = [optimizer.step(*own) for own in [first] * 6 + [second] * 6]
        left.append([torch.stack(found).detach(), x.detach(), y.detach()])
    torch.testing.assert_close(*left, rtol=1e-12, atol=1e-12)


def test_entries_of_the_state_are_found_by_name():
    """Entries that not all lower tensors have are no state of the method, and count nowhere."""
    left = []
    for compiled in (False, True):
        x, y, z = (torch.full((3,), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 1.0, 0.3))
        upper = lambda y=y, z=z, x=x: (y - 1).square().sum() + (z * x).sum()  # noqa: E731
        lower = lambda x=x, y=y, z=z: losses.base(x, y) + (z - 2 * x).square().sum()  # noqa: E731
        optimizer = bo.SOBA([x], [y, z], lr=0.05, lower_lr=0.05)
        if compiled:
            optimizer.compile(backend="eager")
        step, own = partial(optimizer.step, upper, lower), optimizer.state
        for _ in range(6):
            step()
        (name,) = own[y]
        own[y]["of y"], own[z]["of z"] = own[y].pop(name), own[z].pop(name)
        step(), step()
        del own[y]["of y"], own[z]["of z"]
        found = [step() for _ in range(3)]
        left.append([torch.stack(found).detach(), x.detach(), y.detach(), z.detach()])
    torch.testing.assert_close(*left, rtol=1e-12, atol=1e-12)


def test_a_difference_that_is_accepted_is_said_by_the_user():
    """A compiler that is 1 % off: refused, unless so much is accepted."""

    def coarse(module, examples):
        def call(*arguments):
            with torch.no_grad():
                return [t * 1.01 if t.is_floating_point() else t for t in module(*arguments)]

        return call

    for rtol, graphs in ((None, 0), (0.05, 1)):
        x, y = (torch.full((), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 1.0))
        optimizer = bo.SOBA([x], [y], lr=0.1, lower_lr=0.1)
        optimizer.compile(backend=coarse, rtol=rtol)
        for _ in range(4):
            optimizer.step(lambda y=y: (y - 1).square(), lambda x=x, y=y: F.softplus(y - x) + y.square())
        assert optimizer.captured_graphs == graphs


def test_a_difference_that_rounding_explains_is_accepted(monkeypatch):
    """Near a solution a vector is a small difference of large ones: a program for rounded values says how small."""
    from bilevel_optim.compiled import beside

    asked, own = [], beside.mismatch

    def differing(right, found, x, y, accepted, names, other=None):
        asked.append((right[0].gradient, None if other is None else other[0].gradient))
        return "the loss" if other is None else own(right, found, x, y, accepted, names, other)

    monkeypatch.setattr(beside, "mismatch", differing)
    x, y = (torch.full((2,), value, dtype=torch.float64, requires_grad=True) for value in (0.5, 1.0))
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=2)
    optimizer.compile(backend="eager")
    for _ in range(4):
        optimizer.step(lambda: (y - 1).square().sum(), lambda: (F.softplus(y - x) + y.square()).sum())
    assert optimizer.captured_graphs == 1
    (_, nothing), (right, rounded), *_ = asked
    assert nothing is None
    assert 0 < (rounded - right).norm() < 1e-14


def test_compared_steps_are_counted_like_the_others():
    """So counts do not depend on where steps are compared, as in a resumed run: a series has all its products."""
    x, y = (torch.full((3,), value, requires_grad=True) for value in (0.3, 0.1))
    optimizer = bo.TTSA([x], [y], lr=0.05, lower_lr=0.1, linear_steps=4, generator=torch.Generator().manual_seed(7))
    optimizer.compile(backend="eager")
    counts = []
    for _ in range(10):
        optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum() / 2)
        counts.append(optimizer.oracle_counts["hvp"])
    assert [counts[k + 1] - counts[k] for k in range(9)] == [3] * 9


@pytest.mark.parametrize(
    ("name", "options", "rests"),
    [("SRBA", {}, 9), ("VRBO", {"lower_steps": 2, "anchor_batches": 2, "linear_steps": 2}, 13)],
)
def test_a_recursion_that_begins_anew_between_its_anchors_stays_compiled(name, options, rests):
    """A tensor rests, then returns: those steps have draws of their own, and no later step is eager for them."""
    rows = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = []
    for compiled in (False, True):
        x, z, y, w = (torch.full((2,), v, dtype=torch.float64, requires_grad=True) for v in (1.0, 1.0, 0.1, 0.2))
        g = lambda e: ((y - x - e).square().sum() + (w - z + y / 2).square().sum()) / 2  # noqa: E731, B023
        f = lambda e: ((y - 1 + e).square().sum() + (w + 1).square().sum()) / 2  # noqa: E731, B023
        lower, upper = (
            bo.FiniteSum(loss, rows, size, generator=torch.Generator().manual_seed(size))
            for loss, size in ((g, 2), (f, 3))
        )
        optimizer = getattr(bo, name)([x, z], [y, w], lr=0.05, lower_lr=0.2, period=4, **options)
        if compiled:
            optimizer.compile(backend="eager")
        for k in range(rests + 9):
            w.requires_grad_(not rests <= k < rests + 4)
            optimizer.step(upper, lower)
        ends.append(torch.cat([x, z, y, w]).detach())
    assert "compile_fallback" not in optimizer.diagnostics
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)

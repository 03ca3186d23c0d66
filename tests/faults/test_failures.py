"""Failing and read-only calls leave everything unchanged: parameters, state, buffers, random numbers, data."""

import copy
import io
import signal
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bilevel_optim as bo
from bilevel_optim.oracle import stacks

from ..problems import Quadratic, Tasks, same, seeded, values
from ..registry import each
from .batch_norm_problem import BatchNormProblem

FEW = ("AID", "ITD", "F2SA", "PZOBO", "SOBA", "SABA", "VRBO", "SVRB", "RSVRB", "PRAHGD", "MAML", "RTMLMC")


def text_of(optimizer):
    """Return an optimizer's state as text, with its entry of bytes unpacked."""
    state = optimizer.state_dict()
    if not isinstance(optimizer, bo.RestartedAGD):
        state["param_groups"][0]["bilevel"] = owned(state)
    return str(state)


def recorded(optimizer, problem):
    """Return everything that must not change, as text."""
    gradients = [p.grad for p in (*problem.x, *problem.y)]
    own = [o.state_dict() for o in problem.losses if isinstance(o, bo.Objective)]
    parts = [text_of(optimizer), gradients, optimizer.diagnostics, own, torch.get_rng_state().sum()]
    with_digits = torch.set_printoptions
    with_digits(precision=17)
    try:
        return str(parts)
    finally:
        with_digits(profile="default")


@each(FEW)
def test_checking_changes_nothing(row):
    """Trackers, y, running statistics and a shuffling loader's generator stay unchanged."""
    form = "tasks" if row.declared.tasks == "required" else "batches"
    problem = row.cleaning(form, n=12)
    optimizer = row(problem.x, problem.y, short=True, lower_lr=0.1)
    torch.manual_seed(0)
    problem.run(optimizer, 2)
    before, parameters = recorded(optimizer, problem), values(problem.parameters)
    tasks = {"tasks": problem.tasks} if form == "tasks" else {}
    try:
        bo.check_hypergradient(optimizer, *problem.losses, **tasks, rtol=1e3, atol=1e3, repeats=2)
    except (bo.GradcheckError, ValueError) as error:  # no reference where the lower problem is not convex
        assert "reference" in str(error) or "without tasks" in str(error)  # noqa: PT017
    assert before == recorded(optimizer, problem)
    assert same(parameters, values(problem.parameters))


@each(("AID", "ITD", "F2SA", "SVRB"))
def test_checking_leaves_running_statistics(row):
    problem = BatchNormProblem(row)
    optimizer = problem.optimizer(short=True)
    problem.run(optimizer)
    before = problem.buffers()
    bo.check_hypergradient(optimizer, *problem.losses, rtol=1e3, atol=1e3, repeats=2)
    assert same(before, problem.buffers())


@each(lambda row: not row.variant)
def test_a_failed_step_leaves_running_statistics(row):
    """The running mean used to stay NaN for ever."""
    how = "nan" if row.name in FEW else "raise"
    problem = BatchNormProblem(row)
    optimizer = problem.optimizer(short=True, lower_batch=4, upper_batch=4)
    for _ in range(2):
        before = problem.buffers()
        problem.fails = ["lower", 1, how]
        with pytest.raises((KeyError, bo.NonFiniteError)):
            problem.run(optimizer)
        assert same(before, problem.buffers())
        problem.fails = None
        problem.run(optimizer)
        assert not same(before, problem.buffers())
        assert all(b.isfinite().all() for b in problem.buffers())


def test_an_anchor_of_bad_data_is_refused():
    """A NaN batch in the lower anchor of VRBO used to pass, and every later step raised."""
    problem, bad = Quadratic(n=4, m=2), []

    def lower(factor):
        return problem.lower() * factor

    data = bo.Objective(lower, [1.0, 1.1, 0.9])
    optimizer = bo.VRBO(problem.x, problem.y, lr=0.1, lower_lr=0.1, lower_steps=2, period=2, anchor_batches=3)
    optimizer.step(problem.upper, data)
    for k in range(3):
        data.data[k], kept = float("nan"), data.data[k]
        for _ in range(2):
            before = values(problem.x, problem.y)
            try:
                optimizer.step(problem.upper, data)
            except bo.NonFiniteError:
                bad.append(k)
                assert same(before, values(problem.x, problem.y))
        data.data[k] = kept
        optimizer.step(problem.upper, data)
    assert {*bad} == {0, 1, 2}


@each(lambda row: row.declared.tasks == "rows" and row.declared.random)
def test_a_failure_among_rows_leaves_the_clock(row):
    """Task ids of 32 bits used to raise while rows were written."""
    problem = row.quadratic(tasks=True)
    inner = problem.tasks

    class Short:
        sample = staticmethod(lambda n, generator: inner.sample(n, generator).int())
        lower, upper = inner.lower, inner.upper
        __len__ = inner.__len__

    optimizer = row(problem.x, problem.y, short=True, task_batch=2)
    problem.tasks = Short()
    problem.run(optimizer, 3)  # they are taken
    inner_upper, before = problem.upper, text_of(optimizer)

    def fails(batch):
        raise KeyError("no such sample")

    problem.upper = fails
    with pytest.raises(KeyError):
        problem.run(optimizer)
    assert before == text_of(optimizer)
    problem.upper = inner_upper
    problem.run(optimizer)


@each(FEW)
@pytest.mark.parametrize("case", ["rate", "update"])
def test_a_failure_in_the_update_of_x_leaves_y(row, case, monkeypatch):
    """The random numbers that the update has drawn are restored too."""
    problem = row.quadratic()
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer, 1)
    before, parameters = recorded(optimizer, problem), values(problem.x, problem.y)
    if case == "rate":
        rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "fast"
        with pytest.raises((TypeError, ValueError)):
            problem.run(optimizer)
        optimizer.param_groups[0]["lr"] = rate
    else:

        def fails(x, gradient, given):
            torch.rand(1, generator=given.generator)
            raise ArithmeticError

        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "update", fails)
            with pytest.raises(ArithmeticError):
                problem.run(optimizer)
            problem_gradients = [p.grad for p in problem.x]
            with pytest.raises(ArithmeticError):
                optimizer.step()
            assert problem_gradients == [p.grad for p in problem.x]
    assert before == recorded(optimizer, problem)
    assert same(parameters, values(problem.x, problem.y))


def test_a_rate_that_does_not_fit_the_type_changes_nothing():
    x, y = (torch.ones(2, dtype=torch.float16, requires_grad=True) for _ in range(2))
    optimizer = bo.FirstOrder([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    optimizer.param_groups[0]["lr"] = 1e300
    with pytest.raises((RuntimeError, ValueError)):
        optimizer.step(lambda: (x * y).sum(), lambda: (y - x).square().sum())
    assert torch.equal(y, torch.ones(2, dtype=torch.float16))
    assert not owned(optimizer.state_dict())["steps_done"]


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_parameters_that_overlap_are_refused(level):
    plain = torch.ones(3, requires_grad=True)
    expanded = torch.zeros(1).expand(3).requires_grad_()
    base = torch.zeros(5)
    views = [base[:3].requires_grad_(), base[2:].requires_grad_()]
    for bad in ([expanded], views):
        pair = {"upper": [plain], "lower": [plain.detach().clone().requires_grad_()], level: bad}
        with pytest.raises(ValueError, match="memory"):
            bo.AID(pair["upper"], pair["lower"], lr=0.1, lower_lr=0.1, lower_steps=1)
    halves = [base[:3].detach().requires_grad_(), base[3:].detach().requires_grad_()]
    bo.AID([plain], halves, lr=0.1, lower_lr=0.1, lower_steps=1)


# ---------------------------------------------------------------------------------------------------- loading


def owned(state):
    """Return the entries of a state dict that are not tensors of the parameters."""
    return torch.load(io.BytesIO(state["param_groups"][0]["bilevel"]), weights_only=True)


def encoded(own):
    file = io.BytesIO()
    torch.save(own, file)
    return file.getvalue()


@each(FEW)
def test_an_invalid_state_is_refused_and_not_loaded(row):
    problem = row.quadratic()
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer, 2)
    state = optimizer.state_dict()
    first, *rest = state["param_groups"]
    own = owned(state)
    bad = [None, [], 3, {}, {"state": {}, "param_groups": []}, {**state, "param_groups": [first]}]
    for key in ("state", "param_groups"):
        bad.append({k: v for k, v in state.items() if k != key})
        bad.append({**state, key: None})
    for entry in (None, b"", b"no state", encoded({})):
        bad.append({**state, "param_groups": [{**first, "bilevel": entry}, *rest]})
    for key in ("method", "steps_done", "oracle_counts", "numbers", "generator", "options", "shapes", "kept"):
        part = encoded({k: v for k, v in own.items() if k != key})
        bad.append({**state, "param_groups": [{**first, "bilevel": part}, *rest]})
    wider = copy.deepcopy(state)
    widened = [name for entries in wider["state"].values() for name in entries if "." not in name and name != "step"]
    for entries in wider["state"].values():
        for name, value in entries.items():
            entries[name] = torch.cat([value, value], -1) if value.dim() else value
    bad += [wider] if widened else []
    before, parameters = recorded(optimizer, problem), values(problem.x, problem.y)
    for wrong in bad:
        with pytest.raises((ValueError, TypeError)):
            optimizer.load_state_dict(wrong)
        assert before == recorded(optimizer, problem)
        assert same(parameters, values(problem.x, problem.y))


def test_a_state_of_other_parameters_is_refused():
    """It used to be broadcast."""
    small, large = Quadratic(n=1, m=1), Quadratic(n=4, m=2)
    optimizers = [
        bo.AID(p.x, p.y, lr=0.1, lower_lr=0.1, lower_steps=2, lower_optimizer=torch.optim.Adam) for p in (small, large)
    ]
    for p, optimizer in zip((small, large), optimizers, strict=True):
        p.run(optimizer)
    before = text_of(optimizers[1])
    with pytest.raises(ValueError, match="shape"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert before == text_of(optimizers[1])


@pytest.mark.parametrize(
    ("cls", "saved", "own"),
    [
        (bo.F2SA, {"order": 2}, {"order": 4}),
        (bo.F2SA, {"order": 1}, {"order": 2}),
        (bo.RSVRB, {"variant": "exact_mean"}, {"variant": "self_normalised"}),
        (bo.RSVRB, {"variant": "self_normalised"}, {"variant": "exact_mean"}),
        (bo.RSVRB, {"variant": "matrix_free"}, {"variant": "self_normalised"}),
        (bo.RSVRB, {"variant": "self_normalised"}, {"variant": "matrix_free"}),
        (bo.RSVRB, {"variant": "exact_mean"}, {"variant": "matrix_free"}),
        (bo.BSVRB, {"version": 1}, {"version": 2}),
    ],
)
def test_a_state_of_another_variant_is_refused(cls, saved, own):
    rows = cls is not bo.F2SA
    problem = Tasks(m=3, rows=True) if rows else Quadratic(n=4, m=2)
    given = {"lr": 0.1, "lower_lr": 0.1, **({"task_batch": 2, "generator": seeded()} if rows else {"lower_steps": 2})}
    source, target = (cls(problem.x, problem.y, **given, **options) for options in (saved, own))
    problem.run(source, 2)
    state = source.state_dict()
    before = text_of(target)
    with pytest.raises(ValueError, match="another variant"):
        target.load_state_dict(state)
    assert before == text_of(target)
    problem.run(target)


@pytest.mark.parametrize("state", [None, [], {}, {"position": "1"}, {"generator": torch.zeros(3)}])
def test_an_invalid_position_is_refused(state):
    data = DataLoader(torch.arange(6.0), batch_size=2, shuffle=True, generator=seeded())
    for objective in (bo.Objective(lambda b: b.sum(), data), bo.FiniteSum(lambda b: b, [1, 2], generator=seeded())):
        objective.draw()
        before = str(objective.state_dict())
        if state == {} or not isinstance(state, dict) or "generator" not in state or "FiniteSum" not in repr(objective):
            with pytest.raises(ValueError, match="the state is not that of"):
                objective.load_state_dict(state)
        assert before == str(objective.state_dict())


# ---------------------------------------------------------------------------------------------------- elsewhere


@pytest.mark.parametrize("own", [True, False])
def test_a_closure_that_raises_leaves_no_perturbation(own):
    x = torch.ones(3, requires_grad=True)
    generator = seeded() if own else None
    optimizer = bo.RestartedAGD([x], lr=0.1, perturbation=0.1, generator=generator)

    def closure():
        torch.rand(1)
        raise ArithmeticError

    before = str([text_of(optimizer), torch.get_rng_state().sum()])
    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert before == str([text_of(optimizer), torch.get_rng_state().sum()])
    assert torch.equal(x, torch.ones(3))


def test_two_optimizers_in_two_threads_keep_their_running_statistics():
    """With the hook of the first steps, one used to restore the other's."""
    ends, errors = {}, []

    def work(seed, steps):
        try:
            torch.manual_seed(0)  # for both: the default generator is one
            X = torch.randn(12, 4, generator=seeded(seed))
            net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
            for p in net.parameters():
                p.data = torch.randn(p.shape, generator=seeded(seed))
            x = torch.zeros(1, requires_grad=True)
            loss = lambda: (net(X) - x).square().mean()  # noqa: E731
            for _ in range(steps):
                optimizer = bo.F2SA([x], net.parameters(), lr=0.1, lower_lr=0.01, lower_steps=2, vectorize=False)
                optimizer.step(loss, lambda: loss() + 0.1 * sum(p.square().sum() for p in net.parameters()))
            ends[threading.current_thread().name, seed] = [b.clone() for b in net.buffers()]
        except BaseException as error:
            errors.append(error)

    for seed in (1, 2):
        work(seed, 8)
    threads = [threading.Thread(target=work, args=(seed, 8), name=f"t{seed}") for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for seed in (1, 2):
        assert same(ends["MainThread", seed], ends[f"t{seed}", seed])


def test_a_second_interrupt_waits_for_the_writes_too():
    from bilevel_optim.optimizer.transaction import make

    made, interrupts = [], [KeyboardInterrupt, KeyboardInterrupt]

    def write(number):
        if number and interrupts:
            raise interrupts.pop()
        made.append(number)

    with pytest.raises(KeyboardInterrupt):
        make([partial(write, number) for number in range(4)])
    assert made == [0, 1, 2, 3]


@each(("AID", "F2SA", "SVRB", "PRAHGD"))
def test_an_interrupt_while_a_step_is_written_waits(row, monkeypatch):
    """Tries every place of the writing in turn; the step is completed."""
    reference, problem = row.quadratic(), row.quadratic()
    optimizers = [row(p.x, p.y, short=True, lower_optimizer=torch.optim.Adam) for p in (reference, problem)]
    expected, optimizer = optimizers
    torch.manual_seed(0)
    reference.run(expected, 2)
    torch.manual_seed(0)
    problem.run(optimizer, 2)
    from bilevel_optim.optimizer import transaction

    places = [
        (bo.Vector, "copy_"),
        *((transaction, name) for name in ("remember", "remember_solver")),
    ]
    interruptions = set()
    for owner, name in places:
        for when in ("before", "after"):
            inner, hits = getattr(owner, name), []

            def interrupted(*arguments, inner=inner, name=name, when=when, hits=hits):
                hits.append(1)
                interruptions.add(name)
                if when == "before" and len(hits) == 1:
                    raise KeyboardInterrupt
                result = inner(*arguments)
                if when == "after" and len(hits) == 1:
                    raise KeyboardInterrupt
                return result

            state = torch.get_rng_state()
            reference.run(expected)
            torch.set_rng_state(state)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                try:
                    problem.run(optimizer)
                except KeyboardInterrupt:
                    pass
                else:
                    assert not hits
            assert same(values(reference.x, reference.y), values(problem.x, problem.y))
            assert text_of(expected) == text_of(optimizer)
    assert {"copy_", "remember"} <= interruptions


# An interrupt in a callback of a weak reference is lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_time_leaves_a_whole_step_or_none():
    """Timed signals arrive between any two lines; no mode of torch stays on."""
    problem = Quadratic(n=4, m=2)
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.01, lower_lr=0.1, lower_steps=2, normalize=False)
    problem.run(optimizer)
    twin = Quadratic(n=4, m=2)
    other = bo.F2SA(twin.x, twin.y, lr=0.01, lower_lr=0.1, lower_steps=2, normalize=False)
    twin.run(other)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    try:
        for k in range(60):
            done = owned(optimizer.state_dict())["steps_done"]
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-4 + 8e-5 * k)
                problem.run(optimizer)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            except RuntimeError as error:  # torch's vmap ends a level that it had not begun when it was interrupted
                if not isinstance(error.__context__, KeyboardInterrupt):
                    raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert torch._C._len_torch_function_stack() == torch._C._functorch.get_dynamic_layer_stack_depth() == 0
            assert torch.is_grad_enabled()
            for _ in range(owned(optimizer.state_dict())["steps_done"] - done):
                twin.run(other)
            assert same(values(problem.x, problem.y), values(twin.x, twin.y))
            assert text_of(optimizer) == text_of(other)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 3


STARTS = {
    "lower_init": lambda y: {"lower_init": lambda: [t * 0 + 0.5 for t in y]},
    "lower_solver": lambda y: {"lower_solver": lambda: [t.detach().add_(0.25) for t in y]},
}


@pytest.mark.filterwarnings("ignore:y after lower_solver is not a solution")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("when", ["written", "failed"])
def test_an_interrupt_keeps_or_undoes_the_start_with_the_step(start, when, monkeypatch):
    """y used to be put back although x and the state were those after the step."""
    problem, twin = Quadratic(n=4, m=2), Quadratic(n=4, m=2)
    optimizers = [
        bo.AID(p.x, p.y, lr=0.01, lower_lr=0.1, lower_steps=2, **STARTS[start]([*p.y])) for p in (problem, twin)
    ]
    for p, optimizer in zip((problem, twin), optimizers, strict=True):
        p.run(optimizer)
    inner, hits = bo.Vector.copy_, []
    passed = [start] if start == "lower_init" else []  # y is written once before the step

    def interrupted(*arguments):
        hits.append(1)
        raise KeyboardInterrupt if when == "written" and len(hits) == 1 else ArithmeticError

    def once(*arguments):
        if hits or (passed and passed.pop()):
            return inner(*arguments)
        return interrupted(*arguments)

    monkeypatch.setattr(bo.Vector, "copy_", once)
    with pytest.raises(KeyboardInterrupt if when == "written" else ArithmeticError):
        problem.run(optimizers[0])
    monkeypatch.undo()
    assert hits
    if when == "written":
        twin.run(optimizers[1])
    assert same(values(problem.x, problem.y), values(twin.x, twin.y))
    assert text_of(optimizers[0]) == text_of(optimizers[1])


@pytest.mark.parametrize("cls", [bo.F2SA, bo.PZOBO, bo.ITD])
@pytest.mark.parametrize("name", ["_vmap_increment_nesting", "_vmap_decrement_nesting"])
def test_an_interrupt_in_vmap_is_an_interrupt(cls, name, monkeypatch):
    """torch raised another error, which a step took for a loss that vmap cannot evaluate, or passed on."""
    from torch._functorch import vmap

    options = {"generator": seeded()} if cls is bo.PZOBO else {}
    x, y = (torch.full((2,), 0.5, requires_grad=True) for _ in range(2))
    optimizer = cls([x], [y], lr=0.01, lower_lr=0.1, lower_steps=2, **options)
    tasks = bo.TensorTasks(torch.randn(3, 2, generator=seeded()))
    losses = lambda t: (y - t).square().sum() + x.sum(), lambda t: (y - x * t).square().sum()
    optimizer.step(*losses, tasks=tasks)
    calls, inner = [0, 0], getattr(vmap, name)

    def counted(*arguments):
        calls[0] += 1
        if calls[0] == calls[1]:
            raise KeyboardInterrupt
        return inner(*arguments)

    monkeypatch.setattr(vmap, name, counted)
    monkeypatch.setattr(stacks, name, counted)
    optimizer.step(*losses, tasks=tasks)
    total, before = calls[0], (values([x]), values([y]), text_of(optimizer))
    assert total
    for k in range(1, total + 1):
        calls[:] = 0, k
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(*losses, tasks=tasks)
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
        after = values([x]), values([y]), text_of(optimizer)
        assert all(same(a, b) if isinstance(a, list) else a == b for a, b in zip(after, before, strict=True))
    calls[:] = 0, 0
    optimizer.step(*losses, tasks=tasks)
    assert "vectorize_fallback" not in optimizer.diagnostics


def test_a_level_of_vmap_that_was_left_on_is_ended_before_a_step():
    """Steps took it for normal, and left it on; random numbers outside then failed."""
    problem = Quadratic(n=4, m=2)
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.01, lower_lr=0.1, lower_steps=2, normalize=False)
    torch._C._functorch._vmap_increment_nesting(2, "error")
    problem.run(optimizer)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    torch.randn(2)


@pytest.mark.parametrize("name", ["AID", "ITD", "F2SA"])
def test_a_step_within_a_loss_of_another_one_ends_no_level_of_vmap(name):
    """From the second step on, when the other optimizer evaluates its tasks by a vmap of its own."""

    def run(within):
        x, y, a, b = (torch.full((2,), 0.5, requires_grad=True) for _ in range(4))
        inner = bo.AID([a], [b], lr=0.1, lower_lr=0.1, lower_steps=2)

        def lower(target):
            if within:
                inner.step(lambda: b.square().sum(), lambda: (b - a).square().sum())
            return (y - x * target).square().sum()

        optimizer = getattr(bo, name)([x], [y], lr=0.01, lower_lr=0.1, lower_steps=2)
        tasks = bo.TensorTasks(torch.arange(6.0).reshape(3, 2))
        losses = [optimizer.step(lambda t: (y - t).square().sum() + x.sum(), lower, tasks=tasks) for _ in range(3)]
        assert "vectorize_fallback" not in optimizer.diagnostics
        return [*losses, *values([x]), *values([y])]

    torch.testing.assert_close(run(True), run(False))


def test_vmap_levels_left_on_by_an_interrupt_are_ended():
    """The interrupt comes between a level of vmap and the block that would end it."""
    problem = Quadratic(n=4, m=2)
    optimizer = bo.F2SA(problem.x, problem.y, lr=0.01, lower_lr=0.1, lower_steps=2, normalize=False)
    problem.run(optimizer)

    def interrupted(*_):
        torch._C._functorch._vmap_increment_nesting(2, "error")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(lambda: problem.x[0].sum(), interrupted)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    problem.run(optimizer)


@each(FEW[:-1])
@pytest.mark.parametrize("source", ["own", "default", "list"])
def test_a_failed_step_draws_no_data_and_no_random_numbers(row, source):
    """The run continues as if the step had not been tried."""

    def run(fails):
        problem = row.cleaning("batches")
        torch.manual_seed(0)
        if row.declared.data != "finite_sum":
            loader = {
                "own": DataLoader(problem.index, 8, shuffle=True, generator=seeded(3)),
                "default": DataLoader(problem.index, 8, shuffle=True),
                "list": list(problem.index.split(8)),
            }[source]
            problem.objectives = [bo.Objective(o.loss, loader) for o in problem.objectives]
        problem.dropout = 0.3
        optimizer = row(problem.x, problem.y, short=True, **({} if row.declared.random else {"generator": seeded(1)}))
        for k in range(3):
            for level, when in (("upper", 1), ("lower", 1)) if fails and k else ():
                problem.fails = [[level, when, "raise"]]
                with pytest.raises(KeyError):
                    problem.run(optimizer)
                problem.fails = []
            problem.run(optimizer)
        return values(problem.parameters), optimizer.oracle_counts

    a, b = run(False), run(True)
    assert same(a[0], b[0])
    assert a[1] == b[1]


def test_a_failed_first_step_discards_its_findings():
    """Findings about the losses are discarded, because other losses may follow."""
    x, y, z = (torch.ones(2, requires_grad=True) for _ in range(3))
    optimizer = bo.AID([x], [y, z], lr=0.1, lower_lr=0.1, lower_steps=2)

    def failing():
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(failing, lambda: ((y - x).square() + z.square()).sum())
    with pytest.raises(ValueError, match="does not depend on lower parameter 1"):
        optimizer.step(lambda: y.square().sum(), lambda: (y - x).square().sum())

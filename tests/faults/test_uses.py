"""Crashes and unhelpful messages in ordinary use."""

import math
import random
import warnings
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bilevel_optim as bo
from bilevel_optim.problem.parameters import overlapping, overlaps_itself

from ..problems import Tasks, close, same, seeded, values
from ..registry import each


@pytest.fixture
def elsewhere():
    """A default device on which nothing can be computed; parameters and data stay on theirs."""

    def on(make):
        def run(*arguments, **options):
            torch.set_default_device("meta")
            try:
                return make(*arguments, **options)
            finally:
                torch.set_default_device(None)

        return run

    return on


@each(("AID", "AID-minres", "F2SA", "ESMAML", "PZOBO", "PRAHGD", "RTMLMC", "SVRB", "RSVRB", "GDA"))
def test_the_default_device_need_not_be_that_of_the_parameters(row, elsewhere):
    def run(problem, optimizer):
        for _ in range(2):
            problem.run(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        problem.run(optimizer)
        return values(problem.x, problem.y)

    ends = []
    for device in (lambda make: make, elsewhere):
        torch.manual_seed(0)
        problem = row.quadratic(tasks=row.takes_tasks)
        ends.append(device(run)(problem, row(problem.x, problem.y, short=True)))
    assert same(*ends)


@each(("RTMLMC",))
def test_the_default_type_need_not_be_that_of_the_parameters(row):
    """The start of the power iteration, and with it the smoothness, was drawn in the default type."""
    ends = []
    for kind in (torch.float64, torch.float32):
        torch.manual_seed(0)
        problem = row.quadratic(tasks=True)
        optimizer = row(problem.x, problem.y, short=True)
        torch.set_default_dtype(kind)
        try:
            problem.run(optimizer, 3)
        finally:
            torch.set_default_dtype(torch.float64)
        ends.append(values(problem.x, problem.y))
    assert same(*ends)


@each(("AID-direct",))
def test_anomaly_detection_leaves_no_loop_behind(row):
    """A backward pass that looks for NaN cannot be batched; all later steps of the run were looped, too."""
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        problem = row.quadratic()
        optimizer = row(problem.x, problem.y, short=True)
        problem.run(optimizer)
        with torch.autograd.set_detect_anomaly(on):
            problem.run(optimizer)
        reason = optimizer.diagnostics.get("vectorize_fallback")
        assert reason is None or (on and "anomaly detection is on" in reason)
        problem.run(optimizer)
        assert "vectorize_fallback" not in optimizer.diagnostics
        ends.append(values(problem.x, problem.y))
    for one, other in zip(*ends, strict=True):
        close(one, other, 1e-12)


class Labelled(torch.Tensor):
    """A subclass that results of operations inherit."""


@each(("AID", "F2SA", "SOBA", "PZOBO", "RAHGD", "MRBO", "GDA"))
def test_data_of_a_subclass_leave_no_trace_in_gradients_and_state(row, tmp_path):
    """A state with such tensors was not loaded by ``torch.load``, which knows only torch's own."""
    ends = []
    for kind in (torch.Tensor, Labelled):
        problem = row.cleaning()
        problem.X, problem.Xv = problem.X.as_subclass(kind), problem.Xv.as_subclass(kind)
        optimizer = row(problem.x, problem.y, short=True)
        loss = problem.run(optimizer, 2)
        assert type(loss) is torch.Tensor
        assert all(type(t.grad) in (torch.Tensor, type(None)) for t in problem.x)
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))
        ends.append(values(problem.x, problem.y))
    assert same(*ends)


def test_checking_does_not_mind_the_default_device(elsewhere):
    x, y = (torch.full((2,), v, requires_grad=True) for v in (2.0, 0.0))
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.5, lower_steps=3)
    losses = [lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2]
    report = elsewhere(bo.check_hypergradient)(optimizer, *losses, rtol=1e3)
    assert report.bias >= 0


@pytest.mark.parametrize("big", [1e200, float("inf")])
def test_a_ceiling_of_derivatives_out_of_range(big):
    """Their squares were not finite: nothing but NaN was left of them, or the decomposition failed."""
    x, y = torch.tensor([1.0, 0.5], requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = bo.SVRB([x], [y], lr=0.1, lower_lr=0.1, ceilings={"V": 1.0})
    losses = [lambda: (y - 1).square().sum() / 2, lambda: y.square().sum() / 2 + big * (x * y).sum()]
    if big == float("inf"):
        with pytest.raises(bo.NonFiniteError):
            optimizer.step(*losses)
    else:
        optimizer.step(*losses)
        close(x.grad, torch.ones(2), 1e-12)  # -V H^-1 v with V in the ball, which is the identity there
        assert optimizer.diagnostics["projected_V"] == 1


def test_rows_that_are_forgotten_do_not_spoil_the_mean():
    """With a weight of 1 their Hessian went to zero, and the mean was NaN, for which the rates were blamed."""
    ends = []
    for dtype in (torch.float64, torch.float32):
        problem = Tasks(m=30, rows=True, dtype=dtype)
        options = {"variant": "exact_mean", "beta": 1.0, "beta_unit": "absolute", "generator": seeded(1)}
        optimizer = bo.RSVRB(problem.x, problem.y, lr=0.02, lower_lr=0.02, task_batch=2, **options)
        for _ in range(40):
            problem.run(optimizer)
        ends.append(problem.x[0].detach().double())
    close(*ends, 1e-3)


@each(("SVRB", "RSVRB", "BSVRB", "STABLE"))
@pytest.mark.parametrize("over", [True, False])
def test_a_floor_above_the_curvature_is_warned_about(row, over):
    problem = row.quadratic(tasks=True)
    optimizer = row(problem.x, problem.y, short=True, floor=1e3 if over else 1e-3)
    with pytest.warns(bo.BilevelWarning, match="floor=1000 is above") if over else nullcontext():
        problem.run(optimizer)
    assert bool(optimizer.diagnostics["projected_H"]) == over


def apart():
    """Return x, y, and both losses, with the solution y = x."""
    x, y = (torch.full((2,), v, requires_grad=True) for v in (2.0, 0.0))
    return x, y, lambda: (y - 1).square().sum() / 2, lambda: (y - x).square().sum() / 2


@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.PZOBO])
def test_a_loss_with_wrong_arguments_gets_advice(cls):
    x, y, upper, lower = apart()
    optimizer = cls([x], [y], lr=0.1, lower_lr=0.5, lower_steps=2)

    def of_a_batch(batch):
        return lower() * batch

    with pytest.raises(TypeError, match=r"takes a batch, but has no data: pass bo\.Objective\(of_a_batch, data\)"):
        optimizer.step(upper, of_a_batch)
    with pytest.raises(
        TypeError, match=r"does not take one argument .* without data and tasks the loss is called without arguments"
    ):
        optimizer.step(upper, bo.Objective(lower, [1.0]))
    with pytest.raises(TypeError, match="does not take one argument"):
        optimizer.step(upper, of_a_batch, tasks=bo.TensorTasks(torch.ones(2, 1)))

    def of_two(inputs, labels):
        return lower() * inputs

    with pytest.raises(TypeError, match=r"apart in the loss: def of_two\(batch\): inputs, labels = batch"):
        optimizer.step(upper, bo.Objective(of_two, [(1.0, 2.0)]))

    def of_three(batch):
        inputs, _labels, _index = batch
        return lower() * inputs.sum()

    data = [(torch.ones(4, 3, dtype=torch.float32), torch.ones(4, dtype=torch.int64))]
    with pytest.raises(ValueError, match="not enough values to unpack") as caught:
        optimizer.step(upper, bo.Objective(of_three, data))
    note = "This was in the loss of_three, on a batch of 2 parts: float32 (4, 3), int64 (4,)."
    assert caught.value.__notes__ == [note]

    def wrong_within():
        return lower() + len(3)

    with pytest.raises(TypeError, match="has no len"):
        optimizer.step(upper, wrong_within)


def test_an_instance_where_a_class_is_wanted():
    x, y, *_ = apart()
    with pytest.raises(ValueError, match=r"Invalid lower_optimizer value: SGD(.|\n)*pass the class, or a function"):
        bo.AID([x], [y], lr=0.1, lower_lr=0.5, lower_steps=2, lower_optimizer=torch.optim.SGD([y], lr=0.1))


@each(lambda row: not row.variant)
def test_a_missing_argument_is_one_of_the_method(row):
    """For MAML, the message used to name ITD."""
    problem = row.quadratic()
    with pytest.raises(TypeError, match=f"^{row.cls.__name__}: missing a required(.*) argument: 'lr'"):
        row.cls(problem.x, problem.y, lower_lr=0.1, **({"lower_steps": 1} if row.cls.declared.lower_steps else {}))


@pytest.mark.parametrize("method", [bo.AID, bo.F2SA])
def test_an_empty_batch_is_not_a_matter_of_the_rates(method):
    x, y, _, lower = apart()
    nothing = torch.zeros(0)
    optimizer = method([x], [y], lr=0.1, lower_lr=0.5, lower_steps=2)
    with pytest.raises(bo.NonFiniteError, match=r"Look at the data first \(the mean over an empty batch is NaN"):
        optimizer.step(lambda: (y.sum() - nothing).mean(), lower)


ROOTS = {
    "norm": (lambda y: y.norm() ** 2, "The loss calls norm().*y.square().sum()"),
    "sqrt": (lambda y: y.square().sum().sqrt() ** 2, "The loss calls sqrt()"),  # its gradient too
    "others": (lambda y: y.abs().pow(1.5).sum(), "no finite second derivative at this point"),
}


@pytest.mark.parametrize("kind", ROOTS)
@pytest.mark.parametrize("method", [bo.StocBiO, bo.ITD])
def test_a_derivative_that_is_nan_at_zero_is_not_a_matter_of_the_data(method, kind):
    """After the first step, which remembers what it found, too."""
    x, y = torch.zeros((), requires_grad=True), torch.ones(3, requires_grad=True)
    root, message = ROOTS[kind]
    optimizer = method([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)

    def step():
        optimizer.step(lambda: (y - 1).square().sum(), lambda: (y * x).sum() + root(y))

    for _ in range(kind == "norm"):
        step()
    with torch.no_grad():
        y.zero_()
        x.zero_()
    message = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(bo.NonFiniteError, match=message):
        step()


WEIGHTED = {
    "cross_entropy": (lambda w, z: F.cross_entropy(z, torch.arange(3), weight=w), "weight=.*weight\\[target\\]"),
    "pos_weight": (
        lambda w, z: F.binary_cross_entropy_with_logits(z, z.detach().sign().relu(), pos_weight=w),
        "pos_weight=.*logsigmoid",
    ),
    "multi_margin": (lambda w, z: F.multi_margin_loss(z, torch.arange(3), weight=w), "weight=.*unreduced loss"),
}


@pytest.mark.parametrize("kind", WEIGHTED)
@pytest.mark.parametrize("method", [bo.AID, bo.F2SA])
@pytest.mark.parametrize("tasks", [None, bo.TensorTasks(torch.randn(2, 4, 3, 3, dtype=torch.float64))])
def test_weights_of_a_loss_that_are_parameters(method, kind, tasks):
    x, y = torch.ones(3, requires_grad=True), torch.eye(3).requires_grad_()
    (lower, message), optimizer = WEIGHTED[kind], method([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    with pytest.raises(RuntimeError, match="a loss passes a parameter as " + message):
        optimizer.step(lambda *_: y.square().sum(), lambda *b: lower(x, b[0][0] @ y if b else y), tasks=tasks)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_scheduler_goes_on_after_backward_and_the_step_of_another_optimizer(compiled):
    """It used to warn that it was called before ``optimizer.step()``."""
    x, y, upper, lower = apart()
    optimizer, adam = bo.SOBA([x], [y], lr=0.1, lower_lr=0.5), torch.optim.Adam([x], lr=0.1)
    if compiled:
        optimizer.compile(backend="eager")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        optimizer.backward(upper, lower)
        adam.step()
        scheduler.step()
    assert optimizer.param_groups[1]["lr"] == 0.125


def test_numbers_of_other_libraries():
    numpy = pytest.importorskip("numpy")
    ends = []
    for steps, rate in ((3, 0.1), (numpy.int64(3), numpy.float32(0.1))):
        x, y, upper, lower = apart()
        optimizer = bo.AID([x], [y], lr=rate, lower_lr=0.5, lower_steps=steps)
        optimizer.step(upper, lower)
        optimizer.load_state_dict(optimizer.state_dict())
        ends.append(x.detach())
    close(*ends, 1e-7)
    with pytest.raises(ValueError, match="Invalid scale value: -1"):
        bo.PZOBO([x], [y], lr=0.1, lower_lr=0.5, lower_steps=2, scale=-1)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "0.1"])
@pytest.mark.parametrize("level", [0, 1])
def test_a_rate_that_is_none(level, rate):
    """NaN used to be written to x; a group's rate may be set at any time."""
    x, y, upper, lower = apart()
    names = ("lr", "lower_lr")
    with pytest.raises(ValueError, match=f"Invalid (learning rate|{names[level]} value): {rate!r}"):
        bo.AID([x], [y], **{"lr": 0.1, "lower_lr": 0.5, names[level]: rate}, lower_steps=2)
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.5, lower_steps=2)
    optimizer.param_groups[level]["lr"] = rate
    before = values([x, y])
    with pytest.raises(ValueError, match=f"Invalid learning rate: {rate!r} "):
        optimizer.step(upper, lower)
    assert same(before, values([x, y]))


def test_a_floor_without_a_bound_and_complex_parameters_are_refused():
    """They used to be accepted, and to write non-finite values or a wrong gradient."""
    x, y, *_ = apart()
    with pytest.raises(ValueError, match="Invalid floor value: inf"):
        bo.SVRB([x], [y], lr=0.1, lower_lr=0.1, floor=float("inf"))
    for level in (0, 1):
        parts = [[x], [y]]
        parts[level] = [torch.zeros(2, dtype=torch.complex64, requires_grad=True)]
        with pytest.raises(
            ValueError, match=r"is complex, but only real tensors can be optimised; pass real = torch\.view_as_real"
        ):
            bo.SVRB(*parts, lr=0.1, lower_lr=0.1)


def test_a_method_of_one_loss_speaks_of_the_loss():
    """Its message used to name the lower one."""
    x, y, upper, _ = apart()
    optimizer = bo.GDA([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    for loss, said in ((lambda: upper() * x, "must return a scalar"), (lambda: x.sum(), "does not depend on lower")):
        with pytest.raises(ValueError, match=f"^the loss {said}"):
            optimizer.step(loss)


@pytest.mark.parametrize("large", [False, True])
def test_large_convolutions_run_one_by_one_on_a_cpu(large):
    """Grouped convolutions take 1.2 to 1.5 times as long; only small ones gain."""
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 2, stride=2), torch.nn.Flatten(), torch.nn.LazyLinear(1))
    images, x = torch.randn(32, 1, 64 if large else 8, 64), torch.zeros(1, requires_grad=True)
    net(images)
    optimizer = bo.F2SA([x], net.parameters(), lr=0.1, lower_lr=0.01, lower_steps=1, order=4)
    for _ in range(2):
        optimizer.step(lambda: net(images).square().mean(), lambda: (net(images) - x).square().mean())
        reason = optimizer.diagnostics.get("vectorize_fallback", "")
        assert ("faster one by one" in reason) == large


def test_large_convolutions_in_features_run_one_by_one_too():
    """At the second look there is no graph of them, which is no reason to raise."""
    body, head = torch.nn.Conv2d(1, 1, 2, stride=2), torch.nn.LazyLinear(1)
    images = torch.randn(32, 1, 64, 64)
    head(body(images).flatten(1))
    optimizer = bo.PZOBO(body.parameters(), head.parameters(), lr=1e-3, lower_lr=1e-3, lower_steps=2, smoothing=1e-2)
    lower = bo.Objective(lambda part: head(part).square().mean(), features=lambda: body(images).flatten(1))
    optimizer.step(lambda: (head(body(images).flatten(1)) - 1).square().mean(), lower)
    assert "faster one by one" in optimizer.diagnostics["vectorize_fallback"]


def test_progress_is_shown_on_a_terminal_only(capfd):
    """Otherwise it floods logs."""
    running = pytest.importorskip("recipes.common.running")
    assert list(running.progress(range(3), "steps")) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    others = [p for p in Path(running.__file__).parents[1].rglob("*.py") if "import tqdm" in p.read_text()]
    assert [p.name for p in others] == ["running.py"]


@pytest.mark.parametrize("size", [False, 2])
@each(("ITD", "MAML"))
def test_tasks_that_are_not_evaluated_at_once_are_finished_one_after_another(row, size):
    """The graphs of all tasks used to be kept, so that memory grew with their number."""
    ends, seen = [], []
    for vectorize in (size, True):
        torch.manual_seed(0)
        problem, numbers = row.quadratic(tasks=True), {}
        f, g = problem.losses

        def noted(loss, problem=problem, numbers=numbers):
            def called(batch):
                if not torch._C._functorch.is_batchedtensor(next(iter(tree_leaves(batch)))):
                    key = float(next(iter(tree_leaves(batch))).sum())
                    seen.append(numbers.setdefault(key, len(numbers)))
                return loss(batch)

            return called

        options = {"vectorize": vectorize, "tasks_per_step": 5, "generator": seeded(3)}
        optimizer = row(problem.x, problem.y, short=True, **options)
        for _ in range(2):
            seen.clear()
            optimizer.step(f, noted(g), tasks=problem.tasks)
        if vectorize is False:
            assert sum(a != b for a, b in pairwise(seen)) < 5 < len(seen)  # each of five by itself
        ends.append([*values(problem.x, problem.y), optimizer.diagnostics["lower_residual"]])
    for one, other in zip(*ends, strict=True):
        close(one, other, 1e-12)


class Operators(TorchDispatchMode):
    """Records the operators that run, and their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((str(func), args))
        return func(*args, **(kwargs or {}))


@each(("GDA", "SOBA", "AID", "ITD", "F2SA", "FirstOrder"))
def test_a_step_checks_its_tensors_with_euclidean_norms(row):
    """A norm of infinite order takes ten times as long on a CPU; small problems took twice their oracles' time."""
    problem = row.quadratic()
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer, 2)
    with Operators() as step:
        problem.run(optimizer)
    norms = [args for name, args in step.calls if "norm" in name]
    assert norms
    assert not [args for args in norms if any(isinstance(a, float) and math.isinf(a) for a in args)]


def test_a_small_step_runs_fewer_operators_of_its_own_than_its_losses_do():
    x, y = torch.zeros(3, requires_grad=True), [torch.zeros(4, requires_grad=True) for _ in range(2)]

    def loss():
        return x.square().sum() - sum((part - x.sum()).square().sum() + (part * part.sin()).sum() for part in y)

    optimizer = bo.GDA([x], y, lr=0.1, lower_lr=0.1, lower_steps=1)
    for _ in range(2):
        optimizer.step(loss)
    with Operators() as step:
        optimizer.step(loss)
    with Operators() as by_hand:  # one gradient: x and y are moved from the same point
        torch.autograd.grad(loss(), [x, *y])
    assert len(step.calls) < 2 * len(by_hand.calls), [name for name, _ in step.calls]


@pytest.mark.parametrize("steps", [2, 6])
@each(("ITD", "ITD-checkpoint", "MAML", "ANIL"))
def test_unrolled_steps_share_their_features(row, steps):
    """The body used to be evaluated, kept and differentiated for every lower step."""
    torch.manual_seed(0)
    body, images = torch.nn.Linear(3, 4), torch.randn(5, 3)
    head = torch.zeros(4, requires_grad=True)
    start = [head.detach().clone().requires_grad_()] if row.declared.initial else []
    calls = {"evaluated": 0, "differentiated": 0}

    def features():
        part = body(images).tanh()
        calls["evaluated"] += 1
        if part.requires_grad:
            part.register_hook(lambda gradient: calls.update(differentiated=calls["differentiated"] + 1))
        return part

    lower = bo.Objective(lambda part: (part @ head - 1).square().mean() + head.square().sum(), features=features)
    optimizer = row([*body.parameters(), *start], [head], lower_steps=steps)
    for _ in range(2):  # the first step looks at the features once more
        calls.update(evaluated=0, differentiated=0)
        optimizer.step(lambda: (body(images).tanh() @ head).square().mean(), lower)
    assert calls == {"evaluated": 1, "differentiated": 1}


# ------------------------------------------------------------------------------------------------ shared memory


@pytest.mark.parametrize("groups", [False, True])
def test_shared_memory_is_looked_for_in_linear_time(groups, monkeypatch):
    """Every tensor used to be compared with every other: 3.5 s for 2,000 of them."""
    asked = [0]
    address = torch.Tensor.data_ptr

    def counted(t):
        asked[0] += 1
        return address(t)

    x, y = ([torch.zeros(2, requires_grad=True) for _ in range(300)] for _ in range(2))
    if groups:
        x, y = ([{"params": [p]} for p in some] for some in (x, y))
    monkeypatch.setattr(torch.Tensor, "data_ptr", counted)
    bo.SOBA(x, y, lr=0.1, lower_lr=0.1)
    assert asked[0] <= 10 * len([*x, *y])


@pytest.mark.parametrize(
    ("upper", "lower", "named"),
    [
        ([(0, 9)], [(3, 4)], "lower parameter 0 of shape"),
        ([(3, 4), (9, 12)], [(10, 11), (0, 9)], "lower parameter 0"),
        ([(0, 3), (3, 6)], [(6, 9), (9, 12), (8, 10)], "lower parameter 2"),
        ([(0, 12), (2, 3)], [(12, 14)], "upper parameter 1"),
        ([(0, 3), (6, 9)], [(3, 6), (9, 9), (4, 4), (9, 12)], None),
    ],
)
def test_parameters_that_share_memory_are_refused(upper, lower, named):
    memory = torch.zeros(14)
    x, y = ([memory[a:b].detach().requires_grad_() for a, b in parts] for parts in (upper, lower))
    if named is None:
        bo.SOBA(x, y, lr=0.1, lower_lr=0.1)
        return
    with pytest.raises(ValueError, match=f"{named}.* shares memory with another parameter"):
        bo.SOBA(x, y, lr=0.1, lower_lr=0.1)


def test_a_group_that_is_added_shares_no_memory():
    memory, other = torch.zeros(8), torch.zeros(2)
    x, y = ([memory[a:b].detach().requires_grad_()] for a, b in ((0, 2), (2, 5)))
    optimizer = bo.SOBA(x, y, lr=0.1, lower_lr=0.1)
    for params in ([memory[4:6].detach()], [("head", memory[1:2].detach())], [other, other[1:]]):
        with pytest.raises(ValueError, match="shares memory with another parameter"):
            optimizer.add_param_group({"params": params, "level": "lower"})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": memory[5:8].detach().requires_grad_(), "level": "lower"})


def brute_force(tensors):
    """Return the indices of tensors that share a byte with one of a lower index, and of those that repeat one."""
    seen, found, repeated = set(), [], []
    for i, t in enumerate(tensors):
        offsets = [0]
        for size, stride in zip(t.shape, t.stride(), strict=True):
            offsets = [o + k * stride for o in offsets for k in range(size)]
        own = [t.data_ptr() + o * t.element_size() + b for o in offsets for b in range(t.element_size())]
        found += [i] if seen & {*own} else []
        repeated += [i] if len({*own}) < len(own) else []
        seen |= {*own}
    return found, repeated


def test_overlaps_of_strided_tensors_are_exact():
    """Against sets of all addresses: random strides, offsets and types on one memory."""
    draw, results = random.Random(0), Counter()
    for _ in range(300):
        memory, tensors = torch.zeros(96, dtype=torch.uint8), []
        for _ in range(draw.randint(2, 4)):
            kind = draw.choice([torch.uint8, torch.int16, torch.float32])
            shape = [draw.randint(0 if draw.random() < 0.1 else 1, 4) for _ in range(draw.randint(0, 3))]
            strides = [draw.randint(0, 5) for _ in shape]
            last = sum(s * max(n - 1, 0) for s, n in zip(strides, shape, strict=True))
            room = len(memory) // kind.itemsize - last
            if room > 0:
                tensors.append(memory.view(kind).as_strided(shape, strides, draw.randrange(room)))
        found, repeated = brute_force(tensors)
        assert overlapping(tensors) == found
        assert [i for i, t in enumerate(tensors) if overlaps_itself(t)] == repeated
        results[bool(found)] += 1
        results["repeated"] += len(repeated)
    assert min(results[True], results[False], results["repeated"]) > 30


STRIDED = {
    "columns": lambda b: (b[:, 0:2], b[:, 1:3]),
    "transposed": lambda b: (b.t(), b),
    "every second": lambda b: (b.reshape(-1)[0:8:2], b.reshape(-1)[0:4]),
    "windows": lambda b: (b.reshape(-1)[8:], b.reshape(-1)[:8].unfold(0, 4, 2)),
}


@pytest.mark.parametrize("views", STRIDED)
def test_views_that_are_not_contiguous_share_memory_too(views):
    x, y = (t.detach().requires_grad_() for t in STRIDED[views](torch.randn(4, 4)))
    with pytest.raises(ValueError, match=r"shares? .*memory"):
        bo.AID([x], [y], lr=0.1, lower_lr=0.5, lower_steps=2)


@pytest.mark.parametrize("cls", [bo.AID, bo.F2SA, bo.ITD])
def test_views_that_interleave_are_separate(cls):
    r"""g = |y - x|^2 / 2 + |y|^2 / 2, so y* = x / 2; f = |y - 1|^2 / 2, so dF = (x / 2 - 1) / 2."""
    memory = torch.randn(4, 4, dtype=torch.float64)
    x, y = (memory[:, part].detach().requires_grad_() for part in (slice(0, 4, 2), slice(1, 4, 2)))
    before = x.detach().clone()
    optimizer = cls([x], [y], lr=0.1, lower_lr=0.5, lower_steps=40)
    for _ in range(2):
        optimizer.backward(lambda: (y - 1).square().sum() / 2, lambda: ((y - x).square().sum() + y.square().sum()) / 2)
    assert torch.equal(x, before)
    torch.testing.assert_close(x.grad, (before / 2 - 1) / 2, rtol=1e-3, atol=1e-3)


def test_a_start_may_exchange_the_lower_tensors():
    y = [torch.full((2,), value, requires_grad=True) for value in (1.0, 2.0)]
    x = torch.zeros(2, requires_grad=True)
    optimizer = bo.SOBA([x], y, lr=0.0, lower_lr=1e-9, lower_init=lambda: y[::-1])
    optimizer.step(lambda: sum(t.sum() for t in y), lambda: sum((t - x).square().sum() for t in y))
    assert [float(t.detach().mean().round()) for t in y] == [2.0, 1.0]


def test_a_group_may_be_an_iterator():
    """The checks used to exhaust the iterator, which left the group empty."""
    optimizer = bo.SOBA(*([torch.zeros(1, requires_grad=True)] for _ in range(2)), lr=0.1, lower_lr=0.1)
    optimizer.add_param_group({"params": torch.nn.Linear(2, 2).parameters(), "level": "lower"})
    assert len(optimizer.param_groups[-1]["params"]) == 2


@pytest.mark.filterwarnings("error")
def test_with_warnings_as_errors_a_step_is_made_or_not():
    """A warning about the course of a run comes after its step, which is whole; the run can go on."""
    ends = []
    for raises in (False, True):
        x, y = (torch.full((2,), v, dtype=torch.float64, requires_grad=True) for v in (2.0, 0.0))
        optimizer = bo.AID([x], [y], lr=1e-11, lower_lr=0.5, lower_steps=2, lower_optimizer=torch.optim.Adam)
        warned = 0
        while optimizer.oracle_counts["upper_grad"] < 30:
            with warnings.catch_warnings():
                warnings.simplefilter("error" if raises else "ignore", bo.BilevelWarning)
                try:
                    optimizer.step(lambda y=y: (y - 1).square().sum(), lambda x=x, y=y: (y - x).square().sum())
                except bo.BilevelWarning:
                    warned += 1
        assert warned == raises
        ends.append([x.detach(), y.detach(), *optimizer.state[y].values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))

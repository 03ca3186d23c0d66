"""A compiled step finds its state at known places, and looks anew when something else has changed than values."""

import copy

import pytest
import torch
from torch._dynamo.mutation_guard import GenerationTracker

import bilevel_optim as bo
from bilevel_optim.compiled import program, reading
from bilevel_optim.compiled.forms import DataForm

from ..problems import seeded


def made(compiled):
    x, y = (torch.randn(2, 3, generator=seeded(k), dtype=torch.float32).requires_grad_() for k in (1, 2))
    adam = torch.optim.Adam
    optimizer = bo.SOBA([x], [y], lr=0.01, upper_optimizer=adam, lower_optimizer=lambda groups: adam(groups, lr=0.05))
    if compiled:
        optimizer.compile(backend="eager")

    def step():
        return optimizer.step(lambda: (y - 1).square().sum(), lambda: ((y - x).square() * (1 + y.square())).sum())

    return optimizer, x, y, step


def transposed(optimizer, x, y):
    """Other strides."""
    for p in (x, y):
        for name, value in optimizer.state[p].items():
            if value.dim() == 2:
                optimizer.state[p][name] = value.t().contiguous().t()


def cast(optimizer, x, y):
    for p in (x, y):
        p.data, p.grad = p.data.double(), None


def loaded(optimizer, x, y):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def zeroed(optimizer, x, y):
    """Other tensors of the same form."""
    for p in (x, y):
        optimizer.state[p] = {name: value * 0.5 for name, value in optimizer.state[p].items()}


def deleted(optimizer, x, y):
    optimizer.state[y].pop(next(name for name in optimizer.state[y] if not name.startswith("lower_optimizer.")))


def emptied(optimizer, x, y):
    optimizer.state.clear()


def rated(optimizer, x, y):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@pytest.mark.usually("transposed", "loaded", "emptied", "rated")
@pytest.mark.parametrize("change", [transposed, cast, loaded, zeroed, deleted, emptied, rated])
def test_changes_of_the_state_between_steps_count_as_in_eager_steps(change):
    ends = []
    for compiled in (False, True):
        optimizer, x, y, step = made(compiled)
        for _ in range(7):
            step()
        graphs = optimizer.captured_graphs
        assert (graphs > 0) is compiled
        change(optimizer, x, y)
        losses = [float(step())]
        if compiled and change in (transposed, cast):
            assert optimizer.captured_graphs == graphs + 1  # one for each form, from the first step on
        losses += [float(step()) for _ in range(5)]
        assert "compile_fallback" not in optimizer.diagnostics
        ends.append([*losses, *x.flatten().tolist(), *y.flatten().tolist()])
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)


@pytest.mark.usually("MRBO")
@pytest.mark.parametrize("method", [bo.MRBO, bo.SUSTAIN])
def test_gradients_may_be_changed_in_place(method):
    ends = []
    for changed in (False, True):
        torch.manual_seed(0)
        x, y = (torch.randn(3, generator=seeded(k)).requires_grad_() for k in (1, 2))
        optimizer = method([x], [y], lr=0.01, lower_lr=0.1, linear_steps=1)
        optimizer.compile(backend="eager")
        for _ in range(8):
            optimizer.step(lambda y=y: (y - 1).square().sum(), lambda x=x, y=y: ((y - x).square() * (1 + y**2)).sum())
            if changed:
                x.grad.zero_()
        assert optimizer.captured_graphs
        ends.append([*x.tolist(), *y.tolist()])
    assert ends[0] == ends[1]


def test_both_losses_are_looked_at_in_one_look(monkeypatch):
    """It tells what each of them reads; that both read one tensor is noticed."""
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        x, y = (torch.randn(3, generator=seeded(k)).requires_grad_() for k in (1, 2))
        weights = {"upper": torch.tensor(0.5), "lower": torch.tensor(0.8)}

        def upper(y=y, weights=weights):
            return weights["upper"] * (y - 1).square().sum()

        def lower(x=x, y=y, weights=weights):
            return weights["lower"] * (y - x).square().sum()

        optimizer, alone = bo.SOBA([x], [y], lr=0.01, lower_lr=0.1), []
        if compiled:
            optimizer.compile(backend="eager")
            look = program._look
            monkeypatch.setattr(program, "_look", lambda *own, look=look, alone=alone: alone.append(1) or look(*own))
        losses = [optimizer.step(upper, lower) for _ in range(8)]
        assert not alone
        weights["upper"] = weights["lower"]
        losses += [optimizer.step(upper, lower) for _ in range(8)]
        assert bool(alone) is compiled
        ends.append([*x.tolist(), *y.tolist(), *map(float, losses)])
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_the_gradient_of_a_sum_is_clipped_in_place():
    """A graph returns it as an expanded tensor, whose entries share one number in memory."""
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = bo.FirstOrder([x], [y], lr=0.1, lower_lr=0.1, lower_steps=1)
    optimizer.compile(backend="eager")
    for _ in range(6):
        optimizer.backward(lambda: x.sum() + (y - 1).square().sum(), lambda: (y - x).square().sum() / 2)
        x.grad[0] = 0
        torch.nn.utils.clip_grad_norm_([x], 1.0)
        assert x.grad.tolist() == pytest.approx([0, 2**-0.5, 2**-0.5], rel=1e-5)
    assert optimizer.captured_graphs == 1


@pytest.mark.parametrize("method", [bo.SOBA, bo.AID])
def test_a_step_is_traced_once(method, monkeypatch):
    """Its losses are read before, on the first of their batches; a trace that asked for them would begin again."""
    traced, whole = [], program.StepReader._traced
    monkeypatch.setattr(program.StepReader, "_traced", lambda *given: traced.append(1) or whole(*given))
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = method([x], [y], lr=0.1, lower_lr=0.1, **({"lower_steps": 2} if method is bo.AID else {}))
    optimizer.compile(backend="eager")
    lower = bo.Objective(lambda batch: (batch * (y - x).square()).sum(), [torch.ones(3), torch.ones(3) * 2])
    for _ in range(4):
        optimizer.step(lambda: (y - 1).square().sum(), lower)
    assert optimizer.captured_graphs == len(traced) == 1


class Scored(torch.autograd.Function):
    """The inner product, whose gradient is the other factor itself."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return (x * factor).sum()

    @staticmethod
    def backward(ctx, slope):
        return ctx.saved_tensors[0], None


def test_a_gradient_that_is_a_tensor_of_the_user_is_a_copy():
    (x, y), factor = (torch.ones(3, requires_grad=True) for _ in range(2)), torch.arange(1.0, 4.0)
    optimizer = bo.FirstOrder([x], [y], lr=0.0, lower_lr=0.1, lower_steps=1)
    optimizer.compile(backend="eager")
    for _ in range(5):
        optimizer.backward(lambda: Scored.apply(x, factor) + (y - 1).square().sum(), lambda: (y - x).square().sum() / 2)
        assert x.grad.tolist() == [1.0, 2.0, 3.0]
        x.grad.zero_()
    assert factor.tolist() == [1.0, 2.0, 3.0]
    assert optimizer.captured_graphs == 1


def test_a_look_counts_for_cuda_graphs_and_heeds_a_stance(monkeypatch):
    """As calls of what torch.compile returns; it counts once CUDA is in use."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    optimizer, _, _, step = made(True)
    for _ in range(4):
        step()
    before = GenerationTracker.generation
    for _ in range(3):
        step()
    assert GenerationTracker.generation >= before + 3
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.warns(bo.BilevelWarning, match="torch.compile is switched off"),
    ):
        step()
    assert "switched off" in optimizer.diagnostics["compile_fallback"]


def test_an_interrupt_as_guards_are_asked_leaves_dynamo_as_it_was(monkeypatch):
    inner, calls = reading.set_eval_frame, []

    def interrupted(callback):
        before = inner(callback)
        calls.append(callback)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return before

    monkeypatch.setattr(reading, "set_eval_frame", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reading.look(lambda: None)
    left = inner(None)
    assert left is None
    assert len(calls) == 1


def test_a_tensor_that_is_there_twice_has_the_form_of_each_place():
    """Torch's guards refuse such a list, so each tensor is looked at once."""
    a, b = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    form = DataForm.of([a.clone(), a.clone(), b])
    assert form.tensors_of([a, a, b]) == [a, a, b]
    for others in ([b, b, b], [a, a, a], [a, b, b], [a, a], [a, a, b.float()]):
        assert form.tensors_of(others) is None

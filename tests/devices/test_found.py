"""Regressions that appeared on accelerators only."""

import io
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bilevel_optim as bo
from bilevel_optim.problem import random

from ..problems import flat, seeded
from ..registry import ROWS, each
from .problems import placed, results
from .simulated import DEVICE, NAME, from_device, shared_randomness, tf32


class Dropped:
    """A quadratic lower loss with dropout, which notes the masks."""

    def __init__(self):
        self.x, self.y = (torch.linspace(0.5, 1, 8, device=DEVICE).requires_grad_() for _ in range(2))
        self.masks = []

    def lower(self):
        mask = F.dropout(torch.ones(8, device=DEVICE), 0.5)
        self.masks.append(from_device(mask).tolist())
        return (mask * (self.y - self.x)).square().sum() + self.y.square().sum()

    def upper(self):
        return self.y.sum()


@pytest.mark.parametrize("options", [{"hvp": "finite-difference"}, {}], ids=["differences", "exact"])
def test_a_sample_keeps_the_random_numbers_of_the_device(options):
    """All evaluations on it have one mask; another sample has another."""
    problem = Dropped()
    optimizer = bo.AID([problem.x], [problem.y], lr=0.1, lower_lr=0.1, lower_steps=1, linear_steps=3, **options)
    optimizer.step(problem.upper, problem.lower)
    first, *rest = [mask for i, mask in enumerate(problem.masks) if i == 0 or mask != problem.masks[i - 1]]
    assert len(rest) == 1, "two samples, one of the lower step and one of the linear system"
    assert first != rest[0]


def test_a_failed_step_leaves_the_random_numbers_of_the_device():
    problem = Dropped()
    optimizer = bo.AID([problem.x], [problem.y], lr=0.1, lower_lr=0.1, lower_steps=1)
    before = torch.simgpu.get_rng_state()
    with pytest.raises(bo.NonFiniteError):
        optimizer.step(lambda: problem.upper() * float("nan"), problem.lower)
    assert torch.equal(torch.simgpu.get_rng_state(), before)
    optimizer.step(problem.upper, problem.lower)
    assert not torch.equal(torch.simgpu.get_rng_state(), before)


def test_random_numbers_that_cannot_be_replayed_are_refused(monkeypatch):
    monkeypatch.setattr(random, "_own_state", lambda kind: None)
    problem = Dropped()
    optimizer = bo.AID([problem.x], [problem.y], lr=0.1, lower_lr=0.1, lower_steps=1, hvp="finite-difference")
    with pytest.raises(RuntimeError, match="random state of devices of type 'simgpu' cannot be read"):
        optimizer.step(problem.upper, problem.lower)


def test_modules_without_a_device_to_choose(monkeypatch):
    """A device module like `torch.mps`, whose functions take no device."""
    state = [torch.zeros(3)]
    module = type("mps", (), {})()
    module.get_rng_state, module.set_rng_state = lambda: state[0], lambda new: state.__setitem__(0, new)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    random._own_state.cache_clear()
    try:
        with random.preserve_rng(torch.device("mps")):
            state[0] = torch.ones(3)
        assert torch.equal(state[0], torch.zeros(3))
    finally:
        monkeypatch.undo()
        random._own_state.cache_clear()


ADAMS = {
    "plain": {},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True},
    "fused": {"fused": True},
}
LOWER = ("AID", "F2SA", "PZOBO", "ITD", "MAML", "SOBA")


@pytest.mark.parametrize("kind", list(ADAMS))
@each(LOWER)
def test_lower_adam_in_all_its_forms(row, kind):
    """Makes the steps of plain Adam on the CPU, and goes on after a checkpoint that went over the CPU."""

    def make(on_device, options):
        problem = row.quadratic(n=4, m=2)
        problem = placed(problem) if on_device else problem
        optimizer = row(problem.x, problem.y, short=True, lower_optimizer=lambda g: torch.optim.Adam(g, **options))
        return problem, optimizer

    torch.set_default_dtype(torch.float32)  # as fused Adam counts its steps
    problem, plain = make(False, {})
    problem.run(plain, 4)
    options = ADAMS[kind]
    other, optimizer = make(True, options)
    other.run(optimizer, 2)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), other.x, other.y), file)
    for where in ("cpu", NAME, None):
        file.seek(0)
        state, x, y = torch.load(file, map_location=where)
        again, resumed = make(True, options)
        with torch.no_grad():
            for mine, theirs in zip([*again.x, *again.y], [*x, *y], strict=True):
                mine.copy_(theirs)
        resumed.load_state_dict(state)
        again.run(resumed, 2)
        for mine, theirs in zip([*again.x, *again.y], [*problem.x, *problem.y], strict=True):
            torch.testing.assert_close(from_device(mine), theirs.detach(), rtol=2e-5, atol=2e-5)  # powers of a float32


@pytest.mark.parametrize("name", ["STABLE", "SVRB", "RSVRB", "BSVRB"])
def test_rows_may_be_kept_on_the_host(name):
    row = next(row for row in ROWS if row.name == name)
    ends = []
    for options in ({}, {"state_device": "cpu"}):
        problem = placed(row.quadratic(tasks=True))
        optimizer = row(problem.x, problem.y, **options)
        problem.run(optimizer, 3)
        ends.append([from_device(t) for t in (*problem.x, *problem.y)])
        kept = [t.device for entries in optimizer.state.values() for n, t in entries.items() if n.startswith("rows.")]
        assert {*kept} == {torch.device(options.get("state_device", DEVICE))}
    for with_device, with_host in zip(*ends, strict=True):
        torch.testing.assert_close(with_host, with_device)


@each(("AID", "RAHGD", "SVRB", "RTMLMC"))
def test_a_checkpoint_of_another_device_can_be_loaded(row, monkeypatch):
    """A checkpoint of an absent device loads with its entire state, and so do those from and to the CPU."""

    def make(on_device):
        problem = row.quadratic()
        problem = placed(problem) if on_device else problem
        return problem, row(problem.x, problem.y, short=True)

    problem, optimizer = make(True)
    problem.run(optimizer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.serialization, "location_tag", lambda storage: f"{NAME}:3" if storage.device == DEVICE else "cpu"
        )
        elsewhere = optimizer.state_dict()
    ends = []
    for on_device, state in ((True, optimizer.state_dict()), (True, elsewhere), (False, elsewhere)):
        again, resumed = make(on_device)
        with torch.no_grad():
            for mine, theirs in zip([*again.x, *again.y], [*problem.x, *problem.y], strict=True):
                mine.copy_(from_device(theirs))
        resumed.load_state_dict(state)
        assert resumed._run_state.last_loss.device == again.x[0].device
        with shared_randomness():
            loss = again.run(resumed, 1)
        ends.append(results(again, resumed, loss))
    for end in ends[1:]:
        assert end.keys() == ends[0].keys()
        for name, value in ends[0].items():
            torch.testing.assert_close(end[name], value, rtol=1e-9, atol=1e-9, equal_nan=True)


class Convolved:
    """A network with a penalty on each of its tensors, of one precision."""

    def __init__(self, dtype):
        generator = seeded(0)

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 1)).to(dtype)
        for parameter in self.model.parameters():
            parameter.data = 0.2 * random(*parameter.shape)
        self.data, self.target, self.x = (
            random(16, 1, 8, 8),
            random(16),
            torch.zeros(4, dtype=dtype, requires_grad=True),
        )
        self.y = [*self.model.parameters()]

    def lower(self):
        size = sum(w.exp() * p.square().sum() for w, p in zip(self.x, self.y, strict=True))
        return (self.model(self.data).squeeze(1) - self.target).square().mean() + size

    def upper(self):
        return self.model(self.data).square().mean()

    def hypergradient(self, **options):
        optimizer = bo.AID([self.x], self.y, lr=0.0, lower_lr=0.05, lower_steps=3, linear_steps=5, **options)
        optimizer.backward(self.upper, self.lower)
        return from_device(self.x.grad).double()


def test_differences_warn_of_convolutions_in_less_than_single_precision():
    """CUDA computes them this way by default."""
    options = {"hvp": "finite-difference"}
    with torch.backends.cudnn.flags(allow_tf32=False):
        placed(Convolved(torch.float32)).hypergradient(**options)
    placed(Convolved(torch.float32)).hypergradient()
    placed(Convolved(torch.float64)).hypergradient(**options)
    with pytest.warns(bo.BilevelWarning, match="allow_tf32 = False"):
        placed(Convolved(torch.float32)).hypergradient(**options)


def test_differences_lose_accuracy_by_rounding_of_tensor_cores():
    """With rounding as tensor cores make it."""
    exact, errors = Convolved(torch.float64).hypergradient(), []
    for rounded in (False, True):
        problem = placed(Convolved(torch.float32))
        with torch.backends.cudnn.flags(allow_tf32=False), tf32() if rounded else nullcontext():
            found = problem.hypergradient(hvp="finite-difference")
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] > 2 * errors[0]


def test_f2sa_warns_of_convolutions_in_less_than_single_precision():
    problem = placed(Convolved(torch.float32))
    optimizer = bo.F2SA([problem.x], problem.y, lr=0.0, lower_lr=0.05, lower_steps=3, nu=1e-3)
    with torch.backends.cudnn.flags(allow_tf32=False):
        optimizer.step(problem.upper, problem.lower)
    with pytest.warns(bo.BilevelWarning, match="TF32"):
        optimizer.step(problem.upper, problem.lower)


def test_advice_about_recurrent_layers_of_cudnn():
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.square().sum()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError(
                "derivative for '_cudnn_rnn_backward' is not implemented: Double backwards is not supported for CuDNN "
                "RNNs due to limitations in the CuDNN API"
            )

    x, y = (torch.ones(2, device=DEVICE, requires_grad=True) for _ in range(2))
    optimizer = bo.AID([x], [y], lr=0.1, lower_lr=0.1, lower_steps=0)
    with pytest.raises(RuntimeError, match=r"flags\(enabled=False\)"):
        optimizer.step(lambda: y.sum(), lambda: Fused.apply(y - x))


def test_generators_of_either_device(monkeypatch):
    """A method draws the same numbers for the same seed of a generator on one device."""
    for row in (row for row in ROWS if row.name in ("PAID", "PRAGDA", "iMCN")):
        for generator in (seeded(3), torch.Generator(DEVICE).manual_seed(3), None):
            problem = placed(row.quadratic(n=4, m=2))
            optimizer = row(problem.x, problem.y, short=True, generator=generator)
            problem.run(optimizer, 2)
            assert flat(problem.x).isfinite().all()

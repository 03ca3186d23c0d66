"""Data for losses on an accelerator: where they are, and how they get there."""

import pytest
import torch

import bilevel_optim as bo

from ..problems import values
from .simulated import DEVICE, NAME, from_device, to_device, watch

ROWS = torch.linspace(0, 1, 24).view(6, 4)


class Fit:
    """Rows that a vector is to be like, with a weight."""

    def __init__(self, device):
        self.x, self.y = torch.zeros(1), torch.zeros(4)
        if device == DEVICE:
            self.x, self.y = to_device(self.x), to_device(self.y)
        self.parameters = [self.x.requires_grad_(), self.y.requires_grad_()]

    def training(self, batch):
        return (self.y - batch["rows"]).square().mean() + self.x.exp().sum() * self.y.square().sum()

    def validation(self, batch):
        return (self.y - batch["rows"]).square().mean()

    def optimizer(self):
        return bo.AID([self.x], [self.y], lr=0.1, lower_lr=0.1, lower_steps=2, linear_steps=2)

    def objectives(self, data, **options):
        return bo.Objective(self.validation, data, **options), bo.Objective(self.training, data, **options)


def batches(pinned=False):
    rows = [{"rows": rows, "name": "some"} for rows in ROWS.split(2)]
    return [{**batch, "rows": batch["rows"].pin_memory()} for batch in rows] if pinned else rows


def test_advice_about_data_on_the_host():
    """The error has the loss, the batch, and the argument that helps; nothing has changed."""
    problem = Fit(DEVICE)
    optimizer = problem.optimizer()
    before = values(problem.parameters)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as raised:
        optimizer.step(*problem.objectives(batches()))
    assert "the batch of the loss training is on cpu (tensors of shape (2, 4)), but" in str(raised.value)
    assert "bo.Objective(training, data, device='simgpu:0')" in str(raised.value)
    assert "pin_memory=True" in str(raised.value)
    assert all(torch.equal(from_device(a), from_device(b)) for a, b in zip(before, problem.parameters, strict=True))
    with pytest.raises(RuntimeError, match="the batch of the loss validation is on cpu"):
        optimizer.step(problem.objectives(batches())[0], lambda: (problem.y - 1).square().sum())


def test_other_errors_of_a_loss_are_its_own():
    problem = Fit(DEVICE)

    def broken(batch):
        raise RuntimeError("sizes do not match")

    with pytest.raises(RuntimeError, match=r"^sizes do not match") as raised:
        problem.optimizer().step(bo.Objective(broken, batches()), bo.Objective(broken, batches()))
    assert str(raised.value) == "sizes do not match"


@pytest.mark.filterwarnings("ignore:steps run eagerly")  # the one whose batch is made of parts
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "captured"])
def test_an_objective_moves_its_batches(compiled):
    """To the device; with steps, runs and accumulated batches as on the CPU."""
    ends = []
    for device, options in (
        ("cpu", {}),
        (DEVICE, {"device": NAME}),
        (DEVICE, {"device": DEVICE, "non_blocking": True}),
    ):
        problem = Fit(device)
        optimizer = problem.optimizer()
        if compiled:
            optimizer.compile(backend="eager")
        upper, lower = problem.objectives(batches(pinned="non_blocking" in options), **options)
        for _ in range(3):
            optimizer.step(upper, lower)
        optimizer.run(upper, lower, steps=4)
        optimizer.step(upper, bo.Objective(problem.training, batches(), accumulate=2, device=options.get("device")))
        assert len(lower.samples()) == 3
        assert lower.samples()[0].batch["rows"].device == problem.y.device
        ends.append([from_device(t.detach()) for t in problem.parameters])
    for end in ends[1:]:
        for mine, theirs in zip(end, ends[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_pinned_batches_go_up_without_waiting():
    """Two lower steps, a linear system and a gradient of the upper loss: four batches."""
    problem = Fit(DEVICE)
    for pinned, expected in ((False, (1, 4, 0)), (True, (1, 0, 4))):
        optimizer = problem.optimizer()
        losses = problem.objectives(batches(pinned), device=DEVICE, non_blocking=pinned)
        optimizer.step(*losses)
        with watch() as seen:
            optimizer.step(*losses)
        assert seen.counts == expected, seen.report()


def test_checking_a_hypergradient_there():
    problem = Fit(DEVICE)
    upper, lower = problem.objectives([{"rows": to_device(ROWS)}])
    optimizer = bo.AID([problem.x], [problem.y], lr=0.1, lower_lr=0.3, lower_steps=60, linear_steps=10)
    state = torch.simgpu.get_rng_state()
    report = bo.check_hypergradient(optimizer, upper, lower, rtol=1e-3, atol=1e-3)
    assert report.relative_error < 1e-3
    assert torch.equal(torch.simgpu.get_rng_state(), state)
